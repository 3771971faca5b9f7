package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/cli"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/cluster/agent"
	"github.com/ashlar-csi/ashlar/pkg/cluster/view"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// asProgram is set in the environment of a process of this test that runs as the program.
const asProgram = "ASHLAR_TEST_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
	}
	apitest.Main(m)
}

const (
	namespace = "default"
	mib       = 1 << 20
)

// environment is a cluster. Its objects are removed at the end of the test.
type environment struct {
	testing.TB
	client.Client
}

func newEnvironment(t *testing.T) *environment {
	t.Helper()
	known, err := view.Scheme()
	check.OK(t, err)
	check.OK(t, rbacv1.AddToScheme(known))
	c, err := client.New(apitest.Get(t).Config(apitest.Admin), client.Options{Scheme: known})
	check.OK(t, err)
	return &environment{t, c}
}

// add makes an object with its status.
func (e *environment) add(o client.Object) {
	e.Helper()
	with := o.DeepCopyObject().(client.Object)
	check.OK(e, e.Create(e.Context(), o))
	e.Cleanup(func() { e.remove(o) })
	switch with.(type) {
	case *v1alpha1.Pool, *v1alpha1.Volume, *v1alpha1.Snapshot, *v1alpha1.ReplicatedVolume, *corev1.Node, *corev1.Pod:
		with.SetResourceVersion(o.GetResourceVersion())
		with.SetUID(o.GetUID())
		check.OK(e, e.Status().Update(e.Context(), with))
	}
}

// remove removes an object with its finalizers: no controller of Kubernetes runs here.
func (e *environment) remove(o client.Object) {
	e.Helper()
	ctx := context.Background()
	check.OK(e, client.IgnoreNotFound(e.Patch(ctx, o, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`)))))
	check.OK(e, client.IgnoreNotFound(e.Delete(ctx, o, client.GracePeriodSeconds(0))))
}

// result is what a run of the program printed, and its error.
type result struct {
	stdout, stderr string
	err            error
}

// run runs the program as a user of the API server, to its end.
func run(t testing.TB, user string, args ...string) result {
	t.Helper()
	return start(t, user, args...).ended(t)
}

// start starts the program as run does, and does not wait for its end.
func start(t testing.TB, user string, args ...string) *program {
	t.Helper()
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	server := apitest.Get(t)
	check.OK(t, server.Kubeconfig(server.Config(user), kubeconfig))
	root := newRoot()
	p := &program{done: make(chan error, 1)}
	root.SetOut(&p.stdout)
	root.SetErr(&p.stderr)
	root.SetArgs(append([]string{args[0], "--kubeconfig=" + kubeconfig}, args[1:]...))
	go func() { p.done <- root.ExecuteContext(t.Context()) }()
	return p
}

// output is what a program has printed so far.
type output struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (o *output) Write(text []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(text)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

// program is a run of the program that was started.
type program struct {
	stdout, stderr output
	done           chan error
}

// ended waits for its end.
func (p *program) ended(t testing.TB) result {
	t.Helper()
	select {
	case err := <-p.done:
		return result{p.stdout.String(), p.stderr.String(), err}
	case <-time.After(2 * time.Minute):
		t.Fatalf("it does not end; it has said:\n%s%s", &p.stdout, &p.stderr)
		return result{}
	}
}

// saying waits until it has printed a text.
func (p *program) saying(t testing.TB, word string) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !strings.Contains(p.stdout.String(), word); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("it does not say %q:\n%s%s", word, &p.stdout, &p.stderr)
		}
	}
}

func (r result) says(t testing.TB, words ...string) {
	t.Helper()
	for _, word := range words {
		if !strings.Contains(r.stdout, word) {
			t.Errorf("it does not say %q (error %v):\n%s%s", word, r.err, r.stdout, r.stderr)
		}
	}
}

func node(name string, ready corev1.ConditionStatus) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: ready}}}}
}

func pool(node string, total, available int64, health ...v1alpha1.Problem) *v1alpha1.Pool {
	return &v1alpha1.Pool{ObjectMeta: metav1.ObjectMeta{Name: overview.PoolName(node, "default")}, Spec: v1alpha1.PoolSpec{NodeName: node, Pool: "default", Default: true},
		Status: v1alpha1.PoolStatus{Kind: "file", Total: total, Promised: total - available, Available: available, MaxVolume: available, Health: health}}
}

// damaged makes a cluster with all kinds of problems: a full pool, a missing disk, a damaged volume, and nodes that are gone, not ready and silent.
func damaged(e *environment) (lost *v1alpha1.Volume) {
	heard, silent := metav1.NowMicro(), metav1.NewMicroTime(time.Now().Add(-time.Hour))
	for name, renewed := range map[string]metav1.MicroTime{"full": heard, "missing": silent, "silent": silent} { // the clock of node missing is wrong
		e.add(node(name, corev1.ConditionTrue))
		lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "node." + name, Labels: map[string]string{v1alpha1.HeartbeatLabel: v1alpha1.HeartbeatOfAgent}},
			Spec: coordinationv1.LeaseSpec{HolderIdentity: &name, RenewTime: &renewed}}
		e.add(lease)
		if name == "silent" { // for the others the API server has the time of this write
			check.OK(e, e.Patch(e.Context(), lease, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"managedFields":[{}]}}`))))
		}
	}
	e.add(node("sick", corev1.ConditionFalse))
	for _, p := range []*v1alpha1.Pool{pool("full", 1000*mib, 0), pool("silent", 1000*mib, 50*mib), pool("sick", 1000*mib, 1000*mib), pool("gone", 1000*mib, 1000*mib),
		pool("missing", 0, 0, v1alpha1.Problem{Severity: "Inaccessible", Reason: "PoolMissing", Message: "no such directory; mount the disk"})} {
		e.add(p)
	}
	volumeOn := func(name, node string, change func(*v1alpha1.Volume)) *v1alpha1.Volume {
		now := metav1.NowMicro()
		v := &v1alpha1.Volume{ObjectMeta: metav1.ObjectMeta{Name: volume.KeyOf(name)}, Spec: v1alpha1.VolumeSpec{NodeName: node, Pool: "default", Name: name, Size: 100 * mib, Filesystem: "xfs"},
			Status: v1alpha1.VolumeStatus{ObjectStatus: v1alpha1.ObjectStatus{Created: &now, Size: 100 * mib}}}
		change(v)
		e.add(v)
		return v
	}
	lost = volumeOn("pvc-lost", "full", func(v *v1alpha1.Volume) {
		v.Spec.ClaimRef, v.Spec.PersistentVolume = &v1alpha1.ClaimRef{Namespace: namespace, Name: "data"}, "pvc-lost"
		v.Status.Health = []v1alpha1.Problem{{Severity: "DataLoss", Reason: "ImageMissing", Message: "its image is gone"}}
	})
	volumeOn("pvc-refused", "full", func(v *v1alpha1.Volume) {
		v.Status.ObservedGeneration, v.Status.Failure = 1, &v1alpha1.Failure{Reason: "NoSpace", Message: "20 are asked for"}
	})
	volumeOn("pvc-copied", "full", func(v *v1alpha1.Volume) {
		v.Spec.Make, v.Status.Created, v.Status.Progress = true, nil, &v1alpha1.Progress{Done: 40 * mib, Total: 100 * mib}
	})
	volumeOn("pvc-unreported", "nowhere", func(*v1alpha1.Volume) {})
	snapshot := &v1alpha1.Snapshot{ObjectMeta: metav1.ObjectMeta{Name: volume.KeyOf("s")}, Spec: v1alpha1.SnapshotSpec{NodeName: "full", Pool: "default", Name: "snapshot-1", Source: lost.Name}}
	now := metav1.NowMicro()
	snapshot.Status.Created, snapshot.Status.Size = &now, 100*mib
	e.add(snapshot)
	for name, terms := range map[string][]corev1.TopologySelectorTerm{"ashlar": nil,
		"here":    {{MatchLabelExpressions: []corev1.TopologySelectorLabelRequirement{{Key: v1alpha1.TopologyKey, Values: []string{"full"}}}}},
		"nowhere": {{MatchLabelExpressions: []corev1.TopologySelectorLabelRequirement{{Key: v1alpha1.TopologyKey, Values: []string{"full"}}, {Key: "zone", Values: []string{"other"}}}}}} {
		e.add(&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Provisioner: v1alpha1.DefaultDriver, AllowedTopologies: terms})
	}
	e.add(&corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pvc-lost"}, Spec: corev1.PersistentVolumeSpec{Capacity: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("100Mi")},
		AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, ClaimRef: &corev1.ObjectReference{Namespace: namespace, Name: "data"},
		PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: v1alpha1.DefaultDriver, VolumeHandle: lost.ID()}}}})
	e.add(&corev1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "data.1"}, InvolvedObject: corev1.ObjectReference{Kind: "PersistentVolumeClaim", Namespace: namespace, Name: "data"},
		Type: "Warning", Reason: "DataLoss", Message: "its image is gone", LastTimestamp: metav1.Now()})
	return lost
}

// pods makes a pod that uses the claim of the lost volume, and the account that it needs.
func pods(e *environment) {
	off := false
	e.add(&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "nobody"}})
	e.add(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "database-0"}, Spec: corev1.PodSpec{ServiceAccountName: "nobody", AutomountServiceAccountToken: &off,
		Containers: []corev1.Container{{Name: "c", Image: "i"}}, Volumes: []corev1.Volume{{Name: "data",
			VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "data"}}}}}})
}

// TestCommands: the output of each command for a cluster with all kinds of problems.
func TestCommands(t *testing.T) {
	e := newEnvironment(t)
	lost := damaged(e)
	pods(e)
	r := run(t, apitest.Admin, "status")
	var problems *cli.ProblemsError
	if !errors.As(r.err, &problems) || problems.Count != 10 || !strings.HasPrefix(r.stdout, "DataLoss      Volume default/data in pool full.default\n    ImageMissing: its image is gone\n    See https://") {
		t.Errorf("%v:\n%s", r.err, r.stdout)
	}
	r.says(t, "Node gone\n    NodeGone: Kubernetes has no such node", "Node nowhere\n    NodeGone: ", "Node sick\n    NodeNotReady: ", "Node silent\n    AgentSilent: ", "Pool nowhere.default\n    PoolMissing: nobody reports it",
		"Pool missing.default\n    PoolMissing: no such directory; mount the disk", "Pool full.default\n    PoolFull: ", "Volume pvc-refused in pool full.default\n    NoSpace: 20 are asked for",
		"Pool silent.default\n    PoolNearlyFull: 95 %", "2 of 6 answer", "Volumes    4: 1 lost, 1 failed, 1 making")

	r = run(t, apitest.Admin, "pools")
	if lines := strings.Split(strings.TrimSpace(r.stdout), "\n"); len(lines) != 7 || r.err != nil {
		t.Errorf("pools, %v:\n%s", r.err, r.stdout)
	}
	if r = run(t, apitest.Admin, "volumes", "-namespace="+namespace); r.err == nil || !strings.Contains(r.err.Error(), "no namespace can be called") {
		t.Errorf("volumes of no namespace: %v\n%s", r.err, r.stdout)
	}
	r = run(t, apitest.Admin, "volumes", "-n", namespace, "-o", "json")
	var volumes []overview.Volume
	check.OK(t, errors.Join(r.err, json.Unmarshal([]byte(r.stdout), &volumes)))
	if len(volumes) != 1 || volumes[0].ID != lost.ID() || volumes[0].PersistentVolume != "pvc-lost" || !slices.Equal(volumes[0].Pods, []overview.Ref{{Namespace: namespace, Name: "database-0"}}) {
		t.Errorf("volumes of a namespace: %s", r.stdout)
	}
	for _, name := range []string{lost.ID(), "pvc-lost", namespace + "/data"} {
		r = run(t, apitest.Admin, "describe", name)
		r.says(t, "Volume default/data\n", "DataLoss: ImageMissing\n", "pool full.default: ", "Pods               default/database-0", "snapshot-1", "History\n", "DataLoss  PersistentVolumeClaim default/data",
			"Left out: its devices and mounts: no pod of the driver runs on node full.")
	}
	run(t, apitest.Admin, "volumes").says(t, "Making [####......] 40 %")
	r = run(t, apitest.Admin, "capacity")
	r.says(t, "silent   default  none: see status", "missing  default  none: see status", "CLASS ")
	r = run(t, apitest.Admin, "capacity", "-o", "json")
	var room struct {
		Pools []struct {
			Node    string
			Classes []string
		}
	}
	check.OK(t, errors.Join(r.err, json.Unmarshal([]byte(r.stdout), &room)))
	for _, p := range room.Pools {
		if here := slices.Contains(p.Classes, "here"); here != (p.Node == "full") || slices.Contains(p.Classes, "nowhere") {
			t.Errorf("classes whose volumes may be on node %s: %v", p.Node, p.Classes)
		}
	}
	if r := run(t, apitest.Admin, "doctor", "full"); r.err == nil || !strings.Contains(r.err.Error(), "no pod of the driver runs on node full") {
		t.Errorf("doctor of a node without agent: %v", r.err)
	}
	if r := run(t, apitest.Admin, "__complete", "describe", "default/"); !strings.HasPrefix(r.stdout, "default/data\n") {
		t.Errorf("completed to:\n%s%s", r.stdout, r.stderr)
	}
}

// TestTerminal: on a real terminal the program uses its colours and width, heeds NO_COLOR, and Ctrl-C is no error.
func TestTerminal(t *testing.T) {
	e := newEnvironment(t)
	damaged(e)
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	server := apitest.Get(t)
	check.OK(t, server.Kubeconfig(server.Config(apitest.Admin), kubeconfig))
	start := func(environment string, args ...string) (*exec.Cmd, *os.File) {
		program, person := drivertest.Terminal(t, 40, 72)
		cmd := exec.Command(os.Args[0], append(args, "--kubeconfig="+kubeconfig)...)
		cmd.Env = append(os.Environ(), asProgram+"=1", "TERM=xterm", environment)
		cmd.Stdin, cmd.Stdout, cmd.Stderr = program, program, program
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
		check.OK(t, cmd.Start())
		check.OK(t, program.Close())
		t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
		return cmd, person
	}
	for _, c := range []struct {
		environment string
		colours     bool
	}{{"A=b", true}, {"NO_COLOR=1", false}, {"TERM=dumb", false}} {
		cmd, person := start(c.environment, "volumes")
		printed, _ := io.ReadAll(person) // reading fails at the end of the program (EIO)
		text := string(printed)
		if err := cmd.Wait(); err != nil || !strings.Contains(text, namespace+"/data") || strings.Contains(text, "\x1b[31m") != c.colours || strings.Contains(text, "\x1b") != c.colours {
			t.Errorf("%s: %v: %q", c.environment, err, text)
		}
		for line := range strings.SplitSeq(regexp.MustCompile(`\x1b\[\d+m`).ReplaceAllString(text, ""), "\r\n") {
			if utf8.RuneCountInString(line) > 72 {
				t.Errorf("wider than the terminal: %q", line)
			}
		}
	}
	cmd, person := start("A=b", "status", "--watch")
	var seen []byte
	for part := make([]byte, 4096); !strings.Contains(string(seen), "Driver"); {
		n, err := person.Read(part)
		if err != nil {
			t.Fatalf("%v after %q", err, seen)
		}
		seen = append(seen, part[:n]...)
		if strings.Contains(string(seen), "lines more") {
			break
		}
	}
	check.OK(t, second(person.Write([]byte{3}))) // Ctrl-C
	go func() { _, _ = io.Copy(io.Discard, person) }()
	if err := cmd.Wait(); err != nil {
		t.Errorf("Ctrl-C: %v after %q", err, seen)
	}
}

// TestSilentServer: if the API server accepts connections and does not answer, a signal ends the program at once, and without one it ends after a time.
func TestSilentServer(t *testing.T) {
	server, err := net.Listen("tcp", "127.0.0.1:0")
	check.OK(t, err)
	t.Cleanup(func() { check.OK(t, server.Close()) })
	to := []string{"--kubeconfig=" + os.DevNull, "--server=http://" + server.Addr().String()}
	for _, c := range []struct {
		args, words string // the error that it prints; empty: it completes with nothing
	}{
		{"status", "kubectl ashlar: interrupted\n"},
		{"describe pvc-1", "kubectl ashlar: interrupted\n"},
		{"move pvc-1 --to=n2", "kubectl ashlar: interrupted\n"},
		{"evacuate n1", "kubectl ashlar: interrupted\n"},
		{"adopt", "kubectl ashlar: interrupted\n"},
		{"adopt --all", "kubectl ashlar: interrupted\n"},
		{"doctor", "kubectl ashlar: interrupted\n"},
		{"__complete move v", ""},
		{"__complete adopt v", ""},
		{"__complete describe v", ""},
		{"__complete doctor n", ""},
	} {
		for _, by := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
			args := strings.Fields(c.args)
			at := 1 // where flags can be inserted
			if args[0] == "__complete" {
				at = 2
			}
			cmd := exec.Command(os.Args[0], slices.Insert(args, at, to...)...)
			cmd.Env = append(os.Environ(), asProgram+"=1")
			var said bytes.Buffer
			cmd.Stderr = &said
			check.OK(t, cmd.Start())
			conn, err := server.Accept() // for its first request
			check.OK(t, err)
			check.OK(t, second(conn.Read(make([]byte, 1))))
			check.OK(t, cmd.Process.Signal(by))
			stuck := time.AfterFunc(20*time.Second, func() { _ = cmd.Process.Kill() }) // less than any request waits
			err = cmd.Wait()
			stuck.Stop()
			check.OK(t, conn.Close())
			if c.words == "" && err != nil || c.words != "" && (cmd.ProcessState.ExitCode() != 1 || said.String() != c.words) {
				t.Errorf("%s: after %s it ends with %v\n%s", c.args, by, err, said.String())
			}
		}
	}
	if flag := newRoot().PersistentFlags().Lookup("request-timeout"); flag.DefValue != requestTime {
		t.Errorf("without --request-timeout it waits for %q", flag.DefValue)
	}
	begun := time.Now()
	if r := run(t, apitest.Admin, "status", "--server=http://"+server.Addr().String(), "--request-timeout=200ms"); r.err == nil || time.Since(begun) > 30*time.Second {
		t.Errorf("with --request-timeout it ends after %s: %v", time.Since(begun), r.err)
	}
}

// TestAdoptInterrupted: an interrupt ends the wait for the agents at once, and the user is told that these go on.
func TestAdoptInterrupted(t *testing.T) {
	e := newEnvironment(t)
	p := pool("n1", 1000*mib, 1000*mib)
	p.Status.StrayCount, p.Status.Strays = 1, []v1alpha1.Stray{{ID: "vol.default.1"}}
	e.add(p)
	ctx, interrupt := context.WithCancel(t.Context())
	c := through(t, func(_ http.ResponseWriter, r *http.Request) bool {
		if r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, "/pools/"+p.Name) { // reads how far it is
			interrupt()
		}
		return false
	})
	begins, begin := context.WithCancel(t.Context())
	asking := through(t, func(_ http.ResponseWriter, r *http.Request) bool {
		if r.Method == http.MethodPatch {
			begin()
		}
		return false
	})
	err := (&adoption{cluster: asking, out: io.Discard, all: true, timeout: time.Minute}).run(begins, nil)
	result{err: err}.refused(t, "pool n1.default: interrupted; its agent may be asked for that already, and goes on then: the same command asks for what is left")
	err = (&adoption{cluster: c, out: io.Discard, all: true, timeout: time.Minute}).run(ctx, nil)
	if err == nil || err.Error() != "pool n1.default: interrupted; the agents go on with what they are asked for" {
		t.Errorf("interrupted: %v", err)
	}
	check.OK(t, e.Get(t.Context(), client.ObjectKeyFromObject(p), p))
	if p.Annotations[v1alpha1.AdoptAnnotation] != v1alpha1.AdoptAll {
		t.Errorf("its annotations are %v", p.Annotations)
	}
}

func second[T any](_ T, err error) error { return err }

// TestAdoptBeside: what was asked for before, and is not done yet, is asked for beside what is asked for now.
func TestAdoptBeside(t *testing.T) {
	e := newEnvironment(t)
	p := pool("n1", 1000*mib, 1000*mib)
	p.Annotations = map[string]string{v1alpha1.AdoptAnnotation: "vol.default.1"}
	p.Status.StrayCount, p.Status.Strays = 3, []v1alpha1.Stray{{ID: "vol.default.1"}, {ID: "vol.default.2"}, {ID: "vol.default.3"}}
	e.add(p)
	for _, want := range []string{"vol.default.1,vol.default.2", "vol.default.1,vol.default.2,vol.default.3", "vol.default.1,vol.default.2,vol.default.3"} {
		last := want[strings.LastIndex(want, ",")+1:]
		run(t, apitest.Admin, "adopt", last, "--timeout=1ms").refused(t, "its agent has not answered")
		check.OK(t, e.Get(t.Context(), client.ObjectKeyFromObject(p), p))
		if have := p.Annotations[v1alpha1.AdoptAnnotation]; have != want {
			t.Errorf("asked for are %q, want %q", have, want)
		}
	}
}

// TestReported: problems that a node reports of pools, volumes and snapshots are shown unchanged, with their severity.
func TestReported(t *testing.T) {
	e := newEnvironment(t)
	e.add(node("n1", corev1.ConditionTrue))
	off := v1alpha1.Problem{Severity: "Inaccessible", Reason: overview.NotConfigured, Message: "the node was started without this pool"}
	unused := pool("n1", 0, 0, off)
	unused.Name, unused.Spec.Pool = overview.PoolName("n1", "unused"), "unused"
	e.add(unused)
	used := pool("n1", 0, 0, off)
	used.Name, used.Spec.Pool = overview.PoolName("n1", "used"), "used"
	e.add(used)
	e.add(pool("n1", 1000*mib, 1000*mib, v1alpha1.Problem{Severity: "DataLoss", Reason: "RecordDamaged", Message: "pool default: one"}, v1alpha1.Problem{Severity: "DataLoss", Reason: "RecordDamaged", Message: "another"},
		v1alpha1.Problem{Severity: "Degraded", Reason: "PoolFull", Message: "of data"}))
	made := v1alpha1.ObjectStatus{Created: new(metav1.NowMicro()), Size: mib, Health: []v1alpha1.Problem{{Severity: "Inaccessible", Reason: "DeviceFailed", Message: "it has errors"}}}
	v := &v1alpha1.Volume{ObjectMeta: metav1.ObjectMeta{Name: volume.KeyOf("v")}, Spec: v1alpha1.VolumeSpec{NodeName: "n1", Pool: "used", Name: "v", Size: mib}, Status: v1alpha1.VolumeStatus{ObjectStatus: made}}
	e.add(v)
	gone := v1alpha1.ObjectStatus{Created: made.Created, Size: mib, Health: []v1alpha1.Problem{{Severity: "DataLoss", Reason: "ImageMissing", Message: "it is gone"}}}
	s := &v1alpha1.Snapshot{ObjectMeta: metav1.ObjectMeta{Name: volume.KeyOf("s")}, Spec: v1alpha1.SnapshotSpec{NodeName: "n1", Pool: "default", Name: "s", Source: v.Name}, Status: v1alpha1.SnapshotStatus{ObjectStatus: gone}}
	e.add(s)

	o, err := view.Take(t.Context(), e, view.Options{})
	check.OK(t, err)
	var got []string
	for _, p := range o.Problems {
		got = append(got, fmt.Sprint(p.Severity, " ", p.Subject.Name, " ", p.Reason, ": ", p.Message))
	}
	want := []string{"DataLoss n1.default RecordDamaged: one", "DataLoss n1.default RecordDamaged: another", "DataLoss " + s.ID() + " ImageMissing: it is gone",
		"Inaccessible n1.used NotConfigured: the node was started without this pool; a volume or snapshot is in it", "Inaccessible " + v.ID() + " DeviceFailed: it has errors", "Degraded n1.default PoolFull: of data"}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if o.Volumes[0].State != overview.Ready || o.Snapshots[0].State != overview.Lost {
		t.Errorf("the volume is %s, the snapshot %s", o.Volumes[0].State, o.Snapshots[0].State)
	}
}

// TestKept: a pod uses the volume that its claim has now, not one that was kept when an earlier claim of that name was deleted.
func TestKept(t *testing.T) {
	e := newEnvironment(t)
	e.add(node("full", corev1.ConditionTrue))
	e.add(pool("full", 1000*mib, 1000*mib))
	pods(e) // it uses the claim "data"
	for name, phase := range map[string]corev1.PersistentVolumePhase{"pvc-kept": corev1.VolumeReleased, "pvc-used": corev1.VolumeBound, "pvc-kept-too": corev1.VolumeReleased} {
		v := &v1alpha1.Volume{ObjectMeta: metav1.ObjectMeta{Name: volume.KeyOf(name)}, Spec: v1alpha1.VolumeSpec{NodeName: "full", Pool: "default", Name: name, Size: mib,
			ClaimRef: &v1alpha1.ClaimRef{Namespace: namespace, Name: "data"}, PersistentVolume: name}, Status: v1alpha1.VolumeStatus{ObjectStatus: v1alpha1.ObjectStatus{Created: new(metav1.NowMicro()), Size: mib}}}
		e.add(v)
		pv := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PersistentVolumeSpec{Capacity: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Mi")},
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, ClaimRef: &corev1.ObjectReference{Namespace: namespace, Name: "data"},
			PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: v1alpha1.DefaultDriver, VolumeHandle: v.ID()}}}}
		e.add(pv)
		pv.Status.Phase = phase
		check.OK(t, e.Status().Update(t.Context(), pv))
	}
	// A claim bound to a volume of another driver is not shown for any of ours, whatever a node says.
	e.add(&corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "theirs"}, Spec: corev1.PersistentVolumeSpec{Capacity: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Mi")},
		AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, ClaimRef: &corev1.ObjectReference{Namespace: namespace, Name: "theirs"},
		PersistentVolumeSource: corev1.PersistentVolumeSource{NFS: &corev1.NFSVolumeSource{Server: "s", Path: "/"}}}})
	forged := &v1alpha1.Volume{ObjectMeta: metav1.ObjectMeta{Name: volume.KeyOf("forged")}, Spec: v1alpha1.VolumeSpec{NodeName: "full", Pool: "default", Name: "forged", Size: mib,
		ClaimRef: &v1alpha1.ClaimRef{Namespace: namespace, Name: "theirs"}}}
	e.add(forged)
	o, err := view.Take(t.Context(), e, view.Options{Kubernetes: true})
	check.OK(t, err)
	at := slices.IndexFunc(o.Volumes, func(v overview.Volume) bool { return v.Name == "forged" })
	if at < 0 || o.Volumes[at].Claim != nil {
		t.Fatalf("it is shown as that of a claim: %+v", o.Volumes)
	}
	o.Volumes = slices.Delete(o.Volumes, at, at+1)
	for _, v := range o.Volumes {
		if v.Claim == nil || v.Claim.Name != "data" || (len(v.Pods) == 1) != (v.Name == "pvc-used") {
			t.Errorf("%s: claim %v, pods %v", v.Name, v.Claim, v.Pods)
		}
	}
	if len(o.Volumes) != 3 {
		t.Errorf("%d volumes", len(o.Volumes))
	}
}

// TestPages: lists in pages give the same overview as lists at once.
func TestPages(t *testing.T) {
	e := newEnvironment(t)
	damaged(e)
	var texts []string
	now := time.Now().Truncate(time.Hour)
	for _, page := range []int64{0, 1} {
		o, err := view.Take(t.Context(), e, view.Options{Page: page, Now: now, Kubernetes: true})
		check.OK(t, err)
		if len(o.Volumes) != 4 || len(o.Nodes) != 6 {
			t.Errorf("pages of %d: %d volumes, %d nodes", page, len(o.Volumes), len(o.Nodes))
		}
		text, err := json.Marshal(o)
		check.OK(t, err)
		texts = append(texts, string(text))
	}
	if texts[0] != texts[1] {
		t.Errorf("at once:\n%s\nin pages:\n%s", texts[0], texts[1])
	}
}

// TestRights: what a user may not list is left out, and the output says so; without rights for the driver's own objects there is an error.
func TestRights(t *testing.T) {
	e := newEnvironment(t)
	damaged(e)
	const user = "user" // known to the API server, with no rights yet
	if r := run(t, user, "status"); r.err == nil || !strings.Contains(r.err.Error(), "forbidden") {
		t.Errorf("without any rights: %v\n%s", r.err, r.stdout)
	}
	e.add(&rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "looking"}, Rules: []rbacv1.PolicyRule{{APIGroups: []string{"ashlar.dev"}, Resources: []string{"*"}, Verbs: []string{"list"}},
		{APIGroups: []string{""}, Resources: []string{"persistentvolumes"}, Verbs: []string{"list"}}}})
	e.add(&rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "looking"}, RoleRef: rbacv1.RoleRef{APIGroup: "rbac.authorization.k8s.io", Kind: "ClusterRole", Name: "looking"},
		Subjects: []rbacv1.Subject{{Kind: "User", Name: user}}})
	var r result
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(50 * time.Millisecond) { // until the role is in force
		r = run(t, user, "status")
		var problems *cli.ProblemsError
		if errors.As(r.err, &problems) || time.Now().After(end) {
			break
		}
	}
	r.says(t, "Volume default/data", "Left out: pods: you may not list them", "Left out: nodes: ", "Left out: leases: ", "Left out: storageclasses: ")
	if strings.Contains(r.stdout, "NodeGone") || strings.Contains(r.stdout, "AgentSilent") || strings.Contains(r.stdout, "of 5 answer") || !strings.Contains(r.stdout, "it is not known which of them answer") {
		t.Errorf("it says of nodes what it cannot know:\n%s", r.stdout)
	}
	run(t, user, "describe", "default/data").says(t, "Left out: events of namespace default", "Left out: its devices and mounts: ")
	if r := run(t, user, "adopt", "--all"); r.err != nil {
		t.Errorf("adopt where there is nothing: %v", r.err)
	}
}

// TestEventsFail: if events cannot be read, as their own etcd is down, describe shows the rest, and says so.
func TestEventsFail(t *testing.T) {
	e := newEnvironment(t)
	damaged(e)
	server, err := url.Parse(apitest.Get(t).Config(apitest.Admin).Host)
	check.OK(t, err)
	proxy := httputil.NewSingleHostReverseProxy(server)
	proxy.Transport = &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
	between := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/events") {
			http.Error(w, "etcdserver: no leader", http.StatusInternalServerError)
			return
		}
		proxy.ServeHTTP(w, r)
	}))
	t.Cleanup(between.Close)
	r := run(t, apitest.Admin, "describe", "default/data", "--server="+between.URL, "--insecure-skip-tls-verify")
	check.OK(t, r.err)
	r.says(t, "Volume default/data\n", "DataLoss: ImageMissing\n", "snapshot-1", "Left out: events of namespace default: they could not be read (", "no leader",
		"so it is not known what happened to PersistentVolumeClaim data")
}

// TestLeaseOfTenant: if the namespace of the driver is not known, a Lease of somebody else does not hide that an agent is silent.
func TestLeaseOfTenant(t *testing.T) {
	e := newEnvironment(t)
	damaged(e)
	for _, space := range []string{"kube-node-lease", "kube-public"} {
		e.add(&coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: space, Name: "node.silent", Labels: map[string]string{v1alpha1.HeartbeatLabel: v1alpha1.HeartbeatOfAgent}},
			Spec: coordinationv1.LeaseSpec{HolderIdentity: new("silent"), RenewTime: new(metav1.NowMicro())}})
	}
	run(t, apitest.Admin, "status").says(t, "Node silent\n    AgentSilent: ", "Left out: leases: agents have them in the namespaces default, kube-node-lease, kube-public, and which of these is")
}

// TestLacking: adopt makes no PersistentVolume for a volume that is being provisioned, and goes on after an object that cannot be made.
func TestLacking(t *testing.T) {
	e := newEnvironment(t)
	size := corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Mi")}}
	claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "pending"},
		Spec: corev1.PersistentVolumeClaimSpec{AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOncePod}, Resources: size}}
	e.add(claim)
	now := metav1.NowMicro()
	volumeFor := func(name, space, of string) {
		e.add(&v1alpha1.Volume{ObjectMeta: metav1.ObjectMeta{Name: volume.KeyOf(name)}, Spec: v1alpha1.VolumeSpec{NodeName: "n1", Pool: "default", Name: name, Size: mib, Filesystem: "xfs",
			PersistentVolume: name, ClaimRef: &v1alpha1.ClaimRef{Namespace: space, Name: of}}, Status: v1alpha1.VolumeStatus{ObjectStatus: v1alpha1.ObjectStatus{Created: &now, Size: mib}}})
	}
	volumeFor("pvc-"+string(claim.UID), namespace, claim.Name)
	if r := run(t, apitest.Admin, "adopt", "--persistent-volumes"); r.err != nil || r.stdout != "Kubernetes lacks nothing.\n" {
		t.Errorf("of a volume that is being provisioned: %v\n%s", r.err, r.stdout)
	}
	volumeFor("pvc-a", "no-such-namespace", "data")
	volumeFor("pvc-b", namespace, "data")
	r := run(t, apitest.Admin, "adopt", "--persistent-volumes")
	if r.err == nil || !strings.Contains(r.err.Error(), `make PersistentVolumeClaim no-such-namespace/data: namespaces "no-such-namespace" not found`) {
		t.Errorf("in a namespace that is not there: %v", r.err)
	}
	r.says(t, "PersistentVolume pvc-a: made", "PersistentVolume pvc-b: made", "PersistentVolumeClaim default/data: made")
	for _, name := range []string{"pvc-a", "pvc-b"} {
		e.remove(&corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name}})
	}
	e.remove(&corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "data"}})
}

// TestLackingEncrypted: the PersistentVolume of an encrypted volume names the Secrets that it was made with, as its class says; if the class does not tell
// them, the volume gets none, which could not be given them later.
func TestLackingEncrypted(t *testing.T) {
	e := newEnvironment(t)
	const stage, expand = "csi.storage.k8s.io/node-stage-secret-", "csi.storage.k8s.io/node-expand-secret-"
	class := func(name string, parameters map[string]string) {
		e.add(&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Provisioner: v1alpha1.DefaultDriver, Parameters: parameters, MountOptions: []string{"noatime"}})
	}
	class("plain", nil)
	class("annotated", map[string]string{stage + "name": "${pvc.annotations['key']}", stage + "namespace": "${pvc.namespace}"})
	class("of-claims", map[string]string{stage + "name": "${pvc.name}-key", stage + "namespace": "${pvc.namespace}", expand + "name": "${pv.name}", expand + "namespace": "keys"})
	encrypted := func(name string, ref *v1alpha1.ClaimRef) {
		e.add(&v1alpha1.Volume{ObjectMeta: metav1.ObjectMeta{Name: volume.KeyOf(name)}, Spec: v1alpha1.VolumeSpec{NodeName: "n1", Pool: "default", Name: name, Size: mib, Filesystem: "xfs",
			Encryption: "luks2", PersistentVolume: name, ClaimRef: ref}, Status: v1alpha1.VolumeStatus{ObjectStatus: v1alpha1.ObjectStatus{Created: new(metav1.NowMicro()), Size: mib}}})
	}
	encrypted("pvc-a", &v1alpha1.ClaimRef{Namespace: namespace, Name: "data"})
	encrypted("pvc-b", nil)
	for class, why := range map[string]string{
		"plain":     "StorageClass plain names none (csi.storage.k8s.io/node-stage-secret-name); give the class that it was made with (--storage-class)",
		"none":      "there is no StorageClass none; make it, or give the one that it was made with (--storage-class)",
		"annotated": "StorageClass annotated names it by ${pvc.annotations['key']}, which nothing tells any more; write the PersistentVolume by hand",
	} {
		r := run(t, apitest.Admin, "adopt", "--persistent-volumes", "--storage-class="+class)
		check.OK(t, r.err)
		r.says(t, "Kubernetes lacks nothing that can be made.", "vol.default."+volume.KeyOf("pvc-a")+" on node n1 gets no PersistentVolume: it is encrypted", why)
	}
	r := run(t, apitest.Admin, "adopt", "--persistent-volumes", "--storage-class=of-claims")
	check.OK(t, r.err)
	r.says(t, "PersistentVolume pvc-a: made", "PersistentVolumeClaim default/data: made", "vol.default."+volume.KeyOf("pvc-b")+" on node n1 gets no PersistentVolume", "names it by ${pvc.namespace}, ${pvc.name}, which")
	pv := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pvc-a"}}
	check.OK(t, e.Get(t.Context(), client.ObjectKeyFromObject(pv), pv))
	e.Cleanup(func() {
		e.remove(&corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "data"}})
		e.remove(pv)
	})
	if s := pv.Spec.CSI.NodeStageSecretRef; s == nil || *s != (corev1.SecretReference{Namespace: namespace, Name: "data-key"}) {
		t.Errorf("to stage it: %+v", s)
	}
	if s := pv.Spec.CSI.NodeExpandSecretRef; s == nil || *s != (corev1.SecretReference{Namespace: "keys", Name: "pvc-a"}) {
		t.Errorf("to grow it: %+v", s)
	}
	if !slices.Equal(pv.Spec.MountOptions, []string{"noatime"}) {
		t.Errorf("options of its mounts: %q", pv.Spec.MountOptions)
	}
}

// TestChoose: a stray of two pools, as after a disk was copied, is not adopted from whichever comes first.
func TestChoose(t *testing.T) {
	strays := func(pool string, ids ...string) v1alpha1.Pool {
		p := v1alpha1.Pool{ObjectMeta: metav1.ObjectMeta{Name: pool}}
		for _, id := range ids {
			p.Status.Strays = append(p.Status.Strays, v1alpha1.Stray{ID: id})
		}
		return p
	}
	pools := []v1alpha1.Pool{strays("a.default", "vol.default.1", "vol.default.2"), strays("b.default", "vol.default.1")}
	if asked, err := choose(pools, []string{"vol.default.1"}, false); err == nil || !strings.Contains(err.Error(), "a.default, b.default") {
		t.Errorf("of two pools: %v, %v", asked, err)
	}
	for what, all := range map[string]bool{"": true, "a.default b.default": false, "a.default vol.default.1": false} {
		if asked, err := choose(pools, strings.Fields(what), all); err == nil || !strings.Contains(err.Error(), "a.default, b.default") {
			t.Errorf("of both pools (%q): %v, %v", what, asked, err)
		}
	}
	if asked, err := choose(pools, []string{"b.default/vol.default.1", "vol.default.2"}, false); err != nil || len(asked) != 2 || !slices.Equal(asked["b.default"], []string{"vol.default.1"}) ||
		!slices.Equal(asked["a.default"], []string{"vol.default.2"}) {
		t.Errorf("of the pool that is meant: %v, %v", asked, err)
	}
	if asked, err := choose(pools, []string{"b.default/vol.default.2"}, false); err == nil {
		t.Errorf("of a pool that does not have it: %v", asked)
	}
	asked, err := choose(pools, []string{"vol.default.2", "b.default"}, false)
	if err != nil || len(asked) != 2 || !slices.Equal(asked["a.default"], []string{"vol.default.2"}) || !slices.Equal(asked["b.default"], []string{v1alpha1.AdoptAll}) {
		t.Errorf("%v, %v", asked, err)
	}
}

// TestChooseUnlisted: a stray that may also be among those that a pool does not list is not adopted from whichever comes first. All steps to adopt everything
// are allowed.
func TestChooseUnlisted(t *testing.T) {
	strays := func(pool string, count, first, listed int) v1alpha1.Pool {
		p := v1alpha1.Pool{ObjectMeta: metav1.ObjectMeta{Name: pool}, Status: v1alpha1.PoolStatus{StrayCount: count}}
		for i := range listed {
			p.Status.Strays = append(p.Status.Strays, v1alpha1.Stray{ID: fmt.Sprintf("vol.default.%d", first+i)})
		}
		return p
	}
	large, small, other, none := strays("a.default", 150, 0, 100), strays("b.default", 2, 120, 2), strays("c.default", 150, 200, 100), strays("d.default", 0, 0, 0)
	for _, c := range []struct {
		what   string
		pools  []v1alpha1.Pool
		wanted string // empty: --all
		words  string // in the error; empty: it is allowed
	}{
		{"all", []v1alpha1.Pool{large, small}, "", "pool a.default has 50 strays that it does not list, and what pool b.default has may be among them; adopt from the pools that list all of theirs first"},
		{"both pools", []v1alpha1.Pool{small, large}, "a.default b.default", "pool a.default has 50 strays that it does not list"},
		{"a pool, and an ID that it may have too", []v1alpha1.Pool{large, small}, "a.default vol.default.120", "may be one of the 50 that pool a.default does not list"},
		{"an ID that another pool may have too", []v1alpha1.Pool{large, small}, "vol.default.120", "vol.default.120 is a stray of pool b.default, and may be one of the 50 that pool a.default does not list; adopt from"},
		{"IDs of two large pools", []v1alpha1.Pool{large, other}, "vol.default.0 vol.default.200", "may be one of the 50 that pool c.default does not list"},
		{"two large pools", []v1alpha1.Pool{large, other}, "", "may be among them"},
		{"a large pool before a small one", []v1alpha1.Pool{large, small}, "a.default", "what pool b.default has may be among them"},
		{"a small pool before a large one", []v1alpha1.Pool{large, small}, "b.default", ""},
		{"then the large one", []v1alpha1.Pool{large, none}, "a.default", ""},
		{"or all", []v1alpha1.Pool{large, none}, "", ""},
		{"two large pools one at a time", []v1alpha1.Pool{large, other, none}, "c.default", ""},
		{"an ID that the large pool lists, and no other", []v1alpha1.Pool{large, small}, "vol.default.7", ""},
	} {
		asked, err := choose(c.pools, strings.Fields(c.wanted), c.wanted == "")
		if c.words == "" && (err != nil || len(asked) != 1) || c.words != "" && (err == nil || !strings.Contains(err.Error(), c.words)) {
			t.Errorf("%s: %v, %v", c.what, asked, err)
		}
	}
}

// TestAdopt: an agent makes the deleted objects of volumes again; then adopt makes their PersistentVolumes.
func TestAdopt(t *testing.T) {
	e := newEnvironment(t)
	e.add(node("n1", corev1.ConditionTrue))
	ctx := klog.NewContext(context.Background(), ktesting.NewLogger(t, ktesting.NewConfig()))
	mounts, err := mount.LoadTable()
	check.OK(t, err)
	pools := []blockdev.Pool{memory.NewDisk(1<<30).Open("default", nil)}
	local, err := volume.NewLocal(ctx, "n1", pools, mounts, 0)
	check.OK(t, err)
	for _, name := range []string{"pvc-1", "pvc-2"} {
		_, err := local.Create(ctx, volume.Spec{Name: name, Size: volume.Range{Required: mib}, Filesystem: "xfs",
			For: volume.Requester{Namespace: namespace, Name: "claim-" + name, PersistentVolume: "pv-" + name}})
		check.OK(t, err)
	}
	a, err := agent.New(apitest.Get(t).Agent(t, "n1"), local, agent.Options{Driver: v1alpha1.DefaultDriver, Pools: []agent.Pool{{Pool: pools[0], Kind: "memory"}}, Locks: &keylock.Table{}})
	check.OK(t, err)
	running, stop := context.WithCancel(ctx)
	var done sync.WaitGroup
	done.Go(func() {
		if err := a.Run(running); err != nil && running.Err() == nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() {
		stop()
		done.Wait()
		check.OK(t, e.DeleteAllOf(context.Background(), &v1alpha1.Pool{}))
		check.OK(t, e.DeleteAllOf(context.Background(), &v1alpha1.Volume{}))
	})
	one := "vol.default." + volume.KeyOf("pvc-1")
	var r result
	for end := time.Now().Add(time.Minute); ; time.Sleep(100 * time.Millisecond) {
		if r = run(t, apitest.Admin, "adopt"); strings.Contains(r.stdout, "Strays: 2.") || time.Now().After(end) {
			break
		}
	}
	r.says(t, "n1.default  "+one+"  300Mi  default/claim-pvc-1")
	run(t, apitest.Admin, "status").says(t, "Strays: it keeps what no object is for: 2")
	if r := run(t, apitest.Admin, "adopt", "n1.none"); r.err == nil || !strings.Contains(r.err.Error(), "n1.none is no pool") {
		t.Errorf("a pool that is not there: %v", r.err)
	}
	run(t, apitest.Admin, "adopt", "--all", "--dry-run").says(t, "pool n1.default: adopting all\n")
	if r := run(t, apitest.Admin, "adopt", one, "--timeout=60s"); r.err != nil {
		t.Fatalf("%v\n%s", r.err, r.stdout)
	}
	var volumes v1alpha1.VolumeList
	check.OK(t, e.List(t.Context(), &volumes))
	if len(volumes.Items) != 1 || volumes.Items[0].ID() != one {
		t.Errorf("adopted: %+v", volumes.Items)
	}
	r = run(t, apitest.Admin, "adopt", "n1.default", "--timeout=60s")
	check.OK(t, r.err)
	r.says(t, "pool n1.default: done")
	for end := time.Now().Add(time.Minute); ; time.Sleep(100 * time.Millisecond) { // the agent has to find the bytes
		check.OK(t, e.List(t.Context(), &volumes))
		if len(volumes.Items) == 2 && !slices.ContainsFunc(volumes.Items, func(v v1alpha1.Volume) bool { return v.Status.Created == nil }) {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("adopted: %+v", volumes.Items)
		}
	}
	r = run(t, apitest.Admin, "adopt", "--persistent-volumes", "--storage-class=fast")
	check.OK(t, r.err)
	for _, name := range []string{"pvc-1", "pvc-2"} {
		r.says(t, "PersistentVolume pv-"+name+": made", "PersistentVolumeClaim default/claim-"+name+": made")
		pv := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pv-" + name}}
		claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "claim-" + name}}
		check.OK(t, e.Get(t.Context(), client.ObjectKeyFromObject(pv), pv))
		if pv.Spec.StorageClassName != "fast" || pv.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimRetain || pv.Spec.CSI.VolumeHandle != "vol.default."+volume.KeyOf(name) {
			t.Errorf("%+v", pv.Spec)
		}
		t.Cleanup(func() {
			e.remove(claim)
			e.remove(pv)
		})
	}
	run(t, apitest.Admin, "adopt", "--persistent-volumes").says(t, "Kubernetes lacks nothing.")
	run(t, apitest.Admin, "adopt", "--all").says(t, "There are no strays.")
	run(t, apitest.Admin, "adopt", "n1.default").says(t, "There are no strays.")
}

// TestPools: doctor is run with the pools of the pod.
func TestPools(t *testing.T) {
	pod := &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "registrar", Args: []string{"--pool=x=file:///x"}},
		{Name: "driver", Args: []string{"serve", "--pool=a=file:///a", "--mode=node", "--pool", "b=lvm://b"}}}}}
	if have := poolsOf(pod); !slices.Equal(have, []string{"--pool=a=file:///a", "--pool", "b=lvm://b"}) {
		t.Errorf("%q", have)
	}
}

// TestHelp: the program calls itself "kubectl ashlar", as its user does.
func TestHelp(t *testing.T) {
	root := newRoot()
	var out bytes.Buffer
	root.SetOut(&out)
	root.SetArgs([]string{"describe", "--help"})
	check.OK(t, root.Execute())
	if !strings.Contains(out.String(), "kubectl ashlar describe VOLUME") || !strings.Contains(out.String(), "--context") {
		t.Errorf("help:\n%s", out.String())
	}
}
