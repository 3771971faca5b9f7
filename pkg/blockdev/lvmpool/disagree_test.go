package lvmpool_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/direct"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
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
		name := strings.ReplaceAll(f.group.Name, "-", "--") + "-" + pooltest.Vol("a").String()
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
	tpool := strings.ReplaceAll(f.group.Name, "-", "--") + "-tp-tpool"
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
	next := strings.TrimSpace(drivertest.Run(t, "lvs", "--noheadings", "-o", "transaction_id", f.group.Name+"/tp"))
	drivertest.Run(t, "dmsetup", "message", tpool, "0", "set_transaction_id "+noted+" "+next)
	check.OK(t, create())
	f.holds(pooltest.Vol("a"), 0, marked("a", pooltest.MiB))
	check.OK(t, f.pool.Delete(ctx, pooltest.Snap("b")))
}
