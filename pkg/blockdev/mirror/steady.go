package mirror

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// steady has nobody change what is being written to a leg: each leg takes its bytes out of the same memory at another moment, and would have others. Filesystems over the mirror wait with changing a page until it is written then, as
// the mirror is as its legs are. What a program changes itself while it writes it past the page cache is its own affair. Kernels without the setting (before 5.10) do without.
func steady(legs []uint64) error {
	for _, leg := range legs {
		err := os.WriteFile("/sys/dev/block/"+dm.Number(leg)+"/queue/stable_writes", []byte("1"), 0)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("have leg %s keep what is being written as it is: %w", dm.Number(leg), errdefs.FromErrno(err))
		}
	}
	return nil
}
