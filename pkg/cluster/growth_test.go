package cluster_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// asManyAsMay returns when as many calls are under way as may be at once: no further one has begun for a while.
func asManyAsMay(begun <-chan blockdev.Ref) {
	for {
		select {
		case <-begun:
		case <-time.After(3 * time.Second):
			return
		}
	}
}

// enlarging is a pool whose objects grow only when the test lets them, as those of a pool that has to zero what they grow by.
type enlarging struct {
	*memory.Pool
	begun chan blockdev.Ref
	let   chan struct{} // closed
}

func (e *enlarging) Expand(ctx context.Context, ref blockdev.Ref, size int64) (blockdev.Record, error) {
	e.begun <- ref
	select {
	case <-e.let:
		return e.Pool.Expand(ctx, ref, size)
	case <-ctx.Done():
		return blockdev.Record{}, ctx.Err()
	}
}

// TestGrowthTakesLong: while volumes grow, which may take hours, what else there is to do on their node is done, and a call that needs such a volume gets it.
// They grow in the end.
func TestGrowthTakesLong(t *testing.T) {
	const volumes = 20
	w := newEnvironment(t)
	grows := &enlarging{begun: make(chan blockdev.Ref, 1000), let: make(chan struct{})}
	m := w.begin(&machine{name: nodeName, wrap: func(p *memory.Pool) blockdev.Pool { grows.Pool = p; return grows }})
	s := w.knowing(m)
	other, err := s.Create(w.ctx, spec("other"))
	check.OK(t, err)
	answers := make(chan error, volumes)
	for i := range volumes {
		v, err := s.Create(w.ctx, spec(fmt.Sprint("v", i)))
		check.OK(t, err)
		go func() {
			answers <- second(s.Expand(w.ctx, v.ID, volume.Range{Required: 2 * mib}))
		}()
	}
	first := <-grows.begun
	asManyAsMay(grows.begun)
	ctx, cancel := context.WithTimeout(w.ctx, 20*time.Second)
	defer cancel()
	if err := s.Delete(ctx, other.ID); err != nil {
		t.Errorf("another volume is not deleted meanwhile: %v", err)
	}
	var unlock func()
	for end := time.Now().Add(20 * time.Second); unlock == nil && time.Now().Before(end); time.Sleep(time.Millisecond) {
		unlock, _ = m.locks.TryLock([]string{keylock.Volume(first.Key)}, nil)
	}
	if unlock == nil {
		t.Error("a call that needs a volume which grows does not get it")
	} else {
		unlock()
	}
	close(grows.let)
	for range volumes {
		check.OK(t, <-answers)
	}
	w.tally(m)
}

// vanishing is a pool whose objects are deleted only when the test lets them, as those of a file pool whose images are in millions of pieces.
type vanishing struct {
	*memory.Pool
	begun chan blockdev.Ref
	let   chan struct{} // closed
}

func (e *vanishing) Delete(ctx context.Context, ref blockdev.Ref) error {
	e.begun <- ref
	select {
	case <-e.let:
		return e.Pool.Delete(ctx, ref)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// TestDeletionTakesLong: while volumes and snapshots are deleted, which may take minutes, what else there is to do on their node is done. They are gone in the end.
func TestDeletionTakesLong(t *testing.T) {
	const pairs = 10
	w := newEnvironment(t)
	goes := &vanishing{begun: make(chan blockdev.Ref, 1000), let: make(chan struct{})}
	m := w.begin(&machine{name: nodeName, wrap: func(p *memory.Pool) blockdev.Pool { goes.Pool = p; return goes }})
	s := w.knowing(m)
	other, err := s.Create(w.ctx, spec("other"))
	check.OK(t, err)
	answers := make(chan error, 2*pairs)
	for i := range pairs {
		name := fmt.Sprint("v", i)
		v, err := s.Create(w.ctx, spec(name))
		check.OK(t, err)
		cut, err := s.CreateSnapshot(w.ctx, name, v.ID)
		check.OK(t, err)
		go func() { answers <- s.Delete(w.ctx, v.ID) }()
		go func() { answers <- s.DeleteSnapshot(w.ctx, cut.ID) }()
	}
	asManyAsMay(goes.begun)
	ctx, cancel := context.WithTimeout(w.ctx, 20*time.Second)
	defer cancel()
	if err := second(s.Expand(ctx, other.ID, volume.Range{Required: 2 * mib})); err != nil {
		t.Errorf("another volume does not grow meanwhile: %v", err)
	}
	if err := second(s.Create(ctx, spec("new"))); err != nil {
		t.Errorf("another volume is not made meanwhile: %v", err)
	}
	close(goes.let)
	for range 2 * pairs {
		check.OK(t, <-answers)
	}
	w.tally(m)
}
