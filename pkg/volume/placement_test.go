package volume_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lazy"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// TestPeerOf: the names of claims of one template of one StatefulSet are recognised, and no others.
func TestPeerOf(t *testing.T) {
	of := func(namespace, name string) volume.Requester {
		return volume.Requester{Namespace: namespace, Name: name}
	}
	for _, c := range []struct {
		a, b volume.Requester
		want bool
	}{
		{of("ns", "data-web-0"), of("ns", "data-web-1"), true},
		{of("ns", "data-web-9"), of("ns", "data-web-10"), true},
		{of("ns", "data-web-0"), of("ns", "data-web-0"), false}, // the same claim, not a peer of itself
		{of("ns", "data-web-0"), of("other", "data-web-1"), false},
		{of("ns", "data-web-0"), of("ns", "wal-web-1"), false},
		{of("ns", "data-web-0"), of("ns", "data-web-0-1"), false},
		{of("ns", "data"), of("ns", "data"), false},
		{of("ns", "data-x"), of("ns", "data-y"), false},
		{of("ns", "-0"), of("ns", "-1"), false},
		{of("ns", "data-"), of("ns", "data-1"), false},
		{of("ns", "backup-1"), of("ns", "backup-2"), false}, // no StatefulSet makes these: the names of the template and of the StatefulSet would both be there
		{of("ns", "-web-1"), of("ns", "-web-2"), false},
		{of("", ""), of("", ""), false},
	} {
		if c.a.PeerOf(c.b) != c.want || c.b.PeerOf(c.a) != c.want {
			t.Errorf("%v and %v: %v, want %v", c.a, c.b, !c.want, c.want)
		}
	}
}

// TestCompare: the pools are ordered from the best one for a volume to the worst.
func TestCompare(t *testing.T) {
	room := func(available int64, worst blockdev.Severity, peers int) volume.Room {
		return volume.Room{Capacity: blockdev.Capacity{Available: available, MaxVolume: available}, Worst: worst, Peers: peers}
	}
	const size = 10
	best := []volume.Room{
		room(30, 0, 0), room(20, 0, 0), room(30, 0, 1), room(40, blockdev.Degraded, 0), room(40, blockdev.Degraded, 1), // have room
		room(9, 0, 0), room(9, blockdev.Degraded, 0), room(50, blockdev.Inaccessible, 0),
	}
	for i := range best {
		for j := range best {
			if have := best[i].Compare(best[j], size); (have < 0) != (i < j) || (have > 0) != (i > j) {
				t.Errorf("%+v to %+v: %d", best[i], best[j], have)
			}
		}
	}
}

// two starts a store over a pool a and a pool b, which has less room. Their operations fail as the hooks say.
func two(t *testing.T, a, b memory.Hook) (*volume.Local, *memory.Disk, *memory.Disk) {
	t.Helper()
	large, small := memory.NewDisk(2<<30), memory.NewDisk(1<<30)
	return start(t, 0, large.Open("a", a), small.Open("b", b)), large, small
}

func inSet(name string) volume.Spec {
	return volume.Spec{Name: name, Pool: "*", Size: volume.Range{Required: mib}}
}

// refusing is a hook that lets one operation fail.
func refusing(which string, err error) memory.Hook {
	return func(operation string, _ blockdev.Ref) error {
		if operation == which {
			return err
		}
		return nil
	}
}

// TestRefusedByOne: if a pool of a set has no room, or cannot make the volume, the next one makes it in the same call. Any other error is returned, and nothing
// is made in another pool.
func TestRefusedByOne(t *testing.T) {
	for _, err := range []error{errdefs.ErrNoSpace, errdefs.ErrUnsupported} {
		l, _, _ := two(t, refusing("Create", fmt.Errorf("%w: no", err)), nil)
		if v := made(t)(l.Create(t.Context(), inSet("v"))); v.ID.Pool != "b" {
			t.Errorf("%v: in pool %s", err, v.ID.Pool)
		}
	}
	for _, err := range []error{errBroken, errdefs.ErrUnavailable, context.DeadlineExceeded} {
		l, _, _ := two(t, refusing("Create", err), nil)
		fails(t, second(l.Create(t.Context(), inSet("v"))), err, "Create")
		if all, err := l.List(t.Context(), volume.ID{}, 0); err != nil || len(all) > 0 {
			t.Errorf("made: %v, %v", all, err)
		}
	}
	// If all pools refuse, one error says why each has.
	l, _, _ := two(t, refusing("Create", fmt.Errorf("%w: a is too small", errdefs.ErrNoSpace)), refusing("Create", fmt.Errorf("%w: b is thick", errdefs.ErrUnsupported)))
	err := second(l.Create(t.Context(), inSet("v")))
	if kinds := errdefs.Kinds(err); !slices.Equal(kinds, []error{errdefs.ErrNoSpace}) || !strings.Contains(err.Error(), "a is too small") || !strings.Contains(err.Error(), "b is thick") {
		t.Errorf("%v, which is %v", err, kinds)
	}
}

// TestIll: a pool with a problem is chosen only if no other one has room; an inaccessible one is not asked. If all are inaccessible, one is asked all the same,
// as its health may be out of date.
func TestIll(t *testing.T) {
	l, a, b := two(t, nil, nil)
	ail := func(disk *memory.Disk, worst blockdev.Severity) {
		disk.Ail(blockdev.Ref{}, blockdev.Problem{Severity: worst, Reason: "DiskFailing", Message: "m"})
	}
	in := func(name string, size int64) string {
		spec := inSet(name)
		spec.Size.Required = size
		v, err := l.Create(t.Context(), spec)
		if err != nil {
			return err.Error()
		}
		return v.ID.Pool
	}
	ail(a, blockdev.Degraded)
	if pool := in("one", mib); pool != "b" {
		t.Errorf("made in %s", pool)
	}
	if pool := in("large", 1500*mib); pool != "a" {
		t.Errorf("with room in the ill one alone: %s", pool)
	}
	ail(a, blockdev.Inaccessible)
	if c, err := l.Capacity(t.Context(), "*", volume.NotEncrypted, node); err != nil || c.Available != 1<<30-mib || c.MaxVolume != c.Available {
		t.Errorf("%+v, %v", c, err)
	}
	if said := in("two large", 1<<30); !strings.Contains(said, errdefs.ErrNoSpace.Error()) {
		t.Errorf("with room where nothing can be made alone: %s", said)
	}
	ail(b, blockdev.Inaccessible)
	if pool := in("asked all the same", mib); pool != "a" && pool != "b" {
		t.Errorf("its health may be old: %s", pool)
	}
}

// TestMissingPassedOver: while one pool of a set is missing, volumes are made in the others.
func TestMissingPassedOver(t *testing.T) {
	disk := memory.NewDisk(1 << 30)
	mounts, err := mount.LoadTable()
	check.OK(t, err)
	synctest.Test(t, func(t *testing.T) {
		missing := lazy.New("a", errors.New("no disk"), func(context.Context) (blockdev.Pool, error) { return nil, errors.New("no disk") })
		l, err := volume.NewLocal(t.Context(), node, []blockdev.Pool{missing, disk.Open("b", nil)}, mounts, 0)
		check.OK(t, err)
		if v := made(t)(l.Create(t.Context(), inSet("v"))); v.ID.Pool != "b" {
			t.Errorf("in %s", v.ID.Pool)
		}
		if c, err := l.Capacity(t.Context(), "*", volume.NotEncrypted, node); err != nil || c.Available != 1<<30-mib {
			t.Errorf("%+v, %v", c, err)
		}
		large := inSet("large")
		large.Size.Required = 2 << 30
		fails(t, second(l.Create(t.Context(), large)), errdefs.ErrNoSpace, "more than the pool that is there has")
		fails(t, second(l.Create(t.Context(), volume.Spec{Name: "x", Pool: "a", Size: volume.Range{Required: mib}})), errdefs.ErrUnavailable, "in the missing one")
	})
}

// TestHangingPool: a pool that does not answer is waited for once, and then passed over until it has answered.
func TestHangingPool(t *testing.T) {
	mounts, err := mount.LoadTable()
	check.OK(t, err)
	synctest.Test(t, func(t *testing.T) {
		let := make(chan struct{})
		a := memory.NewDisk(2<<30).Open("a", func(operation string, _ blockdev.Ref) error {
			if operation == "Capacity" {
				<-let
			}
			return nil
		})
		l, err := volume.NewLocal(t.Context(), node, []blockdev.Pool{a, memory.NewDisk(1<<30).Open("b", nil)}, mounts, 0)
		check.OK(t, err)
		for i, most := range []time.Duration{time.Minute, 0, 0} {
			began := time.Now()
			if v := made(t)(l.Create(t.Context(), inSet(fmt.Sprint("v", i)))); v.ID.Pool != "b" || time.Since(began) > most {
				t.Errorf("v%d: in %s after %s", i, v.ID.Pool, time.Since(began))
			}
		}
		close(let)
		synctest.Wait()
		if v := made(t)(l.Create(t.Context(), inSet("v"))); v.ID.Pool != "a" {
			t.Errorf("in %s, once it answers", v.ID.Pool)
		}
	})
}

// TestRetryStays: after a call that ran out of time, the retry makes the volume in the pool that had begun with it, even if another pool has more room by then.
func TestRetryStays(t *testing.T) {
	late := true
	l, _, _ := two(t, func(operation string, ref blockdev.Ref) error {
		if operation == "Create" && ref.Key == volume.KeyOf("v") && late {
			return context.DeadlineExceeded
		}
		return nil
	}, nil)
	fails(t, second(l.Create(t.Context(), inSet("v"))), context.DeadlineExceeded, "Create")
	check.OK(t, second(l.Create(t.Context(), volume.Spec{Name: "large", Pool: "a", Size: volume.Range{Required: 1500 * mib}})))
	if v := made(t)(l.Create(t.Context(), inSet("another"))); v.ID.Pool != "b" {
		t.Fatalf("most room is in b, and another is in %s", v.ID.Pool)
	}
	late = false
	if v := made(t)(l.Create(t.Context(), inSet("v"))); v.ID.Pool != "a" {
		t.Errorf("in %s", v.ID.Pool)
	}
}

// TestSpreadWhileMade: a volume that is still being made counts as a peer; once nobody makes it any more, it does not.
func TestSpreadWhileMade(t *testing.T) {
	replica := func(claim string) volume.Spec {
		one := inSet(claim)
		one.Spread, one.For = volume.SpreadRequired, volume.Requester{Namespace: "ns", Name: claim}
		return one
	}
	begun, let := make(chan struct{}), make(chan error)
	l, _, _ := two(t, func(operation string, ref blockdev.Ref) error {
		if operation == "Create" && ref.Key == volume.KeyOf("data-web-0") {
			begun <- struct{}{}
			return <-let
		}
		return nil
	}, nil)
	first := make(chan error)
	go func() { first <- second(l.Create(t.Context(), replica("data-web-0"))) }()
	<-begun // in a, which has most room
	if v := made(t)(l.Create(t.Context(), replica("data-web-1"))); v.ID.Pool != "b" {
		t.Errorf("data-web-1 is in %s", v.ID.Pool)
	}
	fails(t, second(l.Create(t.Context(), replica("data-web-2"))), errdefs.ErrNoSpace, "a third")
	let <- errBroken
	fails(t, <-first, errBroken, "the first")
	if v := made(t)(l.Create(t.Context(), replica("data-web-2"))); v.ID.Pool != "a" {
		t.Errorf("data-web-2 is in %s", v.ID.Pool)
	}
}
