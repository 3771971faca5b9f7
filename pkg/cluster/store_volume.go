package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

func volumeNamed(key string) *v1alpha1.Volume {
	return &v1alpha1.Volume{ObjectMeta: metav1.ObjectMeta{Name: key}}
}

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
	w := s.hub.open(volumeNamed(key))
	defer w.close()
	have, err := obtain(ctx, s, w, key,
		func() (*v1alpha1.Volume, error) { return s.plan(ctx, spec) },
		func(have *v1alpha1.Volume) (bool, error) { return s.fits(ctx, w, spec, have) })
	if err == nil {
		have, err = made(ctx, s, w, have)
		var down *nodeDown
		if errors.As(err, &down) && spec.Source == (volume.ID{}) { // a copy can be made there alone
			err = s.withdraw(ctx, have, down)
		}
	}
	if err != nil {
		return volume.Volume{}, fmt.Errorf("create volume %q: %w", spec.Name, err)
	}
	return toVolume(have), nil
}

// obtain finds the object of a key, by the API server's own word (another store may have deleted what
// this one's cache has), or creates it as planned. One that is being deleted is waited for to be gone. fits says of one that is there whether it is what is wanted; with
// false it is to be looked at anew. w watches the object.
func obtain[O any, T interface {
	*O
	object
}](ctx context.Context, s *Store, w *watch, key string, plan func() (T, error), fits func(T) (bool, error)) (T, error) {
	have := T(new(O))
	for live, err := false, s.client.Get(ctx, client.ObjectKey{Name: key}, have); ; live, err = true, s.live.Get(ctx, client.ObjectKey{Name: key}, have) {
		switch {
		case apierrors.IsNotFound(err):
			want, err := plan()
			if err != nil {
				return nil, err
			}
			if err = s.client.Create(ctx, want); err == nil && !want.May().Make {
				uid := want.GetUID() // nobody may make it, and the name is to be free
				return nil, errors.Join(errDefinitions, client.IgnoreNotFound(s.client.Delete(ctx, want, client.Preconditions{UID: &uid})))
			}
			if !apierrors.IsAlreadyExists(err) {
				return want, apiError("create "+key, err)
			}
		case err != nil:
			return nil, apiError("read "+key, err)
		case !live:
		case going(have):
			if err := waitGone(ctx, s, w, have); err != nil {
				return nil, err
			}
		default:
			if ok, err := fits(have); ok || err != nil {
				return have, err
			}
		}
		have = T(new(O)) // nothing of what it was is to stay
	}
}

// plan is the object for a new volume: its place and size are chosen here.
func (s *Store) plan(ctx context.Context, spec volume.Spec) (*v1alpha1.Volume, error) {
	floor := int64(blockdev.Granularity)
	if spec.Filesystem != "" {
		floor = spec.Filesystem.MinSize()
	}
	v := volumeNamed(volume.KeyOf(spec.Name))
	v.Spec = v1alpha1.VolumeSpec{Intent: v1alpha1.Intent{Make: true}, Pool: spec.Pool, Name: spec.Name, Provisioning: string(spec.Provisioning), Filesystem: string(spec.Filesystem), Mutable: maps.Clone(spec.Mutable),
		PersistentVolume: spec.For.PersistentVolume}
	if spec.For.Name != "" {
		v.Spec.ClaimRef = &v1alpha1.ClaimRef{Namespace: spec.For.Namespace, Name: spec.For.Name}
	}
	var err error
	if spec.Source != (volume.ID{}) {
		var size int64
		var carried filesystem.Type
		if v.Spec.NodeName, size, carried, err = s.origin(ctx, spec.Source); err != nil {
			return nil, err
		}
		if err := spec.CheckSource(carried); err != nil {
			return nil, err
		}
		v.Spec.Source = &v1alpha1.Source{Kind: string(spec.Source.Kind), Key: spec.Source.Key}
		floor = max(floor, size)
		if spec.Pool != spec.Source.Pool {
			return nil, fmt.Errorf("%w: source %s is in pool %s and cannot be copied to pool %s", errdefs.ErrInvalid, spec.Source, spec.Source.Pool, spec.Pool)
		}
		if err := s.mayBeOn(ctx, spec, v.Spec.NodeName); err != nil {
			return nil, fmt.Errorf("source %s is on node %s, and so are its copies: %w", spec.Source, v.Spec.NodeName, err)
		}
	}
	size, err := spec.Size.Choose(floor, blockdev.Granularity)
	if err != nil {
		return nil, err
	}
	if v.Spec.Source == nil {
		v.Spec.NodeName, v.Spec.Pool, err = s.place(ctx, spec.Pool, spec.Nodes, size)
	} else {
		err = s.nodeReady(ctx, v.Spec.NodeName)
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

// origin says where a source is, how large, and what filesystem it carries. Of a snapshot that is
// what its volume carries, as long as that is there; the node knows in any case.
func (s *Store) origin(ctx context.Context, id volume.ID) (node string, size int64, carried filesystem.Type, err error) {
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

// fits is for obtain: it is the volume of the spec. What an earlier try left is cleared up.
func (s *Store) fits(ctx context.Context, w *watch, spec volume.Spec, have *v1alpha1.Volume) (bool, error) {
	if err := spec.Check(toVolume(have)); err != nil {
		return false, err
	}
	err := s.mayBeOn(ctx, spec, have.Spec.NodeName)
	if err != nil && !errors.Is(err, errdefs.ErrNoSpace) {
		return false, err
	}
	elsewhere := err != nil
	switch {
	case lostUnmade(have):
		if unused, err := s.neverUsed(ctx, spec, have); err != nil || !unused {
			return false, errors.Join(errorOf(have.Spec.NodeName, have.Status.Failure), err)
		}
		return false, discard(ctx, s, w, have)
	case elsewhere && (have.Status.Created != nil || !have.Spec.Make):
		return false, fmt.Errorf("%w: volume %s is on node %s, not on one of %v", errdefs.ErrExists, volumeID(have), have.Spec.NodeName, spec.Nodes)
	case elsewhere, have.Status.Created == nil && have.Common().Refused(have.Generation) != nil, have.Status.Is(v1alpha1.Abandoned, "True"):
		return false, discard(ctx, s, w, have)
	case have.Spec.Abandoned:
		before := have.DeepCopy()
		have.Spec.Abandoned = false
		err := s.client.Patch(ctx, have, lockingPatch(before))
		if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
			return false, nil
		}
		return true, apiError("keep it", err)
	}
	return true, nil
}

// made waits until the node has made an object. A refused one is removed, but for one whose
// bytes were there once.
func made[T object](ctx context.Context, s *Store, w *watch, have T) (T, error) {
	have, err := wait(ctx, s, w, have, isMade)
	var refused *refusal
	switch {
	case errors.Is(err, errGone):
		err = fmt.Errorf("%w: %w while it was being made", errdefs.ErrUnavailable, err)
	case errors.As(err, &refused):
		if lostUnmade(have) {
			return have, err
		}
		if err := discard(ctx, s, w, have); err != nil {
			return have, err
		}
	case err == nil:
		err = notAgain(ctx, s, have)
	}
	return have, err
}

// notAgain sees to it that what an agent of an older version has made is not made again.
func notAgain[T object](ctx context.Context, s *Store, have T) error {
	if !have.May().Make {
		return nil
	}
	before := have.DeepCopyObject().(T)
	after := have.DeepCopyObject().(T)
	after.May().Make = false
	return apiError("write down that it was made", ignoreConflict(s.client.Patch(ctx, after, client.MergeFrom(before))))
}

// isMade is for wait: the node has made the object, or refused to.
func isMade[T object](o T) (bool, error) {
	if o.Common().Created != nil {
		return true, nil
	}
	if f := o.Common().Refused(o.GetGeneration()); f != nil {
		return false, errorOf(o.Node(), f)
	}
	return false, nil
}

// Delete: see volume.Store. A node that has the volume attached goes on trying after the
// ErrInUse: what was written down stays so.
func (s *Store) Delete(ctx context.Context, id volume.ID) error {
	if id.Kind != blockdev.Volume {
		return nil
	}
	v := volumeNamed(id.Key)
	return remove(ctx, s, id, v, true, func(live bool) error { // a conflict is a claim, maybe
		claim := v.Spec.Claim
		switch {
		case claim == nil || v.Deleting():
			return nil
		case !live:
			return errStale // it may have been released since
		}
		s.doomed.AddAfter(orphan{aClaim, v.Name}, s.options.AbandonGrace)
		return fmt.Errorf("%w: volume %s is claimed by node %s; unpublish it first", errdefs.ErrInUse, id, claim.Node)
	})
}

// Get: see volume.Store. A volume that is being deleted is there until it is gone.
func (s *Store) Get(ctx context.Context, id volume.ID) (volume.Volume, error) {
	v, err := s.volume(ctx, id)
	if err != nil {
		return volume.Volume{}, err
	}
	return toVolume(v), nil
}

// List: see volume.Store.
func (s *Store) List(ctx context.Context, after volume.ID, limit int) ([]volume.Volume, error) {
	if err := s.Ready(ctx); err != nil {
		return nil, err
	}
	var list v1alpha1.VolumeList
	if err := s.client.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		return nil, apiError("list volumes", err)
	}
	var found []*v1alpha1.Volume
	for i := range list.Items {
		if v := &list.Items[i]; v.Status.Created != nil && compareIDs(volumeID(v), after) > 0 {
			found = append(found, v)
		}
	}
	slices.SortFunc(found, func(a, b *v1alpha1.Volume) int { return compareIDs(volumeID(a), volumeID(b)) })
	if limit > 0 && len(found) > limit {
		found = found[:limit]
	}
	var volumes []volume.Volume
	for _, v := range found {
		volumes = append(volumes, toVolume(v))
	}
	return volumes, nil
}

// Health: see volume.Store.
func (s *Store) Health(ctx context.Context, id volume.ID) ([]blockdev.Problem, error) {
	v, err := s.volume(ctx, id)
	if err != nil {
		return nil, err
	}
	err = s.nodeReady(ctx, v.Spec.NodeName)
	var down *nodeDown
	if errors.As(err, &down) && down.silent && len(v.Status.Health) == 0 {
		return []blockdev.Problem{{Severity: blockdev.Degraded, Reason: "AgentSilent", Message: down.why + ": what is known of the volume may be old"}}, nil
	}
	if err != nil && !(down != nil && down.silent) {
		return []blockdev.Problem{{Severity: blockdev.Inaccessible, Reason: "NodeNotReady", Message: err.Error()}}, nil
	}
	return toProblems(v.Status.Health), nil
}
