package agent

import (
	"context"
	"maps"
	"math"
	"sync"
	"time"

	"k8s.io/klog/v2"
)

// pace keeps what the kernel copies of the volumes that this node uses, to where they move and to legs that join, within a bandwidth, on average. The kernel takes one number for all of it: per cent of the
// time in which it may copy. What that gives depends on disks, network and who else uses them, and changes while it goes on. So the number is moved by what was copied since the last look, and what was copied above the limit
// is made up for.
type pace struct {
	limit int64 // bytes per second; 0: none

	mu       sync.Mutex
	throttle func(percent int) error // nil: not known yet
	percent  int                     // that the kernel was told; 0: nothing yet
	failed   bool
	copies   map[paced]int64 // how much of each was done when something was told of it, in bytes; notYet: nothing was
	looked   time.Time       // when the number was set, or left as it is
	since    int64           // bytes copied since then
	ahead    float64         // bytes copied above the limit, as far as they are made up for; negative: below it
}

// paced is a copy.
type paced struct{ kind, key string }

// Kinds of copies.
const (
	pacedMove = "move"
	pacedJoin = "join"
)

const (
	firstPercent = 1 // of the time, until it is known what that gives: a small volume is copied before that
	allPercent   = 100
	leastLook    = time.Second     // between two looks: the kernel says what is done in units of 1 MiB or more
	makesUp      = 5 * time.Second // in which it is made up for what was copied above the limit
	mostBelow    = time.Second     // of the limit, that may be made up for if less was copied
	mostAhead    = time.Minute     // of the limit, that is made up for
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
		p.first(ctx, now)
		p.copies[one] = notYet
	}
}

// first has the kernel begin slowly, if nothing is copied.
func (p *pace) first(ctx context.Context, now time.Time) {
	if len(p.copies) == 0 {
		p.copies, p.looked, p.since, p.ahead = map[paced]int64{}, now, 0, 0
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
	p.first(ctx, now)
	if was, known := p.copies[one]; known && was != notYet {
		p.since += max(0, done-was)
	}
	p.copies[one] = done
	if now.Sub(p.looked) >= leastLook {
		p.look(ctx, now)
	}
}

// look moves the number by what was copied since the last look.
func (p *pace) look(ctx context.Context, now time.Time) {
	seconds, limit := now.Sub(p.looked).Seconds(), float64(p.limit)
	p.ahead += float64(p.since) - limit*seconds
	p.ahead = min(max(p.ahead, -limit*mostBelow.Seconds()), limit*mostAhead.Seconds())
	before := p.percent
	p.set(ctx, percentOf(before, float64(p.since)/seconds, limit-max(0, p.ahead)/makesUp.Seconds()))
	klog.FromContext(ctx).V(4).Info("Copies within the limit", "copies", len(p.copies), "bytes", p.since, "seconds", seconds, "percentBefore", before, "percent", p.percent)
	p.looked, p.since = now, 0
}

// rests is told that nothing of a kind is copied, or that a copy of it has ended. When nothing is copied others' mirrors have the kernel's usual number.
func (p *pace) rests(ctx context.Context, kind, key string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	maps.DeleteFunc(p.copies, func(one paced, _ int64) bool { return one.kind == kind && (key == "" || one.key == key) })
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

// percentOf is the next number after one that gave a rate, in bytes per second, when another one is wanted: the same, if nothing was copied, for whatever reason that was. It goes up no more than
// twofold at a time: what was copied may have waited for others.
func percentOf(percent int, rate, wanted float64) int {
	if rate <= 0 {
		return percent
	}
	next := float64(percent) * min(2, wanted/rate)
	return int(math.Round(min(max(next, firstPercent), allPercent)))
}
