package main

import (
	"context"
	"errors"
	"fmt"
	"net"
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
	if _, _, err := net.SplitHostPort(o.page); err != nil {
		return fmt.Errorf("--page=%s: give HOST:PORT, as localhost:9820, or :9820 for all addresses of this machine: %w", o.page, err)
	}
	return nil
}

// withPage serves calls, and beside that the page of a source, if there is to be one. It fails if the page's
// address cannot be had.
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

// polled is the source of a page for what does not tell when it changes.
type polled struct {
	overview socket.Source
	every    time.Duration
}

func (p polled) Overview(ctx context.Context) (*overview.Overview, error) { return p.overview(ctx) }

func (p polled) Changes(ctx context.Context) <-chan struct{} {
	changes := make(chan struct{}, 1)
	go func() {
		ticker := time.NewTicker(p.every)
		defer ticker.Stop()
		for {
			select {
			case <-ticker.C:
			case <-ctx.Done():
				return
			}
			select {
			case changes <- struct{}{}:
			default: // it was told already
			}
		}
	}()
	return changes
}
