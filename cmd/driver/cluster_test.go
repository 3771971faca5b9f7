package main

import (
	"errors"
	"os"
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
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/process"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/csimap"
)

const testNode = "node-1"

func clusterNode(t *testing.T) {
	t.Helper()
	kube, err := kubernetes.NewForConfig(apitest.Get(t).Config(apitest.Admin))
	if err == nil {
		var n *corev1.Node
		if n, err = kube.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: testNode}}, metav1.CreateOptions{}); err == nil {
			n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
			_, err = kube.CoreV1().Nodes().UpdateStatus(t.Context(), n, metav1.UpdateOptions{})
		}
	}
	if err != nil {
		t.Fatal(err)
	}
}

// part starts a part of a cluster in a directory of its own.
func part(t *testing.T, dir string, flags ...string) *process.Driver {
	t.Helper()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	p, err := process.Start(program, filepath.Join(dir, "csi.sock"), flags...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.Conn.Close()
		_ = p.Command.Process.Kill() // it may be gone
		<-p.Exited
	})
	return p
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

// TestCluster: a controller and a node are two processes that share an API server only.
// They start without one, and the node's calls never need it.
func TestCluster(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := drivertest.Dir(t)
	server := apitest.Get(t)
	clusterNode(t)
	kubeconfig := filepath.Join(dir, "kubeconfig")
	if err := server.Kubeconfig(apitest.Admin, kubeconfig); err != nil {
		t.Fatal(err)
	}
	thaw := server.Freeze(t)
	controller := part(t, dir+"/c", "--mode=controller", "--kubeconfig="+kubeconfig)
	node := part(t, dir+"/n", "--mode=node", "--kubeconfig="+kubeconfig, "--node-id="+testNode, "--max-volumes=7", "--pool="+testPool(dir))
	ctx := t.Context()

	probed(t, controller, false)
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

	// Another driver on this node (two DaemonSets select it, say) does nothing.
	refused(t, drive(t, "--mode=node", "--kubeconfig="+kubeconfig, "--node-id="+testNode, "--endpoint=unix://"+dir+"/n/csi.sock", "--pool=other=file://"+dir+"/other"), "another process serves")
	scheme := runtime.NewScheme()
	kube, err := client.New(server.Config(apitest.Admin), client.Options{Scheme: scheme})
	if err = errors.Join(err, v1alpha1.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	if err := kube.Get(ctx, client.ObjectKey{Name: testNode + ".other"}, &v1alpha1.Pool{}); !apierrors.IsNotFound(err) {
		t.Errorf("the Pool of a driver that was refused: %v", err)
	}

	capability := &csi.VolumeCapability{AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER}}
	if _, err := node.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{VolumeId: "csi-inline", TargetPath: filepath.Join(dir, "inline"), VolumeCapability: capability,
		VolumeContext: map[string]string{"csi.storage.k8s.io/ephemeral": "true", "size": "16Mi"}}); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("an inline ephemeral volume that nobody switched on: %v", err)
	}
	create := &csi.CreateVolumeRequest{Name: "v", VolumeCapabilities: []*csi.VolumeCapability{capability},
		CapacityRange:             &csi.CapacityRange{RequiredBytes: 16 << 20},
		AccessibilityRequirements: &csi.TopologyRequirement{Requisite: []*csi.Topology{csimap.Topology(testNode)}}}
	var made *csi.CreateVolumeResponse
	for end := time.Now().Add(2 * time.Minute); ; time.Sleep(20 * time.Millisecond) {
		if made, err = controller.CreateVolume(ctx, create); err == nil {
			break
		}
		if time.Now().After(end) { // the node has to report its pools first
			t.Fatal(err)
		}
	}
	id := made.GetVolume().GetVolumeId()
	if _, err := controller.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{VolumeId: id, NodeId: testNode, VolumeCapability: capability}); err != nil {
		t.Fatal(err)
	}
	staging := filepath.Join(dir, "staging")
	if err := os.Mkdir(staging, 0o700); err != nil {
		t.Fatal(err)
	}
	// With it, the node comes to know of the claim.
	if _, err := node.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging, VolumeCapability: capability}); err != nil {
		t.Fatal(err)
	}
	if _, err := node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging}); err != nil {
		t.Fatal(err)
	}
	thaw = server.Freeze(t)
	if _, err := node.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging, VolumeCapability: capability}); err != nil {
		t.Errorf("NodeStageVolume without an API server: %v", err)
	}
	if _, err := node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging}); err != nil {
		t.Errorf("NodeUnstageVolume without an API server: %v", err)
	}
	thaw()
	if _, err := controller.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: testNode}); err != nil {
		t.Fatal(err)
	}
	if _, err := controller.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: id}); err != nil {
		t.Fatal(err)
	}
	stopped(t, controller)
	stopped(t, node)
}
