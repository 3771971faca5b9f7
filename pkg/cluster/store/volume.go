package store

import (
	"context"
	"errors"
	"fmt"
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
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/liveness"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// Create: see volume.Store. The object is created with spec.make. If the node refuses it for good, the object is deleted before the error is returned, so
// that the caller may try another node. If the class names a set of pools, the next pool that seems to have room is asked in the same call.
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

// createAnywhere makes a volume in the first pool of its set that does not refuse it. refused are pools not to be asked; those that refuse are added.
// ErrPrecondition for a clone if the one replica that can be cloned (cloned) may lack what another one has, as its node has found out.
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
		if refusal != nil && spec.Source.Kind == blockdev.Volume && errors.Is(err, errdefs.ErrUnavailable) {
			err = errdefs.Recast(errdefs.ErrPrecondition, err, "of volume %s this replica alone can be cloned; make a snapshot of it, and a volume of that", spec.Source)
		}
		return nil, err
	}
}

// isEncrypted returns ErrPrecondition for a volume that was made with another encryption than spec asks for: the driver of its node was taken back to an
// older version, which does not know encryption.
func isEncrypted(spec volume.Spec, made volume.Volume) error {
	if made.Encryption == spec.Encryption {
		return nil
	}
	return fmt.Errorf("%w: volume %q (%s) was to have encryption %s, and node %s made it with encryption %s; bring the driver there to the version of the controller, and delete the volume",
		errdefs.ErrPrecondition, spec.Name, made.ID, spec.Encryption, made.Node, made.Encryption)
}

// another adds the pool of a volume to refused, with its error, and reports whether another pool of the set seems to have room. It is false for copies, and
// for classes that do not name a set.
func (s *Store) another(ctx context.Context, spec volume.Spec, refused refusals, have *v1alpha1.Volume, err error) bool {
	if _, one := poolset.Set(spec.Pool).One(); one || spec.Pool == "" || spec.Source != (volume.ID{}) {
		return false
	}
	refused[overview.PoolName(have.Spec.NodeName, have.Spec.Pool)] = err
	next, none := s.schedule(ctx, spec, have.Keeps(), refused)
	return none == nil && next.Fits(have.Keeps())
}

// createOne makes a volume in one pool, none of those in refused. With an error it may return the object as well, as it was planned or created.
func (s *Store) createOne(ctx context.Context, spec volume.Spec, refused refusals) (*v1alpha1.Volume, error) {
	key := volume.KeyOf(spec.Name)
	w := s.hub.Open(cluster.VolumeNamed(key))
	defer w.Close()
	have, err := s.place(ctx, spec, w, key, refused)
	if err == nil {
		have, err = waitMade(ctx, s, w, have)
	}
	var down *liveness.NodeDown
	if errors.As(err, &down) && have != nil && have.UID != "" { // without a UID nothing was created: the node that is down is that of its source
		if err = s.waitsFor(ctx, have, down); err == nil {
			err = s.withdraw(ctx, have, down)
		}
	}
	return have, err
}

// waitsFor returns an error that wraps down if a volume has to wait for its node, which is down, and nil if it may be made elsewhere. A copy of what that
// node has waits: it can be made there alone. A copy that comes from another node waits too, as it goes on when the node is back, but for no longer than it
// had been copied. Neither waits if the node is gone for good.
func (s *Store) waitsFor(ctx context.Context, have *v1alpha1.Volume, down error) error {
	source := have.Spec.Source
	if source == nil {
		return nil
	}
	node := &corev1.Node{}
	if cluster.IsGone(node, s.kube.Live.Get(ctx, client.ObjectKey{Name: have.Spec.NodeName}, node)) {
		return nil
	}
	if source.NodeName == "" {
		return down
	}
	silent, beats := s.nodes.Silent(have.Spec.NodeName)
	copied := time.Since(have.CreationTimestamp.Time) - silent // inexact: the API server's clock and this one
	if !beats || silent >= copied {
		return nil
	}
	return fmt.Errorf("%w; what it has copied from node %s since %s is waited for, for as long again, or until its Node object is deleted; then another node may be chosen",
		down, source.NodeName, have.CreationTimestamp.UTC().Format(time.RFC3339))
}

// place finds the object of a volume, or creates it. Volumes that are spread are placed one after the other, as each has to see where the others are. Two
// controllers may still take the same pool at once; but only one of them serves the provisioner.
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

// withdraw deletes the object of a volume that its node, which is down, has not reported, and returns ErrNoSpace: another node may be chosen. That includes a
// volume that is to be deleted. If the node has begun after all, it finds the object gone, and removes what it made. withdraw returns down if the volume was
// reported, the object changed meanwhile, or the node is alive.
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

// takenBack deletes the object of a volume that is not made yet, if its pool, one of a set, cannot be used any more and another pool has room; it reports
// whether it tried. If the node has made the volume after all, it finds that the object names another pool, and removes the volume while it is blank.
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
	best, err := s.schedule(ctx, spec, have.Keeps(), refused)
	if err != nil || !best.Fits(have.Keeps()) {
		return false, nil // no other pool: the volume waits for this one
	}
	err = s.kube.Client.Delete(ctx, have, client.Preconditions{UID: &have.UID, ResourceVersion: &have.ResourceVersion})
	if err == nil {
		klog.FromContext(ctx).Info("Took back what a pool that cannot be used was to make", "volume", cluster.VolumeID(have).String(), "node", have.Spec.NodeName)
	}
	return true, kube.APIError("take back "+have.Name, client.IgnoreNotFound(kube.IgnoreConflict(err)))
}

// catchUpTime is how long a deletion waits for the cache to have the copies that this controller has created.
const catchUpTime = time.Second

// notCopied returns ErrInUse for a volume or snapshot that another node is copying, as far as the cache knows. If the cache is behind, the deletion ends the
// copy, which nobody uses yet.
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

// notGiven returns ErrInUse for a volume that its home still exports to another node. If the home is gone for good, it is nil.
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

// fits is for getOrCreate: it reports whether the object that is there is the volume of a spec. It is false, without an error, if the object has to be read
// again: what an earlier try left was removed, or the object was changed meanwhile.
func (s *Store) fits(ctx context.Context, w *kube.Watch, spec volume.Spec, have *v1alpha1.Volume, refused refusals) (bool, error) {
	if err := spec.Check(cluster.ToVolume(have)); err != nil {
		return false, err
	}
	if isFurther(spec) && cluster.OfAgent(have) { // its node would get what is written to the volume
		return false, fmt.Errorf("%w: node %s has made the object of replica %s of volume %s, which it was not asked for; look at that node, then kubectl delete volumes.ashlar.dev %s "+
			"(if the ReplicatedVolume was restored, restore it with its status)", errdefs.ErrPrecondition, have.Spec.NodeName, have.Name, spec.ReplicaOf, have.Name)
	}
	if left, err := s.leaveBehind(ctx, w, spec, have); left || err != nil {
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
		return false, discard(ctx, s, w, have, true)
	case elsewhere && (have.Status.Created != nil || !have.Spec.Make):
		return false, fmt.Errorf("%w: volume %s is on node %s, not on one of %v", errdefs.ErrExists, cluster.VolumeID(have), have.Spec.NodeName, spec.Nodes)
	case elsewhere, have.Status.Created == nil && have.Common().Refused(have.Generation) != nil, have.Status.Is(v1alpha1.Abandoned, "True"):
		return false, discard(ctx, s, w, have, true)
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

// leaveBehind deletes the object of a volume that was made on a node which is gone for good, if nobody can have used it: the provisioner died, or its answer was
// lost, before there was a PersistentVolume. Nobody could ever use it there, and it can be made on another node. left reports whether it is gone; ErrUnavailable
// until it is given up (package gc). Its bytes stay there, should the node come back then.
func (s *Store) leaveBehind(ctx context.Context, w *kube.Watch, spec volume.Spec, have *v1alpha1.Volume) (left bool, err error) {
	if have.Spec.Make || have.Spec.ReplicaOf != "" || have.Spec.Move != nil || len(have.Claimants()) > 0 { // what is not made yet is withdrawn
		return false, nil
	}
	node := have.Spec.NodeName
	if gone, err := cluster.NodeIsGone(ctx, s.kube, node); !gone || err != nil {
		return false, err
	}
	if unused, err := s.garbage.NeverUsed(ctx, spec, have); !unused || err != nil {
		return false, err
	}
	klog.FromContext(ctx).Info("Giving up a volume that nobody has used, and whose node is gone; it is made on another one", "volume", cluster.VolumeID(have).String(), "node", node)
	if err := discard(ctx, s, w, have, true); err != nil {
		return false, errdefs.Recast(errdefs.ErrUnavailable, err, "volume %s was made on node %s, which was gone for good before anybody used it; it is made on another node when it is given up there", cluster.VolumeID(have), node)
	}
	return true, nil
}

// Delete: see volume.Store. If a node has the volume attached, the error is ErrInUse, spec.delete stays, and the node goes on trying.
func (s *Store) Delete(ctx context.Context, id volume.ID) error {
	if id.Kind != blockdev.Volume {
		return nil
	}
	r, err := s.replicated(ctx, id)
	if errors.Is(err, errLeg) || errors.Is(err, errForgotten) || r == nil && err == nil {
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
	return deleteByID(ctx, s, id, v, true, func(live bool) error { // only if unchanged: the change may be a claim
		claimants := v.Claimants()
		switch {
		case v.Spec.ReplicaOf != "": // it has become a leg since the cache had it: it goes with its ReplicatedVolume
			return fmt.Errorf("delete %s: %w", id, getsReplicas(id))
		case v.Deleting():
			return nil
		case !live && v.IsUsed():
			return errStale // it may have been released since
		case len(claimants) == 0:
			if err := cluster.Leaving("volume", id, v.Spec.Move); err != nil {
				return err
			}
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
	becoming := map[string]volume.Volume{} // volumes that are to have several legs, and may have no ReplicatedVolume yet
	legs := false
	err := each(ctx, s, &v1alpha1.Volume{}, func(v *v1alpha1.Volume) {
		switch {
		case v.Status.Created == nil || compareIDs(cluster.VolumeID(v), after) <= 0:
		case v.Spec.Replicas > 0:
			becoming[v.Name] = cluster.ToVolume(v)
		case v.Spec.ReplicaOf == "":
			found.add(cluster.ToVolume(v))
		default:
			legs = true
		}
	})
	if err != nil {
		return nil, kube.APIError("list volumes", err)
	}
	if err := s.listReplicated(ctx, after, legs, func(v volume.Volume) {
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

// Health: see volume.Store. A volume that is getting replicas is as well as what it was before.
func (s *Store) Health(ctx context.Context, id volume.ID) ([]blockdev.Problem, error) {
	r, err := s.replicated(ctx, id)
	if err == nil && r != nil {
		var problems []blockdev.Problem
		if problems, err = s.healthReplicated(ctx, r); err == nil {
			return problems, nil
		}
	}
	var becomes becoming
	if err != nil && !errors.As(err, &becomes) {
		return nil, err
	}
	v, err := s.volume(ctx, id)
	if err != nil {
		return nil, err
	}
	return s.healthOf(ctx, v)
}

// healthOf returns the problems of a volume or a leg: those that its node has reported, or that the node or its agent is down.
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
