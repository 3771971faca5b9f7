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

// reasons is the one table between errors and the words for them in objects. The first
// row that an error matches counts, and the first with a word is its error.
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
	// internal is the reason for errors that have no word.
	internal = "Internal"
	// ReasonDataLoss is the reason for errdefs.ErrDataLoss.
	ReasonDataLoss = v1alpha1.ReasonDataLoss
	// ReasonExists is the reason for errdefs.ErrExists.
	ReasonExists = "Exists"
)

// mostMessage is how much of a message is written down, in bytes.
const mostMessage = 1024

// Limited is a message as an object can hold it.
func Limited(message string) string {
	message = strings.ToValidUTF8(message, "?")
	if len(message) > mostMessage {
		return strings.ToValidUTF8(message[:mostMessage], "") + "..."
	}
	return message
}

// FailureOf writes a final error down.
func FailureOf(err error) *v1alpha1.Failure {
	f := &v1alpha1.Failure{Reason: internal, Message: Limited(err.Error())}
	if errors.Is(err, context.DeadlineExceeded) {
		err = errdefs.ErrUnavailable // the time that the node gives itself was over: it has stopped
	}
	for _, row := range reasons {
		if errors.Is(err, row.err) {
			f.Reason = row.reason
			break
		}
	}
	return f
}

// ErrorOf is the error that was written down.
func ErrorOf(node string, f *v1alpha1.Failure) error {
	for _, row := range reasons {
		if row.reason == f.Reason {
			return &Refusal{row.err, fmt.Sprintf("node %s: %s", node, f.Message)}
		}
	}
	return &Refusal{nil, fmt.Sprintf("node %s: %s", node, f.Message)}
}

// Refusal is an error of a node: its text, which begins with that of the sentinel
// somewhere, is as the node wrote it.
type Refusal struct {
	sentinel error
	message  string
}

func (r *Refusal) Error() string { return r.message }

func (r *Refusal) Unwrap() error { return r.sentinel }
