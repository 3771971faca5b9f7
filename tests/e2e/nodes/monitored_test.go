//go:build e2e

package nodes

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/metrics"
)

// unseen are the metrics that a cluster does not have in which all is well and nothing takes long, with the reason.
var unseen = map[string]string{
	"ashlar_agent_failures_total":     "nothing failed, maybe",
	"ashlar_calls_busy_total":         "no call met another, maybe",
	"ashlar_copied_bytes_total":       "nothing was copied, maybe",
	"ashlar_copies_in_progress":       "nothing is",
	"ashlar_disk_errors":              "loop devices have no SMART",
	"ashlar_disk_healthy":             "loop devices have no SMART",
	"ashlar_disk_wear_ratio":          "loop devices have no SMART",
	"ashlar_mirrored_bytes_total":     "nothing moves while it is used",
	"ashlar_mirrors_in_progress":      "nothing does",
	"ashlar_pool_problems":            "there are none",
	"ashlar_pool_thin_data_ratio":     "no pool is a thin pool",
	"ashlar_pool_thin_metadata_ratio": "no pool is a thin pool",
	"ashlar_remote_volumes_away":      "no node is in a network",
	"ashlar_volume_problems":          "there are none",
}

// TestMonitored: a Prometheus by docs/monitoring.md has all pods of the driver as targets, which answer, and with the rules as we ship
// them nothing fires while all is well. The ports that it asks are those that the network policies leave open for it. (The cluster of
// the tests enforces no policy.)
func TestMonitored(t *testing.T) {
	c := start(t)
	for i, node := range c.nodes { // so that there is something to count
		name := fmt.Sprint("data-", i)
		c.claim(claim{name: name})
		c.pod(pod{name: name, node: node, claims: []string{name}})
	}
	c.runs("data-0", "data-1", "data-2")
	p := c.monitor(false)
	controllers := 0
	for _, pod := range c.scraped() {
		if pod.Labels["app.kubernetes.io/component"] == "controller" {
			controllers++
		}
	}
	p.Eventually(t, fmt.Sprintf("count(up{job=\"ashlar\"} == 1) == %d", len(c.nodes)+controllers))
	if controllers != 2 {
		t.Errorf("%d controllers", controllers)
	}
	p.Eventually(t, fmt.Sprintf("sum(ashlar_pool_volumes) >= %d", len(c.nodes)))
	for _, node := range c.nodes {
		p.Eventually(t, fmt.Sprintf("ashlar_pool_up{node=%q} == 1 and on (node) ashlar_node_agent_up == 1", node))
	}
	p.Eventually(t, `csi_plugin_operations_seconds_count{method_name="/csi.v1.Node/NodeStageVolume", grpc_status_code="OK"} > 0`)

	var names []string
	check.OK(t, p.Get(t.Context(), "label/__name__/values", url.Values{"match[]": {`{__name__=~"ashlar_.+"}`}}, &names))
	declared := map[string]bool{}
	for _, m := range metrics.All() {
		declared[m.Name] = true
		seen := slices.ContainsFunc(names, func(n string) bool { return n == m.Name || n == m.Name+"_count" })
		if !seen && !m.PerVolume && unseen[m.Name] == "" {
			t.Errorf("nobody has %s", m.Name)
		}
	}
	for _, name := range names {
		if base := strings.TrimSuffix(strings.TrimSuffix(strings.TrimSuffix(name, "_bucket"), "_count"), "_sum"); !declared[name] && !declared[base] {
			t.Errorf("%s is not declared", name)
		}
	}
	c.eventually("all rules were evaluated", func() error {
		all, err := p.Rules(t.Context())
		if err == nil && len(all) < 15 {
			err = fmt.Errorf("there are %d", len(all))
		}
		for _, r := range all {
			if r.Health != "ok" {
				err = errors.Join(err, fmt.Errorf("%s: %s %s", r.Name, r.Health, r.LastError))
			}
		}
		return err
	})
	firing, err := p.Query(t.Context(), `ALERTS{alertstate="firing"}`)
	if check.OK(t, err); len(firing) > 0 {
		t.Errorf("all is well, and there are %+v", firing)
	}
	c.delete("pod", "data-0", "data-1", "data-2")
}

// scraped are the driver's pods, after a look at the policies: each lets in who asks for metrics, at the port that has them, from the
// namespace that docs/monitoring.md and the policies name.
func (c *cluster) scraped() []corev1.Pod {
	c.Helper()
	var pods corev1.PodList
	var policies networkingv1.NetworkPolicyList
	check.OK(c, errors.Join(c.kube.List(context.Background(), &pods, client.InNamespace("ashlar-system")), c.kube.List(context.Background(), &policies, client.InNamespace("ashlar-system"))))
	for _, pod := range pods.Items {
		at := slices.IndexFunc(pod.Spec.Containers[0].Ports, func(p corev1.ContainerPort) bool { return p.Name == "metrics" })
		if at < 0 {
			c.Fatalf("pod %s has no port for metrics", pod.Name)
		}
		port := pod.Spec.Containers[0].Ports[at].ContainerPort
		open := slices.ContainsFunc(policies.Items, func(policy networkingv1.NetworkPolicy) bool {
			selector, err := metav1.LabelSelectorAsSelector(&policy.Spec.PodSelector)
			check.OK(c, err)
			return selector.Matches(labels.Set(pod.Labels)) && slices.ContainsFunc(policy.Spec.Ingress, func(rule networkingv1.NetworkPolicyIngressRule) bool {
				from := slices.ContainsFunc(rule.From, func(peer networkingv1.NetworkPolicyPeer) bool {
					return peer.NamespaceSelector != nil && peer.NamespaceSelector.MatchLabels[corev1.LabelMetadataName] == "monitoring"
				})
				return from && slices.ContainsFunc(rule.Ports, func(p networkingv1.NetworkPolicyPort) bool { return p.Port.IntValue() == int(port) })
			})
		})
		if !open {
			c.Errorf("no policy lets Prometheus ask port %d of %s", port, pod.Name)
		}
	}
	return pods.Items
}
