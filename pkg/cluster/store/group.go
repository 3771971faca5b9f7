package store

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/liveness"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// members returns the members of a group, as the cache has them.
func (s *Store) members(ctx context.Context, key string) ([]v1alpha1.Snapshot, error) {
	if err := s.Ready(ctx); err != nil {
		return nil, err
	}
	return cluster.Members(ctx, s.kube.Client, key)
}

// membersNow is members, read at the API server if the group is not whole in the cache: another controller may have made it.
func (s *Store) membersNow(ctx context.Context, key string) ([]v1alpha1.Snapshot, error) {
	members, err := s.members(ctx, key)
	if err != nil || whole(members) {
		return members, err
	}
	return cluster.LiveMembers(ctx, s.kube.Live, key)
}

// liveMembers is members, read at the API server: what it says of a group is compared with what a caller says.
func (s *Store) liveMembers(ctx context.Context, key string) ([]v1alpha1.Snapshot, error) {
	if err := s.Ready(ctx); err != nil {
		return nil, err
	}
	return cluster.LiveMembers(ctx, s.kube.Live, key)
}

// whole reports whether a group exists. It has no object: it exists if there are as many members as each says (spec.group.size), all are taken, and none is
// to be deleted.
func whole(members []v1alpha1.Snapshot) bool {
	for i := range members {
		if m := &members[i]; m.Status.Created == nil || v1alpha1.Going(m) || m.Spec.Group.Size != len(members) {
			return false
		}
	}
	return len(members) > 0
}

// wholeWith reports whether a group exists and a snapshot is one of its members: any snapshot may name the group (v1alpha1.OfGroup).
func wholeWith(members []v1alpha1.Snapshot, o *v1alpha1.Snapshot) bool {
	return whole(members) && slices.ContainsFunc(members, func(m v1alpha1.Snapshot) bool { return m.Name == o.Name })
}

func toGroup(id volume.GroupID, members []v1alpha1.Snapshot) volume.Group {
	var snapshots []volume.Snapshot
	for i := range members {
		snapshots = append(snapshots, cluster.ToSnapshot(&members[i]))
	}
	return volume.NewGroup(id, snapshots)
}

// CreateGroup: see volume.Store. The sources, or current legs of them, have to be on one node. Its agent takes all snapshots once all objects are there.
func (s *Store) CreateGroup(ctx context.Context, name string, sources []volume.ID) (volume.Group, error) {
	group, err := s.createGroup(ctx, name, sources)
	if err != nil {
		return volume.Group{}, sayOnce(err, "group snapshot %q", name)
	}
	return group, nil
}

// sayOnce adds to an error what it is of, unless its text says that already: a node that refuses says it too.
func sayOnce(err error, format string, args ...any) error {
	what := fmt.Sprintf(format, args...)
	if strings.Contains(err.Error(), what) {
		return err
	}
	return fmt.Errorf("%s: %w", what, err)
}

func (s *Store) createGroup(ctx context.Context, name string, sources []volume.ID) (volume.Group, error) {
	id := volume.GroupID{Key: volume.KeyOf(name)}
	sources, err := volume.GroupSources(sources)
	if err != nil {
		return volume.Group{}, err
	}
	members, err := s.members(ctx, id.Key)
	for live := false; ; live = true { // another controller may have made it since, or deleted it: neither that it is there nor that it cannot be made is said by the cache alone
		if err != nil {
			return volume.Group{}, err
		}
		if there := whole(members); there && live {
			return existingGroup(id, members, sources)
		} else if !there {
			wanted, failed := s.planGroup(ctx, name, sources, members, nil)
			if failed == nil {
				return s.makeGroupAnywhere(ctx, id, members, wanted, func(refused []string) (map[string]*v1alpha1.Snapshot, error) {
					return s.planGroup(ctx, name, sources, nil, refused)
				})
			}
			if live {
				return volume.Group{}, s.takeBackCuts(ctx, members, failed)
			}
		}
		members, err = cluster.LiveMembers(ctx, s.kube.Live, id.Key)
	}
}

// existingGroup returns a group that is there; ErrExists if it is of other volumes.
func existingGroup(id volume.GroupID, members []v1alpha1.Snapshot, sources []volume.ID) (volume.Group, error) {
	group := toGroup(id, members)
	if !slices.EqualFunc(group.Snapshots, sources, func(one volume.Snapshot, source volume.ID) bool { return one.Source == source }) {
		return volume.Group{}, fmt.Errorf("%w: %s is of other volumes", errdefs.ErrExists, id)
	}
	return group, nil
}

// makeGroupAnywhere is makeGroup, on another node if the first one refuses: a leg there may lack what another one has, as only its node knows. another returns
// the members as they are wanted on a node that has not refused yet.
func (s *Store) makeGroupAnywhere(ctx context.Context, id volume.GroupID, members []v1alpha1.Snapshot, wanted map[string]*v1alpha1.Snapshot, another func(refused []string) (map[string]*v1alpha1.Snapshot, error)) (volume.Group, error) {
	var nodes []string // that have refused
	for {
		group, err := s.makeGroup(ctx, id, members, wanted)
		var refused *cluster.Refusal
		if !errors.As(err, &refused) || !errors.Is(err, errdefs.ErrUnavailable) {
			return group, err
		}
		for _, one := range wanted {
			nodes = append(nodes, one.Spec.NodeName) // all have the same one
		}
		next, failed := another(nodes)
		if failed != nil {
			return group, err
		}
		members, wanted = nil, next
	}
}

// makeGroup makes the members that are wanted of a group. members are those that an earlier try left.
func (s *Store) makeGroup(ctx context.Context, id volume.GroupID, members []v1alpha1.Snapshot, wanted map[string]*v1alpha1.Snapshot) (volume.Group, error) {
	err := s.clearGroup(ctx, members, wanted)
	if err == nil {
		members, err = s.cutGroup(ctx, wanted)
	}
	if err == nil && !whole(members) {
		err = fmt.Errorf("%w: a snapshot of it is being deleted", errdefs.ErrUnavailable)
	}
	if err != nil {
		return volume.Group{}, err
	}
	return toGroup(id, members), nil
}

// planGroup returns the objects of the members of a new group, by their names. All are taken on one node, of a volume with several legs from a current leg
// there. begun are the members of an earlier try: it goes on on their node, if that is possible. refused are nodes that are not to be asked. ErrPrecondition if no
// node has all volumes; also an error if the node is not ready.
func (s *Store) planGroup(ctx context.Context, name string, sources []volume.ID, begun []v1alpha1.Snapshot, refused []string) (map[string]*v1alpha1.Snapshot, error) {
	var nodes []string // that have all sources looked at so far, the best one first
	cuts := make([]map[string]*v1alpha1.Volume, len(sources))
	for i, source := range sources {
		found, err := s.cutsOf(ctx, source)
		if err != nil {
			return nil, err
		}
		cuts[i] = map[string]*v1alpha1.Volume{}
		var on []string
		for _, v := range slices.DeleteFunc(found, func(v *v1alpha1.Volume) bool { return slices.Contains(refused, v.Spec.NodeName) }) {
			on, cuts[i][v.Spec.NodeName] = append(on, v.Spec.NodeName), v
		}
		before := nodes
		if nodes = slices.DeleteFunc(slices.Clone(before), func(node string) bool { return cuts[i][node] == nil }); i == 0 {
			nodes = on
		}
		if len(nodes) == 0 {
			return nil, fmt.Errorf("%w: volume %s is on node %s and volume %s on node %s: only volumes of one node can be cut at one moment (of one with replicas, one that has all that was written)",
				errdefs.ErrPrecondition, sources[0], strings.Join(before, ", "), source, strings.Join(on, ", "))
		}
	}
	node, err := s.readyOf(ctx, nodes, begun)
	wanted := map[string]*v1alpha1.Snapshot{}
	for i, source := range sources {
		one := newSnapshot(name, source, cuts[i][node], &v1alpha1.Group{Key: volume.KeyOf(name), Size: len(sources)})
		wanted[one.Name] = one
	}
	return wanted, err
}

// cutsOf returns the Volumes from any of which a snapshot of a volume can be taken: itself, or its current legs, the best one first.
func (s *Store) cutsOf(ctx context.Context, source volume.ID) ([]*v1alpha1.Volume, error) {
	r, err := s.replicated(ctx, source)
	if err != nil {
		return nil, err
	}
	if r == nil {
		v, err := s.usable(ctx, source)
		return []*v1alpha1.Volume{v}, err
	}
	if err := usableReplicated(r); err != nil {
		return nil, err
	}
	best, err := s.stands(ctx, r)
	if err != nil {
		return nil, err
	}
	legs, err := s.legs(ctx, r)
	others := slices.DeleteFunc(currentLegs(r, legs), func(v *v1alpha1.Volume) bool { return v.Name == best.Name })
	return append([]*v1alpha1.Volume{best}, others...), err
}

// readyOf returns the node that is to take the snapshots of a group: that of begun, if it is ready, else the first of nodes that is. If none is ready (homeReady), it
// returns the first with its error, or that of one that may come back.
func (s *Store) readyOf(ctx context.Context, nodes []string, begun []v1alpha1.Snapshot) (node string, err error) {
	if len(begun) > 0 && slices.Contains(nodes, begun[0].Spec.NodeName) {
		nodes = append([]string{begun[0].Spec.NodeName}, nodes...)
	}
	var failures []error
	for _, node := range nodes {
		err := s.homeReady(ctx, node)
		if err == nil {
			return node, nil
		}
		failures = append(failures, err)
	}
	if at := slices.IndexFunc(failures, func(err error) bool { return !errors.Is(err, errdefs.ErrPrecondition) }); at > 0 {
		return nodes[at], failures[at]
	}
	return nodes[0], failures[0]
}

// clearGroup deletes all members that an earlier try left of a group, unless all are wanted and none is refused or to be deleted. A member that was taken
// once and is lost is an error. If their node is down, and has reported none, they are taken back (withdrawCut): they are wanted on another one.
func (s *Store) clearGroup(ctx context.Context, members []v1alpha1.Snapshot, wanted map[string]*v1alpha1.Snapshot) error {
	for i := range members {
		if m := &members[i]; v1alpha1.LostUnmade(m) {
			return cluster.ErrorOf(m.Spec.NodeName, m.Status.Failure)
		}
	}
	if !slices.ContainsFunc(members, func(m v1alpha1.Snapshot) bool {
		return v1alpha1.Going(&m) || m.Common().Refused(m.Generation) != nil || wanted[m.Name] == nil || !sameSnapshot(&m, wanted[m.Name]) ||
			m.Status.Created == nil && m.Spec.NodeName != wanted[m.Name].Spec.NodeName || isOfAnotherLeg(&m, wanted[m.Name])
	}) {
		return nil
	}
	_, err := s.removeAll(ctx, members)
	var down *liveness.NodeDown
	if !errors.As(err, &down) || slices.ContainsFunc(members, func(m v1alpha1.Snapshot) bool { return m.Status.Created != nil }) {
		return err
	}
	for i := range members {
		if err := s.withdrawCut(ctx, &members[i], down); err != nil {
			return err
		}
	}
	return nil
}

// cutGroup creates the objects of all members and waits until their node has taken the snapshots. If the node refuses, they are deleted (groupFailed).
func (s *Store) cutGroup(ctx context.Context, wanted map[string]*v1alpha1.Snapshot) ([]v1alpha1.Snapshot, error) {
	watches := map[string]*kube.Watch{}
	defer func() {
		for _, w := range watches {
			w.Close()
		}
	}()
	begun := map[string]*v1alpha1.Snapshot{}
	for key, one := range wanted {
		watches[key] = s.hub.Open(one)
		var err error
		if begun[key], err = s.getOrCreateSnapshot(ctx, watches[key], one); err != nil {
			return nil, err
		}
	}
	var cut []v1alpha1.Snapshot
	for key, one := range begun {
		have, err := wait(ctx, s, watches[key], one, isMade)
		if err != nil {
			return nil, s.groupFailed(ctx, begun, have, err)
		}
		if err := forbidMaking(ctx, s, have); err != nil {
			return nil, err
		}
		cut = append(cut, *have)
	}
	return cut, nil
}

// groupFailed returns the error of a group of which a member could not be taken. If its node refused, all members are deleted, unless that member was taken
// once and is lost.
func (s *Store) groupFailed(ctx context.Context, begun map[string]*v1alpha1.Snapshot, member *v1alpha1.Snapshot, err error) error {
	var refused *cluster.Refusal
	switch {
	case errors.Is(err, errGone):
		return fmt.Errorf("%w: a snapshot of it was deleted while it was being cut", errdefs.ErrUnavailable)
	case !errors.As(err, &refused):
		return err
	case v1alpha1.LostUnmade(member):
		return refused
	}
	var all []v1alpha1.Snapshot
	for _, one := range begun {
		all = append(all, *one)
	}
	if _, err := s.removeAll(ctx, all); err != nil {
		return err
	}
	return refused
}

// takeBackCuts deletes the snapshots that an earlier try has asked for, if err is final: then the caller does not ask again. It deletes nothing if err is
// ErrUnavailable, or any of them may have been taken. It returns err, or why the deletion failed.
func (s *Store) takeBackCuts(ctx context.Context, begun []v1alpha1.Snapshot, err error) error {
	if errors.Is(err, errdefs.ErrUnavailable) || slices.ContainsFunc(begun, func(m v1alpha1.Snapshot) bool { return m.Status.Created != nil || !m.Spec.Make }) {
		return err
	}
	if _, failed := s.removeAll(ctx, begun); failed != nil {
		return failed
	}
	return err
}

// removeAll deletes snapshots and waits until all are gone: a node deletes the members of a group together. behind: some could not be deleted, as they were
// gone or changed before, and objects of their names may be there.
func (s *Store) removeAll(ctx context.Context, members []v1alpha1.Snapshot) (behind bool, err error) {
	watches := map[int]*kube.Watch{}
	defer func() {
		for _, w := range watches {
			w.Close()
		}
	}()
	gone := map[int]bool{}
	for i := range members {
		m := &members[i]
		watches[i] = s.hub.Open(m)
		if m.Deleting() {
			continue
		}
		err := cluster.IntendDeletion(ctx, s.kube.Client, m, m.Spec.Move != nil)
		if err != nil && kube.IgnoreConflict(err) == nil {
			gone[i] = true
		} else if err != nil {
			return false, kube.APIError("delete snapshot "+cluster.SnapshotID(m).String(), err)
		}
	}
	for i := range members {
		if gone[i] {
			continue
		}
		if err := waitGone(ctx, s, watches[i], &members[i]); err != nil {
			return false, err
		}
	}
	return len(gone) > 0, nil
}

// DeleteGroup: see volume.Store.
func (s *Store) DeleteGroup(ctx context.Context, id volume.GroupID) error {
	members, err := s.liveMembers(ctx, id.Key)
	home := ""
	if len(members) > 0 {
		home = members[0].Spec.NodeName
	}
	for behind := true; err == nil && behind; {
		for i := range members {
			if m := &members[i]; !m.Deleting() {
				err = errors.Join(err, cluster.Leaving("snapshot", cluster.SnapshotID(m), m.Spec.Move), s.notCopied(ctx, cluster.SnapshotID(m)))
			}
		}
		if err != nil {
			break
		}
		if behind, err = s.removeAll(ctx, members); behind {
			members, err = cluster.LiveMembers(ctx, s.kube.Live, id.Key)
		}
	}
	if err == nil {
		err = s.checkStrays(ctx, id.String(), home)
	}
	if err != nil {
		return fmt.Errorf("delete %s: %w", id, err)
	}
	return nil
}

// GetGroup: see volume.Store.
func (s *Store) GetGroup(ctx context.Context, id volume.GroupID) (volume.Group, error) {
	members, err := s.liveMembers(ctx, id.Key)
	if err != nil {
		return volume.Group{}, err
	}
	if !whole(members) {
		return volume.Group{}, fmt.Errorf("%w: no %s", errdefs.ErrNotFound, id)
	}
	return toGroup(id, members), nil
}
