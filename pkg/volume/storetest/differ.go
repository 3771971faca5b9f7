package storetest

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"slices"
	"strings"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// WriteTo returns a function for Fixture.Write that writes to the volumes of a pool.
func WriteTo(pool blockdev.Pool) func(ctx context.Context, id volume.ID, at int64, data []byte) error {
	return func(ctx context.Context, id volume.ID, at int64, data []byte) error {
		ref := blockdev.Ref{Kind: id.Kind, Key: id.Key}
		device, err := pool.Attach(ctx, ref, blockdev.Attachment{})
		if err != nil {
			return err
		}
		file, err := os.OpenFile(device.Path, os.O_WRONLY|os.O_SYNC, 0)
		if err == nil {
			_, err = file.WriteAt(data, at)
			err = errors.Join(err, file.Close())
		}
		return errors.Join(err, device.Close(), pool.Detach(ctx, ref))
	}
}

const (
	blocks  = 64       // that a volume of differ has
	blockOf = 64 << 10 // bytes of a block
)

// ranges returns the ranges that a call lists, and makes sure that they are in order, end after from, and are within the volume.
func (f fixture) ranges(from int64, list func(yield func(blockdev.Extent) error) error) []blockdev.Extent {
	f.t.Helper()
	var have []blockdev.Extent
	f.must(list(func(e blockdev.Extent) error { have = append(have, e); return nil }))
	end := int64(0)
	for _, e := range have {
		if e.Length <= 0 || e.Offset < end || e.Offset+e.Length <= from || e.Offset+e.Length > blocks*blockOf {
			f.t.Fatalf("from byte %d: %v are not in order and within bounds", from, have)
		}
		end = e.Offset + e.Length
	}
	return have
}

// covered makes sure that some ranges have all bytes after from of the blocks that are wanted, and not much more than those blocks.
func (f fixture) covered(what string, have []blockdev.Extent, want []int, from int64) {
	f.t.Helper()
	total := int64(0)
	for _, e := range have {
		total += e.Length
	}
	for _, n := range want {
		at := max(int64(n)*blockOf, from)
		end := int64(n+1) * blockOf
		if at < end && !slices.ContainsFunc(have, func(e blockdev.Extent) bool { return e.Offset <= at && e.Offset+e.Length >= end }) {
			f.t.Errorf("%s, from byte %d: block %d is not in %v", what, from, n, have)
		}
	}
	if total > int64(len(want)+1)*blockOf {
		f.t.Errorf("%s, from byte %d: %d bytes for %d blocks: %v", what, from, total, len(want), have)
	}
}

// differ tests what the comments of volume.Differ say, if the store is one.
func differ(f fixture) {
	store, ok := f.Store.(volume.Differ)
	if !ok || f.Write == nil {
		f.t.Skip("the store is no Differ")
	}
	random := rand.New(rand.NewPCG(1, 2))
	write := func(id volume.ID, block int) {
		f.t.Helper()
		data := make([]byte, blockOf)
		for i := range data {
			data[i] = byte(random.Uint32() | 1)
		}
		f.must(f.Write(f.ctx, id, int64(block)*blockOf, data))
	}
	v := f.create(sized("v", blocks*blockOf))
	for _, n := range []int{0, 1, 7, 20, 63} {
		write(v.ID, n)
	}
	one, err := f.CreateSnapshot(f.ctx, "one", v.ID)
	f.must(err)
	for _, n := range []int{1, 20, 21, 40} {
		write(v.ID, n)
	}
	two, err := f.CreateSnapshot(f.ctx, "two", v.ID)
	f.must(err)
	for _, from := range []int64{0, 1, blockOf, 7*blockOf + 1, 21 * blockOf, blocks * blockOf} {
		left := func(all ...int) []int {
			return slices.DeleteFunc(all, func(n int) bool { return int64(n+1)*blockOf <= from })
		}
		f.covered("allocated", f.ranges(from, func(yield func(blockdev.Extent) error) error { return store.Allocated(f.ctx, one.ID, from, yield) }), left(0, 1, 7, 20, 63), from)
		f.covered("changed", f.ranges(from, func(yield func(blockdev.Extent) error) error {
			return store.Changed(f.ctx, one.ID, two.ID, from, yield)
		}), left(1, 20, 21, 40), from)
	}
	if have := f.ranges(0, func(yield func(blockdev.Extent) error) error { return store.Changed(f.ctx, one.ID, one.ID, 0, yield) }); len(have) > 0 {
		f.t.Errorf("a snapshot differs from itself: %v", have)
	}

	enough := errors.New("enough")
	calls := 0
	f.fails(store.Changed(f.ctx, one.ID, two.ID, 0, func(blockdev.Extent) error { calls++; return enough }), enough)
	if calls != 1 {
		f.t.Errorf("yield was called %d times after its error", calls-1)
	}
	gone, cancel := context.WithCancel(f.ctx)
	cancel()
	if store.Allocated(gone, one.ID, 0, func(blockdev.Extent) error { return nil }) == nil {
		f.t.Error("what was cancelled went on")
	}

	nothing := func(blockdev.Extent) error { return nil }
	other := f.create(sized("other", blocks*blockOf))
	foreign, err := f.CreateSnapshot(f.ctx, "foreign", other.ID)
	f.must(err)
	unknown := volume.ID{Kind: blockdev.Snapshot, Pool: f.Pools[0], Key: volume.KeyOf("none")}
	f.fails(store.Allocated(f.ctx, unknown, 0, nothing), errdefs.ErrNotFound)
	f.fails(store.Allocated(f.ctx, v.ID, 0, nothing), errdefs.ErrNotFound)
	f.fails(store.Changed(f.ctx, unknown, two.ID, 0, nothing), errdefs.ErrNotFound)
	f.fails(store.Changed(f.ctx, one.ID, unknown, 0, nothing), errdefs.ErrNotFound)
	f.fails(store.Changed(f.ctx, two.ID, one.ID, 0, nothing), errdefs.ErrInvalid)
	// Who may see one snapshot is told nothing of those of other volumes: not even that they are there.
	none, others := store.Changed(f.ctx, unknown, two.ID, 0, nothing), store.Changed(f.ctx, foreign.ID, two.ID, 0, nothing)
	f.fails(others, errdefs.ErrNotFound)
	if want := strings.ReplaceAll(none.Error(), unknown.String(), foreign.ID.String()); others.Error() != want {
		f.t.Errorf("with a base of another volume: %q, want %q as with one that is not there", others, want)
	}
	f.must(f.DeleteSnapshot(f.ctx, one.ID))
	f.fails(store.Changed(f.ctx, one.ID, two.ID, 0, nothing), errdefs.ErrNotFound)
}
