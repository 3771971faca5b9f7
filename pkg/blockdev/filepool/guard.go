package filepool

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/internal/ioctl"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/loop"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// guard keeps a loop device that somebody else is given, where there is no device mapper. (With one, a device over it passes no such ioctl down:
// pkg/device.) Whoever has a block device open can call its ioctls. On a loop device LOOP_CLR_FD, for which any descriptor will do, takes the file away,
// and then the number goes to the next volume, which whoever has the old node then reads. LOOP_SET_STATUS64, LOOP_SET_BLOCK_SIZE and others need a
// descriptor that can write.
//
// The guard is a second loop device over the first, the keeper, of which nobody else has a node. While it has the first one open, LOOP_CLR_FD only marks
// that as one that goes with its last user, which it is anyway. What else can be changed of a loop device (offset, size, sector, name) harms only whoever
// does it, and is undone when the device is handed out again. LOOP_CHANGE_FD cannot change the file of a device that can be written to.
//
// The loop device below goes with its last user (LO_FLAGS_AUTOCLEAR), and so with its guard.
type guard struct {
	keeper int    // number of the loop device over it, or none
	sector uint32 // the keeper's, in bytes: what the device below it had when it was made
}

// none stands for no loop device.
const none = -1

// keeperLimit is how much a keeper shows of the device below it, in bytes: too little to be taken for a filesystem.
const keeperLimit = 4096

// topPrefix and topUUID begin the name and the UUID of the device of the device mapper over an object; the object's label follows. lvm2 reads no device
// whose UUID is that of a part of a logical volume: LVM- and more than 64 characters.
const (
	topPrefix = "ashlar-"
	topUUID   = "LVM-NOT-OF-LVM-BUT-OF-THE-DRIVER-ASHLAR-"
)

// Top: see blockdev.Stackable. Nobody but root can give a device that name.
func (p *pool) Top(ref blockdev.Ref) (name, uuid, before string, err error) {
	label := p.label(ref)
	return topPrefix + label, topUUID + label, strings.ToUpper(topPrefix) + label, nil
}

// ParseTop: see blockdev.Stackable.
func (p *pool) ParseTop(name string) (blockdev.Ref, bool) {
	label, ours := strings.CutPrefix(name, topPrefix)
	if !ours {
		return blockdev.Ref{}, false
	}
	return p.parseLabel(label)
}

// IsTop reports whether a device of the device mapper is, by its name, the top of an object of some file pool.
func IsTop(name string) bool {
	label, ours := strings.CutPrefix(name, topPrefix)
	if ours {
		_, _, ours = cutLast(label)
	}
	return ours
}

// protect gives an open loop device a guard, if it has none; else it restores its settings.
func (p *pool) protect(ctx context.Context, ref blockdev.Ref, l *attachedLoop) error {
	if l.keeper != none {
		return p.restoreSettings(ref, *l)
	}
	return p.keep(ctx, ref, l)
}

// keep puts a keeper over an open loop device.
func (p *pool) keep(ctx context.Context, ref blockdev.Ref, l *attachedLoop) error {
	sector, err := sectorSize(l.file)
	if err != nil {
		return err
	}
	file, n, err := loop.Attach(ctx, l.file, loop.Config{Label: p.label(ref), ReadOnly: true, Discards: true, Sector: sector, Limit: keeperLimit})
	if err != nil {
		return err
	}
	defer file.Close()
	status, err := loop.Status(file, n)
	if err != nil {
		return fmt.Errorf("status of %s: %w", loop.Path(n), errdefs.FromErrno(err))
	}
	p.noteLoop(ref, status)
	l.keeper, l.sector = n, sector
	return nil
}

// unguard removes the guard of a loop device, which then goes with its last user.
func unguard(ctx context.Context, l attachedLoop) error {
	if l.keeper == none {
		return nil
	}
	if _, err := ioctl.Value(l.file, unix.LOOP_CLR_FD, 0); err != nil && !errors.Is(err, unix.ENXIO) {
		return fmt.Errorf("detach %s: %w", loop.Path(l.Number), errdefs.FromErrno(err))
	}
	keeper, err := loop.Open(l.keeper, os.O_RDONLY)
	if loop.Going(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open %s: %w", loop.Path(l.keeper), errdefs.FromErrno(err))
	}
	status, err := loop.Status(keeper, l.keeper)
	if err != nil || status.Node != l.node() { // gone meanwhile
		return keeper.Close()
	}
	return loop.Detach(ctx, keeper, status)
}

// changed returns which settings of a loop device differ from those that it was made with.
func (l attachedLoop) changed() []string {
	if l.keeper == none {
		return nil // nobody else was given it, or an older driver made it
	}
	var what []string
	if l.Offset != 0 || l.SizeLimit != 0 {
		what = append(what, fmt.Sprintf("it shows its image from byte %d on, %d bytes of it (0: all)", l.Offset, l.SizeLimit))
	}
	if sector, err := sectorSize(l.file); err == nil && sector != l.sector {
		what = append(what, fmt.Sprintf("its sectors have %d bytes, not %d", sector, l.sector))
	}
	if l.Flags&unix.LO_FLAGS_PARTSCAN != 0 {
		what = append(what, "the kernel looks for partitions on it")
	}
	return what
}

// restoreSettings undoes what whoever was given a loop device changed of its settings. The scan for partitions cannot be undone while the device is there.
func (p *pool) restoreSettings(ref blockdev.Ref, l attachedLoop) error {
	if l.keeper == none {
		return nil
	}
	fail := func(err error) error {
		return fmt.Errorf("put right what was done to %s: %w", loop.Path(l.Number), errdefs.FromErrno(err))
	}
	if l.Offset != 0 || l.SizeLimit != 0 || l.Stays() || l.Label != p.label(ref) {
		info := unix.LoopInfo64{Flags: unix.LO_FLAGS_AUTOCLEAR}
		copy(info.File_name[:], p.label(ref))
		if err := ioctl.Pointer(l.file, unix.LOOP_SET_STATUS64, unsafe.Pointer(&info)); err != nil {
			return fail(err)
		}
	}
	sector, err := sectorSize(l.file)
	if err == nil && sector != l.sector {
		_, err = ioctl.Value(l.file, unix.LOOP_SET_BLOCK_SIZE, uintptr(l.sector))
	}
	if err != nil {
		return fail(err)
	}
	if l.Flags&unix.LO_FLAGS_DIRECT_IO == 0 {
		_, _ = ioctl.Value(l.file, unix.LOOP_SET_DIRECT_IO, 1) // not all filesystems have it
	}
	if p.takesDiscards() {
		return nil
	}
	return loop.StopDiscards(l.Number) // some kernels switch them on again with the sector
}

// recoverGuards gives devices that are kept their guards, when the pool is opened: those of an older driver have none. A failure is logged, and the next
// attach tries again.
func (p *pool) recoverGuards(ctx context.Context) {
	for _, ref := range slices.Collect(maps.Keys(p.loops)) {
		loops, err := p.openLoops(ref)
		for i := range loops {
			if loops[i].kept() && !loops[i].ReadOnly() {
				err = errors.Join(err, p.protect(ctx, ref, &loops[i]))
			}
		}
		closeLoops(loops)
		if err != nil {
			klog.FromContext(ctx).Error(err, "could not protect a device that is handed out; the next attach tries again", "pool", p.name, "object", ref.String())
		}
	}
}
