package volume

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ashlar-csi/ashlar/internal/trace"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Snapshot is a snapshot that is ready to use.
type Snapshot struct {
	ID      ID
	Name    string
	Source  ID
	Size    int64     // bytes; a volume that it is restored to has at least as many
	Scheme  Scheme    // how its bytes are encrypted: as those of its source
	Created time.Time // the moment of the cut
	Group   GroupID   // zero if it is in no group
	// GroupSize is how many snapshots its group has, on all nodes.
	GroupSize int
	Object    string // see Volume
	Node      string
}

// CheckBase returns nil if have, which is what was found with err of snapshot base, is the base of changes up to s (Differ.Changed). Whoever may see s need not
// see what there is of other volumes: so it is ErrNotFound, in the same words, whether base is one of another volume or none.
func (s Snapshot) CheckBase(base ID, have Snapshot, err error) error {
	switch {
	case errors.Is(err, errdefs.ErrNotFound), err == nil && have.Source != s.Source:
		return fmt.Errorf("%w: no snapshot %s of volume %s, as %s is; name an earlier one of that volume, or read all that the target has", errdefs.ErrNotFound, base, s.Source, s.ID)
	case err == nil && have.Created.After(s.Created):
		return fmt.Errorf("%w: the base %s was cut at %s, and the target %s before that, at %s; name the earlier one as the base. If it was cut first, the node's clock was set back meanwhile: read all that the target has",
			errdefs.ErrInvalid, base, have.Created.Format(time.RFC3339Nano), s.ID, s.Created.Format(time.RFC3339Nano))
	}
	return err
}

// CreateSnapshot: see Store.
func (l *Local) CreateSnapshot(ctx context.Context, name string, source ID) (Snapshot, error) {
	return l.CutLeg(ctx, name, source, source, "")
}

// CutLeg is CreateSnapshot for a volume of which this node has a leg: the leg is cut, whatever its key. object is Snapshot.Object of what is cut.
func (l *Local) CutLeg(ctx context.Context, name string, source, leg ID, object string) (Snapshot, error) {
	if have, err := l.existing(ctx, name, source); err != nil || have.Name != "" {
		return have, err
	}
	o, err := l.snapshotSource(ctx, leg)
	if err != nil {
		return Snapshot{}, err
	}
	labels := map[string]string{}
	setLabel(labels, labelObject, object)
	if leg != source {
		labels[labelSource] = source.String()
	}
	return l.snapshot(ctx, o, name, labels)
}

// snapshot cuts a snapshot of an origin while its writers are held back.
func (l *Local) snapshot(ctx context.Context, o origin, name string, labels map[string]string) (Snapshot, error) {
	ctx, quiesced, thaw, err := l.quiesce(ctx, o)
	if err != nil {
		return Snapshot{}, err
	}
	record, err := l.cut(ctx, o, name, quiesced, func(context.Context) error { return thaw() }, labels)
	if err = withThaw(freezeError(ctx, err), thaw()); err != nil {
		return Snapshot{}, fmt.Errorf("snapshot %q of volume %s: %w", name, o.id(), err)
	}
	return snapshotFromRecord(o.pool.Name(), l.node, record), nil
}

// existing returns the snapshot of a name; the zero Snapshot if there is none. ErrExists if it is of another source, ErrUnavailable while it moves here.
func (l *Local) existing(ctx context.Context, name string, source ID) (Snapshot, error) {
	pool, record, err := l.named(ctx, blockdev.Snapshot, name)
	if errors.Is(err, errdefs.ErrNotFound) {
		return Snapshot{}, nil
	}
	if err != nil {
		return Snapshot{}, err
	}
	if unfinished(record) {
		return Snapshot{}, fmt.Errorf("%w: snapshot %s is being moved here", errdefs.ErrUnavailable, IDOf(pool.Name(), record))
	}
	have := snapshotFromRecord(pool.Name(), l.node, record)
	if have.Name != name || have.Source != source {
		return Snapshot{}, fmt.Errorf("%w: snapshot %q (%s) is of volume %s, not %s", errdefs.ErrExists, name, have.ID, have.Source, source)
	}
	return have, nil
}

func (l *Local) snapshotSource(ctx context.Context, id ID) (origin, error) {
	if id.Kind != blockdev.Volume {
		return origin{}, fmt.Errorf("%w: %s is no volume", errdefs.ErrNotFound, id)
	}
	return l.source(ctx, id)
}

func (l *Local) cut(ctx context.Context, o origin, name string, quiesced bool, done func(context.Context) error, labels map[string]string) (blockdev.Record, error) {
	all := map[string]string{}
	// The labels that a restored volume needs to know about its bytes.
	for _, key := range []string{labelFormat, labelFilesystem, labelEncryption, labelHeader} {
		setLabel(all, key, o.record.Labels[key])
	}
	for key, value := range labels {
		all[key] = value
	}
	labelOrigin(all, o.pool.Name(), o.id())
	return l.create(ctx, o.pool, blockdev.Spec{
		Ref: blockdev.Ref{Kind: blockdev.Snapshot, Key: KeyOf(name)}, Name: name, Size: o.record.Size, Provisioning: blockdev.ProvisioningOf(o.record.Thin),
		Origin: o.record.Ref, Quiesced: quiesced, Cut: done, Labels: all,
	})
}

// DeleteSnapshot: see Store.
func (l *Local) DeleteSnapshot(ctx context.Context, id ID) error {
	pool, ref, err := l.object(id, blockdev.Snapshot)
	if err != nil {
		return errdefs.IgnoreNotFound(err)
	}
	record, err := pool.Get(ctx, ref)
	if err == nil && record.Labels[labelGroup] != "" {
		return fmt.Errorf("%w: snapshot %s is part of %s and is deleted with it", errdefs.ErrInvalid, id, GroupID{record.Labels[labelGroup]})
	}
	return trace.Do(ctx, "delete", func(ctx context.Context) error { return l.remove(ctx, pool, ref) }, "snapshot", id.String())
}

// GetSnapshot: see Store.
func (l *Local) GetSnapshot(ctx context.Context, id ID) (Snapshot, error) {
	pool, ref, err := l.object(id, blockdev.Snapshot)
	if err != nil {
		return Snapshot{}, err
	}
	record, err := pool.Get(ctx, ref)
	if err != nil {
		return Snapshot{}, err
	}
	if unfinished(record) {
		return Snapshot{}, fmt.Errorf("%w: snapshot %s is being moved to node %s", errdefs.ErrUnavailable, id, l.node)
	}
	if l.hidden(record) {
		return Snapshot{}, fmt.Errorf("%w: snapshot %s is of a group that is not complete, or of a copy", errdefs.ErrNotFound, id)
	}
	return snapshotFromRecord(pool.Name(), l.node, record), nil
}

// ListSnapshots: see Store.
func (l *Local) ListSnapshots(ctx context.Context, source ID, after ID, limit int) ([]Snapshot, error) {
	var snapshots []Snapshot
	err := l.list(ctx, blockdev.Snapshot, after, limit, func(pool string, r blockdev.Record) bool {
		s := snapshotFromRecord(pool, l.node, r)
		if !l.hidden(r) && (source == (ID{}) || s.Source == source) {
			snapshots = append(snapshots, s)
		}
		return limit == 0 || len(snapshots) < limit
	})
	return snapshots, err
}

// Allocated: see Differ.
func (l *Local) Allocated(ctx context.Context, id ID, from int64, yield func(blockdev.Extent) error) error {
	pool, ref, err := l.object(id, blockdev.Snapshot)
	if err != nil {
		return err
	}
	differ, ok := blockdev.As[blockdev.Differ](pool)
	if !ok {
		return fmt.Errorf("%w: pool %s cannot list what is allocated", errdefs.ErrUnsupported, pool.Name())
	}
	record, err := pool.Get(ctx, ref)
	if err != nil {
		return err
	}
	release, err := l.holdSource(id)
	if err != nil {
		return err
	}
	defer release()
	from, yield = behindHeader(schemeOf(record), from, yield)
	ctx, end := l.progress.Track(ctx, pool.Name(), ref.String()) // where it has to be read
	defer end()
	return differ.Allocated(ctx, ref, from, yield)
}

// Changed: see Differ.
func (l *Local) Changed(ctx context.Context, base, target ID, from int64, yield func(blockdev.Extent) error) error {
	recent, err := l.GetSnapshot(ctx, target)
	if err != nil {
		return err
	}
	old, err := l.GetSnapshot(ctx, base)
	if err := recent.CheckBase(base, old, err); err != nil {
		return err
	}
	if l.placeOf(base) != l.placeOf(target) {
		return fmt.Errorf("%w: %s and %s are in different pools, and only snapshots in one pool can be compared: read all that the target has", errdefs.ErrInvalid, base, target)
	}
	pool, ref, err := l.object(target, blockdev.Snapshot)
	if err != nil {
		return err
	}
	differ, ok := blockdev.As[blockdev.Differ](pool)
	if !ok {
		return fmt.Errorf("%w: pool %s cannot compare snapshots", errdefs.ErrUnsupported, pool.Name())
	}
	release, err := l.lockSources(nil, []string{base.String(), target.String()})
	if err != nil {
		return err
	}
	defer release()
	from, yield = behindHeader(recent.Scheme, from, yield)
	ctx, end := l.progress.Track(ctx, pool.Name(), ref.String()) // where it has to be read
	defer end()
	return differ.Changed(ctx, base.ref(), ref, from, yield)
}
