package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	csimetrics "github.com/kubernetes-csi/csi-lib-utils/metrics"
	"k8s.io/klog/v2"
	libraries "sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pools"
	"github.com/ashlar-csi/ashlar/pkg/measure"
	"github.com/ashlar-csi/ashlar/pkg/metrics"
)

// observer is called at the end of each call (rpc.Services).
type observer = func(method string, err error, took time.Duration)

// checkMonitoring checks the flags of metrics and traces.
func (o *options) checkMonitoring() error {
	if o.metrics != "" {
		if _, err := checkAddress(o.metrics); err != nil {
			return fmt.Errorf("--metrics-endpoint=%s: write it as HOST:PORT or :PORT: %w", o.metrics, err)
		}
	}
	if o.traces != "" {
		host, err := checkAddress(o.traces)
		if err == nil && host == "" {
			err = errors.New("there is no host")
		}
		if err != nil {
			return fmt.Errorf("--trace-endpoint=%s: write it as HOST:PORT: %w", o.traces, err)
		}
	}
	switch {
	case o.perVolume && o.metrics == "":
		return errors.New("--metrics-per-volume: give --metrics-endpoint too")
	case o.perVolume && o.mode == "controller":
		return errors.New("--metrics-per-volume: nodes measure their volumes")
	}
	return nil
}

// checkAddress returns the host of HOST:PORT, which may be empty. It is an error if there is no port: an empty one would stand for any free port, which nobody
// knows.
func checkAddress(address string) (host string, err error) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return "", err
	}
	if port == "" {
		return "", errors.New("there is no port")
	}
	_, err = net.LookupPort("tcp", port)
	return host, err
}

// measured returns the opened pools as they are measured, in the order of their flags.
func (o *options) measured(opened []blockdev.Pool) []measure.Pool {
	var measured []measure.Pool
	for i, pool := range opened {
		measured = append(measured, measure.Pool{Pool: pool, Kind: pools.KindOf(o.pools[i].location)})
	}
	return measured
}

// monitored serves calls, and metrics if --metrics-endpoint is given: those of sources, of the calls, and of the libraries for requests to Kubernetes and for
// queues.
func (o *options) monitored(ctx context.Context, sources []metrics.Source, serve func(context.Context, observer) error) error {
	if o.metrics == "" {
		return serve(ctx, nil)
	}
	listener, err := metrics.Listen(o.metrics)
	if err != nil {
		return err
	}
	klog.FromContext(ctx).Info("Serving metrics", "address", listener.Addr().String())
	calls := csimetrics.NewCSIMetricsManagerWithOptions(o.driverName, csimetrics.WithSubsystem(csimetrics.SubsystemPlugin),
		csimetrics.WithProcessStartTime(false)) // the registry has it already
	all := metrics.Registry(version, sources, calls.GetRegistry(), metrics.Only(libraries.Registry, "rest_client_", "workqueue_"))
	return beside(ctx, func(ctx context.Context) error { return metrics.Serve(ctx, listener, all) },
		func(ctx context.Context) error { return serve(ctx, calls.RecordMetrics) })
}
