package node

import (
	"context"
	"fmt"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/ashlar-csi/ashlar/pkg/csimap"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// required checks the two fields that most requests need: an ID, and a path that says
// where it leads. It returns the path as the kernel names what is mounted there.
func required(volumeID, field, path string) (string, error) {
	if volumeID == "" {
		return "", csimap.Missing("volume ID")
	}
	if path == "" {
		return "", csimap.Missing(field)
	}
	return mount.Resolve(path), mount.CleanPath(path)
}

// mountRequest is how a request wants to use a volume.
type mountRequest struct {
	block    bool
	fs       filesystem.Type
	options  []string
	readOnly bool
	// exclusive: published at one target at the most.
	exclusive bool
}

func newMountRequest(c *csi.VolumeCapability, publishContext map[string]string, readOnly bool) (mountRequest, error) {
	fsType, err := csimap.CheckCapabilities(c)
	if err != nil {
		return mountRequest{}, err
	}
	how := mountRequest{block: c.GetBlock() != nil, fs: fsType, options: c.GetMount().GetMountFlags(),
		exclusive: c.GetAccessMode().GetMode() == csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER}
	how.readOnly = readOnly || csimap.ReadOnly(c) || publishContext[csimap.ReadOnlyKey] == "true" || slices.Contains(mount.SplitOptions(how.options...), "ro")
	return how, nil
}

// checkClaim makes sure that a volume is claimed for this node, where that is asked for and as far
// as it is known. What was claimed for reading only is used for reading only.
func (s *Server) checkClaim(ctx context.Context, v volume.Volume, how *mountRequest) error {
	if !s.options.Claims {
		return nil
	}
	claim, known := s.volumes.Claimed(ctx, v, how.readOnly)
	if !known {
		return nil
	}
	if claim.Node != s.volumes.Node() {
		return fmt.Errorf("%w: it is not claimed for node %s (its claim is for node %q); publish it there first, at the controller", errdefs.ErrPrecondition, s.volumes.Node(), claim.Node)
	}
	how.readOnly = how.readOnly || claim.ReadOnly
	return nil
}
