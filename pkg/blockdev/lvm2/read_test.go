package lvm2_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/command"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lvm2"
)

// TestReadsNoVolume: a tenant writes a physical volume into a raw volume: of a group with the name of ours, or the head of our disk. lvm2 reads our disk alone, and changes
// our group, also if the volume comes and goes while the shell runs. It needs no device mapper.
func TestReadsNoVolume(t *testing.T) {
	drivertest.NeedRoot(t)
	if _, err := command.Find("lvm"); err != nil {
		t.Skip("lvm2 is not installed")
	}
	const size = 64 << 20
	disk := drivertest.Disk(t, size)
	image := filepath.Join(drivertest.Dir(t), "volumes", strings.Repeat("0123456789abcdef", 2)+".img")
	check.OK(t, os.Mkdir(filepath.Dir(image), 0o700))
	check.OK(t, os.WriteFile(image, nil, 0o600))
	check.OK(t, os.Truncate(image, size))
	group := fmt.Sprint("ashlar-read-", os.Getpid())
	made := func(device string) {
		t.Run("made", func(t *testing.T) {
			drivertest.SetUpLVM(t, `"a|^`+device+`$|"`)
			drivertest.Run(t, "vgcreate", "-q", group, device)
		})
	}
	made(disk)
	drivertest.SetUpLVM(t, `"a|^/dev/loop|"`) // the driver takes the other filter
	l := lvm2.New("lvm", func(lvm2.Run) { t.Error("recovered") }, func() error { return nil })
	t.Cleanup(l.Close)
	reads := func(what string) {
		t.Helper()
		rows, err := l.Run(t.Context(), "pvs", "-o", "pv_name,vg_name")
		check.OK(t, err)
		for _, r := range rows {
			if r["vg_name"] == group && r["pv_name"] != disk {
				t.Errorf("%s: lvm2 reads %v", what, r)
			}
		}
		for _, change := range []string{"--addtag", "--deltag"} {
			if _, err := l.Run(t.Context(), "vgchange", change, "x", group); err != nil {
				t.Errorf("%s: %v", what, err)
			}
		}
	}
	reads("without a volume")
	for what, written := range map[string]func(raw string){
		"a group of that name": made,
		"the head of the disk": func(raw string) {
			head := make([]byte, 1<<20)
			from, err := os.Open(disk)
			check.OK(t, err)
			_, err = from.ReadAt(head, 0)
			check.OK(t, err)
			check.OK(t, from.Close())
			check.OK(t, os.WriteFile(raw, head, 0))
		},
	} {
		raw := drivertest.Run(t, "losetup", "-f", "--show", image)
		written(raw)
		reads(what)
		check.OK(t, os.WriteFile(raw, make([]byte, 2<<20), 0))
		drivertest.Run(t, "losetup", "-d", raw)
		reads("after " + what)
	}
}
