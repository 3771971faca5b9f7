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

// ReasonCreated is the reason of the condition Ready of what was made for its object, as long as it was never lost meanwhile.
const ReasonCreated = "Created"

// ReasonNoSuchStray is the reason of the condition Adopted for a pool of which was to be adopted what it does not keep.
const ReasonNoSuchStray = "NoSuchStray"

// ReasonStrays is the reason of the condition Accounted for a pool with volumes or snapshots that have no object.
const ReasonStrays = "Strays"

// ProvisionedPrefix begins the names that external-provisioner gives to volumes; the rest is the UID of the PersistentVolumeClaim.
const ProvisionedPrefix = "pvc-"

// VolumeID returns the ID of the volume of an object.
func VolumeID(v *v1alpha1.Volume) volume.ID {
	return volume.ID{Kind: blockdev.Volume, Pool: v.Named(), Key: v.Name}
}

// SnapshotID returns the ID of the snapshot of an object.
func SnapshotID(s *v1alpha1.Snapshot) volume.ID {
	return volume.ID{Kind: blockdev.Snapshot, Pool: s.Spec.Pool, Key: s.Name}
}

// SourceOf returns what a volume is a copy of; the zero ID if it is no copy.
func SourceOf(v *v1alpha1.Volume) volume.ID {
	if v.Spec.Source == nil {
		return volume.ID{}
	}
	return volume.ID{Kind: blockdev.Kind(v.Spec.Source.Kind), Pool: cmp.Or(v.Spec.Source.Pool, v.Named()), Key: v.Spec.Source.Key}
}

// FromSource is the inverse of SourceOf. pool is the one in the ID of the copy.
func FromSource(source volume.ID, pool string) *v1alpha1.Source {
	s := &v1alpha1.Source{Kind: string(source.Kind), Key: source.Key}
	if source.Pool != pool {
		s.Pool = source.Pool
	}
	return s
}

// RequesterOf returns for whom a volume was made.
func RequesterOf(v *v1alpha1.Volume) volume.Requester {
	who := volume.Requester{PersistentVolume: v.Spec.PersistentVolume}
	if ref := v.Spec.ClaimRef; ref != nil {
		who.Namespace, who.Name = ref.Namespace, ref.Name
	}
	return who
}

// MemberName returns the name that volume.Local gives to the member of a group that is the snapshot of a source.
func MemberName(group string, source volume.ID) string { return group + "\x00" + source.String() }

// SnapshotSource returns the ID of the volume that a snapshot is of.
func SnapshotSource(s *v1alpha1.Snapshot) volume.ID {
	return volume.ID{Kind: blockdev.Volume, Pool: s.SourceNamed(), Key: s.Spec.Source}
}

// SnapshotNamed returns a Snapshot that has nothing but its name.
func SnapshotNamed(key string) *v1alpha1.Snapshot {
	return &v1alpha1.Snapshot{ObjectMeta: metav1.ObjectMeta{Name: key}}
}

// VolumeNamed returns a Volume that has nothing but its name.
func VolumeNamed(key string) *v1alpha1.Volume {
	return &v1alpha1.Volume{ObjectMeta: metav1.ObjectMeta{Name: key}}
}

// Objects are all volumes, snapshots and pools that a cache has.
type Objects struct {
	Volumes   []v1alpha1.Volume
	Snapshots []v1alpha1.Snapshot
	Pools     []v1alpha1.Pool
}

// Cached returns what a cache has: the objects of the cluster, or in an agent those of its node. They are shared with the cache: the caller must not
// change them.
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

// Object is a Volume or a Snapshot. pkg/api describes its methods.
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

// Annotate sets an annotation of an object, or removes it if the value is empty. It replaces the map of annotations, so a shallow copy of the object keeps
// the old ones.
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
