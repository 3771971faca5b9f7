// Package crash kills the driver, the real program, at moments that nobody chose, and
// looks at what is left: every byte that was written, and nothing else.
package crash

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/ashlar-csi/ashlar/internal/drivertest"
)

const miB = 1 << 20

// process is the driver as a process of its own, which can be killed and started again.
type process struct {
	*drivertest.Process
	t testing.TB
}

// build builds the driver.
func build(t testing.TB) *process {
	t.Helper()
	drivertest.NeedRoot(t)
	dir := drivertest.Dir(t)
	binary, err := drivertest.Build(t.TempDir())
	ok(t, err)
	driver, err := drivertest.NewProcess(binary, dir, "--node-id="+drivertest.Node, "--pool=default=file://"+dir+"/pool?reservePercent=0", "-v=5")
	ok(t, err)
	t.Cleanup(func() {
		driver.Close()
		if t.Failed() { // no frozen filesystem and no mount stays on the machine
			drivertest.ClearAway(dir)
		}
	})
	return &process{driver, t}
}

// thaw ends a freeze, and reports whether there was one (FITHAW, ioctl_fsfreeze(2)).
func thaw(path string) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	return unix.IoctlSetInt(int(f.Fd()), 0xc0045878, 0) == nil
}

// start starts the driver and waits until it answers.
func (p *process) start() {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), time.Minute)
	defer cancel()
	ok(p.t, p.Start())
	ok(p.t, p.Ready(ctx))
}

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// lives takes volumes through their lives, over and over, with all calls repeated until
// they succeed, and checks the data all along.
type lives struct {
	*process
	name string
	done int
}

var kinds = []string{"ext4", "block", "xfs", "btrfs"}

func sizeOf(kind string) int64 {
	return map[string]int64{"ext4": 24 * miB, "block": 16 * miB, "xfs": 300 * miB, "btrfs": 256 * miB}[kind]
}

// volume is one of a life.
type volume struct {
	*lives
	id, name, kind  string
	staging, target string
}

func (l *lives) create(ctx context.Context, name, kind string, size int64, source *csi.VolumeContentSource) (*volume, error) {
	v := &volume{lives: l, name: name, kind: kind, staging: filepath.Join(l.Dir, "staging-"+name), target: filepath.Join(l.Dir, "target-"+name)}
	return v, drivertest.Again(ctx, func() error {
		response, err := l.CreateVolume(ctx, &csi.CreateVolumeRequest{Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: size},
			VolumeCapabilities: []*csi.VolumeCapability{drivertest.Capability(kind)}, VolumeContentSource: source,
			Parameters: map[string]string{"provisioning": []string{"thick", "thin"}[l.done%2]}})
		v.id = response.GetVolume().GetVolumeId()
		return err
	})
}

func (v *volume) file() string {
	if v.kind == "block" {
		return v.target
	}
	return filepath.Join(v.target, "data")
}

func (v *volume) up(ctx context.Context) error {
	if err := os.MkdirAll(v.staging, 0o700); err != nil {
		return err
	}
	c := drivertest.Capability(v.kind)
	for _, call := range []func() error{
		func() error {
			_, err := v.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{VolumeId: v.id, NodeId: drivertest.Node, VolumeCapability: c})
			return err
		},
		func() error {
			_, err := v.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging, VolumeCapability: c})
			return err
		},
		func() error {
			_, err := v.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging, TargetPath: v.target, VolumeCapability: c})
			return err
		},
	} {
		if err := drivertest.Again(ctx, call); err != nil {
			return err
		}
	}
	return nil
}

func (v *volume) down(ctx context.Context) error {
	for _, call := range []func() error{
		func() error {
			_, err := v.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: v.id, TargetPath: v.target})
			return err
		},
		func() error {
			_, err := v.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging})
			return err
		},
		func() error {
			_, err := v.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: v.id, NodeId: drivertest.Node})
			return err
		},
		func() error {
			_, err := v.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: v.id})
			return err
		},
	} {
		if err := drivertest.Again(ctx, call); err != nil {
			return err
		}
	}
	return os.Remove(v.staging)
}

func data(seed string) []byte {
	random := rand.NewChaCha8(sha256.Sum256([]byte(seed)))
	bytes := make([]byte, miB)
	_, _ = random.Read(bytes)
	return bytes
}

func (v *volume) write(seed string) error {
	f, err := os.OpenFile(v.file(), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(data(seed), 2*miB)
	return errors.Join(err, f.Sync(), f.Close())
}

func (v *volume) holds(seed string) error {
	f, err := os.Open(v.file())
	if err != nil {
		return err
	}
	defer f.Close()
	have := make([]byte, miB)
	if _, err := f.ReadAt(have, 2*miB); err != nil {
		return fmt.Errorf("%s: %w", v.name, err)
	}
	if !bytes.Equal(have, data(seed)) {
		return fmt.Errorf("%s does not hold what was written and synced", v.name)
	}
	return nil
}

// one life, with a snapshot, a restore of it, a clone, growth and a group of two.
func (l *lives) one(ctx context.Context) (err error) {
	kind := kinds[l.done%len(kinds)]
	size := sizeOf(kind)
	name := func(what string) string { return fmt.Sprintf("%s-%d-%s", l.name, l.done, what) }
	step := "create"
	defer func() {
		if err != nil {
			err = fmt.Errorf("life %d of %s (%s), %s: %w", l.done, l.name, kind, step, err)
		}
		l.done++
	}()
	v, err := l.create(ctx, name("source"), kind, size, nil)
	if err != nil {
		return err
	}
	step = "up"
	if err := v.up(ctx); err != nil {
		return err
	}
	step = "write"
	if err := errors.Join(v.write("first"), v.holds("first")); err != nil {
		return err
	}
	step = "snapshot"
	var snapshot string
	if err := drivertest.Again(ctx, func() error {
		response, err := l.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: name("snapshot"), SourceVolumeId: v.id})
		snapshot = response.GetSnapshot().GetSnapshotId()
		return err
	}); err != nil {
		return err
	}
	step = "write after the snapshot (is it frozen?)"
	if err := v.write("second"); err != nil {
		return err
	}
	step = "expand"
	if err := drivertest.Again(ctx, func() error {
		_, err := l.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{VolumeId: v.id, CapacityRange: &csi.CapacityRange{RequiredBytes: size + 16*miB}})
		return err
	}); err != nil {
		return err
	}
	step = "clone"
	clone, err := l.create(ctx, name("clone"), kind, size+16*miB, &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
		Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: v.id}}})
	if err != nil {
		return err
	}
	step = "restore"
	restore, err := l.create(ctx, name("restore"), kind, size+16*miB, &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
		Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: snapshot}}})
	if err != nil {
		return err
	}
	step = "clone and restore up"
	if err := errors.Join(clone.up(ctx), restore.up(ctx)); err != nil {
		return err
	}
	step = "content"
	if err := errors.Join(v.holds("second"), clone.holds("second"), restore.holds("first")); err != nil {
		return err
	}
	step = "group"
	var group string
	if err := drivertest.Again(ctx, func() error {
		response, err := l.CreateVolumeGroupSnapshot(ctx, &csi.CreateVolumeGroupSnapshotRequest{Name: name("group"), SourceVolumeIds: []string{v.id, restore.id}})
		group = response.GetGroupSnapshot().GetGroupSnapshotId()
		if n := len(response.GetGroupSnapshot().GetSnapshots()); err == nil && n != 2 {
			err = fmt.Errorf("the group has %d members", n)
		}
		return err
	}); err != nil {
		return err
	}
	step = "write after the group"
	if err := errors.Join(v.write("third"), restore.write("fourth"), v.holds("third"), restore.holds("fourth")); err != nil {
		return err
	}
	step = "ephemeral"
	if err := l.ephemeral(ctx, name("inline")); err != nil {
		return err
	}
	step = "delete the group and the snapshot"
	if err := drivertest.Again(ctx, func() error {
		_, err := l.DeleteVolumeGroupSnapshot(ctx, &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: group})
		return err
	}); err != nil {
		return err
	}
	if err := drivertest.Again(ctx, func() error {
		_, err := l.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: snapshot})
		return err
	}); err != nil {
		return err
	}
	step = "down"
	return errors.Join(v.down(ctx), clone.down(ctx), restore.down(ctx))
}

func (l *lives) ephemeral(ctx context.Context, name string) error {
	v := &volume{lives: l, id: name, name: name, kind: "ext4", target: filepath.Join(l.Dir, "target-"+name)}
	if err := drivertest.Again(ctx, func() error {
		_, err := l.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{VolumeId: name, TargetPath: v.target, VolumeCapability: drivertest.Capability("ext4"),
			VolumeContext: map[string]string{"csi.storage.k8s.io/ephemeral": "true", "size": "16Mi"}})
		return err
	}); err != nil {
		return err
	}
	if err := errors.Join(v.write("inline"), v.holds("inline")); err != nil {
		return err
	}
	return drivertest.Again(ctx, func() error {
		_, err := l.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: name, TargetPath: v.target})
		return err
	})
}

// empty makes sure that nothing is left of anything.
func (p *process) empty() {
	p.t.Helper()
	for _, line := range drivertest.Gone(func() []string { return drivertest.Leftovers(p.Dir) }) {
		p.t.Errorf("left: %s", line)
	}
	entries, err := os.ReadDir(p.Dir)
	ok(p.t, err)
	for _, entry := range entries {
		if !slices.Contains([]string{"log", "pool", "csi.sock", "of-a-test"}, entry.Name()) {
			p.t.Errorf("left: %s", entry.Name())
		}
	}
	for _, folder := range []string{"pool/volumes", "pool/snapshots"} {
		entries, err := os.ReadDir(filepath.Join(p.Dir, folder))
		ok(p.t, err)
		for _, entry := range entries {
			p.t.Errorf("left in the pool: %s", entry.Name())
		}
	}
	if p.t.Failed() {
		p.t.Logf("the end of the driver's log:\n%s", p.Log())
	}
}

func number(name string, otherwise uint64) uint64 {
	if n, err := strconv.ParseUint(os.Getenv(name), 10, 64); err == nil {
		return n
	}
	return otherwise
}

// TestKills kills the driver CRASH_ROUNDS times (by default as often as 20 s allow) while
// two callers take volumes through their lives. CRASH_SEED repeats the moments of a run.
func TestKills(t *testing.T) {
	p := build(t)
	seed := number("CRASH_SEED", uint64(time.Now().UnixNano()))
	rounds := int(number("CRASH_ROUNDS", 10000))
	t.Logf("CRASH_SEED=%d CRASH_ROUNDS=%d", seed, rounds)
	random := rand.New(rand.NewPCG(seed, 0))
	limited := os.Getenv("CRASH_ROUNDS") == ""
	p.start()

	ending, stop := context.WithCancel(t.Context())
	defer stop()
	var callers sync.WaitGroup
	all := []*lives{{process: p, name: "a"}, {process: p, name: "b", done: 1}}
	failed := make(chan error, len(all))
	for _, l := range all {
		callers.Go(func() {
			for ending.Err() == nil {
				if err := l.one(t.Context()); err != nil {
					failed <- err
					return
				}
			}
		})
	}
	began, kills := time.Now(), 0
	var failure error
	for kills < rounds && failure == nil && !(limited && time.Since(began) > 20*time.Second) {
		// Most steps of a life take milliseconds, the start of the driver too.
		pause := time.Duration(random.ExpFloat64() * float64(120*time.Millisecond))
		select {
		case failure = <-failed:
		case <-time.After(min(pause, time.Second)):
			p.Kill()
			kills++
			p.start()
		}
	}
	stop()
	ended := make(chan struct{})
	go func() { callers.Wait(); close(ended) }()
	select {
	case <-ended:
	case failure = <-failed:
	case <-time.After(60 * time.Second):
		failure = errors.New("the callers are stuck")
	}
	if failure != nil {
		t.Fatalf("after %d kills (CRASH_SEED=%d): %v\n%s%s", kills, seed, failure, p.frozen(), p.Log())
	}
	select {
	case failure = <-failed:
		t.Fatalf("after %d kills (CRASH_SEED=%d): %v\n%s", kills, seed, failure, p.Log())
	default:
	}
	lived := 0
	for _, l := range all {
		lived += l.done
	}
	t.Logf("%d kills, %d lives, %s", kills, lived, time.Since(began).Round(time.Millisecond))
	p.empty()
}

// frozen says which filesystems were still frozen, and thaws them.
func (p *process) frozen() string {
	var found strings.Builder
	for _, line := range drivertest.Leftovers(p.Dir) {
		if path, is := strings.CutPrefix(line, "mount "); is && thaw(path) {
			fmt.Fprintf(&found, "%s was frozen\n", path)
		}
	}
	return found.String()
}

// TestKillAroundFreeze kills the driver just before, in and after the moment for which it
// freezes filesystems to cut a group: none stays frozen past the next start.
func TestKillAroundFreeze(t *testing.T) {
	p := build(t)
	seed := number("CRASH_SEED", uint64(time.Now().UnixNano()))
	t.Logf("CRASH_SEED=%d", seed)
	random := rand.New(rand.NewPCG(seed, 1))
	p.start()
	l := &lives{process: p, name: "group"}
	var volumes []*volume
	var ids []string
	for _, name := range []string{"a", "b", "c"} {
		v, err := l.create(t.Context(), name, "ext4", sizeOf("ext4"), nil)
		ok(t, err)
		ok(t, v.up(t.Context()))
		volumes, ids = append(volumes, v), append(ids, v.id)
	}
	group := &csi.CreateVolumeGroupSnapshotRequest{Name: "group", SourceVolumeIds: ids}
	remove := func() {
		t.Helper()
		ok(t, drivertest.Again(t.Context(), func() error {
			made, err := p.CreateVolumeGroupSnapshot(t.Context(), group)
			if err == nil {
				_, err = p.DeleteVolumeGroupSnapshot(t.Context(), &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: made.GetGroupSnapshot().GetGroupSnapshotId()})
			}
			return err
		}))
	}
	began := time.Now()
	remove()
	whole := time.Since(began)
	rounds, limited := int(number("CRASH_ROUNDS", 10000)), os.Getenv("CRASH_ROUNDS") == ""
	round := 0
	for ; round < rounds && !(limited && time.Since(began) > 10*time.Second); round++ {
		for _, v := range volumes {
			ok(t, v.write(fmt.Sprint(round))) // something for the freeze to write out
		}
		cut := make(chan struct{})
		go func() {
			_, _ = p.CreateVolumeGroupSnapshot(t.Context(), group)
			close(cut)
		}()
		time.Sleep(time.Duration(random.Int64N(int64(whole))))
		p.Kill()
		<-cut
		p.start()
		if frozen := p.frozen(); frozen != "" {
			t.Fatalf("round %d of CRASH_SEED=%d, after the restart:\n%s", round, seed, frozen)
		}
		for _, v := range volumes {
			ok(t, v.holds(fmt.Sprint(round)))
		}
		if round%4 == 0 {
			remove()
		}
	}
	t.Logf("%d kills within %s each", round, whole)
	remove()
	for _, v := range volumes {
		ok(t, v.down(t.Context()))
	}
	p.empty()
}

// TestKillWhileFrozen kills the driver in the middle of a long copy, during which the
// filesystem of its source is frozen: the next start ends that.
func TestKillWhileFrozen(t *testing.T) {
	p := build(t)
	p.start()
	l := &lives{process: p, name: "frozen"}
	v, err := l.create(t.Context(), "source", "ext4", 1<<30, nil)
	ok(t, err)
	ok(t, v.up(t.Context()))
	ok(t, v.write("first"))
	bulk, err := os.Create(filepath.Join(v.target, "bulk"))
	ok(t, err)
	text := data("bulk")
	for i := range 768 {
		_, err := bulk.Write(binary.LittleEndian.AppendUint64(text[8:], uint64(i)))
		ok(t, err)
	}
	ok(t, errors.Join(bulk.Sync(), bulk.Close()))

	snapshots := filepath.Join(p.Dir, "pool/snapshots")
	for try := 0; ; try++ {
		type answer struct {
			id  string
			err error
		}
		interrupted := make(chan answer, 1)
		go func() {
			r, err := p.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "snapshot", SourceVolumeId: v.id})
			interrupted <- answer{r.GetSnapshot().GetSnapshotId(), err}
		}()
		var taken int64
		for deadline := time.Now().Add(2 * time.Minute); taken < 64*miB; {
			if time.Now().After(deadline) {
				t.Fatal("the copy does not begin")
			}
			images, _ := filepath.Glob(snapshots + "/*.img")
			for _, image := range images {
				var st unix.Stat_t
				if unix.Stat(image, &st) == nil {
					taken = st.Blocks * 512
				}
			}
		}
		p.Kill()
		ended := <-interrupted
		if status.Code(ended.err) != codes.Unavailable && (ended.err != nil || try == 9) {
			t.Fatalf("the copy was over before the kill, or ended in another way: %v", ended.err)
		}
		p.start()
		if ended.err != nil {
			break
		}
		// This process stood still for as long as the copy took.
		_, err := p.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: ended.id})
		ok(t, err)
	}
	written := make(chan error, 1)
	go func() { written <- v.write("second") }()
	select {
	case err := <-written:
		ok(t, err)
	case <-time.After(time.Minute):
		t.Errorf("the filesystem is still frozen after a restart: %s", p.frozen())
		<-written
	}
	if left, _ := os.ReadDir(snapshots); len(left) > 0 {
		t.Errorf("the unfinished copy is still there: %v", left)
	}
	listed, err := p.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{})
	ok(t, err)
	if len(listed.GetEntries()) > 0 {
		t.Errorf("an unfinished snapshot is listed: %v", listed)
	}
	ok(t, v.holds("second"))

	// The retry makes it, of what is there now: little, so that it is quick.
	ok(t, os.Remove(bulk.Name()))
	if out, err := exec.Command("fstrim", v.target).CombinedOutput(); err != nil {
		t.Errorf("fstrim: %v: %s", err, out)
	}
	response, err := p.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "snapshot", SourceVolumeId: v.id})
	ok(t, err)
	ok(t, v.write("third"))
	_, err = p.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: response.GetSnapshot().GetSnapshotId()})
	ok(t, err)
	ok(t, v.down(t.Context()))
	p.empty()
}
