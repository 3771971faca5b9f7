package drivertest

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// settleTime is how long what ends by itself may take to do so: every look at all devices of the machine, by
// another test or an lvm2, keeps each of them for a moment, and a slow machine makes long moments of that.
const settleTime = 30 * time.Second

// Gone waits until there is nothing left, and returns what is left when it has waited long enough.
func Gone(left func() []string) []string {
	for deadline := time.Now().Add(settleTime); ; time.Sleep(10 * time.Millisecond) {
		if found := left(); len(found) == 0 || time.Now().After(deadline) {
			return found
		}
	}
}

// runUnless is Run, again for as long as the program fails with one of some words for what passes.
func runUnless(t testing.TB, passing []string, argv ...string) string {
	t.Helper()
	for deadline := time.Now().Add(settleTime); ; time.Sleep(10 * time.Millisecond) {
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

// RunBtrfs is Run for a program that makes a btrfs or adds a device to one: it looks for its device among
// all that are mounted, and fails if one of the others, of whatever test, just goes. A program for another
// filesystem is run as it is.
func RunBtrfs(t testing.TB, argv ...string) string {
	t.Helper()
	return runUnless(t, []string{"check mount status", "checking mount status"}, argv...)
}

// Loop makes a file a device for a test, writable: a loop device keeps the mode that an
// earlier user gave it with blockdev(8).
func Loop(t testing.TB, image string) string {
	t.Helper()
	device := PlainLoop(t, image)
	Run(t, "blockdev", "--setrw", device)
	return device
}

// PlainLoop is Loop for what may be read-only, and then has to stay so.
func PlainLoop(t testing.TB, file string) string {
	t.Helper()
	// losetup(8) looks for a free number, which may be taken or gone when it comes to it.
	return runUnless(t, []string{"No such device", "No such file", "Device or resource busy"}, "losetup", "--show", "-f", file)
}

// MountLoop mounts the filesystem in a file, by a loop device that goes with the mount; if it has one, by that
// one. Options are as of mount(8).
func MountLoop(t testing.TB, image, folder string, options ...string) {
	t.Helper()
	mount := func(device string) []string { return append(append([]string{"mount"}, options...), device, folder) }
	for deadline := time.Now().Add(settleTime); ; time.Sleep(10 * time.Millisecond) {
		there := devicesOver(image)
		if len(there) == 0 {
			break
		}
		out, err := exec.Command("mount", mount(there[0])[1:]...).CombinedOutput()
		if err == nil {
			return
		}
		if time.Now().After(deadline) { // else it may just go
			t.Fatalf("mount %s: %v: %s", image, err, out)
		}
	}
	loop := Loop(t, image)
	defer Run(t, "losetup", "-d", loop)
	Run(t, mount(loop)...)
}

// devicesOver are the loop devices over a file.
func devicesOver(image string) (devices []string) {
	all, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, path := range all {
		if backing, err := os.ReadFile(path); err == nil && strings.TrimSpace(string(backing)) == image {
			devices = append(devices, "/dev/"+strings.Split(path, "/")[3])
		}
	}
	return devices
}

// Unmount unmounts a folder, which a pool that was just left may still have open.
func Unmount(t testing.TB, folder string) {
	t.Helper()
	runUnless(t, []string{"target is busy"}, "umount", folder)
}
