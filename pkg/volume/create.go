package volume

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/ashlar-csi/ashlar/internal/poolset"
	"github.com/ashlar-csi/ashlar/internal/trace"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/luks"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
)

// Spec says what volume to create.
type Spec struct {
	Name string
	Pool string // a pool by its name, or a set of pools (poolset.Set); empty: the pool of the source, or without a source the default one
	// Spread matters where one of several pools is chosen, so not for a copy in the pool of its source.
	Spread       Spread
	Size         Range
	Provisioning blockdev.Provisioning
	// Source to copy: a volume or a snapshot; the zero ID for an empty volume.
	Source ID
	Copies Copies
	// Filesystem that the volume is to carry; empty: it is a raw block device.
	Filesystem filesystem.Type
	Encryption Encryption
	Access     Access
	// HomeTimeout: see Volume.
	HomeTimeout time.Duration
	Replicas    Replicas
	// ReplicaOf: see Volume.
	ReplicaOf string
	Mutable   map[string]string
	// Nodes of which the volume has to be usable on one, the best first; empty: on any node.
	Nodes []string
	// Ephemeral is the path at which a pod has its inline volume published; the volume is deleted with the pod. Empty: it is not of a pod.
	Ephemeral string
	// For is who asked for the volume, as far as the CO says. Of it only Spread depends.
	For Requester
	// Object: see Volume.
	Object string
}

// Requester is whom the CO asked for a volume for. In Kubernetes that is the namespace and the name of a PersistentVolumeClaim, and the name of the
// PersistentVolume. Each may be empty: unknown. It is shown to people, helps to restore objects that were lost, and tells the peers of a volume (PeerOf).
type Requester struct{ Namespace, Name, PersistentVolume string }

// MinSize returns the smallest size that a volume of the spec can have, in bytes. That of its source may be larger.
func (s Spec) MinSize() int64 {
	if s.Filesystem == "" {
		return blockdev.Granularity
	}
	return s.Filesystem.MinSize()
}

// Check returns ErrExists if an existing volume is not the one that the spec asks for. It does not compare Spread, Copies, Mutable, Nodes, For and Object. An
// empty Pool or Provisioning fits any.
func (s Spec) Check(v Volume) error {
	differs := func(what string, have, want any) error {
		return fmt.Errorf("%w: volume %q (%s) has %s %v, not %v", errdefs.ErrExists, s.Name, v.ID, what, have, want)
	}
	switch {
	case v.Name != s.Name:
		return differs("name", v.Name, s.Name)
	case s.Pool != "" && !poolset.Set(s.Pool).Has(v.ID.Pool):
		return differs("pool", v.ID.Pool, s.Pool)
	case !s.Size.includes(v.Size):
		return differs("size", v.Size, s.Size)
	case s.Provisioning != blockdev.AnyProvisioning && blockdev.ProvisioningOf(v.Thin) != s.Provisioning:
		return differs("provisioning", blockdev.ProvisioningOf(v.Thin), s.Provisioning)
	case v.Source != s.Source:
		return differs("source", v.Source, s.Source)
	case v.Filesystem != s.Filesystem:
		return differs("filesystem", v.Filesystem, s.Filesystem)
	case v.Encryption != s.Encryption:
		return differs("encryption", v.Encryption, s.Encryption)
	case v.Access != s.Access:
		return differs("access", v.Access, s.Access)
	case v.Replicas != s.Replicas.Legs():
		return differs("replicas", v.Replicas, s.Replicas.Legs())
	case v.ReplicaOf != s.ReplicaOf:
		return differs("volume that it is a leg of", v.ReplicaOf, s.ReplicaOf)
	case v.HomeTimeout != s.HomeTimeout:
		return differs("home timeout", v.HomeTimeout, s.HomeTimeout)
	case v.Ephemeral != s.Ephemeral:
		return differs("pod", v.Ephemeral, s.Ephemeral)
	}
	return nil
}

// Create: see Store. ErrNoSpace also if this node is not one of spec.Nodes, or cannot set the mutable parameters.
func (l *Local) Create(ctx context.Context, spec Spec) (Volume, error) {
	if err := l.check(spec); err != nil {
		return Volume{}, err
	}
	if len(spec.Nodes) > 0 && !slices.Contains(spec.Nodes, l.node) {
		return Volume{}, fmt.Errorf("%w: volumes of this store are on node %s, not on %v", errdefs.ErrNoSpace, l.node, spec.Nodes)
	}
	in, record, err := l.named(ctx, blockdev.Volume, spec.Name)
	switch {
	case err == nil && !unfinished(record):
		v := fromRecord(in.Name(), l.node, record)
		return v, spec.Check(v)
	case err == nil && !spec.Elsewhere(l.placeOf(spec.Source)): // an unfinished copy, made for another spec; nobody has used it
		err = l.dropUnfinished(ctx, in, record.Ref)
	default:
		err = errdefs.IgnoreNotFound(err)
	}
	if err != nil {
		return Volume{}, err
	}
	if spec.Source == (ID{}) {
		return l.createEmpty(ctx, spec)
	}
	return l.createCopy(ctx, spec)
}

// check returns an error if this node cannot make volumes of a spec: ErrNoSpace if it cannot set the mutable parameters, as another node may; ErrUnsupported
// if it cannot encrypt; ErrInvalid if no node can make them.
func (l *Local) check(spec Spec) error {
	if err := CheckMutable(spec.Mutable); err != nil {
		return err
	}
	if err := CheckPlacement(spec.Access, spec.Replicas.Legs(), spec.Mutable); err != nil {
		return err
	}
	if err := supportsMutable(spec.Mutable); err != nil {
		return errdefs.Recast(errdefs.ErrNoSpace, errors.New(errdefs.Words(err)), "node %s cannot have such a volume", l.node)
	}
	switch spec.Encryption.Scheme {
	case NotEncrypted:
		return nil
	case LUKS2:
		if err := luks.Available(); err != nil {
			return fmt.Errorf("node %s: %w", l.node, err)
		}
		return nil
	}
	return fmt.Errorf("%w: unknown encryption %q; %s is known", errdefs.ErrInvalid, spec.Encryption.Scheme, LUKS2)
}

// createEmpty makes a volume whose bytes are zeros.
func (l *Local) createEmpty(ctx context.Context, spec Spec) (Volume, error) {
	pools, err := l.poolsOf(spec.Pool)
	if err != nil {
		return Volume{}, err
	}
	if len(pools) == 1 && spec.Spread == NoSpread {
		return l.createIn(ctx, spec, pools[0])
	}
	return l.createPlaced(ctx, spec, pools, 0, l.createIn)
}

// createIn makes an empty volume in a pool.
func (l *Local) createIn(ctx context.Context, spec Spec, pool blockdev.Pool) (Volume, error) {
	create, err := newVolume(spec, pool, 0)
	if err != nil {
		return Volume{}, err
	}
	record, err := l.create(ctx, pool, create)
	if err != nil {
		return Volume{}, err
	}
	return fromRecord(pool.Name(), l.node, record), nil
}

// createCopy makes a volume as a copy of a volume or snapshot, in the pool of the source if spec.Pool allows that, else by createElsewhere. The writers of a
// volume are held back, where they can be (quiesce), until its bytes are fixed.
func (l *Local) createCopy(ctx context.Context, spec Spec) (Volume, error) {
	release, err := l.holdSource(spec.Source)
	if err != nil {
		return Volume{}, err
	}
	defer release()
	source, err := l.source(ctx, spec.Source)
	if err != nil {
		return Volume{}, err
	}
	if err := spec.CheckSource(contentsOf(source.record)); err != nil {
		return Volume{}, err
	}
	if spec.Elsewhere(source.pool.Name()) {
		return l.createElsewhere(ctx, spec)
	}
	create, err := newVolume(spec, source.pool, sizeOf(source.record))
	if err != nil {
		return Volume{}, err
	}
	create.Origin, create.Prepare = source.record.Ref, separateOf(spec)
	labelOrigin(create.Labels, source.pool.Name(), spec.Source)
	copyFormat(create.Labels, parseFormat(source.record.Labels[labelFormat]))
	if spec.Encryption.Scheme != NotEncrypted {
		header := parseHeader(source.record.Labels[labelHeader])
		create.Prepare = copyHeader(create.Labels, create.Key, header)
	}
	thaw := func() error { return nil }
	if spec.Source.Kind == blockdev.Volume {
		if ctx, create.Quiesced, thaw, err = l.quiesce(ctx, source); err != nil {
			return Volume{}, err
		}
	}
	create.Cut = func(context.Context) error { return thaw() }
	record, err := l.create(ctx, source.pool, create)
	if err = withThaw(freezeError(ctx, err), thaw()); err != nil {
		return Volume{}, err
	}
	return fromRecord(source.pool.Name(), l.node, record), nil
}

// separateOf returns what gives the filesystem in a copy that is not encrypted an identity of its own; nil for a raw block device. Such a copy has the bytes
// of its source, whatever they are: a backup tool reads in it what changed in its snapshot, and would read what was rewritten only here and there.
func separateOf(spec Spec) func(ctx context.Context, path string) error {
	if spec.Filesystem == "" {
		return nil
	}
	return filesystem.Separate
}

// create makes an object in a pool. Progress shows how far that is.
func (l *Local) create(ctx context.Context, pool blockdev.Pool, spec blockdev.Spec) (_ blockdev.Record, err error) {
	what := "allocate"
	if spec.Origin != (blockdev.Ref{}) {
		what = "copy"
	}
	ctx, span := trace.Start(ctx, what, "pool", pool.Name(), "object", spec.Ref.String())
	defer func() { span(err) }()
	ctx, end := l.progress.Track(ctx, pool.Name(), spec.Ref.String())
	defer end()
	return pool.Create(ctx, spec)
}

// poolsOf returns the pools of this node that are in a set (poolset.Set); for the empty set the default one. ErrInvalid if there is none.
func (l *Local) poolsOf(set string) ([]blockdev.Pool, error) {
	if set == "" {
		return l.pools[:1], nil
	}
	var pools []blockdev.Pool
	for _, pool := range l.pools {
		if poolset.Set(set).Has(pool.Name()) {
			pools = append(pools, pool)
		}
	}
	if len(pools) == 0 {
		return nil, fmt.Errorf("%w: parameter pool=%q: known are %v", errdefs.ErrInvalid, set, l.poolNames())
	}
	return pools, nil
}

// newVolume returns what to create in a pool for a spec: a volume of at least floor bytes, and of as many as its filesystem needs. Errors are those of
// Range.Choose.
func newVolume(spec Spec, pool blockdev.Pool, floor int64) (blockdev.Spec, error) {
	overhead := spec.Encryption.Scheme.Overhead()
	size, err := spec.Size.Choose(max(floor, spec.MinSize()), pool.Granularity(), overhead)
	if err != nil {
		return blockdev.Spec{}, err
	}
	return blockdev.Spec{Ref: blockdev.Ref{Kind: blockdev.Volume, Key: KeyOf(spec.Name)}, Name: spec.Name, Size: size + overhead,
		Provisioning: spec.Provisioning, Labels: spec.labels()}, nil
}

// origin is a volume or snapshot that is to be copied.
type origin struct {
	pool   blockdev.Pool
	record blockdev.Record
}

func (o origin) id() ID { return IDOf(o.pool.Name(), o.record) }

// holdSource keeps a snapshot that is copied or read from being deleted until release is called: whoever deletes its group, or ends its move, need not have
// its lock. ErrBusy while such a deletion is under way.
func (l *Local) holdSource(id ID) (release func(), err error) {
	return l.lockSources(nil, []string{id.String()})
}

func (l *Local) lockSources(exclusive, shared []string) (release func(), err error) {
	unlock, busy := l.sources.TryLock(exclusive, shared)
	if unlock == nil {
		return nil, fmt.Errorf("%w: %s is being copied, read, or deleted; try again", errdefs.ErrBusy, busy)
	}
	return unlock, nil
}

// source returns the volume or snapshot of an ID, to be copied. ErrNotFound if there is none; ErrUnavailable if it is an unfinished copy; errors of stillHere
// if it is a volume that may have moved away.
func (l *Local) source(ctx context.Context, id ID) (origin, error) {
	if id.Kind == blockdev.Snapshot {
		if _, err := l.GetSnapshot(ctx, id); err != nil {
			return origin{}, err
		}
	}
	pool, ref, err := l.object(id, id.Kind)
	if err != nil {
		return origin{}, err
	}
	record, err := pool.Get(ctx, ref)
	switch {
	case err != nil || id.Kind != blockdev.Volume:
	case unfinished(record):
		err = fmt.Errorf("%w: volume %s is being copied", errdefs.ErrUnavailable, id)
	default:
		err = l.stillHere(ctx, id, pool.Name(), record)
	}
	return origin{pool, record}, err
}

// named returns the object of a name, and its pool. ErrNotFound if no open pool has it.
//
// A pool that is not open may have it. If the caller then creates the object in that pool, by its name, that fails with ErrUnavailable, and nothing is made
// twice. If the caller has a set of pools, another pool makes it again: one missing disk must not keep all others from being used.
func (l *Local) named(ctx context.Context, kind blockdev.Kind, name string) (blockdev.Pool, blockdev.Record, error) {
	ref := blockdev.Ref{Kind: kind, Key: KeyOf(name)}
	for _, pool := range l.openPools() {
		record, err := pool.Get(ctx, ref)
		if err == nil {
			return pool, record, nil
		}
		if !errors.Is(err, errdefs.ErrNotFound) {
			return nil, blockdev.Record{}, err
		}
	}
	return nil, blockdev.Record{}, fmt.Errorf("%w: no %s named %q", errdefs.ErrNotFound, kind, name)
}

// Ephemeral returns the ephemeral volume of a name. ErrNotFound if there is none, or that volume is not ephemeral.
func (l *Local) Ephemeral(ctx context.Context, name string) (Volume, error) {
	pool, record, err := l.named(ctx, blockdev.Volume, name)
	if err != nil {
		return Volume{}, err
	}
	v := fromRecord(pool.Name(), l.node, record)
	if v.Ephemeral == "" {
		return Volume{}, fmt.Errorf("%w: %q is no ephemeral volume", errdefs.ErrNotFound, name)
	}
	return v, nil
}
