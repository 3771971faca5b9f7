package dm

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/direct"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Mirror is what a target "mirror" says of itself.
type Mirror struct {
	Legs          []Leg // as in its table
	Synced, Total int64 // regions that are the same on all, and all of them
	Logged        bool  // its log is on a device
}

// Leg is one of a mirror.
type Leg struct {
	Device    uint64 // its number, as in st_rdev
	Failed    bool   // it did not take a write or a flush, or could not be read
	OnlyReads bool   // it has Failed, and took all that was written; it may have been read to be copied to the others
	NotCopied bool   // it has Failed, and took all that was written; it did not take what was to be copied to it
}

// ParseMirror reads what a target "mirror" says of itself (Status).
func ParseMirror(status string) (m Mirror, err error) {
	// "2 254:0 254:1 64/64 1 AD 3 disk 7:2 A", with a letter for each leg
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
	// probes is how often ReadFrom reads.
	probes = 16
	// rounds is how often it begins anew, as others have read as much meanwhile.
	rounds = 50
)

// ReadFrom returns the leg that the kernel reads from, at a place of a device that is a mirror and in sync there. That one has all that was acknowledged: what is not
// written to all legs is written to it. It reads there, and sees which leg is read as often, whoever else reads meanwhile. errdefs.ErrUnavailable if others read too much for that.
func ReadFrom(d *Device, at int64, legs []Leg) (uint64, error) {
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
	for range rounds {
		before, err := reads(legs)
		if err != nil {
			return 0, err
		}
		for range probes {
			if _, err := f.ReadAt(page, at); err != nil {
				return 0, fmt.Errorf("read device %s: %w", d.Name, errdefs.FromErrno(err))
			}
		}
		after, err := reads(legs)
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
	return 0, fmt.Errorf("%w: which leg of device %s is read from cannot be told, as others read all of them", errdefs.ErrUnavailable, d.Name)
}

// reads are the counts of reads of legs. One that the kernel does not have any more, as its connection has ended, is read no more.
func reads(legs []Leg) (counts []int64, err error) {
	for _, l := range legs {
		count, err := counted(l.Device, 0)
		if errors.Is(err, os.ErrNotExist) {
			count, err = 0, nil
		}
		if err != nil {
			return nil, err
		}
		counts = append(counts, count)
	}
	return counts, nil
}

// Written is how much was written to a device since it was made, in bytes, as far as the kernel counts that (queue/iostats).
func (d Device) Written() (int64, error) {
	sectors, err := counted(d.Number, 6)
	return sectors * sector, err
}

// counted is a field of what the kernel counts of a device: Documentation/block/stat.rst.
func counted(number uint64, field int) (count int64, err error) {
	text, err := os.ReadFile("/sys/dev/block/" + Number(number) + "/stat")
	if err != nil {
		return 0, errdefs.FromErrno(err)
	}
	fields := strings.Fields(string(text))
	if len(fields) <= field {
		return 0, fmt.Errorf("%w: the kernel counts of device %s %q", errdefs.ErrUnsupported, Number(number), text)
	}
	count, err = strconv.ParseInt(fields[field], 10, 64)
	return count, err
}

// Flushed reports whether the kernel passes flushes on to a device, by its number: not to one that says that it has no cache that could be lost. If it says nothing, they are passed on.
func Flushed(device uint64) bool {
	text, _ := os.ReadFile("/sys/dev/block/" + Number(device) + "/queue/write_cache")
	return strings.TrimSpace(string(text)) != "write through"
}
