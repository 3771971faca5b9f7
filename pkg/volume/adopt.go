package volume

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// A volume of one leg can get others while this node uses it (docs/replication.md). From then on it is one with several legs for everybody but the kernel of this node, where its devices are those of its first leg, until Adopt has laid them over a
// mirror. Until then all calls go to them.

// alone reports whether a volume with several legs is used here by the devices of its first leg: no leg is ever mounted or handed out otherwise. One that this node gives to another one is kept too, and not used here.
func (e *Everywhere) alone(ctx context.Context, id ID) bool {
	at := e.plain(ctx, id)
	devices, err := at.Attached(ctx, id)
	switch {
	case err != nil:
		return false
	case at.mounted(devices):
		return true
	case !slices.ContainsFunc(devices, func(d blockdev.Device) bool { return d.Kept && !d.ReadOnly }):
		return false
	case at != e.Local: // another node's is not given away here
		return true
	}
	return !e.gives(ctx, id)
}

// gives reports whether this node gives one of its volumes to another one.
func (e *Everywhere) gives(ctx context.Context, id ID) bool {
	_, given, err := e.ExportOf(ctx, id)
	return err == nil && given
}

// isReplicated reports whether calls for a volume go to the mirror that it has here, or is to have. What Adopt left unfinished is found by its devices, also if the claim is not known, or has ended.
func (e *Everywhere) isReplicated(ctx context.Context, id ID) bool {
	if e.replicated == nil {
		return false
	}
	if !e.legs.Has(id) {
		if adopted, _, err := e.Adopted(ctx, id); err != nil || !adopted {
			return false
		}
	}
	return !e.alone(ctx, id)
}

// lingers is ErrInUse while somebody has the device open still by which a volume was used before it got others: then taking it down has found it in use, and it goes with him.
func (e *Everywhere) lingers(ctx context.Context, id ID) error {
	at := e.plain(ctx, id)
	stack, err := at.stack(id)
	if err != nil {
		return errdefs.IgnoreNotFound(err)
	}
	if at == e.Local && e.gives(ctx, id) { // the node that it is given to has it
		return nil
	}
	open, err := stack.Open()
	if err == nil && open {
		err = fmt.Errorf("%w: volume %s has got replicas since, and the device that it had before is held open by a process or a mount; it goes away with its last user", errdefs.ErrInUse, id)
	}
	return err
}

// Adopt has a volume that has become one with several legs while it was used here be used through a mirror from now on. What is mounted or handed out stays, and so does the number of its device. It does nothing for any other one, and may be called again
// after a crash at any point. The caller has the lock of the volume. ErrUnsupported if it was attached by a driver that gave devices no seat: it is to be staged again.
func (e *Everywhere) Adopt(ctx context.Context, id ID) error {
	to, err := e.replicated.stack(id)
	if err != nil {
		return err
	}
	if e.alone(ctx, id) {
		from, err := e.plain(ctx, id).stack(id)
		if err == nil {
			err = from.HandOver(ctx, to)
		}
		if err != nil {
			return err
		}
	}
	return to.Reseat(ctx)
}

// settled is of, of a volume that is to be attached: what Adopt left unfinished is finished first, so that nothing of it is beside its mirror.
func (e *Everywhere) settled(ctx context.Context, id ID) (*Local, error) {
	at := e.of(ctx, id)
	if at != e.replicated || at == nil {
		return at, nil
	}
	return at, e.Adopt(ctx, id)
}

// Adopted reports whether a volume was adopted, and is used since; and whether it is not over its mirror yet: then Adopt was cut short, and is to be called again.
func (e *Everywhere) Adopted(ctx context.Context, id ID) (adopted, astray bool, err error) {
	stack, err := e.replicated.stack(id)
	if err != nil {
		return false, false, err
	}
	return stack.Adopted(ctx)
}

// Replicated is what this node does to the volumes with several legs that it uses, for who cuts, limits and changes them.
func (e *Everywhere) Replicated() Replicated { return Replicated{e} }

// Replicated is what a node does to the volumes with several legs that it uses.
type Replicated struct{ everywhere *Everywhere }

// Hold: see Local. ErrUnavailable while Adopt is cut short: what is written then does not come to the mirror, below which the home holds it back.
func (r Replicated) Hold(ctx context.Context, id ID) (release func() error, err error) {
	at := r.everywhere.of(ctx, id)
	if at == r.everywhere.replicated {
		_, astray, err := r.everywhere.Adopted(ctx, id)
		if err == nil && astray {
			err = fmt.Errorf("%w: volume %s has got replicas, and what uses it is not over its mirror yet; ask again", errdefs.ErrUnavailable, id)
		}
		if err != nil {
			return nil, err
		}
	}
	return at.Hold(ctx, id)
}

// LongestHold: see Local.
func (r Replicated) LongestHold() time.Duration { return r.everywhere.LongestHold() }

// LimitAgain: see Local.
func (r Replicated) LimitAgain(ctx context.Context, id ID, mutable map[string]string) {
	r.everywhere.of(ctx, id).LimitAgain(ctx, id, mutable)
}

// Modified: see Local.
func (r Replicated) Modified(ctx context.Context, id ID, mutable map[string]string) error {
	return r.everywhere.of(ctx, id).Modified(ctx, id, mutable)
}
