package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/mirror"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/remotepool"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/replicapool"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// A volume with several legs is used through the node of its claim (docs/replication.md), which has the mirror over them, and alone writes which legs are current. This is what the agent of that
// node knows of such volumes, and how it opens their legs and gives them back; replicacare.go is what it does while they are used.

// replicas are the volumes with several legs that are claimed for this node.
type replicas struct {
	kube kube.Connection
	read atomic.Bool // the cache has been filled once

	mu    sync.Mutex
	known map[string]*replica // by the names of their objects
	using Using               // those that are used here; nil: none can be
}

// replica is what is known of one beside its object. It is forgotten with the process.
type replica struct {
	legs   map[string]volume.ID // by their names
	opens  time.Time            // since when the claim of a generation is to be opened
	claim  int64                // that generation
	record blockdev.Record      // as it was last; zero: not known
}

// LegVolumes are the legs of volumes, wherever they are: volume.Everywhere.
type LegVolumes interface {
	Leg(ctx context.Context, id volume.ID) (volume.Leg, error)
	OpenLeg(ctx context.Context, id volume.ID) (blockdev.Device, error)
	LegDevices(ctx context.Context, id volume.ID) ([]blockdev.Device, error)
	CloseLeg(ctx context.Context, id volume.ID) error
	GrowLeg(ctx context.Context, id volume.ID) error
	Adopt(ctx context.Context, id volume.ID) error
	Adopted(ctx context.Context, id volume.ID) (adopted, astray bool, err error)
	ChangeLeg(ctx context.Context, id volume.ID, change func(s *volume.LegState, labels map[string]string) error) error
	BeginEra(ctx context.Context, id volume.ID) (number uint32, err error)
	Marks(ctx context.Context, id volume.ID, since uint32) ([]blockdev.Extent, error)
}

// LegConnections are the connections to legs on other nodes: remotepool.Pool.
type LegConnections interface {
	Legs(ref blockdev.Ref) ([]remotepool.Leg, error)
	// End disconnects one, whatever is over it, which gets errors.
	End(ctx context.Context, nqn string) error
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

// replicated returns the object of a volume with several legs that is claimed for this node, as the watch last told.
func (a *Agent) replicated(key string) (*v1alpha1.ReplicatedVolume, bool) {
	if !a.replicas.read.Load() {
		return nil, false
	}
	v := &v1alpha1.ReplicatedVolume{}
	err := a.replicas.kube.Cache.Get(context.Background(), client.ObjectKey{Name: key}, v) // it is memory
	return v, err == nil && v.Spec.Claim != nil && v.Spec.Claim.Node == a.local.Node()
}

// replicatedNow is replicated, as the API server says now. ErrPrecondition if it is not claimed for this node.
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

// replicaClaim is the claim of a volume with several legs, as Claimed wants to know it; false if there is no such volume.
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

// Replicated knows which volumes with several legs are claimed for this node, or have a mirror here, as mirrored says.
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

// UseReplicated says who holds back the writes to volumes with several legs that are used here, and sets what may be changed of them: volume.Replicated.
func (a *Agent) UseReplicated(using Using) {
	a.replicas.mu.Lock()
	defer a.replicas.mu.Unlock()
	a.replicas.using = using
}

// holdReplicated holds back the writes to the volume of a leg, if it is used here: also if that is about to be a volume with several legs. The caller may have the lock of one leg, which the first shares with the volume.
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

// ReplicaLegs opens the legs of volumes that this node uses: it is a replicapool.Legs.
func (a *Agent) ReplicaLegs(volumes LegVolumes, connections LegConnections) *ReplicaLegs {
	return &ReplicaLegs{Agent: a, volumes: volumes, connections: connections, scrubbing: make(chan struct{}, 1)}
}

// ReplicaLegs are the legs of the volumes that this node uses.
type ReplicaLegs struct {
	*Agent
	volumes     LegVolumes
	connections LegConnections
	scrubbing   chan struct{} // has room for one who compares legs
	turns       turns         // of legs that are made equal
}

var _ replicapool.Legs = (*ReplicaLegs)(nil)

// Generation: see replicapool.Legs.
func (l *ReplicaLegs) Generation(ref blockdev.Ref) (int64, bool) {
	v, is := l.replicated(ref.Key)
	if !is {
		return 0, false
	}
	return v.Spec.Claim.Generation, true
}

// legIDs are the IDs of legs by their names, as far as that can be known. They do not change.
func (l *ReplicaLegs) legID(ctx context.Context, v *v1alpha1.ReplicatedVolume, name string) (volume.ID, error) {
	id := volume.ID{Kind: blockdev.Volume, Pool: v.Spec.Pool, Key: name}
	if name == v.Name {
		return id, nil
	}
	if known, is := l.knownLeg(v.Name, name); is {
		return known, nil
	}
	o, is := l.usedHere(name)
	if !is {
		var err error
		if o, is, err = get(ctx, l.Agent, name, &v1alpha1.Volume{}); err != nil || !is {
			o = &v1alpha1.Volume{}
			if err := l.kube.Live.Get(ctx, client.ObjectKey{Name: name}, o); err != nil {
				return id, kube.APIError("read leg "+name, err)
			}
		}
	}
	if o.Spec.ReplicaOf != v.Name {
		return id, fmt.Errorf("%w: the volume %s is no leg of %s", errdefs.ErrPrecondition, name, v.Name)
	}
	id = cluster.VolumeID(o)
	l.note(v.Name, func(r *replica) { r.legs[name] = id })
	return id, nil
}

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

// withLeg works on a leg with its lock, of which the first has that of its volume, which the caller has. It waits a moment for it.
func (l *ReplicaLegs) withLeg(ctx context.Context, v *v1alpha1.ReplicatedVolume, name string, work func(id volume.ID) error) error {
	id, err := l.legID(ctx, v, name)
	if err != nil {
		return err
	}
	if name == v.Name {
		return work(id)
	}
	return l.locked(ctx, name, func() error { return work(id) })
}

// locked works with the lock of a volume or leg, for which it waits until the context ends. What the work itself finds busy is for the caller to try again, who looks anew.
func (l *ReplicaLegs) locked(ctx context.Context, name string, work func() error) error {
	locks := []string{keylock.Volume(name)}
	unlock, busy := l.options.Locks.TryLock(locks, nil)
	for ; unlock == nil; unlock, busy = l.options.Locks.TryLock(locks, nil) {
		if pause(ctx, busyRetry) != nil {
			return fmt.Errorf("%w on %s", errdefs.ErrBusy, busy)
		}
	}
	defer unlock()
	return work()
}

// withLegs is withLeg of several, at once.
func (l *ReplicaLegs) withLegs(ctx context.Context, v *v1alpha1.ReplicatedVolume, names []string, work func(legs map[string]volume.ID) error) error {
	legs := map[string]volume.ID{}
	var next func(names []string) error
	next = func(names []string) error {
		if len(names) == 0 {
			return work(legs)
		}
		return l.withLeg(ctx, v, names[0], func(id volume.ID) error {
			legs[names[0]] = id
			return next(names[1:])
		})
	}
	return next(names)
}

// pause waits; it returns the context's error if that ends first.
func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// legPatience is for how many looks (Options.CarryEvery) a leg that is current, and does not answer, is waited for before the others go on without it.
const legPatience = 5

// openedLeg is a leg that has been opened for a claim.
type openedLeg struct {
	volume.Leg
	name   string
	device blockdev.Device
	near   bool // it is on this node
}

// Open: see replicapool.Legs. Whoever had the legs before has none of them any more that is opened, and so nothing is acknowledged to him. The list is written before anything is read.
func (l *ReplicaLegs) Open(ctx context.Context, pool string, ref blockdev.Ref) (_ replicapool.Opened, err error) {
	ctx, cancel := context.WithTimeout(ctx, openTime)
	defer cancel()
	v, err := l.replicatedNow(ctx, ref.Key)
	if err != nil {
		return replicapool.Opened{}, err
	}
	if v.Spec.Pool != pool || v.Going() || v.Status.Made == nil {
		return replicapool.Opened{}, fmt.Errorf("%w: replicated volume %s is not there to be used", errdefs.ErrPrecondition, ref.Key)
	}
	opened, away, failed := l.openAll(ctx, v)
	defer func() {
		if err != nil {
			for _, leg := range opened {
				err = errors.Join(err, leg.device.Close())
			}
		}
	}()
	if len(opened) == 0 || ctx.Err() != nil {
		return replicapool.Opened{}, errdefs.Recast(errdefs.ErrUnavailable, failed, "the legs of the replicated volume %s that are current are waited for", ref.Key)
	}
	var others []openedLeg
	if !isLast(v, opened) {
		others = l.ask(ctx, v, unlisted(v))
	}
	chosen, err := chooseOf(v, opened, others, away, failed)
	if err != nil {
		l.sayWaits(ctx, v, err)
		return replicapool.Opened{}, err
	}
	if err := l.writeList(ctx, v, chosen, opened); err != nil {
		return replicapool.Opened{}, err
	}
	if _, err := l.tellList(ctx, v); err != nil {
		return replicapool.Opened{}, err
	}
	for _, leg := range chosen {
		if err := l.begins(ctx, v, leg); err != nil {
			return replicapool.Opened{}, err
		}
	}
	out := replicapool.Opened{Generation: v.Spec.Claim.Generation, Size: chosen[0].Keeps(v.Spec.Size)}
	for i, leg := range opened {
		if !slices.ContainsFunc(chosen, func(c openedLeg) bool { return c.name == leg.name }) {
			err = errors.Join(err, opened[i].device.Close()) // it joins the mirror later
			continue
		}
		out.Legs = append(out.Legs, leg.device)
	}
	l.note(ref.Key, func(r *replica) { r.claim = 0 })
	return out, err
}

// openAll opens the legs that are current, the near one first. failed says why some were not; those are waited for a while, and once that has passed no longer than until one is open. away are those of them that may have everything all the same.
func (l *ReplicaLegs) openAll(ctx context.Context, v *v1alpha1.ReplicatedVolume) (opened []openedLeg, away []string, failed error) {
	left := v.Current()
	var end time.Time // whoever asks has less time, and asks again
	l.note(v.Name, func(r *replica) {
		if g := v.Spec.Claim.Generation; r.claim != g {
			r.opens, r.claim = time.Now(), g
		}
		end = r.opens.Add(legPatience * l.options.CarryEvery)
	})
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	hasOne := sync.OnceFunc(func() { time.AfterFunc(time.Until(end), cancel) }) // a node that is gone does not answer at all
	for {
		legs, failures := make([]openedLeg, len(left)), make([]error, len(left))
		var all sync.WaitGroup
		for i, name := range left {
			all.Go(func() {
				if legs[i], failures[i] = l.open(ctx, v, name); failures[i] == nil {
					hasOne()
				}
			})
		}
		all.Wait()
		var again []string
		away = nil
		for i, name := range left {
			if failures[i] == nil {
				opened = append(opened, legs[i])
				continue
			}
			again = append(again, name)
			if !errors.Is(failures[i], errdefs.ErrDataLoss) {
				away = append(away, name)
			}
		}
		left, failed = again, errors.Join(failures...)
		if len(away) == 0 || time.Now().After(end) || pause(ctx, l.options.CarryEvery) != nil {
			break
		}
	}
	slices.SortStableFunc(opened, func(a, b openedLeg) int { return volume.TrueFirst(a.near, b.near) })
	return opened, away, failed
}

// askPatience is for how many looks (Options.CarryEvery) a leg is asked what it knows.
const askPatience = 2

// ask returns those of some legs that say what they know of lists, all at once, without their locks. They are not opened.
func (l *ReplicaLegs) ask(ctx context.Context, v *v1alpha1.ReplicatedVolume, names []string) (known []openedLeg) {
	ctx, cancel := context.WithTimeout(ctx, askPatience*l.options.CarryEvery)
	defer cancel()
	answers := make([]volume.Leg, len(names))
	var all sync.WaitGroup
	for i, name := range names {
		all.Go(func() {
			answers[i], _ = l.leg(ctx, v, name) // without an answer it is left out
		})
	}
	all.Wait()
	for i, leg := range answers {
		if leg.Of == v.Name {
			known = append(known, openedLeg{Leg: leg, name: names[i]})
		}
	}
	return known
}

// unlisted are the legs that are not on the list.
func unlisted(v *v1alpha1.ReplicatedVolume) []string {
	return slices.DeleteFunc(slices.Clone(v.Spec.Legs), func(name string) bool { return slices.Contains(v.Current(), name) })
}

// chooseOf says which legs are current from now on, of those that were opened. others are not on the list; away are others that are, of which failed says why they were not. ErrPrecondition, or ErrUnavailable, if none of these is known to have everything.
func chooseOf(v *v1alpha1.ReplicatedVolume, opened, others []openedLeg, away []string, failed error) ([]openedLeg, error) {
	latest, err := upToDate(v, opened, others)
	if err != nil {
		return nil, err
	}
	chosen := choose(latest)
	if best := chosen[0]; best.LostPower() && len(away) > 0 {
		return nil, errdefs.Recast(errdefs.ErrUnavailable, failed, "the machine of leg %s of the replicated volume %s has started anew since it was used, so that what was not flushed may be lost there; leg %s has it, and is waited for", best.name, v.Name, strings.Join(away, ", leg "))
	}
	return chosen, nil
}

// sayWaits says in the object why a volume cannot be used, though a leg answers.
func (l *ReplicaLegs) sayWaits(ctx context.Context, v *v1alpha1.ReplicatedVolume, why error) {
	if err := l.writeReplicas(ctx, v, func(s *v1alpha1.ReplicatedVolumeStatus) { s.Waits = cluster.Limited(errdefs.Words(why)) }); err != nil {
		klog.FromContext(ctx).Error(err, "Could not say in its object why a replicated volume waits", "volume", v.Name)
	}
}

// open opens a leg that is current, as far as the list says, for the claim that there is.
func (l *ReplicaLegs) open(ctx context.Context, v *v1alpha1.ReplicatedVolume, name string) (leg openedLeg, err error) {
	err = l.withLeg(ctx, v, name, func(id volume.ID) error {
		leg, err = l.attach(ctx, v, id)
		if err != nil {
			return err
		}
		if err = isOlder(v, leg, id); err == nil {
			g := v.Spec.Claim.Generation
			err = l.volumes.ChangeLeg(ctx, id, func(s *volume.LegState, _ map[string]string) error {
				s.Sound, s.Opened, s.Closed = g, g, false
				if !leg.LostPower() { // else it is known until the list is written: this try may not get there
					s.Boot = leg.Now
				}
				return nil
			})
		}
		if err != nil {
			err = errors.Join(err, leg.device.Close())
		}
		return err
	})
	return leg, err
}

// begins has the record of a leg that is current say that what its machine loses from now on is lost anew.
func (l *ReplicaLegs) begins(ctx context.Context, v *v1alpha1.ReplicatedVolume, leg openedLeg) error {
	if !leg.LostPower() {
		return nil
	}
	return l.withLeg(ctx, v, leg.name, func(id volume.ID) error {
		return l.volumes.ChangeLeg(ctx, id, func(s *volume.LegState, _ map[string]string) error {
			s.Boot = leg.Now
			return nil
		})
	})
}

// attach attaches a leg, which is that, of no later claim, and large enough.
func (l *ReplicaLegs) attach(ctx context.Context, v *v1alpha1.ReplicatedVolume, id volume.ID) (leg openedLeg, err error) {
	leg.name = id.Key
	if leg.device, err = l.volumes.OpenLeg(ctx, id); err != nil {
		return leg, err
	}
	if leg.Leg, err = l.volumes.Leg(ctx, id); err == nil {
		size := leg.Keeps(v.Spec.Size)
		switch {
		case leg.Of != v.Name:
			err = fmt.Errorf("%w: %s is a leg of the volume %q, not of %s", errdefs.ErrPrecondition, id, leg.Of, v.Name)
		case leg.Opened > v.Spec.Claim.Generation:
			err = fmt.Errorf("%w: leg %s was opened by claim %d, which is later than %d", errdefs.ErrPrecondition, id, leg.Opened, v.Spec.Claim.Generation)
		case leg.device.Size < size:
			err = fmt.Errorf("%w: leg %s has %d bytes, and is to have %d", errdefs.ErrUnavailable, id, leg.device.Size, size)
		}
	}
	if err != nil {
		return leg, errors.Join(err, leg.device.Close())
	}
	leg.near = l.isNear(ctx, id.Key)
	return leg, nil
}

// choose says which legs are current from now on: all of them, if nothing can differ; else one, which has everything that was acknowledged, as they all have. One that may have lost with its power what was not flushed is the last.
// If legs that were closed are of different claims, the list is of before the last one: an object that was restored. Then those of the last one have everything.
func choose(opened []openedLeg) []openedLeg {
	if !slices.ContainsFunc(opened, func(leg openedLeg) bool { return !leg.Closed || leg.Sound != opened[0].Sound }) {
		return opened
	}
	best := slices.MinFunc(opened, func(a, b openedLeg) int {
		return cmp.Or(volume.TrueFirst(!a.LostPower(), !b.LostPower()), cmp.Compare(b.Sound, a.Sound))
	})
	return []openedLeg{best}
}

// writeList says which legs are current from now on. It fails with ErrBusy if anybody changed the object meanwhile: perhaps the claim.
func (l *ReplicaLegs) writeList(ctx context.Context, v *v1alpha1.ReplicatedVolume, current, opened []openedLeg) error {
	g := v.Spec.Claim.Generation
	return l.writeReplicas(ctx, v, func(s *v1alpha1.ReplicatedVolumeStatus) {
		s.Opened, s.Waits = g, ""
		for i := range s.Legs {
			leg := &s.Legs[i]
			was := leg.Current
			if leg.Current = slices.ContainsFunc(current, func(c openedLeg) bool { return c.name == leg.Name }); leg.Current {
				setCurrent(leg, g)
				continue
			}
			if was && slices.ContainsFunc(opened, func(o openedLeg) bool { return o.name == leg.Name }) {
				setWaiting(leg, "it was in use when its user ended, and is made equal to the one that is current")
			} else if was {
				setWaiting(leg, "its node did not answer when the volume was staged")
			}
		}
	})
}

// setCurrent says of a leg that it has every acknowledged write, by a claim.
func setCurrent(leg *v1alpha1.Leg, generation int64) {
	*leg = v1alpha1.Leg{Name: leg.Name, Current: true, Sound: generation, List: leg.List, State: v1alpha1.LegCurrent}
}

// setWaiting says of a leg why it is not used.
func setWaiting(leg *v1alpha1.Leg, why string) {
	since := leg.Since
	if leg.Current || since == nil {
		now := metav1.Now().Rfc3339Copy() // as an object holds it
		since = &now
	}
	*leg = v1alpha1.Leg{Name: leg.Name, Sound: leg.Sound, List: leg.List, State: v1alpha1.LegWaiting, Message: cluster.Limited(why), Since: since}
}

// writeReplicas writes the status of a volume with several legs, as v has it, if edit changes it. Of another list of current legs the legs on it know before; that it was written, they are told (tellList) before anybody relies on it. ErrBusy if anybody
// changed the object since it was read.
func (l *ReplicaLegs) writeReplicas(ctx context.Context, v *v1alpha1.ReplicatedVolume, edit func(*v1alpha1.ReplicatedVolumeStatus)) error {
	return l.writeAfter(ctx, v, nil, edit)
}

// writeAfter is writeReplicas of a list that is a new one in any case, after the last one that is known; nil: what v has is that.
func (l *ReplicaLegs) writeAfter(ctx context.Context, v *v1alpha1.ReplicatedVolume, last *lastList, edit func(*v1alpha1.ReplicatedVolumeStatus)) error {
	before := v.DeepCopy()
	edit(&v.Status)
	cluster.SummarizeLegs(v)
	if last != nil || !sameList(before, v) {
		if last == nil {
			last = &lastList{before.Status.Lists, before.Current()}
		}
		number := max(before.Status.Lists, last.number) + 1
		if byPerson(before) {
			number += personGap
		}
		number, after, err := l.announce(ctx, v, v.Current(), *last, number)
		if err != nil {
			*v = *before
			return err
		}
		v.Status.Lists = number
		for i := range v.Status.Legs {
			switch leg := &v.Status.Legs[i]; {
			case leg.Current:
				leg.List = number
			case !hasLists(before) || after > before.Status.Lists: // it is not known; or the object was put back, and one that has everything knows what came after
				leg.List = max(leg.List, after)
			}
		}
	}
	if equality.Semantic.DeepEqual(&before.Status, &v.Status) {
		return nil
	}
	err := l.replicas.kube.Client.Status().Patch(ctx, v, kube.LockingPatch(before))
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		*v = *before
		return fmt.Errorf("%w: the object of the replicated volume %s was changed meanwhile", errdefs.ErrBusy, v.Name)
	}
	if err != nil {
		*v = *before
	}
	return kube.APIError("write which legs of the replicated volume "+v.Name+" are current", err)
}

// object returns the object of a volume that this node uses, as known here, with all that this node wrote, or else as the API server has it.
func (l *ReplicaLegs) object(ctx context.Context, key string) (*v1alpha1.ReplicatedVolume, error) {
	if _, is := l.replicated(key); is {
		v := &v1alpha1.ReplicatedVolume{}
		err := l.replicas.kube.Client.Get(ctx, client.ObjectKey{Name: key}, v)
		if err == nil && v.Spec.Claim != nil && v.Spec.Claim.Node == l.local.Node() {
			return v, nil
		}
	}
	return l.replicatedNow(ctx, key)
}

// Record: see replicapool.Legs. While no leg answers it is as it was last.
func (l *ReplicaLegs) Record(ctx context.Context, pool string, ref blockdev.Ref) (record blockdev.Record, err error) {
	ctx, cancel := context.WithTimeout(ctx, homeTime)
	defer cancel()
	v, err := l.object(ctx, ref.Key)
	if err != nil {
		return blockdev.Record{}, err
	}
	if v.Spec.Pool != pool {
		return blockdev.Record{}, fmt.Errorf("%w: replicated volume %s is none of pool %s", errdefs.ErrNotFound, ref.Key, pool)
	}
	leg, err := l.currentLeg(ctx, v)
	if err == nil {
		record = leg.RecordOf(ref, v.Spec.Name, v.Spec.Size)
		l.note(ref.Key, func(r *replica) { r.record = record })
		return record, nil
	}
	if errors.Is(err, errdefs.ErrUnavailable) {
		l.note(ref.Key, func(r *replica) { record = r.record })
		if record.Ref == ref {
			record.Stale = true
			return record, nil
		}
	}
	return blockdev.Record{}, err
}

// askAgain is after which time a leg that answered with an error is asked again.
const askAgain = 100 * time.Millisecond

// currentLeg returns a leg that is current, as its node has it: that of this node, or else the first one that answers, of which one is asked beside the other: a node that is gone takes all the time that there is. Meanwhile the others are
// asked again: of a claim that was just made one hears in a moment.
func (l *ReplicaLegs) currentLeg(ctx context.Context, v *v1alpha1.ReplicatedVolume) (leg volume.Leg, err error) {
	err = fmt.Errorf("%w: no leg of the replicated volume %s is current", errdefs.ErrDataLoss, v.Name)
	names := l.nearFirst(ctx, v)
	if len(names) > 0 && l.isNear(ctx, names[0]) {
		if leg, err = l.leg(ctx, v, names[0]); err == nil {
			return leg, nil
		}
		names = names[1:]
	}
	type answer struct {
		name string
		leg  volume.Leg
		err  error
	}
	answers := make(chan answer)
	var all sync.WaitGroup
	defer all.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for _, name := range names {
		all.Go(func() {
			for {
				leg, err := l.leg(ctx, v, name)
				select {
				case answers <- answer{name, leg, err}:
				case <-ctx.Done():
				}
				if pause(ctx, askAgain) != nil {
					return
				}
			}
		})
	}
	failed := map[string]error{}
	for len(failed) < len(names) {
		select {
		case a := <-answers:
			if a.err == nil {
				return a.leg, nil
			}
			failed[a.name], err = a.err, a.err
		case <-ctx.Done():
			return volume.Leg{}, errdefs.Recast(errdefs.ErrUnavailable, errors.Join(append(slices.Collect(maps.Values(failed)), ctx.Err())...), "ask the legs of the replicated volume %s", v.Name)
		}
	}
	return volume.Leg{}, err
}

// leg returns a leg as its node has it.
func (l *ReplicaLegs) leg(ctx context.Context, v *v1alpha1.ReplicatedVolume, name string) (volume.Leg, error) {
	id, err := l.legID(ctx, v, name)
	if err != nil {
		return volume.Leg{}, err
	}
	return l.volumes.Leg(ctx, id)
}

// isNear reports whether a leg is on this node.
func (a *Agent) isNear(ctx context.Context, name string) bool {
	_, there, err := get(ctx, a, name, &v1alpha1.Volume{})
	return err == nil && there
}

// nearFirst are the names of the legs that are current, that of this node first.
func (l *ReplicaLegs) nearFirst(ctx context.Context, v *v1alpha1.ReplicatedVolume) []string {
	names := v.Current()
	slices.SortStableFunc(names, func(a, b string) int { return volume.TrueFirst(l.isNear(ctx, a), l.isNear(ctx, b)) })
	return names
}

// SetLabels: see replicapool.Legs. What one leg says, and another one does not yet, the next user finds at one of them: nothing was done with it.
func (l *ReplicaLegs) SetLabels(ctx context.Context, pool string, ref blockdev.Ref, change func(labels map[string]string) error) (record blockdev.Record, err error) {
	ctx, cancel := context.WithTimeout(ctx, homeTime)
	defer cancel()
	v, err := l.object(ctx, ref.Key)
	if err != nil {
		return blockdev.Record{}, err
	}
	var first map[string]string
	for _, name := range l.nearFirst(ctx, v) {
		err := l.withLeg(ctx, v, name, func(id volume.ID) error {
			return l.volumes.ChangeLeg(ctx, id, func(_ *volume.LegState, labels map[string]string) error {
				if first != nil {
					volume.CarryLabels(first, labels)
					return nil
				}
				if err := change(labels); err != nil {
					return err
				}
				first = labels
				return nil
			})
		})
		if err != nil {
			return blockdev.Record{}, fmt.Errorf("change the record of the replicated volume %s on all its legs: %w", ref.Key, err)
		}
	}
	return l.Record(ctx, pool, ref)
}

// Grow: see replicapool.Legs.
func (l *ReplicaLegs) Grow(ctx context.Context, ref blockdev.Ref) (size int64, err error) {
	v, err := l.object(ctx, ref.Key)
	if err != nil {
		return 0, err
	}
	for _, name := range v.Current() {
		if err := l.withLeg(ctx, v, name, func(id volume.ID) error {
			if err := l.volumes.GrowLeg(ctx, id); err != nil {
				return err
			}
			devices, err := l.volumes.LegDevices(ctx, id)
			for _, d := range devices {
				if size == 0 || d.Size < size {
					size = d.Size
				}
			}
			return err
		}); err != nil {
			return 0, fmt.Errorf("have leg %s of the replicated volume %s grow: %w", name, ref.Key, err)
		}
	}
	return size, nil
}

// Close: see replicapool.Legs. A leg that does not answer is let go of: its node ends what it gives when it hears that the claim has ended.
func (l *ReplicaLegs) Close(ctx context.Context, ref blockdev.Ref, equal []uint64) error {
	asking, cancel := context.WithTimeout(ctx, homeTime)
	defer cancel()
	v, err := l.object(asking, ref.Key)
	if err != nil {
		l.forgetReplica(ref.Key)
		if errors.Is(err, errdefs.ErrPrecondition) {
			return nil // by no claim, it has none
		}
		return err
	}
	var failures []error
	for _, name := range v.Spec.Legs {
		leg := v.Leg(name)
		failures = append(failures, l.withLeg(asking, v, name, func(id volume.ID) error {
			devices, err := l.volumes.LegDevices(asking, id)
			if err != nil {
				return err
			}
			mirrored := slices.ContainsFunc(devices, func(d blockdev.Device) bool { return slices.Contains(equal, d.Number) })
			if mirrored && leg != nil && leg.Current && v.Status.Opened == v.Spec.Claim.Generation {
				if err := l.closeLeg(asking, v, id); err != nil {
					return err
				}
			}
			if len(devices) == 0 {
				return nil
			}
			return l.letGo(ctx, id)
		}))
	}
	l.forgetReplica(ref.Key)
	return errors.Join(failures...)
}

// closeLeg writes down that a leg was closed.
func (l *ReplicaLegs) closeLeg(ctx context.Context, v *v1alpha1.ReplicatedVolume, id volume.ID) error {
	err := l.volumes.ChangeLeg(ctx, id, func(s *volume.LegState, _ map[string]string) error {
		s.Closed = s.Opened == v.Spec.Claim.Generation && s.Sound == s.Opened
		return nil
	})
	if errors.Is(err, errdefs.ErrUnavailable) || errors.Is(err, errdefs.ErrPrecondition) { // the next user makes it equal to the others
		return nil
	}
	return err
}

// letGo gives a leg back to its node, or if that does not answer ends the connection to it.
func (l *ReplicaLegs) letGo(ctx context.Context, id volume.ID) error {
	err := l.volumes.CloseLeg(ctx, id)
	if !errors.Is(err, errdefs.ErrUnavailable) {
		return err
	}
	legs, failure := l.connections.Legs(blockdev.Ref{Kind: id.Kind, Key: id.Key})
	for _, c := range legs {
		failure = errors.Join(failure, l.connections.End(ctx, c.NQN))
	}
	return failure
}

func (a *Agent) forgetReplica(key string) {
	a.replicas.mu.Lock()
	defer a.replicas.mu.Unlock()
	delete(a.replicas.known, key)
}

// Health: see replicapool.Legs.
func (l *ReplicaLegs) Health(ref blockdev.Ref, s mirror.State) (problems []blockdev.Problem) {
	if len(s.Failed()) == len(s.Legs) {
		return []blockdev.Problem{{Severity: blockdev.Inaccessible, Reason: cluster.ReasonNoCurrentReplica, Message: "none of its legs takes what is written; who uses it gets errors, or waits"}}
	}
	v, is := l.replicated(ref.Key)
	if !is {
		return nil
	}
	if differ := v.Differ(); differ != "" {
		problems = append(problems, blockdev.Problem{Severity: blockdev.Degraded, Reason: v1alpha1.ReasonReplicasDiffer, Message: differ})
	}
	if current := len(v.Current()); current < v.Spec.Replicas {
		problems = append(problems, blockdev.Problem{Severity: blockdev.Degraded, Reason: cluster.ReasonReplicaNotCurrent,
			Message: fmt.Sprintf("%d of %d legs have everything that was written: %s", current, v.Spec.Replicas, missingLegs(v))})
	}
	return problems
}

// missingLegs says of the legs that are not current why.
func missingLegs(v *v1alpha1.ReplicatedVolume) string {
	why := map[string]string{}
	for _, leg := range v.Status.Legs {
		if !leg.Current {
			why[leg.Name] = leg.Message
		}
	}
	if len(why) == 0 {
		return "the others are not made yet"
	}
	return reasons(why)
}
