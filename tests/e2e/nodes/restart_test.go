//go:build e2e

package nodes

import (
	"fmt"
	"slices"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
)

// TestRestarts: on one node a filesystem, one that is mounted in part (subPath), a raw
// device, and the same for one pod only (ReadWriteOncePod) are in use while its kubelet and
// its driver are restarted, in either order and in the middle of each other. Nobody notices;
// containers that end start again, pods that go are replaced by others with the same claims.
func TestRestarts(t *testing.T) {
	c := start(t)
	node := c.nodes[0]
	writers := c.mixed(node)
	names := []string{"files", "part", "raw", "once-files", "once-part", "once-raw"}
	systemctl := func(args ...string) {
		t.Helper()
		c.on(node, append([]string{"systemctl"}, args...)...)
	}
	for _, step := range []struct {
		name string
		do   func()
	}{
		{"kubelet, then driver", func() {
			systemctl("restart", "kubelet")
			c.replaceDriver(node)
		}},
		{"driver, then kubelet", func() {
			c.replaceDriver(node)
			systemctl("restart", "kubelet")
		}},
		{"kubelet killed, driver killed while it is gone", func() {
			systemctl("kill", "--signal=KILL", "kubelet")
			c.killDriver(node)
			systemctl("start", "kubelet")
		}},
		{"containerd and kubelet, then driver killed", func() {
			systemctl("restart", "containerd")
			systemctl("restart", "kubelet")
			c.killDriver(node)
		}},
	} {
		t.Log(step.name)
		devices := c.devices(node)
		step.do()
		c.ready(node)
		c.onwards(names...)
		for _, name := range names {
			if n := c.restarts(name); n != 0 {
				t.Fatalf("%s was restarted %d times", name, n)
			}
		}
		if now := c.devices(node); !slices.Equal(now, devices) {
			t.Fatalf("devices were %v and are %v", devices, now)
		}
		// Another container of a pod needs all of its volumes published anew.
		for _, name := range names {
			c.restartContainer(name)
		}
		c.onwards(names...)
		for _, name := range names {
			c.delete("pod", name)
			c.pod(writers[name])
		}
		c.runs(names...)
		c.onwards(names...)
	}

	t.Log("pods that are deleted while the kubelet is down, and the driver dies")
	systemctl("stop", "kubelet")
	for _, name := range names {
		c.kubectl("delete", "pod", name, "--wait=false")
	}
	c.killDriver(node)
	systemctl("start", "kubelet")
	for _, name := range names {
		c.kubectl("wait", "--for=delete", "pod/"+name, "--timeout="+patience.String())
		c.pod(writers[name])
	}
	c.runs(names...)
	c.onwards(names...)
	for _, name := range names {
		least := c.safe(name)
		c.delete("pod", name)
		p := writers[name]
		p.name, p.tag = "look-"+name, name
		c.has(least, p)
	}
}

// mixed makes one writer of each kind on a node.
func (c *cluster) mixed(node string) map[string]pod {
	c.Helper()
	writers := map[string]pod{}
	for _, mode := range []struct{ prefix, mode string }{{"", "ReadWriteOnce"}, {"once-", "ReadWriteOncePod"}} {
		for _, p := range []pod{
			{name: "files", claims: []string{"files"}},
			{name: "part", claims: []string{"part"}, subPath: map[string]string{"part": "below/it"}},
			{name: "raw", claims: []string{"raw!"}},
		} {
			p.name, p.node = mode.prefix+p.name, node
			p.claims = []string{mode.prefix + p.claims[0]}
			if sub := p.subPath["part"]; sub != "" {
				p.subPath = map[string]string{p.name: sub}
			}
			c.claim(claim{name: p.name, mode: mode.mode, block: p.claims[0] != p.name})
			c.pod(p)
			writers[p.name] = p
		}
	}
	for name := range writers {
		c.runs(name)
		c.onwards(name)
	}
	return writers
}

// restartContainer ends the main process of a pod, and waits until its kubelet has started
// another one.
func (c *cluster) restartContainer(name string) {
	c.Helper()
	before, err := c.getPod(name)
	check.OK(c, err)
	id := before.Status.ContainerStatuses[0].ContainerID
	c.on(before.Spec.NodeName, "ctr", "-n", "k8s.io", "task", "kill", "-s", "SIGKILL", id[len("containerd://"):])
	c.eventually(name+" has another container", func() error {
		p, err := c.getPod(name)
		if err == nil && (!isReady(&p) || p.Status.ContainerStatuses[0].ContainerID == id) {
			err = fmt.Errorf("it has %+v: %s", p.Status.ContainerStatuses[0].State, c.events(name))
		}
		return err
	})
}

// TestDriversKilled: with volumes in use on all nodes, and others that come and go, the
// driver of each node is killed and replaced in turn. The devices of the other nodes, which
// are those of the same kernel, are left alone, and nothing is lost.
func TestDriversKilled(t *testing.T) {
	c := start(t)
	var names []string
	writers := map[string]pod{}
	for i, node := range c.nodes {
		for _, block := range []bool{false, true} {
			name := fmt.Sprintf("files-%d", i)
			p := pod{name: name, node: node, claims: []string{name}}
			if block {
				name = fmt.Sprintf("raw-%d", i)
				p = pod{name: name, node: node, claims: []string{name + "!"}}
			}
			c.claim(claim{name: name, block: block})
			c.pod(p)
			names, writers[name] = append(names, name), p
		}
	}
	c.runs(names...)
	c.onwards(names...)
	devices := map[string][]string{}
	for _, node := range c.nodes {
		devices[node] = c.devices(node)
		if len(devices[node]) != 2 {
			t.Fatalf("%s has the devices %v", node, devices[node])
		}
	}
	for i, node := range c.nodes {
		for _, how := range []struct {
			name string
			do   func(string)
		}{{"killed", c.killDriver}, {"replaced", c.replaceDriver}} {
			t.Logf("the driver of %s is %s", node, how.name)
			// On the other nodes raw volumes come and go meanwhile.
			for j, other := range c.nodes {
				if j != i {
					name := fmt.Sprintf("brief-%d", j)
					c.claim(claim{name: name, block: true})
					c.pod(pod{name: name, node: other, claims: []string{name + "!"}})
				}
			}
			how.do(node)
			c.ready(node)
			for j := range c.nodes {
				if j != i {
					name := fmt.Sprintf("brief-%d", j)
					c.runs(name)
					c.onwards(name)
					c.delete("pod", name)
					c.delete("pvc", name)
				}
			}
			c.onwards(names...)
			for _, n := range c.nodes {
				c.eventually("only the devices of volumes in use are there", func() error {
					if now := c.devices(n); !slices.Equal(now, devices[n]) {
						return fmt.Errorf("%s had %v and has %v", n, devices[n], now)
					}
					return nil
				})
			}
		}
	}
	for _, name := range names {
		if n := c.restarts(name); n != 0 {
			t.Errorf("%s was restarted %d times", name, n)
		}
		least := c.safe(name)
		c.delete("pod", name)
		p := writers[name]
		p.name, p.tag = "look-"+name, name
		c.has(least, p)
	}
}
