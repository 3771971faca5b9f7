package rpc

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

func volumeID(name string) string {
	return volume.ID{Kind: blockdev.Volume, Pool: "default", Key: volume.KeyOf(name)}.String()
}

func snapshotID(name string) string {
	return volume.ID{Kind: blockdev.Snapshot, Pool: "default", Key: volume.KeyOf(name)}.String()
}

// TestCallsMeet: which two calls are not served at the same time.
func TestCallsMeet(t *testing.T) {
	create := func(name string) *csi.CreateVolumeRequest { return &csi.CreateVolumeRequest{Name: name} }
	clone := func(name, source string) *csi.CreateVolumeRequest {
		return &csi.CreateVolumeRequest{Name: name, VolumeContentSource: &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
			Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: volumeID(source)}}}}
	}
	restore := func(name, source string) *csi.CreateVolumeRequest {
		return &csi.CreateVolumeRequest{Name: name, VolumeContentSource: &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
			Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: snapshotID(source)}}}}
	}
	snapshot := &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: volumeID("a")}
	group := &csi.CreateVolumeGroupSnapshotRequest{Name: "g", SourceVolumeIds: []string{volumeID("a"), volumeID("b")}}
	groupID := volume.GroupID{Key: volume.KeyOf("g")}.String()
	deleteS := &csi.DeleteSnapshotRequest{SnapshotId: snapshotID("s")}
	allocated := &csi.GetMetadataAllocatedRequest{SnapshotId: snapshotID("s")}
	inline := &csi.NodePublishVolumeRequest{VolumeId: "csi-1"}
	for name, c := range map[string]struct {
		a, b any
		meet bool
	}{
		"create and create":                   {create("a"), create("a"), true},
		"create and create of another":        {create("a"), create("A"), false},
		"create and delete":                   {create("a"), &csi.DeleteVolumeRequest{VolumeId: volumeID("a")}, true},
		"create and publish":                  {create("a"), &csi.ControllerPublishVolumeRequest{VolumeId: volumeID("a")}, true},
		"delete and stage":                    {&csi.DeleteVolumeRequest{VolumeId: volumeID("a")}, &csi.NodeStageVolumeRequest{VolumeId: volumeID("a")}, true},
		"stage and publish":                   {&csi.NodeStageVolumeRequest{VolumeId: volumeID("a")}, &csi.NodePublishVolumeRequest{VolumeId: volumeID("a")}, true},
		"stage and stage of another":          {&csi.NodeStageVolumeRequest{VolumeId: volumeID("a")}, &csi.NodeStageVolumeRequest{VolumeId: volumeID("b")}, false},
		"expand at both ends":                 {&csi.ControllerExpandVolumeRequest{VolumeId: volumeID("a")}, &csi.NodeExpandVolumeRequest{VolumeId: volumeID("a")}, true},
		"unpublish and unstage":               {&csi.NodeUnpublishVolumeRequest{VolumeId: volumeID("a")}, &csi.NodeUnstageVolumeRequest{VolumeId: volumeID("a")}, true},
		"modify and release":                  {&csi.ControllerModifyVolumeRequest{VolumeId: volumeID("a")}, &csi.ControllerUnpublishVolumeRequest{VolumeId: volumeID("a")}, true},
		"clone and its source":                {clone("c", "a"), &csi.NodePublishVolumeRequest{VolumeId: volumeID("a")}, true},
		"clone and the next clone":            {clone("c", "a"), clone("d", "a"), true},
		"two restores":                        {restore("c", "s"), restore("d", "s"), false},
		"restore and delete of its snapshot":  {restore("c", "s"), deleteS, true},
		"snapshot and its source":             {snapshot, &csi.DeleteVolumeRequest{VolumeId: volumeID("a")}, true},
		"snapshot and its delete":             {snapshot, deleteS, true},
		"snapshot and a volume of its name":   {snapshot, create("s"), false},
		"group and a member":                  {group, &csi.NodeUnstageVolumeRequest{VolumeId: volumeID("b")}, true},
		"group and a snapshot of a member":    {group, snapshot, true},
		"group and its delete":                {group, &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: groupID}, true},
		"delete of a group and of a member":   {&csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: groupID, SnapshotIds: []string{snapshotID("s")}}, deleteS, true},
		"metadata and delete":                 {allocated, deleteS, true},
		"metadata and metadata":               {allocated, &csi.GetMetadataDeltaRequest{BaseSnapshotId: snapshotID("r"), TargetSnapshotId: snapshotID("s")}, false},
		"delta and delete of its base":        {&csi.GetMetadataDeltaRequest{BaseSnapshotId: snapshotID("s"), TargetSnapshotId: snapshotID("t")}, deleteS, true},
		"inline: publish and publish":         {inline, inline, true},
		"inline: publish and unpublish":       {inline, &csi.NodeUnpublishVolumeRequest{VolumeId: "csi-1"}, true},
		"inline: publish and another":         {inline, &csi.NodePublishVolumeRequest{VolumeId: "csi-2"}, false},
		"inline and the volume that it makes": {inline, &csi.DeleteVolumeRequest{VolumeId: volumeID("csi-1")}, true},
		"list and anything":                   {&csi.ListVolumesRequest{}, create("a"), false},
		"stats and stage":                     {&csi.NodeGetVolumeStatsRequest{VolumeId: volumeID("a")}, &csi.NodeStageVolumeRequest{VolumeId: volumeID("a")}, false},
		"health and delete":                   {&csi.ControllerGetVolumeHealthRequest{VolumeId: volumeID("a")}, &csi.DeleteVolumeRequest{VolumeId: volumeID("a")}, false},
		"capacity and create":                 {&csi.GetCapacityRequest{}, create("a"), false},
	} {
		t.Run(name, func(t *testing.T) {
			for _, order := range [][2]any{{c.a, c.b}, {c.b, c.a}} {
				var locks keylock.Table
				unlock, busy := locks.TryLock(keys(order[0]))
				if unlock == nil {
					t.Fatalf("the first call is busy on %s", busy)
				}
				second, busy := locks.TryLock(keys(order[1]))
				if met := second == nil; met != c.meet {
					t.Errorf("%T during %T: met %v on %q, want %v", order[1], order[0], met, busy, c.meet)
				}
				unlock()
			}
		})
	}
}

// TestEveryChangeIsLocked: all requests of CSI have keys, but for those that only read, which are listed here.
func TestEveryChangeIsLocked(t *testing.T) {
	looks := []string{"Probe", "GetPluginInfo", "GetPluginCapabilities", "ValidateVolumeCapabilities", "ListVolumes", "GetCapacity", "ControllerGetCapabilities",
		"ListSnapshots", "GetSnapshot", "ControllerGetVolume", "ControllerGetVolumeHealth", "ControllerListVolumeHealth", "GroupControllerGetCapabilities",
		"GetVolumeGroupSnapshot", "NodeGetCapabilities", "NodeGetInfo", "NodeGetVolumeStats", "NodeGetVolumeHealth", "NodeGetStorageHealth"}
	services := csi.File_csi_proto.Services()
	seen := 0
	for i := range services.Len() {
		methods := services.Get(i).Methods()
		for j := range methods.Len() {
			method := methods.Get(j)
			kind, err := protoregistry.GlobalTypes.FindMessageByName(method.Input().FullName())
			if err != nil {
				t.Fatal(err)
			}
			seen++
			request := reflect.New(reflect.TypeOf(kind.Zero().Interface()).Elem()).Interface().(proto.Message)
			exclusive, shared := keys(request)
			if locks := len(exclusive)+len(shared) > 0; locks == slices.Contains(looks, string(method.Name())) {
				t.Errorf("%s locks %v and %v", method.Name(), exclusive, shared)
			}
		}
	}
	if seen < len(looks)+15 {
		t.Errorf("only %d methods were found", seen)
	}
}

func TestKeysAreNoText(t *testing.T) {
	for _, id := range []string{"", "../../x", volumeID("a") + "x", strings.Repeat("x", 1<<16)} {
		exclusive, _ := keys(&csi.DeleteVolumeRequest{VolumeId: id})
		if len(exclusive) != 1 || len(exclusive[0]) != len("volume/")+32 {
			t.Errorf("the ID %.20q has the keys %v", id, exclusive)
		}
	}
}
