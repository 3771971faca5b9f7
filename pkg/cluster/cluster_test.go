package cluster_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lazy"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/remotepool/remotetest"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/agent"
	"github.com/ashlar-csi/ashlar/pkg/cluster/port"
	"github.com/ashlar-csi/ashlar/pkg/cluster/store"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/volume"
	"github.com/ashlar-csi/ashlar/pkg/volume/storetest"
)

func TestMain(m *testing.M) { apitest.Main(m) }

const (
	nodeName = "node-1"
	mib      = 1 << 20
	grace    = 500 * time.Millisecond
	// abandonGrace is the grace of the stores that look for abandoned volumes (sweeping). All others have a long one, as a machine may be slow.
	abandonGrace = 4 * time.Second
)

func fails(t testing.TB, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("error %v, want %v", err, want)
	}
}

func second[T any](_ T, err error) error { return err }

// environment is a cluster: an API server, nodes, agents and stores. All of it is removed at the end of the test.
type environment struct {
	testing.TB
	client.Client
	ctx    context.Context
	agents *port.Callers // how stores call agents; nil: they call none
	follow time.Duration // store.Options.FollowAfter
}

// testTimeout ends a test that waits for something that never comes, so that the others can run.
const testTimeout = 10 * time.Minute

func newEnvironment(t testing.TB) *environment {
	t.Helper()
	server := apitest.Get(t)
	scheme := runtime.NewScheme()
	check.OK(t, errors.Join(v1alpha1.AddToScheme(scheme), corev1.AddToScheme(scheme), coordinationv1.AddToScheme(scheme), rbacv1.AddToScheme(scheme), storagev1.AddToScheme(scheme)))
	c, err := client.New(server.Config(apitest.Admin), client.Options{Scheme: scheme})
	check.OK(t, err)
	ctx, cancel := context.WithTimeout(klog.NewContext(context.Background(), ktesting.NewLogger(t, ktesting.NewConfig())), testTimeout)
	t.Cleanup(cancel)
	w := &environment{TB: t, Client: c, ctx: ctx}
	t.Cleanup(w.clear)
	for user, rules := range roles {
		role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: user}, Rules: rules}
		binding := &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: user},
			RoleRef: rbacv1.RoleRef{APIGroup: "rbac.authorization.k8s.io", Kind: "ClusterRole", Name: user}, Subjects: []rbacv1.Subject{{Kind: "User", Name: user}}}
		for _, o := range []client.Object{role, binding} {
			check.OK(t, client.IgnoreAlreadyExists(w.Create(ctx, o)))
		}
	}
	return w
}

// roles are the rights that the controller needs according to docs/cluster.md; it has no others here. Agents have the rights of
// deploy/kubernetes/rbac-node.yaml (apitest).
var roles = map[string][]rbacv1.PolicyRule{
	"controller": {
		{APIGroups: []string{"ashlar.dev"}, Resources: []string{"volumes", "snapshots", "replicatedvolumes"}, Verbs: []string{"get", "list", "watch", "create", "patch", "delete"}},
		{APIGroups: []string{"ashlar.dev"}, Resources: []string{"replicatedvolumes/status"}, Verbs: []string{"patch"}},
		{APIGroups: []string{"ashlar.dev"}, Resources: []string{"pools"}, Verbs: []string{"get", "list", "watch", "delete"}},
		{APIGroups: []string{""}, Resources: []string{"nodes"}, Verbs: []string{"get", "list", "watch"}},
		{APIGroups: []string{""}, Resources: []string{"nodes"}, Verbs: []string{"patch"}},                // with StartupTaint
		{APIGroups: []string{"storage.k8s.io"}, Resources: []string{"csinodes"}, Verbs: []string{"get"}}, // with StartupTaint
		{APIGroups: []string{""}, Resources: []string{"persistentvolumes"}, Verbs: []string{"get", "list"}},
		{APIGroups: []string{""}, Resources: []string{"persistentvolumeclaims"}, Verbs: []string{"get"}},
		{APIGroups: []string{"storage.k8s.io"}, Resources: []string{"volumeattachments"}, Verbs: []string{"list"}},
		{APIGroups: []string{"storage.k8s.io"}, Resources: []string{"storageclasses"}, Verbs: []string{"get"}},
		{APIGroups: []string{"coordination.k8s.io"}, Resources: []string{"leases"}, Verbs: []string{"get", "list", "watch"}},
		{APIGroups: []string{"events.k8s.io"}, Resources: []string{"events"}, Verbs: []string{"create", "patch"}},
	},
}

// clear removes all objects.
func (w *environment) clear() {
	var volumes v1alpha1.VolumeList
	var snapshots v1alpha1.SnapshotList
	check.OK(w, w.List(w.ctx, &volumes))
	check.OK(w, w.List(w.ctx, &snapshots))
	var persistentVolumes corev1.PersistentVolumeList // the API server gives each a finalizer, and the claims too
	var claims corev1.PersistentVolumeClaimList
	check.OK(w, w.List(w.ctx, &persistentVolumes))
	check.OK(w, w.List(w.ctx, &claims, client.InNamespace("default")))
	var objects []client.Object
	for i := range persistentVolumes.Items {
		objects = append(objects, &persistentVolumes.Items[i])
	}
	for i := range claims.Items {
		objects = append(objects, &claims.Items[i])
	}
	for i := range volumes.Items {
		objects = append(objects, &volumes.Items[i])
	}
	for i := range snapshots.Items {
		objects = append(objects, &snapshots.Items[i])
	}
	for _, o := range objects {
		before := o.DeepCopyObject().(client.Object)
		o.SetFinalizers(nil)
		check.OK(w, client.IgnoreNotFound(w.Patch(w.ctx, o, client.MergeFrom(before))))
		check.OK(w, client.IgnoreNotFound(w.Delete(w.ctx, o)))
	}
	check.OK(w, w.DeleteAllOf(w.ctx, &v1alpha1.ReplicatedVolume{}))
	check.OK(w, w.DeleteAllOf(w.ctx, &v1alpha1.Pool{}))
	check.OK(w, w.DeleteAllOf(w.ctx, &corev1.Node{}))
	check.OK(w, w.DeleteAllOf(w.ctx, &coordinationv1.Lease{}, client.InNamespace(leases)))
	check.OK(w, w.DeleteAllOf(w.ctx, &corev1.Event{}, client.InNamespace("default")))
}

// node creates a Node, or changes whether it is ready.
func (w *environment) node(name string, ready bool) {
	w.Helper()
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	check.OK(w, client.IgnoreAlreadyExists(w.Create(w.ctx, n)))
	check.OK(w, w.Get(w.ctx, client.ObjectKeyFromObject(n), n))
	status := corev1.ConditionFalse
	if ready {
		status = corev1.ConditionTrue
	}
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: status}}
	check.OK(w, w.Status().Update(w.ctx, n))
}

// eventually waits until is returns true. It gives up after two minutes: a watch that found no API server for some time tries again after half a minute at
// most.
func (w *environment) eventually(what string, is func() bool) {
	w.Helper()
	for end := time.Now().Add(2 * time.Minute); !is(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			w.Fatalf("never: %s", what)
		}
	}
}

// comes waits until a channel is closed or has something.
func (w *environment) comes(c <-chan struct{}, what string) {
	w.Helper()
	select {
	case <-c:
	case <-w.ctx.Done():
		w.Fatalf("never: %s", what)
	}
}

// held blocks a hook until the test lets it go on, or has ended: parts that are stopped at the end wait for their hooks.
func held[T any](t testing.TB, let <-chan T) {
	select {
	case <-let:
	case <-t.Context().Done():
	}
}

// store starts a store, as the controller does; stop kills it. Nothing counts as abandoned for it during a test.
func (w *environment) store() (_ *store.Store, stop func()) {
	w.Helper()
	return w.storeWith(time.Hour)
}

// sweeping starts a store that looks for abandoned volumes. It judges by the time at which an object was created, so what is to stay has to be set up by
// another store first.
func (w *environment) sweeping() (_ *store.Store, stop func()) {
	w.Helper()
	return w.storeWith(abandonGrace)
}

func (w *environment) storeWith(abandonGrace time.Duration) (_ *store.Store, stop func()) {
	w.Helper()
	s, err := store.New(wrapped(apitest.Get(w).Config("controller")), store.Options{GoneGrace: grace, AbandonGrace: abandonGrace, Driver: cluster.DefaultDriver, Agents: w.agents, FollowAfter: w.follow})
	check.OK(w, err)
	stop = w.run(s.Run)
	w.eventually("the store is ready", func() bool { return s.Ready(w.ctx) == nil })
	return s, stop
}

func (w *environment) run(part func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(w.ctx)) // without its deadline
	var done sync.WaitGroup
	done.Go(func() {
		if err := part(ctx); err != nil && ctx.Err() == nil {
			w.Error(err)
		}
	})
	stop = sync.OnceFunc(func() { cancel(); done.Wait() })
	w.Cleanup(stop)
	return stop
}

// machine is a node with its disks, which outlive its agent.
type machine struct {
	name    string
	disks   []*memory.Disk
	hook    memory.Hook
	locks   *keylock.Table
	every   time.Duration                    // the heartbeat of its agent; 0: none
	driver  string                           // the driver of its agent; empty: the usual one
	without string                           // the name of a pool that is not there, in place of the second one; empty: none
	schemes []volume.Scheme                  // the schemes by which it can encrypt
	limits  func() bool                      // agent.Options.Limits
	ported  bool                             // its agent has a port
	wrap    func(*memory.Pool) blockdev.Pool // wraps its default pool; may be nil
	via     func(address string) string      // the address at which others reach its port; nil: its own
	with    func(*agent.Options)             // further options of its agent; may be nil
	mirrors bool                             // it can use volumes with replicas
	network *remotetest.Network              // the network in which it exports volumes, and uses those of others; nil: none
	resized func() error                     // volume.Exporter.Resized of what it exports; may be nil

	local *volume.Local
	agent *agent.Agent
	port  *port.Listener
	uses  *uses // with a network
	stop  func()
}

// machine creates a node with two pools of storetest.Size, and starts its agent.
func (w *environment) machine(name string) *machine {
	w.Helper()
	return w.machineWith(name, nil)
}

func (w *environment) machineWith(name string, hook memory.Hook) *machine {
	w.Helper()
	return w.begin(&machine{name: name, hook: hook})
}

func (w *environment) begin(m *machine) *machine {
	w.Helper()
	name := m.name
	w.node(name, true)
	m.disks, m.locks = []*memory.Disk{memory.NewDisk(storetest.Size), memory.NewDisk(storetest.Size)}, &keylock.Table{}
	for _, disk := range m.disks { // a device that is exported outlives the agent
		pool := disk.Open(name, nil)
		w.Cleanup(func() { check.OK(w, pool.DetachAll(context.Background())) })
	}
	w.start(m)
	w.eventually("the pools of "+name+" are there", func() bool {
		var p v1alpha1.Pool
		return w.Get(w.ctx, client.ObjectKey{Name: overview.PoolName(name, "b")}, &p) == nil && p.Status.Measured != nil
	})
	return m
}

// wrapped changes the connection of agents and stores to the API server, so that a test can see their requests, and cut them off.
var wrapped = func(c *rest.Config) *rest.Config { return c }

// wrap changes the connection of the agents and stores that are started until the end of a test.
func wrap(t *testing.T, change func(*rest.Config)) {
	before := wrapped
	wrapped = func(c *rest.Config) *rest.Config { change(c); return c }
	t.Cleanup(func() { wrapped = before })
}

// start starts the agent of a machine, for the first time or again.
func (w *environment) start(m *machine) {
	w.Helper()
	m.stop = w.run(w.agent(m).Run)
	if m.ported {
		agent, served := m.stop, w.run(w.served(m))
		m.stop = func() { served(); agent() }
	}
}

// agent makes a new agent of a machine.
func (w *environment) agent(m *machine) *agent.Agent {
	w.Helper()
	mounts, err := mount.LoadTable()
	check.OK(w, err)
	asked := m.hook // a later change of m.hook is for the next agent
	hook := func(operation string, ref blockdev.Ref) error {
		apitest.Pause()
		if asked == nil {
			return nil
		}
		return asked(operation, ref)
	}
	pools := []blockdev.Pool{m.disks[0].Open("default", hook), m.disks[1].Open("b", hook)}
	if m.without != "" {
		pools[1] = lazy.New(m.without, errors.New("no disk"), func(context.Context) (blockdev.Pool, error) { return nil, errors.New("no disk") })
	}
	if m.wrap != nil {
		pools[0] = m.wrap(m.disks[0].Open("default", hook))
	}
	m.local, err = volume.NewLocal(w.ctx, m.name, pools, mounts, 0)
	check.OK(w, err)
	o := agent.Options{Driver: cmp.Or(m.driver, cluster.DefaultDriver), Pools: []agent.Pool{{Pool: pools[0], Kind: "memory"}, {Pool: pools[1], Kind: "memory"}},
		Locks: m.locks, MaxVolumes: storetest.Limit, ProgressEvery: 50 * time.Millisecond,
		Schemes: func() []volume.Scheme { return m.schemes }, Limits: m.limits}
	if m.every > 0 {
		o.Namespace, o.Heartbeat = leases, m.every
	}
	if m.ported {
		m.port, err = port.Listen("127.0.0.1:0")
		check.OK(w, err)
		if o.Endpoint = m.port.Endpoint(); m.via != nil {
			o.Endpoint.Address = m.via(o.Endpoint.Address)
		}
		calls, err := port.NewCallers(wrapped(apitest.Get(w).Agent(w, m.name)))
		check.OK(w, err)
		w.Cleanup(func() { check.OK(w, calls.Close()) })
		o.Agents = calls
	}
	if m.with != nil {
		m.with(&o)
	}
	if m.network != nil {
		o.Exporter, o.Network = m.local, &v1alpha1.Network{Name: "default", Address: "10.0.0.1:4420"}
	}
	m.agent, err = agent.New(wrapped(apitest.Get(w).Agent(w, m.name)), m.local, o)
	check.OK(w, err)
	if m.network != nil {
		w.use(m, mounts)
	}
	if m.mirrors {
		m.agent.UseReplicated(m.local)
	}
	return m.agent
}

// pooled waits until a store knows the pools of a machine.
func (w *environment) pooled(s *store.Store, m *machine) {
	w.Helper()
	w.eventually("the store knows the pools", func() bool {
		c, err := s.Capacity(w.ctx, "b", volume.NotEncrypted, m.name)
		return err == nil && c.Total > 0
	})
}

// newCluster returns an environment with one node, and a store that knows its pools.
func newCluster(t testing.TB) (*environment, *machine, *store.Store) {
	t.Helper()
	w := newEnvironment(t)
	m := w.machine(nodeName)
	return w, m, w.knowing(m)
}

func spec(name string) volume.Spec {
	return volume.Spec{Name: name, Size: volume.Range{Required: mib}}
}

// soon returns a context that ends after a second: before a node that is down would be back.
func soon(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	t.Cleanup(cancel)
	return ctx
}

// asked makes a call that is not answered, and ends it once is returns true; the answer then is ErrUnavailable.
func (w *environment) asked(what string, call func(context.Context) error, is func() bool) {
	w.Helper()
	ctx, cancel := context.WithCancel(w.ctx)
	defer cancel()
	answer := make(chan error, 1)
	go func() { answer <- call(ctx) }()
	w.eventually(what, is)
	cancel()
	fails(w, <-answer, errdefs.ErrUnavailable)
}

// waits repeats a call that fails with ErrUnavailable, until the error says what it waits for.
func (w *environment) waits(call func() error, says string) {
	w.Helper()
	w.eventually("it waits, and says "+says, func() bool {
		err := call()
		fails(w, err, errdefs.ErrUnavailable)
		return strings.Contains(err.Error(), says)
	})
}

// written repeats a write of an object until there is no conflict, and returns its error.
func (w *environment) written(write func() error) (err error) {
	w.Helper()
	w.eventually("it is written", func() bool {
		err = write()
		return !apierrors.IsConflict(err)
	})
	return err
}

// places waits until a store returns these places (Places).
func (w *environment) places(s *store.Store, label string, want map[string]string) {
	w.Helper()
	w.eventually(fmt.Sprint("the store knows the places ", want), func() bool {
		have, err := s.Places(w.ctx, label)
		return err == nil && maps.Equal(have, want)
	})
}

// zones gives nodes the label zone, and waits until a store knows that.
func (w *environment) zones(s *store.Store, of map[string]string) {
	w.Helper()
	for name, zone := range of {
		node := &corev1.Node{}
		check.OK(w, w.Get(w.ctx, client.ObjectKey{Name: name}, node))
		metav1.SetMetaDataLabel(&node.ObjectMeta, "zone", zone)
		check.OK(w, w.Update(w.ctx, node))
	}
	w.places(s, "zone", of)
}

// TestStore: a store and an agent together keep the contract of volume.Store.
func TestStore(t *testing.T) {
	storetest.Run(t, func(t testing.TB) storetest.Fixture {
		w, m, s := newPortedCluster(t)
		t.Cleanup(func() { w.tally(m) })
		return storetest.Fixture{Store: s, Node: nodeName, Pools: []string{"default", "b"}, KnowsAll: true, Write: storetest.WriteTo(m.disks[0].Open("default", nil))}
	})
}

// tally shows that the objects of a node are those of the volumes and snapshots on its disks.
func (w *environment) tally(m *machine) {
	w.Helper()
	if w.Failed() {
		return
	}
	var keys, records []string
	var volumes v1alpha1.VolumeList
	var snapshots v1alpha1.SnapshotList
	check.OK(w, errors.Join(w.List(w.ctx, &volumes), w.List(w.ctx, &snapshots)))
	for _, v := range volumes.Items {
		if v.Spec.NodeName == m.name {
			keys = append(keys, v.ID()+" in "+v.Spec.Pool)
		}
	}
	for _, s := range snapshots.Items {
		if s.Spec.NodeName == m.name {
			keys = append(keys, s.ID())
		}
	}
	for _, pool := range []string{"default", "b"} { // a volume that has moved to one pool may have left something in the other
		vs, err := m.local.InPool(w.ctx, pool)
		check.OK(w, err)
		for _, v := range vs {
			records = append(records, v.ID.String()+" in "+v.Pool)
		}
	}
	ss, err := m.local.ListSnapshots(w.ctx, volume.ID{}, volume.ID{}, 0)
	check.OK(w, err)
	for _, s := range ss {
		records = append(records, s.ID.String())
	}
	slices.Sort(keys)
	slices.Sort(records)
	if !slices.Equal(keys, records) {
		w.Errorf("objects %v\nvolumes and snapshots %v", keys, records)
	}
}
