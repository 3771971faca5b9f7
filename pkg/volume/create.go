package volume

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/ashlar-csi/ashlar/internal/trace"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
)

// Spec says what volume to create.
type Spec struct {
	Name string
	Pool string // empty: the source's, or else the default
	Size Range
	// Provisioning: AnyProvisioning takes the pool's own way.
	Provisioning blockdev.Provisioning
	// Source to copy: a volume or a snapshot; the zero ID for an empty volume.
	Source ID
	// Filesystem that it will carry; empty for raw block.
	Filesystem filesystem.Type
	Mutable    map[string]string
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
	case s.Pool != "" && v.ID.Pool != s.Pool:
		return differs("pool", v.ID.Pool, s.Pool)
	case !s.Size.includes(v.Size):
		return differs("size", v.Size, s.Size)
	case s.Provisioning != blockdev.AnyProvisioning && blockdev.ProvisioningOf(v.Thin) != s.Provisioning:
		return differs("provisioning", blockdev.ProvisioningOf(v.Thin), s.Provisioning)
	case v.Source != s.Source:
		return differs("source", v.Source, s.Source)
	case v.Filesystem != s.Filesystem:
		return differs("filesystem", v.Filesystem, s.Filesystem)
	case v.Ephemeral != s.Ephemeral:
		return differs("pod", v.Ephemeral, s.Ephemeral)
	}
	return nil
}

// Create: see Store.
func (l *Local) Create(ctx context.Context, spec Spec) (Volume, error) {
	if err := l.checkMutable(spec.Mutable); err != nil {
		return Volume{}, err
	}
	if len(spec.Nodes) > 0 && !slices.Contains(spec.Nodes, l.node) {
		return Volume{}, fmt.Errorf("%w: volumes of this store are on node %s, not on %v", errdefs.ErrNoSpace, l.node, spec.Nodes)
	}
	spec.Pool = cmp.Or(spec.Pool, spec.Source.Pool)
	id, record, err := l.named(ctx, blockdev.Volume, spec.Name)
	if err == nil {
		v := fromRecord(id.Pool, l.node, record)
		return v, spec.Check(v)
	}
	if !errors.Is(err, errdefs.ErrNotFound) {
		return Volume{}, err
	}
	if spec.Source == (ID{}) {
		return l.createEmpty(ctx, spec)
	}
	return l.createCopy(ctx, spec)
}

// createEmpty makes a volume whose bytes are zeros.
func (l *Local) createEmpty(ctx context.Context, spec Spec) (Volume, error) {
	pool, err := l.choosePool(spec.Pool)
	if err != nil {
		return Volume{}, err
	}
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
	if err := spec.CheckSource(carried(source.record)); err != nil {
		return Volume{}, err
	}
	pool, err := l.choosePool(spec.Pool)
	if err != nil {
		return Volume{}, err
	}
	if source.pool != pool {
		return Volume{}, fmt.Errorf("%w: source %s is in pool %s and cannot be copied to pool %s", errdefs.ErrInvalid, spec.Source, source.pool.Name(), pool.Name())
	}
	create, err := newVolume(spec, pool, source.record.Size)
	if err != nil {
		return Volume{}, err
	}
	create.Origin, create.Prepare = source.record.Ref, filesystem.Separate
	if format := parseFormat(source.record.Labels[labelFormat]); format.State != Blank {
		create.Labels[labelFormat] = format.label()
	}
	thaw := func() error { return nil }
	if spec.Source.Kind == blockdev.Volume {
		if ctx, create.Quiesced, thaw, err = l.quiesce(ctx, source); err != nil {
			return Volume{}, err
		}
	}
	create.Cut = func(context.Context) error { return thaw() }
	record, err := l.create(ctx, pool, create)
	if err = withThaw(freezeError(ctx, err), thaw()); err != nil {
		return Volume{}, err
	}
	return fromRecord(pool.Name(), l.node, record), nil
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

// choosePool returns the pool for a new volume: the one of a name, or with no name the default one.
func (l *Local) choosePool(name string) (blockdev.Pool, error) {
	if name == "" {
		return l.pools[0], nil
	}
	pool, err := l.pool(name)
	if err != nil {
		return nil, fmt.Errorf("%w: parameter pool=%q: known are %v", errdefs.ErrInvalid, name, l.poolNames())
	}
	return pool, nil
}

// newVolume says what to create in a pool: a volume of at least some bytes, and of as many as its filesystem needs.
func newVolume(spec Spec, pool blockdev.Pool, floor int64) (blockdev.Spec, error) {
	size, err := spec.Size.Choose(max(floor, spec.MinSize()), pool.Granularity())
	if err != nil {
		return blockdev.Spec{}, err
	}
	return blockdev.Spec{Ref: blockdev.Ref{Kind: blockdev.Volume, Key: KeyOf(spec.Name)}, Name: spec.Name, Size: size,
		Provisioning: spec.Provisioning, Labels: spec.labels()}, nil
}

// origin is something to copy.
type origin struct {
	pool   blockdev.Pool
	record blockdev.Record
}

func (o origin) id() ID { return ID{o.record.Kind, o.pool.Name(), o.record.Key} }

// holdSource keeps a snapshot that is copied from being deleted with its group, of which the caller
// need not know the members. ErrBusy while that is under way.
func (l *Local) holdSource(id ID) (release func(), err error) {
	return l.lockSources(nil, []string{id.String()})
}

func (l *Local) lockSources(exclusive, shared []string) (release func(), err error) {
	unlock, busy := l.sources.TryLock(exclusive, shared)
	if unlock == nil {
		return nil, fmt.Errorf("%w: %s is being copied, or deleted; try again", errdefs.ErrBusy, busy)
	}
	return unlock, nil
}

func (l *Local) source(ctx context.Context, id ID) (origin, error) {
	if id.Kind == blockdev.Snapshot {
		if _, err := l.GetSnapshot(ctx, id); err != nil {
			return origin{}, err
		}
	}
	pool, err := l.pool(id.Pool)
	if err != nil {
		return origin{}, err
	}
	record, err := pool.Get(ctx, id.ref())
	return origin{pool, record}, err
}

// named looks in all open pools for the object of a name; errdefs.ErrNotFound if there is none. One that is in a pool that is not
// open is not made twice: a retry asks for the same pool, which is errdefs.ErrUnavailable then.
func (l *Local) named(ctx context.Context, kind blockdev.Kind, name string) (ID, blockdev.Record, error) {
	ref := blockdev.Ref{Kind: kind, Key: KeyOf(name)}
	for _, pool := range l.openPools() {
		record, err := pool.Get(ctx, ref)
		if err == nil {
			return ID{kind, pool.Name(), ref.Key}, record, nil
		}
		if !errors.Is(err, errdefs.ErrNotFound) {
			return ID{}, blockdev.Record{}, err
		}
	}
	return ID{}, blockdev.Record{}, fmt.Errorf("%w: no %s named %q", errdefs.ErrNotFound, kind, name)
}

// Ephemeral returns the ephemeral volume that was made under a name.
func (l *Local) Ephemeral(ctx context.Context, name string) (Volume, error) {
	id, record, err := l.named(ctx, blockdev.Volume, name)
	if err != nil {
		return Volume{}, err
	}
	v := fromRecord(id.Pool, l.node, record)
	if v.Ephemeral == "" {
		return Volume{}, fmt.Errorf("%w: %q is no ephemeral volume", errdefs.ErrNotFound, name)
	}
	return v, nil
}
