package volume_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pools"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// changing is a raw volume that is changed at random, and what it held at each of its snapshots.
type changing struct {
	*testing.T
	l         *volume.Local
	random    *rand.Rand
	v         volume.Volume
	path      string
	snapshots []volume.Snapshot
	held      [][]byte
}

const page = 4096

// step changes the device at random: by writes, discards or zeros. Writes are not synced.
func (c *changing) step(f *os.File) {
	c.Helper()
	at := c.random.Int64N(c.v.Size/page) * page
	n := min(c.v.Size-at, (1+c.random.Int64N(64))*page)
	discard := func(request uint) error {
		of := [2]uint64{uint64(at), uint64(n)}
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), uintptr(request), uintptr(unsafe.Pointer(&of))); errno != 0 && errno != unix.EOPNOTSUPP {
			return errno
		}
		return nil
	}
	data := make([]byte, n)
	var err error
	switch c.random.IntN(6) {
	case 0:
		err = discard(unix.BLKDISCARD)
	case 1:
		err = discard(unix.BLKZEROOUT)
	case 2: // the same bytes again
		if _, err = f.ReadAt(data, at); err == nil {
			_, err = f.WriteAt(data, at)
		}
	case 3: // one byte
		_, err = f.WriteAt([]byte{byte(c.random.Uint32())}, at+c.random.Int64N(page))
	default:
		for i := range data {
			data[i] = byte(c.random.Uint32())
		}
		_, err = f.WriteAt(data, at)
	}
	check.OK(c, err)
}

// cut may grow the volume, does some steps, and makes a snapshot while the volume is attached.
func (c *changing) cut() {
	c.Helper()
	if c.random.IntN(3) == 0 {
		grown, err := c.l.Expand(c.T.Context(), c.v.ID, volume.Range{Required: c.v.Size + (1+c.random.Int64N(3))*4*mib})
		check.OK(c, err)
		c.v = grown
	}
	f, err := os.OpenFile(c.path, os.O_RDWR, 0)
	check.OK(c, err)
	if size, err := f.Seek(0, io.SeekEnd); err != nil || size < c.v.Size {
		c.Fatalf("the device has %d bytes of %d, %v", size, c.v.Size, err)
	}
	for range c.random.IntN(40) {
		c.step(f)
	}
	held := make([]byte, c.v.Size)
	_, err = f.ReadAt(held, 0)
	check.OK(c, errors.Join(err, f.Close()))
	s, err := c.l.CreateSnapshot(c.T.Context(), fmt.Sprint(c.v.Name, " ", len(c.snapshots)), c.v.ID)
	check.OK(c, err)
	c.snapshots, c.held = append(c.snapshots, s), append(c.held, held)
}

// covered checks the ranges of a list from an offset on: they have all bytes in which a and b differ, are in order, and end within b.
func (c *changing) covered(what string, from int64, a, b []byte, list func(yield func(blockdev.Extent) error) error) {
	c.Helper()
	listed, end := make([]bool, len(b)/page), int64(0)
	check.OK(c, list(func(e blockdev.Extent) error {
		if e.Length <= 0 || e.Offset < end || e.Offset+e.Length > int64(len(b)) || e.Offset+e.Length <= from || (e.Offset != from && e.Offset%page != 0) || (e.Offset+e.Length)%page != 0 {
			return fmt.Errorf("%s from byte %d: %+v after byte %d of %d", what, from, e, end, len(b))
		}
		end = e.Offset + e.Length
		for at := e.Offset / page * page; at < end; at += page {
			listed[at/page] = true
		}
		return nil
	}))
	a = append(bytes.Clone(a), make([]byte, max(0, len(b)-len(a)))...)
	for at := from / page * page; at < int64(len(b)); at += page {
		if !listed[at/page] && !bytes.Equal(a[max(at, from):at+page], b[max(at, from):at+page]) {
			c.Fatalf("%s from byte %d: what differs at byte %d is not listed", what, from, at)
		}
	}
}

// compare checks the ranges of the last snapshot: those that hold data, and those that changed since the first snapshot and since the one before. It also
// checks what a copy of it reads.
func (c *changing) compare() {
	c.Helper()
	last := len(c.snapshots) - 1
	target, held := c.snapshots[last], c.held[last]
	ctx := c.T.Context()
	for _, from := range []int64{0, c.random.Int64N(target.Size + 1)} {
		c.covered("allocated", from, nil, held, func(yield func(blockdev.Extent) error) error { return c.l.Allocated(ctx, target.ID, from, yield) })
		for i, base := range c.snapshots[:last] {
			if i > 0 && i < last-1 {
				continue
			}
			c.covered(fmt.Sprintf("changed since %d", i), from, c.held[i], held, func(yield func(blockdev.Extent) error) error {
				return c.l.Changed(ctx, base.ID, target.ID, from, yield)
			})
		}
	}
	// What a copy on another node reads.
	origin, err := c.l.Open(ctx, target.ID)
	check.OK(c, err)
	from := c.random.Int64N(target.Size/page) * page
	have := make([]byte, target.Size)
	check.OK(c, origin.Read(ctx, from, func(at int64, data []byte) error { copy(have[at:], data); return nil }))
	if !bytes.Equal(have[from:], held[from:]) {
		c.Fatalf("from byte %d other bytes are read of snapshot %d than were cut", from, last)
	}
}

// changedBlocks changes a volume in each of some pools at random, and compares its snapshots, one of which is deleted.
func changedBlocks(t *testing.T, l *volume.Local, rounds int, pools ...string) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	for i, pool := range pools {
		v, err := l.Create(t.Context(), volume.Spec{Name: "changing " + pool, Pool: pool, Size: volume.Range{Required: 16 * mib}})
		check.OK(t, err)
		device, err := l.AttachRaw(t.Context(), v, nil, true)
		check.OK(t, err)
		c := &changing{T: t, l: l, random: rand.New(rand.NewPCG(seed, uint64(i))), v: v, path: device.Path}
		check.OK(t, device.Close())
		for range rounds {
			c.cut()
			c.compare()
		}
		if err := l.Changed(t.Context(), c.snapshots[3].ID, c.snapshots[1].ID, 0, func(blockdev.Extent) error { return nil }); err == nil {
			t.Errorf("%s: a later snapshot is a base", pool)
		}
		check.OK(t, l.DeleteSnapshot(t.Context(), c.snapshots[2].ID)) // the next one may share blocks with it
		c.snapshots, c.held = append(c.snapshots[:2], c.snapshots[3:]...), append(c.held[:2], c.held[3:]...)
		c.compare()
		for _, s := range c.snapshots {
			check.OK(t, l.DeleteSnapshot(t.Context(), s.ID))
		}
		check.OK(t, errors.Join(l.Detach(t.Context(), v.ID), l.Delete(t.Context(), v.ID)))
	}
}

// TestChangedBlocks: all bytes in which two snapshots of a volume differ are listed, from any offset on, whatever was done in between, in pools of files on
// a filesystem that shares blocks and on one that does not.
func TestChangedBlocks(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := drivertest.Dir(t)
	urls := map[string]string{}
	for i, fs := range []string{"xfs", "ext4"} {
		mounted := filepath.Join(dir, fs)
		drivertest.MountNew(t, fs, mounted, 1<<30)
		urls[string(rune('a'+i))] = "file://" + filepath.Join(mounted, "pool") + "?reservePercent=0&create=1"
	}
	l, stop := over(t, urls)
	changedBlocks(t, l, 6, "a", "b")
	stop()
}

// TestLVMChangedBlocks is TestChangedBlocks for each kind of pool.
func TestLVMChangedBlocks(t *testing.T) {
	l, _ := kinds(t)
	changedBlocks(t, l, 4, "xfs", "linear", "thin", "plain")
}

// TestChangedProgress: the overview shows how far the comparison of two snapshots is that have to be read, until it ends.
func TestChangedProgress(t *testing.T) {
	dir := drivertest.Dir(t)
	mounted := filepath.Join(dir, "ext4")
	drivertest.MountNew(t, "ext4", mounted, 256*mib)
	pool, err := pools.Open(t.Context(), "a", "file://"+filepath.Join(mounted, "pool")+"?reservePercent=0&create=1")
	check.OK(t, err)
	t.Cleanup(func() { check.OK(t, pool.Close()) })
	l := start(t, 0, pool)
	v, err := l.Create(t.Context(), volume.Spec{Name: "v", Size: volume.Range{Required: 16 * mib}})
	check.OK(t, err)
	device, err := l.AttachRaw(t.Context(), v, nil, true)
	check.OK(t, err)
	var cuts []volume.Snapshot
	for i := range 2 {
		for at := range int64(2) {
			check.OK(t, drivertest.Content{Seed: fmt.Sprint(i), Offset: (4 + 8*at) * mib, Size: mib}.Write(device.Path))
		}
		cut, err := l.CreateSnapshot(t.Context(), fmt.Sprint(i), v.ID)
		check.OK(t, err)
		cuts = append(cuts, cut)
	}
	seen, far := false, int64(-1)
	check.OK(t, l.Changed(t.Context(), cuts[0].ID, cuts[1].ID, 0, func(blockdev.Extent) error {
		o, err := l.Overview(t.Context(), nil)
		check.OK(t, err)
		for _, s := range o.Snapshots {
			if s.ID == cuts[1].ID.String() && s.Progress != nil && far < 0 { // at the first range, which is told once the second one is found
				seen, far = s.Progress.Total == v.Size, s.Progress.Done
			}
		}
		if len(o.Snapshots) != 2 {
			t.Errorf("%d snapshots are shown, of 2", len(o.Snapshots))
		}
		return nil
	}))
	if running := l.Progress().Running(); !seen || far < 5*mib || far > 13*mib || len(running) > 0 {
		t.Errorf("it was shown: %v, to be at byte %d, and afterwards: %v", seen, far, running)
	}
	check.OK(t, errors.Join(device.Close(), l.Detach(t.Context(), v.ID)))
}
