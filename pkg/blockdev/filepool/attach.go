package filepool

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/ioctl"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/layout"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/recordfile"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/sparse"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/held"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/named"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/loop"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// knownLoop is a loop device that was seen for an object: over its image, or as the keeper over the device that is over the image.
type knownLoop struct {
	number        int
	device, inode uint64 // of its backing file
	keeper        bool
	seen          uint64 // a number of its own for each time that a device is noted
}

// attachedLoop is a loop device that is open and known to be over the image of an object.
type attachedLoop struct {
	loop.Backing
	file *os.File
	guard
}

// noteLoop notes a loop device of an object, in place of an earlier note of its number.
func (p *pool) noteLoop(ref blockdev.Ref, b loop.Backing) {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	p.seen++
	var known []knownLoop
	for _, l := range p.loops[ref] {
		if l.number != b.Number {
			known = append(known, l)
		}
	}
	p.loops[ref] = append(known, knownLoop{b.Number, b.Device, b.Inode, b.Node != 0, p.seen})
}

// forgetLoops removes notes of loop devices of an object. A device that was noted again since stays.
func (p *pool) forgetLoops(ref blockdev.Ref, gone []knownLoop) {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	var known []knownLoop
	for _, l := range p.loops[ref] {
		if !slices.Contains(gone, l) {
			known = append(known, l)
		}
	}
	if p.loops[ref] = known; len(known) == 0 {
		delete(p.loops, ref)
	}
}

// label returns the label of the loop devices over an object. It has the pool's directory in it, so that pools of several drivers on one kernel do not
// take each other's devices for their own.
func (p *pool) label(ref blockdev.Ref) string { return ref.String() + "." + p.directoryID[ref.Kind] }

// parseLabel is the inverse of label; false for labels of other pools.
func (p *pool) parseLabel(label string) (blockdev.Ref, bool) {
	name, dir, _ := cutLast(label)
	ref := blockdev.ParseRef(name)
	return ref, ref.Validate() == nil && dir == p.directoryID[ref.Kind]
}

// cutLast splits a label into the object's name, which has two parts, and the directory's, which has two.
func cutLast(label string) (name, dir string, found bool) {
	parts := strings.Split(label, ".")
	if len(parts) != 4 {
		return "", "", false
	}
	return parts[0] + "." + parts[1], parts[2] + "." + parts[3], true
}

// directoryID returns a name for a directory that no other one on this kernel has: device and inode number, in hexadecimal.
func directoryID(dir *os.File) (string, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &st); err != nil {
		return "", errdefs.FromErrno(err)
	}
	return fmt.Sprintf("%x.%x", unix.Major(st.Dev)<<20|unix.Minor(st.Dev), st.Ino), nil
}

// findLoops looks at all loop devices of the machine, once, when the pool is opened, and notes those of this pool. After that, each call looks only at
// those of its object. The name of a backing file tells which devices to open, and which image to compare with; it proves nothing.
func (p *pool) findLoops() error {
	numbers, err := loop.Configured()
	if err != nil {
		return fmt.Errorf("list loop devices: %w", err)
	}
	rest := map[int]loop.Backing{} // devices over no image of ours, by their numbers
	kept := map[int]blockdev.Ref{} // objects with a keeper, by the number of the device below that
	for _, n := range numbers {
		// Devices that are surely others' are not opened: to open one is to hold it for a moment.
		name, unlinked, err := loop.BackingName(n)
		if base := path.Base(name); err != nil || (!strings.HasSuffix(base, ".img") && !strings.HasPrefix(base, "loop")) {
			continue
		}
		over := ImageAt(name)
		f, err := loop.Open(n, os.O_RDONLY)
		if loop.Going(err) { // whoever told it to go may have it open still: see waitGoing
			p.noteGoing(over, n)
		}
		if err != nil {
			continue // gone meanwhile, or not for us
		}
		status, err := loop.Status(f, n)
		f.Close()
		if err != nil {
			continue
		}
		ref, labelled := p.parseLabel(status.Label)
		switch {
		case status.Node != 0: // a keeper: no pod has a node of it, so its label is as we wrote it
			if labelled && unix.Major(status.Node) == loop.Major {
				kept[int(unix.Minor(status.Node))] = ref
				p.noteLoop(ref, status)
			}
		case p.isOverImage(over, status):
			p.noteLoop(over, status)
		case labelled && unlinked && status.Device == p.device:
			p.noteLoop(ref, status)
		default:
			rest[n] = status
		}
	}
	for n, ref := range kept {
		if status, found := rest[n]; found {
			p.noteLoop(ref, status)
		}
	}
	return nil
}

// noteGoing notes a loop device that was told to go, and so cannot be opened. over is the object by the name of its backing file.
func (p *pool) noteGoing(over blockdev.Ref, n int) {
	if over.Validate() != nil {
		return
	}
	if info, err := p.root.Stat(layout.Image(over)); err == nil {
		st := info.Sys().(*syscall.Stat_t)
		p.noteLoop(over, loop.Backing{Number: n, Device: st.Dev, Inode: st.Ino})
	}
}

// isOverImage reports whether a loop device is over the image of an object; over is that by the name of its backing file.
func (p *pool) isOverImage(over blockdev.Ref, status loop.Backing) bool {
	if over.Validate() != nil {
		return false
	}
	info, err := p.root.Stat(layout.Image(over))
	return err == nil && isImage(info, status)
}

// ImageAt returns the object whose image is at a path, as sysfs has it of a loop device; an invalid Ref if the path is of no image.
func ImageAt(name string) blockdev.Ref {
	directory, key, _ := named.Image(name)
	for kind, dir := range layout.Directories {
		if dir == directory {
			return blockdev.Ref{Kind: kind, Key: key}
		}
	}
	return blockdev.Ref{}
}

// isImage reports whether a loop device is over a file.
func isImage(info fs.FileInfo, b loop.Backing) bool {
	st := info.Sys().(*syscall.Stat_t)
	return b.Node == 0 && b.Device == st.Dev && b.Inode == st.Ino
}

// openLoops opens the loop devices over the image of an object; the caller closes them. Noted devices that are not the object's any more are forgotten, as
// numbers are reused.
func (p *pool) openLoops(ref blockdev.Ref) (loops []attachedLoop, err error) {
	p.Mu.Lock()
	candidates := slices.Clone(p.loops[ref])
	p.Mu.Unlock()
	if len(candidates) == 0 {
		return nil, nil
	}
	defer func() {
		if err != nil {
			closeLoops(loops)
		}
	}()
	image, err := p.root.Stat(layout.Image(ref))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, errdefs.FromErrno(err)
	}
	if err != nil {
		image = nil
	}
	var gone []knownLoop
	keepers := map[uint64]guard{} // by the number of the device that they are over
	for _, c := range candidates {
		f, status, going, err := p.openLoop(ref, image, c)
		switch {
		case err != nil:
			return loops, err
		case f == nil:
			if !going || !isOver(c.number, ref, candidates) {
				gone = append(gone, c)
			}
		case status.Node == 0:
			loops = append(loops, attachedLoop{Backing: status, file: f, guard: guard{keeper: none}})
		default:
			if sector, err := sectorSize(f); err == nil {
				keepers[status.Node] = guard{keeper: c.number, sector: sector}
			}
			f.Close()
		}
	}
	for i := range loops {
		if keeper, found := keepers[loops[i].node()]; found {
			loops[i].guard = keeper
		}
	}
	p.forgetLoops(ref, gone)
	return loops, nil
}

// openLoop opens a loop device that was noted for an object. f is nil if it is not the object's any more, or if it is going: then nobody can open it.
func (p *pool) openLoop(ref blockdev.Ref, image fs.FileInfo, known knownLoop) (f *os.File, status loop.Backing, going bool, err error) {
	f, err = loop.Open(known.number, os.O_RDONLY)
	if errors.Is(err, fs.ErrNotExist) || loop.Going(err) {
		return nil, status, true, nil
	}
	if err != nil {
		return nil, status, false, fmt.Errorf("open %s: %w", loop.Path(known.number), errdefs.FromErrno(err))
	}
	status, err = loop.Status(f, known.number)
	if err == nil && p.isOf(ref, image, known, status) {
		return f, status, false, nil
	}
	f.Close()
	loop.ForgetStopped(known.number) // another device has the number, or none: ours is gone
	return nil, status, false, nil
}

// isOf reports whether a loop device that was noted for an object is still its own: over the same file, which is the image (nil: there is none) or has no
// name any more; or its keeper, by the label.
func (p *pool) isOf(ref blockdev.Ref, image fs.FileInfo, known knownLoop, now loop.Backing) bool {
	if now.Device != known.device || now.Inode != known.inode {
		return false
	}
	if now.Node != 0 {
		return now.Label == p.label(ref)
	}
	return image != nil && isImage(image, now) || loop.Unlinked(known.number)
}

// isOver reports, by the name of its backing file, whether a loop device that cannot be opened is over the image of an object, or over one of its loop
// devices.
func isOver(n int, ref blockdev.Ref, loops []knownLoop) bool {
	name, _, err := loop.BackingName(n)
	return err == nil && (ImageAt(name) == ref ||
		slices.ContainsFunc(loops, func(l knownLoop) bool { return path.Base(name) == path.Base(loop.Path(l.number)) }))
}

func closeLoops(loops []attachedLoop) {
	for _, l := range loops {
		l.file.Close()
	}
}

// node returns the device number of the loop device.
func (l attachedLoop) node() uint64 { return unix.Mkdev(loop.Major, uint32(l.Number)) }

// kept reports whether the device stays when nobody has it open.
func (l attachedLoop) kept() bool { return l.Stays() || l.keeper != none }

// device returns what Attach and Attached return of an open loop device.
func (l attachedLoop) device(hold func() error) (blockdev.Device, error) {
	size, err := blockdev.DeviceSize(l.file)
	if err != nil {
		return blockdev.Device{}, err
	}
	device := blockdev.Device{Path: loop.Path(l.Number), Number: l.node(), Size: size, ReadOnly: l.ReadOnly(), Kept: l.kept()}
	return device.Held(hold), nil
}

func (p *pool) Attach(ctx context.Context, ref blockdev.Ref, how blockdev.Attachment) (blockdev.Device, error) {
	o, record, err := p.Lookup(ref)
	if err == nil && !how.ReadOnly {
		err = p.completeBeside(ctx, o)
	}
	if err != nil {
		return blockdev.Device{}, err
	}
	device, err := p.attach(ctx, o, record, how)
	if err != nil {
		return blockdev.Device{}, fmt.Errorf("attach %s of pool %s: %w", ref, p.name, err)
	}
	return device, nil
}

func (p *pool) attach(ctx context.Context, o *object, record blockdev.Record, how blockdev.Attachment) (_ blockdev.Device, err error) {
	ref := record.Ref
	l, err := p.attachedAs(ctx, ref, how)
	if err != nil {
		return blockdev.Device{}, err
	}
	if l.file == nil {
		if l, err = p.attachImage(ctx, o, record, how); err != nil {
			return blockdev.Device{}, err
		}
	}
	defer func() {
		if err != nil {
			l.file.Close()
		}
	}()
	if how.Keep {
		if err := p.protect(ctx, ref, &l); err != nil {
			return blockdev.Device{}, err
		}
	}
	return l.device(l.file.Close)
}

// attachedAs returns the device that is attached the way that how asks for; without a file if there is none. errdefs.ErrInUse if the object has a writable
// device of the other way: two writable devices over one image would not see each other's writes. It waits a moment for one that goes with its last user.
func (p *pool) attachedAs(ctx context.Context, ref blockdev.Ref, how blockdev.Attachment) (attachedLoop, error) {
	for try := 0; ; try++ {
		loops, err := p.openLoops(ref)
		if err != nil {
			return attachedLoop{}, err
		}
		for i, l := range loops {
			if l.ReadOnly() == how.ReadOnly && l.kept() == how.Keep {
				closeLoops(slices.Delete(loops, i, i+1))
				return l, nil
			}
		}
		closeLoops(loops)
		i := slices.IndexFunc(loops, func(l attachedLoop) bool { return !l.ReadOnly() && !how.ReadOnly })
		if i < 0 {
			return attachedLoop{}, nil
		}
		if loops[i].kept() || try == held.Tries || ctx.Err() != nil {
			return attachedLoop{}, fmt.Errorf("%w: it is attached as %s for another use (or still held after that)", errdefs.ErrInUse, loop.Path(loops[i].Number))
		}
		time.Sleep(held.Pause)
	}
}

// takesDiscards reports whether devices of this pool take discards. On btrfs, holes would cost more space than they free (package nocow).
func (p *pool) takesDiscards() bool { return p.kind != unix.BTRFS_SUPER_MAGIC }

// attachImage makes a loop device over the image of an object.
func (p *pool) attachImage(ctx context.Context, o *object, record blockdev.Record, how blockdev.Attachment) (attachedLoop, error) {
	ref := record.Ref
	flags := os.O_RDWR
	if how.ReadOnly {
		flags = os.O_RDONLY
	}
	image, err := p.openImage(record, flags)
	if err != nil {
		return attachedLoop{}, err
	}
	defer image.Close()
	if !record.Thin && !how.ReadOnly {
		if err := p.refill(ctx, o, image, record.Size); err != nil {
			return attachedLoop{}, err
		}
	}
	// Autoclear also for Keep: then its guard keeps it.
	file, n, err := loop.Attach(ctx, image, loop.Config{Label: p.label(ref), ReadOnly: how.ReadOnly, Autoclear: true,
		Discards: how.ReadOnly || p.takesDiscards(), Sector: recordfile.SectorOf(record)})
	if err != nil {
		return attachedLoop{}, err
	}
	status, err := loop.Status(file, n)
	if err != nil {
		file.Close()
		return attachedLoop{}, fmt.Errorf("status of %s: %w", loop.Path(n), errdefs.FromErrno(err))
	}
	p.noteLoop(ref, status)
	return attachedLoop{Backing: status, file: file, guard: guard{keeper: none}}, nil
}

// refill allocates again what discards (fstrim, blkdiscard) took from a thick image while it was attached: its space is promised.
func (p *pool) refill(ctx context.Context, o *object, image *os.File, size int64) error {
	info, err := image.Stat()
	if err != nil {
		return errdefs.FromErrno(err)
	}
	if info.Sys().(*syscall.Stat_t).Blocks*512 >= size {
		return nil
	}
	return p.allocate(ctx, o, image, size, false)
}

func (p *pool) Attached(_ context.Context, ref blockdev.Ref) ([]blockdev.Device, error) {
	if err := ref.Validate(); err != nil {
		return nil, err
	}
	loops, err := p.openLoops(ref)
	if err != nil {
		return nil, err
	}
	defer closeLoops(loops)
	var devices []blockdev.Device
	for _, l := range loops {
		device, err := l.device(nil)
		if err != nil {
			return nil, err
		}
		devices = append(devices, device)
	}
	return devices, nil
}

// attachedInUse is Attached, but waits a moment for devices that go with their last user: something may only look at them, or have just closed them. What
// it returns is in use.
func (p *pool) attachedInUse(ctx context.Context, ref blockdev.Ref) ([]blockdev.Device, error) {
	for try := 0; ; try++ {
		devices, err := p.Attached(ctx, ref)
		stays := func(d blockdev.Device) bool { return d.Kept }
		if err != nil || len(devices) == 0 || slices.ContainsFunc(devices, stays) || try == held.Tries || ctx.Err() != nil {
			return devices, err
		}
		time.Sleep(held.Pause)
	}
}

func (p *pool) Detach(ctx context.Context, ref blockdev.Ref) error {
	if err := ref.Validate(); err != nil {
		return err
	}
	loops, err := p.openLoops(ref)
	if err != nil {
		return err
	}
	var failures []error
	for _, l := range loops {
		if err := detach(ctx, l); err != nil {
			failures = append(failures, fmt.Errorf("detach %s of pool %s: %w", ref, p.name, err))
		}
	}
	if len(failures) > 0 {
		return errors.Join(failures...)
	}
	if err := p.waitGoing(ctx, ref); err != nil {
		return fmt.Errorf("detach %s of pool %s: %w", ref, p.name, err)
	}
	return nil
}

// waitGoing waits until devices of an object that somebody told to go are gone. Whoever has one open keeps it, and its image, for as long as he likes.
func (p *pool) waitGoing(ctx context.Context, ref blockdev.Ref) error {
	p.Mu.Lock()
	known := p.loops[ref]
	p.Mu.Unlock()
	for _, l := range known {
		if err := loop.WaitGone(ctx, loop.Backing{Number: l.number, Device: l.device, Inode: l.inode}); err != nil {
			return err
		}
	}
	return nil
}

// detach removes a loop device and its guard, and closes its file.
func detach(ctx context.Context, l attachedLoop) error {
	if err := unguard(ctx, l); err != nil {
		l.file.Close()
		return err
	}
	return loop.Detach(ctx, l.file, l.Backing)
}

// resizeLoops has attached devices take the size of their image. It restores their settings first.
func (p *pool) resizeLoops(ref blockdev.Ref) error {
	loops, err := p.openLoops(ref)
	if err != nil {
		return err
	}
	defer closeLoops(loops)
	for _, l := range loops {
		if err := p.restoreSettings(ref, l); err != nil {
			return err
		}
		if _, err := ioctl.Value(l.file, unix.LOOP_SET_CAPACITY, 0); err != nil {
			return fmt.Errorf("resize %s: %w", loop.Path(l.Number), errdefs.FromErrno(err))
		}
	}
	return nil
}

// Used: see blockdev.Measurer. It is what the image takes of the filesystem.
func (p *pool) Used(_ context.Context, ref blockdev.Ref) (int64, error) {
	_, record, err := p.Lookup(ref)
	if err != nil {
		return 0, err
	}
	info, err := p.root.Stat(layout.Image(ref))
	if err != nil {
		return 0, fmt.Errorf("measure %s of pool %s: %w", ref, p.name, errdefs.FromErrno(err))
	}
	return min(info.Sys().(*syscall.Stat_t).Blocks*512, record.Size), nil
}

// Untouched: see blockdev.Prover. A new image is a hole, or preallocated space that was never written, from end to end (lseek(2), SEEK_DATA). Whatever was
// written is read, and has to be zeros.
func (p *pool) Untouched(ctx context.Context, ref blockdev.Ref) (bool, error) {
	_, record, err := p.Lookup(ref)
	if err != nil {
		return false, err
	}
	image, err := p.openImage(record, os.O_RDONLY)
	if err != nil {
		return false, err
	}
	defer image.Close()
	return sparse.Zero(ctx, image, record.Size)
}

func (p *pool) Orphans(context.Context) (map[blockdev.Ref][]blockdev.Device, error) {
	p.Mu.Lock()
	var refs []blockdev.Ref
	for ref := range p.loops {
		refs = append(refs, ref)
	}
	p.Mu.Unlock()
	found := map[blockdev.Ref][]blockdev.Device{}
	for _, ref := range refs {
		loops, err := p.openLoops(ref)
		if err != nil {
			return nil, err
		}
		for _, l := range loops {
			if device, err := l.device(nil); err == nil && l.kept() {
				found[ref] = append(found[ref], device)
			}
		}
		closeLoops(loops)
	}
	return found, nil
}
