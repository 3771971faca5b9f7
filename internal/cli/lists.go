package cli

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/ashlar-csi/ashlar/internal/overview"
)

func (c *commands) pools() *cobra.Command {
	var s showing
	cmd := &cobra.Command{
		Use:   "pools",
		Short: "List the pools, and how full they are",
		Long: `pools lists the pools of all nodes: how much each may promise to volumes and snapshots (TOTAL), how much of
that is taken, how much can still be promised (AVAILABLE), and what is wrong. -o wide adds the largest
volume that could be made, and the identity of each pool.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return s.run(cmd, func(ctx context.Context, to *screen) (any, error) {
				o, err := c.take(ctx, to.exact)
				if err != nil {
					return nil, err
				}
				all := poolsOf(o)
				printPools(to, o, all)
				sayMissing(cmd, to, o.Missing)
				return all, nil
			})
		},
	}
	s.add(cmd, true)
	return cmd
}

// poolsOf returns all pools, sorted by node and name.
func poolsOf(o *overview.Overview) []overview.Pool {
	all := []overview.Pool{}
	for _, n := range o.Nodes {
		all = append(all, n.Pools...)
	}
	return all
}

func printPools(to *screen, o *overview.Overview, all []overview.Pool) {
	wrong := map[string][]overview.Problem{}
	for _, n := range o.Nodes {
		wrong[n.Name] = n.Problems
	}
	t := table{columns: []column{{title: "NODE", least: 12}, {title: "POOL", least: 8}, {title: "KIND", drop: 4}, {title: "TOTAL", right: true}, {title: "TAKEN", right: true},
		{title: " ", drop: 6}, {title: "AVAILABLE", right: true}, {title: "USED", right: true, drop: 5}, {title: "VOLUMES", right: true, drop: 2}, {title: "SNAPSHOTS", right: true, drop: 3},
		{title: "PROBLEMS", least: 16}, {title: "LARGEST", right: true, wide: true}, {title: "DEFAULT", wide: true}, {title: "UUID", wide: true}}}
	for i := range all {
		p := &all[i]
		taken, used, yes := p.Total-p.Available, "", ""
		if p.Used > 0 {
			used = Size(p.Used)
		}
		if p.Default {
			yes = "yes"
		}
		t.add(append(plain(p.Node, p.Name, p.Kind, Size(p.Total), percent(taken, p.Total), bar(taken, p.Total, 10), Size(p.Available), used, strconv.Itoa(p.Volumes), strconv.Itoa(p.Snapshots)),
			append([]cell{reasons(slices.Concat(wrong[p.Node], p.Problems))}, plain(Size(p.MaxVolume), yes, p.UUID)...)...)...)
	}
	if len(all) == 0 {
		to.print("There are no pools.\n")
	} else {
		t.print(to)
	}
	if len(o.Missing) > 0 {
		to.print("\n")
	}
	printMissing(to, o.Missing)
}

// reasons returns the reasons of problems, in the colour of the worst.
func reasons(problems []overview.Problem) cell {
	if len(problems) == 0 {
		return cell{text: "none"}
	}
	var words []string
	worst := problems[0].Severity
	for _, p := range problems {
		if !slices.Contains(words, p.Reason) {
			words = append(words, p.Reason)
		}
		if overview.Worse(p.Severity, worst) < 0 {
			worst = p.Severity
		}
	}
	return cell{strings.Join(words, ","), colourOf(worst)}
}

// filter is which volumes are shown.
type filter struct {
	node, pool, namespace string
	problems              bool
}

func (f filter) takes(v *overview.Volume) bool {
	return v.Is(f.node, f.pool) && (f.namespace == "" || v.Claim != nil && v.Claim.Namespace == f.namespace) && (!f.problems || len(v.Problems) > 0)
}

// check returns an error if the namespace cannot exist. The mistake -namespace=shop comes as -n with the value amespace=shop.
func (f filter) check() error {
	if f.namespace == "" || len(validation.IsDNS1123Label(f.namespace)) == 0 {
		return nil
	}
	return fmt.Errorf("no namespace can be called %q (a flag of more than one letter has two dashes: --namespace)", f.namespace)
}

// volumesOf returns the volumes that match a filter. Their problems include those around them (overview.Places.Of).
func volumesOf(o *overview.Overview, f filter) []overview.Volume {
	places, all := o.Places(), []overview.Volume{}
	for i := range o.Volumes {
		v := o.Volumes[i]
		if v.Problems = places.Of(&v); f.takes(&v) {
			all = append(all, v)
		}
	}
	return all
}

func (c *commands) volumes() *cobra.Command {
	var s showing
	var f filter
	cmd := &cobra.Command{
		Use:   "volumes",
		Short: "List the volumes: claim, size, state, node, pods and problems",
		Long: `volumes lists the volumes: the claim that each was made for (or its name), size, state, node and pool, the
pods that use it, and what is wrong. It also says if the node or pool of a volume cannot be reached,
and how far a copy is.

A volume with replicas is one line with all its nodes. REPLICAS shows how many replicas have all that
was written, of how many there are to be; describe shows each of them.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if c.namespaced && cmd.Flags().Changed("namespace") {
				f.namespace = cmd.Flag("namespace").Value.String()
			}
			if err := f.check(); err != nil {
				return err
			}
			return s.run(cmd, func(ctx context.Context, to *screen) (any, error) {
				o, err := c.take(ctx, to.exact)
				if err != nil {
					return nil, err
				}
				all := volumesOf(o, f)
				printVolumes(to, o, all)
				sayMissing(cmd, to, o.Missing)
				return all, nil
			})
		},
	}
	cmd.Flags().StringVar(&f.node, "node", "", "only those of this node")
	cmd.Flags().StringVar(&f.pool, "pool", "", "only those in pools of this name")
	cmd.Flags().BoolVar(&f.problems, "problems", false, "only those with which something is wrong")
	if !c.namespaced {
		cmd.Flags().StringVarP(&f.namespace, "namespace", "n", "", "only those whose claims are in this namespace")
	}
	s.add(cmd, true)
	_ = cmd.RegisterFlagCompletionFunc("node", c.complete(func(o *overview.Overview) (names []string) { // cannot fail: both flags exist
		for _, n := range o.Nodes {
			names = append(names, n.Name)
		}
		return names
	}))
	_ = cmd.RegisterFlagCompletionFunc("pool", c.complete(func(o *overview.Overview) (names []string) {
		for _, p := range poolsOf(o) {
			names = append(names, p.Name)
		}
		return names
	}))
	return cmd
}

// complete completes with names in an overview; with nothing if there is no overview.
func (c *commands) complete(of func(*overview.Overview) []string) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, begun string) ([]cobra.Completion, cobra.ShellCompDirective) {
		o, err := c.take(cmd.Context(), false)
		if err != nil || len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		names := slices.DeleteFunc(of(o), func(one string) bool { return !strings.HasPrefix(one, begun) })
		slices.Sort(names)
		return slices.Compact(names), cobra.ShellCompDirectiveNoFileComp
	}
}

func printVolumes(to *screen, o *overview.Overview, all []overview.Volume) {
	none := !slices.ContainsFunc(all, func(v overview.Volume) bool { return v.Replicas != nil })
	t := table{columns: []column{{title: "CLAIM OR NAME", least: 14}, {title: "SIZE", right: true}, {title: "USED", right: true, drop: 4}, {title: "STATE"}, {title: "NODE", least: 10, drop: 1},
		{title: "POOL", least: 7, drop: 3}, {title: "REPLICAS", drop: 2, wide: none}, {title: "PODS", least: 10, drop: 2}, {title: "AGE", right: true, drop: 5}, {title: "PROBLEMS", least: 16},
		{title: "FILESYSTEM", wide: true}, {title: "PERSISTENTVOLUME", wide: true}, {title: "ID", wide: true}}}
	for i := range all {
		v := &all[i]
		used, filesystem := "", v.Filesystem
		if v.Used != nil {
			used = Size(*v.Used)
		}
		if filesystem == "" {
			filesystem = "raw"
		}
		var pods []string
		for _, pod := range v.Pods {
			pods = append(pods, pod.Name)
		}
		row := append(plain(Title(v), Size(v.Size), used), state(v.State, v.Progress))
		row = append(row, plain(strings.Join(v.On(), ","), strings.Join(v.In(), ","))...)
		row = append(row, replicas(v.Replicas), cell{text: strings.Join(pods, ",")}, cell{text: age(o.Taken, v.Created)})
		t.add(append(append(row, reasons(v.Problems)), plain(filesystem, v.PersistentVolume, v.ID)...)...)
	}
	if len(all) == 0 {
		to.print("There are no such volumes.\n")
	} else {
		t.print(to)
	}
	if len(o.Missing) > 0 {
		to.print("\n")
	}
	printMissing(to, o.Missing)
}

// replicas returns how many replicas of a volume are current, and how many there are to be; empty for a volume on one node.
func replicas(r *overview.Replicas) cell {
	switch {
	case r == nil:
		return cell{}
	case r.Current == 0:
		return cell{r.String(), red}
	case r.Current < r.Wanted:
		return cell{r.String(), yellow}
	}
	return cell{text: r.String()}
}

// state returns the state of a volume or snapshot, and its progress.
func state(s overview.State, p *overview.Progress) cell {
	text := string(s)
	if p != nil && p.Total > 0 {
		text += " " + bar(p.Done, p.Total, 10) + " " + percent(p.Done, p.Total)
	}
	switch s {
	case overview.Lost, overview.Failed:
		return cell{text, red}
	case overview.Making:
		return cell{text, yellow}
	}
	return cell{text: text}
}
