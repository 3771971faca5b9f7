package volume

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// A snapshot moves as a volume does (docs/decisions/moving.md), but without a seal: its bytes never change, so the time of its cut stands for them. The
// new node copies it (CopySnapshotIn), and makes a snapshot of it (Arrive). Only then the old node removes its own (DepartSnapshot).

// movedOfSnapshots are the labels that the record of a snapshot that moves may have.
var movedOfSnapshots = []string{labelFilesystem, labelFormat, labelEncryption, labelHeader, labelGroup, labelGroupSize, labelGroupWhole, labelSource, labelMade}

// OpenMove returns a snapshot as the origin of its move, with its labels. Created is the time of its cut. ErrNotFound as for GetSnapshot.
func (l *Local) OpenMove(ctx context.Context, id ID) (Origin, error) {
	snapshot, err := l.GetSnapshot(ctx, id)
	if err != nil {
		return Origin{}, err
	}
	pool, ref, err := l.object(id, blockdev.Snapshot)
	if err != nil {
		return Origin{}, err
	}
	record, err := pool.Get(ctx, ref)
	if err != nil {
		return Origin{}, err
	}
	from, err := l.open(ctx, id)
	from.Labels = maps.Clone(record.Labels)
	maps.DeleteFunc(from.Labels, func(label, _ string) bool { return slices.Contains(homeLabels, label) })
	from.Created = from.Created.Truncate(time.Microsecond) // times are told in microseconds
	from.Labels[labelMade], from.Labels[labelSource] = snapshot.Created.UTC().Format(time.RFC3339Nano), snapshot.Source.String()
	return from, err
}

// CopySnapshotIn is CopyIn for a snapshot, to the pool that its ID names. If it is here already, cut at the same time, nothing is copied.
func (l *Local) CopySnapshotIn(ctx context.Context, name string, from Origin) error {
	if err := from.check(); err != nil {
		return err
	}
	if from.ID.Kind != blockdev.Snapshot || from.ID.Key != KeyOf(name) {
		return fmt.Errorf("%w: %s is not snapshot %q", errdefs.ErrUnsupported, from.ID, name)
	}
	if err := from.checkLabels(func(label string) bool { return slices.Contains(movedOfSnapshots, label) }); err != nil {
		return err
	}
	return l.copyIn(ctx, from.ID.Pool, name, blockdev.AnyProvisioning, from)
}

// isCut reports whether a record is of a whole snapshot that was cut at a time.
func isCut(pool blockdev.Pool, r blockdev.Record, cut time.Time) bool {
	return r.Kind == blockdev.Snapshot && !unfinished(r) && r.Labels[labelCutFor] == "" &&
		snapshotFromRecord(pool.Name(), "", r).Created.Truncate(time.Microsecond).Equal(cut)
}

// DepartSnapshot removes a snapshot that has moved to another node, after it has arrived there. Success if there is none here. ErrPrecondition if the one
// here was cut at another time: then it is not what has moved. ErrBusy while it is copied, ErrInUse while it is attached.
func (l *Local) DepartSnapshot(ctx context.Context, id ID, cut time.Time) error {
	pool, ref, err := l.object(id, blockdev.Snapshot)
	if err != nil {
		return err
	}
	record, err := pool.Get(ctx, ref)
	if err != nil {
		return errdefs.IgnoreNotFound(err)
	}
	if !isCut(pool, record, cut) {
		return fmt.Errorf("%w: snapshot %s of node %s is another one than has moved; its bytes stay here", errdefs.ErrPrecondition, id, l.node)
	}
	release, err := l.lockSources([]string{id.String()}, nil)
	if err != nil {
		return err
	}
	defer release()
	return l.remove(ctx, pool, ref)
}
