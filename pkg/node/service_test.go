package node_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lazy"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/csimap"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/node"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

const (
	nodeName = "node-1"

	// nothing is an ID of this driver that no volume has; foreign is no ID of this driver.
	nothing = "vol.fast.00000000000000000000000000000000"
	foreign = "csi-of-another-driver"
)

// block stands for block access where a filesystem is named.
const block = co.Block

// capability returns a capability for a filesystem, or block, that lets several pods of a node write.
func capability(filesystem string) *csi.VolumeCapability {
	return co.Capability(filesystem, co.MultiWriter)
}

// fixture is the service of a node with the pools fast, of 8 GiB, and slow, of 1 GiB, both in memory; and a directory.
type fixture struct {
	*node.Server
	store *volume.Local
	dir   string
	t     *testing.T
}

func start(t *testing.T, o node.Options) fixture {
	t.Helper()
	mounts, err := mount.LoadTable()
	check.OK(t, err)
	fast, slow := memory.NewDisk(8<<30), memory.NewDisk(1<<30)
	store, err := volume.NewLocal(t.Context(), nodeName, []blockdev.Pool{fast.Open("fast", nil), slow.Open("slow", nil)}, mounts, 0)
	check.OK(t, err)
	return fixture{node.New(t.Context(), store, mounts, o), store, drivertest.Dir(t), t}
}

// create makes a volume of 16 MiB for ext4, or for block access.
func (f fixture) create(name, filesystem string) string {
	f.t.Helper()
	spec := volume.Spec{Name: name, Size: volume.Range{Required: 16 * pooltest.MiB}}
	if filesystem != block {
		spec.Filesystem = "ext4"
	}
	v, err := f.store.Create(f.t.Context(), spec)
	check.OK(f.t, err)
	return v.ID.String()
}

// path returns a path in the fixture's directory.
func (f fixture) path(name string) string { return filepath.Join(f.dir, name) }

// mkdir makes a directory, and returns its path.
func (f fixture) mkdir(name string) string {
	f.t.Helper()
	check.OK(f.t, os.Mkdir(f.path(name), 0o700))
	return f.path(name)
}

// badPaths are paths that mount.CleanPath refuses.
var badPaths = map[string]string{"a relative path": "a/b", "a path with dots": "/a/../b", "a path that ends in a slash": "/a/", "the root": "/", "a path with a zero": "/a\x00b"}

// badCapabilities are changes of a capability after which it cannot be served, and what the error says.
var badCapabilities = map[string]struct {
	change func(c *csi.VolumeCapability)
	says   string
}{
	"no access type": {func(c *csi.VolumeCapability) { c.AccessType = nil }, "block or mount"},
	"no access mode": {func(c *csi.VolumeCapability) { c.AccessMode = nil }, "access mode UNKNOWN"},
	"writers on many nodes": {func(c *csi.VolumeCapability) {
		c.AccessMode.Mode = csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER
	}, "a volume is written on one node"},
	"an unknown filesystem":   {func(c *csi.VolumeCapability) { c.GetMount().FsType = "zfs" }, "ext4, xfs and btrfs can be had"},
	"a group of files":        {func(c *csi.VolumeCapability) { c.GetMount().VolumeMountGroup = "1000" }, "leave the group of files to the kubelet"},
	"a flag that binds":       {func(c *csi.VolumeCapability) { c.GetMount().MountFlags = []string{"rbind"} }, "mount option rbind"},
	"a flag for another disk": {func(c *csi.VolumeCapability) { c.GetMount().MountFlags = []string{"logdev=/dev/sda"} }, "a volume is one device"},
}

func TestStageRefuses(t *testing.T) {
	f := start(t, node.Options{})
	id, staging := f.create("v", "ext4"), f.mkdir("staging")
	check.OK(t, os.WriteFile(f.path("file"), nil, 0o600))
	type request = *csi.NodeStageVolumeRequest
	refuses := drivertest.Refuses(t, f.NodeStageVolume, func() request {
		return &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging, VolumeCapability: capability("ext4")}
	})
	refuses("no volume", func(r request) { r.VolumeId = "" }, errdefs.ErrInvalid, "no volume ID")
	refuses("no path", func(r request) { r.StagingTargetPath = "" }, errdefs.ErrInvalid, "no staging target path")
	for what, path := range badPaths {
		refuses(what, func(r request) { r.StagingTargetPath = path }, errdefs.ErrInvalid, "is not an absolute, clean path")
	}
	refuses("no capability", func(r request) { r.VolumeCapability = nil }, errdefs.ErrInvalid, "no volume capability")
	for what, bad := range badCapabilities {
		refuses(what, func(r request) { bad.change(r.VolumeCapability) }, errdefs.ErrInvalid, bad.says)
	}
	refuses("a foreign volume", func(r request) { r.VolumeId = foreign }, errdefs.ErrNotFound, foreign)
	refuses("a volume that is gone", func(r request) { r.VolumeId = nothing }, errdefs.ErrNotFound, "00000000")
	refuses("a pool that is not there", func(r request) { r.VolumeId = strings.Replace(id, "fast", "gone", 1) }, errdefs.ErrUnavailable, `without pool "gone"`)
	for _, access := range []string{"ext4", block} {
		as := func(path string) func(request) {
			return func(r request) {
				r.StagingTargetPath, r.VolumeCapability = path, capability(access)
			}
		}
		refuses(access+" at a path that is not there", as(f.path("nowhere")), errdefs.ErrPrecondition, "the caller has to make it")
		refuses(access+" at a file", as(f.path("file")), errdefs.ErrPrecondition, f.path("file"))
	}
	f.notUsed(id)
}

// notUsed makes sure that nothing was done to a volume.
func (f fixture) notUsed(text string) {
	f.t.Helper()
	id, err := volume.ParseID(text)
	check.OK(f.t, err)
	v, err := f.store.Get(f.t.Context(), id)
	check.OK(f.t, err)
	devices, err := f.store.Attached(f.t.Context(), id)
	check.OK(f.t, err)
	if v.Format.State != volume.Blank || v.Target != "" || v.Flags != "" || len(devices) > 0 {
		f.t.Errorf("after refused requests it is %+v, attached as %v", v, devices)
	}
}

// TestClaimRequired: if claims are required, a volume that is not claimed is neither staged nor published.
func TestClaimRequired(t *testing.T) {
	f := start(t, node.Options{Claims: true})
	id, staging := f.create("v", "ext4"), f.mkdir("staging")
	stage := drivertest.Refuses(t, f.NodeStageVolume, func() *csi.NodeStageVolumeRequest {
		return &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging, VolumeCapability: capability("ext4")}
	})
	stage("stage", func(*csi.NodeStageVolumeRequest) {}, errdefs.ErrPrecondition, `not claimed for node node-1 (its claim is for node ""); publish it there first, at the controller`)
	publish := drivertest.Refuses(t, f.NodePublishVolume, func() *csi.NodePublishVolumeRequest {
		return &csi.NodePublishVolumeRequest{VolumeId: id, StagingTargetPath: staging, TargetPath: f.path("target"), VolumeCapability: capability("ext4")}
	})
	publish("publish", func(*csi.NodePublishVolumeRequest) {}, errdefs.ErrPrecondition, "publish it there first, at the controller")
	f.notUsed(id)
}

func TestPublishRefuses(t *testing.T) {
	f := start(t, node.Options{})
	id, staging := f.create("v", "ext4"), f.mkdir("staging")
	type request = *csi.NodePublishVolumeRequest
	refuses := drivertest.Refuses(t, f.NodePublishVolume, func() request {
		return &csi.NodePublishVolumeRequest{VolumeId: id, StagingTargetPath: staging, TargetPath: f.path("target"), VolumeCapability: capability("ext4")}
	})
	refuses("no volume", func(r request) { r.VolumeId = "" }, errdefs.ErrInvalid, "no volume ID")
	refuses("no target", func(r request) { r.TargetPath = "" }, errdefs.ErrInvalid, "no target path")
	refuses("no staging path", func(r request) { r.StagingTargetPath = "" }, errdefs.ErrPrecondition, "stage the volume first")
	for what, path := range badPaths {
		refuses("target: "+what, func(r request) { r.TargetPath = path }, errdefs.ErrInvalid, "is not an absolute, clean path")
		refuses("staging path: "+what, func(r request) { r.StagingTargetPath = path }, errdefs.ErrInvalid, "is not an absolute, clean path")
	}
	refuses("no capability", func(r request) { r.VolumeCapability = nil }, errdefs.ErrInvalid, "no volume capability")
	for what, bad := range badCapabilities {
		refuses(what, func(r request) { bad.change(r.VolumeCapability) }, errdefs.ErrInvalid, bad.says)
	}
	refuses("a foreign volume", func(r request) { r.VolumeId = foreign }, errdefs.ErrNotFound, foreign)
	refuses("a volume that is gone", func(r request) { r.VolumeId = nothing }, errdefs.ErrNotFound, "00000000")
	refuses("not staged", func(request) {}, errdefs.ErrPrecondition, "it is not staged at "+staging)
	refuses("not staged as a block volume", func(r request) { r.VolumeCapability = capability(block) }, errdefs.ErrPrecondition, "it is not staged at "+staging)
	refuses("staged nowhere", func(r request) { r.StagingTargetPath = f.path("nowhere") }, errdefs.ErrPrecondition, "it is not staged at "+f.path("nowhere"))
	f.notUsed(id)
	if _, err := os.Lstat(f.path("target")); !os.IsNotExist(err) {
		t.Errorf("a refused request made its target: %v", err)
	}
}

func TestEphemeralRefuses(t *testing.T) {
	off := start(t, node.Options{})
	on := start(t, node.Options{Ephemeral: node.Ephemeral{Pools: []string{"slow"}, MaxSize: 32 * pooltest.MiB}})
	other := on.create("v", "ext4")
	type request = *csi.NodePublishVolumeRequest
	right := func() request {
		return &csi.NodePublishVolumeRequest{VolumeId: "csi-1", TargetPath: on.path("target"), VolumeCapability: capability("ext4"),
			VolumeContext: map[string]string{"csi.storage.k8s.io/ephemeral": "true", "size": "16Mi"}}
	}
	attribute := func(key, value string) func(request) {
		return func(r request) { r.VolumeContext[key] = value }
	}
	refuses := drivertest.Refuses(t, off.NodePublishVolume, right)
	refuses("where they are switched off", func(request) {}, errdefs.ErrPrecondition, "switched off on this node (--ephemeral-pools); use a claim")
	refuses = drivertest.Refuses(t, on.NodePublishVolume, right)
	refuses("a set without its pools", attribute("pool", "fa*,other"), errdefs.ErrInvalid, "pool fa*,other is not for inline ephemeral volumes; [slow] are (--ephemeral-pools)")
	refuses("access of other nodes", attribute("access", "any"), errdefs.ErrInvalid, "parameter access=any is for claims")
	refuses("a spread", attribute("spread", "preferred"), errdefs.ErrInvalid, "parameter spread=preferred is for the claims of a StatefulSet")
	refuses("another pool", attribute("pool", "fast"), errdefs.ErrInvalid, "pool fast is not for inline ephemeral volumes; [slow] are (--ephemeral-pools)")
	refuses("too large", attribute("size", "33Mi"), errdefs.ErrOutOfRange, "has up to 33554432 (--ephemeral-max-size)")
	refuses("no size", attribute("size", "much"), errdefs.ErrInvalid, `"much" is no size`)
	refuses("an unknown attribute", attribute("colour", "red"), errdefs.ErrInvalid, `unknown parameter "colour"`)
	refuses("an attribute against its capability", attribute("fstype", "xfs"), errdefs.ErrInvalid, "say filesystem xfs")
	refuses("block", func(r request) { r.VolumeCapability = capability(block) }, errdefs.ErrInvalid, "is for mount access")
	refuses("the ID of another volume", func(r request) { r.VolumeId = other }, errdefs.ErrInvalid, "a volume that is not ephemeral")
	refuses("the name of another volume", func(r request) { r.VolumeId, r.VolumeContext["pool"] = "v", "slow" }, errdefs.ErrExists, "has pool fast, not slow")
	for _, f := range []fixture{off, on} {
		if all, err := f.store.List(t.Context(), volume.ID{}, 0); err != nil || len(all) > 1 {
			t.Errorf("of refused requests there is %v, %v", all, err)
		}
	}
}

// TestTakenDownBefore: to unstage or unpublish a volume that is not staged or published succeeds, also for volumes that do not exist. The staging path stays,
// as the caller made it; an empty target is removed, and one with files is refused.
func TestTakenDownBefore(t *testing.T) {
	f := start(t, node.Options{})
	id := f.create("v", "ext4")
	for _, text := range []string{id, nothing, foreign, strings.Replace(id, "fast", "gone", 1)} {
		staging := f.mkdir("staging")
		drivertest.Twice(t, f.NodeUnstageVolume, &csi.NodeUnstageVolumeRequest{VolumeId: text, StagingTargetPath: staging})
		check.OK(t, os.Remove(staging))
		drivertest.Twice(t, f.NodeUnstageVolume, &csi.NodeUnstageVolumeRequest{VolumeId: text, StagingTargetPath: staging})

		target := f.mkdir("target")
		drivertest.Twice(t, f.NodeUnpublishVolume, &csi.NodeUnpublishVolumeRequest{VolumeId: text, TargetPath: target})
		if _, err := os.Lstat(target); !os.IsNotExist(err) {
			t.Errorf("%s: its target is left: %v", text, err)
		}
	}
	precious := f.mkdir("target")
	check.OK(t, os.Mkdir(filepath.Join(precious, "precious"), 0o700))
	unpublish := drivertest.Refuses(t, f.NodeUnpublishVolume, func() *csi.NodeUnpublishVolumeRequest {
		return &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: precious}
	})
	unpublish("a target with files in it", func(*csi.NodeUnpublishVolumeRequest) {}, errdefs.ErrPrecondition, "it has files in it")
	unpublish("no volume", func(r *csi.NodeUnpublishVolumeRequest) { r.VolumeId = "" }, errdefs.ErrInvalid, "no volume ID")
	unpublish("no target", func(r *csi.NodeUnpublishVolumeRequest) { r.TargetPath = "" }, errdefs.ErrInvalid, "no target path")
	unstage := drivertest.Refuses(t, f.NodeUnstageVolume, func() *csi.NodeUnstageVolumeRequest {
		return &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: precious}
	})
	unstage("no volume", func(r *csi.NodeUnstageVolumeRequest) { r.VolumeId = "" }, errdefs.ErrInvalid, "no volume ID")
	unstage("no staging path", func(r *csi.NodeUnstageVolumeRequest) { r.StagingTargetPath = "" }, errdefs.ErrInvalid, "no staging target path")
	for what, path := range badPaths {
		unpublish("target: "+what, func(r *csi.NodeUnpublishVolumeRequest) { r.TargetPath = path }, errdefs.ErrInvalid, "is not an absolute, clean path")
		unstage("staging path: "+what, func(r *csi.NodeUnstageVolumeRequest) { r.StagingTargetPath = path }, errdefs.ErrInvalid, "is not an absolute, clean path")
	}
}

// TestOfWhatIsNotMounted: calls that measure, grow or look at a volume are refused where it is not mounted or does not exist. Only its health needs no mount.
func TestOfWhatIsNotMounted(t *testing.T) {
	f := start(t, node.Options{})
	id, path := f.create("v", "ext4"), f.mkdir("path")
	type stats = *csi.NodeGetVolumeStatsRequest
	measure := drivertest.Refuses(t, f.NodeGetVolumeStats, func() stats { return &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: path} })
	type expand = *csi.NodeExpandVolumeRequest
	grow := drivertest.Refuses(t, f.NodeExpandVolume, func() expand { return &csi.NodeExpandVolumeRequest{VolumeId: id, VolumePath: path} })
	measure("measure: no volume", func(r stats) { r.VolumeId = "" }, errdefs.ErrInvalid, "no volume ID")
	measure("measure: no path", func(r stats) { r.VolumePath = "" }, errdefs.ErrInvalid, "no volume path")
	measure("measure: a volume that is gone", func(r stats) { r.VolumeId = nothing }, errdefs.ErrNotFound, "00000000")
	measure("measure: a foreign volume", func(r stats) { r.VolumeId = foreign }, errdefs.ErrNotFound, foreign)
	measure("measure: where it is not", func(stats) {}, errdefs.ErrNotFound, "is not at "+path)
	measure("measure: at a path that is not there", func(r stats) { r.VolumePath = f.path("nowhere") }, errdefs.ErrNotFound, "is not at "+f.path("nowhere"))
	grow("grow: no volume", func(r expand) { r.VolumeId = "" }, errdefs.ErrInvalid, "no volume ID")
	grow("grow: no path", func(r expand) { r.VolumePath = "" }, errdefs.ErrInvalid, "no volume path")
	grow("grow: a volume that is gone", func(r expand) { r.VolumeId = nothing }, errdefs.ErrNotFound, "00000000")
	grow("grow: a capability that cannot be", func(r expand) { r.VolumeCapability = &csi.VolumeCapability{} }, errdefs.ErrInvalid, "access mode UNKNOWN")
	grow("grow: where it is not", func(expand) {}, errdefs.ErrNotFound, "is not at "+path)

	type health = *csi.NodeGetVolumeHealthRequest
	ask := drivertest.Refuses(t, f.NodeGetVolumeHealth, func() health { return &csi.NodeGetVolumeHealthRequest{VolumeId: id} })
	ask("health: no volume", func(r health) { r.VolumeId = "" }, errdefs.ErrInvalid, "no volume ID")
	ask("health: a volume that is gone", func(r health) { r.VolumeId = nothing }, errdefs.ErrNotFound, "00000000")
	ask("health: a foreign volume", func(r health) { r.VolumeId = foreign }, errdefs.ErrNotFound, foreign)
	well := drivertest.Twice(t, f.NodeGetVolumeHealth, &csi.NodeGetVolumeHealthRequest{VolumeId: id}).GetVolumeHealth()
	if well.GetVolumeId() != id || len(well.GetHealthStatuses()) > 0 {
		t.Errorf("its health is %v", well)
	}
}

// elsewhere is the store of a node in a zone, with problems of four pools.
type elsewhere struct{ node.Volumes }

func (elsewhere) Node() string { return nodeName }
func (elsewhere) Topology(context.Context) (map[string]string, error) {
	return map[string]string{"zone": "a"}, nil
}
func (elsewhere) PoolHealth(context.Context) []blockdev.Problem {
	return []blockdev.Problem{
		{Severity: blockdev.Degraded, Reason: "Full", Message: "pool a is full"},
		{Severity: blockdev.Inaccessible, Reason: "Gone", Message: "pool b is gone"},
		{Severity: blockdev.Degraded, Reason: "Full", Message: "pool c is full"},
		{Severity: blockdev.DataLoss, Reason: "Gone", Message: "pool d is gone"},
	}
}

func TestInfo(t *testing.T) {
	s := node.New(t.Context(), elsewhere{}, &mount.Table{}, node.Options{MaxVolumes: 7})
	info := drivertest.Twice(t, s.NodeGetInfo, &csi.NodeGetInfoRequest{})
	if segments := info.GetAccessibleTopology().GetSegments(); info.GetNodeId() != nodeName || info.GetMaxVolumesPerNode() != 7 ||
		len(segments) != 2 || segments[csimap.TopologyKey] != nodeName || segments["zone"] != "a" {
		t.Errorf("the node is %v", info)
	}
}

// TestStorageHealth: there is one entry for each status and reason, with the messages of all pools.
func TestStorageHealth(t *testing.T) {
	s := node.New(t.Context(), elsewhere{}, &mount.Table{}, node.Options{})
	have := drivertest.Twice(t, s.NodeGetStorageHealth, &csi.NodeGetStorageHealthRequest{})
	type entry = csi.NodeGetStorageHealthResponse_StorageBackendHealth
	want := &csi.NodeGetStorageHealthResponse{BackendHealth: []*entry{
		{Status: csi.StorageHealthErrorType_STORAGE_DEGRADED, Reason: "Full", Message: "pool a is full; pool c is full"},
		{Status: csi.StorageHealthErrorType_STORAGE_UNREACHABLE, Reason: "Gone", Message: "pool b is gone; pool d is gone"},
	}}
	if !proto.Equal(have, want) {
		t.Errorf("have %v, want %v", have, want)
	}
	if well := drivertest.Twice(t, start(t, node.Options{}).NodeGetStorageHealth, &csi.NodeGetStorageHealthRequest{}); len(well.GetBackendHealth()) > 0 {
		t.Errorf("pools that are well: %v", well)
	}
}

// TestCapabilities: a node announces all capabilities that CSI has, except VOLUME_MOUNT_GROUP, and implements all methods of the service.
func TestCapabilities(t *testing.T) {
	f := start(t, node.Options{})
	announced := map[csi.NodeServiceCapability_RPC_Type]bool{}
	for _, c := range drivertest.Twice(t, f.NodeGetCapabilities, &csi.NodeGetCapabilitiesRequest{}).GetCapabilities() {
		announced[c.GetRpc().GetType()] = true
	}
	for number, name := range csi.NodeServiceCapability_RPC_Type_name {
		is := csi.NodeServiceCapability_RPC_Type(number)
		if want := is != csi.NodeServiceCapability_RPC_UNKNOWN && is != csi.NodeServiceCapability_RPC_VOLUME_MOUNT_GROUP; announced[is] != want {
			t.Errorf("%s is announced: %v", name, announced[is])
		}
	}
	service := reflect.TypeFor[csi.NodeServer]()
	for i := range service.NumMethod() {
		method := reflect.ValueOf(f.Server).MethodByName(service.Method(i).Name)
		if !method.IsValid() || method.Type().NumIn() != 2 {
			continue // a method that only the generated code needs
		}
		out := method.Call([]reflect.Value{reflect.ValueOf(t.Context()), reflect.New(method.Type().In(1).Elem())})
		if err, failed := out[1].Interface().(error); failed && status.Code(err) == codes.Unimplemented {
			t.Errorf("%s: %v", service.Method(i).Name, err)
		}
	}
}

// TestEphemeralOfClosedPool: while a pool of the node is not open, nobody says of an inline ephemeral volume that no other pool has that it does not exist.
func TestEphemeralOfClosedPool(t *testing.T) {
	mounts, err := mount.LoadTable()
	check.OK(t, err)
	closed := lazy.New("slow", errors.New("no disk"), func(context.Context) (blockdev.Pool, error) { return nil, errors.New("no disk") })
	store, err := volume.NewLocal(t.Context(), nodeName, []blockdev.Pool{memory.NewDisk(1<<30).Open("fast", nil), closed}, mounts, 0)
	check.OK(t, err)
	s := node.New(t.Context(), store, mounts, node.Options{})
	_, health := s.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: "csi-1"})
	_, stats := s.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: "csi-1", VolumePath: t.TempDir()})
	for what, err := range map[string]error{"health": health, "statistics": stats} {
		if !errors.Is(err, errdefs.ErrUnavailable) || !strings.Contains(err.Error(), "slow") {
			t.Errorf("its %s: %v", what, err)
		}
	}
}
