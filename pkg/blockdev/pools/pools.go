// Package pools opens pools of all kinds, by their URLs.
package pools

import (
	"context"
	"fmt"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lazy"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lvmpool"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Open opens the pool at a URL, and finishes or undoes what a crash left half-done in it. Where
// there is no pool, one is made if Location.Create lets it; else it is errdefs.ErrUnavailable. Groups and
// thin pools are the operator's to make.
func Open(ctx context.Context, name, location string) (blockdev.Pool, error) {
	return openKnown(ctx, name, location, nil)
}

// openKnown is Open for a caller who may remember the pool: where there is none, one is made only
// if nothing is known of it, whatever the place looks like; and another than the one that is known is
// errdefs.ErrUnavailable. Without known nothing is remembered.
func openKnown(ctx context.Context, name, location string, known blockdev.Known) (blockdev.Pool, error) {
	if !blockdev.ValidPoolName(name) {
		return nil, fmt.Errorf("%w: pool name %q: use 1 to 24 of a-z, 0-9 and -, with no - at either end", errdefs.ErrInvalid, name)
	}
	loc, err := blockdev.ParseLocation(location)
	if err != nil {
		return nil, err
	}
	if loc.Scheme == "lvm" {
		return lvmpool.Open(ctx, name, loc, known)
	}
	return filepool.Open(ctx, name, loc, known)
}

// OpenLazy is Open for a pool that may be there later than the driver (lazy.Open). known is nil for a caller who remembers no
// pools.
func OpenLazy(ctx context.Context, name, location string, known blockdev.Known) (blockdev.Pool, error) {
	return lazy.Open(ctx, name, func(ctx context.Context) (blockdev.Pool, error) { return openKnown(ctx, name, location, known) })
}
