// Package metrics is what the driver tells Prometheus of itself: every metric is declared here, once, and nothing else of the
// driver knows of Prometheus. What is counted as it happens is recorded by the methods of a Counter, Gauge or Histogram; what is
// as it is (pools, objects, queues) is asked for at each scrape (Source). Labels have few values that are known beforehand:
// none has one for each volume, but for those of PerVolume metrics.
package metrics

import (
	"cmp"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Info is what a metric is.
type Info struct {
	Name   string
	Type   string // counter, gauge or histogram
	Help   string
	Labels []string
	// PerVolume: it has a series for each volume, and is only there with --metrics-per-volume.
	PerVolume bool
}

// All returns all metrics of the driver, by name. There are more that come from libraries.
func All() []Info {
	all := slices.Clone(declared)
	slices.SortFunc(all, func(a, b Info) int { return cmp.Compare(a.Name, b.Name) })
	return all
}

var (
	declared []Info
	recorded []prometheus.Collector // those that are counted as it happens
)

// Counter is a number that only goes up.
type Counter struct{ vec *prometheus.CounterVec }

func counter(name, help string, labels ...string) Counter {
	declared = append(declared, Info{Name: name, Type: "counter", Help: help, Labels: labels})
	vec := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
	recorded = append(recorded, vec)
	return Counter{vec}
}

// Inc counts one.
func (c Counter) Inc(labels ...string) { c.vec.WithLabelValues(labels...).Inc() }

// Gauge is a number that goes up and down.
type Gauge struct{ vec *prometheus.GaugeVec }

func gauge(name, help string, labels ...string) Gauge {
	declared = append(declared, Info{Name: name, Type: "gauge", Help: help, Labels: labels})
	vec := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, labels)
	recorded = append(recorded, vec)
	return Gauge{vec}
}

// Inc adds one, and Dec takes it away.
func (g Gauge) Inc(labels ...string) { g.vec.WithLabelValues(labels...).Inc() }

// Dec takes one away.
func (g Gauge) Dec(labels ...string) { g.vec.WithLabelValues(labels...).Dec() }

// Histogram is how long something took, in seconds.
type Histogram struct{ vec *prometheus.HistogramVec }

func histogram(name, help string, buckets []float64, labels ...string) Histogram {
	declared = append(declared, Info{Name: name, Type: "histogram", Help: help, Labels: labels})
	vec := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets}, labels)
	recorded = append(recorded, vec)
	return Histogram{vec}
}

// Observe counts something that took so long.
func (h Histogram) Observe(took time.Duration, labels ...string) {
	h.vec.WithLabelValues(labels...).Observe(took.Seconds())
}

// Sample is one series of a metric at one moment.
type Sample = prometheus.Metric

// Source returns the samples of what it knows. It is called at each scrape, from several goroutines at once maybe, and has to
// return soon (ScrapeTime).
type Source func() []Sample

// Sampled is a metric that a Source has samples of.
type Sampled struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
}

func sampled(kind prometheus.ValueType, info Info) Sampled {
	declared = append(declared, info)
	return Sampled{prometheus.NewDesc(info.Name, info.Help, info.Labels, nil), kind}
}

func sampledGauge(name, help string, labels ...string) Sampled {
	return sampled(prometheus.GaugeValue, Info{Name: name, Type: "gauge", Help: help, Labels: labels})
}

func sampledCounter(name, help string, labels ...string) Sampled {
	return sampled(prometheus.CounterValue, Info{Name: name, Type: "counter", Help: help, Labels: labels})
}

func perVolume(name, help string) Sampled {
	return sampled(prometheus.GaugeValue, Info{Name: name, Type: "gauge", Help: help, PerVolume: true,
		Labels: []string{"node", "pool", "volume", "namespace", "claim"}})
}

// At is a sample; the labels are in the order of their declaration.
func (s Sampled) At(value float64, labels ...string) Sample {
	return prometheus.MustNewConstMetric(s.desc, s.kind, value, labels...)
}

// Is is a sample of 1 or 0.
func (s Sampled) Is(so bool, labels ...string) Sample {
	if so {
		return s.At(1, labels...)
	}
	return s.At(0, labels...)
}
