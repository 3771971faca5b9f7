package lvmpool_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/direct"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lvmpool"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Tests of an lvm2 and a thin pool that disagree about the last change.

// TestLVMSnapshotAsItIsClosed: the last user of a volume closes it while lvm2 makes a snapshot of it (of a linear one, the cut that it is copied from). The
// volume's device stays until lvm2 is done (were it gone before lvm2 suspends it, a thin pool would not be told); then it goes, the snapshot has its bytes, and
// the pool takes changes.
func TestLVMSnapshotAsItIsClosed(t *testing.T) {
	onLVM(t, func(f *lvmFixture) {
		f.make(pooltest.Vol("a"), 8*pooltest.MiB)
		f.write(pooltest.Vol("a"), 0, marked("a", pooltest.MiB))
		name := f.group.Device(pooltest.Vol("a").String())
		for round := range 5 {
			snapshot := blockdev.Ref{Kind: blockdev.Snapshot, Key: fmt.Sprintf("%032x", round)}
			made := snapshot.String()
			if !f.thin {
				made = "cut." + made
			}
			device := pooltest.Attach(f, f.pool, pooltest.Vol("a"), blockdev.Attachment{})
			var gone, done time.Time
			closed := make(chan error)
			go func() {
				err := errors.Join(f.written(made), device.Close())
				for err == nil {
					var d *dm.Device
					if d, err = dm.Find(name); d == nil {
						break
					}
					time.Sleep(time.Millisecond)
				}
				gone = time.Now()
				closed <- err
			}()
			pooltest.Create(f, f.pool, blockdev.Spec{Ref: snapshot, Size: 8 * pooltest.MiB, Origin: pooltest.Vol("a"), Cut: func(context.Context) error { done = time.Now(); return nil }})
			check.OK(f, <-closed)
			if early := done.Sub(gone); early > 20*time.Millisecond {
				f.Errorf("the device was gone %v before lvm2 was done", early)
			}
			f.holds(snapshot, 0, marked("a", pooltest.MiB))
			check.OK(f, f.pool.Delete(f.Context(), snapshot))
		}
	})
}

// written waits until lvm2's metadata has a word.
func (f *lvmFixture) written(word string) error {
	disk, err := direct.Open(f.group.Devices[0], os.O_RDONLY)
	if err != nil {
		return err
	}
	defer disk.Close()
	memory, free, err := direct.Memory(pooltest.MiB)
	if err != nil {
		return err
	}
	defer free()
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if _, err := disk.ReadAt(memory, 0); err != nil {
			return err
		}
		if bytes.Contains(memory, []byte(word)) {
			return nil
		}
	}
	return fmt.Errorf("lvm2 has not written %q", word)
}

// TestLVMDisagree: lvm2 takes a snapshot for made that the thin pool never made. That is no lack of space; the steps of
// docs/runbooks/thin-pool-failed.md have the two agree again, and only that snapshot is lost.
func TestLVMDisagree(t *testing.T) {
	f := thinFixture(t, 64*pooltest.MiB)
	ctx := t.Context()
	f.make(pooltest.Vol("a"), 8*pooltest.MiB)
	f.write(pooltest.Vol("a"), 0, marked("a", pooltest.MiB))
	f.copy(pooltest.Snap("b"), pooltest.Vol("a"), 8*pooltest.MiB)
	check.OK(t, f.pool.Close())
	f.pool = nil
	tpool := f.tpool()
	noted := strings.Fields(drivertest.Run(t, "dmsetup", "status", tpool))[3]
	f.rewrite(func(all string) string { return strings.Replace(untold(t, all, "none"), "message1 {\nnone\n}", "", 1) })
	f.pool = pooltest.OpenURL(t, f.url)
	create := func() error {
		return pooltest.Second(f.pool.Create(ctx, blockdev.Spec{Ref: pooltest.Vol("c"), Name: "c", Size: 8 * pooltest.MiB}))
	}
	for what, call := range map[string]func() error{"create": create, "delete": func() error { return f.pool.Delete(ctx, pooltest.Snap("b")) }} {
		err := call()
		t.Logf("%s: %v", what, err)
		says(t, err, errdefs.ErrUnavailable, "disagree", "thin-pool-failed.md")
		if errors.Is(err, errdefs.ErrNoSpace) {
			t.Errorf("%s: %v; there is space", what, err)
		}
	}
	for range 2 { // the first time another lvm2 might be at work
		lvmpool.Age(f.pool)
		f.pool.PoolHealth(ctx)
	}
	f.poolIll("ThinPoolDisagrees")
	capacity, err := f.pool.Capacity(ctx)
	if check.OK(t, err); capacity.Available != 0 {
		t.Errorf("%d bytes are available, of which nothing can be made", capacity.Available)
	}
	next := strings.TrimSpace(drivertest.Run(t, "lvs", "--noheadings", "-o", "transaction_id", f.group.Name+"/tp"))
	drivertest.Run(t, "dmsetup", "message", tpool, "0", "set_transaction_id "+noted+" "+next)
	lvmpool.Age(f.pool)
	f.poolIll()
	check.OK(t, create())
	f.holds(pooltest.Vol("a"), 0, marked("a", pooltest.MiB))
	check.OK(t, f.pool.Delete(ctx, pooltest.Snap("b")))

	// The thin pool is ahead, with a snapshot that lvm2 does not know.
	noted = strings.Fields(drivertest.Run(t, "dmsetup", "status", tpool))[3]
	number, err := strconv.Atoi(noted)
	check.OK(t, err)
	drivertest.Run(t, "dmsetup", "message", tpool, "0", "create_snap 100 1")
	drivertest.Run(t, "dmsetup", "message", tpool, "0", fmt.Sprintf("set_transaction_id %d %d", number, number+1))
	says(t, f.pool.Delete(ctx, pooltest.Vol("c")), errdefs.ErrUnavailable, "disagree", "thin-pool-failed.md")
	for range 2 {
		lvmpool.Age(f.pool)
		f.pool.PoolHealth(ctx)
	}
	f.poolIll("ThinPoolDisagrees")
	says(t, pooltest.Second(f.pool.Create(ctx, blockdev.Spec{Ref: pooltest.Vol("d"), Name: "d", Size: 8 * pooltest.MiB})), errdefs.ErrUnavailable, "disagree", "thin-pool-failed.md")
	drivertest.Run(t, "dmsetup", "message", tpool, "0", fmt.Sprintf("set_transaction_id %d %d", number+1, number))
	lvmpool.Age(f.pool)
	f.poolIll()
	drivertest.Run(t, "dmsetup", "message", tpool, "0", "delete 100")
	check.OK(t, f.pool.Delete(ctx, pooltest.Vol("c")))
}

// TestLVMUnknownThinDevice: a thin pool has a snapshot that lvm2 does not know, and whose number it gives next. lvm2 can leave such a one: if it cannot suspend
// the origin when the thin pool has made the snapshot (lib/metadata/lv_manip.c of 2.03.16). An object that is made then has its own bytes, at the latest at a second
// try, and the pool takes changes.
func TestLVMUnknownThinDevice(t *testing.T) {
	for _, attached := range []bool{false, true} {
		for _, copied := range []bool{false, true} {
			t.Run(fmt.Sprintf("attached=%v,copied=%v", attached, copied), func(t *testing.T) {
				f := thinFixture(t, 64*pooltest.MiB)
				ctx := t.Context()
				f.make(pooltest.Vol("a"), 8*pooltest.MiB)
				f.write(pooltest.Vol("a"), 0, marked("a", pooltest.MiB))
				f.make(pooltest.Vol("b"), 8*pooltest.MiB)
				f.write(pooltest.Vol("b"), 0, marked("b", pooltest.MiB))
				drivertest.Run(t, "dmsetup", "message", f.tpool(), "0", fmt.Sprintf("create_snap %d %d", f.thinID(pooltest.Vol("b"))+1, f.thinID(pooltest.Vol("a"))))
				if attached {
					device := pooltest.Attach(f, f.pool, pooltest.Vol("b"), blockdev.Attachment{})
					defer device.Close()
				}
				spec := blockdev.Spec{Ref: pooltest.Vol("c"), Name: "c", Size: 8 * pooltest.MiB}
				if copied {
					spec.Origin = pooltest.Vol("b")
				}
				var err error
				for range 3 {
					if _, err = f.pool.Create(ctx, spec); err == nil {
						break
					}
					t.Logf("create: %v", err)
				}
				check.OK(t, err)
				if copied {
					f.holds(pooltest.Vol("c"), 0, marked("b", pooltest.MiB))
				} else {
					f.holds(pooltest.Vol("c"), 0, make([]byte, pooltest.MiB))
				}
				f.holds(pooltest.Vol("a"), 0, marked("a", pooltest.MiB))
				if !attached {
					check.OK(t, errors.Join(f.pool.Delete(ctx, pooltest.Vol("a")), f.pool.Delete(ctx, pooltest.Vol("b")), f.pool.Delete(ctx, pooltest.Vol("c"))))
					f.unmapped()
				}
			})
		}
	}
}

// TestLVMSnapshotOfSuspended: lvm2 passes over an origin whose device is suspended already, as over one that is gone. A snapshot of it is refused, and the thin
// pool takes changes.
func TestLVMSnapshotOfSuspended(t *testing.T) {
	onLVM(t, func(f *lvmFixture) {
		f.make(pooltest.Vol("a"), 8*pooltest.MiB)
		f.write(pooltest.Vol("a"), 0, marked("a", pooltest.MiB))
		device := pooltest.Attach(f, f.pool, pooltest.Vol("a"), blockdev.Attachment{})
		defer device.Close()
		name := f.group.Device(pooltest.Vol("a").String())
		drivertest.Run(f, "dmsetup", "suspend", name)
		err := pooltest.Second(f.pool.Create(f.Context(), blockdev.Spec{Ref: pooltest.Snap("b"), Size: 8 * pooltest.MiB, Origin: pooltest.Vol("a")}))
		f.Logf("snapshot: %v", err)
		drivertest.Run(f, "dmsetup", "resume", name)
		says(f, err, errdefs.ErrUnavailable, "suspended", "dmsetup resume")
		f.copy(pooltest.Snap("b"), pooltest.Vol("a"), 8*pooltest.MiB)
		f.holds(pooltest.Snap("b"), 0, marked("a", pooltest.MiB))
	})
}

// TestLVMTakenBack: lvm2 takes back a snapshot that the thin pool has made and counted. The pool takes changes all the same, and that
// snapshot is removed.
func TestLVMTakenBack(t *testing.T) {
	f := thinFixture(t, 64*pooltest.MiB)
	ctx := t.Context()
	for _, name := range []string{"a", "b"} {
		f.make(pooltest.Vol(name), 8*pooltest.MiB)
		f.write(pooltest.Vol(name), 0, marked(name, pooltest.MiB))
	}
	lvmpool.FailChange(ctx, f.pool, func() {
		number, err := strconv.Atoi(strings.Fields(drivertest.Run(t, "dmsetup", "status", f.tpool()))[3])
		check.OK(t, err)
		drivertest.Run(t, "dmsetup", "message", f.tpool(), "0", fmt.Sprintf("create_snap %d %d", f.thinID(pooltest.Vol("b"))+1, f.thinID(pooltest.Vol("a"))))
		drivertest.Run(t, "dmsetup", "message", f.tpool(), "0", fmt.Sprintf("set_transaction_id %d %d", number, number+1))
	})
	f.copy(pooltest.Snap("b"), pooltest.Vol("b"), 8*pooltest.MiB)
	f.holds(pooltest.Snap("b"), 0, marked("b", pooltest.MiB))
	f.make(pooltest.Vol("c"), 8*pooltest.MiB)
	f.holds(pooltest.Vol("c"), 0, make([]byte, pooltest.MiB))
	check.OK(t, errors.Join(f.pool.Delete(ctx, pooltest.Snap("b")), f.pool.Delete(ctx, pooltest.Vol("a")), f.pool.Delete(ctx, pooltest.Vol("b")), f.pool.Delete(ctx, pooltest.Vol("c"))))
	f.unmapped()
}

// TestLVMHeldRemoval: a thin pool refuses to remove a volume, as something has it open; lvm2 does not know it any more by then. When nothing has it open, the
// next change of the pool removes it, whatever that is, and no new volume shows its bytes.
func TestLVMHeldRemoval(t *testing.T) {
	for _, next := range []string{"the same", "another"} {
		t.Run(next, func(t *testing.T) {
			f := thinFixture(t, 64*pooltest.MiB)
			ctx := t.Context()
			f.make(pooltest.Vol("b"), 8*pooltest.MiB)
			f.make(pooltest.Vol("a"), 8*pooltest.MiB)
			f.write(pooltest.Vol("a"), 0, marked("secret", pooltest.MiB))
			holder := f.group.Name + ".holder"
			drivertest.Run(t, "dmsetup", "create", holder, "--table", fmt.Sprintf("0 %d thin /dev/mapper/%s %d", 8*pooltest.MiB/512, f.tpool(), f.thinID(pooltest.Vol("a"))))
			err := f.pool.Delete(ctx, pooltest.Vol("a"))
			t.Logf("delete: %v", err)
			drivertest.Run(t, "dmsetup", "remove", holder)
			if next == "the same" {
				check.OK(t, f.pool.Delete(ctx, pooltest.Vol("a")))
			} else {
				check.OK(t, f.pool.Delete(ctx, pooltest.Vol("b")))
				f.make(pooltest.Vol("b"), 8*pooltest.MiB)
				f.holds(pooltest.Vol("b"), 0, make([]byte, pooltest.MiB))
				check.OK(t, f.pool.Delete(ctx, pooltest.Vol("a")))
			}
			f.make(pooltest.Vol("c"), 8*pooltest.MiB)
			f.holds(pooltest.Vol("c"), 0, make([]byte, pooltest.MiB))
			_ = f.pool.Delete(ctx, pooltest.Vol("b"))
			check.OK(t, f.pool.Delete(ctx, pooltest.Vol("c")))
			f.unmapped()
		})
	}
}

// tpool returns the name of the device of the fixture's thin pool while it has volumes.
func (f *lvmFixture) tpool() string { return f.group.Device("tp") + "-tpool" }

// thinID returns the number that the thin pool has for a volume.
func (f *lvmFixture) thinID(ref blockdev.Ref) int {
	f.Helper()
	id, err := strconv.Atoi(strings.TrimSpace(drivertest.Run(f, "lvs", "--noheadings", "-o", "thin_id", f.path(ref))))
	check.OK(f, err)
	return id
}

// unmapped checks that the thin pool, whose volumes are all deleted, has no blocks.
func (f *lvmFixture) unmapped() {
	f.Helper()
	if status := drivertest.Run(f, "dmsetup", "status", "--target", "thin-pool"); !strings.Contains(status, " 0/") {
		f.Errorf("the empty thin pool has blocks: %s", status)
	}
}
