package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/tests/figures"
)

// workload is one way to use a device or file.
type workload struct {
	name, rw, bs string
	depth        int
}

var workloads = []workload{
	{"4 KiB random read", "randread", "4k", 1},
	{"4 KiB random read", "randread", "4k", 32},
	{"4 KiB random write", "randwrite", "4k", 1},
	{"4 KiB random write", "randwrite", "4k", 32},
	{"1 MiB sequential read", "read", "1m", 1},
	{"1 MiB sequential read", "read", "1m", 32},
	{"1 MiB sequential write", "write", "1m", 1},
	{"1 MiB sequential write", "write", "1m", 32},
}

func (w workload) unit() string {
	if w.bs == "1m" {
		return "MiB/s"
	}
	return "kIOPS"
}

// target is what fio works on.
type target struct {
	name, path string
	volume     *volume // nil: an image without a driver
	thin       bool
}

// The targets without a filesystem come first.
const (
	imageTarget = "image file"
	rawTarget   = "raw block volume"
	raws        = 2
)

// fio compares published volumes with an image file in the pool's directory.
func (b *bench) fio(ctx context.Context) error {
	if _, err := exec.LookPath("fio"); err != nil {
		fmt.Printf("\n## fio\n\nLeft out: fio is not installed (hack/install-tools.sh bench).\n")
		return nil
	}
	d, err := b.start(ctx, filepath.Join(b.dir, "fio"), "?reservePercent=0")
	if err != nil {
		return err
	}
	defer d.stop()
	fmt.Printf("\n## fio\n\nDirect I/O by libaio, on %d MiB that were written before; %s each, %d rounds in which all take their turn. Of each the\n"+
		"median (min..max), and the ratio to the image file with O_DIRECT in the pool's directory, by rounds.\n", b.used()>>20, b.fioRuntime, b.fioRounds)
	for _, thin := range []bool{false, true} {
		if err := b.writtenBefore(ctx, d, thin); err != nil {
			return err
		}
	}
	return co.InTurn(func() error { return b.firstWrite(ctx, d, false) }, func() error { return b.firstWrite(ctx, d, true) })
}

// writtenBefore measures everything on volumes of a kind and images that were written before.
func (b *bench) writtenBefore(ctx context.Context, d *driver, thin bool) error {
	targets, err := b.targets(ctx, d, thin, "")
	if err != nil {
		return d.failed(err)
	}
	if !thin {
		fmt.Printf("\nThe volume's device: %s.\n", queueOf(targets[1].path))
	}
	for _, t := range targets {
		progress("fio: writing to the %s", t.name)
		if _, err := b.run(ctx, t, workload{rw: "write", bs: "1m", depth: 8}, false); err != nil {
			return err
		}
	}
	results := rates{}
	for round := range b.fioRounds {
		progress("fio: %s, round %d of %d", kindOf(thin), round+1, b.fioRounds)
		for _, w := range workloads {
			if err := b.runAll(ctx, targets, w, round, true, results); err != nil {
				return err
			}
		}
	}
	if err := b.fioTable(kindOf(thin)+", written before", workloads, targets, results); err != nil {
		return err
	}
	return d.failed(b.dropTargets(ctx, d, targets))
}

// runAll runs a workload on all targets; in each round another one is the first.
func (b *bench) runAll(ctx context.Context, targets []target, w workload, round int, timed bool, results rates) error {
	for i := range targets {
		t := targets[(i+round)%len(targets)]
		rate, err := b.run(ctx, t, w, timed)
		if err != nil {
			return err
		}
		results.add(w.label(), t.name, rate)
	}
	return nil
}

func (w workload) label() string { return fmt.Sprintf("%s, depth %d, %s", w.name, w.depth, w.unit()) }

func kindOf(thin bool) string {
	if thin {
		return "thin"
	}
	return "thick"
}

// firstWorkloads are those of firstWrite.
var firstWorkloads = []workload{
	{"1 MiB sequential write", "write", "1m", 32},
	{"4 KiB random write", "randwrite", "4k", 32},
}

// firstWrite writes everything once, to volumes of a kind and images nobody has written to yet.
func (b *bench) firstWrite(ctx context.Context, d *driver, thin bool) error {
	results := rates{}
	for round := range min(b.fioRounds, 3) {
		progress("fio: first write, %s, round %d of %d", kindOf(thin), round+1, min(b.fioRounds, 3))
		for _, w := range firstWorkloads {
			if err := b.firstOf(ctx, d, w, thin, round, results); err != nil {
				return err
			}
		}
	}
	return b.fioTable(kindOf(thin)+", the first write", firstWorkloads, []target{{name: imageTarget}, {name: rawTarget}}, results)
}

// firstOf is a workload on volumes and an image of its own.
func (b *bench) firstOf(ctx context.Context, d *driver, w workload, thin bool, round int, results rates) error {
	targets, err := b.targets(ctx, d, thin, fmt.Sprintf("-first-%d-%s", round, w.rw))
	if err != nil {
		return d.failed(err)
	}
	// A file's own first write is the filesystem's affair.
	if err := b.runAll(ctx, targets[:raws], w, round, false, results); err != nil {
		return err
	}
	return d.failed(b.dropTargets(ctx, d, targets))
}

// rates by workload and target.
type rates map[string]map[string][]float64

func (r rates) add(workload, target string, rate float64) {
	if r[workload] == nil {
		r[workload] = map[string][]float64{}
	}
	r[workload][target] = append(r[workload][target], rate)
}

func (b *bench) fioTable(title string, workloads []workload, targets []target, results rates) error {
	fmt.Printf("\n### %s\n", strings.ToUpper(title[:1])+title[1:])
	chart := figures.Chart{Name: "fio-" + strings.ReplaceAll(strings.ReplaceAll(title, ",", ""), " ", "-"), Title: "fio, " + title, Unit: "ratio to the " + targets[0].name + ": median, and p10 to p90",
		Mark: figures.Mark{At: 1, Name: targets[0].name}}
	head := []string{"workload", targets[0].name}
	for _, t := range targets[1:] {
		head = append(head, t.name, "ratio")
		chart.Series = append(chart.Series, figures.Series{Name: t.name})
	}
	var rows [][]string
	for _, w := range workloads {
		base := results[w.label()][targets[0].name]
		row := []string{w.label(), fioSpread(base)}
		var values []figures.Value
		for _, t := range targets[1:] {
			rates := results[w.label()][t.name]
			var ratios []float64
			for i := range rates {
				ratios = append(ratios, rates[i]/base[i])
			}
			row = append(row, fioSpread(rates), fmt.Sprintf("%.2f", figures.Median(ratios)))
			values = append(values, figures.Of(ratios))
		}
		chart.Add(fmt.Sprintf("%s, depth %d", w.name, w.depth), values...)
		rows = append(rows, row)
	}
	figures.Table(head, rows)
	return b.draws.Draw(chart)
}

func fioSpread(v []float64) string {
	return fmt.Sprintf("%.1f (%.1f..%.1f)", figures.Median(v), figures.Quantile(v, 0), figures.Quantile(v, 1))
}

// used is how much of each target is used: what fits into a filesystem on a volume, too.
func (b *bench) used() int64 { return b.fioSize / 16 * 13 / (1 << 20) * (1 << 20) }

// targets makes an image and volumes of one kind: the image comes first.
func (b *bench) targets(ctx context.Context, d *driver, thin bool, suffix string) ([]target, error) {
	// Each name is used once: an ID of its own, and so no trace of the last one.
	image := filepath.Join(d.Dir, "pool", "bench"+suffix+".img")
	f, err := os.OpenFile(image, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if thin {
		err = f.Truncate(b.fioSize)
	} else {
		err = unix.Fallocate(int(f.Fd()), 0, 0, b.fioSize)
	}
	if err = errors.Join(err, f.Sync()); err != nil {
		return nil, err
	}
	targets := []target{{imageTarget, image, nil, thin}}
	for _, block := range []bool{true, false} {
		v := d.newVolume(fmt.Sprintf("fio-%s-%v%s", kindOf(thin), block, suffix), b.fioSize, thin, block)
		if err := v.up(ctx, &recorder{}); err != nil {
			return nil, err
		}
		if block {
			targets = append(targets, target{rawTarget, v.target, v, thin})
		} else {
			targets = append(targets, target{"file in an ext4 volume", filepath.Join(v.target, "file"), v, thin})
		}
	}
	return targets, nil
}

func (b *bench) dropTargets(ctx context.Context, d *driver, targets []target) error {
	for _, t := range targets {
		var err error
		if t.volume == nil {
			err = os.Remove(t.path)
		} else {
			err = t.volume.down(ctx, &recorder{})
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// run runs fio and returns MiB/s, or thousands of operations per second. timed: for a
// while; otherwise over everything once.
func (b *bench) run(ctx context.Context, t target, w workload, timed bool) (float64, error) {
	args := []string{"--name=bench", "--thread", "--filename=" + t.path, "--ioengine=libaio", "--direct=1", "--rw=" + w.rw, "--bs=" + w.bs,
		"--iodepth=" + strconv.Itoa(w.depth), "--size=" + strconv.FormatInt(b.used(), 10), "--output-format=json", "--randrepeat=0", "--fallocate=none"}
	if timed {
		args = append(args, "--time_based", fmt.Sprintf("--runtime=%dms", b.fioRuntime.Milliseconds()))
	}
	cmd := exec.CommandContext(ctx, "fio", args...)
	cmd.Dir = b.dir
	// One process, with --thread: nothing is left of it when it is killed.
	cmd.SysProcAttr = &unix.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGKILL) }
	cmd.WaitDelay = 5 * time.Second
	var problems strings.Builder
	cmd.Stderr = &problems
	out, err := cmd.Output()
	if err != nil {
		return 0, fmt.Errorf("fio %s: %w: %s", strings.Join(args, " "), err, problems.String())
	}
	var result struct {
		Jobs []struct {
			Error       int
			Read, Write struct {
				IOPS float64
				BW   float64 `json:"bw_bytes"`
			}
		}
	}
	// Notes may come before the report.
	if err := json.Unmarshal(out[max(0, strings.IndexByte(string(out), '{')):], &result); err != nil {
		return 0, fmt.Errorf("fio's report: %w", err)
	}
	if len(result.Jobs) != 1 || result.Jobs[0].Error != 0 {
		return 0, fmt.Errorf("fio %s failed: %s", strings.Join(args, " "), out)
	}
	job := result.Jobs[0]
	if w.bs == "1m" {
		return (job.Read.BW + job.Write.BW) / (1 << 20), nil
	}
	return (job.Read.IOPS + job.Write.IOPS) / 1000, nil
}

// queueOf describes the loop device that is bound at a path.
func queueOf(path string) string {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return err.Error()
	}
	sys := fmt.Sprintf("/sys/dev/block/%d:%d/", unix.Major(st.Rdev), unix.Minor(st.Rdev))
	return fmt.Sprintf("direct I/O %s, logical block %s, scheduler %s, nr_requests %s, read-ahead %s KiB",
		read(sys+"loop/dio"), read(sys+"queue/logical_block_size"), read(sys+"queue/scheduler"), read(sys+"queue/nr_requests"), read(sys+"queue/read_ahead_kb"))
}
