package main

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/process"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/csimap"
)

const testNode = "node-1"

// clusterNode adds the node testNode to the API server until the test ends. Then it also deletes the pools.
func clusterNode(t *testing.T) {
	t.Helper()
	scheme := runtime.NewScheme()
	check.OK(t, errors.Join(v1alpha1.AddToScheme(scheme), corev1.AddToScheme(scheme)))
	kube, err := client.New(apitest.Get(t).Config(apitest.Admin), client.Options{Scheme: scheme})
	check.OK(t, err)
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: testNode}}
	check.OK(t, kube.Create(t.Context(), n))
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	check.OK(t, kube.Status().Update(t.Context(), n))
	t.Cleanup(func() {
		check.OK(t, errors.Join(kube.Delete(context.Background(), n), kube.DeleteAllOf(context.Background(), &v1alpha1.Pool{})))
	})
}

func probed(t *testing.T, p *process.Driver, want bool) {
	t.Helper()
	for end := time.Now().Add(2 * time.Minute); ; time.Sleep(20 * time.Millisecond) {
		r, err := p.Probe(t.Context(), &csi.ProbeRequest{})
		if err == nil && r.GetReady().GetValue() == want {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("Probe: %v, %v; want ready %v", r, err, want)
		}
	}
}

// TestCluster: a controller and a node, as two processes that share an API server alone. They start without it, and the node's calls never need it.
func TestCluster(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := drivertest.Dir(t)
	server := apitest.Get(t)
	clusterNode(t)
	kubeconfig := filepath.Join(dir, "kubeconfig")
	if err := server.Kubeconfig(server.Config(apitest.Admin), kubeconfig); err != nil {
		t.Fatal(err)
	}
	if err := server.Kubeconfig(server.Agent(t, testNode), kubeconfig+".node"); err != nil {
		t.Fatal(err)
	}
	thaw := server.Freeze(t)
	address := drivertest.FreeAddresses(t, 1)[0]
	page := "http://" + address + "/"
	controller := started(t, dir+"/c", program, "--mode=controller", "--kubeconfig="+kubeconfig, "--page="+address)
	node := started(t, dir+"/n", program, "--mode=node", "--kubeconfig="+kubeconfig+".node", "--node-id="+testNode, "--max-volumes=7", "--pool="+testPool(dir))
	ctx := t.Context()

	probed(t, controller, false)
	shows(t, page, "the objects of the cluster have not been read yet")
	probed(t, node, true)
	info, err := node.NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
	if err != nil || info.GetNodeId() != testNode || info.GetMaxVolumesPerNode() != 7 {
		t.Errorf("NodeGetInfo: %v, %v", info, err)
	}
	if _, err := controller.ListVolumes(ctx, &csi.ListVolumesRequest{}); status.Code(err) != codes.Unavailable {
		t.Errorf("ListVolumes without an API server: %v", err)
	}
	thaw()
	probed(t, controller, true)

	if _, err := controller.NodeGetInfo(ctx, &csi.NodeGetInfoRequest{}); status.Code(err) != codes.Unimplemented {
		t.Errorf("NodeGetInfo of the controller: %v", err)
	}
	if _, err := node.ListVolumes(ctx, &csi.ListVolumesRequest{}); status.Code(err) != codes.Unimplemented {
		t.Errorf("ListVolumes of the node: %v", err)
	}
	for _, p := range []*process.Driver{controller, node} {
		if !offers(t, p, csi.PluginCapability_Service_CONTROLLER_SERVICE) || offers(t, p, csi.PluginCapability_Service_SNAPSHOT_METADATA_SERVICE) {
			t.Error("the services of the plugin are not those of a cluster")
		}
	}

	// Another driver on this node, as of a second DaemonSet, does nothing.
	refused(t, drive(t, "--mode=node", "--kubeconfig="+kubeconfig+".node", "--node-id="+testNode, "--endpoint=unix://"+dir+"/n/csi.sock", "--pool=other=file://"+dir+"/other"), "another process serves")
	scheme := runtime.NewScheme()
	kube, err := client.New(server.Config(apitest.Admin), client.Options{Scheme: scheme})
	if err = errors.Join(err, v1alpha1.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	if err := kube.Get(ctx, client.ObjectKey{Name: testNode + ".other"}, &v1alpha1.Pool{}); !apierrors.IsNotFound(err) {
		t.Errorf("the Pool of a driver that was refused: %v", err)
	}

	capability := co.Capability("", co.Writer)
	inline := node.Inline("csi-inline", capability, map[string]string{"size": "16Mi"})
	if err := inline.Publish(ctx, inline.Target("pod"), false); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("an inline ephemeral volume that nobody switched on: %v", err)
	}
	create := co.Request("v", "", 16<<20)
	create.VolumeCapabilities[0] = capability
	create.AccessibilityRequirements = &csi.TopologyRequirement{Requisite: []*csi.Topology{csimap.Topology(testNode)}}
	cluster := *controller.Client
	cluster.NodeClient, cluster.Node = node.NodeClient, testNode
	var v *co.Volume
	for end := time.Now().Add(2 * time.Minute); ; time.Sleep(20 * time.Millisecond) {
		if v, err = cluster.Create(ctx, create); err == nil {
			break
		}
		if time.Now().After(end) { // the node has to report its pools first
			t.Fatal(err)
		}
	}
	shows(t, page, v.ID)
	shows(t, page+"volume?id="+v.ID, "no node may use it now")
	check.OK(t, v.Claim(ctx))
	check.OK(t, v.Stage(ctx)) // the node then knows the claim
	shows(t, page+"volume?id="+v.ID, "<dd>"+testNode+"</dd>")
	check.OK(t, v.Unstage(ctx))
	thaw = server.Freeze(t)
	if err := v.Stage(ctx); err != nil {
		t.Errorf("NodeStageVolume without an API server: %v", err)
	}
	if err := v.Unstage(ctx); err != nil {
		t.Errorf("NodeUnstageVolume without an API server: %v", err)
	}
	thaw()
	check.OK(t, v.Release(ctx))
	check.OK(t, v.Delete(ctx))
	stopped(t, controller)
	stopped(t, node)
}
