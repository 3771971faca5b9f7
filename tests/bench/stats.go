package main

import (
	"fmt"
	"sync"
	"time"

	"github.com/ashlar-csi/ashlar/tests/figures"
)

// recorder collects samples by name.
type recorder struct {
	mu      sync.Mutex
	samples map[string][]time.Duration
	names   []string // in the order of their first sample
}

// time runs and records one step; failures are not recorded.
func (r *recorder) time(name string, step func() error) error {
	start := time.Now()
	err := step()
	took := time.Since(start)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.samples == nil {
		r.samples = map[string][]time.Duration{}
	}
	if r.samples[name] == nil {
		r.names = append(r.names, name)
	}
	r.samples[name] = append(r.samples[name], took)
	return nil
}

// step is something that takes time.
type step struct {
	name string
	do   func() error
}

// all runs and records steps one after the other, up to the first that fails.
func (r *recorder) all(steps ...step) error {
	for _, one := range steps {
		if err := r.time(one.name, one.do); err != nil {
			return err
		}
	}
	return nil
}

func ratio(a, b time.Duration) float64 {
	if b == 0 {
		return 0
	}
	return float64(a) / float64(b)
}

func ms(d time.Duration) string { return fmt.Sprintf("%.2f", float64(d)/1e6) }

// spread is median (p10..p90) in milliseconds.
func spread(d []time.Duration) string {
	if len(d) == 0 {
		return "-"
	}
	return fmt.Sprintf("%s (%s..%s)", ms(figures.Median(d)), ms(figures.Quantile(d, 0.1)), ms(figures.Quantile(d, 0.9)))
}

// spreadOf is median (p10..p90) of numbers.
func spreadOf(format string, v []float64) string {
	return fmt.Sprintf(format+" ("+format+".."+format+")", figures.Median(v), figures.Quantile(v, 0.1), figures.Quantile(v, 0.9))
}
