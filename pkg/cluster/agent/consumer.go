package agent

import (
	"context"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/export"
	"github.com/ashlar-csi/ashlar/pkg/cluster/port"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// What the home of a volume asks of its consumers, over the port of their agents, and what these answer.

// UsedVolumes works on volumes of other nodes that are used here, for their homes or after a start: volume.Local, over them.
type UsedVolumes interface {
	WriteHolder
	LimitAgain(ctx context.Context, id volume.ID, mutable map[string]string)
	Modified(ctx context.Context, id volume.ID, mutable map[string]string) error
}

// WriteHolder holds back the writes to volumes that are used here: volume.Local.
type WriteHolder interface {
	Hold(ctx context.Context, id volume.ID) (release func() error, err error)
	LongestHold() time.Duration
}

// Uses answers the agents of the nodes whose volumes are used here: it is an export.User. A node may ask for its own volumes only. others works on these
// volumes; the agent sets their limits by it too. It is nil while this node is in no network: then all answers are ErrUnavailable.
func (a *Agent) Uses(others UsedVolumes) export.User {
	if others != nil {
		select {
		case a.others.using <- others:
		default: // it has them
		}
	}
	return users{a, others}
}

type users struct {
	*Agent
	others UsedVolumes
}

// checkUsed is ErrPrecondition unless a volume is the caller's, and claimed for this node with a generation.
func (u users) checkUsed(ctx context.Context, id volume.ID, generation int64) error {
	if u.others == nil {
		return fmt.Errorf("%w: node %s cannot use volumes of other nodes now (--remote-address); its driver's log says why", errdefs.ErrUnavailable, u.local.Node())
	}
	v, is := u.usedHere(id.Key)
	if !is || cluster.VolumeID(v) != id || u.generation(v) != generation {
		var err error
		if v, err = u.usedNow(ctx, id); err != nil {
			return err
		}
	}
	if caller := port.CallerNode(ctx); caller == "" || v.Spec.NodeName != caller || u.generation(v) != generation {
		return fmt.Errorf("%w: node %s uses no volume %s of node %q by generation %d", errdefs.ErrPrecondition, u.local.Node(), id, caller, generation)
	}
	return nil
}

// Modified: see export.User.
func (u users) Modified(ctx context.Context, id volume.ID, generation int64, mutable map[string]string) error {
	if err := u.checkUsed(ctx, id, generation); err != nil {
		return err
	}
	return u.withLocks([]string{keylock.Volume(id.Key)}, func() error {
		err := u.others.Modified(ctx, id, mutable)
		if err == nil {
			u.Agent.others.tell(id.Key)
		}
		return err
	})
}

// Hold: see export.User. The lock of the volume is held until the writes go on. If the home does not release them, they go on after LongestHold, so that the
// volume can be unstaged.
func (u users) Hold(ctx context.Context, id volume.ID, generation int64) (release func() error, err error) {
	if err := u.checkUsed(ctx, id, generation); err != nil {
		return nil, err
	}
	v, is := u.usedHere(id.Key)
	if _, whole := u.replicated(id.Key); is && (whole || v.Spec.ReplicaOf != "") {
		return u.holdReplicated(ctx, v, "")
	}
	return u.hold(ctx, u.others, id, []string{keylock.Volume(id.Key)})
}

// hold holds back the writes to a volume that is used here, and keeps locks until release; both end by themselves after LongestHold. release is nil if
// nothing is held.
func (a *Agent) hold(ctx context.Context, in WriteHolder, id volume.ID, locks []string) (release func() error, err error) {
	unlock, busy := a.options.Locks.TryLock(locks, nil)
	if unlock == nil {
		return nil, fmt.Errorf("%w on %s", errdefs.ErrBusy, busy)
	}
	let, err := in.Hold(ctx, id)
	if err != nil || let == nil {
		unlock()
		return nil, err
	}
	end := sync.OnceValue(func() error {
		defer unlock()
		return let()
	})
	late := time.AfterFunc(in.LongestHold()+time.Second, func() { _ = end() }) // a later release returns the error
	return func() error {
		late.Stop()
		return end()
	}, nil
}

// Consumers asks the nodes that volumes of this node are exported to: it is a volume.Consumers.
func (a *Agent) Consumers() volume.Consumers { return consumers{a} }

type consumers struct{ *Agent }

// Modified: see volume.Consumers.
func (c consumers) Modified(ctx context.Context, id volume.ID, to volume.Grant, mutable map[string]string) error {
	ctx, cancel := context.WithTimeout(ctx, homeTime)
	defer cancel()
	return c.atNode(ctx, to.Node, func(agent grpc.ClientConnInterface) error {
		return export.UserAt(agent).Modified(ctx, id, to.Generation, mutable)
	})
}

// Hold: see volume.Holder.
func (c consumers) Hold(ctx context.Context, id volume.ID, to volume.Grant) (release func() error, err error) {
	if to.Node == c.local.Node() { // it is a leg
		v, there, err := get(ctx, c.Agent, id.Key, &v1alpha1.Volume{})
		if err == nil && (!there || v.Spec.ReplicaOf == "") {
			err = fmt.Errorf("%w: volume %s is no leg that node %s has", errdefs.ErrPrecondition, id, to.Node)
		}
		if err != nil {
			return nil, err
		}
		return c.holdReplicated(ctx, v, id.Key)
	}
	err = c.atNode(ctx, to.Node, func(agent grpc.ClientConnInterface) (err error) {
		release, err = export.UserAt(agent).Hold(ctx, id, to.Generation)
		return err
	})
	return release, err
}
