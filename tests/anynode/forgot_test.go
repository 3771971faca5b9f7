package anynode

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
)

// TestFlushFailsInMove: while a volume that is used moves, the disk of its new home fails a flush, and takes writes afterwards. The kernel of who uses it forgets that, and writes what comes
// to the old home alone. The driver there is dead in that moment, or lives. The volume moves, and nothing that was acknowledged is missing.
func TestFlushFailsInMove(t *testing.T) {
	c := newNodesWith(t, map[string][]string{third: {"--copy-bandwidth=8Mi"}})
	for name, dead := range map[string]bool{"dead": true, "alive": false} {
		t.Run(name, func(t *testing.T) {
			in := *c
			in.TB = t
			v := in.create(name, co.Block, func(r *csi.CreateVolumeRequest) { r.CapacityRange.RequiredBytes = 64 * mib })
			t.Cleanup(v.letGo)
			content := drivertest.Content{Seed: name, Offset: 8 * mib, Size: 56 * mib}
			v.use(third, func(target string) {
				check.OK(t, content.Write(target))
				f, err := os.OpenFile(target, os.O_RDWR|unix.O_DIRECT, 0)
				check.OK(t, err)
				defer f.Close()
				page := aligned()
				_, err = f.WriteAt(page, places[1])
				check.OK(t, err)
				v.move(newHome)
				v.eventually("it is copied", func() bool { return len(v.mirrors()) > 0 })
				thaw := frozen(v.agents[home]) // what would be sealed when all is copied
				t.Cleanup(thaw)
				if v.says("sealed", home) {
					t.Fatal("all was copied too soon")
				}
				v.eventually("all is copied", func() bool { return v.all("AA") })
				if dead {
					v.agents[third].Kill()
				}
				flushed := v.flushFails(f)
				for n := range byte(5) {
					copy(page, bytes.Repeat([]byte{n + 1}, len(page)))
					for _, at := range places {
						_, err := f.WriteAt(page, at)
						check.OK(t, err)
					}
				}
				if dead && !v.all("AA") {
					t.Fatalf("this kernel does not forget: %v", v.mirrors())
				}
				if dead {
					check.OK(t, v.agents[third].Start())
				}
				thaw()
				v.moved(home, newHome)
				select {
				case err := <-flushed:
					check.OK(t, err)
				case <-time.After(patient):
					t.Error("never flushed")
				}
				v.has(target, page, content)
			})
			v.use(newHome, func(target string) { v.has(target, bytes.Repeat([]byte{5}, block), content) })
			v.again("delete it", v.of.Delete)
			v.gone()
		})
	}
}

// places are in the range without data at the beginning of a volume, and in all the rest: each is a target of its own.
var places = []int64{0, 4 * mib}

// letGo has nothing wait for a mirror any more, if the test has failed.
func (v *volume) letGo() {
	if !v.Failed() {
		return
	}
	names, _ := dm.Names("")
	for _, name := range names {
		if kind, _, _ := dm.Target(name); kind == "mirror" {
			d, err := dm.Find(name)
			check.OK(v, err)
			size, err := d.Size()
			check.OK(v, err)
			check.OK(v, dm.Replace(name, []dm.Line{{Length: size, Kind: "error"}}))
		}
	}
}

// has makes sure of what was written.
func (v *volume) has(target string, page []byte, content drivertest.Content) {
	v.Helper()
	f, err := os.Open(target)
	check.OK(v, err)
	defer f.Close()
	for _, at := range places {
		b := make([]byte, len(page))
		_, err = f.ReadAt(b, at)
		if check.OK(v, err); !bytes.Equal(b, page) {
			v.Errorf("%s has %d... at %d, not %d", target, b[0], at, page[0])
		}
	}
	check.OK(v, content.In(target))
}

// mirrors is what the kernel says of all mirrors there are.
func (v *volume) mirrors() (said []dm.Mirror) {
	v.Helper()
	names, err := dm.Names("")
	check.OK(v, err)
	for _, name := range names {
		targets, _ := dm.Status(name) // it may be gone
		for _, l := range targets {
			if l.Kind != "mirror" {
				continue
			}
			m, err := dm.ParseMirror(l.Text)
			check.OK(v, err)
			said = append(said, m)
		}
	}
	return said
}

// all reports whether all is copied, and what the kernel says of each leg: A, that it is whole, or D.
func (v *volume) all(legs string) bool {
	for _, m := range v.mirrors() {
		if m.Synced < m.Total || m.Legs[0].Failed != (legs[0] == 'D') || m.Legs[1].Failed != (legs[1] == 'D') {
			return false
		}
	}
	return true
}

// flushFails has a flush fail on the new home, and nothing else. It ends later.
func (v *volume) flushFails(f *os.File) (flushed chan error) {
	v.Helper()
	name := v.exported(newHome)
	made, err := dm.Lines(name)
	check.OK(v, err)
	bad := append([]dm.Line(nil), made...)
	for i := range bad {
		bad[i].Kind, bad[i].Text = "flakey", bad[i].Text+" 0 1 1 error_writes"
	}
	check.OK(v, dm.Replace(name, bad))
	flushed = make(chan error, 1)
	go func() { flushed <- unix.Fdatasync(int(f.Fd())) }()
	v.eventually("the flush fails", func() bool { return v.all("AD") })
	check.OK(v, dm.Replace(name, made))
	return flushed
}

// exported is the device that a node exports of the volume.
func (v *volume) exported(node string) (name string) {
	v.Helper()
	exports, err := filepath.Glob("/sys/kernel/config/nvmet/subsystems/*" + v.key() + "*/namespaces/1/device_path")
	check.OK(v, err)
	for _, export := range exports {
		path, err := os.ReadFile(export)
		check.OK(v, err)
		device := filepath.Base(strings.TrimSpace(string(path)))
		for below := filepath.Join("/sys/block", device); ; {
			if file, err := os.ReadFile(filepath.Join(below, "loop/backing_file")); err == nil {
				if strings.Contains(string(file), "/pool-of-"+node+"/") {
					return strings.TrimSpace(drivertest.Run(v, "cat", "/sys/block/"+device+"/dm/name"))
				}
				break
			}
			next, _ := filepath.Glob(filepath.Join(below, "slaves/*"))
			if len(next) == 0 {
				break
			}
			below = next[0]
		}
	}
	v.Fatalf("node %s exports none of %v", node, exports)
	return ""
}
