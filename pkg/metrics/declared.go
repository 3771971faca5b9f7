package metrics

import "github.com/prometheus/client_golang/prometheus"

// What the driver is, and the calls that it answers. How long calls took and how they ended is csi_plugin_operations_seconds, of
// csi-lib-utils, as dashboards for CSI drivers know it.
var (
	BuildInfo = sampledGauge("ashlar_build_info", "What this driver was built from; always 1.", "version", "revision", "goversion")

	CallsInFlight = gauge("ashlar_calls_in_flight", "CSI calls that are being answered.", "method")
	CallsBusy     = counter("ashlar_calls_busy_total", "CSI calls that were refused because another one works on the same volume or snapshot (ABORTED); the caller asks again.", "method")
)

// The pools of a node.
var (
	PoolUp        = sampledGauge("ashlar_pool_up", "1 if the pool is served, 0 if it is missing, has failed or does not answer.", "node", "pool", "kind")
	PoolTotal     = sampledGauge("ashlar_pool_total_bytes", "What the pool may promise in all, in bytes.", "node", "pool")
	PoolPromised  = sampledGauge("ashlar_pool_promised_bytes", "The sizes of all volumes and snapshots of the pool, in bytes.", "node", "pool")
	PoolAvailable = sampledGauge("ashlar_pool_available_bytes", "What the pool may still promise, in bytes.", "node", "pool")
	PoolUsed      = sampledGauge("ashlar_pool_used_bytes", "What the volumes and snapshots of the pool take of its storage, in bytes.", "node", "pool")
	PoolVolumes   = sampledGauge("ashlar_pool_volumes", "Volumes of the pool.", "node", "pool")
	PoolSnapshots = sampledGauge("ashlar_pool_snapshots", "Snapshots of the pool.", "node", "pool")

	PoolExports = sampledGauge("ashlar_pool_exports", "Volumes of the pool that other nodes use, over the network.", "node", "pool")

	RemoteVolumesAway = sampledGauge("ashlar_remote_volumes_away", "Volumes of other nodes that are used on the node and whose own node does not answer it, so that all that uses them waits.", "node")

	PoolThinData     = sampledGauge("ashlar_pool_thin_data_ratio", "The part of a thin pool's data that is in use, from 0 to 1.", "node", "pool")
	PoolThinMetadata = sampledGauge("ashlar_pool_thin_metadata_ratio", "The part of a thin pool's metadata that is in use, from 0 to 1.", "node", "pool")

	PoolProblems = sampledGauge("ashlar_pool_problems", "1 while something is wrong with the pool, by what that is.", "node", "pool", "severity", "reason")
	PoolStrays   = sampledGauge("ashlar_pool_strays", "Volumes and snapshots of the pool that no object of the cluster is for.", "node", "pool")

	VolumeProblems = sampledGauge("ashlar_volume_problems", "Volumes that have something wrong with them, by what that is. A replica that is lost or cannot be used is Degraded: ashlar_replicated_volumes has the volumes that have no other one.", "node", "pool", "severity", "reason")

	DiskHealthy = sampledGauge("ashlar_disk_healthy", "1 if a disk below the pool says of itself that it is well, 0 if it says that it fails (SMART's overall assessment, NVMe's critical warnings but that of heat).", "node", "pool", "device")
	DiskWear    = sampledGauge("ashlar_disk_wear_ratio", "The part of its life that a disk below the pool has used, by its own reckoning; 1 is all of it, and it may be more.", "node", "pool", "device")
	DiskErrors  = sampledGauge("ashlar_disk_errors", "What went wrong on the medium of a disk below the pool, by its own count: sectors that cannot be read (pending) or were replaced (reallocated), and errors that it could not correct (uncorrectable).", "node", "pool", "device", "kind")

	LoopDevicesFree = sampledGauge("ashlar_loop_devices_free", "Loop devices that the kernel of the node may still have; each volume of a file pool that is in use takes one or two.", "node")
)

// Work that takes its time.
var (
	CopiesInProgress = sampledGauge("ashlar_copies_in_progress", "Volumes and snapshots that are being copied or zeroed, or read for what changed in them.", "node", "pool")
	CopiedBytes      = sampledCounter("ashlar_copied_bytes_total", "Bytes that were copied or zeroed, without holes.", "node", "pool")

	MirrorsInProgress = sampledGauge("ashlar_mirrors_in_progress", "Volumes that the node uses, and is copying meanwhile to the nodes that they move to.", "node")
	MirroredBytes     = sampledCounter("ashlar_mirrored_bytes_total", "Bytes that the node has copied of volumes that it uses to the nodes that they move to, as it has seen that.", "node")

	Scrubs = counter("ashlar_scrubs_total", "Compares of all replicas of a volume that were done, by what they found (equal, differ).", "result")

	FreezeSeconds = histogram("ashlar_freeze_seconds", "How long the writes to a volume were held back while it was copied, in seconds.",
		[]float64{.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120}, "node")

	CommandSeconds = histogram("ashlar_command_seconds", "How long programs and commands of lvm2 ran, in seconds.",
		[]float64{.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300, 1800}, "program")
	CommandFailures = counter("ashlar_command_failures_total", "Runs of programs and commands of lvm2 that failed.", "program")
)

// A cluster, as its nodes' agents see it, and as the controller does.
var (
	AgentQueueLength   = sampledGauge("ashlar_agent_queue_length", "Objects that wait for the agent of the node to look at them.", "node")
	AgentFailures      = counter("ashlar_agent_failures_total", "Tries of the agent that failed, by the kind of the object (volume, snapshot or group), or move and snapshot-move for what comes from another node, or has left this one.", "node", "kind")
	AgentOldestRequest = sampledGauge("ashlar_agent_oldest_request_seconds", "Age of the oldest object of the node whose spec is not carried out, in seconds; 0 if all are. What is being copied or zeroed does not count.", "node")

	Objects     = sampledGauge("ashlar_objects", "Volumes, snapshots and replicas of the cluster (volume, snapshot, replica), by their state (making, ready, deleting, failed, lost); volumes with replicas are none of the volumes.", "node", "kind", "state")
	NodeAgentUp = sampledGauge("ashlar_node_agent_up", "1 if the node, which has pools, volumes or snapshots, is there and ready and its agent is heard.", "node")
)

// Results of Scrubs.
const (
	ScrubEqual   = "equal"
	ScrubDiffers = "differ"
)

// Volumes with replicas, as the controller sees them.
var (
	ReplicasDiffer    = sampledGauge("ashlar_replicas_differ", "Volumes whose replicas were found not to be equal when they were compared last.")
	ReplicatedVolumes = sampledGauge("ashlar_replicated_volumes", "Volumes with replicas, by how many these are to be, and by how many of them are not there or lack something of what was written.", "replicas", "lacking")
	Replicas          = sampledGauge("ashlar_replicas", "Replicas that the node has of volumes, by their state: current, or they lack something of what was written, which is copied to them now (joining) or later (waiting).", "node", "state")
	ReplicaResync     = sampledGauge("ashlar_replica_resync_bytes", "What is yet to be copied to replicas of the node that are joining, in bytes.", "node")
)

// What there is of each volume, with --metrics-per-volume.
var (
	VolumeSize = perVolume("ashlar_volume_size_bytes", "Size of the volume, in bytes.")
	VolumeUsed = perVolume("ashlar_volume_used_bytes", "What the volume takes of its pool, in bytes.")
)

// programs are those that have a name of their own in metrics; whatever else is run is "other".
var programs = map[string]bool{}

func init() {
	for _, name := range []string{
		"mkfs.ext4", "mkfs.xfs", "mkfs.btrfs", "e2fsck", "resize2fs", "btrfstune", "lvm", "smartctl", "cryptsetup",
		"fullreport", "lvs", "lvcreate", "lvremove", "lvchange", "lvextend"} {
		programs[name] = true
	}
}

// Begin has what alerts count of a node begin at 0. A series that begins with its first event has not increased by it, so the first
// freeze that is too long would be nobody's.
func Begin(node string) {
	FreezeSeconds.vec.WithLabelValues(node)
	for _, result := range []string{ScrubEqual, ScrubDiffers} {
		Scrubs.vec.WithLabelValues(result)
	}
	for name := range programs {
		CommandFailures.vec.WithLabelValues(name)
	}
	CommandFailures.vec.WithLabelValues(Program(""))
}

// Program is a program as metrics have it.
func Program(name string) string {
	if programs[name] {
		return name
	}
	return "other"
}

var _ prometheus.Collector = Source(nil)
