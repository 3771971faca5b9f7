package v1alpha1

import (
	"fmt"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// MostReplicas is how many nodes can have the bytes of a volume at once.
const MostReplicas = 3

// ReplicatedVolume is a volume whose bytes are on several nodes (docs/replication.md). Each of these copies is a Volume of its own, a leg, with access any, whose spec.replicaOf is the name
// of this object. That name is the volume's key, and also that of the leg which it was made with; so the ID of a volume is the same with one leg and with several.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:scope=Cluster,categories=ashlar
// +kubebuilder:subresource:status
// +kubebuilder:selectablefield:JSONPath=`.spec.claim.node`
// +kubebuilder:printcolumn:name="Replicas",type=integer,JSONPath=`.spec.replicas`,description="How many legs the volume is to have"
// +kubebuilder:printcolumn:name="Current",type=string,JSONPath=`.status.summary`,description="How many of its legs have all acknowledged writes"
// +kubebuilder:printcolumn:name="Published",type=string,JSONPath=`.spec.claim.node`,description="The node that may use the volume"
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Volume",type=string,priority=1,JSONPath=`.spec.name`,description="The CSI name, which is the name of its PersistentVolume"
// +kubebuilder:validation:XValidation:rule="self.metadata.name.matches('^[0-9a-f]{32}$')",message="the name of a replicated volume is its key"
// +kubebuilder:validation:XValidation:rule="!has(self.status) || !has(self.status.opened) || self.status.opened <= (has(self.spec.claims) ? self.spec.claims : 0)",message="legs are opened by a claim that there was"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.status) || !has(oldSelf.status.legs) || !oldSelf.status.legs.exists(l, l.current) || has(self.status) && has(self.status.legs) && self.status.legs.exists(l, l.current)",message="the last leg that is current stays so: nobody else has all that was written"
type ReplicatedVolume struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec ReplicatedVolumeSpec `json:"spec"`
	// +optional
	Status ReplicatedVolumeStatus `json:"status,omitempty"`
}

// ReplicatedVolumeSpec is what a volume with several legs is to be. The controller alone writes it, but for Scrubs.
//
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.claims) || has(self.claims) && self.claims >= oldSelf.claims",message="claims are counted up"
// +kubebuilder:validation:XValidation:rule="!has(self.claim) || has(self.claims) && has(self.claim.generation) && self.claim.generation == self.claims",message="the generation of a claim is the count of claims"
// +kubebuilder:validation:XValidation:rule="!has(self.claim) || has(oldSelf.claim) && self.claim == oldSelf.claim || !has(oldSelf.claims) || self.claims > oldSelf.claims",message="another claim has another generation"
// +kubebuilder:validation:XValidation:rule="!has(self.delete) || !has(self.claim)",message="a volume that is to be deleted is not claimed"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.scrubs) || has(self.scrubs) && self.scrubs >= oldSelf.scrubs",message="what was asked for is counted up"
// +kubebuilder:validation:XValidation:rule="self.size >= oldSelf.size",message="a volume does not shrink"
// +kubebuilder:validation:XValidation:rule="self.numbered >= oldSelf.numbered",message="legs are counted up"
// +kubebuilder:validation:XValidation:rule="self.pool == oldSelf.pool",message="the pool that the ID of a volume names does not change"
type ReplicatedVolumeSpec struct {
	// Name is the CSI name.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="the name of a volume does not change"
	Name string `json:"name"`
	// Pool that the volume's ID names, for good.
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]{0,22}[a-z0-9])?$`
	Pool string `json:"pool"`
	// Pools are those that its legs may be in, as the class says (a pattern, or names with commas); empty: default pools.
	// +optional
	// +kubebuilder:validation:MaxLength=1024
	Pools string `json:"pools,omitempty"`
	// Replicas is how many legs it is to have.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=3
	Replicas int `json:"replicas"`
	// TopologyKey is the label of nodes by which its legs are apart; empty: they are on different nodes.
	// +optional
	// +kubebuilder:validation:MaxLength=317
	TopologyKey string `json:"topologyKey,omitempty"`
	// ReplaceAfter is after how many seconds a leg that cannot be used is replaced by one on another node; 0: never.
	// +optional
	// +kubebuilder:validation:Minimum=0
	ReplaceAfter int64 `json:"replaceAfter,omitempty"`
	// Size in bytes that each leg is to have, at least. It grows when all legs have grown.
	// +kubebuilder:validation:Minimum=4096
	Size int64 `json:"size"`
	// Legs are the names of the Volumes that are its legs, or are to be.
	// +listType=set
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=6
	// +kubebuilder:validation:items:Pattern=`^[0-9a-f]{32}$`
	Legs []string `json:"legs"`
	// Numbered is how many legs there ever were: the name of the next one follows from it.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=100000
	Numbered int64 `json:"numbered"`
	// Removed are the legs that were taken out of spec.legs last, the latest one last.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=6
	Removed []RemovedLeg `json:"removed,omitempty"`
	// Claim fences the volume to one node: it changes by compare-and-swap only.
	// +optional
	Claim *Claim `json:"claim,omitempty"`
	// Claims is how many claims there were; it stays when a claim goes.
	// +optional
	// +kubebuilder:validation:Minimum=1
	Claims int64 `json:"claims,omitempty"`
	// Scrubs is how often a person has asked for the legs to be compared, beside what the driver does by itself.
	// +optional
	// +kubebuilder:validation:Minimum=1
	Scrubs int64 `json:"scrubs,omitempty"`
	// Delete: the legs may be deleted, and the object after them. It is the UID of this very object.
	// +optional
	Delete types.UID `json:"delete,omitempty"`
}

// RemovedLeg is a leg that its volume does without.
type RemovedLeg struct {
	// Name of its Volume, which is deleted.
	// +kubebuilder:validation:Pattern=`^[0-9a-f]{32}$`
	Name string `json:"name"`
	// NodeName is the node that had it; empty: it was on none, or that is not known.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	NodeName string `json:"nodeName,omitempty"`
	// Time of that, by the controller's clock.
	Time metav1.Time `json:"time"`
	// Unfit says why it could never be made equal to the others; its node gets no other leg of this volume for a day. Empty: it could.
	// +optional
	// +kubebuilder:validation:MaxLength=2048
	Unfit string `json:"unfit,omitempty"`
}

// unfitFor is for how long a node gets no leg of a volume after one there could not be made equal. By then it may have other disks.
const unfitFor = 24 * time.Hour

// Unfit is why a node is to have no leg of the volume now, in words that follow on the name of the node: one there could not be made equal to the others. Empty if nothing is known of that.
func (v *ReplicatedVolume) Unfit(node string, now time.Time) string {
	for _, l := range v.Spec.Removed {
		if l.Unfit != "" && l.NodeName == node && now.Sub(l.Time.Time) < unfitFor {
			return fmt.Sprintf("had a replica at %s that could not be made equal to the others, and gets none before %s: %s", l.Time.UTC().Format(time.RFC3339), l.Time.Add(unfitFor).UTC().Format(time.RFC3339), l.Unfit)
		}
	}
	return ""
}

// ReplicatedVolumeStatus is how the legs of a volume are. The node of its claim writes it, by compare-and-swap; the controller, while there is no claim and no leg was ever used.
type ReplicatedVolumeStatus struct {
	// Made: all its first legs are there, and the volume can be used.
	// +optional
	Made *metav1.MicroTime `json:"made,omitempty"`
	// Opened is the generation of the claim by which the legs were last opened.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Opened int64 `json:"opened,omitempty"`
	// Closed is opened, once who had that claim has closed all legs that are current: they are equal, and durable. Otherwise its user died, or uses them.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Closed int64 `json:"closed,omitempty"`
	// Reads is the leg that the user of that claim reads from. It shows writes that other legs may lack, as they were under way when the user ended: so the next user takes this one, if it can.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	Reads string `json:"reads,omitempty"`
	// Lists is how many lists of current legs there were that somebody used: the count of this one. The records of the legs on it have it, too, before anything is written that only these legs have; a record that knows of a later list tells
	// that this object is of before it, as it was restored. 0: not counted yet.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Lists int64 `json:"lists,omitempty"`
	// Waits says why the node of the claim cannot use the volume, though a leg that is current answers: what is waited for, or is to be done. Without a claim it says nothing.
	// +optional
	// +kubebuilder:validation:MaxLength=2048
	Waits string `json:"waits,omitempty"`
	// Legs are those of spec.legs that are there.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=6
	Legs []Leg `json:"legs,omitempty"`
	// Scrub is how far the legs are compared, and what was found; without it they never were.
	// +optional
	Scrub *Scrub `json:"scrub,omitempty"`

	// Lacks says why there are fewer legs than there are to be, while no further one is made. The controller writes it.
	// +optional
	// +kubebuilder:validation:MaxLength=2048
	Lacks string `json:"lacks,omitempty"`
	// Summary is how many legs are current, in words for people.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	Summary string `json:"summary,omitempty"`
}

// Leg is how a leg is.
type Leg struct {
	// Name of its Volume.
	// +kubebuilder:validation:Pattern=`^[0-9a-f]{32}$`
	Name string `json:"name"`
	// Current: it has every acknowledged write.
	// +optional
	Current bool `json:"current,omitempty"`
	// Sound is the generation of the claim by which it was current last; 0: by none, as nobody has used the volume yet. A leg whose own record says less is an older copy.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Sound int64 `json:"sound,omitempty"`
	// List is the number of the last list of current legs that it was on (lists); 0: of none, or it is not known. A leg whose own record says more than that is ahead of the object.
	// +optional
	// +kubebuilder:validation:Minimum=0
	List int64 `json:"list,omitempty"`
	// State says more for people: see the LegStates.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	State string `json:"state,omitempty"`
	// Message says why it is not current, and what is waited for.
	// +optional
	// +kubebuilder:validation:MaxLength=2048
	Message string `json:"message,omitempty"`
	// Progress of what is copied to it, in bytes, while it is made equal.
	// +optional
	Progress *Progress `json:"progress,omitempty"`
	// Since when it is not current, by the clock of who wrote that.
	// +optional
	Since *metav1.Time `json:"since,omitempty"`
}

// Scrub is a comparison of all current legs of a volume, from its beginning to its end, while it is used. It goes on where it was with the next user.
type Scrub struct {
	// Asked is the spec.scrubs that the scrub which began last is for.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Asked int64 `json:"asked,omitempty"`
	// Progress of the scrub that is under way, in bytes; without it none is.
	// +optional
	Progress *Progress `json:"progress,omitempty"`
	// Found is what that one has found until now.
	// +optional
	Found *Differences `json:"found,omitempty"`
	// Ended is when one was last done, by the clock of the node that did it.
	// +optional
	Ended *metav1.Time `json:"ended,omitempty"`
	// Last is what that one found; without it, that all legs are equal.
	// +optional
	Last *Differences `json:"last,omitempty"`
	// Turned is when the legs were found to differ, or, when they do no more, when that was found; without it they never did.
	// +optional
	Turned *metav1.Time `json:"turned,omitempty"`
}

// Differs: something is known that is not the same on all legs.
func (s *Scrub) Differs() bool { return s != nil && (s.Last != nil || s.Found != nil) }

// MostRanges is how many ranges Differences names.
const MostRanges = 16

// Differences are what is not the same on all legs of a volume, or cannot be read on all.
type Differences struct {
	// Bytes, in blocks of 4 KiB, or of 1 MiB where a leg cannot be read.
	// +kubebuilder:validation:Minimum=1
	Bytes int64 `json:"bytes"`
	// Ranges are the first ones.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	Ranges []ByteRange `json:"ranges,omitempty"`
	// Message says why some could not be read.
	// +optional
	// +kubebuilder:validation:MaxLength=2048
	Message string `json:"message,omitempty"`
}

// ByteRange is a part of a volume.
type ByteRange struct {
	// +kubebuilder:validation:Minimum=0
	Offset int64 `json:"offset"`
	// +kubebuilder:validation:Minimum=1
	Length int64 `json:"length"`
}

// ReasonReplicasDiffer is of the problem that legs which are current are not equal.
const ReasonReplicasDiffer = "ReplicasDiffer"

// Missing says that so many of the legs that there are to be are not there, and why, as far as that is known.
func (v *ReplicatedVolume) Missing(many int) string {
	text := fmt.Sprintf("%d of %d replicas are not there", many, v.Spec.Replicas)
	if v.Status.Lacks != "" {
		text += ": " + v.Status.Lacks
	}
	return text
}

// Differ says what was found when the legs were compared; empty: that they are equal, or nothing, as they never were.
func (v *ReplicatedVolume) Differ() string {
	s := v.Status.Scrub
	if !s.Differs() {
		return ""
	}
	found, when := s.Last, "by a scrub that did not end"
	if s.Found != nil {
		found, when = s.Found, "by the scrub that is under way"
	} else if s.Ended != nil {
		when = "by the scrub that ended at " + s.Ended.UTC().Format(time.RFC3339)
	}
	var where []string
	for _, r := range found.Ranges {
		where = append(where, fmt.Sprintf("%d+%d", r.Offset, r.Length))
	}
	text := fmt.Sprintf("%d bytes are not the same on all its replicas, %s, at %s", found.Bytes, when, strings.Join(where, ", "))
	if found.Message != "" {
		text += "; " + found.Message
	}
	return text
}

// States of a leg (Leg.State).
const (
	LegCurrent = "Current" // it has every acknowledged write
	LegJoining = "Joining" // what it lacks is being copied to it
	LegWaiting = "Waiting" // it is not used now; Message says why
	LegAhead   = "Ahead"   // it was on a list that the object does not know, as the object was restored: it may have what the others lack. Nothing is copied to it, and it stays, until a person says which legs are current
	LegQueued  = "Queued"  // it is made equal when others are, of volumes that the same node uses
	LegUnfit   = "Unfit"   // it cannot be made equal to those that are current, as its disk is not like theirs; Message says why
)

// WithoutWhole says of a volume that was used as a leg, and whose ReplicatedVolume is not there, what that means (ReasonNoCurrentReplica). It is empty for a volume that was never used so: its ReplicatedVolume may be about to be made.
func (v *Volume) WithoutWhole() string {
	if v.Spec.ReplicaOf == "" || v.Status.ReplicaOf == "" || v.Spec.Claims == 0 || Going(v) {
		return ""
	}
	return fmt.Sprintf("its ReplicatedVolume %s was deleted: who uses the volume gets errors when one of its replicas fails, and nobody else can use it; restore that object with its status", v.Spec.ReplicaOf)
}

// Reasons of problems of replicated volumes.
const (
	ReasonReplicaMissing    = "ReplicaMissing"    // it has fewer legs than it is to have
	ReasonReplicaNotCurrent = "ReplicaNotCurrent" // a leg lacks something of what was written
	ReasonNoCurrentReplica  = "NoCurrentReplica"  // none that has all can be used
)

// Current are the names of the legs that have every acknowledged write.
func (v *ReplicatedVolume) Current() (names []string) {
	for _, l := range v.Status.Legs {
		if l.Current {
			names = append(names, l.Name)
		}
	}
	return names
}

// Leg returns what the status says of a leg; nil if nothing.
func (v *ReplicatedVolume) Leg(name string) *Leg {
	if i := slices.IndexFunc(v.Status.Legs, func(l Leg) bool { return l.Name == name }); i >= 0 {
		return &v.Status.Legs[i]
	}
	return nil
}

// Settled reports whether any leg that is current can stand for all of them: nobody has used the volume since they were made or closed, or somebody writes to all of them now. Otherwise its user died, and one of them may have lost power, and with that
// what another one has; the next user finds that out.
func (v *ReplicatedVolume) Settled() bool {
	opened := v.Status.Opened
	return opened == 0 || v.Status.Closed == opened || v.Spec.Claim != nil && v.Spec.Claim.Generation == opened
}

// StatusLost: it was used, and does not say which of its legs are current. It was restored without its status. (One that has had one leg only gets that from the controller.)
func (v *ReplicatedVolume) StatusLost() bool {
	return v.Status.Made == nil && v.Spec.Claims > 0 && v.Spec.Numbered != 1
}

// WhyStatusLost is what is said then.
func (v *ReplicatedVolume) WhyStatusLost() string {
	return fmt.Sprintf("its object was restored without its status, and does not say which of its replicas have all that was written: restore ReplicatedVolume %s with its status, or say which are current (docs/operate/strays.md, volumes with replicas)", v.Name)
}

// Waiting says why who has the claim cannot use the volume, though a leg that is current answers; empty: nothing is known of that.
func (v *ReplicatedVolume) Waiting() string {
	if v.Spec.Claim == nil {
		return ""
	}
	return v.Status.Waits
}

// Deleting: its legs may be deleted.
func (v *ReplicatedVolume) Deleting() bool { return v.Spec.Delete != "" && v.Spec.Delete == v.UID }

// Going: it is being deleted.
func (v *ReplicatedVolume) Going() bool { return v.Deleting() || v.DeletionTimestamp != nil }

// ID of the volume, as CSI has it.
func (v *ReplicatedVolume) ID() string { return "vol." + v.Spec.Pool + "." + v.Name }

// ReplicatedVolumeList is a list of replicated volumes.
//
// +kubebuilder:object:root=true
type ReplicatedVolumeList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []ReplicatedVolume `json:"items"`
}

// WhyNotReplicated says why a volume on one node cannot become one with several legs now; empty: it can. waits: it can later, when that is over. mirrors says of the node that uses it whether its driver can have it become one meanwhile (Network.Mirrors).
func (v *Volume) WhyNotReplicated(mirrors func(node string) bool) (why string, waits bool) {
	switch m := v.Spec.Move; {
	case v.Spec.ReplicaOf != "":
		return "it is a replica itself", false
	case Going(v) || v.Spec.Abandoned:
		return "it is being deleted", false
	case v.Spec.Access == "":
		return "it has access=node, and its PersistentVolume names that node, for good: take a snapshot, and restore it by a class with access: any and replicas", false
	case IsLost(v):
		return "its bytes are missing", false
	case v.Spec.Mutable["placement"] == "follow":
		return "it has placement=follow, which is for volumes on one node: give it a VolumeAttributesClass with placement: stay first", false
	case v.Status.Created == nil:
		return "it is not made yet", true
	case m != nil && m.Left:
		return "it has just moved, and node " + m.Node + " has not given its bytes back yet", true
	case m != nil:
		return "it is being moved to node " + m.Node, true
	case len(v.Spec.Readers) > 0:
		return "it is read on node " + strings.Join(v.Claimants(), ", "), true
	case v.Spec.Claim != nil && !mirrors(v.Spec.Claim.Node):
		return "it is used on node " + v.Spec.Claim.Node + ", which cannot mirror what it uses already: its driver is older, or its kernel has no dm-mirror", true
	case len(v.givenToOthers()) > 0:
		return "node " + v.Spec.NodeName + " has not ended yet that it gives it to node " + v.givenToOthers()[0].Node, true
	case v.Spec.Size != v.Status.Size:
		return "it grows", true
	}
	return "", false
}

// Mirrors says of nodes whether they can use volumes with replicas, by their pools.
func Mirrors(pools []Pool) func(node string) bool {
	return func(node string) bool {
		return slices.ContainsFunc(pools, func(p Pool) bool {
			return p.Spec.NodeName == node && p.Status.Network != nil && p.Status.Network.Mirrors
		})
	}
}

// givenToOthers are those that the volume's node gives it to by another claim than that there is.
func (v *Volume) givenToOthers() []Export {
	return slices.DeleteFunc(v.Given(), func(e Export) bool {
		c := v.Spec.Claim
		return c != nil && e.Node == c.Node && e.Generation == c.Generation
	})
}
