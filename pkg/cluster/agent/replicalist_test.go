package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/mirror"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// leaves takes a leg off the list, as if it had failed, and tells the others.
func (f *tended) leaves(name string) {
	f.t.Helper()
	now := &mirrorView{v: f.v.DeepCopy(), failing: map[string]string{name: "it failed"}}
	_, err := f.delist(context.Background(), now)
	check.OK(f.t, err)
	check.OK(f.t, second(f.tellList(context.Background(), now.v)))
}

// TestClosed: the object says that its legs were closed once all that are current were, until they are opened again.
func TestClosed(t *testing.T) {
	for _, away := range []bool{false, true} {
		t.Run(fmt.Sprint("one away ", away), func(t *testing.T) {
			f := newObject(t, 2, "a", "b")
			f.legs["a"].number, f.legs["b"].number = 1, 2
			f.changes = func(name string, s volume.LegState) error {
				if away && name == "b" {
					return fmt.Errorf("%w: its node does not answer", errdefs.ErrUnavailable)
				}
				return nil
			}
			want := int64(1)
			if away {
				want = 0
			}
			equal := f.Names(t.Context(), f.ref, []uint64{1, 2})
			f.detached = true
			check.OK(t, f.Close(t.Context(), f.ref, equal))
			if s := f.v.Status; s.Closed != want {
				t.Errorf("it is said that it was closed by claim %d: %+v", s.Closed, s)
			}
			f.changes = func(string, volume.LegState) error { return nil }
			f.note(f.v.Name, func(r *replica) { r.legs = map[string]volume.ID{"a": {Key: "a"}, "b": {Key: "b"}} })
			check.OK(t, f.opens(1))
			if s := f.v.Status; s.Closed != 0 {
				t.Errorf("while it is open it is said that it was closed: %+v", s)
			}
		})
	}
}

// TestClosedTwice: the volume is staged, unstaged, and staged and unstaged once more by the same claim. Then the disk of a leg is put back to the moment
// between the two. It is not taken for equal to the others, which were written to since, though it was closed by the same claim as they.
func TestClosedTwice(t *testing.T) {
	f := newObject(t, 2, "a", "b")
	for i, name := range []string{"a", "b"} {
		f.legs[name].number, f.legs[name].state.Closed = uint64(i+1), true
	}
	var between volume.LegState
	for range 2 {
		between = f.legs["b"].state
		f.note(f.v.Name, func(r *replica) { r.legs = map[string]volume.ID{"a": {Key: "a"}, "b": {Key: "b"}} })
		check.OK(t, f.opens(2))
		equal := f.Names(t.Context(), f.ref, []uint64{1, 2})
		check.OK(t, f.Close(t.Context(), f.ref, equal))
		for name, l := range f.legs {
			if !l.state.Closed {
				t.Fatalf("leg %s was not closed: %+v", name, l.state)
			}
		}
	}
	f.legs["b"].state = between
	f.note(f.v.Name, func(r *replica) { r.legs = map[string]volume.ID{"a": {Key: "a"}, "b": {Key: "b"}} })
	check.OK(t, f.opens(3))
	if now := f.v.Current(); !slices.Equal(now, []string{"a"}) {
		t.Errorf("%v are current, not the one that was written to last", now)
	}
}

// TestClosedLate: a call by which a leg was closed arrives after the leg was opened anew by the same claim. What is known of the leg when its user dies is that
// it was open, so it is not taken for one that lost nothing with its machine's power.
func TestClosedLate(t *testing.T) {
	f := newObject(t, 2, "a", "b")
	f.legs["a"].state.Closed = true
	f.leaves("b")
	if a := f.legs["a"].state; a.Closed || a.List != f.v.Status.Lists {
		t.Errorf("it is used, and its record says %+v", a)
	}
}

// TestRestoredWithinClaim: the object is restored to an earlier moment of the present claim, when a leg was current that has left since. That leg is not
// used.
func TestRestoredWithinClaim(t *testing.T) {
	f := newObject(t, 2, "b", "a")
	check.OK(t, f.opens(1))
	f.legs["b"].state.Boot, f.legs["a"].state.Boot = "1", "1"
	f.leaves("a") // so that there is an earlier list
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

// TestRestoredBeforeClaims: the object is restored to before claims by which a leg was opened. That leg is not passed over as if it did not answer, since
// the other one lacks what was written by those claims: the volume waits. Once the claims of the object are counted from there on, it is used with the leg
// that has everything.
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

// TestRestoredBeforeClaimsAndCutShort: as TestRestoredBeforeClaims, but the first openings after the claims were counted on are cut short when the records
// of the legs are written. The next one is not misled by these records.
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

// TestClaimedAnewMeanwhile: a volume is claimed anew, and its legs are opened for that claim, between the reads of its object and of its legs. That is not
// taken for a restored object.
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

// TestRestoredAndNotAllThere: the object was restored, and a leg of the last list that the others know does not answer. It may have gone on alone, so the
// volume waits for it.
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

// TestOlderCopyWithinClaim: a leg is restored to an earlier moment of the present claim, before the list that it is on. It is not used.
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

// TestListCutShort: at whatever point a change of the list is cut short, the next opening finds a leg that has everything.
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

// TestToldFirst: while a leg that stays does not know that another one has left the list, no write is acknowledged that only it has.
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

// TestUntoldLeaves: a leg whose record cannot be written cannot be told that another one has left. If a third one can, it leaves too, and writes go on.
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

// TestUntoldAlone: if no record of a leg can be written, so that no leg can be told of a new list, the list stays as it is, and writes wait.
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

// TestUntoldOnce: the record of a leg could not be written when another one failed, which then answered again, as after a partition. When a third one fails
// much later, the first one stays.
func TestUntoldOnce(t *testing.T) {
	f := newObject(t, 3, "a", "b", "c")
	s := mirror.State{Size: tendedSize, Legs: []mirror.Leg{{Device: 1}, {Device: 2}, {Device: 3}}}
	for i, name := range f.v.Spec.Legs {
		f.legs[name].number = s.Legs[i].Device
	}
	_ = f.noteUntold(untoldError{"b", errdefs.ErrUnavailable})
	time.Sleep((legSilence + 1) * f.options.LookEvery)
	check.OK(t, f.step(t.Context(), s)) // all answer
	s.Legs[2].Failed = true
	now, err := f.observe(t.Context(), f.v.DeepCopy(), s)
	check.OK(t, err)
	if f.findFailed(now); len(now.failing) != 1 || now.failing["c"] == "" {
		t.Errorf("to leave are %v", now.failing)
	}
}

// TestPowerIsLostAndOtherAway: a leg whose machine lost power may lack what was not flushed. It is not used alone while a leg that has that does not
// answer, however long.
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

// TestPowerIsLostAndOtherIsSlow: the machines of both legs lost power, and one of them does not answer for longer than it is waited for. Then it does, but is
// opened later than the other one. It is waited for, as the other one is not used without it.
func TestPowerIsLostAndOtherIsSlow(t *testing.T) {
	f := newObject(t, 2, "a", "b")
	f.legs["a"].boot, f.legs["b"].boot, f.legs["b"].away = "2", "2", true
	for range 2 {
		if err := f.opens(2); !errors.Is(err, errdefs.ErrUnavailable) {
			t.Fatalf("%v are current: %v", f.v.Current(), err)
		}
	}
	f.legs["b"].away, f.legs["b"].slow = false, 2*f.options.LookEvery
	check.OK(t, f.opens(2))
	if f.v.Status.Waits != "" || len(f.v.Current()) != 1 {
		t.Errorf("%v are current, %q", f.v.Current(), f.v.Status.Waits)
	}
}

// TestOtherIsSlow: a leg was waited for as long as that is done, and a try after that finds it open somewhat later than the other one. Both are used.
func TestOtherIsSlow(t *testing.T) {
	f := newObject(t, 2, "a", "b")
	f.options.LookEvery = 200 * time.Millisecond
	for _, l := range f.legs {
		l.state.Closed = true
	}
	f.legs["a"].away, f.legs["b"].away = true, true
	ctx, cancel := context.WithTimeout(t.Context(), (legPatience+1)*f.options.LookEvery)
	defer cancel()
	f.v.Spec.Claim.Generation = 2
	if _, err := f.Open(ctx, "", f.mirrorReconciler.ref); err == nil {
		t.Fatal("it is open")
	}
	f.legs["a"].away, f.legs["b"].away, f.legs["b"].slow = false, false, f.options.LookEvery/4
	check.OK(t, f.opens(2))
	if now := f.v.Current(); len(now) != 2 {
		t.Errorf("%v are current", now)
	}
}

// TestLastListIsWhole: a list is noted as the last one while another goroutine asks which one that is, as a look beside a step does. It gets one list, not
// the number of one with the legs of another.
func TestLastListIsWhole(t *testing.T) {
	f := newObject(t, 2, "a", "b")
	both := f.v.DeepCopy()
	both.Status.Lists = 2
	one := both.DeepCopy()
	one.Status.Lists, one.Status.Legs = 1, one.Status.Legs[:1]
	check.OK(t, f.tellAll(t.Context(), one))
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	asked := make(chan error, 1)
	go func() {
		for ctx.Err() == nil {
			last, err := f.lastKnownList(ctx, &mirrorView{v: one})
			if err == nil && last.number != int64(len(last.legs)) {
				err = fmt.Errorf("list %d has %d legs", last.number, len(last.legs))
			}
			if err != nil {
				asked <- err
				return
			}
		}
		asked <- nil
	}()
	for ctx.Err() == nil {
		check.OK(t, f.tellAll(context.WithoutCancel(ctx), both))
		check.OK(t, f.tellAll(context.WithoutCancel(ctx), one))
	}
	check.OK(t, <-asked)
}

// TestClosedIfMirrored: the records of those legs say that they were closed which were in the mirror, whatever the object lists.
func TestClosedIfMirrored(t *testing.T) {
	f := newObject(t, 2, "a", "b")
	f.legs["a"].number, f.legs["b"].number = 1, 2
	check.OK(t, f.Close(context.Background(), f.mirrorReconciler.ref, f.Names(t.Context(), f.mirrorReconciler.ref, []uint64{1})))
	if a, b := f.legs["a"].state.Closed, f.legs["b"].state.Closed; !a || b {
		t.Errorf("closed: %v, %v", a, b)
	}
}

// TestClosesWhatWasTakenOut: a leg that is to be one no more is closed with the others, if it has not left the mirror yet. Otherwise the next user would take
// it for the one that has everything.
func TestClosesWhatWasTakenOut(t *testing.T) {
	f := newObject(t, 3, "a", "b", "c")
	f.legs["a"].number, f.legs["b"].number, f.legs["c"].number = 1, 2, 3
	f.v.Spec.Legs = []string{"a", "b"}
	check.OK(t, f.Close(context.Background(), f.mirrorReconciler.ref, f.Names(t.Context(), f.mirrorReconciler.ref, []uint64{1, 2, 3})))
	for name, l := range f.legs {
		if !l.state.Closed {
			t.Errorf("%s is not closed", name)
		}
	}
}

// TestUnstagedMeanwhile: a volume is unstaged while the mirror is looked at, so that the connection to a leg ends. That leg has not failed.
func TestUnstagedMeanwhile(t *testing.T) {
	f := newObject(t, 2, "a", "b")
	now := &mirrorView{v: f.v.DeepCopy(), s: mirror.State{Legs: []mirror.Leg{{Device: 1}, {Device: 2}}}, device: map[string]uint64{"a": 1, "b": 2}, leg: map[uint64]string{1: "a", 2: "b"},
		near: 1, failing: map[string]string{}}
	f.legs["b"].ended = true
	f.findFailed(now)
	err := f.dropFailed(t.Context(), now)
	if current := f.v.Current(); err == nil || len(now.failing) != 1 || len(current) != 2 {
		t.Errorf("%v are current, and %v have failed: %v", current, now.failing, err)
	}
}

// TestOpensWhatStays: the user of a volume has died, and any of its legs has everything. One that is to be a leg no more is not the one that is used.
func TestOpensWhatStays(t *testing.T) {
	f := newObject(t, 3, "c", "a", "b")
	f.v.Spec.Legs = []string{"b", "a"}
	f.legs["b"].boot = "2" // it has lost power
	check.OK(t, f.opens(2))
	if now := f.v.Current(); !slices.Equal(now, []string{"a"}) {
		t.Errorf("%v are current", now)
	}
}

// TestTakenOutAndLast: a leg that is to be one no more is the only current one, or the others fail. It stays until another one has everything: otherwise
// nothing could be written, and none would be made equal to it.
func TestTakenOutAndLast(t *testing.T) {
	for what, c := range map[string]struct {
		mirrored string // the legs in the mirror
		fails    string
		leave    string
	}{
		"it is the only one":              {"c", "", ""},
		"another one is current":          {"ac", "", "c"},
		"the other one fails":             {"ac", "a", "a"},
		"one that stays fails, one stays": {"abc", "a", "ac"},
		"it fails too":                    {"ac", "ac", "ac"},
	} {
		f := newObject(t, 3, "a", "b", "c")
		f.v.Spec.Legs = []string{"a", "b"}
		now := &mirrorView{v: f.v, device: map[string]uint64{}, leg: map[uint64]string{}, failing: map[string]string{}}
		for i, name := range []string{"a", "b", "c"} {
			f.v.Status.Legs[i].Current = strings.Contains(c.mirrored, name)
			if f.v.Status.Legs[i].Current {
				now.s.Legs = append(now.s.Legs, mirror.Leg{Device: uint64(i + 1), Failed: strings.Contains(c.fails, name)})
			}
			now.device[name], now.leg[uint64(i+1)] = uint64(i+1), name
		}
		f.findFailed(now)
		leave := strings.Join(slices.Sorted(maps.Keys(now.failing)), "")
		if leave != c.leave {
			t.Errorf("%s: %q leave, want %q: %v", what, leave, c.leave, now.failing)
		}
	}
}

// TestLegIsNotMade: the object names a leg that has no Volume, as no node can make it. Another leg that fails leaves all the same. Nothing is copied to the one
// that is not there, and nothing is said of it, by which it would pass for one that was. The volume can be unstaged.
func TestLegIsNotMade(t *testing.T) {
	f := newObject(t, 2, "a", "b")
	f.legs["a"].number, f.legs["b"].number = 1, 2
	f.v.Spec.Legs = append(f.v.Spec.Legs, "c")
	s := mirror.State{Size: tendedSize, Legs: []mirror.Leg{{Device: 1}, {Device: 2, Failed: true}}}
	now, err := f.observe(t.Context(), f.v.DeepCopy(), s)
	check.OK(t, err)
	f.findFailed(now)
	if devices, err := f.delist(t.Context(), now); err != nil || !slices.Equal(devices, []uint64{2}) || !slices.Equal(f.v.Current(), []string{"a"}) {
		t.Fatalf("devices %v leave, %v: %v are current", devices, err, f.v.Current())
	}
	s.Legs = s.Legs[:1]
	now, err = f.observe(t.Context(), f.v.DeepCopy(), s)
	check.OK(t, err)
	f.stateOf("b").retryAt = time.Now().Add(time.Hour)
	check.OK(t, f.startJoin(t.Context(), now))
	if l := f.v.Leg("c"); f.background != nil || l != nil {
		t.Errorf("it is to join, and is said to be %+v", l)
	}
	check.OK(t, f.Close(t.Context(), f.mirrorReconciler.ref, f.Names(t.Context(), f.mirrorReconciler.ref, []uint64{1})))
	if !f.legs["a"].state.Closed {
		t.Error("the one that is there is not closed")
	}
}

// TestPoolIsMissing: the pool of this node that has a leg is not there, as its disk is dead, and that leg is not current any more. Another leg that fails leaves
// all the same, and the volume can be unstaged.
func TestPoolIsMissing(t *testing.T) {
	f := newObject(t, 3, "a", "b", "c")
	f.legs["b"].number, f.legs["c"].number, f.poolless = 2, 3, "a"
	f.v.Status.Legs[0] = v1alpha1.Leg{Name: "a", Sound: 1, State: v1alpha1.LegWaiting}
	now, err := f.observe(t.Context(), f.v.DeepCopy(), mirror.State{Size: tendedSize, Legs: []mirror.Leg{{Device: 2}, {Device: 3, Failed: true}}})
	check.OK(t, err)
	f.findFailed(now)
	if devices, err := f.delist(t.Context(), now); err != nil || !slices.Equal(devices, []uint64{3}) {
		t.Errorf("devices %v leave, %v", devices, err)
	}
	check.OK(t, f.Close(t.Context(), f.mirrorReconciler.ref, f.Names(t.Context(), f.mirrorReconciler.ref, []uint64{2})))
	if !f.legs["b"].state.Closed {
		t.Error("the one that is there is not closed")
	}
}

// TestGivesBackWithLock: a leg is given back under its lock, also the first one, whose lock is that of the volume.
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

// TestBusyWithin: an ErrBusy of work under the lock of a leg is returned at once, and not tried again as if the lock were busy.
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

// TestMarksCannotBeRead: if the marks of a leg that joins, or of the others, cannot be read for marksTries tries, the next try copies all.
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

// TestEndsBeside: a driver that is to end does not wait for a task in the background, which may wait for a leg that does not answer.
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

// announced tells legs that a list of them is due, until the one that cannot be told (fails); the list is not written.
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

// TestAnnouncedAndNotListed: a leg that failed before the list with it was written does not count as one of the last list, although the restored object
// has it as current.
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

// TestAnnouncedCountsForNobody: nor does such a leg replace a leg of the last list that does not answer, and has gone on alone.
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

// TestRestoredAndCutShort: a list that is due, and is never written, does not replace what the records know of the list before. So the next opening still
// finds that the object was restored.
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

// TestNamedByPerson: a leg that has left, and is named as current by a person because the last one is lost, does not count as an older copy.
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

// TestRestoredWhileUsed: an object that is restored while the volume is used gets the last list again, with a new number: also if it names none of its
// legs, or the same ones.
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

// TestRestoredTwice: a list is written, and its legs are not told. The object is restored to before that, and another list gets the same number. Then the
// object is restored to the first of these lists. That is noticed, as the legs of the other list may have what the first ones lack.
func TestRestoredTwice(t *testing.T) {
	f := newObject(t, 2, "b", "a")
	before := f.v.DeepCopy()
	now := &mirrorView{v: f.v.DeepCopy(), failing: map[string]string{"b": "it failed"}}
	_, err := f.delist(t.Context(), now)
	check.OK(t, err)
	first := f.v.DeepCopy() // a alone is current, and is not told
	f.v = before
	f.legs["a"].away = true
	check.OK(t, f.opens(2)) // b alone is current
	if f.v.Status.Lists != first.Status.Lists {
		t.Fatalf("list %d, not the number of the first one, %d", f.v.Status.Lists, first.Status.Lists)
	}
	f.legs["a"].away, f.v = false, first
	if err := f.opens(3); !errors.Is(err, errdefs.ErrPrecondition) || !strings.Contains(err.Error(), "none has that leg b knows of") {
		t.Errorf("%v are current: %v", f.v.Current(), err)
	}
}

// TestAnnouncedTwice: after a list that was announced, and perhaps written, the next one gets another number.
func TestAnnouncedTwice(t *testing.T) {
	f := newObject(t, 3, "a", "b", "c")
	before := f.v.DeepCopy()
	now := &mirrorView{v: f.v.DeepCopy(), failing: map[string]string{"c": "it failed"}}
	_, err := f.delist(t.Context(), now)
	check.OK(t, err)
	first := f.v.DeepCopy() // a and b are current
	f.v = before
	f.leaves("a")
	f.v = first
	f.legs["c"].away = true
	if err := f.opens(2); !errors.Is(err, errdefs.ErrPrecondition) {
		t.Errorf("%v are current: %v", f.v.Current(), err)
	}
}

// TestLeavesAndIsUnlisted: the controller takes a leg off the list of a volume that nobody uses, as it is to have fewer. The number of the list stays the
// same, and the other leg can be used.
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

// TestNamedByPersonAndBack: a person has given up the leg that had the last list, and named another one. When the first one answers again, it is not used.
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

// TestNamedWhileUsed: while the volume is used, a person names only a leg as current that is not in the mirror; also if the driver is restarted then. The
// legs of the mirror are used on, and are listed again.
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

// TestRestoredInMirror: as TestRestoredWhileUsed, with a mirror and its reconciler.
func TestRestoredInMirror(t *testing.T) {
	f := newTended(t, 2, "a", "b")
	before := f.v.DeepCopy()
	before.Status.Legs[0].Current = false // b alone is current
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
	time.Sleep(200 * time.Millisecond) // so that the reconciler knows that the leg was told
	f.mu.Lock()
	before.ResourceVersion = f.v.ResourceVersion + "0"
	f.v = before
	f.mu.Unlock()
	f.current("a")
}

// TestUnfit: a leg that cannot join as its disk is not like the others is said to be unfit, so that another node is chosen; after any other failure it waits.
func TestUnfit(t *testing.T) {
	f := newObject(t, 1, "a", "b")
	for want, err := range map[string]error{v1alpha1.LegUnfit: fmt.Errorf("larger sectors: %w", mirror.ErrUnfit), v1alpha1.LegWaiting: errdefs.ErrPrecondition} {
		check.OK(t, f.endJoin(t.Context(), &mirrorView{v: f.v.DeepCopy()}, "b", 0, err))
		if leg := f.v.Leg("b"); leg.State != want || leg.Message == "" || leg.Since == nil {
			t.Errorf("after %v it is %+v", err, leg)
		}
	}
}

// TestQueued: a leg that is not made equal yet, as legs of other volumes are first, is said to wait for its turn: another one would wait, too.
func TestQueued(t *testing.T) {
	f := newObject(t, 1, "a", "b")
	for _, other := range []string{"one", "two"} {
		f.joinSlots.set(blockdev.Ref{Kind: blockdev.Volume, Key: other}, true)
	}
	now := &mirrorView{v: f.v.DeepCopy(), s: mirror.State{Legs: []mirror.Leg{{Device: 1}}}, leg: map[uint64]string{1: "a"}, device: map[string]uint64{"a": 1}, failing: map[string]string{}}
	check.OK(t, f.startJoin(t.Context(), now))
	if leg := f.v.Leg("b"); leg == nil || leg.State != v1alpha1.LegQueued || leg.Message == "" {
		t.Errorf("it is %+v", leg)
	}
}

// TestRestoredUnopened: an object that was restored to the time between the claim and the opening of its legs says again, after one look, which legs are
// current, and that this claim has opened them.
func TestRestoredUnopened(t *testing.T) {
	f := newObject(t, 2, "a", "b")
	f.legs["a"].number, f.legs["b"].number = 1, 2
	before := f.v.DeepCopy()
	before.Status.Opened = 0
	f.leaves("b")
	check.OK(t, f.tellAll(t.Context(), f.v))
	before.ResourceVersion = f.v.ResourceVersion + "0"
	f.v = before
	check.OK(t, f.step(t.Context(), mirror.State{Legs: []mirror.Leg{{Device: 1}}}))
	if now := f.v.Current(); !slices.Equal(now, []string{"a"}) || f.v.Status.Opened != 1 {
		t.Errorf("%v are current, opened by claim %d", now, f.v.Status.Opened)
	}
}

// TestRestoredToBeforeItWasOpened: while a volume is used, its object is restored to the time between its claim and the opening of its legs. Its mirror is
// looked after all the same: the last list is written anew, and a leg that fails later leaves.
func TestRestoredToBeforeItWasOpened(t *testing.T) {
	f := newTended(t, 3, "a", "b", "c")
	before := f.v.DeepCopy()
	before.Status.Opened = 0
	for _, name := range []string{"b", "c"} {
		f.legs[name].away = true // so it does not join meanwhile
	}
	f.flaky("c")
	write := f.write(0)
	f.starts()
	f.ends(write, "the write")
	f.current("a", "b")
	f.eventually("told of its list", func(now *mirrorView) bool { return f.state("a").List == now.v.Status.Lists })
	f.mu.Lock()
	before.ResourceVersion = f.v.ResourceVersion + "0"
	f.v = before
	f.mu.Unlock()
	f.current("a", "b")
	f.flaky("b")
	f.ends(f.write(0), "a write after that")
	f.current("a")
	if now := f.now().v; now.Status.Opened != 1 {
		t.Errorf("it was opened by claim %d", now.Status.Opened)
	}
}

// TestRestoredToBeforeItsClaim: while a volume is used, its object is restored to before the claim. Its users go on. When a leg fails, or falls silent, they get
// errors: nobody could write a list without it, so they would wait for ever, and could not be ended.
func TestRestoredToBeforeItsClaim(t *testing.T) {
	for what, fails := range map[string]func(f *tended){
		"fails":        func(f *tended) { f.flaky("b") },
		"falls silent": func(f *tended) { f.silent("b", 0) },
	} {
		t.Run(what, func(t *testing.T) {
			f := newTended(t, 2, "a", "b")
			f.v.Spec.Claims, f.v.Spec.Claim = 0, nil
			f.v.Status.Opened = 0
			f.starts()
			time.Sleep(20 * f.options.LookEvery)
			f.ends(f.write(0), "what is written while all legs are whole")
			fails(f)
			f.lost(f.write(0))
		})
	}
}

func (f *tended) state(name string) volume.LegState {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.legs[name].state
}

// TestKnowsOfListsBeforeItIsIn: the record of a leg that joins knows of the last list before the leg is in the mirror. A restored object may name that leg
// already, and the other legs may fail.
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

// TestJoinedObjectOfBefore: a leg has joined, and was put on no list, as the object, which was restored, names it already. Then the other leg fails, which
// alone was on the last list. The next list gets a later number than that one.
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

// restoredUnseen returns a volume whose object was restored without anything that shows it: a was current alone, then b joined, and was alone; the object
// is restored to before b, which does not answer. The volume is opened opens times, so that the number of its list may be as high as the one that b knows.
// Now b answers again.
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
	f.legs["b"].away, f.generation, f.madeFor = false, 1+opens, 1+opens
	check.OK(t, mirror.Leave(t.Context(), f.mirrorReconciler.name, f.legs["b"].number))
	return f
}

// TestAheadStays: a restored object was believed while a leg did not answer that has what the others lack. When that leg answers again, it is not
// overwritten, until a person says which legs are current.
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

// TestAheadByClaims: a leg that is to join, and was opened by a claim that the object does not know, is Ahead too, if it was on a later list.
func TestAheadByClaims(t *testing.T) {
	f := newObject(t, 2, "a", "b")
	f.leaves("b")
	f.legs["b"].state = volume.LegState{Sound: 9, Opened: 9, List: 7, Listed: 1}
	now := &mirrorView{v: f.v.DeepCopy(), s: mirror.State{Legs: []mirror.Leg{{Device: 1}}}, leg: map[uint64]string{1: "a"}}
	check.OK(t, f.endJoin(t.Context(), now, "b", 0, f.joinLeg(t.Context(), now, "b", 0)))
	if leg := f.v.Leg("b"); leg.State != v1alpha1.LegAhead || !strings.Contains(leg.Message, "may have what the others lack") {
		t.Errorf("it is said that %+v", leg)
	}
	if s := f.state("b"); s.Opened != 9 || s.Sound != 9 {
		t.Errorf("its record says %+v", s)
	}
}

// TestBehindJoins: a leg may join that was on no later list than the object knows of it, also after the object was restored and corrected by the legs that
// have everything.
func TestBehindJoins(t *testing.T) {
	for _, used := range []bool{false, true} {
		t.Run(fmt.Sprint("put back while it is used: ", used), func(t *testing.T) {
			f := newObject(t, 2, "a", "b")
			check.OK(t, f.opens(1)) // the legs were not closed, so one is chosen, and b has to join
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

// TestStatusLostWhileUsed: the object is deleted, and restored without its status, while the volume is used. Who uses it writes down which legs are current, and that
// the volume is made: so it can be claimed again.
func TestStatusLostWhileUsed(t *testing.T) {
	f := newObject(t, 3, "a", "b", "c")
	f.leaves("c")
	f.v.Status, f.v.ResourceVersion = v1alpha1.ReplicatedVolumeStatus{}, f.v.ResourceVersion+"0"
	now := &mirrorView{v: f.v.DeepCopy(), s: mirror.State{Legs: []mirror.Leg{{Device: 1}, {Device: 2}}}, leg: map[uint64]string{1: "a", 2: "b"}, device: map[string]uint64{"a": 1, "b": 2}, failing: map[string]string{}}
	if is, err := f.isRestored(t.Context(), now); err != nil || !is {
		t.Fatal("it is not found that the object was restored:", err)
	}
	check.OK(t, f.restoreList(t.Context(), now))
	if f.v.Status.Made == nil || f.v.Status.Opened != 1 || !slices.Equal(f.v.Current(), []string{"a", "b"}) {
		t.Errorf("the object says %+v", f.v.Status)
	}
}

// TestAskedOnce: a driver that has just started asks the legs once for the last list, to find that the object was restored, and to correct it.
func TestAskedOnce(t *testing.T) {
	f := newObject(t, 2, "a", "b")
	before := f.v.DeepCopy()
	f.leaves("b")
	before.ResourceVersion = f.v.ResourceVersion + "0"
	f.v, f.legs["a"].asked = before, 0
	f.last.set(lastList{})
	now := &mirrorView{v: f.v.DeepCopy(), s: mirror.State{Legs: []mirror.Leg{{Device: 1}}}, leg: map[uint64]string{1: "a"}, device: map[string]uint64{"a": 1}, failing: map[string]string{}}
	if is, err := f.isRestored(t.Context(), now); err != nil || !is {
		t.Fatal("it is not found that the object is of before:", err)
	}
	check.OK(t, f.restoreList(t.Context(), now))
	if n := f.legs["a"].asked; n != 1 || !slices.Equal(f.v.Current(), []string{"a"}) {
		t.Errorf("it was asked %d times, and %v are current", n, f.v.Current())
	}
}

// TestSilentUnlisted: a leg that is not on the list, and answers nothing at all, is waited for only if it may know of a later list than the listed ones.
func TestSilentUnlisted(t *testing.T) {
	for _, more := range []bool{false, true} {
		t.Run(fmt.Sprint("it may know better: ", more), func(t *testing.T) {
			f := newObject(t, 2, "a", "b")
			f.leaves("b")
			if a := &f.legs["a"].state; more {
				a.Due, a.After = a.List+1, a.List
			} else {
				f.options.LookEvery = 5 * time.Second // more than everything else takes
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

// second returns the second result of a call, its error.
func second[T any](_ T, err error) error { return err }

// TestReportOfHangEnds: once a leg is open, nobody says any more that its disk does not answer, also who was just about to.
func TestReportOfHangEnds(t *testing.T) {
	f := newObject(t, 1, "near")
	f.options.LookEvery = time.Millisecond
	began, ended := make(chan struct{}), false
	stop := f.reportHang(t.Context(), f.v, "near", func(ctx context.Context, _ *v1alpha1.ReplicatedVolume, _ string) {
		close(began)
		<-ctx.Done()
		time.Sleep(20 * time.Millisecond)
		ended = true
	})
	<-began
	stop()
	if !ended {
		t.Fatal("the report goes on after the leg is open")
	}
}
