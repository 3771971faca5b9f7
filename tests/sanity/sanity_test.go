// Package sanity runs csi-test's sanity suite over the whole driver, in this process,
// on real devices and real filesystems.
package sanity

import (
	"testing"

	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/tests/sanity/suite"
)

func TestSanity(t *testing.T) {
	drivertest.NeedRoot(t)
	suite.Run(t, suite.Kinds(), func(kind string) suite.Driver {
		dir := drivertest.Dir(t)
		driver := drivertest.Start(t, drivertest.Options{Dir: dir, MaxVolumes: 4, Pools: []string{"default=" + suite.PoolURL(t, kind, dir)}})
		return suite.Driver{Dir: driver.Dir, Socket: driver.Socket}
	})
}
