package cluster

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
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// An agent shows that it lives as kubelets do: it renews a Lease. The times are the kubelets' too.
const (
	// Heartbeat is how often an agent renews its Lease.
	Heartbeat = 10 * time.Second
	// SilentAfter is how long a Lease is not renewed before its agent is taken to be down.
	SilentAfter = 40 * time.Second

	// heartbeatLabel tells the Leases of agents from those that sidecars elect their leaders by.
	heartbeatLabel = "ashlar.dev/heartbeat"
	heartbeatValue = "agent"
)

func leaseNamed(namespace, node string) *coordinationv1.Lease {
	return &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "node." + node, Labels: map[string]string{heartbeatLabel: heartbeatValue}}}
}

// Heartbeat has the agent renew a Lease in a namespace, so often. It is called before Run.
func (a *Agent) Heartbeat(namespace string, every time.Duration) {
	a.namespace, a.every = namespace, every
}

// beat renews the agent's Lease until the context ends.
func (a *Agent) beat(ctx context.Context) {
	if a.namespace == "" {
		return
	}
	for {
		trying, cancel := context.WithTimeout(ctx, a.every)
		if err := a.renew(trying); err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "Could not renew the agent's Lease; trying again", "namespace", a.namespace)
		}
		cancel()
		select {
		case <-ctx.Done():
			return
		case <-time.After(a.every):
		}
	}
}

// renew writes the agent's Lease: one request, as nobody else writes it. What somebody changed is put right.
func (a *Agent) renew(ctx context.Context) error {
	for {
		now, node, duration := metav1.NowMicro(), a.local.Node(), int32(SilentAfter/time.Second)
		spec := coordinationv1.LeaseSpec{HolderIdentity: &node, LeaseDurationSeconds: &duration, RenewTime: &now}
		if a.lease == nil {
			lease := leaseNamed(a.namespace, a.local.Node())
			err := a.live.Get(ctx, client.ObjectKeyFromObject(lease), lease)
			if apierrors.IsNotFound(err) {
				lease.Spec = spec
				if lease.OwnerReferences, err = a.owner(ctx); err != nil {
					return err
				}
				if err = a.live.Create(ctx, lease); err == nil {
					a.lease = lease
				}
				return err
			}
			if err != nil {
				return err
			}
			a.lease = lease
		}
		a.lease.Spec = spec
		a.lease.Labels = leaseNamed(a.namespace, node).Labels
		err := a.live.Update(ctx, a.lease)
		if err != nil {
			a.lease = nil
		}
		if !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
			return err
		}
	}
}

// owner is the node: its Lease goes with it.
func (a *Agent) owner(ctx context.Context) ([]metav1.OwnerReference, error) {
	node := nodeNamed(a.local.Node())
	if err := a.live.Get(ctx, client.ObjectKeyFromObject(node), node); err != nil {
		return nil, client.IgnoreNotFound(err) // without a node, somebody else has to remove it
	}
	return []metav1.OwnerReference{{APIVersion: corev1.SchemeGroupVersion.String(), Kind: "Node", Name: node.Name, UID: node.UID}}, nil
}

// beats are when a store last heard of the agents, by its own clock: those of the nodes do not matter.
type beats struct {
	mu      sync.Mutex
	heard   map[string]heard // by node
	doubted map[string]heard // by node: the Lease when the API server itself first said that it was not renewed
	deaf    bool             // the API server did not tell of the Leases when the store last asked for them
	since   time.Time        // when it was deaf last
}

// listener notes whether the API server tells the store of the Leases when it asks for them: while it is down, cannot
// be reached or is too busy nothing can be heard of any agent, and that says nothing of them.
type listener struct {
	http.RoundTripper
	*beats
}

func (l listener) RoundTrip(r *http.Request) (*http.Response, error) {
	answer, err := l.RoundTripper.RoundTrip(r)
	if strings.HasSuffix(r.URL.Path, "/leases") && !errors.Is(err, context.Canceled) {
		l.listens(err == nil && answer.StatusCode == http.StatusOK)
	}
	return answer, err
}

func (b *beats) listens(hears bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.deaf && hears {
		b.since = time.Now()
	}
	b.deaf = !hears
}

type heard struct {
	renewed time.Time // as the Lease says
	at      time.Time
}

// leaseChanged notes down that an agent was heard.
func (s *Store) leaseChanged(o client.Object, gone bool) {
	lease, ok := o.(*coordinationv1.Lease)
	if !ok || lease.Spec.HolderIdentity == nil || lease.Spec.RenewTime == nil {
		return
	}
	node, renewed := *lease.Spec.HolderIdentity, lease.Spec.RenewTime.Time
	s.beats.mu.Lock()
	defer s.beats.mu.Unlock()
	if s.beats.heard == nil {
		s.beats.heard = map[string]heard{}
	}
	if gone {
		delete(s.beats.heard, node)
		delete(s.beats.doubted, node)
	} else if !s.beats.heard[node].renewed.Equal(renewed) {
		s.beats.heard[node] = heard{renewed, time.Now()}
	}
}

// patience is how much longer a node's agent may be silent: all of SilentAfter once the API server
// answers again. It is false for one that never had a Lease: it is of an older version, and the
// node's own word has to do.
func (s *Store) patience(node string) (left time.Duration, beats bool) {
	s.beats.mu.Lock()
	defer s.beats.mu.Unlock()
	last, beats := s.beats.heard[node]
	since := last.at
	switch {
	case s.beats.deaf:
		since = time.Now()
	case s.beats.since.After(since):
		since = s.beats.since
	}
	return s.options.SilentAfter - time.Since(since), beats
}

// silence is a channel that tells when a node's agent has been silent for too long.
func (s *Store) silence(node string) <-chan time.Time {
	if left, beats := s.patience(node); beats {
		return time.After(left)
	}
	return nil
}

// nodeDown is the ErrUnavailable of a node that carries nothing out now.
type nodeDown struct {
	why string
	// silent: it is the agent that is not there. Volumes that are in use go on without it.
	silent bool
}

func (d *nodeDown) Error() string { return errdefs.ErrUnavailable.Error() + ": " + d.why }
func (d *nodeDown) Unwrap() error { return errdefs.ErrUnavailable }

// nodeReady is a nodeDown if a node is not there or not ready, or nothing is heard of its agent.
func (s *Store) nodeReady(ctx context.Context, name string) error {
	if err := readyNow(ctx, s.cache, name); err != nil {
		return err
	}
	if left, beats := s.patience(name); beats && left <= 0 {
		return &nodeDown{fmt.Sprintf("nothing was heard of the driver on node %s for %s", name, s.options.SilentAfter), true}
	}
	return nil
}

// readyNow is a nodeDown if a node is not there or not ready.
func readyNow(ctx context.Context, from client.Reader, name string) error {
	var node corev1.Node
	if err := from.Get(ctx, client.ObjectKey{Name: name}, &node); err != nil {
		if apierrors.IsNotFound(err) {
			return &nodeDown{why: "there is no node " + name}
		}
		return apiError("look at node "+name, err)
	}
	for _, c := range node.Status.Conditions {
		if c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue {
			return nil
		}
	}
	return &nodeDown{why: "node " + name + " is not ready"}
}

// alive looks at the API server itself whether a node and its agent are there after all. It is true if that cannot
// be told. An agent that was silent for too long has time for one more heartbeat, from when the API server first says
// so: if that has hung until then, no agent could be heard.
func (s *Store) alive(ctx context.Context, node string) bool {
	for {
		if err := readyNow(ctx, s.live, node); err != nil {
			var down *nodeDown
			return !errors.As(err, &down)
		}
		lease := leaseNamed(s.options.Namespace, node)
		if err := s.live.Get(ctx, client.ObjectKeyFromObject(lease), lease); err == nil {
			s.leaseChanged(lease, false)
		} else if !apierrors.IsNotFound(err) {
			return true
		}
		if left, beats := s.patience(node); !beats || left > 0 {
			return true
		}
		left := s.doubt(node)
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
func (s *Store) doubt(node string) time.Duration {
	s.beats.mu.Lock()
	defer s.beats.mu.Unlock()
	renewed := s.beats.heard[node].renewed
	if s.beats.doubted == nil {
		s.beats.doubted = map[string]heard{}
	}
	if first, there := s.beats.doubted[node]; !there || !first.renewed.Equal(renewed) {
		s.beats.doubted[node] = heard{renewed, time.Now()}
	}
	return s.options.SilentAfter/3 - time.Since(s.beats.doubted[node].at)
}

// withdraw takes back what a node that is down was asked to make, and has not said that it
// began with. Then the error is ErrNoSpace: another node may be chosen. If the node has begun, it
// finds that nobody wants what it made (unwanted). Otherwise it is down's error.
func (s *Store) withdraw(ctx context.Context, have *v1alpha1.Volume, down error) error {
	now := &v1alpha1.Volume{}
	err := s.live.Get(ctx, client.ObjectKeyFromObject(have), now)
	switch {
	case err != nil && !apierrors.IsNotFound(err):
		return down
	case err == nil && (now.UID != have.UID || now.Status.Created != nil || !now.Spec.Make || going(now) || s.alive(ctx, now.Spec.NodeName)):
		return down
	case err == nil:
		if client.IgnoreNotFound(s.client.Delete(ctx, now, client.Preconditions{UID: &now.UID, ResourceVersion: &now.ResourceVersion})) != nil {
			return down
		}
		klog.FromContext(ctx).Info("Took back what a node that is down was to make", "volume", volumeID(now).String(), "node", now.Spec.NodeName)
	}
	return fmt.Errorf("%w on node %s: %s; nothing was made there, so another node may be chosen", errdefs.ErrNoSpace, have.Spec.NodeName, down.Error())
}
