package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/tests/figures"
)

const (
	copySize  = 512 << 20 // of each volume
	clockTick = 10 * time.Millisecond
)

// copied is a volume of which copies are made.
type copied struct {
	title string
	thin  bool
	data  int64 // bytes that are written to it
	share bool  // the pool's filesystem shares blocks
}

// copies measures snapshots, restored volumes and clones beside dd and cp of the volume's image: on the disk's own filesystem, and on an XFS.
func (b *bench) copies(ctx context.Context) error {
	fmt.Printf("\n## Copies\n\nOf a volume of %d MiB that nobody uses, and of its image in the same directory, in ms: median (p10..p90), %d rounds in which all take their turn. All that a program has\n"+
		"written is synced; the source is not in the page cache. Processor time is that of the whole machine, in s for each GiB of data.\n", copySize>>20, b.fioRounds)
	disk := filepath.Join(b.dir, "copies")
	if err := os.Mkdir(disk, 0o700); err != nil {
		return err
	}
	if err := b.copiesIn(ctx, disk, copied{"thick, written in full", false, copySize, false}, copied{"thin, an eighth of it written", true, copySize / 8, false}); err != nil {
		return err
	}
	xfs, err := b.shares(ctx)
	if err != nil {
		return err
	}
	return b.copiesIn(ctx, xfs, copied{"thin, written in full, on XFS, which shares blocks", true, copySize, true})
}

// shares mounts an XFS; clean takes it away.
func (b *bench) shares(ctx context.Context) (dir string, err error) {
	dir = filepath.Join(b.dir, "xfs")
	image := dir + ".image"
	return dir, co.InTurn(
		func() error { return os.Mkdir(dir, 0o700) },
		func() error { return os.WriteFile(image, nil, 0o600) },
		func() error { return os.Truncate(image, 8<<30) },
		func() error { return run(ctx, "mkfs.xfs", "-q", "-m", "reflink=1", image) },
		func() error { return mountImage(ctx, image, dir) })
}

// mountImage mounts the filesystem in a file, by a loop device that goes with the mount.
func mountImage(ctx context.Context, image, dir string) error {
	f, err := os.OpenFile(image, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	device, n, err := attach(f)
	if err != nil {
		return err
	}
	defer device.Close()
	return run(ctx, "mount", loopPath(n), dir)
}

func (b *bench) copiesIn(ctx context.Context, dir string, kinds ...copied) error {
	d, err := b.start(ctx, dir, "?reservePercent=0")
	if err != nil {
		return err
	}
	defer d.stop()
	for _, kind := range kinds {
		if err := d.failed(b.copiesOf(ctx, d, kind)); err != nil {
			return err
		}
	}
	return nil
}

// copyWay is one way to copy. What it has made is removed by undo.
type copyWay struct {
	name     string
	do, undo func() error
}

func (b *bench) copiesOf(ctx context.Context, d *driver, kind copied) error {
	progress("copies: %s", kind.title)
	v := d.newVolume("copied-"+strings.Fields(kind.title)[0], copySize, kind.thin, true)
	if err := v.up(ctx, &recorder{}); err != nil {
		return err
	}
	if err := run(ctx, "dd", "if=/dev/urandom", "of="+v.target, "bs=1M", fmt.Sprintf("count=%d", kind.data>>20), "oflag=direct", "status=none"); err != nil {
		return err
	}
	if err := v.unused(ctx, &recorder{}); err != nil {
		return err
	}
	images, err := filepath.Glob(filepath.Join(d.Dir, "pool", "volumes", "*.img"))
	if err != nil || len(images) != 1 {
		return fmt.Errorf("one image was expected in the pool: %v %w", images, err)
	}
	snapshot, err := v.Snapshot(ctx, "standing")
	if err != nil {
		return err
	}
	ways := append(b.copiesByDriver(ctx, v, snapshot.GetSnapshotId()), copiesByPrograms(ctx, images[0], kind)...)
	var took recorder
	spent := map[string]time.Duration{}
	for round := range b.fioRounds {
		for i := range ways {
			way := ways[(i+round)%len(ways)]
			if err := copyOnce(way, images[0], &took, spent); err != nil {
				return err
			}
		}
	}
	b.reportCopies(kind, ways, &took, spent)
	return co.InTurn(func() error { return d.RemoveSnapshot(ctx, snapshot.GetSnapshotId()) }, func() error { return v.Delete(ctx) })
}

// copyOnce makes a copy and removes it. What others have to do with the disk is done before, and what of the source is in memory forgotten.
func copyOnce(way copyWay, image string, took *recorder, spent map[string]time.Duration) error {
	unix.Sync()
	f, err := os.Open(image)
	if err != nil {
		return err
	}
	err = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	before := busy()
	if err := took.time(way.name, way.do); err != nil {
		return err
	}
	spent[way.name] += busy() - before
	return way.undo()
}

// busy is for how long processors of this machine have worked (proc_stat(5)).
func busy() (t time.Duration) {
	for i, field := range strings.Fields(strings.SplitN(read("/proc/stat"), "\n", 2)[0])[1:] {
		if i >= 8 { // a guest's time is counted as user's
			break
		}
		if idle := i == 3 || i == 4; !idle {
			ticks, _ := strconv.ParseInt(field, 10, 64)
			t += time.Duration(ticks) * clockTick
		}
	}
	return t
}

func (b *bench) copiesByDriver(ctx context.Context, v *volume, snapshot string) []copyWay {
	n, made := 0, ""
	create := func(source func(*volume)) func() error {
		return func() error {
			n++
			to := v.made(fmt.Sprintf("%s-%d", v.request.GetName(), n))
			source(to)
			r, err := to.Create(ctx, to.request)
			if err == nil {
				made = r.ID
			}
			return err
		}
	}
	remove := func() error { return v.Client.Volume(made, "", v.Capability).Delete(ctx) }
	return []copyWay{
		{"CreateSnapshot", func() error {
			n++
			s, err := v.Snapshot(ctx, fmt.Sprintf("%s-%d", v.request.GetName(), n))
			made = s.GetSnapshotId()
			return err
		}, func() error { return v.Client.RemoveSnapshot(ctx, made) }},
		{"CreateVolume (from a snapshot)", create(func(to *volume) { co.FromSnapshot(to.request, snapshot) }), remove},
		{"CreateVolume (clone)", create(func(to *volume) { co.FromVolume(to.request, v.ID) }), remove},
	}
}

// copiesByPrograms copy an image within its directory.
func copiesByPrograms(ctx context.Context, image string, kind copied) []copyWay {
	to := filepath.Join(filepath.Dir(filepath.Dir(image)), "copy")
	cp := func(flag string) copyWay {
		return copyWay{"`cp " + flag + "`, `sync`", func() error {
			return co.InTurn(func() error { return run(ctx, "cp", flag, image, to) }, func() error { return run(ctx, "sync", to) })
		}, func() error { return os.Remove(to) }}
	}
	if kind.share {
		return []copyWay{cp("--reflink=always")}
	}
	dd := copyWay{"`dd bs=1M`, direct, `conv=fsync`", func() error {
		return run(ctx, "dd", "if="+image, "of="+to, "bs=1M", "iflag=direct", "oflag=direct", "conv=fsync", "status=none")
	}, func() error { return os.Remove(to) }}
	return []copyWay{dd, cp("--reflink=never")}
}

func (b *bench) reportCopies(kind copied, ways []copyWay, took *recorder, spent map[string]time.Duration) {
	fmt.Printf("\n### %s\n", strings.ToUpper(kind.title[:1])+kind.title[1:])
	bare := ways[3] // the first that is no call
	base := figures.Median(took.samples[bare.name])
	head, rows := []string{"copy", "ms", "rate : that of " + bare.name}, [][]string{}
	if !kind.share { // nothing is read or written
		head = append(head, "MiB/s of data", "processor time, s/GiB")
	}
	for _, way := range ways {
		samples := took.samples[way.name]
		row := []string{way.name, spread(samples), fmt.Sprintf("%.2f", ratio(base, figures.Median(samples)))}
		if !kind.share {
			row = append(row, fmt.Sprintf("%.0f", float64(kind.data>>20)/figures.Median(samples).Seconds()),
				fmt.Sprintf("%.2f", spent[way.name].Seconds()/float64(len(samples))/gib(kind.data)))
		}
		rows = append(rows, row)
	}
	figures.Table(head, rows)
}
