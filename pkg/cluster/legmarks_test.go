package cluster_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/wrapperspb"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster/export"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// TestReachedMarks: a volume becomes a leg at its home, and whichever node uses it asks the home for its marks. A pool in memory keeps no marks, so all of
// it counts as written since an era, and its data as written ever.
func TestReachedMarks(t *testing.T) {
	w, a, b, _, v, _ := reached(t, volume.Spec{Name: "v", Size: volume.Range{Required: 16 * mib}})
	o := &v1alpha1.Volume{}
	check.OK(t, w.Get(w.ctx, client.ObjectKey{Name: v.ID.Key}, o))
	before := o.DeepCopy()
	o.Spec.ReplicaOf = v.ID.Key
	check.OK(t, w.Patch(w.ctx, o, client.MergeFrom(before)))
	w.eventually("its home knows that it is a leg", func() bool {
		have, err := a.local.Get(w.ctx, v.ID)
		return err == nil && have.ReplicaOf == v.ID.Key
	})
	opened := func(m *machine) (device blockdev.Device) {
		w.claimFor(v.ID, m.name)
		w.eventually("its node knows of the claim", func() (is bool) {
			var err error
			device, err = m.uses.OpenLeg(w.ctx, v.ID)
			return err == nil
		})
		return device
	}
	device := opened(b)
	whole := blockdev.Extent{Length: 16 * mib}
	if have, err := b.uses.Marks(w.ctx, v.ID, volume.NoEra); err != nil || len(have) != 1 || have[0] != whole {
		t.Errorf("since what is not known there was written %v, %v, want all", have, err)
	}
	if have, err := b.uses.Marks(w.ctx, v.ID, 0); err != nil || len(have) != 0 {
		t.Errorf("there is data at %v, %v, and nobody wrote", have, err)
	}
	_, err := b.uses.BeginEra(w.ctx, v.ID)
	fails(t, err, errdefs.ErrUnsupported)
	f, err := os.OpenFile(device.Path, os.O_WRONLY, 0)
	check.OK(t, err)
	_, err = f.WriteAt(bytes.Repeat([]byte("x"), 4096), 5*mib)
	check.OK(t, errors.Join(err, f.Sync(), f.Close()))
	holds := func(have []blockdev.Extent) bool {
		return len(have) == 1 && have[0].Offset <= 5*mib && have[0].Offset+have[0].Length >= 5*mib+4096 && have[0].Length <= mib
	}
	if have, err := b.uses.Marks(w.ctx, v.ID, 0); err != nil || !holds(have) {
		t.Errorf("there is data at %v, %v, and some was written at 5 MiB", have, err)
	}
	check.OK(t, errors.Join(device.Close(), b.uses.CloseLeg(w.ctx, v.ID)))
	device = opened(a)
	if have, err := a.uses.Marks(w.ctx, v.ID, 0); err != nil || !holds(have) {
		t.Errorf("at home there is data at %v, %v, and some was written at 5 MiB", have, err)
	}
	check.OK(t, errors.Join(device.Close(), a.uses.CloseLeg(w.ctx, v.ID)))
	w.claimFor(v.ID, "")
}

// answering is a connection to an agent whose answer is always the same.
type answering struct {
	grpc.ClientConnInterface
	text string
	err  error
}

func (a answering) Invoke(_ context.Context, _ string, _, reply any, _ ...grpc.CallOption) error {
	reply.(*wrapperspb.BytesValue).Value = []byte(a.text)
	return a.err
}

// TestMarksOfOlderHomes: a home of a version without marks is told apart from one that does not answer, and impossible answers are refused.
func TestMarksOfOlderHomes(t *testing.T) {
	for what, home := range map[string]struct {
		answering
		marks, era error
	}{
		"older":        {answering{err: errdefs.ErrUnknownCall}, errdefs.ErrUnsupported, errdefs.ErrUnsupported},
		"away":         {answering{err: errdefs.ErrUnavailable}, errdefs.ErrUnavailable, errdefs.ErrUnavailable},
		"keeps none":   {answering{text: "{}"}, nil, errdefs.ErrUnsupported},
		"out of range": {answering{text: `{"written":[[-5,4096]],"era":7}`}, errdefs.ErrUnavailable, nil},
		"no length":    {answering{text: `{"written":[[0,0]],"era":7}`}, errdefs.ErrUnavailable, nil},
	} {
		h, id := export.HomeAt(home.answering), volume.ID{Kind: blockdev.Volume, Pool: "default", Key: volume.KeyOf("v")}
		if _, err := h.Marks(t.Context(), id, 1, 0); !is(err, home.marks) {
			t.Errorf("%s: marks: %v, want %v", what, err, home.marks)
		}
		if _, err := h.BeginEra(t.Context(), id, 1); !is(err, home.era) {
			t.Errorf("%s: era: %v, want %v", what, err, home.era)
		}
	}
}

// is reports whether an error is of one kind, and of no other.
func is(err, want error) bool {
	kinds := errdefs.Kinds(err)
	return want == nil && err == nil || len(kinds) == 1 && errors.Is(kinds[0], want)
}

// telling is a home that keeps marks.
type telling struct {
	export.Home
	written []blockdev.Extent
}

func (h telling) Marks(_ context.Context, _ volume.ID, generation int64, since uint32) ([]blockdev.Extent, error) {
	if generation != 3 || since != 1<<20+5 {
		return nil, fmt.Errorf("%w: generation %d, era %d", errdefs.ErrInvalid, generation, since)
	}
	return h.written, nil
}

func (h telling) BeginEra(context.Context, volume.ID, int64) (uint32, error) { return 1<<20 + 6, nil }

// TestMarksTold: the answers of a home about marks arrive as they were sent.
func TestMarksTold(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	check.OK(t, err)
	server, told := grpc.NewServer(), telling{written: []blockdev.Extent{{Offset: 0, Length: mib}, {Offset: 1 << 43, Length: 5 * mib}}}
	export.Register(server, told, nil)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	c, err := grpc.NewClient("passthrough:///"+listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	check.OK(t, err)
	t.Cleanup(func() { check.OK(t, c.Close()) })
	h, id := export.HomeAt(c), volume.ID{Kind: blockdev.Volume, Pool: "default", Key: volume.KeyOf("v")}
	if have, err := h.Marks(t.Context(), id, 3, 1<<20+5); err != nil || !slices.Equal(have, told.written) {
		t.Errorf("%v, %v, want %v", have, err, told.written)
	}
	if era, err := h.BeginEra(t.Context(), id, 3); err != nil || era != 1<<20+6 {
		t.Errorf("era %d, %v", era, err)
	}
}
