package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/mirror"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// leaves takes a leg off the list, as if it had failed; the others are told.
func (f *tended) leaves(name string) {
	f.t.Helper()
	now := &mirrorView{v: f.v.DeepCopy(), failing: map[string]string{name: "it failed"}}
	_, err := f.delist(context.Background(), now)
	check.OK(f.t, err)
	check.OK(f.t, second(f.tellList(context.Background(), now.v)))
}

// TestRestoredWithinClaim: an object is put back to a moment of the claim that there is, in which a leg was current that has left since.
func TestRestoredWithinClaim(t *testing.T) {
	f := newObject(t, 2, "b", "a")
	check.OK(t, f.opens(1))
	f.legs["b"].state.Boot, f.legs["a"].state.Boot = "1", "1"
	f.leaves("a") // so that there was a list
	f.v.Status.Legs[1].Current = true
	before := f.v.DeepCopy()
	f.leaves("b")
	f.v = before
	check.OK(t, f.opens(2))
	if now := f.v.Current(); !slices.Equal(now, []string{"a"}) {
		t.Errorf("%v are current, not the one that was alone", now)
	}
	if a := f.legs["a"].state; a.Due > 0 || a.List != f.v.Status.Lists || a.Listed != 1 {
		t.Errorf("of list %d it is told %+v", f.v.Status.Lists, a)
	}
}

// TestRestoredBeforeClaims: an object is put back to before claims by which legs were opened. A leg that says so is not passed over, as if it did not answer: the other one lacks what
// was written by those claims. Once the object's claims are counted from there on, the volume is used with what has everything.
func TestRestoredBeforeClaims(t *testing.T) {
	f := newObject(t, 2, "a", "b")
	before := f.v.DeepCopy()
	f.leaves("a")
	check.OK(t, f.opens(2))
	check.OK(t, f.opens(3))
	f.v = before
	if err := f.opens(2); !errors.Is(err, errdefs.ErrUnavailable) || !slices.Equal(f.v.Current(), []string{"a", "b"}) {
		t.Fatalf("it is used: %v, %v", f.v.Current(), err)
	}
	if waits := f.v.Status.Waits; !strings.Contains(waits, "opened by claim 3") || !strings.Contains(waits, "spec.claims") {
		t.Errorf("it is said that %q", waits)
	}
	check.OK(t, f.opens(4))
	if s := f.v.Status; !slices.Equal(f.v.Current(), []string{"b"}) || s.Waits != "" {
		t.Errorf("%v are current; it is said that %q", f.v.Current(), s.Waits)
	}
}

// TestRestoredBeforeClaimsAndCutShort: as TestRestoredBeforeClaims; the first to open its legs after their claims were counted on gets no further than to their
// records. The next one is not misled by what those say then.
func TestRestoredBeforeClaimsAndCutShort(t *testing.T) {
	f := newObject(t, 2, "a", "b")
	before := f.v.DeepCopy()
	f.leaves("a")
	check.OK(t, f.opens(3))
	f.v = before
	if err := f.opens(2); !errors.Is(err, errdefs.ErrUnavailable) {
		t.Fatalf("it is used: %v, %v", f.v.Current(), err)
	}
	cut := errors.New("cut short")
	f.patches = func() error { return cut }
	for _, generation := range []int64{4, 5} {
		if err := f.opens(generation); !errors.Is(err, cut) || f.state("a").Opened != generation {
			t.Fatalf("%v; the record says %+v", err, f.state("a"))
		}
	}
	f.patches = func() error { return nil }
	check.OK(t, f.opens(6))
	if now := f.v.Current(); !slices.Equal(now, []string{"b"}) {
		t.Errorf("%v are current", now)
	}
}

// TestClaimedAnewMeanwhile: a volume is claimed anew, and its legs are opened for that, between the reads of its object and of its legs. That is no object that was put back.
func TestClaimedAnewMeanwhile(t *testing.T) {
	for _, elsewhere := range []bool{false, true} {
		f := newObject(t, 2, "a", "b")
		f.legs["a"].state.Opened = 3
		f.openings = func() {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.v.Spec.Claim.Generation = 3
			if elsewhere {
				f.v.Spec.Claim.Node = "another"
			}
		}
		err := f.opens(2)
		if !errors.Is(err, errdefs.ErrBusy) || strings.Contains(err.Error(), "put back") || f.v.Status.Waits != "" {
			t.Errorf("%v; it is said that %q", err, f.v.Status.Waits)
		}
	}
}

// TestRestoredAndNotAllThere: of the last list that a leg knows not all legs answer: one that does not may have gone on alone.
func TestRestoredAndNotAllThere(t *testing.T) {
	f := newObject(t, 3, "c", "b", "a")
	before := f.v.DeepCopy()
	f.leaves("c")
	f.v = before
	f.legs["a"].away = true
	if err := f.opens(2); !errors.Is(err, errdefs.ErrPrecondition) || !strings.Contains(err.Error(), "was put back") {
		t.Fatalf("it is used: %v, %v", f.v.Current(), err)
	}
	if w := f.v.Status.Waits; !strings.Contains(w, "was put back") || !slices.Equal(f.v.Current(), []string{"c", "b", "a"}) {
		t.Errorf("%v are current, and it is said that %q", f.v.Current(), w)
	}
	f.legs["a"].away = false
	check.OK(t, f.opens(2))
	if now := f.v.Current(); len(now) != 1 || now[0] == "c" || f.v.Status.Waits != "" {
		t.Errorf("%v are current, %q", now, f.v.Status.Waits)
	}
}

// TestOlderCopyWithinClaim: a leg is put back to a moment of the claim that there is, before a list that it is on.
func TestOlderCopyWithinClaim(t *testing.T) {
	f := newObject(t, 3, "c", "b", "a")
	older := f.legs["b"].state
	f.leaves("c")
	f.legs["b"].state = older
	check.OK(t, f.opens(2))
	if now := f.v.Current(); !slices.Equal(now, []string{"a"}) {
		t.Errorf("%v are current", now)
	}
}

// TestListCutShort: whatever a change of the list gets to, the next one to open the legs finds one that has everything.
func TestListCutShort(t *testing.T) {
	for _, at := range []string{"first record", "second record", "object", "first is told", "second is told"} {
		t.Run(at, func(t *testing.T) {
			f := newObject(t, 3, "c", "b", "a")
			cut, records, tells := errors.New("cut short"), 0, 0
			f.patches = func() error {
				if at == "object" {
					return cut
				}
				return nil
			}
			f.changes = func(_ string, s volume.LegState) error {
				count, what := &records, "record"
				if s.Due == 0 {
					count, what = &tells, "is told"
				}
				*count++
				if at == map[int]string{1: "first ", 2: "second "}[*count]+what {
					return cut
				}
				return nil
			}
			now := &mirrorView{v: f.v.DeepCopy(), failing: map[string]string{"c": "it failed"}}
			_, err := f.delist(context.Background(), now)
			if err == nil {
				_, err = f.tellList(context.Background(), now.v)
			}
			if err == nil {
				t.Fatal("it was not cut short")
			}
			f.changes, f.patches = func(string, volume.LegState) error { return nil }, func() error { return nil }
			f.legs["b"].away, f.legs["c"].away = true, true
			check.OK(t, f.opens(2))
			if now := f.v.Current(); !slices.Equal(now, []string{"a"}) {
				t.Errorf("%v are current", now)
			}
		})
	}
}

// TestToldFirst: while a leg that stays does not know that another one has left the list, what only it has is acknowledged to nobody.
func TestToldFirst(t *testing.T) {
	f := newTended(t, 2, "a", "b")
	known := make(chan struct{})
	f.changes = func(_ string, s volume.LegState) error {
		select {
		case <-known:
			return nil
		default:
		}
		if s.List > 0 && s.Due == 0 {
			return fmt.Errorf("%w: not now", errdefs.ErrUnavailable)
		}
		return nil
	}
	f.flaky("b")
	write := f.write(0)
	f.starts()
	for end := time.Now().Add(tendedPatience); len(f.now().v.Current()) > 1; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("it is on the list still")
		}
	}
	select {
	case err := <-write:
		t.Error("it is acknowledged:", err)
	case <-time.After(500 * time.Millisecond):
	}
	close(known)
	f.ends(write, "the write")
	f.current("a")
}

// TestUntoldLeaves: a leg whose record cannot be written, so that it would not know that another one has left, leaves with that one, if a third one knows. What is written waits for neither. It comes back as each one does.
func TestUntoldLeaves(t *testing.T) {
	f := newTended(t, 3, "a", "b", "c")
	f.changes = func(name string, _ volume.LegState) error {
		if name == "b" {
			return fmt.Errorf("%w: its driver is away", errdefs.ErrUnavailable)
		}
		return nil
	}
	f.flaky("c")
	write := f.write(0)
	f.starts()
	f.ends(write, "what was written to the leg that knows")
	f.current("a")
}

// TestUntoldAlone: the last leg that is current stays, also if its record cannot be written: nobody would know that it is alone, so what is written waits.
func TestUntoldAlone(t *testing.T) {
	f := newTended(t, 3, "a", "b", "c")
	known := make(chan struct{})
	f.changes = func(string, volume.LegState) error {
		select {
		case <-known:
			return nil
		default:
			return fmt.Errorf("%w: their drivers are away", errdefs.ErrUnavailable)
		}
	}
	f.flaky("c")
	write := f.write(0)
	f.starts()
	select {
	case err := <-write:
		t.Error("it is acknowledged:", err)
	case <-time.After(time.Second):
	}
	if now := f.now().v.Current(); len(now) != 3 {
		t.Errorf("%v are current", now)
	}
	close(known)
	f.ends(write, "what was written")
	f.current("a", "b")
}

// TestPowerIsLostAndOtherAway: a leg that may lack what was not flushed is not used alone while one that has it does not answer, however long.
func TestPowerIsLostAndOtherAway(t *testing.T) {
	f := newObject(t, 2, "a", "b")
	f.legs["a"].boot, f.legs["b"].away = "2", true
	for range 2 {
		if err := f.opens(2); !errors.Is(err, errdefs.ErrUnavailable) {
			t.Fatalf("%v are current: %v", f.v.Current(), err)
		}
	}
	if w := f.v.Status.Waits; !strings.Contains(w, "leg b has it") || !slices.Equal(f.v.Current(), []string{"a", "b"}) {
		t.Errorf("%v are current, and it is said that %q", f.v.Current(), w)
	}
	f.legs["b"].away = false
	check.OK(t, f.opens(2))
	if now := f.v.Current(); !slices.Equal(now, []string{"b"}) || f.v.Status.Waits != "" {
		t.Errorf("%v are current, %q", now, f.v.Status.Waits)
	}
}

// TestClosedIfMirrored: closed are the legs that were in the mirror, whatever the object lists.
func TestClosedIfMirrored(t *testing.T) {
	f := newObject(t, 2, "a", "b")
	f.legs["a"].number, f.legs["b"].number = 1, 2
	check.OK(t, f.Close(context.Background(), f.mirrorReconciler.ref, []uint64{1}))
	if a, b := f.legs["a"].state.Closed, f.legs["b"].state.Closed; !a || b {
		t.Errorf("closed: %v, %v", a, b)
	}
}

// TestGivesBackWithLock: the first leg is given back with the lock of its volume.
func TestGivesBackWithLock(t *testing.T) {
	f := newObject(t, 2, "tended", "b")
	closed := 0
	for name, l := range f.legs {
		l.closes = func() {
			closed++
			if unlock, _ := f.options.Locks.TryLock([]string{keylock.Volume(name)}, nil); unlock != nil {
				unlock()
				t.Errorf("%s: nobody has its lock", name)
			}
		}
		f.releaseLeg(context.Background(), f.v, name)
	}
	if closed != 2 {
		t.Errorf("%d were given back", closed)
	}
}

// TestBusyWithin: what somebody finds busy who has the lock of a leg is not tried again by what was known before.
func TestBusyWithin(t *testing.T) {
	f := newObject(t, 2, "a", "b")
	tries := 0
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	err := f.withLeg(ctx, f.v, "b", func(volume.ID) error {
		tries++
		return fmt.Errorf("%w: it was changed", errdefs.ErrBusy)
	})
	if !errors.Is(err, errdefs.ErrBusy) || tries != 1 {
		t.Errorf("%d tries: %v", tries, err)
	}
}

// TestMarksCannotBeRead: a leg whose marks, or those of the others, cannot be read for long gets all.
func TestMarksCannotBeRead(t *testing.T) {
	for _, of := range []string{"a", "b", "a, once the mirror is held"} {
		t.Run(of, func(t *testing.T) {
			f := newTended(t, 1, "a", "b")
			f.legs["a"].state.Common, f.legs["b"].state = "X", volume.LegState{Sound: 1, Opened: 1, Common: "X"}
			f.v.Status.Legs = append(f.v.Status.Legs, v1alpha1.Leg{Name: "b", Sound: 1})
			asked := 0
			f.marks = func(name string) error {
				if name == of[:1] {
					asked++
				}
				if name == of[:1] && (of == name || asked%2 == 0) {
					return fmt.Errorf("%w: the disk fails", errdefs.ErrDataLoss)
				}
				return nil
			}
			for tries := range marksTries {
				if err := f.joinLeg(context.Background(), f.now(), "b", tries); !errors.Is(err, errdefs.ErrDataLoss) {
					t.Fatalf("try %d: %v", tries, err)
				}
			}
			check.OK(t, f.joinLeg(context.Background(), f.now(), "b", marksTries))
			s, err := mirror.Look(f.mirrorReconciler.name)
			check.OK(t, err)
			if s.Joining == nil {
				t.Errorf("it does not join: %+v", s)
			}
		})
	}
}

// TestEndsBeside: a driver that is to end does not wait for what is under way beside the looks, and may wait for a leg that does not answer.
func TestEndsBeside(t *testing.T) {
	f := newTended(t, 2, "a", "b")
	f.mirrorReconciler.background = make(chan func(*mirrorView) error)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		f.run(ctx)
		close(done)
	}()
	time.Sleep(200 * time.Millisecond)
	cancel()
	select {
	case <-done:
	case <-time.After(tendedPatience):
		t.Error("it waits")
	}
}

// announced has the records of legs say that a list of them is due, as far as that of one which cannot be written; the list is not written.
func (f *tended) announced(fails string, names ...string) {
	f.t.Helper()
	f.changes = func(name string, _ volume.LegState) error {
		if name == fails {
			return fmt.Errorf("%w: not now", errdefs.ErrUnavailable)
		}
		return nil
	}
	if _, _, err := f.announceList(context.Background(), f.v, names, lastList{f.v.Status.Lists, nil}, f.v.Status.Lists+1); err == nil {
		f.t.Fatal("all were written")
	}
	f.changes = func(string, volume.LegState) error { return nil }
}

// TestAnnouncedAndNotListed: a leg that was to join, and failed before it was on the list, is none of the last list in an object of before that has it as current.
func TestAnnouncedAndNotListed(t *testing.T) {
	f := newObject(t, 2, "c", "a")
	before := f.v.DeepCopy()
	f.leaves("c")
	f.announced("a", "c", "a")
	f.v = before
	check.OK(t, f.opens(2))
	if now := f.v.Current(); !slices.Equal(now, []string{"a"}) {
		t.Errorf("%v are current, not the one that was alone", now)
	}
}

// TestAnnouncedCountsForNobody: nor does it stand for one of that list that does not answer, and has gone on alone.
func TestAnnouncedCountsForNobody(t *testing.T) {
	f := newObject(t, 3, "c", "b", "a")
	before := f.v.DeepCopy()
	f.leaves("c")
	f.announced("b", "c", "b", "a")
	f.leaves("b")
	f.v = before
	f.legs["a"].away = true
	if err := f.opens(2); !errors.Is(err, errdefs.ErrPrecondition) || !strings.Contains(err.Error(), "was put back") {
		t.Errorf("%v are current, without the one that was alone: %v", f.v.Current(), err)
	}
}

// TestRestoredAndCutShort: that a list is due takes nothing of what is known of the one before: an object of before is put right by the next try.
func TestRestoredAndCutShort(t *testing.T) {
	f := newObject(t, 2, "b", "a")
	before := f.v.DeepCopy()
	f.leaves("b")
	f.v = before
	f.patches = func() error { return errors.New("cut short") }
	if f.opens(2) == nil {
		t.Fatal("it was not cut short")
	}
	f.patches = func() error { return nil }
	check.OK(t, f.opens(2))
	if now := f.v.Current(); !slices.Equal(now, []string{"a"}) {
		t.Errorf("%v are current", now)
	}
}

// TestNamedByPerson: a leg that left, and that a person names as current as the last one is lost, is no older copy.
func TestNamedByPerson(t *testing.T) {
	f := newObject(t, 2, "a", "b")
	f.leaves("b")
	f.legs["a"].away = true
	f.v.Status.Legs = []v1alpha1.Leg{{Name: "b", Current: true}, {Name: "a"}}
	check.OK(t, f.opens(2))
	if b := f.legs["b"].state; !slices.Equal(f.v.Current(), []string{"b"}) || b.List != f.v.Status.Lists || b.Listed != 1 {
		t.Errorf("%v are current; of list %d it is told %+v", f.v.Current(), f.v.Status.Lists, b)
	}
}

// TestRestoredWhileUsed: an object that is put back while the volume is used gets the last list again, with a number that none had: also if it names none of these legs, or the same ones.
func TestRestoredWhileUsed(t *testing.T) {
	for _, was := range [][]string{{"b"}, {"a"}, {"a", "b"}, {}} {
		t.Run(strings.Join(was, ""), func(t *testing.T) {
			f := newObject(t, 2, "a", "b")
			before := f.v.DeepCopy()
			for i := range before.Status.Legs {
				before.Status.Legs[i].Current = slices.Contains(was, before.Status.Legs[i].Name)
			}
			f.leaves("b")
			check.OK(t, f.tellAll(context.Background(), f.v))
			before.ResourceVersion = f.v.ResourceVersion + "0"
			f.v = before
			now := &mirrorView{v: f.v.DeepCopy(), s: mirror.State{Legs: []mirror.Leg{{Device: 1}}}, leg: map[uint64]string{1: "a"}, device: map[string]uint64{"a": 1}, failing: map[string]string{}}
			f.findFailed(now)
			check.OK(t, f.restoreList(context.Background(), now))
			check.OK(t, f.tellAll(context.Background(), f.v))
			if a := f.legs["a"].state; !slices.Equal(f.v.Current(), []string{"a"}) || f.v.Status.Lists != 2 || a.List != 2 || a.Listed != 1 {
				t.Errorf("%v are current, list %d; it is told %+v", f.v.Current(), f.v.Status.Lists, a)
			}
		})
	}
}

// TestRestoredTwice: a list is written, and nobody is told of it; the object is put back to the one before, and another list has its number; then the object is put back to that first one. What only the legs of the other one have is not forgotten.
func TestRestoredTwice(t *testing.T) {
	f := newObject(t, 2, "b", "a")
	before := f.v.DeepCopy()
	now := &mirrorView{v: f.v.DeepCopy(), failing: map[string]string{"b": "it failed"}}
	_, err := f.delist(t.Context(), now)
	check.OK(t, err)
	first := f.v.DeepCopy() // a alone, and it is not told
	f.v = before
	f.legs["a"].away = true
	check.OK(t, f.opens(2)) // b alone
	if f.v.Status.Lists != first.Status.Lists {
		t.Fatalf("list %d, not the number of the first one, %d", f.v.Status.Lists, first.Status.Lists)
	}
	f.legs["a"].away, f.v = false, first
	if err := f.opens(3); !errors.Is(err, errdefs.ErrPrecondition) || !strings.Contains(err.Error(), "none has that leg b knows of") {
		t.Errorf("%v are current: %v", f.v.Current(), err)
	}
}

// TestAnnouncedTwice: the list that follows one that was announced, and perhaps written, has another number.
func TestAnnouncedTwice(t *testing.T) {
	f := newObject(t, 3, "a", "b", "c")
	before := f.v.DeepCopy()
	now := &mirrorView{v: f.v.DeepCopy(), failing: map[string]string{"c": "it failed"}}
	_, err := f.delist(t.Context(), now)
	check.OK(t, err)
	first := f.v.DeepCopy() // a and b
	f.v = before
	f.leaves("a")
	f.v = first
	f.legs["c"].away = true
	if err := f.opens(2); !errors.Is(err, errdefs.ErrPrecondition) {
		t.Errorf("%v are current: %v", f.v.Current(), err)
	}
}

// TestLeavesAndIsUnlisted: a leg of a volume that nobody uses is taken off the list, as that is to have fewer: the list is the one that it was told of all the same.
func TestLeavesAndIsUnlisted(t *testing.T) {
	f := newObject(t, 2, "a", "b")
	f.legs["a"].state.Closed, f.legs["b"].state.Closed = true, true
	check.OK(t, f.opens(2))
	f.v.Leg("b").Current = false
	check.OK(t, f.opens(3))
	if now := f.v.Current(); !slices.Equal(now, []string{"a"}) {
		t.Errorf("%v are current", now)
	}
}

// TestNamedByPersonAndBack: the leg that had the last list, and was given up by a person, answers again, while nobody uses the volume.
func TestNamedByPersonAndBack(t *testing.T) {
	f := newObject(t, 2, "a", "b")
	f.leaves("b")
	check.OK(t, f.opens(2))
	check.OK(t, f.opens(3))
	f.legs["a"].away = true
	f.v.Status.Legs, f.v.Status.Lists = []v1alpha1.Leg{{Name: "b", Current: true}, {Name: "a"}}, 1
	check.OK(t, f.opens(4))
	f.legs["a"].away = false
	check.OK(t, f.opens(5))
	if now := f.v.Current(); !slices.Equal(now, []string{"b"}) {
		t.Errorf("%v are current", now)
	}
}

// TestNamedWhileUsed: a person names a leg alone that is not written to, while the volume is used; also if the driver starts anew then. What the mirror has goes on, and is what the object lists.
func TestNamedWhileUsed(t *testing.T) {
	for _, anew := range []bool{false, true} {
		t.Run(fmt.Sprint("driver anew ", anew), func(t *testing.T) {
			f := newTended(t, 2, "a", "b")
			f.flaky("b")
			write := f.write(0)
			f.leaves("b")
			check.OK(t, mirror.Leave(t.Context(), f.mirrorReconciler.name, f.legs["b"].number))
			f.ends(write, "the write")
			if !anew {
				check.OK(t, f.tellAll(t.Context(), f.v))
			}
			f.mu.Lock()
			f.v.Status.Legs = []v1alpha1.Leg{{Name: "a"}, {Name: "b", Current: true}}
			f.v.ResourceVersion += "0"
			f.mu.Unlock()
			f.starts()
			f.current("a")
		})
	}
}

// TestRestoredInMirror is that with a mirror: who looks after it finds it out.
func TestRestoredInMirror(t *testing.T) {
	f := newTended(t, 2, "a", "b")
	before := f.v.DeepCopy()
	before.Status.Legs[0].Current = false // b alone
	f.flaky("b")
	f.legs["b"].away = true // so it does not join meanwhile
	write := f.write(0)
	f.starts()
	f.ends(write, "the write")
	f.current("a")
	for end := time.Now().Add(tendedPatience); f.state("a").List != f.now().v.Status.Lists; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("it is not told")
		}
	}
	time.Sleep(200 * time.Millisecond) // and that is known
	f.mu.Lock()
	before.ResourceVersion = f.v.ResourceVersion + "0"
	f.v = before
	f.mu.Unlock()
	f.current("a")
}

func (f *tended) state(name string) volume.LegState {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.legs[name].state
}

// TestKnowsOfListsBeforeItIsIn: the record of a leg that joins knows of the last list before it is in the mirror: an object that is put back in that moment may name it already, and the others may fail.
func TestKnowsOfListsBeforeItIsIn(t *testing.T) {
	f := newTended(t, 1, "a", "b")
	f.v.Status.Lists = 5
	f.legs["a"].state.List, f.legs["a"].state.Listed = 5, 1
	knew, in := false, false
	f.changes = func(name string, s volume.LegState) error {
		if name == "b" && s.Knows() == 5 && !knew {
			now, err := mirror.Look(f.mirrorReconciler.name)
			knew, in = true, err != nil || len(now.Legs) > 1
		}
		return nil
	}
	f.starts()
	f.current("a", "b")
	f.mu.Lock()
	defer f.mu.Unlock()
	if !knew || in {
		t.Errorf("it was told: %v; when it was in: %v", knew, in)
	}
}

// TestJoinedObjectOfBefore: a leg has joined, and was put on no list, as an object of before names it; the other one, that alone was on the last list, fails. Its number is not that of another list.
func TestJoinedObjectOfBefore(t *testing.T) {
	f := newObject(t, 2, "a", "b")
	before := f.v.DeepCopy()
	f.leaves("b")
	last := f.v.Status.Lists
	f.v = before
	check.OK(t, f.tellLastList(t.Context(), f.v, []string{"a"}, "b"))
	f.leaves("a")
	if now := f.v.Status.Lists; now <= last {
		t.Errorf("list %d, of leg b, was that of leg a: %d", now, last)
	}
}

// restoredUnseen has a volume of which an object of before is believed: a was current alone, then b joined, and was alone; the object is put back, and b does not answer. It is opened by several claims, so that the numbers of lists are no less than those that b knows.
func restoredUnseen(t *testing.T, opens int64) *tended {
	f := newTended(t, 2, "a", "b")
	f.leaves("b")
	before := f.v.DeepCopy()
	check.OK(t, f.tellLastList(t.Context(), f.v, []string{"a"}, "b"))
	check.OK(t, f.writeLists(t.Context(), f.v, nil, func(*v1alpha1.ReplicatedVolumeStatus) { setCurrent(f.v.Leg("b"), 1) }))
	f.leaves("a")
	before.ResourceVersion = f.v.ResourceVersion + "0"
	f.v, f.legs["b"].away = before, true
	for g := range opens {
		check.OK(t, f.opens(2+g))
	}
	if now := f.v.Current(); !slices.Equal(now, []string{"a"}) {
		t.Fatalf("%v are current", now)
	}
	f.legs["b"].away, f.generation = false, 1+opens
	check.OK(t, mirror.Leave(t.Context(), f.mirrorReconciler.name, f.legs["b"].number))
	return f
}

// TestAheadStays: a leg that has what the others lack, as an object of before was believed while it did not answer, is not overwritten when it answers again, until a person says which legs are current.
func TestAheadStays(t *testing.T) {
	for _, opens := range []int64{1, 5} {
		t.Run(fmt.Sprint(opens), func(t *testing.T) {
			f := restoredUnseen(t, opens)
			f.starts()
			f.eventually("told", func(now *mirrorView) bool { return now.v.Leg("b").State == v1alpha1.LegAhead })
			time.Sleep(10 * f.options.LookEvery)
			if now := f.now(); len(now.names()) != 1 || now.s.Joining != nil || now.v.Leg("b").State != v1alpha1.LegAhead || !strings.Contains(now.v.Leg("b").Message, "may have what the others lack") {
				t.Errorf("it is %+v, %+v", now.s, now.v.Leg("b"))
			}
			if b := f.state("b"); b.Opened != 1 || b.Sound != 1 {
				t.Errorf("its record says %+v", b)
			}
			f.mu.Lock()
			f.v.Status.Legs = []v1alpha1.Leg{{Name: "a", Current: true}, {Name: "b"}}
			f.v.ResourceVersion += "0"
			f.mu.Unlock()
			f.current("a", "b")
		})
	}
}

// TestAheadByClaims: a leg that is to join, and was opened by a claim of which the object knows nothing, is Ahead as well, if it was on a later list: it is not replaced.
func TestAheadByClaims(t *testing.T) {
	f := newObject(t, 2, "a", "b")
	f.leaves("b")
	f.legs["b"].state = volume.LegState{Sound: 9, Opened: 9, List: 7, Listed: 1}
	now := &mirrorView{v: f.v.DeepCopy(), s: mirror.State{Legs: []mirror.Leg{{Device: 1}}}, leg: map[uint64]string{1: "a"}}
	check.OK(t, f.endJoin(t.Context(), now, "b", f.joinLeg(t.Context(), now, "b", 0)))
	if leg := f.v.Leg("b"); leg.State != v1alpha1.LegAhead || !strings.Contains(leg.Message, "may have what the others lack") {
		t.Errorf("it is said that %+v", leg)
	}
	if s := f.state("b"); s.Opened != 9 || s.Sound != 9 {
		t.Errorf("its record says %+v", s)
	}
}

// TestBehindJoins: a leg that knows of no list which the object knows nothing of joins, also if the object was put back, and was put right by those that have everything.
func TestBehindJoins(t *testing.T) {
	for _, used := range []bool{false, true} {
		t.Run(fmt.Sprint("put back while it is used: ", used), func(t *testing.T) {
			f := newObject(t, 2, "a", "b")
			check.OK(t, f.opens(1)) // which of them is open nobody knows: b is made equal
			before := f.v.DeepCopy()
			b := f.v.Leg("b")
			if one := f.v.Current()[0]; one != "a" {
				t.Fatal(one, "is current")
			}
			check.OK(t, f.tellLastList(t.Context(), f.v, []string{"a"}, "b"))
			check.OK(t, f.writeLists(t.Context(), f.v, nil, func(*v1alpha1.ReplicatedVolumeStatus) { setCurrent(b, 1) }))
			check.OK(t, second(f.tellList(t.Context(), f.v)))
			f.leaves("b")
			before.ResourceVersion = f.v.ResourceVersion + "0"
			f.v = before
			if used {
				now := &mirrorView{v: f.v.DeepCopy(), s: mirror.State{Legs: []mirror.Leg{{Device: 1}}}, leg: map[uint64]string{1: "a"}, device: map[string]uint64{"a": 1}, failing: map[string]string{}}
				check.OK(t, f.restoreList(t.Context(), now))
			} else {
				check.OK(t, f.opens(2))
			}
			if now := f.v.Current(); !slices.Equal(now, []string{"a"}) {
				t.Fatalf("%v are current", now)
			}
			check.OK(t, isAhead(f.v, openedLeg{name: "b", Leg: volume.Leg{LegState: f.state("b")}}))
		})
	}
}

// TestAskedOnce: a driver that has just started asks the legs once for the last list, to find that the object is of before, and to put it right.
func TestAskedOnce(t *testing.T) {
	f := newObject(t, 2, "a", "b")
	before := f.v.DeepCopy()
	f.leaves("b")
	before.ResourceVersion = f.v.ResourceVersion + "0"
	f.v, f.last, f.legs["a"].asked = before, lastList{}, 0
	now := &mirrorView{v: f.v.DeepCopy(), s: mirror.State{Legs: []mirror.Leg{{Device: 1}}}, leg: map[uint64]string{1: "a"}, device: map[string]uint64{"a": 1}, failing: map[string]string{}}
	if is, err := f.isRestored(t.Context(), now); err != nil || !is {
		t.Fatal("it is not found that the object is of before:", err)
	}
	check.OK(t, f.restoreList(t.Context(), now))
	if n := f.legs["a"].asked; n != 1 || !slices.Equal(f.v.Current(), []string{"a"}) {
		t.Errorf("it was asked %d times, and %v are current", n, f.v.Current())
	}
}

// TestSilentUnlisted: a leg that is not on the list, and answers nothing at all, is waited for only if it may know better than those that are.
func TestSilentUnlisted(t *testing.T) {
	for _, more := range []bool{false, true} {
		t.Run(fmt.Sprint("it may know better: ", more), func(t *testing.T) {
			f := newObject(t, 2, "a", "b")
			f.leaves("b")
			if a := &f.legs["a"].state; more {
				a.Due, a.After = a.List+1, a.List
			} else {
				f.options.LookEvery = 5 * time.Second // which is more than all else takes
			}
			f.legs["b"].silent = true
			began := time.Now()
			check.OK(t, f.opens(2))
			if took := time.Since(began); (took >= askPatience*f.options.LookEvery) != more {
				t.Errorf("it took %v", took)
			}
			if now := f.v.Current(); !slices.Equal(now, []string{"a"}) {
				t.Errorf("%v are current", now)
			}
		})
	}
}

// second is the error of a call that returns something else besides.
func second[T any](_ T, err error) error { return err }
