package volume_test

import (
	"testing"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/volume/storetest"
)

// TestStore: Local passes the suite for every Store.
func TestStore(t *testing.T) {
	storetest.Run(t, func(t testing.TB) storetest.Fixture {
		disk := memory.NewDisk(storetest.Size)
		l := start(t, storetest.Limit, disk.Open("default", nil), memory.NewDisk(storetest.Size).Open("b", nil))
		return storetest.Fixture{Store: l, Node: node, Pools: []string{"default", "b"}, Write: storetest.WriteTo(disk.Open("default", nil))}
	})
}
