// Package runbook has, for each reason of a problem, the page of docs/runbooks that says what to do.
package runbook

import "strings"

// base is the address of the pages.
const base = "https://github.com/ashlar-csi/ashlar/blob/main/docs/runbooks/"

// pages has the page for each reason of a problem. The test finds the reasons in the source: a new one needs a line here, and a section on its page.
var pages = map[string]string{
	// Of pools.
	"PoolFull":                "pool-full",
	"PoolNearlyFull":          "pool-full",
	"PoolOvercommitted":       "thin-pool-full",
	"PoolFailed":              "thin-pool-failed",
	"ThinPoolDisagrees":       "thin-pool-failed",
	"PoolMissing":             "pool-down",
	"PoolUnavailable":         "pool-down",
	"PoolReadOnly":            "pool-down",
	"NotConfigured":           "pool-down",
	"DiskErrors":              "disk-failing",
	"DiskFailing":             "disk-failing",
	"DiskHeat":                "disk-failing",
	"DiskWearing":             "disk-failing",
	"GroupMetadataNearlyFull": "pool-degraded",
	"ThinPoolUnfit":           "pool-degraded",
	"ImagesCopiedOnWrite":     "pool-degraded",
	"ImagesFragmented":        "pool-degraded",
	"RecordsNotSafe":          "pool-degraded",
	"SpaceUnknown":            "pool-degraded",
	"NoSuchStray":             "strays",
	"Strays":                  "strays",
	"UnknownImage":            "strays",
	"UnknownVolume":           "strays",
	"VolumeRenamed":           "strays",

	// Of volumes and snapshots.
	"DataLoss":           "data-loss",
	"HeaderLost":         "data-loss",
	"ImageMissing":       "data-loss",
	"ImageOfAnother":     "data-loss",
	"ImageReplaced":      "data-loss",
	"ImageTruncated":     "data-loss",
	"RecordDamaged":      "data-loss",
	"SnapshotMissing":    "data-loss",
	"VolumeMissing":      "data-loss",
	"VolumeTruncated":    "data-loss",
	"FilesystemShutDown": "filesystem",
	"FilesystemReadOnly": "filesystem",
	"FilesystemErrors":   "filesystem",
	"DeviceMissing":      "disk-missing",
	"DeviceSuspended":    "volume-inaccessible",
	"ConnectionsUnknown": "home-away",
	"HomeAway":           "home-away",
	"ImageUnreadable":    "volume-inaccessible",
	"MovedAway":          "volume-inaccessible",
	"NotExported":        "volume-inaccessible",
	"VolumeFailed":       "volume-inaccessible",
	"DeviceChanged":      "volume-degraded",
	"ImageLonger":        "volume-degraded",
	"LimitsNotKept":      "volume-degraded",
	"MarksLost":          "volume-degraded",
	"MirrorsUnknown":     "volume-degraded",
	"NoCurrentReplica":   "replicas-missing",
	"ReplicaLost":        "replicas-missing",
	"ReplicaMissing":     "replicas-missing",
	"ReplicaNotCurrent":  "replicas-missing",
	"ReplicasDiffer":     "replicas-differ",

	// Of nodes.
	"AgentSilent":  "agent-down",
	"NodeGone":     "agent-down",
	"NodeNotReady": "agent-down",

	// Of changes that take long or were refused (pkg/cluster/failure.go).
	"TakesLong":       "requests-stuck",
	"CopyRefused":     "refused",
	"CopyWaits":       "refused",
	"MoveWaits":       "refused",
	"DeletionRefused": "refused",
	"GrowthRefused":   "refused",
	"NoSpace":         "pool-full",
	"Unavailable":     "pool-down",
	"BadToken":        "refused",
	"Busy":            "refused",
	"Exists":          "refused",
	"InUse":           "refused",
	"Internal":        "refused",
	"Invalid":         "refused",
	"Limit":           "refused",
	"NotFound":        "refused",
	"OutOfRange":      "refused",
	"Precondition":    "refused",
	"Unsupported":     "refused",
}

// URL returns the address of the page for a reason (blockdev.Problem.Reason, or that of a refused change). Without such a page it is that of the list of pages.
func URL(reason string) string {
	if page := pages[reason]; page != "" {
		return base + page + ".md"
	}
	return base + "README.md"
}

// See returns a message, with the address of the page for a reason at its end.
func See(message, reason string) string {
	message = strings.TrimRight(message, " \n")
	if !strings.HasSuffix(message, ".") && !strings.HasSuffix(message, "?") {
		message += "."
	}
	return message + " See " + URL(reason)
}
