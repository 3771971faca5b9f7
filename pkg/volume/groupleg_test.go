package volume_test

import (
	"context"
	"errors"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// legLists is a volume.Lists by which all legs are on a list, whose number is that of their volume. asked is called before each answer.
type legLists struct {
	number map[string]int64
	asked  func(of string)
}

func (l *legLists) ListOf(_ context.Context, of, _ string) (volume.List, error) {
	l.asked(of)
	return volume.List{Number: l.number[of], Legs: 2}, nil
}

// TestLVMGroupLegLeaves: a member of a group is a leg whose volume is used as a raw device, so it is the leg alone that takes no writes while the group is cut. It
// leaves before the writes to the other member are held back too: its volume goes on without it then, and what is written to that, and after it to the other
// member, is on the other leg, which is not cut. The group is not made; it is made when the leg stays.
func TestLVMGroupLegLeaves(t *testing.T) {
	files, _ := mixed(t)
	l := start(t, 0, open(t, "files", files))
	lists := &legLists{number: map[string]int64{}}
	l.SetLists(lists)
	var all []volume.ID
	for _, of := range []string{"a", "b"} {
		v, err := l.Create(t.Context(), volume.Spec{Name: of, Pool: "files", Size: volume.Range{Required: 16 * mib}, Access: volume.AccessAny, ReplicaOf: of})
		check.OK(t, err)
		device, err := l.AttachRaw(t.Context(), v, nil, true)
		check.OK(t, err)
		check.OK(t, device.Close())
		check.OK(t, l.SetCommonEra(t.Context(), v.ID, 0)) // it was closed, so that no loss of power matters
		all = append(all, v.ID)
	}
	var asked []string
	leaves := true
	lists.asked = func(of string) {
		if asked = append(asked, of); !leaves || len(asked) != 2 {
			return
		}
		lists.number[asked[0]]++ // the first leg has left: its volume goes on without it
	}
	made, err := l.CreateGroup(t.Context(), "g", all)
	if !errors.Is(err, volume.ErrNotCurrent) {
		t.Errorf("a group of which a leg has left meanwhile: %+v, %v, asked %v", made, err, asked)
	}
	if have := snapshots(t, l); err != nil && len(have) > 0 {
		t.Errorf("left are %v", have)
	}
	leaves = false
	if made, err = l.CreateGroup(t.Context(), "h", all); err != nil {
		t.Fatal(err)
	}
	check.OK(t, l.DeleteGroup(t.Context(), made.ID))
	for _, id := range all {
		check.OK(t, errors.Join(l.Detach(t.Context(), id), l.Delete(t.Context(), id)))
	}
}
