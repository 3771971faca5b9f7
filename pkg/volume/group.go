package volume

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ashlar-csi/ashlar/internal/undoing"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Group is a group snapshot that is complete.
type Group struct {
	ID        GroupID
	Created   time.Time
	Snapshots []Snapshot
}

// NewGroup returns the group of some members, in the order of their sources. Created is that of the first that was cut: the writes to all were held back
// then.
func NewGroup(id GroupID, members []Snapshot) Group {
	group := Group{ID: id, Snapshots: slices.Clone(members)}
	slices.SortFunc(group.Snapshots, func(a, b Snapshot) int { return strings.Compare(a.Source.String(), b.Source.String()) })
	for _, m := range members {
		if group.Created.IsZero() || m.Created.Before(group.Created) {
			group.Created = m.Created
		}
	}
	return group
}

// GroupSources returns the sources of a group in order. ErrInvalid if there are none, or one is there twice.
func GroupSources(sources []ID) ([]ID, error) {
	sorted := slices.Clone(sources)
	slices.SortFunc(sorted, func(a, b ID) int { return strings.Compare(a.String(), b.String()) })
	if len(sorted) == 0 || len(slices.Compact(slices.Clone(sorted))) != len(sorted) {
		return nil, fmt.Errorf("%w: name each source volume once", errdefs.ErrInvalid)
	}
	return sorted, nil
}

// member is a snapshot of a group, with what its record says of the group.
type member struct {
	Snapshot
	wasWhole bool
}

// complete reports whether a group is there. It has no record of its own: it is there if and only if as many snapshots say that they belong to it as each of them
// says there are. So there is no moment at which a crash could leave a part of a group that looks like the whole.
func complete(members []member) bool { return len(members) > 0 && len(members) == members[0].GroupSize }

// wasWhole reports whether the group was complete once. A member that is missing was lost then, with its disk or its record. The others stay, as somebody
// was told that they exist.
func wasWhole(members []member) bool {
	return slices.ContainsFunc(members, func(m member) bool { return m.wasWhole })
}

// setWhole records in members whether their group is complete. poolOf returns a pool by its name.
func setWhole(ctx context.Context, poolOf func(name string) (blockdev.Pool, error), members []member, whole bool) error {
	value := ""
	if whole {
		value = "1"
	}
	for i := range members {
		m := &members[i]
		if m.wasWhole == whole {
			continue
		}
		pool, err := poolOf(m.ID.Pool)
		if err == nil {
			err = changeLabel(ctx, pool, m.ID.ref(), labelGroupWhole, value)
		}
		if err != nil {
			return fmt.Errorf("note in snapshot %s whether its group is complete: %w", m.ID, err)
		}
		m.wasWhole = whole
	}
	return nil
}

// groups returns the members of all groups in some pools, by the keys of the groups, in the order of the pools' names and then of their own keys.
func (l *Local) groups(ctx context.Context, pools []blockdev.Pool) (map[string][]member, error) {
	groups := map[string][]member{}
	for _, pool := range slices.SortedFunc(slices.Values(pools), func(a, b blockdev.Pool) int { return strings.Compare(a.Name(), b.Name()) }) {
		records, err := pool.List(ctx, blockdev.Snapshot, "", 0)
		if err != nil {
			return nil, err
		}
		for _, r := range records {
			if key := r.Labels[labelGroup]; key != "" && !unfinished(r) {
				groups[key] = append(groups[key], member{snapshotFromRecord(pool.Name(), l.node, r), r.Labels[labelGroupWhole] != ""})
			}
		}
	}
	return groups, nil
}

func (l *Local) removeGroup(ctx context.Context, members []member) error {
	var ids []string
	for _, m := range members {
		ids = append(ids, m.ID.String())
	}
	release, err := l.lockSources(ids, nil)
	if err != nil {
		return err
	}
	defer release()
	// So that a start removes what a crash leaves of the group. A full disk may refuse this, and has to be emptied all the same.
	if err := setWhole(ctx, l.pool, members, false); err != nil && !errors.Is(err, errdefs.ErrNoSpace) {
		return err
	}
	var failures []error
	for _, m := range members {
		pool, ref, err := l.object(m.ID, blockdev.Snapshot)
		if err == nil {
			err = l.remove(ctx, pool, ref)
		}
		failures = append(failures, err)
	}
	return errors.Join(failures...)
}

func (l *Local) setIncomplete(key string, incomplete bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if incomplete {
		l.incomplete[key] = true
	} else {
		delete(l.incomplete, key)
	}
}

// CreateGroup: see Store. The writes to all sources are held back before the first one is cut. If one cannot be cut, no snapshot stays.
func (l *Local) CreateGroup(ctx context.Context, name string, sources []ID) (Group, error) {
	return l.CutLegs(ctx, name, sources, nil, nil)
}

// CutLegs is CreateGroup for volumes of which this node has legs, by the IDs of their volumes: the leg is cut in place of the volume. objects are
// Snapshot.Object of what is cut, by the IDs of the volumes.
func (l *Local) CutLegs(ctx context.Context, name string, sources []ID, legs map[ID]ID, objects map[ID]string) (_ Group, err error) {
	id := GroupID{KeyOf(name)}
	sources, err = GroupSources(sources)
	if err != nil {
		return Group{}, fmt.Errorf("group snapshot %q: %w", name, err)
	}
	var cuts []ID
	for _, source := range sources {
		cuts = append(cuts, cmp.Or(legs[source], source))
	}
	pools := l.poolsFor(cuts) // whoever asks again for a group names the same volumes
	groups, err := l.groups(ctx, pools)
	if err != nil {
		return Group{}, err
	}
	members := groups[id.Key]
	if complete(members) {
		return l.existingGroup(ctx, name, members, sources)
	}
	if wasWhole(members) { // its members are not of a try that was cut short
		return Group{}, fmt.Errorf("%w: group snapshot %q has %d of its %d snapshots only; restore the records of the others, or delete the group",
			errdefs.ErrDataLoss, name, len(members), members[0].GroupSize)
	}
	l.setIncomplete(id.Key, true)
	defer func() {
		if err != nil {
			err = fmt.Errorf("group snapshot %q: %w", name, err)
			// With the caller's context ended, what was cut still has to go.
			ctx, cancel := undoing.Context(ctx)
			defer cancel()
			if undone := l.undoGroup(ctx, id, pools); undone != nil {
				err = errors.Join(err, undone)
				return // what is left stays hidden; a retry or the next start removes it
			}
		}
		l.setIncomplete(id.Key, false)
	}()
	if err := l.removeGroup(ctx, members); err != nil {
		return Group{}, err
	}
	members, err = l.cutGroup(ctx, name, sources, legs, objects)
	if err != nil {
		return Group{}, err
	}
	if err := setWhole(ctx, l.pool, members, true); err != nil {
		return Group{}, err
	}
	return toGroup(id, members), nil
}

// existingGroup returns a group that is complete. ErrExists if it is of other volumes.
func (l *Local) existingGroup(ctx context.Context, name string, members []member, sources []ID) (Group, error) {
	group := toGroup(GroupID{KeyOf(name)}, members)
	if !slices.EqualFunc(group.Snapshots, sources, func(s Snapshot, source ID) bool { return s.Source == source }) {
		return Group{}, fmt.Errorf("%w: group snapshot %q (%s) is of other volumes", errdefs.ErrExists, name, group.ID)
	}
	if err := setWhole(ctx, l.pool, members, true); err != nil {
		return Group{}, err
	}
	l.setIncomplete(group.ID.Key, false) // an earlier try that failed, and removed nothing, has left it hidden
	return group, nil
}

// cutGroup cuts all members of a group at one point in time. After an error the caller removes what was cut.
func (l *Local) cutGroup(ctx context.Context, name string, sources []ID, legs map[ID]ID, objects map[ID]string) (_ []member, err error) {
	cuts := make([]groupCut, len(sources))
	defer func() {
		for _, c := range cuts {
			if c.release != nil {
				err = withThaw(err, c.release())
			}
		}
	}()
	for i, source := range sources {
		c := &cuts[i]
		c.name = name + "\x00" + source.String()
		c.labels = map[string]string{labelGroup: KeyOf(name), labelGroupSize: strconv.Itoa(len(sources))}
		setLabel(c.labels, labelObject, objects[source])
		cut := source
		if leg, is := legs[source]; is && leg != source {
			cut, c.labels[labelSource] = leg, source.String()
		}
		if c.origin, err = l.snapshotSource(ctx, cut); err != nil {
			return nil, ofMember(source, err)
		}
	}
	for i := range cuts { // before any writer is held back
		if err := l.mayHoldWith(cuts[i].origin.id()); err != nil {
			return nil, err
		}
	}
	ctx, now := withCutting(ctx)
	for i := range cuts {
		c := &cuts[i]
		now.Store(new(c.origin.id()))
		if ctx, c.quiesced, c.release, err = l.quiesce(ctx, c.origin); err == nil && !c.quiesced {
			c.moves, err = l.isAttached(ctx, c.origin)
		}
		if err != nil {
			return nil, freezeError(ctx, ofMember(c.origin.id(), err))
		}
	}
	slices.SortStableFunc(cuts, func(a, b groupCut) int { return rank(a) - rank(b) })
	if err := l.cutAll(ctx, now, cuts, 0); err != nil {
		return nil, freezeError(ctx, err)
	}
	var members []member
	for _, c := range cuts {
		members = append(members, member{snapshotFromRecord(c.origin.pool.Name(), l.node, c.record), false})
	}
	return members, nil
}

// groupCut is one member of a group while the group is cut.
type groupCut struct {
	name     string
	labels   map[string]string
	origin   origin
	quiesced bool
	moves    bool         // others may write to it meanwhile: it is attached, and not quiesced
	release  func() error // lets writes to the origin go on; may be called again
	record   blockdev.Record
}

// rank is the place of a member in the order in which a group is cut: those that others may write to meanwhile come first. So the writes to all others are
// held back at the moment of which such a copy turns out to be.
func rank(c groupCut) int {
	if c.moves {
		return 0
	}
	return 1
}

// isAttached reports whether an origin has devices.
func (l *Local) isAttached(ctx context.Context, o origin) (bool, error) {
	devices, err := l.stacks.Of(o.pool, o.record.Ref).Attached(ctx)
	return len(devices) > 0, err
}

// ofMember adds to an error which member of a group it is of, unless its text says that already.
func ofMember(id ID, err error) error {
	if strings.Contains(err.Error(), id.String()) {
		return err
	}
	return fmt.Errorf("volume %s: %w", id, err)
}

// cutAll cuts the members of a group from index at on, in their order (rank). It stores the ID of the member that it is cutting in now.
//
// The writes to each member go on as soon as it is cut. All cuts are still of one point in time: what is written then is later than all cuts that writes still
// wait for. Of several members that others may write to meanwhile, all but the last must be unchanged when the last one is cut: that moment is then the moment
// of all. A pool that has to copy bytes does so after all members are cut.
func (l *Local) cutAll(ctx context.Context, now *atomic.Pointer[ID], cuts []groupCut, at int) error {
	if at == len(cuts) {
		return nil
	}
	c := &cuts[at]
	now.Store(new(c.origin.id()))
	rest := sync.OnceValue(func() error {
		if c.moves && (at+1 == len(cuts) || !cuts[at+1].moves) {
			if err := unchanged(ctx, cuts[:at]); err != nil {
				return err
			}
		}
		if err := c.release(); err != nil {
			return ofMember(c.origin.id(), err)
		}
		return l.cutAll(ctx, now, cuts, at+1)
	})
	var later error // of the members after this one
	record, err := l.cut(ctx, c.origin, c.name, c.quiesced, func(context.Context) error { later = rest(); return later }, c.labels)
	switch {
	case later != nil:
		return later
	case err != nil:
		return ofMember(c.origin.id(), err)
	}
	c.record = record
	return rest()
}

// unchanged returns errdefs.ErrInUse if a member that was cut has changed since; errdefs.ErrPrecondition if its pool cannot tell.
func unchanged(ctx context.Context, cuts []groupCut) error {
	for _, c := range cuts {
		comparer, is := blockdev.As[blockdev.Comparer](c.origin.pool)
		if !is {
			return fmt.Errorf("%w: the writes to volume %s cannot be held back, nor found out; stop the pods that use it until the group is cut", errdefs.ErrPrecondition, c.origin.id())
		}
		copied := blockdev.Ref{Kind: blockdev.Snapshot, Key: KeyOf(c.name)}
		if err := comparer.Unchanged(ctx, copied, c.origin.record.Ref); err != nil {
			return ofMember(c.origin.id(), err)
		}
	}
	return nil
}

// poolsFor returns the pools of some objects, and all that are open.
func (l *Local) poolsFor(ids []ID) []blockdev.Pool {
	return slices.DeleteFunc(slices.Clone(l.pools), func(pool blockdev.Pool) bool {
		return blockdev.Unwrap(pool) == nil && !slices.ContainsFunc(ids, func(id ID) bool { return l.placeOf(id) == pool.Name() })
	})
}

func (l *Local) undoGroup(ctx context.Context, id GroupID, pools []blockdev.Pool) error {
	groups, err := l.groups(ctx, pools)
	if err != nil {
		return err
	}
	return l.removeGroup(ctx, groups[id.Key])
}

func toGroup(id GroupID, members []member) Group {
	var snapshots []Snapshot
	for _, m := range members {
		snapshots = append(snapshots, m.Snapshot)
	}
	return NewGroup(id, snapshots)
}

// DeleteGroup: see Store. ErrUnavailable while a pool is not open: it may have a part of the group.
func (l *Local) DeleteGroup(ctx context.Context, id GroupID) error {
	return l.deleteGroup(ctx, id, l.pools)
}

// DeleteMembers is DeleteGroup for a group of which it is known which snapshots it has: pools that are not open, and have none of these, do not matter.
func (l *Local) DeleteMembers(ctx context.Context, id GroupID, members []ID) error {
	return l.deleteGroup(ctx, id, l.poolsFor(members))
}

func (l *Local) deleteGroup(ctx context.Context, id GroupID, pools []blockdev.Pool) error {
	groups, err := l.groups(ctx, pools)
	if err != nil {
		return err
	}
	l.setIncomplete(id.Key, true)
	err = l.removeGroup(ctx, groups[id.Key])
	if errors.Is(err, errdefs.ErrBusy) { // none of it is gone
		l.setIncomplete(id.Key, !complete(groups[id.Key]) && !wasWhole(groups[id.Key]))
	}
	if err != nil {
		return fmt.Errorf("delete %s: %w", id, err) // what is left stays hidden
	}
	l.setIncomplete(id.Key, false)
	return nil
}

// GetGroup: see Store.
func (l *Local) GetGroup(ctx context.Context, id GroupID) (Group, error) {
	groups, err := l.groups(ctx, l.pools)
	if err != nil {
		return Group{}, err
	}
	if members := groups[id.Key]; complete(members) {
		return toGroup(id, members), nil
	}
	return Group{}, fmt.Errorf("%w: no %s", errdefs.ErrNotFound, id)
}

// hidden reports whether a snapshot is to be seen by nobody: its group is being made or deleted, or it was cut for a copy in another pool.
func (l *Local) hidden(r blockdev.Record) bool {
	if r.Labels[labelCutFor] != "" {
		return true
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.incomplete[r.Labels[labelGroup]]
}
