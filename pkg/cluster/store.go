package cluster

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// Options of a Store.
type Options struct {
	// GoneGrace is how long a node has to be gone before what was deleted of it is given up.
	GoneGrace time.Duration
	// AbandonGrace is how old a volume, or a group of snapshots that is not cut, has to be before
	// somebody looks whether anybody knows of it.
	AbandonGrace time.Duration
	// Driver is the name of the CSI driver.
	Driver string
	// Namespace has the Leases of the agents; empty: they have none.
	Namespace string
	// SilentAfter is how long nothing may be heard of an agent; 0 is the usual time.
	SilentAfter time.Duration
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
	beats     beats

	counting chan struct{} // has room for one who counts claims

	mu       sync.Mutex
	claiming map[string]string // nodes by the keys of volumes whose claims are on their way
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
	if o.SilentAfter == 0 {
		o.SilentAfter = SilentAfter
	}
	heartbeats := cache.ByObject{Namespaces: map[string]cache.Config{o.Namespace: {}}, Label: labels.SelectorFromSet(labels.Set{heartbeatLabel: heartbeatValue})}
	s := &Store{options: o, departed: make(chan struct{}, 1), counting: make(chan struct{}, 1), claiming: map[string]string{},
		doomed: workqueue.NewTypedDelayingQueue[orphan]()}
	config = rest.CopyConfig(config)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return listener{next, &s.beats} })
	c, err := connect(config, map[client.Object]cache.ByObject{&coordinationv1.Lease{}: heartbeats})
	if err != nil {
		return nil, err
	}
	s.connection = c
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
	type kind struct {
		of   client.Object
		also func(client.Object, bool)
	}
	kinds := []kind{{&v1alpha1.Volume{}, s.volumeChanged}, {&v1alpha1.Snapshot{}, s.snapshotChanged}, {&v1alpha1.Pool{}, s.poolChanged}, {&corev1.Node{}, s.nodeChanged}}
	if o.Namespace != "" {
		kinds = append(kinds, kind{&coordinationv1.Lease{}, s.leaseChanged})
	}
	for _, kind := range kinds {
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
//
// It fails if the cluster has another driver of this kind.
func (s *Store) Run(ctx context.Context) error {
	ctx, stop := context.WithCancel(ctx)
	var done sync.WaitGroup
	defer done.Wait()
	defer stop()
	failures := make(chan error, 2)
	done.Go(func() {
		if !s.cache.WaitForCacheSync(ctx) {
			return
		}
		if err := waitForOwner(ctx, s.cache, s.options.Driver); err != nil {
			failures <- err
			return
		}
		s.tidy(ctx)
	})
	done.Go(func() { failures <- s.cache.Start(ctx) })
	return <-failures
}

// Ready: see volume.Store. It is ErrUnavailable until the objects were read once.
func (s *Store) Ready(context.Context) error {
	for _, informer := range s.informers {
		if !informer.HasSynced() {
			return fmt.Errorf("%w: the objects of the cluster have not been read yet", errdefs.ErrUnavailable)
		}
	}
	return nil
}

func nodeNamed(name string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
}

// get reads an object; where the cache has none, or none that was made yet, the API server
// has the last word: another store's caller may know more than this cache.
func (s *Store) get(ctx context.Context, key string, o object) error {
	if err := s.Ready(ctx); err != nil {
		return err
	}
	err := s.client.Get(ctx, client.ObjectKey{Name: key}, o)
	if apierrors.IsNotFound(err) || (err == nil && o.Common().Created == nil) {
		return s.getNow(ctx, key, o)
	}
	return apiError("read "+key, err)
}

// getNow reads an object at the API server itself.
func (s *Store) getNow(ctx context.Context, key string, o object) error {
	switch o := o.(type) { // nothing of what the cache had is to stay
	case *v1alpha1.Volume:
		*o = v1alpha1.Volume{}
	case *v1alpha1.Snapshot:
		*o = v1alpha1.Snapshot{}
	}
	return apiError("read "+key, s.live.Get(ctx, client.ObjectKey{Name: key}, o))
}

// volume returns the object of an ID that its node made once; ErrNotFound if there is none.
func (s *Store) volume(ctx context.Context, id volume.ID) (*v1alpha1.Volume, error) {
	if id.Kind != blockdev.Volume {
		return nil, fmt.Errorf("%w: %s is no volume", errdefs.ErrNotFound, id)
	}
	v := &v1alpha1.Volume{}
	if err := s.get(ctx, id.Key, v); err != nil {
		return nil, fmt.Errorf("volume %s: %w", id, err)
	}
	if v.Spec.Pool == id.Pool && lostUnmade(v) {
		return nil, errorOf(v.Spec.NodeName, v.Status.Failure)
	}
	if v.Spec.Pool != id.Pool || v.Status.Created == nil {
		return nil, fmt.Errorf("%w: no volume %s", errdefs.ErrNotFound, id)
	}
	return v, nil
}

// usable is volume, and ErrPrecondition for one that is on its way out.
func (s *Store) usable(ctx context.Context, id volume.ID) (*v1alpha1.Volume, error) {
	v, err := s.volume(ctx, id)
	if err == nil && (going(v) || v.Spec.Abandoned) {
		err = fmt.Errorf("%w: volume %s is being deleted", errdefs.ErrPrecondition, id)
	}
	return v, err
}
