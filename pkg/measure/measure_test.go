package measure_test

import (
	"context"
	"runtime"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/measure"
	"github.com/ashlar-csi/ashlar/pkg/metrics"
	"github.com/ashlar-csi/ashlar/pkg/metrics/metricstest"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

const mib = 1 << 20

// node is a node n with a pool good, and another one that calls a hook.
func node(t *testing.T, perVolume bool, hook memory.Hook) (*measure.Node, *volume.Local) {
	t.Helper()
	drivertest.NeedRoot(t)
	pools := []blockdev.Pool{memory.NewDisk(100*mib).Open("good", nil), memory.NewDisk(100*mib).Open("other", hook)}
	mounts, err := mount.LoadTable()
	check.OK(t, err)
	local, err := volume.NewLocal(t.Context(), "n", pools, mounts, 0)
	check.OK(t, err)
	n := measure.New(t.Context(), local, []measure.Pool{{Pool: pools[0], Kind: "file"}, {Pool: pools[1], Kind: "file"}}, perVolume)
	t.Cleanup(n.Close)
	return n, local
}

// TestValues: what is said of pools and volumes is how they are.
// TestBegin: what alerts count is there before it happens.
func TestBegin(t *testing.T) {
	n, _ := node(t, false, nil)
	s := metricstest.Of(t, n.Samples)
	for _, series := range []string{`ashlar_freeze_seconds_count{node="n"}`, `ashlar_freeze_seconds_bucket{node="n",le="10"}`,
		`ashlar_command_failures_total{program="mkfs.xfs"}`, `ashlar_command_failures_total{program="other"}`} {
		s.Is(t, series, 0)
	}
}

func TestValues(t *testing.T) {
	n, local := node(t, true, nil)
	v, err := local.Create(t.Context(), volume.Spec{Name: "v", Pool: "good", Size: volume.Range{Required: 30 * mib}, For: volume.Requester{Namespace: "shop", Name: "orders"}})
	check.OK(t, err)
	_, err = local.CreateSnapshot(t.Context(), "s", v.ID)
	check.OK(t, err)
	s := metricstest.Until(t, func() metricstest.Scrape { return metricstest.Of(t, n.Samples) }, map[string]float64{
		`ashlar_pool_up{kind="file",node="n",pool="good"}`:                                                              1,
		`ashlar_pool_total_bytes{node="n",pool="good"}`:                                                                 100 * mib,
		`ashlar_pool_promised_bytes{node="n",pool="good"}`:                                                              60 * mib,
		`ashlar_pool_available_bytes{node="n",pool="good"}`:                                                             40 * mib,
		`ashlar_pool_volumes{node="n",pool="good"}`:                                                                     1,
		`ashlar_pool_snapshots{node="n",pool="good"}`:                                                                   1,
		`ashlar_pool_volumes{node="n",pool="other"}`:                                                                    0,
		`ashlar_copies_in_progress{node="n",pool="good"}`:                                                               0,
		`ashlar_copied_bytes_total{node="n",pool="good"}`:                                                               30 * mib,
		`ashlar_copied_bytes_total{node="n",pool="other"}`:                                                              0,
		`ashlar_volume_size_bytes{claim="orders",namespace="shop",node="n",pool="good",volume="` + v.ID.String() + `"}`: 30 * mib,
	})
	if s.Values[`ashlar_loop_devices_free{node="n"}`] < 1 {
		t.Errorf("%v loop devices are free", s.Values[`ashlar_loop_devices_free{node="n"}`])
	}
}

// TestHangs: a pool that does not answer holds up no scrape for longer than it may, costs one goroutine however often it is
// asked for, and nothing is said of the others but the truth.
func TestHangs(t *testing.T) {
	release := make(chan struct{})
	n, _ := node(t, false, func(operation string, _ blockdev.Ref) error {
		if operation == "Capacity" {
			<-release
		}
		return nil
	})
	up, good := `ashlar_pool_up{kind="file",node="n",pool="other"}`, `ashlar_pool_up{kind="file",node="n",pool="good"}`
	metricstest.Until(t, func() metricstest.Scrape { return metricstest.Of(t, n.Samples) }, map[string]float64{up: 0, good: 1})
	var before int
	for i := range 4 {
		began := time.Now()
		s := metricstest.Of(t, n.Samples)
		if took := time.Since(began); took > 10*metrics.ScrapeTime { // it hangs for ever, and the machine may stand still
			t.Errorf("a scrape took %s", took)
		}
		s.Is(t, up, 0)
		s.Is(t, good, 1)
		s.Is(t, `ashlar_pool_problems{node="n",pool="other",reason="PoolUnavailable",severity="Inaccessible"}`, 1)
		if s.Values[`ashlar_pool_total_bytes{node="n",pool="other"}`] != 0 {
			t.Error("figures of a pool that does not answer")
		}
		if i == 0 {
			before = runtime.NumGoroutine()
		}
	}
	for end := time.Now().Add(time.Minute); runtime.NumGoroutine() > before; time.Sleep(10 * time.Millisecond) { // what has answered ends a moment later
		if time.Now().After(end) {
			t.Fatalf("%d goroutines after one scrape, %d after four", before, runtime.NumGoroutine())
		}
	}
	close(release)
	for deadline := time.Now().Add(time.Minute); metricstest.Of(t, n.Samples).Values[up] != 1; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the pool answers again, and is not said to be up")
		}
	}
}

// TestKnown: what is known from a moment ago is not looked for again.
func TestKnown(t *testing.T) {
	looks := make(chan struct{}, 100)
	n, _ := node(t, false, func(operation string, _ blockdev.Ref) error {
		if operation == "Capacity" {
			looks <- struct{}{}
		}
		return nil
	})
	begun := time.Now()
	for range 20 {
		metricstest.Of(t, n.Samples)
	}
	if took := time.Since(begun); len(looks) > 1+int(took/(5*time.Second)) { // for so long it is known
		t.Errorf("20 scrapes in %s looked %d times", took, len(looks))
	}
}

// TestClose: what hangs does not hold up the end of the driver.
func TestClose(t *testing.T) {
	ctx, release := context.WithCancel(context.Background())
	defer release()
	n, _ := node(t, false, func(operation string, _ blockdev.Ref) error {
		if operation == "Capacity" {
			<-ctx.Done()
		}
		return nil
	})
	n.Samples()
	began := time.Now()
	n.Close()
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("Close took %s", took)
	}
}
