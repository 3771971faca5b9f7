package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lazy"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/agent"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/volume"
	"github.com/ashlar-csi/ashlar/pkg/volume/storetest"
)

// inSet returns the spec of a volume that may be in either pool of a node.
func inSet(name string) volume.Spec {
	one := spec(name)
	one.Pool = "default,b"
	return one
}

// other returns the other pool of a machine.
func other(pool string) string {
	if pool == "b" {
		return "default"
	}
	return "b"
}

// TestSetRefused: if the pool that was chosen has no room after all, or cannot make the volume, the next pool of the set makes it in the same call. If all
// refuse it, nothing is left, and the error is that of the last one. Any other failure is final.
func TestSetRefused(t *testing.T) {
	for want, c := range map[string]struct {
		refusal error
		most    int32 // how many pools refuse
		fails   error
	}{
		"made by the next one": {fmt.Errorf("%w: really", errdefs.ErrNoSpace), 1, nil},
		"provisioned by it":    {fmt.Errorf("%w: only thick", errdefs.ErrUnsupported), 1, nil},
		"no room in any":       {fmt.Errorf("%w: really", errdefs.ErrNoSpace), 2, errdefs.ErrNoSpace},
		"another failure":      {fmt.Errorf("%w: bad", errdefs.ErrInvalid), 1, errdefs.ErrInvalid},
	} {
		t.Run(want, func(t *testing.T) {
			var refused atomic.Int32
			w := newEnvironment(t)
			m := w.machineWith(nodeName, func(operation string, ref blockdev.Ref) error {
				if operation == "Create" && ref.Key == volume.KeyOf("v") && refused.Add(1) <= c.most {
					return c.refusal
				}
				return nil
			})
			s, _ := w.store()
			w.pooled(s, m)
			v, err := s.Create(w.ctx, inSet("v"))
			if !errors.Is(err, c.fails) {
				t.Fatalf("error %v, want %v", err, c.fails)
			}
			if c.fails == nil {
				if o := w.object("v"); o.Spec.Pool != v.ID.Pool || refused.Load() != 2 {
					t.Errorf("object %+v, volume %s, asked %d times", o.Spec, v.ID, refused.Load())
				}
				check.OK(t, s.Delete(w.ctx, v.ID))
			}
			if w.object("v") != nil || refused.Load() != max(c.most, 2) && c.fails == nil {
				t.Error("its object is left")
			}
			w.tally(m)
		})
	}
}

// TestSetIll: pools with a problem are taken last. Pools that are not accessible are not taken, and have no room.
func TestSetIll(t *testing.T) {
	w, m, s := newCluster(t)
	ail := func(worst blockdev.Severity) {
		m.disks[1].Ail(blockdev.Ref{}, blockdev.Problem{Severity: worst, Reason: "DiskFailing", Message: "m"})
		m.agent.Changed()
		w.eventually("the object says so", func() bool {
			health := w.pool(nodeName, "b").Status.Health
			return len(health) == 1 && health[0].Severity == worst.String()
		})
	}
	whole, err := s.Capacity(w.ctx, "*", volume.NotEncrypted, nodeName)
	check.OK(t, err)
	ail(blockdev.Degraded)
	w.eventually("the store knows it", func() bool {
		v, err := s.Create(w.ctx, inSet("first"))
		check.OK(t, err)
		check.OK(t, s.Delete(w.ctx, v.ID))
		return v.ID.Pool == "default"
	})
	for i := range 3 {
		if v, err := s.Create(w.ctx, inSet(fmt.Sprint("v", i))); err != nil || v.ID.Pool != "default" {
			t.Errorf("%+v, %v", v, err)
		}
	}
	large := inSet("large")
	large.Size.Required = 1000 * mib
	if v, err := s.Create(w.ctx, large); err != nil || v.ID.Pool != "default" {
		t.Errorf("%+v, %v", v, err)
	}
	large.Name = "large too"
	if v, err := s.Create(w.ctx, large); err != nil || v.ID.Pool != "b" { // the only pool with room
		t.Errorf("%+v, %v", v, err)
	}
	ail(blockdev.Inaccessible)
	w.eventually("what cannot be used has no room", func() bool {
		c, err := s.Capacity(w.ctx, "*", volume.NotEncrypted, nodeName)
		check.OK(t, err)
		return c.Available > 0 && c.Available < whole.Available/2 && c.MaxVolume == c.Available
	})
	large = inSet("too large")
	large.Size.Required = 25 * mib
	fails(t, second(s.Create(w.ctx, large)), errdefs.ErrNoSpace)
}

// TestSetTakenBack: a volume was asked of a pool that cannot be used then. It stays there until the pool is reported as inaccessible; then another pool
// makes it when it is asked for again.
func TestSetTakenBack(t *testing.T) {
	var down atomic.Bool
	w := newEnvironment(t)
	m := w.machineWith(nodeName, func(operation string, ref blockdev.Ref) error {
		if operation == "Create" && ref.Key == volume.KeyOf("v") && down.Load() {
			return fmt.Errorf("%w: no disk", errdefs.ErrUnavailable)
		}
		return nil
	})
	s, _ := w.store()
	w.pooled(s, m)
	down.Store(true)
	w.asked("it is asked for", func(ctx context.Context) error { return second(s.Create(ctx, inSet("v"))) }, func() bool { return w.object("v") != nil })
	first := w.object("v").Spec.Pool
	fails(t, second(s.Create(soon(t), inSet("v"))), errdefs.ErrUnavailable)
	if now := w.object("v").Spec.Pool; now != first {
		t.Errorf("it went from %s to %s", first, now)
	}
	disk := m.disks[map[string]int{"default": 0, "b": 1}[first]]
	disk.Ail(blockdev.Ref{}, blockdev.Problem{Severity: blockdev.Inaccessible, Reason: "PoolReadOnly", Message: "m"})
	m.agent.Changed()
	w.eventually("the object of the pool says so", func() bool { return len(w.pool(nodeName, first).Status.Health) == 1 })
	down.Store(false)
	var v volume.Volume
	w.eventually("it is made", func() (made bool) {
		var err error
		v, err = s.Create(soon(t), inSet("v"))
		return err == nil
	})
	if v.ID.Pool != other(first) && v.ID.Pool != first { // the agent may have made it in the first pool before that
		t.Errorf("in %s", v.ID.Pool)
	}
	w.tally(m)
}

// startWithout starts the agent of a machine while the disk of a pool (missing) is not there.
func (w *environment) startWithout(m *machine, missing string) {
	w.Helper()
	mounts, err := mount.LoadTable()
	check.OK(w, err)
	var pools []blockdev.Pool
	var kept []agent.Pool
	for i, name := range []string{"default", "b"} {
		var p blockdev.Pool = m.disks[i].Open(name, nil)
		if name == missing {
			p = lazy.New(name, errors.New("no disk"), func(context.Context) (blockdev.Pool, error) { return nil, errors.New("no disk") })
		}
		pools, kept = append(pools, p), append(kept, agent.Pool{Pool: p, Kind: "memory"})
	}
	m.local, err = volume.NewLocal(w.ctx, m.name, pools, mounts, 0)
	check.OK(w, err)
	m.agent, err = agent.New(apitest.Get(w).Agent(w, m.name), m.local, agent.Options{Driver: cluster.DefaultDriver, Pools: kept, Locks: m.locks, MaxVolumes: storetest.Limit})
	check.OK(w, err)
	m.stop = w.run(m.agent.Run)
}

// TestLeftInOtherPool: an agent made a volume, and died before it reported that, and then the disk was missing, so that another pool made the volume. When
// the disk is back, the first volume is removed if it is blank, and is a stray if not.
func TestLeftInOtherPool(t *testing.T) {
	for what, used := range map[string]bool{"blank": false, "used": true} {
		t.Run(what, func(t *testing.T) {
			w, m, s := newCluster(t)
			m.stop()
			w.asked("it is asked for", func(ctx context.Context) error { return second(s.Create(ctx, inSet("v"))) }, func() bool { return w.object("v") != nil })
			first := w.object("v").Spec.Pool
			begun := inSet("v")
			begun.Pool = first
			left, err := m.local.Create(w.ctx, begun)
			check.OK(t, err)
			if used {
				check.OK(t, m.local.SetFormat(w.ctx, left.ID, volume.Format{State: volume.Formatted, Type: "ext4"}))
			}
			w.startWithout(m, first)
			var v volume.Volume
			w.eventually("it is made", func() (made bool) {
				v, err = s.Create(soon(t), inSet("v"))
				return err == nil
			})
			if v.ID.Pool != other(first) {
				t.Fatalf("in %s, which is missing", v.ID.Pool)
			}
			m.stop()
			w.start(m)
			if used {
				w.eventually("it is a stray", func() bool { return w.pool(nodeName, first).Status.StrayCount == 1 })
				check.OK(t, second(m.local.Get(w.ctx, left.ID)))
				return
			}
			w.eventually("it is gone", func() bool { return errors.Is(second(m.local.Get(w.ctx, left.ID)), errdefs.ErrNotFound) })
			check.OK(t, second(m.local.Get(w.ctx, v.ID)))
			w.tally(m)
		})
	}
}

// TestLeftWhileMade: such a blank volume is also removed if it is there when the volume is made in the other pool.
func TestLeftWhileMade(t *testing.T) {
	w, m, s := newCluster(t)
	left, err := m.local.Create(w.ctx, spec("v")) // the agent does not know of it
	check.OK(t, err)
	one := spec("v")
	one.Pool = "b"
	v, err := s.Create(w.ctx, one)
	if err != nil || v.ID.Pool != "b" {
		t.Fatalf("in %s, %v", v.ID.Pool, err)
	}
	fails(t, second(m.local.Get(w.ctx, left.ID)), errdefs.ErrNotFound)
	w.tally(m)
}
