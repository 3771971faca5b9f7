package volume

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/ashlar-csi/ashlar/internal/trace"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/luks"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
)

// uuidOf returns the UUID that the header of a volume gets: its key, written as a UUID. So the header of another volume is recognised.
func uuidOf(key string) string {
	return fmt.Sprintf("%s-%s-%s-%s-%s", key[:8], key[8:12], key[12:16], key[16:20], key[20:])
}

// copyHeader sets in the labels of a copy what header it has; of is the header of its source, and key the key of the copy. It returns what has to be done to
// the bytes of the copy, in a file or on a device, which may be done again: a whole header gets the UUID of the copy, so that the copy can be open beside its
// source; the header that was cut short is erased.
func copyHeader(labels map[string]string, key string, of Header) func(ctx context.Context, path string) error {
	switch of.State {
	case Formatted:
		labels[labelHeader] = Header{Formatted, uuidOf(key)}.label()
		labels[labelSeparate] = "true"
		return func(ctx context.Context, path string) error { return luks.SetUUID(ctx, path, uuidOf(key)) }
	case Formatting: // nobody has had the source yet, so nothing is behind its header
		labels[labelHeader] = Header{Formatting, uuidOf(key)}.label()
		return luks.Erase
	}
	return func(context.Context, string) error { return nil }
}

// setHeader records the header of a volume, durably, and sets v.Header to it.
func (l *Local) setHeader(ctx context.Context, v *Volume, header Header) error {
	err := l.setLabels(ctx, v.ID, func(labels map[string]string) error {
		setLabel(labels, labelHeader, header.label())
		return nil
	})
	if err == nil {
		v.Header = header
	}
	return err
}

// prepareHeader makes sure that the pool's device of an encrypted volume has its header, and holds the device until release is called. Like Format, it makes
// a header only if the record says that none was ever finished, and if the bytes agree; otherwise it does not write to the device. It sets v.Header to what
// the record has then.
//
// ErrPrecondition if the device has anything else; ErrDataLoss if the header is gone or damaged, or the state in the record is not known; ErrNoKey if a header
// has to be made and there is no key; ErrKey as for cutShort. The key is not tried on a header that is Formatted.
func (l *Local) prepareHeader(ctx context.Context, v *Volume, key Key) (release func(), err error) {
	pool, ref, err := l.object(v.ID, blockdev.Volume)
	if err != nil {
		return nil, err
	}
	device, err := pool.Attach(ctx, ref, blockdev.Attachment{})
	if err != nil {
		return nil, err
	}
	release = func() { _ = device.Close() } // it only ends a hold
	if err = l.makeHeader(ctx, v, device, key); err != nil {
		release()
		return nil, err
	}
	return release, nil
}

// makeHeader is prepareHeader for the pool's device, which the caller holds.
func (l *Local) makeHeader(ctx context.Context, v *Volume, device blockdev.Device, key Key) error {
	uuid, err := luks.UUID(device.Path)
	if err != nil {
		return err
	}
	switch v.Header.State {
	case Formatted:
		return v.hasHeader(device, uuid)
	case Blank:
		blank, err := l.blank(ctx, v.ID, device)
		if err != nil {
			return err
		}
		if !blank {
			return fmt.Errorf("%w: its record says that it was never encrypted, but %s is not blank; nothing was written: look at what is on it", errdefs.ErrPrecondition, device.Path)
		}
	case Formatting:
		if whole, err := v.cutShort(ctx, device, uuid, key); err != nil {
			return err
		} else if whole { // cryptsetup had ended, but the record does not say so, after a crash or because it is an old one
			return l.setHeader(ctx, v, Header{Formatted, uuid})
		}
	default:
		return fmt.Errorf("%w: its record has the unknown header state %q", errdefs.ErrDataLoss, v.Header.State)
	}
	if len(key) == 0 {
		return fmt.Errorf("%w: %w", errdefs.ErrInvalid, ErrNoKey)
	}
	if err := luks.Available(); err != nil {
		return err
	}
	header := Header{Formatting, uuidOf(v.ID.Key)}
	if err := l.setHeader(ctx, v, header); err != nil {
		return err
	}
	if err := trace.Do(ctx, "encrypt", func(ctx context.Context) error { return luks.Format(ctx, device.Path, header.UUID, key) }); err != nil {
		return err
	}
	header.State = Formatted
	return l.setHeader(ctx, v, header)
}

// cutShort checks a device on which the making of a header may have been cut short. uuid is that of the header that is there; empty if there is none. Nobody
// had the volume before, so there can only be what cryptsetup has left: half a header, one without key slots, or a whole one. ErrPrecondition if there is
// anything else; ErrKey (ErrNoKey) if the header is whole, and the key does not open it (there is none).
func (v *Volume) cutShort(ctx context.Context, device blockdev.Device, uuid string, key Key) (whole bool, err error) {
	foreign := ""
	if uuid == "" {
		foreign, err = filesystem.Foreign(device.Path, "")
	} else if uuid != v.Header.UUID {
		foreign = "a LUKS2 header of another volume, " + uuid
	}
	if err != nil {
		return false, err
	}
	if foreign == "" {
		whole, err = luks.Opens(ctx, device.Path, key)
		if errors.Is(err, ErrKey) {
			err = fmt.Errorf("the making of its LUKS2 header was cut short, says its record, but it is whole: %w; nothing was written: give the key that it was made with, or, if nobody ever used the volume, delete it", err)
		}
		if whole || err != nil {
			return whole, err
		}
		blank, err := filesystem.Blank(ctx, device.Path, luks.HeaderSize)
		if blank || err != nil {
			return false, err
		}
		foreign = "something behind the header"
	}
	return false, fmt.Errorf("%w: the making of its LUKS2 header was cut short, and %s carries %s now; nothing was written: look at what is on it", errdefs.ErrPrecondition, device.Path, foreign)
}

// hasHeader makes sure that a volume whose header must not be made again has it. uuid is that of the header that is there; empty if there is none. ErrDataLoss
// if the header is gone or damaged; ErrPrecondition if it is of another volume.
func (v *Volume) hasHeader(device blockdev.Device, uuid string) error {
	err := luks.Check(device.Path)
	switch {
	case errors.Is(err, errdefs.ErrDataLoss):
		return fmt.Errorf("it is encrypted: %w; nothing was written: restore the header (cryptsetup luksHeaderRestore), or the volume from a snapshot or a backup", err)
	case err != nil || uuid == v.Header.UUID:
		return err
	}
	return fmt.Errorf("%w: the LUKS2 header of %s is %s, not %s, which this volume's is; nothing was written: look at what is on it", errdefs.ErrPrecondition, device.Path, uuid, v.Header.UUID)
}

// separate gives the filesystem behind the header of a copy an identity of its own (filesystem.Separate), when the copy is opened for the first time. device
// is the open device. The bytes of a raw block device stay as they are: see separateOf.
func (l *Local) separate(ctx context.Context, v Volume, device blockdev.Device) error {
	if !v.separate || v.Filesystem == "" {
		return nil
	}
	if err := filesystem.Separate(ctx, device.Path); err != nil {
		return err
	}
	return l.setLabels(ctx, v.ID, func(labels map[string]string) error {
		delete(labels, labelSeparate)
		return nil
	})
}

// blankBehind reports whether nothing was ever written behind the header of a volume, by its open device and by the pool's device below that. What was never
// written reads as noise from the open device, but the pool's device is blank there. An earlier call of clearSignatures may have written the beginning.
func blankBehind(ctx context.Context, device blockdev.Device) (bool, error) {
	blank, err := filesystem.Blank(ctx, device.Below, luks.HeaderSize)
	if blank || err != nil {
		return blank, err
	}
	cleared, err := filesystem.Zeros(ctx, device.Path, 0, signaturesEnd)
	if !cleared || err != nil {
		return false, err
	}
	return filesystem.Blank(ctx, device.Below, luks.HeaderSize+signaturesEnd)
}

// signaturesEnd is where the signatures end for which filesystem.Foreign and Probe look, in bytes.
const signaturesEnd = 128 << 10

// clearSignatures overwrites the first signaturesEnd bytes of a device with zeros, durably, so that no signature is found there.
func clearSignatures(device string) error {
	f, err := os.OpenFile(device, os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("clear %s: %w", device, errdefs.FromErrno(err))
	}
	defer f.Close()
	_, err = f.WriteAt(make([]byte, signaturesEnd), 0)
	if err == nil {
		err = f.Sync()
	}
	if err != nil {
		return fmt.Errorf("clear %s: %w", device, errdefs.FromErrno(err))
	}
	return nil
}

// remove deletes an object of a pool, and the marks of a leg before it. An encrypted object is erased (blockdev.Pool.Erase), so that no key opens what is left
// of it on the storage. ErrInUse while it is attached; ErrPrecondition if its record is damaged. Success if there is none.
func (l *Local) remove(ctx context.Context, pool blockdev.Pool, ref blockdev.Ref) error {
	record, err := pool.Get(ctx, ref)
	if err != nil || record.Labels[labelReplicaOf] != "" {
		if err := deleteMarks(ctx, pool, ref); err != nil { // first, as nothing leads to them without the record
			return err
		}
	}
	switch {
	case err == nil && schemeOf(record) != NotEncrypted && (unfinished(record) || parseHeader(record.Labels[labelHeader]).State != Blank):
		err = pool.Erase(ctx, ref)
	case err != nil && !errors.Is(err, errdefs.ErrNotFound) && !errors.Is(err, errdefs.ErrDataLoss): // it is not known whether the object is encrypted
		return err
	default:
		err = pool.Delete(ctx, ref)
	}
	if err == nil {
		l.gone(pool.Name(), record)
	}
	return err
}
