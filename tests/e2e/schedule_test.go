//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/csimap"
)

const (
	driverName = cluster.DefaultDriver
	namespace  = "default"
	zone       = "topology.kubernetes.io/zone"
)

// kubernetes is where hack/kubernetes/build.sh put the programs that choose nodes and bind claims.
func kubernetes(t testing.TB) string {
	t.Helper()
	if dir := os.Getenv("KUBERNETES_BIN"); dir != "" {
		return dir
	}
	home, err := os.UserHomeDir()
	check.OK(t, err)
	found, err := filepath.Glob(filepath.Join(home, ".cache/ashlar/kubernetes-*/bin"))
	check.OK(t, err)
	if len(found) != 1 {
		t.Fatalf("no Kubernetes is built (hack/kubernetes/build.sh), or several: %v", found)
	}
	return found[0]
}

// scheduled is a cluster of two nodes whose pods are scheduled and whose claims are provisioned and
// bound as ever, by Kubernetes' own programs. There is no kubelet: a pod that has a node is at its end.
type scheduled struct {
	*parts
	all client.Client
}

func schedule(t *testing.T) *scheduled {
	t.Helper()
	p := start(t, "--topology-label="+zone)
	scheme := runtime.NewScheme()
	check.OK(t, errors.Join(clientgoscheme.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)))
	all, err := client.New(apitest.Get(t).Config(apitest.Admin), client.Options{Scheme: scheme})
	check.OK(t, err)
	c := &scheduled{p, all}
	t.Cleanup(c.forget)
	c.make(&storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: driverName}, Spec: storagev1.CSIDriverSpec{StorageCapacity: new(true)}})
	check.OK(t, client.IgnoreAlreadyExists(all.Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default", Namespace: namespace}})))
	for i, name := range nodes {
		c.registered(name, string(rune('a'+i)))
	}
	c.class("late", storagev1.VolumeBindingWaitForFirstConsumer)
	bin := kubernetes(t)
	common := []string{"--leader-elect=false", "--secure-port=0", "--authentication-skip-lookup"}
	c.program(bin+"/kube-controller-manager", append(common, "--controllers=persistentvolume-binder-controller,persistentvolumeclaim-protection-controller")...)
	c.program(bin+"/kube-scheduler", common...)
	// As in deploy/kubernetes/controller.yaml, but that capacities are nobody's.
	c.program(bin+"/csi-provisioner", "--csi-address="+c.controller.Socket, "--timeout=60s", "--retry-interval-max=30s", "--default-fstype=ext4", "--extra-create-metadata",
		"--strict-topology", "--immediate-topology=false", "--enable-capacity", "--capacity-ownerref-level=-1", "--capacity-poll-interval=1s", "--kube-api-qps=200", "--kube-api-burst=400")
	c.eventually("the scheduler is told how much room each node has", func() bool { // until then a node has none for it
		var told storagev1.CSIStorageCapacityList
		check.OK(c, c.all.List(c.Context(), &told, client.InNamespace(namespace)))
		room := map[string]bool{}
		for _, one := range told.Items {
			if one.StorageClassName == "late" && one.Capacity != nil && one.Capacity.Sign() > 0 && one.NodeTopology != nil {
				room[one.NodeTopology.MatchLabels[csimap.TopologyKey]] = true
			}
		}
		return len(room) == len(nodes)
	})
	return c
}

// forget removes what Kubernetes' programs made.
func (c *scheduled) forget() {
	ctx := context.Background()
	var volumes corev1.PersistentVolumeList
	check.OK(c, c.all.List(ctx, &volumes))
	for i := range volumes.Items {
		check.OK(c, c.all.Patch(ctx, &volumes.Items[i], client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`))))
	}
	check.OK(c, c.all.DeleteAllOf(ctx, &corev1.PersistentVolume{}))
	for _, o := range []client.Object{&storagev1.CSIStorageCapacity{}, &corev1.Event{}, &coordinationv1.Lease{}} {
		check.OK(c, c.all.DeleteAllOf(ctx, o, client.InNamespace(namespace)))
	}
}

func (c *scheduled) make(o client.Object) {
	c.Helper()
	check.OK(c, c.all.Create(c.Context(), o))
	c.Cleanup(func() { // by force: there is nobody left who would let it go; it may be gone
		ctx := context.Background()
		_ = c.all.Delete(ctx, o, client.GracePeriodSeconds(0))
		_ = c.all.Patch(ctx, o, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`)))
	})
}

// registered does for a node what its kubelet would.
func (c *scheduled) registered(name, inZone string) {
	c.Helper()
	n := &corev1.Node{}
	check.OK(c, c.all.Get(c.Context(), client.ObjectKey{Name: name}, n))
	if _, err := c.agents[name].NodeGetInfo(c.Context(), &csi.NodeGetInfoRequest{}); status.Code(err) != codes.Unavailable {
		c.Errorf("NodeGetInfo of a node without the label: %v", err)
	}
	n.Labels = map[string]string{corev1.LabelHostname: name, csimap.TopologyKey: name, zone: inZone, corev1.LabelOSStable: "linux"}
	n.Spec.Taints = nil
	check.OK(c, c.all.Update(c.Context(), n))
	n.Status.Allocatable = corev1.ResourceList{"cpu": resource.MustParse("8"), "memory": resource.MustParse("16Gi"), "pods": resource.MustParse("110")}
	n.Status.Capacity = n.Status.Allocatable
	check.OK(c, c.all.Status().Update(c.Context(), n))
	info, err := c.agents[name].NodeGetInfo(c.Context(), &csi.NodeGetInfoRequest{})
	check.OK(c, err)
	want := map[string]string{csimap.TopologyKey: name, zone: inZone}
	if have := info.GetAccessibleTopology().GetSegments(); !maps.Equal(have, want) {
		c.Fatalf("node %s says that it is in %v, not in %v", name, have, want)
	}
	c.make(&storagev1.CSINode{ObjectMeta: metav1.ObjectMeta{Name: name, OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: name, UID: n.UID}}},
		Spec: storagev1.CSINodeSpec{Drivers: []storagev1.CSINodeDriver{{Name: driverName, NodeID: name, TopologyKeys: slices.Sorted(maps.Keys(want))}}}})
}

func (c *scheduled) program(path string, flags ...string) {
	c.Helper()
	log, err := os.OpenFile(filepath.Join(c.dir, filepath.Base(path)+".log"), os.O_CREATE|os.O_WRONLY, 0o600)
	check.OK(c, err)
	defer log.Close()
	cmd := exec.Command(path, append(flags, "--kubeconfig="+c.dir+"/kubeconfig")...)
	cmd.Stdout, cmd.Stderr, cmd.Env = log, log, append(os.Environ(), "NAMESPACE="+namespace, "POD_NAME=none")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	check.OK(c, cmd.Start())
	c.Cleanup(func() {
		_ = cmd.Process.Kill() // it may have ended
		_ = cmd.Wait()
		if text, err := os.ReadFile(log.Name()); err == nil && c.Failed() {
			c.Logf("%s:\n%s", cmd.Path, text[max(0, len(text)-4000):])
		}
	})
}

func (c *scheduled) class(name string, mode storagev1.VolumeBindingMode, zones ...string) {
	c.Helper()
	class := &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Provisioner: driverName, VolumeBindingMode: &mode,
		ReclaimPolicy: new(corev1.PersistentVolumeReclaimDelete)}
	if len(zones) > 0 {
		class.AllowedTopologies = []corev1.TopologySelectorTerm{{MatchLabelExpressions: []corev1.TopologySelectorLabelRequirement{{Key: zone, Values: zones}}}}
	}
	c.make(class)
}

// claim makes a claim, of a copy if a source is named.
func (c *scheduled) claim(name, class, source string) *corev1.PersistentVolumeClaim {
	c.Helper()
	o := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: namespace}, Spec: corev1.PersistentVolumeClaimSpec{
		AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, StorageClassName: &class,
		Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{"storage": resource.MustParse("16Mi")}}}}
	if source != "" {
		o.Spec.DataSource = &corev1.TypedLocalObjectReference{Kind: "PersistentVolumeClaim", Name: source}
	}
	c.make(o)
	return o
}

// pod makes a pod that takes so much of a node, and may be held to one.
func (c *scheduled) pod(name, claim, cpu, node string) {
	c.Helper()
	o := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: namespace}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "none",
		Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{"cpu": resource.MustParse(cpu)}}}}}}
	if claim != "" {
		o.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim}}}}
	}
	if node != "" {
		o.Spec.NodeSelector = map[string]string{corev1.LabelHostname: node}
	}
	c.make(o)
}

func (c *scheduled) node(name string) string {
	c.Helper()
	o := &corev1.Pod{}
	check.OK(c, c.all.Get(c.Context(), client.ObjectKey{Namespace: namespace, Name: name}, o))
	return o.Spec.NodeName
}

// runs waits until a pod has a node, which has to be the one that is named, if any is.
func (c *scheduled) runs(name, want string) {
	c.Helper()
	c.eventually("pod "+name+" has a node", func() bool { return c.node(name) != "" })
	if have := c.node(name); want != "" && have != want {
		c.Errorf("pod %s is on %s, not on %s", name, have, want)
	}
}

// said waits for an event of an object that has the text.
func (c *scheduled) said(name, text string) {
	c.Helper()
	c.eventually(fmt.Sprintf("an event of %s says %q", name, text), func() bool {
		var events corev1.EventList
		check.OK(c, c.all.List(c.Context(), &events, client.InNamespace(namespace)))
		for _, e := range events.Items {
			if e.InvolvedObject.Name == name && strings.Contains(e.Message, text) {
				return true
			}
		}
		return false
	})
}

// pv is the PersistentVolume of a claim, once it is bound.
func (c *scheduled) pv(claim string) *corev1.PersistentVolume {
	c.Helper()
	pvc, pv := &corev1.PersistentVolumeClaim{}, &corev1.PersistentVolume{}
	c.eventually("claim "+claim+" is bound", func() bool {
		check.OK(c, c.all.Get(c.Context(), client.ObjectKey{Namespace: namespace, Name: claim}, pvc))
		return pvc.Status.Phase == corev1.ClaimBound
	})
	check.OK(c, c.all.Get(c.Context(), client.ObjectKey{Name: pvc.Spec.VolumeName}, pv))
	return pv
}

// TestScheduledCopies: a clone whose pod waits for it is made where its source is, though the
// scheduler has chosen another node, and its pod runs there; chains of them too. The records and
// the objects name whom they were made for. Where the class does not allow the source's node, the claim is
// told so.
func TestScheduledCopies(t *testing.T) {
	c := schedule(t)
	c.claim("source", "late", "")
	c.pod("source", "source", "100m", "node-a")
	c.runs("source", "node-a")
	c.pod("busy", "", "4", "node-a") // the scheduler would rather have what comes elsewhere
	c.runs("busy", "node-a")
	source := "source"
	for _, name := range []string{"clone", "clone-of-clone"} {
		pvc := c.claim(name, "late", source)
		c.pod(name, name, "100m", "")
		c.runs(name, "node-a")
		source = name
		pv := c.pv(name)
		v := &v1alpha1.Volume{}
		_, key, _ := strings.Cut(pv.Spec.CSI.VolumeHandle[len("vol."):], ".")
		check.OK(t, c.all.Get(t.Context(), client.ObjectKey{Name: key}, v))
		if ref := v.Spec.ClaimRef; ref == nil || ref.Name != name || ref.Namespace != namespace || v.Spec.PersistentVolume != pv.Name {
			t.Errorf("the object of %s says %+v, %q", name, ref, v.Spec.PersistentVolume)
		}
		record, err := os.ReadFile(filepath.Join(c.dir, "node-a/pool/volumes", key+".rec"))
		check.OK(t, err)
		for _, label := range []string{`"pvc.name":"` + pvc.Name + `"`, `"pvc.namespace":"` + namespace + `"`, `"pv.name":"` + pv.Name + `"`} {
			if !strings.Contains(string(record), label) {
				t.Errorf("the record of %s does not have %s", name, label)
			}
		}
	}
	c.class("zone-b", storagev1.VolumeBindingWaitForFirstConsumer, "b")
	c.claim("forbidden", "zone-b", "source")
	c.pod("forbidden", "forbidden", "100m", "")
	c.said("forbidden", "class zone-b does not allow that node")
}

// TestScheduledElsewhere: a pod whose node went down before its volume was made runs on another.
func TestScheduledElsewhere(t *testing.T) {
	for what, down := range map[string]func(c *scheduled){
		"before it is asked": func(c *scheduled) { c.parts.node("node-b", false) },
		"while it is asked": func(c *scheduled) {
			c.eventually("the volume is asked of node-b", func() bool {
				var volumes v1alpha1.VolumeList
				check.OK(c, c.all.List(c.Context(), &volumes))
				return len(volumes.Items) == 1 && volumes.Items[0].Spec.NodeName == "node-b"
			})
			c.parts.node("node-b", false)
		},
	} {
		t.Run(what, func(t *testing.T) {
			c := schedule(t)
			c.pod("busy", "", "4", "node-a")
			c.runs("busy", "node-a")
			c.agents["node-b"].Kill()
			if what == "before it is asked" {
				down(c)
			}
			c.claim("claim", "late", "")
			c.pod("pod", "claim", "100m", "")
			if what != "before it is asked" {
				down(c)
			}
			// As the node controller does with a node that is not ready.
			n := &corev1.Node{}
			check.OK(t, c.all.Get(t.Context(), client.ObjectKey{Name: "node-b"}, n))
			n.Spec.Taints = []corev1.Taint{{Key: corev1.TaintNodeNotReady, Effect: corev1.TaintEffectNoSchedule}}
			check.OK(t, c.all.Update(t.Context(), n))
			c.runs("pod", "node-a")
			check.OK(t, c.agents["node-b"].Start())
			c.ready(c.agents["node-b"])
			pv := c.pv("claim")
			c.agree(map[string]string{pv.Name: pv.Spec.CSI.VolumeHandle})
		})
	}
}

// TestScheduledZones: volumes are in the zones that their class allows, bound at once or when a pod
// waits for them.
func TestScheduledZones(t *testing.T) {
	c := schedule(t)
	for mode, name := range map[storagev1.VolumeBindingMode]string{storagev1.VolumeBindingImmediate: "now", storagev1.VolumeBindingWaitForFirstConsumer: "later"} {
		for i, node := range nodes {
			in := string(rune('a' + i))
			class := name + "-" + in
			c.class(class, mode, in)
			c.claim(class, class, "")
			if mode == storagev1.VolumeBindingImmediate {
				c.pv(class)
			}
			c.pod(class, class, "100m", "")
			c.runs(class, node)
		}
	}
	c.class("nowhere", storagev1.VolumeBindingImmediate, "z")
	c.claim("nowhere", "nowhere", "")
	c.said("nowhere", "no node is in")
	if pv := c.pv("now-b"); !maps.Equal(affinity(pv), map[string]string{csimap.TopologyKey: "node-b"}) {
		t.Errorf("the PersistentVolume is bound to %v", affinity(pv))
	}
}

// affinity is what a PersistentVolume asks of a node.
func affinity(pv *corev1.PersistentVolume) map[string]string {
	asked := map[string]string{}
	for _, term := range pv.Spec.NodeAffinity.Required.NodeSelectorTerms {
		for _, e := range term.MatchExpressions {
			asked[e.Key] = strings.Join(e.Values, ",")
		}
	}
	return asked
}
