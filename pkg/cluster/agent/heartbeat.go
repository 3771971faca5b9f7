package agent

import (
	"context"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
)

// heartbeat shows that the agent of a node is alive.
type heartbeat struct {
	live      client.Client
	namespace string
	node      string
	every     time.Duration
	lease     *coordinationv1.Lease // as it was last written
}

// run renews the agent's Lease until the context ends.
func (h *heartbeat) run(ctx context.Context) {
	for {
		trying, cancel := context.WithTimeout(ctx, h.every)
		if err := h.renew(trying); err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "Could not renew the agent's Lease; trying again", "namespace", h.namespace)
		}
		cancel()
		select {
		case <-ctx.Done():
			return
		case <-time.After(h.every):
		}
	}
}

// renew writes the agent's Lease. That is one request, unless somebody else has changed or deleted the Lease, which is undone.
func (h *heartbeat) renew(ctx context.Context) error {
	for {
		if h.lease == nil {
			lease := cluster.Lease(h.namespace, h.node)
			err := h.live.Get(ctx, client.ObjectKeyFromObject(lease), lease)
			if apierrors.IsNotFound(err) {
				return h.create(ctx, lease)
			}
			if err != nil {
				return err
			}
			h.lease = lease
		}
		h.lease.Spec, h.lease.Labels = h.now(), cluster.LeaseLabels()
		err := h.live.Update(ctx, h.lease)
		if err != nil {
			h.lease = nil
		}
		if !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
			return err
		}
	}
}

// create creates the agent's Lease.
func (h *heartbeat) create(ctx context.Context, lease *coordinationv1.Lease) (err error) {
	lease.Spec = h.now()
	if lease.OwnerReferences, err = h.owner(ctx); err != nil {
		return err
	}
	if err = h.live.Create(ctx, lease); err == nil {
		h.lease = lease
	}
	return err
}

// now returns the spec of the Lease, renewed now.
func (h *heartbeat) now() coordinationv1.LeaseSpec {
	node, now, duration := h.node, metav1.NowMicro(), int32(cluster.SilentAfter/time.Second)
	return coordinationv1.LeaseSpec{HolderIdentity: &node, LeaseDurationSeconds: &duration, RenewTime: &now}
}

// owner returns the Node as the owner of the Lease, so that Kubernetes deletes both together.
func (h *heartbeat) owner(ctx context.Context) ([]metav1.OwnerReference, error) {
	node := kube.Node(h.node)
	if err := h.live.Get(ctx, client.ObjectKeyFromObject(node), node); err != nil {
		return nil, client.IgnoreNotFound(err) // without a Node the Lease has no owner, and stays
	}
	return []metav1.OwnerReference{{APIVersion: corev1.SchemeGroupVersion.String(), Kind: "Node", Name: node.Name, UID: node.UID}}, nil
}
