package monitoring

import (
	"encoding/json"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/VictoriaMetrics/metricsql"

	"github.com/ashlar-csi/ashlar/internal/runbook"
	"github.com/ashlar-csi/ashlar/pkg/metrics"
)

// target are labels that each series may have from Prometheus: of what was scraped, and of where.
var target = []string{"cluster", "instance", "job", "namespace", "node", "pod"}

// libraries are the metrics that others declare: csi-lib-utils, client-go, client_golang, and Prometheus itself. That the driver has them
// TestScrape finds out.
var libraries = map[string][]string{
	"csi_plugin_operations_seconds": {"driver_name", "grpc_status_code", "method_name"},
	"rest_client_requests_total":    {"code", "host", "method"},
	"process_cpu_seconds_total":     nil,
	"process_resident_memory_bytes": nil,
	"ALERTS":                        {"alertname", "alertstate", "severity"},
}

// values are all that some labels may have.
var values = map[string][]string{
	"severity":   {"DataLoss", "Inaccessible", "Degraded"},
	"state":      {"making", "ready", "deleting", "failed", "lost"},
	"alertstate": {"firing"},
	"grpc_status_code": {"OK", "Canceled", "Unknown", "InvalidArgument", "DeadlineExceeded", "NotFound", "AlreadyExists", "PermissionDenied", "ResourceExhausted",
		"FailedPrecondition", "Aborted", "OutOfRange", "Unimplemented", "Internal", "Unavailable", "DataLoss"},
}

// known returns the labels of each metric, with the series that a histogram has.
func known() map[string][]string {
	all, histograms := maps.Clone(libraries), []string{"csi_plugin_operations_seconds"}
	for _, m := range metrics.All() {
		all[m.Name] = m.Labels
		if m.Type == "histogram" {
			histograms = append(histograms, m.Name)
		}
	}
	for _, name := range histograms {
		for _, part := range []string{"_sum", "_count"} {
			all[name+part] = all[name]
		}
		all[name+"_bucket"] = append(slices.Clone(all[name]), "le")
		delete(all, name)
	}
	return all
}

// expression is one of an alert or of a dashboard.
type expression struct{ where, text string }

// variables of dashboards, and what stands for them when nobody has chosen.
var variables = strings.NewReplacer("$__rate_interval", "1m", "$cluster", ".*", "$job", ".*", "$node", ".*", "$pool", ".*")

func expressions(t *testing.T) (all []expression) {
	t.Helper()
	for _, r := range rules(t) {
		all = append(all, expression{r.Alert, r.Expr})
		for _, m := range regexp.MustCompile(`query \(printf "((?:\\.|[^"])*)"`).FindAllStringSubmatch(r.Annotations["description"], -1) {
			var text string
			if err := json.Unmarshal([]byte(`"`+m[1]+`"`), &text); err != nil {
				t.Fatal(err)
			}
			all = append(all, expression{r.Alert + "'s description", strings.ReplaceAll(text, "%q", `"x"`)})
		}
	}
	for name, d := range dashboards(t) {
		for _, p := range d.Panels {
			for _, target := range p.Targets {
				all = append(all, expression{name + ": " + p.Title, variables.Replace(target.Expr)})
			}
		}
		for _, v := range d.Templating.List {
			if m := regexp.MustCompile(`^label_values\((.*), (\w+)\)$`).FindStringSubmatch(v.Definition); m != nil {
				all = append(all, expression{name + ": variable " + v.Name, "count by (" + m[2] + ") (" + variables.Replace(m[1]) + ")"})
			} else if v.Type == "query" {
				t.Errorf("%s: variable %s is %q", name, v.Name, v.Definition)
			}
		}
	}
	return all
}

// TestExpressions: each expression of an alert or a dashboard names metrics that the driver declares, with labels that they have, and values that
// these may have.
func TestExpressions(t *testing.T) {
	all, asked := known(), map[string]bool{}
	for _, e := range expressions(t) {
		parsed, err := metricsql.Parse(e.text)
		if err != nil {
			t.Errorf("%s: %v: %s", e.where, err, e.text)
			continue
		}
		labels := slices.Clone(target)
		for _, selector := range selectors(parsed) {
			name := selector[0].Value
			have, there := all[name]
			if selector[0].Label != "__name__" || !there {
				t.Errorf("%s: the driver has no metric %s", e.where, name)
				continue
			}
			asked[name] = true
			labels = append(labels, have...)
			for _, filter := range selector[1:] {
				if !slices.Contains(append(slices.Clone(target), have...), filter.Label) {
					t.Errorf("%s: %s has no label %s", e.where, name, filter.Label)
				}
				checkValue(t, e.where, filter)
			}
		}
		for _, label := range groups(parsed) {
			if !slices.Contains(labels, label) {
				t.Errorf("%s: none of its metrics has the label %s: %s", e.where, label, e.text)
			}
		}
	}
	for name := range all {
		base := regexp.MustCompile(`_(bucket|sum|count)$`).ReplaceAllString(name, "")
		if !slices.ContainsFunc(slices.Collect(maps.Keys(asked)), func(a string) bool { return strings.HasPrefix(a, base) }) {
			t.Errorf("no alert and no dashboard shows %s", name)
		}
	}
}

// selectors are the filters of each metric in an expression; the first is its name.
func selectors(e metricsql.Expr) (all [][]metricsql.LabelFilter) {
	metricsql.VisitAll(e, func(e metricsql.Expr) {
		if m, ok := e.(*metricsql.MetricExpr); ok {
			all = append(all, m.LabelFilterss...)
		}
	})
	return all
}

// groups are the labels that an expression groups or matches by.
func groups(e metricsql.Expr) (all []string) {
	metricsql.VisitAll(e, func(e metricsql.Expr) {
		if m, ok := e.(*metricsql.ModifierExpr); ok {
			all = append(all, m.Args...)
		}
	})
	return all
}

// checkValue: what a filter asks for is something that there may be.
func checkValue(t *testing.T, where string, filter metricsql.LabelFilter) {
	t.Helper()
	words := regexp.MustCompile(`^\w+(\|\w+)*$`)
	if !words.MatchString(filter.Value) {
		return
	}
	for _, value := range strings.Split(filter.Value, "|") {
		may := values[filter.Label]
		if filter.Label == "reason" && strings.HasSuffix(runbook.URL(value), "/README.md") || may != nil && !slices.Contains(may, value) {
			t.Errorf("%s: %s is never %s", where, filter.Label, value)
		}
	}
}
