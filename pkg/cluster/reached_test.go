package cluster_test

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/internal/secret"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lazy"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/remotepool"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/remotepool/remotetest"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/agent"
	"github.com/ashlar-csi/ashlar/pkg/cluster/export"
	"github.com/ashlar-csi/ashlar/pkg/cluster/port"
	"github.com/ashlar-csi/ashlar/pkg/cluster/store"
	"github.com/ashlar-csi/ashlar/pkg/controller"
	"github.com/ashlar-csi/ashlar/pkg/csimap"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/node"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// uses is the part of a machine's driver that uses volumes, its own and those of other nodes.
type uses struct {
	*volume.Everywhere
	others *others
	remote *remotepool.Pool
	agent  *agent.Agent
	node   *node.Server
}

// others has the volumes of other nodes. It notes what is changed of them.
type others struct {
	*volume.Local
	longest atomic.Int64 // time.Duration: LongestHold; 0: the usual one

	mu      sync.Mutex
	again   []string // calls of LimitAgain, as KEY MUTABLE
	changed []string // calls of Modified, as KEY MUTABLE
}

func (o *others) Modified(ctx context.Context, id volume.ID, mutable map[string]string) error {
	o.mu.Lock()
	o.changed = append(o.changed, fmt.Sprint(id.Key, " ", mutable))
	o.mu.Unlock()
	return o.Local.Modified(ctx, id, mutable)
}

// modified returns the mutable parameters of all calls of Modified for a volume, in their order.
func (o *others) modified(id volume.ID) (all []string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, one := range o.changed {
		if mutable, is := strings.CutPrefix(one, id.Key+" "); is {
			all = append(all, mutable)
		}
	}
	return all
}

func (o *others) LimitAgain(ctx context.Context, id volume.ID, mutable map[string]string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.again = append(o.again, fmt.Sprint(id.Key, " ", mutable))
	o.Local.LimitAgain(ctx, id, mutable)
}

// limited returns all calls of LimitAgain, sorted.
func (o *others) limited() []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Sorted(slices.Values(o.again))
}

func (o *others) LongestHold() time.Duration {
	return cmp.Or(time.Duration(o.longest.Load()), o.Local.LongestHold())
}

func (u *uses) Topology(context.Context) (map[string]string, error) { return nil, nil }

func (u *uses) AwaitClaim(ctx context.Context, id volume.ID, generation int64) error {
	return u.agent.AwaitClaim(ctx, id, generation)
}

func (u *uses) Claimed(ctx context.Context, v volume.Volume, readOnly bool) (volume.Claim, bool) {
	return u.agent.Claimed(ctx, v.ID, readOnly)
}

// target is the target of a machine, with the machine's own Resized.
type target struct {
	*remotetest.Target
	resized func() error
}

func (t target) Resized(ctx context.Context, nqn string) error {
	if t.resized != nil {
		return t.resized()
	}
	return t.Target.Resized(ctx, nqn)
}

// use lets a machine use volumes of other nodes, and export its own.
func (w *environment) use(m *machine, mounts *mount.Table) {
	w.Helper()
	m.local.ServeExports(w.ctx, volume.Exporting{Boot: "1", TLS: true, Key: bytes.Repeat([]byte{m.name[len(m.name)-1]}, 32), Locks: m.locks, Consumers: m.agent.Consumers(),
		Open: func() (volume.Exporter, error) { return target{m.network.Target(), m.resized}, nil }})
	remote := remotepool.New(m.name, m.network, m.agent.Homes())
	local, err := volume.NewLocal(w.ctx, m.name, []blockdev.Pool{remote}, mounts, 0)
	check.OK(w, err)
	m.uses = &uses{Everywhere: volume.NewEverywhere(m.local, local, m.agent.Elsewhere(remote.Has)), others: &others{Local: local}, remote: remote, agent: m.agent}
	m.uses.node = node.New(w.ctx, m.uses, mounts, node.Options{Claims: true})
}

// reached returns a cluster of two nodes in a network, a volume of node-1 that both can use, and a directory for mounts.
func reached(t *testing.T, spec volume.Spec) (w *environment, a, b *machine, s *store.Store, v volume.Volume, dir string) {
	t.Helper()
	w, a, b = twoOf(t)
	s = w.calling(a)
	w.pooled(s, b)
	spec.Nodes, spec.Access = []string{a.name}, volume.AccessAny
	v, err := s.Create(w.ctx, spec)
	check.OK(t, err)
	return w, a, b, s, v, drivertest.Dir(t)
}

// twoOf returns a cluster of two nodes in a network, without a controller.
func twoOf(t *testing.T) (w *environment, a, b *machine) {
	t.Helper()
	drivertest.NeedRoot(t)
	w, network := newEnvironment(t), &remotetest.Network{}
	a, b = w.begin(&machine{name: "node-1", ported: true, network: network}), w.begin(&machine{name: "node-2", ported: true, network: network})
	return w, a, b
}

// attaches shows that a node can attach a volume that it has.
func (w *environment) attaches(m *machine, id volume.ID) {
	w.Helper()
	here, err := m.local.Get(w.ctx, id)
	check.OK(w, err)
	device, err := m.local.Attach(w.ctx, here, nil)
	check.OK(w, err)
	check.OK(w, errors.Join(device.Close(), m.local.Detach(w.ctx, id)))
}

// claimFor claims a volume for a node, or with an empty node takes its claim off, as a controller does, and returns the generation of the last claim.
func (w *environment) claimFor(id volume.ID, node string) int64 {
	w.Helper()
	v := &v1alpha1.Volume{}
	check.OK(w, w.Get(w.ctx, client.ObjectKey{Name: id.Key}, v))
	before := v.DeepCopy()
	v.Spec.Claim = nil
	if node != "" {
		v.Spec.Claims++
		v.Spec.Claim = &v1alpha1.Claim{Node: node, Mode: "m", Generation: v.Spec.Claims}
	}
	check.OK(w, w.Patch(w.ctx, v, client.MergeFrom(before)))
	return v.Spec.Claims
}

var mounted = &csi.VolumeCapability{AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
	AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: "ext4"}}}

// stage stages and publishes a volume below a directory, and returns its target path.
func (m *machine) stage(ctx context.Context, dir string, id volume.ID, as *csi.VolumeCapability) (target string, err error) {
	return m.stageFor(ctx, dir, id, as, volume.Claim{})
}

// stageFor is stage for a claim, as the controller has answered it.
func (m *machine) stageFor(ctx context.Context, dir string, id volume.ID, as *csi.VolumeCapability, claim volume.Claim) (target string, err error) {
	given := map[string]string{}
	if claim.Generation > 0 {
		given[csimap.GenerationKey] = strconv.FormatInt(claim.Generation, 10)
	}
	staging := filepath.Join(dir, m.name, "staging")
	target = filepath.Join(dir, m.name, "pod", "target")
	if err := errors.Join(os.MkdirAll(staging, 0o700), os.MkdirAll(filepath.Dir(target), 0o700)); err != nil {
		return "", err
	}
	_, err = m.uses.node.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: id.String(), StagingTargetPath: staging, VolumeCapability: as, PublishContext: given})
	if err == nil {
		_, err = m.uses.node.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{VolumeId: id.String(), StagingTargetPath: staging, TargetPath: target, VolumeCapability: as,
			PublishContext: given})
	}
	return target, err
}

func (m *machine) unstage(ctx context.Context, dir string, id volume.ID) error {
	_, err := m.uses.node.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: id.String(), TargetPath: filepath.Join(dir, m.name, "pod", "target")})
	if err == nil {
		_, err = m.uses.node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: id.String(), StagingTargetPath: filepath.Join(dir, m.name, "staging")})
	}
	return err
}

// staged repeats stage until it succeeds, as the agent may not know of the claim yet.
func (w *environment) staged(m *machine, dir string, id volume.ID, as *csi.VolumeCapability) string {
	w.Helper()
	var target string
	w.eventually("it is staged on "+m.name, func() bool {
		var err error
		if target, err = m.stage(w.ctx, dir, id, as); err != nil {
			w.Logf("stage on %s: %v", m.name, err)
		}
		return err == nil
	})
	return target
}

// exportedTo returns the node to which a volume is exported, by its object; empty if there is none.
func (w *environment) exportedTo(id volume.ID) string {
	w.Helper()
	v := &v1alpha1.Volume{}
	check.OK(w, w.Get(w.ctx, client.ObjectKey{Name: id.Key}, v))
	if v.Status.Export == nil {
		return ""
	}
	return v.Status.Export.Node
}

// connected returns a connection of a machine (caller) to the agent of another one (m), or to its own.
func (w *environment) connected(m, caller *machine) grpc.ClientConnInterface {
	w.Helper()
	calls, err := port.NewCallers(wrapped(apitest.Get(w).Agent(w, caller.name)))
	check.OK(w, err)
	w.Cleanup(func() { check.OK(w, calls.Close()) })
	c, err := calls.Agent(m.name, *m.port.Endpoint())
	check.OK(w, err)
	return c
}

// homeOf returns another machine (m) as the home of volumes, as a machine (caller) calls it. A busy one is asked again (patient).
func (w *environment) homeOf(m, caller *machine) export.Home {
	w.Helper()
	return export.HomeAt(patient{w.connected(m, caller)})
}

// patient is a connection to an agent that repeats a call while the answer is errdefs.ErrBusy, as agents do: the other agent may be looking at the volume,
// as its object has just changed.
type patient struct{ grpc.ClientConnInterface }

func (p patient) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		err := p.ClientConnInterface.Invoke(ctx, method, args, reply, opts...)
		if !errors.Is(err, errdefs.ErrBusy) || time.Now().After(end) {
			return err
		}
	}
}

// TestReached: a volume is used on another node, and then on its own, with what was written before, and again on the other one. It is formatted once, and
// its record says so wherever it is used.
func TestReached(t *testing.T) {
	w, a, b, _, v, dir := reached(t, volume.Spec{Name: "v", Filesystem: "ext4", Size: volume.Range{Required: 64 * mib}})
	w.claimFor(v.ID, b.name)
	target := w.staged(b, dir, v.ID, mounted)
	check.OK(t, os.WriteFile(filepath.Join(target, "file"), []byte("from afar"), 0o600))
	if to := w.exportedTo(v.ID); to != b.name || len(a.network.Exported()) != 1 {
		t.Errorf("it is exported to %q: %v", to, a.network.Exported())
	}
	if have, err := b.uses.Get(w.ctx, v.ID); err != nil || have.Format != (volume.Format{State: volume.Formatted, Type: "ext4"}) || have.ID != v.ID {
		t.Errorf("the volume is %+v, %v", have, err)
	}
	if have, err := a.local.Get(w.ctx, v.ID); err != nil || have.Format.State != volume.Formatted || have.Flags == "" {
		t.Errorf("at home the volume is %+v, %v", have, err)
	}
	stats, err := b.uses.node.NodeGetVolumeStats(w.ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: v.ID.String(), VolumePath: target})
	if err != nil || stats.GetUsage()[0].GetTotal() < 40*mib {
		t.Errorf("its stats are %v, %v", stats, err)
	}
	_, err = a.stage(w.ctx, dir, v.ID, mounted)
	fails(t, err, errdefs.ErrPrecondition) // it is claimed for the other node
	for range 2 {
		check.OK(t, b.unstage(w.ctx, dir, v.ID))
	}
	if exported := a.network.Exported(); len(exported) != 0 {
		t.Errorf("unstaged, %v is exported", exported)
	}
	w.claimFor(v.ID, a.name)
	target = w.staged(a, dir, v.ID, mounted)
	if have, err := os.ReadFile(filepath.Join(target, "file")); err != nil || string(have) != "from afar" {
		t.Errorf("at home the file has %q, %v", have, err)
	}
	check.OK(t, os.WriteFile(filepath.Join(target, "file"), []byte("from home"), 0o600))
	_, err = b.stage(soon(t), dir, v.ID, mounted)
	if err == nil {
		t.Error("it is staged on a node that it is not claimed for any more")
	}
	check.OK(t, a.unstage(w.ctx, dir, v.ID))
	w.claimFor(v.ID, b.name)
	target = w.staged(b, dir, v.ID, mounted)
	if have, err := os.ReadFile(filepath.Join(target, "file")); err != nil || string(have) != "from home" {
		t.Errorf("on the other node the file has %q, %v", have, err)
	}
	check.OK(t, b.unstage(w.ctx, dir, v.ID))
	w.claimFor(v.ID, "")
}

// TestReachedEarlierClaim: a node that was cut off still has the mount of an earlier claim, and its agent has not heard of its new one yet. Another node may
// have written to the volume between the two. What is mounted is not taken for the volume: neither while the agent does not know, nor later.
func TestReachedEarlierClaim(t *testing.T) {
	w, a, b, s, v, dir := reached(t, volume.Spec{Name: "v", Filesystem: "ext4", Size: volume.Range{Required: 64 * mib}})
	lag := w.restartLagging(t, b)
	answer, err := controller.New(s).ControllerPublishVolume(w.ctx, &csi.ControllerPublishVolumeRequest{VolumeId: v.ID.String(), NodeId: b.name, VolumeCapability: mounted})
	check.OK(t, err)
	if have := answer.GetPublishContext(); have[csimap.GenerationKey] != "1" {
		t.Errorf("the first claim has the publish context %q", have)
	}
	target := w.staged(b, dir, v.ID, mounted)
	check.OK(t, second(b.uses.node.NodeUnpublishVolume(w.ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: v.ID.String(), TargetPath: target})))
	catchUp := lag.hold()
	defer catchUp()
	w.claimFor(v.ID, "") // the node is out of service, and nothing is unstaged there
	w.eventually("its export has ended", func() bool { return len(a.network.Exported()) == 0 })
	now := volume.Claim{Generation: w.claimFor(v.ID, b.name)}
	again, err := b.stageFor(w.ctx, dir, v.ID, mounted, now)
	fails(t, err, errdefs.ErrUnavailable)
	if there, err := mount.At(again); err == nil && there.Root {
		t.Error("what is mounted by an earlier claim is published")
	}
	catchUp()
	w.eventually("the agent has heard of it", func() bool {
		_, err = b.stageFor(w.ctx, dir, v.ID, mounted, now)
		return !errors.Is(err, errdefs.ErrUnavailable)
	})
	fails(t, err, errdefs.ErrPrecondition) // it has to be unstaged first
	check.OK(t, b.unstage(w.ctx, dir, v.ID))
	w.eventually("it is staged by the new claim", func() bool {
		_, err = b.stageFor(w.ctx, dir, v.ID, mounted, now)
		return err == nil
	})
	check.OK(t, b.unstage(w.ctx, dir, v.ID))
}

// TestReachedRaw: a volume is used as a raw block device on another node, and then on its own. It is never formatted later.
func TestReachedRaw(t *testing.T) {
	w, a, b, _, v, dir := reached(t, volume.Spec{Name: "v", Size: volume.Range{Required: 64 * mib}})
	block := &csi.VolumeCapability{AccessMode: mounted.AccessMode, AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}}
	w.claimFor(v.ID, b.name)
	target := w.staged(b, dir, v.ID, block)
	f, err := os.OpenFile(target, os.O_RDWR, 0)
	check.OK(t, err)
	_, err = f.WriteAt([]byte("raw"), mib)
	check.OK(t, errors.Join(err, f.Close()))
	check.OK(t, b.unstage(w.ctx, dir, v.ID))
	w.claimFor(v.ID, a.name)
	target = w.staged(a, dir, v.ID, block)
	have := make([]byte, 3)
	f, err = os.Open(target)
	check.OK(t, err)
	_, err = f.ReadAt(have, mib)
	if check.OK(t, errors.Join(err, f.Close())); string(have) != "raw" {
		t.Errorf("at home it has %q", have)
	}
	check.OK(t, a.unstage(w.ctx, dir, v.ID))
	w.claimFor(v.ID, b.name)
	w.eventually("the claim is known", func() bool {
		_, err = b.stage(w.ctx, dir, v.ID, mounted)
		return err != nil && strings.Contains(err.Error(), "raw block device")
	})
	check.OK(t, b.unstage(w.ctx, dir, v.ID))
}

// TestReachedByOtherClaim: a call between the home of a volume and the node that uses it is for another claim, as that has just ended. It fails with
// ErrPrecondition, as it would on one node: callers tell that from other errors.
func TestReachedByOtherClaim(t *testing.T) {
	w, a, b, _, v, _ := reached(t, volume.Spec{Name: "v", Size: volume.Range{Required: mib}})
	generation := w.claimFor(v.ID, b.name)
	home, user, other := w.homeOf(a, b), export.UserAt(patient{w.connected(b, a)}), generation+1
	for what, ask := range map[string]func() error{
		"Open":   func() error { return second(home.Open(w.ctx, v.ID, other)) },
		"Record": func() error { return second(home.Record(w.ctx, v.ID, other)) },
		"SetLabels": func() error {
			return second(home.SetLabels(w.ctx, v.ID, other, nil, map[string]string{"flags": "x"}))
		},
		"Marks":    func() error { return second(home.Marks(w.ctx, v.ID, other, 0)) },
		"BeginEra": func() error { return second(home.BeginEra(w.ctx, v.ID, other)) },
		"Modified": func() error { return user.Modified(w.ctx, v.ID, other, nil) },
		"Hold":     func() error { return second(user.Hold(w.ctx, v.ID, other)) },
	} {
		if err := ask(); !is(err, errdefs.ErrPrecondition) {
			t.Errorf("%s: %v, want %v", what, err, errdefs.ErrPrecondition)
		}
	}
	w.claimFor(v.ID, "")
}

// TestReachedRefused: a home exports a volume only to the node of the present claim, and only that node can change its record: the labels that are a
// user's, and no others.
func TestReachedRefused(t *testing.T) {
	w, a, b, _, v, _ := reached(t, volume.Spec{Name: "v", Size: volume.Range{Required: mib}})
	calls := func(m *machine) remotepool.Home { return m.agent.Homes() }
	ref := blockdev.Ref{Kind: v.ID.Kind, Key: v.ID.Key}
	if claim, known := b.agent.Claimed(w.ctx, v.ID, true); !known || claim != (volume.Claim{}) {
		t.Errorf("to a node that it is not claimed for, its claim is %+v, known %v: what that has of its ID could be staged", claim, known)
	}
	_, err := calls(b).Open(w.ctx, v.ID.Pool, ref)
	fails(t, err, errdefs.ErrPrecondition)
	w.claimFor(v.ID, a.name)
	_, err = calls(b).Open(w.ctx, v.ID.Pool, ref)
	fails(t, err, errdefs.ErrPrecondition)
	generation := w.claimFor(v.ID, b.name)
	_, err = calls(b).Open(w.ctx, "b", ref)
	fails(t, err, errdefs.ErrPrecondition)

	home, hasty := w.homeOf(a, b), export.HomeAt(w.connected(a, b))
	for what, ask := range map[string]func() error{
		"Open of another generation":    func() error { return second(home.Open(w.ctx, v.ID, generation+1)) },
		"Open of an earlier generation": func() error { return second(home.Open(w.ctx, v.ID, generation-1)) },
		"Record of another generation":  func() error { return second(home.Record(w.ctx, v.ID, generation-1)) },
		"SetLabels of another generation": func() error {
			return second(home.SetLabels(w.ctx, v.ID, generation-1, nil, map[string]string{"flags": "x"}))
		},
		"SetLabels of what is its home's": func() error {
			return second(home.SetLabels(w.ctx, v.ID, generation, nil, map[string]string{"claim.node": "x"}))
		},
		"SetLabels that takes the export": func() error {
			return second(home.SetLabels(w.ctx, v.ID, generation, map[string]string{"export": "x"}, nil))
		},
		"SetLabels of what is not as said": func() error {
			return second(hasty.SetLabels(w.ctx, v.ID, generation, map[string]string{"flags": "x"}, nil))
		},
		"Marks of another generation":    func() error { return second(home.Marks(w.ctx, v.ID, generation-1, 0)) },
		"Marks as another node":          func() error { return second(w.homeOf(a, a).Marks(w.ctx, v.ID, generation, 0)) },
		"BeginEra of another generation": func() error { return second(home.BeginEra(w.ctx, v.ID, generation+1)) },
		"BeginEra as another node":       func() error { return second(w.homeOf(a, a).BeginEra(w.ctx, v.ID, generation)) },
		"Open as another node":           func() error { return second(w.homeOf(a, a).Open(w.ctx, v.ID, generation)) },
		"Record as another node":         func() error { return second(w.homeOf(a, a).Record(w.ctx, v.ID, generation)) },
		"Open of another's volume":       func() error { return second(w.homeOf(b, b).Open(w.ctx, v.ID, generation)) },
	} {
		if err := ask(); err == nil || errors.Is(err, errdefs.ErrUnavailable) {
			t.Errorf("%s: %v", what, err)
		}
	}
	opened, err := home.Open(w.ctx, v.ID, generation)
	check.OK(t, err)
	again, err := home.Open(w.ctx, v.ID, generation)
	if check.OK(t, err); opened.NQN != again.NQN || opened.Secret != again.Secret || opened.Secret == (secret.Text{}) || opened.PSK != again.PSK || opened.PSK == (secret.Text{}) || opened.Size != mib || opened.Record.Labels["export"] != "" {
		t.Errorf("opened %+v, and again %+v", opened, again)
	}
	if text := fmt.Sprintf("%v %+v %#v", opened, opened, opened); strings.Contains(text, "DHHC") || strings.Contains(text, "NVMeTLSkey") {
		t.Errorf("the secrets are printed: %s", text)
	}
	check.OK(t, second(home.SetLabels(w.ctx, v.ID, generation, nil, map[string]string{"flags": "x"})))
	check.OK(t, home.Close(w.ctx, v.ID, generation+1, opened.NQN))
	if exported := a.network.Exported(); len(exported) != 1 {
		t.Errorf("closed by another generation, %v is exported", exported)
	}
	for range 2 {
		check.OK(t, home.Close(w.ctx, v.ID, generation, opened.NQN))
	}
	anew, err := home.Open(w.ctx, v.ID, generation)
	check.OK(t, errors.Join(err, home.Close(w.ctx, v.ID, generation, opened.NQN))) // it is late
	if exported := a.network.Exported(); len(exported) != 1 || anew.NQN == opened.NQN {
		t.Errorf("closed under its earlier name, %v is exported", exported)
	}
	check.OK(t, home.Close(w.ctx, v.ID, generation, "")) // as of an older version
	if record, err := a.local.Record(w.ctx, v.ID); err != nil || record.Labels["flags"] != "x" || len(a.network.Exported()) != 0 {
		t.Errorf("the record is %+v, %v; exported is %v", record, err, a.network.Exported())
	}
	unlock := check.Locked(t, a.locks, keylock.Volume(v.ID.Key))
	_, err = hasty.Open(w.ctx, v.ID, generation)
	unlock()
	fails(t, err, errdefs.ErrBusy)
}

// TestReachedAlone: a volume that is connected can be used on, and given up, while the driver of its home, or the API server, is away.
func TestReachedAlone(t *testing.T) {
	var away atomic.Bool
	wrap(t, func(c *rest.Config) {
		c.Wrap(func(next http.RoundTripper) http.RoundTripper {
			return roundTrip(func(q *http.Request) (*http.Response, error) {
				if away.Load() {
					return nil, errors.New("no API server")
				}
				return next.RoundTrip(q)
			})
		})
	})
	w, a, b, _, v, dir := reached(t, volume.Spec{Name: "v", Filesystem: "ext4", Size: volume.Range{Required: 64 * mib}})
	w.claimFor(v.ID, b.name)
	target := w.staged(b, dir, v.ID, mounted)
	a.stop()
	for range 2 { // the second time after a restart of b
		if again, err := b.stage(w.ctx, dir, v.ID, mounted); err != nil || again != target {
			t.Errorf("staged again, while the driver of its home is away, at %s: %v", again, err)
		}
		check.OK(t, os.WriteFile(filepath.Join(target, "file"), []byte("goes on"), 0o600))
		w.start(a)
		if len(a.network.Exported()) != 1 {
			t.Errorf("after a restart of its home's driver exported is %v", a.network.Exported())
		}
		b.stop()
		w.start(b)
		w.eventually("it is known again", func() bool { _, err := b.uses.Get(w.ctx, v.ID); return err == nil })
		a.stop()
	}
	w.start(a)
	w.eventually("its home answers", func() bool {
		_, err := b.agent.Homes().Record(w.ctx, v.ID.Pool, blockdev.Ref{Kind: v.ID.Kind, Key: v.ID.Key})
		return err == nil
	})
	away.Store(true)
	check.OK(t, second(b.stage(w.ctx, dir, v.ID, mounted)))
	check.OK(t, b.unstage(w.ctx, dir, v.ID))
	if list, err := b.network.List(""); err != nil || len(list) != 0 || len(a.network.Exported()) != 0 {
		t.Errorf("given up while the API server is away, connected is %v, %v, and exported %v", list, err, a.network.Exported())
	}
	away.Store(false)
	w.staged(b, dir, v.ID, mounted)
	b.stop()
	away.Store(true)
	w.start(b) // it knows nothing but the state of the kernel
	_, err := b.stage(w.ctx, dir, v.ID, mounted)
	fails(t, err, errdefs.ErrUnavailable)
	check.OK(t, b.unstage(w.ctx, dir, v.ID))
	if list, err := b.network.List(""); err != nil || len(list) != 0 {
		t.Errorf("given up after a restart without an API server, connected is %v, %v", list, err)
	}
	away.Store(false)
	w.claimFor(v.ID, "")
	w.eventually("its home has ended the export", func() bool { return len(a.network.Exported()) == 0 && w.exportedTo(v.ID) == "" })
}

// full is a pool whose disk may have no room for a write of a record, which fails then: without having changed the record, or although it has (changes).
type full struct {
	*memory.Pool
	is, changes atomic.Bool
}

func (f *full) SetLabels(ctx context.Context, ref blockdev.Ref, change func(map[string]string) error) (blockdev.Record, error) {
	if f.is.Load() {
		if f.changes.Load() {
			_, _ = f.Pool.SetLabels(ctx, ref, change)
		}
		return blockdev.Record{}, fmt.Errorf("%w: sync the record: no space left on device", errdefs.ErrNoSpace)
	}
	return f.Pool.SetLabels(ctx, ref, change)
}

// TestExportUnwritten: the record of a volume cannot be written when the volume is to be exported and then released, or when its export is to end. Nothing
// is exported without a claim, the object says no wrong thing, and when the disk has room again the volume can be used.
func TestExportUnwritten(t *testing.T) {
	drivertest.NeedRoot(t)
	for _, changes := range []bool{false, true} {
		t.Run(fmt.Sprintf("changed=%v", changes), func(t *testing.T) {
			w, network, disk := newEnvironment(t), &remotetest.Network{}, &full{}
			disk.changes.Store(changes)
			a := w.begin(&machine{name: "node-1", ported: true, network: network, wrap: func(p *memory.Pool) blockdev.Pool { disk.Pool = p; return disk }})
			b := w.begin(&machine{name: "node-2", ported: true, network: network})
			s, _ := w.store()
			v, err := s.Create(w.ctx, volume.Spec{Name: "v", Size: volume.Range{Required: mib}, Access: volume.AccessAny, Nodes: []string{a.name}})
			check.OK(t, err)
			home := w.homeOf(a, b)
			disk.is.Store(true)
			generation := w.claimFor(v.ID, b.name)
			fails(t, second(home.Open(w.ctx, v.ID, generation)), errdefs.ErrNoSpace)
			w.claimFor(v.ID, "")
			if !changes {
				w.exported("v", nil)
			}
			if names := a.network.Exported(); len(names) != 0 {
				t.Errorf("nobody claims it, and exported are %v", names)
			}
			disk.is.Store(false)
			w.exported("v", nil)
			generation = w.claimFor(v.ID, b.name)
			w.eventually("it is given", func() bool { return second(home.Open(w.ctx, v.ID, generation)) == nil })
			disk.is.Store(true)
			w.claimFor(v.ID, "")
			w.eventually("its node has it no more", func() bool { return len(a.network.Exported()) == 0 })
			disk.is.Store(false)
			w.exported("v", nil)
			w.claimFor(v.ID, a.name)
			w.attaches(a, v.ID)
		})
	}
}

// TestReachedGrows: NodeExpandVolume on the node that uses a volume grows the filesystem after the home has grown the volume. While the driver of the home
// is away it fails with ErrUnavailable, to be tried again.
func TestReachedGrows(t *testing.T) {
	w, a, b, s, v, dir := reached(t, volume.Spec{Name: "v", Filesystem: "xfs", Size: volume.Range{Required: 320 * mib}})
	w.claimFor(v.ID, b.name)
	as := &csi.VolumeCapability{AccessMode: mounted.AccessMode, AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: "xfs"}}}
	target := w.staged(b, dir, v.ID, as)
	check.OK(t, second(s.Expand(w.ctx, v.ID, volume.Range{Required: 400 * mib})))
	grow := func() error {
		return second(b.uses.node.NodeExpandVolume(w.ctx, &csi.NodeExpandVolumeRequest{VolumeId: v.ID.String(), VolumePath: target, CapacityRange: &csi.CapacityRange{RequiredBytes: 400 * mib}}))
	}
	a.stop()
	fails(t, grow(), errdefs.ErrUnavailable)
	w.start(a)
	w.eventually("it has grown", func() bool { return grow() == nil })
	stats, err := b.uses.node.NodeGetVolumeStats(w.ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: v.ID.String(), VolumePath: target})
	if err != nil || stats.GetUsage()[0].GetTotal() < 330*mib {
		t.Errorf("grown, its stats are %v, %v", stats, err)
	}
	check.OK(t, b.unstage(w.ctx, dir, v.ID))
}

// TestReachedHeld: a snapshot of a volume that is used on another node has what was written there, even if it was not synced; and changed parameters are
// in force there. The other node holds back writes only for the home, and only for the present claim.
func TestReachedHeld(t *testing.T) {
	w, a, b, s, v, dir := reached(t, volume.Spec{Name: "v", Filesystem: "ext4", Size: volume.Range{Required: 64 * mib}})
	w.claimFor(v.ID, b.name)
	target := w.staged(b, dir, v.ID, mounted)
	content := bytes.Repeat([]byte("written, and not synced. "), 1000)
	check.OK(t, os.WriteFile(filepath.Join(target, "file"), content, 0o600))
	snapshot, err := s.CreateSnapshot(w.ctx, "cut", v.ID)
	check.OK(t, err)
	if !bytes.Contains(w.content(a, snapshot.ID), content[:4096]) {
		t.Error("the snapshot lacks what was written")
	}
	check.OK(t, os.WriteFile(filepath.Join(target, "file"), []byte("goes on"), 0o600))
	check.OK(t, s.Modify(w.ctx, v.ID, map[string]string{"readAheadKiB": "64"}))
	devices, err := b.uses.Attached(w.ctx, v.ID)
	check.OK(t, err)
	ahead, err := os.ReadFile("/sys/block/" + filepath.Base(devices[0].Path) + "/queue/read_ahead_kb")
	if check.OK(t, err); strings.TrimSpace(string(ahead)) != "64" {
		t.Errorf("read_ahead_kb on the other node is %s", ahead)
	}
	unlock := check.Locked(t, b.locks, keylock.Volume(v.ID.Key))
	_, err = a.agent.Consumers().Hold(w.ctx, v.ID, volume.Grant{Generation: 1, Node: b.name})
	unlock()
	fails(t, err, errdefs.ErrBusy)
	for what, ask := range map[string]func() error{
		"of another generation": func() error {
			return second(a.agent.Consumers().Hold(w.ctx, v.ID, volume.Grant{Generation: 2, Node: b.name}))
		},
		"by another node": func() error {
			return second(b.agent.Consumers().Hold(w.ctx, v.ID, volume.Grant{Generation: 1, Node: b.name}))
		},
	} {
		if err := ask(); err == nil || errors.Is(err, errdefs.ErrUnavailable) {
			t.Errorf("Hold %s: %v", what, err)
		}
	}
	held, cancel := context.WithCancel(w.ctx)
	release, err := a.agent.Consumers().Hold(held, v.ID, volume.Grant{Generation: 1, Node: b.name})
	check.OK(t, err)
	cancel() // as when the home is gone
	fails(t, release(), errdefs.ErrUnavailable)
	check.OK(t, os.WriteFile(filepath.Join(target, "file"), []byte("goes on again"), 0o600))
	w.eventually("it is unstaged", func() bool { return b.unstage(w.ctx, dir, v.ID) == nil })
}

// TestReachedHeldForEver: a home that never releases the writes that it has held back does not block calls for its volume: the hold ends by itself.
func TestReachedHeldForEver(t *testing.T) {
	w, a, b, _, v, dir := reached(t, volume.Spec{Name: "v", Filesystem: "ext4", Size: volume.Range{Required: 64 * mib}})
	w.claimFor(v.ID, b.name)
	w.staged(b, dir, v.ID, mounted)
	b.uses.others.longest.Store(int64(time.Millisecond))
	release, err := a.agent.Consumers().Hold(w.ctx, v.ID, volume.Grant{Generation: 1, Node: b.name})
	check.OK(t, err)
	check.Locked(t, b.locks, keylock.Volume(v.ID.Key))() // the lock becomes free
	_ = release()                                        // TestHold of pkg/volume checks its error
	check.OK(t, b.unstage(w.ctx, dir, v.ID))
}

// TestReachedReopened: a volume is opened again while its home writes into the object that the export has ended. It is not released before the home has
// ended the new export, too.
func TestReachedReopened(t *testing.T) {
	var ended atomic.Pointer[func(send func())]
	wrap(t, func(c *rest.Config) {
		c.Wrap(func(next http.RoundTripper) http.RoundTripper {
			return roundTrip(func(q *http.Request) (response *http.Response, err error) {
				send := func() { response, err = next.RoundTrip(q) } //nolint:bodyclose // the caller closes it
				if q.Method == http.MethodPatch && strings.HasSuffix(q.URL.Path, "/status") {
					body, failure := io.ReadAll(q.Body)
					if q.Body = io.NopCloser(bytes.NewReader(body)); failure != nil {
						return nil, failure
					}
					if meanwhile := ended.Load(); meanwhile != nil && bytes.Contains(body, []byte(`"export":null`)) && ended.CompareAndSwap(meanwhile, nil) {
						(*meanwhile)(send)
						return response, err
					}
				}
				send()
				return response, err
			})
		})
	})
	w, a, b, s, v, _ := reached(t, volume.Spec{Name: "v", Size: volume.Range{Required: mib}})
	generation, home, hasty := w.claimFor(v.ID, b.name), w.homeOf(a, b), export.HomeAt(w.connected(a, b))
	check.OK(t, second(home.Open(w.ctx, v.ID, generation)))
	w.eventually("its home says so", func() bool { return w.exportedTo(v.ID) == b.name })
	done := make(chan struct{})
	meanwhile := func(send func()) {
		defer close(done)
		if err := second(hasty.Open(w.ctx, v.ID, generation)); err != nil && !errors.Is(err, errdefs.ErrBusy) {
			t.Errorf("opened again: %v", err)
		}
		send()
		if err := s.Release(soon(t), v.ID, b.name); err == nil && len(a.network.Exported()) != 0 {
			t.Errorf("it is released, and exported is %v", a.network.Exported())
		}
	}
	ended.Store(&meanwhile) // before Close, as the agent may write at once
	check.OK(t, home.Close(w.ctx, v.ID, generation, ""))
	w.touched("v")
	select {
	case <-done:
	case <-time.After(2 * time.Minute):
		t.Fatal("its home does not say that the export has ended")
	}
	w.eventually("its home has ended the export", func() bool { return len(a.network.Exported()) == 0 && w.exportedTo(v.ID) == "" })
}

// TestReachedLost: the export of a volume whose bytes are missing at its home ends, and the volume can be released.
func TestReachedLost(t *testing.T) {
	w, a, b, s, v, _ := reached(t, volume.Spec{Name: "v", Size: volume.Range{Required: mib}})
	generation := w.claimFor(v.ID, b.name)
	check.OK(t, second(w.homeOf(a, b).Open(w.ctx, v.ID, generation)))
	pool, ref := a.disks[0].Open("default", nil), blockdev.Ref{Kind: v.ID.Kind, Key: v.ID.Key}
	check.OK(t, errors.Join(pool.Detach(w.ctx, ref), pool.Delete(w.ctx, ref)))
	w.touched("v")
	w.eventually("it is reported lost", func() bool { return v1alpha1.IsLost(w.object("v")) })
	w.eventually("it is released", func() bool { return s.Release(soon(t), v.ID, b.name) == nil })
	if exported := a.network.Exported(); len(exported) != 0 {
		t.Errorf("released, exported is %v", exported)
	}
}

// TestReachedLostAlone: the same with a home that is in no network any more when it finds that the bytes are missing.
func TestReachedLostAlone(t *testing.T) {
	w, a, b, s, v, _ := reached(t, volume.Spec{Name: "v", Size: volume.Range{Required: mib}})
	generation := w.claimFor(v.ID, b.name)
	check.OK(t, second(w.homeOf(a, b).Open(w.ctx, v.ID, generation)))
	a.stop()
	a.network = nil
	a.with = func(o *agent.Options) { o.Exporter = a.local } // as cmd/driver does
	pool, ref := a.disks[0].Open("default", nil), blockdev.Ref{Kind: v.ID.Kind, Key: v.ID.Key}
	check.OK(t, errors.Join(pool.Detach(w.ctx, ref), pool.Delete(w.ctx, ref)))
	w.start(a)
	w.eventually("it is reported lost", func() bool { return v1alpha1.IsLost(w.object("v")) })
	w.again("it is released", func(ctx context.Context) error { return s.Release(ctx, v.ID, b.name) })
	w.exported("v", nil)
}

// TestReachedAway: if a home does not answer the node that uses its volume, the object says so until it answers again, with one event for each.
func TestReachedAway(t *testing.T) {
	w, a, b, s, v, dir := reached(t, spec("v"))
	object := cluster.VolumeNamed(v.ID.Key)
	check.OK(t, second(s.Claim(w.ctx, v.ID, on(b.name))))
	w.staged(b, dir, v.ID, mounted)
	ctx, stop := context.WithCancel(w.ctx)
	done := make(chan struct{})
	go func() { defer close(done); b.agent.ReportAway(ctx, b.uses.remote.Away, 50*time.Millisecond) }()
	t.Cleanup(func() { stop(); <-done })
	away := func(want bool) {
		t.Helper()
		w.eventually(fmt.Sprint("it is away: ", want), func() bool {
			e := w.object(v.Name).Status.Export
			return e != nil && (e.Away != nil) == want
		})
	}
	a.network.Cut(true)
	away(true)
	w.told("HomeAway", "node "+a.name+", which alone has it, does not answer there since", object)
	since := w.object(v.Name).Status.Export.Away
	w.touched(v.Name) // so that its home writes the status, too
	time.Sleep(200 * time.Millisecond)
	if e := w.object(v.Name).Status.Export; e == nil || !e.Away.Equal(since) {
		t.Errorf("it was away since %v, and now %+v", since, e)
	}
	a.network.Cut(false)
	away(false)
	w.told("HomeBack", "node "+a.name+" answers node "+b.name+" on the network again", object)
	w.told("HomeAway", "", object) // still only one
	check.OK(t, b.unstage(w.ctx, dir, v.ID))
}

// TestReachedForgotten: an object that was restored to before a claim does not know of it. The export ends when the node that uses the volume gives it
// back.
func TestReachedForgotten(t *testing.T) {
	w, a, b, s, v, dir := reached(t, spec("v"))
	check.OK(t, second(s.Claim(w.ctx, v.ID, on(b.name))))
	w.staged(b, dir, v.ID, mounted)
	w.madeAnew(v.Name, func() {}, func(s *v1alpha1.VolumeSpec) { s.Claim, s.Claims = nil, 0 })
	w.eventually("the object says who uses it", func() bool { return w.exportedTo(v.ID) == b.name })
	w.eventually("the user has not heard of any claim", func() bool { _, claimed := b.agent.Homes().Claim(ref(v)); return !claimed })
	check.OK(t, b.unstage(w.ctx, dir, v.ID))
	if exported := a.network.Exported(); len(exported) != 0 {
		t.Errorf("exported is %v", exported)
	}
	w.touched(v.Name)
	w.eventually("it is deleted", func() bool { return s.Delete(soon(t), v.ID) == nil })
}

// TestReachedForgottenAway: such an object does not end the export: a node that uses the volume stays connected while the home is away, and goes on after
// that.
func TestReachedForgottenAway(t *testing.T) {
	w, a, b, s, v, dir := reached(t, spec("v"))
	check.OK(t, second(s.Claim(w.ctx, v.ID, on(b.name))))
	w.staged(b, dir, v.ID, mounted)
	w.madeAnew(v.Name, func() {}, func(s *v1alpha1.VolumeSpec) { s.Claim, s.Claims = nil, 0 })
	w.eventually("the object says who uses it", func() bool { return w.exportedTo(v.ID) == b.name })
	w.eventually("the user has not heard of any claim", func() bool { _, claimed := b.agent.Homes().Claim(ref(v)); return !claimed })
	a.network.Cut(true)
	check.OK(t, b.uses.remote.DropEnded(w.ctx))
	if !b.uses.remote.Has(ref(v)) {
		t.Error("it is not connected any more")
	}
	a.network.Cut(false)
	check.OK(t, b.unstage(w.ctx, dir, v.ID))
	w.touched(v.Name)
	w.eventually("the object says that nobody uses it", func() bool { return w.exportedTo(v.ID) == "" })
	if ended, err := b.agent.Homes().Ended(w.ctx, ref(v), 1); !ended || err != nil {
		t.Errorf("given back, it has ended: %v, %v", ended, err)
	}
}

// TestReachedGrowthCutShort: the record of a volume that another node uses has grown, and what is exported of it cannot. That is tried again before anybody
// is told that the volume has grown.
func TestReachedGrowthCutShort(t *testing.T) {
	drivertest.NeedRoot(t)
	w, network, calls := newEnvironment(t), &remotetest.Network{}, atomic.Int64{}
	a := w.begin(&machine{name: "node-1", ported: true, network: network, resized: func() error {
		if calls.Add(1) < 3 {
			return fmt.Errorf("%w: not now", errdefs.ErrUnavailable)
		}
		return nil
	}})
	b := w.begin(&machine{name: "node-2", ported: true, network: network})
	s := w.calling(a)
	v, err := s.Create(w.ctx, anyNode("v", a.name))
	check.OK(t, err)
	check.OK(t, second(w.homeOf(a, b).Open(w.ctx, v.ID, w.claimFor(v.ID, b.name))))
	w.again("it grows", func(ctx context.Context) error { return second(s.Expand(ctx, v.ID, volume.Range{Required: 2 * mib})) })
	if n := calls.Load(); n != 3 {
		t.Errorf("it has grown, and its user was told %d times", n)
	}
}

// TestReachedGrowthRefused: the record of a volume that another node uses has grown, and what is exported of it cannot grow, for good. The growth fails, and
// nothing says that the volume has grown, until its devices have.
func TestReachedGrowthRefused(t *testing.T) {
	drivertest.NeedRoot(t)
	w, network, mended, told := newEnvironment(t), &remotetest.Network{}, atomic.Bool{}, atomic.Bool{}
	a := w.begin(&machine{name: "node-1", ported: true, network: network, resized: func() error {
		if !mended.Load() {
			return fmt.Errorf("%w: not on this kernel", errdefs.ErrUnsupported)
		}
		told.Store(true)
		return nil
	}})
	b := w.begin(&machine{name: "node-2", ported: true, network: network})
	s := w.calling(a)
	v, err := s.Create(w.ctx, anyNode("v", a.name))
	check.OK(t, err)
	check.OK(t, second(w.homeOf(a, b).Open(w.ctx, v.ID, w.claimFor(v.ID, b.name))))
	for range 2 {
		fails(t, second(s.Expand(w.ctx, v.ID, volume.Range{Required: 2 * v.Size})), errdefs.ErrUnsupported)
		w.eventually("the growth is taken back", func() bool {
			o := w.object("v")
			return o.Spec.Size == v.Size && o.Common().Refused(o.Generation) != nil
		})
		if have, err := a.local.Get(w.ctx, v.ID); err != nil || have.Size != 2*v.Size {
			t.Fatalf("its record has %d bytes, %v", have.Size, err)
		}
		if o := w.object("v"); o.Status.Size != v.Size {
			t.Errorf("it is said to have %d bytes, and its devices have %d", o.Status.Size, v.Size)
		}
	}
	mended.Store(true)
	if grown, err := s.Expand(w.ctx, v.ID, volume.Range{Required: 2 * v.Size}); err != nil || grown.Size != 2*v.Size || !told.Load() {
		t.Errorf("it has %d bytes, %v; its user was told: %v", grown.Size, err, told.Load())
	}
}

// TestReachedHomeGone: a node that uses a volume stays connected while the home is down, and also when that is said to be gone for good, until its Pools are
// deleted. Then it disconnects, so that pods which wait for the home can end, and the volume can be unstaged and released.
func TestReachedHomeGone(t *testing.T) {
	w, a, b, s, v, dir := reached(t, spec("v"))
	check.OK(t, second(s.Claim(w.ctx, v.ID, on(b.name))))
	pool := b.uses.remote.Named("default")
	w.eventually("it is connected", func() bool {
		_, err := pool.Attach(w.ctx, ref(v), blockdev.Attachment{Keep: true})
		return err == nil
	})
	a.network.Cut(true)
	a.stop()
	w.node(a.name, false)
	if check.OK(t, b.uses.remote.DropEnded(w.ctx)); !b.uses.remote.Has(ref(v)) {
		t.Error("it is not connected any more")
	}
	fails(t, b.unstage(w.ctx, dir, v.ID), errdefs.ErrUnavailable)
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: a.name}}
	check.OK(t, w.Get(w.ctx, client.ObjectKeyFromObject(node), node))
	before := node.DeepCopy()
	node.Spec.Taints = append(node.Spec.Taints, corev1.Taint{Key: v1alpha1.GoneTaint, Effect: corev1.TaintEffectNoExecute})
	check.OK(t, w.Patch(w.ctx, node, client.MergeFrom(before)))
	w.eventually("it is disconnected", func() bool {
		check.OK(t, b.uses.remote.DropEnded(w.ctx))
		return !b.uses.remote.Has(ref(v))
	})
	var pools v1alpha1.PoolList
	check.OK(t, w.List(w.ctx, &pools))
	if slices.ContainsFunc(pools.Items, func(p v1alpha1.Pool) bool { return p.Spec.NodeName == a.name }) {
		t.Error("its Pools are there, and it was disconnected")
	}
	check.OK(t, b.unstage(w.ctx, dir, v.ID))
	check.OK(t, s.Release(w.ctx, v.ID, b.name))
}

// TestReachedPoolGone: the machine of a home starts anew, and the pool is not there any more, or the record of the volume is damaged. What was given to other
// nodes has ended with the machine. The object says so though nobody can read the record; the node that used the volume disconnects, and the volume can be
// unstaged and released. If the machine goes on, nothing changes for those who use the volume.
func TestReachedPoolGone(t *testing.T) {
	for what, gone := range map[string]func(*machine){
		"PoolUnavailable": func(m *machine) {
			m.wrap = func(*memory.Pool) blockdev.Pool {
				return lazy.New("default", errors.New("no disk"), func(context.Context) (blockdev.Pool, error) { return nil, errors.New("no disk") })
			}
		},
		"RecordDamaged": func(m *machine) {
			m.hook = func(op string, _ blockdev.Ref) error {
				if op == "Get" {
					return fmt.Errorf("%w: damaged record", errdefs.ErrDataLoss)
				}
				return nil
			}
		},
	} {
		t.Run(what, func(t *testing.T) {
			w, a, b, s, v, dir := reached(t, spec("v"))
			check.OK(t, second(s.Claim(w.ctx, v.ID, on(b.name))))
			pool := b.uses.remote.Named("default")
			w.eventually("it is connected", func() bool {
				_, err := pool.Attach(w.ctx, ref(v), blockdev.Attachment{Keep: true})
				return err == nil
			})
			a.stop()
			gone(a)
			w.start(a)
			w.eventually("that is reported", func() bool {
				return slices.ContainsFunc(w.object(v.Name).Status.Health, func(p v1alpha1.Problem) bool { return p.Reason == what })
			})
			w.touched(v.Name)
			time.Sleep(time.Second) // nothing shows that the agent has looked at it
			if to := w.exportedTo(v.ID); to != b.name {
				t.Fatalf("while the kernel exports it, the object says that it is given to %q", to)
			}
			a.stop()
			a.network.Cut(true)
			for _, nqn := range a.network.Exported() { // the machine starts anew
				check.OK(t, a.network.Remove(w.ctx, nqn))
			}
			w.start(a)
			w.eventually("the object says that it is given to nobody", func() bool { return w.exportedTo(v.ID) == "" })
			check.OK(t, b.uses.remote.DropEnded(w.ctx))
			if b.uses.remote.Has(ref(v)) {
				t.Error("its user is still connected")
			}
			if err := second(w.homeOf(a, b).Open(w.ctx, v.ID, w.generation(v.Name))); err == nil || w.exportedTo(v.ID) != "" {
				t.Errorf("opened again: %v; the object says that it is given to %q", err, w.exportedTo(v.ID))
			}
			check.OK(t, b.unstage(w.ctx, dir, v.ID))
			check.OK(t, s.Release(soon(t), v.ID, b.name))
		})
	}
}

// TestReachedPoolGoneAlone: the same with a home that is in no network when it is back, as its kernel lacks what that needs.
func TestReachedPoolGoneAlone(t *testing.T) {
	w, a, b, s, v, _ := reached(t, spec("v"))
	check.OK(t, second(s.Claim(w.ctx, v.ID, on(b.name))))
	w.eventually("it is connected", func() bool {
		_, err := b.uses.remote.Named("default").Attach(w.ctx, ref(v), blockdev.Attachment{Keep: true})
		return err == nil
	})
	network := a.network
	a.stop()
	a.network = nil
	a.wrap = func(*memory.Pool) blockdev.Pool {
		return lazy.New("default", errors.New("no disk"), func(context.Context) (blockdev.Pool, error) { return nil, errors.New("no disk") })
	}
	a.with = func(o *agent.Options) { // as cmd/driver does
		o.Exporter = a.local
		a.local.ServeExports(w.ctx, volume.Exporting{Boot: "2", Locks: a.locks, Given: func(prefix string) (bool, error) {
			return slices.ContainsFunc(network.Exported(), func(nqn string) bool { return strings.HasPrefix(nqn, prefix) }), nil
		}})
	}
	w.start(a)
	w.eventually("that the pool is gone is reported", func() bool {
		return slices.ContainsFunc(w.object(v.Name).Status.Health, func(p v1alpha1.Problem) bool { return p.Reason == "PoolUnavailable" })
	})
	w.touched(v.Name)
	time.Sleep(time.Second) // nothing shows that the agent has looked at it
	if to := w.exportedTo(v.ID); to != b.name {
		t.Fatalf("while the kernel exports it, the object says that it is given to %q", to)
	}
	for _, nqn := range network.Exported() { // the machine starts anew
		check.OK(t, network.Remove(w.ctx, nqn))
	}
	w.touched(v.Name)
	w.eventually("the object says that it is given to nobody", func() bool { return w.exportedTo(v.ID) == "" })
	check.OK(t, b.uses.remote.DropEnded(w.ctx))
	if b.uses.remote.Has(ref(v)) {
		t.Error("its user is still connected")
	}
	check.OK(t, s.Release(soon(t), v.ID, b.name))
}

// TestReachedDeleted: a volume that is to be deleted, and is still exported, is deleted after its export has ended, if the object has counted that claim.
func TestReachedDeleted(t *testing.T) {
	w, a, b, _, v, _ := reached(t, spec("v"))
	check.OK(t, second(w.homeOf(a, b).Open(w.ctx, v.ID, w.claimFor(v.ID, b.name))))
	object := w.object(v.Name)
	before := object.DeepCopy()
	object.Spec.Claim, object.Spec.Delete = nil, object.UID
	check.OK(t, w.Patch(w.ctx, object, client.MergeFrom(before)))
	w.eventually("it is deleted", func() bool { return w.object(v.Name) == nil })
	if exported := a.network.Exported(); len(exported) != 0 {
		t.Errorf("exported is %v", exported)
	}
}

// TestReachedUnread: the export of a volume whose record has a label of the export that cannot be read, as of another version, stays while the volume is
// claimed. The volume can be released.
func TestReachedUnread(t *testing.T) {
	w, a, b := twoOf(t)
	s := w.calling(a)
	w.pooled(s, b)
	v, err := s.Create(w.ctx, anyNode("v", a.name))
	check.OK(t, err)
	check.OK(t, second(w.homeOf(a, b).Open(w.ctx, v.ID, w.claimFor(v.ID, b.name))))
	check.OK(t, second(a.disks[0].Open("default", nil).SetLabels(w.ctx, blockdev.Ref{Kind: v.ID.Kind, Key: v.ID.Key}, func(labels map[string]string) error {
		labels["export"] = "2/" + b.name
		return nil
	})))
	w.touched(v.Name)
	time.Sleep(time.Second) // nothing shows that the agent has looked at it
	if exported := a.network.Exported(); len(exported) != 1 {
		t.Errorf("while it is claimed, exported is %v", exported)
	}
	w.eventually("it is released", func() bool { return s.Release(soon(t), v.ID, b.name) == nil })
	if exported := a.network.Exported(); len(exported) != 0 {
		t.Errorf("released, exported is %v", exported)
	}
	check.OK(t, s.Delete(w.ctx, v.ID))
}

// TestReachedDamaged: the export of a volume whose record is damaged stays until the volume is released.
func TestReachedDamaged(t *testing.T) {
	drivertest.NeedRoot(t)
	var damaged atomic.Bool
	w, network := newEnvironment(t), &remotetest.Network{}
	a := w.begin(&machine{name: "node-1", ported: true, network: network, hook: func(op string, _ blockdev.Ref) error {
		if op == "Get" && damaged.Load() {
			return fmt.Errorf("%w: damaged record", errdefs.ErrDataLoss)
		}
		return nil
	}})
	b := w.begin(&machine{name: "node-2", ported: true, network: network})
	s := w.calling(a)
	w.pooled(s, b)
	v, err := s.Create(w.ctx, anyNode("v", a.name))
	check.OK(t, err)
	check.OK(t, second(w.homeOf(a, b).Open(w.ctx, v.ID, w.claimFor(v.ID, b.name))))
	damaged.Store(true)
	w.touched(v.Name)
	w.eventually("it is reported lost", func() bool { return v1alpha1.IsLost(w.object(v.Name)) })
	w.touched(v.Name)
	if exported := network.Exported(); len(exported) != 1 {
		t.Errorf("while it is claimed, exported is %v", exported)
	}
	w.eventually("it is released", func() bool { return s.Release(soon(t), v.ID, b.name) == nil })
	if exported := network.Exported(); len(exported) != 0 {
		t.Errorf("released, exported is %v", exported)
	}
	damaged.Store(false)
}
