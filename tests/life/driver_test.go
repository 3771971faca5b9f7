// Package life takes volumes through their whole lives over gRPC, on real devices.
package life

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
)

const (
	miB = 1 << 20

	singleWriter = csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER
	readerOnly   = csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY
	readers      = csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY // Kubernetes' ReadOnlyMany

	block = co.Block
)

// smallest are sizes that each kind of volume can have.
var smallest = map[string]int64{"ext4": 32 * miB, "xfs": 300 * miB, "btrfs": 256 * miB, block: 16 * miB}

// pools are the kinds of directory that a file pool can be in: a plain one, where
// snapshots are copies, and filesystems with reflinks.
var pools = []string{"plain", "xfs", "btrfs"}

// With ASHLAR_LVM=1 the tests that go over all kinds go over those of LVM pools instead
// (make test-lvm).
func init() {
	if os.Getenv("ASHLAR_LVM") == "1" {
		pools = []string{linear, thin}
	}
}

// The kinds of LVM pools.
const (
	linear = "linear"
	thin   = "thin"
)

// provisionings that a kind of pool has.
func provisionings(pool string) []string {
	switch pool {
	case linear:
		return []string{"thick"}
	case thin:
		return []string{"thin"}
	}
	return []string{"thick", "thin"}
}

// driver is a driver under test, with a pool in directory pool of its Dir.
type driver struct {
	*drivertest.Driver
	t       testing.TB
	options drivertest.Options
	group   *drivertest.Group // of an LVM pool
}

// start starts a driver on a plain directory, unless the options say otherwise.
func start(t testing.TB, o drivertest.Options) *driver {
	t.Helper()
	drivertest.NeedRoot(t)
	if o.Dir == "" {
		o.Dir = newDir(t)
	}
	return &driver{Driver: drivertest.Start(t, o), t: t, options: o}
}

// restart ends the driver, as SIGTERM does, and starts another one in its place.
func (d *driver) restart() *driver {
	d.t.Helper()
	d.Stop()
	again := start(d.t, d.options)
	again.group = d.group
	return again
}

// in is the same driver for a part of a test.
func (d *driver) in(t testing.TB) *driver { return &driver{d.Driver, t, d.options, d.group} }

// newDir is drivertest.Dir for tests that may fail half-way: then what they leave is
// cleared away, so that it does no harm to the machine.
func newDir(t testing.TB) string {
	dir := drivertest.Dir(t)
	t.Cleanup(func() {
		if !t.Failed() {
			return
		}
		drivertest.ClearAway(dir)
	})
	return dir
}

// startOn starts a driver on a pool of one of the kinds of pools.
func startOn(t testing.TB, kind string) *driver {
	t.Helper()
	drivertest.NeedRoot(t)
	o := drivertest.Options{Dir: newDir(t)}
	if kind == linear || kind == thin {
		group := drivertest.NewGroup(t, 8<<30)
		o.Pools = []string{"default=" + group.URL()}
		if kind == thin {
			o.Pools[0] = "default=" + group.ThinPool(t, "tp", "-L", "7G", "--poolmetadatasize", "16M")
		}
		d := start(t, o)
		d.group = group
		return d
	}
	if kind != "plain" {
		drivertest.MountNew(t, kind, filepath.Join(o.Dir, "pool"), 8<<30)
	}
	return start(t, o)
}

// vol is a volume, and how it is used in a test.
type vol struct {
	*driver
	*co.Volume
}

func (d *driver) create(r *csi.CreateVolumeRequest) (*vol, error) {
	v, err := d.Create(d.t.Context(), r)
	if err != nil {
		return nil, err
	}
	if r.GetParameters()["encryption"] != "" {
		v.Secrets = map[string]string{"passphrase": passphrase}
	}
	return &vol{d, v}, nil
}

// passphrase of the volumes that are encrypted.
const passphrase = "a passphrase\nof two lines"

// volume that is there already.
func (d *driver) volume(id, name string, c *csi.VolumeCapability) *vol {
	return &vol{d, d.Volume(id, name, c)}
}

// made is create for a volume that has to come to be.
func (d *driver) made(r *csi.CreateVolumeRequest) *vol {
	d.t.Helper()
	v, err := d.create(r)
	check.OK(d.t, err)
	return v
}

// key of the volume's files in its pool.
func (v *vol) key() string { return v.ID[strings.LastIndexByte(v.ID, '.')+1:] }

func (v *vol) image() string { return filepath.Join(v.Dir, "pool/volumes", v.key()+".img") }

func (v *vol) record() string { return filepath.Join(v.Dir, "pool/volumes", v.key()+".rec") }

// The calls of the CO, within the time of the test.

func (v *vol) claim() error { return v.Claim(v.t.Context()) }

func (v *vol) stage() error { return v.Stage(v.t.Context()) }

func (v *vol) publish(target string, readOnly bool) error {
	return v.Publish(v.t.Context(), target, readOnly)
}

func (v *vol) unpublish(target string) error { return v.Unpublish(v.t.Context(), target) }

func (v *vol) unstage() error { return v.Unstage(v.t.Context()) }

func (v *vol) release() error { return v.Release(v.t.Context()) }

func (v *vol) delete() error { return v.Delete(v.t.Context()) }

func (v *vol) expand(size int64) error { return v.Expand(v.t.Context(), size) }

func (v *vol) nodeExpand(path string) error { return v.NodeExpand(v.t.Context(), path) }

func (v *vol) snapshot(name string) (*csi.Snapshot, error) { return v.Snapshot(v.t.Context(), name) }

func (v *vol) up() (string, error) { return v.Up(v.t.Context()) }

// down takes a volume back from its targets and deletes it.
func (v *vol) down(targets ...string) error {
	return co.InTurn(func() error { return v.Down(v.t.Context(), targets...) }, v.delete)
}

func (d *driver) deleteSnapshot(id string) error { return d.RemoveSnapshot(d.t.Context(), id) }

// running is up for a volume that has to get there.
func (v *vol) running() string {
	v.t.Helper()
	target, err := v.up()
	check.OK(v.t, err)
	return target
}

// usage in bytes, of where a volume is.
func (v *vol) usage(path string) *csi.VolumeUsage {
	v.t.Helper()
	response, err := v.NodeGetVolumeStats(v.t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: v.ID, VolumePath: path})
	check.OK(v.t, err)
	return response.GetUsage()[0]
}

// problems returns the reasons that both services give, and that have to be the same.
func (v *vol) problems() []string {
	v.t.Helper()
	atController := func() []string {
		health, err := v.ControllerGetVolumeHealth(v.t.Context(), &csi.ControllerGetVolumeHealthRequest{VolumeId: v.ID})
		check.OK(v.t, err)
		return reasons(health.GetVolumeHealth())
	}
	for was := atController(); ; {
		health, err := v.NodeGetVolumeHealth(v.t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: v.ID})
		check.OK(v.t, err)
		onNode, is := reasons(health.GetVolumeHealth()), atController()
		switch {
		case slices.Equal(is, onNode):
			return is
		case slices.Equal(is, was):
			v.t.Fatalf("the controller says %v, the node %v", is, onNode)
		}
		was = is // it changed meanwhile
	}
}

func reasons(health *csi.VolumeHealth) []string {
	var all []string
	for _, one := range health.GetHealthStatuses() {
		all = append(all, one.GetStatus().String()+" "+one.GetReason())
	}
	return all
}

// inPool lists what is in the directories, or in the volume group, of the pool.
func (d *driver) inPool() []string {
	if d.group != nil {
		return slices.DeleteFunc(d.group.Volumes(d.t), func(name string) bool { return name == "tp" })
	}
	var found []string
	for _, dir := range []string{"volumes", "snapshots"} {
		entries, err := os.ReadDir(filepath.Join(d.Dir, "pool", dir))
		if err != nil {
			d.t.Fatal(err)
		}
		for _, entry := range entries {
			found = append(found, dir+"/"+entry.Name())
		}
	}
	return found
}

// nothingLeft makes sure that a pool is as empty as on its first day.
func (d *driver) nothingLeft() {
	d.t.Helper()
	if left := d.inPool(); len(left) > 0 {
		d.t.Errorf("left in the pool: %v", left)
	}
	capacity, err := d.Store.Capacity(d.t.Context(), "", "", "")
	check.OK(d.t, err)
	if capacity.Promised != 0 {
		d.t.Errorf("%d bytes are promised to nobody", capacity.Promised)
	}
}

// remaining are the loop devices over a file that do not go; others who look at all devices may keep one
// for a moment.
func remaining(image string) []string {
	return drivertest.Gone(func() []string { return drivertest.LoopsOver(image) })
}

// mountsAt counts the mounts at a path.
func mountsAt(t testing.TB, path string) (n int) {
	t.Helper()
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	check.OK(t, err)
	for line := range strings.Lines(string(mounts)) {
		if strings.Fields(line)[4] == path {
			n++
		}
	}
	return n
}

var zeroPage [4096]byte

const dataSize = 2 * miB

// written is what write writes.
func written(seed uint64) drivertest.Content {
	return drivertest.Content{Seed: fmt.Sprint(seed), Offset: 4 * miB, Size: dataSize}
}

// write writes data of a seed to a file or device, durably.
func write(t testing.TB, path string, seed uint64) {
	t.Helper()
	check.OK(t, written(seed).Write(path))
}

// holds makes sure that what was written is there.
func holds(t testing.TB, path string, seed uint64) {
	t.Helper()
	check.OK(t, written(seed).In(path))
}

// refusesWrites makes sure that a read-only target can be read, and not be written.
func refusesWrites(t testing.TB, path string) {
	t.Helper()
	f, err := os.Open(path)
	check.OK(t, err)
	f.Close()
	f, err = os.OpenFile(path, os.O_WRONLY, 0)
	if err == nil {
		if _, err = f.WriteAt([]byte("x"), 0); err == nil {
			err = f.Sync()
		}
		f.Close()
	}
	if !errors.Is(err, unix.EROFS) && !errors.Is(err, unix.EACCES) && !errors.Is(err, unix.EPERM) {
		t.Fatalf("a write to read-only %s ends with %v", path, err)
	}
}

// checksum of all the bytes of a file; pages of zeros count as holes.
func checksum(t testing.TB, path string) [32]byte {
	t.Helper()
	f, err := os.Open(path)
	check.OK(t, err)
	defer f.Close()
	sum := sha256.New()
	for end := int64(0); ; {
		start, err := unix.Seek(int(f.Fd()), end, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return [32]byte(sum.Sum(nil))
		}
		check.OK(t, err)
		end, err = unix.Seek(int(f.Fd()), start, unix.SEEK_HOLE)
		check.OK(t, err)
		buffer := make([]byte, 64<<10)
		for at := start; at < end; {
			n, err := f.ReadAt(buffer[:min(int64(len(buffer)), end-at)], at)
			if n == 0 || (err != nil && !errors.Is(err, io.EOF)) {
				t.Fatalf("%d bytes at %d, %v", n, at, err)
			}
			for page := range slices.Chunk(buffer[:n], 4096) {
				if !bytes.Equal(page, zeroPage[:len(page)]) {
					_, _ = fmt.Fprintf(sum, "%d:", at)
					sum.Write(page)
				}
				at += int64(len(page))
			}
		}
	}
}

func blocks(t testing.TB, path string) int64 {
	t.Helper()
	info, err := os.Stat(path)
	check.OK(t, err)
	return info.Sys().(*syscall.Stat_t).Blocks * 512
}

// place is where a counter is written.
type place struct {
	path   string
	offset int64
}

func (p place) read(t testing.TB) uint64 {
	t.Helper()
	f, err := os.Open(p.path)
	check.OK(t, err)
	defer f.Close()
	var number [8]byte
	_, err = f.ReadAt(number[:], p.offset)
	check.OK(t, err)
	return binary.LittleEndian.Uint64(number[:])
}

// counter writes 1, 2, 3, ... to each of its places in turn, each durable before the
// next is begun. So at any moment the places, in their order, hold n or n-1, never more
// than the place before them.
type counter struct {
	done atomic.Uint64
	stop func() uint64
}

func count(t testing.TB, places ...place) *counter {
	t.Helper()
	c := &counter{}
	var files []*os.File
	for _, p := range places {
		f, err := os.OpenFile(p.path, os.O_RDWR|os.O_CREATE, 0o600)
		check.OK(t, err)
		files = append(files, f)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var ended sync.WaitGroup
	ended.Go(func() {
		for n := uint64(1); ctx.Err() == nil; n++ {
			for i, f := range files {
				if _, err := f.WriteAt(binary.LittleEndian.AppendUint64(nil, n), places[i].offset); err != nil {
					t.Errorf("count at %s: %v", places[i].path, err)
					return
				}
				if err := f.Sync(); err != nil {
					t.Errorf("count at %s: %v", places[i].path, err)
					return
				}
			}
			c.done.Store(n)
			time.Sleep(5 * time.Millisecond)
		}
	})
	c.stop = sync.OnceValue(func() uint64 {
		cancel()
		ended.Wait()
		for _, f := range files {
			f.Close()
		}
		return c.done.Load()
	})
	t.Cleanup(func() { c.stop() })
	for c.done.Load() < 3 && !t.Failed() {
		time.Sleep(time.Millisecond)
	}
	return c
}

// pointInTime makes sure that copies of a counter's places, in their order, are of one
// moment, and of one not before the count was at least atLeast.
func pointInTime(t testing.TB, atLeast uint64, places ...place) {
	t.Helper()
	var values []uint64
	for _, p := range places {
		values = append(values, p.read(t))
	}
	for i, n := range values {
		if n > values[max(0, i-1)] || n+1 < values[0] || n < atLeast {
			t.Fatalf("the counters, in the order of writing, are %v: not of one moment (after count %d)", values, atLeast)
		}
	}
}
