package lvmpool_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// The words that are in the part that is erased, and behind it.
const (
	headWord = "head of it"
	restWord = "rest of it"
)

// head fills an object with words, the first of them in the part that is erased.
func (f *lvmFixture) head(ref blockdev.Ref, size int64) {
	f.Helper()
	f.write(ref, 0, append(marked(headWord, blockdev.HeadSize), marked(restWord, size-blockdev.HeadSize)...))
}

// onDisk reports whether a word is anywhere on the disks of the group.
func (f *lvmFixture) onDisk(word string) bool {
	f.Helper()
	for _, path := range f.group.Devices {
		drivertest.Run(f, "blockdev", "--flushbufs", path)
		disk, err := os.Open(path)
		check.OK(f, err)
		all, err := io.ReadAll(disk)
		check.OK(f, errors.Join(err, disk.Close()))
		if bytes.Contains(all, []byte(word)) {
			return true
		}
	}
	return false
}

// erased checks that the disks have nothing of what was to be erased. They must have something of the rest, or the check would prove nothing.
func (f *lvmFixture) erased(what string) {
	f.Helper()
	if f.onDisk(headWord) {
		f.Errorf("%s: its beginning is on the disk still", what)
	}
	if !f.onDisk(restWord) {
		f.Errorf("%s: nothing of it is on the disk, so this shows nothing", what)
	}
}

// cutShort begins a copy and ends it when its bytes are there.
func (f *lvmFixture) cutShort(ref, origin blockdev.Ref, size int64) {
	f.Helper()
	_, err := f.pool.Create(f.Context(), blockdev.Spec{Ref: ref, Name: "cut short", Size: size, Origin: origin, Prepare: func(context.Context, string) error { return context.Canceled }})
	says(f, err, context.Canceled)
}

// TestLVMErasedUnfinished: a copy is cut short, and then deleted, or found by a start: its beginning is overwritten.
func TestLVMErasedUnfinished(t *testing.T) {
	f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 96*pooltest.MiB)}
	f.url = f.group.URL() + "?reservePercent=0"
	f.start()
	ctx, size := t.Context(), int64(8*pooltest.MiB)
	for what, end := range map[string]func(blockdev.Ref){
		"deleted": func(ref blockdev.Ref) { check.OK(t, f.pool.Delete(ctx, ref)) },
		"found by a start": func(ref blockdev.Ref) {
			f.restart()
			if volumes := strings.Join(f.group.Volumes(t), " "); strings.Contains(volumes, ref.Key) {
				t.Errorf("the start left %s", volumes)
			}
		},
		"made anew": func(ref blockdev.Ref) {
			f.make(ref, size)
			check.OK(t, f.pool.Delete(ctx, ref))
		},
	} {
		f.make(pooltest.Vol("a"), size)
		f.head(pooltest.Vol("a"), size)
		f.copy(pooltest.Snap("b"), pooltest.Vol("a"), size)
		f.cutShort(pooltest.Vol("c"), pooltest.Snap("b"), size)
		end(pooltest.Vol("c"))
		f.holds(pooltest.Vol("a"), 0, marked(headWord, blockdev.HeadSize))
		check.OK(t, errors.Join(f.pool.Erase(ctx, pooltest.Snap("b")), f.pool.Erase(ctx, pooltest.Vol("a"))))
		f.erased(what)
	}
}

// TestLVMErasedThin: blocks that thin volumes share are overwritten with the last volume that has them. Blocks of others stay.
func TestLVMErasedThin(t *testing.T) {
	f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 96*pooltest.MiB), thin: true}
	f.url = f.group.ThinPool(t, "tp", "-L", "64M", "--poolmetadatasize", "4M") + "?reservePercent=0&overprovision=4"
	f.start()
	ctx, size := t.Context(), int64(8*pooltest.MiB)
	a, b, c := pooltest.Vol("a"), pooltest.Snap("b"), pooltest.Vol("c")
	f.make(pooltest.Vol("d"), size) // somebody else's
	f.write(pooltest.Vol("d"), 0, marked("another", size))
	for _, order := range [][]blockdev.Ref{{a, b, c}, {c, b, a}, {b, a, c}} {
		f.make(a, size)
		f.head(a, size)
		f.copy(b, a, size)
		f.copy(c, b, size)
		f.write(c, 64<<10, marked(headWord+" c", 64<<10)) // a block of its own
		for i, ref := range order {
			check.OK(t, f.pool.Erase(ctx, ref))
			for _, other := range order[i+1:] {
				f.holds(other, 0, marked(headWord, 64<<10))
				f.holds(other, 128<<10, marked(headWord, blockdev.HeadSize-128<<10))
				f.holds(other, blockdev.HeadSize, marked(restWord, size-blockdev.HeadSize))
			}
		}
		f.erased("one after another")
	}
	f.make(a, size)
	f.head(a, size)
	f.copy(b, a, size)
	f.copy(c, b, size)
	all := []blockdev.Ref{a, b, c}
	check.OK(t, errors.Join(pooltest.AtOnce(len(all), func(i int) error { return f.pool.Erase(ctx, all[i]) })...))
	f.erased("at once")
	f.holds(pooltest.Vol("d"), 0, marked("another", size))

	// An unfinished copy may be the last that has a block.
	f.make(a, size)
	f.head(a, size)
	f.cutShort(c, a, size)
	check.OK(t, f.pool.Erase(ctx, a))
	if !f.onDisk(headWord) {
		t.Error("nothing was left to a copy that is not finished")
	}
	pooltest.CapacityOf(t, f.pool) // it removes the copy
	f.erased("not finished")
	f.holds(pooltest.Vol("d"), 0, marked("another", size))
}

// TestLVMErasedFull: a thin pool is full, and takes no write that needs a block. Erase works all the same.
func TestLVMErasedFull(t *testing.T) {
	f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 96*pooltest.MiB), thin: true}
	f.url = f.group.ThinPool(t, "tp", "-L", "64M", "--poolmetadatasize", "4M", "-q") + "?overprovision=4&reservePercent=0"
	drivertest.Run(t, "lvchange", "-q", "--errorwhenfull", "y", f.group.Name+"/tp")
	f.start()
	ctx, size := t.Context(), int64(8*pooltest.MiB)
	f.make(pooltest.Vol("a"), size)
	f.head(pooltest.Vol("a"), size)
	f.copy(pooltest.Snap("b"), pooltest.Vol("a"), size) // so each write needs a new block
	f.make(pooltest.Vol("d"), 128*pooltest.MiB)
	f.attached(pooltest.Vol("d"), false, func(device string) {
		if err := writeDirect(device, 0, marked("too much", 80*pooltest.MiB)); err == nil {
			t.Error("the thin pool is not full")
		}
	})
	f.poolIll("PoolFull")
	check.OK(t, errors.Join(f.pool.Erase(ctx, pooltest.Snap("b")), f.pool.Erase(ctx, pooltest.Vol("a"))))
	f.erased("full")
}

// TestLVMErasedLater: while nobody can know which blocks are shared, a volume that has to be erased is not deleted.
func TestLVMErasedLater(t *testing.T) {
	f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 96*pooltest.MiB), thin: true}
	f.url = f.group.ThinPool(t, "tp", "-L", "64M", "--poolmetadatasize", "4M") + "?reservePercent=0"
	f.start()
	ctx, size := t.Context(), int64(8*pooltest.MiB)
	f.make(pooltest.Vol("a"), size)
	f.head(pooltest.Vol("a"), size)
	tell := func(message string) {
		drivertest.Run(t, "dmsetup", "message", f.tpool(), "0", message)
	}
	tell("reserve_metadata_snap") // by somebody else
	says(t, f.pool.Erase(ctx, pooltest.Vol("a")), errdefs.ErrInUse, "release_metadata_snap")
	f.holds(pooltest.Vol("a"), 0, marked(headWord, blockdev.HeadSize))
	tell("release_metadata_snap")
	check.OK(t, f.pool.Erase(ctx, pooltest.Vol("a")))
	f.erased("later")
}

// TestLVMErasedCut: a volume is written to while it is copied. The earlier bytes of its beginning, which the cut kept, are gone with the cut.
func TestLVMErasedCut(t *testing.T) {
	f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 96*pooltest.MiB)}
	f.url = f.group.URL() + "?reservePercent=0"
	f.start()
	ctx, size := t.Context(), int64(8*pooltest.MiB)
	a, b := pooltest.Vol("a"), pooltest.Snap("b")
	for what, end := range map[string]func(){
		"copied":      func() { f.copy(b, a, size) },
		"deleted":     func() { check.OK(t, f.pool.Delete(ctx, b)) },
		"the start's": f.restart,
	} {
		f.make(a, size)
		f.head(a, size)
		device := f.handOut(a)
		cut := blockdev.Spec{Ref: b, Name: b.String(), Size: size, Origin: a, Cut: func(context.Context) error {
			return errors.Join(writeDirect(device.Path, 0, marked("other", blockdev.HeadSize)), context.Canceled)
		}}
		says(t, pooltest.Second(f.pool.Create(ctx, cut)), context.Canceled)
		if !f.onDisk(headWord) {
			t.Error("the cut kept nothing, so this shows nothing")
		}
		end()
		check.OK(t, errors.Join(device.Close(), f.stack(a).Detach(ctx), f.pool.Erase(ctx, b), f.pool.Erase(ctx, a)))
		f.erased(what)
	}
}
