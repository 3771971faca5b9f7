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

// A volume moves to another node while nobody uses it (docs/decisions/moving.md). Its home seals it (Seal): from then on nothing uses the volume there
// until it is certain that it stays. The new node copies the bytes (CopyIn), as an unfinished copy that nobody can use. Once the cluster says that the
// volume is the new node's, that node makes the copy a volume (Arrive). Only then the old node removes its own (Depart).

// Moves tells whether sealed volumes move.
type Moves interface {
	// Stays returns nil if a volume that is sealed in a pool of this node will not move before its use has ended. ErrPrecondition if the volume is at
	// another home now; ErrUnavailable if that cannot be found out now, or the volume is about to move. If the volume is sealed for its consumer
	// (Sealing.Used), that can no longer pin it after success.
	Stays(ctx context.Context, id ID, pool string, s Sealing) error
	// IsHere returns nil if a volume that is sealed in a pool of this node is still there: it may move right after that. Errors are those of Stays.
	IsHere(ctx context.Context, id ID, pool string, s Sealing) error
}

// Sealing is how a volume is sealed, as its record says.
type Sealing struct {
	Since time.Time // zero if the record's seal cannot be read
	Used  int64     // generation of the claim of the consumer that it is sealed for (SealFor); 0: nobody uses it
	// For is the node that it is sealed for, which copies the bytes. Empty if it was sealed by a driver that did not note it, or a person has decided since
	// that the volume is here (Readopt).
	For string
}

// sealingOf returns how a record is sealed. A seal that cannot be read counts as without a consumer.
func sealingOf(r blockdev.Record) Sealing {
	s, _ := sealOf(r)
	return Sealing{Since: s.since, Used: s.used, For: r.Labels[labelSealedFor]}
}

// SetMoves sets the Moves. It has to be called before anything uses a volume. Without it no sealed volume can be used.
func (l *Local) SetMoves(m Moves) { l.moves = m }

// homeLabels are the labels of a record that are about its use on its node. They do not move.
var homeLabels = []string{labelClaimNode, labelClaimMode, labelClaimRO, labelTarget, labelFlags, labelFrozen, labelExport, labelRead, labelImport, labelSealed, labelSealedFor,
	labelPool, labelCarried, labelLeft, labelTold, labelObject}

// usedLabels are the homeLabels that do move with a volume in use, as its use goes on.
var usedLabels = []string{labelTarget, labelFlags}

// movedLabels are the labels that move with a volume, besides those of mutable parameters.
var movedLabels = []string{labelFilesystem, labelFormat, labelEncryption, labelDiscards, labelHeader, labelSeparate, labelAccess, labelTimeout,
	labelSource, labelNamespace, labelClaim, labelPV, labelMade, labelCame, labelReplicaOf, labelMarks, labelLeg}

// AnyClaims, as the claims of Seal, keeps a seal for whatever count of claims.
const AnyClaims = -1

// Seal seals a volume, unless it is sealed, and returns it as the origin of its move. Origin.Created is the time of the seal: as long as that is the same,
// so are the bytes. A seal is for a count of claims, and for a node. After a further claim it is made anew, as an older driver, which knows no seals, may have
// written; and for another node, so that it is known who has the bytes by that seal. The caller holds the lock of the volume, now and while it reads the
// origin.
//
// ErrInUse while the volume is attached or exported. ErrPrecondition if it has left this node (Left); and with AnyClaims, if it is sealed for its consumer
// (SealFor), who has written elsewhere since.
func (l *Local) Seal(ctx context.Context, id ID, claims int64, to string) (Origin, error) {
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
	if claims != AnyClaims { // the caller says how often the volume was claimed here
		if err := l.notLeft(id, record); err != nil {
			return Origin{}, err
		}
	}
	s, err := sealOf(record)
	if err == nil && claims == AnyClaims && s.used != 0 {
		return Origin{}, fmt.Errorf("%w: volume %s was used while it moved from node %s, which has nothing of what was written since", errdefs.ErrPrecondition, id, l.node)
	}
	anew := err != nil || claims != AnyClaims && (s.claims != claims || s.used != 0)
	if !anew && claims == AnyClaims { // the volume has moved
		to = record.Labels[labelSealedFor]
	}
	if record, err = sealFor(ctx, pool, record, to, anew, seal{claims: claims}); err != nil {
		return Origin{}, err
	}
	from, err := l.sealed(ctx, pool, record)
	if err == nil {
		err = l.sealPower(ctx, pool, record, from.Labels)
	}
	return from, err
}

// movedBoot is in place of the boot ID in the record of an open leg that moves, and all of whose writes are durable. The leg gets the boot ID of the machine
// where it arrives: that has what the old one had acknowledged.
const movedBoot = "-"

// sealPower makes durable what was written to a leg that is open still, as its user died, unless its machine was restarted since. labels are those that move
// with it: they say so (movedBoot).
func (l *Local) sealPower(ctx context.Context, pool blockdev.Pool, record blockdev.Record, labels map[string]string) error {
	s, err := legStateOf(record)
	how, _ := l.exporting()
	if err != nil || s.Closed || how.Boot == "" || s.Boot != how.Boot {
		return nil // a label that is not understood moves as it is
	}
	if err := read(ctx, pool, record.Ref, func(f *os.File) error { return errdefs.FromErrno(f.Sync()) }); err != nil {
		return fmt.Errorf("make durable what was written to leg %s before it moves: %w", IDOf(pool.Name(), record), err)
	}
	s.Boot = movedBoot
	labels[labelLeg] = s.label()
	return nil
}

// seal is since when a volume is sealed, and after how many claims. A seal for a consumer (SealFor) has the generation of its claim: the consumer goes on
// to write, and until the seal ends the record does not change.
type seal struct {
	since  time.Time
	claims int64
	used   int64 // generation of the claim of the consumer; 0: nobody uses the volume
}

func (s seal) label() string {
	label := s.since.UTC().Format(time.RFC3339Nano) + "/" + strconv.FormatInt(s.claims, 10)
	if s.used > 0 {
		label += "/" + strconv.FormatInt(s.used, 10)
	}
	return label
}

// sealTime returns the time for a new seal or description: now, in microseconds. If the clock was set back, or is behind that of the node from which the
// volume came, it is still later than any time that the record says was told before.
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

// setTold notes in the labels of a record that a time was told to others.
func setTold(labels map[string]string, at time.Time) {
	labels[labelTold] = at.UTC().Format(time.RFC3339Nano)
}

// sealFor writes a seal for a node into the record of a volume, with the time of now, if there is none for that node, or it is to be made anew. Whom a seal
// is for is added if a driver that did not note it has made it.
func sealFor(ctx context.Context, pool blockdev.Pool, record blockdev.Record, to string, anew bool, s seal) (blockdev.Record, error) {
	is := record.Labels[labelSealedFor]
	if !anew && is == to {
		return record, nil
	}
	anew = anew || is != ""
	s.since = sealTime(record)
	return pool.SetLabels(ctx, record.Ref, func(labels map[string]string) error {
		setLabel(labels, labelSealedFor, to)
		if anew {
			labels[labelSealed] = s.label()
			setTold(labels, s.since)
		}
		return nil
	})
}

// sealOf returns the seal of a record; ErrPrecondition if there is none, or it cannot be read.
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

// sectorOf returns the logical sector of an object's devices, in bytes.
func sectorOf(ctx context.Context, pool blockdev.Pool, ref blockdev.Ref) (sector int64, err error) {
	err = read(ctx, pool, ref, func(f *os.File) error {
		size, err := ioctl.SectorSize(f)
		sector = int64(size)
		return errdefs.FromErrno(err)
	})
	return sector, err
}

// describe returns a volume as the origin of a move, without its bytes.
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
		labels[labelMarks] = markingOf(record).off().label() // the marks do not move
	}
	return Origin{ID: id, Pool: pool.Name(), Size: record.Size, Sector: sector, Contents: contentsOf(record),
		Format: parseFormat(record.Labels[labelFormat]), Header: parseHeader(record.Labels[labelHeader]), Labels: labels}, nil
}

// sealed returns a sealed volume as the origin of its move. Origin.Read fails with ErrUnavailable once the seal or the size has changed. ErrUnsupported if
// the pool cannot list what its volumes hold.
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

// Unseal ends the seal of a volume of this node if it stays, so that it can be used. Errors are those of Moves.Stays, and ErrPrecondition if it has left
// (Left).
func (l *Local) Unseal(ctx context.Context, id ID) error {
	pool, record, err := l.finishedRecord(ctx, id)
	if err != nil {
		return errdefs.IgnoreNotFound(err) // the caller will find that it is missing
	}
	return l.unseal(ctx, pool, record)
}

// unseal is Unseal for a volume whose record the caller has.
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
	if err := moves.Stays(ctx, id, pool.Name(), sealingOf(record)); err != nil {
		return fmt.Errorf("use volume %s, which is about to move: %w", id, err)
	}
	_, err = pool.SetLabels(ctx, record.Ref, func(labels map[string]string) error {
		delete(labels, labelSealed)
		delete(labels, labelSealedFor)
		return nil
	})
	return err
}

// stillHere returns an error if a sealed record may be of a volume that has moved: then its bytes lack what was written since. A seal for a consumer is
// ended first (Unseal).
func (l *Local) stillHere(ctx context.Context, id ID, pool string, record blockdev.Record) error {
	if record.Labels[labelSealed] == "" {
		return nil
	}
	if err := l.notLeft(id, record); err != nil {
		return err
	}
	if s, err := sealOf(record); err == nil && s.used != 0 {
		return l.Unseal(ctx, id) // or the consumer could go on to write elsewhere
	}
	moves, err := l.movesOf(id)
	if err == nil {
		err = moves.IsHere(ctx, id, pool, sealingOf(record))
	}
	if err != nil {
		return fmt.Errorf("copy volume %s, which may have moved: %w", id, err)
	}
	return nil
}

// movesOf returns the Moves; ErrUnavailable outside of a cluster.
func (l *Local) movesOf(id ID) (Moves, error) {
	if l.moves == nil {
		return nil, fmt.Errorf("%w: volume %s was about to move to another node of a cluster, and only there is known whether it has; start the driver as a node of that (--mode=node)", errdefs.ErrUnavailable, id)
	}
	return l.moves, nil
}

// makeOurs ends what keeps this node from using its own volume: all exports, and the seal of a move that has not come to pass.
func (l *Local) makeOurs(ctx context.Context, id ID) error {
	if err := l.Unexport(ctx, id, 0); err != nil {
		return err
	}
	if err := l.endAllReading(ctx, id); err != nil {
		return err
	}
	return l.Unseal(ctx, id)
}

// Left records durably that a volume has moved to another node, by the seal of a time. The API server may later be restored to a state before the move,
// and say that the volume is here, although only the new node has what was written since. So nobody uses what is here, whatever the API server says, until
// a person adopts it (Readopt). A record without that seal is not what has moved, and stays as it is. The caller holds the lock of the volume.
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

// Readopt lifts Left from what a pool has of a volume: if the cluster says so, it is the volume again, and the node that it was sealed for is not asked whether
// it has taken it over. A person has decided that, knowing that the volume had left this node, or might have. The caller holds the lock of the volume.
func (l *Local) Readopt(ctx context.Context, in string, id ID) error {
	pool, record, err := l.recordAt(ctx, place{id, in})
	if err != nil || record.Labels[labelLeft] == "" && record.Labels[labelSealedFor] == "" {
		return err
	}
	_, err = pool.SetLabels(ctx, record.Ref, func(labels map[string]string) error {
		delete(labels, labelLeft)
		delete(labels, labelSealedFor)
		return nil
	})
	return err
}

// notLeft returns ErrPrecondition if a record is of a volume that has left this node (Left).
func (l *Local) notLeft(id ID, record blockdev.Record) error {
	if to := record.Labels[labelLeft]; to != "" {
		return fmt.Errorf("%w: %s", errdefs.ErrPrecondition, l.hasLeft(id, to))
	}
	return nil
}

// hasLeft returns the message for a volume that has left this node while the cluster says that it is here, and what to do.
func (l *Local) hasLeft(id ID, to string) string {
	return fmt.Sprintf("volume %s has moved from node %s to node %s, which has what was written since, and the cluster says that it is here: it went back to before that. Nothing here is used. Delete the object of the volume, "+
		"which deletes no bytes, and adopt what node %s has (kubectl ashlar adopt), or if that is gone for good what is here", id, l.node, to, to)
}

// ReasonMovedAway is the reason of the problem of a volume that has left this node (Left), while the cluster says that it is here.
const ReasonMovedAway = "MovedAway"

// leftHealth returns the problem of such a volume.
func (l *Local) leftHealth(v Volume) []blockdev.Problem {
	if v.Left == "" {
		return nil
	}
	return []blockdev.Problem{{Severity: blockdev.Inaccessible, Reason: ReasonMovedAway, Message: l.hasLeft(v.ID, v.Left)}}
}

// Depart removes a volume that has moved by the seal of a time, after it has arrived at the new node. Success if there is none here. ErrPrecondition if it
// has not that seal: then it is not what has moved. ErrInUse while it is attached.
func (l *Local) Depart(ctx context.Context, id ID, sealed time.Time) error {
	pool, record, err := l.finishedRecord(ctx, id)
	if err != nil {
		return errdefs.IgnoreNotFound(err)
	}
	return l.depart(ctx, pool, record, sealed)
}

// depart is Depart for a volume whose record the caller has.
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

// copiedInLabel returns the labelImport of a copy that has all bytes of a volume or snapshot that moves here.
func copiedInLabel(key string, sealed time.Time) string {
	return key + "/" + sealed.UTC().Format(time.RFC3339Nano) + "/" + brought
}

const brought = "all"

// copiedInSeal returns the time of the seal that a copy is of; false unless all bytes are here.
func copiedInSeal(r blockdev.Record) (since time.Time, is bool) {
	parts := strings.Split(r.Labels[labelImport], "/")
	if len(parts) != 3 || parts[2] != brought {
		return since, false
	}
	since, err := time.Parse(time.RFC3339Nano, parts[1])
	return since, err == nil
}

// IsCopiedIn reports whether all bytes of what moves here by the seal of a time are here. Of a snapshot the time is that of its cut.
func (l *Local) IsCopiedIn(ctx context.Context, id ID, sealed time.Time) (bool, error) {
	pool, ref, err := l.object(id, id.Kind)
	if err != nil {
		return false, err
	}
	record, err := pool.Get(ctx, ref)
	return err == nil && (record.Labels[labelImport] == copiedInLabel(id.Key, sealed) || isCut(pool, record, sealed)), errdefs.IgnoreNotFound(err)
}

// CopiedInSeal returns the time of the seal of a volume whose bytes are all here, before Arrive; false if bytes are missing, or it has arrived.
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

// dropLeft removes what a volume that moves here left on this node in an earlier move. Its bytes are superseded if it is sealed, and the volume came by
// that very seal, as its label says (cameBy, labelCame): then the volume has all of that and what was written since. The count of claims alone does not
// show that: it begins anew with an object that was adopted, and goes back with a restored API server. But the object must have counted at least as many
// claims as the seal, so no node alone decides that bytes go. ErrExists for anything else, which may be newer than the volume.
func (l *Local) dropLeft(ctx context.Context, pool blockdev.Pool, record blockdev.Record, cameBy string, claims int64) error {
	s, err := sealOf(record)
	if err != nil || s.claims > claims || !cameFrom(cameBy, s.since) {
		id, at := IDOf(pool.Name(), record), pool.Name()
		return fmt.Errorf("%w: pool %s of node %s has a volume %s of its own, which may be newer, and is not removed; if it is the one to be kept, take the move back, delete the object of the volume, "+
			"which deletes no bytes, and adopt that one: kubectl ashlar adopt %s.%s/%s", errdefs.ErrExists, at, l.node, id, l.node, at, id)
	}
	return l.leave(ctx, pool, record, s)
}

// carriedLabel returns the labelCarried of a copy that was completed while the volume was in use: which object said so, and its generation. Empty if none
// did.
func carriedLabel(from Origin) string {
	if from.Object == "" {
		return ""
	}
	return from.Object + "/" + strconv.FormatInt(from.Generation, 10)
}

// carriedBy returns the UID and generation in the label of carriedLabel; empty for any other record.
func carriedBy(r blockdev.Record) (object string, generation int64) {
	object, counted, _ := strings.Cut(r.Labels[labelCarried], "/")
	generation, _ = strconv.ParseInt(counted, 10, 64) // 0 for the label of an older driver
	return object, generation
}

// dropCopy removes an unfinished copy of what moves here, so that it is copied anew. ErrExists if the copy may have the only writes since an earlier move:
// another object, now gone, had completed it, or this object did at a later generation than it has now, as after the API server was restored.
func (l *Local) dropCopy(ctx context.Context, pool blockdev.Pool, record blockdev.Record, from Origin) error {
	if by, generation := carriedBy(record); by != "" && (by != from.Object || generation > from.Generation) {
		return fmt.Errorf("%w: pool %s of node %s has what may have been written to volume %s since it moved there by an object that is gone, or was later than it is now; take the move back, which makes a stray of that, "+
			"and look which one is to be kept", errdefs.ErrExists, pool.Name(), l.node, IDOf(pool.Name(), record))
	}
	return l.dropUnfinished(ctx, pool, record.Ref)
}

// CopyIn copies the bytes of a volume that moves here to pool in, whichever pool its ID names. Nobody can use them before Arrive. After a call that was
// cut short the next one resumes it, if the seal is still the same. The caller holds the lock of the volume.
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

// beginMove makes the object for the bytes of what moves here, as zeros, with the labels of an unfinished copy.
func (l *Local) beginMove(ctx context.Context, pool blockdev.Pool, name string, provisioning blockdev.Provisioning, from Origin) (blockdev.Record, error) {
	labels := maps.Clone(from.Labels)
	labels[labelImport] = importLabel(from, 0)
	if from.ID.Kind == blockdev.Snapshot {
		labels[labelCutFor] = from.ID.Key // by which older drivers hide it, too
	}
	return l.createMoved(ctx, pool, name, provisioning, from, labels)
}

// createMoved makes an object for what moves here, as zeros.
func (l *Local) createMoved(ctx context.Context, pool blockdev.Pool, name string, provisioning blockdev.Provisioning, from Origin, labels map[string]string) (blockdev.Record, error) {
	if from.ID.Pool != pool.Name() {
		labels[labelPool] = from.ID.Pool
	}
	l.Locate(from.ID, pool.Name())
	return l.create(ctx, pool, blockdev.Spec{Ref: from.ID.ref(), Name: name, Size: sizeIn(pool, from), Provisioning: provisioning, Sector: from.Sector, Labels: labels})
}

// sizeIn returns the size of what moves in a pool, whose granularity may be coarser.
func sizeIn(pool blockdev.Pool, from Origin) int64 {
	g := pool.Granularity()
	return (from.Size + g - 1) / g * g
}

// growMoved grows the object of what moves here to the size of its origin.
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

// checkMove checks the origin of the move of a volume: check, its key, and the labels of its record. Beside movedLabels and mutable parameters it may have
// the labels more.
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

// checkLabels returns ErrUnsupported for an origin whose record has labels that are not known, or too long.
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

// Arrive makes a volume or snapshot of what was copied here. It is for when the cluster says that it is this node's. Success if that is done already;
// ErrNotFound if there is nothing here, or bytes are missing.
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
			setTold(labels, since) // the next seal is later, though this node's clock may be behind that of the old one
		}
		if s, err := legStateOf(blockdev.Record{Labels: labels}); err == nil && s.Boot == movedBoot && labels[labelImport] != "" {
			how, _ := l.exporting()
			s.Boot = how.Boot
			labels[labelLeg] = s.label()
		}
		delete(labels, labelImport)
		delete(labels, labelCarried)
		delete(labels, labelCutFor) // of a snapshot
		return nil
	})
	return err
}

// mostCame is how many seals by which a volume has moved its label keeps.
const mostCame = 8

// came adds a seal to a label of the seals by which a volume has moved. It keeps the last mostCame, separated by slashes.
func came(before string, since time.Time) string {
	all := append(strings.FieldsFunc(before, func(c rune) bool { return c == '/' }), since.UTC().Format(time.RFC3339Nano))
	return strings.Join(all[max(0, len(all)-mostCame):], "/")
}

// cameFrom reports whether a label of came has a seal.
func cameFrom(label string, since time.Time) bool {
	return slices.Contains(strings.Split(label, "/"), since.UTC().Format(time.RFC3339Nano))
}

// CameBy reports whether this node has the volume whole, and the volume has at some time moved by the seal of a time. Then it has all that is in what was
// sealed, and what was written since.
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

// HasTaken reports whether this node may have the only bytes of a volume of another node, which was sealed there for this one since a time: the volume has arrived here
// by that seal, or its user has completed the copy and may have gone on with it alone. An API server that says that the volume never left that node was
// restored to before the move. object and generation are the UID and the generation of the volume's object there. What is in a pool that is not open, or in a
// record that cannot be read, is not known, and does not count: a disk that fails here while a volume is about to move would keep it from being used there.
func (l *Local) HasTaken(ctx context.Context, id ID, sealed time.Time, object string, generation int64) (bool, error) {
	for _, pool := range l.openPools() {
		record, err := pool.Get(ctx, id.ref())
		switch {
		case errors.Is(err, errdefs.ErrNotFound) || errors.Is(err, errdefs.ErrDataLoss):
			continue
		case err != nil:
			return false, fmt.Errorf("look what pool %s has of volume %s: %w", pool.Name(), id, err)
		}
		if tookOver(record, sealed, object, generation) {
			return true, nil
		}
	}
	return false, nil
}

// tookOver is HasTaken for a record.
func tookOver(record blockdev.Record, sealed time.Time, object string, generation int64) bool {
	if unfinished(record) {
		since, is := copiedInSeal(record)
		by, last := carriedBy(record)
		return is && since.Equal(sealed) && by != "" && (by != object || last > generation)
	}
	s, err := sealOf(record)
	kept := err == nil && s.claims == keptClaims && s.since.Equal(sealed)
	return kept || cameFrom(record.Labels[labelCame], sealed)
}

// DropMoved removes what pool in has left of a volume that has moved to another node. It first calls has with the time of the seal, and returns its error:
// nil means that the volume has all of what was sealed. ErrPrecondition if it is not sealed. The caller holds the lock of the volume.
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

// leave removes what is left here of a volume that was sealed, after the end of its export.
func (l *Local) leave(ctx context.Context, pool blockdev.Pool, record blockdev.Record, s seal) error {
	if e, is, err := exportOf(record); err == nil && is { // to the consumer that used it while it moved
		if err := l.unexport(ctx, pool, record, e); err != nil {
			return err
		}
	}
	return l.depart(ctx, pool, record, s.since)
}
