package cluster_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
	"github.com/ashlar-csi/ashlar/pkg/volume/storetest"
)

// backup makes a backup of the API server. The function that it returns restores that.
func (w *environment) backup(v volume.Volume) (rollback func()) {
	w.Helper()
	as, err := client.New(apitest.Get(w).Agent(w, "node-1"), client.Options{Scheme: w.Scheme()})
	check.OK(w, err)
	answers := func() {
		w.eventually("the API server answers, agents too", func() bool {
			return errors.Join(w.Get(w.ctx, client.ObjectKey{Name: v.ID.Key}, &v1alpha1.Volume{}), as.Get(w.ctx, client.ObjectKey{Name: v.ID.Key}, &v1alpha1.Volume{})) == nil
		})
	}
	restore := apitest.Get(w).Backup(w)
	answers()
	return func() { restore(); answers() }
}

// TestMoveNewerStray: the bytes that node-2 has of a volume are newer than those that are the volume again on node-1: those were adopted when the object
// was deleted, or the API server was restored to before the volume moved. However often the volume is claimed then, it does not move to node-2 over the
// newer bytes.
func TestMoveNewerStray(t *testing.T) {
	for _, how := range []string{"adopted", "rolled back"} {
		t.Run(how, func(t *testing.T) {
			w, a, b, v, _ := atHome(t)
			rollback := w.backup(v)
			w.movesTo("v", b.name)
			w.copied("v")
			w.leftGone(v, a, b)
			check.OK(t, storetest.WriteTo(b.disks[0].Open("default", nil))(w.ctx, v.ID, 128<<10, []byte("since")))
			want := w.content(b, v.ID)
			b.stop()
			check.OK(t, second(b.local.Seal(w.ctx, v.ID, 1, "node-2")))
			if how == "adopted" {
				check.OK(t, w.Delete(w.ctx, w.object("v")))
				w.comesBack(a)
				w.adoptOn(a.name, "default", v.ID.String())
			} else {
				rollback()
				w.start(a)
			}
			w.eventually("it is the volume", func() bool {
				o := w.object("v")
				return o != nil && o.Spec.NodeName == a.name && o.Status.Created != nil
			})
			for range 2 {
				w.claimFor(v.ID, a.name)
				w.attaches(a, v.ID)
				w.claimFor(v.ID, "")
			}
			w.start(b)
			w.movesTo("v", b.name)
			w.eventually("it is refused, or has moved", func() bool {
				o := w.object("v")
				return o.Spec.NodeName == b.name || o.Status.Move != nil && strings.Contains(o.Status.Move.Message, "which may be newer")
			})
			if have := w.content(b, v.ID); string(have) != string(want) {
				t.Error("what was written since is gone")
			}
		})
	}
}

// saysMovedAway waits until the object of the volume says that the volume has left the node of the object.
func (w *environment) saysMovedAway() {
	w.Helper()
	w.eventually("its object says that it has left", func() bool {
		o := w.object("v")
		return len(o.Status.Health) == 1 && o.Status.Health[0].Reason == volume.ReasonMovedAway
	})
}

// hasObject waits until the volume has an object again, on a machine.
func (w *environment) hasObject(m *machine) {
	w.Helper()
	w.eventually("it has an object again", func() bool {
		o := w.object("v")
		return o != nil && o.Spec.NodeName == m.name && o.Status.Created != nil
	})
}

// adopted has the stray of a machine adopted, and used (usedAgain).
func (w *environment) adopted(m *machine, v volume.Volume, want []byte) {
	w.Helper()
	w.adoptOn(m.name, "default", v.ID.String())
	w.hasObject(m)
	w.usedAgain(m, v, want)
}

// usedAgain claims a volume for a machine, attaches it there, and compares its bytes.
func (w *environment) usedAgain(m *machine, v volume.Volume, want []byte) {
	w.Helper()
	w.claimFor(v.ID, m.name)
	w.attaches(m, v.ID)
	if have := w.content(m, v.ID); string(have) != string(want) {
		w.Error("its bytes are others")
	}
}

// TestMoveRolledBack: a volume has moved, and was used on its new node, and the old one could not delete its bytes. The API server is restored to before
// the move, while the new node is away. The old node knows that the volume has left it: its bytes cannot be used before a person has decided.
func TestMoveRolledBack(t *testing.T) {
	for _, adopted := range []string{"node-2", "node-1"} {
		t.Run(adopted+" is adopted", func(t *testing.T) {
			w, a, b, v, want := atHome(t)
			rollback := w.backup(v)
			w.movesTo("v", b.name)
			w.copied("v")
			a.stop()
			a.hook = func(operation string, _ blockdev.Ref) error {
				if operation == "Delete" {
					return errdefs.ErrUnavailable
				}
				return nil
			}
			w.start(a)
			w.flipped("v", b)
			w.movesays("v", "the bytes that node node-1 had are still there")
			check.OK(t, storetest.WriteTo(b.disks[0].Open("default", nil))(w.ctx, v.ID, 128<<10, []byte("since")))
			since := w.content(b, v.ID)
			a.stop()
			b.stop()
			rollback()
			a.hook = nil
			w.start(a)
			generation := w.claimFor(v.ID, a.name)
			here, err := a.local.Get(w.ctx, v.ID)
			check.OK(t, err)
			_, err = a.local.Attach(w.ctx, here, nil)
			fails(t, err, errdefs.ErrPrecondition)
			fails(t, second(a.local.CreateSnapshot(w.ctx, "cut", v.ID)), errdefs.ErrPrecondition)
			fails(t, second(a.local.Seal(w.ctx, v.ID, generation, "node-2")), errdefs.ErrPrecondition)
			w.saysMovedAway()
			w.claimFor(v.ID, "")
			check.OK(t, w.Delete(w.ctx, w.object("v")))
			w.strays("default", 1)
			if adopted == a.name {
				w.adopted(a, v, want)
				return
			}
			w.start(b)
			w.eventually("node-2 has a stray", func() bool { return w.pool(b.name, "default").Status.StrayCount == 1 })
			w.adopted(b, v, since)
			w.claimFor(v.ID, "")
			w.forgets(a, v.ID)
		})
	}
}

// TestMoveRolledBackUnseen: the same, and the old node was away while the volume moved, so its record does not say that. It asks the new node before it uses
// what it has. While that one does not answer, it waits, if the agent there is alive; one that is down it does not wait for.
func TestMoveRolledBackUnseen(t *testing.T) {
	back := func(t *testing.T) (w *environment, a, b *machine, v volume.Volume, want []byte) {
		w, a, b, v, want = atHome(t)
		b.stop()
		a.every, b.every = time.Second, time.Second
		w.start(b)
		w.eventually("the port of node-2 is known, also after the restore", func() bool {
			at := w.pool(b.name, "default").Status.Agent
			return at != nil && at.Address == b.port.Addr().String()
		})
		rollback := w.backup(v)
		w.movesTo("v", b.name)
		w.copied("v")
		a.stop()
		w.flipped("v", b)
		w.eventually("node-2 has taken it over", func() bool { s := w.object("v").Status.Move; return s != nil && s.Arrived })
		check.OK(t, storetest.WriteTo(b.disks[0].Open("default", nil))(w.ctx, v.ID, 128<<10, []byte("since")))
		rollback()
		return w, a, b, v, want
	}
	attach := func(m *machine, id volume.ID) error {
		here, err := m.local.Get(t.Context(), id)
		check.OK(t, err)
		_, err = m.local.Attach(t.Context(), here, nil)
		return err
	}
	t.Run("the new node answers", func(t *testing.T) {
		w, a, _, v, want := back(t)
		w.start(a)
		w.saysMovedAway()
		w.claimFor(v.ID, a.name)
		fails(t, attach(a, v.ID), errdefs.ErrPrecondition)
		w.claimFor(v.ID, "")
		check.OK(t, w.Delete(w.ctx, w.object("v")))
		w.strays("default", 1)
		w.adopted(a, v, want)
	})
	t.Run("the new node is in no network now", func(t *testing.T) {
		w, a, b, v, _ := back(t)
		b.stop()
		b.network = nil
		w.start(b)
		w.start(a)
		w.saysMovedAway()
		w.claimFor(v.ID, a.name)
		fails(t, attach(a, v.ID), errdefs.ErrPrecondition)
	})
	t.Run("adopted before anybody asks", func(t *testing.T) {
		w, a, b, v, want := back(t)
		b.stop()
		check.OK(t, w.Delete(w.ctx, w.object("v")))
		w.start(a)
		w.strays("default", 1)
		w.adoptOn(a.name, "default", v.ID.String())
		w.hasObject(a)
		w.start(b)
		w.usedAgain(a, v, want)
	})
	t.Run("the new node is silent", func(t *testing.T) {
		w, a, b, v, _ := back(t)
		b.stop()
		lease := cluster.Lease(leases, b.name)
		check.OK(t, w.Get(w.ctx, client.ObjectKeyFromObject(lease), lease))
		now := metav1.NowMicro()
		lease.Spec.RenewTime = &now
		check.OK(t, w.Update(w.ctx, lease))
		w.start(a)
		w.claimFor(v.ID, a.name)
		if err := attach(a, v.ID); !errors.Is(err, errdefs.ErrUnavailable) || !strings.Contains(err.Error(), "node node-2 has to say") {
			t.Errorf("its agent is alive: %v", err)
		}
		before := metav1.NewMicroTime(now.Add(-cluster.SilentAfter))
		lease.Spec.RenewTime = &before
		check.OK(t, w.Update(w.ctx, lease))
		w.attaches(a, v.ID)
	})
}

// TestMoveInUseRolledBack: the same with a volume that has moved in use, which its new node has not taken over yet. The new node keeps what was written
// since, whatever moves were asked for after the restore.
func TestMoveInUseRolledBack(t *testing.T) {
	for _, changed := range []bool{false, true} {
		t.Run(fmt.Sprintf("changed=%v", changed), func(t *testing.T) {
			c, _ := newConsumer(t)
			c.movesTo("v", "")
			rollback := c.backup(volume.Volume{ID: c.id})
			c.movesTo("v", c.b.name)
			c.usedSince()
			c.eventually("the old node knows that it has left", func() bool {
				have, err := c.a.local.Get(c.ctx, c.id)
				return err == nil && have.Left == c.b.name
			})
			rollback()
			c.saysMovedAway()
			if changed { // so that the object has another generation
				c.movesTo("v", c.b.name)
				c.movesTo("v", "")
			}
			c.eventually("nobody uses what the old one has", func() bool {
				_, err := c.home.Open(c.ctx, c.id, 1)
				return err != nil && strings.Contains(err.Error(), "has moved from node node-1 to node node-2")
			})
			c.start(c.b)
			c.isStray(c.b)
			want := c.keptSince()
			check.OK(t, c.Delete(c.ctx, c.object("v")))
			c.adoptOn(c.b.name, "default", c.id.String())
			c.hasObject(c.b)
			if have := c.content(c.b, c.id); string(have) != string(want) {
				t.Error("its bytes are others")
			}
		})
	}
}

// TestMoveInUseStrayEnds: the new node of a volume that has moved in use still exports its bytes to the user when those of the old node are adopted. The
// export ends when the volume is claimed for another node, or anew; the bytes stay.
func TestMoveInUseStrayEnds(t *testing.T) {
	for _, claims := range []int{1, 2} {
		t.Run(fmt.Sprintf("claims=%d", claims), func(t *testing.T) {
			c, _ := newConsumer(t)
			c.usedSince()
			check.OK(t, c.Delete(c.ctx, c.object("v")))
			c.isStray(c.a)
			c.adoptOn(c.a.name, "default", c.id.String())
			c.hasObject(c.a)
			exported := func() int {
				all := 0
				for _, name := range c.b.network.Exported() {
					if strings.Contains(name, ":2:") {
						all++
					}
				}
				return all
			}
			c.start(c.b)
			c.isStray(c.b)
			c.claimFor(c.id, c.name)
			c.b.stop() // it looks again when it starts, or after some minutes
			c.start(c.b)
			c.isStray(c.b)
			want := c.content(c.b, c.id)
			if n := exported(); n != 1 {
				t.Errorf("claimed for its user, %d are exported: %v", n, c.b.network.Exported())
			}
			c.claimFor(c.id, "")
			c.claimFor(c.id, map[int]string{1: c.a.name, 2: c.name}[claims])
			c.b.stop()
			c.start(c.b)
			c.eventually("it is not exported any more", func() bool { return exported() == 0 })
			c.isStray(c.b)
			if have := c.content(c.b, c.id); string(have) != string(want) {
				t.Error("its bytes are others")
			}
		})
	}
}
