package drivertest

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
)

const cgroups = "/sys/fs/cgroup"

// LimitsIO reports whether this machine's control groups can enforce limits of I/O: version 2, with the io controller.
func LimitsIO() bool {
	var at unix.Statfs_t
	if err := unix.Statfs(cgroups, &at); err != nil || at.Type != unix.CGROUP2_SUPER_MAGIC {
		return false
	}
	controllers, err := os.ReadFile(filepath.Join(cgroups, "cgroup.controllers"))
	return err == nil && strings.Contains(" "+strings.TrimSpace(string(controllers))+" ", " io ")
}

// NeedIO skips a test if limits of I/O cannot be enforced. `make test-kernel` runs such tests in a virtual machine, where it fails instead.
func NeedIO(t testing.TB) {
	t.Helper()
	NeedRoot(t)
	if LimitsIO() {
		return
	}
	if os.Getenv("ASHLAR_IO") == "1" {
		t.Fatal("there are no control groups version 2 with the io controller")
	}
	t.Skip("the control groups of this machine are not of version 2, with the io controller; make test-kernel runs this in a virtual machine")
}

// CGroup is a control group for one test.
type CGroup struct {
	t    testing.TB
	Path string
}

var podsMade atomic.Int64

// Pods makes the control group of all pods, as a kubelet with the cgroup driver cgroupfs or systemd does whose cgroup root is the test's own.
func Pods(t testing.TB, systemd bool) *CGroup {
	t.Helper()
	NeedIO(t)
	root := &CGroup{t, cgroups}
	name := fmt.Sprintf("ashlar%dn%d", os.Getpid(), podsMade.Add(1))
	if systemd {
		return root.Make(name + ".slice").Make(name + "-kubepods.slice")
	}
	return root.Make(name).Make("kubepods")
}

// Make makes a group in another one, with the controllers io and memory. At the end of the test its processes are killed, and it is removed.
func (g *CGroup) Make(name string) *CGroup {
	g.t.Helper()
	check.OK(g.t, os.WriteFile(filepath.Join(g.Path, "cgroup.subtree_control"), []byte("+io +memory"), 0))
	child := &CGroup{g.t, filepath.Join(g.Path, name)}
	if err := os.Mkdir(child.Path, 0o755); os.IsExist(err) {
		return child // made for another pod, and removed for that one
	} else if err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(func() {
		_ = os.WriteFile(filepath.Join(child.Path, "cgroup.kill"), []byte("1"), 0)
		for end := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
			err := os.Remove(child.Path)
			if err == nil || os.IsNotExist(err) {
				return
			}
			if time.Now().After(end) {
				g.t.Errorf("control group %s: %v", child.Path, err)
				return
			}
		}
	})
	return child
}

// Pod makes the group of a pod, and returns that of its container. qos is burstable, besteffort or empty (guaranteed).
func (g *CGroup) Pod(uid, qos string) *CGroup {
	g.t.Helper()
	above, name := g, "pod"+uid
	if slice, is := strings.CutSuffix(filepath.Base(g.Path), ".slice"); is {
		if qos != "" {
			slice += "-" + qos
			above = g.Make(slice + ".slice")
		}
		return above.Make(slice + "-" + strings.ReplaceAll(name, "-", "_") + ".slice").Make("cri-" + uid + ".scope")
	}
	if qos != "" {
		above = g.Make(qos)
	}
	return above.Make(name).Make("container")
}

// Start runs a program in the group until stop is called or the test ends. stop returns what the program has printed.
func (g *CGroup) Start(argv ...string) (stop func() (printed string)) {
	g.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	group, err := os.Open(g.Path)
	check.OK(g.t, err)
	defer group.Close()
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(group.Fd()), Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 20 * time.Second // for processes that it started, and that have left its process group
	check.OK(g.t, cmd.Start())
	stop = func() string {
		cancel()
		_ = cmd.Wait() // it was killed
		return out.String()
	}
	g.t.Cleanup(func() { stop() })
	return stop
}

// Run runs a program in the group to its end.
func (g *CGroup) Run(argv ...string) {
	g.t.Helper()
	cmd := exec.Command(argv[0], argv[1:]...)
	group, err := os.Open(g.Path)
	check.OK(g.t, err)
	defer group.Close()
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(group.Fd())}
	if out, err := cmd.CombinedOutput(); err != nil {
		g.t.Fatalf("%v: %v: %s", argv, err, out)
	}
}

// IO returns what the group, with all in it, has done to a device ("254:0"): rbytes, wbytes, rios, wios (io.stat).
func (g *CGroup) IO(device string) map[string]float64 {
	g.t.Helper()
	return numbersOf(g.line("io.stat", device))
}

// Limits returns the line of a device in io.max; empty if it has none.
func (g *CGroup) Limits(device string) string { g.t.Helper(); return g.line("io.max", device) }

func (g *CGroup) line(file, device string) string {
	g.t.Helper()
	text, err := os.ReadFile(filepath.Join(g.Path, file))
	check.OK(g.t, err)
	for line := range strings.Lines(string(text)) {
		if rest, is := strings.CutPrefix(strings.TrimSpace(line), device+" "); is {
			return rest
		}
	}
	return ""
}

// SetLimits writes a line of io.max.
func (g *CGroup) SetLimits(line string) {
	g.t.Helper()
	check.OK(g.t, os.WriteFile(filepath.Join(g.Path, "io.max"), []byte(line), 0))
}

func numbersOf(line string) map[string]float64 {
	all := map[string]float64{}
	for _, word := range strings.Fields(line) {
		key, value, _ := strings.Cut(word, "=")
		all[key], _ = strconv.ParseFloat(value, 64)
	}
	return all
}
