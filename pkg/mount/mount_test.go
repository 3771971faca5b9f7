package mount_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"

	"golang.org/x/sys/unix"
	mountutils "k8s.io/mount-utils"

	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/mount"
)

// disk is a loop device over an image with a new filesystem, and a directory for mount points.
type disk struct {
	dir, device, image string
}

// sizes of the images, in bytes.
var sizes = map[string]int64{"ext4": 16 << 20, "xfs": 300 << 20, "btrfs": 128 << 20}

func newDisk(t testing.TB, fstype string) disk {
	t.Helper()
	drivertest.NeedRoot(t)
	d := disk{dir: drivertest.Dir(t)}
	d.image = filepath.Join(d.dir, "image")
	check.OK(t, os.WriteFile(d.image, nil, 0o600))
	check.OK(t, os.Truncate(d.image, sizes[fstype]))
	drivertest.RunBtrfs(t, "mkfs."+fstype, "-q", d.image)
	d.device = drivertest.Loop(t, d.image)
	t.Cleanup(func() {
		for _, line := range slices.Backward(drivertest.Leftovers(d.dir)) {
			if path, is := strings.CutPrefix(line, "mount "); is && t.Failed() {
				_ = unix.Unmount(path, unix.MNT_DETACH)
			}
		}
		drivertest.Run(t, "losetup", "-d", d.device)
	})
	return d
}

// directory makes a directory in that of the disk.
func (d disk) directory(t testing.TB, name string) string {
	t.Helper()
	path := filepath.Join(d.dir, name)
	check.OK(t, os.Mkdir(path, 0o700))
	return path
}

// mounted mounts the disk until the end of the test, and returns where.
func (d disk) mounted(t testing.TB, fstype string, options ...string) string {
	t.Helper()
	path := d.directory(t, "mounted")
	check.OK(t, mount.Filesystem(d.device, path, fstype, options, false))
	t.Cleanup(func() {
		if err := mount.Unmount(path); err != nil {
			t.Error(err)
		}
	})
	return path
}

func options(t testing.TB, path string) []string {
	t.Helper()
	return strings.Split(drivertest.Run(t, "findmnt", "-no", "OPTIONS", path), ",")
}

func number(t testing.TB, device string) uint64 {
	t.Helper()
	var st unix.Stat_t
	check.OK(t, unix.Stat(device, &st))
	return st.Rdev
}

func TestOptions(t *testing.T) {
	d := newDisk(t, "ext4")
	path := d.directory(t, "mounted")
	for name, c := range map[string]struct {
		given     []string
		readOnly  bool
		want, not []string
	}{
		"none":              {nil, false, []string{"rw"}, []string{"ro", "noatime", "nosuid"}},
		"of the mount":      {[]string{"noatime,nosuid", "nodev", "noexec"}, false, []string{"rw", "noatime", "nosuid", "nodev", "noexec"}, nil},
		"of the filesystem": {[]string{"errors=remount-ro", "nodiscard"}, false, []string{"rw", "errors=remount-ro"}, nil},
		"ro":                {[]string{"ro"}, false, []string{"ro"}, []string{"rw"}},
		"read-only":         {nil, true, []string{"ro"}, []string{"rw"}},
		"of mount(8)":       {[]string{"defaults", "_netdev,nofail", "x-systemd.automount", "comment=x", "noauto", "user"}, false, []string{"rw"}, nil},
		"words of no force": {[]string{"suid,dev,exec,rw"}, false, []string{"rw"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			check.OK(t, mount.Filesystem(d.device, path, "ext4", c.given, c.readOnly))
			have := options(t, path)
			for _, want := range c.want {
				if !slices.Contains(have, want) {
					t.Errorf("%s is not among %v", want, have)
				}
			}
			for _, not := range c.not {
				if slices.Contains(have, not) {
					t.Errorf("%s is among %v", not, have)
				}
			}
			check.OK(t, mount.Unmount(path))
		})
	}
	for _, bad := range []string{"no-such-option", "no-such=1", "errors=perhaps", "bind", "rbind", "remount", "move", "loop", "loop=/dev/loop0", "offset=4096", "shared", "rprivate"} {
		err := mount.Filesystem(d.device, path, "ext4", []string{"noatime", bad}, false)
		if !errors.Is(err, errdefs.ErrInvalid) || !strings.Contains(err.Error(), bad) {
			t.Errorf("option %s: %v", bad, err)
		}
	}
	if err := mount.Filesystem(d.device, path, "nosuchfs", nil, false); !errors.Is(err, errdefs.ErrUnsupported) {
		t.Errorf("an unknown filesystem: %v", err)
	}
	if err := mount.Filesystem(d.device, path, "xfs", nil, false); err == nil {
		t.Error("an ext4 is mounted as XFS")
	}
	if err := mount.Filesystem(d.dir+"/nothing", path, "ext4", nil, false); err == nil {
		t.Error("nothing is mounted")
	}
	if err := mount.Filesystem(d.device, d.dir+"/nowhere", "ext4", nil, false); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("it is mounted nowhere: %v", err)
	}
	// After all this nothing is mounted there, nor is the device in use.
	if info, err := mount.At(path); err != nil || info.Root {
		t.Errorf("there is %+v: %v", info, err)
	}
	exclusive, err := os.OpenFile(d.device, os.O_RDWR|unix.O_EXCL, 0)
	if err != nil {
		t.Fatalf("the device is still in use: %v", err)
	}
	exclusive.Close()
}

func TestDamagedFilesystem(t *testing.T) {
	d := newDisk(t, "ext4")
	f, err := os.OpenFile(d.device, os.O_RDWR, 0)
	check.OK(t, err)
	_, err = f.WriteAt([]byte{0xaa, 0xbb, 0xcc}, 1024+16) // the superblock's checksum is wrong now
	check.OK(t, errors.Join(err, f.Sync(), f.Close()))
	err = mount.Filesystem(d.device, d.directory(t, "mounted"), "ext4", nil, false)
	if !errors.Is(err, errdefs.ErrDataLoss) || !strings.Contains(strings.ToLower(err.Error()), "ext4") {
		t.Errorf("got %v", err)
	}
}

// TestRemembered: the kernel remembers that a device was one of a btrfs with several devices. Then the device gets a copy of a btrfs that is mounted elsewhere.
// The copy can be opened and mounted all the same.
func TestRemembered(t *testing.T) {
	one, source := newDisk(t, "btrfs"), newDisk(t, "btrfs")
	var two disk
	two.image = filepath.Join(one.dir, "second")
	check.OK(t, os.WriteFile(two.image, nil, 0o600))
	check.OK(t, os.Truncate(two.image, sizes["btrfs"]))
	two.device = drivertest.Loop(t, two.image)
	defer drivertest.Run(t, "losetup", "-d", two.device)
	drivertest.RunBtrfs(t, "mkfs.btrfs", "-q", "-f", "-m", "raid0", "-d", "raid0", one.device, two.device)
	defer drivertest.Run(t, "btrfs", "device", "scan", "--forget", two.device)
	drivertest.Run(t, "dd", "if="+source.image, "of="+one.device, "bs=1M", "conv=fsync", "status=none")
	source.mounted(t, "btrfs")
	check.OK(t, mount.WithRoot(one.device, "btrfs", nil, func(*os.File) error { return nil }))
	path := one.directory(t, "copy")
	check.OK(t, mount.Filesystem(one.device, path, "btrfs", nil, true))
	check.OK(t, mount.Unmount(path))
}

// TestOpenBesidePrograms: while this process starts programs all the time, a device is not in use any more when WithRoot and Unclaimed have returned.
func TestOpenBesidePrograms(t *testing.T) {
	d := newDisk(t, "btrfs")
	ctx, stop := context.WithTimeout(t.Context(), 10*time.Second)
	defer stop()
	var starting sync.WaitGroup
	defer starting.Wait()
	for range 4 {
		starting.Go(func() {
			for ctx.Err() == nil {
				_ = exec.Command("true").Run()
			}
		})
	}
	for ctx.Err() == nil && !t.Failed() {
		if err := mount.WithRoot(d.device, "btrfs", nil, func(*os.File) error { return nil }); err != nil {
			t.Errorf("just asked for: %v", err)
		}
		if err := mount.Unclaimed(t.Context(), d.device, 0, 0); err != nil {
			t.Errorf("just looked at: %v", err)
		}
	}
	stop()
}

// TestProgramsBesideOpen: while a filesystem is open, and while the kernel closes it on a disk that hangs, this process starts programs and looks at other mounts.
func TestProgramsBesideOpen(t *testing.T) {
	disk := newDisk(t, "xfs") // of the image
	path := disk.mounted(t, "xfs", "nouuid")
	image := filepath.Join(path, "image")
	check.OK(t, os.WriteFile(image, nil, 0o600))
	check.OK(t, os.Truncate(image, sizes["ext4"]))
	drivertest.Run(t, "mkfs.ext4", "-q", image)
	device := drivertest.Loop(t, image)
	defer drivertest.Run(t, "losetup", "-d", device)
	goOn := func(when string) {
		done := make(chan error, 1)
		go func() {
			_, err := mount.At(disk.dir)
			done <- errors.Join(err, exec.Command("true").Run())
		}()
		select {
		case err := <-done:
			check.OK(t, err)
		case <-time.After(10 * time.Second):
			t.Errorf("%s: nothing goes on", when)
		}
	}
	opened, leave, closed := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	go func() {
		closed <- mount.WithWritableRoot(device, "ext4", nil, func(root *os.File) error {
			err := os.WriteFile(fmt.Sprintf("/proc/self/fd/%d/file", root.Fd()), []byte("text"), 0o600)
			close(opened)
			<-leave
			return err
		})
	}()
	select {
	case <-opened:
	case err := <-closed:
		t.Fatal(err)
	}
	goOn("open")
	hangs := !t.Failed() // otherwise no program can be started
	if hangs {
		drivertest.Run(t, "fsfreeze", "-f", path)
	}
	close(leave)
	if hangs {
		time.Sleep(100 * time.Millisecond) // by then it is being closed
		goOn("closing")
		if len(closed) > 0 {
			t.Error("it was closed on a disk that hangs")
		}
		drivertest.Run(t, "fsfreeze", "-u", path)
	}
	check.OK(t, <-closed)
	check.OK(t, mount.Unclaimed(t.Context(), device, 0, 0))
}

// TestScannedElsewhere: a mounted btrfs was scanned by another path of its device, which is gone now. Its mount is found and unmounted all the same.
func TestScannedElsewhere(t *testing.T) {
	d := newDisk(t, "btrfs")
	path, node := d.mounted(t, "btrfs"), filepath.Join(d.dir, "node")
	check.OK(t, unix.Mknod(node, unix.S_IFBLK|0o600, int(number(t, d.device))))
	drivertest.Run(t, "btrfs", "device", "scan", node)
	check.OK(t, os.Remove(node))
	if info, err := mount.At(path); err != nil || !info.Root || info.Device != number(t, d.device) {
		t.Errorf("there is %+v, %v", info, err)
	}
	table, err := mount.LoadTable()
	check.OK(t, err)
	if paths := table.Paths(number(t, d.device)); !slices.Equal(paths, []string{path}) {
		t.Errorf("mounted at %v", paths)
	}
	check.OK(t, mount.Unmount(path))
	if err := unix.Unmount(path, 0); !errors.Is(err, unix.EINVAL) {
		t.Errorf("it was said to be unmounted: %v", err)
	}
}

// TestBoundPipe: a pipe or a socket of a btrfs is bound somewhere, as a pod's subpath may be. Looking for mounts does not wait for it, and finds it.
func TestBoundPipe(t *testing.T) {
	d := newDisk(t, "btrfs")
	path, device := d.mounted(t, "btrfs"), number(t, d.device)
	for name, kind := range map[string]uint32{"pipe": unix.S_IFIFO, "socket": unix.S_IFSOCK} {
		source, bound := filepath.Join(path, name), filepath.Join(d.dir, name)
		check.OK(t, unix.Mknod(source, kind|0o600, 0))
		check.OK(t, os.WriteFile(bound, nil, 0o600))
		check.OK(t, unix.Mount(source, bound, "", unix.MS_BIND, ""))
		t.Cleanup(func() { _ = unix.Unmount(bound, unix.MNT_DETACH) })
		seen := make(chan []string, 1)
		go func() {
			table, err := mount.LoadTable()
			if err != nil {
				t.Error(err)
			}
			seen <- table.Paths(device)
		}()
		select {
		case paths := <-seen:
			if !slices.Contains(paths, bound) {
				t.Errorf("mounted at %v", paths)
			}
		case <-time.After(30 * time.Second):
			t.Errorf("%s: whoever looks waits for ever", name)
			w, err := os.OpenFile(source, os.O_RDWR, 0)
			check.OK(t, err)
			<-seen
			_ = w.Close()
		}
		drivertest.Unmount(t, bound)
	}
}

// TestLeasedFile: a file of a btrfs is bound somewhere, and a process has a lease on it (fcntl(2)), for which an open would wait. Looking for mounts does not
// wait, and finds it; At returns an error that is none of a dead mount.
func TestLeasedFile(t *testing.T) {
	d := newDisk(t, "btrfs")
	path, device := d.mounted(t, "btrfs"), number(t, d.device)
	bound := filepath.Join(d.dir, "bound")
	leased, err := os.Create(filepath.Join(path, "leased"))
	check.OK(t, err)
	defer leased.Close()
	check.OK(t, os.WriteFile(bound, nil, 0o600))
	check.OK(t, unix.Mount(leased.Name(), bound, "", unix.MS_BIND, ""))
	t.Cleanup(func() { drivertest.Unmount(t, bound) })
	_, err = unix.FcntlInt(leased.Fd(), unix.F_SETLEASE, unix.F_WRLCK)
	check.OK(t, err)
	began := time.Now()
	table, err := mount.LoadTable()
	check.OK(t, err)
	if paths := table.Paths(device); !slices.Contains(paths, bound) || !slices.Contains(paths, path) {
		t.Errorf("mounted at %v", paths)
	}
	if _, err := mount.At(bound); err == nil || mount.Corrupted(err) {
		t.Errorf("to look at it: %v", err)
	}
	if took := time.Since(began); took > 30*time.Second { // a lease is broken after 45 (lease-break-time)
		t.Errorf("whoever looks waits for %v", took)
	}
	check.OK(t, leased.Close())
}

// TestScannedAsAnother: the path by which a btrfs was scanned is that of another device now, with an ext4 or a btrfs. Both are found where they are mounted,
// and nowhere else, though one of the mounts cannot be asked for its device.
func TestScannedAsAnother(t *testing.T) {
	for _, kind := range []string{"ext4", "btrfs"} {
		d, other := newDisk(t, "btrfs"), newDisk(t, kind)
		path, node, bound := d.mounted(t, "btrfs"), filepath.Join(d.dir, "node"), filepath.Join(d.dir, "pipe")
		otherPath := other.mounted(t, kind)
		check.OK(t, errors.Join(unix.Mkfifo(filepath.Join(path, "pipe"), 0o600), os.WriteFile(bound, nil, 0o600)))
		check.OK(t, unix.Mount(filepath.Join(path, "pipe"), bound, "", unix.MS_BIND, "")) // it cannot be asked itself
		t.Cleanup(func() { drivertest.Unmount(t, bound) })
		check.OK(t, unix.Mknod(node, unix.S_IFBLK|0o600, int(number(t, d.device))))
		drivertest.Run(t, "btrfs", "device", "scan", node)
		check.OK(t, os.Remove(node))
		check.OK(t, unix.Mknod(node, unix.S_IFBLK|0o600, int(number(t, other.device))))
		table, err := mount.LoadTable()
		check.OK(t, err)
		if paths := table.Paths(number(t, d.device)); !slices.Equal(paths, []string{path, bound}) {
			t.Errorf("mounted at %v", paths)
		}
		if paths := table.Paths(number(t, other.device)); !slices.Equal(paths, []string{otherPath}) {
			t.Errorf("the other is mounted at %v", paths)
		}
		check.OK(t, os.Remove(node))
	}
}

// TestNodesOfPods: a pod may make nodes of any device in its volumes (mknod(2)) and have them bound as subpaths, and any user may give a FUSE the source that
// he likes. None of these counts as a mount of the device: that would keep a volume from being staged and unstaged.
func TestNodesOfPods(t *testing.T) {
	d := newDisk(t, "ext4")
	disk, memory, device := d.mounted(t, "ext4"), d.directory(t, "memory"), unix.Mkdev(7, 1<<19)
	check.OK(t, unix.Mount("none", memory, "tmpfs", 0, "size=1m"))
	t.Cleanup(func() { drivertest.Unmount(t, memory) })
	for i, made := range []string{filepath.Join(memory, "loop0"), filepath.Join(disk, "loop0.node"), filepath.Join(disk, "removed.node")} {
		bound := filepath.Join(d.dir, fmt.Sprint("subpath", i))
		check.OK(t, unix.Mknod(made, unix.S_IFBLK|0o600, int(device)))
		check.OK(t, os.WriteFile(bound, nil, 0o600))
		check.OK(t, unix.Mount(made, bound, "", unix.MS_BIND, ""))
		t.Cleanup(func() { drivertest.Unmount(t, bound) })
		if filepath.Base(made) == "removed.node" {
			check.OK(t, os.Remove(made))
		}
	}
	fuse, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err == nil {
		defer fuse.Close()
		named, user := d.directory(t, "fuse"), 1000 // so that root cannot look at it
		check.OK(t, unix.Mount(d.device, named, "fuse", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=%d,group_id=0", fuse.Fd(), user)))
		t.Cleanup(func() { check.OK(t, unix.Unmount(named, unix.MNT_DETACH)) })
	}
	table, err := mount.LoadTable()
	check.OK(t, err)
	if paths := table.Paths(device); len(paths) > 0 {
		t.Errorf("a device that nobody mounted is mounted at %v", paths)
	}
	if paths := table.Paths(number(t, d.device)); !slices.Contains(paths, disk) || slices.Contains(paths, filepath.Join(d.dir, "fuse")) {
		t.Errorf("the disk is mounted at %v, not just at %v", paths, disk)
	}
}

// TestNodesOfDrivers: a driver that starts finds the device nodes that an earlier one has bound: for a reader, and from the /dev of a container that is gone.
func TestNodesOfDrivers(t *testing.T) {
	d := newDisk(t, "ext4")
	device, dev := number(t, d.device), d.directory(t, "dev")
	reader, bound := filepath.Join(d.dir, "reader"), filepath.Join(d.dir, "bound")
	for _, path := range []string{reader, bound} {
		check.OK(t, os.WriteFile(path, nil, 0o600))
		t.Cleanup(func() { check.OK(t, mount.Unmount(path)) })
	}
	check.OK(t, mount.BindReader(device, reader))
	check.OK(t, unix.Mount("none", dev, "tmpfs", 0, "size=1m"))
	node := filepath.Join(dev, "loop0")
	err := errors.Join(unix.Mknod(node, unix.S_IFBLK|0o600, int(device)), mount.Bind(node, bound, false), unix.Unmount(dev, 0))
	check.OK(t, err)
	table, err := mount.LoadTable()
	check.OK(t, err)
	if paths := table.Paths(device); !slices.Equal(paths, []string{bound, reader}) {
		t.Errorf("the device is at %v", paths)
	}
}

// TestOddMounts: mounts may have any path, and any source or none. Each is found under its own path, and none keeps others from being found.
func TestOddMounts(t *testing.T) {
	d := newDisk(t, "ext4")
	path, device := d.mounted(t, "ext4"), number(t, d.device)
	want := []string{path}
	for _, name := range []string{"two words", "two\nlines", "tab\tbed", "no\u00a0break", "next\u0085line", `back\040slash`, "#hash", "bytes\xff"} {
		bound := d.directory(t, name)
		check.OK(t, mount.Bind(path, bound, false))
		t.Cleanup(func() { check.OK(t, mount.Unmount(bound)) })
		want = append(want, bound)
	}
	for i, source := range []string{"", " ", "- ext4 " + d.device, "\u0085"} {
		other := d.directory(t, fmt.Sprint("source", i))
		check.OK(t, unix.Mount(source, other, "tmpfs", 0, "size=1m"))
		t.Cleanup(func() { drivertest.Unmount(t, other) })
	}
	table, err := mount.LoadTable()
	check.OK(t, err)
	slices.Sort(want)
	if paths := table.Paths(device); !slices.Equal(paths, want) {
		t.Errorf("mounted at %q, want %q", paths, want)
	}
	for _, path := range want {
		if have, err := mount.DeviceOf(path); have != device || err != nil {
			t.Errorf("at %q is device %d: %v", path, have, err)
		}
	}
}

// TestPathsBesideMounts: a mount that is made while others ask the table for the paths of its device stays in the table.
func TestPathsBesideMounts(t *testing.T) {
	d := newDisk(t, "ext4")
	source, path, device := d.mounted(t, "ext4"), d.directory(t, "bound"), number(t, d.device)
	table, err := mount.LoadTable()
	check.OK(t, err)
	ctx, stop := context.WithTimeout(t.Context(), 5*time.Second)
	defer stop()
	var looking sync.WaitGroup
	defer looking.Wait()
	for range 16 {
		looking.Go(func() {
			for ctx.Err() == nil {
				table.Paths(device)
			}
		})
	}
	for ctx.Err() == nil {
		check.OK(t, mount.Bind(source, path, false))
		table.Add(device, path, true)
		time.Sleep(time.Millisecond)
		if !table.Writable(device, path) {
			stop()
			t.Error("the mount was forgotten")
		}
		for unix.Unmount(path, 0) != nil {
			runtime.Gosched() // a look at the mount keeps it busy for a moment
		}
		table.Remove(device, path)
	}
}

// TestPathOfAnother: where a device was mounted before, there is now another filesystem, which is dead or that root may not look at. The device does not count
// as mounted there.
func TestPathOfAnother(t *testing.T) {
	d := newDisk(t, "ext4")
	path, device := d.directory(t, "mounted"), number(t, d.device)
	for name, user := range map[string]int{"a user's": 1000, "dead": 0} {
		fuse, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
		if errors.Is(err, fs.ErrNotExist) {
			t.Skip("no FUSE here")
		}
		check.OK(t, err)
		check.OK(t, mount.Filesystem(d.device, path, "ext4", nil, false))
		table, err := mount.LoadTable()
		check.OK(t, err)
		check.OK(t, mount.Unmount(path))
		check.OK(t, unix.Mount("none", path, "fuse", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=%d,group_id=0", fuse.Fd(), user)))
		if user == 0 {
			check.OK(t, fuse.Close())
		}
		if _, err := mount.At(path); err == nil {
			t.Errorf("%s: root can look at it", name)
		}
		if paths := table.Paths(device); len(paths) > 0 {
			t.Errorf("%s: still mounted at %v", name, paths)
		}
		check.OK(t, unix.Unmount(path, unix.MNT_DETACH))
		_ = fuse.Close()
	}
}

// TestPathThatHangs: over a mount of a device there is a filesystem that does not answer (a FUSE without its server). At returns ErrUnavailable, the first time
// after a wait; the path is not among those of the device, and programs can be started. Once the filesystem is gone, the mount below is found again.
func TestPathThatHangs(t *testing.T) {
	d := newDisk(t, "ext4")
	path, bound, device := d.mounted(t, "ext4"), d.directory(t, "bound"), number(t, d.device)
	fuse, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		t.Skip("no FUSE here")
	}
	check.OK(t, err)
	check.OK(t, mount.Bind(path, bound, false))
	table, err := mount.LoadTable()
	check.OK(t, err)
	check.OK(t, unix.Mount("none", bound, "fuse", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", fuse.Fd())))
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for range 3 { // only the first one waits
			if _, err := mount.At(bound); !errors.Is(err, errdefs.ErrUnavailable) {
				t.Errorf("it answers: %v", err)
			}
		}
		if paths := table.Paths(device); !slices.Equal(paths, []string{path}) {
			t.Errorf("mounted at %v", paths)
		}
		if err := exec.Command("true").Run(); err != nil {
			t.Error(err)
		}
	}()
	select {
	case <-ended:
	case <-time.After(30 * time.Second):
		t.Error("whoever looks waits for ever")
	}
	check.OK(t, fuse.Close()) // now it is dead
	<-ended
	check.OK(t, unix.Unmount(bound, unix.MNT_DETACH))
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) { // the call that hung may end a moment later
		info, err := mount.At(bound)
		if err == nil && info.Device == device {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("there is %+v, %v", info, err)
		}
	}
	check.OK(t, mount.Unmount(bound))
}

func TestBind(t *testing.T) {
	d := newDisk(t, "ext4")
	path := d.mounted(t, "ext4")
	writable, readOnly := d.directory(t, "rw"), d.directory(t, "ro")
	check.OK(t, mount.Bind(path, writable, false))
	check.OK(t, mount.Bind(path, readOnly, true))
	check.OK(t, os.WriteFile(filepath.Join(writable, "file"), []byte("text"), 0o600))
	if text, err := os.ReadFile(filepath.Join(readOnly, "file")); string(text) != "text" {
		t.Errorf("the read-only bind shows %q: %v", text, err)
	}
	if err := os.WriteFile(filepath.Join(readOnly, "file"), nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("a write to the read-only bind: %v", err)
	}
	check.OK(t, os.WriteFile(filepath.Join(path, "file"), []byte("still writable"), 0o600))
	for _, c := range []struct {
		path     string
		readOnly bool
	}{{path, false}, {writable, false}, {readOnly, true}} {
		info, err := mount.At(c.path)
		if err != nil || !info.Root || !info.Directory || info.Node || info.ReadOnly != c.readOnly || info.Device != number(t, d.device) || info.Statfs.Type != unix.EXT4_SUPER_MAGIC {
			t.Errorf("at %s is %+v: %v", c.path, info, err)
		}
	}
	check.OK(t, mount.Unmount(writable))
	check.OK(t, mount.Unmount(readOnly))

	// A device node.
	node := filepath.Join(d.dir, "node")
	check.OK(t, os.WriteFile(node, nil, 0o600))
	check.OK(t, mount.Bind(d.device, node, false))
	if info, err := mount.At(node); err != nil || !info.Root || !info.Node || info.Directory || info.Device != number(t, d.device) {
		t.Errorf("at the node is %+v: %v", info, err)
	}
	check.OK(t, mount.Unmount(node))

	// A bind within one filesystem is a mount, too, though the device numbers on both sides are the same.
	inside, outside := filepath.Join(path, "a"), filepath.Join(path, "b")
	check.OK(t, os.Mkdir(inside, 0o700))
	check.OK(t, os.Mkdir(outside, 0o700))
	check.OK(t, mount.Bind(inside, outside, false))
	for at, root := range map[string]bool{inside: false, outside: true} {
		if info, err := mount.At(at); err != nil || info.Root != root {
			t.Errorf("at %s is %+v: %v", at, info, err)
		}
		if seen, err := mountutils.New("").IsMountPoint(at); err != nil || seen != root {
			t.Errorf("the kubelet takes %s for a mount: %v, %v", at, seen, err)
		}
	}
	check.OK(t, mount.Unmount(outside))

	// A link at the end of either path is not followed.
	link := filepath.Join(d.dir, "link")
	check.OK(t, os.Symlink(writable, link))
	if err := mount.Bind(path, link, false); err == nil {
		t.Error("something is mounted on a link")
	}
	if info, err := mount.At(writable); err != nil || info.Root {
		t.Errorf("where the link leads is %+v: %v", info, err)
	}
	if info, err := mount.At(link); err != nil || info.Root || info.Directory || info.Node {
		t.Errorf("at the link is %+v: %v", info, err)
	}
	if err := mount.Bind(d.dir+"/nothing", writable, false); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("nothing is bound: %v", err)
	}
}

func TestAt(t *testing.T) {
	for _, fstype := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fstype, func(t *testing.T) {
			d := newDisk(t, fstype)
			path := d.mounted(t, fstype)
			if info, err := mount.At(path); err != nil || info.Device != number(t, d.device) {
				t.Errorf("at the mount is %+v, want device %d: %v", info, number(t, d.device), err)
			}
			file := filepath.Join(path, "file")
			check.OK(t, os.WriteFile(file, nil, 0o600))
			if info, err := mount.At(file); err != nil || info.Root || info.Directory || info.Node {
				t.Errorf("at a file is %+v: %v", info, err)
			}
			for _, nothing := range []string{path + "/nothing", file + "/nothing"} {
				if _, err := mount.At(nothing); !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTDIR) || mount.Corrupted(err) {
					t.Errorf("at %s: %v", nothing, err)
				}
			}
		})
	}
}

func TestUnmount(t *testing.T) {
	d := newDisk(t, "ext4")
	path := d.directory(t, "stack")
	for range 2 {
		check.OK(t, mount.Unmount(path)) // nothing there
	}
	check.OK(t, mount.Unmount(d.dir+"/nothing"))
	check.OK(t, mount.Unmount(d.image+"/nothing"))
	for range 3 {
		check.OK(t, mount.Filesystem(d.device, path, "ext4", nil, false))
	}
	link := filepath.Join(d.dir, "link")
	check.OK(t, os.Symlink(path, link))
	check.OK(t, mount.Unmount(link))
	if info, err := mount.At(path); err != nil || !info.Root {
		t.Errorf("unmounting a link left %+v: %v", info, err)
	}
	f, err := os.Create(filepath.Join(path, "open"))
	check.OK(t, err)
	if err := mount.Unmount(path); !errors.Is(err, errdefs.ErrInUse) {
		t.Errorf("with an open file: %v", err)
	}
	f.Close()
	within := filepath.Join(path, "within")
	check.OK(t, os.Mkdir(within, 0o700))
	check.OK(t, unix.Mount("none", within, "tmpfs", 0, "size=1m")) // as a pod can that has what it mounts seen outside
	if err := mount.Unmount(path); !errors.Is(err, errdefs.ErrInUse) || !strings.Contains(err.Error(), within+" is mounted in it") {
		t.Errorf("with a mount in it: %v", err)
	}
	check.OK(t, unix.Unmount(within, 0))
	check.OK(t, mount.Unmount(path))
	if left := drivertest.Leftovers(path); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

func TestCorrupted(t *testing.T) {
	d := newDisk(t, "xfs")
	path := d.directory(t, "mounted")
	check.OK(t, mount.Filesystem(d.device, path, "xfs", nil, false))
	table, err := mount.LoadTable()
	check.OK(t, err)
	shutDown(t, path)
	if _, err := mount.At(path); !mount.Corrupted(err) {
		t.Errorf("at a dead filesystem: %v", err)
	}
	if paths := table.Paths(number(t, d.device)); !slices.Equal(paths, []string{path}) {
		t.Errorf("the dead mount is at %v", paths)
	}
	check.OK(t, mount.RemoveTarget(path))
	if paths := table.Paths(number(t, d.device)); len(paths) > 0 {
		t.Errorf("unmounted, it is at %v", paths)
	}
	for _, err := range []error{nil, fs.ErrNotExist, unix.ENOTDIR, errors.New("x")} {
		if mount.Corrupted(err) {
			t.Errorf("%v is said to be a dead mount", err)
		}
	}
}

// shutDown: XFS_IOC_GOINGDOWN.
func shutDown(t testing.TB, path string) {
	t.Helper()
	f, err := os.Open(path)
	check.OK(t, err)
	defer f.Close()
	check.OK(t, unix.IoctlSetPointerInt(int(f.Fd()), 0x8004587d, 1))
}

func TestMakeTarget(t *testing.T) {
	dir := t.TempDir()
	directory, file, link, full := dir+"/directory", dir+"/file", dir+"/link", dir+"/full"
	for range 2 {
		check.OK(t, os.MkdirAll(directory, 0o700))
	}
	check.OK(t, os.WriteFile(file, nil, 0o600))
	check.OK(t, os.WriteFile(full, []byte("text"), 0o600))
	check.OK(t, os.Symlink(directory, link))
	for _, c := range []struct {
		path string
		node bool
		made bool
		err  error
	}{
		{dir + "/new", false, true, nil}, {dir + "/new", false, false, nil},
		{dir + "/newfile", true, true, nil}, {dir + "/newfile", true, false, nil},
		{directory, false, false, nil}, {file, true, false, nil}, {full, true, false, nil},
		{directory, true, false, errdefs.ErrPrecondition}, {file, false, false, errdefs.ErrPrecondition},
		{link, false, false, errdefs.ErrPrecondition}, {link, true, false, errdefs.ErrPrecondition},
		{dir + "/no/new", false, false, errdefs.ErrPrecondition}, {dir + "/no/new", true, false, errdefs.ErrPrecondition},
		{file + "/new", false, false, errdefs.ErrPrecondition},
	} {
		made, err := mount.MakeTarget(c.path, c.node)
		if made != c.made || !errors.Is(err, c.err) {
			t.Errorf("%s, node %v: made %v, %v", c.path, c.node, made, err)
		}
	}
	if text, err := os.ReadFile(full); string(text) != "text" {
		t.Errorf("the file has %q now: %v", text, err)
	}
}

// TestRemoveTarget: what is mounted is unmounted, and an empty directory or file removed. Anything else stays, as it may be somebody's data.
func TestRemoveTarget(t *testing.T) {
	d := newDisk(t, "ext4")
	for name, c := range map[string]struct {
		make func(path string) error
		gone bool
	}{
		"nothing":                {func(string) error { return nil }, true},
		"an empty directory":     {func(path string) error { return os.Mkdir(path, 0o700) }, true},
		"an empty file":          {func(path string) error { return os.WriteFile(path, nil, 0o600) }, true},
		"a directory with files": {func(path string) error { return os.MkdirAll(path+"/precious", 0o700) }, false},
		"a file with text":       {func(path string) error { return os.WriteFile(path, []byte("precious"), 0o600) }, false},
		"a link":                 {func(path string) error { return os.Symlink(d.image, path) }, false},
		"a link to nothing":      {func(path string) error { return os.Symlink("nothing", path) }, false},
		"a pipe":                 {func(path string) error { return unix.Mkfifo(path, 0o600) }, false},
		"a mount": {func(path string) error {
			return errors.Join(os.Mkdir(path, 0o700), mount.Filesystem(d.device, path, "ext4", nil, false), os.WriteFile(path+"/data", []byte("data"), 0o600))
		}, true},
		"a mount over files": {func(path string) error {
			return errors.Join(os.MkdirAll(path+"/precious", 0o700), mount.Filesystem(d.device, path, "ext4", nil, false))
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(d.dir, strings.ReplaceAll(name, " ", "-"))
			check.OK(t, c.make(path))
			for range 2 {
				if err := mount.RemoveTarget(path); c.gone != (err == nil) || (err != nil && !errors.Is(err, errdefs.ErrPrecondition)) {
					t.Errorf("got %v", err)
				}
			}
			if _, err := os.Lstat(path); c.gone != errors.Is(err, fs.ErrNotExist) {
				t.Errorf("afterwards: %v", err)
			}
			if info, err := mount.At(path); err == nil && info.Root {
				t.Error("the mount is still there")
			}
		})
	}
	// The files in the filesystem are still there.
	path := d.mounted(t, "ext4")
	if text, err := os.ReadFile(path + "/data"); string(text) != "data" {
		t.Errorf("the volume has %q: %v", text, err)
	}
}

func TestCleanPath(t *testing.T) {
	for path, good := range map[string]bool{
		"/a": true, "/a/b": true, "/a b/ü": true, "/a/..b": true, "": false, "/": false, "a": false, "./a": false, "/a/": false, "/a/../b": false, "/a/..": false,
		"//a": false, "/a//b": false, "/a/./b": false, "/a\x00b": false,
	} {
		if err := mount.CleanPath(path); (err == nil) != good || (!good && !errors.Is(err, errdefs.ErrInvalid)) {
			t.Errorf("%q: %v", path, err)
		}
	}
}

func TestTable(t *testing.T) {
	for _, fstype := range []string{"ext4", "btrfs"} {
		t.Run(fstype, func(t *testing.T) {
			d := newDisk(t, fstype)
			device := number(t, d.device)
			path := d.mounted(t, fstype)
			readOnly, node := d.directory(t, "ro directory"), filepath.Join(d.dir, "node")
			check.OK(t, mount.Bind(path, readOnly, true))
			check.OK(t, os.WriteFile(node, nil, 0o600))
			check.OK(t, mount.Bind(d.device, node, false))
			// A table that was told of the mounts returns the same as one that found them.
			noted, err := mount.LoadTable()
			check.OK(t, err)
			loaded, err := mount.LoadTable()
			check.OK(t, err)
			noted.Add(device, path, true)
			noted.Add(device, readOnly, false)
			noted.Add(device, node, true)
			noted.Add(device, filepath.Join(d.dir, "nowhere"), true)
			want := []string{path, node, readOnly}
			slices.Sort(want)
			for _, table := range []*mount.Table{noted, loaded} {
				if have := table.Paths(device); !slices.Equal(have, want) {
					t.Errorf("mounted at %v, want %v", have, want)
				}
				if !table.Writable(device, path) || table.Writable(device, readOnly) || table.Writable(device, d.dir) {
					t.Error("what is writable is wrong")
				}
			}
			check.OK(t, mount.Unmount(readOnly))
			noted.Remove(device, node)
			if have := noted.Paths(device); !slices.Equal(have, []string{path}) {
				t.Errorf("after an unmount and a remove: %v", have)
			}
			check.OK(t, mount.Unmount(node))
			if have := loaded.Paths(device); !slices.Equal(have, []string{path}) {
				t.Errorf("after two unmounts: %v", have)
			}
			noted.Remove(device, path)
			noted.Remove(device, path)
			if have := noted.Paths(device); len(have) != 0 {
				t.Errorf("after all are removed: %v", have)
			}
		})
	}
}

// TestTableWithoutFiles: while the process has no file descriptors left, a mount that so cannot be looked at stays in the table.
func TestTableWithoutFiles(t *testing.T) {
	d := newDisk(t, "ext4")
	path := d.mounted(t, "ext4")
	table, err := mount.LoadTable()
	check.OK(t, err)
	device := number(t, d.device)
	var limit unix.Rlimit
	check.OK(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	check.OK(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Max: limit.Max}))
	starved, mounts := table.Paths(device), table.Mounts(device)
	check.OK(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit))
	if len(mounts) != 1 || !mount.Starved(mounts[0].Err) {
		t.Errorf("without file descriptors: %+v", mounts)
	}
	if after := table.Paths(device); !slices.Equal(starved, []string{path}) || !slices.Equal(after, starved) {
		t.Errorf("%v, then %v", starved, after)
	}
}

// TestMountsBesideRemount: a path is mounted in turns for reading and for writing while others ask the table. Each answer is of one mount, and they do not keep
// the path from being unmounted.
func TestMountsBesideRemount(t *testing.T) {
	d := newDisk(t, "ext4")
	device := number(t, d.device)
	source, target := d.mounted(t, "ext4"), filepath.Join(d.dir, "target")
	table, err := mount.LoadTable()
	check.OK(t, err)
	table.Remove(device, source)
	ctx, stop := context.WithCancel(t.Context())
	var looking sync.WaitGroup
	for range 8 { // enough that at any time one of them is looking
		looking.Go(func() {
			for ctx.Err() == nil {
				for _, m := range table.Mounts(device) {
					if m.Err != nil || m.Writable == m.Info.ReadOnly {
						t.Errorf("writable %t, read-only %t, error %v", m.Writable, m.Info.ReadOnly, m.Err)
						return
					}
				}
			}
		})
	}
	for i := range 100 {
		check.OK(t, os.Mkdir(target, 0o700))
		readOnly := i%2 == 0
		check.OK(t, mount.Bind(source, target, readOnly))
		table.Add(device, target, !readOnly)
		check.OK(t, mount.Unmount(target))
		table.Remove(device, target)
		check.OK(t, os.Remove(target))
	}
	stop()
	looking.Wait()
}

// TestTableManyAtOnce: many goroutines use a table at once; it is for the race detector.
func TestTableManyAtOnce(t *testing.T) {
	table, err := mount.LoadTable()
	check.OK(t, err)
	done := make(chan struct{})
	for i := range 8 {
		go func() {
			for j := range 200 {
				path := fmt.Sprintf("/nowhere/%d/%d", i, j)
				table.Add(uint64(j), path, true)
				_ = table.Writable(uint64(j), path)
				_ = table.Paths(uint64(j))
				table.Remove(uint64(j), path)
			}
			done <- struct{}{}
		}()
	}
	for range 8 {
		<-done
	}
	for j := range 200 {
		if paths := table.Paths(uint64(j)); slices.ContainsFunc(paths, func(p string) bool { return strings.HasPrefix(p, "/nowhere") }) {
			t.Errorf("device %d is at %v", j, paths)
		}
	}
}
