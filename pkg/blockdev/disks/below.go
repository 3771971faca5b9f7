package disks

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/ground"
)

// Disk is a disk of this machine that a pool is on.
type Disk struct {
	Name string // as below /sys/class/block: sda, nvme0n1
	// Physical: smartctl can ask it, as it is behind SCSI (which SATA, SAS and USB are to the kernel) or NVMe. Others are virtual (virtio, memory, network),
	// or of a kind that smartctl does not know.
	Physical bool
	// Seq differs for each disk that the kernel finds, also if it has the name of one that is gone; empty before Linux 5.15.
	Seq string
}

// deepest bounds how many layers of devices are followed. A file on a filesystem on LVM on LUKS on md on a partition is seven.
const deepest = 16

// Below returns the disks that block devices of these numbers (makedev(3)) are on, by name, each once. It follows partitions, the device mapper (LVM,
// LUKS, multipath), md, and loop devices with the filesystems that their files are in. It leaves out what it does not find, such as a file of another
// mount namespace.
func Below(numbers ...uint64) []Disk { return below("/sys", numbers) }

func below(sys string, numbers []uint64) []Disk {
	w := &walk{sys: sys, seen: map[string]bool{}}
	for _, number := range numbers {
		w.number(number, 0)
	}
	slices.SortFunc(w.found, func(a, b Disk) int { return strings.Compare(a.Name, b.Name) })
	return w.found
}

// walk goes down from devices to disks.
type walk struct {
	sys   string // path of sysfs
	seen  map[string]bool
	found []Disk
}

func (w *walk) number(number uint64, depth int) {
	path, err := filepath.EvalSymlinks(fmt.Sprintf("%s/dev/block/%d:%d", w.sys, unix.Major(number), unix.Minor(number)))
	if err == nil {
		w.device(path, depth)
	}
}

// device looks at the device of a directory of sysfs.
func (w *walk) device(path string, depth int) {
	if is(path, "partition") {
		path = filepath.Dir(path)
	}
	name := filepath.Base(path)
	if depth > deepest || w.seen[name] {
		return
	}
	w.seen[name] = true
	slaves, _ := filepath.Glob(path + "/slaves/*")
	backing, err := os.ReadFile(path + "/loop/backing_file")
	switch {
	case len(slaves) > 0:
		for _, slave := range slaves {
			if slave, err := filepath.EvalSymlinks(slave); err == nil {
				w.device(slave, depth+1)
			}
		}
	case err == nil:
		w.file(strings.TrimSuffix(string(backing), "\n"), depth+1)
	case !is(path, "loop"): // a loop device without a file is on no disk
		seq, _ := os.ReadFile(path + "/diskseq")
		w.found = append(w.found, Disk{name, physical(path), strings.TrimSpace(string(seq))})
	}
}

func (w *walk) file(path string, depth int) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err == nil && st.Mode&unix.S_IFMT == unix.S_IFBLK { // a loop device over a device
		w.number(st.Rdev, depth)
		return
	}
	numbers, err := ground.Of(f)
	if err != nil {
		return
	}
	for _, number := range numbers {
		w.number(number, depth)
	}
}

// physical returns Disk.Physical.
func physical(path string) bool {
	bus, err := filepath.EvalSymlinks(path + "/device/subsystem")
	return err == nil && slices.Contains([]string{"scsi", "nvme", "nvme-subsystem"}, filepath.Base(bus))
}

func is(path, what string) bool {
	_, err := os.Stat(path + "/" + what)
	return !errors.Is(err, os.ErrNotExist)
}
