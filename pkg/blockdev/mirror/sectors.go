package mirror

import (
	"fmt"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// ErrUnfit is the errdefs.ErrPrecondition of a leg that cannot join a mirror as long as the mirror has the legs that it has.
var ErrUnfit = fmt.Errorf("%w", errdefs.ErrPrecondition)

// checkSectors returns ErrUnfit if the logical sectors of a leg are larger than those of the mirror that it is to join.
func checkSectors(mirror, leg uint64) error {
	have, err := dm.SectorSize(mirror)
	if err != nil {
		return err
	}
	other, err := dm.SectorSize(leg)
	if err == nil && other > have {
		err = fmt.Errorf("%w: the disk of this leg has logical sectors of %d bytes and the volume of %d, and what uses it may write smaller parts than the disk can; it needs a pool on other disks",
			ErrUnfit, other, have)
	}
	return err
}

// sectorsOf returns the logical sectors of a mirror, in bytes; 0 if there is none yet.
func sectorsOf(name string) (uint32, error) {
	d, err := dm.Find(name)
	if err != nil || d == nil || !d.Live {
		return 0, err
	}
	size, err := dm.SectorSize(d.Number)
	return uint32(size), err
}
