package replicator

import (
	"strings"
	"testing"
	"unsafe"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
)

// TestQueuesNoLeg: a volume that is looked at again and again keeps no state of its legs in memory, of whose text its name is a part.
func TestQueuesNoLeg(t *testing.T) {
	p := New(kube.Connection{}, nil)
	defer p.pending.ShutDown()
	text := strings.Repeat("a", 32) + "the rest of the leg"
	p.VolumeChanged(&v1alpha1.Volume{Spec: v1alpha1.VolumeSpec{ReplicaOf: text[:32]}}, false)
	key, _ := p.pending.Get()
	if key != text[:32] || unsafe.StringData(key) == unsafe.StringData(text) {
		t.Errorf("what is queued (%q) is a part of the leg, or another", key)
	}
}
