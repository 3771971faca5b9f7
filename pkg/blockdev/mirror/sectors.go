package mirror

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// checkSectors returns errdefs.ErrPrecondition if the logical sectors of a leg are larger than those of the mirror that it is to join.
func checkSectors(mirror, leg uint64) error {
	have, err := sectorOf(mirror)
	if err != nil {
		return err
	}
	other, err := sectorOf(leg)
	if err == nil && other > have {
		err = fmt.Errorf("%w: the disk of this leg has logical sectors of %d bytes and the volume of %d, and what uses it may write smaller parts than the disk can; it needs a pool on other disks",
			errdefs.ErrPrecondition, other, have)
	}
	return err
}

// sectorOf returns the logical sector of a device, in bytes.
func sectorOf(device uint64) (int, error) {
	text, err := os.ReadFile(dm.Sysfs(device) + "/queue/logical_block_size")
	if err != nil {
		return 0, fmt.Errorf("logical sector of %s: %w", dm.Number(device), errdefs.FromErrno(err))
	}
	return strconv.Atoi(strings.TrimSpace(string(text)))
}
