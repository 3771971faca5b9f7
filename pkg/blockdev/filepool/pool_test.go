package filepool_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/command"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/sparse"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pools"
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
				return pooltest.OpenFiles(t, filepath.Join(mnt, filepath.Base(dir)))
			})
		})
	}
}

// mountNew makes a filesystem, and mounts it for the time of a test.
func mountNew(t testing.TB, fs string) (dir string) {
	t.Helper()
	drivertest.NeedRoot(t)
	base := drivertest.Dir(t)
	dir = filepath.Join(base, "mnt")
	check.OK(t, os.Mkdir(dir, 0o700))
	source, options := filepath.Join(base, fs+".img"), ""
	if fs == "tmpfs" {
		source, options = "tmpfs", "size=512m"
	} else {
		check.OK(t, os.WriteFile(source, nil, 0o600))
		check.OK(t, os.Truncate(source, 1<<30))
		drivertest.RunBtrfs(t, "mkfs."+fs, "-q", source)
	}
	if fs != "tmpfs" {
		// Not mount -o loop: a loop device keeps the mode that an earlier user gave it.
		source, options = drivertest.Loop(t, source), "rw"
		defer run(t, "losetup", "-d", source) // it goes with the mount
	}
	run(t, "mount", "-t", fs, "-o", options, source, dir)
	t.Cleanup(func() { drivertest.Unmount(t, dir) })
	return dir
}

func run(t testing.TB, argv ...string) {
	t.Helper()
	_, _, err := command.Run(context.Background(), argv...) // t.Context() ends before cleanups
	check.OK(t, err)
}

// path returns the path of a file of an object.
func path(dir string, ref blockdev.Ref, extension string) string {
	return filepath.Join(dir, map[blockdev.Kind]string{blockdev.Volume: "volumes", blockdev.Snapshot: "snapshots"}[ref.Kind], ref.Key+extension)
}

func reasons(problems []blockdev.Problem) (all []string) {
	for _, p := range problems {
		all = append(all, fmt.Sprintf("%d %s", p.Severity, p.Reason))
	}
	return all
}

// slot returns one slot of a record file, as its format is documented.
func slot(version string, generation int, body string) []byte {
	body += "\n"
	b := fmt.Appendf(nil, "ashlar-record %s gen=%d len=%d crc32c=%08x\n%s", version, generation, len(body), crc32.Checksum([]byte(body), crc32.MakeTable(crc32.Castagnoli)), body)
	return append(b, make([]byte, 8192-len(b))...)
}

func recordFile(t testing.TB, fields map[string]any) []byte {
	t.Helper()
	all := map[string]any{"kind": "vol", "size": 4 * pooltest.MiB, "created": "2026-01-02T03:04:05Z", "state": "ready"}
	maps.Copy(all, fields)
	body, err := json.Marshal(all)
	check.OK(t, err)
	return append(slot("1", 1, string(body)), make([]byte, 8192)...)
}

// TestDamagedRecord: what is left of a record decides. Nothing is guessed, repaired or deleted, and other volumes are not affected.
func TestDamagedRecord(t *testing.T) {
	drivertest.NeedRoot(t)
	type file = []byte
	spoil := func(b file, at int) file { b[at] ^= 0xff; return b }
	future := func(generation uint64) file {
		b := make(file, 8192)
		copy(b, filepool.Frame("ashlar-record", 3, generation, "{}\n"))
		return b
	}
	// Both slots have the record with the label third.
	for name, c := range map[string]struct {
		damage func(b file) file
		label  string // label of the record that is left; empty: none is left
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
			return recordFile(t, map[string]any{"key": pooltest.Vol("b").Key, "name": "b"})
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := drivertest.Dir(t)
			pool := pooltest.OpenFiles(t, dir)
			pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: 4 * pooltest.MiB, Labels: map[string]string{"n": "first"}})
			pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("c"), Size: 4 * pooltest.MiB})
			for _, label := range []string{"between", "second", "third"} {
				_, err := pool.SetLabels(t.Context(), pooltest.Vol("a"), func(l map[string]string) error { l["n"] = label; return nil })
				check.OK(t, err)
			}
			check.OK(t, pool.Close())
			b, err := os.ReadFile(path(dir, pooltest.Vol("a"), ".rec"))
			check.OK(t, err)
			b = c.damage(b)
			check.OK(t, os.WriteFile(path(dir, pooltest.Vol("a"), ".rec"), b, 0o600))

			pool = pooltest.OpenFiles(t, dir)
			defer func() { check.OK(t, pool.Close()) }()
			record, err := pool.Get(t.Context(), pooltest.Vol("a"))
			if c.label != "" {
				if err != nil || record.Labels["n"] != c.label {
					t.Fatalf("label %q, %v; want %q", record.Labels["n"], err, c.label)
				}
				if problems := pool.PoolHealth(t.Context()); len(problems) > 0 {
					t.Errorf("problems: %v", problems)
				}
				// The record can be changed, and the change survives.
				_, err := pool.SetLabels(t.Context(), pooltest.Vol("a"), func(l map[string]string) error { l["n"] = "fourth"; return nil })
				check.OK(t, err)
				check.OK(t, pool.Close())
				pool = pooltest.OpenFiles(t, dir)
				if record, err := pool.Get(t.Context(), pooltest.Vol("a")); err != nil || record.Labels["n"] != "fourth" {
					t.Errorf("after a change: %v, %v", record.Labels, err)
				}
				return
			}
			for what, err := range map[string]error{
				"Get":       err,
				"Create":    pooltest.Second(pool.Create(t.Context(), blockdev.Spec{Ref: pooltest.Vol("a"), Name: pooltest.Vol("a").String(), Size: 4 * pooltest.MiB})),
				"Attach":    pooltest.Second(pool.Attach(t.Context(), pooltest.Vol("a"), blockdev.Attachment{})),
				"Expand":    pooltest.Second(pool.Expand(t.Context(), pooltest.Vol("a"), 8*pooltest.MiB)),
				"SetLabels": pooltest.Second(pool.SetLabels(t.Context(), pooltest.Vol("a"), func(map[string]string) error { return nil })),
				"Create from it": pooltest.Second(pool.Create(t.Context(), blockdev.Spec{Ref: pooltest.Snap("a"), Name: "s", Size: 4 * pooltest.MiB,
					Origin: pooltest.Vol("a")})),
			} {
				pooltest.Fails(t, err, errdefs.ErrDataLoss, what)
			}
			pooltest.Fails(t, pool.Delete(t.Context(), pooltest.Vol("a")), errdefs.ErrPrecondition, "Delete")
			problems, err := pool.Health(t.Context(), pooltest.Vol("a"))
			if have := reasons(problems); err != nil || !slices.Equal(have, []string{"3 RecordDamaged"}) {
				t.Errorf("Health: %v, %v", problems, err)
			}
			if have := reasons(pool.PoolHealth(t.Context())); !slices.Equal(have, []string{"1 RecordDamaged"}) {
				t.Errorf("PoolHealth: %v", have)
			}
			records, err := pool.List(t.Context(), blockdev.Volume, "", 0)
			if err != nil || len(records) != 1 || records[0].Ref != pooltest.Vol("c") {
				t.Errorf("List: %v, %v", records, err)
			}
			check.OK(t, attachedOnce(t, pool, pooltest.Vol("c")))
			if now, err := os.ReadFile(path(dir, pooltest.Vol("a"), ".rec")); err != nil || !bytes.Equal(now, b) {
				t.Errorf("the damaged record was changed: %v", err)
			}
			if info, err := os.Stat(path(dir, pooltest.Vol("a"), ".img")); err != nil || info.Size() != 4*pooltest.MiB {
				t.Errorf("the image of the damaged record: %v, %v", info, err)
			}
		})
	}
}

// TestManyRecords: more records than are read in parallel: each is that of its own volume, and a damaged one hides no other.
func TestManyRecords(t *testing.T) {
	drivertest.NeedRoot(t)
	const many = 100
	dir := drivertest.Dir(t)
	pool := pooltest.OpenFiles(t, dir)
	ref := func(i int) blockdev.Ref { return blockdev.Ref{Kind: blockdev.Volume, Key: fmt.Sprintf("%032x", i)} }
	for i := range many {
		pooltest.Create(t, pool, blockdev.Spec{Ref: ref(i), Size: int64(i+1) * pooltest.MiB / 4, Provisioning: blockdev.Thin})
	}
	check.OK(t, pool.Close())
	const damaged = 50
	check.OK(t, os.WriteFile(path(dir, ref(damaged), ".rec"), []byte("noise"), 0o600))

	pool = pooltest.OpenFiles(t, dir)
	defer func() { check.OK(t, pool.Close()) }()
	for i := range many {
		record, err := pool.Get(t.Context(), ref(i))
		if i == damaged {
			if !errors.Is(err, errdefs.ErrDataLoss) {
				t.Errorf("the damaged record: %v, %v", record, err)
			}
			continue
		}
		if err != nil || record.Name != ref(i).String() || record.Size != int64(i+1)*pooltest.MiB/4 {
			t.Errorf("%s is %s of %d bytes, %v", ref(i), record.Name, record.Size, err)
		}
	}
}

func attachedOnce(t testing.TB, pool blockdev.Pool, ref blockdev.Ref) error {
	device, err := pool.Attach(t.Context(), ref, blockdev.Attachment{})
	if err != nil {
		return err
	}
	return device.Close()
}

// TestSweep: when a pool is opened, what a crash left half-done is finished or undone.
func TestSweep(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := drivertest.Dir(t)
	check.OK(t, pooltest.OpenFiles(t, dir).Close())
	put := func(ref blockdev.Ref, record []byte, image int64) {
		if record != nil {
			check.OK(t, os.WriteFile(path(dir, ref, ".rec"), record, 0o600))
		}
		if image >= 0 {
			check.OK(t, os.WriteFile(path(dir, ref, ".img"), nil, 0o600))
			check.OK(t, os.Truncate(path(dir, ref, ".img"), image))
		}
	}
	record := func(ref blockdev.Ref, state string, more map[string]any) []byte {
		fields := map[string]any{"kind": ref.Kind, "key": ref.Key, "name": ref.String(), "state": state}
		maps.Copy(fields, more)
		return recordFile(t, fields)
	}
	gone := map[string]blockdev.Ref{"creating": pooltest.Vol("1"), "creating, no image": pooltest.Vol("2"), "deleting": pooltest.Vol("3"), "deleting, no image": pooltest.Vol("4"),
		"a cut": pooltest.Snap("1"), "an empty record": pooltest.Vol("5"), "a record of zeros": pooltest.Vol("6")}
	put(pooltest.Vol("1"), record(pooltest.Vol("1"), "creating", nil), 4*pooltest.MiB)
	put(pooltest.Vol("2"), record(pooltest.Vol("2"), "creating", nil), -1)
	put(pooltest.Vol("3"), record(pooltest.Vol("3"), "deleting", nil), 4*pooltest.MiB)
	put(pooltest.Vol("4"), record(pooltest.Vol("4"), "deleting", nil), -1)
	put(pooltest.Snap("1"), record(pooltest.Snap("1"), "creating", map[string]any{"origin": pooltest.Vol("a").String()}), 1*pooltest.MiB)
	put(pooltest.Vol("5"), []byte{}, -1)
	put(pooltest.Vol("6"), make([]byte, 16384), -1)

	put(pooltest.Vol("a"), record(pooltest.Vol("a"), "ready", nil), 4*pooltest.MiB)
	put(pooltest.Vol("b"), record(pooltest.Vol("b"), "ready", map[string]any{"growing": 8 * pooltest.MiB, "thin": true}), 4*pooltest.MiB)
	put(pooltest.Vol("c"), record(pooltest.Vol("c"), "ready", map[string]any{"growing": 8 * pooltest.MiB}), 6*pooltest.MiB)
	put(pooltest.Vol("e"), nil, 3*pooltest.MiB) // nobody knows whose it is
	check.OK(t, os.WriteFile(filepath.Join(dir, "volumes", "mine.img"), []byte("mine"), 0o600))

	for range 2 {
		pool := pooltest.OpenFiles(t, dir)
		for what, ref := range gone {
			pooltest.Fails(t, pooltest.Second(pool.Get(t.Context(), ref)), errdefs.ErrNotFound, what)
			for _, extension := range []string{".rec", ".img"} {
				if _, err := os.Stat(path(dir, ref, extension)); !errors.Is(err, os.ErrNotExist) {
					t.Errorf("%s: its %s is still there: %v", what, extension, err)
				}
			}
		}
		for ref, want := range map[blockdev.Ref]int64{pooltest.Vol("a"): 4 * pooltest.MiB, pooltest.Vol("b"): 8 * pooltest.MiB, pooltest.Vol("c"): 8 * pooltest.MiB} {
			r, err := pool.Get(t.Context(), ref)
			info, statErr := os.Stat(path(dir, ref, ".img"))
			if err := errors.Join(err, statErr); err != nil || r.Size != want || info.Size() != want {
				t.Errorf("%s: %d bytes, image %v, %v; want %d", ref, r.Size, info, err, want)
			}
		}
		if info, err := os.Stat(path(dir, pooltest.Vol("c"), ".img")); err != nil || info.Sys().(*syscall.Stat_t).Blocks*512 < 8*pooltest.MiB {
			t.Errorf("a thick volume that grew has not its space: %v, %v", info, err)
		}
		if c := pooltest.CapacityOf(t, pool); c.Promised != 20*pooltest.MiB {
			t.Errorf("%d bytes are promised, want %d", c.Promised, 20*pooltest.MiB)
		}
		problems := pool.PoolHealth(t.Context())
		if !slices.Equal(reasons(problems), []string{"1 UnknownImage"}) || !strings.Contains(problems[0].Message, "mine.img") || !strings.Contains(problems[0].Message, pooltest.Vol("e").Key) {
			t.Errorf("PoolHealth: %v", problems)
		}
		check.OK(t, pool.Close())
	}
	if b, err := os.ReadFile(filepath.Join(dir, "volumes", "mine.img")); err != nil || string(b) != "mine" {
		t.Errorf("an image without a record: %q, %v", b, err)
	}
	if info, err := os.Stat(path(dir, pooltest.Vol("e"), ".img")); err != nil || info.Size() != 3*pooltest.MiB {
		t.Errorf("an image without a record: %v, %v", info, err)
	}
}

// TestGrowthWithoutRoom: a growth that a crash cut short has no room any more. A smaller one of the volume is made, and the volume can be copied. When there
// is room, a start goes on with the first one.
func TestGrowthWithoutRoom(t *testing.T) {
	mnt := mountNew(t, "tmpfs") // of 512 MiB
	dir, ref, filler := filepath.Join(mnt, "pool"), pooltest.Vol("a"), filepath.Join(mnt, "filler")
	check.OK(t, pooltest.OpenFiles(t, dir).Close())
	check.OK(t, os.WriteFile(path(dir, ref, ".rec"), recordFile(t, map[string]any{"kind": ref.Kind, "key": ref.Key, "name": ref.String(), "state": "ready", "growing": 400 * pooltest.MiB}), 0o600))
	check.OK(t, errors.Join(os.WriteFile(path(dir, ref, ".img"), nil, 0o600), os.Truncate(path(dir, ref, ".img"), 6*pooltest.MiB)))
	check.OK(t, os.WriteFile(filler, make([]byte, 300*pooltest.MiB), 0o600))

	pool := pooltest.OpenFiles(t, dir)
	pooltest.Fails(t, pooltest.Second(pool.Expand(t.Context(), ref, 400*pooltest.MiB)), errdefs.ErrNoSpace, "the growth that was cut short")
	for _, size := range []int64{5 * pooltest.MiB, 8 * pooltest.MiB} {
		record, err := pool.Expand(t.Context(), ref, size)
		if err != nil || record.Size != size {
			t.Errorf("a smaller growth to %d bytes: %d, %v", size, record.Size, err)
		}
	}
	if have := pooltest.CapacityOf(t, pool).Promised; have != 400*pooltest.MiB {
		t.Errorf("%d bytes are promised, want those of the growth that is not over", have)
	}
	check.OK(t, os.Remove(filler))
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Snap("a"), Size: 8 * pooltest.MiB, Origin: ref})
	check.OK(t, errors.Join(pool.Delete(t.Context(), pooltest.Snap("a")), pool.Close()))
	pool = pooltest.OpenedFiles(t, dir)
	if record, err := pool.Get(t.Context(), ref); err != nil || record.Size != 400*pooltest.MiB {
		t.Errorf("with room, after a start: %d bytes, %v", record.Size, err)
	}
}

// TestLostImage: an image that is missing or short is not made anew.
func TestLostImage(t *testing.T) {
	drivertest.NeedRoot(t)
	for name, c := range map[string]struct {
		lose   func(image string) error
		reason string
	}{
		"missing":     {os.Remove, "ImageMissing"},
		"truncated":   {func(image string) error { return os.Truncate(image, 4*pooltest.MiB-1) }, "ImageTruncated"},
		"a directory": {func(image string) error { return errors.Join(os.Remove(image), os.Mkdir(image, 0o700)) }, "ImageOfAnother"},
		"a FIFO":      {func(image string) error { return errors.Join(os.Remove(image), unix.Mkfifo(image, 0o600)) }, "ImageOfAnother"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := drivertest.Dir(t)
			pool := pooltest.OpenedFiles(t, dir)
			pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: 4 * pooltest.MiB})
			check.OK(t, c.lose(path(dir, pooltest.Vol("a"), ".img")))
			// A retry does not make it anew either.
			pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: 4 * pooltest.MiB})
			problems, err := pool.Health(t.Context(), pooltest.Vol("a"))
			check.OK(t, err)
			if have := reasons(problems); !slices.Equal(have, []string{"3 " + c.reason}) {
				t.Errorf("Health: %v", problems)
			}
			for what, err := range map[string]error{
				"Attach":         pooltest.Second(pool.Attach(t.Context(), pooltest.Vol("a"), blockdev.Attachment{})),
				"Attach to read": pooltest.Second(pool.Attach(t.Context(), pooltest.Vol("a"), blockdev.Attachment{ReadOnly: true})),
				"Expand":         pooltest.Second(pool.Expand(t.Context(), pooltest.Vol("a"), 8*pooltest.MiB)),
				"copy":           pooltest.Second(pool.Create(t.Context(), blockdev.Spec{Ref: pooltest.Snap("a"), Name: "s", Size: 4 * pooltest.MiB, Origin: pooltest.Vol("a")})),
			} {
				pooltest.Fails(t, err, errdefs.ErrDataLoss, what)
			}
			check.OK(t, pool.Delete(t.Context(), pooltest.Vol("a")))
			if c := pooltest.CapacityOf(t, pool); c.Promised != 0 {
				t.Errorf("%d bytes are promised after Delete", c.Promised)
			}
		})
	}
}

// TestImageOfAnother: an image with the name of another object, by whatever mistake, is not shown as that object, and is deleted only with its own.
func TestImageOfAnother(t *testing.T) {
	const size = 128 * pooltest.MiB
	for name, confuse := range map[string]func(a, b string) error{
		"swapped": func(a, b string) error {
			return unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_EXCHANGE)
		},
		"linked":  func(a, b string) error { return errors.Join(os.Remove(b), os.Link(a, b)) },
		"symlink": func(a, b string) error { return errors.Join(os.Remove(b), os.Symlink(filepath.Base(a), b)) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := mountNew(t, "xfs")
			pool := pooltest.OpenedFiles(t, dir)
			a, b := path(dir, pooltest.Vol("a"), ".img"), path(dir, pooltest.Vol("b"), ".img")
			text := []byte("of a")
			for _, ref := range []blockdev.Ref{pooltest.Vol("a"), pooltest.Vol("b")} {
				pooltest.Create(t, pool, blockdev.Spec{Ref: ref, Size: size, Provisioning: blockdev.Thin})
			}
			check.OK(t, os.WriteFile(a, text, 0o600))
			check.OK(t, os.Truncate(a, size))
			inode := inodeOf(t, a)
			check.OK(t, confuse(a, b))
			for what, err := range map[string]error{
				"Attach":         pooltest.Second(pool.Attach(t.Context(), pooltest.Vol("b"), blockdev.Attachment{})),
				"Attach to read": pooltest.Second(pool.Attach(t.Context(), pooltest.Vol("b"), blockdev.Attachment{ReadOnly: true})),
				"Expand":         pooltest.Second(pool.Expand(t.Context(), pooltest.Vol("b"), 2*size)),
				"copy":           pooltest.Second(pool.Create(t.Context(), blockdev.Spec{Ref: pooltest.Snap("b"), Name: "s", Size: size, Origin: pooltest.Vol("b")})),
			} {
				pooltest.Fails(t, err, errdefs.ErrDataLoss, what)
			}
			problems, err := pool.Health(t.Context(), pooltest.Vol("b"))
			check.OK(t, err)
			if have := reasons(problems); !slices.Equal(have, []string{"3 ImageOfAnother"}) {
				t.Errorf("Health: %v", problems)
			}
			if name == "swapped" {
				for what, remove := range map[string]func(context.Context, blockdev.Ref) error{"Delete": pool.Delete, "Erase": pool.Erase} {
					pooltest.Fails(t, remove(t.Context(), pooltest.Vol("b")), errdefs.ErrPrecondition, what) // a's image would go with it
				}
				check.OK(t, confuse(a, b)) // as an operator does by the error
				device, err := pool.Attach(t.Context(), pooltest.Vol("b"), blockdev.Attachment{})
				check.OK(t, err)
				check.OK(t, device.Close())
				check.OK(t, os.Rename(a, b))
				pooltest.Fails(t, pool.Delete(t.Context(), pooltest.Vol("b")), errdefs.ErrPrecondition, "Delete")
			}
			kept := filepath.Join(dir, "kept")
			if inodeOf(t, b) == inode && name != "symlink" {
				check.OK(t, os.Link(b, kept)) // Delete removes a name, and refuses to remove the last one
			} else {
				kept = a
			}
			check.OK(t, pool.Delete(t.Context(), pooltest.Vol("b")))
			have, err := os.ReadFile(kept)
			check.OK(t, err)
			if len(have) != size || !bytes.HasPrefix(have, text) {
				t.Errorf("of a's image %d bytes are left after the deletion of b", len(have))
			}
		})
	}
}

// TestOlderSize: a record from before a growth cuts nothing off an image, or off its copies, and an expansion repairs it.
func TestOlderSize(t *testing.T) {
	for _, provisioning := range []blockdev.Provisioning{blockdev.Thick, blockdev.Thin} {
		t.Run(fmt.Sprint(provisioning), func(t *testing.T) {
			drivertest.NeedRoot(t)
			dir := drivertest.Dir(t)
			pool := pooltest.OpenFiles(t, dir)
			image, record := path(dir, pooltest.Vol("a"), ".img"), path(dir, pooltest.Vol("a"), ".rec")
			pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: 8 * pooltest.MiB, Provisioning: provisioning})
			older, err := os.ReadFile(record)
			check.OK(t, err)
			check.OK(t, pooltest.Second(pool.Expand(t.Context(), pooltest.Vol("a"), 32*pooltest.MiB)))
			text := bytes.Repeat([]byte("end"), pooltest.MiB)
			f, err := os.OpenFile(image, os.O_WRONLY, 0)
			check.OK(t, err)
			check.OK(t, errors.Join(pooltest.Second(f.WriteAt(text, 28*pooltest.MiB)), f.Close()))
			check.OK(t, pool.Close())
			check.OK(t, os.WriteFile(record, older, 0o600))
			pool = pooltest.OpenedFiles(t, dir)
			whole := func(image, when string) {
				t.Helper()
				have, err := os.ReadFile(image)
				check.OK(t, err)
				if len(have) != 32*pooltest.MiB || !bytes.Equal(have[28*pooltest.MiB:28*pooltest.MiB+len(text)], text) {
					t.Fatalf("%s: %s has %d bytes, or others", when, image, len(have))
				}
			}
			problems, err := pool.Health(t.Context(), pooltest.Vol("a"))
			check.OK(t, err)
			if len(problems) != 1 || problems[0].Reason != "ImageLonger" {
				t.Errorf("Health: %v", problems)
			}
			copied := blockdev.Spec{Ref: pooltest.Snap("a"), Name: pooltest.Snap("a").String(), Size: 8 * pooltest.MiB, Origin: pooltest.Vol("a")}
			pooltest.Fails(t, pooltest.Second(pool.Create(t.Context(), copied)), errdefs.ErrPrecondition, "a copy of a part")
			ended, end := context.WithCancel(t.Context())
			end()
			_, _ = pool.Expand(ended, pooltest.Vol("a"), 12*pooltest.MiB) // for a thin volume it needs no time
			whole(image, "after an expansion that was given up")
			check.OK(t, pooltest.Second(pool.Expand(t.Context(), pooltest.Vol("a"), 16*pooltest.MiB)))
			whole(image, "after an expansion")
			check.OK(t, pooltest.Second(pool.Expand(t.Context(), pooltest.Vol("a"), 32*pooltest.MiB)))
			if problems, err := pool.Health(t.Context(), pooltest.Vol("a")); err != nil || len(problems) > 0 {
				t.Errorf("Health: %v, %v", problems, err)
			}
			copied.Size = 32 * pooltest.MiB
			check.OK(t, pooltest.Second(pool.Create(t.Context(), copied)))
			whole(path(dir, pooltest.Snap("a"), ".img"), "a copy")
		})
	}
}

// TestProtected: an image that somebody protected (chattr(1)) is not handed out for writing, and not removed. The error says how to end that, and then the
// deletion succeeds.
func TestProtected(t *testing.T) {
	dir := filepath.Join(mountNew(t, "ext4"), "pool")
	pool := pooltest.OpenedFiles(t, dir)
	for _, attribute := range []string{"i", "a"} {
		pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: 4 * pooltest.MiB})
		image := path(dir, pooltest.Vol("a"), ".img")
		run(t, "chattr", "+"+attribute, image)
		for what, err := range map[string]error{
			"Attach": pooltest.Second(pool.Attach(t.Context(), pooltest.Vol("a"), blockdev.Attachment{})),
			"Expand": pooltest.Second(pool.Expand(t.Context(), pooltest.Vol("a"), 8*pooltest.MiB)),
			"Delete": pool.Delete(t.Context(), pooltest.Vol("a")),
		} {
			pooltest.Fails(t, err, errdefs.ErrPrecondition, what)
			if advice := "chattr -i -a " + image; err == nil || !strings.Contains(err.Error(), advice) {
				t.Errorf("%s: %v does not say %q", what, err, advice)
			}
		}
		run(t, "chattr", "-i", "-a", image)
		check.OK(t, pool.Delete(t.Context(), pooltest.Vol("a")))
	}
}

// TestProtectedBeside: the errors for a protected record, or directory, say the same.
func TestProtectedBeside(t *testing.T) {
	dir := filepath.Join(mountNew(t, "ext4"), "pool")
	pool := pooltest.OpenedFiles(t, dir)
	ref, other := pooltest.Vol("a"), blockdev.Spec{Ref: pooltest.Vol("b"), Size: 4 * pooltest.MiB}
	label := func(labels map[string]string) error { labels["key"] = "value"; return nil }
	for protected, calls := range map[string]map[string]func() error{
		path(dir, ref, ".rec"): {
			"SetLabels": func() error { return pooltest.Second(pool.SetLabels(t.Context(), ref, label)) },
			"Expand":    func() error { return pooltest.Second(pool.Expand(t.Context(), ref, 8*pooltest.MiB)) },
			"Delete":    func() error { return pool.Delete(t.Context(), ref) },
		},
		dir + "/volumes": {
			"Create": func() error { return pooltest.Second(pool.Create(t.Context(), other)) },
			"Delete": func() error { return pool.Delete(t.Context(), ref) },
		},
	} {
		pooltest.Create(t, pool, blockdev.Spec{Ref: ref, Size: 4 * pooltest.MiB})
		run(t, "chattr", "+i", protected)
		for what, call := range calls {
			err := call()
			pooltest.Fails(t, err, errdefs.ErrPrecondition, what)
			if err == nil || !strings.Contains(err.Error(), "chattr -i -a ") || !strings.Contains(err.Error(), protected) {
				t.Errorf("%s: %v does not say how to take the protection of %s back", what, err, protected)
			}
		}
		run(t, "chattr", "-i", protected)
		check.OK(t, pool.Delete(t.Context(), ref))
	}
}

// TestReplacedInUse: somebody puts a copy in the place of an image that is in use: it lacks all later writes. It is neither copied nor grown, and the
// error says why, as it does if the file was removed. When the device is copied as the error says, all bytes are there.
func TestReplacedInUse(t *testing.T) {
	for _, fs := range filesystems {
		t.Run(fs, func(t *testing.T) {
			dir := filepath.Join(mountNew(t, fs), "pool")
			pool := pooltest.OpenedFiles(t, dir)
			a, size := pooltest.Vol("a"), int64(4*pooltest.MiB)
			pooltest.Create(t, pool, blockdev.Spec{Ref: a, Size: size})
			device := pooltest.Attach(t, pool, a, blockdev.Attachment{Keep: true})
			check.OK(t, device.Close())
			t.Cleanup(func() { check.OK(t, pool.Detach(context.Background(), a)) })
			image, text := path(dir, a, ".img"), bytes.Repeat([]byte("text"), 1024)
			run(t, "cp", "-a", image, image+".new")
			check.OK(t, os.Rename(image+".new", image))
			pooltest.WriteTo(t, device.Path, 0, text)
			problems, err := pool.Health(t.Context(), a)
			if have := reasons(problems); err != nil || !slices.Equal(have, []string{"3 ImageReplaced"}) {
				t.Errorf("Health: %v, %v", problems, err)
			}
			copied := blockdev.Spec{Ref: pooltest.Snap("a"), Name: "copy", Size: size, Origin: a}
			pooltest.Fails(t, pooltest.Second(pool.Create(t.Context(), copied)), errdefs.ErrDataLoss, "a copy")
			pooltest.Fails(t, pooltest.Second(pool.Expand(t.Context(), a, 2*size)), errdefs.ErrDataLoss, "Expand")
			check.OK(t, os.Remove(image))
			problems, err = pool.Health(t.Context(), a)
			if have := reasons(problems); err != nil || !slices.Equal(have, []string{"3 ImageMissing"}) || !strings.Contains(problems[0].Message, "copy "+device.Path) {
				t.Errorf("without a file in its place, Health: %v, %v", problems, err)
			}
			run(t, "cp", device.Path, image+".new")
			check.OK(t, pool.Detach(t.Context(), a))
			check.OK(t, os.Rename(image+".new", image))
			if problems, err := pool.Health(t.Context(), a); err != nil || len(problems) > 0 {
				t.Errorf("Health: %v, %v", problems, err)
			}
			check.OK(t, pooltest.Second(pool.Create(t.Context(), copied)))
			have, err := os.ReadFile(path(dir, copied.Ref, ".img"))
			check.OK(t, err)
			if !bytes.HasPrefix(have, text) {
				t.Error("the copy lacks what was written")
			}
		})
	}
}

func inodeOf(t testing.TB, path string) uint64 {
	t.Helper()
	info, err := os.Lstat(path)
	check.OK(t, err)
	return info.Sys().(*syscall.Stat_t).Ino
}

// TestLock: only one process uses a directory, also if somebody takes the lock for a stale one and removes it.
func TestLock(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := drivertest.Dir(t)
	pool := pooltest.OpenFiles(t, dir)
	pooltest.Fails(t, pooltest.Second(pools.Open(t.Context(), "other", "file://"+dir)), errdefs.ErrInUse, "Open of an open pool")
	check.OK(t, os.Remove(filepath.Join(dir, "lock")))
	pooltest.Fails(t, pooltest.Second(pools.Open(t.Context(), "other", "file://"+dir)), errdefs.ErrInUse, "Open of an open pool without its lock")
	check.OK(t, pool.Close())
	check.OK(t, pooltest.OpenFiles(t, dir).Close())
}

// TestDirectoryGone: a pool does not go on in another directory that is at its place.
func TestDirectoryGone(t *testing.T) {
	dir := filepath.Join(drivertest.Dir(t), "pool")
	pool := pooltest.OpenedFiles(t, dir)
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: 4 * pooltest.MiB})
	refuses := func(when string) {
		t.Helper()
		pooltest.Fails(t, pooltest.Second(pool.Capacity(t.Context())), errdefs.ErrUnavailable, when+": Capacity")
		pooltest.Fails(t, pooltest.Second(pool.Create(t.Context(), blockdev.Spec{Ref: pooltest.Vol("b"), Name: "b", Size: 4 * pooltest.MiB})), errdefs.ErrUnavailable, when+": Create")
		problems, err := pool.Health(t.Context(), pooltest.Vol("a"))
		if have := reasons(problems); err != nil || !slices.Equal(have, []string{"2 PoolUnavailable"}) {
			t.Errorf("%s: Health: %v, %v", when, problems, err)
		}
		if have := reasons(pool.PoolHealth(t.Context())); !slices.Equal(have, []string{"2 PoolUnavailable"}) {
			t.Errorf("%s: PoolHealth: %v", when, have)
		}
	}
	check.OK(t, os.Rename(dir, dir+".moved"))
	refuses("moved away")
	check.OK(t, os.MkdirAll(filepath.Join(dir, "volumes"), 0o700))
	refuses("another in its place")
	check.OK(t, os.RemoveAll(dir))
	check.OK(t, os.Rename(dir+".moved", dir))
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("b"), Size: 4 * pooltest.MiB})
}

// TestRecordRemoved: somebody removes a record while the pool is open. The next change makes it anew, and so the object can be released and deleted.
func TestRecordRemoved(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := filepath.Join(drivertest.Dir(t), "pool")
	pool := pooltest.OpenFiles(t, dir)
	kept, lost := pooltest.Vol("a"), pooltest.Vol("b")
	for _, ref := range []blockdev.Ref{kept, lost} {
		pooltest.Create(t, pool, blockdev.Spec{Ref: ref, Size: 4 * pooltest.MiB})
		check.OK(t, os.Remove(path(dir, ref, ".rec")))
	}
	check.OK(t, os.Remove(path(dir, lost, ".img")))
	claim := func(labels map[string]string) error { labels["claim"] = "a node"; return nil }
	check.OK(t, pooltest.Second(pool.SetLabels(t.Context(), kept, claim)))
	check.OK(t, errors.Join(pooltest.Second(pool.SetLabels(t.Context(), lost, claim)), pool.Delete(t.Context(), lost), pool.Close()))
	pool = pooltest.OpenedFiles(t, dir)
	record, err := pool.Get(t.Context(), kept)
	check.OK(t, err)
	if record.Labels["claim"] == "" {
		t.Errorf("after a start the record says %+v", record)
	}
	check.OK(t, os.Remove(path(dir, kept, ".rec")))
	check.OK(t, pool.Delete(t.Context(), kept))
}

// TestRecordAnewUnsynced: a record that was made anew is not answered as long as its directory is not synced, as a power cut could bring the one before it back; nor is one that a failed change left.
func TestRecordAnewUnsynced(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := filepath.Join(drivertest.Dir(t), "pool")
	pool := pooltest.OpenFiles(t, dir)
	ref := pooltest.Vol("a")
	pooltest.Create(t, pool, blockdev.Spec{Ref: ref, Size: 4 * pooltest.MiB})
	claim := func(node string) error {
		return pooltest.Second(pool.SetLabels(t.Context(), ref, func(labels map[string]string) error { labels["claim"] = node; return nil }))
	}
	check.OK(t, errors.Join(claim("a node"), os.Remove(path(dir, ref, ".rec"))))
	restore, err := filepool.FailSyncs(pool, ref.Kind)
	check.OK(t, err)
	for i := range 2 {
		if err := claim("another node"); !errors.Is(err, unix.EBADF) {
			t.Errorf("claim %d without a sync: %v", i, err)
		}
	}
	check.OK(t, errors.Join(restore(), claim("a node"), pool.Close()))
	pool = pooltest.OpenedFiles(t, dir)
	if record, err := pool.Get(t.Context(), ref); err != nil || record.Labels["claim"] != "a node" {
		t.Errorf("after a start the record says %v, %v", record.Labels, err)
	}
}

// TestArithmetic: reservePercent of the filesystem is never promised; of the rest, overprovision times as much is.
func TestArithmetic(t *testing.T) {
	mnt := mountNew(t, "tmpfs") // nothing else uses it, and it has no overhead
	const size = 512 * pooltest.MiB
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
		pool, err := pools.Open(t.Context(), "test", "file://"+dir+c.options)
		check.OK(t, err)
		near := func(what string, have, want int64) {
			t.Helper()
			if have > want+blockdev.Granularity || have < want-want/50 {
				t.Errorf("%q: %s is %d, want about %d", c.options, what, have, want)
			}
		}
		near("total", pooltest.CapacityOf(t, pool).Total, c.want)
		pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: 64 * pooltest.MiB})
		pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("b"), Size: 64 * pooltest.MiB, Provisioning: blockdev.Thin})
		device := pooltest.Attach(t, pool, pooltest.Vol("b"), blockdev.Attachment{})
		pooltest.WriteTo(t, device.Path, 0, bytes.Repeat([]byte{1}, 32*pooltest.MiB))
		check.OK(t, errors.Join(device.Close(), pool.Close()))
		pool, err = pools.Open(t.Context(), "test", "file://"+dir+c.options) // measures anew
		check.OK(t, err)
		have := pooltest.CapacityOf(t, pool)
		near("total with volumes", have.Total, c.want)
		near("available", have.Available, c.want-128*pooltest.MiB)
		if have.Promised != 128*pooltest.MiB || have.MaxVolume != have.Available {
			t.Errorf("%q: %+v", c.options, have)
		}
		check.OK(t, errors.Join(pool.Detach(t.Context(), pooltest.Vol("b")), pool.Delete(t.Context(), pooltest.Vol("a")), pool.Delete(t.Context(), pooltest.Vol("b")), pool.Close()))
		check.OK(t, os.RemoveAll(dir))
	}
}

// TestSharedBlocks: blocks that images share count once, however the copies were made, and whichever of them are left.
func TestSharedBlocks(t *testing.T) {
	for _, fs := range []string{"xfs", "btrfs"} {
		t.Run(fs, func(t *testing.T) {
			t.Parallel()
			const size = 64 * pooltest.MiB
			pool := pooltest.OpenedFiles(t, filepath.Join(mountNew(t, fs), "pool"))
			before := pooltest.CapacityOf(t, pool).Total
			same := func(when string) {
				t.Helper()
				if have := pooltest.CapacityOf(t, pool).Total; have > before+pooltest.MiB || have < before-24*pooltest.MiB {
					t.Errorf("%s: the total is %d, and was %d", when, have, before)
				}
			}
			pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: size})
			device := pooltest.Attach(t, pool, pooltest.Vol("a"), blockdev.Attachment{})
			pooltest.WriteTo(t, device.Path, 0, bytes.Repeat([]byte{7}, size))
			same("written")
			pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Snap("1"), Size: size, Origin: pooltest.Vol("a")})
			same("snapshot")
			pooltest.WriteTo(t, device.Path, 0, bytes.Repeat([]byte{8}, size/2))
			check.OK(t, device.Close())
			pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("b"), Size: size, Origin: pooltest.Snap("1")})
			same("restored")
			// The copy between a and b is gone.
			check.OK(t, pool.Delete(t.Context(), pooltest.Snap("1")))
			same("snapshot deleted")
			pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("c"), Size: size, Origin: pooltest.Vol("b"), Provisioning: blockdev.Thin})
			same("clone")
			check.OK(t, pool.Detach(t.Context(), pooltest.Vol("a")))
			check.OK(t, pool.Delete(t.Context(), pooltest.Vol("b")))
			same("middle deleted")
			check.OK(t, pool.Delete(t.Context(), pooltest.Vol("a")))
			check.OK(t, pool.Delete(t.Context(), pooltest.Vol("c")))
			same("all deleted")
		})
	}
}

func blocksOf(t testing.TB, path string) int64 {
	t.Helper()
	info, err := os.Stat(path)
	check.OK(t, err)
	return info.Sys().(*syscall.Stat_t).Blocks * 512
}

// TestDiscard: space that a volume discards is still promised to it.
func TestDiscard(t *testing.T) {
	dir := filepath.Join(mountNew(t, "ext4"), "pool")
	pool := pooltest.OpenedFiles(t, dir)
	const size = 256 * pooltest.MiB
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: size})
	blocks := func() int64 { return blocksOf(t, path(dir, pooltest.Vol("a"), ".img")) }
	before := pooltest.CapacityOf(t, pool)
	device := pooltest.Attach(t, pool, pooltest.Vol("a"), blockdev.Attachment{})
	// As the kernel does when a filesystem on the device trims.
	image, err := os.OpenFile(path(dir, pooltest.Vol("a"), ".img"), os.O_WRONLY, 0)
	check.OK(t, err)
	check.OK(t, errors.Join(unix.Fallocate(int(image.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, size), image.Close(), device.Close()))
	if n := blocks(); n > size/2 {
		t.Fatalf("after a discard the image has still %d bytes: this test shows nothing", n)
	}
	if after := pooltest.CapacityOf(t, pool); after.Available > before.Available {
		t.Errorf("after a discard %d bytes are available, %d before", after.Available, before.Available)
	}
	// All other space is promised and taken; the volume gets its own back all the same.
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("b"), Size: (before.Available - 8*pooltest.MiB) / pooltest.MiB * pooltest.MiB})
	device = pooltest.Attach(t, pool, pooltest.Vol("a"), blockdev.Attachment{})
	if n := blocks(); n < size {
		t.Errorf("attached again, the image has %d bytes of its %d", n, size)
	}
	pooltest.WriteTo(t, device.Path, 0, bytes.Repeat([]byte{1}, size))
}

// TestCutFails: a caller that could not hold back the writes long enough says so in Spec.Cut, and gets no copy.
func TestCutFails(t *testing.T) {
	for _, fs := range []string{"ext4", "xfs"} {
		t.Run(fs, func(t *testing.T) {
			pool, failure := pooltest.OpenedFiles(t, filepath.Join(mountNew(t, fs), "pool")), errors.New("not today")
			pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: pooltest.MiB})
			for _, to := range []blockdev.Ref{pooltest.Vol("b"), pooltest.Snap("b")} {
				_, err := pool.Create(t.Context(), blockdev.Spec{Ref: to, Name: "new", Size: pooltest.MiB, Origin: pooltest.Vol("a"), Quiesced: true,
					Cut: func(context.Context) error { return failure }})
				pooltest.Fails(t, err, failure, "a cut that fails")
				pooltest.Fails(t, pooltest.Second(pool.Get(t.Context(), to)), errdefs.ErrNotFound, "its copy")
			}
		})
	}
}

// TestResume: a copy of a snapshot that was cut short goes on where it stopped, if the spec is the same. With another spec it begins anew. If nobody comes
// back, it is removed.
func TestResume(t *testing.T) {
	dir := filepath.Join(mountNew(t, "ext4"), "pool")
	pool := pooltest.OpenedFiles(t, dir)
	const size = 48 * pooltest.MiB // more than one step of a copy
	content := bytes.Repeat([]byte("0123456789abcdef"), size/16)
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: size})
	device := pooltest.Attach(t, pool, pooltest.Vol("a"), blockdev.Attachment{})
	pooltest.WriteTo(t, device.Path, 0, content)
	check.OK(t, device.Close())
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Snap("a"), Size: size, Origin: pooltest.Vol("a")})
	promised := pooltest.CapacityOf(t, pool).Promised

	spec := blockdev.Spec{Ref: pooltest.Vol("b"), Name: pooltest.Vol("b").String(), Size: size, Origin: pooltest.Snap("a"), Provisioning: blockdev.Thin, Labels: map[string]string{"k": "v"}}
	mark := bytes.Repeat([]byte{0xee}, blockdev.Granularity)
	interrupt := func(spec blockdev.Spec) {
		t.Helper()
		_, err := pool.Create(&pooltest.EndsAfter{Context: t.Context(), N: 2}, spec)
		pooltest.Fails(t, err, context.Canceled, "Create")
		pooltest.Fails(t, pooltest.Second(pool.Get(t.Context(), spec.Ref)), errdefs.ErrNotFound, "Get")
		// Bytes that are there already are not copied again: a mark in them stays.
		pooltest.WriteTo(t, path(dir, spec.Ref, ".img"), 0, mark)
	}
	marked := func(ref blockdev.Ref) bool {
		t.Helper()
		b, err := os.ReadFile(path(dir, ref, ".img"))
		check.OK(t, err)
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
		"another size":    {func(s *blockdev.Spec) { s.Size = size + pooltest.MiB }, false},
		"thick":           {func(s *blockdev.Spec) { s.Provisioning = blockdev.Thick }, false},
		"another label":   {func(s *blockdev.Spec) { s.Labels = map[string]string{"k": "w"} }, false},
		"another name":    {func(s *blockdev.Spec) { s.Name = "else" }, false},
		"another origin":  {func(s *blockdev.Spec) { s.Origin = pooltest.Vol("a") }, false},
		"not a copy now":  {func(s *blockdev.Spec) { s.Origin = blockdev.Ref{} }, false},
		"other snapshot":  {nil, false},
		"deleted between": {func(*blockdev.Spec) { check.OK(t, pool.Delete(t.Context(), pooltest.Vol("b"))) }, false},
		"removed by hand": {func(*blockdev.Spec) { check.OK(t, os.Remove(path(dir, pooltest.Vol("b"), ".img"))) }, false},
		"emptied by hand": {func(*blockdev.Spec) { check.OK(t, os.Truncate(path(dir, pooltest.Vol("b"), ".img"), 0)) }, false},
	} {
		interrupt(spec)
		retry := spec
		if c.change != nil {
			c.change(&retry)
		} else {
			// Another snapshot of the same name.
			check.OK(t, pool.Delete(t.Context(), pooltest.Snap("a")))
			pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Snap("a"), Size: size, Origin: pooltest.Vol("a")})
		}
		record, err := pool.Create(t.Context(), retry)
		check.OK(t, err)
		if record.Thin != (retry.Provisioning == blockdev.Thin) || record.Size != retry.Size || record.Name != retry.Name || record.Origin != retry.Origin || !maps.Equal(record.Labels, retry.Labels) {
			t.Errorf("%s: %#v is not what %#v asks for", name, record, retry)
		}
		if retry.Size == size && retry.Origin != (blockdev.Ref{}) {
			if have := marked(pooltest.Vol("b")); have != c.resume {
				t.Errorf("%s: gone on with %v, want %v", name, have, c.resume)
			}
		}
		check.OK(t, pool.Delete(t.Context(), pooltest.Vol("b")))
		if have := pooltest.CapacityOf(t, pool).Promised; have != promised {
			t.Fatalf("%s: %d bytes are promised in the end, want %d", name, have, promised)
		}
	}

	interrupt(spec)
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("c"), Size: pooltest.MiB}) // too early for b to be removed
	if have := pooltest.CapacityOf(t, pool).Promised; have != promised+size+pooltest.MiB {
		t.Errorf("%d bytes are promised, want %d", have, promised+size+pooltest.MiB)
	}
	filepool.Abandon(pool, spec.Ref)
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("d"), Size: pooltest.MiB})
	if have := pooltest.CapacityOf(t, pool).Promised; have != promised+2*pooltest.MiB {
		t.Errorf("%d bytes are promised after the copy was given up, want %d", have, promised+2*pooltest.MiB)
	}
	if _, err := os.Stat(path(dir, spec.Ref, ".img")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the image of what was given up: %v", err)
	}
}

// TestResumeAllocation: a thick volume whose allocation was cut short keeps what it has, and the retry goes on with that, also if somebody cut the image
// short meanwhile. With another spec it begins anew. If nobody comes back, it is removed.
func TestResumeAllocation(t *testing.T) {
	dir := filepath.Join(mountNew(t, "ext4"), "pool")
	pool := pooltest.OpenedFiles(t, dir)
	promised := pooltest.CapacityOf(t, pool).Promised
	const size = sparse.FirstStep + 32*pooltest.MiB
	spec := blockdev.Spec{Ref: pooltest.Vol("a"), Name: "a", Size: size, Provisioning: blockdev.Thick}
	image := path(dir, spec.Ref, ".img")
	mark := []byte("what is allocated stays")
	interrupt := func() {
		t.Helper()
		_, err := pool.Create(&pooltest.EndsAfter{Context: t.Context(), N: 1}, spec)
		pooltest.Fails(t, err, context.Canceled, "Create")
		pooltest.Fails(t, pooltest.Second(pool.Get(t.Context(), spec.Ref)), errdefs.ErrNotFound, "Get")
		info, err := os.Stat(image)
		check.OK(t, err)
		if info.Size() != sparse.FirstStep {
			t.Fatalf("%d bytes are allocated, want those of one step", info.Size())
		}
		pooltest.WriteTo(t, image, 0, mark)
	}
	for name, c := range map[string]struct {
		change func(*blockdev.Spec)
		resume bool
	}{
		"same":          {func(*blockdev.Spec) {}, true},
		"cut by hand":   {func(*blockdev.Spec) { check.OK(t, os.Truncate(image, pooltest.MiB)) }, true},
		"another size":  {func(s *blockdev.Spec) { s.Size = size + pooltest.MiB }, false},
		"another label": {func(s *blockdev.Spec) { s.Labels = map[string]string{"k": "w"} }, false},
	} {
		interrupt()
		retry := spec
		c.change(&retry)
		check.OK(t, pooltest.Second(pool.Create(t.Context(), retry)))
		after, err := os.Stat(image)
		check.OK(t, err)
		b, err := os.ReadFile(image)
		check.OK(t, err)
		if have := bytes.HasPrefix(b, mark); have != c.resume {
			t.Errorf("%s: gone on with %v, want %v", name, have, c.resume)
		}
		if after.Size() != retry.Size || after.Sys().(*syscall.Stat_t).Blocks*512 < retry.Size {
			t.Errorf("%s: the image has %d bytes, in %d blocks", name, after.Size(), after.Sys().(*syscall.Stat_t).Blocks)
		}
		check.OK(t, pool.Delete(t.Context(), spec.Ref))
		if have := pooltest.CapacityOf(t, pool).Promised; have != promised {
			t.Fatalf("%s: %d bytes are promised in the end, want %d", name, have, promised)
		}
	}
	interrupt()
	filepool.Abandon(pool, spec.Ref)
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("b"), Size: pooltest.MiB})
	if _, err := os.Stat(image); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the image of what was given up: %v", err)
	}
}

// TestLargeRecord: labels that do not fit are refused, and nothing changes.
func TestLargeRecord(t *testing.T) {
	pool := pooltest.OpenedFiles(t, drivertest.Dir(t))
	large := map[string]string{"k": strings.Repeat("x", 9000)}
	_, err := pool.Create(t.Context(), blockdev.Spec{Ref: pooltest.Vol("a"), Name: "a", Size: pooltest.MiB, Labels: large})
	pooltest.Fails(t, err, errdefs.ErrInvalid, "Create")
	pooltest.Fails(t, pooltest.Second(pool.Get(t.Context(), pooltest.Vol("a"))), errdefs.ErrNotFound, "Get")
	if c := pooltest.CapacityOf(t, pool); c.Promised != 0 {
		t.Errorf("%d bytes are promised", c.Promised)
	}
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: pooltest.MiB, Labels: map[string]string{"k": "v"}})
	_, err = pool.SetLabels(t.Context(), pooltest.Vol("a"), func(l map[string]string) error { maps.Copy(l, large); return nil })
	pooltest.Fails(t, err, errdefs.ErrInvalid, "SetLabels")
	if r, err := pool.Get(t.Context(), pooltest.Vol("a")); err != nil || r.Labels["k"] != "v" {
		t.Errorf("after a refusal: %v, %v", r.Labels, err)
	}
}

// TestFullRecord: a full record can still be grown and deleted, whoever filled it.
func TestFullRecord(t *testing.T) {
	drivertest.NeedRoot(t)
	pool := pooltest.OpenFiles(t, drivertest.Dir(t))
	defer func() { check.OK(t, pool.Close()) }()
	ref := pooltest.Vol("f")
	pooltest.Create(t, pool, blockdev.Spec{Ref: ref, Size: pooltest.MiB})
	least, most := 0, 8192 // lengths that it takes, and that it does not take
	for least+1 < most {
		n := (least + most) / 2
		_, err := pool.SetLabels(t.Context(), ref, func(labels map[string]string) error { labels["l"] = strings.Repeat("x", n); return nil })
		if err == nil {
			least = n
		} else {
			most = n
		}
	}
	if least < 7000 {
		t.Errorf("a record takes no more than %d bytes", least)
	}
	check.OK(t, pooltest.Second(pool.Expand(t.Context(), ref, 100*pooltest.MiB)))
	check.OK(t, pool.Delete(t.Context(), ref))
}

// TestConcurrentAttach: many volumes are attached at once, each as a loop device of its own.
func TestConcurrentAttach(t *testing.T) {
	dir := drivertest.Dir(t)
	pool := pooltest.OpenedFiles(t, dir)
	const n = 32
	devices := make([]blockdev.Device, n)
	for i := range n {
		pooltest.Create(t, pool, blockdev.Spec{Ref: volNumber(i), Size: pooltest.MiB, Provisioning: blockdev.Thin})
		pooltest.WriteTo(t, path(dir, volNumber(i), ".img"), 0, []byte(volNumber(i).Key))
	}
	for round := range 3 {
		check.OK(t, errors.Join(pooltest.AtOnce(n, func(i int) (err error) {
			devices[i], err = pool.Attach(t.Context(), volNumber(i), blockdev.Attachment{Keep: round%2 == 0})
			return err
		})...))
		numbers := map[uint64]int{}
		for i, device := range devices {
			b := make([]byte, 32)
			f, err := os.Open(device.Path)
			check.OK(t, err)
			_, err = f.ReadAt(b, 0)
			check.OK(t, errors.Join(err, f.Close()))
			if string(b) != volNumber(i).Key {
				t.Errorf("volume %d is not what %s holds: %q", i, device.Path, b)
			}
			if other, taken := numbers[device.Number]; taken {
				t.Errorf("volumes %d and %d are both %s", i, other, device.Path)
			}
			numbers[device.Number] = i
		}
		check.OK(t, errors.Join(pooltest.AtOnce(n, func(i int) error { return errors.Join(devices[i].Close(), pool.Detach(t.Context(), volNumber(i))) })...))
	}
}

// TestAttachIsLocked: a new loop device is locked, so that udev leaves it alone, until who attached it has laid something over it and lets go of it.
func TestAttachIsLocked(t *testing.T) {
	pool := pooltest.OpenedFiles(t, drivertest.Dir(t))
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: pooltest.MiB})
	device := pooltest.Attach(t, pool, pooltest.Vol("a"), blockdev.Attachment{})
	udev, err := os.Open(device.Path)
	check.OK(t, err)
	defer udev.Close()
	lock := func() error { return unix.Flock(int(udev.Fd()), unix.LOCK_SH|unix.LOCK_NB) }
	if err := lock(); !errors.Is(err, unix.EWOULDBLOCK) {
		t.Errorf("udev may look at it: %v", err)
	}
	check.OK(t, device.Close())
	err = lock()
	for end := time.Now().Add(10 * time.Second); err != nil && time.Now().Before(end); err = lock() { // a program that is being started may have it for a moment
		time.Sleep(time.Millisecond)
	}
	check.OK(t, err)
}

// TestConcurrentDetach: many callers detach one device at once. It goes, and none of them has an error because the kernel does not open a device that is
// going.
func TestConcurrentDetach(t *testing.T) {
	pool := pooltest.OpenedFiles(t, drivertest.Dir(t))
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: pooltest.MiB})
	for range 100 {
		device, err := pool.Attach(t.Context(), pooltest.Vol("a"), blockdev.Attachment{Keep: true})
		check.OK(t, err)
		check.OK(t, device.Close())
		check.OK(t, errors.Join(pooltest.AtOnce(8, func(int) error { return pool.Detach(t.Context(), pooltest.Vol("a")) })...))
	}
}

// TestAttachBesideLooks: others look at a volume while it is attached or detached. The pool does not forget its device.
func TestAttachBesideLooks(t *testing.T) {
	pool := pooltest.OpenedFiles(t, drivertest.Dir(t))
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: pooltest.MiB})
	ctx, stop := context.WithCancel(t.Context())
	var looking sync.WaitGroup
	defer looking.Wait()
	defer stop()
	for range 4 {
		looking.Go(func() {
			for ctx.Err() == nil {
				if _, err := pool.Health(ctx, pooltest.Vol("a")); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for range 100 {
		device, err := pool.Attach(t.Context(), pooltest.Vol("a"), blockdev.Attachment{Keep: true})
		check.OK(t, err)
		check.OK(t, device.Close())
		again, err := pool.Attach(t.Context(), pooltest.Vol("a"), blockdev.Attachment{Keep: true})
		check.OK(t, err)
		check.OK(t, again.Close())
		if again.Number != device.Number {
			t.Fatalf("attached again as %s, not %s", again.Path, device.Path)
		}
		check.OK(t, pool.Detach(t.Context(), pooltest.Vol("a")))
		if left, err := pool.Attached(t.Context(), pooltest.Vol("a")); err != nil || len(left) > 0 {
			t.Fatalf("left are %v, %v", left, err)
		}
	}
}

// beside runs many looks at health until stop; none may find a problem.
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
	pool := pooltest.OpenedFiles(t, drivertest.Dir(t))
	defer beside(t, 2, func(ctx context.Context) ([]blockdev.Problem, error) {
		problems, err := pool.Health(ctx, pooltest.Vol("a"))
		if errors.Is(err, errdefs.ErrNotFound) {
			err = nil
		}
		return problems, err
	})()
	for range 300 {
		pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: pooltest.MiB})
		check.OK(t, pool.Delete(t.Context(), pooltest.Vol("a")))
	}
}

// TestPoolHealthBesideCreate: PoolHealth may be called while a volume is made (with -race).
func TestPoolHealthBesideCreate(t *testing.T) {
	pool := pooltest.OpenedFiles(t, drivertest.Dir(t))
	defer beside(t, 1, func(ctx context.Context) (problems []blockdev.Problem, err error) {
		problems = pool.PoolHealth(ctx)
		return slices.DeleteFunc(problems, func(p blockdev.Problem) bool { return p.Reason != "RecordsNotSafe" }), nil
	})()
	for range 50 {
		pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: pooltest.MiB})
		check.OK(t, pool.Delete(t.Context(), pooltest.Vol("a")))
	}
}

// TestRecordsNotSafe: PoolHealth counts the records that are in one slot only, until they are written anew or deleted.
func TestRecordsNotSafe(t *testing.T) {
	dir := mountNew(t, "ext4")
	pool := pooltest.OpenFiles(t, dir)
	for _, key := range []string{"a", "b", "c"} {
		pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol(key), Size: pooltest.MiB})
	}
	check.OK(t, pool.Close())
	for _, key := range []string{"a", "b"} {
		record := path(dir, pooltest.Vol(key), ".rec")
		f, err := os.OpenFile(record, os.O_WRONLY, 0)
		check.OK(t, err)
		_, err = f.WriteAt(make([]byte, 4096), 0)
		check.OK(t, errors.Join(err, f.Close()))
		run(t, "chattr", "+i", record) // so that it is not written anew when the pool is opened
	}
	pool = pooltest.OpenedFiles(t, dir)
	expect := func(when, want string) {
		t.Helper()
		have := ""
		for _, p := range pool.PoolHealth(t.Context()) {
			if p.Reason == "RecordsNotSafe" {
				have = p.Message
			}
		}
		if want == "" && have != "" || !strings.Contains(have, want) {
			t.Errorf("%s its health is %q, want %q", when, have, want)
		}
	}
	expect("opened,", "2 records could be written")
	run(t, "chattr", "-i", path(dir, pooltest.Vol("a"), ".rec"), path(dir, pooltest.Vol("b"), ".rec"))
	_, err := pool.SetLabels(t.Context(), pooltest.Vol("a"), func(l map[string]string) error { l["x"] = "y"; return nil })
	check.OK(t, err)
	expect("with one written anew", "1 records could be written")
	check.OK(t, pool.Delete(t.Context(), pooltest.Vol("b")))
	expect("with the other one deleted", "")
}

// toldToGo tells a loop device to go, and reports whether it is there while its user has it open. Before Linux 6.10 it goes at once if he is the only one.
func toldToGo(user *os.File) bool {
	_, _, _ = unix.Syscall(unix.SYS_IOCTL, user.Fd(), unix.LOOP_CLR_FD, 0) // a device of the device mapper has no such ioctl
	_, err := os.Stat("/sys/block/" + filepath.Base(user.Name()) + "/loop")
	return err == nil
}

// TestDetachTold: a device that its last user told to go, and keeps open, does not count as gone.
func TestDetachTold(t *testing.T) {
	pool := pooltest.OpenedFiles(t, drivertest.Dir(t))
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: pooltest.MiB})
	device, err := pool.Attach(t.Context(), pooltest.Vol("a"), blockdev.Attachment{Keep: true})
	check.OK(t, err)
	check.OK(t, device.Close())
	user, err := os.OpenFile(device.Path, os.O_RDWR, 0)
	check.OK(t, err)
	pooltest.Fails(t, pool.Detach(t.Context(), pooltest.Vol("a")), errdefs.ErrInUse, "detach while it is open")
	if toldToGo(user) {
		pooltest.Fails(t, pool.Detach(t.Context(), pooltest.Vol("a")), errdefs.ErrInUse, "detach while it is open, and was told to go")
	}
	check.OK(t, user.Close())
	check.OK(t, pool.Detach(t.Context(), pooltest.Vol("a")))
}

// TestStartBesideTold: a device that its last user told to go, and keeps open, does not count as gone for a driver that starts.
func TestStartBesideTold(t *testing.T) {
	dir := drivertest.Dir(t)
	drivertest.NeedRoot(t)
	pool := pooltest.OpenFiles(t, dir)
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: pooltest.MiB})
	device, err := pool.Attach(t.Context(), pooltest.Vol("a"), blockdev.Attachment{Keep: true})
	check.OK(t, err)
	check.OK(t, device.Close())
	user, err := os.OpenFile(device.Path, os.O_RDWR, 0)
	check.OK(t, err)
	pooltest.Fails(t, pool.Detach(t.Context(), pooltest.Vol("a")), errdefs.ErrInUse, "detach while it is open")
	there := toldToGo(user)
	check.OK(t, pool.Close())
	pool = pooltest.OpenedFiles(t, dir)
	if there {
		pooltest.Fails(t, pool.Detach(t.Context(), pooltest.Vol("a")), errdefs.ErrInUse, "detach while it is open, and was told to go")
	}
	check.OK(t, user.Close())
	check.OK(t, pool.Detach(t.Context(), pooltest.Vol("a")))
}

// taken returns a loop device that was over the volume ref until it went, and is over another image now. If another test is quicker to take its number,
// the next one is tried.
func taken(t *testing.T, pool blockdev.Pool, ref blockdev.Ref, image string) string {
	t.Helper()
	for {
		device, err := pool.Attach(t.Context(), ref, blockdev.Attachment{})
		check.OK(t, err)
		check.OK(t, device.Close()) // then it goes
		sysfs := "/sys/block/" + filepath.Base(device.Path) + "/loop"
		for _, err := os.Stat(sysfs); err == nil && t.Context().Err() == nil; _, err = os.Stat(sysfs) {
			time.Sleep(time.Millisecond)
		}
		out, err := exec.CommandContext(t.Context(), "losetup", device.Path, image).CombinedOutput()
		if err == nil {
			return device.Path
		}
		if !strings.Contains(string(out), "busy") && !strings.Contains(string(out), "No such") { // or it is gone altogether
			t.Fatalf("losetup %s: %v: %s", device.Path, err, out)
		}
	}
}

// TestDetachBesideTold: somebody else's device has the number that a volume's device had, and was told to go. The volume can be detached all the same.
func TestDetachBesideTold(t *testing.T) {
	dir := drivertest.Dir(t)
	pool := pooltest.OpenedFiles(t, dir)
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: pooltest.MiB})
	image := dir + "/other"
	check.OK(t, os.WriteFile(image, make([]byte, pooltest.MiB), 0o600))
	device := taken(t, pool, pooltest.Vol("a"), image)
	user, err := os.OpenFile(device, os.O_RDWR, 0)
	check.OK(t, err)
	defer user.Close()
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, user.Fd(), unix.LOOP_CLR_FD, 0)
	if errno != 0 {
		t.Fatal(errno)
	}
	if err := pool.Detach(t.Context(), pooltest.Vol("a")); err != nil {
		t.Error(err)
	}
}

// TestHealthBesideGrowth: the image of a volume that grows is not reported as longer than its record says.
func TestHealthBesideGrowth(t *testing.T) {
	pool := pooltest.OpenedFiles(t, drivertest.Dir(t))
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: pooltest.MiB})
	defer beside(t, 4, func(ctx context.Context) ([]blockdev.Problem, error) { return pool.Health(ctx, pooltest.Vol("a")) })()
	for n := range int64(200) {
		_, err := pool.Expand(t.Context(), pooltest.Vol("a"), (n+2)*pooltest.MiB)
		check.OK(t, err)
	}
}

// TestAttachBesideHolder: somebody has a free loop device open for himself (O_EXCL). Attach takes others.
func TestAttachBesideHolder(t *testing.T) {
	pool := pooltest.OpenedFiles(t, drivertest.Dir(t))
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: pooltest.MiB})
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	check.OK(t, err)
	defer control.Close()
	var holder *os.File
	for end := time.Now().Add(time.Minute); holder == nil; {
		free, _, errno := unix.Syscall(unix.SYS_IOCTL, control.Fd(), unix.LOOP_CTL_GET_FREE, 0)
		if errno != 0 {
			t.Fatal(errno)
		}
		holder, err = os.OpenFile(fmt.Sprintf("/dev/loop%d", free), os.O_RDONLY|unix.O_EXCL, 0)
		if err != nil && (!errors.Is(err, unix.EBUSY) || time.Now().After(end)) { // otherwise another test was quicker
			t.Fatal(err)
		}
	}
	defer holder.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for range 3 {
		device, err := pool.Attach(ctx, pooltest.Vol("a"), blockdev.Attachment{Keep: true})
		check.OK(t, err)
		check.OK(t, device.Close())
		check.OK(t, pool.Detach(ctx, pooltest.Vol("a")))
	}
}

// takeNumber attaches new volumes of a pool until one is the device of that number, and leaves only that one. It may fail, as others on the machine may be
// faster.
func takeNumber(t testing.TB, pool blockdev.Pool, number uint64) (blockdev.Device, bool) {
	t.Helper()
	var others []blockdev.Device
	defer func() {
		for _, device := range others {
			check.OK(t, device.Close())
		}
	}()
	for i := range 16 {
		ref := blockdev.Ref{Kind: blockdev.Volume, Key: fmt.Sprintf("%032x", i)}
		pooltest.Create(t, pool, blockdev.Spec{Ref: ref, Size: pooltest.MiB, Provisioning: blockdev.Thin})
		device := pooltest.Attach(t, pool, ref, blockdev.Attachment{})
		if device.Number == number {
			return device, true
		}
		others = append(others, device)
	}
	return blockdev.Device{}, false
}

// TestReusedNumber: a number that was our device's may be another's by now: that one is left alone.
func TestReusedNumber(t *testing.T) {
	dir := drivertest.Dir(t)
	pool, other := pooltest.OpenedFiles(t, filepath.Join(dir, "a")), pooltest.OpenedFiles(t, filepath.Join(dir, "b"))
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: pooltest.MiB})
	for range 50 { // others on the machine may be faster
		device := pooltest.Attach(t, pool, pooltest.Vol("a"), blockdev.Attachment{ReadOnly: true})
		check.OK(t, device.Close())
		theirs, same := takeNumber(t, other, device.Number)
		if !same {
			continue
		}
		if devices, err := pool.Attached(t.Context(), pooltest.Vol("a")); err != nil || len(devices) != 0 {
			t.Errorf("Attached: %v, %v", devices, err)
		}
		check.OK(t, pool.Detach(t.Context(), pooltest.Vol("a")))
		check.OK(t, pool.Delete(t.Context(), pooltest.Vol("a")))
		var still [16]byte
		f, err := os.Open(theirs.Path)
		check.OK(t, err)
		_, err = f.ReadAt(still[:], 0)
		check.OK(t, errors.Join(err, f.Close()))
		check.OK(t, theirs.Close())
		return
	}
	t.Fatal("the number of a detached device was never reused")
}

// TestSticky: a loop device keeps its mode and the settings of its queue across detach and attach. The next volume on it has none of them.
func TestSticky(t *testing.T) {
	dir := drivertest.Dir(t)
	pool := pooltest.OpenedFiles(t, dir)
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: pooltest.MiB})
	settings := func(device blockdev.Device) (all []string) {
		for _, name := range []string{"read_ahead_kb", "scheduler"} {
			b, err := os.ReadFile(filepath.Join("/sys/block", filepath.Base(device.Path), "queue", name))
			check.OK(t, err)
			all = append(all, strings.TrimSpace(string(b)))
		}
		return all
	}
	for range 50 { // others on the machine may be faster
		device := pooltest.Attach(t, pool, pooltest.Vol("a"), blockdev.Attachment{Keep: true})
		before := settings(device)
		check.OK(t, pooltest.Second(device.SetQueue(map[string]string{"read_ahead_kb": "64", "scheduler": "mq-deadline"})))
		if after := settings(device); before[0] == after[0] || before[1] == after[1] {
			t.Fatalf("settings %q became %q: this test shows nothing", before, after)
		}
		run(t, "blockdev", "--setro", device.Path)
		check.OK(t, device.Close())
		check.OK(t, pool.Detach(t.Context(), pooltest.Vol("a")))
		again, same := takeNumber(t, pool, device.Number)
		if !same { // another test may have it next, or it is gone altogether
			_ = exec.CommandContext(t.Context(), "blockdev", "--setrw", device.Path).Run()
			continue
		}
		if have := settings(again); !slices.Equal(have, before) || again.ReadOnly {
			t.Errorf("the next volume on %s has settings %q, read-only %v; want %q", again.Path, have, again.ReadOnly, before)
		}
		pooltest.WriteTo(t, again.Path, 0, make([]byte, blockdev.Granularity))
		check.OK(t, again.Close())
		return
	}
	t.Fatal("the number of a detached device was never reused")
}

// TestSetQueue: SetQueue makes all settings or none, and undo restores them.
func TestSetQueue(t *testing.T) {
	pool := pooltest.OpenedFiles(t, drivertest.Dir(t))
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: pooltest.MiB})
	device := pooltest.Attach(t, pool, pooltest.Vol("a"), blockdev.Attachment{})
	check.OK(t, pooltest.Second(device.SetQueue(map[string]string{"read_ahead_kb": "64"})))
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
			pooltest.Fails(t, pooltest.Second(device.SetQueue(bad)), errdefs.ErrInvalid, fmt.Sprint(bad))
			is(fmt.Sprint("after ", bad), "64", "none")
		}
	}
	undo, err := device.SetQueue(map[string]string{"read_ahead_kb": "256", "scheduler": "mq-deadline"})
	check.OK(t, err)
	is("set", "256", "mq-deadline")
	check.OK(t, undo())
	is("undone", "64", "none")
}

// TestForeignPool: a pool of the same name elsewhere on the machine, with an object of the same key, is left alone.
func TestForeignPool(t *testing.T) {
	dir := drivertest.Dir(t)
	theirs := pooltest.OpenedFiles(t, filepath.Join(dir, "theirs"))
	pooltest.Create(t, theirs, blockdev.Spec{Ref: pooltest.Vol("a"), Size: pooltest.MiB})
	pooltest.Create(t, theirs, blockdev.Spec{Ref: pooltest.Vol("b"), Size: pooltest.MiB})
	for _, ref := range []blockdev.Ref{pooltest.Vol("a"), pooltest.Vol("b")} {
		device := pooltest.Attach(t, theirs, ref, blockdev.Attachment{Keep: true})
		check.OK(t, device.Close())
	}
	check.OK(t, pooltest.OpenFiles(t, filepath.Join(dir, "ours")).Close())
	pool := pooltest.OpenedFiles(t, filepath.Join(dir, "ours"))
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: pooltest.MiB}) // this pool has no b
	if orphans, err := pool.Orphans(t.Context()); err != nil || len(orphans) != 0 {
		t.Errorf("Orphans: %v, %v", orphans, err)
	}
	for _, ref := range []blockdev.Ref{pooltest.Vol("a"), pooltest.Vol("b")} {
		if devices, err := pool.Attached(t.Context(), ref); err != nil || len(devices) != 0 {
			t.Errorf("%s: attached as %v, %v", ref, devices, err)
		}
		check.OK(t, pool.Detach(t.Context(), ref))
		check.OK(t, pool.Delete(t.Context(), ref))
		if devices, err := theirs.Attached(t.Context(), ref); err != nil || len(devices) != 1 {
			t.Errorf("theirs, %s: attached as %v, %v", ref, devices, err)
		}
		check.OK(t, theirs.Detach(t.Context(), ref))
	}
}

// TestLostWhileAttached: a pool that is opened without image and record still finds the device, and detaches it.
func TestLostWhileAttached(t *testing.T) {
	dir := drivertest.Dir(t)
	pool := pooltest.OpenFiles(t, dir)
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: pooltest.MiB})
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("b"), Size: pooltest.MiB})
	lost := pooltest.Attach(t, pool, pooltest.Vol("a"), blockdev.Attachment{Keep: true})
	replaced := pooltest.Attach(t, pool, pooltest.Vol("b"), blockdev.Attachment{Keep: true})
	check.OK(t, errors.Join(lost.Close(), replaced.Close(), pool.Close()))
	check.OK(t, errors.Join(os.Remove(path(dir, pooltest.Vol("a"), ".img")), os.Remove(path(dir, pooltest.Vol("a"), ".rec"))))
	// As an operator does to bring an image back.
	run(t, "cp", path(dir, pooltest.Vol("b"), ".img"), filepath.Join(dir, "copy"))
	check.OK(t, os.Rename(filepath.Join(dir, "copy"), path(dir, pooltest.Vol("b"), ".img")))

	pool = pooltest.OpenedFiles(t, dir)
	for ref, want := range map[blockdev.Ref]blockdev.Device{pooltest.Vol("a"): lost, pooltest.Vol("b"): replaced} {
		if devices, err := pool.Attached(t.Context(), ref); err != nil || len(devices) != 1 || devices[0].Number != want.Number {
			t.Errorf("%s: attached as %v, %v; want %s", ref, devices, err, want.Path)
		}
		check.OK(t, pool.Detach(t.Context(), ref))
		if devices, err := pool.Attached(t.Context(), ref); err != nil || len(devices) != 0 {
			t.Errorf("%s: after Detach attached as %v, %v", ref, devices, err)
		}
	}
}

// TestMounted: a device without Keep stays while it is mounted. A pool that is nearly full says so.
func TestMounted(t *testing.T) {
	dir := drivertest.Dir(t)
	pool := pooltest.OpenedFiles(t, filepath.Join(dir, "pool"))
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: 32 * pooltest.MiB})
	device := pooltest.Attach(t, pool, pooltest.Vol("a"), blockdev.Attachment{})
	run(t, "mkfs.ext4", "-q", device.Path)
	target := filepath.Join(dir, "target")
	check.OK(t, os.Mkdir(target, 0o700))
	check.OK(t, unix.Mount(device.Path, target, "ext4", 0, ""))
	check.OK(t, device.Close())
	if devices, err := pool.Attached(t.Context(), pooltest.Vol("a")); err != nil || len(devices) != 1 {
		t.Errorf("mounted: attached as %v, %v", devices, err)
	}
	pooltest.Fails(t, pool.Delete(t.Context(), pooltest.Vol("a")), errdefs.ErrInUse, "Delete of what is mounted")
	drivertest.Unmount(t, target)
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		devices, err := pool.Attached(t.Context(), pooltest.Vol("a"))
		check.OK(t, err)
		if len(devices) == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("unmounted: still attached as %v", devices)
		}
	}
	check.OK(t, pool.Delete(t.Context(), pooltest.Vol("a")))
}

// TestNearlyFull: writes to thin volumes fill the filesystem, and health says so in time.
func TestNearlyFull(t *testing.T) {
	dir := filepath.Join(mountNew(t, "tmpfs"), "pool")
	pool, err := pools.Open(t.Context(), "test", "file://"+dir+"?overprovision=2&reservePercent=10&create=1")
	check.OK(t, err)
	defer func() { check.OK(t, pool.Close()) }()
	if problems := pool.PoolHealth(t.Context()); len(problems) != 0 {
		t.Errorf("an empty pool: %v", problems)
	}
	filler, err := os.Create(filepath.Join(dir, "filler"))
	check.OK(t, err)
	check.OK(t, errors.Join(unix.Fallocate(int(filler.Fd()), 0, 0, 480*pooltest.MiB), filler.Close()))
	if have := reasons(pool.PoolHealth(t.Context())); !slices.Equal(have, []string{"1 PoolNearlyFull"}) {
		t.Errorf("a full pool: %v", have)
	}
	// Space that others take cannot be promised.
	if c := pooltest.CapacityOf(t, pool); c.Available != 0 || c.MaxVolume != 0 {
		t.Errorf("a full pool: %+v", c)
	}
}

// TestHeldForAMoment: somebody who scans all block devices has one open just when its last user closes it. The next use of the volume waits for that, and
// so does its deletion.
func TestHeldForAMoment(t *testing.T) {
	drivertest.NeedRoot(t)
	pool := pooltest.OpenURL(t, "file://"+drivertest.Dir(t)+"/pool?reservePercent=0")
	t.Cleanup(func() { check.OK(t, pool.Close()) })
	pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: 1 << 20})
	scanned := func() *os.File {
		device, err := pool.Attach(t.Context(), pooltest.Vol("a"), blockdev.Attachment{})
		check.OK(t, err)
		scanner, err := os.Open(device.Path)
		check.OK(t, errors.Join(err, device.Close()))
		return scanner
	}
	soonClosed := func(scanner *os.File) {
		time.AfterFunc(200*time.Millisecond, func() { _ = scanner.Close() })
	}
	soonClosed(scanned())
	kept, err := pool.Attach(t.Context(), pooltest.Vol("a"), blockdev.Attachment{Keep: true})
	check.OK(t, err)
	check.OK(t, errors.Join(kept.Close(), pool.Detach(t.Context(), pooltest.Vol("a"))))
	for _, remove := range []func(context.Context, blockdev.Ref) error{pool.Delete, pool.Erase} {
		pooltest.Create(t, pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: 1 << 20})
		scanner := scanned()
		if err := remove(t.Context(), pooltest.Vol("a")); !errors.Is(err, errdefs.ErrInUse) {
			t.Errorf("removed while it is open: %v", err)
		}
		soonClosed(scanner)
		check.OK(t, remove(t.Context(), pooltest.Vol("a")))
	}
}
