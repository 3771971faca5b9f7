package points

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/process"
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
	built.Do(func() { built.path, built.err = process.Build(built.dir) })
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

const (
	// startTime is how long a driver may take until it serves, also after a crash, and under a
	// trace.
	startTime = 60 * time.Second
	// callTime is how long any call may take.
	callTime = 60 * time.Second
)

// newDriver returns a driver that waits for SIGCONT before its first step. It lacks
// CAP_SYS_RESOURCE, as in a container that is not privileged: so it has ext4 grow by other
// programs.
func newDriver(dir, pool string) (*process.Driver, error) {
	path, err := program()
	if err != nil {
		return nil, err
	}
	return process.New(dir, drivertest.Node, "setpriv", "--bounding-set=-sys_resource", "sh", "-c", `kill -STOP $$; exec "$0" "$@"`,
		path, "serve", "--pool=default="+pool+"?reservePercent=0", "-v=4")
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
	// bytesOf shows the bytes of a volume, as a file or a device of their own.
	bytesOf(v *vol, with func(path string))
}

// directory is a file pool.
type directory string

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
	mounted := filepath.Join(dir, "fs")
	drivertest.MountNew(t, fs, mounted, 4<<30)
	return &site{dir, directory(filepath.Join(mounted, "pool"))}
}

func (d directory) url() string { return "file://" + string(d) }

// leftovers are also whatever is in the pool beside its own directories.
func (d directory) leftovers() []string {
	found := drivertest.Leftovers(string(d))
	_ = filepath.WalkDir(string(d), func(path string, _ os.DirEntry, err error) error {
		name, _ := filepath.Rel(string(d), path)
		switch name {
		case ".", "lock", "pool", "volumes", "snapshots", "marks":
		default:
			found = append(found, "file "+path)
		}
		return err
	})
	return found
}

func (d directory) clear() { _ = os.RemoveAll(string(d)) }

func (d directory) image(v *vol) string {
	return filepath.Join(string(d), "volumes", volume.KeyOf(v.Name)+".img")
}

func (d directory) device(v *vol) string {
	return strings.Join(drivertest.LoopsOver(d.image(v)), " ")
}

func (d directory) below(string) bool { return false }

func (d directory) bytesOf(v *vol, with func(path string)) { with(d.image(v)) }

// leftovers are those of the storage, and the mounts and devices below a directory.
func (s *site) leftovers(dir string) []string {
	return append(drivertest.Leftovers(dir), s.storage.leftovers()...)
}

// clear takes by force what a failed test left.
func (s *site) clear(dir string) {
	drivertest.Clear(func() []string { return s.leftovers(dir) })
	s.storage.clear()
}
