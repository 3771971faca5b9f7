package lvmpool

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/direct"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lvm2"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Erase: see blockdev.Pool.
func (p *pool) Erase(ctx context.Context, ref blockdev.Ref) error {
	return p.delete(ctx, ref, true)
}

// erase overwrites the beginning of an object on the disks.
func (p *pool) erase(ctx context.Context, o *logical) error {
	ref := o.Record.Ref
	d, err := p.activate(ctx, ref.String())
	if errors.Is(err, lvm2.ErrNoLV) {
		return nil
	}
	if err != nil {
		return err
	}
	device, err := dm.Open(d, os.O_RDWR|unix.O_DIRECT)
	if !d.Deferred { // from here on it goes with the driver
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
		err = p.eraseThin(ctx, ref, device, size)
	}
	if device != nil {
		err = errors.Join(err, device.Close())
	}
	return err
}

// piece is where bytes of a thin volume are on the data device of its thin pool.
type piece struct{ logical, at, length int64 }

// eraseThin overwrites the blocks of a thin volume where they are, on the data device of the thin pool. To write to the volume is not
// enough: of a volume that a snapshot was ever made of, or that is one, the thin pool gives each write a new block, and leaves the old one
// as it is, also when nobody else has it any more. And it needs no space, so that a full thin pool is no worse.
//
// The snapshot of the metadata says which blocks no other volume has, and keeps the thin pool from giving them to another one, whatever happens
// meanwhile. No other one gets to share them, as nobody else works on this volume. Nothing is overwritten that does not read as the volume does.
func (p *pool) eraseThin(ctx context.Context, ref blockdev.Ref, volume *os.File, size int64) error {
	number, err := p.thinID(ctx, ref)
	if err != nil {
		return err
	}
	d, err := p.own(p.device(p.location.Thin) + "_tdata")
	if err == nil && d == nil {
		err = fmt.Errorf("%w: the thin pool has no device of its data", errdefs.ErrUnavailable)
	}
	if err != nil {
		return err
	}
	data, err := dm.Open(d, os.O_RDWR|unix.O_DIRECT)
	if err != nil {
		return err
	}
	defer data.Close()
	return p.withMetadata(ctx, func(metadata string) error {
		pieces, err := alone(metadata, number, size)
		if err != nil {
			return err
		}
		for _, at := range pieces {
			if err := same(volume, data, at); err != nil {
				return err
			}
		}
		return overwrite(ctx, data, pieces...)
	})
}

// same makes sure that what is on the data device is what the volume reads.
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

// overwrite writes zeros, durably. A disk that is told that a range is zeros may keep what is there, so they are written.
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

// eraseCut overwrites what a cut has kept of the beginning of its origin: what was there before it was written to.
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

// The store of a snapshot of lvm2's (drivers/md/dm-snap-persistent.c), in chunks as they are asked for in makeCut: a header, and then areas. Each is a
// chunk of pairs, which chunk of the origin is in which one here, and those that it tells of; the first pair of zeros is the end.
const (
	cutChunk = 64 << 10
	cutMagic = 0x70416e53
)

// kept returns where a store has what the first bytes of the origin were.
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
