// Package v1alpha1 is what controller and nodes of a cluster tell each other, as
// Kubernetes objects of the group ashlar.dev: the controller writes a spec, the agent of
// the node carries it out and writes the status.
//
// Texts and lists have limits, so that an object is small (some 10 KiB) whoever writes it.
//
// The definitions in deploy/kubernetes/crds and the DeepCopy methods are made from these
// types: `make generate`.
//
// +kubebuilder:object:generate=true
// +groupName=ashlar.dev
package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Finalizer was on every Volume and Snapshot that older versions made. Now an object holds
// nothing up: agents take it off.
const Finalizer = "ashlar.dev/node"

// NewPool as the UUID of a pool lets the agent take what is there, or make a pool.
const NewPool = "new"

// AdoptAnnotation on a Pool asks for objects of volumes and snapshots that have none: AdoptAll, IDs of status.strays, or both, with commas between. The agent takes
// it off when done. What was about to move to another node is not meant by AdoptAll.
const (
	AdoptAnnotation = "ashlar.dev/adopt"
	AdoptAll        = "all"
)

// DoubtAnnotation on a Volume: the controller is finding out whether anybody still wants its claim. Whoever asks for
// the claim again takes it off, so that the claim is not taken back.
const DoubtAnnotation = "ashlar.dev/claim-in-doubt"

// AskedAnnotation on a Volume or Snapshot says when its node was asked again for what its spec says, as nothing was heard of it for a while. It means nothing to the node.
const AskedAnnotation = "ashlar.dev/asked"

// TraceAnnotation on a Volume or Snapshot is the span of the call that asked for its spec, as in the header traceparent of W3C
// Trace Context; it is there only if that is traced.
const TraceAnnotation = "ashlar.dev/traceparent"

// GroupLabel on a Snapshot is the key of the group that the controller made it for. Agents may not write labels: by this one it is
// known which node a group is on.
const GroupLabel = "ashlar.dev/group"

// SourceLabel on a Snapshot is the key of its volume, where the controller knows that it is of it: it made the snapshot, or both were on one node before one of them moved. Agents may not
// write labels: by this one a snapshot is of a volume that is on another node (Snapshot.Of).
const SourceLabel = "ashlar.dev/source"

// GoneTaint is the key of a taint that says that a node will never come back.
const GoneTaint = "ashlar.dev/gone"

// StartupTaint is the key of a taint that a new node may be made with, to keep pods off until the driver is ready there.
const StartupTaint = "ashlar.dev/agent-not-ready"

// Types of conditions.
const (
	// Ready: the object is there to be used. False with the reason DataLoss if it was, and
	// its bytes are missing.
	Ready = "Ready"
	// Abandoned is the node's answer to spec.abandoned: True if the volume was blank and has
	// been deleted, False if it is to be kept.
	Abandoned = "Abandoned"
	// Healthy: nothing is known to be wrong. False with the reason of the worst problem; True with the reason Recovered if
	// it was False before. What is known in full is in status.health.
	Healthy = "Healthy"
	// Copied: the volume has all bytes of its source, which is on another node. False with the reason Copying, and how far it is, or with
	// CopyWaits, and why it does not go on.
	Copied = "Copied"
	// Accounted: every volume and snapshot that the pool keeps for the cluster has an object.
	Accounted = "Accounted"
	// Adopted: False if AdoptAnnotation of the pool named what the pool does not keep; it is there from then on.
	Adopted = "Adopted"
)

// Reasons of the condition Copied; the last one is that of True.
const (
	ReasonCopying   = "Copying"
	ReasonCopyWaits = "CopyWaits"
	ReasonCopied    = "Copied"
)

// Recovered is the reason of a condition that is True, and was False before.
const Recovered = "Recovered"

// States of a volume or a snapshot (Summary.State).
const (
	StateMaking   = "Making"   // it is being made
	StateReady    = "Ready"    // it can be used
	StateDeleting = "Deleting" // it is being deleted, and that takes time
	StateFailed   = "Failed"   // what was asked for last was refused: status.failure says why
	StateLost     = "Lost"     // its bytes are missing
)

// States are all of them.
var States = []string{StateMaking, StateReady, StateDeleting, StateFailed, StateLost}

// ReasonDataLoss is the reason of a condition, a failure or a problem of what has lost its bytes.
const ReasonDataLoss = "DataLoss"

// AllWell is the word for health without a problem, in the place of the worst severity.
const AllWell = "Healthy"

// Volume is a volume on a node. The object's name is the volume's key, which is derived
// from the CSI name, so no name can be there twice, on whatever node.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:scope=Cluster,categories=ashlar
// +kubebuilder:subresource:status
// +kubebuilder:selectablefield:JSONPath=`.spec.nodeName`
// +kubebuilder:selectablefield:JSONPath=`.spec.claim.node`
// +kubebuilder:selectablefield:JSONPath=`.spec.move.node`
// +kubebuilder:printcolumn:name="Node",type=string,JSONPath=`.spec.nodeName`,description="The node that has the volume"
// +kubebuilder:printcolumn:name="Pool",type=string,JSONPath=`.spec.pool`,description="The pool of that node"
// +kubebuilder:printcolumn:name="Claim",type=string,JSONPath=`.status.summary.claim`,description="The PersistentVolumeClaim that the volume was made for"
// +kubebuilder:printcolumn:name="Size",type=string,JSONPath=`.status.summary.size`,description="The size of the volume"
// +kubebuilder:printcolumn:name="Used",type=string,JSONPath=`.status.summary.used`,description="What the volume takes of the pool"
// +kubebuilder:printcolumn:name="State",type=string,JSONPath=`.status.summary.state`,description="Making, Ready, Deleting, Failed or Lost"
// +kubebuilder:printcolumn:name="Health",type=string,JSONPath=`.status.summary.health`,description="The worst of what is wrong (Degraded, Inaccessible, DataLoss), or Healthy"
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Published",type=string,priority=1,JSONPath=`.spec.claim.node`,description="The node that may use the volume"
// +kubebuilder:printcolumn:name="Readers",type=string,priority=1,JSONPath=`.spec.readers[*].node`,description="The nodes that read the volume at once"
// +kubebuilder:printcolumn:name="Move",type=string,priority=1,JSONPath=`.status.move.message`,description="How far its move to another node is"
// +kubebuilder:printcolumn:name="Access",type=string,priority=1,JSONPath=`.spec.access`,description="any: also from other nodes of the network; empty: from its node alone"
// +kubebuilder:printcolumn:name="Filesystem",type=string,priority=1,JSONPath=`.spec.filesystem`,description="Empty for a raw block device"
// +kubebuilder:printcolumn:name="Encryption",type=string,priority=1,JSONPath=`.spec.encryption`,description="Of what the pool keeps; empty if it is not encrypted"
// +kubebuilder:printcolumn:name="Progress",type=string,priority=1,JSONPath=`.status.summary.progress`,description="How far it is copied or zeroed"
// +kubebuilder:printcolumn:name="Volume",type=string,priority=1,JSONPath=`.spec.name`,description="The CSI name, which is the name of its PersistentVolume"
// +kubebuilder:printcolumn:name="Problem",type=string,priority=1,JSONPath=`.status.conditions[?(@.type=="Healthy")].reason`,description="The reason of the worst problem"
// +kubebuilder:printcolumn:name="Failure",type=string,priority=1,JSONPath=`.status.failure.message`,description="Why what was asked for last was refused"
// +kubebuilder:validation:XValidation:rule="self.metadata.name.matches('^[0-9a-f]{32}$')",message="the name of a volume's object is its key"
// +kubebuilder:validation:XValidation:rule="!has(self.status) || (!has(self.status.export) || self.status.export.generation - 1000000000 <= (has(self.spec.claims) ? self.spec.claims : 0)) && (!has(self.status.readers) || self.status.readers.all(e, e.generation - 1000000000 <= (has(self.spec.claims) ? self.spec.claims : 0)))",message="a node gives a volume by a claim that there was: its generation is not larger than spec.claims by more than what a restored object may lack"
// +kubebuilder:validation:XValidation:rule="!(has(oldSelf.spec.move) && has(oldSelf.spec.move.left) && oldSelf.spec.move.left) || has(self.spec.move) || has(self.status) && has(self.status.move) && has(self.status.move.arrived) && self.status.move.arrived",message="the volume has moved, and its new node has not taken it over yet: it is too late to undo that"
// +kubebuilder:validation:XValidation:rule="self.spec.nodeName == oldSelf.spec.nodeName || !has(oldSelf.spec.claim) || has(oldSelf.status) && has(oldSelf.status.move) && has(oldSelf.status.move.copied) && has(oldSelf.status.move.copied.claim) && has(oldSelf.spec.claim.generation) && oldSelf.status.move.copied.claim == oldSelf.spec.claim.generation",message="a volume moves while it is used only if the node that uses it has copied all of it"
// +kubebuilder:validation:XValidation:rule="!(has(oldSelf.spec.move) && has(oldSelf.spec.move.left) && oldSelf.spec.move.left && has(self.spec.move) && has(oldSelf.status) && has(oldSelf.status.move) && has(oldSelf.status.move.copied) && has(oldSelf.status.move.copied.claim)) || has(self.status) && has(self.status.move) && has(self.status.move.copied) && self.status.move.copied == oldSelf.status.move.copied",message="the volume has moved while it was used: what its new node had then does not change"
// +kubebuilder:validation:XValidation:rule="self.spec.size >= oldSelf.spec.size || (has(self.status) && has(self.status.size) && self.spec.size >= self.status.size)",message="a volume does not shrink"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.spec.replicas) || has(self.spec.replicas) || !has(self.spec.replicaOf) || has(self.status) && has(self.status.replicaOf)",message="the volume is about to have replicas, and it is too late to take that back: ask for fewer when it has them"
type Volume struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec VolumeSpec `json:"spec"`
	// +optional
	Status VolumeStatus `json:"status,omitempty"`
}

// VolumeSpec is what a volume is to be.
//
// +kubebuilder:validation:XValidation:rule="has(self.source) == has(oldSelf.source)",message="the source of a volume does not change"
// +kubebuilder:validation:XValidation:rule="has(self.encryption) == has(oldSelf.encryption) && has(self.encryptionDiscard) == has(oldSelf.encryptionDiscard)",message="the encryption of a volume does not change"
// +kubebuilder:validation:XValidation:rule="has(self.access) == has(oldSelf.access) && has(self.homeTimeout) == has(oldSelf.homeTimeout)",message="the access to a volume does not change"
// +kubebuilder:validation:XValidation:rule="has(self.access) || !(has(self.homeTimeout) || has(self.claims) || has(self.claim) && has(self.claim.generation))",message="homeTimeout, claims and the generation of a claim are for volumes with access any"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.claims) || has(self.claims) && self.claims >= oldSelf.claims",message="claims are counted up"
// +kubebuilder:validation:XValidation:rule="!has(self.access) || !has(self.claim) || has(self.claims) && has(self.claim.generation) && self.claim.generation == self.claims",message="the generation of a claim is the count of claims"
// +kubebuilder:validation:XValidation:rule="!has(self.access) || !has(self.claim) || has(oldSelf.claim) && self.claim == oldSelf.claim || !has(oldSelf.claims) || self.claims > oldSelf.claims",message="another claim has another generation"
// +kubebuilder:validation:XValidation:rule="!has(self.delete) || !has(self.claim) && !has(self.readers)",message="a volume that is to be deleted is not claimed"
// +kubebuilder:validation:XValidation:rule="!has(self.readers) || has(self.access) && !has(self.encryption) && !has(self.claim)",message="a volume that many read has access any, is not encrypted, and nobody writes it"
// +kubebuilder:validation:XValidation:rule="!has(self.readers) || has(self.claims) && self.readers.all(r, has(r.generation) && r.generation <= self.claims)",message="the claims of readers are counted"
// +kubebuilder:validation:XValidation:rule="!has(self.replicaOf) || has(self.access) && !has(self.readers)",message="a leg has access any, and nobody but the user of its volume reads it"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.replicaOf) || has(self.replicaOf)",message="a leg is of one volume, for good"
// +kubebuilder:validation:XValidation:rule="!has(self.replicas) || has(self.access)",message="a volume with access node gets no replicas: its PersistentVolume says one node, for good; make a snapshot, and restore it by a class with access any and replicas"
// +kubebuilder:validation:XValidation:rule="!has(self.replicas) || !has(self.replicaOf) || has(oldSelf.replicas) && self.replicas == oldSelf.replicas",message="the volume has replicas: how many there are to be says its ReplicatedVolume"
// +kubebuilder:validation:XValidation:rule="has(self.access) || !has(self.move)",message="a volume with access node does not move: its PersistentVolume says one node, for good; make a snapshot, and restore it on another node (copies: anywhere)"
// +kubebuilder:validation:XValidation:rule="!has(self.delete) || !has(self.move)",message="a volume that is to be deleted does not move"
// +kubebuilder:validation:XValidation:rule="!has(self.move) || self.move.node != self.nodeName",message="the volume is on that node"
// +kubebuilder:validation:XValidation:rule="self.nodeName == oldSelf.nodeName || has(oldSelf.move) && !(has(oldSelf.move.left) && oldSelf.move.left) && oldSelf.move.node == self.nodeName && has(self.move) && (has(self.move.left) && self.move.left) && self.move.node == oldSelf.nodeName && has(self.claim) == has(oldSelf.claim) && (!has(self.claim) || self.claim.node == oldSelf.claim.node && self.claim.mode == oldSelf.claim.mode && has(self.claim.readOnly) == has(oldSelf.claim.readOnly) && has(self.claim.generation) && has(oldSelf.claim.generation) && self.claim.generation == oldSelf.claim.generation + 1) && !has(self.readers) && !has(oldSelf.readers)",message="a volume moves only to the node of spec.move, and while nobody uses it, or with the next generation of the claim that uses it"
// +kubebuilder:validation:XValidation:rule="(has(self.idPool) ? self.idPool : self.pool) == (has(oldSelf.idPool) ? oldSelf.idPool : oldSelf.pool)",message="the pool that the ID of a volume names does not change"
// +kubebuilder:validation:XValidation:rule="self.nodeName == oldSelf.nodeName ? self.pool == oldSelf.pool : !has(oldSelf.move) || self.pool == (has(oldSelf.move.pool) ? oldSelf.move.pool : oldSelf.pool) && has(self.move) && (has(self.move.pool) ? self.move.pool : self.pool) == oldSelf.pool",message="a volume moves only to the pool of spec.move, and to another pool only of another node"
// +kubebuilder:validation:XValidation:rule="!has(self.move) || !has(oldSelf.move) || self.nodeName != oldSelf.nodeName || self.move.node != oldSelf.move.node || (has(self.move.pool) ? self.move.pool : self.pool) == (has(oldSelf.move.pool) ? oldSelf.move.pool : oldSelf.pool)",message="the pool that a volume moves to does not change: take the move back, and ask for another one"
// +kubebuilder:validation:XValidation:rule="!(has(self.move) && (has(self.move.left) && self.move.left)) || has(oldSelf.move) && (has(oldSelf.move.left) && oldSelf.move.left) && self.move.node == oldSelf.move.node || self.nodeName != oldSelf.nodeName",message="spec.move.left is for a volume that has moved"
// +kubebuilder:validation:XValidation:rule="!(has(oldSelf.move) && (has(oldSelf.move.left) && oldSelf.move.left)) || !has(self.move) || (has(self.move.left) && self.move.left)",message="the node that the volume has left still has its bytes; it moves on when those are given back"
type VolumeSpec struct {
	// NodeName is the node that has the volume.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	NodeName string `json:"nodeName"`
	// Pool of that node, which has the volume.
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]{0,22}[a-z0-9])?$`
	Pool string `json:"pool"`
	// IDPool is the pool that the volume's ID names, for good, if that is another one: the volume was made in one of that name, and has moved.
	// +optional
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]{0,22}[a-z0-9])?$`
	IDPool string `json:"idPool,omitempty"`
	// Name is the CSI name.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="the name of a volume does not change"
	Name string `json:"name"`
	// Size in bytes. It goes down only to what the volume has, when growing was refused.
	// +kubebuilder:validation:Minimum=4096
	// +kubebuilder:validation:MultipleOf=4096
	Size int64 `json:"size"`
	// Provisioning says when space is taken; empty is the pool's own way.
	// +kubebuilder:validation:Enum="";thick;thin
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="provisioning does not change"
	Provisioning string `json:"provisioning"`
	// Source that the bytes are copied from.
	// +optional
	Source *Source `json:"source,omitempty"`
	// Filesystem that the volume is for; empty for a raw block device.
	// +kubebuilder:validation:Enum="";ext4;xfs;btrfs
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="the filesystem of a volume does not change"
	Filesystem string `json:"filesystem"`
	// Encryption of what the pool keeps of the volume; without it that is not encrypted.
	// +optional
	// +kubebuilder:validation:Enum=luks2
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="the encryption of a volume does not change"
	Encryption string `json:"encryption,omitempty"`
	// EncryptionDiscard: what an encrypted volume does not use is given back to the pool.
	// +optional
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="the encryption of a volume does not change"
	EncryptionDiscard bool `json:"encryptionDiscard,omitempty"`
	// Mutable parameters, as of a VolumeAttributesClass.
	// +optional
	// +kubebuilder:validation:MaxProperties=16
	// +kubebuilder:validation:XValidation:rule="self.all(k, size(k) <= 64 && size(self[k]) <= 256)",message="a parameter has 64 characters at most, and its value 256"
	Mutable map[string]string `json:"mutable,omitempty"`
	// Access says which nodes can use the volume: any of the network of its node, by that; without it, its node alone.
	// +optional
	// +kubebuilder:validation:Enum=any
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="the access to a volume does not change"
	Access string `json:"access,omitempty"`
	// HomeTimeout is for how many seconds what is written and read on another node waits for a node of the volume that is away; without it, for ever.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="the access to a volume does not change"
	HomeTimeout int64 `json:"homeTimeout,omitempty"`
	// Claim fences the volume to one node: it changes by compare-and-swap only.
	// +optional
	Claim *Claim `json:"claim,omitempty"`
	// Readers are the claims of nodes that read the volume at once, with the access mode MULTI_NODE_READER_ONLY. While there are any, nobody writes it. It has the labels
	// of ReaderLabel.
	// +optional
	// +listType=map
	// +listMapKey=node
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	Readers []Claim `json:"readers,omitempty"`
	// Claims is how many claims there were of a volume with access any; it stays when a claim goes.
	// +optional
	// +kubebuilder:validation:Minimum=1
	Claims int64 `json:"claims,omitempty"`
	// Move asks for the volume to be moved to another node. A leg whose volume is used does not move itself: its volume gets another one there, and then does without it.
	// +optional
	Move *Move `json:"move,omitempty"`
	// Replicas asks for the volume to become one with so many legs: also while one node uses it, if the driver there can have it (Network.Mirrors). Then it is the first of them, which the controller says by replicaOf, and this goes when its ReplicatedVolume is there.
	// +optional
	// +kubebuilder:validation:Minimum=2
	// +kubebuilder:validation:Maximum=3
	Replicas int `json:"replicas,omitempty"`
	// ReplicaOf is the name of the ReplicatedVolume that this volume is a leg of; without it, it is a volume of its own. It stays for good.
	// +optional
	// +kubebuilder:validation:Pattern=`^[0-9a-f]{32}$`
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="a leg is of one volume, for good"
	ReplicaOf string `json:"replicaOf,omitempty"`
	// ClaimRef is the PersistentVolumeClaim that the volume was made for.
	// +optional
	ClaimRef *ClaimRef `json:"claimRef,omitempty"`
	// PersistentVolume that the volume was made for.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	PersistentVolume string `json:"persistentVolume,omitempty"`
	// Abandoned asks the node to delete the volume, if it is blank: nobody knows of it any
	// more. It cannot be claimed meanwhile.
	// +optional
	Abandoned bool `json:"abandoned,omitempty"`
	Intent    `json:",inline"`
}

// Intent is what the controller allows the node to do to the bytes of an object. It is in the
// spec, which backups have: what they restore may be kept, and neither made nor deleted.
//
// +kubebuilder:validation:XValidation:rule="!has(self.make) || !self.make || (has(oldSelf.make) && oldSelf.make)",message="what was made is not made again"
type Intent struct {
	// Make: the bytes may be made. It is there from the object's first moment until its agent
	// has made them, and goes before anybody can use them. The bytes of an object without it
	// are found, or they are lost.
	// +optional
	Make bool `json:"make,omitempty"`
	// Delete: the bytes may be deleted, and the object after them. It is the UID of this very
	// object; any other, as in an object that was restored, means nothing.
	// +optional
	Delete types.UID `json:"delete,omitempty"`
}

// Source is what a volume was copied from; it is on the same node and in the same pool, unless it says others.
//
// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="the source of a volume does not change"
type Source struct {
	// Kind is vol or snap.
	// +kubebuilder:validation:Enum=vol;snap
	Kind string `json:"kind"`
	// Key is the name of the object.
	// +kubebuilder:validation:Pattern=`^[0-9a-f]{32}$`
	Key string `json:"key"`
	// Pool of the source; empty: that of the volume.
	// +optional
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]{0,22}[a-z0-9])?$`
	Pool string `json:"pool,omitempty"`
	// NodeName is the node of the source; empty: that of the volume.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	NodeName string `json:"nodeName,omitempty"`
}

// Claim says which node may use a volume, and how.
type Claim struct {
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Node string `json:"node"`
	// +optional
	ReadOnly bool `json:"readOnly,omitempty"`
	// Mode is block or mount, and the CSI access mode.
	// +kubebuilder:validation:MaxLength=128
	Mode string `json:"mode"`
	// Generation of the claim of a volume with access any: larger than that of all claims before.
	// +optional
	// +kubebuilder:validation:Minimum=1
	Generation int64 `json:"generation,omitempty"`
	// Since is when the claim was made, by the controller's clock.
	// +optional
	Since *metav1.Time `json:"since,omitempty"`
}

// Move of a volume to another node, or of a snapshot. Its bytes are copied while nobody uses it, or by the node that does; when all are there, the controller writes the new node into
// spec.nodeName, by compare-and-swap. From then on the object names the other one of the two nodes here, until that has given its bytes back.
type Move struct {
	// Node that it is to be moved to; once it has, the node that it has left.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Node string `json:"node"`
	// Pool of that node, if it has another name than that which has the volume now; a snapshot stays in pools of one name.
	// +optional
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]{0,22}[a-z0-9])?$`
	Pool string `json:"pool,omitempty"`
	// Left: it has moved, from that node.
	// +optional
	Left bool `json:"left,omitempty"`
	// Follows: nobody asked for it but a volume itself, which is to be where it is used. It is taken back when the volume is used elsewhere before it has moved.
	// +optional
	Follows bool `json:"follows,omitempty"`
}

// ClaimRef names a PersistentVolumeClaim.
type ClaimRef struct {
	// +kubebuilder:validation:MaxLength=253
	Namespace string `json:"namespace"`
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name"`
}

// ObjectStatus is what a node says of a volume or a snapshot.
//
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.created) || (has(self.created) && self.created == oldSelf.created)",message="what was there once is not made again"
type ObjectStatus struct {
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=8
	// +kubebuilder:validation:XValidation:rule="self.all(c, size(c.message) <= 2048)",message="the message of a condition has 2048 characters at most"
	Conditions []metav1.Condition `json:"conditions,omitempty"`
	// ObservedGeneration is that of the spec that the rest of the status is about.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// Failure is the node's final answer to that spec, if it could not be carried out.
	// +optional
	Failure *Failure `json:"failure,omitempty"`
	// Created is when the volume was made, or the snapshot was cut, by the node's clock. Once
	// it is set, the bytes were there: if they are missing, they are lost, and not made again.
	// +optional
	Created *metav1.MicroTime `json:"created,omitempty"`
	// Size in bytes, as it is.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Size int64 `json:"size,omitempty"`
	// Health is what is known to be wrong, the worst first; empty if nothing is.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	Health []Problem `json:"health,omitempty"`
	// Progress is how far it is copied or zeroed, while that takes long.
	// +optional
	Progress *Progress `json:"progress,omitempty"`
	// +optional
	Summary Summary `json:"summary,omitempty"`
}

// VolumeStatus is what the node says of a volume.
type VolumeStatus struct {
	ObjectStatus `json:",inline"`
	// Thin: space is taken when written.
	// +optional
	Thin bool `json:"thin,omitempty"`
	// Encryption of what the pool keeps, as it was made.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	Encryption string `json:"encryption,omitempty"`
	// Mutable parameters that are in force.
	// +optional
	// +kubebuilder:validation:MaxProperties=16
	// +kubebuilder:validation:XValidation:rule="self.all(k, size(k) <= 64 && size(self[k]) <= 256)",message="a parameter has 64 characters at most, and its value 256"
	Mutable map[string]string `json:"mutable,omitempty"`
	// ReplicaOf is the name of the ReplicatedVolume of which the volume is a leg, as its record says: then its node uses it by itself no more.
	// +optional
	// +kubebuilder:validation:MaxLength=32
	ReplicaOf string `json:"replicaOf,omitempty"`
	// Used is what the volume takes of the pool, in bytes, as it was last looked at: it is written when it has changed by
	// a 20th of the size, and by 16 MiB at least.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Used *int64 `json:"used,omitempty"`
	// Export is to whom the volume's node gives it, which alone can write it then; without it, to nobody but itself.
	// +optional
	Export *Export `json:"export,omitempty"`
	// Readers are those of spec.readers that the volume's node gives it to, of which none can write it.
	// +optional
	// +listType=map
	// +listMapKey=generation
	// +kubebuilder:validation:MaxItems=128
	Readers []Export `json:"readers,omitempty"`
	// Move is how far the move of the volume is.
	// +optional
	Move *MoveStatus `json:"move,omitempty"`
}

// MoveStatus is how far the move of a volume or a snapshot is. The node of spec.move writes it, or while the volume is used the node of its claim; but for Arrived, which is the
// own node's.
type MoveStatus struct {
	// Node is that of spec.move that the rest is about, before the volume has moved: the new one.
	// +kubebuilder:validation:MaxLength=253
	Node string `json:"node"`
	// Pool is that of spec.move, as Node is. An agent that does not know of moves to pools of other names does not say it.
	// +optional
	// +kubebuilder:validation:MaxLength=24
	Pool string `json:"pool,omitempty"`
	// Claim is the generation of the claim whose node says the rest, as it copies the volume while it uses it; without it, the new node does.
	// +optional
	// +kubebuilder:validation:Minimum=1
	Claim int64 `json:"claim,omitempty"`
	// Undone counts what has made Copied untrue. So a Copied that was about to be written then is refused: the object is another one.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Undone int64 `json:"undone,omitempty"`
	// Waits: the move does not go on now.
	// +optional
	Waits bool `json:"waits,omitempty"`
	// Refused: the new node cannot have it as things are there, as it has no room, for example. It is tried again, and no room is kept for it meanwhile.
	// +optional
	Refused bool `json:"refused,omitempty"`
	// Message says how far the move is, or why it does not go on, for people.
	// +optional
	// +kubebuilder:validation:MaxLength=2048
	Message string `json:"message,omitempty"`
	// Progress of the copy, while there is one.
	// +optional
	Progress *Progress `json:"progress,omitempty"`
	// Copied: the new node has all bytes, as they were.
	// +optional
	Copied *MoveCopied `json:"copied,omitempty"`
	// Arrived: the new node has taken it over. Only from then on may the old one give its bytes back.
	// +optional
	Arrived bool `json:"arrived,omitempty"`
	// Cleared: the node that it has left has given its bytes back.
	// +optional
	Cleared bool `json:"cleared,omitempty"`
}

// MoveCopied says which bytes were copied: nobody has written any since, as long as the object has that generation, and the old node that seal. With a claim, whoever
// uses the volume by that writes to both nodes, and nothing is written to one alone.
type MoveCopied struct {
	// Generation of the object when all bytes were there: since then nobody has claimed the volume, or taken the move back.
	// +kubebuilder:validation:Minimum=1
	Generation int64 `json:"generation"`
	// Claim is the generation of the claim by which the volume is used meanwhile; without it, nobody does.
	// +optional
	// +kubebuilder:validation:Minimum=1
	Claim int64 `json:"claim,omitempty"`
	// Sealed is since when they do not change (of a snapshot: when it was cut), or what the record says of the volume, by the clock of the node that the volume leaves. It gives back no others.
	Sealed metav1.MicroTime `json:"sealed"`
	// Size in bytes, as the object has it.
	// +kubebuilder:validation:Minimum=4096
	Size int64 `json:"size"`
}

// Export is a volume given to another node.
type Export struct {
	// Generation of the claim that it is for.
	// +kubebuilder:validation:Minimum=1
	Generation int64 `json:"generation"`
	// Node that it is given to.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Node string `json:"node"`
	// Since when, by the clock of the volume's node.
	// +optional
	Since *metav1.Time `json:"since,omitempty"`
	// Away is since when the volume's node does not answer the node that it is given to, which alone writes that, by its clock; without it, it answers.
	// +optional
	Away *metav1.Time `json:"away,omitempty"`
}

// Failure is an error: its reason is one of the closed list of the driver's errors
// (NoSpace, OutOfRange, InUse, ...), or Internal.
type Failure struct {
	// +kubebuilder:validation:MaxLength=128
	Reason string `json:"reason"`
	// +kubebuilder:validation:MaxLength=2048
	Message string `json:"message"`
}

// Problem is something wrong with a volume, a snapshot or a pool.
type Problem struct {
	// +kubebuilder:validation:Enum=Degraded;Inaccessible;DataLoss
	Severity string `json:"severity"`
	// Reason is one word.
	// +kubebuilder:validation:MaxLength=128
	Reason string `json:"reason"`
	// Message says what is wrong and what to do.
	// +kubebuilder:validation:MaxLength=2048
	Message string `json:"message"`
	// Since is when the node first found it.
	// +optional
	Since *metav1.Time `json:"since,omitempty"`
}

// Progress of what takes long, in bytes.
type Progress struct {
	// +kubebuilder:validation:Minimum=0
	Done int64 `json:"done"`
	// +kubebuilder:validation:Minimum=0
	Total int64 `json:"total"`
}

// Summary is how a volume or a snapshot is, in words for people: what `kubectl get` shows. The node makes it of the rest of the
// object whenever it writes a status. Programs read the rest, which has figures in bytes.
type Summary struct {
	// State is Making, Ready, Deleting, Failed (what was asked for last was refused) or Lost (the bytes are missing).
	// +optional
	// +kubebuilder:validation:MaxLength=64
	State string `json:"state,omitempty"`
	// Health is the worst severity of what is wrong, or Healthy.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	Health string `json:"health,omitempty"`
	// Size as it is, rounded.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	Size string `json:"size,omitempty"`
	// Used is what it takes of the pool, rounded.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	Used string `json:"used,omitempty"`
	// Progress is how far it is copied or zeroed, in percent.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	Progress string `json:"progress,omitempty"`
	// Claim is the PersistentVolumeClaim that the volume, or the volume of the snapshot, was made for: NAMESPACE/NAME.
	// +optional
	// +kubebuilder:validation:MaxLength=512
	Claim string `json:"claim,omitempty"`
}

// VolumeList is a list of volumes.
//
// +kubebuilder:object:root=true
type VolumeList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []Volume `json:"items"`
}

// Snapshot is a snapshot of a volume, as a rule on its node. The object's name is the snapshot's key.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:scope=Cluster,categories=ashlar
// +kubebuilder:subresource:status
// +kubebuilder:selectablefield:JSONPath=`.spec.nodeName`
// +kubebuilder:selectablefield:JSONPath=`.spec.move.node`
// +kubebuilder:printcolumn:name="Node",type=string,JSONPath=`.spec.nodeName`,description="The node that has the snapshot"
// +kubebuilder:printcolumn:name="Pool",type=string,JSONPath=`.spec.pool`,description="The pool of that node"
// +kubebuilder:printcolumn:name="Claim",type=string,JSONPath=`.status.summary.claim`,description="The PersistentVolumeClaim that the volume of the snapshot was made for"
// +kubebuilder:printcolumn:name="Size",type=string,JSONPath=`.status.summary.size`,description="The size of the snapshot"
// +kubebuilder:printcolumn:name="State",type=string,JSONPath=`.status.summary.state`,description="Making, Ready, Deleting, Failed or Lost"
// +kubebuilder:printcolumn:name="Health",type=string,JSONPath=`.status.summary.health`,description="The worst of what is wrong (Degraded, Inaccessible, DataLoss), or Healthy"
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Cut",type=date,priority=1,JSONPath=`.status.created`,description="When the bytes were fixed"
// +kubebuilder:printcolumn:name="Source",type=string,priority=1,JSONPath=`.spec.source`,description="The object of the volume"
// +kubebuilder:printcolumn:name="Move",type=string,priority=1,JSONPath=`.status.move.message`,description="How far its move to another node is"
// +kubebuilder:printcolumn:name="Encryption",type=string,priority=1,JSONPath=`.spec.encryption`,description="As of its volume; empty if that is not encrypted"
// +kubebuilder:printcolumn:name="Group",type=string,priority=1,JSONPath=`.spec.group.key`,description="What it was cut together with"
// +kubebuilder:printcolumn:name="Progress",type=string,priority=1,JSONPath=`.status.summary.progress`,description="How far it is copied"
// +kubebuilder:printcolumn:name="Snapshot",type=string,priority=1,JSONPath=`.spec.name`,description="The CSI name"
// +kubebuilder:printcolumn:name="Problem",type=string,priority=1,JSONPath=`.status.conditions[?(@.type=="Healthy")].reason`,description="The reason of the worst problem"
// +kubebuilder:printcolumn:name="Failure",type=string,priority=1,JSONPath=`.status.failure.message`,description="Why it was refused"
// +kubebuilder:validation:XValidation:rule="self.metadata.name.matches('^[0-9a-f]{32}$')",message="the name of a snapshot's object is its key"
// +kubebuilder:validation:XValidation:rule="!(has(oldSelf.spec.move) && has(oldSelf.spec.move.left) && oldSelf.spec.move.left) || has(self.spec.move) || has(self.status) && has(self.status.move) && has(self.status.move.arrived) && self.status.move.arrived",message="the snapshot has moved, and its new node has not taken it over yet: it is too late to undo that"
type Snapshot struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec SnapshotSpec `json:"spec"`
	// +optional
	Status SnapshotStatus `json:"status,omitempty"`
}

// SnapshotSpec is what a snapshot is to be. It does not change, but for what may be done to
// its bytes, and for its node, when it moves.
//
// +kubebuilder:validation:XValidation:rule="self.nodeName == oldSelf.nodeName || has(oldSelf.move) && !(has(oldSelf.move.left) && oldSelf.move.left) && oldSelf.move.node == self.nodeName && has(self.move) && (has(self.move.left) && self.move.left) && self.move.node == oldSelf.nodeName",message="a snapshot moves only to the node of spec.move"
// +kubebuilder:validation:XValidation:rule="!has(self.move) || self.move.node != self.nodeName",message="the snapshot is on that node"
// +kubebuilder:validation:XValidation:rule="!has(self.move) || !has(self.move.pool)",message="a snapshot stays in pools of one name: its ID has that"
// +kubebuilder:validation:XValidation:rule="!has(self.delete) || !has(self.move)",message="a snapshot that is to be deleted does not move"
// +kubebuilder:validation:XValidation:rule="!(has(self.move) && (has(self.move.left) && self.move.left)) || has(oldSelf.move) && (has(oldSelf.move.left) && oldSelf.move.left) && self.move.node == oldSelf.move.node || self.nodeName != oldSelf.nodeName",message="spec.move.left is for a snapshot that has moved"
// +kubebuilder:validation:XValidation:rule="!(has(oldSelf.move) && (has(oldSelf.move.left) && oldSelf.move.left)) || !has(self.move) || (has(self.move.left) && self.move.left)",message="the node that the snapshot has left still has its bytes; it moves on when those are given back"
// +kubebuilder:validation:XValidation:rule="has(self.group) == has(oldSelf.group) && has(self.encryption) == has(oldSelf.encryption) && has(self.sourcePool) == has(oldSelf.sourcePool) && has(self.leg) == has(oldSelf.leg)",message="a snapshot does not change"
type SnapshotSpec struct {
	// NodeName is the node that has the snapshot: that on which it was cut, or to which it has moved.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	NodeName string `json:"nodeName"`
	// Pool of that node.
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]{0,22}[a-z0-9])?$`
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="a snapshot does not change"
	Pool string `json:"pool"`
	// Name is the CSI name; of a member of a group, that of the group.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="a snapshot does not change"
	Name string `json:"name"`
	// Source is the key of the volume.
	// +kubebuilder:validation:Pattern=`^[0-9a-f]{32}$`
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="a snapshot does not change"
	Source string `json:"source"`
	// SourcePool is the pool that the ID of the volume names, if that is another one.
	// +optional
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]{0,22}[a-z0-9])?$`
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="a snapshot does not change"
	SourcePool string `json:"sourcePool,omitempty"`
	// Leg is the name of the Volume whose bytes are cut, where that is not the source: of a volume with several legs, the one on this node.
	// +optional
	// +kubebuilder:validation:Pattern=`^[0-9a-f]{32}$`
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="a snapshot does not change"
	Leg string `json:"leg,omitempty"`
	// Encryption of the volume, and so of the snapshot; without it that is not encrypted.
	// +optional
	// +kubebuilder:validation:Enum=luks2
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="a snapshot does not change"
	Encryption string `json:"encryption,omitempty"`
	// Group that the snapshot is cut together with, all or none.
	// +optional
	Group *Group `json:"group,omitempty"`
	// Move asks for the snapshot to be moved to another node.
	// +optional
	Move   *Move `json:"move,omitempty"`
	Intent `json:",inline"`
}

// Group is a group snapshot, as each of its members says it.
//
// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="a snapshot does not change"
type Group struct {
	// +kubebuilder:validation:Pattern=`^[0-9a-f]{32}$`
	Key string `json:"key"`
	// Size is how many members the group has.
	// +kubebuilder:validation:Minimum=1
	Size int `json:"size"`
}

// SnapshotStatus is what the node says of a snapshot.
type SnapshotStatus struct {
	ObjectStatus `json:",inline"`
	// Move is how far the move of the snapshot is.
	// +optional
	Move *MoveStatus `json:"move,omitempty"`
}

// SnapshotList is a list of snapshots.
//
// +kubebuilder:object:root=true
type SnapshotList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []Snapshot `json:"items"`
}

// Pool is a pool of a node, which makes the object itself. Its name is NODE.POOL.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:scope=Cluster,categories=ashlar
// +kubebuilder:subresource:status
// +kubebuilder:selectablefield:JSONPath=`.spec.nodeName`
// +kubebuilder:printcolumn:name="Node",type=string,JSONPath=`.spec.nodeName`,description="The node that has the pool"
// +kubebuilder:printcolumn:name="Pool",type=string,JSONPath=`.spec.pool`,description="The name of the pool on that node"
// +kubebuilder:printcolumn:name="Kind",type=string,JSONPath=`.status.kind`,description="The kind of storage"
// +kubebuilder:printcolumn:name="Total",type=string,JSONPath=`.status.summary.total`,description="What the pool may promise in all"
// +kubebuilder:printcolumn:name="Promised",type=string,JSONPath=`.status.summary.promised`,description="The sizes of its volumes and snapshots"
// +kubebuilder:printcolumn:name="Available",type=string,JSONPath=`.status.summary.available`,description="What it may still promise"
// +kubebuilder:printcolumn:name="Used",type=string,JSONPath=`.status.summary.used`,description="What its volumes and snapshots take of the storage"
// +kubebuilder:printcolumn:name="Health",type=string,JSONPath=`.status.summary.health`,description="The worst of what is wrong (Degraded, Inaccessible, DataLoss), or Healthy"
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Default",type=boolean,priority=1,JSONPath=`.spec.default`,description="Volumes that ask for no pool come here"
// +kubebuilder:printcolumn:name="Encryption",type=string,priority=1,JSONPath=`.status.encryption[0]`,description="What volumes in it can be encrypted with; empty: they cannot"
// +kubebuilder:printcolumn:name="Largest",type=string,priority=1,JSONPath=`.status.summary.largest`,description="The size of the largest volume that could be made"
// +kubebuilder:printcolumn:name="Problem",type=string,priority=1,JSONPath=`.status.conditions[?(@.type=="Healthy")].reason`,description="The reason of the worst problem"
// +kubebuilder:printcolumn:name="Accounted",type=string,priority=1,JSONPath=`.status.conditions[?(@.type=="Accounted")].status`,description="Everything in the pool has an object"
// +kubebuilder:printcolumn:name="Strays",type=integer,priority=1,JSONPath=`.status.strayCount`,description="Volumes and snapshots that no object is for"
// +kubebuilder:printcolumn:name="UUID",type=string,priority=1,JSONPath=`.spec.uuid`,description="The identity of the pool"
type Pool struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec PoolSpec `json:"spec"`
	// +optional
	Status PoolStatus `json:"status,omitempty"`
}

// PoolSpec is how the node was started.
type PoolSpec struct {
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="a pool does not move"
	NodeName string `json:"nodeName"`
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]{0,22}[a-z0-9])?$`
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="the name of a pool does not change"
	Pool string `json:"pool"`
	// Default: volumes that ask for no pool come here.
	Default bool `json:"default"`
	// MaxVolumes is how many volumes the node may have claimed; 0 is any number.
	// +kubebuilder:validation:Minimum=0
	MaxVolumes int64 `json:"maxVolumes"`
	// Driver is the name of the CSI driver that the pool belongs to; empty, as of older
	// versions, is block.csi.ashlar.dev. A cluster has one driver of this kind.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	Driver string `json:"driver,omitempty"`
	// UUID is the identity of the pool, as its storage has it: the agent writes it when it first
	// sees the pool, and serves no other one from then on. Whoever has replaced the disk on
	// purpose changes it: to that of the pool on the new disk, or to "new", which stands for
	// whatever pool is there, or is made.
	// +optional
	// +kubebuilder:validation:MaxLength=128
	UUID string `json:"uuid,omitempty"`
}

// PoolStatus is how a pool is. All figures are bytes.
type PoolStatus struct {
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=8
	// +kubebuilder:validation:XValidation:rule="self.all(c, size(c.message) <= 2048)",message="the message of a condition has 2048 characters at most"
	Conditions []metav1.Condition `json:"conditions,omitempty"`
	// Kind of storage: file, lvm or lvmthin.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	Kind string `json:"kind,omitempty"`
	// Measured is when the figures were taken, by the node's clock. Volumes that were
	// created later are not in them.
	// +optional
	Measured *metav1.MicroTime `json:"measured,omitempty"`
	// Total is what the pool may promise in all.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Total int64 `json:"total"`
	// Promised is the sum of the sizes of all volumes and snapshots.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Promised int64 `json:"promised"`
	// Available is what it may still promise.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Available int64 `json:"available"`
	// Used is what the volumes and snapshots take of the storage. Alone it is written when it changed
	// by a hundredth of the total, and every 5 minutes at most; with all else the newest is.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Used int64 `json:"used,omitempty"`
	// MaxVolume is the size of the largest volume that could be made.
	// +optional
	// +kubebuilder:validation:Minimum=0
	MaxVolume int64 `json:"maxVolume"`
	// MinVolume is the size of the smallest one.
	// +optional
	// +kubebuilder:validation:Minimum=0
	MinVolume int64 `json:"minVolume"`
	// Granularity is what every size in the pool is a multiple of.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Granularity int64 `json:"granularity"`
	// Encryption that volumes of the pool can have, as the node's kernel and programs are.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=8
	// +kubebuilder:validation:items:MaxLength=64
	Encryption []string `json:"encryption,omitempty"`
	// Limits says whether the node can keep limits of I/O; without it that is not known.
	// +optional
	Limits *bool `json:"limits,omitempty"`
	// Agent is where other parts of the driver reach the agent of the node, if they can (--agent-endpoint). Only the agent
	// itself may write it.
	// +optional
	Agent *AgentEndpoint `json:"agent,omitempty"`
	// Network in which volumes of the pool reach other nodes, if they can (--remote-address).
	// +optional
	Network *Network `json:"network,omitempty"`
	// StrayCount is how many volumes and snapshots the pool has that no object is for.
	// +optional
	// +kubebuilder:validation:Minimum=0
	StrayCount int `json:"strayCount,omitempty"`
	// Strays are the first of them.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=100
	Strays []Stray `json:"strays,omitempty"`
	// Health is what is known to be wrong, the worst first; empty if nothing is.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	Health []Problem `json:"health,omitempty"`
	// +optional
	Summary PoolSummary `json:"summary,omitempty"`
}

// AgentEndpoint is the port of a node's agent, and the key by which callers know it.
type AgentEndpoint struct {
	// Address as IP:PORT.
	// +kubebuilder:validation:MaxLength=64
	Address string `json:"address"`
	// Fingerprint of the key that the agent made when it started: the SHA-256 of its SubjectPublicKeyInfo, in hex.
	// +kubebuilder:validation:Pattern=`^[0-9a-f]{64}$`
	Fingerprint string `json:"fingerprint"`
}

// Network is where a node gives its volumes to others, and takes those of others.
type Network struct {
	// Name of the network: all nodes of it reach each other.
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?$`
	Name string `json:"name"`
	// Address as IP:PORT.
	// +kubebuilder:validation:MaxLength=64
	Address string `json:"address"`
	// Mirrors: the node can use volumes with replicas, and have a volume that it uses become one.
	// +optional
	Mirrors bool `json:"mirrors,omitempty"`
}

// PoolSummary is how a pool is, in words for people: what `kubectl get` shows. The figures are those of the status, rounded.
type PoolSummary struct {
	// Health is the worst severity of what is wrong, or Healthy.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	Health string `json:"health,omitempty"`
	// +optional
	// +kubebuilder:validation:MaxLength=64
	Total string `json:"total,omitempty"`
	// +optional
	// +kubebuilder:validation:MaxLength=64
	Promised string `json:"promised,omitempty"`
	// +optional
	// +kubebuilder:validation:MaxLength=64
	Available string `json:"available,omitempty"`
	// Used is what the volumes and snapshots take of the storage.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	Used string `json:"used,omitempty"`
	// Largest is the size of the largest volume that could be made.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	Largest string `json:"largest,omitempty"`
}

// Stray is a volume or a snapshot that no object is for. Nothing removes it.
type Stray struct {
	// ID as CSI has it.
	// +kubebuilder:validation:MaxLength=128
	ID string `json:"id"`
	// Name is the CSI name.
	// +optional
	// +kubebuilder:validation:MaxLength=2048
	Name string `json:"name,omitempty"`
	// Size in bytes.
	// +kubebuilder:validation:Minimum=0
	Size int64 `json:"size"`
	// Group is the ID of the group snapshot that it is of.
	// +optional
	// +kubebuilder:validation:MaxLength=128
	Group string `json:"group,omitempty"`
	// Filesystem that the volume is for; empty for a raw block device.
	// +optional
	// +kubebuilder:validation:MaxLength=16
	Filesystem string `json:"filesystem,omitempty"`
	// ClaimRef is the PersistentVolumeClaim that the volume was made for.
	// +optional
	ClaimRef *ClaimRef `json:"claimRef,omitempty"`
	// PersistentVolume that the volume was made for.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	PersistentVolume string `json:"persistentVolume,omitempty"`
}

// PoolList is a list of pools.
//
// +kubebuilder:object:root=true
type PoolList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []Pool `json:"items"`
}
