package filepool

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/layout"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// btrfs writes what is overwritten to a new place, and keeps the whole old extent while any
// block of it is still in use: a file may so take many times its size. Only a file with the
// attribute C (chattr(1)) is written in place, without checksums or compression; it can be
// given to empty files, and is inherited from the folder. Two things remain:
//
//   - Blocks that two files share (FICLONE) are copied at the first write after. The account
//     counts both files in full, so the space for that is there.
//   - Holes that are punched into an extent free nothing as long as a block of it is left, and
//     take new space when they are written. So devices over files on btrfs take no discards
//     (attach).
const (
	attributeInPlace  = 0x00800000 // FS_NOCOW_FL, include/uapi/linux/fs.h
	attributeCompress = 0x00000004 // FS_COMPR_FL; excludes the other
)

// inPlace reports whether a file is written in place: always, but on btrfs.
func (p *pool) inPlace(f *os.File) (bool, error) {
	if p.kind != unix.BTRFS_SUPER_MAGIC {
		return true, nil
	}
	attributes, err := unix.IoctlGetUint32(int(f.Fd()), unix.FS_IOC_GETFLAGS)
	if err != nil {
		return false, fmt.Errorf("read the attributes of %s: %w", f.Name(), errdefs.FromErrno(err))
	}
	return attributes&attributeInPlace != 0, nil
}

// makeInPlace lets an empty file, or what is made in a folder from now on, be written in place.
// errdefs.ErrUnsupported where btrfs cannot do that (on zoned disks).
func (p *pool) makeInPlace(f *os.File) error {
	done, err := p.inPlace(f)
	if done || err != nil {
		return err
	}
	attributes, err := unix.IoctlGetUint32(int(f.Fd()), unix.FS_IOC_GETFLAGS)
	if err == nil {
		err = unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, int(attributes&^attributeCompress|attributeInPlace))
	}
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EPERM) {
		return fmt.Errorf("%w: btrfs does not write %s in place (chattr +C): %w", errdefs.ErrUnsupported, f.Name(), err)
	}
	if err != nil {
		return fmt.Errorf("set the attributes of %s: %w", f.Name(), errdefs.FromErrno(err))
	}
	if done, err = p.inPlace(f); err == nil && !done {
		err = fmt.Errorf("%w: btrfs did not take the attribute C (chattr +C) for %s", errdefs.ErrUnsupported, f.Name())
	}
	return err
}

// freshRecord is the end of the name of a record that is being made anew.
const freshRecord = ".new"

// prepareInPlace has new images and records written in place, and makes those records anew
// that are not: a change of a record, and so each deletion, must not need space. What cannot
// be done is left for the next start.
func (p *pool) prepareInPlace(ctx context.Context) error {
	if p.kind != unix.BTRFS_SUPER_MAGIC {
		return nil
	}
	for _, folder := range p.folders {
		if err := p.makeInPlace(folder); err != nil {
			return err
		}
	}
	for ref, o := range p.Objects {
		image, err := layout.Open(p.root, layout.Image(ref))
		if err == nil {
			inPlace, failure := p.inPlace(image)
			o.copying, err = !inPlace && failure == nil, errors.Join(failure, image.Close())
		}
		if err == nil || errors.Is(err, fs.ErrNotExist) {
			err = p.moveRecord(layout.Record(ref))
		}
		if err != nil {
			klog.FromContext(ctx).Error(err, "could not have a record written in place; the next start tries again", "pool", p.name, "object", ref.String())
		}
	}
	return nil
}

// moveRecord makes a record that is written in place of one that is not.
func (p *pool) moveRecord(path string) error {
	old, err := p.root.Open(path)
	if err != nil {
		return errdefs.FromErrno(err)
	}
	defer old.Close()
	if done, err := p.inPlace(old); done || err != nil {
		return err
	}
	slots, err := io.ReadAll(old)
	if err != nil {
		return errdefs.FromErrno(err)
	}
	fresh := path + freshRecord
	if err := p.root.Remove(fresh); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return errdefs.FromErrno(err)
	}
	f, err := p.root.OpenFile(fresh, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return errdefs.FromErrno(err)
	}
	_, err = f.Write(slots)
	if err = errdefs.FromErrno(errors.Join(err, f.Sync(), f.Close())); err == nil {
		err = errdefs.FromErrno(p.root.Rename(fresh, path))
	}
	if err != nil {
		return errors.Join(err, p.root.Remove(fresh))
	}
	return nil
}
