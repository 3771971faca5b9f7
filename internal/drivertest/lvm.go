package drivertest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
)

// NeedLVM skips a test where the kernel has no device mapper: `make test-lvm` runs it in
// a virtual machine there, and fails if it was not run.
func NeedLVM(t testing.TB) {
	t.Helper()
	NeedRoot(t)
	if _, err := dm.Targets(); err != nil {
		if os.Getenv("ASHLAR_LVM") == "1" {
			t.Fatal(err)
		}
		t.Skip("this kernel has no device mapper; make test-lvm runs this in a virtual machine")
	}
}

// Group is a volume group for one test, on loop devices. lvm2 sees nothing else of the
// machine while the test runs.
type Group struct {
	Name    string
	Devices []string
}

var lvmConfig = `
activation { udev_sync=0 udev_rules=0 verify_udev_operations=0 monitoring=0 }
devices { use_devicesfile=0 obtain_device_list_from_udev=0 global_filter=[%s, "r|.*|"] }
backup { backup=0 archive=0 }
global { use_lvmpolld=0 notify_dbus=0 }
`

// groups made by this process, to give each its own name.
var groups int

// NewGroup makes a volume group of one device of a size (bytes; sparse) for each size
// given. Everything of it is gone at the end of the test, which fails if that cannot be.
func NewGroup(t testing.TB, sizes ...int64) *Group {
	t.Helper()
	NeedLVM(t)
	var devices []string
	for _, size := range sizes {
		devices = append(devices, Disk(t, size))
	}
	return NewGroupOn(t, devices...)
}

// Disk makes a sparse file of a size (bytes), and a loop device over it for the time of a test.
func Disk(t testing.TB, size int64) (device string) {
	t.Helper()
	image := filepath.Join(Dir(t), "disk")
	check.OK(t, os.WriteFile(image, nil, 0o600))
	check.OK(t, os.Truncate(image, size))
	device = Loop(t, image)
	t.Cleanup(func() {
		for _, device := range strings.Fields(Run(t, "losetup", "-n", "-O", "NAME", "-j", image)) { // the test may have moved it
			Run(t, "losetup", "-d", device)
		}
	})
	return device
}

// NewGroupOn is NewGroup on devices that are there: loop devices, or devices of the device
// mapper that are named ashlar-... .
func NewGroupOn(t testing.TB, devices ...string) *Group {
	t.Helper()
	NeedLVM(t)
	filter := `"a|^/dev/loop|"`
	if strings.HasPrefix(devices[0], "/dev/mapper/") { // and not what is under it, which has the same bytes
		filter = `"a|^/dev/mapper/ashlar-|"`
	}
	SetUpLVM(t, filter)
	groups++
	g := &Group{Name: fmt.Sprintf("ashlar-%d-%d", os.Getpid(), groups), Devices: devices}
	Run(t, append([]string{"vgcreate", "-q", g.Name}, g.Devices...)...)
	t.Cleanup(func() { g.remove(t) })
	return g
}

// SetUpLVM gives the programs of lvm2, and the driver, settings of their own for the time of
// a test, with which they see only devices that a filter lets by (global_filter, lvm.conf(5)).
func SetUpLVM(t testing.TB, filter string) {
	t.Helper()
	dir := filepath.Join(Dir(t), "lvm")
	check.OK(t, os.MkdirAll(filepath.Join(dir, "profile"), 0o700))
	check.OK(t, os.MkdirAll("/run/lock/lvm", 0o700))
	check.OK(t, os.WriteFile(filepath.Join(dir, "lvm.conf"), fmt.Appendf(nil, lvmConfig, filter), 0o600))
	profile, err := os.ReadFile("/etc/lvm/profile/lvmdbusd.profile")
	check.OK(t, err)
	check.OK(t, os.WriteFile(filepath.Join(dir, "profile", "lvmdbusd.profile"), profile, 0o600))
	t.Setenv("LVM_SYSTEM_DIR", dir)
	t.Setenv("LVM_SUPPRESS_FD_WARNINGS", "1")
	t.Setenv("DM_DISABLE_UDEV", "1")
}

// ThinPool makes a thin pool in the group and returns its URL.
func (g *Group) ThinPool(t testing.TB, name string, arguments ...string) string {
	t.Helper()
	Run(t, append([]string{"lvcreate", "-q", "--type", "thin-pool", "-n", name, g.Name}, arguments...)...)
	return "lvm://" + g.Name + "/" + name
}

// URL of the pool of linear volumes in the group.
func (g *Group) URL() string { return "lvm://" + g.Name }

// remove removes the group, and whatever there still is of its devices.
func (g *Group) remove(t testing.TB) {
	t.Helper()
	for _, name := range g.DeviceNames() {
		t.Errorf("left behind: device %s", name)
	}
	if out, err := exec.Command("vgremove", "-q", "-ff", "-y", g.Name).CombinedOutput(); err != nil {
		t.Errorf("vgremove: %v: %s", err, out)
	}
	for _, name := range g.DeviceNames() {
		_ = exec.Command("dmsetup", "remove", "-f", name).Run()
	}
	check.OK(t, os.RemoveAll("/dev/"+g.Name))
}

// DeviceNames returns the names of the devices of the group's volumes that are active;
// not those of thin pools.
func (g *Group) DeviceNames() []string {
	out, _ := exec.Command("dmsetup", "ls").Output()
	var names []string
	prefix := strings.ReplaceAll(g.Name, "-", "--") + "-"
	for line := range strings.Lines(string(out)) {
		name, _, _ := strings.Cut(line, "\t")
		if volume, ok := strings.CutPrefix(name, prefix); ok && strings.Contains(volume, ".") {
			names = append(names, name)
		}
	}
	return names
}

// Volumes returns the names of the logical volumes of the group.
func (g *Group) Volumes(t testing.TB) []string {
	t.Helper()
	return strings.Fields(Run(t, "lvs", "--noheadings", "-o", "lv_name", g.Name))
}
