package elsewhere

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// BenchmarkElsewhere: a GiB without holes, copied from one node to another, and beside it the same bytes by a bare copy over TCP, without TLS and
// checksums, synced in the end. Both in MiB/s, and in seconds of processor time for both sides together.
func BenchmarkElsewhere(b *testing.B) {
	const gib = 1 << 30
	w := newTwo(b)
	v, err := w.store.Create(w.ctx, volume.Spec{Name: "source", Provisioning: blockdev.Thin, Nodes: []string{w.source.name}, Size: volume.Range{Required: gib}})
	check.OK(b, err)
	check.OK(b, drivertest.Content{Seed: "all", Size: gib}.Write(w.source.image("volumes", v.ID.Key)))
	snapshot, err := w.store.CreateSnapshot(w.ctx, "snapshot", v.ID)
	check.OK(b, err)
	measured := func(b *testing.B, cpu func() time.Duration, once func(n int)) {
		before, n := cpu(), 0
		for b.Loop() {
			once(n)
			n++
		}
		b.ReportMetric(float64(n)*1024/b.Elapsed().Seconds(), "MiB/s")
		b.ReportMetric((cpu()-before).Seconds()/float64(n), "cpu-s/GiB")
	}
	b.Run("copy", func(b *testing.B) {
		measured(b, func() time.Duration { return w.source.cpu(b) + w.target.cpu(b) }, func(n int) {
			spec := volume.Spec{Name: fmt.Sprint("copy ", n), Provisioning: blockdev.Thin, Source: snapshot.ID, Copies: volume.CopiesAnywhere, Nodes: []string{w.target.name}, Size: volume.Range{Required: gib}}
			copied, err := w.store.Create(w.ctx, spec)
			check.OK(b, err)
			b.StopTimer()
			check.OK(b, w.store.Delete(w.ctx, copied.ID))
			b.StartTimer()
		})
	})
	b.Run("bare", func(b *testing.B) {
		measured(b, func() time.Duration {
			var used unix.Rusage
			check.OK(b, unix.Getrusage(unix.RUSAGE_SELF, &used))
			return time.Duration(used.Utime.Nano() + used.Stime.Nano())
		}, func(int) {
			check.OK(b, bare(w.source.image("snapshots", snapshot.ID.Key), filepath.Join(filepath.Dir(w.target.pool), "bare")))
		})
	})
	check.OK(b, errors.Join(w.store.DeleteSnapshot(w.ctx, snapshot.ID), w.store.Delete(w.ctx, v.ID)))
}

// cpu is how much processor time an agent has had.
func (n *node) cpu(b *testing.B) time.Duration {
	b.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", n.Pid()))
	check.OK(b, err)
	var user, system int64 // in hundredths of a second: proc(5), fields 14 and 15
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	_, err = fmt.Sscan(fields[11]+" "+fields[12], &user, &system)
	check.OK(b, err)
	return time.Duration(user+system) * 10 * time.Millisecond
}

// bare copies a file over TCP to another one, which it removes.
func bare(from, to string) error {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	defer listener.Close()
	sent := make(chan error, 1)
	go func() { sent <- send(from, listener) }()
	conn, err := net.Dial("tcp", listener.Addr().String())
	if err != nil {
		return err
	}
	defer conn.Close()
	f, err := os.Create(to)
	if err != nil {
		return err
	}
	_, err = io.CopyBuffer(struct{ io.Writer }{f}, struct{ io.Reader }{conn}, make([]byte, 1<<20))
	return errors.Join(err, f.Sync(), f.Close(), os.Remove(to), <-sent)
}

func send(from string, listener net.Listener) error {
	f, err := os.Open(from)
	if err != nil {
		return err
	}
	defer f.Close()
	conn, err := listener.Accept()
	if err != nil {
		return err
	}
	_, err = io.CopyBuffer(struct{ io.Writer }{conn}, struct{ io.Reader }{f}, make([]byte, 1<<20))
	return errors.Join(err, conn.Close())
}
