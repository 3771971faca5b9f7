package points

import (
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/tests/points/trace"
)

// TestDiskErrors: the disk takes no changes of a record, and says so in one of the ways that disks have: most of a bad block do not say EIO but ENODATA (medium
// error). The volume can be claimed and deleted all the same.
func TestDiskErrors(t *testing.T) {
	drivertest.NeedRoot(t)
	if !trace.CanFail {
		t.Skip("system calls cannot be made to fail on this machine")
	}
	s := newSite(t, copying)
	for _, name := range []string{"ControllerPublishVolume", "DeleteVolume"} {
		sc := scenarios[slices.IndexFunc(scenarios, func(sc scenario) bool { return sc.name == name })]
		for _, errno := range []unix.Errno{unix.EIO, unix.ENODATA, unix.EREMOTEIO, unix.EILSEQ, unix.ETIMEDOUT} {
			t.Run(name+" "+unix.ErrnoName(errno), func(t *testing.T) {
				w := newEnvironment(t, s)
				p := sc.prepare(w)
				failed := 0
				_, err := w.traced(p.call, func(_ int, c trace.Call) trace.Verdict {
					if c.Name != "fdatasync" || !strings.HasSuffix(c.Path, ".rec") {
						return trace.Verdict{}
					}
					failed++
					return trace.Verdict{Fail: errno}
				})
				if failed == 0 || err != nil {
					t.Errorf("%d changes of a record failed; the answer: %v", failed, err)
				}
				w.goOn(p, false, false)
			})
		}
	}
}
