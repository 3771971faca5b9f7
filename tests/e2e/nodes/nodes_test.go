//go:build e2e

// Package nodes is what make e2e does with the driver on a cluster of several real nodes that
// share one kernel: nodes that go down, come back and are deleted, kubelets and drivers that
// are killed and restarted under load, and the lives of volumes with the real scheduler,
// provisioner and attacher. run.sh in the directory above builds and starts it, with
// $KUBECONFIG, $IMAGE for the pods, and $CLUSTER, the cluster.sh of that cluster.
//
// Nothing here is timed: what is waited for has minutes to come true.
package nodes

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
)

//go:embed writer.sh
var writerScript string

// patience is how long anything may take, on a busy machine.
const patience = 5 * time.Minute

const driverName = "block.csi.ashlar.dev"

func TestMain(m *testing.M) {
	log.SetLogger(klog.Background())
	os.Exit(m.Run())
}

// cluster is the cluster, with a namespace for one test.
type cluster struct {
	testing.TB
	kube  client.Client
	ns    string
	nodes []string
}

// start makes a namespace. At the end of the test it goes, and then the nodes have to have
// nothing left of what was in it.
func start(t *testing.T) *cluster {
	t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", os.Getenv("KUBECONFIG"))
	check.OK(t, err)
	config.QPS = -1
	scheme := runtime.NewScheme()
	check.OK(t, errors.Join(v1alpha1.AddToScheme(scheme), clientgoscheme.AddToScheme(scheme)))
	kube, err := client.New(config, client.Options{Scheme: scheme})
	check.OK(t, err)
	c := &cluster{TB: t, kube: kube, ns: "nodes-" + strings.ToLower(t.Name())}
	c.nodes = strings.Fields(c.run("", os.Getenv("CLUSTER"), "nodes"))
	if len(c.nodes) < 3 {
		t.Fatalf("%d nodes, want 3", len(c.nodes))
	}
	c.kubectl("create", "namespace", c.ns)
	c.kubectl("create", "configmap", "writer", "--from-literal=writer.sh="+writerScript)
	t.Cleanup(c.end)
	return c
}

// end removes what the test made, and looks at what is left.
func (c *cluster) end() {
	failed := c.Failed()
	if failed {
		c.describe()
	}
	if os.Getenv("KEEP") == "1" && failed {
		return
	}
	defer func() {
		if !failed && c.Failed() {
			c.describe()
		}
	}()
	c.kubectl("delete", "namespace", c.ns, "--wait=false")
	// Two looks, as both have to be tried: a namespace that stays is no reason to leave volumes.
	defer c.eventually("nothing of it is left", c.left)
	c.eventually("its namespace is gone", func() error {
		err := c.kube.Get(context.Background(), client.ObjectKey{Name: c.ns}, &corev1.Namespace{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return errors.Join(errors.New("it is there"), err)
	})
}

// left says what there still is of volumes.
func (c *cluster) left() error {
	ctx := context.Background()
	var volumes v1alpha1.VolumeList
	var snapshots v1alpha1.SnapshotList
	var attachments storagev1.VolumeAttachmentList
	if err := errors.Join(c.kube.List(ctx, &volumes), c.kube.List(ctx, &snapshots), c.kube.List(ctx, &attachments)); err != nil {
		return err
	}
	var errs []error
	for _, v := range volumes.Items {
		errs = append(errs, fmt.Errorf("volume %s on %s", v.Name, v.Spec.NodeName))
	}
	for _, s := range snapshots.Items {
		errs = append(errs, fmt.Errorf("snapshot %s on %s", s.Name, s.Spec.NodeName))
	}
	for _, a := range attachments.Items {
		errs = append(errs, fmt.Errorf("attachment %s of %s", a.Name, *a.Spec.Source.PersistentVolumeName))
	}
	for _, node := range c.nodes {
		if files, err := c.try("", os.Getenv("CLUSTER"), "on", node, "sh", "-c", "cd /var/lib/ashlar && ls volumes snapshots | grep -e img -e rec || true"); err != nil || files != "" {
			errs = append(errs, errors.Join(fmt.Errorf("on %s: %s", node, files), err))
		}
		if devices := c.devices(node); len(devices) > 0 {
			errs = append(errs, fmt.Errorf("on %s: %v", node, devices))
		}
	}
	return errors.Join(errs...)
}

// describe logs what may be of use to somebody who looks why a test failed.
func (c *cluster) describe() {
	for _, args := range [][]string{
		{"get", "pods,pvc", "-o", "wide"},
		{"get", "pv,volumeattachments,volumes.ashlar.dev,snapshots.ashlar.dev,pools.ashlar.dev", "-o", "wide"},
		{"get", "nodes"},
		{"get", "events", "--sort-by=.lastTimestamp", "-o", "custom-columns=LAST:.lastTimestamp,TIMES:.count,REASON:.reason,OF:.involvedObject.name,MESSAGE:.message", "--field-selector=type=Warning"},
	} {
		out, err := c.try("", "kubectl", append([]string{"-n", c.ns}, args...)...)
		c.Logf("%v: %s %v", args, out, err)
	}
}

// try runs a program, with that on its standard input.
func (c *cluster) try(in, program string, args ...string) (string, error) {
	command := exec.Command(program, args...)
	command.Stdin = strings.NewReader(in)
	var stderr strings.Builder
	command.Stderr = &stderr
	out, err := command.Output()
	if err != nil {
		err = fmt.Errorf("%s %.200s: %w: %s", program, strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return strings.TrimSpace(string(out)), err
}

func (c *cluster) run(in, program string, args ...string) string {
	c.Helper()
	out, err := c.try(in, program, args...)
	check.OK(c, err)
	return out
}

func (c *cluster) kubectl(args ...string) string {
	c.Helper()
	return c.run("", "kubectl", append([]string{"-n", c.ns}, args...)...)
}

func (c *cluster) apply(manifest string) {
	c.Helper()
	c.run(manifest, "kubectl", "-n", c.ns, "apply", "-f", "-")
}

// on runs a command on a node.
func (c *cluster) on(node string, args ...string) {
	c.Helper()
	c.run("", os.Getenv("CLUSTER"), append([]string{"on", node}, args...)...)
}

// power does "stop", "kill" or "start" to a node.
func (c *cluster) power(verb, node string) {
	c.Helper()
	c.Logf("%s %s", verb, node)
	c.run("", os.Getenv("CLUSTER"), verb, node)
}

// up starts a node that was killed, whatever comes of the test, and waits until it is ready.
func (c *cluster) up(node string) {
	c.Helper()
	c.power("start", node)
	c.ready(node)
}

// ready waits until a node is, and the driver on it.
func (c *cluster) ready(node string) {
	c.Helper()
	c.eventually(node+" is ready", func() error {
		var n corev1.Node
		if err := c.kube.Get(context.Background(), client.ObjectKey{Name: node}, &n); err != nil {
			return err
		}
		for _, condition := range n.Status.Conditions {
			// A node that came back is "ready" of old until its kubelet says so itself.
			if condition.Type == corev1.NodeReady && condition.Status == corev1.ConditionTrue && time.Since(condition.LastHeartbeatTime.Time) < 6*time.Minute {
				_, err := c.driver(node)
				return err
			}
		}
		return errors.New("it is not ready")
	})
}

// driver returns the driver's pod on a node, which is ready and known to its kubelet.
func (c *cluster) driver(node string) (corev1.Pod, error) {
	var pods corev1.PodList
	if err := c.kube.List(context.Background(), &pods, client.InNamespace("ashlar-system"), client.MatchingLabels{"app.kubernetes.io/component": "node"}); err != nil {
		return corev1.Pod{}, err
	}
	for _, p := range pods.Items {
		if p.Spec.NodeName == node && p.DeletionTimestamp == nil && isReady(&p) {
			_, err := c.try("", os.Getenv("CLUSTER"), "on", node, "test", "-S", "/var/lib/kubelet/plugins_registry/"+driverName+"-reg.sock")
			return p, err
		}
	}
	return corev1.Pod{}, fmt.Errorf("no driver is ready on %s", node)
}

func isReady(p *corev1.Pod) bool {
	return slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// replaceDriver deletes the driver's pod on a node, and waits for the next one.
func (c *cluster) replaceDriver(node string) {
	c.Helper()
	old, err := c.driver(node)
	check.OK(c, err)
	c.run("", "kubectl", "-n", old.Namespace, "delete", "pod", old.Name, "--wait=false")
	c.eventually("another driver is ready on "+node, func() error {
		p, err := c.driver(node)
		if err == nil && p.UID == old.UID {
			err = errors.New("it is still the old one")
		}
		return err
	})
}

// killDriver kills the driver's process on a node; its kubelet, if it runs, starts it again.
func (c *cluster) killDriver(node string) {
	c.Helper()
	c.on(node, "sh", "-c", `for p in /proc/[0-9]*; do
		[ "$(cat $p/comm 2>/dev/null)" = driver ] && tr '\0' ' ' <$p/cmdline | grep -q -e --mode=node && kill -KILL ${p#/proc/} && echo killed; done | grep killed`)
}

// devices are the loop devices over files of a node's pool: device, inode, and whether it
// goes with its last user, which is also what a device in use has been told that somebody
// wanted to free.
func (c *cluster) devices(node string) []string {
	out, err := c.try("", os.Getenv("CLUSTER"), "on", node, "sh", "-c",
		`losetup -ln -O NAME,BACK-INO,AUTOCLEAR,BACK-MAJ:MIN | awk -v pool="$(stat -c %Hd:%Ld /var/lib/ashlar)" '$4 == pool { print $1, $2, $3 }'`)
	if err != nil {
		return []string{err.Error()}
	}
	if out == "" {
		return nil
	}
	return strings.Split(out, "\n")
}

// used waits until a node has said that it uses a volume, as it does every ten seconds where it has news. Kubernetes takes what
// it tried to attach for mounted until the node has said that it uses it and then that it does not, or for six minutes.
func (c *cluster) used(node, handle string) {
	c.Helper()
	c.eventually(node+" says that it uses "+handle, func() error {
		var n corev1.Node
		if err := c.kube.Get(context.Background(), client.ObjectKey{Name: node}, &n); err != nil {
			return err
		}
		if name := corev1.UniqueVolumeName("kubernetes.io/csi/" + driverName + "^" + handle); !slices.Contains(n.Status.VolumesInUse, name) {
			return fmt.Errorf("it says that it uses %v", n.Status.VolumesInUse)
		}
		return nil
	})
}

// eventually waits until there is no error any more.
func (c *cluster) eventually(what string, is func() error) {
	c.Helper()
	c.within(patience, what, is)
}

// within is eventually for what takes its time.
func (c *cluster) within(most time.Duration, what string, is func() error) {
	c.Helper()
	var err error
	for end := time.Now().Add(most); ; time.Sleep(500 * time.Millisecond) {
		if err = is(); err == nil {
			return
		}
		if time.Now().After(end) {
			c.Fatalf("never: %s: %v", what, err)
		}
	}
}

// claim is a PersistentVolumeClaim, by default of a filesystem for one node.
type claim struct {
	name   string
	mode   string // ReadWriteOnce
	block  bool
	class  string // ashlar
	source string // KIND/NAME of what it is a copy of
	volume string // the PersistentVolume that it is for
}

func (c *cluster) claim(v claim) {
	c.Helper()
	spec := map[string]any{
		"storageClassName": "ashlar", "accessModes": []string{"ReadWriteOnce"}, "volumeMode": "Filesystem",
		"resources": map[string]any{"requests": map[string]any{"storage": "64Mi"}},
	}
	if v.mode != "" {
		spec["accessModes"] = []string{v.mode}
	}
	if v.block {
		spec["volumeMode"] = "Block"
	}
	if v.class != "" {
		spec["storageClassName"] = v.class
	}
	if kind, name, ok := strings.Cut(v.source, "/"); ok {
		source := map[string]any{"kind": kind, "name": name}
		if kind == "VolumeSnapshot" {
			source["apiGroup"] = "snapshot.storage.k8s.io"
		}
		spec["dataSource"] = source
	}
	if v.volume != "" {
		spec["volumeName"] = v.volume
	}
	c.object("v1", "PersistentVolumeClaim", v.name, spec)
}

// object makes an object with that spec.
func (c *cluster) object(version, kind, name string, spec any) {
	c.Helper()
	raw, err := json.Marshal(map[string]any{"apiVersion": version, "kind": kind, "metadata": map[string]any{"name": name}, "spec": spec})
	check.OK(c, err)
	c.apply(string(raw))
}

// pod is one that writes to claims (writer.sh), or looks at them.
type pod struct {
	name    string
	node    string            // where it has to be; anywhere if empty
	prefers string            // the node where it is if it can
	claims  []string          // mounted at /NAME; block devices end with "!"
	subPath map[string]string // of claims that are mounted in part
	tag     string            // of its writer, by default its name
	command string            // run (the default), check, or sleep
	cpu     string            // requested
}

func (p *pod) spec() map[string]any {
	tag, command := p.tag, p.command
	if tag == "" {
		tag = p.name
	}
	if command == "" {
		command = "run"
	}
	container := map[string]any{"name": "main", "image": os.Getenv("IMAGE")}
	var mounts, devices []any
	mounts = append(mounts, map[string]any{"name": "writer", "mountPath": "/writer"})
	volumes := []any{map[string]any{"name": "writer", "configMap": map[string]any{"name": "writer"}}}
	args := []string{"sh", "/writer/writer.sh", command, tag}
	for _, claim := range p.claims {
		name, block := strings.CutSuffix(claim, "!")
		if block {
			devices = append(devices, map[string]any{"name": name, "devicePath": "/" + name})
		} else {
			mount := map[string]any{"name": name, "mountPath": "/" + name}
			if sub := p.subPath[name]; sub != "" {
				mount["subPath"] = sub
			}
			mounts = append(mounts, mount)
		}
		args = append(args, "/"+name)
		volumes = append(volumes, map[string]any{"name": name, "persistentVolumeClaim": map[string]any{"claimName": name}})
	}
	if command == "sleep" {
		args = []string{"sleep", "1000000"}
	}
	container["command"], container["volumeMounts"], container["volumeDevices"] = args, mounts, devices
	if p.cpu != "" {
		container["resources"] = map[string]any{"requests": map[string]any{"cpu": p.cpu}}
	}
	// With 0 a pod's object goes before its containers, and another one of its name runs beside them.
	spec := map[string]any{"terminationGracePeriodSeconds": 1, "containers": []any{container}, "volumes": volumes}
	if p.node != "" {
		spec["nodeSelector"] = map[string]any{"kubernetes.io/hostname": p.node}
	}
	if p.prefers != "" {
		there := map[string]any{"matchExpressions": []any{map[string]any{"key": "kubernetes.io/hostname", "operator": "In", "values": []any{p.prefers}}}}
		spec["affinity"] = map[string]any{"nodeAffinity": map[string]any{
			"preferredDuringSchedulingIgnoredDuringExecution": []any{map[string]any{"weight": 100, "preference": there}},
		}}
	}
	if command == "check" {
		spec["restartPolicy"] = "Never"
	}
	return spec
}

func (c *cluster) pod(p pod) {
	c.Helper()
	c.object("v1", "Pod", p.name, p.spec())
}

func (c *cluster) getPod(name string) (corev1.Pod, error) {
	var p corev1.Pod
	err := c.kube.Get(context.Background(), client.ObjectKey{Namespace: c.ns, Name: name}, &p)
	return p, err
}

// runs waits until pods run, and returns the node of the last one.
func (c *cluster) runs(names ...string) string {
	c.Helper()
	var node string
	for _, name := range names {
		c.eventually(name+" runs", func() error {
			p, err := c.getPod(name)
			if err == nil && !isReady(&p) {
				err = fmt.Errorf("it is %s on %q: %s", p.Status.Phase, p.Spec.NodeName, c.events(name))
			}
			node = p.Spec.NodeName
			return err
		})
	}
	return node
}

// events are the warnings about an object, the last of each kind.
func (c *cluster) events(name string) string {
	var all corev1.EventList
	if err := c.kube.List(context.Background(), &all, client.InNamespace(c.ns)); err != nil {
		return err.Error()
	}
	said := map[string]string{}
	for _, e := range all.Items {
		if e.InvolvedObject.Name == name && e.Type == corev1.EventTypeWarning {
			said[e.Reason] = e.Message
		}
	}
	return fmt.Sprint(said)
}

func (c *cluster) delete(kind string, names ...string) {
	c.Helper()
	c.kubectl(append([]string{"delete", kind, "--timeout=" + patience.String()}, names...)...)
}

var safe = regexp.MustCompile(`(?m)^safe (\d+)$`)

// safely returns the last number that a writer calls safe, -1 if it has none yet, and an
// error if anything failed that it did, ever.
func (c *cluster) safely(name string) (int, error) {
	out, err := c.try("", "kubectl", "-n", c.ns, "logs", name)
	if err != nil {
		return -1, err
	}
	if strings.Contains(out, "FAILED") {
		return -1, fmt.Errorf("%s: %s", name, out[max(0, strings.Index(out, "FAILED")-100):])
	}
	all := safe.FindAllStringSubmatch(out, -1)
	if len(all) == 0 {
		return -1, nil
	}
	return strconv.Atoi(all[len(all)-1][1])
}

// onwards waits until writers have written on from here, and fails the test if anything did
// that they did.
func (c *cluster) onwards(writers ...string) {
	c.Helper()
	from := map[string]int{}
	for _, name := range writers {
		from[name] = c.safe(name)
	}
	for _, name := range writers {
		c.eventually(name+" writes on", func() error {
			now, err := c.safely(name)
			if err == nil && now < from[name]+5 {
				err = fmt.Errorf("it is at %d, and was at %d: %s", now, from[name], c.events(name))
			}
			if err != nil && strings.Contains(err.Error(), "FAILED") {
				c.Fatal(err)
			}
			return err
		})
	}
}

// safe returns the last number that a writer calls safe.
func (c *cluster) safe(name string) int {
	c.Helper()
	var n int
	c.eventually("the log of "+name, func() (err error) {
		n, err = c.safely(name)
		if err != nil && strings.Contains(err.Error(), "FAILED") {
			c.Fatal(err)
		}
		return err
	})
	return n
}

// has has a pod look at all that a writer wrote to claims, of which everything up to that
// number was safe.
func (c *cluster) has(least int, p pod) {
	c.Helper()
	p.command = "check"
	c.pod(p)
	c.eventually(p.name+" is through", func() error {
		got, err := c.getPod(p.name)
		if err == nil && got.Status.Phase != corev1.PodSucceeded && got.Status.Phase != corev1.PodFailed {
			err = fmt.Errorf("it is %s on %q: %s", got.Status.Phase, got.Spec.NodeName, c.events(p.name))
		}
		return err
	})
	out := c.kubectl("logs", p.name)
	c.Logf("%s, of which %d were safe: %s", p.tag, least, out)
	c.check(least, len(p.claims), out)
	c.delete("pod", p.name)
}

// look has a running writer's pod look at its claims.
func (c *cluster) look(least int, p pod) {
	c.Helper()
	tag := p.tag
	if tag == "" {
		tag = p.name
	}
	args := []string{"exec", p.name, "--", "sh", "/writer/writer.sh", "check", tag}
	for _, claim := range p.claims {
		args = append(args, "/"+strings.TrimSuffix(claim, "!"))
	}
	var out string
	for range 5 { // it writes meanwhile, which may look like a gap
		if out = c.kubectl(args...); !strings.Contains(out, "FAILED") {
			break
		}
	}
	c.check(least, len(p.claims), out)
}

var there = regexp.MustCompile(`(?m) has (-?\d+)$`)

func (c *cluster) check(least, paths int, out string) {
	c.Helper()
	all := there.FindAllStringSubmatch(out, -1)
	if len(all) != paths {
		c.Fatalf("of %d paths: %s", paths, out)
	}
	for _, found := range all {
		if n, err := strconv.Atoi(found[1]); err != nil || n < least {
			c.Fatalf("%d was safe: %s", least, out)
		}
	}
}

// restarts returns how often a pod's container was restarted.
func (c *cluster) restarts(name string) int32 {
	c.Helper()
	p, err := c.getPod(name)
	check.OK(c, err)
	return p.Status.ContainerStatuses[0].RestartCount
}

// pv returns the PersistentVolume of a claim.
func (c *cluster) pv(claim string) corev1.PersistentVolume {
	c.Helper()
	var pv corev1.PersistentVolume
	c.eventually(claim+" is bound", func() error {
		var pvc corev1.PersistentVolumeClaim
		if err := c.kube.Get(context.Background(), client.ObjectKey{Namespace: c.ns, Name: claim}, &pvc); err != nil {
			return err
		}
		if pvc.Status.Phase != corev1.ClaimBound {
			return fmt.Errorf("it is %s: %s", pvc.Status.Phase, c.events(claim))
		}
		return c.kube.Get(context.Background(), client.ObjectKey{Name: pvc.Spec.VolumeName}, &pv)
	})
	return pv
}

// volume returns the driver's object of a claim's volume.
func (c *cluster) volume(claim string) v1alpha1.Volume {
	c.Helper()
	pv := c.pv(claim)
	handle := pv.Spec.CSI.VolumeHandle
	var v v1alpha1.Volume
	check.OK(c, c.kube.Get(context.Background(), client.ObjectKey{Name: handle[strings.LastIndex(handle, ".")+1:]}, &v))
	return v
}
