package anynode

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/nvme"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/nvmet"
)

// TestWire: what a pod writes into a volume of another node can be read on the wire without TLS, and with --remote-tls not; and no log has a secret.
func TestWire(t *testing.T) {
	c := newNodes(t)
	v := c.create("wire", co.Block)
	first := consumers[0]
	c.again("claim it", func(ctx context.Context) error { return v.claim(ctx, first) })
	c.again("stage it", func(ctx context.Context) error { return v.up(ctx, first) })
	keys, err := filepath.Glob("/sys/class/nvme/*/tls_key")
	if check.OK(t, err); (len(keys) == 1) != drivertest.WithTLS() {
		t.Errorf("connections with TLS: %q", keys)
	}

	marker := []byte("a word that is nowhere else. ")
	heard := drivertest.Wire(t, "to-home")
	f, err := os.OpenFile(v.target(first), os.O_RDWR, 0)
	check.OK(t, err)
	_, err = f.WriteAt(bytes.Repeat(marker, 4096), mib)
	check.OK(t, errors.Join(err, f.Sync(), f.Close()))
	all := heard()
	if len(all) < 4096*len(marker) || bytes.Contains(all, marker) == drivertest.WithTLS() {
		t.Errorf("of %d bytes on the wire, what was written can be read: %t", len(all), bytes.Contains(all, marker))
	}

	c.again("take it down", func(ctx context.Context) error { return v.down(ctx, first) })
	c.again("release it", func(ctx context.Context) error { return v.release(ctx, first) })
	c.again("delete it", v.of.Delete)
	if left := drivertest.Gone(func() []string { return drivertest.Keys(t, nvmet.Prefix) }); len(left) > 0 {
		t.Errorf("keys that are left: %q", left)
	}
	if logs := c.logs(); strings.Contains(logs, "NVMeTLSkey") || strings.Contains(logs, "DHHC-1") {
		t.Error("the logs have secrets")
	}
}

// keyed are how many connections there are with TLS.
func keyed(t *testing.T) (n int) {
	t.Helper()
	paths, err := filepath.Glob("/sys/class/nvme/*/tls_key")
	check.OK(t, err)
	for _, path := range paths {
		if key, err := os.ReadFile(path); err == nil && len(bytes.TrimSpace(key)) > 0 {
			n++
		}
	}
	return n
}

// restartWith starts the agent of a node again, with other flags more.
func (c *nodes) restartWith(node string, more ...string) {
	c.Helper()
	c.more[node] = more
	check.OK(c, c.agents[node].Stop())
	c.agents[node] = c.agent(c.program, node)
}

// plain has an agent give and use volumes without TLS.
const plain = "--remote-tls=false"

// TestTLSSwitched: what is used without TLS goes on, and can be staged and published again, when its home is to give with TLS, and its user to use with TLS alone; and when the machine
// of who uses it has started anew, it comes back by the same claim, with TLS.
func TestTLSSwitched(t *testing.T) {
	drivertest.NeedTLS(t)
	first := consumers[0]
	c := newNodesWith(t, map[string][]string{home: {plain}, first: {plain}, consumers[1]: {plain}})
	v := c.create("switched", co.Block)
	c.again("claim it", func(ctx context.Context) error { return v.claim(ctx, first) })
	c.again("stage it", func(ctx context.Context) error { return v.up(ctx, first) })
	before, err := os.Stat(v.target(first))
	check.OK(t, err)
	for _, restart := range []func(){
		func() { c.restartWith(first) }, // its home gives it without
		func() { c.restartWith(home) },
		func() { c.restartWith(first, plain) },
		func() { c.restartWith(first) },
	} {
		restart()
		c.again("stage it again", func(ctx context.Context) error { return v.up(ctx, first) })
		if after, err := os.Stat(v.target(first)); err != nil || !os.SameFile(before, after) || keyed(t) != 0 {
			t.Errorf("staged again, it is another device, or has TLS: %v, %d", err, keyed(t))
		}
	}

	// What a start of the consumer's machine leaves.
	check.OK(t, c.agents[first].Stop())
	there := v.at(first)
	drivertest.Unmount(t, v.target(first))
	drivertest.Unmount(t, filepath.Join(there.Staging, "device"))
	for _, name := range strings.Fields(drivertest.Run(t, "dmsetup", "ls")) {
		if strings.HasPrefix(name, "ashlar-remote-") && !strings.HasSuffix(name, "-seat") { // which goes with what is over it
			drivertest.Run(t, "dmsetup", "remove", name)
		}
	}
	all, err := nvme.List(nvmet.Prefix)
	if check.OK(t, err); len(all) != 1 {
		t.Fatalf("connected are %+v", all)
	}
	check.OK(t, nvme.Disconnect(t.Context(), all[0].NQN))
	check.OK(t, errors.Join(c.agents[first].Start(), c.agents[first].Ready(t.Context())))
	c.again("stage it after a reboot", func(ctx context.Context) error { return v.up(ctx, first) })
	if keyed(t) != 1 {
		t.Error("it came back without TLS")
	}
	c.again("take it down", func(ctx context.Context) error { return v.down(ctx, first) })
	c.again("release it", func(ctx context.Context) error { return v.release(ctx, first) })

	// A home that gives it without TLS again gives it to nobody who uses nothing such.
	c.restartWith(home, plain)
	c.again("claim it again", func(ctx context.Context) error { return v.claim(ctx, first) })
	c.eventually("it is refused without TLS", func() bool {
		err := v.up(t.Context(), first)
		if err == nil {
			t.Fatal("it is staged without TLS")
		}
		return strings.Contains(err.Error(), "start the driver of its home with --remote-tls too")
	})
	c.again("give it back", func(ctx context.Context) error { return v.down(ctx, first) })
	c.again("release it again", func(ctx context.Context) error { return v.release(ctx, first) })
	c.again("delete it", v.of.Delete)
}

// TestTLSHDAway: a home whose driver starts while no tlshd runs ends what it gave; what comes then waits until one runs, and not for another start of the driver.
func TestTLSHDAway(t *testing.T) {
	drivertest.NeedTLS(t)
	c := newNodes(t)
	first := consumers[0]
	v := c.create("away", co.Block)
	c.again("claim it", func(ctx context.Context) error { return v.claim(ctx, first) })
	c.again("stage it", func(ctx context.Context) error { return v.up(ctx, first) })
	c.tlshd[home]()
	check.OK(t, errors.Join(c.agents[home].Start(), c.agents[home].Ready(t.Context())))
	c.again("take it down", func(ctx context.Context) error { return v.down(ctx, first) })
	c.again("release it", func(ctx context.Context) error { return v.release(ctx, first) })
	if all := left(); len(all) > 0 {
		t.Errorf("without tlshd at home, there is still %q", all)
	}
	drivertest.RunTLSHD(t, home)
	c.again("claim it again", func(ctx context.Context) error { return v.claim(ctx, first) })
	c.again("stage it again", func(ctx context.Context) error { return v.up(ctx, first) })
	c.again("take it down again", func(ctx context.Context) error { return v.down(ctx, first) })
	c.again("release it again", func(ctx context.Context) error { return v.release(ctx, first) })
	c.again("delete it", v.of.Delete)
}

// TestTLSSwitchedMoving: a volume that moves while it is used in plain text moves on, and its user goes on, if one of the nodes is told meanwhile to demand TLS, before both homes have
// all or after it; also when the user's driver has started once more.
func TestTLSSwitchedMoving(t *testing.T) {
	drivertest.NeedTLS(t)
	c := newNodesWith(t, map[string][]string{home: {plain}, newHome: {plain}, third: {plain}})
	for _, user := range []string{third, home, newHome} {
		for _, switched := range []string{home, newHome, third} {
			if switched == third && user != third {
				continue // it has no part in it
			}
			for _, step := range []string{copying, copied} {
				t.Run(fmt.Sprintf("used on %s, %s, %s switched", user, step, switched), func(t *testing.T) {
					in := *c
					in.TB = t
					u := in.writtenTo(fmt.Sprint(user, step, switched), user, co.Block, false)
					letGo := u.until(step, switched)
					c.restartWith(switched) // as those of the whole test, whose agents stay
					u.goesOn()
					letGo()
					u.moved(home, newHome)
					c.restartWith(user, c.more[user]...)
					before, err := os.Stat(u.target(user))
					check.OK(t, err)
					u.again("stage it again", func(ctx context.Context) error { return u.up(ctx, user) })
					if after, err := os.Stat(u.target(user)); err != nil || !os.SameFile(before, after) || keyed(t) != 0 {
						t.Errorf("staged again, it is another device, or has TLS: %v, %d", err, keyed(t))
					}
					u.goesOn()
					c.restartWith(switched, plain)
					u.ends()
				})
			}
		}
	}
}

// TestTLSSwitchedAnew: a copy to a node that is told to demand TLS, and that begins anew as the node was cut off, goes over TLS.
func TestTLSSwitchedAnew(t *testing.T) {
	drivertest.NeedTLS(t)
	c := newNodesWith(t, map[string][]string{home: {plain}, newHome: {plain}, third: {plain}})
	u := c.writtenTo("anew", third, co.Block, false)
	letGo := u.until(copying, newHome)
	c.restartWith(newHome)
	c.links(newHome, false)
	u.moving("its new home is away", func(now *v1alpha1.Volume) bool {
		return now.Status.Move != nil && strings.Contains(now.Status.Move.Message, "is away")
	})
	c.links(newHome, true)
	letGo()
	u.moved(home, newHome)
	if keyed(t) != 1 {
		t.Error("it goes over the network without TLS")
	}
	u.goesOn()
	u.ends()
}

// until has the volume move to its new home up to a step: copying, when it is written to both homes, or copied, when the object says that both have all. Who would go on from there,
// and is not the one who is switched, stands still until it is let go.
func (u *goingOn) until(step, switched string) (letGo func()) {
	u.Helper()
	hold := func(name string) {
		letGo = sync.OnceFunc(frozen(u.process(name)))
		u.Cleanup(letGo)
	}
	if step == copied {
		hold("controller")
		u.move(newHome)
		u.moving("all is copied", func(now *v1alpha1.Volume) bool { return now.Status.Move != nil && now.Status.Move.Copied != nil })
		return letGo
	}
	u.move(newHome)
	u.eventually("it is written to both", func() bool { return strings.Contains(drivertest.Run(u, "dmsetup", "table"), " mirror ") })
	if switched == home {
		hold(newHome)
	} else {
		hold(home)
	}
	if now := u.object(); now.Spec.NodeName != home || now.Status.Move != nil && now.Status.Move.Copied != nil {
		u.Fatal("it was all copied before anybody stood still")
	}
	return letGo
}
