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

// NeedLVM skips a test if the kernel has no device mapper. `make test-lvm` runs such tests in a virtual machine, where it fails instead.
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

// Group is a volume group for a test, on loop devices. While the test runs, lvm2 sees no other devices of the machine.
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

// groups is the number of groups that this process has made; it is in the names.
var groups int

// NewGroup makes a volume group with a sparse device for each size (bytes). It is removed at the end of the test, which fails if that is not possible.
func NewGroup(t testing.TB, sizes ...int64) *Group {
	t.Helper()
	NeedLVM(t)
	var devices []string
	for _, size := range sizes {
		devices = append(devices, Disk(t, size))
	}
	return NewGroupOn(t, devices...)
}

// Disk makes a sparse file of size bytes, and a loop device over it, until the test ends.
func Disk(t testing.TB, size int64) (device string) {
	t.Helper()
	image := filepath.Join(Dir(t), "disk")
	check.OK(t, os.WriteFile(image, nil, 0o600))
	check.OK(t, os.Truncate(image, size))
	device = Loop(t, image)
	t.Cleanup(func() {
		for _, device := range strings.Fields(Run(t, "losetup", "-n", "-O", "NAME", "-j", image)) { // the test may have attached it to another one
			Run(t, "losetup", "-d", device)
		}
	})
	return device
}

// NewGroupOn is NewGroup on existing devices: loop devices, or devices of the device mapper with names that begin with ashlar-.
func NewGroupOn(t testing.TB, devices ...string) *Group {
	t.Helper()
	NeedLVM(t)
	filter := `"a|^/dev/loop|"`
	if strings.HasPrefix(devices[0], "/dev/mapper/") { // but not what is below it, which has the same bytes
		filter = `"a|^/dev/mapper/ashlar-|"`
	}
	SetUpLVM(t, filter)
	groups++
	g := &Group{Name: fmt.Sprintf("ashlar-%d-%d", os.Getpid(), groups), Devices: devices}
	Run(t, append([]string{"vgcreate", "-q", g.Name}, g.Devices...)...)
	t.Cleanup(func() { g.remove(t) })
	return g
}

// SetUpLVM gives lvm2 and the driver settings of their own until the test ends. They see only devices that match a filter (global_filter, lvm.conf(5)).
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

// URL returns the URL of the group as a pool of linear volumes.
func (g *Group) URL() string { return "lvm://" + g.Name }

// remove removes the group and what is left of its devices. The test fails if volumes are still active.
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

// Device returns the name of the device of a logical volume of the group (libdevmapper: dashes double). That of no volume begins all of them.
func (g *Group) Device(volume string) string {
	return strings.ReplaceAll(g.Name, "-", "--") + "-" + strings.ReplaceAll(volume, "-", "--")
}

// DeviceNames returns the names of the active devices of the group's volumes, without those of thin pools.
func (g *Group) DeviceNames() []string {
	out, _ := exec.Command("dmsetup", "ls").Output()
	var names []string
	prefix := g.Device("")
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
