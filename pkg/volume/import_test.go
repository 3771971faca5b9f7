package volume_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pools"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

const gib = 1 << 30

// contents are what withContents writes to a volume of a GiB. The rest of it are holes, in which a copy records its progress too.
var contents = []drivertest.Content{{Seed: "first", Size: 3 * mib}, {Seed: "odd", Offset: 300*mib + 4096, Size: 5*mib + 4096}, {Seed: "last", Offset: gib - mib, Size: mib}}

// twoPools returns the URLs of pools a and b, of files in a new directory.
func twoPools(t *testing.T) (urls map[string]string) {
	drivertest.NeedRoot(t)
	dir := drivertest.Dir(t)
	urls = map[string]string{}
	for _, name := range []string{"a", "b"} {
		check.OK(t, os.Mkdir(filepath.Join(dir, name), 0o700))
		urls[name] = "file://" + filepath.Join(dir, name) + "?reservePercent=0&create=1"
	}
	return urls
}

// over starts a store over the pools a and b. stop closes the pools, as does the end of the test.
func over(t *testing.T, urls map[string]string) (l *volume.Local, stop func()) {
	t.Helper()
	var all []blockdev.Pool
	for _, name := range []string{"a", "b"} {
		pool, err := pools.Open(t.Context(), name, urls[name])
		check.OK(t, err)
		all = append(all, pool)
	}
	stopped := false
	stop = func() {
		for _, pool := range all {
			if !stopped {
				check.OK(t, pool.Close())
			}
		}
		stopped = true
	}
	t.Cleanup(stop)
	return start(t, 0, all...), stop
}

// withContents makes a thin raw volume of pool a that holds the contents, and a snapshot of it.
func withContents(t *testing.T, l *volume.Local) (volume.Volume, volume.Snapshot) {
	t.Helper()
	v, err := l.Create(t.Context(), volume.Spec{Name: "source", Pool: "a", Provisioning: blockdev.Thin, Size: volume.Range{Required: gib}})
	check.OK(t, err)
	device, err := l.AttachRaw(t.Context(), v, nil, true)
	check.OK(t, err)
	for _, c := range contents {
		check.OK(t, c.Write(device.Path))
	}
	check.OK(t, errors.Join(device.Close(), l.Detach(t.Context(), v.ID)))
	s, err := l.CreateSnapshot(t.Context(), "snapshot", v.ID)
	check.OK(t, err)
	return v, s
}

// holds makes sure that a volume holds the contents, and nothing else.
func holds(t *testing.T, l *volume.Local, v volume.Volume) {
	t.Helper()
	device, err := l.AttachRaw(t.Context(), v, nil, false)
	check.OK(t, err)
	for _, c := range contents {
		check.OK(t, c.In(device.Path))
	}
	f, err := os.Open(device.Path)
	check.OK(t, err)
	zeros := make([]byte, mib)
	for _, at := range []int64{3 * mib, 299 * mib, 305*mib + 8192, 700 * mib, v.Size - mib} {
		if at == gib-mib {
			continue // that is the last of the contents
		}
		have := make([]byte, mib)
		_, err := f.ReadAt(have, at)
		check.OK(t, err)
		if string(have) != string(zeros) {
			t.Errorf("at byte %d it does not read as zeros", at)
		}
	}
	check.OK(t, errors.Join(f.Close(), device.Close(), l.Detach(t.Context(), v.ID)))
}

func copyOf(name string, source volume.ID) volume.Spec {
	return volume.Spec{Name: name, Pool: "b", Provisioning: blockdev.Thin, Source: source, Size: volume.Range{Required: gib + 64*mib}}
}

// TestCopyToAnotherPool: a snapshot is restored, and a volume cloned, in another pool of the node. The copies do not need their sources any more, and nothing
// is left of what they were cut from.
func TestCopyToAnotherPool(t *testing.T) {
	urls := twoPools(t)
	l, stop := over(t, urls)
	v, s := withContents(t, l)
	var made []volume.Volume
	for name, source := range map[string]volume.ID{"restored": s.ID, "cloned": v.ID} {
		copied, err := l.Create(t.Context(), copyOf(name, source))
		check.OK(t, err)
		if copied.ID.Pool != "b" || copied.Source != source || copied.Size != gib+64*mib || copied.Format.State != volume.Raw {
			t.Errorf("%s is %+v", name, copied)
		}
		again, err := l.Create(t.Context(), copyOf(name, source))
		if check.OK(t, err); again.ID != copied.ID || again.Source != source {
			t.Errorf("%s again is %+v", name, again)
		}
		made = append(made, copied)
	}
	if all, err := l.ListSnapshots(t.Context(), volume.ID{}, volume.ID{}, 0); err != nil || len(all) != 1 {
		t.Errorf("snapshots: %v, %v; what a clone was cut from is left", all, err)
	}
	used, err := os.ReadDir(filepath.Join(pathOf(urls["a"]), "snapshots"))
	if err == nil && len(used) > 2 {
		t.Errorf("left in pool a: %v", used)
	}
	check.OK(t, errors.Join(l.DeleteSnapshot(t.Context(), s.ID), l.Delete(t.Context(), v.ID)))
	stop()
	l, _ = over(t, urls)
	for _, v := range made {
		now, err := l.Get(t.Context(), v.ID)
		check.OK(t, err)
		if now.Source != v.Source {
			t.Errorf("after a start its source is %s, not %s", now.Source, v.Source)
		}
		holds(t, l, now)
		check.OK(t, l.Delete(t.Context(), v.ID))
	}
}

func pathOf(url string) string {
	return url[len("file://") : len(url)-len("?reservePercent=0&create=1")]
}

// TestCopyToAnotherPoolFormatted: a copy in another pool carries the filesystem of its source, and its record says so. Another filesystem is refused.
func TestCopyToAnotherPoolFormatted(t *testing.T) {
	l, _ := over(t, twoPools(t))
	v, err := l.Create(t.Context(), volume.Spec{Name: "source", Pool: "a", Size: volume.Range{Required: 64 * mib}, Filesystem: filesystem.Ext4})
	check.OK(t, err)
	device, err := l.Attach(t.Context(), v, nil)
	check.OK(t, err)
	check.OK(t, pooltest.Second(l.Format(t.Context(), &v, device, filesystem.Ext4, "")))
	check.OK(t, device.Close())
	spec := volume.Spec{Name: "copy", Pool: "b", Source: v.ID, Size: volume.Range{Required: 64 * mib}}
	spec.Filesystem = filesystem.XFS
	fails(t, second(l.Create(t.Context(), spec)), errdefs.ErrInvalid, "a copy with another filesystem")
	spec.Filesystem = filesystem.Ext4
	copied, err := l.Create(t.Context(), spec)
	check.OK(t, err)
	if copied.Format != (volume.Format{State: volume.Formatted, Type: filesystem.Ext4}) || copied.Thin {
		t.Errorf("the copy is %+v", copied)
	}
	device, err = l.Attach(t.Context(), copied, nil)
	check.OK(t, err)
	if has, err := filesystem.Probe(device.Path); err != nil || has != filesystem.Ext4 {
		t.Errorf("the copy carries %q, %v", has, err)
	}
	check.OK(t, device.Close())
}

// stopping returns an origin whose Read fails with failure after so many bytes. It sets from to the offset from which it is read.
func stopping(o volume.Origin, after int64, failure error, from *int64) volume.Origin {
	read := o.Read
	o.Read = func(ctx context.Context, at int64, visit func(int64, []byte) error) error {
		*from = at
		handed := int64(0)
		return read(ctx, at, func(at int64, data []byte) error {
			if handed += int64(len(data)); handed > after {
				return failure
			}
			return visit(at, data)
		})
	}
	return o
}

// TestImportGoesOn: a copy that was cut short cannot be used. The next call resumes it where it stopped, also after a start of the driver; if the origin was
// made at another time, the copy begins anew.
func TestImportGoesOn(t *testing.T) {
	urls := twoPools(t)
	l, stop := over(t, urls)
	_, s := withContents(t, l)
	spec := copyOf("copy", s.ID)
	id := volume.ID{Kind: blockdev.Volume, Pool: "b", Key: volume.KeyOf("copy")}
	for _, again := range []bool{false, true} {
		from, err := l.Open(t.Context(), s.ID)
		check.OK(t, err)
		var read int64
		fails(t, second(l.Import(t.Context(), spec, stopping(from, 6*mib, errdefs.ErrUnavailable, &read))), errdefs.ErrUnavailable, "an import whose origin goes away")
		fails(t, second(l.Get(t.Context(), id)), errdefs.ErrNotFound, "Get of an unfinished copy")
		for what, list := range map[string]func() ([]volume.Volume, error){
			"List":   func() ([]volume.Volume, error) { return l.List(t.Context(), volume.ID{}, 0) },
			"InPool": func() ([]volume.Volume, error) { return l.InPool(t.Context(), "b") },
		} {
			all, err := list()
			check.OK(t, err)
			for _, v := range all {
				if v.ID == id {
					t.Errorf("%s has an unfinished copy", what)
				}
			}
		}
		stop()
		l, stop = over(t, urls)
		if from, err = l.Open(t.Context(), s.ID); again {
			from.Created = from.Created.Add(time.Nanosecond)
		}
		check.OK(t, err)
		v, err := l.Import(t.Context(), spec, stopping(from, gib, nil, &read))
		check.OK(t, err)
		if went := read > 300*mib; went == again {
			t.Errorf("another origin: %v; it is read from byte %d on", again, read)
		}
		holds(t, l, v)
		check.OK(t, l.Delete(t.Context(), v.ID))
	}
}

// TestImportOverBadNetwork: an origin that fails again and again is copied in the end, as each call goes on further than the one before.
func TestImportOverBadNetwork(t *testing.T) {
	l, _ := over(t, twoPools(t))
	_, s := withContents(t, l)
	from, err := l.Open(t.Context(), s.ID)
	check.OK(t, err)
	var v volume.Volume
	tries := 1
	for last := int64(-1); ; tries++ {
		var read int64
		v, err = l.Import(t.Context(), copyOf("copy", s.ID), stopping(from, 2*mib, errdefs.ErrUnavailable, &read))
		if err == nil {
			break
		}
		fails(t, err, errdefs.ErrUnavailable, "an import whose origin goes away")
		if read <= last {
			t.Fatalf("try %d goes on at byte %d, and the one before at %d", tries, read, last)
		}
		last = read
	}
	if tries < 4 {
		t.Errorf("it took %d tries", tries)
	}
	holds(t, l, v)
}

// TestImportFails: a copy that fails for good leaves nothing; one whose origin sends wrong data leaves what is resumed. Values of an origin that are not
// known, and data that is out of range, not aligned or too long, are refused. A later copy of the good origin succeeds in each case.
func TestImportFails(t *testing.T) {
	urls := twoPools(t)
	l, _ := over(t, urls)
	_, s := withContents(t, l)
	good, err := l.Open(t.Context(), s.ID)
	check.OK(t, err)
	sends := func(at int64, size int) func(context.Context, int64, func(int64, []byte) error) error {
		return func(_ context.Context, _ int64, visit func(int64, []byte) error) error {
			return visit(at, make([]byte, size))
		}
	}
	for name, c := range map[string]struct {
		change func(o *volume.Origin)
		want   error
		left   bool
	}{
		"gone":           {func(o *volume.Origin) { *o = stopping(*o, mib, errdefs.ErrNotFound, new(int64)) }, errdefs.ErrNotFound, false},
		"small sectors":  {func(o *volume.Origin) { o.Sector = 256 }, errdefs.ErrUnsupported, false},
		"odd sectors":    {func(o *volume.Origin) { o.Sector = 12345 }, errdefs.ErrUnsupported, false},
		"vast sectors":   {func(o *volume.Origin) { o.Sector = 1 << 40 }, errdefs.ErrUnsupported, false},
		"odd size":       {func(o *volume.Origin) { o.Size -= 512 }, errdefs.ErrUnsupported, false},
		"a state":        {func(o *volume.Origin) { o.Format.State = "x" }, errdefs.ErrUnsupported, false},
		"a type":         {func(o *volume.Origin) { o.Format.Type = "x\n" }, errdefs.ErrUnsupported, false},
		"a filesystem":   {func(o *volume.Origin) { o.Filesystem = filesystem.Type(make([]byte, mib)) }, errdefs.ErrUnsupported, false},
		"an encryption":  {func(o *volume.Origin) { o.Scheme = "rot13" }, errdefs.ErrUnsupported, false},
		"a header":       {func(o *volume.Origin) { o.Header.State = volume.Raw }, errdefs.ErrUnsupported, false},
		"no room for it": {func(o *volume.Origin) { o.Size, o.Scheme = mib, volume.LUKS2 }, errdefs.ErrUnsupported, false},
		"nothing":        {func(o *volume.Origin) { o.Read = sends(0, 0) }, errdefs.ErrUnavailable, true},
		"beyond it":      {func(o *volume.Origin) { o.Read = sends(o.Size, 4096) }, errdefs.ErrUnavailable, true},
		"before it":      {func(o *volume.Origin) { o.Read = sends(-4096, 4096) }, errdefs.ErrUnavailable, true},
		"not aligned":    {func(o *volume.Origin) { o.Read = sends(512, 512) }, errdefs.ErrUnavailable, true},
		"too much":       {func(o *volume.Origin) { o.Read = sends(0, volume.ReadSize+4096) }, errdefs.ErrUnavailable, true},
	} {
		from := good
		c.change(&from)
		fails(t, second(l.Import(t.Context(), copyOf(name, s.ID), from)), c.want, name)
		records, err := os.ReadDir(filepath.Join(pathOf(urls["b"]), "volumes"))
		if check.OK(t, err); (len(records) > 0) != c.left {
			t.Errorf("%s leaves %v", name, records)
		}
		v, err := l.Import(t.Context(), copyOf(name, s.ID), good)
		check.OK(t, err)
		holds(t, l, v)
		check.OK(t, l.Delete(t.Context(), v.ID))
	}
}

// TestLVMCopyToAnotherPool: a clone of an attached raw volume, or a restore of its snapshot, in another pool has its bytes, from each kind of pool to each
// other kind.
func TestLVMCopyToAnotherPool(t *testing.T) {
	l, _ := kinds(t)
	all := []string{"xfs", "linear", "thin", "plain"}
	text := drivertest.Content{Seed: "text", Offset: 5*mib + 4096, Size: 3 * mib}
	for i, from := range all {
		v, device := raw(t, l, from, "from-"+from)
		check.OK(t, text.Write(device.Path))
		s, err := l.CreateSnapshot(t.Context(), "of-"+from, v.ID)
		check.OK(t, err)
		for j, to := range all {
			if to == from {
				continue
			}
			source := []volume.ID{v.ID, s.ID}[(i+j/2)%2]
			name := fmt.Sprint(source.Kind, " of ", from, " in ", to)
			copied, err := l.Create(t.Context(), volume.Spec{Name: name, Pool: to, Source: source, Size: volume.Range{Required: 20 * mib}})
			check.OK(t, err)
			if copied.ID.Pool != to || copied.Format.State != volume.Raw {
				t.Errorf("%s is %+v", name, copied)
			}
			device, err := l.AttachRaw(t.Context(), copied, nil, false)
			check.OK(t, err)
			if err := text.In(device.Path); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			check.OK(t, device.Close())
			drop(t, l, copied)
		}
		check.OK(t, l.DeleteSnapshot(t.Context(), s.ID))
		drop(t, l, v)
	}
	if left := suspended(t); len(left) > 0 {
		t.Errorf("suspended: %v", left)
	}
}
