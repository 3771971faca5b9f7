// Package directory finds, makes and locks the directory of a file pool.
package directory

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/fsync"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/identity"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/layout"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/mountpoint"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/held"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Whether a directory without a pool becomes one.
const (
	// Never: no directory becomes a pool; a missing pool is waited for.
	Never = 0
	// Always: any directory becomes a pool.
	Always = 1
	// Auto: a directory that is not there is made, and the root of an empty filesystem becomes a pool. No other directory does, as an empty one may be the
	// mount point of a disk that is not mounted.
	Auto = -1
)

// Place is where the directory of a pool is, or is to be made. Create is Never, Always or Auto.
type Place struct {
	Path   string // absolute and clean
	Create float64
}

// LockFile is the file that the process that uses the pool has locked.
const LockFile = "lock"

// makePool makes a directory an empty pool.
func makePool(root *os.Root, id string) error {
	for _, dir := range layout.Directories {
		if err := root.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return errdefs.FromErrno(err)
		}
	}
	if err := layout.Sync(root); err != nil {
		return err
	}
	return identity.Write(root, id)
}

// Open opens the directory of a pool. If there is no pool, it makes one if it may: see mayBegin. id is empty for a pool that has no identity yet; whole is
// false if the file of the identity has to be written anew. errdefs.ErrUnavailable if there is no pool, or another one than is known.
func (p Place) Open(ctx context.Context, known blockdev.Known) (root *os.Root, id string, whole bool, err error) {
	defer func() {
		if err != nil && root != nil {
			err = errors.Join(err, root.Close())
			root = nil
		}
	}()
	root, err = os.OpenRoot(p.Path)
	if err == nil {
		id, whole, err = identity.Read(root)
	}
	switch {
	case err == nil, errors.Is(err, identity.ErrNameless):
		return root, id, whole, blockdev.Expect(ctx, known, id)
	case errors.Is(err, fs.ErrNotExist):
		if err := p.mayBegin(ctx, known, checkMissing); err != nil {
			return nil, "", false, err
		}
		root, id, err = makeDirectory(p.Path)
		return root, id, true, err
	case errors.Is(err, identity.ErrNoPool):
		if err := p.mayBegin(ctx, known, checkEmpty); err != nil {
			return root, "", false, err
		}
		id = identity.New()
		return root, id, true, beginIn(root, id)
	}
	if info, statErr := os.Stat(p.Path); root == nil && statErr == nil && !info.IsDir() {
		return nil, "", false, fmt.Errorf("%w: it is no directory: %w", errdefs.ErrInvalid, err)
	}
	return root, "", false, errdefs.FromErrno(err)
}

// mayBegin returns an error if no pool may be made here. With known, that decides. Without it check does, which looks at the path.
func (p Place) mayBegin(ctx context.Context, known blockdev.Known, check func(path string) error) error {
	if p.Create == Never {
		return fmt.Errorf("%w, and create=0 says to make none; is its disk mounted?", identity.ErrNoPool)
	}
	if known != nil {
		switch id, err := known(ctx); {
		case err != nil:
			return fmt.Errorf("%w, and whether there was one cannot be told: %w", identity.ErrNoPool, err)
		case id != "":
			return fmt.Errorf("%w, and there was one, with the identity %s: is its disk mounted?", identity.ErrNoPool, id)
		}
		return nil
	}
	if p.Create == Always {
		return nil
	}
	return check(p.Path)
}

// checkEmpty returns an error unless a directory without a pool is empty, and the root of a filesystem.
func checkEmpty(path string) error {
	empty, err := isEmpty(path)
	if err != nil {
		return err
	}
	if !empty {
		return fmt.Errorf("%w in %s, but something else; say create=1 if it is to become a pool all the same", identity.ErrNoPool, path)
	}
	if root, err := mountpoint.IsFilesystem(path); err != nil || root {
		return err
	}
	return fmt.Errorf("%w: %s is empty, as if it were the place of a disk that is not mounted; mount it, or remove the directory, or say create=1 if it is to become a pool", identity.ErrNoPool, path)
}

// checkMissing returns an error if the parent of a path, at which nothing is, looks as if a disk were missing.
func checkMissing(path string) error {
	if info, err := os.Lstat(path); err == nil && info.Mode()&fs.ModeSymlink != 0 {
		return fmt.Errorf("%w: %s is a link to where nothing is; is its disk mounted?", identity.ErrNoPool, path)
	}
	parent := filepath.Dir(path)
	if _, err := os.Stat(parent); err != nil {
		return fmt.Errorf("%w at %s, nor a directory to make it in: %w; is its disk mounted? If so, make %s", identity.ErrNoPool, path, err, parent)
	}
	empty, err := isEmpty(parent)
	if err != nil || !empty {
		return err
	}
	if root, err := mountpoint.IsFilesystem(parent); err != nil || root {
		return err
	}
	return fmt.Errorf("%w: %s is empty, as if it were the place of a disk that is not mounted; mount it, or say create=1 if %s is to become a pool", identity.ErrNoPool, parent, path)
}

// isEmpty reports whether a directory has nothing in it but what mkfs leaves, or an unfinished makePool.
func isEmpty(path string) (bool, error) {
	entries, err := os.ReadDir(path)
	if err != nil {
		return false, errdefs.FromErrno(err)
	}
	return !slices.ContainsFunc(entries, func(e fs.DirEntry) bool {
		if slices.Contains(slices.Collect(maps.Values(layout.Directories)), e.Name()) {
			below, err := os.ReadDir(filepath.Join(path, e.Name()))
			return err != nil || len(below) > 0
		}
		return !slices.Contains([]string{"lost+found", LockFile, identity.File + ".new"}, e.Name())
	}), nil
}

// makeDirectory makes a directory that is a pool from its first moment on.
func makeDirectory(path string) (root *os.Root, id string, err error) {
	begun := filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".new-pool")
	if err := os.Mkdir(begun, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, "", errdefs.FromErrno(err)
	}
	if root, err = os.OpenRoot(begun); err != nil {
		return nil, "", errdefs.FromErrno(err)
	}
	id = identity.New()
	err = makePool(root, id)
	if err == nil {
		err = os.Rename(begun, path)
	}
	if err = errors.Join(err, root.Close()); err != nil {
		return nil, "", errdefs.FromErrno(err)
	}
	if err = fsync.AndClose(os.Open(filepath.Dir(path))); err == nil {
		root, err = os.OpenRoot(path) // errors then have this path
	}
	if err != nil {
		return nil, "", errdefs.FromErrno(err)
	}
	return root, id, nil
}

// beginIn makes an existing directory a pool. errdefs.ErrInUse if another process does so just now.
func beginIn(root *os.Root, id string) error {
	lock, err := Lock(root)
	if err != nil {
		return err
	}
	defer lock.Close()
	if have, _, err := identity.Read(root); !errors.Is(err, identity.ErrNoPool) {
		return errors.Join(fmt.Errorf("%w: another process makes it the pool %s", errdefs.ErrInUse, have), err)
	}
	return makePool(root, id)
}

// Part opens a directory of a pool. errdefs.ErrUnavailable if something is mounted there that hides what the pool has: it does not go with the pool's filesystem.
func Part(root *os.Root, name string) (*os.File, error) {
	f, err := root.Open(name)
	if err != nil {
		return nil, errdefs.FromErrno(err)
	}
	if err := checkHidden(root, f, name); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func checkHidden(root *os.Root, part *os.File, name string) error {
	parent, err := root.Open(".")
	if err != nil {
		return errdefs.FromErrno(err)
	}
	defer parent.Close()
	over, err := mountpoint.Over(parent, part, name)
	if err != nil || over == "" {
		return err
	}
	return fmt.Errorf("%w: %s is mounted at %s, and hides what the pool has there; unmount it (umount %s), or, if the pool's volumes are on it, have all of the pool on one filesystem: then they can be counted",
		errdefs.ErrUnavailable, over, part.Name(), part.Name())
}

// Lock locks the pool against other processes, until the file is closed. errdefs.ErrInUse if another one has the lock.
func Lock(root *os.Root) (*os.File, error) {
	lock, err := root.OpenFile(LockFile, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, errdefs.FromErrno(err)
	}
	if err := Exclusive(lock); err != nil {
		lock.Close()
		return nil, err
	}
	return lock, nil
}

// Exclusive locks a file or a directory of a pool until it is closed. errdefs.ErrInUse if another process has the lock, and for longer than somebody who
// only looks whether there is one (driver doctor).
func Exclusive(f *os.File) error {
	err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	for try := 0; errors.Is(err, unix.EWOULDBLOCK) && try < held.Tries; try++ {
		time.Sleep(held.Pause)
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	}
	if errors.Is(err, unix.EWOULDBLOCK) {
		return fmt.Errorf("%w: another process uses this directory as a pool", errdefs.ErrInUse)
	}
	return errdefs.FromErrno(err)
}

// Free ends the lock of Exclusive, if there is one. To close the file is not enough: a child that was just forked, and has not executed another program
// yet, has it open as well.
func Free(f *os.File) error { return errdefs.FromErrno(unix.Flock(int(f.Fd()), unix.LOCK_UN)) }

// Identify returns the identity of the pool that is there, for people. If there is none, err is why none would be made; nil if one would. It changes
// nothing.
func (p Place) Identify(ctx context.Context) (id string, err error) {
	root, err := os.OpenRoot(p.Path)
	if errors.Is(err, fs.ErrNotExist) {
		return "", p.mayBegin(ctx, nil, checkMissing)
	}
	if err != nil {
		return "", errdefs.FromErrno(err)
	}
	defer root.Close()
	id, _, err = identity.Read(root)
	switch {
	case errors.Is(err, identity.ErrNameless):
		return "", nil
	case errors.Is(err, identity.ErrNoPool):
		return "", p.mayBegin(ctx, nil, checkEmpty)
	}
	return id, err
}
