package cluster

import (
	"context"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// Options of a Store.
type Options struct {
	// GoneGrace is how long a node has to be gone before what was deleted of it is given up.
	GoneGrace time.Duration
	// AbandonGrace is how old a volume, or a group of snapshots that is not cut, has to be before
	// somebody looks whether anybody knows of it.
	AbandonGrace time.Duration
}

// Store is the volume.Store of a cluster. Any number may run at once: objects are created
// by names that cannot be there twice, and changed by compare-and-swap.
//
// What is nobody's decision but the node's is waited for by watching the object; the error
// when the context ends first, or the node is down, is ErrUnavailable, and the node goes on.
type Store struct {
	connection
	options   Options
	hub       hub
	informers []cache.Informer
	doomed    workqueue.TypedDelayingInterface[orphan] // what to look after: janitor.go
	known     sync.Map                                 // UIDs of volumes that have a PersistentVolume
	departed  chan struct{}                            // there may be news of nodes that are gone

	mu       sync.Mutex
	claiming map[string]int64 // claims by node that are on their way
}

var _ volume.Store = (*Store)(nil)

// Indexes of the cache.
const (
	byNode   = "node"
	byClaim  = "claim"
	byGroup  = "group"
	bySource = "source"
	byPool   = "pool"
)

// groupOf is for the index byGroup.
func groupOf(o client.Object) []string {
	if group := o.(*v1alpha1.Snapshot).Spec.Group; group != nil {
		return []string{group.Key}
	}
	return nil
}

// NewStore returns the store of the cluster behind a configuration. It does nothing, and
// every call fails with ErrUnavailable, until Run has read the objects.
func NewStore(config *rest.Config, o Options) (*Store, error) {
	c, err := connect(config, nil)
	if err != nil {
		return nil, err
	}
	s := &Store{connection: c, options: o, departed: make(chan struct{}, 1), claiming: map[string]int64{},
		doomed: workqueue.NewTypedDelayingQueue[orphan]()}
	ctx := context.Background() // nothing below waits
	for _, index := range []struct {
		of    client.Object
		field string
		value client.IndexerFunc
	}{
		{&v1alpha1.Volume{}, byNode, func(o client.Object) []string { return []string{o.(*v1alpha1.Volume).Spec.NodeName} }},
		{&v1alpha1.Volume{}, byClaim, func(o client.Object) []string {
			if claim := o.(*v1alpha1.Volume).Spec.Claim; claim != nil {
				return []string{claim.Node}
			}
			return nil
		}},
		{&v1alpha1.Snapshot{}, byNode, func(o client.Object) []string { return []string{o.(*v1alpha1.Snapshot).Spec.NodeName} }},
		{&v1alpha1.Snapshot{}, bySource, func(o client.Object) []string { return []string{o.(*v1alpha1.Snapshot).Spec.Source} }},
		{&v1alpha1.Snapshot{}, byGroup, groupOf},
		{&v1alpha1.Pool{}, byNode, func(o client.Object) []string { return []string{o.(*v1alpha1.Pool).Spec.NodeName} }},
		{&v1alpha1.Pool{}, byPool, func(o client.Object) []string { return []string{o.(*v1alpha1.Pool).Spec.Pool} }},
	} {
		if err := c.cache.IndexField(ctx, index.of, index.field, index.value); err != nil {
			return nil, err
		}
	}
	for _, kind := range []struct {
		of   client.Object
		also func(client.Object, bool)
	}{{&v1alpha1.Volume{}, s.volumeChanged}, {&v1alpha1.Snapshot{}, s.snapshotChanged}, {&v1alpha1.Pool{}, s.poolChanged}, {&corev1.Node{}, s.nodeChanged}} {
		informer, err := c.cache.GetInformer(ctx, kind.of, cache.BlockUntilSynced(false))
		if err != nil {
			return nil, err
		}
		if _, err := informer.AddEventHandler(s.hub.handler(kind.also)); err != nil {
			return nil, err
		}
		s.informers = append(s.informers, informer)
	}
	return s, nil
}

// Run keeps the store's knowledge up to date, and clears up after nodes and claims that
// are gone, until the context ends.
func (s *Store) Run(ctx context.Context) error {
	var done sync.WaitGroup
	defer done.Wait()
	done.Go(func() { s.tidy(ctx) })
	return s.cache.Start(ctx)
}

// Ready: see volume.Store. It is ErrUnavailable until the objects were read once.
func (s *Store) Ready(context.Context) error {
	for _, informer := range s.informers {
		if !informer.HasSynced() {
			return fmt.Errorf("%w: the objects of the cluster have not been read yet", blockdev.ErrUnavailable)
		}
	}
	return nil
}

func nodeNamed(name string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
}

// nodeReady is ErrUnavailable if a node is not there or not ready.
func (s *Store) nodeReady(ctx context.Context, name string) error {
	var node corev1.Node
	if err := s.cache.Get(ctx, client.ObjectKey{Name: name}, &node); err != nil {
		if apierrors.IsNotFound(err) {
			return fmt.Errorf("%w: there is no node %s", blockdev.ErrUnavailable, name)
		}
		return apiError("look at node "+name, err)
	}
	for _, c := range node.Status.Conditions {
		if c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue {
			return nil
		}
	}
	return fmt.Errorf("%w: node %s is not ready", blockdev.ErrUnavailable, name)
}

// get reads an object; where the cache has none, or none that was made yet, the API server
// has the last word: another store's caller may know more than this cache.
func (s *Store) get(ctx context.Context, key string, o object) error {
	if err := s.Ready(ctx); err != nil {
		return err
	}
	err := s.client.Get(ctx, client.ObjectKey{Name: key}, o)
	if apierrors.IsNotFound(err) || (err == nil && o.Common().Created == nil) {
		switch o := o.(type) { // nothing of what the cache had is to stay
		case *v1alpha1.Volume:
			*o = v1alpha1.Volume{}
		case *v1alpha1.Snapshot:
			*o = v1alpha1.Snapshot{}
		}
		err = s.live.Get(ctx, client.ObjectKey{Name: key}, o)
	}
	return apiError("read "+key, err)
}

// volume returns the object of an ID that its node made once; ErrNotFound if there is none.
func (s *Store) volume(ctx context.Context, id volume.ID) (*v1alpha1.Volume, error) {
	if id.Kind != blockdev.Volume {
		return nil, fmt.Errorf("%w: %s is no volume", blockdev.ErrNotFound, id)
	}
	v := &v1alpha1.Volume{}
	if err := s.get(ctx, id.Key, v); err != nil {
		return nil, fmt.Errorf("volume %s: %w", id, err)
	}
	if v.Spec.Pool != id.Pool || v.Status.Created == nil {
		return nil, fmt.Errorf("%w: no volume %s", blockdev.ErrNotFound, id)
	}
	return v, nil
}

// usable is volume, and ErrPrecondition for one that is on its way out.
func (s *Store) usable(ctx context.Context, id volume.ID) (*v1alpha1.Volume, error) {
	v, err := s.volume(ctx, id)
	if err == nil && (v.DeletionTimestamp != nil || v.Spec.Abandoned) {
		err = fmt.Errorf("%w: volume %s is being deleted", blockdev.ErrPrecondition, id)
	}
	return v, err
}
