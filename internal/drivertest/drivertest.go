// Package drivertest runs the driver for tests, on real devices, and checks that they leave nothing.
package drivertest

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pools"
	"github.com/ashlar-csi/ashlar/pkg/controller"
	"github.com/ashlar-csi/ashlar/pkg/identity"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/node"
	"github.com/ashlar-csi/ashlar/pkg/rpc"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// NeedRoot ends a test that does not run as root: it fails, or with SKIP_ROOT_TESTS=1 is skipped. That skips it for root, too.
func NeedRoot(t testing.TB) {
	t.Helper()
	if os.Getenv("SKIP_ROOT_TESTS") == "1" {
		t.Skip("SKIP_ROOT_TESTS=1")
	}
	if os.Geteuid() != 0 {
		t.Fatal("this test needs root (loop devices and mounts); set SKIP_ROOT_TESTS=1 to leave such tests out")
	}
}

// Dir returns a temporary directory, which is removed at the end of the test. Its name is short, as the path of a socket is limited. The test fails if a mount
// or a loop device below it is left, and does not go within goneTime.
func Dir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "ashlar")
	check.OK(t, err)
	// The directory must not be empty: an empty one may be that of a disk which is not mounted, and no file pool is made in it.
	check.OK(t, os.WriteFile(filepath.Join(dir, "of-a-test"), nil, 0o600))
	t.Cleanup(func() {
		left := Gone(func() []string { return Leftovers(dir) })
		for _, line := range left {
			t.Errorf("left behind: %s", line)
		}
		if len(left) > 0 {
			return // RemoveAll would remove what is in the mounts
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Errorf("remove the test's directory: %v", err)
		}
	})
	return dir
}

// Leftovers lists the mounts at or below a directory, the loop devices over files in it, and the devices over these, each as "mount PATH", "loop device NAME
// over PATH" or "mapper device NAME over LOOP".
func Leftovers(dir string) []string {
	below := func(path string) bool { return path == dir || strings.HasPrefix(path, dir+"/") }
	var found []string
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(mounts)) {
		if fields := strings.Fields(line); len(fields) > 4 && below(fields[4]) {
			found = append(found, "mount "+fields[4])
		}
	}
	loops, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	ours := map[string]bool{}
	for range 2 { // also loop devices over loop devices
		for _, loop := range loops {
			backing, _ := os.ReadFile(loop)
			path, name := strings.TrimSuffix(strings.TrimSpace(string(backing)), " (deleted)"), strings.Split(loop, "/")[3]
			if ours[name] || (!below(path) && !ours[strings.TrimPrefix(path, "/dev/")]) {
				continue
			}
			ours[name] = true
			found = append(found, "loop device "+name+" over "+path)
			found = append(found, mappedOver(name)...)
		}
	}
	return found
}

// mappedOver lists the device mapper's devices over a loop device.
func mappedOver(loop string) (found []string) {
	mapped, _ := filepath.Glob("/sys/block/" + loop + "/holders/dm-*/dm/name")
	for _, file := range mapped {
		if device, err := os.ReadFile(file); err == nil {
			found = append(found, "mapper device "+strings.TrimSpace(string(device))+" over "+loop)
		}
	}
	return found
}

// Run runs a program and returns its output. If it fails, the test ends.
func Run(t testing.TB, argv ...string) string {
	t.Helper()
	out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v: %s", strings.Join(argv, " "), err, out)
	}
	return strings.TrimSpace(string(out))
}

// HeaderDevice returns the device that has the header of an encrypted volume in use, by the key of its ID: as docs/use/encryption.md has people find it.
func HeaderDevice(t testing.TB, key string) string {
	t.Helper()
	return Run(t, "sh", "-ec", strings.ReplaceAll(`NAME=$(dmsetup ls | grep -o '^[^[:space:]]*KEY[^[:space:]]*-crypt')
DEVICE=/dev/$(dmsetup deps -o blkdevname "$NAME" | grep -oP '\(\K[^)]+')
echo "$DEVICE"`, "KEY", key))
}

// Options are those of a driver under test.
type Options struct {
	// Dir is an existing directory for all files of the driver; default: a new one.
	Dir string
	// Pools are NAME=URL, the first one the default; default: a file pool in Dir/pool.
	Pools []string
	// MaxVolumes is the limit of published volumes; 0: no limit.
	MaxVolumes int64
	// Unclaimed: volumes are staged without a claim (--attach-required=false).
	Unclaimed bool
	// Ephemeral is which inline ephemeral volumes can be made; default: any, in all pools.
	Ephemeral *node.Ephemeral
	// Quiet: nothing is logged. A fuzz target cannot log.
	Quiet bool
}

// Node is the name of the node of a driver under test.
const Node = "test-node"

// Driver is a driver in this process that serves on a socket, and a client of it.
type Driver struct {
	*co.Client // with the Dir of the driver
	Socket     string
	Store      *volume.Local
	Mounts     *mount.Table

	stop func()
}

// Start starts a driver. It stops with Stop, or at the end of the test. After Stop another one can be started in the same Dir, as after a restart.
func Start(t testing.TB, o Options) *Driver {
	t.Helper()
	if o.Dir == "" {
		o.Dir = Dir(t)
	}
	if o.Pools == nil {
		o.Pools = []string{"default=file://" + o.Dir + "/pool?reservePercent=0"}
	}
	log := logr.Discard()
	if !o.Quiet {
		log = ktesting.NewLogger(t, ktesting.NewConfig(ktesting.Verbosity(5)))
	}
	ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), log))
	d := &Driver{Socket: filepath.Join(o.Dir, "csi.sock")}
	conn, err := co.Dial(d.Socket)
	check.OK(t, err)
	d.Client = co.New(conn, Node, o.Dir)
	d.Mounts, err = mount.LoadTable()
	check.OK(t, err)
	options := node.Options{MaxVolumes: o.MaxVolumes, Claims: !o.Unclaimed}
	var all []blockdev.Pool
	for _, one := range o.Pools {
		name, url, _ := strings.Cut(one, "=")
		pool, err := pools.OpenLazy(ctx, name, url, nil)
		check.OK(t, err)
		all = append(all, pool)
		options.Ephemeral.Pools = append(options.Ephemeral.Pools, name)
	}
	if o.Ephemeral != nil {
		options.Ephemeral = *o.Ephemeral
	}
	d.Store, err = volume.NewLocal(ctx, Node, all, d.Mounts, o.MaxVolumes)
	check.OK(t, err)
	listener, err := rpc.Listen("unix://" + d.Socket)
	check.OK(t, err)
	served := make(chan error, 1)
	go func() {
		c := controller.New(d.Store)
		served <- rpc.Serve(ctx, listener, rpc.Services{Identity: identity.New("block.csi.ashlar.dev", "test", nil),
			Controller: c, GroupController: c, SnapshotMetadata: c, Node: node.New(ctx, d.Store, d.Mounts, options)})
	}()
	d.stop = sync.OnceFunc(func() {
		conn.Close()
		cancel()
		if err := <-served; err != nil {
			t.Errorf("serve: %v", err)
		}
		for _, pool := range all {
			if err := pool.Close(); err != nil {
				t.Errorf("close pool: %v", err)
			}
		}
	})
	t.Cleanup(d.stop)
	return d
}

// Stop ends the driver as SIGTERM does. Its volumes, devices and mounts stay.
func (d *Driver) Stop() { d.stop() }

// IDs of objects by their names. Volumes and snapshots are in the pool "default".

// VolumeID returns the ID of a volume.
func VolumeID(name string) string { return id(blockdev.Volume, name) }

// SnapshotID returns the ID of a snapshot.
func SnapshotID(name string) string { return id(blockdev.Snapshot, name) }

func id(kind blockdev.Kind, name string) string {
	return volume.ID{Kind: kind, Pool: "default", Key: volume.KeyOf(name)}.String()
}

// GroupID returns the ID of a group snapshot.
func GroupID(name string) string { return volume.GroupID{Key: volume.KeyOf(name)}.String() }
