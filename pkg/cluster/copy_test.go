package cluster_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/agent"
	"github.com/ashlar-csi/ashlar/pkg/cluster/store"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/volume"
	"github.com/ashlar-csi/ashlar/pkg/volume/storetest"
)

// slowPool is a pool whose copies wait until the test lets them end.
type slowPool struct {
	*memory.Pool
	let     chan struct{} // one for each copy, or closed
	begun   atomic.Int32
	bounded atomic.Bool // a copy had a time limit
}

func (p *slowPool) Create(ctx context.Context, spec blockdev.Spec) (blockdev.Record, error) {
	if spec.Origin != (blockdev.Ref{}) {
		p.begun.Add(1)
		if _, bounded := ctx.Deadline(); bounded {
			p.bounded.Store(true)
		}
		select {
		case <-p.let:
		case <-ctx.Done():
			return blockdev.Record{}, ctx.Err()
		}
	}
	return p.Pool.Create(ctx, spec)
}

// slowCluster returns a cluster of one node with a slowPool.
func slowCluster(t *testing.T) (*environment, *store.Store, *slowPool, *keylock.Table) {
	t.Helper()
	w := newEnvironment(t)
	w.node(nodeName, true)
	mounts, err := mount.LoadTable()
	check.OK(t, err)
	p := &slowPool{Pool: memory.NewDisk(storetest.Size).Open("default", nil), let: make(chan struct{})}
	local, err := volume.NewLocal(w.ctx, nodeName, []blockdev.Pool{p}, mounts, 0)
	check.OK(t, err)
	locks := &keylock.Table{}
	a, err := agent.New(apitest.Get(w).Agent(w, nodeName), local, agent.Options{Driver: cluster.DefaultDriver, Pools: []agent.Pool{{Pool: p, Kind: "memory"}}, Locks: locks})
	check.OK(t, err)
	w.run(a.Run)
	s, _ := w.store()
	w.eventually("the store knows the pool", func() bool {
		c, err := s.Capacity(w.ctx, "", volume.NotEncrypted, nodeName)
		return err == nil && c.Total > 0
	})
	return w, s, p, locks
}

// TestLongCopy: a copy has no time limit, and is not started over, however often it is asked for.
func TestLongCopy(t *testing.T) {
	w, s, p, _ := slowCluster(t)
	v, err := s.Create(w.ctx, spec("v"))
	check.OK(t, err)
	clone := spec("clone")
	clone.Source = v.ID
	for what, copy := range map[string]func(context.Context) error{
		"snapshot": func(ctx context.Context) error { return second(s.CreateSnapshot(ctx, "s", v.ID)) },
		"clone":    func(ctx context.Context) error { return second(s.Create(ctx, clone)) },
		"group":    func(ctx context.Context) error { return second(s.CreateGroup(ctx, "g", []volume.ID{v.ID})) },
	} {
		p.begun.Store(0)
		w.asked("the copy has begun", copy, func() bool { return p.begun.Load() == 1 })
		for range 2 {
			fails(t, copy(soon(t)), errdefs.ErrUnavailable)
		}
		p.let <- struct{}{}
		check.OK(t, copy(w.ctx))
		if n := p.begun.Load(); n != 1 || p.bounded.Load() {
			t.Errorf("%s: begun %d times; with an end: %v", what, n, p.bounded.Load())
		}
	}
}

// TestCopiesHoldNothingUp: however many long copies there are on a node, its other volumes can be made, changed and deleted.
func TestCopiesHoldNothingUp(t *testing.T) {
	w, s, p, _ := slowCluster(t)
	const copies = 20
	v, err := s.Create(w.ctx, spec("v"))
	check.OK(t, err)
	for i := range copies {
		source, err := s.Create(w.ctx, spec(fmt.Sprint("source ", i)))
		check.OK(t, err)
		w.asked("the copy has begun", func(ctx context.Context) error { return second(s.CreateSnapshot(ctx, fmt.Sprint(i), source.ID)) },
			func() bool { return p.begun.Load() == int32(i+1) })
	}
	check.OK(t, second(s.Create(w.ctx, spec("another"))))
	check.OK(t, second(s.Expand(w.ctx, v.ID, volume.Range{Required: 2 * mib})))
	check.OK(t, s.Delete(w.ctx, v.ID))
	close(p.let)
	for i := range copies {
		check.OK(t, second(s.CreateSnapshot(w.ctx, fmt.Sprint(i), volume.ID{Kind: blockdev.Volume, Pool: "default", Key: volume.KeyOf(fmt.Sprint("source ", i))})))
	}
}

// TestCopyGivesWay: a call that needs the volume which is being copied gets its lock, and the copy goes on afterwards.
func TestCopyGivesWay(t *testing.T) {
	w, s, p, locks := slowCluster(t)
	v, err := s.Create(w.ctx, spec("v"))
	check.OK(t, err)
	w.asked("the copy has begun", func(ctx context.Context) error { return second(s.CreateSnapshot(ctx, "s", v.ID)) },
		func() bool { return p.begun.Load() == 1 })
	unlock := check.Locked(t, locks, keylock.Volume(v.ID.Key))
	fails(t, second(s.CreateSnapshot(soon(t), "s", v.ID)), errdefs.ErrUnavailable)
	unlock()
	close(p.let)
	check.OK(t, second(s.CreateSnapshot(w.ctx, "s", v.ID)))
	if n := p.begun.Load(); n < 2 {
		t.Errorf("begun %d times", n)
	}
}
