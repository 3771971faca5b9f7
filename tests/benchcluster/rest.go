package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/grpc"
	appsv1 "k8s.io/api/apps/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/ashlar-csi/ashlar/tests/figures"
)

const (
	system = "ashlar-system"
	// scrapeEvery is how often Prometheus reads each pod; its own default is a minute, that of its operator half of one.
	scrapeEvery = 15 * time.Second
)

// sights are the flags by which the driver shows what it does, for its containers in the controller's pods and the nodes'; and all
// flags that are of that kind.
type sights struct {
	controller, node, all []string
}

func sightsOf(traces string) sights {
	return sights{
		controller: []string{"--metrics-endpoint=:9810", "--page=:9820", "--trace-endpoint=" + traces},
		node:       []string{"--metrics-endpoint=:9811", "--metrics-per-volume", "--trace-endpoint=" + traces},
		all:        []string{"--metrics-endpoint", "--metrics-per-volume", "--page", "--trace-endpoint"},
	}
}

// spans takes traces, as a collector does, and keeps none.
type spans struct {
	collector.UnimplementedTraceServiceServer
	taken atomic.Int64
}

func (s *spans) Export(_ context.Context, request *collector.ExportTraceServiceRequest) (*collector.ExportTraceServiceResponse, error) {
	for _, of := range request.GetResourceSpans() {
		for _, scope := range of.GetScopeSpans() {
			s.taken.Add(int64(len(scope.GetSpans())))
		}
	}
	return &collector.ExportTraceServiceResponse{}, nil
}

// collect has traces taken until stop. They are to be sent to the address, which pods reach as they do the API server, beside which this runs.
func (s *spans) collect(apiServer string) (address string, stop func(), err error) {
	at, err := url.Parse(apiServer)
	if err != nil {
		return "", nil, err
	}
	listener, err := net.Listen("tcp", net.JoinHostPort(at.Hostname(), "0"))
	if err != nil {
		return "", nil, fmt.Errorf("take traces beside the API server (cluster.sh net runs this there): %w", err)
	}
	server := grpc.NewServer()
	collector.RegisterTraceServiceServer(server, s)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = server.Serve(listener) // until it is stopped
	}()
	return listener.Addr().String(), func() { server.Stop(); <-ended }, nil
}

// measureRest measures the driver's pods that have nothing to do: with all that they can show, read as Prometheus and a collector of traces do,
// and with nothing of it, in turn. The processes have to be seen from here.
func measureRest(ctx context.Context, args []string) (err error) {
	flags := flag.NewFlagSet("rest", flag.ExitOnError)
	kubeconfig := flags.String("kubeconfig", "", "how to reach the cluster")
	claims := flags.Int("claims", 100, "how many volumes there are")
	rounds := flags.Int("rounds", 2, "how often each way is measured")
	settle := flags.Duration("settle", time.Minute, "how long pods are left alone after they started")
	length := flags.Duration("length", 3*time.Minute, "how long each measurement takes")
	_ = flags.Parse(args) // it exits
	config, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	if err != nil {
		return err
	}
	config.QPS, config.UserAgent = -1, "bench"
	c := &inCluster{seen: map[string]time.Time{}, news: make(chan struct{}, 1)}
	if c.kube, err = kubernetes.NewForConfig(config); err != nil {
		return err
	}
	if err := c.watch(ctx); err != nil {
		return err
	}
	if err := c.prepareAnew(ctx); err != nil {
		return err
	}
	defer c.clean(ctx)
	name := numbered("rest")
	var names []string
	for i := range *claims {
		names = append(names, name(i))
		if err := c.makeClaim(ctx, name(i), immediate); err != nil {
			return err
		}
	}
	if _, err := c.until(ctx, "bound", names); err != nil {
		return err
	}
	found, err := c.inTurn(ctx, config.Host, *rounds, *settle, *length)
	if err != nil {
		return err
	}
	printRest(found, *claims, *length)
	return each(ctx, *claims, 8, func(ctx context.Context, i int) error { return c.deleteClaim(ctx, name(i)) })
}

// inTurn measures the pods with nothing to be seen of them (false) and with all (true), by process.
func (c *inCluster) inTurn(ctx context.Context, apiServer string, rounds int, settle, length time.Duration) (map[bool]map[string][]atRest, error) {
	traces := &spans{}
	address, stop, err := traces.collect(apiServer)
	if err != nil {
		return nil, err
	}
	defer stop()
	sights := sightsOf(address)
	found := map[bool]map[string][]atRest{true: {}, false: {}}
	for round := range rounds {
		for _, seen := range []bool{round%2 == 0, round%2 != 0} { // each goes first as often as the other
			if err := c.show(ctx, sights, seen); err != nil {
				return nil, err
			}
			before := traces.taken.Load()
			one, err := c.watchRest(ctx, seen, settle, length)
			if err != nil {
				return nil, err
			}
			if came := traces.taken.Load() - before; (came > 0) != seen {
				return nil, fmt.Errorf("%d spans came, and traces were to be sent: %v", came, seen)
			}
			for process, measured := range one {
				found[seen][process] = append(found[seen][process], measured...)
			}
		}
	}
	return found, c.show(ctx, sights, true)
}

// prepareAnew prepares the cluster; what another measurement prepared may be going still.
func (c *inCluster) prepareAnew(ctx context.Context) error {
	err := c.prepare(ctx)
	for end := time.Now().Add(5 * time.Minute); apierrors.IsAlreadyExists(err) && time.Now().Before(end); err = c.prepare(ctx) {
		time.Sleep(time.Second)
	}
	return err
}

func printRest(found map[bool]map[string][]atRest, claims int, length time.Duration) {
	fmt.Printf("\n### At rest\n\nThe driver's containers with %d volumes and nothing to do for %s, in turn with nothing to be seen of them, and with metrics (of each volume, too, read every %s)\n"+
		"and the page, and traces of all calls. Median of all replicas and rounds (least..most).\n", claims, length, scrapeEvery)
	var rows [][]string
	for _, process := range slices.Sorted(maps.Keys(found[true])) {
		row := []string{process}
		for _, figure := range []func(atRest) float64{
			func(r atRest) float64 { return float64(r.rss) / 1024 },
			func(r atRest) float64 { return float64(r.cgroup) / (1 << 20) },
			func(r atRest) float64 { return float64(r.cpu.Milliseconds()) / length.Minutes() },
		} {
			for _, seen := range []bool{false, true} {
				var values []float64
				for _, r := range found[seen][process] {
					values = append(values, figure(r))
				}
				row = append(row, fmt.Sprintf("%.0f (%.0f..%.0f)", figures.Median(values), figures.Quantile(values, 0), figures.Quantile(values, 1)))
			}
		}
		rows = append(rows, row)
	}
	figures.Table([]string{"container", "RSS, MiB, nothing", "all of it", "cgroup, MiB, nothing", "all of it", "processor, ms per minute, nothing", "all of it"}, rows)
}

// show has the driver show all that it can, or nothing, and waits until all pods do.
func (c *inCluster) show(ctx context.Context, sights sights, all bool) error {
	fmt.Fprintln(os.Stderr, time.Now().Format("15:04:05"), "all of it is shown:", all)
	args := func(have, want []string) []string {
		kept := slices.DeleteFunc(slices.Clone(have), func(arg string) bool {
			flag, _, _ := strings.Cut(arg, "=")
			return slices.Contains(sights.all, flag)
		})
		if all {
			kept = append(kept, want...)
		}
		return kept
	}
	apps := c.kube.AppsV1()
	deployment, err := apps.Deployments(system).Get(ctx, "ashlar-controller", metav1.GetOptions{})
	if err != nil {
		return err
	}
	first := &deployment.Spec.Template.Spec.Containers[0]
	first.Args = args(first.Args, sights.controller)
	if _, err := apps.Deployments(system).Update(ctx, deployment, metav1.UpdateOptions{}); err != nil {
		return err
	}
	set, err := apps.DaemonSets(system).Get(ctx, "ashlar-node", metav1.GetOptions{})
	if err != nil {
		return err
	}
	first = &set.Spec.Template.Spec.Containers[0]
	first.Args = args(first.Args, sights.node)
	if _, err := apps.DaemonSets(system).Update(ctx, set, metav1.UpdateOptions{}); err != nil {
		return err
	}
	return c.rolledOut(ctx)
}

func (c *inCluster) rolledOut(ctx context.Context) error {
	for end := time.Now().Add(10 * time.Minute); time.Now().Before(end); time.Sleep(time.Second) {
		d, err := c.kube.AppsV1().Deployments(system).Get(ctx, "ashlar-controller", metav1.GetOptions{})
		if err != nil {
			return err
		}
		s, err := c.kube.AppsV1().DaemonSets(system).Get(ctx, "ashlar-node", metav1.GetOptions{})
		if err != nil {
			return err
		}
		pods, err := c.kube.CoreV1().Pods(system).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		if done(d, s) && len(pods.Items) == int(d.Status.Replicas+s.Status.DesiredNumberScheduled) {
			return nil
		}
	}
	return errors.New("the pods were not replaced in 10 minutes")
}

func done(d *appsv1.Deployment, s *appsv1.DaemonSet) bool {
	return d.Status.ObservedGeneration >= d.Generation && d.Status.UpdatedReplicas == d.Status.Replicas && d.Status.AvailableReplicas == d.Status.Replicas &&
		s.Status.ObservedGeneration >= s.Generation && s.Status.UpdatedNumberScheduled == s.Status.DesiredNumberScheduled && s.Status.NumberAvailable == s.Status.DesiredNumberScheduled
}

// atRest is a process that had nothing to do.
type atRest struct {
	rss    int64 // KiB
	cgroup int64 // bytes, of its container
	cpu    time.Duration
}

// watchRest measures the driver's processes, which are scraped meanwhile if they can be.
func (c *inCluster) watchRest(ctx context.Context, scraped bool, settle, length time.Duration) (map[string][]atRest, error) {
	if err := wait(ctx, settle); err != nil {
		return nil, err
	}
	before := map[int]time.Duration{}
	processes := drivers()
	if len(processes) == 0 {
		return nil, errors.New("no process of the driver can be seen from here")
	}
	for pid := range processes {
		before[pid] = processor(pid)
	}
	for end := time.Now().Add(length); time.Now().Before(end); {
		began := time.Now()
		if scraped {
			if err := c.scrape(ctx); err != nil {
				return nil, err
			}
		}
		if err := wait(ctx, min(scrapeEvery-time.Since(began), time.Until(end))); err != nil {
			return nil, err
		}
	}
	found := map[string][]atRest{}
	for pid, name := range processes {
		one := atRest{status(pid, "VmRSS"), cgroupMemory(pid), processor(pid) - before[pid]}
		if one.rss == 0 {
			return nil, fmt.Errorf("%s (%d) ended", name, pid)
		}
		found[name] = append(found[name], one)
	}
	return found, nil
}

func wait(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// scrape reads the metrics of all pods.
func (c *inCluster) scrape(ctx context.Context) error {
	pods, err := c.kube.CoreV1().Pods(system).List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, pod := range pods.Items {
		port := 9811
		if pod.Labels["app.kubernetes.io/component"] == "controller" {
			port = 9810
		}
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("http://%s:%d/metrics", pod.Status.PodIP, port), nil)
		if err != nil {
			return err
		}
		answer, err := http.DefaultClient.Do(request)
		if err != nil {
			return err
		}
		_, err = io.Copy(io.Discard, answer.Body)
		if err := errors.Join(err, answer.Body.Close()); err != nil || answer.StatusCode != http.StatusOK {
			return fmt.Errorf("%s: %s %w", request.URL, answer.Status, err)
		}
	}
	return nil
}

// drivers are the driver's own processes, by number.
func drivers() map[int]string {
	all := map[int]string{}
	found, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range found {
		line, _ := os.ReadFile(path)
		if name := resident(strings.Split(string(line), "\x00")); strings.HasPrefix(name, "ashlar ") {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(path)))
			all[pid] = name
		}
	}
	return all
}

// cgroupMemory is what the kernel counts for the container of a process, in bytes, by either version of cgroups; 0 if it does not say.
func cgroupMemory(pid int) int64 {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	var v1, v2 string
	for line := range strings.Lines(string(text)) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		switch {
		case len(parts) < 3:
		case slices.Contains(strings.Split(parts[1], ","), "memory"):
			v1 = "/sys/fs/cgroup/memory" + parts[2] + "/memory.usage_in_bytes"
		case parts[1] == "":
			v2 = "/sys/fs/cgroup" + parts[2] + "/memory.current"
		}
	}
	value, _ := os.ReadFile(cmp.Or(v1, v2))
	n, _ := strconv.ParseInt(strings.TrimSpace(string(value)), 10, 64)
	return n
}
