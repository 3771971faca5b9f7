package filepool

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/layout"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// space is the account of a file pool. What may be promised is
//
//	(what is free below + what our images take already - the reserve) * overprovision
//
// and what is promised is the full size of every volume and snapshot. Both are looked at and changed in one step, so nothing is promised twice.
//
// What images take is never counted too high. For an image that shares no blocks it is what stat(2) says, looked at every few seconds. Blocks that images
// share count once, and only a survey of all extents finds them. That may take long: so it is made in the background, and only a call that would be
// refused waits for it. Until then an image that shares blocks counts with the blocks of its own that it had when it was made, or at the last survey.
type space struct {
	promised  int64     // sum of the sizes of all objects; guarded by pool.Mu
	allocated int64     // sum of what is counted of each image; guarded by pool.Mu
	measured  time.Time // when images were last looked at; guarded by pool.Mu
	usable    int64     // the lowest sum of free and allocated since measured; guarded by pool.Mu

	// step is held from the look at the account until the space is promised.
	step sync.Mutex
	// allocating is held for reading while an image takes its blocks. Held for writing, it shows a state in which none does.
	allocating sync.RWMutex

	survey survey
}

// use is what an image takes of its filesystem, in bytes; guarded by pool.Mu.
type use struct {
	counted int64 // in the account; never more than it takes, without blocks that another image is counted with
	blocks  int64 // the least that stat(2) said since counted was set
	shared  bool  // it was copied, or was copied from: it may share blocks with another
	copying bool  // btrfs writes the image to new places (an older driver made it)
	// The ctime of its inode, now and at the last survey: if they are equal, it has the same blocks.
	changed, surveyed unix.Timespec
	extents, surveys  int // extents at the last survey; number of surveys of it
}

// measureEvery bounds how old a look at the images may be.
const measureEvery = 5 * time.Second

// entangled returns a test for whether the image of an object may share blocks with another one: it is a copy, or the origin of one. If the origin of any
// copy is gone, nobody knows which images share blocks, and it is true for all. The caller holds Mu.
func (p *pool) entangled() func(o *object) bool {
	if !p.reflink {
		return func(*object) bool { return false }
	}
	origins, all := map[blockdev.Ref]bool{}, false
	for _, o := range p.Objects {
		if origin := o.Origin(); origin != (blockdev.Ref{}) {
			origins[origin] = true
			all = all || p.Objects[origin] == nil
		}
	}
	return func(o *object) bool {
		// Of an image that btrfs writes to new places, and may compress, stat(2) reports too little.
		return all || o.use.copying || o.Origin() != (blockdev.Ref{}) || origins[o.Ref()]
	}
}

// measureImages brings the account up to date by stat(2), without a lock over the looks: images that are made or removed meanwhile are taken as they are
// found.
func (p *pool) measureImages() error {
	p.Mu.Lock()
	objects := make(map[blockdev.Ref]*object, len(p.Objects))
	for ref, o := range p.Objects {
		objects[ref] = o
	}
	p.Mu.Unlock()
	found := make(map[blockdev.Ref]unix.Stat_t, len(objects))
	for ref := range objects {
		st, err := p.statImage(ref)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		found[ref] = st
	}
	p.Mu.Lock()
	defer p.Mu.Unlock()
	entangled := p.entangled()
	for ref, o := range objects {
		if p.Objects[ref] == o {
			p.countImage(o, found[ref], entangled(o))
		}
	}
	p.space.measured = time.Now()
	return nil
}

// countImage counts what an image takes, by what stat(2) says of it. shared is as of entangled. The caller holds Mu.
func (p *pool) countImage(o *object, st unix.Stat_t, shared bool) {
	blocks := st.Blocks * 512
	o.use.shared, o.use.changed = shared, st.Ctim
	if shared {
		p.count(o, max(0, o.use.counted-max(0, o.use.blocks-blocks))) // the blocks that it lost may all have been counted
		o.use.blocks = min(o.use.blocks, blocks)
		p.space.survey.stale = p.space.survey.stale || o.use.changed != o.use.surveyed
		return
	}
	p.count(o, blocks)
	o.use.blocks = blocks
}

// count sets what is counted of an image. The caller holds Mu.
func (p *pool) count(o *object, bytes int64) {
	p.space.allocated += bytes - o.use.counted
	o.use.counted = bytes
}

// statImage returns the blocks and the ctime of an object's image. The error may be fs.ErrNotExist.
func (p *pool) statImage(ref blockdev.Ref) (unix.Stat_t, error) {
	info, err := p.root.Stat(layout.Image(ref))
	if err != nil {
		return unix.Stat_t{}, errdefs.FromErrno(err)
	}
	st := info.Sys().(*syscall.Stat_t)
	return unix.Stat_t{Blocks: st.Blocks, Ctim: unix.Timespec(st.Ctim)}, nil
}

// countAllocated calls run, by which an image gets blocks of its own, and counts them.
func (p *pool) countAllocated(o *object, image *os.File, run func() error) error {
	p.Mu.Lock()
	surveys := o.use.surveys
	p.Mu.Unlock()
	var before, after unix.Stat_t
	fd := int(image.Fd())
	err := errors.Join(unix.Fstat(fd, &before), run(), unix.Fstat(fd, &after))
	p.Mu.Lock()
	defer p.Mu.Unlock()
	blocks := after.Blocks * 512
	switch {
	case !o.use.shared:
		p.count(o, blocks)
	case o.use.surveys == surveys: // else a survey has counted them
		p.count(o, o.use.counted+max(0, blocks-before.Blocks*512))
	}
	o.use.blocks = blocks
	return err
}

// statfs returns the size of the filesystem and what is free of it, in bytes.
func (p *pool) statfs() (total, free int64, err error) {
	given, err := p.given()
	var st unix.Statfs_t
	if err == nil {
		err = unix.Fstatfs(int(p.lock.Fd()), &st)
	}
	if err != nil {
		return 0, 0, fmt.Errorf("%w: pool %s at %s: %w", errdefs.ErrUnavailable, p.name, p.location.Path, err)
	}
	return int64(st.Blocks) * st.Frsize, max(0, int64(st.Bavail)*st.Frsize-given), nil
}

// capacity returns the account. With exact it waits for images that are taking their blocks, and looks at all images anew; otherwise it is cheap. What it
// returns as Available is never too high.
func (p *pool) capacity(exact bool) (blockdev.Capacity, error) {
	if exact {
		p.space.allocating.Lock()
		defer p.space.allocating.Unlock()
	}
	p.Mu.Lock()
	stale := exact || time.Since(p.space.measured) > measureEvery
	p.Mu.Unlock()
	least := int64(math.MaxInt64)
	if stale {
		// What is free is read before the images are looked at, and again after that; the lower one counts. Otherwise blocks would count twice that an image
		// gives back (by a discard) after its look, or takes before it.
		var err error
		if _, least, err = p.statfs(); err == nil {
			err = p.measureImages()
		}
		if err != nil {
			return blockdev.Capacity{}, err
		}
	}
	p.Mu.Lock()
	defer p.Mu.Unlock()
	size, free, err := p.statfs()
	if err != nil {
		return blockdev.Capacity{}, err
	}
	free = min(free, least)
	// Images that shrink (by discards) raise nothing before the next look: their blocks are free already, and are still in allocated.
	if usable := free + p.space.allocated; stale || usable < p.space.usable {
		p.space.usable = usable
	}
	usable := p.space.usable - int64(float64(size)*p.location.ReservePercent/100)
	c := blockdev.Capacity{Total: max(0, int64(float64(usable)*p.location.Overprovision)), Promised: p.space.promised, Used: p.space.allocated, MinVolume: blockdev.Granularity}
	c.Available = max(0, c.Total-c.Promised) / blockdev.Granularity * blockdev.Granularity
	c.MaxVolume = min(c.Available, blockdev.MaxSize)
	return c, nil
}

// reserve promises n more bytes: promise is called with the step held, to insert the object or the larger size. errdefs.ErrNoSpace, without that, if there
// are not as many; it waits for a survey first.
func (p *pool) reserve(ctx context.Context, n int64, promise func() error) error {
	short, err := p.tryReserve(n, promise)
	if short == nil {
		return err
	}
	if worth, err := p.surveyed(ctx); err != nil {
		return fmt.Errorf("find out what is shared in pool %s: %w", p.name, err)
	} else if worth {
		if short, err = p.tryReserve(n, promise); short == nil {
			return err
		}
	}
	return short
}

// tryReserve is reserve without a survey. short is the errdefs.ErrNoSpace.
func (p *pool) tryReserve(n int64, promise func() error) (short, err error) {
	p.space.step.Lock()
	defer p.space.step.Unlock()
	c, err := p.capacity(false)
	if err == nil && n > c.Available {
		c, err = p.capacity(true)
	}
	if err != nil {
		return nil, err
	}
	if n > c.Available {
		return fmt.Errorf("%w: pool %s can promise %d more bytes, %d are needed; delete volumes or snapshots, or give it more room", errdefs.ErrNoSpace, p.name, c.Available, n), nil
	}
	return nil, promise()
}

func (p *pool) Capacity(ctx context.Context) (blockdev.Capacity, error) {
	if err := p.alive(); err != nil {
		return blockdev.Capacity{}, err
	}
	changes := p.takesChanges(ctx)
	if changes != nil && ctx.Err() != nil {
		return blockdev.Capacity{}, changes
	}
	if changes == nil {
		p.sweep(ctx)
	}
	c, err := p.capacity(false)
	if err == nil && p.surveySoon(ctx) {
		c, err = p.capacity(false)
	}
	if err == nil && (changes != nil || p.checkInodes() != nil) { // no error: whoever places volumes would go on with what was said before
		c.Available, c.MaxVolume = 0, 0
	}
	return c, err
}
