package agent

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// How long the opening of a pool waits for the API server, and for how long its failure stands for the next pools, which are opened one after the other.
const (
	memoryTimeout = 2 * time.Second
	memoryPause   = 2 * time.Second
)

// Memory tells which identity each pool of a node has by the objects of the cluster, before the pools are open.
type Memory struct {
	live client.Client
	node string

	mu     sync.Mutex
	failed time.Time
	why    error // the last failure, at the time failed; nil: the last call succeeded
}

// NewMemory returns the Memory of a node. It asks the API server nothing yet.
func NewMemory(config *rest.Config, node string) (*Memory, error) {
	c, err := kube.Connect(config, nil)
	return &Memory{live: c.Live, node: node}, err
}

// Of returns what is known of a pool: see blockdev.Known. It fails with ErrUnavailable without an API server, and with ErrPrecondition if objects tell of
// volumes or snapshots in a pool whose object has no identity.
func (m *Memory) Of(pool string) blockdev.Known {
	return func(ctx context.Context) (string, error) {
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.why != nil && time.Since(m.failed) < memoryPause {
			return "", m.why
		}
		ctx, cancel := context.WithTimeout(ctx, memoryTimeout)
		defer cancel()
		uuid, err := m.recall(ctx, pool)
		if m.why = nil; errors.Is(err, errdefs.ErrUnavailable) {
			m.why, m.failed = err, time.Now()
		}
		return uuid, err
	}
}

func (m *Memory) recall(ctx context.Context, pool string) (string, error) {
	name := overview.PoolName(m.node, pool)
	o, _, err := poolNow(ctx, m.live, name)
	if err != nil {
		return "", err
	}
	switch uuid := o.Spec.UUID; uuid {
	case "":
	case v1alpha1.NewPool:
		return "", nil
	default:
		return uuid, nil
	}
	return "", m.unused(ctx, pool)
}

// unused returns ErrPrecondition if there is an object of a volume or snapshot that was made in a pool.
func (m *Memory) unused(ctx context.Context, pool string) error {
	var found cluster.Object
	match := func(o cluster.Object, in string) {
		if in == pool && !o.May().Make {
			found = o
		}
	}
	onNode := client.MatchingFields{"spec.nodeName": m.node}
	if err := errors.Join(kube.EachPage(ctx, m.live, &v1alpha1.VolumeList{}, func(list *v1alpha1.VolumeList) {
		for i := range list.Items {
			match(&list.Items[i], list.Items[i].Spec.Pool)
		}
	}, onNode), kube.EachPage(ctx, m.live, &v1alpha1.SnapshotList{}, func(list *v1alpha1.SnapshotList) {
		for i := range list.Items {
			match(&list.Items[i], list.Items[i].Spec.Pool)
		}
	}, onNode)); err != nil {
		return kube.APIError("look for what was in pool "+pool, err)
	}
	if found == nil {
		return nil
	}
	return fmt.Errorf("%w: the object %s tells of something that was in pool %s; if that is lost for good, say so: kubectl patch pools.ashlar.dev %s --type=merge -p '{\"spec\":{\"uuid\":\"%s\"}}'",
		errdefs.ErrPrecondition, found.GetName(), pool, overview.PoolName(m.node, pool), v1alpha1.NewPool)
}
