// Package demo is "driver demo".
package demo

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/machine"
	"github.com/ashlar-csi/ashlar/internal/process"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/rpc"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// demoNode is the name of the node that the demo's driver serves.
const demoNode = "demo"

// Run takes volumes through their lives in a new folder below parent, and prints each step. An error unless every step did
// what it should and nothing of it is left on the machine. It needs root.
func Run(ctx context.Context, parent, version string) error {
	if os.Geteuid() != 0 {
		return errors.New("the demo attaches and mounts devices, so it needs root")
	}
	parent, err := filepath.Abs(parent)
	if err == nil {
		parent, err = filepath.EvalSymlinks(parent) // as the kernel will name it
	}
	if err != nil {
		return fmt.Errorf("--dir: %w", err)
	}
	dir, err := os.MkdirTemp(parent, "ashlar-demo-")
	if err != nil {
		return fmt.Errorf("--dir: %w", err)
	}
	// All in one thread, for the driver ends with the thread that started it.
	runtime.LockOSThread()
	d := &demonstration{ctx: ctx, dir: dir, version: version, start: time.Now()}
	d.printer = newPrinter(os.Stdout)
	d.run()
	return d.end()
}

// demonstration is a run of the demo. Its steps stop being taken after one that failed.
type demonstration struct {
	ctx     context.Context
	dir     string
	version string
	*process.Driver
	*printer

	start   time.Time
	steps   int
	failed  error
	volumes int // created so far
	cuts    int // snapshots cut so far
	slowest struct {
		what string
		took time.Duration
	}
}

// step takes one step, and prints it with the time that it took and with what the
// kernel then shows of some volumes (and fails if that is not as it should be). The step
// may return a remark.
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
		shown, wrong := v.look()
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

// run is the demo from the start of the driver to its end.
func (d *demonstration) run() {
	if _, err := rpc.ParseEndpoint(d.socket()); err != nil {
		d.failed = fmt.Errorf("--dir: %w", err)
		return
	}
	if d.failed = process.Adopt(); d.failed != nil {
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
	d.printf("Ashlar %s on Linux %s. Paths are below %s, a folder on %s: %s.\n\n", d.version, machine.KernelRelease(), d.dir, on, how)
	d.printColumns()
	d.heading("the driver")
	d.step("driver serve", func(ctx context.Context) (string, error) {
		pool := url.URL{Scheme: "file", Path: filepath.Join(d.dir, "pool"), RawQuery: "create=1&reservePercent=0"}
		self, err := os.Executable()
		if err != nil {
			return "", err
		}
		if d.Driver, err = process.Start(self, d.socket(), "--node-id="+demoNode, "--pool=default="+pool.String(), "-v=4"); err != nil {
			return "", err
		}
		return fmt.Sprintf("process %d serves csi.sock; Probe says ready", d.Command.Process.Pid), d.Ready(ctx)
	})
	d.story()
	d.heading("what is left")
	d.step("SIGTERM to the driver", func(context.Context) (string, error) {
		if err := d.Stop(); err != nil {
			return "", err
		}
		if _, err := os.Lstat(d.socket()); !errors.Is(err, fs.ErrNotExist) {
			return "", errors.New("the driver left its socket behind")
		}
		return "it ended with status 0 and took its socket along", nil
	})
	d.step("look for what is left", func(context.Context) (string, error) { return d.nothingLeft() })
}

// nothingLeft makes sure of what its name says.
func (d *demonstration) nothingLeft() (string, error) {
	mounts, loops, err := machine.Leftovers(d.dir)
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
	// The lock of the pool is the pool's, not a volume's.
	err = filepath.WalkDir(d.dir, func(path string, entry fs.DirEntry, err error) error {
		if err == nil && !entry.IsDir() && path != filepath.Join(d.dir, "pool", "lock") && path != filepath.Join(d.dir, "pool", "pool") {
			left = append(left, "file "+path)
		}
		return err
	})
	if err != nil {
		return "", err
	}
	if process.Orphaned() {
		left = append(left, "a process that the driver started")
	}
	if len(left) > 0 {
		return "", fmt.Errorf("left behind: %s", strings.Join(left, ", "))
	}
	return "no mount, no loop device, no image or record in the pool, no process", os.RemoveAll(d.dir)
}

// end says how it went. What a failure left is taken away as far as that can be done.
func (d *demonstration) end() error {
	took := time.Since(d.start).Round(10 * time.Millisecond)
	if d.failed == nil {
		d.printf("\nAll %d steps went as they should, in %s: %d calls, %d volumes, %d snapshots. The slowest: %s, %d ms.\n",
			d.steps, took, d.Calls.Load(), d.volumes, d.cuts, d.slowest.what, d.slowest.took.Milliseconds())
		return nil
	}
	if d.Driver != nil {
		d.printf("\nThe driver's last log lines:\n")
		for _, line := range d.Log.Last(20) {
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

// cleanUp takes away by force whatever is left, without the driver.
func (d *demonstration) cleanUp() error {
	var failures []error
	// A filesystem that is still frozen would keep everybody waiting, the driver included.
	mounts, _, err := machine.Leftovers(d.dir)
	failures = append(failures, err)
	for _, path := range mounts {
		if info, err := os.Stat(path); err == nil && info.IsDir() {
			_ = filesystem.Thaw(path)
		}
	}
	if d.Driver != nil {
		_ = d.Stop() // it is killed if it does not end
	}
	// Again: now nobody can add any.
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
			_ = unix.IoctlSetInt(int(f.Fd()), unix.LOOP_CLR_FD, 0) // it may be gone with its mount
			f.Close()
		}
	}
	// A loop device goes away a moment after its last user.
	for range 50 {
		if mounts, loops, err = machine.Leftovers(d.dir); len(mounts)+len(loops) == 0 || err != nil {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	failures = append(failures, err)
	for _, loop := range loops {
		failures = append(failures, fmt.Errorf("%s is still attached; losetup -d %s", loop.Path(), loop.Path()))
	}
	if len(mounts) > 0 {
		// RemoveAll would go through the mounts.
		return errors.Join(append(failures, fmt.Errorf("still mounted: %s; unmount, then remove %s", strings.Join(mounts, ", "), d.dir))...)
	}
	return errors.Join(append(failures, os.RemoveAll(d.dir))...)
}

// demoVolume is a volume or a snapshot of the demo, and what the kernel should show of it.
type demoVolume struct {
	d       *demonstration
	name    string
	id      string
	kind    blockdev.Kind
	fs      filesystem.Type // empty for raw block
	context map[string]string

	size int64 // bytes; 0 while there is none
	// at is where it is mounted, or its device bound: path -> read-only.
	at map[string]bool
	// fsSize is the least that its filesystem has, in bytes.
	fsSize int64
}

func (d *demonstration) volume(name string, fs filesystem.Type) *demoVolume {
	return &demoVolume{d: d, name: name, kind: blockdev.Volume, fs: fs, at: map[string]bool{}}
}

func (d *demonstration) snapshot(name string) *demoVolume {
	return &demoVolume{d: d, name: name, kind: blockdev.Snapshot}
}

// staging and target are where the CO wants a volume.
func (v *demoVolume) staging() string { return filepath.Join(v.d.dir, "stage", v.name) }

func (v *demoVolume) target(pod string) string {
	return filepath.Join(v.d.dir, pod, v.name)
}

// image is where the pool keeps its bytes.
func (v *demoVolume) image() string {
	folder := map[blockdev.Kind]string{blockdev.Volume: "volumes", blockdev.Snapshot: "snapshots"}[v.kind]
	return filepath.Join(v.d.dir, "pool", folder, volume.KeyOf(v.name)+".img")
}

func (v *demoVolume) capability(mode csi.VolumeCapability_AccessMode_Mode) *csi.VolumeCapability {
	c := &csi.VolumeCapability{AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode},
		AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}}
	if v.fs != "" {
		c.AccessType = &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: string(v.fs)}}
	}
	return c
}

// look returns what the kernel shows of the volume, and an error if that is not what
// the calls so far should have made of it.
func (v *demoVolume) look() (string, error) {
	relative := func(path string) string { return strings.TrimPrefix(path, v.d.dir+"/") }
	wrong := func(format string, args ...any) error {
		return fmt.Errorf("the kernel shows of %s: %s", v.name, fmt.Sprintf(format, args...))
	}
	found, err := machine.LoopDevices(v.image(), v.d.dir)
	if err != nil {
		return "", err
	}
	devices := found[v.image()]
	var image unix.Stat_t
	err = unix.Stat(v.image(), &image)
	switch {
	case errors.Is(err, unix.ENOENT) && v.size != 0:
		return "no image", wrong("no image")
	case errors.Is(err, unix.ENOENT) && len(devices) == 0:
		return "no image, no device, no mount", nil
	case err != nil:
		return "", err
	case v.size == 0:
		return "image " + relative(v.image()), wrong("an image that should be gone")
	case image.Size != v.size:
		err = wrong("an image of %d bytes, not %d", image.Size, v.size)
	}
	if len(devices) == 0 {
		if len(v.at) > 0 {
			err = wrong("no device")
		}
		short := strings.Replace(relative(v.image()), v.image()[strings.LastIndexByte(v.image(), '/')+9:], "..", 1)
		return fmt.Sprintf(columns, "no device", machine.Size(image.Size), "", "image", machine.Size(image.Blocks*512)+" taken", short), err
	}
	var lines []string
	seen := map[string]bool{}
	for _, device := range devices {
		if device.Size != v.size {
			err = wrong("%s of %d bytes, not %d", device.Path(), device.Size, v.size)
		}
		fsType, usage := "", ""
		var places []string
		for _, at := range device.Mounts {
			place := at.Path
			if machine.Within(place, v.staging()) {
				place = v.staging() // of a block volume, the driver chooses a place within
			}
			fsType = at.Fs
			if at.Fs != "block" {
				usage = fmt.Sprintf("%s of %s", machine.Size(at.Used), machine.Size(at.Size))
			}
			if readOnly, expected := v.at[place]; !expected || (readOnly != at.ReadOnly && place != v.staging()) {
				err = wrong("it at %s, %s", relative(at.Path), mode(at.ReadOnly))
			} else if v.fs != "" && (at.Fs != string(v.fs) || at.Size < v.fsSize) {
				err = wrong("%s of %d bytes at %s", at.Fs, at.Size, relative(at.Path))
			}
			seen[place] = true
			places = append(places, relative(place)+" "+mode(at.ReadOnly))
		}
		lines = append(lines, fmt.Sprintf(columns, device.Path(), machine.Size(device.Size), mode(device.ReadOnly), fsType, usage, strings.Join(places, ", ")))
	}
	for place := range v.at {
		if !seen[place] {
			err = wrong("nothing at %s", relative(place))
		}
	}
	return strings.Join(lines, "\n"), err
}

func mode(readOnly bool) string {
	if readOnly {
		return "ro"
	}
	return "rw"
}
