package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/metrics/metricstest"
)

// TestMetrics: the metrics of the controller and of the agent about objects.
func TestMetrics(t *testing.T) {
	w := newEnvironment(t)
	var failing atomic.Pointer[error]
	m := w.machineWith(nodeName, func(operation string, _ blockdev.Ref) error {
		if err := failing.Load(); err != nil && operation == "Create" {
			return *err
		}
		return nil
	})
	s, _ := w.store()
	w.pooled(s, m)
	ofNode := func(name, labels string) string { return name + `{` + labels + `node="` + nodeName + `"}` }
	request, failures := ofNode("ashlar_agent_oldest_request_seconds", ""), `ashlar_agent_failures_total{kind="volume",node="`+nodeName+`"}`
	agentSays := func(series string) float64 { return metricstest.Of(t, m.agent.Samples).Values[series] }
	volumes := func(state string) float64 {
		return metricstest.Of(t, s.Samples).Values[`ashlar_objects{kind="volume",node="`+nodeName+`",state="`+state+`"}`]
	}
	metricstest.Of(t, s.Samples).Is(t, ofNode("ashlar_node_agent_up", ""), 1)
	metricstest.Of(t, m.agent.Samples).Is(t, request, 0)
	metricstest.Of(t, m.agent.Samples).Is(t, ofNode("ashlar_agent_queue_length", ""), 0)
	before := agentSays(failures)

	busy := fmt.Errorf("%w: the disk does not answer", errdefs.ErrUnavailable)
	failing.Store(&busy)
	w.asked("the volume waits", func(ctx context.Context) error { return second(s.Create(ctx, spec("v"))) }, func() bool {
		return agentSays(request) > 0 && agentSays(failures) >= before+3 && volumes("making") == 1
	})
	broken := errors.New("the disk is on fire")
	failing.Store(&broken)
	w.eventually("the volume is said to have failed", func() bool { return volumes("failed") == 1 && volumes("making") == 0 })
	w.eventually("an answer that is final is no open request any more", func() bool { return agentSays(request) == 0 })
	failing.Store(nil)
	made, err := s.Create(w.ctx, spec("other"))
	check.OK(t, err)
	w.eventually("the other one is ready", func() bool { return volumes("ready") == 1 })
	check.OK(t, s.Delete(w.ctx, made.ID))
	w.eventually("it is gone", func() bool { return volumes("ready") == 0 })

	// Pools that are not reported any more: the node's driver was started without one, or the node is gone.
	elsewhere := volumeOn(nodeName, "of a pool that is not served")
	elsewhere.Spec.Pool = "fast"
	check.OK(t, w.Create(w.ctx, elsewhere))
	check.OK(t, w.Create(w.ctx, volumeOn("gone", "of a node that is gone")))
	w.eventually("a pool that the node was started without is said to be down", func() bool {
		values := metricstest.Of(t, m.agent.Samples).Values
		up, there := values[`ashlar_pool_up{kind="",node="`+nodeName+`",pool="fast"}`]
		return there && up == 0 && values[`ashlar_pool_problems{node="`+nodeName+`",pool="fast",reason="NotConfigured",severity="Inaccessible"}`] == 1
	})
	w.eventually("a node that is gone and has volumes is said to be down", func() bool {
		up, there := metricstest.Of(t, s.Samples).Values[`ashlar_node_agent_up{node="gone"}`]
		return there && up == 0
	})

	w.node(nodeName, false)
	w.eventually("the node is said to be down", func() bool { return metricstest.Of(t, s.Samples).Values[ofNode("ashlar_node_agent_up", "")] == 0 })
}
