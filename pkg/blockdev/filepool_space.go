package blockdev

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// space is the account of a file pool. What may be promised is
//
//	(what is free below + what our images take already - the reserve) * overprovision
//
// and what is promised is the full size of every volume and snapshot. Both are
// looked at and changed in one step, so nothing is promised twice.
type space struct {
	promised  int64     // sum of the sizes of all objects; guarded by filePool.mu
	allocated int64     // sum of objects' allocated; guarded by filePool.mu
	measured  time.Time // when allocated was last measured; guarded by filePool.mu
	usable    int64     // the least of free plus allocated since then; guarded by filePool.mu

	// unfinished are objects whose copy was cut short and waits for a retry, or whose
	// removal was and waits for the next try; guarded by filePool.mu.
	unfinished map[Ref]bool

	// step makes looking and promising one step.
	step sync.Mutex
	// allocating is held for reading while an image takes its blocks, and for writing
	// to see a state in which none does.
	allocating sync.RWMutex
}

// measureEvery bounds how old the measure of growing images may be.
const measureEvery = 5 * time.Second

// entangled returns a test for whether the image of an object may share blocks with
// another: it was copied, or was copied from. With a link of a chain of copies gone,
// nobody knows what shares with what. The caller holds mu.
func (p *filePool) entangled() func(o *object) bool {
	if !p.reflink {
		return func(*object) bool { return false }
	}
	origins, all := map[string]bool{}, false
	for _, o := range p.objects {
		if o.stored.Origin != "" {
			origins[o.stored.Origin] = true
			all = all || p.objects[o.stored.decoded.Origin] == nil
		}
	}
	return func(o *object) bool {
		return all || o.stored.Origin != "" || origins[o.stored.decoded.Ref.String()]
	}
}

// measure brings space.allocated up to date: the blocks of all images (thin ones
// grow, discards shrink any), where blocks that are shared count once.
func (p *filePool) measure() error {
	p.mu.Lock()
	entangled := p.entangled()
	type item struct {
		ref    Ref
		o      *object
		shares bool
	}
	var items []item
	for ref, o := range p.objects {
		items = append(items, item{ref, o, entangled(o)})
	}
	p.mu.Unlock()

	allocated := make([]int64, len(items))
	seen := &extentSet{}
	for i, it := range items {
		var err error
		if it.shares {
			allocated[i], err = seen.add(p.root, imagePath(it.ref))
		} else {
			allocated[i], err = p.blocksOf(it.ref)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}

	p.mu.Lock()
	defer p.mu.Unlock()
	for i, it := range items {
		if p.objects[it.ref] == it.o {
			p.space.allocated += allocated[i] - it.o.allocated
			it.o.allocated = allocated[i]
		}
	}
	p.space.measured = time.Now()
	return nil
}

// blocksOf returns the bytes that an image takes of the filesystem.
func (p *filePool) blocksOf(ref Ref) (int64, error) {
	info, err := p.root.Stat(imagePath(ref))
	if err != nil {
		return 0, systemError(err)
	}
	return info.Sys().(*syscall.Stat_t).Blocks * 512, nil
}

// account notes what the image of o takes now.
func (p *filePool) account(o *object) error {
	ref := o.stored.decoded.Ref
	allocated, err := p.blocksOf(ref)
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.entangled()(o) {
		p.space.measured = time.Time{}
		return nil
	}
	p.space.allocated += allocated - o.allocated
	o.allocated = allocated
	return nil
}

// statfs returns the size of the filesystem and what is free of it, in bytes.
func (p *filePool) statfs() (total, free int64, err error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(p.lock.Fd()), &st); err != nil {
		return 0, 0, fmt.Errorf("%w: pool %s at %s: %w", ErrUnavailable, p.name, p.location.Path, err)
	}
	return int64(st.Blocks) * st.Frsize, int64(st.Bavail) * st.Frsize, nil
}

// capacity looks at the account. exact waits for images that are taking their
// blocks and measures anew; otherwise the answer is cheap and never too high.
func (p *filePool) capacity(exact bool) (Capacity, error) {
	if exact {
		p.space.allocating.Lock()
		defer p.space.allocating.Unlock()
	}
	p.mu.Lock()
	stale := exact || time.Since(p.space.measured) > measureEvery
	p.mu.Unlock()
	if stale {
		if err := p.measure(); err != nil {
			return Capacity{}, err
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	size, free, err := p.statfs()
	if err != nil {
		return Capacity{}, err
	}
	// Images that shrink (discards) give nothing that may be promised: until the next
	// measure, what is free plus what they took at the last one would count it twice.
	if usable := free + p.space.allocated; stale || usable < p.space.usable {
		p.space.usable = usable
	}
	usable := p.space.usable - int64(float64(size)*p.location.ReservePercent/100)
	c := Capacity{Total: max(0, int64(float64(usable)*p.location.Overprovision)), Promised: p.space.promised, MinVolume: Granularity}
	c.Available = max(0, c.Total-c.Promised) / Granularity * Granularity
	c.MaxVolume = min(c.Available, MaxSize)
	return c, nil
}

// reserve promises n more bytes, or fails with ErrNoSpace. The caller inserts the
// object (or the larger size) that accounts for them within promise.
func (p *filePool) reserve(n int64, promise func() error) error {
	p.space.step.Lock()
	defer p.space.step.Unlock()
	c, err := p.capacity(false)
	if err == nil && n > c.Available {
		c, err = p.capacity(true)
	}
	if err != nil {
		return err
	}
	if n > c.Available {
		return fmt.Errorf("%w: pool %s can promise %d more bytes, %d are needed; delete volumes or snapshots, or give it more room", ErrNoSpace, p.name, c.Available, n)
	}
	return promise()
}

func (p *filePool) Capacity(ctx context.Context) (Capacity, error) {
	if err := p.alive(); err != nil {
		return Capacity{}, err
	}
	p.sweepAbandoned(ctx)
	return p.capacity(false)
}
