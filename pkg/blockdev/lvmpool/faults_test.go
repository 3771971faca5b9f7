package lvmpool_test

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

	"github.com/ashlar-csi/ashlar/internal/check"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lvmpool"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pools"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/device"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Tests of what can go wrong with pools of logical volumes: by other people, by a disk, or by a crash.

const extentSize = 4 * pooltest.MiB // of the groups here

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
			f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 256*pooltest.MiB), thin: kind == "thin"}
			f.url = f.group.URL() + "?reservePercent=0"
			if f.thin {
				f.url = f.group.ThinPool(t, "tp", "-L", "208M", "--poolmetadatasize", "4M") + "?reservePercent=0"
			}
			f.start()
			test(f)
		})
	}
}

// start opens the pool. At the end of the test it is closed, and everything that it has is gone.
func (f *lvmFixture) start() {
	f.Helper()
	f.pool = pooltest.OpenURL(f, f.url)
	f.Cleanup(func() { f.clear() })
}

func (f *lvmFixture) clear() {
	f.Helper()
	if f.pool == nil {
		return
	}
	f.empty()
	check.OK(f, f.pool.Close())
	f.pool = nil
}

// restart closes the pool and opens it again.
func (f *lvmFixture) restart() {
	f.Helper()
	check.OK(f, f.pool.Close())
	f.pool = nil
	f.pool = pooltest.OpenURL(f, f.url)
}

// all lists the records of the pool.
func (f *lvmFixture) all() (records []blockdev.Record) {
	f.Helper()
	for _, kind := range []blockdev.Kind{blockdev.Snapshot, blockdev.Volume} {
		some, err := f.pool.List(context.Background(), kind, "", 0)
		check.OK(f, err)
		records = append(records, some...)
	}
	return records
}

// empty deletes all objects, and checks that they are gone.
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
	pooltest.Create(f, f.pool, blockdev.Spec{Ref: ref, Size: size})
}

func (f *lvmFixture) copy(ref, origin blockdev.Ref, size int64) {
	f.Helper()
	pooltest.Create(f, f.pool, blockdev.Spec{Ref: ref, Size: size, Origin: origin})
}

// marked returns bytes in which each block is full of one word.
func marked(word string, size int64) []byte {
	return bytes.Repeat(fmt.Appendf(nil, "%-16s", word), int(size/16))
}

// stack returns the stack that a driver would use an object's devices through.
func (f *lvmFixture) stack(ref blockdev.Ref) device.Stack { return device.New().Of(f.pool, ref) }

// handOut attaches an object as a device that stays.
func (f *lvmFixture) handOut(ref blockdev.Ref) blockdev.Device {
	f.Helper()
	d, err := f.stack(ref).Attach(f.Context(), device.Options{Keep: true})
	check.OK(f, err)
	f.Cleanup(func() { _ = d.Close() })
	return d
}

// attachments has the ways to attach an object.
func (f *lvmFixture) attachments(ref blockdev.Ref) map[string]func() (blockdev.Device, error) {
	return map[string]func() (blockdev.Device, error){
		"bare": func() (blockdev.Device, error) { return f.pool.Attach(f.Context(), ref, blockdev.Attachment{}) },
		"read-only": func() (blockdev.Device, error) {
			return f.pool.Attach(f.Context(), ref, blockdev.Attachment{ReadOnly: true})
		},
		"mounted":    func() (blockdev.Device, error) { return f.stack(ref).Attach(f.Context(), device.Options{}) },
		"handed out": func() (blockdev.Device, error) { return f.stack(ref).Attach(f.Context(), device.Options{Keep: true}) },
	}
}

// attached calls do with the device of an object.
func (f *lvmFixture) attached(ref blockdev.Ref, readOnly bool, do func(device string)) {
	f.Helper()
	device, err := f.pool.Attach(context.Background(), ref, blockdev.Attachment{ReadOnly: readOnly})
	check.OK(f, err)
	do(device.Path)
	check.OK(f, device.Close())
}

// write writes past the page cache.
func (f *lvmFixture) write(ref blockdev.Ref, offset int64, b []byte) {
	f.Helper()
	f.attached(ref, false, func(device string) { check.OK(f, writeDirect(device, offset, b)) })
}

func writeDirect(device string, offset int64, b []byte) error {
	file, err := os.OpenFile(device, os.O_RDWR|unix.O_DIRECT, 0)
	if err != nil {
		return err
	}
	memory, err := unix.Mmap(-1, 0, pooltest.MiB, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS) // aligned
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
		check.OK(f, err)
	})
	return b
}

func (f *lvmFixture) holds(ref blockdev.Ref, offset int64, want []byte) {
	f.Helper()
	have := f.read(ref, offset, int64(len(want)))
	for at := 0; at < len(want); at += 512 {
		end := min(at+512, len(want))
		if !bytes.Equal(have[at:end], want[at:end]) {
			f.Errorf("%s has %.16q... at byte %d, and %.16q... was written", ref, have[at:end], offset+int64(at), want[at:end])
			return
		}
	}
}

func words(problems []blockdev.Problem) (all []string) {
	for _, p := range problems {
		all = append(all, p.Reason)
	}
	return all
}

// ill fails the test unless an object's health has just this reason; with none, no problem at all.
func (f *lvmFixture) ill(ref blockdev.Ref, want ...string) {
	f.Helper()
	problems, err := f.pool.Health(f.Context(), ref)
	check.OK(f, err)
	if have := words(problems); !slices.Equal(have, want) {
		f.Errorf("health of %s: %v, want %v", ref, problems, want)
	}
	for _, p := range problems {
		if strings.HasPrefix(p.Reason, "Volume") && !strings.Contains(p.Message, "; ") {
			f.Errorf("health of %s does not say what to do: %s", ref, p.Message)
		}
	}
}

func (f *lvmFixture) poolIll(want ...string) {
	f.Helper()
	problems := f.pool.PoolHealth(f.Context())
	if have := words(problems); !slices.Equal(have, want) {
		f.Errorf("health of the pool: %v, want %v", problems, want)
	}
}

// left returns the devices that a volume is attached as. It waits a moment for those that go by themselves: the kernel removes one after the other, in the
// background.
func (f *lvmFixture) left(ref blockdev.Ref) (devices []blockdev.Device) {
	f.Helper()
	for end := time.Now().Add(2 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		var err error
		devices, err = f.stack(ref).Attached(f.Context())
		if check.OK(f, err); len(devices) == 0 || time.Now().After(end) {
			return devices
		}
	}
}

// lv returns what lvm2 reports of the volumes of the group.
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

// says checks that an error wraps another, and has some words.
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

// TestLVMThinPoolFull: above the watermark nothing is promised, and a full thin pool is reported. With more room all is well.
func TestLVMThinPoolFull(t *testing.T) {
	f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 512*pooltest.MiB), thin: true}
	f.url = f.group.ThinPool(t, "tp", "-L", "64M", "--poolmetadatasize", "4M", "-q") + "?overprovision=4&reservePercent=0"
	drivertest.Run(t, "lvchange", "-q", "--errorwhenfull", "y", f.group.Name+"/tp")
	f.start()
	ctx := t.Context()
	f.make(pooltest.Vol("a"), 128*pooltest.MiB)
	f.make(pooltest.Vol("b"), 8*pooltest.MiB)
	content := marked("before", 48*pooltest.MiB)
	f.write(pooltest.Vol("a"), 0, content) // 75 %
	f.make(pooltest.Vol("c"), 8*pooltest.MiB)
	f.poolIll()
	before := pooltest.CapacityOf(t, f.pool)
	if before.Total != 256*pooltest.MiB || before.Promised != 144*pooltest.MiB || before.Available != 112*pooltest.MiB {
		t.Errorf("capacity %+v", before)
	}
	f.write(pooltest.Vol("a"), 48*pooltest.MiB, marked("more", 12*pooltest.MiB)) // 94 %
	f.poolIll("PoolNearlyFull")
	f.ill(pooltest.Vol("a"))
	refused := func() {
		t.Helper()
		for _, spec := range []blockdev.Spec{{Ref: pooltest.Vol("d"), Size: 8 * pooltest.MiB}, {Ref: pooltest.Snap("a"), Size: 128 * pooltest.MiB, Origin: pooltest.Vol("a")}, {Ref: pooltest.Vol("d"), Size: 136 * pooltest.MiB, Origin: pooltest.Vol("a")}} {
			spec.Name = "refused"
			says(t, pooltest.Second(f.pool.Create(ctx, spec)), errdefs.ErrNoSpace, f.group.Name+"/tp")
		}
		says(t, pooltest.Second(f.pool.Expand(ctx, pooltest.Vol("a"), 132*pooltest.MiB)), errdefs.ErrNoSpace, f.group.Name+"/tp")
		if c := pooltest.CapacityOf(t, f.pool); c.Available != 0 || c.MaxVolume != 0 || c.Promised != before.Promised {
			t.Errorf("capacity %+v", c)
		}
	}
	refused()
	// What is there already still works.
	check.OK(t, pooltest.Second(f.pool.SetLabels(ctx, pooltest.Vol("a"), func(l map[string]string) error { l["x"] = "y"; return nil })))
	f.attached(pooltest.Vol("a"), false, func(device string) {
		if err := writeDirect(device, 60*pooltest.MiB, marked("too much", 16*pooltest.MiB)); !errors.Is(err, unix.ENOSPC) && !errors.Is(err, unix.EIO) {
			t.Errorf("write to a full thin pool: %v", err)
		}
	})
	f.poolIll("PoolFull")
	f.ill(pooltest.Vol("a"), "PoolFull")
	f.ill(pooltest.Vol("b"), "PoolFull")
	refused()
	f.holds(pooltest.Vol("a"), 0, content)
	drivertest.Run(t, "lvextend", "-q", "-L", "+128M", f.group.Name+"/tp")
	f.poolIll()
	f.ill(pooltest.Vol("a"))
	f.write(pooltest.Vol("a"), 60*pooltest.MiB, marked("fits now", 16*pooltest.MiB))
	f.holds(pooltest.Vol("a"), 0, content)
	f.copy(pooltest.Snap("a"), pooltest.Vol("a"), 128*pooltest.MiB)
	f.make(pooltest.Vol("d"), 8*pooltest.MiB)
	check.OK(t, pooltest.Second(f.pool.Expand(ctx, pooltest.Vol("a"), 132*pooltest.MiB)))
}

// TestLVMForeign: volumes of others in the group are neither used nor changed.
func TestLVMForeign(t *testing.T) {
	onLVM(t, func(f *lvmFixture) {
		ctx := f.Context()
		theirs := pooltest.Vol("f").String()
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
		check.OK(f, writeDirect(device, 0, marked("theirs", 8*pooltest.MiB)))
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
		if c := pooltest.CapacityOf(f, f.pool); f.thin && (c.Promised != 32*pooltest.MiB || c.Available != 208*pooltest.MiB-32*pooltest.MiB) || !f.thin && c.Available > 252*pooltest.MiB-32*pooltest.MiB {
			f.Errorf("capacity does not count what others have: %+v", c)
		}
		if records := f.all(); len(records) > 0 {
			f.Errorf("others' volumes are listed: %v", records)
		}
		says(f, pooltest.Second(f.pool.Get(ctx, pooltest.Vol("f"))), errdefs.ErrNotFound)
		says(f, pooltest.Second(f.pool.Attach(ctx, pooltest.Vol("f"), blockdev.Attachment{})), errdefs.ErrNotFound)
		says(f, pooltest.Second(f.pool.Create(ctx, blockdev.Spec{Ref: pooltest.Vol("f"), Name: "f", Size: 8 * pooltest.MiB})), errdefs.ErrPrecondition, theirs)
		check.OK(f, f.pool.Delete(ctx, pooltest.Vol("f")))
		check.OK(f, f.pool.Detach(ctx, pooltest.Vol("e")))
		if orphans, err := f.pool.Orphans(ctx); err != nil || len(orphans) > 0 {
			f.Errorf("orphans %v, %v", orphans, err)
		}

		// Their tags on our volumes stay.
		f.make(pooltest.Vol("a"), 8*pooltest.MiB)
		drivertest.Run(f, "lvchange", "-q", "--addtag", "backup=nightly", "--addtag", "ashlarish", f.path(pooltest.Vol("a")))
		f.restart()
		check.OK(f, pooltest.Second(f.pool.SetLabels(ctx, pooltest.Vol("a"), func(l map[string]string) error { l["x"] = "y"; return nil })))
		check.OK(f, pooltest.Second(f.pool.Expand(ctx, pooltest.Vol("a"), 16*pooltest.MiB)))
		f.restart()
		r, err := f.pool.Get(ctx, pooltest.Vol("a"))
		check.OK(f, err)
		if r.Labels["x"] != "y" || r.Size != 16*pooltest.MiB {
			f.Errorf("record %+v", r)
		}
		if tags := drivertest.Run(f, "lvs", "--noheadings", "-o", "lv_tags", f.path(pooltest.Vol("a"))); !strings.Contains(tags, "backup=nightly") || !strings.Contains(tags, "ashlarish") {
			f.Errorf("tags %s", tags)
		}
		check.OK(f, f.pool.Delete(ctx, pooltest.Vol("a")))
		if after := state(); !slices.Equal(before, after) {
			f.Errorf("others' volumes were touched: %q, before %q", after, before)
		}
		if b, err := readDevice(device, 0, 8*pooltest.MiB); err != nil || !bytes.Equal(b, marked("theirs", 8*pooltest.MiB)) {
			f.Errorf("others' bytes were touched: %v", err)
		}
	})
}

// TestLVMMissingDevice: a disk is missing. Volumes on the others can be used, those on it are reported, and nothing is changed. With the disk back all is
// as before.
func TestLVMMissingDevice(t *testing.T) {
	for _, kind := range []string{"linear", "thin"} {
		t.Run(kind, func(t *testing.T) {
			f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 64*pooltest.MiB, 64*pooltest.MiB), thin: kind == "thin"}
			f.url = f.group.URL() + "?reservePercent=0"
			if f.thin {
				drivertest.Run(t, "lvcreate", "-q", "--type", "thin-pool", "-L", "48M", "--poolmetadatasize", "4M", "--poolmetadataspare", "n", "-n", "tp", f.group.Name, f.group.Devices[0])
				f.url = f.group.URL() + "/tp?reservePercent=0&overprovision=2"
			}
			f.start()
			ctx := t.Context()
			size := int64(60 * pooltest.MiB)
			if f.thin {
				size = 32 * pooltest.MiB
			}
			f.make(pooltest.Vol("a"), size) // all of the first disk, if it is linear
			f.write(pooltest.Vol("a"), 0, marked("a", 8*pooltest.MiB))
			f.make(pooltest.Vol("b"), 16*pooltest.MiB)
			f.write(pooltest.Vol("b"), 0, marked("b", 8*pooltest.MiB))
			check.OK(t, f.pool.Close())
			before := f.lv("lv_name,lv_uuid,lv_size,lv_tags")

			disk := f.group.Devices[1]
			image := drivertest.Run(t, "losetup", "-n", "-O", "BACK-FILE", disk)
			drivertest.Run(t, "losetup", "-d", disk)
			f.pool = pooltest.OpenURL(t, f.url)
			f.holds(pooltest.Vol("a"), 0, marked("a", 8*pooltest.MiB))
			f.ill(pooltest.Vol("a"))
			f.poolIll("DeviceMissing")
			if f.thin {
				f.holds(pooltest.Vol("b"), 0, marked("b", 8*pooltest.MiB))
			} else {
				says(t, pooltest.Second(f.pool.Attach(ctx, pooltest.Vol("b"), blockdev.Attachment{})), errdefs.ErrUnavailable, f.path(pooltest.Vol("b")))
				f.ill(pooltest.Vol("b"), "DeviceMissing")
				says(t, pooltest.Second(f.pool.Create(ctx, blockdev.Spec{Ref: pooltest.Vol("d"), Name: "d", Size: 16 * pooltest.MiB, Origin: pooltest.Vol("b")})), errdefs.ErrUnavailable)
			}
			says(t, pooltest.Second(f.pool.Create(ctx, blockdev.Spec{Ref: pooltest.Vol("c"), Name: "c", Size: 4 * pooltest.MiB})), errdefs.ErrUnavailable, "missing")
			says(t, pooltest.Second(f.pool.Expand(ctx, pooltest.Vol("a"), size+4*pooltest.MiB)), errdefs.ErrUnavailable)
			says(t, f.pool.Delete(ctx, pooltest.Vol("b")), errdefs.ErrUnavailable, "missing")
			check.OK(t, pooltest.Second(f.pool.Get(ctx, pooltest.Vol("b"))))
			if c := pooltest.CapacityOf(t, f.pool); c.Promised != size+16*pooltest.MiB || c.Available != 0 {
				t.Errorf("capacity %+v: nothing can be made, %d are promised", c, size+16*pooltest.MiB)
			}

			drivertest.Run(t, "losetup", disk, image)
			if after := f.lv("lv_name,lv_uuid,lv_size,lv_tags"); !slices.Equal(before, after) {
				t.Errorf("volumes %q, before %q", after, before)
			}
			f.restart()
			f.holds(pooltest.Vol("a"), 0, marked("a", 8*pooltest.MiB))
			f.holds(pooltest.Vol("b"), 0, marked("b", 8*pooltest.MiB))
			f.ill(pooltest.Vol("a"))
			f.ill(pooltest.Vol("b"))
			f.poolIll()
			f.make(pooltest.Vol("c"), 4*pooltest.MiB)
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

// faultyDisks counts the disks that this process made, so that each has its own name.
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

// behave gives the disk a table. lvm2 keeps its metadata in the first MiB.
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

// TestLVMFailingDevice: if a disk fails, the call fails and leaves nothing. When the disk works again, the retry succeeds.
func TestLVMFailingDevice(t *testing.T) {
	disk := newFaultyDisk(t, 256*pooltest.MiB)
	f := &lvmFixture{T: t, group: drivertest.NewGroupOn(t, "/dev/mapper/"+disk.name)}
	f.url = f.group.URL() + "?reservePercent=0"
	f.start()
	ctx := t.Context()
	f.make(pooltest.Vol("a"), 16*pooltest.MiB)
	f.write(pooltest.Vol("a"), 0, marked("a", 16*pooltest.MiB))
	f.copy(pooltest.Snap("a"), pooltest.Vol("a"), 16*pooltest.MiB)
	operations := map[string]func() error{
		"create": func() error {
			return pooltest.Second(f.pool.Create(ctx, blockdev.Spec{Ref: pooltest.Vol("b"), Name: "b", Size: 8 * pooltest.MiB}))
		},
		"copy": func() error {
			return pooltest.Second(f.pool.Create(ctx, blockdev.Spec{Ref: pooltest.Vol("c"), Name: "c", Size: 16 * pooltest.MiB, Origin: pooltest.Snap("a")}))
		},
		"expand": func() error { return pooltest.Second(f.pool.Expand(ctx, pooltest.Vol("a"), 20*pooltest.MiB)) },
		"labels": func() error {
			return pooltest.Second(f.pool.SetLabels(ctx, pooltest.Vol("a"), func(l map[string]string) error { l["x"] = "y"; return nil }))
		},
		"delete": func() error { return f.pool.Delete(ctx, pooltest.Vol("d")) },
	}
	for fault, table := range disk.faults() {
		for name, operation := range operations {
			f.make(pooltest.Vol("d"), 4*pooltest.MiB)
			before := pooltest.CapacityOf(t, f.pool)
			lvs := f.lv("lv_name,lv_size,lv_tags")
			disk.behave(table)
			err := operation()
			t.Logf("%s, %s: %v", fault, name, err)
			disk.well()
			mayWork := (name == "labels" || name == "delete") && fault == "no data" // a disk that takes no writes takes no flushes either
			switch {
			case err == nil && !mayWork:
				t.Errorf("%s, %s: it succeeded", fault, name)
			case err != nil && mayWork:
				t.Errorf("%s, %s: %v", fault, name, err)
			case err == nil:
			case fault == "no data":
				says(t, err, unix.EIO)
			case fault == "no write": // lvm2 makes its change, and the flush after it fails
				says(t, err, errdefs.ErrUnavailable, "flush", "input/output error")
			default:
				says(t, err, errdefs.ErrUnavailable)
			}
			if err != nil {
				for ref, want := range map[blockdev.Ref]bool{pooltest.Vol("b"): false, pooltest.Vol("c"): false, pooltest.Vol("a"): true, pooltest.Vol("d"): true} {
					if _, err := f.pool.Get(ctx, ref); (err == nil) != want {
						t.Errorf("%s, %s: %s: %v", fault, name, ref, err)
					}
				}
			}
			if err := operation(); err != nil {
				t.Errorf("%s, %s: retry: %v", fault, name, err)
			}
			if name != "expand" {
				f.holds(pooltest.Vol("a"), 0, marked("a", 16*pooltest.MiB))
			} else {
				f.holds(pooltest.Vol("a"), 0, append(marked("a", 16*pooltest.MiB), make([]byte, 4*pooltest.MiB)...))
			}
			f.holds(pooltest.Snap("a"), 0, marked("a", 16*pooltest.MiB))
			for _, digit := range []string{"b", "c", "d"} {
				check.OK(t, f.pool.Delete(ctx, pooltest.Vol(digit)))
			}
			if name == "expand" {
				check.OK(t, f.pool.Delete(ctx, pooltest.Vol("a")))
				f.copy(pooltest.Vol("a"), pooltest.Snap("a"), 16*pooltest.MiB)
			}
			check.OK(t, pooltest.Second(f.pool.SetLabels(ctx, pooltest.Vol("a"), func(l map[string]string) error { delete(l, "x"); return nil })))
			f.make(pooltest.Vol("d"), 4*pooltest.MiB)
			if name != "expand" {
				if now := f.lv("lv_name,lv_size"); len(now) != len(lvs) {
					t.Errorf("%s, %s: volumes %q, before %q", fault, name, now, lvs)
				}
			}
			if now := pooltest.CapacityOf(t, f.pool); now != before {
				t.Errorf("%s, %s: capacity %+v, before %+v", fault, name, now, before)
			}
			check.OK(t, f.pool.Delete(ctx, pooltest.Vol("d")))
			if t.Failed() {
				return
			}
		}
	}
}

// onFaultyDisks makes a thin pool with its data on one faulty disk and its metadata on another.
func onFaultyDisks(t *testing.T) (f *lvmFixture, data, books *faultyDisk) {
	t.Helper()
	data, books = newFaultyDisk(t, 128*pooltest.MiB), newFaultyDisk(t, 64*pooltest.MiB)
	f = &lvmFixture{T: t, group: drivertest.NewGroupOn(t, "/dev/mapper/"+data.name, "/dev/mapper/"+books.name), thin: true}
	drivertest.Run(t, "lvcreate", "-q", "-an", "-Zn", "-Wn", "-L", "96M", "-n", "tp", f.group.Name, "/dev/mapper/"+data.name)
	drivertest.Run(t, "lvcreate", "-q", "-an", "-Zn", "-Wn", "-L", "8M", "-n", "books", f.group.Name, "/dev/mapper/"+books.name)
	drivertest.Run(t, "lvconvert", "-q", "-y", "--type", "thin-pool", "--poolmetadata", f.group.Name+"/books", "--poolmetadataspare", "n", f.group.Name+"/tp")
	f.url = f.group.URL() + "/tp?reservePercent=0&overprovision=4"
	return f, data, books
}

// TestLVMFailingThinPool: a disk fails the data of a thin pool. Its metadata stays right, and all is as before when the disk works again.
func TestLVMFailingThinPool(t *testing.T) {
	f, data, _ := onFaultyDisks(t)
	f.start()
	ctx := t.Context()
	f.make(pooltest.Vol("a"), 16*pooltest.MiB)
	f.write(pooltest.Vol("a"), 0, marked("a", 8*pooltest.MiB))
	f.make(pooltest.Vol("b"), 16*pooltest.MiB)
	before := f.lv("lv_name,lv_size,lv_tags")
	data.behave(data.faults()["no data"])
	f.attached(pooltest.Vol("b"), false, func(device string) {
		if err := writeDirect(device, 0, marked("b", pooltest.MiB)); !errors.Is(err, unix.EIO) {
			t.Errorf("write: %v", err)
		}
	})
	for _, spec := range []blockdev.Spec{{Ref: pooltest.Vol("c"), Size: 8 * pooltest.MiB}, {Ref: pooltest.Snap("a"), Size: 16 * pooltest.MiB, Origin: pooltest.Vol("a")}} {
		pooltest.Create(t, f.pool, spec) // no data is written for it
		check.OK(t, f.pool.Delete(ctx, spec.Ref))
	}
	data.well()
	f.restart()
	f.poolIll()
	f.ill(pooltest.Vol("a"))
	f.holds(pooltest.Vol("a"), 0, marked("a", 8*pooltest.MiB))
	if after := f.lv("lv_name,lv_size,lv_tags"); !slices.Equal(before, after) {
		t.Errorf("volumes %q, before %q", after, before)
	}
	f.make(pooltest.Vol("c"), 8*pooltest.MiB)
	f.copy(pooltest.Snap("a"), pooltest.Vol("a"), 16*pooltest.MiB)
	f.write(pooltest.Vol("b"), 0, marked("b", pooltest.MiB))
	f.holds(pooltest.Vol("b"), 0, marked("b", pooltest.MiB))
	f.holds(pooltest.Snap("a"), 0, marked("a", 8*pooltest.MiB))
}

// TestLVMNeedsCheck: a disk fails the metadata of a thin pool, and the kernel wants that checked (needs_check). Health reports it, also after a start;
// changes are refused; volumes can be read. After the repair of docs/reliability.md all is as before, also for a driver that ran all the time.
func TestLVMNeedsCheck(t *testing.T) {
	f, _, books := onFaultyDisks(t)
	f.start()
	ctx := t.Context()
	f.make(pooltest.Vol("a"), 16*pooltest.MiB)
	f.write(pooltest.Vol("a"), 0, marked("a", 8*pooltest.MiB))
	f.copy(pooltest.Snap("a"), pooltest.Vol("a"), 16*pooltest.MiB)
	f.make(pooltest.Vol("b"), 16*pooltest.MiB)
	f.write(pooltest.Vol("b"), 0, marked("b", 4*pooltest.MiB))
	before, lvs := pooltest.CapacityOf(t, f.pool), f.lv("lv_name,lv_size,lv_tags")

	device := f.handOut(pooltest.Vol("b"))
	books.behave(books.faults()["no record"])
	file, err := os.OpenFile(device.Path, os.O_RDWR, 0)
	check.OK(t, err)
	_ = writeDirect(device.Path, 8*pooltest.MiB, marked("b", pooltest.MiB))
	_ = file.Sync() // it makes the kernel write the metadata, unless it has tried by itself
	check.OK(t, file.Close())
	books.well()
	for _, restarted := range []bool{false, true} {
		if restarted {
			check.OK(t, errors.Join(device.Close(), f.stack(pooltest.Vol("b")).Detach(ctx)))
			f.restart()
		}
		f.poolIll("PoolFailed")
		for _, ref := range []blockdev.Ref{pooltest.Vol("a"), pooltest.Vol("b"), pooltest.Snap("a")} {
			f.ill(ref, "PoolFailed")
		}
		tp := f.group.Name + "/tp"
		for what, call := range map[string]func() error{
			"create": func() error {
				return pooltest.Second(f.pool.Create(ctx, blockdev.Spec{Ref: pooltest.Vol("c"), Name: "c", Size: 8 * pooltest.MiB}))
			},
			"copy": func() error {
				return pooltest.Second(f.pool.Create(ctx, blockdev.Spec{Ref: pooltest.Snap("b"), Name: "b", Size: 16 * pooltest.MiB, Origin: pooltest.Vol("b")}))
			},
			"expand": func() error { return pooltest.Second(f.pool.Expand(ctx, pooltest.Vol("a"), 20*pooltest.MiB)) },
			"delete": func() error { return f.pool.Delete(ctx, pooltest.Snap("a")) },
		} {
			err := call()
			t.Logf("%s: %v", what, err)
			says(t, err, errdefs.ErrUnavailable, tp, "needs_check", "lvconvert --repair")
		}
		f.holds(pooltest.Vol("a"), 0, marked("a", 8*pooltest.MiB))
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
	for ref, content := range map[blockdev.Ref][]byte{pooltest.Vol("a"): marked("a", 8*pooltest.MiB), pooltest.Vol("b"): marked("b", 4*pooltest.MiB), pooltest.Snap("a"): marked("a", 8*pooltest.MiB)} {
		f.ill(ref)
		f.holds(ref, 0, content)
	}
	if now := pooltest.CapacityOf(t, f.pool); now != before {
		t.Errorf("capacity %+v, before %+v", now, before)
	}
	f.make(pooltest.Vol("c"), 8*pooltest.MiB)
	f.copy(pooltest.Snap("b"), pooltest.Vol("b"), 16*pooltest.MiB)
	f.write(pooltest.Vol("b"), 8*pooltest.MiB, marked("b", pooltest.MiB))
	f.holds(pooltest.Vol("b"), 8*pooltest.MiB, marked("b", pooltest.MiB))
	f.restart()
	f.poolIll()
}

// TestLVMMetadataFull: the metadata of a thin pool is full, by volumes of others. Health says so, and what to do; with more room it takes changes again at once.
func TestLVMMetadataFull(t *testing.T) {
	f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 512*pooltest.MiB), thin: true}
	f.url = f.group.ThinPool(t, "tp", "-L", "400M", "--poolmetadatasize", "2M", "-c", "64k") + "?reservePercent=0"
	f.start()
	a, tp := pooltest.Vol("a"), f.group.Name+"/tp"
	f.make(a, 64*pooltest.MiB)
	f.write(a, 0, marked("a", 64*pooltest.MiB))
	status := func() string {
		return drivertest.Run(t, "dmsetup", "status", strings.ReplaceAll(f.group.Name, "-", "--")+"-tp-tpool")
	}
	// lvm2 makes no thin volume once a quarter of the metadata is all that is free, so others come from the kernel. Each has leaves of its own in the tree of
	// blocks.
	tpool := "/dev/mapper/" + strings.ReplaceAll(f.group.Name, "-", "--") + "-tp-tpool"
	drivertest.Run(t, "lvchange", "-q", "-ay", tp)
	origin := strings.TrimSpace(drivertest.Run(t, "lvs", "--noheadings", "-o", "thin_id", f.path(a)))
	var others []string
	drop := func() {
		for n, other := range others {
			drivertest.Run(t, "dmsetup", "remove", other)
			drivertest.Run(t, "dmsetup", "message", tpool, "0", fmt.Sprint("delete ", 1000+n))
		}
		others = nil
	}
	t.Cleanup(drop)
	for n := 0; n < 300 && strings.Contains(status(), " rw "); n++ {
		other := fmt.Sprint("ashlar-test-other", n)
		drivertest.Run(t, "dmsetup", "message", tpool, "0", fmt.Sprintf("create_snap %d %s", 1000+n, origin))
		drivertest.Run(t, "dmsetup", "create", other, "--table", fmt.Sprintf("0 %d thin %s %d", 64*pooltest.MiB/512, tpool, 1000+n))
		others = append(others, other)
		for at := int64(0); at < 64*pooltest.MiB; at += 4 * pooltest.MiB {
			_ = writeDirect("/dev/mapper/"+other, at, marked("o", 64<<10)) // the last ones fail
		}
	}
	if s := status(); !strings.Contains(s, " ro ") || strings.Contains(s, "needs_check") {
		t.Fatalf("after %d snapshots: %s", len(others), s)
	}
	err := pooltest.Second(f.pool.Create(t.Context(), blockdev.Spec{Ref: pooltest.Vol("b"), Name: "b", Size: 8 * pooltest.MiB}))
	says(t, err, errdefs.ErrUnavailable, tp, "lvextend --poolmetadatasize")
	f.ill(a, "PoolFailed")
	drivertest.Run(t, "lvextend", "-q", "--poolmetadatasize", "+4M", tp)
	drop()
	lvmpool.Age(f.pool)
	f.poolIll()
	f.holds(a, 0, marked("a", 64*pooltest.MiB))
	f.make(pooltest.Vol("b"), 8*pooltest.MiB)
}

// TestLVMTakenDown: somebody takes a thin pool down to repair it. Calls that need it do not bring it up, nor does a start, if he marked it so. When it is
// up again, all is as before.
func TestLVMTakenDown(t *testing.T) {
	f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 256*pooltest.MiB), thin: true}
	f.url = f.group.ThinPool(t, "tp", "-L", "64M", "--poolmetadatasize", "4M") + "?reservePercent=0"
	f.start()
	f.make(pooltest.Vol("a"), 16*pooltest.MiB)
	f.write(pooltest.Vol("a"), 0, marked("a", 8*pooltest.MiB))
	f.copy(pooltest.Snap("a"), pooltest.Vol("a"), 16*pooltest.MiB)
	tp := f.group.Name + "/tp"
	drivertest.Run(t, "lvchange", "-q", "-an", tp)
	drivertest.Run(t, "lvchange", "-q", "--setactivationskip", "y", tp)
	for _, restarted := range []bool{false, true} {
		if restarted {
			f.restart()
		}
		for what, call := range map[string]func() error{
			"attach": func() error {
				return pooltest.Second(f.pool.Attach(t.Context(), pooltest.Vol("a"), blockdev.Attachment{}))
			},
			"create": func() error {
				return pooltest.Second(f.pool.Create(t.Context(), blockdev.Spec{Ref: pooltest.Vol("c"), Name: "c", Size: 8 * pooltest.MiB}))
			},
			"copy": func() error {
				return pooltest.Second(f.pool.Create(t.Context(), blockdev.Spec{Ref: pooltest.Snap("b"), Name: "b", Size: 16 * pooltest.MiB, Origin: pooltest.Vol("a")}))
			},
			"expand": func() error { return pooltest.Second(f.pool.Expand(t.Context(), pooltest.Vol("a"), 20*pooltest.MiB)) },
			"delete": func() error { return f.pool.Delete(t.Context(), pooltest.Snap("a")) },
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
	for _, ref := range []blockdev.Ref{pooltest.Vol("a"), pooltest.Snap("a")} {
		f.holds(ref, 0, marked("a", 8*pooltest.MiB))
	}
	f.copy(pooltest.Snap("b"), pooltest.Vol("a"), 16*pooltest.MiB)
	check.OK(t, f.pool.Delete(t.Context(), pooltest.Snap("a")))
	f.poolIll()
}

// TestLVMOlderTable: a device of an older driver passes ioctls down to a disk of the group. A start gives it a table that does not, while it is in use.
func TestLVMOlderTable(t *testing.T) {
	onLVM(t, func(f *lvmFixture) {
		f.make(pooltest.Vol("a"), 16*pooltest.MiB)
		dev := f.handOut(pooltest.Vol("a"))
		told, err := os.ReadFile("/sys/block/" + filepath.Base(dev.Path) + "/dm/name")
		check.OK(f, err)
		name := strings.TrimSpace(string(told))
		base := strings.TrimSuffix(name, "-writable")
		drivertest.Run(f, "dmsetup", "load", name, "--table", fmt.Sprintf("0 %d linear /dev/mapper/%s 0", 16*pooltest.MiB/512, base))
		drivertest.Run(f, "dmsetup", "resume", name)
		file, err := os.OpenFile(dev.Path, os.O_RDWR, 0)
		check.OK(f, err)
		defer file.Close()
		passed := func() bool {
			_, err := unix.IoctlLoopGetStatus64(int(file.Fd()))
			return err == nil
		}
		if !f.thin && !passed() {
			f.Fatal("a single linear target passes nothing down: this test shows nothing")
		}
		f.restart()
		check.OK(f, device.New().Recover(f.Context(), f.pool))
		if passed() {
			f.Error("it passes ioctls down")
		}
		if table := drivertest.Run(f, "dmsetup", "table", name); strings.Count(table, "linear") != 2 {
			f.Errorf("its table is %q", table)
		}
		check.OK(f, pooltest.Second(file.WriteAt(marked("a", pooltest.MiB), 0)))
		check.OK(f, errors.Join(file.Sync(), file.Close(), dev.Close(), f.stack(pooltest.Vol("a")).Detach(f.Context())))
		f.holds(pooltest.Vol("a"), 0, marked("a", pooltest.MiB))
	})
}

// TestLVMCopyGoesOn: a copy of a volume in use runs out of time, and goes on where it stopped. Spec.Cut is called at once each time: a frozen filesystem
// does not wait for the copy.
func TestLVMCopyGoesOn(t *testing.T) {
	f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 256*pooltest.MiB)}
	f.url = f.group.URL() + "?reservePercent=0"
	f.start()
	f.make(pooltest.Vol("a"), 32*pooltest.MiB)
	f.write(pooltest.Vol("a"), 0, marked("a", 32*pooltest.MiB))
	device := f.handOut(pooltest.Vol("a"))
	told, goneOn := 0, false
	spec := blockdev.Spec{Ref: pooltest.Snap("b"), Name: "b", Size: 32 * pooltest.MiB, Origin: pooltest.Vol("a"), Cut: func(context.Context) error { told++; return nil }}
	for n := 4; !goneOn; n++ { // until it ends in the middle of the copy
		_, err := f.pool.Create(&pooltest.EndsAfter{Context: t.Context(), N: n}, spec)
		if err == nil {
			t.Fatal("no copy was cut short in the middle")
		}
		says(t, err, context.Canceled)
		goneOn = strings.Contains(err.Error(), "copy /dev/") && lvmpool.Copied(f.pool, pooltest.Snap("b")) > 0
	}
	check.OK(t, writeDirect(device.Path, 0, marked("other", pooltest.MiB)))
	told = 0
	check.OK(t, pooltest.Second(f.pool.Create(t.Context(), spec)))
	if told != 1 {
		t.Errorf("a copy that went on told %d times that its bytes are fixed", told)
	}
	check.OK(t, errors.Join(device.Close(), f.stack(pooltest.Vol("a")).Detach(t.Context())))
	f.holds(pooltest.Snap("b"), 0, marked("a", 32*pooltest.MiB))
}

// TestLVMDelivered: lvm2 has messages written down that the thin pool has got already. A removal reaches the thin pool all the same, so no new volume
// shows the bytes of a removed one.
func TestLVMDelivered(t *testing.T) {
	f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 256*pooltest.MiB), thin: true}
	f.url = f.group.ThinPool(t, "tp", "-L", "64M", "--poolmetadatasize", "4M") + "?reservePercent=0"
	f.start()
	ctx := t.Context()
	for range 2 {
		f.make(pooltest.Vol("a"), 8*pooltest.MiB)
		f.write(pooltest.Vol("a"), 0, marked("secret", 8*pooltest.MiB))
		check.OK(t, f.pool.Close())
		f.rewrite(func(all string) string { return withMessage(all, "delete = 77") })
		f.pool = pooltest.OpenURL(t, f.url)
		check.OK(t, f.pool.Delete(ctx, pooltest.Vol("a")))
		status := drivertest.Run(t, "dmsetup", "status", f.tpool())
		if !strings.Contains(status, " 0/") {
			t.Errorf("the empty thin pool has blocks: %s", status)
		}
		f.make(pooltest.Vol("a"), 8*pooltest.MiB)
		f.holds(pooltest.Vol("a"), 0, make([]byte, 8*pooltest.MiB))
		check.OK(t, f.pool.Delete(ctx, pooltest.Vol("a")))
	}
}

// rewrite changes lvm2's metadata of the group while no pool is open.
func (f *lvmFixture) rewrite(edit func(all string) string) {
	f.Helper()
	backup := filepath.Join(f.TempDir(), "backup")
	drivertest.Run(f, "vgcfgbackup", "-q", "-f", backup, f.group.Name)
	text, err := os.ReadFile(backup)
	check.OK(f, err)
	check.OK(f, os.WriteFile(backup, []byte(edit(string(text))), 0o600))
	drivertest.Run(f, "vgcfgrestore", "-q", "-y", "--force", "-f", backup, f.group.Name)
}

// withMessage returns lvm2's metadata with a message to the thin pool added.
func withMessage(all, message string) string {
	return strings.Replace(all, "zero_new_blocks = 1", "zero_new_blocks = 1\nmessage1 {\n"+message+"\n}", 1)
}

// untold is withMessage with a higher transaction number: the thin pool has not got the message.
func untold(t testing.TB, all, message string) string {
	t.Helper()
	before, tp, _ := strings.Cut(all, "\ttp {")
	id := regexp.MustCompile(`transaction_id = (\d+)`).FindStringSubmatch(tp)
	transaction, err := strconv.Atoi(id[1])
	check.OK(t, err)
	return withMessage(before+"\ttp {"+strings.Replace(tp, id[0], fmt.Sprint("transaction_id = ", transaction+1), 1), message)
}

// TestLVMRemovalTold: lvm2 was cut short before it told the thin pool to remove a volume that it does not know any more. A start has that done.
func TestLVMRemovalTold(t *testing.T) {
	f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 256*pooltest.MiB), thin: true}
	f.url = f.group.ThinPool(t, "tp", "-L", "64M", "--poolmetadatasize", "4M") + "?reservePercent=0"
	f.start()
	f.make(pooltest.Vol("a"), 8*pooltest.MiB)
	f.write(pooltest.Vol("a"), 0, marked("a", 8*pooltest.MiB))
	check.OK(t, f.pool.Close())
	f.pool = nil
	entry := regexp.MustCompile(`(?s)\n\t\t` + pooltest.Vol("a").String() + ` \{.*?\n\t\t\}\n`)
	f.rewrite(func(all string) string { return untold(t, entry.ReplaceAllString(all, "\n"), "delete = 1") })
	f.pool = pooltest.OpenURL(t, f.url)
	if status := drivertest.Run(t, "dmsetup", "status", "--target", "thin-pool"); !strings.Contains(status, " 0/") {
		t.Errorf("the empty thin pool has blocks: %s", status)
	}
}

// TestLVMNoBytesOfOthers: no byte of a deleted volume is in one that gets its extents.
func TestLVMNoBytesOfOthers(t *testing.T) {
	onLVM(t, func(f *lvmFixture) {
		ctx := f.Context()
		const secret = "tenant's secret"
		all := pooltest.CapacityOf(f, f.pool).Available
		pollute := func() {
			f.Helper()
			n := pooltest.CapacityOf(f, f.pool).Available
			f.make(pooltest.Vol("f"), n)
			f.write(pooltest.Vol("f"), 0, marked(secret, n))
			check.OK(f, f.pool.Delete(ctx, pooltest.Vol("f")))
		}
		clean := func(ref blockdev.Ref, from, to int64, what string) {
			f.Helper()
			if b := f.read(ref, from, to-from); bytes.Contains(b, []byte(secret)) {
				f.Errorf("%s has bytes of a deleted volume", what)
			} else if len(bytes.Trim(b, "\x00")) > 0 {
				f.Errorf("%s is not zero", what)
			}
		}
		pollute()
		f.make(pooltest.Vol("a"), all/4-all/4%extentSize)
		clean(pooltest.Vol("a"), 0, all/4-all/4%extentSize, "a new volume")
		check.OK(f, f.pool.Delete(ctx, pooltest.Vol("a")))

		pollute()
		f.make(pooltest.Vol("a"), 8*pooltest.MiB)
		f.write(pooltest.Vol("a"), 0, marked("a", 8*pooltest.MiB))
		device := f.handOut(pooltest.Vol("a"))
		check.OK(f, pooltest.Second(f.pool.Expand(ctx, pooltest.Vol("a"), 16*pooltest.MiB)))
		check.OK(f, f.stack(pooltest.Vol("a")).Grow(ctx, nil))
		if b, err := readDevice(device.Path, 8*pooltest.MiB, 8*pooltest.MiB); err != nil || len(bytes.Trim(b, "\x00")) > 0 {
			f.Errorf("the tail of an attached volume that grew is not zero: %v", err)
		}
		check.OK(f, errors.Join(device.Close(), f.stack(pooltest.Vol("a")).Detach(ctx)))
		check.OK(f, pooltest.Second(f.pool.Expand(ctx, pooltest.Vol("a"), 24*pooltest.MiB)))
		clean(pooltest.Vol("a"), 8*pooltest.MiB, 24*pooltest.MiB, "the tail of a volume that grew")
		f.holds(pooltest.Vol("a"), 0, marked("a", 8*pooltest.MiB))

		pollute()
		f.copy(pooltest.Snap("a"), pooltest.Vol("a"), 24*pooltest.MiB)
		f.holds(pooltest.Snap("a"), 0, marked("a", 8*pooltest.MiB))
		clean(pooltest.Snap("a"), 8*pooltest.MiB, 24*pooltest.MiB, "a snapshot")
		pollute()
		f.copy(pooltest.Vol("b"), pooltest.Snap("a"), 32*pooltest.MiB)
		f.holds(pooltest.Vol("b"), 0, marked("a", 8*pooltest.MiB))
		clean(pooltest.Vol("b"), 8*pooltest.MiB, 32*pooltest.MiB, "a larger copy of a snapshot")
		pollute()
		device = pooltest.Attach(f, f.pool, pooltest.Vol("a"), blockdev.Attachment{})
		f.copy(pooltest.Vol("c"), pooltest.Vol("a"), 28*pooltest.MiB)
		check.OK(f, device.Close())
		f.holds(pooltest.Vol("c"), 0, marked("a", 8*pooltest.MiB))
		clean(pooltest.Vol("c"), 8*pooltest.MiB, 28*pooltest.MiB, "a larger clone of an attached volume")
	})
}

// TestLVMBehindOurBack: somebody changes a volume without the driver. It is reported, not repaired by guess, and harms no other volume.
func TestLVMBehindOurBack(t *testing.T) {
	onLVM(t, func(f *lvmFixture) {
		ctx := f.Context()
		f.make(pooltest.Vol("0"), 8*pooltest.MiB)
		f.write(pooltest.Vol("0"), 0, marked("well", 8*pooltest.MiB))
		path := f.path(pooltest.Vol("a"))
		lvm := func(argv ...string) { f.Helper(); drivertest.Run(f, argv...) }
		spec := blockdev.Spec{Ref: pooltest.Vol("a"), Name: pooltest.Vol("a").String(), Size: 16 * pooltest.MiB}
		for _, c := range []struct {
			name   string
			harm   func()
			reason string // of Health; empty: no problem
			mend   func() // called before it is deleted
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
					f.make(pooltest.Vol("a"), 16*pooltest.MiB)
					f.write(pooltest.Vol("a"), 0, marked("a", 8*pooltest.MiB))
					f.ill(pooltest.Vol("a"))
					if restarted {
						check.OK(t, f.pool.Close())
					}
					c.harm()
					if restarted {
						f.pool = pooltest.OpenURL(t, f.url)
					} else {
						lvmpool.Age(f.pool)
					}
					f.ill(pooltest.Vol("a"), slices.DeleteFunc([]string{c.reason}, func(s string) bool { return s == "" })...)
					_, again := f.pool.Create(ctx, spec)
					check.OK(t, again) // it is there by its record; nothing is made
					if c.reason == "" {
						device, err := f.stack(pooltest.Vol("a")).Attach(ctx, device.Options{Keep: c.name == "activated"})
						check.OK(t, err)
						if b, err := readDevice(device.Path, 0, 8*pooltest.MiB); err != nil || !bytes.Equal(b, marked("a", 8*pooltest.MiB)) {
							t.Errorf("bytes are lost: %v", err)
						}
						check.OK(t, device.Close())
					} else {
						for _, readOnly := range []bool{false, true} {
							says(t, pooltest.Second(f.pool.Attach(ctx, pooltest.Vol("a"), blockdev.Attachment{ReadOnly: readOnly})), errdefs.ErrDataLoss, path)
						}
						says(t, pooltest.Second(f.pool.Create(ctx, blockdev.Spec{Ref: pooltest.Snap("a"), Name: "s", Size: 16 * pooltest.MiB, Origin: pooltest.Vol("a")})), errdefs.ErrDataLoss)
						says(t, pooltest.Second(f.pool.Expand(ctx, pooltest.Vol("a"), 32*pooltest.MiB)), errdefs.ErrDataLoss)
						f.ill(pooltest.Vol("a"), c.reason)
						if devices := f.left(pooltest.Vol("a")); len(devices) > 0 {
							t.Errorf("devices %v of a damaged volume", devices)
						}
					}
					f.holds(pooltest.Vol("0"), 0, marked("well", 8*pooltest.MiB))
					f.ill(pooltest.Vol("0"))
					if c.mend != nil {
						c.mend()
					}
					check.OK(t, errors.Join(f.stack(pooltest.Vol("a")).Detach(ctx), f.pool.Delete(ctx, pooltest.Vol("a"))))
					says(t, pooltest.Second(f.pool.Get(ctx, pooltest.Vol("a"))), errdefs.ErrNotFound)
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
		f.make(pooltest.Vol("0"), 8*pooltest.MiB)
		for digit, change := range map[string][]string{
			"1": {"--deltag", "ashlar.name=" + pooltest.Vol("1").String()},
			"2": {"--addtag", "ashlar.size=4096"},
			"3": {"--addtag", "ashlar.origin=nonsense"},
			"4": {"--addtag", "ashlar.color=red"},
			"5": {"--addtag", "ashlar.state=broken"},
			"6": {"--deltag", "ashlar"},
			"7": {"--addtag", "ashlar.label.x=!zz"},
		} {
			f.make(pooltest.Vol(digit), 4*pooltest.MiB)
			f.write(pooltest.Vol(digit), 0, marked(digit, 4*pooltest.MiB))
			drivertest.Run(f, append([]string{"lvchange", "-q", f.path(pooltest.Vol(digit))}, change...)...)
		}
		before := f.lv("lv_name,lv_uuid,lv_size,lv_tags")
		f.restart()
		f.poolIll("RecordDamaged")
		if records := f.all(); len(records) != 1 || records[0].Ref != pooltest.Vol("0") {
			f.Errorf("listed: %v", records)
		}
		if c := pooltest.CapacityOf(f, f.pool); f.thin && c.Promised != 36*pooltest.MiB {
			f.Errorf("capacity %+v does not count damaged volumes", c)
		}
		for i := 1; i <= 7; i++ {
			ref := pooltest.Vol(strconv.Itoa(i))
			says(f, pooltest.Second(f.pool.Get(ctx, ref)), errdefs.ErrDataLoss, ref.String())
			says(f, pooltest.Second(f.pool.Attach(ctx, ref, blockdev.Attachment{})), errdefs.ErrDataLoss)
			says(f, pooltest.Second(f.pool.Expand(ctx, ref, 8*pooltest.MiB)), errdefs.ErrDataLoss)
			says(f, pooltest.Second(f.pool.Create(ctx, blockdev.Spec{Ref: ref, Name: ref.String(), Size: 4 * pooltest.MiB})), errdefs.ErrDataLoss)
			says(f, pooltest.Second(f.pool.Create(ctx, blockdev.Spec{Ref: pooltest.Snap("1"), Name: "s", Size: 4 * pooltest.MiB, Origin: ref})), errdefs.ErrDataLoss)
			says(f, f.pool.Delete(ctx, ref), errdefs.ErrPrecondition, ref.String())
			f.ill(ref, "RecordDamaged")
		}
		f.ill(pooltest.Vol("0"))
		if after := f.lv("lv_name,lv_uuid,lv_size,lv_tags"); !slices.Equal(before, after) {
			f.Errorf("volumes %q, before %q", after, before)
		}
		for i := 1; i <= 7; i++ {
			drivertest.Run(f, "lvremove", "-q", "-f", f.path(pooltest.Vol(strconv.Itoa(i))))
		}
		f.restart()
		f.poolIll()
	})
}

// TestLVMConverted: somebody converts a volume to another layout, or renames it, while no driver runs. It does not count as gone: it is reported, and
// neither deleted nor made anew.
func TestLVMConverted(t *testing.T) {
	onLVM(t, func(f *lvmFixture) {
		ctx := f.Context()
		f.make(pooltest.Vol("0"), 8*pooltest.MiB)
		f.make(pooltest.Vol("a"), 8*pooltest.MiB)
		renamed := f.group.Name + "/mine"
		drivertest.Run(f, "lvrename", "-q", f.path(pooltest.Vol("a")), renamed)
		want := []string{"VolumeRenamed"}
		if !f.thin { // as after lvconvert, for which the kernel needs dm-raid
			args := []string{"lvcreate", "-q", "-an", "-Wn", "-Zn", "-L", "8M", "--type", "striped", "-i", "2", "-n", pooltest.Vol("b").String(), f.group.Name}
			for _, tag := range []string{"ashlar", "ashlar.name=" + pooltest.Vol("b").String(), "ashlar.size=8388608", "ashlar.created=2026-01-02T15:04:05Z"} {
				args = append(args, "--addtag", tag)
			}
			disk := drivertest.Disk(f.T, 64*pooltest.MiB)
			drivertest.Run(f, "vgextend", "-q", f.group.Name, disk)
			defer func() { drivertest.Run(f, "vgreduce", "-q", f.group.Name, disk) }()
			drivertest.Run(f, args...)
			want = []string{"RecordDamaged", "VolumeRenamed"}
		}
		f.restart()
		f.poolIll(want...)
		if !f.thin {
			says(f, pooltest.Second(f.pool.Get(ctx, pooltest.Vol("b"))), errdefs.ErrDataLoss, "striped")
			says(f, pooltest.Second(f.pool.Create(ctx, blockdev.Spec{Ref: pooltest.Vol("b"), Name: pooltest.Vol("b").String(), Size: 8 * pooltest.MiB})), errdefs.ErrDataLoss)
			says(f, f.pool.Delete(ctx, pooltest.Vol("b")), errdefs.ErrPrecondition, "striped")
			drivertest.Run(f, "lvremove", "-q", "-f", f.path(pooltest.Vol("b")))
		}
		drivertest.Run(f, "lvrename", "-q", renamed, f.path(pooltest.Vol("a")))
		f.restart()
		f.poolIll()
		f.ill(pooltest.Vol("a"))
		f.ill(pooltest.Vol("0"))
	})
}

// lvmChildren returns the processes of lvm2 that a process has started.
func lvmChildren(parent int) (pids []int) {
	paths, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, path := range paths {
		stat, _ := os.ReadFile(path)
		pid, rest, _ := strings.Cut(string(stat), " (lvm) ")
		fields := strings.Fields(rest) // catalog.State, parent
		if len(fields) > 1 && fields[0] != "Z" && fields[1] == strconv.Itoa(parent) {
			n, _ := strconv.Atoi(pid)
			pids = append(pids, n)
		}
	}
	return pids
}

// timeUp is a context that ends when the test says so.
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

// hangBound is how long a call may take, on a slow machine, to give up what hangs.
const hangBound = 30 * time.Second

// TestLVMHangs: lvm2 hangs. A call ends at its deadline, and so does one that waits for the turn. What hung is gone soon after, and the next call works.
func TestLVMHangs(t *testing.T) {
	onLVM(t, func(f *lvmFixture) {
		f.make(pooltest.Vol("0"), 8*pooltest.MiB)
		f.write(pooltest.Vol("0"), 0, marked("0", 8*pooltest.MiB))
		for _, how := range []string{"locked", "stopped"} {
			for _, name := range []string{"create", "labels", "attach", "copy", "delete", "expand"} {
				// What is stopped takes seconds to be killed, whatever the kind of pool.
				if how == "stopped" && (f.thin || name != "attach" && name != "expand") {
					continue
				}
				f.hangs(how, name)
				if f.Failed() {
					return
				}
			}
		}
	})
}

// hangs makes a call while lvm2 hangs, and twice when it does not any more.
func (f *lvmFixture) hangs(how, name string) {
	for deadline := time.Now().Add(time.Minute); len(f.group.DeviceNames()) > 0 && time.Now().Before(deadline); {
		time.Sleep(time.Millisecond) // what was attached before goes in the kernel's own time
	}
	hung, release := f.hang(how)
	start := time.Now()
	caller := timeUp{Context: context.Background(), up: make(chan struct{})} // up when the caller that waits for the turn has given up
	waited := f.waitForTurn(start, caller)
	err := f.call(caller, name)
	if took := time.Since(start); !errors.Is(err, context.DeadlineExceeded) || took > hangBound {
		f.Errorf("%s, lvm %s: %v after %v", name, how, err, took)
	}
	if err := <-waited; !errors.Is(err, context.DeadlineExceeded) {
		f.Errorf("%s, lvm %s: who waited for his turn: %v", name, how, err)
	}
	still := func() bool { // what hung has to go by itself
		return slices.ContainsFunc(hung, func(pid int) bool { return slices.Contains(lvmChildren(os.Getpid()), pid) })
	}
	for deadline := time.Now().Add(time.Minute); still() && time.Now().Before(deadline); {
		time.Sleep(20 * time.Millisecond)
	}
	if still() {
		f.Errorf("%s: lvm %v hangs, and is still there", name, hung)
	}
	release()
	for try := range 2 { // it is idempotent
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		if err := f.call(ctx, name); err != nil {
			f.Errorf("%s, lvm %s: try %d afterwards: %v", name, how, try, err)
		}
		cancel()
	}
	if name == "expand" {
		check.OK(f, f.pool.Delete(f.Context(), pooltest.Vol("0")))
		f.make(pooltest.Vol("0"), 8*pooltest.MiB)
	}
	check.OK(f, f.pool.Delete(f.Context(), pooltest.Vol("a")))
}

// hang makes lvm2 hang until release: its group is locked, or its processes, which it returns, are stopped.
func (f *lvmFixture) hang(how string) (hung []int, release func()) {
	if how == "locked" {
		lock, err := os.OpenFile("/run/lock/lvm/V_"+f.group.Name, os.O_RDWR|os.O_CREATE, 0o600)
		check.OK(f, err)
		check.OK(f, unix.Flock(int(lock.Fd()), unix.LOCK_EX))
		return nil, func() { check.OK(f, lock.Close()) }
	}
	check.OK(f, f.label(f.Context(), "n", "x"))
	hung = lvmChildren(os.Getpid())
	for _, pid := range hung {
		check.OK(f, syscall.Kill(pid, syscall.SIGSTOP))
	}
	return hung, func() {}
}

// waitForTurn has another caller change a record, and then attach, while a call hangs, and give up before that does. The channel gets its error: one that
// is not for want of time, if there is one.
func (f *lvmFixture) waitForTurn(start time.Time, caller timeUp) <-chan error {
	waited := make(chan error, 1)
	time.AfterFunc(500*time.Millisecond, func() {
		defer close(caller.up)
		var err error
		for _, call := range []func(context.Context) error{func(ctx context.Context) error { return f.label(ctx, "z", "z") }, f.attach} {
			ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
			err = call(ctx)
			cancel()
			if !errors.Is(err, context.DeadlineExceeded) {
				break
			}
		}
		if took := time.Since(start); took > hangBound {
			err = fmt.Errorf("it took %v: %s", took, fmt.Sprint(err))
		}
		waited <- err
	})
	return waited
}

// label adds text to a label of the first volume.
func (f *lvmFixture) label(ctx context.Context, key, text string) error {
	return pooltest.Second(f.pool.SetLabels(ctx, pooltest.Vol("0"), func(labels map[string]string) error {
		labels[key] += text
		return nil
	}))
}

// attach attaches the first volume, and closes the device.
func (f *lvmFixture) attach(ctx context.Context) error {
	device, err := f.pool.Attach(ctx, pooltest.Vol("0"), blockdev.Attachment{})
	return errors.Join(err, device.Close())
}

// call makes the call of a name.
func (f *lvmFixture) call(ctx context.Context, name string) error {
	switch name {
	case "create":
		return pooltest.Second(f.pool.Create(ctx, blockdev.Spec{Ref: pooltest.Vol("a"), Name: pooltest.Vol("a").String(), Size: 8 * pooltest.MiB}))
	case "labels":
		return f.label(ctx, "n", "y")
	case "expand":
		return pooltest.Second(f.pool.Expand(ctx, pooltest.Vol("0"), 16*pooltest.MiB))
	case "attach":
		return f.attach(ctx)
	case "copy":
		return pooltest.Second(f.pool.Create(ctx, blockdev.Spec{Ref: pooltest.Snap("c"), Name: pooltest.Snap("c").String(), Size: 8 * pooltest.MiB, Origin: pooltest.Vol("0")}))
	case "delete":
		return f.pool.Delete(ctx, pooltest.Snap("c"))
	}
	return fmt.Errorf("no call %q", name)
}

// TestLVMHangsSuspended: lvm2 is killed with a device suspended. That is resumed as soon as lvm2 is gone, and not only by the next call.
func TestLVMHangsSuspended(t *testing.T) {
	f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 64*pooltest.MiB)}
	f.url = f.group.URL() + "?reservePercent=0"
	f.start()
	f.make(pooltest.Vol("a"), 8*pooltest.MiB)
	f.attached(pooltest.Vol("a"), false, func(path string) {
		for _, pid := range lvmChildren(os.Getpid()) {
			check.OK(t, syscall.Kill(pid, syscall.SIGSTOP))
		}
		device := f.group.Device(pooltest.Vol("a").String())
		drivertest.Run(t, "dmsetup", "suspend", device)
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		_, err := f.pool.SetLabels(ctx, pooltest.Vol("a"), func(l map[string]string) error { l["x"] = "y"; return nil })
		says(t, err, context.DeadlineExceeded)
		written := make(chan error, 1)
		go func() { written <- writeDirect(path, 0, marked("a", pooltest.MiB)) }()
		select {
		case err := <-written:
			check.OK(t, err)
		case <-time.After(time.Minute):
			drivertest.Run(t, "dmsetup", "resume", device)
			t.Errorf("it is still suspended; resumed, a write ends with: %v", <-written)
		}
	})
}

// TestLVMCutShort: a call that runs out of time at any point can be tried again, also if there is room for only one such object. What is zeroed is not
// zeroed again.
func TestLVMCutShort(t *testing.T) {
	f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 200*pooltest.MiB)}
	f.url = f.group.URL() + "?reservePercent=0"
	f.start()
	all := pooltest.CapacityOf(t, f.pool).Available
	for n := 1; n < 40; n += 4 {
		f.make(pooltest.Vol("a"), 8*pooltest.MiB)
		ctx := &pooltest.EndsAfter{Context: t.Context(), N: n}
		_, err := f.pool.Expand(ctx, pooltest.Vol("a"), all)
		if err == nil {
			check.OK(t, f.pool.Delete(t.Context(), pooltest.Vol("a")))
			break
		}
		says(t, err, context.Canceled)
		check.OK(t, pooltest.Second(f.pool.Expand(t.Context(), pooltest.Vol("a"), all)))
		check.OK(t, f.pool.Delete(t.Context(), pooltest.Vol("a")))
		if c := pooltest.CapacityOf(t, f.pool); c.Available != all {
			t.Fatalf("%d looks at the context: capacity %+v, want %d", n, c, all)
		}
	}
	// Each try zeroes some, so with less than one try needs the last one has all.
	tries := 0
	for n := 6; tries == 0; n++ {
		for try := 1; try < 6 && tries == 0; try++ {
			_, err := f.pool.Create(&pooltest.EndsAfter{Context: t.Context(), N: n}, blockdev.Spec{Ref: pooltest.Vol("b"), Name: "b", Size: all})
			if err == nil {
				tries = try
			} else {
				says(t, err, context.Canceled)
			}
		}
		check.OK(t, f.pool.Delete(t.Context(), pooltest.Vol("b")))
	}
	if tries == 1 {
		t.Errorf("no volume of %d bytes was zeroed in more than one try", all)
	}
}

// TestLVMCutActivation: lvm2 brings a device up after the call for it has failed. It does not count as kept, and a start removes it.
func TestLVMCutActivation(t *testing.T) {
	onLVM(t, func(f *lvmFixture) {
		f.make(pooltest.Vol("a"), 8*pooltest.MiB)
		for how, attach := range f.attachments(pooltest.Vol("a")) {
			drivertest.Run(f, "lvchange", "-q", "-ay", "-K", f.path(pooltest.Vol("a")))
			device, err := attach()
			check.OK(f, err)
			check.OK(f, device.Close())
			if devices := f.left(pooltest.Vol("a")); len(devices) > 0 != (how == "handed out") {
				f.Errorf("%s: %v are left", how, devices)
			}
			check.OK(f, f.stack(pooltest.Vol("a")).Detach(f.Context()))
		}
		drivertest.Run(f, "lvchange", "-q", "-ay", "-K", f.path(pooltest.Vol("a"))) // and then the driver was killed
		f.restart()
		if names := f.group.DeviceNames(); len(names) > 0 {
			f.Errorf("after a start: %v are left", names)
		}
	})
}

// TestLVMGoing: a volume is grown, copied and deleted while its devices go with their last user.
func TestLVMGoing(t *testing.T) {
	onLVM(t, func(f *lvmFixture) {
		for size := int64(8 * pooltest.MiB); size < 40*pooltest.MiB; size += 4 * pooltest.MiB {
			f.make(pooltest.Vol("a"), size)
			use := func() {
				device, err := f.pool.Attach(f.Context(), pooltest.Vol("a"), blockdev.Attachment{})
				check.OK(f, err)
				check.OK(f, device.Close())
			}
			use()
			check.OK(f, pooltest.Second(f.pool.Expand(f.Context(), pooltest.Vol("a"), size+4*pooltest.MiB)))
			use()
			f.copy(pooltest.Snap("b"), pooltest.Vol("a"), size+4*pooltest.MiB)
			use()
			check.OK(f, f.pool.Delete(f.Context(), pooltest.Vol("a")))
			check.OK(f, f.pool.Delete(f.Context(), pooltest.Snap("b")))
		}
	})
}

// TestLVMHalfDone: lvm2 gives up a command half-way. What it made is removed, a volume in use goes on, and the retry succeeds.
func TestLVMHalfDone(t *testing.T) {
	f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 256*pooltest.MiB)}
	f.url = f.group.URL() + "?reservePercent=0"
	f.start()
	f.make(pooltest.Vol("a"), 8*pooltest.MiB)
	device, err := f.pool.Attach(t.Context(), pooltest.Vol("a"), blockdev.Attachment{})
	check.OK(t, err)
	check.OK(t, writeDirect(device.Path, 0, marked("a", 8*pooltest.MiB)))
	before := pooltest.CapacityOf(t, f.pool)
	// A device has the name that lvm2 needs in the middle of it.
	taken := f.group.Device("cut."+pooltest.Snap("a").String()) + "-cow"
	drivertest.Run(t, "dmsetup", "create", taken, "--notable")
	spec := blockdev.Spec{Ref: pooltest.Snap("a"), Name: "a", Size: 8 * pooltest.MiB, Origin: pooltest.Vol("a")}
	_, err = f.pool.Create(t.Context(), spec)
	drivertest.Run(t, "dmsetup", "remove", "--retry", taken)
	if err == nil || !strings.Contains(err.Error(), "lvcreate") {
		t.Errorf("with a name taken: %v", err)
	}
	check.OK(t, writeDirect(device.Path, 0, marked("a", 8*pooltest.MiB)))
	lvmpool.Age(f.pool)
	if now := pooltest.CapacityOf(t, f.pool); now != before {
		t.Errorf("capacity %+v, before %+v", now, before)
	}
	pooltest.Create(t, f.pool, spec)
	check.OK(t, device.Close())
	f.holds(pooltest.Snap("a"), 0, marked("a", 8*pooltest.MiB))
}

// TestLVMDevicesBelow: an lvm2 that died while it made a cut left devices below volumes. The next start removes them: also those below a logical volume
// that was never written down, those that a loaded table holds, and those without a table. Devices of others with such names stay.
func TestLVMDevicesBelow(t *testing.T) {
	f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 64*pooltest.MiB)}
	f.url = f.group.URL() + "?reservePercent=0"
	f.start()
	f.make(pooltest.Vol("a"), 8*pooltest.MiB)
	uuid := "LVM-" + strings.ReplaceAll(strings.TrimSpace(drivertest.Run(t, "vgs", "--noheadings", "-o", "vg_uuid", f.group.Name)), "-", "")
	prefix := f.group.Device("")
	bare := prefix + "cut." + pooltest.Snap("c").String()
	left, held, others := prefix+"cut."+pooltest.Snap("a").String()+"-cow", prefix+pooltest.Vol("a").String()+"-real", prefix+"cut."+pooltest.Vol("b").String()+"-cow"
	device := f.handOut(pooltest.Vol("a"))
	check.OK(t, device.Close())
	drivertest.Run(t, "dmsetup", "create", left, "--uuid", uuid+"x-cow", "--table", "0 8 error")
	drivertest.Run(t, "dmsetup", "create", held, "--uuid", uuid+"x-real", "--table", "0 16384 error")
	drivertest.Run(t, "dmsetup", "create", bare, "--uuid", uuid+"y", "--notable")
	drivertest.Run(t, "dmsetup", "create", others, "--uuid", "somebody's", "--table", "0 8 error")
	drivertest.Run(t, "dmsetup", "load", prefix+pooltest.Vol("a").String(), "--table", "0 16384 linear /dev/mapper/"+held+" 0")
	f.restart()
	for name, want := range map[string]bool{left: false, held: false, bare: false, others: true} {
		_, err := exec.Command("dmsetup", "info", name).Output()
		if (err == nil) != want {
			t.Errorf("%s is there: %v", name, err == nil)
		}
	}
	check.OK(t, writeDirect(device.Path, 0, marked("b", pooltest.MiB)))
	drivertest.Run(t, "dmsetup", "remove", others)
	check.OK(t, f.stack(pooltest.Vol("a")).Detach(t.Context()))
	f.holds(pooltest.Vol("a"), 0, marked("b", pooltest.MiB))
}

// TestLVMWithoutTable: a crash left a device without a table. The next call that needs it completes it.
func TestLVMWithoutTable(t *testing.T) {
	onLVM(t, func(f *lvmFixture) {
		f.make(pooltest.Vol("a"), 8*pooltest.MiB)
		f.write(pooltest.Vol("a"), 0, marked("a", 8*pooltest.MiB))
		ids := strings.Fields(strings.ReplaceAll(drivertest.Run(t, "lvs", "--noheadings", "-o", "vg_uuid,lv_uuid", f.path(pooltest.Vol("a"))), "-", ""))
		name, uuid := f.group.Device(pooltest.Vol("a").String()), "LVM-"+ids[0]+ids[1]
		for how, attach := range f.attachments(pooltest.Vol("a")) {
			for _, suffix := range []string{"", "-writable", "-readonly"} {
				for _, load := range []bool{false, true} {
					drivertest.Run(t, "dmsetup", "create", name+suffix, "--notable", "--uuid", uuid+suffix)
					if load {
						drivertest.Run(t, "dmsetup", "load", name+suffix, "--table", "0 16384 error")
					}
					if devices, err := f.stack(pooltest.Vol("a")).Attached(t.Context()); err != nil || len(devices) > 0 {
						f.Errorf("%q without a table: attached as %v, %v", suffix, devices, err)
					}
					device, err := attach()
					check.OK(f, err)
					have, err := readDevice(device.Path, 0, 8*pooltest.MiB)
					check.OK(f, err)
					if !bytes.Equal(have, marked("a", 8*pooltest.MiB)) {
						f.Errorf("%q without a table: %s, it shows other bytes", suffix, how)
					}
					check.OK(f, device.Close())
					check.OK(f, f.stack(pooltest.Vol("a")).Detach(t.Context()))
				}
			}
		}
	})
}

// TestLVMReaderLeft: the driver was killed when it had just made a device for reading, which would not go with its last user yet. The next driver has it
// go, and the one below it.
func TestLVMReaderLeft(t *testing.T) {
	onLVM(t, func(f *lvmFixture) {
		f.make(pooltest.Vol("a"), 8*pooltest.MiB)
		ids := strings.Fields(strings.ReplaceAll(drivertest.Run(t, "lvs", "--noheadings", "-o", "vg_uuid,lv_uuid", f.path(pooltest.Vol("a"))), "-", ""))
		name, uuid := f.group.Device(pooltest.Vol("a").String()), "LVM-"+ids[0]+ids[1]
		for _, table := range []string{"0 16384 linear /dev/mapper/" + name + " 0", ""} {
			drivertest.Run(t, "lvchange", "-ay", "-K", f.path(pooltest.Vol("a")))
			argv := []string{"dmsetup", "create", name + "-readonly", "--uuid", uuid + "-readonly", "--readonly", "--notable"}
			if table != "" {
				argv = append(argv[:len(argv)-1], "--table", table)
			}
			drivertest.Run(t, argv...)
			check.OK(f, f.pool.Close())
			f.pool = pooltest.OpenURL(f, f.url)
			for deadline := time.Now().Add(10 * time.Second); len(f.group.DeviceNames()) > 0 && time.Now().Before(deadline); {
				time.Sleep(10 * time.Millisecond)
			}
			if left := f.group.DeviceNames(); len(left) > 0 {
				f.Errorf("with the table %q, left: %v", table, left)
			}
		}
	})
}

// TestLVMPartsOfThinPool: an lvm2 that was cut short while it had a thin pool down left parts of it up. The next start brings it up.
func TestLVMPartsOfThinPool(t *testing.T) {
	f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 256*pooltest.MiB), thin: true}
	f.url = f.group.ThinPool(t, "tp", "-L", "64M", "--poolmetadatasize", "4M") + "?reservePercent=0"
	f.start()
	prefix := f.group.Device("tp")
	for _, left := range [][]string{{"_tmeta"}, {"_tdata"}, {"_tmeta", "_tdata"}, {"_tmeta", "_tdata", "-tpool"}} {
		f.make(pooltest.Vol("a"), 8*pooltest.MiB) // with a volume, the thin pool has a device below the one for lvm2
		check.OK(t, f.pool.Close())
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
		f.pool = pooltest.OpenURL(t, f.url)
		check.OK(t, f.pool.Delete(t.Context(), pooltest.Vol("a")))
	}
}

// TestLVMSnapshotTold: lvm2 was cut short after the thin pool had made a snapshot and before lvm2 had noted that, and would refuse every change from then
// on. A start repairs it, with the thin pool up or down; but not if somebody has the snapshot already.
func TestLVMSnapshotTold(t *testing.T) {
	for name, test := range map[string]struct{ down, had bool }{"up": {}, "down": {down: true}, "had": {had: true}} {
		t.Run(name, func(t *testing.T) {
			f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 256*pooltest.MiB), thin: true}
			f.url = f.group.ThinPool(t, "tp", "-L", "64M", "--poolmetadatasize", "4M") + "?reservePercent=0"
			f.start()
			f.make(pooltest.Vol("a"), 8*pooltest.MiB)
			f.write(pooltest.Vol("a"), 0, marked("a", 8*pooltest.MiB))
			f.copy(pooltest.Snap("b"), pooltest.Vol("a"), 8*pooltest.MiB)
			check.OK(t, f.pool.Close())
			f.pool = nil
			if test.down {
				drivertest.Run(t, "lvchange", "-q", "-an", f.group.Name+"/tp")
			}
			f.rewrite(func(all string) string {
				before, b, _ := strings.Cut(all, "\t"+pooltest.Snap("b").String()+" {")
				if !test.had {
					b = strings.Replace(b, "tags = [", `tags = ["ashlar.state=creating", `, 1)
				}
				return untold(t, before+"\t"+pooltest.Snap("b").String()+" {"+b, `create = "`+pooltest.Snap("b").String()+`"`)
			})
			f.pool = pooltest.OpenURL(t, f.url)
			if test.had {
				err := f.pool.Delete(t.Context(), pooltest.Vol("a"))
				says(t, err, errdefs.ErrUnavailable, "already contain", "none that this pool was making")
				check.OK(t, f.pool.Close())
				f.pool = nil
				return
			}
			if _, err := f.pool.Get(t.Context(), pooltest.Snap("b")); !errors.Is(err, errdefs.ErrNotFound) {
				t.Errorf("a snapshot that nobody has: %v", err)
			}
			f.copy(pooltest.Snap("b"), pooltest.Vol("a"), 8*pooltest.MiB)
			f.holds(pooltest.Snap("b"), 0, marked("a", 8*pooltest.MiB))
		})
	}
}

// TestLVMFirstVolume: while lvm2 gives a thin pool its first volume, or takes away its last, its device has another name. That is not taken for a thin
// pool that is down.
func TestLVMFirstVolume(t *testing.T) {
	f := &lvmFixture{T: t, group: drivertest.NewGroup(t, 128*pooltest.MiB)}
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
		f.make(pooltest.Vol("a"), 4*pooltest.MiB)
		check.OK(t, f.pool.Delete(t.Context(), pooltest.Vol("a")))
	}
	cancel()
	if err := <-looked; err != nil || looks < 10 {
		t.Errorf("after %d looks: %v", looks, err)
	}
}

// TestLVMReportMeanwhile: a report is made while a copy is grown to its size. The copy does not count as truncated.
func TestLVMReportMeanwhile(t *testing.T) {
	onLVM(t, func(f *lvmFixture) {
		f.make(pooltest.Vol("a"), 8*pooltest.MiB)
		device, err := f.pool.Attach(f.Context(), pooltest.Vol("a"), blockdev.Attachment{})
		check.OK(f, err)
		reports := 0
		_, err = f.pool.Create(f.Context(), blockdev.Spec{Ref: pooltest.Vol("b"), Name: "b", Size: 16 * pooltest.MiB, Origin: pooltest.Vol("a"), Cut: func(ctx context.Context) error {
			reports++
			lvmpool.Age(f.pool)
			_, err := f.pool.Capacity(ctx)
			return err
		}})
		check.OK(f, errors.Join(err, device.Close()))
		if reports != 1 {
			f.Errorf("Cut was called %d times", reports)
		}
		f.copy(pooltest.Snap("b"), pooltest.Vol("b"), 16*pooltest.MiB)
		f.ill(pooltest.Vol("b"))
	})
}

// TestLVMCopiesOfHalfGrown: a growth was cut short before the record had it. Copies of such a volume have the size that was asked for, and the next start
// repairs only the volume.
func TestLVMCopiesOfHalfGrown(t *testing.T) {
	onLVM(t, func(f *lvmFixture) {
		f.make(pooltest.Vol("a"), 8*pooltest.MiB)
		f.write(pooltest.Vol("a"), 0, marked("a", 8*pooltest.MiB))
		drivertest.Run(f, "lvextend", "-q", "-L", "16M", f.path(pooltest.Vol("a")))
		lvmpool.Age(f.pool)
		f.copy(pooltest.Snap("a"), pooltest.Vol("a"), 8*pooltest.MiB)
		f.copy(pooltest.Vol("b"), pooltest.Snap("a"), 12*pooltest.MiB)
		check.OK(f, f.pool.Close())
		f.pool = nil
		logger := ktesting.NewLogger(ktesting.NopTL{}, ktesting.NewConfig(ktesting.BufferLogs(true)))
		pool, err := pools.Open(klog.NewContext(f.Context(), logger), "p", f.url)
		check.OK(f, err)
		f.pool = pool
		if text := logger.GetSink().(ktesting.Underlier).GetBuffer().String(); strings.Contains(text, "could not") {
			f.Errorf("the start says: %s", text)
		}
		for ref, least := range map[blockdev.Ref]int64{pooltest.Vol("a"): 16 * pooltest.MiB, pooltest.Vol("b"): 12 * pooltest.MiB, pooltest.Snap("a"): 8 * pooltest.MiB} {
			r, err := f.pool.Get(f.Context(), ref)
			check.OK(f, err)
			if r.Size < least || (ref == pooltest.Snap("a") && r.Size != least) {
				f.Errorf("%s has %d bytes, want %d", ref, r.Size, least)
			}
			f.holds(ref, 0, marked("a", 8*pooltest.MiB))
			f.ill(ref)
		}
	})
}

// TestLVMTwoPools: linear and thin volumes of one group are two pools that know nothing of each other. Neither is opened twice. The group moves to another
// machine with all volumes.
func TestLVMTwoPools(t *testing.T) {
	g := drivertest.NewGroup(t, 256*pooltest.MiB, 256*pooltest.MiB)
	urls := []string{g.URL() + "?reservePercent=0", g.ThinPool(t, "tp", "-L", "128M", "--poolmetadatasize", "4M") + "?reservePercent=0"}
	var both []*lvmFixture
	for i, url := range urls {
		f := &lvmFixture{T: t, group: g, url: url, thin: i == 1}
		f.pool = pooltest.OpenURL(t, url)
		both = append(both, f)
	}
	for i, f := range both {
		_, err := pools.Open(t.Context(), "again", f.url)
		pooltest.Fails(t, err, errdefs.ErrInUse, "open of a pool that is open")
		ref := pooltest.Vol(strconv.Itoa(i))
		f.make(ref, 16*pooltest.MiB)
		f.write(ref, 0, marked(ref.Key[:8], 8*pooltest.MiB))
		f.copy(pooltest.Snap(strconv.Itoa(i)), ref, 16*pooltest.MiB)
		check.OK(t, pooltest.Second(f.pool.SetLabels(t.Context(), ref, func(l map[string]string) error { l["of"] = f.url; return nil })))
	}
	verify := func() {
		t.Helper()
		for i, f := range both {
			ref := pooltest.Vol(strconv.Itoa(i))
			f.holds(ref, 0, marked(ref.Key[:8], 8*pooltest.MiB))
			f.holds(pooltest.Snap(strconv.Itoa(i)), 0, marked(ref.Key[:8], 8*pooltest.MiB))
			if records := f.all(); len(records) != 2 || records[0].Thin != f.thin || records[1].Labels["of"] != f.url {
				t.Errorf("records %+v", records)
			}
			f.poolIll()
			says(t, pooltest.Second(f.pool.Get(t.Context(), pooltest.Vol(strconv.Itoa(1-i)))), errdefs.ErrNotFound)
		}
	}
	verify()
	for _, f := range both {
		check.OK(t, f.pool.Close())
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
		f.pool, err = pools.Open(t.Context(), "elsewhere", f.url)
		check.OK(t, err)
	}
	verify()
	for _, f := range both {
		f.make(pooltest.Vol("a"), 8*pooltest.MiB)
		for _, r := range f.all() {
			check.OK(t, f.pool.Delete(t.Context(), r.Ref))
		}
		check.OK(t, f.pool.Close())
	}
	drivertest.Run(t, "vgchange", "-q", "-an", g.Name)
}

// TestLVMManyLabels: a record may have many labels. More than fit into a line of lvm2's shell are refused.
func TestLVMManyLabels(t *testing.T) {
	onLVM(t, func(f *lvmFixture) {
		labels := map[string]string{}
		for i := range 40 {
			labels[fmt.Sprintf("label-%d", i)] = strings.Repeat("=", 300)
		}
		pooltest.Create(f, f.pool, blockdev.Spec{Ref: pooltest.Vol("a"), Size: 8 * pooltest.MiB, Labels: labels})
		check.OK(f, pooltest.Second(f.pool.SetLabels(f.Context(), pooltest.Vol("a"), func(l map[string]string) error {
			for i := range 20 {
				l[fmt.Sprintf("label-%d", 20+i)] = "new"
			}
			return nil
		})))
		for i := range 40 {
			labels[fmt.Sprintf("more-%d", i)] = "x"
		}
		says(f, pooltest.Second(f.pool.Create(f.Context(), blockdev.Spec{Ref: pooltest.Vol("b"), Name: "b", Size: 8 * pooltest.MiB, Labels: labels})), errdefs.ErrInvalid, "tags")
		says(f, pooltest.Second(f.pool.SetLabels(f.Context(), pooltest.Vol("a"), func(l map[string]string) error {
			for key := range l {
				l[key] = "too many at once"
			}
			return nil
		})), errdefs.ErrInvalid, "words")
		f.restart()
		r, err := f.pool.Get(f.Context(), pooltest.Vol("a"))
		check.OK(f, err)
		if len(r.Labels) != 40 || r.Labels["label-39"] != "new" {
			f.Errorf("labels %v", r.Labels)
		}
	})
}
