package page

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"
)

// viewers counts the open streams of events, and tells them of changes.
type viewers struct {
	mu        sync.Mutex
	count     int
	stop      context.CancelFunc // ends follow; valid while count is not 0
	following sync.WaitGroup
	version   string        // the last that was published
	news      chan struct{} // closed when another version is published
}

// enter counts one viewer more; false if there are most already. follow runs while there are viewers.
func (v *viewers) enter(ctx context.Context, most int, follow func(context.Context)) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.count >= most {
		return false
	}
	if v.count++; v.count == 1 {
		ctx, v.stop = context.WithCancel(context.WithoutCancel(ctx)) // the first viewer may leave before others
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

// publish has all streams send a version, if it is another one than before.
func (v *viewers) publish(version string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if version != v.version {
		v.version = version
		close(v.news)
		v.news = make(chan struct{})
	}
}

// next returns a channel that is closed when another version is published.
func (v *viewers) next() <-chan struct{} {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.news
}

// follow makes an overview after each change, but not more often than goodFor says, and publishes its version, until ctx ends.
func (p *Page) follow(ctx context.Context) {
	changes := p.latest.source.Changes(ctx)
	for {
		t, err := p.latest.get(ctx, time.Now())
		if err != nil {
			return
		}
		p.viewers.publish(t.version())
		var again <-chan time.Time // a failure is tried again without a change, too
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

// events serves a stream of server-sent events. Each is the version of what the page would show now: one at once, others when it changes. The browser then
// loads the page again, at its own address. The stream ends after limits.stream, as a client that reads nothing may stay unnoticed: the kernel may take hours
// to find that out. The last event, "again", makes the browser open another stream.
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
	_ = stream.SetReadDeadline(time.Time{}) // it was for reading the request
	over := p.tell(ctx, w, stream)
	p.viewers.leave() // first, so that the browser finds its place free
	if over {
		_ = stream.SetWriteDeadline(time.Now().Add(p.limits.write))
		_, _ = fmt.Fprint(w, "event: again\ndata: now\n\n") // a client that is gone does not come again
	}
}

// tell writes the events of a stream until limits.stream is over; false if the client is gone, or serving ends.
func (p *Page) tell(ctx context.Context, w io.Writer, stream *http.ResponseController) (over bool) {
	alive, end := time.NewTicker(p.limits.alive), time.NewTimer(p.limits.stream)
	defer alive.Stop()
	defer end.Stop()
	said := ""
	for {
		news := p.viewers.next()
		text := ": nothing new\n\n" // a comment, by which both sides notice that the other one is gone
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
