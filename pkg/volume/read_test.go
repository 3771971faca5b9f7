package volume_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/direct"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/nvmet"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// needGuard skips a test where the device mapper cannot make a device that fails all writes.
func needGuard(t *testing.T) {
	t.Helper()
	drivertest.NeedRoot(t)
	if err := dm.HasTarget("flakey"); err != nil {
		t.Skipf("nothing keeps a device from being written to here (make test-any): %v", err)
	}
}

// written makes a raw volume with access any, the first bytes of which are content.
func written(t *testing.T, l *volume.Local, name, content string) volume.Volume {
	t.Helper()
	v, err := l.Create(t.Context(), volume.Spec{Name: name, Size: volume.Range{Required: 4 * mib}, Access: volume.AccessAny})
	check.OK(t, err)
	writes(t, l, v, content)
	return v
}

func writes(t *testing.T, l *volume.Local, v volume.Volume, content string) {
	t.Helper()
	device, err := l.AttachRaw(t.Context(), v, nil, true)
	check.OK(t, err)
	f, err := os.OpenFile(device.Path, os.O_WRONLY|unix.O_SYNC, 0)
	check.OK(t, err)
	_, err = f.WriteAt([]byte(content), 0)
	check.OK(t, errors.Join(err, f.Close(), device.Close(), l.Detach(t.Context(), v.ID)))
}

// readBy makes sure that a volume is exported for reading for the claims of the given generations, that there are no other exports of it, and that it is
// attached if and only if it is read there or here.
func readBy(t testing.TB, l *volume.Local, k *target, id volume.ID, here bool, want ...int64) {
	t.Helper()
	have, err := l.Readers(t.Context(), id)
	check.OK(t, err)
	if !slices.Equal(have, want) {
		t.Errorf("read by %v, want %v", have, want)
	}
	n := 0
	for nqn := range k.exports {
		if strings.HasPrefix(nqn, nvmet.Prefix+id.Key+":") {
			n++
		}
	}
	devices, err := l.Attached(t.Context(), id)
	check.OK(t, err)
	v, err := l.Get(t.Context(), id)
	check.OK(t, err)
	if read := here || len(want) > 0; n != len(want) || v.Read != read || len(devices) > 0 != read {
		t.Errorf("read by %v and here %v, it has %d exports, is read %v, and attached as %v", want, here, n, v.Read, devices)
	}
}

func nobody(int64) bool { return false }

// TestReachedByMany: a volume is read by several nodes at once, and on its home. None of them can write, also after a start of the driver. They end one by
// one, and then the volume can be written to again.
func TestReachedByMany(t *testing.T) {
	needGuard(t)
	url := filesURL(t)
	pool := opened(t, "default", url)
	l, k := start(t, 0, pool), newTarget(t)
	serve(t, l, k, &consumer{})
	blank, err := l.Create(t.Context(), volume.Spec{Name: "blank", Size: volume.Range{Required: mib}, Access: volume.AccessAny})
	check.OK(t, err)
	fails(t, second(l.ExportToRead(t.Context(), blank.ID, grant(1, "b"))), errdefs.ErrPrecondition, "ExportToRead")
	fails(t, second(l.ExportToRead(t.Context(), create(t, l, "own").ID, grant(1, "b"))), errdefs.ErrPrecondition, "ExportToRead")

	v := written(t, l, "a", "content")
	_, err = l.Export(t.Context(), v.ID, grant(1, "b"))
	check.OK(t, err)
	first, err := l.ExportToRead(t.Context(), v.ID, grant(2, "b")) // this ends the export for writing
	check.OK(t, err)
	again, err := l.ExportToRead(t.Context(), v.ID, grant(2, "b"))
	check.OK(t, err)
	other, err := l.ExportToRead(t.Context(), v.ID, grant(3, "c"))
	check.OK(t, err)
	if first.NQN != again.NQN || first.Secret != again.Secret || first.NQN == other.NQN || first.Host == other.Host || first.Secret == other.Secret || first.UUID == other.UUID {
		t.Errorf("exported as %v, %v, %v", first, again, other)
	}
	readBy(t, l, k, v.ID, false, 2, 3)
	here, err := l.AttachToRead(t.Context(), v, false)
	check.OK(t, err)
	readBy(t, l, k, v.ID, true, 2, 3)
	for _, path := range []string{here.Path, k.exports[first.NQN].Device, k.exports[other.NQN].Device} {
		f, err := direct.Open(path, os.O_RDWR)
		check.OK(t, err)
		have, free, err := direct.Memory(4096)
		check.OK(t, err)
		_, err = f.ReadAt(have, 0)
		check.OK(t, err)
		if _, err := f.WriteAt(have, 0); err == nil || !bytes.HasPrefix(have, []byte("content")) {
			t.Errorf("%s has %q, and is written to: %v", path, have[:7], err)
		}
		free()
		_ = f.Close()
	}
	for to, want := range map[volume.Grant]bool{grant(2, "b"): true, grant(3, "c"): true, grant(3, "b"): false, grant(1, "b"): false} {
		if is, err := l.IsReader(t.Context(), v.ID, to); is != want || err != nil {
			t.Errorf("%v is a reader: %v, %v", to, is, err)
		}
	}
	fails(t, l.Delete(t.Context(), v.ID), errdefs.ErrInUse, "Delete")
	fails(t, second(l.Expand(t.Context(), v.ID, volume.Range{Required: 8 * mib})), errdefs.ErrInUse, "Expand")
	check.OK(t, here.Close())

	check.OK(t, pool.Close())
	l = start(t, 0, open(t, "default", url))
	if devices, err := l.Attached(t.Context(), v.ID); len(devices) != 1 || err != nil { // before ServeExports
		t.Errorf("after a start it is attached as %v, %v", devices, err)
	}
	serve(t, l, k, &consumer{})
	readBy(t, l, k, v.ID, true, 2, 3)
	if same, err := l.ExportToRead(t.Context(), v.ID, grant(3, "c")); err != nil || same.Secret != other.Secret {
		t.Errorf("after a start it is exported as %v, %v", same, err)
	}
	check.OK(t, l.EndReaders(t.Context(), v.ID, func(generation int64) bool { return generation != 2 }))
	readBy(t, l, k, v.ID, true, 3)
	check.OK(t, l.Detach(t.Context(), v.ID)) // this node ends reading
	readBy(t, l, k, v.ID, false, 3)
	check.OK(t, l.Detach(t.Context(), v.ID)) // a repeated call does not end the others
	readBy(t, l, k, v.ID, false, 3)
	check.OK(t, l.EndReaders(t.Context(), v.ID, nobody))
	readBy(t, l, k, v.ID, false)
	writes(t, l, v, "another")

	// This node may be the last reader. A claim for writing ends the exports to readers.
	_, err = l.ExportToRead(t.Context(), v.ID, grant(5, "b"))
	check.OK(t, err)
	here, err = l.AttachToRead(t.Context(), v, true)
	check.OK(t, errors.Join(err, here.Close()))
	check.OK(t, l.EndReaders(t.Context(), v.ID, nobody))
	readBy(t, l, k, v.ID, true)
	check.OK(t, l.EndReadingHere(t.Context(), v.ID)) // as after a stage that failed, which is never unstaged
	readBy(t, l, k, v.ID, false)
	_, err = l.ExportToRead(t.Context(), v.ID, grant(6, "b"))
	check.OK(t, err)
	_, err = l.Export(t.Context(), v.ID, grant(7, "c"))
	check.OK(t, err)
	exportedTo(t, l, k, v.ID, grant(7, "c"))
	check.OK(t, l.Unexport(t.Context(), v.ID, 7))
	check.OK(t, l.Delete(t.Context(), v.ID))
}

// TestReachedByManyTaken: exports to readers that another tool has removed from the kernel are made again as they were, also after a start of the driver. Those
// that have ended are not. When all readers have ended, nothing is left.
func TestReachedByManyTaken(t *testing.T) {
	needGuard(t)
	url := filesURL(t)
	pool := opened(t, "default", url)
	l, k := start(t, 0, pool), newTarget(t)
	serve(t, l, k, &consumer{})
	v := written(t, l, "a", "content")
	exported := map[string]nvmet.Export{}
	for generation := range int64(3) {
		out, err := l.ExportToRead(t.Context(), v.ID, grant(generation+1, "b"))
		check.OK(t, err)
		exported[out.NQN] = k.exports[out.NQN]
	}
	retried := func(when string, want ...int64) {
		t.Helper()
		k.reboot()
		readBy := func(what string) {
			t.Helper()
			if have, err := l.Readers(t.Context(), v.ID); err != nil || !slices.Equal(have, want) {
				t.Errorf("%s, %s, it is read by %v, %v; want %v", when, what, have, err, want)
			}
		}
		readBy("taken")
		l.RetryExports(t.Context())
		readBy("exported again")
		if len(k.exports) != len(want) {
			t.Errorf("%s: exported is %v", when, k.exports)
		}
		for nqn, e := range k.exports {
			if e != exported[nqn] {
				t.Errorf("%s: exported is %+v, want %+v", when, e, exported[nqn])
			}
		}
		ails(t, l, v.ID)
	}
	retried("all of them", 1, 2, 3)
	check.OK(t, l.EndReaders(t.Context(), v.ID, func(generation int64) bool { return generation != 2 }))
	retried("those who have not ended", 1, 3)

	check.OK(t, pool.Close())
	l = start(t, 0, open(t, "default", url))
	serve(t, l, k, &consumer{})
	retried("after a start", 1, 3)
	k.reboot()
	k.taken()
	check.OK(t, l.EndReaders(t.Context(), v.ID, nobody))
	if calls := k.taken(); len(calls) != 2 {
		t.Errorf("at the end of what was taken, the calls are %v", calls)
	}
	l.RetryExports(t.Context())
	readBy(t, l, k, v.ID, false)
	check.OK(t, l.Delete(t.Context(), v.ID))
}

// TestReachedByManyRebooted: after a restart of the machine, a volume that many nodes read before has no readers, and can be read and written to again.
func TestReachedByManyRebooted(t *testing.T) {
	needGuard(t)
	url := filesURL(t)
	pool := opened(t, "default", url)
	l, k := start(t, 0, pool), newTarget(t)
	serve(t, l, k, &consumer{})
	v := written(t, l, "a", "content")
	before, err := l.ExportToRead(t.Context(), v.ID, grant(1, "b"))
	check.OK(t, err)
	here, err := l.AttachToRead(t.Context(), v, true)
	check.OK(t, errors.Join(err, here.Close()))
	k.reboot()
	name := nameOf(t, here)
	check.OK(t, second(dm.Remove(name)))
	check.OK(t, pool.Close())
	l = start(t, 0, open(t, "default", url))
	l.ServeExports(t.Context(), volume.Exporting{Boot: "2", Open: func() (volume.Exporter, error) { return k, nil }, Key: nodeKey, Locks: &keylock.Table{}})
	if have, err := l.Readers(t.Context(), v.ID); err != nil || len(have) > 0 {
		t.Errorf("read by %v, %v", have, err)
	}
	after, err := l.ExportToRead(t.Context(), v.ID, grant(1, "b"))
	check.OK(t, err)
	if before.NQN == after.NQN {
		t.Error("it is exported by the same name")
	}
	readBy(t, l, k, v.ID, false, 1)
	check.OK(t, l.EndReaders(t.Context(), v.ID, nobody))
	readBy(t, l, k, v.ID, false)
	writes(t, l, v, "another")
	check.OK(t, l.Delete(t.Context(), v.ID))
}

// TestReachedByManyCutShort: at whatever step an export for reading, or its end, fails or is cut short, both can be repeated, also after a start of the driver.
// Meanwhile no export is there that can be written to.
func TestReachedByManyCutShort(t *testing.T) {
	needGuard(t)
	for n := 0; ; n++ {
		url := filesURL(t)
		left := -1
		step := func(what string) error {
			if left--; left == -1 {
				return fmt.Errorf("%w before %s", errBroken, what)
			}
			return nil
		}
		under := opened(t, "default", url)
		pool := &stepping{under, step}
		l, k := start(t, 0, pool), newTarget(t)
		k.step = step
		serve(t, l, k, &consumer{})
		v := written(t, l, "a", "content")
		ends := func(l *volume.Local) error { return l.EndReaders(t.Context(), v.ID, nobody) }
		left = n
		_, err := l.ExportToRead(t.Context(), v.ID, grant(1, "b"))
		if err == nil {
			err = ends(l)
		}
		done := left >= 0
		left = -1 << 30
		if !done && err == nil {
			t.Errorf("step %d failed, and nobody was told", n)
		}
		check.OK(t, under.Close())
		l = start(t, 0, open(t, "default", url))
		serve(t, l, k, &consumer{})
		for _, e := range k.exports {
			if guarded, err := dm.Guarded(nameOf(t, blockdev.Device{Path: e.Device})); err != nil || !guarded {
				t.Errorf("step %d: %s is exported and can be written to, %v", n, e.Device, err)
			}
		}
		check.OK(t, second(l.ExportToRead(t.Context(), v.ID, grant(1, "b"))))
		readBy(t, l, k, v.ID, false, 1)
		check.OK(t, ends(l))
		readBy(t, l, k, v.ID, false)
		writes(t, l, v, "another")
		check.OK(t, l.Delete(t.Context(), v.ID))
		if done {
			t.Logf("%d steps", n)
			return
		}
	}
}
