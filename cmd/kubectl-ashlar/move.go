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

// moving is the move of one volume.
type moving struct {
	*cluster
	out    io.Writer
	to     string // a place
	wait   bool
	cancel bool
}

func moveCommand(flags *genericclioptions.ConfigFlags) *cobra.Command {
	var m moving
	cmd := &cobra.Command{
		Use:   "move VOLUME --to NODE[/POOL]",
		Short: "Move a volume with access=any to another node, its bytes and all",
		Long: `kubectl ashlar move has a volume moved to a pool of another node of its network, of the same name or as --to says: its bytes are
copied, also while it is used, then it is on that node, and the old one gives its bytes back. It keeps its ID, whatever pool that names. VOLUME is its ID (vol.POOL.KEY),
the KEY alone, the name of its PersistentVolume, or NAMESPACE/CLAIM.

It refuses what cannot be done, waits until the move has ended, and says how far it is. The move goes on without this command, too: the same command waits for it again, and --cancel takes it back, as long as the
volume has not moved.`,
		Args: func(_ *cobra.Command, args []string) error {
			switch {
			case len(args) != 1:
				return errors.New("give one volume: its ID, the name of its PersistentVolume, or NAMESPACE/CLAIM")
			case m.cancel == (m.to != ""):
				return errors.New("give --to NODE or --cancel, and not both")
			}
			return nil
		},
		ValidArgsFunction: completeOf(flags, func(o *overview.Overview) (names []string) {
			for i := range o.Volumes {
				names = append(names, cli.NamesOf(&o.Volumes[i])...)
			}
			return names
		}),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			if m.cluster, err = connect(flags); err != nil {
				return err
			}
			m.out = cli.Plain(cmd.OutOrStdout()) // each line has its end
			return m.run(cmd.Context(), args[0])
		},
	}
	f := cmd.Flags()
	f.StringVar(&m.to, "to", "", "where it is moved to: NODE, to the pool of the same name there, or NODE/POOL")
	f.BoolVar(&m.wait, "wait", true, "wait until the move has ended")
	f.BoolVar(&m.cancel, "cancel", false, "take the move back, if the volume has not moved yet")
	_ = cmd.RegisterFlagCompletionFunc("to", completeOf(flags, placesOf)) // the flag is there
	return cmd
}

// nodesOf are the names of the nodes that have pools.
func nodesOf(o *overview.Overview) (names []string) {
	for _, n := range o.Nodes {
		names = append(names, n.Name)
	}
	return names
}

// placesOf are the nodes that have pools, and the pools.
func placesOf(o *overview.Overview) (names []string) {
	for _, n := range o.Nodes {
		names = append(names, n.Name)
		for _, p := range n.Pools {
			names = append(names, place{n.Name, p.Name}.flag())
		}
	}
	return names
}

// place is where a volume is to move to.
type place struct {
	node string
	pool string // of that node; empty: of the name of that which has the volume
}

// placeOf reads a place as people give it: NODE, or NODE/POOL.
func placeOf(text string) (place, error) {
	node, pool, named := strings.Cut(text, "/")
	if node == "" || named && pool == "" || strings.Contains(pool, "/") {
		return place{}, fmt.Errorf("--to %s: give NODE, or NODE/POOL", text)
	}
	return place{node, pool}, nil
}

// flag is it as people give it.
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

// is says that a volume is there.
func (p place) is() string {
	if p.pool == "" {
		return "it is on " + p.String()
	}
	return "it is in " + p.String()
}

// of is the pool that a volume would come to.
func (p place) of(v *v1alpha1.Volume) string { return cmp.Or(p.pool, v.Spec.Pool) }

// has reports whether a volume is there.
func (p place) has(v *v1alpha1.Volume) bool {
	return v.Spec.NodeName == p.node && v.Spec.Pool == p.of(v)
}

// goal is where a volume is to move to that is asked to.
func goal(v *v1alpha1.Volume) place { return place{v.Spec.Move.Node, v.Spec.Move.Pool} }

// completeOf completes with names of an overview; with nothing, where there is none.
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
	seen, err := cli.Find(o, name)
	if err != nil {
		return err
	}
	v := &v1alpha1.Volume{}
	if err := m.Get(ctx, client.ObjectKey{Name: seen.ID[strings.LastIndexByte(seen.ID, '.')+1:]}, v); err != nil {
		return fmt.Errorf("read volume %s: %w", seen.ID, err)
	}
	title := cli.Title(seen)
	if m.cancel {
		return m.takeBack(ctx, v, title)
	}
	to, err := placeOf(m.to)
	if err != nil {
		return err
	}
	r, err := m.look(ctx, o)
	if err != nil {
		return err
	}
	err = m.ask(ctx, v, to, func(v *v1alpha1.Volume) error { return r.may(v, to) })
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("%s: interrupted; it may be asked to move to %s already: the same command waits for it, and kubectl ashlar move %s --cancel takes it back", title, to, v.ID())
	case errors.Is(err, errSilent):
		return fmt.Errorf("%s: it is not known whether it is asked to move to %s: %w; if it is, the move goes on: the same command waits for it", title, to, err)
	case err != nil:
		return fmt.Errorf("move %s to %s: %w", title, to, err)
	}
	f := following(v, seen, to)
	if err := f.tell(m.out); err != nil || !m.wait {
		return err
	}
	return m.follow(ctx, f)
}

// may is why a volume may not be asked to move to a place, beside that it does so already.
func (r *room) may(v *v1alpha1.Volume, to place) error {
	m := v.Spec.Move
	if to.has(v) && m == nil {
		return errors.New(to.is())
	}
	if err := r.leaves(v); err != nil {
		return err
	}
	if m != nil {
		return fmt.Errorf("it is being moved to %s; to take that back: kubectl ashlar move %s --cancel", goal(v), v.ID())
	}
	return r.takes(v, to)
}

// asked reports whether a volume is asked to move to a place, or has just done so.
func asked(v *v1alpha1.Volume, to place) bool {
	m := v.Spec.Move
	return m != nil && !v1alpha1.Going(v) && (!m.Left && m.Node == to.node && (to.pool == "" || to.pool == v.MovePool()) || m.Left && to.has(v))
}

// tries is how often a write is tried again, as somebody else has changed the object.
const tries = 10

// ask writes down that a volume is to move to a place, if it may.
func (c *cluster) ask(ctx context.Context, v *v1alpha1.Volume, to place, may func(*v1alpha1.Volume) error) error {
	tried := false
	return c.change(ctx, v, func() (bool, error) {
		if tried && to.has(v) && v.Spec.Move == nil {
			return false, nil // it has moved by now
		}
		tried = true
		if asked(v, to) {
			follows := v.Spec.Move.Follows
			v.Spec.Move.Follows = false // from now on somebody wants it
			return follows, nil
		}
		if err := may(v); err != nil {
			return false, err
		}
		if v.Spec.Move = (&v1alpha1.Move{Node: to.node}); to.of(v) != v.Spec.Pool {
			v.Spec.Move.Pool = to.pool
		}
		return true, nil
	})
}

// errDeleted: the volume is not there any more.
var errDeleted = errors.New("it was deleted meanwhile")

// change writes an edit of a volume, which may find that there is nothing to do, on the condition that nobody else changed the object since it was read. What
// was written and not answered is what somebody else has changed.
func (c *cluster) change(ctx context.Context, v *v1alpha1.Volume, edit func() (changed bool, err error)) error {
	for try := 1; ; try++ {
		before := v.DeepCopy()
		changed, err := edit()
		if err != nil || !changed {
			return err
		}
		want, change := v.Spec.Move.DeepCopy(), client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})
		if want != nil && want.Pool != "" { // older definitions leave out what they do not know: it would move to another pool than this
			kept := v.DeepCopy()
			if err = c.patiently(ctx, func() error { return c.Patch(ctx, kept, change, client.DryRunAll) }); err == nil && kept.Spec.Move != nil && kept.Spec.Move.Pool == "" {
				return errors.New("the definitions of ashlar.dev in this cluster know no moves to pools of other names: apply those of this version (deploy/kubernetes/crds)")
			}
		}
		if err == nil {
			err = c.patiently(ctx, func() error { return c.Patch(ctx, v, change) })
		}
		switch {
		case err == nil && want != nil && v.Spec.Move == nil:
			return errors.New("the definitions of ashlar.dev in this cluster know no moves: apply those of this version (deploy/kubernetes/crds)")
		case !apierrors.IsConflict(err) || try == tries:
			return refusal(err)
		}
		if err := c.patiently(ctx, func() error { return c.Get(ctx, client.ObjectKeyFromObject(before), v) }); err != nil {
			return err
		}
		if v.UID != before.UID {
			return errDeleted
		}
	}
}

// refusal is an error of the API server in the words of the rules that refused what was written.
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

// takeBack takes a move back that has not been done yet.
func (m *moving) takeBack(ctx context.Context, v *v1alpha1.Volume, title string) error {
	home, tried := v.Spec.NodeName, false
	err := m.change(ctx, v, func() (bool, error) {
		switch w := v.Spec.Move; {
		case w == nil && tried && v.Spec.NodeName == home:
			return false, nil // it was done, and not answered
		case w == nil:
			return false, fmt.Errorf("it does not move; it is on node %s", v.Spec.NodeName)
		case w.Left:
			return false, fmt.Errorf("it has moved already, from node %s to node %s; to have it back, move it there when this move has ended", w.Node, v.Spec.NodeName)
		}
		v.Spec.Move, tried = nil, true
		return true, nil
	})
	if err != nil {
		return fmt.Errorf("take back the move of %s: %w", title, err)
	}
	_, err = fmt.Fprintf(m.out, "%s: it stays on node %s.\n", title, v.Spec.NodeName)
	return err
}

// followed is a move that is waited for.
type followed struct {
	v     *v1alpha1.Volume
	title string
	to    place
	pods  string // that use the volume, by its claim of when it was looked at first
	claim *v1alpha1.Claim
	told  string
}

func following(v *v1alpha1.Volume, seen *overview.Volume, to place) *followed {
	f := &followed{v: v, title: cli.Title(seen), to: to, claim: v.Spec.Claim.DeepCopy()}
	var pods []string
	for _, pod := range seen.Pods {
		pods = append(pods, pod.Namespace+"/"+pod.Name)
	}
	f.pods = strings.Join(pods, ", ")
	return f
}

// user is which node uses the volume, and which pods if that is known; empty: nobody does.
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

// carried reports whether the node that uses the volume says how far the move is.
func (f *followed) carried() bool {
	c, s := f.v.Spec.Claim, f.v.Status.Move
	return c != nil && s != nil && s.Node == f.to.node && s.Claim == c.Generation && s.Claim > 0
}

// stage is how far a move is, in words, and whether it has ended. kind stays the same while only figures change.
func (f *followed) stage() (kind, text string, done bool, err error) {
	m, s := f.v.Spec.Move, f.v.Status.Move
	heard := s != nil && (m != nil && m.Left || s.Node == f.to.node)
	switch {
	case m == nil && f.to.has(f.v):
		return "", f.to.is(), true, nil
	case v1alpha1.Going(f.v):
		return "", "", false, errors.New("it is being deleted")
	case m == nil:
		return "", "", false, fmt.Errorf("the move to %s was taken back: it stays on node %s", f.to, f.v.Spec.NodeName)
	case !asked(f.v, f.to):
		return "", "", false, fmt.Errorf("somebody else has it moved to %s", goal(f.v))
	case m.Left && (!heard || !s.Arrived):
		text = fmt.Sprintf("node %s takes it over", f.to.node)
	case m.Left:
		text = fmt.Sprintf("%s; node %s gives its bytes back", f.to.is(), m.Node)
		if s.Waits {
			text = s.Message
		}
	case f.user() != "" && !f.carried():
		text = fmt.Sprintf("used on %s; its bytes are copied meanwhile, or when it is released", f.user())
	case !heard:
		text = fmt.Sprintf("node %s is asked to copy it from node %s", f.to.node, f.v.Spec.NodeName)
	case s.Waits:
		text = "waits: " + s.Message
	case s.Progress != nil && s.Progress.Total > 0:
		text = fmt.Sprintf("%d %%, %s", 100*s.Progress.Done/s.Progress.Total, s.Message)
		return fmt.Sprint("copying ", 10*s.Progress.Done/s.Progress.Total), text, false, nil
	default:
		text = cmp.Or(s.Message, fmt.Sprintf("node %s copies it from node %s", f.to.node, f.v.Spec.NodeName))
	}
	return text, text, false, nil
}

// tell prints how far a move is, if that is another thing than it was. That it has ended, or failed, is not for tell to say.
func (f *followed) tell(out io.Writer) (err error) {
	if kind, text, done, failed := f.stage(); failed == nil && !done && kind != f.told {
		f.told = kind
		_, err = fmt.Fprintf(out, "%s: %s\n", f.title, text)
	}
	return err
}

// again reads the volume of a move.
func (c *cluster) again(ctx context.Context, f *followed) error {
	now := &v1alpha1.Volume{}
	err := c.patiently(ctx, func() error { return c.Get(ctx, client.ObjectKeyFromObject(f.v), now) })
	if apierrors.IsNotFound(err) || err == nil && now.UID != f.v.UID {
		return errDeleted
	}
	if err == nil {
		f.v = now
	}
	return err
}

// follow waits until a move has ended.
func (m *moving) follow(ctx context.Context, f *followed) error {
	for {
		_, text, done, err := f.stage()
		switch {
		case err != nil:
			return fmt.Errorf("%s: %w", f.title, err)
		case done:
			_, err := fmt.Fprintf(m.out, "%s: %s.\n", f.title, text)
			return err
		}
		if err := f.tell(m.out); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
		case <-time.After(lookAgain):
			err = m.again(ctx, f)
		}
		switch {
		case ctx.Err() != nil:
			return fmt.Errorf("%s: interrupted; the move to %s goes on: the same command waits for it again, and kubectl ashlar move %s --cancel takes it back as long as the volume has not moved", f.title, f.to, f.v.ID())
		case errors.Is(err, errDeleted):
			return fmt.Errorf("%s: %w", f.title, err)
		case err != nil:
			return fmt.Errorf("%s: it is not known how far its move to %s is, which goes on: %w; the same command waits for it again", f.title, f.to, err)
		}
	}
}
