package volume_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// lists says of each leg that it is on that list.
type lists volume.List

func (l *lists) ListOf(context.Context, string, string) (volume.List, error) {
	return volume.List(*l), nil
}

// TestSnapshotOfOlderCopy: a leg of a volume that nobody uses now is an older copy, as its disk was put back. No snapshot is made of it, which would lack what
// was written since: another leg has it.
func TestSnapshotOfOlderCopy(t *testing.T) {
	pool := memory.NewDisk(8<<30).Open("default", failing{}.hook)
	l, on := start(t, 0, pool), &lists{Number: 12, Legs: 2, Closed: true, Sound: 5}
	l.SetLists(on)
	v, err := l.Create(t.Context(), volume.Spec{Name: "v", Size: volume.Range{Required: mib}, ReplicaOf: "of"})
	check.OK(t, err)
	for i, c := range []struct {
		record string
		on     lists
		want   error
	}{
		{record: "5:5:closed:1:list.12.2", on: *on},
		{record: "3:3:closed:1:list.7.2", on: *on, want: volume.ErrNotCurrent},                                  // put back to an earlier claim
		{record: "5:5:closed:1:list.11.2", on: *on, want: volume.ErrNotCurrent},                                 // to an earlier list of the same one
		{record: "5:5:open:1:list.12.2", on: *on, want: volume.ErrNotCurrent},                                   // to when it was used by it
		{record: "3:3:closed:1:list.7.1", on: lists{Number: 12, Legs: 1, Sound: 5}, want: volume.ErrNotCurrent}, // the only leg
		{record: "", on: *on, want: volume.ErrNotCurrent},                                                       // to before it was used
		{record: "5:5:closed:1:list.11.2:due.12", on: *on},                                                      // it was told that the list is due
		{record: "5:5:closed:1:list.7.2", on: lists{Number: 12, Legs: 1, Closed: true}},                         // a person put it on the list
		{record: "6:6:closed:1:list.14.2", on: *on},                                                             // the object was put back
		{record: "", on: lists{Legs: 2}},                                                                        // it was never used
	} {
		*on = c.on
		_, err := pool.SetLabels(t.Context(), blockdev.Ref{Kind: v.ID.Kind, Key: v.ID.Key}, func(labels map[string]string) error {
			delete(labels, "leg")
			if c.record != "" {
				labels["leg"] = c.record
			}
			return nil
		})
		check.OK(t, err)
		if _, err = l.CreateSnapshot(t.Context(), fmt.Sprint(i), v.ID); c.want == nil {
			check.OK(t, err)
		} else {
			fails(t, err, c.want, fmt.Sprintf("a snapshot of %q", c.record))
		}
	}
}
