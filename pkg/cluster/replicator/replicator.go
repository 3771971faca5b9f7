// Package replicator does what the controller has to do for volumes with several legs (docs/replication.md) apart from CSI calls: it claims legs as their
// volume is claimed, goes on with deletions that were cut short, has legs grow that were away, replaces legs that cannot be used any more or are to be on
// another node, and makes a volume on one node the first leg of a volume with several.
package replicator

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// firstRetry and lastRetry are the first and the longest pause between tries of a step that failed. lookAgain is the pause between two looks at a volume
// without an event: a node may be gone, or a leg away for too long.
const (
	firstRetry = 100 * time.Millisecond
	lastRetry  = time.Minute
	lookAgain  = time.Minute
)

// workers is how many volumes are worked on at once.
const workers = 4

// Maker makes legs.
type Maker interface {
	// Mirrors returns a function that reports whether a node can use volumes with replicas.
	Mirrors(ctx context.Context) func(node string) bool
	// Works reports whether a node is ready, and its agent heard.
	Works(ctx context.Context, node string) bool
	// HasRoom returns ErrNoSpace if no node has room for a leg that BeginLeg would make.
	HasRoom(ctx context.Context, r *v1alpha1.ReplicatedVolume, name string, like, instead *v1alpha1.Volume, leaving []string) error
	// BeginLeg creates the Volume of a leg that the object names, unless it exists. It does not wait until the node has made the leg. If that node is down or
	// refuses, the Volume is withdrawn, and the next call chooses another node. The leg is blank, and else like the leg like. With instead it is on the node
	// that the leg instead is to move to. It may be where legs are that are to be replaced (leaving), but for their nodes. ErrNoSpace if no node has room.
	BeginLeg(ctx context.Context, r *v1alpha1.ReplicatedVolume, name string, like, instead *v1alpha1.Volume, leaving []string) error
}

// Replicator looks after the legs of volumes. Every replica of the controller has one: each of its writes is refused if the object was changed meanwhile.
// The events of a cache tell it of changes (Changed, VolumeChanged); Run does the work.
type Replicator struct {
	kube    kube.Connection
	maker   Maker
	pending workqueue.TypedRateLimitingInterface[string]
	began   time.Time // when Run began

	mu   sync.Mutex
	away map[string]map[string]away // the legs that are not current, by volume and leg: see dueLegs
}

// New returns a Replicator. The cache of its connection has to have ReplicatedVolumes, Volumes, with the index cluster.ByReplicaOf, and Nodes.
func New(c kube.Connection, maker Maker) *Replicator {
	return &Replicator{kube: c, maker: maker, away: map[string]map[string]away{},
		pending: workqueue.NewTypedRateLimitingQueue(workqueue.NewTypedItemExponentialFailureRateLimiter[string](firstRetry, lastRetry))}
}

// Changed has a ReplicatedVolume looked at.
func (p *Replicator) Changed(o client.Object, gone bool) {
	if !gone {
		p.pending.Add(o.GetName())
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.away, o.GetName())
}

// VolumeChanged has the volume of a leg looked at, or a volume that is to become a leg.
func (p *Replicator) VolumeChanged(o client.Object, _ bool) {
	v, is := o.(*v1alpha1.Volume)
	switch {
	case is && v.Spec.ReplicaOf != "":
		p.pending.Add(strings.Clone(v.Spec.ReplicaOf)) // the text may be a part of a longer one, which would stay in memory
	case is && v.Spec.Replicas > 0:
		p.pending.Add(v.Name)
	}
}

// Run does the replicator's work until the context ends. The cache has to be filled before.
func (p *Replicator) Run(ctx context.Context) {
	p.began = time.Now()
	var done sync.WaitGroup
	defer done.Wait()
	defer p.pending.ShutDown()
	for range workers {
		done.Go(func() { p.work(ctx) })
	}
	<-ctx.Done()
}

func (p *Replicator) work(ctx context.Context) {
	for {
		key, shutdown := p.pending.Get()
		if shutdown {
			return
		}
		again, err := p.step(ctx, key)
		switch {
		case err != nil && ctx.Err() == nil:
			klog.FromContext(ctx).Error(err, "Could not look after the replicas of a volume; trying again", "volume", key)
			p.pending.AddRateLimited(key)
		case again > 0:
			p.pending.Forget(key)
			p.pending.AddAfter(key, again)
		default:
			p.pending.Forget(key)
		}
		p.pending.Done(key)
	}
}

// step takes the next step of a volume. again is after how long to look at it again without an event; 0: not before there is one.
func (p *Replicator) step(ctx context.Context, key string) (again time.Duration, err error) {
	r := &v1alpha1.ReplicatedVolume{}
	if err := p.kube.Client.Get(ctx, client.ObjectKey{Name: key}, r); apierrors.IsNotFound(err) {
		return p.convertAsked(ctx, key)
	} else if err != nil {
		return 0, kube.APIError("read replicated volume "+key, err)
	}
	var list v1alpha1.VolumeList
	if err := p.kube.Client.List(ctx, &list, client.MatchingFields{cluster.ByReplicaOf: key}); err != nil {
		return 0, kube.APIError("list the replicas of "+key, err)
	}
	legs := map[string]*v1alpha1.Volume{}
	for i := range list.Items {
		legs[list.Items[i].Name] = &list.Items[i]
	}
	switch {
	case r.Deleting():
		return lookAgain, p.remove(ctx, r, legs)
	case r.Spec.Delete != "": // the UID of another object: this one was restored from a copy of that
		before := r.DeepCopy()
		r.Spec.Delete = ""
		return lookAgain, p.patch(ctx, r, before)
	case r.Status.Made == nil && !r.Going() && r.Spec.Numbered == 1:
		return 0, p.convert(ctx, key)
	case r.Status.Made == nil || r.Going():
		return 0, nil // the CSI call is repeated
	}
	if first := legs[r.Name]; first != nil && first.Spec.Replicas > 0 {
		return 0, p.convert(ctx, key)
	}
	if before := r.DeepCopy(); cluster.KeepSize(r, named(r, legs)) {
		return 0, p.patch(ctx, r, before)
	}
	if err := p.syncLegs(ctx, r, legs); err != nil {
		return 0, err
	}
	due := p.dueLegs(ctx, r, legs)
	return untilNextLook(due), p.adjustLegs(ctx, r, legs, due)
}

// named returns the legs that spec.legs names, as far as they are there.
func named(r *v1alpha1.ReplicatedVolume, legs map[string]*v1alpha1.Volume) (all []*v1alpha1.Volume) {
	for _, name := range r.Spec.Legs {
		if legs[name] != nil {
			all = append(all, legs[name])
		}
	}
	return all
}

// convertAsked is convert for a volume on one node, if that is asked to have replicas (spec.replicas).
func (p *Replicator) convertAsked(ctx context.Context, key string) (again time.Duration, err error) {
	v := &v1alpha1.Volume{}
	err = p.kube.Client.Get(ctx, client.ObjectKey{Name: key}, v)
	if err != nil || v.Spec.Replicas == 0 {
		return 0, kube.APIError("read volume "+key, client.IgnoreNotFound(err))
	}
	return lookAgain, p.convert(ctx, key) // whether the node that uses it has mirrors may change without an event of the volume
}

// remove takes the next step of a deletion: it has all legs deleted, also those that the object has named and the cache does not have, and when they are gone,
// deletes the object.
func (p *Replicator) remove(ctx context.Context, r *v1alpha1.ReplicatedVolume, legs map[string]*v1alpha1.Volume) error {
	left := 0
	var failures []error
	numbered := slices.DeleteFunc(cluster.NumberedLegs(r), func(name string) bool { return slices.Contains(r.Spec.Legs, name) })
	for _, name := range union(slices.Concat(r.Spec.Legs, numbered), legs) {
		v, err := cluster.RemoveLeg(ctx, p.kube, r, name)
		if failures = append(failures, err); v != nil {
			left++
		}
	}
	if err := errors.Join(failures...); err != nil || left > 0 {
		return err // there is an event when a leg is gone
	}
	err := p.kube.Client.Delete(ctx, r, client.Preconditions{UID: &r.UID})
	return kube.APIError("delete replicated volume "+r.Name, kube.IgnoreConflict(err))
}

// union returns names, and after them the names of the other legs.
func union(names []string, legs map[string]*v1alpha1.Volume) []string {
	all := slices.Clone(names)
	for name := range legs {
		if !slices.Contains(names, name) {
			all = append(all, name)
		}
	}
	return all
}

// syncLegs gives each leg the claim and the size of its volume, and mutable parameters to those that are not current (syncLeg).
func (p *Replicator) syncLegs(ctx context.Context, r *v1alpha1.ReplicatedVolume, legs map[string]*v1alpha1.Volume) error {
	sure, like := false, template(r, legs)
	for _, name := range r.Spec.Legs {
		v := legs[name]
		if v == nil || !syncLeg(r, v.DeepCopy(), like) {
			continue
		}
		if !sure { // by the API server, as the claim in the cache may have been released
			now := &v1alpha1.ReplicatedVolume{}
			if err := p.kube.Live.Get(ctx, client.ObjectKeyFromObject(r), now); err != nil || now.UID != r.UID || now.Going() {
				return kube.APIError("read replicated volume "+r.Name, client.IgnoreNotFound(err)) // there is an event
			}
			r, sure = now, true
		}
		if before := v.DeepCopy(); syncLeg(r, v, like) {
			if err := kube.IgnoreConflict(p.kube.Client.Patch(ctx, v, kube.LockingPatch(before))); err != nil {
				return kube.APIError("change leg "+name, err)
			}
		}
	}
	return nil
}

// syncLeg is cluster.SyncLeg; it also gives a leg that is not current the mutable parameters of like, if that is not nil.
func syncLeg(r *v1alpha1.ReplicatedVolume, v, like *v1alpha1.Volume) (changed bool) {
	changed = cluster.SyncLeg(r, v)
	if l := r.Leg(v.Name); (l == nil || !l.Current) && like != nil && v.Status.Created != nil && !v1alpha1.Going(v) && !maps.Equal(v.Spec.Mutable, like.Spec.Mutable) {
		v.Spec.Mutable, changed = maps.Clone(like.Spec.Mutable), true
	}
	return changed
}

// adjustLegs takes the next step towards the number of legs that a volume is to have: it deletes those that were taken out, has missing ones made, takes
// out what is too much, or adds one.
func (p *Replicator) adjustLegs(ctx context.Context, r *v1alpha1.ReplicatedVolume, legs map[string]*v1alpha1.Volume, due map[string]time.Time) error {
	if dropped, err := p.dropLeft(ctx, r, legs); dropped || err != nil {
		return err
	}
	judged, err := p.assess(ctx, r, legs, due)
	if err != nil {
		return err
	}
	like, without, leaving := template(r, legs), "", leavingLegs(judged, legs)
	for _, l := range judged {
		if l.state != missing {
			continue
		}
		if like == nil {
			return nil // there is no leg to make it like
		}
		why, err := p.reportNoRoom(ctx, r, inTurn(vacancies(r, judged, legs), func(instead *v1alpha1.Volume) error {
			return p.maker.BeginLeg(ctx, r, l.name, like, instead, leaving)
		}))
		if err != nil {
			return err
		}
		without = cmp.Or(without, why)
	}
	switch victim, kind := surplusLeg(r, judged); kind {
	case takeOut:
		return p.takeOut(ctx, r, victim, legs[victim])
	case unlist:
		return p.unlist(ctx, r, victim)
	}
	next, late := vacancies(r, judged, legs), whyLate(r, judged, legs)
	if late != "" {
		next = slices.DeleteFunc(next, func(instead *v1alpha1.Volume) bool { return instead == nil })
	}
	switch {
	case like == nil || !lacksLegs(r, judged):
		return p.reportWithout(ctx, r, without)
	case len(r.Spec.Legs) >= mostLegs:
		return p.reportWithout(ctx, r, cmp.Or(late, fmt.Sprintf("it has %d replicas already, which is the most, and too few of them are current", len(r.Spec.Legs))))
	case len(next) == 0:
		return p.reportWithout(ctx, r, late)
	}
	return p.add(ctx, r, like, next, leaving)
}

// inTurn does something for each of some vacancies, until there is room for one. If there is for none, it returns the ErrNoSpace of the first one.
func inTurn(vacancies []*v1alpha1.Volume, do func(instead *v1alpha1.Volume) error) (first error) {
	for _, instead := range vacancies {
		err := do(instead)
		if !errors.Is(err, errdefs.ErrNoSpace) {
			return err
		}
		if first == nil {
			first = err
		}
	}
	return first
}

// template returns the leg that new ones are made like: a current one, or else one that was made; nil if there is none.
func template(r *v1alpha1.ReplicatedVolume, legs map[string]*v1alpha1.Volume) (like *v1alpha1.Volume) {
	for _, name := range r.Spec.Legs {
		v := legs[name]
		if v == nil || v.Status.Created == nil {
			continue
		}
		if l := r.Leg(name); l != nil && l.Current {
			return v
		}
		like = v
	}
	return like
}

// reportNoRoom turns the error of making a leg into a text (status.lacks), if it is that no node has room, and logs it if it is new. It returns any other
// error.
func (p *Replicator) reportNoRoom(ctx context.Context, r *v1alpha1.ReplicatedVolume, err error) (without string, _ error) {
	if !errors.Is(err, errdefs.ErrNoSpace) {
		return "", err
	}
	if text := cluster.Limited(errdefs.Words(err)); text != r.Status.Lacks {
		klog.FromContext(ctx).Info("A volume lacks a replica, and no node can have it", "volume", cluster.ReplicatedID(r).String(), "why", text)
		return text, nil
	}
	return r.Status.Lacks, nil
}

// reportWithout writes why a volume lacks a leg (status.lacks); empty if it has enough, or they are being made. The replicator alone writes that field, so
// no compare-and-swap is needed.
func (p *Replicator) reportWithout(ctx context.Context, r *v1alpha1.ReplicatedVolume, without string) error {
	if r.Status.Lacks == without {
		return nil
	}
	before := r.DeepCopy()
	r.Status.Lacks = without
	return kube.APIError("change the status of replicated volume "+r.Name, client.IgnoreNotFound(p.kube.Client.Status().Patch(ctx, r, client.MergeFrom(before))))
}

// add adds the name of one more leg to the object, if a node has room for it as one of some vacancies; the next step makes the leg. If no node has room, it
// reports that, and is tried again later.
func (p *Replicator) add(ctx context.Context, r *v1alpha1.ReplicatedVolume, like *v1alpha1.Volume, vacancies []*v1alpha1.Volume, leaving []string) error {
	before := r.DeepCopy()
	name, there, err := p.unused(ctx, r)
	if err != nil {
		return err
	}
	if !there {
		without, err := p.reportNoRoom(ctx, r, inTurn(vacancies, func(instead *v1alpha1.Volume) error { return p.maker.HasRoom(ctx, r, name, like, instead, leaving) }))
		if err != nil {
			return err
		}
		if without != "" {
			return p.reportWithout(ctx, before, without)
		}
	}
	klog.FromContext(ctx).Info("A volume gets another replica", "volume", cluster.ReplicatedID(r).String(), "replica", name)
	return p.patch(ctx, r, before)
}

// unused adds the name of a leg (cluster.AddLeg) of which there is no Volume yet, or of one that this volume has had (there): the object was restored to before
// that. Such a leg may alone have what was written since, which it says when it is to join; and once it is numbered, it would be deleted if it was not named
// (dropLeft). A Volume that an agent has made is passed over: its node would get what is written to the volume.
func (p *Replicator) unused(ctx context.Context, r *v1alpha1.ReplicatedVolume) (name string, there bool, err error) {
	for others := r.Spec.Legs; ; r.Spec.Legs = others {
		name = cluster.AddLeg(r)
		v := &v1alpha1.Volume{}
		if err := p.kube.Live.Get(ctx, client.ObjectKey{Name: name}, v); err != nil {
			return name, false, kube.APIError("look whether replica "+name+" is there", client.IgnoreNotFound(err))
		}
		if v.Spec.ReplicaOf == r.Name && !cluster.OfAgent(v) && !v1alpha1.Going(v) {
			return name, true, nil
		}
	}
}

// takeOut takes a leg out of spec.legs: one that is not current, or one of a volume in use, whose consumer then goes on without it. v is its Volume; nil
// if that does not exist.
func (p *Replicator) takeOut(ctx context.Context, r *v1alpha1.ReplicatedVolume, name string, v *v1alpha1.Volume) error {
	before := r.DeepCopy()
	r.Spec.Legs = slices.DeleteFunc(slices.Clone(r.Spec.Legs), func(one string) bool { return one == name })
	removed := v1alpha1.RemovedLeg{Name: name, Time: metav1.Now().Rfc3339Copy()}
	if v != nil {
		removed.NodeName = v.Spec.NodeName
	}
	if l := r.Leg(name); l != nil && l.State == v1alpha1.LegUnfit {
		removed.Unfit = l.Message
	}
	r.Spec.Removed = append(notRemoved(r, name), removed)
	r.Spec.Removed = r.Spec.Removed[max(0, len(r.Spec.Removed)-mostLegs):]
	klog.FromContext(ctx).Info("A volume does without a replica", "volume", cluster.ReplicatedID(r).String(), "replica", name)
	return p.patch(ctx, r, before)
}

func (p *Replicator) patch(ctx context.Context, r, before *v1alpha1.ReplicatedVolume) error {
	return kube.APIError("change replicated volume "+r.Name, kube.IgnoreConflict(p.kube.Client.Patch(ctx, r, kube.LockingPatch(before))))
}

// unlist makes a leg that is to go not current, for a volume that nobody uses.
func (p *Replicator) unlist(ctx context.Context, r *v1alpha1.ReplicatedVolume, name string) error {
	before := r.DeepCopy()
	l := r.Leg(name)
	l.Current, l.State, l.Message = false, v1alpha1.LegWaiting, "the volume is to have fewer replicas"
	cluster.SummarizeLegs(r)
	return p.patchStatus(ctx, r, before)
}

func (p *Replicator) patchStatus(ctx context.Context, r, before *v1alpha1.ReplicatedVolume) error {
	return kube.APIError("change the status of replicated volume "+r.Name, kube.IgnoreConflict(p.kube.Client.Status().Patch(ctx, r, kube.LockingPatch(before))))
}

// dropLeft deletes the legs that are not in spec.legs any more, once the consumer is without them, and reports whether there was any. They stay while no
// current leg is left. So does a leg that the object never named (hasNamed): the object was restored, and this leg may alone have what was written since. As a
// leg is named before it is made, the names are checked with the API server itself.
func (p *Replicator) dropLeft(ctx context.Context, r *v1alpha1.ReplicatedVolume, legs map[string]*v1alpha1.Volume) (dropped bool, err error) {
	extra := union(r.Spec.Legs, legs)[len(r.Spec.Legs):]
	stale := staleStatus(r)
	if len(extra) == 0 && (!stale || r.Spec.Claim != nil) {
		return false, nil
	}
	now := &v1alpha1.ReplicatedVolume{}
	if err := p.kube.Live.Get(ctx, client.ObjectKeyFromObject(r), now); err != nil {
		return false, kube.APIError("read replicated volume "+r.Name, client.IgnoreNotFound(err))
	}
	if now.UID != r.UID || now.Status.Made == nil {
		return false, nil
	}
	if !now.Settled() { // a leg that was to go may alone have what was written last
		if taken, err := p.takeBack(ctx, now, extra, legs); taken || err != nil {
			return taken, err
		}
	}
	if before := now.DeepCopy(); now.Spec.Claim == nil && staleStatus(now) {
		now.Status.Legs = listedLegs(now)
		cluster.SummarizeLegs(now)
		return true, p.patchStatus(ctx, now, before) // the write causes an event
	}
	if !slices.ContainsFunc(listedLegs(now), func(l v1alpha1.Leg) bool { return l.Current && legs[l.Name] != nil && !v1alpha1.IsLost(legs[l.Name]) }) {
		return p.takeBack(ctx, now, extra, legs) // else: the object may be an old one that was restored, and these legs the ones that replaced those it names
	}
	for _, name := range extra {
		if l := now.Leg(name); slices.Contains(now.Spec.Legs, name) || l != nil && l.Current || !hasNamed(now, name, legs[name]) {
			continue
		}
		if v := legs[name]; v != nil && v.Spec.Move != nil && v.Spec.Move.Left {
			continue // an event tells when its old node has given the bytes back
		}
		v, failure := cluster.RemoveLeg(ctx, p.kube, r, name)
		err = errors.Join(err, failure)
		if v != nil && !legs[name].Deleting() {
			dropped = true
			klog.FromContext(ctx).Info("Deleting a replica that its volume does without", "volume", cluster.ReplicatedID(r).String(), "replica", name, "node", v.Spec.NodeName)
		}
	}
	return dropped, err
}

// takeBack puts a current leg back into spec.legs that was taken out, and reports whether it did. It is for a leg that alone may have everything: the volume was
// used until its user died, or ended, before the leg had left. Nobody could claim the volume with it otherwise.
func (p *Replicator) takeBack(ctx context.Context, r *v1alpha1.ReplicatedVolume, extra []string, legs map[string]*v1alpha1.Volume) (bool, error) {
	i := slices.IndexFunc(extra, func(name string) bool {
		l, v := r.Leg(name), legs[name]
		return l != nil && l.Current && v != nil && !v1alpha1.Going(v) && !v1alpha1.IsLost(v)
	})
	if i < 0 || len(r.Spec.Legs) >= mostLegs {
		return false, nil
	}
	before := r.DeepCopy()
	r.Spec.Legs, r.Spec.Removed = append(slices.Clone(r.Spec.Legs), extra[i]), notRemoved(r, extra[i])
	klog.FromContext(ctx).Info("A volume keeps a replica that it was to do without: perhaps it alone has all that was written", "volume", cluster.ReplicatedID(r).String(), "replica", extra[i])
	return true, p.patch(ctx, r, before)
}

// notRemoved returns the legs that were taken out of spec.legs, without one.
func notRemoved(r *v1alpha1.ReplicatedVolume, name string) []v1alpha1.RemovedLeg {
	return slices.DeleteFunc(slices.Clone(r.Spec.Removed), func(l v1alpha1.RemovedLeg) bool { return l.Name == name })
}

// hasNamed reports whether an object has ever named a leg. v is the Volume of that name; nil: not known. If an agent has made it, of what its node has, the
// number may have been passed over (unused): then only spec.removed tells.
func hasNamed(r *v1alpha1.ReplicatedVolume, name string, v *v1alpha1.Volume) bool {
	if v != nil && cluster.OfAgent(v) {
		return slices.ContainsFunc(r.Spec.Removed, func(l v1alpha1.RemovedLeg) bool { return l.Name == name })
	}
	return cluster.IsNumbered(r, name)
}

// staleStatus reports whether the status has legs that are not in spec.legs any more, beside a current one that is.
func staleStatus(r *v1alpha1.ReplicatedVolume) bool {
	left := listedLegs(r)
	if len(left) == len(r.Status.Legs) {
		return false
	}
	return slices.ContainsFunc(left, func(l v1alpha1.Leg) bool { return l.Current })
}

// listedLegs returns the legs of the status that are in spec.legs.
func listedLegs(r *v1alpha1.ReplicatedVolume) (left []v1alpha1.Leg) {
	for _, l := range r.Status.Legs {
		if slices.Contains(r.Spec.Legs, l.Name) {
			left = append(left, l)
		}
	}
	return left
}
