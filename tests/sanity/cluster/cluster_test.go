// Package cluster runs csi-test's sanity suite over the parts of a cluster: the controller
// and a node, which talk through a real API server only.
package cluster

import (
	"context"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pools"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/agent"
	"github.com/ashlar-csi/ashlar/pkg/cluster/store"
	"github.com/ashlar-csi/ashlar/pkg/controller"
	"github.com/ashlar-csi/ashlar/pkg/identity"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/node"
	"github.com/ashlar-csi/ashlar/pkg/rpc"
	"github.com/ashlar-csi/ashlar/pkg/volume"
	"github.com/ashlar-csi/ashlar/tests/sanity/suite"
)

func TestMain(m *testing.M) { apitest.Main(m) }

const limit = 4

func TestSanity(t *testing.T) {
	drivertest.NeedRoot(t)
	drivers := map[string]suite.Driver{} // of the cluster: all runs of the suite are in one
	for _, kind := range suite.Kinds() {
		drivers[kind] = start(t, apitest.Get(t), kind)
	}
	suite.Run(t, suite.Kinds(), func(kind string) suite.Driver { return drivers[kind] })
}

// start starts a controller, and a node that has a pool of a kind; both are named after it.
func start(t *testing.T, server *apitest.Server, pool string) suite.Driver {
	name := "node-" + pool
	ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), ktesting.NewLogger(t, ktesting.NewConfig())))
	dir := drivertest.Dir(t)
	driver := suite.Driver{Dir: dir, Socket: filepath.Join(dir, "node.sock"), Controller: filepath.Join(dir, "controller.sock"), Pool: pool}
	var parts sync.WaitGroup
	run := func(part func(context.Context) error) {
		parts.Go(func() {
			if err := part(ctx); err != nil && ctx.Err() == nil {
				t.Error(err)
			}
		})
	}

	kube, err := kubernetes.NewForConfig(server.Config(apitest.Admin))
	check.OK(t, err)
	n, err := kube.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	check.OK(t, err)
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	_, err = kube.CoreV1().Nodes().UpdateStatus(ctx, n, metav1.UpdateOptions{})
	check.OK(t, err)

	mounts, err := mount.LoadTable()
	check.OK(t, err)
	disk, err := pools.Open(ctx, pool, suite.PoolURL(t, pool, dir))
	check.OK(t, err)
	local, err := volume.NewLocal(ctx, name, []blockdev.Pool{disk}, mounts, 0)
	check.OK(t, err)
	locks := &keylock.Table{}
	a, err := agent.New(server.Agent(t, name), local, agent.Options{Driver: cluster.DefaultDriver, Pools: []agent.Pool{{Pool: disk, Kind: pool}}, Locks: locks, MaxVolumes: limit})
	check.OK(t, err)
	run(a.Run)
	without := csi.PluginCapability_Service_SNAPSHOT_METADATA_SERVICE
	listener, err := rpc.Listen(driver.Socket)
	check.OK(t, err)
	run(func(ctx context.Context) error {
		return rpc.Serve(ctx, listener, rpc.Services{Identity: identity.New("block.csi.ashlar.dev", "test", nil, without),
			Node: node.New(ctx, claims{local, a}, mounts, node.Options{MaxVolumes: limit, Claims: true}), Locks: locks})
	})

	s, err := store.New(server.Config(apitest.Admin), store.Options{GoneGrace: time.Hour, AbandonGrace: time.Hour, Driver: cluster.DefaultDriver})
	check.OK(t, err)
	run(s.Run)
	other, err := rpc.Listen(driver.Controller)
	check.OK(t, err)
	run(func(ctx context.Context) error {
		c := controller.New(s)
		return rpc.Serve(ctx, other, rpc.Services{Identity: identity.New("block.csi.ashlar.dev", "test", s.Ready, without), Controller: c, GroupController: c})
	})
	t.Cleanup(func() {
		cancel()
		parts.Wait()
		check.OK(t, disk.Close())
	})
	for end := time.Now().Add(2 * time.Minute); ; time.Sleep(20 * time.Millisecond) {
		c, err := s.Capacity(ctx, pool, volume.NotEncrypted, name)
		if err == nil && c.Total > 0 {
			return driver
		}
		if time.Now().After(end) {
			t.Fatalf("the controller does not see the node: %v", err)
		}
	}
}

// claims are those of the cluster.
type claims struct {
	*volume.Local
	agent *agent.Agent
}

func (c claims) AwaitClaim(ctx context.Context, id volume.ID, generation int64) error {
	return c.agent.AwaitClaim(ctx, id, generation)
}

func (c claims) Claimed(ctx context.Context, v volume.Volume, readOnly bool) (volume.Claim, bool) {
	return c.agent.Claimed(ctx, v.ID, readOnly)
}
