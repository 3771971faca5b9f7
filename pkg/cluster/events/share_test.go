package events

import (
	"fmt"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
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
