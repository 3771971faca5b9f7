package anynode

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"k8s.io/client-go/rest"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
)

// large is the size of what is measured.
const large = 256 * mib

// written is a raw volume of that size, without holes.
func (c *nodes) written(name string) *volume {
	c.Helper()
	v := c.create(name, co.Block, func(r *csi.CreateVolumeRequest) { r.CapacityRange.RequiredBytes = large })
	v.use(home, func(target string) { fill(c, target) })
	return v
}

func fill(t testing.TB, path string) {
	t.Helper()
	drivertest.Run(t, "dd", "if=/dev/urandom", "of="+path, "bs=1M", fmt.Sprint("count=", large/mib), "oflag=direct", "conv=fsync,notrunc", "status=none")
}

// BenchmarkIO: fio on a volume at its home, on one of another node over the network, and on a loop device that the kernel's target exports over that
// network without any of us: no driver, device mapper or authentication; and on another of that kind, which tells what a ratio is of what is the same. They take
// turns; each iteration is a round of two seconds each.
func BenchmarkIO(b *testing.B) {
	c := newNodes(b)
	local, remote := c.written("local"), c.written("remote")
	used := map[*volume]string{local: home, remote: consumers[0]}
	for v, node := range used {
		c.again("claim it", func(ctx context.Context) error { return v.claim(ctx, node) })
		c.again("stage it", func(ctx context.Context) error { return v.up(ctx, node) })
	}
	bare, other := c.bare(home, 4321), c.bare(home, 4322)
	for _, w := range []struct{ name, rw, bs, depth string }{
		{"randread-4k-1", "randread", "4k", "1"}, {"randread-4k-32", "randread", "4k", "32"},
		{"randwrite-4k-1", "randwrite", "4k", "1"}, {"randwrite-4k-32", "randwrite", "4k", "32"},
		{"read-1m-8", "read", "1m", "8"}, {"write-1m-8", "write", "1m", "8"},
	} {
		b.Run(w.name, func(b *testing.B) {
			names, paths := []string{"home", "bare", "other", "remote"}, []string{local.target(home), bare, other, remote.target(consumers[0])}
			rates := make([][]float64, len(paths))
			var ratios, noise []float64
			for n := 0; b.Loop(); n++ {
				for i := range paths {
					i = (i + n) % len(paths) // another one is the first each time
					rates[i] = append(rates[i], fio(b, paths[i], w.rw, w.bs, w.depth).rate)
				}
				ratios = append(ratios, rates[3][n]/rates[1][n])
				noise = append(noise, rates[2][n]/rates[1][n])
			}
			for i, name := range names {
				b.ReportMetric(median(rates[i]), name+"-MiB/s")
			}
			b.ReportMetric(median(ratios), "remote/bare")
			b.ReportMetric(median(noise), "other/bare")
			b.ReportMetric(0, "ns/op")
		})
	}
	for v, node := range used {
		v.leave(node)
		c.again("delete it", v.of.Delete)
	}
}

// bare is an export by the kernel's target alone, of a loop device in the namespace of a node.
type bare struct {
	*nodes
	nqn, address string
	port         int
}

// exportBare makes one, over a file without holes, as a volume's is. Each has a port of its own.
func (c *nodes) exportBare(node string, port int) bare {
	c.Helper()
	e := bare{c, fmt.Sprint("nqn.2026-11.com.example:bare-", port), addresses[node], port}
	loop := c.disk(fmt.Sprint("bare-", port), large)
	const target = "/sys/kernel/config/nvmet"
	drivertest.Run(c, in(node, "sh", "-ec", `
		cd "$0"; mkdir subsystems/$1; echo 1 >subsystems/$1/attr_allow_any_host
		mkdir subsystems/$1/namespaces/1; echo $2 >subsystems/$1/namespaces/1/device_path; echo 1 >subsystems/$1/namespaces/1/enable
		mkdir ports/$4; cd ports/$4; echo tcp >addr_trtype; echo ipv4 >addr_adrfam; echo $3 >addr_traddr; echo $4 >addr_trsvcid
		ln -s "$0/subsystems/$1" subsystems/$1`, target, e.nqn, loop, e.address, fmt.Sprint(port))...)
	c.Cleanup(func() {
		drivertest.Run(c, "sh", "-ec", `cd "$0"; rm ports/$2/subsystems/$1; rmdir ports/$2; echo 0 >subsystems/$1/namespaces/1/enable; rmdir subsystems/$1/namespaces/1 subsystems/$1`,
			target, e.nqn, fmt.Sprint(port))
	})
	return e
}

// disk is a loop device over a file without holes, as that of a volume is.
func (c *nodes) disk(name string, size int64) (path string) {
	c.Helper()
	image := filepath.Join(c.dir, name)
	drivertest.Run(c, "fallocate", "-l", fmt.Sprint(size), image)
	path = drivertest.Loop(c, image, "--direct-io=on")
	c.Cleanup(func() { drivertest.Run(c, "losetup", "-d", path) })
	fill(c, path)
	return path
}

// connect connects the first consumer, and waits for the device.
func (e bare) connect() (path string, disconnect func()) {
	e.Helper()
	f, err := os.OpenFile("/dev/nvme-fabrics", os.O_RDWR, 0)
	check.OK(e, err)
	defer f.Close()
	_, err = fmt.Fprintf(f, "transport=tcp,traddr=%s,trsvcid=%d,nqn=%s", e.address, e.port, e.nqn)
	check.OK(e, err)
	answer := make([]byte, 100)
	n, err := f.Read(answer)
	check.OK(e, err)
	var instance int
	_, err = fmt.Sscanf(string(answer[:n]), "instance=%d", &instance)
	check.OK(e, err)
	for end := time.Now().Add(patient); path == ""; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			e.Fatal("never: the bare device is there")
		}
		found, _ := filepath.Glob("/sys/class/nvme-subsystem/*/nvme*n1")
		for _, at := range found {
			text, _ := os.ReadFile(filepath.Join(filepath.Dir(at), "subsysnqn"))
			device := "/dev/" + filepath.Base(at)
			if _, err := os.Stat(device); err == nil && strings.TrimSpace(string(text)) == e.nqn {
				path = device
			}
		}
	}
	return path, func() {
		check.OK(e, os.WriteFile(fmt.Sprintf("/sys/class/nvme/nvme%d/delete_controller", instance), []byte("1"), 0o200))
	}
}

// bare is a device of the first consumer over an export of a node, until the end of the test.
func (c *nodes) bare(node string, port int) (path string) {
	c.Helper()
	path, disconnect := c.exportBare(node, port).connect()
	c.Cleanup(disconnect)
	return path
}

// measured is what fio tells of one run.
type measured struct {
	rate         float64 // MiB in a second
	p99, longest float64 // milliseconds of a write
}

// fio reads or writes for two seconds.
func fio(t testing.TB, path, rw, bs, depth string) measured {
	t.Helper()
	m, err := startFio(t.Context(), path, rw, bs, depth, 2*time.Second)()
	check.OK(t, err)
	return m
}

// startFio begins to read or write. What it returns waits until the time is over, or until the context has ended, which is no error.
func startFio(ctx context.Context, path, rw, bs, depth string, long time.Duration, more ...string) (wait func() (measured, error)) {
	cmd := exec.CommandContext(ctx, "fio", append([]string{"--name=bench", "--thread", "--filename=" + path, "--ioengine=libaio", "--direct=1", "--rw=" + rw, "--bs=" + bs, "--iodepth=" + depth,
		fmt.Sprint("--size=", large), "--output-format=json", "--randrepeat=0", "--time_based", fmt.Sprint("--runtime=", long.Milliseconds(), "ms")}, more...)...)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) } // it says what it has measured
	cmd.WaitDelay = time.Minute
	var out bytes.Buffer
	cmd.Stdout = &out
	err := cmd.Start()
	return func() (measured, error) {
		if err != nil {
			return measured{}, err
		}
		ended := cmd.Wait()
		type direction struct {
			BW   float64 `json:"bw_bytes"`
			Clat struct {
				Max        float64
				Percentile map[string]float64
			} `json:"clat_ns"`
		}
		var report struct {
			Jobs []struct {
				Error       int
				Read, Write direction
			}
		}
		_, text, _ := strings.Cut(out.String(), "{")
		if err := json.Unmarshal([]byte("{"+text), &report); err != nil || len(report.Jobs) != 1 || report.Jobs[0].Error != 0 {
			return measured{}, fmt.Errorf("fio on %s: %w, %w: %s", path, ended, err, out.String())
		}
		job := report.Jobs[0]
		return measured{(job.Read.BW + job.Write.BW) / mib, job.Write.Clat.Percentile["99.000000"] / 1e6, job.Write.Clat.Max / 1e6}, nil
	}
}

func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	return v[len(v)/2]
}

// BenchmarkAttach: from the claim to the target of a raw volume, and back, at home and on another node; how much of that is to stage it; and the writes that the API
// server had for it. Beside it the kernel's own connection to a bare export.
func BenchmarkAttach(b *testing.B) {
	c := newNodes(b)
	v := c.create("v", co.Block)
	for _, node := range []string{home, consumers[0]} {
		b.Run(map[bool]string{true: "home", false: "remote"}[node == home], func(b *testing.B) {
			var up, staged, down time.Duration
			before, there := writes(b), v.at(node)
			for b.Loop() {
				began := time.Now()
				check.OK(b, v.claim(b.Context(), node))
				claimed := time.Now()
				check.OK(b, there.Stage(b.Context()))
				staged += time.Since(claimed)
				check.OK(b, there.Publish(b.Context(), there.Target("pod"), false))
				up += time.Since(began)
				began = time.Now()
				check.OK(b, v.down(b.Context(), node))
				c.again("release it", func(ctx context.Context) error { return v.release(ctx, node) })
				down += time.Since(began)
			}
			each(b, up, "attach-ms")
			each(b, staged, "stage-ms")
			each(b, down, "detach-ms")
			b.ReportMetric((writes(b)-before)/float64(b.N), "API-writes")
			b.ReportMetric(0, "ns/op")
		})
	}
	e := c.exportBare(home, 4321)
	b.Run("bare", func(b *testing.B) {
		for b.Loop() {
			_, disconnect := e.connect()
			b.StopTimer()
			disconnect()
			b.StartTimer()
		}
		each(b, b.Elapsed(), "connect-ms")
		b.ReportMetric(0, "ns/op")
	})
	c.again("delete it", v.of.Delete)
}

// stepTimes are how long steps took, one after the other, over all rounds.
type stepTimes struct {
	last time.Time
	took map[string]time.Duration
}

func (s *stepTimes) begin() { s.last = time.Now() }

// did ends a step, and begins the next one.
func (s *stepTimes) did(name string) {
	if s.took == nil {
		s.took = map[string]time.Duration{}
	}
	s.took[name] += time.Since(s.last)
	s.begin()
}

func (s *stepTimes) report(b *testing.B) {
	for name, took := range s.took {
		each(b, took, name+"-ms")
	}
}

func each(b *testing.B, all time.Duration, unit string) {
	b.ReportMetric(float64(all.Microseconds())/1000/float64(b.N), unit)
}

// requests are those that the API server counts itself.
var requests = regexp.MustCompile(`(?m)^apiserver_request_total\{.*resource="(volumes|replicatedvolumes|snapshots|pools)".*verb="(APPLY|PATCH|POST|PUT|DELETE)".*\} (\S+)$`)

// writes is how many there were to objects of ours.
func writes(t testing.TB) (sum float64) {
	t.Helper()
	config := apitest.Get(t).Config(apitest.Admin)
	client, err := rest.HTTPClientFor(config)
	check.OK(t, err)
	response, err := client.Get(config.Host + "/metrics")
	check.OK(t, err)
	text, err := io.ReadAll(response.Body)
	check.OK(t, errors.Join(err, response.Body.Close()))
	for _, match := range requests.FindAllStringSubmatch(string(text), -1) {
		n, err := strconv.ParseFloat(match[3], 64)
		check.OK(t, err)
		sum += n
	}
	return sum
}

// BenchmarkMove: a volume that nobody uses, without holes, from one node to another and back, from the request until the object names the new node, and a small one with
// next to nothing to copy; and beside it the same bytes by a bare copy over the same network, synced in the end.
func BenchmarkMove(b *testing.B) {
	c := newNodes(b)
	v, small := c.written("v"), c.create("small", co.Block)
	b.Run("move", func(b *testing.B) {
		before := writes(b)
		v.moves(b)
		b.ReportMetric(float64(b.N)*large/mib/b.Elapsed().Seconds(), "MiB/s")
		b.ReportMetric((writes(b)-before)/float64(b.N), "API-writes")
		v.returns()
	})
	b.Run("small", func(b *testing.B) {
		small.moves(b)
		small.returns()
	})
	b.Run("bare", func(b *testing.B) {
		images, err := filepath.Glob(filepath.Join(c.dir, "pool-of-"+home, "volumes", v.key()+".img"))
		check.OK(b, err)
		for b.Loop() {
			check.OK(b, c.bareCopy(images[0], filepath.Join(c.dir, "copy")))
		}
		b.ReportMetric(float64(b.N)*large/mib/b.Elapsed().Seconds(), "MiB/s")
	})
	for _, v := range []*volume{v, small} {
		c.again("delete it", v.of.Delete)
	}
}

// moves moves a volume from its home to the second consumer and back, in turn. What comes after the object names the new node is not measured.
func (v *volume) moves(b *testing.B) {
	at, to := home, consumers[1]
	for b.Loop() {
		v.move(to)
		v.eventually("it has moved", func() bool { return v.object().Spec.NodeName == to })
		b.StopTimer()
		v.moved(at, to)
		at, to = to, at
		b.StartTimer()
	}
}

// returns has a volume be at its home.
func (v *volume) returns() {
	if at := v.object().Spec.NodeName; at != home {
		v.move(home)
		v.moved(at, home)
	}
}

// BenchmarkMoveInUse: a raw volume without holes moves, and back, while a third node writes to it, 4 KiB at random, one at a time; and what a write takes
// meanwhile, beside what it takes before. And the same with a mirror of the device mapper over two bare exports.
func BenchmarkMoveInUse(b *testing.B) {
	c := newNodes(b)
	b.Run("move", c.movesInUse)
	b.Run("bare", c.mirrorsBare)
}

// inUse is what a writer has while something moves, and alone.
type inUse struct{ alone, meanwhile [3][]float64 }

func (i *inUse) add(to *[3][]float64, m measured) {
	for n, value := range []float64{m.rate * mib / 4096, m.p99, m.longest} {
		to[n] = append(to[n], value)
	}
}

// round measures a writer to a path alone, and while do does what takes the time that is returned.
func (i *inUse) round(b *testing.B, path string, do func()) time.Duration {
	i.add(&i.alone, fio(b, path, "randwrite", "4k", "1"))
	writing, end := context.WithCancel(b.Context())
	idle := writesTo(b, path)
	wait := startFio(writing, path, "randwrite", "4k", "1", 10*time.Minute)
	for end := time.Now().Add(patient); writesTo(b, path) < idle+100; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			b.Fatalf("never: %s is written to", path)
		}
	}
	began := time.Now()
	do()
	took := time.Since(began)
	end()
	m, err := wait()
	check.OK(b, err)
	i.add(&i.meanwhile, m)
	return took
}

// writesTo is how many writes a device has had.
func writesTo(t testing.TB, path string) (n int) {
	t.Helper()
	text, err := os.ReadFile("/sys/dev/block/" + numberOf(t, path) + "/stat")
	check.OK(t, err)
	_, err = fmt.Sscan(strings.Fields(string(text))[4], &n)
	check.OK(t, err)
	return n
}

// numberOf is the number of a device, as the device mapper takes it.
func numberOf(t testing.TB, path string) string {
	t.Helper()
	var st unix.Stat_t
	check.OK(t, unix.Stat(path, &st))
	return dm.Number(st.Rdev)
}

func (i *inUse) report(b *testing.B, moving time.Duration) {
	b.ReportMetric(float64(b.N)*large/mib/moving.Seconds(), "MiB/s")
	for n, unit := range []string{"writes/s", "p99-ms", "longest-ms"} {
		b.ReportMetric(median(i.alone[n]), "alone-"+unit)
		b.ReportMetric(median(i.meanwhile[n]), "moving-"+unit)
	}
	b.ReportMetric(0, "ns/op")
}

// mirrorsBare has the kernel copy from one bare export to another, as it does for a volume that moves, and with none of us.
func (c *nodes) mirrorsBare(b *testing.B) {
	from, to := c.bare(home, 4321), c.bare(newHome, 4322)
	const name, region = "bare-mirror", 512 << 10
	c.Cleanup(func() { _, err := dm.Remove(name); check.OK(c, err) })
	numbers := []string{numberOf(b, from), numberOf(b, to)}
	check.OK(b, dm.Make(name, "", []dm.Line{{Length: large, Kind: "linear", Text: numbers[0] + " 0"}}))
	d, err := dm.Find(name)
	check.OK(b, err)
	var all inUse
	var moving time.Duration
	const copies = 10 // of which one is over before there is much to say of a writer
	for b.Loop() {
		moving += all.round(b, d.Path(), func() {
			for range copies {
				check.OK(b, dm.Replace(name, []dm.Line{{Length: large, Kind: "mirror", Text: fmt.Sprintf("core 1 %d 2 %s 0 %s 0 1 handle_errors", region/512, numbers[0], numbers[1])}}))
				for whole := fmt.Sprintf(" %d/%d ", large/region, large/region); ; time.Sleep(10 * time.Millisecond) {
					status, err := dm.Status(name)
					check.OK(b, err)
					if strings.Contains(status[0].Text, whole) {
						break
					}
				}
				slices.Reverse(numbers)
				check.OK(b, dm.Replace(name, []dm.Line{{Length: large, Kind: "linear", Text: numbers[0] + " 0"}}))
			}
		}) / copies
	}
	all.report(b, moving)
}

func (c *nodes) movesInUse(b *testing.B) {
	v := c.written("v")
	c.again("claim it", func(ctx context.Context) error { return v.claim(ctx, third) })
	c.again("stage it", func(ctx context.Context) error { return v.up(ctx, third) })
	var all inUse
	var moving time.Duration
	var apiWrites float64
	at, to := home, newHome
	for b.Loop() {
		before := 0.0
		moving += all.round(b, v.target(third), func() {
			before = writes(b)
			v.move(to)
			v.eventually("it has moved", func() bool { return v.object().Spec.NodeName == to })
		})
		v.moved(at, to)
		apiWrites += writes(b) - before
		at, to = to, at
	}
	all.report(b, moving)
	b.ReportMetric(apiWrites/float64(b.N), "API-writes")
	v.leave(third)
	c.again("delete it", v.of.Delete)
}

// bareCopy copies a file of the second consumer's disk to one of the first's, over their link. The page cache has nothing of it before.
func (c *nodes) bareCopy(from, to string) error {
	listener, err := listenOn(consumers[1], addresses[consumers[1]]+":0")
	if err != nil {
		return err
	}
	defer listener.Close()
	sent := make(chan error, 1)
	go func() {
		f, err := os.Open(from)
		if err != nil {
			sent <- err
			return
		}
		defer f.Close()
		err = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED) // it is read from the disk, as what moves is
		if err != nil {
			sent <- err
			return
		}
		conn, err := listener.Accept()
		if err == nil {
			_, err = io.CopyBuffer(struct{ io.Writer }{conn}, struct{ io.Reader }{f}, make([]byte, mib))
			err = errors.Join(err, conn.Close())
		}
		sent <- err
	}()
	conn, err := net.Dial("tcp", listener.Addr().String())
	if err != nil {
		return err
	}
	defer conn.Close()
	f, err := os.Create(to)
	if err != nil {
		return err
	}
	_, err = io.CopyBuffer(struct{ io.Writer }{f}, struct{ io.Reader }{conn}, make([]byte, mib))
	return errors.Join(err, f.Sync(), f.Close(), os.Remove(to), <-sent)
}

// BenchmarkFailover: the node that writes to a volume dies, with its kernel's way to the home; from when Kubernetes gives the volume up for it (as after the
// taint out-of-service) to the first acknowledged write of the next node.
func BenchmarkFailover(b *testing.B) {
	c := newNodes(b)
	v := c.create("v", co.Block)
	first, second := consumers[0], consumers[1]
	var steps stepTimes
	for b.Loop() {
		b.StopTimer()
		c.again("claim it", func(ctx context.Context) error { return v.claim(ctx, first) })
		c.again("stage it", func(ctx context.Context) error { return v.up(ctx, first) })
		w, err := write(v.target(first), newTag())
		check.OK(b, err)
		c.eventually("it is written to", func() bool { return w.acked.Load() > 100 })
		c.links(first, false)
		start := killed(c, c.agents[first])
		b.StartTimer()
		steps.begin()
		c.again("release it", func(ctx context.Context) error { return v.release(ctx, first) })
		steps.did("release")
		c.again("claim it for the next", func(ctx context.Context) error { return v.claim(ctx, second) })
		steps.did("claim")
		c.again("stage it on the next", func(ctx context.Context) error { return v.up(ctx, second) })
		steps.did("stage")
		f, err := os.OpenFile(v.target(second), os.O_WRONLY|unix.O_DIRECT|unix.O_SYNC, 0)
		check.OK(b, err)
		_, err = f.Write(aligned())
		check.OK(b, errors.Join(err, f.Close()))
		steps.did("write")
		b.StopTimer()
		c.links(first, true)
		start()
		<-w.done
		c.again("take it down", func(ctx context.Context) error { return v.down(ctx, first) })
		v.leave(second)
		b.StartTimer()
	}
	each(b, b.Elapsed(), "failover-ms")
	steps.report(b)
	c.again("delete it", v.of.Delete)
}
