package cluster

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// reasons says which reason stands for which error in objects. An error has the reason of the first row that it matches; a reason stands for the error of
// the first row that has it.
var reasons = []struct {
	err    error
	reason string
}{
	{errdefs.ErrInvalid, "Invalid"},
	{errdefs.ErrNotFound, "NotFound"},
	{errdefs.ErrExists, ReasonExists},
	{errdefs.ErrOutOfRange, "OutOfRange"},
	{errdefs.ErrNoSpace, "NoSpace"},
	{errdefs.ErrLimit, "Limit"},
	{errdefs.ErrInUse, "InUse"},
	{errdefs.ErrPrecondition, "Precondition"},
	{errdefs.ErrBadToken, "BadToken"},
	{errdefs.ErrUnsupported, "Unsupported"},
	{errdefs.ErrDataLoss, ReasonDataLoss},
	{errdefs.ErrBusy, "Busy"},
	{errdefs.ErrUnavailable, "Unavailable"},
	{syscall.ENOSPC, "NoSpace"},
	{syscall.EDQUOT, "NoSpace"},
}

const (
	// internal is the reason for errors that match no row.
	internal = "Internal"
	// ReasonDataLoss is the reason for errdefs.ErrDataLoss.
	ReasonDataLoss = v1alpha1.ReasonDataLoss
	// ReasonExists is the reason for errdefs.ErrExists.
	ReasonExists = "Exists"
)

// mostMessage is how many bytes of a message are written into an object.
const mostMessage = 1024

// Limited returns a message as an object can hold it: valid UTF-8, cut after mostMessage bytes.
func Limited(message string) string {
	message = strings.ToValidUTF8(message, "?")
	if len(message) > mostMessage {
		return strings.ToValidUTF8(message[:mostMessage], "") + "..."
	}
	return message
}

// FailureOf returns a final error as it is written into an object. The end of a time limit (context.DeadlineExceeded) counts as errdefs.ErrUnavailable.
func FailureOf(err error) *v1alpha1.Failure {
	f := &v1alpha1.Failure{Reason: internal, Message: Limited(err.Error())}
	if errors.Is(err, context.DeadlineExceeded) {
		err = errdefs.ErrUnavailable // the node's own time limit is over: it has stopped
	}
	for _, row := range reasons {
		if errors.Is(err, row.err) {
			f.Reason = row.reason
			break
		}
	}
	return f
}

// ErrorOf returns the error that a node has written into an object: a *Refusal, which wraps the sentinel of its reason, if there is one.
func ErrorOf(node string, f *v1alpha1.Failure) error {
	for _, row := range reasons {
		if row.reason == f.Reason {
			return &Refusal{row.err, fmt.Sprintf("node %s: %s", node, f.Message)}
		}
	}
	return &Refusal{nil, fmt.Sprintf("node %s: %s", node, f.Message)}
}

// Refusal is an error that a node has written into an object. Its text is the node's, after the name of the node; the text of the sentinel is not put
// before it, as the node's text has that already.
type Refusal struct {
	sentinel error
	message  string
}

func (r *Refusal) Error() string { return r.message }

func (r *Refusal) Unwrap() error { return r.sentinel }
