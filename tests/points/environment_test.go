package points

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/process"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/tests/points/trace"
)

const miB = 1 << 20

// environment is a driver with its volumes, as the CO sees them. Whatever the CO has tried, it
// remembers, and takes back in the end.
type environment struct {
	*process.Driver
	t       testing.TB
	site    *site
	volumes []*vol
	space   int64           // that the pool had when it was empty
	secret  string          // passphrase of the volumes that are made; empty: they are not encrypted
	caller  context.Context // of the CO's calls, each of which has callTime
}

// newEnvironment starts a driver over an empty pool.
func newEnvironment(t testing.TB, s *site) *environment {
	t.Helper()
	dir, err := os.MkdirTemp(s.dir, "w")
	check.OK(t, err)
	driver, err := newDriver(dir, s.url())
	check.OK(t, err)
	w := &environment{Driver: driver, t: t, site: s, caller: context.Background()}
	t.Cleanup(func() {
		w.Close()
		if t.Failed() {
			t.Logf("the driver's log:\n%s", w.Log())
			s.clear(dir)
		}
		_ = os.RemoveAll(dir)
	})
	w.start()
	w.space = w.available()
	return w
}

// start starts a driver, in the place of the one before it, which is dead or dies now.
func (w *environment) start() {
	w.t.Helper()
	w.launch()
	check.OK(w.t, w.serve())
}

// launch starts a driver up to its first step.
func (w *environment) launch() {
	w.t.Helper()
	check.OK(w.t, w.Start())
	var info unix.Siginfo
	check.OK(w.t, unix.Waitid(unix.P_PID, w.Pid(), &info, unix.WSTOPPED|unix.WNOWAIT, nil))
}

// serve lets a driver go on that was launched, and waits until it serves.
func (w *environment) serve() error {
	if err := unix.Kill(w.Pid(), unix.SIGCONT); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), startTime)
	defer cancel()
	return w.Ready(ctx)
}

// startTraced is start under a trace that begins with the first step of the driver, and
// that may kill it.
func (w *environment) startTraced(decide func(n int, c trace.Call) trace.Verdict) trace.Result {
	w.t.Helper()
	w.launch()
	tracer, err := trace.Attach(w.Pid(), decide)
	check.OK(w.t, err)
	failure := w.serve()
	result, err := tracer.Detach()
	check.OK(w.t, err)
	if !result.Killed {
		check.OK(w.t, failure)
	}
	return result
}

// gone reports whether the driver has ended.
func (w *environment) gone() bool {
	select {
	case <-w.Ended():
		return true
	default:
		return false
	}
}

// available is what the pool says it has.
func (w *environment) available() int64 {
	w.t.Helper()
	response, err := w.GetCapacity(w.ctx(), &csi.GetCapacityRequest{})
	check.OK(w.t, err)
	return response.GetAvailableCapacity()
}

func (w *environment) ctx() context.Context {
	ctx, cancel := context.WithTimeout(w.caller, callTime)
	w.t.Cleanup(cancel)
	return ctx
}

// vol is a volume, and what the CO has tried with it.
type vol struct {
	*environment
	*co.Volume
	kind     string // of its filesystem, or block
	size     int64
	thin     bool
	secret   string // passphrase of one that is encrypted
	snapshot string // its source, or
	source   *vol   // its source

	claimed, staged bool
	targets         []string
	content         uint64 // seed of its data; 0: none
}

const block = co.Block

// volume is one that is to be made.
func (w *environment) volume(name, kind string, size int64) *vol {
	v := &vol{environment: w, Volume: w.Volume(drivertest.VolumeID(name), name, co.Capability(kind, co.MultiWriter)), kind: kind, size: size, secret: w.secret}
	w.volumes = append(w.volumes, v)
	return v
}

func (v *vol) create() error {
	r := co.Request(v.Name, v.kind, v.size)
	if _, either := v.site.storage.(directory); v.thin && either {
		r.Parameters = map[string]string{"provisioning": "thin"}
	}
	if v.secret != "" {
		r.Parameters, v.Secrets = map[string]string{"encryption": "luks2"}, map[string]string{"passphrase": v.secret}
	}
	if v.snapshot != "" {
		co.FromSnapshot(r, v.snapshot)
	}
	if v.source != nil {
		co.FromVolume(r, v.source.ID)
	}
	made, err := v.Client.Create(v.ctx(), r)
	if err == nil && (made.ID != v.ID || made.Size != v.size) {
		err = fmt.Errorf("created %s of %d bytes, not %s of %d bytes", made.ID, made.Size, v.ID, v.size)
	}
	return err
}

func (v *vol) delete() error { return v.Delete(v.ctx()) }

func (v *vol) claim() error {
	v.claimed = true
	return v.Claim(v.ctx())
}

func (v *vol) release() error { return v.Release(v.ctx()) }

func (v *vol) stage() error {
	v.staged = true
	return v.Stage(v.ctx())
}

func (v *vol) unstage() error { return v.Unstage(v.ctx()) }

func (v *vol) publish(pod string, readOnly bool) error {
	target := v.Target(pod)
	if !slices.Contains(v.targets, target) {
		v.targets = append(v.targets, target)
	}
	return v.Publish(v.ctx(), target, readOnly)
}

func (v *vol) unpublish(pod string) error { return v.Unpublish(v.ctx(), v.Target(pod)) }

func (v *vol) expand(size int64) error { return v.Expand(v.ctx(), size) }

func (v *vol) nodeExpand() error { return v.NodeExpand(v.ctx(), v.Target("pod")) }

func (v *vol) cut(name string) (string, error) {
	snapshot, err := v.Snapshot(v.ctx(), name)
	return snapshot.GetSnapshotId(), err
}

// all makes calls one after the other that all have to succeed.
func (w *environment) all(calls ...func() error) {
	w.t.Helper()
	for _, call := range calls {
		check.OK(w.t, w.retried(call))
	}
}

// retried makes a call as a sidecar does.
func (w *environment) retried(call func() error) error { return co.Again(w.ctx(), call) }

func (v *vol) up() {
	v.t.Helper()
	v.all(v.claim, v.stage, func() error { return v.publish("pod", false) })
}

// rest takes the volume from its targets, unstages and releases it.
func (v *vol) rest() {
	v.t.Helper()
	v.all(v.unpublishAll, v.unstage, v.release)
}

func (v *vol) unpublishAll() error {
	for _, target := range v.targets {
		if err := v.Unpublish(v.ctx(), target); err != nil {
			return err
		}
		if _, err := os.Lstat(target); !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("%s is still there after NodeUnpublishVolume", target)
		}
	}
	v.targets = nil
	return nil
}

func content(seed uint64) drivertest.Content {
	return drivertest.Content{Seed: fmt.Sprint(seed), Size: 256 << 10}
}

// file of a published volume that holds its data.
func (v *vol) file(pod string) string { return v.File(v.Target(pod)) }

// fill writes data to the volume, which is up, durably.
func (v *vol) fill(seed uint64) {
	v.t.Helper()
	check.OK(v.t, content(seed).Write(v.file("pod")))
	v.content = seed
}

// holds makes sure that the data is there, in the volume, which is published.
func (v *vol) holds(pod string, seed uint64) {
	v.t.Helper()
	if seed != 0 {
		check.OK(v.t, content(seed).In(v.file(pod)))
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
	path := filepath.Join(v.Target(pod), "alive")
	if v.kind == block {
		path = v.Target(pod)
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
		check.OK(v.t, err)
	case <-time.After(aliveTime):
		_ = filesystem.Thaw(v.Target(pod))
		v.t.Fatalf("volume %s is frozen; thawed, the write ends with: %v", v.Name, <-written)
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
		v.site.bytesOf(v, func(path string) {
			path, closed := v.opened(path)
			defer closed()
			if cutShort = v.kind == "ext4" && !blankBoot(v.t, path); cutShort {
				return
			}
			if out, err := exec.Command(check[0], check[1], path).CombinedOutput(); err != nil {
				v.t.Errorf("the filesystem of %s is damaged: %v: %s", v.Name, err, out)
			}
		})
		if !cutShort {
			return
		}
		v.whole(v.content)
		v.rest()
	}
	v.t.Errorf("the boot block of %s is not blank after it was staged", v.Name)
}

// opened returns what is behind the header of a volume that is encrypted, in a file or on a device, and what closes it; of others the path itself.
func (v *vol) opened(path string) (plain string, closed func()) {
	v.t.Helper()
	if v.secret == "" {
		return path, func() {}
	}
	const name = "points-plain"
	open := exec.Command("cryptsetup", "open", "--key-file=-", path, name)
	open.Stdin = strings.NewReader(v.secret)
	if out, err := open.CombinedOutput(); err != nil {
		v.t.Fatalf("%v: %v: %s", open.Args, err, out)
	}
	return "/dev/mapper/" + name, func() { drivertest.Run(v.t, "cryptsetup", "close", name) }
}

func blankBoot(t testing.TB, path string) bool {
	t.Helper()
	f, err := os.Open(path)
	check.OK(t, err)
	defer f.Close()
	boot := make([]byte, 1024)
	_, err = io.ReadFull(f, boot)
	check.OK(t, err)
	return bytes.Equal(boot, make([]byte, len(boot)))
}

// takeDown undoes all that the CO has tried, through the driver, and deletes whatever the
// driver lists.
func (w *environment) takeDown() {
	w.t.Helper()
	for _, v := range slices.Backward(w.volumes) {
		w.all(v.unpublishAll)
		if v.staged {
			w.all(v.unstage)
			check.OK(w.t, os.Remove(v.Staging)) // as the CO does; it has to be empty
		}
		if v.claimed {
			w.all(v.release)
		}
		v.sound()
	}
	w.all(w.deleteListed)
	w.volumes = nil
}

func (w *environment) deleteListed() error {
	snapshots, err := w.ListSnapshots(w.ctx(), &csi.ListSnapshotsRequest{})
	if err != nil {
		return err
	}
	groups := map[string][]*csi.Snapshot{}
	for _, entry := range snapshots.GetEntries() {
		s := entry.GetSnapshot()
		groups[s.GetGroupSnapshotId()] = append(groups[s.GetGroupSnapshotId()], s)
	}
	for _, s := range groups[""] {
		if err := w.RemoveSnapshot(w.ctx(), s.GetSnapshotId()); err != nil {
			return err
		}
	}
	delete(groups, "")
	for group, members := range groups {
		if err := w.RemoveGroup(w.ctx(), group, members...); err != nil {
			return err
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
		if err := w.Volume(entry.GetVolume().GetVolumeId(), "", nil).Delete(w.ctx()); err != nil {
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

// nothingLeft makes sure that the environment is as on its first day.
func (w *environment) nothingLeft() {
	w.t.Helper()
	// XFS gives space back in its own time.
	now, deadline := w.available(), time.Now().Add(spaceTime)
	for ; (now < w.space-spaceSlack || now > w.space+spaceSlack) && time.Now().Before(deadline); now = w.available() {
		time.Sleep(20 * time.Millisecond)
	}
	if now < w.space-spaceSlack || now > w.space+spaceSlack {
		w.t.Errorf("the empty pool has %d bytes available, it had %d", now, w.space)
	}
	for _, line := range drivertest.Gone(func() []string { return w.site.leftovers(w.Dir) }) {
		w.t.Errorf("left behind: %s", line)
	}
	for _, pod := range []string{"pod", "second"} {
		for _, target := range glob(filepath.Join(w.Dir, pod, "*")) {
			w.t.Errorf("left behind: target %s", target)
		}
	}
}

// checkUp makes sure that a volume that was up before the call still serves its user.
func (v *vol) checkUp() {
	v.t.Helper()
	if v.content == 0 || !slices.Contains(v.targets, v.Target("pod")) {
		return
	}
	v.holds("pod", v.content)
	v.alive("pod")
}
