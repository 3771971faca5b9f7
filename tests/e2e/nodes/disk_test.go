//go:build e2e

package nodes

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
)

// pool is a node's, as the cluster knows it.
func (c *cluster) pool(node string) v1alpha1.Pool {
	c.Helper()
	var o v1alpha1.Pool
	check.OK(c, c.kube.Get(context.Background(), client.ObjectKey{Name: node + ".default"}, &o))
	return o
}

// missed waits until the cluster knows that a node's pool is not there, which the pages promise within a minute.
func (c *cluster) missed(node string) {
	c.Helper()
	began := time.Now()
	c.eventually("the pool of "+node+" is missed", func() error {
		o := c.pool(node)
		if is := meta.FindStatusCondition(o.Status.Conditions, v1alpha1.Healthy); is == nil || is.Status != "False" || is.Reason != "PoolMissing" {
			return fmt.Errorf("it is %+v", is)
		}
		return nil
	})
	c.Logf("missed after %s", time.Since(began).Round(time.Second))
	if time.Since(began) > 2*time.Minute { // however busy the machine is
		c.Errorf("it was missed after %s", time.Since(began))
	}
}

// served waits until a node's pool is well, and returns its identity.
func (c *cluster) served(node string) (id string) {
	c.Helper()
	c.eventually("the pool of "+node+" is served", func() error {
		o := c.pool(node)
		if id = o.Spec.UUID; !meta.IsStatusConditionTrue(o.Status.Conditions, v1alpha1.Healthy) || id == v1alpha1.NewPool {
			return fmt.Errorf("%s: %+v", id, o.Status.Conditions)
		}
		return nil
	})
	return id
}

// TestDiskReplaced walks docs/operate/replace-a-disk.md: a disk that can be read is replaced by its copy, and nothing is lost; then that is lost, and an
// empty one takes its place.
func TestDiskReplaced(t *testing.T) {
	c := start(t)
	node, b := c.nodes[1], c.open("docs/operate/replace-a-disk.md")
	id := c.served(node)
	c.claim(claim{name: "data"})
	c.pod(pod{name: "data", node: node, claims: []string{"data"}})
	c.runs("data")
	c.onwards("data")
	least, volume := c.safe("data"), c.volume("data").Name

	// It can be read. 1: drain the node.
	c.delete("pod", "data") // it belongs to nothing that would make it anew
	drain := c.open("docs/operate/drain-and-reboot.md")
	c.Cleanup(func() { _, _ = c.try("", "kubectl", "uncordon", node) })
	c.shell(node, drain.command("kubectl drain NODE --ignore-daemonsets --delete-emptydir-data", "NODE", node))
	c.empty("no claim is left on it", drain.command("kubectl get volumeattachments -o custom-columns='PV:.spec.source.persistentVolumeName,NODE:.spec.nodeName' | grep NODE", "NODE:", "NODE:", "NODE", node))
	// 2: take the disk away.
	c.root(node, b.command("umount -l /var/lib/ashlar"))
	c.shell(node, b.command(`kubectl -n ashlar-system delete "$POD"`))
	c.missed(node)
	// 3 and 4: copy it, take it out, and mount the new one.
	d := c.disks(node)
	c.root(node, b.command("xfs_copy /dev/OLD /dev/NEW", "/dev/OLD", d.insert("pool.img"), "/dev/NEW", d.insert("new.img")))
	d.remove("pool.img")
	c.root(node, b.command("mount /dev/NEW /var/lib/ashlar", "/dev/NEW", d.device["new.img"]))
	c.shell(node, b.command("kubectl uncordon NODE", "NODE", node))
	if now := c.served(node); now != id {
		t.Errorf("the pool has the identity %s, and had %s", now, id)
	}
	c.has(least, pod{name: "look", claims: []string{"data"}, tag: "data"})

	// It is lost. 2: an empty one, which is not used.
	c.root(node, b.command("umount -l /var/lib/ashlar"))
	c.shell(node, b.command(`kubectl -n ashlar-system delete "$POD"`))
	c.missed(node)
	d.remove("new.img")
	c.root(node, b.command("mkfs.xfs /dev/NEW && mount /dev/NEW /var/lib/ashlar", "/dev/NEW", d.insert("empty.img")))
	time.Sleep(10 * time.Second) // twice as long as between two looks
	c.missed(node)
	// 3: say that this is on purpose.
	c.shell(node, b.command(`kubectl patch pools.ashlar.dev NODE.POOL --type=merge -p '{"spec":{"uuid":"new"}}'`, "NODE", node, "POOL", "default"))
	if now := c.served(node); now == id {
		t.Errorf("the new pool has the identity of the old one, %s", now)
	}
	c.eventually("the loss is reported", func() error {
		var v v1alpha1.Volume
		check.OK(t, c.kube.Get(t.Context(), client.ObjectKey{Name: volume}, &v))
		if is := meta.FindStatusCondition(v.Status.Conditions, v1alpha1.Ready); is == nil || is.Status != "False" || is.Reason != "DataLoss" {
			return fmt.Errorf("it is %+v", is)
		}
		return nil
	})
	// 4: delete the claims of what was lost.
	c.shell(node, b.command("kubectl delete pvc CLAIM -n NAMESPACE --wait=false", "CLAIM", "data", "NAMESPACE", c.ns))
	c.claim(claim{name: "anew"})
	c.pod(pod{name: "anew", node: node, claims: []string{"anew"}})
	c.runs("anew")
	c.onwards("anew")
	c.delete("pod", "anew")
}

// disks are those of a node: files beside the one that it is started with, each as a loop device while it is inserted.
type disks struct {
	*cluster
	node   string
	device map[string]string // by file
}

// disks is for the rest of the test; whichever is mounted then is the one that the node is started with.
func (c *cluster) disks(node string) *disks {
	d := &disks{c, node, map[string]string{}}
	c.Cleanup(func() {
		for file, device := range d.device {
			c.root(node, ". /run/node", `cd "$CLUSTER_DIR/nodes/$node"`,
				fmt.Sprintf("if [ \"$(findmnt -no SOURCE /var/lib/ashlar | tail -n 1)\" = %s ]; then mv %s pool.img.new; fi", device, file),
				"losetup -d "+device) // once it is unmounted
		}
		c.mount(node, "mountpoint -q /var/lib/ashlar || mount /var/lib/ashlar")
		c.root(node, ". /run/node", `cd "$CLUSTER_DIR/nodes/$node"`, "[ ! -e pool.img.new ] || mv pool.img.new pool.img", "rm -f new.img empty.img", "stat -c %Hd:%Ld /var/lib/ashlar >pool.device")
	})
	return d
}

// insert returns the device of a file, which is made if it is not there.
func (d *disks) insert(file string) string {
	d.Helper()
	d.device[file] = d.root(d.node, ". /run/node", `cd "$CLUSTER_DIR/nodes/$node"`, fmt.Sprintf("[ -e %s ] || truncate -s 30G %s", file, file),
		"device=$(losetup -f --show "+file+")", "blockdev --setrw $device", "echo $device")
	return d.device[file]
}

// remove takes a disk out, once: the number of its device may be somebody else's at once.
func (d *disks) remove(file string) {
	d.Helper()
	device := d.device[file]
	delete(d.device, file)
	d.run("", "losetup", "-d", device)
	d.eventually("nobody holds the disk "+file, func() error {
		over, err := os.ReadFile("/sys/block/" + filepath.Base(device) + "/loop/backing_file")
		if err == nil && strings.HasSuffix(strings.TrimSpace(string(over)), d.node+"/"+file) {
			return fmt.Errorf("%s is over %s", device, over)
		}
		return nil
	})
}
