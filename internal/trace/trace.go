// Package trace makes the driver's spans: the parts of a call, and how long each took. There are spans only within a trace that was begun (by the caller of a
// call, or as it was sampled), and only if they are sent somewhere (Export). A span has nothing of a request but names that the driver gives: no options, no
// secrets, no texts of errors.
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

// name is that of the instrumentation, in each span.
const name = "github.com/ashlar-csi/ashlar"

// flushTime is how long stop waits until the last spans are sent.
const flushTime = 2 * time.Second

// Export sends the spans of this process to HOST:PORT by OTLP (gRPC, without TLS, as the components of Kubernetes do), until stop is called. Which of the
// traces that begin here are sampled is set by the usual variables of the environment (OTEL_TRACES_SAMPLER); without these, all are. It does not wait until the
// other side is there. service is the name of the process there.
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

// Start begins a span within that of the context; it does nothing if there is none, or it is not sampled. attributes are keys and values in turn. end has to be
// called with the error of the span's work.
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
			span.SetStatus(codes.Error, "") // the text is in the log; it may tell more than a span may have
		}
		span.End()
	}
}

// Do runs a function within a span of its own.
func Do(ctx context.Context, what string, do func(context.Context) error, attributes ...string) error {
	ctx, end := Start(ctx, what, attributes...)
	err := do(ctx)
	end(err)
	return err
}

// header is the key of the parent span in W3C Trace Context.
const header = "traceparent"

// Parent returns the span of a context as text, for another process to continue (Continue). It is empty unless the span is sampled.
func Parent(ctx context.Context) string {
	if !trace.SpanContextFromContext(ctx).IsSampled() {
		return ""
	}
	carrier := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, carrier)
	return carrier[header]
}

// Continue returns a context whose spans are within the one of a text by Parent. Any other text changes nothing.
func Continue(ctx context.Context, parent string) context.Context {
	return propagation.TraceContext{}.Extract(ctx, propagation.MapCarrier{header: parent})
}
