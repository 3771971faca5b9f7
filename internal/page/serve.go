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
		_ = server.Close() // who has not read the answer by now does without the rest
	}
	<-failed
	return nil
}
