package dm

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// counters are the kernel's counts of what is read from the legs of a mirror.
type counters struct {
	legs     [][]string // for each leg the directories in sysfs of the disks that count for it
	switched []string   // those of disks whose counting was off
}

// countersOf finds the counters of legs, and has the kernel count until release, also where an administrator has switched that off (queue/iostats).
func countersOf(legs []Leg) (*counters, error) {
	c := &counters{}
	for _, l := range legs {
		disks, err := countedBy(l.Device)
		if err != nil {
			return nil, errors.Join(err, c.release())
		}
		c.legs = append(c.legs, disks)
		for _, disk := range disks {
			if on, _ := os.ReadFile(disk + iostats); strings.TrimSpace(string(on)) != "0" {
				continue
			}
			c.switched = append(c.switched, disk)
			if err := os.WriteFile(disk+iostats, []byte("1"), 0); err != nil && !Vanished(err) {
				return nil, errors.Join(fmt.Errorf("have the kernel count reads: %w", errdefs.FromErrno(err)), c.release())
			}
		}
	}
	return c, nil
}

// iostats is the file of a disk that says whether the kernel counts its I/O: Documentation/ABI/stable/sysfs-block.
const iostats = "/queue/iostats"

// countedBy returns the directories in sysfs of the disks that count the I/O of a device: its own, and, of an NVMe namespace with several paths, those of the
// paths. Linux counts the I/O of such a namespace itself only since 6.2. None for a device that is gone.
func countedBy(number uint64) ([]string, error) {
	disk, err := filepath.EvalSymlinks(Sysfs(number))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, errdefs.FromErrno(err)
	}
	var subsystem, namespace int
	if n, _ := fmt.Sscanf(filepath.Base(disk), "nvme%dn%d", &subsystem, &namespace); n < 2 {
		return []string{disk}, nil
	}
	paths, err := filepath.Glob(fmt.Sprintf("/sys/block/nvme%dc*n%d", subsystem, namespace))
	return append(paths, disk), err
}

// release has the kernel count as before.
func (c *counters) release() (err error) {
	for _, disk := range c.switched {
		if failure := os.WriteFile(disk+iostats, []byte("0"), 0); failure != nil && !Vanished(failure) {
			err = errors.Join(err, errdefs.FromErrno(failure))
		}
	}
	return err
}

// reads returns how many reads the kernel has counted of each leg. What it does not have any more, as a connection has ended, counts 0.
func (c *counters) reads() ([]int64, error) {
	all := make([]int64, len(c.legs))
	for i, disks := range c.legs {
		for _, disk := range disks {
			count, err := counted(disk, 0)
			if err != nil && !errors.Is(err, os.ErrNotExist) {
				return nil, err
			}
			all[i] += count
		}
	}
	return all, nil
}

// counted returns a field of the kernel's statistics of a disk (countsOf).
func counted(disk string, field int) (int64, error) {
	counts, err := countsOf(disk)
	if err != nil {
		return 0, err
	}
	if len(counts) <= field {
		return 0, fmt.Errorf("%w: the kernel counts of disk %s %v", errdefs.ErrUnsupported, disk, counts)
	}
	return counts[field], nil
}

// countsOf returns the kernel's statistics of a disk, by its directory in sysfs: Documentation/block/stat.rst.
func countsOf(disk string) (counts []int64, err error) {
	text, err := os.ReadFile(disk + "/stat")
	if err != nil {
		return nil, errdefs.FromErrno(err)
	}
	for _, field := range strings.Fields(string(text)) {
		count, err := strconv.ParseInt(field, 10, 64)
		if err != nil {
			return nil, fmt.Errorf("%w: the kernel counts of disk %s %q", errdefs.ErrUnsupported, disk, text)
		}
		counts = append(counts, count)
	}
	return counts, nil
}
