package main

import (
	"context"
	"fmt"
	"math"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/process"
	"github.com/ashlar-csi/ashlar/pkg/csimap"
	"github.com/ashlar-csi/ashlar/pkg/metrics"
	"github.com/ashlar-csi/ashlar/pkg/metrics/metricstest"
)

// without returns the declared metrics that are in none of some scrapes, but for those in but.
func without(scrapes []metricstest.Scrape, but ...string) (missing []string) {
	for _, m := range metrics.All() {
		if !slices.Contains(but, m.Name) && !slices.ContainsFunc(scrapes, func(s metricstest.Scrape) bool { return s.Has(m.Name) }) {
			missing = append(missing, m.Name)
		}
	}
	return missing
}

// Metrics that only a cluster has (ofCluster), only thin pools (ofThin), and only disks with SMART (ofDisks).
var (
	ofCluster = []string{"ashlar_agent_failures_total", "ashlar_agent_oldest_request_seconds", "ashlar_agent_queue_length", "ashlar_mirrored_bytes_total", "ashlar_mirrors_in_progress", "ashlar_node_agent_up", "ashlar_objects", "ashlar_pool_strays", "ashlar_replica_resync_bytes", "ashlar_replicas", "ashlar_replicas_differ", "ashlar_replicated_volumes"}
	ofThin    = []string{"ashlar_pool_thin_data_ratio", "ashlar_pool_thin_metadata_ratio"}
	ofDisks   = []string{"ashlar_disk_errors", "ashlar_disk_healthy", "ashlar_disk_wear_ratio"}
)

// scraped returns the metrics of a driver as soon as they have some values.
func scraped(t *testing.T, address string, want map[string]float64) metricstest.Scrape {
	t.Helper()
	return metricstest.Until(t, func() metricstest.Scrape { return metricstest.Get(t, address) }, want)
}

// TestMetrics: the metrics of a driver are true, and those that are declared.
func TestMetrics(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := drivertest.Dir(t)
	address := drivertest.FreeAddresses(t, 1)[0]
	small := filepath.Join(dir, "small")
	check.OK(t, os.Mkdir(small, 0o700))
	drivertest.Run(t, "mount", "-t", "tmpfs", "-o", "size=64m", "none", small)
	t.Cleanup(func() { drivertest.Unmount(t, small) })
	check.OK(t, os.Mkdir(dir+"/empty", 0o700)) // as if no disk were mounted there
	p := serving(t, dir, "--node-id=n", "--pool="+testPool(dir), "--pool=small=file://"+small+"/pool?reservePercent=0", "--pool=gone=file://"+dir+"/empty",
		"--metrics-endpoint="+address, "--metrics-per-volume")
	p.Node = "n"
	ctx := t.Context()

	v, err := p.Create(ctx, co.Request("v", "ext4", 32<<20))
	check.OK(t, err)
	target, err := v.Up(ctx)
	check.OK(t, err)
	check.OK(t, os.WriteFile(v.File(target), make([]byte, 1<<20), 0o600))
	snapshot, err := v.Snapshot(ctx, "s")
	check.OK(t, err)
	room, err := p.GetCapacity(ctx, &csi.GetCapacityRequest{Parameters: map[string]string{"pool": "small"}})
	check.OK(t, err)
	filled := room.GetAvailableCapacity() - 256<<10 // the records need some of the tmpfs
	fill := co.Request("fill", co.Block, filled)
	fill.Parameters = map[string]string{"pool": "small"}
	full, err := p.Create(ctx, fill)
	check.OK(t, err)
	if _, err := p.Create(ctx, co.Request("far too large", co.Block, 1<<50)); err == nil {
		t.Fatal("a petabyte")
	}
	// An image is damaged: its content is lost.
	damaged, err := p.Create(ctx, co.Request("damaged", co.Block, 8<<20))
	check.OK(t, err)
	_, key, _ := strings.Cut(strings.TrimPrefix(damaged.ID, "vol."), ".")
	check.OK(t, os.Truncate(dir+"/pool/volumes/"+key+".img", 4096))

	s := scraped(t, address, map[string]float64{
		`ashlar_pool_up{kind="file",node="n",pool="default"}`:                                         1,
		`ashlar_pool_up{kind="file",node="n",pool="small"}`:                                           1,
		`ashlar_pool_up{kind="file",node="n",pool="gone"}`:                                            0,
		`ashlar_pool_problems{node="n",pool="gone",reason="PoolMissing",severity="Inaccessible"}`:     1,
		`ashlar_pool_problems{node="n",pool="small",reason="PoolNearlyFull",severity="Degraded"}`:     1,
		`ashlar_volume_problems{node="n",pool="default",reason="ImageTruncated",severity="DataLoss"}`: 1,
		`ashlar_pool_promised_bytes{node="n",pool="small"}`:                                           float64(filled),
		`ashlar_pool_used_bytes{node="n",pool="small"}`:                                               float64(filled),
		`ashlar_pool_volumes{node="n",pool="default"}`:                                                2,
		`ashlar_pool_snapshots{node="n",pool="default"}`:                                              1,
		`ashlar_freeze_seconds_count{node="n"}`:                                                       1,
		`ashlar_calls_in_flight{method="CreateVolume"}`:                                               0,
		`csi_plugin_operations_seconds_count{driver_name="block.csi.ashlar.dev",grpc_status_code="OK",method_name="/csi.v1.Controller/CreateVolume"}`:         3,
		`csi_plugin_operations_seconds_count{driver_name="block.csi.ashlar.dev",grpc_status_code="OutOfRange",method_name="/csi.v1.Controller/CreateVolume"}`: 1,
	})
	if log := p.Log(); !strings.Contains(log, `"Serving metrics" address="`+address+`"`) {
		t.Errorf("its log does not say where metrics are:\n%s", log)
	}
	if got := s.Values[`ashlar_pool_available_bytes{node="n",pool="small"}`]; got >= 8<<20 {
		t.Errorf("%v bytes are available in a pool that is full", got)
	}
	// Disks of tests report nothing (TestSamples of pkg/blockdev/disks). ashlar_calls_busy_total needs a refused call (TestOneCallPerVolume of pkg/rpc), and
	// ashlar_remote_volumes_away a volume of another node (TestHomeAway of remotepool).
	if missing := without([]metricstest.Scrape{s}, slices.Concat(ofCluster, ofThin, ofDisks, []string{"ashlar_calls_busy_total", "ashlar_remote_volumes_away"})...); len(missing) > 0 {
		t.Errorf("these are declared, and not there: %v", missing)
	}
	for _, path := range []string{"/", "/debug/pprof/", "/metrics/x"} {
		answer, err := http.Get("http://" + address + path)
		check.OK(t, err)
		answer.Body.Close()
		if answer.StatusCode != http.StatusNotFound {
			t.Errorf("GET %s: %s", path, answer.Status)
		}
	}
	refused(t, drive(t, "--endpoint="+dir+"/other.sock", "--pool=other=file://"+dir+"/other", "--metrics-endpoint="+address), "address already in use")

	check.OK(t, p.RemoveSnapshot(ctx, snapshot.GetSnapshotId()))
	check.OK(t, v.Down(ctx, target))
	for _, one := range []*co.Volume{v, full, damaged} {
		check.OK(t, one.Delete(ctx))
	}
	stopped(t, p)
	if c, err := net.Dial("tcp", address); err == nil {
		c.Close()
		t.Error("metrics are served by a driver that has ended")
	}
}

// TestLVMThinMetrics: metrics and lvm2 agree on how full a thin pool is.
func TestLVMThinMetrics(t *testing.T) {
	group := drivertest.NewGroup(t, 512<<20)
	url := group.ThinPool(t, "tp", "-L", "256M", "--poolmetadatasize", "4M")
	dir := drivertest.Dir(t)
	address := drivertest.FreeAddresses(t, 1)[0]
	p := serving(t, dir, "--node-id=n", "--pool=thin="+url, "--metrics-endpoint="+address)
	p.Node = "n"
	v, err := p.Create(t.Context(), co.Request("v", co.Block, 128<<20))
	check.OK(t, err)
	target, err := v.Up(t.Context())
	check.OK(t, err)
	const written = 64 << 20
	check.OK(t, drivertest.Content{Seed: "thin", Size: written}.Write(v.File(target)))
	s := scraped(t, address, map[string]float64{`ashlar_pool_thin_data_ratio{node="n",pool="thin"}`: float64(written) / (256 << 20)})
	ofLVM := strings.Fields(drivertest.Run(t, "lvs", "--noheadings", "-o", "data_percent,metadata_percent", group.Name+"/tp"))
	for i, series := range []string{`ashlar_pool_thin_data_ratio{node="n",pool="thin"}`, `ashlar_pool_thin_metadata_ratio{node="n",pool="thin"}`} {
		percent, err := strconv.ParseFloat(ofLVM[i], 64)
		check.OK(t, err)
		if got, there := s.Values[series]; !there || percent == 0 || math.Abs(100*got-percent) > 0.01 { // lvs rounds to 0.01
			t.Errorf("%s is %v (there: %v), and lvm2 says %s %%", series, got, there, ofLVM[i])
		}
	}
	if missing := without([]metricstest.Scrape{s}); slices.ContainsFunc(ofThin, func(name string) bool { return slices.Contains(missing, name) }) {
		t.Errorf("these are declared, and not there: %v", ofThin)
	}
	check.OK(t, v.Down(t.Context(), target))
	check.OK(t, v.Delete(t.Context()))
	stopped(t, p)
}

// TestMetricsDoNotGrow: more volumes do not make more series.
func TestMetricsDoNotGrow(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := drivertest.Dir(t)
	address := drivertest.FreeAddresses(t, 1)[0]
	p := serving(t, dir, "--node-id=n", "--metrics-endpoint="+address)
	var all []*co.Volume
	another := func() {
		v, err := p.Create(t.Context(), co.Request(fmt.Sprint("v", len(all)), co.Block, 1<<20))
		check.OK(t, err)
		all = append(all, v)
		_, err = v.Snapshot(t.Context(), fmt.Sprint("s", len(all)))
		check.OK(t, err)
		check.OK(t, p.RemoveSnapshot(t.Context(), drivertest.SnapshotID(fmt.Sprint("s", len(all)))))
	}
	series := func() int {
		return scraped(t, address, map[string]float64{`ashlar_pool_up{kind="file",node="n",pool="default"}`: 1}).Series()
	}
	another()
	before := series()
	for range 50 {
		another()
	}
	if after := series(); after != before {
		t.Errorf("%d series with one volume, %d with 51", before, after)
	}
	for _, v := range all {
		check.OK(t, v.Delete(t.Context()))
	}
	stopped(t, p)
}

// TestMetricsOfCluster: the metrics of controller and node.
func TestMetricsOfCluster(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := drivertest.Dir(t)
	server := apitest.Get(t)
	clusterNode(t)
	kubeconfig := filepath.Join(dir, "kubeconfig")
	check.OK(t, server.Kubeconfig(server.Config(apitest.Admin), kubeconfig))
	check.OK(t, server.Kubeconfig(server.Agent(t, testNode), kubeconfig+".node"))
	addresses := drivertest.FreeAddresses(t, 2)
	ofController, ofNode := addresses[0], addresses[1]
	controller := started(t, dir+"/c", program, "--mode=controller", "--kubeconfig="+kubeconfig, "--metrics-endpoint="+ofController)
	node := started(t, dir+"/n", program, "--mode=node", "--kubeconfig="+kubeconfig+".node", "--node-id="+testNode, "--pool="+testPool(dir), "--metrics-endpoint="+ofNode)
	probed(t, controller, true)
	cluster := *controller.Client
	cluster.NodeClient, cluster.Node = node.NodeClient, testNode
	v := createdIn(t, &cluster)
	scrapes := []metricstest.Scrape{scraped(t, ofController, map[string]float64{
		`ashlar_objects{kind="volume",node="` + testNode + `",state="ready"}`: 1,
		`ashlar_objects{kind="volume",node="` + testNode + `",state="lost"}`:  0,
		`ashlar_node_agent_up{node="` + testNode + `"}`:                       1,
	}), scraped(t, ofNode, map[string]float64{
		`ashlar_pool_up{kind="file",node="` + testNode + `",pool="default"}`: 1,
		`ashlar_pool_volumes{node="` + testNode + `",pool="default"}`:        1,
		`ashlar_pool_strays{node="` + testNode + `",pool="default"}`:         0,
		`ashlar_agent_oldest_request_seconds{node="` + testNode + `"}`:       0,
	})}
	// TestMetrics has the metrics that need other operations. The agent has not failed here (TestMetrics of pkg/cluster).
	for _, name := range slices.DeleteFunc(slices.Clone(ofCluster), func(n string) bool { return n == "ashlar_agent_failures_total" }) {
		if !scrapes[0].Has(name) && !scrapes[1].Has(name) {
			t.Errorf("%s is declared, and not there", name)
		}
	}
	for i, s := range scrapes {
		if !s.Has("rest_client_requests_total") {
			t.Errorf("part %d of the cluster does not say what it asks of Kubernetes", i)
		}
	}
	check.OK(t, v.Delete(t.Context()))
	for _, p := range []*process.Driver{controller, node} {
		stopped(t, p)
	}
}

// createdIn makes a volume on the node of a cluster, once the node has reported its pools.
func createdIn(t *testing.T, cluster *co.Client) *co.Volume {
	t.Helper()
	create := co.Request("v", co.Block, 16<<20)
	create.AccessibilityRequirements = &csi.TopologyRequirement{Requisite: []*csi.Topology{csimap.Topology(testNode)}}
	for end := time.Now().Add(2 * time.Minute); ; time.Sleep(20 * time.Millisecond) {
		ctx, cancel := context.WithDeadline(t.Context(), end)
		v, err := cluster.Create(ctx, create)
		cancel()
		if err == nil {
			return v
		}
		if time.Now().After(end) {
			t.Fatal(err)
		}
	}
}
