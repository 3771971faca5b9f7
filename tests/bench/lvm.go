package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/tests/figures"
)

// lvm measures logical volumes: here, or in a virtual machine.
func (b *bench) lvm(ctx context.Context) error {
	if _, err := dm.Targets(); err != nil {
		progress("lvm: this kernel has no device mapper, so a virtual machine is used")
		return b.inVM(ctx, "lvm", "", fmt.Sprintf("--lvm-rounds=%d --lvm-lives=%d", b.lvmRounds, b.lvmLives))
	}
	if err := b.header(); err != nil {
		return err
	}
	if version, err := exec.Command("lvm", "version").Output(); err == nil {
		fmt.Printf("| lvm2 | %s |\n", strings.Join(strings.Fields(strings.SplitN(string(version), "\n", 2)[0])[2:], " "))
	}
	g, err := newGroup(b.dir)
	if err != nil {
		return err
	}
	err = g.measure(ctx, b)
	return errors.Join(err, g.remove())
}

// progressLine is what progress prints: both outputs of the machine are one.
var progressLine = regexp.MustCompile(`^[0-9]{2}:[0-9]{2}:[0-9]{2} `)

// inVM runs a part of this program there, after a command of the shell, and prints what it prints.
func (b *bench) inVM(ctx context.Context, part, first, flags string) error {
	self := filepath.Join(b.dir, "bench")
	build := exec.CommandContext(ctx, "go", "build", "-o", self, "./tests/bench")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("build this program (run this in the repository): %w: %s", err, out)
	}
	if err := os.Chmod(b.dir, 0o755); err != nil {
		return err
	}
	figuresThere := ""
	if b.draws.Dir != "" {
		figuresThere = figures.Print
	}
	cmd := exec.CommandContext(ctx, "hack/vm/run.sh", "bash", "-c", fmt.Sprintf("%sexec %s --parts=%s --driver=%s %s --figures=%s --dir=\"$TMPDIR\"", first, self, part, b.binary, flags, figuresThere))
	cmd.Cancel = func() error { return cmd.Process.Signal(unix.SIGTERM) } // it takes the machine down
	cmd.Stderr = os.Stderr
	console, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	show := false
	for lines := bufio.NewScanner(console); lines.Scan(); {
		line := strings.TrimRight(lines.Text(), "\r")
		switch {
		case strings.HasPrefix(line, "in a VM: "):
			show = true
			progress("%s", line)
		case strings.Contains(line, " ended with "):
			show = false
		case progressLine.MatchString(line):
			fmt.Fprintln(os.Stderr, line)
		case show:
			if is, err := b.draws.Line(line); err != nil {
				return errors.Join(err, cmd.Cancel(), cmd.Wait())
			} else if !is {
				fmt.Println(line)
			}
		}
	}
	return cmd.Wait()
}

// group is a volume group with a thin pool, on a sparse file.
type group struct {
	name   string
	dir    string
	device string
	mkfs   []string
}

const (
	groupSize = 6 << 30
	// All that lvm2 would otherwise do beside its work is off, for the driver and the floor.
	lvmConfig = `
activation { udev_sync=0 udev_rules=0 verify_udev_operations=0 monitoring=0 }
devices { use_devicesfile=0 obtain_device_list_from_udev=0 global_filter=["a|^%s$|", "r|.*|"] }
backup { backup=0 archive=0 }
global { use_lvmpolld=0 notify_dbus=0 }
log { %s }
`
)

func newGroup(dir string) (*group, error) {
	g := &group{name: fmt.Sprintf("bench%d", os.Getpid()), dir: dir, mkfs: mkfsCommand()}
	image := filepath.Join(dir, "disk")
	if err := errors.Join(os.WriteFile(image, nil, 0o600), os.Truncate(image, groupSize), os.MkdirAll("/run/lock/lvm", 0o700)); err != nil {
		return nil, err
	}
	out, err := exec.Command("losetup", "--direct-io=on", "--show", "-f", image).Output()
	if err != nil {
		return nil, err
	}
	g.device = strings.TrimSpace(string(out))
	profile, err := os.ReadFile("/etc/lvm/profile/lvmdbusd.profile")
	if err != nil {
		return nil, err
	}
	for name, log := range map[string]string{"lvm": "", "lvm-logged": fmt.Sprintf("file=%q level=7", dir+"/lvm.log")} {
		settings := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(settings+"/profile", 0o700), os.WriteFile(settings+"/lvm.conf", fmt.Appendf(nil, lvmConfig, g.device, log), 0o600),
			os.WriteFile(settings+"/profile/lvmdbusd.profile", profile, 0o600)); err != nil {
			return nil, err
		}
	}
	// The driver gets them as they are set here.
	for key, value := range map[string]string{"LVM_SYSTEM_DIR": dir + "/lvm", "LVM_SUPPRESS_FD_WARNINGS": "1", "DM_DISABLE_UDEV": "1"} {
		if err := os.Setenv(key, value); err != nil {
			return nil, err
		}
	}
	return g, errors.Join(lvm("vgcreate", "-q", g.name, g.device), lvm("lvcreate", "-q", "--type", "thin-pool", "-L", "4G", "--poolmetadatasize", "64M", "-n", "tp", g.name))
}

func lvm(argv ...string) error { return run(context.Background(), argv...) }

func (g *group) remove() error {
	return errors.Join(lvm("vgremove", "-q", "-ff", "-y", g.name), os.RemoveAll("/dev/"+g.name))
}

// life is what a life takes at the least: the commands of lvm2, mkfs, and the system
// calls of mount. How thick space is zeroed makes three kinds of it.
func (g *group) life(ctx context.Context, kind string, worker int, r *recorder) error {
	name := fmt.Sprintf("floor-%d", lives.Add(1))
	staged, published := filepath.Join(g.dir, fmt.Sprintf("floor-staged-%d", worker)), filepath.Join(g.dir, fmt.Sprintf("floor-published-%d", worker))
	if err := os.MkdirAll(staged, 0o750); err != nil {
		return err
	}
	path := "/dev/" + g.name + "/" + name
	steps := []struct {
		name string
		argv []string
	}{
		{"lvcreate", []string{"lvcreate", "-y", "-Wn", "-Zn", "-L", fmt.Sprintf("%db", lifeSize), "-n", name, g.name}},
		{"blkdiscard --zeroout", []string{"blkdiscard", "--zeroout", path}},
		{stepMkfs, append(slices.Clone(g.mkfs), path)},
	}
	switch kind {
	case "thin":
		steps[0].argv = []string{"lvcreate", "-y", "-V", fmt.Sprintf("%db", lifeSize), "--thinpool", "tp", "-n", name, g.name}
		steps = slices.Delete(steps, 1, 2)
	case "unzeroed":
		steps = slices.Delete(steps, 1, 2)
	}
	for _, one := range steps {
		if err := r.time(one.name, func() error { return run(ctx, one.argv...) }); err != nil {
			return err
		}
	}
	return r.all(
		step{"mount, bind, umount, umount", func() error {
			return co.InTurn(
				func() error { return unix.Mount(path, staged, "ext4", 0, "") },
				func() error { return bind(staged, published) },
				func() error {
					return errors.Join(unix.Unmount(published, 0), os.Remove(published), unix.Unmount(staged, 0))
				})
		}},
		step{"lvremove", func() error { return lvm("lvremove", "-f", g.name+"/"+name) }})
}

// comparison is what lives by the driver and on the floor took.
type comparison struct {
	*group
	b     *bench
	calls map[string]*recorder // by kind of volumes, lives at once, and who
	rows  [][]string           // of lives
	chart figures.Chart        // of the same
}

func (g *group) measure(ctx context.Context, b *bench) error {
	fmt.Printf("\n## Lives of logical volumes\n\nAn ext4 volume of 64 MiB: create, claim, stage, publish, and back, over gRPC; the floor is lvcreate, mkfs.ext4 and lvremove as\n"+
		"programs, and the system calls of mount. Thick space is zeroed on the floor too (blkdiscard --zeroout); what it is without, where\n"+
		"one volume shows what another held, is beside it. %d rounds of a block of lives each, in turn; the ratio is that of a round's\nblocks. Median (p10..p90).\n", b.lvmRounds)
	c := &comparison{group: g, b: b, calls: map[string]*recorder{}, chart: figures.Chart{Name: "lvm-life", Title: "Whole lives of an ext4 logical volume of 64 MiB",
		Unit: "lives per second: median, and p10 to p90", Series: []figures.Series{{Name: "driver"}, {Name: "lvm2 and mkfs as programs"}}}}
	var copies [][]string
	if err := errors.Join(c.lives(ctx, "thick", &copies), c.lives(ctx, "thin", &copies)); err != nil {
		return err
	}
	figures.Table([]string{"volumes", "at once", "lives", "driver, lives/s", "floor, lives/s", "driver / floor (goal: 0.7)", "floor without zeroing", "driver / that"}, c.rows)
	if err := b.draws.Draw(c.chart); err != nil {
		return err
	}
	fmt.Printf("\nWhere the time goes, one at a time, in ms.\n")
	var rows [][]string
	for _, kind := range []string{"thick", "thin"} {
		for _, who := range []string{"driver", "floor"} {
			r := c.calls[kind+" 1 "+map[string]string{"driver": "driver", "floor": kind}[who]]
			for _, step := range r.names {
				rows = append(rows, []string{kind + ", " + who, step, spread(r.samples[step])})
			}
			rows = append(rows, []string{kind + ", " + who, "**sum of the medians**", ms(total(r))})
		}
	}
	figures.Table([]string{"volumes", "step", "took"}, rows)
	if err := g.count(ctx, b); err != nil {
		return err
	}
	fmt.Printf("\nThin copies of volumes of which 8 MiB are written, not attached, in ms, taken in turn.\n")
	figures.Table([]string{"call", "64 MiB", "64 GiB", "64 GiB / 64 MiB"}, copies)
	return nil
}

// lives has a driver of its own for a kind of volumes; of thin ones it makes copies, too.
func (c *comparison) lives(ctx context.Context, kind string, copies *[][]string) error {
	pool := "lvm://" + c.name
	if kind == "thin" {
		pool += "/tp?overprovision=100&reservePercent=0"
	} else {
		pool += "?reservePercent=0"
	}
	d, err := c.b.startOn(ctx, filepath.Join(c.b.dir, kind), pool)
	if err != nil {
		return err
	}
	defer d.stop()
	for _, atOnce := range []int{1, 4} {
		if err := c.inTurn(ctx, d, kind, atOnce); err != nil {
			return err
		}
	}
	if kind == "thin" {
		return d.failed(c.sizes(ctx, d, copies))
	}
	return nil
}

// inTurn has the driver and the floor, of both kinds for thick volumes, take turns.
func (c *comparison) inTurn(ctx context.Context, d *driver, kind string, atOnce int) error {
	progress("lvm: %s, %d at once", kind, atOnce)
	kinds := []string{"driver", kind}
	if kind == "thick" {
		kinds = append(kinds, "unzeroed")
	}
	rates, ratios := map[string][]float64{}, map[string][]float64{}
	for round := range c.b.lvmRounds + 1 {
		rate := map[string]float64{}
		for i := range kinds {
			which := kinds[(round+i)%len(kinds)] // each goes first as often as the others
			name := fmt.Sprint(kind, " ", atOnce, " ", which)
			if c.calls[name] == nil || round == 1 { // the first round warms up
				c.calls[name] = &recorder{}
			}
			life := func(worker int) error { return c.life(ctx, which, worker, c.calls[name]) }
			if which == "driver" {
				life = func(worker int) error {
					return d.failed(d.newVolume(fmt.Sprintf("worker-%d", worker), lifeSize, kind == "thin", false).life(ctx, c.calls[name]))
				}
			}
			start := time.Now()
			if err := block(ctx, c.b.lvmLives, atOnce, life); err != nil {
				return err
			}
			rate[which] = float64(c.b.lvmLives*atOnce) / time.Since(start).Seconds()
		}
		for which := range rate {
			if round > 0 {
				rates[which] = append(rates[which], rate[which])
				ratios[which] = append(ratios[which], rate["driver"]/rate[which])
			}
		}
	}
	row := []string{kind, fmt.Sprint(atOnce), fmt.Sprint(c.b.lvmRounds * c.b.lvmLives * atOnce), spreadOf("%.2f", rates["driver"]), spreadOf("%.2f", rates[kind]), spreadOf("%.2f", ratios[kind]), "", ""}
	if kind == "thick" {
		row[6], row[7] = spreadOf("%.2f", rates["unzeroed"]), spreadOf("%.2f", ratios["unzeroed"])
	}
	c.rows = append(c.rows, row)
	c.chart.Add(fmt.Sprintf("%s, %d at once", kind, atOnce), figures.Of(rates["driver"]), figures.Of(rates[kind]))
	return nil
}

// sizes compares copies of small and large thin volumes.
func (g *group) sizes(ctx context.Context, d *driver, rows *[][]string) error {
	progress("lvm: thin copies")
	var volumes []*volume
	for i, size := range []int64{64 << 20, 64 << 30} {
		v := d.newVolume(fmt.Sprintf("size-%d", i), size, true, true)
		if err := co.InTurn(
			func() error { return v.up(ctx, &recorder{}) },
			func() error { return written(v.target, size) },
			func() error { return v.unused(ctx, &recorder{}) }); err != nil {
			return err
		}
		volumes = append(volumes, v)
	}
	recorders := []*recorder{{}, {}}
	for round := range 12 {
		for i := range volumes {
			i = (round + i) % 2
			if err := volumes[i].copies(ctx, fmt.Sprintf("snap-%d-%d", i, round), recorders[i]); err != nil {
				return err
			}
		}
	}
	for _, call := range recorders[0].names {
		small, large := recorders[0].samples[call], recorders[1].samples[call]
		*rows = append(*rows, []string{call, spread(small), spread(large), fmt.Sprintf("%.2f", ratio(figures.Median(large), figures.Median(small)))})
	}
	return errors.Join(volumes[0].Delete(ctx), volumes[1].Delete(ctx))
}

// written writes 8 MiB all over a device.
func written(path string, size int64) error {
	device, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer device.Close()
	block := bytes.Repeat([]byte("written "), 1<<17)
	for n := range int64(8) {
		if _, err := device.WriteAt(block, n*(size/8)); err != nil {
			return err
		}
	}
	return device.Sync()
}

// copies makes a snapshot of the volume, a volume from that and a clone, and deletes all of them.
func (v *volume) copies(ctx context.Context, name string, r *recorder) error {
	var snapshot *csi.Snapshot
	if err := r.time("CreateSnapshot", func() (err error) { snapshot, err = v.Snapshot(ctx, name); return err }); err != nil {
		return err
	}
	restored, clone := v.made(name+"-restored"), v.made(name+"-clone")
	co.FromSnapshot(restored.request, snapshot.GetSnapshotId())
	co.FromVolume(clone.request, v.ID)
	return r.all(restored.creation(ctx), restored.deletion(ctx), clone.creation(ctx), clone.deletion(ctx),
		step{"DeleteSnapshot", func() error { return v.RemoveSnapshot(ctx, snapshot.GetSnapshotId()) }})
}

// logged is how lvm2 begins a command in its log: PROGRAM[PROCESS] ... Processing command: COMMAND.
var logged = regexp.MustCompile(`\[([0-9]+)\].*Processing command: +(?:lvm )?([a-z]+)`)

// count counts the commands of lvm2 and its processes in lives, by its own log, in a run
// of its own.
func (g *group) count(ctx context.Context, b *bench) error {
	progress("lvm: counting commands")
	var rows [][]string
	for _, kind := range []string{"thick", "thin"} {
		counted, err := g.countKind(ctx, b, kind)
		if err != nil {
			return err
		}
		rows = append(rows, counted...)
	}
	fmt.Printf("\nWhat lvm2 was asked for in a life, by its own log (log/file, level 7), in %d lives after a first one that are not timed.\n", countedLives)
	figures.Table([]string{"volumes", "commands of lvm2", "processes of lvm2 begun", "which"}, rows)
	return nil
}

// countedLives are those that count has of each kind.
const countedLives = 5

func (g *group) countKind(ctx context.Context, b *bench, kind string) (rows [][]string, err error) {
	pool := "lvm://" + g.name
	if kind == "thin" {
		pool += "/tp"
	}
	if err := os.Setenv("LVM_SYSTEM_DIR", g.dir+"/lvm-logged"); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.Setenv("LVM_SYSTEM_DIR", g.dir+"/lvm")) }()
	d, err := b.startOn(ctx, filepath.Join(b.dir, kind+"-counted"), pool)
	if err != nil {
		return nil, err
	}
	defer d.stop()
	v := d.newVolume("counted", lifeSize, kind == "thin", false)
	if err := v.life(ctx, &recorder{}); err != nil {
		return nil, d.failed(err)
	}
	for _, who := range []string{"driver", "floor"} {
		row, err := g.counted(func() error {
			if who == "driver" {
				return d.failed(v.life(ctx, &recorder{}))
			}
			return g.life(ctx, kind, 0, &recorder{})
		})
		if err != nil {
			return nil, err
		}
		if who == "driver" && row[1] == fmt.Sprintf("%.1f", 1.0/countedLives) {
			row[1] = "0.0" // the one process that has been there since the driver began
		}
		rows = append(rows, append([]string{kind + ", " + who}, row...))
	}
	return rows, nil
}

// counted returns how many commands and processes of lvm2 there were in a life, and which.
func (g *group) counted(life func() error) ([]string, error) {
	log := filepath.Join(g.dir, "lvm.log")
	if err := os.WriteFile(log, nil, 0o600); err != nil { // lvm2 appends
		return nil, err
	}
	for range countedLives {
		if err := life(); err != nil {
			return nil, err
		}
	}
	text, err := os.ReadFile(log)
	if err != nil {
		return nil, err
	}
	processes, commands, all := map[string]bool{}, map[string]int{}, 0
	for _, match := range logged.FindAllStringSubmatch(string(text), -1) {
		processes[match[1]] = true
		commands[match[2]]++
		all++
	}
	var list []string
	for _, command := range slices.Sorted(maps.Keys(commands)) {
		list = append(list, fmt.Sprintf("%s %.1f", command, float64(commands[command])/countedLives))
	}
	return []string{fmt.Sprintf("%.1f", float64(all)/countedLives), fmt.Sprintf("%.1f", float64(len(processes))/countedLives), strings.Join(list, ", ")}, nil
}
