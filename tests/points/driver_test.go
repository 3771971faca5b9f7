package points

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/ioctl"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// built is where the driver under test is built, once for all tests.
var built = struct {
	sync.Once
	dir, path string
	err       error
}{}

// program returns the path of the driver.
func program() (string, error) {
	if path := os.Getenv("ASHLAR_DRIVER"); path != "" { // where there is no compiler
		return path, nil
	}
	built.Do(func() { built.path, built.err = drivertest.Build(built.dir) })
	return built.path, built.err
}

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "ashlar")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	built.dir = dir
	code := m.Run()
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

// process is a driver that runs as a process of its own, and a client of it.
type process struct {
	csi.IdentityClient
	csi.ControllerClient
	csi.GroupControllerClient
	csi.NodeClient

	command *exec.Cmd
	conn    *grpc.ClientConn
	log     *log
}

// log keeps what was written to it.
type log struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

const (
	// startTime is how long a driver may take until it serves, also after a crash, and under a
	// trace.
	startTime = 60 * time.Second
	// callTime is how long any call may take.
	callTime = 60 * time.Second
)

// launch starts a driver; stopped: it waits for SIGCONT before its first step. It lacks
// CAP_SYS_RESOURCE, as in a container that is not privileged: so it has ext4 grow by other
// programs.
func launch(socket, pool string, stopped bool) (*process, error) {
	path, err := program()
	if err != nil {
		return nil, err
	}
	argv := []string{path, "serve", "--endpoint=unix://" + socket, "--node-id=" + drivertest.Node, "--pool=default=" + pool + "?reservePercent=0", "-v=4"}
	if stopped {
		argv = append([]string{"sh", "-c", `kill -STOP $$; exec "$0" "$@"`}, argv...)
	}
	argv = append([]string{"setpriv", "--bounding-set=-sys_resource"}, argv...)
	p := &process{log: &log{}}
	p.command = exec.Command(argv[0], argv[1:]...)
	p.command.Stdout, p.command.Stderr = p.log, p.log
	p.command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := p.command.Start(); err != nil {
		return nil, err
	}
	p.conn, err = grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: 2 * time.Millisecond, Multiplier: 1.5, MaxDelay: 50 * time.Millisecond}}))
	if err != nil {
		p.kill()
		return nil, err
	}
	p.IdentityClient, p.NodeClient = csi.NewIdentityClient(p.conn), csi.NewNodeClient(p.conn)
	p.ControllerClient, p.GroupControllerClient = csi.NewControllerClient(p.conn), csi.NewGroupControllerClient(p.conn)
	return p, nil
}

// ready waits until the driver serves.
func (p *process) ready() error {
	for deadline := time.Now().Add(startTime); ; time.Sleep(2 * time.Millisecond) {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		response, err := p.Probe(ctx, &csi.ProbeRequest{})
		cancel()
		if err == nil && response.GetReady().GetValue() {
			return nil
		}
		if p.gone() || time.Now().After(deadline) {
			return fmt.Errorf("the driver does not come up: %w\n%s", err, p.log)
		}
	}
}

// pid of the driver.
func (p *process) pid() int { return p.command.Process.Pid }

// gone reports whether the driver has ended.
func (p *process) gone() bool {
	var info unix.Siginfo
	err := unix.Waitid(unix.P_PID, p.pid(), &info, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil)
	const exited, dumped = 1, 3 // CLD_EXITED, CLD_KILLED, CLD_DUMPED; the rest is stops
	return err != nil || (info.Signo != 0 && info.Code >= exited && info.Code <= dumped)
}

// kill makes sure that the driver is gone. It may be called again.
func (p *process) kill() {
	if p.conn != nil {
		p.conn.Close()
	}
	_ = p.command.Process.Kill()
	_ = p.command.Wait() // a tracer may have collected it already
}

// retried makes a call as a sidecar does: again, as long as the answer says that the
// work may still be going on.
func retried(call func() error) error {
	for deadline := time.Now().Add(callTime); ; time.Sleep(10 * time.Millisecond) {
		err := call()
		switch status.Code(err) {
		case codes.Unavailable, codes.Aborted, codes.DeadlineExceeded:
			if time.Now().Before(deadline) {
				continue
			}
		}
		return err
	}
}

// site is where the drivers under test keep their pools, one after the other.
type site struct {
	dir string // of all that is in files
	storage
}

// storage is what a pool is made of.
type storage interface {
	// url of the pool, without options.
	url() string
	// leftovers are all that is there of drivers and their volumes.
	leftovers() []string
	// clear takes them away by force.
	clear()
	// device that a volume is attached as, for writing if it is one of several: its name in
	// /sys/block; empty for none.
	device(v *vol) string
	// below reports whether a path is that of a disk that the driver flushes, so that what it
	// did stays.
	below(path string) bool
	// look shows the bytes of a volume, as a file or a device of their own.
	look(v *vol, with func(path string))
}

// folder is a file pool.
type folder string

// newSite makes a site of a filesystem of its own, on memory if there is enough of it: what
// a crash of a process leaves does not depend on disks. xfs copies by sharing blocks, ext4
// byte by byte.
func newSite(t testing.TB, fs string) *site {
	t.Helper()
	var st unix.Statfs_t
	if unix.Statfs("/dev/shm", &st) == nil && int64(st.Bavail)*st.Bsize > 2<<30 {
		t.Setenv("TMPDIR", "/dev/shm")
	}
	dir := drivertest.Dir(t)
	image, mounted := filepath.Join(dir, "image"), filepath.Join(dir, "fs")
	ok(t, os.WriteFile(image, nil, 0o600))
	ok(t, os.Truncate(image, 4<<30))
	ok(t, os.Mkdir(mounted, 0o700))
	run(t, "mkfs."+fs, "-q", image)
	drivertest.MountLoop(t, image, mounted)
	t.Cleanup(func() {
		if err := unix.Unmount(mounted, 0); err != nil {
			t.Errorf("unmount the pool's filesystem: %v", err)
			_ = unix.Unmount(mounted, unix.MNT_DETACH)
		}
	})
	return &site{dir, folder(filepath.Join(mounted, "pool"))}
}

func (f folder) url() string { return "file://" + string(f) }

// leftovers are also whatever is in the pool beside its own folders.
func (f folder) leftovers() []string {
	found := drivertest.Leftovers(string(f))
	_ = filepath.WalkDir(string(f), func(path string, _ os.DirEntry, err error) error {
		name, _ := filepath.Rel(string(f), path)
		switch name {
		case ".", "lock", "pool", "volumes", "snapshots":
		default:
			found = append(found, "file "+path)
		}
		return err
	})
	return found
}

func (f folder) clear() { _ = os.RemoveAll(string(f)) }

func (f folder) image(v *vol) string {
	return filepath.Join(string(f), "volumes", volume.KeyOf(v.name)+".img")
}

func (f folder) device(v *vol) string {
	found, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, path := range found {
		if backing, err := os.ReadFile(path); err == nil && strings.TrimSpace(string(backing)) == f.image(v) {
			return strings.Split(path, "/")[3]
		}
	}
	return ""
}

func (f folder) below(string) bool { return false }

func (f folder) look(v *vol, with func(path string)) { with(f.image(v)) }

// leftovers are those of the storage, and the mounts and devices below a folder.
func (s *site) leftovers(dir string) []string {
	return append(drivertest.Leftovers(dir), s.storage.leftovers()...)
}

// clear takes by force what a failed test left.
func (s *site) clear(dir string) {
	for range 4 { // filesystems upon devices upon files
		for _, line := range s.leftovers(dir) {
			kind, rest, _ := strings.Cut(line, " ")
			switch kind {
			case "mount":
				_ = thaw(rest)
				_ = unix.Unmount(rest, unix.MNT_DETACH)
			case "loop":
				_ = exec.Command("losetup", "-d", "/dev/"+strings.Fields(rest)[1]).Run()
			case "mapper":
				_ = exec.Command("dmsetup", "remove", "--deferred", strings.Fields(rest)[1]).Run()
			}
		}
	}
	s.storage.clear()
}

func thaw(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	const fiThaw = 0xc0045878 // FITHAW
	return ioctl.Pointer(f, fiThaw, nil)
}

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func run(t testing.TB, argv ...string) {
	t.Helper()
	if out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", strings.Join(argv, " "), err, out)
	}
}
