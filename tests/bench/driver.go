package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/process"
)

const node = "bench-node"

// driver is the real one, in a process of its own, and its client.
type driver struct{ *process.Driver }

// start starts the driver with a pool in dir, and waits until it is ready.
func (b *bench) start(ctx context.Context, dir, poolOptions string) (*driver, error) {
	return b.startOn(ctx, dir, "file://"+dir+"/pool"+poolOptions)
}

// startOn starts the driver on a pool, with all else in dir.
func (b *bench) startOn(ctx context.Context, dir, pool string, flags ...string) (*driver, error) {
	p, err := process.New(dir, node, append([]string{b.binary, "--pool=default=" + pool}, flags...)...)
	if err != nil {
		return nil, err
	}
	wait, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	if err := co.InTurn(p.Start, func() error { return p.Ready(wait) }); err != nil {
		p.Close()
		return nil, err
	}
	return &driver{p}, nil
}

// stop ends the driver; its volumes stay. Calling it again does nothing.
func (d *driver) stop() {
	_ = d.Stop() // it may have ended
	d.Conn.Close()
}

// failed adds the end of the driver's log to an error.
func (d *driver) failed(err error) error {
	if err == nil || errors.Is(err, context.Canceled) {
		return err
	}
	log := d.Log()
	return fmt.Errorf("%w\nthe driver's log ends with: %s", err, log[max(0, len(log)-2000):])
}

// usage of a process.
type usage struct {
	rss, anon int64 // KiB
	cpu       time.Duration
	switches  int64
	threads   int
}

func (d *driver) usage() (u usage) {
	proc := fmt.Sprintf("/proc/%d", d.Pid())
	number := func(path, name string) int64 {
		n, _ := strconv.ParseInt(strings.TrimSuffix(field(path, name), " kB"), 10, 64)
		return n
	}
	u.rss, u.anon = number(proc+"/status", "VmRSS"), number(proc+"/status", "RssAnon")
	tasks, _ := filepath.Glob(proc + "/task/*")
	for _, task := range tasks {
		if spent := strings.Fields(read(task + "/schedstat")); len(spent) > 0 {
			ns, _ := strconv.ParseInt(spent[0], 10, 64)
			u.cpu += time.Duration(ns)
		}
		u.switches += number(task+"/status", "voluntary_ctxt_switches") + number(task+"/status", "nonvoluntary_ctxt_switches")
	}
	u.threads = len(tasks)
	return u
}

// volume is one volume, and where it is.
type volume struct {
	*co.Volume
	request *csi.CreateVolumeRequest
	target  string
}

// newVolume is a volume that is to be made: of a filesystem (ext4), or a raw one. What is measured makes many volumes of
// one name, one after the other; the name of the request is then another one each time.
func (d *driver) newVolume(name string, size int64, thin, block bool) *volume {
	filesystem := "ext4"
	if block {
		filesystem = co.Block
	}
	r := co.Request(name, filesystem, size)
	r.VolumeCapabilities[0].AccessMode.Mode = co.Writer
	r.Parameters = map[string]string{"provisioning": kindOf(thin)}
	v := &volume{Volume: d.Volume("", name, r.GetVolumeCapabilities()[0]), request: r}
	v.target = v.Target("pod")
	return v
}

// made is a volume like this one, of another name, that is not used.
func (v *volume) made(name string) *volume {
	r := co.Request(name, "", v.request.GetCapacityRange().GetRequiredBytes())
	r.VolumeCapabilities, r.Parameters = v.request.GetVolumeCapabilities(), v.request.GetParameters()
	return &volume{Volume: v.Client.Volume("", name, v.Capability), request: r}
}

func (v *volume) suffix() string {
	if v.Block() {
		return " (block)"
	}
	return ""
}

// up takes a volume from nothing to published.
func (v *volume) up(ctx context.Context, r *recorder) error {
	return r.all(
		v.creation(ctx),
		step{"ControllerPublishVolume", func() error { return v.Claim(ctx) }},
		step{"NodeStageVolume" + v.suffix(), func() error { return v.Stage(ctx) }},
		step{"NodePublishVolume" + v.suffix(), func() error { return v.Publish(ctx, v.target, false) }})
}

// creation makes the volume.
func (v *volume) creation(ctx context.Context) step {
	name := "CreateVolume"
	if v.request.GetVolumeContentSource().GetSnapshot() != nil {
		name += " (from a snapshot)"
	} else if v.request.GetVolumeContentSource().GetVolume() != nil {
		name += " (clone)"
	}
	return step{name, func() error {
		made, err := v.Create(ctx, v.request)
		if err == nil {
			v.ID = made.ID
		}
		return err
	}}
}

// unused takes a volume from published to claimed by nobody.
func (v *volume) unused(ctx context.Context, r *recorder) error {
	return r.all(
		step{"NodeUnpublishVolume" + v.suffix(), func() error { return v.Unpublish(ctx, v.target) }},
		step{"NodeUnstageVolume" + v.suffix(), func() error { return v.Unstage(ctx) }},
		step{"ControllerUnpublishVolume", func() error { return v.Release(ctx) }})
}

// down takes it back to nothing.
func (v *volume) down(ctx context.Context, r *recorder) error {
	if err := v.unused(ctx, r); err != nil {
		return err
	}
	return r.all(v.deletion(ctx))
}

// deletion deletes the volume.
func (v *volume) deletion(ctx context.Context) step {
	return step{"DeleteVolume", func() error { return v.Delete(ctx) }}
}

// life is one whole life of the volume, under a name that no other has had.
func (v *volume) life(ctx context.Context, r *recorder) error {
	v.request.Name = fmt.Sprintf("life-%d", lives.Add(1))
	if err := v.up(ctx, r); err != nil {
		return err
	}
	return v.down(ctx, r)
}
