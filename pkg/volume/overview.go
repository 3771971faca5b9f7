package volume

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/internal/progress"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/device"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// patience is how long an overview waits for a pool. The overview of a node with a disk that hangs has to say so, and not to hang too.
const patience = 15 * time.Second

// Overview returns what there is on this node, and what is wrong with it. kinds has the kind of storage of each pool, by the pool's name. What a pool does not
// tell is left out, and its problems say why; so is all of a pool that does not answer in time, which Missing says too. The only error is that of ctx.
func (l *Local) Overview(ctx context.Context, kinds map[string]string) (*overview.Overview, error) {
	o := &overview.Overview{Taken: time.Now().UTC()}
	n := overview.Node{Name: l.node, Ready: true}
	looks := make([]<-chan look, len(l.pools))
	for i := range l.pools {
		looks[i] = l.lookAt(ctx, i)
	}
	for i, pool := range l.pools {
		one := <-looks[i]
		if one.hangs {
			o.Missing = append(o.Missing, "the volumes of pool "+pool.Name()+", which does not answer")
		}
		one.pool.Kind, one.pool.Default = kinds[pool.Name()], i == 0
		if full, is := one.pool.Full(); is && !slices.ContainsFunc(one.pool.Problems, func(p overview.Problem) bool { return p.Reason == full.Reason }) {
			one.pool.Problems = append(one.pool.Problems, full)
		}
		o.Volumes, o.Snapshots = append(o.Volumes, one.volumes...), append(o.Snapshots, one.snapshots...)
		n.Pools = append(n.Pools, one.pool)
	}
	o.Nodes = []overview.Node{n}
	for _, c := range l.progress.Running() {
		l.addProgress(o, c)
	}
	o.Finish()
	return o, ctx.Err()
}

// look is what an overview has of one pool.
type look struct {
	pool      overview.Pool
	volumes   []overview.Volume
	snapshots []overview.Snapshot
	hangs     bool // the pool does not answer: look has nothing of it but that problem
}

// looking is a look at a pool that is under way. Each pool has one at a time, so that a disk that hangs blocks one goroutine.
type looking struct {
	done  chan struct{} // closed at its end
	began time.Time
}

// lookAt begins to look at a pool, and returns a channel that gets the result: see lookInTime.
func (l *Local) lookAt(ctx context.Context, at int) <-chan look {
	answer := make(chan look, 1)
	go func() { answer <- l.lookInTime(ctx, l.pools[at]) }()
	return answer
}

// lookInTime looks at a pool. If another caller's look is under way, it waits for its end first. A look that has been under way for longer than patience is not
// waited for: the pool hangs.
func (l *Local) lookInTime(ctx context.Context, pool blockdev.Pool) look {
	hangs := func(since time.Time) look {
		message := fmt.Sprintf("its storage does not answer since %s; look at the kernel's log", since.Format(time.RFC3339))
		return look{hangs: true, pool: overview.Pool{Node: l.node, Name: pool.Name(), Problems: []overview.Problem{
			overview.Found(overview.Inaccessible, "PoolUnavailable", message, overview.KindPool, overview.PoolName(l.node, pool.Name()))}}}
	}
	for {
		mine, found := &looking{make(chan struct{}), time.Now()}, make(chan look, 1)
		l.mu.Lock()
		other := l.looks[pool.Name()]
		if other == nil {
			l.looks[pool.Name()] = mine
		}
		l.mu.Unlock()
		if other == nil {
			go func() {
				one := look{pool: l.poolOverview(ctx, pool)}
				one.volumes = l.volumesOverview(ctx, pool, &one.pool)
				one.snapshots = l.snapshotsOverview(ctx, pool, &one.pool)
				l.mu.Lock()
				delete(l.looks, pool.Name())
				l.mu.Unlock()
				close(mine.done)
				found <- one
			}()
			other = mine
		}
		late := time.NewTimer(time.Until(other.began.Add(l.patience)))
		select {
		case one := <-found:
			late.Stop()
			return one
		case <-other.waited(mine):
			late.Stop() // the other look has ended
		case <-ctx.Done():
			late.Stop()
			return hangs(other.began) // Overview returns the error of ctx
		case <-late.C:
			return hangs(other.began)
		}
	}
}

// waited returns a channel that is closed when the look has ended; nil for the caller's own look, whose result the caller waits for instead.
func (o *looking) waited(own *looking) <-chan struct{} {
	if o == own {
		return nil
	}
	return o.done
}

var severities = map[blockdev.Severity]overview.Severity{blockdev.DataLoss: overview.DataLoss, blockdev.Inaccessible: overview.Inaccessible, blockdev.Degraded: overview.Degraded}

// problemsOf returns the problems of a subject for an overview, each once. An error counts as one more.
func problemsOf(problems []blockdev.Problem, err error, kind, name string) []overview.Problem {
	if err != nil {
		problems = append(slices.Clone(problems), blockdev.Problem{Severity: blockdev.Inaccessible, Reason: "PoolUnavailable", Message: errdefs.Words(err)})
	}
	var out []overview.Problem
	for _, p := range problems {
		if !slices.ContainsFunc(out, func(have overview.Problem) bool { return have.Reason == p.Reason && have.Message == p.Message }) {
			out = append(out, overview.Found(severities[p.Severity], p.Reason, p.Message, kind, name))
		}
	}
	return out
}

func (l *Local) poolOverview(ctx context.Context, pool blockdev.Pool) overview.Pool {
	out := overview.Pool{Node: l.node, Name: pool.Name()}
	problems := pool.PoolHealth(ctx)
	c, err := pool.Capacity(ctx)
	if len(problems) > 0 {
		err = nil // they say why
	}
	out.Total, out.Promised, out.Available, out.Used, out.MaxVolume = c.Total, c.Promised, c.Available, c.Used, c.MaxVolume
	if is, ok := blockdev.As[blockdev.Identified](pool); ok {
		out.UUID = is.ID()
	}
	out.Problems = problemsOf(problems, err, overview.KindPool, overview.PoolName(l.node, pool.Name()))
	return out
}

// records returns the records of a kind in a pool; none if the pool is not open. If they cannot be listed, out gets that as a problem, unless it has others.
func (l *Local) records(ctx context.Context, pool blockdev.Pool, kind blockdev.Kind, out *overview.Pool) []blockdev.Record {
	if blockdev.Unwrap(pool) == nil {
		return nil // its problems say so
	}
	records, err := pool.List(ctx, kind, "", 0)
	if err != nil && len(out.Problems) == 0 {
		out.Problems = problemsOf(nil, err, overview.KindPool, overview.PoolName(l.node, pool.Name()))
	}
	return records
}

func (l *Local) volumesOverview(ctx context.Context, pool blockdev.Pool, in *overview.Pool) []overview.Volume {
	var all []overview.Volume
	for _, r := range l.records(ctx, pool, blockdev.Volume, in) {
		if ctx.Err() != nil {
			return nil
		}
		v := fromRecord(pool.Name(), l.node, r)
		out := overview.Volume{ID: v.ID.String(), Name: v.Name, Node: l.node, Pool: pool.Name(), Size: v.Size, Filesystem: string(v.Filesystem), Encryption: string(v.Encryption.Scheme), Thin: v.Thin,
			Created: v.Created.UTC(), PersistentVolume: v.For.PersistentVolume, Published: cmp.Or(v.Claim.Node, v.Exported.Node), Source: v.Source.String(), Settings: v.Mutable, State: overview.Ready}
		if v.For.Name != "" {
			out.Claim = &overview.Ref{Namespace: v.For.Namespace, Name: v.For.Name}
		}
		if unfinished(r) {
			out.State = overview.Making
			all = append(all, out)
			continue
		}
		problems, err := l.Health(ctx, v.ID)
		out.Problems = problemsOf(problems, err, overview.KindVolume, out.ID)
		out.State = stateBy(out.Problems)
		out.Used = used(ctx, pool, r.Ref)
		out.Devices, out.Mounts = l.where(ctx, l.stacks.Of(pool, r.Ref))
		all = append(all, out)
	}
	return all
}

func (l *Local) snapshotsOverview(ctx context.Context, pool blockdev.Pool, in *overview.Pool) []overview.Snapshot {
	var all []overview.Snapshot
	for _, r := range l.records(ctx, pool, blockdev.Snapshot, in) {
		if ctx.Err() != nil {
			return nil
		}
		if r.Labels[labelCutFor] != "" {
			continue
		}
		s := snapshotFromRecord(pool.Name(), l.node, r)
		out := overview.Snapshot{ID: s.ID.String(), Name: s.Name, Node: l.node, Pool: pool.Name(), Source: s.Source.String(), Size: s.Size, Created: s.Created.UTC()}
		if s.Group.Key != "" {
			out.Group = s.Group.String()
		}
		problems, err := pool.Health(ctx, r.Ref)
		out.Problems = problemsOf(problems, err, overview.KindSnapshot, out.ID)
		out.State = stateBy(out.Problems)
		all = append(all, out)
	}
	return all
}

// addProgress adds how far something is that is being copied or zeroed. A volume or snapshot that is being made has no ready record yet, so it is added by its
// ID, without a name.
func (l *Local) addProgress(o *overview.Overview, c progress.Copy) {
	ref := blockdev.ParseRef(c.Subject)
	id, far := ID{ref.Kind, c.Pool, ref.Key}.String(), &overview.Progress{Done: c.Done, Total: c.Total}
	is := func(pool, id string) bool {
		of, err := ParseID(id)
		return err == nil && pool == c.Pool && of.ref() == ref
	}
	for i := range o.Volumes {
		if v := &o.Volumes[i]; is(v.Pool, v.ID) { // it grows
			o.Volumes[i].Progress = far
			return
		}
	}
	for i := range o.Snapshots {
		if s := &o.Snapshots[i]; is(s.Pool, s.ID) { // it is read, for what changed
			o.Snapshots[i].Progress = far
			return
		}
	}
	if ref.Kind == blockdev.Snapshot {
		o.Snapshots = append(o.Snapshots, overview.Snapshot{ID: id, Name: id, Node: l.node, Pool: c.Pool, Size: c.Total, Created: c.Began, State: overview.Making, Progress: far})
		return
	}
	o.Volumes = append(o.Volumes, overview.Volume{ID: id, Name: id, Node: l.node, Pool: c.Pool, Size: c.Total, Created: c.Began, State: overview.Making, Progress: far})
}

// stateBy returns the state of a volume or snapshot that has a record and these problems.
func stateBy(problems []overview.Problem) overview.State {
	if slices.ContainsFunc(problems, func(p overview.Problem) bool { return p.Severity == overview.DataLoss }) {
		return overview.Lost
	}
	return overview.Ready
}

// used returns how many bytes an object takes of its pool; nil if that is not known.
func used(ctx context.Context, pool blockdev.Pool, ref blockdev.Ref) *int64 {
	if measurer, ok := blockdev.As[blockdev.Measurer](pool); ok {
		if n, err := measurer.Used(ctx, ref); err == nil {
			return &n
		}
	}
	return nil
}

// where returns the devices that a volume is attached as, and where they are mounted or bound.
func (l *Local) where(ctx context.Context, stack device.Stack) (devices, mounts []string) {
	attached, err := stack.Attached(ctx)
	if err != nil {
		return nil, nil // its problems say why
	}
	for _, d := range attached {
		devices = append(devices, d.Path)
		mounts = append(mounts, l.mounts.Paths(d.Number)...)
	}
	return devices, mounts
}
