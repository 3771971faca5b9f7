package docs_test

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/ashlar-csi/ashlar/internal/runbook"
	"github.com/ashlar-csi/ashlar/pkg/cluster/events"
	"github.com/ashlar-csi/ashlar/pkg/metrics"
	"github.com/ashlar-csi/ashlar/tests/docs/reference"
)

var (
	// label is one of an alert, or its value, in its text.
	label = regexp.MustCompile(`\{\{ [^}$]*\$(?:labels\.)?(\w+)[^}]*\}\}`)
	// optional is a part of the text that is there only with a label.
	optional = regexp.MustCompile(`\{\{ with (\$labels\.\w+) \}\}(.*?)\{\{ \. \}\}(.*?)\{\{ end \}\}`)
)

// alerts is a group of the rules of deploy/monitoring.
type alerts struct {
	Name  string
	Rules []struct {
		Alert, For          string
		Labels, Annotations map[string]string
	}
}

// readAlerts are all groups.
func readAlerts(t *testing.T) []alerts {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, "deploy/monitoring/rules.yaml"))
	var rules struct{ Groups []alerts }
	if err == nil {
		err = yaml.Unmarshal(text, &rules)
	}
	if err != nil {
		t.Fatal(err)
	}
	return rules.Groups
}

// TestReferenceAlerts: the alerts of deploy/monitoring.
func TestReferenceAlerts(t *testing.T) {
	var page strings.Builder
	page.WriteString("# Alerts\n\nThey are in `deploy/monitoring/rules.yaml`; how to load them is in [Monitoring](../monitoring.md). *critical*: pods stop or data is in danger, now. *warning*: it will be so if nobody does anything.\n")
	for _, group := range readAlerts(t) {
		page.WriteString("\n## " + group.Name + "\n\n")
		var rows [][]string
		for _, r := range group.Rules {
			if r.Alert == "" {
				continue
			}
			_, file, _ := strings.Cut(r.Annotations["runbook_url"], "/docs/runbooks/")
			summary := optional.ReplaceAllString(r.Annotations["summary"], "$2{{ $1 }}$3")
			says := label.ReplaceAllStringFunc(summary, func(found string) string { return strings.ToUpper(label.FindStringSubmatch(found)[1]) })
			rows = append(rows, []string{"[" + r.Alert + "](../runbooks/" + file + ")", r.Labels["severity"], r.For, says})
		}
		page.WriteString(reference.Table([]string{"alert, and what to do", "severity", "after", "says"}, rows))
	}
	reference.Check(t, root, "alerts.md", page.String())
}

// TestReferenceMetrics: what the driver tells Prometheus.
func TestReferenceMetrics(t *testing.T) {
	var rows [][]string
	for _, m := range metrics.All() {
		var labels []string
		for _, label := range m.Labels {
			labels = append(labels, "`"+label+"`")
		}
		help := m.Help
		if m.PerVolume {
			help += " Only with `--metrics-per-volume`."
		}
		rows = append(rows, []string{"`" + m.Name + "`", m.Type, strings.Join(labels, ", "), help})
	}
	reference.Check(t, root, "metrics.md", "# Metrics\n\nWhat `--metrics-endpoint` serves, beside what libraries have: `csi_plugin_operations_seconds` (calls, by method and code), `rest_client_*` "+
		"(requests to the API server), `workqueue_*`, `go_*` and `process_*`.\n\n"+reference.Table([]string{"metric", "type", "labels", "is"}, rows))
}

// TestReferenceEvents: what kubectl describe shows, and so the reasons of all problems.
func TestReferenceEvents(t *testing.T) {
	var rows [][]string
	for _, e := range events.Table {
		_, file, found := strings.Cut(runbook.URL(e.Reason), "/docs/runbooks/")
		link := ""
		if found && file != "README.md" {
			link = "[what to do](../runbooks/" + file + ")"
		}
		rows = append(rows, []string{e.Reason, e.Type, strings.Join(slices.Clone(e.On), ", "), e.Means, link})
	}
	reference.Check(t, root, "events.md", "# Events\n\nWhat `kubectl describe` shows of claims, PersistentVolumes, Nodes and the driver's own objects, once for each state, as long as it lasts. The reasons are those of problems in "+
		"the objects' health, of `ashlar_pool_problems` and `ashlar_volume_problems`, and of CSI's volume health, too.\n\n"+reference.Table([]string{"reason", "type", "on", "means", ""}, rows))
}
