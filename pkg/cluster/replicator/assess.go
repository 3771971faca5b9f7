package replicator

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
)

// mostLegs is how many legs an object can name.
const mostLegs = 6

// state is whether a leg can be kept.
type state int

const (
	good    state = iota // it is current, or will be
	missing              // it is to be made
	moving               // it is to be replaced by a leg on the node that it was asked to move to, and none is there yet
	bad                  // it is to be replaced: its bytes are lost, its node is gone for good, it has not been current for too long, it cannot be made, or its successor is there
)

// assessment is what the replicator knows of a leg.
type assessment struct {
	name    string
	state   state
	current bool
	home    bool // it is on the node that uses the volume
	beside  bool // another leg is where it is, by the label of nodes that the volume names (spec.topologyKey)
	down    bool // its node is not ready, or its agent is not heard: perhaps it never comes back
	ahead   bool // it may have what the others lack (v1alpha1.LegAhead)
	unfit   bool // it cannot be made equal to the others (v1alpha1.LegUnfit), and is to be replaced
	fresh   bool // it was never current, so it has nothing that the others lack
	late    bool // it is to be replaced, as it was not current for too long, though its node works
}

// assess assesses the legs that a volume is to have (spec.legs). due is when some of them are to be replaced (dueLegs).
func (p *Replicator) assess(ctx context.Context, r *v1alpha1.ReplicatedVolume, legs map[string]*v1alpha1.Volume, due map[string]time.Time) (all []assessment, _ error) {
	at, err := p.places(ctx, r, legs)
	if err != nil {
		return nil, err
	}
	for _, name := range r.Spec.Legs {
		l, v := r.Leg(name), legs[name]
		one := assessment{name: name, current: l != nil && l.Current, ahead: l != nil && l.State == v1alpha1.LegAhead, fresh: l == nil || !l.Current && l.Sound == 0 && l.List == 0}
		switch {
		case v == nil && one.fresh && cluster.IsFurther(r, name):
			one.state = missing // it was named, and never in use
		case v == nil || v1alpha1.Going(v) || v1alpha1.IsLost(v):
			one.state = bad
		default:
			if err := p.assessPlace(ctx, r, v, due, &one); err != nil {
				return nil, err
			}
			one.state = max(one.state, stateOfMove(r, v, legs, at))
			if refused := v.Common().Refused(v.Generation); one.state == good && v.Status.Created == nil && (refused != nil || !one.current && v.Spec.Make && l == nil) {
				one.state = missing // if its node cannot make it, another node is asked
			}
			one.down = !p.maker.Works(ctx, v.Spec.NodeName)
			one.home = r.Spec.Claim != nil && r.Spec.Claim.Node == v.Spec.NodeName
		}
		all = append(all, one)
	}
	findBeside(r, legs, at, all)
	return all, nil
}

// places returns where the nodes are that the legs of a volume are on or move to: the value of the label of nodes that the volume names (spec.topologyKey), or the
// name of the node if there is none.
func (p *Replicator) places(ctx context.Context, r *v1alpha1.ReplicatedVolume, legs map[string]*v1alpha1.Volume) (map[string]string, error) {
	at := map[string]string{}
	find := func(name string) error {
		node := kube.Node(name)
		if r.Spec.TopologyKey != "" && at[name] == "" {
			if err := client.IgnoreNotFound(p.kube.Cache.Get(ctx, client.ObjectKey{Name: name}, node)); err != nil {
				return kube.APIError("look at node "+name, err)
			}
		}
		at[name] = cmp.Or(node.Labels[r.Spec.TopologyKey], name)
		return nil
	}
	for _, v := range named(r, legs) {
		if err := find(v.Spec.NodeName); err != nil {
			return nil, err
		}
		if v.Moving() {
			if err := find(v.Spec.Move.Node); err != nil {
				return nil, err
			}
		}
	}
	return at, nil
}

// findBeside sets beside: as a leg was replaced where it was (leavingLegs), and is back before it has gone, or as somebody has changed labels.
func findBeside(r *v1alpha1.ReplicatedVolume, legs map[string]*v1alpha1.Volume, at map[string]string, all []assessment) {
	same := map[string][]int{}
	for i := range all {
		if v := legs[all[i].name]; v != nil && r.Spec.TopologyKey != "" {
			same[at[v.Spec.NodeName]] = append(same[at[v.Spec.NodeName]], i)
		}
	}
	for _, legs := range same {
		for _, i := range legs {
			all[i].beside = len(legs) > 1
		}
	}
}

// assessPlace finds out whether a leg is to be replaced because of where it is: its node is gone for good, it is not current for too long, or it cannot be
// made equal to the others there.
func (p *Replicator) assessPlace(ctx context.Context, r *v1alpha1.ReplicatedVolume, v *v1alpha1.Volume, due map[string]time.Time, one *assessment) error {
	gone, err := cluster.NodeIsGone(ctx, p.kube, v.Spec.NodeName)
	if err != nil {
		return err
	}
	if at, replaced := due[one.name]; gone || replaced && !time.Now().Before(at) {
		one.state, one.late = bad, !gone && p.maker.Works(ctx, v.Spec.NodeName)
	}
	if l := r.Leg(one.name); l != nil && l.State == v1alpha1.LegUnfit && isMirrored(r) {
		one.state, one.unfit = bad, true
	}
	return nil
}

// stateOfMove is moving or bad for a leg that is to be replaced, as it was asked to move and its volume is used. While the volume is not used, nothing can make
// another leg equal, and the bytes of the leg are moved instead (package mover). The leg stays if another leg is on the node where it is to move, unless the
// volume has more legs than it is to have. Of several that are asked to move to one place the first one does: two nodes may be emptied at once.
func stateOfMove(r *v1alpha1.ReplicatedVolume, v *v1alpha1.Volume, legs map[string]*v1alpha1.Volume, at map[string]string) state {
	switch {
	case r.Spec.Claim == nil || !v.Moving() || firstTo(r, legs, at, v.Spec.Move.Node) != v:
		return good
	case !isAt(r, legs, v.Spec.Move.Node):
		return moving
	case len(r.Spec.Legs) > r.Spec.Replicas:
		return bad
	}
	return good
}

// firstTo returns the first leg of a volume that is asked to move to where a node is; nil if there is none.
func firstTo(r *v1alpha1.ReplicatedVolume, legs map[string]*v1alpha1.Volume, at map[string]string, node string) *v1alpha1.Volume {
	for _, v := range named(r, legs) {
		if v.Moving() && at[v.Spec.Move.Node] == at[node] && !v1alpha1.Going(v) {
			return v
		}
	}
	return nil
}

// isAt reports whether a volume has a leg on a node.
func isAt(r *v1alpha1.ReplicatedVolume, legs map[string]*v1alpha1.Volume, node string) bool {
	return slices.ContainsFunc(r.Spec.Legs, func(name string) bool { return legs[name] != nil && legs[name].Spec.NodeName == node })
}

// vacancies returns for what the volume's next new leg may be, in the order in which that is tried: nil is for a leg that it lacks, which may be on any node; a
// Volume, for the leg that takes its place on the node that it is to move to. So what cannot move keeps nothing else from being replaced.
func vacancies(r *v1alpha1.ReplicatedVolume, all []assessment, legs map[string]*v1alpha1.Volume) (next []*v1alpha1.Volume) {
	n := 0
	for _, l := range all {
		switch l.state {
		case moving:
			next = append(next, legs[l.name])
			n++
		case good:
			n++
		case missing, bad:
		}
	}
	if n < r.Spec.Replicas {
		next = slices.Insert(next, 0, nil)
	}
	return next
}

// leavingLegs returns the names of the legs that are to be replaced where they are: where nodes have the same label (spec.topologyKey), another one may be. One
// that moves has its place where it moves to.
func leavingLegs(all []assessment, legs map[string]*v1alpha1.Volume) (names []string) {
	for _, l := range all {
		if v := legs[l.name]; l.state == bad && v != nil && !v.Moving() {
			names = append(names, l.name)
		}
	}
	return names
}

// away is since when a leg is not current.
type away struct {
	since time.Time // by the object, which nodes write by their own clocks
	at    time.Time // by the clock of this process
}

// dueLegs returns when legs are to be replaced, as they are not current for too long by then. Only a volume that is used by a mirror can get other current
// legs. The clocks of nodes do not matter: the time counts from when this process saw that a leg is away. Only of those that it found so when it began does
// the object say since when. The time begins anew as long as a leg only waits for its turn to be made equal: another leg would do so too.
func (p *Replicator) dueLegs(ctx context.Context, r *v1alpha1.ReplicatedVolume, legs map[string]*v1alpha1.Volume) (due map[string]time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	before, now := p.away[r.Name], time.Now()
	due, seen := map[string]time.Time{}, map[string]away{}
	for _, name := range r.Spec.Legs {
		v, l := legs[name], r.Leg(name)
		if v == nil || l != nil && l.Current || !isMirrored(r) {
			continue
		}
		one, known := before[name]
		if since := awaySince(r, l, v); !known || !one.since.Equal(since) {
			one = away{since, now}
			if since.Before(now) && now.Sub(p.began) < lookAgain {
				one.at = since
			}
		}
		if queues(r, name) && p.maker.Works(ctx, v.Spec.NodeName) {
			one.at = now
		}
		seen[strings.Clone(name)] = one // the text may be a part of a longer one, which would stay in memory
		if l == nil || l.State != v1alpha1.LegJoining && l.State != v1alpha1.LegAhead {
			due[name] = one.at.Add(time.Duration(r.Spec.ReplaceAfter) * time.Second)
		}
	}
	if delete(p.away, r.Name); len(seen) > 0 {
		p.away[strings.Clone(r.Name)] = seen
	}
	return due
}

// queues reports whether a leg that is not current waits until others are: of other volumes, or of this one, which are made equal one after the other.
func queues(r *v1alpha1.ReplicatedVolume, name string) bool {
	return slices.ContainsFunc(r.Status.Legs, func(l v1alpha1.Leg) bool {
		return l.Name == name && l.State == v1alpha1.LegQueued || l.Name != name && l.State == v1alpha1.LegJoining
	})
}

// isMirrored reports whether a volume is used by a mirror, and its legs are to be replaced in time.
func isMirrored(r *v1alpha1.ReplicatedVolume) bool {
	c := r.Spec.Claim
	return r.Spec.ReplaceAfter > 0 && c != nil && c.Since != nil && r.Status.Opened == c.Generation
}

// awaySince returns since when a leg is not current while its volume is claimed, by the object.
func awaySince(r *v1alpha1.ReplicatedVolume, l *v1alpha1.Leg, v *v1alpha1.Volume) time.Time {
	since := v.CreationTimestamp.Time
	if l != nil && l.Since != nil {
		since = l.Since.Time
	}
	if c := r.Spec.Claim; c.Since.After(since) {
		since = c.Since.Time
	}
	return since
}

// untilNextLook returns when to look at a volume again without an event: a leg may be due for replacement by then (dueLegs), or its node be gone.
func untilNextLook(due map[string]time.Time) time.Duration {
	in := lookAgain
	for _, at := range due {
		if left := time.Until(at); left > 0 {
			in = min(in, left)
		}
	}
	return in
}

// lacksLegs reports whether a volume is to get another leg: it has fewer good ones than it is to have, and none that is still to be made.
func lacksLegs(r *v1alpha1.ReplicatedVolume, all []assessment) bool {
	n := 0
	for _, l := range all {
		if l.state == missing {
			return false // one leg is made after the other
		}
		if l.state == good {
			n++
		}
	}
	return n < r.Spec.Replicas
}

// removal is how a leg goes.
type removal int

const (
	stays   removal = iota
	takeOut         // out of spec.legs
	unlist          // off the list of current legs, before that
)

// mostLate is how many new legs of a volume wait to be made equal for too long before no further one is made. Their nodes have room for each of them.
const mostLate = 2

// whyLate returns why a volume gets no further leg for now: new ones could not be made equal to the others, and are tried again; empty if that is not so.
func whyLate(r *v1alpha1.ReplicatedVolume, all []assessment, legs map[string]*v1alpha1.Volume) string {
	var late []string
	for _, one := range all {
		if one.fresh && one.late {
			text := "on node " + legs[one.name].Spec.NodeName
			if l := r.Leg(one.name); l != nil && l.Message != "" {
				text += ": " + l.Message
			}
			late = append(late, text)
		}
	}
	if len(late) < mostLate {
		return ""
	}
	return cluster.Limited(fmt.Sprintf("%d new replicas are not made equal to the others for too long, and are tried again; until one of them is, or is moved to another node, no further one is made (%s)", len(late), strings.Join(late, "; ")))
}

// surplusLeg returns the leg that goes next from a volume with more legs than it is to have, and how. A leg goes only if enough others are current, on nodes
// that work: while nobody uses a volume, a leg whose node is down counts as current still. One that is not current goes first, then one that is bad, then one
// that is to move, then one beside another (spec.topologyKey), then one whose node is down, and last the one on the node that uses the volume. A leg that may have what the others lack stays, and so does one that is current after
// the user of the volume has died, until there is another one. One that was never current, and cannot be, goes in any case.
func surplusLeg(r *v1alpha1.ReplicatedVolume, all []assessment) (name string, _ removal) {
	for _, one := range all {
		if one.unfit && one.fresh {
			return one.name, takeOut
		}
	}
	if len(all) <= r.Spec.Replicas {
		return "", stays
	}
	victim := &all[0]
	for i := range all {
		if l := &all[i]; l.goesBefore(victim) {
			victim = l
		}
	}
	others := 0                                      // current and good ones beside the victim, that can be reached
	isNext := !victim.current && victim.state != bad // perhaps it is to take the place of one that is to move
	for i := range all {
		l := &all[i]
		if l != victim && l.current && !l.down && (l.state == good || l.state == moving && !isNext) {
			others++
		}
	}
	switch {
	case others < r.Spec.Replicas, victim.ahead, victim.current && !r.Settled() && (victim.state == good || r.Spec.Claim != nil):
		return "", stays
	case victim.current && r.Spec.Claim == nil:
		return victim.name, unlist
	}
	return victim.name, takeOut
}

// goesBefore reports whether a leg goes before another one; of two that are alike the later one goes.
func (l *assessment) goesBefore(other *assessment) bool {
	switch {
	case l.current != other.current:
		return !l.current
	case (l.state == bad) != (other.state == bad):
		return l.state == bad
	case (l.state == moving) != (other.state == moving):
		return l.state == moving
	case l.beside != other.beside:
		return l.beside
	case l.down != other.down:
		return l.down
	case l.home != other.home:
		return !l.home
	}
	return true
}
