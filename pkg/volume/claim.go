package volume

import (
	"context"
	"fmt"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Claim gives a volume to a node for its use, from ControllerPublishVolume until ControllerUnpublishVolume.
type Claim struct {
	Node     string
	ReadOnly bool
	// Mode is whether it is for block or mount access, and the CSI access mode: ACCESS,MODE.
	Mode string
	// Generation is larger than that of all earlier claims, if nodes other than its home can use the volume; otherwise 0. The store sets it; callers of
	// Store.Claim leave it 0.
	Generation int64
}

// Claim: see Store.
func (l *Local) Claim(ctx context.Context, id ID, claim Claim) (Claim, error) {
	if claim.Node != l.node {
		return Claim{}, fmt.Errorf("%w: no node %q; volume %s is on node %s", errdefs.ErrNotFound, claim.Node, id, l.node)
	}
	v, err := l.Get(ctx, id)
	if err != nil {
		return Claim{}, err
	}
	switch {
	case v.Claim == claim:
		return claim, nil
	case v.Claim.Node == claim.Node:
		return Claim{}, fmt.Errorf("%w: volume %s is published to node %s with mode %s, read-only %v", errdefs.ErrExists, id, v.Claim.Node, v.Claim.Mode, v.Claim.ReadOnly)
	case v.Claim.Node != "":
		return Claim{}, fmt.Errorf("%w: volume %s is published to node %s", errdefs.ErrInUse, id, v.Claim.Node)
	}
	l.mu.Lock()
	if l.limit > 0 && l.claimed() >= l.limit {
		l.mu.Unlock()
		return Claim{}, fmt.Errorf("%w: node %s has %d volumes, the most it can have", errdefs.ErrLimit, l.node, l.limit)
	}
	l.claims[v.Pool]++
	l.mu.Unlock()
	if err := l.setLabels(ctx, id, func(labels map[string]string) error {
		labels[labelClaimNode], labels[labelClaimMode] = claim.Node, claim.Mode
		if claim.ReadOnly {
			labels[labelClaimRO] = "true"
		}
		return nil
	}); err != nil {
		l.unclaim(v.Pool)
		return Claim{}, err
	}
	return claim, nil
}

// claimed returns how many volumes of the node's pools are claimed. The caller holds mu.
func (l *Local) claimed() (all int64) {
	for _, n := range l.claims {
		all += n
	}
	return all
}

func (l *Local) unclaim(pool string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.claims[pool]--
}

// Release: see Store.
func (l *Local) Release(ctx context.Context, id ID, node string) error {
	v, err := l.Get(ctx, id)
	if err != nil {
		return errdefs.IgnoreNotFound(err)
	}
	if v.Claim.Node == "" || (node != "" && v.Claim.Node != node) {
		return nil
	}
	if err := l.setLabels(ctx, id, func(labels map[string]string) error {
		delete(labels, labelClaimNode)
		delete(labels, labelClaimMode)
		delete(labels, labelClaimRO)
		return nil
	}); err != nil {
		return err
	}
	l.unclaim(v.Pool)
	return nil
}

// Claimed returns the claim of a volume. On a single node it is always known, as the record has it.
func (l *Local) Claimed(_ context.Context, v Volume, _ bool) (claim Claim, known bool) {
	return v.Claim, true
}

// AwaitClaim does nothing: on a single node there are no generations to wait for.
func (l *Local) AwaitClaim(context.Context, ID, int64) error { return nil }
