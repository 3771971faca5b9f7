package replicator

import (
	"context"
	"slices"
	"time"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
)

// mostLegs is how many legs an object can name.
const mostLegs = 6

// state is what can be expected of a leg.
type state int

const (
	good    state = iota // it is current, or will be
	missing              // it is to be made
	bad                  // it is to be replaced: its bytes are lost, its node is gone for good, it has not been current for too long, or it is to move
)

// judgement is what is thought of a leg.
type judgement struct {
	name    string
	state   state
	current bool
	home    bool // it is on the node that uses the volume
	ahead   bool // it may have what the others lack (v1alpha1.LegAhead)
}

// judge looks at the legs that a volume is to have.
func (p *Replicator) judge(ctx context.Context, r *v1alpha1.ReplicatedVolume, legs map[string]*v1alpha1.Volume) (all []judgement, _ error) {
	for _, name := range r.Spec.Legs {
		l, v := r.Leg(name), legs[name]
		one := judgement{name: name, current: l != nil && l.Current, ahead: l != nil && l.State == v1alpha1.LegAhead}
		switch {
		case v == nil && l == nil:
			one.state = missing // nobody has ever used it
		case v == nil || v1alpha1.Going(v) || v1alpha1.IsLost(v):
			one.state = bad
		default:
			if gone, err := p.isGone(ctx, v.Spec.NodeName); err != nil {
				return nil, err
			} else if due, replaced := replaceAt(r, l, v); gone || replaced && !time.Now().Before(due) {
				one.state = bad
			}
			if leaves(r, v, legs) {
				one.state = bad
			}
			if refused := v.Common().Refused(v.Generation); one.state == good && v.Status.Created == nil && (refused != nil || !one.current && v.Spec.Make && l == nil) {
				one.state = missing // it is asked for elsewhere, if its node cannot make it
			}
			one.home = r.Spec.Claim != nil && r.Spec.Claim.Node == v.Spec.NodeName
		}
		all = append(all, one)
	}
	return all, nil
}

// leaves reports whether a leg is to be replaced as it was asked to move, and its volume is used. While nobody uses that, nothing makes another leg equal, and the leg's bytes are moved as those of any volume (package mover). It stays if
// another one is where it is to go, but for one that is there beside as many as there are to be.
func leaves(r *v1alpha1.ReplicatedVolume, v *v1alpha1.Volume, legs map[string]*v1alpha1.Volume) bool {
	return r.Spec.Claim != nil && v.Moving() && (len(r.Spec.Legs) > r.Spec.Replicas || !isAt(r, legs, v.Spec.Move.Node))
}

// isAt reports whether a volume has a leg on a node.
func isAt(r *v1alpha1.ReplicatedVolume, legs map[string]*v1alpha1.Volume, node string) bool {
	return slices.ContainsFunc(r.Spec.Legs, func(name string) bool { return legs[name] != nil && legs[name].Spec.NodeName == node })
}

// insteadOf is the leg whose place one that is not made yet is to take: it leaves, and no other leg is where it is to go; nil if there is none.
func insteadOf(r *v1alpha1.ReplicatedVolume, legs map[string]*v1alpha1.Volume) *v1alpha1.Volume {
	for _, name := range r.Spec.Legs {
		if v := legs[name]; v != nil && leaves(r, v, legs) && !isAt(r, legs, v.Spec.Move.Node) {
			return v
		}
	}
	return nil
}

// replaceAt is when a leg was not current for so long that it is to be replaced; ok is false if it is not. That takes somebody who uses the volume by a mirror: nobody else can make it, or another one, current.
func replaceAt(r *v1alpha1.ReplicatedVolume, l *v1alpha1.Leg, v *v1alpha1.Volume) (_ time.Time, ok bool) {
	c := r.Spec.Claim
	if r.Spec.ReplaceAfter == 0 || c == nil || c.Since == nil || r.Status.Opened != c.Generation || l != nil && (l.Current || l.State == v1alpha1.LegJoining || l.State == v1alpha1.LegAhead) {
		return time.Time{}, false
	}
	since := v.CreationTimestamp.Time
	if l != nil && l.Since != nil {
		since = l.Since.Time
	}
	if c.Since.After(since) {
		since = c.Since.Time
	}
	return since.Add(time.Duration(r.Spec.ReplaceAfter) * time.Second), true
}

// lookIn is after which time a volume is to be looked at, though nothing is told of it: a leg may have been away for too long by then, or its node be gone.
func lookIn(r *v1alpha1.ReplicatedVolume, legs map[string]*v1alpha1.Volume) time.Duration {
	in := lookAgain
	for _, name := range r.Spec.Legs {
		if v := legs[name]; v != nil {
			if due, replaced := replaceAt(r, r.Leg(name), v); replaced && time.Until(due) > 0 {
				in = min(in, time.Until(due))
			}
		}
	}
	return in
}

// lacks reports whether a volume has fewer good legs than it is to have, all of which are there.
func lacks(r *v1alpha1.ReplicatedVolume, all []judgement) bool {
	n := 0
	for _, l := range all {
		if l.state == missing {
			return false // one after the other
		}
		if l.state == good {
			n++
		}
	}
	return n < r.Spec.Replicas
}

// kind is how a leg goes.
type kind int

const (
	stays   kind = iota
	takeOut      // of those that the volume is to have
	unlist       // of the current ones, before that
)

// excess is a leg that a volume which has more than it is to have does without: one that is not current, once there are enough others that are; or one of more current ones than that, which the user of the volume has not on its own
// node. So the last current one is never among them, nor one that may have what the others lack.
func excess(r *v1alpha1.ReplicatedVolume, all []judgement) (name string, _ kind) {
	if len(all) <= r.Spec.Replicas {
		return "", stays
	}
	victim := &all[0]
	for i := range all {
		if l := &all[i]; l.before(victim) {
			victim = l
		}
	}
	others := 0 // that are current, and stay so
	for i := range all {
		if l := &all[i]; l != victim && l.current && l.state == good {
			others++
		}
	}
	switch {
	case others < r.Spec.Replicas, victim.ahead:
		return "", stays
	case victim.current && r.Spec.Claim == nil:
		return victim.name, unlist
	}
	return victim.name, takeOut
}

// before reports whether a leg goes before another one; of two that are alike the later one goes.
func (l *judgement) before(other *judgement) bool {
	switch {
	case l.current != other.current:
		return !l.current
	case (l.state == bad) != (other.state == bad):
		return l.state == bad
	case l.home != other.home:
		return !l.home
	}
	return true
}
