package view

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
)

// replicas adds the volumes with several legs, and returns the names of the Volumes that are their legs. A leg whose ReplicatedVolume is not there, or could
// not be listed, is not among them: it is shown as a volume.
func (t *taking) replicas() (legs map[string]bool) {
	of := map[string][]*v1alpha1.Volume{}
	for i := range t.objects {
		if v := &t.objects[i]; v.Spec.ReplicaOf != "" {
			of[v.Spec.ReplicaOf] = append(of[v.Spec.ReplicaOf], v)
		}
	}
	legs = map[string]bool{}
	for i := range t.replicated {
		r := &t.replicated[i]
		w := &whole{taking: t, r: r, legs: map[string]*v1alpha1.Volume{}}
		for _, v := range of[r.Name] {
			w.legs[v.Name], legs[v.Name] = v, true
		}
		t.out.Volumes = append(t.out.Volumes, w.volume())
	}
	return legs
}

// whole is a volume with several legs while its overview is made. legs are the Volumes of its legs that are there, by name.
type whole struct {
	*taking
	r    *v1alpha1.ReplicatedVolume
	legs map[string]*v1alpha1.Volume
	out  overview.Volume
}

// names returns the names of the legs: those of spec.legs in their order, then those of other legs that are there.
func (w *whole) names() []string {
	names := slices.Clone(w.r.Spec.Legs)
	var others []string
	for name := range w.legs {
		if !slices.Contains(names, name) {
			others = append(others, name)
		}
	}
	slices.Sort(others)
	return append(names, others...)
}

// stands returns the leg whose node and pool are shown as those of the volume: a current one rather than another, then one on the node that has the claim.
// nil: no leg is there.
func (w *whole) stands() (best *v1alpha1.Volume) {
	rank := func(v *v1alpha1.Volume) (rank int) {
		if l := w.r.Leg(v.Name); l == nil || !l.Current {
			rank += 2
		}
		if c := w.r.Spec.Claim; c == nil || c.Node != v.Spec.NodeName {
			rank++
		}
		return rank
	}
	for _, name := range w.names() {
		if v := w.legs[name]; v != nil && (best == nil || rank(v) < rank(best)) {
			best = v
		}
	}
	return best
}

// volume returns the volume as an overview has it.
func (w *whole) volume() overview.Volume {
	r, stands := w.r, w.stands()
	w.out = overview.Volume{ID: r.ID(), Name: r.Spec.Name, Pool: r.Spec.Pool, Size: r.Spec.Size, Created: r.CreationTimestamp.UTC(), Replicas: &overview.Replicas{Wanted: r.Spec.Replicas, Lacks: r.Status.Lacks}}
	if r.Status.Made != nil {
		w.out.Created = r.Status.Made.UTC()
	}
	var claim *v1alpha1.ClaimRef
	if v := stands; v != nil {
		w.out.Node, w.out.Pool, w.out.Filesystem, w.out.Encryption, w.out.Thin = v.Spec.NodeName, v.Spec.Pool, v.Spec.Filesystem, v.Spec.Encryption, v.Status.Thin
		w.out.PersistentVolume, w.out.Used, w.out.Settings, w.out.Source = v.Spec.PersistentVolume, v.Status.Used, v.Status.Mutable, source(v)
		w.out.Failure = failure(&v.Status.ObjectStatus, v.Generation)
		claim = v.Spec.ClaimRef
	}
	w.owned(&w.out, claim)
	if c := r.Spec.Claim; c != nil {
		w.out.Published = c.Node
	}
	for _, name := range w.names() {
		w.addLeg(name)
	}
	w.out.State = w.state(stands)
	w.wrong()
	return w.out
}

// state returns the state of the volume. It is Lost if no current leg is left that has its bytes.
func (w *whole) state(stands *v1alpha1.Volume) overview.State {
	switch {
	case w.r.Going():
		return overview.Deleting
	case w.r.StatusLost():
		return overview.Ready // its bytes are there
	case w.r.Status.Made == nil:
		return overview.Making
	case w.out.Replicas.Current == 0 && !slices.ContainsFunc(w.r.Current(), func(name string) bool { v := w.legs[name]; return v != nil && !v1alpha1.IsLost(v) }):
		return overview.Lost
	case stands != nil && stands.Common().Refused(stands.Generation) != nil:
		return overview.Failed
	}
	return overview.Ready
}

// addLeg adds the leg with a name to the overview of the volume.
func (w *whole) addLeg(name string) {
	v, l := w.legs[name], w.r.Leg(name)
	out := overview.Leg{ID: "vol." + w.r.Spec.Pool + "." + name}
	if l != nil && l.Since != nil {
		out.Since = new(l.Since.UTC())
	}
	if v != nil {
		out.ID, out.Node, out.Pool, out.Used = v.ID(), v.Spec.NodeName, v.Spec.Pool, v.Status.Used
	}
	out.State, out.Message = w.legState(v, l, slices.Contains(w.r.Spec.Legs, name))
	switch {
	case out.State == overview.LegCurrent:
		w.out.Replicas.Current++
	case out.State == overview.LegMaking && v != nil:
		out.Progress = progress(&v.Status.ObjectStatus, v)
	case out.State == overview.LegJoining && l.Progress != nil:
		out.Progress = &overview.Progress{Done: l.Progress.Done, Total: l.Progress.Total}
		w.out.Progress = out.Progress
	}
	if away := w.away(out.Node); v != nil && away != "" && out.State != overview.LegLost {
		out.Message = join(out.Message, "node "+out.Node+", "+away)
	}
	w.out.Replicas.Legs = append(w.out.Replicas.Legs, out)
}

// join joins two texts, either of which may be empty.
func join(one, two string) string {
	if one == "" {
		return two
	}
	return one + "; " + two
}

// legState returns the state of a leg and a message about it, such as why it is not current. v is its Volume, nil if that is gone; l its entry in
// status.legs, nil if there is none; named reports whether spec.legs names it.
func (w *whole) legState(v *v1alpha1.Volume, l *v1alpha1.Leg, named bool) (overview.LegState, string) {
	switch {
	case l == nil && w.r.StatusLost():
		return overview.LegWaiting, "whether it has all that was written is not known"
	case v == nil && l == nil:
		return overview.LegMaking, cmp.Or(w.r.Status.Lacks, "it is to be made")
	case v == nil:
		return overview.LegLost, "its Volume is gone"
	case v1alpha1.Going(v), !named && (l == nil || !l.Current):
		return overview.LegLeaving, "the volume does without it"
	case v1alpha1.IsLost(v):
		return overview.LegLost, lost(&v.Status.ObjectStatus)
	case v.Status.Created == nil:
		return overview.LegMaking, failure(&v.Status.ObjectStatus, v.Generation)
	case l != nil && l.Current && v.Status.Size < v.Spec.Size:
		return overview.LegCurrent, fmt.Sprintf("it is to grow from %d to %d bytes; the volume does when all its replicas have", v.Status.Size, v.Spec.Size)
	case l != nil && l.Current:
		return overview.LegCurrent, ""
	case l != nil && l.State == v1alpha1.LegJoining:
		return overview.LegJoining, l.Message
	case l != nil && l.Message != "":
		return overview.LegWaiting, l.Message
	case w.r.Spec.Claim == nil:
		return overview.LegWaiting, "what it lacks is copied to it while the volume is used"
	}
	return overview.LegWaiting, "node " + w.r.Spec.Claim.Node + " is to copy to it what it lacks"
}

// wrong adds the problems of the volume: those of its legs, and those of the volume itself (too few legs, legs that differ, no current leg, a refusal).
// While a current leg is well, no problem of a leg is worse than Degraded.
func (w *whole) wrong() {
	say := func(severity overview.Severity, reason, message string) {
		w.out.Problems = append(w.out.Problems, overview.Found(severity, reason, message, overview.KindVolume, w.out.ID))
	}
	switch age := w.options.Now.Sub(w.r.CreationTimestamp.Time).Round(time.Second); {
	case w.out.State == overview.Deleting:
		return
	case w.out.State == overview.Making:
		if age > long {
			say(overview.Warning, overview.TakesLong, fmt.Sprintf("it has been made for %s; see whether the nodes of its replicas are there and their agents work: kubectl ashlar pools", age))
		}
		return
	}
	well := w.well()
	for _, leg := range w.out.Replicas.Legs {
		for _, p := range w.wrongWith(leg) {
			if well && overview.Worse(p.Severity, overview.Degraded) < 0 {
				p.Severity = overview.Degraded
			}
			say(p.Severity, p.Reason, fmt.Sprintf("replica on node %s: %s", leg.Node, p.Message))
		}
	}
	if missing := w.missing(); missing > 0 {
		say(overview.Degraded, v1alpha1.ReasonReplicaMissing, w.r.Missing(missing))
	}
	if differ := w.r.Differ(); differ != "" {
		say(overview.Degraded, v1alpha1.ReasonReplicasDiffer, differ)
	}
	if w.out.Replicas.Current == 0 {
		severity := overview.Inaccessible
		if w.out.State == overview.Lost {
			severity = overview.DataLoss
		}
		message := "none of the replicas that have all that was written is there"
		if w.r.StatusLost() {
			message = w.r.WhyStatusLost()
		}
		say(severity, v1alpha1.ReasonNoCurrentReplica, message)
	}
	if waits := w.r.Waiting(); waits != "" && w.out.Replicas.Current > 0 {
		say(overview.Inaccessible, v1alpha1.ReasonNoCurrentReplica, waits)
	}
	if v := w.stands(); v != nil {
		if refused := v.Common().Refused(v.Generation); refused != nil {
			say(overview.Degraded, refused.Reason, refused.Message)
		}
	}
}

// wrongWith returns the problems of a leg: those that its node has reported, and that it is not current. A leg that leaves has none.
func (w *whole) wrongWith(leg overview.Leg) (all []overview.Problem) {
	if leg.State == overview.LegLeaving {
		return nil
	}
	if v := w.legs[leg.ID[strings.LastIndexByte(leg.ID, '.')+1:]]; v != nil {
		all = problems(v.Status.Health, overview.KindVolume, w.out.ID)
	}
	if (leg.State == overview.LegJoining || leg.State == overview.LegWaiting) && !w.r.StatusLost() {
		all = append(all, overview.Problem{Severity: overview.Degraded, Reason: v1alpha1.ReasonReplicaNotCurrent, Message: "it does not have all that was written: " + cmp.Or(leg.Message, "that is copied to it")})
	}
	return all
}

// well reports whether a current leg is there with no problem worse than Degraded, and its node is not known to be away.
func (w *whole) well() bool {
	return slices.ContainsFunc(w.r.Current(), func(name string) bool {
		v := w.legs[name]
		if v == nil || v1alpha1.IsLost(v) || w.away(v.Spec.NodeName) != "" {
			return false
		}
		return !slices.ContainsFunc(v.Status.Health, func(p v1alpha1.Problem) bool {
			return overview.Worse(overview.Severity(p.Severity), overview.Degraded) < 0
		})
	})
}

// missing returns how many legs the volume lacks: spec.replicas less those that are current, joining or waiting.
func (w *whole) missing() int {
	n := 0
	for _, leg := range w.out.Replicas.Legs {
		switch leg.State {
		case overview.LegCurrent, overview.LegJoining, overview.LegWaiting:
			n++
		}
	}
	return w.r.Spec.Replicas - n
}

// ofWhole reports whether a snapshot that names a volume with several legs as its source is of it: it is on the node of a leg, or the controller says so
// (v1alpha1.SourceLabel).
func (t *taking) ofWhole(s *v1alpha1.Snapshot, v *overview.Volume) bool {
	return slices.Contains(v.On(), s.Spec.NodeName) || "vol."+s.SourceNamed()+"."+s.Labels[v1alpha1.SourceLabel] == v.ID
}

// source returns the ID of what a volume was copied from; empty: it is no copy.
func source(v *v1alpha1.Volume) string {
	s := v.Spec.Source
	if s == nil {
		return ""
	}
	return s.Kind + "." + cmp.Or(s.Pool, v.Named()) + "." + s.Key
}
