package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/ashlar-csi/ashlar/pkg/csimap"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// required checks the two fields that most requests have: a volume ID, and a path (mount.CleanPath). It returns the path without links, as the kernel names
// mounts (mount.Resolve). ErrInvalid if one is missing, or the path is not clean.
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
	// many: other nodes may read the volume at the same time, and nobody writes.
	many bool
	// exclusive: the volume may be published at one target only.
	exclusive bool
	// generation of the claim, as the controller gave it; 0: it has none, or an older controller has not told.
	generation int64
	secret     secret
}

// passphraseKey is the entry of a request's secrets that has the key of an encrypted volume.
const passphraseKey = "passphrase"

// secret is the key of an encrypted volume that came with a request.
type secret struct {
	key    volume.Key
	source string // where the user names the Secret with the key
}

func newSecret(entries map[string]string, source string) secret {
	return secret{volume.Key(entries[passphraseKey]), source}
}

// ofClass is the source of a secret that a parameter of the StorageClass names.
func ofClass(parameter string) string { return "the parameter " + parameter + " of the StorageClass" }

// explain adds to an error for a missing or wrong key (volume.ErrNoKey, volume.ErrKey) where the key comes from. It returns other errors as they are.
func (s secret) explain(err error) error {
	if errors.Is(err, volume.ErrNoKey) || errors.Is(err, volume.ErrKey) {
		return fmt.Errorf("%w; it is the entry %q of the secret that %s names", err, passphraseKey, s.source)
	}
	return err
}

// The parameters of a StorageClass that name the Secrets for the calls of a node.
const (
	stageSecret   = "csi.storage.k8s.io/node-stage-secret-name"
	expandSecret  = "csi.storage.k8s.io/node-expand-secret-name"
	publishSecret = "csi.storage.k8s.io/node-publish-secret-name"
)

// newMountRequest returns how a volume is to be used: by a capability, what the controller's publish call returned, and the readonly field of the request;
// each of them, and the mount flag ro, can make it read-only. ErrInvalid for a capability that cannot be served. secret and many are set by the caller.
func newMountRequest(c *csi.VolumeCapability, publishContext map[string]string, readOnly bool) (mountRequest, error) {
	fsType, err := csimap.CheckCapabilities(c)
	if err != nil {
		return mountRequest{}, err
	}
	generation, err := generationOf(publishContext)
	if err != nil {
		return mountRequest{}, err
	}
	how := mountRequest{generation: generation, block: c.GetBlock() != nil, fs: fsType, options: c.GetMount().GetMountFlags(),
		exclusive: c.GetAccessMode().GetMode() == csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER}
	how.readOnly = readOnly || csimap.ReadOnly(c) || publishContext[csimap.ReadOnlyKey] == "true" || slices.Contains(mount.SplitOptions(how.options...), "ro")
	return how, nil
}

// generationOf returns the generation of the claim in a publish context; 0 if it has none, ErrInvalid if that is no number.
func generationOf(publishContext map[string]string) (int64, error) {
	text, told := publishContext[csimap.GenerationKey]
	if !told {
		return 0, nil
	}
	generation, err := strconv.ParseInt(text, 10, 64)
	if err != nil || generation < 0 {
		return 0, fmt.Errorf("%w: %s of the publish context is %q, not the number of a claim", errdefs.ErrInvalid, csimap.GenerationKey, text)
	}
	return generation, nil
}

// getClaimed returns a volume, once the claim is known here for which the call is. Until then what is known may be an earlier claim of this node, and so what
// is mounted or connected by that would pass for the volume, though another node may have written to it since.
func (s *Server) getClaimed(ctx context.Context, id volume.ID, how mountRequest) (volume.Volume, error) {
	if s.options.Claims && how.generation > 0 {
		if err := s.volumes.AwaitClaim(ctx, id, how.generation); err != nil {
			return volume.Volume{}, err
		}
	}
	return s.volumes.Get(ctx, id)
}

// readByMany sets many, if many nodes may read the volume and the capability is for that.
func (how *mountRequest) readByMany(v volume.Volume, c *csi.VolumeCapability) {
	how.many = v.ReadByMany() && volume.Claim{Mode: csimap.ModeOf(c)}.Many()
}

// checkClaim makes sure that a volume is claimed for this node, if claims are required and as far as they are known. A volume that was claimed for reading
// only is used for reading only. One that is exported is taken from its consumer only by a later claim. ErrPrecondition if the claim is another node's;
// ErrUnavailable if the claim that it needs is not known here yet.
func (s *Server) checkClaim(ctx context.Context, v volume.Volume, how *mountRequest) error {
	if !s.options.Claims {
		return nil
	}
	claim, known := s.volumes.Claimed(ctx, v, how.readOnly)
	if v.Exported.Node != "" && (!known || claim.Node == s.volumes.Node() && claim.Generation <= v.Exported.Generation) {
		return fmt.Errorf("%w: it is exported to %s, and a later claim for node %s is not known", errdefs.ErrUnavailable, v.Exported, s.volumes.Node())
	}
	if !known && v.Read && !how.many {
		return fmt.Errorf("%w: it is read by many, and a claim for node %s alone is not known", errdefs.ErrUnavailable, s.volumes.Node())
	}
	if !known {
		return nil
	}
	if claim.Node != s.volumes.Node() {
		return fmt.Errorf("%w: it is not claimed for node %s (its claim is for node %q); publish it there first, at the controller", errdefs.ErrPrecondition, s.volumes.Node(), claim.Node)
	}
	how.readOnly = how.readOnly || claim.ReadOnly
	return nil
}
