// Package liveness tells the controller which nodes of a cluster carry out what is asked of them: nodes that are ready,
// and whose agent renews its Lease.
package liveness

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Monitor knows when the controller last heard of each agent, by the controller's own clock: those of the nodes do not
// matter. It has to be told of the Leases (LeaseChanged) and of the requests for them (Wrap).
type Monitor struct {
	namespace   string
	silentAfter time.Duration
	cached      client.Reader
	live        client.Reader

	mu      sync.Mutex
	heard   map[string]heard // by node
	doubted map[string]heard // by node: the Lease when the API server itself first said that it was not renewed
	deaf    bool             // the API server did not tell of the Leases when it was last asked for them
	since   time.Time        // when it was deaf last
}

// heard is a heartbeat.
type heard struct {
	renewed time.Time // as the Lease says
	at      time.Time // by our clock
}

// New returns the monitor of the agents whose Leases are in a namespace, and that are down when nothing was heard of
// them for some time. It works once it has a connection (Use).
func New(namespace string, silentAfter time.Duration) *Monitor {
	return &Monitor{namespace: namespace, silentAfter: silentAfter, heard: map[string]heard{}, doubted: map[string]heard{}}
}

// Use gives the monitor its connection to the API server, before anything is asked of it.
func (m *Monitor) Use(c kube.Connection) { m.cached, m.live = c.Cache, c.Live }

// Wrap returns a transport that notes whether the API server tells of the Leases when it is asked for them: while it is
// down, cannot be reached or is too busy nothing can be heard of any agent, and that says nothing of them.
func (m *Monitor) Wrap(next http.RoundTripper) http.RoundTripper { return transport{next, m} }

type transport struct {
	http.RoundTripper
	monitor *Monitor
}

func (t transport) RoundTrip(r *http.Request) (*http.Response, error) {
	answer, err := t.RoundTripper.RoundTrip(r)
	if strings.HasSuffix(r.URL.Path, "/leases") && !errors.Is(err, context.Canceled) {
		t.monitor.listens(err == nil && answer.StatusCode == http.StatusOK)
	}
	return answer, err
}

func (m *Monitor) listens(hears bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.deaf && hears {
		m.since = time.Now()
	}
	m.deaf = !hears
}

// Hears reports whether the API server tells of the Leases, as far as it was asked. While it does not, what is known of anything may be old.
func (m *Monitor) Hears() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return !m.deaf
}

// LeaseChanged notes down that an agent was heard.
func (m *Monitor) LeaseChanged(o client.Object, gone bool) {
	lease, ok := o.(*coordinationv1.Lease)
	if !ok || lease.Spec.HolderIdentity == nil || lease.Spec.RenewTime == nil {
		return
	}
	node, renewed := *lease.Spec.HolderIdentity, lease.Spec.RenewTime.Time
	m.mu.Lock()
	defer m.mu.Unlock()
	if gone {
		delete(m.heard, node)
		delete(m.doubted, node)
	} else if !m.heard[node].renewed.Equal(renewed) {
		m.heard[node] = heard{renewed, time.Now()}
	}
}

// Patience is how much longer a node's agent may be silent: the whole time once the API server
// answers again. It is false for one that never had a Lease: it is of an older version, and the
// node's own word has to do.
func (m *Monitor) Patience(node string) (left time.Duration, beats bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	last, beats := m.heard[node]
	since := last.at
	switch {
	case m.deaf:
		since = time.Now()
	case m.since.After(since):
		since = m.since
	}
	return m.silentAfter - time.Since(since), beats
}

// Silent is for how long nothing was heard of a node's agent; false for one that never had a Lease.
func (m *Monitor) Silent(node string) (silent time.Duration, beats bool) {
	left, beats := m.Patience(node)
	return m.silentAfter - left, beats
}

// Silence is a channel that tells when a node's agent has been silent for too long; nil for one that never had a Lease.
func (m *Monitor) Silence(node string) <-chan time.Time {
	if left, beats := m.Patience(node); beats {
		return time.After(left)
	}
	return nil
}

// NodeDown is the ErrUnavailable of a node that carries nothing out now.
type NodeDown struct {
	Why string
	// Silent: it is the agent that is not there. Volumes that are in use go on without it.
	Silent bool
}

func (d *NodeDown) Error() string { return errdefs.ErrUnavailable.Error() + ": " + d.Why }
func (d *NodeDown) Unwrap() error { return errdefs.ErrUnavailable }

// Ready is a NodeDown if a node is not there or not ready, or nothing is heard of its agent.
func (m *Monitor) Ready(ctx context.Context, node string) error {
	if err := ready(ctx, m.cached, node); err != nil {
		return err
	}
	if left, beats := m.Patience(node); beats && left <= 0 {
		return &NodeDown{fmt.Sprintf("nothing was heard of the driver on node %s for %s", node, m.silentAfter), true}
	}
	return nil
}

// ready is a NodeDown if a node is not there or not ready.
func ready(ctx context.Context, from client.Reader, name string) error {
	var node corev1.Node
	if err := from.Get(ctx, client.ObjectKey{Name: name}, &node); err != nil {
		if apierrors.IsNotFound(err) {
			return &NodeDown{Why: "there is no node " + name}
		}
		return kube.APIError("look at node "+name, err)
	}
	for _, c := range node.Status.Conditions {
		if c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue {
			return nil
		}
	}
	return &NodeDown{Why: "node " + name + " is not ready"}
}

// Alive looks at the API server itself whether a node and its agent are there after all. It is true if that cannot
// be told. An agent that was silent for too long has time for one more heartbeat, from when the API server first says
// so: if that has hung until then, no agent could be heard.
func (m *Monitor) Alive(ctx context.Context, node string) bool {
	for {
		if err := ready(ctx, m.live, node); err != nil {
			var down *NodeDown
			return !errors.As(err, &down)
		}
		lease := cluster.Lease(m.namespace, node)
		if err := m.live.Get(ctx, client.ObjectKeyFromObject(lease), lease); err == nil {
			m.LeaseChanged(lease, false)
		} else if !apierrors.IsNotFound(err) {
			return true
		}
		if left, beats := m.Patience(node); !beats || left > 0 {
			return true
		}
		left := m.doubt(node)
		if left <= 0 {
			return false
		}
		select {
		case <-ctx.Done():
			return true // who asks again finds the doubt
		case <-time.After(left):
		}
	}
}

// doubt is how much longer an agent has whose Lease the API server says was not renewed: somewhat more than a
// heartbeat, which is the pause after a try that failed.
func (m *Monitor) doubt(node string) time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	renewed := m.heard[node].renewed
	if first, there := m.doubted[node]; !there || !first.renewed.Equal(renewed) {
		m.doubted[node] = heard{renewed, time.Now()}
	}
	return m.silentAfter/3 - time.Since(m.doubted[node].at)
}
