package page

import (
	"context"
	"errors"
	"net"
	"net/http"
	"sync"
	"time"

	"golang.org/x/net/netutil"
	"k8s.io/klog/v2"
)

// limits keep those who look from taking what the driver needs.
type limits struct {
	read        time.Duration // until a request is read
	write       time.Duration // until an answer, or one event, is taken
	idle        time.Duration // how long a connection without a request stays, unless others want its place
	alive       time.Duration // how often a stream without news says so
	stream      time.Duration // how long a stream goes on; who still looks then opens another one
	stop        time.Duration // how long answers may still go on when serving ends
	connections int           // more than that wait; when there are as many, those that are idle end
	streams     int           // of events; fewer than connections, so that pages are served beside them
}

var defaults = limits{read: 10 * time.Second, write: 30 * time.Second, idle: 10 * time.Second, alive: 20 * time.Second, stream: 5 * time.Minute, stop: 5 * time.Second,
	connections: 256, streams: 128}

// places are the connections that there may be at once. While all are taken, none is kept for a request that may come: the next one is
// waiting for its place.
type places struct {
	most  int
	mu    sync.Mutex
	taken int
	idle  map[net.Conn]bool
}

// changed is what http.Server calls when a connection is in another state.
func (p *places) changed(conn net.Conn, now http.ConnState) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.idle, conn)
	switch now {
	case http.StateNew:
		p.taken++
	case http.StateIdle:
		p.idle[conn] = true
	case http.StateClosed, http.StateHijacked:
		p.taken--
	}
	if p.taken < p.most {
		return
	}
	for one := range p.idle {
		_ = one.Close() // the server notices, and says that it is closed
	}
	clear(p.idle)
}

// Serve serves the page on a listener until ctx ends, and closes it. Streams of events end then; other answers have a few
// seconds. Nothing of it runs any more when it returns.
func (p *Page) Serve(ctx context.Context, listener net.Listener) error {
	defer p.viewers.following.Wait()
	looking, giveUp := context.WithCancel(context.WithoutCancel(ctx))
	p.latest.ended = looking
	defer giveUp() // a disk that hangs does not hold up the end
	serving, end := context.WithCancel(ctx)
	defer end()
	server := &http.Server{
		Handler:     p,
		ReadTimeout: p.limits.read, WriteTimeout: p.limits.write, IdleTimeout: p.limits.idle,
		MaxHeaderBytes: 16 << 10,
		BaseContext:    func(net.Listener) context.Context { return serving },
		ErrorLog:       klog.NewStandardLogger("WARNING"),
		ConnState:      (&places{most: p.limits.connections, idle: map[net.Conn]bool{}}).changed,
	}
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(netutil.LimitListener(listener, p.limits.connections)) }()
	select {
	case err := <-failed:
		return errors.Join(err, server.Close())
	case <-ctx.Done():
	}
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), p.limits.stop)
	defer cancel()
	if server.Shutdown(grace) != nil {
		_ = server.Close() // who has not read the answer by now does without the rest
	}
	<-failed
	return nil
}
