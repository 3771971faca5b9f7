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

	"github.com/ashlar-csi/ashlar/internal/drivertest"
)

// kubelet is what the kubelet does beside its calls: it keeps its folder where a symbolic link
// leads, and binds what is published for a pod elsewhere.
type kubelet struct {
	t    testing.TB
	link string
}

func newKubelet(t testing.TB, dir string) *kubelet {
	ok(t, os.MkdirAll(filepath.Join(dir, "data/kubelet/plugins"), 0o700))
	ok(t, os.MkdirAll(filepath.Join(dir, "data/kubelet/pods"), 0o700))
	ok(t, os.Symlink(filepath.Join(dir, "data/kubelet"), filepath.Join(dir, "kubelet")))
	return &kubelet{t, filepath.Join(dir, "kubelet")}
}

func (k *kubelet) staging(v *vol) string { return filepath.Join(k.link, "plugins/staging-"+v.name) }

func (k *kubelet) target(v *vol, pod string) string {
	return filepath.Join(k.link, "pods", pod+"-"+v.name)
}

// bind binds what is at a target where the kubelet has it for the pod: a subpath of a filesystem,
// a device below volumeDevices with a loop device over it. undo takes both away.
func (k *kubelet) bind(v *vol, target string) (undo func()) {
	k.t.Helper()
	to := target + "-bound"
	from := target
	if v.block() {
		ok(k.t, os.WriteFile(to, nil, 0o600))
	} else {
		from = filepath.Join(target, "sub")
		ok(k.t, os.MkdirAll(from, 0o700))
		ok(k.t, os.Mkdir(to, 0o700))
	}
	ok(k.t, unix.Mount(from, to, "", unix.MS_BIND, ""))
	loop := ""
	if v.block() {
		loop = drivertest.PlainLoop(k.t, to)
	}
	return func() {
		k.t.Helper()
		if loop != "" {
			drivertest.Run(k.t, "losetup", "-d", loop)
		}
		ok(k.t, unix.Unmount(to, 0))
		ok(k.t, os.Remove(to))
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
			r := request("volume", kind, smallest[kind])
			r.VolumeCapabilities = []*csi.VolumeCapability{capability(kind, singleWriter)}
			v := d.made(r)
			restart := func() {
				d = d.restart()
				v = d.volume(v.id, v.name, v.capability)
				v.staging = k.staging(v)
			}
			v.staging = k.staging(v)
			first, second := k.target(v, "first"), k.target(v, "second")
			ok(t, v.claim())
			ok(t, v.stage())
			ok(t, v.publish(first, false))
			write(t, v.file(first), 1)
			unbind := k.bind(v, first)
			for range 2 {
				restart()
				ok(t, v.stage())
				for range 2 {
					ok(t, v.publish(first, false))
				}
				wants(t, v.publish(second, false), codes.FailedPrecondition, "published at")
				absent(t, second)
				wants(t, v.unstage(), codes.FailedPrecondition, "still published")
				expect(t, v.problems())
				holds(t, v.file(first), 1)
			}
			unbind()
			ok(t, v.unpublish(first))
			ok(t, v.publish(second, false))
			wants(t, v.publish(first, false), codes.FailedPrecondition, "published at")
			restart()
			wants(t, v.publish(first, false), codes.FailedPrecondition, "published at")
			ok(t, v.publish(second, false))

			// A bind that the kubelet forgot is in no pod's way, and keeps the volume staged.
			unbind = k.bind(v, second)
			restart()
			ok(t, unix.Unmount(second, unix.MNT_DETACH))
			ok(t, v.unpublish(second))
			ok(t, v.publish(first, false))
			holds(t, v.file(first), 1)
			ok(t, v.unpublish(first))
			wants(t, v.unstage(), codes.FailedPrecondition, second[len(k.link):]+"-bound")
			unbind()
			ok(t, v.down())
			if n := mountsAt(t, filepath.Join(dir, "data/kubelet/plugins/staging-volume")); n > 0 {
				t.Errorf("%d mounts are left", n)
			}
			d.nothingLeft()
		})
	}
}

// TestKubeletSeenTwice: the kubelet's folder is bound from a disk that is mounted elsewhere, so the kernel lists what is
// mounted in it twice. After a restart, too, that is one staging path and one target.
func TestKubeletSeenTwice(t *testing.T) {
	drivertest.NeedRoot(t)
	for _, kind := range []string{"ext4", "btrfs", block} {
		t.Run(kind, func(t *testing.T) {
			dir := newDir(t)
			disk, folder := filepath.Join(dir, "disk"), filepath.Join(dir, "kubelet")
			ok(t, errors.Join(os.Mkdir(disk, 0o700), os.Mkdir(folder, 0o700)))
			ok(t, unix.Mount("none", disk, "tmpfs", 0, ""))
			t.Cleanup(func() { _ = unix.Unmount(disk, 0) })
			ok(t, unix.Mount("", disk, "", unix.MS_SHARED, ""))
			ok(t, os.Mkdir(filepath.Join(disk, "kubelet"), 0o700))
			ok(t, unix.Mount(filepath.Join(disk, "kubelet"), folder, "", unix.MS_BIND, ""))
			t.Cleanup(func() { _ = unix.Unmount(folder, 0) })
			d := start(t, drivertest.Options{Dir: dir})
			for _, mode := range []csi.VolumeCapability_AccessMode_Mode{multiWriter, singleWriter} {
				r := request("volume-"+mode.String(), kind, smallest[kind])
				r.VolumeCapabilities = []*csi.VolumeCapability{capability(kind, mode)}
				v := d.made(r)
				v.staging = filepath.Join(folder, "staging")
				first, second := filepath.Join(folder, "first"), filepath.Join(folder, "second")
				ok(t, v.claim())
				ok(t, v.stage())
				ok(t, v.publish(first, false))
				d = d.restart()
				staging := v.staging
				v = d.volume(v.id, v.name, v.capability)
				v.staging = staging
				ok(t, v.stage())
				ok(t, v.publish(first, false))
				wants(t, v.unstage(), codes.FailedPrecondition, "still published")
				if mode == singleWriter {
					wants(t, v.publish(second, false), codes.FailedPrecondition, "published at")
				}
				write(t, v.file(first), 1)
				ok(t, v.down(first))
			}
			d.nothingLeft()
		})
	}
}

// TestOneTargetAfterMany: a target that was published for a use of many stays one after a restart
// and in between.
func TestOneTargetAfterMany(t *testing.T) {
	d := start(t, drivertest.Options{})
	v := d.made(request("volume", "ext4", smallest["ext4"]))
	first, second, third := v.running(), v.target("second"), v.target("third")
	single := d.volume(v.id, v.name, capability("ext4", singleWriter))
	wants(t, single.publish(second, false), codes.FailedPrecondition, first)
	ok(t, v.unpublish(first))
	ok(t, single.publish(second, false))
	ok(t, v.publish(third, false)) // a use of many asks nobody
	ok(t, v.unpublish(second))
	d = d.restart()
	v, single = d.volume(v.id, v.name, v.capability), d.volume(v.id, v.name, single.capability)
	wants(t, single.publish(first, false), codes.FailedPrecondition, third)
	ok(t, single.publish(third, false))
	ok(t, v.unpublish(third))
	ok(t, single.publish(first, false))
	ok(t, v.down(first))
	d.nothingLeft()
}

// TestKubeletOnBtrfs: the folder of the kubelet may be on a btrfs that has lost its first device,
// and so may be what a volume carries.
func TestKubeletOnBtrfs(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := newDir(t)
	folder := filepath.Join(dir, "kubelet")
	ok(t, os.Mkdir(folder, 0o700))
	withoutFirst(t, folder, disk(t, dir, "x", 512*miB), disk(t, dir, "y", 512*miB))
	d := start(t, drivertest.Options{Dir: dir})
	for _, kind := range []string{"ext4", "btrfs", block} {
		v := d.made(request("volume-"+kind, kind, smallest[kind]))
		v.staging = filepath.Join(folder, "staging-"+kind)
		target := filepath.Join(folder, "target-"+kind)
		ok(t, v.claim())
		for range 2 {
			ok(t, v.stage())
			ok(t, v.publish(target, false))
		}
		write(t, v.file(target), 1)
		ok(t, v.down(target))
	}

	raw := d.made(request("raw", block, 512*miB))
	target := raw.running()
	within := filepath.Join(dir, "within")
	ok(t, os.Mkdir(within, 0o700))
	withoutFirst(t, within, disk(t, dir, "z", 512*miB), target)
	write(t, filepath.Join(within, "data"), 1)
	ok(t, unix.Unmount(within, 0))
	ok(t, raw.unpublish(target))
	ok(t, raw.unstage())
	v := d.volume(raw.id, raw.name, capability("btrfs", multiWriter))
	ok(t, v.stage())
	ok(t, v.publish(target, false))
	holds(t, v.file(target), 1)
	ok(t, v.expand(768*miB))
	ok(t, v.nodeExpand(target))
	if total := v.usage(target).GetTotal(); total < 700*miB {
		t.Errorf("grown to %d bytes", total)
	}
	expect(t, v.problems())
	ok(t, v.down(target))
	ok(t, unix.Unmount(folder, 0))
	d.nothingLeft()
}

// disk is a loop device that goes with the last that uses it.
func disk(t testing.TB, dir, name string, size int64) string {
	t.Helper()
	image := filepath.Join(dir, name)
	ok(t, os.WriteFile(image, nil, 0o600))
	ok(t, os.Truncate(image, size))
	device := drivertest.Loop(t, image)
	t.Cleanup(func() { _, _ = command("losetup", "-d", device) })
	return device
}

// withoutFirst mounts a btrfs at a folder that was made on one device and is on another now.
func withoutFirst(t testing.TB, folder, first, second string) {
	t.Helper()
	drivertest.RunBtrfs(t, "mkfs.btrfs", "-q", "-f", first)
	run(t, "mount", first, folder)
	drivertest.RunBtrfs(t, "btrfs", "device", "add", "-f", second, folder)
	run(t, "btrfs", "device", "remove", first, folder)
}

// over returns the loop devices over a volume's image, whatever its folder is now, those over such a
// device first.
func over(t testing.TB, v *vol) (devices []string) {
	t.Helper()
	found, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	ok(t, err)
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
			folder := filepath.Join(d.Dir, "pool")
			ok(t, unix.Unmount(folder, unix.MNT_DETACH))
			return start(t, drivertest.Options{Dir: d.Dir, Pools: []string{"default=file://" + folder + "?reservePercent=0&create=0"}})
		},
		"dead": func(t *testing.T, d *driver) *driver {
			shutDown(t, filepath.Join(d.Dir, "pool"))
			return d
		},
		"dead and unmounted": func(t *testing.T, d *driver) *driver {
			folder := filepath.Join(d.Dir, "pool")
			shutDown(t, folder)
			ok(t, unix.Unmount(folder, unix.MNT_DETACH))
			return d
		},
		"not in the flags": func(t *testing.T, d *driver) *driver {
			d.Stop()
			return start(t, drivertest.Options{Dir: d.Dir, Pools: []string{"other=file://" + d.Dir + "/other?reservePercent=0"}})
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := newDir(t)
			poolFolder(t, dir, "xfs", 2<<30)
			folder := filepath.Join(dir, "pool")
			d := start(t, drivertest.Options{Dir: dir})
			options := d.options
			var all []*vol
			for _, kind := range []string{"ext4", "xfs", block} {
				v := d.made(request(kind+filepath.Base(dir), kind, smallest[kind])) // no other test has one of this name
				write(t, v.file(v.running()), 1)
				all = append(all, v)
			}
			unix.Sync()
			again := lose(t, d)
			for i, v := range all {
				all[i] = again.volume(v.id, v.name, v.capability)
			}
			for i, v := range all {
				other := again.volume(all[(i+1)%3].id, v.name, v.capability)
				wants(t, other.unpublish(v.target("pod")), codes.FailedPrecondition, "not this volume")
				if mountsAt(t, v.target("pod")) != 1 {
					t.Fatalf("%s: another volume's unpublish took it away", v.name)
				}
			}
			for i, v := range all {
				wants(t, v.unstage(), codes.FailedPrecondition, "still published")
				for range 2 {
					ok(t, v.unpublish(v.target("pod")))
				}
				if other := again.volume(all[(i+1)%3].id, v.name, v.capability); i < 2 {
					wants(t, other.unstage(), codes.FailedPrecondition) // that one is published
				} else {
					ok(t, other.unstage()) // that one is nowhere
				}
				staged := v.staging
				if v.block() {
					staged += "/device"
				}
				if mountsAt(t, staged) != 1 {
					t.Fatalf("%s: another volume's unstage took it away", v.name)
				}
				for range 2 {
					ok(t, v.unstage())
				}
				if mountsAt(t, staged) != 0 {
					t.Fatalf("%s is still staged", v.name)
				}
			}

			// No device keeps the disk, so it can be repaired. With it again, all is there.
			for _, v := range all {
				for deadline := time.Now().Add(time.Minute); len(over(t, v)) > 0; time.Sleep(10 * time.Millisecond) {
					if time.Now().After(deadline) {
						t.Fatalf("left of %s: %v", v.name, over(t, v))
					}
				}
			}
			again.Stop()
			for deadline := time.Now().Add(time.Minute); unix.Unmount(folder, unix.MNT_DETACH) == nil && time.Now().Before(deadline); {
				time.Sleep(10 * time.Millisecond)
			}
			image := filepath.Join(dir, "image-of-pool")
			for deadline := time.Now().Add(time.Minute); strings.HasPrefix(name, "dead") && len(attached(t, image)) > 0 && time.Now().Before(deadline); {
				time.Sleep(10 * time.Millisecond)
			}
			drivertest.MountLoop(t, image, folder)
			d = start(t, options)
			for _, v := range all {
				if left := over(t, v); len(left) > 0 {
					t.Errorf("left: %v", left)
				}
				v = d.volume(v.id, v.name, v.capability)
				target := v.target("pod")
				ok(t, v.stage())
				ok(t, v.publish(target, false))
				holds(t, v.file(target), 1)
				ok(t, v.down(target))
			}
			d.nothingLeft()
		})
	}
}
