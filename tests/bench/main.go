// Command bench measures the driver on this machine, beside the same work done by bare
// system calls, and prints the tables of docs/benchmarks/. It needs root, and leaves
// nothing behind.
//
//	go run ./tests/bench                     everything, in about five minutes
//	go run ./tests/bench --parts=life,fio    some of it
//	go run ./tests/bench --figures=DIR       with a picture of each, as SVG
//	go run ./tests/bench --parts=quick       whether this tree is slower than its last commit, in two minutes
//
// Logical volumes (lvm) and encrypted ones are measured in a virtual machine (hack/vm/run.sh) where the kernel
// has no device mapper.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/machine"
	"github.com/ashlar-csi/ashlar/internal/process"
	"github.com/ashlar-csi/ashlar/tests/figures"
)

// bench is what all parts share.
type bench struct {
	dir    string // everything is in here
	binary string // the driver

	rounds       int // of life and observed
	lives        int // in one block of a round
	volumes      int // of scale
	knownVolumes int // of known
	samples      int // of each call

	lvmRounds int
	lvmLives  int

	fioRounds  int
	fioRuntime time.Duration
	fioSize    int64

	before string // the commit that quick compares with; empty: the last one

	draws figures.Draws
}

const few = 10 // volumes that scale compares with

// The parts, in the order in which they run. scale, memory and idle share their volumes.
var parts = []string{"life", "observed", "scale", "memory", "idle", "copies", "fio", "lvm", "encrypted"}

// quick is no part of the whole: it is for who changes something.
const quick = "quick"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	err := measure(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// parse reads the flags, and returns what is to be measured, and where.
func (b *bench) parse() (wanted []string, dir string, err error) {
	chosen := flag.String("parts", strings.Join(parts, ","), "what to measure")
	flag.StringVar(&dir, "dir", "/var/tmp", "existing directory to work in, on the disk to measure")
	flag.StringVar(&b.binary, "driver", "", "the driver's binary (default: it is built)")
	flag.IntVar(&b.rounds, "rounds", 30, "life, observed: rounds; each is a block of lives by either side")
	flag.IntVar(&b.lives, "lives", 8, "life, observed: lives in a block")
	flag.IntVar(&b.volumes, "volumes", 1000, "scale, memory, idle: how many volumes")
	flag.IntVar(&b.knownVolumes, "known-volumes", 100_000, "known: how many volumes")
	flag.IntVar(&b.samples, "samples", 40, "scale, known: samples of each call")
	flag.IntVar(&b.lvmRounds, "lvm-rounds", 6, "lvm, encrypted: rounds")
	flag.IntVar(&b.lvmLives, "lvm-lives", 1, "lvm: lives in a block")
	flag.IntVar(&b.fioRounds, "fio-rounds", 4, "fio, encrypted, copies: rounds")
	flag.DurationVar(&b.fioRuntime, "fio-runtime", 400*time.Millisecond, "fio, encrypted: length of each measurement")
	flag.Int64Var(&b.fioSize, "fio-size", 256<<20, "fio, encrypted: bytes of each volume, a multiple of 16 MiB")
	flag.StringVar(&b.before, "before", "", "quick: the commit to compare with (default: HEAD, or the one before if nothing was changed since)")
	flag.StringVar(&b.draws.Dir, "figures", "", "directory for pictures of the tables; "+figures.Print+" prints what they are drawn from (default: none)")
	flag.Parse()
	wanted = strings.Split(*chosen, ",")
	for _, part := range wanted {
		if part != quick && part != known && !slices.Contains(parts, part) {
			return nil, "", fmt.Errorf("--parts=%s: there are %s,%s,%s", *chosen, strings.Join(parts, ","), quick, known)
		}
	}
	if flag.NArg() > 0 || b.rounds < 1 || b.lives < 1 || b.volumes <= few || b.knownVolumes <= few || b.samples < 1 || b.lvmRounds < 1 || b.lvmLives < 1 || b.fioRounds < 1 || b.fioSize < 64<<20 || b.fioSize%(16<<20) != 0 {
		return nil, "", errors.New("the flags make no sense together; see --help")
	}
	return wanted, dir, nil
}

func measure(ctx context.Context) (err error) {
	b := &bench{}
	wanted, dir, err := b.parse()
	if err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return errors.New("this needs root (loop devices and mounts)")
	}
	if b.dir, err = os.MkdirTemp(dir, "ashlar-bench"); err != nil {
		return err
	}
	if b.dir, err = filepath.EvalSymlinks(b.dir); err != nil {
		return err
	}
	loops := loopNumbers()
	defer func() {
		progress("cleaning up")
		if ctx.Err() != nil {
			err = errors.New("interrupted")
		}
		err = errors.Join(err, clean(b.dir), removeLoops(loops))
	}()
	if b.binary == "" {
		progress("building the driver")
		if b.binary, err = process.Build(b.dir, "-ldflags=-s -w"); err != nil {
			return err
		}
	}
	has := func(part string) bool { return slices.Contains(wanted, part) }
	if len(wanted) == 1 && has("lvm") { // the machine that counts is maybe another
		return b.lvm(ctx)
	}
	if len(wanted) == 1 && has("encrypted") {
		return b.encrypted(ctx)
	}
	if err := b.header(); err != nil {
		return err
	}
	for _, part := range []struct {
		name    string
		wanted  bool
		measure func() error
	}{
		{"life", has("life"), func() error { return b.life(ctx) }},
		{"observed", has("observed"), func() error { return b.observed(ctx) }},
		{"scale", has("scale") || has("memory") || has("idle"), func() error { return b.scale(ctx, has("scale"), has("memory"), has("idle")) }},
		{"copies", has("copies"), func() error { return b.copies(ctx) }},
		{"fio", has("fio"), func() error { return b.fio(ctx) }},
		{"lvm", has("lvm"), func() error { return b.lvm(ctx) }},
		{"encrypted", has("encrypted"), func() error { return b.encrypted(ctx) }},
		{quick, has(quick), func() error { return b.quick(ctx) }},
		{known, has(known), func() error { return b.known(ctx) }},
	} {
		if !part.wanted {
			continue
		}
		if err := part.measure(); err != nil {
			return fmt.Errorf("%s: %w", part.name, err)
		}
	}
	return nil
}

func (b *bench) header() error {
	var uts unix.Utsname
	var disk unix.Statfs_t
	if err := errors.Join(unix.Uname(&uts), unix.Statfs(b.dir, &disk)); err != nil {
		return err
	}
	memory := field("/proc/meminfo", "MemTotal")
	fmt.Printf("| Machine | |\n|---|---|\n")
	fmt.Printf("| CPU | %s, %d of them |\n", field("/proc/cpuinfo", "model name"), runtime.NumCPU())
	fmt.Printf("| Memory | %s |\n", memory)
	fmt.Printf("| Kernel | Linux %s %s |\n", unix.ByteSliceToString(uts.Release[:]), unix.ByteSliceToString(uts.Machine[:]))
	fmt.Printf("| Pool on | %s, %.0f GiB, %.0f GiB free |\n", filesystemOf(b.dir), gib(int64(disk.Blocks)*disk.Frsize), gib(int64(disk.Bavail)*disk.Frsize))
	fmt.Printf("| Tools | %s, %s |\n", runtime.Version(), mkfsVersion())
	fmt.Printf("| Date | %s |\n", time.Now().UTC().Format("2006-01-02 15:04 MST"))
	fmt.Printf("| Command | `go run ./tests/bench%s` |\n", strings.Join(append([]string{""}, os.Args[1:]...), " "))
	fmt.Printf("| Load at the start | %s |\n", strings.Join(strings.Fields(read("/proc/loadavg"))[:3], " "))
	return nil
}

func gib(n int64) float64 { return float64(n) / (1 << 30) }

// filesystemOf describes the filesystem that a directory is on.
func filesystemOf(dir string) string {
	m, err := machine.MountOf(dir)
	if err != nil {
		return err.Error()
	}
	found := fmt.Sprintf("%s on %s (%s)", m.FsType, m.Source, strings.Join(m.SuperOptions, ","))
	// Without a journal a sync is cheaper than elsewhere.
	if journals, _ := filepath.Glob("/proc/fs/jbd2/" + filepath.Base(m.Source) + "-*"); m.FsType == "ext4" && len(journals) == 0 {
		found += " without a journal"
	}
	return found
}

// progress is for whoever watches; tables go to standard output.
func progress(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "%s "+format+"\n", append([]any{time.Now().Format("15:04:05")}, args...)...)
}

func read(path string) string {
	data, _ := os.ReadFile(path)
	return strings.TrimSpace(string(data))
}

// field reads "name: value" from a file of /proc.
func field(path, name string) string {
	for line := range strings.Lines(read(path)) {
		if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == name {
			return strings.TrimSpace(value)
		}
	}
	return ""
}
