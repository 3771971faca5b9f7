// Package metricstest reads metrics as Prometheus does, for tests.
package metricstest

import (
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/metrics"
)

// Scrape is what one scrape said: values by series, which are written NAME or NAME{LABEL="VALUE",...}, the labels in order.
type Scrape struct {
	Values map[string]float64
	text   []byte
}

// Of asks some sources, and what is recorded.
func Of(t testing.TB, sources ...metrics.Source) Scrape {
	t.Helper()
	answer := httptest.NewRecorder()
	promhttp.HandlerFor(metrics.Registry("test", sources), promhttp.HandlerOpts{}).ServeHTTP(answer, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	if answer.Code != http.StatusOK {
		t.Fatalf("metrics: %d: %s", answer.Code, answer.Body)
	}
	return parse(t, answer.Body.Bytes())
}

// Get asks a driver at HOST:PORT. All of its metrics are as Prometheus wants them.
func Get(t testing.TB, address string) Scrape {
	t.Helper()
	client := http.Client{Timeout: 30 * time.Second}
	answer, err := client.Get("http://" + address + "/metrics")
	check.OK(t, err)
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	check.OK(t, err)
	if answer.StatusCode != http.StatusOK {
		t.Fatalf("GET /metrics: %s: %s", answer.Status, text)
	}
	s := parse(t, text)
	problems, err := promlint.New(bytes.NewReader(text)).Lint()
	check.OK(t, err)
	for _, p := range problems {
		if !library(p.Metric) {
			t.Errorf("metric %s: %s", p.Metric, p.Text)
		}
	}
	return s
}

// library: the name of a metric is that of a library.
func library(name string) bool { return !strings.HasPrefix(name, "ashlar_") }

func parse(t testing.TB, text []byte) Scrape {
	t.Helper()
	s := Scrape{Values: map[string]float64{}, text: text}
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		at := strings.LastIndex(strings.TrimSpace(line), " ")
		value, err := strconv.ParseFloat(strings.TrimSpace(line[at:]), 64)
		check.OK(t, err)
		s.Values[line[:at]] = value
	}
	return s
}

// Is makes sure of the value of a series.
func (s Scrape) Is(t testing.TB, series string, want float64) {
	t.Helper()
	if value, there := s.Values[series]; !there || value != want {
		t.Errorf("%s is %v (there: %v), want %v", series, value, there, want)
	}
}

// Until scrapes until some series have the values that are wanted, and returns the last scrape: what takes a pool longer than a scrape waits is in a later one.
func Until(t testing.TB, scrape func() Scrape, want map[string]float64) Scrape {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(100 * time.Millisecond) {
		s, all := scrape(), true
		for series, value := range want {
			is, there := s.Values[series]
			all = all && there && is == value
		}
		if all {
			return s
		}
		if time.Now().After(deadline) {
			for series, value := range want {
				s.Is(t, series, value)
			}
			return s
		}
	}
}

// Has reports whether there is a series of a metric, as it is declared; of a histogram its count.
func (s Scrape) Has(name string) bool {
	for series := range s.Values {
		series, _, _ = strings.Cut(series, "{")
		if series == name || series == name+"_count" {
			return true
		}
	}
	return false
}

// Series is how many series of the driver's own there are.
func (s Scrape) Series() (n int) {
	for series := range s.Values {
		if !library(series) {
			n++
		}
	}
	return n
}
