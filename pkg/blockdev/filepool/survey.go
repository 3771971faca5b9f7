package filepool

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"slices"
	"sync"
	"time"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/fiemap"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/layout"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// survey finds out which blocks images share, of those that may share some (use.shared), by their extents (FIEMAP). The kernel takes up to 10 us for each
// extent, and an image that was written at random has one for every other block. So a survey runs in the background, one at a time, over a bounded number
// of extents, and only if something changed.
type survey struct {
	context context.Context // of the pool
	stop    context.CancelFunc
	work    sync.WaitGroup
	most    int // how many extents one survey looks at

	// Guarded by pool.Mu:
	running chan struct{} // closed at the end of the survey that runs; nil: none runs
	due     bool          // an object that may share blocks came or went
	stale   bool          // such an object was written to
	ended   time.Time     // of the last one
	took    time.Duration
	left    int   // images that the last one did not look at in full, as there were too many extents
	failure error // of the last one
}

const (
	// surveyExtents is how many extents a survey looks at.
	surveyExtents = 4 << 20
	// surveyPatience is how long a call waits for a survey that it can do without. After a survey that took longer than that, there is a pause of surveyPause
	// times as long as it took.
	surveyPatience = 200 * time.Millisecond
	surveyPause    = 50
)

func (s *survey) close() {
	s.stop()
	s.work.Wait()
}

// wanted reports whether a survey would find more than the last one, and may be made now. The caller holds pool.Mu.
func (s *survey) wanted() bool {
	since := time.Since(s.ended)
	if s.took > surveyPatience && since < surveyPause*s.took {
		return false
	}
	return s.due || (s.stale && since > measureEvery)
}

// surveySoon starts a survey if one is wanted, and waits for the one that runs, for surveyPatience at most. It reports whether one has ended meanwhile.
func (p *pool) surveySoon(ctx context.Context) bool {
	p.Mu.Lock()
	if p.space.survey.running == nil && p.space.survey.wanted() {
		p.startSurvey()
	}
	running := p.space.survey.running
	p.Mu.Unlock()
	if running == nil {
		return false
	}
	select {
	case <-running:
		return true
	case <-ctx.Done():
	case <-time.After(surveyPatience):
	}
	return false
}

// surveyed makes a survey that begins after this call, and waits for it. fresh is false if there is none: nothing changed since the last one, or that took
// long and has just been made.
func (p *pool) surveyed(ctx context.Context) (fresh bool, err error) {
	s := &p.space.survey
	for {
		p.Mu.Lock()
		running := s.running
		fresh = running == nil
		if fresh {
			if s.stale {
				s.due = true // a call that would be refused does not wait for measureEvery
			}
			if !s.wanted() {
				p.Mu.Unlock()
				return false, nil
			}
			p.startSurvey()
			running = s.running
		}
		p.Mu.Unlock()
		select {
		case <-running:
		case <-ctx.Done():
			return false, ctx.Err()
		}
		if fresh {
			p.Mu.Lock()
			err := s.failure
			p.Mu.Unlock()
			return true, err
		}
	}
}

// startSurvey starts a survey. The caller holds Mu.
func (p *pool) startSurvey() {
	s := &p.space.survey
	done, began := make(chan struct{}), time.Now()
	s.running, s.due, s.stale = done, false, false
	items := p.sharing()
	s.work.Go(func() {
		left, err := p.survey(s.context, items)
		p.Mu.Lock()
		defer p.Mu.Unlock()
		s.running, s.left, s.failure, s.took, s.ended = nil, left, err, time.Since(began), time.Now()
		s.due = s.due || err != nil
		p.space.measured = time.Time{}
		close(done)
	})
}

// sharer is an object that a survey looks at.
type sharer struct {
	ref blockdev.Ref
	o   *object
	use use
}

// pieces returns how many extents an image is expected to have. An image that was not surveyed yet has most-1: it comes after those that were, but before
// one that takes a whole survey.
func (u use) pieces(most int) int {
	if u.extents == 0 {
		return most - 1
	}
	return u.extents
}

// sharing returns the objects that a survey looks at, those with the fewest extents first. The caller holds Mu.
func (p *pool) sharing() []sharer {
	entangled, most := p.entangled(), p.space.survey.most
	var items []sharer
	for ref, o := range p.Objects {
		if entangled(o) {
			items = append(items, sharer{ref, o, o.use})
		}
	}
	slices.SortFunc(items, func(a, b sharer) int {
		return cmp.Or(cmp.Compare(a.use.pieces(most), b.use.pieces(most)), cmp.Compare(a.ref.Key, b.ref.Key))
	})
	return items
}

// survey counts for each object the blocks that no object before it has. Blocks beyond the number of extents are not counted, so less may be promised than
// there is. left is how many images were not looked at in full.
func (p *pool) survey(ctx context.Context, items []sharer) (left int, err error) {
	seen, budget := fiemap.NewBlocks(p.block), p.space.survey.most
	for i := range items {
		it := &items[i]
		if budget == 0 {
			it.use.counted, left = 0, left+1
			continue
		}
		st, err := p.statImage(it.ref)
		if err == nil {
			it.use.counted, it.use.extents, err = p.addImage(ctx, seen, it.ref, budget)
		}
		if errors.Is(err, fs.ErrNotExist) {
			it.use.counted, it.use.extents, err = 0, 0, nil
		}
		if err != nil {
			return 0, err
		}
		if it.use.extents >= budget {
			left++
		}
		budget = max(0, budget-it.use.extents)
		it.use.blocks, it.use.surveyed = st.Blocks*512, st.Ctim
	}
	p.Mu.Lock()
	defer p.Mu.Unlock()
	for _, it := range items {
		if p.Objects[it.ref] != it.o {
			continue // it was removed, and is not in the account any more
		}
		o := &it.o.use
		p.count(it.o, it.use.counted)
		o.blocks, o.surveyed, o.extents, o.surveys = it.use.blocks, it.use.surveyed, it.use.extents, o.surveys+1
	}
	return left, nil
}

// addImage adds the blocks of an object's image: see fiemap.Blocks.AddFile.
func (p *pool) addImage(ctx context.Context, seen *fiemap.Blocks, ref blockdev.Ref, most int) (fresh int64, extents int, err error) {
	f, err := layout.Open(p.root, layout.Image(ref))
	if err != nil {
		return 0, 0, errdefs.FromErrno(err)
	}
	defer f.Close()
	return seen.AddFile(ctx, f, most)
}
