package disks

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/ioctl"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/ground"
)

// sysfs makes a sysfs with devices: for each "MAJOR:MINOR PATH" a directory, with the files and links that follow as "FILE" or "LINK=TARGET". A target is
// relative to the root.
func sysfs(t *testing.T, devices ...[]string) string {
	t.Helper()
	root := t.TempDir()
	for _, d := range devices {
		number, path, _ := strings.Cut(d[0], " ")
		at := filepath.Join(root, "devices", path)
		check.OK(t, os.MkdirAll(at, 0o700))
		check.OK(t, os.MkdirAll(filepath.Join(root, "dev/block"), 0o700))
		check.OK(t, os.Symlink(at, filepath.Join(root, "dev/block", number)))
		for _, one := range d[1:] {
			name, target, link := strings.Cut(one, "=")
			check.OK(t, os.MkdirAll(filepath.Dir(filepath.Join(at, name)), 0o700))
			if link {
				check.OK(t, os.MkdirAll(filepath.Join(root, target), 0o700))
				check.OK(t, os.Symlink(filepath.Join(root, target), filepath.Join(at, name)))
			} else {
				check.OK(t, os.WriteFile(filepath.Join(at, name), nil, 0o600))
			}
		}
	}
	return root
}

func names(disks []Disk) (names []string) {
	for _, d := range disks {
		if d.Physical {
			names = append(names, d.Name)
		} else {
			names = append(names, d.Name+" (virtual)")
		}
	}
	return names
}

// TestLayers: disks are found through all layers that may be between them and a pool, as sysfs has them.
func TestLayers(t *testing.T) {
	sys := sysfs(t,
		[]string{"8:0 pci/ata1/block/sda", "device/subsystem=bus/scsi"}, []string{"8:1 pci/ata1/block/sda/sda1", "partition"}, []string{"8:2 pci/ata1/block/sda/sda2", "partition"},
		[]string{"8:16 pci/ata2/block/sdb", "device/subsystem=bus/scsi"}, []string{"8:17 pci/ata2/block/sdb/sdb1", "partition"},
		[]string{"259:0 pci/nvme/nvme0/nvme0n1", "device/subsystem=class/nvme"}, []string{"259:1 pci/nvme/nvme0/nvme0n1/nvme0n1p1", "partition"},
		[]string{"259:3 virtual/nvme-subsystem/nvme-subsys1/nvme1n1", "device/subsystem=class/nvme-subsystem"},
		[]string{"254:0 pci/virtio0/block/vda", "device/subsystem=bus/virtio"},
		[]string{"43:0 virtual/block/nbd0"},
		[]string{"9:0 virtual/block/md0", "slaves/sda2=devices/pci/ata1/block/sda/sda2", "slaves/sdb1=devices/pci/ata2/block/sdb/sdb1"},
		[]string{"253:0 virtual/block/dm-0", "slaves/md0=devices/virtual/block/md0"},                                                                // LUKS over md
		[]string{"253:1 virtual/block/dm-1", "slaves/dm-0=devices/virtual/block/dm-0", "slaves/nvme0n1p1=devices/pci/nvme/nvme0/nvme0n1/nvme0n1p1"}, // LVM over that and another
		[]string{"253:8 virtual/block/dm-8", "slaves/dm-9=devices/virtual/block/dm-9"}, []string{"253:9 virtual/block/dm-9", "slaves/dm-8=devices/virtual/block/dm-8"},
		[]string{"7:0 virtual/block/loop0", "loop/x"})
	for what, c := range map[string]struct {
		numbers []uint64
		want    string
	}{
		"a disk":                       {[]uint64{unix.Mkdev(8, 0)}, "sda"},
		"a partition":                  {[]uint64{unix.Mkdev(8, 1)}, "sda"},
		"a partition of an NVMe":       {[]uint64{unix.Mkdev(259, 1)}, "nvme0n1"},
		"an NVMe with several paths":   {[]uint64{unix.Mkdev(259, 3)}, "nvme1n1"},
		"virtio":                       {[]uint64{unix.Mkdev(254, 0)}, "vda (virtual)"},
		"a network block device":       {[]uint64{unix.Mkdev(43, 0)}, "nbd0 (virtual)"},
		"md over partitions":           {[]uint64{unix.Mkdev(9, 0)}, "sda sdb"},
		"LVM over LUKS over md, NVMe":  {[]uint64{unix.Mkdev(253, 1)}, "nvme0n1 sda sdb"},
		"two, of one disk":             {[]uint64{unix.Mkdev(8, 1), unix.Mkdev(8, 2)}, "sda"},
		"two":                          {[]uint64{unix.Mkdev(259, 1), unix.Mkdev(8, 17)}, "nvme0n1 sdb"},
		"each over the other":          {[]uint64{unix.Mkdev(253, 8)}, ""},
		"a loop device without a file": {[]uint64{unix.Mkdev(7, 0)}, ""},
		"what is not there":            {[]uint64{unix.Mkdev(1, 1)}, ""},
		"nothing":                      {nil, ""},
	} {
		if have := strings.Join(names(below(sys, c.numbers)), " "); have != c.want {
			t.Errorf("%s: %q, want %q", what, have, c.want)
		}
	}
	check.OK(t, os.WriteFile(filepath.Join(sys, "devices/pci/ata1/block/sda/diskseq"), []byte("7\n"), 0o600))
	if have := below(sys, []uint64{unix.Mkdev(8, 1)}); len(have) != 1 || have[0].Seq != "7" {
		t.Errorf("%+v", have)
	}
}

// groundOf returns the devices that a path is on.
func groundOf(t *testing.T, path string) []uint64 {
	t.Helper()
	f, err := os.Open(path)
	check.OK(t, err)
	defer f.Close()
	numbers, err := ground.Of(f)
	check.OK(t, err)
	return numbers
}

func deviceNumber(t *testing.T, path string) uint64 {
	t.Helper()
	var st unix.Stat_t
	check.OK(t, unix.Stat(path, &st))
	return st.Rdev
}

// addPartition makes a partition of a device without a partition table (linux/blkpg.h: BLKPG_ADD_PARTITION).
func addPartition(t *testing.T, device string, start, length int64) {
	t.Helper()
	f, err := os.Open(device)
	check.OK(t, err)
	defer f.Close()
	part := struct {
		start, length int64
		number        int32
		_             [64 + 64 + 4]byte
	}{start, length, 1, [132]byte{}}
	request := struct {
		operation, flags, size int32
		data                   unsafe.Pointer
	}{1, 0, int32(unsafe.Sizeof(part)), unsafe.Pointer(&part)}
	check.OK(t, ioctl.Pointer(f, unix.BLKPG, unsafe.Pointer(&request)))
}

// TestRealDevices: on loop devices, a partition of one, filesystems on them, and a btrfs on two: Below finds the disks that their files are on.
func TestRealDevices(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := drivertest.Dir(t)
	bottom := names(Below(groundOf(t, dir)...)) // there may be none, in a container or in memory
	over := func(path string) {
		t.Helper()
		numbers := groundOf(t, path)
		if len(numbers) == 0 {
			t.Errorf("%s is on nothing", path)
		}
		if have := names(Below(numbers...)); !slices.Equal(have, bottom) {
			t.Errorf("%s is on %v, its file is on %v", path, have, bottom)
		}
	}
	for _, kind := range []string{"ext4", "xfs"} {
		image := drivertest.MountNew(t, kind, filepath.Join(dir, kind), 320<<20)
		if have, want := groundOf(t, filepath.Join(dir, kind)), deviceNumber(t, "/dev/"+drivertest.LoopsOver(image)[0]); !slices.Equal(have, []uint64{want}) {
			t.Errorf("%s is on %v, want %v", kind, have, want)
		}
		over(filepath.Join(dir, kind))
	}
	drivertest.MountNew(t, "xfs", filepath.Join(dir, "ext4", "within"), 310<<20) // two layers of loop devices
	over(filepath.Join(dir, "ext4", "within"))

	// A btrfs on a loop device, which gets a second one: a whole disk, or a partition of it.
	drivertest.MountNew(t, "btrfs", filepath.Join(dir, "btrfs"), 320<<20)
	second := filepath.Join(dir, "second")
	check.OK(t, os.WriteFile(second, nil, 0o600))
	check.OK(t, os.Truncate(second, 320<<20))
	device := drivertest.Loop(t, second, "--partscan")
	defer func() { check.OK(t, exec.Command("losetup", "--detach", device).Run()) }()
	partition := device + "p1"
	addPartition(t, device, 1<<20, 300<<20)
	number := func(name string) uint64 {
		text, err := os.ReadFile("/sys/class/block/" + filepath.Base(name) + "/dev")
		check.OK(t, err)
		var major, minor uint32
		_, err = fmt.Sscanf(string(text), "%d:%d", &major, &minor)
		check.OK(t, err)
		return unix.Mkdev(major, minor)
	}
	if have := names(Below(number(partition))); !slices.Equal(have, bottom) {
		t.Errorf("a partition of a loop device is on %v, its file is on %v", have, bottom)
	}
	if _, err := os.Stat(partition); err != nil { // there is no udev
		check.OK(t, unix.Mknod(partition, unix.S_IFBLK|0o600, int(number(partition))))
		defer func() { check.OK(t, os.Remove(partition)) }()
	}
	drivertest.RunBtrfs(t, "btrfs", "device", "add", "-f", partition, filepath.Join(dir, "btrfs"))
	have := groundOf(t, filepath.Join(dir, "btrfs"))
	if len(have) != 2 || !slices.Contains(have, number(partition)) {
		t.Errorf("a btrfs on two devices is on %v", have)
	}
	over(filepath.Join(dir, "btrfs"))
	drivertest.RunBtrfs(t, "btrfs", "device", "remove", partition, filepath.Join(dir, "btrfs"))
	if have := groundOf(t, filepath.Join(dir, "btrfs")); len(have) != 1 {
		t.Errorf("a btrfs with one device again is on %v", have)
	}

	// Files in memory are on no disk.
	memory, err := unix.MemfdCreate("memory", unix.MFD_CLOEXEC)
	check.OK(t, err)
	f := os.NewFile(uintptr(memory), "memory")
	defer f.Close()
	if numbers, err := ground.Of(f); err != nil || len(numbers) > 0 {
		t.Errorf("a file in memory is on %v, %v", numbers, err)
	}
}
