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

// Ephemeral says which inline ephemeral volumes the node makes. Whoever may make a pod asks for them, and no
// quota of claims counts them.
type Ephemeral struct {
	// Pools are those that they may be made in; the first is taken if none is named. None: no such volume is made.
	Pools []string
	// MaxSize of one, in bytes; 0 is any.
	MaxSize int64
}

// admit completes the specification of a new ephemeral volume: ErrPrecondition if none are made, ErrInvalid for a
// pool that is for others, ErrOutOfRange for too large a size.
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

// publishEphemeral makes a volume for one pod, under the ID that the CO gave it.
func (s *Server) publishEphemeral(ctx context.Context, r *csi.NodePublishVolumeRequest, target string, how mountRequest) error {
	if how.block {
		return fmt.Errorf("%w: an inline ephemeral volume is for mount access", errdefs.ErrInvalid)
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
	// What was made before stays its pod's, whatever is allowed now.
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
		// A new filesystem has to be written once, also one for reading only: it is mounted
		// for writing to nobody.
		err = s.mountVolume(ctx, v, target, how)
	}
	// One that was formatted before this call may have been handed out to its pod.
	fresh := v.Format.State != volume.Formatted
	if err != nil && fresh && ctx.Err() == nil && !errors.Is(err, errdefs.ErrExists) {
		err = errors.Join(err, s.removeEphemeral(ctx, v, target))
	}
	return err
}

func (s *Server) removeEphemeral(ctx context.Context, v volume.Volume, target string) error {
	if err := mount.RemoveTarget(target); err != nil {
		return err
	}
	if err := s.volumes.Detach(ctx, v.ID); err != nil {
		return err
	}
	return s.volumes.Delete(ctx, v.ID)
}
