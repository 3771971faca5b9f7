package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/internal/poolset"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/gc"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/liveness"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// Create: see volume.Store. The object is created with the word that its bytes may be made;
// if the node refuses it for good, it is deleted again before the error is returned, so
// that the caller may try another node. Of a set of pools the next one that seems to have room is asked here.
func (s *Store) Create(ctx context.Context, spec volume.Spec) (volume.Volume, error) {
	if err := errors.Join(s.Ready(ctx), volume.CheckMutable(spec.Mutable)); err != nil {
		return volume.Volume{}, err
	}
	if spec.Ephemeral != "" {
		return volume.Volume{}, fmt.Errorf("%w: ephemeral volumes are made by their node", errdefs.ErrInvalid)
	}
	create := s.createPlain
	if spec.Replicas.Legs() > 0 {
		create = s.createReplicated
	}
	made, err := create(ctx, spec)
	if err != nil {
		return volume.Volume{}, fmt.Errorf("create volume %q: %w", spec.Name, err)
	}
	return made, nil
}

// createPlain is Create of a volume on one node.
func (s *Store) createPlain(ctx context.Context, spec volume.Spec) (volume.Volume, error) {
	have, err := s.createAnywhere(ctx, spec, refusals{})
	if err != nil {
		return volume.Volume{}, err
	}
	return cluster.ToVolume(have), nil
}

// createAnywhere makes a volume in the first pool of a set that does not refuse it.
func (s *Store) createAnywhere(ctx context.Context, spec volume.Spec, refused refusals) (*v1alpha1.Volume, error) {
	for {
		have, err := s.createOne(ctx, spec, refused)
		if err == nil {
			return have, isEncrypted(spec, cluster.ToVolume(have))
		}
		var refusal *cluster.Refusal
		if errors.As(err, &refusal) && volume.PassedOver(err) && s.another(ctx, spec, refused, have, err) {
			continue
		}
		return nil, err
	}
}

// isEncrypted is ErrPrecondition for a volume that was made without the encryption that it was to have: its node has an older driver again, of
// which nothing of that is known.
func isEncrypted(spec volume.Spec, made volume.Volume) error {
	if made.Encryption == spec.Encryption {
		return nil
	}
	return fmt.Errorf("%w: volume %q (%s) was to have encryption %s, and node %s made it with encryption %s; bring the driver there to the version of the controller, and delete the volume",
		errdefs.ErrPrecondition, spec.Name, made.ID, spec.Encryption, made.Node, made.Encryption)
}

// another notes that the pool of a volume has refused it, and reports whether there is another one of its set that seems to have room.
func (s *Store) another(ctx context.Context, spec volume.Spec, refused refusals, have *v1alpha1.Volume, err error) bool {
	if _, one := poolset.Set(spec.Pool).One(); one || spec.Pool == "" || spec.Source != (volume.ID{}) {
		return false
	}
	refused[overview.PoolName(have.Spec.NodeName, have.Spec.Pool)] = err
	next, none := s.schedule(ctx, spec, cluster.Keeps(have), refused)
	return none == nil && next.Fits(cluster.Keeps(have))
}

// createOne is Create in one pool, which is none of those that have refused. The object is that of the volume, also with an error, as far as it was made.
func (s *Store) createOne(ctx context.Context, spec volume.Spec, refused refusals) (*v1alpha1.Volume, error) {
	key := volume.KeyOf(spec.Name)
	w := s.hub.Open(cluster.VolumeNamed(key))
	defer w.Close()
	have, err := s.place(ctx, spec, w, key, refused)
	if err == nil {
		have, err = waitMade(ctx, s, w, have)
	}
	var down *liveness.NodeDown
	if errors.As(err, &down) && have != nil && have.UID != "" { // else it is the node of its source
		if err = s.waitsFor(ctx, have, down); err == nil {
			err = s.withdraw(ctx, have, down)
		}
	}
	return have, err
}

// waitsFor is down's error for what is to be made on a node that is down and may not be made elsewhere instead, nil if it may. What is copied
// from what the node has can be made there alone. A copy that comes from another node goes on where it was when the node is back, so that is waited for,
// but for no longer than it had been copied: then it would have been made elsewhere. A node that is gone is not waited for.
func (s *Store) waitsFor(ctx context.Context, have *v1alpha1.Volume, down error) error {
	source := have.Spec.Source
	if source == nil {
		return nil
	}
	if source.NodeName == "" {
		return down
	}
	node := &corev1.Node{}
	if gc.IsGone(node, s.kube.Live.Get(ctx, client.ObjectKey{Name: have.Spec.NodeName}, node)) {
		return nil
	}
	silent, beats := s.nodes.Silent(have.Spec.NodeName)
	copied := time.Since(have.CreationTimestamp.Time) - silent // by two clocks
	if !beats || silent >= copied {
		return nil
	}
	return fmt.Errorf("%w; what it has copied from node %s since %s is waited for, for as long again, or until its Node object is deleted; then another node may be chosen",
		down, source.NodeName, have.CreationTimestamp.UTC().Format(time.RFC3339))
}

// place finds the object of a volume, or creates it. Those that are spread one after the other: each has to see where the others are. (Two
// stores may still take the same pool at once, as two that count claims do; one of them serves the provisioner.)
func (s *Store) place(ctx context.Context, spec volume.Spec, w *kube.Watch, key string, refused refusals) (*v1alpha1.Volume, error) {
	placed := func() {}
	defer func() { placed() }()
	plan := func() (*v1alpha1.Volume, error) {
		if spec.Spread != volume.NoSpread && spec.Source == (volume.ID{}) {
			select {
			case s.placing <- struct{}{}:
				placed = sync.OnceFunc(func() { <-s.placing })
			case <-ctx.Done():
				return nil, fmt.Errorf("%w: choose a pool: %w", errdefs.ErrUnavailable, ctx.Err())
			}
		}
		return s.plan(ctx, spec, refused)
	}
	return getOrCreate(ctx, s, w, key, plan, func(have *v1alpha1.Volume) (bool, error) {
		placed() // another store was first
		return s.fits(ctx, w, spec, have, refused)
	})
}

// withdraw takes back what a node that is down was asked to make, and has not said that it
// began with, also if it was to be deleted again. Then the error is ErrNoSpace: another node may be chosen. If the node has begun, it
// finds that nobody wants what it made, and removes it. Otherwise it is down's error.
func (s *Store) withdraw(ctx context.Context, have *v1alpha1.Volume, down error) error {
	now := &v1alpha1.Volume{}
	err := s.kube.Live.Get(ctx, client.ObjectKeyFromObject(have), now)
	switch {
	case err != nil && !apierrors.IsNotFound(err):
		return down
	case err == nil && (now.UID != have.UID || now.Status.Created != nil || !now.Spec.Make || now.DeletionTimestamp != nil || s.nodes.Alive(ctx, now.Spec.NodeName)):
		return down
	case err == nil:
		if client.IgnoreNotFound(s.kube.Client.Delete(ctx, now, client.Preconditions{UID: &now.UID, ResourceVersion: &now.ResourceVersion})) != nil {
			return down
		}
		klog.FromContext(ctx).Info("Took back what a node that is down was to make", "volume", cluster.VolumeID(now).String(), "node", now.Spec.NodeName)
	}
	return fmt.Errorf("%w on node %s: %s; nothing was made there, so another node may be chosen", errdefs.ErrNoSpace, have.Spec.NodeName, down.Error())
}

// takenBack takes a volume back that was to be made in a pool of a set which cannot be used any more, as a withdrawn one is, if there is
// another pool with room. Should it have been made, the node finds that its object says another pool, and removes it while it is blank.
func (s *Store) takenBack(ctx context.Context, spec volume.Spec, have *v1alpha1.Volume, refused refusals) (bool, error) {
	if _, one := poolset.Set(spec.Pool).One(); one || spec.Pool == "" || have.Spec.Source != nil || have.Status.Created != nil || !have.Spec.Make || v1alpha1.Going(have) {
		return false, nil
	}
	var in v1alpha1.Pool
	err := s.kube.Client.Get(ctx, client.ObjectKey{Name: overview.PoolName(have.Spec.NodeName, have.Spec.Pool)}, &in)
	if client.IgnoreNotFound(err) != nil {
		return false, kube.APIError("read pool of "+have.Name, err)
	}
	if err == nil && worst(&in) < blockdev.Inaccessible {
		return false, nil
	}
	best, err := s.schedule(ctx, spec, cluster.Keeps(have), refused)
	if err != nil || !best.Fits(cluster.Keeps(have)) {
		return false, nil // it waits for its pool
	}
	err = s.kube.Client.Delete(ctx, have, client.Preconditions{UID: &have.UID, ResourceVersion: &have.ResourceVersion})
	if err == nil {
		klog.FromContext(ctx).Info("Took back what a pool that cannot be used was to make", "volume", cluster.VolumeID(have).String(), "node", have.Spec.NodeName)
	}
	return true, kube.APIError("take back "+have.Name, client.IgnoreNotFound(kube.IgnoreConflict(err)))
}

// plan is the object for a new volume: its node, pool (none of those that have refused it) and size are chosen here.
func (s *Store) plan(ctx context.Context, spec volume.Spec, refused refusals) (v *v1alpha1.Volume, err error) {
	v = cluster.VolumeNamed(volume.KeyOf(spec.Name))
	v.Spec = v1alpha1.VolumeSpec{Intent: v1alpha1.Intent{Make: true}, Pool: spec.Pool, Name: spec.Name, Provisioning: string(spec.Provisioning),
		Filesystem: string(spec.Filesystem), Encryption: string(spec.Encryption.Scheme), EncryptionDiscard: spec.Encryption.Discards,
		Access: string(spec.Access), HomeTimeout: int64(spec.HomeTimeout / time.Second), ReplicaOf: spec.ReplicaOf, Mutable: maps.Clone(spec.Mutable), PersistentVolume: spec.For.PersistentVolume}
	if spec.For.Name != "" {
		v.Spec.ClaimRef = &v1alpha1.ClaimRef{Namespace: spec.For.Namespace, Name: spec.For.Name}
	}
	floor, overhead := spec.MinSize(), spec.Encryption.Scheme.Overhead()
	var from source
	if spec.Source != (volume.ID{}) {
		if from, err = s.planSource(ctx, spec, v); err != nil {
			return nil, err
		}
		floor = max(floor, from.size)
	}
	size, err := spec.Size.Choose(floor, blockdev.Granularity, overhead)
	if err != nil {
		return nil, err
	}
	if v.Spec.Source == nil {
		err = s.planNew(ctx, spec, v, size+overhead, refused)
	} else {
		err = s.planCopy(ctx, spec, from, v, size+overhead, refused)
		if v.Spec.Pool != spec.Source.Pool {
			v.Spec.Source.Pool = spec.Source.Pool
		}
	}
	if err != nil {
		return nil, err
	}
	step, err := s.granularity(ctx, v.Spec.NodeName, v.Spec.Pool)
	if err == nil && spec.ReplicaOf == v.Name { // others are to have its size
		step, err = s.commonStep(ctx, poolsOfLegs(spec, v))
	}
	if err != nil {
		return nil, err
	}
	v.Spec.Size, err = spec.Size.Choose(floor, step, overhead)
	return v, err
}

// planNew gives the object its node and pool, which is to keep so many bytes.
func (s *Store) planNew(ctx context.Context, spec volume.Spec, v *v1alpha1.Volume, size int64, refused refusals) error {
	best, err := s.schedule(ctx, spec, size, refused)
	if err != nil {
		return err
	}
	if isFurther(spec) && !best.Fits(size) { // the node is asked only where nothing else can be done
		return fmt.Errorf("%w: no other node has room for %d bytes", errdefs.ErrNoSpace, size)
	}
	v.Spec.NodeName, v.Spec.Pool = best.Spec.NodeName, best.Spec.Pool
	return nil
}

// mayReach is ErrPrecondition for a copy that other nodes are to use, on the node of its source, which is in no network.
func (s *Store) mayReach(ctx context.Context, spec volume.Spec, home string) error {
	if spec.Access != volume.AccessAny {
		return nil
	}
	networks, err := s.Networks(ctx)
	if err == nil && networks[home] == "" {
		err = fmt.Errorf("%w: source %s is on node %s, and so is its copy, which %s", errdefs.ErrPrecondition, spec.Source, home, unreached)
	}
	return err
}

// planSource gives the object of a copy its source, and the node of that.
func (s *Store) planSource(ctx context.Context, spec volume.Spec, v *v1alpha1.Volume) (source, error) {
	from, err := s.findSource(ctx, spec.Source)
	if err != nil {
		return source{}, err
	}
	v.Spec.NodeName, v.Spec.Source = from.node, &v1alpha1.Source{Kind: string(spec.Source.Kind), Key: spec.Source.Key}
	return from, spec.CheckSource(from.holds)
}

// planCopy gives the object of a copy its node and pool: those of its source, if they may be. On another node, or in another pool, it
// takes as long as its bytes.
func (s *Store) planCopy(ctx context.Context, spec volume.Spec, from source, v *v1alpha1.Volume, size int64, refused refusals) error {
	home, pool := from.node, from.pool
	where := spec
	if spec.Copies == volume.CopiesAnywhere {
		stays, err := s.stays(ctx, spec, from, size, refused)
		if err != nil {
			return err
		}
		if where.Pool = cmp.Or(spec.Pool, pool); stays {
			where.Nodes = []string{home}
		}
	} else {
		if err := s.mayBeOn(ctx, spec, home); err != nil {
			return fmt.Errorf("source %s is on node %s, and so are its copies, as the class does not say copies=%s: %w", spec.Source, home, volume.CopiesAnywhere, err)
		}
		where.Nodes = []string{home}
	}
	if len(where.Nodes) == 1 && where.Nodes[0] == home && !spec.Elsewhere(pool) {
		if err := refused[overview.PoolName(home, pool)]; err != nil {
			return fmt.Errorf("%w: source %s is on node %s, and so are its copies, as the class does not say copies=%s: %w", errdefs.ErrNoSpace, spec.Source, home, volume.CopiesAnywhere, err)
		}
		v.Spec.Pool = pool
		return cmp.Or(s.mayReach(ctx, spec, home), s.nodes.Ready(ctx, home))
	}
	if err := s.planNew(ctx, where, v, size, refused); err != nil {
		return err
	}
	if v.Spec.NodeName == home && !spec.Elsewhere(pool) {
		v.Spec.Pool = pool
	}
	if v.Spec.NodeName == home {
		return nil
	}
	v.Spec.Source.NodeName = home
	for _, pool := range []string{overview.PoolName(home, pool), overview.PoolName(v.Spec.NodeName, v.Spec.Pool)} {
		if _, err := s.endpoint(ctx, pool, false); err != nil {
			return errdefs.Recast(errdefs.ErrPrecondition, err, "parameter copies=%s: %s is on node %s, and would be copied to node %s; pool %s", volume.CopiesAnywhere, spec.Source, home, v.Spec.NodeName, pool)
		}
	}
	return nil
}

// stays reports whether a copy that may be anywhere is best made on the node of its source: nobody prefers another node, it takes pods, it can keep
// the limits, there is room, and it has not refused.
func (s *Store) stays(ctx context.Context, spec volume.Spec, from source, size int64, refused refusals) (bool, error) {
	home, pool := from.node, from.pool
	if len(spec.Nodes) > 0 && spec.Nodes[0] != home || s.nodes.Ready(ctx, home) != nil {
		return false, nil
	}
	node := &corev1.Node{}
	if err := s.kube.Cache.Get(ctx, client.ObjectKey{Name: home}, node); err != nil {
		return false, kube.APIError("look at node "+home, err)
	}
	if node.Spec.Unschedulable {
		return false, nil
	}
	if spec.Elsewhere(pool) {
		pool = spec.Pool
	}
	found, err := s.findRoom(ctx, pool, []string{home}, volume.Requester{})
	return slices.ContainsFunc(found, func(r room) bool { return r.Fits(size) && r.limits(spec.Mutable) && !refused.has(r.Name) }), err
}

// catchUpTime is how long a deletion waits for the cache to know of this controller's own copies.
const catchUpTime = time.Second

// notCopied is ErrInUse for a volume or snapshot that another node is copying, as far as the cache knows: it is not deleted meanwhile. Who
// deletes it too early ends the copy, which has nobody's bytes yet.
func (s *Store) notCopied(ctx context.Context, id volume.ID) error {
	var copies v1alpha1.VolumeList
	of := []client.ListOption{client.MatchingFields{cluster.ByFetched: id.Key}, client.UnsafeDisableDeepCopy}
	soon, cancel := context.WithTimeout(ctx, catchUpTime)
	defer cancel()
	err := s.kube.Client.List(soon, &copies, of...)
	if err != nil && ctx.Err() == nil && soon.Err() != nil {
		err = s.kube.Cache.List(ctx, &copies, of...)
	}
	if err != nil {
		return kube.APIError("list copies of "+id.String(), err)
	}
	if len(copies.Items) > 0 {
		return fmt.Errorf("%w: node %s is copying %s; it can be deleted when the copy is made, or not wanted any more", errdefs.ErrInUse, copies.Items[0].Spec.NodeName, id)
	}
	return nil
}

// notGiven is ErrInUse for a volume that its home still gives to another node; it ends that, unless it is gone for good.
func (s *Store) notGiven(ctx context.Context, v *v1alpha1.Volume) error {
	given := v.Given()
	if len(given) == 0 {
		return nil
	}
	gone, err := s.isGone(ctx, v.Spec.NodeName)
	if gone || err != nil {
		return err
	}
	return fmt.Errorf("%w: volume %s is given to node %s until its node %s has ended that", errdefs.ErrInUse, cluster.VolumeID(v), given[0].Node, v.Spec.NodeName)
}

// source is where what is copied is, how large, and what it holds.
type source struct {
	node, pool string
	size       int64
	holds      volume.Contents
}

// findSource finds what is copied. The filesystem of a snapshot is that of
// its volume, as long as that is there; the node knows in any case.
func (s *Store) findSource(ctx context.Context, id volume.ID) (source, error) {
	if id.Kind != blockdev.Snapshot {
		v, err := s.cloned(ctx, id)
		return source{v.Node, v.Pool, v.Size, volume.Contents{Filesystem: v.Filesystem, Scheme: v.Encryption.Scheme}}, err
	}
	snapshot, err := s.readableSnapshot(ctx, id)
	if err != nil {
		return source{}, err
	}
	v, err := s.Get(ctx, snapshot.Source)
	if err != nil && !errors.Is(err, errdefs.ErrNotFound) {
		return source{}, err
	}
	return source{snapshot.Node, id.Pool, snapshot.Size, volume.Contents{Filesystem: v.Filesystem, Scheme: snapshot.Scheme}}, nil
}

// cloned is a volume that is to be copied: of one with several legs, the leg that has its key, which alone its ID names to a node.
func (s *Store) cloned(ctx context.Context, id volume.ID) (volume.Volume, error) {
	r, err := s.replicated(ctx, id)
	if r == nil || err != nil {
		if err != nil {
			return volume.Volume{}, err
		}
		return s.Get(ctx, id)
	}
	legs, err := s.legs(ctx, r)
	if err == nil {
		err = usableReplicated(r)
	}
	if err != nil {
		return volume.Volume{}, err
	}
	i := slices.IndexFunc(legs, func(v *v1alpha1.Volume) bool { return v.Name == r.Name })
	switch {
	case i < 0:
		err = errors.New("has other replicas than that which it was made with, and cannot be cloned")
	case len(currentLegs(r, legs[i:i+1])) == 0:
		err = fmt.Errorf("can be cloned on node %s only, of its replica there: %s", legs[i].Spec.NodeName, notCurrent(legs[i], r.Leg(r.Name)))
	default:
		return cluster.ToReplicated(r, legs[i]), nil
	}
	return volume.Volume{}, fmt.Errorf("%w: volume %s %w; make a snapshot of it, and a volume of that", errdefs.ErrPrecondition, id, err)
}

// fits is for getOrCreate: it is the volume of the spec. What an earlier try left is cleared up.
func (s *Store) fits(ctx context.Context, w *kube.Watch, spec volume.Spec, have *v1alpha1.Volume, refused refusals) (bool, error) {
	if err := spec.Check(cluster.ToVolume(have)); err != nil {
		return false, err
	}
	err := s.mayBeOn(ctx, spec, have.Spec.NodeName)
	if err != nil && !errors.Is(err, errdefs.ErrNoSpace) {
		return false, err
	}
	elsewhere := err != nil
	switch taken, err := s.takenBack(ctx, spec, have, refused); {
	case err != nil || taken:
		return false, err
	case v1alpha1.LostUnmade(have):
		if unused, err := s.garbage.NeverUsed(ctx, spec, have); err != nil || !unused {
			return false, errors.Join(cluster.ErrorOf(have.Spec.NodeName, have.Status.Failure), err)
		}
		return false, discard(ctx, s, w, have)
	case elsewhere && (have.Status.Created != nil || !have.Spec.Make):
		return false, fmt.Errorf("%w: volume %s is on node %s, not on one of %v", errdefs.ErrExists, cluster.VolumeID(have), have.Spec.NodeName, spec.Nodes)
	case elsewhere, have.Status.Created == nil && have.Common().Refused(have.Generation) != nil, have.Status.Is(v1alpha1.Abandoned, "True"):
		return false, discard(ctx, s, w, have)
	case have.Spec.Abandoned:
		before := have.DeepCopy()
		have.Spec.Abandoned = false
		err := s.kube.Client.Patch(ctx, have, kube.LockingPatch(before))
		if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
			return false, nil
		}
		return true, kube.APIError("keep it", err)
	}
	return true, nil
}

// Delete: see volume.Store. A node that has the volume attached goes on trying after the
// ErrInUse: what was written down stays so.
func (s *Store) Delete(ctx context.Context, id volume.ID) error {
	if id.Kind != blockdev.Volume {
		return nil
	}
	r, err := s.replicated(ctx, id)
	if errors.Is(err, errLeg) || r == nil && err == nil {
		r, err = s.forgotten(ctx, id)
	}
	switch {
	case errors.Is(err, errLeg):
		return nil // no volume has this ID
	case err != nil:
		return fmt.Errorf("delete %s: %w", id, err)
	case r != nil:
		return s.deleteReplicated(ctx, r)
	}
	v := cluster.VolumeNamed(id.Key)
	return deleteByID(ctx, s, id, v, true, func(live bool) error { // a conflict is a claim, maybe
		claimants := v.Claimants()
		switch {
		case v.Deleting():
			return nil
		case !live && v.IsUsed():
			return errStale // it may have been released since
		case len(claimants) == 0 && v.Spec.Move != nil && v.Spec.Move.Left:
			return fmt.Errorf("%w: delete volume %s: it has moved from node %s, which has not given its bytes back yet: it does when the drivers of both nodes run, and status.move says what it waits for; if that node never comes back, delete its Node object",
				errdefs.ErrUnavailable, id, v.Spec.Move.Node)
		case len(claimants) == 0:
			if err := s.notGiven(ctx, v); err != nil {
				return err
			}
			return s.notCopied(ctx, id)
		}
		s.garbage.ClaimRefused(v.Name)
		return fmt.Errorf("%w: volume %s is claimed by node %s; unpublish it first", errdefs.ErrInUse, id, claimants[0])
	})
}

// Get: see volume.Store. A volume that is being deleted is there until it is gone.
func (s *Store) Get(ctx context.Context, id volume.ID) (volume.Volume, error) {
	if r, err := s.replicated(ctx, id); r != nil || err != nil {
		if err != nil {
			return volume.Volume{}, err
		}
		return s.getReplicated(ctx, r)
	}
	v, err := s.volume(ctx, id)
	if err != nil {
		return volume.Volume{}, err
	}
	return cluster.ToVolume(v), nil
}

// List: see volume.Store.
func (s *Store) List(ctx context.Context, after volume.ID, limit int) ([]volume.Volume, error) {
	if err := s.Ready(ctx); err != nil {
		return nil, err
	}
	found := firsts[volume.Volume]{id: func(v volume.Volume) volume.ID { return v.ID }, limit: limit}
	becoming := map[string]volume.Volume{} // with several legs, which are not yet
	err := each(ctx, s, &v1alpha1.Volume{}, func(v *v1alpha1.Volume) {
		switch {
		case v.Status.Created == nil || compareIDs(cluster.VolumeID(v), after) <= 0:
		case v.Spec.Replicas > 0:
			becoming[v.Name] = cluster.ToVolume(v)
		case v.Spec.ReplicaOf == "":
			found.add(cluster.ToVolume(v))
		}
	})
	if err != nil {
		return nil, kube.APIError("list volumes", err)
	}
	if err := s.listReplicated(ctx, after, func(v volume.Volume) {
		delete(becoming, v.ID.Key)
		found.add(v)
	}); err != nil {
		return nil, err
	}
	for _, v := range becoming {
		found.add(v)
	}
	return found.cut(), nil
}

// Health: see volume.Store.
func (s *Store) Health(ctx context.Context, id volume.ID) ([]blockdev.Problem, error) {
	if r, err := s.replicated(ctx, id); r != nil || err != nil {
		if err != nil {
			return nil, err
		}
		return s.healthReplicated(ctx, r)
	}
	v, err := s.volume(ctx, id)
	if err != nil {
		return nil, err
	}
	return s.healthOf(ctx, v)
}

// healthOf is what is wrong with a volume, or a leg, as its node says, and if that says nothing any more.
func (s *Store) healthOf(ctx context.Context, v *v1alpha1.Volume) ([]blockdev.Problem, error) {
	err := s.nodes.Ready(ctx, v.Spec.NodeName)
	var down *liveness.NodeDown
	if errors.As(err, &down) && down.Silent && len(v.Status.Health) == 0 {
		return []blockdev.Problem{{Severity: blockdev.Degraded, Reason: "AgentSilent", Message: down.Why + ": what is known of the volume may be old"}}, nil
	}
	if err != nil && !(down != nil && down.Silent) {
		return []blockdev.Problem{{Severity: blockdev.Inaccessible, Reason: "NodeNotReady", Message: err.Error()}}, nil
	}
	return cluster.ToProblems(v.Status.Health), nil
}
