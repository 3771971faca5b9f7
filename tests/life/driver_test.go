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
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
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
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

const (
	miB = 1 << 20

	writer       = csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER
	singleWriter = csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER
	multiWriter  = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
	readerOnly   = csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY
	readers      = csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY // Kubernetes' ReadOnlyMany

	// block in place of a filesystem's name is block access.
	block = "block"
)

// smallest are sizes that each kind of volume can have.
var smallest = map[string]int64{"ext4": 32 * miB, "xfs": 300 * miB, "btrfs": 256 * miB, block: 16 * miB}

// pools are the kinds of folder that a file pool can be in: a plain one, where
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

// driver is a driver under test, with a pool in folder pool of its Dir.
type driver struct {
	*drivertest.Driver
	t       testing.TB
	options drivertest.Options
	group   *drivertest.Group // of an LVM pool
}

// start starts a driver on a plain folder, unless the options say otherwise.
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
		poolFolder(t, o.Dir, kind, 8<<30)
	}
	return start(t, o)
}

// poolFolder mounts a new filesystem, in an image, at folder pool of dir.
func poolFolder(t testing.TB, dir, fs string, size int64) {
	t.Helper()
	image, folder := filepath.Join(dir, "image-of-pool"), filepath.Join(dir, "pool")
	ok(t, os.WriteFile(image, nil, 0o600))
	ok(t, os.Truncate(image, size))
	ok(t, os.Mkdir(folder, 0o700))
	drivertest.RunBtrfs(t, "mkfs."+fs, "-q", image)
	drivertest.MountLoop(t, image, folder)
	t.Cleanup(func() {
		if err := unix.Unmount(folder, 0); err != nil && !t.Failed() {
			t.Errorf("unmount the pool's filesystem: %v", err)
		}
	})
}

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// wants makes sure that a call failed with a code, and with a message that has all the
// words.
func wants(t testing.TB, err error, code codes.Code, words ...string) {
	t.Helper()
	if status.Code(err) != code {
		t.Fatalf("got %s, want %s: %v", status.Code(err), code, err)
	}
	for _, word := range words {
		if !strings.Contains(err.Error(), word) {
			t.Fatalf("the message says nothing of %q: %v", word, err)
		}
	}
}

func run(t testing.TB, argv ...string) string {
	t.Helper()
	out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v: %s", strings.Join(argv, " "), err, out)
	}
	return string(out)
}

// capability for a filesystem, or block access.
func capability(kind string, mode csi.VolumeCapability_AccessMode_Mode) *csi.VolumeCapability {
	c := drivertest.Capability(kind)
	c.AccessMode.Mode = mode
	return c
}

// vol is a volume, and how it is used.
type vol struct {
	*driver
	id         string
	name       string
	capability *csi.VolumeCapability
	context    map[string]string // publish context
	staging    string
}

// request is what create asks for.
func request(name, kind string, size int64) *csi.CreateVolumeRequest {
	return &csi.CreateVolumeRequest{Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: size},
		VolumeCapabilities: []*csi.VolumeCapability{capability(kind, multiWriter)}}
}

func fromSnapshot(r *csi.CreateVolumeRequest, id string) *csi.CreateVolumeRequest {
	r.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
		Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: id}}}
	return r
}

func fromVolume(r *csi.CreateVolumeRequest, id string) *csi.CreateVolumeRequest {
	r.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
		Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: id}}}
	return r
}

func (d *driver) create(r *csi.CreateVolumeRequest) (*vol, error) {
	response, err := d.CreateVolume(d.t.Context(), r)
	if err != nil {
		return nil, err
	}
	return d.volume(response.GetVolume().GetVolumeId(), r.GetName(), r.GetVolumeCapabilities()[0]), nil
}

// volume that is there already.
func (d *driver) volume(id, name string, c *csi.VolumeCapability) *vol {
	return &vol{driver: d, id: id, name: name, capability: c, staging: filepath.Join(d.Dir, "staging-"+name)}
}

// made is create for a volume that has to come to be.
func (d *driver) made(r *csi.CreateVolumeRequest) *vol {
	d.t.Helper()
	v, err := d.create(r)
	ok(d.t, err)
	return v
}

func (v *vol) block() bool { return v.capability.GetBlock() != nil }

// file is the volume's bytes, or a file in its filesystem, where it is published.
func (v *vol) file(target string) string {
	if v.block() {
		return target
	}
	return filepath.Join(target, "data")
}

// target is a path to publish at, in a folder that is there.
func (v *vol) target(name string) string {
	path := filepath.Join(v.Dir, "pods", v.name, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		v.t.Error(err)
	}
	return path
}

// key of the volume's files in its pool.
func (v *vol) key() string { return v.id[strings.LastIndexByte(v.id, '.')+1:] }

func (v *vol) image() string { return filepath.Join(v.Dir, "pool/volumes", v.key()+".img") }

func (v *vol) record() string { return filepath.Join(v.Dir, "pool/volumes", v.key()+".rec") }

func (v *vol) claim() error {
	response, err := v.ControllerPublishVolume(v.t.Context(), &csi.ControllerPublishVolumeRequest{VolumeId: v.id, NodeId: drivertest.Node, VolumeCapability: v.capability})
	v.context = response.GetPublishContext()
	return err
}

func (v *vol) stage() error {
	if err := os.Mkdir(v.staging, 0o700); err != nil && !errors.Is(err, fs.ErrExist) { // the CO's to make
		return err
	}
	_, err := v.NodeStageVolume(v.t.Context(), &csi.NodeStageVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging, VolumeCapability: v.capability, PublishContext: v.context})
	return err
}

func (v *vol) publish(target string, readOnly bool) error {
	_, err := v.NodePublishVolume(v.t.Context(), &csi.NodePublishVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging, TargetPath: target,
		VolumeCapability: v.capability, PublishContext: v.context, Readonly: readOnly})
	return err
}

func (v *vol) unpublish(target string) error {
	_, err := v.NodeUnpublishVolume(v.t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: v.id, TargetPath: target})
	return err
}

func (v *vol) unstage() error {
	_, err := v.NodeUnstageVolume(v.t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging})
	return err
}

func (v *vol) release() error {
	_, err := v.ControllerUnpublishVolume(v.t.Context(), &csi.ControllerUnpublishVolumeRequest{VolumeId: v.id, NodeId: drivertest.Node})
	return err
}

func (v *vol) delete() error {
	_, err := v.DeleteVolume(v.t.Context(), &csi.DeleteVolumeRequest{VolumeId: v.id})
	return err
}

// up takes a volume as far as its first target, which it returns.
func (v *vol) up() (string, error) {
	target := v.target("pod")
	for _, step := range []func() error{v.claim, v.stage, func() error { return v.publish(target, false) }} {
		if err := step(); err != nil {
			return "", err
		}
	}
	return target, nil
}

// running is up for a volume that has to get there.
func (v *vol) running() string {
	v.t.Helper()
	target, err := v.up()
	ok(v.t, err)
	return target
}

// down takes a volume back from its targets and deletes it.
func (v *vol) down(targets ...string) error {
	steps := []func() error{v.unstage, v.release, v.delete}
	for _, target := range targets {
		steps = append([]func() error{func() error { return v.unpublish(target) }}, steps...)
	}
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

func (v *vol) expand(size int64) error {
	response, err := v.ControllerExpandVolume(v.t.Context(), &csi.ControllerExpandVolumeRequest{VolumeId: v.id,
		CapacityRange: &csi.CapacityRange{RequiredBytes: size}, VolumeCapability: v.capability})
	if err == nil && response.GetCapacityBytes() != size {
		return errors.New("expanded to another size")
	}
	return err
}

func (v *vol) nodeExpand(path string) error {
	_, err := v.NodeExpandVolume(v.t.Context(), &csi.NodeExpandVolumeRequest{VolumeId: v.id, VolumePath: path, VolumeCapability: v.capability})
	return err
}

func (v *vol) snapshot(name string) (*csi.Snapshot, error) {
	response, err := v.CreateSnapshot(v.t.Context(), &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: v.id})
	return response.GetSnapshot(), err
}

func (d *driver) deleteSnapshot(id string) error {
	_, err := d.DeleteSnapshot(d.t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: id})
	return err
}

// usage in bytes, of where a volume is.
func (v *vol) usage(path string) *csi.VolumeUsage {
	v.t.Helper()
	response, err := v.NodeGetVolumeStats(v.t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: v.id, VolumePath: path})
	ok(v.t, err)
	return response.GetUsage()[0]
}

// problems returns the reasons that both services give, and that have to be the same.
func (v *vol) problems() []string {
	v.t.Helper()
	atController, err := v.ControllerGetVolumeHealth(v.t.Context(), &csi.ControllerGetVolumeHealthRequest{VolumeId: v.id})
	ok(v.t, err)
	onNode, err := v.NodeGetVolumeHealth(v.t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: v.id})
	ok(v.t, err)
	a, b := reasons(atController.GetVolumeHealth()), reasons(onNode.GetVolumeHealth())
	if !slices.Equal(a, b) {
		v.t.Fatalf("the controller says %v, the node %v", a, b)
	}
	return a
}

func reasons(health *csi.VolumeHealth) []string {
	var all []string
	for _, one := range health.GetHealthStatuses() {
		all = append(all, one.GetStatus().String()+" "+one.GetReason())
	}
	return all
}

// inPool lists what is in the folders, or in the volume group, of the pool.
func (d *driver) inPool() []string {
	if d.group != nil {
		return slices.DeleteFunc(d.group.Volumes(d.t), func(name string) bool { return name == "tp" })
	}
	var found []string
	for _, folder := range []string{"volumes", "snapshots"} {
		entries, err := os.ReadDir(filepath.Join(d.Dir, "pool", folder))
		if err != nil {
			d.t.Fatal(err)
		}
		for _, entry := range entries {
			found = append(found, folder+"/"+entry.Name())
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
	capacity, err := d.Store.Capacity(d.t.Context(), "", "")
	ok(d.t, err)
	if capacity.Promised != 0 {
		d.t.Errorf("%d bytes are promised to nobody", capacity.Promised)
	}
}

// attached returns the loop devices over a file (LOOP_GET_STATUS64 by way of sysfs).
func attached(t testing.TB, image string) []string {
	t.Helper()
	found, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	ok(t, err)
	var names []string
	for _, path := range found {
		if backing, err := os.ReadFile(path); err == nil && strings.TrimSpace(string(backing)) == image {
			names = append(names, strings.Split(path, "/")[3])
		}
	}
	return names
}

// stillAttached are the loop devices over a file that do not go; others who look at all devices may keep one
// for a moment.
func stillAttached(t testing.TB, image string) []string {
	t.Helper()
	return drivertest.Gone(func() []string { return attached(t, image) })
}

// mountsAt counts the mounts at a path.
func mountsAt(t testing.TB, path string) (n int) {
	t.Helper()
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	ok(t, err)
	for line := range strings.Lines(string(mounts)) {
		if strings.Fields(line)[4] == path {
			n++
		}
	}
	return n
}

const dataSize = 2 * miB

var zeroPage [4096]byte

func data(seed uint64) []byte {
	random := rand.NewChaCha8(sha256.Sum256(binary.LittleEndian.AppendUint64(nil, seed)))
	bytes := make([]byte, dataSize)
	_, _ = random.Read(bytes)
	return bytes
}

// write writes data of a seed at an offset of 4 MiB of a file or device, durably.
func write(t testing.TB, path string, seed uint64) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	ok(t, err)
	defer f.Close()
	_, err = f.WriteAt(data(seed), 4*miB)
	ok(t, err)
	ok(t, f.Sync())
}

// holds makes sure that what was written is there.
func holds(t testing.TB, path string, seed uint64) {
	t.Helper()
	f, err := os.Open(path)
	ok(t, err)
	defer f.Close()
	have := make([]byte, dataSize)
	_, err = f.ReadAt(have, 4*miB)
	ok(t, err)
	if !bytes.Equal(have, data(seed)) {
		t.Fatalf("%s does not hold what was written", path)
	}
}

// refusesWrites makes sure that a read-only target can be read, and not be written.
func refusesWrites(t testing.TB, path string) {
	t.Helper()
	f, err := os.Open(path)
	ok(t, err)
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
	ok(t, err)
	defer f.Close()
	sum := sha256.New()
	for end := int64(0); ; {
		start, err := unix.Seek(int(f.Fd()), end, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return [32]byte(sum.Sum(nil))
		}
		ok(t, err)
		end, err = unix.Seek(int(f.Fd()), start, unix.SEEK_HOLE)
		ok(t, err)
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
	ok(t, err)
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
	ok(t, err)
	defer f.Close()
	var number [8]byte
	_, err = f.ReadAt(number[:], p.offset)
	ok(t, err)
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
		ok(t, err)
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

// idOf is the ID that a volume of the default pool gets.
func idOf(name string) string {
	return volume.ID{Kind: "vol", Pool: "default", Key: volume.KeyOf(name)}.String()
}
