// Package power takes the power away from the disk below the pools, at any moment, with what
// was not flushed lost, or there in any part, and looks at what the driver makes of the rest:
// whatever was promised has to be there, and nothing else.
package power

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
)

const (
	disk = "ashlar-disk" // name of the one disk of these tests, whatever is below it
	pool = "default"     // name of the pool
)

// recording is what became of a disk while volumes lived on it.
type recording struct {
	environment
	steps  []step
	events []event // of the steps that were done; event i has the mark i+2, the first one is that of the empty disk
	rebuilt
	device string // of the rebuilt disk
	spare  string // device that takes what is written to a rebuilt disk
}

// record lets volumes live on a disk, and returns what was written to it when.
func record(t *testing.T, g environment, random *rand.Rand) *recording {
	t.Helper()
	r := &recording{environment: g}
	r.steps = interleaved(lives(random), random)
	log, logDevice := image(t, 4<<30)
	r.log = log
	t.Run("work", func(t *testing.T) {
		file, device := image(t, g.size)
		dirty(t, file, g.size)
		l := &logged{t: t, name: disk}
		top := mapped(t, disk, g.size, "log-writes", device, logDevice)
		t.Cleanup(func() { drivertest.Run(t, "dmsetup", "remove", "--retry", disk) })
		g.prepare(t, top)
		l.ack()
		h := r.start(t, top)
		for _, s := range r.steps {
			check.OK(t, h.do(s))
			e := event{step: s}
			if s.verb == up {
				var err error
				e.identity, err = h.identity(h.known.volumes[s.name])
				check.OK(t, err)
			}
			l.ack()
			r.events = append(r.events, e)
		}
		check.OK(t, h.shutdown())
	})
	if t.Failed() {
		t.FailNow()
	}
	var err error
	r.epochs, err = readLog(log)
	check.OK(t, err)
	r.disk, r.device = image(t, g.size)
	dirty(t, r.disk, g.size)
	_, r.spare = image(t, 2*g.size)
	return r
}

// machine is a driver over a disk that was just switched on.
type machine struct {
	*caller
	t    testing.TB
	dir  string
	g    environment
	down func() error
}

// start boots a machine from a disk; nothing of it is known yet.
func (g environment) start(t testing.TB, device string) *machine {
	t.Helper()
	h := &machine{t: t, dir: drivertest.Dir(t), g: g}
	t.Cleanup(h.clear)
	var url string
	url, h.down = g.boot(t, device, h.dir)
	h.caller = &caller{Driver: drivertest.Start(t, drivertest.Options{Dir: h.dir, Pools: []string{pool + "=" + url}}), known: newModel(), secret: g.secret}
	return h
}

// shutdown ends the driver and what the boot brought up; no volume may be in use any more.
func (h *machine) shutdown() error {
	h.Stop()
	err := h.down()
	if err == nil {
		h.down = nil
	}
	return err
}

// clear takes down by force what a failed test left.
func (h *machine) clear() {
	if h.down == nil {
		return
	}
	if h.caller != nil {
		h.Stop()
	}
	left := drivertest.Leftovers(h.dir)
	for _, line := range slices.Backward(left) {
		if path, ok := strings.CutPrefix(line, "mount "); ok && path != filepath.Join(h.dir, "disk") {
			_ = unix.Unmount(path, unix.MNT_DETACH)
		}
	}
	if err := h.down(); err != nil {
		h.t.Logf("shut down after the failure: %v", err)
	}
}

// try cuts the power, boots, and says what is wrong then.
func (r *recording) try(t testing.TB, c cut) error {
	t.Helper()
	check.OK(t, r.advance(c.epoch))
	top := mapped(t, disk, r.size, "snapshot", r.device, r.spare, "N", "8")
	t.Cleanup(func() { drivertest.Run(t, "dmsetup", "remove", "--retry", disk) })
	f, err := os.OpenFile(top, os.O_RDWR, 0)
	check.OK(t, err)
	acked, err := c.last(r.epochs[c.epoch], f, r.log)
	check.OK(t, errors.Join(err, f.Sync(), f.Close()))

	done := cmp.Or(c.claimed, acked-1) // the first mark is that of the empty disk
	h := r.start(t, top)
	h.known = after(r.events[:done])
	var pending *step
	if done < len(r.steps) {
		pending = &r.steps[done]
	}
	if err := h.survived(pending); err != nil {
		return fmt.Errorf("after %d steps, the last %s, with %v in flight: %w", done, last(r.steps[:done]), pending, err)
	}
	return h.shutdown()
}

func last(steps []step) string {
	if len(steps) == 0 {
		return "none"
	}
	return steps[len(steps)-1].String()
}

// survived makes sure that what was promised is there, and nothing else; that the call that
// was in flight can be made again, as a sidecar does; and that all can be taken away again
// without a trace.
func (h *machine) survived(pending *step) error {
	for _, v := range h.known.volumes {
		v.up = false // it was the machine that went down
	}
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	defer cancel()
	if err := h.listed(ctx, pending); err != nil {
		return err
	}
	if pending != nil {
		switch pending.verb {
		case up, down: // the whole of it is done below
		case fill:
			v := h.known.volumes[pending.name]
			v.maybe = map[int64]stamp{}
			for _, b := range pending.blocks {
				v.maybe[b] = stamp{pending.name, pending.seed}
			}
		default:
			if err := h.do(*pending); err != nil {
				return fmt.Errorf("the retry: %w", err)
			}
			if err := h.listed(ctx, nil); err != nil {
				return fmt.Errorf("after the retry: %w", err)
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(h.known.volumes)) {
		if err := h.intact(ctx, h.known.volumes[name]); err != nil {
			return err
		}
	}
	for i, name := range slices.Sorted(maps.Keys(h.known.snapshots)) {
		s := h.known.snapshots[name]
		restore := step{verb: create, name: fmt.Sprint("check-", i), of: name, kind: s.kind, size: s.size}
		if err := h.do(restore); err != nil {
			return fmt.Errorf("snapshot %s: %w", name, err)
		}
		if err := h.intact(ctx, h.known.volumes[restore.name]); err != nil {
			return fmt.Errorf("snapshot %s: %w", name, err)
		}
	}
	fresh := step{verb: create, name: "fresh", kind: block, size: 16 * miB}
	if err := h.do(fresh); err != nil {
		return err
	}
	if err := h.intact(ctx, h.known.volumes[fresh.name]); err != nil {
		return err
	}
	return h.emptied(ctx)
}

// listed makes sure that the driver lists what is known, and nothing else but what a call in
// flight may have made or removed.
func (h *machine) listed(ctx context.Context, pending *step) error {
	var p step
	if pending != nil {
		p = *pending
	}
	volumes, err := h.ListVolumes(ctx, &csi.ListVolumesRequest{})
	if err != nil {
		return err
	}
	have := map[string]int64{}
	for _, entry := range volumes.GetEntries() {
		have[entry.GetVolume().GetVolumeId()] = entry.GetVolume().GetCapacityBytes()
	}
	for name, v := range h.known.volumes {
		size, there := have[v.id()]
		delete(have, v.id())
		switch {
		case !there && (p.verb != remove || p.name != name):
			return fmt.Errorf("volume %s is not listed", name)
		case there && size != v.size && (p.verb != expand || p.name != name || size != p.size):
			return fmt.Errorf("volume %s has %d bytes, not %d", name, size, v.size)
		}
	}
	if p.verb == create {
		delete(have, drivertest.VolumeID(p.name))
	}
	for id := range have {
		return fmt.Errorf("volume %s is listed, and nobody has it", id)
	}

	snapshots, err := h.ListSnapshots(ctx, &csi.ListSnapshotsRequest{})
	if err != nil {
		return err
	}
	type key struct{ id, group string }
	cuts := map[key]bool{}
	members := map[string]int{}
	for _, entry := range snapshots.GetEntries() {
		s := entry.GetSnapshot()
		if !s.GetReadyToUse() {
			return fmt.Errorf("snapshot %s is listed, and not ready", s)
		}
		k := key{s.GetSnapshotId(), ""}
		if group := s.GetGroupSnapshotId(); group != "" {
			k = key{s.GetSourceVolumeId(), group}
			members[group]++
		}
		cuts[k] = true
	}
	for name, s := range h.known.snapshots {
		k := key{drivertest.SnapshotID(name), ""}
		if s.group != "" {
			k = key{drivertest.VolumeID(s.of), drivertest.GroupID(s.group)}
		}
		if !cuts[k] && (p.verb != forget || p.name != name) && (p.verb != disband || p.name != s.group) {
			return fmt.Errorf("snapshot %s is not listed", name)
		}
		delete(cuts, k)
	}
	switch p.verb {
	case snapshot:
		delete(cuts, key{drivertest.SnapshotID(p.name), ""})
	case together:
		if n := members[drivertest.GroupID(p.name)]; n != 0 && n != len(p.members) {
			return fmt.Errorf("group snapshot %s has %d of %d members", p.name, n, len(p.members))
		}
		maps.DeleteFunc(cuts, func(k key, _ bool) bool { return k.group == drivertest.GroupID(p.name) })
	}
	for k := range cuts {
		return fmt.Errorf("snapshot %v is listed, and nobody has it", k)
	}
	return nil
}

// intact brings a volume up, looks at all that is in it, and takes it down.
func (h *machine) intact(ctx context.Context, v *vol) error {
	if err := h.do(step{verb: up, name: v.name}); err != nil {
		return err
	}
	have, err := h.identity(v)
	if err == nil && v.identity != nil && have != v.identity {
		err = fmt.Errorf("volume %s has another filesystem (%v) than it had (%v)", v.name, have, v.identity)
	}
	if err == nil {
		err = h.holds(v)
	}
	return errors.Join(err, h.do(step{verb: down, name: v.name}))
}

// emptied deletes all there is, and makes sure that nothing is left of it.
func (h *machine) emptied(ctx context.Context) error {
	for _, name := range slices.Sorted(maps.Keys(h.known.snapshots)) {
		s := h.known.snapshots[name]
		if s == nil {
			continue // it went with its group
		}
		gone := step{verb: forget, name: name}
		if s.group != "" {
			gone = step{verb: disband, name: s.group}
		}
		if err := h.do(gone); err != nil {
			return err
		}
	}
	for _, name := range slices.Sorted(maps.Keys(h.known.volumes)) {
		if err := h.do(step{verb: remove, name: name}); err != nil {
			return err
		}
	}
	if err := h.listed(ctx, nil); err != nil {
		return fmt.Errorf("with all deleted: %w", err)
	}
	if left := h.g.left(h.t, h.dir); len(left) > 0 {
		return fmt.Errorf("left of what was deleted: %v", left)
	}
	return nil
}

func number(name string, otherwise uint64) uint64 {
	if n, err := strconv.ParseUint(os.Getenv(name), 10, 64); err == nil {
		return n
	}
	return otherwise
}

// TestPowerLoss records what is written while volumes live, and cuts the power POWER_CUTS
// times for each kind of disk. POWER_SEED repeats the volumes' lives and the cuts of a run, as
// far as the kernel writes the same. A sample (SAMPLE=1) has a third of the kinds, another one each day.
func TestPowerLoss(t *testing.T) {
	today := int(time.Now().Unix() / 86400)
	for i, g := range environments {
		if os.Getenv("SAMPLE") == "1" && i%3 != today%3 {
			continue
		}
		t.Run(g.name, func(t *testing.T) {
			drivertest.NeedLVM(t)
			drivertest.SetUpLVM(t, `"a|^/dev/mapper/`+disk+`$|"`)
			seed := number("POWER_SEED", uint64(time.Now().UnixNano()))
			began := time.Now()
			random := rand.New(rand.NewPCG(seed, 0))
			r := record(t, g, random)
			recorded := time.Since(began)
			trials := cuts(r.epochs, int(number("POWER_CUTS", 4)), random)
			if g.name == environments[0].name {
				trials = append(trials, r.lies()...)
			}
			slices.SortStableFunc(trials, func(a, b cut) int { return cmp.Compare(a.epoch, b.epoch) })
			count := map[fate]int{}
			for _, c := range trials {
				count[c.fate]++
				if t.Run(strings.ReplaceAll(c.String(), " ", "_"), func(t *testing.T) {
					err := r.try(t, c)
					if c.fate != lost {
						check.OK(t, err)
					} else if err == nil {
						t.Errorf("a disk that lost what %q promised was taken for whole", r.steps[c.claimed-1])
					} else {
						t.Logf("a disk that lost what %q promised is found out: %v", r.steps[c.claimed-1], err)
					}
				}) {
					continue
				}
				t.Errorf("to repeat it: POWER_SEED=%d", seed)
			}
			fmt.Printf("power loss on %s: %d steps, %d flushes, recorded in %.1f s; %d cuts of the power in %.1f s (%v), %d groups repaired, POWER_SEED=%d\n", g.name, len(r.steps), len(r.epochs)-1,
				recorded.Seconds(), len(trials), (time.Since(began) - recorded).Seconds(), count, repairs, seed)
		})
	}
}

// lies are cuts after which the disk has lost all of the first step of each kind that was
// done, as one does that says that it has flushed and has not. Each has to be noticed: so the
// checks themselves are checked.
func (r *recording) lies() []cut {
	var lies []cut
	seen := map[verb]bool{down: true} // it promises nothing
	for i, s := range r.steps {
		if seen[s.verb] || (s.verb == up && s.name != "fs") {
			continue // a raw device has no filesystem that could be lost
		}
		seen[s.verb] = true
		before := slices.IndexFunc(r.epochs, func(e epoch) bool { return e.acked > i })
		lies = append(lies, cut{epoch: before, fate: lost, claimed: i + 1})
	}
	return lies
}
