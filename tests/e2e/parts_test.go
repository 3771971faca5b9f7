// Package e2e runs the parts of a cluster as the processes that they are, against a real API
// server: a controller, and the agents of two nodes with pools of their own. They are
// killed for real. run.sh beside it has the same parts as pods, with real sidecars.
package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/process"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/csimap"
)

func TestMain(m *testing.M) {
	log.SetLogger(klog.Background())
	os.Exit(run(m))
}

// built is where the driver is, once a test asked for it.
var built struct {
	sync.Once
	dir, binary string
	err         error
}

func run(m *testing.M) int {
	var err error
	if built.dir, err = os.MkdirTemp("", "ashlar"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer apitest.Stop()
	code := m.Run()
	_ = os.RemoveAll(built.dir)
	return code
}

const (
	miB   = 1 << 20
	grace = time.Second
)

// parts are those of a cluster of two nodes.
type parts struct {
	testing.TB
	kube client.Client
	dir  string

	controller *process.Driver
	agents     map[string]*process.Driver // by node
}

var nodes = []string{"node-a", "node-b"}

// start starts a controller and two nodes, of which the first has more room, with more flags if
// given. All of it is gone at the end of the test.
func start(t *testing.T, nodeFlags ...string) *parts {
	t.Helper()
	drivertest.NeedRoot(t)
	scheme := runtime.NewScheme()
	check.OK(t, errors.Join(v1alpha1.AddToScheme(scheme), corev1.AddToScheme(scheme)))
	kube, err := client.New(apitest.Get(t).Config(apitest.Admin), client.Options{Scheme: scheme})
	check.OK(t, err)
	p := &parts{TB: t, kube: kube, dir: drivertest.Dir(t), agents: map[string]*process.Driver{}}
	t.Cleanup(p.clear)
	built.Do(func() { built.binary, built.err = process.Build(built.dir) })
	check.OK(t, built.err)
	server := apitest.Get(t)
	check.OK(t, server.Kubeconfig(server.Config(apitest.Admin), p.dir+"/kubeconfig"))
	for i, node := range nodes {
		p.node(node, true)
		check.OK(t, server.Kubeconfig(server.Agent(t, node), p.dir+"/"+node+".kubeconfig"))
		p.agents[node] = p.part(node, append(nodeFlags, "--mode=node", "--node-id="+node, "--kubeconfig="+p.dir+"/"+node+".kubeconfig", fmt.Sprintf("--pool=default=file://%s/%s/pool?reservePercent=0&overprovision=%d", p.dir, node, len(nodes)-i))...)
	}
	p.controller = p.newController("controller")
	for _, node := range nodes {
		p.eventually("the controller knows the pool of "+node, func() bool {
			r, err := p.controller.GetCapacity(p.Context(), &csi.GetCapacityRequest{AccessibleTopology: csimap.Topology(node)})
			return err == nil && r.GetAvailableCapacity() > 0
		})
	}
	return p
}

// part starts a part in a directory of its own.
func (p *parts) part(name string, flags ...string) *process.Driver {
	p.Helper()
	driver, err := process.New(filepath.Join(p.dir, name), "", append([]string{built.binary, "--kubeconfig=" + p.dir + "/kubeconfig", "-v=4"}, flags...)...)
	check.OK(p, err)
	p.Cleanup(driver.Close)
	check.OK(p, driver.Start())
	p.ready(driver)
	return driver
}

func (p *parts) ready(driver *process.Driver) {
	p.Helper()
	ctx, cancel := context.WithTimeout(p.Context(), time.Minute)
	defer cancel()
	check.OK(p, driver.Ready(ctx))
}

// newController starts a controller; there may be several.
func (p *parts) newController(name string) *process.Driver {
	p.Helper()
	return p.part(name, "--mode=controller", "--gone-grace="+grace.String())
}

// clear removes the objects.
func (p *parts) clear() {
	ctx := context.Background()
	var volumes v1alpha1.VolumeList
	check.OK(p, p.kube.List(ctx, &volumes))
	for i := range volumes.Items {
		v := &volumes.Items[i]
		before := v.DeepCopy()
		v.Finalizers = nil
		check.OK(p, client.IgnoreNotFound(p.kube.Patch(ctx, v, client.MergeFrom(before))))
		check.OK(p, client.IgnoreNotFound(p.kube.Delete(ctx, v)))
	}
	check.OK(p, p.kube.DeleteAllOf(ctx, &v1alpha1.Snapshot{}))
	check.OK(p, p.kube.DeleteAllOf(ctx, &v1alpha1.Pool{}))
	check.OK(p, p.kube.DeleteAllOf(ctx, &corev1.Node{}))
}

// node makes a node, ready or not.
func (p *parts) node(name string, ready bool) {
	p.Helper()
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	check.OK(p, client.IgnoreAlreadyExists(p.kube.Create(p.Context(), n)))
	check.OK(p, p.kube.Get(p.Context(), client.ObjectKeyFromObject(n), n))
	condition := corev1.ConditionFalse
	if ready {
		condition = corev1.ConditionTrue
	}
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: condition}}
	check.OK(p, p.kube.Status().Update(p.Context(), n))
}

func (p *parts) eventually(what string, is func() bool) {
	p.Helper()
	for end := time.Now().Add(time.Minute); !is(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			p.Fatalf("never: %s", what)
		}
	}
}

// called makes a call again and again until it is through, and fails the test unless the
// answer has the code.
func (p *parts) called(want codes.Code, call func(ctx context.Context) error) {
	p.Helper()
	ctx, cancel := context.WithTimeout(p.Context(), time.Minute)
	defer cancel()
	if err := co.Again(ctx, func() error { return call(ctx) }); status.Code(err) != want {
		p.Fatalf("%v, want %s", err, want)
	}
}

// once makes a call, which has to answer with the code without being waited for.
func (p *parts) once(want codes.Code, call func(ctx context.Context) error) {
	p.Helper()
	ctx, cancel := context.WithTimeout(p.Context(), 30*time.Second)
	defer cancel()
	began := time.Now()
	if err := call(ctx); status.Code(err) != want || time.Since(began) > 20*time.Second {
		p.Fatalf("%v after %s, want %s", err, time.Since(began), want)
	}
}

var writer = co.Capability(co.Block, co.Writer)

// create asks for a volume on some nodes, or anywhere.
func create(c *process.Driver, name string, size int64, on ...string) func(context.Context) error {
	return func(ctx context.Context) error {
		_, err := c.CreateVolume(ctx, request(name, size, on...))
		return err
	}
}

func request(name string, size int64, on ...string) *csi.CreateVolumeRequest {
	r := &csi.CreateVolumeRequest{Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: size}, VolumeCapabilities: []*csi.VolumeCapability{writer}}
	for _, node := range on {
		if r.AccessibilityRequirements == nil {
			r.AccessibilityRequirements = &csi.TopologyRequirement{}
		}
		r.AccessibilityRequirements.Preferred = append(r.AccessibilityRequirements.Preferred, csimap.Topology(node))
		r.AccessibilityRequirements.Requisite = append(r.AccessibilityRequirements.Requisite, csimap.Topology(node))
	}
	return r
}

// made makes a volume and returns it.
func (p *parts) made(r *csi.CreateVolumeRequest) *csi.Volume {
	p.Helper()
	var v *csi.Volume
	p.called(codes.OK, func(ctx context.Context) error {
		response, err := p.controller.CreateVolume(ctx, r)
		v = response.GetVolume()
		return err
	})
	return v
}

func publish(c *process.Driver, id, node string, as *csi.VolumeCapability) func(context.Context) error {
	return func(ctx context.Context) error {
		_, err := c.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{VolumeId: id, NodeId: node, VolumeCapability: as})
		return err
	}
}

func unpublish(c *process.Driver, id string) func(context.Context) error {
	return func(ctx context.Context) error {
		_, err := c.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: id})
		return err
	}
}

func remove(c *process.Driver, id string) func(context.Context) error {
	return func(ctx context.Context) error {
		_, err := c.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: id})
		return err
	}
}

func on(v *csi.Volume) string {
	return v.GetAccessibleTopology()[0].GetSegments()[csimap.TopologyKey]
}

// agree fails the test unless the volumes with these IDs, and no others, have an object
// each, and an image each on the node that the object names.
func (p *parts) agree(ids map[string]string) {
	p.Helper()
	var objects, images, want []string
	var volumes v1alpha1.VolumeList
	check.OK(p, p.kube.List(p.Context(), &volumes))
	for _, v := range volumes.Items {
		if v.Deleting() || v.Status.Created == nil {
			p.Errorf("volume %s: to be deleted %v, created %v", v.Spec.Name, v.Deleting(), v.Status.Created)
		}
		objects = append(objects, v.Spec.NodeName+" "+v.Spec.Name+" "+v.Name)
		if id := ids[v.Spec.Name]; strings.HasSuffix(id, "."+v.Name) {
			want = append(want, v.Spec.NodeName+" "+v.Spec.Name+" "+v.Name)
		}
	}
	if len(want) != len(ids) || len(objects) != len(ids) {
		p.Errorf("%d objects, of which %d are of the %d volumes", len(objects), len(want), len(ids))
	}
	found, err := filepath.Glob(p.dir + "/*/pool/volumes/*")
	check.OK(p, err)
	for _, path := range found {
		key, image := strings.CutSuffix(filepath.Base(path), ".img")
		node := filepath.Base(filepath.Dir(filepath.Dir(filepath.Dir(path))))
		if image {
			images = append(images, node+" "+key)
		} else if _, err := os.Stat(strings.TrimSuffix(path, ".rec") + ".img"); err != nil {
			p.Errorf("%s is there without an image", path)
		}
	}
	var expected []string
	for _, o := range objects {
		fields := strings.Fields(o)
		expected = append(expected, fields[0]+" "+fields[2])
	}
	slices.Sort(images)
	slices.Sort(expected)
	if !slices.Equal(images, expected) {
		p.Errorf("objects %v\nimages %v", expected, images)
	}
}

// TestPlacement: volumes are where they are asked for, else where most room is; copies are
// with their source, and say so.
func TestPlacement(t *testing.T) {
	p := start(t)
	ids := map[string]string{}
	for _, c := range []struct {
		name string
		on   []string
		want string
	}{
		{"anywhere", nil, "node-a"},
		{"there", []string{"node-b"}, "node-b"},
		{"first", []string{"node-b", "node-a"}, "node-b"},
	} {
		v := p.made(request(c.name, miB, c.on...))
		ids[c.name] = v.GetVolumeId()
		if on(v) != c.want {
			t.Errorf("%s is on %s, not %s", c.name, on(v), c.want)
		}
	}
	capacity, err := p.controller.GetCapacity(t.Context(), &csi.GetCapacityRequest{AccessibleTopology: csimap.Topology("node-b")})
	check.OK(t, err)
	tooMuch := 2 * capacity.GetAvailableCapacity() // others may give some back to this disk meanwhile
	p.called(codes.ResourceExhausted, create(p.controller, "too large", tooMuch, "node-b"))

	clone := request("clone", miB)
	co.FromVolume(clone, ids["there"])
	v := p.made(clone)
	ids["clone"] = v.GetVolumeId()
	if on(v) != "node-b" {
		t.Errorf("the copy is on %s", on(v))
	}
	clone.Name, clone.AccessibilityRequirements = "clone elsewhere", request("", 0, "node-a").AccessibilityRequirements
	p.called(codes.ResourceExhausted, func(ctx context.Context) error {
		_, err := p.controller.CreateVolume(ctx, clone)
		return err
	})
	p.agree(ids)
}

// TestNodeDown: the agent of a node is killed, and the node is not ready. Calls for its
// volumes answer Unavailable, those for others do not notice; what was asked is done once
// it is back.
func TestNodeDown(t *testing.T) {
	p := start(t)
	a, b := p.made(request("a", miB, "node-a")), p.made(request("b", miB, "node-b"))
	p.agents["node-b"].Kill()
	p.node("node-b", false)
	p.eventually("the controller knows", func() bool {
		r, err := p.controller.GetCapacity(t.Context(), &csi.GetCapacityRequest{AccessibleTopology: csimap.Topology("node-b")})
		return err == nil && r.GetAvailableCapacity() == 0
	})
	p.once(codes.ResourceExhausted, create(p.controller, "new", miB, "node-b")) // the scheduler is to choose another
	p.once(codes.Unavailable, func(ctx context.Context) error {
		_, err := p.controller.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{VolumeId: b.GetVolumeId(), CapacityRange: &csi.CapacityRange{RequiredBytes: 2 * miB}})
		return err
	})
	p.once(codes.Unavailable, remove(p.controller, b.GetVolumeId()))
	p.once(codes.OK, create(p.controller, "other", miB)) // on the node that is there
	p.once(codes.OK, publish(p.controller, a.GetVolumeId(), "node-a", writer))
	p.once(codes.OK, unpublish(p.controller, a.GetVolumeId()))
	p.once(codes.OK, remove(p.controller, a.GetVolumeId()))

	check.OK(t, p.agents["node-b"].Start())
	p.node("node-b", true)
	p.called(codes.OK, remove(p.controller, b.GetVolumeId()))
	ids := map[string]string{}
	for _, name := range []string{"new", "other"} {
		ids[name] = p.made(request(name, miB)).GetVolumeId()
	}
	p.agree(ids)
}

// TestNodeGone: a node whose object was deleted takes its deleted volumes along, after the
// grace period; what nobody deleted stays.
func TestNodeGone(t *testing.T) {
	p := start(t)
	kept, deleted := p.made(request("kept", miB, "node-b")), p.made(request("deleted", miB, "node-b"))
	p.agents["node-b"].Kill()
	p.node("node-b", false)
	p.eventually("the deletion waits", func() bool {
		return status.Code(remove(p.controller, deleted.GetVolumeId())(t.Context())) == codes.Unavailable
	})
	time.Sleep(2 * grace)
	p.once(codes.Unavailable, remove(p.controller, deleted.GetVolumeId())) // without a signal, nothing is given up
	check.OK(t, p.kube.Delete(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-b"}}))
	began := time.Now()
	p.called(codes.OK, remove(p.controller, deleted.GetVolumeId()))
	if took := time.Since(began); took < grace/2 {
		t.Errorf("given up after %s", took)
	}
	var volumes v1alpha1.VolumeList
	check.OK(t, p.kube.List(t.Context(), &volumes))
	if len(volumes.Items) != 1 || volumes.Items[0].Spec.Name != "kept" || volumes.Items[0].Deleting() {
		t.Errorf("left are %+v", volumes.Items)
	}
	p.eventually("its pool is forgotten", func() bool {
		var pools v1alpha1.PoolList
		check.OK(t, p.kube.List(t.Context(), &pools))
		return len(pools.Items) == 1
	})
	p.called(codes.OK, remove(p.controller, kept.GetVolumeId())) // the node was gone for long enough
}

// TestRaces: two controllers that are asked at the same time make one volume of a name, let
// one claim through, and never both delete and claim.
func TestRaces(t *testing.T) {
	p := start(t)
	both := []*process.Driver{p.controller, p.newController("other")}
	as := []*csi.VolumeCapability{writer, co.Capability(co.Block, csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER)}
	ids := map[string]string{}
	for i := range 20 {
		name := fmt.Sprint("v", i)
		var made [2]string
		race(p, func(j int) error {
			return co.Again(t.Context(), func() error {
				r, err := both[j].CreateVolume(t.Context(), request(name, miB))
				made[j] = r.GetVolume().GetVolumeId()
				return err
			})
		}, codes.OK, codes.OK)
		if made[0] != made[1] {
			t.Fatalf("two volumes %v of one name", made)
		}
		ids[name] = made[0]
		race(p, func(j int) error { return publish(both[j], made[0], "node-a", as[j])(t.Context()) }, codes.OK, codes.AlreadyExists)
		p.once(codes.FailedPrecondition, publish(both[0], made[0], "node-b", writer))
		p.called(codes.OK, unpublish(both[1], made[0]))
		if i%2 == 0 {
			continue
		}
		codes := race(p, func(j int) error {
			if j == 0 {
				return co.Again(t.Context(), func() error { return remove(both[0], made[0])(t.Context()) })
			}
			return publish(both[1], made[0], "node-a", writer)(t.Context())
		})
		t.Logf("delete %s, publish %s", codes[0], codes[1])
		if deleted, claimed := codes[0] == 0, codes[1] == 0; deleted == claimed {
			t.Fatalf("delete: %s, publish: %s", codes[0], codes[1])
		} else if deleted {
			delete(ids, name)
		}
	}
	p.agree(ids)
}

// race does two things at once. The codes are those that they have to end with, in any order.
func race(p *parts, do func(int) error, want ...codes.Code) [2]codes.Code {
	p.Helper()
	var got [2]codes.Code
	var all sync.WaitGroup
	for j := range got {
		all.Go(func() { got[j] = status.Code(do(j)) })
	}
	all.Wait()
	if len(want) > 0 && !slices.Equal(slices.Sorted(slices.Values(got[:])), slices.Sorted(slices.Values(want))) {
		p.Fatalf("%v, want %v", got, want)
	}
	return got
}

// TestKilled: controllers and agents are killed, again and again, while 100 volumes are
// made, claimed, and half of them deleted, by callers who ask again as the sidecars do. At
// the end claims, objects and images agree; and then all go.
func TestKilled(t *testing.T) {
	p := start(t)
	ctx, cancel := context.WithTimeout(t.Context(), 12*time.Minute)
	defer cancel()
	killing, stop := context.WithCancel(ctx)
	seed := uint64(time.Now().UnixNano())
	t.Logf("the pauses have the seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	kills := 0
	var killer sync.WaitGroup
	killer.Go(func() {
		victims := []*process.Driver{p.controller, p.agents["node-a"], p.controller, p.agents["node-b"]}
		for ; killing.Err() == nil; kills++ {
			victim := victims[kills%len(victims)]
			time.Sleep(time.Duration(random.IntN(150)) * time.Millisecond)
			victim.Kill()
			time.Sleep(time.Duration(random.IntN(50)) * time.Millisecond)
			if err := victim.Start(); err != nil {
				t.Error(err)
				return
			}
			p.ready(victim)
		}
	})
	var mu sync.Mutex
	ids := map[string]string{}
	var all sync.WaitGroup
	for i := range 100 {
		all.Go(func() {
			node := nodes[i%2]
			r := request(fmt.Sprint("claim-", i), miB, node)
			if err := func() error {
				var v *csi.Volume
				if err := co.Again(ctx, func() error {
					response, err := p.controller.CreateVolume(ctx, r)
					v = response.GetVolume()
					return err
				}); err != nil {
					return err
				}
				for _, step := range []func(context.Context) error{publish(p.controller, v.GetVolumeId(), node, writer), unpublish(p.controller, v.GetVolumeId())} {
					if err := co.Again(ctx, func() error { return step(ctx) }); err != nil {
						return err
					}
				}
				if i < 50 {
					return co.Again(ctx, func() error { return remove(p.controller, v.GetVolumeId())(ctx) })
				}
				mu.Lock()
				defer mu.Unlock()
				ids[r.GetName()] = v.GetVolumeId()
				return nil
			}(); err != nil {
				t.Errorf("%s: %v", r.GetName(), err)
			}
		})
	}
	all.Wait()
	stop()
	killer.Wait()
	t.Logf("%d kills", kills)
	if kills < 4 {
		t.Errorf("only %d kills", kills)
	}
	p.agree(ids)
	for id := range maps.Values(ids) {
		p.called(codes.OK, remove(p.controller, id))
	}
	p.agree(nil)
}
