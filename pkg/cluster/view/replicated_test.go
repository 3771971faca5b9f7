package view

import (
	"fmt"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
)

// TestReplicas: a volume with several legs is one volume, and says how each of them is; a leg of which the volume is not there is shown as a volume.
func TestReplicas(t *testing.T) {
	now := time.Now()
	name := func(n int) string { return fmt.Sprintf("%032x", n) }
	leg := func(n int, node string, health ...v1alpha1.Problem) v1alpha1.Volume {
		return v1alpha1.Volume{ObjectMeta: metav1.ObjectMeta{Name: name(n)}, Spec: v1alpha1.VolumeSpec{NodeName: node, Pool: "default", Name: "leg", Access: "any", ReplicaOf: name(1), Size: 4096},
			Status: v1alpha1.VolumeStatus{ObjectStatus: v1alpha1.ObjectStatus{Created: new(metav1.NowMicro()), Size: 8192, Health: health}}}
	}
	whole := func(edit func(*v1alpha1.ReplicatedVolume)) v1alpha1.ReplicatedVolume {
		r := v1alpha1.ReplicatedVolume{ObjectMeta: metav1.ObjectMeta{Name: name(1), UID: "u", CreationTimestamp: metav1.NewTime(now.Add(-time.Hour))},
			Spec:   v1alpha1.ReplicatedVolumeSpec{Name: "pvc-1", Pool: "default", Replicas: 2, Size: 4096, Legs: []string{name(1), name(2)}, Claim: &v1alpha1.Claim{Node: "b", Generation: 1}, Claims: 1},
			Status: v1alpha1.ReplicatedVolumeStatus{Made: new(metav1.NowMicro()), Opened: 1, Legs: []v1alpha1.Leg{{Name: name(1), Current: true, State: v1alpha1.LegCurrent}, {Name: name(2), Current: true, State: v1alpha1.LegCurrent}}}}
		if edit != nil {
			edit(&r)
		}
		return r
	}
	waiting := func(r *v1alpha1.ReplicatedVolume) {
		r.Status.Legs[1] = v1alpha1.Leg{Name: name(2), State: v1alpha1.LegWaiting, Message: "its node does not answer", Since: new(metav1.NewTime(now.Add(-time.Minute)))}
	}
	broken := v1alpha1.Problem{Severity: "Inaccessible", Reason: "PoolUnavailable", Message: "no disk"}
	for what, c := range map[string]struct {
		r        v1alpha1.ReplicatedVolume
		legs     []v1alpha1.Volume
		says     string // current/wanted, state, node, and of each leg its node and state
		problems string // severity and reason of each
	}{
		"all current":    {whole(nil), []v1alpha1.Volume{leg(1, "a"), leg(2, "b")}, "2/2 Ready b: a Current, b Current", ""},
		"one is to grow": {whole(nil), []v1alpha1.Volume{leg(1, "a"), func() v1alpha1.Volume { v := leg(2, "grows"); v.Spec.Size = 16384; return v }()}, "2/2 Ready a: a Current, grows Current", ""},
		"one waits":      {whole(waiting), []v1alpha1.Volume{leg(1, "a"), leg(2, "b")}, "1/2 Ready a: a Current, b Waiting", "Degraded ReplicaNotCurrent"},
		"one joins": {whole(func(r *v1alpha1.ReplicatedVolume) {
			waiting(r)
			r.Status.Legs[1].State, r.Status.Legs[1].Progress = v1alpha1.LegJoining, &v1alpha1.Progress{Done: 1, Total: 4}
		}), []v1alpha1.Volume{leg(1, "a"), leg(2, "b")}, "1/2 Ready a: a Current, b Joining", "Degraded ReplicaNotCurrent"},
		"a disk fails, the other is well": {whole(nil), []v1alpha1.Volume{leg(1, "a", broken), leg(2, "b")}, "2/2 Ready b: a Current, b Current", "Degraded PoolUnavailable"},
		"the only current one fails":      {whole(waiting), []v1alpha1.Volume{leg(1, "a", broken), leg(2, "b")}, "1/2 Ready a: a Current, b Waiting", "Inaccessible PoolUnavailable, Degraded ReplicaNotCurrent"},
		"a node is away":                  {whole(waiting), []v1alpha1.Volume{leg(1, "a"), leg(2, "away")}, "1/2 Ready a: a Current, away Waiting", "Degraded ReplicaNotCurrent"},
		"one is gone": {whole(func(r *v1alpha1.ReplicatedVolume) {
			r.Spec.Legs, r.Spec.Replicas, r.Status.Lacks = r.Spec.Legs[:1], 2, "no node has room"
			r.Status.Legs = r.Status.Legs[:1]
		}), []v1alpha1.Volume{leg(1, "a")}, "1/2 Ready a: a Current", "Degraded ReplicaMissing"},
		"one is to be made": {whole(func(r *v1alpha1.ReplicatedVolume) {
			r.Spec.Legs, r.Spec.Replicas = append(r.Spec.Legs, name(3)), 3
		}), []v1alpha1.Volume{leg(1, "a"), leg(2, "b")}, "2/3 Ready b: a Current, b Current,  Making", "Degraded ReplicaMissing"},
		"none can be used yet": {whole(func(r *v1alpha1.ReplicatedVolume) { r.Status.Waits = "leg 2 has it" }), []v1alpha1.Volume{leg(1, "a"), leg(2, "b")}, "2/2 Ready b: a Current, b Current", "Inaccessible NoCurrentReplica"},
		"nobody waits":         {whole(func(r *v1alpha1.ReplicatedVolume) { r.Status.Waits, r.Spec.Claim = "leg 2 has it", nil }), []v1alpha1.Volume{leg(1, "a"), leg(2, "b")}, "2/2 Ready a: a Current, b Current", ""},
		"one leaves": {whole(func(r *v1alpha1.ReplicatedVolume) {
			r.Spec.Legs, r.Spec.Replicas, r.Status.Legs = r.Spec.Legs[:1], 1, r.Status.Legs[:1]
		}), []v1alpha1.Volume{leg(1, "a"), leg(2, "b")}, "1/1 Ready a: a Current, b Leaving", ""},
		"they are not equal": {whole(func(r *v1alpha1.ReplicatedVolume) {
			r.Status.Scrub = &v1alpha1.Scrub{Last: &v1alpha1.Differences{Bytes: 4096}}
		}), []v1alpha1.Volume{leg(1, "a"), leg(2, "b")}, "2/2 Ready b: a Current, b Current", "Degraded ReplicasDiffer"},
		"none is there":                      {whole(nil), nil, "0/2 Lost :  Lost,  Lost", "DataLoss NoCurrentReplica, Degraded ReplicaMissing"},
		"it is deleted":                      {whole(func(r *v1alpha1.ReplicatedVolume) { r.Spec.Claim, r.Spec.Delete = nil, r.UID }), []v1alpha1.Volume{leg(1, "a")}, "1/2 Deleting a: a Current,  Lost", ""},
		"it was restored without its status": {whole(func(r *v1alpha1.ReplicatedVolume) { r.Status = v1alpha1.ReplicatedVolumeStatus{} }), []v1alpha1.Volume{leg(1, "a"), leg(2, "b")}, "0/2 Ready b: a Waiting, b Waiting", "Inaccessible NoCurrentReplica"},
		"it takes long": {whole(func(r *v1alpha1.ReplicatedVolume) {
			r.Spec.Claims, r.Spec.Claim, r.Status = 0, nil, v1alpha1.ReplicatedVolumeStatus{}
		}), []v1alpha1.Volume{leg(1, "a")}, "0/2 Making a: a Waiting,  Making", "Warning TakesLong"},
	} {
		t.Run(what, func(t *testing.T) {
			ready := machine{ready: true}
			tk := taking{out: &overview.Overview{Driver: v1alpha1.DefaultDriver}, options: Options{Now: now}, known: true, machines: map[string]machine{"a": ready, "b": ready, "away": {}},
				objects: append(c.legs, func() v1alpha1.Volume { v := leg(9, "a"); v.Spec.ReplicaOf = name(8); return v }()), replicated: []v1alpha1.ReplicatedVolume{c.r}}
			tk.volumes()
			tk.out.Finish()
			var v *overview.Volume
			for i := range tk.out.Volumes {
				if tk.out.Volumes[i].Replicas != nil {
					v = &tk.out.Volumes[i]
				}
			}
			if v == nil || len(tk.out.Volumes) != 2 || v.ID != "vol.default."+name(1) || v.Name != "pvc-1" || v.Size != 4096 {
				t.Fatalf("the volumes are %+v", tk.out.Volumes)
			}
			var legs, problems []string
			for _, leg := range v.Replicas.Legs {
				legs = append(legs, leg.Node+" "+string(leg.State))
				if leg.Node == "grows" && leg.Message != "it is to grow from 8192 to 16384 bytes; the volume does when all its replicas have; node grows, which is gone" {
					t.Errorf("of the leg that is to grow is said: %q", leg.Message)
				}
				if leg.Node == "away" && leg.Message != "its node does not answer; node away, which is not ready" {
					t.Errorf("of the leg that is away is said: %q", leg.Message)
				}
				if leg.State == overview.LegJoining && (leg.Progress == nil || leg.Progress.Total != 4 || leg.Since == nil) {
					t.Errorf("the leg that joins is %+v", leg)
				}
			}
			for _, p := range v.Problems {
				problems = append(problems, string(p.Severity)+" "+p.Reason)
			}
			if have := fmt.Sprintf("%s %s %s: %s", v.Replicas, v.State, v.Node, strings.Join(legs, ", ")); have != c.says {
				t.Errorf("it is %q, want %q", have, c.says)
			}
			if have := strings.Join(problems, ", "); have != c.problems {
				t.Errorf("wrong with it is %q, want %q: %+v", have, c.problems, v.Problems)
			}
		})
	}
}

// TestWithoutWhole: a volume whose ReplicatedVolume somebody has deleted is shown by its replicas, each of which says so. Not so one that was never used, as its
// ReplicatedVolume may be about to be made; nor if it is not known which there are.
func TestWithoutWhole(t *testing.T) {
	leg := func(edit func(*v1alpha1.Volume)) []overview.Problem {
		v := &v1alpha1.Volume{Spec: v1alpha1.VolumeSpec{Access: "any", ReplicaOf: "k", Claims: 3}, Status: v1alpha1.VolumeStatus{ReplicaOf: "k", ObjectStatus: v1alpha1.ObjectStatus{Created: new(metav1.NowMicro())}}}
		edit(v)
		tk := taking{out: &overview.Overview{}, wholes: v.Name != "unknown"}
		return tk.volume(v).Problems
	}
	if p := leg(func(*v1alpha1.Volume) {}); len(p) != 1 || p[0].Reason != v1alpha1.ReasonNoCurrentReplica || !strings.Contains(p[0].Message, "its ReplicatedVolume k was deleted") {
		t.Errorf("it says %+v", p)
	}
	for what, edit := range map[string]func(*v1alpha1.Volume){
		"unused":              func(v *v1alpha1.Volume) { v.Spec.Claims = 0 },
		"becoming one":        func(v *v1alpha1.Volume) { v.Status.ReplicaOf = "" },
		"it is not known":     func(v *v1alpha1.Volume) { v.Name = "unknown" },
		"none of another one": func(v *v1alpha1.Volume) { v.Spec.ReplicaOf, v.Status.ReplicaOf = "", "" },
	} {
		if p := leg(edit); len(p) > 0 {
			t.Errorf("%s: it says %+v", what, p)
		}
	}
}

// TestAwaitsReplicas: a volume that is to have replicas, and has none yet, says what that waits for.
func TestAwaitsReplicas(t *testing.T) {
	v := &v1alpha1.Volume{Spec: v1alpha1.VolumeSpec{Access: "any", Replicas: 2, Claim: &v1alpha1.Claim{Node: "n"}}, Status: v1alpha1.VolumeStatus{ObjectStatus: v1alpha1.ObjectStatus{Created: new(metav1.NowMicro())}}}
	tk := taking{out: &overview.Overview{}}
	if have := tk.volume(v).Awaits; !strings.HasPrefix(have, "2 replicas, when this is over: it is used on node n, which cannot mirror what it uses already") {
		t.Errorf("%q", have)
	}
	tk.pools = []v1alpha1.Pool{{Spec: v1alpha1.PoolSpec{NodeName: "n"}, Status: v1alpha1.PoolStatus{Network: &v1alpha1.Network{Mirrors: true}}}}
	if have := tk.volume(v).Awaits; have != "2 replicas" {
		t.Errorf("used by a node that can mirror: %q", have)
	}
	v.Spec.Claim = nil
	if have := tk.volume(v).Awaits; have != "2 replicas" {
		t.Errorf("%q", have)
	}
}
