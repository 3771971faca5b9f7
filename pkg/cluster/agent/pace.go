package agent

import (
	"context"
	"math"
	"time"

	"k8s.io/klog/v2"
)

// pace keeps what the kernel copies, for volumes that move while this node uses them, within a bandwidth. The kernel takes one number for all of it: per cent of the
// time in which it may copy. What that gives depends on disks, network and who else uses them, so it is moved by what was copied since the last look. The caller
// serialises calls.
type pace struct {
	limit    int64 // bytes per second; 0: none
	throttle func(percent int) error

	percent int // that the kernel was told; 0: nothing yet
	failed  bool
	key     string // of the volume that was looked at last; empty: nothing was copied
	done    int64  // how much of it was copied then, in bytes
	at      time.Time
}

const (
	firstPercent = 10 // of the time, until it is known what that gives
	allPercent   = 100
	leastLook    = 200 * time.Millisecond // between two looks that say something of a rate
)

// copied is told how much of a volume is copied, in bytes, while that goes on.
func (p *pace) copied(ctx context.Context, key string, done int64, now time.Time) {
	since := now.Sub(p.at)
	switch {
	case p.limit == 0:
		p.set(ctx, allPercent)
	case p.key == "":
		p.set(ctx, firstPercent)
	case key == p.key && since < leastLook:
		return
	case key == p.key:
		p.set(ctx, paced(p.percent, float64(done-p.done)/since.Seconds(), float64(p.limit)))
	}
	p.key, p.done, p.at = key, done, now
}

// rests is told that nothing is copied: others' mirrors have the kernel's usual number then.
func (p *pace) rests(ctx context.Context) {
	if p.limit > 0 {
		p.set(ctx, allPercent)
	}
	p.key = ""
}

func (p *pace) set(ctx context.Context, percent int) {
	if percent == p.percent {
		return
	}
	p.percent = percent
	err := p.throttle(percent)
	if err != nil && !p.failed && p.limit > 0 {
		klog.FromContext(ctx).Error(err, "Volumes that move while they are used here are copied without the limit of --copy-bandwidth")
	}
	p.failed = err != nil
}

// paced is the next number after one that gave a rate, in bytes per second: the same, if nothing was copied, for whatever reason that was. It goes up no more than
// twofold at a time: what was copied may have waited for others.
func paced(percent int, rate, limit float64) int {
	if rate <= 0 {
		return percent
	}
	next := float64(percent) * min(2, limit/rate)
	return int(math.Round(min(max(next, 1), allPercent)))
}
