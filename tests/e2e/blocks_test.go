package e2e

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clients "k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/process"
)

// calling starts a controller that asks the agents, with the account and the pod that the real one has.
func (p *parts) calling() *process.Driver {
	p.Helper()
	admin, err := clients.NewForConfig(apitest.Get(p).Config(apitest.Admin))
	check.OK(p, err)
	binding := &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "ashlar-controller-everything"},
		RoleRef:  rbacv1.RoleRef{APIGroup: "rbac.authorization.k8s.io", Kind: "ClusterRole", Name: "cluster-admin"},
		Subjects: []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: apitest.Namespace, Name: "ashlar-controller"}}}
	_, err = admin.RbacV1().ClusterRoleBindings().Create(p.Context(), binding, metav1.CreateOptions{})
	check.OK(p, client.IgnoreAlreadyExists(err))
	check.OK(p, apitest.Get(p).KubeconfigIn(apitest.Get(p).Controller(p), apitest.Namespace, p.dir+"/calling.kubeconfig"))
	return p.part("calling", "--mode=controller", "--snapshot-metadata", "--kubeconfig="+p.dir+"/calling.kubeconfig")
}

// device has a raw volume on its node for a moment.
func (p *parts) device(id, node string, use func(device *os.File)) {
	p.Helper()
	p.called(codes.OK, publish(p.controller, id, node, writer))
	agent, staging, target := p.agents[node], filepath.Join(p.dir, id+".staging"), filepath.Join(p.dir, id)
	check.OK(p, os.Mkdir(staging, 0o700))
	_, err := agent.NodeStageVolume(p.Context(), &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging, VolumeCapability: writer})
	check.OK(p, err)
	_, err = agent.NodePublishVolume(p.Context(), &csi.NodePublishVolumeRequest{VolumeId: id, StagingTargetPath: staging, TargetPath: target, VolumeCapability: writer})
	check.OK(p, err)
	f, err := os.OpenFile(target, os.O_RDWR, 0)
	check.OK(p, err)
	use(f)
	check.OK(p, errors.Join(f.Sync(), f.Close()))
	_, err = agent.NodeUnpublishVolume(p.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: target})
	check.OK(p, err)
	_, err = agent.NodeUnstageVolume(p.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging})
	check.OK(p, err)
	check.OK(p, os.Remove(staging))
	_, err = p.controller.ControllerUnpublishVolume(p.Context(), &csi.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: node})
	check.OK(p, err)
}

type blocksAnswer interface{ GetBlockMetadata() []*csi.BlockMetadata }

func all(next func() (blocksAnswer, error)) (ranges []*csi.BlockMetadata, err error) {
	for {
		m, err := next()
		if errors.Is(err, io.EOF) {
			return ranges, nil
		}
		if err != nil {
			return ranges, err
		}
		ranges = append(ranges, m.GetBlockMetadata()...)
	}
}

// blocks are those that a snapshot has, or with a base those that changed since.
func (p *parts) blocks(c *process.Driver, base, snapshot string) (ranges []*csi.BlockMetadata, err error) {
	if base == "" {
		stream, err := c.GetMetadataAllocated(p.Context(), &csi.GetMetadataAllocatedRequest{SnapshotId: snapshot})
		check.OK(p, err)
		return all(func() (blocksAnswer, error) { return stream.Recv() })
	}
	stream, err := c.GetMetadataDelta(p.Context(), &csi.GetMetadataDeltaRequest{BaseSnapshotId: base, TargetSnapshotId: snapshot})
	check.OK(p, err)
	return all(func() (blocksAnswer, error) { return stream.Recv() })
}

// TestBlocks: a backup by changed blocks: all of a volume and two increments, restored on another node, have the same bytes; the driver's
// parts are processes, with the flags that the manifests give them, and an agent is killed in between.
func TestBlocks(t *testing.T) {
	p := start(t)
	for i, address := range drivertest.FreeAddresses(t, len(nodes)) {
		node := nodes[i]
		p.agents[node].Close()
		config := p.dir + "/" + node + ".kubeconfig"
		check.OK(t, apitest.Get(t).KubeconfigIn(apitest.Get(t).Agent(t, node), apitest.Namespace, config))
		p.agents[node] = p.part(node, "--mode=node", "--node-id="+node, "--kubeconfig="+config, "--pool=default=file://"+p.dir+"/"+node+"/pool?reservePercent=0", "--agent-endpoint="+address)
	}
	c := p.calling()
	const size, block = 32 * miB, 64 << 10
	v := p.made(request("data", size, nodes[0]))
	var snapshots []string
	var backup [][]byte // of each snapshot, all that is listed
	var lists [][]*csi.BlockMetadata
	var last []byte
	for n, blocks := range [][]int64{{0, 1, 2, 3, 100, 511}, {2, 100, 300}, {2, 3, 301, 511}} {
		p.device(v.GetVolumeId(), nodes[0], func(device *os.File) {
			for _, at := range blocks {
				_, err := device.WriteAt([]byte{byte(n + 1), 1, 2, 3}, at*block)
				check.OK(t, err)
			}
			if n == 2 { // and one that is zeros again
				_, err := device.WriteAt(make([]byte, block), 300*block)
				check.OK(t, err)
			}
		})
		made, err := c.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: string(rune('a' + n)), SourceVolumeId: v.GetVolumeId()})
		check.OK(t, err)
		base := ""
		if n > 0 {
			base = snapshots[n-1]
		}
		snapshots = append(snapshots, made.GetSnapshot().GetSnapshotId())
		var list []*csi.BlockMetadata
		p.eventually("the agent answers", func() bool {
			list, err = p.blocks(c, base, snapshots[n])
			return err == nil
		})
		total := int64(0)
		for _, r := range list {
			total += r.GetSizeBytes()
		}
		if total == 0 || (n > 0 && total > int64(len(blocks)+1)*block) { // preallocated space may count as data
			t.Errorf("snapshot %d: %d bytes for %d blocks: %v", n, total, len(blocks), list)
		}
		restored := p.made(co.FromSnapshot(request("read"+base, size, nodes[0]), snapshots[n]))
		var bytes []byte
		p.device(restored.GetVolumeId(), nodes[0], func(device *os.File) {
			for _, r := range list {
				part := make([]byte, r.GetSizeBytes())
				_, err := device.ReadAt(part, r.GetByteOffset())
				check.OK(t, err)
				bytes = append(bytes, part...)
			}
			last = make([]byte, size)
			_, err := device.ReadAt(last, 0)
			check.OK(t, err)
		})
		backup, lists = append(backup, bytes), append(lists, list)
		if n == 0 { // between full backup and increment
			p.agents[nodes[0]].Kill()
			if _, err := p.blocks(c, "", snapshots[0]); status.Code(err) != codes.Unavailable {
				t.Errorf("without an agent: %v", err)
			}
			check.OK(t, p.agents[nodes[0]].Start())
			p.ready(p.agents[nodes[0]])
		}
	}
	elsewhere := p.made(request("restored", size, nodes[1]))
	p.device(elsewhere.GetVolumeId(), nodes[1], func(device *os.File) {
		for n, list := range lists {
			for _, r := range list {
				_, err := device.WriteAt(backup[n][:r.GetSizeBytes()], r.GetByteOffset())
				check.OK(t, err)
				backup[n] = backup[n][r.GetSizeBytes():]
			}
		}
		have := make([]byte, size)
		_, err := device.ReadAt(have, 0)
		check.OK(t, err)
		if string(have) != string(last) {
			t.Error("what was restored differs")
		}
	})
	_, err := p.blocks(c, "", snapshots[0]+"0")
	if code := status.Code(err); code != codes.InvalidArgument && code != codes.NotFound {
		t.Errorf("of no snapshot: %v", err)
	}
}
