package crash

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/pkg/mount"
)

// When a freeze ends, btrfs reads its superblock. If who ends it is killed meanwhile, it takes the interruption for damage, and is read-only from then on (check_dev_super of fs/btrfs/super.c).

// kernelLog is what the kernel says from some moment on: a descriptor of /dev/kmsg.
type kernelLog int

func openKernelLog() (kernelLog, error) {
	fd, err := unix.Open("/dev/kmsg", unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open the kernel's log: %w", err)
	}
	_, err = unix.Seek(fd, 0, unix.SEEK_END)
	return kernelLog(fd), err
}

func (l kernelLog) close() { _ = unix.Close(int(l)) }

// interrupted reports whether the kernel has said, since it was asked last, that it made the btrfs at a path read-only as the end of a freeze was interrupted.
func (l kernelLog) interrupted(path string) bool {
	at, err := mount.At(path)
	if err != nil {
		return false
	}
	device, err := os.Readlink(fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(at.Device), unix.Minor(at.Device)))
	if err != nil {
		return false
	}
	of, line, found := "(device "+filepath.Base(device)+")", make([]byte, 8192), false
	for {
		n, err := unix.Read(int(l), line)
		if errors.Is(err, unix.EPIPE) || errors.Is(err, unix.EINTR) { // some lines are gone; the next one is there
			continue
		}
		if err != nil || n <= 0 {
			return found
		}
		said := string(line[:n])
		found = found || strings.Contains(said, of) && strings.Contains(said, "in btrfs_unfreeze:") && strings.Contains(said, "errno=-4 ")
	}
}

// rewrite writes over what a volume has. A btrfs that is read-only as the driver was killed while it ended a freeze is staged anew, and has what was synced.
func (v volume) rewrite(ctx context.Context, log kernelLog, before, seed string) error {
	err := v.write(seed)
	if target := v.Target("pod"); errors.Is(err, unix.EROFS) && log.interrupted(target) {
		return co.InTurn(func() error { return v.Unpublish(ctx, target) }, func() error { return v.Unstage(ctx) }, func() error { return v.Stage(ctx) },
			func() error { return v.Publish(ctx, target, false) }, func() error { return v.holds(before) }, func() error { return v.write(seed) })
	}
	return err
}

// thawing is the environment variable with the path that a process of this program is to freeze and thaw.
const thawing = "CRASH_THAW"

// freezeAndThaw freezes a filesystem, says so, and ends that.
func freezeAndThaw(path string) (code int) {
	f, err := os.Open(path)
	if err == nil {
		err = unix.IoctlSetInt(int(f.Fd()), 0xc0045877, 0) // FIFREEZE
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Println("frozen")
	thaw(path)
	return 0
}

// killedThaw freezes a filesystem, and kills who ends that at a moment that nobody chose.
func killedThaw(t *testing.T, path string) {
	t.Helper()
	var complaint bytes.Buffer
	child := exec.Command(os.Args[0])
	child.Env, child.Stderr = append(os.Environ(), thawing+"="+path), &complaint
	out, err := child.StdoutPipe()
	check.OK(t, err)
	check.OK(t, child.Start())
	if _, err := out.Read(make([]byte, 64)); err != nil {
		t.Errorf("freeze %s: %v: %s", path, err, complaint.String())
	}
	time.Sleep(rand.N(400 * time.Microsecond))
	_ = child.Process.Kill()
	_ = child.Wait()
	thaw(path)
}

// TestKilledThaw: a btrfs that is read-only as somebody was killed who ended a freeze is said to be, no other pod gets it to write to, and it can be staged anew, with what was synced.
func TestKilledThaw(t *testing.T) {
	p := build(t)
	p.start()
	l := &lives{patient: p.Patient(), name: "thaw"}
	v, err := l.create(t.Context(), co.Request("source", "btrfs", sizeOf("btrfs")))
	check.OK(t, err)
	check.OK(t, v.up(t.Context()))
	check.OK(t, v.write("first"))
	log, err := openKernelLog()
	check.OK(t, err)
	defer log.close()
	target := v.Target("pod")
	readOnly := func() bool {
		at, err := mount.At(target)
		check.OK(t, err)
		return at.ReadOnly
	}
	for end := time.Now().Add(10 * time.Second); !readOnly() && time.Now().Before(end); {
		killedThaw(t, target)
	}
	if readOnly() {
		if health, err := p.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: v.ID}); err != nil || !strings.Contains(fmt.Sprint(health), "FilesystemReadOnly") {
			t.Errorf("its health: %v, %v", health, err)
		}
		if _, err := p.NodePublishVolume(t.Context(), v.PublishRequest(v.Target("pod")+"-another", false)); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "stage it anew") {
			t.Errorf("another pod: %v", err)
		}
	} else {
		t.Log("this kernel takes no interruption for damage")
	}
	check.OK(t, v.rewrite(t.Context(), log, "first", "second"))
	check.OK(t, v.holds("second"))
	check.OK(t, v.down(t.Context()))
	p.empty()
}
