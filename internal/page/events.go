package page

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"
)

// viewers are those who follow changes.
type viewers struct {
	mu        sync.Mutex
	count     int
	stop      context.CancelFunc // ends following; nil: nobody follows
	following sync.WaitGroup
	version   string        // what was told last
	news      chan struct{} // closed when there is another version
}

// enter notes one viewer more, unless there are as many as there may be. While there is one, follow runs.
func (v *viewers) enter(ctx context.Context, most int, follow func(context.Context)) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.count >= most {
		return false
	}
	if v.count++; v.count == 1 {
		ctx, v.stop = context.WithCancel(context.WithoutCancel(ctx)) // the first to come may leave before others
		v.following.Go(func() { follow(ctx) })
	}
	return true
}

func (v *viewers) leave() {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.count--; v.count == 0 {
		v.stop()
	}
}

// publish tells all viewers of a version.
func (v *viewers) publish(version string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if version != v.version {
		v.version = version
		close(v.news)
		v.news = make(chan struct{})
	}
}

// next returns what is closed when there is another version.
func (v *viewers) next() <-chan struct{} {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.news
}

// follow takes an overview whenever something has changed, but not too often, and tells the viewers, until ctx ends.
func (p *Page) follow(ctx context.Context) {
	changes := p.latest.source.Changes(ctx)
	for {
		t, err := p.latest.get(ctx, time.Now())
		if err != nil {
			return
		}
		p.viewers.publish(t.version())
		var again <-chan time.Time // what failed is tried without a change, too
		if t.err != nil {
			again = time.After(5 * atMostEvery)
		}
		select {
		case <-time.After(t.goodFor()):
		case <-ctx.Done():
			return
		}
		select {
		case <-changes:
		case <-again:
		case <-ctx.Done():
			return
		}
	}
}

// events is a stream of server-sent events. Each is the version of what a page would show now: the first at once, others
// when there is another one. The browser asks for the page anew, at its own address, and so needs no second way to make it. The stream ends
// after a while, as nobody knows whether it is read: the kernel takes hours of it. The last event, "again", asks the browser for another one.
func (p *Page) events(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "text/event-stream")
	if r.Method == http.MethodHead {
		return
	}
	ctx := r.Context()
	if !p.viewers.enter(ctx, p.limits.streams, p.follow) {
		w.Header().Set("Retry-After", "15")
		http.Error(w, "too many follow changes already; the page can be reloaded", http.StatusServiceUnavailable)
		return
	}
	stream := http.NewResponseController(w)
	_ = stream.SetReadDeadline(time.Time{}) // it was for the request
	over := p.tell(ctx, w, stream)
	p.viewers.leave() // before the browser comes again, so that its place is free
	if over {
		_ = stream.SetWriteDeadline(time.Now().Add(p.limits.write))
		_, _ = fmt.Fprint(w, "event: again\ndata: now\n\n") // who is gone does not come
	}
}

// tell writes the events of a stream until its time is over, or (false) who reads them is gone.
func (p *Page) tell(ctx context.Context, w io.Writer, stream *http.ResponseController) (over bool) {
	alive, end := time.NewTicker(p.limits.alive), time.NewTimer(p.limits.stream)
	defer alive.Stop()
	defer end.Stop()
	said := ""
	for {
		news := p.viewers.next()
		text := ": nothing new\n\n" // a comment, by which both sides notice that the other is gone
		if version := p.latest.state.Load().version(); version != said {
			text, said = fmt.Sprintf("data: %s\n\n", version), version
		}
		_ = stream.SetWriteDeadline(time.Now().Add(p.limits.write))
		if _, err := fmt.Fprint(w, text); err != nil || stream.Flush() != nil {
			return false
		}
		select {
		case <-news:
		case <-alive.C:
		case <-end.C:
			return true
		case <-ctx.Done():
			return false
		}
	}
}
