package volume_test

import (
	"errors"
	"maps"
	"slices"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// relabelled changes a label in the record of a volume without the Local; an empty value deletes it.
func relabelled(t *testing.T, pool blockdev.Pool, v volume.Volume, label, value string) {
	t.Helper()
	check.OK(t, second(pool.SetLabels(t.Context(), blockdev.Ref{Kind: v.ID.Kind, Key: v.ID.Key}, func(labels map[string]string) error {
		if delete(labels, label); value != "" {
			labels[label] = value
		}
		return nil
	})))
}

// TestExportUnrecorded: an export that is in no record is ended, and its device detached, once no call holds the volume's lock. An export stays if it is in a
// record, if the record cannot be read, or if it is another node's on the same kernel.
func TestExportUnrecorded(t *testing.T) {
	pool, k := memory.NewDisk(8<<30).Open("default", nil), newTarget(t)
	l := start(t, 0, pool)
	locks := serve(t, l, k, nil)
	names := map[string]string{} // of exports
	made := map[string]volume.Volume{}
	for _, name := range []string{"recorded", "unread", "unrecorded", "busy"} {
		made[name] = create(t, l, name)
		e, err := l.Export(t.Context(), made[name].ID, grant(1, "b"))
		check.OK(t, err)
		names[name] = e.NQN
	}
	other := start(t, 0, memory.NewDisk(8<<30).Open("default", nil))
	other.ServeExports(t.Context(), volume.Exporting{Boot: "1", Open: func() (volume.Exporter, error) { return k, nil }, Key: slices.Repeat([]byte{1}, 32), Locks: &keylock.Table{}})
	theirs, err := other.Export(t.Context(), create(t, other, "unrecorded").ID, grant(1, "b"))
	check.OK(t, err)
	left := func(want ...string) {
		t.Helper()
		var have []string
		for nqn := range k.exports {
			have = append(have, nqn)
		}
		for i, name := range want {
			want[i] = names[name]
		}
		same(t, "exported", slices.Sorted(slices.Values(have)), slices.Sorted(slices.Values(append(want, theirs.NQN))))
	}
	check.OK(t, l.EndUnrecorded(t.Context()))
	left(slices.Collect(maps.Keys(names))...)

	relabelled(t, pool, made["unrecorded"], "export", "")
	relabelled(t, pool, made["busy"], "export", "")
	relabelled(t, pool, made["unread"], "export", "who knows")
	unlock := check.Locked(t, locks, keylock.Volume(made["busy"].ID.Key))
	check.OK(t, l.EndUnrecorded(t.Context()))
	left("recorded", "unread", "busy")
	if devices, err := l.Attached(t.Context(), made["unrecorded"].ID); err != nil || len(devices) > 0 {
		t.Errorf("it is attached as %v, %v", devices, err)
	}
	unlock()
	check.OK(t, l.EndUnrecorded(t.Context()))
	left("recorded", "unread")
	exportedTo(t, l, k, made["recorded"].ID, grant(1, "b"))
	check.OK(t, errors.Join(l.Unexport(t.Context(), made["recorded"].ID, 0), l.Unexport(t.Context(), made["unread"].ID, 0), other.Unexport(t.Context(), made["unrecorded"].ID, 0)))
}

// TestReadUnrecorded: exports to readers that are not of the reading in the record are ended; those of that reading stay. When the record has none, all are ended,
// and the volume can be written to again.
func TestReadUnrecorded(t *testing.T) {
	needGuard(t)
	pool, k := opened(t, "default", filesURL(t)), newTarget(t)
	l := start(t, 0, pool)
	serve(t, l, k, &consumer{})
	v := written(t, l, "a", "content")
	check.OK(t, second(l.ExportToRead(t.Context(), v.ID, grant(1, "b"))))
	relabelled(t, pool, v, "read", "0123456789abcdef:1")
	now, err := l.ExportToRead(t.Context(), v.ID, grant(2, "c"))
	check.OK(t, err)
	if len(k.exports) != 2 {
		t.Fatalf("exported: %v", k.exports)
	}
	check.OK(t, l.EndUnrecorded(t.Context()))
	if _, is := k.exports[now.NQN]; !is {
		t.Error("who reads it now does not any more")
	}
	readBy(t, l, k, v.ID, false, 2)
	relabelled(t, pool, v, "read", "")
	check.OK(t, l.EndUnrecorded(t.Context()))
	readBy(t, l, k, v.ID, false)
	writes(t, l, v, "another")
	check.OK(t, l.Delete(t.Context(), v.ID))
	check.OK(t, pool.Close())
}
