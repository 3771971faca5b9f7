package rpc

import (
	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// keys returns the keys (package keylock) that a request is served with: exclusive ones that no other request may have meanwhile, and shared ones that others
// may share. The key of a volume, snapshot or group comes from its name, and is the last part of its ID too, so a CreateVolume and a DeleteVolume of one volume
// exclude each other. Requests that change nothing have no keys, but for those that read the metadata of snapshots.
func keys(request any) (exclusive, shared []string) {
	switch r := request.(type) {
	case *csi.CreateVolumeRequest:
		exclusive = []string{keylock.Volume(volume.KeyOf(r.GetName()))}
		if source := r.GetVolumeContentSource().GetVolume(); source != nil {
			// Its filesystem is frozen while the copy is begun.
			exclusive = append(exclusive, volumeKey(source.GetVolumeId()))
		}
		if source := r.GetVolumeContentSource().GetSnapshot(); source != nil {
			shared = []string{snapshotKey(source.GetSnapshotId())}
		}
	case *csi.CreateSnapshotRequest:
		exclusive = []string{keylock.Snapshot(volume.KeyOf(r.GetName())), volumeKey(r.GetSourceVolumeId())}
	case *csi.DeleteSnapshotRequest:
		exclusive = []string{snapshotKey(r.GetSnapshotId())}
	case *csi.CreateVolumeGroupSnapshotRequest:
		exclusive = []string{keylock.Group(volume.KeyOf(r.GetName()))}
		for _, id := range r.GetSourceVolumeIds() {
			exclusive = append(exclusive, volumeKey(id))
		}
	case *csi.DeleteVolumeGroupSnapshotRequest:
		exclusive = []string{groupKey(r.GetGroupSnapshotId())}
		for _, id := range r.GetSnapshotIds() {
			exclusive = append(exclusive, snapshotKey(id))
		}
	case *csi.GetMetadataAllocatedRequest:
		shared = []string{snapshotKey(r.GetSnapshotId())}
	case *csi.GetMetadataDeltaRequest:
		shared = []string{snapshotKey(r.GetBaseSnapshotId()), snapshotKey(r.GetTargetSnapshotId())}
	case *csi.DeleteVolumeRequest, *csi.ControllerPublishVolumeRequest, *csi.ControllerUnpublishVolumeRequest,
		*csi.ControllerExpandVolumeRequest, *csi.ControllerModifyVolumeRequest,
		*csi.NodeStageVolumeRequest, *csi.NodeUnstageVolumeRequest, *csi.NodePublishVolumeRequest,
		*csi.NodeUnpublishVolumeRequest, *csi.NodeExpandVolumeRequest:
		exclusive = []string{volumeKey(r.(interface{ GetVolumeId() string }).GetVolumeId())}
	}
	return exclusive, shared
}

// volumeKey returns the key of a volume. A text that is not an ID of this driver, as of an inline ephemeral volume, counts as the name of the volume.
func volumeKey(text string) string {
	if id, err := volume.ParseID(text); err == nil {
		return keylock.Volume(id.Key)
	}
	return keylock.Volume(volume.KeyOf(text))
}

func snapshotKey(text string) string {
	if id, err := volume.ParseID(text); err == nil {
		return keylock.Snapshot(id.Key)
	}
	return keylock.Snapshot(volume.KeyOf(text))
}

func groupKey(text string) string {
	if id, err := volume.ParseGroupID(text); err == nil {
		return keylock.Group(id.Key)
	}
	return keylock.Group(volume.KeyOf(text))
}
