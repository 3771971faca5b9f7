package command

import (
	"bufio"
	"context"
	"io"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/ashlar-csi/ashlar/internal/trace"
)

// longestLine bounds a line of a program's output, in bytes.
const longestLine = 16 << 20

// Lines is Run for a program that prints much. It calls each with every line of the standard output; the line is valid until each returns. If each returns an
// error, the program is killed, and Lines returns that error. A line longer than longestLine is a failure of the program.
func Lines(ctx context.Context, each func(line []byte) error, argv ...string) (err error) {
	ctx, end := trace.Start(ctx, filepath.Base(argv[0]))
	defer func() { end(err) }()
	running, stop := context.WithCancel(ctx)
	defer stop()
	cmd := exec.CommandContext(running, find(argv[0]), argv[1:]...)
	cmd.Env = []string{"LC_ALL=C", "PATH=" + searchPath}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 5 * time.Second
	var warnings limited
	cmd.Stderr = &warnings
	out, err := cmd.StdoutPipe()
	if err != nil {
		return failed(ctx, argv, err, warnings.String())
	}
	began := time.Now()
	if err := start(ctx, cmd); err != nil {
		err = failed(ctx, argv, err, warnings.String())
		observe(argv[0], began, err)
		return err
	}
	refused, broken := readLines(out, each)
	if refused != nil || broken != nil {
		stop()
	}
	err = wait(ctx, cmd)
	if refused != nil {
		observe(argv[0], began, nil) // it did not fail
		return refused
	}
	if broken != nil {
		err = broken
	}
	if err != nil {
		err = failed(ctx, argv, err, warnings.String())
	}
	observe(argv[0], began, err)
	return err
}

// readLines calls each with every line. refused is an error of each, broken one of reading.
func readLines(from io.Reader, each func(line []byte) error) (refused, broken error) {
	lines := bufio.NewScanner(from)
	lines.Buffer(nil, longestLine)
	for lines.Scan() {
		if err := each(lines.Bytes()); err != nil {
			return err, nil
		}
	}
	return nil, lines.Err()
}
