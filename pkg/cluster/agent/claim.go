package agent

import (
	"context"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
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

// AwaitClaim: see node.Volumes. It waits for the watch for claimWait, and then asks the API server. A generation that this says there is not, as the object was
// restored or made anew since, is not waited for.
func (a *Agent) AwaitClaim(ctx context.Context, id volume.ID, generation int64) error {
	waiting, cancel := context.WithTimeout(ctx, claimWait)
	defer cancel()
	plain, whole := a.hub.Open(cluster.VolumeNamed(id.Key)), a.hub.Open(cluster.ReplicatedNamed(id.Key))
	defer plain.Close()
	defer whole.Close()
	for a.generationHere(id.Key) < generation {
		select {
		case <-plain.Signal:
			plain.Take()
		case <-whole.Signal:
			whole.Take()
		case <-waiting.Done():
			return a.heardOfClaim(ctx, id)
		}
	}
	return nil
}

// generationHere returns the generation of this node's claim of a volume, by the caches; 0 if they have none.
func (a *Agent) generationHere(key string) (generation int64) {
	if v, is := a.replicated(key); is {
		generation = v.Spec.Claim.Generation
	}
	v := &v1alpha1.Volume{}
	here := a.kube.Cache.Get(context.Background(), client.ObjectKey{Name: key}, v) == nil // reads memory
	if other, is := a.usedHere(key); is {
		v, here = other, true
	}
	if here && v.Spec.ReplicaOf == "" { // the claim of a leg is not that of its volume
		generation = max(generation, claimGeneration(v.ClaimOf(a.local.Node())))
	}
	return generation
}

func claimGeneration(c *v1alpha1.Claim) int64 {
	if c == nil {
		return 0
	}
	return c.Generation
}

// heardOfClaim is ErrUnavailable if the API server has a later claim of a volume for this node than the caches, or does not answer. While the agent has not
// read anything since its start it is nil: what there is goes on without an API server.
func (a *Agent) heardOfClaim(ctx context.Context, id volume.ID) error {
	if !a.read.Load() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, claimWait)
	defer cancel()
	v := &v1alpha1.Volume{}
	err := client.IgnoreNotFound(a.kube.Live.Get(ctx, client.ObjectKey{Name: id.Key}, v))
	now := claimGeneration(v.ClaimOf(a.local.Node()))
	if err == nil && (v.UID == "" || v.Spec.ReplicaOf != "") {
		now = 0
		r := &v1alpha1.ReplicatedVolume{}
		err = client.IgnoreNotFound(a.kube.Live.Get(ctx, client.ObjectKey{Name: id.Key}, r))
		if c := r.Spec.Claim; c != nil && c.Node == a.local.Node() {
			now = c.Generation
		}
	}
	if err != nil {
		return kube.APIError(fmt.Sprintf("find out whether node %s knows of the present claim of volume %s", a.local.Node(), id), err)
	}
	if now > a.generationHere(id.Key) {
		return fmt.Errorf("%w: volume %s is claimed for node %s by generation %d, and its agent has not heard of that yet", errdefs.ErrUnavailable, id, a.local.Node(), now)
	}
	return nil
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
