package rpc

import (
	"context"
	"errors"
	"syscall"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/ashlar-csi/ashlar/internal/runbook"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// table is the only place where errors become gRPC codes (CSI specification, Error Scheme, and the tables of each call). The first row that matches counts.
//
// To Kubernetes a code also says whether the work may still be going on: it may after Canceled, DeadlineExceeded, Unavailable, Aborted (and, for the
// provisioner, ResourceExhausted). After all others the work is over.
var table = []struct {
	err  error
	code codes.Code
}{
	{context.Canceled, codes.Canceled},
	{context.DeadlineExceeded, codes.DeadlineExceeded},
	{errdefs.ErrBusy, codes.Aborted},
	{errdefs.ErrBadToken, codes.Aborted},
	{errdefs.ErrInvalid, codes.InvalidArgument},
	{errdefs.ErrNotFound, codes.NotFound},
	{errdefs.ErrExists, codes.AlreadyExists},
	{errdefs.ErrOutOfRange, codes.OutOfRange},
	{errdefs.ErrNoSpace, codes.ResourceExhausted},
	{errdefs.ErrLimit, codes.ResourceExhausted},
	{errdefs.ErrInUse, codes.FailedPrecondition},
	{errdefs.ErrPrecondition, codes.FailedPrecondition},
	{errdefs.ErrUnsupported, codes.FailedPrecondition},
	{errdefs.ErrDataLoss, codes.DataLoss},
	{errdefs.ErrUnavailable, codes.Unavailable},
	// Errors of system calls that have no sentinel: a resource has run out, or the filesystem is read-only.
	{syscall.ENOSPC, codes.ResourceExhausted},
	{syscall.EDQUOT, codes.ResourceExhausted},
	{syscall.EROFS, codes.Unavailable},
	{syscall.ENOMEM, codes.Unavailable},
	{syscall.EMFILE, codes.Unavailable},
	{syscall.ENFILE, codes.Unavailable},
	{syscall.EAGAIN, codes.Unavailable},
}

// Code returns the gRPC code of an error: that of table, or the one that it has as a gRPC status, or Internal.
func Code(err error) codes.Code {
	if err == nil {
		return codes.OK
	}
	for _, row := range table {
		if errors.Is(err, row.err) {
			return row.code
		}
	}
	if s, ok := status.FromError(err); ok { // an error of gRPC itself: an unknown method, a message too large
		return s.Code()
	}
	return codes.Internal
}

// runbooks are the errors that last until a person has done something, with their reasons in package runbook. Kubernetes shows the message of a call in the
// events of the claim or the pod, which is all that their owner sees, so the message names the page of the runbook.
var runbooks = []struct {
	err    error
	reason string
}{
	{errdefs.ErrNoSpace, "NoSpace"},
	{errdefs.ErrDataLoss, "DataLoss"},
}

func toStatus(err error) error {
	if err == nil {
		return nil
	}
	message := err.Error()
	for _, row := range runbooks {
		if errors.Is(err, row.err) {
			message = runbook.See(message, row.reason)
			break
		}
	}
	return status.Error(Code(err), message)
}
