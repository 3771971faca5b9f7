package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"google.golang.org/grpc"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/export"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/cluster/move"
	"github.com/ashlar-csi/ashlar/pkg/cluster/port"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// What the old and the new home do for the consumer of a volume that moves while it is used (docs/decisions/moving-in-use.md). Each call is checked against
// the object as the API server has it, under the lock of the volume.

// Moving answers the agents of nodes that use volumes which move from here, or to here, or that those here have left: it is a move.Old, a move.New and a move.Home.
func (a *Agent) Moving() *Moving { return &Moving{Agent: a} }

// movingHere is Moving for this node itself, which uses the volume. The caller has the lock of the volume.
func (a *Agent) movingHere() *Moving { return &Moving{a, true} }

// Moving is what a node does for the user of a volume that moves.
type Moving struct {
	*Agent
	here bool // who asks is this agent, and has the lock
}

var (
	_ move.Old  = (*Moving)(nil)
	_ move.New  = (*Moving)(nil)
	_ move.Home = (*Moving)(nil)
)

// inUse returns the object of a volume that is to move while the caller uses it; ErrPrecondition if the API server says that it is not.
func (m *Moving) inUse(ctx context.Context, of move.Of) (*v1alpha1.Volume, volume.Grant, error) {
	caller := port.CallerNode(ctx)
	if m.here {
		caller = m.local.Node()
	}
	to := volume.Grant{Generation: of.Claim, Node: caller}
	v := &v1alpha1.Volume{}
	err := m.kube.Live.Get(ctx, client.ObjectKey{Name: of.ID.Key}, v)
	if client.IgnoreNotFound(err) != nil {
		return nil, to, kube.APIError("read volume "+of.ID.Key, err)
	}
	c, asked := v.Spec.Claim, v.Spec.Move
	if err != nil || cluster.VolumeID(v) != of.ID || asked == nil || asked.Left || v1alpha1.Going(v) || v.Spec.Abandoned || v.Status.Created == nil ||
		caller == "" || c == nil || c.Node != caller || c.Generation != of.Claim || v.Generation != of.Object {
		return nil, to, fmt.Errorf("%w: volume %s does not move while node %q uses it by claim %d, or its object was changed since generation %d", errdefs.ErrPrecondition,
			of.ID, caller, of.Claim, of.Object)
	}
	return v, to, nil
}

// locked does work under the lock of a volume.
func (m *Moving) locked(of move.Of, work func() error) error {
	if m.here {
		return work()
	}
	return m.withLocks([]string{keylock.Volume(of.ID.Key)}, work)
}

// leaving does work on a volume of this node that is to move, under its lock.
func (m *Moving) leaving(ctx context.Context, of move.Of, work func(v *v1alpha1.Volume, to volume.Grant) error) error {
	return m.locked(of, func() error {
		v, to, err := m.inUse(ctx, of)
		if err == nil && v.Spec.NodeName != m.local.Node() {
			err = fmt.Errorf("%w: volume %s is on node %s, not on node %s", errdefs.ErrPrecondition, of.ID, v.Spec.NodeName, m.local.Node())
		}
		if err != nil {
			return err
		}
		return work(v, to)
	})
}

// coming does work for a volume that is to move to this node, under its lock; to is the next claim of its user.
func (m *Moving) coming(ctx context.Context, of move.Of, work func(v *v1alpha1.Volume, to volume.Grant) error) error {
	return m.locked(of, func() error {
		v, to, err := m.comes(ctx, of)
		if err != nil {
			return err
		}
		return work(v, to)
	})
}

// comes is inUse for a volume that is to move to this node; to is the next claim of its user.
func (m *Moving) comes(ctx context.Context, of move.Of) (v *v1alpha1.Volume, to volume.Grant, err error) {
	v, to, err = m.inUse(ctx, of)
	if err != nil {
		return v, to, err
	}
	if v.Spec.Move.Node != m.local.Node() {
		return v, to, fmt.Errorf("%w: volume %s moves to node %s, not to node %s", errdefs.ErrPrecondition, of.ID, v.Spec.Move.Node, m.local.Node())
	}
	to.Generation = cluster.NextClaim(v)
	return v, to, nil
}

// Describe: see move.Old.
func (m *Moving) Describe(ctx context.Context, of move.Of) (from volume.Origin, err error) {
	err = m.leaving(ctx, of, func(v *v1alpha1.Volume, _ volume.Grant) error {
		if v.Spec.Size > v.Status.Size {
			return fmt.Errorf("%w: volume %s is to grow first", errdefs.ErrUnavailable, of.ID)
		}
		from, err = m.local.Describe(ctx, of.ID, v.Spec.Claims)
		return err
	})
	return from, err
}

// Ranges: see move.Old.
func (m *Moving) Ranges(ctx context.Context, of move.Of) (ranges []blockdev.Extent, err error) {
	err = m.leaving(ctx, of, func(*v1alpha1.Volume, volume.Grant) error {
		ranges, err = m.local.DataRanges(ctx, of.ID)
		return err
	})
	return ranges, err
}

// Seal: see move.Old.
func (m *Moving) Seal(ctx context.Context, of move.Of) (from volume.Origin, err error) {
	err = m.leaving(ctx, of, func(v *v1alpha1.Volume, to volume.Grant) error {
		from, err = m.local.SealFor(ctx, of.ID, v.Spec.Claims, to, v.Spec.Move.Node)
		return err
	})
	return from, err
}

// Prepare: see move.New. It takes the lock of the volume in any case, and gives way to calls: a pod of this node may be the one that uses the volume.
func (m *Moving) Prepare(ctx context.Context, of move.Of, from volume.Origin) (opened export.Opened, err error) {
	if err := (exports{m.Agent}).check(); err != nil {
		return export.Opened{}, err
	}
	making, end := context.WithTimeout(ctx, cmp.Or(m.options.RoomTime, roomTime))
	defer end()
	err = m.withYieldingLocks(making, []string{keylock.Volume(of.ID.Key)}, nil, func(ctx context.Context) error {
		v, to, err := m.comes(ctx, of)
		if err != nil {
			return err
		}
		opened, err = m.makeRoom(ctx, v, to, from)
		return err
	})
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		err = errdefs.Recast(errdefs.ErrBusy, err, "node %s makes room for volume %s, and goes on with that when it is asked again", m.local.Node(), of.ID)
	}
	return opened, err
}

// makeRoom is Prepare for a volume that comes here. The caller has the lock of the volume.
func (m *Moving) makeRoom(ctx context.Context, v *v1alpha1.Volume, to volume.Grant, from volume.Origin) (export.Opened, error) {
	id := cluster.VolumeID(v)
	if err := m.checkMayCome(ctx, v); err != nil {
		return export.Opened{}, err
	}
	if pinned(v) {
		return export.Opened{}, fmt.Errorf("%w: volume %s is all here, and about to move", errdefs.ErrPrecondition, id)
	}
	if err := errors.Join(checkKnowsPools(v, from), checkSize(v, from)); err != nil {
		return export.Opened{}, err
	}
	defer m.Changed()
	out, err := m.local.Prepare(ctx, v.MovePool(), v.Spec.Name, blockdev.Provisioning(v.Spec.Provisioning), limitTo(v, from), to)
	if err != nil {
		return export.Opened{}, fmt.Errorf("make room for volume %s on node %s: %w", id, m.local.Node(), err)
	}
	return exports{m.Agent}.opened(out)
}

// Complete: see move.New.
func (m *Moving) Complete(ctx context.Context, of move.Of, nqn string, from volume.Origin) error {
	return m.coming(ctx, of, func(v *v1alpha1.Volume, to volume.Grant) error {
		return m.local.Complete(ctx, v.MovePool(), limitTo(v, from), to, nqn)
	})
}

// Drop: see move.New.
func (m *Moving) Drop(ctx context.Context, of move.Of, nqn string) error {
	return m.coming(ctx, of, func(v *v1alpha1.Volume, to volume.Grant) error {
		if pinned(v) {
			return fmt.Errorf("%w: volume %s is all here, and about to move", errdefs.ErrPrecondition, of.ID)
		}
		defer m.Changed()
		return m.local.DropPrepared(ctx, of.ID, to, nqn)
	})
}

// pinned reports whether the consumer has written that the new home has everything (status.move.copied, by the claim of now). The controller may then move
// the volume at any moment, so the consumer keeps both legs.
func pinned(v *v1alpha1.Volume) bool {
	s, c := v.Status.Move, v.Spec.Claim
	return v.Spec.Move != nil && c != nil && s != nil && s.Copied != nil && s.Copied.Claim != 0 && s.Copied.Claim == c.Generation
}

// undo takes the pin of a volume away. The write always changes the object, so a write that pins it, and is still under way, is refused. v has to be the
// object as the API server has it now; ErrBusy if it was changed meanwhile.
func (a *Agent) undo(ctx context.Context, v *v1alpha1.Volume) error {
	err := a.writeMove(ctx, v, func(s *v1alpha1.MoveStatus) { s.Undone, s.Copied = s.Undone+1, nil })
	if apierrors.IsConflict(err) {
		return fmt.Errorf("%w: the object of volume %s was changed meanwhile", errdefs.ErrBusy, v.Name)
	}
	return kube.APIError("write that volume "+v.Name+" is not all on its new node", err)
}

// Sealed: see move.Old.
func (m *Moving) Sealed(ctx context.Context, id volume.ID) (since time.Time, err error) {
	v, err := m.leavesFor(ctx, id.Key, port.CallerNode(ctx))
	switch {
	case v == nil:
		return since, err
	case cluster.VolumeID(v) != id || !v.Spec.Move.Left: // whether somebody uses it does not matter
		return since, fmt.Errorf("%w: volume %s has not moved to node %q", errdefs.ErrNotFound, id, port.CallerNode(ctx))
	}
	since, _, err = m.local.SealedSince(ctx, id)
	return since, err
}

// Arrived: see move.New.
func (m *Moving) Arrived(ctx context.Context, id volume.ID) error {
	v := &v1alpha1.Volume{}
	err := m.kube.Live.Get(ctx, client.ObjectKey{Name: id.Key}, v)
	if client.IgnoreNotFound(err) != nil {
		return kube.APIError("read volume "+id.Key, err)
	}
	if caller := port.CallerNode(ctx); err != nil || caller == "" || cluster.VolumeID(v) != id || v.Spec.NodeName != m.local.Node() || v.Spec.Move == nil || !v.Spec.Move.Left || v.Spec.Move.Node != caller {
		return fmt.Errorf("%w: volume %s has not moved from node %q to node %s", errdefs.ErrNotFound, id, caller, m.local.Node())
	}
	have, err := m.local.Get(ctx, id)
	if err != nil {
		return err
	}
	if have.Sealed || have.Pool != v.Spec.Pool {
		return fmt.Errorf("%w: what pool %s of node %s has of volume %s was left there by an earlier move", errdefs.ErrNotFound, have.Pool, m.local.Node(), id)
	}
	problems, err := m.local.Health(ctx, id)
	if i := slices.IndexFunc(problems, func(p blockdev.Problem) bool { return p.Severity == blockdev.DataLoss }); i >= 0 {
		return fmt.Errorf("%w: volume %s on node %s: %s", errdefs.ErrDataLoss, id, m.local.Node(), problems[i].Message)
	}
	return err
}

// Took: see move.New.
func (m *Moving) Took(ctx context.Context, id volume.ID, sealed time.Time) (bool, error) {
	v := &v1alpha1.Volume{}
	if err := m.kube.Live.Get(ctx, client.ObjectKey{Name: id.Key}, v); err != nil {
		return false, kube.APIError("read volume "+id.Key, err)
	}
	if caller := port.CallerNode(ctx); caller == "" || v.Spec.NodeName != caller || cluster.VolumeID(v) != id {
		return false, fmt.Errorf("%w: volume %s is on node %s, and node %q asks for it", errdefs.ErrUnavailable, id, v.Spec.NodeName, caller)
	}
	return m.local.HasTaken(ctx, id, sealed, string(v.UID), v.Generation)
}

// Has: see move.Home.
func (m *Moving) Has(ctx context.Context, id volume.ID, sealed time.Time) (bool, error) {
	v := &v1alpha1.Volume{}
	if err := m.kube.Live.Get(ctx, client.ObjectKey{Name: id.Key}, v); err != nil {
		return false, kube.APIError("read volume "+id.Key, err)
	}
	if port.CallerNode(ctx) == "" || !settledOn(v, m.local.Node()) || cluster.VolumeID(v) != id {
		return false, nil
	}
	return m.local.CameBy(ctx, id, sealed)
}

// settledOn reports whether an object is on a node, whole, and neither moving nor being deleted.
func settledOn(o cluster.Object, node string) bool {
	moves, _ := o.Moves()
	return o.Node() == node && moves == nil && o.Common().Created != nil && !v1alpha1.Going(o) && !v1alpha1.IsLost(o)
}

// checkCopiedInUse checks the copy of a volume that has moved here while it was used, and returns its seal. The volume is never copied again, as the old node
// lacks what was written since. ErrNotFound if the copy is gone. ErrUnavailable if the old node has another seal by now, or none: then the API server was
// restored to a move that was undone later, and the volume was used there since. An old node that does not answer, or cannot read what it has, is not waited
// for.
func (a *Agent) checkCopiedInUse(ctx context.Context, v *v1alpha1.Volume, sealed metav1.MicroTime, one *arrival) (metav1.MicroTime, error) {
	id := cluster.VolumeID(v)
	here, err := a.local.IsCopiedIn(ctx, id, sealed.Time)
	if err != nil {
		return sealed, err
	}
	if !here {
		return sealed, fmt.Errorf("%w: what was copied of volume %s to node %s while it was used is gone", errdefs.ErrNotFound, id, a.local.Node())
	}
	ctx, cancel := context.WithTimeout(ctx, homeTime)
	defer cancel()
	var since time.Time
	if failure := one.withoutSlot(func() {
		err = a.atNode(ctx, v.Spec.Move.Node, func(c grpc.ClientConnInterface) (err error) {
			since, err = move.OldAt(c).Sealed(ctx, id)
			return err
		})
	}); failure != nil {
		return sealed, failure
	}
	switch {
	case err != nil && mayKnowBetter(err):
		return sealed, errdefs.Recast(errdefs.ErrUnavailable, err, "ask node %s how it has sealed volume %s", v.Spec.Move.Node, id)
	case err != nil: // it is away, or has nothing that it can read
	case !since.Equal(sealed.Time):
		return sealed, fmt.Errorf("%w: node %s has used volume %s since all of it was copied here, so its bytes are newer; to keep those, delete the object, and adopt the volume there",
			errdefs.ErrUnavailable, v.Spec.Move.Node, id)
	}
	return sealed, nil
}

// reportMoveInUse writes the status of the move of a volume that this node uses, if edit changes it. It fails with a conflict if the object was changed since
// it was read.
func (a *Agent) reportMoveInUse(ctx context.Context, v *v1alpha1.Volume, edit func(*v1alpha1.MoveStatus)) error {
	return a.writeMove(ctx, v, func(s *v1alpha1.MoveStatus) {
		s.Claim, s.Refused = v.Spec.Claim.Generation, false
		edit(s)
	})
}

// consumerMoves reports whether status.move was written by the consumer of the volume.
func consumerMoves(v *v1alpha1.Volume) bool {
	s, c := v.Status.Move, v.Spec.Claim
	return c != nil && s != nil && s.Node == v.Spec.Move.Node && s.Claim == c.Generation
}
