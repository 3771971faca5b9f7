package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

func below(path, dir string) bool {
	return path == dir || strings.HasPrefix(path, strings.TrimSuffix(dir, "/")+"/")
}

type mountPoint struct{ path, fstype, source, options string }

// mounts lists the mounts of this process's namespace, oldest first.
func mounts() []mountPoint {
	var all []mountPoint
	for line := range strings.Lines(read("/proc/self/mountinfo")) {
		// 36 35 98:0 /root /mnt options optional... - type source superoptions
		before, after, _ := strings.Cut(line, " - ")
		b, a := strings.Fields(before), strings.Fields(after)
		if len(b) > 4 && len(a) > 2 {
			all = append(all, mountPoint{b[4], a[0], a[1], a[2]})
		}
	}
	return all
}

func mountsBelow(dir string) []string {
	var found []string
	for _, m := range mounts() {
		if below(m.path, dir) {
			found = append(found, m.path)
		}
	}
	return found
}

// loopsBelow lists the loop devices over files in a folder.
func loopsBelow(dir string) []int {
	var found []int
	backings, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, path := range backings {
		if below(strings.TrimSuffix(read(path), " (deleted)"), dir) {
			n, _ := strconv.Atoi(strings.TrimPrefix(strings.Split(path, "/")[3], "loop"))
			found = append(found, n)
		}
	}
	return found
}

// clean takes away all that is in a folder, mounts and loop devices too, and the
// folder. Nothing of it is left, or there is an error that says what is.
func clean(dir string) error {
	deadline := time.Now().Add(10 * time.Second)
	for {
		for _, path := range slices.Backward(mountsBelow(dir)) {
			_ = unix.Unmount(path, unix.UMOUNT_NOFOLLOW)
		}
		for _, n := range loopsBelow(dir) {
			if f, err := os.Open(loopPath(n)); err == nil {
				_ = unix.IoctlSetInt(int(f.Fd()), unix.LOOP_CLR_FD, 0)
				f.Close()
			}
		}
		m, l := mountsBelow(dir), loopsBelow(dir)
		if len(m) == 0 && len(l) == 0 {
			return os.RemoveAll(dir)
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("left behind: mounts %v, loop devices %v, folder %s", m, l, dir)
		}
		time.Sleep(100 * time.Millisecond)
	}
}

func loopNumbers() map[int]bool {
	numbers := map[int]bool{}
	devices, _ := filepath.Glob("/sys/block/loop*")
	for _, path := range devices {
		if n, err := strconv.Atoi(strings.TrimPrefix(filepath.Base(path), "loop")); err == nil {
			numbers[n] = true
		}
	}
	return numbers
}

// removeLoops takes away the unused loop devices that the kernel made since: it keeps
// as many as were ever in use at once. Those that somebody else uses stay.
func removeLoops(before map[int]bool) error {
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer control.Close()
	numbers := make(chan int)
	go func() {
		defer close(numbers)
		for n := range loopNumbers() {
			if !before[n] {
				numbers <- n
			}
		}
	}()
	var mu sync.Mutex
	var failures []error
	var workers sync.WaitGroup
	for range 32 { // each waits for RCU most of the time
		workers.Go(func() {
			for n := range numbers {
				if err := unix.IoctlSetInt(int(control.Fd()), unix.LOOP_CTL_REMOVE, n); err != nil && !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.ENODEV) {
					mu.Lock()
					failures = append(failures, fmt.Errorf("remove loop%d: %w", n, err))
					mu.Unlock()
				}
			}
		})
	}
	workers.Wait()
	return errors.Join(failures...)
}
