package anynode

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/era"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/nvme"
	"github.com/ashlar-csi/ashlar/pkg/csimap"
	domain "github.com/ashlar-csi/ashlar/pkg/volume"
)

// mirrored is a volume with several legs.
type mirrored struct {
	*volume
	key    string
	legs   []string // names, and nodes
	on     []string
	common string // the name of the last moment in which all legs were equal, as the records of all of them had it when that was looked at (equal)
}

// mirror makes a volume with a leg on each of some nodes, the first one there first.
func (c *nodes) mirror(name, filesystem string, on ...string) *mirrored {
	c.Helper()
	return c.mirrorOf(64*mib, name, filesystem, on...)
}

// mirrorOf is mirror, of a size.
func (c *nodes) mirrorOf(size int64, name, filesystem string, on ...string) *mirrored {
	c.Helper()
	return c.mirrorWith(size, nil, name, filesystem, on...)
}

// mirrorWith is mirrorOf, with more parameters.
func (c *nodes) mirrorWith(size int64, more map[string]string, name, filesystem string, on ...string) *mirrored {
	c.Helper()
	for _, node := range append([]string{home}, consumers...) {
		c.cordon(node, !slices.Contains(on, node))
	}
	r := co.Request(name, filesystem, size)
	r.Parameters = map[string]string{"access": "any", "replicas": strconv.Itoa(len(on))}
	maps.Copy(r.Parameters, more)
	r.AccessibilityRequirements = &csi.TopologyRequirement{Preferred: []*csi.Topology{csimap.Topology(on[0])}, Requisite: []*csi.Topology{csimap.Topology(on[0])}}
	m := &mirrored{volume: &volume{nodes: c}, key: domain.KeyOf(name), on: on}
	c.eventually("volume "+name+" has its legs where they are to be", func() bool {
		c.again("volume "+name+" is made", func(ctx context.Context) (err error) {
			m.of, err = c.controller.Create(ctx, r)
			return err
		})
		if m.legs = m.legsOn(on); len(m.legs) == len(on) {
			return true
		}
		m.again("delete volume "+name, m.of.Delete) // the controller did not know yet which nodes take volumes
		return false
	})
	return m
}

// legsOn returns the legs that are on some nodes, in their order.
func (m *mirrored) legsOn(nodes []string) (legs []string) {
	m.Helper()
	for _, node := range nodes {
		for _, name := range m.object().Spec.Legs {
			leg := &v1alpha1.Volume{}
			if check.OK(m, m.kube.Get(m.Context(), client.ObjectKey{Name: name}, leg)); leg.Spec.NodeName == node {
				legs = append(legs, name)
			}
		}
	}
	return legs
}

// cordon has a node take no more volumes, or again.
func (c *nodes) cordon(node string, off bool) {
	c.Helper()
	now := &corev1.Node{}
	check.OK(c, c.kube.Get(c.Context(), client.ObjectKey{Name: node}, now))
	if now.Spec.Unschedulable != off {
		now.Spec.Unschedulable = off
		check.OK(c, c.kube.Update(c.Context(), now))
	}
	time.Sleep(200 * time.Millisecond) // the controller's watch
}

// object of the volume.
func (m *mirrored) object() *v1alpha1.ReplicatedVolume {
	m.Helper()
	v := &v1alpha1.ReplicatedVolume{}
	check.OK(m, m.kube.Get(m.Context(), client.ObjectKey{Name: m.key}, v))
	return v
}

// claims has a node use the volume.
func (m *mirrored) claims(node string) {
	m.Helper()
	m.again("claim it for "+node, func(ctx context.Context) error { return m.claim(ctx, node) })
}

// releases ends the use of a node.
func (m *mirrored) releases(node string) {
	m.Helper()
	m.again("release it on "+node, func(ctx context.Context) error { return m.release(ctx, node) })
}

// current waits until some legs are current, and no others.
func (m *mirrored) current(names ...string) {
	m.Helper()
	names = slices.Sorted(slices.Values(names))
	m.eventually(fmt.Sprintf("legs %v are current", names), func() bool {
		have := m.object().Current()
		slices.Sort(have)
		return slices.Equal(have, names)
	})
}

// TestReplicas: a volume with two legs is used by a node without one, by one with one, and by each after the other. Its legs are closed each time: they
// are known to be equal.
func TestReplicas(t *testing.T) {
	c := newNodes(t)
	for _, filesystem := range []string{co.Block, "ext4"} {
		t.Run(filesystem, func(t *testing.T) {
			in := *c
			in.TB = t
			m := in.mirror("replicas-"+filesystem, filesystem, home, consumers[0])
			for _, node := range []string{consumers[1], home, consumers[0]} {
				m.claims(node)
				began := time.Now()
				m.again("stage it on "+node, func(ctx context.Context) error { return m.up(ctx, node) })
				t.Logf("staged on %s in %v", node, time.Since(began))
				m.current(m.legs...)
				m.again("take it down on "+node, func(ctx context.Context) error { return m.down(ctx, node) })
				if s := m.object().Status; s.Closed != s.Opened {
					t.Errorf("it was taken down on %s: opened by claim %d, closed by %d", node, s.Opened, s.Closed)
				}
				m.releases(node)
			}
			m.delete()
		})
	}
}

// mirroredBy is a volume with several legs that a node uses: somebody writes to it all the time.
func (c *nodes) mirroredBy(name, user string, on ...string) (*mirrored, *writer) {
	c.Helper()
	m := c.mirror(name, co.Block, on...)
	m.claims(user)
	m.again("stage it on "+user, func(ctx context.Context) error { return m.up(ctx, user) })
	w, err := write(m.target(user), newTag())
	check.OK(c, err)
	m.goesOn(w)
	return m, w
}

// leg is the name of the leg on a node.
func (m *mirrored) leg(node string) string { return m.legs[slices.Index(m.on, node)] }

// use has a node use the volume, and makes sure that it finds what was acknowledged to a writer.
func (m *mirrored) find(node string, w *writer) {
	m.Helper()
	m.claims(node)
	m.again("stage it on "+node, func(ctx context.Context) error { return m.up(ctx, node) })
	have, err := read(m.target(node))
	check.OK(m, err)
	check.OK(m, w.lost(have))
}

// ends takes the volume down on a node, and deletes it.
func (m *mirrored) ends(node string) {
	m.Helper()
	m.leave(node)
	m.delete()
}

// delete deletes the volume, with all its legs, and nothing of any volume is left then.
func (m *mirrored) delete() {
	m.Helper()
	m.deleteBeside()
	m.gone()
}

// deleteBeside is delete where there are other volumes.
func (m *mirrored) deleteBeside() {
	m.Helper()
	m.again("delete it", m.of.Delete)
	for _, name := range m.legs {
		if err := m.kube.Get(m.Context(), client.ObjectKey{Name: name}, &v1alpha1.Volume{}); !apierrors.IsNotFound(err) {
			m.Errorf("leg %s: %v", name, err)
		}
	}
}

// TestReplicaFails: while a node without a leg writes, a leg's node is cut off from it, its driver is killed, the API server is away as well; what is acknowledged is on what is current, and all legs are current again at the end.
func TestReplicaFails(t *testing.T) {
	c := newNodes(t)
	user, near, far := consumers[0], home, consumers[1]
	cut := func(up bool) { c.link(user, up) } // the user from home
	for name, during := range map[string]func(m *mirrored, w *writer){
		"a leg is cut off": func(m *mirrored, w *writer) {
			cut(false)
			m.current(m.leg(far))
			m.goesOn(w)
			cut(true)
		},
		"the driver of a leg is killed": func(m *mirrored, w *writer) {
			back := killed(c, c.agents[near])
			m.goesOn(w)
			back()
		},
		"the driver of the user is killed, and a leg cut off": func(m *mirrored, w *writer) {
			back := killed(c, c.agents[user])
			m.goesOn(w)
			cut(false)
			back()
			m.current(m.leg(far))
			m.goesOn(w)
			cut(true)
		},
		"a leg is cut off, and the API server is": func(m *mirrored, w *writer) {
			c.reach(user, false)
			cut(false)
			time.Sleep(2 * time.Second)
			at := w.acked.Load()
			if nvme.Multipath() {
				at++ // the sync that was under way may be answered with success: TestFlushInFlight
			}
			time.Sleep(25 * time.Second)
			if now := w.acked.Load(); now > at {
				m.Errorf("%d writes were acknowledged on one leg while the list said two", now-at)
			}
			if current := m.object().Current(); len(current) != 2 {
				m.Errorf("%v are current", current)
			}
			c.reach(user, true)
			m.current(m.leg(far))
			m.goesOn(w)
			cut(true)
		},
	} {
		t.Run(name, func(t *testing.T) {
			in := *c
			in.TB = t
			m, w := in.mirroredBy("replica fails: "+name, user, near, far)
			during(m, w)
			m.current(m.legs...)
			m.goesOn(w)
			w.end()
			check.OK(t, w.err)
			m.again("take it down", func(ctx context.Context) error { return m.down(ctx, user) })
			m.releases(user)
			for _, node := range []string{near, far} { // each reads what it has itself
				m.find(node, w)
				if node == far {
					m.ends(node)
					break
				}
				m.again("take it down on "+node, func(ctx context.Context) error { return m.down(ctx, node) })
				m.releases(node)
			}
		})
	}
}

// wrote is how much was written to the leg on a node since it is attached there, in MiB; 0 if it is not.
func (m *mirrored) wrote(node string) int64 {
	m.Helper()
	names, err := dm.Names("")
	check.OK(m, err)
	for _, name := range names {
		if !strings.Contains(name, m.leg(node)) || !strings.HasSuffix(name, "-marks") {
			continue
		}
		d, err := dm.Find(name)
		if err != nil || d == nil {
			m.Fatalf("%s: %+v, %v", name, d, err)
		}
		n, err := d.Written()
		check.OK(m, err)
		return n / mib
	}
	return 0
}

// put writes to a block of the volume at a node, past the page cache.
func (v *volume) put(node string, at int64) {
	v.Helper()
	f, err := os.OpenFile(v.target(node), os.O_RDWR|unix.O_DIRECT, 0)
	check.OK(v, err)
	data := aligned()
	data[0] = 1
	_, err = f.WriteAt(data, at*mib)
	check.OK(v, err)
	check.OK(v, f.Close())
}

// TestReplicaComesBack: a leg that was away gets what was written since all were equal last, and not the whole volume: whoever uses it, and though its drivers and the user's were killed.
func TestReplicaComesBack(t *testing.T) {
	c := newNodes(t)
	check.OK(t, era.Available())
	user, near, far := consumers[0], home, consumers[1]
	m := c.mirror("replica comes back", co.Block, near, far)
	m.claims(user)
	m.again("stage it", func(ctx context.Context) error { return m.up(ctx, user) })
	away := func(during func()) (copied int64) {
		c.link(user, false)
		m.current(m.leg(far))
		during()
		c.link(user, true)
		m.current(m.legs...)
		return m.wrote(near) // it is given to the user anew, and so attached anew, when it joins
	}
	for at := range int64(20) {
		m.put(user, at)
	}
	// Since they were made, 20 and 1 were written.
	if n := away(func() { m.put(user, 30) }); n < 21 || n > 24 {
		t.Errorf("%d MiB were written to a leg that lacked one, of 21 that had ever been written", n)
	}
	m.equal()
	if n := away(func() { m.put(user, 31); m.put(user, 32) }); n < 2 || n > 4 {
		t.Errorf("%d MiB were written to a leg that lacked two", n)
	}
	m.equal()
	if n := away(func() {
		m.put(user, 33)
		killed(c, c.agents[user])()
		killed(c, c.agents[near])()
		killed(c, c.agents[far])()
		m.put(user, 34)
	}); n < 2 || n > 4 {
		t.Errorf("%d MiB were written to a leg that lacked two, after all drivers had been killed", n)
	}
	m.equal()
	m.again("take it down", func(ctx context.Context) error { return m.down(ctx, user) })
	m.releases(user)

	before := m.wrote(near)
	m.claims(far)
	m.again("stage it", func(ctx context.Context) error { return m.up(ctx, far) })
	m.current(m.legs...)
	if n := m.wrote(near) - before; n > 1 {
		t.Errorf("%d MiB were written to legs that were closed in good order", n)
	}
	m.again("take it down", func(ctx context.Context) error { return m.down(ctx, far) })
	m.releases(far)

	for _, node := range []string{near, far} {
		content, err := os.ReadFile(filepath.Join(c.dir, "pool-of-"+node, "volumes", m.leg(node)+".img"))
		check.OK(t, err)
		for at := range int64(64) {
			if is := content[at*mib] != 0; is != (at < 20 || at >= 30 && at <= 34) {
				t.Errorf("the leg on %s has something at %d MiB: %v", node, at, is)
			}
		}
	}
	m.delete()
}

var commonPattern = regexp.MustCompile(`"leg": *"[0-9]+:[0-9]+:(?:open|closed):[0-9a-f-]*:([0-9A-Z]+):[0-9]+[:"]`)

// equal waits until the records of all legs have a name for a moment in which they were equal, another one than before.
func (m *mirrored) equal() {
	m.Helper()
	m.eventually("the records of the legs say that they are equal", func() bool {
		common := map[string]bool{}
		for _, node := range m.on {
			record, _ := os.ReadFile(filepath.Join(m.dir, "pool-of-"+node, "volumes", m.leg(node)+".rec"))
			if found := commonPattern.FindSubmatch(record); found != nil {
				common[string(found[1])] = true
			} else {
				common[""] = true
			}
		}
		if len(common) != 1 || common[m.common] {
			return false
		}
		for name := range common {
			m.common = name
		}
		return true
	})
}

// same makes sure that all legs have the same bytes.
func (m *mirrored) same() {
	m.Helper()
	m.sameAmong(m.legs)
}

// sameAmong makes sure that some legs, on which nothing is written now, have the same bytes.
func (m *mirrored) sameAmong(legs []string) {
	m.Helper()
	var first []byte
	for _, node := range m.on {
		if !slices.Contains(legs, m.leg(node)) {
			continue
		}
		content, err := os.ReadFile(filepath.Join(m.dir, "pool-of-"+node, "volumes", m.leg(node)+".img"))
		check.OK(m, err)
		if first == nil {
			first = content
		}
		if !bytes.Equal(first, content) {
			m.Errorf("of the legs %v that on %s differs from the first one", legs, node)
		}
	}
}

// TestReplicaTakenOver: the node that uses a volume, and has a leg, is cut off from all others and from the API server while it writes. Another one takes the volume over with the other leg: nothing that was acknowledged is missing,
// and nothing is acknowledged any more on the node that was cut off, nor does anything of it arrive. When it is back its leg is made equal.
func TestReplicaTakenOver(t *testing.T) {
	c := newNodes(t)
	old, other, next := consumers[1], home, consumers[0]
	m, w := c.mirroredBy("replica taken over", old, other, old)
	c.reach(old, false)
	c.links(old, false)
	time.Sleep(2 * time.Second)
	acked := w.acked.Load()
	if nvme.Multipath() {
		acked++ // the sync that was under way may be answered with success: TestFlushInFlight
	}
	m.releases(old)
	began := time.Now()
	m.claims(next)
	m.again("stage it on "+next, func(ctx context.Context) error { return m.up(ctx, next) })
	t.Logf("staged on %s %v after its release", next, time.Since(began))
	m.current(m.leg(other))
	have, err := read(m.target(next))
	check.OK(t, err)
	check.OK(t, w.lost(have))
	after, err := write(m.target(next), newTag())
	check.OK(t, err)
	m.goesOn(after)
	if now := w.acked.Load(); now > acked {
		t.Errorf("%d writes were acknowledged to the node that was cut off", now-acked)
	}
	c.links(old, true)
	c.reach(old, true)
	m.again("take it down on "+old, func(ctx context.Context) error { return m.down(ctx, old) })
	w.end()
	if w.err == nil {
		t.Error("the writer of the node that was cut off had no error")
	}
	m.current(m.legs...)
	m.goesOn(after)
	after.end()
	check.OK(t, after.err)
	m.again("take it down on "+next, func(ctx context.Context) error { return m.down(ctx, next) })
	m.releases(next)
	m.find(old, after)
	m.ends(old)
}

// TestReplicaGrowsAndIsCut: a volume with two legs grows while it is used, and is cut while it is written to; both legs have the size, and the cut has what was synced before.
func TestReplicaGrowsAndIsCut(t *testing.T) {
	c := newNodes(t)
	user := consumers[0]
	m := c.mirror("replica grows", "ext4", home, consumers[1])
	m.claims(user)
	m.again("stage it on "+user, func(ctx context.Context) error { return m.up(ctx, user) })
	before := drivertest.Content{Seed: "before", Size: 4 * mib}
	check.OK(t, before.Write(filepath.Join(m.target(user), "before")))
	m.again("it grows", func(ctx context.Context) error { return m.of.Expand(ctx, 128*mib) })
	there := m.at(user)
	m.again("its filesystem grows", func(ctx context.Context) error { return there.NodeExpand(ctx, there.Target("pod")) })
	after := drivertest.Content{Seed: "after", Size: 90 * mib}
	check.OK(t, after.Write(filepath.Join(m.target(user), "after")))
	var cut *csi.Snapshot
	m.again("cut it", func(ctx context.Context) (err error) {
		cut, err = m.of.Snapshot(ctx, "replica grows: cut")
		return err
	})
	m.current(m.legs...)
	m.again("take it down on "+user, func(ctx context.Context) error { return m.down(ctx, user) })
	m.releases(user)
	for _, node := range m.on {
		m.claims(node)
		m.again("stage it on "+node, func(ctx context.Context) error { return m.up(ctx, node) })
		check.OK(t, before.In(filepath.Join(m.target(node), "before")))
		check.OK(t, after.In(filepath.Join(m.target(node), "after")))
		m.again("take it down on "+node, func(ctx context.Context) error { return m.down(ctx, node) })
		m.releases(node)
	}
	copied := c.create("replica grows: copy", "ext4", func(r *csi.CreateVolumeRequest) {
		r.CapacityRange.RequiredBytes = 128 * mib
		co.FromSnapshot(r, cut.GetSnapshotId())
	})
	copied.use(user, func(target string) {
		check.OK(t, before.In(filepath.Join(target, "before")))
		check.OK(t, after.In(filepath.Join(target, "after")))
	})
	copied.again("delete the copy", copied.of.Delete)
	m.again("delete the cut", func(ctx context.Context) error { return m.controller.RemoveSnapshot(ctx, cut.GetSnapshotId()) })
	m.delete()
}

// TestReplicaGrowsWhileOneJoins: a volume grows while a new leg gets its bytes, which takes long. It does not wait for that: the leg begins anew, and has all in
// the end.
func TestReplicaGrowsWhileOneJoins(t *testing.T) {
	const limit, size = 2 * mib, 40 * mib
	user, old, free := home, consumers[0], consumers[1]
	c := newNodesWith(t, map[string][]string{user: {fmt.Sprintf("--copy-bandwidth=%d", limit)}})
	m := c.mirror("replica grows while one joins", "ext4", user, old)
	m.claims(user)
	m.again("stage it on "+user, func(ctx context.Context) error { return m.up(ctx, user) })
	before := drivertest.Content{Seed: "before", Size: size}
	check.OK(t, before.Write(filepath.Join(m.target(user), "before")))
	unix.Sync() // what is written out later is written to the new leg as well, and not copied
	c.cordon(free, false)
	m.asksToMove(old, free)
	joins := func() bool {
		return slices.ContainsFunc(m.object().Status.Legs, func(l v1alpha1.Leg) bool { return l.State == v1alpha1.LegJoining })
	}
	c.eventually("a leg joins", joins)
	m.again("it grows", func(ctx context.Context) error { return m.of.Expand(ctx, 128*mib) })
	if !joins() {
		t.Fatal("the leg has joined already")
	}
	there := m.at(user)
	m.again("its filesystem grows", func(ctx context.Context) error { return there.NodeExpand(ctx, there.Target("pod")) })
	if legs := m.object().Current(); slices.ContainsFunc(m.legsOn([]string{free}), func(name string) bool { return slices.Contains(legs, name) }) {
		t.Error("it has waited for the leg that joins")
	}
	after := drivertest.Content{Seed: "after", Size: 60 * mib}
	check.OK(t, after.Write(filepath.Join(m.target(user), "after")))
	c.eventually("the leg has moved", func() bool {
		v := m.object()
		return len(v.Spec.Legs) == 2 && len(v.Current()) == 2 && !slices.Contains(v.Spec.Legs, m.leg(old))
	})
	m.again("take it down on "+user, func(ctx context.Context) error { return m.down(ctx, user) })
	m.releases(user)
	for _, node := range []string{free, user} {
		m.claims(node)
		m.again("stage it on "+node, func(ctx context.Context) error { return m.up(ctx, node) })
		check.OK(t, before.In(filepath.Join(m.target(node), "before")))
		check.OK(t, after.In(filepath.Join(m.target(node), "after")))
		m.again("take it down on "+node, func(ctx context.Context) error { return m.down(ctx, node) })
		m.releases(node)
	}
	m.again("delete it", m.of.Delete)
	c.gone()
}

// TestReplicaOlderCopy: the files of a leg are put back as they were a claim ago, as from a backup, and say that they are current. A snapshot that is made then is
// of another leg. The volume is used without the older copy, and that is made equal.
func TestReplicaOlderCopy(t *testing.T) {
	c := newNodes(t)
	user, restored, other := consumers[0], consumers[1], home
	m, w := c.mirroredBy("replica older copy", user, restored, other)
	w.end()
	check.OK(t, w.err)
	m.again("take it down", func(ctx context.Context) error { return m.down(ctx, user) })
	m.releases(user)
	back := killed(c, c.agents[restored])
	saved := map[string][]byte{}
	files, err := filepath.Glob(filepath.Join(c.dir, "pool-of-"+restored, "volumes", m.leg(restored)+".*"))
	check.OK(t, err)
	for _, file := range files {
		saved[file], err = os.ReadFile(file)
		check.OK(t, err)
	}
	if len(saved) != 2 {
		t.Fatalf("the leg has the files %v", files)
	}
	back()
	m.find(user, w)
	later, err := write(m.target(user), newTag())
	check.OK(t, err)
	m.goesOn(later)
	later.end()
	check.OK(t, later.err)
	m.again("take it down", func(ctx context.Context) error { return m.down(ctx, user) })
	m.releases(user)
	back = killed(c, c.agents[restored])
	for file, content := range saved {
		check.OK(t, os.WriteFile(file, content, 0o600))
	}
	back()
	var cut *csi.Snapshot
	m.again("cut it", func(ctx context.Context) (err error) {
		cut, err = m.of.Snapshot(ctx, "replica older copy: cut")
		return err
	})
	copied := c.create("replica older copy: copy", co.Block, func(r *csi.CreateVolumeRequest) {
		r.CapacityRange.RequiredBytes = 64 * mib
		co.FromSnapshot(r, cut.GetSnapshotId())
	})
	copied.use(user, func(target string) {
		have, err := read(target)
		check.OK(t, err)
		check.OK(t, later.lost(have))
	})
	copied.again("delete the copy", copied.of.Delete)
	m.again("delete the cut", func(ctx context.Context) error { return m.controller.RemoveSnapshot(ctx, cut.GetSnapshotId()) })
	m.claims(restored) // the node that has the older copy
	m.again("stage it", func(ctx context.Context) error { return m.up(ctx, restored) })
	have, err := read(m.target(restored))
	check.OK(t, err)
	check.OK(t, later.lost(have))
	m.current(m.legs...)
	m.again("take it down", func(ctx context.Context) error { return m.down(ctx, restored) })
	m.releases(restored)
	m.find(restored, later)
	m.ends(restored)
}

// asksToMove asks for the leg of a node to move to another one.
func (m *mirrored) asksToMove(from, to string) {
	m.Helper()
	leg := &v1alpha1.Volume{}
	check.OK(m, m.kube.Get(m.Context(), client.ObjectKey{Name: m.leg(from)}, leg))
	before := leg.DeepCopy()
	leg.Spec.Move = &v1alpha1.Move{Node: to}
	check.OK(m, m.kube.Patch(m.Context(), leg, client.MergeFrom(before)))
}

// moves asks for the leg of a node to move to another one, and waits until the volume has legs on some nodes, all current.
func (m *mirrored) moves(from, to string, on ...string) {
	m.Helper()
	m.asksToMove(from, to)
	began := time.Now()
	m.eventually(fmt.Sprintf("it has legs on %v", on), func() bool {
		var list v1alpha1.VolumeList
		check.OK(m, m.kube.List(m.Context(), &list))
		m.legs, m.on = nil, nil
		still := false
		for _, v := range list.Items {
			if v.Spec.ReplicaOf == m.key {
				m.legs, m.on = append(m.legs, v.Name), append(m.on, v.Spec.NodeName)
				still = still || v.Spec.Move != nil
			}
		}
		slices.Sort(on)
		have := slices.Clone(m.on)
		slices.Sort(have)
		return !still && slices.Equal(have, on) && len(m.object().Current()) == len(on) && len(m.object().Spec.Legs) == len(on)
	})
	m.Logf("the leg on %s was on %s after %v", from, to, time.Since(began))
}

// TestReplicaMoves: a leg is asked to move while its volume is written to: another one takes its place. Then one moves that nobody uses. What was acknowledged is on each.
func TestReplicaMoves(t *testing.T) {
	c := newNodes(t)
	user, other, free := home, consumers[0], consumers[1]
	m, w := c.mirroredBy("replica moves", user, user, other)
	c.cordon(free, false)
	m.moves(other, free, user, free)
	m.goesOn(w)
	m.moves(user, other, other, free) // the near one
	m.goesOn(w)
	w.end()
	check.OK(t, w.err)
	m.again("take it down on "+user, func(ctx context.Context) error { return m.down(ctx, user) })
	m.releases(user)
	m.moves(free, user, other, user)
	for _, node := range []string{other, user, free} {
		m.find(node, w)
		m.current(m.legs...)
		if node == free {
			m.ends(node)
			break
		}
		m.again("take it down on "+node, func(ctx context.Context) error { return m.down(ctx, node) })
		m.releases(node)
	}
}

// TestReplicaRestoredBeforeGrowth: while a volume is used it grows, and one of its legs is replaced; then etcd is put back to before that, and everything is started
// anew. The volume has the size that it had, with what was written behind the older end.
func TestReplicaRestoredBeforeGrowth(t *testing.T) {
	c := newNodes(t)
	user, leaves, comes := home, consumers[0], consumers[1]
	m := c.mirror("replica restored before growth", co.Block, user, leaves)
	c.cordon(comes, false)
	m.claims(user)
	m.again("stage it", func(ctx context.Context) error { return m.up(ctx, user) })
	restore := apitest.Get(t).Backup(t)
	const size = 80 * mib
	m.again("grow it", func(ctx context.Context) error {
		_, err := c.controller.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{VolumeId: m.of.ID, CapacityRange: &csi.CapacityRange{RequiredBytes: size}, VolumeCapability: m.of.Capability})
		return err
	})
	there := m.at(user)
	m.again("its node knows", func(ctx context.Context) error { return there.NodeExpand(ctx, there.Target("pod")) })
	m.put(user, 70)
	m.moves(leaves, comes, user, comes)
	restore()
	for _, d := range append(slices.Collect(maps.Values(c.agents)), c.controller) {
		d.Kill()
		check.OK(t, d.Start())
	}
	m.eventually("it has its size", func() bool { return m.object().Spec.Size == size })
	m.eventually("it has two current legs", func() bool { return len(m.object().Current()) == 2 && len(m.object().Spec.Legs) == 2 })
	m.put(user, 71)
	m.leave(user)
	for _, node := range []string{comes, leaves} {
		m.use(node, func(target string) {
			f, err := os.Open(target)
			check.OK(t, err)
			defer f.Close()
			for _, at := range []int64{70, 71} {
				b := make([]byte, 1)
				if _, err := f.ReadAt(b, at*mib); err != nil || b[0] != 1 {
					t.Errorf("on %s, at %d MiB it has %d, %v", node, at, b[0], err)
				}
			}
		})
	}
	m.deleteBeside()
}

// compared asks for the legs of the volume to be compared, and waits until that is done.
func (m *mirrored) compared() *v1alpha1.Scrub {
	m.Helper()
	v := m.object()
	before := v.DeepCopy()
	v.Spec.Scrubs++
	check.OK(m, m.kube.Patch(m.Context(), v, client.MergeFrom(before)))
	began := time.Now()
	is := func() bool {
		s := m.object().Status.Scrub
		return s != nil && s.Asked == v.Spec.Scrubs && s.Progress == nil
	}
	for time.Since(began) < 5*time.Minute && !is() { // beside a writer that never rests it may take that long on one CPU
		time.Sleep(time.Second)
	}
	m.eventually("its legs were compared", is)
	m.Logf("compared after %v", time.Since(began))
	return m.object().Status.Scrub
}

// TestReplicaScrub: the legs of a volume are compared while it is written to: nothing differs. Then a block of one leg rots: that is found, and told, until it is so no more; a compare goes on where it was, also by another user.
func TestReplicaScrub(t *testing.T) {
	c := newNodes(t)
	user, near, far := home, home, consumers[0]
	m, w := c.mirroredBy("replica scrub", user, near, far)
	if s := m.compared(); s.Last != nil || s.Ended == nil {
		t.Errorf("they differ: %+v", s.Last)
	}
	m.goesOn(w)
	const at = 15*mib + 8192
	flip := func() {
		t.Helper()
		file, err := os.OpenFile(filepath.Join(c.dir, "pool-of-"+far, "volumes", m.leg(far)+".img"), os.O_RDWR, 0)
		check.OK(t, err)
		defer file.Close()
		b := make([]byte, 1)
		_, err = file.ReadAt(b, at)
		check.OK(t, err)
		b[0] ^= 1
		_, err = file.WriteAt(b, at)
		check.OK(t, err)
		check.OK(t, file.Sync())
	}
	flip()
	s := m.compared()
	if s.Last == nil || s.Last.Bytes != 4096 || len(s.Last.Ranges) != 1 || s.Last.Ranges[0] != (v1alpha1.ByteRange{Offset: at, Length: 4096}) {
		t.Errorf("found were %+v", s.Last)
	}
	w.end()
	check.OK(t, w.err)
	m.again("take it down on "+user, func(ctx context.Context) error { return m.down(ctx, user) })
	m.releases(user)

	v := m.object()
	before := v.DeepCopy()
	v.Status.Scrub.Progress = &v1alpha1.Progress{Done: 15*mib + mib/2, Total: v.Spec.Size}
	check.OK(t, m.kube.Status().Patch(m.Context(), v, client.MergeFrom(before)))
	next := consumers[1]
	m.find(next, w)
	m.eventually("the rest was compared", func() bool { return m.object().Status.Scrub.Progress == nil })
	if s := m.object().Status.Scrub; s.Last != nil {
		t.Errorf("behind what differs, found was %+v", s.Last)
	}
	flip()
	if s := m.compared(); s.Last != nil {
		t.Errorf("they differ: %+v", s.Last)
	}
	m.ends(next)
}

// TestReplicaBandwidth: what is copied to the legs that join is within the limit of the node that uses them, all together; and two join at once at the most.
func TestReplicaBandwidth(t *testing.T) {
	const limit, volumes, size = 4 * mib, 3, 40 * mib
	for _, flags := range [][]string{nil, {fmt.Sprintf("--copy-bandwidth=%d", limit)}} {
		t.Run(fmt.Sprint(flags), func(t *testing.T) {
			c := newNodesWith(t, map[string][]string{home: flags})
			user, old, free := home, consumers[0], consumers[1]
			var all []*mirrored
			for i := range volumes {
				m := c.mirror(fmt.Sprint("bandwidth ", len(flags), i), "ext4", user, old)
				m.claims(user)
				m.again("stage it on "+user, func(ctx context.Context) error { return m.up(ctx, user) })
				check.OK(t, drivertest.Content{Seed: fmt.Sprint(i), Size: size}.Write(filepath.Join(m.target(user), "data"))) // a new leg gets what there is
				all = append(all, m)
			}
			unix.Sync() // what is written out later is written to the new leg as well, and not copied
			c.cordon(free, false)
			for _, m := range all {
				m.asksToMove(old, free)
			}
			began, most := time.Now(), 0
			c.eventually("all have moved", func() bool {
				done, joining := true, 0
				for _, m := range all {
					v := m.object()
					done = done && len(v.Spec.Legs) == 2 && len(v.Current()) == 2 && !slices.Contains(v.Spec.Legs, m.leg(old))
					for _, l := range v.Status.Legs {
						if l.State == v1alpha1.LegJoining {
							joining++
						}
					}
				}
				most = max(most, joining)
				return done
			})
			took := time.Since(began)
			t.Logf("%d MiB, %v: all have moved after %v, %d at once", volumes*size/mib, flags, took, most)
			if least := volumes * size / limit * time.Second; flags != nil && took < least*7/10 {
				t.Errorf("with the limit it took %v, and not %v\n%s", took, least, c.logs())
			}
			if most > 2 {
				t.Errorf("%d legs joined at once", most)
			}
			for _, m := range all {
				m.again("take it down on "+user, func(ctx context.Context) error { return m.down(ctx, user) })
				m.releases(user)
				m.again("delete it", m.of.Delete)
			}
			c.gone()
		})
	}
}

// TestReplicaFollows: what may be changed of a volume changes while it is used, and a driver that starts sets it again.
func TestReplicaFollows(t *testing.T) {
	c := newNodes(t)
	user := consumers[0]
	m := c.mirror("replica follows", co.Block, home, consumers[1])
	m.claims(user)
	m.again("stage it on "+user, func(ctx context.Context) error { return m.up(ctx, user) })
	info, err := os.Stat(m.target(user))
	check.OK(t, err)
	number := info.Sys().(*syscall.Stat_t).Rdev
	setting := fmt.Sprintf("/sys/dev/block/%d:%d/queue/read_ahead_kb", unix.Major(number), unix.Minor(number))
	is := func(want string) {
		t.Helper()
		m.eventually("the setting is "+want, func() bool {
			have, err := os.ReadFile(setting)
			check.OK(t, err)
			return strings.TrimSpace(string(have)) == want
		})
	}
	for _, value := range []string{"256", "768"} {
		for _, name := range m.legs {
			leg := &v1alpha1.Volume{}
			check.OK(t, c.kube.Get(t.Context(), client.ObjectKey{Name: name}, leg))
			before := leg.DeepCopy()
			leg.Spec.Mutable = map[string]string{"readAheadKiB": value}
			check.OK(t, c.kube.Patch(t.Context(), leg, client.MergeFrom(before)))
		}
		is(value)
	}
	back := killed(c, c.agents[user])
	check.OK(t, os.WriteFile(setting, []byte("64"), 0))
	back()
	is("768")
	m.ends(user)
}

// TestReplicaGroup: two volumes with replicas are cut at one moment while somebody writes to the one, then to the other: what the second one has the first one has too, and not much more.
func TestReplicaGroup(t *testing.T) {
	c := newNodes(t)
	user := consumers[1]
	var both [2]*mirrored
	var files [2]*os.File
	for i := range both {
		m := c.mirror(fmt.Sprint("replica group ", i), "ext4", home, consumers[0])
		m.claims(user)
		m.again("stage it on "+user, func(ctx context.Context) error { return m.up(ctx, user) })
		var err error
		files[i], err = os.OpenFile(filepath.Join(m.target(user), "count"), os.O_CREATE|os.O_RDWR|os.O_SYNC, 0o600)
		check.OK(t, err)
		both[i] = m
	}
	var stop atomic.Bool
	var written atomic.Int64 // to both
	done := make(chan error, 1)
	go func() {
		for n := 1; !stop.Load(); n++ {
			for _, file := range files {
				if _, err := file.WriteAt(fmt.Appendf(nil, "%020d", n), 0); err != nil {
					done <- err
					return
				}
			}
			written.Store(int64(n))
			time.Sleep(time.Millisecond)
		}
		done <- nil
	}()
	c.eventually("both are written to", func() bool { return written.Load() >= 10 })
	var group *csi.VolumeGroupSnapshot
	c.again("cut both", func(ctx context.Context) (err error) {
		group, err = c.controller.Group(ctx, "replica group", both[0].of.ID, both[1].of.ID)
		return err
	})
	time.Sleep(time.Second)
	stop.Store(true)
	check.OK(t, <-done)
	var counts [2]int
	for i, m := range both {
		check.OK(t, files[i].Close())
		at := slices.IndexFunc(group.GetSnapshots(), func(one *csi.Snapshot) bool { return one.GetSourceVolumeId() == m.of.ID })
		copied := c.create(fmt.Sprint("replica group: copy ", i), "ext4", func(r *csi.CreateVolumeRequest) {
			r.CapacityRange.RequiredBytes = 64 * mib
			co.FromSnapshot(r, group.GetSnapshots()[at].GetSnapshotId())
		})
		copied.use(user, func(target string) {
			text, err := os.ReadFile(filepath.Join(target, "count"))
			check.OK(t, err)
			counts[i], err = strconv.Atoi(strings.TrimLeft(string(text), "0"))
			check.OK(t, err)
		})
		copied.again("delete the copy", copied.of.Delete)
	}
	t.Logf("the first was cut at %d, the second at %d", counts[0], counts[1])
	if counts[1] < 10 || counts[0] < counts[1] || counts[0] > counts[1]+1 {
		t.Errorf("they were cut at %d and %d", counts[0], counts[1])
	}
	c.again("delete the group", func(ctx context.Context) error {
		return c.controller.RemoveGroup(ctx, group.GetGroupSnapshotId(), group.GetSnapshots()...)
	})
	for _, m := range both {
		m.again("take it down", func(ctx context.Context) error { return m.down(ctx, user) })
		m.releases(user)
		m.again("delete it", m.of.Delete)
	}
	c.gone()
}
