package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// A volume with several legs is used through the node of its claim (docs/replication.md). That node has the mirror over the legs, and alone writes which legs
// are current. This file has what its agent knows of such volumes. replicalegs.go: how it reaches the legs. replicaopen.go: how it opens them for a claim.
// replicalist.go: which list of current legs it writes. replicamirror.go: what it does while the volume is used.

// replicas has the volumes with several legs that are claimed for this node.
type replicas struct {
	kube kube.Connection
	read atomic.Bool // the cache has been filled once

	mu    sync.Mutex
	known map[string]*replica // by the names of their objects
	using UsedVolumes         // the volumes that are used here; nil: none can be used
}

// replica is what this process remembers of a volume with several legs, beside its object.
type replica struct {
	legs   map[string]volume.ID // by their names
	claim  int64                // the generation of the claim that is being opened; 0: none
	opens  time.Time            // since when that claim is being opened
	record blockdev.Record      // as a leg had it last; zero: not known
}

// connectReplicas prepares the watch of volumes with several legs. It asks the API server nothing.
func (a *Agent) connectReplicas(config *rest.Config) (err error) {
	a.replicas.known = map[string]*replica{}
	if a.options.Network == nil {
		return nil
	}
	claimed := fields.OneTermEqualSelector("spec.claim.node", a.local.Node())
	a.replicas.kube, err = kube.Connect(config, map[client.Object]cache.ByObject{&v1alpha1.ReplicatedVolume{}: {Field: claimed}})
	return err
}

// watchReplicas watches them until the context ends.
func (a *Agent) watchReplicas(ctx context.Context) error {
	if a.options.Network == nil {
		<-ctx.Done()
		return nil
	}
	if err := a.hear(ctx, a.replicas.kube, &v1alpha1.ReplicatedVolume{}, func(client.Object, bool) {}); err != nil {
		return err
	}
	var running sync.WaitGroup
	defer running.Wait()
	running.Go(func() { a.replicas.read.Store(a.replicas.kube.Cache.WaitForCacheSync(ctx)) })
	return a.replicas.kube.Cache.Start(ctx)
}

// replicated returns the object of a volume with several legs from the cache; false if it is not claimed for this node.
func (a *Agent) replicated(key string) (*v1alpha1.ReplicatedVolume, bool) {
	if !a.replicas.read.Load() {
		return nil, false
	}
	v := &v1alpha1.ReplicatedVolume{}
	err := a.replicas.kube.Cache.Get(context.Background(), client.ObjectKey{Name: key}, v) // it is memory
	return v, err == nil && v.Spec.Claim != nil && v.Spec.Claim.Node == a.local.Node()
}

// replicatedNow is replicated, from the API server. ErrPrecondition if the volume is not claimed for this node.
func (a *Agent) replicatedNow(ctx context.Context, key string) (*v1alpha1.ReplicatedVolume, error) {
	v := &v1alpha1.ReplicatedVolume{}
	err := a.kube.Live.Get(ctx, client.ObjectKey{Name: key}, v)
	if client.IgnoreNotFound(err) != nil {
		return nil, kube.APIError("read replicated volume "+key, err)
	}
	if c := v.Spec.Claim; err != nil || c == nil || c.Node != a.local.Node() {
		return nil, fmt.Errorf("%w: %s is no replicated volume that is claimed for node %s", errdefs.ErrPrecondition, key, a.local.Node())
	}
	return v, nil
}

// ListOf: see volume.Lists. It asks the API server.
func (a *Agent) ListOf(ctx context.Context, of, leg string) (volume.List, error) {
	v := &v1alpha1.ReplicatedVolume{}
	if err := a.kube.Live.Get(ctx, client.ObjectKey{Name: of}, v); err != nil {
		return volume.List{}, errdefs.Recast(errdefs.ErrUnavailable, err, "find out whether leg %s of the replicated volume %s is current, and may be copied", leg, of)
	}
	if v.Status.Made == nil {
		return volume.List{}, fmt.Errorf("%w: which legs of the replicated volume %s are current is not written down yet", errdefs.ErrUnavailable, of)
	}
	if !slices.Contains(v.Current(), leg) {
		return volume.List{}, fmt.Errorf("copy leg %s of the replicated volume %s: %w", leg, of, volume.ErrNotCurrent)
	}
	return listFor(v, leg), nil
}

// listFor returns the list of current legs of a volume, for one of them.
func listFor(v *v1alpha1.ReplicatedVolume, leg string) volume.List {
	return volume.List{Number: v.Status.Lists, Legs: len(v.Current()), Closed: v.Status.Closed > 0 && v.Status.Closed == v.Status.Opened, Sound: v.Leg(leg).Sound}
}

// replicaClaim returns the claim of a volume with several legs, for Claimed; false if there is no such volume, or the API server does not answer.
func (a *Agent) replicaClaim(ctx context.Context, key string) (volume.Claim, bool) {
	if v, is := a.replicated(key); is {
		return cluster.ToClaim(v.Spec.Claim), true
	}
	ctx, cancel := context.WithTimeout(ctx, claimWait)
	defer cancel()
	v := &v1alpha1.ReplicatedVolume{}
	if err := a.kube.Live.Get(ctx, client.ObjectKey{Name: key}, v); err != nil {
		return volume.Claim{}, false
	}
	if v.Spec.Claim == nil {
		return volume.Claim{}, true
	}
	return cluster.ToClaim(v.Spec.Claim), true
}

// Replicated returns a volume.Elsewhere that knows which volumes with several legs are claimed for this node, or have a mirror here (mirrored).
func (a *Agent) Replicated(mirrored func(blockdev.Ref) bool) volume.Elsewhere {
	return replicated{a, mirrored}
}

type replicated struct {
	*Agent
	mirrored func(blockdev.Ref) bool
}

// Has: see volume.Elsewhere.
func (r replicated) Has(id volume.ID) bool {
	if id.Kind != blockdev.Volume {
		return false
	}
	v, is := r.Agent.replicated(id.Key)
	return is && v.ID() == id.String() || r.mirrored(blockdev.Ref{Kind: id.Kind, Key: id.Key})
}

// Find: see volume.Elsewhere. The kubelet may know of a claim before the watch does.
func (r replicated) Find(ctx context.Context, id volume.ID) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, claimWait)
	defer cancel()
	w := r.hub.Open(cluster.ReplicatedNamed(id.Key))
	defer w.Close()
	switch _, err := r.replicatedNow(ctx, id.Key); {
	case errors.Is(err, errdefs.ErrUnavailable):
		return false, fmt.Errorf("find out who uses the replicated volume %s: %w", id, err)
	case err != nil:
		return false, nil
	}
	return untilHeard(ctx, w, r, id)
}

// UseReplicated sets the volumes with several legs that are used here: volume.Replicated.
func (a *Agent) UseReplicated(using UsedVolumes) {
	a.replicas.mu.Lock()
	defer a.replicas.mu.Unlock()
	a.replicas.using = using
}

// holdReplicated holds back the writes to the volume of a leg, if the volume is used here, also if it is about to become one with several legs; release is
// nil if it is not. locked is the leg whose lock the caller has, empty for none: the first leg shares its lock with the volume.
func (a *Agent) holdReplicated(ctx context.Context, leg *v1alpha1.Volume, locked string) (release func() error, err error) {
	key, id := cmp.Or(leg.Spec.ReplicaOf, leg.Name), cluster.VolumeID(leg) // the watch of legs may be behind that of volumes
	v, is := a.replicated(key)
	if is {
		id = cluster.ReplicatedID(v)
	} else if c := leg.Spec.Claim; leg.Name == key && c != nil && c.Node == a.local.Node() {
		is = true
	}
	a.replicas.mu.Lock()
	using := a.replicas.using
	a.replicas.mu.Unlock()
	if !is || using == nil {
		return nil, nil
	}
	var locks []string
	if locked != key {
		locks = []string{keylock.Volume(key)}
	}
	return a.hold(ctx, using, id, locks)
}

// mirrors reports whether this node can use volumes with several legs.
func (a *Agent) mirrors() bool {
	a.replicas.mu.Lock()
	defer a.replicas.mu.Unlock()
	return a.replicas.using != nil
}

// note changes what this process remembers of a volume with several legs.
func (a *Agent) note(key string, change func(*replica)) {
	a.replicas.mu.Lock()
	defer a.replicas.mu.Unlock()
	r := a.replicas.known[key]
	if r == nil {
		r = &replica{legs: map[string]volume.ID{}}
		a.replicas.known[key] = r
	}
	change(r)
}

func (a *Agent) knownLeg(key, name string) (id volume.ID, is bool) {
	a.note(key, func(r *replica) { id, is = r.legs[name] })
	return id, is
}

func (a *Agent) forgetReplica(key string) {
	a.replicas.mu.Lock()
	defer a.replicas.mu.Unlock()
	delete(a.replicas.known, key)
}
