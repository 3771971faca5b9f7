package agent

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/mirror"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// While a volume with several legs is used here, somebody has to look after its mirror: take legs that fail off the list, and then out of the mirror (replicaleave.go); have legs that lack something made equal, and put
// them on the list (replicajoin.go). What the kernel holds until then, and what it forgets, is told in package mirror. Each look finds anew, in the kernel and in the object, how it stands.

// Mirrors are those of this node: replicapool.Pool.
type Mirrors interface {
	// Mirrors are the volumes that have one, with the generation of the claim by which it was made.
	Mirrors() (map[blockdev.Ref]int64, error)
	Mirror(ref blockdev.Ref) (name string)
}

// Replicate looks after the mirrors of this node until ctx ends.
func (l *ReplicaLegs) Replicate(ctx context.Context, mirrors Mirrors) {
	var tended sync.WaitGroup
	defer tended.Wait()
	var mu sync.Mutex
	tending := map[blockdev.Ref]bool{}
	adopter := l.adopter()
	defer adopter.adopts.Wait()
	for {
		found, err := mirrors.Mirrors()
		if err != nil {
			klog.FromContext(ctx).Error(err, "Could not look for the mirrors of replicated volumes; trying again")
		}
		mu.Lock()
		for ref, generation := range found {
			if tending[ref] {
				continue
			}
			tending[ref] = true
			tended.Go(func() {
				t := &tender{ReplicaLegs: l, ref: ref, name: mirrors.Mirror(ref), generation: generation, joins: map[string]*tries{}}
				t.equal.next = time.Now().Add(commonEvery * l.options.LookEvery)
				t.run(klog.NewContext(ctx, klog.FromContext(ctx).WithValues("volume", ref.Key)))
				mu.Lock()
				defer mu.Unlock()
				delete(tending, ref)
			})
		}
		mu.Unlock()
		if err == nil {
			adopter.look(ctx, found)
		}
		if pause(ctx, l.options.LookEvery) != nil {
			return
		}
	}
}

// tender looks after one mirror.
type tender struct {
	*ReplicaLegs
	ref        blockdev.Ref
	name       string
	generation int64 // of the claim by which it was made
	joins      map[string]*tries
	equal      equal
	last       lastList               // of which all its legs were told; none: it is not known
	seen       mirror.Event           // the event of the mirror (mirror.State) up to which all is seen to, or is of a change that was made here
	beside     chan func(*view) error // what is being done beside the looks, at its end; nil: nothing
	told       string                 // why it could not be looked after, last

	follows  map[string]string // the mutable parameters that were set last
	followed bool              // some were, by this process
}

// run looks until the mirror is gone, whenever something happens to it, and each second.
func (t *tender) run(ctx context.Context) {
	defer func() {
		if t.beside != nil {
			untilEnd(ctx, t.beside)
		}
	}()
	if err := mirror.Recover(ctx, t.name); err != nil && !errors.Is(err, errdefs.ErrNotFound) {
		klog.FromContext(ctx).Error(err, "Could not put right what a driver before this one may have left of a mirror")
	}
	defer t.along(ctx, t.scrubs)()
	defer t.releaseSlot(ctx)
	t.isSeen()
	for ctx.Err() == nil {
		s, err := mirror.Look(t.name)
		if errors.Is(err, errdefs.ErrNotFound) {
			return
		}
		if err == nil {
			err = t.look(ctx, s)
		}
		t.tell(ctx, err)
		waiting, cancel := context.WithTimeout(ctx, t.options.LookEvery)
		next := make(chan mirror.State, 1)
		seen := t.seen
		err = t.meanwhile(ctx, t.dropSilent, func() error {
			s, err := mirror.Watch(waiting, t.name, seen)
			next <- s
			return err
		})
		late := waiting.Err() != nil
		cancel()
		switch {
		case err == nil:
			t.seen = (<-next).Event // not that of any look: what the kernel forgets between two is to be told by Watch
		case !late:
			_ = pause(ctx, busyRetry)
		}
	}
}

// isSeen: what has happened to the mirror until now is no news.
func (t *tender) isSeen() {
	if s, err := mirror.Look(t.name); err == nil {
		t.seen = s.Event
	}
}

// meanwhile does something that waits for what is under way in the mirror, and so perhaps for a leg that does not answer; only the end of the connection to that ends it. So that is looked for meanwhile.
// When the driver is to end, it is not waited for any longer: then it is the kernel's, and is finished, or put right (mirror.Recover), by the next one.
func (t *tender) meanwhile(ctx context.Context, look func(context.Context), work func() error) error {
	done := make(chan error, 1)
	go func() { done <- work() }()
	for {
		select {
		case err := <-done:
			return err
		case <-ctx.Done():
			err, ended := untilEnd(ctx, done)
			if !ended {
				err = ctx.Err()
			}
			return err
		case <-time.After(2 * t.options.LookEvery):
			look(ctx)
		}
	}
}

// endPatience is how long what is under way is waited for when the driver is to end.
const endPatience = 2 * time.Second

// untilEnd waits for what is under way; once the context has ended, no longer than endPatience.
func untilEnd[T any](ctx context.Context, done <-chan T) (result T, ended bool) {
	select {
	case result = <-done:
		return result, true
	case <-ctx.Done():
	}
	select {
	case result = <-done:
		return result, true
	case <-time.After(endPatience):
		return result, false
	}
}

// change is meanwhile, of a step that changes the mirror.
func (t *tender) change(ctx context.Context, step func() error) error {
	defer t.isSeen()
	return t.meanwhile(ctx, t.dropSilent, step)
}

// tell logs why a mirror could not be looked after, once.
func (t *tender) tell(ctx context.Context, err error) {
	text := ""
	if err != nil && !errors.Is(err, errdefs.ErrBusy) && !errors.Is(err, errdefs.ErrNotFound) && ctx.Err() == nil {
		text = errdefs.Words(err)
	}
	if text != "" && text != t.told {
		klog.FromContext(ctx).Error(err, "Could not look after the legs of a replicated volume; trying again")
	}
	t.told = text
}

// view is one look at a mirror.
type view struct {
	v       *v1alpha1.ReplicatedVolume
	s       mirror.State
	device  map[string]uint64 // of the legs that are attached here, by their names
	leg     map[uint64]string
	near    uint64 // the device of the leg that this node has; 0: none
	failing map[string]string
	last    *lastList // what recall has found; nil: nothing yet
}

// look takes the next step. Without the claim by which the mirror was made, it ends; as long as that is not known it does nothing: whatever failed is held, and what did not is fenced by the nodes of the legs.
func (t *tender) look(ctx context.Context, s mirror.State) error {
	v, is := t.replicated(t.ref.Key)
	switch {
	case len(s.Legs) == 0:
		return nil // it has ended
	case !is || v.Spec.Claim.Generation != t.generation:
		return t.end(ctx)
	case v.Status.Opened != t.generation:
		return nil
	}
	now, err := t.view(ctx, v.DeepCopy(), s)
	if err != nil {
		return err
	}
	t.findFailed(now)
	if t.severed(now) {
		return t.sever(ctx, now)
	}
	if before, err := t.isBefore(ctx, now); err != nil {
		return err
	} else if before {
		return t.putRight(ctx, now)
	}
	if len(now.failing) > 0 {
		return t.leave(ctx, now)
	}
	if s.Held {
		return nil
	}
	t.throttleJoin(ctx, s)
	t.follow(ctx, now.v)
	if err := t.list(ctx, now); err != nil {
		return err
	}
	if err := t.besides(now); err != nil {
		return err
	}
	if s.Joining != nil {
		return t.joining(ctx, now)
	}
	return t.next(ctx, now)
}

// next begins what is to be done for a mirror in which no leg joins, one thing at a time.
func (t *tender) next(ctx context.Context, now *view) error {
	switch {
	case t.beside != nil:
	case t.last.number != now.v.Status.Lists: // a driver before this one may have written it, and not told them
		t.start(func() func(*view) error {
			due, err := t.tellList(ctx, now.v)
			return func(then *view) error {
				switch {
				case err != nil || then.v.Status.Lists != now.v.Status.Lists:
				case due:
					err = t.tellAll(ctx, then.v)
				default:
					t.last = lastList{now.v.Status.Lists, now.v.Current()}
				}
				return err
			}
		})
	case t.due(now):
		t.start(func() func(*view) error {
			err := t.common(ctx, now)
			return func(*view) error {
				if err != nil {
					t.equal.written = -1 // also if nothing more is written: the legs may have different names for it
				}
				if errors.Is(err, errOtherMirror) {
					t.equal.next, err = time.Time{}, nil
				}
				return err
			}
		})
	default:
		return t.join(ctx, now)
	}
	return nil
}

// start does something beside the looks: it waits for what is under way in the mirror, and so perhaps for a leg that does not answer, which they find out. Its end is told to the next one.
func (t *tender) start(work func() (end func(*view) error)) {
	done := make(chan func(*view) error, 1)
	t.beside = done
	go func() { done <- work() }()
}

// besides is the end of what was done beside the looks, if it has ended.
func (t *tender) besides(now *view) error {
	select {
	case end := <-t.beside:
		t.beside = nil
		return end(now)
	default:
		return nil
	}
}

// end ends a mirror whose claim has ended, as the API server says itself: nothing that its users write will ever be on what is current. They get errors, and the leg of this node is free for who uses the volume now.
func (t *tender) end(ctx context.Context) error {
	asking, cancel := context.WithTimeout(ctx, homeTime)
	defer cancel()
	v := &v1alpha1.ReplicatedVolume{}
	if err := t.kube.Live.Get(asking, client.ObjectKey{Name: t.ref.Key}, v); err != nil {
		return nil // not known now
	}
	if c := v.Spec.Claim; v.Spec.Claims < t.generation || c != nil && c.Node == t.local.Node() && c.Generation == t.generation {
		return nil // the object is one of before the claim, or the watch is
	}
	klog.FromContext(ctx).Info("The claim of a replicated volume has ended, and it is still used here; its users get errors from now on", "claim", t.generation, "claims", v.Spec.Claims)
	endSilent := func(ctx context.Context) {
		for _, name := range v.Spec.Legs {
			t.endSilent(ctx, name)
		}
	}
	endSilent(ctx)
	if err := t.meanwhile(ctx, endSilent, func() error { return mirror.End(ctx, t.name) }); err != nil {
		return err
	}
	for _, name := range v.Spec.Legs {
		t.giveBack(ctx, v, name)
	}
	return nil
}

// view finds which device is which leg.
func (t *tender) view(ctx context.Context, v *v1alpha1.ReplicatedVolume, s mirror.State) (*view, error) {
	now := &view{v: v, s: s, device: map[string]uint64{}, leg: map[uint64]string{}, failing: map[string]string{}}
	names := slices.Clone(v.Spec.Legs)
	for _, leg := range v.Status.Legs {
		if !slices.Contains(names, leg.Name) {
			names = append(names, leg.Name)
		}
	}
	for _, name := range names {
		id, err := t.legID(ctx, v, name)
		if err != nil {
			return nil, err
		}
		devices, err := t.volumes.LegDevices(ctx, id)
		if err != nil {
			return nil, err
		}
		for _, d := range devices {
			if _, is := now.device[name]; !is || now.has(d.Number) {
				now.device[name] = d.Number
			}
			now.leg[d.Number] = name
		}
		if t.isNear(ctx, name) {
			now.near = now.device[name]
		}
	}
	return now, nil
}

// has reports whether a device is one of the mirror's.
func (n *view) has(device uint64) bool {
	return slices.ContainsFunc(n.s.Legs, func(l mirror.Leg) bool { return l.Device == device }) || n.s.Joining != nil && n.s.Joining.Device == device
}

// legs are those that the mirror waits for, and that are, or may be, on the list: also one that joins, once it is equal, and listed.
func (n *view) legs() []mirror.Leg {
	if n.s.Equal() {
		if leg := n.v.Leg(n.leg[n.s.Joining.Device]); leg != nil && leg.Current {
			return append(slices.Clone(n.s.Legs), *n.s.Joining)
		}
	}
	return n.s.Legs
}

// in are the names of the legs that the mirror waits for.
func (n *view) in() (names []string) {
	for _, l := range n.legs() {
		names = append(names, n.leg[l.Device])
	}
	return names
}

// unknown are the devices of the mirror that are no leg's.
func (n *view) unknown() (devices []uint64) {
	for _, l := range n.s.Legs {
		if n.leg[l.Device] == "" {
			devices = append(devices, l.Device)
		}
	}
	return devices
}

// tries is how it goes with a leg of a mirror: how often it has tried to join, and since when its node does not do its part.
type tries struct {
	many   int
	next   time.Time
	silent time.Time // since when its node does not answer; zero: it does
	untold time.Time // since when its record cannot be written, while others are to leave; zero: it can, as far as is known
}

// of returns the tries of a leg.
func (t *tender) of(name string) *tries {
	if t.joins[name] == nil {
		t.joins[name] = &tries{}
	}
	return t.joins[name]
}
