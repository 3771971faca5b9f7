package mirror

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// requireStableWrites sets stable_writes of the legs, so that a filesystem over the mirror changes no page while it is written: each leg reads the page at
// another moment, and they would differ. The mirror takes the setting over from its legs. A program that changes its own memory during a direct write is not
// kept from it. Kernels before 5.10 have no such setting.
func requireStableWrites(legs []uint64) error {
	for _, leg := range legs {
		err := os.WriteFile(dm.Sysfs(leg)+"/queue/stable_writes", []byte("1"), 0)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("have leg %s keep what is being written as it is: %w", dm.Number(leg), errdefs.FromErrno(err))
		}
	}
	return nil
}
