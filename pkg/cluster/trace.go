package cluster

import (
	"context"

	"github.com/ashlar-csi/ashlar/internal/trace"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
)

// Trace writes into an object by which call its spec is changed, if that is traced. What an earlier call wrote does not stay.
func Trace(ctx context.Context, o Object) {
	annotations := o.GetAnnotations()
	parent := trace.Parent(ctx)
	switch {
	case parent == "":
		delete(annotations, v1alpha1.TraceAnnotation)
		return
	case annotations == nil:
		annotations = map[string]string{}
	}
	annotations[v1alpha1.TraceAnnotation] = parent
	o.SetAnnotations(annotations)
}
