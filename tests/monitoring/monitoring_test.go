// Package monitoring tests the alerts and dashboards of deploy/monitoring, with Prometheus' own tools (hack/install-tools.sh monitoring brings them).
package monitoring

import (
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

const (
	root      = "../.."
	directory = root + "/deploy/monitoring"
)

// tool returns the path of prometheus or promtool.
func tool(t *testing.T, name string) string {
	t.Helper()
	path, err := filepath.Abs(filepath.Join(root, "bin", name))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("%v: run hack/install-tools.sh monitoring", err)
	}
	return path
}

// group of rules, as Prometheus reads it.
type group struct {
	Name  string `json:"name"`
	Rules []rule `json:"rules"`
}

type rule struct {
	Alert         string            `json:"alert"`
	Expr          string            `json:"expr"`
	For           string            `json:"for"`
	KeepFiringFor string            `json:"keep_firing_for"`
	Labels        map[string]string `json:"labels"`
	Annotations   map[string]string `json:"annotations"`
}

func read(t *testing.T, path string, to any) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err == nil {
		err = yaml.UnmarshalStrict(text, to)
	}
	if err != nil {
		t.Fatalf("%s: %v", path, err)
	}
}

func rules(t *testing.T) (all []rule) {
	t.Helper()
	var file struct {
		Groups []group `json:"groups"`
	}
	read(t, directory+"/rules.yaml", &file)
	for _, g := range file.Groups {
		all = append(all, g.Rules...)
	}
	return all
}

// names are the alerts that there are to be: others refer to them.
var names = []string{"AshlarAgentDown", "AshlarCallsFailing", "AshlarCommandsFailing", "AshlarControllerDown", "AshlarDiskDegraded", "AshlarDiskFailing", "AshlarDriverGone", "AshlarHomeAway", "AshlarLongFreeze",
	"AshlarLoopDevicesLow", "AshlarPoolDegraded",
	"AshlarPoolDown", "AshlarPoolFull", "AshlarPoolNearlyFull", "AshlarReplicasDiffer", "AshlarReplicasMissing", "AshlarRequestsStuck", "AshlarStrays", "AshlarThinPoolNearlyFull", "AshlarVolumeDataLoss", "AshlarVolumeDegraded", "AshlarVolumeInaccessible"}

// TestAlerts: promtool takes the rules, and each alert does in its unit tests what it is to do.
func TestAlerts(t *testing.T) {
	cases, err := filepath.Glob("alerts/*.yaml")
	if err != nil || len(cases) == 0 {
		t.Fatalf("no cases: %v", err)
	}
	for _, args := range [][]string{{"check", "rules", "--lint=all", "--lint-fatal", directory + "/rules.yaml"}, append([]string{"test", "rules"}, cases...)} {
		if out, err := exec.Command(tool(t, "promtool"), args...).CombinedOutput(); err != nil {
			t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
}

// TestEachAlertIsTested: of each alert the unit tests have a case in which it fires and one in which it does not, in each severity that it has.
func TestEachAlertIsTested(t *testing.T) {
	fires, silent := map[string]bool{}, map[string]bool{}
	cases, _ := filepath.Glob("alerts/*.yaml")
	for _, path := range cases {
		var file struct {
			Tests []struct {
				Alerts []struct {
					Name     string `json:"alertname"`
					Expected []struct {
						Labels map[string]string `json:"exp_labels"`
					} `json:"exp_alerts"`
				} `json:"alert_rule_test"`
			} `json:"tests"`
		}
		text, err := os.ReadFile(path)
		if err == nil {
			err = yaml.Unmarshal(text, &file)
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range file.Tests {
			for _, a := range c.Alerts {
				if len(a.Expected) == 0 {
					silent[a.Name] = true
				}
				for _, one := range a.Expected {
					fires[a.Name+" "+one.Labels["severity"]] = true
				}
			}
		}
	}
	for _, r := range rules(t) {
		if !fires[r.Alert+" "+r.Labels["severity"]] {
			t.Errorf("no test has %s fire as %s", r.Alert, r.Labels["severity"])
		}
		if !silent[r.Alert] {
			t.Errorf("no test has %s silent", r.Alert)
		}
	}
}

// TestAlertsSayWhatToDo: each alert says how bad it is, what is so, and what to do, and leads to a page about it; it waits before it fires, and
// does not flap.
func TestAlertsSayWhatToDo(t *testing.T) {
	var have []string
	for _, r := range rules(t) {
		have = append(have, r.Alert)
		if s := r.Labels["severity"]; len(r.Labels) != 1 || (s != "critical" && s != "warning") {
			t.Errorf("%s: labels %v", r.Alert, r.Labels)
		}
		if r.For == "" || r.KeepFiringFor == "" {
			t.Errorf("%s: for %q, keep_firing_for %q", r.Alert, r.For, r.KeepFiringFor)
		}
		if len(r.Annotations) != 3 || r.Annotations["summary"] == "" || len(r.Annotations["description"]) < 50 {
			t.Errorf("%s: annotations %v", r.Alert, r.Annotations)
		}
		const pages = "https://github.com/ashlar-csi/ashlar/blob/main/"
		page, ours := strings.CutPrefix(r.Annotations["runbook_url"], pages)
		text, err := os.ReadFile(filepath.Join(root, page))
		if !ours || err != nil || !strings.HasPrefix(page, "docs/runbooks/") {
			t.Errorf("%s: runbook %q: %v", r.Alert, r.Annotations["runbook_url"], err)
		} else if title, _, _ := strings.Cut(string(text), "\n"); !strings.Contains(title, r.Alert) {
			t.Errorf("%s: its runbook is about something else: %s", r.Alert, title)
		}
		for _, page := range []string{"docs/runbooks/README.md", "docs/monitoring.md"} {
			if text, err := os.ReadFile(filepath.Join(root, page)); err != nil || !strings.Contains(string(text), "| "+r.Alert+" ") {
				t.Errorf("%s is not in the table of %s: %v", r.Alert, page, err)
			}
		}
	}
	slices.Sort(have)
	if have = slices.Compact(have); !slices.Equal(have, names) {
		t.Errorf("alerts %v, want %v", have, names)
	}
}

// TestPrometheusRule: the object for the Prometheus operator has the same rules (make generate).
func TestPrometheusRule(t *testing.T) {
	var object, file map[string]any
	read(t, directory+"/prometheusrule.yaml", &object)
	read(t, directory+"/rules.yaml", &file)
	if !reflect.DeepEqual(object["spec"], any(file)) {
		t.Error("prometheusrule.yaml is not what make generate makes of rules.yaml")
	}
}

// TestDocumentedConfiguration: Prometheus takes the configurations of docs/monitoring.md, and the inhibitions there are of alerts that there are.
func TestDocumentedConfiguration(t *testing.T) {
	text, err := os.ReadFile(root + "/docs/monitoring.md")
	if err != nil {
		t.Fatal(err)
	}
	alerts, err := os.ReadFile(directory + "/rules.yaml")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.WriteFile(dir+"/ashlar-rules.yaml", alerts, 0o600); err != nil {
		t.Fatal(err)
	}
	configurations, inhibitions := 0, 0
	for _, m := range regexp.MustCompile("(?s)\n```yaml\n(.*?)```\n").FindAllSubmatch(text, -1) {
		var block map[string]any
		if err := yaml.UnmarshalStrict(m[1], &block); err != nil {
			t.Errorf("%v: %s", err, m[1])
		}
		if block["inhibit_rules"] != nil {
			for _, name := range regexp.MustCompile(`Ashlar\w+`).FindAllString(string(m[1]), -1) {
				inhibitions++
				if !slices.Contains(names, name) {
					t.Errorf("there is no alert %s", name)
				}
			}
		}
		if block["scrape_configs"] == nil {
			continue
		}
		configurations++
		path := dir + "/prometheus.yaml"
		debian := regexp.MustCompile(`kubernetes_sd_configs: .*`).ReplaceAll(m[1], []byte("static_configs: []")) // its Prometheus does not know Kubernetes
		if err := os.WriteFile(path, debian, 0o600); err != nil {
			t.Fatal(err)
		}
		if out, err := exec.Command(tool(t, "promtool"), "check", "config", path).CombinedOutput(); err != nil {
			t.Errorf("promtool check config: %v\n%s\n%s", err, out, m[1])
		}
	}
	if configurations != 2 || inhibitions < 5 {
		t.Errorf("%d configurations, %d inhibitions", configurations, inhibitions)
	}
}
