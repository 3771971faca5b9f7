package volume_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pools"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// stays is a Moves: err is its answer to whether a volume stays on its node.
type stays struct {
	err  error
	used []int64 // the generations of the claims that Stays was asked about
}

func (s *stays) Stays(_ context.Context, _ volume.ID, _ string, sealed volume.Sealing) error {
	s.used = append(s.used, sealed.Used)
	return s.err
}

func (s *stays) IsHere(context.Context, volume.ID, string, volume.Sealing) error { return s.err }

// twoHomes is two nodes with one pool each. That of the first is called a, that of the second other. restart starts their drivers, the first time or again.
func twoHomes(t *testing.T, other string, wrap ...func(blockdev.Pool) blockdev.Pool) (restart func() (a, b *volume.Local)) {
	t.Helper()
	urls := twoPools(t)
	var opened []blockdev.Pool
	closed := func() {
		for _, pool := range opened {
			check.OK(t, pool.Close())
		}
		opened = nil
	}
	t.Cleanup(closed)
	return func() (a, b *volume.Local) {
		closed()
		for _, name := range []string{"a", "b"} {
			pool, err := pools.Open(t.Context(), map[string]string{"a": "a", "b": other}[name], urls[name])
			check.OK(t, err)
			for _, w := range wrap {
				pool = w(pool)
			}
			opened = append(opened, pool)
		}
		return start(t, 0, opened[0]), start(t, 0, opened[1])
	}
}

// TestMoveGoesOn: what the new node has of a volume cannot be used before it has arrived. After a start of the drivers, the next call resumes the copy
// where the last one stopped; if the volume was used meanwhile, the copy begins anew.
func TestMoveGoesOn(t *testing.T) {
	restart := twoHomes(t, "a")
	a, b := restart()
	v, _ := withContents(t, a)
	read, sealed := int64(0), time.Time{}
	for _, used := range []bool{false, true} {
		from, err := a.Seal(t.Context(), v.ID, 3, "node-2")
		check.OK(t, err)
		if !used {
			fails(t, b.CopyIn(t.Context(), "a", "source", blockdev.Thin, stopping(from, 6*mib, errdefs.ErrUnavailable, &read)), errdefs.ErrUnavailable, "an origin that goes away")
			fails(t, second(b.Get(t.Context(), v.ID)), errdefs.ErrNotFound, "Get of what is not all there")
			fails(t, b.Arrive(t.Context(), v.ID), errdefs.ErrNotFound, "Arrive of what is not all there")
			a, b = restart()
		} else {
			a.SetMoves(&stays{})
			device, err := a.AttachRaw(t.Context(), v, nil, true)
			check.OK(t, err)
			fails(t, second(a.Seal(t.Context(), v.ID, 3, "node-2")), errdefs.ErrInUse, "Seal of what is attached")
			check.OK(t, errors.Join(device.Close(), a.Detach(t.Context(), v.ID)))
			fails(t, from.Read(t.Context(), 0, func(int64, []byte) error { return nil }), errdefs.ErrUnavailable, "to read what was used meanwhile")
		}
		from, err = a.Seal(t.Context(), v.ID, 3, "node-2")
		check.OK(t, err)
		if !sealed.IsZero() && from.Created.Equal(sealed) != !used {
			t.Errorf("used meanwhile: %v; it was sealed at %v, and is at %v", used, sealed, from.Created)
		}
		sealed = from.Created
		check.OK(t, b.CopyIn(t.Context(), "a", "source", blockdev.Thin, stopping(from, gib, nil, &read)))
		if went := read > 300*mib; went == used {
			t.Errorf("used meanwhile: %v; it is read from byte %d on", used, read)
		}
		read = -1
		check.OK(t, b.CopyIn(t.Context(), "a", "source", blockdev.Thin, stopping(from, gib, nil, &read)))
		if read != -1 {
			t.Errorf("all was there, and it is read from byte %d on", read)
		}
		fails(t, second(b.Get(t.Context(), v.ID)), errdefs.ErrNotFound, "Get of what has not arrived")
	}
	for range 2 {
		check.OK(t, b.Arrive(t.Context(), v.ID))
		check.OK(t, a.Depart(t.Context(), v.ID, sealed))
	}
	fails(t, second(a.Get(t.Context(), v.ID)), errdefs.ErrNotFound, "Get of what has left")
	moved, err := b.Get(t.Context(), v.ID)
	check.OK(t, err)
	if !moved.Created.Equal(v.Created) || moved.Size != v.Size || moved.Format.State != volume.Raw {
		t.Errorf("it was %+v, and is %+v", v, moved)
	}
	holds(t, b, moved)
}

// TestOpenLegMoves: a leg that moves while it is open, as its user died, has lost no power by that: it has all that it acknowledged, if its old machine was
// not restarted before, and its new one is not afterwards.
func TestOpenLegMoves(t *testing.T) {
	for what, c := range map[string]struct {
		boot string // of its machine when it was opened
		lost bool
	}{"its machine runs on": {"1", false}, "its machine was restarted": {"0", true}} {
		t.Run(what, func(t *testing.T) {
			disk := memory.NewDisk(1 << 30)
			home := func(disk *memory.Disk, boot string) (*volume.Local, *volume.Everywhere) {
				l := start(t, 0, disk.Open("default", nil))
				l.ServeExports(t.Context(), volume.Exporting{Boot: boot, Locks: &keylock.Table{}})
				return l, volume.NewEverywhere(l, start(t, 0, memory.NewDisk(1<<30).Open("others", nil)), nowhere{})
			}
			a, used := home(memory.NewDisk(1<<30), "1")
			v, err := a.Create(t.Context(), volume.Spec{Name: "leg", Size: volume.Range{Required: mib}, Access: volume.AccessAny, ReplicaOf: volume.KeyOf("leg")})
			check.OK(t, err)
			check.OK(t, used.ChangeLeg(t.Context(), v.ID, func(s *volume.LegState, _ map[string]string) error {
				*s = volume.LegState{Sound: 1, Opened: 1, Boot: c.boot}
				return nil
			}))
			from, err := a.Seal(t.Context(), v.ID, 1, "node-2")
			check.OK(t, err)
			b, _ := home(disk, "2")
			check.OK(t, b.CopyIn(t.Context(), "default", "leg", blockdev.AnyProvisioning, from))
			for _, now := range []struct {
				boot string
				lost bool
			}{{"2", c.lost}, {"3", true}} {
				l, at := home(disk, now.boot)
				check.OK(t, l.Arrive(t.Context(), v.ID))
				if leg, err := at.Leg(t.Context(), v.ID); err != nil || leg.LostPower() != now.lost || leg.Sound != 1 || leg.Opened != 1 {
					t.Errorf("in start %s of its new machine it is %+v, %v, and has lost power: %v", now.boot, leg.LegState, err, leg.LostPower())
				}
			}
		})
	}
}

// TestMoveGrows: a sealed volume may grow. Its copy on the new node, unfinished or whole, grows with it, and is not copied anew.
func TestMoveGrows(t *testing.T) {
	a, b := twoHomes(t, "a")()
	v, _ := withContents(t, a)
	read := int64(0)
	for _, far := range []struct{ until, grown int64 }{{6 * mib, 1}, {2 * gib, 2}} {
		from, err := a.Seal(t.Context(), v.ID, 3, "node-2")
		check.OK(t, err)
		if err := b.CopyIn(t.Context(), "a", "source", blockdev.Thin, stopping(from, far.until, errdefs.ErrUnavailable, &read)); far.until < gib {
			fails(t, err, errdefs.ErrUnavailable, "an origin that goes away")
		} else {
			check.OK(t, err)
		}
		larger, err := a.Expand(t.Context(), v.ID, volume.Range{Required: v.Size + far.grown*64*mib})
		check.OK(t, err)
		again, err := a.Seal(t.Context(), v.ID, 3, "node-2")
		check.OK(t, err)
		if !again.Created.Equal(from.Created) || again.Size != larger.Size {
			t.Errorf("sealed at %v it was of %d bytes, at %v it is of %d", from.Created, from.Size, again.Created, again.Size)
		}
		read = -1
		check.OK(t, b.CopyIn(t.Context(), "a", "source", blockdev.Thin, stopping(again, 2*gib, nil, &read)))
		if read == 0 {
			t.Error("it was brought anew")
		}
	}
	check.OK(t, b.Arrive(t.Context(), v.ID))
	moved, err := b.Get(t.Context(), v.ID)
	check.OK(t, err)
	if want := v.Size + 128*mib; moved.Size != want {
		t.Errorf("it has %d bytes, and is to have %d", moved.Size, want)
	}
	holds(t, b, moved)
}

// TestMoveLeft: once the record of a volume says that it has left the node, it is not used there, even if the cluster says that it stays, until it is adopted
// (Readopt). The record says so only for the seal by which it has left.
func TestMoveLeft(t *testing.T) {
	restart := twoHomes(t, "a")
	a, _ := restart()
	a.SetMoves(&stays{})
	v, _ := withContents(t, a)
	check.OK(t, a.Left(t.Context(), v.ID, time.Time{}, "node-2"))
	from, err := a.Seal(t.Context(), v.ID, 3, "node-2")
	check.OK(t, err)
	check.OK(t, a.Left(t.Context(), v.ID, from.Created.Add(-time.Microsecond), "node-2"))
	check.OK(t, a.Unseal(t.Context(), v.ID))
	from, err = a.Seal(t.Context(), v.ID, 3, "node-2")
	check.OK(t, err)
	for range 2 {
		check.OK(t, a.Left(t.Context(), v.ID, from.Created, "node-2"))
	}
	a, b := restart()
	a.SetMoves(&stays{})
	if have, err := a.Get(t.Context(), v.ID); err != nil || have.Left != "node-2" {
		t.Errorf("it is %+v, %v", have, err)
	}
	ails(t, a, v.ID, volume.ReasonMovedAway)
	for name, err := range map[string]error{
		"Unseal":         a.Unseal(t.Context(), v.ID),
		"AttachRaw":      second(a.AttachRaw(t.Context(), v, nil, true)),
		"CreateSnapshot": second(a.CreateSnapshot(t.Context(), "late", v.ID)),
		"a clone":        second(a.Create(t.Context(), volume.Spec{Name: "clone", Pool: v.ID.Pool, Source: v.ID})),
		"Seal":           second(a.Seal(t.Context(), v.ID, 3, "node-2")),
	} {
		fails(t, err, errdefs.ErrPrecondition, name+" of what has left")
	}
	// It can still be copied to its new node, where the record does not say so.
	again, err := a.Seal(t.Context(), v.ID, volume.AnyClaims, "node-2")
	check.OK(t, err)
	if !again.Created.Equal(from.Created) {
		t.Errorf("it is sealed at %v, before at %v", again.Created, from.Created)
	}
	check.OK(t, errors.Join(b.CopyIn(t.Context(), "a", v.Name, blockdev.Thin, again), b.Arrive(t.Context(), v.ID)))
	if there, err := b.Get(t.Context(), v.ID); err != nil || there.Left != "" {
		t.Errorf("on its new node it is %+v, %v", there, err)
	}
	check.OK(t, a.Readopt(t.Context(), "a", v.ID))
	ails(t, a, v.ID)
	device, err := a.AttachRaw(t.Context(), v, nil, true)
	check.OK(t, err)
	check.OK(t, errors.Join(device.Close(), a.Detach(t.Context(), v.ID)))
}

// TestMoveSealed: a sealed volume is used again only if the cluster says that it stays, and is removed (Depart) only by its seal. The new node refuses a
// description with unknown or bad values, and keeps a volume of its own of that name.
func TestMoveSealed(t *testing.T) {
	a, b := twoHomes(t, "a")()
	v, _ := withContents(t, a)
	fails(t, a.Depart(t.Context(), v.ID, time.Time{}), errdefs.ErrPrecondition, "Depart of what is not sealed")
	from, err := a.Seal(t.Context(), v.ID, 3, "node-2")
	check.OK(t, err)
	fails(t, second(a.AttachRaw(t.Context(), v, nil, true)), errdefs.ErrUnavailable, "AttachRaw where nobody knows whether it moves")
	does := &stays{err: fmt.Errorf("%w: it is on node-2 now", errdefs.ErrPrecondition)}
	a.SetMoves(does)
	fails(t, second(a.AttachRaw(t.Context(), v, nil, true)), errdefs.ErrPrecondition, "AttachRaw of what has moved")
	fails(t, second(a.Attach(t.Context(), v, nil)), errdefs.ErrPrecondition, "Attach of what has moved")
	fails(t, second(a.CreateSnapshot(t.Context(), "late", v.ID)), errdefs.ErrPrecondition, "CreateSnapshot of what has moved")
	fails(t, second(a.Create(t.Context(), volume.Spec{Name: "clone", Pool: v.ID.Pool, Source: v.ID})), errdefs.ErrPrecondition, "Create of a copy of what has moved")
	if again, err := a.Seal(t.Context(), v.ID, 3, "node-2"); err != nil || !again.Created.Equal(from.Created) {
		t.Errorf("sealed again it is of %v, %v; it was of %v", again.Created, err, from.Created)
	}
	if anew, err := a.Seal(t.Context(), v.ID, 4, "node-2"); err != nil || !anew.Created.After(from.Created) {
		t.Errorf("sealed after another claim it is of %v, %v; it was of %v", anew.Created, err, from.Created)
	}
	fails(t, a.Depart(t.Context(), v.ID, from.Created), errdefs.ErrPrecondition, "Depart of what was sealed at another time")
	does.err = nil
	device, err := a.AttachRaw(t.Context(), v, nil, true)
	check.OK(t, err)
	fails(t, a.Depart(t.Context(), v.ID, from.Created), errdefs.ErrPrecondition, "Depart of what is used again")
	check.OK(t, errors.Join(device.Close(), a.Detach(t.Context(), v.ID)))

	// What another node tells of a volume would go into the record.
	from, err = a.Seal(t.Context(), v.ID, 3, "node-2")
	check.OK(t, err)
	for name, change := range map[string]func(*volume.Origin){
		"another volume": func(o *volume.Origin) { o.ID.Key = volume.KeyOf("another") },
		"a snapshot":     func(o *volume.Origin) { o.ID.Kind = blockdev.Snapshot },
		"unknown label":  func(o *volume.Origin) { o.Labels = map[string]string{"export": "1"} },
		"long label":     func(o *volume.Origin) { o.Labels = map[string]string{"pv.name": strings.Repeat("x", 4000)} },
		"no size":        func(o *volume.Origin) { o.Size = 0 },
	} {
		bad := from
		change(&bad)
		fails(t, b.CopyIn(t.Context(), "a", "source", blockdev.Thin, bad), errdefs.ErrUnsupported, name)
	}
	// A whole volume of that name stays.
	own, err := b.Create(t.Context(), volume.Spec{Name: "source", Size: volume.Range{Required: mib}})
	check.OK(t, err)
	fails(t, b.CopyIn(t.Context(), "a", "source", blockdev.Thin, from), errdefs.ErrExists, "Bring over a volume")
	if have, err := b.Get(t.Context(), own.ID); err != nil || have.Size != mib {
		t.Errorf("its own is %+v, %v", have, err)
	}
}

// TestLVMMove: a volume moves from each kind of pool to each other kind, by another name of the pool, whatever the granularities are.
func TestLVMMove(t *testing.T) {
	urls := kindURLs(t)
	text := drivertest.Content{Seed: "text", Offset: 5*mib + 4096, Size: 3 * mib}
	homes := map[string]*volume.Local{}
	for kind, url := range urls {
		homes[kind] = start(t, 0, open(t, kind, url))
		homes[kind].SetMoves(&stays{})
	}
	at := "plain"
	v, err := homes[at].Create(t.Context(), volume.Spec{Name: "v", Pool: at, Size: volume.Range{Required: 16*mib + 4096}})
	check.OK(t, err)
	device, err := homes[at].AttachRaw(t.Context(), v, nil, true)
	check.OK(t, err)
	check.OK(t, text.Write(device.Path))
	check.OK(t, errors.Join(device.Close(), homes[at].Detach(t.Context(), v.ID)))
	for _, to := range []string{"linear", "plain", "thin", "linear", "xfs", "thin", "plain", "xfs", "linear", "thin", "xfs", "plain"} {
		from, err := homes[at].Seal(t.Context(), v.ID, 3, "node-2")
		check.OK(t, err)
		check.OK(t, homes[to].CopyIn(t.Context(), to, "v", "", from))
		check.OK(t, homes[to].Arrive(t.Context(), v.ID))
		check.OK(t, homes[at].Depart(t.Context(), v.ID, from.Created))
		moved, err := homes[to].Get(t.Context(), v.ID)
		check.OK(t, err)
		if moved.Size < v.Size || moved.Size >= v.Size+8*mib || moved.ID != v.ID || moved.Pool != to || !moved.Created.Equal(v.Created) {
			t.Errorf("from %s to %s: it is %+v", at, to, moved)
		}
		device, err := homes[to].AttachRaw(t.Context(), moved, nil, false)
		check.OK(t, err)
		if err := text.In(device.Path); err != nil {
			t.Errorf("from %s to %s: %v", at, to, err)
		}
		f, err := os.Open(device.Path)
		check.OK(t, err)
		rest := make([]byte, 4096)
		_, err = f.ReadAt(rest, 16*mib)
		if err != nil || strings.Trim(string(rest), "\x00") != "" {
			t.Errorf("from %s to %s: the end has %q, %v", at, to, rest[:16], err)
		}
		check.OK(t, errors.Join(f.Close(), device.Close(), homes[to].Detach(t.Context(), v.ID)))
		at = to
	}
	check.OK(t, homes[at].Delete(t.Context(), v.ID))
}

// TestMoveBack: a node that was taken for gone after a volume had moved away still has the old copy. When the volume moves back, that is replaced, but only if
// the volume has had at least as many claims.
func TestMoveBack(t *testing.T) {
	a, b := twoHomes(t, "a")()
	v, _ := withContents(t, a)
	from, err := a.Seal(t.Context(), v.ID, 3, "node-2")
	check.OK(t, err)
	check.OK(t, b.CopyIn(t.Context(), "a", "source", blockdev.Thin, from))
	check.OK(t, b.Arrive(t.Context(), v.ID))
	for _, claims := range []int64{2, 4} {
		want := map[int64]error{2: errdefs.ErrExists}[claims]
		back, err := b.Seal(t.Context(), v.ID, claims, "node-2")
		check.OK(t, err)
		if err := a.CopyIn(t.Context(), "a", "source", blockdev.Thin, back); !errors.Is(err, want) {
			t.Errorf("back after %d claims: %v, want %v", claims, err, want)
		}
	}
	check.OK(t, a.Arrive(t.Context(), v.ID))
	check.OK(t, second(a.Get(t.Context(), v.ID)))
	holds(t, a, v)
}

// TestSealedFor: a seal is for one node. It stays for that one, and is made anew for another one, so that only one node has the bytes by a seal. Who is about
// to break it learns for whom it is, until a person has decided (Readopt).
func TestSealedFor(t *testing.T) {
	a, _ := twoHomes(t, "a")()
	v, _ := withContents(t, a)
	var asked []volume.Sealing
	refused := fmt.Errorf("%w: not now", errdefs.ErrUnavailable)
	a.SetMoves(movesFunc(func(s volume.Sealing) error { asked = append(asked, s); return refused }))
	first, err := a.Seal(t.Context(), v.ID, 3, "node-2")
	check.OK(t, err)
	if again, err := a.Seal(t.Context(), v.ID, 3, "node-2"); err != nil || !again.Created.Equal(first.Created) {
		t.Errorf("for the same node: %v, %v", again.Created, err)
	}
	other, err := a.Seal(t.Context(), v.ID, 3, "node-3")
	if err != nil || !other.Created.After(first.Created) {
		t.Errorf("for another node: %v, %v", other.Created, err)
	}
	if late, err := a.Seal(t.Context(), v.ID, volume.AnyClaims, "node-2"); err != nil || !late.Created.Equal(other.Created) {
		t.Errorf("once it has moved: %v, %v", late.Created, err)
	}
	fails(t, a.Unseal(t.Context(), v.ID), errdefs.ErrUnavailable, "Unseal")
	check.OK(t, a.Readopt(t.Context(), "a", v.ID))
	fails(t, a.Unseal(t.Context(), v.ID), errdefs.ErrUnavailable, "Unseal")
	same(t, "asked", asked, []volume.Sealing{{Since: other.Created, For: "node-3"}, {Since: other.Created}})
	refused = nil
	check.OK(t, a.Unseal(t.Context(), v.ID))
	if record, err := a.Get(t.Context(), v.ID); err != nil || record.Sealed {
		t.Errorf("unsealed: %+v, %v", record, err)
	}
}

// movesFunc is a Moves.
type movesFunc func(volume.Sealing) error

func (f movesFunc) Stays(_ context.Context, _ volume.ID, _ string, s volume.Sealing) error {
	return f(s)
}

func (f movesFunc) IsHere(_ context.Context, _ volume.ID, _ string, s volume.Sealing) error {
	return f(s)
}

// TestHasTaken: a node has taken a volume over once that has arrived there by the seal that is asked about.
func TestHasTaken(t *testing.T) {
	a, b := twoHomes(t, "a")()
	v, _ := withContents(t, a)
	from, err := a.Seal(t.Context(), v.ID, 3, "node-2")
	check.OK(t, err)
	taken := func(sealed time.Time, want bool) {
		t.Helper()
		if has, err := b.HasTaken(t.Context(), v.ID, sealed, "uid", 1); err != nil || has != want {
			t.Errorf("taken over: %v, %v, want %v", has, err, want)
		}
	}
	taken(from.Created, false)
	check.OK(t, b.CopyIn(t.Context(), "a", "source", blockdev.Thin, from))
	taken(from.Created, false)
	check.OK(t, b.Arrive(t.Context(), v.ID))
	taken(from.Created, true)
	taken(from.Created.Add(time.Microsecond), false)
}

// TestDropMoved: a node removes its old copy of a volume that has moved on, also several times, if the node that has the volume now confirms that it came by
// that seal. A copy with another seal stays, and so does one whose successor is lost or has not arrived.
func TestDropMoved(t *testing.T) {
	var disks []*memory.Disk
	var nodes []*volume.Local
	for range 3 {
		disks = append(disks, memory.NewDisk(1<<30))
		nodes = append(nodes, start(t, 0, disks[len(disks)-1].Open("default", nil)))
	}
	a, b, c := nodes[0], nodes[1], nodes[2]
	v := made(t)(a.Create(t.Context(), volume.Spec{Name: "v", Size: volume.Range{Required: 8 << 20}}))
	came := func(l *volume.Local, sealed time.Time, want bool) {
		t.Helper()
		if has, err := l.CameBy(t.Context(), v.ID, sealed); err != nil || has != want {
			t.Errorf("it came from there: %v, %v", has, err)
		}
	}
	left, err := a.Seal(t.Context(), v.ID, 3, "node-2")
	check.OK(t, err)
	came(b, left.Created, false)
	check.OK(t, b.CopyIn(t.Context(), "default", "v", blockdev.Thin, left))
	came(b, left.Created, false) // it has not arrived
	check.OK(t, b.Arrive(t.Context(), v.ID))
	came(b, left.Created, true)
	came(b, left.Created.Add(time.Microsecond), false)
	move(t, "v", v.ID, b, c, "default")
	came(b, left.Created, false)
	came(c, left.Created, true)

	has := func(l *volume.Local) func(time.Time) error {
		return func(sealed time.Time) error {
			if is, err := l.CameBy(t.Context(), v.ID, sealed); err != nil || !is {
				return errors.Join(err, errBroken)
			}
			return nil
		}
	}
	fails(t, c.DropMoved(t.Context(), "default", v.ID, has(c)), errdefs.ErrPrecondition, "DropMoved of what is not sealed")
	fails(t, a.DropMoved(t.Context(), "default", v.ID, has(b)), errBroken, "DropMoved of what no other node has")
	ref := blockdev.Ref{Kind: blockdev.Volume, Key: v.ID.Key}
	disks[2].Ail(ref, blockdev.Problem{Severity: blockdev.DataLoss, Reason: "ImageMissing", Message: "it is gone"})
	fails(t, a.DropMoved(t.Context(), "default", v.ID, has(c)), errBroken, "DropMoved of what the other node has lost")
	disks[2].Ail(ref)
	check.OK(t, second(a.Get(t.Context(), v.ID)))
	check.OK(t, a.DropMoved(t.Context(), "default", v.ID, has(c)))
	fails(t, second(a.Get(t.Context(), v.ID)), errdefs.ErrNotFound, "Get of what was dropped")

	for range 9 { // only the last moves are remembered
		move(t, "v", v.ID, c, b, "default")
		move(t, "v", v.ID, b, c, "default")
	}
	came(c, left.Created, false)
}

// TestSealTime: if the clock of a home is set back, also while its driver is down, the times of its next seals and descriptions are still later than all that
// it has told before, as a new node refuses earlier ones.
func TestSealTime(t *testing.T) {
	pool, err := pools.Open(t.Context(), "a", twoPools(t)["a"])
	check.OK(t, err)
	t.Cleanup(func() { check.OK(t, pool.Close()) })
	v, _ := withContents(t, start(t, 0, pool))
	last := time.Now().Add(time.Hour).UTC().Truncate(time.Microsecond)
	check.OK(t, second(pool.SetLabels(t.Context(), blockdev.Ref{Kind: v.ID.Kind, Key: v.ID.Key}, func(labels map[string]string) error {
		labels["sealed"] = last.Format(time.RFC3339Nano) + "/3/2"
		return nil
	})))
	for claims := range int64(4) {
		for what, tell := range map[string]func(*volume.Local, context.Context, volume.ID, int64) (volume.Origin, error){
			"described": (*volume.Local).Describe,
			"sealed": func(l *volume.Local, ctx context.Context, id volume.ID, claims int64) (volume.Origin, error) {
				return l.Seal(ctx, id, claims, "node-2")
			},
		} {
			a := start(t, 0, pool)
			a.SetMoves(&stays{})
			from, err := tell(a, t.Context(), v.ID, claims)
			check.OK(t, err)
			if !from.Created.After(last) {
				t.Errorf("it is %s at %v, and was told to be at %v before", what, from.Created, last)
			}
			last = from.Created
			check.OK(t, a.Unseal(t.Context(), v.ID))
		}
	}
}

// TestSealTimeMoves: a volume that has moved from a node whose clock is ahead is sealed later than it was there: whoever has made room for it before takes
// the later one of two descriptions for the present one, whichever node gave it.
func TestSealTimeMoves(t *testing.T) {
	a, b := twoHomes(t, "a")()
	v, _ := withContents(t, a)
	from, err := a.Seal(t.Context(), v.ID, 1, "node-2")
	check.OK(t, err)
	from.Created = from.Created.Add(time.Hour) // as that node's clock says
	check.OK(t, b.CopyIn(t.Context(), "a", "source", blockdev.Thin, from))
	check.OK(t, b.Arrive(t.Context(), v.ID))
	again, err := b.Seal(t.Context(), v.ID, 2, "node-2")
	check.OK(t, err)
	if !again.Created.After(from.Created) {
		t.Errorf("it came by a seal of %v, and is sealed at %v", from.Created, again.Created)
	}
}
