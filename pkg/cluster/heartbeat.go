package cluster

import (
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
)

// An agent shows that it lives as kubelets do: it renews a Lease. The times are the kubelets' too.
const (
	// Heartbeat is how often an agent renews its Lease.
	Heartbeat = 10 * time.Second
	// SilentAfter is how long a Lease is not renewed before its agent is taken to be down.
	SilentAfter = v1alpha1.SilentAfter
)

// LeaseLabels tell the Leases of agents from those that sidecars elect their leaders by.
func LeaseLabels() map[string]string {
	return map[string]string{v1alpha1.HeartbeatLabel: v1alpha1.HeartbeatOfAgent}
}

// Lease is the Lease of a node's agent, which says nothing yet of a heartbeat.
func Lease(namespace, node string) *coordinationv1.Lease {
	return &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "node." + node, Labels: LeaseLabels()}}
}
