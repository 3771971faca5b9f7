package events

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/runbook"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
)

// saying is the content of one event.
type saying struct {
	on      string        // the kind of the object that the event is on: that of of, or one that belongs to it (find)
	of      client.Object // what it is about: a Volume, ReplicatedVolume, Snapshot, Pool or Node; not to be changed
	by      string        // the node that causes it, if of is a ReplicatedVolume and it follows from a leg; else empty (owner)
	reason  string
	cause   string    // the reason whose runbook helps, if it is not reason
	level   string    // warning or normal
	note    string    // without the address of the runbook
	state   string    // distinguishes states of the object that have the same reason
	since   time.Time // when the state began; zero: not known
	lasting bool      // the state lasts until update is called without it
	waits   bool      // something waits for the node of the object
}

// key identifies an event: it is the same for the same state of the same object.
func (s *saying) key() string {
	return strings.Join([]string{s.on, fmt.Sprintf("%T", s.of), s.of.GetName(), s.reason, s.state}, "\x00")
}

// owner returns the node of whose share (mostOfNode) an event is: the one that can cause it again and again, so that no node can use up the share of another.
// What follows from the status of a ReplicatedVolume is caused by the node of its claim, as no other node may write that. While it has no claim, no node
// causes it: then the owner is the ReplicatedVolume itself, by kind and name.
func (s *saying) owner() string {
	r, is := s.of.(*v1alpha1.ReplicatedVolume)
	switch {
	case !is:
		return nodeOf(s.of)
	case s.by != "":
		return s.by
	case r.Spec.Claim != nil:
		return r.Spec.Claim.Node
	}
	return onReplicated + "/" + r.Name // no name of a node has a slash
}

// mostNote is how long the note of an event may be, in bytes (Kubernetes' limit).
const mostNote = 1024

// text returns the note of an event, mostNote bytes at most; that of a warning ends with the address of the runbook.
func (s *saying) text() string {
	note := strings.TrimRight(strings.ToValidUTF8(s.note, "?"), ". \n")
	end := func(note string) string { return note + "." }
	if s.level == warning {
		end = func(note string) string { return runbook.See(note, cmp.Or(s.cause, s.reason)) }
	}
	if most := mostNote - len(end("")); len(note) > most {
		note = strings.ToValidUTF8(note[:most-len("...")], "") + "..."
	}
	return end(note)
}

// each returns the saying for each of some kinds of objects that it is on.
func (s saying) each(kinds []string) []saying {
	var all []saying
	for _, kind := range kinds {
		one := s
		one.on = kind
		all = append(all, one)
	}
	return all
}

// ofProblems returns the events of an object's health: one for each problem, or that there is none any more. subject begins their notes.
func ofProblems(o client.Object, on []string, subject string, health []v1alpha1.Problem, conditions []metav1.Condition) []saying {
	var all []saying
	for _, p := range health {
		one := saying{of: o, reason: p.Reason, level: warning, note: subject + p.Message, lasting: true}
		if p.Since != nil {
			one.since, one.state = p.Since.Time, p.Since.UTC().Format(time.RFC3339)
		}
		all = append(all, one.each(on)...)
	}
	return append(all, ofRecovery(o, on, subject, conditions, v1alpha1.Healthy)...)
}

// ofRecovery returns the events that tell that a condition (kind) is well again; none if it is not.
func ofRecovery(o client.Object, on []string, subject string, conditions []metav1.Condition, kind string) []saying {
	c := meta.FindStatusCondition(conditions, kind)
	if c == nil || c.Status != metav1.ConditionTrue || c.Reason != v1alpha1.Recovered {
		return nil
	}
	return saying{of: o, reason: Recovered, level: normal, note: subject + c.Message, since: c.LastTransitionTime.Time,
		state: kind + c.LastTransitionTime.UTC().Format(time.RFC3339)}.each(on)
}

// ofVolume returns all events of a volume. node is the state of its node, and other that of the node that it moves to, or has left. began is the
// generation at which its move began (Announcer.began).
func ofVolume(v *v1alpha1.Volume, node, other nodeState, began int64) []saying {
	subject := fmt.Sprintf("volume %s on node %s: ", cluster.VolumeID(v), v.Spec.NodeName)
	all := ofProblems(v, volumes, subject, v.Status.Health, v.Status.Conditions)
	if f := v.Common().Refused(v.Generation); f != nil {
		one := saying{of: v, cause: f.Reason, level: warning, note: subject + f.Message}
		switch {
		case v.Deleting():
			one.reason, one.state = DeletionRefused, f.Reason
			all = append(all, one.each([]string{onVolume, onPV})...)
		case v.Status.Created != nil && v.Spec.Size > v.Status.Size:
			one.reason, one.state = GrowthRefused, fmt.Sprint(v.Spec.Size)
			one.note = fmt.Sprintf("%sit cannot grow from %s to %s: %s", subject, cluster.Bytes(v.Status.Size), cluster.Bytes(v.Spec.Size), f.Message)
			all = append(all, one.each(volumes)...)
		case v.Status.Created == nil && v.Spec.Make && v.Spec.Source != nil:
			one.reason, one.state = CopyRefused, cluster.SourceOf(v).String()
			one.note = fmt.Sprintf("%scannot be copied from %s: %s", subject, cluster.SourceOf(v), f.Message)
			all = append(all, one.each(waiting)...)
		}
	}
	all = append(all, ofCopy(v, subject)...)
	if v.Spec.ReplicaOf != "" {
		return ofLeg(all)
	}
	all = append(all, ofMove(v, volumes, subject, began, other)...)
	all = append(all, ofAway(v)...)
	return append(all, ofWaiting(v, node)...)
}

// ofCopy returns the events of a volume that is a copy of a volume or snapshot on another node: that the copy has begun, why it does not go on, that it is
// complete.
func ofCopy(v *v1alpha1.Volume, subject string) []saying {
	c := meta.FindStatusCondition(v.Status.Conditions, v1alpha1.Copied)
	if c == nil || v.Spec.Source == nil || v1alpha1.Going(v) {
		return nil
	}
	from := fmt.Sprintf("%s of node %s", cluster.SourceOf(v), v.Spec.Source.NodeName)
	one := saying{of: v, reason: c.Reason, level: normal, since: c.LastTransitionTime.Time}
	switch c.Reason {
	case CopyWaits:
		one.level, one.lasting, one.note = warning, true, fmt.Sprintf("%sit waits for the bytes of %s: %s", subject, from, c.Message)
	case Copying:
		one.note = fmt.Sprintf("%sthe bytes of %s are being copied", subject, from)
	case Copied:
		one.note = fmt.Sprintf("%sthe bytes of %s were copied", subject, from)
	default:
		return nil // a reason of another version of the driver
	}
	return one.each(waiting)
}

// ofMove returns the events of the move of a volume or a snapshot to another node: that it has begun, why it does not go on, that it is done. As the
// object may move to the same node again soon, the state of an event has the generation at which the move began, and when it has changed its node, the one
// at which all was copied, which does not change any more.
func ofMove(o cluster.Object, on []string, subject string, began int64, other nodeState) []saying {
	m, s := o.Moves()
	if m == nil || v1alpha1.Going(o) {
		return nil
	}
	waits := ofMoveAway(o, on, subject, m, s, other)
	if s == nil || !m.Left && s.Node != m.Node {
		return waits
	}
	if m.Left && s.Copied != nil {
		began = s.Copied.Generation
	}
	one := saying{of: o, level: normal, state: fmt.Sprint(s.Node, " ", began)}
	where := m.Node
	if m.Pool != "" {
		where += ", pool " + m.Pool
	}
	var all []saying
	switch {
	case m.Left && s.Arrived:
		one.reason, one.note = Moved, fmt.Sprintf("%sit has moved here from node %s", subject, where)
		all = one.each(on)
	case !m.Left && !s.Waits:
		one.reason, one.note = Moving, fmt.Sprintf("%sit is being moved to node %s", subject, where)
		all = one.each(on)
	}
	if s.Waits && len(waits) == 0 { // if that node is away, its message is an old one
		one.reason, one.level, one.lasting, one.note = MoveWaits, warning, true, subject+"its move waits: "+s.Message
		all = append(all, one.each(on)...)
	}
	return append(all, waits...)
}

// ofStay returns the events of a volume that is to follow its pod, and cannot yet.
func ofStay(v *v1alpha1.Volume, why string) []saying {
	to := v.Spec.Claim.Node
	return saying{of: v.DeepCopy(), reason: MoveWaits, level: warning, state: strings.Join([]string{"follows", to, why}, " "),
		note: fmt.Sprintf("volume %s on node %s: it is to follow its pod to node %s, and cannot yet: %s", cluster.VolumeID(v), v.Spec.NodeName, to, why)}.each(volumes)
}

// ofMoveAway returns the events that tell that a move waits for the other node (to which something moves, or which it has left), as that node is not well.
// The node itself cannot report that.
func ofMoveAway(o cluster.Object, on []string, subject string, m *v1alpha1.Move, s *v1alpha1.MoveStatus, other nodeState) []saying {
	arrived := s != nil && s.Arrived
	if other.reason == "" || m.Left && (!arrived || s.Cleared) {
		return nil
	}
	what := ""
	if m.Left {
		what = ", which is to give its bytes back"
	}
	return saying{of: o, reason: MoveWaits, level: warning, lasting: true, since: other.since, state: strings.Join([]string{m.Node, other.reason, other.id()}, " "),
		note: fmt.Sprintf("%sits move waits for node %s%s: %s", subject, m.Node, what, other.why)}.each(on)
}

// ofAway returns the events of a volume whose home does not answer a node that uses or reads it, as the agent of that node reports (Export.Away).
func ofAway(v *v1alpha1.Volume) (all []saying) {
	home := v.Spec.NodeName
	for _, e := range v.Given() {
		if e.Away == nil {
			continue
		}
		since := e.Away.UTC().Format(time.RFC3339)
		all = append(all, saying{of: v, reason: HomeAway, level: warning, since: e.Away.Time, state: since + awayOn + e.Node, lasting: true, waits: true,
			note: fmt.Sprintf("volume %s is used on node %s, and node %s, which alone has it, does not answer there since %s: what is read and written waits; see that node %s is up, and reached from node %s",
				cluster.VolumeID(v), e.Node, home, since, home, e.Node)}.each(volumes)...)
	}
	return all
}

// awayOn stands before the name of the using node in the state of a HomeAway event (over).
const awayOn = " on "

// waitsForHome reports whether the node of a volume has something to do: to make, grow or delete it, to take it over after a move, to export it for a
// claim of another node, or to end an export that has no claim any more.
func waitsForHome(v *v1alpha1.Volume) bool {
	m, s := v.Spec.Move, v.Status.Move
	given := v.Given()
	return v.Deleting() || v.Status.Created == nil && v.Spec.Make || v.Spec.Size > v.Status.Size || m != nil && m.Left && (s == nil || !s.Arrived) ||
		slices.ContainsFunc(v.Claimants(), func(node string) bool {
			return node != v.Spec.NodeName && !slices.ContainsFunc(given, func(e v1alpha1.Export) bool { return e.Node == node && e.Generation == v.ClaimOf(node).Generation })
		}) ||
		slices.ContainsFunc(given, func(e v1alpha1.Export) bool { return v.ClaimOf(e.Node) == nil && e.Generation <= v.Spec.Claims })
}

// ofWaiting returns the events of a volume whose node is not well: that the node is gone for good, or that the volume waits for it, as it is in use or its
// node has something to do (waitsForHome).
func ofWaiting(v *v1alpha1.Volume, node nodeState) []saying {
	wanted := waitsForHome(v)
	one := saying{of: v, reason: node.reason, level: warning, since: node.since, state: node.id(), lasting: true, waits: true}
	switch subject := "volume " + cluster.VolumeID(v).String(); {
	case node.reason == NodeGone:
		one.note = fmt.Sprintf("%s was on node %s, which is gone for good (%s): its bytes are there, and nowhere else; bring the node or its disks back, or restore the volume from a backup", subject, v.Spec.NodeName, node.why)
		return one.each(volumes)
	case node.reason == AgentSilent && wanted, node.reason == NodeNotReady && (wanted || len(v.Claimants()) > 0):
		one.note = fmt.Sprintf("%s waits for node %s, which alone has it: %s", subject, v.Spec.NodeName, node.why)
		return one.each(waiting)
	}
	return nil
}

// ofSnapshot returns all events of a snapshot, on it or on its volume. other and began are as in ofVolume.
func ofSnapshot(s *v1alpha1.Snapshot, other nodeState, began int64) []saying {
	subject := fmt.Sprintf("snapshot %s on node %s: ", cluster.SnapshotID(s), s.Spec.NodeName)
	all := ofProblems(s, []string{onSnapshot}, subject, s.Status.Health, s.Status.Conditions)
	all = append(all, ofMove(s, []string{onSnapshot}, subject, began, other)...)
	f := s.Common().Refused(s.Generation)
	switch {
	case f == nil:
	case s.Deleting():
		all = append(all, saying{on: onSnapshot, of: s, reason: DeletionRefused, cause: f.Reason, level: warning, note: subject + f.Message, state: f.Reason})
	case s.Status.Created == nil && s.Spec.Make:
		one := saying{of: s, reason: CopyRefused, cause: f.Reason, level: warning,
			note: fmt.Sprintf("volume %s on node %s cannot be copied to %s: %s", cluster.SnapshotSource(s), s.Spec.NodeName, cluster.SnapshotID(s), f.Message)}
		all = append(all, one.each(waiting)...)
	}
	return all
}

// ofPool returns all events of a pool.
func ofPool(p *v1alpha1.Pool) []saying {
	subject := fmt.Sprintf("pool %s of node %s: ", p.Spec.Pool, p.Spec.NodeName)
	health := slices.Clone(p.Status.Health)
	for i := range health { // subject names the pool already
		health[i].Message = strings.TrimPrefix(health[i].Message, "pool "+p.Spec.Pool+": ")
	}
	all := ofProblems(p, pools, subject, health, p.Status.Conditions)
	c := meta.FindStatusCondition(p.Status.Conditions, v1alpha1.Accounted)
	if c != nil && c.Status == metav1.ConditionFalse && p.Status.StrayCount > 0 {
		one := saying{of: p, reason: Strays, level: warning, note: fmt.Sprintf("%s%d volumes or snapshots: %s", subject, p.Status.StrayCount, c.Message),
			since: c.LastTransitionTime.Time, state: c.LastTransitionTime.UTC().Format(time.RFC3339), lasting: true}
		all = append(all, one.each(pools)...)
	}
	if c := meta.FindStatusCondition(p.Status.Conditions, v1alpha1.Adopted); c != nil && c.Status == metav1.ConditionFalse {
		all = append(all, saying{on: onPool, of: p, reason: NoSuchStray, level: warning, note: subject + c.Message, since: c.LastTransitionTime.Time,
			state: c.LastTransitionTime.UTC().Format(time.RFC3339)})
	}
	return append(all, ofRecovery(p, pools, subject, p.Status.Conditions, v1alpha1.Accounted)...)
}

// nodeState is the state of a node; the zero value is that of one that is ready and whose agent is heard.
type nodeState struct {
	reason string // AgentSilent, NodeNotReady or NodeGone
	why    string
	since  time.Time // zero: not known
}

func (n nodeState) id() string {
	if n.since.IsZero() {
		return ""
	}
	return n.since.UTC().Format(time.RFC3339Nano)
}

// ofNode returns all events of a node. Kubernetes itself tells that it is not ready.
func ofNode(n *corev1.Node, state nodeState) []saying {
	if state.reason != AgentSilent {
		return nil
	}
	return []saying{{on: onNode, of: n, reason: AgentSilent, level: warning, since: state.since, state: state.id(), lasting: true, waits: true,
		note: state.why + ": volumes that are in use go on, and nothing is made, grown or deleted there; look at the driver's pod on the node"}}
}

// over returns the event that tells that the node of a saying is well again. now is the object as it is now.
func (s saying) over(now client.Object) saying {
	s.lasting, s.level, s.since = false, normal, time.Now()
	node := s.of.GetName()
	v, ok := now.(*v1alpha1.Volume)
	if ok {
		node = v.Spec.NodeName
	}
	switch s.reason {
	case AgentSilent:
		s.reason, s.note = AgentHeard, "the driver on node "+node+" is heard again"
	case HomeAway:
		_, user, _ := strings.Cut(s.state, awayOn)
		s.reason, s.note = HomeBack, "node "+node+" answers node "+user+" on the network again"
		if ok && !slices.ContainsFunc(v.Given(), func(e v1alpha1.Export) bool { return e.Node == user }) {
			s.note = fmt.Sprintf("node %s does not give the volume to node %s any more: what waited there fails, and pods that still use it have to be started again", node, user)
		}
	default:
		s.reason, s.note = NodeReady, "node "+node+" is ready again"
	}
	return s
}
