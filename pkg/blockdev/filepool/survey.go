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

// survey finds out which blocks the images share that may share some (use.shared), by the
// extents of each (FIEMAP). The kernel takes up to 10 us for each extent, and an image that is
// written at random has one for every other block: so it is made in the background, at most one
// at a time, of a number of extents that is bounded, and only if something changed.
type survey struct {
	context context.Context // of the pool
	stop    context.CancelFunc
	work    sync.WaitGroup
	most    int // extents of one survey

	// Guarded by pool.Mu:
	running chan struct{} // closed at the end of the one under way; nil without
	due     bool          // an object that shares came or went
	stale   bool          // one was written to
	ended   time.Time     // of the last one
	took    time.Duration
	left    int   // images that it did not look at in full, as there were too many extents
	failure error // of the last one
}

const (
	// surveyExtents is how many extents a survey looks at, at most.
	surveyExtents = 4 << 20
	// surveyPatience is how long a call that could do without waits for a survey. After
	// one that took longer there is a pause of surveyPause times as long.
	surveyPatience = 200 * time.Millisecond
	surveyPause    = 50
)

func (s *survey) close() {
	s.stop()
	s.work.Wait()
}

// wanted tells whether a survey would tell more than the last one, and may be made now. The
// caller holds pool.Mu.
func (s *survey) wanted() bool {
	since := time.Since(s.ended)
	if s.took > surveyPatience && since < surveyPause*s.took {
		return false
	}
	return s.due || (s.stale && since > measureEvery)
}

// surveySoon starts a survey if one is wanted, and waits for it for a moment. It reports
// whether there is a new one.
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

// surveyed waits for a survey that began after this call, and reports whether there was one:
// not if nothing changed since the last one, or that one took long and was just made.
func (p *pool) surveyed(ctx context.Context) (fresh bool, err error) {
	s := &p.space.survey
	for {
		p.Mu.Lock()
		running := s.running
		fresh = running == nil
		if fresh {
			if s.stale {
				s.due = true // who would be refused need not wait for the next look
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

// startSurvey starts one; the caller holds Mu.
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

// pieces is how many extents an image is thought to have: of one that is not known as many as a
// survey may look at, so that it comes after those that are, and before the one that took all of it.
func (u use) pieces(most int) int {
	if u.extents == 0 {
		return most - 1
	}
	return u.extents
}

// sharing lists the objects that a survey is to look at, those with the fewest extents first. The
// caller holds Mu.
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

// survey counts what each object takes that none before it has. Blocks that it does not come to
// are not counted, so what may be promised is too little then.
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
			continue // it is gone, and with it what it was counted with
		}
		o := &it.o.use
		p.count(it.o, it.use.counted)
		o.blocks, o.surveyed, o.extents, o.surveys = it.use.blocks, it.use.surveyed, it.use.extents, o.surveys+1
	}
	return left, nil
}

// addImage is AddFile for the image of an object.
func (p *pool) addImage(ctx context.Context, seen *fiemap.Blocks, ref blockdev.Ref, most int) (fresh int64, extents int, err error) {
	f, err := layout.Open(p.root, layout.Image(ref))
	if err != nil {
		return 0, 0, errdefs.FromErrno(err)
	}
	defer f.Close()
	return seen.AddFile(ctx, f, most)
}
