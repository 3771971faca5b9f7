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

// A volume moves to another node while nobody uses it (docs/decisions/moving.md). Its home seals it (Seal): from then on nothing here uses it before it is
// certain that it stays. The new node copies the bytes (CopyIn), as an unfinished copy that nobody can use. When the cluster says that the volume is the new
// node's, that node makes the copy a volume (Arrive), and only then the old one removes its own (Depart).

// Moves knows whether volumes move.
type Moves interface {
	// Stays returns nil if a volume that is sealed in a pool of this node will not move before its use has ended. ErrPrecondition if it is not there any more;
	// ErrUnavailable if that cannot be found out now, or it is about to move. used is the generation of the claim of its consumer, if it is sealed for that
	// (SealFor), else 0: then a pin of the volume by that consumer is refused from now on.
	Stays(ctx context.Context, id ID, pool string, used int64) error
	// IsHere returns nil if a volume that is sealed in a pool of this node is still there: it may move right after that. Errors are those of Stays.
	IsHere(ctx context.Context, id ID, pool string) error
}

// SetMoves sets who knows whether volumes move. It has to be called before anything uses a volume; without it no volume moves.
func (l *Local) SetMoves(m Moves) { l.moves = m }

// homeLabels are the labels of a record that are about its use on its node. They do not move.
var homeLabels = []string{labelClaimNode, labelClaimMode, labelClaimRO, labelTarget, labelFlags, labelFrozen, labelExport, labelRead, labelImport, labelSealed,
	labelPool, labelCarried, labelLeft, labelTold}

// usedLabels are those of the homeLabels that move with a volume that is in use, as that use goes on.
var usedLabels = []string{labelTarget, labelFlags}

// movedLabels are the labels that move with a volume, besides those of mutable parameters.
var movedLabels = []string{labelFilesystem, labelFormat, labelEncryption, labelDiscards, labelHeader, labelSeparate, labelAccess, labelTimeout,
	labelSource, labelNamespace, labelClaim, labelPV, labelMade, labelCame, labelReplicaOf, labelMarks, labelLeg}

// AnyClaims, as the claims of Seal, leaves a seal as it is, whatever count it is for.
const AnyClaims = -1

// Seal seals a volume, unless it is sealed, and returns it as the origin of its move. Origin.Created is when it was sealed: as long as that is the same, so
// are the bytes. A seal is for a count of claims, and is made anew after a further claim, as an older driver, which knows no seals, may have written then.
// ErrInUse while the volume is attached or exported. ErrPrecondition for what has left this node (Left); and with AnyClaims, if it is sealed for its consumer
// (SealFor), who went on elsewhere. The caller has the lock, now and while it reads.
func (l *Local) Seal(ctx context.Context, id ID, claims int64) (Origin, error) {
	pool, record, err := l.finishedRecord(ctx, id)
	if err != nil {
		return Origin{}, err
	}
	if IsExported(record) {
		return Origin{}, fmt.Errorf("%w: volume %s is exported", errdefs.ErrInUse, id)
	}
	if err := notRead(record); err != nil {
		return Origin{}, err
	}
	if err := l.unusedHere(ctx, pool, record.Ref); err != nil {
		return Origin{}, err
	}
	if claims != AnyClaims { // which are those of a volume that is said to be here
		if err := l.notLeft(id, record); err != nil {
			return Origin{}, err
		}
	}
	s, err := sealOf(record)
	if err == nil && claims == AnyClaims && s.used != 0 {
		return Origin{}, fmt.Errorf("%w: volume %s was used while it moved from node %s, which has nothing of what was written since", errdefs.ErrPrecondition, id, l.node)
	}
	if err != nil || claims != AnyClaims && (s.claims != claims || s.used != 0) {
		s = seal{since: sealTime(record), claims: claims}
		if record, err = setSeal(ctx, pool, record, s); err != nil {
			return Origin{}, err
		}
	}
	return l.sealed(ctx, pool, record)
}

// seal is since when a volume is sealed, and after how many claims. One for its user says by which claim that uses the volume, which goes on: its record does not
// change, and its bytes are no others than its user's.
type seal struct {
	since  time.Time
	claims int64
	used   int64 // generation; 0: nobody uses it
}

func (s seal) label() string {
	label := s.since.UTC().Format(time.RFC3339Nano) + "/" + strconv.FormatInt(s.claims, 10)
	if s.used > 0 {
		label += "/" + strconv.FormatInt(s.used, 10)
	}
	return label
}

// sealTime is that of a seal, or a description, of now, as it is kept and told: later than all that its record says were told before, also if the clock was set back since.
func sealTime(record blockdev.Record) time.Time {
	before, _ := sealOf(record)
	described, _ := time.Parse(time.RFC3339Nano, record.Labels[labelTold])
	now := time.Now().UTC().Truncate(time.Microsecond)
	for _, told := range []time.Time{before.since, described} {
		if !now.After(told) {
			now = told.Add(time.Microsecond)
		}
	}
	return now
}

// setTold notes in the labels of a record that a time was told.
func setTold(labels map[string]string, at time.Time) {
	labels[labelTold] = at.UTC().Format(time.RFC3339Nano)
}

// setSeal has the record of a volume say how it is sealed.
func setSeal(ctx context.Context, pool blockdev.Pool, record blockdev.Record, s seal) (blockdev.Record, error) {
	return pool.SetLabels(ctx, record.Ref, func(labels map[string]string) error {
		labels[labelSealed] = s.label()
		setTold(labels, s.since)
		return nil
	})
}

// sealOf is the seal of a record; ErrPrecondition if it has none.
func sealOf(r blockdev.Record) (s seal, err error) {
	parts := strings.Split(r.Labels[labelSealed], "/")
	if len(parts) < 2 || len(parts) > 3 {
		parts = []string{"", ""}
	}
	if s.since, err = time.Parse(time.RFC3339Nano, parts[0]); err == nil {
		s.claims, err = strconv.ParseInt(parts[1], 10, 64)
	}
	if err == nil && len(parts) == 3 {
		s.used, err = strconv.ParseInt(parts[2], 10, 64)
	}
	if err != nil {
		return seal{}, fmt.Errorf("%w: the record of volume %s says that it is sealed since %q", errdefs.ErrPrecondition, r.Key, r.Labels[labelSealed])
	}
	return s, nil
}

// sectorOf is the logical sector of an object's devices, in bytes.
func sectorOf(ctx context.Context, pool blockdev.Pool, ref blockdev.Ref) (sector int64, err error) {
	err = read(ctx, pool, ref, func(f *os.File) error {
		size, err := ioctl.SectorSize(f)
		sector = int64(size)
		return errdefs.FromErrno(err)
	})
	return sector, err
}

// describe is a volume as the origin of a move, without its bytes.
func (l *Local) describe(ctx context.Context, pool blockdev.Pool, record blockdev.Record) (Origin, error) {
	id := IDOf(pool.Name(), record)
	sector, err := sectorOf(ctx, pool, record.Ref)
	if err != nil {
		return Origin{}, err
	}
	labels := maps.Clone(record.Labels)
	maps.DeleteFunc(labels, func(label, _ string) bool { return slices.Contains(homeLabels, label) })
	if labels[labelMade] == "" {
		labels[labelMade] = record.Created.UTC().Format(time.RFC3339Nano)
	}
	setLabel(labels, labelSource, sourceOf(pool.Name(), record).String())
	if labels[labelReplicaOf] != "" {
		labels[labelMarks] = markingOf(record).off().label() // they stay behind
	}
	return Origin{ID: id, Pool: pool.Name(), Size: record.Size, Sector: sector, Contents: contentsOf(record),
		Format: parseFormat(record.Labels[labelFormat]), Header: parseHeader(record.Labels[labelHeader]), Labels: labels}, nil
}

// sealed is a volume that is sealed, as the origin of its move.
func (l *Local) sealed(ctx context.Context, pool blockdev.Pool, record blockdev.Record) (Origin, error) {
	differ, ok := blockdev.As[blockdev.Differ](pool)
	if !ok {
		return Origin{}, fmt.Errorf("%w: pool %s cannot list what its volumes hold, so they do not move", errdefs.ErrUnsupported, pool.Name())
	}
	s, err := sealOf(record)
	if err != nil {
		return Origin{}, err
	}
	from, err := l.describe(ctx, pool, record)
	from.Created, from.Claims = s.since, s.claims
	from.Read = func(ctx context.Context, at int64, visit func(int64, []byte) error) error {
		now, err := pool.Get(ctx, record.Ref)
		if err != nil {
			return err
		}
		if now.Labels[labelSealed] != record.Labels[labelSealed] || now.Size != record.Size {
			return fmt.Errorf("%w: volume %s was used meanwhile", errdefs.ErrUnavailable, from.ID)
		}
		return read(ctx, pool, record.Ref, func(f *os.File) error {
			return readAllocated(ctx, differ, record.Ref, f, record.Size, at, visit)
		})
	}
	return from, err
}

// Unseal has a volume of this node that is sealed be used, if it stays; errors are those of Moves.Stays.
func (l *Local) Unseal(ctx context.Context, id ID) error {
	pool, record, err := l.finishedRecord(ctx, id)
	if err != nil {
		return errdefs.IgnoreNotFound(err) // what is missing, whoever uses it finds
	}
	return l.unseal(ctx, pool, record)
}

// unseal is Unseal of a volume by its record.
func (l *Local) unseal(ctx context.Context, pool blockdev.Pool, record blockdev.Record) error {
	if record.Labels[labelSealed] == "" {
		return nil
	}
	id := IDOf(pool.Name(), record)
	if err := l.notLeft(id, record); err != nil {
		return err
	}
	moves, err := l.movesOf(id)
	if err != nil {
		return err
	}
	s, _ := sealOf(record) // one that cannot be read is for nobody
	if err := moves.Stays(ctx, id, pool.Name(), s.used); err != nil {
		return fmt.Errorf("use volume %s, which is about to move: %w", id, err)
	}
	return changeLabel(ctx, pool, record.Ref, labelSealed, "")
}

// stillHere is an error for a record of a pool that is sealed, of a volume that has moved: what was written since is not in its bytes.
func (l *Local) stillHere(ctx context.Context, id ID, pool string, record blockdev.Record) error {
	if record.Labels[labelSealed] == "" {
		return nil
	}
	if err := l.notLeft(id, record); err != nil {
		return err
	}
	if s, err := sealOf(record); err == nil && s.used != 0 {
		return l.Unseal(ctx, id) // or what its user writes may soon be elsewhere
	}
	moves, err := l.movesOf(id)
	if err == nil {
		err = moves.IsHere(ctx, id, pool)
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

// makeOurs ends what keeps this node from using a volume of its own: exports of it, and a move that has not begun to be true.
func (l *Local) makeOurs(ctx context.Context, id ID) error {
	if err := l.Unexport(ctx, id, 0); err != nil {
		return err
	}
	if err := l.endAllReading(ctx, id); err != nil {
		return err
	}
	return l.Unseal(ctx, id)
}

// Left records durably that a volume has moved to another node by the seal of a time. The API server may be restored to before the move, and say that the
// volume is here, while what was written since is on that node alone. So from now on nobody uses what is here, whatever the API server says, before a person
// adopts it (Readopt). If it is not sealed, or by another seal, it is not what has moved, and stays as it is. The caller has the lock.
func (l *Local) Left(ctx context.Context, id ID, sealed time.Time, to string) error {
	pool, record, err := l.finishedRecord(ctx, id)
	if err != nil {
		return errdefs.IgnoreNotFound(err)
	}
	if s, err := sealOf(record); err != nil || !s.since.Equal(sealed) || record.Labels[labelLeft] == to {
		return nil
	}
	return changeLabel(ctx, pool, record.Ref, labelLeft, to)
}

// Readopt has what a pool has of a volume be the volume again, if the cluster says so from now on: a person has decided that, who knows that it has left this node (Left). The caller has the lock.
func (l *Local) Readopt(ctx context.Context, in string, id ID) error {
	pool, record, err := l.recordAt(ctx, place{id, in})
	if err != nil || record.Labels[labelLeft] == "" {
		return err
	}
	return changeLabel(ctx, pool, record.Ref, labelLeft, "")
}

// notLeft is ErrPrecondition for the record of a volume that has left this node.
func (l *Local) notLeft(id ID, record blockdev.Record) error {
	if to := record.Labels[labelLeft]; to != "" {
		return fmt.Errorf("%w: %s", errdefs.ErrPrecondition, l.hasLeft(id, to))
	}
	return nil
}

// hasLeft says what is so of a volume that has left this node, and is said to be here, and what to do.
func (l *Local) hasLeft(id ID, to string) string {
	return fmt.Sprintf("volume %s has moved from node %s to node %s, which has what was written since, and the cluster says that it is here: it went back to before that. Nothing here is used. Delete the object of the volume, "+
		"which deletes no bytes, and adopt what node %s has (kubectl ashlar adopt), or if that is gone for good what is here", id, l.node, to, to)
}

// ReasonMovedAway is the reason of the problem of a volume that has left this node, and is said to be here.
const ReasonMovedAway = "MovedAway"

// leftHealth is what is wrong with a volume that is said to be here, and has left.
func (l *Local) leftHealth(v Volume) []blockdev.Problem {
	if v.Left == "" {
		return nil
	}
	return []blockdev.Problem{{Severity: blockdev.Inaccessible, Reason: ReasonMovedAway, Message: l.hasLeft(v.ID, v.Left)}}
}

// Depart removes a volume that has moved to another node, as it was sealed then, and arrived there; that it is not here is success. ErrPrecondition if it is not
// sealed, or was at another time: then it is not what has moved. ErrInUse while it is attached.
func (l *Local) Depart(ctx context.Context, id ID, sealed time.Time) error {
	pool, record, err := l.finishedRecord(ctx, id)
	if err != nil {
		return errdefs.IgnoreNotFound(err)
	}
	return l.depart(ctx, pool, record, sealed)
}

// depart is Depart for what a pool has.
func (l *Local) depart(ctx context.Context, pool blockdev.Pool, record blockdev.Record, sealed time.Time) error {
	id := IDOf(pool.Name(), record)
	if s, err := sealOf(record); err != nil || !s.since.Equal(sealed) {
		return fmt.Errorf("%w: volume %s of node %s was used after it had moved, or is another one; its bytes stay here", errdefs.ErrPrecondition, id, l.node)
	}
	if err := l.unusedHere(ctx, pool, record.Ref); err != nil {
		return err
	}
	return l.delete(ctx, pool, record.Ref)
}

// copiedInLabel is importLabel of a volume that moves, all of whose bytes are here.
func copiedInLabel(key string, sealed time.Time) string {
	return key + "/" + sealed.UTC().Format(time.RFC3339Nano) + "/" + brought
}

const brought = "all"

// copiedInSeal returns when what a record is of was sealed; false unless all of it was copied here.
func copiedInSeal(r blockdev.Record) (since time.Time, is bool) {
	parts := strings.Split(r.Labels[labelImport], "/")
	if len(parts) != 3 || parts[2] != brought {
		return since, false
	}
	since, err := time.Parse(time.RFC3339Nano, parts[1])
	return since, err == nil
}

// IsCopiedIn reports whether all bytes of a volume or snapshot that moves here are here, by the seal of a time.
func (l *Local) IsCopiedIn(ctx context.Context, id ID, sealed time.Time) (bool, error) {
	pool, ref, err := l.object(id, id.Kind)
	if err != nil {
		return false, err
	}
	record, err := pool.Get(ctx, ref)
	return err == nil && (record.Labels[labelImport] == copiedInLabel(id.Key, sealed) || isCut(pool, record, sealed)), errdefs.IgnoreNotFound(err)
}

// CopiedInSeal returns when a volume was sealed all of whose bytes were copied here; is is false if not all are here, or it is a volume already.
func (l *Local) CopiedInSeal(ctx context.Context, id ID) (since time.Time, is bool, err error) {
	pool, ref, err := l.object(id, blockdev.Volume)
	if err != nil {
		return since, false, err
	}
	record, err := pool.Get(ctx, ref)
	if err != nil {
		return since, false, errdefs.IgnoreNotFound(err)
	}
	since, is = copiedInSeal(record)
	return since, is, nil
}

// dropLeft removes what is here of a volume that had left this node, which was taken for gone then: it is sealed, and the volume came from that very seal, as cameBy says (labelCame), so
// it has all of that and what was written since. Counts of claims alone do not tell: they begin anew with an object that was adopted, and go back with the API server. But no node
// decides alone what goes here: the object has to have counted as many claims as the seal, or more. ErrExists for anything else, which may be newer than the volume.
func (l *Local) dropLeft(ctx context.Context, pool blockdev.Pool, record blockdev.Record, cameBy string, claims int64) error {
	s, err := sealOf(record)
	if err != nil || s.claims > claims || !cameFrom(cameBy, s.since) {
		id, at := IDOf(pool.Name(), record), pool.Name()
		return fmt.Errorf("%w: pool %s of node %s has a volume %s of its own, which may be newer, and is not removed; if it is the one to be kept, take the move back, delete the object of the volume, "+
			"which deletes no bytes, and adopt that one: kubectl ashlar adopt %s.%s/%s", errdefs.ErrExists, at, l.node, id, l.node, at, id)
	}
	return l.leave(ctx, pool, record, s)
}

// carriedLabel is the label of what was completed while its user went on (labelCarried), by the object of an origin.
func carriedLabel(from Origin) string {
	if from.Object == "" {
		return ""
	}
	return from.Object + "/" + strconv.FormatInt(from.Generation, 10)
}

// carriedBy is the UID of the object by which what a record is of was completed while its user went on, and its generation then; empty for anything else.
func carriedBy(r blockdev.Record) (object string, generation int64) {
	object, counted, _ := strings.Cut(r.Labels[labelCarried], "/")
	generation, _ = strconv.ParseInt(counted, 10, 64) // 0 by drivers of before
	return object, generation
}

// dropCopy removes an unfinished copy of what moves here, to make room for what it is now. ErrExists for what may be all there is of what was written to a volume since it moved:
// another object than now said so, and is gone, or this one later than it is now, as it went back with the API server.
func (l *Local) dropCopy(ctx context.Context, pool blockdev.Pool, record blockdev.Record, from Origin) error {
	if by, generation := carriedBy(record); by != "" && (by != from.Object || generation > from.Generation) {
		return fmt.Errorf("%w: pool %s of node %s has what may have been written to volume %s since it moved there by an object that is gone, or was later than it is now; take the move back, which makes a stray of that, "+
			"and look which one is to be kept", errdefs.ErrExists, pool.Name(), l.node, IDOf(pool.Name(), record))
	}
	return l.dropUnfinished(ctx, pool, record.Ref)
}

// CopyIn copies the bytes of a volume that moves here to a pool, whatever pool its ID names. Nobody can use them before Arrive. A call after one that was cut
// short resumes it, if the seal is still the same. The caller has the lock of the volume.
func (l *Local) CopyIn(ctx context.Context, in, name string, provisioning blockdev.Provisioning, from Origin) error {
	if err := from.checkMove(name); err != nil {
		return err
	}
	return l.copyIn(ctx, in, name, provisioning, from)
}

// copyIn is CopyIn for a volume or a snapshot.
func (l *Local) copyIn(ctx context.Context, in, name string, provisioning blockdev.Provisioning, from Origin) error {
	pool, err := l.pool(in)
	if err != nil {
		return err
	}
	ref := from.ID.ref()
	if err := l.alone(ctx, pool, from); err != nil {
		return err
	}
	record, err := pool.Get(ctx, ref)
	whole := err == nil && record.Labels[labelImport] == copiedInLabel(ref.Key, from.Created)
	_, of := imported(record, from)
	if of = of && err == nil; of || whole { // the volume may have grown since, by zeros
		record, err = growMoved(ctx, pool, record, from)
	}
	switch {
	case err == nil && (whole || isCut(pool, record, from.Created)):
		return nil
	case err == nil && !of:
		switch {
		case unfinished(record):
			err = l.dropCopy(ctx, pool, record, from)
		case ref.Kind == blockdev.Snapshot:
			err = fmt.Errorf("%w: pool %s of node %s has a snapshot %s of its own", errdefs.ErrExists, pool.Name(), l.node, from.ID)
		default:
			err = l.dropLeft(ctx, pool, record, from.Labels[labelCame], from.Claims)
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
		return map[string]string{labelImport: copiedInLabel(ref.Key, from.Created)}, nil
	})
	if err != nil {
		err = fmt.Errorf("bring %s to pool %s: %w", from.ID, pool.Name(), err)
		return errors.Join(err, l.giveUp(ctx, pool, ref, err))
	}
	return nil
}

// beginMove makes the object that the bytes go into, as zeros.
func (l *Local) beginMove(ctx context.Context, pool blockdev.Pool, name string, provisioning blockdev.Provisioning, from Origin) (blockdev.Record, error) {
	labels := maps.Clone(from.Labels)
	labels[labelImport] = importLabel(from, 0)
	if from.ID.Kind == blockdev.Snapshot {
		labels[labelCutFor] = from.ID.Key // by which older drivers hide it, too
	}
	return l.createMoved(ctx, pool, name, provisioning, from, labels)
}

// createMoved makes the object of what moves here, as zeros.
func (l *Local) createMoved(ctx context.Context, pool blockdev.Pool, name string, provisioning blockdev.Provisioning, from Origin, labels map[string]string) (blockdev.Record, error) {
	if from.ID.Pool != pool.Name() {
		labels[labelPool] = from.ID.Pool
	}
	l.Locate(from.ID, pool.Name())
	return l.create(ctx, pool, blockdev.Spec{Ref: from.ID.ref(), Name: name, Size: sizeIn(pool, from), Provisioning: provisioning, Sector: from.Sector, Labels: labels})
}

// sizeIn is the size that what moves has in a pool, which may have coarser sizes.
func sizeIn(pool blockdev.Pool, from Origin) int64 {
	g := pool.Granularity()
	return (from.Size + g - 1) / g * g
}

// growMoved grows the object of what moves here to its size.
func growMoved(ctx context.Context, pool blockdev.Pool, record blockdev.Record, from Origin) (blockdev.Record, error) {
	size := sizeIn(pool, from)
	if record.Size >= size {
		return record, nil
	}
	grown, err := pool.Expand(ctx, record.Ref, size)
	if err != nil {
		return record, fmt.Errorf("grow what pool %s has of %s, which has grown: %w", pool.Name(), from.ID, err)
	}
	return grown, nil
}

// checkMove is check of the origin of a move, whose record comes with it; it may have some labels beside those that always move.
func (o Origin) checkMove(name string, more ...string) error {
	if err := o.check(); err != nil {
		return err
	}
	if o.ID.Kind != blockdev.Volume || o.ID.Key != KeyOf(name) {
		return fmt.Errorf("%w: %s is not volume %q", errdefs.ErrUnsupported, o.ID, name)
	}
	return o.checkLabels(func(label string) bool {
		return slices.Contains(movedLabels, label) || slices.Contains(more, label) || strings.HasPrefix(label, labelMutable)
	})
}

// checkLabels is ErrUnsupported for an origin whose record has labels that are not known, or too long.
func (o Origin) checkLabels(known func(label string) bool) error {
	for label, value := range o.Labels {
		if !known(label) {
			return fmt.Errorf("%w: the record of %s has the label %q, which this version does not know; bring both nodes to one version", errdefs.ErrUnsupported, o.ID, label)
		}
		if len(value) > mostUserLabel {
			return fmt.Errorf("%w: the label %q of %s has %d bytes, %d are the most", errdefs.ErrUnsupported, label, o.ID, len(value), mostUserLabel)
		}
	}
	return nil
}

// Arrive makes a volume, or a snapshot, of what was copied here. The cluster says that it is this node's. That it is one already is success; ErrNotFound if
// it is neither, also while bytes are missing.
func (l *Local) Arrive(ctx context.Context, id ID) (err error) {
	ctx, end := trace.Start(ctx, "take over what has moved", "id", id.String())
	defer func() { end(err) }()
	pool, ref, err := l.object(id, id.Kind)
	if err != nil {
		return err
	}
	_, err = pool.SetLabels(ctx, ref, func(labels map[string]string) error {
		if label := labels[labelImport]; label != "" && !strings.HasSuffix(label, "/"+brought) {
			return fmt.Errorf("%w: not all bytes of %s are on node %s", errdefs.ErrNotFound, id, l.node)
		}
		if since, is := copiedInSeal(blockdev.Record{Labels: labels}); is && ref.Kind == blockdev.Volume {
			setLabel(labels, labelCame, came(labels[labelCame], since))
		}
		delete(labels, labelImport)
		delete(labels, labelCarried)
		delete(labels, labelCutFor) // of a snapshot
		return nil
	})
	return err
}

// mostCame is how many of the seals by which a volume has moved are kept.
const mostCame = 8

// came is the label of a volume that has come by a seal, and before by those that a label says: the last ones, separated by slashes.
func came(before string, since time.Time) string {
	all := append(strings.FieldsFunc(before, func(c rune) bool { return c == '/' }), since.UTC().Format(time.RFC3339Nano))
	return strings.Join(all[max(0, len(all)-mostCame):], "/")
}

// cameFrom reports whether a label says that a volume has moved by a seal.
func cameFrom(label string, since time.Time) bool {
	return slices.Contains(strings.Split(label, "/"), since.UTC().Format(time.RFC3339Nano))
}

// CameBy reports whether this node has a volume whole that was brought, be it to here or to where it came here from, as it was sealed at a time on a node that it has left. So what
// it is has all that is sealed there, and what was written since.
func (l *Local) CameBy(ctx context.Context, id ID, sealed time.Time) (bool, error) {
	_, record, err := l.finishedRecord(ctx, id)
	if err != nil {
		return false, errdefs.IgnoreNotFound(err)
	}
	problems, err := l.Health(ctx, id)
	if err != nil || slices.ContainsFunc(problems, func(p blockdev.Problem) bool { return p.Severity == blockdev.DataLoss }) {
		return false, err
	}
	return cameFrom(record.Labels[labelCame], sealed), nil
}

// DropMoved removes what a pool has left of a volume that has moved to another node, if that returns nil for when it was sealed: it has all of that, and what was written since.
// ErrPrecondition for what is not sealed. The caller has the lock of the volume.
func (l *Local) DropMoved(ctx context.Context, in string, id ID, has func(sealed time.Time) error) error {
	pool, record, err := l.recordAt(ctx, place{id, in})
	if err != nil {
		return err
	}
	s, err := sealOf(record)
	if err == nil {
		err = has(s.since)
	}
	if err != nil {
		return err
	}
	return l.leave(ctx, pool, record, s)
}

// leave removes what is left of a volume that was sealed, and what is exported of it still.
func (l *Local) leave(ctx context.Context, pool blockdev.Pool, record blockdev.Record, s seal) error {
	if e, is, err := exportOf(record); err == nil && is { // to who used it while it left
		if err := l.unexport(ctx, pool, record, e); err != nil {
			return err
		}
	}
	return l.depart(ctx, pool, record, s.since)
}
