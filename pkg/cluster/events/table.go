package events

import (
	corev1 "k8s.io/api/core/v1"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
)

// Entry is a row of the table of all events.
type Entry struct {
	Reason string
	Type   string   // Warning or Normal
	On     []string // the kinds of objects that it can be on
	Means  string   // one sentence
}

// The reasons of events that do not come from the health of an object.
const (
	Strays          = cluster.ReasonStrays
	NoSuchStray     = cluster.ReasonNoSuchStray
	AgentSilent     = "AgentSilent"
	AgentHeard      = "AgentHeard"
	NodeNotReady    = "NodeNotReady"
	NodeReady       = "NodeReady"
	NodeGone        = "NodeGone"
	CopyRefused     = "CopyRefused"
	Copying         = v1alpha1.ReasonCopying
	CopyWaits       = v1alpha1.ReasonCopyWaits
	Copied          = v1alpha1.ReasonCopied
	Moving          = "Moving"
	MoveWaits       = "MoveWaits"
	Moved           = "Moved"
	ReplicaLost     = "ReplicaLost"
	ReplicaJoining  = "ReplicaJoining"
	ReplicaCurrent  = "ReplicaCurrent"
	ReplicaAdded    = "ReplicaAdded"
	ReplicaRemoved  = "ReplicaRemoved"
	ReplicasEqual   = "ReplicasEqual"
	HomeAway        = "HomeAway"
	HomeBack        = "HomeBack"
	GrowthRefused   = "GrowthRefused"
	DeletionRefused = "DeletionRefused"
	Recovered       = "Recovered"
)

// The kinds of objects that events are on.
const (
	onVolume     = "Volume"
	onReplicated = "ReplicatedVolume"
	onSnapshot   = "Snapshot"
	onPool       = "Pool"
	onNode       = "Node"
	onPV         = "PersistentVolume"
	onClaim      = "PersistentVolumeClaim"
)

// The kinds of objects that a group of events is on.
var (
	volumes = []string{onVolume, onPV, onClaim}
	// For volumes with several legs. An event of one leg is on its Volume alone.
	replicated = []string{onReplicated, onPV, onClaim}
	objects    = []string{onVolume, onSnapshot, onPV, onClaim}
	pools      = []string{onPool, onNode}
	anywhere   = []string{onVolume, onSnapshot, onPool, onNode, onPV, onClaim}
	waiting    = []string{onVolume, onClaim}
)

// Table has all events that there are. docs/reference has them too, made from it.
var Table = []Entry{
	{"DataLoss", warning, objects, "The object may not be made anew, and what it is of is missing, damaged or another one's."},
	{"VolumeMissing", warning, volumes, "The pool does not have the volume any more."},
	{"SnapshotMissing", warning, []string{onSnapshot}, "The pool does not have the snapshot any more."},
	{"ImageMissing", warning, objects, "The file with the bytes is gone."},
	{"ImageTruncated", warning, objects, "The file with the bytes is shorter than its record says."},
	{"ImageOfAnother", warning, objects, "What is at the place of the bytes is not the file that was made for them."},
	{"ImageReplaced", warning, objects, "Somebody put another file in the place of the bytes while they are in use: what is written from then on is lost when that ends."},
	{"VolumeTruncated", warning, objects, "The logical volume is smaller than its record says."},
	{"HeaderLost", warning, volumes, "The header of the encrypted volume, which is in use, is gone or cannot be read: what is on it can be read only for as long as it stays in use."},
	{"RecordDamaged", warning, anywhere, "The record of a volume or a snapshot cannot be used; on a Pool or a Node: of some in the pool."},
	{"ImageUnreadable", warning, objects, "The file with the bytes cannot be read."},
	{"VolumeFailed", warning, objects, "lvm2 says that the logical volume is not well."},
	{"FilesystemShutDown", warning, volumes, "The mounted filesystem does not answer any more."},
	{"FilesystemReadOnly", warning, volumes, "The kernel made the mounted filesystem read-only."},
	{"FilesystemErrors", warning, volumes, "The mounted filesystem has found errors."},
	{"DeviceSuspended", warning, volumes, "The volume's device is suspended, so that all that uses it waits."},
	{"NotExported", warning, volumes, "Another node uses the volume, and its home cannot export it, so that all that uses it waits."},
	{"MovedAway", warning, volumes, "The volume has moved to another node, and its object says that it is where it was before: the API server went back."},
	{HomeAway, warning, volumes, "The node of the volume does not answer the node that uses it, so that all that uses it waits."},
	{"DeviceChanged", warning, volumes, "Who has the raw device has changed its settings."},
	{"MarksLost", warning, volumes, "What is written to the volume, which is a replica of another one, is not recorded any more."},
	{"NoCurrentReplica", warning, replicated, "No replica of the volume that has all that was written can be used."},
	{"ReplicaMissing", warning, replicated, "The volume has fewer replicas than it is to have, and no further one is made."},
	{"ReplicaNotCurrent", warning, replicated, "A replica of the volume lacks something of what was written."},
	{ReplicaLost, warning, replicated, "The bytes of a replica are missing; another one takes its place."},
	{"ReplicasDiffer", warning, replicated, "The replicas of the volume were compared, and are not equal."},
	{"MirrorsUnknown", warning, pools, "It cannot be found out which replicated volumes are used on the node."},
	{"LimitsNotKept", warning, volumes, "The limits of the volume's I/O are not in force."},
	{"ImageLonger", warning, objects, "The file with the bytes is longer than its record says."},

	{"PoolMissing", warning, pools, "The pool is not at its place, or is another one."},
	{"PoolUnavailable", warning, anywhere, "The pool, or the pool of the volume, does not answer."},
	{"PoolFailed", warning, anywhere, "The thin pool has failed."},
	{"ThinPoolDisagrees", warning, pools, "lvm2 and the thin pool have counted different changes, so that nothing is made or deleted."},
	{"ThinPoolUnfit", warning, pools, "The thin pool does not zero new blocks any more, so that volumes may show what others held."},
	{"PoolFull", warning, anywhere, "The thin pool takes no writes any more."},
	{"PoolNearlyFull", warning, pools, "The disk of the pool is nearly full."},
	{"PoolReadOnly", warning, pools, "The filesystem of the pool takes no changes."},
	{"PoolOvercommitted", warning, pools, "More was promised than there is."},
	{"DeviceMissing", warning, anywhere, "A physical volume of the group is missing."},
	{"DiskFailing", warning, pools, "A disk below the pool says of itself that it fails."},
	{"DiskErrors", warning, pools, "A disk below the pool has sectors that cannot be read, or more errors than before."},
	{"DiskHeat", warning, pools, "A disk below the pool says that it is too hot or too cold."},
	{"DiskWearing", warning, pools, "A disk below the pool has used most of its life as flash."},
	{"GroupMetadataNearlyFull", warning, pools, "The metadata areas of the volume group are nearly full."},
	{"RecordsNotSafe", warning, pools, "Records are written to one of their two places only."},
	{"UnknownImage", warning, pools, "The pool has files without a record, which nothing uses and nothing removes."},
	{"UnknownVolume", warning, pools, "The volume group has logical volumes that are named as ours and not tagged so."},
	{"VolumeRenamed", warning, pools, "Logical volumes of the driver have other names."},
	{"ImagesCopiedOnWrite", warning, pools, "Files that an older driver made may take more space than was promised."},
	{"ImagesFragmented", warning, pools, "What volumes and snapshots share is not known in full."},
	{"SpaceUnknown", warning, pools, "What volumes and snapshots share is not known."},
	{"NotConfigured", warning, pools, "The node was started without the pool."},
	{Strays, warning, pools, "The pool has volumes or snapshots that no object is for."},
	{NoSuchStray, warning, []string{onPool}, "What was to be adopted is not in the pool."},

	{AgentSilent, warning, []string{onNode, onVolume, onClaim}, "Nothing is heard of the driver on the node; on a volume: which waits for it."},
	{NodeNotReady, warning, waiting, "The node that the volume waits for is not ready."},
	{NodeGone, warning, volumes, "The node of the volume is gone for good."},
	{CopyRefused, warning, waiting, "A clone, a restore or a snapshot was refused; on what is to be the copy, or the volume of the snapshot."},
	{CopyWaits, warning, waiting, "A copy of what is on another node does not go on."},
	{MoveWaits, warning, objects, "The move of the volume or snapshot to another node does not go on; or the volume is to follow its pod, and cannot yet."},
	{GrowthRefused, warning, []string{onVolume, onReplicated, onPV, onClaim}, "The volume cannot grow."},
	{DeletionRefused, warning, []string{onVolume, onSnapshot, onPV}, "What is to be deleted cannot be deleted yet."},

	{Recovered, normal, anywhere, "Nothing is wrong any more."},
	{Copying, normal, waiting, "What is on another node is being copied."},
	{Copied, normal, waiting, "What is on another node was copied, and is there to be used."},
	{Moving, normal, objects, "The volume or snapshot is being moved to another node."},
	{Moved, normal, objects, "The volume or snapshot has moved, and is there to be used."},
	{ReplicaAdded, normal, replicated, "The volume has another replica, which lacks what was written."},
	{ReplicaJoining, normal, replicated, "What a replica lacks is being copied to it."},
	{ReplicaCurrent, normal, replicated, "A replica has all that was written again."},
	{ReplicaRemoved, normal, replicated, "The volume does without a replica, as it has enough others, or that one could not be made equal to them."},
	{ReplicasEqual, normal, replicated, "The replicas of the volume, which were not equal, were compared anew, and are."},
	{HomeBack, normal, volumes, "The node of the volume answers a node that uses or reads it again, or has ended that."},
	{AgentHeard, normal, []string{onNode, onVolume, onClaim}, "The driver on the node is heard again."},
	{NodeReady, normal, waiting, "The node that the volume waited for is ready again."},
}

const (
	warning = corev1.EventTypeWarning
	normal  = corev1.EventTypeNormal
)
