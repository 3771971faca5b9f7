package disks

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lazy"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/metrics/metricstest"
)

// founded is a pool on block devices of these numbers.
type founded struct {
	blockdev.Pool
	numbers []uint64
}

func (f founded) Foundations(context.Context) ([]uint64, error) { return f.numbers, nil }

// stand is a monitor of pools, with a program in place of smartctl. For each disk that prints a file, ends with the exit status in it, and notes the call.
// Disk N has device number N.
type stand struct {
	*Monitor
	t   *testing.T
	dir string
	seq atomic.Int64 // of all disks
}

func newStand(t *testing.T) *stand {
	t.Helper()
	dir := t.TempDir()
	program := filepath.Join(dir, "smartctl")
	script := fmt.Sprintf(`#!/bin/sh
for disk; do :; done
disk=${disk#/dev/}
echo "$disk $*" >> %[1]s/calls
[ ! -e %[1]s/hang.$disk ] || { touch %[1]s/hangs.$disk; exec sleep 600; }
cat %[1]s/$disk 2>/dev/null || exit 2
exit $(sed -n 's/.*"exit_status": \([0-9]*\).*/\1/p' %[1]s/$disk | head -1)
`, dir)
	check.OK(t, os.WriteFile(program, []byte(script), 0o700))
	m := New(t.Context())
	m.smartctl, m.every = program, 50*time.Millisecond
	s := &stand{Monitor: m, t: t, dir: dir}
	m.below = func(numbers ...uint64) (found []Disk) {
		for _, n := range numbers {
			found = append(found, Disk{fmt.Sprint("disk", n), n < 100, fmt.Sprint(s.seq.Load())})
		}
		return found
	}
	t.Cleanup(m.Close)
	return s
}

// says makes a disk say what is in a file of testdata.
func (s *stand) says(disk, file string) {
	s.t.Helper()
	text, err := os.ReadFile("testdata/" + file + ".json")
	check.OK(s.t, err)
	next := filepath.Join(s.dir, "next")
	check.OK(s.t, os.WriteFile(next, text, 0o600))
	check.OK(s.t, os.Rename(next, filepath.Join(s.dir, disk)))
}

func (s *stand) calls() []string {
	text, err := os.ReadFile(filepath.Join(s.dir, "calls"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		s.t.Fatal(err)
	}
	return strings.Split(strings.TrimSpace(string(text)), "\n")
}

func (s *stand) pool(name string, numbers ...uint64) *Pool {
	s.t.Helper()
	pool, err := lazy.Open(s.t.Context(), name, func(context.Context) (blockdev.Pool, error) {
		return founded{memory.NewDisk(1<<30).Open(name, nil), numbers}, nil
	})
	check.OK(s.t, err)
	s.t.Cleanup(func() { check.OK(s.t, pool.Close()) })
	return s.Watch(pool)
}

// said returns the health of a pool in one line.
func said(t *testing.T, p *Pool) string {
	var all []string
	for _, problem := range p.PoolHealth(t.Context()) {
		all = append(all, problem.Severity.String()+" "+problem.Reason+": "+problem.Message)
	}
	return strings.Join(all, "\n")
}

func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !is(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

// TestPoolHealth: what disks say is in the health of the pools above them, and of no others. It goes when the disks are well.
func TestPoolHealth(t *testing.T) {
	s := newStand(t)
	for disk, file := range map[string]string{"disk1": "ata-well", "disk2": "nvme-well", "disk3": "usb", "disk100": "ata-failed"} {
		s.says(disk, file)
	}
	one, both, virtual := s.pool("one", 1), s.pool("both", 1, 2, 3), s.pool("virtual", 100)
	s.Start()
	eventually(t, "all are asked", func() bool { return strings.Count(strings.Join(s.calls(), " "), "disk3 ") > 1 })
	for _, p := range []*Pool{one, both, virtual} {
		if is := said(t, p); is != "" {
			t.Errorf("pool %s: %s", p.Name(), is)
		}
	}
	for _, c := range []struct{ disk, file, one, both string }{
		{"disk1", "ata-failed", "Degraded DiskFailing: pool one: disk disk1 (ST4000NM0035-1V4107, ZC10AAAA) says that it fails: attribute 5", "Degraded DiskFailing: pool both: disk disk1"},
		{"disk1", "ata-pending", "Degraded DiskErrors: pool one: disk disk1 (ST4000NM0035-1V4107, ZC10AAAA) has 16 sectors that cannot be read:", "16 sectors that cannot be read"},
		{"disk1", "standby", "16 sectors that cannot be read", "16 sectors that cannot be read"}, // what it said last stays
		{"disk1", "ata-well", "", ""},
		{"disk2", "nvme-worn", "", "Degraded DiskWearing: pool both: disk disk2 (SAMSUNG MZVL2512HCJQ-00B00, S675NX00000000) has used 104 % of its life"},
		{"disk2", "nvme-warning", "", "disk2 (SAMSUNG MZVL2512HCJQ-00B00, S675NX00000000) says that it fails: it runs out of spare blocks, it is not reliable any more"},
		{"disk2", "nvme-warning", "", "31 more errors that it could not correct, 31 in all"},
		{"disk2", "sas", "", ""}, // another disk in its place: its first counts are not new errors
		{"disk2", "sas-failed", "", "its overall assessment is FAILED"},
		{"disk2", "nvme-heat", "", "Degraded DiskHeat: pool both: disk disk2 (QEMU NVMe Ctrl, ASHLAR01) says that it is too hot or too cold: see to its fans"},
		{"disk2", "nvme-well", "", ""},
	} {
		s.says(c.disk, c.file)
		before := len(s.calls())
		eventually(t, "it was asked", func() bool { return len(s.calls()) > before+6 })
		for p, want := range map[*Pool]string{one: c.one, both: c.both, virtual: ""} {
			if is := said(t, p); (want == "") != (is == "") || !strings.Contains(is, want) {
				t.Errorf("%s is %s: pool %s says %q, want %q", c.disk, c.file, p.Name(), is, want)
			}
		}
	}
	for _, call := range s.calls() {
		if strings.HasPrefix(call, "disk100") || !strings.Contains(call, "--nocheck=standby,0") {
			t.Errorf("asked %s", call)
		}
	}
}

// TestReplaced: a disk with the name of one that was taken out has none of its reports, also if it says nothing itself.
func TestReplaced(t *testing.T) {
	s := newStand(t)
	s.says("disk1", "ata-failed")
	p := s.pool("p", 1)
	s.Start()
	eventually(t, "it was asked", func() bool { return strings.HasPrefix(said(t, p), "Degraded DiskFailing") })
	s.says("disk1", "usb")
	s.seq.Add(1)
	eventually(t, "what the other one said is gone", func() bool { return said(t, p) == "" && len(s.Samples("n")()) == 0 })
}

// TestHealthOfBoth: the pool's own problems come first. A pool that is gone keeps those of its disks.
func TestHealthOfBoth(t *testing.T) {
	s := newStand(t)
	s.says("disk1", "ata-failed")
	disk := memory.NewDisk(1 << 30)
	pool, err := lazy.Open(t.Context(), "p", func(context.Context) (blockdev.Pool, error) { return founded{disk.Open("p", nil), []uint64{1}}, nil })
	check.OK(t, err)
	defer func() { check.OK(t, pool.Close()) }()
	p := s.Watch(pool)
	s.Start()
	eventually(t, "it was asked", func() bool { return strings.HasPrefix(said(t, p), "Degraded DiskFailing") })
	disk.Ail(blockdev.Ref{}, blockdev.Problem{Severity: blockdev.Inaccessible, Reason: "PoolReadOnly", Message: "m"})
	if is := said(t, p); !strings.HasPrefix(is, "Inaccessible PoolReadOnly: m\nDegraded DiskFailing") {
		t.Errorf("%s", is)
	}
	if blockdev.Unwrap(p) == nil || p.Granularity() != blockdev.Granularity {
		t.Error("it is no pool any more")
	}
}

// TestHangingDisk: a disk that does not answer holds up nobody, is not asked a second time, and is given up by Close.
func TestHangingDisk(t *testing.T) {
	s := newStand(t)
	s.says("disk1", "ata-failed")
	s.says("disk2", "nvme-worn")
	check.OK(t, os.WriteFile(filepath.Join(s.dir, "hang.disk1"), nil, 0o600))
	p, other := s.pool("p", 1, 2), s.pool("other", 1)
	s.Start()
	eventually(t, "the other one is heard", func() bool { return strings.HasPrefix(said(t, p), "Degraded DiskWearing") })
	eventually(t, "the other one is asked again", func() bool { return strings.Count(strings.Join(s.calls(), " "), "disk2 ") > 5 })
	if n := strings.Count(strings.Join(s.calls(), "\n"), "disk1 "); n != 1 {
		t.Errorf("asked %d times", n)
	}
	if is := said(t, other); is != "" {
		t.Errorf("%s", is)
	}
	began := time.Now()
	s.Close()
	if time.Since(began) > 30*time.Second {
		t.Errorf("it took %s to end", time.Since(began))
	}
	if n := len(s.calls()); n > 0 {
		time.Sleep(200 * time.Millisecond)
		if len(s.calls()) > n {
			t.Error("it asks after its end")
		}
	}
}

// TestWithoutSmartctl: without smartctl, or with one that fails, there is no problem.
func TestWithoutSmartctl(t *testing.T) {
	for what, spoil := range map[string]func(s *stand){
		"not there":   func(s *stand) { s.smartctl = filepath.Join(s.dir, "none") },
		"no JSON":     func(s *stand) { check.OK(t, os.WriteFile(filepath.Join(s.dir, "disk1"), []byte("usage"), 0o600)) },
		"cannot open": func(s *stand) { check.OK(t, os.Remove(filepath.Join(s.dir, "disk1"))) },
	} {
		s := newStand(t)
		s.says("disk1", "ata-failed")
		spoil(s)
		p := s.pool("p", 1)
		s.Start()
		eventually(t, "it was tried", func() bool {
			s.mu.Lock()
			defer s.mu.Unlock()
			return s.disks["disk1"] != nil && !s.disks["disk1"].ended.IsZero()
		})
		if is := said(t, p); is != "" {
			t.Errorf("%s: %s", what, is)
		}
		if samples := s.Samples("n")(); len(samples) > 0 {
			t.Errorf("%s: %v", what, samples)
		}
	}
}

// TestSamples: the metrics of the disks.
func TestSamples(t *testing.T) {
	s := newStand(t)
	s.says("disk1", "ata-failed")
	s.says("disk2", "nvme-worn")
	s.pool("p", 1, 2)
	s.Start()
	labels := func(disk string) string { return fmt.Sprintf(`device=%q,node="n",pool="p"`, disk) }
	want := map[string]float64{
		"ashlar_disk_healthy{" + labels("disk1") + "}": 0, "ashlar_disk_healthy{" + labels("disk2") + "}": 1, "ashlar_disk_wear_ratio{" + labels("disk2") + "}": 1.04,
	}
	for kind, n := range map[string]float64{Reallocated: 3904, Pending: 0, Uncorrectable: 0} {
		want[fmt.Sprintf(`ashlar_disk_errors{device="disk1",kind=%q,node="n",pool="p"}`, kind)] = n
	}
	eventually(t, "both are measured", func() bool {
		have := metricstest.Of(t, s.Samples("n")).Values
		_, one := have["ashlar_disk_healthy{"+labels("disk1")+"}"]
		_, both := have["ashlar_disk_healthy{"+labels("disk2")+"}"]
		return one && both
	})
	have := metricstest.Of(t, s.Samples("n")).Values
	for series, value := range want {
		if is, there := have[series]; !there || is != value {
			t.Errorf("%s is %v, %v; want %v", series, is, there, value)
		}
	}
	if _, there := have["ashlar_disk_wear_ratio{"+labels("disk1")+"}"]; there {
		t.Error("the wear of a disk that says nothing of that")
	}
}
