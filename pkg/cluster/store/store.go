// Package store is the volume.Store of a cluster, which the controller serves. It writes the desired state into the specs of the objects of pkg/api, and
// waits until the agent of the node has reported it in the status.
package store

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/events"
	"github.com/ashlar-csi/ashlar/pkg/cluster/gc"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/liveness"
	"github.com/ashlar-csi/ashlar/pkg/cluster/mover"
	"github.com/ashlar-csi/ashlar/pkg/cluster/port"
	"github.com/ashlar-csi/ashlar/pkg/cluster/replicator"
	"github.com/ashlar-csi/ashlar/pkg/cluster/startup"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// Options of a Store.
type Options struct {
	// GoneGrace and AbandonGrace are those of the garbage collector (gc.Options).
	GoneGrace, AbandonGrace time.Duration
	// Driver is the name of the CSI driver.
	Driver string
	// Namespace is where the Leases of the agents are; empty: they have none.
	Namespace string
	// SilentAfter is how long nothing may be heard of an agent; 0 is the usual time.
	SilentAfter time.Duration
	// EventsAgain is when the event of a state that lasts is written again; 0 is the usual time.
	EventsAgain time.Duration
	// FollowAfter is how long a volume that follows its pods has to be used on another node before it moves there; 0 is the usual time (mover.FollowAfter).
	FollowAfter time.Duration
	// Agents calls the agents of nodes, for the blocks of snapshots; nil: they are not called.
	Agents *port.Callers
	// StartupTaint: the startup taint is taken off nodes on which the driver is ready (package startup).
	StartupTaint bool
}

// Store is the volume.Store of a cluster. Any number may run at once: objects are created by names of which each can exist once, and changed by
// compare-and-swap.
//
// What a node has to do is waited for by watching the object. If the context ends first, or the node is down, the error is ErrUnavailable, and the node goes
// on.
type Store struct {
	kube       kube.Connection
	hub        kube.Hub
	informers  map[string]cache.Informer // by the kind of their objects
	driver     string
	nodes      *liveness.Monitor
	garbage    *gc.Collector
	mover      *mover.Mover
	replicator *replicator.Replicator
	events     *events.Announcer
	startup    *startup.Taints // nil: the taint is left alone
	agents     *port.Callers   // nil: they are not called

	counting chan struct{} // a lock: claims of a node are counted one call at a time
	placing  chan struct{} // a lock: pools of volumes that are spread are chosen one call at a time

	mu       sync.Mutex
	claiming map[claiming]bool // claims that are counted, and may not be in the cache yet
}

var _ volume.Reacher = (*Store)(nil)

// New returns the store of a cluster. It does nothing, and every call fails with ErrUnavailable, until Run has read the objects.
func New(config *rest.Config, o Options) (*Store, error) {
	if o.SilentAfter == 0 {
		o.SilentAfter = cluster.SilentAfter
	}
	nodes := liveness.New(o.Namespace, o.SilentAfter)
	config = rest.CopyConfig(config)
	config.Wrap(nodes.Wrap)
	agents := cache.ByObject{Namespaces: map[string]cache.Config{o.Namespace: {}}, Label: labels.SelectorFromSet(cluster.LeaseLabels())}
	c, err := kube.Connect(config, map[client.Object]cache.ByObject{&coordinationv1.Lease{}: agents})
	if err != nil {
		return nil, err
	}
	nodes.Use(c)
	announcer := events.New(c, nodes, events.Options{Driver: o.Driver, Namespace: o.Namespace, Again: o.EventsAgain})
	s := &Store{kube: c, driver: o.Driver, nodes: nodes, agents: o.Agents, counting: make(chan struct{}, 1), placing: make(chan struct{}, 1), claiming: map[claiming]bool{}, informers: map[string]cache.Informer{},
		mover:   mover.New(c, cmp.Or(o.FollowAfter, mover.FollowAfter), announcer.Stays),
		garbage: gc.New(c, nodes, gc.Options{GoneGrace: o.GoneGrace, AbandonGrace: o.AbandonGrace, Driver: o.Driver}),
		events:  announcer}
	s.replicator = replicator.New(c, s)
	if o.StartupTaint {
		s.startup = startup.New(c, nodes, o.Driver)
	}
	if err := index(c.Cache); err != nil {
		return nil, err
	}
	return s, s.watch(o.Namespace != "")
}

// Indexes of the cache, beside those of package cluster.
const (
	byClaim = "claim"
	byPool  = "pool"
)

// indexMove is the value of cluster.ByMove.
func indexMove(o client.Object) []string {
	if m, _ := o.(cluster.Object).Moves(); m != nil {
		return []string{m.Node}
	}
	return nil
}

func index(c cache.Cache) error {
	for _, index := range []struct {
		of    client.Object
		field string
		value client.IndexerFunc
	}{
		{&v1alpha1.Volume{}, cluster.ByNode, func(o client.Object) []string { return []string{o.(*v1alpha1.Volume).Spec.NodeName} }},
		{&v1alpha1.Volume{}, cluster.ByMove, indexMove},
		{&v1alpha1.Volume{}, byClaim, func(o client.Object) []string {
			if v := o.(*v1alpha1.Volume); v.Spec.ReplicaOf == "" {
				return v.Claimants()
			}
			return nil
		}},
		{&v1alpha1.Volume{}, cluster.ByReplicaOf, func(o client.Object) []string { return cluster.IndexReplicaOf(o.(*v1alpha1.Volume)) }},
		{&v1alpha1.ReplicatedVolume{}, byClaim, func(o client.Object) []string {
			if c := o.(*v1alpha1.ReplicatedVolume).Spec.Claim; c != nil {
				return []string{c.Node}
			}
			return nil
		}},
		{&v1alpha1.Volume{}, cluster.ByFetched, func(o client.Object) []string {
			v := o.(*v1alpha1.Volume)
			if from := v.Spec.Source; from != nil && from.NodeName != "" && v.Spec.Make && v.Status.Created == nil && !v1alpha1.Going(v) {
				return []string{from.Key}
			}
			return nil
		}},
		{&v1alpha1.Snapshot{}, cluster.ByNode, func(o client.Object) []string { return []string{o.(*v1alpha1.Snapshot).Spec.NodeName} }},
		{&v1alpha1.Snapshot{}, cluster.ByMove, indexMove},
		{&v1alpha1.Snapshot{}, cluster.BySource, func(o client.Object) []string { return []string{o.(*v1alpha1.Snapshot).Spec.Source} }},
		{&v1alpha1.Snapshot{}, cluster.ByGroup, cluster.IndexGroup},
		{&v1alpha1.Pool{}, cluster.ByNode, func(o client.Object) []string { return []string{o.(*v1alpha1.Pool).Spec.NodeName} }},
		{&v1alpha1.Pool{}, byPool, func(o client.Object) []string { return []string{o.(*v1alpha1.Pool).Spec.Pool} }},
	} {
		if err := c.IndexField(context.Background(), index.of, index.field, index.value); err != nil { // it does not wait
			return err
		}
	}
	return nil
}

// watch has the events of the cache handed to the hub, the garbage collector, the mover, the replicator, the events and the startup taints. With leases the
// Leases of agents are watched too, for the monitor.
func (s *Store) watch(leases bool) error {
	type kind struct {
		of   client.Object
		also func(client.Object, bool)
	}
	all := func(listeners ...func(client.Object, bool)) func(client.Object, bool) {
		return func(o client.Object, gone bool) {
			for _, tell := range listeners {
				tell(o, gone)
			}
		}
	}
	kinds := []kind{{&v1alpha1.Volume{}, all(s.garbage.VolumeChanged, s.events.VolumeChanged, s.mover.VolumeChanged, s.replicator.VolumeChanged)},
		{&v1alpha1.Snapshot{}, all(s.garbage.SnapshotChanged, s.events.SnapshotChanged, s.mover.SnapshotChanged)},
		{&v1alpha1.ReplicatedVolume{}, all(s.replicator.Changed, s.events.ReplicatedChanged)},
		{&v1alpha1.Pool{}, all(s.garbage.PoolChanged, s.events.PoolChanged)},
		{&corev1.Node{}, all(s.nodeChanged, s.events.NodeChanged)}}
	if leases {
		kinds = append(kinds, kind{&coordinationv1.Lease{}, all(s.nodes.LeaseChanged, s.events.LeaseChanged)})
	}
	for _, kind := range kinds {
		informer, err := s.kube.Cache.GetInformer(context.Background(), kind.of, cache.BlockUntilSynced(false)) // so it does not wait
		if err != nil {
			return err
		}
		if _, err := informer.AddEventHandler(s.hub.Handler(kind.also)); err != nil {
			return err
		}
		s.informers[fmt.Sprintf("%T", kind.of)] = informer
	}
	return nil
}

func (s *Store) nodeChanged(o client.Object, gone bool) {
	s.garbage.NodeChanged(o, gone)
	if s.startup != nil {
		s.startup.NodeChanged(o, gone)
	}
}

// Run fills the cache and keeps it up to date, and runs the events, the mover, the replicator, the startup taints and the garbage collector, until the
// context ends. It fails if the objects of the cluster are those of a driver of another name.
func (s *Store) Run(ctx context.Context) error {
	ctx, stop := context.WithCancel(ctx)
	var done sync.WaitGroup
	defer done.Wait()
	defer stop()
	failures := make(chan error, 2)
	done.Go(func() {
		if !s.kube.Cache.WaitForCacheSync(ctx) {
			return
		}
		if err := cluster.WaitForOwner(ctx, s.kube.Cache, s.driver); err != nil {
			failures <- err
			return
		}
		done.Go(func() { s.events.Run(ctx) })
		done.Go(func() { s.mover.Run(ctx) })
		done.Go(func() { s.replicator.Run(ctx) })
		if s.startup != nil {
			done.Go(func() { s.startup.Run(ctx) })
		}
		s.garbage.Run(ctx)
	})
	done.Go(func() { failures <- s.kube.Cache.Start(ctx) })
	return <-failures
}

// Ready: see volume.Store. It is ErrUnavailable until the objects were read once.
func (s *Store) Ready(context.Context) error {
	var missing []string
	for of, informer := range s.informers {
		if !informer.HasSynced() {
			missing = append(missing, of)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	slices.Sort(missing)
	return fmt.Errorf("%w: the objects of the cluster have not been read yet (%s); if that lasts, the API server does not answer, or the definitions and rights are older than this driver: apply those of its version (deploy/kubernetes)",
		errdefs.ErrUnavailable, strings.Join(missing, ", "))
}

// get reads the object with the key of an ID from the cache. If that has none, one without status.created, or one with another ID, it reads at the API server:
// another controller may have made it since.
func (s *Store) get(ctx context.Context, id volume.ID, o cluster.Object) error {
	if err := s.Ready(ctx); err != nil {
		return err
	}
	err := s.kube.Client.Get(ctx, client.ObjectKey{Name: id.Key}, o)
	if apierrors.IsNotFound(err) || (err == nil && (o.Common().Created == nil || o.Named() != id.Pool)) {
		return s.getNow(ctx, id.Key, o)
	}
	return kube.APIError("read "+id.Key, err)
}

// getNow reads an object at the API server itself.
func (s *Store) getNow(ctx context.Context, key string, o cluster.Object) error {
	switch o := o.(type) { // Get does not clear fields that are not in the answer
	case *v1alpha1.Volume:
		*o = v1alpha1.Volume{}
	case *v1alpha1.Snapshot:
		*o = v1alpha1.Snapshot{}
	}
	return kube.APIError("read "+key, s.kube.Live.Get(ctx, client.ObjectKey{Name: key}, o))
}

// volume returns the object of a volume that was made; ErrNotFound if there is none, and the node's failure if its bytes are lost and were never reported.
func (s *Store) volume(ctx context.Context, id volume.ID) (*v1alpha1.Volume, error) {
	if id.Kind != blockdev.Volume {
		return nil, fmt.Errorf("%w: %s is no volume", errdefs.ErrNotFound, id)
	}
	v := &v1alpha1.Volume{}
	if err := s.get(ctx, id, v); err != nil {
		return nil, fmt.Errorf("volume %s: %w", id, err)
	}
	if v.Named() == id.Pool && v1alpha1.LostUnmade(v) {
		return nil, cluster.ErrorOf(v.Spec.NodeName, v.Status.Failure)
	}
	if v.Named() != id.Pool || v.Status.Created == nil {
		return nil, fmt.Errorf("%w: no volume %s", errdefs.ErrNotFound, id)
	}
	return v, nil
}

// usable is volume, and ErrPrecondition for a volume that is being deleted, or that its node is asked to delete if it is blank.
func (s *Store) usable(ctx context.Context, id volume.ID) (*v1alpha1.Volume, error) {
	v, err := s.volume(ctx, id)
	if err == nil && (v1alpha1.Going(v) || v.Spec.Abandoned) {
		err = fmt.Errorf("%w: volume %s is being deleted", errdefs.ErrPrecondition, id)
	}
	return v, err
}

// checkStrays returns ErrUnavailable if a pool reports a stray with an ID: its bytes are there, and only an operator can decide about them. It is ErrUnavailable
// too until the pool that may have it has reported its strays. home is the node that the volume, snapshot or group was on; empty: where its PersistentVolume may be
// used (boundTo). If either is known, strays of other nodes do not count: any node can report a stray of any ID.
func (s *Store) checkStrays(ctx context.Context, id, home string) error {
	var pools v1alpha1.PoolList
	if err := s.kube.Client.List(ctx, &pools, client.UnsafeDisableDeepCopy); err != nil {
		return kube.APIError("list pools", err)
	}
	if len(pools.Items) == 0 {
		return s.checkUnreported(ctx, id, home)
	}
	of, _ := volume.ParseID(id) // a group has no pool
	at := bound{node: home}
	for i := range pools.Items {
		p := &pools.Items[i]
		stray := slices.ContainsFunc(p.Status.Strays, func(one v1alpha1.Stray) bool { return one.ID == id || one.Group == id })
		unreported := p.Spec.Pool == of.Pool && meta.FindStatusCondition(p.Status.Conditions, v1alpha1.Accounted) == nil
		if !stray && !unreported {
			continue
		}
		if at == (bound{}) {
			var err error
			if at, err = s.boundTo(ctx, id); err != nil {
				return err
			}
		}
		switch here := at.mayBeIn(p); {
		case stray && (here || at == bound{}):
			return fmt.Errorf("%w: somebody deleted the object of %s, and its bytes are still on node %s: have the object made anew (kubectl annotate pools.ashlar.dev %s %s=%s), and ask again",
				errdefs.ErrUnavailable, id, p.Spec.NodeName, p.Name, v1alpha1.AdoptAnnotation, id)
		case unreported && here:
			return fmt.Errorf("%w: there is no object of %s, and pool %s of node %s, where it may be, has not reported yet what it keeps: see that its disk and the driver there are up; if nothing of that pool is needed any more, delete its object (kubectl delete pools.ashlar.dev %s)",
				errdefs.ErrUnavailable, id, p.Spec.Pool, p.Spec.NodeName, p.Name)
		}
	}
	return nil
}

// checkUnreported is checkStrays while no pool is reported at all: ErrUnavailable, unless the only node that has, or had, what an ID names is gone for good.
func (s *Store) checkUnreported(ctx context.Context, id, home string) (err error) {
	unreported := s.reported(ctx)
	if unreported == nil { // since checkStrays listed them
		return fmt.Errorf("%w: nodes have just begun to report their pools, and %s may be in one of these; ask again", errdefs.ErrUnavailable, id)
	}
	at := bound{node: home}
	if home == "" {
		if at, err = s.boundTo(ctx, id); err != nil {
			return err
		}
	}
	if at.node != "" && at.network == "" {
		if gone, err := s.isGone(ctx, at.node); gone || err != nil {
			return err
		}
	}
	return fmt.Errorf("whether %s is gone is not known: %w", id, unreported)
}

// bound is where something may be, as far as that is known. A volume that other nodes of a network can use was made on the node, and may have moved to any of
// these since: what is said of it when it is made stays.
type bound struct{ node, network string }

// mayBeIn reports whether it may be in a pool.
func (b bound) mayBeIn(p *v1alpha1.Pool) bool {
	n := p.Status.Network
	return b.node == p.Spec.NodeName || b.network != "" && n != nil && n.Name == b.network
}

// boundTo returns where the volume of the PersistentVolume with a handle may be, by its node affinity; nothing if there is none.
func (s *Store) boundTo(ctx context.Context, handle string) (at bound, _ error) {
	err := kube.EachPage(ctx, s.kube.Live, &corev1.PersistentVolumeList{}, func(list *corev1.PersistentVolumeList) {
		for i := range list.Items {
			pv := &list.Items[i].Spec
			if pv.CSI == nil || pv.CSI.Driver != s.driver || pv.CSI.VolumeHandle != handle || pv.NodeAffinity == nil || pv.NodeAffinity.Required == nil {
				continue
			}
			for _, term := range pv.NodeAffinity.Required.NodeSelectorTerms {
				for _, e := range term.MatchExpressions {
					switch {
					case len(e.Values) != 1:
					case e.Key == v1alpha1.TopologyKey:
						at.node = e.Values[0]
					case e.Key == v1alpha1.NetworkKey:
						at.network = e.Values[0]
					}
				}
			}
		}
	})
	return at, kube.APIError("look for PersistentVolumes", err)
}

func compareIDs(a, b volume.ID) int {
	if c := strings.Compare(a.Pool, b.Pool); c != 0 {
		return c
	}
	return strings.Compare(a.Key, b.Key)
}

// firsts keeps the first limit values that are added, in the order of their IDs; with limit 0 all.
type firsts[V any] struct {
	id    func(V) volume.ID
	limit int
	found []V
}

// spare is how many values beyond twice the limit are kept before they are sorted and cut.
const spare = 100

func (f *firsts[V]) add(v V) {
	if f.found = append(f.found, v); f.limit > 0 && len(f.found) >= 2*f.limit+spare {
		f.cut()
	}
}

// cut sorts the values, drops those beyond the limit, and returns the rest.
func (f *firsts[V]) cut() []V {
	slices.SortFunc(f.found, func(a, b V) int { return compareIDs(f.id(a), f.id(b)) })
	if f.limit > 0 && len(f.found) > f.limit {
		clear(f.found[f.limit:])
		f.found = f.found[:f.limit]
	}
	return f.found
}

// each calls visit with each object of a kind, from the cache, once that has what this store wrote. ErrUnavailable if there are no objects because the kind
// is not defined.
func each[T client.Object](ctx context.Context, s *Store, of T, visit func(T)) error {
	if err := s.kube.CaughtUp(ctx, of); err != nil {
		return err
	}
	some := false
	err := kube.Each(ctx, s.kube.Cache, of, func(o T) {
		some = true
		visit(o)
	})
	if err != nil || some {
		return err
	}
	return s.defined(ctx, of)
}

// defined asks the API server whether it has a kind; ErrUnavailable if not. When a definition is deleted, all its objects go: then an empty cache says
// nothing of what the nodes have.
func (s *Store) defined(ctx context.Context, of client.Object) error {
	gvk, err := s.kube.Live.GroupVersionKindFor(of)
	if err != nil {
		return err
	}
	var list metav1.PartialObjectMetadataList
	list.SetGroupVersionKind(gvk.GroupVersion().WithKind(gvk.Kind + "List"))
	return kube.APIError(fmt.Sprintf("look whether there is any %s", gvk.Kind), s.kube.Live.List(ctx, &list, client.Limit(1)))
}

// reported returns ErrUnavailable while there is no Pool object at all: then it is not known which nodes and pools there are.
func (s *Store) reported(ctx context.Context) error {
	var one v1alpha1.PoolList
	if err := s.kube.Client.List(ctx, &one, client.Limit(1), client.UnsafeDisableDeepCopy); err != nil {
		return kube.APIError("list pools", err)
	}
	if len(one.Items) > 0 {
		return nil
	}
	if err := s.defined(ctx, &v1alpha1.Pool{}); err != nil {
		return err
	}
	return fmt.Errorf("%w: no node reports a pool (kubectl get pools.ashlar.dev): have the driver run on the nodes that have pools", errdefs.ErrUnavailable)
}
