// Package disks knows how the disks below pools are, by what they say themselves (SMART, NVMe's health log), before they die. It asks
// seldom, wakes no disk that sleeps, and never keeps anybody waiting.
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

// closeTime is how long the end of the driver waits for what hangs.
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
	under chan struct{} // closed at the end of the question under way; nil without
	ended time.Time     // of the last one
	last  Report        // the last that told something
	first Report        // the first of the same disk: how many errors there were when the driver began to look
}

// Pool is a pool with what its disks say in its health. Its disks are looked at from Start on.
type Pool struct {
	*lazy.Pool
	monitor *Monitor
	under   bool     // its disks are being asked; guarded by the monitor's mu
	disks   []string // those that are below it, as was found last
}

// New returns a monitor that asks nobody yet. Close ends it, and ctx does.
func New(ctx context.Context) *Monitor {
	m := &Monitor{smartctl: "smartctl", below: Below, every: Every, disks: map[string]*reading{}}
	m.context, m.stop = context.WithCancel(ctx)
	return m
}

// Watch returns a pool with the health of its disks in its own.
func (m *Monitor) Watch(pool *lazy.Pool) *Pool {
	p := &Pool{Pool: pool, monitor: m}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.pools = append(m.pools, p)
	return p
}

// Start begins to ask the disks, now and from time to time.
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

// Close ends the questions. What hangs in the kernel is left behind.
func (m *Monitor) Close() {
	m.stop()
	done := make(chan struct{})
	go func() { m.work.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(closeTime):
	}
}

// look asks the disks of all pools; a pool whose disks have not answered since the last time is left alone.
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

// look finds the disks of a pool, and asks each. Those of a pool that is not there stay as they were.
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

// ask asks a disk, unless it was asked just before for another pool, or is being asked. It does not wait for the answer.
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

// take takes in what a disk has told.
func (r *reading) take(report Report) {
	if !r.first.Told || r.first.Model != report.Model || r.first.Serial != report.Serial { // another disk has the name now
		r.first = report
	}
	r.last = report
}

// PoolHealth is that of the pool, and at the end what is wrong with its disks. It does not wait for them.
func (p *Pool) PoolHealth(ctx context.Context) []blockdev.Problem {
	return append(p.Pool.PoolHealth(ctx), p.problems()...)
}

// problems are what is wrong with the disks of a pool: one for each reason. None keeps the pool from being used.
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

// said is what its disks say of themselves, in words.
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

// grown says which errors a disk has that count: sectors that cannot be read, and what became more since the driver began to look.
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
