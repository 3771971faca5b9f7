// Package pooltest is the one suite that every blockdev.Pool passes: each clause of
// the interface's comments is a test here, on real devices.
package pooltest

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/progress"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/device"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Open opens a pool that keeps everything in a directory, or under its name: opened again with the same directory, it finds what it left there. The suite
// closes it. It needs at least 300 MiB. Other users of its storage make the suite fail.
type Open func(t testing.TB, dir string) blockdev.Pool

// Run runs the suite, once for thick and once for thin volumes (if the pool has them).
func Run(t *testing.T, open Open) {
	drivertest.NeedRoot(t)
	var has map[bool]bool
	t.Run("Provisioning", func(t *testing.T) { has = provisioning(start(t, open, false)) })
	for _, thin := range []bool{false, true} {
		if !has[thin] {
			continue
		}
		t.Run(string(blockdev.ProvisioningOf(thin)), func(t *testing.T) {
			for _, clause := range clauses {
				t.Run(clause.name, func(t *testing.T) { clause.test(start(t, open, thin)) })
			}
		})
	}
}

var clauses = []struct {
	name string
	test func(f *fixture)
}{
	{"Create", create},
	{"CreateRefuses", createRefuses},
	{"KeysAreNoPaths", keysAreNoPaths},
	{"NoSpace", noSpace},
	{"Delete", deleted},
	{"Copies", copies},
	{"Filled", filled},
	{"CopyRefuses", copyRefuses},
	{"CopyWhileWritten", copyWhileWritten},
	{"CopyQuiesced", copyQuiesced},
	{"CopyUnchanged", copyUnchanged},
	{"Prepare", prepare},
	{"Progress", reports},
	{"Cancelled", cancelled},
	{"AttachModes", attachModes},
	{"AttachAttributes", attachAttributes},
	{"NotKept", notKept},
	{"Kept", kept},
	{"DetachHeld", detachHeld},
	{"NoRecord", noRecord},
	{"Expand", expand},
	{"ExpandRefuses", expandRefuses},
	{"List", list},
	{"Beside", beside},
	{"SetLabels", setLabels},
	{"SetLabelsBeside", setLabelsBeside},
	{"SetLabelsBesideDelete", setLabelsBesideDelete},
	{"Reopen", reopen},
	{"Capacity", capacity},
	{"Used", used},
	{"Concurrent", concurrent},
	{"Health", health},
	{"Differ", differ},
	{"Prover", prover},
	{"Suspend", suspend},
}

// size of most volumes here, in bytes; a multiple of every pool's own granularity.
const size = 8 << 20

// fixture is an open pool, and the test that uses it.
type fixture struct {
	*testing.T
	pool   blockdev.Pool
	stacks *device.Stacks
	open   Open
	dir    string
	thin   bool
}

func start(t *testing.T, open Open, thin bool) *fixture {
	t.Helper()
	f := &fixture{T: t, stacks: device.New(), open: open, dir: drivertest.Dir(t), thin: thin}
	f.pool = open(t, f.dir)
	t.Cleanup(f.finish)
	return f
}

// has reports whether the pool has volumes of this provisioning.
func (f *fixture) has() bool {
	f.Helper()
	spec := f.spec("probe")
	_, err := f.pool.Create(f.Context(), spec)
	if errors.Is(err, errdefs.ErrUnsupported) {
		return false
	}
	f.must(err)
	f.must(f.pool.Delete(f.Context(), spec.Ref))
	return true
}

// provisioning: a pool has thick volumes, or thin ones, or both. Without a Provisioning it makes one of a kind that it has.
func provisioning(f *fixture) (has map[bool]bool) {
	has = map[bool]bool{}
	for _, f.thin = range []bool{false, true} {
		has[f.thin] = f.has()
	}
	spec := f.spec("any")
	spec.Provisioning = blockdev.AnyProvisioning
	if r := f.make(spec); !has[r.Thin] {
		f.Errorf("a volume of any provisioning is thin: %v, and such are refused", r.Thin)
	}
	return has
}

// finish removes all objects, and checks that nothing of them is left.
func (f *fixture) finish() {
	ctx := context.Background()
	for _, kind := range []blockdev.Kind{blockdev.Volume, blockdev.Snapshot, blockdev.Marks} {
		records, err := f.pool.List(ctx, kind, "", 0)
		if err != nil {
			f.Error(err)
		}
		for _, r := range records {
			if err := errors.Join(f.stack(r.Ref).Detach(ctx), f.pool.Delete(ctx, r.Ref)); err != nil {
				f.Error(err)
			}
		}
	}
	if c, err := f.pool.Capacity(ctx); err != nil || c.Promised != 0 {
		f.Errorf("with everything deleted, %d bytes are promised, error %v", c.Promised, err)
	}
	if err := f.pool.Close(); err != nil {
		f.Errorf("close the pool: %v", err)
	}
}

// restart closes the pool and opens it again.
func (f *fixture) restart() {
	f.Helper()
	f.must(f.pool.Close())
	f.pool = f.open(f.T, f.dir)
	f.must(f.stacks.Recover(f.Context(), f.pool))
}

func (f *fixture) must(err error) {
	f.Helper()
	check.OK(f, err)
}

// fails checks that an error wraps the wanted one, and no other sentinel.
func (f *fixture) fails(err, want error, what string) {
	f.Helper()
	Fails(f, err, want, what)
}

// Volume and Snapshot name objects by a word.
func named(kind blockdev.Kind, word string) blockdev.Ref {
	key := hex.EncodeToString([]byte(word))
	return blockdev.Ref{Kind: kind, Key: key + strings.Repeat("0", 32-len(key))}
}

func vol(word string) blockdev.Ref  { return named(blockdev.Volume, word) }
func snap(word string) blockdev.Ref { return named(blockdev.Snapshot, word) }

func (f *fixture) spec(word string) blockdev.Spec {
	return blockdev.Spec{Ref: vol(word), Name: word, Size: size, Provisioning: blockdev.ProvisioningOf(f.thin)}
}

func (f *fixture) copySpec(to, from blockdev.Ref, size int64) blockdev.Spec {
	return blockdev.Spec{Ref: to, Name: to.String(), Size: size, Provisioning: blockdev.ProvisioningOf(f.thin), Origin: from}
}

func (f *fixture) make(spec blockdev.Spec) blockdev.Record {
	f.Helper()
	record, err := f.pool.Create(f.Context(), spec)
	f.must(err)
	return record
}

func (f *fixture) copy(to, from blockdev.Ref, size int64) blockdev.Record {
	f.Helper()
	return f.make(f.copySpec(to, from, size))
}

// How a volume is attached: to be mounted, and to be handed out.
var (
	toMount   = device.Options{}
	toHandOut = device.Options{Keep: true}
)

// stack returns the stack that a driver would use an object's devices through.
func (f *fixture) stack(ref blockdev.Ref) device.Stack { return f.stacks.Of(f.pool, ref) }

func (f *fixture) attach(ref blockdev.Ref, o device.Options) blockdev.Device {
	f.Helper()
	d, err := f.stack(ref).Attach(f.Context(), o)
	f.must(err)
	f.Cleanup(func() { _ = d.Close() })
	return d
}

// reader attaches an object for reading.
func (f *fixture) reader(ref blockdev.Ref) blockdev.Device {
	f.Helper()
	return Attach(f, f.pool, ref, blockdev.Attachment{ReadOnly: true})
}

func (f *fixture) detach(ref blockdev.Ref) {
	f.Helper()
	f.must(f.stack(ref).Detach(f.Context()))
}

func (f *fixture) attached(ref blockdev.Ref) []blockdev.Device {
	f.Helper()
	devices, err := f.stack(ref).Attached(f.Context())
	f.must(err)
	return devices
}

func (f *fixture) expand(ref blockdev.Ref, size int64) (blockdev.Record, error) {
	f.Helper()
	r, err := f.pool.Expand(f.Context(), ref, size)
	if err == nil {
		err = f.stack(ref).Grow(f.Context(), nil)
	}
	return r, err
}

func (f *fixture) orphans() map[blockdev.Ref][]blockdev.Device {
	f.Helper()
	orphans, err := f.stacks.Orphans(f.Context(), f.pool)
	f.must(err)
	return orphans
}

// gone waits until an object has no device.
func (f *fixture) gone(ref blockdev.Ref) {
	f.Helper()
	for deadline := time.Now().Add(time.Minute); len(f.attached(ref)) > 0; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			f.Fatalf("%s is still attached: %v", ref, f.attached(ref))
		}
	}
}

func (f *fixture) promised() int64 {
	f.Helper()
	return f.capacity().Promised
}

func (f *fixture) capacity() blockdev.Capacity {
	f.Helper()
	c, err := f.pool.Capacity(f.Context())
	f.must(err)
	return c
}

// absent checks that no call returns an object.
func (f *fixture) absent(ref blockdev.Ref) {
	f.Helper()
	_, err := f.pool.Get(f.Context(), ref)
	f.fails(err, errdefs.ErrNotFound, "Get")
	records, err := f.pool.List(f.Context(), ref.Kind, "", 0)
	f.must(err)
	if slices.ContainsFunc(records, func(r blockdev.Record) bool { return r.Ref == ref }) {
		f.Fatalf("List has %s", ref)
	}
}

// data returns bytes that no other call returns.
func data(seed uint64, length int) []byte {
	b := make([]byte, length)
	r := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8), 1})
	_, _ = r.Read(b)
	return b
}

// write writes to an object through a device, durably.
func (f *fixture) write(ref blockdev.Ref, offset int64, b []byte) {
	f.Helper()
	device := f.attach(ref, toMount)
	defer device.Close()
	writeDevice(f, device.Path, offset, b)
}

func writeDevice(f *fixture, path string, offset int64, b []byte) {
	f.Helper()
	file, err := os.OpenFile(path, os.O_WRONLY, 0)
	f.must(err)
	defer file.Close()
	_, err = file.WriteAt(b, offset)
	f.must(err)
	f.must(file.Sync())
}

// read reads a whole object through a device of its own.
func (f *fixture) read(ref blockdev.Ref) []byte {
	f.Helper()
	device := f.reader(ref)
	defer device.Close()
	return readDevice(f, device.Path, device.Size)
}

// readDevice reads past the page cache, so it sees what was written through another device of the object.
func readDevice(f *fixture, path string, length int64) []byte {
	f.Helper()
	file, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECT, 0)
	f.must(err)
	defer file.Close()
	b, err := unix.Mmap(-1, 0, int(length), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	f.must(err)
	defer func() { f.must(unix.Munmap(b)) }()
	for n := 0; n < len(b); {
		m, err := file.ReadAt(b[n:], int64(n))
		if n += m; n < len(b) {
			f.must(err)
		}
	}
	return bytes.Clone(b)
}

// holds checks that an object has length bytes: content first, then zeros.
func (f *fixture) holds(ref blockdev.Ref, length int64, content []byte) {
	f.Helper()
	have := f.read(ref)
	if int64(len(have)) != length {
		f.Fatalf("the device of %s has %d bytes, want %d", ref, len(have), length)
	}
	want := make([]byte, length)
	copy(want, content)
	if !bytes.Equal(have, want) {
		at := 0
		for have[at] == want[at] {
			at++
		}
		f.Fatalf("%s differs from what it should hold at byte %d", ref, at)
	}
}

// equal compares records, and their times as moments. (They are printed with %#v, as with %+v a record is only its Ref.)
func equal(a, b blockdev.Record) bool {
	if !a.Created.Equal(b.Created) || !maps.Equal(a.Labels, b.Labels) {
		return false
	}
	a.Created, b.Created, a.Labels, b.Labels = time.Time{}, time.Time{}, nil, nil
	return reflect.DeepEqual(a, b)
}

func create(f *fixture) {
	spec := f.spec("a")
	spec.Labels = map[string]string{"color": "blue", "empty": ""}
	before := time.Now()
	record := f.make(spec)
	want := blockdev.Record{Ref: spec.Ref, Name: "a", Size: size, Thin: f.thin, Created: record.Created, Ready: true, Labels: maps.Clone(spec.Labels)}
	if !equal(record, want) || record.Created.Before(before.Add(-time.Second)) || record.Created.After(time.Now().Add(time.Second)) {
		f.Fatalf("Create: %#v, want %#v, created about %v", record, want, before)
	}
	f.holds(spec.Ref, size, nil)

	spec.Labels["color"], record.Labels["color"] = "red", "green" // our copy, not the pool's
	have, err := f.pool.Get(f.Context(), spec.Ref)
	f.must(err)
	if !equal(have, want) {
		f.Fatalf("Get: %#v, want %#v", have, want)
	}

	// Again, also with another size and other labels, which are for the caller to compare.
	spec.Size *= 2
	if have := f.make(spec); !equal(have, want) {
		f.Fatalf("Create again: %#v, want %#v", have, want)
	}
	if n := f.promised(); n != size {
		f.Fatalf("%d bytes are promised, want %d", n, size)
	}

	other := f.spec("a")
	other.Name = "A"
	_, err = f.pool.Create(f.Context(), other)
	f.fails(err, errdefs.ErrExists, "another name under that key")
	f.make(f.spec("b"))
	_, err = f.pool.Create(f.Context(), func() blockdev.Spec { s := f.spec("a"); s.Origin = vol("b"); return s }())
	f.fails(err, errdefs.ErrExists, "another origin")
	if have, err := f.pool.Get(f.Context(), spec.Ref); err != nil || !equal(have, want) {
		f.Fatalf("after refusals: %#v, %v, want %#v", have, err, want)
	}
}

func createRefuses(f *fixture) {
	for _, n := range []int64{-blockdev.Granularity, 0, 1, size + 1, size + 512, blockdev.MaxSize + blockdev.Granularity, 1 << 62} {
		spec := f.spec("a")
		spec.Size = n
		_, err := f.pool.Create(f.Context(), spec)
		f.fails(err, errdefs.ErrOutOfRange, fmt.Sprintf("%d bytes", n))
		f.absent(spec.Ref)
	}
}

// keysAreNoPaths: no call takes an invalid key, and none touches a file for it.
func keysAreNoPaths(f *fixture) {
	var files []string
	for _, name := range []string{"x", "x.img", "x.rec"} {
		path := filepath.Join(f.dir, name)
		f.must(os.WriteFile(path, []byte("mine"), 0o600))
		files = append(files, path)
	}
	good := strings.Repeat("a", 32)
	refs := []blockdev.Ref{{}, {Kind: blockdev.Volume}, {Key: good}, {Kind: "volumes", Key: good}, {Kind: "../vol", Key: good}}
	for _, key := range []string{"x", "../x", "../../x", "/etc/passwd", "..", ".", strings.ToUpper(good), good + "a", good[1:], good[1:] + "g", good[1:] + "/",
		good[1:] + "\x00", good + "\n", " " + good[1:], "../" + good[3:]} {
		refs = append(refs, blockdev.Ref{Kind: blockdev.Volume, Key: key}, blockdev.Ref{Kind: blockdev.Snapshot, Key: key})
	}
	origin := f.make(f.spec("a")).Ref
	ctx := f.Context()
	calls := map[string]func(ref blockdev.Ref) error{
		"Create": func(ref blockdev.Ref) error {
			_, err := f.pool.Create(ctx, blockdev.Spec{Ref: ref, Name: "x", Size: size, Provisioning: blockdev.ProvisioningOf(f.thin)})
			return err
		},
		"Create from": func(ref blockdev.Ref) error {
			if ref == (blockdev.Ref{}) {
				return errdefs.ErrInvalid // it is no origin
			}
			_, err := f.pool.Create(ctx, f.copySpec(vol("b"), ref, size))
			return err
		},
		"Delete": func(ref blockdev.Ref) error { return f.pool.Delete(ctx, ref) },
		"Get":    func(ref blockdev.Ref) error { _, err := f.pool.Get(ctx, ref); return err },
		"SetLabels": func(ref blockdev.Ref) error {
			_, err := f.pool.SetLabels(ctx, ref, func(map[string]string) error { return nil })
			return err
		},
		"Expand":   func(ref blockdev.Ref) error { _, err := f.pool.Expand(ctx, ref, 2*size); return err },
		"Attach":   func(ref blockdev.Ref) error { _, err := f.pool.Attach(ctx, ref, blockdev.Attachment{}); return err },
		"Attached": func(ref blockdev.Ref) error { _, err := f.pool.Attached(ctx, ref); return err },
		"Detach":   func(ref blockdev.Ref) error { return f.pool.Detach(ctx, ref) },
		"Health":   func(ref blockdev.Ref) error { _, err := f.pool.Health(ctx, ref); return err },
	}
	if d, ok := f.pool.(blockdev.Differ); ok {
		nothing := func(blockdev.Extent) error { return nil }
		calls["Allocated"] = func(ref blockdev.Ref) error { return d.Allocated(ctx, ref, 0, nothing) }
		calls["Changed from"] = func(ref blockdev.Ref) error { return d.Changed(ctx, ref, origin, 0, nothing) }
		calls["Changed to"] = func(ref blockdev.Ref) error { return d.Changed(ctx, origin, ref, 0, nothing) }
	}
	for name, call := range calls {
		for _, ref := range refs {
			f.fails(call(ref), errdefs.ErrInvalid, fmt.Sprintf("%s %q", name, ref))
		}
	}
	for _, path := range files {
		if b, err := os.ReadFile(path); err != nil || string(b) != "mine" {
			f.Errorf("%s: %q, %v", path, b, err)
		}
	}
	if n := f.promised(); n != size {
		f.Errorf("%d bytes are promised, want %d", n, size)
	}
}

func noSpace(f *fixture) {
	c := f.capacity()
	if c.MaxVolume < 64<<20 || c.MinVolume <= 0 || c.MinVolume > size {
		f.Fatalf("capacity %+v", c)
	}
	spec := f.spec("a")
	spec.Size = c.MaxVolume + 64<<20
	_, err := f.pool.Create(f.Context(), spec)
	f.fails(err, errdefs.ErrNoSpace, "more than the largest volume")
	f.absent(spec.Ref)
	if n := f.promised(); n != 0 {
		f.Fatalf("%d bytes are promised after a refusal", n)
	}

	// Copies count in full.
	spec.Size = f.capacity().MaxVolume * 3 / 5 / (4 << 20) * (4 << 20)
	f.make(spec)
	_, err = f.pool.Create(f.Context(), f.copySpec(snap("a"), spec.Ref, spec.Size))
	f.fails(err, errdefs.ErrNoSpace, "a snapshot that there is no room for")
	_, err = f.expand(spec.Ref, 2*spec.Size)
	f.fails(err, errdefs.ErrNoSpace, "growth that there is no room for")
	if n := f.promised(); n != spec.Size {
		f.Fatalf("%d bytes are promised, want %d", n, spec.Size)
	}
	if r, err := f.pool.Get(f.Context(), spec.Ref); err != nil || r.Size != spec.Size {
		f.Fatalf("after growth was refused: %#v, %v", r, err)
	}
}

func deleted(f *fixture) {
	spec := f.spec("a")
	f.must(f.pool.Delete(f.Context(), spec.Ref))
	f.must(f.pool.Delete(f.Context(), snap("a")))
	f.make(spec)
	f.write(spec.Ref, 0, data(1, size))

	device := f.attach(spec.Ref, toHandOut)
	f.must(device.Close())
	f.fails(f.pool.Delete(f.Context(), spec.Ref), errdefs.ErrInUse, "Delete of what is attached")
	if _, err := f.pool.Get(f.Context(), spec.Ref); err != nil {
		f.Fatalf("after a refused Delete: %v", err)
	}
	f.detach(spec.Ref)

	for range 2 {
		f.must(f.pool.Delete(f.Context(), spec.Ref))
		f.absent(spec.Ref)
		if n := f.promised(); n != 0 {
			f.Fatalf("%d bytes are promised after Delete", n)
		}
	}
	_, err := f.stack(spec.Ref).Attach(f.Context(), toMount)
	f.fails(err, errdefs.ErrNotFound, "Attach of what was deleted")

	// The next volume of that name shows no byte of the first one.
	f.make(spec)
	f.holds(spec.Ref, size, nil)

	// Erase does the same, and takes nothing from copies.
	f.write(spec.Ref, 0, data(2, size))
	f.copy(snap("a"), spec.Ref, size)
	device = f.attach(spec.Ref, toHandOut)
	f.must(device.Close())
	f.fails(f.pool.Erase(f.Context(), spec.Ref), errdefs.ErrInUse, "Erase of what is attached")
	f.detach(spec.Ref)
	f.holds(spec.Ref, size, data(2, size))
	for range 2 {
		f.must(f.pool.Erase(f.Context(), spec.Ref))
		f.absent(spec.Ref)
	}
	f.holds(snap("a"), size, data(2, size))
	f.must(f.pool.Erase(f.Context(), snap("a")))
	f.absent(snap("a"))
}

func copies(f *fixture) {
	first, second := data(1, size/2), data(2, size/2)
	f.make(f.spec("a"))
	f.write(vol("a"), 0, first)
	before := time.Now()
	cut := f.copy(snap("s"), vol("a"), size)
	if cut.Origin != vol("a") || cut.Created.Before(before.Add(-time.Second)) || cut.Created.After(time.Now().Add(time.Second)) {
		f.Fatalf("snapshot: %#v, cut about %v", cut, before)
	}
	f.copy(vol("clone"), vol("a"), size)
	f.holds(snap("s"), size, first)
	f.holds(vol("clone"), size, first)

	// Neither shows what is written to the other.
	f.write(vol("a"), 0, second)
	f.holds(snap("s"), size, first)
	f.holds(vol("clone"), size, first)
	f.write(vol("clone"), 0, data(3, size/2))
	f.holds(vol("a"), size, second)

	if again := f.copy(snap("s"), vol("a"), size); !equal(again, cut) {
		f.Fatalf("snapshot again: %#v, want %#v", again, cut)
	}
	f.holds(snap("s"), size, first)

	// A snapshot outlives its source, and a restored volume the snapshot.
	f.must(f.pool.Delete(f.Context(), vol("a")))
	f.holds(snap("s"), size, first)
	if r := f.copy(vol("larger"), snap("s"), 2*size); r.Size != 2*size || r.Origin != snap("s") {
		f.Fatalf("restored: %#v", r)
	}
	f.copy(vol("same"), snap("s"), size)
	f.copy(snap("again"), vol("same"), size)
	f.must(f.pool.Delete(f.Context(), snap("s")))
	f.holds(vol("larger"), 2*size, first)
	f.write(vol("same"), 0, second)
	f.holds(vol("same"), size, second)
	f.holds(snap("again"), size, first)
	if n := f.promised(); n != 5*size {
		f.Fatalf("%d bytes are promised, want %d", n, 5*size)
	}
}

// filled: a snapshot is made without an origin, like one that comes from elsewhere. It keeps what is written to it then, and so do copies of it.
func filled(f *fixture) {
	was, first := f.promised(), data(1, size/2)
	spec := blockdev.Spec{Ref: snap("s"), Name: "s", Size: size, Labels: map[string]string{"from": "elsewhere"}}
	if r := f.make(spec); r.Origin != (blockdev.Ref{}) || r.Size != size || f.promised() != was+size {
		f.Fatalf("made %#v, with %d bytes promised; they were %d", r, f.promised(), was)
	}
	f.holds(snap("s"), size, nil)
	d, err := f.pool.Attach(f.Context(), snap("s"), blockdev.Attachment{})
	f.must(err)
	writeDevice(f, d.Path, 0, first)
	f.must(d.Close())
	f.gone(snap("s"))
	f.holds(snap("s"), size, first)
	f.copy(vol("restored"), snap("s"), size)
	f.holds(vol("restored"), size, first)
	f.must(f.pool.Delete(f.Context(), snap("s")))
	f.holds(vol("restored"), size, first)
	f.must(f.pool.Delete(f.Context(), vol("restored")))
	if now := f.promised(); now != was {
		f.Fatalf("%d bytes are promised, and were %d", now, was)
	}
}

func copyRefuses(f *fixture) {
	f.make(f.spec("a"))
	_, err := f.pool.Create(f.Context(), f.copySpec(vol("b"), vol("a"), size/2))
	f.fails(err, errdefs.ErrOutOfRange, "a clone smaller than its source")
	_, err = f.pool.Create(f.Context(), f.copySpec(snap("b"), vol("none"), size))
	f.fails(err, errdefs.ErrNotFound, "a snapshot of nothing")
	_, err = f.pool.Create(f.Context(), f.copySpec(vol("b"), snap("none"), size))
	f.fails(err, errdefs.ErrNotFound, "a restore of nothing")
	f.absent(vol("b"))
	f.absent(snap("b"))
	if n := f.promised(); n != size {
		f.Fatalf("%d bytes are promised, want %d", n, size)
	}
}

// copyWhileWritten: a writer counts in the last block and then in the first one. So at any moment the first one has the number of the last one, or one
// less.
func copyWhileWritten(f *fixture) {
	spec := f.spec("a")
	f.make(spec)
	f.write(spec.Ref, 0, data(1, size))
	zeros := make([]byte, blockdev.Granularity)
	f.write(spec.Ref, 0, zeros)
	f.write(spec.Ref, size-blockdev.Granularity, zeros)
	device := f.attach(spec.Ref, toMount)
	defer device.Close()

	// A copy succeeds beside a slow writer, and is refused beside a fast one: both may happen.
	for i, pause := range []time.Duration{0, 5 * time.Millisecond, 30 * time.Millisecond} {
		begun, stop, ended := make(chan bool), make(chan bool), make(chan error, 1)
		go func() { ended <- countUp(device.Path, size, pause, begun, stop) }()
		<-begun
		for j := range 2 {
			to := []blockdev.Ref{snap(fmt.Sprint("s", i, j)), vol(fmt.Sprint("v", i, j))}[j%2]
			_, err := f.pool.Create(f.Context(), f.copySpec(to, spec.Ref, size))
			if err != nil {
				f.fails(err, errdefs.ErrInUse, "copy of a volume that is written to")
				f.absent(to)
				continue
			}
			have := f.read(to)
			first, last := count(have[:blockdev.Granularity]), count(have[size-blockdev.Granularity:])
			if first != last && first+1 != last {
				f.Errorf("pause %v: %s was never like this: first block %d, last block %d", pause, to, first, last)
			}
			f.must(f.pool.Delete(f.Context(), to))
		}
		close(stop)
		f.must(<-ended)
	}
	// With nobody writing it works, though it is attached for writing.
	f.copy(snap("still"), spec.Ref, size)
	f.holds(snap("still"), size, readDevice(f, device.Path, size))
}

// countUp writes increasing numbers to the last and then the first block, past the page cache, beginning with the one that is there.
func countUp(path string, size int64, pause time.Duration, begun, stop chan bool) error {
	file, err := os.OpenFile(path, os.O_RDWR|unix.O_DIRECT, 0)
	if err != nil {
		close(begun)
		return err
	}
	defer file.Close()
	block, err := unix.Mmap(-1, 0, blockdev.Granularity, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err == nil {
		defer func() { _ = unix.Munmap(block) }()
		_, err = file.ReadAt(block, 0)
	}
	for n := count(block) + 1; err == nil; n++ {
		for i := range 8 {
			block[i] = byte(n >> (8 * i))
		}
		if _, err = file.WriteAt(block, size-blockdev.Granularity); err == nil {
			_, err = file.WriteAt(block, 0)
		}
		if begun != nil {
			close(begun)
			begun = nil
		}
		select {
		case <-stop:
			return err
		case <-time.After(pause):
		}
	}
	if begun != nil {
		close(begun)
	}
	return err
}

func count(block []byte) (n uint64) {
	for i := range min(8, len(block)) {
		n |= uint64(block[i]) << (8 * i)
	}
	return n
}

// copyQuiesced: the pool believes a caller that says that it holds back the writes. The copy has what the device's page cache has.
func copyQuiesced(f *fixture) {
	f.make(f.spec("a"))
	device := f.attach(vol("a"), toMount)
	defer device.Close()
	file, err := os.OpenFile(device.Path, os.O_WRONLY, 0)
	f.must(err)
	defer file.Close()
	content := data(1, size/2)
	_, err = file.WriteAt(content, 0) // not synced
	f.must(err)
	f.must(f.stack(vol("a")).Flush(f.Context()))
	spec := f.copySpec(snap("s"), vol("a"), size)
	spec.Quiesced = true
	f.make(spec)
	f.holds(snap("s"), size, content)
}

// copyUnchanged: a pool that can tell says of an attached origin whether it has changed since it was copied, also while the copy is not ready yet.
func copyUnchanged(f *fixture) {
	comparer, is := blockdev.As[blockdev.Comparer](f.pool)
	if !is {
		f.Skip("the pool is no Comparer")
	}
	f.make(f.spec("a"))
	device := f.attach(vol("a"), toMount)
	defer device.Close()
	file, err := os.OpenFile(device.Path, os.O_WRONLY, 0)
	f.must(err)
	defer file.Close()
	_, err = file.WriteAt(data(1, size/2), 0)
	f.must(err)
	f.must(f.stack(vol("a")).Flush(f.Context()))
	spec := f.copySpec(snap("s"), vol("a"), size)
	spec.Cut = func(ctx context.Context) error { return comparer.Unchanged(ctx, spec.Ref, spec.Origin) }
	f.make(spec)
	f.must(comparer.Unchanged(f.Context(), spec.Ref, spec.Origin))
	_, err = file.WriteAt(data(2, blockdev.Granularity), size/2)
	f.must(errors.Join(err, file.Sync()))
	f.fails(comparer.Unchanged(f.Context(), spec.Ref, spec.Origin), errdefs.ErrInUse, "Unchanged of what was written to")
}

func prepare(f *fixture) {
	content := data(1, blockdev.Granularity)
	f.make(f.spec("a"))
	f.write(vol("a"), blockdev.Granularity, content)
	f.copy(snap("s"), vol("a"), size)
	before := f.promised()
	for _, origin := range []blockdev.Ref{{}, vol("a"), snap("s")} {
		to := vol("new")
		spec := f.copySpec(to, origin, size)
		failure := errors.New("not today")
		spec.Prepare = func(context.Context, string) error { return failure }
		_, err := f.pool.Create(f.Context(), spec)
		f.fails(err, failure, "Prepare that fails")
		f.absent(to)
		if origin.Kind != blockdev.Snapshot { // a retry may go on with the copy of a snapshot
			if n := f.promised(); n != before {
				f.Fatalf("copy of %q: %d bytes are promised after a failed Prepare, want %d", origin, n, before)
			}
		}
		f.must(f.pool.Delete(f.Context(), to))
		if n := f.promised(); n != before {
			f.Fatalf("copy of %q: %d bytes are promised after Delete, want %d", origin, n, before)
		}

		calls := 0
		mark := data(2, blockdev.Granularity)
		spec.Prepare = func(ctx context.Context, path string) error {
			calls++
			if _, err := f.pool.Get(ctx, to); !errors.Is(err, errdefs.ErrNotFound) {
				f.Errorf("Get during Prepare: %v; it is not ready", err)
			}
			file, err := os.OpenFile(path, os.O_RDWR, 0)
			if err != nil {
				return err
			}
			defer file.Close()
			have := make([]byte, blockdev.Granularity)
			if _, err := file.ReadAt(have, blockdev.Granularity); err != nil {
				return err
			}
			if want := origin != (blockdev.Ref{}); bytes.Equal(have, content) != want {
				f.Errorf("copy of %q: Prepare sees the bytes of the origin: %v, want %v", origin, !want, want)
			}
			if _, err := file.WriteAt(mark, 0); err != nil {
				return err
			}
			return file.Sync()
		}
		for range 2 {
			f.make(spec)
		}
		if calls != 1 {
			f.Errorf("Prepare was called %d times, want once", calls)
		}
		if origin != (blockdev.Ref{}) {
			f.holds(to, size, slices.Concat(mark, content))
		} else {
			f.holds(to, size, mark)
		}
		f.must(f.pool.Delete(f.Context(), to))
	}
}

// countdown is a context that ends when Err is called for the nth time.
type countdown struct {
	context.Context
	mu    sync.Mutex
	left  int
	ended chan struct{}
}

func newCountdown(ctx context.Context, n int) *countdown {
	c := &countdown{Context: ctx, left: n, ended: make(chan struct{})}
	if n == 0 {
		close(c.ended)
	}
	return c
}

func (c *countdown) Done() <-chan struct{} { return c.ended }

func (c *countdown) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.left > 0 {
		if c.left--; c.left == 0 {
			close(c.ended)
		}
		return nil
	}
	return context.Canceled
}

// cancelled: wherever a call is cut short, the next one completes it, or Delete removes what it left.
func cancelled(f *fixture) {
	const size = 3 * size // more than a pool copies at once
	content := data(1, size)
	f.make(func() blockdev.Spec { s := f.spec("a"); s.Size = size; return s }())
	f.write(vol("a"), 0, content)
	f.copy(snap("s"), vol("a"), size)
	before := f.promised()
	for _, origin := range []blockdev.Ref{{}, vol("a"), snap("s")} {
		to := vol("new")
		for n := range 6 {
			_, err := f.pool.Create(newCountdown(f.Context(), n), f.copySpec(to, origin, size))
			if err == nil {
				f.must(f.pool.Delete(f.Context(), to))
				continue // the call was faster, or does not look at its context
			}
			f.fails(err, context.Canceled, "Create that was cut short")
			f.absent(to)
			if n%2 == 0 {
				f.make(f.copySpec(to, origin, size))
				if origin == (blockdev.Ref{}) {
					f.holds(to, size, nil)
				} else {
					f.holds(to, size, content)
				}
			}
			f.must(f.pool.Delete(f.Context(), to))
			if n := f.promised(); n != before {
				f.Fatalf("copy of %q: %d bytes are promised after Delete, want %d", origin, n, before)
			}
		}
	}
	// Opening the pool removes what nobody came back for.
	if _, err := f.pool.Create(newCountdown(f.Context(), 1), f.copySpec(vol("new"), snap("s"), size)); err != nil {
		f.restart()
		f.absent(vol("new"))
	} else {
		f.must(f.pool.Delete(f.Context(), vol("new")))
	}
	if n := f.promised(); n != before {
		f.Fatalf("%d bytes are promised in the end, want %d", n, before)
	}
}

func attachModes(f *fixture) {
	content := data(1, blockdev.Granularity)
	f.make(f.spec("a"))
	attach := func() blockdev.Device { return f.attach(vol("a"), toMount) }
	read := func() blockdev.Device { return f.reader(vol("a")) }
	writable, reader := attach(), read()
	for _, d := range []struct {
		device   blockdev.Device
		again    func() blockdev.Device
		readOnly bool
	}{{writable, attach, false}, {reader, read, true}} {
		var st unix.Stat_t
		f.must(unix.Stat(d.device.Path, &st))
		if st.Mode&unix.S_IFMT != unix.S_IFBLK || st.Rdev != d.device.Number || d.device.Size != size || d.device.ReadOnly != d.readOnly {
			f.Errorf("device %+v, node %+v, want read-only %v", d.device, st, d.readOnly)
		}
		again := d.again()
		if again.Number != d.device.Number {
			f.Errorf("attached again, it is %s, and was %s", again.Path, d.device.Path)
		}
	}
	if writable.Number == reader.Number {
		f.Fatal("one device is both writable and read-only")
	}
	have := blockdev.Numbers(f.attached(vol("a")))
	want := []uint64{writable.Number, reader.Number}
	slices.Sort(have)
	slices.Sort(want)
	if !slices.Equal(have, want) {
		f.Fatalf("Attached: %v, want %v", have, want)
	}

	// With another Keep Attach returns the same device, or none: two would not see each other's writes.
	if other, err := f.stack(vol("a")).Attach(f.Context(), toHandOut); err != nil {
		f.fails(err, errdefs.ErrInUse, "a second writable device")
	} else {
		f.must(other.Close())
		if other.Number != writable.Number {
			f.Errorf("two writable devices: %s and %s", writable.Path, other.Path)
		}
	}

	writeDevice(f, writable.Path, 0, content)
	if have := readDevice(f, reader.Path, size); !bytes.HasPrefix(have, content) {
		f.Error("the read-only device does not show what was written")
	}
	refusesWrites(f, reader.Path)
	f.must(reader.Close())
	f.must(reader.Close())

	f.copy(snap("s"), vol("a"), size)
	refusesWrites(f, f.reader(snap("s")).Path)
	_, err := f.stack(vol("none")).Attach(f.Context(), toMount)
	f.fails(err, errdefs.ErrNotFound, "Attach of what is not there")
}

// refusesWrites checks that a device cannot be changed.
func refusesWrites(f *fixture, path string) {
	f.Helper()
	before := readDevice(f, path, blockdev.Granularity)
	file, err := os.OpenFile(path, os.O_RDWR, 0)
	if err == nil {
		defer file.Close()
		if _, err = file.WriteAt(bytes.Repeat([]byte{0xee}, blockdev.Granularity), 0); err == nil {
			err = file.Sync()
		}
	}
	if err == nil {
		f.Errorf("%s is read-only and took a write", path)
	}
	if !bytes.Equal(before, readDevice(f, path, blockdev.Granularity)) {
		f.Errorf("%s is read-only and has changed", path)
	}
}

func attachAttributes(f *fixture) {
	f.make(f.spec("a"))
	setting := func(d blockdev.Device) string {
		b, err := os.ReadFile("/sys/block/" + filepath.Base(d.Path) + "/queue/read_ahead_kb")
		f.must(err)
		return strings.TrimSpace(string(b))
	}
	for _, value := range []string{"64", "256"} { // the second time over the device that is attached
		d := f.attach(vol("a"), device.Options{Keep: true, Attributes: map[string]string{"read_ahead_kb": value}})
		if have := setting(d); have != value {
			f.Errorf("read_ahead_kb is %s, want %s", have, value)
		}
	}
	for _, bad := range []map[string]string{{"read_ahead_kb": "many"}, {"no_such_setting": "1"}} {
		_, err := f.stack(vol("a")).Attach(f.Context(), device.Options{Keep: true, Attributes: bad})
		f.fails(err, errdefs.ErrInvalid, fmt.Sprint("Attach with ", bad))
	}
}

func notKept(f *fixture) {
	f.make(f.spec("a"))
	device := f.attach(vol("a"), toMount)
	if n := len(f.attached(vol("a"))); n != 1 {
		f.Fatalf("%d devices while it is held, want 1", n)
	}
	if orphans := f.orphans(); len(orphans) != 0 {
		f.Errorf("Orphans has what was not attached with Keep: %v", orphans)
	}
	other, err := os.Open(device.Path)
	f.must(err)
	f.must(device.Close())
	if devices := f.attached(vol("a")); len(devices) != 1 || devices[0].Number != device.Number {
		f.Errorf("closed while another has it open: %v, want %s", devices, device.Path)
	}
	f.must(other.Close())
	f.gone(vol("a"))
	f.must(f.pool.Delete(f.Context(), vol("a")))
}

func kept(f *fixture) {
	f.make(f.spec("a"))
	f.make(f.spec("b"))
	device := f.attach(vol("a"), toHandOut)
	f.must(device.Close())
	f.must(device.Close())
	stays := func(when string) {
		f.Helper()
		time.Sleep(50 * time.Millisecond) // enough for a device to go, if it goes
		if devices := f.attached(vol("a")); len(devices) != 1 || devices[0].Number != device.Number {
			f.Fatalf("%s: attached as %v, want %s", when, devices, device.Path)
		}
		orphans := f.orphans()
		if len(orphans) != 1 || len(orphans[vol("a")]) != 1 || orphans[vol("a")][0].Number != device.Number {
			f.Fatalf("%s: orphans %v, want %s", when, orphans, device.Path)
		}
	}
	stays("closed")
	again := f.attach(vol("a"), toHandOut)
	if again.Number != device.Number {
		f.Errorf("attached again as %s, not %s", again.Path, device.Path)
	}
	f.must(again.Close())
	f.restart()
	stays("after a restart")
	for range 2 {
		f.detach(vol("a"))
		if devices := f.attached(vol("a")); len(devices) != 0 {
			f.Fatalf("after Detach it is attached as %v", devices)
		}
	}
}

// detachHeld: Detach is errdefs.ErrInUse while somebody holds a device, which goes with the last holder.
func detachHeld(f *fixture) {
	f.make(f.spec("a"))
	device := f.attach(vol("a"), toHandOut)
	holder, err := os.Open(device.Path)
	f.must(err)
	f.must(device.Close())
	f.fails(f.stack(vol("a")).Detach(f.Context()), errdefs.ErrInUse, "Detach of what is held")
	f.fails(f.pool.Delete(f.Context(), vol("a")), errdefs.ErrInUse, "Delete of what is held")
	f.must(holder.Close())
	f.gone(vol("a"))
	f.detach(vol("a"))
	f.must(f.pool.Delete(f.Context(), vol("a")))
}

func noRecord(f *fixture) {
	for _, ref := range []blockdev.Ref{vol("none"), snap("none")} {
		if devices := f.attached(ref); len(devices) != 0 {
			f.Errorf("%s is attached as %v", ref, devices)
		}
		f.detach(ref)
		_, err := f.pool.Get(f.Context(), ref)
		f.fails(err, errdefs.ErrNotFound, "Get")
		_, err = f.expand(ref, size)
		f.fails(err, errdefs.ErrNotFound, "Expand")
		_, err = f.pool.SetLabels(f.Context(), ref, func(map[string]string) error { f.Error("change was called"); return nil })
		f.fails(err, errdefs.ErrNotFound, "SetLabels")
		_, err = f.pool.Health(f.Context(), ref)
		f.fails(err, errdefs.ErrNotFound, "Health")
	}
}

func expand(f *fixture) {
	content := data(1, size)
	f.make(f.spec("a"))
	f.write(vol("a"), 0, content)
	writable := f.attach(vol("a"), toMount)
	reader := f.reader(vol("a"))
	for range 2 {
		if r, err := f.expand(vol("a"), 2*size); err != nil || r.Size != 2*size || !r.Ready {
			f.Fatalf("Expand: %#v, %v", r, err)
		}
		for _, device := range []blockdev.Device{writable, reader} {
			if n := deviceSize(f, device.Path); n != 2*size {
				f.Errorf("%s has %d bytes after Expand, want %d", device.Path, n, 2*size)
			}
		}
	}
	for _, smaller := range []int64{size, 2*size - blockdev.Granularity, 2 * size} {
		if r, err := f.expand(vol("a"), smaller); err != nil || r.Size != 2*size {
			f.Errorf("Expand to %d: %#v, %v", smaller, r, err)
		}
	}
	if n := f.promised(); n != 2*size {
		f.Errorf("%d bytes are promised, want %d", n, 2*size)
	}
	f.holds(vol("a"), 2*size, content)
	writeDevice(f, writable.Path, 2*size-blockdev.Granularity, content[:blockdev.Granularity])
	f.must(errors.Join(writable.Close(), reader.Close()))
	f.gone(vol("a"))
	if r, err := f.expand(vol("a"), 3*size); err != nil || r.Size != 3*size {
		f.Fatalf("Expand of what is not attached: %#v, %v", r, err)
	}
	want := make([]byte, 3*size)
	copy(want, content)
	copy(want[2*size-blockdev.Granularity:], content[:blockdev.Granularity])
	f.holds(vol("a"), 3*size, want)
}

func deviceSize(f *fixture, path string) int64 {
	f.Helper()
	file, err := os.Open(path)
	f.must(err)
	defer file.Close()
	n, err := file.Seek(0, 2)
	f.must(err)
	return n
}

func expandRefuses(f *fixture) {
	f.make(f.spec("a"))
	for _, bad := range []int64{size + 1, blockdev.MaxSize + blockdev.Granularity, 1 << 62} {
		_, err := f.expand(vol("a"), bad)
		f.fails(err, errdefs.ErrOutOfRange, fmt.Sprintf("Expand to %d", bad))
	}
	if r, err := f.pool.Get(f.Context(), vol("a")); err != nil || r.Size != size {
		f.Fatalf("after refusals: %#v, %v", r, err)
	}
	// A snapshot is what it was when it was cut.
	f.copy(snap("s"), vol("a"), size)
	_, err := f.expand(snap("s"), 2*size)
	f.fails(err, errdefs.ErrInvalid, "Expand of a snapshot")
}

func list(f *fixture) {
	var want []string
	for i := range 7 {
		word := string(rune('a' + (i*5)%7))
		spec := f.spec(word)
		spec.Size = 4 << 20
		want = append(want, f.make(spec).Key)
	}
	slices.Sort(want)
	f.copy(snap("s"), vol("a"), 4<<20)
	for _, limit := range []int{0, 1, 3, 7, 100} {
		var have []string
		for after := ""; ; {
			page, err := f.pool.List(f.Context(), blockdev.Volume, after, limit)
			f.must(err)
			if limit > 0 && len(page) > limit {
				f.Fatalf("a page of %d, the limit is %d", len(page), limit)
			}
			for _, r := range page {
				have = append(have, r.Key)
				if single, err := f.pool.Get(f.Context(), r.Ref); err != nil || !equal(single, r) {
					f.Errorf("List has %#v, Get %#v, %v", r, single, err)
				}
			}
			if limit == 0 || len(page) == 0 {
				break
			}
			after = page[len(page)-1].Key
		}
		if !slices.Equal(have, want) {
			f.Errorf("limit %d: %v, want %v", limit, have, want)
		}
	}
	// A list goes on in the right place after a key that is not there, or not any more.
	f.must(f.pool.Delete(f.Context(), blockdev.Ref{Kind: blockdev.Volume, Key: want[2]}))
	if page, err := f.pool.List(f.Context(), blockdev.Volume, want[2], 1); err != nil || len(page) != 1 || page[0].Key != want[3] {
		f.Errorf("after a deleted key: %v, %v, want %s", page, err, want[3])
	}
	if page, err := f.pool.List(f.Context(), blockdev.Volume, strings.Repeat("f", 32), 0); err != nil || len(page) != 0 {
		f.Errorf("after the last key: %v, %v", page, err)
	}
	if page, err := f.pool.List(f.Context(), blockdev.Snapshot, "", 0); err != nil || len(page) != 1 || page[0].Ref != snap("s") {
		f.Errorf("snapshots: %v, %v", page, err)
	}
}

// beside: the marks beside a volume are an object of their own, whatever becomes of the volume.
func beside(f *fixture) {
	spec := f.spec("a")
	f.make(spec)
	marks := spec
	marks.Ref = blockdev.Ref{Kind: blockdev.Marks, Key: spec.Key}
	f.make(marks)
	f.copy(snap("s"), vol("a"), size)
	for _, ref := range []blockdev.Ref{spec.Ref, marks.Ref} {
		if listed, err := f.pool.List(f.Context(), ref.Kind, "", 0); err != nil || len(listed) != 1 || listed[0].Ref != ref {
			f.Errorf("listed are %v, %v, want %s", listed, err, ref)
		}
	}
	device, err := f.pool.Attach(f.Context(), marks.Ref, blockdev.Attachment{})
	f.must(err)
	WriteTo(f, device.Path, 0, []byte("marks"))
	f.must(f.pool.Delete(f.Context(), spec.Ref))
	f.fails(f.pool.Delete(f.Context(), marks.Ref), errdefs.ErrInUse, "deleted while it is attached")
	f.must(device.Close())
	f.restart()
	device, err = f.pool.Attach(f.Context(), marks.Ref, blockdev.Attachment{})
	f.must(err)
	have := make([]byte, 5)
	file, err := os.Open(device.Path)
	f.must(err)
	_, err = file.ReadAt(have, 0)
	f.must(errors.Join(err, file.Close(), device.Close()))
	if string(have) != "marks" {
		f.Errorf("it has %q", have)
	}
	f.must(f.pool.Delete(f.Context(), marks.Ref))
}

func setLabels(f *fixture) {
	spec := f.spec("a")
	spec.Labels = map[string]string{"stays": "1", "goes": "2"}
	created := f.make(spec).Created
	want := map[string]string{"stays": "1", "new": "ä\"\n=,"}
	var leaked map[string]string
	for range 2 {
		r, err := f.pool.SetLabels(f.Context(), spec.Ref, func(labels map[string]string) error {
			leaked = labels
			delete(labels, "goes")
			labels["new"] = want["new"]
			return nil
		})
		if err != nil || !maps.Equal(r.Labels, want) || !r.Created.Equal(created) {
			f.Fatalf("SetLabels: %#v, %v", r, err)
		}
		r.Labels["stays"], leaked["stays"] = "mine", "mine"
	}
	failure := errors.New("no")
	_, err := f.pool.SetLabels(f.Context(), spec.Ref, func(labels map[string]string) error {
		clear(labels)
		return failure
	})
	f.fails(err, failure, "a change that fails")
	check := func(want map[string]string) {
		f.Helper()
		if r, err := f.pool.Get(f.Context(), spec.Ref); err != nil || !maps.Equal(r.Labels, want) {
			f.Fatalf("labels %v, %v, want %v", r.Labels, err, want)
		}
	}
	check(want)
	f.restart()
	check(want)
	_, err = f.pool.SetLabels(f.Context(), spec.Ref, func(labels map[string]string) error { clear(labels); return nil })
	f.must(err)
	check(nil)
	f.restart()
	check(nil)

	// A record without labels has a map to write to. A snapshot has labels as well.
	f.copy(snap("s"), vol("a"), size)
	r, err := f.pool.SetLabels(f.Context(), snap("s"), func(labels map[string]string) error { labels["x"] = "y"; return nil })
	if err != nil || r.Labels["x"] != "y" {
		f.Fatalf("first label: %#v, %v", r, err)
	}
}

// reopen: a pool that is opened again has everything on its storage.
func reopen(f *fixture) {
	content := data(1, size)
	spec := f.spec("a")
	spec.Labels = map[string]string{"k": "v"}
	f.make(spec)
	f.write(vol("a"), 0, content)
	f.copy(snap("s"), vol("a"), size)
	f.copy(vol("b"), snap("s"), size)
	_, err := f.expand(vol("b"), 2*size)
	f.must(err)
	f.make(f.spec("gone"))
	f.must(f.pool.Delete(f.Context(), vol("gone")))
	writable := f.attach(vol("a"), toMount)
	mounted, err := os.OpenFile(writable.Path, os.O_RDONLY|unix.O_EXCL, 0) // like a mount; a device that is only open otherwise is about to go
	f.must(err)
	keptDevice := f.attach(vol("b"), toHandOut)
	f.must(keptDevice.Close())

	inventory := func() (all []blockdev.Record) {
		for _, kind := range []blockdev.Kind{blockdev.Volume, blockdev.Snapshot, blockdev.Marks} {
			records, err := f.pool.List(f.Context(), kind, "", 0)
			f.must(err)
			all = append(all, records...)
		}
		return all
	}
	name, records, promised := f.pool.Name(), inventory(), f.promised()
	for range 2 {
		f.restart()
		if have := inventory(); !slices.EqualFunc(have, records, equal) || len(have) != 3 {
			f.Fatalf("after a restart: %#v, before: %#v", have, records)
		}
		if f.pool.Name() != name || f.promised() != promised {
			f.Errorf("after a restart: name %s, promised %d", f.pool.Name(), f.promised())
		}
		if d := f.attached(vol("a")); len(d) != 1 || d[0].Number != writable.Number || d[0].ReadOnly {
			f.Errorf("after a restart: attached as %v, was %s", d, writable.Path)
		}
		if d := f.attached(vol("b")); len(d) != 1 || d[0].Number != keptDevice.Number || d[0].ReadOnly {
			f.Errorf("after a restart: attached as %v, was %s", d, keptDevice.Path)
		}
		if again := f.attach(vol("a"), toMount); again.Number != writable.Number {
			f.Errorf("after a restart it is attached as %s, was %s", again.Path, writable.Path)
		} else {
			f.must(again.Close())
		}
		f.fails(f.pool.Delete(f.Context(), vol("a")), errdefs.ErrInUse, "Delete of what is attached")
	}
	f.detach(vol("b"))
	f.must(errors.Join(mounted.Close(), writable.Close()))
	f.gone(vol("a"))
	f.holds(vol("a"), size, content)
	f.holds(snap("s"), size, content)
	f.holds(vol("b"), 2*size, content)
}

// capacity: nothing is promised twice, and what is deleted can be promised again.
func capacity(f *fixture) {
	before := f.capacity()
	consistent := func(c blockdev.Capacity) {
		f.Helper()
		if c.Available > max(0, c.Total-c.Promised) || c.Available+16<<20 < c.Total-c.Promised || c.MaxVolume > c.Available || c.MinVolume <= 0 || c.Available < 0 {
			f.Errorf("capacity %+v does not add up", c)
		}
	}
	consistent(before)
	const creators, rounds = 16, 20
	began := time.Now()
	for round := range rounds {
		if round > 2 && time.Since(began) > 10*time.Second {
			break // a slow pool
		}
		fit := int64(1) // the tightest: one volume takes all
		if round%10 == 0 {
			fit = 5
		}
		n := (before.Available - 16<<20) / fit / (4 << 20) * (4 << 20)
		errs := AtOnce(creators, func(i int) error {
			spec := f.spec(fmt.Sprint("v", i))
			spec.Size = n
			_, err := f.pool.Create(f.Context(), spec)
			return err
		})
		made := int64(0)
		for _, err := range errs {
			if err == nil {
				made++
			} else if !errors.Is(err, errdefs.ErrNoSpace) {
				f.Error(err)
			}
		}
		c := f.capacity()
		consistent(c)
		if made != fit {
			f.Errorf("round %d: %d volumes of %d bytes were made where there was %+v, and is %+v: %v", round, made, n, before, c, errors.Join(errs...))
		}
		if c.Promised != made*n {
			f.Errorf("round %d: %d bytes are promised, want %d", round, c.Promised, made*n)
		}
		f.must(errors.Join(AtOnce(creators, func(i int) error { return f.pool.Delete(f.Context(), vol(fmt.Sprint("v", i))) })...))
		after := f.capacity()
		// A program that another test starts has copies of all descriptors until it executes.
		for deadline := time.Now().Add(time.Minute); after.Available < before.Available-before.Available/50 && time.Now().Before(deadline); after = f.capacity() {
			time.Sleep(10 * time.Millisecond)
		}
		consistent(after)
		if after.Promised != 0 || after.Available < before.Available-before.Available/50 {
			f.Errorf("round %d: with all deleted, the capacity is %+v, and was %+v", round, after, before)
		}
	}
}

// reports: a copy reports its progress, and at the end that it has all bytes.
func reports(f *fixture) {
	f.make(f.spec("a"))
	f.write(vol("a"), size/2, data(1, 1<<20))
	f.copy(snap("a"), vol("a"), size)
	spec := f.copySpec(vol("b"), snap("a"), size)
	var table progress.Table
	var last progress.Copy
	var there bool
	spec.Prepare = func(context.Context, string) error {
		last, there = table.Find(f.pool.Name(), spec.Ref.String())
		return nil
	}
	ctx, end := table.Track(f.Context(), f.pool.Name(), spec.Ref.String())
	_, err := f.pool.Create(ctx, spec)
	f.must(err)
	end()
	// Only a pool whose volumes are all thin, and whose copies share blocks below it, has no progress to report.
	thick := f.spec("thick")
	thick.Provisioning = blockdev.Thick
	_, err = f.pool.Create(f.Context(), thick)
	if instant := errors.Is(err, errdefs.ErrUnsupported); there == instant {
		f.Errorf("the copy says how far it is: %v; the pool copies without doing anything: %v", there, instant)
	}
	if last.Done != last.Total {
		f.Errorf("with all bytes there, %+v", last)
	}
}

// used: what is written takes space, and what is deleted gives it back.
func used(f *fixture) {
	usedNow := func() int64 { return f.capacity().Used }
	before := usedNow()
	spec := f.spec("a")
	spec.Size = 64 << 20
	f.make(spec)
	f.write(vol("a"), 0, data(1, 32<<20))
	// Pools look at it every few seconds.
	for deadline := time.Now().Add(time.Minute); usedNow() < before+32<<20 && time.Now().Before(deadline); {
		time.Sleep(50 * time.Millisecond)
	}
	if got := usedNow() - before; got < 32<<20 || got > 80<<20 {
		f.Errorf("%d bytes are used by a volume of %d of which %d are written", got, spec.Size, 32<<20)
	}
	f.must(f.stack(vol("a")).Detach(f.Context()))
	f.must(f.pool.Delete(f.Context(), vol("a")))
	for deadline := time.Now().Add(time.Minute); usedNow() > before+1<<20 && time.Now().Before(deadline); {
		time.Sleep(50 * time.Millisecond)
	}
	if got := usedNow(); got > before+1<<20 {
		f.Errorf("%d bytes are used once it is deleted, and were %d before it was made", got, before)
	}
}

// setLabelsBesideDelete: labels that are being set, or wait for others to be set, when an object is deleted bring nothing of it back, also not at the next
// start.
func setLabelsBesideDelete(f *fixture) {
	f.make(f.spec("v"))
	changing, let := make(chan struct{}), make(chan struct{})
	set := func(change func()) {
		_, err := f.pool.SetLabels(f.Context(), vol("v"), func(labels map[string]string) error {
			change()
			labels["n"] = "1"
			return nil
		})
		if err != nil && !errors.Is(err, errdefs.ErrNotFound) && !errors.Is(err, errdefs.ErrBusy) {
			f.Errorf("labels set beside Delete: %v", err)
		}
	}
	var all sync.WaitGroup
	all.Go(func() { set(func() { close(changing); <-let }) })
	<-changing
	all.Go(func() { set(func() {}) })
	all.Go(func() {
		if err := f.pool.Delete(f.Context(), vol("v")); err != nil {
			f.Errorf("Delete beside SetLabels: %v", err)
		}
	})
	time.Sleep(200 * time.Millisecond) // a Delete that does not wait is done by then
	close(let)
	all.Wait()
	for _, when := range []string{"deleted", "after a start"} {
		_, err := f.pool.Get(f.Context(), vol("v"))
		f.fails(err, errdefs.ErrNotFound, when)
		f.restart()
	}
	f.make(f.spec("v"))
}

// setLabelsBeside: labels that are set while an object grows stay, and so does its size.
func setLabelsBeside(f *fixture) {
	f.make(f.spec("v"))
	done, last := make(chan struct{}), 0
	var all sync.WaitGroup
	all.Go(func() {
		for {
			if _, err := f.pool.SetLabels(f.Context(), vol("v"), func(labels map[string]string) error {
				labels["n"] = fmt.Sprint(last + 1)
				return nil
			}); err != nil {
				f.Error(err)
				return
			}
			last++
			select {
			case <-done:
				return
			default:
			}
		}
	})
	const steps = 5
	for i := range int64(steps) {
		_, err := f.expand(vol("v"), size+(i+1)<<22)
		f.must(err)
	}
	close(done)
	all.Wait()
	r, err := f.pool.Get(f.Context(), vol("v"))
	if err != nil || r.Labels["n"] != fmt.Sprint(last) || r.Size != size+steps<<22 {
		f.Errorf("after label %d and %d bytes: %+v, %v", last, int64(size+steps<<22), r, err)
	}
}

// concurrent: calls for different objects come at once.
func concurrent(f *fixture) {
	f.make(f.spec("origin"))
	f.write(vol("origin"), 0, data(9, 1<<20))
	f.copy(snap("origin"), vol("origin"), size)
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			if err := life(f, fmt.Sprint("v", i), byte(i)); err != nil {
				f.Errorf("volume %d: %v", i, err)
			}
		})
	}
	all.Go(func() {
		for range 50 {
			_, err := f.pool.Capacity(f.Context())
			_, listed := f.pool.List(f.Context(), blockdev.Volume, "", 3)
			if err := errors.Join(err, listed); err != nil {
				f.Error(err)
			}
		}
	})
	all.Wait()
	if n := f.promised(); n != 2*size {
		f.Errorf("%d bytes are promised in the end, want %d", n, 2*size)
	}
}

// life takes one volume through its whole life. It may run in any goroutine.
func life(f *fixture, word string, id byte) error {
	ctx := f.Context()
	spec := f.copySpec(vol(word), snap("origin"), 4<<20+size)
	if _, err := f.pool.Create(ctx, spec); err != nil {
		return err
	}
	device, err := f.stack(vol(word)).Attach(ctx, toMount)
	if err != nil {
		return err
	}
	defer device.Close()
	block := bytes.Repeat([]byte{id + 1}, blockdev.Granularity)
	file, err := os.OpenFile(device.Path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	_, err = file.WriteAt(block, size)
	if err := errors.Join(err, file.Sync(), file.Close()); err != nil {
		return err
	}
	if _, err := f.pool.Create(ctx, f.copySpec(snap(word), vol(word), spec.Size)); err != nil {
		return err
	}
	if _, err := f.expand(vol(word), 2*size); err != nil {
		return err
	}
	if _, err := f.pool.SetLabels(ctx, vol(word), func(l map[string]string) error { l["id"] = word; return nil }); err != nil {
		return err
	}
	reader, err := f.pool.Attach(ctx, snap(word), blockdev.Attachment{ReadOnly: true})
	if err != nil {
		return err
	}
	defer reader.Close()
	if file, err = os.Open(reader.Path); err != nil {
		return err
	}
	have := make([]byte, blockdev.Granularity)
	_, err = file.ReadAt(have, size)
	if err := errors.Join(err, file.Close()); err != nil {
		return err
	}
	if !bytes.Equal(have, block) {
		return fmt.Errorf("its snapshot holds %x where it wrote %x", have[:4], block[:4])
	}
	return errors.Join(device.Close(), reader.Close(), f.stack(vol(word)).Detach(ctx), f.pool.Detach(ctx, snap(word)),
		f.pool.Delete(ctx, snap(word)), f.pool.Delete(ctx, vol(word)))
}

func health(f *fixture) {
	f.make(f.spec("a"))
	f.copy(snap("s"), vol("a"), size)
	for _, ref := range []blockdev.Ref{vol("a"), snap("s")} {
		if problems, err := f.pool.Health(f.Context(), ref); err != nil || len(problems) != 0 {
			f.Errorf("%s: %v, %v", ref, problems, err)
		}
	}
	if problems := f.pool.PoolHealth(f.Context()); len(problems) != 0 {
		f.Errorf("a new pool has problems: %v", problems)
	}
}

func differ(f *fixture) {
	d, ok := f.pool.(blockdev.Differ)
	if !ok {
		f.Skip("the pool is no Differ")
	}
	const mib = 1 << 20
	f.make(f.spec("a"))
	f.write(vol("a"), 1*mib, data(1, 64<<10))
	f.write(vol("a"), 4*mib-blockdev.Granularity, data(2, 2*blockdev.Granularity))
	f.copy(snap("one"), vol("a"), size)
	f.write(vol("a"), 1*mib, data(1, 64<<10)) // the same bytes again
	f.write(vol("a"), 4*mib, data(3, blockdev.Granularity))
	f.write(vol("a"), 6*mib, data(4, 100<<10))
	f.write(vol("a"), size-blockdev.Granularity, data(5, blockdev.Granularity))
	f.copy(snap("two"), vol("a"), size)
	_, err := f.expand(vol("a"), 2*size)
	f.must(err)
	f.write(vol("a"), 2*size-blockdev.Granularity, data(6, blockdev.Granularity))
	f.copy(snap("three"), vol("a"), 2*size)

	bytesOf := map[blockdev.Ref][]byte{{}: make([]byte, 2*size)} // the zero Ref is all zeros
	for _, ref := range []blockdev.Ref{snap("one"), snap("two"), snap("three")} {
		bytesOf[ref] = append(f.read(ref), make([]byte, size)...)[:2*size]
	}
	for _, ref := range []blockdev.Ref{snap("two"), snap("three")} { // they may have devices for reading
		f.reader(ref)
	}

	length := map[blockdev.Ref]int64{snap("one"): size, snap("two"): size, snap("three"): 2 * size}

	for _, c := range []struct{ base, target blockdev.Ref }{
		{blockdev.Ref{}, snap("one")}, {blockdev.Ref{}, snap("three")}, {snap("one"), snap("two")}, {snap("two"), snap("three")},
		{snap("one"), snap("three")}, {snap("two"), snap("two")},
	} {
		ranges := func(ctx context.Context, from int64, yield func(blockdev.Extent) error) error {
			if c.base == (blockdev.Ref{}) {
				return d.Allocated(ctx, c.target, from, yield)
			}
			return d.Changed(ctx, c.base, c.target, from, yield)
		}
		what := fmt.Sprintf("from %q to %q", c.base, c.target)
		var differs []int64 // pages
		for at := int64(0); at < length[c.target]; at += blockdev.Granularity {
			if !bytes.Equal(bytesOf[c.base][at:at+blockdev.Granularity], bytesOf[c.target][at:at+blockdev.Granularity]) {
				differs = append(differs, at)
			}
		}
		for _, from := range []int64{0, 1, mib + 4096, 4 * mib, 4*mib + 1, 7 * mib, size, 2 * size} {
			var have []blockdev.Extent
			f.must(ranges(f.Context(), from, func(e blockdev.Extent) error { have = append(have, e); return nil }))
			end, total := int64(0), int64(0)
			for _, e := range have {
				if e.Length <= 0 || e.Offset < end || e.Offset+e.Length > length[c.target] || e.Offset+e.Length <= from {
					f.Errorf("%s, from byte %d: %v are not in order and within bounds", what, from, have)
				}
				end, total = e.Offset+e.Length, total+e.Length
			}
			for _, at := range differs {
				if at < from/blockdev.Granularity*blockdev.Granularity {
					continue
				}
				// In the page that from is in, only what comes after from counts.
				if at = max(at, from); !slices.ContainsFunc(have, func(e blockdev.Extent) bool { return e.Offset <= at && at < e.Offset+e.Length }) {
					f.Errorf("%s, from byte %d: byte %d differs and is not in %v", what, from, at, have)
				}
			}
			// A pool may report somewhat more, but not everything. Preallocated space may count as data.
			preallocated := c.base == (blockdev.Ref{}) && !f.thin
			if limit := int64(len(differs)+1) * (256 << 10); (total > limit && !preallocated) || (c.base == c.target && total > 0) {
				f.Errorf("%s, from byte %d: %d bytes for %d pages that differ: %v", what, from, total, len(differs), have)
			}
		}
		if len(differs) > 0 {
			enough := errors.New("enough")
			calls := 0
			f.fails(ranges(f.Context(), 0, func(blockdev.Extent) error { calls++; return enough }), enough, what)
			if calls != 1 {
				f.Errorf("%s: yield was called %d times after its error", what, calls-1)
			}
			f.fails(ranges(newCountdown(f.Context(), 0), 0, func(blockdev.Extent) error { return nil }), context.Canceled, what)
		}
	}
	nothing := func(blockdev.Extent) error { return nil }
	f.fails(d.Allocated(f.Context(), snap("none"), 0, nothing), errdefs.ErrNotFound, "Allocated of nothing")
	f.fails(d.Changed(f.Context(), snap("none"), snap("one"), 0, nothing), errdefs.ErrNotFound, "Changed from nothing")
	f.fails(d.Changed(f.Context(), snap("one"), snap("none"), 0, nothing), errdefs.ErrNotFound, "Changed to nothing")
}

// prover: an object is untouched only as long as nobody wrote to it.
func prover(f *fixture) {
	p, ok := f.pool.(blockdev.Prover)
	if !ok {
		f.Skip("the pool is no Prover")
	}
	untouched := func(ref blockdev.Ref) bool {
		f.Helper()
		yes, err := p.Untouched(f.Context(), ref)
		f.must(err)
		return yes
	}
	f.make(f.spec("a"))
	if !untouched(vol("a")) {
		f.Error("a new volume is not known to be untouched") // harmless, but then the rest of the test proves nothing
	}
	f.write(vol("a"), size-blockdev.Granularity, data(1, blockdev.Granularity))
	f.copy(snap("s"), vol("a"), size)
	f.copy(vol("b"), snap("s"), 2*size)
	for _, ref := range []blockdev.Ref{vol("a"), snap("s"), vol("b")} {
		if untouched(ref) {
			f.Errorf("%s holds data and is untouched", ref)
		}
	}
	_, err := p.Untouched(f.Context(), vol("none"))
	f.fails(err, errdefs.ErrNotFound, "Untouched of nothing")
}

// suspend: several objects are suspended and copied. The copies have what the objects had while all were suspended.
func suspend(f *fixture) {
	words := []string{"a", "b"}
	var devices []blockdev.Device
	for _, word := range words {
		f.make(f.spec(word))
		devices = append(devices, f.attach(vol(word), toHandOut))
	}
	if _, err := dm.Targets(); err != nil {
		resume, err := f.stack(vol("a")).Suspend(f.Context())
		if err != nil || resume != nil {
			f.Errorf("without a device mapper: %v; it says that it holds writes back: %v", err, resume != nil)
		}
		return
	}
	var written atomic.Uint64
	stop, ended := make(chan bool), make(chan error, 1)
	go func() { ended <- inTurn(devices, &written, stop) }()
	for round := range 3 {
		f.reaches(&written, written.Load()+3)
		f.cutTogether(words, round, &written)
	}
	// A suspension without a copy.
	resume, err := f.stack(vol("a")).Suspend(f.Context())
	f.must(err)
	held := written.Load()
	time.Sleep(50 * time.Millisecond)
	if n := written.Load(); n > held+1 {
		f.Errorf("%d writes went through a suspended device", n-held)
	}
	f.must(resume())
	f.reaches(&written, held+3)
	close(stop)
	f.must(<-ended)
	for _, device := range devices {
		f.must(device.Close())
	}
	for _, word := range words {
		f.detach(vol(word))
		if resume, err := f.stack(vol(word)).Suspend(f.Context()); err != nil || resume != nil {
			f.Errorf("Suspend of what is not attached: %v; it says that it holds writes back: %v", err, resume != nil)
		}
	}
}

// reaches waits until a writer has come to a number.
func (f *fixture) reaches(written *atomic.Uint64, n uint64) {
	f.Helper()
	for deadline := time.Now().Add(30 * time.Second); written.Load() < n; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			f.Fatalf("the writer hangs at %d", written.Load())
		}
	}
}

// cutTogether suspends two volumes that a writer writes to in turn (inTurn), and copies both.
func (f *fixture) cutTogether(words []string, round int, written *atomic.Uint64) {
	f.Helper()
	var resumes []func() error
	for _, word := range words {
		resume, err := f.stack(vol(word)).Suspend(f.Context())
		f.must(err)
		resumes = append(resumes, resume)
	}
	before := written.Load()
	var counts []uint64
	for _, word := range words {
		spec := f.copySpec(snap(fmt.Sprint(word, round)), vol(word), size)
		spec.Quiesced = true
		f.make(spec)
		counts = append(counts, count(f.read(spec.Ref)[:blockdev.Granularity]))
	}
	if counts[0] != counts[1] && counts[0] != counts[1]+1 || counts[1] < before {
		f.Errorf("round %d: the copies hold %v, which was never so; %d were written before", round, counts, before)
	}
	for _, resume := range resumes {
		f.must(resume())
		f.must(resume())
	}
}

// inTurn writes increasing numbers to the first block of each device in turn, past the page cache, and reports the number that all devices have.
func inTurn(devices []blockdev.Device, written *atomic.Uint64, stop chan bool) error {
	block, err := unix.Mmap(-1, 0, blockdev.Granularity, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Munmap(block) }()
	var files []*os.File
	defer func() {
		for _, file := range files {
			file.Close()
		}
	}()
	for _, device := range devices {
		file, err := os.OpenFile(device.Path, os.O_WRONLY|unix.O_DIRECT, 0)
		if err != nil {
			return err
		}
		files = append(files, file)
	}
	for n := uint64(1); ; n++ {
		for i := range 8 {
			block[i] = byte(n >> (8 * i))
		}
		for _, file := range files {
			if _, err := file.WriteAt(block, 0); err != nil {
				return err
			}
		}
		written.Store(n)
		select {
		case <-stop:
			return nil
		case <-time.After(time.Millisecond):
		}
	}
}
