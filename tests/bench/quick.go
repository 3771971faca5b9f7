package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/ashlar-csi/ashlar/internal/process"
	"github.com/ashlar-csi/ashlar/tests/figures"
)

// How much of each is measured in two minutes, of which most goes by while two drivers are built.
const (
	quickRounds = 12
	quickLives  = 4
	quickStarts = 10
)

// quick compares the driver of this tree with that of a commit, and both with bare system calls, in turn: whole lives, how long a start takes, and the memory of a driver that
// has nothing to do.
func (b *bench) quick(ctx context.Context) (err error) {
	b.rounds, b.lives = quickRounds, quickLives
	commit := b.before
	if commit == "" {
		if commit, err = commitBefore(ctx); err != nil {
			return err
		}
	}
	old, err := b.driverOf(ctx, commit)
	if err != nil {
		return err
	}
	names := []string{"this tree", commit}
	var drivers [2]*driver
	var started [2][]time.Duration
	var rss [2][]float64 // MiB
	for i, binary := range []string{b.binary, old} {
		side := *b
		side.binary = binary
		for range quickStarts {
			if drivers[i] != nil {
				drivers[i].stop()
			}
			began := time.Now()
			if drivers[i], err = side.start(ctx, filepath.Join(b.dir, fmt.Sprint("driver-", i)), "?reservePercent=0"); err != nil {
				return fmt.Errorf("the driver of %s: %w", names[i], err)
			}
			defer drivers[i].stop()
			started[i] = append(started[i], time.Since(began))
			rss[i] = append(rss[i], float64(drivers[i].usage().rss)/1024)
		}
	}
	bare, err := newFloor(filepath.Join(drivers[0].Dir, "floor"), lifeSize, false)
	if err != nil {
		return err
	}
	if err := b.sameFilesystem(ctx, drivers[0], bare); err != nil {
		return err
	}
	head := []string{"", names[0], names[1], "this / that", "bare system calls", "this / bare"}
	var rows [][]string
	for _, atOnce := range []int{1, 4} {
		progress("quick: %d at once", atOnce)
		rates, err := b.inTurn(atOnce, b.lived(ctx, drivers[0], atOnce, &recorder{}), b.lived(ctx, drivers[1], atOnce, &recorder{}), bare.lived(ctx, b, atOnce, &recorder{}))
		if err != nil {
			return err
		}
		rows = append(rows, []string{fmt.Sprintf("lives/s, %d at once", atOnce), spreadOf("%.1f", rates[0]), spreadOf("%.1f", rates[1]), spreadOf("%.2f", ratios(rates[0], rates[1])),
			spreadOf("%.1f", rates[2]), spreadOf("%.2f", ratios(rates[0], rates[2]))})
	}
	rows = append(rows,
		[]string{"a start, until it is ready, ms", spread(started[0]), spread(started[1]), fmt.Sprintf("%.2f", ratio(figures.Median(started[0]), figures.Median(started[1]))), "", ""},
		[]string{"RSS with nothing to do, MiB", spreadOf("%.1f", rss[0]), spreadOf("%.1f", rss[1]), fmt.Sprintf("%.2f", figures.Median(rss[0])/figures.Median(rss[1])), "", ""})
	fmt.Printf("\nMedian (p10..p90) of %d rounds, in turn. A ratio whose spread has 1 in it says nothing.\n", b.rounds)
	figures.Table(head, rows)
	return nil
}

// commitBefore is what a tree is compared with: its last commit if something was changed since, else the one before.
func commitBefore(ctx context.Context) (string, error) {
	err := exec.CommandContext(ctx, "git", "diff", "--quiet", "HEAD").Run()
	var changed *exec.ExitError
	switch {
	case err == nil:
		return "HEAD^", nil
	case errors.As(err, &changed) && changed.ExitCode() == 1:
		return "HEAD", nil
	}
	return "", fmt.Errorf("git diff: %w; --before says what to compare with", err)
}

// driverOf builds the driver of a commit.
func (b *bench) driverOf(ctx context.Context, commit string) (string, error) {
	progress("building the driver of %s", commit)
	tree := filepath.Join(b.dir, "before")
	if err := os.Mkdir(tree, 0o700); err != nil {
		return "", err
	}
	packed := filepath.Join(b.dir, "before.tar")
	for _, argv := range [][]string{{"git", "archive", "--output=" + packed, commit}, {"tar", "-x", "-C", tree, "-f", packed}} {
		if out, err := exec.CommandContext(ctx, argv[0], argv[1:]...).CombinedOutput(); err != nil {
			return "", fmt.Errorf("%s: %w: %s", strings.Join(argv, " "), err, out)
		}
	}
	return process.BuildOf(tree, tree, "-ldflags=-s -w")
}
