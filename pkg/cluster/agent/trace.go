package agent

import (
	"context"

	"github.com/ashlar-csi/ashlar/internal/trace"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
)

// traced begins the span of a request, within that of the call that asked for what its object says; without one, or
// once that is carried out, there is none.
func (a *Agent) traced(ctx context.Context, r request) (context.Context, func(error)) {
	nothing := func(error) {}
	var parent string
	switch r.kind {
	case aVolume:
		v, there, err := get(ctx, a, r.key, &v1alpha1.Volume{})
		if err != nil || !there || carriedOut(v) {
			return ctx, nothing
		}
		parent = v.Annotations[v1alpha1.TraceAnnotation]
	default:
		snapshots := []v1alpha1.Snapshot{{}}
		var err error
		if r.kind == aGroup {
			snapshots, err = cluster.Members(ctx, a.kube.Client, r.key)
		} else {
			_, _, err = get(ctx, a, r.key, &snapshots[0])
		}
		for i := range snapshots {
			if s := &snapshots[i]; err == nil && !carriedOutSnapshot(s) {
				parent = s.Annotations[v1alpha1.TraceAnnotation]
			}
		}
	}
	if parent == "" {
		return ctx, nothing
	}
	return trace.Start(trace.Continue(ctx, parent), "agent "+r.kind, "object", r.key, "node", a.local.Node())
}
