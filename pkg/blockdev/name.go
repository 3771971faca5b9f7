package blockdev

import (
	"context"
	"fmt"
	"regexp"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// A pool's name is part of volume IDs and, with them, of loop device labels, which
// the kernel limits to 63 bytes.
var poolNamePattern = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,22}[a-z0-9])?$`)

// ValidPoolName reports whether name is 1 to 24 lower-case letters, digits and
// dashes, with no dash at either end.
func ValidPoolName(name string) bool { return poolNamePattern.MatchString(name) }

// Known returns what the caller remembers of a pool: its identity (Identified); empty if it knows of none, and the pool may be made. An error says that it
// cannot tell now. It is called each time that the pool is looked for, and must not wait long.
type Known func(ctx context.Context) (id string, err error)

// Expect returns errdefs.ErrUnavailable if a pool with another identity than id is remembered. If the caller cannot tell now, a pool that is there may be
// used.
func Expect(ctx context.Context, known Known, id string) error {
	if known == nil {
		return nil
	}
	want, err := known(ctx)
	switch {
	case err != nil || want == "" || want == id:
		return nil
	case id == "":
		return fmt.Errorf("%w: what is here does not say which pool it is: its file named pool is missing; the pool that is to be here has the identity %s: is its disk mounted? If this is that pool, bring that file back, or have it get another one (spec.uuid)", errdefs.ErrUnavailable, want)
	}
	return fmt.Errorf("%w: another pool is here, with the identity %q; the one that is missing has %s: is its disk mounted?", errdefs.ErrUnavailable, id, want)
}
