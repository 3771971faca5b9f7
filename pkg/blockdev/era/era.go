// Package era is the target of that name of the device mapper: a device that shows another one, and keeps which of its blocks were written, and since when. It is what the node of a leg has below what it exports
// (docs/replication.md, docs/decisions/replicas.md).
//
// The kernel counts eras, from 1 on, and marks a block in the era in which it is written, durably and before the write goes on. The marks are in the metadata, a device of its own: they outlive crashes and losses of power. Nothing takes
// them off; who has no use for those before an era does not ask for them.
package era

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/ashlar-csi/ashlar/internal/command"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

const (
	target = "era"
	tool   = "era_invalidate" // thin-provisioning-tools
)

// Block is what is to be marked at a time in a device that is made with a size, in bytes: 1 MiB, and more if there would be more than a million. It stays, when the device grows.
func Block(size int64) int64 {
	b := int64(1 << 20)
	for size/b > 1<<20 {
		b *= 2
	}
	return b
}

// Room is what the metadata of a device need, in bytes, a multiple of 4 KiB: an era's bits for each block, of all eras that are not digested yet, and 4 bytes for it, in pages that are written anew and not in place.
func Room(size, block int64) int64 { return 4<<20 + (size/block*8+4095)/4096*4096 }

// Available returns errdefs.ErrUnsupported unless the kernel has the target, and this machine the tool that reads the marks.
func Available() error {
	if err := dm.HasTarget(target); err != nil {
		return fmt.Errorf("%w: %w; load the module dm-era", errdefs.ErrUnsupported, err)
	}
	if _, err := command.Find(tool); err != nil {
		return fmt.Errorf("%w: %w (thin-provisioning-tools)", errdefs.ErrUnsupported, err)
	}
	return nil
}

// Make makes a device over another one, with its metadata on a third: zeros at its beginning are none yet, all else has to be those of this device, with the same block. Each time it is made, or gets another size, an era begins.
func Make(name, uuid string, size, block int64, metadata, below uint64) error {
	return dm.Make(name, uuid, []dm.Line{{Length: size, Kind: target, Text: fmt.Sprintf("%s %s %d", dm.Number(metadata), dm.Number(below), block/512)}})
}

// Begin begins an era, and returns its number: what is written from now on is written since it. What is under way may be marked in it, or in the one before.
func Begin(name string) (era uint32, err error) {
	if err := dm.Message(name, "checkpoint"); err != nil {
		return 0, err
	}
	return current(name)
}

// current is the era that is now, and after it whether there is a snapshot of the metadata.
func current(name string) (era uint32, err error) {
	kind, text, err := dm.Target(name)
	if err == nil && kind != target {
		err = fmt.Errorf("%w: its target is %s", errdefs.ErrPrecondition, kind)
	}
	// "8 15/512 6 -"; "Error" if its metadata failed
	if err == nil {
		var unit, used, all int64
		if _, failure := fmt.Sscanf(text, "%d %d/%d %d", &unit, &used, &all, &era); failure != nil {
			err = fmt.Errorf("%w: the kernel says of it %q", errdefs.ErrDataLoss, text)
		}
	}
	if err != nil {
		return 0, fmt.Errorf("era of device %s: %w", name, err)
	}
	return era, nil
}

// Since returns what was written to a device, which may be in use, since an era: in order, in whole blocks; since era 0, all of it. What is written while it looks may be missing. With any error
// nothing is known: all may have been written. A crash leaves a snapshot of the metadata, which the next call takes away.
func Since(ctx context.Context, name string, era uint32) (written []dm.Range, err error) {
	metadata, block, size, err := parts(name)
	if err == nil {
		err = errors.Join(drop(name), dm.Message(name, "take_metadata_snap"))
	}
	if err != nil {
		return nil, fmt.Errorf("marks of device %s: %w", name, err)
	}
	defer func() { err = errors.Join(err, drop(name)) }()
	whole := false
	err = command.Lines(ctx, func(line []byte) error {
		r, marked, err := parse(line, block, size)
		if marked && err == nil {
			written = append(written, r)
		}
		whole = whole || strings.TrimSpace(string(line)) == "</blocks>"
		return err
	}, tool, "--metadata-snapshot", "--written-since", fmt.Sprint(era), metadata)
	if err == nil && !whole {
		err = fmt.Errorf("%w: %s did not say all", errdefs.ErrUnavailable, tool)
	}
	if err != nil {
		return nil, fmt.Errorf("marks of device %s since era %d: %w", name, era, err)
	}
	return written, nil
}

// parts returns the path of the device that has the metadata, the size of a block, and that of the device.
func parts(name string) (metadata string, block, size int64, err error) {
	d, err := dm.Find(name)
	if err == nil && d == nil {
		err = fmt.Errorf("%w: there is no such device", errdefs.ErrNotFound)
	}
	if err != nil {
		return "", 0, 0, err
	}
	kind, text, err := dm.Table(name)
	var number string
	if err == nil {
		if _, failure := fmt.Sscanf(text, "%s %s %d", &number, new(string), &block); failure != nil || kind != target {
			err = fmt.Errorf("%w: its target is %s", errdefs.ErrPrecondition, kind)
		}
	}
	if err != nil {
		return "", 0, 0, err
	}
	path, err := os.Readlink("/sys/dev/block/" + number)
	if err != nil {
		return "", 0, 0, errdefs.FromErrno(err)
	}
	size, err = d.Size()
	return "/dev/" + filepath.Base(path), block * 512, size, err
}

// drop takes away a snapshot of the metadata, if there is one.
func drop(name string) error {
	_, text, err := dm.Target(name)
	if err != nil || strings.HasSuffix(strings.TrimSpace(text), "-") {
		return err
	}
	return dm.Message(name, "drop_metadata_snap")
}

// parse reads a line of the tool: a block, or a range of them of which the end is not one.
func parse(line []byte, b, size int64) (r dm.Range, marked bool, err error) {
	text := strings.ReplaceAll(strings.TrimSpace(string(line)), " = ", "=")
	var begin, end int64
	switch {
	case text == "" || text == "<blocks>" || text == "</blocks>":
		return r, false, nil
	case strings.HasPrefix(text, "<block "):
		_, err = fmt.Sscanf(text, `<block block="%d"/>`, &begin)
		end = begin + 1
	default:
		_, err = fmt.Sscanf(text, `<range begin="%d" end="%d"/>`, &begin, &end)
	}
	if err != nil || begin < 0 || end <= begin || (end-1)*b >= size {
		return r, false, fmt.Errorf("%w: %s says what is not understood: %q", errdefs.ErrUnsupported, tool, line)
	}
	return dm.Range{Offset: begin * b, Length: min(end*b, size) - begin*b}, true, nil
}
