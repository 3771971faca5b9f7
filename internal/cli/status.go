package cli

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ashlar-csi/ashlar/internal/overview"
)

func (c *commands) status() *cobra.Command {
	var s showing
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show what is wrong, and in short what there is",
		Long: `status shows everything that is wrong, the worst first, each with what to do and where to read on. Then it
says in a few lines what there is.

It ends with status 0 if nothing is wrong, with 2 if something is, and with 1 if it could not find out.
That is also so if no problem is known, but you may not list nodes and leases.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return s.run(cmd, func(ctx context.Context, to *screen) (any, error) {
				o, err := c.take(ctx, to.exact)
				if err != nil {
					return nil, err
				}
				printStatus(to, o)
				switch {
				case len(o.Problems) > 0:
					return o, &ProblemsError{len(o.Problems)}
				case o.Blind:
					return o, errBlind
				}
				return o, nil
			})
		},
	}
	s.add(cmd, true)
	return cmd
}

// errBlind is the error of "status" if no problem is known, but the state of nodes or agents could not be read.
var errBlind = errors.New("it is not known whether the nodes are there and their agents are heard; ask with the right to list nodes and leases")

// take returns the overview of the program's source. Without exact, its texts are made plain (Line).
func (c *commands) take(ctx context.Context, exact bool) (*overview.Overview, error) {
	source, err := c.source()
	if err != nil {
		return nil, err
	}
	o, err := source.Overview(ctx)
	if err == nil && !exact {
		plainly(o)
	}
	return o, err
}

func printStatus(to *screen, o *overview.Overview) {
	names := namesOf(o)
	for _, group := range grouped(o, names) {
		what := strings.TrimSpace(wrapped(group.what, strings.Repeat(" ", len("Inaccessible  ")), to.width))
		to.print("%s  %s\n", to.paint(colourOf(group.Severity), fmt.Sprintf("%-12s", group.Severity)), to.paint(bold, what))
		to.print("%s", wrapped(group.Reason+": "+group.Message, "    ", to.width))
		if len(group.names) > 1 {
			to.print("%s", wrapped(some(group.names), "    ", to.width))
		}
		to.print("    See %s\n\n", group.Runbook)
	}
	switch {
	case len(o.Problems) > 0:
	case o.Blind:
		to.print("%s\n\n", to.paint(yellow, "Nothing is known to be wrong."))
	default:
		to.print("%s\n\n", to.paint(green, "Nothing is wrong."))
	}
	printMissing(to, o.Missing)
	printSummary(to, o)
}

// printMissing prints what is left out.
func printMissing(to *screen, missing []string) {
	for _, one := range missing {
		to.print("%s", wrapped(leftOut(one), "", to.width))
	}
	if len(missing) > 0 {
		to.print("\n")
	}
}

func leftOut(one string) string { return "Left out: " + one + "." }

// sayMissing prints what is left out of a list for programs on stderr, as the list has no place for it.
func sayMissing(cmd *cobra.Command, to *screen, missing []string) {
	if !to.exact {
		return // printMissing has printed it
	}
	for _, one := range missing {
		cmd.PrintErrln(Line(leftOut(one)))
	}
}

func printSummary(to *screen, o *overview.Overview) {
	var pools []overview.Pool
	var sum overview.Pool
	ready := 0
	for _, n := range o.Nodes {
		pools = append(pools, n.Pools...)
		if n.Ready {
			ready++
		}
	}
	for _, p := range pools {
		sum.Total, sum.Available = sum.Total+p.Total, sum.Available+p.Available
	}
	switch {
	case !o.Cluster:
	case o.Blind:
		to.print("Nodes      %d; it is not known which of them answer\n", len(o.Nodes))
	default:
		to.print("Nodes      %d of %d answer\n", ready, len(o.Nodes))
	}
	to.print("Pools      %d, %s; %s of them can still be promised\n", len(pools), Size(sum.Total), Size(sum.Available))
	to.print("Volumes    %s\n", states(o.Volumes, func(v overview.Volume) overview.State { return v.State }))
	to.print("Snapshots  %s\n", states(o.Snapshots, func(s overview.Snapshot) overview.State { return s.State }))
	to.print("Driver     %s", o.Driver)
	if !o.Cluster {
		to.print(" %s", o.Version)
	}
	to.print("\n")
}

// states returns, as text, how many things there are, and how many of them in which state but Ready.
func states[T any](all []T, state func(T) overview.State) string {
	counts := map[overview.State]int{}
	for _, one := range all {
		counts[state(one)]++
	}
	var others []string
	for _, s := range []overview.State{overview.Lost, overview.Failed, overview.Making, overview.Deleting} {
		if counts[s] > 0 {
			others = append(others, fmt.Sprintf("%d %s", counts[s], strings.ToLower(string(s))))
		}
	}
	if len(others) == 0 {
		return fmt.Sprint(len(all))
	}
	return fmt.Sprintf("%d: %s", len(all), strings.Join(others, ", "))
}

// group is one problem of one or more subjects.
type group struct {
	overview.Problem
	what  string   // the subjects, as text
	names []string // of all subjects
}

// alike is what the problems of one group have in common. A disk that fails makes all its volumes fail.
type alike struct {
	severity           overview.Severity
	reason, kind, pool string
}

// grouped returns the problems in groups: those of the volumes, or of the snapshots, of one pool with one reason are one group.
func grouped(o *overview.Overview, names map[overview.Subject]name) []*group {
	var groups []*group
	index := map[alike]*group{}
	for _, p := range o.Problems {
		n := names[p.Subject]
		key := alike{p.Severity, p.Reason, p.Subject.Kind, n.pool}
		if g := index[key]; g != nil && n.pool != "" {
			g.names = append(g.names, n.text)
			g.what = fmt.Sprintf("%d %ss in pool %s", len(g.names), strings.ToLower(p.Subject.Kind), n.pool)
			continue
		}
		g := &group{Problem: p, what: p.Subject.Kind + " " + n.text, names: []string{n.text}}
		if n.pool != "" {
			g.what += " in pool " + n.pool
		}
		index[key] = g
		groups = append(groups, g)
	}
	return groups
}

// most is how many of many names are shown.
const most = 5

// some returns names as text, no more than most of them.
func some(names []string) string {
	if len(names) <= most {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
}

// name is the name of a subject, as it is shown.
type name struct {
	text string
	pool string // NODE.POOL; only of volumes and snapshots in one pool
}

// namesOf returns the names of the subjects of problems, as people know them: of a volume that is its claim, if that is known.
func namesOf(o *overview.Overview) map[overview.Subject]name {
	names := map[overview.Subject]name{}
	for _, p := range o.Problems {
		names[p.Subject] = name{text: p.Subject.Name}
	}
	for i := range o.Volumes {
		v := &o.Volumes[i]
		one := name{text: Title(v)}
		if v.Replicas == nil { // a volume with replicas is in several pools
			one.pool = overview.PoolName(v.Node, v.Pool)
		}
		names[overview.Subject{Kind: overview.KindVolume, Name: v.ID}] = one
	}
	for i := range o.Snapshots {
		s := &o.Snapshots[i]
		names[overview.Subject{Kind: overview.KindSnapshot, Name: s.ID}] = name{s.Name, overview.PoolName(s.Node, s.Pool)}
	}
	return names
}

// Title returns what people know a volume by: its claim, as NAMESPACE/NAME, or its name.
func Title(v *overview.Volume) string {
	if v.Claim != nil {
		return v.Claim.Namespace + "/" + v.Claim.Name
	}
	return v.Name
}
