package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/ashlar-csi/ashlar/internal/poolset"
	"github.com/ashlar-csi/ashlar/pkg/csimap"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// Ephemeral says which inline ephemeral volumes the node makes. Everybody who may make a pod can ask for one, and no quota of claims counts it.
type Ephemeral struct {
	// Pools are the pools where such volumes may be; the first is taken if a request names none. Empty: no such volume is made.
	Pools []string
	// MaxSize is the largest size of one, in bytes; 0: any.
	MaxSize int64
}

// admit sets the pool and the largest size in the specification of a new ephemeral volume. ErrPrecondition if the node makes none, ErrInvalid if the pool is
// not among Pools, ErrOutOfRange if the size is above MaxSize.
func (e Ephemeral) admit(spec *volume.Spec) error {
	if len(e.Pools) == 0 {
		return fmt.Errorf("%w: inline ephemeral volumes are switched off on this node (--ephemeral-pools); use a claim, or a generic ephemeral volume, which is one", errdefs.ErrPrecondition)
	}
	asked := cmp.Or(spec.Pool, e.Pools[0])
	if spec.Pool = string(poolset.Set(asked).Among(e.Pools)); spec.Pool == "" {
		return fmt.Errorf("%w: pool %s is not for inline ephemeral volumes; %v are (--ephemeral-pools)", errdefs.ErrInvalid, asked, e.Pools)
	}
	if e.MaxSize > 0 && spec.Size.Required > e.MaxSize {
		return fmt.Errorf("%w: %d bytes; an inline ephemeral volume has up to %d (--ephemeral-max-size)", errdefs.ErrOutOfRange, spec.Size.Required, e.MaxSize)
	}
	spec.Size.Limit = e.MaxSize
	return nil
}

// publishEphemeral makes an inline ephemeral volume by the ID of the CO, and mounts it at the target. If that fails, a volume that was not formatted before
// is removed again, unless the caller is gone or something else is mounted there. ErrExists if it was made before for another target or in another way.
func (s *Server) publishEphemeral(ctx context.Context, r *csi.NodePublishVolumeRequest, target string, how mountRequest) error {
	if how.block {
		return fmt.Errorf("%w: an inline ephemeral volume is for mount access; for a raw device use a claim with volumeMode Block", errdefs.ErrInvalid)
	}
	if _, err := volume.ParseID(r.GetVolumeId()); err == nil {
		return fmt.Errorf("%w: this is the ID of a volume that is not ephemeral", errdefs.ErrInvalid)
	}
	parameters, size, err := csimap.ParseEphemeral(r.GetVolumeContext())
	if err == nil {
		err = parameters.Agree(how.fs)
	}
	if err == nil && parameters.Spread != volume.NoSpread {
		err = fmt.Errorf("%w: parameter spread=%s is for the claims of a StatefulSet, not for inline ephemeral volumes", errdefs.ErrInvalid, parameters.Spread)
	}
	if err == nil && parameters.Access != volume.AccessNode {
		err = fmt.Errorf("%w: parameter access=%s is for claims: an inline ephemeral volume is on the node of its pod", errdefs.ErrInvalid, parameters.Access)
	}
	if err != nil {
		return err
	}
	spec := volume.Spec{Name: r.GetVolumeId(), Pool: parameters.Pool, Provisioning: parameters.Provisioning,
		Size: size, Filesystem: how.fs, Encryption: parameters.Encryption, Ephemeral: r.GetTargetPath()}
	// A volume that was made before stays its pod's, also if the options would not admit it now.
	if have, err := s.volumes.Ephemeral(ctx, spec.Name); err == nil {
		spec.Pool = cmp.Or(spec.Pool, have.ID.Pool)
	} else if !errors.Is(err, errdefs.ErrNotFound) {
		return err
	} else if err := s.options.Ephemeral.admit(&spec); err != nil {
		return err
	}
	v, err := s.volumes.Create(ctx, spec)
	if err != nil {
		return err
	}
	if _, err = mount.MakeTarget(target, false); err == nil {
		// For reading only, too, the filesystem is made; it is mounted read-only.
		err = s.mountVolume(ctx, v, target, how)
	}
	// A volume that was formatted before this call may be in use by its pod.
	fresh := v.Format.State != volume.Formatted
	if err != nil && fresh && ctx.Err() == nil && !errors.Is(err, errdefs.ErrExists) {
		err = errors.Join(err, s.removeEphemeral(ctx, v, target))
	}
	return err
}

// removeEphemeral unmounts a volume from its target, removes that, and deletes the volume.
func (s *Server) removeEphemeral(ctx context.Context, v volume.Volume, target string) error {
	if err := mount.RemoveTarget(target); err != nil {
		return err
	}
	if err := s.volumes.Detach(ctx, v.ID); err != nil {
		return err
	}
	return s.volumes.Delete(ctx, v.ID)
}
