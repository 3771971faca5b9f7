package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// change changes the spec of a usable volume by compare-and-swap, until no conflict occurs. edit returns false if there is nothing to change, or an error if
// it refuses: either counts only for an object that was read at the API server itself, so edit may be called several times. What the node has refused of the
// spec, and nobody has reverted, is reverted by a write of its own before: with a new generation of the spec the node would try it again, unasked.
func (s *Store) change(ctx context.Context, id volume.ID, edit func(v *v1alpha1.Volume) (bool, error)) (*v1alpha1.Volume, error) {
	v, err := s.usable(ctx, id)
	leg := err == nil && v.Spec.ReplicaOf != ""
	for live := false; ; live = true {
		if err != nil {
			return nil, err
		}
		if !leg && v.Spec.ReplicaOf != "" { // it has become a leg meanwhile
			return nil, getsReplicas(id)
		}
		before := v.DeepCopy()
		reverted := revert(v)
		changed, err2 := reverted, error(nil)
		if !reverted {
			changed, err2 = edit(v)
		}
		if err2 == nil && changed {
			cluster.Trace(ctx, v)
			err2 = s.kube.Client.Patch(ctx, v, kube.LockingPatch(before))
			if !apierrors.IsConflict(err2) && (err2 != nil || !reverted) {
				return v, kube.APIError("change volume "+id.String(), err2)
			}
		} else if live {
			return v, err2
		}
		v = &v1alpha1.Volume{}
		err = kube.APIError("read volume "+id.String(), s.kube.Live.Get(ctx, client.ObjectKey{Name: id.Key}, v))
		switch {
		case err != nil:
		case v.Named() != id.Pool: // another volume of the name
			err = fmt.Errorf("%w: no volume %s any more", errdefs.ErrNotFound, id)
		case v1alpha1.Going(v) || v.Spec.Abandoned:
			err = fmt.Errorf("%w: volume %s is being deleted", errdefs.ErrPrecondition, id)
		}
	}
}

// revert sets size and mutable parameters in the spec of a volume to those of its status, if the node has refused the present spec, and reports whether that
// changes the spec.
func revert(v *v1alpha1.Volume) (changed bool) {
	if v.Common().Refused(v.Generation) == nil {
		return false
	}
	size := cmp.Or(v.Status.Size, v.Spec.Size) // 0: an object without a status, as after a restore; nothing of it was refused
	changed = v.Spec.Size != size || !maps.Equal(v.Spec.Mutable, v.Status.Mutable)
	v.Spec.Size, v.Spec.Mutable = size, maps.Clone(v.Status.Mutable)
	return changed
}

// Expand: see volume.Store. If the node refuses, the size goes back to what it was.
func (s *Store) Expand(ctx context.Context, id volume.ID, size volume.Range) (volume.Volume, error) {
	if r, err := s.replicated(ctx, id); r != nil || err != nil {
		if err != nil {
			return volume.Volume{}, err
		}
		return s.expandReplicated(ctx, r, size)
	}
	w := s.hub.Open(cluster.VolumeNamed(id.Key))
	defer w.Close()
	v, err := s.usable(ctx, id)
	if err != nil {
		return volume.Volume{}, err
	}
	have := v.Status.Size
	if size.Limit > 0 && have > size.Limit && size.Required <= size.Limit {
		return volume.Volume{}, fmt.Errorf("%w: volume %s has %d bytes, more than the limit of %d; volumes do not shrink", errdefs.ErrOutOfRange, id, have, size.Limit)
	}
	step, err := s.granularity(ctx, v.Spec.NodeName, v.Spec.Pool)
	if err != nil {
		return volume.Volume{}, err
	}
	want, err := size.Choose(have, step, cluster.EncryptionOf(v).Scheme.Overhead())
	if err != nil {
		return volume.Volume{}, err
	}
	if size.Required == 0 || want <= have {
		return cluster.ToVolume(v), nil
	}
	return s.grow(ctx, w, v, want)
}

// grow has a volume grow to a size, and waits for that. It changes nothing if the volume has or is to have that size by now, as another controller was asked
// too.
func (s *Store) grow(ctx context.Context, w *kube.Watch, v *v1alpha1.Volume, want int64) (volume.Volume, error) {
	return s.changeAndWait(ctx, w, v, func(v *v1alpha1.Volume) bool {
		if v.Spec.Size == want || v.Status.Size >= want {
			return false
		}
		v.Spec.Size = want
		return true
	}, func(v *v1alpha1.Volume) bool { return v.Status.Size >= want })
}

// Modify: see volume.Store. If the node refuses, the parameters go back to what they were.
func (s *Store) Modify(ctx context.Context, id volume.ID, mutable map[string]string) error {
	if err := volume.CheckMutable(mutable); err != nil {
		return err
	}
	if r, err := s.replicated(ctx, id); r != nil || err != nil {
		if err != nil {
			return err
		}
		return s.modifyReplicated(ctx, r, mutable)
	}
	return s.modifyOne(ctx, id, mutable)
}

// modifyOne is Modify of a volume on one node, or of a leg.
func (s *Store) modifyOne(ctx context.Context, id volume.ID, mutable map[string]string) error {
	w := s.hub.Open(cluster.VolumeNamed(id.Key))
	defer w.Close()
	v, err := s.usable(ctx, id)
	if err != nil {
		return err
	}
	holds := func(all map[string]string) bool {
		for key, value := range mutable {
			if have, there := all[key]; !there || have != value {
				return false
			}
		}
		return true
	}
	inForce := func(v *v1alpha1.Volume) bool { return holds(v.Status.Mutable) && holds(v.Spec.Mutable) }
	if inForce(v) { // by the cache; another controller may have changed them since
		now := &v1alpha1.Volume{}
		err := s.kube.Live.Get(ctx, client.ObjectKey{Name: id.Key}, now)
		if err != nil || (now.UID == v.UID && inForce(now)) {
			return kube.APIError("read volume "+id.String(), err)
		}
		v = now
	}
	_, err = s.changeAndWait(ctx, w, v, func(v *v1alpha1.Volume) bool {
		changed := !holds(v.Spec.Mutable)
		if v.Spec.Mutable == nil {
			v.Spec.Mutable = map[string]string{}
		}
		maps.Copy(v.Spec.Mutable, mutable)
		return changed
	}, inForce)
	return err
}

// errTogether is the error of a change that was refused or undone together with another caller's change: alone it may succeed.
var errTogether = fmt.Errorf("%w: its node refused it together with another change; ask again", errdefs.ErrUnavailable)

// mostTogether is how often such a change is tried, as others may go on to change the volume too.
const mostTogether = 3

// changeAndWait changes the spec of a volume and waits until its node has carried that out. If the node refuses, the spec is reverted. If it refused the
// change together with another caller's, the change is tried again alone.
func (s *Store) changeAndWait(ctx context.Context, w *kube.Watch, v *v1alpha1.Volume, edit, done func(*v1alpha1.Volume) bool) (now volume.Volume, err error) {
	for range mostTogether {
		if now, err = s.changeOnce(ctx, w, v, edit, done); !errors.Is(err, errTogether) {
			break
		}
	}
	return now, err
}

// isAlone reports whether an edit is the only change that the spec of a volume asks for.
func isAlone(v *v1alpha1.Volume, edit func(*v1alpha1.Volume) bool) bool {
	alone := v.DeepCopy()
	alone.Spec.Size, alone.Spec.Mutable = v.Status.Size, maps.Clone(v.Status.Mutable)
	edit(alone)
	return alone.Spec.Size == v.Spec.Size && maps.Equal(alone.Spec.Mutable, v.Spec.Mutable)
}

// changeOnce is changeAndWait, and errTogether if it is to be tried again.
func (s *Store) changeOnce(ctx context.Context, w *kube.Watch, v *v1alpha1.Volume, edit, done func(*v1alpha1.Volume) bool) (volume.Volume, error) {
	id := cluster.VolumeID(v)
	if err := s.nodes.Ready(ctx, v.Spec.NodeName); err != nil {
		return volume.Volume{}, fmt.Errorf("volume %s: %w", id, err)
	}
	v, err := s.change(ctx, id, func(v *v1alpha1.Volume) (bool, error) { return edit(v), nil })
	if err != nil {
		return volume.Volume{}, err
	}
	v, err = wait(ctx, s, w, v, func(v *v1alpha1.Volume) (bool, error) {
		if done(v) {
			return true, nil
		}
		if f := v.Common().Refused(v.Generation); f != nil {
			return false, cluster.ErrorOf(v.Spec.NodeName, f)
		}
		if v.Spec.Size == v.Status.Size && maps.Equal(v.Spec.Mutable, v.Status.Mutable) {
			return false, errTogether
		}
		return false, nil
	})
	var refused *cluster.Refusal
	switch {
	case errors.Is(err, errGone):
		return volume.Volume{}, fmt.Errorf("%w: no volume %s any more", errdefs.ErrNotFound, id)
	case errors.As(err, &refused) && !isAlone(v, edit):
		return volume.Volume{}, cmp.Or(s.revertRefused(ctx, id), errTogether)
	case errors.As(err, &refused):
		return volume.Volume{}, errors.Join(fmt.Errorf("volume %s: %w", id, err), s.revertRefused(ctx, id))
	case err != nil:
		return volume.Volume{}, fmt.Errorf("volume %s: %w", id, err)
	case v.Common().Refused(v.Generation) != nil: // done, but another caller's change was refused, who may have given up before this answer came
		return cluster.ToVolume(v), s.revertRefused(ctx, id)
	}
	return cluster.ToVolume(v), nil
}

// revertRefused reverts what the node has refused of the spec of a volume.
func (s *Store) revertRefused(ctx context.Context, id volume.ID) error {
	_, err := s.change(ctx, id, func(*v1alpha1.Volume) (bool, error) { return false, nil })
	return err
}
