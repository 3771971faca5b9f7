package cluster_test

import (
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/controller"
	"github.com/ashlar-csi/ashlar/pkg/csimap"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// TestReplicatedCapacity: a volume with replicas is listed once, and a leg is not found as a volume. The capacity of a class with replicas is what as many
// nodes have room for as its volumes have replicas.
func TestReplicatedCapacity(t *testing.T) {
	w, _, s := legCluster(t, 3)
	server := controller.New(s)
	at := func(node string, parameters map[string]string) *csi.GetCapacityResponse {
		t.Helper()
		r := &csi.GetCapacityRequest{Parameters: parameters}
		if node != "" {
			r.AccessibleTopology = &csi.Topology{Segments: map[string]string{csimap.TopologyKey: node}}
		}
		c, err := server.GetCapacity(w.ctx, r)
		check.OK(t, err)
		return c
	}
	one := map[string]string{"access": "any"}
	two, three := map[string]string{"access": "any", "replicas": "2"}, map[string]string{"access": "any", "replicas": "3"}
	whole := at("node-1", one).GetAvailableCapacity()
	if have := at("", two).GetAvailableCapacity(); have != 3*whole/2 {
		t.Errorf("three empty nodes have room for %d of volumes with two replicas, and each has %d", have, whole)
	}
	filler := spec("filler")
	filler.Nodes, filler.Size.Required = []string{"node-3"}, 8*mib
	made, err := s.Create(w.ctx, filler)
	check.OK(t, err)
	w.eventually("the room of node-3 is less", func() bool { return at("node-3", one).GetAvailableCapacity() < whole })
	less := at("node-3", one)
	for what, c := range map[string]struct {
		node       string
		parameters map[string]string
		want       int64
	}{
		"a node that is full":                       {"node-3", two, less.GetAvailableCapacity()},
		"one that is not, with another one":         {"node-1", two, whole},
		"one that is not, and all others":           {"node-1", three, less.GetAvailableCapacity()},
		"as many replicas as there are, everywhere": {"", three, less.GetAvailableCapacity()},
	} {
		if have := at(c.node, c.parameters); have.GetAvailableCapacity() != c.want || have.GetMaximumVolumeSize().GetValue() > c.want {
			t.Errorf("%s: room for %d (%d at most), want %d", what, have.GetAvailableCapacity(), have.GetMaximumVolumeSize().GetValue(), c.want)
		}
	}
	v, err := s.Create(w.ctx, replicas("v", 3))
	check.OK(t, err)
	listed, err := server.ListVolumes(w.ctx, &csi.ListVolumesRequest{})
	check.OK(t, err)
	if len(listed.GetEntries()) != 2 {
		t.Errorf("two volumes are listed as %v", listed)
	}
	if have, err := server.ControllerGetVolume(w.ctx, &csi.ControllerGetVolumeRequest{VolumeId: v.ID.String()}); err != nil || have.GetVolume().GetVolumeId() != v.ID.String() {
		t.Errorf("it is %v, %v", have, err)
	}
	alone := volume.ID{Kind: v.ID.Kind, Pool: v.ID.Pool, Key: w.legsOf("v")[1].Name}
	if _, err := server.ControllerGetVolume(w.ctx, &csi.ControllerGetVolumeRequest{VolumeId: alone.String()}); err == nil {
		t.Error("a leg is a volume")
	}
	check.OK(t, s.Delete(w.ctx, v.ID))
	check.OK(t, s.Delete(w.ctx, made.ID))
}

// TestReplicatedCapacityApart: the capacity of a class whose replicas are in different zones is what as many zones have room for; nodes that can get no
// replica have none.
func TestReplicatedCapacityApart(t *testing.T) {
	w, _, s := legCluster(t, 4)
	server := controller.New(s)
	at := func(node string, replicas, key string) int64 {
		t.Helper()
		r := &csi.GetCapacityRequest{Parameters: map[string]string{"access": "any", "replicas": replicas}}
		if key != "" {
			r.Parameters["replicaTopologyKey"] = key
		}
		if node != "" {
			r.AccessibleTopology = &csi.Topology{Segments: map[string]string{csimap.TopologyKey: node}}
		}
		c, err := server.GetCapacity(w.ctx, r)
		check.OK(t, err)
		if most := c.GetMaximumVolumeSize().GetValue(); most > c.GetAvailableCapacity() || most == 0 && c.GetAvailableCapacity() > 0 {
			t.Errorf("%s, %s replicas: a volume may have %d, where there is room for %d", node, replicas, most, c.GetAvailableCapacity())
		}
		return c.GetAvailableCapacity()
	}
	edit := func(name string, edit func(n *corev1.Node)) {
		n := &corev1.Node{}
		check.OK(t, w.Get(w.ctx, client.ObjectKey{Name: name}, n))
		before := n.DeepCopy()
		edit(n)
		check.OK(t, w.Patch(w.ctx, n, client.MergeFrom(before)))
	}
	for node, zone := range map[string]string{"node-1": "a", "node-2": "a", "node-3": "b"} { // node-4 is in no zone
		edit(node, func(n *corev1.Node) { metav1.SetMetaDataLabel(&n.ObjectMeta, "zone", zone) })
	}
	whole := at("node-1", "2", "")
	w.eventually("the store knows the zones", func() bool { return at("node-1", "2", "zone") == whole })
	for what, c := range map[string]struct{ have, want int64 }{
		"anywhere, in two zones":                      {at("", "2", "zone"), whole}, // each volume needs a replica on node-3
		"anywhere, on two nodes":                      {at("", "2", ""), 2 * whole},
		"with the node that is alone in its zone":     {at("node-3", "2", "zone"), whole},
		"a node that is in no zone":                   {at("node-4", "2", "zone"), 0},
		"three zones, of which there are two":         {at("node-1", "3", "zone"), 0},
		"three zones, of which there are two, in all": {at("", "3", "zone"), 0},
		"three nodes":                                 {at("node-1", "3", ""), whole},
	} {
		if c.have != c.want {
			t.Errorf("%s: room for %d, want %d", what, c.have, c.want)
		}
	}
	edit("node-3", func(n *corev1.Node) { n.Spec.Unschedulable = true })
	w.eventually("a cordoned node gets no replica", func() bool { return at("node-1", "2", "zone") == 0 && at("node-1", "2", "") == whole })
}
