package page

import (
	"context"
	"sync/atomic"
	"time"
)

// The shortest time between two overviews, and how long making one may take.
const (
	atMostEvery = time.Second
	takingLimit = 20 * time.Second
)

// latest has the newest view, which is shared by all viewers.
type latest struct {
	source Source
	ended  context.Context // when it ends, no overview is needed any more
	taking chan struct{}   // of one element; held while an overview is made
	state  atomic.Pointer[taken]
	start  int64 // distinguishes versions of this run of the driver from those of others
}

// taken is the result of the last try to make an overview.
type taken struct {
	view *view // nil: none was made yet
	err  error // why the last try failed; then view is older
	at   time.Time
	took time.Duration
}

// goodFor returns how long the result is used before the next try. If an overview takes long, tries are rarer, so that they take no more than a fifth of the
// time.
func (t *taken) goodFor() time.Duration { return max(atMostEvery, 4*t.took) }

// version returns a text that changes whenever the page does.
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

// recent returns a result that is good still, or makes another one. The error is that of ctx.
func (l *latest) recent(ctx context.Context) (*taken, error) {
	last := l.state.Load()
	return l.get(ctx, time.Now().Add(-last.goodFor()))
}

// get returns a result of a time or later; if need be it makes an overview, or waits for one that is being made. The error is that of ctx.
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
	if t := l.state.Load(); !t.at.Before(notBefore) { // another caller has made it meanwhile
		return t, nil
	}
	t := l.take(ctx)
	l.state.Store(t)
	return t, nil
}

// take makes an overview. It is for all callers, so it does not end with ctx, but with l.ended, and after takingLimit.
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
