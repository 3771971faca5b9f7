package lvmpool

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/direct"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/held"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lvm2"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Erase: see blockdev.Pool.
func (p *pool) Erase(ctx context.Context, ref blockdev.Ref) error {
	return p.delete(ctx, ref, true)
}

// erase overwrites the beginning of an object on the disks.
func (p *pool) erase(ctx context.Context, o *logical) error {
	ref := o.Ref()
	d, err := p.activate(ctx, ref.String())
	if errors.Is(err, lvm2.ErrNoLV) {
		return nil
	}
	if err != nil {
		return err
	}
	device, err := dm.Open(d, os.O_RDWR|unix.O_DIRECT)
	if dm.Vanished(err) {
		err = errdefs.Recast(errdefs.ErrUnavailable, err, "try again")
	}
	if !d.Deferred { // from here on the device goes with its last user, and so with the driver
		_, failure := dm.Remove(d.Name)
		err = errors.Join(err, failure)
	}
	var size int64
	if err == nil {
		size, err = blockdev.DeviceSize(device)
	}
	if size = min(size, blockdev.HeadSize); err == nil && p.location.Thin == "" {
		err = overwrite(ctx, device, piece{length: size})
	} else if err == nil {
		err = p.eraseThin(ctx, ref, d.Name, device, size)
	}
	if device != nil {
		err = errors.Join(err, device.Close())
	}
	return err
}

// piece is a range of bytes of a volume: its offset there (logical), and on the device that has them (at).
type piece struct{ logical, at, length int64 }

// eraseThin overwrites the first size bytes of a thin volume where they are, on the data device of the thin pool. Writing to the volume would not do: if
// it is a snapshot, or one was ever made of it, the thin pool gives each write a new block and leaves the old one as it is, also when nobody else has it
// any more. Nor does this need space, so a full thin pool is no obstacle.
//
// A block is overwritten only if the volume has it and no other one does. These are the reasons why that is known (drivers/md/dm-thin.c,
// dm-thin-metadata.c):
//
//   - The kernel says of the open volume which volume of which thin pool it is, and where that has its metadata and data, and lvm2 agrees. So the thin
//     pool stays up with these devices, and is not being repaired.
//   - The snapshot of the metadata has all that was mapped when it was made, as the thin pool commits first. Other volumes can share more after that only
//     by a new snapshot. lvm2 makes none while its lock is held; one of somebody else shows in the thin pool's time (unchanged).
//   - The volume keeps its blocks, as nobody has it open for writes or discards. So no other volume gets them, even if somebody else releases the
//     snapshot.
//   - The block on the data device has the same bytes as the volume (same).
//
// Two volumes share a block only at the same offset, as only snapshots make them share.
func (p *pool) eraseThin(ctx context.Context, ref blockdev.Ref, name string, volume *os.File, size int64) error {
	number, data, err := p.beneath(ctx, name)
	if err != nil {
		return err
	}
	noted, err := p.thinID(ctx, ref)
	if err != nil {
		return err
	}
	if noted != number {
		return fmt.Errorf("%w: %s is number %d of the thin pool, and lvm2 has it as %d; nothing was overwritten", errdefs.ErrUnsupported, name, number, noted)
	}
	file, err := dm.Open(data, os.O_RDWR|unix.O_DIRECT)
	if err != nil {
		return err
	}
	defer file.Close()
	return p.withMetadata(ctx, func(metadata string) error {
		return p.lvm.Hold(ctx, func(lvm2.Run) error {
			release, err := p.lockGroup(ctx)
			if err != nil {
				return err
			}
			defer release()
			if err := p.running(name); err != nil {
				return err
			}
			pieces, view, err := alone(metadata, number, size)
			if err != nil {
				return err
			}
			for _, at := range pieces {
				if err := same(volume, file, at); err != nil {
					return err
				}
			}
			if err := p.unchanged(metadata, view); err != nil {
				return err
			}
			return overwrite(ctx, file, pieces...)
		})
	})
}

// beneath returns the number of a thin volume in the thin pool, and the data device of that, by the kernel's tables; somebody has the volume's device
// open. lvm2's own notes may be for the next activation only (lvconvert --merge, vgcfgrestore). errdefs.ErrUnsupported if the tables are not those of this
// thin pool.
func (p *pool) beneath(ctx context.Context, name string) (number uint64, data *dm.Device, err error) {
	use, err := p.thinUse(ctx)
	if err != nil {
		return 0, nil, err
	}
	thin, err := p.own(use.device)
	if err != nil || thin == nil {
		return 0, nil, errors.Join(err, fmt.Errorf("%w: the thin pool has no device", errdefs.ErrUnavailable))
	}
	kind, volume, err := dm.Table(name)
	if err != nil {
		return 0, nil, err
	}
	poolKind, below, err := dm.Table(thin.Name)
	if err != nil {
		return 0, nil, err
	}
	if data, err = p.own(p.device(p.location.Thin) + "_tdata"); err != nil || data == nil {
		return 0, nil, errors.Join(err, fmt.Errorf("%w: the thin pool has no device of its data", errdefs.ErrUnavailable))
	}
	metadata, err := p.own(p.device(p.location.Thin) + "_tmeta")
	if err != nil || metadata == nil {
		return 0, nil, errors.Join(err, fmt.Errorf("%w: the thin pool has no device of its metadata", errdefs.ErrUnavailable))
	}
	var of string
	_, err = fmt.Sscan(volume, &of, &number)
	if err != nil || kind != "thin" || of != numbers(thin) || poolKind != "thin-pool" || !strings.HasPrefix(below, numbers(metadata)+" "+numbers(data)+" ") {
		return 0, nil, fmt.Errorf("%w: %s is %s %s, and %s is %s %s: that is no volume of this thin pool on %s and %s",
			errdefs.ErrUnsupported, name, kind, volume, thin.Name, poolKind, below, metadata.Name, data.Name)
	}
	return number, data, nil
}

// numbers returns MAJOR:MINOR of a device, as tables have it.
func numbers(d *dm.Device) string {
	return fmt.Sprintf("%d:%d", unix.Major(d.Number), unix.Minor(d.Number))
}

// running returns errdefs.ErrUnavailable if a thin volume, or a device of its thin pool, is suspended: I/O would hold up the caller, who has lvm2's lock,
// and so all of lvm2.
func (p *pool) running(volume string) error {
	thin := p.device(p.location.Thin)
	for _, name := range []string{volume, thin + "-tpool", thin + "_tdata", thin + "_tmeta"} {
		d, err := dm.Find(name)
		if err != nil {
			return err
		}
		if d == nil || d.Suspended {
			return fmt.Errorf("%w: device %s is suspended, or gone; if no command of lvm2 is at work: dmsetup resume %s", errdefs.ErrUnavailable, name, name)
		}
	}
	return nil
}

// unchanged returns errdefs.ErrBusy unless the thin pool still has the snapshot of the metadata that was seen, no snapshot of a volume was made since, and
// it takes changes.
func (p *pool) unchanged(metadata string, seen view) error {
	use, there, err := p.thinNow() // it has the thin pool commit
	if err != nil {
		return err
	}
	now, err := current(metadata)
	if err != nil {
		return err
	}
	if !there || use.failed() || now != seen || seen.behind != 0 {
		return fmt.Errorf("%w: somebody worked on the thin pool meanwhile; nothing was overwritten: try again", errdefs.ErrBusy)
	}
	return nil
}

// lockGroup takes lvm2's own lock of the group (lib/misc/lvm-flock.c): no command runs in the group, of whomever, until release is called. The caller has
// the turn, and runs no command meanwhile.
func (p *pool) lockGroup(ctx context.Context) (release func(), err error) {
	path := lockDirectory + "/V_" + p.location.Group
	for {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o700)
		if err == nil {
			err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		}
		var is, named unix.Stat_t
		if err == nil {
			err = unix.Fstat(int(f.Fd()), &is)
		}
		if err == nil {
			err = unix.Stat(path, &named)
		}
		if err == nil && is.Ino == named.Ino && is.Dev == named.Dev { // whoever let go of the lock may have removed the file
			return func() { _ = f.Close() }, nil
		}
		_ = f.Close() // of no harm if it is nil
		if err != nil && !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.ENOENT) {
			return nil, fmt.Errorf("lock volume group %s: %w", p.location.Group, errdefs.FromErrno(err))
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for lvm2's lock of volume group %s (%s): %w", p.location.Group, path, ctx.Err())
		case <-time.After(held.Pause):
		}
	}
}

// same returns errdefs.ErrUnsupported unless a piece has the same bytes on the volume and on the data device.
func same(volume, data *os.File, at piece) error {
	memory, free, err := direct.Memory(2 * blockdev.HeadSize)
	if err != nil {
		return err
	}
	defer free()
	want, have := memory[:at.length], memory[blockdev.HeadSize:][:at.length]
	_, err = volume.ReadAt(want, at.logical)
	if err == nil {
		_, err = data.ReadAt(have, at.at)
	}
	if err != nil {
		return fmt.Errorf("read byte %d of %s, and byte %d of %s: %w", at.logical, volume.Name(), at.at, data.Name(), errdefs.FromErrno(err))
	}
	if !bytes.Equal(want, have) {
		return fmt.Errorf("%w: byte %d of %s is not at byte %d of %s, where the thin pool's metadata says that it is; nothing was overwritten",
			errdefs.ErrUnsupported, at.logical, volume.Name(), at.at, data.Name())
	}
	return nil
}

// overwrite writes zeros over pieces of a device, durably. It does not ask the disk to zero them, as a disk may then keep the bytes.
func overwrite(ctx context.Context, f *os.File, pieces ...piece) error {
	zeros, free, err := direct.Memory(copyBlock)
	if err != nil {
		return err
	}
	defer free()
	for _, at := range pieces {
		for done := int64(0); done < at.length; done += copyBlock {
			if err := ctx.Err(); err != nil {
				return err
			}
			if _, err := f.WriteAt(zeros[:min(copyBlock, at.length-done)], at.at+done); err != nil {
				return fmt.Errorf("overwrite %s at byte %d: %w", f.Name(), at.at+done, errdefs.FromErrno(err))
			}
		}
	}
	if err := f.Sync(); err != nil {
		return fmt.Errorf("sync %s: %w", f.Name(), errdefs.FromErrno(err))
	}
	return nil
}

// eraseCut overwrites what a cut keeps of the first HeadSize bytes of its origin: the bytes that were there before a write.
func (p *pool) eraseCut(ctx context.Context, volume string) error {
	_, err := p.activate(ctx, volume)
	if errors.Is(err, lvm2.ErrNoLV) {
		return nil
	}
	var d *dm.Device
	if err == nil {
		d, err = p.own(p.device(volume) + "-cow")
	}
	if err == nil && d == nil {
		err = fmt.Errorf("%w: there is no device of what %s keeps", errdefs.ErrUnavailable, p.path(volume))
	}
	if err != nil {
		return err
	}
	store, err := dm.Open(d, os.O_RDWR|unix.O_DIRECT)
	if err != nil {
		return err
	}
	defer store.Close()
	pieces, err := kept(store, blockdev.HeadSize)
	if err != nil {
		return err
	}
	return overwrite(ctx, store, pieces...)
}

// The store of a snapshot of lvm2's (drivers/md/dm-snap-persistent.c), in chunks of the size that makeCut asks for. It has a header, and then areas. An
// area is a chunk of pairs, each with a chunk of the origin and the chunk of the store that has its bytes, and then those chunks. The first pair of zeros
// is the end.
const (
	cutChunk = 64 << 10
	cutMagic = 0x70416e53
)

// kept returns the pieces of a store that have earlier bytes of the first size bytes of the origin. errdefs.ErrUnsupported if it is no such store.
func kept(store *os.File, size int64) (pieces []piece, err error) {
	chunk, free, err := direct.Memory(cutChunk)
	if err != nil {
		return nil, err
	}
	defer free()
	read := func(at int64) error {
		if _, err := store.ReadAt(chunk, at*cutChunk); err != nil {
			return fmt.Errorf("read chunk %d of %s: %w", at, store.Name(), errdefs.FromErrno(err))
		}
		return nil
	}
	if err := read(0); err != nil {
		return nil, err
	}
	if binary.LittleEndian.Uint32(chunk) != cutMagic || binary.LittleEndian.Uint32(chunk[12:]) != cutChunk/512 {
		return nil, fmt.Errorf("%w: %s is no store of a snapshot that this driver knows", errdefs.ErrUnsupported, store.Name())
	}
	const pairs = cutChunk / 16
	for area := int64(1); ; area += pairs + 1 {
		if err := read(area); err != nil {
			return nil, err
		}
		for pair := chunk; len(pair) > 0; pair = pair[16:] {
			of, at := int64(binary.LittleEndian.Uint64(pair)), int64(binary.LittleEndian.Uint64(pair[8:]))
			if at == 0 {
				return pieces, nil
			}
			if of < size/cutChunk {
				pieces = append(pieces, piece{of * cutChunk, at * cutChunk, cutChunk})
			}
		}
	}
}
