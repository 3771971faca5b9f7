// Package sanity runs csi-test's sanity suite over the whole driver, in this process,
// on real loop devices and real filesystems.
package sanity

import (
	"testing"

	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/tests/sanity/suite"
)

func TestSanity(t *testing.T) {
	drivertest.NeedRoot(t)
	suite.Run(t, func() suite.Driver {
		driver := drivertest.Start(t, drivertest.Options{MaxVolumes: 4})
		return suite.Driver{Dir: driver.Dir, Socket: driver.Socket}
	})
}
