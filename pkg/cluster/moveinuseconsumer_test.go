package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/remotepool"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/remotepool/remotetest"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/agent"
	"github.com/ashlar-csi/ashlar/pkg/cluster/export"
	"github.com/ashlar-csi/ashlar/pkg/cluster/move"
	"github.com/ashlar-csi/ashlar/pkg/cluster/view"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/metrics/metricstest"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// consumerVolume is a volume of the node "old" that the node "user" uses. It stands for what the kernel of that node and both homes have of the volume.
type consumerVolume struct {
	*environment
	name  string
	id    volume.ID
	moves func(part string) bool // reports whether the message about its move in its object ever had some text

	mu    sync.Mutex
	seat  bool
	bare  bool                 // it has devices without a seat
	told  *v1alpha1.MoveStatus // status.move when Describe was called
	m     *volume.Mirrored
	legs  []remotepool.Leg
	said  []string       // the steps that were tried
	fails map[string]int // how often a step still fails
}

// consumerVolumes are all such volumes. They stand for agent.MoveMirrors, agent.MoveConnections, move.Old, move.New and export.Home.
type consumerVolumes struct {
	mu      sync.Mutex
	all     map[string]*consumerVolume
	percent int      // the last one of Throttle
	user    *machine // the node "user"
	cannot  error    // of CanMirror
}

func (c *consumerVolumes) of(key string) *consumerVolume {
	c.mu.Lock()
	defer c.mu.Unlock()
	if v := c.all[key]; v != nil {
		return v
	}
	return &consumerVolume{}
}

// do notes a step, and calls work, unless the step is to fail.
func (v *consumerVolume) do(step string, work func()) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.said = append(v.said, step)
	if v.fails[step] > 0 {
		v.fails[step]--
		return fmt.Errorf("%w: %s fails", errdefs.ErrUnavailable, step)
	}
	work()
	return nil
}

const (
	movingSize = 64 * mib
	firstLeg   = 1
	secondLeg  = 2
	newHomeNQN = "nqn.2026-11.dev.ashlar:second"
)

func (c *consumerVolumes) Attached(_ context.Context, id volume.ID) ([]blockdev.Device, error) {
	v := c.of(id.Key)
	v.mu.Lock()
	defer v.mu.Unlock()
	if !v.bare {
		return nil, nil
	}
	v.seat = v.name == "is staged meanwhile"
	return []blockdev.Device{{Number: firstLeg, Size: movingSize}}, nil
}

func (c *consumerVolumes) Seats(_ context.Context, id volume.ID) (home, away bool, err error) {
	v := c.of(id.Key)
	v.mu.Lock()
	defer v.mu.Unlock()
	return false, v.seat, nil
}

func (c *consumerVolumes) Grow(_ context.Context, id volume.ID, _ volume.Key) (volume.Volume, error) {
	return volume.Volume{}, c.of(id.Key).do("grow", func() {})
}

func (c *consumerVolumes) Mirrors(context.Context) (ids []volume.ID, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, v := range c.all {
		v.mu.Lock()
		if v.m != nil {
			ids = append(ids, v.id)
		}
		v.mu.Unlock()
	}
	return ids, nil
}

func (c *consumerVolumes) Mirrored(_ context.Context, id volume.ID) (volume.Mirrored, bool, error) {
	v := c.of(id.Key)
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.m == nil {
		return volume.Mirrored{}, false, nil
	}
	return *v.m, true, nil
}

func (c *consumerVolumes) CanMirror() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.cannot
}

func (c *consumerVolumes) Mirror(ctx context.Context, id volume.ID, to blockdev.Device, data func(context.Context) ([]blockdev.Extent, error)) error {
	if _, err := data(ctx); err != nil {
		return err
	}
	v := c.of(id.Key)
	if v.name == "does not fit" {
		return fmt.Errorf("%w: %w: other sectors", errdefs.ErrPrecondition, volume.ErrUnfit)
	}
	return v.do("mirror", func() {
		v.m = &volume.Mirrored{Old: firstLeg, New: to.Number, Synced: mib, Total: movingSize}
		for i := range v.legs {
			v.legs[i].Used = true
		}
	})
}

func (c *consumerVolumes) FlushMirror(_ context.Context, id volume.ID) error {
	v := c.of(id.Key)
	err := v.do("flush", func() {})
	for v.silent() {
		time.Sleep(time.Millisecond)
		if v.has("end " + newHomeNQN) {
			err = fmt.Errorf("%w: the connection has ended", errdefs.ErrUnavailable)
			break
		}
	}
	if err != nil {
		v.mu.Lock()
		defer v.mu.Unlock()
		v.m.NewFailed = true
	}
	return err
}

// silent reports whether the connection to the new home is there, and not live.
func (v *consumerVolume) silent() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return slices.ContainsFunc(v.legs, func(l remotepool.Leg) bool { return l.Number == secondLeg && !l.Live })
}

func (c *consumerVolumes) HoldMirror(_ context.Context, id volume.ID) error {
	v := c.of(id.Key)
	return v.do("hold", func() {
		v.m.Held = true
		v.m.NewFailed = v.name == "new leg fails as it is held" && !slices.Contains(v.said, "unmirror")
	})
}

func (c *consumerVolumes) ReleaseMirror(_ context.Context, id volume.ID) error {
	v := c.of(id.Key)
	return v.do("release", func() { v.m.Held = false })
}

// over ends the mirror: one leg is then below the devices.
func (v *consumerVolume) over(number uint64) {
	v.m = nil
	for i := range v.legs {
		v.legs[i].Used = v.legs[i].Number == number
	}
}

func (c *consumerVolumes) Unmirror(_ context.Context, id volume.ID) error {
	v := c.of(id.Key)
	back := false
	err := v.do("unmirror", func() {
		if back = v.name == "forgot, old home lacks it" && !v.m.Back || v.m.Back && v.m.Synced < v.m.Total; back {
			v.m.Back, v.m.Forgot = true, false
			if v.m.Synced == v.m.Total {
				v.m.Synced = 0
			}
			return
		}
		v.over(firstLeg)
	})
	if err == nil && back {
		err = errdefs.ErrBusy
	}
	return err
}

func (c *consumerVolumes) Switch(_ context.Context, id volume.ID, _ bool) error {
	v := c.of(id.Key)
	return v.do("switch", func() { v.over(secondLeg) })
}

func (c *consumerVolumes) AttachLeg(context.Context, volume.ID) (blockdev.Device, error) {
	return blockdev.Device{}, errdefs.ErrUnsupported
}
func (c *consumerVolumes) DetachLeg(context.Context, volume.ID) error { return errdefs.ErrUnsupported }

func (c *consumerVolumes) Throttle(percent int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.percent = percent
	return nil
}

func (c *consumerVolumes) Legs(ref blockdev.Ref) ([]remotepool.Leg, error) {
	v := c.of(ref.Key)
	v.mu.Lock()
	defer v.mu.Unlock()
	return slices.Clone(v.legs), nil
}

func (c *consumerVolumes) Connected() (refs []blockdev.Ref, err error) { return nil, nil }

func (c *consumerVolumes) Second(_ context.Context, ref blockdev.Ref, e remotepool.Export) (blockdev.Device, error) {
	v := c.of(ref.Key)
	leg := remotepool.Leg{Device: blockdev.Device{Number: secondLeg, Size: e.Size}, NQN: e.NQN, Generation: 2, Live: true}
	err := v.do("second", func() {
		v.legs = append(slices.DeleteFunc(v.legs, func(l remotepool.Leg) bool { return l.Number == secondLeg }), leg)
	})
	return leg.Device, err
}

func (c *consumerVolumes) Take(nqn, home string) {
	v := c.of(keyOfNQN(nqn))
	_ = v.do("take "+home, func() {})
}

// keyOfNQN returns the key of the volume that the NQN of a leg has at its end.
func keyOfNQN(nqn string) string { return nqn[strings.LastIndexByte(nqn, ':')+1:] }

func (c *consumerVolumes) Drop(_ context.Context, nqn string) error {
	v := c.of(keyOfNQN(nqn))
	return v.do("drop "+nqn[:strings.LastIndexByte(nqn, ':')], func() { v.legs = slices.DeleteFunc(v.legs, func(l remotepool.Leg) bool { return l.NQN == nqn }) })
}

func (c *consumerVolumes) End(_ context.Context, nqn string) error {
	v := c.of(keyOfNQN(nqn))
	return v.do("end "+nqn[:strings.LastIndexByte(nqn, ':')], func() { v.legs = slices.DeleteFunc(v.legs, func(l remotepool.Leg) bool { return l.NQN == nqn }) })
}

// fakeHomes stands for both homes.
type fakeHomes struct{ *consumerVolumes }

func (h fakeHomes) Describe(_ context.Context, of move.Of) (volume.Origin, error) {
	o := volume.Origin{ID: of.ID, Created: time.Now(), Size: movingSize, Sector: 512, Labels: map[string]string{}}
	v := h.of(of.ID.Key)
	now := v.object(v.name).Status.Move
	return o, v.do("describe", func() { v.told = now })
}

func (h fakeHomes) Ranges(_ context.Context, of move.Of) ([]blockdev.Extent, error) {
	return nil, h.of(of.ID.Key).do("ranges", func() {})
}

func (h fakeHomes) Seal(_ context.Context, of move.Of) (volume.Origin, error) {
	o := volume.Origin{ID: of.ID, Created: time.Unix(1, 0), Size: movingSize, Sector: 512, Labels: map[string]string{}}
	return o, h.of(of.ID.Key).do("seal", func() {})
}

func (h fakeHomes) Sealed(context.Context, volume.ID) (time.Time, error) {
	return time.Time{}, errdefs.ErrUnsupported
}

func (h fakeHomes) Arrived(context.Context, volume.ID) error { return errdefs.ErrUnsupported }

func (h fakeHomes) Took(context.Context, volume.ID, time.Time) (bool, error) {
	return false, errdefs.ErrUnsupported
}

func (h fakeHomes) Prepare(_ context.Context, of move.Of, _ volume.Origin) (export.Opened, error) {
	if v := h.of(of.ID.Key); v.name == "room takes long" && v.count("prepare") < 4 {
		return export.Opened{}, errors.Join(v.do("prepare", func() {}), fmt.Errorf("%w: it makes room", errdefs.ErrBusy))
	}
	return export.Opened{Address: netip.MustParseAddrPort("10.0.0.1:4420"), NQN: newHomeNQN + ":" + of.ID.Key, Host: "host", Size: movingSize},
		h.of(of.ID.Key).do("prepare", func() {})
}

func (h fakeHomes) Complete(_ context.Context, of move.Of, nqn string, _ volume.Origin) error {
	if nqn != newHomeNQN+":"+of.ID.Key {
		return fmt.Errorf("%w: %q was not prepared", errdefs.ErrNotFound, nqn)
	}
	v := h.of(of.ID.Key)
	v.mu.Lock()
	lost := v.fails["complete, data lost"] > 0
	delete(v.fails, "complete, data lost")
	v.mu.Unlock()
	if lost {
		return fmt.Errorf("%w: it could not be flushed", errdefs.ErrDataLoss)
	}
	return v.do("complete", func() { v.m.Forgot = v.name == "forgets as it is pinned" && !slices.Contains(v.said, "unmirror") })
}

// fakeHome is fakeHomes with the Drop of move.New; that of consumerVolumes is for a leg.
type fakeHome struct{ fakeHomes }

func (h fakeHome) Drop(_ context.Context, of move.Of, _ string) error {
	return h.of(of.ID.Key).do("drop", func() {})
}

// Agent: see agent.Agents.
func (h fakeHome) Agent(string, v1alpha1.AgentEndpoint) (grpc.ClientConnInterface, error) {
	return fakeConnection, nil
}

var fakeConnection grpc.ClientConnInterface

// serve starts a server that answers for the homes.
func (h fakeHome) serve(t *testing.T) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	check.OK(t, err)
	server := grpc.NewServer()
	move.Register(server, h, h, nil)
	export.Register(server, fakeExports{h.consumerVolumes}, nil)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	connection, err := grpc.NewClient("passthrough:///"+listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	check.OK(t, err)
	t.Cleanup(func() { check.OK(t, connection.Close()) })
	fakeConnection = withKinds{connection}
}

// withKinds tells the kinds of the other side's errors by their words, as rpc.Dial does by their codes.
type withKinds struct{ grpc.ClientConnInterface }

func (c withKinds) Invoke(ctx context.Context, method string, args, reply any, options ...grpc.CallOption) error {
	err := c.ClientConnInterface.Invoke(ctx, method, args, reply, options...)
	for _, kind := range []error{errdefs.ErrBusy, errdefs.ErrDataLoss} {
		if err != nil && strings.Contains(err.Error(), kind.Error()) {
			err = fmt.Errorf("%w: %w", kind, err)
		}
	}
	return err
}

// fakeExports stands for the homes as an export.Home.
type fakeExports struct{ *consumerVolumes }

func (c fakeExports) Open(_ context.Context, id volume.ID, _ int64) (export.Opened, error) {
	o := export.Opened{Address: netip.MustParseAddrPort("10.0.0.1:4420"), NQN: newHomeNQN + ":" + id.Key, Host: "host", Size: movingSize}
	o.Record = blockdev.Record{Ref: blockdev.Ref{Kind: id.Kind, Key: id.Key}, Size: movingSize}
	v := c.of(id.Key)
	if v.object(v.name).Spec.NodeName == "old" {
		o.NQN = "nqn.2026-11.dev.ashlar:old:" + id.Key
	}
	return o, v.do("open", func() {})
}

func (fakeExports) Record(context.Context, volume.ID, int64) (blockdev.Record, error) {
	return blockdev.Record{}, errdefs.ErrUnsupported
}

func (fakeExports) SetLabels(context.Context, volume.ID, int64, map[string]string, map[string]string) (blockdev.Record, error) {
	return blockdev.Record{}, errdefs.ErrUnsupported
}

func (fakeExports) Marks(context.Context, volume.ID, int64, uint32) ([]blockdev.Extent, error) {
	return nil, errdefs.ErrUnsupported
}

func (fakeExports) BeginEra(context.Context, volume.ID, int64) (uint32, error) {
	return 0, errdefs.ErrUnsupported
}

func (c fakeExports) Close(_ context.Context, id volume.ID, generation int64, _ string) error {
	return c.of(id.Key).do(fmt.Sprint("close ", generation), func() {})
}

// carrying returns a cluster in which the agent of the node "user" moves the volumes that it uses. again stops that agent, calls meanwhile, and starts it.
func carrying(t *testing.T, with ...func(*agent.Options)) (w *environment, all *consumerVolumes, again func(meanwhile func())) {
	t.Helper()
	drivertest.NeedRoot(t)
	w, all = newEnvironment(t), &consumerVolumes{all: map[string]*consumerVolume{}}
	homes := fakeHome{fakeHomes{all}}
	homes.serve(t)
	for _, node := range []string{"old", "new"} {
		w.node(node, true)
		p := &v1alpha1.Pool{ObjectMeta: metav1.ObjectMeta{Name: overview.PoolName(node, "default")}, Spec: v1alpha1.PoolSpec{NodeName: node, Pool: "default"}}
		check.OK(t, w.Create(w.ctx, p))
		before := p.DeepCopy()
		p.Status.Agent = &v1alpha1.AgentEndpoint{Address: "127.0.0.1:1", Fingerprint: strings.Repeat("0", 64)}
		its, err := client.New(apitest.Get(t).Agent(t, node), client.Options{Scheme: w.Scheme()})
		check.OK(t, err)
		check.OK(t, its.Status().Patch(w.ctx, p, client.MergeFrom(before)))
	}
	m := w.begin(&machine{name: "user", network: &remotetest.Network{}, with: func(o *agent.Options) {
		o.Agents, o.LookEvery, o.MoveCopies = homes, 50*time.Millisecond, 100
		for _, change := range with {
			change(o)
		}
	}})
	all.user = m
	var stop func()
	carry := func() {
		ctx, cancel := context.WithCancel(w.ctx)
		var done sync.WaitGroup
		done.Go(func() { m.agent.MoveInUse(ctx, all, all) })
		stop = sync.OnceFunc(func() { cancel(); done.Wait() })
		t.Cleanup(stop)
	}
	carry()
	return w, all, func(meanwhile func()) {
		stop()
		m.stop()
		meanwhile()
		w.start(m)
		carry()
	}
}

// movingInUse makes a volume that the node "user" uses, and that is to move. Some names make it special.
func (w *environment) movingInUse(all *consumerVolumes, name string) *consumerVolume {
	w.Helper()
	o := cluster.VolumeNamed(volume.KeyOf(name))
	o.Spec = v1alpha1.VolumeSpec{NodeName: "old", Pool: "default", Name: name, Size: movingSize, Access: "any", Claims: 1,
		Claim: &v1alpha1.Claim{Node: "user", Mode: "m", Generation: 1}}
	check.OK(w, w.Create(w.ctx, o))
	o.Status.Created, o.Status.Size, o.Status.Export = new(metav1.NowMicro()), movingSize, &v1alpha1.Export{Generation: 1, Node: "user"}
	check.OK(w, w.Status().Update(w.ctx, o))
	v := &consumerVolume{environment: w, name: name, id: cluster.VolumeID(o), moves: w.moves(o), seat: true, fails: map[string]int{},
		legs: []remotepool.Leg{{Device: blockdev.Device{Number: firstLeg, Size: movingSize}, NQN: "first:" + o.Name, Generation: 1, Live: true, Used: true}}}
	all.mu.Lock()
	all.all[o.Name] = v
	all.mu.Unlock()
	if step, fails := strings.CutSuffix(name, " fails"); fails && !strings.HasSuffix(step, " leg") {
		v.fails[step] = 1
	}
	switch name {
	case "has no seat":
		v.seat, v.legs = false, nil
	case "was staged by an older driver", "is staged meanwhile":
		v.seat, v.bare = false, true
	}
	w.movesToPool(name, "new", map[string]string{"flipped to another pool": "b"}[name])
	return v
}

// says waits until is returns true. If that fails it logs the steps, and what the object says.
func (v *consumerVolume) says(what string, is func() bool) {
	v.Helper()
	defer func() {
		if v.Failed() {
			v.Logf("%s: done was %v, and the object says %+v", v.name, v.steps(), v.object(v.name).Status.Move)
		}
	}()
	v.eventually(v.name+": "+what, is)
}

// moves watches the object of a volume, and returns a function that reports whether the message about its move ever had some text, if only for a moment.
func (w *environment) moves(o *v1alpha1.Volume) (said func(part string) bool) {
	w.Helper()
	c, err := client.NewWithWatch(apitest.Get(w).Config(apitest.Admin), client.Options{Scheme: w.Scheme()})
	check.OK(w, err)
	watched, err := c.Watch(w.ctx, &v1alpha1.VolumeList{}, &client.ListOptions{FieldSelector: fields.OneTermEqualSelector("metadata.name", o.Name),
		Raw: &metav1.ListOptions{ResourceVersion: o.ResourceVersion}})
	check.OK(w, err)
	var mu sync.Mutex
	var all []string
	done := make(chan struct{})
	go func() {
		defer close(done)
		for event := range watched.ResultChan() {
			if v, is := event.Object.(*v1alpha1.Volume); is && v.Status.Move != nil {
				mu.Lock()
				all = append(all, v.Status.Move.Message)
				mu.Unlock()
			}
		}
	}()
	w.Cleanup(func() { watched.Stop(); <-done })
	return func(part string) bool {
		mu.Lock()
		defer mu.Unlock()
		return slices.ContainsFunc(all, func(said string) bool { return strings.Contains(said, part) })
	}
}

// movesays waits until the message about the move has had some text.
func (v *consumerVolume) movesays(part string) {
	v.Helper()
	v.says("it moves: "+part, func() bool { return v.moves(part) })
}

func (v *consumerVolume) steps() []string {
	v.mu.Lock()
	defer v.mu.Unlock()
	return slices.Clone(v.said)
}

// count returns how often a step was tried.
func (v *consumerVolume) count(step string) (n int) {
	for _, said := range v.steps() {
		if said == step {
			n++
		}
	}
	return n
}

// has reports whether a step was tried.
func (v *consumerVolume) has(step string) bool { return slices.Contains(v.steps(), step) }

// kernel waits until there is a mirror, and changes its state.
func (v *consumerVolume) kernel(change func(*volume.Mirrored)) {
	v.Helper()
	v.says("it is mirrored", func() bool {
		v.mu.Lock()
		defer v.mu.Unlock()
		if v.m == nil {
			return false
		}
		change(v.m)
		return true
	})
}

func synced(m *volume.Mirrored)    { m.Synced = m.Total }
func newFailed(m *volume.Mirrored) { m.NewFailed = true }
func oldFailed(m *volume.Mirrored) { m.OldFailed = true }
func forgot(m *volume.Mirrored)    { m.Synced, m.Forgot = m.Total, true }

func pinnedNow(v *consumerVolume) bool { return v.object(v.name).Status.Move.Copied != nil }

// pins waits until the object says that both homes have all bytes.
func (v *consumerVolume) pins() {
	v.Helper()
	v.says("all is copied", func() bool {
		s := v.object(v.name).Status.Move
		return s != nil && s.Copied != nil && s.Copied.Claim == 1
	})
}

// flips does what the controller does: it writes the new node into the object.
func (v *consumerVolume) flips() {
	v.Helper()
	o := v.object(v.name)
	if !cluster.MayMove(o) {
		v.Errorf("%s may not move: %+v", v.name, o.Status.Move)
	}
	before := o.DeepCopy()
	cluster.Flip(o)
	check.OK(v, v.Patch(v.ctx, o, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})))
}

// switches waits until the devices are over the leg of the new home alone.
func (v *consumerVolume) switches() {
	v.Helper()
	v.says("it is at its new home", func() bool {
		v.mu.Lock()
		defer v.mu.Unlock()
		return v.m == nil && len(v.legs) == 1 && v.legs[0].Number == secondLeg && v.legs[0].Used
	})
	if !v.has("take new") || v.has("unmirror") {
		v.Errorf("%s: %v", v.name, v.steps())
	}
}

// stays waits until the devices were over the leg of the old home alone, and shows that the volume was not said to be copied. Its copy may have begun
// again.
func (v *consumerVolume) stays() {
	v.Helper()
	v.says("it is at its old home", func() bool { return v.has("unmirror") && v.has("drop "+newHomeNQN) })
	if s := v.object(v.name).Status.Move; s != nil && s.Copied != nil || v.has("switch") {
		v.Errorf("%s: %v, %+v", v.name, v.steps(), s)
	}
}

// TestCarryShown: the progress of a move in use is in the overview, which the page and describe show, and in the metrics of the node that uses the volume.
func TestCarryShown(t *testing.T) {
	w, all, _ := carrying(t)
	v := w.movingInUse(all, "v")
	metric := func(name string) float64 {
		return metricstest.Of(t, all.user.agent.Samples).Values[name+`{node="user"}`]
	}
	shown := func(moving string, far *overview.Progress) {
		t.Helper()
		var now overview.Volume
		v.says(moving+" is shown", func() bool {
			o, err := view.Take(w.ctx, w.Client, view.Options{})
			check.OK(t, err)
			now = o.Volumes[0]
			return now.Moving == moving && (now.Progress == nil) == (far == nil) && (far == nil || *now.Progress == *far)
		})
		if t.Failed() {
			t.Errorf("shown is %q, %+v", now.Moving, now.Progress)
		}
	}
	v.kernel(func(*volume.Mirrored) {})
	shown("to node new: 1Mi of 64Mi are copied while node user uses the volume", &overview.Progress{Done: mib, Total: movingSize})
	v.kernel(func(m *volume.Mirrored) { m.Synced = 17 * mib })
	shown("to node new: 17Mi of 64Mi are copied while node user uses the volume", &overview.Progress{Done: 17 * mib, Total: movingSize})
	if mirrors, bytes := metric("ashlar_mirrors_in_progress"), metric("ashlar_mirrored_bytes_total"); mirrors != 1 || bytes != 16*mib {
		t.Errorf("%v volumes are being mirrored, %v bytes were", mirrors, bytes)
	}
	v.kernel(newFailed)
	v.says("it begins anew", func() bool {
		return metric("ashlar_mirrored_bytes_total") == 16*mib && v.has("unmirror") && metric("ashlar_mirrors_in_progress") == 1
	})
	v.kernel(synced)
	v.pins()
	shown("to node new: nodes old and new have all bytes", nil)
	if mirrors, bytes := metric("ashlar_mirrors_in_progress"), metric("ashlar_mirrored_bytes_total"); mirrors != 0 || bytes != (16+63)*mib {
		t.Errorf("%v volumes are being mirrored, %v bytes were", mirrors, bytes)
	}
	v.flips()
	v.says("it is at its new home", func() bool { return v.has("take new") })
	shown("from node old: nodes old and new have all bytes", nil)
}

// TestCarry: the node that uses a volume moves it, whichever step fails once; and what happens if a leg fails, the claim ends or the object changes on the
// way.
func TestCarry(t *testing.T) {
	w, all, _ := carrying(t)
	each := map[string]func(*consumerVolume){
		"whole": func(v *consumerVolume) {
			v.kernel(func(*volume.Mirrored) {})
			v.movesays("1Mi of 64Mi are copied while node user uses the volume")
			v.kernel(synced)
			v.pins()
			v.flips()
			v.switches()
			want := []string{"grow", "describe", "prepare", "second", "ranges", "mirror", "flush", "seal", "complete", "hold", "switch", "take new", "drop first", "close 1"}
			v.says(fmt.Sprintf("%v is done", want), func() bool { return slices.Equal(v.steps(), want) })
		},
		"the homes do not seal": func(v *consumerVolume) {
			for step, says := range map[string]string{"seal": "seal the volume on node old: ", "complete": "have node new complete what it has of the volume: "} {
				v.mu.Lock()
				v.fails[step] = 1 << 20
				v.mu.Unlock()
				v.kernel(synced)
				v.movesays(says)
				if s := v.object(v.name).Status.Move; !s.Waits {
					v.Errorf("it waits, and the object says %+v", s)
				}
				v.mu.Lock()
				v.fails[step] = 0
				v.mu.Unlock()
			}
			v.pins()
			v.movesays("nodes old and new have all bytes")
			if s := v.object(v.name).Status.Move; s.Waits || v.has("unmirror") {
				v.Errorf("%v, %+v", v.steps(), s)
			}
		},
		"new leg fails": func(v *consumerVolume) {
			v.kernel(newFailed)
			v.stays()
			v.movesays("what was written to node new failed")
			v.kernel(synced) // the next one
			v.pins()
		},
		"new home cannot be flushed": func(v *consumerVolume) {
			v.mu.Lock()
			v.fails["flush"] = 1
			v.mu.Unlock()
			v.kernel(synced)
			v.stays()
			v.movesays("what was written to node new failed")
			if v.has("seal") || v.has("hold") {
				v.Errorf("%v", v.steps())
			}
			v.kernel(synced) // the next one
			v.pins()
		},
		"new home does not keep what it has": func(v *consumerVolume) {
			v.mu.Lock()
			v.fails["complete, data lost"] = 1
			v.mu.Unlock()
			v.kernel(synced)
			v.stays()
			if v.has("hold") {
				v.Errorf("%v", v.steps())
			}
			v.kernel(synced) // the next one
			v.pins()
		},
		"new home falls silent as it is flushed": func(v *consumerVolume) {
			v.kernel(func(m *volume.Mirrored) {
				synced(m)
				for i := range v.legs {
					v.legs[i].Live = v.legs[i].Number != secondLeg
				}
			})
			v.says("it goes on at its old home", func() bool { return v.has("unmirror") })
			if steps := v.steps(); slices.Index(steps, "flush") < 0 || slices.Index(steps, "flush") > slices.Index(steps, "end "+newHomeNQN) || v.has("hold") {
				v.Errorf("%v", steps)
			}
		},
		"new home is away": func(v *consumerVolume) { // no I/O fails: writers wait
			v.kernel(func(*volume.Mirrored) {
				for i := range v.legs {
					v.legs[i].Live = v.legs[i].Number != secondLeg
				}
			})
			v.says("it goes on at its old home", func() bool { return v.has("unmirror") })
			if steps := v.steps(); slices.Index(steps, "end "+newHomeNQN) < 0 || slices.Index(steps, "end "+newHomeNQN) > slices.Index(steps, "unmirror") {
				v.Errorf("%v", steps)
			}
			v.movesays("is away")
		},
		"old leg fails": func(v *consumerVolume) {
			v.kernel(oldFailed)
			v.stays()
		},
		"new leg fails when pinned": func(v *consumerVolume) {
			v.kernel(synced)
			v.pins()
			v.kernel(newFailed)
			v.stays()
			if s := v.object(v.name).Status.Move; s.Undone == 0 {
				v.Errorf("%+v", s)
			}
		},
		"old leg fails when it has moved": func(v *consumerVolume) {
			v.kernel(synced)
			v.pins()
			v.flips()
			v.mu.Lock()
			if v.m != nil {
				v.m.OldFailed = true
			}
			v.mu.Unlock()
			v.switches()
		},
		"forgot": func(v *consumerVolume) {
			v.kernel(forgot)
			v.stays()
			v.movesays("could not flush")
			if v.has("hold") {
				v.Errorf("%v", v.steps())
			}
			v.kernel(synced) // the next one
			v.pins()
		},
		"forgets as it is pinned": func(v *consumerVolume) {
			v.kernel(synced)
			v.stays()
			v.kernel(synced)
			v.pins()
			if steps := v.steps(); slices.Index(steps, "release") < slices.Index(steps, "hold") || slices.Index(steps, "release") > slices.Index(steps, "unmirror") {
				v.Errorf("%v", steps)
			}
			v.flips()
			v.says("it is at its new home", func() bool { return v.has("switch") })
		},
		"new leg fails as it is held": func(v *consumerVolume) { // the kernel would begin to copy to it, and never end
			v.kernel(synced)
			v.stays()
			if v.has("release") {
				v.Errorf("%v", v.steps())
			}
			v.kernel(synced) // the next one
			v.pins()
		},
		"forgot, old home lacks it": func(v *consumerVolume) {
			v.kernel(forgot)
			v.movesays("is copied back to node old")
			v.kernel(func(m *volume.Mirrored) {
				if !m.Back {
					v.Errorf("it is %+v", m)
				}
			})
			if v.has("drop " + newHomeNQN) {
				v.Errorf("%v", v.steps())
			}
			v.kernel(synced)
			v.stays()
		},
		"nobody says that it has moved": func(v *consumerVolume) {
			v.kernel(synced)
			v.pins()
			v.says("it is not waited for longer", func() bool { return v.has("release") && !pinnedNow(v) })
			v.pins()
			v.flips()
			v.switches()
		},
		"taken back": func(v *consumerVolume) {
			v.kernel(func(*volume.Mirrored) {})
			v.movesTo(v.name, "")
			v.stays()
		},
		"taken back when pinned": func(v *consumerVolume) {
			v.kernel(synced)
			v.pins()
			v.movesTo(v.name, "")
			v.says("it is at its old home", func() bool { return v.has("unmirror") }) // the old home takes the pin off
		},
		"claim ends": func(v *consumerVolume) {
			v.kernel(func(*volume.Mirrored) {})
			v.claimFor(v.id, "")
			v.stays()
		},
		"claim ends when pinned": func(v *consumerVolume) {
			v.kernel(synced)
			v.pins()
			ended := time.Now()
			v.claimFor(v.id, "")
			v.says("it is at its old home", func() bool { return v.has("unmirror") })
			if waited := time.Since(ended); waited > 45*time.Second {
				v.Errorf("it was looked at again after %s, when the API server had told how far the watch of the node's own volumes is", waited)
			}
		},
		"taken down when pinned": func(v *consumerVolume) {
			v.kernel(synced)
			v.pins()
			v.mu.Lock()
			v.m, v.seat, v.legs = nil, false, nil
			v.mu.Unlock()
			v.says("it is not pinned", func() bool { s := v.object(v.name).Status.Move; return s.Copied == nil && s.Undone == 1 })
		},
		"pinned, and changed": func(v *consumerVolume) {
			v.kernel(synced)
			v.pins()
			o := v.object(v.name)
			before := o.DeepCopy()
			o.Spec.PersistentVolume = "pv"
			check.OK(v, v.Patch(v.ctx, o, client.MergeFrom(before)))
			v.says("it is pinned anew", func() bool { return cluster.MayMove(v.object(v.name)) })
			v.flips()
			v.switches()
		},
		"grows": func(v *consumerVolume) {
			v.kernel(func(*volume.Mirrored) {})
			o := v.object(v.name)
			before := o.DeepCopy()
			o.Spec.Size *= 2
			check.OK(v, v.Patch(v.ctx, o, client.MergeFrom(before)))
			before = o.DeepCopy()
			o.Status.Size = o.Spec.Size
			check.OK(v, v.Status().Patch(v.ctx, o, client.MergeFrom(before)))
			v.stays()
			v.movesays("has grown")
		},
		"growth is refused": func(v *consumerVolume) { // the old home has no room to grow: the mirror stays
			v.kernel(func(*volume.Mirrored) {})
			resized := func(size int64) {
				o := v.object(v.name)
				before := o.DeepCopy()
				o.Spec.Size = size
				check.OK(v, v.Patch(v.ctx, o, client.MergeFrom(before)))
			}
			resized(2 * movingSize)
			v.kernel(synced)
			v.movesays("is to grow first, or node old to refuse that")
			resized(movingSize)
			v.pins()
			v.flips()
			v.switches() // with the same mirror
		},
		"room takes long": func(v *consumerVolume) {
			v.movesays("node new makes room for it")
			v.kernel(synced)
			v.pins()
			v.flips()
			v.switches()
		},
		"does not fit": func(v *consumerVolume) { // no room is made for it again and again
			v.movesays("other sectors")
			time.Sleep(2 * time.Second) // some forty looks
			if n := v.count("prepare"); n != 1 || !v.has("drop") {
				v.Errorf("room was made %d times: %v", n, v.steps())
			}
			v.movesTo(v.name, "")
			v.movesTo(v.name, "new")
			v.says("it is tried anew", func() bool { return v.count("prepare") == 2 })
		},
		"has no seat": func(v *consumerVolume) {
			v.movesays("not staged there yet")
		},
		"was staged by an older driver": func(v *consumerVolume) {
			v.movesays("older driver")
		},
		"is staged meanwhile": func(v *consumerVolume) {
			v.kernel(func(*volume.Mirrored) {})
			v.mu.Lock()
			defer v.mu.Unlock()
			if v.told != nil {
				v.Errorf("its object said %+v", v.told)
			}
		},
	}
	for _, step := range []string{"grow", "describe", "prepare", "second", "ranges", "mirror", "seal", "complete", "hold", "switch", "drop first"} {
		each[step+" fails"] = func(v *consumerVolume) {
			v.kernel(synced)
			v.pins()
			v.flips()
			v.switches()
			v.mu.Lock()
			defer v.mu.Unlock()
			if v.fails[step] != 0 {
				v.Errorf("%s was not tried", step)
			}
		}
	}
	t.Run("each", func(t *testing.T) {
		for name, run := range each {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				in := *w
				in.TB = t
				v := in.movingInUse(all, name)
				run(v)
			})
		}
	})
}

// keepsRoom shows that room is kept on the new node for a volume that waits (v1alpha1.Move.IsToCome).
func (v *consumerVolume) keepsRoom() {
	v.Helper()
	if o := v.object(v.name); !o.Spec.Move.IsToCome(o.Status.Move) {
		v.Errorf("%s: no room is kept for it: %+v", v.name, o.Status.Move)
	}
}

// TestCarryCannot: a node whose kernel has no mirrors has no room made for what it uses. Room is kept, as the volume moves when it is released.
func TestCarryCannot(t *testing.T) {
	w, all, _ := carrying(t)
	all.mu.Lock()
	all.cannot = fmt.Errorf("%w: no target mirror", errdefs.ErrUnsupported)
	all.mu.Unlock()
	v := w.movingInUse(all, "v")
	v.movesays("no target mirror")
	v.keepsRoom()
	if v.has("describe") || v.has("prepare") {
		t.Errorf("%v", v.steps())
	}
	all.mu.Lock()
	all.cannot = nil
	all.mu.Unlock()
	v.kernel(synced)
	v.pins()
}

// TestCarryOneByOne: volumes are copied one after another, within the bandwidth that the node was given, and the object of one that waits says what it
// waits for. Room is kept for it meanwhile.
func TestCarryOneByOne(t *testing.T) {
	w, all, _ := carrying(t, func(o *agent.Options) { o.MoveCopies, o.CopyBandwidth = 0, mib })
	percent := func() int {
		all.mu.Lock()
		defer all.mu.Unlock()
		return all.percent
	}
	first := w.movingInUse(all, "first")
	first.kernel(func(m *volume.Mirrored) { m.Synced = 2 * mib })
	first.says("its copy is held back", func() bool { return percent() > 0 && percent() < 100 })
	second := w.movingInUse(all, "second")
	second.movesays("node user copies another volume now: " + first.id.Key)
	second.keepsRoom()
	if second.has("prepare") {
		t.Errorf("%v", second.steps())
	}
	first.kernel(synced) // its copy is complete, and does not hold up the second one, although it has not moved yet
	second.kernel(synced)
	for _, v := range []*consumerVolume{first, second} {
		v.pins()
		v.flips()
		v.switches()
	}
}

// TestCarrySoon: that the copy of a volume is complete is noticed soon, and not only at the next regular look.
func TestCarrySoon(t *testing.T) {
	const every = 48 * time.Second
	w, all, _ := carrying(t, func(o *agent.Options) { o.LookEvery = every })
	v := w.movingInUse(all, "small")
	began := time.Now()
	v.kernel(synced)
	v.pins()
	if took := time.Since(began); took > every/2 {
		t.Errorf("it took %v", took)
	}
}

// TestCarryAgain: a driver that is restarted goes on from the state of the kernel and the object, whatever has happened to the move meanwhile.
func TestCarryAgain(t *testing.T) {
	w, all, again := carrying(t)
	begun := func(name string, prepare func(*consumerVolume)) *consumerVolume {
		v := w.movingInUse(all, name)
		prepare(v)
		return v
	}
	mirrored := func(v *consumerVolume) { v.kernel(func(*volume.Mirrored) {}) }
	goesOn, failed, back := begun("goes on", mirrored), begun("failed", mirrored), begun("taken back", mirrored)
	forgets, held, claimed := begun("forgets", mirrored), begun("held", mirrored), begun("claimed anew", mirrored)
	stays, flipped, lost := begun("stays pinned", mirrored), begun("flipped", mirrored), begun("pinned and failed", mirrored)
	released, other := begun("released", mirrored), begun("flipped to another pool", mirrored)
	// All are pinned at once, and last, as the agent does not wait long for the controller.
	pinned := []*consumerVolume{stays, flipped, lost, released, other}
	for _, v := range pinned {
		v.kernel(synced)
	}
	for _, v := range pinned {
		v.pins()
	}
	again(func() {
		failed.kernel(newFailed)
		forgets.kernel(forgot)
		held.kernel(func(m *volume.Mirrored) { m.Synced, m.Held = m.Total, true }) // the status that pins it was not written, or is on its way
		back.movesTo(back.name, "")
		flipped.flips()
		other.flips()
		lost.kernel(oldFailed)
		released.flips()
		w.claimFor(released.id, "")
		w.claimFor(claimed.id, "")
		w.claimFor(claimed.id, "user") // at the old home, with the generation that was meant for the new one
	})
	goesOn.kernel(synced)
	for _, v := range []*consumerVolume{goesOn, stays} {
		v.pins()
		v.flips()
		v.switches()
	}
	flipped.switches()
	other.switches()
	held.pins()
	if s := held.object(held.name).Status.Move; s.Undone == 0 || !held.has("release") {
		t.Errorf("a word of before that all is copied could still be heard: %+v, %v", s, held.steps())
	}
	for _, v := range []*consumerVolume{failed, forgets, lost} {
		v.stays()
		if s := v.object(v.name).Status.Move; s.Undone == 0 {
			t.Errorf("%s: a word of before that all is copied could still be heard: %+v", v.name, s)
		}
	}
	back.says("it is at its old home", func() bool { return back.has("unmirror") })
	claimed.says("its home was asked", func() bool { return claimed.has("open") })
	for _, v := range []*consumerVolume{released, claimed} {
		if v.has("unmirror") || v.has("switch") { // writes that are acknowledged at one home alone might be lost
			t.Errorf("%v", v.steps())
		}
	}
	if back.has("switch") {
		t.Errorf("%v", back.steps())
	}
}

// TestCarryWithoutAPIServer: while the API server does not answer, a volume whose leg fails leaves that leg, unless it may be pinned: then it may have
// moved already.
func TestCarryWithoutAPIServer(t *testing.T) {
	var cut atomic.Bool
	wrap(t, func(c *rest.Config) {
		c.Wrap(func(next http.RoundTripper) http.RoundTripper {
			return tripper(func(r *http.Request) (*http.Response, error) {
				if cut.Load() && r.URL.Query().Get("watch") == "" {
					return nil, errors.New("the API server is away")
				}
				return next.RoundTrip(r)
			})
		})
	})
	w, all, _ := carrying(t)
	sure, unsure := w.movingInUse(all, "sure"), w.movingInUse(all, "unsure")
	sure.kernel(func(*volume.Mirrored) {})
	unsure.kernel(synced)
	unsure.pins()
	cut.Store(true)
	sure.kernel(newFailed)
	unsure.kernel(newFailed)
	sure.says("it is at its old home", func() bool { return sure.has("unmirror") })
	time.Sleep(time.Second)
	if unsure.has("unmirror") {
		t.Errorf("one that may have moved was left: %v", unsure.steps())
	}
	cut.Store(false)
	unsure.stays()
}
