package agent

import (
	"context"
	"fmt"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// wantsReader reports whether a volume is to be exported to a reader: there is a claim of that generation for many readers, of a node other than the home.
// Without a claim it is false, also if the object was restored to before the claim: a reader that is ended loses nothing.
func wantsReader(v *v1alpha1.Volume, generation int64) bool {
	if generation == 0 {
		return false
	}
	wanted := func(c v1alpha1.Claim) bool {
		return c.Generation == generation && c.Node != v.Spec.NodeName && cluster.ToClaim(&c).Many()
	}
	return v.Spec.Claim != nil && wanted(*v.Spec.Claim) || slices.ContainsFunc(v.Spec.Readers, wanted)
}

// reportReader writes that a volume is exported to a reader (status.readers). It is called before the export. ErrBusy if the object was changed since it was
// read, as its claims may have been.
func (a *Agent) reportReader(ctx context.Context, v *v1alpha1.Volume, to volume.Grant) error {
	if isReader(v, to) {
		return nil
	}
	err := report(ctx, a, v, func(v *v1alpha1.Volume) { v.Status.Readers = append(v.Status.Readers, *newExport(to)) })
	if apierrors.IsConflict(err) {
		return fmt.Errorf("%w: the object of volume %s was changed meanwhile", errdefs.ErrBusy, v.Name)
	}
	return kube.APIError("write to whom volume "+v.Name+" is given to read", err)
}

// isReader reports whether status.readers has an export to a node and generation.
func isReader(v *v1alpha1.Volume, to volume.Grant) bool {
	return slices.ContainsFunc(v.Status.Readers, func(e v1alpha1.Export) bool { return e.Generation == to.Generation && e.Node == to.Node })
}

// reportReaders takes off status.readers the exports to readers that have ended. First it ends those that are not wanted by the object at the API server
// (wantsReader). read is volume.Volume.Read: the record says that the volume is read.
func (a *Agent) reportReaders(ctx context.Context, v *v1alpha1.Volume, read bool) error {
	if a.options.Exporter == nil || volume.Access(v.Spec.Access) != volume.AccessAny {
		return nil
	}
	id := cluster.VolumeID(v)
	have, err := a.options.Exporter.Readers(ctx, id)
	if err != nil {
		return a.ignoreWithoutNetwork(err)
	}
	settled := !slices.ContainsFunc(have, func(g int64) bool { return !wantsReader(v, g) }) &&
		!slices.ContainsFunc(v.Status.Readers, func(e v1alpha1.Export) bool { return !slices.Contains(have, e.Generation) })
	if settled && (len(have) > 0 || !read) { // the record of a volume without readers has to say that it has none
		return nil
	}
	return a.withLocks([]string{keylock.Volume(v.Name)}, func() error {
		now := &v1alpha1.Volume{}
		if err := a.kube.Live.Get(ctx, client.ObjectKeyFromObject(v), now); err != nil {
			return kube.APIError("read volume "+v.Name, err)
		}
		if err := a.options.Exporter.EndReaders(ctx, id, func(g int64) bool { return wantsReader(now, g) }); err != nil {
			return err
		}
		if now.ClaimOf(a.local.Node()) == nil {
			if err := a.options.Exporter.EndReadingHere(ctx, id); err != nil {
				return err
			}
		}
		have, err := a.options.Exporter.Readers(ctx, id)
		if err != nil {
			return err
		}
		return report(ctx, a, v, func(v *v1alpha1.Volume) {
			v.Status.Readers = slices.DeleteFunc(v.Status.Readers, func(e v1alpha1.Export) bool {
				gone := !slices.Contains(have, e.Generation)
				if gone {
					klog.FromContext(ctx).Info("A node is not given a volume to read any more", "volume", id.String(), "node", e.Node, "generation", e.Generation)
				}
				return gone
			})
		})
	})
}
