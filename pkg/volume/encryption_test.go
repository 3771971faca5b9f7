package volume_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// TestEncryptedSize: the size of an encrypted volume is chosen so that the volume and its header together are a multiple of the pool's granularity.
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

// TestEncryptionOfCopies: a copy must be encrypted if and only if its source is.
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

// TestDeletedForGood: an encrypted volume is erased, another one is only deleted, even if its device is held open by a scanner at that moment.
func TestDeletedForGood(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := drivertest.Dir(t)
	pool := &removing{Pool: pooltest.OpenedFiles(t, filepath.Join(dir, "pool"))}
	l := start(t, 0, pool)
	for _, encrypted := range []bool{true, false} {
		v, err := l.Create(t.Context(), volume.Spec{Name: "v", Size: volume.Range{Required: 8 * mib}})
		check.OK(t, err)
		ref := blockdev.Ref{Kind: blockdev.Volume, Key: v.ID.Key}
		if encrypted { // by its labels, as the machine may have no device mapper
			_, err = pool.SetLabels(t.Context(), ref, func(labels map[string]string) error {
				labels["encryption"], labels["header"] = "luks2", "formatted:00112233-4455-6677-8899-aabbccddeeff"
				return nil
			})
			check.OK(t, err)
		}
		device := pooltest.Attach(t, pool, ref, blockdev.Attachment{})
		scanner, err := os.Open(device.Path)
		check.OK(t, errors.Join(err, device.Close()))
		time.AfterFunc(200*time.Millisecond, func() { _ = scanner.Close() })
		check.OK(t, l.Delete(t.Context(), v.ID))
		if pool.erased != encrypted || pool.deleted == encrypted {
			t.Errorf("encrypted: %v; erased: %v, deleted: %v", encrypted, pool.erased, pool.deleted)
		}
		pool.erased, pool.deleted = false, false
	}
}

// removing is a pool that records whether Erase or Delete was called.
type removing struct {
	blockdev.Pool
	erased, deleted bool
}

func (r *removing) Erase(ctx context.Context, ref blockdev.Ref) error {
	r.erased = true
	return r.Pool.Erase(ctx, ref)
}

func (r *removing) Delete(ctx context.Context, ref blockdev.Ref) error {
	r.deleted = true
	return r.Pool.Delete(ctx, ref)
}

// TestDeletedLater: a snapshot whose record cannot be read now is not deleted, as it may be encrypted.
func TestDeletedLater(t *testing.T) {
	l, _, broken := one(t)
	v, err := l.Create(t.Context(), volume.Spec{Name: "v", Size: volume.Range{Required: mib}})
	check.OK(t, err)
	s, err := l.CreateSnapshot(t.Context(), "s", v.ID)
	check.OK(t, err)
	broken["Get"] = 1
	if err := l.DeleteSnapshot(t.Context(), s.ID); !errors.Is(err, errBroken) {
		t.Errorf("Delete: %v", err)
	}
	delete(broken, "Get")
	if _, err := l.GetSnapshot(t.Context(), s.ID); err != nil {
		t.Errorf("it was deleted: %v", err)
	}
	check.OK(t, l.DeleteSnapshot(t.Context(), s.ID))
}

// TestUnknownScheme: a volume with an encryption that this driver does not know is not attached; the error names the encryption.
func TestUnknownScheme(t *testing.T) {
	drivertest.NeedRoot(t)
	pool := pooltest.OpenedFiles(t, drivertest.Dir(t))
	l := start(t, 0, pool)
	v, err := l.Create(t.Context(), volume.Spec{Name: "v", Size: volume.Range{Required: mib}})
	check.OK(t, err)
	_, err = pool.SetLabels(t.Context(), blockdev.Ref{Kind: blockdev.Volume, Key: v.ID.Key}, func(labels map[string]string) error { labels["encryption"] = "luks3"; return nil })
	check.OK(t, err)
	v, err = l.Get(t.Context(), v.ID)
	check.OK(t, err)
	device, err := l.Attach(t.Context(), v, volume.Key("the key"))
	if fails(t, err, errdefs.ErrUnsupported, "encryption that is not known"); err == nil {
		check.OK(t, device.Close())
	} else if !strings.Contains(err.Error(), `"luks3"`) {
		t.Errorf("the error does not say which encryption: %v", err)
	}
	check.OK(t, l.Delete(t.Context(), v.ID))
}
