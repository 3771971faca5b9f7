package store

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

var _ volume.Differ = (*Store)(nil)

// Allocated: see volume.Differ. It asks the agent of the snapshot's node. Nothing is buffered: while yield waits, so does the agent.
func (s *Store) Allocated(ctx context.Context, id volume.ID, from int64, yield func(blockdev.Extent) error) error {
	snapshot, err := s.readableSnapshot(ctx, id)
	if err != nil {
		return err
	}
	return s.ask(ctx, snapshot, inOrder(snapshot, from, yield), func(ctx context.Context, agent csi.SnapshotMetadataClient) (ranges, error) {
		return agent.GetMetadataAllocated(ctx, &csi.GetMetadataAllocatedRequest{SnapshotId: id.String(), StartingOffset: from})
	}, func(r ranges) ([]*csi.BlockMetadata, error) {
		m := &csi.GetMetadataAllocatedResponse{}
		err := r.RecvMsg(m)
		return m.GetBlockMetadata(), err
	})
}

// Changed: see volume.Differ. ErrInvalid also if the snapshots are not in one pool of one node: then no agent has the bytes of both.
func (s *Store) Changed(ctx context.Context, base, target volume.ID, from int64, yield func(blockdev.Extent) error) error {
	snapshot, err := s.readableSnapshot(ctx, target)
	if err != nil {
		return err
	}
	before, err := s.GetSnapshot(ctx, base)
	if err := snapshot.CheckBase(base, before, err); err != nil {
		return err
	}
	if _, err := s.readableSnapshot(ctx, base); err != nil {
		return err
	}
	if before.Node != snapshot.Node || base.Pool != target.Pool {
		return fmt.Errorf("%w: %s is on node %s, in pool %s, and %s on node %s, in pool %s: only snapshots in one pool can be compared; read all that the target has", errdefs.ErrInvalid,
			base, before.Node, base.Pool, target, snapshot.Node, target.Pool)
	}
	return s.ask(ctx, snapshot, inOrder(snapshot, from, yield), func(ctx context.Context, agent csi.SnapshotMetadataClient) (ranges, error) {
		return agent.GetMetadataDelta(ctx, &csi.GetMetadataDeltaRequest{BaseSnapshotId: base.String(), TargetSnapshotId: target.String(), StartingOffset: from})
	}, func(r ranges) ([]*csi.BlockMetadata, error) {
		m := &csi.GetMetadataDeltaResponse{}
		err := r.RecvMsg(m)
		return m.GetBlockMetadata(), err
	})
}

// inOrder returns yield with a check that ranges are in order, do not overlap, and are within the snapshot and after from, as volume.Differ demands:
// otherwise ErrUnavailable. An agent that answers anything else has a bug or is in other hands, and its answer might never end.
func inOrder(of volume.Snapshot, from int64, yield func(blockdev.Extent) error) func(blockdev.Extent) error {
	end := int64(0)
	return func(e blockdev.Extent) error {
		if e.Length <= 0 || e.Offset < end || e.Length > of.Size-e.Offset || e.Offset+e.Length <= from {
			return fmt.Errorf("%w: the agent of node %s says that %d bytes at %d are of %s, which has %d, after those up to %d; look at what runs there",
				errdefs.ErrUnavailable, of.Node, e.Length, e.Offset, of.ID, of.Size, end)
		}
		end = e.Offset + e.Length
		return yield(e)
	}
}

// ranges is a stream of answers from an agent.
type ranges interface{ RecvMsg(m any) error }

// ask calls yield with what the agent of a snapshot's node answers. An agent that was started again has another key: so if it has not answered at all, it is
// asked once more, at the endpoint that the API server has.
func (s *Store) ask(ctx context.Context, snapshot volume.Snapshot, yield func(blockdev.Extent) error,
	open func(context.Context, csi.SnapshotMetadataClient) (ranges, error), next func(ranges) ([]*csi.BlockMetadata, error),
) error {
	if s.agents == nil {
		return fmt.Errorf("%w: what is allocated and what changed is known to the nodes, and this controller does not ask them (--snapshot-metadata)", errdefs.ErrUnsupported)
	}
	if err := s.nodes.Ready(ctx, snapshot.Node); err != nil {
		return fmt.Errorf("ask for the blocks of %s: %w", snapshot.ID, err)
	}
	ctx, cancel := context.WithCancel(ctx) // so that the agent stops when this returns
	defer cancel()
	for again := false; ; again = true {
		answered, err := s.askOnce(ctx, snapshot, again, yield, open, next)
		if err == nil || answered || again || !errors.Is(err, errdefs.ErrUnavailable) || ctx.Err() != nil {
			return err
		}
	}
}

// askOnce is one try of ask; with live the endpoint is read at the API server. answered: something was received.
func (s *Store) askOnce(ctx context.Context, snapshot volume.Snapshot, live bool, yield func(blockdev.Extent) error,
	open func(context.Context, csi.SnapshotMetadataClient) (ranges, error), next func(ranges) ([]*csi.BlockMetadata, error),
) (answered bool, err error) {
	failed := func(err error) error {
		return fmt.Errorf("ask the agent of node %s for the blocks of %s: %w", snapshot.Node, snapshot.ID, err)
	}
	at, err := s.endpoint(ctx, overview.PoolName(snapshot.Node, snapshot.ID.Pool), live)
	if err != nil {
		return false, failed(err)
	}
	connection, err := s.agents.Agent(snapshot.Node, at)
	if err != nil {
		return false, failed(err)
	}
	stream, err := open(ctx, csi.NewSnapshotMetadataClient(connection))
	if err != nil {
		return false, failed(err)
	}
	for {
		list, err := next(stream)
		if errors.Is(err, io.EOF) {
			return true, nil
		}
		if err != nil {
			return answered, failed(err)
		}
		answered = true
		for _, r := range list {
			if err := yield(blockdev.Extent{Offset: r.GetByteOffset(), Length: r.GetSizeBytes()}); err != nil {
				return true, err
			}
		}
	}
}

// endpoint returns where the agent of a pool is reached, by the object of the pool: from the cache, or with live from the API server. ErrUnavailable if that
// does not say.
func (s *Store) endpoint(ctx context.Context, pool string, live bool) (v1alpha1.AgentEndpoint, error) {
	var reader client.Reader = s.kube.Client
	if live {
		reader = s.kube.Live
	}
	p := &v1alpha1.Pool{}
	if err := reader.Get(ctx, client.ObjectKey{Name: pool}, p); err != nil {
		return v1alpha1.AgentEndpoint{}, errdefs.Recast(errdefs.ErrUnavailable, kube.APIError("read pool "+pool, err), "where it is, is not known")
	}
	if p.Status.Agent == nil {
		return v1alpha1.AgentEndpoint{}, fmt.Errorf("%w: it has no port: start the node's driver with --agent-endpoint", errdefs.ErrUnavailable)
	}
	return *p.Status.Agent, nil
}
