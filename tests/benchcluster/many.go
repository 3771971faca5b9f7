package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/volume"
	"github.com/ashlar-csi/ashlar/tests/figures"
)

// many is an environment with more volumes than could be made through the driver in an hour: they are put into etcd, and into the pools of the agents that
// have them, which run in processes of their own.
type many struct {
	*environment
	volumes int
	crowds  []*crowd
	times   [][]string
}

// crowd is a process with many agents.
type crowd struct {
	*exec.Cmd
	stop io.Closer
}

// mostOfCrowd is how many volumes a process has at most: each has an open file.
const mostOfCrowd = 15000

func measureMany(ctx context.Context, args []string) (err error) {
	flags := flag.NewFlagSet("many", flag.ExitOnError)
	agents := flags.Int("agents", 5000, "nodes, of which one has a process of its own")
	volumes := flags.Int("volumes", 500000, "volumes, on all nodes alike")
	calls := flags.Int("calls", 1000, "how often each call is made")
	idle := flags.Duration("idle", 2*time.Minute, "how long to watch that nothing happens")
	_ = flags.Parse(args) // it exits
	dir, err := os.MkdirTemp("", "ashlar")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	m := &many{environment: newEnvironment(*agents), volumes: *volumes / (*agents - 1) * (*agents - 1)}
	if err := os.Setenv("ETCD_QUOTA_BACKEND_BYTES", fmt.Sprint(8<<30)); err != nil { // the most that etcd's documentation recommends
		return err
	}
	if err := m.launch(dir); err != nil {
		return err
	}
	defer m.server.Stop()
	return m.measure(ctx, dir, *calls, *idle)
}

func (m *many) measure(ctx context.Context, dir string, calls int, idle time.Duration) error {
	fmt.Printf("\n### %d agents, %d volumes\n", m.agents, m.volumes)
	if err := m.startDriver(ctx, dir); err != nil {
		return err
	}
	defer m.agent.Close()
	defer m.controller.Close()
	if err := m.controller.Ready(ctx); err != nil {
		return err
	}
	if err := m.fill(ctx); err != nil {
		return err
	}
	defer m.stopCrowds()
	if err := m.startAll(ctx); err != nil {
		return err
	}
	v := &volumes{m.environment, make([]string, calls)}
	var rows [][]string
	for _, s := range []step{{"CreateVolume", calls, v.create}, {"ControllerPublishVolume", calls, v.publish}, {"ControllerUnpublishVolume", calls, v.unpublish}, {"DeleteVolume", calls, v.delete}} {
		c, err := m.call(ctx, s)
		if err != nil {
			return err
		}
		rows = append(rows, c.row)
		printCosts([]cost{c})
	}
	figures.Table([]string{"call", "per second", "median, ms", "p99, ms", "controller's processor time per call, ms"}, rows)
	if err := m.idle(ctx, idle); err != nil {
		return err
	}
	for _, harm := range []func(context.Context) error{m.agentDies, m.controllerDies, m.serverDies} {
		if err := harm(ctx); err != nil {
			return err
		}
	}
	figures.Table([]string{"what", "took, s", "processor time of the API server, s", "of the controller, s"}, m.times)
	return nil
}

// timed adds a row for what takes long.
func (m *many) timed(what string, do func() error) error {
	server, controller := m.pid("kube-apiserver"), m.controller.Pid()
	usedServer, usedController, began := processor(server), processor(controller), time.Now()
	if err := do(); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	took := time.Since(began)
	if now := m.pid("kube-apiserver"); now != server {
		server, usedServer = now, 0
	}
	if now := m.controller.Pid(); now != controller {
		controller, usedController = now, 0
	}
	row := []string{what, seconds(took), seconds(processor(server) - usedServer), seconds(processor(controller) - usedController)}
	fmt.Fprintln(os.Stderr, row)
	m.times = append(m.times, row)
	return nil
}

// pid of the API server, or of its etcd, which are this process's children.
func (m *many) pid(name string) int {
	found, _ := filepath.Glob("/proc/[0-9]*/status")
	for _, path := range found {
		text, _ := os.ReadFile(path)
		if strings.HasPrefix(string(text), "Name:\t"+name+"\n") && strings.Contains(string(text), fmt.Sprintf("\nPPid:\t%d\n", os.Getpid())) {
			var pid int
			_, _ = fmt.Sscanf(path, "/proc/%d/", &pid)
			return pid
		}
	}
	return 0
}

// memory prints what each process takes.
func (m *many) memory(when string) {
	rows := [][]string{}
	of := func(what string, pid int) {
		rows = append(rows, []string{what, mib(status(pid, "VmRSS")), mib(status(pid, "VmHWM"))})
	}
	of("controller", m.controller.Pid())
	of("agent", m.agent.Pid())
	of("API server", m.pid("kube-apiserver"))
	of("etcd", m.pid("etcd"))
	fmt.Printf("\nResident memory %s, MiB:\n", when)
	figures.Table([]string{"of", "now", "at most"}, rows)
}

func seededName(node, n int) string { return fmt.Sprintf("pvc-%08d-%08d-seeded", node, n) }

// fill puts the volumes into etcd, as copies of one that the driver has made.
func (m *many) fill(ctx context.Context) error {
	v := &volumes{m.environment, make([]string, 1)}
	if err := co.Again(ctx, func() error { return v.create(ctx, 0) }); err != nil {
		return err
	}
	m.memory("with one volume")
	if err := errors.Join(m.controller.Stop(), m.agent.Stop()); err != nil {
		return err
	}
	store := etcd{m.server.Etcd()}
	const under = "/registry/ashlar.dev/volumes/"
	like, err := store.get(ctx, under+volume.KeyOf(fmt.Sprintf("pvc-%032d", 0)))
	if err != nil {
		return err
	}
	fmt.Printf("\nA volume has %d bytes in etcd.\n", len(like))
	perNode := m.volumes / (m.agents - 1)
	return m.timed(fmt.Sprintf("put %d volumes into etcd", m.volumes), func() error {
		return each(ctx, m.agents-1, 4, func(ctx context.Context, i int) error {
			var all []keyValue
			for n := range perNode {
				one, err := seeded(like, i+1, n)
				if err != nil {
					return err
				}
				all = append(all, keyValue{[]byte(under + volume.KeyOf(seededName(i+1, n))), one})
				if len(all) == 100 || n == perNode-1 {
					if err := store.put(ctx, all); err != nil {
						return err
					}
					all = all[:0]
				}
			}
			return nil
		})
	})
}

// seeded is the object of a volume of a node, like that of another one.
func seeded(like []byte, node, n int) ([]byte, error) {
	var object map[string]any
	if err := json.Unmarshal(like, &object); err != nil {
		return nil, err
	}
	name := seededName(node, n)
	metadata, spec := object["metadata"].(map[string]any), object["spec"].(map[string]any)
	metadata["name"], metadata["uid"] = volume.KeyOf(name), uuid.NewString()
	spec["name"], spec["nodeName"] = name, nodeName(node)
	return json.Marshal(object)
}

// startAll starts all parts, with the volumes there: the agents at once, as after a power cut of the whole cluster.
func (m *many) startAll(ctx context.Context) error {
	if err := m.controller.Start(); err != nil {
		return err
	}
	if err := m.timed("the controller's start, until it is ready", func() error { return m.controller.Ready(ctx) }); err != nil {
		return err
	}
	m.memory("without agents")
	if err := m.timed("the start of all agents, until the controller knows all their pools", func() error {
		of := (m.agents-2)/max(1, (m.volumes+mostOfCrowd-1)/mostOfCrowd, m.agents/500) + 1 // agents in a process
		for from := 1; from < m.agents; from += of {
			if err := m.startCrowd(ctx, from, min(from+of, m.agents)); err != nil {
				return err
			}
		}
		if err := m.agent.Start(); err != nil {
			return err
		}
		return m.awaitPools(ctx)
	}); err != nil {
		return err
	}
	if err := m.timed("then, until nobody asks for anything but leases", func() error { return m.calm(ctx) }); err != nil {
		return err
	}
	m.memory("with all agents")
	return nil
}

func (m *many) startCrowd(ctx context.Context, from, to int) error {
	cmd := exec.CommandContext(ctx, "/proc/self/exe", "agents", "--kubeconfig="+m.kubeconfig, fmt.Sprintf("--from=%d", from), fmt.Sprintf("--to=%d", to), fmt.Sprintf("--volumes=%d", m.volumes/(m.agents-1)))
	stop, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	m.crowds = append(m.crowds, &crowd{cmd, stop})
	return cmd.Start()
}

func (m *many) stopCrowds() {
	for _, c := range m.crowds {
		_ = c.stop.Close()
		_ = c.Wait() // it was told to end
	}
}

// runAgents runs agents with volumes until its standard input ends.
func runAgents(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("agents", flag.ExitOnError)
	kubeconfig := flags.String("kubeconfig", "", "how to reach the API server")
	from := flags.Int("from", 1, "the first node")
	to := flags.Int("to", 1, "the node after the last one")
	volumes := flags.Int("volumes", 0, "volumes that each node has")
	_ = flags.Parse(args) // it exits
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard)
	config, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	if err != nil {
		return err
	}
	config.QPS = -1
	ctx, cancel := context.WithCancel(ctx)
	var parts sync.WaitGroup
	defer parts.Wait()
	defer cancel()
	for i := *from; i < *to; i++ {
		pool := memory.NewDisk(diskSize).Open("default", nil)
		local, err := volume.NewLocal(ctx, nodeName(i), []blockdev.Pool{pool}, &mount.Table{}, 0)
		if err != nil {
			return err
		}
		for n := range *volumes {
			if _, err := local.Create(ctx, volume.Spec{Name: seededName(i, n), Pool: "default", Size: volume.Range{Required: 4096, Limit: 4096}}); err != nil {
				return err
			}
		}
		if err := simulate(ctx, config, nodeName(i), pool, &parts); err != nil {
			return err
		}
	}
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// calm waits until hardly anybody but those who renew a lease has asked for anything in ten seconds.
func (m *many) calm(ctx context.Context) error {
	for {
		if _, err := m.requests(); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(10 * time.Second):
		}
		counts, err := m.requests()
		if err != nil {
			return err
		}
		others := 0
		for r, n := range counts {
			if !strings.HasSuffix(r.what, " leases") {
				others += n
			}
		}
		if others <= m.agents/10 {
			return nil
		}
	}
}

// idle prints what all ask for, and what it takes, while nothing happens.
func (m *many) idle(ctx context.Context, idle time.Duration) error {
	if err := m.calm(ctx); err != nil {
		return err
	}
	var quiet map[request]int
	if err := m.timed("nothing, for "+idle.String(), func() (err error) {
		quiet, err = m.rest(ctx, idle)
		return err
	}); err != nil {
		return err
	}
	m.printIdle(quiet, idle)
	m.memory("at rest")
	return nil
}

// harm does something, waits until all is well and calm again, and prints what it cost.
func (m *many) harm(ctx context.Context, what string, do, well func() error) error {
	if _, err := m.requests(); err != nil {
		return err
	}
	err := m.timed(what, func() error {
		if err := do(); err != nil {
			return err
		}
		return well()
	})
	if err != nil {
		return err
	}
	counts, err := m.requests()
	if err != nil {
		return err
	}
	maps.DeleteFunc(counts, func(r request, _ int) bool { return r.who == "kube-apiserver" || strings.HasSuffix(r.what, " leases") })
	fmt.Printf("\nRequests: %s (without leases):\n", what)
	printRequests(counts, 1, "times")
	return nil
}

// create makes a volume on a node, and removes it.
func (m *many) create(ctx context.Context, node int) error {
	v := &volumes{m.environment, make([]string, node+1)}
	if err := v.create(ctx, node); err != nil {
		return err
	}
	return v.delete(ctx, node)
}

func (m *many) untilMade(ctx context.Context, node int) func() error {
	return func() error {
		for {
			one, cancel := context.WithTimeout(ctx, 10*time.Second)
			err := m.create(one, node)
			cancel()
			if err == nil || ctx.Err() != nil {
				return err
			}
			time.Sleep(100 * time.Millisecond)
		}
	}
}

func (m *many) agentDies(ctx context.Context) error {
	if err := m.harm(ctx, "an agent is killed; a minute", func() error { m.agent.Kill(); return nil }, func() error {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Minute):
			return nil
		}
	}); err != nil {
		return err
	}
	return m.harm(ctx, "it starts again, until it has made a volume", m.agent.Start, m.untilMade(ctx, 0))
}

func (m *many) controllerDies(ctx context.Context) error {
	return m.harm(ctx, "the controller is killed and started, until it has made a volume", func() error {
		m.controller.Kill()
		return m.controller.Start()
	}, m.untilMade(ctx, 1))
}

func (m *many) serverDies(ctx context.Context) error {
	if err := m.harm(ctx, "API server and etcd are killed and started, until they answer", m.server.Restart, func() error { return nil }); err != nil {
		return err
	}
	if err := m.harm(ctx, "then, until a volume is made", func() error { return nil }, m.untilMade(ctx, 1)); err != nil {
		return err
	}
	if err := m.harm(ctx, "then, until all is calm", func() error { return nil }, func() error { return m.calm(ctx) }); err != nil {
		return err
	}
	m.memory("after that")
	return nil
}
