// Package errdefs is the closed list of what can go wrong below the CSI services. Every error
// that leaves a pool, a filesystem or a mount operation wraps exactly one of its sentinels
// (errors.Is), or a context error, or is an unexpected failure of the system. pkg/rpc has the one
// table that turns them into gRPC codes.
package errdefs

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// The sentinels.
var (
	// ErrInvalid: the request can never succeed as it stands.
	ErrInvalid = errors.New("invalid argument")
	// ErrNotFound: there is no such volume, snapshot, pool or node.
	ErrNotFound = errors.New("not found")
	// ErrExists: it is there already, but not as asked for.
	ErrExists = errors.New("already exists and differs")
	// ErrOutOfRange: the size asked for is one that can never be served; or a volume is to grow to it, and there is no room for that now.
	ErrOutOfRange = errors.New("size out of range")
	// ErrNoSpace: the pool cannot back what was asked for, now.
	ErrNoSpace = errors.New("not enough space")
	// ErrLimit: a count (volumes per node) is used up.
	ErrLimit = errors.New("limit reached")
	// ErrInUse: something still uses what was to be changed or removed.
	ErrInUse = errors.New("in use")
	// ErrPrecondition: something has to be done first, which the message says; a retry alone does not help.
	ErrPrecondition = errors.New("precondition not met")
	// ErrBusy: another operation on the same thing is under way; retry later.
	ErrBusy = errors.New("operation in progress")
	// ErrBadToken: a page token that this driver did not give out.
	ErrBadToken = errors.New("invalid page token")
	// ErrDataLoss: bytes or a record that should be there are gone or damaged.
	// Nothing is repaired, formatted or recreated behind the owner's back.
	ErrDataLoss = errors.New("data lost or damaged")
	// ErrUnavailable: the pool does not answer; what was asked may succeed later.
	ErrUnavailable = errors.New("unavailable")
	// ErrUnsupported: this pool, kernel or tool cannot do it.
	ErrUnsupported = errors.New("not supported")
)

// ErrUnknownCall is an ErrUnavailable: who was asked is of a version that does not know the call.
var ErrUnknownCall = fmt.Errorf("%w: the call is not known there", ErrUnavailable)

// Recast returns an error of one kind that was caused by another one, of which it has the words
// only: to who asked, it would mean something else.
func Recast(kind, cause error, format string, args ...any) error {
	return fmt.Errorf("%w: %s: %s", kind, fmt.Sprintf(format, args...), cause.Error())
}

// Words are those of an error without the names of its kinds, for where a reason beside them says what kind it is.
func Words(err error) string {
	text := err.Error()
	for _, kind := range Kinds(err) {
		text = strings.ReplaceAll(text, kind.Error()+": ", "")
	}
	return text
}

// IgnoreNotFound returns nil for ErrNotFound, and any other error as it is.
func IgnoreNotFound(err error) error {
	if errors.Is(err, ErrNotFound) {
		return nil
	}
	return err
}

// Kinds returns the sentinels and context errors that an error wraps. More than one is a bug: an
// error has one code.
func Kinds(err error) (found []error) {
	for _, kind := range []error{
		ErrInvalid, ErrNotFound, ErrExists, ErrOutOfRange, ErrNoSpace, ErrLimit, ErrInUse, ErrPrecondition, ErrBusy, ErrBadToken,
		ErrDataLoss, ErrUnavailable, ErrUnsupported, context.Canceled, context.DeadlineExceeded,
	} {
		if errors.Is(err, kind) {
			found = append(found, kind)
		}
	}
	return found
}

// OfDisk reports whether an error says that a disk failed at some place. Most of what a disk may say is EIO; but for a bad block, most disks say "medium error", which the
// kernel has as ENODATA, and so on (blk_errors in block/blk-core.c). Filesystems tell that as it is in the answer to fsync(2) and fdatasync(2), and when they
// read or write past the page cache.
func OfDisk(err error) bool {
	for _, errno := range []unix.Errno{unix.EIO, unix.ENODATA, unix.EREMOTEIO, unix.EILSEQ, unix.ETIMEDOUT, unix.ENOLINK, unix.EBADE} {
		if errors.Is(err, errno) {
			return true
		}
	}
	return false
}

// FromErrno gives a system call's error its sentinel, where one fits.
func FromErrno(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return fmt.Errorf("%w: %w", ErrNoSpace, err)
	case errors.Is(err, unix.EFBIG):
		return fmt.Errorf("%w: %w", ErrOutOfRange, err)
	case errors.Is(err, unix.ENOTDIR):
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	case errors.Is(err, unix.EROFS), errors.Is(err, unix.ENODEV), errors.Is(err, unix.ESTALE),
		errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE), errors.Is(err, unix.ENOMEM):
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	return err
}
