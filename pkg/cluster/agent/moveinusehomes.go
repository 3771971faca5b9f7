package agent

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc"

	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster/export"
	"github.com/ashlar-csi/ashlar/pkg/cluster/move"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// oldHome returns how to ask the node that has a volume.
func (c *inUseMover) oldHome(node string) move.Old {
	if node == c.local.Node() {
		return ownHome{c.movingHere()}
	}
	return otherHome{c.Agent, node}
}

// newHome returns how to ask a node that a volume moves to.
func (c *inUseMover) newHome(node string) move.New {
	if node == c.local.Node() {
		return ownHome{c.movingHere()}
	}
	return otherHome{c.Agent, node}
}

// otherHome asks another node, which is the old or the new home, over the port of its agent.
type otherHome struct {
	*Agent
	node string
}

func (o otherHome) old(ctx context.Context, call func(move.Old) error) error {
	return o.at(ctx, func(c grpc.ClientConnInterface) error { return call(move.OldAt(c)) })
}

func (o otherHome) new(ctx context.Context, call func(move.New) error) error {
	return o.at(ctx, func(c grpc.ClientConnInterface) error { return call(move.NewAt(c)) })
}

func (o otherHome) at(ctx context.Context, call func(grpc.ClientConnInterface) error) error {
	ctx, cancel := context.WithTimeout(ctx, openTime)
	defer cancel()
	if err := o.atNode(ctx, o.node, call); err != nil {
		return fmt.Errorf("ask node %s: %w", o.node, err)
	}
	return nil
}

// Describe: see move.Old.
func (o otherHome) Describe(ctx context.Context, of move.Of) (from volume.Origin, err error) {
	err = o.old(ctx, func(old move.Old) (err error) { from, err = old.Describe(ctx, of); return err })
	return from, err
}

// Ranges: see move.Old.
func (o otherHome) Ranges(ctx context.Context, of move.Of) (ranges []blockdev.Extent, err error) {
	err = o.old(ctx, func(old move.Old) (err error) { ranges, err = old.Ranges(ctx, of); return err })
	return ranges, err
}

// Seal: see move.Old.
func (o otherHome) Seal(ctx context.Context, of move.Of) (from volume.Origin, err error) {
	err = o.old(ctx, func(old move.Old) (err error) { from, err = old.Seal(ctx, of); return err })
	return from, err
}

// Sealed: see move.Old.
func (o otherHome) Sealed(ctx context.Context, id volume.ID) (since time.Time, err error) {
	err = o.old(ctx, func(old move.Old) (err error) { since, err = old.Sealed(ctx, id); return err })
	return since, err
}

// Prepare: see move.New.
func (o otherHome) Prepare(ctx context.Context, of move.Of, from volume.Origin) (room export.Opened, err error) {
	err = o.new(ctx, func(next move.New) (err error) { room, err = next.Prepare(ctx, of, from); return err })
	return room, err
}

// Complete: see move.New.
func (o otherHome) Complete(ctx context.Context, of move.Of, nqn string, from volume.Origin) error {
	return o.new(ctx, func(next move.New) error { return next.Complete(ctx, of, nqn, from) })
}

// Drop: see move.New.
func (o otherHome) Drop(ctx context.Context, of move.Of, nqn string) error {
	return o.new(ctx, func(next move.New) error { return next.Drop(ctx, of, nqn) })
}

// Arrived: see move.New.
func (o otherHome) Arrived(ctx context.Context, id volume.ID) error {
	return o.new(ctx, func(next move.New) error { return next.Arrived(ctx, id) })
}

// Took: see move.New.
func (o otherHome) Took(ctx context.Context, id volume.ID, sealed time.Time) (took bool, err error) {
	err = o.new(ctx, func(next move.New) (err error) { took, err = next.Took(ctx, id, sealed); return err })
	return took, err
}

// ownHome is this node as the old or the new home. The caller of Ranges, Seal and Complete has the lock of the volume; the other methods take it.
type ownHome struct{ *Moving }

func (o ownHome) locking(of move.Of, work func() error) error {
	return o.withLocks([]string{keylock.Volume(of.ID.Key)}, work)
}

// Describe: see move.Old.
func (o ownHome) Describe(ctx context.Context, of move.Of) (from volume.Origin, err error) {
	err = o.locking(of, func() (err error) { from, err = o.Moving.Describe(ctx, of); return err })
	return from, err
}

// Drop: see move.New.
func (o ownHome) Drop(ctx context.Context, of move.Of, nqn string) error {
	return o.locking(of, func() error { return o.Moving.Drop(ctx, of, nqn) })
}
