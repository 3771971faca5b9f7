package agent

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/export"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/cluster/port"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// Exports returns the export.Home that answers the agents of nodes which use volumes of this one. Before it exports a volume, it asks the API server whether
// the caller has claimed it. A node that a volume is exported to may read and write its record without that.
func (a *Agent) Exports() export.Home { return exports{a} }

type exports struct{ *Agent }

// check returns ErrUnavailable if this node exports nothing.
func (e exports) check() error {
	if e.options.Exporter != nil && e.options.Network != nil {
		return nil
	}
	return fmt.Errorf("%w: node %s exports no volumes: start its driver with --remote-address", errdefs.ErrUnavailable, e.local.Node())
}

// claimed returns the object of a volume, from the API server, that is claimed for the caller with a generation. ErrPrecondition if it is not claimed so,
// ErrNotFound if it is no volume of this node, ErrUnavailable if it has moved here and is not taken over yet.
func (e exports) claimed(ctx context.Context, id volume.ID, generation int64) (*v1alpha1.Volume, error) {
	v := &v1alpha1.Volume{}
	err := e.kube.Live.Get(ctx, client.ObjectKey{Name: id.Key}, v)
	if client.IgnoreNotFound(err) != nil {
		return nil, kube.APIError("read volume "+id.Key, err)
	}
	caller := port.CallerNode(ctx)
	if err != nil || v.Spec.NodeName != e.local.Node() || cluster.VolumeID(v) != id || v1alpha1.Going(v) {
		return nil, fmt.Errorf("%w: node %s has no volume %s that could be used on node %q", errdefs.ErrNotFound, e.local.Node(), id, caller)
	}
	if c := v.ClaimOf(caller); caller == "" || c == nil || c.Generation != generation {
		return nil, fmt.Errorf("%w: volume %s is not claimed for node %q by generation %d", errdefs.ErrPrecondition, id, caller, generation)
	}
	if err := e.checkTakenOver(v); err != nil {
		return nil, err
	}
	return v, nil
}

// exported returns an error unless a volume is exported to the caller for a generation, or claimed for it. many: the caller is one of many readers.
func (e exports) exported(ctx context.Context, id volume.ID, generation int64) (many bool, err error) {
	if err := e.check(); err != nil {
		return false, err
	}
	caller := volume.Grant{Generation: generation, Node: port.CallerNode(ctx)}
	to, is, missing := e.options.Exporter.ExportOf(ctx, id)
	if errdefs.IgnoreNotFound(missing) != nil || is && to == caller {
		return false, missing
	}
	if is, err := e.options.Exporter.IsReader(ctx, id, caller); is || errdefs.IgnoreNotFound(err) != nil {
		return true, err
	}
	v, err := e.claimed(ctx, id, generation)
	if err != nil {
		return false, err // it says more than missing
	}
	return cluster.ToClaim(v.ClaimOf(caller.Node)).Many(), missing
}

// Open: see export.Home. The export is written into the object's status before it is made: so who takes the claim away sees it, and waits for its end.
func (e exports) Open(ctx context.Context, id volume.ID, generation int64) (opened export.Opened, err error) {
	if err := e.check(); err != nil {
		return export.Opened{}, err
	}
	err = e.withLocks([]string{keylock.Volume(id.Key)}, func() error {
		v, err := e.claimed(ctx, id, generation)
		if err != nil {
			return err
		}
		out, err := e.give(ctx, v, volume.Grant{Generation: generation, Node: port.CallerNode(ctx)})
		if err != nil {
			return err
		}
		if opened, err = e.opened(out); err != nil {
			return err
		}
		opened.Record, err = e.local.Record(ctx, id)
		return err
	})
	return opened, err
}

// opened returns an export as the caller connects to it, without the record.
func (e exports) opened(out volume.Exported) (export.Opened, error) {
	at, err := netip.ParseAddrPort(e.options.Network.Address)
	return export.Opened{Address: at, NQN: out.NQN, Host: out.Host, Secret: out.Secret, PSK: out.PSK, UUID: out.UUID, Size: out.Size, Otherwise: out.Otherwise, Again: out.Again}, err
}

// give exports a volume to a node that has claimed it. It writes the export into the object's status first, unless the record cannot be read: then there
// will be none.
func (e exports) give(ctx context.Context, v *v1alpha1.Volume, to volume.Grant) (volume.Exported, error) {
	if _, _, err := e.options.Exporter.ExportOf(ctx, cluster.VolumeID(v)); errors.Is(err, errdefs.ErrUnavailable) || errors.Is(err, errdefs.ErrDataLoss) {
		return volume.Exported{}, err
	}
	if cluster.ToClaim(v.ClaimOf(to.Node)).Many() {
		if err := e.reportReader(ctx, v, to); err != nil {
			return volume.Exported{}, err
		}
		return e.options.Exporter.ExportToRead(ctx, cluster.VolumeID(v), to)
	}
	if err := e.reportExport(ctx, v, to); err != nil {
		return volume.Exported{}, err
	}
	return e.options.Exporter.Export(ctx, cluster.VolumeID(v), to)
}

// Record: see export.Home.
func (e exports) Record(ctx context.Context, id volume.ID, generation int64) (blockdev.Record, error) {
	if _, err := e.exported(ctx, id, generation); err != nil {
		return blockdev.Record{}, err
	}
	return e.local.Record(ctx, id)
}

// SetLabels: see export.Home. ErrPrecondition for one of many readers: it must not change the volume.
func (e exports) SetLabels(ctx context.Context, id volume.ID, generation int64, before, after map[string]string) (record blockdev.Record, err error) {
	err = e.withLocks([]string{keylock.Volume(id.Key)}, func() error {
		many, err := e.exported(ctx, id, generation)
		if err != nil {
			return err
		}
		if many {
			return fmt.Errorf("%w: volume %s is given to node %s to be read, and so is its record", errdefs.ErrPrecondition, id, port.CallerNode(ctx))
		}
		record, err = e.local.SwapLabels(ctx, id, before, after)
		return err
	})
	return record, err
}

// marksFor calls answer, which is about the marks of a volume, with the volume's lock, if the volume is exported to the caller. ErrPrecondition for one of
// many readers.
func (e exports) marksFor(ctx context.Context, id volume.ID, generation int64, answer func() error) error {
	return e.withLocks([]string{keylock.Volume(id.Key)}, func() error {
		many, err := e.exported(ctx, id, generation)
		if err == nil && many {
			err = fmt.Errorf("%w: volume %s is given to node %s to be read, and has no marks", errdefs.ErrPrecondition, id, port.CallerNode(ctx))
		}
		if err != nil {
			return err
		}
		return answer()
	})
}

// Marks: see export.Home.
func (e exports) Marks(ctx context.Context, id volume.ID, generation int64, since uint32) (written []blockdev.Extent, err error) {
	err = e.marksFor(ctx, id, generation, func() (err error) {
		written, err = e.local.Marks(ctx, id, since)
		return err
	})
	return written, err
}

// BeginEra: see export.Home.
func (e exports) BeginEra(ctx context.Context, id volume.ID, generation int64) (number uint32, err error) {
	err = e.marksFor(ctx, id, generation, func() (err error) {
		number, err = e.local.BeginEra(ctx, id)
		return err
	})
	return number, err
}

// Close: see export.Home. What is exported to others stays, and what is not exported needs no end. The status says that it has ended, after it has.
func (e exports) Close(ctx context.Context, id volume.ID, generation int64, nqn string) error {
	if err := e.check(); err != nil {
		return err
	}
	return e.withLocks([]string{keylock.Volume(id.Key)}, func() error {
		caller := volume.Grant{Generation: generation, Node: port.CallerNode(ctx)}
		if is, err := e.options.Exporter.IsReader(ctx, id, caller); is || err != nil {
			return errdefs.IgnoreNotFound(errors.Join(err, e.options.Exporter.EndReaders(ctx, id, func(g int64) bool { return g != generation })))
		}
		to, is, err := e.options.Exporter.ExportOf(ctx, id)
		if err == nil && is && nqn != "" { // the call may be late, and the volume have been opened anew since
			is, err = e.options.Exporter.IsExport(ctx, id, nqn)
		}
		if err != nil || !is || to != caller {
			return errdefs.IgnoreNotFound(err)
		}
		return e.options.Exporter.Unexport(ctx, id, generation)
	})
}

// reportExport writes that a volume is exported to a node (status.export). ErrBusy if the object was changed since it was read, as its claim may have been.
func (a *Agent) reportExport(ctx context.Context, v *v1alpha1.Volume, to volume.Grant) error {
	if statusHasExport(v, to) {
		return nil
	}
	err := report(ctx, a, v, func(v *v1alpha1.Volume) { v.Status.Export = newExport(to) })
	if apierrors.IsConflict(err) {
		return fmt.Errorf("%w: the object of volume %s was changed meanwhile", errdefs.ErrBusy, v.Name)
	}
	return kube.APIError("write to whom volume "+v.Name+" is given", err)
}
