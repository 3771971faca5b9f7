package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/mirror"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/remotepool"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/replicapool"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// How the node that uses a volume with several legs reaches them, and what it asks of all of them or of one.

// LegVolumes works on the legs of volumes, on this node or another: volume.Everywhere.
type LegVolumes interface {
	Leg(ctx context.Context, id volume.ID) (volume.Leg, error)
	OpenLeg(ctx context.Context, id volume.ID) (blockdev.Device, error)
	LegDevices(ctx context.Context, id volume.ID) ([]blockdev.Device, error)
	CloseLeg(ctx context.Context, id volume.ID) error
	GrowLeg(ctx context.Context, id volume.ID) error
	Adopt(ctx context.Context, id volume.ID) error
	Adopted(ctx context.Context, id volume.ID) (adopted, astray bool, err error)
	ChangeLeg(ctx context.Context, id volume.ID, change func(s *volume.LegState, labels map[string]string) error) error
	BeginEra(ctx context.Context, id volume.ID) (number uint32, err error)
	Marks(ctx context.Context, id volume.ID, since uint32) ([]blockdev.Extent, error)
}

// LegConnections are the connections to legs on other nodes: remotepool.Pool.
type LegConnections interface {
	Legs(ref blockdev.Ref) ([]remotepool.Leg, error)
	// End disconnects one. I/O to it that is under way ends with errors.
	End(ctx context.Context, nqn string) error
}

// ReplicaLegs opens the legs of volumes that this node uses: it is a replicapool.Legs.
func (a *Agent) ReplicaLegs(volumes LegVolumes, connections LegConnections) *ReplicaLegs {
	return &ReplicaLegs{Agent: a, volumes: volumes, connections: connections, scrubbing: make(chan struct{}, 1)}
}

// ReplicaLegs are the legs of the volumes that this node uses.
type ReplicaLegs struct {
	*Agent
	volumes     LegVolumes
	connections LegConnections
	scrubbing   chan struct{} // a semaphore: one volume is scrubbed at a time
	joinSlots   joinSlots     // for legs that join
}

var _ replicapool.Legs = (*ReplicaLegs)(nil)

// Generation: see replicapool.Legs.
func (l *ReplicaLegs) Generation(ref blockdev.Ref) (int64, bool) {
	v, is := l.replicated(ref.Key)
	if !is {
		return 0, false
	}
	return v.Spec.Claim.Generation, true
}

// legID returns the ID of a leg, by its name; it never changes. ErrNotFound if there is no such leg of v: a person may have given it the name of another volume.
func (l *ReplicaLegs) legID(ctx context.Context, v *v1alpha1.ReplicatedVolume, name string) (volume.ID, error) {
	id := volume.ID{Kind: blockdev.Volume, Pool: v.Spec.Pool, Key: name}
	if name == v.Name {
		return id, nil
	}
	if known, is := l.knownLeg(v.Name, name); is {
		return known, nil
	}
	o, is := l.usedHere(name)
	if !is {
		var err error
		if o, is, err = get(ctx, l.Agent, name, &v1alpha1.Volume{}); err != nil || !is {
			o = &v1alpha1.Volume{}
			if err := l.kube.Live.Get(ctx, client.ObjectKey{Name: name}, o); err != nil {
				return id, kube.APIError("read leg "+name, err)
			}
		}
	}
	if o.Spec.ReplicaOf != v.Name {
		return id, fmt.Errorf("%w: the volume %s is no leg of %s", errdefs.ErrNotFound, name, v.Name)
	}
	id = cluster.VolumeID(o)
	l.note(v.Name, func(r *replica) { r.legs[name] = id })
	return id, nil
}

// withLeg does work under the lock of a leg, for which it waits (locked). The lock of the first leg is that of the volume, which the caller has.
func (l *ReplicaLegs) withLeg(ctx context.Context, v *v1alpha1.ReplicatedVolume, name string, work func(id volume.ID) error) error {
	id, err := l.legID(ctx, v, name)
	if err != nil {
		return err
	}
	if name == v.Name {
		return work(id)
	}
	return l.locked(ctx, name, func() error { return work(id) })
}

// locked does work under the lock of a volume or leg, for which it waits; ErrBusy if the context ends first. An ErrBusy of work itself is returned at once.
func (l *ReplicaLegs) locked(ctx context.Context, name string, work func() error) error {
	locks := []string{keylock.Volume(name)}
	unlock, busy := l.options.Locks.TryLock(locks, nil)
	for ; unlock == nil; unlock, busy = l.options.Locks.TryLock(locks, nil) {
		if pause(ctx, busyRetry) != nil {
			return fmt.Errorf("%w on %s", errdefs.ErrBusy, busy)
		}
	}
	defer unlock()
	return work()
}

// withLegs is withLeg for several legs at once.
func (l *ReplicaLegs) withLegs(ctx context.Context, v *v1alpha1.ReplicatedVolume, names []string, work func(legs map[string]volume.ID) error) error {
	legs := map[string]volume.ID{}
	var next func(names []string) error
	next = func(names []string) error {
		if len(names) == 0 {
			return work(legs)
		}
		return l.withLeg(ctx, v, names[0], func(id volume.ID) error {
			legs[names[0]] = id
			return next(names[1:])
		})
	}
	return next(names)
}

// pause waits for d; it returns the context's error if that ends first.
func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// object returns the object of a volume that this node uses, with all that this node wrote to it: from the cache, or else from the API server.
func (l *ReplicaLegs) object(ctx context.Context, key string) (*v1alpha1.ReplicatedVolume, error) {
	if _, is := l.replicated(key); is {
		v := &v1alpha1.ReplicatedVolume{}
		err := l.replicas.kube.Client.Get(ctx, client.ObjectKey{Name: key}, v)
		if err == nil && v.Spec.Claim != nil && v.Spec.Claim.Node == l.local.Node() {
			return v, nil
		}
	}
	return l.replicatedNow(ctx, key)
}

// Record: see replicapool.Legs. While no leg answers it returns the last known record, marked as stale.
func (l *ReplicaLegs) Record(ctx context.Context, pool string, ref blockdev.Ref) (record blockdev.Record, err error) {
	ctx, cancel := context.WithTimeout(ctx, homeTime)
	defer cancel()
	v, err := l.object(ctx, ref.Key)
	if err != nil {
		return blockdev.Record{}, err
	}
	if v.Spec.Pool != pool {
		return blockdev.Record{}, fmt.Errorf("%w: replicated volume %s is none of pool %s", errdefs.ErrNotFound, ref.Key, pool)
	}
	leg, err := l.currentLeg(ctx, v)
	if err == nil {
		record = leg.RecordOf(ref, v.Spec.Name, v.Spec.Size)
		l.note(ref.Key, func(r *replica) { r.record = record })
		return record, nil
	}
	if errors.Is(err, errdefs.ErrUnavailable) {
		l.note(ref.Key, func(r *replica) { record = r.record })
		if record.Ref == ref {
			record.Stale = true
			return record, nil
		}
	}
	return blockdev.Record{}, err
}

// askAgain is the pause before a leg that answered with an error is asked again.
const askAgain = 100 * time.Millisecond

// currentLeg returns a current leg, as its node has it: that of this node, or else the first one that answers. All are asked at once, as a node that is gone
// takes until the end of ctx. A leg that answers with an error is asked again until each has failed: its node may not have heard of a new claim yet.
func (l *ReplicaLegs) currentLeg(ctx context.Context, v *v1alpha1.ReplicatedVolume) (leg volume.Leg, err error) {
	names := l.nearFirst(ctx, v)
	if len(names) == 0 {
		return volume.Leg{}, noneCurrent(v)
	}
	if l.isNear(ctx, names[0]) {
		if leg, err = l.leg(ctx, v, names[0]); err == nil {
			return leg, nil
		}
		names = names[1:]
	}
	type answer struct {
		name string
		leg  volume.Leg
		err  error
	}
	answers := make(chan answer)
	var all sync.WaitGroup
	defer all.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for _, name := range names {
		all.Go(func() {
			for {
				leg, err := l.leg(ctx, v, name)
				select {
				case answers <- answer{name, leg, err}:
				case <-ctx.Done():
				}
				if pause(ctx, askAgain) != nil {
					return
				}
			}
		})
	}
	failed := map[string]error{}
	for len(failed) < len(names) {
		select {
		case a := <-answers:
			if a.err == nil {
				return a.leg, nil
			}
			failed[a.name], err = a.err, a.err
		case <-ctx.Done():
			return volume.Leg{}, errdefs.Recast(errdefs.ErrUnavailable, errors.Join(append(slices.Collect(maps.Values(failed)), ctx.Err())...), "ask the legs of the replicated volume %s", v.Name)
		}
	}
	return volume.Leg{}, err
}

// noneCurrent is the error for a volume whose object names no current leg. No step of the driver makes such a list.
func noneCurrent(v *v1alpha1.ReplicatedVolume) error {
	return fmt.Errorf("%w: no leg of the replicated volume %s is current by its object: say which one is (docs/runbooks/replicas-missing.md)", errdefs.ErrDataLoss, v.Name)
}

// leg returns a leg as its node has it.
func (l *ReplicaLegs) leg(ctx context.Context, v *v1alpha1.ReplicatedVolume, name string) (volume.Leg, error) {
	id, err := l.legID(ctx, v, name)
	if err != nil {
		return volume.Leg{}, err
	}
	return l.volumes.Leg(ctx, id)
}

// isNear reports whether a leg is on this node.
func (a *Agent) isNear(ctx context.Context, name string) bool {
	_, there, err := get(ctx, a, name, &v1alpha1.Volume{})
	return err == nil && there
}

// nearFirst returns the names of the current legs, that of this node first.
func (l *ReplicaLegs) nearFirst(ctx context.Context, v *v1alpha1.ReplicatedVolume) []string {
	names := v.Current()
	slices.SortStableFunc(names, func(a, b string) int { return volume.TrueFirst(l.isNear(ctx, a), l.isNear(ctx, b)) })
	return names
}

// SetLabels: see replicapool.Legs. If it fails, some legs may have the new labels and others the old ones; nothing was done by the new ones yet.
func (l *ReplicaLegs) SetLabels(ctx context.Context, pool string, ref blockdev.Ref, change func(labels map[string]string) error) (record blockdev.Record, err error) {
	ctx, cancel := context.WithTimeout(ctx, homeTime)
	defer cancel()
	v, err := l.object(ctx, ref.Key)
	if err != nil {
		return blockdev.Record{}, err
	}
	var first map[string]string
	for _, name := range l.nearFirst(ctx, v) {
		err := l.withLeg(ctx, v, name, func(id volume.ID) error {
			return l.volumes.ChangeLeg(ctx, id, func(_ *volume.LegState, labels map[string]string) error {
				if first != nil {
					volume.CarryLabels(first, labels)
					return nil
				}
				if err := change(labels); err != nil {
					return err
				}
				first = labels
				return nil
			})
		})
		if err != nil {
			return blockdev.Record{}, fmt.Errorf("change the record of the replicated volume %s on all its legs: %w", ref.Key, err)
		}
	}
	return l.Record(ctx, pool, ref)
}

// Grow: see replicapool.Legs.
func (l *ReplicaLegs) Grow(ctx context.Context, ref blockdev.Ref) (size int64, err error) {
	v, err := l.object(ctx, ref.Key)
	if err != nil {
		return 0, err
	}
	for _, name := range v.Current() {
		if err := l.withLeg(ctx, v, name, func(id volume.ID) error {
			if err := l.volumes.GrowLeg(ctx, id); err != nil {
				return err
			}
			devices, err := l.volumes.LegDevices(ctx, id)
			for _, d := range devices {
				if size == 0 || d.Size < size {
					size = d.Size
				}
			}
			return err
		}); err != nil {
			return 0, fmt.Errorf("have leg %s of the replicated volume %s grow: %w", name, ref.Key, err)
		}
	}
	return size, nil
}

// Names: see replicapool.Legs.
func (l *ReplicaLegs) Names(ctx context.Context, ref blockdev.Ref, devices []uint64) (names []string) {
	ctx, cancel := context.WithTimeout(ctx, homeTime)
	defer cancel()
	v, err := l.object(ctx, ref.Key)
	if err != nil {
		return nil
	}
	for _, name := range namedLegs(v) {
		id, err := l.legID(ctx, v, name)
		if err != nil {
			continue
		}
		have, err := l.volumes.LegDevices(ctx, id)
		if err == nil && slices.ContainsFunc(have, func(d blockdev.Device) bool { return slices.Contains(devices, d.Number) }) {
			names = append(names, name)
		}
	}
	return names
}

// Close: see replicapool.Legs. A leg that does not answer is disconnected: its node ends the export when it hears that the claim has ended.
func (l *ReplicaLegs) Close(ctx context.Context, ref blockdev.Ref, equal []string) error {
	asking, cancel := context.WithTimeout(ctx, homeTime)
	defer cancel()
	v, err := l.object(asking, ref.Key)
	if err != nil {
		l.forgetReplica(ref.Key)
		if errors.Is(err, errdefs.ErrPrecondition) {
			return nil // without a claim it has no legs here
		}
		return err
	}
	names := slices.Clone(v.Spec.Legs)
	for _, name := range v.Current() { // one that is to be a leg no more may not have left yet
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	var failures []error
	closed := 0 // legs that are current
	for _, name := range names {
		if _, err := l.legID(asking, v, name); errors.Is(err, errdefs.ErrNotFound) {
			continue // it has no Volume: it is not made yet, or that is gone, or is none of a leg
		}
		failures = append(failures, l.withLeg(asking, v, name, func(id volume.ID) error {
			if slices.Contains(equal, name) {
				is, err := l.closeLeg(asking, v, id)
				if err != nil {
					return err
				}
				if is {
					closed++
				}
			}
			return l.giveBack(ctx, asking, id)
		}))
	}
	if closed > 0 && closed == len(v.Current()) {
		if err := l.writeReplicas(asking, v, func(s *v1alpha1.ReplicatedVolumeStatus) { s.Closed = s.Opened }); err != nil {
			klog.FromContext(ctx).Info("Could not say in its object that a replicated volume was closed; if it has too many replicas, they go when it was used again", "volume", v.Name, "err", err.Error())
		}
	}
	l.forgetReplica(ref.Key)
	return errors.Join(failures...)
}

// closeLeg writes into the record of a leg that is current that it was closed, if that answers, and reports whether it was.
func (l *ReplicaLegs) closeLeg(ctx context.Context, v *v1alpha1.ReplicatedVolume, id volume.ID) (closed bool, err error) {
	if leg := v.Leg(id.Key); leg == nil || !leg.Current || v.Status.Opened != v.Spec.Claim.Generation {
		return false, nil
	}
	err = l.volumes.ChangeLeg(ctx, id, func(s *volume.LegState, _ map[string]string) error {
		closed = s.Opened == v.Spec.Claim.Generation && s.Sound == s.Opened
		s.Closed = closed
		return nil
	})
	if errors.Is(err, errdefs.ErrUnavailable) || errors.Is(err, errdefs.ErrPrecondition) { // the next user makes it equal to the others
		return false, nil
	}
	return closed, err
}

// giveBack is closeOrDisconnect for a leg that may not be attached here. asking is for whether it is.
func (l *ReplicaLegs) giveBack(ctx, asking context.Context, id volume.ID) error {
	devices, err := l.volumes.LegDevices(asking, id)
	if errors.Is(err, errdefs.ErrUnavailable) { // see observe: what devices there were have gone with the mirror
		return nil
	}
	if err != nil || len(devices) == 0 {
		return err
	}
	return l.closeOrDisconnect(ctx, id)
}

// closeOrDisconnect gives a leg back to its node, or disconnects from it if that does not answer.
func (l *ReplicaLegs) closeOrDisconnect(ctx context.Context, id volume.ID) error {
	err := l.volumes.CloseLeg(ctx, id)
	if !errors.Is(err, errdefs.ErrUnavailable) {
		return err
	}
	legs, failure := l.connections.Legs(blockdev.Ref{Kind: id.Kind, Key: id.Key})
	for _, c := range legs {
		failure = errors.Join(failure, l.connections.End(ctx, c.NQN))
	}
	return failure
}

// Health: see replicapool.Legs.
func (l *ReplicaLegs) Health(ref blockdev.Ref, s mirror.State) (problems []blockdev.Problem) {
	if len(s.Failed()) == len(s.Legs) {
		return []blockdev.Problem{{Severity: blockdev.Inaccessible, Reason: cluster.ReasonNoCurrentReplica, Message: "none of its replicas takes what is written; who uses it gets errors, or waits"}}
	}
	v, is := l.replicated(ref.Key)
	if !is {
		return nil
	}
	if waits := v.Waiting(); waits != "" {
		problems = append(problems, blockdev.Problem{Severity: blockdev.Inaccessible, Reason: cluster.ReasonNoCurrentReplica, Message: waits})
	}
	if differ := v.Differ(); differ != "" {
		problems = append(problems, blockdev.Problem{Severity: blockdev.Degraded, Reason: v1alpha1.ReasonReplicasDiffer, Message: differ})
	}
	if current := len(v.Current()); current < v.Spec.Replicas {
		problems = append(problems, blockdev.Problem{Severity: blockdev.Degraded, Reason: cluster.ReasonReplicaNotCurrent,
			Message: fmt.Sprintf("%d of %d replicas have everything that was written: %s", current, v.Spec.Replicas, missingLegs(v))})
	}
	return problems
}

// missingLegs returns why legs are not current.
func missingLegs(v *v1alpha1.ReplicatedVolume) string {
	why := map[string]string{}
	for _, leg := range v.Status.Legs {
		if !leg.Current {
			why[leg.Name] = leg.Message
		}
	}
	if len(why) == 0 {
		return "the others are not made yet"
	}
	return reasons(why)
}
