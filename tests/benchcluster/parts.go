package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/internal/process"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/agent"
	"github.com/ashlar-csi/ashlar/pkg/csimap"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/volume"
	"github.com/ashlar-csi/ashlar/tests/figures"
)

// simulated is what the requests of the simulated agents are known by.
const simulated = "simulated-agent"

// environment is an API server, a controller and an agent as they are, and many agents more,
// whose disks are in memory, in this process.
type environment struct {
	server     *apitest.Server
	audit      *auditLog
	controller *process.Driver
	agent      *process.Driver
	kubeconfig string // of all rights
	agents     int
	draws      figures.Draws
	chart      figures.Chart // of the calls
}

// diskSize of a simulated agent, in bytes.
const diskSize = 1 << 30

func nodeName(i int) string { return fmt.Sprintf("node-%d", i) }

func measureParts(ctx context.Context, args []string) (err error) {
	flags := flag.NewFlagSet("parts", flag.ExitOnError)
	agents := flags.Int("agents", 500, "nodes, of which one has a process of its own")
	volumes := flags.Int("volumes", 10000, "volumes, on all nodes alike")
	figuresDir := flags.String("figures", "", "directory for pictures of the tables (default: none)")
	idle := flags.Duration("idle", 5*time.Minute, "how long to watch that nothing happens")
	_ = flags.Parse(args)   // it exits
	klog.LogToStderr(false) // hundreds of agents have much to say
	klog.SetOutput(io.Discard)
	dir, err := os.MkdirTemp("", "ashlar")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	w := newEnvironment(*agents)
	w.draws = figures.Draws{Dir: *figuresDir}
	if err := w.launch(dir); err != nil {
		return err
	}
	defer w.server.Stop()
	if err := w.measureDriver(ctx, dir, *volumes, *idle); err != nil {
		return err
	}
	return w.measureBare(ctx, max(1, *volumes/10))
}

func newEnvironment(agents int) *environment {
	return &environment{agents: agents, chart: figures.Chart{Series: []figures.Series{{Name: "through the controller"}}}}
}

// launch starts the API server, which counts requests.
func (w *environment) launch(dir string) (err error) {
	w.audit = &auditLog{path: filepath.Join(dir, "audit")}
	policy := filepath.Join(dir, "policy")
	if err := os.WriteFile(policy, []byte(`{"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"], "rules": [{"level": "Metadata"}]}`), 0o600); err != nil {
		return err
	}
	w.server, err = apitest.Launch("--audit-policy-file="+policy, "--audit-log-path="+w.audit.path)
	return err
}

// measureDriver measures all parts, which have ended when it returns.
func (w *environment) measureDriver(ctx context.Context, dir string, volumes int, idle time.Duration) error {
	ctx, cancel := context.WithCancel(ctx)
	var parts sync.WaitGroup
	defer parts.Wait()
	defer cancel()
	if err := w.start(ctx, dir, &parts); err != nil {
		return err
	}
	defer w.agent.Close()
	defer w.controller.Close()
	return w.measure(ctx, volumes, idle)
}

// start starts all parts and waits until the controller knows all pools.
func (w *environment) start(ctx context.Context, dir string, parts *sync.WaitGroup) error {
	if err := w.startDriver(ctx, dir); err != nil {
		return err
	}
	for i := 1; i < w.agents; i++ {
		if err := simulate(ctx, w.server.Config(apitest.Admin), nodeName(i), memory.NewDisk(diskSize).Open("default", nil), parts); err != nil {
			return err
		}
	}
	return w.awaitPools(ctx)
}

// startDriver makes the nodes, and starts the controller, and the agent that has a process of its own.
func (w *environment) startDriver(ctx context.Context, dir string) error {
	config := w.server.Config(apitest.Admin)
	config.UserAgent = "bench"
	kube, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	if err := each(ctx, w.agents, 16, func(ctx context.Context, i int) error {
		n, err := kube.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName(i)}}, metav1.CreateOptions{})
		if err != nil {
			return err
		}
		n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
		_, err = kube.CoreV1().Nodes().UpdateStatus(ctx, n, metav1.UpdateOptions{})
		return err
	}); err != nil {
		return err
	}
	w.kubeconfig = filepath.Join(dir, "kubeconfig")
	if err := w.server.Kubeconfig(w.server.Config(apitest.Admin), w.kubeconfig); err != nil {
		return err
	}
	binary, err := process.Build(dir)
	if err != nil {
		return err
	}
	if w.controller, err = process.New(dir+"/controller", "", binary, "--mode=controller", "--kubeconfig="+w.kubeconfig); err != nil {
		return err
	}
	if w.agent, err = process.New(dir+"/agent", nodeName(0), binary, "--mode=node", "--kubeconfig="+w.kubeconfig,
		"--pool=default=file://"+dir+"/pool?reservePercent=0"); err != nil {
		return err
	}
	return errors.Join(w.controller.Start(), w.agent.Start())
}

// awaitPools waits until the controller knows the pools of all nodes.
func (w *environment) awaitPools(ctx context.Context) error {
	for i := range w.agents {
		for {
			r, err := w.controller.GetCapacity(ctx, &csi.GetCapacityRequest{AccessibleTopology: csimap.Topology(nodeName(i))})
			if err == nil && r.GetAvailableCapacity() > 0 {
				break
			}
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(50 * time.Millisecond):
			}
		}
	}
	return nil
}

// simulate runs the agent of a node in this process, with a pool in memory.
func simulate(ctx context.Context, config *rest.Config, node string, pool blockdev.Pool, parts *sync.WaitGroup) error {
	local, err := volume.NewLocal(ctx, node, []blockdev.Pool{pool}, &mount.Table{}, 0)
	if err != nil {
		return err
	}
	config.UserAgent = simulated
	a, err := agent.New(config, local, agent.Options{Driver: cluster.DefaultDriver, Pools: []agent.Pool{{Pool: pool, Kind: "memory"}}, Locks: &keylock.Table{}})
	if err != nil {
		return err
	}
	parts.Go(func() {
		if err := a.Run(ctx); err != nil && ctx.Err() == nil {
			fmt.Fprintln(os.Stderr, "agent of", node, "ended:", err)
		}
	})
	return nil
}

// memory is a row: what the two processes take now, and took at most.
func (w *environment) memory(when string) []string {
	c, a := w.controller.Pid(), w.agent.Pid()
	return []string{when, mib(status(c, "VmRSS")), mib(status(c, "VmHWM")), mib(status(a, "VmRSS")), mib(status(a, "VmHWM"))}
}

// step is a call that is made for each of so many volumes.
type step struct {
	what  string
	times int
	do    func(ctx context.Context, i int) error
}

// cost is what a step cost: a row of how long it took, and the requests.
type cost struct {
	step
	row    []string
	counts map[request]int
}

// call makes the calls of a step, 32 at a time.
func (w *environment) call(ctx context.Context, s step) (cost, error) {
	if _, err := w.requests(); err != nil {
		return cost{}, err
	}
	took, before := make([]time.Duration, s.times), processor(w.controller.Pid())
	began := time.Now()
	err := each(ctx, s.times, 32, func(ctx context.Context, i int) error {
		start := time.Now()
		err := co.Again(ctx, func() error { return s.do(ctx, i) })
		took[i] = time.Since(start)
		return err
	})
	all, used := time.Since(began), processor(w.controller.Pid())-before
	if err != nil {
		return cost{}, fmt.Errorf("%s: %w", s.what, err)
	}
	time.Sleep(aftermath)
	counts, err := w.requests()
	maps.DeleteFunc(counts, func(r request, _ int) bool { return r.watch() })
	n := float64(s.times)
	w.chart.Add(s.what, figures.Milliseconds(took))
	return cost{s, []string{s.what, fmt.Sprintf("%.0f", n/all.Seconds()), fmt.Sprint(figures.Quantile(took, 0.5).Milliseconds()),
		fmt.Sprint(figures.Quantile(took, 0.99).Milliseconds()), fmt.Sprintf("%.2f", 1000*used.Seconds()/n)}, counts}, err
}

func (w *environment) requests() (map[request]int, error) {
	counts, err := w.audit.take()
	maps.DeleteFunc(counts, func(r request, _ int) bool { return r.who == "bench" })
	return counts, err
}

func (w *environment) measure(ctx context.Context, n int, idle time.Duration) error {
	fmt.Printf("\n### Many nodes\n\nA real API server, the controller and one agent as processes, and %d agents more that keep %d volumes in all in memory,\nin one process; 32 calls at a time, on the same processors; of each call but CreateVolume a tenth as many.\n", w.agents-1, n)
	tenth := max(1, n/10)
	v := &volumes{w, make([]string, n)}
	memory := [][]string{w.memory("no volumes")}
	var rows [][]string
	calls := func(steps ...step) (costs []cost, err error) {
		for _, s := range steps {
			c, err := w.call(ctx, s)
			if err != nil {
				return nil, err
			}
			costs, rows = append(costs, c), append(rows, c.row)
		}
		return costs, nil
	}
	before, err := calls(step{"CreateVolume", n, v.create}, step{"ControllerPublishVolume", tenth, v.publish})
	if err != nil {
		return err
	}
	memory = append(memory, w.memory(fmt.Sprintf("%d volumes", n)))
	quiet, err := w.rest(ctx, idle)
	if err != nil {
		return err
	}
	memory = append(memory, w.memory("... after "+idle.String()))
	after, err := calls(step{"ControllerUnpublishVolume", tenth, v.unpublish}, step{"DeleteVolume", tenth, v.delete})
	if err != nil {
		return err
	}
	figures.Table([]string{"call", "per second", "median, ms", "p99, ms", "controller's processor time per call, ms"}, rows)
	w.chart.Name, w.chart.Title, w.chart.Unit = "cluster-calls", fmt.Sprintf("Calls with %d agents and %d volumes, 32 at a time", w.agents, n), "ms: median, and p10 to p90"
	if err := w.draws.Draw(w.chart); err != nil {
		return err
	}
	printCosts(before)
	w.printIdle(quiet, idle)
	printCosts(after)
	figures.Table([]string{"resident memory, MiB", "controller", "at most", "agent", "at most"}, memory)
	return nil
}

func printCosts(costs []cost) {
	for _, c := range costs {
		fmt.Printf("\nRequests of %s (a pool is reported when it had a second of rest, or after 5 s):\n", c.what)
		printRequests(c.counts, float64(c.times), "per call")
	}
}

// printIdle prints what the parts asked for while nothing happened.
func (w *environment) printIdle(counts map[request]int, idle time.Duration) {
	fmt.Printf("\nAn idle agent, %s long, %d of them; all requests:\n", idle, w.agents)
	parts := map[string]int{simulated: w.agents - 1, driverName + "-node": 1, driverName + "-controller": 1}
	var rows [][]string
	for r, count := range counts {
		if of := parts[r.who]; of > 0 {
			rows = append(rows, []string{r.who, r.what, fmt.Sprintf("%.2f", float64(count)/float64(of)/idle.Minutes())})
		}
	}
	sortRows(rows)
	figures.Table([]string{"who", "request", "per minute and agent"}, rows)
}

// volumes are those of all nodes alike.
type volumes struct {
	*environment
	ids []string
}

var capability = &csi.VolumeCapability{AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
	AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER}}

// node that has a volume.
func (v *volumes) node(i int) string { return nodeName(i % v.agents) }

func (v *volumes) create(ctx context.Context, i int) error {
	at := []*csi.Topology{csimap.Topology(v.node(i))}
	r, err := v.controller.CreateVolume(ctx, &csi.CreateVolumeRequest{Name: fmt.Sprintf("pvc-%032d", i), CapacityRange: &csi.CapacityRange{RequiredBytes: 4096},
		VolumeCapabilities: []*csi.VolumeCapability{capability}, AccessibilityRequirements: &csi.TopologyRequirement{Preferred: at, Requisite: at}})
	v.ids[i] = r.GetVolume().GetVolumeId()
	return err
}

func (v *volumes) publish(ctx context.Context, i int) error {
	_, err := v.controller.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{VolumeId: v.ids[i], NodeId: v.node(i), VolumeCapability: capability})
	return err
}

func (v *volumes) unpublish(ctx context.Context, i int) error {
	_, err := v.controller.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: v.ids[i], NodeId: v.node(i)})
	return err
}

func (v *volumes) delete(ctx context.Context, i int) error {
	_, err := v.controller.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: v.ids[i]})
	return err
}

// rest waits until the last reports are through, and returns what is asked for from then on.
func (w *environment) rest(ctx context.Context, idle time.Duration) (map[request]int, error) {
	for _, wait := range []time.Duration{2 * aftermath, idle} {
		if _, err := w.requests(); err != nil {
			return nil, err
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(wait):
		}
	}
	return w.requests()
}
