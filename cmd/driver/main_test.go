package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/machine"
	"github.com/ashlar-csi/ashlar/internal/process"
	"github.com/ashlar-csi/ashlar/pkg/node"
)

// The tests run the program itself, as a user does.

const testVersion = "v1.2.3-test"

// program is the path of the driver under test.
var program string

func TestMain(m *testing.M) {
	if program = os.Getenv("ASHLAR_DRIVER"); program != "" { // on machines without a compiler
		os.Exit(m.Run())
	}
	dir, err := os.MkdirTemp("", "ashlar-driver")
	if err != nil {
		panic(err)
	}
	if program, err = process.Build(dir, "-ldflags=-X main.version="+testVersion); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	apitest.Stop()
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

// result is how a run of the program has ended.
type result struct {
	stdout, stderr string
	code           int
}

// drive runs the program to its end, which has to be soon.
func drive(t *testing.T, args ...string) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && (!errors.As(err, &exit) || ctx.Err() != nil) {
		t.Fatalf("driver %q: %v", args, err)
	}
	return result{stdout.String(), stderr.String(), cmd.ProcessState.ExitCode()}
}

var poolProblem = regexp.MustCompile(`(?m)^I.*\] "Pool has a problem" .* reason="PoolNearlyFull" .*\n`)

// refused checks that the program has ended as for a mistake of its user: with status 1 and one clear line. A line about how full the disk of this machine is,
// which a driver logs once it has opened its pools, does not count.
func refused(t *testing.T, r result, want string) {
	t.Helper()
	r.stderr = poolProblem.ReplaceAllString(r.stderr, "")
	if r.code != 1 {
		t.Errorf("exit status %d, expected 1", r.code)
	}
	if !strings.HasPrefix(r.stderr, "driver: ") || strings.Count(r.stderr, "\n") != 1 || !strings.HasSuffix(r.stderr, "\n") {
		t.Errorf("expected one line from driver on stderr, got:\n%s", r.stderr)
	}
	if strings.Contains(r.stdout+r.stderr, "goroutine") {
		t.Errorf("a stack trace:\n%s%s", r.stdout, r.stderr)
	}
	if !strings.Contains(r.stderr, want) {
		t.Errorf("stderr %q does not say %q", r.stderr, want)
	}
}

// serving starts a driver in a directory and waits until it is ready. It is killed at the end of the test, if it still runs.
func serving(t *testing.T, dir string, flags ...string) *process.Driver {
	t.Helper()
	return ready(t, dir, append([]string{program}, flags...)...)
}

func ready(t *testing.T, dir string, argv ...string) *process.Driver {
	t.Helper()
	if !slices.ContainsFunc(argv, func(f string) bool { return strings.HasPrefix(f, "--pool=") }) {
		argv = append(argv, "--pool="+testPool(dir))
	}
	p := started(t, dir, argv...)
	check.OK(t, p.Ready(t.Context()))
	return p
}

// started starts a driver in a directory.
func started(t *testing.T, dir string, argv ...string) *process.Driver {
	t.Helper()
	p, err := process.New(dir, "", argv...)
	check.OK(t, err)
	t.Cleanup(p.Close)
	check.OK(t, p.Start())
	return p
}

func testPool(dir string) string { return "default=file://" + dir + "/pool?reservePercent=0" }

// stopped ends a driver by SIGTERM, and checks that it ends well and in time.
func stopped(t *testing.T, p *process.Driver) {
	t.Helper()
	if err := p.Stop(); err != nil {
		t.Errorf("%v\n%s", err, p.Log())
	}
}

func TestPrinting(t *testing.T) {
	for _, test := range []struct {
		args string
		want string
	}{
		{"--version", testVersion + "\n"},
		{"serve --version", testVersion + "\n"},
		{"version", testVersion + "\n"},
		{"help", "driver [serve] [flags]"},
		{"--help", "--endpoint"},
		{"-h", "--endpoint"},
		{"serve --help", `(default "unix:///csi/csi.sock")`},
		{"serve --help", `(default "block.csi.ashlar.dev")`},
		{"serve --help", `(default default=file:///var/lib/ashlar)`},
		{"serve --help", `(default "all")`},
		{"serve --help", `(default "text")`},
		{"demo --help", "--dir"},
		{"doctor --help", "--pool"},
		{"help doctor", "--pool"},
		{"manifests --help", "--storage-class"},
	} {
		t.Run(test.args, func(t *testing.T) {
			r := drive(t, strings.Fields(test.args)...)
			if r.code != 0 || r.stderr != "" || !strings.Contains(r.stdout, test.want) {
				t.Errorf("exit status %d, stdout %q, stderr %q; expected 0 and %q", r.code, r.stdout, r.stderr, test.want)
			}
		})
	}
}

// TestHelp: one page has each command with a line, and each flag of serve in its group, with its default and unit.
func TestHelp(t *testing.T) {
	r := drive(t, "--help")
	if r.code != 0 || r.stderr != "" {
		t.Fatalf("exit status %d, stderr %q", r.code, r.stderr)
	}
	page := r.stdout
	for _, want := range []string{"the CSI driver Ashlar", "\nUsage:\n  driver [serve] [flags]\n  driver COMMAND [flags]\n", "\nCommands:\n  serve  ", "\n  demo  ", "\n  doctor  ", "\n  manifests  ",
		"\n  version  ", "\n  completion  ", "\n  help  ", "\n  -h, --help  ", "      --version  ", "  -v, --v ", "or 1Gi (default \"1Gi\")", "(default 5m0s)", "(default 1h0m0s)"} {
		if before, after, found := strings.Cut(page, want); !found {
			t.Errorf("the help lacks %q:\n%s", want, r.stdout)
		} else if strings.Contains(after, want) {
			t.Errorf("the help says %q more than once:\n%s%s", want, before, after)
		}
	}
	// The groups in their order, with their flags.
	for _, group := range [][]string{
		{"What is served", "endpoint", "mode", "node-id", "driver-name", "page"},
		{"Pools and volumes of this machine", "pool", "max-volumes", "attach-required", "ephemeral-pools", "ephemeral-max-size"},
		{"Kubernetes", "kubeconfig", "topology-label", "gone-grace", "abandon-grace", "agent-endpoint", "copy-bandwidth", "remote-address", "remote-tls", "remote-network", "scrub-every", "scrub-bandwidth", "snapshot-metadata", "startup-taint"},
		{"Logging", "v", "vmodule", "logging-format"},
		{"Other flags", "help", "version"},
	} {
		_, after, found := strings.Cut(page, "\n"+group[0]+":\n")
		if !found {
			t.Fatalf("no group %q after those before it:\n%s", group[0], r.stdout)
		}
		page = after
		lines, _, _ := strings.Cut(after, "\n\n")
		var flags []string
		for line := range strings.Lines(lines) {
			if text := strings.TrimSpace(line); strings.HasPrefix(text, "-") {
				_, name, _ := strings.Cut(text, "--")
				flags = append(flags, strings.Fields(name)[0])
			}
		}
		if !slices.Equal(flags, group[1:]) {
			t.Errorf("group %s has the flags %v, expected %v", group[0], flags, group[1:])
		}
	}
	if serve := drive(t, "serve", "--help").stdout; !strings.Contains(serve, "  driver serve [flags]\n") || strings.Contains(serve, "Commands:") || strings.Contains(serve, "demo") {
		t.Errorf("the help of serve:\n%s", serve)
	}
}

// TestCompletion: scripts for shells, and the completions that they get from the driver.
func TestCompletion(t *testing.T) {
	for _, shell := range []string{"bash", "fish", "zsh"} {
		r := drive(t, "completion", shell)
		if r.code != 0 || r.stderr != "" || !strings.Contains(r.stdout, "driver") || !strings.Contains(r.stdout, shell) {
			t.Errorf("completion for %s ended with %d and %q", shell, r.code, r.stderr)
		}
		if shell != "bash" {
			continue
		}
		check := exec.Command("bash", "-n")
		check.Stdin = strings.NewReader(r.stdout)
		if out, err := check.CombinedOutput(); err != nil {
			t.Errorf("bash does not read it: %v\n%s", err, out)
		}
	}
	for _, test := range []struct {
		args []string
		want []string
	}{
		{[]string{"d"}, []string{"demo", "describe", "doctor"}},
		{[]string{"--ephemeral"}, []string{"--ephemeral-max-size", "--ephemeral-pools"}},
		{[]string{"serve", "--mode="}, []string{"all", "controller", "node"}},
		{[]string{"--logging-format", ""}, []string{"json", "text"}},
		{[]string{"completion", ""}, []string{"bash", "fish", "zsh"}},
	} {
		var found []string
		for line := range strings.Lines(drive(t, append([]string{"__complete"}, test.args...)...).stdout) {
			if word, _, _ := strings.Cut(strings.TrimSpace(line), "\t"); !strings.HasPrefix(word, ":") {
				found = append(found, word)
			}
		}
		if slices.Sort(found); !slices.Equal(found, test.want) {
			t.Errorf("%q is completed with %q, expected %q", test.args, found, test.want)
		}
	}
}

func TestMistakes(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	long := "unix:///" + strings.Repeat("x", 200)
	for _, test := range []struct {
		want string
		args []string
	}{
		{`unknown command "frobnicate"`, []string{"frobnicate"}},
		{`unexpected argument "argument"`, []string{"serve", "argument"}},
		{`unknown command "argument"`, []string{"--mode=all", "argument"}},
		{`unexpected argument "argument"`, []string{"demo", "argument"}},
		{`unexpected argument "argument"`, []string{"doctor", "argument"}},
		{`unexpected argument "argument"`, []string{"version", "argument"}},
		{`unknown flag: --frobnicate; "driver --help" lists`, []string{"--frobnicate"}},
		{`unknown flag: --frobnicate; "driver demo --help" lists`, []string{"demo", "--frobnicate"}},
		{`unknown flag: --frobnicate; "driver doctor --help" lists`, []string{"doctor", "--frobnicate=1"}},
		{"needs an argument: --mode", []string{"--mode"}},
		{"write --endpoint, with two dashes", []string{"-endpoint=unix:///csi.sock"}},
		{"write --pool, with two dashes", []string{"serve", "-pool", "a=file:///a"}},
		{"write --version, with two dashes", []string{"-version"}},
		{"write --vmodule, with two dashes", []string{"-vmodule=x=1"}},
		{"write --dir, with two dashes", []string{"demo", "-dir=/tmp"}},
		{"write --output, with two dashes", []string{"status", "-output=json"}},
		{"write --output, with two dashes", []string{"describe", "-output", "json", "v"}},
		{`no namespace can be called "amespace=shop"`, []string{"volumes", "-namespace=shop"}},
		{`invalid argument "pool" for "--pool"`, []string{"--pool=pool"}},
		{"unknown shorthand flag: 'x' in -x", []string{"-x"}},
		{"bash, fish, zsh", []string{"completion"}},
		{"bash, fish, zsh", []string{"completion", "tcsh"}},
		{"all, controller and node", []string{"--mode=cluster"}},
		{"all, controller and node", []string{"--mode="}},
		{"--mode=controller needs Kubernetes, and this is no pod", []string{"--mode=controller"}},
		{"driver: manifests needs Kubernetes, and this is no pod", []string{"manifests", "--kubeconfig="}},
		{"--kubeconfig", []string{"--mode=node", "--kubeconfig=/no/such/file"}},
		{"--kubeconfig", []string{"--kubeconfig=/no/such/file"}},
		{"--pool", []string{"--mode=controller", "--pool=a=file:///tmp/a"}},
		{"--gone-grace", []string{"--mode=controller", "--gone-grace=-1s"}},
		{"--abandon-grace", []string{"--mode=controller", "--abandon-grace=0s"}},
		{"--node-id", []string{"--mode=node", "--node-id=Upper"}},
		{"--node-id", []string{"--node-id="}},
		{"--node-id", []string{"--node-id=" + strings.Repeat("n", 64)}},
		{"--node-id", []string{"--node-id=a/b"}},
		{"--node-id", []string{"--node-id=two words"}},
		{"--driver-name", []string{"--driver-name="}},
		{"--driver-name", []string{"--driver-name=no_underscores"}},
		{"--driver-name", []string{"--driver-name=" + strings.Repeat("d", 64)}},
		{"--page=9820: give HOST:PORT", []string{"--page=9820"}},
		{"--page=localhost:: give HOST:PORT", []string{"--page=localhost:"}},
		{"there is no port", []string{"--page=:"}},
		{"unknown port", []string{"--page=:no-such-port"}},
		{"--metrics-endpoint=9810: write it as HOST:PORT", []string{"--metrics-endpoint=9810"}},
		{"there is no port", []string{"--metrics-endpoint=:"}},
		{"there is no port", []string{"--metrics-endpoint=localhost:"}},
		{"invalid port", []string{"--metrics-endpoint=:65536"}},
		{"there is no port", []string{"--trace-endpoint=:"}},
		{"there is no port", []string{"--trace-endpoint=localhost:"}},
		{"there is no host", []string{"--trace-endpoint=:4317"}},
		{"there is no port", []string{"--mode=node", "--kubeconfig=/no/such/file", "--node-id=n", "--agent-endpoint=10.0.0.7:"}},
		{"the controller shows all nodes", []string{"--mode=node", "--kubeconfig=/no/such/file", "--page=localhost:0"}},
		{"--max-volumes", []string{"--max-volumes=many"}},
		{"--max-volumes", []string{"--max-volumes=-1"}},
		{"--ephemeral-pools=other", []string{"--pool=a=file:///a", "--ephemeral-pools=other"}},
		{"--ephemeral-pools=a,", []string{"--pool=a=file:///a", "--ephemeral-pools=a,"}},
		{"--ephemeral-pools", []string{"--mode=controller", "--ephemeral-pools=a"}},
		{"--ephemeral-max-size", []string{"--ephemeral-max-size=large"}},
		{"--ephemeral-max-size", []string{"--ephemeral-max-size=0"}},
		{"--logging-format", []string{"--logging-format=xml"}},
		{`"-v, --v"`, []string{"-v=high"}},
		{"--vmodule", []string{"--vmodule=x"}},
		{"only unix sockets", []string{"--endpoint=tcp://127.0.0.1:10000"}},
		{"only unix sockets", []string{"--endpoint=unix://host/csi.sock"}},
		{"unix:///", []string{"--endpoint=csi.sock"}},
		{"unix:///", []string{"--endpoint="}},
		{"at most 107 bytes", []string{"--endpoint=" + long}},
		{"NAME=URL", []string{"--pool=/var/lib/ashlar"}},
		{"pool name", []string{"--pool=Upper=file:///x"}},
		{"pool name", []string{"--pool==file:///x"}},
		{"given twice", []string{"--pool=a=file:///x", "--pool=a=file:///y"}},
		{`unknown kind "ceph"`, []string{"--pool=a=ceph://x"}},
		{`unknown kind ""`, []string{"--pool=a=/x"}},
		{"three slashes", []string{"--pool=a=file://x/y"}},
		{"clean path", []string{"--pool=a=file:///x/../y"}},
		{"clean path", []string{"--pool=a=file:///"}},
		{"overprovision=0", []string{"--pool=a=file:///x?overprovision=0"}},
		{"overprovision=NaN", []string{"--pool=a=file:///x?overprovision=NaN"}},
		{"reservePercent=100", []string{"--pool=a=file:///x?reservePercent=100"}},
		{`unknown option "colour"`, []string{"--pool=a=file:///x?colour=red"}},
		{"not a directory", []string{"--pool=a=file://" + file, "--endpoint=" + file + ".sock"}},
		{"not a directory", []string{"--pool=a=file://" + file + "/below", "--endpoint=" + file + ".sock"}},
		{"make the directory of the socket", []string{"--pool=a=file://" + file + ".pool", "--endpoint=" + file + "/directory/csi.sock"}},
		{"no socket", []string{"--pool=a=file://" + file + ".pool", "--endpoint=" + file}},
		{"no such file", []string{"demo", "--dir=" + file + ".missing"}},
		{"NAME=URL", []string{"doctor", "--pool=/var/lib/ashlar"}},
		{`unknown kind "ceph"`, []string{"doctor", "--pool=a=ceph://x"}},
	} {
		t.Run(strings.Join(test.args, " "), func(t *testing.T) { refused(t, drive(t, test.args...), test.want) })
	}
}

func TestPoolOnReadOnlyMount(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := drivertest.Dir(t)
	locked := filepath.Join(dir, "locked")
	if err := os.Mkdir(locked, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(locked, locked, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	defer drivertest.Unmount(t, locked)
	if err := unix.Mount("", locked, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	p := serving(t, dir, "--pool=a=file://"+locked+"/pool?create=1")
	capacity := func() error {
		_, err := csi.NewControllerClient(p.Conn).GetCapacity(t.Context(), &csi.GetCapacityRequest{})
		return err
	}
	if err := capacity(); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "read-only") {
		t.Errorf("capacity of a pool on a read-only mount: %v", err)
	}
	if r := drive(t, "doctor", "--pool=a=file://"+locked+"/pool"); r.code != 1 || !strings.Contains(r.stdout, "read-only mount") {
		t.Errorf("doctor ended with %d:\n%s%s", r.code, r.stdout, r.stderr)
	}
	if err := unix.Mount("", locked, "", unix.MS_BIND|unix.MS_REMOUNT, ""); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(100 * time.Millisecond) {
		err := capacity()
		if err == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("the pool can be written again, and still: %v", err)
		}
	}
	stopped(t, p)
}

func TestInUse(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := drivertest.Dir(t)
	first := serving(t, dir)
	refused(t, drive(t, "--endpoint="+dir+"/other.sock", "--pool="+testPool(dir)), "another process uses this directory")
	refused(t, drive(t, "--endpoint="+dir+"/csi.sock", "--pool=a=file://"+dir+"/other"), "another process serves")
	r := drive(t, "doctor", "--pool="+testPool(dir))
	if r.code != 0 || !strings.Contains(r.stdout, "in use by a running driver") {
		t.Errorf("doctor ended with %d:\n%s%s", r.code, r.stdout, r.stderr)
	}
	stopped(t, first)
	if r := drive(t, "doctor", "--pool="+testPool(dir)); r.code != 0 || !strings.Contains(r.stdout, "in use by nobody") {
		t.Errorf("doctor ended with %d:\n%s%s", r.code, r.stdout, r.stderr)
	}
}

func TestSocket(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := drivertest.Dir(t)
	socket := filepath.Join(dir, "csi.sock")

	// A process that was started without a mask.
	wrapper := filepath.Join(dir, "unmasked")
	if err := os.WriteFile(wrapper, []byte("#!/bin/sh\numask 0\nexec "+program+` "$@"`+"\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	p := ready(t, dir, wrapper)
	info, err := os.Lstat(socket)
	check.OK(t, err)
	if mode := info.Mode(); mode != os.ModeSocket|0o600 {
		t.Errorf("the socket has mode %s, expected srw-------", mode)
	}

	// A killed driver leaves its socket; another one can start all the same.
	p.Kill()
	if !machine.Exists(socket) {
		t.Error("a killed driver took its socket along?")
	}
	p = serving(t, dir)
	stopped(t, p)
	if machine.Exists(socket) {
		t.Error("the socket is left after SIGTERM")
	}
}

// TestDrain: a call in flight when SIGTERM comes is served to its end.
func TestDrain(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := drivertest.Dir(t)
	p := serving(t, dir, "--node-id=n")
	const size = 16 << 20
	v, err := p.Create(t.Context(), co.Request("v", co.Block, size))
	check.OK(t, err)
	images, err := filepath.Glob(dir + "/pool/volumes/*.img")
	if err != nil || len(images) != 1 {
		t.Fatal(images, err)
	}
	if err := os.WriteFile(images[0], bytes.Repeat([]byte{1}, size), 0o600); err != nil { // so that there is something to copy
		t.Fatal(err)
	}
	for try := 1; ; try++ {
		took, err := endedWhileCopying(t, p, v.ID)
		if err == nil {
			break
		}
		if took < 4*time.Second || try == 5 { // calls get 4 s; on a machine that stalls the copy may need more
			t.Fatalf("the call that was in flight, after %s: %v", took, err)
		}
		p = serving(t, dir, "--node-id=n")
	}
	if machine.Exists(filepath.Join(dir, "csi.sock")) {
		t.Error("the socket is left")
	}
	p = serving(t, dir, "--node-id=n")
	list, err := p.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{})
	if err != nil || len(list.GetEntries()) != 1 || !list.GetEntries()[0].GetSnapshot().GetReadyToUse() {
		t.Errorf("after the restart there are the snapshots %v, %v", list, err)
	}
	stopped(t, p)
}

// endedWhileCopying ends a driver by SIGTERM while it makes its first snapshot. It returns how long the driver took to end, and the answer to the call.
func endedWhileCopying(t *testing.T, p *process.Driver, source string) (took time.Duration, answer error) {
	t.Helper()
	cut := make(chan error, 1)
	go func() {
		_, err := p.Volume(source, "v", co.Capability(co.Block, co.MultiWriter)).Snapshot(t.Context(), "s")
		cut <- err
	}()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		if images, _ := filepath.Glob(p.Dir + "/pool/snapshots/*.img"); len(images) > 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the copy does not begin")
		}
	}
	began := time.Now()
	check.OK(t, syscall.Kill(p.Pid(), syscall.SIGTERM))
	answer = <-cut
	state := p.Wait()
	took = time.Since(began)
	if !state.Success() || took > 30*time.Second {
		t.Errorf("it ended after %s with %s", took, state)
	}
	return took, answer
}

// TestEphemeralFlags: in which pools inline ephemeral volumes can be made.
func TestEphemeralFlags(t *testing.T) {
	pools := []string{"--pool=a=file:///a", "--pool=b=file:///b"}
	for name, c := range map[string]struct {
		args []string
		want node.Ephemeral
	}{
		"one machine":             {nil, node.Ephemeral{Pools: []string{"a", "b"}, MaxSize: 1 << 30}},
		"one machine, one pool":   {[]string{"--ephemeral-pools=b", "--ephemeral-max-size=5G"}, node.Ephemeral{Pools: []string{"b"}, MaxSize: 5e9}},
		"one machine, none":       {[]string{"--ephemeral-pools="}, node.Ephemeral{MaxSize: 1 << 30}},
		"in a cluster":            {[]string{"--mode=node", "--node-id=n"}, node.Ephemeral{MaxSize: 1 << 30}},
		"in a cluster, none":      {[]string{"--mode=node", "--node-id=n", "--ephemeral-pools="}, node.Ephemeral{MaxSize: 1 << 30}},
		"in a cluster, two pools": {[]string{"--mode=node", "--node-id=n", "--ephemeral-pools=b,a"}, node.Ephemeral{Pools: []string{"b", "a"}, MaxSize: 1 << 30}},
	} {
		var o options
		cmd := &cobra.Command{}
		o.addFlags(cmd)
		if err := errors.Join(cmd.ParseFlags(append(slices.Clone(pools), c.args...)), o.complete(cmd.Flags())); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if !slices.Equal(o.node().Ephemeral.Pools, c.want.Pools) || o.node().Ephemeral.MaxSize != c.want.MaxSize {
			t.Errorf("%s: %+v, want %+v", name, o.node().Ephemeral, c.want)
		}
	}
}

// TestAlone: --mode=all, the default, serves everything without Kubernetes.
func TestAlone(t *testing.T) {
	drivertest.NeedRoot(t)
	p := serving(t, drivertest.Dir(t), "--mode=all", "--node-id=n1", "--driver-name=test.example.com", "--max-volumes=7")
	ctx := t.Context()
	if _, err := p.ListVolumes(ctx, &csi.ListVolumesRequest{}); err != nil {
		t.Errorf("ListVolumes: %v", err)
	}
	if _, err := p.GetVolumeGroupSnapshot(ctx, &csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: "group.none"}); status.Code(err) != codes.NotFound {
		t.Errorf("GetVolumeGroupSnapshot: %v", err)
	}
	self, err := p.NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
	if err != nil || self.GetNodeId() != "n1" || self.GetMaxVolumesPerNode() != 7 {
		t.Errorf("NodeGetInfo: %v, %v", self, err)
	}
	info, err := p.GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
	if err != nil || info.GetName() != "test.example.com" || info.GetVendorVersion() != testVersion {
		t.Errorf("GetPluginInfo: %v, %v", info, err)
	}
	if !offers(t, p, csi.PluginCapability_Service_CONTROLLER_SERVICE) || !offers(t, p, csi.PluginCapability_Service_SNAPSHOT_METADATA_SERVICE) {
		t.Error("a service is missing")
	}
	stopped(t, p)
}

func offers(t *testing.T, p *process.Driver, service csi.PluginCapability_Service_Type) bool {
	t.Helper()
	capabilities, err := p.GetPluginCapabilities(t.Context(), &csi.GetPluginCapabilitiesRequest{})
	check.OK(t, err)
	return slices.ContainsFunc(capabilities.GetCapabilities(), func(c *csi.PluginCapability) bool { return c.GetService().GetType() == service })
}

func TestLogging(t *testing.T) {
	drivertest.NeedRoot(t)
	for _, test := range []struct {
		flags []string
		json  bool
		calls bool // all calls are logged
	}{
		{nil, false, false},
		{[]string{"-v=5"}, false, true},
		{[]string{"--v=5"}, false, true},
		{[]string{"-v", "5"}, false, true},
		{[]string{"--logging-format=json"}, true, false},
		{[]string{"--logging-format=json", "-v=5"}, true, true},
	} {
		t.Run(strings.Join(test.flags, " "), func(t *testing.T) {
			p := serving(t, drivertest.Dir(t), test.flags...)
			if _, err := p.ListVolumes(t.Context(), &csi.ListVolumesRequest{}); err != nil {
				t.Error(err)
			}
			if _, err := p.ListVolumes(t.Context(), &csi.ListVolumesRequest{MaxEntries: -1}); err == nil {
				t.Error("no error for a wrong request")
			}
			stopped(t, p)
			lines := strings.Split(strings.TrimSpace(p.Log()), "\n")
			calls, failures := 0, 0
			for _, line := range lines {
				if isJSON := strings.HasPrefix(line, "{") && strings.HasSuffix(line, "}"); isJSON != test.json {
					t.Errorf("log line %q", line)
				}
				if strings.Contains(line, "Call done") {
					calls++
				}
				if strings.Contains(line, "Call failed") {
					failures++
				}
			}
			if (calls > 0) != test.calls || failures != 1 {
				t.Errorf("%d calls and %d failures were logged:\n%s", calls, failures, strings.Join(lines, "\n"))
			}
		})
	}
}

func TestDemo(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := drivertest.Dir(t)
	r := drive(t, "demo", "--dir="+dir)
	if r.code != 0 || r.stderr != "" || !strings.Contains(r.stdout, "steps went as they should") {
		t.Errorf("the demo ended with %d:\n%s%s", r.code, r.stdout, r.stderr)
	}
	if strings.Contains(r.stdout, "\x1b") {
		t.Error("colours, and this is no terminal")
	}
	empty(t, dir)
}

// TestDemoInterrupted: after an interrupt, or if its driver dies, the demo ends with status 1 and leaves nothing.
func TestDemoInterrupted(t *testing.T) {
	drivertest.NeedRoot(t)
	for name, disturb := range map[string]func(demo *os.Process) error{
		"interrupt": func(demo *os.Process) error { return demo.Signal(os.Interrupt) },
		"driver killed": func(demo *os.Process) error {
			out, err := exec.Command("ps", "-o", "pid=", "--ppid", fmt.Sprint(demo.Pid)).Output()
			var pid int
			if _, scanErr := fmt.Sscan(string(out), &pid); err != nil || scanErr != nil {
				return errors.Join(err, scanErr)
			}
			return syscall.Kill(pid, syscall.SIGKILL)
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := drivertest.Dir(t)
			var stdout, stderr bytes.Buffer
			demo := exec.Command(program, "demo", "--dir="+dir)
			demo.Stdout, demo.Stderr = &stdout, &stderr
			if err := demo.Start(); err != nil {
				t.Fatal(err)
			}
			ended := make(chan error, 1)
			go func() { ended <- demo.Wait() }()
			for mounted := false; !mounted; {
				select {
				case err := <-ended:
					t.Fatalf("it ended before anything was mounted: %v\n%s", err, stdout.String())
				case <-time.After(time.Millisecond):
				}
				mounts, _, err := machine.Leftovers(dir)
				mounted = err != nil || len(mounts) > 1
			}
			if err := disturb(demo.Process); err != nil {
				t.Error(err)
			}
			<-ended
			refused(t, result{"", stderr.String(), demo.ProcessState.ExitCode()}, "the demo failed")
			if !strings.Contains(stdout.String(), "FAILED") || !strings.Contains(stdout.String(), "Cleaned up") {
				t.Errorf("it printed:\n%s", stdout.String())
			}
			empty(t, dir)
		})
	}
}

func empty(t *testing.T, dir string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) > 1 { // drivertest.Dir has made one file
		t.Errorf("left in the directory: %v, %v", entries, err)
	}
}

func TestDoctor(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := drivertest.Dir(t)
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	before, err := os.ReadDir(dir)
	check.OK(t, err)
	r := drive(t, "doctor", "--pool=a=file://"+dir+"/new/pool", "--pool=c=file://"+dir+"?reservePercent=5", "--pool=b=file://"+dir+"?reservePercent=0&overprovision=2")
	if r.code != 0 || r.stderr != "" {
		t.Errorf("doctor ended with %d:\n%s%s", r.code, r.stdout, r.stderr)
	}
	for line := range strings.Lines(r.stdout) {
		if !strings.HasPrefix(line, "ok      ") && !strings.HasPrefix(line, "warning ") {
			t.Errorf("line %q", line)
		}
	}
	for _, want := range []string{"kernel", "loop control", "mkfs.ext4 1.", "mkfs.xfs", "mkfs.btrfs", "cryptsetup 2.", "encryption", "filesystem ext4", "reflinks", "can be made", "overprovision=2", "propagation",
		"ok      pool a: others write to its filesystem, too: 20 %", "warning pool c: others write to its filesystem, too, and only 5 %"} {
		if !strings.Contains(r.stdout, want) {
			t.Errorf("doctor says nothing of %s:\n%s", want, r.stdout)
		}
	}
	for _, path := range []string{file, file + "/below"} {
		r := drive(t, "doctor", "--pool=a=file://"+path)
		refused(t, r, "failures: 1")
		if !strings.Contains(r.stdout, "failure pool a: "+file+" is no directory") {
			t.Errorf("doctor says:\n%s", r.stdout)
		}
	}
	if after, err := os.ReadDir(dir); err != nil || len(after) != len(before) {
		t.Errorf("doctor changed the directory from %v to %v, %v", before, after, err)
	}
}

// TestDoctorInPod: of mounts in a pod only the kubelet's directory has to be shared, not the root of the container.
func TestDoctorInPod(t *testing.T) {
	drivertest.NeedRoot(t)
	for how, want := range map[string]string{"shared": "ok      mount propagation of /var/lib/kubelet: shared", "private": "warning mount propagation of /var/lib/kubelet: "} {
		out, err := exec.Command("unshare", "--mount", "--propagation=private", "sh", "-euc",
			`mount -t tmpfs tmpfs /var/lib && mkdir /var/lib/kubelet && mount -t tmpfs tmpfs /var/lib/kubelet && mount --make-$1 /var/lib/kubelet; exec "$0" doctor`, program, how).CombinedOutput()
		if said := string(out); err != nil || !strings.Contains(said, want) || strings.Count(said, "propagation") != 1 {
			t.Errorf("the kubelet's directory is %s: %v:\n%s", how, err, said)
		}
	}
}

// TestDoctorLVM: doctor says what an LVM pool has and lacks.
func TestDoctorLVM(t *testing.T) {
	group := drivertest.NewGroup(t, 512<<20)
	thin := group.ThinPool(t, "tp", "-L", "256M")
	group.ThinPool(t, "dirty", "-L", "64M", "--zero", "n")
	r := drive(t, "doctor", "--pool=a="+group.URL(), "--pool=b="+thin+"?overprovision=2")
	if r.code != 0 || r.stderr != "" {
		t.Errorf("doctor ended with %d:\n%s%s", r.code, r.stdout, r.stderr)
	}
	for _, want := range []string{"pool a: lvm2 2.", "pool b: thin-provisioning-tools", "target linear", "target snapshot-origin", "target thin-pool",
		"in extents of 4", "0 volumes and snapshots", "thin pool of 256", "overprovision=2"} {
		if !strings.Contains(r.stdout, want) {
			t.Errorf("doctor says nothing of %q:\n%s", want, r.stdout)
		}
	}
	for url, want := range map[string]string{
		"lvm://no-such-group":               "no-such-group",
		group.URL() + "/none":               "has no thin pool none; make it with lvcreate",
		group.URL() + "/dirty":              "does not zero new blocks",
		group.URL() + "?overprovision=2":    "unknown option",
		group.URL() + "/tp?dataWatermark=0": "dataWatermark=0 is not a number from 1 to 100",
	} {
		r := drive(t, "doctor", "--pool=a="+url)
		if r.code == 0 || !strings.Contains(r.stdout+r.stderr, want) {
			t.Errorf("doctor of %s ended with %d, and does not say %q:\n%s%s", url, r.code, want, r.stdout, r.stderr)
		}
	}
}
