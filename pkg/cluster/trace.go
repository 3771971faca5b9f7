package cluster

import (
	"context"

	"github.com/ashlar-csi/ashlar/internal/trace"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
)

// Trace sets the annotation of an object that names the trace of the call which changes its spec. If the call is not traced, it removes the annotation.
func Trace(ctx context.Context, o Object) {
	Annotate(o, v1alpha1.TraceAnnotation, trace.Parent(ctx))
}
