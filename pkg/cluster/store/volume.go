package store

import (
	"context"
	"errors"
	"fmt"
	"maps"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/liveness"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// Create: see volume.Store. The object is created with the word that its bytes may be made;
// if the node refuses it for good, it is deleted again before the error is returned, so
// that the caller may try another node.
func (s *Store) Create(ctx context.Context, spec volume.Spec) (volume.Volume, error) {
	if err := errors.Join(s.Ready(ctx), volume.CheckMutable(spec.Mutable)); err != nil {
		return volume.Volume{}, err
	}
	if spec.Ephemeral != "" {
		return volume.Volume{}, fmt.Errorf("%w: ephemeral volumes are made by their node", errdefs.ErrInvalid)
	}
	if spec.Pool == "" && spec.Source != (volume.ID{}) {
		spec.Pool = spec.Source.Pool
	}
	key := volume.KeyOf(spec.Name)
	w := s.hub.Open(cluster.VolumeNamed(key))
	defer w.Close()
	have, err := getOrCreate(ctx, s, w, key,
		func() (*v1alpha1.Volume, error) { return s.plan(ctx, spec) },
		func(have *v1alpha1.Volume) (bool, error) { return s.fits(ctx, w, spec, have) })
	if err == nil {
		have, err = waitMade(ctx, s, w, have)
		var down *liveness.NodeDown
		if errors.As(err, &down) && spec.Source == (volume.ID{}) { // a copy can be made there alone
			err = s.withdraw(ctx, have, down)
		}
	}
	if err != nil {
		return volume.Volume{}, fmt.Errorf("create volume %q: %w", spec.Name, err)
	}
	return cluster.ToVolume(have), nil
}

// withdraw takes back what a node that is down was asked to make, and has not said that it
// began with. Then the error is ErrNoSpace: another node may be chosen. If the node has begun, it
// finds that nobody wants what it made, and removes it. Otherwise it is down's error.
func (s *Store) withdraw(ctx context.Context, have *v1alpha1.Volume, down error) error {
	now := &v1alpha1.Volume{}
	err := s.kube.Live.Get(ctx, client.ObjectKeyFromObject(have), now)
	switch {
	case err != nil && !apierrors.IsNotFound(err):
		return down
	case err == nil && (now.UID != have.UID || now.Status.Created != nil || !now.Spec.Make || v1alpha1.Going(now) || s.nodes.Alive(ctx, now.Spec.NodeName)):
		return down
	case err == nil:
		if client.IgnoreNotFound(s.kube.Client.Delete(ctx, now, client.Preconditions{UID: &now.UID, ResourceVersion: &now.ResourceVersion})) != nil {
			return down
		}
		klog.FromContext(ctx).Info("Took back what a node that is down was to make", "volume", cluster.VolumeID(now).String(), "node", now.Spec.NodeName)
	}
	return fmt.Errorf("%w on node %s: %s; nothing was made there, so another node may be chosen", errdefs.ErrNoSpace, have.Spec.NodeName, down.Error())
}

// plan is the object for a new volume: its node, pool and size are chosen here.
func (s *Store) plan(ctx context.Context, spec volume.Spec) (v *v1alpha1.Volume, err error) {
	v = cluster.VolumeNamed(volume.KeyOf(spec.Name))
	v.Spec = v1alpha1.VolumeSpec{Intent: v1alpha1.Intent{Make: true}, Pool: spec.Pool, Name: spec.Name, Provisioning: string(spec.Provisioning),
		Filesystem: string(spec.Filesystem), Mutable: maps.Clone(spec.Mutable), PersistentVolume: spec.For.PersistentVolume}
	if spec.For.Name != "" {
		v.Spec.ClaimRef = &v1alpha1.ClaimRef{Namespace: spec.For.Namespace, Name: spec.For.Name}
	}
	floor := spec.MinSize()
	if spec.Source != (volume.ID{}) {
		size, err := s.planCopy(ctx, spec, v)
		if err != nil {
			return nil, err
		}
		floor = max(floor, size)
	}
	size, err := spec.Size.Choose(floor, blockdev.Granularity)
	if err != nil {
		return nil, err
	}
	if v.Spec.Source == nil {
		v.Spec.NodeName, v.Spec.Pool, err = s.schedule(ctx, spec.Pool, spec.Nodes, size)
	} else {
		err = s.nodes.Ready(ctx, v.Spec.NodeName)
	}
	if err != nil {
		return nil, err
	}
	step, err := s.granularity(ctx, v.Spec.NodeName, v.Spec.Pool)
	if err != nil {
		return nil, err
	}
	v.Spec.Size, err = spec.Size.Choose(floor, step)
	return v, err
}

// planCopy gives the object of a copy its source, and the node of that. It returns the size of the source.
func (s *Store) planCopy(ctx context.Context, spec volume.Spec, v *v1alpha1.Volume) (size int64, err error) {
	node, size, carried, err := s.findSource(ctx, spec.Source)
	if err != nil {
		return 0, err
	}
	if err := spec.CheckSource(carried); err != nil {
		return 0, err
	}
	if spec.Pool != spec.Source.Pool {
		return 0, fmt.Errorf("%w: source %s is in pool %s and cannot be copied to pool %s", errdefs.ErrInvalid, spec.Source, spec.Source.Pool, spec.Pool)
	}
	if err := s.mayBeOn(ctx, spec, node); err != nil {
		return 0, fmt.Errorf("source %s is on node %s, and so are its copies: %w", spec.Source, node, err)
	}
	v.Spec.NodeName, v.Spec.Source = node, &v1alpha1.Source{Kind: string(spec.Source.Kind), Key: spec.Source.Key}
	return size, nil
}

// findSource says where a source is, how large, and what filesystem it carries. Of a snapshot that is
// what its volume carries, as long as that is there; the node knows in any case.
func (s *Store) findSource(ctx context.Context, id volume.ID) (node string, size int64, carried filesystem.Type, err error) {
	if id.Kind != blockdev.Snapshot {
		v, err := s.Get(ctx, id)
		return v.Node, v.Size, v.Filesystem, err
	}
	snapshot, err := s.GetSnapshot(ctx, id)
	if err != nil {
		return "", 0, "", err
	}
	v, err := s.Get(ctx, snapshot.Source)
	if err != nil && !errors.Is(err, errdefs.ErrNotFound) {
		return "", 0, "", err
	}
	return snapshot.Node, snapshot.Size, v.Filesystem, nil
}

// fits is for getOrCreate: it is the volume of the spec. What an earlier try left is cleared up.
func (s *Store) fits(ctx context.Context, w *kube.Watch, spec volume.Spec, have *v1alpha1.Volume) (bool, error) {
	if err := spec.Check(cluster.ToVolume(have)); err != nil {
		return false, err
	}
	err := s.mayBeOn(ctx, spec, have.Spec.NodeName)
	if err != nil && !errors.Is(err, errdefs.ErrNoSpace) {
		return false, err
	}
	elsewhere := err != nil
	switch {
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
	v := cluster.VolumeNamed(id.Key)
	return deleteByID(ctx, s, id, v, true, func(live bool) error { // a conflict is a claim, maybe
		claim := v.Spec.Claim
		switch {
		case claim == nil || v.Deleting():
			return nil
		case !live:
			return errStale // it may have been released since
		}
		s.garbage.ClaimRefused(v.Name)
		return fmt.Errorf("%w: volume %s is claimed by node %s; unpublish it first", errdefs.ErrInUse, id, claim.Node)
	})
}

// Get: see volume.Store. A volume that is being deleted is there until it is gone.
func (s *Store) Get(ctx context.Context, id volume.ID) (volume.Volume, error) {
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
	var list v1alpha1.VolumeList
	if err := s.kube.Client.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		return nil, kube.APIError("list volumes", err)
	}
	var found []*v1alpha1.Volume
	for i := range list.Items {
		if v := &list.Items[i]; v.Status.Created != nil && compareIDs(cluster.VolumeID(v), after) > 0 {
			found = append(found, v)
		}
	}
	return page(found, cluster.VolumeID, limit, cluster.ToVolume), nil
}

// Health: see volume.Store.
func (s *Store) Health(ctx context.Context, id volume.ID) ([]blockdev.Problem, error) {
	v, err := s.volume(ctx, id)
	if err != nil {
		return nil, err
	}
	err = s.nodes.Ready(ctx, v.Spec.NodeName)
	var down *liveness.NodeDown
	if errors.As(err, &down) && down.Silent && len(v.Status.Health) == 0 {
		return []blockdev.Problem{{Severity: blockdev.Degraded, Reason: "AgentSilent", Message: down.Why + ": what is known of the volume may be old"}}, nil
	}
	if err != nil && !(down != nil && down.Silent) {
		return []blockdev.Problem{{Severity: blockdev.Inaccessible, Reason: "NodeNotReady", Message: err.Error()}}, nil
	}
	return cluster.ToProblems(v.Status.Health), nil
}
