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
	"time"

	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/mirror"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/remotepool"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// While a volume with several legs is used here, somebody has to look after its mirror: take legs that fail off the list, and then out of the mirror; have legs that lack something made equal, and put
// them on the list. What the kernel holds until then, and what it forgets, is told in package mirror. Each look finds anew, in the kernel and in the object, how it stands.

// Mirrors are those of this node: replicapool.Pool.
type Mirrors interface {
	// Mirrors are the volumes that have one, with the generation of the claim by which it was made.
	Mirrors() (map[blockdev.Ref]int64, error)
	Mirror(ref blockdev.Ref) (name string)
}

// How often a leg that could not join, or failed while it did, is tried again, in looks (Options.CarryEvery), and longer each time.
const (
	firstJoin = 2
	lastJoin  = 64
)

// legSilence is for how many looks the node of a leg may not answer before the others go on without it.
const legSilence = 5

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
				t.equal.next = time.Now().Add(commonEvery * l.options.CarryEvery)
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
		if pause(ctx, l.options.CarryEvery) != nil {
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

// tries are those of a leg to join.
type tries struct {
	many   int
	next   time.Time
	silent time.Time // since when its node does not answer; zero: it does
	untold time.Time // since when its record cannot be written, while others are to leave; zero: it can, as far as is known
}

func (t *tender) of(name string) *tries {
	if t.joins[name] == nil {
		t.joins[name] = &tries{}
	}
	return t.joins[name]
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
	defer t.turnEnds(ctx)
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
		waiting, cancel := context.WithTimeout(ctx, t.options.CarryEvery)
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
		case <-time.After(2 * t.options.CarryEvery):
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

// dropSilent takes legs that do not answer for too long off the list, and ends the connections to them, if another one is current. They leave the mirror with the next look.
func (t *tender) dropSilent(ctx context.Context) {
	v, is := t.replicated(t.ref.Key)
	if !is || v.Spec.Claim.Generation != t.generation || v.Status.Opened != t.generation {
		return
	}
	s, err := mirror.Look(t.name)
	if err != nil || len(s.Legs) == 0 {
		return
	}
	now, err := t.view(ctx, v.DeepCopy(), s)
	if err == nil {
		t.findFailed(now)
		if s.Joining != nil && t.unreached(now, now.leg[s.Joining.Device]) != "" {
			t.endSilent(ctx, now.leg[s.Joining.Device])
		}
		before, failure := t.isBefore(ctx, now)
		switch err = failure; {
		case before:
			err = t.putRight(ctx, now)
		case err == nil && len(now.failing) > 0:
			_, err = t.drop(ctx, now)
		}
	}
	if err != nil {
		t.tell(ctx, err)
	}
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
	t.paces(ctx, s)
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

// findFailed finds the legs that the mirror is not to wait for any more, and why: what failed; what does not answer for too long; what is to be a leg no more; and what is listed, and not in the mirror, which nobody may take for current.
func (t *tender) findFailed(now *view) {
	for _, l := range now.legs() {
		name := now.leg[l.Device]
		switch {
		case name == "": // what it was is listed, and not among these
		case l.Failed:
			now.failing[name] = "what was written to it, or read from it, failed"
		case !slices.Contains(now.v.Spec.Legs, name):
			now.failing[name] = "it is to be a leg no more"
		default:
			if why := t.unreached(now, name); why != "" {
				now.failing[name] = why
			}
		}
	}
	for _, name := range now.v.Current() {
		if !slices.Contains(now.in(), name) {
			now.failing[name] = "it is not written to"
		}
	}
	t.findUntold(now)
}

// connectionEnded is unreached of a leg that will not be reached any more by this mirror: its machine has started anew, or somebody else has it.
const connectionEnded = "the connection to its node has ended"

// severed reports whether each leg that is current has failed what was written, or will not be reached any more, and the kernel may hold what is written all the same. One alone has its users get errors.
func (t *tender) severed(now *view) bool {
	return (now.s.Joining != nil || len(now.s.Legs) > 1) && !slices.ContainsFunc(now.legs(), func(l mirror.Leg) bool {
		return !(l.Failed && !l.OnlyReads) && t.unreached(now, now.leg[l.Device]) != connectionEnded
	})
}

// unread reports whether all legs that are current have failed, and took all that was written: nothing is held.
func (n *view) unread() bool {
	return !slices.ContainsFunc(n.legs(), func(l mirror.Leg) bool { return !l.OnlyReads })
}

// sever has all who use a mirror that is severed get errors. The kernel holds what one leg failed for the others, be it the one that joins, or one of which nobody has noticed that it has ended as nothing comes to it; for ever, and so the volume could not be taken down.
// What is held is not tried again: a disk that has failed a flush takes the next one, and has lost what was written.
func (t *tender) sever(ctx context.Context, now *view) error {
	klog.FromContext(ctx).Info("All legs of a replicated volume that are current have failed, or the connections to them have ended; its users get errors until it is staged again", "current", now.in(), "why", reasons(now.failing))
	return t.change(ctx, func() error { return mirror.End(ctx, t.name) })
}

// unreached says why a leg on another node cannot be reached any more, or not for too long; empty: it can.
func (t *tender) unreached(now *view, name string) string {
	k := t.of(name)
	if now.device[name] == now.near {
		return ""
	}
	legs, err := t.connections.Legs(blockdev.Ref{Kind: t.ref.Kind, Key: name})
	used := slices.DeleteFunc(legs, func(c remotepool.Leg) bool { return !c.Used })
	switch {
	case err != nil: // nothing is known
	case len(used) == 0:
		return connectionEnded
	case !slices.ContainsFunc(used, func(c remotepool.Leg) bool { return c.Live }):
		if k.silent.IsZero() {
			k.silent = time.Now()
		}
		if time.Since(k.silent) > legSilence*t.options.CarryEvery {
			return "its node does not answer on the network"
		}
		return ""
	}
	k.silent = time.Time{}
	return ""
}

// leave takes legs off the list, and then out of the mirror, which goes on without them. The last one that is current stays; if it cannot be read, one that joins leaves.
func (t *tender) leave(ctx context.Context, now *view) error {
	if now.s.Joining != nil && now.unread() {
		return t.notJoined(ctx, now, now.s.Joining.Device, "it got not all, as a part of the others cannot be read")
	}
	devices, err := t.drop(ctx, now)
	if err != nil {
		return err
	}
	for name := range now.failing {
		t.again(name)
	}
	if err := t.untold(t.tellAll(ctx, now.v)); err != nil { // else an object of before is taken for this one, and who leaves for current
		return err
	}
	if err := t.change(ctx, func() error { return mirror.Leave(ctx, t.name, devices...) }); err != nil {
		return err
	}
	t.allTold()
	for name := range now.failing {
		t.giveBack(ctx, now.v, name)
	}
	return nil
}

// drop takes legs that have failed off the list, and ends the connections to those that do not answer. It returns the devices that are to leave the mirror.
func (t *tender) drop(ctx context.Context, now *view) (devices []uint64, err error) {
	rest := slices.DeleteFunc(now.v.Current(), func(name string) bool { return now.failing[name] != "" })
	if len(rest) == 0 {
		return nil, fmt.Errorf("%w: no leg of the replicated volume takes what is written: %s", errdefs.ErrUnavailable, reasons(now.failing))
	}
	before := now.v.ResourceVersion
	if err := t.writeLists(ctx, now.v, nil, func(s *v1alpha1.ReplicatedVolumeStatus) {
		for i := range s.Legs {
			if why := now.failing[s.Legs[i].Name]; why != "" {
				setWaiting(&s.Legs[i], why)
			}
		}
		s.Legs = slices.DeleteFunc(s.Legs, func(leg v1alpha1.Leg) bool { return !leg.Current && !slices.Contains(now.v.Spec.Legs, leg.Name) })
	}); err != nil {
		return nil, t.untold(err)
	}
	devices = now.unknown()
	for name, why := range now.failing {
		if now.v.ResourceVersion != before {
			klog.FromContext(ctx).Info("A leg of a replicated volume is not current any more", "leg", name, "why", why, "current", rest)
		}
		if device, is := now.device[name]; is {
			devices = append(devices, device)
		}
		t.endSilent(ctx, name)
	}
	return devices, nil
}

// endSilent ends the connection to a leg that does not answer: what is on its way there ends with errors, which the mirror holds; else it would be waited for.
func (t *tender) endSilent(ctx context.Context, name string) {
	legs, err := t.connections.Legs(blockdev.Ref{Kind: t.ref.Kind, Key: name})
	for _, c := range legs {
		if !c.Live {
			err = errors.Join(err, t.connections.End(ctx, c.NQN))
		}
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "Could not end the connection to a leg that is not current any more", "leg", name)
	}
}

// giveBack lets go of a leg that is not in the mirror any more.
func (t *tender) giveBack(ctx context.Context, v *v1alpha1.ReplicatedVolume, name string) {
	if err := t.meanwhile(ctx, t.dropSilent, func() error {
		ctx, cancel := context.WithTimeout(ctx, legSilence*t.options.CarryEvery) // who has the lock may wait for the mirror
		defer cancel()
		letGo := func() error {
			return t.withLeg(ctx, v, name, func(id volume.ID) error { return t.letGo(ctx, id) })
		}
		if name == t.ref.Key { // it has the lock of the volume
			return t.locked(ctx, name, letGo)
		}
		return letGo()
	}); err != nil && ctx.Err() == nil {
		klog.FromContext(ctx).Info("Could not give back a leg that is not current any more; it is tried again when it is to join", "leg", name, "err", err.Error())
	}
}

// reasons says of legs why they are not current, in their order: what is said again is not told again.
func reasons(failing map[string]string) string {
	var all []string
	for _, name := range slices.Sorted(maps.Keys(failing)) {
		all = append(all, fmt.Sprintf("leg %s: %s", name, failing[name]))
	}
	return strings.Join(all, "; ")
}

// list puts on the list what the mirror waits for, and is not there: somebody has changed the object.
func (t *tender) list(ctx context.Context, now *view) error {
	for _, l := range now.s.Legs {
		name := now.leg[l.Device]
		if leg := now.v.Leg(name); name == "" || leg != nil && leg.Current {
			continue
		}
		if listed, err := t.puts(ctx, now, name, l.Device); err != nil || !listed {
			return err
		}
		if err := t.isCurrent(ctx, now, name); err != nil {
			return err
		}
	}
	return nil
}

// puts puts a leg on the list that the mirror waits for, and that is equal. One that cannot be flushed leaves the mirror instead, and is tried again later.
func (t *tender) puts(ctx context.Context, now *view, name string, device uint64) (listed bool, err error) {
	err = t.meanwhile(ctx, t.dropSilent, func() error {
		return t.complete(ctx, now.v, name, device, func() error {
			return t.writeLists(ctx, now.v, nil, func(s *v1alpha1.ReplicatedVolumeStatus) {
				if now.v.Leg(name) == nil {
					s.Legs = append(s.Legs, v1alpha1.Leg{Name: name})
				}
				setCurrent(now.v.Leg(name), t.generation)
			})
		})
	})
	if !errors.Is(err, errNotFlushed) {
		return err == nil, err
	}
	why := "what it got could not be made durable: " + errdefs.Words(err)
	if slices.Contains(now.v.Current(), name) {
		now.failing[name] = why
		return false, t.leave(ctx, now)
	}
	return false, t.notJoined(ctx, now, device, why)
}

// isCurrent is the end of the way of a leg that has been put on the list.
func (t *tender) isCurrent(ctx context.Context, now *view, name string) error {
	delete(t.joins, name)
	t.equal = equal{written: -1}
	klog.FromContext(ctx).Info("A leg of a replicated volume has everything that was written, and is current", "leg", name)
	return t.tellAll(ctx, now.v) // soon: those who are not told, and leave, know only that it was due
}

// errNotFlushed: the disk of a leg does not make durable what it has taken.
var errNotFlushed = errors.New("it cannot be flushed")

// complete has a leg that is equal be that durably, and its record say so, and what those of the others say of the volume by now. Nobody changes that before it is on the list.
func (t *tender) complete(ctx context.Context, v *v1alpha1.ReplicatedVolume, name string, device uint64, list func() error) error {
	ctx, cancel := context.WithTimeout(ctx, openTime)
	defer cancel()
	if err := mirror.Flush(device); err != nil {
		return errors.Join(errNotFlushed, err)
	}
	return t.withLocks([]string{keylock.Volume(t.ref.Key)}, func() error {
		current, err := t.currentLeg(ctx, v)
		if err != nil {
			return err
		}
		if err := t.withLeg(ctx, v, name, func(id volume.ID) error {
			if err := t.kept(ctx, name, id); err != nil {
				return err
			}
			return t.volumes.ChangeLeg(ctx, id, func(s *volume.LegState, own map[string]string) error {
				if s.Opened != t.generation {
					return fmt.Errorf("%w: leg %s was opened by claim %d, not by %d", errdefs.ErrPrecondition, id, s.Opened, t.generation)
				}
				volume.CarryLabels(current.Data.Labels, own)
				s.Sound = t.generation
				return nil
			})
		}); err != nil {
			return err
		}
		return list()
	})
}

// joining is the step with a leg that the kernel makes equal.
func (t *tender) joining(ctx context.Context, now *view) error {
	name := now.leg[now.s.Joining.Device]
	switch {
	case now.s.Joining.Failed || name == "" || !slices.Contains(now.v.Spec.Legs, name) || t.unreached(now, name) != "":
		t.endSilent(ctx, name)
		return t.notJoined(ctx, now, now.s.Joining.Device, "it failed while it was made equal")
	case now.s.Equal():
		return t.finish(ctx, now, name)
	}
	return t.say(ctx, now.v, name, func(leg *v1alpha1.Leg) {
		if p := leg.Progress; leg.State == v1alpha1.LegJoining && p != nil && p.Total == now.s.Total && abs(now.s.Synced-p.Done) < max(1, p.Total/progressOf) {
			return
		}
		setWaiting(leg, fmt.Sprintf("%s of %s are equal to the others", cluster.Bytes(now.s.Synced), cluster.Bytes(now.s.Total)))
		leg.State, leg.Progress = v1alpha1.LegJoining, &v1alpha1.Progress{Done: now.s.Synced, Total: now.s.Total}
	})
}

// finish puts a leg on the list that has joined, and is equal; then it is made one like the others. Not before: as long as it joins, the kernel acknowledges nothing that it alone has, whichever fails (mirror.Join). A leg is on the list already where a driver has ended between the two.
func (t *tender) finish(ctx context.Context, now *view, name string) error {
	if err := t.learns(ctx, now.v, now.in(), name); err != nil {
		return err
	}
	if s, err := mirror.Look(t.name); err != nil || s.Event != t.seen { // a leg may have failed, which the kernel has forgotten: Watch tells
		return err
	}
	if listed, err := t.puts(ctx, now, name, now.s.Joining.Device); err != nil || !listed {
		return err
	}
	if err := t.change(ctx, func() error { return mirror.Finish(ctx, t.name, now.near) }); err != nil {
		return err
	}
	return t.isCurrent(ctx, now, name)
}

// notJoined takes a leg that is not on the list out of the mirror; it is tried again.
func (t *tender) notJoined(ctx context.Context, now *view, device uint64, why string) error {
	name := now.leg[device]
	if err := t.change(ctx, func() error { return mirror.Leave(ctx, t.name, device) }); err != nil {
		return err
	}
	t.again(name)
	t.giveBack(ctx, now.v, name)
	return t.say(ctx, now.v, name, func(leg *v1alpha1.Leg) { setWaiting(leg, why+", and is tried again") })
}

// say changes what the object says of a leg for people.
func (t *tender) say(ctx context.Context, v *v1alpha1.ReplicatedVolume, name string, edit func(*v1alpha1.Leg)) error {
	return t.writeReplicas(ctx, v, func(s *v1alpha1.ReplicatedVolumeStatus) {
		if v.Leg(name) == nil {
			s.Legs = append(s.Legs, v1alpha1.Leg{Name: name})
		}
		edit(v.Leg(name))
	})
}

// again says when a leg is tried again.
func (t *tender) again(name string) {
	k := t.of(name)
	k.next = time.Now().Add(time.Duration(min(firstJoin<<min(k.many, 16), lastJoin)) * t.options.CarryEvery)
	k.many++
}

// join has a leg that is not in the mirror be made equal, one at a time.
func (t *tender) join(ctx context.Context, now *view) error {
	for _, name := range now.v.Spec.Legs {
		if slices.Contains(now.in(), name) || time.Now().Before(t.of(name).next) {
			continue
		}
		if !t.hasTurn(ctx, now) {
			return t.say(ctx, now.v, name, func(leg *v1alpha1.Leg) {
				setWaiting(leg, "legs of other volumes that this node uses are made equal first")
			})
		}
		tries := t.of(name).many
		t.start(func() func(*view) error {
			err := t.withLocks([]string{keylock.Volume(t.ref.Key)}, func() error { return t.joinLeg(ctx, now, name, tries) })
			return func(now *view) error { return t.joined(ctx, now, name, err) }
		})
		return nil
	}
	return nil
}

// joined is the end of a try of a leg to join.
func (t *tender) joined(ctx context.Context, now *view, name string, err error) error {
	switch {
	case errors.Is(err, errdefs.ErrBusy), errors.Is(err, errOtherMirror):
		t.of(name).next = time.Now().Add(t.options.CarryEvery)
		return nil
	case err == nil:
		return nil
	}
	t.again(name)
	return t.say(ctx, now.v, name, func(leg *v1alpha1.Leg) {
		if setWaiting(leg, errdefs.Words(err)); errors.Is(err, errAhead) {
			leg.State = v1alpha1.LegAhead
		}
	})
}

// joinLeg opens a leg and has the kernel copy to it what it lacks. The caller has the lock of the volume.
func (t *tender) joinLeg(ctx context.Context, now *view, name string, tries int) error {
	ctx, cancel := context.WithTimeout(ctx, openTime)
	defer cancel()
	v, err := t.replicatedNow(ctx, t.ref.Key)
	if err != nil {
		return err
	}
	if v.Spec.Claim.Generation != t.generation || v.Status.Opened != t.generation || !slices.Contains(v.Spec.Legs, name) || v.Leg(name) != nil && v.Leg(name).Current {
		return fmt.Errorf("%w: the object of the replicated volume says something else by now", errdefs.ErrBusy)
	}
	if astray, err := t.isAstray(ctx, v); err != nil || astray {
		return cmp.Or(err, fmt.Errorf("%w: the replicated volume is not over its mirror yet", errdefs.ErrBusy))
	}
	current, err := t.currentLeg(ctx, v)
	if err != nil {
		return err
	}
	return t.withLegs(ctx, v, append(now.in(), name), func(legs map[string]volume.ID) error {
		leg, err := t.attach(ctx, v, legs[name])
		if err != nil {
			return err
		}
		if err = isAhead(v, leg); err == nil {
			err = t.volumes.ChangeLeg(ctx, legs[name], func(s *volume.LegState, own map[string]string) error {
				volume.CarryLabels(current.Data.Labels, own)
				s.Opened, s.Closed, s.Boot = t.generation, false, leg.Now // what it was sound of, it stays
				return nil
			})
		}
		var lacks func(context.Context) ([]dm.Range, error)
		if err == nil {
			lacks, err = t.lacks(ctx, v, leg, legs, now.s.Size, tries)
		}
		if err == nil {
			err = mirror.Join(ctx, t.name, leg.device.Number, func(ctx context.Context) ([]dm.Range, error) {
				if err := t.unchanged(now); err != nil { // the marks are those of a leg that was in it
					return nil, err
				}
				return lacks(ctx)
			})
		}
		if s, failure := mirror.Look(t.name); err == nil && failure == nil {
			klog.FromContext(ctx).Info("A leg of a replicated volume is made equal to the others", "leg", name, "bytes", s.Total-s.Synced)
		}
		return errors.Join(err, leg.device.Close())
	})
}
