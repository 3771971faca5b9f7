package cluster

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
)

// Bytes returns a size for people: rounded to three digits, with a binary unit (10Gi, 1.5Ti, 512).
func Bytes(n int64) string {
	const units = "KMGTPE"
	value, unit := float64(n), ""
	for i := 0; value >= 1023.5 && i < len(units); i++ { // 1023.5 would be rounded to 1024
		value, unit = value/1024, units[i:i+1]+"i"
	}
	digits := 0
	switch {
	case unit == "":
	case value < 9.995:
		digits = 2
	case value < 99.95:
		digits = 1
	}
	text := strconv.FormatFloat(value, 'f', digits, 64)
	if digits > 0 {
		text = strings.TrimRight(strings.TrimRight(text, "0"), ".")
	}
	return text + unit
}

// Summarize sets status.summary of a volume or a snapshot from the rest of the object. The claim stays as it is if the object does not name one, as
// snapshots do not.
func Summarize(o Object) {
	status := o.Common()
	sum := v1alpha1.Summary{State: v1alpha1.StateOf(o), Health: worst(status.Health), Claim: status.Summary.Claim}
	if status.Created != nil {
		sum.Size = Bytes(status.Size)
	}
	if p := status.Progress; p != nil && p.Total > 0 {
		sum.Progress = fmt.Sprintf("%d%%", min(100, int64(float64(p.Done)/float64(p.Total)*100)))
	}
	if v, ok := o.(*v1alpha1.Volume); ok {
		if status.Created == nil {
			sum.Size = Bytes(v.Spec.Size)
		}
		if v.Status.Used != nil {
			sum.Used = Bytes(*v.Status.Used)
		}
		if ref := v.Spec.ClaimRef; ref != nil {
			sum.Claim = ref.Namespace + "/" + ref.Name
		}
	}
	status.Summary = sum
}

// SummarizePool sets status.summary of a pool from the rest of the object.
func SummarizePool(p *v1alpha1.Pool) {
	s := &p.Status
	s.Summary = v1alpha1.PoolSummary{Health: worst(s.Health), Total: Bytes(s.Total), Promised: Bytes(s.Promised), Available: Bytes(s.Available), Used: Bytes(s.Used), Largest: Bytes(s.MaxVolume)}
}

// worst returns the severity of the first problem, which is the worst one; AllWell if there is none.
func worst(health []v1alpha1.Problem) string {
	if len(health) == 0 {
		return v1alpha1.AllWell
	}
	return health[0].Severity
}
