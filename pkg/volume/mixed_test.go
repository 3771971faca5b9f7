package volume_test

import (
	"bytes"
	"errors"
	"os"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pools"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

func volumeOf(name string) blockdev.Ref {
	return blockdev.Ref{Kind: blockdev.Volume, Key: volume.KeyOf(name)}
}

func idOf(name string) volume.ID {
	return volume.ID{Kind: blockdev.Volume, Pool: "default", Key: volume.KeyOf(name)}
}

// mixedUp makes sure that a store gives nobody the volume "a", whose place has the bytes of another one, and keeps these.
func mixedUp(t *testing.T, l *volume.Local, pool blockdev.Pool) {
	t.Helper()
	ctx := t.Context()
	a := idOf("a")
	fails(t, second(l.Get(ctx, a)), errdefs.ErrDataLoss, "Get")
	fails(t, second(l.Create(ctx, volume.Spec{Name: "a", Size: volume.Range{Required: mib}})), errdefs.ErrDataLoss, "Create")
	fails(t, second(l.AttachRaw(ctx, volume.Volume{ID: a}, nil, true)), errdefs.ErrDataLoss, "AttachRaw")
	fails(t, second(l.CreateSnapshot(ctx, "cut of a", a)), errdefs.ErrDataLoss, "CreateSnapshot")
	fails(t, l.Delete(ctx, a), errdefs.ErrPrecondition, "Delete")
	if problems := pool.PoolHealth(ctx); len(problems) != 1 || problems[0].Reason != "RecordDamaged" {
		t.Errorf("the pool's health: %v", problems)
	}
	all, err := l.List(ctx, volume.ID{}, 0)
	check.OK(t, err)
	for _, v := range all {
		if v.ID == a {
			t.Errorf("listed: %+v", v)
		}
	}
}

// TestMixedUp: a pool has a volume, a snapshot and marks under the names of others, by what their records say. Nobody is given their bytes, and they are not
// removed.
func TestMixedUp(t *testing.T) {
	dir := drivertest.Dir(t)
	pool, err := pools.Open(t.Context(), "default", "file://"+dir+"/pool?reservePercent=0&create=1")
	check.OK(t, err)
	defer pool.Close()
	put := func(ref blockdev.Ref, name string) blockdev.Ref {
		t.Helper()
		check.OK(t, second(pool.Create(t.Context(), blockdev.Spec{Ref: ref, Name: name, Size: mib, Provisioning: blockdev.Thin})))
		return ref
	}
	put(volumeOf("a"), "b")
	put(volumeOf("c"), "c")
	mixed := []blockdev.Ref{put(blockdev.Ref{Kind: blockdev.Snapshot, Key: volume.KeyOf("s")}, "another"), put(blockdev.Ref{Kind: blockdev.Marks, Key: volume.KeyOf("a")}, "marks of b")}
	whole := []blockdev.Ref{volumeOf("c"), put(blockdev.Ref{Kind: blockdev.Snapshot, Key: volume.KeyOf("right")}, "right"), put(blockdev.Ref{Kind: blockdev.Marks, Key: volume.KeyOf("c")}, "marks of c")}
	l := start(t, 0, pool)
	mixedUp(t, l, pool)
	for _, ref := range mixed {
		fails(t, second(pool.Get(t.Context(), ref)), errdefs.ErrDataLoss, ref.String())
	}
	for _, ref := range whole {
		check.OK(t, second(pool.Get(t.Context(), ref)))
	}
	check.OK(t, l.Delete(t.Context(), idOf("c")))
	for _, name := range []string{"volumes/" + volume.KeyOf("a"), "snapshots/" + volume.KeyOf("s"), "marks/" + volume.KeyOf("a")} {
		check.OK(t, second(os.Stat(dir+"/pool/"+name+".img")))
	}
}

// TestLVMMixedUp: while no driver runs, somebody gives two logical volumes each other's names. Their tags, which are their records, go with them. No user of
// the one is given the bytes of the other. With their own names back, both are as before.
func TestLVMMixedUp(t *testing.T) {
	group := drivertest.NewGroup(t, 256*mib)
	for kind, url := range map[string]string{"linear": group.URL(), "thin": group.ThinPool(t, "tp", "-L", "100M", "--poolmetadatasize", "4M")} {
		t.Run(kind, func(t *testing.T) {
			var pool blockdev.Pool
			open := func() *volume.Local {
				t.Helper()
				if pool != nil {
					check.OK(t, pool.Close())
				}
				var err error
				pool, err = pools.Open(t.Context(), "default", url+"?reservePercent=0")
				check.OK(t, err)
				return start(t, 0, pool)
			}
			l := open()
			defer func() { check.OK(t, pool.Close()) }()
			first := func(name string, write bool) []byte {
				t.Helper()
				v, err := l.Get(t.Context(), idOf(name))
				check.OK(t, err)
				device, err := l.AttachRaw(t.Context(), v, nil, true)
				check.OK(t, err)
				f, err := os.OpenFile(device.Path, os.O_RDWR, 0)
				check.OK(t, err)
				b := bytes.Repeat([]byte(name), 4096)
				if write {
					_, err = f.WriteAt(b, 0)
				} else {
					_, err = f.ReadAt(b, 0)
				}
				check.OK(t, errors.Join(err, f.Sync(), f.Close(), device.Close(), l.Detach(t.Context(), v.ID)))
				return b
			}
			want := map[string][]byte{}
			for _, name := range []string{"a", "b"} {
				create(t, l, name)
				want[name] = first(name, true)
			}
			swap := func() {
				t.Helper()
				a, b := volumeOf("a").String(), volumeOf("b").String()
				for _, names := range [][2]string{{a, "between"}, {b, a}, {"between", b}} {
					drivertest.Run(t, "lvrename", "-q", group.Name, names[0], names[1])
				}
			}
			swap()
			l = open()
			mixedUp(t, l, pool)
			swap()
			l = open()
			for name, b := range want {
				if !bytes.Equal(first(name, false), b) {
					t.Errorf("volume %s has other bytes", name)
				}
				check.OK(t, l.Delete(t.Context(), idOf(name)))
			}
		})
	}
}
