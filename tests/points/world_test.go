package points

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/volume"
	"github.com/ashlar-csi/ashlar/tests/points/trace"
)

const miB = 1 << 20

// world is a driver with its volumes, as the CO sees them. Whatever the CO has tried, it
// remembers, and takes back in the end.
type world struct {
	*process
	t       testing.TB
	site    *site
	dir     string
	volumes []*vol
	space   int64           // that the pool had when it was empty
	caller  context.Context // of the CO's calls, each of which has callTime
}

// newWorld starts a driver over an empty pool.
func newWorld(t testing.TB, s *site) *world {
	t.Helper()
	dir, err := os.MkdirTemp(s.dir, "w")
	ok(t, err)
	w := &world{t: t, site: s, dir: dir, caller: context.Background()}
	t.Cleanup(func() {
		if w.process != nil {
			w.kill()
			if t.Failed() {
				t.Logf("the driver's log:\n%s", w.log)
			}
		}
		if t.Failed() {
			s.clear(dir)
		}
		_ = os.RemoveAll(dir)
	})
	w.start()
	w.space = w.available()
	return w
}

// start starts a driver, in the place of the one before it, which is dead or dies now.
func (w *world) start() {
	w.t.Helper()
	w.launch(false)
	ok(w.t, w.ready())
}

func (w *world) launch(stopped bool) {
	w.t.Helper()
	before := ""
	if w.process != nil {
		w.kill()
		before = w.log.String() + "--- killed ---\n"
	}
	p, err := launch(filepath.Join(w.dir, "csi.sock"), w.site.url(), stopped)
	ok(w.t, err)
	w.process = p
	_, _ = p.log.Write([]byte(before))
}

// startTraced is start under a trace that begins with the first step of the driver, and
// that may kill it.
func (w *world) startTraced(decide func(n int, c trace.Call) trace.Verdict) trace.Result {
	w.t.Helper()
	w.launch(true)
	var info unix.Siginfo
	ok(w.t, unix.Waitid(unix.P_PID, w.pid(), &info, unix.WSTOPPED|unix.WNOWAIT, nil))
	tracer, err := trace.Attach(w.pid(), decide)
	ok(w.t, err)
	ok(w.t, unix.Kill(w.pid(), unix.SIGCONT))
	failure := w.ready()
	result, err := tracer.Detach()
	ok(w.t, err)
	if !result.Killed {
		ok(w.t, failure)
	}
	return result
}

// available is what the pool says it has.
func (w *world) available() int64 {
	w.t.Helper()
	response, err := w.GetCapacity(w.ctx(), &csi.GetCapacityRequest{})
	ok(w.t, err)
	return response.GetAvailableCapacity()
}

func (w *world) ctx() context.Context {
	ctx, cancel := context.WithTimeout(w.caller, callTime)
	w.t.Cleanup(cancel)
	return ctx
}

// vol is a volume, and what the CO has tried with it.
type vol struct {
	*world
	name, kind string // kind: of its filesystem, or block
	size       int64
	thin       bool
	snapshot   string // its source, or
	source     *vol   // its source
	id         string
	staging    string
	context    map[string]string

	claimed, staged bool
	targets         []string
	content         uint64 // seed of its data; 0: none
}

const block = drivertest.Block

// volume is one that is to be made.
func (w *world) volume(name, kind string, size int64) *vol {
	v := &vol{world: w, name: name, kind: kind, size: size, staging: filepath.Join(w.dir, "staging-"+name),
		id: volume.ID{Kind: "vol", Pool: "default", Key: volume.KeyOf(name)}.String()}
	w.volumes = append(w.volumes, v)
	return v
}

func (v *vol) capability() *csi.VolumeCapability {
	return drivertest.Capability(v.kind)
}

func (v *vol) create() error {
	r := &csi.CreateVolumeRequest{Name: v.name, CapacityRange: &csi.CapacityRange{RequiredBytes: v.size},
		VolumeCapabilities: []*csi.VolumeCapability{v.capability()}}
	if _, either := v.site.storage.(folder); v.thin && either {
		r.Parameters = map[string]string{"provisioning": "thin"}
	}
	if v.snapshot != "" {
		r.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
			Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: v.snapshot}}}
	}
	if v.source != nil {
		r.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
			Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: v.source.id}}}
	}
	response, err := v.CreateVolume(v.ctx(), r)
	if err == nil && (response.GetVolume().GetVolumeId() != v.id || response.GetVolume().GetCapacityBytes() != v.size) {
		err = fmt.Errorf("created %v, not %s of %d bytes", response, v.id, v.size)
	}
	return err
}

func (v *vol) delete() error {
	_, err := v.DeleteVolume(v.ctx(), &csi.DeleteVolumeRequest{VolumeId: v.id})
	return err
}

func (v *vol) claim() error {
	v.claimed = true
	response, err := v.ControllerPublishVolume(v.ctx(), &csi.ControllerPublishVolumeRequest{VolumeId: v.id, NodeId: drivertest.Node, VolumeCapability: v.capability()})
	v.context = response.GetPublishContext()
	return err
}

func (v *vol) release() error {
	_, err := v.ControllerUnpublishVolume(v.ctx(), &csi.ControllerUnpublishVolumeRequest{VolumeId: v.id, NodeId: drivertest.Node})
	return err
}

func (v *vol) stage() error {
	v.staged = true
	if err := os.MkdirAll(v.staging, 0o700); err != nil {
		return err
	}
	_, err := v.NodeStageVolume(v.ctx(), &csi.NodeStageVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging, VolumeCapability: v.capability(), PublishContext: v.context})
	return err
}

func (v *vol) unstage() error {
	_, err := v.NodeUnstageVolume(v.ctx(), &csi.NodeUnstageVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging})
	return err
}

// target is a path to publish at, in the folder of a pod.
func (v *vol) target(pod string) string {
	return filepath.Join(v.dir, "pods", v.name+"-"+pod, "target")
}

func (v *vol) try(target string) error {
	if !slices.Contains(v.targets, target) {
		v.targets = append(v.targets, target)
	}
	return os.MkdirAll(filepath.Dir(target), 0o700)
}

func (v *vol) publish(pod string, readOnly bool) error {
	target := v.target(pod)
	if err := v.try(target); err != nil {
		return err
	}
	_, err := v.NodePublishVolume(v.ctx(), &csi.NodePublishVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging, TargetPath: target,
		VolumeCapability: v.capability(), PublishContext: v.context, Readonly: readOnly})
	return err
}

func (v *vol) unpublish(pod string) error {
	_, err := v.NodeUnpublishVolume(v.ctx(), &csi.NodeUnpublishVolumeRequest{VolumeId: v.id, TargetPath: v.target(pod)})
	return err
}

func (v *vol) expand(size int64) error {
	response, err := v.ControllerExpandVolume(v.ctx(), &csi.ControllerExpandVolumeRequest{VolumeId: v.id, CapacityRange: &csi.CapacityRange{RequiredBytes: size}, VolumeCapability: v.capability()})
	if err == nil && response.GetCapacityBytes() != size {
		err = fmt.Errorf("expanded to %d bytes, not %d", response.GetCapacityBytes(), size)
	}
	return err
}

func (v *vol) cut(name string) (string, error) {
	response, err := v.CreateSnapshot(v.ctx(), &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: v.id})
	if err == nil && !response.GetSnapshot().GetReadyToUse() {
		err = fmt.Errorf("%s is not ready", response.GetSnapshot())
	}
	return response.GetSnapshot().GetSnapshotId(), err
}

// all makes calls one after the other that all have to succeed.
func (w *world) all(calls ...func() error) {
	w.t.Helper()
	for _, call := range calls {
		ok(w.t, retried(call))
	}
}

func (v *vol) up() {
	v.t.Helper()
	v.all(v.claim, v.stage, func() error { return v.publish("pod", false) })
}
func (v *vol) rest() { v.t.Helper(); v.all(v.unpublishAll, v.unstage, v.release) }

func (v *vol) unpublishAll() error {
	for _, target := range v.targets {
		if _, err := v.NodeUnpublishVolume(v.ctx(), &csi.NodeUnpublishVolumeRequest{VolumeId: v.id, TargetPath: target}); err != nil {
			return err
		}
		if _, err := os.Lstat(target); !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("%s is still there after NodeUnpublishVolume", target)
		}
	}
	v.targets = nil
	return nil
}

const contentSize = 256 << 10

func content(seed uint64) []byte {
	random := rand.NewChaCha8(sha256.Sum256(binary.LittleEndian.AppendUint64(nil, seed)))
	all := make([]byte, contentSize)
	_, _ = random.Read(all)
	return all
}

// file of a published volume that holds its data.
func (v *vol) file(pod string) string {
	if v.kind == block {
		return v.target(pod)
	}
	return filepath.Join(v.target(pod), "data")
}

// fill writes data to the volume, which is up, durably.
func (v *vol) fill(seed uint64) {
	v.t.Helper()
	f, err := os.OpenFile(v.file("pod"), os.O_WRONLY|os.O_CREATE, 0o600)
	ok(v.t, err)
	defer f.Close()
	_, err = f.WriteAt(content(seed), 0)
	ok(v.t, err)
	ok(v.t, f.Sync())
	v.content = seed
}

// holds makes sure that the data is there, in the volume, which is published.
func (v *vol) holds(pod string, seed uint64) {
	v.t.Helper()
	if seed == 0 {
		return
	}
	f, err := os.Open(v.file(pod))
	ok(v.t, err)
	defer f.Close()
	have, err := io.ReadAll(io.LimitReader(f, contentSize))
	ok(v.t, err)
	if !bytes.Equal(have, content(seed)) {
		v.t.Fatalf("%s of volume %s does not hold what was written to it", v.file(pod), v.name)
	}
}

// whole brings the volume up, from wherever it is, and makes sure that it holds its data
// and takes more.
func (v *vol) whole(seed uint64) {
	v.t.Helper()
	v.up()
	v.holds("pod", seed)
	v.alive("pod")
}

// aliveTime is how long a write to a mounted volume may take, at any time.
const aliveTime = time.Minute

// alive makes sure that a published volume takes writes: that nothing left it frozen.
func (v *vol) alive(pod string) {
	v.t.Helper()
	path := filepath.Join(v.target(pod), "alive")
	if v.kind == block {
		path = v.target(pod)
	}
	written := make(chan error, 1)
	go func() {
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o600)
		if err == nil {
			_, err = f.WriteAt([]byte("alive"), 4*miB)
			err = errors.Join(err, f.Sync(), f.Close())
		}
		written <- err
	}()
	select {
	case err := <-written:
		ok(v.t, err)
	case <-time.After(aliveTime):
		_ = thaw(v.target(pod))
		v.t.Fatalf("volume %s is frozen; thawed, the write ends with: %v", v.name, <-written)
	}
}

// sound makes sure that the filesystem of a volume at rest has nothing to repair. What a tool
// that was cut short has left, by the copy of the superblock in the boot block, the next stage repairs.
func (v *vol) sound() {
	v.t.Helper()
	check := map[string][]string{"ext4": {"e2fsck", "-fn"}, "xfs": {"xfs_repair", "-n"}}[v.kind]
	if v.content == 0 || check == nil {
		return
	}
	for range 2 {
		cutShort := false
		v.site.look(v, func(path string) {
			if cutShort = v.kind == "ext4" && !blankBoot(v.t, path); cutShort {
				return
			}
			if out, err := exec.Command(check[0], check[1], path).CombinedOutput(); err != nil {
				v.t.Errorf("the filesystem of %s is damaged: %v: %s", v.name, err, out)
			}
		})
		if !cutShort {
			return
		}
		v.whole(v.content)
		v.rest()
	}
	v.t.Errorf("the boot block of %s is not blank after it was staged", v.name)
}

func blankBoot(t testing.TB, path string) bool {
	t.Helper()
	f, err := os.Open(path)
	ok(t, err)
	defer f.Close()
	boot := make([]byte, 1024)
	_, err = io.ReadFull(f, boot)
	ok(t, err)
	return bytes.Equal(boot, make([]byte, len(boot)))
}

// takeDown undoes all that the CO has tried, through the driver, and deletes whatever the
// driver lists.
func (w *world) takeDown() {
	w.t.Helper()
	for _, v := range slices.Backward(w.volumes) {
		w.all(v.unpublishAll)
		if v.staged {
			w.all(v.unstage)
			ok(w.t, os.Remove(v.staging)) // as the CO does; it has to be empty
		}
		if v.claimed {
			w.all(v.release)
		}
		v.sound()
	}
	w.all(w.deleteListed)
	w.volumes = nil
}

func (w *world) deleteListed() error {
	snapshots, err := w.ListSnapshots(w.ctx(), &csi.ListSnapshotsRequest{})
	if err != nil {
		return err
	}
	groups := map[string][]string{}
	for _, entry := range snapshots.GetEntries() {
		s := entry.GetSnapshot()
		groups[s.GetGroupSnapshotId()] = append(groups[s.GetGroupSnapshotId()], s.GetSnapshotId())
	}
	for group, members := range groups {
		if group != "" {
			_, err := w.DeleteVolumeGroupSnapshot(w.ctx(), &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: group, SnapshotIds: members})
			if err != nil {
				return err
			}
			continue
		}
		for _, id := range members {
			if _, err := w.DeleteSnapshot(w.ctx(), &csi.DeleteSnapshotRequest{SnapshotId: id}); err != nil {
				return err
			}
		}
	}
	volumes, err := w.ListVolumes(w.ctx(), &csi.ListVolumesRequest{})
	if err != nil {
		return err
	}
	for _, entry := range volumes.GetEntries() {
		if nodes := entry.GetStatus().GetPublishedNodeIds(); len(nodes) > 0 {
			return fmt.Errorf("%s is published to %v, and nobody knows of it", entry.GetVolume().GetVolumeId(), nodes)
		}
		if _, err := w.DeleteVolume(w.ctx(), &csi.DeleteVolumeRequest{VolumeId: entry.GetVolume().GetVolumeId()}); err != nil {
			return err
		}
	}
	return nil
}

// spaceSlack is what the filesystem below the pool may keep for itself.
const (
	spaceSlack = 2 * miB
	spaceTime  = time.Minute
)

// nothingLeft makes sure that the world is as on its first day.
func (w *world) nothingLeft() {
	w.t.Helper()
	// XFS gives space back in its own time.
	now, deadline := w.available(), time.Now().Add(spaceTime)
	for ; (now < w.space-spaceSlack || now > w.space+spaceSlack) && time.Now().Before(deadline); now = w.available() {
		time.Sleep(20 * time.Millisecond)
	}
	if now < w.space-spaceSlack || now > w.space+spaceSlack {
		w.t.Errorf("the empty pool has %d bytes available, it had %d", now, w.space)
	}
	for _, line := range drivertest.Gone(func() []string { return w.site.leftovers(w.dir) }) {
		w.t.Errorf("left behind: %s", line)
	}
	targets, _ := filepath.Glob(filepath.Join(w.dir, "pods", "*", "target"))
	for _, target := range targets {
		w.t.Errorf("left behind: target %s", target)
	}
}

// checkUp makes sure that a volume that was up before the call still serves its user.
func (v *vol) checkUp() {
	v.t.Helper()
	if v.content == 0 || !slices.Contains(v.targets, v.target("pod")) {
		return
	}
	v.holds("pod", v.content)
	v.alive("pod")
}
