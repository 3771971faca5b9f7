package volume

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/internal/progress"
	"github.com/ashlar-csi/ashlar/internal/trace"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/device"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/mount"
)

// Local is the Store of one node: its pools, and what the kernel has mounted of their volumes. All durable state is in the pools' records and in the
// kernel.
type Local struct {
	node   string
	pools  []blockdev.Pool // the first is the default
	mounts *mount.Table
	stacks *device.Stacks
	limit  int64 // the most claims that the node can hold; 0: any number
	// longestFreeze is how long a copy may hold back the writers of its source.
	longestFreeze time.Duration
	// patience is how long an overview waits for a pool.
	patience time.Duration

	arriving sync.Mutex               // held while the groups of a pool that opens are recovered
	arrived  map[string]blockdev.Pool // pools that are open, or about to be; guarded by arriving
	sources  keylock.Table            // snapshots that are copied, or deleted with their groups, by ID
	progress progress.Table           // what is being copied or zeroed
	endless  filesystem.Endless

	placing   sync.Mutex           // held while pools are chosen; guards what follows
	placed    map[string]placement // where the volumes of these keys are being made
	inquiries map[string]*inquiry  // of pools that are being asked for their room

	mu         sync.Mutex
	came       map[string]blockdev.Pool // the pools that have come, also if they are away now, by their names
	claims     map[string]int64         // how many claims the records of each pool have
	incomplete map[string]bool          // keys of groups that are being made or undone
	tooLong    map[held]time.Time       // when writers were last held back for longestFreeze in vain
	looks      map[string]*looking      // for an overview, by the names of the pools
	freezing   map[ID]bool              // volumes whose freeze the kernel has not finished, and nobody waits for any more
	lifted     map[ID]bool              // volumes whose limits of I/O are lifted while they are frozen
	places     map[ID]string            // pools of the volumes that are not where their IDs say, or that were located (Locate)

	exports exports
	moves   Moves // nil outside of a cluster
	lists   Lists // nil outside of a cluster
}

var _ Differ = (*Local)(nil)

// deferred is a pool that may open later (lazy.Pool).
type deferred interface {
	OnOpen(ctx context.Context, call func(context.Context, blockdev.Pool) error)
}

// collective is a pool that stands for pools of any name (remotepool.Pool).
type collective interface {
	Named(name string) blockdev.Pool
}

// NewLocal returns the store over some pools of the node. It finishes or undoes what a crash left half-done above them: filesystems that are still frozen,
// groups of which only a part was cut, devices that nothing uses. For a pool that is not open yet, that is done when it opens (lazy.Pool). limit is how
// many volumes the node may have claimed; 0 for any number.
func NewLocal(ctx context.Context, node string, pools []blockdev.Pool, mounts *mount.Table, limit int64) (*Local, error) {
	if len(pools) == 0 {
		return nil, fmt.Errorf("%w: no pool", errdefs.ErrInvalid)
	}
	l := &Local{node: node, pools: pools, mounts: mounts, stacks: device.New(), limit: limit, longestFreeze: time.Minute, patience: patience,
		looks: map[string]*looking{}, arrived: map[string]blockdev.Pool{}, placed: map[string]placement{}, inquiries: map[string]*inquiry{},
		came: map[string]blockdev.Pool{}, claims: map[string]int64{}, incomplete: map[string]bool{}, tooLong: map[held]time.Time{}, freezing: map[ID]bool{}, lifted: map[ID]bool{}, places: map[ID]string{},
		exports: exports{failed: map[place]error{}, given: map[ID]map[string]string{}}}
	for _, pool := range pools {
		if late, ok := pool.(deferred); ok {
			late.OnOpen(ctx, l.recover)
		} else if err := l.recover(ctx, pool); err != nil {
			return l, err
		}
	}
	return l, nil
}

// openPools returns the pools that are open.
func (l *Local) openPools() []blockdev.Pool {
	var pools []blockdev.Pool
	for _, pool := range l.pools {
		if pool = blockdev.Unwrap(pool); pool != nil {
			pools = append(pools, pool)
		}
	}
	return pools
}

// Closed returns the names of the pools that are not open.
func (l *Local) Closed() (names []string) {
	for _, pool := range l.pools {
		if blockdev.Unwrap(pool) == nil {
			names = append(names, pool.Name())
		}
	}
	return names
}

// Progress returns what is being copied or zeroed for volumes and snapshots. Its subjects are blockdev.Refs.
func (l *Local) Progress() *progress.Table { return &l.progress }

// Node returns the name of the node.
func (l *Local) Node() string { return l.node }

// pool returns a pool of the node by its name. ErrUnavailable, not ErrNotFound, if the node was started without it: its volumes may still exist.
func (l *Local) pool(name string) (blockdev.Pool, error) {
	for _, pool := range l.pools {
		if all, is := pool.(collective); is {
			return all.Named(name), nil
		}
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
	pool, err := l.pool(l.placeOf(id))
	return pool, id.ref(), err
}

func (l *Local) poolNames() []string {
	var names []string
	for _, pool := range l.pools {
		names = append(names, pool.Name())
	}
	return names
}

// Delete: see Store.
func (l *Local) Delete(ctx context.Context, id ID) error {
	pool, ref, err := l.object(id, blockdev.Volume)
	if err != nil {
		return errdefs.IgnoreNotFound(err)
	}
	return l.delete(ctx, pool, ref)
}

// delete is Delete for what one pool has of a volume.
func (l *Local) delete(ctx context.Context, pool blockdev.Pool, ref blockdev.Ref) error {
	id := ID{ref.Kind, pool.Name(), ref.Key}
	record, err := pool.Get(ctx, ref)
	if err == nil {
		id = IDOf(pool.Name(), record)
		if node := record.Labels[labelClaimNode]; node != "" {
			return fmt.Errorf("%w: volume %s is claimed by node %s; unpublish it first", errdefs.ErrInUse, id, node)
		}
		if e, is, err := exportOf(record); err != nil {
			if err := l.unexportUnread(ctx, pool, record, noGeneration, err); err != nil { // fails if the kernel exports anything of the volume
				return err
			}
		} else if is {
			return fmt.Errorf("%w: volume %s is exported to %s; release its claim first", errdefs.ErrInUse, id, e.Grant)
		}
		if err := notRead(record); err != nil {
			return fmt.Errorf("delete volume %s: %w", id, err)
		}
	} else if !errors.Is(err, errdefs.ErrNotFound) && !errors.Is(err, errdefs.ErrDataLoss) {
		return err
	}
	return trace.Do(ctx, "delete", func(ctx context.Context) error { return l.remove(ctx, pool, ref) }, "volume", id.String())
}

// Get: see Store.
func (l *Local) Get(ctx context.Context, id ID) (Volume, error) {
	pool, _, err := l.object(id, blockdev.Volume)
	if err != nil {
		return Volume{}, err
	}
	return l.GetIn(ctx, pool.Name(), id)
}

// GetIn is Get for what pool in has of a volume, also if the volume itself is in another pool.
func (l *Local) GetIn(ctx context.Context, in string, id ID) (Volume, error) {
	pool, err := l.pool(in)
	if err != nil {
		return Volume{}, err
	}
	record, err := pool.Get(ctx, id.ref())
	if err != nil {
		return Volume{}, err
	}
	if unfinished(record) {
		return Volume{}, fmt.Errorf("%w: volume %s is being copied", errdefs.ErrNotFound, id)
	}
	return fromRecord(pool.Name(), l.node, record), nil
}

// list calls visit with the records of a kind in the order of their IDs, beginning after the given ID, until visit returns false. So a list goes on where it
// was, wherever the object with that ID is now, or was. A record is left out if its ID does not lead to it, as it is left of something that has moved. limit is
// how many records it asks a pool for at once; 0 for all.
func (l *Local) list(ctx context.Context, kind blockdev.Kind, after ID, limit int, visit func(pool string, r blockdev.Record) (more bool)) error {
	elsewhere := l.elsewhere(kind)
	names := slices.AppendSeq(l.poolNames(), maps.Keys(elsewhere))
	slices.Sort(names)
	for _, name := range slices.Compact(names) {
		key := ""
		if name < after.Pool {
			continue
		}
		if name == after.Pool {
			key = after.Key
		}
		if more, err := l.listNamed(ctx, name, elsewhere[name], kind, key, limit, visit); err != nil || !more {
			return err
		}
	}
	return nil
}

// listNamed is list for what has IDs with the name of one pool, after a key. elsewhere are those of these IDs whose objects are in other pools, in order. more is
// false once visit has returned false.
func (l *Local) listNamed(ctx context.Context, name string, elsewhere []ID, kind blockdev.Kind, key string, limit int, visit func(pool string, r blockdev.Record) (more bool)) (more bool, err error) {
	elsewhere = slices.DeleteFunc(elsewhere, func(id ID) bool { return id.Key <= key })
	if i := slices.IndexFunc(l.pools, func(p blockdev.Pool) bool { return p.Name() == name }); i >= 0 {
		more, err := listPool(ctx, l.pools[i], kind, key, limit, func(r blockdev.Record) (more bool, err error) {
			n := 0
			for n < len(elsewhere) && elsewhere[n].Key < r.Key {
				n++
			}
			more, err = l.visitEach(ctx, elsewhere[:n], visit)
			elsewhere = elsewhere[n:]
			if id := IDOf(name, r); err != nil || !more || id.Pool != name || l.placeOf(id) != name {
				return more, err
			}
			return visit(name, r), nil
		})
		if err != nil || !more {
			return more, err
		}
	}
	return l.visitEach(ctx, elsewhere, visit)
}

// visitEach calls visit with the records of some objects, if they are still there, until visit returns false. more is false then.
func (l *Local) visitEach(ctx context.Context, ids []ID, visit func(pool string, r blockdev.Record) (more bool)) (more bool, err error) {
	for _, id := range ids {
		pool, ref, err := l.object(id, id.Kind)
		if err != nil {
			return false, err
		}
		record, err := pool.Get(ctx, ref)
		if errors.Is(err, errdefs.ErrNotFound) || errors.Is(err, errdefs.ErrDataLoss) { // a pool does not list a damaged record
			continue
		}
		if err != nil || !visit(pool.Name(), record) {
			return false, err
		}
	}
	return true, nil
}

// listPool calls visit with the records of a kind in a pool, in the order of their keys, beginning after a key, until visit returns false. more is false then.
// limit is as in list.
func listPool(ctx context.Context, pool blockdev.Pool, kind blockdev.Kind, key string, limit int, visit func(r blockdev.Record) (more bool, err error)) (more bool, err error) {
	for {
		records, err := pool.List(ctx, kind, key, limit)
		if err != nil {
			return false, err
		}
		for _, record := range records {
			key = record.Key
			if more, err := visit(record); err != nil || !more {
				return false, err
			}
		}
		if limit == 0 || len(records) < limit {
			return true, nil
		}
	}
}

// List: see Store.
func (l *Local) List(ctx context.Context, after ID, limit int) ([]Volume, error) {
	var volumes []Volume
	err := l.list(ctx, blockdev.Volume, after, limit, func(pool string, r blockdev.Record) bool {
		if !unfinished(r) {
			volumes = append(volumes, fromRecord(pool, l.node, r))
		}
		return limit == 0 || len(volumes) < limit
	})
	return volumes, err
}

// InPool lists all volumes of one pool.
func (l *Local) InPool(ctx context.Context, name string) ([]Volume, error) {
	pool, err := l.pool(name)
	if err != nil {
		return nil, err
	}
	records, err := pool.List(ctx, blockdev.Volume, "", 0)
	var volumes []Volume
	for _, r := range records {
		if !unfinished(r) {
			volumes = append(volumes, fromRecord(name, l.node, r))
		}
	}
	return volumes, err
}

// Topology returns no labels: on a single machine nothing tells where the node is, beside its name.
func (l *Local) Topology(context.Context) (map[string]string, error) { return nil, nil }

// NodesIn: see Store.
func (l *Local) NodesIn(_ context.Context, labels map[string]string) ([]string, error) {
	return nil, fmt.Errorf("%w: topology %v does not name a node, and nobody says where node %s is", errdefs.ErrInvalid, labels, l.node)
}

// Capacity: see Store.
func (l *Local) Capacity(ctx context.Context, set string, scheme Scheme, node string) (blockdev.Capacity, error) {
	if node != "" && node != l.node {
		return blockdev.Capacity{}, nil
	}
	pools, err := l.poolsOf(set)
	if err != nil {
		return blockdev.Capacity{}, err
	}
	if scheme != NotEncrypted && !slices.Contains(SchemesHere(), scheme) {
		return blockdev.Capacity{}, nil
	}
	all, err := l.capacity(ctx, pools)
	return scheme.Capacity(all), err
}

// capacity returns the capacity of some pools together.
func (l *Local) capacity(ctx context.Context, pools []blockdev.Pool) (blockdev.Capacity, error) {
	if len(pools) == 1 {
		return pools[0].Capacity(ctx)
	}
	var all blockdev.Capacity
	for _, r := range l.rooms(ctx, pools) {
		if r.Usable() {
			all = all.And(r.Capacity)
		}
	}
	return all, nil
}
