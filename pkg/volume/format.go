package volume

import (
	"cmp"
	"context"
	"fmt"
	"strings"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
)

// Format is what the record says about the bytes of a volume; of an encrypted one, about those behind the header. A filesystem is made only if State is Blank
// or Formatting (Local.Format).
type Format struct {
	State FormatState
	Type  filesystem.Type // of Formatting and Formatted
}

// FormatState says whether anything was written to a volume.
type FormatState string

// The states. A new volume is Blank. It is Formatting from before mkfs starts until mkfs has succeeded, and Formatted from then on. It is Raw if it was handed
// out as a block device for writing before it was Formatted: its bytes are its user's, whatever they look like.
const (
	Blank      FormatState = ""
	Formatting FormatState = "formatting"
	Formatted  FormatState = "formatted"
	Raw        FormatState = "raw"
)

func (f Format) label() string {
	if f.Type == "" {
		return string(f.State)
	}
	return string(f.State) + ":" + string(f.Type)
}

func parseFormat(label string) Format {
	state, fs, _ := strings.Cut(label, ":")
	return Format{FormatState(state), filesystem.Type(fs)}
}

// copyFormat sets the format of a copy, in its labels, to that of its source.
func copyFormat(labels map[string]string, of Format) {
	if of.State != Blank {
		labels[labelFormat] = of.label()
	}
}

// SetFormat records the format of a volume, durably.
func (l *Local) SetFormat(ctx context.Context, id ID, format Format) error {
	return l.setLabels(ctx, id, func(labels map[string]string) error {
		setLabel(labels, labelFormat, format.label())
		return nil
	})
}

// filesystemOf returns the filesystem that a volume or snapshot has, or is to have; empty if it is raw, or that is not known.
func filesystemOf(r blockdev.Record) filesystem.Type {
	return cmp.Or(parseFormat(r.Labels[labelFormat]).Type, filesystem.Type(r.Labels[labelFilesystem]))
}

// Format makes sure that an attached volume carries the filesystem want. It makes one only if the record says that none was ever finished and that the volume
// was not handed out as a raw device, and if the bytes agree; otherwise it does not write to the device. It sets v.Format and v.Flags to what the record has
// then, and v.Format.Type also for a raw volume. made: the filesystem was made now, and flags are recorded as by SetFlags.
//
// ErrPrecondition if the device carries anything else; ErrDataLoss if the filesystem that was made once is gone, or the state in the record is not known.
func (l *Local) Format(ctx context.Context, v *Volume, device blockdev.Device, want filesystem.Type, flags string) (made bool, err error) {
	switch v.Format.State {
	case Formatted, Raw:
		return false, v.carries(device, want)
	case Blank:
		if blank, err := l.unwritten(ctx, v, device); err != nil {
			return false, err
		} else if !blank {
			return false, fmt.Errorf("%w: its record says that it was never formatted, but %s is not blank; nothing was formatted: look at what is on it", errdefs.ErrPrecondition, device.Path)
		}
	case Formatting:
		used, err := leftByMake(device, v.Format.Type)
		if err != nil {
			return false, err
		}
		if used { // mkfs had ended, but the record does not say so, after a crash or because it is an old one
			v.Format.State = Formatted
			if err := l.SetFormat(ctx, v.ID, v.Format); err != nil {
				return false, err
			}
			return false, v.carries(device, want)
		}
	default:
		return false, fmt.Errorf("%w: its record has the unknown format state %q", errdefs.ErrDataLoss, v.Format.State)
	}
	return true, l.format(ctx, v, device, want, flags)
}

// unwritten reports whether nothing was ever written to an attached volume; of an encrypted one, to what is behind its header.
func (l *Local) unwritten(ctx context.Context, v *Volume, device blockdev.Device) (bool, error) {
	if v.Encryption.Scheme != NotEncrypted {
		return blankBehind(ctx, device)
	}
	return l.blank(ctx, v.ID, device)
}

// blank reports whether nothing was ever written to an attached volume, if its pool knows (blockdev.Prover); if not, whether the device is blank
// (filesystem.Blank).
func (l *Local) blank(ctx context.Context, id ID, device blockdev.Device) (bool, error) {
	pool, ref, err := l.object(id, blockdev.Volume)
	if err != nil {
		return false, err
	}
	if prover, ok := blockdev.As[blockdev.Prover](pool); ok {
		return prover.Untouched(ctx, ref)
	}
	return filesystem.Blank(ctx, device.Path, 0)
}

// leftByMake checks a device on which the making of a filesystem may have been cut short. Nobody had the volume before, so there can only be what mkfs has
// left: ErrPrecondition if there is anything else. used: there is a filesystem that was, or may have been, mounted for writing (filesystem.Used).
func leftByMake(device blockdev.Device, kind filesystem.Type) (used bool, err error) {
	foreign, err := filesystem.Foreign(device.Path, kind)
	if err != nil {
		return false, err
	}
	if foreign != "" {
		return false, fmt.Errorf("%w: its formatting was cut short, and %s carries %s now; nothing was formatted: look at what is on it", errdefs.ErrPrecondition, device.Path, foreign)
	}
	return filesystem.Used(device.Path)
}

// format makes a filesystem. The record is Formatting before, as a crash may leave half a filesystem, and Formatted after that. The flags are written together
// with that, which saves a write.
func (l *Local) format(ctx context.Context, v *Volume, device blockdev.Device, want filesystem.Type, flags string) error {
	zeros := v.Format.State == Blank && v.Encryption.Scheme == NotEncrypted
	if v.Format.State == Blank && !zeros { // the device reads as noise, which a retry could take for anything
		if err := clearSignatures(device.Path); err != nil {
			return err
		}
	}
	v.Format = Format{State: Formatting, Type: want}
	if err := l.SetFormat(ctx, v.ID, v.Format); err != nil {
		return err
	}
	if err := filesystem.Make(ctx, want, device.Path, zeros); err != nil {
		return err
	}
	v.Format.State, v.Flags = Formatted, flags
	return l.setLabels(ctx, v.ID, func(labels map[string]string) error {
		setLabel(labels, labelFormat, v.Format.label())
		setLabel(labels, labelFlags, flags)
		return nil
	})
}

// carries makes sure that a volume that must not be formatted carries the filesystem want, and sets v.Format.Type to that. ErrDataLoss if the filesystem that
// was made once is gone; ErrPrecondition if the volume carries another one, or is raw and carries none.
func (v *Volume) carries(device blockdev.Device, want filesystem.Type) error {
	have, err := filesystem.Probe(device.Path)
	if err != nil {
		return err
	}
	if have == want {
		v.Format.Type = have
		return nil
	}
	if v.Format.State == Formatted && have == "" {
		return fmt.Errorf("%w: it was formatted with %s, and %s carries no filesystem now; nothing was formatted: restore it from a snapshot or a backup", errdefs.ErrDataLoss, v.Format.Type, device.Path)
	}
	if have == "" {
		return fmt.Errorf("%w: it was used as a raw block device, so it is not formatted for %s: its bytes are its user's; use it with volumeMode Block", errdefs.ErrPrecondition, want)
	}
	return fmt.Errorf("%w: it carries %s, not %s; nothing was formatted: use it with the fsType that it has, or look at what is on it", errdefs.ErrPrecondition, have, want)
}
