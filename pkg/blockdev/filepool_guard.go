package blockdev

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/internal/ioctl"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Who has a block device has its ioctls. Of a loop device LOOP_CLR_FD takes the file away and
// asks for no right at all; LOOP_SET_STATUS64, LOOP_SET_BLOCK_SIZE and others only want a
// descriptor that can write. A number that is free goes to the next volume, which whoever has
// the old node then reads. So a device that is kept for somebody else has a guard:
//
// With a device mapper, that is a device over the loop device, handed out in its place, which
// passes none of these ioctls down (dmShow). It is named by the pool's folder and the object, and
// nobody but root can change that.
//
// Without, it is a second loop device over the first (the keeper), which nobody else has a node
// of. While it has the first one open, LOOP_CLR_FD only sets the mark that the device goes with
// its last user, and that mark it has anyway. What else can be changed of a loop device
// (offset, size, sector, name) harms only whoever did it, and is put right when the device is
// handed out again. A device that can be written to keeps its backing file: LOOP_CHANGE_FD wants one that cannot.
//
// The loop device below is to go with its last user (LO_FLAGS_AUTOCLEAR): it goes when its guard
// does.
type guard struct {
	cover  *dmDevice // handed out in the place of the loop device, or nil
	keeper int       // number of the loop device that holds it, or none
	sector uint32    // of the keeper, which has that of the device below it from the beginning; bytes
}

// none is no number of a loop device.
const none = -1

func (g guard) guarded() bool { return g.cover != nil || g.keeper != none }

// leaving tells whether a device goes away as soon as nobody has it open any more.
func (g guard) leaving() bool { return g.cover != nil && g.cover.deferred }

// keeperLimit is what a keeper shows of the device below it, in bytes: nothing that could be
// taken for a filesystem.
const keeperLimit = 4096

// coverName is the name of the device over the loop device of an object.
func (p *filePool) coverName(ref Ref) string { return coverPrefix + p.label(ref) }

const coverPrefix = "ashlar-"

// findCover finds the device over one of an object's loop devices.
func (p *filePool) findCover(ref Ref, loops []attachedLoop) error {
	p.mu.Lock()
	covered := p.covered[ref]
	p.mu.Unlock()
	if !covered || len(loops) == 0 {
		return nil
	}
	d, err := dmFind(p.coverName(ref))
	if err != nil || d == nil || !d.live {
		return err
	}
	below, err := dmBelow(d.name)
	if vanished(err) {
		return nil
	}
	if err != nil {
		return err
	}
	for i := range loops {
		if slices.Contains(below, loops[i].node()) {
			loops[i].cover = d
		}
	}
	return nil
}

// protect gives an open loop device its guard, if it has none, and puts right what whoever had it
// did to it.
func (p *filePool) protect(ctx context.Context, ref Ref, loop *attachedLoop) error {
	if loop.guarded() {
		return p.putRight(ref, *loop)
	}
	// One that stays by itself was handed out by a driver that gave no guards. It is in use.
	if !p.mapper || loop.stays() {
		return p.keep(ctx, ref, loop)
	}
	size, err := deviceSize(loop.file)
	if err != nil {
		return err
	}
	name := p.coverName(ref)
	p.cover(ref)
	if err := dmLinear(name, strings.ToUpper(coverPrefix)+p.label(ref), loop.node(), size, false); err != nil {
		return err
	}
	if loop.cover, err = dmFind(name); err == nil && loop.cover == nil {
		err = fmt.Errorf("%w: device %s is gone again", errdefs.ErrUnavailable, name)
	}
	if err != nil {
		return err
	}
	node, err := openDM(loop.cover, os.O_RDONLY) // there is a node then
	if err != nil {
		return fmt.Errorf("open %s: %w", loop.cover.path(), err)
	}
	return node.Close()
}

// cover notes that there may be a device over the loop device of an object.
func (p *filePool) cover(ref Ref) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.covered[ref] = true
}

// keep puts a keeper over an open loop device.
func (p *filePool) keep(ctx context.Context, ref Ref, loop *attachedLoop) error {
	sector, err := sectorSize(loop.file)
	if err != nil {
		return err
	}
	file, n, err := attachLoop(ctx, loop.file, loopConfig{label: p.label(ref), readOnly: true, discards: true, sector: sector, limit: keeperLimit})
	if err != nil {
		return err
	}
	defer file.Close()
	status, err := loopStatus(file, n)
	if err != nil {
		return fmt.Errorf("status of %s: %w", loopPath(n), errdefs.FromErrno(err))
	}
	p.know(ref, status)
	loop.keeper, loop.sector = n, sector
	return nil
}

// unguard takes the guard of a loop device away, so that the device goes with its last user.
func (p *filePool) unguard(ctx context.Context, ref Ref, loop attachedLoop) error {
	if loop.cover != nil {
		return p.uncover(ctx, ref)
	}
	if loop.keeper == none {
		return nil
	}
	if _, err := ioctl.Value(loop.file, unix.LOOP_CLR_FD, 0); err != nil && !errors.Is(err, unix.ENXIO) {
		return fmt.Errorf("detach %s: %w", loopPath(loop.number), errdefs.FromErrno(err))
	}
	keeper, err := openLoop(loop.keeper, os.O_RDONLY)
	if goingLoop(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open %s: %w", loopPath(loop.keeper), errdefs.FromErrno(err))
	}
	status, err := loopStatus(keeper, loop.keeper)
	if err != nil || status.node != loop.node() { // gone meanwhile
		return keeper.Close()
	}
	return detachLoop(ctx, keeper, status)
}

// uncover removes the device over a loop device. One that is held open goes with its last user.
func (p *filePool) uncover(ctx context.Context, ref Ref) error {
	name := p.coverName(ref)
	held, err := dmRemove(name)
	for try := 0; err == nil && held; try++ {
		var d *dmDevice
		if d, err = dmFind(name); err != nil || d == nil {
			break
		}
		if try == heldTries || ctx.Err() != nil {
			return fmt.Errorf("%w: %s is held open by a process or a mount; it goes away with its last user", errdefs.ErrInUse, d.path())
		}
		time.Sleep(heldPause)
	}
	return err
}

// resizeCover brings the device over a loop device to the size of that.
func (p *filePool) resizeCover(ref Ref, loop attachedLoop) error {
	if loop.cover == nil {
		return nil
	}
	size, err := deviceSize(loop.file)
	if err != nil {
		return err
	}
	above, err := openDM(loop.cover, os.O_RDONLY)
	if vanished(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open %s: %w", loop.cover.path(), err)
	}
	defer above.Close()
	have, err := deviceSize(above)
	if err != nil || have == size {
		return err
	}
	return dmLinear(p.coverName(ref), "", loop.node(), size, false)
}

// changed says what is not as it was when a loop device was made.
func (l attachedLoop) changed() []string {
	if l.keeper == none {
		return nil // in nobody's hands, or made by a driver that did not care
	}
	var what []string
	if l.offset != 0 || l.sizeLimit != 0 {
		what = append(what, fmt.Sprintf("it shows its image from byte %d on, %d bytes of it (0: all)", l.offset, l.sizeLimit))
	}
	if sector, err := sectorSize(l.file); err == nil && sector != l.sector {
		what = append(what, fmt.Sprintf("its sectors have %d bytes, not %d", sector, l.sector))
	}
	if l.flags&unix.LO_FLAGS_PARTSCAN != 0 {
		what = append(what, "the kernel looks for partitions on it")
	}
	return what
}

// putRight undoes what whoever had a loop device in his hands did to it. That the kernel looks for
// partitions cannot be undone while the device is there.
func (p *filePool) putRight(ref Ref, l attachedLoop) error {
	if l.keeper == none {
		return nil
	}
	fail := func(err error) error {
		return fmt.Errorf("put right what was done to %s: %w", loopPath(l.number), errdefs.FromErrno(err))
	}
	if l.offset != 0 || l.sizeLimit != 0 || l.stays() || l.label != p.label(ref) {
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
	if l.flags&unix.LO_FLAGS_DIRECT_IO == 0 {
		_, _ = ioctl.Value(l.file, unix.LOOP_SET_DIRECT_IO, 1) // where it can be had
	}
	if p.takesDiscards() {
		return nil
	}
	return stopDiscards(l.number) // some kernels switch them on again with the sector
}

// recoverGuards is for the start: devices that were not finished go, and those that are kept have
// their guards, also those of a driver that gave none.
func (p *filePool) recoverGuards(ctx context.Context) error {
	if targets, err := DeviceMapperTargets(); err == nil {
		_, p.mapper = targets["linear"]
	}
	if p.mapper {
		if err := p.findCovers(ctx); err != nil {
			return err
		}
	}
	for _, ref := range slices.Collect(maps.Keys(p.loops)) {
		loops, err := p.openLoops(ref)
		if err != nil {
			return err
		}
		for i := range loops {
			if loops[i].kept() && !loops[i].readOnly() && !loops[i].leaving() {
				err = errors.Join(err, p.protect(ctx, ref, &loops[i]))
			}
		}
		closeLoops(loops)
		if err != nil {
			klog.FromContext(ctx).Error(err, "could not protect a device that is handed out; the next attach tries again", "pool", p.name, "object", ref.String())
		}
	}
	return nil
}

// findCovers notes the objects that have a device over their loop device, and removes what has no
// table: whoever was making it is gone.
func (p *filePool) findCovers(ctx context.Context) error {
	names, err := dmNames(coverPrefix)
	if err != nil {
		return err
	}
	for _, name := range names {
		ref, ours := p.parseLabel(strings.TrimPrefix(name, coverPrefix))
		if !ours {
			continue
		}
		p.cover(ref)
		d, err := dmFind(name)
		if err == nil && d != nil && !d.live {
			_, err = dmRemove(name)
		}
		if err != nil {
			klog.FromContext(ctx).Error(err, "could not remove a device that was not finished; the next start tries again", "pool", p.name, "device", name)
		}
	}
	return nil
}
