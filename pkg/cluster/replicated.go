package cluster

import (
	"context"
	"fmt"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// ByReplicaOf is the index of volumes that are legs, by the name of their ReplicatedVolume.
const ByReplicaOf = "replicaOf"

// Reasons of problems of replicated volumes.
const (
	ReasonReplicaMissing    = v1alpha1.ReasonReplicaMissing
	ReasonReplicaNotCurrent = v1alpha1.ReasonReplicaNotCurrent
	ReasonNoCurrentReplica  = v1alpha1.ReasonNoCurrentReplica
)

// IndexReplicaOf returns the values of a volume in the index ByReplicaOf.
func IndexReplicaOf(v *v1alpha1.Volume) []string {
	if v.Spec.ReplicaOf == "" {
		return nil
	}
	return []string{v.Spec.ReplicaOf}
}

// ReplicatedNamed returns a ReplicatedVolume that has nothing but its name.
func ReplicatedNamed(key string) *v1alpha1.ReplicatedVolume {
	return &v1alpha1.ReplicatedVolume{ObjectMeta: metav1.ObjectMeta{Name: key}}
}

// ReplicatedID returns the ID of a volume with several legs.
func ReplicatedID(r *v1alpha1.ReplicatedVolume) volume.ID {
	return volume.ID{Kind: blockdev.Volume, Pool: r.Spec.Pool, Key: r.Name}
}

// legName returns the CSI name of the n-th leg of a volume, from the second on. The first one has the name of the volume.
func legName(key string, n int64) string { return fmt.Sprintf("leg-%d-of-%s", n, key) }

// AddLeg adds the name of one more leg to an object, before the leg is made, and returns the name: that of its Volume. If a person has written the object, it
// may have legs that it did not number: their names are left out.
func AddLeg(r *v1alpha1.ReplicatedVolume) (name string) {
	for name == "" || slices.Contains(r.Spec.Legs, name) {
		r.Spec.Numbered++
		name = volume.KeyOf(legName(r.Name, r.Spec.Numbered))
	}
	r.Spec.Legs = append(r.Spec.Legs, name)
	return name
}

// NumberedLegs returns the names of all legs that an object has ever named (AddLeg), also of those that are gone.
func NumberedLegs(r *v1alpha1.ReplicatedVolume) (names []string) {
	for n := r.Spec.Numbered; n > 1; n-- {
		names = append(names, volume.KeyOf(legName(r.Name, n)))
	}
	return append(names, r.Name)
}

// IsNumbered reports whether an object has ever named a leg (AddLeg). If it has not, it is of before that leg was made, as it was restored: it cannot tell what
// the leg has.
func IsNumbered(r *v1alpha1.ReplicatedVolume, name string) bool {
	return slices.Contains(NumberedLegs(r), name)
}

// IsFurther reports whether an object has named a leg beside others (AddLeg), so that it can be made (LegSpec). The first leg is made before the object; and a
// person may have written any name.
func IsFurther(r *v1alpha1.ReplicatedVolume, name string) bool {
	return name != r.Name && IsNumbered(r, name)
}

// OfAgent reports whether an agent made the object of a volume, for bytes that it says are there: no agent can give an object spec.make, and none can change
// the spec of one that never had it. Of an object that the controller has changed since it cannot tell any more.
func OfAgent(v *v1alpha1.Volume) bool { return !v.Spec.Make && v.Generation <= 1 }

// LegSpec returns the spec of a leg that is made beside others (AddLeg): blank, with the size of its volume, and else like another leg. ok is false if no
// such leg has the name.
func LegSpec(r *v1alpha1.ReplicatedVolume, name string, like *v1alpha1.Volume) (spec volume.Spec, ok bool) {
	for n := r.Spec.Numbered; n > 1; n-- {
		if csi := legName(r.Name, n); volume.KeyOf(csi) == name {
			made := ToVolume(like)
			return volume.Spec{Name: csi, Pool: r.Spec.Pools, Size: volume.Range{Required: r.Spec.Size, Limit: r.Spec.Size}, Provisioning: blockdev.Provisioning(like.Spec.Provisioning),
				Filesystem: made.Filesystem, Encryption: EncryptionOf(like), Access: volume.AccessAny, HomeTimeout: made.HomeTimeout, ReplicaOf: r.Name, Mutable: like.Spec.Mutable, For: made.For}, true
		}
	}
	return volume.Spec{}, false
}

// ToReplicated returns the volume of a ReplicatedVolume. Its node, pool and filesystem are those of one of its legs; nil: no leg is there.
func ToReplicated(r *v1alpha1.ReplicatedVolume, leg *v1alpha1.Volume) volume.Volume {
	out := volume.Volume{Access: volume.AccessAny, Mutable: map[string]string{}}
	if leg != nil {
		out = ToVolume(leg)
	}
	out.ID, out.Pool, out.Name, out.Size, out.Replicas, out.ReplicaOf = ReplicatedID(r), "", r.Spec.Name, r.Spec.Size, r.Spec.Replicas, ""
	if leg != nil {
		out.Pool = leg.Spec.Pool
	}
	out.Claim, out.Readers = volume.Claim{}, nil
	if c := r.Spec.Claim; c != nil {
		out.Claim = ToClaim(c)
	}
	if r.Status.Made != nil {
		out.Created = r.Status.Made.Time
	}
	return out
}

// NextReplicatedClaim returns the generation of the next claim of a volume with several legs. It is larger than those of all claims before, of the volume
// and of its legs, so that each leg can have the same one.
func NextReplicatedClaim(r *v1alpha1.ReplicatedVolume, legs []*v1alpha1.Volume) int64 {
	next := max(r.Spec.Claims, r.Status.Opened) + 1
	for _, v := range legs {
		next = max(next, NextClaim(v))
	}
	return next
}

// SyncLeg gives the object of a leg the claim and the size that its volume asks for, and reports whether that changes it. The claim is for the same node,
// with the same generation or a later one. An earlier claim is taken off first: while the leg's node still exports it, it gets no other. A leg is at least as
// large as its volume.
func SyncLeg(r *v1alpha1.ReplicatedVolume, v *v1alpha1.Volume) (changed bool) {
	want := r.Spec.Claim
	if have := v.Spec.Claim; have != nil && !claimedAs(have, want) {
		v.Spec.Claim, changed = nil, true
	}
	if v.Spec.Claim == nil {
		if next := NextClaim(v); next-1 > v.Spec.Claims { // so that its node sees that its export has to end
			v.Spec.Claims, changed = next-1, true
		}
		if want != nil && v.Status.Created != nil && !v.Spec.Abandoned && !v1alpha1.Going(v) && len(v.Given()) == 0 {
			v.Spec.Claims = max(want.Generation, NextClaim(v))
			v.Spec.Claim, changed = &v1alpha1.Claim{Node: want.Node, ReadOnly: want.ReadOnly, Mode: want.Mode, Generation: v.Spec.Claims, Since: want.Since}, true
		}
	}
	if v.Spec.Size < r.Spec.Size && !v1alpha1.Going(v) {
		v.Spec.Size, changed = r.Spec.Size, true
	}
	return changed
}

// KeepSize gives the object of a volume the size that all its legs have, if that is larger, and reports whether that changes it: the object was restored to before
// the volume grew. Through a smaller mirror its users would not find what they have, and behind its end no leg would be made equal to the others. legs are those of
// spec.legs that are there. As long as one that is current is not there, or one has not grown, the volume has not grown either. But a volume grows without legs
// that are lost, or still to be made: the object may be of before such a one was replaced, and its successor would be too small for the volume.
func KeepSize(r *v1alpha1.ReplicatedVolume, legs []*v1alpha1.Volume) (changed bool) {
	least := int64(0)
	for _, name := range r.Spec.Legs {
		l := r.Leg(name)
		listed := l != nil && l.Current
		i := slices.IndexFunc(legs, func(v *v1alpha1.Volume) bool { return v.Name == name })
		switch {
		case i < 0 && listed:
			return false
		case i < 0 || v1alpha1.IsLost(legs[i]) || legs[i].Status.Created == nil && !listed:
		case least == 0 || legs[i].Status.Size < least:
			if least = legs[i].Status.Size; least == 0 {
				return false
			}
		}
	}
	changed = least > r.Spec.Size
	r.Spec.Size = max(r.Spec.Size, least)
	return changed
}

// claimedAs reports whether a leg has the claim of its volume: for the same node and use, with its generation or a later one.
func claimedAs(have, want *v1alpha1.Claim) bool {
	return want != nil && have.Node == want.Node && have.ReadOnly == want.ReadOnly && have.Mode == want.Mode && have.Generation >= want.Generation
}

// SummarizeLegs sets status.summary, which kubectl shows: how many legs of a volume are current.
func SummarizeLegs(r *v1alpha1.ReplicatedVolume) {
	r.Status.Summary = fmt.Sprintf("%d of %d", len(r.Current()), r.Spec.Replicas)
}

// SetLegs sets the status of a volume whose legs were just made, and which nobody has used: all are current. If the volume was copied from a source, only
// the first leg is, as it alone has the copy.
func SetLegs(r *v1alpha1.ReplicatedVolume, copied bool) {
	now := time.Now()
	r.Status.Made, r.Status.Legs = new(metav1.NewMicroTime(now)), nil
	for i, name := range r.Spec.Legs {
		leg := v1alpha1.Leg{Name: name, Current: true, State: v1alpha1.LegCurrent}
		if copied && i > 0 {
			leg = v1alpha1.Leg{Name: name, State: v1alpha1.LegWaiting, Since: new(metav1.NewTime(now)), Message: "what the volume holds is copied to it when the volume is used"}
		}
		r.Status.Legs = append(r.Status.Legs, leg)
	}
	SummarizeLegs(r)
}

// RemoveLeg allows the node of a leg to delete it, and takes its claim off (IntendDeletion). It returns the Volume of the leg. It does nothing, and
// returns nil, if the leg is not there, or the volume still is to have it, or is another one of its name. It judges that by the API server, which it asks
// for the volume after it has read the leg: a new volume of the same name may have a leg of the same name. ErrUnavailable while the leg's old node has its
// bytes (Leaving).
func RemoveLeg(ctx context.Context, c kube.Connection, r *v1alpha1.ReplicatedVolume, name string) (*v1alpha1.Volume, error) {
	for {
		v, err := removeLeg(ctx, c, r, name)
		if !apierrors.IsConflict(err) { // the change may be a move
			return v, err
		}
	}
}

func removeLeg(ctx context.Context, c kube.Connection, r *v1alpha1.ReplicatedVolume, name string) (*v1alpha1.Volume, error) {
	v, now := &v1alpha1.Volume{}, &v1alpha1.ReplicatedVolume{}
	err := c.Live.Get(ctx, client.ObjectKey{Name: name}, v)
	if err == nil {
		err = c.Live.Get(ctx, client.ObjectKey{Name: r.Name}, now)
	}
	if err == nil && (v.Spec.ReplicaOf != r.Name || now.UID != r.UID || !now.Deleting() && slices.Contains(now.Spec.Legs, name)) {
		return nil, nil
	}
	if err == nil && !v.Deleting() {
		if err := Leaving("volume", VolumeID(v), v.Spec.Move); err != nil {
			return nil, err
		}
		err = IntendDeletion(ctx, c.Client, v, true)
	}
	if err != nil {
		return nil, kube.APIError("delete leg "+name, client.IgnoreNotFound(err))
	}
	return v, nil
}
