package page

import (
	"context"
	"errors"
	"net"
	"net/http"
	"time"

	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/internal/crowd"
)

// limits bound what viewers can take of the driver.
type limits struct {
	read        time.Duration // for reading a request
	write       time.Duration // for writing an answer, or one event
	idle        time.Duration // how long a connection may be without a request; shorter if others need its place
	alive       time.Duration // how often a stream sends something if there is no event
	stream      time.Duration // how long a stream lasts; the browser then opens another one
	stop        time.Duration // how long answers may take when serving ends
	connections int           // further ones wait; then idle ones are closed
	streams     int           // streams of events; fewer than connections, so that pages can be served too
}

var defaults = limits{read: 10 * time.Second, write: 30 * time.Second, idle: 10 * time.Second, alive: 20 * time.Second, stream: 5 * time.Minute, stop: 5 * time.Second,
	connections: 256, streams: 128}

// Serve serves the page on a listener until ctx ends, and closes the listener. Then streams of events end, and other answers get limits.stop. When it returns,
// nobody follows the source any more.
func (p *Page) Serve(ctx context.Context, listener net.Listener) error {
	defer p.viewers.following.Wait()
	looking, giveUp := context.WithCancel(context.WithoutCancel(ctx))
	p.latest.ended = looking
	defer giveUp() // ends an overview that is being made: a disk that hangs must not delay the end
	serving, end := context.WithCancel(ctx)
	defer end()
	server := &http.Server{
		Handler:     p,
		ReadTimeout: p.limits.read, WriteTimeout: p.limits.write, IdleTimeout: p.limits.idle,
		MaxHeaderBytes: 16 << 10,
		BaseContext:    func(net.Listener) context.Context { return serving },
		ErrorLog:       klog.NewStandardLogger("WARNING"),
	}
	limited := crowd.Limit(server, listener, p.limits.connections)
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(limited) }()
	select {
	case err := <-failed:
		return errors.Join(err, server.Close())
	case <-ctx.Done():
	}
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), p.limits.stop)
	defer cancel()
	if server.Shutdown(grace) != nil {
		_ = server.Close() // those who have not read their answers by now do not get the rest
	}
	<-failed
	return nil
}
