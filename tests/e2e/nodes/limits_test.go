//go:build e2e

package nodes

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/check"
)

// limitsOnNode is a shell command that prints the io.max of the group above all pods of its kubelet, and nothing where
// control groups are of version 1.
const limitsOnNode = `[ "$(stat -fc %T /sys/fs/cgroup)" = cgroup2fs ] || exit 0; echo version 2; find /sys/fs/cgroup -name io.max -path '*kubepods*' | while read -r f; do
	case $(basename "$(dirname "$f")") in kubepods | kubepods.slice | *-kubepods.slice) cat "$f" ;; esac; done`

// TestLimits: a VolumeAttributesClass limits the volumes of running pods of each QoS class, and another one takes the limits away; on nodes that cannot
// keep them the claim says why, and its pod goes on.
func TestLimits(t *testing.T) {
	c := start(t)
	node := c.nodes[0]
	for name, value := range map[string]string{"limits-slow": "25", "limits-none": "max"} {
		c.run(fmt.Sprintf(`{apiVersion: storage.k8s.io/v1, kind: VolumeAttributesClass, metadata: {name: %s}, driverName: %s, parameters: {writeIOPS: %q}}`, name, driverName, value),
			"kubectl", "apply", "-f", "-")
		t.Cleanup(func() { _, _ = c.try("", "kubectl", "delete", "volumeattributesclass", name, "--wait=false") }) // it goes with the last claim that has it
	}
	on := func() string {
		out, err := c.try("", os.Getenv("CLUSTER"), "on", node, "sh", "-c", limitsOnNode)
		check.OK(t, err)
		return out
	}
	kept := strings.Contains(on(), "version 2")
	t.Logf("the nodes keep limits: %v", kept)

	names := []string{"besteffort", "burstable", "raw"}
	c.claim(claim{name: "besteffort"})
	c.claim(claim{name: "burstable"})
	c.claim(claim{name: "raw", block: true})
	c.pod(pod{name: "besteffort", node: node, claims: []string{"besteffort"}})
	c.pod(pod{name: "burstable", node: node, claims: []string{"burstable"}, cpu: "10m"})
	c.pod(pod{name: "raw", node: node, claims: []string{"raw!"}})
	c.runs(names...)
	c.onwards(names...)

	set := func(class string) {
		for _, name := range names {
			c.kubectl("patch", "pvc", name, "--type=merge", "-p", fmt.Sprintf(`{"spec": {"volumeAttributesClassName": %q}}`, class))
		}
	}
	set("limits-slow")
	if kept {
		c.eventually("each volume has its limit", func() error {
			if n := strings.Count(on(), "wiops=25"); n != len(names) {
				return fmt.Errorf("%d of %d: %s", n, len(names), on())
			}
			return nil
		})
	} else {
		for _, name := range names {
			c.eventually("the claim "+name+" says why it has no limits", func() error {
				if said := c.events(name); !strings.Contains(said, "version 2") || strings.Count(said, "node "+node) != 1 {
					return errors.New(said)
				}
				return nil
			})
		}
	}
	c.onwards(names...)

	set("limits-none")
	for _, name := range names {
		c.eventually("the claim "+name+" has the class", func() error {
			var claim corev1.PersistentVolumeClaim
			err := c.kube.Get(context.Background(), client.ObjectKey{Namespace: c.ns, Name: name}, &claim)
			if now := claim.Status.CurrentVolumeAttributesClassName; err == nil && (now == nil || *now != "limits-none") {
				err = fmt.Errorf("it has %v: %s", claim.Status.ModifyVolumeStatus, c.events(name))
			}
			return err
		})
	}
	if out := on(); strings.Contains(out, "wiops=25") {
		t.Errorf("the limits are left: %s", out)
	}
	c.onwards(names...)
}
