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

// The environment variable Late has the API server answer late, as on a machine that has too much to do: one of four requests
// of the parts that are tested, and each read of what they watch, waits for up to that duration ("300ms"). LateTests has
// the tests themselves wait: what they change comes late, and what they look at may be over. What only holds on a fast machine
// fails so without one that is slow.
const (
	Late      = "ASHLAR_API_LATE"
	LateTests = "ASHLAR_API_LATE_TESTS"
)

// late has a client wait as Late and LateTests say.
func late(config *rest.Config, token string) {
	name := Late
	if token == Admin {
		name = LateTests
	}
	said := os.Getenv(name)
	if said == "" {
		return
	}
	longest, err := time.ParseDuration(said)
	if err != nil {
		panic(fmt.Sprintf("%s: %v", name, err))
	}
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return &lateTransport{next, longest} })
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
