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

	"github.com/ashlar-csi/ashlar/internal/machine"
)

// clean takes away all that is in a directory, mounts and loop devices too, and the
// directory. Nothing of it is left, or there is an error that says what is.
func clean(dir string) error {
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		mounts, loops, err := machine.Leftovers(dir)
		if err == nil && len(mounts)+len(loops) == 0 {
			return os.RemoveAll(dir)
		}
		if time.Now().After(deadline) {
			return errors.Join(fmt.Errorf("left behind: mounts %v, loop devices %v, directory %s", mounts, loops, dir), err)
		}
		for _, path := range slices.Backward(mounts) {
			_ = unix.Unmount(path, unix.UMOUNT_NOFOLLOW)
		}
		for _, loop := range loops {
			if f, err := os.Open(loop.Path()); err == nil {
				_ = unix.IoctlSetInt(int(f.Fd()), unix.LOOP_CLR_FD, 0)
				f.Close()
			}
		}
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
