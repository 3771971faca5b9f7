package deploy

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

const monitoring = "../../deploy/monitoring"

// allMonitoring are values that switch on all that the chart has for Prometheus and Grafana.
const allMonitoring = `{monitoring: {podMonitors: {create: true}, prometheusRule: {create: true}, dashboards: {create: true}}}`

// TestMonitoring: deploy/monitoring and the chart with all of it switched on make the same objects; without that the chart makes none of them.
func TestMonitoring(t *testing.T) {
	want, with, without := strip(build(t, monitoring)), strip(render(t, allMonitoring)), render(t, "")
	if len(want) != 6 {
		t.Errorf("%d objects, want two PodMonitors, a PrometheusRule and three ConfigMaps", len(want))
	}
	for key, object := range want {
		if !reflect.DeepEqual(with[key], object) {
			t.Errorf("%s: the chart's\n%.2000s\ndeploy/monitoring's\n%.2000s", key, text(with[key]), text(object))
		}
		if without[key] != nil {
			t.Errorf("the chart makes %s without being asked to", key)
		}
	}
	if len(with) != len(without)+len(want) {
		t.Errorf("the chart makes %d objects for monitoring, deploy/monitoring %d", len(with)-len(without), len(want))
	}
}

// TestPodMonitorsFindPods: each PodMonitor selects the pods of one part, and these have the port that it scrapes.
func TestPodMonitorsFindPods(t *testing.T) {
	pods := build(t, manifests)
	found := map[string]int{}
	for key, monitor := range build(t, monitoring) {
		if !strings.HasPrefix(key, "PodMonitor ") {
			continue
		}
		for kind, name := range map[string]string{"Deployment": "ashlar-controller", "DaemonSet": "ashlar-node"} {
			part := pods.of(t, kind, name)
			labels := dig(part, "spec", "template", "metadata", "labels").(map[string]any)
			selected := true
			for label, value := range dig(monitor, "spec", "selector", "matchLabels").(map[string]any) {
				selected = selected && labels[label] == value
			}
			if !selected {
				continue
			}
			found[name]++
			port := dig(monitor, "spec", "podMetricsEndpoints").([]any)[0].(map[string]any)["port"]
			if ports := text(container(t, part, "driver")["ports"]); !strings.Contains(ports, "name: "+port.(string)+"\n") {
				t.Errorf("%s scrapes the port %s, which %s does not have: %s", key, port, name, ports)
			}
		}
	}
	if !reflect.DeepEqual(found, map[string]int{"ashlar-controller": 1, "ashlar-node": 1}) {
		t.Errorf("selected: %v", found)
	}
	if _, err := template(`{metrics: {enabled: false}, monitoring: {podMonitors: {create: true}}}`); err == nil || !strings.Contains(err.Error(), "metrics.enabled") {
		t.Errorf("PodMonitors of pods without metrics: %v", err)
	}
}

// TestMonitoringValues: labels, annotations and the interval are those that were asked for.
func TestMonitoringValues(t *testing.T) {
	all := render(t, `{monitoring: {podMonitors: {create: true, labels: {release: mine}, interval: 15s}, prometheusRule: {create: true, labels: {release: mine}},
		dashboards: {create: true, labels: {dashboards: "yes"}, annotations: {grafana_folder: Storage}}}}`)
	for _, name := range []string{"ashlar-controller", "ashlar-node"} {
		monitor := all.of(t, "PodMonitor", name)
		endpoint := dig(monitor, "spec", "podMetricsEndpoints").([]any)[0].(map[string]any)
		if dig(monitor, "metadata", "labels", "release") != "mine" || endpoint["interval"] != "15s" {
			t.Errorf("%s", text(monitor))
		}
	}
	if rule := all.of(t, "PrometheusRule", "ashlar"); dig(rule, "metadata", "labels", "release") != "mine" {
		t.Errorf("%.500s", text(rule))
	}
	board := all.of(t, "ConfigMap", "ashlar-dashboard-fleet")
	if dig(board, "metadata", "labels", "dashboards") != "yes" || dig(board, "metadata", "annotations", "grafana_folder") != "Storage" {
		t.Errorf("%.500s", text(board["metadata"]))
	}
	file, err := os.ReadFile(filepath.Join(monitoring, "dashboards/fleet.json"))
	if err != nil || dig(board, "data", "fleet.json") != string(file) {
		t.Errorf("the dashboard is another one (%v)", err)
	}
	for _, bad := range []string{`{monitoring: {podMonitor: {}}}`, `{monitoring: {podMonitors: {interval: often}}}`, `{monitoring: {dashboards: {labels: [a]}}}`} {
		if _, err := template(bad); err == nil || !strings.Contains(err.Error(), "schema") {
			t.Errorf("%s: %v", bad, err)
		}
	}
}
