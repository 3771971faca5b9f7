package anynode

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	domain "github.com/ashlar-csi/ashlar/pkg/volume"
)

// mirrored is a volume with several legs.
type mirrored struct {
	*volume
	key  string
	legs []string // names, and nodes
	on   []string
}

// mirror makes a volume with a leg on each of some nodes.
func (c *nodes) mirror(name, filesystem string, on ...string) *mirrored {
	c.Helper()
	key := domain.KeyOf(name)
	m := &mirrored{volume: &volume{nodes: c}, key: key, on: on}
	size := int64(16 * mib)
	if filesystem != co.Block {
		size = 64 * mib
	}
	capability := co.Request(name, filesystem, size).VolumeCapabilities[0]
	for i, node := range on {
		leg := &v1alpha1.Volume{}
		leg.Spec = v1alpha1.VolumeSpec{NodeName: node, Pool: "default", Name: name, Size: size, Access: "any", ReplicaOf: key, Intent: v1alpha1.Intent{Make: true}}
		if filesystem != co.Block {
			leg.Spec.Filesystem = filesystem
		}
		if i > 0 {
			leg.Spec.Name = fmt.Sprintf("leg-%d-of-%s", i+1, key)
		}
		leg.Name = domain.KeyOf(leg.Spec.Name)
		check.OK(c, c.kube.Create(c.Context(), leg))
		m.legs = append(m.legs, leg.Name)
	}
	for _, name := range m.legs {
		c.eventually("leg "+name+" is made", func() bool {
			leg := &v1alpha1.Volume{}
			return c.kube.Get(c.Context(), client.ObjectKey{Name: name}, leg) == nil && leg.Status.Created != nil
		})
	}
	v := &v1alpha1.ReplicatedVolume{}
	v.Name = key
	v.Spec = v1alpha1.ReplicatedVolumeSpec{Name: name, Pool: "default", Replicas: len(on), Size: size, Legs: m.legs, Numbered: int64(len(on))}
	check.OK(c, c.kube.Create(c.Context(), v))
	v.Status.Made = new(metav1.NowMicro())
	for _, name := range m.legs {
		v.Status.Legs = append(v.Status.Legs, v1alpha1.Leg{Name: name, Current: true, State: v1alpha1.LegCurrent})
	}
	check.OK(c, c.kube.Status().Update(c.Context(), v))
	m.of = c.agents[on[0]].Volume("vol.default."+key, name, capability)
	return m
}

// object of the volume.
func (m *mirrored) object() *v1alpha1.ReplicatedVolume {
	m.Helper()
	v := &v1alpha1.ReplicatedVolume{}
	check.OK(m, m.kube.Get(m.Context(), client.ObjectKey{Name: m.key}, v))
	return v
}

// claim has a node use the volume: it, and each leg.
func (m *mirrored) claim(node string) {
	m.Helper()
	m.claimBut(node)
}

// claimBut is claim, but for legs that nobody can reach.
func (m *mirrored) claimBut(node string, but ...string) {
	m.Helper()
	m.again("claim it for "+node, func(ctx context.Context) error {
		v := m.object()
		v.Spec.Claims++
		v.Spec.Claim = &v1alpha1.Claim{Node: node, Mode: "mount SINGLE_NODE_WRITER", Generation: v.Spec.Claims}
		return m.kube.Update(ctx, v)
	})
	for _, name := range m.legs {
		if !slices.Contains(but, name) {
			m.claimLeg(name, node)
		}
	}
}

func (m *mirrored) claimLeg(name, node string) {
	m.Helper()
	m.again("claim leg "+name+" for "+node, func(ctx context.Context) error {
		leg := &v1alpha1.Volume{}
		check.OK(m, m.kube.Get(ctx, client.ObjectKey{Name: name}, leg))
		leg.Spec.Claims++
		leg.Spec.Claim = &v1alpha1.Claim{Node: node, Mode: "block SINGLE_NODE_WRITER", Generation: leg.Spec.Claims}
		return m.kube.Update(ctx, leg)
	})
}

func (m *mirrored) releaseLeg(name string) {
	m.Helper()
	m.again("release leg "+name, func(ctx context.Context) error {
		leg := &v1alpha1.Volume{}
		check.OK(m, m.kube.Get(ctx, client.ObjectKey{Name: name}, leg))
		if leg.Spec.Claim != nil {
			leg.Spec.Claim = nil
			if err := m.kube.Update(ctx, leg); err != nil {
				return err
			}
		}
		if leg.Status.Export != nil {
			return fmt.Errorf("it is given to %s", leg.Status.Export.Node)
		}
		return nil
	})
}

// release takes the claims off, but for those of legs that nobody can reach.
func (m *mirrored) release(but ...string) {
	m.Helper()
	for _, name := range m.legs {
		if !slices.Contains(but, name) {
			m.releaseLeg(name)
		}
	}
	m.again("release it", func(ctx context.Context) error {
		v := m.object()
		v.Spec.Claim = nil
		return m.kube.Update(ctx, v)
	})
}

// current waits until some legs are current, and no others.
func (m *mirrored) current(names ...string) {
	m.Helper()
	slices.Sort(names)
	m.eventually(fmt.Sprintf("legs %v are current", names), func() bool {
		have := m.object().Current()
		slices.Sort(have)
		return slices.Equal(have, names)
	})
}

// TestReplicas: a volume with two legs is used by a node without one, by one with one, and by each after the other; a leg fails, and comes back.
func TestReplicas(t *testing.T) {
	c := newNodes(t)
	for _, filesystem := range []string{co.Block, "ext4"} {
		t.Run(filesystem, func(t *testing.T) {
			in := *c
			in.TB = t
			m := in.mirror("replicas-"+filesystem, filesystem, home, consumers[0])
			for _, node := range []string{consumers[1], home, consumers[0]} {
				m.claim(node)
				began := time.Now()
				m.again("stage it on "+node, func(ctx context.Context) error { return m.up(ctx, node) })
				t.Logf("staged on %s in %v", node, time.Since(began))
				m.current(m.legs...)
				m.again("take it down on "+node, func(ctx context.Context) error { return m.down(ctx, node) })
				m.release()
			}
			m.delete()
		})
	}
}

// mirroredBy is a volume with several legs that a node uses: somebody writes to it all the time.
func (c *nodes) mirroredBy(name, user string, on ...string) (*mirrored, *writer) {
	c.Helper()
	m := c.mirror(name, co.Block, on...)
	m.claim(user)
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
	m.claim(node)
	m.again("stage it on "+node, func(ctx context.Context) error { return m.up(ctx, node) })
	have, err := read(m.target(node))
	check.OK(m, err)
	check.OK(m, w.lost(have))
}

// ends takes the volume down on a node, and deletes it.
func (m *mirrored) ends(node string) {
	m.Helper()
	m.again("take it down on "+node, func(ctx context.Context) error { return m.down(ctx, node) })
	m.release()
	m.delete()
}

// delete deletes the volume.
func (m *mirrored) delete() {
	m.Helper()
	for _, name := range m.legs {
		m.again("delete leg "+name, func(ctx context.Context) error {
			leg := &v1alpha1.Volume{}
			err := m.kube.Get(ctx, client.ObjectKey{Name: name}, leg)
			if err != nil || leg.Spec.Delete != "" {
				return client.IgnoreNotFound(err)
			}
			leg.Spec.Delete = leg.UID
			return m.kube.Update(ctx, leg)
		})
	}
	check.OK(m, m.kube.Delete(m.Context(), m.object()))
	m.eventually("all legs are gone", func() bool {
		return !slices.ContainsFunc(m.legs, func(name string) bool {
			return m.kube.Get(m.Context(), client.ObjectKey{Name: name}, &v1alpha1.Volume{}) == nil
		})
	})
	m.gone()
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
			m.release()
			for _, node := range []string{near, far} { // each reads what it has itself
				m.find(node, w)
				if node == far {
					m.ends(node)
					break
				}
				m.again("take it down on "+node, func(ctx context.Context) error { return m.down(ctx, node) })
				m.release()
			}
		})
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
	m.release(m.leg(old))
	began := time.Now()
	m.claimBut(next, m.leg(old))
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
	m.releaseLeg(m.leg(old))
	m.claimLeg(m.leg(old), next)
	m.current(m.legs...)
	m.goesOn(after)
	after.end()
	check.OK(t, after.err)
	m.again("take it down on "+next, func(ctx context.Context) error { return m.down(ctx, next) })
	m.release()
	m.find(old, after)
	m.ends(old)
}
