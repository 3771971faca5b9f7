package page

import (
	"context"
	"sync/atomic"
	"time"
)

// How often an overview is taken at most, and how long that may take.
const (
	atMostEvery = time.Second
	takingLimit = 20 * time.Second
)

// latest is the newest view, which all viewers share.
type latest struct {
	source Source
	ended  context.Context // when it is over, nobody wants an overview any more
	taking chan struct{}   // whoever has put something in may take an overview
	state  atomic.Pointer[taken]
	start  int64 // views of another run of the driver are other ones
}

// taken is what came of the last try.
type taken struct {
	view *view // nil: there was never one
	err  error // why it is not newer
	at   time.Time
	took time.Duration
}

// goodFor is how long nobody looks anew: what takes long to find out is asked for less often, so that it never takes
// more than a fifth of the time.
func (t *taken) goodFor() time.Duration { return max(atMostEvery, 4*t.took) }

// version is another one when the page is.
func (t *taken) version() string {
	version := "none"
	if t.view != nil {
		version = t.view.version
	}
	if t.err != nil {
		version += "-failed"
	}
	return version
}

func (l *latest) init(source Source) {
	l.source, l.ended, l.taking, l.start = source, context.Background(), make(chan struct{}, 1), time.Now().UnixNano()
	l.state.Store(&taken{})
}

// recent returns what was taken lately.
func (l *latest) recent(ctx context.Context) (*taken, error) {
	last := l.state.Load()
	return l.get(ctx, time.Now().Add(-last.goodFor()))
}

// get returns what was taken at a time or later, and takes an overview if need be. An error is that of ctx.
func (l *latest) get(ctx context.Context, notBefore time.Time) (*taken, error) {
	if t := l.state.Load(); !t.at.Before(notBefore) {
		return t, nil
	}
	select {
	case l.taking <- struct{}{}:
		defer func() { <-l.taking }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if t := l.state.Load(); !t.at.Before(notBefore) { // somebody else took it meanwhile
		return t, nil
	}
	t := l.take(ctx)
	l.state.Store(t)
	return t, nil
}

// take takes an overview. It is for everybody, so it goes on when the one who asked first is gone, but not when all are.
func (l *latest) take(ctx context.Context) *taken {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), takingLimit)
	defer cancel()
	defer context.AfterFunc(l.ended, cancel)()
	t := &taken{view: l.state.Load().view, at: time.Now()}
	defer func() { t.took = time.Since(t.at) }()
	o, err := l.source.Overview(ctx)
	switch {
	case err != nil:
		t.err = err
	case t.view == nil:
		t.view = newView(o, l.start, 1)
	case !t.view.same(o):
		t.view = newView(o, l.start, t.view.number+1)
	}
	return t
}
