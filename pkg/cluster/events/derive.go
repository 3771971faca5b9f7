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

// saying is one thing that is to be said on one thing.
type saying struct {
	on      string        // the kind of what it is on
	of      client.Object // what it is about: a Volume, a Snapshot (or its volume, by on), a Pool or a Node; nobody changes it
	reason  string
	cause   string // the reason that the runbook is for, if it is another one
	level   string
	note    string    // without the address of the runbook
	state   string    // tells this state of the object from others of the same reason
	since   time.Time // when the state began; zero: not known
	lasting bool      // the state goes on until the object says otherwise
	waits   bool      // for the node of the volume
}

// key is the same for the same saying of the same state.
func (s *saying) key() string {
	return strings.Join([]string{s.on, fmt.Sprintf("%T", s.of), s.of.GetName(), s.reason, s.state}, "\x00")
}

// mostNote is how long the note of an event may be, in bytes (Kubernetes' limit).
const mostNote = 1024

// text is the note of an event: what is wrong and what to do, and where more is said of that.
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

// each returns a saying on each of some kinds of things.
func (s saying) each(kinds []string) []saying {
	var all []saying
	for _, kind := range kinds {
		one := s
		one.on = kind
		all = append(all, one)
	}
	return all
}

// ofProblems says what is wrong with an object, or that nothing is any more. subject begins the note.
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

// ofRecovery says that a condition is well again.
func ofRecovery(o client.Object, on []string, subject string, conditions []metav1.Condition, kind string) []saying {
	c := meta.FindStatusCondition(conditions, kind)
	if c == nil || c.Status != metav1.ConditionTrue || c.Reason != v1alpha1.Recovered {
		return nil
	}
	return saying{of: o, reason: Recovered, level: normal, note: subject + c.Message, since: c.LastTransitionTime.Time,
		state: kind + c.LastTransitionTime.UTC().Format(time.RFC3339)}.each(on)
}

// ofVolume is all that there is to say of a volume whose node is in some state, and whose move, if it is to move, began at a generation, and is to another node, or from there, in some state.
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

// ofCopy is what there is to say of a copy of what is on another node: that it is begun, why it does not go on, that it is whole.
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
		return nil // of another version
	}
	return one.each(waiting)
}

// ofMove is what there is to say of the move of a volume or a snapshot to another node: that it is begun, why it does not go on, that it is there.
// It may move to the same node again soon, and each move is told: by the generation at which it began, and once it has moved by
// that at which all was copied, which does not change any more.
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
	if s.Waits && len(waits) == 0 { // else what it waited for is old news
		one.reason, one.level, one.lasting, one.note = MoveWaits, warning, true, subject+"its move waits: "+s.Message
		all = append(all, one.each(on)...)
	}
	return append(all, waits...)
}

// ofMoveAway says that a move waits for the node that it is to, or that something has left, as that is away: it cannot say so itself.
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

// ofAway says that who uses a volume on another node, or reads it beside others, waits for the volume's own, as the agent there has found.
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

// awayOn is in the state of HomeAway, before the node on which the volume is used.
const awayOn = " on "

// waitsForHome reports whether something is to be done to a volume that its node does: it is to be made, grown, deleted, taken over where it has moved to, given to another node that has a
// claim, or not given to one any more that has none.
func waitsForHome(v *v1alpha1.Volume) bool {
	m, s := v.Spec.Move, v.Status.Move
	given := v.Given()
	return v.Deleting() || v.Status.Created == nil && v.Spec.Make || v.Spec.Size > v.Status.Size || m != nil && m.Left && (s == nil || !s.Arrived) ||
		slices.ContainsFunc(v.Claimants(), func(node string) bool {
			return node != v.Spec.NodeName && !slices.ContainsFunc(given, func(e v1alpha1.Export) bool { return e.Node == node && e.Generation == v.ClaimOf(node).Generation })
		}) ||
		slices.ContainsFunc(given, func(e v1alpha1.Export) bool { return v.ClaimOf(e.Node) == nil && e.Generation <= v.Spec.Claims })
}

// ofWaiting says that a volume waits for its node: it is in use, or something is to be done to it.
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

// ofSnapshot is all that there is to say of a snapshot, and of its volume because of it; other and began are as in ofVolume.
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

// ofPool is all that there is to say of a pool.
func ofPool(p *v1alpha1.Pool) []saying {
	subject := fmt.Sprintf("pool %s of node %s: ", p.Spec.Pool, p.Spec.NodeName)
	health := slices.Clone(p.Status.Health)
	for i := range health { // pools mostly name themselves
		health[i].Message = strings.TrimPrefix(health[i].Message, "pool "+p.Spec.Pool+": ")
	}
	all := ofProblems(p, pools, subject, health, p.Status.Conditions)
	c := meta.FindStatusCondition(p.Status.Conditions, v1alpha1.Accounted)
	if c != nil && c.Status == metav1.ConditionFalse && p.Status.StrayCount > 0 {
		one := saying{of: p, reason: Strays, level: warning, note: fmt.Sprintf("%s%d volumes or snapshots: %s", subject, p.Status.StrayCount, c.Message),
			since: c.LastTransitionTime.Time, state: c.LastTransitionTime.UTC().Format(time.RFC3339), lasting: true}
		all = append(all, one.each(pools)...)
	}
	return append(all, ofRecovery(p, pools, subject, p.Status.Conditions, v1alpha1.Accounted)...)
}

// nodeState is how a node is that has pools; the zero value is one that is there and heard.
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

// ofNode is all that there is to say of a node that has pools. That it is not ready Kubernetes says itself.
func ofNode(n *corev1.Node, state nodeState) []saying {
	if state.reason != AgentSilent {
		return nil
	}
	return []saying{{on: onNode, of: n, reason: AgentSilent, level: warning, since: state.since, state: state.id(), lasting: true, waits: true,
		note: state.why + ": volumes that are in use go on, and nothing is made, grown or deleted there; look at the driver's pod on the node"}}
}

// over is what is said when a node is well again for which something waited.
func (s saying) over() saying {
	s.lasting, s.level, s.since = false, normal, time.Now()
	node := s.of.GetName()
	if v, ok := s.of.(*v1alpha1.Volume); ok {
		node = v.Spec.NodeName
	}
	switch s.reason {
	case AgentSilent:
		s.reason, s.note = AgentHeard, "the driver on node "+node+" is heard again"
	case HomeAway:
		_, user, _ := strings.Cut(s.state, awayOn)
		s.reason, s.note = HomeBack, "node "+node+" answers node "+user+" on the network again"
	default:
		s.reason, s.note = NodeReady, "node "+node+" is ready again"
	}
	return s
}
