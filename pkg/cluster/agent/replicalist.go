package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// An object that was restored from a backup has an older list of current legs. It may name a leg that has left since, and lacks what was written. So:
//
//   - Each list has a number (status.lists), and the records of the legs on it know that number. Before the list is written, its legs are told that it is
//     due: so none of them is taken for an older copy once it is written. After that they are told that it was written, before anything is written that only
//     they have.
//   - A record that knows of a later list than the object has shows that the object was restored.
//   - A record has beside the number how many legs are on the list. All of them together have everything, as none goes on without another one that knows the
//     next number.
//   - A list that is due may never be written, or be lost with the object that had it. So it shows only that the list before it was written, and no other
//     list that one of its legs is told of gets its number.

// errLaterList: the record of a leg knows that number, or a later one.
var errLaterList = errors.New("it knows of a later list")

// untoldError says which leg could not be told of a list, as its record could not be written.
type untoldError struct {
	leg string
	error
}

func (e untoldError) Unwrap() error { return e.error }

// lastList is the last known list. The next one is written after it.
type lastList struct {
	number int64
	legs   []string
}

// toldList is the last list that all its legs were told of; zero: not known. A look beside a step uses it while that step changes it, so it is read and
// written whole.
type toldList struct {
	mu   sync.Mutex
	list lastList
}

func (t *toldList) get() lastList {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.list
}

// set notes a list. Its legs must not be changed afterwards.
func (t *toldList) set(list lastList) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.list = list
}

// announceList tells the legs of the next list that it is due. It returns the number of that list, which is number or a later one that none of them knows,
// and the number of the last list that one of them knows.
func (l *ReplicaLegs) announceList(ctx context.Context, v *v1alpha1.ReplicatedVolume, names []string, last lastList, number int64) (_, after int64, _ error) {
	after = last.number
	more := slices.ContainsFunc(names, func(name string) bool { return !slices.Contains(last.legs, name) })
	for i := 0; i < len(names); i++ {
		var knows, due int64
		err := l.noteList(ctx, v, names[i], func(s *volume.LegState) error {
			if knows, due = s.Knows(), s.Due; knows > after || due >= number {
				return errLaterList
			}
			s.Due, s.After, s.More = number, after, more
			return nil
		})
		if errors.Is(err, errLaterList) {
			after, number, i = max(after, knows), max(number, knows+1, due+1), -1
			continue
		}
		if err != nil {
			return 0, 0, err
		}
	}
	return number, after, nil
}

// tellList tells the legs of the list that it was written. due: one of them knows of another list that is due, and may have been written.
func (l *ReplicaLegs) tellList(ctx context.Context, v *v1alpha1.ReplicatedVolume) (due bool, err error) {
	names := v.Current()
	for _, name := range names {
		if err := l.noteList(ctx, v, name, func(s *volume.LegState) error {
			if s.List <= v.Status.Lists {
				s.List, s.Listed = v.Status.Lists, len(names)
			}
			if s.Due <= s.List {
				s.Due, s.After, s.More = 0, 0, false
			}
			due = due || s.Due > 0
			return nil
		}); err != nil {
			return due, err
		}
	}
	return due, nil
}

// tellLastList tells a leg that is about to join of the last list that the legs of the mirror (in) know. A restored object may name that leg already, so that
// no list is written that would tell it. And should the other legs fail, its record alone has the number that the next list comes after.
func (m *mirrorReconciler) tellLastList(ctx context.Context, v *v1alpha1.ReplicatedVolume, in []string, name string) error {
	var knows int64
	for _, other := range in {
		id, err := m.legID(ctx, v, other)
		if err != nil {
			return err
		}
		leg, err := m.volumes.Leg(ctx, id)
		if err != nil {
			return fmt.Errorf("find which list of current legs of the replicated volume %s leg %s knows of: %w", v.Name, other, err)
		}
		knows = max(knows, leg.Knows())
	}
	return m.noteList(ctx, v, name, func(s *volume.LegState) error {
		if s.Knows() < knows {
			s.Due, s.After, s.More = max(s.Due, knows+1), knows, true
		}
		return nil
	})
}

// tellAll is tellList, unless all legs were told. If one of them knows of another list that is due, the list first gets a later number than that: the object
// may have had that list, and may be restored to it.
func (m *mirrorReconciler) tellAll(ctx context.Context, v *v1alpha1.ReplicatedVolume) error {
	if m.last.get().number == v.Status.Lists {
		return nil
	}
	due, err := m.tellList(ctx, v)
	if err == nil && due {
		if err = m.writeLists(ctx, v, &lastList{v.Status.Lists, v.Current()}, func(*v1alpha1.ReplicatedVolumeStatus) {}); err == nil {
			_, err = m.tellList(ctx, v)
		}
	}
	if err != nil {
		return err
	}
	m.last.set(lastList{v.Status.Lists, v.Current()})
	return nil
}

// writeLists is writeReplicasAfter. If the list changed, or may have, the last list is not known until all its legs are told: the object may be restored
// meanwhile.
func (m *mirrorReconciler) writeLists(ctx context.Context, v *v1alpha1.ReplicatedVolume, last *lastList, edit func(*v1alpha1.ReplicatedVolumeStatus)) error {
	number := v.Status.Lists
	err := m.writeReplicasAfter(ctx, v, last, edit)
	if err != nil || v.Status.Lists != number {
		m.last.set(lastList{})
	}
	return err
}

// noteUntold notes, if err is an untoldError, since when the record of that leg cannot be written; it returns err. Writes to the other legs are held
// meanwhile: see findUntold.
func (m *mirrorReconciler) noteUntold(err error) error {
	var of untoldError
	if errors.As(err, &of) {
		if k := m.stateOf(of.leg); k.untoldSince.IsZero() {
			k.untoldSince = time.Now()
		}
	}
	return err
}

// findUntold adds legs to now.failing whose records cannot be written for too long, if others fail: they would not know that these have left. A current leg
// is added only if another current one stays, one that is not on the list in any case.
func (m *mirrorReconciler) findUntold(now *mirrorView) {
	var late []string
	stays := false
	for _, name := range now.names() {
		since := m.stateOf(name).untoldSince
		leg := now.v.Leg(name)
		current := leg != nil && leg.Current
		switch {
		case name == "" || now.failing[name] != "":
		case !since.IsZero() && time.Since(since) > legSilence*m.options.LookEvery:
			if !current {
				now.failing[name] = recordNotWritten
				continue
			}
			late = append(late, name)
		case current:
			stays = true
		}
	}
	if !stays || len(now.failing) == 0 {
		return
	}
	for _, name := range late {
		now.failing[name] = recordNotWritten
	}
}

// recordNotWritten: see findUntold.
const recordNotWritten = "its node does not write down which others have failed"

// clearUntold forgets what noteUntold has noted.
func (m *mirrorReconciler) clearUntold() {
	for _, k := range m.legStates {
		k.untoldSince = time.Time{}
	}
}

// isRestored reports whether the object has an older list than the last known one, another list of the same number, or a list without any leg of the mirror:
// it was restored while the volume is used, or a person has named legs that are not written to. So it was if it does not say that the legs were opened by the
// claim that the mirror was made for, unless the watch is behind (restoreList).
func (m *mirrorReconciler) isRestored(ctx context.Context, now *mirrorView) (bool, error) {
	if now.v.Status.Opened != m.generation {
		return true, nil
	}
	told := m.last.get()
	last, err := m.lastKnownList(ctx, now)
	if err != nil {
		return false, err
	}
	listed, in := now.v.Current(), now.names()
	if told.number > 0 && now.v.Status.Lists == told.number && !sameNames(listed, told.legs) {
		return true, nil
	}
	return now.v.Status.Lists < last.number || !slices.ContainsFunc(listed, func(name string) bool { return slices.Contains(in, name) }), nil
}

// lastKnownList returns the last list. If this process does not know it, the legs of the mirror are asked, once for each mirrorView. ErrUnavailable if none
// answers.
func (m *mirrorReconciler) lastKnownList(ctx context.Context, now *mirrorView) (last lastList, err error) {
	if told := m.last.get(); told.number > 0 {
		return told, nil
	}
	if now.last != nil {
		return *now.last, nil
	}
	names := slices.DeleteFunc(now.names(), func(name string) bool { return name == "" || now.failing[name] != "" })
	known := m.askKnown(ctx, now.v, names)
	if len(known) == 0 && len(names) > 0 {
		return last, fmt.Errorf("%w: find which list of current legs is the last one of the replicated volume %s: no leg that is written to says what it knows: %s", errdefs.ErrUnavailable, now.v.Name, strings.Join(names, ", "))
	}
	for _, leg := range known {
		last.number = max(last.number, leg.Knows())
	}
	for _, leg := range known {
		if leg.List == last.number {
			last.legs = append(last.legs, leg.name)
		}
	}
	now.last = &last
	return last, nil
}

// restoreList writes the last list into an object that was restored to before it while the volume is used, without the legs that have failed meanwhile. If the
// disks of all others hang, those stay on it, as in delist.
func (m *mirrorReconciler) restoreList(ctx context.Context, now *mirrorView) error {
	v, err := m.notBehind(ctx, now.v)
	if err != nil {
		return err
	}
	last, err := m.lastKnownList(ctx, now)
	if err != nil {
		return err
	}
	in := slices.DeleteFunc(slices.Clone(last.legs), func(name string) bool { return !slices.Contains(now.names(), name) })
	names := slices.DeleteFunc(slices.Clone(in), func(name string) bool { return now.failing[name] != "" })
	if len(names) == 0 || last.number == 0 {
		return fmt.Errorf("%w: the object of the replicated volume %s was put back to what it was before, and no leg takes what is written: %s", errdefs.ErrUnavailable, v.Name, reasons(now.failing))
	}
	if m.allStuck(now, names) {
		names = in
	}
	klog.FromContext(ctx).Info("The object of a replicated volume was put back to what it was before; which legs are current is written anew", "list", v.Status.Lists, "known", last.number, "current", names)
	return m.writeLists(ctx, v, &last, func(s *v1alpha1.ReplicatedVolumeStatus) {
		if s.Made == nil { // it was restored without its status
			s.Made = new(metav1.NewMicroTime(v.CreationTimestamp.Time))
		}
		s.Opened, s.Closed, s.Reads, s.Waits = m.generation, 0, now.reads(func(name string) bool { return slices.Contains(names, name) }), ""
		for i := range s.Legs {
			s.Legs[i].List = max(s.Legs[i].List, last.number) // the list that is written now comes after all that any of them knows
			if s.Legs[i].Current && !slices.Contains(names, s.Legs[i].Name) {
				setWaiting(&s.Legs[i], "who uses the volume does not write to it: the object was put back to what it was before, or somebody has changed it")
			}
		}
		for _, name := range names {
			if v.Leg(name) == nil {
				s.Legs = append(s.Legs, v1alpha1.Leg{Name: name})
			}
			setCurrent(v.Leg(name), m.generation)
		}
	})
}

// notBehind reads the object from the API server, and returns it. ErrBusy if watched is another state of it.
func (m *mirrorReconciler) notBehind(ctx context.Context, watched *v1alpha1.ReplicatedVolume) (*v1alpha1.ReplicatedVolume, error) {
	v, err := m.replicatedNow(ctx, m.ref.Key)
	if err == nil && v.ResourceVersion != watched.ResourceVersion {
		err = fmt.Errorf("%w: the watch is behind the object of the replicated volume %s", errdefs.ErrBusy, v.Name)
	}
	return v, err
}

// noteList changes what the record of a leg knows of lists. It takes no lock: the holder of that may wait for a write that waits for this. The leg is in use, so
// it is not closed: a late call of when it was closed by the same claim may have said so. An error is an untoldError.
func (l *ReplicaLegs) noteList(ctx context.Context, v *v1alpha1.ReplicatedVolume, name string, change func(*volume.LegState) error) error {
	ctx, cancel := context.WithTimeout(ctx, legSilence*l.options.LookEvery)
	defer cancel()
	id, err := l.legID(ctx, v, name)
	if err == nil {
		err = l.volumes.ChangeLeg(ctx, id, func(s *volume.LegState, _ map[string]string) error {
			if g := v.Spec.Claim.Generation; s.Opened != g {
				return fmt.Errorf("%w: leg %s was opened by claim %d, not by %d", errdefs.ErrPrecondition, id, s.Opened, g)
			}
			s.Closed = false
			return change(s)
		})
	}
	if err != nil && !errors.Is(err, errLaterList) {
		err = untoldError{name, fmt.Errorf("write into the record of leg %s of the replicated volume %s which list of current legs it is on: %w", name, v.Name, err)}
	}
	return err
}

// sameList reports whether two states of an object have the same current legs, by the same claim.
func sameList(a, b *v1alpha1.ReplicatedVolume) bool {
	return a.Status.Opened == b.Status.Opened && sameNames(a.Current(), b.Current())
}

func sameNames(a, b []string) bool {
	return slices.Equal(slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b)))
}

// isEditedByPerson reports whether a person has put a leg on the list of an object: it is sound by no claim, though there were lists.
func isEditedByPerson(v *v1alpha1.ReplicatedVolume) bool {
	return v.Status.Lists > 0 && slices.ContainsFunc(v.Status.Legs, func(leg v1alpha1.Leg) bool { return leg.Current && leg.Sound == 0 })
}

// personGap is how far the number of the next list is from one that a person has written, so that it is later than all that a leg may know which did not
// answer then.
const personGap = 1000

// findFork returns the name of a leg whose record shows that the object was restored, although the number of its list is no lower: empty if there is none. It
// is so if all legs of the last list that was told are among legs, none of them knows of a later list with one more leg, and the object's list has a leg that
// is not one of them. For each list has a leg of the one before it, and that leg knows of it.
func findFork(v *v1alpha1.ReplicatedVolume, legs []openedLeg) string {
	last := slices.MaxFunc(legs, func(a, b openedLeg) int { return cmp.Compare(a.List, b.List) }).List
	members := slices.DeleteFunc(slices.Clone(legs), func(leg openedLeg) bool { return leg.List != last })
	if last == 0 || last > v.Status.Lists || isEditedByPerson(v) || len(members) != members[0].Listed || slices.ContainsFunc(members, func(leg openedLeg) bool { return leg.More || leg.After > last }) {
		return ""
	}
	for _, name := range v.Current() {
		if !slices.ContainsFunc(members, func(leg openedLeg) bool { return leg.name == name }) {
			return members[0].name
		}
	}
	return ""
}

// isLast reports whether the opened legs show that the object has the last list: they are all legs of it, were told of it, and know of no list that is due.
// For each list has a leg of the one before it that was told that it is due; so no other leg can be on a later one. A list that is due counts also if it adds
// no leg: in a record it may have replaced another one that did.
func isLast(v *v1alpha1.ReplicatedVolume, opened []openedLeg) bool {
	many := len(v.Current())
	return len(opened) == many && !slices.ContainsFunc(opened, func(leg openedLeg) bool {
		return leg.List != v.Status.Lists || leg.Listed != many || leg.Due > 0
	})
}

// upToDate returns those of the opened legs that have everything that was acknowledged. That is all of them, unless one of them or of others (legs that are
// not on the list) knows of a later list than the object. Then it is the legs of the last known list; ErrPrecondition if not all of them are opened, as the
// others may have what these lack.
func upToDate(v *v1alpha1.ReplicatedVolume, opened, others []openedLeg) ([]openedLeg, error) {
	all := slices.Concat(opened, others)
	if by := findFork(v, all); by != "" {
		return nil, fmt.Errorf("%w: the object of the replicated volume %s was put back to what it was before: its list %d of the legs that are current has a leg which none has that leg %s knows of; "+
			"say which legs are current (status.lists, status.legs; docs/runbooks/replicas-missing.md)", errdefs.ErrPrecondition, v.Name, v.Status.Lists, by)
	}
	last := slices.MaxFunc(all, func(a, b openedLeg) int { return cmp.Compare(a.Knows(), b.Knows()) })
	number := last.Knows()
	if number <= v.Status.Lists {
		return opened, nil
	}
	members := slices.DeleteFunc(slices.Clone(opened), func(leg openedLeg) bool { return leg.List != number })
	left := func(leg openedLeg) bool { return leg.More && leg.Due > number } // another leg may have joined by the list that is due, and only that one would know
	if len(members) == 0 || len(members) != members[0].Listed || slices.ContainsFunc(members, left) {
		return nil, fmt.Errorf("%w: the object of the replicated volume %s was put back to what it was before: it has list %d of the legs that are current, and leg %s knows of list %d; of the legs of that one %d are on it, and answer, and what they lack another one may have: "+
			"say which legs are current (status.lists, status.legs; docs/runbooks/replicas-missing.md)", errdefs.ErrPrecondition, v.Name, v.Status.Lists, last.name, number, len(members))
	}
	return members, nil
}

// isOlder returns ErrDataLoss for a leg that is on the list, and whose own record says that it is an older copy. A leg that a person put there (sound by
// no claim) need not have been on the lists before.
func isOlder(v *v1alpha1.ReplicatedVolume, leg openedLeg, id volume.ID) error {
	switch listed := listFor(v, leg.name); {
	case leg.Sound < listed.Sound:
		return fmt.Errorf("%w: leg %s is an older copy: its record says that it was current by claim %d, and it is known to have been by claim %d; it is not used, and copied anew", errdefs.ErrDataLoss, id, leg.Sound, listed.Sound)
	case leg.IsOlder(listed):
		return fmt.Errorf("%w: leg %s is an older copy: its record knows of list %d of the legs that are current, and it is on list %d; it is not used, and copied anew", errdefs.ErrDataLoss, id, leg.List, v.Status.Lists)
	}
	return nil
}

// errAhead: see isAhead.
var errAhead = errors.New("it may have what the others lack")

// hasLists reports whether an object says which list each of its legs was on last.
func hasLists(v *v1alpha1.ReplicatedVolume) bool {
	return slices.ContainsFunc(v.Status.Legs, func(leg v1alpha1.Leg) bool { return leg.List > 0 })
}

// isAhead returns errAhead for a leg that is to join, and whose record says that it was on a later list than the object knows of it: the object was
// restored, and no leg that answered when the volume was opened knew. What only this leg has would be overwritten. It returns nil if a person has said
// since which legs are current: then the object's number is far ahead of the leg's (personGap). An older driver did not write on which list a leg was
// last; it was then on none with the object's number or a later one.
func isAhead(v *v1alpha1.ReplicatedVolume, leg openedLeg) error {
	last := max(0, v.Status.Lists-1)
	if hasLists(v) {
		last = 0
		if known := v.Leg(leg.name); known != nil {
			last = known.List
		}
	}
	if leg.List <= last || isEditedByPerson(v) || leg.List+personGap/2 < v.Status.Lists {
		return nil
	}
	return fmt.Errorf("%w: leg %s was on list %d of the legs that are current, of which the object of the replicated volume %s knows nothing: that was put back to what it was before, and %w; nothing is copied to it until a person says which legs are current "+
		"(status.lists, status.legs; docs/runbooks/replicas-missing.md)", errdefs.ErrPrecondition, leg.name, leg.List, v.Name, errAhead)
}

// writeList writes which legs are current when the volume is opened. ErrBusy if the object was changed meanwhile: perhaps its claim. It is a new list also if
// the same claim has the same legs again and they were closed meanwhile: a leg that is put back to that moment would count as closed, and so as equal to the
// others, after they were written to and closed anew.
func (l *ReplicaLegs) writeList(ctx context.Context, v *v1alpha1.ReplicatedVolume, current, opened []openedLeg) error {
	g := v.Spec.Claim.Generation
	isCurrent := func(name string) bool {
		return slices.ContainsFunc(current, func(c openedLeg) bool { return c.name == name })
	}
	first := slices.IndexFunc(opened, func(o openedLeg) bool { return isCurrent(o.name) }) // as the mirror is made
	var last *lastList
	if slices.ContainsFunc(opened, func(o openedLeg) bool { return o.Closed }) {
		last = &lastList{v.Status.Lists, v.Current()}
	}
	return l.writeReplicasAfter(ctx, v, last, func(s *v1alpha1.ReplicatedVolumeStatus) {
		s.Opened, s.Closed, s.Reads, s.Waits = g, 0, opened[first].name, ""
		for i := range s.Legs {
			leg := &s.Legs[i]
			was := leg.Current
			if leg.Current = isCurrent(leg.Name); leg.Current {
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

// setCurrent makes a leg current: it has every acknowledged write, by a claim.
func setCurrent(leg *v1alpha1.Leg, generation int64) {
	*leg = v1alpha1.Leg{Name: leg.Name, Current: true, Sound: generation, List: leg.List, State: v1alpha1.LegCurrent}
}

// setWaiting makes a leg one that waits, and says why it is not used.
func setWaiting(leg *v1alpha1.Leg, why string) {
	since := leg.Since
	if leg.Current || since == nil {
		now := metav1.Now().Rfc3339Copy() // whole seconds, as objects have them
		since = &now
	}
	*leg = v1alpha1.Leg{Name: leg.Name, Sound: leg.Sound, List: leg.List, State: v1alpha1.LegWaiting, Message: cluster.Limited(why), Since: since}
}

// numberList gives the new list that v has its number, and tells its legs that it is due. before is the object as it was, last the list before.
func (l *ReplicaLegs) numberList(ctx context.Context, before, v *v1alpha1.ReplicatedVolume, last lastList) error {
	number := max(before.Status.Lists, last.number) + 1
	if isEditedByPerson(before) {
		number += personGap
	}
	number, after, err := l.announceList(ctx, v, v.Current(), last, number)
	if err != nil {
		return err
	}
	v.Status.Lists = number
	for i := range v.Status.Legs {
		switch leg := &v.Status.Legs[i]; {
		case leg.Current:
			leg.List = number
		case !hasLists(before) || after > before.Status.Lists: // not known; or the object was restored, and a leg that has everything knows what came later
			leg.List = max(leg.List, after)
		}
	}
	return nil
}

// writeReplicas writes the status of a volume with several legs, if edit changes it. If the current legs change, it is a new list: its legs are told before
// that it is due, and the caller tells them that it was written (tellList) before it relies on that. ErrBusy if the object was changed since v was read.
func (l *ReplicaLegs) writeReplicas(ctx context.Context, v *v1alpha1.ReplicatedVolume, edit func(*v1alpha1.ReplicatedVolumeStatus)) error {
	return l.writeReplicasAfter(ctx, v, nil, edit)
}

// writeReplicasAfter is writeReplicas with a new list in any case, after last; nil: only if the current legs change, after that of v.
func (l *ReplicaLegs) writeReplicasAfter(ctx context.Context, v *v1alpha1.ReplicatedVolume, last *lastList, edit func(*v1alpha1.ReplicatedVolumeStatus)) error {
	before := v.DeepCopy()
	edit(&v.Status)
	cluster.SummarizeLegs(v)
	if last == nil && !sameList(before, v) {
		last = &lastList{before.Status.Lists, before.Current()}
	}
	if last != nil {
		if err := l.numberList(ctx, before, v, *last); err != nil {
			*v = *before
			return err
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
