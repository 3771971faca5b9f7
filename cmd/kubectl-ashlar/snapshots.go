package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/cli"
	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
)

// snapshotMoves are moves of snapshots, some at a time.
type snapshotMoves struct {
	*cluster
	out      io.Writer
	parallel int
	all      []*snapshotMove
}

// snapshotMove is the move of one snapshot.
type snapshotMove struct {
	s       *v1alpha1.Snapshot
	to      place // without a pool: a snapshot moves between pools of one name
	why     error // why it stays; nil: it can move
	begun   bool  // its move was asked for
	ended   bool
	told    string
	last    string    // the last text about it
	changed time.Time // when that text changed
}

func (s *snapshotMove) title() string { return "snapshot " + cli.Line(s.s.Spec.Name) }

// along is how many snapshots move at once: as many as an agent copies at once from one pool of another node.
const along = 4

// snapshotsOf returns all snapshots for which is is true, the largest first.
func (c *cluster) snapshotsOf(ctx context.Context, is func(*v1alpha1.Snapshot) bool) ([]*v1alpha1.Snapshot, error) {
	var list v1alpha1.SnapshotList
	if err := c.List(ctx, &list); err != nil {
		return nil, fmt.Errorf("list the snapshots: %w", err)
	}
	var all []*v1alpha1.Snapshot
	for i := range list.Items {
		if s := &list.Items[i]; is(s) {
			all = append(all, s)
		}
	}
	slices.SortStableFunc(all, func(a, b *v1alpha1.Snapshot) int { return cmp.Compare(b.Status.Size, a.Status.Size) })
	return all, nil
}

// leavesSnapshot returns why a snapshot cannot leave its node, and what to do; nil if it can.
func (r *room) leavesSnapshot(s *v1alpha1.Snapshot) error {
	home := s.Spec.NodeName
	switch m := s.Spec.Move; {
	case v1alpha1.Going(s):
		return errors.New("it is being deleted")
	case s.Status.Created == nil:
		return errors.New("it is not taken yet; try again when it is")
	case v1alpha1.IsLost(s):
		return errors.New("its bytes are missing")
	case m != nil && m.Left:
		return fmt.Errorf("it has just come from node %s, which has not given its bytes back yet; try again then; if that node never comes back, delete its Node object", m.Node)
	case r.silent[home] != "":
		return fmt.Errorf("its bytes are on node %s, which does not answer: %s", home, r.silent[home])
	case !r.ported(home, s.Spec.Pool):
		return fmt.Errorf("its node %s has no port, so its bytes cannot leave it; start the driver there with --agent-endpoint", home)
	}
	return nil
}

// ported reports whether the agent of a pool has a port (--agent-endpoint).
func (r *room) ported(node, pool string) bool {
	p := r.pools[overview.PoolName(node, pool)]
	return p != nil && p.Status.Agent != nil
}

// takesSnapshot returns why a node cannot take a snapshot that can leave its own, and what to do; nil if it can.
func (r *room) takesSnapshot(s *v1alpha1.Snapshot, node string) error {
	name := overview.PoolName(node, s.Spec.Pool)
	p := r.pools[name]
	switch {
	case node == s.Spec.NodeName:
		return errors.New("the snapshot is on that node")
	case p == nil:
		return r.lacking(s, place{node: node})
	case r.silent[node] != "":
		return fmt.Errorf("it does not answer: %s", r.silent[node])
	case p.Status.Agent == nil:
		return errors.New("its agent has no port; start the driver there with --agent-endpoint")
	case len(p.Status.Health) > 0:
		return fmt.Errorf("pool %s is not well: %s: %s", name, p.Status.Health[0].Reason, p.Status.Health[0].Message)
	}
	if need, available := s.Keeps(), min(p.Status.Available-r.promised[name], p.Status.MaxVolume); need > available {
		return fmt.Errorf("pool %s has no room: %s are needed, and %s could come at most; make room there, or choose another node (kubectl ashlar pools)", name, cli.Size(need), cli.Size(max(available, 0)))
	}
	return nil
}

// mayTake returns why a snapshot cannot be asked to move to a node. The caller has excluded that it is asked to already.
func (r *room) mayTake(s *v1alpha1.Snapshot, node string) error {
	if s.Spec.NodeName == node && s.Spec.Move == nil {
		return errors.New("it is on that node")
	}
	if err := r.leavesSnapshot(s); err != nil {
		return err
	}
	if m := s.Spec.Move; m != nil {
		return fmt.Errorf("it is being moved to node %s; to take that back: kubectl ashlar move %s --cancel", m.Node, s.ID())
	}
	return r.takesSnapshot(s, node)
}

// runSnapshot is run for one snapshot, by its ID.
func (m *moving) runSnapshot(ctx context.Context, o *overview.Overview, id string) error {
	all, err := m.snapshotsOf(ctx, func(s *v1alpha1.Snapshot) bool { return s.ID() == id })
	if err != nil {
		return err
	}
	if len(all) == 0 {
		return fmt.Errorf("there is no snapshot %s; kubectl ashlar describe VOLUME -o wide lists those of a volume", cli.Line(id))
	}
	s := all[0]
	if err := comesFrom(s, m.from); err != nil {
		return err
	}
	if m.cancel {
		return m.cancelMove(ctx, s, (&snapshotMove{s: s}).title())
	}
	to, err := placeOf(m.to)
	if err != nil {
		return err
	}
	if to.of(s) != s.Spec.Pool {
		return fmt.Errorf("move snapshot %s to %s: it is in pool %s, and stays in pools of that name, as its ID has it; give --to %s", id, to, s.Spec.Pool, to.node)
	}
	return m.moveAll(ctx, o, all, to.node)
}

// moveSnapshotsOf moves the snapshots of a volume to the node of a place, each to the pool of its own name there, which may be another one than the volume's.
func (m *moving) moveSnapshotsOf(ctx context.Context, o *overview.Overview, v *v1alpha1.Volume, to place) error {
	all, err := m.snapshotsOf(ctx, func(s *v1alpha1.Snapshot) bool {
		return s.SourceID() == v.ID() && (s.Spec.NodeName != to.node || s.Spec.Move != nil) && !v1alpha1.Going(s)
	})
	if err != nil {
		return err
	}
	if len(all) == 0 {
		_, err := fmt.Fprintf(m.out, "It has no snapshots on other nodes than %s.\n", to.node)
		return err
	}
	if slices.ContainsFunc(all, func(s *v1alpha1.Snapshot) bool { return to.of(s) != s.Spec.Pool }) {
		if _, err := fmt.Fprintf(m.out, "Its snapshots move to the pools of their own names on node %s, which their IDs have.\n", to.node); err != nil {
			return err
		}
	}
	return m.moveAll(ctx, o, all, to.node)
}

// cancelSnapshotsOf takes back the moves of the snapshots of a volume that are not done yet.
func (m *moving) cancelSnapshotsOf(ctx context.Context, v *v1alpha1.Volume) error {
	all, err := m.snapshotsOf(ctx, func(s *v1alpha1.Snapshot) bool {
		return s.SourceID() == v.ID() && s.Spec.Move != nil && !s.Spec.Move.Left
	})
	if err == nil && len(all) == 0 && v.Spec.Move == nil {
		_, err = fmt.Fprintln(m.out, "None of its snapshots moves.")
	}
	for _, s := range all {
		err = errors.Join(err, m.cancelMove(ctx, s, (&snapshotMove{s: s}).title()))
	}
	return err
}

// moveAll moves snapshots to a node. With m.wait it waits, and prints how far they are.
func (m *moving) moveAll(ctx context.Context, o *overview.Overview, all []*v1alpha1.Snapshot, node string) error {
	r, err := m.look(ctx, o)
	if err != nil {
		return err
	}
	c := &snapshotMoves{cluster: m.cluster, out: m.out, parallel: along}
	for _, s := range all {
		one := &snapshotMove{s: s, to: place{node: node}}
		if !asked(s, one.to) {
			if one.why = r.mayTake(s, node); one.why != nil {
				if err := c.stays(one); err != nil {
					return err
				}
			} else {
				r.promise(s, one.to)
			}
		}
		c.all = append(c.all, one)
	}
	if !m.wait {
		c.parallel = len(c.all)
		_, err = c.step(ctx)
	} else {
		err = c.carryOut(ctx)
	}
	if err != nil {
		return fmt.Errorf("%w; moves that were asked for go on, and no others begin; run it again to go on", err)
	}
	return c.staying()
}

// carryOut moves the snapshots that can move, and returns when all moves have ended.
func (c *snapshotMoves) carryOut(ctx context.Context) error {
	for {
		busy, err := c.step(ctx)
		if err != nil || !busy {
			return err
		}
		select {
		case <-ctx.Done():
			return errors.New("interrupted")
		case <-time.After(lookAgain):
		}
	}
}

// step looks at each move, and begins up to parallel at a time. busy: it has to be called again.
func (c *snapshotMoves) step(ctx context.Context) (busy bool, err error) {
	under := 0
	for _, s := range c.all {
		if s.begun && !s.ended {
			if err := c.lookAt(ctx, s); err != nil {
				return false, err
			}
		}
		if s.begun && !s.ended {
			under++
		}
	}
	for _, s := range c.all {
		if !s.begun && s.why == nil && under < c.parallel {
			if err := c.begin(ctx, s); err != nil {
				return false, err
			}
			under++
		}
		busy = busy || s.why == nil && !s.ended
	}
	return busy, nil
}

// begin asks for the move of a snapshot. If it is refused, the snapshot stays, and the others go on; it is an error if the API server does not answer.
func (c *snapshotMoves) begin(ctx context.Context, s *snapshotMove) error {
	home := s.s.Spec.NodeName
	err := c.ask(ctx, s.s, s.to, func() error {
		if s.s.Spec.NodeName != home || s.s.Spec.Move != nil || v1alpha1.Going(s.s) {
			return errors.New("somebody else moves or deletes it; run this again")
		}
		return nil
	})
	if ctx.Err() != nil {
		return errors.New("interrupted")
	}
	if errors.Is(err, errSilent) {
		return fmt.Errorf("%s: %w: %w", s.title(), errUnknown, err)
	}
	s.begun, s.changed = true, time.Now()
	switch {
	case errors.Is(err, errDeleted):
		return c.deleted(s)
	case err != nil:
		s.ended, s.why = true, err
		return c.stays(s)
	}
	return c.tell(s)
}

// stays prints why a snapshot stays.
func (c *snapshotMoves) stays(s *snapshotMove) error {
	_, err := fmt.Fprintf(c.out, "%s: stays on node %s: %v\n", s.title(), s.s.Spec.NodeName, s.why)
	return err
}

// deleted ends the move of a snapshot that was deleted meanwhile, and prints that.
func (c *snapshotMoves) deleted(s *snapshotMove) error {
	s.ended = true
	_, err := fmt.Fprintf(c.out, "%s: %v\n", s.title(), errDeleted)
	return err
}

// tell prints how far a move is, unless it is as far as when that was last printed.
func (c *snapshotMoves) tell(s *snapshotMove) (err error) {
	if kind, text, done, failed := stageOf(s.s, s.to, ""); failed == nil && !done && kind != s.told {
		s.told = kind
		_, err = fmt.Fprintf(c.out, "%s: %s\n", s.title(), text)
	}
	return err
}

// lookAt reads how far the move of a snapshot is, and prints what has changed.
func (c *snapshotMoves) lookAt(ctx context.Context, s *snapshotMove) error {
	now := &v1alpha1.Snapshot{}
	err := c.patiently(ctx, func() error { return c.Get(ctx, client.ObjectKeyFromObject(s.s), now) })
	switch {
	case ctx.Err() != nil:
		return errors.New("interrupted")
	case client.IgnoreNotFound(err) != nil:
		return fmt.Errorf("%s: %w: %w", s.title(), errUnknown, err)
	case err != nil || now.UID != s.s.UID:
		return c.deleted(s)
	}
	s.s = now
	_, text, done, err := stageOf(now, s.to, "")
	if text != s.last {
		s.last, s.changed = text, time.Now()
	}
	switch {
	case err != nil:
		s.ended, s.why = true, err
		return c.stays(s)
	case done:
		s.ended = true
		_, err = fmt.Fprintf(c.out, "%s: %s\n", s.title(), text)
		return err
	case time.Since(s.changed) > standstill && time.Since(c.back) > standstill: // while the API server was silent, moves could not go on
		s.ended, s.why = true, fmt.Errorf("its move does not go on (nothing has changed for %s), and may later: %s", standstill, text)
		return c.stays(s)
	}
	return c.tell(s)
}

// staying returns an error if snapshots stay where they are. It may be called on nil: then none stays.
func (c *snapshotMoves) staying() error {
	if c == nil {
		return nil
	}
	stay := 0
	for _, s := range c.all {
		if s.why != nil {
			stay++
		}
	}
	if stay > 0 {
		return fmt.Errorf("%d of %d snapshots stay where they are, see above", stay, len(c.all))
	}
	return nil
}

// planSnapshots returns the snapshots that are on the node, or on their way to or from it: each with the node it is to move to, or why it stays. It prefers the
// node of the snapshot's volume, and the same node for all snapshots of a group.
func (e *evacuation) planSnapshots(ctx context.Context, volumes []*leaving) (*snapshotMoves, error) {
	all, err := e.snapshotsHere(ctx)
	if err != nil {
		return nil, err
	}
	wanted := map[string]string{} // by the key of a volume: its node, or the one it moves to; by "group KEY": the node of that group
	for _, l := range volumes {
		wanted[l.v.Name] = l.to.node
	}
	var others v1alpha1.VolumeList
	if err := e.List(ctx, &others); err != nil {
		return nil, fmt.Errorf("list the volumes: %w", err)
	}
	for i := range others.Items {
		if v := &others.Items[i]; v.Spec.NodeName != e.node {
			wanted[v.Name] = v.Spec.NodeName
		}
	}
	c := &snapshotMoves{cluster: e.cluster, out: e.out, parallel: e.parallel}
	for _, s := range all {
		one := &snapshotMove{s: s}
		one.to, one.why = e.targetOfSnapshot(s, wanted)
		if g := s.Spec.Group; g != nil && one.why == nil {
			wanted["group "+g.Key] = one.to.node
		}
		c.all = append(c.all, one)
	}
	return c, nil
}

// targetOfSnapshot returns where a snapshot is to move to, or why it stays. It counts the room that the snapshot takes there.
func (e *evacuation) targetOfSnapshot(s *v1alpha1.Snapshot, wanted map[string]string) (place, error) {
	m := s.Spec.Move
	switch {
	case m != nil && m.Left && m.Node == e.node && !v1alpha1.Going(s): // it has moved; the node has not given its bytes back yet
		return place{node: s.Spec.NodeName}, nil
	case m != nil && m.Node == e.node:
		return place{}, fmt.Errorf("it comes here, from node %s; to take that back: kubectl ashlar move %s --cancel", s.Spec.NodeName, s.ID())
	}
	if err := e.room.leavesSnapshot(s); err != nil {
		return place{}, err
	}
	if m != nil {
		return goal(s), nil
	}
	likes := []string{wanted[s.Spec.Source]}
	if g := s.Spec.Group; g != nil {
		likes = []string{wanted["group "+g.Key], wanted[s.Spec.Source]}
	}
	only := place{node: e.only.node}
	var to place
	for _, node := range likes {
		if to.node == "" && node != "" && (only.node == "" || node == only.node) && !e.room.cordoned[node] && e.room.takesSnapshot(s, node) == nil {
			to.node = node
		}
	}
	var err error
	if to.node == "" {
		to, err = e.room.bestOf(s, only, func(to place) error { return e.room.takesSnapshot(s, to.node) })
	}
	if err == nil {
		e.room.promise(s, to)
	}
	return to, err
}

// print prints the plan.
func (c *snapshotMoves) print(table io.Writer) error {
	var rows [][]string
	for _, s := range c.all {
		to, remark := s.to.flag(), ""
		switch m := s.s.Spec.Move; {
		case s.why != nil:
			to, remark = "stays", s.why.Error()
		case m != nil && m.Left:
			remark = "it has moved; its old bytes are to be given back"
		case m != nil:
			remark = "under way"
		}
		rows = append(rows, []string{cli.Line(s.s.Spec.Name), cli.Size(s.s.Status.Size), to, remark})
	}
	if len(rows) == 0 {
		return nil
	}
	return cli.Table(table, []string{"SNAPSHOT", "SIZE", "TO", "REMARKS"}, rows)
}
