package lvmpool

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

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/internal/ioctl"
	"github.com/ashlar-csi/ashlar/internal/progress"
	"github.com/ashlar-csi/ashlar/internal/undoing"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/catalog"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lvm2"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

func (p *pool) Create(ctx context.Context, spec blockdev.Spec) (blockdev.Record, error) {
	if err := p.validate(spec); err != nil {
		return blockdev.Record{}, err
	}
	p.Sweep(ctx, p.remove)
	o, ready, err := p.Begin(ctx, spec, p.remove)
	if err != nil {
		return blockdev.Record{}, err
	}
	if ready {
		return p.Get(ctx, spec.Ref)
	}
	if o == nil {
		o, err = p.begin(ctx, spec)
	} else {
		err = p.OriginStays(o)
	}
	if err == nil {
		err = p.fill(ctx, o, spec)
	}
	if err != nil {
		p.giveUp(ctx, o, spec, err)
		return blockdev.Record{}, fmt.Errorf("create %q in pool %s: %w", spec.Name, p.name, err)
	}
	record := o.Record()
	p.Release(o, false)
	return record, nil
}

func (p *pool) validate(spec blockdev.Spec) error {
	if err := spec.Validate(); err != nil {
		return err
	}
	if spec.Provisioning != blockdev.AnyProvisioning && spec.Provisioning != blockdev.ProvisioningOf(p.location.Thin != "") {
		return fmt.Errorf("%w: pool %s at %s has %s volumes only", errdefs.ErrUnsupported, p.name, p.location, blockdev.ProvisioningOf(p.location.Thin != ""))
	}
	if err := p.checkSize(spec.Size); err != nil {
		return err
	}
	if spec.Origin == (blockdev.Ref{}) {
		return nil
	}
	_, origin, err := p.Lookup(spec.Origin)
	if err == nil && spec.Size < origin.Size {
		err = fmt.Errorf("%w: %d bytes are less than the %d of %s", errdefs.ErrOutOfRange, spec.Size, origin.Size, spec.Origin)
	}
	return err
}

func (p *pool) checkSize(size int64) error {
	if size <= 0 || size%p.extent != 0 || size > blockdev.MaxSize {
		return fmt.Errorf("%w: %d bytes; a multiple of %d up to %d can be had", errdefs.ErrOutOfRange, size, p.extent, blockdev.MaxSize-blockdev.MaxSize%p.extent)
	}
	return nil
}

// atOnce reports whether an object is complete with what lvcreate makes; made is the size of that, in bytes.
func (p *pool) atOnce(spec blockdev.Spec, made int64) bool {
	return p.location.Thin != "" && spec.Prepare == nil && made >= spec.Size
}

// begin promises the space of a new object, and makes the logical volume with its record. The object that it returns, also with an error, is in the
// catalog.
func (p *pool) begin(ctx context.Context, spec blockdev.Spec) (*logical, error) {
	made := spec.Size // the size of what lvcreate makes
	if p.location.Thin != "" && spec.Origin != (blockdev.Ref{}) {
		var err error
		if made, err = p.whole(ctx, spec.Origin); err != nil {
			return nil, err
		}
	}
	o := &logical{Entry: catalog.Begun(blockdev.Record{Ref: spec.Ref, Name: spec.Name, Size: spec.Size, Thin: p.location.Thin != "", Origin: spec.Origin,
		Created: time.Now().UTC(), Labels: maps.Clone(spec.Labels)})}
	var err error
	if o.tags, err = tagsOf(o.Record(), o.State); err != nil {
		return nil, err
	}
	if err := p.reserve(ctx, spec.Size, func() {
		p.Put(o)
		p.space.promised += spec.Size
	}); err != nil {
		return nil, err
	}
	if err := p.OriginStays(o); err != nil {
		return o, err
	}
	err = p.lvm.Hold(ctx, func(run lvm2.Run) error {
		var snapshotOf blockdev.Ref
		if p.location.Thin != "" {
			snapshotOf = spec.Origin
		}
		if err := p.mayChange(run); err != nil {
			return err
		}
		err := p.changeThin(func() error { return p.runHolding(run, snapshotOf, p.lvcreate(spec, made, o.tags)...) })
		switch {
		case err == nil:
			p.countAllocated(spec.Size)
		case errors.Is(err, errdefs.ErrExists):
			return errdefs.Recast(errdefs.ErrPrecondition, err, "a logical volume of that name is there that is not known to this pool; remove or rename it by hand")
		case errors.Is(err, errdefs.ErrNoSpace), errors.Is(err, errdefs.ErrInvalid), errors.Is(err, lvm2.ErrNoLV):
			return err
		default: // nobody knows whether it was made
			p.unreserve(spec.Size)
		}
		p.Mu.Lock()
		defer p.Mu.Unlock()
		if o.made = true; err == nil {
			o.size = made
		}
		return err
	})
	if errors.Is(err, lvm2.ErrNoLV) {
		err = errdefs.Recast(errdefs.ErrDataLoss, err, "somebody removed what it is to be a copy of")
	}
	if err != nil {
		return o, err
	}
	if p.location.Thin != "" && spec.Origin == (blockdev.Ref{}) {
		return o, p.isEmpty(spec.Ref)
	}
	if p.location.Thin != "" && spec.Cut != nil {
		return o, spec.Cut(ctx)
	}
	return o, nil
}

// isEmpty returns errdefs.ErrUnavailable if a new thin volume has bytes. lvm2 gives it the number after the highest that it knows. If the thin pool has a
// volume of that number, lvm2 takes it for the new one (DM_THIN_MESSAGE_CREATE_THIN in device_mapper/libdm-deptree.c of 2.03.16 passes over EEXIST), bytes and all.
// lvm2 itself can leave such a volume: if it cannot suspend the origin of a snapshot that the thin pool has made by then. The new volume has to be removed; the
// one in the thin pool goes with it.
func (p *pool) isEmpty(ref blockdev.Ref) error {
	name := p.device(ref.String())
	mapped, err := mappedBy(name)
	if err != nil {
		return fmt.Errorf("%w: see that the new thin volume %s is empty: %w", errdefs.ErrUnavailable, p.path(ref.String()), err)
	}
	if mapped > 0 {
		return fmt.Errorf("%w: the new thin volume %s has %d bytes of one that the thin pool still had and lvm2 did not know any more; both are removed; try again", errdefs.ErrUnavailable, p.path(ref.String()), mapped)
	}
	return nil
}

// runHolding runs a command that suspends the device of an object, if it has one, and holds that open meanwhile; the zero Ref: none. A device goes with its
// last user, at any time, and lvm2 does not expect that: it may be unable to go on, with the thin pool suspended; and it has a thin pool make a snapshot by
// suspending the origin's device, and takes it for made if there is none any more (_lv_suspend in lib/activate/activate.c of 2.03.16). Then the snapshot has
// no bytes, and lvm2 refuses every change of the thin pool (ErrDisagree). The caller has the turn.
func (p *pool) runHolding(run lvm2.Run, ref blockdev.Ref, command ...string) error {
	if ref != (blockdev.Ref{}) {
		base, err := p.own(p.device(ref.String()))
		if err != nil {
			return err
		}
		if base != nil && base.Suspended { // lvm2 passes over it, as over one that has gone
			return fmt.Errorf("%w: somebody suspended %s; end that (dmsetup resume %s)", errdefs.ErrUnavailable, p.path(ref.String()), base.Name)
		}
		if base != nil && base.Live {
			held, err := dm.Open(base, os.O_RDONLY)
			if err == nil {
				defer held.Close()
			} else if !dm.Vanished(err) {
				return err
			}
		}
	}
	_, err := run(command...)
	return err
}

// lvcreate returns the command that makes the logical volume of a spec; made is the size that it then has, in bytes.
func (p *pool) lvcreate(spec blockdev.Spec, made int64, tags []string) []string {
	// -ky: it is not activated by whoever activates all volumes at boot (lvcreate(8)).
	args := []string{"lvcreate", "-n", spec.Ref.String()}
	if p.atOnce(spec, made) && spec.Origin != (blockdev.Ref{}) {
		args = append(args, "-an")
	} else { // to be filled, or to see that it is empty
		args = append(args, "-ay", "-K")
	}
	args = append(args, addTags(tags)...)
	switch {
	case p.location.Thin == "":
		return append(args, "-ky", "-Wn", "-Zn", "-l", strconv.FormatInt(spec.Size/p.extent, 10), p.location.Group)
	case spec.Origin == (blockdev.Ref{}):
		return append(args, "-ky", "-V", strconv.FormatInt(spec.Size, 10)+"b", "--thinpool", p.location.Thin, p.location.Group)
	}
	return append(args, "-s", "-ky", p.path(spec.Origin.String()))
}

// giveUp removes an unfinished object after an error. If cause says that no time is left, it releases it: the next call goes on with its copy, or removes
// it.
func (p *pool) giveUp(ctx context.Context, o *logical, spec blockdev.Spec, cause error) {
	if o == nil {
		return
	}
	if errors.Is(cause, context.Canceled) || errors.Is(cause, context.DeadlineExceeded) { // no time is left
		p.Release(o, o.Copied > 0 && (o.source != "" || spec.Origin.Kind != blockdev.Volume))
		return
	}
	ctx, cancel := undoing.Context(ctx)
	defer cancel()
	_ = p.remove(ctx, o) // the next sweep tries again
}

// fill makes the bytes of a new object, and then the object ready. That is a change of its own also if there are no bytes to make: lvm2 writes down a thin
// volume before the thin pool has it, and does not make up for that after a crash in between.
func (p *pool) fill(ctx context.Context, o *logical, spec blockdev.Spec) error {
	if p.atOnce(spec, p.known(o).size) {
		if spec.Origin == (blockdev.Ref{}) {
			if _, err := dm.Remove(p.device(spec.Ref.String())); err != nil {
				return err
			}
			p.removeNodes(spec.Ref.String())
		}
		return p.save(ctx, o, o.Record())
	}
	d, err := p.activateObject(ctx, o, spec.Ref)
	if err != nil {
		return err
	}
	target, err := dm.Open(d, os.O_RDWR|unix.O_DIRECT)
	if err != nil {
		return err
	}
	defer target.Close()
	if err := p.hasSector(target, spec.Sector); err != nil { // before anything is written, which may take hours
		return err
	}
	// From here on the device goes with its last user, and so with the driver.
	if _, err := dm.Remove(d.Name); err != nil {
		return err
	}
	record := o.Record()
	switch {
	case p.location.Thin == "" && spec.Origin == (blockdev.Ref{}):
		progress.Begin(ctx, o.Copied, spec.Size)
		o.Copied, err = zeroFrom(ctx, target, o.Copied, spec.Size)
	case p.location.Thin == "":
		if err = p.copyOrigin(ctx, o, target, spec); err == nil && o.source != "" {
			record.Created = o.cut
		}
	case p.known(o).size < spec.Size: // a copy of a smaller origin
		err = p.lvm.Hold(ctx, func(run lvm2.Run) error { return p.extend(run, o, spec.Ref, spec.Size) })
	}
	if err == nil && spec.Prepare != nil {
		err = spec.Prepare(ctx, d.Path())
	}
	if err != nil {
		return err
	}
	if err := target.Sync(); err != nil {
		return fmt.Errorf("sync %s: %w", d.Path(), errdefs.FromErrno(err))
	}
	if err := p.dropCut(ctx, o); err != nil {
		return err
	}
	target.Close()
	if err := p.save(ctx, o, record); err != nil {
		return err
	}
	p.removeNodes(spec.Ref.String())
	return nil
}

// hasSector returns errdefs.ErrUnsupported if the logical sector of a device is larger than is asked for; 0: any will do.
func (p *pool) hasSector(f *os.File, sector int64) error {
	if sector == 0 {
		return nil
	}
	has, err := ioctl.SectorSize(f)
	if err != nil {
		return fmt.Errorf("sector of %s: %w", f.Name(), errdefs.FromErrno(err))
	}
	if int64(has) > sector {
		return fmt.Errorf("%w: the sectors of pool %s have %d bytes, and not %d or less, as what comes there needs; choose another pool", errdefs.ErrUnsupported, p.name, has, sector)
	}
	return nil
}

// extend makes a logical volume larger, by the extents where, or by any. The caller has the turn.
func (p *pool) extend(run lvm2.Run, o *logical, ref blockdev.Ref, size int64, where ...string) error {
	err := p.runHolding(run, ref, append([]string{"lvextend", "-L", strconv.FormatInt(size, 10) + "b", p.path(ref.String())}, where...)...)
	if err == nil {
		p.Mu.Lock()
		o.size = size
		p.Mu.Unlock()
	}
	return err
}

// CutsAtOnce: see blockdev.Cutter. lvm2 suspends the logical volume for the moment of the cut.
func (p *pool) CutsAtOnce(blockdev.Ref) bool { return true }

// cutSize returns the size of the cut of a volume of size bytes: all of the volume may change while it is copied, and each chunk of 64 KiB has an entry of
// 16 bytes.
func (p *pool) cutSize(size int64) int64 {
	return (size+size/2048+p.extent-1)/p.extent*p.extent + p.extent
}

// copyOrigin makes the target a copy of the origin, or goes on with one. If somebody may be writing to the origin, it is copied from a cut (makeCut),
// which stays for as long as the copy takes.
func (p *pool) copyOrigin(ctx context.Context, o *logical, target *os.File, spec blockdev.Spec) error {
	_, origin, err := p.Lookup(spec.Origin)
	if err != nil {
		return err
	}
	if o.source == "" && !o.origin.Equal(origin.Created) {
		o.Copied, o.origin = 0, origin.Created
	}
	writable, _, err := p.devicesInUse(ctx, spec.Origin)
	if err != nil {
		return err
	}
	if o.source == "" && writable != nil {
		if err := p.makeCut(ctx, o, spec); err != nil {
			return err
		}
	}
	if o.source != "" && spec.Cut != nil { // also for a cut of an earlier call: writers need not wait for the rest
		if err := spec.Cut(ctx); err != nil {
			return err
		}
	}
	var from *os.File
	if o.source == "" {
		if from, _, err = p.openForReading(ctx, spec.Origin); err != nil {
			return err
		}
	} else {
		d, err := p.activate(ctx, o.source)
		if err == nil {
			from, err = dm.Open(d, os.O_RDONLY|unix.O_DIRECT)
		}
		if err != nil {
			return errdefs.Recast(errdefs.ErrUnavailable, err, "what it is copied from cannot be brought up")
		}
	}
	defer from.Close()
	progress.Begin(ctx, o.Copied, spec.Size)
	o.Copied, err = copyDevice(ctx, target, from, o.Copied, origin.Size)
	if err == nil {
		err = zeroRange(ctx, target, origin.Size, spec.Size)
	}
	return err
}

// cutPrefix begins the name of a cut: what a copy is made from.
const cutPrefix = "cut."

// makeCut makes the cut of a copy: a snapshot of lvm2's of the origin (dm-snapshot), which is no object. errdefs.ErrNoSpace if there is no room for what
// changes in the origin.
func (p *pool) makeCut(ctx context.Context, o *logical, spec blockdev.Spec) error {
	size := p.cutSize(o.Size())
	if err := p.reserve(ctx, size, func() {}); err != nil {
		return fmt.Errorf("it is written to while it is copied, and there is no room for what changes: %w", err)
	}
	name := cutPrefix + spec.Ref.String()
	o.cut = time.Now().UTC()
	return p.lvm.Hold(ctx, func(run lvm2.Run) error {
		if err := p.stillGroup(run); err != nil {
			p.unreserve(size)
			return err
		}
		err := p.runHolding(run, spec.Origin, "lvcreate", "-s", "-kn", "-c", "64k", "--addtag", tagOurs, "-n", name,
			"-l", strconv.FormatInt(size/p.extent, 10), p.path(spec.Origin.String()))
		if err == nil {
			p.countAllocated(size)
		} else {
			p.unreserve(size)
		}
		if err == nil || !lvm2.Refused(err) {
			o.source, o.Copied = name, 0
		}
		return err
	})
}

// dropCuts removes the cuts of all unfinished copies of an object, which then begin anew. errdefs.ErrBusy while one of these copies is being removed.
func (p *pool) dropCuts(ctx context.Context, origin blockdev.Ref) error {
	copies, release, err := p.ClaimCopies(origin)
	if err != nil {
		return err
	}
	defer release()
	for _, o := range copies {
		if err := p.dropCut(ctx, o); err != nil {
			return err
		}
	}
	return nil
}

// dropCut removes the cut of a copy, if it has one. What was copied so far counts for nothing then.
func (p *pool) dropCut(ctx context.Context, o *logical) error {
	if o.source == "" {
		return nil
	}
	if err := p.endCut(ctx, o.source, p.cutSize(o.Size())); err != nil {
		return err
	}
	o.source, o.Copied = "", 0
	return nil
}

// endCut removes a cut, after it has erased what the cut keeps of the beginning of its origin; size is what that frees, in bytes. A cut that cannot be
// erased is removed all the same, and that is logged: the copy, and all who wait for it, do not depend on it.
func (p *pool) endCut(ctx context.Context, cut string, size int64) error {
	if err := p.eraseCut(ctx, cut); err != nil && ctx.Err() != nil {
		return err
	} else if err != nil {
		klog.FromContext(ctx).Error(err, "Could not overwrite the beginning of what a cut kept; removing it all the same", "pool", p.name, "volume", p.path(cut))
	}
	return p.drop(ctx, cut, size)
}

func (p *pool) Expand(ctx context.Context, ref blockdev.Ref, size int64) (blockdev.Record, error) {
	o, record, err := p.Lookup(ref)
	if err != nil {
		return blockdev.Record{}, err
	}
	if ref.Kind != blockdev.Volume {
		return blockdev.Record{}, fmt.Errorf("%w: a snapshot does not grow", errdefs.ErrInvalid)
	}
	if size > record.Size {
		if err := p.checkSize(size); err != nil {
			return blockdev.Record{}, err
		}
	}
	// whole asks lvm2, as only a report shows what a growth that was cut short has done.
	have, err := p.whole(ctx, ref)
	if err != nil {
		return blockdev.Record{}, fmt.Errorf("expand %s in pool %s: %w", ref, p.name, err)
	}
	if size = max(size, have); size > record.Size {
		if err := p.grow(ctx, o, record, size); err != nil {
			return blockdev.Record{}, fmt.Errorf("expand %s in pool %s to %d bytes: %w", ref, p.name, size, err)
		}
	}
	// Also with nothing to grow: a crash may have come between the growth and this.
	if err := p.resize(ref, o); err != nil {
		return blockdev.Record{}, err
	}
	return p.Get(ctx, ref)
}

// whole returns the size of the logical volume of a ready object. errdefs.ErrDataLoss if it is gone, or smaller than the record says: what is lost is not
// made anew.
func (p *pool) whole(ctx context.Context, ref blockdev.Ref) (size int64, err error) {
	if err := p.refresh(ctx, lvmFresh); err != nil {
		return 0, err
	}
	o, record, err := p.Lookup(ref)
	if err != nil {
		return 0, err
	}
	p.Mu.Lock()
	defer p.Mu.Unlock()
	if o.missing {
		return 0, fmt.Errorf("%w: the logical volume %s is gone; restore it from a backup, or delete the volume", errdefs.ErrDataLoss, p.path(ref.String()))
	}
	if o.size < record.Size {
		return 0, p.truncated(record, o.size)
	}
	return o.size, nil
}

// growStep is how much a volume grows by at once, in bytes. When a call runs out of time, the steps that it has done stay with the volume, and the next
// call goes on from there. The record has the new size when all steps are done.
const growStep = 8 << 30

// grow promises and takes the space in steps of growStep, and then writes the size into the record.
func (p *pool) grow(ctx context.Context, o *logical, record blockdev.Record, size int64) error {
	if err := errors.Join(p.dropCuts(ctx, record.Ref), p.dropSpare(ctx, o)); err != nil {
		return err
	}
	promise := size - record.Size
	have := p.known(o).size // after a growth that was cut short, more than the record says
	if size > have {
		if err := p.reserve(ctx, size-have, func() { p.space.promised += promise }); err != nil {
			return err
		}
		progress.Begin(ctx, 0, size-have)
		var err error
		for at := have; err == nil && at < size; at = p.known(o).size {
			err = p.enlarge(ctx, o, record.Ref, at, min(size, at+growStep-growStep%p.extent))
		}
		if err != nil {
			p.Mu.Lock()
			p.space.pending -= size - o.size
			p.space.promised -= promise
			p.space.at = time.Time{}
			p.Mu.Unlock()
			return p.gone(o, err)
		}
	} else {
		p.Mu.Lock()
		p.space.promised += promise
		p.Mu.Unlock()
	}
	if err := p.saveSize(ctx, o, size); err != nil {
		p.Mu.Lock()
		p.space.promised -= promise
		p.Mu.Unlock()
		return err
	}
	return nil
}

func (p *pool) saveSize(ctx context.Context, o *logical, size int64) error {
	end, err := p.BeginChange(ctx, o)
	if err != nil {
		return err
	}
	defer end()
	record := o.Record()
	record.Size = size
	return p.save(ctx, o, record)
}

// spareOf returns the name of the volume in which an object's new extents are zeroed: see enlarge.
func spareOf(ref blockdev.Ref) string { return "grow." + ref.Key }

// dropSpare removes what a growth that was cut short has left.
func (p *pool) dropSpare(ctx context.Context, o *logical) error {
	if !o.spare {
		return nil
	}
	if err := p.drop(ctx, spareOf(o.Ref()), 0); err != nil {
		return err
	}
	p.Mu.Lock()
	defer p.Mu.Unlock()
	o.spare = false
	p.space.at = time.Time{} // it was not counted in the account
	return nil
}

// enlarge grows a logical volume from have to size bytes, which are pending. Linear volumes get only extents that are zeroed: these are a volume of their
// own first (spareOf), and are given over when they are zeroed.
func (p *pool) enlarge(ctx context.Context, o *logical, ref blockdev.Ref, have, size int64) error {
	var where []string
	spare := spareOf(ref)
	if p.location.Thin == "" {
		o.spare = true
		var err error
		if where, err = p.prepareExtents(ctx, spare, size-have); err != nil {
			if ctx.Err() != nil { // no time is left; the next growth removes the spare
				return err
			}
			undo, cancel := undoing.Context(ctx)
			defer cancel()
			return errors.Join(err, p.dropSpare(undo, o))
		}
	}
	return p.lvm.Hold(ctx, func(run lvm2.Run) error {
		if p.location.Thin == "" {
			if err := p.removeAlone(run, spare); err != nil {
				return err
			}
			o.spare = false
			p.removeNodes(spare)
		}
		err := p.extendInto(run, o, ref, size, where)
		if err == nil {
			p.countAllocated(size - have)
		}
		return err
	})
}

// mostPieces is how many ranges of extents a command gets: lvm2's shell takes 64 arguments (MAX_ARGS in tools/tools.h).
const mostPieces = 48

// extendInto is extend by all of many ranges of extents, in several steps. What an error leaves is as with a growth that was cut short. The caller has the
// turn.
func (p *pool) extendInto(run lvm2.Run, o *logical, ref blockdev.Ref, size int64, where []string) error {
	for at := p.known(o).size; len(where) > mostPieces; where = where[mostPieces:] {
		some := where[:mostPieces]
		for _, pieces := range some {
			n, err := extentsOf(pieces)
			if err != nil {
				return err
			}
			at += n * p.extent
		}
		if err := p.extend(run, o, ref, at, some...); err != nil {
			return err
		}
	}
	return p.extend(run, o, ref, size, where...)
}

// extentsOf returns how many extents a range of lvm2's has: DEVICE:FIRST-LAST.
func extentsOf(pieces string) (int64, error) {
	_, numbers, _ := strings.Cut(pieces, ":")
	first, last, ok := strings.Cut(numbers, "-")
	from, err := strconv.ParseInt(first, 10, 64)
	if err == nil && ok {
		var to int64
		if to, err = strconv.ParseInt(last, 10, 64); err == nil && to >= from {
			return to - from + 1, nil
		}
	}
	return 0, fmt.Errorf("%w: lvm2 reports extents %q", errdefs.ErrUnavailable, pieces)
}

// prepareExtents zeroes free extents of the group as a logical volume of their own, and returns their ranges: DEVICE:FIRST-LAST.
func (p *pool) prepareExtents(ctx context.Context, spare string, size int64) ([]string, error) {
	if err := p.lvm.Hold(ctx, func(run lvm2.Run) error {
		if err := p.stillGroup(run); err != nil {
			return err
		}
		// -ky, as in lvcreate: nobody who activates all volumes at boot shows what others have had there.
		_, err := run("lvcreate", "-ay", "-K", "-ky", "-Wn", "-Zn", "--addtag", tagOurs, "-n", spare, "-l", strconv.FormatInt(size/p.extent, 10), p.location.Group)
		return err
	}); err != nil {
		return nil, err
	}
	d, err := p.activate(ctx, spare)
	if err != nil {
		return nil, err
	}
	f, err := dm.Open(d, os.O_RDWR|unix.O_DIRECT)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(zeroRange(ctx, f, 0, size), f.Sync(), f.Close()); err != nil {
		return nil, err
	}
	rows, err := p.lvm.Run(ctx, "lvs", "--segments", "-o", "seg_pe_ranges", p.path(spare))
	var where []string
	for _, r := range rows {
		where = append(where, strings.Fields(r["seg_pe_ranges"])...)
	}
	if err == nil && len(where) == 0 {
		err = fmt.Errorf("%w: lvm2 does not tell the extents of %s", errdefs.ErrUnavailable, p.path(spare))
	}
	return slices.Compact(where), err
}

// resize gives the device for reading the size of its logical volume. The logical volume's own device has it already.
func (p *pool) resize(ref blockdev.Ref, o *logical) error {
	base, err := p.base(ref)
	if err != nil || base == nil {
		return err
	}
	reader, err := p.own(base.Name + readOnlySuffix)
	if err != nil || reader == nil || !reader.Live {
		return err
	}
	return dm.Show(reader.Name, reader.UUID, base.Number, p.known(o).size, true)
}
