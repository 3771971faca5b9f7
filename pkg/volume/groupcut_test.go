package volume_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// partly is a pool of which all volumes are attached: some are mounted, the others are raw devices, whose writers cannot be held back. It notes the copies
// that are made. That of the volume slow does not end before its context.
type partly struct {
	*memory.Pool
	mounted map[string]uint64 // devices, by key
	slow    string            // a key
	copies  []blockdev.Spec
	asked   []int  // how many copies had begun when each was compared
	changed string // a key: this one has changed since it was copied
}

func (p *partly) Unchanged(_ context.Context, _, origin blockdev.Ref) error {
	p.asked = append(p.asked, len(p.copies))
	if origin.Key == p.changed {
		return errdefs.ErrInUse
	}
	return nil
}

func (p *partly) Attached(_ context.Context, ref blockdev.Ref) ([]blockdev.Device, error) {
	number := p.mounted[ref.Key]
	if number == 0 {
		number = 1
	}
	return []blockdev.Device{{Path: "/dev/no-such-device", Number: number, Size: mib}}, nil
}

func (p *partly) Create(ctx context.Context, spec blockdev.Spec) (blockdev.Record, error) {
	if spec.Origin != (blockdev.Ref{}) {
		p.copies = append(p.copies, spec)
		if spec.Origin.Key == p.slow {
			<-ctx.Done()
			return blockdev.Record{}, ctx.Err()
		}
	}
	return p.Pool.Create(ctx, spec)
}

// partlyRaw starts a store over a partly, with volumes whose IDs are in order. Those in are are mounted.
func partlyRaw(t *testing.T, are ...bool) (*volume.Local, *partly, []volume.ID) {
	t.Helper()
	devices := map[int]uint64{}
	for i, is := range are {
		if is { // before the store reads what is mounted
			_, devices[i] = mounted(t)
		}
	}
	pool := &partly{Pool: memory.NewDisk(8<<30).Open("default", nil), mounted: map[string]uint64{}}
	l := start(t, 0, pool)
	all := inOrder(t, l, len(are))
	for i, device := range devices {
		pool.mounted[all[i].Key] = device
	}
	return l, pool, all
}

// inOrder makes n volumes whose IDs are in order.
func inOrder(t *testing.T, l *volume.Local, n int) (all []volume.ID) {
	t.Helper()
	for i := range n {
		all = append(all, create(t, l, fmt.Sprint("v", i)).ID)
	}
	slices.SortFunc(all, func(a, b volume.ID) int { return strings.Compare(a.String(), b.String()) })
	return all
}

// TestGroupOrder: members whose writers cannot be held back are cut while those of all others are. Of several such members, all but the last have to be
// unchanged when the last is cut.
func TestGroupOrder(t *testing.T) {
	l, pool, all := partlyRaw(t, true, false, true, false)
	check.OK(t, second(l.CreateGroup(t.Context(), "g", all)))
	type cut struct {
		of       int
		quiesced bool
	}
	var have []cut
	for _, spec := range pool.copies {
		of := slices.IndexFunc(all, func(id volume.ID) bool { return id.Key == spec.Origin.Key })
		have = append(have, cut{of, spec.Quiesced})
	}
	if want := []cut{{1, false}, {3, false}, {0, true}, {2, true}}; !slices.Equal(have, want) {
		t.Errorf("cut %+v, want %+v", have, want)
	}
	if !slices.Equal(pool.asked, []int{2}) { // the first, when the second was cut
		t.Errorf("compared after %v copies", pool.asked)
	}
	pool.changed = all[1].Key
	err := second(l.CreateGroup(t.Context(), "changed", all))
	fails(t, err, errdefs.ErrInUse, "a group of which one has changed")
	if !strings.Contains(err.Error(), all[1].String()) || len(snapshots(t, l)) != 4 {
		t.Errorf("snapshots %q after %v", snapshots(t, l), err)
	}
}

// TestGroupTooLong: if the writers of a group are held back for too long, the error names the member that took so long, also if its own were not held back.
// Only groups with that one are refused at once then: copies of the others alone have held nobody back in vain.
func TestGroupTooLong(t *testing.T) {
	l, pool, all := partlyRaw(t, true, false, true)
	l.SetLongestFreeze(3 * time.Second)
	pool.slow = all[1].Key
	err := second(l.CreateGroup(t.Context(), "g", all))
	fails(t, err, errdefs.ErrPrecondition, "a group of which one takes too long")
	if text := err.Error(); !strings.Contains(text, all[1].String()) || strings.Contains(text, all[0].String()) || strings.Contains(text, all[2].String()) {
		t.Errorf("%v does not name %s alone", err, all[1])
	}
	l.SetLongestFreeze(time.Hour)
	made := len(pool.copies)
	err = second(l.CreateGroup(t.Context(), "again", all[1:]))
	fails(t, err, errdefs.ErrPrecondition, "another group with it")
	if text := err.Error(); !strings.Contains(text, all[1].String()) || len(pool.copies) != made {
		t.Errorf("after %d copies: %v", len(pool.copies)-made, err)
	}
	check.OK(t, second(l.CreateSnapshot(t.Context(), "first", all[0])))
	check.OK(t, second(l.CreateSnapshot(t.Context(), "last", all[2])))
	check.OK(t, second(l.CreateGroup(t.Context(), "others", []volume.ID{all[0], all[2]})))
}

// TestGroupSaysWhich: the error of a group names the member that could not be cut.
func TestGroupSaysWhich(t *testing.T) {
	l, _, broken := one(t)
	all := inOrder(t, l, 3)
	for i, id := range all {
		broken["Create"] = i + 1
		err := second(l.CreateGroup(t.Context(), "g", all))
		fails(t, err, errBroken, "a group of which one cannot be cut")
		for _, other := range all {
			if strings.Contains(err.Error(), other.String()) != (other == id) {
				t.Errorf("member %s could not be cut: %v", id, err)
			}
		}
		delete(broken, "Create")
	}
}

// TestChangedInOtherPool: snapshots of one volume that are in different pools, as it moved between the two, cannot be compared.
func TestChangedInOtherPool(t *testing.T) {
	disk, other := memory.NewDisk(8<<30), memory.NewDisk(8<<30)
	l := start(t, 0, disk.Open("default", nil), other.Open("other", nil))
	v := create(t, l, "v")
	leg, err := l.Create(t.Context(), volume.Spec{Name: "leg", Pool: "other", Size: volume.Range{Required: mib}})
	check.OK(t, err)
	base, err := l.CreateSnapshot(t.Context(), "base", v.ID)
	check.OK(t, err)
	target, err := l.CutLeg(t.Context(), "target", v.ID, leg.ID, "")
	check.OK(t, err)
	fails(t, l.Changed(t.Context(), base.ID, target.ID, 0, func(blockdev.Extent) error { return nil }), errdefs.ErrInvalid, "Changed")
}
