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
	this, err := b.starts(ctx, "this", b.binary)
	if err != nil {
		return fmt.Errorf("the driver of this tree: %w", err)
	}
	defer this.stop()
	that, err := b.starts(ctx, "that", old)
	if err != nil {
		return fmt.Errorf("the driver of %s: %w", commit, err)
	}
	defer that.stop()
	bare, err := newFloor(filepath.Join(this.Dir, "floor"), lifeSize, false)
	if err != nil {
		return err
	}
	if err := b.sameFilesystem(ctx, this.driver, bare); err != nil {
		return err
	}
	recording, err := bare.recording()
	if err != nil {
		return err
	}
	defer recording.directory.Close()
	head := []string{"", "this tree", commit, "this / that", "bare system calls", "this / bare", "those with records", "this / those with records"}
	var rows [][]string
	for _, atOnce := range []int{1, 4} {
		progress("quick: %d at once", atOnce)
		rates, err := b.inTurn(atOnce, b.lived(ctx, this.driver, atOnce, &recorder{}), b.lived(ctx, that.driver, atOnce, &recorder{}), bare.lived(ctx, b, atOnce, &recorder{}), recording.lived(ctx, b, atOnce, &recorder{}))
		if err != nil {
			return err
		}
		rows = append(rows, []string{fmt.Sprintf("lives/s, %d at once", atOnce), spreadOf("%.1f", rates[0]), spreadOf("%.1f", rates[1]), spreadOf("%.2f", ratios(rates[0], rates[1])),
			spreadOf("%.1f", rates[2]), spreadOf("%.2f", ratios(rates[0], rates[2])), spreadOf("%.1f", rates[3]), spreadOf("%.2f", ratios(rates[0], rates[3]))})
	}
	rows = append(rows,
		[]string{"a start, until it is ready, ms", spread(this.took), spread(that.took), fmt.Sprintf("%.2f", ratio(figures.Median(this.took), figures.Median(that.took))), "", "", "", ""},
		[]string{"RSS with nothing to do, MiB", spreadOf("%.1f", this.rss), spreadOf("%.1f", that.rss), fmt.Sprintf("%.2f", figures.Median(this.rss)/figures.Median(that.rss)), "", "", "", ""})
	fmt.Printf("\nMedian (p10..p90) of %d rounds, in turn. A ratio whose spread has 1 in it says nothing.\n", b.rounds)
	figures.Table(head, rows)
	return nil
}

// started is a driver that was started several times.
type started struct {
	*driver
	took []time.Duration // until it was ready
	rss  []float64       // MiB, then
}

// starts starts a driver several times; the last one stays.
func (b *bench) starts(ctx context.Context, name, binary string) (s started, err error) {
	side := *b
	side.binary = binary
	for range quickStarts {
		if s.driver != nil {
			s.stop()
		}
		began := time.Now()
		if s.driver, err = side.start(ctx, filepath.Join(b.dir, name), "?reservePercent=0"); err != nil {
			return s, err
		}
		s.took = append(s.took, time.Since(began))
		s.rss = append(s.rss, float64(s.usage().rss)/1024)
	}
	return s, nil
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
