package cluster

import (
	"context"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
)

// An agent shows that it is alive as kubelets do: it renews a Lease, with the times of the kubelets.
const (
	// Heartbeat is how often an agent renews its Lease.
	Heartbeat = 10 * time.Second
	// SilentAfter is how long a Lease is not renewed before its agent is taken to be down.
	SilentAfter = v1alpha1.SilentAfter
)

// LeaseLabels returns the labels of the Leases of agents. Those by which sidecars elect their leaders do not have them.
func LeaseLabels() map[string]string {
	return map[string]string{v1alpha1.HeartbeatLabel: v1alpha1.HeartbeatOfAgent}
}

// Lease returns the Lease of a node's agent, without a heartbeat.
func Lease(namespace, node string) *coordinationv1.Lease {
	return &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "node." + node, Labels: LeaseLabels()}}
}

// NodeIsGone reports whether a node is gone for good (IsGone), both by the cache of a connection and by the API server, which is asked only if the cache says so.
func NodeIsGone(ctx context.Context, c kube.Connection, name string) (bool, error) {
	node := &corev1.Node{}
	err := c.Cache.Get(ctx, client.ObjectKey{Name: name}, node)
	if IsGone(node, err) {
		node = &corev1.Node{}
		err = c.Live.Get(ctx, client.ObjectKey{Name: name}, node)
	}
	return IsGone(node, err), kube.APIError("look at node "+name, client.IgnoreNotFound(err))
}

// IsGone reports whether a node is gone for good: err, of the read of its object, is NotFound, or the object has v1alpha1.GoneTaint. With any other error it is
// false.
func IsGone(node *corev1.Node, err error) bool {
	if err != nil {
		return apierrors.IsNotFound(err)
	}
	for _, taint := range node.Spec.Taints {
		if taint.Key == v1alpha1.GoneTaint {
			return true
		}
	}
	return false
}
