// Package storetest is the suite that every volume.Store passes. It tests what the comments of the interface say, as far as one node with two pools can show
// it.
package storetest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// Limit is how many volumes the node of a store may have claimed.
const Limit = 3

// Size is the size of each pool of a store, in bytes.
const Size = 1 << 30

// Fixture is an empty store with one node.
type Fixture struct {
	volume.Store
	Node string
	// Pools of the node, the default one first; at least two.
	Pools []string
	// KnowsAll: the store knows all volumes, so one in a pool that it does not know is ErrNotFound, not ErrUnavailable.
	KnowsAll bool
	// Write writes to a volume of the default pool. nil: volume.Differ is not tested.
	Write func(ctx context.Context, id volume.ID, at int64, data []byte) error
}

// Open makes a fixture, which is cleaned up at the end of the test.
type Open func(t testing.TB) Fixture

// Run runs the suite.
func Run(t *testing.T, open Open) {
	for _, clause := range []struct {
		name string
		test func(f fixture)
	}{
		{"Create", create}, {"CreateDiffers", createDiffers}, {"CreateRefuses", createRefuses}, {"Copies", copies},
		{"Delete", deleted}, {"NotFound", notFound}, {"UnknownPool", unknownPool}, {"List", list}, {"Claim", claim}, {"ClaimLimit", claimLimit},
		{"Expand", expand}, {"Modify", modify}, {"Snapshot", snapshot}, {"Group", group}, {"GroupRefuses", groupRefuses},
		{"Differ", differ}, {"Capacity", capacity}, {"Sets", sets}, {"SetsRefuse", setsRefuse}, {"SetsAtOnce", setsAtOnce}, {"Spread", spread},
		{"SpreadAtOnce", spreadAtOnce}, {"Concurrent", concurrent}, {"Cancelled", cancelled},
	} {
		t.Run(clause.name, func(t *testing.T) {
			store := open(t) // before the context, as it may take long
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
			defer cancel()
			clause.test(fixture{store, t, ctx})
		})
	}
}

type fixture struct {
	Fixture
	t   *testing.T
	ctx context.Context
}

const mib = 1 << 20

func (f fixture) must(err error) {
	f.t.Helper()
	if err != nil {
		f.t.Fatal(err)
	}
}

func (f fixture) fails(err, want error) {
	f.t.Helper()
	if !errors.Is(err, want) {
		f.t.Fatalf("error %v, want %v", err, want)
	}
}

func second[T any](_ T, err error) error { return err }

func sized(name string, size int64) volume.Spec {
	return volume.Spec{Name: name, Size: volume.Range{Required: size}}
}

func (f fixture) create(spec volume.Spec) volume.Volume {
	f.t.Helper()
	v, err := f.Create(f.ctx, spec)
	f.must(err)
	return v
}

func (f fixture) same(have, want volume.Volume) {
	f.t.Helper()
	if have.ID != want.ID || have.Name != want.Name || have.Size != want.Size || have.Thin != want.Thin || have.Source != want.Source ||
		have.Filesystem != want.Filesystem || have.Claim != want.Claim || have.Node != want.Node || have.For != want.For ||
		!have.Created.Truncate(time.Microsecond).Equal(want.Created.Truncate(time.Microsecond)) {
		f.t.Fatalf("have %+v, want %+v", have, want)
	}
}

func create(f fixture) {
	spec := volume.Spec{Name: "a name, with ünicode and spaces", Size: volume.Range{Required: 20*mib + 1, Limit: 21 * mib}, Provisioning: blockdev.Thin,
		Filesystem: "ext4", Mutable: map[string]string{"readAheadKiB": "256"}, Nodes: []string{"elsewhere", f.Node},
		For: volume.Requester{Namespace: "ns", Name: "claim", PersistentVolume: "pvc-1"}}
	v := f.create(spec)
	if v.ID != (volume.ID{Kind: blockdev.Volume, Pool: f.Pools[0], Key: volume.KeyOf(spec.Name)}) || v.Name != spec.Name || v.Size != 20*mib+blockdev.Granularity ||
		!v.Thin || v.Filesystem != "ext4" || v.For != spec.For || v.Mutable["readAheadKiB"] != "256" || v.Node != f.Node || v.Created.IsZero() || v.Claim.Node != "" {
		f.t.Fatalf("created %+v", v)
	}
	f.same(f.create(spec), v)
	have, err := f.Get(f.ctx, v.ID)
	f.must(err)
	f.same(have, v)
	problems, err := f.Health(f.ctx, v.ID)
	f.must(err)
	if len(problems) > 0 {
		f.t.Errorf("problems: %v", problems)
	}
	other := f.create(volume.Spec{Name: "other", Pool: f.Pools[1], Size: volume.Range{Required: mib}})
	if other.ID.Pool != f.Pools[1] {
		f.t.Errorf("created in pool %s", other.ID.Pool)
	}
	if v := f.create(sized("small", 1)); v.Size != blockdev.Granularity {
		f.t.Errorf("%d bytes", v.Size)
	}
}

func createDiffers(f fixture) {
	f.create(volume.Spec{Name: "v", Pool: f.Pools[0], Size: volume.Range{Required: 16 * mib}, Filesystem: "ext4"})
	source := f.create(sized("source", mib))
	for what, change := range map[string]func(*volume.Spec){
		"larger":     func(s *volume.Spec) { s.Size.Required = 17 * mib },
		"smaller":    func(s *volume.Spec) { s.Size = volume.Range{Required: 12 * mib, Limit: 12 * mib} },
		"thin":       func(s *volume.Spec) { s.Provisioning = blockdev.Thin },
		"pool":       func(s *volume.Spec) { s.Pool = f.Pools[1] },
		"filesystem": func(s *volume.Spec) { s.Filesystem = "" },
		"source":     func(s *volume.Spec) { s.Source = source.ID },
	} {
		spec := volume.Spec{Name: "v", Pool: f.Pools[0], Size: volume.Range{Required: 16 * mib}, Filesystem: "ext4"}
		change(&spec)
		if err := second(f.Create(f.ctx, spec)); !errors.Is(err, errdefs.ErrExists) {
			f.t.Errorf("%s: %v", what, err)
		}
	}
}

func createRefuses(f fixture) {
	for _, c := range []struct {
		change func(*volume.Spec)
		want   error
	}{
		{func(s *volume.Spec) { s.Pool = "no-such-pool" }, errdefs.ErrInvalid},
		{func(s *volume.Spec) { s.Mutable = map[string]string{"colour": "red"} }, errdefs.ErrInvalid},
		{func(s *volume.Spec) { s.Size = volume.Range{Required: 2, Limit: 1} }, errdefs.ErrInvalid},
		{func(s *volume.Spec) { s.Size.Required = blockdev.MaxSize + 1 }, errdefs.ErrOutOfRange},
		{func(s *volume.Spec) { s.Size = volume.Range{Required: 1, Limit: 1} }, errdefs.ErrOutOfRange},
		{func(s *volume.Spec) { s.Filesystem, s.Size = "xfs", volume.Range{Limit: mib} }, errdefs.ErrOutOfRange},
		{func(s *volume.Spec) { s.Size.Required = Size + mib }, errdefs.ErrNoSpace},
		{func(s *volume.Spec) { s.Nodes = []string{"elsewhere"} }, errdefs.ErrNoSpace},
		{func(s *volume.Spec) {
			s.Source = volume.ID{Kind: blockdev.Volume, Pool: f.Pools[0], Key: volume.KeyOf("gone")}
		}, errdefs.ErrNotFound},
		{func(s *volume.Spec) {
			s.Source = volume.ID{Kind: blockdev.Snapshot, Pool: f.Pools[0], Key: volume.KeyOf("gone")}
		}, errdefs.ErrNotFound},
	} {
		spec := sized("refused", mib)
		c.change(&spec)
		if err := second(f.Create(f.ctx, spec)); !errors.Is(err, c.want) {
			f.t.Errorf("%+v: error %v, want %v", spec, err, c.want)
		}
		f.fails(second(f.Get(f.ctx, volume.ID{Kind: blockdev.Volume, Pool: f.Pools[0], Key: volume.KeyOf("refused")})), errdefs.ErrNotFound)
	}
	f.create(sized("refused", mib)) // the name is free still
}

func copies(f fixture) {
	source := f.create(volume.Spec{Name: "source", Size: volume.Range{Required: 2 * mib}, Pool: f.Pools[1]})
	s, err := f.CreateSnapshot(f.ctx, "s", source.ID)
	f.must(err)
	for i, id := range []volume.ID{source.ID, s.ID} {
		name := fmt.Sprint("copy-", i)
		v := f.create(volume.Spec{Name: name, Source: id, Size: volume.Range{Required: 1}})
		if v.Source != id || v.Node != f.Node || v.ID.Pool != f.Pools[1] || v.Size < 2*mib {
			f.t.Errorf("copied %+v", v)
		}
		f.same(f.create(volume.Spec{Name: name, Source: id, Size: volume.Range{Required: 1}}), v)
		large := f.create(volume.Spec{Name: name + "-large", Source: id, Size: volume.Range{Required: 4 * mib}})
		if large.Size != 4*mib {
			f.t.Errorf("%d bytes", large.Size)
		}
		f.fails(second(f.Create(f.ctx, volume.Spec{Name: "x", Source: id, Size: volume.Range{Required: mib, Limit: mib}})), errdefs.ErrOutOfRange)
		elsewhere := volume.Spec{Name: name + "-elsewhere", Source: id, Pool: f.Pools[0], Size: volume.Range{Required: 1}}
		other := f.create(elsewhere)
		if other.Source != id || other.ID.Pool != f.Pools[0] || other.Node != f.Node || other.Size < 2*mib {
			f.t.Errorf("copied to another pool %+v", other)
		}
		f.same(f.create(elsewhere), other)
		f.fails(second(f.Create(f.ctx, volume.Spec{Name: "x", Source: id, Pool: "nvme"})), errdefs.ErrInvalid)
		f.fails(second(f.Create(f.ctx, volume.Spec{Name: "x", Source: id, Nodes: []string{"elsewhere"}})), errdefs.ErrNoSpace)
	}
	// A copy has to have the filesystem of its source. What a raw source carries is not known.
	formatted := f.create(volume.Spec{Name: "ext4", Size: volume.Range{Required: 16 * mib}, Filesystem: "ext4"})
	cut, err := f.CreateSnapshot(f.ctx, "of ext4", formatted.ID)
	f.must(err)
	for i, id := range []volume.ID{formatted.ID, cut.ID} {
		for _, other := range []filesystem.Type{"xfs", "btrfs"} {
			f.fails(second(f.Create(f.ctx, volume.Spec{Name: "x", Source: id, Size: volume.Range{Required: 512 * mib}, Filesystem: other})), errdefs.ErrInvalid)
		}
		for _, same := range []filesystem.Type{"ext4", ""} {
			f.create(volume.Spec{Name: fmt.Sprint("copy of ext4 ", i, same), Source: id, Size: volume.Range{Required: 1}, Filesystem: same})
		}
	}
	f.create(volume.Spec{Name: "xfs of raw", Source: source.ID, Size: volume.Range{Required: 512 * mib}, Filesystem: "xfs"})
	// Copies do not need their source.
	f.must(f.Delete(f.ctx, source.ID))
	f.must(f.DeleteSnapshot(f.ctx, s.ID))
	f.must(second(f.Get(f.ctx, volume.ID{Kind: blockdev.Volume, Pool: f.Pools[1], Key: volume.KeyOf("copy-0")})))
}

func deleted(f fixture) {
	v := f.create(sized("v", mib))
	f.must(f.Delete(f.ctx, volume.ID{Kind: blockdev.Volume, Pool: f.Pools[1], Key: v.ID.Key})) // not v, so nothing is deleted
	f.must(f.Delete(f.ctx, volume.ID{Kind: blockdev.Snapshot, Pool: v.ID.Pool, Key: v.ID.Key}))
	f.must(second(f.Claim(f.ctx, v.ID, volume.Claim{Node: f.Node, Mode: "m"})))
	f.fails(f.Delete(f.ctx, v.ID), errdefs.ErrInUse)
	f.must(f.Release(f.ctx, v.ID, f.Node))
	for range 2 {
		f.must(f.Delete(f.ctx, v.ID))
		f.fails(second(f.Get(f.ctx, v.ID)), errdefs.ErrNotFound)
	}
	again := f.create(sized("v", 2*mib))
	if again.Size != 2*mib {
		f.t.Errorf("%d bytes", again.Size)
	}
}

func notFound(f fixture) {
	v := f.create(sized("v", mib))
	s, err := f.CreateSnapshot(f.ctx, "v", v.ID)
	f.must(err)
	for _, id := range []volume.ID{
		{Kind: blockdev.Volume, Pool: f.Pools[0], Key: volume.KeyOf("x")},
		{Kind: blockdev.Volume, Pool: f.Pools[1], Key: v.ID.Key},
		s.ID,
	} {
		f.fails(second(f.Get(f.ctx, id)), errdefs.ErrNotFound)
		f.fails(second(f.Claim(f.ctx, id, volume.Claim{Node: f.Node, Mode: "m"})), errdefs.ErrNotFound)
		f.must(f.Release(f.ctx, id, ""))
		f.fails(second(f.Expand(f.ctx, id, volume.Range{Required: mib})), errdefs.ErrNotFound)
		f.fails(f.Modify(f.ctx, id, map[string]string{"readAheadKiB": "0"}), errdefs.ErrNotFound)
		f.fails(second(f.Health(f.ctx, id)), errdefs.ErrNotFound)
		f.fails(second(f.CreateSnapshot(f.ctx, "x", id)), errdefs.ErrNotFound)
	}
	f.fails(second(f.GetSnapshot(f.ctx, v.ID)), errdefs.ErrNotFound)
	f.must(f.DeleteSnapshot(f.ctx, v.ID))
	f.fails(second(f.GetGroup(f.ctx, volume.GroupID{Key: v.ID.Key})), errdefs.ErrNotFound)
	f.must(f.DeleteGroup(f.ctx, volume.GroupID{Key: v.ID.Key}))
	f.must(second(f.Get(f.ctx, v.ID)))
}

// unknownPool: a volume or snapshot in a pool that the store does not know may exist, so calls return ErrUnavailable; with KnowsAll it does not exist.
func unknownPool(f fixture) {
	v := volume.ID{Kind: blockdev.Volume, Pool: "no-such-pool", Key: volume.KeyOf("v")}
	s := volume.ID{Kind: blockdev.Snapshot, Pool: v.Pool, Key: v.Key}
	for what, err := range map[string]error{
		"get": second(f.Get(f.ctx, v)), "claim": second(f.Claim(f.ctx, v, volume.Claim{Node: f.Node, Mode: "m"})),
		"expand": second(f.Expand(f.ctx, v, volume.Range{Required: mib})), "modify": f.Modify(f.ctx, v, map[string]string{"readAheadKiB": "0"}),
		"health": second(f.Health(f.ctx, v)), "snapshot": second(f.CreateSnapshot(f.ctx, "x", v)), "get snapshot": second(f.GetSnapshot(f.ctx, s)),
		"clone":  second(f.Create(f.ctx, volume.Spec{Name: "x", Pool: f.Pools[0], Source: v})),
		"delete": f.Delete(f.ctx, v), "release": f.Release(f.ctx, v, ""), "delete snapshot": f.DeleteSnapshot(f.ctx, s),
	} {
		undoes := what == "delete" || what == "release" || what == "delete snapshot"
		switch {
		case !f.KnowsAll:
			if !errors.Is(err, errdefs.ErrUnavailable) {
				f.t.Errorf("%s: %v", what, err)
			}
		case undoes && err != nil, !undoes && what != "clone" && !errors.Is(err, errdefs.ErrNotFound), what == "clone" && err == nil:
			f.t.Errorf("%s: %v", what, err)
		}
	}
}

// pages reads a list in pages of up to limit entries, and returns the IDs.
func pages[T any](f fixture, limit int, id func(T) volume.ID, page func(after volume.ID) ([]T, error)) []volume.ID {
	f.t.Helper()
	var ids []volume.ID
	var after volume.ID
	for {
		entries, err := page(after)
		f.must(err)
		if limit > 0 && len(entries) > limit {
			f.t.Fatalf("%d entries, %d are the most", len(entries), limit)
		}
		for _, e := range entries {
			ids = append(ids, id(e))
		}
		if limit == 0 || len(entries) < limit {
			return ids
		}
		after = ids[len(ids)-1]
	}
}

func (f fixture) order(have, want []volume.ID) {
	f.t.Helper()
	slices.SortFunc(want, func(a, b volume.ID) int { return strings.Compare(a.String(), b.String()) })
	if !slices.Equal(have, want) {
		f.t.Fatalf("listed %v, want %v", have, want)
	}
}

func list(f fixture) {
	var volumes, snapshots []volume.ID
	for i := range 5 {
		v := f.create(volume.Spec{Name: fmt.Sprint("v", i), Pool: f.Pools[i%2], Size: volume.Range{Required: mib}})
		s, err := f.CreateSnapshot(f.ctx, fmt.Sprint("s", i), v.ID)
		f.must(err)
		volumes, snapshots = append(volumes, v.ID), append(snapshots, s.ID)
		of, err := f.ListSnapshots(f.ctx, v.ID, volume.ID{}, 0)
		f.must(err)
		if len(of) != 1 || of[0].ID != s.ID {
			f.t.Errorf("of %s: %v", v.ID, of)
		}
	}
	for _, limit := range []int{0, 1, 2, 5, 6} {
		f.order(pages(f, limit, func(v volume.Volume) volume.ID { return v.ID }, func(after volume.ID) ([]volume.Volume, error) {
			return f.List(f.ctx, after, limit)
		}), volumes)
		f.order(pages(f, limit, func(s volume.Snapshot) volume.ID { return s.ID }, func(after volume.ID) ([]volume.Snapshot, error) {
			return f.ListSnapshots(f.ctx, volume.ID{}, after, limit)
		}), snapshots)
	}
}

func claim(f fixture) {
	v := f.create(sized("v", mib))
	c := volume.Claim{Node: f.Node, ReadOnly: true, Mode: "mount,X"}
	f.fails(second(f.Claim(f.ctx, v.ID, volume.Claim{Node: "elsewhere", Mode: "m"})), errdefs.ErrNotFound)
	for range 2 {
		f.must(second(f.Claim(f.ctx, v.ID, c)))
		have, err := f.Get(f.ctx, v.ID)
		f.must(err)
		if have.Claim != c {
			f.t.Fatalf("claim %+v", have.Claim)
		}
	}
	f.fails(second(f.Claim(f.ctx, v.ID, volume.Claim{Node: f.Node, Mode: "mount,X"})), errdefs.ErrExists)
	f.fails(second(f.Claim(f.ctx, v.ID, volume.Claim{Node: f.Node, ReadOnly: true, Mode: "block,X"})), errdefs.ErrExists)
	f.must(f.Release(f.ctx, v.ID, "elsewhere")) // that node has no claim
	if have, err := f.Get(f.ctx, v.ID); err != nil || have.Claim != c {
		f.t.Fatalf("claim %+v, error %v", have.Claim, err)
	}
	for _, node := range []string{f.Node, "", f.Node} {
		f.must(f.Release(f.ctx, v.ID, node))
		if have, err := f.Get(f.ctx, v.ID); err != nil || have.Claim != (volume.Claim{}) {
			f.t.Fatalf("claim %+v, error %v", have.Claim, err)
		}
	}
	f.must(second(f.Claim(f.ctx, v.ID, volume.Claim{Node: f.Node, Mode: "block,X"})))
	f.must(f.Release(f.ctx, v.ID, ""))
}

func claimLimit(f fixture) {
	var volumes []volume.Volume
	for i := range Limit + 1 {
		volumes = append(volumes, f.create(sized(fmt.Sprint("v", i), mib)))
	}
	c := volume.Claim{Node: f.Node, Mode: "m"}
	for _, v := range volumes[:Limit] {
		f.must(second(f.Claim(f.ctx, v.ID, c)))
	}
	f.fails(second(f.Claim(f.ctx, volumes[Limit].ID, c)), errdefs.ErrLimit)
	f.must(second(f.Claim(f.ctx, volumes[0].ID, c))) // the claim is there already
	f.must(f.Release(f.ctx, volumes[0].ID, f.Node))
	f.must(second(f.Claim(f.ctx, volumes[Limit].ID, c)))
}

func expand(f fixture) {
	v := f.create(sized("v", mib))
	for _, c := range []struct {
		size volume.Range
		want int64
		err  error
	}{
		{volume.Range{Required: 2*mib + 1}, 2*mib + blockdev.Granularity, nil},
		{volume.Range{Required: 2*mib + 1}, 2*mib + blockdev.Granularity, nil},
		{volume.Range{Required: mib}, 2*mib + blockdev.Granularity, nil},
		{volume.Range{}, 2*mib + blockdev.Granularity, nil},
		{volume.Range{Required: mib, Limit: mib}, 0, errdefs.ErrOutOfRange},
		{volume.Range{Required: blockdev.MaxSize + 1}, 0, errdefs.ErrOutOfRange},
		{volume.Range{Required: Size + mib}, 0, errdefs.ErrNoSpace},
		{volume.Range{Required: Size + mib}, 0, errdefs.ErrNoSpace},
		{volume.Range{Required: 3 * mib, Limit: 4 * mib}, 3 * mib, nil},
	} {
		grown, err := f.Expand(f.ctx, v.ID, c.size)
		if !errors.Is(err, c.err) || (err == nil && grown.Size != c.want) {
			f.t.Fatalf("%+v: %d bytes, error %v; want %d, %v", c.size, grown.Size, err, c.want, c.err)
		}
	}
	have, err := f.Get(f.ctx, v.ID)
	f.must(err)
	if have.Size != 3*mib || have.ID != v.ID {
		f.t.Errorf("have %+v", have)
	}
	f.must(second(f.Claim(f.ctx, v.ID, volume.Claim{Node: f.Node, Mode: "m"})))
	if grown, err := f.Expand(f.ctx, v.ID, volume.Range{Required: 4 * mib}); err != nil || grown.Size != 4*mib || grown.Claim.Node != f.Node {
		f.t.Errorf("claimed: %+v, %v", grown, err)
	}
}

func modify(f fixture) {
	v := f.create(volume.Spec{Name: "v", Size: volume.Range{Required: mib}, Mutable: map[string]string{"readAheadKiB": "256"}})
	for range 2 {
		f.must(f.Modify(f.ctx, v.ID, map[string]string{"ioScheduler": "none"}))
	}
	f.fails(f.Modify(f.ctx, v.ID, map[string]string{"readAheadKiB": "3"}), errdefs.ErrInvalid)
	f.fails(f.Modify(f.ctx, v.ID, map[string]string{"colour": "red"}), errdefs.ErrInvalid)
	f.must(f.Modify(f.ctx, v.ID, nil))
	have, err := f.Get(f.ctx, v.ID)
	f.must(err)
	if have.Mutable["readAheadKiB"] != "256" || have.Mutable["ioScheduler"] != "none" {
		f.t.Errorf("mutable parameters %v", have.Mutable)
	}
}

func (f fixture) sameSnapshot(have, want volume.Snapshot) {
	f.t.Helper()
	have.Created, want.Created = have.Created.Truncate(time.Microsecond).UTC(), want.Created.Truncate(time.Microsecond).UTC()
	if have != want {
		f.t.Fatalf("have %+v, want %+v", have, want)
	}
}

func snapshot(f fixture) {
	v, w := f.create(sized("v", mib)), f.create(sized("w", mib))
	before := time.Now()
	s, err := f.CreateSnapshot(f.ctx, "s", v.ID)
	f.must(err)
	if s.ID != (volume.ID{Kind: blockdev.Snapshot, Pool: v.ID.Pool, Key: volume.KeyOf("s")}) || s.Name != "s" || s.Source != v.ID || s.Size != mib ||
		s.Node != f.Node || s.Group.Key != "" || s.Created.Before(before.Truncate(time.Microsecond)) || s.Created.After(time.Now()) {
		f.t.Fatalf("cut %+v", s)
	}
	f.fails(second(f.CreateSnapshot(f.ctx, "s", w.ID)), errdefs.ErrExists)
	f.must(f.Delete(f.ctx, v.ID)) // the snapshot does not need its source
	again, err := f.CreateSnapshot(f.ctx, "s", v.ID)
	f.must(err)
	f.sameSnapshot(again, s)
	have, err := f.GetSnapshot(f.ctx, s.ID)
	f.must(err)
	f.sameSnapshot(have, s)
	for range 2 {
		f.must(f.DeleteSnapshot(f.ctx, s.ID))
		f.fails(second(f.GetSnapshot(f.ctx, s.ID)), errdefs.ErrNotFound)
	}
	f.fails(second(f.CreateSnapshot(f.ctx, "s", v.ID)), errdefs.ErrNotFound)
	f.must(second(f.CreateSnapshot(f.ctx, "s", w.ID))) // the name is free again
}

func group(f fixture) {
	v, w := f.create(sized("v", mib)), f.create(volume.Spec{Name: "w", Pool: f.Pools[1], Size: volume.Range{Required: 2 * mib}})
	g, err := f.CreateGroup(f.ctx, "g", []volume.ID{v.ID, w.ID})
	f.must(err)
	if g.ID != (volume.GroupID{Key: volume.KeyOf("g")}) || len(g.Snapshots) != 2 || g.Created.IsZero() {
		f.t.Fatalf("cut %+v", g)
	}
	for _, s := range g.Snapshots {
		if s.Group != g.ID || s.ID.Key != volume.KeyOf("g\x00"+s.Source.String()) || s.ID.Pool != s.Source.Pool || s.Node != f.Node {
			f.t.Errorf("member %+v", s)
		}
		have, err := f.GetSnapshot(f.ctx, s.ID)
		f.must(err)
		f.sameSnapshot(have, s)
		f.fails(f.DeleteSnapshot(f.ctx, s.ID), errdefs.ErrInvalid)
		f.create(volume.Spec{Name: "from " + s.ID.String(), Source: s.ID, Size: volume.Range{Required: 1}})
	}
	again, err := f.CreateGroup(f.ctx, "g", []volume.ID{w.ID, v.ID})
	f.must(err)
	have, err := f.GetGroup(f.ctx, g.ID)
	f.must(err)
	for _, other := range []volume.Group{again, have} {
		if other.ID != g.ID || len(other.Snapshots) != 2 {
			f.t.Fatalf("have %+v", other)
		}
		for i := range g.Snapshots {
			f.sameSnapshot(other.Snapshots[i], g.Snapshots[i])
		}
	}
	f.fails(second(f.CreateGroup(f.ctx, "g", []volume.ID{v.ID})), errdefs.ErrExists)
	all, err := f.ListSnapshots(f.ctx, volume.ID{}, volume.ID{}, 0)
	f.must(err)
	if len(all) != 2 {
		f.t.Errorf("%d snapshots", len(all))
	}
	for range 2 {
		f.must(f.DeleteGroup(f.ctx, g.ID))
		f.fails(second(f.GetGroup(f.ctx, g.ID)), errdefs.ErrNotFound)
		f.fails(second(f.GetSnapshot(f.ctx, g.Snapshots[0].ID)), errdefs.ErrNotFound)
	}
	f.must(second(f.CreateGroup(f.ctx, "g", []volume.ID{v.ID})))
}

func groupRefuses(f fixture) {
	v := f.create(sized("v", mib))
	f.fails(second(f.CreateGroup(f.ctx, "g", nil)), errdefs.ErrInvalid)
	f.fails(second(f.CreateGroup(f.ctx, "g", []volume.ID{v.ID, v.ID})), errdefs.ErrInvalid)
	gone := volume.ID{Kind: blockdev.Volume, Pool: v.ID.Pool, Key: volume.KeyOf("gone")}
	f.fails(second(f.CreateGroup(f.ctx, "g", []volume.ID{v.ID, gone})), errdefs.ErrNotFound)
	large := f.create(sized("large", Size/2))
	f.fails(second(f.CreateGroup(f.ctx, "g", []volume.ID{v.ID, large.ID})), errdefs.ErrNoSpace)
	all, err := f.ListSnapshots(f.ctx, volume.ID{}, volume.ID{}, 0)
	f.must(err)
	if len(all) != 0 {
		f.t.Errorf("left: %v", all)
	}
	f.must(second(f.CreateGroup(f.ctx, "g", []volume.ID{v.ID})))
}

func capacity(f fixture) {
	before, err := f.Capacity(f.ctx, "", volume.NotEncrypted, f.Node)
	f.must(err)
	if before.Available <= 0 || before.Available > before.Total || before.MaxVolume <= 0 || before.MinVolume <= 0 {
		f.t.Errorf("capacity %+v", before)
	}
	f.create(sized("v", 64*mib))
	after, err := f.Capacity(f.ctx, f.Pools[0], volume.NotEncrypted, f.Node)
	f.must(err)
	if after.Available > before.Available-64*mib || after.MaxVolume > before.MaxVolume-64*mib {
		f.t.Errorf("capacity %+v with a volume of 64 MiB, %+v before", after, before)
	}
	elsewhere, err := f.Capacity(f.ctx, "", volume.NotEncrypted, "elsewhere")
	f.must(err)
	if elsewhere.Available != 0 || elsewhere.MaxVolume != 0 {
		f.t.Errorf("elsewhere %+v", elsewhere)
	}
	f.fails(second(f.Capacity(f.ctx, "no-such-pool", volume.NotEncrypted, f.Node)), errdefs.ErrInvalid)
}

// both returns the set of the first two pools.
func (f fixture) both() string { return f.Pools[0] + "," + f.Pools[1] }

// of returns the spec of a volume in a set of pools.
func of(name, set string, size int64) volume.Spec {
	return volume.Spec{Name: name, Pool: set, Size: volume.Range{Required: size}}
}

// sets: a volume that names a set is made in the pool with most room. A repeated Create finds it. A copy is made in the pool of its source. Capacity is that of
// the set's pools together.
func sets(f fixture) {
	whole, err := f.Capacity(f.ctx, f.both(), volume.NotEncrypted, f.Node)
	f.must(err)
	one, err := f.Capacity(f.ctx, f.Pools[0], volume.NotEncrypted, f.Node)
	f.must(err)
	if whole.Available != 2*one.Available || whole.MaxVolume != one.MaxVolume || whole.MinVolume != one.MinVolume {
		f.t.Errorf("both pools have %+v, one has %+v", whole, one)
	}
	f.create(volume.Spec{Name: "first", Pool: f.Pools[0], Size: volume.Range{Required: mib}})
	large := f.create(of("large", "*", Size*6/10))
	if large.ID.Pool != f.Pools[1] {
		f.t.Errorf("in pool %s, which does not have most room", large.ID.Pool)
	}
	again := f.create(of("another", f.both(), Size*6/10))
	if again.ID.Pool != f.Pools[0] {
		f.t.Errorf("in pool %s, which has no room", again.ID.Pool)
	}
	f.same(f.create(of("large", "*", Size*6/10)), large)
	f.same(f.create(of("large", large.ID.Pool, Size*6/10)), large)
	f.fails(second(f.Create(f.ctx, of("third", "*", Size*6/10))), errdefs.ErrNoSpace)
	f.create(of("third", "*", Size*3/10)) // the name is free still
	for _, id := range []volume.ID{large.ID, again.ID} {
		v := f.create(volume.Spec{Name: "copy of " + id.Pool, Pool: "*", Source: f.create(of("source in "+id.Pool, id.Pool, mib)).ID, Size: volume.Range{Required: mib}})
		if v.ID.Pool != id.Pool {
			f.t.Errorf("a copy of what is in %s is in %s", id.Pool, v.ID.Pool)
		}
	}
	left, err := f.Capacity(f.ctx, "*", volume.NotEncrypted, f.Node)
	f.must(err)
	if left.Available <= 0 || left.Available > whole.Available-2*(Size*6/10)-Size*3/10 || left.MaxVolume > Size*4/10 {
		f.t.Errorf("left %+v of %+v", left, whole)
	}
}

func setsRefuse(f fixture) {
	v := f.create(of("v", f.both(), mib))
	other := f.Pools[0]
	if v.ID.Pool == other {
		other = f.Pools[1]
	}
	f.fails(second(f.Create(f.ctx, of("v", other, mib))), errdefs.ErrExists)
	f.fails(second(f.Create(f.ctx, of("x", "no-such-*", mib))), errdefs.ErrInvalid)
	f.fails(second(f.Capacity(f.ctx, "no-such-*,nor-this", volume.NotEncrypted, f.Node)), errdefs.ErrInvalid)
	f.fails(second(f.Create(f.ctx, volume.Spec{Name: "x", Pool: "*", Size: volume.Range{Required: mib}, Nodes: []string{"elsewhere"}})), errdefs.ErrNoSpace)
	f.create(of("x", "*", mib))
}

// setsAtOnce: if more volumes are asked for at once than there is room for, as many are made as fit into all pools.
func setsAtOnce(f fixture) {
	var all sync.WaitGroup
	var mu sync.Mutex
	in := map[string]int{}
	for i := range 8 { // two fit into each pool
		all.Go(func() {
			v, err := f.Create(f.ctx, of(fmt.Sprint("v", i), "*", Size*45/100))
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil:
				in[v.ID.Pool]++
			case !errors.Is(err, errdefs.ErrNoSpace):
				f.t.Errorf("v%d: %v", i, err)
			}
		})
	}
	all.Wait()
	for _, pool := range f.Pools[:2] {
		if in[pool] != 2 {
			f.t.Errorf("in pool %s: %d", pool, in[pool])
		}
	}
	have, err := f.List(f.ctx, volume.ID{}, 0)
	f.must(err)
	if len(have) != 4 {
		f.t.Errorf("%d volumes", len(have))
	}
}

// replica returns the spec of the volume for a claim of a StatefulSet.
func replica(claim string, how volume.Spread, size int64) volume.Spec {
	return volume.Spec{Name: "pvc of " + claim, Pool: "*", Spread: how, Size: volume.Range{Required: size}, For: volume.Requester{Namespace: "ns", Name: claim}}
}

// spread: the volumes of one StatefulSet are made in different pools as long as there are any left. Then SpreadRequired is ErrNoSpace, and SpreadPreferred
// takes the pool with the fewest.
func spread(f fixture) {
	f.create(of("large", f.Pools[0], Size/2)) // from now on the other pool has most room
	if v := f.create(replica("data-web-0", volume.NoSpread, mib)); v.ID.Pool != f.Pools[1] {
		f.t.Errorf("data-web-0 is in %s", v.ID.Pool)
	}
	for _, claim := range []string{"data-other-1", "data-web", "wal-web-1", "data-web-0-1"} { // not peers of data-web-0
		if v := f.create(replica(claim, volume.SpreadRequired, mib)); v.ID.Pool != f.Pools[1] {
			f.t.Errorf("%s is in %s", claim, v.ID.Pool)
		}
	}
	if v := f.create(replica("data-web-1", volume.SpreadRequired, mib)); v.ID.Pool != f.Pools[0] {
		f.t.Errorf("data-web-1 is in %s", v.ID.Pool)
	}
	f.fails(second(f.Create(f.ctx, replica("data-web-2", volume.SpreadRequired, mib))), errdefs.ErrNoSpace)
	if v := f.create(replica("data-web-2", volume.SpreadPreferred, mib)); v.ID.Pool != f.Pools[1] {
		f.t.Errorf("data-web-2 is in %s", v.ID.Pool)
	}
	v := f.create(replica("data-web-3", volume.SpreadPreferred, mib)) // the pool with fewer peers
	if v.ID.Pool != f.Pools[0] {
		f.t.Errorf("data-web-3 is in %s", v.ID.Pool)
	}
	f.same(f.create(replica("data-web-3", volume.SpreadRequired, mib)), v)                                // it is there already
	if v := f.create(replica("data-web-4", volume.SpreadPreferred, Size*7/10)); v.ID.Pool != f.Pools[1] { // room counts more than peers
		f.t.Errorf("data-web-4 is in %s", v.ID.Pool)
	}
}

// spreadAtOnce: SpreadRequired holds also for volumes that are asked for at once, as those of StatefulSets with podManagementPolicy Parallel.
func spreadAtOnce(f fixture) {
	var all sync.WaitGroup
	var pools [16][2]string
	for set := range pools {
		for i := range pools[set] {
			all.Go(func() {
				v, err := f.Create(f.ctx, replica(fmt.Sprintf("data-set%d-%d", set, i), volume.SpreadRequired, mib))
				if err != nil {
					f.t.Error(err)
				}
				pools[set][i] = v.ID.Pool
			})
		}
	}
	all.Wait()
	for set, in := range pools {
		if in[0] == in[1] {
			f.t.Errorf("both of set %d are in %s", set, in[0])
		}
	}
}

func concurrent(f fixture) {
	var all sync.WaitGroup
	for i := range 24 {
		all.Go(func() {
			name := fmt.Sprint("v", i)
			v, err := f.Create(f.ctx, sized(name, mib))
			if err == nil {
				_, err = f.CreateSnapshot(f.ctx, name, v.ID)
			}
			if err == nil {
				_, err = f.Expand(f.ctx, v.ID, volume.Range{Required: 2 * mib})
			}
			if err == nil {
				err = f.Delete(f.ctx, v.ID)
			}
			if err == nil {
				err = f.DeleteSnapshot(f.ctx, volume.ID{Kind: blockdev.Snapshot, Pool: v.ID.Pool, Key: v.ID.Key})
			}
			if err != nil {
				f.t.Errorf("%s: %v", name, err)
			}
		})
	}
	all.Wait()
	left, err := f.List(f.ctx, volume.ID{}, 0)
	if err != nil || len(left) != 0 {
		f.t.Errorf("left: %v, error %v", left, err)
	}
}

func cancelled(f fixture) {
	ctx, cancel := context.WithCancel(f.ctx)
	cancel()
	v, err := f.Create(ctx, sized("v", mib))
	if err == nil {
		f.must(f.Delete(f.ctx, v.ID)) // a store may notice the end of its context too late
	} else if !errors.Is(err, context.Canceled) {
		f.t.Errorf("error %v", err)
	}
	f.create(sized("v", mib))
}
