package points

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/tests/points/trace"
)

var fullFaults = flag.Bool("faults.full", os.Getenv("FAULTS") == "all", "all faults of all calls, not a sample (FAULTS=all does it too)")

// answers are the codes that are right for an error (the table of pkg/rpc): a call that
// was only interrupted goes on.
var answers = map[unix.Errno]codes.Code{
	unix.EIO: codes.Internal, unix.ENOSPC: codes.ResourceExhausted, unix.EINTR: codes.OK, unix.EROFS: codes.Unavailable,
	unix.EMFILE: codes.Unavailable, unix.ENOMEM: codes.Unavailable, unix.EBUSY: codes.FailedPrecondition,
}

// steps are words of which the answer has one, to say what it was that failed.
var steps = map[string][]string{
	"openat O_CREAT": {"open", "record", "image", "target"}, "write": {"write"}, "pwrite64": {"write"}, "copy_file_range": {"copy"},
	"fsync": {"sync", "flush"}, "fdatasync": {"sync"}, "ftruncate": {"size of the image", "truncate"}, "fallocate": {"allocate"},
	"unlinkat": {"remove", "unlink"}, "mkdirat": {"make target", "mkdir"}, "execve": {"mkfs", "e2fsck", "resize2fs", "user namespace", "cryptsetup"},
	"fsopen": {"fsopen"}, "fsconfig CREATE": {"open the filesystem"}, "fsmount": {"fsmount"}, "open_tree": {"open_tree"},
	"mount_setattr": {"mount_setattr"}, "move_mount": {"attach"}, "umount2": {"unmount"},
	"ioctl LOOP_CTL_GET_FREE": {"find a free loop device"}, "ioctl LOOP_CONFIGURE": {"configure"}, "ioctl LOOP_CLR_FD": {"detach"},
	"ioctl LOOP_SET_CAPACITY": {"resize"}, "ioctl BLKROSET": {"set the mode"}, "ioctl FICLONE": {"clone"},
	"ioctl FIFREEZE": {"freeze"}, "ioctl FITHAW": {"thaw"}, "ioctl XFS_IOC_FSGROWFSDATA": {"grow"},
	"ioctl BTRFS_IOC_FORGET_DEV": {"forget"}, "ioctl BLKZEROOUT": {"zero"}, "ioctl DM_DEV_CREATE": {"make device"}, "ioctl DM_DEV_REMOVE": {"remove device"},
	"ioctl DM_DEV_SUSPEND": {"suspend device", "resume device", "load the table"}, "ioctl DM_TABLE_LOAD": {"load the table"},
	"ioctl DM_TABLE_CLEAR": {"clear the loaded table"}, "mknodat": {"mknod"},
}

// TestFaults: for each call that changes something, and for each system call of it, have
// that fail, and look at the answer. Without a restart, the call is made again, or
// given up, as in TestPoints.
func TestFaults(t *testing.T) {
	drivertest.NeedRoot(t)
	if !trace.CanFail {
		t.Skip("system calls cannot be made to fail on this machine")
	}
	_, err := program()
	check.OK(t, err)
	if !*fullFaults {
		fmt.Printf("faults: a sample; -points.seed=%d has the same again, -faults.full has all\n", today())
	}
	sites := map[string]*site{copying: newSite(t, copying), sharing: newSite(t, sharing)}
	for _, s := range scenarios {
		t.Run(s.name, func(t *testing.T) {
			begin, count, random := time.Now(), 0, draw(t)
			o := untouched(t, sites[s.fs], s)
			calls, undoable := o.calls, o.undoable
			try := func(n int, errno unix.Errno, giveUp bool) {
				count++
				name := fmt.Sprintf("%d %s give-up=%v", n, unix.ErrnoName(errno), giveUp)
				attempt(t, name, fmt.Sprint("-faults.full=", *fullFaults), func(t *testing.T) { fault(t, sites[s.fs], s, n, errno, giveUp) })
			}
			if *fullFaults {
				for n := 1; n <= len(calls); n++ {
					errnos := calls[n-1].Errors()
					if trace.Alike(calls, n-1) && len(errnos) > 0 {
						// The next one tries the next error.
						try(n, errnos[n%len(errnos)], undoable && n%2 == 0)
						continue
					}
					for _, errno := range errnos {
						try(n, errno, false)
						if undoable {
							try(n, errno, true)
						}
					}
				}
			} else {
				for _, giveUp := range []bool{false, undoable} {
					n := 1 + random.IntN(len(calls))
					if errnos := calls[n-1].Errors(); len(errnos) > 0 {
						try(n, errnos[random.IntN(len(errnos))], giveUp)
					}
				}
			}
			fmt.Printf("faults: %-42s %3d points, %3d faults, %5.1f s\n", s.name, len(calls), count, time.Since(begin).Seconds())
		})
	}
}

// fault makes the n-th system call of a call fail, or, without an error, kills the child that
// makes it.
func fault(t *testing.T, s *site, sc scenario, n int, errno unix.Errno, giveUp bool) {
	w := newEnvironment(t, s)
	p := sc.prepare(w)
	var at trace.Call
	_, err := w.traced(p.call, func(i int, c trace.Call) trace.Verdict {
		if i != n || errno == 0 && !c.Child || errno != 0 && !slices.Contains(c.Errors(), errno) {
			return trace.Verdict{}
		}
		at = c
		return trace.Verdict{Fail: errno, Die: errno == 0}
	})
	t.Logf("%d: %s failed with %q; the answer: %v", n, at, unix.ErrnoName(errno), err)
	s.answered(t, at, errno, err)
	if w.gone() {
		t.Fatal("the driver is gone")
	}
	w.goOn(p, giveUp, false)
}

// answered makes sure that the answer to a call is right.
func (s *site) answered(t *testing.T, at trace.Call, errno unix.Errno, err error) {
	t.Helper()
	code, want := status.Code(err), answers[errno]
	words := steps[at.Name]
	if at.Child { // what a program makes of it is its own affair; and mostly it says why
		want, words = codes.Internal, []string{"mkfs", "e2fsck", "resize2fs", "user namespace", "lvm", "cryptsetup"}
		switch {
		case at.Exec && filepath.Base(at.Path) != "thin_check", code == codes.Unavailable && err != nil && strings.Contains(err.Error(), "lvm"):
			want = codes.Unavailable
		case code == codes.DataLoss && err != nil && strings.Contains(err.Error(), "e2fsck"):
			want = code // it could not repair what it could not write
		}
	}
	if at.Name == "ioctl FIFREEZE" && errno == unix.EIO { // the filesystem has stopped, and there is nothing whole to copy
		want = codes.FailedPrecondition
	}
	if want == codes.ResourceExhausted && err != nil && strings.Contains(err.Error(), "there is no room for it now") { // a growth: less may be asked for then
		want = codes.OutOfRange
	}
	if at.Name == "fsync" && s.below(at.Path) { // a call that did all, and does not know whether it stays
		want = codes.Unavailable
	}
	if at.Name == "" || err == nil {
		return // it was got around, or did not matter
	}
	if code != want {
		t.Errorf("%s: %s, answered as %s, not %s", at, unix.ErrnoName(errno), code, want)
	}
	if !slices.ContainsFunc(words, func(word string) bool { return strings.Contains(err.Error(), word) }) {
		t.Errorf("the answer names none of %q", words)
	}
}
