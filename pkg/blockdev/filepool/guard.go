package filepool

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
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/held"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/loop"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Who has a block device has its ioctls. Of a loop device LOOP_CLR_FD takes the file away and
// asks for no right at all; LOOP_SET_STATUS64, LOOP_SET_BLOCK_SIZE and others only want a
// descriptor that can write. A number that is free goes to the next volume, which whoever has
// the old node then reads. So a device that is kept for somebody else has a guard:
//
// With a device mapper, that is a device over the loop device, handed out in its place, which
// passes none of these ioctls down (dm.showTable). It is named by the pool's directory and the object, and
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
	cover  *dm.Device // handed out in the place of the loop device, or nil
	keeper int        // number of the loop device that holds it, or none
	sector uint32     // of the keeper, which has that of the device below it from the beginning; bytes
}

// none is no number of a loop device.
const none = -1

func (g guard) guarded() bool { return g.cover != nil || g.keeper != none }

// leaving tells whether a device goes away as soon as nobody has it open any more.
func (g guard) leaving() bool { return g.cover != nil && g.cover.Deferred }

// keeperLimit is what a keeper shows of the device below it, in bytes: nothing that could be
// taken for a filesystem.
const keeperLimit = 4096

// coverName is the name of the device over the loop device of an object.
func (p *pool) coverName(ref blockdev.Ref) string { return coverPrefix + p.label(ref) }

const coverPrefix = "ashlar-"

// IsCover tells whether a device of the device mapper is the cover of an object of some file pool, by its name.
func IsCover(name string) bool {
	label, ours := strings.CutPrefix(name, coverPrefix)
	if ours {
		_, _, ours = cutLast(label)
	}
	return ours
}

// findCover finds the device over one of an object's loop devices.
func (p *pool) findCover(ref blockdev.Ref, loops []attachedLoop) error {
	p.Mu.Lock()
	covered := p.covered[ref]
	p.Mu.Unlock()
	if !covered || len(loops) == 0 {
		return nil
	}
	d, err := dm.Find(p.coverName(ref))
	if err != nil || d == nil || !d.Live {
		return err
	}
	below, err := dm.Below(d.Name)
	if dm.Vanished(err) {
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
func (p *pool) protect(ctx context.Context, ref blockdev.Ref, l *attachedLoop) error {
	if l.guarded() {
		return p.restoreSettings(ref, *l)
	}
	// One that stays by itself was handed out by a driver that gave no guards. It is in use.
	if !p.mapper || l.Stays() {
		return p.keep(ctx, ref, l)
	}
	size, err := blockdev.DeviceSize(l.file)
	if err != nil {
		return err
	}
	name := p.coverName(ref)
	p.cover(ref)
	if err := dm.Show(name, strings.ToUpper(coverPrefix)+p.label(ref), l.node(), size, false); err != nil {
		return err
	}
	if l.cover, err = dm.Find(name); err == nil && l.cover == nil {
		err = fmt.Errorf("%w: device %s is gone again", errdefs.ErrUnavailable, name)
	}
	if err != nil {
		return err
	}
	node, err := dm.Open(l.cover, os.O_RDONLY) // there is a node then
	if err != nil {
		return fmt.Errorf("open %s: %w", l.cover.Path(), err)
	}
	return node.Close()
}

// cover notes that there may be a device over the loop device of an object.
func (p *pool) cover(ref blockdev.Ref) {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	p.covered[ref] = true
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

// unguard takes the guard of a loop device away, so that the device goes with its last user.
func (p *pool) unguard(ctx context.Context, ref blockdev.Ref, l attachedLoop) error {
	if l.cover != nil {
		return p.uncover(ctx, ref)
	}
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

// uncover removes the device over a loop device. One that is held open goes with its last user.
func (p *pool) uncover(ctx context.Context, ref blockdev.Ref) error {
	name := p.coverName(ref)
	inUse, err := dm.Remove(name)
	for try := 0; err == nil && inUse; try++ {
		var d *dm.Device
		if d, err = dm.Find(name); err != nil || d == nil {
			break
		}
		if try == held.Tries || ctx.Err() != nil {
			return fmt.Errorf("%w: %s is held open by a process or a mount; it goes away with its last user", errdefs.ErrInUse, d.Path())
		}
		time.Sleep(held.Pause)
	}
	return err
}

// resizeCover brings the device over a loop device to the size of that.
func (p *pool) resizeCover(ref blockdev.Ref, l attachedLoop) error {
	if l.cover == nil {
		return nil
	}
	size, err := blockdev.DeviceSize(l.file)
	if err != nil {
		return err
	}
	above, err := dm.Open(l.cover, os.O_RDONLY)
	if dm.Vanished(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open %s: %w", l.cover.Path(), err)
	}
	defer above.Close()
	have, err := blockdev.DeviceSize(above)
	if err != nil || have == size {
		return err
	}
	return dm.Show(p.coverName(ref), "", l.node(), size, false)
}

// changed says what is not as it was when a loop device was made.
func (l attachedLoop) changed() []string {
	if l.keeper == none {
		return nil // in nobody's hands, or made by a driver that did not care
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

// restoreSettings undoes what whoever had a loop device in his hands did to it. That the kernel looks for
// partitions cannot be undone while the device is there.
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
		_, _ = ioctl.Value(l.file, unix.LOOP_SET_DIRECT_IO, 1) // where it can be had
	}
	if p.takesDiscards() {
		return nil
	}
	return loop.StopDiscards(l.Number) // some kernels switch them on again with the sector
}

// recoverGuards is for the start: devices that were not finished go, and those that are kept have
// their guards, also those of a driver that gave none.
func (p *pool) recoverGuards(ctx context.Context) error {
	if targets, err := dm.Targets(); err == nil {
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
			if loops[i].kept() && !loops[i].ReadOnly() && !loops[i].leaving() {
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
func (p *pool) findCovers(ctx context.Context) error {
	names, err := dm.Names(coverPrefix)
	if err != nil {
		return err
	}
	for _, name := range names {
		ref, ours := p.parseLabel(strings.TrimPrefix(name, coverPrefix))
		if !ours {
			continue
		}
		p.cover(ref)
		d, err := dm.Find(name)
		if err == nil && d != nil && !d.Live {
			_, err = dm.Remove(name)
		}
		if err != nil {
			klog.FromContext(ctx).Error(err, "could not remove a device that was not finished; the next start tries again", "pool", p.name, "device", name)
		}
	}
	return nil
}
