package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/cli"
	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
)

// moving is the command move: the move of one volume, or of one snapshot.
type moving struct {
	*cluster
	out       io.Writer
	to        string // the flag --to
	from      string // the node of the leg to move; empty: the volume has one, or the name selects a leg
	wait      bool
	cancel    bool
	snapshots bool // move the snapshots of the volume, too
}

func moveCommand(flags *genericclioptions.ConfigFlags) *cobra.Command {
	var m moving
	cmd := &cobra.Command{
		Use:   "move VOLUME --to NODE[/POOL]",
		Short: "Move a volume with access=any to another node",
		Long: `kubectl ashlar move moves a volume to another node of its network. The bytes are copied, also while
the volume is used. Then the volume is on that node, and the old node gives its space back. The
volume keeps its ID.

--to NODE means the pool of the same name on that node, --to NODE/POOL another one. The snapshots of
the volume stay where they are. With --with-snapshots they move as well, each to the pool of its own
name on that node. A snapshot is moved alone by its ID (snap.POOL.KEY).

Of a volume with replicas one replica moves: the one on the node that --from names. While the volume
is used, it gets another replica on the new node instead, and drops the old one once the new one has
everything.

The command refuses what cannot be done, shows how far the move is, and waits until it has ended. The
move goes on without the command: the same command waits for it again. --cancel takes the move back,
as long as the volume has not moved.

` + cli.VolumeHelp,
		Args: func(_ *cobra.Command, args []string) error {
			switch {
			case len(args) != 1:
				return errors.New("give one volume: " + cli.VolumeNames)
			case m.cancel == (m.to != ""):
				return errors.New("give --to NODE or --cancel, and not both")
			}
			return nil
		},
		ValidArgsFunction: completeOf(flags, volumesOf),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			if m.cluster, err = connect(flags); err != nil {
				return err
			}
			m.out = cli.Plain(cmd.OutOrStdout()) // which writes whole lines
			return m.run(cmd.Context(), args[0])
		},
	}
	f := cmd.Flags()
	f.StringVar(&m.to, "to", "", "where it is moved to: NODE, to the pool of the same name there, or NODE/POOL")
	f.StringVar(&m.from, "from", "", "of a volume with replicas: the NODE whose replica is moved")
	f.BoolVar(&m.wait, "wait", true, "wait until the move has ended")
	f.BoolVar(&m.cancel, "cancel", false, "take the move back, if the volume has not moved yet")
	f.BoolVar(&m.snapshots, "with-snapshots", false, "move its snapshots to that node as well, each to the pool of its own name")
	_ = cmd.RegisterFlagCompletionFunc("to", completeOf(flags, placesOf)) // cannot fail: the flags exist
	_ = cmd.RegisterFlagCompletionFunc("from", completeOf(flags, nodesOf))
	return cmd
}

// volumesOf returns all names that volumes can be given by.
func volumesOf(o *overview.Overview) (names []string) {
	for i := range o.Volumes {
		names = append(names, cli.NamesOf(&o.Volumes[i])...)
	}
	return names
}

// nodesOf returns the names of the nodes that have pools.
func nodesOf(o *overview.Overview) (names []string) {
	for _, n := range o.Nodes {
		names = append(names, n.Name)
	}
	return names
}

// placesOf returns the places that --to can name: nodes that have pools, and the pools.
func placesOf(o *overview.Overview) (names []string) {
	for _, n := range o.Nodes {
		names = append(names, n.Name)
		for _, p := range n.Pools {
			names = append(names, place{n.Name, p.Name}.flag())
		}
	}
	return names
}

// place is where a volume or snapshot is to move to.
type place struct {
	node string
	pool string // of that node; empty: the pool of the same name as now
}

// placeOf reads a place as it is given on the command line: NODE, or NODE/POOL.
func placeOf(text string) (place, error) {
	node, pool, named := strings.Cut(text, "/")
	if node == "" || named && pool == "" || strings.Contains(pool, "/") {
		return place{}, fmt.Errorf("--to %s: give NODE, or NODE/POOL", text)
	}
	return place{node, pool}, nil
}

// flag returns the place as it is given on the command line.
func (p place) flag() string {
	if p.pool == "" {
		return p.node
	}
	return p.node + "/" + p.pool
}

func (p place) String() string {
	if p.pool == "" {
		return "node " + p.node
	}
	return "pool " + p.pool + " of node " + p.node
}

// is says that a volume or snapshot is there.
func (p place) is() string {
	if p.pool == "" {
		return "it is on " + p.String()
	}
	return "it is in " + p.String()
}

// of returns the pool that a volume or snapshot would come to.
func (p place) of(o mobile) string { return cmp.Or(p.pool, o.In()) }

// has reports whether a volume or snapshot is there.
func (p place) has(o mobile) bool { return o.Node() == p.node && o.In() == p.of(o) }

// goal returns where a volume or snapshot is to move to. It has to be asked to.
func goal(o mobile) place {
	m, _ := o.Moves()
	return place{m.Node, m.Pool}
}

// completeOf completes with names in an overview; with nothing if there is no overview.
func completeOf(flags *genericclioptions.ConfigFlags, of func(*overview.Overview) []string) cobra.CompletionFunc {
	return func(cmd *cobra.Command, _ []string, begun string) (names []cobra.Completion, _ cobra.ShellCompDirective) {
		c, err := connect(flags)
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		o, err := c.Overview(cmd.Context())
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		for _, name := range of(o) {
			if name = cli.Line(name); strings.HasPrefix(name, begun) {
				names = append(names, name)
			}
		}
		return names, cobra.ShellCompDirectiveNoFileComp
	}
}

func (m *moving) run(ctx context.Context, name string) error {
	o, err := m.Overview(ctx)
	if err != nil {
		return err
	}
	if strings.HasPrefix(name, "snap.") {
		return m.runSnapshot(ctx, o, name)
	}
	seen, v, err := m.findMoved(ctx, o, name, m.from)
	if err != nil {
		return err
	}
	title := following(v, seen, place{}).title
	if m.cancel {
		if m.snapshots && v.Spec.Move == nil {
			return m.cancelSnapshotsOf(ctx, v)
		}
		if err := m.cancelMove(ctx, v, title); err != nil || !m.snapshots {
			return err
		}
		return m.cancelSnapshotsOf(ctx, v)
	}
	to, err := placeOf(m.to)
	if err != nil {
		return err
	}
	if m.snapshots && to.has(v) && v.Spec.Move == nil { // it has moved, or has always been there
		return m.moveSnapshotsOf(ctx, o, v, to)
	}
	r, err := m.look(ctx, o)
	if err != nil {
		return err
	}
	err = m.ask(ctx, v, to, func() error { return r.may(v, to) })
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("%s: interrupted; it may be asked to move to %s already: the same command waits for it, and kubectl ashlar move %s --cancel takes it back", title, to, called(v))
	case errors.Is(err, errSilent):
		return fmt.Errorf("%s: it is not known whether it is asked to move to %s: %w; if it is, the move goes on: the same command waits for it", title, to, err)
	case err != nil:
		return fmt.Errorf("move %s to %s: %w", title, to, err)
	}
	err = m.follow(ctx, following(v, seen, to))
	if err != nil || !m.snapshots {
		return err
	}
	return m.moveSnapshotsOf(ctx, o, v, to)
}

// may returns why a volume cannot be asked to move to a place. The caller has excluded that it is asked to already.
func (r *room) may(v *v1alpha1.Volume, to place) error {
	m := v.Spec.Move
	if to.has(v) && m == nil {
		return errors.New(to.is())
	}
	if err := r.leaves(v); err != nil {
		return err
	}
	if m != nil {
		return fmt.Errorf("it is being moved to %s; to take that back: kubectl ashlar move %s --cancel", goal(v), called(v))
	}
	return r.takes(v, to)
}

// mobile is a volume or a snapshot.
type mobile interface {
	client.Object
	Node() string
	In() string
	Moves() (*v1alpha1.Move, *v1alpha1.MoveStatus)
	SetMove(*v1alpha1.Move)
	Common() *v1alpha1.ObjectStatus
	May() *v1alpha1.Intent
	Deleting() bool
	Keeps() int64
}

// asked reports whether a volume or snapshot is asked to move to a place, or has moved there and the move has not ended.
func asked(o mobile, to place) bool {
	m, _ := o.Moves()
	return m != nil && !v1alpha1.Going(o) && (!m.Left && m.Node == to.node && (to.pool == "" || to.pool == goal(o).of(o)) || m.Left && to.has(o))
}

// tries is how often a write is tried if others change the object meanwhile.
const tries = 10

// ask writes into an object where it is to move to, unless it is asked to already. may returns why it cannot be asked, and is called for each version of the
// object.
func (c *cluster) ask(ctx context.Context, o mobile, to place, may func() error) error {
	tried := false
	return c.change(ctx, o, func() (bool, error) {
		m, _ := o.Moves()
		if tried && to.has(o) && m == nil {
			return false, nil // an earlier try was done, and it has moved by now
		}
		tried = true
		if asked(o, to) {
			follows := m.Follows
			m.Follows = false // asked for by a person: the driver does not take it back any more
			return follows, nil
		}
		if err := may(); err != nil {
			return false, err
		}
		move := &v1alpha1.Move{Node: to.node}
		if to.of(o) != o.In() {
			move.Pool = to.pool
		}
		o.SetMove(move)
		return true, nil
	})
}

// errDeleted is the error of a move whose volume or snapshot was deleted meanwhile.
var errDeleted = errors.New("it was deleted meanwhile")

// change is revise for a volume or snapshot. It is also an error if the CRDs of the cluster do not know the move that was written. A write that was done and
// not answered looks to edit like a change by somebody else.
func (c *cluster) change(ctx context.Context, o mobile, edit func() (changed bool, err error)) error {
	moves := func() *v1alpha1.Move { m, _ := o.Moves(); return m.DeepCopy() }
	return c.revise(ctx, o, edit, func(change client.Patch) error {
		want := moves()
		if want != nil && want.Pool != "" { // older CRDs drop unknown fields: it would move to a pool of the old name
			kept := o.DeepCopyObject().(mobile)
			if err := c.patiently(ctx, func() error { return c.Patch(ctx, kept, change, client.DryRunAll) }); err != nil {
				return err
			}
			if m, _ := kept.Moves(); m != nil && m.Pool == "" {
				return errors.New("the definitions of ashlar.dev in this cluster know no moves to pools of other names: apply those of this version (deploy/kubernetes/crds)")
			}
		}
		err := c.patiently(ctx, func() error { return c.Patch(ctx, o, change) })
		if err == nil && want != nil && moves() == nil {
			err = errors.New("the definitions of ashlar.dev in this cluster know no moves: apply those of this version (deploy/kubernetes/crds)")
		}
		return err
	})
}

// revise writes an edit of an object, on the condition that nobody else has changed the object since it was read; if so, it reads the object again, and
// repeats. edit returns false if there is nothing to write. write writes the change; nil: as it is. errDeleted if the object was deleted meanwhile.
func (c *cluster) revise(ctx context.Context, o client.Object, edit func() (changed bool, err error), write func(change client.Patch) error) error {
	if write == nil {
		write = func(change client.Patch) error {
			return c.patiently(ctx, func() error { return c.Patch(ctx, o, change) })
		}
	}
	for try := 1; ; try++ {
		before := o.DeepCopyObject().(client.Object)
		changed, err := edit()
		if err != nil || !changed {
			return err
		}
		err = write(client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
		if apierrors.IsNotFound(err) {
			return errDeleted
		}
		if !apierrors.IsConflict(err) || try == tries {
			return refusal(err)
		}
		err = c.patiently(ctx, func() error { return c.Get(ctx, client.ObjectKeyFromObject(before), o) })
		if apierrors.IsNotFound(err) || err == nil && o.GetUID() != before.GetUID() {
			return errDeleted
		}
		if err != nil {
			return err
		}
	}
}

// refusal returns an error of the API server as the messages of the validation rules that have refused the object.
func refusal(err error) error {
	var status apierrors.APIStatus
	if !apierrors.IsInvalid(err) || !errors.As(err, &status) || status.Status().Details == nil {
		return err
	}
	var words []string
	for _, cause := range status.Status().Details.Causes {
		words = append(words, strings.TrimPrefix(strings.TrimPrefix(cause.Message, "Invalid value: "), `"object": `))
	}
	if len(words) == 0 {
		return err
	}
	return fmt.Errorf("the API server refuses that: %s", strings.Join(words, "; "))
}

// cancelMove takes back a move that is not done yet.
func (m *moving) cancelMove(ctx context.Context, o mobile, title string) error {
	home, tried := o.Node(), false
	err := m.change(ctx, o, func() (bool, error) {
		switch w, _ := o.Moves(); {
		case w == nil && tried && o.Node() == home:
			return false, nil // an earlier try was done, and not answered
		case w == nil:
			return false, fmt.Errorf("it does not move; it is on node %s", o.Node())
		case w.Left:
			return false, fmt.Errorf("it has moved already, from node %s to node %s; to have it back, move it there when this move has ended", w.Node, o.Node())
		}
		o.SetMove(nil)
		tried = true
		return true, nil
	})
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("%s: interrupted; its move may be taken back already: the same command takes it back if not", title)
	case errors.Is(err, errSilent):
		return fmt.Errorf("%s: it is not known whether its move is taken back: %w; the same command takes it back if not", title, err)
	case err != nil:
		return fmt.Errorf("take back the move of %s: %w", title, err)
	}
	_, err = fmt.Fprintf(m.out, "%s: it stays on node %s.\n", title, o.Node())
	return err
}

// followed is the move of a volume that is waited for.
type followed struct {
	v     *v1alpha1.Volume
	title string
	to    place
	pods  string // the pods that used the volume when it was first read, by its claim then
	claim *v1alpha1.Claim
	told  string

	legs     string // of a leg that is replaced: how far the other leg is
	replaced bool   // the other leg has taken the place of this one
}

func following(v *v1alpha1.Volume, seen *overview.Volume, to place) *followed {
	f := &followed{v: v, title: cli.Title(seen), to: to, claim: v.Spec.Claim.DeepCopy()}
	if v.Spec.ReplicaOf != "" {
		f.title += ", replica on " + v.Spec.NodeName
	}
	var pods []string
	for _, pod := range seen.Pods {
		pods = append(pods, pod.Namespace+"/"+pod.Name)
	}
	f.pods = strings.Join(pods, ", ")
	return f
}

// user returns the node that uses the volume, and its pods if they are known; empty if none does.
func (f *followed) user() string {
	switch c := f.v.Spec.Claim; {
	case !f.v.IsUsed():
		return ""
	case c == nil && len(f.v.Claimants()) > 0:
		return "node " + strings.Join(f.v.Claimants(), ", ")
	case c == nil:
		return "node " + f.v.Given()[0].Node
	case f.pods != "" && f.claim != nil && *f.claim == *c:
		return "node " + c.Node + " by " + f.pods
	default:
		return "node " + c.Node
	}
}

// carried reports whether status.move is by the node that uses the volume, for its present claim.
func (f *followed) carried() bool {
	c, s := f.v.Spec.Claim, f.v.Status.Move
	return c != nil && s != nil && s.Node == f.to.node && s.Claim == c.Generation && s.Claim > 0
}

// stage is stageOf for this move.
func (f *followed) stage() (kind, text string, done bool, err error) {
	if f.isReplaced() {
		return f.stageOfLegs()
	}
	user := f.user()
	if f.carried() {
		user = ""
	}
	return stageOf(f.v, f.to, user)
}

// stageOf returns how far a move to a place is, in words, and whether it has ended; an error if it will not be done. kind stays the same while only figures
// change. user is the node that keeps the move from going on; empty: none does.
func stageOf(o mobile, to place, user string) (kind, text string, done bool, err error) {
	m, s := o.Moves()
	heard := s != nil && (m != nil && m.Left || s.Node == to.node)
	switch {
	case m == nil && to.has(o):
		return "", to.is(), true, nil
	case v1alpha1.Going(o):
		return "", "", false, errors.New("it is being deleted")
	case m == nil:
		return "", "", false, fmt.Errorf("the move to %s was taken back: it stays on node %s", to, o.Node())
	case !asked(o, to):
		return "", "", false, fmt.Errorf("somebody else has it moved to %s", goal(o))
	case m.Left && (!heard || !s.Arrived):
		text = fmt.Sprintf("node %s takes it over", to.node)
	case m.Left:
		text = fmt.Sprintf("%s; node %s gives its bytes back", to.is(), m.Node)
		if s.Waits {
			text = s.Message
		}
	case user != "":
		text = fmt.Sprintf("used on %s; its bytes are copied meanwhile, or when it is released", user)
	case !heard:
		text = fmt.Sprintf("node %s is asked to copy it from node %s", to.node, o.Node())
	case s.Waits:
		text = "waits: " + s.Message
	case s.Progress != nil && s.Progress.Total > 0:
		text = fmt.Sprintf("%d %%, %s", 100*s.Progress.Done/s.Progress.Total, s.Message)
		return fmt.Sprint("copying ", 10*s.Progress.Done/s.Progress.Total), text, false, nil
	default:
		text = cmp.Or(s.Message, fmt.Sprintf("node %s copies it from node %s", to.node, o.Node()))
	}
	return text, text, false, nil
}

// tell prints how far a move is, unless it is as far as when that was last printed. It prints nothing if the move has ended or failed.
func (f *followed) tell(out io.Writer) (err error) {
	if kind, text, done, failed := f.stage(); failed == nil && !done && kind != f.told {
		f.told = kind
		_, err = fmt.Fprintf(out, "%s: %s\n", f.title, text)
	}
	return err
}

// again reads the volume of a move again. errDeleted if it was deleted, unless it is a leg, and another one has taken its place.
func (c *cluster) again(ctx context.Context, f *followed) error {
	now := &v1alpha1.Volume{}
	err := c.patiently(ctx, func() error { return c.Get(ctx, client.ObjectKeyFromObject(f.v), now) })
	if apierrors.IsNotFound(err) || err == nil && now.UID != f.v.UID {
		if !f.isReplaced() {
			return errDeleted
		}
		f.replaced, err = c.goesOn(ctx, f.v.Spec.ReplicaOf)
		if err == nil && !f.replaced {
			err = errDeleted
		}
		return err
	}
	if err == nil {
		f.v = now
		c.lookAtLegs(ctx, f)
	}
	return err
}

// follow prints how far a move is. With m.wait it waits until the move has ended.
func (m *moving) follow(ctx context.Context, f *followed) error {
	known := true // ask has just read and written the volume
	return follow(ctx, m.out, f.title, m.wait, fmt.Sprintf("the move to %s goes on: the same command waits for it again, and kubectl ashlar move %s --cancel takes it back as long as the volume has not moved", f.to, called(f.v)),
		func() (kind, text string, done bool, err error) {
			if !known {
				err = m.again(ctx, f)
			}
			known = false
			switch {
			case errors.Is(err, errDeleted):
				return "", "", false, err
			case err != nil:
				return "", "", false, fmt.Errorf("it is not known how far its move to %s is, which goes on: %w; the same command waits for it again", f.to, err)
			}
			return f.stage()
		})
}

// follow prints the text of look whenever its kind has changed. With wait it returns when look is done or fails; without, after the first look. look returns
// what stageOf does. meanwhile says what goes on if this is interrupted.
func follow(ctx context.Context, out io.Writer, title string, wait bool, meanwhile string, look func() (kind, text string, done bool, err error)) error {
	for told := ""; ; {
		kind, text, done, err := look()
		switch {
		case ctx.Err() != nil:
			return fmt.Errorf("%s: interrupted; %s", title, meanwhile)
		case err != nil:
			return fmt.Errorf("%s: %w", title, err)
		case done:
			_, err := fmt.Fprintf(out, "%s: %s.\n", title, text)
			return err
		case kind != told:
			told = kind
			if _, err := fmt.Fprintf(out, "%s: %s\n", title, text); err != nil {
				return err
			}
		}
		if !wait {
			return nil
		}
		select {
		case <-ctx.Done():
		case <-time.After(lookAgain):
		}
	}
}
