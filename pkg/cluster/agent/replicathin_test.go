package agent

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/direct"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// thinly has the disk of a leg be a thin volume, in a pool that has room for a part of it. extend gives the pool room for all of it.
func (f *tended) thinly(name string, room int64, features string) (extend func()) {
	t, l := f.t, f.legs[name]
	meta, data := f.loop("meta", 4<<20), f.loop("data", 2*tendedSize)
	pool, thin := l.name+"-pool", l.name+"-thin"
	table := func(size int64) []dm.Line {
		return []dm.Line{{Length: size, Kind: "thin-pool", Text: fmt.Sprintf("%s %s 128 0 %s", dm.Number(meta), dm.Number(data), features)}}
	}
	check.OK(t, dm.Make(pool, "", table(room)))
	t.Cleanup(func() { drivertest.Run(t, "dmsetup", "remove", "--retry", pool) })
	drivertest.Run(t, "dmsetup", "message", pool, "0", "create_thin 0")
	p, err := dm.Find(pool)
	check.OK(t, err)
	check.OK(t, dm.Make(thin, "", []dm.Line{{Length: tendedSize, Kind: "thin", Text: dm.Number(p.Number) + " 0"}}))
	t.Cleanup(func() { drivertest.Run(t, "dmsetup", "remove", "--retry", thin) })
	d, err := dm.Find(thin)
	check.OK(t, err)
	old := l.disk
	l.disk = d.Number
	f.mends(name)
	t.Cleanup(func() {
		l.disk = old
		f.mends(name)
	})
	return func() {
		drivertest.Run(t, "dmsetup", "suspend", pool)
		drivertest.Run(t, "dmsetup", "load", pool, "--table", fmt.Sprintf("0 %d thin-pool %s", 2*tendedSize/512, table(0)[0].Text))
		drivertest.Run(t, "dmsetup", "resume", pool)
	}
}

// bytesOf returns what is on the disk of a leg.
func (f *tended) bytesOf(name string) []byte {
	f.t.Helper()
	at, err := os.Readlink(dm.Sysfs(f.legs[name].number))
	check.OK(f.t, err)
	disk, err := direct.Open("/dev/"+filepath.Base(at), os.O_RDONLY)
	check.OK(f.t, err)
	defer disk.Close()
	page, free, err := direct.Memory(tendedSize)
	check.OK(f.t, err)
	defer free()
	_, err = disk.ReadAt(page, 0)
	check.OK(f.t, err)
	return bytes.Clone(page)
}

// TestThinPoolFills: the thin pool below a leg is full in the midst of writes, at once or after it has let them wait. Writes go on with the other leg, and once
// the pool was extended the leg is current again, with all that was written.
func TestThinPoolFills(t *testing.T) {
	const timeout = "/sys/module/dm_thin_pool/parameters/no_space_timeout"
	for full, features := range map[string]string{"a": "0", "b": "1 error_if_no_space"} {
		t.Run(full+", "+features, func(t *testing.T) {
			f := newTended(t, 2, "a", "b")
			extend := f.thinly(full, tendedSize/4, features)
			before, err := os.ReadFile(timeout)
			check.OK(t, errors.Join(err, os.WriteFile(timeout, []byte("4"), 0o600)))
			t.Cleanup(func() { check.OK(t, os.WriteFile(timeout, before, 0o600)) })
			f.marks = func(string) error { return fmt.Errorf("%w: what was written is not known", errdefs.ErrDataLoss) } // so all is copied
			f.starts()
			for at := int64(0); at < tendedSize; at += 64 << 10 {
				f.ends(f.write(at), fmt.Sprint("a write at ", at))
			}
			f.eventually("alone", func(now *mirrorView) bool { return len(now.v.Current()) == 1 && len(now.s.Legs) == 1 })
			f.eventually("cannot join", func(now *mirrorView) bool {
				leg := now.v.Leg(full)
				return now.s.Joining == nil && len(now.v.Current()) == 1 && leg.Message != ""
			})
			extend()
			f.mu.Lock()
			f.legs[full].ended = false
			f.mu.Unlock()
			f.mends(full)
			f.eventually("both current", func(now *mirrorView) bool { return len(now.v.Current()) == 2 && len(now.s.Legs) == 2 })
			f.ends(f.write(4096), "a write")
			if a, b := f.bytesOf("a"), f.bytesOf("b"); !bytes.Equal(a, b) {
				t.Error("the legs differ")
			} else if a[tendedSize-64<<10] != 1 {
				t.Error("what was written last is not there")
			}
		})
	}
}
