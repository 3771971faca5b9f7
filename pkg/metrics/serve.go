package metrics

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	dto "github.com/prometheus/client_model/go"

	"github.com/ashlar-csi/ashlar/internal/crowd"
)

// Gatherer has metrics of its own, as those of a library.
type Gatherer = prometheus.Gatherer

// Only returns those metrics of a gatherer whose names begin with one of some words.
func Only(from Gatherer, words ...string) Gatherer {
	return prometheus.GathererFunc(func() ([]*dto.MetricFamily, error) {
		families, err := from.Gather()
		return slices.DeleteFunc(families, func(f *dto.MetricFamily) bool {
			return !slices.ContainsFunc(words, func(word string) bool { return strings.HasPrefix(f.GetName(), word) })
		}), err
	})
}

// ScrapeTime is how long the sources of one scrape may take all together. Prometheus waits for 10 s unless told otherwise.
const ScrapeTime = 3 * time.Second

// Bounds of the server: a scraper has little to say, and there are few of them.
const (
	headerTime  = 5 * time.Second
	answerTime  = 30 * time.Second
	atOnce      = 4
	headerBytes = 16 << 10
	stopTime    = time.Second
	idleTime    = 10 * time.Second
	connections = 64 // more than that wait: descriptors and memory are for volumes
)

// Describe says nothing: which series there are is only known when they are.
func (Source) Describe(chan<- *prometheus.Desc) {}

// Collect asks the source.
func (s Source) Collect(to chan<- prometheus.Metric) {
	for _, sample := range s() {
		to <- sample
	}
}

// Registry returns all metrics of the driver: those that are recorded, those of some sources, of Go and of the process, and those of others.
func Registry(version string, sources []Source, others ...Gatherer) Gatherer {
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(recorded...)
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	build := BuildInfo.At(1, version, revision(), runtime.Version())
	registry.MustRegister(Source(func() []Sample { return []Sample{build} }))
	for _, source := range sources {
		registry.MustRegister(source)
	}
	return append(prometheus.Gatherers{registry}, others...)
}

// revision is that of the source that the driver was built from; "unknown" if that was no checkout.
func revision() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				return s.Value
			}
		}
	}
	return "unknown"
}

// Listen opens HOST:PORT, or :PORT on all addresses.
func Listen(address string) (net.Listener, error) {
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("serve metrics (--metrics-endpoint=%s): %w", address, err)
	}
	return listener, nil
}

// Serve serves /metrics, and nothing else, until the context ends. It closes the listener. Scrapes that are being answered then
// have a second to end.
func Serve(ctx context.Context, listener net.Listener, from Gatherer) error {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(from, promhttp.HandlerOpts{
		ErrorHandling: promhttp.ContinueOnError, // what can be told is told
		// More at once are refused.
		MaxRequestsInFlight: atOnce,
	}))
	server := &http.Server{Handler: mux, ReadTimeout: headerTime, WriteTimeout: answerTime, IdleTimeout: idleTime, MaxHeaderBytes: headerBytes}
	limited := crowd.Limit(server, listener, connections)
	served := make(chan error, 1)
	go func() { served <- server.Serve(limited) }()
	select {
	case err := <-served:
		return fmt.Errorf("serve metrics: %w", err)
	case <-ctx.Done():
	}
	stopping, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTime)
	defer cancel()
	err := server.Shutdown(stopping)
	if errors.Is(err, context.DeadlineExceeded) {
		err = server.Close()
	}
	if end := <-served; !errors.Is(end, http.ErrServerClosed) {
		err = errors.Join(err, end)
	}
	return err
}
