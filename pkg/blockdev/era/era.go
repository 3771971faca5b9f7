// Package era makes and reads devices of the target era of the device mapper: such a device shows another one, and records which of its blocks were
// written, and since when. The node of a leg has one below what it exports (docs/replication.md, docs/decisions/replicas.md).
//
// The kernel counts eras, from 1 on. It marks a block with the era in which it is written, durably, before the write goes on. The marks are in the
// metadata, on a device of its own: they outlive crashes and losses of power. Nothing clears them; a caller that does not need the marks of earlier eras
// does not ask for them.
package era

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/direct"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/persistent"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/queue"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

const (
	target = "era"
	page   = 4096 // size of a page of the metadata, in bytes
)

// Block returns how many bytes are marked at a time in a new device of a size: 1 MiB, or more if there were more than 1<<20 blocks. It stays when the
// device grows.
func Block(size int64) int64 {
	b := int64(1 << 20)
	for size/b > 1<<20 {
		b *= 2
	}
	return b
}

// Room returns how many bytes of metadata a device needs, a multiple of 4 KiB: for each block 4 bytes, and a bit in each era that is not digested yet, in
// pages that are written to new places and not in place.
func Room(size, block int64) int64 { return 4<<20 + (size/block*8+4095)/4096*4096 }

// Available returns errdefs.ErrUnsupported unless the kernel has the target.
func Available() error {
	if err := dm.HasTarget(target); err != nil {
		return fmt.Errorf("%w: %w; load the module dm-era", errdefs.ErrUnsupported, err)
	}
	return nil
}

// swapping has a lock for each device, by its name. It is held while the table of the device is replaced, and for reading while the kernel is asked about it.
// A question in the moment in which the device is suspended for its new table would wait for ever, and so would the replacement. A question waits for the
// device's disks, too, so the lock of one device must not be in the way of others. The locks stay, as few bytes as they are.
var swapping sync.Map

// swap returns the lock of a device.
func swap(name string) *sync.RWMutex {
	lock, _ := swapping.LoadOrStore(name, &sync.RWMutex{})
	return lock.(*sync.RWMutex)
}

// Make makes a device over below, with its metadata on another device. Metadata that begin with zeros are new (Clear); any other have to be those of this
// device, with the same block. An era begins each time that the device is made, or grows.
//
// The device takes no discards, nor does what is over it: the kernel would mark only the first block of each.
func Make(name, uuid string, size, block int64, metadata, below uint64) error {
	if err := dm.Make(name, uuid, lines(size, block, metadata, below)); err != nil {
		return err
	}
	return NoDiscards(name)
}

func lines(size, block int64, metadata, below uint64) []dm.Line {
	return []dm.Line{{Length: size, Kind: target, Text: fmt.Sprintf("%s %s %d", dm.Number(metadata), dm.Number(below), block/512)}}
}

// NoDiscards has a device take no discards. It is the last step of Make and of Grow, to be called again if a crash may have come before it.
func NoDiscards(name string) error {
	d, err := dm.Find(name)
	if err == nil && d == nil {
		err = fmt.Errorf("%w: there is no device %s", errdefs.ErrNotFound, name)
	}
	if err != nil {
		return err
	}
	return queue.Write(d.Path(), "discard_max_bytes", "0")
}

// Grow gives a device, which may be in use, a larger size, which the device below has already. errdefs.ErrNoSpace if its metadata have no room for that;
// then nothing has changed. After any other error the caller has to end it (End).
func Grow(name string, size int64) error {
	t, err := tableOf(name)
	if err != nil {
		return err
	}
	have, err := sizeOf(t.metadata)
	if err != nil {
		return err
	}
	if need := Room(size, t.block); have < need {
		return fmt.Errorf("%w: the metadata of device %s have %d bytes, and need %d for %d", errdefs.ErrNoSpace, name, have, need, size)
	}
	swap(name).Lock()
	defer swap(name).Unlock()
	// Before the load: a table that is loaded reads the metadata from the disk, and only a suspension writes all of them there.
	if err := dm.Suspend(name); err != nil {
		return err
	}
	err = errors.Join(dm.Load(name, lines(size, t.block, t.metadata, t.below)), dm.Resume(name, dm.NoScan))
	if err != nil {
		return err
	}
	return NoDiscards(name)
}

// End makes a device, which may be in use, show what is below it, and mark nothing. If it is no device of this target, it does nothing.
func End(name string) error {
	t, err := tableOf(name)
	if errors.Is(err, errdefs.ErrPrecondition) {
		return nil
	}
	d, failure := dm.Find(name)
	if err = errors.Join(err, failure); err != nil || d == nil {
		return err
	}
	size, err := d.Size()
	if err != nil {
		return err
	}
	swap(name).Lock()
	defer swap(name).Unlock()
	return dm.Make(name, "", dm.Linear(t.below, size))
}

// Clear makes a device new metadata, durably.
func Clear(path string) error {
	return metadata(path, os.O_RDWR, func(f *os.File, page []byte) error {
		if _, err := f.WriteAt(page, 0); err != nil {
			return err
		}
		return f.Sync()
	})
}

// Last returns the last era that began by the metadata on a device, which nobody uses; false: they are new. Whether they are good otherwise, the kernel finds
// when a device is made with them.
func Last(path string) (era uint32, begun bool, err error) {
	err = metadata(path, os.O_RDONLY, func(f *os.File, page []byte) error {
		if _, err := f.ReadAt(page, 0); err != nil {
			return err
		}
		if begun = slices.ContainsFunc(page, func(b byte) bool { return b != 0 }); !begun {
			return nil
		}
		s, err := superblockAt(persistent.File{File: f}, 0)
		era = s.era
		return err
	})
	return era, begun, err
}

// metadata opens a device for metadata past the page cache, as the kernel writes there, and calls use with it and with memory for its first page.
func metadata(path string, flags int, use func(f *os.File, page []byte) error) error {
	first, free, err := direct.Memory(page)
	if err != nil {
		return err
	}
	defer free()
	f, err := direct.Open(path, flags)
	if err == nil {
		err = errors.Join(use(f, first), f.Close())
	}
	if err != nil {
		return fmt.Errorf("metadata of marks at %s: %w", path, errdefs.FromErrno(err))
	}
	return nil
}

// Begin begins an era, and returns its number. All later writes are marked in it; those under way are marked in it, or in the era before.
func Begin(name string) (era uint32, err error) {
	if err := tell(name, "checkpoint"); err != nil {
		return 0, err
	}
	state, err := StateOf(name)
	return state.Era, err
}

// awake returns errdefs.ErrUnavailable for a device that is suspended, which would not answer until it is resumed. The caller holds the device's lock
// (swap).
func awake(name string) error {
	d, err := dm.Find(name)
	if err == nil && d == nil {
		err = fmt.Errorf("%w: there is no device %s", errdefs.ErrNotFound, name)
	}
	if err == nil && d.Suspended {
		err = fmt.Errorf("%w: device %s is suspended; end that with: dmsetup resume %s", errdefs.ErrUnavailable, name, name)
	}
	return err
}

// tell is dm.Message for a device that is not suspended.
func tell(name, message string) error {
	swap(name).RLock()
	defer swap(name).RUnlock()
	if err := awake(name); err != nil {
		return err
	}
	return dm.Message(name, message)
}

// status is dm.Target for a device that is not suspended.
func status(name string) (kind, text string, err error) {
	swap(name).RLock()
	defer swap(name).RUnlock()
	if err := awake(name); err != nil {
		return "", "", err
	}
	return dm.Target(name)
}

// State is the state of a device.
type State struct {
	Era       uint32 // the present one
	Block     int64  // how many bytes are marked at a time
	Used, All int64  // blocks of its metadata
}

// StateOf returns the state of a device. errdefs.ErrPrecondition if its target is another one, errdefs.ErrUnavailable if it is suspended,
// errdefs.ErrDataLoss if its metadata have failed.
func StateOf(name string) (s State, err error) {
	kind, text, err := status(name)
	if err == nil && kind != target {
		err = fmt.Errorf("%w: its target is %q", errdefs.ErrPrecondition, kind)
	}
	// "8 15/512 6 -"; "Error" if its metadata failed
	if err == nil {
		if _, failure := fmt.Sscanf(text, "%d %d/%d %d", new(int64), &s.Used, &s.All, &s.Era); failure != nil {
			err = fmt.Errorf("%w: the kernel says of it %q", errdefs.ErrDataLoss, text)
		}
	}
	if err == nil {
		var t table
		t, err = tableOf(name)
		s.Block = t.block
	}
	if err != nil {
		return State{}, fmt.Errorf("era of device %s: %w", name, err)
	}
	return s, nil
}

// table is what the table of a device has.
type table struct {
	metadata, below uint64
	block           int64
}

func tableOf(name string) (t table, err error) {
	kind, text, err := dm.Table(name)
	if err != nil {
		return table{}, err
	}
	var numbers [4]uint32
	if _, failure := fmt.Sscanf(text, "%d:%d %d:%d %d", &numbers[0], &numbers[1], &numbers[2], &numbers[3], &t.block); failure != nil || kind != target {
		return table{}, fmt.Errorf("%w: the target of device %s is %q", errdefs.ErrPrecondition, name, kind)
	}
	return table{unix.Mkdev(numbers[0], numbers[1]), unix.Mkdev(numbers[2], numbers[3]), t.block * 512}, nil
}

// pathOf returns the path of a block device.
func pathOf(number uint64) (string, error) {
	path, err := os.Readlink(dm.Sysfs(number))
	return "/dev/" + filepath.Base(path), errdefs.FromErrno(err)
}

// sizeOf returns the size of a block device, in bytes.
func sizeOf(number uint64) (int64, error) {
	text, err := os.ReadFile(dm.Sysfs(number) + "/size")
	if err != nil {
		return 0, errdefs.FromErrno(err)
	}
	sectors, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	return sectors * 512, err
}
