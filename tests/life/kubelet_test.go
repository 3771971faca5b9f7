package life

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
)

// kubelet is what the kubelet does beside its calls: it keeps its directory where a symbolic link
// leads, and binds what is published for a pod elsewhere.
type kubelet struct {
	t    testing.TB
	link string
}

func newKubelet(t testing.TB, dir string) *kubelet {
	check.OK(t, os.MkdirAll(filepath.Join(dir, "data/kubelet/plugins"), 0o700))
	check.OK(t, os.MkdirAll(filepath.Join(dir, "data/kubelet/pods"), 0o700))
	check.OK(t, os.Symlink(filepath.Join(dir, "data/kubelet"), filepath.Join(dir, "kubelet")))
	return &kubelet{t, filepath.Join(dir, "kubelet")}
}

func (k *kubelet) staging(v *vol) string { return filepath.Join(k.link, "plugins/staging-"+v.Name) }

func (k *kubelet) target(v *vol, pod string) string {
	return filepath.Join(k.link, "pods", pod+"-"+v.Name)
}

// bind binds what is at a target where the kubelet has it for the pod: a subpath of a filesystem,
// a device below volumeDevices with a loop device over it. undo takes both away.
func (k *kubelet) bind(v *vol, target string) (undo func()) {
	k.t.Helper()
	to := target + "-bound"
	from := target
	if v.Block() {
		check.OK(k.t, os.WriteFile(to, nil, 0o600))
	} else {
		from = filepath.Join(target, "sub")
		check.OK(k.t, os.MkdirAll(from, 0o700))
		check.OK(k.t, os.Mkdir(to, 0o700))
	}
	check.OK(k.t, unix.Mount(from, to, "", unix.MS_BIND, ""))
	loop := ""
	if v.Block() {
		loop = drivertest.PlainLoop(k.t, to)
	}
	return func() {
		k.t.Helper()
		if loop != "" {
			drivertest.Run(k.t, "losetup", "-d", loop)
		}
		drivertest.Unmount(k.t, to)
		check.OK(k.t, os.Remove(to))
	}
}

// TestKubeletRestarts: a driver that starts while the kubelet has a volume in use takes the
// kubelet's own binds for no targets, and what is behind a symbolic link for what it is.
func TestKubeletRestarts(t *testing.T) {
	drivertest.NeedRoot(t)
	for _, kind := range []string{"ext4", "btrfs", block} {
		t.Run(kind, func(t *testing.T) {
			dir := newDir(t)
			k := newKubelet(t, dir)
			d := start(t, drivertest.Options{Dir: dir})
			r := co.Request("volume", kind, smallest[kind])
			r.VolumeCapabilities = []*csi.VolumeCapability{co.Capability(kind, singleWriter)}
			v := d.made(r)
			restart := func() {
				d = d.restart()
				v = d.volume(v.ID, v.Name, v.Capability)
				v.Staging = k.staging(v)
			}
			v.Staging = k.staging(v)
			first, second := k.target(v, "first"), k.target(v, "second")
			check.OK(t, v.claim())
			check.OK(t, v.stage())
			check.OK(t, v.publish(first, false))
			write(t, v.File(first), 1)
			unbind := k.bind(v, first)
			for range 2 {
				restart()
				check.OK(t, v.stage())
				for range 2 {
					check.OK(t, v.publish(first, false))
				}
				check.Code(t, v.publish(second, false), codes.FailedPrecondition, "published at")
				absent(t, second)
				check.Code(t, v.unstage(), codes.FailedPrecondition, "still published")
				expect(t, v.problems())
				holds(t, v.File(first), 1)
			}
			unbind()
			check.OK(t, v.unpublish(first))
			check.OK(t, v.publish(second, false))
			check.Code(t, v.publish(first, false), codes.FailedPrecondition, "published at")
			restart()
			check.Code(t, v.publish(first, false), codes.FailedPrecondition, "published at")
			check.OK(t, v.publish(second, false))

			// A bind that the kubelet forgot is in no pod's way, and keeps the volume staged.
			unbind = k.bind(v, second)
			restart()
			check.OK(t, unix.Unmount(second, unix.MNT_DETACH))
			check.OK(t, v.unpublish(second))
			check.OK(t, v.publish(first, false))
			holds(t, v.File(first), 1)
			check.OK(t, v.unpublish(first))
			check.Code(t, v.unstage(), codes.FailedPrecondition, second[len(k.link):]+"-bound")
			unbind()
			check.OK(t, v.down())
			if n := mountsAt(t, filepath.Join(dir, "data/kubelet/plugins/staging-volume")); n > 0 {
				t.Errorf("%d mounts are left", n)
			}
			d.nothingLeft()
		})
	}
}

// TestKubeletSeenTwice: the kubelet's directory is bound from a disk that is mounted elsewhere, so the kernel lists what is
// mounted in it twice. After a restart, too, that is one staging path and one target.
func TestKubeletSeenTwice(t *testing.T) {
	drivertest.NeedRoot(t)
	for _, kind := range []string{"ext4", "btrfs", block} {
		t.Run(kind, func(t *testing.T) {
			dir := newDir(t)
			disk, directory := filepath.Join(dir, "disk"), filepath.Join(dir, "kubelet")
			check.OK(t, errors.Join(os.Mkdir(disk, 0o700), os.Mkdir(directory, 0o700)))
			check.OK(t, unix.Mount("none", disk, "tmpfs", 0, ""))
			t.Cleanup(func() { _ = unix.Unmount(disk, 0) })
			check.OK(t, unix.Mount("", disk, "", unix.MS_SHARED, ""))
			check.OK(t, os.Mkdir(filepath.Join(disk, "kubelet"), 0o700))
			check.OK(t, unix.Mount(filepath.Join(disk, "kubelet"), directory, "", unix.MS_BIND, ""))
			t.Cleanup(func() { _ = unix.Unmount(directory, 0) })
			d := start(t, drivertest.Options{Dir: dir})
			for _, mode := range []csi.VolumeCapability_AccessMode_Mode{co.MultiWriter, singleWriter} {
				r := co.Request("volume-"+mode.String(), kind, smallest[kind])
				r.VolumeCapabilities = []*csi.VolumeCapability{co.Capability(kind, mode)}
				v := d.made(r)
				v.Staging = filepath.Join(directory, "staging")
				first, second := filepath.Join(directory, "first"), filepath.Join(directory, "second")
				check.OK(t, v.claim())
				check.OK(t, v.stage())
				check.OK(t, v.publish(first, false))
				d = d.restart()
				staging := v.Staging
				v = d.volume(v.ID, v.Name, v.Capability)
				v.Staging = staging
				check.OK(t, v.stage())
				check.OK(t, v.publish(first, false))
				check.Code(t, v.unstage(), codes.FailedPrecondition, "still published")
				if mode == singleWriter {
					check.Code(t, v.publish(second, false), codes.FailedPrecondition, "published at")
				}
				write(t, v.File(first), 1)
				check.OK(t, v.down(first))
			}
			d.nothingLeft()
		})
	}
}

// TestOneTargetAfterMany: a target that was published for a use of many stays one after a restart
// and in between.
func TestOneTargetAfterMany(t *testing.T) {
	d := start(t, drivertest.Options{})
	v := d.made(co.Request("volume", "ext4", smallest["ext4"]))
	first, second, third := v.running(), v.Target("second"), v.Target("third")
	single := d.volume(v.ID, v.Name, co.Capability("ext4", singleWriter))
	check.Code(t, single.publish(second, false), codes.FailedPrecondition, first)
	check.OK(t, v.unpublish(first))
	check.OK(t, single.publish(second, false))
	check.OK(t, v.publish(third, false)) // a use of many asks nobody
	check.OK(t, v.unpublish(second))
	d = d.restart()
	v, single = d.volume(v.ID, v.Name, v.Capability), d.volume(v.ID, v.Name, single.Capability)
	check.Code(t, single.publish(first, false), codes.FailedPrecondition, third)
	check.OK(t, single.publish(third, false))
	check.OK(t, v.unpublish(third))
	check.OK(t, single.publish(first, false))
	check.OK(t, v.down(first))
	d.nothingLeft()
}

// TestKubeletOnBtrfs: the directory of the kubelet may be on a btrfs that has lost its first device,
// and so may be what a volume carries.
func TestKubeletOnBtrfs(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := newDir(t)
	directory := filepath.Join(dir, "kubelet")
	check.OK(t, os.Mkdir(directory, 0o700))
	withoutFirst(t, directory, disk(t, dir, "x", 512*miB), disk(t, dir, "y", 512*miB))
	d := start(t, drivertest.Options{Dir: dir})
	for _, kind := range []string{"ext4", "btrfs", block} {
		v := d.made(co.Request("volume-"+kind, kind, smallest[kind]))
		v.Staging = filepath.Join(directory, "staging-"+kind)
		target := filepath.Join(directory, "target-"+kind)
		check.OK(t, v.claim())
		for range 2 {
			check.OK(t, v.stage())
			check.OK(t, v.publish(target, false))
		}
		write(t, v.File(target), 1)
		check.OK(t, v.down(target))
	}

	raw := d.made(co.Request("raw", block, 512*miB))
	target := raw.running()
	within := filepath.Join(dir, "within")
	check.OK(t, os.Mkdir(within, 0o700))
	withoutFirst(t, within, disk(t, dir, "z", 512*miB), target)
	write(t, filepath.Join(within, "data"), 1)
	drivertest.Unmount(t, within)
	check.OK(t, raw.unpublish(target))
	check.OK(t, raw.unstage())
	v := d.volume(raw.ID, raw.Name, co.Capability("btrfs", co.MultiWriter))
	check.OK(t, v.stage())
	check.OK(t, v.publish(target, false))
	holds(t, v.File(target), 1)
	check.OK(t, v.expand(768*miB))
	check.OK(t, v.nodeExpand(target))
	if total := v.usage(target).GetTotal(); total < 700*miB {
		t.Errorf("grown to %d bytes", total)
	}
	expect(t, v.problems())
	check.OK(t, v.down(target))
	drivertest.Unmount(t, directory)
	d.nothingLeft()
}

// disk is a loop device that goes with the last that uses it.
func disk(t testing.TB, dir, name string, size int64) string {
	t.Helper()
	image := filepath.Join(dir, name)
	check.OK(t, os.WriteFile(image, nil, 0o600))
	check.OK(t, os.Truncate(image, size))
	device := drivertest.Loop(t, image)
	t.Cleanup(func() { _, _ = command("losetup", "-d", device) })
	return device
}

// withoutFirst mounts a btrfs at a directory that was made on one device and is on another now.
func withoutFirst(t testing.TB, directory, first, second string) {
	t.Helper()
	drivertest.RunBtrfs(t, "mkfs.btrfs", "-q", "-f", first)
	drivertest.Run(t, "mount", first, directory)
	drivertest.RunBtrfs(t, "btrfs", "device", "add", "-f", second, directory)
	drivertest.Run(t, "btrfs", "device", "remove", first, directory)
}

// over returns the loop devices over a volume's image, whatever its directory is now, those over such a
// device first.
func over(t testing.TB, v *vol) (devices []string) {
	t.Helper()
	found, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	check.OK(t, err)
	backings := map[string]string{}
	for _, path := range found {
		if backing, err := os.ReadFile(path); err == nil {
			backings["/dev/"+strings.Split(path, "/")[3]] = strings.TrimSpace(string(backing))
		}
	}
	for device, backing := range backings {
		if strings.Contains(backing, v.key()) {
			devices = append(devices, device)
		} else if strings.Contains(backings[backing], v.key()) {
			devices = append([]string{device}, devices...)
		}
	}
	return devices
}

// TestUndoWithoutPool: what is published and staged can be taken down while nobody can ask the pool:
// its disk is not mounted when the driver starts, or dead. Another volume's path stays as it is.
func TestUndoWithoutPool(t *testing.T) {
	drivertest.NeedRoot(t)
	for name, lose := range map[string]func(t *testing.T, d *driver) *driver{
		"not mounted": func(t *testing.T, d *driver) *driver {
			d.Stop()
			directory := filepath.Join(d.Dir, "pool")
			check.OK(t, unix.Unmount(directory, unix.MNT_DETACH))
			return start(t, drivertest.Options{Dir: d.Dir, Pools: []string{"default=file://" + directory + "?reservePercent=0&create=0"}})
		},
		"dead": func(t *testing.T, d *driver) *driver {
			shutDown(t, filepath.Join(d.Dir, "pool"))
			return d
		},
		"dead and unmounted": func(t *testing.T, d *driver) *driver {
			directory := filepath.Join(d.Dir, "pool")
			shutDown(t, directory)
			check.OK(t, unix.Unmount(directory, unix.MNT_DETACH))
			return d
		},
		"not in the flags": func(t *testing.T, d *driver) *driver {
			d.Stop()
			return start(t, drivertest.Options{Dir: d.Dir, Pools: []string{"other=file://" + d.Dir + "/other?reservePercent=0"}})
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := newDir(t)
			drivertest.MountNew(t, "xfs", filepath.Join(dir, "pool"), 2<<30)
			directory := filepath.Join(dir, "pool")
			d := start(t, drivertest.Options{Dir: dir})
			options := d.options
			var all []*vol
			for _, kind := range []string{"ext4", "xfs", block} {
				v := d.made(co.Request(kind+filepath.Base(dir), kind, smallest[kind])) // no other test has one of this name
				write(t, v.File(v.running()), 1)
				all = append(all, v)
			}
			unix.Sync()
			again := lose(t, d)
			for i, v := range all {
				all[i] = again.volume(v.ID, v.Name, v.Capability)
			}
			for i, v := range all {
				other := again.volume(all[(i+1)%3].ID, v.Name, v.Capability)
				check.Code(t, other.unpublish(v.Target("pod")), codes.FailedPrecondition, "not this volume")
				if mountsAt(t, v.Target("pod")) != 1 {
					t.Fatalf("%s: another volume's unpublish took it away", v.Name)
				}
			}
			for i, v := range all {
				check.Code(t, v.unstage(), codes.FailedPrecondition, "still published")
				for range 2 {
					check.OK(t, v.unpublish(v.Target("pod")))
				}
				if other := again.volume(all[(i+1)%3].ID, v.Name, v.Capability); i < 2 {
					check.Code(t, other.unstage(), codes.FailedPrecondition) // that one is published
				} else {
					check.OK(t, other.unstage()) // that one is nowhere
				}
				staged := v.Staging
				if v.Block() {
					staged += "/device"
				}
				if mountsAt(t, staged) != 1 {
					t.Fatalf("%s: another volume's unstage took it away", v.Name)
				}
				for range 2 {
					check.OK(t, v.unstage())
				}
				if mountsAt(t, staged) != 0 {
					t.Fatalf("%s is still staged", v.Name)
				}
			}

			// No device keeps the disk, so it can be repaired. With it again, all is there.
			for _, v := range all {
				for deadline := time.Now().Add(time.Minute); len(over(t, v)) > 0; time.Sleep(10 * time.Millisecond) {
					if time.Now().After(deadline) {
						t.Fatalf("left of %s: %v", v.Name, over(t, v))
					}
				}
			}
			again.Stop()
			for deadline := time.Now().Add(time.Minute); unix.Unmount(directory, unix.MNT_DETACH) == nil && time.Now().Before(deadline); {
				time.Sleep(10 * time.Millisecond)
			}
			image := filepath.Join(dir, "pool.image")
			for deadline := time.Now().Add(time.Minute); strings.HasPrefix(name, "dead") && len(drivertest.LoopsOver(image)) > 0 && time.Now().Before(deadline); {
				time.Sleep(10 * time.Millisecond)
			}
			drivertest.MountLoop(t, image, directory)
			d = start(t, options)
			for _, v := range all {
				if left := over(t, v); len(left) > 0 {
					t.Errorf("left: %v", left)
				}
				v = d.volume(v.ID, v.Name, v.Capability)
				target := v.Target("pod")
				check.OK(t, v.stage())
				check.OK(t, v.publish(target, false))
				holds(t, v.File(target), 1)
				check.OK(t, v.down(target))
			}
			d.nothingLeft()
		})
	}
}
