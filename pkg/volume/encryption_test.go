package volume_test

import (
	"errors"
	"testing"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// TestEncryptedSize: what an encrypted volume takes of its pool, in the pool's steps, is larger by its header than what was asked for.
func TestEncryptedSize(t *testing.T) {
	const block, header = 4096, 16 * mib
	for _, c := range []struct {
		in         volume.Range
		step, want int64
		err        error
	}{
		{volume.Range{}, block, volume.DefaultSize, nil},
		{volume.Range{Required: mib}, block, mib, nil},
		{volume.Range{Required: mib + 1}, block, mib + block, nil},
		{volume.Range{Required: 10 * mib}, 4 * mib, 12 * mib, nil},
		{volume.Range{Required: 10 * mib}, 32 * mib, 16 * mib, nil},
		{volume.Range{Required: 10 * mib, Limit: 15 * mib}, 32 * mib, 0, errdefs.ErrOutOfRange},
		{volume.Range{Limit: 60 * mib}, 32 * mib, 48 * mib, nil},
		{volume.Range{Required: blockdev.MaxSize - header}, block, blockdev.MaxSize - header, nil},
		{volume.Range{Required: blockdev.MaxSize - header + 1}, block, 0, errdefs.ErrOutOfRange},
	} {
		if have, err := c.in.Choose(block, c.step, volume.LUKS2.Overhead()); have != c.want || !errors.Is(err, c.err) {
			t.Errorf("%+v in steps of %d: %d, %v; want %d, %v", c.in, c.step, have, err, c.want, c.err)
		}
	}
}

// TestEncryptionOfCopies: a copy is encrypted if and only if its source is.
func TestEncryptionOfCopies(t *testing.T) {
	plain, encrypted := volume.Contents{Filesystem: "ext4"}, volume.Contents{Filesystem: "ext4", Scheme: volume.LUKS2}
	for _, c := range []struct {
		spec volume.Spec
		of   volume.Contents
		want error
	}{
		{volume.Spec{}, plain, nil},
		{volume.Spec{Encryption: volume.Encryption{Scheme: volume.LUKS2}}, encrypted, nil},
		{volume.Spec{Encryption: volume.Encryption{Scheme: volume.LUKS2, Discards: true}}, encrypted, nil},
		{volume.Spec{Encryption: volume.Encryption{Scheme: volume.LUKS2}}, plain, errdefs.ErrInvalid},
		{volume.Spec{}, encrypted, errdefs.ErrInvalid},
		{volume.Spec{Filesystem: "xfs", Encryption: volume.Encryption{Scheme: volume.LUKS2}}, encrypted, errdefs.ErrInvalid},
	} {
		if err := c.spec.CheckSource(c.of); !errors.Is(err, c.want) || (err == nil) != (c.want == nil) {
			t.Errorf("%+v of %+v: %v, want %v", c.spec, c.of, err, c.want)
		}
	}
	have := volume.Volume{Encryption: volume.Encryption{Scheme: volume.LUKS2}}
	for _, spec := range []volume.Spec{{}, {Encryption: volume.Encryption{Scheme: volume.LUKS2, Discards: true}}} {
		fails(t, spec.Check(have), errdefs.ErrExists, "a volume with other encryption")
	}
}
