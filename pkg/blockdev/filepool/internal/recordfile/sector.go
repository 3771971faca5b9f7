package recordfile

import "github.com/ashlar-csi/ashlar/pkg/blockdev"

// SmallestSector is the sector of volumes whose record has none, in bytes.
const SmallestSector = 512

// ValidSector reports whether a logical sector may have that many bytes.
func ValidSector(bytes int64) bool {
	return bytes >= SmallestSector && bytes <= blockdev.Granularity && bytes&(bytes-1) == 0
}

// SectorOf returns the logical sector of the loop devices of an object, in bytes.
func SectorOf(r blockdev.Record) uint32 { return uint32(max(r.Sector, SmallestSector)) }
