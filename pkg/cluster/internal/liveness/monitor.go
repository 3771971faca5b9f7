// Package liveness tells the controller which nodes of a cluster work: those that are ready, and whose agent renews its Lease.
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

// Monitor knows when the controller last heard of each agent, by the controller's own clock: those of the nodes do not matter. It has to be told of
// changes of the Leases (LeaseChanged), and has to see the requests for them (Wrap).
type Monitor struct {
	namespace   string
	silentAfter time.Duration
	cached      client.Reader
	live        client.Reader

	mu      sync.Mutex
	heard   map[string]heard // the last heartbeats, by node
	doubted map[string]heard // by node: the last heartbeat of an agent that is silent, and when the API server first confirmed that there is no later one
	deaf    bool             // the last request for Leases failed
	since   time.Time        // when deaf last ended
}

// heard is a heartbeat.
type heard struct {
	renewed time.Time // by the Lease
	at      time.Time // by the controller's clock
}

// New returns a Monitor of the agents whose Leases are in a namespace. They count as down when nothing was heard of them for silentAfter. It needs a
// connection (Use).
func New(namespace string, silentAfter time.Duration) *Monitor {
	return &Monitor{namespace: namespace, silentAfter: silentAfter, heard: map[string]heard{}, doubted: map[string]heard{}}
}

// Use gives the monitor its connection to the API server, before anything is asked of it.
func (m *Monitor) Use(c kube.Connection) { m.cached, m.live = c.Cache, c.Live }

// Wrap returns a transport that notes whether requests for the Leases succeed. While the API server is down, cannot be reached or is too busy, nothing is
// heard of any agent, and that does not mean that the agents are down.
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

// Hears reports whether the last request for Leases succeeded. If not, all that the caches have may be old.
func (m *Monitor) Hears() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return !m.deaf
}

// LeaseChanged notes that an agent was heard, if its Lease was renewed, or that the Lease is gone.
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

// Patience returns how much longer the agent of a node may be silent; 0 or less if it has been silent for too long. When the API server answers again
// after it did not, each agent has the whole time. beats is false if no Lease of the agent is known: it may be of an older version, and whether the node
// is ready has to do.
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

// Silent returns for how long nothing was heard of the agent of a node. beats is as in Patience.
func (m *Monitor) Silent(node string) (silent time.Duration, beats bool) {
	left, beats := m.Patience(node)
	return m.silentAfter - left, beats
}

// Silence returns a channel that receives when the agent of a node will have been silent for too long, if nothing is heard of it from now on; nil if no
// Lease of it is known.
func (m *Monitor) Silence(node string) <-chan time.Time {
	if left, beats := m.Patience(node); beats {
		return time.After(left)
	}
	return nil
}

// NodeDown is the ErrUnavailable of a node that does not work now.
type NodeDown struct {
	Why string
	// Silent: the node is ready, but its agent is not heard. Volumes that are in use there go on without it.
	Silent bool
}

func (d *NodeDown) Error() string { return errdefs.ErrUnavailable.Error() + ": " + d.Why }
func (d *NodeDown) Unwrap() error { return errdefs.ErrUnavailable }

// Ready returns a *NodeDown if a node does not exist or is not ready, or nothing is heard of its agent. It reads the node from the cache.
func (m *Monitor) Ready(ctx context.Context, node string) error {
	if err := ready(ctx, m.cached, node); err != nil {
		return err
	}
	if left, beats := m.Patience(node); beats && left <= 0 {
		return &NodeDown{fmt.Sprintf("nothing was heard of the driver on node %s for %s", node, m.silentAfter), true}
	}
	return nil
}

// ready returns a *NodeDown if a node does not exist or is not ready.
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

// Alive asks the API server whether a node is ready and its agent heard after all. It is true if that cannot be found out. An agent that was silent for
// too long has time for one more heartbeat from when the API server first confirms that (doubt), as before that the API server may have hung. Alive waits
// for that, and returns true if ctx ends first.
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
			return true // the next call goes on with the same doubt
		case <-time.After(left):
		}
	}
}

// doubt returns how much longer an agent has for a heartbeat, after the API server confirmed that its Lease was not renewed: a third of silentAfter from
// the first call for that heartbeat on, which is somewhat more than the time between two heartbeats.
func (m *Monitor) doubt(node string) time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	renewed := m.heard[node].renewed
	if first, there := m.doubted[node]; !there || !first.renewed.Equal(renewed) {
		m.doubted[node] = heard{renewed, time.Now()}
	}
	return m.silentAfter/3 - time.Since(m.doubted[node].at)
}
