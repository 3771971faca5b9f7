package main

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// unmapProgram takes the pages of the program's own file out of the memory of this process (madvise(2), MADV_DONTNEED). The start has read much that is not
// needed again: the types of the Kubernetes API, the tables of all packages. A page that is needed later comes back at its first use, from the page cache or
// the file. Writable mappings are left alone.
func unmapProgram() error {
	program, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return err
	}
	maps, err := os.Open("/proc/self/maps")
	if err != nil {
		return err
	}
	defer maps.Close()
	var failures []error
	lines := bufio.NewScanner(maps)
	for lines.Scan() { // address perms offset dev inode pathname: proc_pid_maps(5)
		var from, to uintptr
		var permissions string
		if _, err := fmt.Sscanf(lines.Text(), "%x-%x %s", &from, &to, &permissions); err != nil {
			return fmt.Errorf("/proc/self/maps: %q: %w", lines.Text(), err)
		}
		if strings.Contains(permissions, "w") || !strings.HasSuffix(lines.Text(), " "+program) {
			continue
		}
		if _, _, errno := unix.Syscall(unix.SYS_MADVISE, from, to-from, unix.MADV_DONTNEED); errno != 0 {
			failures = append(failures, errno)
		}
	}
	return errors.Join(append(failures, lines.Err())...)
}
