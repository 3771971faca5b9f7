package cluster_test

import (
	"testing"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/csimap"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// TestNames: pkg/api, which is for programs on any system, has the same IDs and keys as the driver.
func TestNames(t *testing.T) {
	v, s, g := cluster.VolumeNamed(volume.KeyOf("v")), cluster.SnapshotNamed(volume.KeyOf("s")), v1alpha1.Group{Key: volume.KeyOf("g")}
	v.Spec.Pool, s.Spec.Pool, s.Spec.Source = "a", "b", volume.KeyOf("v")
	for have, want := range map[string]string{v.ID(): cluster.VolumeID(v).String(), s.ID(): cluster.SnapshotID(s).String(), s.SourceID(): cluster.SnapshotSource(s).String(),
		g.ID(): volume.GroupID{Key: g.Key}.String(), v1alpha1.TopologyKey: csimap.TopologyKey} {
		if have != want {
			t.Errorf("%s, and the driver says %s", have, want)
		}
	}
}
