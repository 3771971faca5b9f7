// Package demo implements "driver demo".
package demo

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/machine"
	"github.com/ashlar-csi/ashlar/internal/process"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/rpc"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// demoNode is the name of the demo's node.
const demoNode = "demo"

// Run takes volumes through their lives in a new directory below parent, and prints each step. It returns an error unless every step did what it should and
// nothing of it is left on the machine. It needs root.
func Run(ctx context.Context, parent, version string) error {
	if os.Geteuid() != 0 {
		return errors.New("the demo attaches and mounts devices, so it needs root")
	}
	parent, err := filepath.Abs(parent)
	if err == nil {
		parent, err = filepath.EvalSymlinks(parent) // as the kernel shows it in mounts
	}
	if err != nil {
		return fmt.Errorf("--dir: %w", err)
	}
	dir, err := os.MkdirTemp(parent, "ashlar-demo-")
	if err != nil {
		return fmt.Errorf("--dir: %w", err)
	}
	d := &demonstration{ctx: ctx, dir: dir, version: version, start: time.Now()}
	d.printer = newPrinter(os.Stdout)
	d.run()
	return d.end()
}

// demonstration is a run of the demo. After a step that fails no further ones are taken.
type demonstration struct {
	ctx     context.Context
	dir     string
	version string
	*co.Client
	*printer
	driver *process.Driver // nil until it is started

	start   time.Time
	steps   int
	calls   int
	failed  error
	volumes int // volumes created so far
	cuts    int // snapshots made so far
	slowest struct {
		what string
		took time.Duration
	}
}

// step takes a step, and prints it with its time and with what the kernel shows of some volumes afterwards. It fails if that is not as it should be. do may
// return a remark.
func (d *demonstration) step(what string, do func(ctx context.Context) (remark string, err error), show ...*demoVolume) {
	if d.failed != nil {
		return
	}
	d.steps++
	began := time.Now()
	err := d.ctx.Err()
	var remark string
	if err == nil {
		remark, err = do(d.ctx)
	}
	took := time.Since(began)
	if took > d.slowest.took {
		d.slowest.what, d.slowest.took = what, took
	}
	var seen []string
	for _, v := range show {
		shown, wrong := v.shown()
		if err == nil {
			err = wrong
		}
		seen = append(seen, shown)
	}
	d.printStep(d.steps, what, took, seen, remark, err)
	if err != nil {
		if d.ctx.Err() != nil {
			err = errors.New("interrupted")
		}
		d.failed = fmt.Errorf("step %d, %s: %w", d.steps, what, err)
	}
}

func (d *demonstration) socket() string { return filepath.Join(d.dir, "csi.sock") }

// heading begins a part of the demo.
func (d *demonstration) heading(text string) {
	if d.failed == nil {
		d.printer.heading(text)
	}
}

// callTime is how long one call may take.
const callTime = time.Minute

// connection is a connection to the driver. It counts calls, gives each callTime, and names the method in its errors.
type connection struct {
	grpc.ClientConnInterface
	d *demonstration
}

// Invoke makes a call.
func (c connection) Invoke(ctx context.Context, method string, request, response any, options ...grpc.CallOption) error {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	c.d.calls++
	err := c.ClientConnInterface.Invoke(ctx, method, request, response, options...)
	if err == nil {
		return nil
	}
	wait := time.Duration(0)
	if status.Code(err) == codes.Unavailable {
		wait = time.Second // the connection may break before the end of the process is seen
	}
	select {
	case <-c.d.driver.Ended():
		return fmt.Errorf("%s: the driver ended before it answered: %s", path.Base(method), c.d.driver.Wait())
	case <-time.After(wait):
		return &callError{path.Base(method), err}
	}
}

// callError is an error that the driver answered a call with.
type callError struct {
	method string
	err    error
}

func (e *callError) Error() string {
	s := status.Convert(e.err)
	return fmt.Sprintf("%s: %s: %s", e.method, s.Code(), s.Message())
}

func (e *callError) Unwrap() error { return e.err }

// run runs the demo, from the start of the driver to its end.
func (d *demonstration) run() {
	if _, err := rpc.ParseEndpoint(d.socket()); err != nil {
		d.failed = fmt.Errorf("--dir: %w", err)
		return
	}
	if d.failed = adopt(); d.failed != nil {
		return
	}
	on := "?"
	if m, err := machine.MountOf(d.dir); err == nil {
		on = m.FsType
	}
	how := "snapshots and clones are copies that keep holes"
	if shared, err := machine.Reflinks(d.dir); err == nil && shared {
		how = "snapshots and clones share blocks (reflinks)"
	}
	d.printf("Ashlar %s on Linux %s. Paths are below %s, a directory on %s: %s.\n\n", d.version, machine.KernelRelease(), d.dir, on, how)
	d.printColumns()
	d.heading("the driver")
	d.step("driver serve", d.serve)
	d.story()
	d.heading("what is left")
	d.step("SIGTERM to the driver", func(context.Context) (string, error) {
		if err := d.driver.Stop(); err != nil {
			return "", err
		}
		if _, err := os.Lstat(d.socket()); !errors.Is(err, fs.ErrNotExist) {
			return "", errors.New("the driver left its socket behind")
		}
		return "it ended with status 0 and took its socket along", nil
	})
	d.step("look for what is left", func(context.Context) (string, error) { return d.nothingLeft() })
}

// serve starts the driver with an empty pool.
func (d *demonstration) serve(ctx context.Context) (string, error) {
	pool := url.URL{Scheme: "file", Path: filepath.Join(d.dir, "pool"), RawQuery: "create=1&reservePercent=0"}
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	driver, err := process.New(d.dir, demoNode, self, "serve", "--pool=default="+pool.String(), "-v=4")
	if err != nil {
		return "", err
	}
	if err := driver.Start(); err != nil {
		return "", err
	}
	d.driver, d.Client = driver, co.New(connection{driver.Conn, d}, demoNode, d.dir)
	if err := driver.Ready(ctx); err != nil {
		return "", err
	}
	d.calls++ // Probe
	return fmt.Sprintf("process %d serves csi.sock; Probe says ready", driver.Pid()), nil
}

// goneTime is how long a loop device may stay after its last user: programs that look at all devices of the machine keep each of them open for a moment.
const goneTime = 30 * time.Second

// leftovers returns what is mounted and attached below the demo's directory, after goneTime at most.
func (d *demonstration) leftovers() (mounts []string, loops []machine.LoopDevice, err error) {
	for deadline := time.Now().Add(goneTime); ; time.Sleep(20 * time.Millisecond) {
		mounts, loops, err = machine.Leftovers(d.dir)
		if len(mounts)+len(loops) == 0 || err != nil || time.Now().After(deadline) {
			return mounts, loops, err
		}
	}
}

// nothingLeft returns an error if anything is left; else it removes the directory.
func (d *demonstration) nothingLeft() (string, error) {
	mounts, loops, err := d.leftovers()
	if err != nil {
		return "", err
	}
	var left []string
	for _, path := range mounts {
		left = append(left, "mount "+path)
	}
	for _, loop := range loops {
		left = append(left, "loop device "+loop.Path())
	}
	// The files of the pool itself, and the log of the driver.
	own := []string{filepath.Join(d.dir, "pool", "lock"), filepath.Join(d.dir, "pool", "pool"), filepath.Join(d.dir, "log")}
	err = filepath.WalkDir(d.dir, func(path string, entry fs.DirEntry, err error) error {
		if err == nil && !entry.IsDir() && !slices.Contains(own, path) {
			left = append(left, "file "+path)
		}
		return err
	})
	if err != nil {
		return "", err
	}
	if orphaned() {
		left = append(left, "a process that the driver started")
	}
	if len(left) > 0 {
		return "", fmt.Errorf("left behind: %s", strings.Join(left, ", "))
	}
	return "no mount, no loop device, no image or record in the pool, no process", os.RemoveAll(d.dir)
}

// end prints the result. After a failure it cleans up, as far as possible.
func (d *demonstration) end() error {
	took := time.Since(d.start).Round(10 * time.Millisecond)
	if d.failed == nil {
		d.printf("\nAll %d steps went as they should, in %s: %d calls, %d volumes, %d snapshots. The slowest: %s, %d ms.\n",
			d.steps, took, d.calls, d.volumes, d.cuts, d.slowest.what, d.slowest.took.Milliseconds())
		return nil
	}
	if d.driver != nil {
		d.printf("\nThe driver's last log lines:\n")
		lines := strings.Split(strings.TrimSpace(d.driver.Log()), "\n")
		for _, line := range lines[max(0, len(lines)-20):] {
			d.printf("  %s\n", line)
		}
	}
	if left := d.cleanUp(); left != nil {
		d.printf("\nThis could not be cleaned up: %v\n", left)
	} else {
		d.printf("\nCleaned up: driver stopped, nothing mounted or attached, %s removed.\n", d.dir)
	}
	return fmt.Errorf("the demo failed after %s at %w", took, d.failed)
}

// cleanUp removes by force what is left, without the driver. It returns what cannot be removed.
func (d *demonstration) cleanUp() error {
	var failures []error
	// A filesystem that is still frozen would block all its users, and the driver.
	mounts, _, err := machine.Leftovers(d.dir)
	failures = append(failures, err)
	for _, path := range mounts {
		if info, err := os.Stat(path); err == nil && info.IsDir() {
			_ = filesystem.Thaw(path)
		}
	}
	if d.driver != nil {
		_ = d.driver.Stop() // this kills it if it does not end
	}
	// Again: now the driver cannot add any.
	mounts, loops, err := machine.Leftovers(d.dir)
	failures = append(failures, err)
	slices.SortFunc(mounts, func(a, b string) int { return cmp.Compare(len(b), len(a)) }) // the deepest first
	for _, path := range mounts {
		if err := unix.Unmount(path, unix.UMOUNT_NOFOLLOW); errors.Is(err, unix.EBUSY) {
			err = unix.Unmount(path, unix.UMOUNT_NOFOLLOW|unix.MNT_DETACH)
			failures = append(failures, err)
		}
	}
	for _, loop := range loops {
		if f, err := os.Open(loop.Path()); err == nil {
			_ = unix.IoctlSetInt(int(f.Fd()), unix.LOOP_CLR_FD, 0) // it may have gone with its mount
			f.Close()
		}
	}
	mounts, loops, err = d.leftovers()
	failures = append(failures, err)
	for _, loop := range loops {
		failures = append(failures, fmt.Errorf("%s is still attached; losetup -d %s", loop.Path(), loop.Path()))
	}
	if len(mounts) > 0 {
		// RemoveAll would remove what is in the mounts.
		return errors.Join(append(failures, fmt.Errorf("still mounted: %s; unmount, then remove %s", strings.Join(mounts, ", "), d.dir))...)
	}
	return errors.Join(append(failures, os.RemoveAll(d.dir))...)
}

// demoVolume is a volume or snapshot of the demo, with what the kernel should show of it.
type demoVolume struct {
	*co.Volume
	d    *demonstration
	kind blockdev.Kind
	fs   filesystem.Type // empty for raw block

	size int64 // bytes; 0 while it does not exist
	// at is where it is mounted, or its device is bound: by path, whether read-only.
	at map[string]bool
	// fsSize is the least size of its filesystem, in bytes.
	fsSize int64
}

func (d *demonstration) volume(name string, fs filesystem.Type) *demoVolume {
	return &demoVolume{Volume: d.Volume("", name, co.Capability(cmp.Or(string(fs), co.Block), co.MultiWriter)), d: d, kind: blockdev.Volume, fs: fs, at: map[string]bool{}}
}

func (d *demonstration) snapshot(name string) *demoVolume {
	return &demoVolume{Volume: d.Volume("", name, nil), d: d, kind: blockdev.Snapshot}
}

// image returns the file in the pool that has its bytes.
func (v *demoVolume) image() string {
	dir := map[blockdev.Kind]string{blockdev.Volume: "volumes", blockdev.Snapshot: "snapshots"}[v.kind]
	return filepath.Join(v.d.dir, "pool", dir, volume.KeyOf(v.Name)+".img")
}

// shown returns what the kernel shows of the volume, and an error if that does not fit the calls so far.
func (v *demoVolume) shown() (string, error) {
	found, err := machine.LoopDevices(v.image(), v.d.dir)
	if err != nil {
		return "", err
	}
	devices := found[v.image()]
	var image unix.Stat_t
	err = unix.Stat(v.image(), &image)
	switch {
	case errors.Is(err, unix.ENOENT) && v.size != 0:
		return "no image", v.wrong("no image")
	case errors.Is(err, unix.ENOENT) && len(devices) == 0:
		return "no image, no device, no mount", nil
	case err != nil:
		return "", err
	case v.size == 0:
		return "image " + v.relative(v.image()), v.wrong("an image that should be gone")
	case image.Size != v.size:
		err = v.wrong("an image of %d bytes, not %d", image.Size, v.size)
	}
	if len(devices) == 0 {
		if len(v.at) > 0 {
			err = v.wrong("no device")
		}
		short := strings.Replace(v.relative(v.image()), v.image()[strings.LastIndexByte(v.image(), '/')+9:], "..", 1)
		return fmt.Sprintf(columns, "no device", machine.Size(image.Size), "", "image", machine.Size(image.Blocks*512)+" taken", short), err
	}
	var lines []string
	seen := map[string]bool{}
	for _, device := range devices {
		line, wrong := v.device(device, seen)
		lines, err = append(lines, line), cmp.Or(wrong, err)
	}
	for path := range v.at {
		if !seen[path] {
			err = v.wrong("nothing at %s", v.relative(path))
		}
	}
	return strings.Join(lines, "\n"), err
}

// device returns what the kernel shows of a device of the volume, and an error if that is wrong. It adds the paths of its mounts to seen.
func (v *demoVolume) device(device machine.LoopDevice, seen map[string]bool) (_ string, err error) {
	if device.Size != v.size {
		err = v.wrong("%s of %d bytes, not %d", device.Path(), device.Size, v.size)
	}
	fsType, usage := "", ""
	var paths []string
	for _, at := range device.Mounts {
		path := at.Path
		if v.Staging != "" && machine.Within(path, v.Staging) {
			path = v.Staging // for a block volume the driver chooses a path below
		}
		fsType = at.Fs
		if at.Fs != co.Block {
			usage = fmt.Sprintf("%s of %s", machine.Size(at.Used), machine.Size(at.Size))
		}
		if readOnly, expected := v.at[path]; !expected || (readOnly != at.ReadOnly && path != v.Staging) {
			err = v.wrong("it at %s, %s", v.relative(at.Path), mode(at.ReadOnly))
		} else if v.fs != "" && (at.Fs != string(v.fs) || at.Size < v.fsSize) {
			err = v.wrong("%s of %d bytes at %s", at.Fs, at.Size, v.relative(at.Path))
		}
		seen[path] = true
		paths = append(paths, v.relative(path)+" "+mode(at.ReadOnly))
	}
	return fmt.Sprintf(columns, device.Path(), machine.Size(device.Size), mode(device.ReadOnly), fsType, usage, strings.Join(paths, ", ")), err
}

// relative returns a path as it is printed.
func (v *demoVolume) relative(path string) string { return strings.TrimPrefix(path, v.d.dir+"/") }

func (v *demoVolume) wrong(format string, args ...any) error {
	return fmt.Errorf("the kernel shows of %s: %s", v.Name, fmt.Sprintf(format, args...))
}

func mode(readOnly bool) string {
	if readOnly {
		return "ro"
	}
	return "rw"
}
