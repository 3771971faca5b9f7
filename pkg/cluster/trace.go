package cluster

import (
	"context"

	"github.com/ashlar-csi/ashlar/internal/trace"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
)

// Trace writes into an object by which call its spec is changed, if that is traced. What an earlier call wrote does not stay.
func Trace(ctx context.Context, o Object) {
	Annotate(o, v1alpha1.TraceAnnotation, trace.Parent(ctx))
}
