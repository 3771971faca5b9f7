package monitoring

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/process"
	"github.com/ashlar-csi/ashlar/tests/monitoring/prometheus"
)

func TestMain(m *testing.M) { apitest.Main(m) }

// quiet are panels that have nothing to show while all is well, with the reason.
var quiet = map[string]string{
	"fleet: Problems":               "there are none",
	"node: Problems":                "there are none",
	"pool: Problems":                "there are none",
	"fleet: Calls that fail":        "none does",
	"node: Calls that fail":         "none does",
	"node: Calls refused as busy":   "none was",
	"node: Failures of the agent":   "there are none",
	"node: Programs that fail":      "none does",
	"pool: Thin pool":               "it is a file pool",
	"pool: Disks: life used":        "its disks say nothing of themselves",
	"pool: Disks: errors":           "its disks say nothing of themselves",
	"pool: Full in":                 "it does not fill up",
	"pool: Fastest growing volumes": "none grows",
	"fleet: Silent nodes":           "none is",
}

// ofCluster are panels that have nothing to show of a driver on one machine.
var ofCluster = map[string]string{
	"fleet: Objects":                    "no objects",
	"fleet: Requests to the API server": "no API server",
	"node: Driver is heard":             "no controller",
	"node: Oldest request":              "no agent",
	"node: Queue of the agent":          "no agent",
	"node: Replicas":                    "no objects",
	"node: Replicas: yet to be copied":  "no objects",
	"node: Requests to the API server":  "no API server",
	"pool: Strays":                      "no objects",
}

// TestScrape has a real Prometheus scrape real drivers: one that has a machine for itself, and the controller and the node of a cluster. Each
// expression of alerts and dashboards is one that it takes; each panel has something to show; no alert is on while all is well; and one is when a pool goes.
func TestScrape(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := drivertest.Dir(t)
	binary, err := process.Build(dir)
	check.OK(t, err)
	server := apitest.Get(t)
	check.OK(t, server.Kubeconfig(server.Config(apitest.Admin), dir+"/kubeconfig"))
	check.OK(t, server.Kubeconfig(server.Agent(t, "node"), dir+"/kubeconfig.node"))
	readyNode(t, "node")
	addresses := drivertest.FreeAddresses(t, 4)
	start := func(name, metrics string, flags ...string) *process.Driver {
		t.Helper()
		driver, err := process.New(filepath.Join(dir, name), "", append([]string{binary, "serve", "--metrics-endpoint=" + metrics}, flags...)...)
		check.OK(t, err)
		t.Cleanup(driver.Close)
		check.OK(t, driver.Start())
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		check.OK(t, driver.Ready(ctx))
		return driver
	}
	pool := func(name string) string {
		return fmt.Sprintf("--pool=default=file://%s/%s/pool?reservePercent=0", dir, name)
	}
	machine := start("machine", addresses[0], "--mode=all", "--node-id=machine", "--metrics-per-volume", pool("machine"))
	node := start("node", addresses[1], "--mode=node", "--node-id=node", "--metrics-per-volume", "--kubeconfig="+dir+"/kubeconfig.node", pool("node"))
	controller := start("controller", addresses[2], "--mode=controller", "--kubeconfig="+dir+"/kubeconfig")
	life(t, machine, machine)
	life(t, controller, node)
	p := startPrometheus(t, dir, addresses) // after them: volumes are measured once a minute

	t.Run("machine", func(t *testing.T) { p.shown(t, "machine", ofCluster) })
	t.Run("cluster", func(t *testing.T) { p.shown(t, "cluster", nil) })
	t.Run("well", p.well)
	t.Run("names", func(t *testing.T) { conventions(t, addresses[:3]) })
	t.Run("pool down", func(t *testing.T) {
		check.OK(t, os.Rename(dir+"/node/pool", dir+"/node/elsewhere"))
		p.Eventually(t, `ALERTS{alertname="AshlarPoolDown", alertstate="pending", cluster="cluster", node="node", pool="default", severity="critical"}`)
		check.OK(t, os.Rename(dir+"/node/elsewhere", dir+"/node/pool"))
		p.Eventually(t, `max(ashlar_pool_up{cluster="cluster"}) == 1`)
	})
}

// life makes a volume, uses it, and makes a snapshot of it, and a copy of that; all of it goes at the end of the test.
func life(t *testing.T, controller, node *process.Driver) {
	t.Helper()
	ctx := t.Context()
	caller := controller.Patient() // as a sidecar is
	made, err := caller.Create(ctx, co.Request("volume", "ext4", 64<<20))
	check.OK(t, err)
	name := filepath.Base(node.Dir)
	_, err = caller.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{VolumeId: made.ID, NodeId: name, VolumeCapability: made.Capability})
	check.OK(t, err)
	v := node.Volume(made.ID, made.Name, made.Capability)
	target := v.Target("pod")
	check.OK(t, errors.Join(v.Stage(ctx), v.Publish(ctx, target, false)))
	check.OK(t, os.WriteFile(v.File(target), make([]byte, 1<<20), 0o600))
	cut, err := made.Snapshot(ctx, "cut")
	check.OK(t, err)
	copied, err := caller.Create(ctx, co.FromSnapshot(co.Request("copy", "ext4", 64<<20), cut.GetSnapshotId()))
	check.OK(t, err)
	t.Cleanup(func() {
		ctx := context.Background()
		check.OK(t, errors.Join(v.Unpublish(ctx, target), v.Unstage(ctx)))
		_, err := caller.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: made.ID, NodeId: name})
		check.OK(t, errors.Join(err, copied.Delete(ctx), caller.RemoveSnapshot(ctx, cut.GetSnapshotId()), made.Delete(ctx)))
	})
}

// readyNode makes a node of the API server, as if a kubelet ran there.
func readyNode(t *testing.T, name string) {
	t.Helper()
	kube, err := kubernetes.NewForConfig(apitest.Get(t).Config(apitest.Admin))
	check.OK(t, err)
	node, err := kube.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	check.OK(t, err)
	node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	_, err = kube.CoreV1().Nodes().UpdateStatus(t.Context(), node, metav1.UpdateOptions{})
	check.OK(t, err)
}

// scraper is a Prometheus that scrapes drivers.
type scraper struct{ *prometheus.Server }

// startPrometheus starts a Prometheus that listens at the last of some addresses, and scrapes the others as docs/monitoring.md says: the first is of a machine, the
// rest of a cluster. It has the rules of deploy/monitoring.
func startPrometheus(t *testing.T, dir string, addresses []string) scraper {
	t.Helper()
	alerts, err := filepath.Abs(directory + "/rules.yaml")
	check.OK(t, err)
	config := fmt.Sprintf(`
global: {scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}
rule_files: [%q]
scrape_configs:
  - job_name: ashlar
    honor_labels: true
    static_configs:
      - {targets: [%q], labels: {cluster: machine, node: machine}}
      - {targets: [%q], labels: {cluster: cluster, node: node}}
      - {targets: [%q], labels: {cluster: cluster}}
`, alerts, addresses[0], addresses[1], addresses[2])
	p := scraper{prometheus.Start(t, filepath.Dir(tool(t, "prometheus")), dir, addresses[3], config)}
	p.Eventually(t, `count(up == 1) == 3`)
	return p
}

// shown: each panel shows something of a cluster, but those that have nothing to show while all is well, and some others.
func (p scraper) shown(t *testing.T, cluster string, others map[string]string) {
	for name, d := range dashboards(t) {
		for _, panel := range d.Panels {
			where, empty := name+": "+panel.Title, true
			for _, target := range panel.Targets {
				text := variables.Replace(strings.ReplaceAll(strings.ReplaceAll(target.Expr, "$__rate_interval", "1m"), "$cluster", cluster))
				for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(time.Second) { // rates need two scrapes
					found, err := p.Query(t.Context(), text)
					if err != nil {
						t.Errorf("%s: %v: %s", where, err, text)
					}
					if empty = empty && len(found) == 0; !empty || err != nil || quiet[where] != "" || others[where] != "" || time.Now().After(deadline) {
						break
					}
				}
			}
			if why := quiet[where] + others[where]; panel.Type != "row" && empty && why == "" {
				t.Errorf("%s shows nothing", where)
			}
		}
	}
}

// conventions: promtool finds nothing wrong with the names and the help of our metrics. (Libraries have theirs.)
func conventions(t *testing.T, addresses []string) {
	for _, address := range addresses {
		response, err := http.Get("http://" + address + "/metrics")
		check.OK(t, err)
		text, err := io.ReadAll(response.Body)
		check.OK(t, errors.Join(err, response.Body.Close()))
		if !strings.Contains(string(text), "\nashlar_build_info{") {
			t.Errorf("%s has no ashlar_build_info: %.500s", address, text)
		}
		promtool := exec.Command(tool(t, "promtool"), "check", "metrics")
		promtool.Stdin = bytes.NewReader(text)
		said, _ := promtool.CombinedOutput()
		for line := range strings.Lines(string(said)) {
			if strings.Contains(line, "ashlar_") || strings.HasPrefix(line, "error") {
				t.Errorf("%s: %s", address, line)
			}
		}
	}
}

// well: Prometheus evaluates all rules, and no alert is on, but for a moment in which a busy machine answered no scrape.
func (p scraper) well(t *testing.T) {
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Second) {
		all, err := p.Rules(t.Context())
		check.OK(t, err)
		var wrong []string
		for _, r := range all {
			if r.Health != "ok" || r.State != "inactive" {
				wrong = append(wrong, fmt.Sprintf("%s: %s %s, %s", r.Name, r.Health, r.LastError, r.State))
			}
		}
		if want := len(rules(t)); len(all) != want {
			t.Fatalf("%d rules, want %d", len(all), want)
		}
		if len(wrong) == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(strings.Join(wrong, "\n"))
		}
	}
}
