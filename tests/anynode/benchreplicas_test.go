package anynode

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/era"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/mirror"
)

var awayFor = flag.Duration("replicas.away", 20*time.Second, "how long BenchmarkReplicasBack has a replica be away")

// pattern is what fio does.
type pattern struct {
	name, rw, bs, depth string
	more                []string
}

var patterns = []pattern{
	{"randread-4k-1", "randread", "4k", "1", nil}, {"randread-4k-32", "randread", "4k", "32", nil},
	{"randwrite-4k-1", "randwrite", "4k", "1", nil}, {"randwrite-4k-32", "randwrite", "4k", "32", nil},
	{"read-1m-8", "read", "1m", "8", nil}, {"write-1m-8", "write", "1m", "8", nil},
	{"synced-4k-1", "randwrite", "4k", "1", []string{"--fsync=1"}},
}

// measuredAt is a device that is measured beside others.
type measuredAt struct{ name, path string }

// sideBySide: the devices take turns; each iteration is a round of a second and a half each. Told are medians: blocks of 4 KiB in a second, or MiB in a second and the processor time that this machine
// took for a GiB; and of some pairs, how the first one's rate is to the second's.
func sideBySide(b *testing.B, devices []measuredAt, pairs ...[2]string) {
	for _, p := range patterns {
		b.Run(p.name, func(b *testing.B) {
			rates, cpu := map[string][]float64{}, map[string][]float64{}
			for n := 0; b.Loop(); n++ {
				for i := range devices {
					d := devices[(i+n)%len(devices)] // another one is the first each time
					before := busy(b)
					m, err := startFio(b.Context(), d.path, p.rw, p.bs, p.depth, 1500*time.Millisecond, p.more...)()
					check.OK(b, err)
					rates[d.name] = append(rates[d.name], m.rate)
					cpu[d.name] = append(cpu[d.name], (busy(b)-before).Seconds()/(m.rate*1.5/1024))
				}
			}
			for _, d := range devices {
				if p.bs == "4k" {
					b.ReportMetric(median(rates[d.name])*mib/4096, d.name+"/s")
					continue
				}
				b.ReportMetric(median(rates[d.name]), d.name+"-MiB/s")
				b.ReportMetric(median(cpu[d.name]), d.name+"-CPU-s/GiB")
			}
			for _, pair := range pairs {
				var ratios []float64
				for n := range rates[pair[0]] {
					ratios = append(ratios, rates[pair[0]][n]/rates[pair[1]][n])
				}
				b.ReportMetric(median(ratios), pair[0]+":"+pair[1])
			}
			b.ReportMetric(0, "ns/op")
		})
	}
}

// busy is how long the processors of this machine had something to do, since it started.
func busy(t testing.TB) time.Duration {
	t.Helper()
	text, err := os.ReadFile("/proc/stat")
	check.OK(t, err)
	var user, nice, system, idle, wait, irq, soft int64
	_, err = fmt.Sscanf(string(text), "cpu %d %d %d %d %d %d %d", &user, &nice, &system, &idle, &wait, &irq, &soft)
	check.OK(t, err)
	return time.Duration(user+nice+system+irq+soft) * 10 * time.Millisecond
}

// used is a raw volume with a leg on each of some nodes, which another one, or one of them, uses, until the end of the test. It has no holes.
func (c *nodes) used(name, user string, on ...string) *mirrored {
	c.Helper()
	m := c.mirrorOf(large, name, co.Block, on...)
	m.claims(user)
	m.again("stage it on "+user, func(ctx context.Context) error { return m.up(ctx, user) })
	fill(c, m.target(user))
	m.current(m.legs...)
	return m
}

// BenchmarkReplicasIO: fio on volumes with one, two and three replicas, used by a node that has one of them (near) and by one that has none (far), beside DRBD's, and the disk that is below all of them.
func BenchmarkReplicasIO(b *testing.B) {
	c := newNodes(b)
	first, second := consumers[0], consumers[1]
	near1, far1 := c.written("near-1"), c.written("far-1")
	for v, node := range map[*volume]string{near1: home, far1: first} {
		c.again("claim it", func(ctx context.Context) error { return v.claim(ctx, node) })
		c.again("stage it", func(ctx context.Context) error { return v.up(ctx, node) })
	}
	near2, near3, far2 := c.used("near-2", home, home, first), c.used("near-3", home, home, first, second), c.used("far-2", first, home, second)
	near, far := c.drbd(0, true), c.drbd(2, false)
	sideBySide(b, []measuredAt{
		{"disk", c.disk("disk", large)},
		{"near-1", near1.target(home)}, {"near-2", near2.target(home)}, {"near-3", near3.target(home)}, {"drbd", near.path()},
		{"far-1", far1.target(first)}, {"far-2", far2.target(first)}, {"drbd-diskless", far.path()},
	}, [2]string{"near-2", "drbd"}, [2]string{"far-1", "drbd-diskless"}, [2]string{"near-1", "disk"})
	for _, v := range []*mirrored{near2, near3, far2} { // else it was not all of them who were written to
		if have := v.object().Current(); len(have) != len(v.legs) {
			b.Errorf("of the legs %v these are current: %v", v.legs, have)
		}
	}
	for v, node := range map[*mirrored]string{near2: home, near3: home, far2: first} {
		v.leave(node)
		v.deleteBeside()
	}
	for v, node := range map[*volume]string{near1: home, far1: first} {
		v.leave(node)
		c.again("delete it", v.of.Delete)
	}
}

// BenchmarkReplicasLayers: what each layer of a volume with replicas costs by itself, and DRBD. No driver runs.
func BenchmarkReplicasLayers(b *testing.B) {
	drivertest.NeedNVMe(b)
	c := &nodes{TB: b, dir: drivertest.Dir(b), network: newNetwork(b, "")}
	drivertest.Run(b, "sh", "-c", "mountpoint -q /sys/kernel/config || mount -t configfs none /sys/kernel/config") // a driver does, where one runs
	disk, marks, remote := c.disk("disk", large), c.disk("marks", large), c.bare(home, 4321)
	made := func(name string, err error) string {
		check.OK(b, err)
		b.Cleanup(func() { _, err := dm.Remove(name); check.OK(b, err) })
		d, err := dm.Find(name)
		check.OK(b, err)
		return d.Path()
	}
	drivertest.Run(b, "dd", "if=/dev/zero", "of="+marks, "bs=1M", "count=1", "conv=notrunc,fsync")
	marked := made("layer-era", era.Make("layer-era", "", large, era.Block(large), device(b, marks), device(b, disk)))
	sideBySide(b, []measuredAt{
		{"disk", disk}, {"nvme", remote},
		{"linear", made("layer-linear", dm.Make("layer-linear", "", dm.Linear(device(b, disk), large)))},
		{"era", marked},
		{"mirror", made("layer-mirror", mirror.Make(b.Context(), "layer-mirror", "", large, device(b, disk), device(b, remote)))},
		{"era-mirror", made("layer-both", mirror.Make(b.Context(), "layer-both", "", large, device(b, marked), device(b, remote)))},
		{"drbd", c.drbd(0, true).path()},
	}, [2]string{"linear", "disk"}, [2]string{"era", "disk"}, [2]string{"mirror", "nvme"}, [2]string{"era-mirror", "mirror"}, [2]string{"mirror", "drbd"})
}

// device is the number of a device.
func device(t testing.TB, path string) uint64 {
	t.Helper()
	var st unix.Stat_t
	check.OK(t, unix.Stat(path, &st))
	return st.Rdev
}

// pair is a volume of DRBD (8.4, protocol C, the defaults of all settings) between two disks: with minors and resources of two numbers. DRBD takes the first network namespace only,
// so both ends of its connection are there, on the loopback device, with packets as large as those of the links that the nodes have; it is one hop, as they are.
type pair struct {
	*nodes
	minor int
}

// drbd makes a pair, whose first end, which is used, has a disk itself or not.
func (c *nodes) drbd(minor int, disk bool) *pair {
	c.Helper()
	p := &pair{c, minor}
	if os.Getenv("ASHLAR_DRBD") == "" {
		c.Fatal("ASHLAR_DRBD is not set: make bench-replicas runs this")
	}
	check.OK(c, os.MkdirAll("/run/lock", 0o755)) // drbdmeta has locks there
	check.OK(c, os.WriteFile("/sys/module/drbd/parameters/usermode_helper", []byte("disabled"), 0))
	drivertest.Run(c, "ip", "link", "set", "lo", "mtu", "1500")
	c.Cleanup(func() { drivertest.Run(c, "ip", "link", "set", "lo", "mtu", "65536") })
	for i := range 2 {
		drivertest.Run(c, "ip", "addr", "replace", p.address(i)+"/32", "dev", "lo")
		p.setup("new-resource", p.resource(i))
		p.setup("new-minor", p.resource(i), strconv.Itoa(minor+i), "0")
		if i == 0 && !disk {
			continue
		}
		loop, number := c.disk(fmt.Sprint("drbd-", minor+i), large+4*mib), strconv.Itoa(minor+i)
		drivertest.Run(c, filepath.Join(os.Getenv("ASHLAR_DRBD"), "drbdmeta"), "--force", number, "v08", loop, "internal", "create-md")
		p.setup("attach", number, loop, loop, "internal")
	}
	c.Cleanup(func() { // the first end, which is used, first
		for i := range 2 {
			p.setup("down", p.resource(i))
		}
	})
	if disk {
		p.connect()
		p.becomes("connected", "cs:Connected")
		p.setup("new-current-uuid", strconv.Itoa(minor), "--clear-bitmap=yes") // nothing is read that was not written before
	} else {
		p.setup("primary", strconv.Itoa(minor+1), "--force=yes")
		p.setup("secondary", strconv.Itoa(minor+1))
		p.connect()
	}
	p.becomes("whole", "UpToDate", "cs:Connected")
	p.setup("primary", strconv.Itoa(minor))
	fill(c, p.path())
	return p
}

func (p *pair) path() string            { return fmt.Sprint("/dev/drbd", p.minor) }
func (p *pair) resource(end int) string { return fmt.Sprint("r", p.minor+end) }
func (p *pair) address(end int) string  { return fmt.Sprint("10.79.0.", 1+p.minor+end) }

func (p *pair) setup(argv ...string) {
	p.Helper()
	drivertest.Run(p, append([]string{filepath.Join(os.Getenv("ASHLAR_DRBD"), "drbdsetup-84")}, argv...)...)
}

func (p *pair) connect() {
	p.Helper()
	for i := range 2 {
		port := func(end int) string { return fmt.Sprint(p.address(end), ":", 7789+end) }
		p.setup("connect", p.resource(i), port(i), port(1-i), "--protocol=C")
	}
}

// cut has the two ends not reach each other, or again.
func (p *pair) cut(is bool) {
	p.Helper()
	drivertest.Run(p, "ip", "addr", map[bool]string{true: "del", false: "add"}[is], p.address(1)+"/32", "dev", "lo")
}

// becomes waits until the kernel says something of the first end; long, as it copies slowly by its defaults.
func (p *pair) becomes(what string, says ...string) {
	p.Helper()
	p.within(10*time.Minute, "DRBD's volume is "+what, func() bool {
		text, err := os.ReadFile("/proc/drbd")
		check.OK(p, err)
		for line := range strings.Lines(string(text)) {
			if number, rest, found := strings.Cut(strings.TrimSpace(line), ": "); found && number == strconv.Itoa(p.minor) {
				for _, say := range says {
					if !strings.Contains(rest, say) {
						return false
					}
				}
				return true
			}
		}
		return false
	})
}

// BenchmarkReplicasBack: a replica is cut off for a while under a writer (4 KiB at random, one at a time): the longest that a write took, and from when it is reached again until it is current, with the writer going on;
// and how often the API server was written to from the cut on. Beside it DRBD that copies as fast as it can, and with the settings that it has by itself, by which it copies little as long as anything else is done.
func BenchmarkReplicasBack(b *testing.B) {
	c := newNodes(b)
	user := consumers[0]
	m := c.used("v", user, user, home)
	b.Run("replicas", func(b *testing.B) {
		before := writes(b)
		comesBack(b, m.target(user), func() { c.link(user, false); m.current(m.leg(user)) }, func() { c.link(user, true) }, func() { m.current(m.legs...) })
		b.ReportMetric((writes(b)-before)/float64(b.N), "API-writes")
	})
	m.ends(user)
	for _, drbd := range []struct {
		name    string
		options []string
	}{
		{"drbd-100-MiB", []string{"--c-plan-ahead=0", "--resync-rate=102400", "--c-min-rate=0"}}, // KiB in a second, no matter what else is done
		{"drbd", nil},
	} {
		b.Run(drbd.name, func(b *testing.B) {
			in := *c
			in.TB = b
			p := in.drbd(0, true)
			for minor := range 2 {
				if len(drbd.options) > 0 {
					p.setup(append([]string{"disk-options", strconv.Itoa(minor)}, drbd.options...)...)
				}
			}
			comesBack(b, p.path(), func() { p.cut(true); p.becomes("cut off", "ds:UpToDate/DUnknown") }, func() { p.cut(false) }, func() { p.becomes("whole", "ds:UpToDate/UpToDate") })
		})
	}
}

func comesBack(b *testing.B, path string, cut, heal, whole func()) {
	var noticed, back time.Duration
	var all inUse
	for b.Loop() {
		all.round(b, path, func() {
			began := time.Now()
			cut()
			noticed += time.Since(began)
			time.Sleep(*awayFor)
			began = time.Now()
			heal()
			whole()
			back += time.Since(began)
		})
	}
	each(b, noticed, "noticed-ms")
	each(b, back, "back-ms")
	b.ReportMetric(median(all.alone[0]), "alone-writes/s")
	b.ReportMetric(median(all.meanwhile[0]), "meanwhile-writes/s")
	b.ReportMetric(median(all.meanwhile[2]), "longest-ms")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkReplicasFailover: the node that writes to a volume, and has one of its two replicas, dies with its kernel's ways to all others; from when Kubernetes gives the volume up for it (as after the taint
// out-of-service) to the first acknowledged write of a node without one, and how often the API server was written to for it.
func BenchmarkReplicasFailover(b *testing.B) {
	c := newNodes(b)
	first, second := consumers[0], consumers[1]
	m := c.mirrorOf(large, "v", co.Block, first, home)
	var apiWrites float64
	var steps stepTimes
	for b.Loop() {
		b.StopTimer()
		m.claims(first)
		m.again("stage it", func(ctx context.Context) error { return m.up(ctx, first) })
		m.current(m.legs...)
		w, err := write(m.target(first), newTag())
		check.OK(b, err)
		m.goesOn(w)
		c.reach(first, false)
		c.links(first, false)
		start := killed(c, c.agents[first])
		before := writes(b)
		b.StartTimer()
		steps.begin()
		m.releases(first)
		steps.did("release")
		m.claims(second)
		steps.did("claim")
		m.again("stage it on the next", func(ctx context.Context) error { return m.up(ctx, second) })
		steps.did("stage")
		f, err := os.OpenFile(m.target(second), os.O_WRONLY|unix.O_DIRECT|unix.O_SYNC, 0)
		check.OK(b, err)
		_, err = f.Write(aligned())
		check.OK(b, err)
		steps.did("write")
		b.StopTimer()
		check.OK(b, f.Close())
		apiWrites += writes(b) - before
		c.links(first, true)
		c.reach(first, true)
		start()
		m.again("take it down on the first", func(ctx context.Context) error { return m.down(ctx, first) })
		<-w.done
		m.current(m.legs...)
		m.again("take it down", func(ctx context.Context) error { return m.down(ctx, second) })
		m.releases(second)
		b.StartTimer()
	}
	each(b, b.Elapsed(), "failover-ms")
	steps.report(b)
	b.ReportMetric(apiWrites/float64(b.N), "API-writes")
	b.ReportMetric(0, "ns/op")
	m.delete()
}

// BenchmarkReplicasRest: what volumes with two replicas take that nobody writes to, of the memory and processor of the driver that uses them (which has one replica of each), and of the kernel's memory: small ones,
// and large ones of which nothing is written; each beside the first one. Once, whatever -benchtime says, as what a process has once got it keeps.
func BenchmarkReplicasRest(b *testing.B) {
	const number = 6
	for _, size := range []int64{16 * mib, 1024 * mib} {
		b.Run(fmt.Sprint(size/mib, "MiB"), func(b *testing.B) {
			in := newNodes(b)
			user := consumers[0]
			agent := in.agents[user].Pid()
			var all []*mirrored
			b.ResetTimer()
			for b.Loop() {
			}
			stage := func(name string) {
				m := in.mirrorOf(size, name, co.Block, user, home)
				m.claims(user)
				m.again("stage it", func(ctx context.Context) error { return m.up(ctx, user) })
				all = append(all, m)
			}
			stage("first") // what any such volume needs is there
			rss, available, cpuBefore := memory(b, fmt.Sprint("/proc/", agent, "/status"), "VmRSS:"), memory(b, "/proc/meminfo", "MemAvailable:"), idles(agent, b)
			for i := range number {
				stage(fmt.Sprint("v", i))
			}
			cpu := idles(agent, b)
			b.ReportMetric((memory(b, fmt.Sprint("/proc/", agent, "/status"), "VmRSS:")-rss)/number, "RSS-MiB/volume")
			b.ReportMetric((available-memory(b, "/proc/meminfo", "MemAvailable:"))/number, "machine-MiB/volume")
			b.ReportMetric(float64((cpu-cpuBefore).Milliseconds())/number, "CPU-ms/min/volume")
			b.ReportMetric(0, "ns/op")
			for _, m := range all {
				m.leave(user)
				m.deleteBeside()
			}
			in.gone()
		})
	}
}

// memory is a line of a file of proc, in MiB.
func memory(t testing.TB, path, line string) float64 {
	t.Helper()
	text, err := os.ReadFile(path)
	check.OK(t, err)
	_, rest, _ := strings.Cut(string(text), line)
	var kib float64
	_, err = fmt.Sscan(rest, &kib)
	check.OK(t, err)
	return kib / 1024
}

// idles is the processor time that a process takes in a minute, by ten seconds of it.
func idles(pid int, t testing.TB) time.Duration {
	t.Helper()
	used := func() time.Duration {
		text, err := os.ReadFile(fmt.Sprint("/proc/", pid, "/stat"))
		check.OK(t, err)
		_, rest, _ := strings.Cut(string(text), ") ")
		fields := strings.Fields(rest) // from the third one on
		user, err := strconv.ParseInt(fields[11], 10, 64)
		check.OK(t, err)
		system, err := strconv.ParseInt(fields[12], 10, 64)
		check.OK(t, err)
		return time.Duration(user+system) * 10 * time.Millisecond
	}
	before := used()
	time.Sleep(10 * time.Second)
	return 6 * (used() - before)
}
