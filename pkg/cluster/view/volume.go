package view

import (
	"fmt"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
)

// long is after which time it is a warning that something is still being made. Copies of large volumes without reflinks may take longer, and are worth a look
// all the same.
const long = 5 * time.Minute

// volumes adds the volumes: those with several legs, and those that are no legs.
func (t *taking) volumes() {
	legs := t.replicas()
	for i := range t.objects {
		if v := &t.objects[i]; !legs[v.Name] {
			t.out.Volumes = append(t.out.Volumes, t.volume(v))
		}
	}
}

func (t *taking) volume(v *v1alpha1.Volume) overview.Volume {
	out := overview.Volume{ID: v.ID(), Name: v.Spec.Name, Node: v.Spec.NodeName, Pool: v.Spec.Pool, Size: v.Spec.Size, Filesystem: v.Spec.Filesystem, Encryption: v.Spec.Encryption,
		Thin: v.Spec.Provisioning == "thin", Created: v.CreationTimestamp.UTC(), PersistentVolume: v.Spec.PersistentVolume,
		Used: v.Status.Used, Settings: v.Status.Mutable, Moving: t.moving(v), Progress: progress(&v.Status.ObjectStatus, v)}
	if v.Status.Created != nil {
		out.Created, out.Thin = v.Status.Created.UTC(), v.Status.Thin
		out.Size = v.Status.Size
	}
	t.owned(&out, v.Spec.ClaimRef)
	out.Published = strings.Join(v.Claimants(), ", ")
	if n := v.Spec.Replicas; n > 0 && !v1alpha1.Going(v) {
		out.Awaits = fmt.Sprintf("%d replicas", n)
		if why, _ := v.WhyNotReplicated(v1alpha1.Mirrors(t.pools)); why != "" {
			out.Awaits += ", when this is over: " + why
		}
	}
	out.Source = source(v)
	out.State, out.Failure = overview.State(v1alpha1.StateOf(v)), failure(&v.Status.ObjectStatus, v.Generation)
	out.State, out.Problems = t.wrong(&v.Status.ObjectStatus, &v.ObjectMeta, out.State, overview.KindVolume, out.ID)
	if why := v.WithoutWhole(); why != "" && t.wholes { // else it would be shown with its ReplicatedVolume
		out.Problems = append(out.Problems, overview.Found(overview.Inaccessible, v1alpha1.ReasonNoCurrentReplica, why, overview.KindVolume, out.ID))
	}
	return out
}

// owned sets the PersistentVolume, the claim and the pods of a volume. ref is the claim that the volume was made for, as its node says. What a
// PersistentVolume with its ID says goes before that.
func (t *taking) owned(out *overview.Volume, ref *v1alpha1.ClaimRef) {
	handle := t.out.Driver + " " + out.ID
	if ref != nil {
		claim := overview.Ref{Namespace: ref.Namespace, Name: ref.Name}
		if holder, held := t.holders[claim]; !held || holder == handle { // else the claim has another volume now
			out.Claim = &claim
		}
	}
	if name := t.handles[handle].name; name != "" { // the PersistentVolume may have another claim than ref, or none
		out.PersistentVolume, out.Claim = name, nil
	}
	if ref, there := t.claims[handle]; there {
		out.Claim = &ref
	}
	if out.Claim != nil {
		if holder, held := t.holders[*out.Claim]; held && holder == handle || !held && t.handles[handle].name == "" {
			out.Pods = t.users[*out.Claim] // else the claim of that name is a new one, and its pods use another volume
		}
	}
}

// snapshots adds the snapshots. It needs the volumes to have been added.
func (t *taking) snapshots() {
	volumes := map[string]*v1alpha1.Volume{} // by their IDs
	for i := range t.objects {
		volumes[t.objects[i].ID()] = &t.objects[i]
	}
	wholes := map[string]*overview.Volume{} // those with several legs
	for i := range t.out.Volumes {
		if v := &t.out.Volumes[i]; v.Replicas != nil {
			wholes[v.ID] = v
		}
	}
	for i := range t.copies {
		s := &t.copies[i]
		out := overview.Snapshot{ID: s.ID(), Name: s.Spec.Name, Node: s.Spec.NodeName, Pool: s.Spec.Pool, Source: s.SourceID(), Size: s.Status.Size, Created: s.CreationTimestamp.UTC(),
			Moving: t.moving(s), Progress: progress(&s.Status.ObjectStatus, s)}
		if s.Status.Created != nil {
			out.Created = s.Status.Created.UTC()
		}
		if r := wholes[out.Source]; r != nil {
			if !t.ofWhole(s, r) {
				out.Source = ""
			}
		} else if v := volumes[out.Source]; v != nil && !s.Of(v) {
			out.Source = "" // only the snapshot's own node says that it is of this volume
		}
		if g := s.Spec.Group; g != nil {
			out.Group = g.ID()
		}
		out.State, out.Failure = overview.State(v1alpha1.StateOf(s)), failure(&s.Status.ObjectStatus, s.Generation)
		out.State, out.Problems = t.wrong(&s.Status.ObjectStatus, &s.ObjectMeta, out.State, overview.KindSnapshot, out.ID)
		t.out.Snapshots = append(t.out.Snapshots, out)
	}
}

// mobile is what can move: a volume, or a snapshot.
type mobile interface {
	Moves() (*v1alpha1.Move, *v1alpha1.MoveStatus)
}

// move returns the move of an object (spec.move) and its status; nil for what there is not. The status of an earlier move does not count.
func move(o mobile) (*v1alpha1.Move, *v1alpha1.MoveStatus) {
	m, s := o.Moves()
	if m == nil || s != nil && !m.Left && (s.Node != m.Node || s.Pool != m.Pool) { // of an earlier move
		s = nil
	}
	return m, s
}

// moving says in words where an object moves to or has moved from, how far that is, and which node that is away the move waits for. Empty: it does not move.
func (t *taking) moving(o mobile) string {
	m, s := move(o)
	if m == nil {
		return ""
	}
	text := "to node " + m.Node
	switch {
	case m.Left:
		text = "from node " + m.Node
	case m.Pool != "":
		text = "to pool " + m.Pool + " of node " + m.Node
	}
	switch {
	case s == nil || s.Message == "":
	case s.Waits && !m.Left:
		text += ": it waits: " + s.Message
	default:
		text += ": " + s.Message
	}
	if m.Left && (s == nil || !s.Arrived || s.Cleared) {
		return text
	}
	if away := t.away(m.Node); away != "" {
		text += fmt.Sprintf(": it waits for node %s, %s", m.Node, away)
	}
	return text
}

// progress returns how far the copying, zeroing or moving of an object is; nil if none of it is under way.
func progress(s *v1alpha1.ObjectStatus, o mobile) *overview.Progress {
	far := s.Progress
	if _, moves := move(o); far == nil && moves != nil {
		far = moves.Progress
	}
	if far == nil {
		return nil
	}
	return &overview.Progress{Done: far.Done, Total: far.Total}
}

// failure returns the message of the node's failure for a generation of an object (status.failure); empty: there is none.
func failure(s *v1alpha1.ObjectStatus, generation int64) string {
	if refused := s.Refused(generation); refused != nil {
		return refused.Message
	}
	return ""
}

// lost returns the message of the condition Ready if that says DataLoss; else it is empty.
func lost(s *v1alpha1.ObjectStatus) string {
	for _, c := range s.Conditions {
		if c.Type == v1alpha1.Ready && c.Status == metav1.ConditionFalse && c.Reason == v1alpha1.ReasonDataLoss {
			return c.Message
		}
	}
	return ""
}

// problems returns the problems that a node has reported (status.health) as an overview has them.
func problems(health []v1alpha1.Problem, kind, name string) []overview.Problem {
	var all []overview.Problem
	for _, p := range health {
		all = append(all, overview.Found(overview.Severity(p.Severity), p.Reason, p.Message, kind, name))
	}
	return all
}

// wrong returns the problems of an object: those that its node has reported, and those that follow from its state. The state that it returns is Lost instead
// of Ready if a problem is a data loss.
func (t *taking) wrong(s *v1alpha1.ObjectStatus, o *metav1.ObjectMeta, state overview.State, kind, id string) (overview.State, []overview.Problem) {
	have := problems(s.Health, kind, id)
	if state == overview.Ready && slices.ContainsFunc(have, func(p overview.Problem) bool { return p.Severity == overview.DataLoss }) {
		state = overview.Lost
	}
	say := func(severity overview.Severity, reason, message string) {
		for _, p := range have {
			if p.Reason == reason || p.Severity == overview.DataLoss && severity == overview.DataLoss {
				return
			}
		}
		have = append(have, overview.Found(severity, reason, message, kind, id))
	}
	refused := s.Refused(o.Generation)
	switch age := t.options.Now.Sub(o.CreationTimestamp.Time).Round(time.Second); {
	case state == overview.Lost:
		message := lost(s)
		if message == "" && refused != nil {
			message = refused.Message
		}
		say(overview.DataLoss, v1alpha1.ReasonDataLoss, message+"; restore it from a backup, or delete it")
	case refused != nil:
		say(overview.Degraded, refused.Reason, refused.Message)
	case state == overview.Making && age > long:
		say(overview.Warning, overview.TakesLong, fmt.Sprintf("it has been made for %s; see whether its node is there and its agent works: kubectl ashlar pools", age))
	}
	return state, have
}
