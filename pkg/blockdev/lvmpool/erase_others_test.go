package lvmpool_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lvmpool"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// TestLVMErasesNoOther: if a device is another thin volume than lvm2 says, nothing is overwritten.
func TestLVMErasesNoOther(t *testing.T) {
	f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 96*pooltest.MiB), thin: true}
	f.url = f.group.ThinPool(t, "tp", "-L", "64M", "--poolmetadatasize", "4M") + "?reservePercent=0&overprovision=4"
	f.start()
	const size = 8 * pooltest.MiB
	a, b := pooltest.Vol("a"), pooltest.Vol("b")
	f.make(a, size)
	f.head(a, size)
	f.make(b, size)
	f.head(b, size)
	name := f.group.Device(a.String())
	drivertest.Run(t, "lvchange", "-q", "-ay", "-K", f.group.Name+"/"+a.String())
	table := strings.Fields(dmsetup(t, "table", name)) // 0 SIZE thin POOL NUMBER
	table[4] = strings.TrimSpace(drivertest.Run(t, "lvs", "--noheadings", "-o", "thin_id", f.group.Name+"/"+b.String()))
	dmsetup(t, "reload", name, "--table", strings.Join(table, " "))
	dmsetup(t, "resume", name)
	check.OK(t, f.pool.Erase(t.Context(), a))
	f.holds(b, 0, marked(headWord, blockdev.HeadSize))
}

// TestLVMEraseNotices: nothing is overwritten if somebody makes a snapshot of a thin volume, or releases the snapshot of the metadata, between the look at
// the metadata and the first write. During the writes lvm2 makes no snapshots.
func TestLVMEraseNotices(t *testing.T) {
	f := thinFixture(t, 400*pooltest.MiB)
	const size = 8 * pooltest.MiB
	f.make(pooltest.Vol("a"), size)
	f.head(pooltest.Vol("a"), size)
	pool := f.tpool()
	check.OK(t, lvmpool.Meanwhile(t.Context(), f.pool, func() {}))
	for what, do := range map[string]func(){
		"a snapshot": func() {
			drivertest.Run(t, "lvcreate", "-q", "-s", "-n", "by-hand", f.group.Name+"/"+pooltest.Vol("a").String())
		},
		"one without lvm2": func() {
			id := strings.TrimSpace(drivertest.Run(t, "lvs", "--noheadings", "-o", "thin_id", f.group.Name+"/"+pooltest.Vol("a").String()))
			dmsetup(t, "message", pool, "0", "create_snap 1000 "+id)
		},
		"a release and another": func() {
			f.make(pooltest.Vol("b"), size)
			dmsetup(t, "message", pool, "0", "release_metadata_snap")
			dmsetup(t, "message", pool, "0", "reserve_metadata_snap")
		},
	} {
		says(t, lvmpool.Meanwhile(t.Context(), f.pool, do), errdefs.ErrBusy)
		if t.Failed() {
			t.Fatal(what)
		}
	}
	dmsetup(t, "message", pool, "0", "delete 1000")
	drivertest.Run(t, "lvremove", "-q", "-y", f.group.Name+"/by-hand")

	byHand := func() error {
		return exec.Command("lvcreate", "-q", "--config", "global/wait_for_locks=0", "-s", "-n", "by-hand", f.group.Name+"/"+pooltest.Vol("a").String()).Run()
	}
	check.OK(t, lvmpool.Locked(t.Context(), f.pool, func() {
		if byHand() == nil {
			t.Error("lvm2 works while its lock is held")
		}
	}))
	check.OK(t, byHand())
	volume := f.group.Device(pooltest.Vol("a").String())
	drivertest.Run(t, "lvchange", "-q", "-ay", "-K", f.group.Name+"/"+pooltest.Vol("a").String())
	dmsetup(t, "suspend", volume)
	says(t, f.pool.Erase(t.Context(), pooltest.Vol("a")), errdefs.ErrUnavailable, volume+" is suspended")
	check.OK(t, f.pool.Erase(t.Context(), pooltest.Vol("a")))
	head := drivertest.Run(t, "bash", "-c", "lvchange -q -ay -K "+f.group.Name+"/by-hand && head -c 16 /dev/"+f.group.Name+"/by-hand")
	if strings.TrimSpace(head) != headWord {
		t.Errorf("a snapshot by hand has %q", head)
	}
	drivertest.Run(t, "lvremove", "-q", "-y", f.group.Name+"/by-hand")
}

// herd is many thin volumes whose bytes are known.
type herd struct {
	*lvmFixture
	block  int64 // block of the thin pool, in bytes
	mu     sync.Mutex
	random *rand.Rand
	have   map[blockdev.Ref][]byte
	hand   map[string][]byte // snapshots made by hand
	next   int
}

func (h *herd) intN(n int) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.random.IntN(n)
}

func (h *herd) number() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.next++
	return h.next
}

func (h *herd) name(kind blockdev.Kind) blockdev.Ref {
	return blockdev.Ref{Kind: kind, Key: fmt.Sprintf("%032x", h.number())}
}

func (h *herd) put(ref blockdev.Ref, b []byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if b == nil {
		delete(h.have, ref)
	} else {
		h.have[ref] = b
	}
}

// change writes to a volume, or discards, at random places, most of them in the part that Erase overwrites. Many volumes get the same bytes.
func (h *herd) change(ref blockdev.Ref, b []byte) error {
	device, err := h.pool.Attach(context.Background(), ref, blockdev.Attachment{})
	if err != nil {
		return err
	}
	b = bytes.Clone(b)
	block := h.block
	for range 6 {
		at := int64(h.intN(len(b)/int(block)*3/4)) * block
		switch h.intN(4) {
		case 0:
			err = discard(device.Path, at, b[at:at+block])
		case 1:
			n := copy(b[at:], marked(fmt.Sprint("own ", h.number()), block))
			err = writeDirect(device.Path, at, b[at:at+int64(n)])
		default: // like a header
			n := copy(b[at:], marked(headWord, 4096*int64(1+h.intN(16))))
			err = writeDirect(device.Path, at, b[at:at+int64(n)])
		}
		if err != nil {
			break
		}
	}
	h.put(ref, b)
	return errors.Join(err, device.Close())
}

// discard discards a range. The kernel may leave some of it as it was: it splits ranges if a block is no power of two, and thin pools keep what is only a
// part of a block. b is what the range has, before and afterwards.
func discard(device string, at int64, b []byte) error {
	out, err := exec.Command("blkdiscard", "-o", fmt.Sprint(at), "-l", fmt.Sprint(len(b)), device).CombinedOutput()
	if err != nil {
		return fmt.Errorf("blkdiscard: %w: %s", err, out)
	}
	have, err := readDevice(device, at, int64(len(b)))
	if err != nil {
		return err
	}
	const page = 4096
	for i := 0; i < len(b); i += page {
		switch now := have[i : i+page]; {
		case bytes.Equal(now, b[i:i+page]):
		case len(bytes.Trim(now, "\x00")) == 0:
			clear(b[i : i+page])
		default:
			return fmt.Errorf("what was discarded at byte %d is neither as it was nor zeros, but begins with %.16q", at+int64(i), now)
		}
	}
	return nil
}

func (h *herd) snapshot(origin blockdev.Ref, b []byte) error {
	ref := h.name(blockdev.Volume)
	if h.intN(2) == 0 {
		ref = h.name(blockdev.Snapshot)
	}
	_, err := h.pool.Create(context.Background(), blockdev.Spec{Ref: ref, Name: ref.String(), Size: int64(len(b)), Origin: origin})
	if errors.Is(err, errdefs.ErrNoSpace) {
		return nil
	}
	if err == nil {
		h.put(ref, b)
	}
	return err
}

// byHand makes a snapshot as an administrator does, without the pool.
func (h *herd) byHand(name string, origin blockdev.Ref, b []byte) error {
	name += strconv.Itoa(h.number())
	out, err := exec.Command("lvcreate", "-q", "-s", "-n", name, h.group.Name+"/"+origin.String()).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	h.mu.Lock()
	h.hand[name] = b
	h.mu.Unlock()
	return nil
}

// round does something with each volume, all at once. Some get a snapshot by hand while they are erased.
func (h *herd) round() error {
	all := slices.SortedFunc(maps.Keys(h.have), func(a, b blockdev.Ref) int { return strings.Compare(a.String(), b.String()) })
	before := maps.Clone(h.have)
	return errors.Join(pooltest.AtOnce(len(all), func(i int) error {
		ref := all[i]
		b := before[ref]
		switch what := h.intN(8); {
		case what < 3 && len(all) > 4 || len(all) > 14:
			var racing sync.WaitGroup
			if what == 0 {
				racing.Go(func() {
					time.Sleep(time.Duration(h.intN(100)) * time.Millisecond)
					_ = h.byHand("racing", ref, b) // the volume may be gone already
				})
			}
			err := h.pool.Erase(context.Background(), ref)
			for errors.Is(err, errdefs.ErrInUse) || errors.Is(err, errdefs.ErrBusy) || errors.Is(err, errdefs.ErrUnavailable) {
				time.Sleep(10 * time.Millisecond)
				err = h.pool.Erase(context.Background(), ref)
			}
			racing.Wait()
			h.put(ref, nil)
			return err
		case what < 5:
			return h.snapshot(ref, b)
		case what == 5 && len(h.hand) < 4:
			return h.byHand("hand", ref, b)
		default:
			if ref.Kind == blockdev.Snapshot {
				return nil
			}
			return h.change(ref, b)
		}
	})...)
}

// whole compares all bytes of all volumes. The beginning of a snapshot that was made by hand while its origin was erased may be gone.
func (h *herd) whole() {
	h.Helper()
	for ref, want := range h.have {
		h.holds(ref, 0, want)
	}
	for name, want := range h.hand {
		path := h.group.Name + "/" + name
		drivertest.Run(h, "lvchange", "-q", "-ay", "-K", path)
		have, err := os.ReadFile("/dev/" + path)
		check.OK(h, err)
		if !bytes.Equal(have, want) && !(strings.HasPrefix(name, "racing") && erasedAlone(have, want)) {
			h.Errorf("%s does not hold what its origin held", name)
		}
		drivertest.Run(h, "lvremove", "-q", "-y", path)
		delete(h.hand, name)
	}
}

// erasedAlone reports whether bytes are as they were, except that pages in the part that Erase overwrites may be zeros.
func erasedAlone(have, want []byte) bool {
	if !bytes.Equal(have[blockdev.HeadSize:], want[blockdev.HeadSize:]) {
		return false
	}
	const page = 4096
	for at := 0; at < blockdev.HeadSize; at += page {
		if !bytes.Equal(have[at:at+page], want[at:at+page]) && len(bytes.Trim(have[at:at+page], "\x00")) > 0 {
			return false
		}
	}
	return true
}

// TestLVMErasesAmongOthers: volumes and snapshots are erased, in whatever order, beside snapshots of them, also some that were made by hand, while others
// are written to, discarded and copied, and however full the thin pool is. No other volume loses a byte.
func TestLVMErasesAmongOthers(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	random := rand.New(rand.NewPCG(seed, 0))
	block := []int64{64 << 10, 192 << 10, 512 << 10}[random.IntN(3)]
	t.Logf("seed %d, blocks of %d bytes", seed, block)
	f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 384*pooltest.MiB), thin: true}
	f.url = f.group.ThinPool(t, "tp", "-L", "320M", "--poolmetadatasize", "8M", "--chunksize", fmt.Sprint(block, "b"), "-q") + "?overprovision=8&reservePercent=0"
	drivertest.Run(t, "lvchange", "-q", "--errorwhenfull", "y", f.group.Name+"/tp")
	f.start()
	h := &herd{lvmFixture: f, block: block, random: random, have: map[blockdev.Ref][]byte{}, hand: map[string][]byte{}}
	const size = 8 * pooltest.MiB
	more := func(n int) {
		for range n {
			ref := h.name(blockdev.Volume)
			f.make(ref, size)
			f.head(ref, size)
			h.have[ref] = append(marked(headWord, blockdev.HeadSize), marked(restWord, size-blockdev.HeadSize)...)
		}
	}
	rounds := 0
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end) && !t.Failed(); rounds++ {
		more(max(0, 6-len(h.have)))
		check.OK(t, h.round())
		h.whole()
	}
	t.Logf("%d rounds", rounds)

	// A volume that takes all the space that there is.
	full := h.name(blockdev.Volume)
	f.make(full, 512*pooltest.MiB)
	f.attached(full, false, func(device string) {
		if err := writeDirect(device, 0, marked("too much", 400*pooltest.MiB)); !errors.Is(err, unix.ENOSPC) && !errors.Is(err, unix.EIO) {
			t.Errorf("the thin pool is not full: %v", err)
		}
	})
	for ref := range maps.Clone(h.have) {
		if len(h.have) > 2 {
			check.OK(t, f.pool.Erase(t.Context(), ref))
			delete(h.have, ref)
		}
	}
	h.whole()
	f.holds(full, 0, marked("too much", 32*pooltest.MiB))
}
