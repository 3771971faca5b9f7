package life

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
)

// TestWriteThatDoesNotEnd: a pod keeps a write to its volume open for as long as it likes (splice(2) from a
// pipe that nobody writes to), and with it the freeze of a copy. Calls end with their caller's time all the same, for this volume
// and others; and once the write ends, nothing is frozen, and a copy can be made.
func TestWriteThatDoesNotEnd(t *testing.T) {
	d := startOn(t, "plain")
	other := d.made(co.Request("other", "ext4", smallest["ext4"]))
	otherTarget := other.running()
	v := d.made(co.Request("volume", "ext4", smallest["ext4"]))
	target := v.running()
	write(t, v.File(target), 1)
	in, out, err := os.Pipe()
	check.OK(t, err)
	defer in.Close()
	defer out.Close()
	file, err := os.Create(filepath.Join(target, "spliced"))
	check.OK(t, err)
	defer file.Close()
	spliced := make(chan error, 1)
	go func() {
		_, err := unix.Splice(int(in.Fd()), nil, int(file.Fd()), nil, 1<<16, 0)
		spliced <- err
	}()
	for { // until it has begun
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		early, err := d.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: "snapshot", SourceVolumeId: v.ID})
		cancel()
		if err != nil {
			check.Code(t, err, codes.DeadlineExceeded)
			break
		}
		check.OK(t, d.deleteSnapshot(early.GetSnapshot().GetSnapshotId()))
	}
	for deadline := time.Now().Add(5 * time.Minute); ; time.Sleep(10 * time.Millisecond) {
		early, err := v.snapshot("snapshot")
		if err == nil { // it had not
			check.OK(t, d.deleteSnapshot(early.GetSnapshotId()))
		}
		if err != nil && strings.Contains(err.Error(), "end the pod that writes") {
			check.Code(t, err, codes.Unavailable)
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("the call goes on when its caller is gone: %v", err)
		}
	}
	snapshot, err := other.snapshot("of the other")
	check.OK(t, err)

	check.OK(t, out.Close())
	check.OK(t, <-spliced)
	write(t, v.File(target), 2) // it waits if need be, and no longer
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		made, err := v.snapshot("snapshot")
		if err == nil {
			check.OK(t, d.deleteSnapshot(made.GetSnapshotId()))
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("no copy can be made any more: %v", err)
		}
	}
	check.OK(t, file.Close())
	check.OK(t, d.deleteSnapshot(snapshot.GetSnapshotId()))
	check.OK(t, v.down(target))
	check.OK(t, other.down(otherTarget))
	d.nothingLeft()
}

// TestBoundPipeOfVolume: a pod makes a pipe in its volume, which the kubelet binds as a subpath. A driver that is started
// anew knows that mount, and neither copies nor grows the volume through it: who opens a pipe waits for ever.
func TestBoundPipeOfVolume(t *testing.T) {
	d := startOn(t, "plain")
	v := d.made(co.Request("volume", "xfs", smallest["xfs"]))
	target := v.running()
	pipe, bound := filepath.Join(target, "pipe"), filepath.Join(d.Dir, "a-subpath") // before the staging path, in the order of names
	check.OK(t, unix.Mkfifo(pipe, 0o600))
	check.OK(t, os.WriteFile(bound, nil, 0o600))
	check.OK(t, unix.Mount(pipe, bound, "", unix.MS_BIND, ""))
	t.Cleanup(func() { _ = unix.Unmount(bound, unix.MNT_DETACH) })
	d = d.restart()
	v.driver, v.Client = d, d.Client
	for what, call := range map[string]func() error{
		"snapshot": func() error {
			made, err := v.snapshot("snapshot")
			if err != nil {
				return err
			}
			return d.deleteSnapshot(made.GetSnapshotId())
		},
		"growth": func() error {
			if err := v.expand(2 * smallest["xfs"]); err != nil {
				return err
			}
			return v.nodeExpand(target)
		},
	} {
		done := make(chan error, 1)
		go func() { done <- call() }()
		select {
		case err := <-done:
			check.OK(t, err)
		case <-time.After(time.Minute):
			t.Errorf("%s: it waits for ever", what)
			w, err := os.OpenFile(pipe, os.O_RDWR, 0)
			check.OK(t, err)
			<-done
			check.OK(t, w.Close())
		}
	}
	drivertest.Unmount(t, bound)
	check.OK(t, v.down(target))
	d.nothingLeft()
}
