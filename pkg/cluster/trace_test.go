package cluster_test

import (
	"context"
	"net"
	"path/filepath"
	"sync"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/otel"
	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	tracing "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/trace"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/controller"
	"github.com/ashlar-csi/ashlar/pkg/csimap"
	"github.com/ashlar-csi/ashlar/pkg/rpc"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// receiver is an OTLP receiver, like a collector of traces.
type receiver struct {
	collector.UnimplementedTraceServiceServer
	mu    sync.Mutex
	spans []*tracing.Span
}

func (r *receiver) Export(_ context.Context, request *collector.ExportTraceServiceRequest) (*collector.ExportTraceServiceResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, of := range request.GetResourceSpans() {
		for _, scope := range of.GetScopeSpans() {
			r.spans = append(r.spans, scope.GetSpans()...)
		}
	}
	return &collector.ExportTraceServiceResponse{}, nil
}

// named returns a span of a name; nil if none has come.
func (r *receiver) named(name string) *tracing.Span {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, span := range r.spans {
		if span.GetName() == name {
			return span
		}
	}
	return nil
}

// server returns the span of the call in the controller; nil if none has come.
func (r *receiver) server() *tracing.Span {
	for _, span := range r.spans {
		if span.GetKind() == tracing.Span_SPAN_KIND_SERVER {
			return span
		}
	}
	return nil
}

// TestTrace: what a node does for a call is in the trace of that call, which goes from the controller through the object to the agent. A call that is not
// traced leaves nothing in the object.
func TestTrace(t *testing.T) {
	w, _, s := newCluster(t)
	untraced, err := s.Create(w.ctx, spec("untraced"))
	check.OK(t, err)
	annotation := func(v volume.Volume) string {
		o := &v1alpha1.Volume{}
		check.OK(t, w.Get(w.ctx, client.ObjectKey{Name: v.ID.Key}, o))
		return o.Annotations[v1alpha1.TraceAnnotation]
	}
	if have := annotation(untraced); have != "" {
		t.Errorf("the object of a call that is not traced says %q", have)
	}

	listener, err := net.Listen("tcp", "127.0.0.1:0")
	check.OK(t, err)
	received := &receiver{}
	server := grpc.NewServer()
	collector.RegisterTraceServiceServer(server, received)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	before := otel.GetTracerProvider()
	t.Cleanup(func() { otel.SetTracerProvider(before) })
	stop, err := trace.Export(w.ctx, listener.Addr().String(), "test", "v1", nodeName)
	check.OK(t, err)
	socket, err := rpc.Listen("unix://" + filepath.Join(t.TempDir(), "csi.sock"))
	check.OK(t, err)
	end := w.run(func(ctx context.Context) error {
		return rpc.Serve(ctx, socket, rpc.Services{Controller: controller.New(s), Traced: true})
	})
	conn, err := grpc.NewClient("unix://"+socket.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithStatsHandler(otelgrpc.NewClientHandler()))
	check.OK(t, err)
	defer conn.Close()
	ctx, call := otel.Tracer("test").Start(w.ctx, "call")
	request := co.Request("traced", co.Block, mib)
	request.AccessibilityRequirements = &csi.TopologyRequirement{Requisite: []*csi.Topology{csimap.Topology(nodeName)}}
	_, err = csi.NewControllerClient(conn).CreateVolume(ctx, request)
	check.OK(t, err)
	call.End()
	end()
	made, err := s.Get(w.ctx, volume.ID{Kind: blockdev.Volume, Pool: "default", Key: volume.KeyOf("traced")})
	check.OK(t, err)
	if have := annotation(made); have == "" {
		t.Error("the object of a call that is traced does not say so")
	}
	w.eventually("the agent's span has come", func() bool { return received.named("agent volume") != nil })
	stop()

	root, served, agent, bytes := received.named("call"), received.server(), received.named("agent volume"), received.named("allocate")
	if root == nil || served == nil || bytes == nil {
		t.Fatalf("spans are missing: %v", received.spans)
	}
	if string(agent.GetParentSpanId()) != string(served.GetSpanId()) {
		t.Error("the agent's span is not within that of the controller")
	}
	if string(bytes.GetParentSpanId()) != string(agent.GetSpanId()) {
		t.Error("what the agent did is not within its span")
	}
	for _, span := range received.spans {
		if string(span.GetTraceId()) != string(root.GetTraceId()) {
			t.Errorf("span %s is of no call", span.GetName())
		}
	}
	check.OK(t, s.Delete(w.ctx, made.ID))
}
