package dm

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/direct"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// CanMirror returns errdefs.ErrUnsupported, with the module to load, unless the kernel has the target "mirror".
func CanMirror() error {
	if err := HasTarget("mirror"); err != nil {
		return fmt.Errorf("%w: %w; load the module dm-mirror", errdefs.ErrUnsupported, err)
	}
	return nil
}

// Mirror is the status of a target "mirror".
type Mirror struct {
	Legs          []Leg // as in its table
	Synced, Total int64 // regions that are in sync on all legs, and all regions
	Logged        bool  // its log is on a device, not in memory
}

// Leg is a leg of a Mirror.
type Leg struct {
	Device    uint64 // its number, as in st_rdev
	Failed    bool   // it did not take a write or a flush, or could not be read
	OnlyReads bool   // it has Failed, but took all that was written: it could not be read, by a user or for a copy to other legs
	NotCopied bool   // it has Failed, but took all that was written: a copy to it failed
}

// ParseMirror reads the status of a target "mirror" (Status).
func ParseMirror(status string) (m Mirror, err error) {
	// "2 254:0 254:1 64/64 1 AD 3 disk 7:2 A": AD has a letter for each leg
	words := strings.Fields(status)
	bad := fmt.Errorf("the kernel says of a mirror what is not understood: %q", status)
	var many int
	if len(words) == 0 {
		return m, bad
	}
	if _, err := fmt.Sscan(words[0], &many); err != nil || many < 2 || len(words) < many+6 {
		return m, bad
	}
	alive := words[many+3]
	if _, err := fmt.Sscanf(words[many+1], "%d/%d", &m.Synced, &m.Total); err != nil || len(alive) != many || m.Total <= 0 {
		return m, bad
	}
	for i, word := range words[1 : many+1] {
		var major, minor uint32
		if _, err := fmt.Sscanf(word, "%d:%d", &major, &minor); err != nil {
			return m, bad
		}
		m.Legs = append(m.Legs, Leg{Device: unix.Mkdev(major, minor), Failed: alive[i] != 'A', OnlyReads: alive[i] == 'R' || alive[i] == 'S' && i == 0, NotCopied: alive[i] == 'S' && i > 0})
	}
	m.Logged = words[many+5] == "disk"
	return m, nil
}

const (
	// probes is how often ReadFrom reads before it compares the counts.
	probes = 16
	// rounds is how often ReadFrom begins anew because others have read as much meanwhile.
	rounds = 50
)

// ReadFrom returns the leg that the kernel reads from, at an offset of a mirror that is in sync there. What the kernel does not write to all legs it
// writes to that one, so it has all that was acknowledged. ReadFrom reads there, and sees by the kernel's counts which leg is read as often, whoever else
// reads meanwhile. errdefs.ErrUnavailable if the counts do not tell, as others read the other legs as much.
func ReadFrom(d *Device, at int64, legs []Leg) (from uint64, err error) {
	f, err := Open(d, os.O_RDONLY|unix.O_DIRECT)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	page, free, err := direct.Memory(4096)
	if err != nil {
		return 0, err
	}
	defer free()
	count, err := countersOf(legs)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, count.release()) }()
	for range rounds {
		before, err := count.reads()
		if err != nil {
			return 0, err
		}
		for range probes {
			if _, err := f.ReadAt(page, at); err != nil {
				return 0, fmt.Errorf("read device %s: %w", d.Name, errdefs.FromErrno(err))
			}
		}
		after, err := count.reads()
		if err != nil {
			return 0, err
		}
		read := slices.DeleteFunc(slices.Clone(legs), func(l Leg) bool {
			i := slices.Index(legs, l)
			return after[i]-before[i] < probes
		})
		if len(read) == 1 {
			return read[0].Device, nil
		}
	}
	return 0, fmt.Errorf("%w: which leg of device %s is read from cannot be told: the kernel does not count reads of just one", errdefs.ErrUnavailable, d.Name)
}

// Written returns how many bytes were written to the device since it was made, as far as the kernel counts that (queue/iostats).
func (d Device) Written() (int64, error) {
	sectors, err := counted(Sysfs(d.Number), 6)
	return sectors * sector, err
}

// Flushed reports whether the kernel passes flushes on to a device, by its number. It does not if the device says that it has no volatile cache. True if
// the kernel does not tell.
func Flushed(device uint64) bool {
	text, _ := os.ReadFile(Sysfs(device) + "/queue/write_cache")
	return strings.TrimSpace(string(text)) != "write through"
}

// SetFlushed has the kernel pass flushes on to a device, or take them for carried out at once (queue/write_cache: sysfs-block of Documentation/ABI). It holds
// until a table of the device takes effect.
func SetFlushed(device uint64, passes bool) error {
	cache := map[bool]string{true: "write back", false: "write through"}[passes]
	if err := os.WriteFile(Sysfs(device)+"/queue/write_cache", []byte(cache), 0); err != nil {
		return fmt.Errorf("have device %s flushed, or not (%s): %w", Number(device), cache, errdefs.FromErrno(err))
	}
	return nil
}

// TakeFlushes has the kernel pass flushes on from now on to a device of linear targets that took them for carried out (SetFlushed). It waits for what is under
// way to the device, and holds back what comes meanwhile: a write that was to be durable at its end (FUA) was taken for any other before, and a flush after
// TakeFlushes covers it. It changes nothing if nothing below the device takes flushes: since Linux 6.5, and in stable kernels before, a device over disks
// without a cache cannot be set to be flushed. After a crash it is called again.
func TakeFlushes(name string) error {
	d, err := Find(name)
	if err == nil && d == nil {
		err = fmt.Errorf("flush device %s: %w", name, unix.ENXIO)
	}
	if err != nil {
		return err
	}
	below, err := Below(name)
	if err != nil || !slices.ContainsFunc(below, Flushed) {
		return err
	}
	if err := SetFlushed(d.Number, true); err != nil { // before what is held back
		return err
	}
	table, err := Lines(name)
	if err != nil {
		return err
	}
	return Replace(name, table) // by the same one: the kernel suspends the device and resumes it in one call, so a crash cannot come between
}
