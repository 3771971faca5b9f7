package cluster_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/cluster/agent"
	"github.com/ashlar-csi/ashlar/pkg/cluster/export"
	"github.com/ashlar-csi/ashlar/pkg/cluster/move"
	"github.com/ashlar-csi/ashlar/pkg/cluster/port"
	"github.com/ashlar-csi/ashlar/pkg/cluster/store"
	"github.com/ashlar-csi/ashlar/pkg/cluster/transfer"
	"github.com/ashlar-csi/ashlar/pkg/controller"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/rpc"
	"github.com/ashlar-csi/ashlar/pkg/volume"
	"github.com/ashlar-csi/ashlar/pkg/volume/storetest"
)

// served serves the port of a machine's agent, as cmd/driver does.
func (w *environment) served(m *machine) func(context.Context) error {
	server := port.Server{Node: m.name, Namespace: apitest.Namespace, Config: wrapped(apitest.Get(w).Agent(w, m.name))}
	server.Config.QPS = 0 // the default, as in a pod
	on, uses := m.agent, agent.UsedVolumes(nil)
	if m.network != nil {
		uses = m.uses.others
	}
	services := rpc.Services{SnapshotMetadata: controller.New(m.local), Locks: m.locks, Others: func(r grpc.ServiceRegistrar) {
		transfer.Register(r, on.OpenCopy, nil)
		export.Register(r, on.Exports(), on.Uses(uses))
		move.Register(r, on.Moving(), on.Moving(), on.Moving())
	}}
	listener := m.port
	return func(ctx context.Context) error { return server.Serve(ctx, listener, services) }
}

// newPortedCluster is newCluster with an agent that has a port, and a store that calls it.
func newPortedCluster(t testing.TB) (*environment, *machine, *store.Store) {
	t.Helper()
	w := newEnvironment(t)
	m := w.begin(&machine{name: nodeName, ported: true})
	return w, m, w.calling(m)
}

// calling starts a store that calls agents, and knows the pools of a machine.
func (w *environment) calling(m *machine) *store.Store {
	w.Helper()
	var err error
	w.agents, err = port.NewCallers(wrapped(apitest.Get(w).Controller(w)))
	check.OK(w, err)
	w.Cleanup(func() { check.OK(w, w.agents.Close()) })
	s, _ := w.store()
	w.pooled(s, m)
	return s
}

// snapshotOf makes a volume of 64 MiB with data in some blocks of 64 KiB, and a snapshot of it.
func (w *environment) snapshotOf(s *store.Store, m *machine, name string, blocks ...int64) (volume.Volume, volume.Snapshot) {
	w.Helper()
	v, err := s.Create(w.ctx, volume.Spec{Name: name, Size: volume.Range{Required: 64 * mib}, Nodes: []string{m.name}})
	check.OK(w, err)
	for _, n := range blocks {
		check.OK(w, storetest.WriteTo(m.disks[0].Open("default", nil))(w.ctx, v.ID, n*64<<10, []byte("some")))
	}
	snapshot, err := s.CreateSnapshot(w.ctx, "cut of "+name, v.ID)
	check.OK(w, err)
	return v, snapshot
}

func nothing(blockdev.Extent) error { return nil }

// tokenFor returns a token of a service account for an audience, which is bound to no pod. An administrator requests it.
func tokenFor(t testing.TB, account, audience string) string {
	t.Helper()
	admin, err := kubernetes.NewForConfig(apitest.Get(t).Config(apitest.Admin))
	check.OK(t, err)
	made, err := admin.CoreV1().ServiceAccounts(apitest.Namespace).CreateToken(t.Context(), account, &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{Audiences: []string{audience}}}, metav1.CreateOptions{})
	check.OK(t, err)
	return made.Status.Token
}

// call asks an agent about a snapshot, with a token. It does not check the key of the agent.
func (m *machine) call(ctx context.Context, token string, id volume.ID) error {
	c, err := rpc.Dial(m.port.Addr().String(), &tls.Config{InsecureSkipVerify: true}, func(context.Context, bool) (string, error) { return token, nil })
	if err != nil {
		return err
	}
	defer c.Close()
	stream, err := csi.NewSnapshotMetadataClient(c).GetMetadataAllocated(ctx, &csi.GetMetadataAllocatedRequest{SnapshotId: id.String()})
	if err == nil {
		_, err = stream.Recv()
	}
	return err
}

// TestPortCallers: an agent answers calls about snapshots only to the controller, and only with a token that was made for this agent.
func TestPortCallers(t *testing.T) {
	w, m, s := newPortedCluster(t)
	_, snapshot := w.snapshotOf(s, m, "v", 3)
	check.OK(t, m.call(w.ctx, tokenFor(t, "ashlar-controller", port.Audience(nodeName)), snapshot.ID))
	elsewhere := func() string {
		admin, err := kubernetes.NewForConfig(apitest.Get(t).Config(apitest.Admin))
		check.OK(t, err)
		_, err = admin.CoreV1().ServiceAccounts("default").Create(w.ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "ashlar-controller"}}, metav1.CreateOptions{})
		check.OK(t, client.IgnoreAlreadyExists(err))
		made, err := admin.CoreV1().ServiceAccounts("default").CreateToken(w.ctx, "ashlar-controller", &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{Audiences: []string{port.Audience(nodeName)}}}, metav1.CreateOptions{})
		check.OK(t, err)
		return made.Status.Token
	}
	forged := func() string { // a token of the controller for another agent, whose audience was replaced
		parts := strings.Split(tokenFor(t, "ashlar-controller", port.Audience("node-2")), ".")
		right := strings.Split(tokenFor(t, "ashlar-controller", port.Audience(nodeName)), ".")
		return parts[0] + "." + right[1] + "." + parts[2]
	}
	for _, c := range []struct{ name, token, refused string }{
		{"without", "", "there is no token"},
		{"with no token at all", "x", "that is no token of a service account"},
		{"with a static token", apitest.Admin, "that is no token of a service account"},
		{"with one that is too long", strings.Repeat("x", 9<<10), "a token of 9216 bytes"},
		{"with one for the API server", apitest.Get(t).Controller(t).BearerToken, "and not for ashlar.dev/agent/node-1"},
		{"with one for another agent", tokenFor(t, "ashlar-controller", port.Audience("node-2")), "and not for ashlar.dev/agent/node-1"},
		{"with one for another agent, forged", forged(), "the API server does not know the token"},
		{"as an agent", tokenFor(t, "ashlar-node", port.Audience(nodeName)), "system:serviceaccount:ashlar-system:ashlar-node may not call /csi.v1.SnapshotMetadata/"},
		{"as the controller of another namespace", elsewhere(), "system:serviceaccount:default:ashlar-controller may not call"},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := m.call(w.ctx, c.token, snapshot.ID)
			if !errors.Is(err, errdefs.ErrUnavailable) || !strings.Contains(err.Error(), c.refused) {
				t.Errorf("%v, want a refusal that says: %s", err, c.refused)
			}
			if len(c.token) > 40 && strings.Contains(fmt.Sprint(err), c.token[len(c.token)-20:]) {
				t.Errorf("the token is in the error: %v", err)
			}
		})
	}
	plain, err := net.Dial("tcp", m.port.Addr().String())
	check.OK(t, err)
	defer plain.Close()
	if err := tls.Client(plain, &tls.Config{InsecureSkipVerify: true, MaxVersion: tls.VersionTLS12}).HandshakeContext(w.ctx); err == nil {
		t.Error("TLS 1.2 is spoken")
	}
}

// TestPortKey: a server at the address of an agent that does not have the agent's key gets no calls.
func TestPortKey(t *testing.T) {
	w, m, s := newPortedCluster(t)
	_, snapshot := w.snapshotOf(s, m, "v", 3)
	other := w.begin(&machine{name: "node-2", ported: true})
	// As if node-2 had taken the address of node-1.
	callers, err := port.NewCallers(apitest.Get(t).Controller(t))
	check.OK(t, err)
	defer callers.Close()
	c, err := callers.Agent(nodeName, v1alpha1.AgentEndpoint{Address: other.port.Addr().String(), Fingerprint: m.port.Endpoint().Fingerprint})
	check.OK(t, err)
	stream, err := csi.NewSnapshotMetadataClient(c).GetMetadataAllocated(w.ctx, &csi.GetMetadataAllocatedRequest{SnapshotId: snapshot.ID.String()})
	if err == nil {
		_, err = stream.Recv()
	}
	if !errors.Is(err, errdefs.ErrUnavailable) || !strings.Contains(err.Error(), "who answers has the key "+other.port.Endpoint().Fingerprint) {
		t.Errorf("%v", err)
	}
	// As if node-2 had written its own address and key for node-1: the token is for node-1, so node-2 does not accept it.
	c, err = callers.Agent(nodeName, *other.port.Endpoint())
	check.OK(t, err)
	stream, err = csi.NewSnapshotMetadataClient(c).GetMetadataAllocated(w.ctx, &csi.GetMetadataAllocatedRequest{SnapshotId: snapshot.ID.String()})
	if err == nil {
		_, err = stream.Recv()
	}
	if !errors.Is(err, errdefs.ErrUnavailable) || !strings.Contains(err.Error(), "and not for ashlar.dev/agent/node-2") {
		t.Errorf("%v", err)
	}
	check.OK(t, s.Allocated(w.ctx, snapshot.ID, 0, nothing))
}

// TestPortWithoutNetwork: an agent that is in no network now, as its driver started without one, answers that it cannot export and use volumes now. It is not
// taken for one of an older version, which would not keep marks of what is written to a replica.
func TestPortWithoutNetwork(t *testing.T) {
	w := newEnvironment(t)
	m, other := w.begin(&machine{name: nodeName, ported: true}), w.begin(&machine{name: "node-2", ported: true})
	callers, err := port.NewCallers(apitest.Get(w).Agent(w, other.name))
	check.OK(t, err)
	defer callers.Close()
	c, err := callers.Agent(nodeName, *m.port.Endpoint())
	check.OK(t, err)
	id := volume.ID{Kind: blockdev.Volume, Pool: "default", Key: volume.KeyOf("v")}
	for call, err := range map[string]error{
		"Open":     second(export.HomeAt(c).Open(w.ctx, id, 1)),
		"BeginEra": second(export.HomeAt(c).BeginEra(w.ctx, id, 1)),
		"Close":    export.HomeAt(c).Close(w.ctx, id, 1, ""),
		"Modified": export.UserAt(c).Modified(w.ctx, id, 1, nil),
		"Hold":     second(export.UserAt(c).Hold(w.ctx, id, 1)),
	} {
		if !errors.Is(err, errdefs.ErrUnavailable) || errors.Is(err, errdefs.ErrUnknownCall) || !strings.Contains(fmt.Sprint(err), "--remote-address") {
			t.Errorf("%s: %v", call, err)
		}
	}
}

// TestPortRestart: an agent that was restarted has another key at another address, which later calls find. While it is stopped, or has no port, calls fail
// with ErrUnavailable.
func TestPortRestart(t *testing.T) {
	w := newEnvironment(t)
	m := w.begin(&machine{name: nodeName, ported: true})
	s := w.calling(m)
	_, snapshot := w.snapshotOf(s, m, "v", 3, 100, 900)
	check.OK(t, s.Allocated(w.ctx, snapshot.ID, 0, nothing))
	before := m.port.Endpoint()
	m.stop()
	fails(t, s.Allocated(w.ctx, snapshot.ID, 0, nothing), errdefs.ErrUnavailable)
	w.start(m)
	if m.port.Endpoint().Fingerprint == before.Fingerprint {
		t.Error("the key is that from before")
	}
	w.eventually("the agent is found again", func() bool { return s.Allocated(w.ctx, snapshot.ID, 0, nothing) == nil })

	m.ported = false
	m.stop()
	w.start(m)
	w.eventually("the agent has no port", func() bool {
		err := s.Allocated(w.ctx, snapshot.ID, 0, nothing)
		return errors.Is(err, errdefs.ErrUnavailable) && strings.Contains(err.Error(), "--agent-endpoint")
	})
}

// fragmented is a pool whose snapshots have many ranges: far more than are sent at once.
type fragmented struct{ *memory.Pool }

const fragments = 200000

func (f *fragmented) Allocated(ctx context.Context, _ blockdev.Ref, from int64, yield func(blockdev.Extent) error) error {
	for n := from / 256; n < fragments && ctx.Err() == nil; n++ {
		if e := (blockdev.Extent{Offset: n * 256, Length: 128}); e.Offset+e.Length > from {
			if err := yield(e); err != nil {
				return err
			}
		}
	}
	return ctx.Err()
}

// TestPortContinues: if an agent ends in the middle of an answer, the call fails, and does not look complete. The rest can be had of the restarted agent
// from where the first one stopped.
func TestPortContinues(t *testing.T) {
	w := newEnvironment(t)
	m := w.begin(&machine{name: nodeName, ported: true, wrap: func(p *memory.Pool) blockdev.Pool { return &fragmented{p} }})
	s := w.calling(m)
	_, snapshot := w.snapshotOf(s, m, "v")
	var all, have []blockdev.Extent
	check.OK(t, s.Allocated(w.ctx, snapshot.ID, 0, func(e blockdev.Extent) error { all = append(all, e); return nil }))
	if len(all) != fragments {
		t.Fatalf("%d ranges, want %d", len(all), fragments)
	}
	err := s.Allocated(w.ctx, snapshot.ID, 0, func(e blockdev.Extent) error {
		if have = append(have, e); len(have) == 1000 {
			m.stop()
		}
		return nil
	})
	fails(t, err, errdefs.ErrUnavailable)
	if len(have) >= len(all) {
		t.Fatalf("all %d ranges had come before the agent ended", len(have))
	}
	w.start(m)
	w.eventually("the rest has come", func() bool {
		last := have[len(have)-1]
		err := s.Allocated(w.ctx, snapshot.ID, last.Offset+last.Length, func(e blockdev.Extent) error { have = append(have, e); return nil })
		return err == nil
	})
	if !slices.Equal(have, all) {
		t.Errorf("%d ranges in two parts, want the %d that there are in one", len(have), len(all))
	}
}

// lying is a pool whose snapshots have the ranges that a test gives.
type lying struct {
	*memory.Pool
	says *[]blockdev.Extent
}

func (l *lying) Allocated(_ context.Context, _ blockdev.Ref, _ int64, yield func(blockdev.Extent) error) error {
	for _, e := range *l.says {
		if err := yield(e); err != nil {
			return err
		}
	}
	return nil
}

// TestPortLies: ranges from an agent are passed on only as long as they are possible: in order, and within the snapshot.
func TestPortLies(t *testing.T) {
	w := newEnvironment(t)
	var says []blockdev.Extent
	m := w.begin(&machine{name: nodeName, ported: true, wrap: func(p *memory.Pool) blockdev.Pool { return &lying{p, &says} }})
	s := w.calling(m)
	_, snapshot := w.snapshotOf(s, m, "v")
	for what, c := range map[string]struct {
		says []blockdev.Extent
		from int64
		good int // how many are passed on
	}{
		"the truth":      {[]blockdev.Extent{{Offset: 0, Length: 4096}, {Offset: 4096, Length: snapshot.Size - 4096}}, 0, 2},
		"nothing":        {[]blockdev.Extent{{Offset: 0, Length: 4096}, {Offset: 8192}}, 0, 1},
		"less than that": {[]blockdev.Extent{{Offset: 0, Length: -4096}}, 0, 0},
		"before it":      {[]blockdev.Extent{{Offset: -4096, Length: 8192}}, 0, 0},
		"beyond it":      {[]blockdev.Extent{{Offset: snapshot.Size, Length: 4096}}, 0, 0},
		"too much":       {[]blockdev.Extent{{Offset: 4096, Length: 1<<63 - 1}}, 0, 0},
		"out of order":   {[]blockdev.Extent{{Offset: 8192, Length: 4096}, {Offset: 0, Length: 4096}}, 0, 1},
		"twice":          {[]blockdev.Extent{{Offset: 8192, Length: 4096}, {Offset: 8192, Length: 4096}}, 0, 1},
		"what was had":   {[]blockdev.Extent{{Offset: 0, Length: 4096}}, 4096, 0},
	} {
		says = c.says
		good := 0
		err := s.Allocated(w.ctx, snapshot.ID, c.from, func(blockdev.Extent) error { good++; return nil })
		if good != c.good || (err == nil) != (good == len(c.says)) || err != nil && !errors.Is(err, errdefs.ErrUnavailable) {
			t.Errorf("%s: %d ranges are passed on, %v", what, good, err)
		}
	}
}

// TestPortEnds: when a caller ends its call, the agent stops, and releases the lock of the snapshot.
func TestPortEnds(t *testing.T) {
	w := newEnvironment(t)
	m := w.begin(&machine{name: nodeName, ported: true, wrap: func(p *memory.Pool) blockdev.Pool { return &fragmented{p} }})
	s := w.calling(m)
	_, snapshot := w.snapshotOf(s, m, "v")
	held := func() bool {
		unlock, _ := m.locks.TryLock([]string{keylock.Snapshot(snapshot.ID.Key)}, nil)
		if unlock != nil {
			unlock()
		}
		return unlock == nil
	}
	ctx, cancel := context.WithCancel(w.ctx)
	err := s.Allocated(ctx, snapshot.ID, 0, func(blockdev.Extent) error {
		time.Sleep(100 * time.Millisecond) // the agent waits meanwhile, as it cannot send the rest
		if !held() {
			t.Error("the agent had all on the way at once")
		}
		cancel()
		return ctx.Err()
	})
	fails(t, err, context.Canceled)
	w.eventually("the agent has let go of the snapshot", func() bool { return !held() })
	check.OK(t, s.DeleteSnapshot(w.ctx, snapshot.ID))
	fails(t, s.Allocated(w.ctx, snapshot.ID, 0, nothing), errdefs.ErrNotFound)
}

// TestPortWithoutAPI: while the API server does not answer, only calls with a token that was checked a moment ago are served.
func TestPortWithoutAPI(t *testing.T) {
	w, m, s := newPortedCluster(t)
	_, snapshot := w.snapshotOf(s, m, "v", 3)
	known, unknown := tokenFor(t, "ashlar-controller", port.Audience(nodeName)), tokenFor(t, "ashlar-controller", port.Audience(nodeName))
	if known == unknown {
		time.Sleep(time.Second) // the times in a token are whole seconds, so that both may be the same
		unknown = tokenFor(t, "ashlar-controller", port.Audience(nodeName))
	}
	check.OK(t, m.call(w.ctx, known, snapshot.ID))
	thaw := apitest.Get(t).Freeze(t)
	check.OK(t, m.call(w.ctx, known, snapshot.ID))
	ctx, cancel := context.WithTimeout(w.ctx, 20*time.Second)
	defer cancel()
	fails(t, m.call(ctx, unknown, snapshot.ID), errdefs.ErrUnavailable)
	thaw()
	w.eventually("the other one is known", func() bool { return m.call(w.ctx, unknown, snapshot.ID) == nil })
}

// TestPortElsewhere: snapshots on two nodes cannot be compared, and each node answers for its own.
func TestPortElsewhere(t *testing.T) {
	w, m, s := newPortedCluster(t)
	other := w.begin(&machine{name: "node-2", ported: true})
	w.pooled(s, other)
	_, here := w.snapshotOf(s, m, "here", 3)
	_, there := w.snapshotOf(s, other, "there", 4)
	for _, c := range []struct {
		of   volume.Snapshot
		want int64
	}{{here, 3}, {there, 4}} {
		var have []blockdev.Extent
		check.OK(t, s.Allocated(w.ctx, c.of.ID, 0, func(e blockdev.Extent) error { have = append(have, e); return nil }))
		if len(have) != 1 || have[0].Offset > c.want*64<<10 || have[0].Offset+have[0].Length <= c.want*64<<10 {
			t.Errorf("%s has %v", c.of.ID, have)
		}
	}
	fails(t, s.Changed(w.ctx, here.ID, there.ID, 0, nothing), errdefs.ErrNotFound)
	// An agent is asked about a snapshot of another node.
	fails(t, m.call(w.ctx, tokenFor(t, "ashlar-controller", port.Audience(nodeName)), there.ID), errdefs.ErrNotFound)
}

// TestGuardEndpoints: the address and the key of an agent (status.agent) can be written by that agent alone.
func TestGuardEndpoints(t *testing.T) {
	w := newGuarded(t)
	const alone = "where the agent of a node is (status.agent), that agent says, and nobody else"
	endpoint := func(digit string) string {
		return `{"agent":{"address":"10.0.0.1:9812","fingerprint":"` + strings.Repeat(digit, 64) + `"}}`
	}
	w.try(t, nodeName, []attempt{
		reported(w, "its own", w.pool, endpoint("0"), ""),
		reported(w, "that of another node", w.poolOfOthers, endpoint("0"), "denied request"), // two policies refuse it, so the message may be of either
	})
	w.tryAs(t, apitest.Get(t).Config(apitest.Admin), []attempt{
		reported(w, "by an administrator", w.pool, endpoint("0"), alone),
		reported(w, "other things by an administrator", w.pool, `{"total":1}`, ""),
	})
	c, err := client.New(apitest.Get(t).Agent(t, nodeName), client.Options{Scheme: w.Scheme()})
	check.OK(t, err)
	check.OK(t, reported(w, "", w.pool, endpoint("1"), "").write(c))
	w.tryAs(t, apitest.Get(t).Config(apitest.Admin), []attempt{
		reported(w, "taken away by an administrator", w.pool, `{"agent":null}`, alone),
		reported(w, "beside it, by an administrator", w.pool, `{"total":1}`, ""),
		changed(w, "the spec, by an administrator", w.pool, func(o *v1alpha1.Pool) { o.Spec.Default = true }, ""),
	})
	w.tryAs(t, apitest.Get(t).Agent(t, nodeName), []attempt{
		reported(w, "no fingerprint", w.pool, `{"agent":{"address":"10.0.0.1:9812","fingerprint":"0"}}`, "should match"),
	})
}

// TestGuardTokens: a service account of the driver may request only tokens for agents, bound to its own pod, for ten minutes.
func TestGuardTokens(t *testing.T) {
	newEnvironment(t)
	config, another := apitest.Get(t).Controller(t), apitest.Get(t).Controller(t)
	pod := func(of *rest.Config) *authenticationv1.BoundObjectReference {
		kube, err := kubernetes.NewForConfig(of)
		check.OK(t, err)
		me, err := kube.AuthenticationV1().SelfSubjectReviews().Create(t.Context(), &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
		check.OK(t, err)
		extra := me.Status.UserInfo.Extra
		return &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: extra["authentication.kubernetes.io/pod-name"][0]}
	}
	kube, err := kubernetes.NewForConfig(config)
	check.OK(t, err)
	minutes, hours := int64(600), int64(36000)
	right := authenticationv1.TokenRequestSpec{Audiences: []string{port.Audience(nodeName)}, ExpirationSeconds: &minutes, BoundObjectRef: pod(config)}
	check.OK(t, podUID(t, right.BoundObjectRef))
	for _, c := range []struct {
		name, account string
		edit          func(*authenticationv1.TokenRequestSpec)
		refused       string
	}{
		{"as it should be", "ashlar-controller", func(*authenticationv1.TokenRequestSpec) {}, ""},
		{"for the API server", "ashlar-controller", func(s *authenticationv1.TokenRequestSpec) { s.Audiences = nil }, "for its agents alone"},
		{"for somebody else too", "ashlar-controller", func(s *authenticationv1.TokenRequestSpec) { s.Audiences = append(s.Audiences, "https://test") }, "for its agents alone"},
		{"of no pod", "ashlar-controller", func(s *authenticationv1.TokenRequestSpec) { s.BoundObjectRef = nil }, "of its own pod alone"},
		{"of another pod", "ashlar-controller", func(s *authenticationv1.TokenRequestSpec) {
			s.BoundObjectRef = pod(another)
			check.OK(t, podUID(t, s.BoundObjectRef))
		}, "of its own pod alone"},
		{"for hours", "ashlar-controller", func(s *authenticationv1.TokenRequestSpec) { s.ExpirationSeconds = &hours }, "for 600 seconds"},
		{"of the agents", "ashlar-node", func(*authenticationv1.TokenRequestSpec) {}, "is forbidden"},
	} {
		t.Run(c.name, func(t *testing.T) {
			request := &authenticationv1.TokenRequest{Spec: *right.DeepCopy()}
			c.edit(&request.Spec)
			_, err := kube.CoreV1().ServiceAccounts(apitest.Namespace).CreateToken(t.Context(), c.account, request, metav1.CreateOptions{})
			switch {
			case c.refused == "" && err != nil:
				t.Error(err)
			case c.refused != "" && (!apierrors.IsInvalid(err) && !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), c.refused)):
				t.Errorf("%v, want a refusal that says: %s", err, c.refused)
			}
		})
	}
}

// podUID sets the UID in a reference to a pod.
func podUID(t testing.TB, ref *authenticationv1.BoundObjectReference) error {
	admin, err := kubernetes.NewForConfig(apitest.Get(t).Config(apitest.Admin))
	if err != nil {
		return err
	}
	pod, err := admin.CoreV1().Pods(apitest.Namespace).Get(t.Context(), ref.Name, metav1.GetOptions{})
	if err == nil {
		ref.UID = pod.UID
	}
	return err
}
