package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/capability"
)

const (
	scaleSize      = 16 << 20
	scaleSnapshots = 12 // that stand all the time, so that a page of 10 is full
)

// scale has few volumes published, then many, then few again, and measures every call
// each time; with many of them also what the driver takes to just be there.
func (b *bench) scale(ctx context.Context, calls, memory, idle bool) error {
	dir := filepath.Join(b.dir, "scale")
	const pool = "?reservePercent=0&overprovision=100"
	d, err := b.start(ctx, dir, pool)
	if err != nil {
		return err
	}
	defer func() { d.stop() }()
	s := &scaled{b: b, d: d, grows: capability.Has(unix.CAP_SYS_RESOURCE)}
	if s.bare, err = newFloor(filepath.Join(dir, "floor"), scaleSize, true); err != nil {
		return err
	}
	var phases [3]*phase
	var rows [][]string
	weigh := func(when string) {
		u := d.usage()
		rows = append(rows, []string{when, fmt.Sprintf("%.1f", float64(u.rss)/1024), fmt.Sprintf("%.1f", float64(u.anon)/1024), fmt.Sprint(u.threads)})
	}
	weigh("just started, no volume")
	measure := func(i int) (err error) {
		if calls {
			progress("scale: measuring every call with %d volumes published", len(s.volumes))
			phases[i], err = s.measure(ctx)
		}
		return d.failed(err)
	}
	if err := s.resize(ctx, few); err != nil {
		return d.failed(err)
	}
	if err := s.standingSnapshots(ctx); err != nil {
		return d.failed(err)
	}
	if err := measure(0); err != nil {
		return err
	}
	start := time.Now()
	if err := s.resize(ctx, b.volumes); err != nil {
		return d.failed(err)
	}
	progress("scale: %d volumes were made and published in %s", b.volumes, time.Since(start).Round(time.Second))
	weigh(fmt.Sprintf("%d volumes published", b.volumes))
	var before, after usage
	const watched = 5 * time.Second
	if idle {
		progress("idle: watching the driver for %s", watched)
		if err := sleep(ctx, 2*time.Second); err != nil {
			return err
		}
		before = d.usage()
		if err := sleep(ctx, watched); err != nil {
			return err
		}
		after = d.usage()
	}
	if err := measure(1); err != nil {
		return err
	}
	weigh("the same, after every call was made many times")
	d.stop()
	start = time.Now()
	again, err := b.start(ctx, dir, pool)
	if err != nil {
		return err
	}
	d, s.d = again, again
	restart := time.Since(start)
	weigh(fmt.Sprintf("started anew, %d volumes published", b.volumes))
	if err := s.resize(ctx, few); err != nil {
		return d.failed(err)
	}
	if err := measure(2); err != nil {
		return err
	}
	if err := s.resize(ctx, 0); err != nil {
		return d.failed(err)
	}
	if calls {
		s.report(phases)
	}
	if memory {
		fmt.Printf("\n## Memory\n\nOf the driver's process, in MiB; the goal is an RSS of less than 40 with %d volumes published. RssAnon is the part that is\nnot the program's own file.\n", b.volumes)
		table([]string{"when", "VmRSS", "RssAnon", "threads"}, rows)
		fmt.Printf("\nA driver that is started with %d volumes published is ready after %s.\n", b.volumes, restart.Round(time.Millisecond))
	}
	if idle {
		fmt.Printf("\n## Idle\n\n%d volumes published and no call, for %s: %.2f ms of CPU time, %d context switches.\n", b.volumes, watched, float64(after.cpu-before.cpu)/1e6, after.switches-before.switches)
	}
	return nil
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
	d       *driver
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
	var r recorder
	for len(s.volumes) < n {
		v, err := s.d.newVolume(fmt.Sprintf("standing-%d", len(s.volumes)), scaleSize, true, false)
		if err != nil {
			return err
		}
		s.volumes = append(s.volumes, v)
	}
	work := make(chan func() error)
	var mu sync.Mutex
	var failed error
	var workers sync.WaitGroup
	for range 4 {
		workers.Go(func() {
			for step := range work {
				if err := step(); err != nil {
					mu.Lock()
					failed = errors.Join(failed, err)
					mu.Unlock()
				}
			}
		})
	}
	put := func(step func() error) (ok bool) {
		mu.Lock()
		failed = errors.Join(failed, ctx.Err())
		ok = failed == nil
		mu.Unlock()
		if ok {
			work <- step
		}
		return ok
	}
	for _, v := range s.volumes {
		if v.id == "" && !put(func() error { return s.d.up(ctx, v, &r) }) {
			break
		}
	}
	for _, v := range slices.Backward(s.volumes[min(n, len(s.volumes)):]) {
		if !put(func() error { return s.d.down(ctx, v, &r) }) {
			break
		}
	}
	close(work)
	workers.Wait()
	if failed == nil {
		s.volumes = s.volumes[:n]
	}
	return failed
}

// standingSnapshots are of the first volume; clean takes them away.
func (s *scaled) standingSnapshots(ctx context.Context) error {
	for i := range scaleSnapshots {
		if _, err := s.d.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: fmt.Sprintf("standing-%d", i), SourceVolumeId: s.volumes[0].id}); err != nil {
			return err
		}
	}
	return nil
}

// measure makes every call, as often as there are to be samples, and takes the steps of
// the floor in between.
func (s *scaled) measure(ctx context.Context) (*phase, error) {
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
	d := s.d
	name := func(what string) string { return fmt.Sprintf("%s-%d", what, s.made) }
	v, err := d.newVolume("probe", scaleSize, true, false)
	if err != nil {
		return err
	}
	block, err := d.newVolume("probe-block", scaleSize, true, true)
	if err != nil {
		return err
	}
	v.name, block.name = name("probe"), name("probe-block")
	// The calls come in the order of steps; each may use what the ones before have made.
	var snapshot, group string
	type step struct {
		name string
		call func() error
	}
	all := func(steps ...step) error {
		for _, one := range steps {
			if err := r.time(one.name, one.call); err != nil {
				return err
			}
		}
		return nil
	}
	if err := d.up(ctx, v, r); err != nil {
		return err
	}
	if err := d.up(ctx, block, r); err != nil {
		return err
	}
	// Those that only look are quick, and so they are made more often.
	for range 5 {
		if err := all(
			step{"GetPluginInfo", func() error { _, err := d.GetPluginInfo(ctx, &csi.GetPluginInfoRequest{}); return err }},
			step{"GetPluginCapabilities", func() error {
				_, err := d.GetPluginCapabilities(ctx, &csi.GetPluginCapabilitiesRequest{})
				return err
			}},
			step{"Probe", func() error { _, err := d.Probe(ctx, &csi.ProbeRequest{}); return err }},
			step{"ControllerGetCapabilities", func() error {
				_, err := d.ControllerGetCapabilities(ctx, &csi.ControllerGetCapabilitiesRequest{})
				return err
			}},
			step{"ControllerGetVolume", func() error {
				_, err := d.ControllerGetVolume(ctx, &csi.ControllerGetVolumeRequest{VolumeId: v.id})
				return err
			}},
			step{"ValidateVolumeCapabilities", func() error {
				_, err := d.ValidateVolumeCapabilities(ctx, &csi.ValidateVolumeCapabilitiesRequest{VolumeId: v.id, VolumeCapabilities: []*csi.VolumeCapability{v.capability}})
				return err
			}},
			step{"ListVolumes (10)", func() error {
				l, err := d.ListVolumes(ctx, &csi.ListVolumesRequest{MaxEntries: 10})
				return want(err, len(l.GetEntries()), 10)
			}},
			step{"ListSnapshots (10)", func() error {
				l, err := d.ListSnapshots(ctx, &csi.ListSnapshotsRequest{MaxEntries: 10})
				return want(err, len(l.GetEntries()), 10)
			}},
			step{"GetCapacity", func() error { _, err := d.GetCapacity(ctx, &csi.GetCapacityRequest{}); return err }},
			step{"ControllerGetVolumeHealth", func() error {
				h, err := d.ControllerGetVolumeHealth(ctx, &csi.ControllerGetVolumeHealthRequest{VolumeId: v.id})
				return want(err, len(h.GetVolumeHealth().GetHealthStatuses()), 0)
			}},
			step{"GroupControllerGetCapabilities", func() error {
				_, err := d.GroupControllerGetCapabilities(ctx, &csi.GroupControllerGetCapabilitiesRequest{})
				return err
			}},
			step{"NodeGetInfo", func() error { _, err := d.NodeGetInfo(ctx, &csi.NodeGetInfoRequest{}); return err }},
			step{"NodeGetCapabilities", func() error {
				_, err := d.NodeGetCapabilities(ctx, &csi.NodeGetCapabilitiesRequest{})
				return err
			}},
			step{"NodeGetVolumeStats", func() error {
				_, err := d.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: v.id, VolumePath: v.published})
				return err
			}},
			step{"NodeGetVolumeHealth", func() error {
				_, err := d.NodeGetVolumeHealth(ctx, &csi.NodeGetVolumeHealthRequest{VolumeId: v.id})
				return err
			}},
			step{"NodeGetStorageHealth", func() error {
				_, err := d.NodeGetStorageHealth(ctx, &csi.NodeGetStorageHealthRequest{})
				return err
			}},
		); err != nil {
			return err
		}
	}
	if err := all(
		step{"ControllerModifyVolume", func() error {
			_, err := d.ControllerModifyVolume(ctx, &csi.ControllerModifyVolumeRequest{VolumeId: v.id, MutableParameters: map[string]string{"readAheadKiB": "256"}})
			return err
		}},
		step{"CreateSnapshot", func() error {
			made, err := d.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: name("probe"), SourceVolumeId: v.id})
			snapshot = made.GetSnapshot().GetSnapshotId()
			return err
		}},
		step{"GetSnapshot", func() error {
			_, err := d.GetSnapshot(ctx, &csi.GetSnapshotRequest{SnapshotId: snapshot})
			return err
		}},
		step{"CreateVolumeGroupSnapshot (2)", func() error {
			made, err := d.CreateVolumeGroupSnapshot(ctx, &csi.CreateVolumeGroupSnapshotRequest{Name: name("group"),
				SourceVolumeIds: []string{s.volumes[0].id, s.volumes[1].id}})
			group = made.GetGroupSnapshot().GetGroupSnapshotId()
			return err
		}},
		step{"GetVolumeGroupSnapshot", func() error {
			_, err := d.GetVolumeGroupSnapshot(ctx, &csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: group})
			return err
		}},
		step{"DeleteVolumeGroupSnapshot", func() error {
			_, err := d.DeleteVolumeGroupSnapshot(ctx, &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: group})
			return err
		}},
	); err != nil {
		return err
	}
	expand := func(v *volume) func() error {
		return func() error {
			_, err := d.NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{VolumeId: v.id, VolumePath: v.published, StagingTargetPath: v.staged, VolumeCapability: v.capability})
			return err
		}
	}
	restored := &volume{name: name("restored"), size: scaleSize, parameters: v.parameters, capability: v.capability}
	clone := &volume{name: name("clone"), size: scaleSize, parameters: v.parameters, capability: v.capability}
	if err := d.create(ctx, restored, r, &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
		Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: snapshot}}}); err != nil {
		return err
	}
	if err := d.create(ctx, clone, r, &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
		Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: v.id}}}); err != nil {
		return err
	}
	if err := all(
		step{"DeleteSnapshot", func() error {
			_, err := d.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: snapshot})
			return err
		}},
		step{"NodeExpandVolume (nothing to grow)", expand(v)},
		step{"ControllerExpandVolume", func() error {
			_, err := d.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{VolumeId: v.id, CapacityRange: &csi.CapacityRange{RequiredBytes: 2 * scaleSize}})
			return err
		}},
		step{"NodeExpandVolume (block)", expand(block)},
	); err != nil {
		return err
	}
	// Last of the calls that look, for what it may leave behind in caches.
	if err := r.time("ControllerListVolumeHealth (10)", func() error {
		_, err := d.ControllerListVolumeHealth(ctx, &csi.ControllerListVolumeHealthRequest{MaxEntries: 10})
		return err
	}); err != nil {
		return err
	}
	if s.grows {
		if err := r.time("NodeExpandVolume", expand(v)); err != nil {
			return err
		}
	}
	return errors.Join(d.down(ctx, v, r), d.down(ctx, block, r), d.remove(ctx, restored, r), d.remove(ctx, clone, r))
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

func (s *scaled) report(phases [3]*phase) {
	const goal = 1.3
	many := s.b.volumes
	fmt.Printf("\n## Many volumes\n\nEvery call with %d and with %d ext4 volumes of %d MiB (thin) published, in ms: median (p10..p90); first %d volumes, then %d,\n"+
		"then %d again. *Ratio* is that of the medians, %d over %d (goal: at most %.1f); *same* is the second time with %d over the\n"+
		"first, so what a ratio is when nothing is different but the time; *floor* is the ratio of the same work done by bare\n"+
		"system calls, so what is the kernel's own.\n", few, many, scaleSize>>20, few, many, few, many, few, goal, few)
	var rows [][]string
	var over []string
	names := slices.Clone(phases[0].calls.names)
	slices.SortStableFunc(names, func(a, b string) int { return service(a) - service(b) })
	for _, name := range names {
		first, second, last := phases[0].calls.samples[name], phases[1].calls.samples[name], phases[2].calls.samples[name]
		both := slices.Concat(first, last)
		growth := ratio(median(second), median(both))
		bare := "-"
		call, _, _ := strings.Cut(name, " (")
		if steps := floorOf[call]; steps != nil && call == name {
			var a, b time.Duration
			for _, step := range steps {
				a += median(phases[1].steps.samples[step])
				b += median(slices.Concat(phases[0].steps.samples[step], phases[2].steps.samples[step]))
			}
			bare = fmt.Sprintf("%.2f", ratio(a, b))
		}
		if growth > goal {
			over = append(over, fmt.Sprintf("%s (%.2f)", name, growth))
		}
		rows = append(rows, []string{name, fmt.Sprint(len(second)), spread(both), spread(second), fmt.Sprintf("%.2f", growth), fmt.Sprintf("%.2f", ratio(median(last), median(first))), bare})
	}
	table([]string{"call", "samples", fmt.Sprintf("%d volumes", few), fmt.Sprintf("%d volumes", many), "ratio", "same", "floor"}, rows)
	if !s.grows {
		fmt.Printf("\nThis process has no CAP_SYS_RESOURCE, without which ext4 does not grow while it is mounted: left out.\n")
	}
	if len(over) == 0 {
		fmt.Printf("\nNo call is over the goal.\n")
	} else {
		fmt.Printf("\nOver the goal: %s.\n", strings.Join(over, ", "))
	}
	fmt.Printf("\nThe kernel's own, by bare system calls with the same volumes around, in ms:\n")
	rows = nil
	for _, step := range phases[0].steps.names {
		first, second, last := phases[0].steps.samples[step], phases[1].steps.samples[step], phases[2].steps.samples[step]
		both := slices.Concat(first, last)
		rows = append(rows, []string{strings.ReplaceAll(step, "fallocate", "ftruncate"), spread(both), spread(second), fmt.Sprintf("%.2f", ratio(median(second), median(both))), fmt.Sprintf("%.2f", ratio(median(last), median(first)))})
	}
	table([]string{"step", fmt.Sprintf("%d volumes", few), fmt.Sprintf("%d volumes", many), "ratio", "same"}, rows)
}
