// Package trace is the driver's spans: what a call had done, and how long each part took. They are made only within a trace that
// somebody has begun (a call that came with one, or was sampled), and only if they are sent somewhere (Export). No span has
// anything of a request but names that the driver gives: no options, no secrets, no texts of errors.
package trace

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"k8s.io/klog/v2"
)

// name of the instrumentation, in each span.
const name = "github.com/ashlar-csi/ashlar"

// flushTime is how long the end of the driver waits until what is left of the spans was sent.
const flushTime = 2 * time.Second

// Export sends the spans of this process by OTLP (gRPC, without TLS, as Kubernetes' own components do) to HOST:PORT, until stop is
// called. Which traces are sampled that begin here the usual variables of the environment say (OTEL_TRACES_SAMPLER); all,
// without. It does not wait for the other side to be there. service is what the process is called there.
func Export(ctx context.Context, endpoint, service, version, node string) (stop func(), err error) {
	exporter, err := otlptracegrpc.New(ctx, otlptracegrpc.WithEndpoint(endpoint), otlptracegrpc.WithInsecure())
	if err != nil {
		return nil, fmt.Errorf("send traces (--trace-endpoint=%s): %w", endpoint, err)
	}
	about := resource.NewSchemaless(attribute.String("service.name", service), attribute.String("service.version", version), attribute.String("k8s.node.name", node))
	provider := sdk.NewTracerProvider(sdk.WithBatcher(exporter), sdk.WithResource(about))
	log := klog.FromContext(ctx)
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { log.V(2).Info("Could not send traces", "endpoint", endpoint, "err", err.Error()) }))
	otel.SetTextMapPropagator(propagation.TraceContext{})
	otel.SetTracerProvider(provider)
	return func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushTime)
		defer cancel()
		if err := provider.Shutdown(ctx); err != nil && !errors.Is(err, context.DeadlineExceeded) {
			log.V(2).Info("Could not send the last traces", "endpoint", endpoint, "err", err.Error())
		}
	}, nil
}

// Start begins a span within that of the context; without one it does nothing. attributes are keys and values in turn. end is to be
// called with the error of what was done.
func Start(ctx context.Context, what string, attributes ...string) (_ context.Context, end func(error)) {
	if !trace.SpanContextFromContext(ctx).IsSampled() {
		return ctx, func(error) {}
	}
	ctx, span := otel.Tracer(name).Start(ctx, what)
	for i := 0; i+1 < len(attributes); i += 2 {
		span.SetAttributes(attribute.String(attributes[i], attributes[i+1]))
	}
	return ctx, func(err error) {
		if err != nil {
			span.SetStatus(codes.Error, "") // its text is in the log, and may tell more than is for others
		}
		span.End()
	}
}

// Do does something within a span of its own.
func Do(ctx context.Context, what string, do func(context.Context) error, attributes ...string) error {
	ctx, end := Start(ctx, what, attributes...)
	err := do(ctx)
	end(err)
	return err
}

// header is where W3C Trace Context has the parent.
const header = "traceparent"

// Parent is the span of a context as text, for somebody who goes on with it in another process; empty unless it is sampled.
func Parent(ctx context.Context) string {
	if !trace.SpanContextFromContext(ctx).IsSampled() {
		return ""
	}
	carrier := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, carrier)
	return carrier[header]
}

// Continue returns a context whose spans are within the one of a text from Parent. What is no such text changes nothing.
func Continue(ctx context.Context, parent string) context.Context {
	return propagation.TraceContext{}.Extract(ctx, propagation.MapCarrier{header: parent})
}
