package replicator

import (
	"strings"
	"testing"
	"unsafe"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
)

// TestQueuesNoLeg: the queue keeps a copy of a volume's name. The name may be a part of the text of a leg's object, which would stay in memory with it.
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
