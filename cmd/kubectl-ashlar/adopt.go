package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/cli"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster/lost"
)

// adoption is the command adopt.
type adoption struct {
	*cluster
	out     io.Writer
	all     bool
	volumes bool // make PersistentVolumes, too
	dryRun  bool
	timeout time.Duration
	lost    lost.Options
}

func adoptCommand(flags *genericclioptions.ConfigFlags) *cobra.Command {
	var a adoption
	cmd := &cobra.Command{
		Use:   "adopt [NODE.POOL | [NODE.POOL/]ID]...",
		Short: "Make the missing objects of volumes and snapshots that are in a pool",
		Long: `kubectl ashlar adopt lists the strays: volumes and snapshots that are in a pool and have no object, because
somebody deleted the objects, or the cluster was made anew. Nothing removes strays.

Give names of pools, IDs of strays, or --all, and the agents make their objects. If several pools have
a stray of the same ID, NODE.POOL/ID says which of them is meant.

With --persistent-volumes it then makes what Kubernetes lacks for all volumes and snapshots that have
objects: PersistentVolumes (with Retain) and their claims, and contents of snapshots with their
snapshots. What exists stays as it is.`,
		Args: func(_ *cobra.Command, args []string) error {
			if a.all && len(args) > 0 {
				return errors.New("give --all, or pools and IDs, and not both")
			}
			return nil
		},
		ValidArgsFunction: func(cmd *cobra.Command, _ []string, begun string) ([]cobra.Completion, cobra.ShellCompDirective) {
			c, err := connect(flags)
			var pools v1alpha1.PoolList
			if err == nil {
				err = c.List(cmd.Context(), &pools)
			}
			var names []string
			for _, p := range pools.Items {
				for _, s := range p.Status.Strays {
					names = append(names, p.Name, cli.Line(s.ID))
				}
			}
			if err != nil {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			slices.Sort(names)
			return slices.DeleteFunc(slices.Compact(names), func(one string) bool { return !strings.HasPrefix(one, begun) }), cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			if a.cluster, err = connect(flags); err != nil {
				return err
			}
			a.out = cli.Plain(cmd.OutOrStdout()) // which writes whole lines
			return a.run(cmd.Context(), args)
		},
	}
	f := cmd.Flags()
	f.BoolVar(&a.all, "all", false, "adopt all strays of all pools")
	f.BoolVar(&a.dryRun, "dry-run", false, "say what would be done, and do nothing")
	f.DurationVar(&a.timeout, "timeout", 2*time.Minute, "how long to wait for the agents")
	f.BoolVar(&a.volumes, "persistent-volumes", false, "make PersistentVolumes, claims and contents of snapshots that are missing")
	f.StringVar(&a.lost.Class, "storage-class", "ashlar", "StorageClass of those PersistentVolumes, which no record knows")
	f.StringVar(&a.lost.AccessMode, "access-mode", string(corev1.ReadWriteOnce), "access mode of those PersistentVolumes")
	f.StringVar(&a.lost.Namespace, "snapshot-namespace", "default", "namespace of snapshots of volumes that nobody knows the claim of")
	return cmd
}

func (a *adoption) run(ctx context.Context, wanted []string) error {
	var pools v1alpha1.PoolList
	if err := a.List(ctx, &pools); err != nil {
		return fmt.Errorf("list the pools: %w", err)
	}
	if !a.all && len(wanted) == 0 && !a.volumes {
		return a.list(pools.Items)
	}
	asked, err := choose(pools.Items, wanted, a.all)
	if err != nil {
		return err
	}
	if len(asked) == 0 && !a.volumes {
		_, err := fmt.Fprint(a.out, noStrays)
		return err
	}
	for _, p := range pools.Items {
		if err := a.ask(ctx, &p, asked[p.Name]); err != nil {
			return err
		}
	}
	for _, p := range pools.Items {
		if len(asked[p.Name]) > 0 && !a.dryRun {
			if err := a.wait(ctx, p.Name, asked[p.Name]); err != nil {
				return err
			}
		}
	}
	if !a.volumes {
		return nil
	}
	a.lost.Driver = v1alpha1.DefaultDriver
	for _, p := range pools.Items {
		if p.Spec.Driver != "" {
			a.lost.Driver = p.Spec.Driver
		}
	}
	return a.restore(ctx)
}

const noStrays = "There are no strays.\n"

// list prints the strays of all pools.
func (a *adoption) list(pools []v1alpha1.Pool) error {
	count := 0
	for _, p := range pools {
		for _, s := range p.Status.Strays {
			of := s.Name
			if s.ClaimRef != nil {
				of = s.ClaimRef.Namespace + "/" + s.ClaimRef.Name
			}
			if _, err := fmt.Fprintf(a.out, "%s  %s  %s  %s\n", p.Name, s.ID, cli.Size(s.Size), of); err != nil {
				return err
			}
		}
		if more := p.Status.StrayCount - len(p.Status.Strays); more > 0 {
			if _, err := fmt.Fprintf(a.out, "%s  and %d more\n", p.Name, more); err != nil {
				return err
			}
		}
		count += max(p.Status.StrayCount, len(p.Status.Strays))
	}
	what := noStrays
	if count > 0 {
		what = fmt.Sprintf("\nStrays: %d. To have objects made for them, name pools or IDs, or give --all.\n", count)
	}
	_, err := fmt.Fprint(a.out, what)
	return err
}

// choose returns what to ask of each pool, by its name: the IDs of strays, or v1alpha1.AdoptAll. It is an error if a name is unknown, or a stray may be one of several
// pools.
func choose(pools []v1alpha1.Pool, wanted []string, all bool) (map[string][]string, error) {
	asked := map[string][]string{}
	for _, p := range pools {
		if (all || slices.Contains(wanted, p.Name)) && strayed(&p) {
			asked[p.Name] = []string{v1alpha1.AdoptAll}
		}
	}
	for _, one := range wanted {
		if slices.ContainsFunc(pools, func(p v1alpha1.Pool) bool { return p.Name == one }) {
			continue
		}
		of, id, named := strings.Cut(one, "/")
		if !named {
			id = one
		}
		var on []string // the pools that have it
		for _, p := range pools {
			if (!named || p.Name == of) && slices.ContainsFunc(p.Status.Strays, func(s v1alpha1.Stray) bool { return s.ID == id || s.Group == id }) {
				on = append(on, p.Name)
			}
		}
		switch {
		case len(on) == 0:
			return nil, fmt.Errorf("%s is no pool (NODE.POOL), and no pool says that it has such a stray; without arguments adopt lists them", one)
		case len(on) > 1:
			return nil, copied(id, on...)
		}
		if err := nowhereElse(pools, id, on[0]); err != nil && !named {
			return nil, err
		}
		if !slices.Contains(asked[on[0]], v1alpha1.AdoptAll) {
			asked[on[0]] = append(asked[on[0]], id)
		}
	}
	return asked, once(pools, asked)
}

// copied returns the error for a stray of several pools: a disk was copied, or the volume has moved.
func copied(stray string, on ...string) error {
	return fmt.Errorf("%s is a stray of several pools, of which only one can be meant: %s; name that one (NODE.POOL/%s), or, if a disk was copied, take the wrong one away first; "+
		"of a volume that has moved the condition Accounted of each pool says which may have what was written last", stray, strings.Join(on, ", "), stray)
}

// strayed reports whether a pool has strays.
func strayed(p *v1alpha1.Pool) bool { return p.Status.StrayCount+len(p.Status.Strays) > 0 }

// unlisted returns how many strays of a pool are not in its list, which is bounded.
func unlisted(p *v1alpha1.Pool) int { return max(p.Status.StrayCount-len(p.Status.Strays), 0) }

// inOrder says what to do if the lists do not show which strays are in several pools.
const inOrder = "adopt from the pools that list all of theirs first, then from the others one at a time, each by its name; or, if a disk was copied, take the wrong disk away first"

// nowhereElse returns an error if a stray of one pool may also be among those that another pool does not list.
func nowhereElse(pools []v1alpha1.Pool, stray, on string) error {
	for i := range pools {
		if p := &pools[i]; p.Name != on && unlisted(p) > 0 {
			return fmt.Errorf("%s is a stray of pool %s, and may be one of the %d that pool %s does not list; %s", stray, on, unlisted(p), p.Name, inOrder)
		}
	}
	return nil
}

// seen returns an error if all strays of a pool that does not list all of them are asked for, together with strays of another pool, or before those of a pool
// that lists all.
func seen(pools []v1alpha1.Pool, asked map[string][]string) error {
	for i := range pools {
		p := &pools[i]
		if unlisted(p) == 0 || !slices.Contains(asked[p.Name], v1alpha1.AdoptAll) {
			continue
		}
		for j := range pools {
			if q := &pools[j]; i != j && strayed(q) && (len(asked[q.Name]) > 0 || unlisted(q) == 0) {
				return fmt.Errorf("pool %s has %d strays that it does not list, and what pool %s has may be among them; %s", p.Name, unlisted(p), q.Name, inOrder)
			}
		}
	}
	return nil
}

// once returns an error if two pools may be asked for the same stray: the agent that comes first would get the object.
func once(pools []v1alpha1.Pool, asked map[string][]string) error {
	if err := seen(pools, asked); err != nil {
		return err
	}
	on := map[string]string{}
	for _, p := range pools {
		for _, s := range p.Status.Strays {
			if !among(asked[p.Name], &s) {
				continue
			}
			if other, twice := on[s.ID]; twice {
				return copied(s.ID, other, p.Name)
			}
			on[s.ID] = p.Name
		}
	}
	return nil
}

// among reports whether a stray is one of those that are asked for.
func among(asked []string, s *v1alpha1.Stray) bool {
	return slices.Contains(asked, v1alpha1.AdoptAll) || slices.Contains(asked, s.ID) || s.Group != "" && slices.Contains(asked, s.Group)
}

// ask writes into the object of a pool which strays its agent is to make objects for. With dryRun it only prints them.
func (a *adoption) ask(ctx context.Context, p *v1alpha1.Pool, ids []string) error {
	if len(ids) == 0 {
		return nil
	}
	if _, err := fmt.Fprintf(a.out, "pool %s: adopting %s\n", p.Name, strings.Join(ids, ", ")); err != nil || a.dryRun {
		return err
	}
	err := a.revise(ctx, p, func() (bool, error) {
		was := p.Annotations[v1alpha1.AdoptAnnotation]
		metav1.SetMetaDataAnnotation(&p.ObjectMeta, v1alpha1.AdoptAnnotation, together(p.Adopting(), ids))
		return p.Annotations[v1alpha1.AdoptAnnotation] != was, nil
	}, nil)
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("pool %s: interrupted; its agent may be asked for that already, and goes on then: the same command asks for what is left", p.Name)
	case err != nil:
		return fmt.Errorf("ask the agent of pool %s: %w", p.Name, err)
	}
	return nil
}

// together returns the annotation that asks for strays beside those that it asks for already, which the agent has not made objects for yet.
func together(asked, ids []string) string {
	for _, id := range ids {
		if !slices.Contains(asked, id) {
			asked = append(asked, id)
		}
	}
	return strings.Join(asked, ",")
}

// wait waits until the agent of a pool has taken the annotation off, and none of the strays is left; for a.timeout at most.
func (a *adoption) wait(whole context.Context, name string, ids []string) error {
	ctx, cancel := context.WithTimeout(whole, a.timeout)
	defer cancel()
	for {
		p := &v1alpha1.Pool{}
		err := a.patiently(ctx, func() error { return a.Get(ctx, client.ObjectKey{Name: name}, p) })
		if err != nil && ctx.Err() == nil {
			return fmt.Errorf("pool %s: it is not known whether its agent has done that: %w", name, err)
		} else if err == nil && p.Annotations[v1alpha1.AdoptAnnotation] == "" && !left(p, ids) {
			_, err := fmt.Fprintf(a.out, "pool %s: done\n", name)
			return err
		}
		select {
		case <-ctx.Done():
			message := "its agent has not answered"
			p := &v1alpha1.Pool{}
			err := a.Get(whole, client.ObjectKey{Name: name}, p)
			if whole.Err() != nil {
				return fmt.Errorf("pool %s: interrupted; the agents go on with what they are asked for", name)
			}
			if err == nil && p.Annotations[v1alpha1.AdoptAnnotation] == "" {
				for _, c := range p.Status.Conditions {
					if c.Type == v1alpha1.Accounted {
						message = "some are left: " + c.Message
					}
				}
			}
			return fmt.Errorf("pool %s: %s (after %s); see kubectl ashlar status", name, message, a.timeout)
		case <-time.After(500 * time.Millisecond):
		}
	}
}

// left reports whether a pool still has some of the strays that were asked for.
func left(p *v1alpha1.Pool, ids []string) bool {
	return slices.ContainsFunc(p.Status.Strays, func(s v1alpha1.Stray) bool { return among(ids, &s) })
}

// restore makes the objects that Kubernetes lacks. It leaves existing ones as they are.
func (a *adoption) restore(ctx context.Context) error {
	objects, doubts, err := lost.Find(ctx, a, a.lost)
	if err != nil {
		return fmt.Errorf("find what is missing: %w", err)
	}
	var failures []error // they do not keep the other objects from being made
	for _, o := range objects {
		name := o.GetObjectKind().GroupVersionKind().Kind + " " + strings.TrimPrefix(o.GetNamespace()+"/"+o.GetName(), "/")
		done := "made"
		if a.dryRun {
			done = "would be made"
		} else if err := a.Create(ctx, o); apierrors.IsAlreadyExists(err) {
			done = "is there, and stays as it is"
		} else if ctx.Err() != nil {
			return fmt.Errorf("make %s: interrupted; what was made stays, and the same command makes the rest", name)
		} else if err != nil {
			failures = append(failures, fmt.Errorf("make %s: %w", name, err))
			continue
		}
		if _, err := fmt.Fprintf(a.out, "%s: %s\n", name, done); err != nil {
			return err
		}
	}
	switch {
	case len(objects) == 0 && len(doubts) > 0:
		_, err = fmt.Fprintln(a.out, "Kubernetes lacks nothing that can be made.")
	case len(objects) == 0:
		_, err = fmt.Fprintln(a.out, "Kubernetes lacks nothing.")
	}
	for _, one := range doubts {
		if err == nil {
			_, err = fmt.Fprintf(a.out, "%s.\n", one)
		}
	}
	return errors.Join(append(failures, err)...)
}
