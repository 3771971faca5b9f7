package pools

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/internal/ioctl"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/named"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/loop"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Owner returns the object of a device, by what the kernel has of it: the name of the backing file of a loop device, or the name of a device of the device
// mapper. It needs no pool. It is no proof: the name does not say which pool the object is in, and pools know their devices better. It is for undoing what
// was done with a device when its pool cannot be asked.
func Owner(number uint64) (blockdev.Ref, bool) {
	dir := fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(number), unix.Minor(number))
	if name, err := os.ReadFile(dir + "/dm/name"); err == nil {
		kind, key, ok := named.Mapped(strings.TrimSpace(string(name)))
		return blockdev.Ref{Kind: blockdev.Kind(kind), Key: key}, ok
	}
	backing, err := os.ReadFile(dir + "/loop/backing_file")
	if err != nil {
		return blockdev.Ref{}, false
	}
	ref := filepool.ImageAt(string(backing))
	return ref, ref.Validate() == nil
}

// DetachWithoutPool removes the device of a raw volume of a file pool, with its guard, when its pool cannot be asked. It cannot wait for the pool, as the
// device keeps the pool's filesystem from being unmounted and repaired. The caller has made sure whose device it is, and that it is mounted nowhere any
// more. Whoever has it open keeps it until he closes it. Devices of LVM pools stay: they hold up nothing.
func DetachWithoutPool(ctx context.Context, number uint64) error {
	name, err := os.ReadFile(fmt.Sprintf("/sys/dev/block/%d:%d/dm/name", unix.Major(number), unix.Minor(number)))
	if err == nil {
		if top := strings.TrimSpace(string(name)); filepool.IsTop(top) {
			_, err = dm.Remove(top)
		}
		return err
	}
	if unix.Major(number) != loop.Major {
		return nil
	}
	device := int(unix.Minor(number))
	f, err := loop.Open(device, os.O_RDONLY) // while it is open, its number goes to no other device
	if loop.Going(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open %s: %w", loop.Path(device), errdefs.FromErrno(err))
	}
	defer f.Close()
	if err := detachKeepers(ctx, device, number); err != nil {
		return fmt.Errorf("detach what holds %s: %w", loop.Path(device), err)
	}
	if err := f.Sync(); err != nil { // see loop.Detach; what a dead disk does not take is lost anyway
		klog.FromContext(ctx).Error(err, "Could not write out what was written to a raw device; detaching it all the same", "device", loop.Path(device))
	}
	// The status of a device whose file is on a dead disk cannot be read, so it is not.
	if _, err := ioctl.Value(f, unix.LOOP_CLR_FD, 0); err != nil && !errors.Is(err, unix.ENXIO) {
		return fmt.Errorf("detach %s: %w", loop.Path(device), errdefs.FromErrno(err))
	}
	return nil
}

// detachKeepers removes the loop devices over a loop device.
func detachKeepers(ctx context.Context, device int, number uint64) error {
	numbers, err := loop.Configured()
	if err != nil {
		return err
	}
	for _, n := range numbers {
		if name, _, err := loop.BackingName(n); err != nil || filepath.Base(name) != filepath.Base(loop.Path(device)) {
			continue
		}
		f, err := loop.Open(n, os.O_RDONLY)
		if loop.Going(err) {
			continue
		}
		if err != nil {
			return errdefs.FromErrno(err)
		}
		status, err := loop.Status(f, n)
		if err != nil || status.Node != number { // it is over another one by now
			err = f.Close()
		} else {
			err = loop.Detach(ctx, f, status)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
