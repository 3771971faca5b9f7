// Package anynode takes volumes that any node can use (access: any) through their lives in a cluster of three nodes, whose agents, connections
// and API server fail at each step. The nodes are network namespaces of one kernel, with the real target and host of NVMe over TCP, so it needs a kernel that has
// both: make test-any runs it in a virtual machine.
package anynode

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/process"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/csimap"
)

func TestMain(m *testing.M) {
	log.SetLogger(klog.Background())
	if name := os.Getenv(machineName); name != "" {
		klog.Fatal(inMachine(name, os.Args[1:])) // it serves until the machine ends
	}
	apitest.Main(m)
}

const (
	mib     = 1 << 20
	patient = 4 * time.Minute
)

// home has the volumes; the others use them.
const home = "home"

var consumers = []string{"first", "second"}

// nodes is a cluster.
type nodes struct {
	testing.TB
	*network
	dir        string
	program    string
	kube       client.Client
	controller *process.Driver
	agents     map[string]*process.Driver
	more       map[string][]string // flags of agents
	luks       bool                // the volumes that are made are encrypted
}

func newNodes(t testing.TB) *nodes {
	t.Helper()
	return newNodesWith(t, nil)
}

// newNodesWith is newNodes, whose agents have more flags.
func newNodesWith(t testing.TB, more map[string][]string) *nodes {
	t.Helper()
	drivertest.NeedNVMe(t)
	c, program, api := newCluster(t)
	c.more = more
	c.network = newNetwork(t, api)
	for _, name := range append([]string{home}, consumers...) {
		c.agents[name] = c.agent(program, name)
	}
	c.control(program, append([]string{home}, consumers...)...)
	return c
}

// newCluster is one without nodes, the driver's program, and the address of the API server.
func newCluster(t testing.TB) (c *nodes, program, api string) {
	t.Helper()
	dir := drivertest.Dir(t)
	if program = os.Getenv("ASHLAR_DRIVER"); program == "" {
		var err error
		program, err = process.Build(dir)
		check.OK(t, err)
	}
	server, scheme := apitest.Get(t), runtime.NewScheme()
	check.OK(t, errors.Join(v1alpha1.AddToScheme(scheme), corev1.AddToScheme(scheme)))
	at, err := url.Parse(server.Config(apitest.Admin).Host)
	check.OK(t, err)
	c = &nodes{TB: t, dir: dir, program: program, agents: map[string]*process.Driver{}}
	c.kube, err = client.New(server.Config(apitest.Admin), client.Options{Scheme: scheme})
	check.OK(t, err)
	t.Cleanup(func() { check.OK(t, c.kube.DeleteAllOf(context.Background(), &v1alpha1.Pool{})) }) // the next cluster has other disks
	return c, program, at.Host
}

// control starts the controller, and waits until it knows the nodes.
func (c *nodes) control(program string, names ...string) {
	c.Helper()
	server, kubeconfig := apitest.Get(c), filepath.Join(c.dir, "kubeconfig")
	check.OK(c, server.Kubeconfig(server.Config(apitest.Admin), kubeconfig))
	c.controller = c.start("controller", program, "serve", "--mode=controller", "--node-id=controller", "--kubeconfig="+kubeconfig, "-v=4")
	for _, name := range names {
		c.eventually("the controller knows node "+name, func() bool {
			r, err := c.controller.GetCapacity(c.Context(), &csi.GetCapacityRequest{AccessibleTopology: csimap.Topology(name)})
			return err == nil && r.GetAvailableCapacity() > 0
		})
	}
}

// agent starts the agent of a node, which has a pool, in a namespace of its own.
func (c *nodes) agent(program, name string) *process.Driver {
	c.Helper()
	// A driver that is held waits for SIGCONT before its first step.
	return c.start(name, in(name, append([]string{"sh", "-c", `[ ! -e "$0" ] || kill -STOP $$; exec "$@"`, c.held(name), program},
		c.flags(name, addresses[name], c.relay(name), filepath.Join(c.dir, "pool-of-"+name))...)...)...)
}

// flags are those of the agent of a node, whose object is made: with its address, that of its API server, and the directory of its pool.
func (c *nodes) flags(name, address, api, pool string) []string {
	c.Helper()
	node := &corev1.Node{}
	node.Name = name
	check.OK(c, client.IgnoreAlreadyExists(c.kube.Create(c.Context(), node)))
	node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	check.OK(c, c.kube.Status().Update(c.Context(), node))
	server, kubeconfig := apitest.Get(c), filepath.Join(c.dir, name+".kubeconfig")
	config := server.Agent(c, name)
	config.Host = "https://" + api
	check.OK(c, server.KubeconfigIn(config, apitest.Namespace, kubeconfig))
	return append([]string{"serve", "--mode=node", "--node-id=" + name, "--kubeconfig=" + kubeconfig, "--agent-endpoint=" + address + ":9812",
		"--remote-address=" + address, fmt.Sprintf("--remote-tls=%t", drivertest.WithTLS()), "--pool=default=file://" + pool + "?create=1&reservePercent=0", "-v=4"}, c.more[name]...)
}

// held is the file with which the agent of a node that starts is held.
func (c *nodes) held(name string) string { return filepath.Join(c.dir, name+".held") }

func (c *nodes) start(name string, argv ...string) *process.Driver {
	c.Helper()
	d, err := process.New(filepath.Join(c.dir, name), "", argv...)
	check.OK(c, err)
	d.Node = name
	c.Cleanup(d.Close)
	check.OK(c, d.Start())
	ctx, cancel := context.WithTimeout(c.Context(), patient)
	defer cancel()
	check.OK(c, d.Ready(ctx))
	return d
}

// eventually fails the test if something does not become so.
func (c *nodes) eventually(what string, is func() bool) {
	c.Helper()
	c.within(patient, what, is)
}

// within is eventually, of what may take another time.
func (c *nodes) within(limit time.Duration, what string, is func() bool) {
	c.Helper()
	for end := time.Now().Add(limit); !is(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			c.Fatalf("never: %s\n%s", what, c.logs())
		}
	}
}

func (c *nodes) logs() (all string) {
	for name, agent := range c.agents {
		all += fmt.Sprintf("--- %s\n%s\n", name, agent.Log())
	}
	if c.controller != nil { // nodes are there before it
		all += "--- controller\n" + c.controller.Log()
	}
	return all
}

// again makes a call until it succeeds, as sidecars and the kubelet do, which take any error for one that may pass. A call that ran out of time has twice
// as long the next time, up to the kubelet's two minutes: on a slow machine a LUKS header alone may take more than ten seconds.
func (c *nodes) again(what string, call func(ctx context.Context) error) {
	c.Helper()
	last, limit := "", 10*time.Second
	c.eventually(what, func() bool {
		ctx, cancel := context.WithTimeout(c.Context(), limit)
		defer cancel()
		err := call(ctx)
		if ctx.Err() != nil {
			limit = min(2*limit, 2*time.Minute)
		}
		if err != nil && err.Error() != last {
			last = err.Error()
			c.Logf("%s: %v", what, err)
		}
		return err == nil
	})
}

// create makes a volume whose home is home; edit changes what is asked for.
func (c *nodes) create(name, filesystem string, edit ...func(*csi.CreateVolumeRequest)) *volume {
	c.Helper()
	r := co.Request(name, filesystem, 16*mib)
	if filesystem != co.Block {
		r.CapacityRange.RequiredBytes = 64 * mib
	}
	r.Parameters = map[string]string{"access": "any"}
	if c.luks {
		r.Parameters["encryption"] = "luks2"
	}
	for _, edit := range edit {
		edit(r)
	}
	r.AccessibilityRequirements = &csi.TopologyRequirement{Preferred: []*csi.Topology{csimap.Topology(home)}, Requisite: []*csi.Topology{csimap.Topology(home)}}
	v := &volume{nodes: c}
	c.again("volume "+name+" is made", func(ctx context.Context) (err error) {
		v.of, err = c.controller.Create(ctx, r)
		return err
	})
	if c.luks {
		v.of.Secrets = map[string]string{"passphrase": "a passphrase"}
	}
	return v
}

// encrypted is the cluster, for volumes that are encrypted, or not.
func (c *nodes) encrypted(are bool) *nodes {
	in := *c
	in.luks = are
	return &in
}

// volume is one of the cluster.
type volume struct {
	*nodes
	of *co.Volume
}

// at is the volume for the calls of a node.
func (v *volume) at(node string) *co.Volume {
	there := v.agents[node].Volume(v.of.ID, v.of.Name, v.of.Capability)
	there.Secrets = v.of.Secrets
	return there
}

func (v *volume) claim(ctx context.Context, node string) error {
	_, err := v.controller.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{VolumeId: v.of.ID, NodeId: node, VolumeCapability: v.of.Capability})
	return err
}

func (v *volume) release(ctx context.Context, node string) error {
	_, err := v.controller.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: v.of.ID, NodeId: node})
	return err
}

// up stages and publishes the volume at a node, and returns its target.
func (v *volume) up(ctx context.Context, node string) error {
	there := v.at(node)
	return co.InTurn(func() error { return there.Stage(ctx) }, func() error { return there.Publish(ctx, there.Target("pod"), false) })
}

func (v *volume) target(node string) string {
	there := v.at(node)
	return there.Target("pod")
}

// down undoes up.
func (v *volume) down(ctx context.Context, node string) error {
	there := v.at(node)
	return co.InTurn(func() error { return there.Unpublish(ctx, there.Target("pod")) }, func() error { return there.Unstage(ctx) })
}

// left is what the kernel still has of exports and connections.
func left() (all []string) {
	for _, pattern := range []string{"/sys/class/nvme/*", "/sys/kernel/config/nvmet/subsystems/*", "/sys/kernel/config/nvmet/hosts/*"} {
		found, _ := filepath.Glob(pattern)
		for _, path := range found {
			text, _ := os.ReadFile(filepath.Join(path, "subsysnqn"))
			if string(text) == "nqn.2014-08.org.nvmexpress.discovery\n" || filepath.Base(path) == "nqn.2014-08.org.nvmexpress.discovery" {
				continue
			}
			all = append(all, path)
		}
	}
	return all
}
