package volume_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

const (
	node = "node-1"
	mib  = 1 << 20
)

// failing lets operations of a pool fail with errBroken: each that is in the map, from its nth call on.
type failing map[string]int

var errBroken = errors.New("broken")

func (f failing) hook(operation string, _ blockdev.Ref) error {
	if n, known := f[operation]; known {
		if n <= 1 {
			return errBroken
		}
		f[operation] = n - 1
	}
	return nil
}

// start starts a store over pools. A second call with pools on the same disks is a restart.
func start(t testing.TB, limit int64, pools ...blockdev.Pool) *volume.Local {
	t.Helper()
	mounts, err := mount.LoadTable()
	check.OK(t, err)
	l, err := volume.NewLocal(t.Context(), node, pools, mounts, limit)
	check.OK(t, err)
	return l
}

// one starts a store over one new pool, whose operations fail as failing says.
func one(t *testing.T) (*volume.Local, *memory.Disk, failing) {
	t.Helper()
	disk, broken := memory.NewDisk(8<<30), failing{}
	return start(t, 0, disk.Open("default", broken.hook)), disk, broken
}

func fails(t testing.TB, err, want error, what string) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("%s: error %v, want %v", what, err, want)
	}
}

func create(t testing.TB, l *volume.Local, name string) volume.Volume {
	t.Helper()
	v, err := l.Create(t.Context(), volume.Spec{Name: name, Size: volume.Range{Required: mib}})
	check.OK(t, err)
	return v
}

func second[T any](_ T, err error) error { return err }

func TestChoose(t *testing.T) {
	const block, most = blockdev.Granularity, blockdev.MaxSize
	for _, c := range []struct {
		in    volume.Range
		floor int64
		want  int64
		err   error
	}{
		{volume.Range{}, block, volume.DefaultSize, nil},
		{volume.Range{}, 2 * volume.DefaultSize, 2 * volume.DefaultSize, nil},
		{volume.Range{Limit: mib}, block, mib, nil},
		{volume.Range{Limit: mib + 1}, block, mib, nil},
		{volume.Range{Limit: 2 * volume.DefaultSize}, block, volume.DefaultSize, nil},
		{volume.Range{Limit: mib}, 2 * mib, 0, errdefs.ErrOutOfRange},
		{volume.Range{Limit: block - 1}, block, 0, errdefs.ErrOutOfRange},
		{volume.Range{Required: 1}, block, block, nil},
		{volume.Range{Required: mib}, block, mib, nil},
		{volume.Range{Required: mib + 1}, block, mib + block, nil},
		{volume.Range{Required: mib}, 8 * mib, 8 * mib, nil},
		{volume.Range{Required: mib}, 8*mib + 1, 8*mib + block, nil},
		{volume.Range{Required: mib, Limit: mib}, block, mib, nil},
		{volume.Range{Required: mib + 1, Limit: mib + 2}, block, 0, errdefs.ErrOutOfRange},
		{volume.Range{Required: mib, Limit: 2 * mib}, 3 * mib, 0, errdefs.ErrOutOfRange},
		{volume.Range{Required: most}, block, most, nil},
		{volume.Range{Required: most + 1}, block, 0, errdefs.ErrOutOfRange},
		{volume.Range{Required: 1<<63 - 1}, block, 0, errdefs.ErrOutOfRange},
		{volume.Range{Required: 2, Limit: 1}, block, 0, errdefs.ErrInvalid},
		{volume.Range{Required: -1}, block, 0, errdefs.ErrInvalid},
		{volume.Range{Limit: -1}, block, 0, errdefs.ErrInvalid},
	} {
		if have, err := c.in.Choose(c.floor, block, 0); have != c.want || !errors.Is(err, c.err) {
			t.Errorf("%+v from %d on: %d, %v; want %d, %v", c.in, c.floor, have, err, c.want, c.err)
		}
	}
	// in steps of 4 MiB
	for _, c := range []struct {
		in   volume.Range
		want int64
		err  error
	}{
		{volume.Range{Required: 10 * mib}, 12 * mib, nil},
		{volume.Range{Required: 10 * mib, Limit: 11 * mib}, 0, errdefs.ErrOutOfRange},
		{volume.Range{Limit: 11 * mib}, 8 * mib, nil},
		{volume.Range{Required: most}, 0, errdefs.ErrOutOfRange},
	} {
		if have, err := c.in.Choose(block, 4*mib, 0); have != c.want || !errors.Is(err, c.err) {
			t.Errorf("%+v in steps of 4 MiB: %d, %v; want %d, %v", c.in, have, err, c.want, c.err)
		}
	}
}

func TestCheckMutable(t *testing.T) {
	for _, c := range []struct {
		key, value string
		good       bool
	}{
		{"readAheadKiB", "0", true}, {"readAheadKiB", "128", true}, {"readAheadKiB", "65536", true}, {"ioScheduler", "none", true}, {"ioScheduler", "bfq", true},
		{"readAheadKiB", "", false}, {"readAheadKiB", "-4", false}, {"readAheadKiB", "6", false}, {"readAheadKiB", "65540", false}, {"readAheadKiB", "0128", false},
		{"readAheadKiB", "+4", false}, {"readAheadKiB", "4k", false}, {"ioScheduler", "", false}, {"ioScheduler", "cfq", false}, {"ioScheduler", "../x", false},
		{"readaheadkib", "4", false}, {"", "", false},
	} {
		if err := volume.CheckMutable(map[string]string{c.key: c.value}); (err == nil) != c.good || (err != nil && !errors.Is(err, errdefs.ErrInvalid)) {
			t.Errorf("%s=%s: %v, want it good: %v", c.key, c.value, err, c.good)
		}
	}
}

func TestKeyOf(t *testing.T) {
	if key := volume.KeyOf("test"); key != "9f86d081884c7d659a2feaa0c55ad015" {
		t.Errorf("the key of an existing volume would be %s now", key)
	}
	long := strings.Repeat("x", 128)
	if volume.KeyOf("PVC") == volume.KeyOf("pvc") || volume.KeyOf(long+"1") == volume.KeyOf(long+"2") {
		t.Error("different names have one key")
	}
}

// TestCreateAgain: a repeated Create returns the volume. One with the same name and another spec is refused, and changes nothing.
func TestCreateAgain(t *testing.T) {
	disk := memory.NewDisk(8 << 30)
	l := start(t, 0, disk.Open("default", nil), memory.NewDisk(8<<30).Open("other", nil))
	source := create(t, l, "source")
	spec := volume.Spec{Name: "a", Size: volume.Range{Required: 16 * mib, Limit: 32 * mib}, Provisioning: blockdev.Thin, Source: source.ID, Filesystem: filesystem.Ext4,
		Mutable: map[string]string{"readAheadKiB": "64"}, Nodes: []string{"node-0", node}, Ephemeral: filepath.Join(t.TempDir(), "mount")}
	made, err := l.Create(t.Context(), spec)
	check.OK(t, err)
	if made.Name != "a" || made.Size != 16*mib || !made.Thin || made.Source != source.ID || made.Filesystem != filesystem.Ext4 || made.Node != node ||
		made.Ephemeral != spec.Ephemeral || !maps.Equal(made.Mutable, spec.Mutable) || made.ID.Pool != "default" || made.Format != (volume.Format{}) || made.Claim != (volume.Claim{}) {
		t.Errorf("made %+v of %+v", made, spec)
	}
	for name, c := range map[string]struct {
		change func(s *volume.Spec)
		want   error
	}{
		"same":              {func(*volume.Spec) {}, nil},
		"pool named":        {func(s *volume.Spec) { s.Pool = "default" }, nil},
		"range around it":   {func(s *volume.Spec) { s.Size = volume.Range{Required: 1, Limit: 16 * mib} }, nil},
		"any size":          {func(s *volume.Spec) { s.Size = volume.Range{} }, nil},
		"other pool":        {func(s *volume.Spec) { s.Pool = "other" }, errdefs.ErrExists},
		"larger":            {func(s *volume.Spec) { s.Size.Required++ }, errdefs.ErrExists},
		"smaller":           {func(s *volume.Spec) { s.Size = volume.Range{Limit: 16*mib - 1} }, errdefs.ErrExists},
		"thick":             {func(s *volume.Spec) { s.Provisioning = blockdev.Thick }, errdefs.ErrExists},
		"no source":         {func(s *volume.Spec) { s.Source = volume.ID{} }, errdefs.ErrExists},
		"other source":      {func(s *volume.Spec) { s.Source.Key = volume.KeyOf("other") }, errdefs.ErrExists},
		"snapshot":          {func(s *volume.Spec) { s.Source.Kind = blockdev.Snapshot }, errdefs.ErrExists},
		"other filesystem":  {func(s *volume.Spec) { s.Filesystem = filesystem.XFS }, errdefs.ErrExists},
		"raw":               {func(s *volume.Spec) { s.Filesystem = "" }, errdefs.ErrExists},
		"not ephemeral":     {func(s *volume.Spec) { s.Ephemeral = "" }, errdefs.ErrExists},
		"other pod":         {func(s *volume.Spec) { s.Ephemeral += "2" }, errdefs.ErrExists},
		"other node":        {func(s *volume.Spec) { s.Nodes = []string{"node-2"} }, errdefs.ErrNoSpace},
		"mutable parameter": {func(s *volume.Spec) { s.Mutable = map[string]string{"x": "y"} }, errdefs.ErrInvalid},
	} {
		again := spec
		c.change(&again)
		v, err := l.Create(t.Context(), again)
		if !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		} else if err == nil && v.ID != made.ID {
			t.Errorf("%s: %s, want %s", name, v.ID, made.ID)
		}
	}
	if all, err := l.List(t.Context(), volume.ID{}, 0); err != nil || len(all) != 2 {
		t.Errorf("after all: %v, %v", all, err)
	}
}

func TestCreateRefuses(t *testing.T) {
	l := start(t, 0, memory.NewDisk(1<<30).Open("default", nil), memory.NewDisk(1<<30).Open("other", nil))
	source := create(t, l, "source")
	for name, c := range map[string]struct {
		spec volume.Spec
		want error
	}{
		"unknown pool":        {volume.Spec{Pool: "nvme"}, errdefs.ErrInvalid},
		"source is gone":      {volume.Spec{Source: volume.ID{Kind: blockdev.Snapshot, Pool: "default", Key: volume.KeyOf("x")}}, errdefs.ErrNotFound},
		"smaller than source": {volume.Spec{Source: source.ID, Size: volume.Range{Limit: mib / 2}}, errdefs.ErrOutOfRange},
		"too small for XFS":   {volume.Spec{Filesystem: filesystem.XFS, Size: volume.Range{Limit: 200 * mib}}, errdefs.ErrOutOfRange},
		"too large for now":   {volume.Spec{Size: volume.Range{Required: 1 << 31}}, errdefs.ErrNoSpace},
		"too large for ever":  {volume.Spec{Size: volume.Range{Required: 1 << 60}}, errdefs.ErrOutOfRange},
		"elsewhere":           {volume.Spec{Nodes: []string{"node-2"}}, errdefs.ErrNoSpace},
	} {
		c.spec.Name = "a"
		if c.spec.Size == (volume.Range{}) {
			c.spec.Size.Required = mib
		}
		_, err := l.Create(t.Context(), c.spec)
		fails(t, err, c.want, name)
	}
	if all, err := l.List(t.Context(), volume.ID{}, 0); err != nil || len(all) != 1 {
		t.Errorf("after refusals: %v, %v", all, err)
	}
}

// TestSizes: a volume is large enough for its filesystem and its source.
func TestSizes(t *testing.T) {
	l, _, _ := one(t)
	for _, c := range []struct {
		fs   filesystem.Type
		want int64
	}{{"", blockdev.Granularity}, {filesystem.Ext4, filesystem.Ext4.MinSize()}, {filesystem.XFS, filesystem.XFS.MinSize()}, {filesystem.Btrfs, filesystem.Btrfs.MinSize()}} {
		v, err := l.Create(t.Context(), volume.Spec{Name: "v" + string(c.fs), Filesystem: c.fs, Size: volume.Range{Required: 1}})
		if err != nil || v.Size != c.want {
			t.Errorf("%q: %d bytes, %v; want %d", c.fs, v.Size, err, c.want)
		}
	}
	source, err := l.Create(t.Context(), volume.Spec{Name: "source", Size: volume.Range{Required: 50 * mib}})
	check.OK(t, err)
	if v, err := l.Create(t.Context(), volume.Spec{Name: "clone", Source: source.ID, Size: volume.Range{Required: 1}}); err != nil || v.Size != 50*mib {
		t.Errorf("clone: %d bytes, %v", v.Size, err)
	}
}

// TestFormatIsCopied: a copy has the format of its source; that of a snapshot is the one from when it was made.
func TestFormatIsCopied(t *testing.T) {
	l, _, _ := one(t)
	for _, format := range []volume.Format{{State: volume.Formatted, Type: filesystem.XFS}, {State: volume.Formatting, Type: filesystem.Ext4}, {State: volume.Raw}, {}} {
		word := string(format.State) + string(format.Type)
		v := create(t, l, "source"+word)
		check.OK(t, l.SetFormat(t.Context(), v.ID, format))
		s, err := l.CreateSnapshot(t.Context(), "snapshot"+word, v.ID)
		check.OK(t, err)
		check.OK(t, l.SetFormat(t.Context(), v.ID, volume.Format{}))
		for _, source := range []volume.ID{s.ID, v.ID} {
			want := format
			if source == v.ID {
				want = volume.Format{}
			}
			copied, err := l.Create(t.Context(), volume.Spec{Name: "copy of " + source.String(), Source: source, Size: volume.Range{Required: mib}})
			if err != nil || copied.Format != want {
				t.Errorf("copy of %s: %+v, %v; want %+v", source, copied.Format, err, want)
			}
		}
	}
}

func TestClaim(t *testing.T) {
	disk := memory.NewDisk(1 << 30)
	broken := failing{}
	l := start(t, 2, disk.Open("default", broken.hook))
	var ids []volume.ID
	for i := range 4 {
		ids = append(ids, create(t, l, fmt.Sprint(i)).ID)
	}
	claim := volume.Claim{Node: node, Mode: "mount,SINGLE_NODE_WRITER"}
	claimed := func(id volume.ID, want volume.Claim) {
		t.Helper()
		if v, err := l.Get(t.Context(), id); err != nil || v.Claim != want {
			t.Fatalf("%s: claim %+v, %v; want %+v", id, v.Claim, err, want)
		}
	}
	for range 2 {
		check.OK(t, second(l.Claim(t.Context(), ids[0], claim)))
		claimed(ids[0], claim)
	}
	readOnly, block := claim, claim
	readOnly.ReadOnly, block.Mode = true, "block,SINGLE_NODE_WRITER"
	for _, other := range []volume.Claim{readOnly, block} {
		fails(t, second(l.Claim(t.Context(), ids[0], other)), errdefs.ErrExists, "another claim of the same node")
	}
	fails(t, second(l.Claim(t.Context(), ids[1], volume.Claim{Node: "node-2"})), errdefs.ErrNotFound, "claim of another node")
	fails(t, second(l.Claim(t.Context(), volume.ID{Kind: blockdev.Volume, Pool: "default", Key: volume.KeyOf("x")}, claim)), errdefs.ErrNotFound, "claim of nothing")
	claimed(ids[0], claim)
	fails(t, l.Delete(t.Context(), ids[0]), errdefs.ErrInUse, "Delete of what is claimed")

	// A claim that could not be recorded does not count.
	broken["SetLabels"] = 1
	for range 3 {
		fails(t, second(l.Claim(t.Context(), ids[1], readOnly)), errBroken, "claim that cannot be written")
	}
	delete(broken, "SetLabels")
	check.OK(t, second(l.Claim(t.Context(), ids[1], readOnly)))
	claimed(ids[1], readOnly)
	fails(t, second(l.Claim(t.Context(), ids[2], claim)), errdefs.ErrLimit, "one more than the limit")
	check.OK(t, second(l.Claim(t.Context(), ids[0], claim))) // the claim is there already

	// A restart counts the claims in the records.
	l = start(t, 2, disk.Open("default", broken.hook))
	fails(t, second(l.Claim(t.Context(), ids[2], claim)), errdefs.ErrLimit, "one more than the limit, after a restart")
	check.OK(t, l.Release(t.Context(), ids[1], "node-2")) // not its claim
	claimed(ids[1], readOnly)
	for range 3 { // a repeated release does not count twice
		check.OK(t, l.Release(t.Context(), ids[1], node))
		claimed(ids[1], volume.Claim{})
	}
	check.OK(t, second(l.Claim(t.Context(), ids[2], claim)))
	fails(t, second(l.Claim(t.Context(), ids[3], claim)), errdefs.ErrLimit, "one more than the limit, after releases")
	check.OK(t, l.Release(t.Context(), ids[0], "")) // the claim of any node
	check.OK(t, l.Release(t.Context(), volume.ID{Kind: blockdev.Volume, Pool: "default", Key: volume.KeyOf("x")}, node))
	check.OK(t, l.Delete(t.Context(), ids[0]))
	check.OK(t, second(l.Claim(t.Context(), ids[3], claim)))

	// The record has the claim of another node, as in a pool whose disk came from there.
	_, err := disk.Open("default", nil).SetLabels(t.Context(), blockdev.Ref{Kind: blockdev.Volume, Key: ids[1].Key}, func(labels map[string]string) error {
		labels["claim.node"] = "node-0"
		return nil
	})
	check.OK(t, err)
	fails(t, second(l.Claim(t.Context(), ids[1], claim)), errdefs.ErrInUse, "claim of what another node has")
}

// listed returns the snapshots of a store.
func listed(t testing.TB, l *volume.Local) []volume.Snapshot {
	t.Helper()
	all, err := l.ListSnapshots(t.Context(), volume.ID{}, volume.ID{}, 0)
	check.OK(t, err)
	return all
}

func snapshots(t testing.TB, l *volume.Local) (names []string) {
	t.Helper()
	for _, s := range listed(t, l) {
		names = append(names, s.Name)
	}
	return names
}

func TestGroup(t *testing.T) {
	l, disk, _ := one(t)
	a, b, c := create(t, l, "a").ID, create(t, l, "b").ID, create(t, l, "c").ID
	made, err := l.CreateGroup(t.Context(), "g", []volume.ID{b, a})
	check.OK(t, err)
	for _, sources := range [][]volume.ID{{a, b}, {b, a}} {
		again, err := l.CreateGroup(t.Context(), "g", sources)
		if err != nil || !slices.Equal(again.Snapshots, made.Snapshots) || again.ID != made.ID || !again.Created.Equal(made.Created) {
			t.Errorf("again: %+v, %v; want %+v", again, err, made)
		}
	}
	if len(made.Snapshots) != 2 || made.Created.IsZero() {
		t.Fatalf("group %+v", made)
	}
	for _, s := range made.Snapshots {
		if have, err := l.GetSnapshot(t.Context(), s.ID); err != nil || have != s || s.Group != made.ID || (s.Source != a && s.Source != b) {
			t.Errorf("member %+v, %v; want %+v", have, err, s)
		}
		fails(t, l.DeleteSnapshot(t.Context(), s.ID), errdefs.ErrInvalid, "Delete of a member")
	}
	for what, sources := range map[string][]volume.ID{"fewer": {a}, "more": {a, b, c}, "others": {a, c}} {
		fails(t, second(l.CreateGroup(t.Context(), "g", sources)), errdefs.ErrExists, what)
	}
	for what, sources := range map[string][]volume.ID{"none": nil, "one twice": {a, b, a}} {
		fails(t, second(l.CreateGroup(t.Context(), "h", sources)), errdefs.ErrInvalid, what)
	}
	gone := volume.ID{Kind: blockdev.Volume, Pool: "default", Key: volume.KeyOf("x")}
	fails(t, second(l.CreateGroup(t.Context(), "h", []volume.ID{a, gone})), errdefs.ErrNotFound, "a source that is gone")
	if have := snapshots(t, l); len(have) != 2 {
		t.Errorf("snapshots %q", have)
	}

	l = start(t, 0, disk.Open("default", nil))
	if have, err := l.GetGroup(t.Context(), made.ID); err != nil || !slices.Equal(have.Snapshots, made.Snapshots) {
		t.Errorf("after a restart: %+v, %v", have, err)
	}
	for range 2 {
		check.OK(t, l.DeleteGroup(t.Context(), made.ID))
		fails(t, second(l.GetGroup(t.Context(), made.ID)), errdefs.ErrNotFound, "GetGroup")
	}
	if have := snapshots(t, l); len(have) != 0 {
		t.Errorf("snapshots %q are left", have)
	}
}

// TestGroupAllOrNone: whichever snapshot of a group cannot be made, none stays. Those that cannot be removed are not seen by anybody, and the next start
// removes them.
func TestGroupAllOrNone(t *testing.T) {
	for k := range 3 {
		for _, undone := range []bool{true, false} {
			t.Run(fmt.Sprintf("cut %d fails, undone %v", k+1, undone), func(t *testing.T) {
				l, disk, broken := one(t)
				var sources []volume.ID
				for i := range 3 {
					sources = append(sources, create(t, l, fmt.Sprint(i)).ID)
				}
				broken["Create"] = k + 1
				if !undone {
					broken["Delete"] = 1
				}
				_, err := l.CreateGroup(t.Context(), "g", sources)
				fails(t, err, errBroken, "CreateGroup")
				delete(broken, "Create")
				records, err := disk.Open("default", nil).List(t.Context(), blockdev.Snapshot, "", 0)
				check.OK(t, err)
				if want := map[bool]int{true: 0, false: k}[undone]; len(records) != want {
					t.Fatalf("%d snapshots are in the pool, want %d", len(records), want)
				}
				id := volume.GroupID{Key: volume.KeyOf("g")}
				fails(t, second(l.GetGroup(t.Context(), id)), errdefs.ErrNotFound, "GetGroup")
				if have := snapshots(t, l); len(have) != 0 {
					t.Errorf("snapshots %q are seen", have)
				}
				for _, r := range records {
					hidden := volume.ID{Kind: r.Kind, Pool: "default", Key: r.Key}
					fails(t, second(l.GetSnapshot(t.Context(), hidden)), errdefs.ErrNotFound, "GetSnapshot of a hidden member")
					fails(t, second(l.Create(t.Context(), volume.Spec{Name: "restored", Source: hidden, Size: volume.Range{Required: mib}})), errdefs.ErrNotFound, "restore of a hidden member")
				}
				delete(broken, "Delete")

				restarted := start(t, 0, disk.Open("default", nil))
				if records, err := disk.Open("default", nil).List(t.Context(), blockdev.Snapshot, "", 0); err != nil || len(records) != 0 {
					t.Errorf("after a restart %d snapshots are in the pool, %v", len(records), err)
				}
				// The group can then be made, with a restart and without one.
				for _, store := range []*volume.Local{l, restarted} {
					group, err := store.CreateGroup(t.Context(), "g", sources)
					if err != nil || len(group.Snapshots) != 3 || len(snapshots(t, store)) != 3 {
						t.Errorf("retry: %+v, %v, snapshots %q", group, err, snapshots(t, store))
					}
				}
			})
		}
	}
}

// watched is a pool that records which of its calls came without a deadline. All of its volumes are attached as one device, which is mounted.
type watched struct {
	*memory.Pool
	mounted uint64
	endless map[string]bool // by call: it came without a deadline
}

func (p watched) note(ctx context.Context, what string) {
	_, ends := ctx.Deadline()
	p.endless[what] = p.endless[what] || !ends
}

func (p watched) SetLabels(ctx context.Context, ref blockdev.Ref, change func(map[string]string) error) (blockdev.Record, error) {
	p.note(ctx, "SetLabels")
	return p.Pool.SetLabels(ctx, ref, change)
}

func (p watched) Delete(ctx context.Context, ref blockdev.Ref) error {
	p.note(ctx, "Delete")
	return p.Pool.Delete(ctx, ref)
}

func (p watched) Attached(context.Context, blockdev.Ref) ([]blockdev.Device, error) {
	return []blockdev.Device{{Path: "/dev/no-such-device", Number: p.mounted, Size: mib}}, nil
}

// TestUndoingEnds: what a call undoes after its caller's time is over has a deadline of its own, so that a program that hangs does not block the pool for
// ever.
func TestUndoingEnds(t *testing.T) {
	_, device := mounted(t)
	broken := failing{}
	pool := watched{Pool: memory.NewDisk(8<<30).Open("default", broken.hook), mounted: device, endless: map[string]bool{}}
	l := start(t, 0, pool)
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	var sources []volume.ID
	for i := range 2 {
		v, err := l.Create(ctx, volume.Spec{Name: fmt.Sprint(i), Size: volume.Range{Required: mib}})
		check.OK(t, err)
		sources = append(sources, v.ID)
	}
	_, err := l.CreateSnapshot(ctx, "s", sources[0])
	check.OK(t, err)
	broken["Create"] = 2
	_, err = l.CreateGroup(ctx, "g", sources)
	if err == nil {
		t.Error("CreateGroup succeeded")
	}
	for _, call := range []string{"SetLabels", "Delete"} {
		if endless, called := pool.endless[call]; endless || !called {
			t.Errorf("%s: called %v, without an end %v", call, called, endless)
		}
	}
}

// copying is a pool whose volumes are all mounted. Each copy takes until let is received from. With cuts, the bytes of the origin are fixed before that.
type copying struct {
	watched
	cuts   bool
	let    chan struct{}
	made   atomic.Int32
	during func(blockdev.Spec) // called when a copy begins
}

func (p *copying) Create(ctx context.Context, spec blockdev.Spec) (blockdev.Record, error) {
	if spec.Origin != (blockdev.Ref{}) {
		p.made.Add(1)
		if p.during != nil {
			p.during(spec)
		}
		if p.cuts {
			if err := spec.Cut(ctx); err != nil {
				return blockdev.Record{}, err
			}
		}
		select {
		case <-p.let:
		case <-ctx.Done():
			return blockdev.Record{}, ctx.Err()
		}
	}
	return p.Pool.Create(ctx, spec)
}

// mounted mounts a new ext4, and returns its directory and device number.
func mounted(t *testing.T) (dir string, device uint64) {
	t.Helper()
	drivertest.NeedRoot(t)
	dir, image := t.TempDir(), filepath.Join(t.TempDir(), "image")
	check.OK(t, os.WriteFile(image, nil, 0o600))
	check.OK(t, os.Truncate(image, 8*mib))
	drivertest.Run(t, "mkfs.ext4", "-q", image)
	drivertest.MountLoop(t, image, dir)
	t.Cleanup(func() { drivertest.Unmount(t, dir) })
	var st unix.Stat_t
	check.OK(t, unix.Stat(dir, &st))
	return dir, st.Dev
}

// inUse starts a store over one pool whose volumes are mounted at dir.
func inUse(t *testing.T, cuts bool) (_ *volume.Local, pool *copying, dir string) {
	t.Helper()
	dir, device := mounted(t)
	pool = &copying{watched: watched{Pool: memory.NewDisk(8<<30).Open("default", nil), mounted: device, endless: map[string]bool{}}, cuts: cuts, let: make(chan struct{})}
	return start(t, 0, pool), pool, dir
}

// TestFreezeEnds: a copy that holds back writers for too long fails with ErrPrecondition, and writes go on. A retry soon after that fails at once, without
// holding writers back; a later one tries again.
func TestFreezeEnds(t *testing.T) {
	l, pool, dir := inUse(t, false)
	a := create(t, l, "a").ID
	var beside volume.ID
	copies := map[string]func(source volume.ID) error{
		"snapshot": func(source volume.ID) error { return second(l.CreateSnapshot(t.Context(), "s", source)) },
		"clone": func(source volume.ID) error {
			return second(l.Create(t.Context(), volume.Spec{Name: "c", Size: volume.Range{Required: mib}, Source: source}))
		},
		"group": func(source volume.ID) error {
			return second(l.CreateGroup(t.Context(), "g", []volume.ID{source, beside}))
		},
	}
	for what, copy := range copies {
		var longest time.Duration
		var source volume.ID
		var tries int32
		var err error
		// On a slow machine the time may be over before the copy has begun; then a longer one is tried.
		for _, longest = range []time.Duration{20 * time.Millisecond, 500 * time.Millisecond, 3 * time.Second} {
			l.SetLongestFreeze(longest)
			source, beside = create(t, l, fmt.Sprint("source of ", what, " ", longest)).ID, create(t, l, fmt.Sprint("beside ", what, " ", longest)).ID
			tries = pool.made.Load()
			if err = copy(source); pool.made.Load() > tries {
				break
			}
		}
		fails(t, err, errdefs.ErrPrecondition, what)
		if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: the error %v says that it may go on", what, err)
		}
		check.OK(t, os.WriteFile(filepath.Join(dir, what), []byte("written"), 0o600))
		l.SetLongestFreeze(time.Hour)
		fails(t, copy(source), errdefs.ErrPrecondition, what+" again")
		if n := pool.made.Load() - tries; n != 1 {
			t.Errorf("%s: writers were held back %d times", what, n)
		}
		l.SetLongestFreeze(longest)
		for end := time.Now().Add(2 * time.Minute); pool.made.Load()-tries < 2; { // the writers have been left alone for long enough
			if err := copy(source); pool.made.Load()-tries == 2 || !errors.Is(err, errdefs.ErrUnavailable) { // ErrUnavailable: the time was over before the copy began, as above
				fails(t, err, errdefs.ErrPrecondition, what+" later")
			}
			if time.Now().After(end) {
				t.Fatalf("%s: it is never tried again", what)
			}
		}
	}
	close(pool.let)
	l.SetLongestFreeze(time.Hour)
	check.OK(t, second(l.CreateSnapshot(t.Context(), "s", a)))
	if have := snapshots(t, l); len(have) != 1 {
		t.Errorf("snapshots %q", have)
	}
}

// TestFreezeOfOthers: a copy fails if somebody ends the driver's freeze meanwhile, as it would not be of one point in time. The freeze of somebody else,
// who may end it at any time, is not relied on, and stays.
func TestFreezeOfOthers(t *testing.T) {
	l, pool, dir := inUse(t, true)
	close(pool.let)
	source := create(t, l, "v").ID
	copies := map[string]func() error{
		"snapshot": func() error { return second(l.CreateSnapshot(t.Context(), "s", source)) },
		"clone": func() error {
			return second(l.Create(t.Context(), volume.Spec{Name: "c", Size: volume.Range{Required: mib}, Source: source}))
		},
		"group": func() error { return second(l.CreateGroup(t.Context(), "g", []volume.ID{source})) },
	}
	for what, copy := range copies {
		pool.during = func(spec blockdev.Spec) {
			if !spec.Quiesced {
				t.Errorf("%s: not quiesced", what)
			}
			check.OK(t, filesystem.Thaw(dir))
		}
		fails(t, copy(), errdefs.ErrUnavailable, what+" whose freeze was ended")
		if have := snapshots(t, l); len(have) != 0 {
			t.Errorf("%s: snapshots %q", what, have)
		}
		pool.during = func(spec blockdev.Spec) {
			if spec.Quiesced {
				t.Errorf("%s: somebody else's freeze is relied on", what)
			}
		}
		thaw, err := filesystem.Freeze(t.Context(), dir)
		check.OK(t, err)
		check.OK(t, errors.Join(copy(), thaw())) // the freeze is still there
		for _, one := range listed(t, l) {
			if one.Group == (volume.GroupID{}) {
				check.OK(t, l.DeleteSnapshot(t.Context(), one.ID))
			} else {
				check.OK(t, l.DeleteGroup(t.Context(), one.Group))
			}
		}
	}
}

// TestLongCopy: a copy whose origin is fixed early may take longer than writers may be held back.
func TestLongCopy(t *testing.T) {
	l, pool, dir := inUse(t, true)
	for what, copy := range map[string]func(source volume.ID) error{
		"snapshot": func(source volume.ID) error { return second(l.CreateSnapshot(t.Context(), "s", source)) },
		"clone": func(source volume.ID) error {
			return second(l.Create(t.Context(), volume.Spec{Name: "c", Size: volume.Range{Required: mib}, Source: source}))
		},
		"group": func(source volume.ID) error { return second(l.CreateGroup(t.Context(), "g", []volume.ID{source})) },
	} {
		// On a slow machine, writers may be held back for too long. Then a longer bound is tried, with a source that was not held back yet.
		for _, longest := range []time.Duration{100 * time.Millisecond, time.Second, 10 * time.Second, 30 * time.Second} {
			l.SetLongestFreeze(longest)
			source := create(t, l, fmt.Sprint("source of ", what, " ", longest)).ID
			done := make(chan error, 1)
			go func() { done <- copy(source) }()
			time.Sleep(longest * 3)
			check.OK(t, os.WriteFile(filepath.Join(dir, "file"), []byte("written"), 0o600))
			var err error
			select {
			case pool.let <- struct{}{}:
				err = <-done
			case err = <-done:
				if err == nil {
					t.Fatal("it was over before it was let")
				}
			}
			if err == nil {
				break
			}
			if !errors.Is(err, errdefs.ErrPrecondition) || longest == 30*time.Second {
				t.Fatal(err)
			}
		}
	}
}

// TestGroupDeletedWhileCopied: a group is not deleted (ErrBusy) while one of its snapshots is being copied, and not copied while it is being deleted.
func TestGroupDeletedWhileCopied(t *testing.T) {
	var at string // the operation at which then is called
	var then func()
	hook := func(operation string, ref blockdev.Ref) error {
		if operation+"/"+string(ref.Kind) == at {
			at = ""
			then()
		}
		return nil
	}
	l := start(t, 0, memory.NewDisk(8<<30).Open("default", hook))
	a, b := create(t, l, "a"), create(t, l, "b")
	group, err := l.CreateGroup(t.Context(), "group", []volume.ID{a.ID, b.ID})
	check.OK(t, err)
	spec := volume.Spec{Name: "copy", Source: group.Snapshots[1].ID}
	at, then = "Create/vol", func() {
		fails(t, l.DeleteGroup(t.Context(), group.ID), errdefs.ErrBusy, "delete while it is copied")
	}
	check.OK(t, second(l.Create(t.Context(), spec)))
	if have, err := l.GetGroup(t.Context(), group.ID); err != nil || len(have.Snapshots) != 2 {
		t.Fatalf("the group is %v, %v", have, err)
	}
	check.OK(t, second(l.GetSnapshot(t.Context(), group.Snapshots[0].ID)))
	spec.Name = "another"
	at, then = "Delete/snap", func() {
		if err := second(l.Create(t.Context(), spec)); !errors.Is(err, errdefs.ErrBusy) && !errors.Is(err, errdefs.ErrNotFound) {
			t.Errorf("copied while it is deleted: %v", err)
		}
	}
	check.OK(t, l.DeleteGroup(t.Context(), group.ID))
	fails(t, second(l.Create(t.Context(), spec)), errdefs.ErrNotFound, "copy of a group that is gone")
	if at != "" {
		t.Errorf("nothing was tried at %s", at)
	}
}

// TestGroupDeleteFails: after a deletion that has removed only some members, nobody sees the group or its members any more.
func TestGroupDeleteFails(t *testing.T) {
	l, _, broken := one(t)
	group, err := l.CreateGroup(t.Context(), "g", []volume.ID{create(t, l, "a").ID, create(t, l, "b").ID})
	check.OK(t, err)
	broken["Delete"] = 2
	fails(t, l.DeleteGroup(t.Context(), group.ID), errBroken, "DeleteGroup")
	fails(t, second(l.GetGroup(t.Context(), group.ID)), errdefs.ErrNotFound, "GetGroup")
	if have := snapshots(t, l); len(have) != 0 {
		t.Errorf("snapshots %q are seen", have)
	}
	delete(broken, "Delete")
	check.OK(t, l.DeleteGroup(t.Context(), group.ID))
}

// TestGroupPartLost: if a member of a complete group is lost, as with its disk, a start keeps the others. What is left of a group that was being deleted is
// removed.
func TestGroupPartLost(t *testing.T) {
	for _, deleting := range []bool{false, true} {
		t.Run(fmt.Sprint("deleting ", deleting), func(t *testing.T) {
			l, disk, broken := one(t)
			a := create(t, l, "a").ID
			group, err := l.CreateGroup(t.Context(), "g", []volume.ID{a, create(t, l, "b").ID})
			check.OK(t, err)
			if deleting {
				broken["Delete"] = 2
				fails(t, l.DeleteGroup(t.Context(), group.ID), errBroken, "DeleteGroup")
			} else {
				lost := group.Snapshots[1].ID
				check.OK(t, disk.Open("default", nil).Delete(t.Context(), blockdev.Ref{Kind: lost.Kind, Key: lost.Key}))
			}
			l = start(t, 0, disk.Open("default", nil))
			have := snapshots(t, l)
			if deleting {
				if len(have) > 0 {
					t.Errorf("left of what was being deleted is %q", have)
				}
				return
			}
			check.OK(t, second(l.Create(t.Context(), volume.Spec{Name: "restored", Source: group.Snapshots[0].ID, Size: volume.Range{Required: mib}})))
			fails(t, second(l.GetGroup(t.Context(), group.ID)), errdefs.ErrNotFound, "GetGroup")
			check.OK(t, l.DeleteGroup(t.Context(), group.ID))
			if have := snapshots(t, l); len(have) > 0 {
				t.Errorf("left is %q", have)
			}
		})
	}
}

func TestSnapshot(t *testing.T) {
	l, _, _ := one(t)
	a, b := create(t, l, "a").ID, create(t, l, "b").ID
	made, err := l.CreateSnapshot(t.Context(), "s", a)
	check.OK(t, err)
	if made.Source != a || made.Size != mib || made.Created.IsZero() || made.Node != node || made.Group != (volume.GroupID{}) || made.Name != "s" {
		t.Errorf("snapshot %+v", made)
	}
	if again, err := l.CreateSnapshot(t.Context(), "s", a); err != nil || again != made {
		t.Errorf("again: %+v, %v; want %+v", again, err, made)
	}
	fails(t, second(l.CreateSnapshot(t.Context(), "s", b)), errdefs.ErrExists, "of another volume")
	fails(t, second(l.CreateSnapshot(t.Context(), "t", made.ID)), errdefs.ErrNotFound, "of a snapshot")
	check.OK(t, l.Delete(t.Context(), a))
	if again, err := l.CreateSnapshot(t.Context(), "s", a); err != nil || again != made {
		t.Errorf("again, with its source gone: %+v, %v", again, err)
	}
	of, err := l.CreateSnapshot(t.Context(), "u", b)
	check.OK(t, err)
	if have, err := l.ListSnapshots(t.Context(), b, volume.ID{}, 0); err != nil || !slices.Equal(have, []volume.Snapshot{of}) {
		t.Errorf("of b: %+v, %v", have, err)
	}
	for range 2 {
		check.OK(t, l.DeleteSnapshot(t.Context(), made.ID))
		fails(t, second(l.GetSnapshot(t.Context(), made.ID)), errdefs.ErrNotFound, "GetSnapshot")
	}
	// Calls for volumes know no IDs of snapshots, and those for snapshots none of volumes.
	fails(t, second(l.Get(t.Context(), of.ID)), errdefs.ErrNotFound, "Get of a snapshot")
	check.OK(t, l.Delete(t.Context(), of.ID))
	check.OK(t, l.DeleteSnapshot(t.Context(), b))
	if _, err := l.Get(t.Context(), b); err != nil {
		t.Errorf("a volume is gone: %v", err)
	}
	if _, err := l.GetSnapshot(t.Context(), of.ID); err != nil {
		t.Errorf("a snapshot is gone: %v", err)
	}
}

// TestList: pages go on over pools, in the order of the IDs.
func TestList(t *testing.T) {
	l := start(t, 0, memory.NewDisk(1<<30).Open("b", nil), memory.NewDisk(1<<30).Open("c", nil), memory.NewDisk(1<<30).Open("a", nil))
	var want []string
	for i := range 9 {
		v, err := l.Create(t.Context(), volume.Spec{Name: fmt.Sprint(i), Pool: string(rune('a' + i%3)), Size: volume.Range{Required: mib}})
		check.OK(t, err)
		want = append(want, v.ID.String())
	}
	slices.Sort(want)
	for _, limit := range []int{0, 1, 2, 3, 4, 9, 10} {
		var have []string
		for after := (volume.ID{}); ; {
			page, err := l.List(t.Context(), after, limit)
			check.OK(t, err)
			for _, v := range page {
				have = append(have, v.ID.String())
			}
			if limit == 0 || len(page) < limit {
				break
			}
			after = page[len(page)-1].ID
		}
		if !slices.Equal(have, want) {
			t.Errorf("pages of %d: %v, want %v", limit, have, want)
		}
	}
}

func TestExpand(t *testing.T) {
	l, _, _ := one(t)
	id := create(t, l, "a").ID
	for _, c := range []struct {
		size volume.Range
		want int64
		err  error
	}{
		{volume.Range{}, mib, nil},
		{volume.Range{Required: 1}, mib, nil},
		{volume.Range{Required: 2*mib - 1}, 2 * mib, nil},
		{volume.Range{Required: mib, Limit: 2 * mib}, 2 * mib, nil},
		{volume.Range{Limit: 8 * mib}, 2 * mib, nil},
		{volume.Range{Required: mib, Limit: mib}, 2 * mib, errdefs.ErrOutOfRange},
		{volume.Range{Limit: mib}, 2 * mib, errdefs.ErrOutOfRange},
		{volume.Range{Required: 3*mib + 1, Limit: 3*mib + 2}, 2 * mib, errdefs.ErrOutOfRange},
		{volume.Range{Required: 3 * mib, Limit: 1}, 2 * mib, errdefs.ErrInvalid},
		{volume.Range{Required: 1 << 40}, 2 * mib, errdefs.ErrNoSpace},
		{volume.Range{Required: 1 << 60}, 2 * mib, errdefs.ErrOutOfRange},
	} {
		v, err := l.Expand(t.Context(), id, c.size)
		if !errors.Is(err, c.err) || (err == nil && v.Size != c.want) {
			t.Errorf("%+v: %d, %v; want %d, %v", c.size, v.Size, err, c.want, c.err)
		}
		if v, err := l.Get(t.Context(), id); err != nil || v.Size != c.want {
			t.Errorf("after %+v: %d, %v; want %d", c.size, v.Size, err, c.want)
		}
	}
}

// oneTooMany is a pool that lists, after the devices of each volume, one that does not exist.
type oneTooMany struct{ *memory.Pool }

func (p oneTooMany) Attached(ctx context.Context, ref blockdev.Ref) ([]blockdev.Device, error) {
	devices, err := p.Pool.Attached(ctx, ref)
	return append(devices, blockdev.Device{Path: "/dev/no-such-device", Size: mib}), err
}

// TestModify: mutable parameters are set on attached devices at once. If one device cannot be changed, all devices and the record are as before.
func TestModify(t *testing.T) {
	drivertest.NeedRoot(t)
	disk := memory.NewDisk(1 << 30)
	l := start(t, 0, disk.Open("default", nil))
	v, err := l.Create(t.Context(), volume.Spec{Name: "a", Size: volume.Range{Required: mib}, Mutable: map[string]string{"readAheadKiB": "64"}})
	check.OK(t, err)
	device, err := l.Attach(t.Context(), v, nil)
	check.OK(t, err)
	defer device.Close()
	is := func(when, readAhead, scheduler string, mutable map[string]string) {
		t.Helper()
		for name, want := range map[string]string{"read_ahead_kb": readAhead, "scheduler": scheduler} {
			b, err := os.ReadFile(filepath.Join("/sys/block", filepath.Base(device.Path), "queue", name))
			check.OK(t, err)
			if have := strings.TrimSpace(string(b)); have != want && !strings.Contains(have, "["+want+"]") {
				t.Errorf("%s: %s is %s, want %s", when, name, have, want)
			}
		}
		if v, err := l.Get(t.Context(), v.ID); err != nil || !maps.Equal(v.Mutable, mutable) {
			t.Errorf("%s: the record says %v, %v; want %v", when, v.Mutable, err, mutable)
		}
	}
	is("attached", "64", "none", map[string]string{"readAheadKiB": "64"})
	refusing := start(t, 0, oneTooMany{Pool: disk.Open("default", nil)})
	change := map[string]string{"readAheadKiB": "256", "ioScheduler": "mq-deadline"}
	fails(t, refusing.Modify(t.Context(), v.ID, change), errdefs.ErrInvalid, "Modify that the kernel refuses")
	is("refused", "64", "none", map[string]string{"readAheadKiB": "64"})
	for range 2 {
		check.OK(t, l.Modify(t.Context(), v.ID, change))
		is("modified", "256", "mq-deadline", change)
	}
	check.OK(t, l.Modify(t.Context(), v.ID, map[string]string{"ioScheduler": "none"})) // the other one stays
	is("one modified", "256", "none", map[string]string{"readAheadKiB": "256", "ioScheduler": "none"})
	fails(t, l.Modify(t.Context(), v.ID, map[string]string{"readAheadKiB": "1"}), errdefs.ErrInvalid, "a bad value")
	is("bad value", "256", "none", map[string]string{"readAheadKiB": "256", "ioScheduler": "none"})
}

// TestStart: a start detaches the devices that nobody uses, and deletes the ephemeral volumes of pods that are gone.
func TestStart(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := drivertest.Dir(t)
	disk := memory.NewDisk(1 << 30)
	l := start(t, 0, disk.Open("default", nil))
	kept := create(t, l, "kept")
	device, err := l.AttachRaw(t.Context(), kept, nil, true)
	check.OK(t, err)
	check.OK(t, device.Close())
	pod, gone := filepath.Join(dir, "pod", "mount"), filepath.Join(dir, "gone", "mount")
	kubelet := filepath.Join(dir, "kubelet")
	deleted, renamed := filepath.Join(kubelet, "pods", "uid", "volume", "mount"), filepath.Join(dir, "kubelet before", "pods", "uid", "volume", "mount")
	check.OK(t, errors.Join(os.MkdirAll(filepath.Dir(pod), 0o700), os.MkdirAll(filepath.Join(kubelet, "pods"), 0o700)))
	for name, path := range map[string]string{"alive": pod, "dead": gone, "deleted": deleted, "renamed": renamed} {
		_, err := l.Create(t.Context(), volume.Spec{Name: name, Size: volume.Range{Required: mib}, Ephemeral: path})
		check.OK(t, err)
	}

	l = start(t, 0, disk.Open("default", nil))
	if devices, err := l.Attached(t.Context(), kept.ID); err != nil || len(devices) != 0 {
		t.Errorf("a device that nothing uses is attached: %v, %v", devices, err)
	}
	if v, err := l.Ephemeral(t.Context(), "alive"); err != nil || v.Ephemeral != pod {
		t.Errorf("of a pod that is there: %+v, %v", v, err)
	}
	fails(t, second(l.Ephemeral(t.Context(), "dead")), errdefs.ErrNotFound, "of a pod that is gone")
	fails(t, second(l.Ephemeral(t.Context(), "deleted")), errdefs.ErrNotFound, "of a pod that is gone, beside others that may be there")
	if v, err := l.Ephemeral(t.Context(), "renamed"); err != nil || v.Ephemeral != renamed {
		t.Errorf("of a pod whose kubelet has another directory now: %+v, %v", v, err)
	}
	fails(t, second(l.Ephemeral(t.Context(), "kept")), errdefs.ErrNotFound, "what is no ephemeral volume")

	mounts, err := mount.LoadTable()
	check.OK(t, err)
	fails(t, second(volume.NewLocal(t.Context(), node, nil, mounts, 0)), errdefs.ErrInvalid, "a store without pools")
	broken := failing{"Orphans": 1}
	fails(t, second(volume.NewLocal(t.Context(), node, []blockdev.Pool{disk.Open("default", broken.hook)}, mounts, 0)), errBroken, "a store over a pool that does not answer")
}

func TestCapacity(t *testing.T) {
	broken := failing{}
	l := start(t, 0, memory.NewDisk(1<<30).Open("first", broken.hook), memory.NewDisk(2<<30).Open("second", nil))
	for _, c := range []struct {
		pool, node string
		want       int64
		err        error
	}{
		{"", "", 1 << 30, nil}, {"first", node, 1 << 30, nil}, {"second", "", 2 << 30, nil}, {"", "node-2", 0, nil}, {"third", "", 0, errdefs.ErrInvalid},
	} {
		if have, err := l.Capacity(t.Context(), c.pool, volume.NotEncrypted, c.node); have.Available != c.want || !errors.Is(err, c.err) {
			t.Errorf("pool %q, node %q: %+v, %v; want %d, %v", c.pool, c.node, have, err, c.want, c.err)
		}
	}
	broken["Capacity"] = 1
	fails(t, second(l.Capacity(t.Context(), "first", volume.NotEncrypted, "")), errBroken, "Capacity of a pool that does not answer")
}

// TestFreezeBesidePipe: of the binds of a volume only directories are opened, for a freeze and to end one at the start. The kubelet binds a subpath of any
// kind: to open a pipe would wait for its writer, and a socket cannot be opened.
func TestFreezeBesidePipe(t *testing.T) {
	for name, kind := range map[string]uint32{"pipe": unix.S_IFIFO, "socket": unix.S_IFSOCK} {
		t.Run(name, func(t *testing.T) {
			bound := filepath.Join(t.TempDir(), name) // its name comes before that of the directory
			dir, device := mounted(t)
			source := filepath.Join(dir, name)
			check.OK(t, unix.Mknod(source, kind|0o600, 0))
			check.OK(t, os.WriteFile(bound, nil, 0o600))
			check.OK(t, unix.Mount(source, bound, "", unix.MS_BIND, ""))
			t.Cleanup(func() { check.OK(t, unix.Unmount(bound, unix.MNT_DETACH)) })
			pool := watched{Pool: memory.NewDisk(8<<30).Open("default", nil), mounted: device, endless: map[string]bool{}}
			v := create(t, start(t, 0, pool), "v")
			check.OK(t, second(pool.SetLabels(t.Context(), blockdev.Ref{Kind: v.ID.Kind, Key: v.ID.Key}, func(labels map[string]string) error {
				labels["frozen"] = "true"
				return nil
			})))
			thaw, err := filesystem.Freeze(t.Context(), dir)
			check.OK(t, err)
			defer thaw() //nolint:errcheck // the start ends the freeze
			done := make(chan error, 1)
			go func() {
				mounts, err := mount.LoadTable()
				var l *volume.Local
				if err == nil {
					l, err = volume.NewLocal(t.Context(), node, []blockdev.Pool{pool}, mounts, 0)
				}
				if err == nil {
					_, err = l.CreateSnapshot(t.Context(), "s", v.ID)
				}
				done <- err
			}()
			select {
			case err := <-done:
				check.OK(t, err)
			case <-time.After(time.Minute):
				t.Error("it waits for ever")
				for { // let it go on, until it ends
					w, err := os.OpenFile(source, os.O_RDWR|unix.O_NONBLOCK, 0)
					check.OK(t, err)
					select {
					case <-done:
						check.OK(t, w.Close())
						return
					case <-time.After(100 * time.Millisecond):
						check.OK(t, w.Close())
					}
				}
			}
		})
	}
}

// cloned is a pool that may be a copy of another one, and has an identity of its own.
type cloned struct {
	*memory.Pool
	of blockdev.Pool
}

func (c cloned) IsCopy(of blockdev.Pool) bool { return of == c.of }

// TestCopyByContent: of a pool and its copy, which has the same identity or does not, a driver uses the one that comes first.
func TestCopyByContent(t *testing.T) {
	mounts, err := mount.LoadTable()
	check.OK(t, err)
	disk := memory.NewDisk(1 << 30)
	first, other := disk.Open("first", nil), memory.NewDisk(1<<30).Open("other", nil)
	for name, copied := range map[string]blockdev.Pool{
		"one identity":         disk.Open("copied", nil),
		"another identity":     cloned{memory.NewDisk(1<<30).Open("copied", nil), first},
		"of an absent pool":    cloned{memory.NewDisk(1<<30).Open("copied", nil), disk.Open("absent", nil)},
		"no copy of the other": cloned{memory.NewDisk(1<<30).Open("copied", nil), nil},
	} {
		_, err := volume.NewLocal(t.Context(), node, []blockdev.Pool{first, other, copied}, mounts, 0)
		if refused := errors.Is(err, errdefs.ErrUnavailable) && strings.Contains(err.Error(), "pool copied has the volumes of pool first"); refused != strings.HasSuffix(name, "identity") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
