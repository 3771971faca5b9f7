package measure

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/metrics"
	"github.com/ashlar-csi/ashlar/pkg/metrics/metricstest"
)

// TestAfterHang: what a look said that a disk held up for an hour is not said for twenty hours.
func TestAfterHang(t *testing.T) {
	for since, again := range map[time.Duration]bool{time.Minute: false, time.Hour: true} {
		looked := make(chan struct{}, 1)
		r := reading[int]{fresh: fresh, find: func(context.Context) int { looked <- struct{}{}; return 2 }, known: true, last: 1, took: time.Hour, ended: time.Now().Add(-since)}
		var all sync.WaitGroup
		r.start(t.Context(), &all)
		all.Wait()
		if (len(looked) == 1) != again {
			t.Errorf("%s after a look that took an hour it is looked again: %t", since, len(looked) == 1)
		}
	}
}

// TestSlow: a pool whose look takes longer than a scrape waits is as it was, not down; one whose look does not end is down.
func TestSlow(t *testing.T) {
	p := &pool{Pool: Pool{Pool: memory.NewDisk(1<<20).Open("p", nil), Kind: "file"}}
	p.state.known, p.state.last = true, state{capacity: &blockdev.Capacity{Total: 1 << 20, Available: 1 << 20}}
	p.state.under = make(chan struct{})
	over, enough := context.WithCancel(t.Context())
	enough()
	for busy, up := range map[time.Duration]float64{patience: 1, slow + time.Second: 0} {
		p.state.began = time.Now().Add(-busy)
		s := metricstest.Of(t, func() []metrics.Sample { return p.stateSamples("n", over.Done()) })
		s.Is(t, `ashlar_pool_up{kind="file",node="n",pool="p"}`, up)
		if total := s.Values[`ashlar_pool_total_bytes{node="n",pool="p"}`]; total != up*(1<<20) {
			t.Errorf("after %s: %v bytes in all", busy, total)
		}
	}
}
