package cluster_test

import (
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/lost"
	"github.com/ashlar-csi/ashlar/pkg/cluster/view"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// view returns the overview of the cluster, as an administrator takes it.
func (w *environment) view() *overview.Overview {
	w.Helper()
	scheme, err := view.Scheme()
	check.OK(w, err)
	c, err := client.New(apitest.Get(w).Config(apitest.Admin), client.Options{Scheme: scheme})
	check.OK(w, err)
	o, err := view.Take(w.ctx, c, view.Options{Kubernetes: true})
	check.OK(w, err)
	return o
}

// unlabelled takes the labels off the object of a snapshot, so that it is like an adopted one.
func (w *environment) unlabelled(id volume.ID) {
	w.Helper()
	s := w.cutObject(id)
	before := s.DeepCopy()
	s.Labels = nil
	check.OK(w, w.Patch(w.ctx, s, client.MergeFrom(before)))
}

// TestSnapshotSource: the source volume of a snapshot stays known, wherever the two move; also that of a snapshot that was adopted on the node of its
// volume. After a loss of the cluster the snapshot is restored into the namespace of the volume's claim.
func TestSnapshotSource(t *testing.T) {
	w, a, b, s, _, _ := reached(t, volume.Spec{Name: "other", Size: volume.Range{Required: mib}})
	v, err := s.Create(w.ctx, volume.Spec{Name: "v", Size: volume.Range{Required: mib}, Access: volume.AccessAny, Nodes: []string{a.name},
		For: volume.Requester{Namespace: "shop", Name: "data", PersistentVolume: "v"}})
	check.OK(t, err)
	check.OK(t, a.local.SetFormat(w.ctx, v.ID, volume.Format{State: volume.Raw})) // otherwise it is blank, and would count as abandoned
	ids := map[string]volume.ID{}
	for _, name := range []string{"moves", "adopted-moves", "stays", "adopted-stays"} {
		one, err := s.CreateSnapshot(w.ctx, name, v.ID)
		check.OK(t, err)
		ids[name] = one.ID
	}
	w.unlabelled(ids["adopted-moves"])
	w.unlabelled(ids["adopted-stays"])
	known := func(when string) {
		t.Helper()
		for _, one := range w.view().Snapshots {
			if one.Source != v.ID.String() {
				t.Errorf("%s: snapshot %s of node %s is shown as of %q", when, one.Name, one.Node, one.Source)
			}
		}
		objects, doubts, err := lost.Find(w.ctx, w, lost.Options{Driver: cluster.DefaultDriver, Class: "c", AccessMode: "ReadWriteOnce", Namespace: "nowhere"})
		check.OK(t, err)
		var in []string
		for _, o := range objects {
			if u, is := o.(*unstructured.Unstructured); is && u.GetKind() == "VolumeSnapshot" {
				in = append(in, u.GetNamespace())
			}
		}
		if !slices.Equal(in, []string{"shop", "shop", "shop", "shop"}) {
			t.Errorf("%s: restored they are in %q; doubts: %q", when, in, doubts)
		}
	}
	known("before any of them moves")
	for _, name := range []string{"moves", "adopted-moves"} {
		w.cutMovesTo(ids[name], b.name)
		w.cutMoved(ids[name], a, b)
	}
	known("of two that have moved")
	for _, to := range []*machine{b, a} {
		w.movesTo("v", to.name)
		w.eventually("the volume has moved", func() bool { o := w.object("v"); return o.Spec.NodeName == to.name && o.Spec.Move == nil })
		known("the volume is on " + to.name)
	}
	for name := range ids {
		if have := w.cutObject(ids[name]).Labels[v1alpha1.SourceLabel]; have != v.ID.Key {
			t.Errorf("%s has the label %q", name, have)
		}
	}
}
