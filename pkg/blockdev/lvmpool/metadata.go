package lvmpool

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"time"

	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/internal/command"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/extents"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lvm2"
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
func (p *pool) mapped(ctx context.Context, base, target blockdev.Ref, size, from int64, yield func(blockdev.Extent) error) (next int64, err error) {
	argv, err := p.reader(ctx, base, target)
	if err != nil {
		return from, cannotRead{err}
	}
	w := &extents.Writer{Yield: yield}
	for next = from; ; {
		found, whole, err := p.readMetadata(ctx, argv, size, next)
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

// reader returns the command that reads the metadata, without its last argument: the device.
func (p *pool) reader(ctx context.Context, base, target blockdev.Ref) ([]string, error) {
	number := func(ref blockdev.Ref) (string, error) {
		id, err := p.thinID(ctx, ref)
		return strconv.FormatUint(id, 10), err
	}
	after, err := number(target)
	if err != nil || base == (blockdev.Ref{}) {
		return []string{"thin_dump", "--metadata-snap", "--format", "xml", "--dev-id", after}, err
	}
	before, err := number(base)
	return []string{"thin_delta", "--metadata-snap", "--snap1", before, "--snap2", after}, err
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

// readMetadata returns the ranges, from an offset on, that argv finds in a snapshot of the metadata; whole is false if there are more. cannotRead if it
// fails.
func (p *pool) readMetadata(ctx context.Context, argv []string, size, from int64) (found []blockdev.Extent, whole bool, err error) {
	err = p.withMetadata(ctx, func(device string) error {
		block := int64(0)
		return command.Lines(ctx, func(line []byte) error {
			e, ok, err := parseRange(line, &block)
			end := min(e.Offset+e.Length, size)
			if err != nil || !ok || end <= from || e.Offset >= size {
				return err
			}
			e.Offset = max(e.Offset, from/block*block)
			e.Length = end - e.Offset
			if len(found) == mostRanges {
				return errEnough
			}
			found = append(found, e)
			return nil
		}, append(argv, device)...)
	})
	if errors.Is(err, errEnough) {
		return found, false, nil
	}
	if err != nil && ctx.Err() == nil {
		err = cannotRead{err}
	}
	return found, true, err
}

// parseRange reads a line of thin_dump or thin_delta. ok: it is a range, in bytes, that is mapped, or differs. The first line has the size of the blocks,
// which is kept in block. errdefs.ErrUnsupported for a line that is not known.
func parseRange(line []byte, block *int64) (e blockdev.Extent, ok bool, err error) {
	line = bytes.TrimSpace(line)
	number := func(name string) (n int64) {
		_, after, there := bytes.Cut(line, []byte(" "+name+"=\""))
		text, _, _ := bytes.Cut(after, []byte("\""))
		n, failure := strconv.ParseInt(string(text), 10, 64)
		if err == nil && (!there || failure != nil || n < 0 || n > 1<<48) {
			err = fmt.Errorf("%w: what is %s in %q?", errdefs.ErrUnsupported, name, line)
		}
		return n
	}
	kind, _, _ := bytes.Cut(line, []byte(" "))
	switch string(kind) {
	case "<superblock":
		*block = 512 * number("data_block_size")
	case "<range_mapping":
		e, ok = blockdev.Extent{Offset: number("origin_begin"), Length: number("length")}, true
	case "<single_mapping":
		e, ok = blockdev.Extent{Offset: number("origin_block"), Length: 1}, true
	case "<different", "<left_only", "<right_only":
		e, ok = blockdev.Extent{Offset: number("begin"), Length: number("length")}, true
	case "<same", "<diff", "</diff>", "<device", "</device>", "</superblock>", "<def", "</def>", "<ref", "":
	default:
		err = fmt.Errorf("%w: %q", errdefs.ErrUnsupported, line)
	}
	if ok && *block == 0 && err == nil {
		err = fmt.Errorf("%w: there is no size of blocks before %q", errdefs.ErrUnsupported, line)
	}
	if string(kind) == "<def" || string(kind) == "<ref" { // ranges that devices share are not listed with each of them
		err = fmt.Errorf("%w: %q", errdefs.ErrUnsupported, line)
	}
	return blockdev.Extent{Offset: e.Offset * *block, Length: e.Length * *block}, ok, err
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
