package apitest

import (
	"context"
	"fmt"
	"io"
	mathrand "math/rand/v2"
	"net/http"
	"os"
	"time"

	"k8s.io/client-go/rest"
)

// Environment variables with a duration ("300ms"). Some operations then wait for a random time up to that, as on a busy machine: a test that passes only on
// fast machines then fails on all.
const (
	// Late delays the answers of the API server to the parts under test: one of four requests, and each read of a watch.
	Late = "ASHLAR_API_LATE"
	// LateTests delays its answers to the tests themselves (Admin): their changes come late, and what they read may be over.
	LateTests = "ASHLAR_API_LATE_TESTS"
	// LatePools delays one of four operations of pools in memory, while the caller holds its locks.
	LatePools = "ASHLAR_POOLS_LATE"
)

// longest returns the duration of an environment variable; 0 if it is not set.
func longest(name string) time.Duration {
	said := os.Getenv(name)
	if said == "" {
		return 0
	}
	d, err := time.ParseDuration(said)
	if err != nil {
		panic(fmt.Sprintf("%s: %v", name, err))
	}
	return d
}

// Pause waits as LatePools says.
func Pause() {
	if d := longest(LatePools); d > 0 && mathrand.IntN(4) == 0 {
		time.Sleep(mathrand.N(d))
	}
}

// late makes a client wait as Late and LateTests say.
func late(config *rest.Config, token string) {
	name := Late
	if token == Admin {
		name = LateTests
	}
	if d := longest(name); d > 0 {
		config.Wrap(func(next http.RoundTripper) http.RoundTripper { return &lateTransport{next, d} })
	}
}

type lateTransport struct {
	next    http.RoundTripper
	longest time.Duration
}

func (l *lateTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	if mathrand.IntN(4) == 0 {
		if err := l.wait(r.Context()); err != nil {
			return nil, err
		}
	}
	response, err := l.next.RoundTrip(r)
	if err == nil && r.URL.Query().Has("watch") {
		response.Body = &lateBody{response.Body, l, r.Context()}
	}
	return response, err
}

func (l *lateTransport) wait(ctx context.Context) error {
	select {
	case <-time.After(mathrand.N(l.longest)):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

type lateBody struct {
	io.ReadCloser
	late *lateTransport
	ctx  context.Context
}

func (b *lateBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err == nil {
		err = b.late.wait(b.ctx)
	}
	return n, err
}
