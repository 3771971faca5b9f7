package agent

import (
	"context"
	"maps"
	"math"
	"sync"
	"time"

	"k8s.io/klog/v2"
)

// pace keeps what the kernel copies of the volumes that this node uses, to where they move and to legs that join, within a bandwidth. The kernel takes one number for all of it: per cent of the
// time in which it may copy. What that gives depends on disks, network and who else uses them, so it is moved by what was copied since the last look.
type pace struct {
	limit int64 // bytes per second; 0: none

	mu       sync.Mutex
	throttle func(percent int) error // nil: not known yet
	percent  int                     // that the kernel was told; 0: nothing yet
	failed   bool
	copies   map[paced]rate
}

// paced is a copy.
type paced struct{ kind, key string }

// Kinds of copies.
const (
	pacedMove = "move"
	pacedJoin = "join"
)

// rate is how a copy was at the last look.
type rate struct {
	done   int64 // bytes
	at     time.Time
	second float64 // bytes in one, as the number is now; 0: not known
}

const (
	firstPercent = 1 // of the time, until it is known what that gives: a small volume is copied before that
	allPercent   = 100
	leastLook    = 200 * time.Millisecond // between two looks that say something of a rate
	mostLook     = 5 * time.Second        // after which a copy of which nothing was told is none any more
)

// by says who tells the kernel.
func (p *pace) by(throttle func(percent int) error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.throttle = throttle
}

// begins is told that a copy is about to begin: it is not to be at full speed until the first look.
func (p *pace) begins(ctx context.Context, one paced, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.limit > 0 && p.throttle != nil {
		p.first(ctx)
		p.copies[one] = rate{done: notYet, at: now}
	}
}

// first has the kernel begin slowly, if nothing is copied.
func (p *pace) first(ctx context.Context) {
	if len(p.copies) == 0 {
		p.copies = map[paced]rate{}
		p.set(ctx, firstPercent)
	}
}

// notYet is how much is done of a copy of which that is not known.
const notYet = -1

// copied is told how much of a copy is done, in bytes, while that goes on.
func (p *pace) copied(ctx context.Context, one paced, done int64, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.throttle == nil:
		return
	case p.limit == 0:
		p.set(ctx, allPercent)
		return
	}
	p.first(ctx)
	was, known := p.copies[one]
	known = known && was.done != notYet
	since := now.Sub(was.at)
	if known && since < leastLook {
		return
	}
	next := rate{done: done, at: now}
	if known {
		next.second = float64(done-was.done) / since.Seconds()
	}
	p.copies[one] = next
	if !known {
		return
	}
	total := 0.0
	for other, r := range p.copies {
		if now.Sub(r.at) > mostLook {
			delete(p.copies, other)
			continue
		}
		total += max(0, r.second)
	}
	before := p.percent
	p.set(ctx, percentOf(before, total, float64(p.limit)))
	for other, r := range p.copies { // as they are to be from now on
		r.second *= float64(p.percent) / float64(before)
		p.copies[other] = r
	}
}

// rests is told that nothing of a kind is copied, or that a copy of it has ended. When nothing is copied others' mirrors have the kernel's usual number.
func (p *pace) rests(ctx context.Context, kind, key string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	maps.DeleteFunc(p.copies, func(one paced, _ rate) bool { return one.kind == kind && (key == "" || one.key == key) })
	if p.limit > 0 && len(p.copies) == 0 && p.throttle != nil {
		p.set(ctx, allPercent)
	}
}

func (p *pace) set(ctx context.Context, percent int) {
	if percent == p.percent {
		return
	}
	p.percent = percent
	err := p.throttle(percent)
	if err != nil && !p.failed && p.limit > 0 {
		klog.FromContext(ctx).Error(err, "Volumes that move while they are used here, and legs of replicated volumes, are copied without the limit of --copy-bandwidth")
	}
	p.failed = err != nil
}

// percentOf is the next number after one that gave a rate, in bytes per second: the same, if nothing was copied, for whatever reason that was. It goes up no more than
// twofold at a time: what was copied may have waited for others.
func percentOf(percent int, rate, limit float64) int {
	if rate <= 0 {
		return percent
	}
	next := float64(percent) * min(2, limit/rate)
	return int(math.Round(min(max(next, 1), allPercent)))
}
