package filesystem

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
)

// ShutDown returns the problem of a filesystem that is mounted at path from device, and where mount.At fails with err.
func ShutDown(t Type, device, path string, err error) blockdev.Problem {
	return blockdev.Problem{Severity: blockdev.Inaccessible, Reason: "FilesystemShutDown",
		Message: fmt.Sprintf("the %s filesystem at %s does not answer: %v; look at the kernel's log, unmount it, and check %s", t, path, err, device)}
}

// Health returns what the kernel knows to be wrong with a filesystem that is mounted at path from device and answers. writable: it was mounted for writing.
// readOnly: it takes no writes now, by statfs(2).
func Health(t Type, device, path string, writable, readOnly bool) []blockdev.Problem {
	var problems []blockdev.Problem
	report := func(severity blockdev.Severity, reason, format string, args ...any) {
		problems = append(problems, blockdev.Problem{Severity: severity, Reason: reason, Message: fmt.Sprintf(format, args...)})
	}
	if writable && Stopped(device, readOnly) {
		report(blockdev.Inaccessible, "FilesystemReadOnly", "the kernel made the %s filesystem at %s read-only; look at its log, unmount it and check %s", t, path, device)
	}
	if n := reportedErrors(t, device); n > 0 {
		report(blockdev.Degraded, "FilesystemErrors", "the %s filesystem on %s has recorded %d errors; look at the kernel's log, and check it when it is not mounted", t, device, n)
	}
	return problems
}

// Stopped reports whether the kernel made a filesystem read-only that was mounted for writing from a device. readOnly: it takes no writes now, by statfs(2).
func Stopped(device string, readOnly bool) bool { return readOnly || ext4Emergency(device) }

// ext4Emergency reports whether a device has an ext4 that was mounted for writing and stopped writing after an error; statfs(2) does not always show that.
// Newer kernels (6.16) show it among the options. Older ones (6.1.175) show only that the first error stops it (errors=remount-ro): then it has stopped if an
// error was recorded. That error came after the mount, as the check before a mount for writing clears the errors that were recorded earlier.
func ext4Emergency(device string) bool {
	for _, option := range ext4Options(device) {
		switch option {
		case "emergency_ro", "shutdown":
			return true
		case "errors=remount-ro":
			if reportedErrors(Ext4, device) > 0 {
				return true
			}
		}
	}
	return false
}

// JournalWrites reports whether a device has a mounted ext4 whose journal writes bytes of files too: with data=journal all of them, with nodelalloc those that
// have to be on the disk before a commit of the journal. These writes are the kernel's own, so limits of I/O of pods (cgroups) do not hold for them.
func JournalWrites(device string) bool {
	options := ext4Options(device)
	return slices.Contains(options, "data=journal") || slices.Contains(options, "nodelalloc")
}

// ext4Options returns all mount options in force of the ext4 that is mounted from a device; none if there is no such ext4.
func ext4Options(device string) []string {
	options, err := os.ReadFile("/proc/fs/ext4/" + filepath.Base(device) + "/options")
	if err != nil {
		return nil
	}
	return strings.Fields(string(options))
}

// reportedErrors returns how many errors a mounted filesystem has recorded: ext4 in its superblock, btrfs for each device. 0 if it records none.
func reportedErrors(t Type, device string) int64 {
	name := filepath.Base(device)
	switch t {
	case Ext4:
		return readCount("/sys/fs/ext4/" + name + "/errors_count")
	case Btrfs:
		// /sys/fs/btrfs/UUID/devices/loopN is a link to the device, the only one of the filesystem.
		links, _ := filepath.Glob("/sys/fs/btrfs/*/devices/" + name)
		var n int64
		for _, link := range links {
			accounts, _ := filepath.Glob(filepath.Join(filepath.Dir(filepath.Dir(link)), "devinfo/*/error_stats"))
			for _, account := range accounts {
				n += sumCounts(account)
			}
		}
		return n
	}
	return 0
}

// sumCounts returns the sum of the counts in a file, whose lines have a name and a count; 0 if it cannot be read.
func sumCounts(path string) (sum int64) {
	lines, err := os.ReadFile(path)
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(lines)) {
		if fields := strings.Fields(line); len(fields) == 2 {
			count, _ := strconv.ParseInt(fields[1], 10, 64)
			sum += count
		}
	}
	return sum
}

// readCount returns the number in a file; 0 if it cannot be read.
func readCount(path string) int64 {
	data, err := os.ReadFile(path)
	if err != nil {
		return 0
	}
	n, _ := strconv.ParseInt(strings.TrimSpace(string(data)), 10, 64)
	return n
}
