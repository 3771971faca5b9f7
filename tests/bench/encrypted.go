package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/luks"
	"github.com/ashlar-csi/ashlar/tests/figures"
)

// passphrase of the volumes that are measured.
const passphrase = "measured"

// encrypted compares encrypted logical volumes with plain ones, here or in a virtual machine.
func (b *bench) encrypted(ctx context.Context) error {
	if luks.Available() != nil {
		progress("encrypted: this kernel has no dm-crypt, so a virtual machine is used")
		return b.inVM(ctx, "encrypted", "modprobe -q dm-crypt; ", fmt.Sprintf("--lvm-rounds=%d --fio-rounds=%d --fio-runtime=%s --fio-size=%d", b.lvmRounds, b.fioRounds, b.fioRuntime, b.fioSize))
	}
	if err := b.header(); err != nil {
		return err
	}
	g, err := newGroup(b.dir)
	if err != nil {
		return err
	}
	err = g.encrypted(ctx, b)
	return errors.Join(err, g.remove())
}

func (g *group) encrypted(ctx context.Context, b *bench) error {
	d, err := b.startOn(ctx, filepath.Join(b.dir, "encrypted"), "lvm://"+g.name+"?reservePercent=0")
	if err != nil {
		return err
	}
	defer d.stop()
	fmt.Printf("\n## Encrypted volumes\n\nRaw thick logical volumes, plain and with `encryption: luks2`. %d lives of each, in turn, in ms: median (p10..p90).\n", b.lvmRounds)
	if err := d.failed(b.encryptedLives(ctx, d)); err != nil {
		return err
	}
	targets, err := g.encryptedTargets(ctx, b, d)
	if err != nil {
		return d.failed(err)
	}
	fmt.Printf("\nDirect I/O by libaio, on %d MiB that were written before; %s each, %d rounds in which all take their turn. Of each the\n"+
		"median (min..max), and the ratio to the plain volume, by rounds.\n", b.used()>>20, b.fioRuntime, b.fioRounds)
	for _, t := range targets {
		if _, err := b.run(ctx, t, workload{rw: "write", bs: "1m", depth: 8}, false); err != nil {
			return err
		}
	}
	results := rates{}
	for round := range b.fioRounds {
		progress("encrypted: round %d of %d", round+1, b.fioRounds)
		for _, w := range workloads {
			if err := b.runAll(ctx, targets, w, round, true, results); err != nil {
				return err
			}
		}
	}
	if err := b.fioTable("encrypted", workloads, targets, results); err != nil {
		return err
	}
	// The last has no driver.
	return errors.Join(cryptsetup(ctx, "close", bareName), d.failed(b.dropTargets(ctx, d, targets[:len(targets)-1])))
}

// encryptedVolume is a raw volume, encrypted or not, of a size in bytes.
func (d *driver) encryptedVolume(name string, size int64, encrypted bool) *volume {
	v := d.newVolume(name, size, false, true)
	if encrypted {
		v.request.Parameters["encryption"] = "luks2"
		v.Secrets = map[string]string{"passphrase": passphrase}
	}
	return v
}

// encryptedLives shows what encryption adds to each call.
func (b *bench) encryptedLives(ctx context.Context, d *driver) error {
	kinds := []string{"plain", "encrypted"}
	calls := map[string]*recorder{"plain": {}, "encrypted": {}}
	for round := range b.lvmRounds {
		for i := range kinds {
			kind := kinds[(round+i)%len(kinds)]
			if err := d.encryptedVolume("life-"+kind, lifeSize, kind == "encrypted").life(ctx, calls[kind]); err != nil {
				return err
			}
		}
	}
	var rows [][]string
	for _, call := range calls["plain"].names {
		rows = append(rows, []string{call, spread(calls["plain"].samples[call]), spread(calls["encrypted"].samples[call])})
	}
	figures.Table([]string{"call", "plain", "encrypted"}, rows)
	return nil
}

const bareName = "ashlar-bench-bare"

// encryptedTargets are a plain volume, which comes first, an encrypted one, and what could have been chosen instead: the same without the
// kernel's queues, and dm-crypt with sectors of 512 bytes over a logical volume without the driver.
func (g *group) encryptedTargets(ctx context.Context, b *bench, d *driver) ([]target, error) {
	var targets []target
	for _, name := range []string{"plain", "encrypted", "without queues"} {
		before, err := crypts(ctx)
		if err != nil {
			return nil, err
		}
		v := d.encryptedVolume("fio-"+strings.ReplaceAll(name, " ", "-"), b.fioSize, name != "plain")
		if err := v.up(ctx, &recorder{}); err != nil {
			return nil, err
		}
		targets = append(targets, target{name, v.target, v, false})
		if name != "without queues" {
			continue
		}
		now, err := crypts(ctx)
		if err != nil {
			return nil, err
		}
		for _, device := range now {
			if slices.Contains(before, device) {
				continue
			}
			if err := cryptsetup(ctx, "refresh", "--perf-no_read_workqueue", "--perf-no_write_workqueue", device); err != nil {
				return nil, err
			}
		}
	}
	path := "/dev/" + g.name + "/bare"
	return append(targets, target{"sectors of 512 bytes", "/dev/mapper/" + bareName, nil, false}), co.InTurn(
		func() error {
			return lvm("lvcreate", "-y", "-Wn", "-Zn", "-L", fmt.Sprintf("%db", b.fioSize+luks.HeaderSize), "-n", "bare", g.name)
		},
		func() error {
			return cryptsetup(ctx, "luksFormat", "--type", "luks2", "--sector-size", "512", "--cipher", "aes-xts-plain64", "--key-size", "512", "--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000", path)
		},
		func() error { return cryptsetup(ctx, "open", path, bareName) })
}

// crypts are the names of the devices of dm-crypt.
func crypts(ctx context.Context) ([]string, error) {
	out, err := exec.CommandContext(ctx, "dmsetup", "ls", "--target", "crypt").Output()
	var names []string
	for line := range strings.Lines(string(out)) {
		if name, _, ok := strings.Cut(line, "\t"); ok {
			names = append(names, name)
		}
	}
	return names, err
}

// cryptsetup runs it with the passphrase.
func cryptsetup(ctx context.Context, argv ...string) error {
	if argv[0] != "close" {
		argv = append([]string{"--batch-mode", "--key-file=-"}, argv...)
	}
	cmd := exec.CommandContext(ctx, "cryptsetup", argv...)
	cmd.Stdin = strings.NewReader(passphrase)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("cryptsetup %s: %w: %s", strings.Join(argv, " "), err, out)
	}
	return nil
}
