package main

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"path"
	"slices"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// callTimes is how often the kubelets have called the driver, by the method's name, and for how long in all.
type callTimes map[string]callTime

type callTime struct {
	n       uint64
	seconds float64
}

// kubeletCalls are those of all kubelets since they were started, by their metric csi_operations_seconds.
func (c *inCluster) kubeletCalls(ctx context.Context) (callTimes, error) {
	nodes, err := c.kube.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	calls := callTimes{}
	for i := range nodes.Items {
		raw, err := c.kube.CoreV1().RESTClient().Get().Resource("nodes").Name(nodes.Items[i].Name).SubResource("proxy").Suffix("metrics").DoRaw(ctx)
		if err != nil {
			return nil, fmt.Errorf("the kubelet's metrics: %w", err)
		}
		parser := expfmt.NewTextParser(model.LegacyValidation)
		families, err := parser.TextToMetricFamilies(bytes.NewReader(raw))
		if err != nil {
			return nil, fmt.Errorf("the kubelet's metrics: %w", err)
		}
		for _, metric := range families["csi_operations_seconds"].GetMetric() {
			labels := map[string]string{}
			for _, pair := range metric.GetLabel() {
				labels[pair.GetName()] = pair.GetValue()
			}
			if labels["driver_name"] == driverName && labels["grpc_status_code"] == "OK" {
				method := path.Base(labels["method_name"])
				t := calls[method]
				calls[method] = callTime{t.n + metric.GetHistogram().GetSampleCount(), t.seconds + metric.GetHistogram().GetSampleSum()}
			}
		}
	}
	return calls, nil
}

// less takes those away that were there before.
func (t callTimes) less(before callTimes) {
	for method, b := range before {
		t[method] = callTime{t[method].n - b.n, t[method].seconds - b.seconds}
	}
	maps.DeleteFunc(t, func(_ string, one callTime) bool { return one.n == 0 })
}

func (t callTimes) rows() (rows [][]string) {
	for _, method := range slices.Sorted(maps.Keys(t)) {
		rows = append(rows, []string{method, fmt.Sprint(t[method].n), fmt.Sprintf("%.3f", t[method].seconds/float64(t[method].n))})
	}
	return rows
}
