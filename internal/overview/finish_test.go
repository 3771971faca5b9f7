package overview_test

import (
	"testing"

	"github.com/ashlar-csi/ashlar/internal/overview"
)

// TestFull: a pool is full if all of it is promised, but not if it offers no room because of another problem: then its room is not taken, and deleting volumes
// would not help.
func TestFull(t *testing.T) {
	with := func(kind string, available int64, reason string, severity overview.Severity) overview.Pool {
		p := overview.Pool{Node: "n", Name: "p", Kind: kind, Total: 100, Promised: 100 - available, Available: available, MaxVolume: available}
		if reason != "" {
			p.Problems = []overview.Problem{overview.Found(severity, reason, "it is so", overview.KindPool, "n.p")}
		}
		return p
	}
	for _, test := range []struct {
		pool overview.Pool
		want string
	}{
		{with("file", 11, "", ""), ""},
		{with("file", 10, "", ""), overview.PoolNearlyFull},
		{with("file", 0, "", ""), overview.PoolFull},
		{with("file", 0, overview.PoolNearlyFull, overview.Degraded), overview.PoolFull}, // its filesystem is nearly full, too
		{with("file", 0, "DiskErrors", overview.Degraded), overview.PoolFull},
		{with("lvm", 0, "DeviceMissing", overview.Degraded), ""},
		{with("lvmthin", 0, overview.PoolNearlyFull, overview.Degraded), ""}, // its thin pool is over the watermark
		{with("lvmthin", 0, "PoolFailed", overview.Inaccessible), ""},
		{with("file", 5, "PoolReadOnly", overview.Inaccessible), ""},
		{with("lvm", 0, overview.Strays, overview.Warning), overview.PoolFull},
	} {
		if full, is := test.pool.Full(); is != (test.want != "") || full.Reason != test.want {
			t.Errorf("%s, %d left, %+v: %q, want %q", test.pool.Kind, test.pool.Available, test.pool.Problems, full.Reason, test.want)
		}
	}
}
