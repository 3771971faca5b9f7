package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

const node = "bench-node"

// driver is the real one, in a process of its own, and its client.
type driver struct {
	dir string
	cmd *exec.Cmd
	log *os.File

	conn *grpc.ClientConn
	csi.IdentityClient
	csi.ControllerClient
	csi.GroupControllerClient
	csi.NodeClient
}

// start starts the driver with a pool in dir, and waits until it is ready.
func (b *bench) start(ctx context.Context, dir, poolOptions string) (*driver, error) {
	return b.startOn(ctx, dir, "file://"+dir+"/pool"+poolOptions)
}

// startOn starts the driver on a pool, with all else in dir.
func (b *bench) startOn(ctx context.Context, dir, pool string) (*driver, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	d := &driver{dir: dir}
	var err error
	if d.log, err = os.Create(filepath.Join(dir, "driver.log")); err != nil {
		return nil, err
	}
	socket := filepath.Join(dir, "csi.sock")
	d.cmd = exec.Command(b.binary, "--endpoint=unix://"+socket, "--node-id="+node, "--pool=default="+pool)
	d.cmd.Stdout, d.cmd.Stderr = d.log, d.log
	// Ctrl-C is for this program, which then takes its volumes away by itself.
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := d.cmd.Start(); err != nil {
		return nil, err
	}
	if d.conn, err = grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials())); err != nil {
		d.stop()
		return nil, err
	}
	d.IdentityClient, d.ControllerClient = csi.NewIdentityClient(d.conn), csi.NewControllerClient(d.conn)
	d.GroupControllerClient, d.NodeClient = csi.NewGroupControllerClient(d.conn), csi.NewNodeClient(d.conn)
	wait, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	for { // the client itself waits a second before it tries a new socket again
		if _, err = os.Stat(socket); err == nil {
			break
		}
		select {
		case <-wait.Done():
			d.stop()
			return nil, fmt.Errorf("the driver does not serve: %w: %s", wait.Err(), read(d.log.Name()))
		case <-time.After(time.Millisecond):
		}
	}
	if _, err := d.Probe(wait, &csi.ProbeRequest{}, grpc.WaitForReady(true)); err != nil {
		d.stop()
		return nil, fmt.Errorf("the driver is not ready: %w: %s", err, read(d.log.Name()))
	}
	return d, nil
}

// stop ends the driver; its volumes stay. Calling it again does nothing.
func (d *driver) stop() {
	if d.cmd.ProcessState != nil {
		return
	}
	if d.conn != nil {
		d.conn.Close()
	}
	_ = d.cmd.Process.Signal(syscall.SIGTERM)
	late := time.AfterFunc(10*time.Second, func() { _ = d.cmd.Process.Kill() })
	_ = d.cmd.Wait()
	late.Stop()
	d.log.Close()
}

// failed adds the end of the driver's log to an error.
func (d *driver) failed(err error) error {
	if err == nil || errors.Is(err, context.Canceled) {
		return err
	}
	log := read(d.log.Name())
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
	proc := fmt.Sprintf("/proc/%d", d.cmd.Process.Pid)
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

// volume is one volume and where it is.
type volume struct {
	name, id          string
	staged, published string
	size              int64
	parameters        map[string]string
	capability        *csi.VolumeCapability
}

func thickOrThin(thin bool) map[string]string {
	if thin {
		return map[string]string{"provisioning": "thin"}
	}
	return map[string]string{"provisioning": "thick"}
}

func access(block bool) *csi.VolumeCapability {
	c := &csi.VolumeCapability{AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER}}
	if block {
		c.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
	} else {
		c.AccessType = &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: "ext4"}}
	}
	return c
}

// newVolume names a volume, and makes the folders that are the caller's to make.
func (d *driver) newVolume(name string, size int64, thin, block bool) (*volume, error) {
	v := &volume{name: name, size: size, parameters: thickOrThin(thin), capability: access(block),
		staged: filepath.Join(d.dir, "staged", name), published: filepath.Join(d.dir, "published", name)}
	return v, errors.Join(os.MkdirAll(v.staged, 0o750), os.MkdirAll(filepath.Dir(v.published), 0o750))
}

// up takes a volume from nothing to published.
func (d *driver) up(ctx context.Context, v *volume, r *recorder) error {
	if err := d.create(ctx, v, r, nil); err != nil {
		return err
	}
	if err := r.time("ControllerPublishVolume", func() error {
		_, err := d.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{VolumeId: v.id, NodeId: node, VolumeCapability: v.capability})
		return err
	}); err != nil {
		return err
	}
	if err := r.time("NodeStageVolume"+v.suffix(), func() error {
		_, err := d.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staged, VolumeCapability: v.capability})
		return err
	}); err != nil {
		return err
	}
	return r.time("NodePublishVolume"+v.suffix(), func() error {
		_, err := d.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staged, TargetPath: v.published, VolumeCapability: v.capability})
		return err
	})
}

func (d *driver) create(ctx context.Context, v *volume, r *recorder, source *csi.VolumeContentSource) error {
	name := "CreateVolume"
	if source.GetSnapshot() != nil {
		name += " (from a snapshot)"
	} else if source.GetVolume() != nil {
		name += " (clone)"
	}
	return r.time(name, func() error {
		made, err := d.CreateVolume(ctx, &csi.CreateVolumeRequest{Name: v.name, CapacityRange: &csi.CapacityRange{RequiredBytes: v.size},
			VolumeCapabilities: []*csi.VolumeCapability{v.capability}, Parameters: v.parameters, VolumeContentSource: source})
		v.id = made.GetVolume().GetVolumeId()
		return err
	})
}

func (v *volume) suffix() string {
	if v.capability.GetBlock() != nil {
		return " (block)"
	}
	return ""
}

// down takes it back to nothing.
func (d *driver) down(ctx context.Context, v *volume, r *recorder) error {
	if err := r.time("NodeUnpublishVolume"+v.suffix(), func() error {
		_, err := d.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: v.id, TargetPath: v.published})
		return err
	}); err != nil {
		return err
	}
	if err := r.time("NodeUnstageVolume"+v.suffix(), func() error {
		_, err := d.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staged})
		return err
	}); err != nil {
		return err
	}
	if err := r.time("ControllerUnpublishVolume", func() error {
		_, err := d.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: v.id, NodeId: node})
		return err
	}); err != nil {
		return err
	}
	return d.remove(ctx, v, r)
}

func (d *driver) remove(ctx context.Context, v *volume, r *recorder) error {
	return r.time("DeleteVolume", func() error {
		_, err := d.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: v.id})
		return err
	})
}
