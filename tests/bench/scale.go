package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/ashlar-csi/ashlar/internal/capability"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/tests/figures"
)

const (
	scaleSize      = 16 << 20
	scaleSnapshots = 12 // that stand all the time, so that a page of 10 is full
)

// scale has few volumes published, then many, then few again, and measures every call
// each time; with many of them also what the driver takes to just be there.
func (b *bench) scale(ctx context.Context, calls, memory, idle bool) error {
	s := &scaled{b: b, dir: filepath.Join(b.dir, "scale"), calls: calls, grows: capability.Has(unix.CAP_SYS_RESOURCE)}
	if _, err := s.start(ctx, "just started, no volume"); err != nil {
		return err
	}
	defer func() { s.d.stop() }()
	var err error
	if s.bare, err = newFloor(filepath.Join(s.dir, "floor"), scaleSize, true); err != nil {
		return err
	}
	var phases [3]*phase
	var used usage
	var restart time.Duration
	if err := co.InTurn(
		func() error { return s.resize(ctx, few) },
		func() error { return s.standingSnapshots(ctx) },
		func() (err error) { phases[0], err = s.measure(ctx); return err },
		func() error { return s.resize(ctx, b.volumes) },
		func() error { s.weigh(fmt.Sprintf("%d volumes published", b.volumes)); return nil },
		func() (err error) { used, err = s.idle(ctx, idle); return err },
		func() (err error) { phases[1], err = s.measure(ctx); return err },
		func() (err error) {
			s.weigh("the same, after every call was made many times")
			s.d.stop()
			restart, err = s.start(ctx, fmt.Sprintf("started anew, %d volumes published", b.volumes))
			return err
		},
		func() error { return s.resize(ctx, few) },
		func() (err error) { phases[2], err = s.measure(ctx); return err },
		func() error { return s.resize(ctx, 0) }); err != nil {
		return s.d.failed(err)
	}
	if calls {
		if err := s.report(phases); err != nil {
			return err
		}
	}
	if memory {
		fmt.Printf("\n## Memory\n\nOf the driver's process, in MiB; the goal is an RSS of less than 40 with %d volumes published. RssAnon is the part that is\nnot the program's own file.\n", b.volumes)
		figures.Table([]string{"when", "VmRSS", "RssAnon", "threads"}, s.weights)
		fmt.Printf("\nA driver that is started with %d volumes published is ready after %s.\n", b.volumes, restart.Round(time.Millisecond))
	}
	if idle {
		fmt.Printf("\n## Idle\n\n%d volumes published and no call, for %s: %.2f ms of CPU time, %d context switches.\n", b.volumes, idleTime, float64(used.cpu)/1e6, used.switches)
	}
	return nil
}

// start starts the driver, and returns how long that took.
func (s *scaled) start(ctx context.Context, when string) (took time.Duration, err error) {
	began := time.Now()
	d, err := s.b.start(ctx, s.dir, "?reservePercent=0&overprovision=100")
	if err != nil {
		return 0, err
	}
	s.d, took = d, time.Since(began)
	s.weigh(when)
	return took, nil
}

// weigh makes a row of the memory that the driver has.
func (s *scaled) weigh(when string) {
	u := s.d.usage()
	s.weights = append(s.weights, []string{when, fmt.Sprintf("%.1f", float64(u.rss)/1024), fmt.Sprintf("%.1f", float64(u.anon)/1024), fmt.Sprint(u.threads)})
}

// idleTime is how long a driver is watched that has nothing to do.
const idleTime = 5 * time.Second

// idle returns what a driver uses that has nothing to do, if that is wanted.
func (s *scaled) idle(ctx context.Context, wanted bool) (used usage, err error) {
	if !wanted {
		return used, nil
	}
	progress("idle: watching the driver for %s", idleTime)
	if err := sleep(ctx, 2*time.Second); err != nil {
		return used, err
	}
	before := s.d.usage()
	if err := sleep(ctx, idleTime); err != nil {
		return used, err
	}
	after := s.d.usage()
	return usage{cpu: after.cpu - before.cpu, switches: after.switches - before.switches}, nil
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// scaled is a driver with some volumes published.
type scaled struct {
	b       *bench
	dir     string
	d       *driver // once it was started
	weights [][]string
	calls   bool // they are measured
	bare    *floor
	volumes []*volume
	made    int
	grows   bool // ext4 grows while it is mounted
}

// phase is what was measured with one number of volumes.
type phase struct{ calls, steps recorder }

// resize publishes volumes, or takes the last ones away, until there are n.
func (s *scaled) resize(ctx context.Context, n int) error {
	progress("scale: from %d volumes to %d", len(s.volumes), n)
	began := time.Now()
	var r recorder
	for len(s.volumes) < n {
		s.volumes = append(s.volumes, s.d.newVolume(fmt.Sprintf("standing-%d", len(s.volumes)), scaleSize, true, false))
	}
	var work []func() error
	for _, v := range s.volumes {
		v.Client = s.d.Client // it may have been started anew
		if v.ID == "" {
			work = append(work, func() error { return v.up(ctx, &r) })
		}
	}
	for _, v := range slices.Backward(s.volumes[min(n, len(s.volumes)):]) {
		work = append(work, func() error { return v.down(ctx, &r) })
	}
	if err := atOnce(ctx, 4, work); err != nil {
		return err
	}
	progress("scale: that took %s", time.Since(began).Round(time.Second))
	s.volumes = s.volumes[:n]
	return nil
}

// atOnce does work, n pieces of it at a time, in its order, up to the first error.
func atOnce(ctx context.Context, n int, work []func() error) error {
	var next atomic.Int64
	return block(ctx, 1, n, func(int) error {
		for i := next.Add(1) - 1; i < int64(len(work)) && ctx.Err() == nil; i = next.Add(1) - 1 {
			if err := work[i](); err != nil {
				next.Store(int64(len(work))) // the others do no more
				return err
			}
		}
		return ctx.Err()
	})
}

// standingSnapshots are of the first volume; clean takes them away.
func (s *scaled) standingSnapshots(ctx context.Context) error {
	for i := range scaleSnapshots {
		if _, err := s.volumes[0].Snapshot(ctx, fmt.Sprintf("standing-%d", i)); err != nil {
			return err
		}
	}
	return nil
}

// measure makes every call, as often as there are to be samples, and takes the steps of
// the floor in between.
func (s *scaled) measure(ctx context.Context) (*phase, error) {
	if !s.calls {
		return nil, nil
	}
	progress("scale: measuring every call with %d volumes published", len(s.volumes))
	p := &phase{}
	staged := filepath.Join(s.bare.dir, "staged")
	if err := os.MkdirAll(staged, 0o750); err != nil {
		return nil, err
	}
	for range s.b.samples {
		s.made++
		if err := s.round(ctx, &p.calls); err != nil {
			return nil, err
		}
		if err := s.bare.life(ctx, fmt.Sprintf("image-%d", s.made), staged, filepath.Join(s.bare.dir, "published"), &p.steps, nil); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// round makes every call at least once.
func (s *scaled) round(ctx context.Context, r *recorder) error {
	v, block := s.d.newVolume("probe", scaleSize, true, false), s.d.newVolume("probe-block", scaleSize, true, true)
	v.request.Name, block.request.Name = s.name("probe"), s.name("probe-block")
	if err := co.InTurn(func() error { return v.up(ctx, r) }, func() error { return block.up(ctx, r) }); err != nil {
		return err
	}
	// Those that only look are quick, and so they are made more often.
	for range 5 {
		if err := r.all(s.looks(ctx, v)...); err != nil {
			return err
		}
	}
	restored, clone, err := s.copies(ctx, v, r)
	if err != nil {
		return err
	}
	expand := func(v *volume) func() error { return func() error { return v.NodeExpand(ctx, v.target) } }
	steps := []step{
		{"NodeExpandVolume (nothing to grow)", expand(v)},
		{"ControllerExpandVolume", func() error { return v.Expand(ctx, 2*scaleSize) }},
		{"NodeExpandVolume (block)", expand(block)},
		// Last of the calls that look, for what it may leave behind in caches.
		{"ControllerListVolumeHealth (10)", call(ctx, s.d.ControllerListVolumeHealth, &csi.ControllerListVolumeHealthRequest{MaxEntries: 10})},
	}
	if s.grows {
		steps = append(steps, step{"NodeExpandVolume", expand(v)})
	}
	if err := r.all(steps...); err != nil {
		return err
	}
	return errors.Join(v.down(ctx, r), block.down(ctx, r), r.all(restored.deletion(ctx), clone.deletion(ctx)))
}

// name of an object of this round.
func (s *scaled) name(what string) string { return fmt.Sprintf("%s-%d", what, s.made) }

// call is a call of which only the time counts.
func call[Request, Response any](ctx context.Context, do func(context.Context, Request, ...grpc.CallOption) (Response, error), request Request) func() error {
	return func() error {
		_, err := do(ctx, request)
		return err
	}
}

// looks are the calls that change nothing.
func (s *scaled) looks(ctx context.Context, v *volume) []step {
	d := s.d
	return []step{
		{"GetPluginInfo", call(ctx, d.GetPluginInfo, &csi.GetPluginInfoRequest{})},
		{"GetPluginCapabilities", call(ctx, d.GetPluginCapabilities, &csi.GetPluginCapabilitiesRequest{})},
		{"Probe", call(ctx, d.Probe, &csi.ProbeRequest{})},
		{"ControllerGetCapabilities", call(ctx, d.ControllerGetCapabilities, &csi.ControllerGetCapabilitiesRequest{})},
		{"ControllerGetVolume", call(ctx, d.ControllerGetVolume, &csi.ControllerGetVolumeRequest{VolumeId: v.ID})},
		{"ValidateVolumeCapabilities", call(ctx, d.ValidateVolumeCapabilities, &csi.ValidateVolumeCapabilitiesRequest{VolumeId: v.ID, VolumeCapabilities: v.request.GetVolumeCapabilities()})},
		{"ListVolumes (10)", func() error {
			l, err := d.ListVolumes(ctx, &csi.ListVolumesRequest{MaxEntries: 10})
			return want(err, len(l.GetEntries()), 10)
		}},
		{"ListSnapshots (10)", func() error {
			l, err := d.ListSnapshots(ctx, &csi.ListSnapshotsRequest{MaxEntries: 10})
			return want(err, len(l.GetEntries()), 10)
		}},
		{"GetCapacity", call(ctx, d.GetCapacity, &csi.GetCapacityRequest{})},
		{"ControllerGetVolumeHealth", func() error {
			h, err := d.ControllerGetVolumeHealth(ctx, &csi.ControllerGetVolumeHealthRequest{VolumeId: v.ID})
			return want(err, len(h.GetVolumeHealth().GetHealthStatuses()), 0)
		}},
		{"GroupControllerGetCapabilities", call(ctx, d.GroupControllerGetCapabilities, &csi.GroupControllerGetCapabilitiesRequest{})},
		{"NodeGetInfo", call(ctx, d.NodeGetInfo, &csi.NodeGetInfoRequest{})},
		{"NodeGetCapabilities", call(ctx, d.NodeGetCapabilities, &csi.NodeGetCapabilitiesRequest{})},
		{"NodeGetVolumeStats", call(ctx, d.NodeGetVolumeStats, &csi.NodeGetVolumeStatsRequest{VolumeId: v.ID, VolumePath: v.target})},
		{"NodeGetVolumeHealth", call(ctx, d.NodeGetVolumeHealth, &csi.NodeGetVolumeHealthRequest{VolumeId: v.ID})},
		{"NodeGetStorageHealth", call(ctx, d.NodeGetStorageHealth, &csi.NodeGetStorageHealthRequest{})},
	}
}

// copies modifies a volume, and makes a snapshot, a group, and the volumes that it returns from it.
func (s *scaled) copies(ctx context.Context, v *volume, r *recorder) (restored, clone *volume, err error) {
	d := s.d
	var snapshot *csi.Snapshot
	var group *csi.VolumeGroupSnapshot
	if err := r.all(
		step{"ControllerModifyVolume", call(ctx, d.ControllerModifyVolume, &csi.ControllerModifyVolumeRequest{VolumeId: v.ID, MutableParameters: map[string]string{"readAheadKiB": "256"}})},
		step{"CreateSnapshot", func() (err error) { snapshot, err = v.Snapshot(ctx, s.name("probe")); return err }},
		step{"GetSnapshot", func() error {
			return call(ctx, d.GetSnapshot, &csi.GetSnapshotRequest{SnapshotId: snapshot.GetSnapshotId()})()
		}},
		step{"CreateVolumeGroupSnapshot (2)", func() (err error) {
			group, err = d.Group(ctx, s.name("group"), s.volumes[0].ID, s.volumes[1].ID)
			return err
		}},
		step{"GetVolumeGroupSnapshot", func() error {
			return call(ctx, d.GetVolumeGroupSnapshot, &csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: group.GetGroupSnapshotId()})()
		}},
		step{"DeleteVolumeGroupSnapshot", func() error { return d.RemoveGroup(ctx, group.GetGroupSnapshotId()) }},
	); err != nil {
		return nil, nil, err
	}
	restored, clone = v.made(s.name("restored")), v.made(s.name("clone"))
	co.FromSnapshot(restored.request, snapshot.GetSnapshotId())
	co.FromVolume(clone.request, v.ID)
	return restored, clone, r.all(restored.creation(ctx), clone.creation(ctx),
		step{"DeleteSnapshot", func() error { return d.RemoveSnapshot(ctx, snapshot.GetSnapshotId()) }})
}

func want(err error, have, want int) error {
	if err == nil && have != want {
		err = fmt.Errorf("%d entries, want %d", have, want)
	}
	return err
}

// service is where a call belongs in the table.
func service(call string) int {
	switch {
	case strings.HasPrefix(call, "GetPlugin"), call == "Probe":
		return 0
	case strings.HasPrefix(call, "Node"):
		return 3
	case strings.Contains(call, "Group"):
		return 2
	}
	return 1
}

func (s *scaled) report(phases [3]*phase) error {
	const goal = 1.3
	many := s.b.volumes
	fmt.Printf("\n## Many volumes\n\nEvery call with %d and with %d ext4 volumes of %d MiB (thin) published, in ms: median (p10..p90); first %d volumes, then %d,\n"+
		"then %d again. *Ratio* is that of the medians, %d over %d (goal: at most %.1f); *same* is the second time with %d over the\n"+
		"first, so what a ratio is when nothing is different but the time; *floor* is the ratio of the same work done by bare\n"+
		"system calls, so what is the kernel's own.\n", few, many, scaleSize>>20, few, many, few, many, few, goal, few)
	var rows [][]string
	var over []string
	chart := figures.Chart{Name: "scale", Title: fmt.Sprintf("Each call with %d and with %d volumes published", few, many), Unit: "ms: median, and p10 to p90", Log: true,
		Series: []figures.Series{{Name: fmt.Sprintf("%d volumes", few)}, {Name: fmt.Sprintf("%d volumes", many)}}}
	names := slices.Clone(phases[0].calls.names)
	slices.SortStableFunc(names, func(a, b string) int { return service(a) - service(b) })
	for _, name := range names {
		first, second, last := phases[0].calls.samples[name], phases[1].calls.samples[name], phases[2].calls.samples[name]
		both := slices.Concat(first, last)
		growth := ratio(figures.Median(second), figures.Median(both))
		bare := "-"
		call, _, _ := strings.Cut(name, " (")
		if steps := floorOf[call]; steps != nil && call == name {
			var a, b time.Duration
			for _, step := range steps {
				a += figures.Median(phases[1].steps.samples[step])
				b += figures.Median(slices.Concat(phases[0].steps.samples[step], phases[2].steps.samples[step]))
			}
			bare = fmt.Sprintf("%.2f", ratio(a, b))
		}
		if growth > goal {
			over = append(over, fmt.Sprintf("%s (%.2f)", name, growth))
		}
		rows = append(rows, []string{name, fmt.Sprint(len(second)), spread(both), spread(second), fmt.Sprintf("%.2f", growth), fmt.Sprintf("%.2f", ratio(figures.Median(last), figures.Median(first))), bare})
		chart.Add(name, figures.Milliseconds(both), figures.Milliseconds(second))
	}
	figures.Table([]string{"call", "samples", fmt.Sprintf("%d volumes", few), fmt.Sprintf("%d volumes", many), "ratio", "same", "floor"}, rows)
	if err := s.b.draws.Draw(chart); err != nil {
		return err
	}
	if !s.grows {
		fmt.Printf("\nThis process has no CAP_SYS_RESOURCE, without which ext4 does not grow while it is mounted: left out.\n")
	}
	if len(over) == 0 {
		fmt.Printf("\nNo call is over the goal.\n")
	} else {
		fmt.Printf("\nOver the goal: %s.\n", strings.Join(over, ", "))
	}
	s.reportFloor(phases)
	return nil
}

// reportFloor shows how the kernel's own part grows.
func (s *scaled) reportFloor(phases [3]*phase) {
	fmt.Printf("\nThe kernel's own, by bare system calls with the same volumes around, in ms:\n")
	var rows [][]string
	for _, step := range phases[0].steps.names {
		first, second, last := phases[0].steps.samples[step], phases[1].steps.samples[step], phases[2].steps.samples[step]
		both := slices.Concat(first, last)
		rows = append(rows, []string{strings.ReplaceAll(step, "fallocate", "ftruncate"), spread(both), spread(second), fmt.Sprintf("%.2f", ratio(figures.Median(second), figures.Median(both))), fmt.Sprintf("%.2f", ratio(figures.Median(last), figures.Median(first)))})
	}
	figures.Table([]string{"step", fmt.Sprintf("%d volumes", few), fmt.Sprintf("%d volumes", s.b.volumes), "ratio", "same"}, rows)
}
