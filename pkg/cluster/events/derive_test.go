package events

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
)

// TestRefusalsLeadToTheirCause: the event of a refused growth leads to the runbook of the reason why it was refused, as for lack of room.
func TestRefusalsLeadToTheirCause(t *testing.T) {
	for reason, page := range map[string]string{"NoSpace": "pool-full.md", "Precondition": "refused.md", "DataLoss": "data-loss.md"} {
		v := &v1alpha1.Volume{}
		v.Generation, v.Spec.Size = 2, 2<<30
		v.Status.Created, v.Status.Size = &metav1.MicroTime{Time: time.Now()}, 1<<30
		v.Status.ObservedGeneration, v.Status.Failure = 2, &v1alpha1.Failure{Reason: reason, Message: "no"}
		all := ofVolume(v, nodeState{}, nodeState{}, 0)
		if len(all) != len(volumes) {
			t.Fatalf("%s: %d sayings", reason, len(all))
		}
		for _, one := range all {
			if one.reason != GrowthRefused || !strings.HasSuffix(one.text(), "/"+page) {
				t.Errorf("%s on %s of %s: %s", one.reason, one.on, reason, one.text())
			}
		}
	}
}

// TestLongNames: the name of an event is valid in Kubernetes, however long the name of its object is.
func TestLongNames(t *testing.T) {
	a := New(kube.Connection{}, nil, Options{Driver: v1alpha1.DefaultDriver})
	for at := 1; at < mostName; at++ {
		for _, between := range []string{"-", ".", "--", "---"} {
			name := strings.Repeat("a", at) + between + strings.Repeat("b", mostName)
			event := a.event(entry{saying: saying{of: &v1alpha1.Volume{}, on: onClaim, reason: "X"}}, corev1.ObjectReference{Namespace: "n", Name: name[:mostName-1] + "b"})
			if problems := validation.NameIsDNSSubdomain(event.Name, false); len(problems) > 0 {
				t.Fatalf("%s: %v", event.Name, problems)
			}
		}
	}
}

// TestEachMoveIsTold: for a volume that moves to a node, back, and to that node again, there are events of each move, once, whatever else changes
// meanwhile; and two controllers write the same ones.
func TestEachMoveIsTold(t *testing.T) {
	controllers := []*Announcer{New(kube.Connection{}, nil, Options{}), New(kube.Connection{}, nil, Options{})}
	generation := int64(0)
	told := func(says string, home string, m *v1alpha1.Move, s *v1alpha1.MoveStatus) {
		t.Helper()
		generation++ // as if the spec had changed each time
		v := &v1alpha1.Volume{ObjectMeta: metav1.ObjectMeta{Name: "k", Generation: generation}, Spec: v1alpha1.VolumeSpec{NodeName: home, Pool: "p", Move: m}, Status: v1alpha1.VolumeStatus{Move: s}}
		for _, a := range controllers {
			before := maps.Clone(a.entries)
			a.VolumeChanged(v, false)
			got := map[string]int{}
			for key, e := range a.entries {
				if before[key] == nil {
					got[e.reason]++
				}
				e.said = time.Now()
			}
			if says != "" && (len(got) != 1 || got[says] != len(volumes)) || says == "" && len(got) > 0 {
				t.Errorf("generation %d, on %s, move %+v: %v are told, want %q", generation, home, m, got, says)
			}
		}
	}
	for _, move := range [][2]string{{"a", "b"}, {"b", "a"}, {"a", "b"}} {
		from, to := move[0], move[1]
		asked, left := &v1alpha1.Move{Node: to}, &v1alpha1.Move{Node: from, Left: true}
		told("", from, asked, nil)
		told(Moving, from, asked, &v1alpha1.MoveStatus{Node: to})
		told("", from, asked, &v1alpha1.MoveStatus{Node: to})
		told(MoveWaits, from, asked, &v1alpha1.MoveStatus{Node: to, Waits: true, Message: "no way"})
		told("", from, asked, &v1alpha1.MoveStatus{Node: to})
		copied := &v1alpha1.MoveCopied{Generation: generation}
		told("", from, asked, &v1alpha1.MoveStatus{Node: to, Copied: copied})
		told("", to, left, &v1alpha1.MoveStatus{Node: to, Copied: copied})
		told(Moved, to, left, &v1alpha1.MoveStatus{Node: to, Copied: copied, Arrived: true})
		told("", to, left, &v1alpha1.MoveStatus{Node: to, Copied: copied, Arrived: true, Cleared: true})
		told("", to, nil, &v1alpha1.MoveStatus{Node: to, Copied: copied, Arrived: true, Cleared: true})
		told("", to, nil, nil)
	}
	told("", "b", &v1alpha1.Move{Node: "a"}, nil)
	told(Moving, "b", &v1alpha1.Move{Node: "a"}, &v1alpha1.MoveStatus{Node: "a"})
	told("", "b", &v1alpha1.Move{Node: "c"}, &v1alpha1.MoveStatus{Node: "a"}) // another node is asked for
	told(Moving, "b", &v1alpha1.Move{Node: "c"}, &v1alpha1.MoveStatus{Node: "c"})
	told("", "b", nil, nil) // the move is taken back
	told(Moving, "b", &v1alpha1.Move{Node: "c"}, &v1alpha1.MoveStatus{Node: "c"})
	if one, other := controllers[0], controllers[1]; !maps.EqualFunc(one.entries, other.entries, func(a, b *entry) bool { return a.reason == b.reason }) {
		t.Errorf("one controller says %q, and another one %q", slices.Collect(maps.Keys(one.entries)), slices.Collect(maps.Keys(other.entries)))
	}
	controllers[0].VolumeChanged(&v1alpha1.Volume{ObjectMeta: metav1.ObjectMeta{Name: "k"}, Spec: v1alpha1.VolumeSpec{NodeName: "b", Move: &v1alpha1.Move{Node: "c"}}}, true)
	if left := len(controllers[0].moves); left != 0 {
		t.Errorf("%d moves are kept of a volume that is gone", left)
	}
}

// TestReadersOfAHomeAway: for each reader that the home of a volume does not answer, there is an event, and another one when the home answers again.
func TestReadersOfAHomeAway(t *testing.T) {
	away := new(metav1.NewTime(time.Unix(1, 0)))
	v := &v1alpha1.Volume{Spec: v1alpha1.VolumeSpec{NodeName: "home", Pool: "p"}, Status: v1alpha1.VolumeStatus{
		Readers: []v1alpha1.Export{{Generation: 1, Node: "first", Away: away}, {Generation: 2, Node: "second", Away: away}, {Generation: 3, Node: "third"}}}}
	all := ofAway(v)
	if len(all) != 2*len(volumes) {
		t.Fatalf("%d sayings", len(all))
	}
	keys := map[string]bool{}
	for i, one := range all {
		node := []string{"first", "second"}[i/len(volumes)]
		back := one.over(v)
		keys[one.key()], keys[back.key()] = true, true
		if !strings.Contains(one.note, "is used on node "+node) || back.note != "node home answers node "+node+" on the network again" {
			t.Errorf("%s; %s", one.note, back.note)
		}
	}
	if len(keys) != 2*len(all) {
		t.Errorf("some of it is said once alone: %v", keys)
	}
	ended := v.DeepCopy()
	ended.Status.Readers = ended.Status.Readers[1:]
	if note := all[0].over(ended).note; !strings.HasPrefix(note, "node home does not give the volume to node first any more") {
		t.Errorf("what it was given has ended, and the event says %q", note)
	}
}

// TestRemovedLegs: the event of a removed leg follows from the object alone, even if no controller saw the leg go. It is not written for a leg that was
// removed long ago.
func TestRemovedLegs(t *testing.T) {
	now := metav1.Now()
	r := &v1alpha1.ReplicatedVolume{ObjectMeta: metav1.ObjectMeta{Name: "k"}, Status: v1alpha1.ReplicatedVolumeStatus{Made: new(metav1.NowMicro())},
		Spec: v1alpha1.ReplicatedVolumeSpec{Name: "v", Pool: "p", Removed: []v1alpha1.RemovedLeg{{Name: "old", NodeName: "a", Time: metav1.NewTime(now.Add(-2 * fresh))}, {Name: "unknown", Time: now}, {Name: "new", NodeName: "b", Time: now},
			{Name: "unfit", NodeName: "c", Time: now, Unfit: "larger sectors"}}}}
	a := New(kube.Connection{}, nil, Options{})
	for range 2 {
		a.update(r, false, ofReplicated(r, nil, nil))
	}
	notes := map[string]int{}
	for _, e := range a.entries {
		if e.reason == ReplicaRemoved {
			notes[e.note]++
		}
	}
	subject := "volume vol.p.k: it does without its replica"
	if want := map[string]int{subject + ", which is deleted": len(replicated), subject + " on node b, which is deleted": len(replicated),
		subject + " on node c, which is deleted: it could not be made equal to the others: larger sectors": len(replicated)}; !maps.Equal(notes, want) {
		t.Errorf("it is said that %v", notes)
	}
}
