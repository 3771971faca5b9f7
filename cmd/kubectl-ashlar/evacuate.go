package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/cli"
	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
)

// evacuation is the command evacuate: the move of all volumes of a node.
type evacuation struct {
	*cluster
	out      io.Writer // for lines
	table    io.Writer // for the plan
	node     string
	to       string // the flag --to; empty: any place
	only     place
	parallel int
	dryRun   bool
	with     bool // move snapshots, too
	room     *room
	unheard  bool // the API server did not answer the last request about a volume
}

func evacuateCommand(flags *genericclioptions.ConfigFlags) *cobra.Command {
	var e evacuation
	cmd := &cobra.Command{
		Use:   "evacuate NODE",
		Short: "Move all volumes with access=any off a node",
		Long: `kubectl ashlar evacuate moves the volumes of a node to other nodes. Each goes to the pool of the same
name that has most room, on a node of its network that answers and is not cordoned; with --to, all go
to that node. First the command prints what moves where, and what stays and why.

Cordon the node first, so that no new volumes are made there. Copies and snapshots of what is there
may still be made.

Volumes that nobody uses are copied a few at a time (--parallel). Volumes that are used are all asked
to move at once: the nodes that use them copy them meanwhile, and the command waits as long as that
goes on. It does not wait for a volume that moves only when it is released. A replica of a volume that
is used does not move: the volume gets another replica elsewhere, and then drops this one.

With --with-snapshots the snapshots of the node move after that, each to a pool of its own name, also
those whose volume is elsewhere or gone.

The command ends with status 1 if something stays on the node, or has come there meanwhile. It can be
run again at any time: it goes on with what is left.`,
		Args: func(_ *cobra.Command, args []string) (err error) {
			switch {
			case len(args) != 1:
				return errors.New("give one node")
			case e.parallel < 1:
				return errors.New("--parallel: give 1 or more")
			case e.to == "":
				return nil
			}
			if e.only, err = placeOf(e.to); err == nil && e.only.node == args[0] {
				err = errors.New("--to: give another node than the one that is evacuated")
			}
			return err
		},
		ValidArgsFunction: completeOf(flags, nodesOf),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			if e.cluster, err = connect(flags); err != nil {
				return err
			}
			e.node, e.table, e.out = args[0], cmd.OutOrStdout(), cli.Plain(cmd.OutOrStdout())
			return e.run(cmd.Context())
		},
	}
	f := cmd.Flags()
	f.StringVar(&e.to, "to", "", "only to this node, NODE or NODE/POOL (default: to the one with most room, for each volume)")
	f.IntVar(&e.parallel, "parallel", 2, "how many volumes are copied at once")
	f.BoolVar(&e.dryRun, "dry-run", false, "print what would be done, and do nothing")
	f.BoolVar(&e.with, "with-snapshots", false, "move the snapshots of the node as well, each to a pool of its own name")
	_ = cmd.RegisterFlagCompletionFunc("to", completeOf(flags, placesOf)) // cannot fail: the flag exists
	return cmd
}

// leaving is a volume on the node, and its move.
type leaving struct {
	followed
	why     error // why it stays; nil: it can move
	begun   bool  // its move was asked for
	ended   bool
	rests   bool      // its volume is used, and its move shows no change for standstill
	last    string    // the last text about it
	changed time.Time // when that text changed
}

func (e *evacuation) run(ctx context.Context) error {
	o, err := e.Overview(ctx)
	if err != nil {
		return err
	}
	if e.room, err = e.look(ctx, o); err != nil {
		return err
	}
	if e.room.cordoned == nil {
		return errors.New("you may not list nodes, so it is not known which of them are cordoned; move volumes one by one (kubectl ashlar move), or ask for that right")
	}
	cordoned, known := e.room.cordoned[e.node]
	if !known && !slices.Contains(nodesOf(o), e.node) {
		return fmt.Errorf("there is no node %q; kubectl ashlar pools lists the nodes that have pools", e.node)
	}
	all, err := e.plan(ctx, o)
	if err != nil {
		return err
	}
	if err := e.print(all, o, cordoned); err != nil {
		return err
	}
	var snapshots *snapshotMoves
	if e.with {
		if snapshots, err = e.planSnapshots(ctx, all); err == nil {
			err = snapshots.print(e.table)
		}
		if err != nil {
			return err
		}
	}
	if e.dryRun {
		return errors.Join(e.staying(all), snapshots.staying())
	}
	if err := e.carryOut(ctx, all); err != nil {
		return err
	}
	stay, snapshotsStay := e.staying(all), e.moveSnapshots(ctx, snapshots)
	if stay == nil {
		stay = e.lastLook(ctx, "volume", len(all), "", func() ([]string, error) { return e.volumeNames(ctx, o) })
	}
	if snapshotsStay == nil && snapshots != nil {
		snapshotsStay = e.lastLook(ctx, "snapshot", len(snapshots.all), " --with-snapshots", func() ([]string, error) { return e.snapshotNames(ctx) })
	}
	return errors.Join(stay, snapshotsStay)
}

// moveSnapshots moves the snapshots of the node; nil: they stay.
func (e *evacuation) moveSnapshots(ctx context.Context, snapshots *snapshotMoves) error {
	if snapshots == nil {
		return nil
	}
	if err := snapshots.carryOut(ctx); err != nil {
		return fmt.Errorf("%w; moves that were asked for go on, and no others begin; run it again to go on (kubectl ashlar evacuate %s --with-snapshots)", err, e.node)
	}
	return snapshots.staying()
}

// mostNews is how many names an error lists of what has come to the node meanwhile.
const mostNews = 10

// lastLook looks at the node again when everything of the plan has left it. here returns the names of the volumes, or of the snapshots (kind), that are
// there now. If there are none, it prints that, unless none was planned. It is an error if there are some: they have come meanwhile, or come back. A plan may
// take hours, and schedules go on making snapshots of what is there.
func (e *evacuation) lastLook(ctx context.Context, kind string, planned int, flags string, here func() ([]string, error)) error {
	var names []string
	if err := e.patiently(ctx, func() (err error) { names, err = here(); return err }); err != nil {
		return fmt.Errorf("all %ss that were on node %s have left it, and it is not known whether others have come meanwhile: %w", kind, e.node, err)
	}
	n := len(names)
	switch {
	case n == 0 && planned == 0:
		return nil
	case n == 0:
		_, err := fmt.Fprintf(e.out, "No %s is left on node %s.\n", kind, e.node)
		return err
	}
	slices.Sort(names)
	if n > mostNews {
		names = append(names[:mostNews], fmt.Sprintf("and %d more", n-mostNews))
	}
	return fmt.Errorf("%ss that have come to node %s meanwhile, or back to it: %d (%s); run it again (kubectl ashlar evacuate %s%s)", kind, e.node, n, strings.Join(names, ", "), e.node, flags)
}

func (e *evacuation) volumeNames(ctx context.Context, o *overview.Overview) (names []string, err error) {
	here, err := e.volumesHere(ctx)
	for i := range here {
		names = append(names, cli.Title(shown(o, &here[i])))
	}
	return names, err
}

func (e *evacuation) snapshotNames(ctx context.Context) (names []string, err error) {
	here, err := e.snapshotsHere(ctx)
	for _, s := range here {
		names = append(names, cli.Line(s.Spec.Name))
	}
	return names, err
}

// volumesHere returns the volumes that are on the node, or on their way to or from it.
func (e *evacuation) volumesHere(ctx context.Context) (here []v1alpha1.Volume, _ error) {
	for _, field := range []string{"spec.nodeName", "spec.move.node"} {
		var volumes v1alpha1.VolumeList
		if err := e.List(ctx, &volumes, client.MatchingFields{field: e.node}); err != nil {
			return nil, fmt.Errorf("list the volumes of node %s: %w", e.node, err)
		}
		here = append(here, volumes.Items...)
	}
	return here, nil
}

// snapshotsHere is volumesHere for snapshots, the largest first.
func (e *evacuation) snapshotsHere(ctx context.Context) ([]*v1alpha1.Snapshot, error) {
	return e.snapshotsOf(ctx, func(s *v1alpha1.Snapshot) bool {
		return s.Spec.NodeName == e.node || s.Spec.Move != nil && s.Spec.Move.Node == e.node
	})
}

// plan returns the volumes that are on the node, or on their way to or from it, the largest first: each with the place it is to move to, or why it stays.
func (e *evacuation) plan(ctx context.Context, o *overview.Overview) ([]*leaving, error) {
	volumes, err := e.volumesHere(ctx)
	if err != nil {
		return nil, err
	}
	var all []*leaving
	for i := range volumes {
		v := &volumes[i]
		all = append(all, &leaving{followed: *following(v, shown(o, v), place{})})
	}
	slices.SortStableFunc(all, func(a, b *leaving) int {
		return cmp.Or(cmp.Compare(b.v.Spec.Size, a.v.Spec.Size), cmp.Compare(a.title, b.title))
	})
	for _, l := range all {
		l.to, l.why = e.target(l.v)
	}
	return all, nil
}

// target returns where a volume is to move to, or why it stays. It counts the room that the volume takes there.
func (e *evacuation) target(v *v1alpha1.Volume) (place, error) {
	switch m := v.Spec.Move; {
	case m != nil && m.Left && m.Node == e.node && !v1alpha1.Going(v): // it has moved; the node has not given its bytes back yet
		return place{node: v.Spec.NodeName}, nil
	case m != nil && m.Node == e.node:
		return place{}, fmt.Errorf("it comes here, from node %s; to take that back: kubectl ashlar move %s --cancel", v.Spec.NodeName, called(v))
	}
	if err := e.room.leaves(v); err != nil {
		return place{}, err
	}
	if m := v.Spec.Move; m != nil {
		return goal(v), nil
	}
	to, err := e.room.best(v, e.only)
	if err == nil {
		e.room.promise(v, to)
	}
	return to, err
}

// print prints the plan.
func (e *evacuation) print(all []*leaving, o *overview.Overview, cordoned bool) error {
	var rows [][]string
	for _, l := range all {
		to, remark := l.to.flag(), ""
		switch m := l.v.Spec.Move; {
		case l.why != nil:
			to, remark = "stays", l.why.Error()
		case m != nil && m.Left:
			remark = "it has moved; its old bytes are to be given back"
		case l.user() != "" && l.v.Spec.ReplicaOf != "":
			remark = "used on " + l.user() + "; another replica takes its place"
		case l.user() != "":
			remark = "used on " + l.user() + "; it moves meanwhile, or when it is released"
		case m != nil:
			remark = "under way"
		}
		rows = append(rows, []string{l.title, cli.Size(l.v.Spec.Size), to, remark})
	}
	if len(rows) == 0 {
		if _, err := fmt.Fprintf(e.out, "No volume is on node %s.\n", e.node); err != nil {
			return err
		}
	} else if err := cli.Table(e.table, []string{"VOLUME", "SIZE", "TO", "REMARKS"}, rows); err != nil {
		return err
	}
	snapshots := 0
	for _, s := range o.Snapshots {
		if s.Node == e.node {
			snapshots++
		}
	}
	if snapshots > 0 && !e.with {
		if _, err := fmt.Fprintf(e.out, "Snapshots on node %s, which stay there without --with-snapshots: %d\n", e.node, snapshots); err != nil {
			return err
		}
	}
	if !cordoned {
		_, err := fmt.Fprintf(e.out, "Node %s is not cordoned, so new volumes may be made there: kubectl cordon %s\n", e.node, e.node)
		return err
	}
	return nil
}

// carryOut moves the volumes that can move. It returns when all moves have ended, but for those of used volumes that show no change.
func (e *evacuation) carryOut(ctx context.Context, all []*leaving) error {
	for {
		busy, err := e.step(ctx, all)
		if err == nil && busy {
			select {
			case <-ctx.Done():
			case <-time.After(lookAgain):
				continue
			}
		}
		if ctx.Err() != nil {
			err = errors.New("interrupted")
		} else if !errors.Is(err, errUnknown) {
			return err
		}
		return fmt.Errorf("%w; moves that were asked for go on, and no others begin; run it again to go on (kubectl ashlar evacuate %s)", err, e.node)
	}
}

// step looks at each move, and begins moves: those of used volumes all at once, others up to parallel at a time. busy: it has to be called again.
func (e *evacuation) step(ctx context.Context, all []*leaving) (busy bool, err error) {
	under := 0
	for _, l := range all {
		if l.begun && !l.ended {
			if err := e.lookAt(ctx, l); err != nil {
				return false, err
			}
			under += l.takes()
		}
	}
	for _, l := range all {
		if l.waits() && (l.user() != "" || l.v.Spec.Move != nil || under < e.parallel) {
			if err := e.begin(ctx, l); err != nil {
				return false, err
			}
			under += l.takes()
		}
		busy = busy || l.waits() || l.begun && !l.ended && !l.rests
	}
	return busy, nil
}

// waits reports whether the move of a volume is still to be asked for.
func (l *leaving) waits() bool { return !l.begun && !l.ended && l.why == nil }

// takes returns how many of the parallel moves a volume counts for: 1 while it moves, 0 if it is used.
func (l *leaving) takes() int {
	if l.begun && !l.ended && l.user() == "" {
		return 1
	}
	return 0
}

// errUnknown is the error of a move that may go on, while its state cannot be read.
var errUnknown = errors.New("it is not known how far its move is")

// silent handles a volume for which the API server has not answered. If another request is answered, only this volume is given up; it is an error if that one
// is not, or if the same happened to the volume before.
func (e *evacuation) silent(ctx context.Context, l *leaving, err error) error {
	err = fmt.Errorf("%w: %w", errUnknown, err)
	if e.unheard || e.List(ctx, &v1alpha1.VolumeList{}, client.Limit(1)) != nil {
		return fmt.Errorf("%s: %w", l.title, err)
	}
	e.unheard, e.back = true, time.Now() // the moves were not looked at meanwhile
	l.ended, l.why = true, err
	_, err = fmt.Fprintf(e.out, "%s: %v; other requests are answered\n", l.title, err)
	return err
}

// begin asks for the move of a volume. If it is refused, the volume stays, and the others go on; it is an error if the API server does not answer (silent).
func (e *evacuation) begin(ctx context.Context, l *leaving) error {
	err := e.ask(ctx, l.v, l.to, func() error {
		v := l.v
		if v.Spec.NodeName != e.node || v.Spec.Move != nil {
			return errors.New("somebody else moves it; run this again")
		}
		return e.room.leaves(v)
	})
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if errors.Is(err, errSilent) {
		return e.silent(ctx, l, err)
	}
	e.unheard = false
	l.begun, l.changed, l.why = true, time.Now(), err
	switch {
	case errors.Is(err, errDeleted):
		l.ended, l.why = true, nil
		_, err = fmt.Fprintf(e.out, "%s: %v\n", l.title, err)
		return err
	case err != nil:
		l.ended = true
		_, err = fmt.Fprintf(e.out, "%s: stays: %v\n", l.title, err)
		return err
	}
	return l.tell(e.out)
}

// lookAt reads how far the move of a volume is, and prints what has changed.
func (e *evacuation) lookAt(ctx context.Context, l *leaving) error {
	err := e.again(ctx, &l.followed)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if errors.Is(err, errSilent) {
		return e.silent(ctx, l, err)
	}
	if err != nil && !errors.Is(err, errDeleted) {
		return fmt.Errorf("%s: %w: %w", l.title, errUnknown, err)
	}
	e.unheard = false
	var text string
	if err == nil {
		_, text, l.ended, err = l.stage()
	}
	if text != l.last {
		l.last, l.changed, l.rests = text, time.Now(), false
	}
	still := err == nil && !l.ended && time.Since(l.changed) > standstill && time.Since(e.back) > standstill // while the API server was silent, moves could not go on
	if still && l.user() == "" {
		err = fmt.Errorf("its move does not go on (nothing has changed for %s), and may later: %s", standstill, text)
	}
	switch {
	case still && err == nil:
		l.rests = true // staying prints it
		return nil
	case errors.Is(err, errDeleted):
		l.ended, text = true, err.Error()
	case err != nil:
		l.ended, l.why = true, err
		text = "stays: " + err.Error()
	case !l.ended:
		return l.tell(e.out)
	}
	_, err = fmt.Fprintf(e.out, "%s: %s\n", l.title, text)
	return err
}

// staying returns an error if volumes stay on the node, or are still used.
func (e *evacuation) staying(all []*leaving) error {
	stay, used := 0, 0
	var whose []string
	for _, l := range all {
		switch {
		case l.why != nil:
			stay++
		case !l.ended && l.user() != "":
			used++
			whose = append(whose, l.title+" on "+l.user())
		}
	}
	var parts []string
	if stay > 0 {
		parts = append(parts, fmt.Sprintf("%d of %d volumes stay on node %s, see above", stay, len(all), e.node))
	}
	if used > 0 && !e.dryRun {
		parts = append(parts, fmt.Sprintf("%d of %d are still used, and move meanwhile, or when they are released: %s", used, len(all), strings.Join(whose, "; ")))
	}
	if len(parts) == 0 {
		return nil
	}
	return errors.New(strings.Join(parts, "; "))
}
