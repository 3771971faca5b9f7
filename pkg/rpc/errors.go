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

// table is the one place where errors become gRPC codes (CSI specification, Error
// Scheme, and the tables of each call). The first row that matches counts.
//
// To Kubernetes a code also says whether the work may still be going on: Canceled,
// DeadlineExceeded, Unavailable, Aborted (and, for the provisioner, ResourceExhausted)
// mean that it may; all others mean that it is over.
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
	// What the system answers anywhere when it has run out of something, or takes nothing.
	{syscall.ENOSPC, codes.ResourceExhausted},
	{syscall.EDQUOT, codes.ResourceExhausted},
	{syscall.EROFS, codes.Unavailable},
	{syscall.ENOMEM, codes.Unavailable},
	{syscall.EMFILE, codes.Unavailable},
	{syscall.ENFILE, codes.Unavailable},
	{syscall.EAGAIN, codes.Unavailable},
}

// Code returns the gRPC code of an error: Internal if it is none of the list.
func Code(err error) codes.Code {
	if err == nil {
		return codes.OK
	}
	for _, row := range table {
		if errors.Is(err, row.err) {
			return row.code
		}
	}
	if s, ok := status.FromError(err); ok { // gRPC's own: an unknown method, a message too large
		return s.Code()
	}
	return codes.Internal
}

// runbooks are the reasons, as package runbook has them, of errors that stay until a person has done something. Kubernetes shows
// the message of a call in the events of the claim or the pod, which is all that their owner sees, so it leads on from there.
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
