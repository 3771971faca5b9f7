package agent

import (
	"context"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// claimWait is how long a claim may take to reach the agent's watch, after the kubelet has seen it by way of a VolumeAttachment. Then the API server is
// asked, for claimWait at most.
const claimWait = 2 * time.Second

// Claimed returns how a volume is claimed, by its object in the cache. known is false if no API server has answered since the start, or there is no such
// object. If that claim is not for this node, or allows only reading and readOnly is false, it may be out of date: Claimed waits for the watch for
// claimWait, and then asks the API server.
func (a *Agent) Claimed(ctx context.Context, id volume.ID, readOnly bool) (_ volume.Claim, known bool) {
	if !a.read.Load() {
		return volume.Claim{}, false
	}
	if v, is := a.replicated(id.Key); is && v.ID() == id.String() {
		return cluster.ToClaim(v.Spec.Claim), true
	}
	waiting, cancel := context.WithTimeout(ctx, claimWait)
	defer cancel()
	w := a.hub.Open(cluster.VolumeNamed(id.Key))
	defer w.Close()
	for {
		v := &v1alpha1.Volume{}
		// From the cache itself: the client would wait for the agent's own writes, perhaps to an API server that does not answer.
		err := a.kube.Cache.Get(ctx, client.ObjectKey{Name: id.Key}, v)
		if other, is := a.usedHere(id.Key); err != nil && is {
			v, err = other, nil
		}
		if apierrors.IsNotFound(err) || err == nil && v.Spec.ReplicaOf != "" {
			if claim, is := a.replicaClaim(ctx, id.Key); is {
				return claim, true
			}
			return volume.Claim{}, a.isElsewhere(ctx, id)
		}
		if err != nil || v.Named() != id.Pool {
			return volume.Claim{}, false
		}
		claim := cluster.ClaimOn(v, a.local.Node())
		if claim.Node == a.local.Node() && (readOnly || !claim.ReadOnly) {
			return claim, true
		}
		select {
		case <-w.Signal:
			w.Take()
		case <-waiting.Done():
			return a.liveClaim(ctx, v), true
		}
	}
}

// liveClaim returns how a volume is claimed by the API server; if that does not answer, by was.
func (a *Agent) liveClaim(ctx context.Context, was *v1alpha1.Volume) volume.Claim {
	ctx, cancel := context.WithTimeout(ctx, claimWait)
	defer cancel()
	now := &v1alpha1.Volume{}
	if err := a.kube.Live.Get(ctx, client.ObjectKeyFromObject(was), now); err != nil {
		now = was
	}
	return cluster.ClaimOn(now, a.local.Node())
}
