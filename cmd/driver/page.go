package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"regexp"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/internal/overview/socket"
	"github.com/ashlar-csi/ashlar/internal/page"
)

// checkPage checks --page.
func (o *options) checkPage() error {
	if o.page == "" {
		return nil
	}
	if o.mode == "node" {
		return errors.New("--page: the controller shows all nodes (--mode=controller)")
	}
	if _, err := checkAddress(o.page); err != nil {
		return fmt.Errorf("--page=%s: give HOST:PORT, as localhost:9820, or :9820 for all addresses of this machine: %w", o.page, err)
	}
	return nil
}

// withPage serves calls by serve, and the page of a source if --page is given. It fails if it cannot listen on the page's address.
func (o *options) withPage(ctx context.Context, source page.Source, serve func(context.Context) error) error {
	if o.page == "" {
		return serve(ctx)
	}
	listener, err := net.Listen("tcp", o.page)
	if err != nil {
		return fmt.Errorf("--page=%s: %w", o.page, err)
	}
	klog.FromContext(ctx).Info("Serving the page", "address", listener.Addr().String())
	return beside(ctx, func(ctx context.Context) error { return page.New(source).Serve(ctx, listener) }, serve)
}

// polled is the source of the page of one machine. It is told of the calls of this driver; changes that others make to disks and volumes cause no event, so it
// looks at everything now and then, which for an LVM pool takes a report of lvm2.
type polled struct {
	overview socket.Source
	busy     func() bool // something is copied or zeroed
	done     atomic.Int64
}

// While a page is open: how soon a change of the driver is shown, and how often everything is looked at otherwise.
const (
	pageSoon = 2 * time.Second
	pageIdle = 10 * time.Second
)

// looks matches the full names of calls that change nothing.
var looks = regexp.MustCompile(`Get|List|Probe|Validate`)

// observing returns an observer that counts the calls which may have changed something, and calls next, which may be nil.
func (p *polled) observing(next observer) observer {
	return func(method string, err error, took time.Duration) {
		if !looks.MatchString(method) {
			p.done.Add(1)
		}
		if next != nil {
			next(method, err, took)
		}
	}
}

func (p *polled) Overview(ctx context.Context) (*overview.Overview, error) { return p.overview(ctx) }

func (p *polled) Changes(ctx context.Context) <-chan struct{} {
	changes := make(chan struct{}, 1)
	go func() {
		ticker := time.NewTicker(pageSoon)
		defer ticker.Stop()
		for last, shown := time.Now(), p.done.Load(); ; {
			select {
			case <-ticker.C:
			case <-ctx.Done():
				return
			}
			done := p.done.Load()
			if done == shown && !p.busy() && time.Since(last) < pageIdle {
				continue
			}
			last, shown = time.Now(), done
			select {
			case changes <- struct{}{}:
			default: // the last one was not received yet
			}
		}
	}()
	return changes
}
