package lvmpool_test

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// TestLVMSector: what comes from a disk of smaller sectors is refused before it is made, and not after all of it was overwritten with zeros: it is tried again
// and again.
func TestLVMSector(t *testing.T) {
	drivertest.NeedLVM(t)
	image := filepath.Join(drivertest.Dir(t), "disk")
	check.OK(t, os.WriteFile(image, nil, 0o600))
	check.OK(t, os.Truncate(image, 512*pooltest.MiB))
	disk := drivertest.Loop(t, image, "--sector-size=4096")
	t.Cleanup(func() { drivertest.Run(t, "losetup", "-d", disk) })
	f := &lvmFixture{T: t, group: drivertest.NewGroupOn(t, disk)}
	f.url = f.group.URL() + "?reservePercent=0"
	f.start()
	written := func() int64 { // as Documentation/block/stat.rst has it
		text, err := os.ReadFile("/sys/block/" + filepath.Base(disk) + "/stat")
		check.OK(t, err)
		sectors, err := strconv.ParseInt(strings.Fields(string(text))[6], 10, 64)
		check.OK(t, err)
		return sectors * 512
	}
	spec := blockdev.Spec{Ref: pooltest.Vol("a"), Name: "a", Size: 256 * pooltest.MiB, Sector: 512}
	before := written()
	_, err := f.pool.Create(t.Context(), spec)
	says(t, err, errdefs.ErrUnsupported, "4096", "512")
	if n := written() - before; n > 64*pooltest.MiB {
		t.Errorf("%d bytes were written for nothing", n)
	}
	if all := f.all(); len(all) > 0 {
		t.Errorf("there is %v", all)
	}
	for _, sector := range []int64{0, 4096} {
		spec.Sector = sector
		check.OK(t, pooltest.Second(f.pool.Create(t.Context(), spec)))
		check.OK(t, f.pool.Delete(t.Context(), spec.Ref))
	}
}
