package cluster

import (
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
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
