package crash

import (
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

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/process"
)

// node is one of several on this kernel: a mount namespace of its own, in which its own directory is
// where the others' are in theirs, and a driver in it. Its pods see what is mounted there.
type node struct {
	*environment
	keeper  *exec.Cmd    // a process of the namespace, which outlives the driver
	volumes []*co.Volume // a raw one, and one with a filesystem
}

// newNode makes a node whose directory is at a path that is the same in all.
func newNode(t *testing.T, binary, dir, name, at string) *node {
	t.Helper()
	own := filepath.Join(dir, name)
	for _, path := range []string{"stage/raw", "stage/files", "pod", "reader"} { // what the CO makes, it makes in another namespace
		check.OK(t, os.MkdirAll(filepath.Join(own, path), 0o700))
	}
	// A copy of a mount keeps its device for as long as the namespace is there, so it takes none of a loop
	// device along but that of its own directory.
	keeper := exec.Command("unshare", "-m", "--propagation", "private", "sh", "-c", `
		awk -v own="$0/" '/ - [^ ]+ \/dev\/loop/ && $5 != "/" && index(own, $5 "/") != 1 {print $5}' /proc/self/mountinfo | tac | xargs -r -n 1 umount -l 2>/dev/null
		mount --bind "$0" "$1" && echo ready && exec sleep 3600`, own, at)
	out, err := keeper.StdoutPipe()
	check.OK(t, err)
	check.OK(t, keeper.Start())
	t.Cleanup(func() {
		_ = keeper.Process.Kill()
		_ = keeper.Wait()
	})
	_, err = out.Read(make([]byte, 5))
	check.OK(t, err)

	driver, err := process.New(filepath.Join(dir, "socket-"+name), name,
		"nsenter", fmt.Sprintf("--mount=/proc/%d/ns/mnt", keeper.Process.Pid), binary, "--pool=default=file://"+at+"/pool?reservePercent=0")
	check.OK(t, err)
	t.Cleanup(driver.Close)
	return &node{environment: &environment{driver, t}, keeper: keeper}
}

// sees is a path as a pod of the node sees it.
func (n *node) sees(path string) string {
	return fmt.Sprintf("/proc/%d/root%s", n.keeper.Process.Pid, path)
}

// up makes volumes of the same names as on the other nodes, and writes what is its own.
func (n *node) up(ctx context.Context, name, at string) {
	n.t.Helper()
	client := co.New(n.Conn, name, at)
	for _, r := range []*csi.CreateVolumeRequest{co.Request("raw", co.Block, 24*miB), co.Request("files", "ext4", 24*miB)} {
		v, err := client.Create(ctx, r)
		check.OK(n.t, err)
		n.volumes = append(n.volumes, v)
		_, err = v.Up(ctx)
		check.OK(n.t, err)
		check.OK(n.t, v.Publish(ctx, v.Target("reader"), true))
	}
	n.write(name)
}

func (n *node) write(what string) {
	n.t.Helper()
	for _, v := range n.volumes {
		check.OK(n.t, content(what).Write(n.sees(v.File(v.Target("pod")))))
	}
}

// holds makes sure that all targets show what was written, also past the page cache.
func (n *node) holds(what string) {
	n.t.Helper()
	for _, v := range n.volumes {
		for _, pod := range []string{"pod", "reader"} {
			path := n.sees(v.File(v.Target(pod)))
			f, err := os.Open(path)
			check.OK(n.t, err)
			_ = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
			check.OK(n.t, f.Close())
			check.OK(n.t, content(what).In(path))
		}
	}
}

func (n *node) down(ctx context.Context) {
	n.t.Helper()
	for _, v := range n.volumes {
		check.OK(n.t, v.Down(ctx, v.Target("pod"), v.Target("reader")))
		check.OK(n.t, v.Delete(ctx))
	}
}

// loopsOver lists the loop devices over the images of the pool that is at a path, of whatever
// node's.
func loopsOver(t *testing.T, at string) (found []string) {
	t.Helper()
	all, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	check.OK(t, err)
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
	binary := built(t)
	dir := drivertest.Dir(t)
	at := filepath.Join(dir, "at")
	check.OK(t, os.Mkdir(at, 0o700))
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
				n.holds(fmt.Sprint("node", j))
				_, err := n.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: n.volumes[0].ID, VolumePath: n.volumes[0].Target("pod")})
				check.OK(t, err)
			}
			if now := loopsOver(t, at); strings.Join(now, " ") != strings.Join(devices, " ") {
				t.Fatalf("round %d: after the start of node%d the devices are %v, were %v", round, i, now, devices)
			}
		}
	}
	// One that has nothing any more takes nothing from the others either.
	nodes[0].down(ctx)
	nodes[0].Kill()
	nodes[0].start()
	for i, n := range nodes[1:] {
		n.holds(fmt.Sprint("node", i+1))
		n.down(ctx)
	}
	for _, n := range nodes {
		check.OK(t, n.Stop())
		if left := drivertest.Gone(func() []string { return drivertest.Leftovers(n.sees(at)) }); len(left) > 0 {
			t.Errorf("left: %v", left)
		}
	}
}
