package page

import (
	"context"
	"errors"
	"net"
	"net/http"
	"time"

	"golang.org/x/net/netutil"
	"k8s.io/klog/v2"
)

// limits keep those who look from taking what the driver needs.
type limits struct {
	read        time.Duration // until a request is read
	write       time.Duration // until an answer, or one event, is taken
	idle        time.Duration // how long a connection without a request stays
	alive       time.Duration // how often a stream without news says so
	stop        time.Duration // how long answers may still go on when serving ends
	connections int           // more than that wait
	streams     int           // of events; fewer than connections, so that pages are served beside them
}

var defaults = limits{read: 10 * time.Second, write: 30 * time.Second, idle: time.Minute, alive: 20 * time.Second, stop: 5 * time.Second,
	connections: 256, streams: 128}

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
