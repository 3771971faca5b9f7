package volume

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/mount"
)

// Local is the Store of one node: its pools, and what the kernel has mounted of
// them. All that it knows is in the pools' records and in the kernel.
type Local struct {
	node   string
	pools  []blockdev.Pool // the first is the default
	mounts *mount.Table
	limit  int64 // claims that the node can hold; 0: any number

	mu         sync.Mutex
	claims     int64           // held by the node; a count of the records' claims
	incomplete map[string]bool // keys of groups that are being made or undone
}

var _ Store = (*Local)(nil)

// NewLocal returns the store over some pools of the node, and finishes or undoes
// what a crash left half-done above them: filesystems still frozen, groups of which
// a part was cut, devices that nothing uses. Above a pool that is not there yet that is
// done when it comes (blockdev.Awaited). limit is how many volumes the node may have
// claimed, 0 for any number.
func NewLocal(ctx context.Context, node string, pools []blockdev.Pool, mounts *mount.Table, limit int64) (*Local, error) {
	if len(pools) == 0 {
		return nil, fmt.Errorf("%w: no pool", blockdev.ErrInvalid)
	}
	l := &Local{node: node, pools: pools, mounts: mounts, limit: limit, incomplete: map[string]bool{}}
	for _, pool := range pools {
		if awaited, ok := pool.(*blockdev.Awaited); ok {
			awaited.Then(func(ctx context.Context, pool blockdev.Pool) error { return l.recover(ctx, pool) })
		}
	}
	return l, l.recover(ctx, l.there()...)
}

// there returns the pools that are there.
func (l *Local) there() []blockdev.Pool {
	var pools []blockdev.Pool
	for _, pool := range l.pools {
		if pool = blockdev.There(pool); pool != nil {
			pools = append(pools, pool)
		}
	}
	return pools
}

// recover makes pools ready to be used, which nobody else uses yet.
func (l *Local) recover(ctx context.Context, pools ...blockdev.Pool) error {
	log := klog.FromContext(ctx)
	for _, pool := range pools {
		if err := l.endFreezes(ctx, pool); err != nil {
			return err
		}
		orphans, err := pool.Orphans(ctx)
		if err != nil {
			return err
		}
		for ref, devices := range orphans {
			used := slices.ContainsFunc(devices, func(d blockdev.Device) bool { return len(l.mounts.Paths(d.Number)) > 0 })
			if used {
				continue
			}
			if err := pool.Detach(ctx, ref); err != nil {
				log.Error(err, "could not detach a device that nothing has mounted", "pool", pool.Name(), "object", ref.String())
			}
		}
	}
	if err := l.recoverGroups(ctx, pools); err != nil {
		return err
	}
	claims := int64(0)
	for _, pool := range pools {
		records, err := pool.List(ctx, blockdev.Volume, "", 0)
		if err != nil {
			return err
		}
		for _, record := range records {
			v := fromRecord(pool.Name(), l.node, record)
			if v.Claim.Node != "" {
				claims++
			}
			if v.Ephemeral == "" {
				continue
			}
			// Without the pod's folder there is nobody left to unpublish it.
			if _, err := os.Lstat(filepath.Dir(v.Ephemeral)); errors.Is(err, os.ErrNotExist) {
				if err := pool.Delete(ctx, record.Ref); err != nil {
					log.Error(err, "could not delete an ephemeral volume whose pod is gone", "volume", v.ID.String())
				}
			}
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.claims += claims
	return nil
}

// recoverGroups removes unfinished groups. While a pool is not there nobody knows which those
// are, and all of which a part is missing are hidden.
func (l *Local) recoverGroups(ctx context.Context, come []blockdev.Pool) error {
	named := map[string]blockdev.Pool{}
	for _, pool := range append(l.there(), come...) {
		named[pool.Name()] = pool
	}
	groups, err := l.groups(ctx, slices.Collect(maps.Values(named)))
	if err != nil {
		return err
	}
	for key, members := range groups {
		l.setIncomplete(key, !complete(members))
		if complete(members) || len(named) < len(l.pools) {
			continue
		}
		for _, m := range members {
			if err := named[m.ID.Pool].Delete(ctx, m.ID.ref()); err != nil {
				return fmt.Errorf("undo the unfinished %s: %w", GroupID{key}, err)
			}
		}
		l.setIncomplete(key, false)
	}
	return nil
}

// endFreezes thaws the filesystems that this driver may have left frozen. What others
// froze stays frozen.
func (l *Local) endFreezes(ctx context.Context, pool blockdev.Pool) error {
	records, err := pool.List(ctx, blockdev.Volume, "", 0)
	if err != nil {
		return err
	}
	for _, record := range records {
		if record.Labels[labelFrozen] == "" {
			continue
		}
		for _, path := range l.filesystems(ctx, pool, record.Ref) {
			if err := filesystem.Thaw(path); err != nil {
				return err
			}
			klog.FromContext(ctx).Info("Ended a freeze that may have outlived its snapshot", "volume", ID{record.Kind, pool.Name(), record.Key}.String(), "path", path)
		}
		if err := setFrozen(ctx, pool, record.Ref, ""); err != nil {
			return err
		}
	}
	return nil
}

func setFrozen(ctx context.Context, pool blockdev.Pool, ref blockdev.Ref, value string) error {
	_, err := pool.SetLabels(ctx, ref, func(labels map[string]string) error {
		setLabel(labels, labelFrozen, value)
		return nil
	})
	return err
}

// Node is the name of the node.
func (l *Local) Node() string { return l.node }

func (l *Local) pool(name string) (blockdev.Pool, error) {
	for _, pool := range l.pools {
		if pool.Name() == name {
			return pool, nil
		}
	}
	return nil, fmt.Errorf("%w: no pool %q on node %s", blockdev.ErrNotFound, name, l.node)
}

// object returns the pool and reference behind an ID of the given kind.
func (l *Local) object(id ID, kind blockdev.Kind) (blockdev.Pool, blockdev.Ref, error) {
	if id.Kind != kind {
		return nil, blockdev.Ref{}, fmt.Errorf("%w: %s is a %s, not a %s", blockdev.ErrNotFound, id, id.Kind, kind)
	}
	pool, err := l.pool(id.Pool)
	return pool, id.ref(), err
}

// named looks in all pools that are there for the object of a name. To make it again in
// another is nothing that a retry does.
func (l *Local) named(ctx context.Context, kind blockdev.Kind, name string) (ID, blockdev.Record, error) {
	ref := blockdev.Ref{Kind: kind, Key: KeyOf(name)}
	for _, pool := range l.there() {
		record, err := pool.Get(ctx, ref)
		if err == nil {
			return ID{kind, pool.Name(), ref.Key}, record, nil
		}
		if !errors.Is(err, blockdev.ErrNotFound) {
			return ID{}, blockdev.Record{}, err
		}
	}
	return ID{}, blockdev.Record{}, fmt.Errorf("%w: no %s named %q", blockdev.ErrNotFound, kind, name)
}

// Create: see Store.
func (l *Local) Create(ctx context.Context, spec Spec) (Volume, error) {
	if err := l.checkMutable(spec.Mutable); err != nil {
		return Volume{}, err
	}
	if len(spec.Nodes) > 0 && !slices.Contains(spec.Nodes, l.node) {
		return Volume{}, fmt.Errorf("%w: volumes of this store are on node %s, not on %v", blockdev.ErrNoSpace, l.node, spec.Nodes)
	}
	if spec.Pool == "" && spec.Source != (ID{}) {
		spec.Pool = spec.Source.Pool
	}
	id, record, err := l.named(ctx, blockdev.Volume, spec.Name)
	if err == nil {
		v := fromRecord(id.Pool, l.node, record)
		return v, spec.Check(v)
	}
	if !errors.Is(err, blockdev.ErrNotFound) {
		return Volume{}, err
	}
	var source origin
	if spec.Source != (ID{}) {
		if source, err = l.source(ctx, spec.Source); err != nil {
			return Volume{}, err
		}
	}
	if spec.Pool == "" {
		spec.Pool = l.pools[0].Name()
	}
	pool, err := l.pool(spec.Pool)
	if err != nil {
		return Volume{}, fmt.Errorf("%w: parameter pool=%q: known are %v", blockdev.ErrInvalid, spec.Pool, l.poolNames())
	}
	floor := int64(blockdev.Granularity)
	if spec.Filesystem != "" {
		floor = spec.Filesystem.MinSize()
	}
	create := blockdev.Spec{Ref: blockdev.Ref{Kind: blockdev.Volume, Key: KeyOf(spec.Name)}, Name: spec.Name, Provisioning: spec.Provisioning, Labels: spec.labels()}
	if spec.Source != (ID{}) {
		if source.pool != pool {
			return Volume{}, fmt.Errorf("%w: source %s is in pool %s and cannot be copied to pool %s", blockdev.ErrInvalid, spec.Source, source.pool.Name(), pool.Name())
		}
		floor = max(floor, source.record.Size)
		create.Origin, create.Prepare = source.record.Ref, filesystem.Separate
		if format := parseFormat(source.record.Labels[labelFormat]); format.State != Blank {
			create.Labels[labelFormat] = format.label()
		}
	}
	if create.Size, err = spec.Size.Choose(floor, pool.Granularity()); err != nil {
		return Volume{}, err
	}
	thaw := func() error { return nil }
	if spec.Source.Kind == blockdev.Volume {
		if create.Quiesced, thaw, err = l.quiesce(ctx, source); err != nil {
			return Volume{}, err
		}
	}
	create.Cut = func(context.Context) error { return thaw() }
	record, err = pool.Create(ctx, create)
	if err = errors.Join(err, thaw()); err != nil {
		return Volume{}, err
	}
	return fromRecord(pool.Name(), l.node, record), nil
}

// checkMutable also asks the kernel of this node.
func (l *Local) checkMutable(mutable map[string]string) error {
	if err := CheckMutable(mutable); err != nil {
		return err
	}
	if scheduler, given := mutable["ioScheduler"]; given && !blockdev.HasScheduler(scheduler) {
		return fmt.Errorf("%w: ioScheduler=%q: the kernel of node %s has not loaded it (modprobe %s)", blockdev.ErrInvalid, scheduler, l.node, scheduler)
	}
	return nil
}

func (l *Local) poolNames() []string {
	var names []string
	for _, pool := range l.pools {
		names = append(names, pool.Name())
	}
	return names
}

// origin is something to copy.
type origin struct {
	pool   blockdev.Pool
	record blockdev.Record
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

// filesystems returns where the filesystem of an object is mounted.
func (l *Local) filesystems(ctx context.Context, pool blockdev.Pool, ref blockdev.Ref) []string {
	devices, err := pool.Attached(ctx, ref)
	if err != nil {
		return nil
	}
	var paths []string
	for _, device := range devices {
		for _, path := range l.mounts.Paths(device.Number) {
			if info, err := mount.At(path); err == nil && !info.Node {
				paths = append(paths, path)
			}
		}
	}
	return paths
}

// A filesystem that stays frozen is as good as lost to its user, so thawing is tried
// again this often.
const (
	thawTries = 10
	thawPause = 100 * time.Millisecond
)

// quiesce freezes the filesystem of an origin, if it has one that is mounted. It
// reports whether all writes are held back until thaw is called, which may be called
// again.
func (l *Local) quiesce(ctx context.Context, o origin) (quiesced bool, thaw func() error, err error) {
	nothing := func() error { return nil }
	paths := l.filesystems(ctx, o.pool, o.record.Ref)
	if len(paths) == 0 {
		return false, nothing, nil
	}
	// A freeze outlives its process, so the record comes first: the next start ends it.
	if err := setFrozen(ctx, o.pool, o.record.Ref, "true"); err != nil {
		return false, nothing, err
	}
	unmark := func() error { // also when the caller's time is over
		ctx, cancel := blockdev.Undoing(ctx)
		defer cancel()
		return setFrozen(ctx, o.pool, o.record.Ref, "")
	}
	// All paths show the one filesystem of the volume's device.
	end, err := filesystem.Freeze(paths[0])
	if err != nil {
		return false, nothing, errors.Join(err, unmark())
	}
	thaw = sync.OnceValue(func() error {
		err := end()
		for try := 0; err != nil && try < thawTries; try++ {
			time.Sleep(thawPause)
			err = filesystem.Thaw(paths[0])
		}
		if err != nil {
			return err // the next start tries again
		}
		return unmark()
	})
	return true, thaw, nil
}

// Delete: see Store.
func (l *Local) Delete(ctx context.Context, id ID) error {
	pool, ref, err := l.object(id, blockdev.Volume)
	if err != nil {
		return ignoreNotFound(err)
	}
	record, err := pool.Get(ctx, ref)
	if err == nil {
		if node := record.Labels[labelClaimNode]; node != "" {
			return fmt.Errorf("%w: volume %s is claimed by node %s; unpublish it first", blockdev.ErrInUse, id, node)
		}
	} else if !errors.Is(err, blockdev.ErrNotFound) && !errors.Is(err, blockdev.ErrDataLoss) {
		return err
	}
	return pool.Delete(ctx, ref)
}

func ignoreNotFound(err error) error {
	if errors.Is(err, blockdev.ErrNotFound) {
		return nil
	}
	return err
}

// Get: see Store.
func (l *Local) Get(ctx context.Context, id ID) (Volume, error) {
	pool, ref, err := l.object(id, blockdev.Volume)
	if err != nil {
		return Volume{}, err
	}
	record, err := pool.Get(ctx, ref)
	if err != nil {
		return Volume{}, err
	}
	return fromRecord(pool.Name(), l.node, record), nil
}

// list walks the records of a kind in some pools in the order of their IDs (which is that of the
// pools' names, then of the keys), from the one after the given ID on, until visit
// says that it has enough.
func (l *Local) list(ctx context.Context, pools []blockdev.Pool, kind blockdev.Kind, after ID, limit int, visit func(pool string, r blockdev.Record) (more bool)) error {
	pools = slices.Clone(pools)
	slices.SortFunc(pools, func(a, b blockdev.Pool) int { return strings.Compare(a.Name(), b.Name()) })
	for _, pool := range pools {
		key := ""
		if pool.Name() < after.Pool {
			continue
		}
		if pool.Name() == after.Pool {
			key = after.Key
		}
		for {
			records, err := pool.List(ctx, kind, key, limit)
			if err != nil {
				return err
			}
			for _, record := range records {
				if key = record.Key; !visit(pool.Name(), record) {
					return nil
				}
			}
			if limit == 0 || len(records) < limit {
				break
			}
		}
	}
	return nil
}

// List: see Store.
func (l *Local) List(ctx context.Context, after ID, limit int) ([]Volume, error) {
	var volumes []Volume
	err := l.list(ctx, l.pools, blockdev.Volume, after, limit, func(pool string, r blockdev.Record) bool {
		volumes = append(volumes, fromRecord(pool, l.node, r))
		return limit == 0 || len(volumes) < limit
	})
	return volumes, err
}

// Claim: see Store.
func (l *Local) Claim(ctx context.Context, id ID, claim Claim) error {
	if claim.Node != l.node {
		return fmt.Errorf("%w: no node %q; volume %s is on node %s", blockdev.ErrNotFound, claim.Node, id, l.node)
	}
	v, err := l.Get(ctx, id)
	if err != nil {
		return err
	}
	switch {
	case v.Claim == claim:
		return nil
	case v.Claim.Node == claim.Node:
		return fmt.Errorf("%w: volume %s is published to node %s with mode %s, read-only %v", blockdev.ErrExists, id, v.Claim.Node, v.Claim.Mode, v.Claim.ReadOnly)
	case v.Claim.Node != "":
		return fmt.Errorf("%w: volume %s is published to node %s", blockdev.ErrInUse, id, v.Claim.Node)
	}
	l.mu.Lock()
	if l.limit > 0 && l.claims >= l.limit {
		l.mu.Unlock()
		return fmt.Errorf("%w: node %s has %d volumes, the most it can have", blockdev.ErrLimit, l.node, l.limit)
	}
	l.claims++
	l.mu.Unlock()
	if err := l.setLabels(ctx, id, func(labels map[string]string) error {
		labels[labelClaimNode], labels[labelClaimMode] = claim.Node, claim.Mode
		if claim.ReadOnly {
			labels[labelClaimRO] = "true"
		}
		return nil
	}); err != nil {
		l.unclaim()
		return err
	}
	return nil
}

func (l *Local) unclaim() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.claims--
}

// Release: see Store.
func (l *Local) Release(ctx context.Context, id ID, node string) error {
	v, err := l.Get(ctx, id)
	if err != nil {
		return ignoreNotFound(err)
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
	l.unclaim()
	return nil
}

func (l *Local) setLabels(ctx context.Context, id ID, change func(map[string]string) error) error {
	pool, ref, err := l.object(id, blockdev.Volume)
	if err != nil {
		return err
	}
	_, err = pool.SetLabels(ctx, ref, change)
	return err
}

// SetFormat records how far a volume is from blank, durably.
func (l *Local) SetFormat(ctx context.Context, id ID, format Format) error {
	return l.setLabels(ctx, id, func(labels map[string]string) error {
		setLabel(labels, labelFormat, format.label())
		return nil
	})
}

// Expand: see Store.
func (l *Local) Expand(ctx context.Context, id ID, size Range) (Volume, error) {
	v, err := l.Get(ctx, id)
	if err != nil {
		return Volume{}, err
	}
	if size.Limit > 0 && v.Size > size.Limit && size.Required <= size.Limit {
		return Volume{}, fmt.Errorf("%w: volume %s has %d bytes, more than the limit of %d; volumes do not shrink", blockdev.ErrOutOfRange, id, v.Size, size.Limit)
	}
	pool, ref, err := l.object(id, blockdev.Volume)
	if err != nil {
		return Volume{}, err
	}
	want, err := size.Choose(v.Size, pool.Granularity())
	if err != nil {
		return Volume{}, err
	}
	if size.Required == 0 {
		want = v.Size
	}
	record, err := pool.Expand(ctx, ref, want)
	if err != nil {
		return Volume{}, err
	}
	return fromRecord(pool.Name(), l.node, record), nil
}

// Modify: see Store. Attached devices change at once, or the whole call fails and
// nothing has changed.
func (l *Local) Modify(ctx context.Context, id ID, mutable map[string]string) error {
	v, err := l.Get(ctx, id)
	if err != nil {
		return err
	}
	if err := l.checkMutable(mutable); err != nil {
		return err
	}
	pool, ref, err := l.object(id, blockdev.Volume)
	if err != nil {
		return err
	}
	write := func(mutable map[string]string) error {
		return l.setLabels(ctx, id, func(labels map[string]string) error {
			for key := range mutableSettings {
				setLabel(labels, labelMutable+key, mutable[key])
			}
			return nil
		})
	}
	if err := write(merged(v.Mutable, mutable)); err != nil {
		return err
	}
	undo := []func() error{func() error { return write(v.Mutable) }}
	devices, err := pool.Attached(ctx, ref)
	for _, device := range devices {
		var one func() error
		if one, err = blockdev.SetQueue(device, queueSettings(mutable)); err != nil {
			break
		}
		undo = append(undo, one)
	}
	if err != nil {
		err = fmt.Errorf("modify volume %s: %w", id, err)
		for _, one := range slices.Backward(undo) {
			err = errors.Join(err, one())
		}
	}
	return err
}

// Attach makes a volume a device of this node, with its mutable parameters.
func (l *Local) Attach(ctx context.Context, v Volume, readOnly, keep bool) (blockdev.Device, error) {
	pool, ref, err := l.object(v.ID, blockdev.Volume)
	if err != nil {
		return blockdev.Device{}, err
	}
	return pool.Attach(ctx, ref, blockdev.Attachment{ReadOnly: readOnly, Keep: keep, Attributes: queueSettings(v.Mutable)})
}

// Attached lists the devices of a volume; it needs no record of it.
func (l *Local) Attached(ctx context.Context, id ID) ([]blockdev.Device, error) {
	pool, ref, err := l.object(id, blockdev.Volume)
	if err != nil {
		return nil, ignoreNotFound(err)
	}
	return pool.Attached(ctx, ref)
}

// Detach takes the devices of a volume away; it needs no record of it.
func (l *Local) Detach(ctx context.Context, id ID) error {
	pool, ref, err := l.object(id, blockdev.Volume)
	if err != nil {
		return ignoreNotFound(err)
	}
	return pool.Detach(ctx, ref)
}

// Untouched reports whether it is proven that nothing was ever written to a volume.
func (l *Local) Untouched(ctx context.Context, id ID) (bool, error) {
	pool, ref, err := l.object(id, blockdev.Volume)
	if err != nil {
		return false, err
	}
	if prover, ok := blockdev.As[blockdev.Prover](pool); ok {
		return prover.Untouched(ctx, ref)
	}
	return false, nil
}

// Ephemeral returns the ephemeral volume that was made under a name.
func (l *Local) Ephemeral(ctx context.Context, name string) (Volume, error) {
	id, record, err := l.named(ctx, blockdev.Volume, name)
	if err != nil {
		return Volume{}, err
	}
	v := fromRecord(id.Pool, l.node, record)
	if v.Ephemeral == "" {
		return Volume{}, fmt.Errorf("%w: %q is no ephemeral volume", blockdev.ErrNotFound, name)
	}
	return v, nil
}

// Health: see Store. It takes in what the kernel says of the mounted filesystem.
func (l *Local) Health(ctx context.Context, id ID) ([]blockdev.Problem, error) {
	pool, ref, err := l.object(id, blockdev.Volume)
	if err != nil {
		return nil, err
	}
	problems, err := pool.Health(ctx, ref)
	if err != nil || len(problems) > 0 {
		return problems, err
	}
	v, err := l.Get(ctx, id)
	if err != nil {
		return nil, err
	}
	devices, err := pool.Attached(ctx, ref)
	if err != nil {
		return nil, err
	}
	for _, device := range devices {
		for _, path := range l.mounts.Paths(device.Number) {
			info, err := mount.At(path)
			if err == nil && info.Node {
				continue
			}
			carried := v.Format.Type
			if err == nil { // a raw volume may carry what its user made
				carried = filesystem.TypeOf(info.Filesystem)
			}
			return filesystem.Health(carried, device.Path, path, l.mounts.Writable(device.Number, path)), nil
		}
	}
	return nil, nil
}

// PoolHealth is what is wrong with the pools of this node.
func (l *Local) PoolHealth(ctx context.Context) []blockdev.Problem {
	var problems []blockdev.Problem
	for _, pool := range l.pools {
		problems = append(problems, pool.PoolHealth(ctx)...)
	}
	return problems
}

// Capacity: see Store.
func (l *Local) Capacity(ctx context.Context, name, node string) (blockdev.Capacity, error) {
	if node != "" && node != l.node {
		return blockdev.Capacity{}, nil
	}
	pool := l.pools[0]
	if name != "" {
		var err error
		if pool, err = l.pool(name); err != nil {
			return blockdev.Capacity{}, fmt.Errorf("%w: parameter pool=%q: known are %v", blockdev.ErrInvalid, name, l.poolNames())
		}
	}
	return pool.Capacity(ctx)
}

// Ready: see Store. A pool that is not there yet is waited for, as a restart does not bring it.
func (l *Local) Ready(ctx context.Context) error {
	var failures []error
	for _, pool := range l.pools {
		_, err := pool.Capacity(ctx)
		if err != nil && blockdev.There(pool) != nil {
			failures = append(failures, err)
		}
	}
	return errors.Join(failures...)
}
