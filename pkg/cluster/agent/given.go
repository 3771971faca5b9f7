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

// Exporter gives volumes of the node to others, knows to whom, and ends that: volume.Local.
type Exporter interface {
	Export(ctx context.Context, id volume.ID, to volume.Grant) (volume.Exported, error)
	ExportOf(ctx context.Context, id volume.ID) (to volume.Grant, is bool, err error)
	Unexport(ctx context.Context, id volume.ID, generation int64) error

	// Those that many read.
	ExportToRead(ctx context.Context, id volume.ID, to volume.Grant) (volume.Exported, error)
	Readers(ctx context.Context, id volume.ID) (generations []int64, err error)
	IsReader(ctx context.Context, id volume.ID, to volume.Grant) (bool, error)
	EndReadingHere(ctx context.Context, id volume.ID) error
	EndReaders(ctx context.Context, id volume.ID, keep func(generation int64) bool) error
}

// wantsGiven reports whether a volume is to be given to a node, by its object: it is claimed for that, or the object is one that never heard of
// such a claim (it was made anew, or restored) and says of no other. Whoever uses the volume goes on then, until somebody claims it, or releases it.
// To its home nothing is given: that was another node, before its disk came into this one.
func wantsGiven(v *v1alpha1.Volume, to volume.Grant) bool {
	if to.Node == v.Spec.NodeName {
		return false
	}
	if c := v.Spec.Claim; c != nil {
		return c.Node == to.Node && c.Generation == to.Generation
	}
	return v.Spec.Claims < to.Generation
}

// reportGiven writes down to whom a volume is given. What nobody wants any more is ended first.
func (a *Agent) reportGiven(ctx context.Context, v *v1alpha1.Volume) error {
	if a.options.Exporter == nil {
		return nil
	}
	to, is, err := a.options.Exporter.ExportOf(ctx, cluster.VolumeID(v))
	if err != nil || is && wantsGiven(v, to) && saysGiven(v, to) || !is && v.Status.Export == nil {
		return err
	}
	// Nobody is given the volume while that is written: of who opens it then, the object would say nothing.
	return a.withLocks([]string{keylock.Volume(v.Name)}, func() error {
		to, is, err := a.takeBack(ctx, v)
		if err != nil {
			return err
		}
		return report(ctx, a, v, func(v *v1alpha1.Volume) { setGiven(v, to, is) })
	})
}

// given is to whom a volume is given, if this node gives any.
func (a *Agent) given(ctx context.Context, id volume.ID) (to volume.Grant, is bool, err error) {
	if a.options.Exporter == nil {
		return to, false, nil
	}
	return a.options.Exporter.ExportOf(ctx, id)
}

// setGiven has the object of a volume say to whom it is given.
func setGiven(v *v1alpha1.Volume, to volume.Grant, is bool) {
	if !is {
		v.Status.Export = nil
	} else if !saysGiven(v, to) {
		v.Status.Export = newGiven(to)
	}
}

// takeBackDamaged ends what a volume whose record is damaged is given to, if nobody wants that any more, by the API server's own word. Who uses it goes on until
// then: its bytes are there. A node that gives nothing to others any more cannot end that.
func (a *Agent) takeBackDamaged(ctx context.Context, v *v1alpha1.Volume) error {
	given := func(v *v1alpha1.Volume) bool {
		e := v.Status.Export
		return (e == nil || wantsGiven(v, volume.Grant{Generation: e.Generation, Node: e.Node})) &&
			!slices.ContainsFunc(v.Status.Readers, func(e v1alpha1.Export) bool { return !wantsReader(v, e.Generation) })
	}
	if a.options.Network == nil || len(v.Given()) == 0 || given(v) {
		return nil
	}
	now := &v1alpha1.Volume{}
	if err := a.kube.Live.Get(ctx, client.ObjectKeyFromObject(v), now); err != nil || given(now) {
		return err
	}
	return a.takeBackMissing(ctx, v)
}

// takeBackMissing ends what a volume that is missing is given to: nothing of it can be used, and it can be released and deleted then. A node that gives nothing to others any more has
// nothing to end that it knows of: should the volume's record come back, that says to whom it was given, and keeps everybody else from it.
func (a *Agent) takeBackMissing(ctx context.Context, v *v1alpha1.Volume) error {
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

// saysGiven reports whether the object of a volume says that this is given to a node.
func saysGiven(v *v1alpha1.Volume, to volume.Grant) bool {
	have := v.Status.Export
	return have != nil && have.Generation == to.Generation && have.Node == to.Node
}

// unlessAlone is no error where the node gives nothing to others: what it gave since the machine started, before its driver was told so, cannot be ended. Its health says that.
func (a *Agent) unlessAlone(err error) error {
	if a.options.Network == nil && errors.Is(err, errdefs.ErrUnavailable) {
		return nil
	}
	return err
}

func newGiven(to volume.Grant) *v1alpha1.Export {
	now := metav1.Now()
	return &v1alpha1.Export{Generation: to.Generation, Node: to.Node, Since: &now}
}

// takeBack ends what a volume is given to if nobody wants that, by the API server's own word: the watch may be behind a claim that was just made.
// It returns what there is then. The caller has the lock.
func (a *Agent) takeBack(ctx context.Context, v *v1alpha1.Volume) (to volume.Grant, is bool, err error) {
	id := cluster.VolumeID(v)
	if to, is, err = a.options.Exporter.ExportOf(ctx, id); err != nil || !is || wantsGiven(v, to) {
		return to, is, err
	}
	now := &v1alpha1.Volume{}
	if err := a.kube.Live.Get(ctx, client.ObjectKeyFromObject(v), now); err != nil || wantsGiven(now, to) {
		return to, is, err
	}
	klog.FromContext(ctx).Info("Taking back what no claim is for any more", "volume", id.String(), "node", to.Node, "generation", to.Generation)
	err = a.options.Exporter.Unexport(ctx, id, to.Generation)
	return to, err != nil, a.unlessAlone(err)
}
