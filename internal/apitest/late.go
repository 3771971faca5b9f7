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

// Late are the durations ("300ms") that tests wait for up to, at random, as on a machine that has too much to do. What only holds on a fast machine fails so on each.
const (
	// Late has the API server answer the parts that are tested late: one of four requests, and each read of what they watch.
	Late = "ASHLAR_API_LATE"
	// LateTests has it answer the tests themselves late: what they change comes late, and what they look at may be over.
	LateTests = "ASHLAR_API_LATE_TESTS"
	// LatePools has one of four operations of the pools in memory take its time, with whatever locks its caller has.
	LatePools = "ASHLAR_POOLS_LATE"
)

// longest is what an environment variable says; 0: nothing.
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

// Pause is what LatePools asks for.
func Pause() {
	if d := longest(LatePools); d > 0 && mathrand.IntN(4) == 0 {
		time.Sleep(mathrand.N(d))
	}
}

// late has a client wait as Late and LateTests say.
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
