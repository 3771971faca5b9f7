package cluster_test

import (
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/metrics/metricstest"
)

// TestReplicaMetrics: the metrics of the controller tell how many replicas of volumes are current, and how much is still to be copied to others.
func TestReplicaMetrics(t *testing.T) {
	w, _, s := legCluster(t, 3)
	is := func(what string, want map[string]float64) {
		t.Helper()
		var have map[string]float64
		defer func() {
			if t.Failed() {
				t.Logf("%s: %v", what, have)
			}
		}()
		w.eventually(what, func() bool {
			have = metricstest.Of(t, s.Samples).Values
			for series, value := range want {
				if v, there := have[series]; !there || v != value {
					return false
				}
			}
			return true
		})
	}
	is("there is none", map[string]float64{`ashlar_replicated_volumes{lacking="0",replicas="2"}`: 0, `ashlar_replicated_volumes{lacking="3",replicas="3"}`: 0, `ashlar_replicas{node="node-1",state="current"}`: 0})
	v, err := s.Create(w.ctx, replicas("v", 2, "node-1"))
	check.OK(t, err)
	leg := w.legsOf("v")[1]
	other := leg.Spec.NodeName
	is("both are current", map[string]float64{`ashlar_replicated_volumes{lacking="0",replicas="2"}`: 1, `ashlar_replicas{node="node-1",state="current"}`: 1, `ashlar_replicas{node="` + other + `",state="current"}`: 1})
	w.says("v", func(r *v1alpha1.ReplicatedVolume) {
		*r.Leg(leg.Name) = v1alpha1.Leg{Name: leg.Name, State: v1alpha1.LegJoining, Progress: &v1alpha1.Progress{Done: 30, Total: 100}}
	})
	is("one joins", map[string]float64{`ashlar_replicated_volumes{lacking="0",replicas="2"}`: 0, `ashlar_replicated_volumes{lacking="1",replicas="2"}`: 1, `ashlar_replicas{node="` + other + `",state="joining"}`: 1,
		`ashlar_replica_resync_bytes{node="` + other + `"}`: 70, `ashlar_replicas{node="` + other + `",state="current"}`: 0})
	w.becomes("v", w.whole("v").Name)
	is("one waits", map[string]float64{`ashlar_replicas{node="` + other + `",state="waiting"}`: 1, `ashlar_replica_resync_bytes{node="` + other + `"}`: 0})
	w.says("v", func(r *v1alpha1.ReplicatedVolume) {
		r.Status.Scrub = &v1alpha1.Scrub{Found: &v1alpha1.Differences{Bytes: 4096}}
	})
	is("they are not equal, and each counts as a replica", map[string]float64{`ashlar_replicas_differ`: 1, `ashlar_objects{kind="replica",node="` + other + `",state="ready"}`: 1, `ashlar_objects{kind="volume",node="` + other + `",state="ready"}`: 0})
	check.OK(t, s.Delete(w.ctx, v.ID))
	is("it is gone", map[string]float64{`ashlar_replicas_differ`: 0})
}
