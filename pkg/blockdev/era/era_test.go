package era_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/era"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

const (
	mib  = 1 << 20
	size = 64 * mib
)

// home is the node of a leg, with one disk: the metadata at its beginning, and the leg behind.
type home struct {
	t     *testing.T
	name  string
	image string
}

func need(t *testing.T) {
	drivertest.NeedRoot(t)
	drivertest.NeedMapper(t)
	check.OK(t, era.Available())
}

// newHome starts a node with a disk that is a copy of an image, or empty.
func newHome(t *testing.T, name, from string) *home {
	h := &home{t, "test-" + name, filepath.Join(drivertest.Dir(t), "image")}
	check.OK(t, errors.Join(os.WriteFile(h.image, nil, 0o600), os.Truncate(h.image, 2*size+era.Room(size, mib))))
	if from != "" {
		copyFile(t, from, h.image)
	}
	loop := drivertest.Loop(t, h.image)
	t.Cleanup(func() { drivertest.Run(t, "losetup", "-d", loop) })
	var st unix.Stat_t
	check.OK(t, unix.Stat(loop, &st))
	room := era.Room(size, mib)
	h.device("-meta", []dm.Line{{Length: room, Kind: "linear", Text: dm.Number(st.Rdev) + " 0"}})
	h.device("-data", []dm.Line{{Length: 2 * size, Kind: "linear", Text: fmt.Sprint(dm.Number(st.Rdev), " ", room/512)}})
	t.Cleanup(func() { drivertest.Run(t, "dmsetup", "remove", "--retry", h.name) })
	h.make(size)
	return h
}

func (h *home) make(size int64) {
	h.t.Helper()
	check.OK(h.t, era.Make(h.name, "", size, mib, h.number("-meta"), h.number("-data")))
}

func (h *home) device(suffix string, table []dm.Line) {
	check.OK(h.t, dm.Make(h.name+suffix, "", table))
	h.t.Cleanup(func() { drivertest.Run(h.t, "dmsetup", "remove", "--retry", h.name+suffix) })
}

func (h *home) number(suffix string) uint64 {
	d, err := dm.Find(h.name + suffix)
	check.OK(h.t, err)
	return d.Number
}

// copyFile copies a disk as it is at this moment, as after a loss of power: without what is only in memory.
func copyFile(t *testing.T, from, to string) {
	in, err := os.Open(from)
	check.OK(t, err)
	defer in.Close()
	out, err := os.OpenFile(to, os.O_WRONLY, 0)
	check.OK(t, err)
	defer out.Close()
	_, err = io.Copy(out, in)
	check.OK(t, err)
}

func (h *home) write(blocks ...int64) {
	h.t.Helper()
	d, err := dm.Find(h.name)
	check.OK(h.t, err)
	f, err := dm.Open(d, os.O_WRONLY|unix.O_DIRECT)
	check.OK(h.t, err)
	defer f.Close()
	page, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	check.OK(h.t, err)
	for _, b := range blocks {
		_, err := f.WriteAt(page, b*mib+8192)
		check.OK(h.t, err)
	}
}

func (h *home) since(number uint32, blocks ...int64) {
	h.t.Helper()
	found, err := era.Since(context.Background(), h.name, number)
	check.OK(h.t, err)
	var got []int64
	for _, r := range found {
		for b := r.Offset / mib; b*mib < r.Offset+r.Length; b++ {
			got = append(got, b)
		}
	}
	if !slices.Equal(got, blocks) {
		h.t.Errorf("since era %d there are marks at %v, not %v", number, got, blocks)
	}
}

func (h *home) begin() uint32 {
	h.t.Helper()
	number, err := era.Begin(h.name)
	check.OK(h.t, err)
	return number
}

// TestHungBesideGrowth: a device whose disk does not answer is in the way of no other one that grows, or is asked.
func TestHungBesideGrowth(t *testing.T) {
	need(t)
	hung, other := newHome(t, "hung", ""), newHome(t, "other", "")
	check.OK(t, dm.Suspend(hung.name+"-meta"))
	wrote, asked := make(chan struct{}), make(chan struct{})
	go func() { defer close(wrote); hung.write(1) }() // the mark waits for the metadata
	time.Sleep(time.Second)
	go func() {
		defer close(asked)
		if _, err := era.StateOf(hung.name); err != nil {
			t.Errorf("when it answers again: %v", err)
		}
	}()
	time.Sleep(time.Second)
	select {
	case <-asked:
		t.Error("a device whose disk does not answer has told its state: this test shows nothing")
	default:
	}
	grown := make(chan error, 1)
	go func() {
		err := era.Grow(other.name, 2*size)
		_, failure := era.StateOf(other.name)
		grown <- errors.Join(err, failure)
	}()
	select {
	case err := <-grown:
		check.OK(t, err)
	case <-time.After(10 * time.Second):
		t.Error("another device has not grown")
	}
	check.OK(t, dm.Resume(hung.name+"-meta", dm.NoScan))
	<-wrote
	<-asked
}

// TestMarks: Since returns what was written since an era, while the device is in use.
func TestMarks(t *testing.T) {
	need(t)
	h := newHome(t, "era", "")
	h.since(1)
	h.write(3, 4, 5, 63)
	h.since(1, 3, 4, 5, 63)
	second := h.begin()
	h.since(second)
	h.write(4, 20)
	h.since(second, 4, 20)
	h.since(1, 3, 4, 5, 20, 63)
	h.write(20)
	third := h.begin()
	if third <= second {
		t.Errorf("after era %d comes %d", second, third)
	}
	h.since(third)
	h.write(20)
	h.since(third, 20)
	h.since(second, 4, 20)

	h.write(30)
	check.OK(t, era.Grow(h.name, 2*size))
	h.write(100)
	h.since(third, 20, 30, 100)

	var all []int64
	for b := range int64(2 * size / mib) {
		all = append(all, b)
	}
	h.since(0, all...) // since era 0: all that was ever written

	// As after a call that was cut short.
	check.OK(t, dm.Message(h.name, "take_metadata_snap"))
	h.since(third, 20, 30, 100)
	if err := era.Grow(h.name, 1<<40); !errors.Is(err, errdefs.ErrNoSpace) {
		t.Errorf("it grows to what its metadata have no room for: %v", err)
	}
	h.write(5)
	h.since(third, 5, 20, 30, 100)

	// A suspended device is not asked, as the kernel would answer only when it is resumed.
	check.OK(t, dm.Suspend(h.name))
	if _, err := era.StateOf(h.name); !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("asked while it is suspended: %v", err)
	}
	check.OK(t, dm.Resume(h.name, dm.NoScan))
	check.OK(t, errors.Join(era.End(h.name), era.End(h.name)))
	if _, err := era.StateOf(h.name); !errors.Is(err, errdefs.ErrPrecondition) {
		t.Errorf("asked after its end: %v", err)
	}
	h.write(6)
}

// TestMarksAsTool: whatever was written in whatever era, and wherever the kernel keeps that, the marks are those that era_invalidate finds.
func TestMarksAsTool(t *testing.T) {
	need(t)
	if _, err := exec.LookPath("era_invalidate"); err != nil {
		t.Skip(err)
	}
	h := newHome(t, "era", "")
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	blocks := int64(size / mib)
	var eras []uint32
	for round := range 30 {
		for range random.IntN(12) {
			h.write(random.Int64N(blocks))
		}
		eras = append(eras, h.begin())
		if round == 20 {
			check.OK(t, era.Grow(h.name, 2*size))
			blocks *= 2
		}
		since := eras[random.IntN(len(eras))]
		have, err := era.Since(t.Context(), h.name, since)
		check.OK(t, err)
		if want := h.tool(since); !slices.Equal(have, want) {
			t.Fatalf("round %d, since era %d: %v, and the tool says %v", round, since, have, want)
		}
	}
}

// tool returns what era_invalidate says. It reads a copy of the metadata while nobody writes: versions from 1.0.7 to 1.2.1 take no snapshot.
func (h *home) tool(since uint32) (all []dm.Range) {
	h.t.Helper()
	check.OK(h.t, errors.Join(dm.Suspend(h.name), dm.Resume(h.name, dm.NoScan))) // the present era ends, and is in the metadata
	metadata := filepath.Join(drivertest.Dir(h.t), "metadata")
	h.begin()
	d, err := dm.Find(h.name + "-meta")
	check.OK(h.t, err)
	drivertest.Run(h.t, "dd", "iflag=direct", "bs=4096", "status=none", "if="+d.Path(), "of="+metadata)
	loop := drivertest.Loop(h.t, metadata) // the tool opens it with O_DIRECT, which a tmpfs may not take
	said := drivertest.Run(h.t, "era_invalidate", "--written-since", fmt.Sprint(since), loop)
	drivertest.Run(h.t, "losetup", "-d", loop)
	for line := range strings.Lines(said) {
		line = strings.ReplaceAll(strings.TrimSpace(line), " = ", "=")
		var first, end int64
		if n, _ := fmt.Sscanf(line, `<block block="%d"/>`, &first); n == 1 {
			end = first + 1
		} else if n, _ := fmt.Sscanf(line, `<range begin="%d" end="%d"/>`, &first, &end); n != 2 {
			continue
		}
		all = append(all, dm.Range{Offset: first * mib, Length: (end - first) * mib})
	}
	return all
}

// TestMarksWithoutTools: the marks are read whatever thin-provisioning-tools the node has. era_invalidate of 1.0.7 to 1.2.1 says what the one here says.
func TestMarksWithoutTools(t *testing.T) {
	need(t)
	h := newHome(t, "era", "")
	h.write(3)
	second := h.begin()
	h.write(7)
	if tool, err := exec.LookPath("era_invalidate"); err == nil {
		answer := filepath.Join(t.TempDir(), "era_invalidate")
		check.OK(t, os.WriteFile(answer, []byte("#!/bin/sh\necho 'error: the following required arguments were not provided:' >&2\necho '  <INPUT>' >&2\nexit 2\n"), 0o755))
		check.OK(t, unix.Mount(answer, tool, "", unix.MS_BIND, ""))
		t.Cleanup(func() { drivertest.Unmount(t, tool) })
	}
	h.since(1, 3, 7)
	h.since(second, 7)
}

// TestMarksOutlivePower: at any moment, the mark of a write is on the disk before its data.
func TestMarksOutlivePower(t *testing.T) {
	need(t)
	h := newHome(t, "era", "")
	h.write(1, 2)
	second := h.begin()
	h.write(7)
	after := newHome(t, "after", h.image)
	after.since(1, 1, 2, 7)
	after.since(second, 7)
	after.write(9)
	after.since(second, 7, 9)

	h.write(8)
	again := newHome(t, "again", h.image) // a copy of the first one, beside it
	again.since(second, 7, 8)
}

// TestNothingKnown: if the marks cannot be told, there is an error.
func TestNothingKnown(t *testing.T) {
	need(t)
	if _, err := era.Since(context.Background(), "test-none", 0); err == nil {
		t.Error("a device that is not there has marks")
	}
	h := newHome(t, "era", "")
	h.write(1)
	h.device("-other", dm.Linear(h.number("-data"), size))
	if _, err := era.Since(context.Background(), h.name+"-other", 0); err == nil {
		t.Error("a device that is none has marks")
	}
	if _, err := era.Begin(h.name + "-other"); err == nil {
		t.Error("a device that is none has eras")
	}
	// The disk with the metadata fails: the write is not done, and there are no marks.
	check.OK(t, dm.Replace(h.name+"-meta", []dm.Line{{Length: era.Room(size, mib), Kind: "error"}}))
	d, err := dm.Find(h.name)
	check.OK(t, err)
	f, err := dm.Open(d, os.O_WRONLY)
	check.OK(t, err)
	defer f.Close()
	_, err = f.WriteAt(make([]byte, 4096), 5*mib)
	if err = errors.Join(err, f.Sync()); !errors.Is(err, unix.EIO) {
		t.Errorf("a write without its mark: %v", err)
	}
	if _, err := era.Since(context.Background(), h.name, 0); err == nil || strings.Contains(err.Error(), "panic") {
		t.Errorf("marks that cannot be read: %v", err)
	}
}

// TestGrowsWhileWritten: a device that grows while it is written to loses no mark.
func TestGrowsWhileWritten(t *testing.T) {
	need(t)
	h := newHome(t, "era", "")
	for round := range 20 {
		begun := h.begin()
		grown := make(chan error, 1)
		go func() { grown <- era.Grow(h.name, size+int64(round+1)*mib) }()
		var all []int64
		for b := range int64(size / mib) {
			h.write(b)
			all = append(all, b)
		}
		check.OK(t, <-grown)
		h.since(begun, all...)
	}
}
