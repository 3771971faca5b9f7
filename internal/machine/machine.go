// Package machine reads the state of this machine from the kernel (/proc, /sys, statfs(2)), and by trying.
package machine

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

const loopMajor = 7

// LoopDevice is a loop device, by sysfs.
type LoopDevice struct {
	number   int
	Size     int64 // bytes
	ReadOnly bool
	Mounts   []MountPoint
}

// Path returns /dev/loopN.
func (l LoopDevice) Path() string { return "/dev/loop" + strconv.Itoa(l.number) }

// MountPoint is where a device is mounted, or bound as a device node; then Fs is "block".
type MountPoint struct {
	Path     string
	Fs       string
	ReadOnly bool
	Size     int64 // bytes; of the filesystem (statfs(2)), or of the bound device
	Used     int64
}

// LoopDevices returns the loop devices over files at or below a path, by file, with those of their mounts that are at or below another path.
func LoopDevices(files, mounts string) (map[string][]LoopDevice, error) {
	backings, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return nil, err
	}
	found := map[string][]LoopDevice{}
	var points map[uint64][]MountPoint
	for _, backing := range backings {
		file, err := readLine(backing)
		if file = strings.TrimSuffix(file, " (deleted)"); err != nil || !Within(file, files) {
			continue // it is gone meanwhile, or not below files
		}
		block := filepath.Dir(filepath.Dir(backing))
		number, err := strconv.Atoi(strings.TrimPrefix(filepath.Base(block), "loop"))
		if err != nil {
			return nil, err
		}
		sectors, err := ReadNumber(block + "/size")
		if err != nil {
			return nil, err
		}
		readOnly, err := ReadNumber(block + "/ro")
		if err != nil {
			return nil, err
		}
		if points == nil {
			if points, err = mountPoints(mounts); err != nil {
				return nil, err
			}
		}
		device := LoopDevice{number: number, Size: sectors * 512, ReadOnly: readOnly != 0, Mounts: points[unix.Mkdev(loopMajor, uint32(number))]}
		for i := range device.Mounts {
			if device.Mounts[i].Fs == "block" {
				device.Mounts[i].ReadOnly, device.Mounts[i].Size = device.ReadOnly, device.Size
			}
		}
		found[file] = append(found[file], device)
	}
	return found, nil
}

// mountPoints returns the mounts at or below a path, by the number of their device.
func mountPoints(below string) (map[uint64][]MountPoint, error) {
	mounts, err := readMounts()
	if err != nil {
		return nil, err
	}
	points := map[uint64][]MountPoint{}
	for _, m := range mounts {
		if !Within(m.MountPoint, below) {
			continue
		}
		point := MountPoint{Path: m.MountPoint, Fs: m.FsType}
		device := unix.Mkdev(uint32(m.Major), uint32(m.Minor))
		var st unix.Stat_t
		if err := unix.Stat(m.MountPoint, &st); err == nil && st.Mode&unix.S_IFMT == unix.S_IFBLK {
			point.Fs = "block"
			points[st.Rdev] = append(points[st.Rdev], point)
			continue
		}
		// A btrfs has a device number of its own; its source has that of the device.
		if m.Major == 0 && unix.Stat(m.Source, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFBLK {
			device = st.Rdev
		}
		var space unix.Statfs_t
		if err := unix.Statfs(m.MountPoint, &space); err != nil {
			return nil, &fs.PathError{Op: "statfs", Path: m.MountPoint, Err: err}
		}
		point.ReadOnly = space.Flags&unix.ST_RDONLY != 0
		point.Size = int64(space.Blocks) * space.Frsize
		point.Used = int64(space.Blocks-space.Bfree) * space.Frsize
		points[device] = append(points[device], point)
	}
	return points, nil
}

// Mount is a mount in the namespace of this process (proc_pid_mountinfo(5)).
type Mount struct {
	Major, Minor               int
	MountPoint, FsType, Source string
	OptionalFields             []string
	SuperOptions               []string // options of the filesystem
}

// readMounts lists all mounts, in their order.
func readMounts() ([]Mount, error) {
	all, err := mountinfo.GetMounts(nil)
	var mounts []Mount
	for _, m := range all {
		mounts = append(mounts, Mount{m.Major, m.Minor, m.Mountpoint, m.FSType, m.Source, strings.Fields(m.Optional), strings.Split(m.VFSOptions, ",")})
	}
	return mounts, err
}

// MountOf returns the mount that a path is on. The path must be absolute, without symbolic links.
func MountOf(path string) (Mount, error) {
	mounts, err := readMounts()
	if err != nil {
		return Mount{}, err
	}
	var best Mount
	for _, m := range mounts {
		// Of several at one place the last one is on top.
		if Within(path, m.MountPoint) && len(m.MountPoint) >= len(best.MountPoint) {
			best = m
		}
	}
	if best.MountPoint == "" {
		return best, fmt.Errorf("no mount at or above %s", path)
	}
	return best, nil
}

// Leftovers lists the mounts at or below a directory, and the loop devices over files in it.
func Leftovers(dir string) (mounts []string, loops []LoopDevice, err error) {
	all, err := readMounts()
	if err != nil {
		return nil, nil, err
	}
	for _, m := range all {
		if Within(m.MountPoint, dir) {
			mounts = append(mounts, m.MountPoint)
		}
	}
	devices, err := LoopDevices(dir, dir)
	for _, some := range devices {
		loops = append(loops, some...)
	}
	return mounts, loops, err
}

// Reflinks reports whether the filesystem of a directory can share blocks between files, by
// trying it (FICLONE, ioctl_ficlone(2)) with two files that have no name.
func Reflinks(directory string) (bool, error) {
	from, err := unnamedFile(directory, 0)
	if err != nil {
		return false, err
	}
	defer from.Close()
	to, err := unnamedFile(directory, 0)
	if err != nil {
		return false, err
	}
	defer to.Close()
	if _, err := from.Write(make([]byte, 4096)); err != nil {
		return false, err
	}
	return unix.IoctlFileClone(int(to.Fd()), int(from.Fd())) == nil, nil
}

// DirectIO reports whether the filesystem of a directory has direct I/O, by opening a file
// that has no name.
func DirectIO(directory string) (bool, error) {
	f, err := unnamedFile(directory, unix.O_DIRECT)
	if errors.Is(err, unix.EINVAL) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return true, f.Close()
}

// unnamedFile opens a new file that is removed when it is closed.
func unnamedFile(directory string, flags int) (*os.File, error) {
	f, err := os.OpenFile(directory, os.O_RDWR|unix.O_TMPFILE|flags, 0o600)
	if !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.EISDIR) {
		return f, err
	}
	// The filesystem has no O_TMPFILE.
	named, err := os.CreateTemp(directory, ".ashlar-probe-")
	if err != nil {
		return nil, err
	}
	defer named.Close()
	f, err = os.OpenFile(named.Name(), os.O_RDWR|flags, 0)
	return f, errors.Join(err, os.Remove(named.Name()))
}

// Within reports whether a path is equal to another one, or below it.
func Within(path, above string) bool {
	return path == above || strings.HasPrefix(path, strings.TrimSuffix(above, "/")+"/")
}

func readLine(path string) (string, error) {
	text, err := os.ReadFile(path)
	return strings.TrimSpace(string(text)), err
}

// ReadNumber reads a file that holds a number, as those below /sys.
func ReadNumber(path string) (int64, error) {
	text, err := readLine(path)
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(text, 10, 64)
}

// Size returns a number of bytes as text, with about three digits and a unit.
func Size(bytes int64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB"}
	n, unit := float64(bytes), 0
	for n >= 1000 && unit < len(units)-1 {
		n, unit = n/1024, unit+1
	}
	text := strconv.FormatFloat(n, 'f', 1, 64)
	if n >= 100 || strings.HasSuffix(text, ".0") {
		text = strconv.FormatFloat(n, 'f', 0, 64)
	}
	return text + " " + units[unit]
}

// CPUFeatures returns the features of the first processor, by their names in /proc/cpuinfo: aes is one on amd64 and on arm64.
func CPUFeatures() ([]string, error) {
	text, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(text)) {
		name, words, _ := strings.Cut(line, ":")
		if name = strings.TrimSpace(name); name == "flags" || name == "Features" {
			return strings.Fields(words), nil
		}
	}
	return nil, errors.New("/proc/cpuinfo names no features")
}

// KernelRelease returns the release of the running kernel (uname(2)).
func KernelRelease() string {
	var uts unix.Utsname
	_ = unix.Uname(&uts) // fails only for a bad address
	return unix.ByteSliceToString(uts.Release[:])
}

// Exists reports whether a path exists. Symbolic links are not followed.
func Exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}
