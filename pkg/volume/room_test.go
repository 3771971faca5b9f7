package volume_test

import (
	"context"
	"fmt"
	"maps"
	"runtime"
	"strings"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// zeroing is a pool that overwrites what it makes with zeros, as that of linear logical volumes does: each object takes several calls, whose time ends. It
// goes on where the last one stopped only for the same spec (catalog.Catalog.Begin).
type zeroing struct {
	blockdev.Pool
	calls int // that an object takes
	begun blockdev.Spec
	left  int  // calls for the object that is begun
	anew  int  // how often one was begun
	late  bool // the time of the next call ends when all is made, before it has its labels
}

func (p *zeroing) Create(ctx context.Context, spec blockdev.Spec) (blockdev.Record, error) {
	if _, err := p.Get(ctx, spec.Ref); err == nil {
		return p.Pool.Create(ctx, spec)
	}
	if p.left == 0 || p.begun.Ref != spec.Ref || p.begun.Size != spec.Size || !maps.Equal(p.begun.Labels, spec.Labels) {
		p.begun, p.left = spec, p.calls
		p.begun.Labels = maps.Clone(spec.Labels)
		p.anew++
	}
	if p.left--; p.left > 0 {
		return blockdev.Record{}, fmt.Errorf("zero the device: %w", context.DeadlineExceeded)
	}
	return p.Pool.Create(ctx, spec)
}

func (p *zeroing) SetLabels(ctx context.Context, ref blockdev.Ref, change func(map[string]string) error) (blockdev.Record, error) {
	if p.late {
		p.late = false
		return blockdev.Record{}, fmt.Errorf("change the record: %w", context.DeadlineExceeded)
	}
	return p.Pool.SetLabels(ctx, ref, change)
}

// TestMoveInUseRoom: it takes a pool longer to make room for a volume than one call may take. Later calls go on with that, though the volume is described
// anew for each; also with what was all made, and has not got its labels. If the volume has grown, the room is made anew.
func TestMoveInUseRoom(t *testing.T) {
	m := newMoving(t, "a")
	slow := &zeroing{Pool: open(t, "c", filesURL(t)), calls: 4}
	b := start(t, 0, slow)
	serve(t, b, m.kb, nil)
	prepared := func(calls int) volume.Exported {
		t.Helper()
		for call := 1; call <= calls; call++ {
			from, err := m.a.Describe(t.Context(), m.v.ID, 3)
			check.OK(t, err)
			room, err := b.Prepare(t.Context(), "c", "source", blockdev.Thin, from, grant(4, "c"))
			if call == calls && err == nil {
				return room
			}
			fails(t, err, context.DeadlineExceeded, "Prepare that runs out of time")
			fails(t, second(b.Get(t.Context(), m.v.ID)), errdefs.ErrNotFound, "Get of what is only room")
			if !slow.late {
				fails(t, b.Arrive(t.Context(), m.v.ID), errdefs.ErrNotFound, "Arrive of what is only room")
			}
		}
		t.Fatalf("no room was made in %d calls; %d times it was begun anew", calls, slow.anew)
		return volume.Exported{}
	}
	drop := func(room volume.Exported) {
		t.Helper()
		check.OK(t, b.DropPrepared(t.Context(), m.v.ID, grant(4, "c"), room.NQN))
		if records, err := slow.List(t.Context(), blockdev.Volume, "", 0); len(records) > 0 || err != nil {
			t.Errorf("dropped, there is %v, %v", records, err)
		}
		slow.anew = 0
	}
	room := prepared(4)
	if labels := room.Record.Labels; slow.anew != 1 || m.kb.exports[room.NQN].Device == "" || labels["export"] == "" || labels["made"] == "" || labels["pool"] != "a" {
		t.Errorf("it was begun %d times; exported is %v, by the record %v", slow.anew, m.kb.exports, labels)
	}
	drop(room)

	slow.late = true
	drop(prepared(5))
	slow.late, slow.calls = true, 1
	from, err := m.a.Describe(t.Context(), m.v.ID, 3)
	check.OK(t, err)
	fails(t, second(b.Prepare(t.Context(), "c", "source", blockdev.Thin, from, grant(4, "c"))), context.DeadlineExceeded, "Prepare that runs out of time")
	slow.calls = 4
	check.OK(t, second(m.a.Expand(t.Context(), m.v.ID, volume.Range{Required: m.v.Size + mib})))
	room = prepared(4)
	if room.Size != m.v.Size+mib || slow.anew != 2 {
		t.Errorf("grown, it has room for %d bytes, and was begun %d times", room.Size, slow.anew)
	}
	drop(room)
}

// TestLVMMoveInUseRoom is TestMoveInUseRoom for linear logical volumes.
func TestLVMMoveInUseRoom(t *testing.T) {
	drivertest.NeedLVM(t)
	group := drivertest.NewGroup(t, 1200*mib)
	drivertest.SetUpLVM(t, `"a|.*|"`)
	a, b := start(t, 0, open(t, "a", twoPools(t)["a"])), start(t, 0, open(t, "c", group.URL()+"?reservePercent=0"))
	a.SetMoves(&stays{})
	serve(t, a, newTarget(t), &consumer{nothing: true})
	serve(t, b, newTarget(t), nil)
	v, err := a.Create(t.Context(), volume.Spec{Name: "source", Pool: "a", Provisioning: blockdev.Thin, Size: volume.Range{Required: gib}})
	check.OK(t, err)
	check.OK(t, second(a.Export(t.Context(), v.ID, grant(3, "c"))))
	defer func() { check.OK(t, a.Unexport(context.Background(), v.ID, 0)) }()
	pieces := int(v.Size / (64 * mib)) // that are zeroed at once (lvmpool.zeroChunk)
	for calls := 1; calls <= pieces+2; calls++ {
		from, err := a.Describe(t.Context(), v.ID, 3)
		check.OK(t, err)
		room, err := b.Prepare(&endsZeroing{Context: t.Context(), after: 1}, "c", "source", "", from, grant(4, "c"))
		if err == nil {
			check.OK(t, b.DropPrepared(t.Context(), v.ID, grant(4, "c"), room.NQN))
			if calls < pieces {
				t.Errorf("room was made in %d calls, and each was to zero one of %d pieces", calls, pieces)
			}
			return
		}
		fails(t, err, context.Canceled, "Prepare that runs out of time")
	}
	t.Error("no room was made; each call began anew")
}

// endsZeroing is a context that ends when so many pieces of a logical volume have been zeroed.
type endsZeroing struct {
	context.Context
	after int
	ended bool
}

func (c *endsZeroing) Err() error {
	callers := make([]uintptr, 16)
	frames := runtime.CallersFrames(callers[:runtime.Callers(2, callers)])
	for more := !c.ended; more; {
		var frame runtime.Frame
		frame, more = frames.Next()
		if strings.HasSuffix(frame.Function, "lvmpool.zeroFrom") {
			c.after--
			c.ended = c.after < 0
			break
		}
	}
	if c.ended {
		return context.Canceled
	}
	return nil
}
