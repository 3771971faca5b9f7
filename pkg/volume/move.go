package volume

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/ashlar-csi/ashlar/internal/ioctl"
	"github.com/ashlar-csi/ashlar/internal/trace"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// A volume moves to another node while nobody uses it (docs/decisions/moving.md). Its home seals it: from then on nothing here can use it before it is
// sure that it stays. The new node brings the bytes, as an unfinished copy, which is nobody's. When the cluster says that the volume is the new
// node's, that makes it a volume (Arrive), and only then the old one removes its own (Depart).

// Moves knows whether volumes move.
type Moves interface {
	// Stays returns nil once it is sure that a volume of this node that is sealed does not move before its use has ended. ErrPrecondition if it has moved;
	// ErrUnavailable if that cannot be found out now.
	Stays(ctx context.Context, id ID) error
	// IsHere returns nil if a volume that is sealed is still this node's: it may move right after that. Errors are those of Stays.
	IsHere(ctx context.Context, id ID) error
}

// SetMoves says who knows whether volumes move. It is called before anything uses a volume; without it none does.
func (l *Local) SetMoves(m Moves) { l.moves = m }

// homeLabels are those of a record that are about its use on its node, and do not move.
var homeLabels = []string{labelClaimNode, labelClaimMode, labelClaimRO, labelTarget, labelFlags, labelFrozen, labelExport, labelImport, labelSealed}

// movedLabels are all others that the record of a volume may have, but for those of mutable parameters.
var movedLabels = []string{labelFilesystem, labelFormat, labelEncryption, labelDiscards, labelHeader, labelSeparate, labelAccess, labelTimeout,
	labelSource, labelNamespace, labelClaim, labelPV, labelMade}

// AnyClaims is for Seal: whatever count a seal is for, it stays.
const AnyClaims = -1

// Seal keeps a volume as it is, or finds that it is sealed, and returns it as the origin of its move. What Created says is when it was sealed: as long as
// that is the same, so are the bytes. A seal is for a count of claims: one of before another claim is made anew, as who wrote then may have been a driver of
// before seals. ErrInUse while it is attached or exported. The caller has the lock, now and while it reads.
func (l *Local) Seal(ctx context.Context, id ID, claims int64) (Origin, error) {
	pool, record, err := l.exportRecord(ctx, id)
	if err != nil {
		return Origin{}, err
	}
	if IsExported(record) {
		return Origin{}, fmt.Errorf("%w: volume %s is exported", errdefs.ErrInUse, id)
	}
	if err := l.unusedHere(ctx, pool, record.Ref); err != nil {
		return Origin{}, err
	}
	if _, of, err := seal(record); err != nil || claims != AnyClaims && of != claims {
		now := time.Now().UTC().Truncate(time.Microsecond).Format(time.RFC3339Nano) + "/" + strconv.FormatInt(claims, 10)
		if record, err = pool.SetLabels(ctx, record.Ref, func(labels map[string]string) error {
			labels[labelSealed] = now
			return nil
		}); err != nil {
			return Origin{}, err
		}
	}
	return l.sealed(ctx, pool, record)
}

// seal is since when a volume is sealed, and after how many claims; ErrPrecondition if it is not.
func seal(r blockdev.Record) (since time.Time, claims int64, err error) {
	at, count, _ := strings.Cut(r.Labels[labelSealed], "/")
	if since, err = time.Parse(time.RFC3339Nano, at); err == nil {
		claims, err = strconv.ParseInt(count, 10, 64)
	}
	if err != nil {
		err = fmt.Errorf("%w: the record of volume %s says that it is sealed since %q", errdefs.ErrPrecondition, r.Key, r.Labels[labelSealed])
	}
	return since, claims, err
}

// sealed is a volume that is sealed, as the origin of its move.
func (l *Local) sealed(ctx context.Context, pool blockdev.Pool, record blockdev.Record) (Origin, error) {
	id := ID{record.Kind, pool.Name(), record.Key}
	differ, ok := blockdev.As[blockdev.Differ](pool)
	if !ok {
		return Origin{}, fmt.Errorf("%w: pool %s cannot list what its volumes hold, so they do not move", errdefs.ErrUnsupported, pool.Name())
	}
	since, claims, err := seal(record)
	if err != nil {
		return Origin{}, err
	}
	sector := uint32(0)
	if err := read(ctx, pool, record.Ref, func(f *os.File) (err error) {
		sector, err = ioctl.SectorSize(f)
		return errdefs.FromErrno(err)
	}); err != nil {
		return Origin{}, err
	}
	labels := maps.Clone(record.Labels)
	maps.DeleteFunc(labels, func(label, _ string) bool { return slices.Contains(homeLabels, label) })
	if labels[labelMade] == "" {
		labels[labelMade] = record.Created.UTC().Format(time.RFC3339Nano)
	}
	if labels[labelSource] == "" && record.Origin != (blockdev.Ref{}) {
		labels[labelSource] = ID{record.Origin.Kind, pool.Name(), record.Origin.Key}.String()
	}
	return Origin{ID: id, Created: since, Size: record.Size, Sector: int64(sector), Contents: contentsOf(record),
		Format: parseFormat(record.Labels[labelFormat]), Header: parseHeader(record.Labels[labelHeader]), Labels: labels, Claims: claims,
		Read: func(ctx context.Context, from int64, visit func(int64, []byte) error) error {
			now, err := pool.Get(ctx, record.Ref)
			if err != nil {
				return err
			}
			if now.Labels[labelSealed] != record.Labels[labelSealed] || now.Size != record.Size {
				return fmt.Errorf("%w: volume %s was used meanwhile", errdefs.ErrUnavailable, id)
			}
			return read(ctx, pool, record.Ref, func(f *os.File) error {
				return readAllocated(ctx, differ, record.Ref, f, record.Size, from, visit)
			})
		}}, nil
}

// unseal has a volume of this node that is sealed be used, if it stays.
func (l *Local) unseal(ctx context.Context, id ID) error {
	pool, record, err := l.exportRecord(ctx, id)
	if err != nil {
		return errdefs.IgnoreNotFound(err) // what is missing, whoever uses it finds
	}
	if record.Labels[labelSealed] == "" {
		return nil
	}
	moves, err := l.movesOf(id)
	if err != nil {
		return err
	}
	if err := moves.Stays(ctx, id); err != nil {
		return fmt.Errorf("use volume %s, which is about to move: %w", id, err)
	}
	return changeLabel(ctx, pool, record.Ref, labelSealed, "")
}

// stillHere is an error for a record that is sealed, of a volume that has moved: what was written since is not in its bytes.
func (l *Local) stillHere(ctx context.Context, id ID, record blockdev.Record) error {
	if record.Labels[labelSealed] == "" {
		return nil
	}
	moves, err := l.movesOf(id)
	if err == nil {
		err = moves.IsHere(ctx, id)
	}
	if err != nil {
		return fmt.Errorf("copy volume %s, which may have moved: %w", id, err)
	}
	return nil
}

// movesOf returns who knows whether a volume that is sealed moves.
func (l *Local) movesOf(id ID) (Moves, error) {
	if l.moves == nil {
		return nil, fmt.Errorf("%w: volume %s was about to move to another node of a cluster, and only there is known whether it has; start the driver as a node of that (--mode=node)", errdefs.ErrUnavailable, id)
	}
	return l.moves, nil
}

// makeOurs ends what keeps this node from using a volume of its own: an export of it, and a move that has not begun to be true.
func (l *Local) makeOurs(ctx context.Context, id ID) error {
	if err := l.Unexport(ctx, id, 0); err != nil {
		return err
	}
	return l.unseal(ctx, id)
}

// Depart removes a volume that has moved to another node, as it was sealed then, and arrived there; that it is not here is success. ErrPrecondition if it is not
// sealed, or was at another time: then it is not what has moved. ErrInUse while it is attached.
func (l *Local) Depart(ctx context.Context, id ID, sealed time.Time) error {
	pool, record, err := l.exportRecord(ctx, id)
	if err != nil {
		return errdefs.IgnoreNotFound(err)
	}
	if since, _, err := seal(record); err != nil || !since.Equal(sealed) {
		return fmt.Errorf("%w: volume %s of node %s was used after it had moved, or is another one; its bytes stay here", errdefs.ErrPrecondition, id, l.node)
	}
	if err := l.unusedHere(ctx, pool, record.Ref); err != nil {
		return err
	}
	return l.Delete(ctx, id)
}

// broughtLabel is importLabel of a volume that moves, all of whose bytes are here.
func broughtLabel(key string, sealed time.Time) string {
	return key + "/" + sealed.UTC().Format(time.RFC3339Nano) + "/" + brought
}

const brought = "all"

// Brought reports whether all bytes of a volume that moves here are, as they were sealed at a time.
func (l *Local) Brought(ctx context.Context, id ID, sealed time.Time) (bool, error) {
	pool, ref, err := l.object(id, blockdev.Volume)
	if err != nil {
		return false, err
	}
	record, err := pool.Get(ctx, ref)
	return err == nil && record.Labels[labelImport] == broughtLabel(id.Key, sealed), errdefs.IgnoreNotFound(err)
}

// dropLeft removes what is here of a volume that had left this node, which was taken for gone then: it is sealed, and its home has counted as many claims since, or more.
// ErrExists for anything else.
func (l *Local) dropLeft(ctx context.Context, pool blockdev.Pool, record blockdev.Record, claims int64) error {
	id := ID{record.Kind, pool.Name(), record.Key}
	since, of, err := seal(record)
	if err != nil || of > claims {
		return fmt.Errorf("%w: pool %s of node %s has a volume %s of its own", errdefs.ErrExists, pool.Name(), l.node, id)
	}
	return l.Depart(ctx, id, since)
}

// Bring copies the bytes of a volume that moves here to a pool of the same name. They are nobody's until Arrive; a call that comes after one that was cut short goes on
// where that stopped, if they are sealed as they were then. The caller has the lock of the volume.
func (l *Local) Bring(ctx context.Context, name string, provisioning blockdev.Provisioning, from Origin) error {
	if err := from.checkMove(name); err != nil {
		return err
	}
	pool, ref, err := l.object(from.ID, blockdev.Volume)
	if err != nil {
		return err
	}
	record, err := pool.Get(ctx, ref)
	switch _, of := imported(record, from); {
	case err == nil && record.Labels[labelImport] == broughtLabel(ref.Key, from.Created):
		return nil
	case err == nil && !of:
		if unfinished(record) {
			err = l.dropUnfinished(ctx, from.ID)
		} else {
			err = l.dropLeft(ctx, pool, record, from.Claims)
		}
		if err != nil {
			return err
		}
		record, err = l.beginMove(ctx, pool, name, provisioning, from)
	case errors.Is(err, errdefs.ErrNotFound):
		record, err = l.beginMove(ctx, pool, name, provisioning, from)
	}
	if err != nil {
		return err
	}
	_, err = l.fill(ctx, pool, record, from, func(context.Context, string) (map[string]string, error) {
		return map[string]string{labelImport: broughtLabel(ref.Key, from.Created)}, nil
	})
	if err != nil {
		err = fmt.Errorf("bring volume %s to pool %s: %w", from.ID, pool.Name(), err)
		return errors.Join(err, l.giveUp(ctx, from.ID, err))
	}
	return nil
}

// beginMove makes the object that the bytes go into, as zeros.
func (l *Local) beginMove(ctx context.Context, pool blockdev.Pool, name string, provisioning blockdev.Provisioning, from Origin) (blockdev.Record, error) {
	labels := maps.Clone(from.Labels)
	labels[labelImport] = importLabel(from, 0)
	g := pool.Granularity()
	return l.create(ctx, pool, blockdev.Spec{Ref: blockdev.Ref{Kind: blockdev.Volume, Key: from.ID.Key}, Name: name, Size: (from.Size + g - 1) / g * g,
		Provisioning: provisioning, Sector: from.Sector, Labels: labels})
}

// checkMove is check of the origin of a move, whose record comes with it.
func (o Origin) checkMove(name string) error {
	if err := o.check(); err != nil {
		return err
	}
	if o.ID.Kind != blockdev.Volume || o.ID.Key != KeyOf(name) {
		return fmt.Errorf("%w: %s is not volume %q", errdefs.ErrUnsupported, o.ID, name)
	}
	for label, value := range o.Labels {
		if !slices.Contains(movedLabels, label) && !strings.HasPrefix(label, labelMutable) {
			return fmt.Errorf("%w: the record of volume %s has the label %q, which this version does not know; bring both nodes to one version", errdefs.ErrUnsupported, o.ID, label)
		}
		if len(value) > mostUserLabel {
			return fmt.Errorf("%w: the label %q of volume %s has %d bytes, %d are the most", errdefs.ErrUnsupported, label, o.ID, len(value), mostUserLabel)
		}
	}
	return nil
}

// Arrive makes a volume of what was brought. The cluster says that it is this node's. That it is a volume already is success; ErrNotFound if it is
// neither, also while bytes are missing.
func (l *Local) Arrive(ctx context.Context, id ID) (err error) {
	ctx, end := trace.Start(ctx, "take over a volume that has moved", "volume", id.String())
	defer func() { end(err) }()
	pool, ref, err := l.object(id, blockdev.Volume)
	if err != nil {
		return err
	}
	_, err = pool.SetLabels(ctx, ref, func(labels map[string]string) error {
		if label := labels[labelImport]; label != "" && !strings.HasSuffix(label, "/"+brought) {
			return fmt.Errorf("%w: not all bytes of volume %s are on node %s", errdefs.ErrNotFound, id, l.node)
		}
		delete(labels, labelImport)
		return nil
	})
	return err
}
