package measure

import (
	"testing"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// TestLegsThatAreLost: that a leg is lost, or cannot be used, is no worse than degraded, as its volume may have others.
func TestLegsThatAreLost(t *testing.T) {
	leg, alone := volume.Volume{ReplicaOf: "0123456789abcdef0123456789abcdef"}, volume.Volume{}
	for severity, ofLeg := range map[blockdev.Severity]blockdev.Severity{blockdev.Degraded: blockdev.Degraded, blockdev.Inaccessible: blockdev.Degraded, blockdev.DataLoss: blockdev.Degraded} {
		p := blockdev.Problem{Severity: severity, Reason: "ImageMissing"}
		if have := severityOf(leg, p); have != ofLeg {
			t.Errorf("a leg: %s is counted as %s", severity, have)
		}
		if have := severityOf(alone, p); have != severity {
			t.Errorf("a volume alone: %s is counted as %s", severity, have)
		}
	}
}
