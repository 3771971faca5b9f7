// Package crash kills the driver, the real program, at moments that nobody chose, and
// looks at what is left: every byte that was written, and nothing else.
package crash

import (
	"context"
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

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/process"
)

const miB = 1 << 20

// program is the driver, once a test has asked for it.
var program struct {
	sync.Once
	dir, path string
	err       error
}

func TestMain(m *testing.M) {
	if path := os.Getenv(thawing); path != "" {
		os.Exit(freezeAndThaw(path))
	}
	code := m.Run()
	_ = os.RemoveAll(program.dir)
	os.Exit(code)
}

// built builds the driver, once for all tests, and returns its path.
func built(t testing.TB) string {
	t.Helper()
	program.Do(func() {
		if program.dir, program.err = os.MkdirTemp("", "ashlar"); program.err == nil {
			program.path, program.err = process.Build(program.dir)
		}
	})
	check.OK(t, program.err)
	return program.path
}

// environment is a driver as a process of its own, and its volumes.
type environment struct {
	*process.Driver
	t testing.TB
}

// build returns a driver that does not run yet, in a directory of its own.
func build(t testing.TB) *environment {
	t.Helper()
	drivertest.NeedRoot(t)
	dir := drivertest.Dir(t)
	binary := built(t)
	driver, err := process.New(dir, drivertest.Node, binary, "--pool=default=file://"+dir+"/pool?reservePercent=0", "-v=5")
	check.OK(t, err)
	t.Cleanup(func() {
		driver.Close()
		if t.Failed() { // no frozen filesystem and no mount stays on the machine
			drivertest.ClearAway(dir)
		}
	})
	return &environment{driver, t}
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
func (p *environment) start() {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), time.Minute)
	defer cancel()
	check.OK(p.t, p.Start())
	check.OK(p.t, p.Ready(ctx))
}

// lives takes volumes through their lives, over and over, with all calls repeated until
// they succeed, and checks the data all along.
type lives struct {
	patient *co.Client
	name    string
	done    int
}

var kinds = []string{"ext4", "block", "xfs", "btrfs"}

func sizeOf(kind string) int64 {
	return map[string]int64{"ext4": 24 * miB, "block": 16 * miB, "xfs": 300 * miB, "btrfs": 256 * miB}[kind]
}

// volume is one of a life.
type volume struct{ *co.Volume }

// create makes a volume: by turns a thick and a thin one.
func (l *lives) create(ctx context.Context, r *csi.CreateVolumeRequest) (volume, error) {
	r.Parameters = map[string]string{"provisioning": []string{"thick", "thin"}[l.done%2]}
	v, err := l.patient.Create(ctx, r)
	return volume{v}, err
}

func (v volume) up(ctx context.Context) error {
	_, err := v.Up(ctx)
	return err
}

func (v volume) down(ctx context.Context) error {
	return co.InTurn(func() error { return v.Down(ctx, v.Target("pod")) }, func() error { return v.Delete(ctx) })
}

func content(seed string) drivertest.Content {
	return drivertest.Content{Seed: seed, Offset: 2 * miB, Size: miB}
}

func (v volume) write(seed string) error { return content(seed).Write(v.File(v.Target("pod"))) }

func (v volume) holds(seed string) error { return content(seed).In(v.File(v.Target("pod"))) }

// one life, with a snapshot, a restore of it, a clone, growth and a group of two.
func (l *lives) one(ctx context.Context) (err error) {
	kind := kinds[l.done%len(kinds)]
	size := sizeOf(kind)
	name := func(what string) string { return fmt.Sprintf("%s-%d-%s", l.name, l.done, what) }
	step := "create"
	log, err := openKernelLog()
	if err != nil {
		return err
	}
	defer log.close()
	defer func() {
		if err != nil {
			err = fmt.Errorf("life %d of %s (%s), %s: %w", l.done, l.name, kind, step, err)
		}
		l.done++
	}()
	v, err := l.create(ctx, co.Request(name("source"), kind, size))
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
	snapshot, err := v.Snapshot(ctx, name("snapshot"))
	if err != nil {
		return err
	}
	step = "write after the snapshot (is it frozen?)"
	if err := v.rewrite(ctx, log, "first", "second"); err != nil {
		return err
	}
	step = "expand"
	larger := size + 16*miB
	if err := v.Expand(ctx, larger); err != nil {
		return err
	}
	step = "clone"
	clone, err := l.create(ctx, co.FromVolume(co.Request(name("clone"), kind, larger), v.ID))
	if err != nil {
		return err
	}
	step = "restore"
	restore, err := l.create(ctx, co.FromSnapshot(co.Request(name("restore"), kind, larger), snapshot.GetSnapshotId()))
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
	group, err := l.patient.Group(ctx, name("group"), v.ID, restore.ID)
	if err != nil {
		return err
	}
	step = "write after the group"
	if err := errors.Join(v.rewrite(ctx, log, "second", "third"), restore.rewrite(ctx, log, "first", "fourth"), v.holds("third"), restore.holds("fourth")); err != nil {
		return err
	}
	step = "ephemeral"
	if err := l.ephemeral(ctx, name("inline")); err != nil {
		return err
	}
	step = "delete the group and the snapshot"
	if err := errors.Join(l.patient.RemoveGroup(ctx, group.GetGroupSnapshotId()), l.patient.RemoveSnapshot(ctx, snapshot.GetSnapshotId())); err != nil {
		return err
	}
	step = "down"
	return errors.Join(v.down(ctx), clone.down(ctx), restore.down(ctx))
}

func (l *lives) ephemeral(ctx context.Context, name string) error {
	v := volume{l.patient.Inline(name, co.Capability("ext4", co.MultiWriter), map[string]string{"size": "16Mi"})}
	target := v.Target("pod")
	if err := v.Publish(ctx, target, false); err != nil {
		return err
	}
	return errors.Join(v.write("inline"), v.holds("inline"), v.Unpublish(ctx, target))
}

// empty makes sure that nothing is left of anything.
func (p *environment) empty() {
	p.t.Helper()
	for _, line := range drivertest.Gone(func() []string { return drivertest.Leftovers(p.Dir) }) {
		p.t.Errorf("left: %s", line)
	}
	entries, err := os.ReadDir(p.Dir)
	check.OK(p.t, err)
	for _, entry := range entries {
		if !slices.Contains([]string{"log", "pool", "csi.sock", "of-a-test", "pod", "stage"}, entry.Name()) {
			p.t.Errorf("left: %s", entry.Name())
		}
	}
	for _, dir := range []string{"pod", "stage", "pool/volumes", "pool/snapshots"} {
		entries, err := os.ReadDir(filepath.Join(p.Dir, dir))
		check.OK(p.t, err)
		for _, entry := range entries {
			p.t.Errorf("left: %s/%s", dir, entry.Name())
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
	all := []*lives{{patient: p.Patient(), name: "a"}, {patient: p.Patient(), name: "b", done: 1}}
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
func (p *environment) frozen() string {
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
	l := &lives{patient: p.Patient(), name: "group"}
	var volumes []volume
	var ids []string
	for _, name := range []string{"a", "b", "c"} {
		v, err := l.create(t.Context(), co.Request(name, "ext4", sizeOf("ext4")))
		check.OK(t, err)
		check.OK(t, v.up(t.Context()))
		volumes, ids = append(volumes, v), append(ids, v.ID)
	}
	remove := func() {
		t.Helper()
		group, err := l.patient.Group(t.Context(), "group", ids...)
		check.OK(t, err)
		check.OK(t, l.patient.RemoveGroup(t.Context(), group.GetGroupSnapshotId()))
	}
	began := time.Now()
	remove()
	whole := time.Since(began)
	rounds, limited := int(number("CRASH_ROUNDS", 10000)), os.Getenv("CRASH_ROUNDS") == ""
	round := 0
	for ; round < rounds && !(limited && time.Since(began) > 10*time.Second); round++ {
		for _, v := range volumes {
			check.OK(t, v.write(fmt.Sprint(round))) // something for the freeze to write out
		}
		cut := make(chan struct{})
		go func() {
			_, _ = p.Group(t.Context(), "group", ids...)
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
			check.OK(t, v.holds(fmt.Sprint(round)))
		}
		if round%4 == 0 {
			remove()
		}
	}
	t.Logf("%d kills within %s each", round, whole)
	remove()
	for _, v := range volumes {
		check.OK(t, v.down(t.Context()))
	}
	p.empty()
}

// TestKillWhileFrozen kills the driver in the middle of a long copy, during which the
// filesystem of its source is frozen: the next start ends that.
func TestKillWhileFrozen(t *testing.T) {
	p := build(t)
	p.start()
	l := &lives{patient: p.Patient(), name: "frozen"}
	v, err := l.create(t.Context(), co.Request("source", "ext4", 1<<30))
	check.OK(t, err)
	check.OK(t, v.up(t.Context()))
	check.OK(t, v.write("first"))
	bulk, err := os.Create(filepath.Join(v.Target("pod"), "bulk"))
	check.OK(t, err)
	text := content("bulk").Bytes()
	for i := range 768 {
		_, err := bulk.Write(binary.LittleEndian.AppendUint64(text[8:], uint64(i)))
		check.OK(t, err)
	}
	check.OK(t, errors.Join(bulk.Sync(), bulk.Close()))

	snapshots := filepath.Join(p.Dir, "pool/snapshots")
	for try := 0; ; try++ {
		interrupted := make(chan error, 1)
		go func() {
			_, err := p.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "snapshot", SourceVolumeId: v.ID})
			interrupted <- err
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
		if status.Code(ended) != codes.Unavailable && (ended != nil || try == 9) {
			t.Fatalf("the copy was over before the kill, or ended in another way: %v", ended)
		}
		p.start()
		if ended != nil {
			break
		}
		// This process stood still for as long as the copy took.
		check.OK(t, p.RemoveSnapshot(t.Context(), drivertest.SnapshotID("snapshot")))
	}
	written := make(chan error, 1)
	go func() { written <- v.write("second") }()
	select {
	case err := <-written:
		check.OK(t, err)
	case <-time.After(time.Minute):
		t.Errorf("the filesystem is still frozen after a restart: %s", p.frozen())
		<-written
	}
	if left, _ := os.ReadDir(snapshots); len(left) > 0 {
		t.Errorf("the unfinished copy is still there: %v", left)
	}
	listed, err := p.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{})
	check.OK(t, err)
	if len(listed.GetEntries()) > 0 {
		t.Errorf("an unfinished snapshot is listed: %v", listed)
	}
	check.OK(t, v.holds("second"))

	// The retry makes it, of what is there now: little, so that it is quick.
	check.OK(t, os.Remove(bulk.Name()))
	if out, err := exec.Command("fstrim", v.Target("pod")).CombinedOutput(); err != nil {
		t.Errorf("fstrim: %v: %s", err, out)
	}
	snapshot, err := v.Snapshot(t.Context(), "snapshot")
	check.OK(t, err)
	check.OK(t, v.write("third"))
	check.OK(t, p.RemoveSnapshot(t.Context(), snapshot.GetSnapshotId()))
	check.OK(t, v.down(t.Context()))
	p.empty()
}
