package volume_test

import (
	"bytes"
	"context"
	"errors"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/luks"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// TestHeaderByRecord: whether a LUKS2 header is written depends on the record's state and on what is on the device; if they do not fit, nothing is written.
func TestHeaderByRecord(t *testing.T) {
	drivertest.NeedRoot(t)
	if err := luks.Available(); err != nil {
		t.Skip(err)
	}
	dir := drivertest.Dir(t)
	pool := pooltest.OpenedFiles(t, dir)
	l := start(t, 0, pool)
	const foreign = "00112233-4455-6677-8899-aabbccddeeff"
	key, other := volume.Key("the key"), volume.Key("another")
	spec := volume.Spec{Name: "v", Size: volume.Range{Required: mib}, Encryption: volume.Encryption{Scheme: volume.LUKS2}}
	own := "" // the UUID of the volume's header
	for what, c := range map[string]struct {
		label   string
		prepare func(device string)
		want    error
	}{
		"blank":                          {"", func(string) {}, nil},
		"blank, with a header":           {"", func(d string) { check.OK(t, luks.Format(t.Context(), d, foreign, key)) }, errdefs.ErrPrecondition},
		"blank, written":                 {"", func(d string) { put(t, d, luks.HeaderSize+512<<10, "somebody's") }, errdefs.ErrPrecondition},
		"cut short at once":              {"formatting", func(string) {}, nil},
		"cut short, with its header":     {"formatting", func(d string) { check.OK(t, luks.Format(t.Context(), d, own, key)) }, nil},
		"cut short, with another key":    {"formatting", func(d string) { check.OK(t, luks.Format(t.Context(), d, own, other)) }, errdefs.ErrPrecondition},
		"cut short, without key slots":   {"formatting", func(d string) { check.OK(t, luks.Format(t.Context(), d, own, other)); withoutSlots(t, d) }, nil},
		"cut short, and written behind":  {"formatting", func(d string) { put(t, d, luks.HeaderSize+512<<10, "somebody's") }, errdefs.ErrPrecondition},
		"cut short, with noise":          {"formatting", func(d string) { put(t, d, 32<<10, "noise") }, nil},
		"cut short, with another header": {"formatting", func(d string) { check.OK(t, luks.Format(t.Context(), d, foreign, key)) }, errdefs.ErrPrecondition},
		"cut short, with a filesystem":   {"formatting", func(d string) { put(t, d, 1024+56, "\x53\xef") }, errdefs.ErrPrecondition},
		"formatted":                      {"formatted", func(d string) { check.OK(t, luks.Format(t.Context(), d, own, key)) }, nil},
		"formatted, another header":      {"formatted", func(d string) { check.OK(t, luks.Format(t.Context(), d, foreign, key)) }, errdefs.ErrPrecondition},
		"formatted, no header":           {"formatted", func(string) {}, errdefs.ErrDataLoss},
		"of a newer driver":              {"wrapped", func(string) {}, errdefs.ErrDataLoss},
	} {
		v, err := l.Create(t.Context(), spec)
		check.OK(t, err)
		k := v.ID.Key
		own = k[:8] + "-" + k[8:12] + "-" + k[12:16] + "-" + k[16:20] + "-" + k[20:]
		ref := blockdev.Ref{Kind: blockdev.Volume, Key: k}
		if c.label != "" {
			_, err = pool.SetLabels(t.Context(), ref, func(labels map[string]string) error { labels["header"] = c.label + ":" + own; return nil })
			check.OK(t, err)
		}
		bare, err := pool.Attach(t.Context(), ref, blockdev.Attachment{})
		check.OK(t, err)
		c.prepare(bare.Path)
		before := get(t, bare.Path)
		record, err := pool.Get(t.Context(), ref)
		check.OK(t, err)
		v, err = l.Get(t.Context(), v.ID)
		check.OK(t, err)
		device, err := l.Attach(t.Context(), v, key)
		if !errors.Is(err, c.want) || (err == nil) != (c.want == nil) || c.want != nil && !slices.Equal(errdefs.Kinds(err), []error{c.want}) {
			t.Errorf("%s: error %v, want %v", what, err, c.want)
		}
		if what == "cut short, with its header" && !bytes.Equal(get(t, bare.Path), before) { // the header may be in use already, if the record was restored from a backup
			t.Errorf("%s: it was made anew", what)
		}
		if err == nil {
			if uuid, err := luks.UUID(bare.Path); uuid != own || err != nil || device.Size != mib {
				t.Errorf("%s: attached with %d bytes behind the header %q, %v", what, device.Size, uuid, err)
			}
			check.OK(t, device.Close())
		} else if now, _ := pool.Get(t.Context(), ref); !bytes.Equal(get(t, bare.Path), before) || now.Labels["header"] != record.Labels["header"] {
			t.Errorf("%s: it was refused, and its record says %q, or its bytes have changed", what, now.Labels["header"])
		}
		check.OK(t, bare.Close())
		check.OK(t, l.Delete(t.Context(), v.ID))
	}
}

// withoutSlots leaves a header as luksFormat leaves it if it is cut short before the key is stretched.
func withoutSlots(t *testing.T, device string) {
	t.Helper()
	if out, err := exec.Command("cryptsetup", "--batch-mode", "luksErase", device).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

// TestHeaderOfOldRecord: if the record of an encrypted volume is from before its filesystem was made, as after a restore from a backup, no filesystem is made
// over the one that is there, although the key is right.
func TestHeaderOfOldRecord(t *testing.T) {
	drivertest.NeedRoot(t)
	if err := luks.Available(); err != nil {
		t.Skip(err)
	}
	pool := pooltest.OpenedFiles(t, drivertest.Dir(t))
	l := start(t, 0, pool)
	key := volume.Key("the key")
	v, err := l.Create(t.Context(), volume.Spec{Name: "v", Size: volume.Range{Required: 32 * mib}, Filesystem: filesystem.Ext4, Encryption: volume.Encryption{Scheme: volume.LUKS2}})
	check.OK(t, err)
	ref := blockdev.Ref{Kind: blockdev.Volume, Key: v.ID.Key}
	format := func() (made bool, err error) {
		t.Helper()
		v, err := l.Get(t.Context(), v.ID)
		check.OK(t, err)
		device, err := l.Attach(t.Context(), v, key)
		check.OK(t, err)
		made, err = l.Format(t.Context(), &v, device, filesystem.Ext4, "")
		check.OK(t, device.Close())
		return made, err
	}
	labels := func(change map[string]string) {
		t.Helper()
		_, err := pool.SetLabels(t.Context(), ref, func(labels map[string]string) error {
			delete(labels, "format")
			maps.Copy(labels, change)
			return nil
		})
		check.OK(t, err)
	}
	// As after a crash between the header and the filesystem, when the beginning had been cleared.
	device, err := l.Attach(t.Context(), v, key)
	check.OK(t, err)
	put(t, device.Path, 0, string(make([]byte, 128<<10)))
	check.OK(t, device.Close())
	made, err := format()
	if check.OK(t, err); !made {
		t.Error("no filesystem was made")
	}
	record, err := pool.Get(t.Context(), ref)
	check.OK(t, err)
	formatted := record.Labels["header"]
	for _, header := range []string{formatted, strings.Replace(formatted, "formatted", "formatting", 1)} {
		labels(map[string]string{"header": header})
		if made, err := format(); made || !errors.Is(err, errdefs.ErrPrecondition) {
			t.Errorf("with the header %s, and nothing of a filesystem, on record: made %v, %v", header, made, err)
		}
	}
	labels(map[string]string{"format": record.Labels["format"]})
	if made, err := format(); made || err != nil {
		t.Errorf("with its record it is made anew (%v), or it is gone: %v", made, err)
	}
	check.OK(t, l.Delete(t.Context(), v.ID))
}

// proving is a pool that counts how often it is asked whether anything was written to a volume. It says that something was.
type proving struct {
	blockdev.Pool
	asked int
}

func (p *proving) Untouched(context.Context, blockdev.Ref) (bool, error) {
	p.asked++
	return false, nil
}

// TestBlankBehindHeader: before a filesystem is made on an encrypted volume, its pool is not asked whether anything was ever written to it, as its header was.
// What counts is whether anything is behind the header. Files stand for the devices.
func TestBlankBehindHeader(t *testing.T) {
	for what, want := range map[string]error{"blank": nil, "written": errdefs.ErrPrecondition} {
		pool := &proving{Pool: memory.NewDisk(1<<30).Open("default", nil)}
		l := start(t, 0, pool)
		v := create(t, l, "v")
		v.Encryption.Scheme = volume.LUKS2
		device := blockdev.Device{Path: filepath.Join(t.TempDir(), "open"), Below: filepath.Join(t.TempDir(), "below")}
		check.OK(t, os.WriteFile(device.Path, bytes.Repeat([]byte("noise"), 8*mib/5), 0o600))
		check.OK(t, os.WriteFile(device.Below, nil, 0o600))
		check.OK(t, os.Truncate(device.Below, luks.HeaderSize+8*mib))
		put(t, device.Below, 0, "a header")
		if want != nil {
			put(t, device.Below, luks.HeaderSize+4*mib, "somebody's")
		}
		made, err := l.Format(t.Context(), &v, device, filesystem.Ext4, "")
		if made != (want == nil) || !errors.Is(err, want) {
			t.Errorf("%s: made %v, %v; want %v", what, made, err, want)
		}
		if pool.asked > 0 {
			t.Errorf("%s: the pool was asked %d times", what, pool.asked)
		}
	}
}

func put(t *testing.T, path string, at int64, data string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	check.OK(t, err)
	_, err = f.WriteAt([]byte(data), at)
	check.OK(t, errors.Join(err, f.Sync(), f.Close()))
}

func get(t *testing.T, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	check.OK(t, err)
	return data
}
