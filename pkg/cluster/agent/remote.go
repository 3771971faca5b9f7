package agent

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/nvme"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/remotepool"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/export"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// others is what the agent knows of volumes of other nodes that are claimed for its own.
type others struct {
	kube kube.Connection // caches those with this node in spec.claim
	many kube.Connection // caches those with this node in spec.readers
	read atomic.Bool     // both caches have been filled once

	using    chan UsedVolumes                         // of one element: what works on these volumes here, once Uses has been called
	modified workqueue.TypedDelayingInterface[string] // volumes whose mutable parameters may have changed (followModified)

	mu     sync.Mutex
	agents map[string]v1alpha1.AgentEndpoint // where the agents of other nodes were found last
	told   map[string]bool                   // by key: the home has said since the start what the mutable parameters are
}

// connectOthers prepares the watch of the volumes of other nodes. It asks the API server nothing.
func (a *Agent) connectOthers(config *rest.Config) (err error) {
	a.others.agents, a.others.told, a.others.using = map[string]v1alpha1.AgentEndpoint{}, map[string]bool{}, make(chan UsedVolumes, 1)
	if a.options.Network == nil {
		return nil
	}
	a.others.modified = workqueue.NewTypedDelayingQueue[string]()
	if a.others.kube, err = a.connectElsewhere(config, "spec.claim.node"); err != nil {
		return err
	}
	reads, err := labels.NewRequirement(v1alpha1.ReaderLabel(a.local.Node()), selection.Exists, nil)
	if err != nil {
		return err
	}
	a.others.many, err = kube.Connect(config, map[client.Object]cache.ByObject{&v1alpha1.Volume{}: {Label: labels.NewSelector().Add(*reads), Field: a.elsewhereSelector()}})
	return err
}

func (a *Agent) elsewhereSelector() fields.Selector {
	return fields.OneTermNotEqualSelector("spec.nodeName", a.local.Node())
}

// connectElsewhere returns a connection whose cache has the volumes of other nodes with this node in a field. It asks the API server nothing.
func (a *Agent) connectElsewhere(config *rest.Config, field string) (kube.Connection, error) {
	these := fields.AndSelectors(fields.OneTermEqualSelector(field, a.local.Node()), a.elsewhereSelector())
	return kube.Connect(config, map[client.Object]cache.ByObject{&v1alpha1.Volume{}: {Field: these}})
}

// watchOthers watches the volumes of other nodes that are claimed for this one, until the context ends. Once the caches are filled and Uses was called, it
// sets limits (limitAgain) and follows changes (followModified).
func (a *Agent) watchOthers(ctx context.Context) error {
	if a.options.Network == nil {
		<-ctx.Done()
		return nil
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	both := []kube.Connection{a.others.kube, a.others.many}
	ended := make(chan error, len(both))
	for _, c := range both {
		if err := a.hear(ctx, c, &v1alpha1.Volume{}, a.usedChanged); err != nil {
			return err
		}
	}
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	for _, c := range both {
		running.Go(func() { ended <- c.Cache.Start(ctx) })
	}
	running.Go(func() {
		read := a.others.kube.Cache.WaitForCacheSync(ctx) && a.others.many.Cache.WaitForCacheSync(ctx)
		if a.others.read.Store(read); !read {
			return
		}
		select {
		case here := <-a.others.using:
			running.Go(func() { a.followModified(ctx, here) })
			a.limitAgain(ctx, here)
		case <-ctx.Done():
		}
	})
	return <-ended
}

// usedHere returns the object of a volume of another node that is claimed for this one, by the cache.
func (a *Agent) usedHere(key string) (*v1alpha1.Volume, bool) {
	if !a.others.read.Load() {
		return nil, false
	}
	v := &v1alpha1.Volume{}
	for _, c := range []kube.Connection{a.others.kube, a.others.many} {
		err := c.Cache.Get(context.Background(), client.ObjectKey{Name: key}, v) // reads memory
		if err == nil && v.ClaimOf(a.local.Node()) != nil {
			return v, true
		}
	}
	return v, false
}

// allUsedHere returns the objects of all volumes of other nodes that are claimed for this one, for readers too, by the caches. A volume whose claim has just
// changed from one kind to the other may be there twice.
func (a *Agent) allUsedHere(ctx context.Context) (all []v1alpha1.Volume, err error) {
	for _, c := range []kube.Connection{a.others.kube, a.others.many} {
		var some v1alpha1.VolumeList
		if err := c.Cache.List(ctx, &some); err != nil { // reads memory
			return nil, err
		}
		all = append(all, some.Items...)
	}
	return all, nil
}

// usedNow is usedHere by the API server. ErrPrecondition if the volume is not claimed for this node, or is not on another one; ErrUnavailable if it has
// moved to this node, which has not taken it over yet.
func (a *Agent) usedNow(ctx context.Context, id volume.ID) (*v1alpha1.Volume, error) {
	v := &v1alpha1.Volume{}
	if err := a.kube.Live.Get(ctx, client.ObjectKey{Name: id.Key}, v); err != nil {
		return nil, kube.APIError("read volume "+id.Key, err)
	}
	if err := a.checkTakenOver(v); err != nil {
		return nil, err
	}
	if cluster.VolumeID(v) != id || v.Spec.NodeName == a.local.Node() || v.ClaimOf(a.local.Node()) == nil {
		return nil, fmt.Errorf("%w: volume %s is no volume of another node that is claimed for node %s", errdefs.ErrPrecondition, id, a.local.Node())
	}
	return v, nil
}

// isElsewhere reports whether the API server says that a volume is on another node. It is for a volume without an object on this node: what has its ID here
// is a stray then. It is false on a node without a network, and if the API server does not answer.
func (a *Agent) isElsewhere(ctx context.Context, id volume.ID) bool {
	if a.options.Network == nil {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, claimWait)
	defer cancel()
	v := &v1alpha1.Volume{}
	return a.kube.Live.Get(ctx, client.ObjectKey{Name: id.Key}, v) == nil && v.Spec.NodeName != a.local.Node()
}

// Elsewhere returns the volumes of other nodes that this one may use: those that are claimed for it, and those that its kernel is connected to.
func (a *Agent) Elsewhere(connected func(blockdev.Ref) bool) volume.Elsewhere {
	return elsewhere{a, connected}
}

type elsewhere struct {
	*Agent
	connected func(blockdev.Ref) bool
}

// Has: see volume.Elsewhere.
func (e elsewhere) Has(id volume.ID) bool {
	v, is := e.usedHere(id.Key)
	if is {
		e.locate(v)
	}
	return is && cluster.VolumeID(v) == id || id.Kind == blockdev.Volume && e.connected(blockdev.Ref{Kind: id.Kind, Key: id.Key})
}

// Find: see volume.Elsewhere. The kubelet may know of a claim before the watch has told of it: so the API server is asked.
func (e elsewhere) Find(ctx context.Context, id volume.ID) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, claimWait)
	defer cancel()
	w := e.hub.Open(cluster.VolumeNamed(id.Key))
	defer w.Close()
	_, err := e.usedNow(ctx, id)
	if err != nil {
		if errors.Is(err, errdefs.ErrUnavailable) {
			return false, fmt.Errorf("find out whether volume %s is on another node: %w", id, err)
		}
		return false, nil
	}
	return untilHeard(ctx, w, e, id)
}

// untilHeard waits until the watch w has told of a volume that is claimed for this node; ErrUnavailable if ctx ends before.
func untilHeard(ctx context.Context, w *kube.Watch, known volume.Elsewhere, id volume.ID) (bool, error) {
	for !known.Has(id) {
		select {
		case <-w.Signal:
			w.Take()
		case <-ctx.Done():
			return false, fmt.Errorf("%w: volume %s is claimed for this node, and the agent has not heard of it yet", errdefs.ErrUnavailable, id)
		}
	}
	return true, nil
}

// Homes returns the homes of the volumes that this node uses, each of which is asked through its agent.
func (a *Agent) Homes() remotepool.Home { return homes{a} }

type homes struct{ *Agent }

// Claim: see remotepool.Home.
func (h homes) Claim(ref blockdev.Ref) (remotepool.Claim, bool) {
	v, is := h.usedHere(ref.Key)
	if !is {
		return remotepool.Claim{}, false
	}
	return remotepool.Claim{Home: v.Spec.NodeName, Generation: h.generation(v)}, true
}

// generation returns the generation of this node's claim. There has to be one.
func (a *Agent) generation(v *v1alpha1.Volume) int64 { return v.ClaimOf(a.local.Node()).Generation }

// Open: see remotepool.Home.
func (h homes) Open(ctx context.Context, pool string, ref blockdev.Ref) (remotepool.Export, error) {
	ctx, cancel := context.WithTimeout(ctx, openTime)
	defer cancel()
	id := volume.ID{Kind: ref.Kind, Pool: pool, Key: ref.Key}
	v, err := h.usedNow(ctx, id)
	if err != nil {
		return remotepool.Export{}, err
	}
	var opened export.Opened
	if err := h.atHome(ctx, v, func(home export.Home) (err error) {
		opened, err = home.Open(ctx, id, h.generation(v))
		return err
	}); err != nil {
		return remotepool.Export{}, err
	}
	return connectionTo(v, opened), nil
}

// connectionTo returns how to connect to what another node has opened of a volume, with the homeTimeout of the volume; without one, the kernel waits forever.
func connectionTo(v *v1alpha1.Volume, opened export.Opened) remotepool.Export {
	loss := cluster.HomeTimeoutOf(v)
	if loss == 0 {
		loss = -1
	}
	return remotepool.Export{Size: opened.Size, Otherwise: opened.Otherwise, Again: opened.Again, Record: opened.Record, Connection: nvme.Connection{NQN: opened.NQN, Host: opened.Host,
		Address: opened.Address, Secret: opened.Secret, PSK: opened.PSK, UUID: opened.UUID, Loss: loss}}
}

// Record: see remotepool.Home.
func (h homes) Record(ctx context.Context, pool string, ref blockdev.Ref) (record blockdev.Record, err error) {
	id := volume.ID{Kind: ref.Kind, Pool: pool, Key: ref.Key}
	err = h.ask(ctx, id, func(ctx context.Context, home export.Home, generation int64) (err error) {
		record, err = home.Record(ctx, id, generation)
		return err
	})
	return record, err
}

// SetLabels: see remotepool.Home.
func (h homes) SetLabels(ctx context.Context, pool string, ref blockdev.Ref, before, after map[string]string) (record blockdev.Record, err error) {
	id := volume.ID{Kind: ref.Kind, Pool: pool, Key: ref.Key}
	err = h.ask(ctx, id, func(ctx context.Context, home export.Home, generation int64) (err error) {
		record, err = home.SetLabels(ctx, id, generation, before, after)
		return err
	})
	return record, err
}

// Marks: see remotepool.Home.
func (h homes) Marks(ctx context.Context, pool string, ref blockdev.Ref, since uint32) (written []blockdev.Extent, err error) {
	id := volume.ID{Kind: ref.Kind, Pool: pool, Key: ref.Key}
	err = h.ask(ctx, id, func(ctx context.Context, home export.Home, generation int64) (err error) {
		written, err = home.Marks(ctx, id, generation, since)
		return err
	})
	return written, err
}

// BeginEra: see remotepool.Home.
func (h homes) BeginEra(ctx context.Context, pool string, ref blockdev.Ref) (number uint32, err error) {
	id := volume.ID{Kind: ref.Kind, Pool: pool, Key: ref.Key}
	err = h.ask(ctx, id, func(ctx context.Context, home export.Home, generation int64) (err error) {
		number, err = home.BeginEra(ctx, id, generation)
		return err
	})
	return number, err
}

// Ended: see remotepool.Home.
func (h homes) Ended(ctx context.Context, ref blockdev.Ref, generation int64) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, homeTime)
	defer cancel()
	v := &v1alpha1.Volume{}
	if err := h.kube.Live.Get(ctx, client.ObjectKey{Name: ref.Key}, v); err != nil {
		return apierrors.IsNotFound(err), client.IgnoreNotFound(err)
	}
	c, m := v.ClaimOf(h.local.Node()), v.Spec.Move
	switch {
	case c != nil && m != nil && (!m.Left && generation == c.Generation+1 || m.Left && !hasArrived(v) && generation == c.Generation):
		return false, nil // the connection to the new home of a volume that moves, or has just moved, while it is used here
	case !h.stillGiven(v, c, generation):
		return true, nil
	}
	return h.isGone(ctx, v.Spec.NodeName)
}

// stillGiven reports whether the home of a volume exports it to this node for a generation, by its object. c is this node's claim; nil if there is none.
func (h homes) stillGiven(v *v1alpha1.Volume, c *v1alpha1.Claim, generation int64) bool {
	to := volume.Grant{Generation: generation, Node: h.local.Node()}
	switch {
	case c == nil: // as if the object was restored to before the claim
		return wantsExport(v, to) && statusHasExport(v, to)
	case c.Generation != generation:
		return false
	case cluster.ToClaim(c).Many():
		return isReader(v, to)
	}
	return v.Status.Export != nil // without an export the home has restarted: it never makes an earlier export again
}

// isGone reports whether a node is gone for good, and has been for so long that the controller has deleted its Pools: its agent would make them again. What
// it exported never comes back then, or only to who connects anew.
func (a *Agent) isGone(ctx context.Context, name string) (bool, error) {
	node := kube.Node(name)
	err := a.kube.Live.Get(ctx, client.ObjectKeyFromObject(node), node)
	if !cluster.IsGone(node, err) {
		return false, kube.APIError("look at node "+name, err)
	}
	var pools v1alpha1.PoolList
	err = a.kube.Live.List(ctx, &pools, client.MatchingFields{"spec.nodeName": name})
	return err == nil && len(pools.Items) == 0, kube.APIError("list the pools of node "+name, err)
}

// Close: see remotepool.Home. It asks the home of the volume that the claim is of; if there is no claim, the home by the object at the API server. An export
// of an earlier generation of a volume that has moved is the old home's.
func (h homes) Close(ctx context.Context, ref blockdev.Ref, generation int64, nqn string) error {
	ctx, cancel := context.WithTimeout(ctx, homeTime)
	defer cancel()
	v, is := h.usedHere(ref.Key)
	if !is {
		v = &v1alpha1.Volume{}
		if err := h.kube.Live.Get(ctx, client.ObjectKey{Name: ref.Key}, v); err != nil {
			return client.IgnoreNotFound(err)
		}
	}
	home := v.Spec.NodeName
	if m, c := v.Spec.Move, v.ClaimOf(h.local.Node()); m != nil && m.Left && c != nil && generation < c.Generation {
		home = m.Node
	}
	if home == h.local.Node() {
		return nil
	}
	return h.atNode(ctx, home, func(c grpc.ClientConnInterface) error {
		return export.HomeAt(c).Close(ctx, cluster.VolumeID(v), generation, nqn)
	})
}

// ask calls the home of a volume with the generation of the claim in the cache. If the home refuses, it reads the claim at the API server, and calls again if
// that has another generation.
func (h homes) ask(ctx context.Context, id volume.ID, call func(ctx context.Context, home export.Home, generation int64) error) error {
	ctx, cancel := context.WithTimeout(ctx, homeTime)
	defer cancel()
	by := func(v *v1alpha1.Volume) error {
		return h.atHome(ctx, v, func(home export.Home) error { return call(ctx, home, h.generation(v)) })
	}
	v, is := h.usedHere(id.Key)
	if !is || cluster.VolumeID(v) != id {
		now, err := h.usedNow(ctx, id)
		if err != nil {
			return err
		}
		return by(now)
	}
	err := by(v)
	if err == nil || errors.Is(err, errdefs.ErrUnavailable) || errors.Is(err, errdefs.ErrBusy) {
		return err
	}
	if now, failure := h.usedNow(ctx, id); failure == nil && h.generation(now) != h.generation(v) {
		return by(now)
	}
	return err
}

// atHome calls the home of a volume through its agent (atNode).
func (a *Agent) atHome(ctx context.Context, v *v1alpha1.Volume, call func(export.Home) error) error {
	err := a.atNode(ctx, v.Spec.NodeName, func(c grpc.ClientConnInterface) error { return call(export.HomeAt(c)) })
	if err != nil {
		return fmt.Errorf("ask node %s, which has volume %s: %w", v.Spec.NodeName, cluster.VolumeID(v), err)
	}
	return nil
}
