package cluster

import (
	"cmp"
	"context"
	"maps"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// ReasonNotConfigured is the reason of the condition Healthy for a pool that the node was started without.
const ReasonNotConfigured = "NotConfigured"

// ReasonStrays is the reason of the condition Accounted for a pool with volumes or snapshots that no object is for.
const ReasonStrays = "Strays"

// ProvisionedPrefix is what the provisioner's names of volumes begin with; the rest is the UID of the claim.
const ProvisionedPrefix = "pvc-"

// VolumeID is the ID of the volume of an object.
func VolumeID(v *v1alpha1.Volume) volume.ID {
	return volume.ID{Kind: blockdev.Volume, Pool: v.Named(), Key: v.Name}
}

// SnapshotID is the ID of the snapshot of an object.
func SnapshotID(s *v1alpha1.Snapshot) volume.ID {
	return volume.ID{Kind: blockdev.Snapshot, Pool: s.Spec.Pool, Key: s.Name}
}

// SourceOf is what a volume is a copy of; the zero ID for none.
func SourceOf(v *v1alpha1.Volume) volume.ID {
	if v.Spec.Source == nil {
		return volume.ID{}
	}
	return volume.ID{Kind: blockdev.Kind(v.Spec.Source.Kind), Pool: cmp.Or(v.Spec.Source.Pool, v.Named()), Key: v.Spec.Source.Key}
}

// FromSource is the inverse of SourceOf, for a volume whose ID names a pool.
func FromSource(source volume.ID, pool string) *v1alpha1.Source {
	s := &v1alpha1.Source{Kind: string(source.Kind), Key: source.Key}
	if source.Pool != pool {
		s.Pool = source.Pool
	}
	return s
}

// RequesterOf says for whom a volume was made.
func RequesterOf(v *v1alpha1.Volume) volume.Requester {
	who := volume.Requester{PersistentVolume: v.Spec.PersistentVolume}
	if ref := v.Spec.ClaimRef; ref != nil {
		who.Namespace, who.Name = ref.Namespace, ref.Name
	}
	return who
}

// MemberName is what volume.Local calls the snapshot of a source that belongs to a group.
func MemberName(group string, source volume.ID) string { return group + "\x00" + source.String() }

// SnapshotSource is the volume that a snapshot is of.
func SnapshotSource(s *v1alpha1.Snapshot) volume.ID {
	return volume.ID{Kind: blockdev.Volume, Pool: s.SourceNamed(), Key: s.Spec.Source}
}

// SnapshotNamed is a Snapshot object that has no more than its name.
func SnapshotNamed(key string) *v1alpha1.Snapshot {
	return &v1alpha1.Snapshot{ObjectMeta: metav1.ObjectMeta{Name: key}}
}

// VolumeNamed is a Volume object that has no more than its name.
func VolumeNamed(key string) *v1alpha1.Volume {
	return &v1alpha1.Volume{ObjectMeta: metav1.ObjectMeta{Name: key}}
}

// Objects are all volumes, snapshots and pools that a cache has.
type Objects struct {
	Volumes   []v1alpha1.Volume
	Snapshots []v1alpha1.Snapshot
	Pools     []v1alpha1.Pool
}

// Cached returns what a cache has: of the cluster, or for an agent of its node. They are the cache's own, so nobody may change them.
func Cached(ctx context.Context, c cache.Cache) (Objects, error) {
	var volumes v1alpha1.VolumeList
	var snapshots v1alpha1.SnapshotList
	var pools v1alpha1.PoolList
	for _, list := range []client.ObjectList{&volumes, &snapshots, &pools} {
		if err := c.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
			return Objects{}, err
		}
	}
	return Objects{volumes.Items, snapshots.Items, pools.Items}, nil
}

// Object is a Volume or a Snapshot. pkg/api says what its methods are.
type Object interface {
	client.Object
	Common() *v1alpha1.ObjectStatus
	Node() string
	In() string
	Named() string
	Strict() bool
	May() *v1alpha1.Intent
	Deleting() bool
	Moves() (*v1alpha1.Move, *v1alpha1.MoveStatus)
	SetMoveStatus(*v1alpha1.MoveStatus)
}

// Annotate gives an annotation to an object, or takes it off if its value is empty. The annotations become the object's own: those that it shared with a copy stay as they are.
func Annotate(o client.Object, key, value string) {
	annotations := maps.Clone(o.GetAnnotations())
	switch {
	case value == "":
		delete(annotations, key)
	case annotations == nil:
		annotations = map[string]string{key: value}
	default:
		annotations[key] = value
	}
	o.SetAnnotations(annotations)
}
