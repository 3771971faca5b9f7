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
	Pool string // name of one, or a set of them (poolset.Set); empty: the source's, or else the default
	// Spread over the pools that it may be in; it makes no difference to a copy.
	Spread Spread
	Size   Range
	// Provisioning: AnyProvisioning takes the pool's own way.
	Provisioning blockdev.Provisioning
	// Source to copy: a volume or a snapshot; the zero ID for an empty volume.
	Source ID
	// Copies says where a copy may be.
	Copies Copies
	// Filesystem that it will carry; empty for raw block.
	Filesystem filesystem.Type
	Encryption Encryption
	Access     Access
	// HomeTimeout: see Volume.
	HomeTimeout time.Duration
	// Replicas says on how many nodes it is to be.
	Replicas Replicas
	// ReplicaOf: see Volume. It makes no difference to Check: what is there may have become a leg since, or be about to.
	ReplicaOf string
	Mutable   map[string]string
	// Nodes that it has to be usable on, the best first; empty: any.
	Nodes []string
	// Ephemeral: it belongs to the pod whose volume is published at this path, and goes
	// with it.
	Ephemeral string
	// For is who asked for it, as far as the CO says; it makes no difference to the volume.
	For Requester
}

// Requester is whom the CO made a volume for: of Kubernetes, the namespace and the name of a
// PersistentVolumeClaim, and the name of the PersistentVolume. Each may be empty: unknown.
// It is for people, and for those who look for the volume's objects when these are lost.
type Requester struct{ Namespace, Name, PersistentVolume string }

// MinSize is the size that no volume of the spec is smaller than, whatever it is a copy of, in bytes.
func (s Spec) MinSize() int64 {
	if s.Filesystem == "" {
		return blockdev.Granularity
	}
	return s.Filesystem.MinSize()
}

// Check compares an existing volume with what was asked for; ErrExists if it is
// another one.
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

// Create: see Store.
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
	case err == nil && !spec.Elsewhere(l.placeOf(spec.Source)): // it was to be something else, and nobody ever saw it
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

// check returns an error for what this node cannot make: ErrNoSpace for settings that it does not have, as another node may.
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
	return fmt.Errorf("%w: unknown encryption %q", errdefs.ErrInvalid, spec.Encryption.Scheme)
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

// createCopy makes a volume of what a volume or snapshot holds.
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
	create.Origin, create.Prepare = source.record.Ref, filesystem.Separate
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

// create makes an object of a pool, and has it in Progress meanwhile.
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

// poolsOf returns the pools of a set (poolset.Set), at least one: of the empty set the default one.
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

// newVolume says what to create in a pool: a volume of at least some bytes, and of as many as its filesystem needs.
func newVolume(spec Spec, pool blockdev.Pool, floor int64) (blockdev.Spec, error) {
	overhead := spec.Encryption.Scheme.Overhead()
	size, err := spec.Size.Choose(max(floor, spec.MinSize()), pool.Granularity(), overhead)
	if err != nil {
		return blockdev.Spec{}, err
	}
	return blockdev.Spec{Ref: blockdev.Ref{Kind: blockdev.Volume, Key: KeyOf(spec.Name)}, Name: spec.Name, Size: size + overhead,
		Provisioning: spec.Provisioning, Labels: spec.labels()}, nil
}

// origin is something to copy.
type origin struct {
	pool   blockdev.Pool
	record blockdev.Record
}

func (o origin) id() ID { return IDOf(o.pool.Name(), o.record) }

// holdSource keeps a snapshot that is copied, or read, from being deleted with its group, of which the caller
// need not know the members. ErrBusy while that is under way.
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

// named looks in all open pools for the object of a name; errdefs.ErrNotFound if there is none. One that is in a pool that is not
// open is not made twice if the retry names that pool, which is errdefs.ErrUnavailable then. Of a set of pools the retry is served by
// another one: one disk that is missing must not keep all others from being used.
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

// Ephemeral returns the ephemeral volume that was made under a name.
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
