package volume_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"reflect"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/internal/secret"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
	"github.com/ashlar-csi/ashlar/pkg/volume/storetest"
)

// moving is two nodes, a and b, each with a kernel's target of its own (ka, kb), and a volume of a that node c uses by its claim of generation 3.
type moving struct {
	a, b    *volume.Local
	ka, kb  *target
	v       volume.Volume
	at      volume.Exported // by a
	cluster *stays          // asked by a
	restart func()
}

func newMoving(t *testing.T, other string, wrap ...func(blockdev.Pool) blockdev.Pool) *moving {
	t.Helper()
	m := &moving{ka: newTarget(t), kb: newTarget(t), cluster: &stays{}}
	homes := twoHomes(t, other, wrap...)
	m.restart = func() {
		m.a, m.b = homes()
		m.a.SetMoves(m.cluster)
		serve(t, m.a, m.ka, &consumer{nothing: true})
		serve(t, m.b, m.kb, nil)
	}
	m.restart()
	m.v, _ = withContents(t, m.a)
	var err error
	m.at, err = m.a.Export(t.Context(), m.v.ID, grant(3, "c"))
	check.OK(t, err)
	t.Cleanup(func() {
		for l, pool := range map[*volume.Local]string{m.a: "a", m.b: other} {
			check.OK(t, errors.Join(l.Unexport(context.Background(), m.v.ID, 0), l.DropLeftover(context.Background(), volume.Leftover{ID: m.v.ID, Pool: pool, For: m.v.ID.Key})))
		}
	})
	return m
}

// mirror copies ranges from the export of the old node to that of the new node, as the kernel of their consumer does.
func (m *moving) mirror(t *testing.T, to volume.Exported, ranges []blockdev.Extent) {
	t.Helper()
	m.ka.mu.Lock()
	old := m.ka.exports[m.at.NQN].Device
	m.ka.mu.Unlock()
	m.kb.mu.Lock()
	fresh := m.kb.exports[to.NQN].Device
	m.kb.mu.Unlock()
	from, err := os.Open(old)
	check.OK(t, err)
	defer from.Close()
	into, err := os.OpenFile(fresh, os.O_RDWR, 0)
	check.OK(t, err)
	defer into.Close()
	for _, e := range ranges {
		data := make([]byte, e.Length)
		_, err := from.ReadAt(data, e.Offset)
		check.OK(t, err)
		_, err = into.WriteAt(data, e.Offset)
		check.OK(t, err)
	}
}

// unflushable is a pool whose devices cannot be flushed while bad is set.
type unflushable struct {
	blockdev.Pool
	bad *bool
}

func (u unflushable) Unwrap() blockdev.Pool { return blockdev.Unwrap(u.Pool) }

func (u unflushable) Attached(ctx context.Context, ref blockdev.Ref) ([]blockdev.Device, error) {
	devices, err := u.Pool.Attached(ctx, ref)
	for i := range devices {
		if *u.bad {
			devices[i].Path = os.DevNull // fsync(2): EINVAL
		}
	}
	return devices, err
}

// TestNotFlushed: a copy that could not be flushed is never complete, also if the next flush succeeds: nobody knows what is missing.
func TestNotFlushed(t *testing.T) {
	bad := false
	m := newMoving(t, "a", func(pool blockdev.Pool) blockdev.Pool { return unflushable{pool, &bad} })
	from, err := m.a.Describe(t.Context(), m.v.ID, 3)
	check.OK(t, err)
	to := grant(4, "c")
	room, err := m.b.Prepare(t.Context(), "a", "source", blockdev.Thin, from, to)
	check.OK(t, err)
	sealed, err := m.a.SealFor(t.Context(), m.v.ID, 3, grant(3, "c"), "node-2")
	check.OK(t, err)
	bad = true
	m.kb.taken()
	fails(t, m.b.Complete(t.Context(), "a", sealed, to, room.NQN), errdefs.ErrDataLoss, "Complete of what cannot be flushed")
	same(t, "its export ends with", m.kb.taken(), []string{"withdraw " + room.NQN, "remove " + room.NQN}) // the consumer has a mirror over it
	bad = false
	fails(t, m.b.Complete(t.Context(), "a", sealed, to, room.NQN), errdefs.ErrNotFound, "Complete of what could not be flushed")
	if len(m.kb.exports) != 0 {
		t.Errorf("it is still exported: %v", m.kb.exports)
	}
}

// TestMoveInUse: a volume moves while another node uses it. The new home's copy cannot be used before it is complete and has arrived. Then it is the whole
// volume, with the record of its use. All the time it is exported to the consumer by the same name, also after a start of the new home's driver.
func TestMoveInUse(t *testing.T) {
	for _, pool := range []string{"a", "b"} { // on the new home
		t.Run(pool, func(t *testing.T) { moveInUse(t, pool) })
	}
}

func moveInUse(t *testing.T, pool string) {
	m := newMoving(t, pool)
	check.OK(t, second(m.a.SwapLabels(t.Context(), m.v.ID, nil, map[string]string{"target": "/pod", "flags": "abc"})))
	from, err := m.a.Describe(t.Context(), m.v.ID, 3)
	check.OK(t, err)
	ranges, err := m.a.DataRanges(t.Context(), m.v.ID)
	check.OK(t, err)
	total := int64(0)
	for _, e := range ranges {
		total += e.Length
	}
	if total < 9*mib || total > 20*mib {
		t.Errorf("%d bytes hold data: %v", total, ranges)
	}
	to := grant(4, "c")
	room, err := m.b.Prepare(t.Context(), pool, "source", blockdev.Thin, from, to)
	check.OK(t, err)
	if again, err := m.b.Prepare(t.Context(), pool, "source", blockdev.Thin, from, to); err != nil || again.NQN != room.NQN || again.Secret == (secret.Text{}) || again.Secret != room.Secret {
		t.Errorf("asked again it answers %v, %v; before %v", again, err, room)
	}
	fails(t, second(m.b.Get(t.Context(), m.v.ID)), errdefs.ErrNotFound, "Get of what is not complete")
	fails(t, m.b.Arrive(t.Context(), m.v.ID), errdefs.ErrNotFound, "Arrive of what is not complete")
	m.mirror(t, room, ranges)
	m.restart()
	if len(m.kb.exports) != 1 || m.kb.exports[room.NQN].Host != room.Host {
		t.Errorf("after a start it exports %v", m.kb.exports)
	}

	sealed, err := m.a.SealFor(t.Context(), m.v.ID, 3, grant(3, "c"), "node-2")
	check.OK(t, err)
	if again, err := m.a.SealFor(t.Context(), m.v.ID, 3, grant(3, "c"), "node-2"); err != nil || !reflect.DeepEqual(again, sealed) {
		t.Errorf("sealed again it is %+v, %v; it was %+v", again, err, sealed)
	}
	exportedTo(t, m.a, m.ka, m.v.ID, grant(3, "c")) // the consumer goes on
	sealed.Object, sealed.Generation = "uid", 7
	fails(t, m.b.Complete(t.Context(), "c", sealed, to, room.NQN), errdefs.ErrPrecondition, "Complete of what is in another pool")
	for range 2 {
		check.OK(t, m.b.Complete(t.Context(), pool, sealed, to, room.NQN))
		if here, err := m.b.IsCopiedIn(t.Context(), m.v.ID, sealed.Created); !here || err != nil {
			t.Errorf("it is all there: %v, %v", here, err)
		}
	}
	m.restart()
	for _, of := range []struct {
		object     string
		generation int64
		taken      bool
	}{{"uid", 7, false}, {"uid", 6, true}, {"another", 7, true}} { // the object that names the old home: as it was, restored, made anew
		if taken, err := m.b.HasTaken(t.Context(), m.v.ID, sealed.Created, of.object, of.generation); err != nil || taken != of.taken {
			t.Errorf("taken over, as object %s of generation %d is asked for: %v, %v", of.object, of.generation, taken, err)
		}
	}
	for range 2 {
		check.OK(t, m.b.Arrive(t.Context(), m.v.ID))
	}
	exportedTo(t, m.b, m.kb, m.v.ID, to)
	if m.kb.exports[room.NQN].Device == "" {
		t.Errorf("its user has lost it: %v", m.kb.exports)
	}
	fails(t, m.a.Depart(t.Context(), m.v.ID, sealed.Created), errdefs.ErrInUse, "Depart of what is exported")
	check.OK(t, m.a.Unexport(t.Context(), m.v.ID, 0))
	check.OK(t, m.a.Depart(t.Context(), m.v.ID, sealed.Created))
	moved, err := m.b.Get(t.Context(), m.v.ID)
	check.OK(t, err)
	if moved.Target != "/pod" || moved.Flags != "abc" || !moved.Created.Equal(m.v.Created) || moved.Format.State != volume.Raw || moved.Sealed || moved.Exported != to ||
		moved.ID != m.v.ID || moved.Pool != pool {
		t.Errorf("it is %+v", moved)
	}
	check.OK(t, m.b.Unexport(t.Context(), m.v.ID, 0))
	holds(t, m.b, moved)
}

// TestMoveInUsePrepared: what was prepared for a volume is replaced only for a later description of the volume. It is completed or dropped only for the
// consumer that it was prepared for, by the export that this is connected to.
func TestMoveInUsePrepared(t *testing.T) {
	m := newMoving(t, "a")
	to := grant(4, "c")
	prepare := func(from volume.Origin) volume.Exported {
		t.Helper()
		room, err := m.b.Prepare(t.Context(), "a", "source", blockdev.Thin, from, to)
		check.OK(t, err)
		if len(m.kb.exports) != 1 || m.kb.exports[room.NQN].Device == "" {
			t.Errorf("it exports %v, and says %v", m.kb.exports, room)
		}
		return room
	}
	former, err := m.a.Describe(t.Context(), m.v.ID, 3)
	check.OK(t, err)
	first := prepare(former)
	m.mirror(t, first, []blockdev.Extent{{Length: mib}})
	late, err := m.a.SealFor(t.Context(), m.v.ID, 3, grant(3, "c"), "node-2")
	check.OK(t, err)
	from, err := m.a.Describe(t.Context(), m.v.ID, 3)
	check.OK(t, err)
	room := prepare(from)
	if room.NQN == first.NQN {
		t.Error("described anew, it is not another one")
	}
	f, err := os.Open(m.kb.exports[room.NQN].Device)
	check.OK(t, err)
	head := make([]byte, mib)
	_, err = f.ReadAt(head, 0)
	check.OK(t, errors.Join(err, f.Close()))
	if string(head) != string(make([]byte, mib)) {
		t.Error("it does not read as zeros")
	}
	fails(t, second(m.b.Prepare(t.Context(), "a", "source", blockdev.Thin, former, to)), errdefs.ErrPrecondition, "Prepare of an earlier description")
	sealed, err := m.a.SealFor(t.Context(), m.v.ID, 3, grant(3, "c"), "node-2")
	check.OK(t, err)
	if !sealed.Created.After(late.Created) {
		t.Errorf("it was described anew, and is sealed as it was at %v", late.Created)
	}
	refused := func(when string) {
		t.Helper()
		fails(t, m.b.Complete(t.Context(), "a", sealed, to, first.NQN), errdefs.ErrNotFound, when+": Complete of another export")
		fails(t, m.b.Complete(t.Context(), "a", sealed, grant(5, "c"), room.NQN), errdefs.ErrNotFound, when+": Complete of another claim")
		fails(t, m.b.Complete(t.Context(), "a", sealed, grant(4, "d"), room.NQN), errdefs.ErrNotFound, when+": Complete of another node")
		fails(t, m.b.Complete(t.Context(), "a", late, to, room.NQN), errdefs.ErrPrecondition, when+": Complete of an earlier seal")
		check.OK(t, m.b.DropPrepared(t.Context(), m.v.ID, to, first.NQN))
		check.OK(t, m.b.DropPrepared(t.Context(), m.v.ID, grant(5, "c"), room.NQN))
		if m.kb.exports[room.NQN].Device == "" {
			t.Errorf("%s: it is gone", when)
		}
	}
	refused("prepared")
	grown := sealed
	grown.Size += mib
	fails(t, m.b.Complete(t.Context(), "a", grown, to, room.NQN), errdefs.ErrPrecondition, "Complete of what has grown")
	bad := sealed
	bad.Labels = map[string]string{"export": "1"}
	fails(t, m.b.Complete(t.Context(), "a", bad, to, room.NQN), errdefs.ErrUnsupported, "Complete with a label that does not move")
	check.OK(t, m.b.Complete(t.Context(), "a", sealed, to, room.NQN))
	refused("complete")
	fails(t, second(m.b.Prepare(t.Context(), "a", "source", blockdev.Thin, from, to)), errdefs.ErrPrecondition, "Prepare over what is complete since")
	check.OK(t, m.b.DropPrepared(t.Context(), m.v.ID, to, room.NQN))
	if here, err := m.b.IsCopiedIn(t.Context(), m.v.ID, sealed.Created); here || err != nil || len(m.kb.exports) != 0 {
		t.Errorf("dropped, it is there: %v, %v, %v", here, err, m.kb.exports)
	}
	check.OK(t, m.b.DropPrepared(t.Context(), m.v.ID, to, room.NQN))
	fails(t, m.b.Complete(t.Context(), "a", sealed, to, room.NQN), errdefs.ErrNotFound, "Complete of what is gone")

	// After a restart of its machine, the new home may have lost writes that it had acknowledged.
	from, err = m.a.Describe(t.Context(), m.v.ID, 3)
	check.OK(t, err)
	room = prepare(from)
	m.kb.reboot()
	m.b.ServeExports(t.Context(), volume.Exporting{Boot: "2", Open: func() (volume.Exporter, error) { return m.kb, nil }, Key: nodeKey, Locks: &keylock.Table{}})
	sealed, err = m.a.SealFor(t.Context(), m.v.ID, 3, grant(3, "c"), "node-2")
	check.OK(t, err)
	fails(t, m.b.Complete(t.Context(), "a", sealed, to, room.NQN), errdefs.ErrNotFound, "Complete after the machine's start")
	from, err = m.a.Describe(t.Context(), m.v.ID, 3)
	check.OK(t, err)
	prepare(from)
	// A leftover is dropped together with its export.
	check.OK(t, m.b.DropLeftover(t.Context(), volume.Leftover{ID: m.v.ID, Pool: "a", For: m.v.ID.Key}))
	if len(m.kb.exports) != 0 {
		t.Errorf("it exports %v", m.kb.exports)
	}
}

// TestMoveInUseOtherObject: a complete copy may be the only one that has what was written since the volume moved. So a move by another object of the same name
// does not replace it, whether its volume is in use or not.
func TestMoveInUseOtherObject(t *testing.T) {
	m := newMoving(t, "a")
	describe := func(object string) volume.Origin {
		from, err := m.a.Describe(t.Context(), m.v.ID, 3)
		check.OK(t, err)
		from.Object = object
		return from
	}
	prepare := func(from volume.Origin) (volume.Exported, error) {
		return m.b.Prepare(t.Context(), "a", "source", blockdev.Thin, from, grant(4, "c"))
	}
	check.OK(t, second(prepare(describe("other")))) // not completed, so it may be replaced
	room, err := prepare(describe("one"))
	check.OK(t, err)
	sealed, err := m.a.SealFor(t.Context(), m.v.ID, 3, grant(3, "c"), "node-2")
	check.OK(t, err)
	sealed.Object = "one"
	check.OK(t, m.b.Complete(t.Context(), "a", sealed, grant(4, "c"), room.NQN))
	from := describe("other")
	fails(t, second(prepare(from)), errdefs.ErrExists, "Prepare over what another object has completed")
	fails(t, m.b.CopyIn(t.Context(), "a", "source", blockdev.Thin, from), errdefs.ErrExists, "Bring over that")
	if here, err := m.b.IsCopiedIn(t.Context(), m.v.ID, sealed.Created); !here || err != nil {
		t.Errorf("it is there: %v, %v", here, err)
	}
	check.OK(t, second(prepare(describe("one"))))
}

// TestMoveInUseHere: if the new home is itself the consumer, nothing is exported.
func TestMoveInUseHere(t *testing.T) {
	m := newMoving(t, "a")
	from, err := m.a.Describe(t.Context(), m.v.ID, 3)
	check.OK(t, err)
	room, err := m.b.Prepare(t.Context(), "a", "source", blockdev.Thin, from, grant(4, node))
	check.OK(t, err)
	if room.NQN != "" || room.Size != m.v.Size || len(m.kb.exports) != 0 {
		t.Errorf("it is %v, and exports %v", room, m.kb.exports)
	}
	sealed, err := m.a.SealFor(t.Context(), m.v.ID, 3, grant(3, "c"), "node-2")
	check.OK(t, err)
	check.OK(t, m.b.Complete(t.Context(), "a", sealed, grant(4, node), ""))
	check.OK(t, m.b.Arrive(t.Context(), m.v.ID))
	if have, err := m.b.Get(t.Context(), m.v.ID); err != nil || have.Exported != (volume.Grant{}) {
		t.Errorf("it is %+v, %v", have, err)
	}
}

// TestSealedForUser: a volume that is sealed for its consumer is changed, or used on its home, only if the cluster says that it stays; the seal is then
// ended. That seal does not count as one of a volume that is not in use.
func TestSealedForUser(t *testing.T) {
	m := newMoving(t, "a")
	user := grant(3, "c")
	for name, other := range map[string]volume.Grant{"another claim": grant(4, "c"), "another node": grant(3, "d"), "its own node": grant(3, node)} {
		fails(t, second(m.a.SealFor(t.Context(), m.v.ID, 3, other, "node-2")), errdefs.ErrPrecondition, "SealFor of "+name)
	}
	target := 0
	for name, change := range map[string]func(ctx context.Context) error{
		"its user's labels": func(ctx context.Context) error {
			was, err := m.a.Get(ctx, m.v.ID)
			check.OK(t, err)
			target++
			before := map[string]string{}
			if was.Target != "" {
				before["target"] = was.Target
			}
			return second(m.a.SwapLabels(ctx, m.v.ID, before, map[string]string{"target": fmt.Sprint("/pod", target)}))
		},
		"labels at home": func(ctx context.Context) error {
			target++
			return m.a.SetTarget(ctx, m.v.ID, fmt.Sprint("/pod", target))
		},
		"growth": func(ctx context.Context) error {
			return second(m.a.Expand(ctx, m.v.ID, volume.Range{Required: m.v.Size + mib}))
		},
		"a snapshot": func(ctx context.Context) error { return second(m.a.CreateSnapshot(ctx, "meanwhile", m.v.ID)) },
		"a clone": func(ctx context.Context) error {
			return second(m.a.Create(ctx, volume.Spec{Name: "clone", Pool: "a", Source: m.v.ID}))
		},
		"parameters": func(ctx context.Context) error {
			return m.a.Modify(ctx, m.v.ID, map[string]string{"readAheadKiB": "128"})
		},
		"its user, who opens it anew": func(ctx context.Context) error { return second(m.a.Export(ctx, m.v.ID, user)) },
		"its move, begun anew":        func(ctx context.Context) error { return second(m.a.Describe(ctx, m.v.ID, 3)) },
	} {
		sealed, err := m.a.SealFor(t.Context(), m.v.ID, 3, user, "node-2")
		check.OK(t, err)
		m.cluster.err, m.cluster.used = fmt.Errorf("%w: it is about to move", errdefs.ErrUnavailable), nil
		fails(t, change(t.Context()), errdefs.ErrUnavailable, name)
		same(t, name+": asked for claims", m.cluster.used, []int64{3})
		if again, err := m.a.SealFor(t.Context(), m.v.ID, 3, user, "node-2"); err != nil || !reflect.DeepEqual(again, sealed) {
			t.Errorf("%s: it is %+v, %v; it was %+v", name, again, err, sealed)
		}
		m.cluster.err = nil
		if err := change(t.Context()); err != nil {
			t.Errorf("%s: it stays, and %v", name, err)
		}
		if since, is, err := m.a.SealedSince(t.Context(), m.v.ID); is || err != nil {
			t.Errorf("%s: it is sealed since %v, %v", name, since, err)
		}
	}
	used, err := m.a.SealFor(t.Context(), m.v.ID, 3, user, "node-2")
	check.OK(t, err)
	check.OK(t, m.a.Unexport(t.Context(), m.v.ID, 0))
	fails(t, second(m.a.Seal(t.Context(), m.v.ID, volume.AnyClaims, "node-2")), errdefs.ErrPrecondition, "Seal of what has moved, and whose user went on")
	if unused, err := m.a.Seal(t.Context(), m.v.ID, 3, "node-2"); err != nil || !unused.Created.After(used.Created) {
		t.Errorf("not used any more it is sealed at %v, %v; its user had it sealed at %v", unused.Created, err, used.Created)
	}

	// If the consumer is the home itself, the volume has to be attached there.
	fails(t, second(m.a.SealFor(t.Context(), m.v.ID, 4, grant(4, node), "node-2")), errdefs.ErrPrecondition, "SealFor of what nobody has attached")
	device, err := m.a.AttachRaw(t.Context(), m.v, nil, true)
	check.OK(t, err)
	check.OK(t, second(m.a.SealFor(t.Context(), m.v.ID, 4, grant(4, node), "node-2")))
	m.cluster.err = fmt.Errorf("%w: it is about to move", errdefs.ErrUnavailable)
	fails(t, second(m.a.AttachRaw(t.Context(), m.v, nil, true)), errdefs.ErrUnavailable, "AttachRaw of what is about to move")
	check.OK(t, errors.Join(device.Close(), m.a.Detach(t.Context(), m.v.ID)))
}

// TestDataRanges: for a volume that holds data in very many places, there are at most 512 ranges, which have all of the data.
func TestDataRanges(t *testing.T) {
	disk := memory.NewDisk(8 << 30)
	pool := disk.Open("default", nil)
	l := start(t, 0, pool)
	v, err := l.Create(t.Context(), volume.Spec{Name: "v", Size: volume.Range{Required: 512 * mib}})
	check.OK(t, err)
	write := storetest.WriteTo(pool)
	var at []int64
	for i := range int64(1500) {
		at = append(at, (i*4+i%3)*(64<<10))
	}
	for _, offset := range at {
		check.OK(t, write(t.Context(), v.ID, offset, []byte("data")))
	}
	ranges, err := l.DataRanges(t.Context(), v.ID)
	check.OK(t, err)
	if len(ranges) == 0 || len(ranges) > 512 {
		t.Errorf("%d ranges", len(ranges))
	}
	end := int64(0)
	for _, e := range ranges {
		if e.Offset < end || e.Length <= 0 {
			t.Fatalf("%v after byte %d", e, end)
		}
		end = e.Offset + e.Length
	}
	for _, offset := range at {
		found := false
		for _, e := range ranges {
			found = found || offset >= e.Offset && offset+4 <= e.Offset+e.Length
		}
		if !found {
			t.Errorf("byte %d is left out", offset)
		}
	}
}

// TestMoveInUseLeft: a volume has left its home while it was in use, and the home still has its old copy, sealed and exported, as it was taken for gone. When
// the volume moves back, that copy is replaced, and its export ended.
func TestMoveInUseLeft(t *testing.T) {
	m := newMoving(t, "a")
	from, err := m.a.Describe(t.Context(), m.v.ID, 3)
	check.OK(t, err)
	ranges, err := m.a.DataRanges(t.Context(), m.v.ID)
	check.OK(t, err)
	room, err := m.b.Prepare(t.Context(), "a", "source", blockdev.Thin, from, grant(4, "c"))
	check.OK(t, err)
	m.mirror(t, room, ranges)
	sealed, err := m.a.SealFor(t.Context(), m.v.ID, 3, grant(3, "c"), "node-2")
	check.OK(t, err)
	check.OK(t, m.b.Complete(t.Context(), "a", sealed, grant(4, "c"), room.NQN))
	check.OK(t, errors.Join(m.b.Arrive(t.Context(), m.v.ID), m.b.Unexport(t.Context(), m.v.ID, 0)))

	back, err := m.b.Seal(t.Context(), m.v.ID, 4, "node-2")
	check.OK(t, err)
	check.OK(t, m.a.CopyIn(t.Context(), "a", "source", blockdev.Thin, back))
	check.OK(t, errors.Join(m.a.Arrive(t.Context(), m.v.ID), m.b.Depart(t.Context(), m.v.ID, back.Created)))
	have, err := m.a.Get(t.Context(), m.v.ID)
	check.OK(t, err)
	if have.Exported != (volume.Grant{}) || have.Sealed || len(m.ka.exports) > 0 {
		t.Errorf("it is %+v, and the kernel exports %v", have, m.ka.exports)
	}
	holds(t, m.a, have)
}
