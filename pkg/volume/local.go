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

	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/internal/undoing"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lazy"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/queue"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
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
	// longestFreeze is how long a copy may hold back the writers of its source.
	longestFreeze time.Duration

	arriving sync.Mutex               // held while the groups of a pool that comes are looked at
	arrived  map[string]blockdev.Pool // those that are there, or will be in a moment; guarded by arriving
	sources  keylock.Table            // snapshots that are copied, or deleted with their groups, by ID

	mu         sync.Mutex
	claims     map[string]int64 // held by the node, in each pool; a count of the records' claims
	incomplete map[string]bool  // keys of groups that are being made or undone
	tooLong    map[ID]time.Time // when writers of a volume were held back for as long as they may be, in vain
	freezing   map[ID]bool      // volumes whose freeze nobody waits for any more, and the kernel is not through with
}

var _ Store = (*Local)(nil)

// NewLocal returns the store over some pools of the node, and finishes or undoes
// what a crash left half-done above them: filesystems still frozen, groups of which
// a part was cut, devices that nothing uses. Above a pool that is not there yet that is
// done when it comes (lazy.Pool). limit is how many volumes the node may have
// claimed, 0 for any number.
func NewLocal(ctx context.Context, node string, pools []blockdev.Pool, mounts *mount.Table, limit int64) (*Local, error) {
	if len(pools) == 0 {
		return nil, fmt.Errorf("%w: no pool", errdefs.ErrInvalid)
	}
	l := &Local{node: node, pools: pools, mounts: mounts, limit: limit, longestFreeze: time.Minute, arrived: map[string]blockdev.Pool{}, claims: map[string]int64{}, incomplete: map[string]bool{}, tooLong: map[ID]time.Time{}, freezing: map[ID]bool{}}
	for _, pool := range pools {
		if awaited, ok := pool.(*lazy.Pool); ok {
			awaited.Then(ctx, l.recover)
		} else if err := l.recover(ctx, pool); err != nil {
			return l, err
		}
	}
	return l, nil
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

// recover makes a pool ready to be used, which nobody else uses yet.
func (l *Local) recover(ctx context.Context, pool blockdev.Pool) error {
	log := klog.FromContext(ctx)
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
	claims, err := l.recoverVolumes(ctx, pool)
	if err != nil {
		return err
	}
	if err := l.recoverGroups(ctx, pool); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.claims[pool.Name()] = claims
	return nil
}

// recoverVolumes deletes the ephemeral volumes of pods that are gone, and counts claims.
func (l *Local) recoverVolumes(ctx context.Context, pool blockdev.Pool) (claims int64, err error) {
	records, err := pool.List(ctx, blockdev.Volume, "", 0)
	if err != nil {
		return 0, err
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
				klog.FromContext(ctx).Error(err, "could not delete an ephemeral volume whose pod is gone", "volume", v.ID.String())
			}
		}
	}
	return claims, nil
}

// recoverGroups removes unfinished groups. While a pool is not there nobody knows which those
// are, and all of which a part is missing are hidden. What is left of a group that was finished once
// stays, whatever the others were lost with.
func (l *Local) recoverGroups(ctx context.Context, come blockdev.Pool) error {
	l.arriving.Lock()
	defer l.arriving.Unlock()
	named := maps.Clone(l.arrived)
	named[come.Name()] = come
	groups, err := l.groups(ctx, slices.Collect(maps.Values(named)))
	if err != nil {
		return err
	}
	for key, members := range groups {
		all := complete(members)
		l.setIncomplete(key, !all)
		if len(named) < len(l.pools) {
			continue
		}
		if all || wasWhole(members) {
			if !all {
				klog.FromContext(ctx).Info("A part of a group snapshot is missing; keeping the rest", "group", GroupID{key}.String(), "snapshots", len(members), "of", members[0].groupSize)
			}
			if err := setWhole(ctx, func(name string) (blockdev.Pool, error) { return named[name], nil }, members, true); err != nil { // older versions did not
				klog.FromContext(ctx).Error(err, "could not note that a group snapshot is complete; the next start tries again", "group", GroupID{key}.String())
			}
			l.setIncomplete(key, false)
			continue
		}
		for _, m := range members {
			if err := named[m.ID.Pool].Delete(ctx, m.ID.ref()); err != nil {
				return fmt.Errorf("undo the unfinished %s: %w", GroupID{key}, err)
			}
		}
		l.setIncomplete(key, false)
	}
	l.arrived = named
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
	return changeLabel(ctx, pool, ref, labelFrozen, value)
}

// changeLabel sets a label of an object, or with no value takes it away.
func changeLabel(ctx context.Context, pool blockdev.Pool, ref blockdev.Ref, label, value string) error {
	_, err := pool.SetLabels(ctx, ref, func(labels map[string]string) error {
		setLabel(labels, label, value)
		return nil
	})
	return err
}

// Node is the name of the node.
func (l *Local) Node() string { return l.node }

// pool returns a pool of the node; ErrUnavailable for one that the node was not started with: what
// is in it may be there.
func (l *Local) pool(name string) (blockdev.Pool, error) {
	for _, pool := range l.pools {
		if pool.Name() == name {
			return pool, nil
		}
	}
	return nil, fmt.Errorf("%w: node %s was started without pool %q (--pool); what is in it stays as it is", errdefs.ErrUnavailable, l.node, name)
}

// object returns the pool and reference behind an ID of the given kind.
func (l *Local) object(id ID, kind blockdev.Kind) (blockdev.Pool, blockdev.Ref, error) {
	if id.Kind != kind {
		return nil, blockdev.Ref{}, fmt.Errorf("%w: %s is a %s, not a %s", errdefs.ErrNotFound, id, id.Kind, kind)
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
		if !errors.Is(err, errdefs.ErrNotFound) {
			return ID{}, blockdev.Record{}, err
		}
	}
	return ID{}, blockdev.Record{}, fmt.Errorf("%w: no %s named %q", errdefs.ErrNotFound, kind, name)
}

// Create: see Store.
func (l *Local) Create(ctx context.Context, spec Spec) (Volume, error) {
	if err := l.checkMutable(spec.Mutable); err != nil {
		return Volume{}, err
	}
	if len(spec.Nodes) > 0 && !slices.Contains(spec.Nodes, l.node) {
		return Volume{}, fmt.Errorf("%w: volumes of this store are on node %s, not on %v", errdefs.ErrNoSpace, l.node, spec.Nodes)
	}
	if spec.Pool == "" && spec.Source != (ID{}) {
		spec.Pool = spec.Source.Pool
	}
	id, record, err := l.named(ctx, blockdev.Volume, spec.Name)
	if err == nil {
		v := fromRecord(id.Pool, l.node, record)
		return v, spec.Check(v)
	}
	if !errors.Is(err, errdefs.ErrNotFound) {
		return Volume{}, err
	}
	var source origin
	if spec.Source != (ID{}) {
		release, err := l.holdSource(spec.Source)
		if err != nil {
			return Volume{}, err
		}
		defer release()
		if source, err = l.source(ctx, spec.Source); err != nil {
			return Volume{}, err
		}
		if err := spec.CheckSource(carried(source.record)); err != nil {
			return Volume{}, err
		}
	}
	if spec.Pool == "" {
		spec.Pool = l.pools[0].Name()
	}
	pool, err := l.pool(spec.Pool)
	if err != nil {
		return Volume{}, fmt.Errorf("%w: parameter pool=%q: known are %v", errdefs.ErrInvalid, spec.Pool, l.poolNames())
	}
	floor := int64(blockdev.Granularity)
	if spec.Filesystem != "" {
		floor = spec.Filesystem.MinSize()
	}
	create := blockdev.Spec{Ref: blockdev.Ref{Kind: blockdev.Volume, Key: KeyOf(spec.Name)}, Name: spec.Name, Provisioning: spec.Provisioning, Labels: spec.labels()}
	if spec.Source != (ID{}) {
		if source.pool != pool {
			return Volume{}, fmt.Errorf("%w: source %s is in pool %s and cannot be copied to pool %s", errdefs.ErrInvalid, spec.Source, source.pool.Name(), pool.Name())
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
		if ctx, create.Quiesced, thaw, err = l.quiesce(ctx, source); err != nil {
			return Volume{}, err
		}
	}
	create.Cut = func(context.Context) error { return thaw() }
	record, err = pool.Create(ctx, create)
	if err = withThaw(freezeError(ctx, err), thaw()); err != nil {
		return Volume{}, err
	}
	return fromRecord(pool.Name(), l.node, record), nil
}

// checkMutable also asks the kernel of this node.
func (l *Local) checkMutable(mutable map[string]string) error {
	if err := CheckMutable(mutable); err != nil {
		return err
	}
	if scheduler, given := mutable["ioScheduler"]; given && !queue.HasScheduler(scheduler) {
		return fmt.Errorf("%w: ioScheduler=%q: the kernel of node %s has not loaded it (modprobe %s)", errdefs.ErrInvalid, scheduler, l.node, scheduler)
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

// carried is the filesystem that an object carries, or is to carry; empty: it is raw.
func carried(r blockdev.Record) filesystem.Type {
	if format := parseFormat(r.Labels[labelFormat]); format.Type != "" {
		return format.Type
	}
	return filesystem.Type(r.Labels[labelFilesystem])
}

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

func (o origin) id() ID { return ID{o.record.Kind, o.pool.Name(), o.record.Key} }

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

// filesystems returns at which folders the filesystem of an object is mounted: what else of it is bound (as a subpath) cannot
// just be opened.
func (l *Local) filesystems(ctx context.Context, pool blockdev.Pool, ref blockdev.Ref) []string {
	devices, err := pool.Attached(ctx, ref)
	if err != nil {
		return nil
	}
	var paths []string
	for _, device := range devices {
		for _, path := range l.mounts.Paths(device.Number) {
			if info, err := mount.At(path); err == nil && info.Folder {
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

// quiesce freezes the filesystem of an origin, if it has one that is mounted. It reports
// whether all writes are held back until thaw is called, which may be called again, and
// returns the context for what is done meanwhile: see held. ErrUnavailable from thaw: they were not,
// so what was done is of no point in time. What somebody else froze is not held back: they may end it at any time.
func (l *Local) quiesce(ctx context.Context, o origin) (_ context.Context, quiesced bool, thaw func() error, err error) {
	nothing := func() error { return nil }
	paths := l.filesystems(ctx, o.pool, o.record.Ref)
	if len(paths) == 0 {
		return ctx, false, nothing, nil
	}
	if err := l.patient(o); err != nil {
		return ctx, false, nothing, err
	}
	// A freeze outlives its process, so the record comes first: the next start ends it.
	if err := setFrozen(ctx, o.pool, o.record.Ref, "true"); err != nil {
		return ctx, false, nothing, err
	}
	unmark := func() error { // also when the caller's time is over
		ctx, cancel := undoing.Context(ctx)
		defer cancel()
		return setFrozen(ctx, o.pool, o.record.Ref, "")
	}
	// All paths show the one filesystem of the volume's device.
	end, pending, err := l.freeze(ctx, o.id(), paths[0])
	switch {
	case errors.Is(err, errdefs.ErrBusy):
		return ctx, false, nothing, unmark()
	case pending: // it may be frozen yet
		return ctx, false, nothing, err
	case err != nil:
		return ctx, false, nothing, errors.Join(err, unmark())
	}
	ctx, thaw = l.held(ctx, o, sync.OnceValue(func() error {
		err := endFreeze(end, paths[0])
		if err != nil && !errors.Is(err, errdefs.ErrUnavailable) {
			return err // the next start tries again
		}
		return errors.Join(err, unmark())
	}))
	return ctx, true, thaw, nil
}

// endFreeze calls what filesystem.Freeze returned for a path, and tries again.
func endFreeze(end func() error, path string) error {
	err := end()
	for try := 0; err != nil && !errors.Is(err, errdefs.ErrUnavailable) && try < thawTries; try++ {
		time.Sleep(thawPause)
		err = filesystem.Thaw(path)
	}
	return err
}

// freezeTime is how long the kernel is waited for until it has frozen a filesystem.
const freezeTime = time.Minute

// freeze is filesystem.Freeze of a volume. pending: the kernel is not through with it, and nobody waits for that any
// more; it is ended as soon as it begins. Until then no other is tried (patient), and the mark in the record stays until the next
// copy or start.
func (l *Local) freeze(ctx context.Context, id ID, path string) (_ func() error, pending bool, _ error) {
	ctx, cancel := context.WithTimeoutCause(ctx, freezeTime, errdefs.ErrUnavailable)
	defer cancel()
	end, err := filesystem.Freeze(ctx, path)
	if err == nil || end == nil {
		return end, false, err
	}
	l.setFreezing(id, true)
	go func() {
		_ = endFreeze(end, path) // the next start tries again
		l.setFreezing(id, false)
	}()
	return nil, true, fmt.Errorf("%w: %s", err, stuck(id))
}

func stuck(id ID) string {
	return fmt.Sprintf("a write to the filesystem of volume %s has begun and does not end, and nothing can be frozen before that; end the pod that writes, or all that use it", id)
}

func (l *Local) setFreezing(id ID, freezing bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if freezing {
		l.freezing[id] = true
	} else {
		delete(l.freezing, id)
	}
}

// held returns the context for what is done while the writes to an origin are held back. If
// that lasts for longer than writers can be asked to wait, the context ends (freezeError);
// once they were released it does not.
func (l *Local) held(ctx context.Context, o origin, release func() error) (context.Context, func() error) {
	ctx, cancel := context.WithCancelCause(ctx)
	id, longest := o.id(), l.longestFreeze
	timer := time.AfterFunc(longest, func() {
		l.mu.Lock()
		l.tooLong[id] = time.Now()
		l.mu.Unlock()
		cancel(impatient(id, longest))
	})
	return ctx, func() error {
		timer.Stop()
		return release()
	}
}

// restFactor: writers that were held back for as long as they may be are left alone for so
// many times that long. Whoever asks for a copy asks again and again.
const restFactor = 10

// patient is ErrPrecondition if the writers of an origin were held back in vain not long ago, and
// ErrUnavailable if they still are.
func (l *Local) patient(o origin) error {
	id, rest := o.id(), restFactor*l.longestFreeze
	l.mu.Lock()
	defer l.mu.Unlock()
	for id, at := range l.tooLong {
		if time.Since(at) > rest {
			delete(l.tooLong, id)
		}
	}
	if _, known := l.tooLong[id]; known {
		return impatient(id, l.longestFreeze)
	}
	if l.freezing[id] {
		return fmt.Errorf("%w: %s", errdefs.ErrUnavailable, stuck(id))
	}
	return nil
}

func impatient(id ID, longest time.Duration) error {
	return fmt.Errorf("%w: volume %s is in use, and its pool cannot copy it within the %s for which its writers may be held back; "+
		"stop the pods that use it until it is copied, or keep it in a pool that copies in an instant (XFS, btrfs, LVM)", errdefs.ErrPrecondition, id, longest)
}

// freezeError is the error of what was done with a context of held.
func freezeError(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); err != nil && errors.Is(cause, errdefs.ErrPrecondition) {
		return cause
	}
	return err
}

// withThaw joins the error of a copy and that of a thaw, which may have been the cause.
func withThaw(err, thaw error) error {
	if errors.Is(err, thaw) {
		return err
	}
	return errors.Join(err, thaw)
}

// Delete: see Store.
func (l *Local) Delete(ctx context.Context, id ID) error {
	pool, ref, err := l.object(id, blockdev.Volume)
	if err != nil {
		return errdefs.IgnoreNotFound(err)
	}
	record, err := pool.Get(ctx, ref)
	if err == nil {
		if node := record.Labels[labelClaimNode]; node != "" {
			return fmt.Errorf("%w: volume %s is claimed by node %s; unpublish it first", errdefs.ErrInUse, id, node)
		}
	} else if !errors.Is(err, errdefs.ErrNotFound) && !errors.Is(err, errdefs.ErrDataLoss) {
		return err
	}
	return pool.Delete(ctx, ref)
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
		return fmt.Errorf("%w: no node %q; volume %s is on node %s", errdefs.ErrNotFound, claim.Node, id, l.node)
	}
	v, err := l.Get(ctx, id)
	if err != nil {
		return err
	}
	switch {
	case v.Claim == claim:
		return nil
	case v.Claim.Node == claim.Node:
		return fmt.Errorf("%w: volume %s is published to node %s with mode %s, read-only %v", errdefs.ErrExists, id, v.Claim.Node, v.Claim.Mode, v.Claim.ReadOnly)
	case v.Claim.Node != "":
		return fmt.Errorf("%w: volume %s is published to node %s", errdefs.ErrInUse, id, v.Claim.Node)
	}
	l.mu.Lock()
	if l.limit > 0 && l.claimed() >= l.limit {
		l.mu.Unlock()
		return fmt.Errorf("%w: node %s has %d volumes, the most it can have", errdefs.ErrLimit, l.node, l.limit)
	}
	l.claims[id.Pool]++
	l.mu.Unlock()
	if err := l.setLabels(ctx, id, func(labels map[string]string) error {
		labels[labelClaimNode], labels[labelClaimMode] = claim.Node, claim.Mode
		if claim.ReadOnly {
			labels[labelClaimRO] = "true"
		}
		return nil
	}); err != nil {
		l.unclaim(id.Pool)
		return err
	}
	return nil
}

// claimed counts the claims of the node. The caller holds mu.
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
	l.unclaim(id.Pool)
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

// SetTarget records the one path that a volume is to be published at, durably; empty: it may be
// at any.
func (l *Local) SetTarget(ctx context.Context, id ID, target string) error {
	return l.setLabels(ctx, id, func(labels map[string]string) error {
		setLabel(labels, labelTarget, target)
		return nil
	})
}

// SetFlags records what stands for the mount flags that a volume is staged with, durably.
func (l *Local) SetFlags(ctx context.Context, id ID, flags string) error {
	return l.setLabels(ctx, id, func(labels map[string]string) error {
		setLabel(labels, labelFlags, flags)
		return nil
	})
}

// Claimed says how a volume is claimed. Here that is always known: its record has it.
func (l *Local) Claimed(_ context.Context, v Volume, _ bool) (claim Claim, known bool) {
	return v.Claim, true
}

// Expand: see Store.
func (l *Local) Expand(ctx context.Context, id ID, size Range) (Volume, error) {
	v, err := l.Get(ctx, id)
	if err != nil {
		return Volume{}, err
	}
	if size.Limit > 0 && v.Size > size.Limit && size.Required <= size.Limit {
		return Volume{}, fmt.Errorf("%w: volume %s has %d bytes, more than the limit of %d; volumes do not shrink", errdefs.ErrOutOfRange, id, v.Size, size.Limit)
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
		if one, err = device.SetQueue(queueSettings(mutable)); err != nil {
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

// Attach makes a volume a device of this node, with its mutable parameters. With keep, the device
// stays until Detach and can be handed out to others (blockdev.Attachment).
func (l *Local) Attach(ctx context.Context, v Volume, keep bool) (blockdev.Device, error) {
	pool, ref, err := l.object(v.ID, blockdev.Volume)
	if err != nil {
		return blockdev.Device{}, err
	}
	return pool.Attach(ctx, ref, blockdev.Attachment{Keep: keep, Attributes: queueSettings(v.Mutable)})
}

// Attached lists the devices of a volume; it needs no record of it.
func (l *Local) Attached(ctx context.Context, id ID) ([]blockdev.Device, error) {
	pool, ref, err := l.object(id, blockdev.Volume)
	if err != nil {
		return nil, errdefs.IgnoreNotFound(err)
	}
	return pool.Attached(ctx, ref)
}

// Detach takes the devices of a volume away that Attached knows of.
func (l *Local) Detach(ctx context.Context, id ID) error {
	pool, ref, err := l.object(id, blockdev.Volume)
	if err != nil {
		return errdefs.IgnoreNotFound(err)
	}
	return pool.Detach(ctx, ref)
}

// Used is how much of a volume has space, in bytes; known is false where its pool cannot tell.
func (l *Local) Used(ctx context.Context, id ID) (used int64, known bool, err error) {
	pool, ref, err := l.object(id, blockdev.Volume)
	if err != nil {
		return 0, false, err
	}
	measurer, known := blockdev.As[blockdev.Measurer](pool)
	if known {
		used, err = measurer.Used(ctx, ref)
	}
	return used, known, err
}

// Blank reports whether nothing was ever written to a volume, which is attached as a device, as far as
// its pool knows; where it does not, whether the device is blank (filesystem.Blank).
func (l *Local) Blank(ctx context.Context, id ID, device blockdev.Device) (bool, error) {
	pool, ref, err := l.object(id, blockdev.Volume)
	if err != nil {
		return false, err
	}
	if prover, ok := blockdev.As[blockdev.Prover](pool); ok {
		return prover.Untouched(ctx, ref)
	}
	return filesystem.Blank(ctx, device.Path)
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
				carried = filesystem.TypeOf(info.Statfs.Type)
			}
			problems := filesystem.Health(carried, device.Path, path, l.mounts.Writable(device.Number, path))
			if len(problems) > 0 && !slices.Contains(l.mounts.Paths(device.Number), path) {
				continue // it was taken away meanwhile, and what is below it was looked at
			}
			return problems, nil
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

// Topology is where the node is, beside its name: nobody says, on one machine.
func (l *Local) Topology(context.Context) (map[string]string, error) { return nil, nil }

// NodesIn: see Store.
func (l *Local) NodesIn(_ context.Context, labels map[string]string) ([]string, error) {
	return nil, fmt.Errorf("%w: topology %v does not name a node, and nobody says where node %s is", errdefs.ErrInvalid, labels, l.node)
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
			return blockdev.Capacity{}, fmt.Errorf("%w: parameter pool=%q: known are %v", errdefs.ErrInvalid, name, l.poolNames())
		}
	}
	return pool.Capacity(ctx)
}
