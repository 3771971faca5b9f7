package agent

import (
	"context"
	"errors"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// Exporter exports volumes of the node to other nodes, knows to which, and ends that: volume.Local.
type Exporter interface {
	Export(ctx context.Context, id volume.ID, to volume.Grant) (volume.Exported, error)
	ExportOf(ctx context.Context, id volume.ID) (to volume.Grant, is bool, err error)
	IsExport(ctx context.Context, id volume.ID, nqn string) (bool, error)
	Unexport(ctx context.Context, id volume.ID, generation int64) error
	// Gives does not need the pool of the volume.
	Gives(ctx context.Context, id volume.ID) (bool, error)

	// Exports to the readers of a volume that many nodes read.
	ExportToRead(ctx context.Context, id volume.ID, to volume.Grant) (volume.Exported, error)
	Readers(ctx context.Context, id volume.ID) (generations []int64, err error)
	IsReader(ctx context.Context, id volume.ID, to volume.Grant) (bool, error)
	EndReadingHere(ctx context.Context, id volume.ID) error
	EndReaders(ctx context.Context, id volume.ID, keep func(generation int64) bool) error
}

// wantsExport reports whether a volume is to be exported to a node, by its object: it is claimed for that node, or the object was made anew or restored, and
// so does not know of such a claim, nor has another one. In that case the user goes on until somebody claims or releases the volume. Nothing is exported to
// the home itself: it was another node, before the disk came into this one.
func wantsExport(v *v1alpha1.Volume, to volume.Grant) bool {
	if to.Node == v.Spec.NodeName {
		return false
	}
	if c := v.Spec.Claim; c != nil {
		return c.Node == to.Node && c.Generation == to.Generation
	}
	return v.Spec.Claims < to.Generation
}

// syncExport writes to which node a volume is exported (status.export), after it has ended an export that nobody wants any more.
func (a *Agent) syncExport(ctx context.Context, v *v1alpha1.Volume) error {
	if a.options.Exporter == nil {
		return nil
	}
	to, is, err := a.options.Exporter.ExportOf(ctx, cluster.VolumeID(v))
	if err != nil || is && wantsExport(v, to) && statusHasExport(v, to) || !is && v.Status.Export == nil {
		return err
	}
	// The lock keeps the volume from being exported meanwhile: the object would not say so.
	return a.withLocks([]string{keylock.Volume(v.Name)}, func() error {
		to, is, err := a.endUnwantedExport(ctx, v)
		if err != nil {
			return err
		}
		return report(ctx, a, v, func(v *v1alpha1.Volume) { setExport(v, to, is) })
	})
}

// currentExport returns to which node a volume is exported, if it is.
func (a *Agent) currentExport(ctx context.Context, id volume.ID) (to volume.Grant, is bool, err error) {
	if a.options.Exporter == nil {
		return to, false, nil
	}
	return a.options.Exporter.ExportOf(ctx, id)
}

// setExport sets status.export.
func setExport(v *v1alpha1.Volume, to volume.Grant, is bool) {
	if !is {
		v.Status.Export = nil
	} else if !statusHasExport(v, to) {
		v.Status.Export = newExport(to)
	}
}

// endExportOfDamaged ends the exports of a volume whose record is damaged, if the API server itself says that nobody wants one of them any more. Until then
// its users go on: the bytes are there. A node without a network cannot end them.
func (a *Agent) endExportOfDamaged(ctx context.Context, v *v1alpha1.Volume) error {
	given := func(v *v1alpha1.Volume) bool {
		e := v.Status.Export
		return (e == nil || wantsExport(v, volume.Grant{Generation: e.Generation, Node: e.Node})) &&
			!slices.ContainsFunc(v.Status.Readers, func(e v1alpha1.Export) bool { return !wantsReader(v, e.Generation) })
	}
	if a.options.Network == nil || len(v.Given()) == 0 || given(v) {
		return nil
	}
	now := &v1alpha1.Volume{}
	if err := a.kube.Live.Get(ctx, client.ObjectKeyFromObject(v), now); err != nil || given(now) {
		return err
	}
	return a.endExportOfMissing(ctx, v)
}

// endExportOfMissing ends the exports of a volume that is missing, so that it can be released and deleted. A node without an Exporter has nothing to end:
// should the volume's record come back, that says to which node it was exported, and keeps all others from it.
func (a *Agent) endExportOfMissing(ctx context.Context, v *v1alpha1.Volume) error {
	if a.options.Exporter == nil || len(v.Given()) == 0 {
		return nil
	}
	return a.withLocks([]string{keylock.Volume(v.Name)}, func() error {
		if err := a.options.Exporter.Unexport(ctx, cluster.VolumeID(v), 0); err != nil {
			return err
		}
		return report(ctx, a, v, func(v *v1alpha1.Volume) { v.Status.Export, v.Status.Readers = nil, nil })
	})
}

// dropUngiven takes off the status what was given of a volume whose record cannot be read, as the pool does not answer or the record is damaged, if the kernel
// gives nothing of it: so the machine has started anew, or another tool has cleared the kernel's target. The nodes that used it find out by that, and what
// waits there fails (homes.Ended). Else they would wait for as long as nobody can read the record, and so would the releases of their claims. Should it be
// back, it says what there is to give again or to end (volume.Local.ServeExports). A node without a network does the same: its kernel may have come up without
// what a network needs, and its pool too.
func (a *Agent) dropUngiven(ctx context.Context, v *v1alpha1.Volume) error {
	if a.options.Exporter == nil || len(v.Given()) == 0 {
		return nil
	}
	id := cluster.VolumeID(v)
	return a.withLocks([]string{keylock.Volume(v.Name)}, func() error {
		_, _, err := a.options.Exporter.ExportOf(ctx, id)
		if !errors.Is(err, errdefs.ErrUnavailable) && !errors.Is(err, errdefs.ErrDataLoss) {
			return nil // it can be read again
		}
		if gives, err := a.options.Exporter.Gives(ctx, id); gives || err != nil {
			return a.ignoreWithoutNetwork(err)
		}
		klog.FromContext(ctx).Info("The record of a volume cannot be read, and the kernel does not give the volume to other nodes any more; who used it there gets errors, and has to stage it again",
			"volume", id.String(), "given", v.Given())
		return report(ctx, a, v, func(v *v1alpha1.Volume) { v.Status.Export, v.Status.Readers = nil, nil })
	})
}

// statusHasExport reports whether status.export is of a claim and node.
func statusHasExport(v *v1alpha1.Volume, to volume.Grant) bool {
	have := v.Status.Export
	return have != nil && have.Generation == to.Generation && have.Node == to.Node
}

// ignoreWithoutNetwork ignores ErrUnavailable on a node without a network: what it exported since the machine started, when its driver still had one, cannot
// be ended. The health of the volume says so.
func (a *Agent) ignoreWithoutNetwork(err error) error {
	if a.options.Network == nil && errors.Is(err, errdefs.ErrUnavailable) {
		return nil
	}
	return err
}

func newExport(to volume.Grant) *v1alpha1.Export {
	now := metav1.Now()
	return &v1alpha1.Export{Generation: to.Generation, Node: to.Node, Since: &now}
}

// endUnwantedExport ends the export of a volume if the API server itself says that nobody wants it: the watch may lag behind a claim that was just made.
// It returns what there is then. The caller has the lock.
func (a *Agent) endUnwantedExport(ctx context.Context, v *v1alpha1.Volume) (to volume.Grant, is bool, err error) {
	id := cluster.VolumeID(v)
	if to, is, err = a.options.Exporter.ExportOf(ctx, id); err != nil || !is || wantsExport(v, to) {
		return to, is, err
	}
	now := &v1alpha1.Volume{}
	if err := a.kube.Live.Get(ctx, client.ObjectKeyFromObject(v), now); err != nil || wantsExport(now, to) {
		return to, is, err
	}
	klog.FromContext(ctx).Info("Taking back what no claim is for any more", "volume", id.String(), "node", to.Node, "generation", to.Generation)
	err = a.options.Exporter.Unexport(ctx, id, to.Generation)
	return to, err != nil, a.ignoreWithoutNetwork(err)
}
