package mirror

import (
	"fmt"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// checkSectors returns errdefs.ErrPrecondition if the logical sectors of a leg are larger than those of the mirror that it is to join.
func checkSectors(mirror, leg uint64) error {
	have, err := dm.SectorSize(mirror)
	if err != nil {
		return err
	}
	other, err := dm.SectorSize(leg)
	if err == nil && other > have {
		err = fmt.Errorf("%w: the disk of this leg has logical sectors of %d bytes and the volume of %d, and what uses it may write smaller parts than the disk can; it needs a pool on other disks",
			errdefs.ErrPrecondition, other, have)
	}
	return err
}
