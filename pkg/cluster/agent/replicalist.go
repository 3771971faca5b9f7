package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// An object that was restored has a list of current legs of before. It may name a leg that has left since, and so lacks what was written. So each list has a number (status.lists), and the records of the legs that are on it know it:
// first that it is due, so that none of them is taken for an older copy once it is written, and then that it was, before anything is written that only they have. A record that knows of a later list than the object tells that the
// object is of before. How many legs a list has is beside its number: all of them together have everything, as none can go on without another one that knows the next number. A list that is due says of a leg only that the one before
// was written, and takes nothing of what is known of that: it may never be written, and another one have its number.

// errLaterList: the record of a leg knows that number already.
var errLaterList = errors.New("it knows of a later list")

// untoldError is that of a leg whose record could not be written.
type untoldError struct {
	leg string
	error
}

func (e untoldError) Unwrap() error { return e.error }

// announce has the records of the legs that are to be on the next list say that it is due, and returns its number. more: some are not on this one.
func (l *ReplicaLegs) announce(ctx context.Context, v *v1alpha1.ReplicatedVolume, names []string, more bool) (number int64, err error) {
	number = v.Status.Lists + 1
	for i := 0; i < len(names); i++ {
		var knows int64
		err := l.noteList(ctx, v, names[i], func(s *volume.LegState) error {
			if knows = s.Knows(); knows >= number {
				return errLaterList
			}
			s.Due, s.More = number, more
			return nil
		})
		if errors.Is(err, errLaterList) {
			number, i = knows+1, -1
			continue
		}
		if err != nil {
			return 0, err
		}
	}
	return number, nil
}

// tellList has the records of the legs on the list say that it was written.
func (l *ReplicaLegs) tellList(ctx context.Context, v *v1alpha1.ReplicatedVolume) error {
	names := v.Current()
	for _, name := range names {
		if err := l.noteList(ctx, v, name, func(s *volume.LegState) error {
			if s.List <= v.Status.Lists {
				s.List, s.Listed = v.Status.Lists, len(names)
			}
			if s.Due <= s.List {
				s.Due, s.More = 0, false
			}
			return nil
		}); err != nil {
			return err
		}
	}
	return nil
}

// learns has the record of a leg that is about to be in a mirror, and of those that are, know of the same last list. An object that was put back meanwhile may name it already, so that no list is written of which it would hear; and should the others fail, it alone
// says which number the next one has.
func (t *tender) learns(ctx context.Context, v *v1alpha1.ReplicatedVolume, in []string, name string) error {
	var knows int64
	for _, other := range in {
		id, err := t.legID(ctx, v, other)
		if err != nil {
			return err
		}
		leg, err := t.volumes.Leg(ctx, id)
		if err != nil {
			return fmt.Errorf("find which list of current legs of the replicated volume %s leg %s knows of: %w", v.Name, other, err)
		}
		knows = max(knows, leg.Knows())
	}
	return t.noteList(ctx, v, name, func(s *volume.LegState) error {
		if s.Knows() < knows {
			s.Due, s.More = knows+1, true
		}
		return nil
	})
}

// tellAll is tellList of a list that not all were told of.
func (t *tender) tellAll(ctx context.Context, v *v1alpha1.ReplicatedVolume) error {
	if t.lists == v.Status.Lists {
		return nil
	}
	if err := t.tellList(ctx, v); err != nil {
		return err
	}
	t.lists, t.listed = v.Status.Lists, v.Current()
	return nil
}

// untold notes since when the record of a leg that stays cannot be written, which holds what is written to the others too: see findUntold.
func (t *tender) untold(err error) error {
	var of untoldError
	if errors.As(err, &of) {
		if k := t.of(of.leg); k.untold.IsZero() {
			k.untold = time.Now()
		}
	}
	return err
}

// findUntold finds the legs that are to leave with those that fail, as their own records cannot be written for too long: they would not know that these have left. One that knows stays at the least. Those that are off the list leave in any case.
func (t *tender) findUntold(now *view) {
	var late []string
	stays := false
	for _, name := range now.in() {
		since := t.of(name).untold
		leg := now.v.Leg(name)
		current := leg != nil && leg.Current
		switch {
		case name == "" || now.failing[name] != "":
		case !since.IsZero() && time.Since(since) > legSilence*t.options.CarryEvery:
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

// allTold forgets what was noted of records that could not be written.
func (t *tender) allTold() {
	for _, k := range t.joins {
		k.untold = time.Time{}
	}
}

// putRight writes the last list anew into an object of before it, which was restored while the volume is used: without those legs that have failed meanwhile.
func (t *tender) putRight(ctx context.Context, now *view) error {
	v, err := t.replicatedNow(ctx, t.ref.Key)
	if err != nil {
		return err
	}
	if v.ResourceVersion != now.v.ResourceVersion {
		return fmt.Errorf("%w: the watch is behind the object of the replicated volume %s", errdefs.ErrBusy, v.Name)
	}
	names := slices.DeleteFunc(slices.Clone(t.listed), func(name string) bool { return now.failing[name] != "" || !slices.Contains(now.in(), name) })
	if len(names) == 0 {
		return fmt.Errorf("%w: the object of the replicated volume %s was put back to what it was before, and no leg takes what is written: %s", errdefs.ErrUnavailable, v.Name, reasons(now.failing))
	}
	klog.FromContext(ctx).Info("The object of a replicated volume was put back to what it was before; which legs are current is written anew", "list", v.Status.Lists, "known", t.lists, "current", names)
	return t.writeReplicas(ctx, v, func(s *v1alpha1.ReplicatedVolumeStatus) {
		s.Lists = t.lists
		for i := range s.Legs {
			if s.Legs[i].Current && !slices.Contains(names, s.Legs[i].Name) {
				setWaiting(&s.Legs[i], "the object says so of a moment before it was restored")
			}
		}
		for _, name := range names {
			if v.Leg(name) == nil {
				s.Legs = append(s.Legs, v1alpha1.Leg{Name: name})
			}
			setCurrent(v.Leg(name), t.generation)
		}
	})
}

// noteList changes what the record of a leg says of lists, without its lock: who has that may wait for a write that waits for this.
func (l *ReplicaLegs) noteList(ctx context.Context, v *v1alpha1.ReplicatedVolume, name string, change func(*volume.LegState) error) error {
	ctx, cancel := context.WithTimeout(ctx, legSilence*l.options.CarryEvery)
	defer cancel()
	id, err := l.legID(ctx, v, name)
	if err == nil {
		err = l.volumes.ChangeLeg(ctx, id, func(s *volume.LegState, _ map[string]string) error {
			if g := v.Spec.Claim.Generation; s.Opened != g {
				return fmt.Errorf("%w: leg %s was opened by claim %d, not by %d", errdefs.ErrPrecondition, id, s.Opened, g)
			}
			return change(s)
		})
	}
	if err != nil && !errors.Is(err, errLaterList) {
		err = untoldError{name, fmt.Errorf("write into the record of leg %s of the replicated volume %s which list of current legs it is on: %w", name, v.Name, err)}
	}
	return err
}

// sameList reports whether two states of an object have the same list, by the same claim.
func sameList(a, b *v1alpha1.ReplicatedVolume) bool {
	x, y := a.Current(), b.Current()
	slices.Sort(x)
	slices.Sort(y)
	return a.Status.Opened == b.Status.Opened && slices.Equal(x, y)
}

// upToDate returns those of the legs that were opened of which all have everything that was acknowledged: all, unless one knows that the object is of before a later list. Then it is those of the last list that is known, if all of that are here. ErrPrecondition
// if not: others may have what these lack.
func upToDate(v *v1alpha1.ReplicatedVolume, opened []openedLeg) ([]openedLeg, error) {
	last := slices.MaxFunc(opened, func(a, b openedLeg) int { return int(a.Knows() - b.Knows()) })
	number := last.Knows()
	if number <= v.Status.Lists {
		return opened, nil
	}
	members := slices.DeleteFunc(slices.Clone(opened), func(leg openedLeg) bool { return leg.List != number })
	left := func(leg openedLeg) bool { return leg.More && leg.Due > number } // perhaps, and that only one knows which joined then
	if len(members) == 0 || len(members) != members[0].Listed || slices.ContainsFunc(members, left) {
		return nil, fmt.Errorf("%w: the object of the replicated volume %s was put back to what it was before: it has list %d of the legs that are current, and leg %s knows of list %d; of the legs of that one %d answer, and what they lack another one may have: "+
			"say which legs are current (status.lists, status.legs; docs/runbooks/replicas-missing.md)", errdefs.ErrPrecondition, v.Name, v.Status.Lists, last.name, number, len(members))
	}
	return members, nil
}

// isOlder is ErrDataLoss for a leg that is on the list, and whose own record says that it is a copy of before. One that a person put there (sound by no claim) may have left earlier lists.
func isOlder(v *v1alpha1.ReplicatedVolume, leg openedLeg, id volume.ID) error {
	listed := v.Leg(leg.name)
	switch {
	case leg.Sound < listed.Sound:
		return fmt.Errorf("%w: leg %s is an older copy: its record says that it was current by claim %d, and it is known to have been by claim %d; it is not used, and copied anew", errdefs.ErrDataLoss, id, leg.Sound, listed.Sound)
	case listed.Sound > 0 && max(leg.List, leg.Due) < v.Status.Lists:
		return fmt.Errorf("%w: leg %s is an older copy: its record knows of list %d of the legs that are current, and it is on list %d; it is not used, and copied anew", errdefs.ErrDataLoss, id, leg.List, v.Status.Lists)
	}
	return nil
}
