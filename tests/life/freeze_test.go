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
)

// TestWriteThatDoesNotEnd: a pod keeps a write to its volume open for as long as it likes (splice(2) from a
// pipe that nobody writes to), and with it the freeze of a copy. Calls end with their caller's time all the same, for this volume
// and others; and once the write ends, nothing is frozen, and a copy can be made.
func TestWriteThatDoesNotEnd(t *testing.T) {
	d := startOn(t, "plain")
	other := d.made(request("other", "ext4", smallest["ext4"]))
	otherTarget := other.running()
	v := d.made(request("volume", "ext4", smallest["ext4"]))
	target := v.running()
	write(t, v.file(target), 1)
	in, out, err := os.Pipe()
	ok(t, err)
	defer in.Close()
	defer out.Close()
	file, err := os.Create(filepath.Join(target, "spliced"))
	ok(t, err)
	defer file.Close()
	spliced := make(chan error, 1)
	go func() {
		_, err := unix.Splice(int(in.Fd()), nil, int(file.Fd()), nil, 1<<16, 0)
		spliced <- err
	}()
	for { // until it has begun
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		early, err := d.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: "snapshot", SourceVolumeId: v.id})
		cancel()
		if err != nil {
			wants(t, err, codes.DeadlineExceeded)
			break
		}
		ok(t, d.deleteSnapshot(early.GetSnapshot().GetSnapshotId()))
	}
	for deadline := time.Now().Add(5 * time.Minute); ; time.Sleep(10 * time.Millisecond) {
		early, err := v.snapshot("snapshot")
		if err == nil { // it had not
			ok(t, d.deleteSnapshot(early.GetSnapshotId()))
		}
		if err != nil && strings.Contains(err.Error(), "end the pod that writes") {
			wants(t, err, codes.Unavailable)
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("the call goes on when its caller is gone: %v", err)
		}
	}
	snapshot, err := other.snapshot("of the other")
	ok(t, err)

	ok(t, out.Close())
	ok(t, <-spliced)
	write(t, v.file(target), 2) // it waits if need be, and no longer
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		made, err := v.snapshot("snapshot")
		if err == nil {
			ok(t, d.deleteSnapshot(made.GetSnapshotId()))
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("no copy can be made any more: %v", err)
		}
	}
	ok(t, file.Close())
	ok(t, d.deleteSnapshot(snapshot.GetSnapshotId()))
	ok(t, v.down(target))
	ok(t, other.down(otherTarget))
	d.nothingLeft()
}

// TestBoundPipeOfVolume: a pod makes a pipe in its volume, which the kubelet binds as a subpath. A driver that is started
// anew knows that mount, and neither copies nor grows the volume through it: who opens a pipe waits for ever.
func TestBoundPipeOfVolume(t *testing.T) {
	d := startOn(t, "plain")
	v := d.made(request("volume", "xfs", smallest["xfs"]))
	target := v.running()
	pipe, bound := filepath.Join(target, "pipe"), filepath.Join(d.Dir, "a-subpath") // before the staging path, in the order of names
	ok(t, unix.Mkfifo(pipe, 0o600))
	ok(t, os.WriteFile(bound, nil, 0o600))
	ok(t, unix.Mount(pipe, bound, "", unix.MS_BIND, ""))
	t.Cleanup(func() { _ = unix.Unmount(bound, unix.MNT_DETACH) })
	d = d.restart()
	v.driver = d
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
			ok(t, err)
		case <-time.After(10 * time.Second):
			t.Errorf("%s: it waits for ever", what)
			w, err := os.OpenFile(pipe, os.O_RDWR, 0)
			ok(t, err)
			<-done
			ok(t, w.Close())
		}
	}
	ok(t, unix.Unmount(bound, 0))
	ok(t, v.down(target))
	d.nothingLeft()
}
