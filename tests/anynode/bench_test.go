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
	drivertest.Run(t, "dd", "if=/dev/urandom", "of="+path, "bs=1M", fmt.Sprint("count=", large/mib), "conv=fsync,notrunc", "status=none")
}

// BenchmarkIO: fio on a volume at its home, on one of another node over the network, and on a loop device that the kernel's target exports over that
// network without any of us: no driver, device mapper or authentication. They take turns; each iteration is a round of two seconds each.
func BenchmarkIO(b *testing.B) {
	c := newNodes(b)
	local, remote := c.written("local"), c.written("remote")
	used := map[*volume]string{local: home, remote: consumers[0]}
	for v, node := range used {
		c.again("claim it", func(ctx context.Context) error { return v.claim(ctx, node) })
		c.again("stage it", func(ctx context.Context) error { return v.up(ctx, node) })
	}
	bare := c.bare()
	for _, w := range []struct{ name, rw, bs, depth string }{
		{"randread-4k-1", "randread", "4k", "1"}, {"randread-4k-32", "randread", "4k", "32"},
		{"randwrite-4k-1", "randwrite", "4k", "1"}, {"randwrite-4k-32", "randwrite", "4k", "32"},
		{"read-1m-8", "read", "1m", "8"}, {"write-1m-8", "write", "1m", "8"},
	} {
		b.Run(w.name, func(b *testing.B) {
			names, paths := []string{"home", "bare", "remote"}, []string{local.target(home), bare, remote.target(consumers[0])}
			rates := make([][]float64, len(paths))
			var ratios []float64
			for n := 0; b.Loop(); n++ {
				for i := range paths {
					i = (i + n) % len(paths) // another one is the first each time
					rates[i] = append(rates[i], fio(b, paths[i], w.rw, w.bs, w.depth).rate)
				}
				ratios = append(ratios, rates[2][n]/rates[1][n])
			}
			for i, name := range names {
				b.ReportMetric(median(rates[i]), name+"-MiB/s")
			}
			b.ReportMetric(median(ratios), "remote/bare")
			b.ReportMetric(0, "ns/op")
		})
	}
	for v, node := range used {
		v.leave(node)
		c.again("delete it", v.of.Delete)
	}
}

// bare is a device of the first consumer over a loop device of the home's namespace, by the kernel's target and host alone.
func (c *nodes) bare() (path string) {
	c.Helper()
	image := filepath.Join(c.dir, "bare")
	drivertest.Run(c, "fallocate", "-l", fmt.Sprint(large), image)
	loop := drivertest.Run(c, "losetup", "--find", "--show", "--direct-io=on", image)
	loop = strings.TrimSpace(loop)
	c.Cleanup(func() { drivertest.Run(c, "losetup", "-d", loop) })
	fill(c, loop)
	const nqn, target = "nqn.2026-11.com.example:bare", "/sys/kernel/config/nvmet"
	drivertest.Run(c, in(home, "sh", "-ec", `
		cd "$0"; mkdir subsystems/$1; echo 1 >subsystems/$1/attr_allow_any_host
		mkdir subsystems/$1/namespaces/1; echo $2 >subsystems/$1/namespaces/1/device_path; echo 1 >subsystems/$1/namespaces/1/enable
		mkdir ports/4321; cd ports/4321; echo tcp >addr_trtype; echo ipv4 >addr_adrfam; echo $3 >addr_traddr; echo 4321 >addr_trsvcid
		ln -s "$0/subsystems/$1" subsystems/$1`, target, nqn, loop, addresses[home])...)
	c.Cleanup(func() {
		drivertest.Run(c, "sh", "-ec", `cd "$0"; rm ports/4321/subsystems/$1; rmdir ports/4321; echo 0 >subsystems/$1/namespaces/1/enable; rmdir subsystems/$1/namespaces/1 subsystems/$1`, target, nqn)
	})
	f, err := os.OpenFile("/dev/nvme-fabrics", os.O_RDWR, 0)
	check.OK(c, err)
	defer f.Close()
	_, err = fmt.Fprintf(f, "transport=tcp,traddr=%s,trsvcid=4321,nqn=%s", addresses[home], nqn)
	check.OK(c, err)
	answer := make([]byte, 100)
	n, err := f.Read(answer)
	check.OK(c, err)
	var instance int
	_, err = fmt.Sscanf(string(answer[:n]), "instance=%d", &instance)
	check.OK(c, err)
	controller := fmt.Sprint("/sys/class/nvme/nvme", instance)
	c.Cleanup(func() { check.OK(c, os.WriteFile(controller+"/delete_controller", []byte("1"), 0o200)) })
	c.eventually("the bare device is there", func() bool {
		found, _ := filepath.Glob("/sys/class/nvme-subsystem/*/nvme*n1")
		for _, at := range found {
			text, _ := os.ReadFile(filepath.Join(filepath.Dir(at), "subsysnqn"))
			if strings.TrimSpace(string(text)) == nqn {
				path = "/dev/" + filepath.Base(at)
			}
		}
		_, err := os.Stat(path)
		return path != "" && err == nil
	})
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
func startFio(ctx context.Context, path, rw, bs, depth string, long time.Duration) (wait func() (measured, error)) {
	cmd := exec.CommandContext(ctx, "fio", "--name=bench", "--thread", "--filename="+path, "--ioengine=libaio", "--direct=1", "--rw="+rw, "--bs="+bs, "--iodepth="+depth,
		fmt.Sprint("--size=", large), "--output-format=json", "--randrepeat=0", "--time_based", fmt.Sprint("--runtime=", long.Milliseconds(), "ms"))
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

// BenchmarkAttach: from the claim to the target of a raw volume, and back, at home and on another node; with the writes that the API server had for it.
func BenchmarkAttach(b *testing.B) {
	c := newNodes(b)
	v := c.create("v", co.Block)
	for _, node := range []string{home, consumers[0]} {
		b.Run(map[bool]string{true: "home", false: "remote"}[node == home], func(b *testing.B) {
			var up, down time.Duration
			before := writes(b)
			for b.Loop() {
				began := time.Now()
				check.OK(b, co.InTurn(func() error { return v.claim(b.Context(), node) }, func() error { return v.up(b.Context(), node) }))
				up += time.Since(began)
				began = time.Now()
				check.OK(b, v.down(b.Context(), node))
				c.again("release it", func(ctx context.Context) error { return v.release(ctx, node) })
				down += time.Since(began)
			}
			each(b, up, "attach-ms")
			each(b, down, "detach-ms")
			b.ReportMetric((writes(b)-before)/float64(b.N), "API-writes")
			b.ReportMetric(0, "ns/op")
		})
	}
	c.again("delete it", v.of.Delete)
}

func each(b *testing.B, all time.Duration, unit string) {
	b.ReportMetric(float64(all.Microseconds())/1000/float64(b.N), unit)
}

// requests are those that the API server counts itself.
var requests = regexp.MustCompile(`(?m)^apiserver_request_total\{.*resource="(volumes|snapshots|pools)".*verb="(APPLY|PATCH|POST|PUT|DELETE)".*\} (\S+)$`)

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

// BenchmarkMove: a volume that nobody uses, without holes, from one node to another and back, from the wish until the object names the new node; and
// beside it the same bytes by a bare copy over the same network, synced in the end.
func BenchmarkMove(b *testing.B) {
	c := newNodes(b)
	v := c.written("v")
	b.Run("move", func(b *testing.B) {
		at, to := home, consumers[1]
		before := writes(b)
		for b.Loop() {
			v.move(to)
			v.eventually("it has moved", func() bool { return v.object().Spec.NodeName == to })
			b.StopTimer()
			v.moved(at, to)
			at, to = to, at
			b.StartTimer()
		}
		b.ReportMetric(float64(b.N)*large/mib/b.Elapsed().Seconds(), "MiB/s")
		b.ReportMetric((writes(b)-before)/float64(b.N), "API-writes")
		if at != home {
			v.move(home)
			v.moved(at, home)
		}
	})
	b.Run("bare", func(b *testing.B) {
		images, err := filepath.Glob(filepath.Join(c.dir, "pool-of-"+home, "volumes", v.key()+".img"))
		check.OK(b, err)
		for b.Loop() {
			check.OK(b, c.bareCopy(images[0], filepath.Join(c.dir, "copy")))
		}
		b.ReportMetric(float64(b.N)*large/mib/b.Elapsed().Seconds(), "MiB/s")
	})
	c.again("delete it", v.of.Delete)
}

// BenchmarkMoveInUse: a raw volume without holes moves, and back, while a third node writes to it, 4 KiB at random, one at a time; and what a write takes
// meanwhile, beside what it takes before.
func BenchmarkMoveInUse(b *testing.B) {
	c := newNodes(b)
	v := c.written("v")
	c.again("claim it", func(ctx context.Context) error { return v.claim(ctx, third) })
	c.again("stage it", func(ctx context.Context) error { return v.up(ctx, third) })
	var moving time.Duration
	var apiWrites float64
	var alone, meanwhile [3][]float64
	add := func(to *[3][]float64, m measured) {
		for i, value := range []float64{m.rate * mib / 4096, m.p99, m.longest} {
			to[i] = append(to[i], value)
		}
	}
	at, to := home, newHome
	for b.Loop() {
		add(&alone, fio(b, v.target(third), "randwrite", "4k", "1"))
		writing, end := context.WithCancel(b.Context())
		wait := startFio(writing, v.target(third), "randwrite", "4k", "1", 10*time.Minute)
		before, began := writes(b), time.Now()
		v.move(to)
		v.eventually("it has moved", func() bool { return v.object().Spec.NodeName == to })
		moving += time.Since(began)
		end()
		m, err := wait()
		check.OK(b, err)
		add(&meanwhile, m)
		v.moved(at, to)
		apiWrites += writes(b) - before
		at, to = to, at
	}
	b.ReportMetric(float64(b.N)*large/mib/moving.Seconds(), "MiB/s")
	for i, unit := range []string{"writes/s", "p99-ms", "longest-ms"} {
		b.ReportMetric(median(alone[i]), "alone-"+unit)
		b.ReportMetric(median(meanwhile[i]), "moving-"+unit)
	}
	b.ReportMetric(apiWrites/float64(b.N), "API-writes")
	b.ReportMetric(0, "ns/op")
	v.leave(third)
	c.again("delete it", v.of.Delete)
}

// bareCopy copies a file of the second consumer's disk to one of the first's, over their link.
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
		c.again("release it", func(ctx context.Context) error { return v.release(ctx, first) })
		c.again("claim it for the next", func(ctx context.Context) error { return v.claim(ctx, second) })
		c.again("stage it on the next", func(ctx context.Context) error { return v.up(ctx, second) })
		f, err := os.OpenFile(v.target(second), os.O_WRONLY|unix.O_DIRECT|unix.O_SYNC, 0)
		check.OK(b, err)
		_, err = f.Write(aligned())
		check.OK(b, errors.Join(err, f.Close()))
		b.StopTimer()
		c.links(first, true)
		start()
		<-w.done
		c.again("take it down", func(ctx context.Context) error { return v.down(ctx, first) })
		v.leave(second)
		b.StartTimer()
	}
	each(b, b.Elapsed(), "failover-ms")
	c.again("delete it", v.of.Delete)
}
