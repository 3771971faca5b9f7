package lvmpool_test

import (
	"bytes"
	"context"
	"fmt"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
)

// TestLVMMendsBesideOthers: an administrator moves a volume in use to another disk (pvmove). While his lvm2 has the volume suspended, and lvm2's lock of the
// group, a call of the pool waits for that lock until its time is over. The volume stays his lvm2's to resume, and no acknowledged write is lost.
func TestLVMMendsBesideOthers(t *testing.T) {
	f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 64*pooltest.MiB, 64*pooltest.MiB)}
	f.url = f.group.URL() + "?reservePercent=0"
	f.start()
	const size = 8 * pooltest.MiB
	f.make(pooltest.Vol("a"), size)
	device := f.handOut(pooltest.Vol("a"))
	name := f.group.Device(pooltest.Vol("a").String())
	suspended := func() bool {
		d, err := dm.Find(name)
		return err == nil && d != nil && d.Suspended
	}
	loaded := func() string {
		out, _ := exec.Command("dmsetup", "table", "--inactive", name).CombinedOutput()
		return strings.TrimSpace(string(out))
	}
	var his *exec.Cmd
	var said bytes.Buffer
	// lvm2 has priority -18 while it has devices suspended.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	check.OK(t, syscall.Setpriority(syscall.PRIO_PROCESS, 0, -20))
	var ended chan error
	for try, from := 0, 0; ; try, from = try+1, 1-from {
		said.Reset()
		his = exec.Command("pvmove", "-i", "1", "-n", pooltest.Vol("a").String(), f.group.Devices[from], f.group.Devices[1-from])
		his.Stdout, his.Stderr = &said, &said
		check.OK(t, his.Start())
		ended = make(chan error, 1)
		go func() { ended <- his.Wait() }()
		caught := false
		for deadline := time.Now().Add(5 * time.Second); time.Now().Before(deadline) && len(ended) == 0; {
			if suspended() {
				check.OK(t, his.Process.Signal(syscall.SIGSTOP))
				time.Sleep(50 * time.Millisecond)
				// At the beginning of the move: the table that is loaded is over the mirror, not over a disk.
				if caught = suspended() && !strings.Contains(loaded(), "linear 7:"); caught {
					break
				}
				check.OK(t, his.Process.Signal(syscall.SIGCONT))
			}
		}
		if caught {
			break
		}
		if err := <-ended; err != nil || try == 40 {
			t.Fatalf("pvmove was never stopped with the volume suspended; the last one: %v, %s", err, said.String())
		}
	}
	check.OK(t, syscall.Setpriority(syscall.PRIO_PROCESS, 0, 0))
	t.Logf("stopped: the table that his lvm2 has loaded is %q", loaded())

	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	_, err := f.pool.SetLabels(ctx, pooltest.Vol("a"), func(l map[string]string) error { l["x"] = "y"; return nil })
	says(t, err, context.DeadlineExceeded)
	for deadline := time.Now().Add(8 * time.Second); suspended() && time.Now().Before(deadline); {
		time.Sleep(10 * time.Millisecond)
	}
	if !suspended() {
		t.Errorf("the pool resumed a volume that another lvm2 has suspended, and that has the lock of the group; its loaded table is %q", loaded())
		time.Sleep(30 * time.Second) // the pool's lvm2 is given up, which waits for the lock to refresh the volume
	}

	check.OK(t, his.Process.Signal(syscall.SIGCONT))
	n := 0
	wrote, want := make(chan error), make([]byte, size)
	overdue := time.After(30 * time.Second)
	for over := false; !over; {
		n++
		at := n % (size / pooltest.MiB)
		content := marked(fmt.Sprint("write ", n), pooltest.MiB)
		go func() { wrote <- writeDirect(device.Path, int64(at)*pooltest.MiB, content) }()
		select {
		case err := <-wrote:
			check.OK(t, err)
		case <-overdue:
			t.Errorf("30 s after his lvm2 went on, a write waits: %s", said.String())
			for _, argv := range [][]string{{"dmsetup", "info", "-c", "--noheadings", "-o", "name,open,attr,suspended,tables_loaded"}, {"dmsetup", "table"}} {
				out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput()
				t.Logf("%v: %s %v", argv, out, err)
			}
			names, err := dm.Names(f.group.Device(""))
			check.OK(t, err)
			for _, name := range names {
				if d, err := dm.Find(name); err == nil && d != nil && d.Suspended {
					t.Logf("resuming %s: %v", name, dm.Resume(name, 0))
				}
			}
			overdue = nil
			check.OK(t, <-wrote)
		}
		copy(want[at*pooltest.MiB:], content) // it is acknowledged
		select {
		case err := <-ended:
			t.Logf("pvmove: %v, %s", err, said.String())
			over = true
		default:
			time.Sleep(20 * time.Millisecond)
			if overdue == nil {
				_ = his.Process.Kill()
				over = true
			}
		}
	}
	t.Logf("tables: %s", drivertest.Run(t, "dmsetup", "table"))
	have, err := readDevice(device.Path, 0, size)
	check.OK(t, err)
	for at := 0; at < size; at += pooltest.MiB {
		if !bytes.Equal(have[at:at+16], want[at:at+16]) {
			t.Errorf("an acknowledged write is lost: byte %d has %.16q, and %.16q was written last", at, have[at:at+16], want[at:at+16])
		}
	}
	check.OK(t, device.Close())
	check.OK(t, f.stack(pooltest.Vol("a")).Detach(t.Context()))
	f.holds(pooltest.Vol("a"), 0, want)
}
