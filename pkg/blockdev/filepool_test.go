package blockdev_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/command"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// filesystems that a file pool is tested on: without reflinks, with them, and without
// direct I/O.
var filesystems = []string{"ext4", "xfs", "btrfs", "tmpfs"}

// TestFilePool: file pools keep the contract of blockdev.Pool.
func TestFilePool(t *testing.T) {
	for _, fs := range filesystems {
		t.Run(fs, func(t *testing.T) {
			t.Parallel()
			mnt := mountNew(t, fs)
			pooltest.Run(t, func(t testing.TB, dir string) blockdev.Pool {
				return open(t, filepath.Join(mnt, filepath.Base(dir)))
			})
		})
	}
}

// mountNew makes a filesystem and mounts it for the time of a test.
func mountNew(t testing.TB, fs string) (dir string) {
	t.Helper()
	drivertest.NeedRoot(t)
	base := drivertest.Dir(t)
	dir = filepath.Join(base, "mnt")
	must(t, os.Mkdir(dir, 0o700))
	source, options := filepath.Join(base, fs+".img"), ""
	if fs == "tmpfs" {
		source, options = "tmpfs", "size=512m"
	} else {
		must(t, os.WriteFile(source, nil, 0o600))
		must(t, os.Truncate(source, 1<<30))
		drivertest.RunBtrfs(t, "mkfs."+fs, "-q", source)
	}
	if fs != "tmpfs" {
		// Not mount -o loop: a loop device keeps the mode that an earlier user gave it.
		source, options = drivertest.Loop(t, source), "rw"
		defer run(t, "losetup", "-d", source) // it goes with the mount
	}
	run(t, "mount", "-t", fs, "-o", options, source, dir)
	t.Cleanup(func() { run(t, "umount", dir) })
	return dir
}

func run(t testing.TB, argv ...string) {
	t.Helper()
	_, _, err := command.Run(context.Background(), argv...) // t.Context() ends before cleanups
	must(t, err)
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// fails makes sure that an error wraps the wanted one.
func fails(t testing.TB, err, want error, what string) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("%s: error %v, want %v", what, err, want)
	}
	if kinds := errdefs.Kinds(err); len(kinds) > 1 {
		t.Errorf("%s: error %v is of %d kinds: %v", what, err, len(kinds), kinds)
	}
}

// open opens the pool "test" of a folder, without a reserve.
func open(t testing.TB, dir string) blockdev.Pool {
	t.Helper()
	pool, err := blockdev.Open(context.Background(), "test", "file://"+dir+"?reservePercent=0&create=1")
	must(t, err)
	return pool
}

// opened is open, and close at the end of the test.
func opened(t testing.TB, dir string) blockdev.Pool {
	t.Helper()
	drivertest.NeedRoot(t)
	pool := open(t, dir)
	t.Cleanup(func() { must(t, pool.Close()) })
	return pool
}

const mib = 1 << 20

// vol and snap name objects by one hexadecimal digit.
func vol(digit string) blockdev.Ref {
	return blockdev.Ref{Kind: blockdev.Volume, Key: strings.Repeat(digit, 32)}
}
func snap(digit string) blockdev.Ref {
	return blockdev.Ref{Kind: blockdev.Snapshot, Key: strings.Repeat(digit, 32)}
}

// path of a file of an object.
func path(dir string, ref blockdev.Ref, extension string) string {
	return filepath.Join(dir, map[blockdev.Kind]string{blockdev.Volume: "volumes", blockdev.Snapshot: "snapshots"}[ref.Kind], ref.Key+extension)
}

func create(t testing.TB, pool blockdev.Pool, spec blockdev.Spec) blockdev.Record {
	t.Helper()
	spec.Name = spec.Ref.String()
	record, err := pool.Create(t.Context(), spec)
	must(t, err)
	return record
}

// attach attaches an object until the end of the test, or until it is closed.
func attach(t testing.TB, pool blockdev.Pool, ref blockdev.Ref, how blockdev.Attachment) blockdev.Device {
	t.Helper()
	device, err := pool.Attach(t.Context(), ref, how)
	must(t, err)
	t.Cleanup(func() { _ = device.Close() })
	return device
}

func writeTo(t testing.TB, path string, offset int64, b []byte) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	must(t, err)
	_, err = f.WriteAt(b, offset)
	must(t, errors.Join(err, f.Sync(), f.Close()))
}

func capacityOf(t testing.TB, pool blockdev.Pool) blockdev.Capacity {
	t.Helper()
	c, err := pool.Capacity(t.Context())
	must(t, err)
	return c
}

func reasons(problems []blockdev.Problem) (all []string) {
	for _, p := range problems {
		all = append(all, fmt.Sprintf("%d %s", p.Severity, p.Reason))
	}
	return all
}

// slot is one half of a record file, as its format is documented.
func slot(version string, generation int, body string) []byte {
	body += "\n"
	b := fmt.Appendf(nil, "ashlar-record %s gen=%d len=%d crc32c=%08x\n%s", version, generation, len(body), crc32.Checksum([]byte(body), crc32.MakeTable(crc32.Castagnoli)), body)
	return append(b, make([]byte, 8192-len(b))...)
}

func recordFile(t testing.TB, fields map[string]any) []byte {
	t.Helper()
	all := map[string]any{"kind": "vol", "size": 4 * mib, "created": "2026-01-02T03:04:05Z", "state": "ready"}
	maps.Copy(all, fields)
	body, err := json.Marshal(all)
	must(t, err)
	return append(slot("1", 1, string(body)), make([]byte, 8192)...)
}

// TestDamagedRecord: what is left of a record decides; nothing is guessed, repaired or
// deleted, and the other volumes do not notice.
func TestDamagedRecord(t *testing.T) {
	drivertest.NeedRoot(t)
	type file = []byte
	spoil := func(b file, at int) file { b[at] ^= 0xff; return b }
	future := func(generation uint64) file {
		b := make(file, 8192)
		copy(b, blockdev.Frame("ashlar-record", 3, generation, "{}\n"))
		return b
	}
	// The record, with the label third, is in both slots.
	for name, c := range map[string]struct {
		damage func(b file) file
		label  string // of the record that is left; empty: none is
	}{
		"none":                {func(b file) file { return b }, "third"},
		"one slot torn":       {func(b file) file { clear(b[64:8192]); return b }, "third"},
		"one slot lost":       {func(b file) file { clear(b[:8192]); return b }, "third"},
		"other slot torn":     {func(b file) file { return spoil(b, 8192+100) }, "third"},
		"other slot lost":     {func(b file) file { clear(b[8192:]); return b }, "third"},
		"second half missing": {func(b file) file { return b[:8192] }, "third"},
		"header spoiled":      {func(b file) file { return spoil(b, 3) }, "third"},
		"both torn":           {func(b file) file { return spoil(spoil(b, 100), 8192+100) }, ""},
		"both headers":        {func(b file) file { return spoil(spoil(b, 0), 8192) }, ""},
		"empty":               {func(file) file { return nil }, ""},
		"zeros":               {func(b file) file { clear(b); return b }, ""},
		"noise":               {func(b file) file { return bytes.Repeat([]byte("\x9e\x01noise\n"), len(b)/8) }, ""},
		"longer":              {func(b file) file { return append(b, 0) }, ""},
		"future version":      {func(b file) file { return append(future(9), b[8192:]...) }, ""},
		"future, older slot":  {func(b file) file { return append(b[:8192], future(1)...) }, ""},
		"unknown field":       {func(b file) file { return append(slot("1", 4, `{"kind":"vol","mood":"blue"}`), make([]byte, 8192)...) }, ""},
		"of another volume": {func(file) file {
			return recordFile(t, map[string]any{"key": vol("b").Key, "name": "b"})
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := drivertest.Dir(t)
			pool := open(t, dir)
			create(t, pool, blockdev.Spec{Ref: vol("a"), Size: 4 * mib, Labels: map[string]string{"n": "first"}})
			create(t, pool, blockdev.Spec{Ref: vol("c"), Size: 4 * mib})
			for _, label := range []string{"between", "second", "third"} {
				_, err := pool.SetLabels(t.Context(), vol("a"), func(l map[string]string) error { l["n"] = label; return nil })
				must(t, err)
			}
			must(t, pool.Close())
			b, err := os.ReadFile(path(dir, vol("a"), ".rec"))
			must(t, err)
			b = c.damage(b)
			must(t, os.WriteFile(path(dir, vol("a"), ".rec"), b, 0o600))

			pool = open(t, dir)
			defer func() { must(t, pool.Close()) }()
			record, err := pool.Get(t.Context(), vol("a"))
			if c.label != "" {
				if err != nil || record.Labels["n"] != c.label {
					t.Fatalf("label %q, %v; want %q", record.Labels["n"], err, c.label)
				}
				if problems := pool.PoolHealth(t.Context()); len(problems) > 0 {
					t.Errorf("problems: %v", problems)
				}
				// It can be changed, and that survives.
				_, err := pool.SetLabels(t.Context(), vol("a"), func(l map[string]string) error { l["n"] = "fourth"; return nil })
				must(t, err)
				must(t, pool.Close())
				pool = open(t, dir)
				if record, err := pool.Get(t.Context(), vol("a")); err != nil || record.Labels["n"] != "fourth" {
					t.Errorf("after a change: %v, %v", record.Labels, err)
				}
				return
			}
			for what, err := range map[string]error{
				"Get":       err,
				"Create":    second(pool.Create(t.Context(), blockdev.Spec{Ref: vol("a"), Name: vol("a").String(), Size: 4 * mib})),
				"Attach":    second(pool.Attach(t.Context(), vol("a"), blockdev.Attachment{})),
				"Expand":    second(pool.Expand(t.Context(), vol("a"), 8*mib)),
				"SetLabels": second(pool.SetLabels(t.Context(), vol("a"), func(map[string]string) error { return nil })),
				"Create from it": second(pool.Create(t.Context(), blockdev.Spec{Ref: snap("a"), Name: "s", Size: 4 * mib,
					Origin: vol("a")})),
			} {
				fails(t, err, errdefs.ErrDataLoss, what)
			}
			fails(t, pool.Delete(t.Context(), vol("a")), errdefs.ErrPrecondition, "Delete")
			problems, err := pool.Health(t.Context(), vol("a"))
			if have := reasons(problems); err != nil || !slices.Equal(have, []string{"3 RecordDamaged"}) {
				t.Errorf("Health: %v, %v", problems, err)
			}
			if have := reasons(pool.PoolHealth(t.Context())); !slices.Equal(have, []string{"1 RecordDamaged"}) {
				t.Errorf("PoolHealth: %v", have)
			}
			records, err := pool.List(t.Context(), blockdev.Volume, "", 0)
			if err != nil || len(records) != 1 || records[0].Ref != vol("c") {
				t.Errorf("List: %v, %v", records, err)
			}
			must(t, attachedOnce(t, pool, vol("c")))
			if now, err := os.ReadFile(path(dir, vol("a"), ".rec")); err != nil || !bytes.Equal(now, b) {
				t.Errorf("the damaged record was changed: %v", err)
			}
			if info, err := os.Stat(path(dir, vol("a"), ".img")); err != nil || info.Size() != 4*mib {
				t.Errorf("the image of the damaged record: %v, %v", info, err)
			}
		})
	}
}

func second[T any](_ T, err error) error { return err }

func attachedOnce(t testing.TB, pool blockdev.Pool, ref blockdev.Ref) error {
	device, err := pool.Attach(t.Context(), ref, blockdev.Attachment{})
	if err != nil {
		return err
	}
	return device.Close()
}

// TestSweep: what a crash left half-done is finished or undone when the pool is opened.
func TestSweep(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := drivertest.Dir(t)
	must(t, open(t, dir).Close())
	put := func(ref blockdev.Ref, record []byte, image int64) {
		if record != nil {
			must(t, os.WriteFile(path(dir, ref, ".rec"), record, 0o600))
		}
		if image >= 0 {
			must(t, os.WriteFile(path(dir, ref, ".img"), nil, 0o600))
			must(t, os.Truncate(path(dir, ref, ".img"), image))
		}
	}
	record := func(ref blockdev.Ref, state string, more map[string]any) []byte {
		fields := map[string]any{"kind": ref.Kind, "key": ref.Key, "name": ref.String(), "state": state}
		maps.Copy(fields, more)
		return recordFile(t, fields)
	}
	gone := map[string]blockdev.Ref{"creating": vol("1"), "creating, no image": vol("2"), "deleting": vol("3"), "deleting, no image": vol("4"),
		"a cut": snap("1"), "an empty record": vol("5"), "a record of zeros": vol("6")}
	put(vol("1"), record(vol("1"), "creating", nil), 4*mib)
	put(vol("2"), record(vol("2"), "creating", nil), -1)
	put(vol("3"), record(vol("3"), "deleting", nil), 4*mib)
	put(vol("4"), record(vol("4"), "deleting", nil), -1)
	put(snap("1"), record(snap("1"), "creating", map[string]any{"origin": vol("a").String()}), 1*mib)
	put(vol("5"), []byte{}, -1)
	put(vol("6"), make([]byte, 16384), -1)

	put(vol("a"), record(vol("a"), "ready", nil), 4*mib)
	put(vol("b"), record(vol("b"), "ready", map[string]any{"growing": 8 * mib, "thin": true}), 4*mib)
	put(vol("c"), record(vol("c"), "ready", map[string]any{"growing": 8 * mib}), 6*mib)
	put(vol("e"), nil, 3*mib) // nobody knows whose it is
	must(t, os.WriteFile(filepath.Join(dir, "volumes", "mine.img"), []byte("mine"), 0o600))

	for range 2 {
		pool := open(t, dir)
		for what, ref := range gone {
			fails(t, second(pool.Get(t.Context(), ref)), errdefs.ErrNotFound, what)
			for _, extension := range []string{".rec", ".img"} {
				if _, err := os.Stat(path(dir, ref, extension)); !errors.Is(err, os.ErrNotExist) {
					t.Errorf("%s: its %s is still there: %v", what, extension, err)
				}
			}
		}
		for ref, want := range map[blockdev.Ref]int64{vol("a"): 4 * mib, vol("b"): 8 * mib, vol("c"): 8 * mib} {
			r, err := pool.Get(t.Context(), ref)
			info, statErr := os.Stat(path(dir, ref, ".img"))
			if err := errors.Join(err, statErr); err != nil || r.Size != want || info.Size() != want {
				t.Errorf("%s: %d bytes, image %v, %v; want %d", ref, r.Size, info, err, want)
			}
		}
		if info, err := os.Stat(path(dir, vol("c"), ".img")); err != nil || info.Sys().(*syscall.Stat_t).Blocks*512 < 8*mib {
			t.Errorf("a thick volume that grew has not its space: %v, %v", info, err)
		}
		if c := capacityOf(t, pool); c.Promised != 20*mib {
			t.Errorf("%d bytes are promised, want %d", c.Promised, 20*mib)
		}
		problems := pool.PoolHealth(t.Context())
		if !slices.Equal(reasons(problems), []string{"1 UnknownImage"}) || !strings.Contains(problems[0].Message, "mine.img") || !strings.Contains(problems[0].Message, vol("e").Key) {
			t.Errorf("PoolHealth: %v", problems)
		}
		must(t, pool.Close())
	}
	if b, err := os.ReadFile(filepath.Join(dir, "volumes", "mine.img")); err != nil || string(b) != "mine" {
		t.Errorf("an image without a record: %q, %v", b, err)
	}
	if info, err := os.Stat(path(dir, vol("e"), ".img")); err != nil || info.Size() != 3*mib {
		t.Errorf("an image without a record: %v, %v", info, err)
	}
}

// TestLostImage: bytes that are gone are not made up.
func TestLostImage(t *testing.T) {
	drivertest.NeedRoot(t)
	for name, c := range map[string]struct {
		lose   func(image string) error
		reason string
	}{
		"missing":   {os.Remove, "ImageMissing"},
		"truncated": {func(image string) error { return os.Truncate(image, 4*mib-1) }, "ImageTruncated"},
		"a folder":  {func(image string) error { return errors.Join(os.Remove(image), os.Mkdir(image, 0o700)) }, "ImageOfAnother"},
		"a FIFO":    {func(image string) error { return errors.Join(os.Remove(image), unix.Mkfifo(image, 0o600)) }, "ImageOfAnother"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := drivertest.Dir(t)
			pool := opened(t, dir)
			create(t, pool, blockdev.Spec{Ref: vol("a"), Size: 4 * mib})
			must(t, c.lose(path(dir, vol("a"), ".img")))
			// It is not made anew behind its owner's back: not by a retry either.
			create(t, pool, blockdev.Spec{Ref: vol("a"), Size: 4 * mib})
			problems, err := pool.Health(t.Context(), vol("a"))
			must(t, err)
			if have := reasons(problems); !slices.Equal(have, []string{"3 " + c.reason}) {
				t.Errorf("Health: %v", problems)
			}
			for what, err := range map[string]error{
				"Attach":         second(pool.Attach(t.Context(), vol("a"), blockdev.Attachment{})),
				"Attach to read": second(pool.Attach(t.Context(), vol("a"), blockdev.Attachment{ReadOnly: true})),
				"Expand":         second(pool.Expand(t.Context(), vol("a"), 8*mib)),
				"copy":           second(pool.Create(t.Context(), blockdev.Spec{Ref: snap("a"), Name: "s", Size: 4 * mib, Origin: vol("a")})),
			} {
				fails(t, err, errdefs.ErrDataLoss, what)
			}
			must(t, pool.Delete(t.Context(), vol("a")))
			if c := capacityOf(t, pool); c.Promised != 0 {
				t.Errorf("%d bytes are promised after Delete", c.Promised)
			}
		})
	}
}

// TestImageOfAnother: an image that has the name of another object, by whatever mistake, is shown to nobody
// under that name, and goes with no other object than its own.
func TestImageOfAnother(t *testing.T) {
	const size = 128 * mib
	for name, confuse := range map[string]func(a, b string) error{
		"swapped": func(a, b string) error {
			return unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_EXCHANGE)
		},
		"linked":  func(a, b string) error { return errors.Join(os.Remove(b), os.Link(a, b)) },
		"symlink": func(a, b string) error { return errors.Join(os.Remove(b), os.Symlink(filepath.Base(a), b)) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := mountNew(t, "xfs")
			pool := opened(t, dir)
			a, b := path(dir, vol("a"), ".img"), path(dir, vol("b"), ".img")
			text := []byte("of a")
			for _, ref := range []blockdev.Ref{vol("a"), vol("b")} {
				create(t, pool, blockdev.Spec{Ref: ref, Size: size, Provisioning: blockdev.Thin})
			}
			must(t, os.WriteFile(a, text, 0o600))
			must(t, os.Truncate(a, size))
			inode := inodeOf(t, a)
			must(t, confuse(a, b))
			for what, err := range map[string]error{
				"Attach":         second(pool.Attach(t.Context(), vol("b"), blockdev.Attachment{})),
				"Attach to read": second(pool.Attach(t.Context(), vol("b"), blockdev.Attachment{ReadOnly: true})),
				"Expand":         second(pool.Expand(t.Context(), vol("b"), 2*size)),
				"copy":           second(pool.Create(t.Context(), blockdev.Spec{Ref: snap("b"), Name: "s", Size: size, Origin: vol("b")})),
			} {
				fails(t, err, errdefs.ErrDataLoss, what)
			}
			problems, err := pool.Health(t.Context(), vol("b"))
			must(t, err)
			if have := reasons(problems); !slices.Equal(have, []string{"3 ImageOfAnother"}) {
				t.Errorf("Health: %v", problems)
			}
			if name == "swapped" {
				must(t, confuse(a, b)) // as the operator does who reads the error
				device, err := pool.Attach(t.Context(), vol("b"), blockdev.Attachment{})
				must(t, err)
				must(t, device.Close())
				must(t, os.Rename(a, b))
			}
			kept := filepath.Join(dir, "kept")
			if inodeOf(t, b) == inode && name != "symlink" {
				must(t, os.Link(b, kept)) // Delete takes a name away, and this is the last one
			} else {
				kept = a
			}
			must(t, pool.Delete(t.Context(), vol("b")))
			have, err := os.ReadFile(kept)
			must(t, err)
			if len(have) != size || !bytes.HasPrefix(have, text) {
				t.Errorf("of a's image %d bytes are left after the deletion of b", len(have))
			}
		})
	}
}

// TestOlderSize: a record from before a growth cuts nothing off an image, neither of the volume nor of its copies, and
// an expansion puts it right.
func TestOlderSize(t *testing.T) {
	for _, provisioning := range []blockdev.Provisioning{blockdev.Thick, blockdev.Thin} {
		t.Run(fmt.Sprint(provisioning), func(t *testing.T) {
			drivertest.NeedRoot(t)
			dir := drivertest.Dir(t)
			pool := open(t, dir)
			image, record := path(dir, vol("a"), ".img"), path(dir, vol("a"), ".rec")
			create(t, pool, blockdev.Spec{Ref: vol("a"), Size: 8 * mib, Provisioning: provisioning})
			older, err := os.ReadFile(record)
			must(t, err)
			must(t, second(pool.Expand(t.Context(), vol("a"), 32*mib)))
			text := bytes.Repeat([]byte("end"), mib)
			f, err := os.OpenFile(image, os.O_WRONLY, 0)
			must(t, err)
			must(t, errors.Join(second(f.WriteAt(text, 28*mib)), f.Close()))
			must(t, pool.Close())
			must(t, os.WriteFile(record, older, 0o600))
			pool = opened(t, dir)
			whole := func(image, when string) {
				t.Helper()
				have, err := os.ReadFile(image)
				must(t, err)
				if len(have) != 32*mib || !bytes.Equal(have[28*mib:28*mib+len(text)], text) {
					t.Fatalf("%s: %s has %d bytes, or others", when, image, len(have))
				}
			}
			problems, err := pool.Health(t.Context(), vol("a"))
			must(t, err)
			if len(problems) != 1 || problems[0].Reason != "ImageLonger" {
				t.Errorf("Health: %v", problems)
			}
			copied := blockdev.Spec{Ref: snap("a"), Name: snap("a").String(), Size: 8 * mib, Origin: vol("a")}
			fails(t, second(pool.Create(t.Context(), copied)), errdefs.ErrPrecondition, "a copy of a part")
			ended, end := context.WithCancel(t.Context())
			end()
			_, _ = pool.Expand(ended, vol("a"), 12*mib) // thin volumes need no time for it
			whole(image, "after an expansion that was given up")
			must(t, second(pool.Expand(t.Context(), vol("a"), 16*mib)))
			whole(image, "after an expansion")
			must(t, second(pool.Expand(t.Context(), vol("a"), 32*mib)))
			if problems, err := pool.Health(t.Context(), vol("a")); err != nil || len(problems) > 0 {
				t.Errorf("Health: %v, %v", problems, err)
			}
			copied.Size = 32 * mib
			must(t, second(pool.Create(t.Context(), copied)))
			whole(path(dir, snap("a"), ".img"), "a copy")
		})
	}
}

func inodeOf(t testing.TB, path string) uint64 {
	t.Helper()
	info, err := os.Lstat(path)
	must(t, err)
	return info.Sys().(*syscall.Stat_t).Ino
}

// TestLock: one folder, one process, also if somebody takes the lock for a stale one and removes it.
func TestLock(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := drivertest.Dir(t)
	pool := open(t, dir)
	fails(t, second(blockdev.Open(t.Context(), "other", "file://"+dir)), errdefs.ErrInUse, "Open of an open pool")
	must(t, os.Remove(filepath.Join(dir, "lock")))
	fails(t, second(blockdev.Open(t.Context(), "other", "file://"+dir)), errdefs.ErrInUse, "Open of an open pool without its lock")
	must(t, pool.Close())
	must(t, open(t, dir).Close())
}

// TestFolderGone: a pool does not go on in a folder that is another one by now.
func TestFolderGone(t *testing.T) {
	dir := filepath.Join(drivertest.Dir(t), "pool")
	pool := opened(t, dir)
	create(t, pool, blockdev.Spec{Ref: vol("a"), Size: 4 * mib})
	refuses := func(when string) {
		t.Helper()
		fails(t, second(pool.Capacity(t.Context())), errdefs.ErrUnavailable, when+": Capacity")
		fails(t, second(pool.Create(t.Context(), blockdev.Spec{Ref: vol("b"), Name: "b", Size: 4 * mib})), errdefs.ErrUnavailable, when+": Create")
		problems, err := pool.Health(t.Context(), vol("a"))
		if have := reasons(problems); err != nil || !slices.Equal(have, []string{"2 PoolUnavailable"}) {
			t.Errorf("%s: Health: %v, %v", when, problems, err)
		}
		if have := reasons(pool.PoolHealth(t.Context())); !slices.Equal(have, []string{"2 PoolUnavailable"}) {
			t.Errorf("%s: PoolHealth: %v", when, have)
		}
	}
	must(t, os.Rename(dir, dir+".moved"))
	refuses("moved away")
	must(t, os.MkdirAll(filepath.Join(dir, "volumes"), 0o700))
	refuses("another in its place")
	must(t, os.RemoveAll(dir))
	must(t, os.Rename(dir+".moved", dir))
	create(t, pool, blockdev.Spec{Ref: vol("b"), Size: 4 * mib})
}

// TestArithmetic: reservePercent of the filesystem is never promised; of the rest,
// overprovision times as much.
func TestArithmetic(t *testing.T) {
	mnt := mountNew(t, "tmpfs") // nobody else uses it, and it has no overhead
	const size = 512 * mib
	for i, c := range []struct {
		options string
		want    int64
	}{
		{"", size * 80 / 100}, // a directory beside others
		{"?reservePercent=0", size},
		{"?reservePercent=25", size * 3 / 4},
		{"?overprovision=2&reservePercent=0", size * 2},
		{"?overprovision=1.5&reservePercent=50", size * 3 / 4},
		{"?overprovision=100&reservePercent=90", size * 10},
	} {
		dir := filepath.Join(mnt, strconv.Itoa(i))
		pool, err := blockdev.Open(t.Context(), "test", "file://"+dir+c.options)
		must(t, err)
		near := func(what string, have, want int64) {
			t.Helper()
			if have > want+blockdev.Granularity || have < want-want/50 {
				t.Errorf("%q: %s is %d, want about %d", c.options, what, have, want)
			}
		}
		near("total", capacityOf(t, pool).Total, c.want)
		create(t, pool, blockdev.Spec{Ref: vol("a"), Size: 64 * mib})
		create(t, pool, blockdev.Spec{Ref: vol("b"), Size: 64 * mib, Provisioning: blockdev.Thin})
		device := attach(t, pool, vol("b"), blockdev.Attachment{})
		writeTo(t, device.Path, 0, bytes.Repeat([]byte{1}, 32*mib))
		must(t, errors.Join(device.Close(), pool.Close()))
		pool, err = blockdev.Open(t.Context(), "test", "file://"+dir+c.options) // measures anew
		must(t, err)
		have := capacityOf(t, pool)
		near("total with volumes", have.Total, c.want)
		near("available", have.Available, c.want-128*mib)
		if have.Promised != 128*mib || have.MaxVolume != have.Available {
			t.Errorf("%q: %+v", c.options, have)
		}
		must(t, errors.Join(pool.Detach(t.Context(), vol("b")), pool.Delete(t.Context(), vol("a")), pool.Delete(t.Context(), vol("b")), pool.Close()))
		must(t, os.RemoveAll(dir))
	}
}

// TestSharedBlocks: blocks that images share are there once, however the copies came to
// be and whichever of them are left.
func TestSharedBlocks(t *testing.T) {
	for _, fs := range []string{"xfs", "btrfs"} {
		t.Run(fs, func(t *testing.T) {
			t.Parallel()
			const size = 64 * mib
			pool := opened(t, filepath.Join(mountNew(t, fs), "pool"))
			before := capacityOf(t, pool).Total
			same := func(when string) {
				t.Helper()
				if have := capacityOf(t, pool).Total; have > before+mib || have < before-24*mib {
					t.Errorf("%s: the total is %d, and was %d", when, have, before)
				}
			}
			create(t, pool, blockdev.Spec{Ref: vol("a"), Size: size})
			device := attach(t, pool, vol("a"), blockdev.Attachment{})
			writeTo(t, device.Path, 0, bytes.Repeat([]byte{7}, size))
			same("written")
			create(t, pool, blockdev.Spec{Ref: snap("1"), Size: size, Origin: vol("a")})
			same("snapshot")
			writeTo(t, device.Path, 0, bytes.Repeat([]byte{8}, size/2))
			must(t, device.Close())
			create(t, pool, blockdev.Spec{Ref: vol("b"), Size: size, Origin: snap("1")})
			same("restored")
			// The chain from a to b has lost its link.
			must(t, pool.Delete(t.Context(), snap("1")))
			same("snapshot deleted")
			create(t, pool, blockdev.Spec{Ref: vol("c"), Size: size, Origin: vol("b"), Provisioning: blockdev.Thin})
			same("clone")
			must(t, pool.Detach(t.Context(), vol("a")))
			must(t, pool.Delete(t.Context(), vol("b")))
			same("middle deleted")
			must(t, pool.Delete(t.Context(), vol("a")))
			must(t, pool.Delete(t.Context(), vol("c")))
			same("all deleted")
		})
	}
}

func blocksOf(t testing.TB, path string) int64 {
	t.Helper()
	info, err := os.Stat(path)
	must(t, err)
	return info.Sys().(*syscall.Stat_t).Blocks * 512
}

// TestDiscard: what a volume discards is still promised to it.
func TestDiscard(t *testing.T) {
	dir := filepath.Join(mountNew(t, "ext4"), "pool")
	pool := opened(t, dir)
	const size = 256 * mib
	create(t, pool, blockdev.Spec{Ref: vol("a"), Size: size})
	blocks := func() int64 { return blocksOf(t, path(dir, vol("a"), ".img")) }
	before := capacityOf(t, pool)
	device := attach(t, pool, vol("a"), blockdev.Attachment{})
	// What the kernel does when a filesystem on the device trims.
	image, err := os.OpenFile(path(dir, vol("a"), ".img"), os.O_WRONLY, 0)
	must(t, err)
	must(t, errors.Join(unix.Fallocate(int(image.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, size), image.Close(), device.Close()))
	if n := blocks(); n > size/2 {
		t.Fatalf("after a discard the image has still %d bytes: this test shows nothing", n)
	}
	if after := capacityOf(t, pool); after.Available > before.Available {
		t.Errorf("after a discard %d bytes are available, %d before", after.Available, before.Available)
	}
	// All that is left is given away, and taken; the volume gets its own back all the same.
	create(t, pool, blockdev.Spec{Ref: vol("b"), Size: (before.Available - 8*mib) / mib * mib})
	device = attach(t, pool, vol("a"), blockdev.Attachment{})
	if n := blocks(); n < size {
		t.Errorf("attached again, the image has %d bytes of its %d", n, size)
	}
	writeTo(t, device.Path, 0, bytes.Repeat([]byte{1}, size))
}

// endsAfter is a context that ends when it was asked n times.
type endsAfter struct {
	context.Context
	n int
}

func (c *endsAfter) Err() error {
	if c.n--; c.n < 0 {
		return context.Canceled
	}
	return nil
}

// TestCutFails: who could not hold back the writes for as long as they had to be says so at the cut, and
// gets no copy.
func TestCutFails(t *testing.T) {
	for _, fs := range []string{"ext4", "xfs"} {
		t.Run(fs, func(t *testing.T) {
			pool, failure := opened(t, filepath.Join(mountNew(t, fs), "pool")), errors.New("not today")
			create(t, pool, blockdev.Spec{Ref: vol("a"), Size: mib})
			for _, to := range []blockdev.Ref{vol("b"), snap("b")} {
				_, err := pool.Create(t.Context(), blockdev.Spec{Ref: to, Name: "new", Size: mib, Origin: vol("a"), Quiesced: true,
					Cut: func(context.Context) error { return failure }})
				fails(t, err, failure, "a cut that fails")
				fails(t, second(pool.Get(t.Context(), to)), errdefs.ErrNotFound, "its copy")
			}
		})
	}
}

// TestResume: a copy of a snapshot that was cut short goes on where it stopped, with the
// same spec; with another one it begins anew; and when nobody comes back it goes.
func TestResume(t *testing.T) {
	dir := filepath.Join(mountNew(t, "ext4"), "pool")
	pool := opened(t, dir)
	const size = 48 * mib // more than is copied between two looks at the context
	content := bytes.Repeat([]byte("0123456789abcdef"), size/16)
	create(t, pool, blockdev.Spec{Ref: vol("a"), Size: size})
	device := attach(t, pool, vol("a"), blockdev.Attachment{})
	writeTo(t, device.Path, 0, content)
	must(t, device.Close())
	create(t, pool, blockdev.Spec{Ref: snap("a"), Size: size, Origin: vol("a")})
	promised := capacityOf(t, pool).Promised

	spec := blockdev.Spec{Ref: vol("b"), Name: vol("b").String(), Size: size, Origin: snap("a"), Provisioning: blockdev.Thin, Labels: map[string]string{"k": "v"}}
	mark := bytes.Repeat([]byte{0xee}, blockdev.Granularity)
	interrupt := func(spec blockdev.Spec) {
		t.Helper()
		_, err := pool.Create(&endsAfter{Context: t.Context(), n: 2}, spec)
		fails(t, err, context.Canceled, "Create")
		fails(t, second(pool.Get(t.Context(), spec.Ref)), errdefs.ErrNotFound, "Get")
		// What is there already is not copied again: a mark in it stays.
		writeTo(t, path(dir, spec.Ref, ".img"), 0, mark)
	}
	marked := func(ref blockdev.Ref) bool {
		t.Helper()
		b, err := os.ReadFile(path(dir, ref, ".img"))
		must(t, err)
		if len(b) != size || !bytes.Equal(b[len(mark):], content[len(mark):]) {
			t.Fatalf("%s: the copy is not right: %d bytes", ref, len(b))
		}
		return bytes.Equal(b[:len(mark)], mark)
	}
	for name, c := range map[string]struct {
		change func(s *blockdev.Spec)
		resume bool
	}{
		"same":            {func(*blockdev.Spec) {}, true},
		"another size":    {func(s *blockdev.Spec) { s.Size = size + mib }, false},
		"thick":           {func(s *blockdev.Spec) { s.Provisioning = blockdev.Thick }, false},
		"another label":   {func(s *blockdev.Spec) { s.Labels = map[string]string{"k": "w"} }, false},
		"another name":    {func(s *blockdev.Spec) { s.Name = "else" }, false},
		"another origin":  {func(s *blockdev.Spec) { s.Origin = vol("a") }, false},
		"not a copy now":  {func(s *blockdev.Spec) { s.Origin = blockdev.Ref{} }, false},
		"other snapshot":  {nil, false},
		"deleted between": {func(*blockdev.Spec) { must(t, pool.Delete(t.Context(), vol("b"))) }, false},
	} {
		interrupt(spec)
		retry := spec
		if c.change != nil {
			c.change(&retry)
		} else {
			// A snapshot of that name again, but another one.
			must(t, pool.Delete(t.Context(), snap("a")))
			create(t, pool, blockdev.Spec{Ref: snap("a"), Size: size, Origin: vol("a")})
		}
		record, err := pool.Create(t.Context(), retry)
		must(t, err)
		if record.Thin != (retry.Provisioning == blockdev.Thin) || record.Size != retry.Size || record.Name != retry.Name || record.Origin != retry.Origin || !maps.Equal(record.Labels, retry.Labels) {
			t.Errorf("%s: %#v is not what %#v asks for", name, record, retry)
		}
		if retry.Size == size && retry.Origin != (blockdev.Ref{}) {
			if have := marked(vol("b")); have != c.resume {
				t.Errorf("%s: gone on with %v, want %v", name, have, c.resume)
			}
		}
		must(t, pool.Delete(t.Context(), vol("b")))
		if have := capacityOf(t, pool).Promised; have != promised {
			t.Fatalf("%s: %d bytes are promised in the end, want %d", name, have, promised)
		}
	}

	interrupt(spec)
	create(t, pool, blockdev.Spec{Ref: vol("c"), Size: mib}) // too early for b to be given up
	if have := capacityOf(t, pool).Promised; have != promised+size+mib {
		t.Errorf("%d bytes are promised, want %d", have, promised+size+mib)
	}
	blockdev.Abandon(pool, spec.Ref)
	create(t, pool, blockdev.Spec{Ref: vol("d"), Size: mib})
	if have := capacityOf(t, pool).Promised; have != promised+2*mib {
		t.Errorf("%d bytes are promised after the copy was given up, want %d", have, promised+2*mib)
	}
	if _, err := os.Stat(path(dir, spec.Ref, ".img")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the image of what was given up: %v", err)
	}
}

// TestLargeRecord: labels that do not fit are refused, and nothing changes.
func TestLargeRecord(t *testing.T) {
	pool := opened(t, drivertest.Dir(t))
	large := map[string]string{"k": strings.Repeat("x", 9000)}
	_, err := pool.Create(t.Context(), blockdev.Spec{Ref: vol("a"), Name: "a", Size: mib, Labels: large})
	fails(t, err, errdefs.ErrInvalid, "Create")
	fails(t, second(pool.Get(t.Context(), vol("a"))), errdefs.ErrNotFound, "Get")
	if c := capacityOf(t, pool); c.Promised != 0 {
		t.Errorf("%d bytes are promised", c.Promised)
	}
	create(t, pool, blockdev.Spec{Ref: vol("a"), Size: mib, Labels: map[string]string{"k": "v"}})
	_, err = pool.SetLabels(t.Context(), vol("a"), func(l map[string]string) error { maps.Copy(l, large); return nil })
	fails(t, err, errdefs.ErrInvalid, "SetLabels")
	if r, err := pool.Get(t.Context(), vol("a")); err != nil || r.Labels["k"] != "v" {
		t.Errorf("after a refusal: %v, %v", r.Labels, err)
	}
}

// TestConcurrentAttach: many volumes find free loop devices at once, and each its own.
func TestConcurrentAttach(t *testing.T) {
	dir := drivertest.Dir(t)
	pool := opened(t, dir)
	const n = 32
	devices := make([]blockdev.Device, n)
	ref := func(i int) blockdev.Ref { return blockdev.Ref{Kind: blockdev.Volume, Key: fmt.Sprintf("%032x", i)} }
	for i := range n {
		create(t, pool, blockdev.Spec{Ref: ref(i), Size: mib, Provisioning: blockdev.Thin})
		writeTo(t, path(dir, ref(i), ".img"), 0, []byte(ref(i).Key))
	}
	for round := range 3 {
		errs := make([]error, n)
		var all sync.WaitGroup
		for i := range n {
			all.Go(func() {
				devices[i], errs[i] = pool.Attach(t.Context(), ref(i), blockdev.Attachment{Keep: round%2 == 0})
			})
		}
		all.Wait()
		must(t, errors.Join(errs...))
		numbers := map[uint64]int{}
		for i, device := range devices {
			b := make([]byte, 32)
			f, err := os.Open(device.Path)
			must(t, err)
			_, err = f.ReadAt(b, 0)
			must(t, errors.Join(err, f.Close()))
			if string(b) != ref(i).Key {
				t.Errorf("volume %d is not what %s holds: %q", i, device.Path, b)
			}
			if other, taken := numbers[device.Number]; taken {
				t.Errorf("volumes %d and %d are both %s", i, other, device.Path)
			}
			numbers[device.Number] = i
		}
		for i := range n {
			all.Go(func() { errs[i] = errors.Join(devices[i].Close(), pool.Detach(t.Context(), ref(i))) })
		}
		all.Wait()
		must(t, errors.Join(errs...))
	}
}

// TestConcurrentDetach: a device that many take away at once goes, and nobody is told that it could not be
// looked at: the kernel refuses to open one that is on its way.
func TestConcurrentDetach(t *testing.T) {
	pool := opened(t, drivertest.Dir(t))
	create(t, pool, blockdev.Spec{Ref: vol("a"), Size: mib})
	for range 100 {
		device, err := pool.Attach(t.Context(), vol("a"), blockdev.Attachment{Keep: true})
		must(t, err)
		must(t, device.Close())
		errs := make([]error, 8)
		var all sync.WaitGroup
		for i := range errs {
			all.Go(func() { errs[i] = pool.Detach(t.Context(), vol("a")) })
		}
		all.Wait()
		must(t, errors.Join(errs...))
	}
}

// TestAttachBesideLooks: whoever looks at a volume while it is attached or detached does not make the pool
// forget its device.
func TestAttachBesideLooks(t *testing.T) {
	pool := opened(t, drivertest.Dir(t))
	create(t, pool, blockdev.Spec{Ref: vol("a"), Size: mib})
	ctx, stop := context.WithCancel(t.Context())
	var looking sync.WaitGroup
	defer looking.Wait()
	defer stop()
	for range 4 {
		looking.Go(func() {
			for ctx.Err() == nil {
				if _, err := pool.Health(ctx, vol("a")); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for range 100 {
		device, err := pool.Attach(t.Context(), vol("a"), blockdev.Attachment{Keep: true})
		must(t, err)
		must(t, device.Close())
		again, err := pool.Attach(t.Context(), vol("a"), blockdev.Attachment{Keep: true})
		must(t, err)
		must(t, again.Close())
		if again.Number != device.Number {
			t.Fatalf("attached again as %s, not %s", again.Path, device.Path)
		}
		must(t, pool.Detach(t.Context(), vol("a")))
		if left, err := pool.Attached(t.Context(), vol("a")); err != nil || len(left) > 0 {
			t.Fatalf("left are %v, %v", left, err)
		}
	}
}

// beside has many look for problems, again and again until stop: there are none.
func beside(t *testing.T, many int, look func(context.Context) ([]blockdev.Problem, error)) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	var looking sync.WaitGroup
	for range many {
		looking.Go(func() {
			for ctx.Err() == nil {
				if problems, err := look(ctx); len(problems) > 0 || err != nil {
					t.Errorf("%v, %v", problems, err)
					return
				}
			}
		})
	}
	return func() { cancel(); looking.Wait() }
}

// TestHealthBesideDelete: a volume that is being deleted is not reported as lost.
func TestHealthBesideDelete(t *testing.T) {
	pool := opened(t, drivertest.Dir(t))
	defer beside(t, 2, func(ctx context.Context) ([]blockdev.Problem, error) {
		problems, err := pool.Health(ctx, vol("a"))
		if errors.Is(err, errdefs.ErrNotFound) {
			err = nil
		}
		return problems, err
	})()
	for range 300 {
		create(t, pool, blockdev.Spec{Ref: vol("a"), Size: mib})
		must(t, pool.Delete(t.Context(), vol("a")))
	}
}

// TestPoolHealthBesideCreate: the health of a pool can be asked beside the making of a volume (with -race).
func TestPoolHealthBesideCreate(t *testing.T) {
	pool := opened(t, drivertest.Dir(t))
	defer beside(t, 1, func(ctx context.Context) (problems []blockdev.Problem, err error) {
		problems = pool.PoolHealth(ctx)
		return slices.DeleteFunc(problems, func(p blockdev.Problem) bool { return p.Reason != "RecordsNotSafe" }), nil
	})()
	for range 50 {
		create(t, pool, blockdev.Spec{Ref: vol("a"), Size: mib})
		must(t, pool.Delete(t.Context(), vol("a")))
	}
}

// TestDetachTold: a device that its last user told to go, and keeps open, is not gone.
func TestDetachTold(t *testing.T) {
	pool := opened(t, drivertest.Dir(t))
	create(t, pool, blockdev.Spec{Ref: vol("a"), Size: mib})
	device, err := pool.Attach(t.Context(), vol("a"), blockdev.Attachment{Keep: true})
	must(t, err)
	must(t, device.Close())
	user, err := os.OpenFile(device.Path, os.O_RDWR, 0)
	must(t, err)
	for range 2 {
		if err := pool.Detach(t.Context(), vol("a")); !errors.Is(err, errdefs.ErrInUse) {
			t.Errorf("detached while it is open: %v", err)
		}
		_, _, _ = unix.Syscall(unix.SYS_IOCTL, user.Fd(), unix.LOOP_CLR_FD, 0) // a device of the device mapper has none
	}
	must(t, user.Close())
	must(t, pool.Detach(t.Context(), vol("a")))
}

// TestStartBesideTold: a device that its last user told to go, and keeps open, is not gone for a driver that starts.
func TestStartBesideTold(t *testing.T) {
	dir := drivertest.Dir(t)
	drivertest.NeedRoot(t)
	pool := open(t, dir)
	create(t, pool, blockdev.Spec{Ref: vol("a"), Size: mib})
	device, err := pool.Attach(t.Context(), vol("a"), blockdev.Attachment{Keep: true})
	must(t, err)
	must(t, device.Close())
	user, err := os.OpenFile(device.Path, os.O_RDWR, 0)
	must(t, err)
	fails(t, pool.Detach(t.Context(), vol("a")), errdefs.ErrInUse, "detach while it is open")
	_, _, _ = unix.Syscall(unix.SYS_IOCTL, user.Fd(), unix.LOOP_CLR_FD, 0) // a device of the device mapper has none
	must(t, pool.Close())
	pool = opened(t, dir)
	if err := pool.Detach(t.Context(), vol("a")); !errors.Is(err, errdefs.ErrInUse) {
		t.Errorf("detached while it is open: %v", err)
	}
	must(t, user.Close())
	must(t, pool.Detach(t.Context(), vol("a")))
}

// TestDetachBesideTold: a device of somebody else, which has the number of one that a volume had, may have been
// told to go. It keeps nobody from detaching the volume.
func TestDetachBesideTold(t *testing.T) {
	dir := drivertest.Dir(t)
	pool := opened(t, dir)
	create(t, pool, blockdev.Spec{Ref: vol("a"), Size: mib})
	device, err := pool.Attach(t.Context(), vol("a"), blockdev.Attachment{})
	must(t, err)
	must(t, device.Close()) // and it goes
	sysfs := "/sys/block/" + filepath.Base(device.Path) + "/loop"
	for _, err := os.Stat(sysfs); err == nil; _, err = os.Stat(sysfs) {
		time.Sleep(time.Millisecond)
	}
	image := dir + "/other"
	must(t, os.WriteFile(image, make([]byte, mib), 0o600))
	drivertest.Run(t, "losetup", device.Path, image)
	user, err := os.OpenFile(device.Path, os.O_RDWR, 0)
	must(t, err)
	defer user.Close()
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, user.Fd(), unix.LOOP_CLR_FD, 0)
	if errno != 0 {
		t.Fatal(errno)
	}
	if err := pool.Detach(t.Context(), vol("a")); err != nil {
		t.Error(err)
	}
}

// TestHealthBesideGrowth: a volume that grows is not reported to be longer than its record says.
func TestHealthBesideGrowth(t *testing.T) {
	pool := opened(t, drivertest.Dir(t))
	create(t, pool, blockdev.Spec{Ref: vol("a"), Size: mib})
	defer beside(t, 4, func(ctx context.Context) ([]blockdev.Problem, error) { return pool.Health(ctx, vol("a")) })()
	for n := range int64(200) {
		_, err := pool.Expand(t.Context(), vol("a"), (n+2)*mib)
		must(t, err)
	}
}

// TestAttachBesideHolder: a free loop device that somebody has open for himself keeps nobody from the others.
func TestAttachBesideHolder(t *testing.T) {
	pool := opened(t, drivertest.Dir(t))
	create(t, pool, blockdev.Spec{Ref: vol("a"), Size: mib})
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	must(t, err)
	defer control.Close()
	free, _, errno := unix.Syscall(unix.SYS_IOCTL, control.Fd(), unix.LOOP_CTL_GET_FREE, 0)
	if errno != 0 {
		t.Fatal(errno)
	}
	holder, err := os.OpenFile(fmt.Sprintf("/dev/loop%d", free), os.O_RDONLY|unix.O_EXCL, 0)
	must(t, err)
	defer holder.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for range 3 {
		device, err := pool.Attach(ctx, vol("a"), blockdev.Attachment{Keep: true})
		must(t, err)
		must(t, device.Close())
		must(t, pool.Detach(ctx, vol("a")))
	}
}

// takeNumber attaches new volumes of a pool until one is the device with the given
// number, and leaves only that one. Others on the machine may be faster, so it may fail.
func takeNumber(t testing.TB, pool blockdev.Pool, number uint64) (blockdev.Device, bool) {
	t.Helper()
	var others []blockdev.Device
	defer func() {
		for _, device := range others {
			must(t, device.Close())
		}
	}()
	for i := range 16 {
		ref := blockdev.Ref{Kind: blockdev.Volume, Key: fmt.Sprintf("%032x", i)}
		create(t, pool, blockdev.Spec{Ref: ref, Size: mib, Provisioning: blockdev.Thin})
		device := attach(t, pool, ref, blockdev.Attachment{})
		if device.Number == number {
			return device, true
		}
		others = append(others, device)
	}
	return blockdev.Device{}, false
}

// TestReusedNumber: a device that was ours may be another's by now; it is left alone.
func TestReusedNumber(t *testing.T) {
	dir := drivertest.Dir(t)
	pool, other := opened(t, filepath.Join(dir, "a")), opened(t, filepath.Join(dir, "b"))
	create(t, pool, blockdev.Spec{Ref: vol("a"), Size: mib})
	for range 10 {
		device := attach(t, pool, vol("a"), blockdev.Attachment{ReadOnly: true, Keep: true})
		must(t, device.Close())
		run(t, "losetup", "--detach", device.Path)
		theirs, same := takeNumber(t, other, device.Number)
		if !same {
			continue
		}
		if devices, err := pool.Attached(t.Context(), vol("a")); err != nil || len(devices) != 0 {
			t.Errorf("Attached: %v, %v", devices, err)
		}
		must(t, pool.Detach(t.Context(), vol("a")))
		must(t, pool.Delete(t.Context(), vol("a")))
		var still [16]byte
		f, err := os.Open(theirs.Path)
		must(t, err)
		_, err = f.ReadAt(still[:], 0)
		must(t, errors.Join(err, f.Close()))
		must(t, theirs.Close())
		return
	}
	t.Fatal("the number of a detached device was never reused")
}

// TestSticky: a loop device keeps the mode and the settings of its queue across detach
// and attach; the next volume on it has nothing of that.
func TestSticky(t *testing.T) {
	dir := drivertest.Dir(t)
	pool := opened(t, dir)
	create(t, pool, blockdev.Spec{Ref: vol("a"), Size: mib})
	settings := func(device blockdev.Device) (all []string) {
		for _, name := range []string{"read_ahead_kb", "scheduler"} {
			b, err := os.ReadFile(filepath.Join("/sys/block", filepath.Base(device.Path), "queue", name))
			must(t, err)
			all = append(all, strings.TrimSpace(string(b)))
		}
		return all
	}
	for range 10 {
		device := attach(t, pool, vol("a"), blockdev.Attachment{Keep: true})
		before := settings(device)
		changed := attach(t, pool, vol("a"), blockdev.Attachment{Keep: true, Attributes: map[string]string{"read_ahead_kb": "64", "scheduler": "mq-deadline"}})
		must(t, changed.Close())
		if after := settings(device); before[0] == after[0] || before[1] == after[1] {
			t.Fatalf("settings %q became %q: this test shows nothing", before, after)
		}
		run(t, "blockdev", "--setro", device.Path)
		t.Cleanup(func() { run(t, "blockdev", "--setrw", device.Path) }) // mount(8) would not
		must(t, device.Close())
		must(t, pool.Detach(t.Context(), vol("a")))
		again, same := takeNumber(t, pool, device.Number)
		if !same { // a neighbour may have it next
			run(t, "blockdev", "--setrw", device.Path)
			continue
		}
		if have := settings(again); !slices.Equal(have, before) || again.ReadOnly {
			t.Errorf("the next volume on %s has settings %q, read-only %v; want %q", again.Path, have, again.ReadOnly, before)
		}
		writeTo(t, again.Path, 0, make([]byte, blockdev.Granularity))
		must(t, again.Close())
		return
	}
	t.Fatal("the number of a detached device was never reused")
}

// TestSetQueue: all settings or none, and undo goes back.
func TestSetQueue(t *testing.T) {
	pool := opened(t, drivertest.Dir(t))
	create(t, pool, blockdev.Spec{Ref: vol("a"), Size: mib})
	device := attach(t, pool, vol("a"), blockdev.Attachment{Attributes: map[string]string{"read_ahead_kb": "64"}})
	is := func(when, readAhead, scheduler string) {
		t.Helper()
		for name, want := range map[string]string{"read_ahead_kb": readAhead, "scheduler": "[" + scheduler + "]"} {
			b, err := os.ReadFile(filepath.Join("/sys/block", filepath.Base(device.Path), "queue", name))
			if err != nil || !slices.Contains(strings.Fields(string(b)), want) {
				t.Errorf("%s: %s is %q, %v; want %s", when, name, b, err, want)
			}
		}
	}
	for range 10 { // they are written in any order
		for _, bad := range []map[string]string{{"read_ahead_kb": "256", "scheduler": "nonsense"}, {"read_ahead_kb": "x", "scheduler": "mq-deadline"},
			{"read_ahead_kb": "256", "scheduler": "mq-deadline", "no_such_setting": "1"}} {
			fails(t, second(device.SetQueue(bad)), errdefs.ErrInvalid, fmt.Sprint(bad))
			is(fmt.Sprint("after ", bad), "64", "none")
		}
	}
	undo, err := device.SetQueue(map[string]string{"read_ahead_kb": "256", "scheduler": "mq-deadline"})
	must(t, err)
	is("set", "256", "mq-deadline")
	must(t, undo())
	is("undone", "64", "none")
}

// TestForeignPool: a pool of the same name elsewhere on the machine, with an object of
// the same key, is somebody else's.
func TestForeignPool(t *testing.T) {
	dir := drivertest.Dir(t)
	theirs := opened(t, filepath.Join(dir, "theirs"))
	create(t, theirs, blockdev.Spec{Ref: vol("a"), Size: mib})
	create(t, theirs, blockdev.Spec{Ref: vol("b"), Size: mib})
	for _, ref := range []blockdev.Ref{vol("a"), vol("b")} {
		device := attach(t, theirs, ref, blockdev.Attachment{Keep: true})
		must(t, device.Close())
	}
	must(t, open(t, filepath.Join(dir, "ours")).Close())
	pool := opened(t, filepath.Join(dir, "ours"))
	create(t, pool, blockdev.Spec{Ref: vol("a"), Size: mib}) // of b there is nothing here
	if orphans, err := pool.Orphans(t.Context()); err != nil || len(orphans) != 0 {
		t.Errorf("Orphans: %v, %v", orphans, err)
	}
	for _, ref := range []blockdev.Ref{vol("a"), vol("b")} {
		if devices, err := pool.Attached(t.Context(), ref); err != nil || len(devices) != 0 {
			t.Errorf("%s: attached as %v, %v", ref, devices, err)
		}
		must(t, pool.Detach(t.Context(), ref))
		must(t, pool.Delete(t.Context(), ref))
		if devices, err := theirs.Attached(t.Context(), ref); err != nil || len(devices) != 1 {
			t.Errorf("theirs, %s: attached as %v, %v", ref, devices, err)
		}
		must(t, theirs.Detach(t.Context(), ref))
	}
}

// TestLostWhileAttached: without image and record, a restarted pool still finds and
// detaches the device.
func TestLostWhileAttached(t *testing.T) {
	dir := drivertest.Dir(t)
	pool := open(t, dir)
	create(t, pool, blockdev.Spec{Ref: vol("a"), Size: mib})
	create(t, pool, blockdev.Spec{Ref: vol("b"), Size: mib})
	lost := attach(t, pool, vol("a"), blockdev.Attachment{Keep: true})
	replaced := attach(t, pool, vol("b"), blockdev.Attachment{Keep: true})
	must(t, errors.Join(lost.Close(), replaced.Close(), pool.Close()))
	must(t, errors.Join(os.Remove(path(dir, vol("a"), ".img")), os.Remove(path(dir, vol("a"), ".rec"))))
	// As an operator does who brings an image back.
	run(t, "cp", path(dir, vol("b"), ".img"), filepath.Join(dir, "copy"))
	must(t, os.Rename(filepath.Join(dir, "copy"), path(dir, vol("b"), ".img")))

	pool = opened(t, dir)
	for ref, want := range map[blockdev.Ref]blockdev.Device{vol("a"): lost, vol("b"): replaced} {
		if devices, err := pool.Attached(t.Context(), ref); err != nil || len(devices) != 1 || devices[0].Number != want.Number {
			t.Errorf("%s: attached as %v, %v; want %s", ref, devices, err, want.Path)
		}
		must(t, pool.Detach(t.Context(), ref))
		if devices, err := pool.Attached(t.Context(), ref); err != nil || len(devices) != 0 {
			t.Errorf("%s: after Detach attached as %v, %v", ref, devices, err)
		}
	}
}

// TestMounted: a device without Keep stays for as long as it is mounted, and a pool that
// is near its end says so.
func TestMounted(t *testing.T) {
	dir := drivertest.Dir(t)
	pool := opened(t, filepath.Join(dir, "pool"))
	create(t, pool, blockdev.Spec{Ref: vol("a"), Size: 32 * mib})
	device := attach(t, pool, vol("a"), blockdev.Attachment{})
	run(t, "mkfs.ext4", "-q", device.Path)
	target := filepath.Join(dir, "target")
	must(t, os.Mkdir(target, 0o700))
	must(t, unix.Mount(device.Path, target, "ext4", 0, ""))
	must(t, device.Close())
	if devices, err := pool.Attached(t.Context(), vol("a")); err != nil || len(devices) != 1 {
		t.Errorf("mounted: attached as %v, %v", devices, err)
	}
	fails(t, pool.Delete(t.Context(), vol("a")), errdefs.ErrInUse, "Delete of what is mounted")
	must(t, unix.Unmount(target, 0))
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		devices, err := pool.Attached(t.Context(), vol("a"))
		must(t, err)
		if len(devices) == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("unmounted: still attached as %v", devices)
		}
	}
	must(t, pool.Delete(t.Context(), vol("a")))
}

// TestNearlyFull: writes to thin volumes fill the filesystem, and the pool says so in time.
func TestNearlyFull(t *testing.T) {
	dir := filepath.Join(mountNew(t, "tmpfs"), "pool")
	pool, err := blockdev.Open(t.Context(), "test", "file://"+dir+"?overprovision=2&reservePercent=10&create=1")
	must(t, err)
	defer func() { must(t, pool.Close()) }()
	if problems := pool.PoolHealth(t.Context()); len(problems) != 0 {
		t.Errorf("an empty pool: %v", problems)
	}
	filler, err := os.Create(filepath.Join(dir, "filler"))
	must(t, err)
	must(t, errors.Join(unix.Fallocate(int(filler.Fd()), 0, 0, 480*mib), filler.Close()))
	if have := reasons(pool.PoolHealth(t.Context())); !slices.Equal(have, []string{"1 PoolNearlyFull"}) {
		t.Errorf("a full pool: %v", have)
	}
	// What others take is not there to be promised.
	if c := capacityOf(t, pool); c.Available != 0 || c.MaxVolume != 0 {
		t.Errorf("a full pool: %+v", c)
	}
}

// TestHeldForAMoment: who scans all block devices may have one open just when its last user
// lets it go; the next use of the volume waits for that.
func TestHeldForAMoment(t *testing.T) {
	drivertest.NeedRoot(t)
	pool := openURL(t, "file://"+drivertest.Dir(t)+"/pool?reservePercent=0")
	t.Cleanup(func() { must(t, pool.Close()) })
	create(t, pool, blockdev.Spec{Ref: vol("a"), Size: 1 << 20})
	device, err := pool.Attach(t.Context(), vol("a"), blockdev.Attachment{})
	must(t, err)
	scanner, err := os.Open(device.Path)
	must(t, err)
	must(t, device.Close())
	time.AfterFunc(200*time.Millisecond, func() { _ = scanner.Close() })
	kept, err := pool.Attach(t.Context(), vol("a"), blockdev.Attachment{Keep: true})
	must(t, err)
	must(t, errors.Join(kept.Close(), pool.Detach(t.Context(), vol("a")), pool.Delete(t.Context(), vol("a"))))
}
