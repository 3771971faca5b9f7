package replicapool_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/mirror"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/replicapool"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

const size = 16 << 20

// oneLeg is a volume of one leg, which is a device of this machine.
type oneLeg struct {
	replicapool.Legs
	claim  int64 // the generation of the claim; 0: it is not known
	number uint64
	opened int      // how often its legs were opened
	size   int64    // of the record; 0: size
	small  bool     // the leg has not grown
	equal  []string // what Close was told
}

func (l *oneLeg) Generation(blockdev.Ref) (int64, bool) { return l.claim, l.claim > 0 }

func (l *oneLeg) Open(context.Context, string, blockdev.Ref) (replicapool.Opened, error) {
	l.opened++
	return replicapool.Opened{Generation: l.claim, Size: size, Legs: []blockdev.Device{{Number: l.number, Size: size}}}, nil
}

func (l *oneLeg) Record(_ context.Context, _ string, ref blockdev.Ref) (blockdev.Record, error) {
	return blockdev.Record{Ref: ref, Size: cmp.Or(l.size, size)}, nil
}

func (l *oneLeg) Grow(context.Context, blockdev.Ref) (int64, error) {
	if l.small {
		return size, nil
	}
	return 2 * size, nil
}

// Names answers as long as a device over the leg is there.
func (l *oneLeg) Names(_ context.Context, _ blockdev.Ref, devices []uint64) []string {
	if holders, err := os.ReadDir(dm.Sysfs(l.number) + "/holders"); err != nil || len(holders) == 0 || !slices.Contains(devices, l.number) {
		return nil
	}
	return []string{"leg"}
}

func (l *oneLeg) Close(_ context.Context, _ blockdev.Ref, equal []string) error {
	l.equal = equal
	return nil
}

// disk returns the number of a device.
func disk(t *testing.T, name string) uint64 {
	image := filepath.Join(drivertest.Dir(t), name)
	check.OK(t, errors.Join(os.WriteFile(image, nil, 0o600), os.Truncate(image, 2*size)))
	loop := drivertest.Loop(t, image)
	t.Cleanup(func() { drivertest.Run(t, "losetup", "-d", loop) })
	var st unix.Stat_t
	check.OK(t, unix.Stat(loop, &st))
	return st.Rdev
}

// attached returns a pool with a volume that is attached by claim 7, and its device, which is open.
func attached(t *testing.T) (blockdev.Pool, *oneLeg, blockdev.Ref, *os.File) {
	drivertest.NeedRoot(t)
	drivertest.NeedMapper(t)
	check.OK(t, dm.CanMirror())
	legs := &oneLeg{claim: 7, number: disk(t, "leg")}
	all, err := replicapool.New("node", legs)
	check.OK(t, err)
	pool, ref := all.Named("default"), blockdev.Ref{Kind: blockdev.Volume, Key: "0123456789abcdef0123456789abcdef"}
	device, err := pool.Attach(t.Context(), ref, blockdev.Attachment{})
	check.OK(t, err)
	t.Cleanup(func() { check.OK(t, pool.Detach(context.Background(), ref)) })
	open, err := os.Open(device.Path)
	check.OK(t, err)
	t.Cleanup(func() { _ = open.Close() })
	return pool, legs, ref, open
}

func fails(t *testing.T, what string, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%s: error %v, want %v", what, err, want)
	}
}

func second[T any](_ T, err error) error { return err }

// TestOfEarlierClaim: a mirror of an earlier claim, which somebody still has mounted or open, is not taken for that of the present claim: neither by a call
// for the volume, as one that publishes what is staged, nor by one that attaches it. Once nobody has it, it is made anew.
func TestOfEarlierClaim(t *testing.T) {
	pool, legs, ref, open := attached(t)
	legs.claim = 0
	check.OK(t, errors.Join(second(pool.Get(t.Context(), ref)), second(pool.Attach(t.Context(), ref, blockdev.Attachment{}))))
	legs.claim = 8
	fails(t, "get", second(pool.Get(t.Context(), ref)), errdefs.ErrPrecondition)
	fails(t, "attach", second(pool.Attach(t.Context(), ref, blockdev.Attachment{})), errdefs.ErrPrecondition)
	check.OK(t, open.Close())
	check.OK(t, errors.Join(second(pool.Get(t.Context(), ref)), second(pool.Attach(t.Context(), ref, blockdev.Attachment{}))))
	if of, is, err := pool.(*replicapool.Pool).Generation(ref); of != 8 || !is || err != nil || legs.opened != 2 {
		t.Errorf("the mirror is of claim %d (%v, %v), its legs were opened %d times", of, is, err, legs.opened)
	}
}

// TestEnded: a mirror that has ended, as all its legs had failed, is not attached again: it is made anew, or the error says who has it.
func TestEnded(t *testing.T) {
	pool, legs, ref, open := attached(t)
	name := pool.(*replicapool.Pool).Mirror(ref)
	check.OK(t, mirror.End(t.Context(), name))
	fails(t, "attach", second(pool.Attach(t.Context(), ref, blockdev.Attachment{})), errdefs.ErrPrecondition)
	check.OK(t, open.Close())
	check.OK(t, second(pool.Attach(t.Context(), ref, blockdev.Attachment{})))
	if s, err := mirror.Look(name); err != nil || len(s.Legs) != 1 || legs.opened != 2 {
		t.Errorf("the mirror is %+v, %v; its legs were opened %d times", s, err, legs.opened)
	}
}

// TestDetach: the legs of a mirror that was whole are closed as equal. Which legs they are is asked while the mirror is there.
func TestDetach(t *testing.T) {
	pool, legs, ref, open := attached(t)
	check.OK(t, errors.Join(open.Close(), pool.Detach(t.Context(), ref)))
	if !slices.Equal(legs.equal, []string{"leg"}) {
		t.Errorf("closed are %v", legs.equal)
	}
}

// TestSuspended: a crash in the middle of a change left a mirror suspended that nobody has open. A start that takes it down does not wait for it.
func TestSuspended(t *testing.T) {
	pool, _, ref, open := attached(t)
	check.OK(t, open.Close())
	name := pool.(*replicapool.Pool).Mirror(ref)
	check.OK(t, dm.Hold(name))
	late := time.AfterFunc(10*time.Second, func() {
		t.Error("it waits for the mirror")
		check.OK(t, dm.Resume(name, dm.NoScan))
	})
	check.OK(t, pool.Detach(t.Context(), ref))
	late.Stop()
}

// TestGrowsWhileJoins: a volume grows while a leg joins, which leaves before, and can join again. It stays while a current leg has not grown. A leg that has
// everything may be current by then: it does not leave, and the volume grows once it has joined.
func TestGrowsWhileJoins(t *testing.T) {
	pool, legs, ref, _ := attached(t)
	const slow = "test-joins"
	joins := disk(t, "joins")
	check.OK(t, dm.Make(slow, "", []dm.Line{{Length: size, Kind: "delay", Text: fmt.Sprint(dm.Number(joins), " 0 ", time.Second.Milliseconds())}}))
	t.Cleanup(func() { drivertest.Run(t, "dmsetup", "remove", "--retry", slow) })
	d, err := dm.Find(slow)
	check.OK(t, err)
	name := pool.(*replicapool.Pool).Mirror(ref)
	join := func(length int64) {
		t.Helper()
		check.OK(t, mirror.Join(t.Context(), name, d.Number, func(context.Context) ([]dm.Range, error) { return []dm.Range{{Length: length}}, nil }))
	}
	grown := func(joins bool, want int64) {
		t.Helper()
		if s, err := mirror.Look(name); err != nil || s.Size != want || (s.Joining != nil) != joins || len(s.Legs) != 1 {
			t.Errorf("it is %+v, %v, and was to have %d bytes", s, err, want)
		}
	}
	join(size)
	t.Cleanup(func() { check.OK(t, mirror.Leave(context.Background(), name, d.Number)) })
	check.OK(t, second(pool.Expand(t.Context(), ref, size)))
	grown(true, size)
	legs.size, legs.small = 2*size, true
	fails(t, "grow with a leg that has not grown", second(pool.Expand(t.Context(), ref, 2*size)), errdefs.ErrUnavailable)
	grown(true, size)
	legs.small = false
	check.OK(t, second(pool.Expand(t.Context(), ref, 2*size)))
	grown(false, 2*size)
	check.OK(t, dm.Replace(slow, dm.Linear(joins, size)))
	check.OK(t, mirror.Resize(t.Context(), name, size))
	join(0)
	for s, err := mirror.Look(name); err == nil && !s.Equal(); s, err = mirror.Look(name) {
		time.Sleep(10 * time.Millisecond)
	}
	fails(t, "grow as a leg becomes current", second(pool.Expand(t.Context(), ref, 2*size)), errdefs.ErrUnavailable)
	grown(true, size)
}
