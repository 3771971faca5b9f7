// Package drivertest runs the driver for tests, on real devices, and makes sure that
// nothing of it is left.
package drivertest

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/controller"
	"github.com/ashlar-csi/ashlar/pkg/identity"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/node"
	"github.com/ashlar-csi/ashlar/pkg/rpc"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// NeedRoot fails a test that needs root and does not have it, unless SKIP_ROOT_TESTS=1
// says to skip it.
func NeedRoot(t testing.TB) {
	t.Helper()
	if os.Getenv("SKIP_ROOT_TESTS") == "1" {
		t.Skip("SKIP_ROOT_TESTS=1")
	}
	if os.Geteuid() != 0 {
		t.Fatal("this test needs root (loop devices and mounts); set SKIP_ROOT_TESTS=1 to leave such tests out")
	}
}

// NothingLeft makes the test fail if, at its end, there is a mount or a loop device that
// was not there at its start and that lies below dir (default: the test's temporary
// folder, t.TempDir). It looks after all clean-up that is registered later.
func NothingLeft(t testing.TB, dirs ...string) {
	t.Helper()
	if len(dirs) == 0 {
		dirs = []string{filepath.Dir(t.TempDir())}
	}
	t.Cleanup(func() {
		for _, line := range Leftovers(dirs...) {
			t.Errorf("left behind: %s", line)
		}
	})
}

// Leftovers lists the mounts at, and the loop devices over files in, some folders.
func Leftovers(dirs ...string) []string {
	below := func(path string) bool {
		for _, dir := range dirs {
			if path == dir || strings.HasPrefix(path, strings.TrimSuffix(dir, "/")+"/") {
				return true
			}
		}
		return false
	}
	var found []string
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(mounts)) {
		if fields := strings.Fields(line); len(fields) > 4 && below(fields[4]) {
			found = append(found, "mount "+fields[4])
		}
	}
	loops, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, loop := range loops {
		backing, _ := os.ReadFile(loop)
		if path := strings.TrimSuffix(strings.TrimSpace(string(backing)), " (deleted)"); below(path) {
			found = append(found, "loop device "+strings.Split(loop, "/")[3]+" over "+path)
		}
	}
	return found
}

// Options of a driver under test.
type Options struct {
	// Dir is the folder of its pool; default: a temporary one.
	Dir string
	// Pools are its pools by URL, instead of one named default in Dir.
	Pools map[string]string
	// MaxVolumes is the attach limit.
	MaxVolumes int64
	Node       string
}

// Driver is a driver that runs in this process and serves on a socket.
type Driver struct {
	Socket string
	Dir    string
	Store  *volume.Local
	Mounts *mount.Table
	Conn   *grpc.ClientConn

	csi.IdentityClient
	csi.ControllerClient
	csi.GroupControllerClient
	csi.SnapshotMetadataClient
	csi.NodeClient

	stop func()
}

// Start starts a driver; it stops at the end of the test, or with Stop.
func Start(t testing.TB, o Options) *Driver {
	t.Helper()
	base := t.TempDir()
	if o.Dir == "" {
		o.Dir = filepath.Join(base, "pool")
	}
	if o.Node == "" {
		o.Node = "test-node"
	}
	if o.Pools == nil {
		o.Pools = map[string]string{"default": "file://" + o.Dir + "?reservePercent=0"}
	}
	ctx, cancel := context.WithCancel(context.Background())
	d := &Driver{Dir: o.Dir, Socket: filepath.Join(base, "csi.sock")}
	if len(d.Socket) > 100 { // t.TempDir has the test's name, a socket's path is short
		short, err := os.MkdirTemp("", "csi")
		must(t, err)
		t.Cleanup(func() { os.RemoveAll(short) })
		d.Socket = filepath.Join(short, "csi.sock")
	}
	var err error
	d.Mounts, err = mount.LoadTable()
	must(t, err)
	var pools []blockdev.Pool
	for _, name := range sortedKeys(o.Pools) {
		pool, err := blockdev.Open(ctx, name, o.Pools[name])
		must(t, err)
		pools = append(pools, pool)
	}
	d.Store, err = volume.NewLocal(ctx, o.Node, pools, d.Mounts, o.MaxVolumes)
	must(t, err)
	c := controller.New(d.Store)
	listener, err := rpc.Listen("unix://" + d.Socket)
	must(t, err)
	done := make(chan error, 1)
	go func() {
		done <- rpc.Serve(ctx, listener, rpc.Services{Identity: identity.New("block.csi.ashlar.dev", "test", d.Store.Ready),
			Controller: c, GroupController: c, SnapshotMetadata: c, Node: node.New(d.Store, d.Mounts, o.MaxVolumes)})
	}()
	d.Conn, err = grpc.NewClient("unix://"+d.Socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	must(t, err)
	d.IdentityClient, d.ControllerClient = csi.NewIdentityClient(d.Conn), csi.NewControllerClient(d.Conn)
	d.GroupControllerClient, d.SnapshotMetadataClient = csi.NewGroupControllerClient(d.Conn), csi.NewSnapshotMetadataClient(d.Conn)
	d.NodeClient = csi.NewNodeClient(d.Conn)
	stopped := false
	d.stop = func() {
		if stopped {
			return
		}
		stopped = true
		d.Conn.Close()
		cancel()
		if err := <-done; err != nil {
			t.Errorf("serve: %v", err)
		}
		for _, pool := range pools {
			if err := pool.Close(); err != nil {
				t.Errorf("close pool: %v", err)
			}
		}
	}
	t.Cleanup(d.stop)
	return d
}

// Stop ends the driver as SIGTERM does. Its volumes stay.
func (d *Driver) Stop() { d.stop() }

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func sortedKeys(m map[string]string) []string {
	var keys []string
	for k := range m {
		keys = append(keys, k)
	}
	// "default" is the first, so that it is the default.
	for i, k := range keys {
		if k == "default" {
			keys[0], keys[i] = keys[i], keys[0]
		}
	}
	_ = strconv.Itoa
	return keys
}
