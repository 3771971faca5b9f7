package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// This file plans the object of a new volume: where the volume is made, how large, and what it is a copy of.

// plan returns the object of a new volume, with its node, its pool (none in refused) and its size.
func (s *Store) plan(ctx context.Context, spec volume.Spec, refused refusals) (v *v1alpha1.Volume, err error) {
	v = cluster.VolumeNamed(volume.KeyOf(spec.Name))
	v.Spec = v1alpha1.VolumeSpec{Intent: v1alpha1.Intent{Make: true}, Pool: spec.Pool, Name: spec.Name, Provisioning: string(spec.Provisioning),
		Filesystem: string(spec.Filesystem), Encryption: string(spec.Encryption.Scheme), EncryptionDiscard: spec.Encryption.Discards,
		Access: string(spec.Access), HomeTimeout: int64(spec.HomeTimeout / time.Second), ReplicaOf: spec.ReplicaOf, Mutable: maps.Clone(spec.Mutable), PersistentVolume: spec.For.PersistentVolume}
	if spec.For.Name != "" {
		v.Spec.ClaimRef = &v1alpha1.ClaimRef{Namespace: spec.For.Namespace, Name: spec.For.Name}
	}
	floor, overhead := spec.MinSize(), spec.Encryption.Scheme.Overhead()
	var from source
	if spec.Source != (volume.ID{}) {
		if from, err = s.planSource(ctx, spec, v); err != nil {
			return nil, err
		}
		floor = max(floor, from.size)
	}
	size, err := spec.Size.Choose(floor, blockdev.Granularity, overhead)
	if err != nil {
		return nil, err
	}
	if v.Spec.Source == nil {
		err = s.planNew(ctx, spec, v, size+overhead, refused)
	} else {
		err = s.planCopy(ctx, spec, from, v, size+overhead, refused)
		if v.Spec.Pool != spec.Source.Pool {
			v.Spec.Source.Pool = spec.Source.Pool
		}
	}
	if err != nil {
		return nil, err
	}
	step, err := s.granularity(ctx, v.Spec.NodeName, v.Spec.Pool)
	if err == nil && spec.ReplicaOf == v.Name { // the first leg: the others are to have its size
		step, err = s.commonStep(ctx, poolsOfLegs(spec, v))
	}
	if err != nil {
		return nil, err
	}
	v.Spec.Size, err = spec.Size.Choose(floor, step, overhead)
	return v, err
}

// planNew chooses the node and pool of a volume that takes size bytes of its pool.
func (s *Store) planNew(ctx context.Context, spec volume.Spec, v *v1alpha1.Volume, size int64, refused refusals) error {
	best, err := s.schedule(ctx, spec, size, refused)
	if err != nil {
		return err
	}
	if isFurther(spec) && !best.Fits(size) { // for a further leg no pool is asked that does not seem to have room
		return fmt.Errorf("%w: no other node has room for %d bytes", errdefs.ErrNoSpace, size)
	}
	v.Spec.NodeName, v.Spec.Pool = best.Spec.NodeName, best.Spec.Pool
	return nil
}

// mayReach returns ErrPrecondition for a copy with access any on the node of its source, if that is in no network.
func (s *Store) mayReach(ctx context.Context, spec volume.Spec, home string) error {
	if spec.Access != volume.AccessAny {
		return nil
	}
	networks, err := s.Networks(ctx)
	if err == nil && networks[home] == "" {
		err = fmt.Errorf("%w: source %s is on node %s, and so is its copy, which %s", errdefs.ErrPrecondition, spec.Source, home, unreached)
	}
	return err
}

// planSource sets the source of a copy, and its node to that of the source.
func (s *Store) planSource(ctx context.Context, spec volume.Spec, v *v1alpha1.Volume) (source, error) {
	from, err := s.findSource(ctx, spec.Source)
	if err != nil {
		return source{}, err
	}
	v.Spec.NodeName, v.Spec.Source = from.node, &v1alpha1.Source{Kind: string(spec.Source.Kind), Key: spec.Source.Key}
	return from, spec.CheckSource(from.holds)
}

// planCopy chooses the node and pool of a copy that takes size bytes of its pool: those of its source, if the class allows that. Elsewhere all bytes have to
// be copied.
func (s *Store) planCopy(ctx context.Context, spec volume.Spec, from source, v *v1alpha1.Volume, size int64, refused refusals) error {
	home, pool := from.node, from.pool
	where := spec
	if spec.Copies == volume.CopiesAnywhere {
		stays, err := s.stays(ctx, spec, from, size, refused)
		if err != nil {
			return err
		}
		if where.Pool = cmp.Or(spec.Pool, pool); stays {
			where.Nodes = []string{home}
		}
	} else {
		if err := s.mayBeOn(ctx, spec, home); err != nil {
			return fmt.Errorf("source %s is on node %s, and so are its copies, as the class does not say copies=%s: %w", spec.Source, home, volume.CopiesAnywhere, err)
		}
		where.Nodes = []string{home}
	}
	if len(where.Nodes) == 1 && where.Nodes[0] == home && !spec.Elsewhere(pool) {
		if err := refused[overview.PoolName(home, pool)]; err != nil {
			return fmt.Errorf("%w: source %s is on node %s, and so are its copies, as the class does not say copies=%s: %w", errdefs.ErrNoSpace, spec.Source, home, volume.CopiesAnywhere, err)
		}
		v.Spec.Pool = pool
		return cmp.Or(s.mayReach(ctx, spec, home), s.homeReady(ctx, home))
	}
	if err := s.planNew(ctx, where, v, size, refused); err != nil {
		return err
	}
	if v.Spec.NodeName == home && !spec.Elsewhere(pool) {
		v.Spec.Pool = pool
	}
	if v.Spec.NodeName == home {
		return nil
	}
	v.Spec.Source.NodeName = home
	for _, pool := range []string{overview.PoolName(home, pool), overview.PoolName(v.Spec.NodeName, v.Spec.Pool)} {
		if _, err := s.endpoint(ctx, pool, false); err != nil {
			return errdefs.Recast(errdefs.ErrPrecondition, err, "parameter copies=%s: %s is on node %s, and would be copied to node %s; pool %s", volume.CopiesAnywhere, spec.Source, home, v.Spec.NodeName, pool)
		}
	}
	return nil
}

// stays reports whether a copy that may be anywhere is best made on the node of its source. That has to be ready, not cordoned, and the first of spec.Nodes
// if there are any. It has to have a pool with room that can enforce the limits and is not in refused.
func (s *Store) stays(ctx context.Context, spec volume.Spec, from source, size int64, refused refusals) (bool, error) {
	home, pool := from.node, from.pool
	if len(spec.Nodes) > 0 && spec.Nodes[0] != home || s.nodes.Ready(ctx, home) != nil {
		return false, nil
	}
	if node, err := s.node(ctx, home); err != nil || node.Spec.Unschedulable {
		return false, err
	}
	if spec.Elsewhere(pool) {
		pool = spec.Pool
	}
	found, err := s.findRoom(ctx, pool, []string{home}, volume.Requester{})
	return slices.ContainsFunc(found, func(r room) bool { return r.Fits(size) && r.limits(spec.Mutable) && !refused.has(r.Name) }), err
}

// source is the volume or snapshot that is copied: where it is, its size in bytes, and what it holds.
type source struct {
	node, pool string
	size       int64
	holds      volume.Contents
}

// findSource returns the source with an ID. The filesystem of a snapshot is that of its volume, and unknown here if that is gone: the node knows it in any
// case.
func (s *Store) findSource(ctx context.Context, id volume.ID) (source, error) {
	if id.Kind != blockdev.Snapshot {
		v, err := s.cloned(ctx, id)
		return source{v.Node, v.Pool, v.Size, volume.Contents{Filesystem: v.Filesystem, Scheme: v.Encryption.Scheme}}, err
	}
	snapshot, err := s.readableSnapshot(ctx, id)
	if err != nil {
		return source{}, err
	}
	v, _ := s.Get(ctx, snapshot.Source) // an error is ignored: the volume may be lost or gone, and its snapshots are there all the same
	return source{snapshot.Node, id.Pool, snapshot.Size, volume.Contents{Filesystem: v.Filesystem, Scheme: snapshot.Scheme}}, nil
}

// cloned returns a volume that is to be cloned. If it has several legs, its ID names to a node only the leg with the same key: ErrPrecondition if that leg
// is not there or not current.
func (s *Store) cloned(ctx context.Context, id volume.ID) (volume.Volume, error) {
	r, err := s.replicated(ctx, id)
	if r == nil || err != nil {
		if err != nil {
			return volume.Volume{}, err
		}
		return s.Get(ctx, id)
	}
	legs, err := s.legs(ctx, r)
	if err == nil {
		err = usableReplicated(r)
	}
	if err != nil {
		return volume.Volume{}, err
	}
	i := slices.IndexFunc(legs, func(v *v1alpha1.Volume) bool { return v.Name == r.Name })
	switch {
	case i < 0:
		err = errors.New("has other replicas than that which it was made with, and cannot be cloned")
	case len(currentLegs(r, legs[i:i+1])) == 0:
		err = fmt.Errorf("can be cloned on node %s only, of its replica there: %s", legs[i].Spec.NodeName, notCurrent(legs[i], r.Leg(r.Name)))
	default:
		return cluster.ToReplicated(r, legs[i]), nil
	}
	return volume.Volume{}, fmt.Errorf("%w: volume %s %w; make a snapshot of it, and a volume of that", errdefs.ErrPrecondition, id, err)
}
