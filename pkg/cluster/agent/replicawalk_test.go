package agent

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/mirror"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// walk is a volume to which things happen in a random order. The agent writes the object and the records; the test counts what was written to each leg.
type walk struct {
	*tended
	*rand.Rand
	ctx      context.Context
	names    []string
	in       []string                     // the legs in the mirror
	has      map[string]int               // the number of the last write that a leg has
	acked    int                          // the number of the last acknowledged write
	before   bool                         // the object was restored, and is not corrected yet
	restored bool                         // the object was restored at least once
	objects  []*v1alpha1.ReplicatedVolume // all states that it had
	cut      int                          // after how many more writes of object and records all fail; negative: none fails
	answered bool                         // whether the last write before that is answered
	told     []string                     // what has happened
}

func newWalk(t *testing.T, seed uint64) *walk {
	w := &walk{Rand: rand.New(rand.NewPCG(seed, 0)), ctx: klog.NewContext(context.Background(), logr.Discard()), has: map[string]int{}, cut: -1}
	w.names = []string{"a", "b", "c"}[:2+w.IntN(2)]
	w.tended = newObject(t, len(w.names), w.names...)
	w.options.LookEvery = time.Millisecond
	w.in = slices.Clone(w.names)
	var mu sync.Mutex // on a busy machine a leg that is opened seems to hang, and a goroutine says so in the object
	step := func() error {
		mu.Lock()
		defer mu.Unlock()
		if w.cut == 0 {
			return errors.New("cut short")
		}
		w.cut--
		return nil
	}
	w.patches = func() error {
		mu.Lock()
		w.answered = w.IntN(2) == 0
		mu.Unlock()
		return step()
	}
	w.answers = func() error {
		mu.Lock()
		defer mu.Unlock()
		w.objects = append(w.objects, w.v.DeepCopy())
		if w.cut == 0 && !w.answered {
			return errors.New("the answer is lost")
		}
		return nil
	}
	w.changes = func(string, volume.LegState) error { return step() }
	w.objects = append(w.objects, w.v.DeepCopy())
	return w
}

func (w *walk) says(format string, args ...any) {
	w.told = append(w.told, fmt.Sprintf(format, args...))
}

// view returns what the reconciler of the mirror finds, if some legs fail.
func (w *walk) view(fail ...string) *mirrorView {
	now := &mirrorView{v: w.v.DeepCopy(), leg: map[uint64]string{}, device: map[string]uint64{}, failing: map[string]string{}}
	for i, name := range w.names {
		now.leg[uint64(i+1)], now.device[name] = name, uint64(i+1)
		if slices.Contains(w.in, name) {
			now.s.Legs = append(now.s.Legs, mirror.Leg{Device: uint64(i + 1), Failed: slices.Contains(fail, name)})
		}
	}
	w.findFailed(now)
	return now
}

// looks does what the reconciler does in a step (mirrorReconciler.step), if some legs fail, or none.
func (w *walk) looks(fail ...string) (err error) {
	defer func() { w.says("looks, %v fail: %v", fail, err) }()
	if w.v.Status.Opened != w.generation || w.v.Spec.Claim.Generation != w.generation {
		return nil
	}
	now, lists := w.view(fail...), w.v.Status.Lists
	if before, err := w.isRestored(w.ctx, now); err != nil {
		return err
	} else if before {
		if err := w.restoreList(w.ctx, now); err != nil {
			return err
		}
		w.before = false
		return nil
	}
	if len(now.failing) > 0 {
		if _, err := w.delist(w.ctx, now); err != nil {
			return err
		}
		w.before = w.before && w.v.Status.Lists == lists
		if err := w.tellAll(w.ctx, now.v); err != nil {
			return err
		}
		w.in = slices.DeleteFunc(w.in, func(name string) bool { return now.failing[name] != "" })
		return nil
	}
	if err := w.tellAll(w.ctx, now.v); err != nil {
		return err
	}
	for _, name := range w.in {
		if leg := now.v.Leg(name); leg == nil || !leg.Current {
			return w.writeLists(w.ctx, now.v, nil, func(*v1alpha1.ReplicatedVolumeStatus) { setCurrent(now.v.Leg(name), w.generation) })
		}
	}
	return nil
}

// joins lets a leg join the mirror, to be equal to the others.
func (w *walk) joins(name string) {
	if w.v.Status.Opened != w.generation || w.v.Spec.Claim.Generation != w.generation {
		return
	}
	if err := isAhead(w.v, openedLeg{name: name, Leg: volume.Leg{LegState: w.legs[name].state}}); err != nil && !w.restored {
		w.t.Fatalf("a leg is refused, though the object was never put back: %v, after:\n%s", err, strings.Join(w.told, "\n"))
	}
	w.legs[name].state.Opened, w.legs[name].away = w.generation, false
	err := w.tellLastList(w.ctx, w.v, w.in, name)
	w.says("%s joins: %v", name, err)
	if err != nil {
		return
	}
	w.has[name] = w.acked
	w.in = append(w.in, name)
	w.legs[name].state.Sound = w.generation
}

// restarts opens the volume for a new claim, or again for the same. It returns what is wrong, as that a write was lost, and whether the walk ends.
func (w *walk) restarts() (wrong string, ends bool) {
	if w.IntN(3) > 0 {
		w.generation++
		w.v.Spec.Claim.Generation = w.generation
	}
	w.last.set(lastList{})
	if w.v.Spec.Claim.Generation != w.generation { // the object was restored
		w.v.Spec.Claim.Generation = w.generation
	}
	here, told, untold := 0, false, false // how many listed legs answer; whether a leg that answers (told), or does not (untold), knows that the object was restored
	for _, name := range w.names {
		w.legs[name].away = w.IntN(3) == 0
		s, leg := w.legs[name].state, w.v.Leg(name)
		listed := leg != nil && leg.Current
		knows := s.Knows() > w.v.Status.Lists || !listed && s.List == w.v.Status.Lists && s.List > 0
		if w.legs[name].away {
			untold = untold || knows
			continue
		}
		told = told || knows
		if listed {
			here++
		}
	}
	if w.before && here > 0 && !told && untold {
		return "", true
	}
	_, err := w.Open(w.ctx, "", w.mirrorReconciler.ref)
	w.says("opens by claim %d, %d answer: list %d, %v, %v", w.generation, here, w.v.Status.Lists, w.v.Current(), err)
	switch {
	case err != nil && w.cut < 0 && !w.before && here > 0:
		return "it is not opened, though nothing fails: " + err.Error(), true
	case err != nil:
		w.in = nil
		return "", false
	}
	w.in = w.v.Current()
	for _, name := range w.in {
		if w.has[name] != w.acked {
			return fmt.Sprintf("leg %s has %d of %d", name, w.has[name], w.acked), true
		}
	}
	w.before = false
	return "", false
}

// step takes a random step. It returns what is wrong, and whether the walk ends.
func (w *walk) step() (wrong string, ends bool) {
	w.cut = -1
	if w.IntN(3) == 0 {
		w.cut = w.IntN(6)
	}
	if len(w.in) == 0 {
		return w.restarts()
	}
	name := w.names[w.IntN(len(w.names))]
	switch w.IntN(8) {
	case 0:
		return w.restarts()
	case 1, 2:
		if slices.Contains(w.in, name) {
			_ = w.looks(name)
		} else {
			w.joins(name)
		}
	case 3:
		v := w.objects[w.IntN(len(w.objects))].DeepCopy()
		w.says("the object is put back to list %d, %v", v.Status.Lists, v.Current())
		w.before, w.restored = true, true
		v.ResourceVersion = w.v.ResourceVersion + "0"
		w.v = v
	case 4:
		w.says("the driver starts anew")
		w.last.set(lastList{})
	case 5, 6:
		w.says("a write")
		w.acked++
		for _, name := range w.in {
			w.has[name] = w.acked
		}
	default:
		_ = w.looks()
	}
	return "", false
}

// records notes what the records of the legs say.
func (w *walk) records() {
	for _, name := range w.names {
		s := w.legs[name].state
		w.says("\t%s: claim %d, list %d of %d, due %d (%v), has %d of %d", name, s.Opened, s.List, s.Listed, s.Due, s.More, w.has[name], w.acked)
	}
}

// TestListsByChance: whatever happens to the object and the records of legs, and in whatever order, an opened volume has all acknowledged writes. The
// exception is a restored object when no leg that answers knows of that.
func TestListsByChance(t *testing.T) {
	for seed := range uint64(300) {
		w := newWalk(t, seed)
		for range 30 {
			wrong, ends := w.step()
			if w.records(); wrong != "" {
				t.Fatalf("seed %d: %s, after:\n%s", seed, wrong, strings.Join(w.told, "\n"))
			}
			if ends {
				break
			}
		}
	}
}
