package lvmpool_test

import (
	"os"
	"strings"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
)

// TestLVMHistory: lvm.conf has lvm2 remember removed thin volumes (metadata/record_lvs_history). A volume that was deleted is made again all the same.
func TestLVMHistory(t *testing.T) {
	f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 256*pooltest.MiB), thin: true}
	f.url = f.group.ThinPool(t, "tp", "-L", "64M", "--poolmetadatasize", "4M") + "?reservePercent=0"
	conf := os.Getenv("LVM_SYSTEM_DIR") + "/lvm.conf"
	text, err := os.ReadFile(conf)
	check.OK(t, err)
	check.OK(t, os.WriteFile(conf, []byte(strings.TrimSpace(string(text))+"\nmetadata { record_lvs_history=1 }\n"), 0o600))
	f.start()
	for range 2 {
		f.make(pooltest.Vol("a"), 8*pooltest.MiB)
		f.copy(pooltest.Snap("a"), pooltest.Vol("a"), 8*pooltest.MiB)
		check.OK(t, f.pool.Delete(t.Context(), pooltest.Snap("a")))
		f.copy(pooltest.Snap("a"), pooltest.Vol("a"), 8*pooltest.MiB)
		f.copy(pooltest.Vol("b"), pooltest.Snap("a"), 8*pooltest.MiB)
		check.OK(t, f.pool.Delete(t.Context(), pooltest.Snap("a")))
		t.Logf("lvm2 has %s", drivertest.Run(t, "lvs", "-H", "-a", "--noheadings", "-o", "lv_name", f.group.Name))
		f.copy(pooltest.Snap("a"), pooltest.Vol("a"), 8*pooltest.MiB)
		check.OK(t, f.pool.Delete(t.Context(), pooltest.Vol("b")))
		check.OK(t, f.pool.Delete(t.Context(), pooltest.Vol("a")))
		check.OK(t, f.pool.Delete(t.Context(), pooltest.Snap("a")))
		t.Logf("lvm2 has %s", drivertest.Run(t, "lvs", "-H", "-a", "--noheadings", "-o", "lv_name", f.group.Name))
	}
}
