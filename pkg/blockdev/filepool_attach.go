package blockdev

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// findLoops looks once, at the start, at all loop devices of the machine and notes
// those over images of this pool. After that, no call looks at more than its own.
func (p *filePool) findLoops() error {
	numbers, err := configuredLoops()
	if err != nil {
		return fmt.Errorf("list loop devices: %w", err)
	}
	for _, n := range numbers {
		// Not those that are surely others': to open a device is to hold it for a moment.
		backing, err := os.ReadFile(fmt.Sprintf("/sys/block/loop%d/loop/backing_file", n))
		if err != nil || !strings.HasSuffix(strings.TrimSuffix(strings.TrimSpace(string(backing)), " (deleted)"), ".img") {
			continue
		}
		f, err := openLoop(n, os.O_RDONLY)
		if err != nil {
			continue // gone meanwhile, or not for us
		}
		status, err := loopStatus(f, n)
		f.Close()
		if err != nil {
			continue
		}
		if ref, ok := p.parseLabel(status.label); ok {
			p.loops[ref] = append(p.loops[ref], n)
		}
	}
	return nil
}

func (p *filePool) parseLabel(label string) (Ref, bool) {
	parts := strings.Split(label, ".")
	if len(parts) != 3 || parts[1] != p.name {
		return Ref{}, false
	}
	ref := Ref{Kind(parts[0]), parts[2]}
	return ref, ref.validate() == nil
}

// attachedLoop is a loop device that is open and known to be over one object.
type attachedLoop struct {
	loopBacking
	file *os.File
}

// openLoops opens the loop devices over an object, as far as they still are over it:
// numbers are reused. The caller closes them.
func (p *filePool) openLoops(ref Ref) ([]attachedLoop, error) {
	p.mu.Lock()
	numbers := slices.Clone(p.loops[ref])
	p.mu.Unlock()
	if len(numbers) == 0 {
		return nil, nil
	}
	var image *syscall.Stat_t
	info, err := p.root.Stat(imagePath(ref))
	if err == nil {
		image = info.Sys().(*syscall.Stat_t)
	} else if !errors.Is(err, fs.ErrNotExist) {
		return nil, systemError(err)
	}
	var loops []attachedLoop
	var known []int
	for _, n := range numbers {
		f, err := openLoop(n, os.O_RDONLY)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENXIO) {
			continue
		}
		if err != nil {
			closeLoops(loops)
			return nil, fmt.Errorf("open %s: %w", loopPath(n), systemError(err))
		}
		status, err := loopStatus(f, n)
		ours := err == nil && status.label == p.label(ref) && ((image != nil && status.device == image.Dev && status.inode == image.Ino) || p.backedHere(n, ref, status))
		if !ours {
			f.Close()
			continue
		}
		loops, known = append(loops, attachedLoop{status, f}), append(known, n)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(known) == 0 {
		delete(p.loops, ref)
	} else {
		p.loops[ref] = known
	}
	return loops, nil
}

// backedHere tells whether a loop device with the label of an object is over an image of
// this pool that is not there under its name any more. Another pool of the same name
// may be elsewhere on this machine, so the label alone is not enough. The kernel adds
// " (deleted)" to the name of an unlinked file; the folders in it may be those of
// another mount namespace.
func (p *filePool) backedHere(n int, ref Ref, status loopBacking) bool {
	b, err := os.ReadFile(fmt.Sprintf("/sys/block/loop%d/loop/backing_file", n))
	name, unlinked := strings.CutSuffix(strings.TrimSpace(string(b)), " (deleted)")
	var here unix.Stat_t
	return err == nil && (name == p.location.Path+"/"+imagePath(ref) ||
		(unlinked && unix.Fstat(int(p.lock.Fd()), &here) == nil && here.Dev == status.device))
}

func closeLoops(loops []attachedLoop) {
	for _, l := range loops {
		l.file.Close()
	}
}

// device describes an open loop device.
func (l attachedLoop) device(hold func() error) (Device, error) {
	var size uint64
	if err := ioctlPointer(l.file.Fd(), unix.BLKGETSIZE64, unsafe.Pointer(&size)); err != nil {
		return Device{}, fmt.Errorf("size of %s: %w", loopPath(l.number), systemError(err))
	}
	return NewDevice(loopPath(l.number), unix.Mkdev(loopMajor, uint32(l.number)), int64(size), l.readOnly(), hold), nil
}

func (p *filePool) Attach(ctx context.Context, ref Ref, how Attachment) (Device, error) {
	_, s, err := p.lookup(ref)
	if err != nil {
		return Device{}, err
	}
	loop, err := p.attach(ctx, ref, s, how)
	if err != nil {
		return Device{}, fmt.Errorf("attach %s of pool %s: %w", ref, p.name, err)
	}
	device, err := loop.device(loop.file.Close)
	if err == nil {
		_, err = SetQueue(device, how.Attributes)
	}
	if err != nil {
		loop.file.Close()
		return Device{}, err
	}
	return device, nil
}

func (p *filePool) attach(ctx context.Context, ref Ref, s *stored, how Attachment) (attachedLoop, error) {
	for try := 0; ; try++ {
		loops, err := p.openLoops(ref)
		if err != nil {
			return attachedLoop{}, err
		}
		for i, loop := range loops {
			if loop.readOnly() == how.ReadOnly && loop.keep() == how.Keep {
				closeLoops(slices.Delete(loops, i, i+1))
				return loop, nil
			}
		}
		closeLoops(loops)
		// Two writable devices over one image would not see each other's writes.
		i := slices.IndexFunc(loops, func(loop attachedLoop) bool { return !loop.readOnly() && !how.ReadOnly })
		if i < 0 {
			break
		}
		if loops[i].keep() || try == heldTries || ctx.Err() != nil {
			return attachedLoop{}, fmt.Errorf("%w: it is attached as %s for another use (or still held after that)", ErrInUse, loopPath(loops[i].number))
		}
		time.Sleep(heldPause)
	}

	flags := os.O_RDWR
	if how.ReadOnly {
		flags = os.O_RDONLY
	}
	image, err := p.openImage(ref, s, flags)
	if err != nil {
		return attachedLoop{}, err
	}
	defer image.Close()
	if !s.Thin && !how.ReadOnly {
		if err := p.refill(image, s.Size); err != nil {
			return attachedLoop{}, err
		}
	}
	file, n, err := attachLoop(ctx, image, p.label(ref), how)
	if err != nil {
		return attachedLoop{}, err
	}
	p.mu.Lock()
	p.loops[ref] = append(p.loops[ref], n)
	p.mu.Unlock()
	status, err := loopStatus(file, n)
	if err != nil {
		file.Close()
		return attachedLoop{}, fmt.Errorf("status of %s: %w", loopPath(n), systemError(err))
	}
	return attachedLoop{status, file}, nil
}

// refill gives a thick image back what discards (fstrim, blkdiscard) took from it
// while it was attached before: its space is promised.
func (p *filePool) refill(image *os.File, size int64) error {
	info, err := image.Stat()
	if err != nil {
		return systemError(err)
	}
	if info.Sys().(*syscall.Stat_t).Blocks*512 >= size {
		return nil
	}
	return p.allocate(image, size, false)
}

func (p *filePool) Attached(_ context.Context, ref Ref) ([]Device, error) {
	if err := ref.validate(); err != nil {
		return nil, err
	}
	loops, err := p.openLoops(ref)
	if err != nil {
		return nil, err
	}
	defer closeLoops(loops)
	var devices []Device
	for _, loop := range loops {
		device, err := loop.device(nil)
		if err != nil {
			return nil, err
		}
		devices = append(devices, device)
	}
	return devices, nil
}

func (p *filePool) Detach(ctx context.Context, ref Ref) error {
	if err := ref.validate(); err != nil {
		return err
	}
	loops, err := p.openLoops(ref)
	if err != nil {
		return err
	}
	var failures []error
	for _, loop := range loops {
		if err := detachLoop(ctx, loop.file, loop.loopBacking); err != nil {
			failures = append(failures, fmt.Errorf("detach %s of pool %s: %w", ref, p.name, err))
		}
	}
	return errors.Join(failures...)
}

// resizeLoops lets attached devices see the size of their image.
func (p *filePool) resizeLoops(_ context.Context, ref Ref) error {
	loops, err := p.openLoops(ref)
	if err != nil {
		return err
	}
	defer closeLoops(loops)
	for _, loop := range loops {
		if _, err := ioctlValue(loop.file.Fd(), unix.LOOP_SET_CAPACITY, 0); err != nil {
			return fmt.Errorf("resize %s: %w", loopPath(loop.number), systemError(err))
		}
	}
	return nil
}

// Untouched: a new image is a hole, or preallocated space that was never written, from
// end to end (lseek(2), SEEK_DATA).
func (p *filePool) Untouched(_ context.Context, ref Ref) (bool, error) {
	_, s, err := p.lookup(ref)
	if err != nil {
		return false, err
	}
	image, err := p.openImage(ref, s, os.O_RDONLY)
	if err != nil {
		return false, err
	}
	defer image.Close()
	start, _, err := dataFrom(image, 0, s.Size)
	return start == s.Size, err
}

func (p *filePool) Orphans(context.Context) (map[Ref][]Device, error) {
	p.mu.Lock()
	var refs []Ref
	for ref := range p.loops {
		refs = append(refs, ref)
	}
	p.mu.Unlock()
	found := map[Ref][]Device{}
	for _, ref := range refs {
		loops, err := p.openLoops(ref)
		if err != nil {
			return nil, err
		}
		for _, loop := range loops {
			if device, err := loop.device(nil); err == nil && loop.keep() {
				found[ref] = append(found[ref], device)
			}
		}
		closeLoops(loops)
	}
	return found, nil
}
