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

// Format is what the record says about the bytes of a volume. Only a blank volume is ever
// formatted (Local.Format).
type Format struct {
	State FormatState
	Type  filesystem.Type // of Formatting and Formatted
}

// FormatState is how far a volume is from blank.
type FormatState string

// The states: a new volume is Blank; Formatting until mkfs is known to have ended;
// then Formatted. Raw volumes were handed out as block devices, so their bytes are
// the user's, whatever they look like.
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

// copyFormat gives the labels of a copy the format of its source.
func copyFormat(labels map[string]string, of Format) {
	if of.State != Blank {
		labels[labelFormat] = of.label()
	}
}

// SetFormat records how far a volume is from blank, durably.
func (l *Local) SetFormat(ctx context.Context, id ID, format Format) error {
	return l.setLabels(ctx, id, func(labels map[string]string) error {
		setLabel(labels, labelFormat, format.label())
		return nil
	})
}

// filesystemOf returns the filesystem that a volume or snapshot has, or is to have; empty: it is raw.
func filesystemOf(r blockdev.Record) filesystem.Type {
	return cmp.Or(parseFormat(r.Labels[labelFormat]).Type, filesystem.Type(r.Labels[labelFilesystem]))
}

// Format makes sure that a volume, which is attached as a device, carries a filesystem, and says in
// v how its record stands then. It makes the filesystem only if the record says that the volume was never
// formatted and never handed out as a raw device, and the bytes agree. On any doubt it
// leaves the device alone: ErrPrecondition if it carries something else, ErrDataLoss if what it
// carried is gone. made: the filesystem was made just now, and the flags, with which it is to be mounted, are on record too (SetFlags).
func (l *Local) Format(ctx context.Context, v *Volume, device blockdev.Device, want filesystem.Type, flags string) (made bool, err error) {
	switch v.Format.State {
	case Formatted, Raw:
		return false, v.carries(device, want)
	case Blank:
		blank, err := l.blank(ctx, v.ID, device)
		if v.Encryption.Scheme != NotEncrypted {
			blank, err = blankBehind(ctx, device)
		}
		if err != nil {
			return false, err
		}
		if !blank {
			return false, fmt.Errorf("%w: its record says that it was never formatted, but %s is not blank; nothing was formatted: look at what is on it", errdefs.ErrPrecondition, device.Path)
		}
	case Formatting:
		used, err := leftByMake(device, v.Format.Type)
		if err != nil {
			return false, err
		}
		if used { // a crash came before the record said so, or the record is an old one: what is there is kept
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

// blank reports whether nothing was ever written to a volume, which is attached as a device, as far
// as its pool knows; where it does not, whether the device is blank (filesystem.Blank).
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

// leftByMake looks at a device whose formatting was cut short. Nobody ever had it, so what is on it is
// what mkfs left. ErrPrecondition if it is something that mkfs does not write; used: it is a filesystem that
// was mounted for writing since.
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

// format makes a filesystem. The record says so before, as a crash leaves half of it, and after; then it has the flags, too, which
// saves a change of it.
func (l *Local) format(ctx context.Context, v *Volume, device blockdev.Device, want filesystem.Type, flags string) error {
	zeros := v.Format.State == Blank && v.Encryption.Scheme == NotEncrypted
	if v.Format.State == Blank && !zeros { // noise, which could look like anything to a retry
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

// carries makes sure that a volume, which is never formatted again, carries a filesystem, and notes it.
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
		return fmt.Errorf("%w: it was used as a raw block device, so it is not formatted for %s: its bytes are its user's", errdefs.ErrPrecondition, want)
	}
	return fmt.Errorf("%w: it carries %s, not %s", errdefs.ErrPrecondition, have, want)
}
