package agent

import (
	"context"
	"maps"
	"math"
	"sync"
	"time"

	"k8s.io/klog/v2"
)

// copyThrottle keeps the copies that the kernel makes for volumes that this node uses, of moves and to legs that join, within one bandwidth on average. The
// kernel has one number for all of them: for how many per cent of the time it may copy. What that yields depends on disks, network and other load, and
// changes. So the number is adjusted by what was copied since the last time, and what was copied above the limit is made up for later.
type copyThrottle struct {
	limit int64 // bytes per second; 0: none

	mu          sync.Mutex
	tellKernel  func(percent int) error // sets the kernel's number; nil: nothing is throttled yet
	percent     int                     // that the kernel was told; 0: nothing yet
	failed      bool
	copies      map[throttledCopy]int64 // how many bytes of each are copied, by its last report; notKnown: there was none yet
	adjustedAt  time.Time               // when the number was set, or left as it is
	copiedSince int64                   // bytes copied since then
	ahead       float64                 // bytes copied above the limit, as far as they are made up for; negative: below it
}

// throttledCopy is a copy that is under way.
type throttledCopy struct{ kind, key string }

// Kinds of copies.
const (
	copyOfMove = "move"
	copyOfJoin = "join"
)

const (
	firstPercent = 1 // until it is known what that yields: a small volume is copied before that
	allPercent   = 100
	adjustEvery  = time.Second     // between two adjustments: the kernel reports progress in units of 1 MiB or more
	catchUpTime  = 5 * time.Second // in which what was copied above the limit is made up for
	maxBehind    = time.Second     // of the limit: so much may be copied above it after less was copied
	maxAhead     = time.Minute     // of the limit: no more is made up for
)

// use sets how to tell the kernel the number.
func (p *copyThrottle) use(throttle func(percent int) error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.tellKernel = throttle
}

// start is called before a copy begins, so that it does not run at full speed until its first report.
func (p *copyThrottle) start(ctx context.Context, one throttledCopy, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.limit > 0 && p.tellKernel != nil {
		p.startSlowly(ctx, now)
		p.copies[one] = notKnown
	}
}

// startSlowly has the kernel begin slowly, if no copy is under way. The caller has the lock.
func (p *copyThrottle) startSlowly(ctx context.Context, now time.Time) {
	if len(p.copies) == 0 {
		p.copies, p.adjustedAt, p.copiedSince, p.ahead = map[throttledCopy]int64{}, now, 0, 0
		p.set(ctx, firstPercent)
	}
}

// notKnown stands for the bytes of a copy that has not been reported yet.
const notKnown = -1

// report tells how many bytes of a copy are done, while it goes on.
func (p *copyThrottle) report(ctx context.Context, one throttledCopy, done int64, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.tellKernel == nil:
		return
	case p.limit == 0:
		p.set(ctx, allPercent)
		return
	}
	p.startSlowly(ctx, now)
	if was, known := p.copies[one]; known && was != notKnown {
		p.copiedSince += max(0, done-was)
	}
	p.copies[one] = done
	if now.Sub(p.adjustedAt) >= adjustEvery {
		p.adjust(ctx, now)
	}
}

// adjust sets the number by what was copied since the last time. The caller has the lock.
func (p *copyThrottle) adjust(ctx context.Context, now time.Time) {
	seconds, limit := now.Sub(p.adjustedAt).Seconds(), float64(p.limit)
	p.ahead += float64(p.copiedSince) - limit*seconds
	p.ahead = min(max(p.ahead, -limit*maxBehind.Seconds()), limit*maxAhead.Seconds())
	before := p.percent
	p.set(ctx, nextPercent(before, float64(p.copiedSince)/seconds, limit-max(0, p.ahead)/catchUpTime.Seconds()))
	klog.FromContext(ctx).V(4).Info("Copies within the limit", "copies", len(p.copies), "bytes", p.copiedSince, "seconds", seconds, "percentBefore", before, "percent", p.percent)
	p.adjustedAt, p.copiedSince = now, 0
}

// stop ends the copy of a kind with a key, or all of that kind if the key is empty. When no copy is left, the kernel has its usual number again, for mirrors
// of others.
func (p *copyThrottle) stop(ctx context.Context, kind, key string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	maps.DeleteFunc(p.copies, func(one throttledCopy, _ int64) bool { return one.kind == kind && (key == "" || one.key == key) })
	if p.limit > 0 && len(p.copies) == 0 && p.tellKernel != nil {
		p.set(ctx, allPercent)
	}
}

func (p *copyThrottle) set(ctx context.Context, percent int) {
	if percent == p.percent {
		return
	}
	p.percent = percent
	err := p.tellKernel(percent)
	if err != nil && !p.failed && p.limit > 0 {
		klog.FromContext(ctx).Error(err, "Volumes that move while they are used here, and legs of replicated volumes, are copied without the limit of --copy-bandwidth")
	}
	p.failed = err != nil
}

// nextPercent returns the number to set after percent yielded rate, when wanted is to be yielded, both in bytes per second. It stays the same if nothing was
// copied, and at most doubles: the copy may have waited for something else.
func nextPercent(percent int, rate, wanted float64) int {
	if rate <= 0 {
		return percent
	}
	next := float64(percent) * min(2, wanted/rate)
	return int(math.Round(min(max(next, firstPercent), allPercent)))
}
