package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	fleet "github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// networked returns a pool in a network.
func networked(node string, available int64, health ...v1alpha1.Problem) *v1alpha1.Pool {
	p := pool(node, 1000*mib, available, health...)
	p.Status.Network = &v1alpha1.Network{Name: "default", Address: "10.0.0.1:4420"}
	return p
}

// movable returns a volume with access any on a node; edit changes it.
func movable(name, node string, size int64, edit func(*v1alpha1.Volume)) *v1alpha1.Volume {
	v := &v1alpha1.Volume{ObjectMeta: metav1.ObjectMeta{Name: volume.KeyOf(name)}, Spec: v1alpha1.VolumeSpec{NodeName: node, Pool: "default", Name: name, Size: size, Filesystem: "xfs", Access: "any"},
		Status: v1alpha1.VolumeStatus{ObjectStatus: v1alpha1.ObjectStatus{Created: new(metav1.NowMicro()), Size: size}}}
	if edit != nil {
		edit(v)
	}
	return v
}

// nodes makes the nodes n1 to n4, with a pool of 500 MiB each; n2 is cordoned.
func nodes(e *environment) {
	for _, name := range []string{"n1", "n2", "n3", "n4"} {
		n := node(name, corev1.ConditionTrue)
		n.Spec.Unschedulable = name == "n2"
		e.add(n)
		e.add(networked(name, 500*mib))
	}
}

// refused checks that a command has failed with some words.
func (r result) refused(t testing.TB, words ...string) {
	t.Helper()
	for _, word := range words {
		if r.err == nil || !strings.Contains(r.err.Error(), word) {
			t.Errorf("it does not fail with %q: %v\n%s", word, r.err, r.stdout)
		}
	}
}

// edited changes spec and status of a volume.
func (e *environment) edited(v *v1alpha1.Volume, edit func(*v1alpha1.Volume)) {
	e.Helper()
	check.OK(e, retry.RetryOnConflict(retry.DefaultBackoff, func() error { // the program may write meanwhile
		if err := e.Get(e.Context(), client.ObjectKeyFromObject(v), v); err != nil {
			return err
		}
		edit(v)
		status := v.Status.DeepCopy()
		if err := e.Update(e.Context(), v); err != nil {
			return err
		}
		v.Status = *status
		return e.Status().Update(e.Context(), v)
	}))
}

// release ends the claim of a volume.
func (e *environment) release(v *v1alpha1.Volume) error {
	return e.Patch(e.Context(), v.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(`{"spec":{"claim":null}}`)))
}

// connected returns a connection as the commands have it.
func connected(t *testing.T) *cluster {
	flags := genericclioptions.NewConfigFlags(true)
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	check.OK(t, apitest.Get(t).Kubeconfig(apitest.Get(t).Config(apitest.Admin), kubeconfig))
	flags.KubeConfig = &kubeconfig
	c, err := connect(flags)
	check.OK(t, err)
	return c
}

// through returns a connection as the commands have it, over a proxy. If answers returns true, it has answered the request.
func through(t *testing.T, answers func(http.ResponseWriter, *http.Request) bool) *cluster {
	config := apitest.Get(t).Config(apitest.Admin)
	to, err := url.Parse(config.Host)
	check.OK(t, err)
	proxy := httputil.NewSingleHostReverseProxy(to)
	proxy.Transport, err = rest.TransportFor(config)
	check.OK(t, err)
	between := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !answers(w, r) {
			proxy.ServeHTTP(w, r)
		}
	}))
	t.Cleanup(between.Close)
	flags := genericclioptions.NewConfigFlags(true)
	*flags.KubeConfig, *flags.APIServer = os.DevNull, between.URL
	c, err := connect(flags)
	check.OK(t, err)
	return c
}

// outage is an API server that can be away: then it drops connections, or a proxy before it says that it cannot answer, in turn.
type outage struct {
	away  atomic.Bool
	turns atomic.Int32
}

func (o *outage) answers(w http.ResponseWriter, _ *http.Request) bool {
	if !o.away.Load() {
		return false
	}
	switch o.turns.Add(1) % 3 {
	case 0:
		http.Error(w, "no backend", http.StatusServiceUnavailable)
	case 1:
		http.Error(w, "slower", http.StatusTooManyRequests)
	default:
		panic(http.ErrAbortHandler)
	}
	return true
}

// begins returns a function that makes it go away, once: for a second, and until it was asked in each of its turns.
func (o *outage) begins(ctx context.Context) func() {
	return sync.OnceFunc(func() {
		o.away.Store(true)
		go func() {
			for began := time.Now(); ctx.Err() == nil && (o.turns.Load() < 3 || time.Since(began) < time.Second); {
				time.Sleep(10 * time.Millisecond)
			}
			o.away.Store(false)
		}()
	})
}

// interrupting is the output of a command; interrupt is called when it has some words.
type interrupting struct {
	words     string
	interrupt func()
	*bytes.Buffer
}

func (i interrupting) Write(p []byte) (int, error) {
	if strings.Contains(string(p), i.words) {
		i.interrupt()
	}
	return i.Buffer.Write(p)
}

// drivers do what agents and controller do for moves, a step at each look, until the test ends. They begin when the volume first is asked to move; at once if
// first is empty. Volumes in held never move. most returns the largest number of unused volumes that moved at once.
func (e *environment) drivers(first string, held ...string) (most func() int) {
	ctx, stop := context.WithCancel(e.Context())
	var done sync.WaitGroup
	var mu sync.Mutex
	under, begun := 0, first == ""
	done.Go(func() {
		for ctx.Err() == nil {
			var all v1alpha1.VolumeList
			if err := e.List(ctx, &all); err != nil {
				continue
			}
			asked := 0
			for i := range all.Items {
				v := &all.Items[i]
				begun = begun || v.Spec.Name == first && v.Spec.Move != nil
				if v.Spec.Move != nil && !v.Spec.Move.Left && v.Spec.Claim == nil {
					asked++
				}
				if begun && v.Spec.Move != nil && (v.Spec.Claim == nil || v.Spec.Claim.Mode == carriedMode) && !strings.Contains(strings.Join(held, " "), v.Spec.Name) {
					_ = e.advance(ctx, v) // else at the next look
				}
			}
			mu.Lock()
			under = max(under, asked)
			mu.Unlock()
			time.Sleep(5 * time.Millisecond)
		}
	})
	e.Cleanup(func() {
		stop()
		done.Wait()
	})
	return func() int {
		mu.Lock()
		defer mu.Unlock()
		return under
	}
}

// carriedMode is the mode of the claim of a volume that is copied by the node that uses it.
const carriedMode = "carried"

// advance takes the next step of a move.
func (e *environment) advance(ctx context.Context, v *v1alpha1.Volume) error {
	m, s := v.Spec.Move, v.Status.Move
	switch {
	case !m.Left && s == nil:
		v.Status.Move = &v1alpha1.MoveStatus{Node: m.Node, Message: "half is copied", Progress: &v1alpha1.Progress{Done: 1, Total: 2}}
		if c := v.Spec.Claim; c != nil {
			v.Status.Move.Claim, v.Status.Move.Copied = c.Generation, &v1alpha1.MoveCopied{Generation: v.Generation, Claim: c.Generation, Sealed: metav1.NowMicro(), Size: v.Spec.Size}
		}
		return e.Status().Update(ctx, v)
	case !m.Left:
		fleet.Flip(v)
	case s == nil || !s.Arrived:
		v.Status.Move = &v1alpha1.MoveStatus{Node: v.Spec.NodeName, Arrived: true, Message: "moved"}
		if s != nil {
			v.Status.Move.Copied = s.Copied
		}
		return e.Status().Update(ctx, v)
	default:
		v.Spec.Move = nil
	}
	return e.Update(ctx, v)
}

// hasten makes the commands look often.
func hasten(t *testing.T) {
	before := lookAgain
	lookAgain = 20 * time.Millisecond
	t.Cleanup(func() { lookAgain = before })
}

// waits sets patience or standstill for a test. What has to come must come sooner, on a busy machine too.
func waits(t *testing.T, limit *time.Duration, long time.Duration) {
	before := *limit
	*limit = long
	t.Cleanup(func() { *limit = before })
}

// TestMove: a volume is asked to move, and its move is followed to the end; it can be taken back before it is done.
func TestMove(t *testing.T) {
	e := newEnvironment(t)
	nodes(e)
	hasten(t)
	v := movable("pvc-1", "n1", 100*mib, nil)
	e.add(v)
	run(t, apitest.Admin, "move", "pvc-1", "--to=n2", "--wait=false").says(t, "pvc-1: node n2 is asked to copy it from node n1\n")
	check.OK(t, e.Get(t.Context(), client.ObjectKeyFromObject(v), v))
	if v.Spec.Move == nil || *v.Spec.Move != (v1alpha1.Move{Node: "n2"}) {
		t.Fatalf("spec.move is %+v", v.Spec.Move)
	}
	run(t, apitest.Admin, "move", "pvc-1", "--to=n3").refused(t, "it is being moved to node n2", "--cancel")
	e.edited(v, func(v *v1alpha1.Volume) { v.Spec.Move.Follows = true }) // the volume itself has asked for it; now a person does
	run(t, apitest.Admin, "move", "pvc-1", "--to=n2", "--wait=false").says(t, "pvc-1: node n2 is asked to copy it from node n1\n")
	check.OK(t, e.Get(t.Context(), client.ObjectKeyFromObject(v), v))
	if v.Spec.Move == nil || v.Spec.Move.Follows {
		t.Fatalf("it is asked for, and spec.move is %+v", v.Spec.Move)
	}
	check.OK(t, e.advance(t.Context(), v)) // status.move stays, as no agent runs
	run(t, apitest.Admin, "move", "pvc-1", "--cancel").says(t, "pvc-1: it stays on node n1.\n")
	check.OK(t, e.Get(t.Context(), client.ObjectKeyFromObject(v), v))
	if v.Spec.Move != nil {
		t.Fatalf("it was taken back, and spec.move is %+v", v.Spec.Move)
	}
	run(t, apitest.Admin, "move", "pvc-1", "--cancel").refused(t, "it does not move; it is on node n1")
	e.drivers("")
	r := run(t, apitest.Admin, "move", v.ID(), "--to=n2/default")
	check.OK(t, r.err)
	r.says(t, "pvc-1: 50 %, half is copied\n", "pvc-1: it is in pool default of node n2.\n")
	check.OK(t, e.Get(t.Context(), client.ObjectKeyFromObject(v), v))
	if v.Spec.NodeName != "n2" || v.Spec.Move != nil {
		t.Errorf("after the move: %+v", v.Spec)
	}
}

// fast gives a node a second pool, "fast".
func fast(e *environment, node string) {
	p := networked(node, 500*mib)
	p.Name, p.Spec.Pool, p.Spec.Default = node+".fast", "fast", false
	e.add(p)
}

// TestMoveToOtherPool: a volume moves to a pool of another name, alone or with all of its node; if no pool is named, volumes move between pools of one name.
func TestMoveToOtherPool(t *testing.T) {
	e := newEnvironment(t)
	nodes(e)
	fast(e, "n3")
	fast(e, "n1")
	hasten(t)
	v := movable("pvc-1", "n1", 100*mib, nil)
	e.add(v)
	run(t, apitest.Admin, "move", "pvc-1", "--to=n3/fast", "--wait=false").says(t, "pvc-1: node n3 is asked to copy it from node n1\n")
	check.OK(t, e.Get(t.Context(), client.ObjectKeyFromObject(v), v))
	if v.Spec.Move == nil || *v.Spec.Move != (v1alpha1.Move{Node: "n3", Pool: "fast"}) {
		t.Fatalf("spec.move is %+v", v.Spec.Move)
	}
	run(t, apitest.Admin, "move", "pvc-1", "--to=n3/default").refused(t, "it is being moved to pool fast of node n3", "--cancel")
	run(t, apitest.Admin, "move", "pvc-1", "--to=n3", "--wait=false").says(t, "pvc-1: node n3 is asked to copy it from node n1\n")
	run(t, apitest.Admin, "move", "pvc-1", "--cancel").says(t, "pvc-1: it stays on node n1.\n")
	e.drivers("")
	r := run(t, apitest.Admin, "move", "pvc-1", "--to=n3/fast")
	check.OK(t, r.err)
	r.says(t, "pvc-1: it is in pool fast of node n3.\n")
	id := v.ID()
	check.OK(t, e.Get(t.Context(), client.ObjectKeyFromObject(v), v))
	if v.Spec.NodeName != "n3" || v.Spec.Pool != "fast" || v.ID() != id {
		t.Errorf("after the move it is %s, %+v", v.ID(), v.Spec)
	}
	run(t, apitest.Admin, "move", id, "--to=n3/fast").refused(t, "it is in pool fast of node n3")
	run(t, apitest.Admin, "move", id, "--to=n3/default").refused(t, "in pool fast, and moves between nodes only")
	run(t, apitest.Admin, "move", id, "--to=n4").refused(t, "it has no pool fast (it has default)", "give --to n4/default")
	run(t, apitest.Admin, "evacuate", "n3", "--to=n4", "--dry-run").refused(t, "1 of 1 volumes stay on node n3")
	run(t, apitest.Admin, "evacuate", "n3", "--to=n4/", "--dry-run").refused(t, "give NODE, or NODE/POOL")
	run(t, apitest.Admin, "evacuate", "n3", "--dry-run").says(t, "pvc-1   100Mi  n1  -\n") // n1 has a pool of that name
	run(t, apitest.Admin, "evacuate", "n3", "--to=n4/default", "--dry-run").says(t, "pvc-1   100Mi  n4/default  -\n")
	r = run(t, apitest.Admin, "evacuate", "n3", "--to=n4/default")
	check.OK(t, r.err)
	r.says(t, "pvc-1: it is in pool default of node n4\n", "No volume is left on node n3.\n")
	check.OK(t, e.Get(t.Context(), client.ObjectKeyFromObject(v), v))
	if v.Spec.NodeName != "n4" || v.Spec.Pool != "default" || v.ID() != id || v.Spec.IDPool != "" {
		t.Errorf("after the evacuation it is %s, %+v", v.ID(), v.Spec)
	}
}

// TestMoveToOtherPoolOfOlderDefinitions: with CRDs that do not know the pool of a move nothing is asked, as the volume would move to another pool.
func TestMoveToOtherPoolOfOlderDefinitions(t *testing.T) {
	e := newEnvironment(t)
	nodes(e)
	fast(e, "n3")
	v := movable("pvc-1", "n1", 100*mib, nil)
	e.add(v)
	server := apitest.Get(t)
	t.Cleanup(func() { check.OK(t, server.Define(context.Background())) })
	check.OK(t, server.Redefine(t.Context(), "volumes.ashlar.dev", func(crd *unstructured.Unstructured) {
		versions, _, _ := unstructured.NestedSlice(crd.Object, "spec", "versions")
		spec := versions[0].(map[string]any)["schema"].(map[string]any)["openAPIV3Schema"].(map[string]any)["properties"].(map[string]any)["spec"].(map[string]any)
		delete(spec, "x-kubernetes-validations")
		delete(spec["properties"].(map[string]any)["move"].(map[string]any)["properties"].(map[string]any), "pool")
		check.OK(t, unstructured.SetNestedSlice(crd.Object, versions, "spec", "versions"))
	}))
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		try := v.DeepCopy()
		try.Spec.Move = &v1alpha1.Move{Node: "n3", Pool: "fast"}
		check.OK(t, e.Patch(t.Context(), try, client.MergeFrom(v), client.DryRunAll))
		if try.Spec.Move.Pool == "" {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the older definitions are not in force")
		}
	}
	run(t, apitest.Admin, "move", "pvc-1", "--to=n3/fast", "--wait=false").refused(t, "know no moves to pools of other names", "deploy/kubernetes/crds")
	check.OK(t, e.Get(t.Context(), client.ObjectKeyFromObject(v), v))
	if v.Spec.Move != nil {
		t.Errorf("spec.move is %+v", v.Spec.Move)
	}
}

// TestMoveUsed: for a volume in use the output says on which node and by which pods, and after an interrupted wait the move goes on.
func TestMoveUsed(t *testing.T) {
	e := newEnvironment(t)
	nodes(e)
	hasten(t)
	pods(e)
	v := movable("pvc-1", "n1", 100*mib, func(v *v1alpha1.Volume) {
		v.Spec.Claims, v.Spec.Claim, v.Spec.ClaimRef = 1, &v1alpha1.Claim{Node: "n3", Mode: "mount", Generation: 1}, &v1alpha1.ClaimRef{Namespace: namespace, Name: "data"}
	})
	e.add(v)
	run(t, apitest.Admin, "move", "default/data", "--to=n2", "--wait=false").says(t, "default/data: used on node n3 by default/database-0; its bytes are copied meanwhile, or when it is released\n")
	ctx, interrupt := context.WithCancel(t.Context())
	out := interrupting{"used on node n3", interrupt, &bytes.Buffer{}}
	m := &moving{cluster: connected(t), out: out, to: "n2", wait: true}
	if err := m.run(ctx, "pvc-1"); err == nil || !strings.Contains(err.Error(), "interrupted; the move to node n2 goes on") || !strings.Contains(err.Error(), v.ID()+" --cancel") {
		t.Errorf("interrupted: %v after %s", err, out.String())
	}
	check.OK(t, e.Get(t.Context(), client.ObjectKeyFromObject(v), v))
	if v.Spec.Move == nil {
		t.Error("the interrupt took the move back")
	}
	e.drivers("")
	program := start(t, apitest.Admin, "move", "pvc-1", "--to=n2")
	program.saying(t, "used on node n3")
	check.OK(t, e.release(v))
	r := program.ended(t)
	check.OK(t, r.err)
	r.says(t, "default/data: it is on node n2.\n")
}

// TestMoveRefused: a move that is not possible is refused, with what to do, and nothing is written.
func TestMoveRefused(t *testing.T) {
	e := newEnvironment(t)
	nodes(e)
	e.add(node("bare", corev1.ConditionTrue))
	e.add(node("down", corev1.ConditionFalse))
	e.add(networked("down", 500*mib))
	e.add(node("other", corev1.ConditionTrue))
	other := networked("other", 500*mib)
	other.Status.Network.Name = "storage"
	e.add(other)
	e.add(node("none", corev1.ConditionTrue))
	e.add(pool("none", 1000*mib, 500*mib))
	e.add(node("sick", corev1.ConditionTrue))
	e.add(networked("sick", 500*mib, v1alpha1.Problem{Severity: "Inaccessible", Reason: "PoolMissing", Message: "mount the disk"}))
	e.add(node("named", corev1.ConditionTrue))
	named := networked("named", 500*mib)
	named.Name, named.Spec.Pool = "named.fast", "fast"
	e.add(named)
	e.add(movable("pvc-any", "n1", 100*mib, nil))
	e.add(movable("pvc-large", "n1", 600*mib, nil))
	e.add(movable("pvc-node", "n1", 100*mib, func(v *v1alpha1.Volume) { v.Spec.Access = "" }))
	e.add(movable("pvc-making", "n1", 100*mib, func(v *v1alpha1.Volume) { v.Status.Created, v.Spec.Make = nil, true }))
	e.add(movable("pvc-stuck", "down", 100*mib, nil))
	e.add(movable("pvc-lonely", "none", 100*mib, nil))
	going := movable("pvc-going", "n1", 100*mib, nil)
	e.add(going)
	e.edited(going, func(v *v1alpha1.Volume) { v.Spec.Delete = v.UID })
	left := movable("pvc-left", "n1", 100*mib, func(v *v1alpha1.Volume) { v.Spec.Move = &v1alpha1.Move{Node: "n2"} })
	e.add(left)
	e.edited(left, func(v *v1alpha1.Volume) {
		v.Spec.NodeName, v.Spec.Move = "n2", &v1alpha1.Move{Node: "n1", Left: true}
		v.Status.Move = &v1alpha1.MoveStatus{Node: "n2", Arrived: true, Message: "moved; node n1 is to give its bytes back"}
	})
	for _, c := range []struct{ volume, to, words string }{
		{"pvc-none", "n2", "there is no volume"},
		{"pvc-any", "n1", "move pvc-any to node n1: it is on node n1"},
		{"pvc-any", "nowhere", "there is no such node"},
		{"pvc-any", "bare", "no driver reports a pool there"},
		{"pvc-any", "named", "it has no pool default (it has fast): without a pool, a volume stays in those of one name; give --to named/fast"},
		{"pvc-any", "n2/fast", "move pvc-any to pool fast of node n2: it has no pool fast (it has default)"},
		{"pvc-any", "n1/fast", "the volume is on that node, in pool default, and moves between nodes only"},
		{"pvc-any", "n1/default", "it is in pool default of node n1"},
		{"pvc-any", "n2/", "give NODE, or NODE/POOL"},
		{"pvc-large", "named/fast", "pool named.fast has no room"},
		{"pvc-any", "down", "it does not answer: NodeNotReady: "},
		{"pvc-any", "other", "it is in the network storage, and node n1 in default"},
		{"pvc-any", "none", "it is in no network; start the driver there with --remote-address"},
		{"pvc-any", "sick", "pool sick.default is not well: PoolMissing: mount the disk"},
		{"pvc-large", "n2", "pool n2.default has no room: 600Mi are needed, and a volume of 500Mi could come at most"},
		{"pvc-node", "n2", "take a snapshot, and restore it on another node by a class with copies: anywhere"},
		{"pvc-making", "n2", "it is not made yet"},
		{"pvc-going", "n2", "it is being deleted"},
		{"pvc-stuck", "n2", "its bytes are on node down, which does not answer: NodeNotReady"},
		{"pvc-lonely", "n2", "its node none is in no network"},
		{"pvc-left", "n3", "it has just come from node n1, which has not given its bytes back yet (moved; node n1 is to give its bytes back)"},
	} {
		run(t, apitest.Admin, "move", c.volume, "--to="+c.to, "--wait=false").refused(t, c.words)
	}
	run(t, apitest.Admin, "move", "pvc-left", "--cancel").refused(t, "it has moved already, from node n1 to node n2")
	run(t, apitest.Admin, "move", "pvc-any").refused(t, "give --to NODE or --cancel")
	var all v1alpha1.VolumeList
	check.OK(t, e.List(t.Context(), &all))
	for _, v := range all.Items {
		if v.Spec.Move != nil && v.Spec.Name != "pvc-left" {
			t.Errorf("%s was refused, and is asked to move: %+v", v.Spec.Name, v.Spec.Move)
		}
	}
}

// TestMoveRules: an error has the messages of the API server's own rules; and a change by somebody else is read before the next try.
func TestMoveRules(t *testing.T) {
	e := newEnvironment(t)
	c := &cluster{Client: e.Client}
	v := movable("pvc-node", "n1", 100*mib, func(v *v1alpha1.Volume) { v.Spec.Access = "" })
	e.add(v)
	all := func() error { return nil }
	err := c.ask(t.Context(), v, place{node: "n2"}, all)
	want := "the API server refuses that: a volume with access node does not move: its PersistentVolume says one node, for good; make a snapshot, and restore it on another node (copies: anywhere)"
	if err == nil || err.Error() != want {
		t.Errorf("got  %v\nwant %s", err, want)
	}
	v = movable("pvc-any", "n1", 100*mib, nil)
	e.add(v)
	check.OK(t, e.Get(t.Context(), client.ObjectKeyFromObject(v), v))
	stale := v.DeepCopy()
	e.edited(v, func(v *v1alpha1.Volume) { v.Spec.Move = &v1alpha1.Move{Node: "n3"} })
	seen := 0
	err = c.ask(t.Context(), stale, place{node: "n2"}, func() error {
		if seen++; stale.Spec.Move != nil {
			return fmt.Errorf("it moves to %s", stale.Spec.Move.Node)
		}
		return nil
	})
	if err == nil || err.Error() != "it moves to n3" || seen != 2 {
		t.Errorf("asked with an object that is old: %v after %d looks", err, seen)
	}
	e.remove(v)
	if err := c.ask(t.Context(), stale.DeepCopy(), place{node: "n2"}, all); !errors.Is(err, errDeleted) {
		t.Errorf("of a volume that is gone: %v", err)
	}
}

// TestEvacuate: the plan has what moves where, and what stays; then it is carried out, some at a time, and fails if something is left.
func TestEvacuate(t *testing.T) {
	e := newEnvironment(t)
	nodes(e)
	hasten(t)
	e.add(movable("pvc-a", "n1", 300*mib, nil))
	e.add(movable("pvc-b", "n1", 250*mib, nil))
	e.add(movable("pvc-c", "n1", 100*mib, nil))
	e.add(movable("pvc-elsewhere", "n3", 100*mib, nil))
	run(t, apitest.Admin, "evacuate", "n1", "--dry-run").says(t, "VOLUME  SIZE   TO  REMARKS\n", "pvc-a   300Mi  n3  -\n", "pvc-b   250Mi  n4  -\n", "pvc-c   100Mi  n4  -\n",
		"Node n1 is not cordoned, so new volumes may be made there: kubectl cordon n1\n")
	run(t, apitest.Admin, "evacuate", "n1", "--to=n2", "--dry-run").refused(t, "3 of 3 volumes stay on node n1")
	run(t, apitest.Admin, "evacuate", "n1", "--to=n2", "--dry-run").says(t, "pvc-a   300Mi  stays  node n2: it is cordoned\n")
	run(t, apitest.Admin, "evacuate", "n1", "--to=n4", "--dry-run").says(t, "pvc-a   300Mi  n4     -\n", "pvc-b   250Mi  stays  node n4: pool n4.default has no room: 250Mi are needed, and a volume of 200Mi", "pvc-c   100Mi  n4")
	run(t, apitest.Admin, "evacuate", "nowhere").refused(t, `there is no node "nowhere"`)
	most := e.drivers("")
	r := run(t, apitest.Admin, "evacuate", "n1", "--parallel=1")
	check.OK(t, r.err)
	r.says(t, "pvc-a: it is on node n3\n", "pvc-b: it is on node n4\n", "pvc-c: it is on node n4\n", "No volume is left on node n1.\n")
	if n := most(); n != 1 {
		t.Errorf("%d were under way at once", n)
	}
	r = run(t, apitest.Admin, "evacuate", "n1")
	check.OK(t, r.err)
	r.says(t, "No volume is on node n1.\n")
}

// TestEvacuateRest: volumes that cannot move, are used, or do not go on do not keep others from moving; they are told, and it can be run again.
func TestEvacuateRest(t *testing.T) {
	e := newEnvironment(t)
	nodes(e)
	hasten(t)
	waits(t, &standstill, 6*time.Second)
	used := movable("pvc-used", "n1", 40*mib, func(v *v1alpha1.Volume) {
		v.Spec.Claims, v.Spec.Claim = 1, &v1alpha1.Claim{Node: "n4", Mode: "mount", Generation: 1}
	})
	e.add(used)
	e.add(movable("pvc-node", "n1", 30*mib, func(v *v1alpha1.Volume) { v.Spec.Access = "" }))
	e.add(movable("pvc-stuck", "n1", 20*mib, nil))
	e.add(movable("pvc-a", "n1", 10*mib, nil))
	e.add(movable("pvc-under", "n1", 5*mib, func(v *v1alpha1.Volume) { v.Spec.Move = &v1alpha1.Move{Node: "n2"} }))
	e.add(movable("pvc-comes", "n3", 4*mib, func(v *v1alpha1.Volume) { v.Spec.Move = &v1alpha1.Move{Node: "n1"} }))
	left := movable("pvc-left", "n1", 3*mib, func(v *v1alpha1.Volume) { v.Spec.Move = &v1alpha1.Move{Node: "n4"} })
	e.add(left)
	e.edited(left, func(v *v1alpha1.Volume) { v.Spec.NodeName, v.Spec.Move = "n4", &v1alpha1.Move{Node: "n1", Left: true} })
	e.add(movable("pvc-carried", "n1", 2*mib, func(v *v1alpha1.Volume) {
		v.Spec.Claims, v.Spec.Claim = 1, &v1alpha1.Claim{Node: "n4", Mode: carriedMode, Generation: 1}
	}))
	e.drivers("pvc-a", "pvc-stuck", "pvc-comes")
	r := run(t, apitest.Admin, "evacuate", "n1")
	r.says(t, "used on node n4; it moves meanwhile, or when it is released\n", "pvc-node     30Mi  stays  it has access=node", "pvc-under    5Mi   n2     under way\n", "it comes here, from node n3", "it has moved; its old bytes are to be given back\n",
		"pvc-a: it is on node n", "pvc-under: it is on node n2\n", "pvc-left: it is on node n4\n", "pvc-carried: it is on node n", "pvc-stuck: stays: its move does not go on (nothing has changed for 6s), and may later: node n")
	r.refused(t, "3 of 8 volumes stay on node n1, see above; 1 of 8 are still used, and move meanwhile, or when they are released: pvc-used on node n4")
	check.OK(t, e.Get(t.Context(), client.ObjectKeyFromObject(used), used))
	if used.Spec.Move == nil {
		t.Error("what is used was not asked to move")
	}
	check.OK(t, e.release(used))
	r = run(t, apitest.Admin, "evacuate", "n1")
	r.refused(t, "3 of ")
	r.says(t, "pvc-stuck  20Mi  n")
	check.OK(t, e.Get(t.Context(), client.ObjectKeyFromObject(used), used))
	if used.Spec.NodeName == "n1" {
		t.Errorf("what was released has not moved: %+v", used.Spec)
	}
}

// TestEvacuateInterrupted: after an interrupt moves that were asked for go on, others are not asked for, and the next run goes on.
func TestEvacuateInterrupted(t *testing.T) {
	e := newEnvironment(t)
	nodes(e)
	hasten(t)
	for _, name := range []string{"pvc-a", "pvc-b", "pvc-c"} {
		e.add(movable(name, "n1", 10*mib, nil))
	}
	ctx, interrupt := context.WithCancel(t.Context())
	out := interrupting{"pvc-b: node", interrupt, &bytes.Buffer{}}
	if err := (&evacuation{cluster: connected(t), out: out, table: out, node: "n1", parallel: 2}).run(ctx); err == nil || !strings.Contains(err.Error(), "interrupted; moves that were asked for go on") {
		t.Errorf("interrupted: %v after %s", err, out.String())
	}
	var all v1alpha1.VolumeList
	check.OK(t, e.List(t.Context(), &all))
	for _, v := range all.Items {
		if (v.Spec.Move != nil) != (v.Spec.Name != "pvc-c") {
			t.Errorf("%s: spec.move is %+v", v.Spec.Name, v.Spec.Move)
		}
	}
	run(t, apitest.Admin, "evacuate", "n1", "--dry-run").says(t, "under way\n")
	e.drivers("")
	r := run(t, apitest.Admin, "evacuate", "n1")
	check.OK(t, r.err)
	r.says(t, "pvc-c: it is on node n", "No volume is left on node n1.\n")
}

// TestEvacuateDeleted: volumes and snapshots that are deleted before their moves are asked for do not stay on the node.
func TestEvacuateDeleted(t *testing.T) {
	e := newEnvironment(t)
	nodes(e)
	e.ported("n1", "n3", "n4")
	hasten(t)
	v, s := movable("pvc-b", "n1", 9*mib, nil), cutOf("nightly", "pvc-a", "n1", mib, nil)
	e.add(movable("pvc-a", "n1", 10*mib, nil))
	e.add(v)
	e.add(s)
	e.drivers("")
	e.carriers("")
	goes := sync.OnceFunc(func() { check.OK(t, errors.Join(e.Delete(t.Context(), v), e.Delete(t.Context(), s))) })
	out := interrupting{"pvc-a: node", goes, &bytes.Buffer{}}
	err := (&evacuation{cluster: connected(t), out: out, table: out, node: "n1", parallel: 1, with: true}).run(t.Context())
	if err != nil || !strings.Contains(out.String(), "pvc-b: it was deleted meanwhile\n") || !strings.Contains(out.String(), "snapshot nightly: it was deleted meanwhile\n") || strings.Contains(out.String(), "stays") {
		t.Errorf("%v\n%s", err, out.String())
	}
}

// TestCancelInterrupted: an interrupted command that takes a move back says that this may be done, and what to do. So does one whose request is not answered.
func TestCancelInterrupted(t *testing.T) {
	e := newEnvironment(t)
	nodes(e)
	hasten(t)
	waits(t, &patience, 500*time.Millisecond)
	e.add(movable("pvc-1", "n1", 10*mib, func(v *v1alpha1.Volume) { v.Spec.Move = &v1alpha1.Move{Node: "n3"} }))
	ctx, interrupt := context.WithCancel(t.Context())
	begun := func() {}
	c := through(t, func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method != http.MethodPatch {
			return false
		}
		begun()
		w.WriteHeader(http.StatusInternalServerError)
		return true
	})
	const again = "the same command takes it back if not"
	err := (&moving{cluster: c, out: io.Discard, cancel: true}).run(ctx, "pvc-1")
	result{err: err}.refused(t, "pvc-1: it is not known whether its move is taken back: the API server has not answered", again)
	begun = interrupt
	err = (&moving{cluster: c, out: io.Discard, cancel: true}).run(ctx, "pvc-1")
	result{err: err}.refused(t, "pvc-1: interrupted; its move may be taken back already: "+again)
	run(t, apitest.Admin, "move", "pvc-1", "--cancel").says(t, "pvc-1: it stays on node n1.\n")
	run(t, apitest.Admin, "move", "pvc-1", "--cancel", "--with-snapshots").says(t, "None of its snapshots moves.\n")
}

// TestEvacuateNews: what comes to the node while it is emptied is told, and not that nothing is left there; the next run moves it.
func TestEvacuateNews(t *testing.T) {
	e := newEnvironment(t)
	nodes(e)
	e.ported("n1", "n3", "n4")
	hasten(t)
	e.add(movable("pvc-a", "n1", 10*mib, nil))
	e.add(cutOf("nightly-1", "pvc-a", "n1", mib, nil))
	e.drivers("")
	e.carriers("")
	comes := sync.OnceFunc(func() {
		e.add(movable("pvc-clone", "n1", 10*mib, nil))
		e.add(cutOf("nightly-2", "pvc-a", "n1", mib, nil))
	})
	out := interrupting{"pvc-a: node", comes, &bytes.Buffer{}}
	err := (&evacuation{cluster: connected(t), out: out, table: out, node: "n1", parallel: 2, with: true}).run(t.Context())
	result{err: err}.refused(t, "volumes that have come to node n1 meanwhile, or back to it: 1 (pvc-clone); run it again (kubectl ashlar evacuate n1)",
		"snapshots that have come to node n1 meanwhile, or back to it: 1 (nightly-2); run it again (kubectl ashlar evacuate n1 --with-snapshots)")
	if strings.Contains(out.String(), "is left on node") {
		t.Errorf("it says that something is left, or nothing:\n%s", out.String())
	}
	r := run(t, apitest.Admin, "evacuate", "n1", "--with-snapshots")
	check.OK(t, r.err)
	r.says(t, "pvc-clone: it is on node n", "snapshot nightly-2: it is on node n", "No volume is left on node n1.\n", "No snapshot is left on node n1.\n")
}

// TestServerAway: an API server that is away for a second ends neither move nor evacuate, whatever they are doing.
func TestServerAway(t *testing.T) {
	e := newEnvironment(t)
	nodes(e)
	hasten(t)
	for _, name := range []string{"pvc-a", "pvc-b", "pvc-c", "pvc-d"} {
		e.add(movable(name, "n1", 10*mib, nil))
	}
	var o outage
	c := through(t, o.answers)
	e.drivers("")
	out := interrupting{"pvc-a: node", o.begins(t.Context()), &bytes.Buffer{}} // it is away when the next move is asked for
	err := (&evacuation{cluster: c, out: out, table: io.Discard, node: "n1", parallel: 2}).run(t.Context())
	if err != nil || strings.Contains(out.String(), "stays") || !strings.HasSuffix(out.String(), "No volume is left on node n1.\n") {
		t.Errorf("evacuate: %v\n%s", err, out.String())
	}
	if o.turns.Load() == 0 {
		t.Error("evacuate asked nothing meanwhile")
	}
	o.turns.Store(0)
	out = interrupting{"pvc-a: node", o.begins(t.Context()), &bytes.Buffer{}}
	if err := (&moving{cluster: c, out: out, to: "n1", wait: true}).run(t.Context(), "pvc-a"); err != nil || !strings.HasSuffix(out.String(), "pvc-a: it is on node n1.\n") {
		t.Errorf("move: %v\n%s", err, out.String())
	}
	if o.turns.Load() == 0 {
		t.Error("move asked nothing meanwhile")
	}
}

// TestServerGone: if the API server does not come back, the output does not say that volumes stay: that is not known.
func TestServerGone(t *testing.T) {
	e := newEnvironment(t)
	nodes(e)
	hasten(t)
	waits(t, &patience, 500*time.Millisecond)
	for _, name := range []string{"pvc-a", "pvc-b", "pvc-c"} {
		e.add(movable(name, "n1", 10*mib, nil))
	}
	const goes = "; moves that were asked for go on, and no others begin; run it again to go on (kubectl ashlar evacuate n1)"
	for words, want := range map[string]string{
		"pvc-a: node": "pvc-b: it is not known how far its move is: the API server has not answered for 500ms: ", // at the next request for a move
		"pvc-b: node": "pvc-a: it is not known how far its move is: the API server has not answered for 500ms: ",
	} {
		var o outage
		out := interrupting{words, func() { o.away.Store(true) }, &bytes.Buffer{}}
		err := (&evacuation{cluster: through(t, o.answers), out: out, table: io.Discard, node: "n1", parallel: 2}).run(t.Context())
		if err == nil || !strings.HasPrefix(err.Error(), want) || !strings.HasSuffix(err.Error(), goes) || strings.Contains(out.String()+err.Error(), "stay") {
			t.Errorf("evacuate: %v\n%s", err, out.String())
		}
		var all v1alpha1.VolumeList
		check.OK(t, e.List(t.Context(), &all))
		for i := range all.Items {
			e.edited(&all.Items[i], func(v *v1alpha1.Volume) { v.Spec.Move = nil })
		}
	}
	var o outage
	c := through(t, o.answers)
	out := interrupting{"pvc-a: node", func() { o.away.Store(true) }, &bytes.Buffer{}}
	err := (&moving{cluster: c, out: out, to: "n3", wait: true}).run(t.Context(), "pvc-a")
	if err == nil || !strings.HasPrefix(err.Error(), "pvc-a: it is not known how far its move to node n3 is, which goes on: the API server has not answered for 500ms: ") {
		t.Errorf("move: %v\n%s", err, out.String())
	}
}

// TestEvacuateSilent: a volume whose writes or reads are never answered is told, and all others move. If that happens for two in a row, evacuate ends.
func TestEvacuateSilent(t *testing.T) {
	e := newEnvironment(t)
	nodes(e)
	hasten(t)
	waits(t, &patience, 500*time.Millisecond)
	for _, name := range []string{"pvc-a", "pvc-b", "pvc-c", "pvc-d"} {
		e.add(movable(name, "n1", 10*mib, nil))
	}
	e.drivers("")
	of := func(name string) string { return "/volumes/" + volume.KeyOf(name) }
	fails := func(which func(*http.Request) bool) *cluster {
		return through(t, func(w http.ResponseWriter, r *http.Request) bool {
			fails := which(r)
			if fails {
				w.WriteHeader(http.StatusInternalServerError)
			}
			return fails
		})
	}
	var out bytes.Buffer
	c := fails(func(r *http.Request) bool {
		return r.Method == http.MethodPatch && strings.HasSuffix(r.URL.Path, of("pvc-a")) || r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, of("pvc-c"))
	})
	err := (&evacuation{cluster: c, out: &out, table: io.Discard, node: "n1", parallel: 1}).run(t.Context())
	const unheard = ": it is not known how far its move is: the API server has not answered for 500ms: "
	for _, words := range []string{"pvc-a" + unheard, "pvc-b: it is on node n", "pvc-c" + unheard, "pvc-d: it is on node n"} {
		if !strings.Contains(out.String(), words) {
			t.Errorf("it does not say %q:\n%s", words, out.String())
		}
	}
	if err == nil || err.Error() != "2 of 4 volumes stay on node n1, see above" {
		t.Errorf("evacuate: %v", err)
	}
	e.add(movable("pvc-e", "n1", 5*mib, nil))
	err = (&evacuation{cluster: fails(func(r *http.Request) bool { return r.Method == http.MethodPatch }), out: io.Discard, table: io.Discard, node: "n1", parallel: 1}).run(t.Context())
	if err == nil || !strings.HasPrefix(err.Error(), "pvc-e"+unheard) {
		t.Errorf("without writes: %v", err)
	}
}

// TestUnansweredWrite: a write that was done and not answered is not done twice, nor taken for that of somebody else.
func TestUnansweredWrite(t *testing.T) {
	e := newEnvironment(t)
	nodes(e)
	hasten(t)
	v := movable("pvc-a", "n1", 10*mib, nil)
	e.add(v)
	config := apitest.Get(t).Config(apitest.Admin)
	direct, err := rest.HTTPClientFor(config)
	check.OK(t, err)
	var after func() // called before the next write, which is not answered; nil: writes are answered
	c := through(t, func(_ http.ResponseWriter, r *http.Request) bool {
		if r.Method != http.MethodPatch || after == nil {
			return false
		}
		r.RequestURI = ""
		r.URL, _ = url.Parse(config.Host + r.URL.RequestURI()) // it was a valid URL
		if answer, err := direct.Do(r); err != nil {
			t.Error(err)
		} else {
			_ = answer.Body.Close() // the answer is dropped
		}
		after()
		after = nil
		panic(http.ErrAbortHandler)
	})
	for _, s := range []struct {
		what  string
		ask   *moving
		after func()
		words string
	}{
		{"asked for", &moving{to: "n3"}, func() {}, "pvc-a: node n3 is asked to copy it from node n1\n"},
		{"taken back", &moving{cancel: true}, func() {}, "pvc-a: it stays on node n1.\n"},
		{"moved meanwhile", &moving{to: "n3", wait: true}, func() {
			for v.Spec.NodeName = ""; v.Spec.NodeName != "n3" || v.Spec.Move != nil; {
				if err := errors.Join(e.Get(t.Context(), client.ObjectKeyFromObject(v), v), e.advance(t.Context(), v)); err != nil {
					t.Error(err)
					return
				}
			}
		}, "pvc-a: it is on node n3.\n"},
	} {
		var out bytes.Buffer
		s.ask.cluster, s.ask.out = c, &out
		after = s.after
		if err := s.ask.run(t.Context(), "pvc-a"); err != nil || out.String() != s.words || after != nil {
			t.Errorf("%s: %v\n%s", s.what, err, out.String())
		}
	}
}

// TestStage: what is told of a move, by its object.
func TestStage(t *testing.T) {
	claim := &v1alpha1.Claim{Node: "n3", Mode: "mount", Generation: 1}
	move, left := &v1alpha1.Move{Node: "n2"}, &v1alpha1.Move{Node: "n1", Left: true}
	for _, c := range []struct {
		node   string
		move   *v1alpha1.Move
		claim  *v1alpha1.Claim
		export *v1alpha1.Export
		status *v1alpha1.MoveStatus
		want   string // with "!": it has failed; with ".": it has ended
	}{
		{"n1", move, nil, nil, nil, "node n2 is asked to copy it from node n1"},
		{"n1", move, nil, nil, &v1alpha1.MoveStatus{Node: "n9", Message: "of another move"}, "node n2 is asked to copy it from node n1"},
		{"n1", move, claim, nil, &v1alpha1.MoveStatus{Node: "n2", Waits: true, Message: "it is used"}, "used on node n3; its bytes are copied meanwhile, or when it is released"},
		{"n1", move, nil, &v1alpha1.Export{Generation: 1, Node: "n4"}, nil, "used on node n4; its bytes are copied meanwhile, or when it is released"},
		{"n1", move, nil, nil, &v1alpha1.MoveStatus{Node: "n2", Waits: true, Message: "no space"}, "waits: no space"},
		{"n1", move, nil, nil, &v1alpha1.MoveStatus{Node: "n2", Message: "1Gi of 4Gi are copied", Progress: &v1alpha1.Progress{Done: 1, Total: 4}}, "25 %, 1Gi of 4Gi are copied"},
		{"n1", move, nil, nil, &v1alpha1.MoveStatus{Node: "n2", Message: "all bytes are on node n2"}, "all bytes are on node n2"},
		{"n1", nil, nil, nil, nil, "!the move to node n2 was taken back: it stays on node n1"},
		{"n1", &v1alpha1.Move{Node: "n3"}, nil, nil, nil, "!somebody else has it moved to node n3"},
		{"n2", left, claim, nil, &v1alpha1.MoveStatus{Node: "n2"}, "node n2 takes it over"},
		{"n2", left, claim, nil, &v1alpha1.MoveStatus{Node: "n2", Arrived: true}, "it is on node n2; node n1 gives its bytes back"},
		{"n2", left, nil, nil, &v1alpha1.MoveStatus{Node: "n2", Arrived: true, Waits: true, Message: "moved; the bytes that node n1 had are still there: it is mounted"}, "moved; the bytes that node n1 had are still there: it is mounted"},
		{"n2", nil, claim, nil, nil, ".it is on node n2"},
	} {
		v := movable("pvc-1", c.node, mib, nil)
		v.Spec.Move, v.Spec.Claim, v.Status.Export, v.Status.Move = c.move, c.claim, c.export, c.status
		_, text, done, err := (&followed{v: v, to: place{node: "n2"}}).stage()
		if err != nil {
			text = "!" + err.Error()
		} else if done {
			text = "." + text
		}
		if text != c.want {
			t.Errorf("got %q, want %q", text, c.want)
		}
	}
}

// TestMoveShown: describe and volumes show where a volume moves to, and how far that is, also while it is used; not the status of an earlier move.
func TestMoveShown(t *testing.T) {
	e := newEnvironment(t)
	nodes(e)
	v := movable("pvc-1", "n1", 100*mib, nil)
	e.add(v)
	if r := run(t, apitest.Admin, "describe", "pvc-1"); r.err != nil || strings.Contains(r.stdout, "Moves ") {
		t.Errorf("what does not move is shown to, %v:\n%s", r.err, r.stdout)
	}
	e.edited(v, func(v *v1alpha1.Volume) {
		v.Spec.Claims, v.Spec.Claim = 1, &v1alpha1.Claim{Node: "n4", Mode: "m", Generation: 1}
		v.Spec.Move = &v1alpha1.Move{Node: "n3", Pool: "fast"}
		v.Status.Move = &v1alpha1.MoveStatus{Node: "n3", Pool: "fast", Claim: 1, Message: "40Mi of 100Mi are copied while node n4 uses the volume", Progress: &v1alpha1.Progress{Done: 40, Total: 100}}
	})
	run(t, apitest.Admin, "describe", "pvc-1").says(t, "State              Ready [####......] 40 %\n", "Moves              to pool fast of node n3: 40Mi of 100Mi are copied while node n4 uses the volume\n")
	run(t, apitest.Admin, "volumes").says(t, "Ready [####......] 40 %")
	e.edited(v, func(v *v1alpha1.Volume) {
		v.Status.Move.Waits, v.Status.Move.Message, v.Status.Move.Progress = true, "node n4 copies another volume now: x", nil
	})
	run(t, apitest.Admin, "describe", "pvc-1").says(t, "State              Ready\n", "Moves              to pool fast of node n3: it waits: node n4 copies another volume now: x\n")
	e.edited(v, func(v *v1alpha1.Volume) { v.Spec.Move = &v1alpha1.Move{Node: "n4"} })
	run(t, apitest.Admin, "describe", "pvc-1").says(t, "Moves              to node n4\n")
}
