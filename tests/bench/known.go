package main

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/tests/figures"
)

// known is no part of the whole: it takes minutes, and a file or two for each volume.
const known = "known"

// known has the driver know few volumes, then many, of which none is attached, and measures what has to do with all of them: calls, lists,
// memory, a start.
func (b *bench) known(ctx context.Context) error {
	k := &scaled{b: b, dir: filepath.Join(b.dir, "known")}
	if _, err := k.start(ctx, "just started, no volume"); err != nil {
		return err
	}
	defer func() { k.d.stop() }()
	var with [2]recorder
	var restart time.Duration
	if err := co.InTurn(
		func() error { return k.know(ctx, few) },
		func() error { return k.ask(ctx, &with[0]) },
		func() error { return k.know(ctx, b.knownVolumes) },
		func() error { k.weigh(fmt.Sprintf("%d volumes made", b.knownVolumes)); return nil },
		func() error { return k.ask(ctx, &with[1]) },
		func() (err error) {
			k.d.stop()
			restart, err = k.start(ctx, fmt.Sprintf("started anew, %d volumes", b.knownVolumes))
			return err
		},
		func() error { return k.ask(ctx, &with[1]) },
		func() error { k.weigh("the same, after all were listed many times"); return nil }); err != nil {
		return k.d.failed(err)
	}
	fmt.Printf("\n## Many volumes that are known\n\nCalls with %d and with %d volumes (thin, 16 MiB) of which none is attached, in ms: median (p10..p90).\n", few, b.knownVolumes)
	var rows [][]string
	for _, name := range with[1].names {
		a, z := with[0].samples[name], with[1].samples[name]
		rows = append(rows, []string{name, spread(a), spread(z), fmt.Sprintf("%.2f", ratio(figures.Median(z), figures.Median(a)))})
	}
	figures.Table([]string{"call", fmt.Sprintf("%d volumes", few), fmt.Sprintf("%d volumes", b.knownVolumes), "ratio"}, rows)
	fmt.Println("\nOf the driver's process, in MiB:")
	figures.Table([]string{"when", "VmRSS", "RssAnon", "threads"}, k.weights)
	fmt.Printf("\nA driver that is started with %d volumes is ready after %s.\n", b.knownVolumes, restart.Round(time.Millisecond))
	return nil
}

// know makes volumes until there are n. Those stay: clean takes their files.
func (s *scaled) know(ctx context.Context, n int) error {
	progress("known: from %d volumes to %d", s.made, n)
	var r recorder
	var work []func() error
	for ; s.made < n; s.made++ {
		v := s.d.newVolume(fmt.Sprintf("known-%d", s.made), scaleSize, true, false)
		work = append(work, func() error { return r.all(v.creation(ctx)) })
	}
	return atOnce(ctx, 4, work)
}

// ask makes the calls that have to do with all volumes, as often as there are to be samples, and lists all of them a few times.
func (s *scaled) ask(ctx context.Context, r *recorder) error {
	progress("known: measuring calls with %d volumes", s.made)
	for i := range s.b.samples {
		v := s.d.newVolume(fmt.Sprintf("probe-%d", i), scaleSize, true, false)
		if err := co.InTurn(
			func() error { return r.all(v.creation(ctx)) },
			func() error {
				return r.all(
					step{"ControllerGetVolume", call(ctx, s.d.ControllerGetVolume, &csi.ControllerGetVolumeRequest{VolumeId: v.ID})},
					step{"GetCapacity", call(ctx, s.d.GetCapacity, &csi.GetCapacityRequest{})},
					step{"ListVolumes (10)", func() error {
						l, err := s.d.ListVolumes(ctx, &csi.ListVolumesRequest{MaxEntries: 10})
						return want(err, len(l.GetEntries()), 10)
					}},
					step{"NodeGetStorageHealth", call(ctx, s.d.NodeGetStorageHealth, &csi.NodeGetStorageHealthRequest{})},
					v.deletion(ctx))
			}); err != nil {
			return err
		}
	}
	return r.time("ListVolumes, all in pages of 1000", func() error {
		listed, token := 0, ""
		for {
			l, err := s.d.ListVolumes(ctx, &csi.ListVolumesRequest{MaxEntries: 1000, StartingToken: token})
			if listed += len(l.GetEntries()); err != nil || l.GetNextToken() == "" {
				return want(err, listed, s.made)
			}
			token = l.GetNextToken()
		}
	})
}
