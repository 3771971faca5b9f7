// Package sanity runs csi-test's sanity suite over the whole driver, in this process,
// on real loop devices and real filesystems.
package sanity

import (
	"os"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/tests/sanity/suite"
)

// TestSanity runs the suite over a file pool, or with ASHLAR_LVM=1 over LVM pools of both
// kinds (make test-lvm).
func TestSanity(t *testing.T) {
	drivertest.NeedRoot(t)
	kinds := []string{"file"}
	if os.Getenv("ASHLAR_LVM") == "1" {
		kinds = []string{"linear", "thin"}
	}
	suite.Run(t, kinds, func(kind string) suite.Driver {
		driver := drivertest.Start(t, drivertest.Options{MaxVolumes: 4, Pools: pools(t, kind)})
		return suite.Driver{Dir: driver.Dir, Socket: driver.Socket}
	})
}

// pools of a new driver; nil for its file pool.
func pools(t *testing.T, kind string) []string {
	if kind == "file" {
		return nil
	}
	group := drivertest.NewGroup(t, 2<<30)
	if kind == "thin" {
		return []string{"default=" + group.ThinPool(t, "tp", "-L", "1G", "--poolmetadatasize", "16M")}
	}
	return []string{"default=" + group.URL()}
}
