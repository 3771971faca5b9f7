package agent

import (
	"maps"
	"testing"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
)

// TestInForce: a volume has the parameters that all its legs have; they are not known while the legs differ, or one is being changed.
func TestInForce(t *testing.T) {
	slow, fast := map[string]string{"readIOPS": "100"}, map[string]string{"readIOPS": "200"}
	leg := func(wish, is map[string]string) *v1alpha1.Volume {
		return &v1alpha1.Volume{Spec: v1alpha1.VolumeSpec{Mutable: wish}, Status: v1alpha1.VolumeStatus{Mutable: is}}
	}
	for what, c := range map[string]struct {
		legs  []*v1alpha1.Volume
		want  map[string]string
		known bool
	}{
		"none is known":    {nil, nil, false},
		"all have them":    {[]*v1alpha1.Volume{leg(slow, slow), leg(slow, slow)}, slow, true},
		"none has any":     {[]*v1alpha1.Volume{leg(nil, nil)}, nil, true},
		"one is to change": {[]*v1alpha1.Volume{leg(slow, slow), leg(fast, slow)}, nil, false},
		"one has changed":  {[]*v1alpha1.Volume{leg(slow, slow), leg(fast, fast)}, nil, false},
	} {
		if have, known := agreedMutable(c.legs); known != c.known || !maps.Equal(have, c.want) {
			t.Errorf("%s: %v, %v", what, have, known)
		}
	}
}
