package life

import (
	"errors"
	"os/exec"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
)

// TestRunbookFilesystem: a volume that is not staged, as its filesystem is damaged beyond what is repaired by itself, is repaired in its image
// as docs/runbooks/filesystem.md says, and staged again, with its data. (An ext4 has copies of its superblock from 128 MiB on.)
func TestRunbookFilesystem(t *testing.T) {
	d := start(t, drivertest.Options{})
	for kind, mend := range map[string][]string{"ext4": {"e2fsck", "-f", "-y", "-b", "32768"}, "xfs": {"xfs_repair", "-f"}} {
		t.Run(kind, func(t *testing.T) {
			d := d.in(t)
			v := d.made(co.Request(kind, kind, 320*miB))
			target := v.running()
			write(t, v.File(target), 1)
			check.OK(t, v.unpublish(target))
			check.OK(t, v.unstage())
			noise := strings.Repeat("\x5a\xa5noise!", 128)
			if kind == "ext4" { // all of the superblock but what says which filesystem it is
				put(t, v.image(), 1024, noise[:56])
				put(t, v.image(), 1024+60, noise[60:])
			} else {
				put(t, v.image(), 4, noise[:508])
			}
			check.Code(t, v.stage(), codes.DataLoss, kind, "nothing was mounted")
			repair(t, append(mend, v.image())...)
			check.OK(t, v.stage())
			check.OK(t, v.publish(target, false))
			holds(t, v.File(target), 1)
			expect(t, v.problems())
			check.OK(t, v.down(target))
		})
	}
	d.nothingLeft()
}

// repair runs a program that repairs a filesystem. e2fsck ends with 1 when it has.
func repair(t *testing.T, argv ...string) {
	t.Helper()
	out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput()
	var ended *exec.ExitError
	if err != nil && !(errors.As(err, &ended) && ended.ExitCode() == 1 && argv[0] == "e2fsck") {
		t.Fatalf("%v: %v\n%s", argv, err, out)
	}
}
