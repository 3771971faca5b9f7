package lvmpool

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"time"

	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/extents"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lvm2"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/persistent"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// The metadata of a thin pool says which blocks each of its volumes has, and which of them two share. It is read while the thin pool works, from a
// snapshot of the metadata (reserve_metadata_snap of Documentation/admin-guide/device-mapper/thin-provisioning.rst). A thin pool has at most one such
// snapshot, and keeps deleted blocks for it, also across reboots. So ours is there only while it is read. Before it is made the thin pool gets a tag, by
// which a start finds and releases what a crash left.

// tagMetadata is the tag of a thin pool while there is a snapshot of ours of its metadata.
const tagMetadata = "ashlar-metadata-snapshot"

// mostRanges bounds how many ranges are kept in memory, 16 bytes each. They are kept so that the snapshot is not held while a caller takes its time.
var mostRanges = 1 << 18

// cannotRead is the error for metadata that cannot be read now, or on this machine. The volumes can be read in its place.
type cannotRead struct{ error }

func (e cannotRead) Unwrap() error { return e.error }

// mapped passes on the ranges, from an offset on, in which a thin volume has blocks; with a base, those in which its blocks are not the base's, which
// includes blocks that only one of the two has. Ranges are whole blocks of the thin pool, up to size. next is up to where all was passed on, also with an
// error; after cannotRead the caller can go on there in another way.
//
// It reads the metadata itself. thin_delta of thin-provisioning-tools 1.0.0 to 1.0.4 takes blocks that follow each other in a volume for blocks that
// follow each other in the thin pool (RunBuilder in src/thin/delta.rs), and so says of many that were written that they are the same.
func (p *pool) mapped(ctx context.Context, base, target blockdev.Ref, size, from int64, yield func(blockdev.Extent) error) (next int64, err error) {
	var numbers []uint64 // of the target, and of the base if there is one
	for _, ref := range []blockdev.Ref{target, base} {
		if ref == (blockdev.Ref{}) {
			continue
		}
		number, err := p.thinID(ctx, ref)
		if err != nil {
			return from, cannotRead{err}
		}
		numbers = append(numbers, number)
	}
	w := &extents.Writer{Yield: yield}
	for next = from; ; {
		found, whole, err := p.readMetadata(ctx, numbers, size, next)
		if err != nil {
			if failure := w.Flush(); failure != nil {
				err = failure
			}
			return next, err
		}
		for _, e := range found {
			if err := w.Add(e); err != nil {
				return next, err
			}
			next = e.Offset + e.Length
		}
		if whole {
			return size, w.Flush()
		}
	}
}

// thinID returns the number that a thin volume has in its thin pool, by lvm2.
func (p *pool) thinID(ctx context.Context, ref blockdev.Ref) (uint64, error) {
	rows, err := p.lvm.Run(ctx, "lvs", "-o", "lv_name,thin_id", p.path(ref.String()))
	if err != nil {
		return 0, err
	}
	var id uint64
	if len(rows) == 1 {
		id, err = strconv.ParseUint(rows[0]["thin_id"], 10, 32)
	}
	if len(rows) != 1 || err != nil {
		return 0, fmt.Errorf("%w: lvm2 does not say which thin volume %s is", errdefs.ErrUnavailable, ref)
	}
	return id, nil
}

// errEnough ends the reading when mostRanges are found.
var errEnough = errors.New("enough for now")

// readMetadata returns ranges of the thin volume numbers[0], from an offset on, by a snapshot of the metadata: those that it has, or with numbers[1] those
// in which the two differ. whole is false if there are more. cannotRead if it fails.
func (p *pool) readMetadata(ctx context.Context, numbers []uint64, size, from int64) (found []blockdev.Extent, whole bool, err error) {
	err = p.withMetadata(ctx, func(device string) error {
		m, err := openMetadata(device)
		if err != nil {
			return err
		}
		defer m.Close()
		seen, err := m.view()
		if err != nil {
			return err
		}
		err = m.list(seen, numbers, size, from, func(e blockdev.Extent) error {
			if last := len(found) - 1; last >= 0 && found[last].Offset+found[last].Length == e.Offset {
				found[last].Length += e.Length
				return ctx.Err()
			}
			if len(found) == mostRanges {
				return errEnough
			}
			found = append(found, e)
			return ctx.Err()
		})
		if err != nil && !errors.Is(err, errEnough) {
			return err
		}
		if still := p.stillHeld(device, seen); still != nil {
			return still
		}
		return err
	})
	if errors.Is(err, errEnough) {
		return found, false, nil
	}
	if err != nil && ctx.Err() == nil {
		err = cannotRead{err}
	}
	return found, true, err
}

// list calls visit with the blocks, in bytes, that a thin volume has; with a second one, those in which the two differ. It is for the first size bytes, from
// the block at an offset on.
func (m metadataFile) list(seen view, numbers []uint64, size, from int64, visit func(blockdev.Extent) error) error {
	var roots []uint64
	for _, number := range numbers {
		root, err := m.blocksOf(seen, number)
		if err != nil {
			return err
		}
		roots = append(roots, root)
	}
	if from >= size {
		return nil
	}
	block := seen.of.size
	keys := persistent.Span{First: uint64(from / block), End: uint64((size + block - 1) / block)}
	each := func(key uint64) error {
		at := int64(key) * block
		return visit(blockdev.Extent{Offset: at, Length: min(block, size-at)})
	}
	if len(roots) == 1 {
		return m.walk(roots[0], keys, nil, func(key, _ uint64) error { return each(key) })
	}
	return m.differing(roots[1], roots[0], keys, each)
}

// stillHeld returns errdefs.ErrUnavailable unless the thin pool still has the snapshot of the metadata that was seen. If somebody else released it, what was
// read may have been of something else by then.
func (p *pool) stillHeld(metadata string, seen view) error {
	if _, _, err := p.thinNow(); err != nil { // it has the thin pool commit
		return err
	}
	now, err := current(metadata)
	if err == nil && (now.at != seen.at || now.of != seen.of) {
		err = fmt.Errorf("%w: somebody released the snapshot of the thin pool's metadata while it was read", errdefs.ErrUnavailable)
	}
	return err
}

// withMetadata calls read with the path of the thin pool's metadata device, while there is a snapshot of ours of the metadata. Only one call of this
// process has one; others wait. errdefs.ErrInUse if somebody else has a snapshot, which stays; errdefs.ErrUnavailable if the thin pool takes no changes.
// The caller does not have the turn.
func (p *pool) withMetadata(ctx context.Context, read func(device string) error) (err error) {
	select {
	case p.reading <- struct{}{}:
		defer func() { <-p.reading }()
	case <-ctx.Done():
		return ctx.Err()
	}
	use, err := p.thinUse(ctx)
	switch {
	case err != nil:
		return err
	case use.failed(): // a full one takes the message
		return fmt.Errorf("%w: the thin pool takes no changes", errdefs.ErrUnavailable)
	case use.held:
		return fmt.Errorf("%w: somebody else has the snapshot of the thin pool's metadata; if nobody needs it any more: dmsetup message %s 0 release_metadata_snap", errdefs.ErrInUse, use.device)
	}
	metadata, err := p.own(p.device(p.location.Thin) + "_tmeta")
	if err != nil || metadata == nil {
		return errors.Join(err, fmt.Errorf("%w: the thin pool has no device of its metadata", errdefs.ErrUnavailable))
	}
	device, err := dm.Open(metadata, os.O_RDONLY) // this makes its node
	if err != nil {
		return err
	}
	defer device.Close()
	if _, err := p.lvm.Run(ctx, "lvchange", "--addtag", tagMetadata, p.path(p.location.Thin)); err != nil {
		return err
	}
	defer func() {
		// Also if ctx has ended.
		ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTime)
		defer cancel()
		if failure := p.untag(ending); failure != nil {
			klog.FromContext(ctx).Error(failure, "Could not take the tag off the thin pool that says that its metadata is being read; the next start does", "pool", p.name, "tag", tagMetadata)
		}
	}()
	if err := dm.Message(use.device, "reserve_metadata_snap"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dm.Message(use.device, "release_metadata_snap")) }()
	return read(metadata.Path())
}

// releaseTime is how long lvm2 may take to remove the tag of the snapshot.
const releaseTime = 30 * time.Second

func (p *pool) untag(ctx context.Context) error {
	_, err := p.lvm.Run(ctx, "lvchange", "--deltag", tagMetadata, p.path(p.location.Thin))
	return err
}

// releaseMetadata releases the snapshot of the thin pool's metadata that a crash left, by the tag in a report, when the pool is opened. A failure is left
// for the next start.
func (p *pool) releaseMetadata(ctx context.Context, rows []lvm2.Row) {
	if p.location.Thin == "" || !slices.ContainsFunc(rows, func(r lvm2.Row) bool {
		return r["lv_name"] == p.location.Thin && slices.Contains(splitTags(r), tagMetadata)
	}) {
		return
	}
	use, err := p.thinUse(ctx)
	if err == nil && use.held {
		err = dm.Message(use.device, "release_metadata_snap")
	}
	if err == nil {
		err = p.untag(ctx)
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "Could not release the snapshot of the thin pool's metadata that was left; the next start tries again", "pool", p.name, "thinPool", p.path(p.location.Thin))
	}
}
