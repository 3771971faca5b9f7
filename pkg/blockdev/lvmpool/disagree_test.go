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

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Tests of an lvm2 and a thin pool that disagree about the last change.

func onThinPool(t *testing.T) *lvmFixture {
	t.Helper()
	f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 256*pooltest.MiB), thin: true}
	f.url = f.group.ThinPool(t, "tp", "-L", "64M", "--poolmetadatasize", "4M") + "?reservePercent=0"
	f.start()
	return f
}

// TestLVMSnapshotAsItIsClosed: the last user of a volume closes it while lvm2 makes a snapshot of it. The volume's device stays until lvm2 is done (were it
// gone before lvm2 suspends it, the thin pool would not be told); then it goes, the snapshot has its bytes, and the thin pool takes changes.
func TestLVMSnapshotAsItIsClosed(t *testing.T) {
	f := onThinPool(t)
	f.make(pooltest.Vol("a"), 8*pooltest.MiB)
	f.write(pooltest.Vol("a"), 0, marked("a", pooltest.MiB))
	name := strings.ReplaceAll(f.group.Name, "-", "--") + "-" + pooltest.Vol("a").String()
	for round := range 5 {
		snapshot := blockdev.Ref{Kind: blockdev.Snapshot, Key: fmt.Sprintf("%032x", round)}
		device := pooltest.Attach(t, f.pool, pooltest.Vol("a"), blockdev.Attachment{})
		var gone, done time.Time
		closed := make(chan error)
		go func() {
			err := errors.Join(f.written(snapshot.String()), device.Close())
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
		pooltest.Create(t, f.pool, blockdev.Spec{Ref: snapshot, Size: 8 * pooltest.MiB, Origin: pooltest.Vol("a"), Cut: func(context.Context) error { done = time.Now(); return nil }})
		check.OK(t, <-closed)
		if early := done.Sub(gone); early > 20*time.Millisecond {
			t.Errorf("the device was gone %v before lvm2 was done", early)
		}
		f.holds(snapshot, 0, marked("a", pooltest.MiB))
		check.OK(t, f.pool.Delete(t.Context(), snapshot))
	}
}

// written waits until lvm2's metadata has a word.
func (f *lvmFixture) written(word string) error {
	disk, err := os.OpenFile(f.group.Devices[0], os.O_RDONLY|unix.O_DIRECT, 0)
	if err != nil {
		return err
	}
	defer disk.Close()
	memory, err := unix.Mmap(-1, 0, pooltest.MiB, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON) // O_DIRECT wants it aligned
	if err != nil {
		return err
	}
	defer func() { _ = unix.Munmap(memory) }()
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
	f := onThinPool(t)
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
