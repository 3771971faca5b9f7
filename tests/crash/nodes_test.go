package crash

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/drivertest"
)

// node is one of several on this kernel: a mount namespace of its own, in which its own folder is
// where the others' are in theirs, and a driver in it. Its pods see what is mounted there.
type node struct {
	*process
	keeper *exec.Cmd // a process of the namespace, which outlives the driver
	raw    string    // ID of a raw volume
	files  string    // of a filesystem
}

// newNode makes a node whose folder is at a path that is the same in all.
func newNode(t *testing.T, binary, dir, name, at string) *node {
	t.Helper()
	own := filepath.Join(dir, name)
	for _, folder := range []string{"staged-raw", "staged-files", "files"} {
		ok(t, os.MkdirAll(filepath.Join(own, folder), 0o700))
	}
	// A copy of a mount keeps its device for as long as the namespace is there, so it takes none of a loop
	// device along but that of its own folder.
	keeper := exec.Command("unshare", "-m", "--propagation", "private", "sh", "-c", `
		awk -v own="$0/" '/ - [^ ]+ \/dev\/loop/ && $5 != "/" && index(own, $5 "/") != 1 {print $5}' /proc/self/mountinfo | tac | xargs -r -n 1 umount -l 2>/dev/null
		mount --bind "$0" "$1" && echo ready && exec sleep 3600`, own, at)
	out, err := keeper.StdoutPipe()
	ok(t, err)
	ok(t, keeper.Start())
	t.Cleanup(func() {
		_ = keeper.Process.Kill()
		_ = keeper.Wait()
	})
	_, err = out.Read(make([]byte, 5))
	ok(t, err)

	enter := filepath.Join(dir, "driver-"+name)
	ok(t, os.WriteFile(enter, fmt.Appendf(nil, "#!/bin/sh\nexec nsenter --mount=/proc/%d/ns/mnt %s \"$@\"\n", keeper.Process.Pid, binary), 0o700))
	driver, err := drivertest.NewProcess(enter, filepath.Join(dir, "socket-"+name), "--node-id="+name, "--pool=default=file://"+at+"/pool?reservePercent=0")
	ok(t, err)
	t.Cleanup(driver.Close)
	return &node{process: &process{driver, t}, keeper: keeper}
}

// sees is a path as a pod of the node sees it.
func (n *node) sees(path string) string {
	return fmt.Sprintf("/proc/%d/root%s", n.keeper.Process.Pid, path)
}

// up makes volumes of the same names as on the other nodes, and writes what is its own.
func (n *node) up(ctx context.Context, name, at string) {
	n.t.Helper()
	for _, kind := range []string{"raw", "files"} {
		c := drivertest.Capability(map[string]string{"raw": drivertest.Block, "files": "ext4"}[kind])
		r, err := n.CreateVolume(ctx, &csi.CreateVolumeRequest{Name: kind, CapacityRange: &csi.CapacityRange{RequiredBytes: 24 * miB}, VolumeCapabilities: []*csi.VolumeCapability{c}})
		ok(n.t, err)
		id, staged := r.GetVolume().GetVolumeId(), at+"/staged-"+kind
		if kind == "raw" {
			n.raw = id
		} else {
			n.files = id
		}
		_, err = n.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{VolumeId: id, NodeId: name, VolumeCapability: c})
		ok(n.t, err)
		_, err = n.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staged, VolumeCapability: c})
		ok(n.t, err)
		for target, readOnly := range map[string]bool{at + "/" + kind: false, at + "/reader-of-" + kind: true} {
			_, err = n.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{VolumeId: id, StagingTargetPath: staged, TargetPath: target, VolumeCapability: c, Readonly: readOnly})
			ok(n.t, err)
		}
	}
	n.write(name, at)
}

func (n *node) write(what, at string) {
	n.t.Helper()
	for _, path := range []string{at + "/raw", at + "/files/data"} {
		f, err := os.OpenFile(n.sees(path), os.O_RDWR|os.O_CREATE, 0o600)
		ok(n.t, err)
		_, err = f.WriteAt(data(what), miB)
		ok(n.t, err)
		ok(n.t, f.Sync())
		ok(n.t, f.Close())
	}
}

// holds makes sure that all targets show what was written, also past the page cache.
func (n *node) holds(what, at string) {
	n.t.Helper()
	for _, path := range []string{"/raw", "/reader-of-raw", "/files/data", "/reader-of-files/data"} {
		f, err := os.Open(n.sees(at + path))
		ok(n.t, err)
		_ = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
		want := data(what)
		have := make([]byte, len(want))
		_, err = f.ReadAt(have, miB)
		ok(n.t, err)
		ok(n.t, f.Close())
		if !bytes.Equal(have, want) {
			n.t.Fatalf("%s does not show what was written", n.sees(at+path))
		}
	}
}

func (n *node) down(ctx context.Context, at string) {
	n.t.Helper()
	for kind, id := range map[string]string{"raw": n.raw, "files": n.files} {
		for _, target := range []string{at + "/" + kind, at + "/reader-of-" + kind} {
			_, err := n.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: target})
			ok(n.t, err)
		}
		_, err := n.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: at + "/staged-" + kind})
		ok(n.t, err)
		_, err = n.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: id})
		ok(n.t, err)
		_, err = n.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: id})
		ok(n.t, err)
	}
}

// loopsOver lists the loop devices over the images of the pool that is at a path, of whatever
// node's.
func loopsOver(t *testing.T, at string) (found []string) {
	t.Helper()
	all, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	ok(t, err)
	for _, path := range all {
		if backing, err := os.ReadFile(path); err == nil && strings.HasPrefix(string(backing), at+"/") {
			found = append(found, strings.Split(path, "/")[3])
		}
	}
	return found
}

// TestNodesOnOneKernel: nodes that share a kernel, as in kind, have pools at one path, with
// volumes of one name. Each is killed in turn and started again, and takes nothing from the others.
func TestNodesOnOneKernel(t *testing.T) {
	drivertest.NeedRoot(t)
	binary, err := drivertest.Build(t.TempDir())
	ok(t, err)
	dir := drivertest.Dir(t)
	at := filepath.Join(dir, "at")
	ok(t, os.Mkdir(at, 0o700))
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	t.Cleanup(func() {
		for _, loop := range loopsOver(t, at) {
			t.Errorf("%s is left", loop)
			_ = exec.Command("losetup", "-d", "/dev/"+loop).Run()
		}
	})

	var nodes []*node
	for i := range 3 {
		nodes = append(nodes, newNode(t, binary, dir, fmt.Sprint("node", i), at))
	}
	for i, n := range nodes {
		n.start()
		n.up(ctx, fmt.Sprint("node", i), at)
	}
	devices := loopsOver(t, at)
	for round := range 2 {
		for i := range nodes {
			nodes[i].Kill()
			nodes[i].start()
			for j, n := range nodes {
				n.holds(fmt.Sprint("node", j), at)
				_, err := n.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: n.raw, VolumePath: at + "/raw"})
				ok(t, err)
			}
			if now := loopsOver(t, at); strings.Join(now, " ") != strings.Join(devices, " ") {
				t.Fatalf("round %d: after the start of node%d the devices are %v, were %v", round, i, now, devices)
			}
		}
	}
	// One that has nothing any more takes nothing from the others either.
	nodes[0].down(ctx, at)
	nodes[0].Kill()
	nodes[0].start()
	for i, n := range nodes[1:] {
		n.holds(fmt.Sprint("node", i+1), at)
		n.down(ctx, at)
	}
	for _, n := range nodes {
		n.Stop()
		if left := drivertest.Gone(func() []string { return drivertest.Leftovers(n.sees(at)) }); len(left) > 0 {
			t.Errorf("left: %v", left)
		}
	}
}
