package drivertest

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
)

// goneTime is how long something that ends by itself may take. Other tests, or lvm2, that look at all devices of the machine keep each open for a moment, which
// may be long on a slow machine. A host of NVMe over TCP whose target goes away while they disconnect waits for 60 s.
const goneTime = 2 * time.Minute

// Gone waits until left returns nothing, for goneTime at most, and returns what is left then.
func Gone(left func() []string) []string {
	for deadline := time.Now().Add(goneTime); ; time.Sleep(10 * time.Millisecond) {
		if found := left(); len(found) == 0 || time.Now().After(deadline) {
			return found
		}
	}
}

// runUnless is Run, which is repeated, for goneTime at most, while the program fails with one of the texts in passing.
func runUnless(t testing.TB, passing []string, argv ...string) string {
	t.Helper()
	for deadline := time.Now().Add(goneTime); ; time.Sleep(10 * time.Millisecond) {
		out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput()
		if err == nil {
			return strings.TrimSpace(string(out))
		}
		passes := false
		for _, words := range passing {
			passes = passes || strings.Contains(string(out), words)
		}
		if !passes || time.Now().After(deadline) {
			t.Fatalf("%s: %v: %s", strings.Join(argv, " "), err, out)
		}
	}
}

// RunBtrfs is Run for a program that makes a btrfs or adds a device to one. Such a program looks for its device among all that are mounted, and fails if
// another device, of any test, goes away meanwhile: then it is repeated. Other programs are run as by Run.
func RunBtrfs(t testing.TB, argv ...string) string {
	t.Helper()
	return runUnless(t, []string{"check mount status", "checking mount status"}, argv...)
}

// Loop attaches a loop device to a file, and makes it writable: a loop device keeps the mode that an earlier user gave it with blockdev(8). Options are those
// of losetup(8).
func Loop(t testing.TB, image string, options ...string) string {
	t.Helper()
	device := PlainLoop(t, image, options...)
	Run(t, "blockdev", "--setrw", device)
	return device
}

// PlainLoop is Loop, which does not make the device writable.
func PlainLoop(t testing.TB, file string, options ...string) string {
	t.Helper()
	// losetup(8) looks for a free device, which another program may take first.
	return runUnless(t, []string{"No such device", "No such file", "Device or resource busy"}, append(append([]string{"losetup"}, options...), "--show", "-f", file)...)
}

// MountLoop mounts the filesystem in a file, by its loop device if it has one, else by a new one that goes with the mount. Options are those of mount(8).
func MountLoop(t testing.TB, image, dir string, options ...string) {
	t.Helper()
	mount := func(device string) []string { return append(append([]string{"mount"}, options...), device, dir) }
	for deadline := time.Now().Add(goneTime); ; time.Sleep(10 * time.Millisecond) {
		found := LoopsOver(image)
		if len(found) == 0 {
			break
		}
		out, err := exec.Command("mount", mount("/dev/" + found[0])[1:]...).CombinedOutput()
		if err == nil {
			return
		}
		if time.Now().After(deadline) { // before, the device may be about to go
			t.Fatalf("mount %s: %v: %s", image, err, out)
		}
	}
	loop := Loop(t, image)
	defer Run(t, "losetup", "-d", loop)
	Run(t, mount(loop)...)
}

// MountNew makes a filesystem of size bytes (sparse), and mounts it at a directory, which it makes, until the test ends.
func MountNew(t testing.TB, fs, dir string, size int64) (image string) {
	t.Helper()
	image = dir + ".image"
	check.OK(t, os.WriteFile(image, nil, 0o600))
	check.OK(t, os.Truncate(image, size))
	check.OK(t, os.Mkdir(dir, 0o700))
	RunBtrfs(t, "mkfs."+fs, "-q", image)
	MountLoop(t, image, dir)
	t.Cleanup(func() { Unmount(t, dir) })
	return image
}

// LoopsOver returns the names of the loop devices over a file.
func LoopsOver(image string) (names []string) {
	all, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, path := range all {
		if backing, err := os.ReadFile(path); err == nil && strings.TrimSpace(string(backing)) == image {
			names = append(names, strings.Split(path, "/")[3])
		}
	}
	return names
}

// Unmount unmounts a path. While it is busy it tries again, for goneTime at most: the kernel closes the file of a loop device a moment after that has gone, and
// a program that another test starts has copies of this process's descriptors until it executes.
func Unmount(t testing.TB, path string) {
	t.Helper()
	err := unix.Unmount(path, 0)
	for end := time.Now().Add(goneTime); errors.Is(err, unix.EBUSY) && time.Now().Before(end); err = unix.Unmount(path, 0) {
		time.Sleep(20 * time.Millisecond)
	}
	if err != nil {
		t.Errorf("unmount %s: %v", path, err)
		_ = unix.Unmount(path, unix.MNT_DETACH)
	}
}
