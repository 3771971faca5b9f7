package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// DefaultDriver is the name of the CSI driver unless it was started with another one.
const DefaultDriver = v1alpha1.DefaultDriver

// DriverOf returns the name of the driver that a pool belongs to.
func DriverOf(p *v1alpha1.Pool) string { return cmp.Or(p.Spec.Driver, DefaultDriver) }

// driverPause is the time between two tries of WaitForOwner.
const driverPause = time.Second

// WaitForOwner is CheckOwner, but repeats it until the API server answers. It returns nil when the context ends first.
func WaitForOwner(ctx context.Context, c client.Reader, driver string) error {
	for {
		err := CheckOwner(ctx, c, driver)
		if err == nil || errors.Is(err, errdefs.ErrPrecondition) {
			return err
		}
		klog.FromContext(ctx).Error(err, "Could not find out whose the pools of the cluster are; trying again")
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(driverPause):
		}
	}
}

// CheckOwner returns ErrPrecondition if the pools of the cluster belong to a driver of another name: the one of the oldest pool. Volumes and snapshots do
// not say whose they are, so two drivers would work on the same ones. If the pools cannot be listed, the error is that of the API server (kube.APIError).
func CheckOwner(ctx context.Context, c client.Reader, driver string) error {
	var pools v1alpha1.PoolList
	if err := c.List(ctx, &pools); err != nil {
		return kube.APIError("list pools", err)
	}
	if len(pools.Items) == 0 {
		return nil
	}
	oldest := slices.MinFunc(pools.Items, func(a, b v1alpha1.Pool) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
	if have := DriverOf(&oldest); have != driver {
		return fmt.Errorf("%w: the pools of this cluster belong to the driver %s (the oldest is %s), and this one is %s: a cluster has one driver of this kind. If that one is gone for good, say so: kubectl patch pools.ashlar.dev %s --type=merge -p '{\"spec\":{\"driver\":\"%s\"}}'",
			errdefs.ErrPrecondition, have, oldest.Name, driver, oldest.Name, driver)
	}
	return nil
}
