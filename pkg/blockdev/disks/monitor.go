// Package disks finds out how the disks below pools are before they die, by what they say themselves (SMART, NVMe's health log). It asks seldom, wakes no
// disk that sleeps, and keeps nobody waiting.
package disks

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lazy"
	"github.com/ashlar-csi/ashlar/pkg/metrics"
)

// Every is how often the disks are asked. What they count changes in hours.
const Every = 10 * time.Minute

// closeTime is how long Close waits for questions that hang.
const closeTime = time.Second

// Monitor asks the disks below pools how they are.
type Monitor struct {
	smartctl string // the program
	below    func(numbers ...uint64) []Disk
	every    time.Duration

	context context.Context
	stop    context.CancelFunc
	work    sync.WaitGroup

	mu    sync.Mutex
	pools []*Pool
	disks map[string]*reading // by name
}

// reading is what is known of a disk.
type reading struct {
	seq   string        // Disk.Seq
	under chan struct{} // closed at the end of the question under way; nil: none is
	ended time.Time     // when the last question ended
	last  Report        // the last report that told something
	first Report        // the first report of the same disk, with the errors that it had when the driver began to look
}

// Pool is a pool whose health has what its disks say. They are asked from Start on.
type Pool struct {
	*lazy.Pool
	monitor *Monitor
	under   bool     // its disks are being asked; guarded by the monitor's mu
	disks   []string // the names of the disks below it, as found last; guarded by the monitor's mu
}

// New returns a monitor that asks nothing before Start. Close ends it, and so does ctx.
func New(ctx context.Context) *Monitor {
	m := &Monitor{smartctl: "smartctl", below: Below, every: Every, disks: map[string]*reading{}}
	m.context, m.stop = context.WithCancel(ctx)
	return m
}

// Watch returns a pool that has the health of its disks in its own.
func (m *Monitor) Watch(pool *lazy.Pool) *Pool {
	p := &Pool{Pool: pool, monitor: m}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.pools = append(m.pools, p)
	return p
}

// Start begins to ask the disks, now and then every Every.
func (m *Monitor) Start() {
	m.work.Go(func() {
		ticker := time.NewTicker(m.every)
		defer ticker.Stop()
		for m.context.Err() == nil {
			m.look()
			select {
			case <-ticker.C:
			case <-m.context.Done():
			}
		}
	})
}

// Close ends the questions. It leaves behind what hangs in the kernel.
func (m *Monitor) Close() {
	m.stop()
	done := make(chan struct{})
	go func() { m.work.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(closeTime):
	}
}

// look asks the disks of all pools, and does not wait. A pool for which the last look has not ended is left out.
func (m *Monitor) look() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range m.pools {
		if p.under {
			continue
		}
		p.under = true
		m.work.Go(func() {
			p.look(m.context)
			m.mu.Lock()
			defer m.mu.Unlock()
			p.under = false
		})
	}
}

// look finds the disks of a pool, and has each asked. If the pool cannot tell, the disks that are known stay.
func (p *Pool) look(ctx context.Context) {
	founded, ok := blockdev.As[blockdev.Founded](p.Pool)
	if !ok {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	numbers, err := founded.Foundations(ctx)
	if err != nil {
		klog.FromContext(ctx).V(4).Info("Cannot tell which disks a pool is on", "pool", p.Name(), "reason", err.Error())
		return
	}
	disks := slices.DeleteFunc(p.monitor.below(numbers...), func(d Disk) bool { return !d.Physical })
	var names []string
	for _, disk := range disks {
		names = append(names, disk.Name)
	}
	p.monitor.mu.Lock()
	p.disks = names
	p.monitor.mu.Unlock()
	for _, disk := range disks {
		p.monitor.ask(disk)
	}
}

// ask asks a disk in the background, unless it was asked just before for another pool, or is being asked.
func (m *Monitor) ask(disk Disk) {
	m.mu.Lock()
	defer m.mu.Unlock()
	r := m.disks[disk.Name]
	if r == nil || r.seq != disk.Seq {
		r = &reading{seq: disk.Seq}
		m.disks[disk.Name] = r
	}
	if r.under != nil || (!r.ended.IsZero() && time.Since(r.ended) < m.every/2) {
		return
	}
	under := make(chan struct{})
	r.under = under
	m.work.Go(func() {
		defer close(under)
		report, err := ask(m.context, m.smartctl, disk.Name)
		m.mu.Lock()
		defer m.mu.Unlock()
		r.under, r.ended = nil, time.Now()
		if err != nil && !missing(err) && m.context.Err() == nil {
			klog.FromContext(m.context).V(4).Info("A disk does not say how it is", "disk", disk.Name, "reason", err.Error())
		}
		if err == nil && report.Told {
			r.take(report)
		}
	})
}

// take notes a report of a disk.
func (r *reading) take(report Report) {
	if !r.first.Told || r.first.Model != report.Model || r.first.Serial != report.Serial { // another disk has the name now
		r.first = report
	}
	r.last = report
}

// PoolHealth returns the pool's problems, followed by those of its disks. It does not wait for disks.
func (p *Pool) PoolHealth(ctx context.Context) []blockdev.Problem {
	return append(p.Pool.PoolHealth(ctx), p.problems()...)
}

// problems returns what is wrong with the disks of a pool, one problem for each reason. None of them keeps the pool from being used.
func (p *Pool) problems() (problems []blockdev.Problem) {
	failing, wearing, erring, heated := p.said()
	for _, one := range []struct {
		reason string
		disks  []string
		do     string
	}{
		{reason: "DiskFailing", disks: failing, do: "move what is on it while it can be read, and replace it"},
		{reason: "DiskErrors", disks: erring, do: "have a copy of what is on it, and watch whether they become more"},
		{reason: "DiskHeat", disks: heated, do: "see to its fans and the air around it; until then it may slow down or switch off, but what is on it is as safe as before"},
		{reason: "DiskWearing", disks: wearing, do: "have a new one ready"},
	} {
		if len(one.disks) > 0 {
			problems = append(problems, blockdev.Problem{Severity: blockdev.Degraded, Reason: one.reason,
				Message: fmt.Sprintf("pool %s: %s: %s", p.Name(), strings.Join(one.disks, "; "), one.do)})
		}
	}
	return problems
}

// said returns what its disks say of themselves, in words, by reason.
func (p *Pool) said() (failing, wearing, erring, heated []string) {
	p.monitor.mu.Lock()
	defer p.monitor.mu.Unlock()
	for _, name := range p.disks {
		r := p.monitor.disks[name]
		if r == nil || !r.last.Told {
			continue
		}
		disk := "disk " + r.last.described(name)
		if len(r.last.Failing) > 0 {
			failing = append(failing, disk+" says that it fails: "+strings.Join(r.last.Failing, ", "))
		}
		if r.last.Heat {
			heated = append(heated, disk+" says that "+heat)
		}
		if r.last.Wear >= worn {
			wearing = append(wearing, fmt.Sprintf("disk %s has used %.0f %% of its life", r.last.described(name), r.last.Wear*100))
		}
		if found := r.grown(); len(found) > 0 {
			erring = append(erring, disk+" has "+strings.Join(found, ", "))
		}
	}
	return failing, wearing, erring, heated
}

// grown returns the errors of a disk that count, in words: sectors that cannot be read, and what has become more since the driver began to look.
func (r *reading) grown() (found []string) {
	for _, kind := range slices.Sorted(maps.Keys(r.last.Errors)) {
		n := r.last.Errors[kind]
		switch more := n - r.first.Errors[kind]; {
		case kind == Pending && n > 0:
			found = append(found, fmt.Sprintf("%d sectors that cannot be read", n))
		case kind == Reallocated && more > 0:
			found = append(found, fmt.Sprintf("%d more sectors replaced, %d in all", more, n))
		case kind == Uncorrectable && more > 0:
			found = append(found, fmt.Sprintf("%d more errors that it could not correct, %d in all", more, n))
		}
	}
	return found
}

// Samples returns the source of metrics of the disks of a node.
func (m *Monitor) Samples(node string) metrics.Source {
	return func() (samples []metrics.Sample) {
		m.mu.Lock()
		defer m.mu.Unlock()
		for _, p := range m.pools {
			for _, name := range p.disks {
				r := m.disks[name]
				if r == nil || !r.last.Told {
					continue
				}
				labels := []string{node, p.Name(), name}
				samples = append(samples, metrics.DiskHealthy.Is(len(r.last.Failing) == 0, labels...))
				if r.last.Wear >= 0 {
					samples = append(samples, metrics.DiskWear.At(r.last.Wear, labels...))
				}
				for _, kind := range slices.Sorted(maps.Keys(r.last.Errors)) {
					samples = append(samples, metrics.DiskErrors.At(float64(r.last.Errors[kind]), node, p.Name(), name, kind))
				}
			}
		}
		return samples
	}
}
