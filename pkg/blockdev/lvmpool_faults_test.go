package blockdev_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// What can go wrong with pools of logical volumes, by the hand of others, of a disk, or of
// nobody.

const extentSize = 4 * mib // of the groups here

// lvmFixture is an open pool of linear or thin volumes in a group of its own.
type lvmFixture struct {
	*testing.T
	group *drivertest.Group
	url   string
	thin  bool
	pool  blockdev.Pool
}

// onLVM runs a test on linear and on thin volumes. The pool can promise 200 MiB at the
// least; the group has that much beside a thin pool.
func onLVM(t *testing.T, test func(f *lvmFixture)) {
	for _, kind := range []string{"linear", "thin"} {
		t.Run(kind, func(t *testing.T) {
			f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 256*mib), thin: kind == "thin"}
			f.url = f.group.URL() + "?reservePercent=0"
			if f.thin {
				f.url = f.group.ThinPool(t, "tp", "-L", "208M", "--poolmetadatasize", "4M") + "?reservePercent=0"
			}
			f.start()
			test(f)
		})
	}
}

// start opens the pool; it is closed, with all that it has gone, at the end of the test.
func (f *lvmFixture) start() {
	f.Helper()
	f.pool = openURL(f, f.url)
	f.Cleanup(func() { f.clear() })
}

func (f *lvmFixture) clear() {
	f.Helper()
	if f.pool == nil {
		return
	}
	f.empty()
	must(f, f.pool.Close())
	f.pool = nil
}

// restart closes the pool and opens it again.
func (f *lvmFixture) restart() {
	f.Helper()
	must(f, f.pool.Close())
	f.pool = nil
	f.pool = openURL(f, f.url)
}

// all lists the records of the pool.
func (f *lvmFixture) all() (records []blockdev.Record) {
	f.Helper()
	for _, kind := range []blockdev.Kind{blockdev.Snapshot, blockdev.Volume} {
		some, err := f.pool.List(context.Background(), kind, "", 0)
		must(f, err)
		records = append(records, some...)
	}
	return records
}

// empty deletes all there is, and looks that it is gone.
func (f *lvmFixture) empty() {
	f.Helper()
	ctx := context.Background()
	for _, r := range f.all() {
		if err := errors.Join(f.pool.Detach(ctx, r.Ref), f.pool.Delete(ctx, r.Ref)); err != nil {
			f.Error(err)
		}
	}
	for _, volume := range f.group.Volumes(f) {
		if strings.Contains(volume, ".") && !f.Failed() {
			f.Errorf("left behind: %s", volume)
		}
	}
}

func (f *lvmFixture) make(ref blockdev.Ref, size int64) {
	f.Helper()
	create(f, f.pool, blockdev.Spec{Ref: ref, Size: size})
}

func (f *lvmFixture) copy(ref, origin blockdev.Ref, size int64) {
	f.Helper()
	create(f, f.pool, blockdev.Spec{Ref: ref, Size: size, Origin: origin})
}

// marked are bytes in which each block is full of one word.
func marked(word string, size int64) []byte {
	return bytes.Repeat(fmt.Appendf(nil, "%-16s", word), int(size/16))
}

// attached runs something on the device of an object.
func (f *lvmFixture) attached(ref blockdev.Ref, readOnly bool, do func(device string)) {
	f.Helper()
	device, err := f.pool.Attach(context.Background(), ref, blockdev.Attachment{ReadOnly: readOnly})
	must(f, err)
	do(device.Path)
	must(f, device.Close())
}

// write writes past the page cache.
func (f *lvmFixture) write(ref blockdev.Ref, offset int64, b []byte) {
	f.Helper()
	f.attached(ref, false, func(device string) { must(f, writeDirect(device, offset, b)) })
}

func writeDirect(device string, offset int64, b []byte) error {
	file, err := os.OpenFile(device, os.O_RDWR|unix.O_DIRECT, 0)
	if err != nil {
		return err
	}
	memory, err := unix.Mmap(-1, 0, mib, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS) // aligned
	if err != nil {
		return errors.Join(err, file.Close())
	}
	for len(b) > 0 && err == nil {
		n := copy(memory, b)
		_, err = file.WriteAt(memory[:n], offset)
		b, offset = b[n:], offset+int64(n)
	}
	return errors.Join(err, unix.Munmap(memory), file.Close())
}

func readDevice(device string, offset, size int64) ([]byte, error) {
	file, err := os.Open(device)
	if err != nil {
		return nil, err
	}
	b := make([]byte, size)
	_, err = file.ReadAt(b, offset)
	return b, errors.Join(err, file.Close())
}

func (f *lvmFixture) read(ref blockdev.Ref, offset, size int64) (b []byte) {
	f.Helper()
	f.attached(ref, true, func(device string) {
		var err error
		b, err = readDevice(device, offset, size)
		must(f, err)
	})
	return b
}

func (f *lvmFixture) holds(ref blockdev.Ref, offset int64, want []byte) {
	f.Helper()
	if !bytes.Equal(f.read(ref, offset, int64(len(want))), want) {
		f.Errorf("%s does not hold what was written at byte %d", ref, offset)
	}
}

func words(problems []blockdev.Problem) (all []string) {
	for _, p := range problems {
		all = append(all, p.Reason)
	}
	return all
}

// ill fails unless just that is said to be wrong with an object; nothing means that all is well.
func (f *lvmFixture) ill(ref blockdev.Ref, want ...string) {
	f.Helper()
	problems, err := f.pool.Health(f.Context(), ref)
	must(f, err)
	if have := words(problems); !slices.Equal(have, want) {
		f.Errorf("health of %s: %v, want %v", ref, problems, want)
	}
}

func (f *lvmFixture) poolIll(want ...string) {
	f.Helper()
	problems := f.pool.PoolHealth(f.Context())
	if have := words(problems); !slices.Equal(have, want) {
		f.Errorf("health of the pool: %v, want %v", problems, want)
	}
}

// lv is what lvm2 says of the volumes of the group.
func (f *lvmFixture) lv(columns string) []string {
	f.Helper()
	out := drivertest.Run(f, "lvs", "--noheadings", "--units", "b", "-o", columns, f.group.Name)
	var lines []string
	for line := range strings.Lines(out) {
		lines = append(lines, strings.Join(strings.Fields(line), " "))
	}
	return lines
}

func (f *lvmFixture) path(ref blockdev.Ref) string { return f.group.Name + "/" + ref.String() }

// says makes sure that an error wraps another, and has some words.
func says(t testing.TB, err, want error, words ...string) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("error %v, want %v", err, want)
		return
	}
	for _, word := range words {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("error %q does not say %q", err, word)
		}
	}
}

// TestLVMThinPoolFull: nothing is promised above the watermark; a full thin pool is
// reported; with more room all is well.
func TestLVMThinPoolFull(t *testing.T) {
	f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 512*mib), thin: true}
	f.url = f.group.ThinPool(t, "tp", "-L", "64M", "--poolmetadatasize", "4M", "-q") + "?overprovision=4&reservePercent=0"
	drivertest.Run(t, "lvchange", "-q", "--errorwhenfull", "y", f.group.Name+"/tp")
	f.start()
	ctx := t.Context()
	f.make(vol("a"), 128*mib)
	f.make(vol("b"), 8*mib)
	content := marked("before", 48*mib)
	f.write(vol("a"), 0, content) // 75 %
	f.make(vol("c"), 8*mib)
	f.poolIll()
	before := capacityOf(t, f.pool)
	if before.Total != 256*mib || before.Promised != 144*mib || before.Available != 112*mib {
		t.Errorf("capacity %+v", before)
	}
	f.write(vol("a"), 48*mib, marked("more", 12*mib)) // 94 %
	f.poolIll("PoolNearlyFull")
	f.ill(vol("a"))
	refused := func() {
		t.Helper()
		for _, spec := range []blockdev.Spec{{Ref: vol("d"), Size: 8 * mib}, {Ref: snap("a"), Size: 128 * mib, Origin: vol("a")}, {Ref: vol("d"), Size: 136 * mib, Origin: vol("a")}} {
			spec.Name = "refused"
			says(t, second(f.pool.Create(ctx, spec)), errdefs.ErrNoSpace, f.group.Name+"/tp")
		}
		says(t, second(f.pool.Expand(ctx, vol("a"), 132*mib)), errdefs.ErrNoSpace, f.group.Name+"/tp")
		if c := capacityOf(t, f.pool); c.Available != 0 || c.MaxVolume != 0 || c.Promised != before.Promised {
			t.Errorf("capacity %+v", c)
		}
	}
	refused()
	// What is there already still works.
	must(t, second(f.pool.SetLabels(ctx, vol("a"), func(l map[string]string) error { l["x"] = "y"; return nil })))
	f.attached(vol("a"), false, func(device string) {
		if err := writeDirect(device, 60*mib, marked("too much", 16*mib)); !errors.Is(err, unix.ENOSPC) && !errors.Is(err, unix.EIO) {
			t.Errorf("write to a full thin pool: %v", err)
		}
	})
	f.poolIll("PoolFull")
	f.ill(vol("a"), "PoolFull")
	f.ill(vol("b"), "PoolFull")
	refused()
	f.holds(vol("a"), 0, content)
	drivertest.Run(t, "lvextend", "-q", "-L", "+128M", f.group.Name+"/tp")
	f.poolIll()
	f.ill(vol("a"))
	f.write(vol("a"), 60*mib, marked("fits now", 16*mib))
	f.holds(vol("a"), 0, content)
	f.copy(snap("a"), vol("a"), 128*mib)
	f.make(vol("d"), 8*mib)
	must(t, second(f.pool.Expand(ctx, vol("a"), 132*mib)))
}

// TestLVMForeign: what others have in the group is neither used nor touched.
func TestLVMForeign(t *testing.T) {
	onLVM(t, func(f *lvmFixture) {
		ctx := f.Context()
		theirs := vol("f").String()
		kept := []string{theirs, "theirs", "grow.theirs", "cut.of.cloth"}
		args := []string{"lvcreate", "-q", "-Wn", "-an", "-L", "8M", f.group.Name}
		if f.thin {
			args = []string{"lvcreate", "-q", "-an", "-V", "8M", "--thinpool", "tp", f.group.Name}
		}
		if !f.thin {
			args = append(args, "-Zn")
		}
		for _, name := range kept {
			drivertest.Run(f, append(args, "-n", name, "--addtag", "theirs")...)
		}
		drivertest.Run(f, "lvchange", "-q", "--addtag", "ashlar", f.group.Name+"/grow.theirs", f.group.Name+"/cut.of.cloth")
		drivertest.Run(f, "lvchange", "-q", "-ay", "-K", f.group.Name+"/"+theirs)
		device := "/dev/" + f.group.Name + "/" + theirs
		must(f, writeDirect(device, 0, marked("theirs", 8*mib)))
		defer func() {
			for _, name := range kept {
				drivertest.Run(f, "lvremove", "-q", "-f", f.group.Name+"/"+name)
			}
		}()
		state := func() (lines []string) {
			for _, line := range f.lv("lv_name,lv_uuid,lv_size,lv_tags,lv_attr") {
				if name, _, _ := strings.Cut(line, " "); slices.Contains(kept, name) {
					lines = append(lines, line)
				}
			}
			return lines
		}
		before := state()
		f.restart()
		f.poolIll("UnknownVolume")
		if c := capacityOf(f, f.pool); f.thin && (c.Promised != 32*mib || c.Available != 208*mib-32*mib) || !f.thin && c.Available > 252*mib-32*mib {
			f.Errorf("capacity does not count what others have: %+v", c)
		}
		if records := f.all(); len(records) > 0 {
			f.Errorf("others' volumes are listed: %v", records)
		}
		says(f, second(f.pool.Get(ctx, vol("f"))), errdefs.ErrNotFound)
		says(f, second(f.pool.Attach(ctx, vol("f"), blockdev.Attachment{})), errdefs.ErrNotFound)
		says(f, second(f.pool.Create(ctx, blockdev.Spec{Ref: vol("f"), Name: "f", Size: 8 * mib})), errdefs.ErrPrecondition, theirs)
		must(f, f.pool.Delete(ctx, vol("f")))
		must(f, f.pool.Detach(ctx, vol("e")))
		if orphans, err := f.pool.Orphans(ctx); err != nil || len(orphans) > 0 {
			f.Errorf("orphans %v, %v", orphans, err)
		}

		// Their tags on our volumes stay.
		f.make(vol("a"), 8*mib)
		drivertest.Run(f, "lvchange", "-q", "--addtag", "backup=nightly", "--addtag", "ashlarish", f.path(vol("a")))
		f.restart()
		must(f, second(f.pool.SetLabels(ctx, vol("a"), func(l map[string]string) error { l["x"] = "y"; return nil })))
		must(f, second(f.pool.Expand(ctx, vol("a"), 16*mib)))
		f.restart()
		r, err := f.pool.Get(ctx, vol("a"))
		must(f, err)
		if r.Labels["x"] != "y" || r.Size != 16*mib {
			f.Errorf("record %+v", r)
		}
		if tags := drivertest.Run(f, "lvs", "--noheadings", "-o", "lv_tags", f.path(vol("a"))); !strings.Contains(tags, "backup=nightly") || !strings.Contains(tags, "ashlarish") {
			f.Errorf("tags %s", tags)
		}
		must(f, f.pool.Delete(ctx, vol("a")))
		if after := state(); !slices.Equal(before, after) {
			f.Errorf("others' volumes were touched: %q, before %q", after, before)
		}
		if b, err := readDevice(device, 0, 8*mib); err != nil || !bytes.Equal(b, marked("theirs", 8*mib)) {
			f.Errorf("others' bytes were touched: %v", err)
		}
	})
}

// TestLVMMissingDevice: with a disk gone, what is on the others is served, what was on it
// is reported, and nothing is changed; with the disk back all is as before.
func TestLVMMissingDevice(t *testing.T) {
	for _, kind := range []string{"linear", "thin"} {
		t.Run(kind, func(t *testing.T) {
			f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 64*mib, 64*mib), thin: kind == "thin"}
			f.url = f.group.URL() + "?reservePercent=0"
			if f.thin {
				drivertest.Run(t, "lvcreate", "-q", "--type", "thin-pool", "-L", "48M", "--poolmetadatasize", "4M", "--poolmetadataspare", "n", "-n", "tp", f.group.Name, f.group.Devices[0])
				f.url = f.group.URL() + "/tp?reservePercent=0&overprovision=2"
			}
			f.start()
			ctx := t.Context()
			size := int64(60 * mib)
			if f.thin {
				size = 32 * mib
			}
			f.make(vol("a"), size) // all of the first disk, if it is linear
			f.write(vol("a"), 0, marked("a", 8*mib))
			f.make(vol("b"), 16*mib)
			f.write(vol("b"), 0, marked("b", 8*mib))
			must(t, f.pool.Close())
			before := f.lv("lv_name,lv_uuid,lv_size,lv_tags")

			disk := f.group.Devices[1]
			image := drivertest.Run(t, "losetup", "-n", "-O", "BACK-FILE", disk)
			drivertest.Run(t, "losetup", "-d", disk)
			f.pool = openURL(t, f.url)
			f.holds(vol("a"), 0, marked("a", 8*mib))
			f.ill(vol("a"))
			f.poolIll("DeviceMissing")
			if f.thin {
				f.holds(vol("b"), 0, marked("b", 8*mib))
			} else {
				says(t, second(f.pool.Attach(ctx, vol("b"), blockdev.Attachment{})), errdefs.ErrUnavailable, f.path(vol("b")))
				f.ill(vol("b"), "DeviceMissing")
				says(t, second(f.pool.Create(ctx, blockdev.Spec{Ref: vol("d"), Name: "d", Size: 16 * mib, Origin: vol("b")})), errdefs.ErrUnavailable)
			}
			says(t, second(f.pool.Create(ctx, blockdev.Spec{Ref: vol("c"), Name: "c", Size: 4 * mib})), errdefs.ErrUnavailable, "missing")
			says(t, second(f.pool.Expand(ctx, vol("a"), size+4*mib)), errdefs.ErrUnavailable)
			says(t, f.pool.Delete(ctx, vol("b")), errdefs.ErrUnavailable, "missing")
			must(t, second(f.pool.Get(ctx, vol("b"))))
			if c := capacityOf(t, f.pool); c.Promised != size+16*mib || c.Available != 0 {
				t.Errorf("capacity %+v: nothing can be made, %d are promised", c, size+16*mib)
			}

			drivertest.Run(t, "losetup", disk, image)
			if after := f.lv("lv_name,lv_uuid,lv_size,lv_tags"); !slices.Equal(before, after) {
				t.Errorf("volumes %q, before %q", after, before)
			}
			f.restart()
			f.holds(vol("a"), 0, marked("a", 8*mib))
			f.holds(vol("b"), 0, marked("b", 8*mib))
			f.ill(vol("a"))
			f.ill(vol("b"))
			f.poolIll()
			f.make(vol("c"), 4*mib)
			f.restart()
		})
	}
}

// faultyDisk is a device whose reads and writes can be made to fail.
type faultyDisk struct {
	testing.TB
	name, under string
	sectors     int64
}

// faultyDisks made by this process, to give each its own name.
var faultyDisks int

func newFaultyDisk(t testing.TB, size int64) *faultyDisk {
	t.Helper()
	drivertest.NeedLVM(t)
	t.Setenv("DM_DISABLE_UDEV", "1")
	faultyDisks++
	d := &faultyDisk{TB: t, name: fmt.Sprintf("ashlar-faulty-%d-%d", os.Getpid(), faultyDisks), under: drivertest.Disk(t, size), sectors: size / 512}
	drivertest.Run(t, "dmsetup", "create", d.name, "--table", fmt.Sprintf("0 %d linear %s 0", d.sectors, d.under))
	t.Cleanup(func() { drivertest.Run(t, "dmsetup", "remove", "--retry", d.name) })
	return d
}

// behave gives it a table; the first MiB is what lvm2 keeps its metadata in.
func (d *faultyDisk) behave(table string) {
	d.Helper()
	drivertest.Run(d, "dmsetup", "suspend", "--noflush", "--nolockfs", d.name)
	drivertest.Run(d, "dmsetup", "load", d.name, "--table", table)
	drivertest.Run(d, "dmsetup", "resume", d.name)
}

func (d *faultyDisk) well() { d.behave(fmt.Sprintf("0 %d linear %s 0", d.sectors, d.under)) }

func (d *faultyDisk) faults() map[string]string {
	data := d.sectors - 2048
	return map[string]string{
		"no data":   fmt.Sprintf("0 2048 linear %s 0\n2048 %d error", d.under, data),
		"no write":  fmt.Sprintf("0 2048 linear %s 0\n2048 %d flakey %s 2048 0 60 1 error_writes", d.under, data, d.under),
		"no record": fmt.Sprintf("0 %d flakey %s 0 0 60 1 error_writes", d.sectors, d.under),
		"nothing":   fmt.Sprintf("0 %d error", d.sectors),
	}
}

// TestLVMFailingDevice: what a disk fails, the call fails, and leaves nothing; with the
// disk well again the retry succeeds.
func TestLVMFailingDevice(t *testing.T) {
	disk := newFaultyDisk(t, 256*mib)
	f := &lvmFixture{T: t, group: drivertest.NewGroupOn(t, "/dev/mapper/"+disk.name)}
	f.url = f.group.URL() + "?reservePercent=0"
	f.start()
	ctx := t.Context()
	f.make(vol("a"), 16*mib)
	f.write(vol("a"), 0, marked("a", 16*mib))
	f.copy(snap("a"), vol("a"), 16*mib)
	operations := map[string]func() error{
		"create": func() error {
			return second(f.pool.Create(ctx, blockdev.Spec{Ref: vol("b"), Name: "b", Size: 8 * mib}))
		},
		"copy": func() error {
			return second(f.pool.Create(ctx, blockdev.Spec{Ref: vol("c"), Name: "c", Size: 16 * mib, Origin: snap("a")}))
		},
		"expand": func() error { return second(f.pool.Expand(ctx, vol("a"), 20*mib)) },
		"labels": func() error {
			return second(f.pool.SetLabels(ctx, vol("a"), func(l map[string]string) error { l["x"] = "y"; return nil }))
		},
		"delete": func() error { return f.pool.Delete(ctx, vol("d")) },
	}
	for fault, table := range disk.faults() {
		for name, operation := range operations {
			f.make(vol("d"), 4*mib)
			before := capacityOf(t, f.pool)
			lvs := f.lv("lv_name,lv_size,lv_tags")
			disk.behave(table)
			err := operation()
			t.Logf("%s, %s: %v", fault, name, err)
			disk.well()
			mayWork := (name == "labels" || name == "delete") && fault == "no data" // who cannot write cannot flush either
			switch {
			case err == nil && !mayWork:
				t.Errorf("%s, %s: it succeeded", fault, name)
			case err != nil && mayWork:
				t.Errorf("%s, %s: %v", fault, name, err)
			case err == nil:
			case fault == "no data":
				says(t, err, unix.EIO)
			case fault == "no write": // lvm2 made its change, and the flush after that fails
				says(t, err, errdefs.ErrUnavailable, "flush", "input/output error")
			default:
				says(t, err, errdefs.ErrUnavailable)
			}
			if err != nil {
				for ref, want := range map[blockdev.Ref]bool{vol("b"): false, vol("c"): false, vol("a"): true, vol("d"): true} {
					if _, err := f.pool.Get(ctx, ref); (err == nil) != want {
						t.Errorf("%s, %s: %s: %v", fault, name, ref, err)
					}
				}
			}
			if err := operation(); err != nil {
				t.Errorf("%s, %s: retry: %v", fault, name, err)
			}
			if name != "expand" {
				f.holds(vol("a"), 0, marked("a", 16*mib))
			} else {
				f.holds(vol("a"), 0, append(marked("a", 16*mib), make([]byte, 4*mib)...))
			}
			f.holds(snap("a"), 0, marked("a", 16*mib))
			for _, digit := range []string{"b", "c", "d"} {
				must(t, f.pool.Delete(ctx, vol(digit)))
			}
			if name == "expand" {
				must(t, f.pool.Delete(ctx, vol("a")))
				f.copy(vol("a"), snap("a"), 16*mib)
			}
			must(t, second(f.pool.SetLabels(ctx, vol("a"), func(l map[string]string) error { delete(l, "x"); return nil })))
			f.make(vol("d"), 4*mib)
			if name != "expand" {
				if now := f.lv("lv_name,lv_size"); len(now) != len(lvs) {
					t.Errorf("%s, %s: volumes %q, before %q", fault, name, now, lvs)
				}
			}
			if now := capacityOf(t, f.pool); now != before {
				t.Errorf("%s, %s: capacity %+v, before %+v", fault, name, now, before)
			}
			must(t, f.pool.Delete(ctx, vol("d")))
			if t.Failed() {
				return
			}
		}
	}
}

// onFaultyDisks is a thin pool whose data is on one faulty disk, and whose metadata is on another.
func onFaultyDisks(t *testing.T) (f *lvmFixture, data, books *faultyDisk) {
	t.Helper()
	data, books = newFaultyDisk(t, 128*mib), newFaultyDisk(t, 64*mib)
	f = &lvmFixture{T: t, group: drivertest.NewGroupOn(t, "/dev/mapper/"+data.name, "/dev/mapper/"+books.name), thin: true}
	drivertest.Run(t, "lvcreate", "-q", "-an", "-Zn", "-Wn", "-L", "96M", "-n", "tp", f.group.Name, "/dev/mapper/"+data.name)
	drivertest.Run(t, "lvcreate", "-q", "-an", "-Zn", "-Wn", "-L", "8M", "-n", "books", f.group.Name, "/dev/mapper/"+books.name)
	drivertest.Run(t, "lvconvert", "-q", "-y", "--type", "thin-pool", "--poolmetadata", f.group.Name+"/books", "--poolmetadataspare", "n", f.group.Name+"/tp")
	f.url = f.group.URL() + "/tp?reservePercent=0&overprovision=4"
	return f, data, books
}

// TestLVMFailingThinPool: a thin pool whose data a disk fails keeps its books, and is as
// before once the disk is well.
func TestLVMFailingThinPool(t *testing.T) {
	f, data, _ := onFaultyDisks(t)
	f.start()
	ctx := t.Context()
	f.make(vol("a"), 16*mib)
	f.write(vol("a"), 0, marked("a", 8*mib))
	f.make(vol("b"), 16*mib)
	before := f.lv("lv_name,lv_size,lv_tags")
	data.behave(data.faults()["no data"])
	f.attached(vol("b"), false, func(device string) {
		if err := writeDirect(device, 0, marked("b", mib)); !errors.Is(err, unix.EIO) {
			t.Errorf("write: %v", err)
		}
	})
	for _, spec := range []blockdev.Spec{{Ref: vol("c"), Size: 8 * mib}, {Ref: snap("a"), Size: 16 * mib, Origin: vol("a")}} {
		create(t, f.pool, spec) // no data is written for it
		must(t, f.pool.Delete(ctx, spec.Ref))
	}
	data.well()
	f.restart()
	f.poolIll()
	f.ill(vol("a"))
	f.holds(vol("a"), 0, marked("a", 8*mib))
	if after := f.lv("lv_name,lv_size,lv_tags"); !slices.Equal(before, after) {
		t.Errorf("volumes %q, before %q", after, before)
	}
	f.make(vol("c"), 8*mib)
	f.copy(snap("a"), vol("a"), 16*mib)
	f.write(vol("b"), 0, marked("b", mib))
	f.holds(vol("b"), 0, marked("b", mib))
	f.holds(snap("a"), 0, marked("a", 8*mib))
}

// TestLVMNeedsCheck: a thin pool whose metadata a disk fails, so that the kernel wants it to be
// checked (needs_check), is reported, also after a start, and refuses what would change it;
// volumes can be read. Repaired as docs/reliability.md says, it is as before, also for a driver
// that went on all the time.
func TestLVMNeedsCheck(t *testing.T) {
	f, _, books := onFaultyDisks(t)
	f.start()
	ctx := t.Context()
	f.make(vol("a"), 16*mib)
	f.write(vol("a"), 0, marked("a", 8*mib))
	f.copy(snap("a"), vol("a"), 16*mib)
	f.make(vol("b"), 16*mib)
	f.write(vol("b"), 0, marked("b", 4*mib))
	before, lvs := capacityOf(t, f.pool), f.lv("lv_name,lv_size,lv_tags")

	device := attach(t, f.pool, vol("b"), blockdev.Attachment{Keep: true})
	books.behave(books.faults()["no record"])
	file, err := os.OpenFile(device.Path, os.O_RDWR, 0)
	must(t, err)
	_ = writeDirect(device.Path, 8*mib, marked("b", mib))
	_ = file.Sync() // it has the metadata written, unless the kernel tried by itself by then
	must(t, file.Close())
	books.well()
	for _, restarted := range []bool{false, true} {
		if restarted {
			must(t, errors.Join(device.Close(), f.pool.Detach(ctx, vol("b"))))
			f.restart()
		}
		f.poolIll("PoolFailed")
		for _, ref := range []blockdev.Ref{vol("a"), vol("b"), snap("a")} {
			f.ill(ref, "PoolFailed")
		}
		tp := f.group.Name + "/tp"
		for what, call := range map[string]func() error{
			"create": func() error {
				return second(f.pool.Create(ctx, blockdev.Spec{Ref: vol("c"), Name: "c", Size: 8 * mib}))
			},
			"copy": func() error {
				return second(f.pool.Create(ctx, blockdev.Spec{Ref: snap("b"), Name: "b", Size: 16 * mib, Origin: vol("b")}))
			},
			"expand": func() error { return second(f.pool.Expand(ctx, vol("a"), 20*mib)) },
			"delete": func() error { return f.pool.Delete(ctx, snap("a")) },
		} {
			err := call()
			t.Logf("%s: %v", what, err)
			says(t, err, errdefs.ErrUnavailable, tp, "needs_check", "lvconvert --repair")
		}
		f.holds(vol("a"), 0, marked("a", 8*mib))
		if after := f.lv("lv_name,lv_size,lv_tags"); !slices.Equal(lvs, after) {
			t.Errorf("volumes %q, before %q", after, lvs)
		}
	}

	drivertest.Run(t, "lvchange", "-q", "-an", f.group.Name+"/tp")
	drivertest.Run(t, "lvchange", "-q", "--setactivationskip", "y", f.group.Name+"/tp")
	drivertest.Run(t, "lvconvert", "-q", "-y", "--repair", f.group.Name+"/tp")
	drivertest.Run(t, "lvchange", "-q", "--setactivationskip", "n", f.group.Name+"/tp")
	drivertest.Run(t, "lvchange", "-q", "-ay", "--config", `global/thin_check_options=["-q","--clear-needs-check-flag"]`, f.group.Name+"/tp")
	drivertest.Run(t, "lvremove", "-q", "-y", f.group.Name+"/tp_meta0")
	f.poolIll()
	for ref, content := range map[blockdev.Ref][]byte{vol("a"): marked("a", 8*mib), vol("b"): marked("b", 4*mib), snap("a"): marked("a", 8*mib)} {
		f.ill(ref)
		f.holds(ref, 0, content)
	}
	if now := capacityOf(t, f.pool); now != before {
		t.Errorf("capacity %+v, before %+v", now, before)
	}
	f.make(vol("c"), 8*mib)
	f.copy(snap("b"), vol("b"), 16*mib)
	f.write(vol("b"), 8*mib, marked("b", mib))
	f.holds(vol("b"), 8*mib, marked("b", mib))
	f.restart()
	f.poolIll()
}

// TestLVMTakenDown: a thin pool that somebody took down, to repair it, is not brought up behind his back:
// neither by calls that need it, nor, if he marked it so, by a start. Up again, it is as before.
func TestLVMTakenDown(t *testing.T) {
	f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 256*mib), thin: true}
	f.url = f.group.ThinPool(t, "tp", "-L", "64M", "--poolmetadatasize", "4M") + "?reservePercent=0"
	f.start()
	f.make(vol("a"), 16*mib)
	f.write(vol("a"), 0, marked("a", 8*mib))
	f.copy(snap("a"), vol("a"), 16*mib)
	tp := f.group.Name + "/tp"
	drivertest.Run(t, "lvchange", "-q", "-an", tp)
	drivertest.Run(t, "lvchange", "-q", "--setactivationskip", "y", tp)
	for _, restarted := range []bool{false, true} {
		if restarted {
			f.restart()
		}
		for what, call := range map[string]func() error{
			"attach": func() error { return second(f.pool.Attach(t.Context(), vol("a"), blockdev.Attachment{})) },
			"create": func() error {
				return second(f.pool.Create(t.Context(), blockdev.Spec{Ref: vol("c"), Name: "c", Size: 8 * mib}))
			},
			"copy": func() error {
				return second(f.pool.Create(t.Context(), blockdev.Spec{Ref: snap("b"), Name: "b", Size: 16 * mib, Origin: vol("a")}))
			},
			"expand": func() error { return second(f.pool.Expand(t.Context(), vol("a"), 20*mib)) },
			"delete": func() error { return f.pool.Delete(t.Context(), snap("a")) },
		} {
			if err := call(); !errors.Is(err, errdefs.ErrUnavailable) || !strings.Contains(err.Error(), "lvchange -ay -K "+tp) {
				t.Errorf("%s of a thin pool that is down: %v", what, err)
			}
			if attr := f.lv("lv_active"); slices.ContainsFunc(attr, func(active string) bool { return active != "" }) {
				t.Fatalf("%s brought something up: %q", what, attr)
			}
		}
		f.poolIll("PoolUnavailable")
	}
	drivertest.Run(t, "lvconvert", "-q", "-y", "--repair", tp)
	drivertest.Run(t, "lvchange", "-q", "--setactivationskip", "n", tp)
	drivertest.Run(t, "lvchange", "-q", "-ay", tp)
	drivertest.Run(t, "lvremove", "-q", "-y", tp+"_meta0")
	for _, ref := range []blockdev.Ref{vol("a"), snap("a")} {
		f.holds(ref, 0, marked("a", 8*mib))
	}
	f.copy(snap("b"), vol("a"), 16*mib)
	must(t, f.pool.Delete(t.Context(), snap("a")))
	f.poolIll()
}

// TestLVMOlderTable: a device that an older driver made passes ioctls down to a disk of the group. A start
// brings it to a table that does not, while it is in use.
func TestLVMOlderTable(t *testing.T) {
	onLVM(t, func(f *lvmFixture) {
		f.make(vol("a"), 16*mib)
		device := attach(f, f.pool, vol("a"), blockdev.Attachment{Keep: true})
		told, err := os.ReadFile("/sys/block/" + filepath.Base(device.Path) + "/dm/name")
		must(f, err)
		name := strings.TrimSpace(string(told))
		base := strings.TrimSuffix(name, "-writable")
		drivertest.Run(f, "dmsetup", "load", name, "--table", fmt.Sprintf("0 %d linear /dev/mapper/%s 0", 16*mib/512, base))
		drivertest.Run(f, "dmsetup", "resume", name)
		file, err := os.OpenFile(device.Path, os.O_RDWR, 0)
		must(f, err)
		defer file.Close()
		passed := func() bool {
			_, err := unix.IoctlLoopGetStatus64(int(file.Fd()))
			return err == nil
		}
		if !f.thin && !passed() {
			f.Fatal("a single linear target passes nothing down: this test shows nothing")
		}
		f.restart()
		if passed() {
			f.Error("it passes ioctls down")
		}
		if table := drivertest.Run(f, "dmsetup", "table", name); strings.Count(table, "linear") != 2 {
			f.Errorf("its table is %q", table)
		}
		must(f, second(file.WriteAt(marked("a", mib), 0)))
		must(f, errors.Join(file.Sync(), file.Close(), device.Close(), f.pool.Detach(f.Context(), vol("a"))))
		f.holds(vol("a"), 0, marked("a", mib))
	})
}

// TestLVMCopyGoesOn: a copy of a volume in use that ran out of time goes on where it stopped, and tells at once
// that its bytes are fixed: what waits for that, a frozen filesystem, does not wait for the copy.
func TestLVMCopyGoesOn(t *testing.T) {
	f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 256*mib)}
	f.url = f.group.URL() + "?reservePercent=0"
	f.start()
	f.make(vol("a"), 32*mib)
	f.write(vol("a"), 0, marked("a", 32*mib))
	device := attach(t, f.pool, vol("a"), blockdev.Attachment{Keep: true})
	told, goneOn := 0, false
	spec := blockdev.Spec{Ref: snap("b"), Name: "b", Size: 32 * mib, Origin: vol("a"), Cut: func(context.Context) error { told++; return nil }}
	for n := 4; !goneOn; n++ { // until it ends in the middle of the copy
		_, err := f.pool.Create(&endsAfter{Context: t.Context(), n: n}, spec)
		if err == nil {
			t.Fatal("no copy was cut short in the middle")
		}
		says(t, err, context.Canceled)
		goneOn = strings.Contains(err.Error(), "copy /dev/") && blockdev.Copied(f.pool, snap("b")) > 0
	}
	must(t, writeDirect(device.Path, 0, marked("other", mib)))
	told = 0
	must(t, second(f.pool.Create(t.Context(), spec)))
	if told != 1 {
		t.Errorf("a copy that went on told %d times that its bytes are fixed", told)
	}
	must(t, errors.Join(device.Close(), f.pool.Detach(t.Context(), vol("a"))))
	f.holds(snap("b"), 0, marked("a", 32*mib))
}

// TestLVMDelivered: messages that lvm2 left written down, although the thin pool had got them,
// do not keep a removal from it; so no new volume shows the bytes of a removed one.
func TestLVMDelivered(t *testing.T) {
	f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 256*mib), thin: true}
	f.url = f.group.ThinPool(t, "tp", "-L", "64M", "--poolmetadatasize", "4M") + "?reservePercent=0"
	f.start()
	ctx := t.Context()
	for range 2 {
		f.make(vol("a"), 8*mib)
		f.write(vol("a"), 0, marked("secret", 8*mib))
		must(t, f.pool.Close())
		f.rewrite(func(all string) string { return withMessage(all, "delete = 77") })
		f.pool = openURL(t, f.url)
		must(t, f.pool.Delete(ctx, vol("a")))
		status := drivertest.Run(t, "dmsetup", "status", strings.ReplaceAll(f.group.Name, "-", "--")+"-tp-tpool")
		if !strings.Contains(status, " 0/") {
			t.Errorf("the empty thin pool has blocks: %s", status)
		}
		f.make(vol("a"), 8*mib)
		f.holds(vol("a"), 0, make([]byte, 8*mib))
		must(t, f.pool.Delete(ctx, vol("a")))
	}
}

// rewrite changes what lvm2 has written down of the group, while no pool is open.
func (f *lvmFixture) rewrite(edit func(all string) string) {
	f.Helper()
	backup := filepath.Join(f.TempDir(), "backup")
	drivertest.Run(f, "vgcfgbackup", "-q", "-f", backup, f.group.Name)
	text, err := os.ReadFile(backup)
	must(f, err)
	must(f, os.WriteFile(backup, []byte(edit(string(text))), 0o600))
	drivertest.Run(f, "vgcfgrestore", "-q", "-y", "--force", "-f", backup, f.group.Name)
}

// withMessage adds a message to the thin pool to what lvm2 has written down.
func withMessage(all, message string) string {
	return strings.Replace(all, "zero_new_blocks = 1", "zero_new_blocks = 1\nmessage1 {\n"+message+"\n}", 1)
}

// untold is withMessage, with the thin pool's count of changes one higher: it has to be told.
func untold(t testing.TB, all, message string) string {
	t.Helper()
	before, tp, _ := strings.Cut(all, "\ttp {")
	id := regexp.MustCompile(`transaction_id = (\d+)`).FindStringSubmatch(tp)
	transaction, err := strconv.Atoi(id[1])
	must(t, err)
	return withMessage(before+"\ttp {"+strings.Replace(tp, id[0], fmt.Sprint("transaction_id = ", transaction+1), 1), message)
}

// TestLVMRemovalTold: lvm2 was cut short before it told the thin pool to remove a volume, of which it knows no more. A
// start does it.
func TestLVMRemovalTold(t *testing.T) {
	f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 256*mib), thin: true}
	f.url = f.group.ThinPool(t, "tp", "-L", "64M", "--poolmetadatasize", "4M") + "?reservePercent=0"
	f.start()
	f.make(vol("a"), 8*mib)
	f.write(vol("a"), 0, marked("a", 8*mib))
	must(t, f.pool.Close())
	f.pool = nil
	entry := regexp.MustCompile(`(?s)\n\t\t` + vol("a").String() + ` \{.*?\n\t\t\}\n`)
	f.rewrite(func(all string) string { return untold(t, entry.ReplaceAllString(all, "\n"), "delete = 1") })
	f.pool = openURL(t, f.url)
	if status := drivertest.Run(t, "dmsetup", "status", "--target", "thin-pool"); !strings.Contains(status, " 0/") {
		t.Errorf("the empty thin pool has blocks: %s", status)
	}
}

// TestLVMNoBytesOfOthers: no byte of a deleted volume is in one that gets its extents.
func TestLVMNoBytesOfOthers(t *testing.T) {
	onLVM(t, func(f *lvmFixture) {
		ctx := f.Context()
		const secret = "tenant's secret"
		all := capacityOf(f, f.pool).Available
		soil := func() {
			f.Helper()
			n := capacityOf(f, f.pool).Available
			f.make(vol("f"), n)
			f.write(vol("f"), 0, marked(secret, n))
			must(f, f.pool.Delete(ctx, vol("f")))
		}
		clean := func(ref blockdev.Ref, from, to int64, what string) {
			f.Helper()
			if b := f.read(ref, from, to-from); bytes.Contains(b, []byte(secret)) {
				f.Errorf("%s has bytes of a deleted volume", what)
			} else if len(bytes.Trim(b, "\x00")) > 0 {
				f.Errorf("%s is not zero", what)
			}
		}
		soil()
		f.make(vol("a"), all/4-all/4%extentSize)
		clean(vol("a"), 0, all/4-all/4%extentSize, "a new volume")
		must(f, f.pool.Delete(ctx, vol("a")))

		soil()
		f.make(vol("a"), 8*mib)
		f.write(vol("a"), 0, marked("a", 8*mib))
		device := attach(f, f.pool, vol("a"), blockdev.Attachment{Keep: true})
		must(f, second(f.pool.Expand(ctx, vol("a"), 16*mib)))
		if b, err := readDevice(device.Path, 8*mib, 8*mib); err != nil || len(bytes.Trim(b, "\x00")) > 0 {
			f.Errorf("the tail of an attached volume that grew is not zero: %v", err)
		}
		must(f, errors.Join(device.Close(), f.pool.Detach(ctx, vol("a"))))
		must(f, second(f.pool.Expand(ctx, vol("a"), 24*mib)))
		clean(vol("a"), 8*mib, 24*mib, "the tail of a volume that grew")
		f.holds(vol("a"), 0, marked("a", 8*mib))

		soil()
		f.copy(snap("a"), vol("a"), 24*mib)
		f.holds(snap("a"), 0, marked("a", 8*mib))
		clean(snap("a"), 8*mib, 24*mib, "a snapshot")
		soil()
		f.copy(vol("b"), snap("a"), 32*mib)
		f.holds(vol("b"), 0, marked("a", 8*mib))
		clean(vol("b"), 8*mib, 32*mib, "a larger copy of a snapshot")
		soil()
		device = attach(f, f.pool, vol("a"), blockdev.Attachment{})
		f.copy(vol("c"), vol("a"), 28*mib)
		must(f, device.Close())
		f.holds(vol("c"), 0, marked("a", 8*mib))
		clean(vol("c"), 8*mib, 28*mib, "a larger clone of an attached volume")
	})
}

// TestLVMBehindOurBack: what somebody does to a volume is told, never made up for, and
// harms no other.
func TestLVMBehindOurBack(t *testing.T) {
	onLVM(t, func(f *lvmFixture) {
		ctx := f.Context()
		f.make(vol("0"), 8*mib)
		f.write(vol("0"), 0, marked("well", 8*mib))
		path := f.path(vol("a"))
		lvm := func(argv ...string) { f.Helper(); drivertest.Run(f, argv...) }
		spec := blockdev.Spec{Ref: vol("a"), Name: vol("a").String(), Size: 16 * mib}
		for _, c := range []struct {
			name   string
			harm   func()
			reason string // of Health; none: all is well
			mend   func() // before it is deleted
		}{
			{"deactivated", func() { lvm("lvchange", "-q", "-an", path) }, "", nil},
			{"activated", func() { lvm("lvchange", "-q", "-ay", "-K", path) }, "", nil},
			{"removed", func() { lvm("lvremove", "-q", "-f", path) }, "VolumeMissing", nil},
			{"shrunk", func() { lvm("lvreduce", "-q", "-f", "-L", "8M", path) }, "VolumeTruncated", nil},
			{"renamed", func() { lvm("lvrename", "-q", path, f.group.Name+"/mine") }, "VolumeMissing", func() { lvm("lvremove", "-q", "-f", f.group.Name+"/mine") }},
		} {
			f.Run(c.name, func(t *testing.T) {
				outer := f
				f := &lvmFixture{T: t, group: f.group, url: f.url, thin: f.thin, pool: f.pool}
				defer func() { outer.pool = f.pool }()
				for _, restarted := range []bool{false, true} {
					if restarted && (c.name == "removed" || c.name == "renamed") {
						continue // nobody knows of it any more
					}
					f.make(vol("a"), 16*mib)
					f.write(vol("a"), 0, marked("a", 8*mib))
					f.ill(vol("a"))
					if restarted {
						must(t, f.pool.Close())
					}
					c.harm()
					if restarted {
						f.pool = openURL(t, f.url)
					} else {
						blockdev.Age(f.pool)
					}
					f.ill(vol("a"), slices.DeleteFunc([]string{c.reason}, func(s string) bool { return s == "" })...)
					_, again := f.pool.Create(ctx, spec)
					must(t, again) // idempotent by its record; nothing is made
					if c.reason == "" {
						device := attach(f, f.pool, vol("a"), blockdev.Attachment{Keep: c.name == "activated"})
						if b, err := readDevice(device.Path, 0, 8*mib); err != nil || !bytes.Equal(b, marked("a", 8*mib)) {
							t.Errorf("bytes are lost: %v", err)
						}
						must(t, device.Close())
					} else {
						for _, readOnly := range []bool{false, true} {
							says(t, second(f.pool.Attach(ctx, vol("a"), blockdev.Attachment{ReadOnly: readOnly})), errdefs.ErrDataLoss, path)
						}
						says(t, second(f.pool.Create(ctx, blockdev.Spec{Ref: snap("a"), Name: "s", Size: 16 * mib, Origin: vol("a")})), errdefs.ErrDataLoss)
						says(t, second(f.pool.Expand(ctx, vol("a"), 32*mib)), errdefs.ErrDataLoss)
						f.ill(vol("a"), c.reason)
						if devices, err := f.pool.Attached(ctx, vol("a")); err != nil || len(devices) > 0 {
							t.Errorf("devices %v of a damaged volume, %v", devices, err)
						}
					}
					f.holds(vol("0"), 0, marked("well", 8*mib))
					f.ill(vol("0"))
					if c.mend != nil {
						c.mend()
					}
					must(t, errors.Join(f.pool.Detach(ctx, vol("a")), f.pool.Delete(ctx, vol("a"))))
					says(t, second(f.pool.Get(ctx, vol("a"))), errdefs.ErrNotFound)
				}
			})
			if f.Failed() {
				return
			}
		}
	})
}

// TestLVMDamagedTags: a volume whose record cannot be read is reported and left alone.
func TestLVMDamagedTags(t *testing.T) {
	onLVM(t, func(f *lvmFixture) {
		ctx := f.Context()
		f.make(vol("0"), 8*mib)
		for digit, change := range map[string][]string{
			"1": {"--deltag", "ashlar.name=" + vol("1").String()},
			"2": {"--addtag", "ashlar.size=4096"},
			"3": {"--addtag", "ashlar.origin=nonsense"},
			"4": {"--addtag", "ashlar.color=red"},
			"5": {"--addtag", "ashlar.state=broken"},
			"6": {"--deltag", "ashlar"},
			"7": {"--addtag", "ashlar.label.x=!zz"},
		} {
			f.make(vol(digit), 4*mib)
			f.write(vol(digit), 0, marked(digit, 4*mib))
			drivertest.Run(f, append([]string{"lvchange", "-q", f.path(vol(digit))}, change...)...)
		}
		before := f.lv("lv_name,lv_uuid,lv_size,lv_tags")
		f.restart()
		f.poolIll("RecordDamaged")
		if records := f.all(); len(records) != 1 || records[0].Ref != vol("0") {
			f.Errorf("listed: %v", records)
		}
		if c := capacityOf(f, f.pool); f.thin && c.Promised != 36*mib {
			f.Errorf("capacity %+v does not count damaged volumes", c)
		}
		for i := 1; i <= 7; i++ {
			ref := vol(strconv.Itoa(i))
			says(f, second(f.pool.Get(ctx, ref)), errdefs.ErrDataLoss, ref.String())
			says(f, second(f.pool.Attach(ctx, ref, blockdev.Attachment{})), errdefs.ErrDataLoss)
			says(f, second(f.pool.Expand(ctx, ref, 8*mib)), errdefs.ErrDataLoss)
			says(f, second(f.pool.Create(ctx, blockdev.Spec{Ref: ref, Name: ref.String(), Size: 4 * mib})), errdefs.ErrDataLoss)
			says(f, second(f.pool.Create(ctx, blockdev.Spec{Ref: snap("1"), Name: "s", Size: 4 * mib, Origin: ref})), errdefs.ErrDataLoss)
			says(f, f.pool.Delete(ctx, ref), errdefs.ErrPrecondition, ref.String())
			f.ill(ref, "RecordDamaged")
		}
		f.ill(vol("0"))
		if after := f.lv("lv_name,lv_uuid,lv_size,lv_tags"); !slices.Equal(before, after) {
			f.Errorf("volumes %q, before %q", after, before)
		}
		for i := 1; i <= 7; i++ {
			drivertest.Run(f, "lvremove", "-q", "-f", f.path(vol(strconv.Itoa(i))))
		}
		f.restart()
		f.poolIll()
	})
}

// TestLVMConverted: a volume that somebody converted to another layout, or renamed, while no driver ran is not taken
// for one that is gone: it is reported, and not deleted nor made again.
func TestLVMConverted(t *testing.T) {
	onLVM(t, func(f *lvmFixture) {
		ctx := f.Context()
		f.make(vol("0"), 8*mib)
		f.make(vol("a"), 8*mib)
		renamed := f.group.Name + "/mine"
		drivertest.Run(f, "lvrename", "-q", f.path(vol("a")), renamed)
		want := []string{"VolumeRenamed"}
		if !f.thin { // as after lvconvert, for which the kernel would need dm-raid
			args := []string{"lvcreate", "-q", "-an", "-Wn", "-Zn", "-L", "8M", "--type", "striped", "-i", "2", "-n", vol("b").String(), f.group.Name}
			for _, tag := range []string{"ashlar", "ashlar.name=" + vol("b").String(), "ashlar.size=8388608", "ashlar.created=2026-01-02T15:04:05Z"} {
				args = append(args, "--addtag", tag)
			}
			disk := drivertest.Disk(f.T, 64*mib)
			drivertest.Run(f, "vgextend", "-q", f.group.Name, disk)
			defer func() { drivertest.Run(f, "vgreduce", "-q", f.group.Name, disk) }()
			drivertest.Run(f, args...)
			want = []string{"RecordDamaged", "VolumeRenamed"}
		}
		f.restart()
		f.poolIll(want...)
		if !f.thin {
			says(f, second(f.pool.Get(ctx, vol("b"))), errdefs.ErrDataLoss, "striped")
			says(f, second(f.pool.Create(ctx, blockdev.Spec{Ref: vol("b"), Name: vol("b").String(), Size: 8 * mib})), errdefs.ErrDataLoss)
			says(f, f.pool.Delete(ctx, vol("b")), errdefs.ErrPrecondition, "striped")
			drivertest.Run(f, "lvremove", "-q", "-f", f.path(vol("b")))
		}
		drivertest.Run(f, "lvrename", "-q", renamed, f.path(vol("a")))
		f.restart()
		f.poolIll()
		f.ill(vol("a"))
		f.ill(vol("0"))
	})
}

// lvmChildren are the processes of lvm2 that a process has started.
func lvmChildren(parent int) (pids []int) {
	paths, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, path := range paths {
		stat, _ := os.ReadFile(path)
		pid, rest, _ := strings.Cut(string(stat), " (lvm) ")
		fields := strings.Fields(rest) // state, parent
		if len(fields) > 1 && fields[0] != "Z" && fields[1] == strconv.Itoa(parent) {
			n, _ := strconv.Atoi(pid)
			pids = append(pids, n)
		}
	}
	return pids
}

// timeUp is the context of a caller whose time is up when a test says so, not before.
type timeUp struct {
	context.Context
	up chan struct{}
}

func (c timeUp) Done() <-chan struct{} { return c.up }

func (c timeUp) Err() error {
	select {
	case <-c.up:
		return context.DeadlineExceeded
	default:
		return nil
	}
}

// hangBound is how long a call may take on a slow machine to leave what hangs.
const hangBound = 30 * time.Second

// TestLVMHangs: a call leaves at its deadline, whatever lvm2 does; so does who waits for
// his turn; what hung is gone soon after, and the next call works.
func TestLVMHangs(t *testing.T) {
	onLVM(t, func(f *lvmFixture) {
		f.make(vol("0"), 8*mib)
		f.write(vol("0"), 0, marked("0", 8*mib))
		var hung []int
		hangs := map[string]func() (release func()){
			"locked": func() func() {
				lock, err := os.OpenFile("/run/lock/lvm/V_"+f.group.Name, os.O_RDWR|os.O_CREATE, 0o600)
				must(f, err)
				must(f, unix.Flock(int(lock.Fd()), unix.LOCK_EX))
				return func() { must(f, lock.Close()) }
			},
			"stopped": func() func() {
				must(f, second(f.pool.SetLabels(f.Context(), vol("0"), func(l map[string]string) error { l["n"] += "x"; return nil })))
				hung = lvmChildren(os.Getpid())
				for _, pid := range hung {
					must(f, syscall.Kill(pid, syscall.SIGSTOP))
				}
				return func() {}
			},
		}
		calls := map[string]func(ctx context.Context) error{
			"create": func(ctx context.Context) error {
				return second(f.pool.Create(ctx, blockdev.Spec{Ref: vol("a"), Name: vol("a").String(), Size: 8 * mib}))
			},
			"labels": func(ctx context.Context) error {
				return second(f.pool.SetLabels(ctx, vol("0"), func(l map[string]string) error { l["n"] += "y"; return nil }))
			},
			"expand": func(ctx context.Context) error { return second(f.pool.Expand(ctx, vol("0"), 16*mib)) },
			"attach": func(ctx context.Context) error {
				device, err := f.pool.Attach(ctx, vol("0"), blockdev.Attachment{})
				return errors.Join(err, device.Close())
			},
			"copy": func(ctx context.Context) error {
				return second(f.pool.Create(ctx, blockdev.Spec{Ref: snap("c"), Name: snap("c").String(), Size: 8 * mib, Origin: vol("0")}))
			},
			"delete": func(ctx context.Context) error { return f.pool.Delete(ctx, snap("c")) },
		}
		for how, hang := range hangs {
			for _, name := range []string{"create", "labels", "attach", "copy", "delete", "expand"} {
				// What is stopped takes seconds to be killed, whatever the kind of pool.
				if how == "stopped" && (f.thin || name != "attach" && name != "expand") {
					continue
				}
				for deadline := time.Now().Add(time.Minute); len(f.group.DeviceNames()) > 0 && time.Now().Before(deadline); {
					time.Sleep(time.Millisecond) // what was attached before goes in the kernel's own time
				}
				release := hang()
				waited := make(chan error, 1)
				start := time.Now()
				caller := timeUp{Context: context.Background(), up: make(chan struct{})} // when who waits for his turn has given up
				time.AfterFunc(500*time.Millisecond, func() {
					defer close(caller.up)
					ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
					defer cancel()
					_, err := f.pool.SetLabels(ctx, vol("0"), func(l map[string]string) error { l["z"] += "z"; return nil })
					if took := time.Since(start); took > hangBound {
						err = fmt.Errorf("it took %v: %w", took, err)
						waited <- errors.New(err.Error())
						return
					}
					waited <- err
				})
				err := calls[name](caller)
				if took := time.Since(start); !errors.Is(err, context.DeadlineExceeded) || took > hangBound {
					f.Errorf("%s, lvm %s: %v after %v", name, how, err, took)
				}
				if err := <-waited; !errors.Is(err, context.DeadlineExceeded) {
					f.Errorf("%s, lvm %s: who waited for his turn: %v", name, how, err)
				}
				if how == "stopped" { // by itself
					still := func() bool {
						return slices.ContainsFunc(hung, func(pid int) bool { return slices.Contains(lvmChildren(os.Getpid()), pid) })
					}
					for deadline := time.Now().Add(time.Minute); still() && time.Now().Before(deadline); {
						time.Sleep(20 * time.Millisecond)
					}
					if still() {
						f.Errorf("%s: lvm %v hangs, and is still there", name, hung)
					}
				}
				release()
				for try := range 2 { // it is idempotent
					ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
					if err := calls[name](ctx); err != nil {
						f.Errorf("%s, lvm %s: try %d afterwards: %v", name, how, try, err)
					}
					cancel()
				}
				if name == "expand" {
					must(f, f.pool.Delete(f.Context(), vol("0")))
					f.make(vol("0"), 8*mib)
				}
				must(f, f.pool.Delete(f.Context(), vol("a")))
				if f.Failed() {
					return
				}
			}
		}
	})
}

// TestLVMHangsSuspended: a device that was suspended when lvm2 was killed is resumed as soon
// as lvm2 is gone, not when the next call comes.
func TestLVMHangsSuspended(t *testing.T) {
	f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 64*mib)}
	f.url = f.group.URL() + "?reservePercent=0"
	f.start()
	f.make(vol("a"), 8*mib)
	f.attached(vol("a"), false, func(path string) {
		for _, pid := range lvmChildren(os.Getpid()) {
			must(t, syscall.Kill(pid, syscall.SIGSTOP))
		}
		device := strings.ReplaceAll(f.group.Name, "-", "--") + "-" + vol("a").String() + "-writable"
		drivertest.Run(t, "dmsetup", "suspend", device)
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		_, err := f.pool.SetLabels(ctx, vol("a"), func(l map[string]string) error { l["x"] = "y"; return nil })
		says(t, err, context.DeadlineExceeded)
		written := make(chan error, 1)
		go func() { written <- writeDirect(path, 0, marked("a", mib)) }()
		select {
		case err := <-written:
			must(t, err)
		case <-time.After(time.Minute):
			drivertest.Run(t, "dmsetup", "resume", device)
			t.Errorf("it is still suspended; resumed, a write ends with: %v", <-written)
		}
	})
}

// TestLVMCutShort: a call that ran out of time at any point can be tried again, also where
// there is room for one of it only, and what is zeroed is not zeroed again.
func TestLVMCutShort(t *testing.T) {
	f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 200*mib)}
	f.url = f.group.URL() + "?reservePercent=0"
	f.start()
	all := capacityOf(t, f.pool).Available
	for n := 1; n < 40; n += 4 {
		f.make(vol("a"), 8*mib)
		ctx := &endsAfter{Context: t.Context(), n: n}
		_, err := f.pool.Expand(ctx, vol("a"), all)
		if err == nil {
			must(t, f.pool.Delete(t.Context(), vol("a")))
			break
		}
		says(t, err, context.Canceled)
		must(t, second(f.pool.Expand(t.Context(), vol("a"), all)))
		must(t, f.pool.Delete(t.Context(), vol("a")))
		if c := capacityOf(t, f.pool); c.Available != all {
			t.Fatalf("%d looks at the context: capacity %+v, want %d", n, c, all)
		}
	}
	// Each try zeroes some, so with less than one try needs the last one has all.
	tries := 0
	for n := 6; tries == 0; n++ {
		for try := 1; try < 6 && tries == 0; try++ {
			_, err := f.pool.Create(&endsAfter{Context: t.Context(), n: n}, blockdev.Spec{Ref: vol("b"), Name: "b", Size: all})
			if err == nil {
				tries = try
			} else {
				says(t, err, context.Canceled)
			}
		}
		must(t, f.pool.Delete(t.Context(), vol("b")))
	}
	if tries == 1 {
		t.Errorf("no volume of %d bytes was zeroed in more than one try", all)
	}
}

// TestLVMCutActivation: a device that lvm2 brought up after the call for it had failed is
// not taken for one that is to be kept, and is gone after a start.
func TestLVMCutActivation(t *testing.T) {
	onLVM(t, func(f *lvmFixture) {
		f.make(vol("a"), 8*mib)
		for _, how := range []blockdev.Attachment{{}, {ReadOnly: true}, {Keep: true}} {
			drivertest.Run(f, "lvchange", "-q", "-ay", "-K", f.path(vol("a")))
			device, err := f.pool.Attach(f.Context(), vol("a"), how)
			must(f, err)
			must(f, device.Close())
			devices, err := f.pool.Attached(f.Context(), vol("a"))
			must(f, err)
			if len(devices) > 0 != how.Keep {
				f.Errorf("%+v: %v are left", how, devices)
			}
			must(f, f.pool.Detach(f.Context(), vol("a")))
		}
		drivertest.Run(f, "lvchange", "-q", "-ay", "-K", f.path(vol("a"))) // and then the driver was killed
		f.restart()
		if names := f.group.DeviceNames(); len(names) > 0 {
			f.Errorf("after a start: %v are left", names)
		}
	})
}

// TestLVMGoing: a volume grows, and is copied, and deleted, while its devices are going with their last user.
func TestLVMGoing(t *testing.T) {
	onLVM(t, func(f *lvmFixture) {
		for size := int64(8 * mib); size < 40*mib; size += 4 * mib {
			f.make(vol("a"), size)
			use := func() {
				device, err := f.pool.Attach(f.Context(), vol("a"), blockdev.Attachment{})
				must(f, err)
				must(f, device.Close())
			}
			use()
			must(f, second(f.pool.Expand(f.Context(), vol("a"), size+4*mib)))
			use()
			f.copy(snap("b"), vol("a"), size+4*mib)
			use()
			must(f, f.pool.Delete(f.Context(), vol("a")))
			must(f, f.pool.Delete(f.Context(), snap("b")))
		}
	})
}

// TestLVMHalfDone: what lvm2 began and gave up is removed, a volume in use goes on, and the
// retry succeeds.
func TestLVMHalfDone(t *testing.T) {
	f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 256*mib)}
	f.url = f.group.URL() + "?reservePercent=0"
	f.start()
	f.make(vol("a"), 8*mib)
	device, err := f.pool.Attach(t.Context(), vol("a"), blockdev.Attachment{})
	must(t, err)
	must(t, writeDirect(device.Path, 0, marked("a", 8*mib)))
	before := capacityOf(t, f.pool)
	// A device has the name that lvm2 needs in the middle of it.
	taken := strings.ReplaceAll(f.group.Name, "-", "--") + "-cut." + snap("a").String() + "-cow"
	drivertest.Run(t, "dmsetup", "create", taken, "--notable")
	spec := blockdev.Spec{Ref: snap("a"), Name: "a", Size: 8 * mib, Origin: vol("a")}
	_, err = f.pool.Create(t.Context(), spec)
	drivertest.Run(t, "dmsetup", "remove", "--retry", taken)
	if err == nil || !strings.Contains(err.Error(), "lvcreate") {
		t.Errorf("with a name taken: %v", err)
	}
	must(t, writeDirect(device.Path, 0, marked("a", 8*mib)))
	blockdev.Age(f.pool)
	if now := capacityOf(t, f.pool); now != before {
		t.Errorf("capacity %+v, before %+v", now, before)
	}
	create(t, f.pool, spec)
	must(t, device.Close())
	f.holds(snap("a"), 0, marked("a", 8*mib))
}

// TestLVMDevicesBelow: what an lvm2 that died while it made a cut left below volumes goes with the
// next start: also below a logical volume that was never written down, held by a table that
// never came into effect, or without a table. What others have under such a name stays.
func TestLVMDevicesBelow(t *testing.T) {
	f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 64*mib)}
	f.url = f.group.URL() + "?reservePercent=0"
	f.start()
	f.make(vol("a"), 8*mib)
	uuid := "LVM-" + strings.ReplaceAll(strings.TrimSpace(drivertest.Run(t, "vgs", "--noheadings", "-o", "vg_uuid", f.group.Name)), "-", "")
	prefix := strings.ReplaceAll(f.group.Name, "-", "--") + "-"
	bare := prefix + "cut." + snap("c").String()
	left, held, others := prefix+"cut."+snap("a").String()+"-cow", prefix+vol("a").String()+"-real", prefix+"cut."+vol("b").String()+"-cow"
	device, err := f.pool.Attach(t.Context(), vol("a"), blockdev.Attachment{Keep: true})
	must(t, err)
	must(t, device.Close())
	drivertest.Run(t, "dmsetup", "create", left, "--uuid", uuid+"x-cow", "--table", "0 8 error")
	drivertest.Run(t, "dmsetup", "create", held, "--uuid", uuid+"x-real", "--table", "0 16384 error")
	drivertest.Run(t, "dmsetup", "create", bare, "--uuid", uuid+"y", "--notable")
	drivertest.Run(t, "dmsetup", "create", others, "--uuid", "somebody's", "--table", "0 8 error")
	drivertest.Run(t, "dmsetup", "load", prefix+vol("a").String(), "--table", "0 16384 linear /dev/mapper/"+held+" 0")
	f.restart()
	for name, want := range map[string]bool{left: false, held: false, bare: false, others: true} {
		_, err := exec.Command("dmsetup", "info", name).Output()
		if (err == nil) != want {
			t.Errorf("%s is there: %v", name, err == nil)
		}
	}
	must(t, writeDirect(device.Path, 0, marked("b", mib)))
	drivertest.Run(t, "dmsetup", "remove", others)
	must(t, f.pool.Detach(t.Context(), vol("a")))
	f.holds(vol("a"), 0, marked("b", mib))
}

// TestLVMWithoutTable: a device that was made, and got no table as its maker was cut short, is
// finished by the next one who needs it.
func TestLVMWithoutTable(t *testing.T) {
	onLVM(t, func(f *lvmFixture) {
		f.make(vol("a"), 8*mib)
		f.write(vol("a"), 0, marked("a", 8*mib))
		ids := strings.Fields(strings.ReplaceAll(drivertest.Run(t, "lvs", "--noheadings", "-o", "vg_uuid,lv_uuid", f.path(vol("a"))), "-", ""))
		name, uuid := strings.ReplaceAll(f.group.Name, "-", "--")+"-"+vol("a").String(), "LVM-"+ids[0]+ids[1]
		for _, how := range []blockdev.Attachment{{}, {ReadOnly: true}, {Keep: true}} {
			for _, suffix := range []string{"", "-writable", "-readonly"} {
				for _, load := range []bool{false, true} {
					drivertest.Run(t, "dmsetup", "create", name+suffix, "--notable", "--uuid", uuid+suffix)
					if load {
						drivertest.Run(t, "dmsetup", "load", name+suffix, "--table", "0 16384 error")
					}
					if devices, err := f.pool.Attached(t.Context(), vol("a")); err != nil || len(devices) > 0 {
						f.Errorf("%q without a table: attached as %v, %v", suffix, devices, err)
					}
					device, err := f.pool.Attach(t.Context(), vol("a"), how)
					must(f, err)
					have, err := readDevice(device.Path, 0, 8*mib)
					must(f, err)
					if !bytes.Equal(have, marked("a", 8*mib)) {
						f.Errorf("%q without a table: %+v shows other bytes", suffix, how)
					}
					must(f, device.Close())
					must(f, f.pool.Detach(t.Context(), vol("a")))
				}
			}
		}
	})
}

// TestLVMPartsOfThinPool: an lvm2 that was cut short while it had a thin pool down left parts of
// it up. The next start brings it up.
func TestLVMPartsOfThinPool(t *testing.T) {
	f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 256*mib), thin: true}
	f.url = f.group.ThinPool(t, "tp", "-L", "64M", "--poolmetadatasize", "4M") + "?reservePercent=0"
	f.start()
	prefix := strings.ReplaceAll(f.group.Name, "-", "--") + "-tp"
	for _, left := range [][]string{{"_tmeta"}, {"_tdata"}, {"_tmeta", "_tdata"}, {"_tmeta", "_tdata", "-tpool"}} {
		f.make(vol("a"), 8*mib) // so it has a device of its own below that for lvm2
		must(t, f.pool.Close())
		f.pool = nil
		var again [][]string
		for _, part := range left {
			uuid := strings.TrimSpace(drivertest.Run(t, "dmsetup", "info", "-c", "--noheadings", "-o", "uuid", prefix+part))
			table := strings.TrimSpace(drivertest.Run(t, "dmsetup", "table", prefix+part))
			again = append(again, []string{"dmsetup", "create", prefix + part, "--uuid", uuid, "--table", table})
		}
		drivertest.Run(t, "lvchange", "-q", "-an", f.group.Name+"/tp")
		for _, arguments := range again {
			drivertest.Run(t, arguments...)
		}
		f.pool = openURL(t, f.url)
		must(t, f.pool.Delete(t.Context(), vol("a")))
	}
}

// TestLVMSnapshotTold: the thin pool made a snapshot, and lvm2 was cut short before it had noted that;
// so it would refuse every change from then on. A start sees to that, with the thin pool up or
// down; but not if somebody has the snapshot already.
func TestLVMSnapshotTold(t *testing.T) {
	for name, test := range map[string]struct{ down, had bool }{"up": {}, "down": {down: true}, "had": {had: true}} {
		t.Run(name, func(t *testing.T) {
			f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 256*mib), thin: true}
			f.url = f.group.ThinPool(t, "tp", "-L", "64M", "--poolmetadatasize", "4M") + "?reservePercent=0"
			f.start()
			f.make(vol("a"), 8*mib)
			f.write(vol("a"), 0, marked("a", 8*mib))
			f.copy(snap("b"), vol("a"), 8*mib)
			must(t, f.pool.Close())
			f.pool = nil
			if test.down {
				drivertest.Run(t, "lvchange", "-q", "-an", f.group.Name+"/tp")
			}
			f.rewrite(func(all string) string {
				before, b, _ := strings.Cut(all, "\t"+snap("b").String()+" {")
				if !test.had {
					b = strings.Replace(b, "tags = [", `tags = ["ashlar.state=creating", `, 1)
				}
				return untold(t, before+"\t"+snap("b").String()+" {"+b, `create = "`+snap("b").String()+`"`)
			})
			f.pool = openURL(t, f.url)
			if test.had {
				err := f.pool.Delete(t.Context(), vol("a"))
				says(t, err, errdefs.ErrUnavailable, "already contain", "none that this pool was making")
				must(t, f.pool.Close())
				f.pool = nil
				return
			}
			if _, err := f.pool.Get(t.Context(), snap("b")); !errors.Is(err, errdefs.ErrNotFound) {
				t.Errorf("a snapshot that nobody has: %v", err)
			}
			f.copy(snap("b"), vol("a"), 8*mib)
			f.holds(snap("b"), 0, marked("a", 8*mib))
		})
	}
}

// TestLVMFirstVolume: while lvm2 gives a thin pool its first volume, or takes its last, the
// device of the pool is another one, and nobody takes that for a pool that is not there.
func TestLVMFirstVolume(t *testing.T) {
	f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 128*mib)}
	f.url = f.group.ThinPool(t, "tp", "-L", "64M") + "?reservePercent=0"
	f.start()
	ctx, cancel := context.WithCancel(t.Context())
	looked, looks := make(chan error), 0
	go func() {
		defer close(looked)
		for ctx.Err() == nil {
			_, err := f.pool.Capacity(context.WithoutCancel(ctx))
			if err == nil {
				for _, problem := range f.pool.PoolHealth(context.WithoutCancel(ctx)) {
					err = errors.Join(err, errors.New(problem.Message))
				}
			}
			if err != nil {
				looked <- err
				return
			}
			looks++
		}
	}()
	for range 10 {
		f.make(vol("a"), 4*mib)
		must(t, f.pool.Delete(t.Context(), vol("a")))
	}
	cancel()
	if err := <-looked; err != nil || looks < 10 {
		t.Errorf("after %d looks: %v", looks, err)
	}
}

// TestLVMReportMeanwhile: a report that was taken while a copy was given its larger size does
// not make it look as if it had lost some.
func TestLVMReportMeanwhile(t *testing.T) {
	onLVM(t, func(f *lvmFixture) {
		f.make(vol("a"), 8*mib)
		device, err := f.pool.Attach(f.Context(), vol("a"), blockdev.Attachment{})
		must(f, err)
		reports := 0
		_, err = f.pool.Create(f.Context(), blockdev.Spec{Ref: vol("b"), Name: "b", Size: 16 * mib, Origin: vol("a"), Cut: func(ctx context.Context) error {
			reports++
			blockdev.Age(f.pool)
			_, err := f.pool.Capacity(ctx)
			return err
		}})
		must(f, errors.Join(err, device.Close()))
		if reports != 1 {
			f.Errorf("Cut was called %d times", reports)
		}
		f.copy(snap("b"), vol("b"), 16*mib)
		f.ill(vol("b"))
	})
}

// TestLVMCopiesOfHalfGrown: copies of a volume whose growth was cut short before its record
// are as large as was asked for, and the next start has nothing to mend but the volume.
func TestLVMCopiesOfHalfGrown(t *testing.T) {
	onLVM(t, func(f *lvmFixture) {
		f.make(vol("a"), 8*mib)
		f.write(vol("a"), 0, marked("a", 8*mib))
		drivertest.Run(f, "lvextend", "-q", "-L", "16M", f.path(vol("a")))
		blockdev.Age(f.pool)
		f.copy(snap("a"), vol("a"), 8*mib)
		f.copy(vol("b"), snap("a"), 12*mib)
		must(f, f.pool.Close())
		f.pool = nil
		logger := ktesting.NewLogger(ktesting.NopTL{}, ktesting.NewConfig(ktesting.BufferLogs(true)))
		pool, err := blockdev.Open(klog.NewContext(f.Context(), logger), "p", f.url)
		must(f, err)
		f.pool = pool
		if text := logger.GetSink().(ktesting.Underlier).GetBuffer().String(); strings.Contains(text, "could not") {
			f.Errorf("the start says: %s", text)
		}
		for ref, least := range map[blockdev.Ref]int64{vol("a"): 16 * mib, vol("b"): 12 * mib, snap("a"): 8 * mib} {
			r, err := f.pool.Get(f.Context(), ref)
			must(f, err)
			if r.Size < least || (ref == snap("a") && r.Size != least) {
				f.Errorf("%s has %d bytes, want %d", ref, r.Size, least)
			}
			f.holds(ref, 0, marked("a", 8*mib))
			f.ill(ref)
		}
	})
}

// TestLVMTwoPools: linear and thin volumes of one group are two pools that know nothing of
// each other; neither is opened twice; and the group moves to another machine with all.
func TestLVMTwoPools(t *testing.T) {
	g := drivertest.NewGroup(t, 256*mib, 256*mib)
	urls := []string{g.URL() + "?reservePercent=0", g.ThinPool(t, "tp", "-L", "128M", "--poolmetadatasize", "4M") + "?reservePercent=0"}
	var both []*lvmFixture
	for i, url := range urls {
		f := &lvmFixture{T: t, group: g, url: url, thin: i == 1}
		f.pool = openURL(t, url)
		both = append(both, f)
	}
	for i, f := range both {
		_, err := blockdev.Open(t.Context(), "again", f.url)
		fails(t, err, errdefs.ErrInUse, "open of a pool that is open")
		ref := vol(strconv.Itoa(i))
		f.make(ref, 16*mib)
		f.write(ref, 0, marked(ref.Key[:8], 8*mib))
		f.copy(snap(strconv.Itoa(i)), ref, 16*mib)
		must(t, second(f.pool.SetLabels(t.Context(), ref, func(l map[string]string) error { l["of"] = f.url; return nil })))
	}
	check := func() {
		t.Helper()
		for i, f := range both {
			ref := vol(strconv.Itoa(i))
			f.holds(ref, 0, marked(ref.Key[:8], 8*mib))
			f.holds(snap(strconv.Itoa(i)), 0, marked(ref.Key[:8], 8*mib))
			if records := f.all(); len(records) != 2 || records[0].Thin != f.thin || records[1].Labels["of"] != f.url {
				t.Errorf("records %+v", records)
			}
			f.poolIll()
			says(t, second(f.pool.Get(t.Context(), vol(strconv.Itoa(1-i)))), errdefs.ErrNotFound)
		}
	}
	check()
	for _, f := range both {
		must(t, f.pool.Close())
	}
	drivertest.Run(t, "vgchange", "-q", "-an", g.Name)
	var images []string
	for _, device := range g.Devices {
		images = append(images, drivertest.Run(t, "losetup", "-n", "-O", "BACK-FILE", device))
		drivertest.Run(t, "losetup", "-d", device)
	}
	for i := range images { // the first one is the second now
		drivertest.Run(t, "losetup", g.Devices[i], images[1-i])
	}
	for _, f := range both {
		var err error
		f.pool, err = blockdev.Open(t.Context(), "elsewhere", f.url)
		must(t, err)
	}
	check()
	for _, f := range both {
		f.make(vol("a"), 8*mib)
		for _, r := range f.all() {
			must(t, f.pool.Delete(t.Context(), r.Ref))
		}
		must(t, f.pool.Close())
	}
	drivertest.Run(t, "vgchange", "-q", "-an", g.Name)
}

// TestLVMManyLabels: a record may have many labels; more than lvm2's shell takes words in a
// line are refused.
func TestLVMManyLabels(t *testing.T) {
	onLVM(t, func(f *lvmFixture) {
		labels := map[string]string{}
		for i := range 40 {
			labels[fmt.Sprintf("label-%d", i)] = strings.Repeat("=", 300)
		}
		create(f, f.pool, blockdev.Spec{Ref: vol("a"), Size: 8 * mib, Labels: labels})
		must(f, second(f.pool.SetLabels(f.Context(), vol("a"), func(l map[string]string) error {
			for i := range 20 {
				l[fmt.Sprintf("label-%d", 20+i)] = "new"
			}
			return nil
		})))
		for i := range 40 {
			labels[fmt.Sprintf("more-%d", i)] = "x"
		}
		says(f, second(f.pool.Create(f.Context(), blockdev.Spec{Ref: vol("b"), Name: "b", Size: 8 * mib, Labels: labels})), errdefs.ErrInvalid, "tags")
		says(f, second(f.pool.SetLabels(f.Context(), vol("a"), func(l map[string]string) error {
			for key := range l {
				l[key] = "too many at once"
			}
			return nil
		})), errdefs.ErrInvalid, "words")
		f.restart()
		r, err := f.pool.Get(f.Context(), vol("a"))
		must(f, err)
		if len(r.Labels) != 40 || r.Labels["label-39"] != "new" {
			f.Errorf("labels %v", r.Labels)
		}
	})
}
