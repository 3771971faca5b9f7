package events

import (
	"fmt"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
)

// TestShare: the events of a node that causes ever new ones are limited, and do not keep those of other nodes from being written.
func TestShare(t *testing.T) {
	a := New(kube.Connection{}, nil, Options{})
	told := func(node string, since time.Time, reasons int) {
		p := &v1alpha1.Pool{ObjectMeta: metav1.ObjectMeta{Name: node + ".default"}, Spec: v1alpha1.PoolSpec{NodeName: node, Pool: "default"}}
		at := metav1.NewTime(since)
		for i := range reasons {
			p.Status.Health = append(p.Status.Health, v1alpha1.Problem{Severity: "Degraded", Reason: fmt.Sprint("Reason", i), Message: "x", Since: &at})
		}
		a.PoolChanged(p, false)
	}
	began := time.Now()
	told("node-2", began, 3*most) // all at once
	for i := range most {         // one after the other
		told("node-2", began.Add(time.Duration(i)*time.Second), 1)
	}
	before := len(a.entries)
	told("node-1", began, 2)
	if now := len(a.entries); before > mostOfNode || now != before+2*len(pools) {
		t.Errorf("%d events of a node that says too much, and then %d", before, now)
	}
	if got := a.taken["node-2"]; got > mostOfNode+1 {
		t.Errorf("%d were taken up of one node", got)
	}
	a.since = a.since.Add(-fresh) // an hour later
	told("node-2", began.Add(-time.Minute), 1)
	if got := a.taken["node-2"]; got != len(pools) {
		t.Errorf("an hour later %d were taken up", got)
	}
}

// TestShareOfReplicated: the events of replicated volumes count for the node that causes them, as the user or by its replica. One that causes ever new ones
// keeps neither those of other replicated volumes from being written, used or not, nor those of the nodes of other replicas.
func TestShareOfReplicated(t *testing.T) {
	began := time.Now()
	whole := func(name, user string) *v1alpha1.ReplicatedVolume {
		r := cluster.ReplicatedNamed(name)
		r.Spec.Legs, r.Spec.Replicas = []string{name + "-a", name + "-b"}, 2
		r.Status = v1alpha1.ReplicatedVolumeStatus{Made: new(metav1.NewMicroTime(began)), Legs: []v1alpha1.Leg{{Name: name + "-a", Current: true}, {Name: name + "-b"}}}
		if user != "" {
			r.Spec.Claim = &v1alpha1.Claim{Node: user, Generation: 1}
		}
		return r
	}
	legs := func(r *v1alpha1.ReplicatedVolume, on string) map[string]*v1alpha1.Volume {
		its := map[string]*v1alpha1.Volume{}
		for _, name := range r.Spec.Legs {
			its[name] = cluster.VolumeNamed(name)
			its[name].Spec.NodeName = on
		}
		return its
	}
	for what, flood := range map[string]func(a *Announcer, i int){
		"the user reports a replica again and again": func(a *Announcer, i int) {
			r := whole("flood", "node-2")
			r.Status.Legs[1].Since = new(metav1.NewTime(began.Add(-time.Duration(i) * time.Second)))
			a.update(r, false, ofReplicated(r, legs(r, "node-3"), nil))
		},
		"a replica is lost again and again": func(a *Announcer, i int) {
			r := whole("flood", "node-1")
			r.Status.Legs[1].Current = true
			its := legs(r, "node-2")
			if i%2 == 0 {
				its["flood-b"].Status.Created = new(metav1.NewMicroTime(began))
				its["flood-b"].Status.Conditions = []metav1.Condition{{Type: v1alpha1.Ready, Status: metav1.ConditionFalse}}
			}
			a.update(r, false, ofReplicated(r, its, nil))
		},
		"the node of the only current replica is ready now and then": func(a *Announcer, i int) {
			r := whole("flood", "node-1")
			r.Status.Legs = r.Status.Legs[:1]
			state := nodeState{reason: NodeNotReady, since: began.Add(-time.Duration(i) * time.Second)}
			a.update(r, false, ofReplicated(r, legs(r, "node-2"), map[string]nodeState{"node-2": state}))
		},
	} {
		t.Run(what, func(t *testing.T) {
			a := New(kube.Connection{}, nil, Options{})
			for i := range mostOfNode {
				flood(a, i)
			}
			if got := a.taken["node-2"]; got != mostOfNode+1 {
				t.Errorf("%d were taken up of the node that says too much; of all: %v", got, a.taken)
			}
			for name, user := range map[string]string{"used": "node-1", "unused": "", "of-its-replica": "node-3"} {
				before := len(a.entries)
				r := whole(name, user)
				a.update(r, false, ofReplicated(r, legs(r, "node-2"), nil))
				if now := len(a.entries); now != before+len(replicated) {
					t.Errorf("of the replicated volume %s there are %d events", name, now-before)
				}
			}
		})
	}
}
