package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/ashlar-csi/ashlar/tests/figures"
)

const lifeSize = 64 << 20

// The calls of a life, in their order.
var lifeCalls = []string{"CreateVolume", "ControllerPublishVolume", "NodeStageVolume", "NodePublishVolume",
	"NodeUnpublishVolume", "NodeUnstageVolume", "ControllerUnpublishVolume", "DeleteVolume"}

// life compares whole lives of a volume by the driver with lives by bare system calls.
func (b *bench) life(ctx context.Context) error {
	d, err := b.start(ctx, filepath.Join(b.dir, "life"), "?reservePercent=0")
	if err != nil {
		return err
	}
	defer d.stop()
	bare, err := newFloor(filepath.Join(d.Dir, "floor"), lifeSize, false)
	if err != nil {
		return err
	}
	if err := b.sameFilesystem(ctx, d, bare); err != nil {
		return err
	}
	recording, err := bare.recording()
	if err != nil {
		return err
	}
	defer recording.directory.Close()
	fmt.Printf("\n## A whole life\n\nAn ext4 volume of 64 MiB, thick: create, claim, stage, publish, and back, over gRPC; the floor is the same by bare\n"+
		"system calls and mkfs, which keep no records, or write and sync those without which the driver could not keep its word. %d rounds of a\n"+
		"block of lives each, in turn; a ratio is that of a round's two blocks. Median (p10..p90).\n", b.rounds)
	var rows [][]string
	chart := figures.Chart{Name: "life", Title: "Whole lives of an ext4 volume of 64 MiB", Unit: "lives per second: median, and p10 to p90",
		Series: []figures.Series{{Name: "driver"}, {Name: "bare system calls and mkfs"}}}
	recorders := map[int][2]*recorder{}
	for _, atOnce := range []int{1, 4} {
		progress("life: %d at once", atOnce)
		calls, steps := &recorder{}, &recorder{}
		recorders[atOnce] = [2]*recorder{calls, steps}
		rates, err := b.inTurn(atOnce, b.lived(ctx, d, atOnce, calls), bare.lived(ctx, b, atOnce, steps), recording.lived(ctx, b, atOnce, &recorder{}))
		if err != nil {
			return err
		}
		rows = append(rows, []string{fmt.Sprint(atOnce), fmt.Sprint(b.rounds * b.lives * atOnce), spreadOf("%.1f", rates[0]), spreadOf("%.1f", rates[1]), spreadOf("%.2f", ratios(rates[0], rates[1])),
			spreadOf("%.1f", rates[2]), spreadOf("%.2f", ratios(rates[0], rates[2]))})
		chart.Add(fmt.Sprintf("%d at once", atOnce), figures.Of(rates[0]), figures.Of(rates[1]))
	}
	figures.Table([]string{"at once", "lives", "driver, lives/s", "floor, lives/s", "driver / floor (goal: 0.7)", "floor with records, lives/s", "driver / floor with records"}, rows)
	if err := b.draws.Draw(chart); err != nil {
		return err
	}
	return b.whereTheTimeGoes(ctx, d, recorders[1][0], recorders[1][1])
}

// inTurn runs blocks of lives in turn, and returns how many lives each had in a second, by rounds.
func (b *bench) inTurn(atOnce int, blocks ...func() error) (rates [][]float64, err error) {
	rates = make([][]float64, len(blocks))
	for round := range b.rounds {
		for i := range blocks {
			which := (round + i) % len(blocks) // each goes first as often as the others
			start := time.Now()
			if err := blocks[which](); err != nil {
				return nil, err
			}
			rates[which] = append(rates[which], float64(b.lives*atOnce)/time.Since(start).Seconds())
		}
	}
	return rates, nil
}

// ratios are those of each round.
func ratios(of, to []float64) []float64 {
	r := make([]float64, len(of))
	for i := range of {
		r[i] = of[i] / to[i]
	}
	return r
}

// lived is a block of whole lives by a driver.
func (b *bench) lived(ctx context.Context, d *driver, atOnce int, calls *recorder) func() error {
	return func() error {
		return d.failed(block(ctx, b.lives, atOnce, func(w int) error {
			return d.newVolume(fmt.Sprintf("worker-%d", w), lifeSize, false, false).life(ctx, calls)
		}))
	}
}

// lived is one by bare system calls.
func (f *floor) lived(ctx context.Context, b *bench, atOnce int, steps *recorder) func() error {
	return func() error {
		return block(ctx, b.lives, atOnce, func(w int) error { return b.floorLife(ctx, f, w, steps) })
	}
}

// whereTheTimeGoes compares the calls of lives with the floor's steps.
func (b *bench) whereTheTimeGoes(ctx context.Context, d *driver, calls, steps *recorder) error {
	empty := &recorder{}
	for range 200 {
		if err := empty.time("empty", call(ctx, d.GetPluginInfo, &csi.GetPluginInfoRequest{})); err != nil {
			return err
		}
	}
	mkfs := figures.Median(steps.samples[stepMkfs])
	fmt.Printf("\nWhere the time goes, one at a time, in ms; a call that does nothing (GetPluginInfo) takes %s. mkfs.ext4 is %.0f%% of\na life of the driver and %.0f%% of one of the floor.\n",
		spread(empty.samples["empty"]), 100*ratio(mkfs, total(calls)), 100*ratio(mkfs, total(steps)))
	var rows [][]string
	chart := figures.Chart{Name: "life-calls", Title: "Where the time of a life goes, one at a time", Unit: "ms: median, and p10 to p90 (of bare system calls the sum of medians)", Log: true,
		Series: []figures.Series{{Name: "driver"}, {Name: "bare system calls and mkfs"}}}
	for _, call := range lifeCalls {
		var names []string
		var least time.Duration
		for _, step := range floorOf[call] {
			names = append(names, step+" "+ms(figures.Median(steps.samples[step])))
			least += figures.Median(steps.samples[step])
		}
		rows = append(rows, []string{call, spread(calls.samples[call]), ms(least), ms(figures.Median(calls.samples[call]) - least), strings.Join(names, "; ")})
		sum := float64(least) / 1e6
		chart.Add(call, figures.Milliseconds(calls.samples[call]), figures.Value{Median: sum, Low: sum, High: sum})
	}
	rows = append(rows, []string{"**sum of the medians**", ms(total(calls)), ms(total(steps)), ms(total(calls) - total(steps)), ""})
	figures.Table([]string{"call", "driver", "floor", "more", "floor's steps"}, rows)
	return b.draws.Draw(chart)
}

// total is the sum of the medians.
func total(r *recorder) (t time.Duration) {
	for _, samples := range r.samples {
		t += figures.Median(samples)
	}
	return t
}

var lives atomic.Int64

// block runs n lives, each of some workers.
func block(ctx context.Context, n, atOnce int, life func(worker int) error) error {
	var workers sync.WaitGroup
	failures := make([]error, atOnce)
	for w := range atOnce {
		workers.Go(func() {
			for range n {
				if failures[w] = errors.Join(ctx.Err(), failures[w]); failures[w] == nil {
					failures[w] = life(w)
				}
			}
		})
	}
	workers.Wait()
	return errors.Join(failures...)
}

func (b *bench) floorLife(ctx context.Context, f *floor, worker int, r *recorder) error {
	staged := filepath.Join(f.dir, fmt.Sprintf("staged-%d", worker))
	if err := os.MkdirAll(staged, 0o750); err != nil {
		return err
	}
	return f.life(ctx, fmt.Sprintf("life-%d", lives.Add(1)), staged, filepath.Join(f.dir, fmt.Sprintf("published-%d", worker)), r, nil)
}

// sameFilesystem makes sure that driver and floor make the same filesystem, and that
// a life of either works, and warms both up.
func (b *bench) sameFilesystem(ctx context.Context, d *driver, f *floor) error {
	v := d.newVolume("same", lifeSize, false, false)
	if err := v.up(ctx, &recorder{}); err != nil {
		return d.failed(err)
	}
	images, err := filepath.Glob(d.Dir + "/pool/volumes/*.img")
	if err != nil || len(images) != 1 {
		return fmt.Errorf("one image was expected in the pool: %v %w", images, err)
	}
	byDriver, err := shape(images[0])
	if err != nil {
		return err
	}
	if err := v.down(ctx, &recorder{}); err != nil {
		return d.failed(err)
	}
	var byFloor string
	if err := f.life(ctx, "same", v.Staging, v.target, &recorder{}, func(image string) (err error) {
		byFloor, err = shape(image)
		return err
	}); err != nil {
		return err
	}
	if byDriver != byFloor {
		return fmt.Errorf("the floor's mkfs has other arguments than the driver's: driver: %s; floor: %s", byDriver, byFloor)
	}
	return nil
}
