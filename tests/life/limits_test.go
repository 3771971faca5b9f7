package life

import (
	"flag"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// How far the rate of a limited device may be from its limit, in percent, for how long it is measured, and how often. One time in many is
// enough where other processes have the CPUs; what is exact needs a quiet machine (make bench-limits).
var (
	limitsWithin = flag.Float64("limits.within", 25, "percent that the rate of a limited device may be from its limit")
	limitsFor    = flag.Duration("limits.for", 700*time.Millisecond, "how long a rate is measured")
	limitsTries  = flag.Int("limits.tries", 60, "how often a rate is measured that is not what it should be")
)

// slack is how long it may take until a limit is felt: the kernel counts in slices of 0.1 s, and what waits already waits.
const slack = time.Second

// number is the device of a volume as the kernel writes it: 254:0.
func (v *vol) number() string {
	v.t.Helper()
	devices, err := v.Store.Attached(v.t.Context(), id(v.t, v.ID))
	check.OK(v.t, err)
	if len(devices) != 1 {
		v.t.Fatalf("the devices are %v", devices)
	}
	return fmt.Sprintf("%d:%d", unix.Major(devices[0].Number), unix.Minor(devices[0].Number))
}

// fio has a pod work on a file or a device of a volume until stop is called: job is read, write, randread or randwrite, with blocks of a size.
func fio(pod *drivertest.CGroup, file, job, size string, more ...string) (stop func()) {
	ended := pod.Start(append([]string{"fio", "--name=" + job, "--filename=" + file, "--rw=" + job, "--bs=" + size, "--size=12M", "--time_based",
		"--runtime=600", "--thread", "--ioengine=psync", "--allow_file_create=0", "--output-format=terse"}, more...)...)
	return func() { ended() }
}

// rate is what a pod that was just started does to a device in a second, measured for a while: rbytes, wbytes, rios, wios, as the kernel counts them
// for it; and all that was written to the device, by whomever. It is measured from one change of the counts to another: a MiB that waits for its turn
// is counted at once, and a while that has two of them or three, as it begins, would be off by half.
func rate(t *testing.T, pod *drivertest.CGroup, device string) (counted map[string]float64, written float64) {
	t.Helper()
	changed := func() (map[string]float64, float64, time.Time) {
		t.Helper()
		before := pod.IO(device)
		for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(time.Millisecond) {
			if now := pod.IO(device); !maps.Equal(before, now) {
				return now, bytesWritten(t, device), time.Now()
			}
		}
		t.Fatalf("nothing is done to %s", device)
		return nil, 0, time.Time{}
	}
	changed()
	time.Sleep(slack)
	before, writtenBefore, began := changed()
	time.Sleep(*limitsFor)
	counted, written, ended := changed()
	took := ended.Sub(began).Seconds()
	for key := range counted {
		counted[key] = (counted[key] - before[key]) / took
	}
	return counted, (written - writtenBefore) / took
}

// bytesWritten are all that were ever written to a device (Documentation/block/stat.rst of the kernel).
func bytesWritten(t *testing.T, device string) float64 {
	t.Helper()
	text, err := os.ReadFile("/sys/dev/block/" + device + "/stat")
	check.OK(t, err)
	sectors, err := strconv.ParseFloat(strings.Fields(string(text))[6], 64)
	check.OK(t, err)
	return sectors * 512
}

// uncounted is how much more may be written to a device than its pods may write, as a part of that: a filesystem's own work is the kernel's.
const uncounted = 0.25

// keeps makes sure that what pods do to a device in a second is its limit, and that nothing of what they write is counted for nobody.
func keeps(t *testing.T, what string, pods *drivertest.CGroup, device, key string, limit float64) {
	t.Helper()
	var off, written float64
	for range *limitsTries {
		var counted map[string]float64
		counted, written = rate(t, pods, device)
		is := counted[key]
		off = 100 * (is - limit) / limit
		t.Logf("%s: %.0f of %.0f in a second (%+.1f %%), %.0f bytes written", what, is, limit, off, written)
		if math.Abs(off) <= *limitsWithin && (key != "wbytes" || written <= limit*(1+uncounted)) {
			return
		}
	}
	t.Errorf("%s is off by %+.1f %%, and %.0f bytes are written", what, off, written)
}

// TestLimits: a volume's limits are what pods of each QoS class can do to it, by whichever cgroup driver, while others are not disturbed; they change
// while it is used, and go with it.
func TestLimits(t *testing.T) {
	today := int(time.Now().Unix() / 86400)
	for i, kind := range []string{"ext4", "xfs", "btrfs", block} {
		if os.Getenv("SAMPLE") == "1" && i != today%4 {
			continue
		}
		t.Run(kind, func(t *testing.T) {
			kubepods := drivertest.Pods(t, i%2 == 0)
			pod := kubepods.Pod("0a1b2c3d-1111-2222-3333-444455556666", []string{"burstable", "besteffort", "", "burstable"}[i])
			other := kubepods.Pod("0a1b2c3d-1111-2222-3333-777788889999", "besteffort")
			pool := "plain"
			if os.Getenv("ASHLAR_LVM") == "1" {
				pool = []string{linear, thin}[i%2]
			}
			d := startOn(t, pool)
			r := co.Request("limited", kind, smallest[kind])
			r.MutableParameters = map[string]string{"readIOPS": "200", "writeBandwidth": "4Mi"}
			v := d.made(r)
			neighbour := d.made(co.Request("neighbour", kind, smallest[kind]))
			target, nearTarget := v.running(), neighbour.running()
			device, nearDevice := v.number(), neighbour.number()
			file, nearFile := v.File(target), neighbour.File(nearTarget)
			for _, f := range []string{file, nearFile} { // by the pod: what others wrote is not held back at first (TestLimitsTakenOver)
				pod.Run("dd", "if=/dev/urandom", "of="+f, "bs=1M", "count=12", "conv=notrunc", "status=none")
			}
			line := func(want string) {
				t.Helper()
				if have := kubepods.Limits(device); have != want {
					t.Fatalf("the device has %q, want %q", have, want)
				}
			}
			line("rbps=max wbps=4194304 riops=200 wiops=max")
			if have := kubepods.Limits(nearDevice); have != "" {
				t.Errorf("the neighbour has %q", have)
			}

			stop := fio(pod, file, "randread", "4k", "--direct=1")
			stopNear := fio(pod, nearFile, "randread", "4k", "--direct=1")
			keeps(t, "readIOPS", pod, device, "rios", 200)
			near := 0.0
			for try := 0; near < 400 && try < *limitsTries; try++ {
				counted, _ := rate(t, pod, nearDevice)
				near = counted["rios"]
			}
			if near < 400 {
				t.Errorf("the neighbour, which has no limit, reads %.0f times in a second", near)
			}
			// All pods of the volume share what it may.
			stopOther := fio(other, file, "randread", "4k", "--direct=1")
			keeps(t, "readIOPS of two pods", kubepods, device, "rios", 200)
			stopOther()

			// Changed while it is read from.
			check.OK(t, v.modify(map[string]string{"readIOPS": "600"}))
			line("rbps=max wbps=4194304 riops=600 wiops=max")
			keeps(t, "readIOPS, changed", pod, device, "rios", 600)
			check.OK(t, v.modify(map[string]string{"readIOPS": "max", "readBandwidth": "2M"}))
			line("rbps=2000000 wbps=4194304 riops=max wiops=max")
			keeps(t, "readBandwidth", pod, device, "rbytes", 2e6)
			stop()
			stopNear()

			stop = fio(pod, file, "write", "64k", "--direct=1")
			keeps(t, "writeBandwidth", pod, device, "wbytes", 4*miB)
			stop()
			stop = fio(pod, file, "write", "64k", "--fsync=16")
			keeps(t, "writeBandwidth through the page cache", pod, device, "wbytes", 4*miB)
			stop()
			check.OK(t, v.modify(map[string]string{"writeBandwidth": "max", "writeIOPS": "150"}))
			stop = fio(pod, file, "randwrite", "4k", "--direct=1")
			keeps(t, "writeIOPS", pod, device, "wios", 150)
			stop()

			check.OK(t, v.modify(map[string]string{"readBandwidth": "max", "writeIOPS": "max"}))
			line("")
			check.OK(t, v.modify(map[string]string{"writeIOPS": "1k"}))
			line("rbps=max wbps=max riops=max wiops=1000")
			check.OK(t, v.down(target))
			line("")
			check.OK(t, neighbour.down(nearTarget))
			d.nothingLeft()
		})
	}
}

// TestLimitsKept: what somebody took away is told, and set again by a start and by the next publication; of others' lines none is touched.
func TestLimitsKept(t *testing.T) {
	kubepods := drivertest.Pods(t, true)
	d := start(t, drivertest.Options{})
	r := co.Request("volume", "ext4", smallest["ext4"])
	r.MutableParameters = map[string]string{"writeIOPS": "100", "readAheadKiB": "256"}
	v := d.made(r)
	check.OK(t, v.claim())
	check.OK(t, v.stage())
	device := v.number()
	file := filepath.Join(d.Dir, "other")
	check.OK(t, os.WriteFile(file, make([]byte, miB), 0o600))
	other := drivertest.PlainLoop(t, file)
	text, err := os.ReadFile(filepath.Join("/sys/block", filepath.Base(other), "dev"))
	check.OK(t, err)
	others := strings.TrimSpace(string(text))
	kubepods.SetLimits(others + " riops=77")
	const limited = "rbps=max wbps=max riops=max wiops=100"
	is := func(want, when string) {
		t.Helper()
		if have := kubepods.Limits(device); have != want {
			t.Errorf("%s the device has %q, want %q", when, have, want)
		}
		if have := kubepods.Limits(others); have != "rbps=max wbps=max riops=77 wiops=max" {
			t.Errorf("%s another device has %q", when, have)
		}
	}
	is("", "staged,")
	if problems := v.problems(); len(problems) > 0 {
		t.Errorf("health before it is published: %v", problems)
	}
	target := v.Target("pod")
	check.OK(t, v.publish(target, false))
	is(limited, "published,")
	if problems := v.problems(); len(problems) > 0 {
		t.Errorf("health: %v", problems)
	}
	kubepods.SetLimits(device + " wiops=max")
	if problems := v.problems(); len(problems) != 1 || !strings.HasSuffix(problems[0], " LimitsNotKept") {
		t.Errorf("health without its line: %v", problems)
	}
	check.OK(t, v.publish(v.Target("second"), false))
	is(limited, "published again,")
	kubepods.SetLimits(device + " wiops=5")
	d = d.restart()
	v = d.volume(v.ID, v.Name, v.Capability)
	is(limited, "after a restart,")
	check.OK(t, v.modify(map[string]string{"writeIOPS": "max"}))
	is("", "without a limit,")
	kubepods.SetLimits(device + " wiops=5") // of a volume that had the number before
	check.OK(t, v.publish(v.Target("third"), false))
	is("", "published without a limit,")

	check.OK(t, v.modify(map[string]string{"writeIOPS": "100"}))
	for _, pod := range []string{"pod", "second", "third"} {
		check.OK(t, v.unpublish(v.Target(pod)))
	}
	is(limited, "staged still,")
	check.OK(t, v.unstage())
	is("", "unstaged,")
	check.OK(t, v.release())
	check.OK(t, v.delete())
	d.nothingLeft()
	drivertest.Run(t, "losetup", "-d", other)
}

// TestLimitsLift: what a pod left to be written does not hold a snapshot up, nor its own end, however low the limit is.
func TestLimitsLift(t *testing.T) {
	kubepods := drivertest.Pods(t, false)
	pod := kubepods.Pod("0a1b2c3d-1111-2222-3333-444455556666", "burstable")
	d := startOn(t, "xfs")
	r := co.Request("volume", "ext4", 128*miB)
	r.MutableParameters = map[string]string{"writeBandwidth": "64Ki"}
	v := d.made(r)
	target := v.running()
	device := v.number()
	write := func(name string) {
		pod.Run("dd", "if=/dev/urandom", "of="+filepath.Join(target, name), "bs=1M", "count=8", "status=none") // two minutes at its rate
	}
	soon := func(what string, call func() error) {
		t.Helper()
		began := time.Now()
		check.OK(t, call())
		if took := time.Since(began); took > 50*time.Second {
			t.Errorf("%s took %v", what, took)
		}
	}
	write("first")
	var snapshot *csi.Snapshot
	cut := make(chan struct{})
	var looked sync.WaitGroup
	looked.Go(func() {
		for done := false; !done; {
			select {
			case <-cut:
				done = true
			default:
			}
			health, err := v.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: v.ID})
			if err != nil || len(health.GetVolumeHealth().GetHealthStatuses()) > 0 {
				t.Errorf("health while the snapshot is cut: %v, %v", health, err)
				return
			}
		}
	})
	soon("a snapshot", func() (err error) { snapshot, err = v.snapshot("cut"); return err })
	close(cut)
	looked.Wait()
	if have := kubepods.Limits(device); have != "rbps=max wbps=65536 riops=max wiops=max" {
		t.Errorf("after the snapshot the device has %q", have)
	}
	check.OK(t, d.deleteSnapshot(snapshot.GetSnapshotId()))
	write("second")
	check.OK(t, v.unpublish(target))
	soon("unstaging", v.unstage)
	check.OK(t, v.release())
	check.OK(t, v.delete())
	d.nothingLeft()
}

// TestLimitsGone: no limit stays with the number of a device that was taken away, whoever took it out of its mounts.
func TestLimitsGone(t *testing.T) {
	kubepods := drivertest.Pods(t, true)
	for kind, staged := range map[string]func(v *vol) string{
		block:  func(v *vol) string { return filepath.Join(v.Staging, "device") },
		"ext4": func(v *vol) string { return v.Staging },
	} {
		d := start(t, drivertest.Options{})
		r := co.Request("volume", kind, smallest[kind])
		r.MutableParameters = map[string]string{"readIOPS": "100"}
		v := d.made(r)
		for what, end := range map[string]func(){
			"unstaged":            func() { check.OK(t, v.unstage()) },
			"driver starts again": func() { d = d.restart(); v = d.volume(v.ID, v.Name, v.Capability) },
		} {
			target := v.running()
			device := v.number()
			if have := kubepods.Limits(device); have == "" {
				t.Fatal("it has no limits")
			}
			drivertest.Unmount(t, target)
			drivertest.Unmount(t, staged(v))
			end()
			if devices, err := d.Store.Attached(t.Context(), id(t, v.ID)); err != nil || len(devices) > 0 {
				t.Errorf("%s, %s: the devices are %v, %v", kind, what, devices, err)
			}
			if have := kubepods.Limits(device); have != "" {
				t.Errorf("%s, %s: the number of a device that is gone has %q", kind, what, have)
			}
			check.OK(t, v.unpublish(target))
			check.OK(t, v.unstage())
			check.OK(t, v.release())
		}
		check.OK(t, v.delete())
		d.nothingLeft()
	}
}

// TestLimitsJournaled: an ext4 whose journal writes the bytes of files has no limits of writes, as those would be nobody's; others it has.
func TestLimitsJournaled(t *testing.T) {
	kubepods := drivertest.Pods(t, false)
	for _, option := range []string{"data=journal", "nodelalloc"} {
		d := start(t, drivertest.Options{})
		r := co.Request("volume", "ext4", smallest["ext4"])
		r.MutableParameters = map[string]string{"writeIOPS": "100"}
		r.VolumeCapabilities[0].GetMount().MountFlags = []string{"noatime," + option}
		v := d.made(r)
		check.OK(t, v.claim())
		check.OK(t, v.stage())
		device, target := v.number(), v.Target("pod")
		check.Code(t, v.publish(target, false), codes.InvalidArgument, option)
		check.OK(t, v.modify(map[string]string{"writeIOPS": "max", "readIOPS": "100"}))
		check.OK(t, v.publish(target, false))
		check.Code(t, v.modify(map[string]string{"readIOPS": "max", "writeBandwidth": "1Mi"}), codes.InvalidArgument, option)
		if have := kubepods.Limits(device); have != "rbps=max wbps=max riops=100 wiops=max" {
			t.Errorf("%s: the device has %q", option, have)
		}
		have, err := d.Store.Get(t.Context(), id(t, v.ID))
		check.OK(t, err)
		if have.Mutable["readIOPS"] != "100" || have.Mutable["writeBandwidth"] != "" {
			t.Errorf("%s: the record has %v", option, have.Mutable)
		}
		check.OK(t, v.down(target))
		d.nothingLeft()
	}
}

// TestLimitsTakenOver: of a file that was changed from outside of the pods (as the kubelet changes its group), the writes through the page cache are
// not the pods' at first, on ext4. After some of them the kernel knows better.
func TestLimitsTakenOver(t *testing.T) {
	kubepods := drivertest.Pods(t, true)
	pod := kubepods.Pod("0a1b2c3d-1111-2222-3333-444455556666", "burstable")
	d := start(t, drivertest.Options{})
	r := co.Request("volume", "ext4", smallest["ext4"])
	r.MutableParameters = map[string]string{"writeBandwidth": "1Mi"}
	v := d.made(r)
	target := v.running()
	file := v.File(target)
	write := func() (took time.Duration) {
		pod.Run("dd", "if=/dev/urandom", "of="+file, "bs=1M", "count=4", "conv=notrunc", "status=none")
		began := time.Now()
		drivertest.Run(t, "sync", file)
		return time.Since(began)
	}
	const atItsRate = 2 * time.Second // and some: four would be exact
	if took := write(); took < atItsRate {
		t.Errorf("4 MiB of a pod's own file took %v", took)
	}
	check.OK(t, v.Down(t.Context(), target)) // else the kernel knows whose it is
	target = v.running()
	check.OK(t, os.Lchown(file, 0, 1234))
	for i := 1; ; i++ {
		took := write()
		t.Logf("%d: 4 MiB in %v", i, took)
		if took >= atItsRate {
			break
		}
		if i == 40 {
			t.Fatal("the file is never the pod's")
		}
	}
	check.OK(t, v.down(target))
	d.nothingLeft()
}

// TestLimitsRefused: a limit that is none, or that the node cannot keep, is refused, and nothing is made or changed.
func TestLimitsRefused(t *testing.T) {
	d := start(t, drivertest.Options{})
	r := co.Request("volume", "ext4", smallest["ext4"])
	r.MutableParameters = map[string]string{"readIOPS": "max", "writeBandwidth": "max"}
	v := d.made(r) // no limit can be had everywhere
	target := v.running()
	var refused []map[string]string
	for name, values := range map[string][]string{
		"readIOPS": {"", "0", "-1", "+5", "1.5", "many", "4294967295", "1Ei", "max ", "MAX"}, "writeBandwidth": {"", "0", "4095", "1", "50 Mi", "50mb", "99999999999999999999", "none"},
	} {
		for _, value := range values {
			refused = append(refused, map[string]string{name: value})
		}
	}
	refused = append(refused, map[string]string{"readAheadKiB": "256", "readiops": "100"})
	for _, bad := range refused {
		check.Code(t, v.modify(bad), codes.InvalidArgument)
		r := co.Request("another", "ext4", smallest["ext4"])
		r.MutableParameters = bad
		_, err := d.create(r)
		check.Code(t, err, codes.InvalidArgument)
		for name := range bad {
			if name != "readAheadKiB" && !strings.Contains(err.Error(), name) {
				t.Errorf("%v is refused without its name: %v", bad, err)
			}
		}
	}

	// No pods, then pods without the io controller, or a machine of version 1: whatever there is.
	cannot := func(why string) {
		t.Helper()
		limit := map[string]string{"writeIOPS": "100"}
		check.Code(t, v.modify(maps.Clone(limit)), codes.InvalidArgument, "writeIOPS", why)
		r := co.Request("another", "ext4", smallest["ext4"])
		r.MutableParameters = limit
		_, err := d.create(r)
		check.Code(t, err, codes.ResourceExhausted, "writeIOPS", why) // another node may have it
		have, err := d.Store.Get(t.Context(), id(t, v.ID))
		check.OK(t, err)
		if have.Mutable["writeIOPS"] != "" {
			t.Errorf("the record has %v", have.Mutable)
		}
	}
	if !drivertest.LimitsIO() {
		cannot("version 2")
	} else {
		cannot("kubepods")
		root := fmt.Sprintf("/sys/fs/cgroup/ashlar%d", os.Getpid())
		check.OK(t, os.MkdirAll(root+"/kubepods", 0o755))
		t.Cleanup(func() { check.OK(t, os.Remove(root+"/kubepods")); check.OK(t, os.Remove(root)) })
		cannot("io controller")
	}
	check.OK(t, v.down(target))
	d.nothingLeft()
}

func id(t testing.TB, text string) volume.ID {
	t.Helper()
	id, err := volume.ParseID(text)
	check.OK(t, err)
	return id
}
