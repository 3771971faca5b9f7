package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/cli"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
)

// scrubbing is the command scrub.
type scrubbing struct {
	*cluster
	out io.Writer
}

func scrubCommand(flags *genericclioptions.ConfigFlags) *cobra.Command {
	return &cobra.Command{
		Use:   "scrub VOLUME",
		Short: "Compare the replicas of a volume",
		Long: `kubectl ashlar scrub asks the node that uses a volume with replicas to compare these now, byte by byte.
That node also does so by itself (--scrub-every of the driver). A comparison changes nothing. It may take
hours, and the command does not wait for it: it prints what the last comparison has found.

` + cli.VolumeHelp,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return errors.New("give one volume: " + cli.VolumeNames)
			}
			return nil
		},
		ValidArgsFunction: completeOf(flags, volumesOf),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := connect(flags)
			if err != nil {
				return err
			}
			s := &scrubbing{c, cli.Plain(cmd.OutOrStdout())}
			return s.run(cmd.Context(), args[0])
		},
	}
}

func (s *scrubbing) run(ctx context.Context, name string) error {
	r, err := s.find(ctx, name)
	if err != nil {
		return err
	}
	want := int64(0)
	err = s.revise(ctx, r, func() (bool, error) {
		if r.Going() {
			return false, errors.New("it is being deleted")
		}
		r.Spec.Scrubs++
		want = r.Spec.Scrubs
		return true, nil
	}, nil)
	if err == nil && r.Spec.Scrubs < want { // older CRDs drop unknown fields
		err = errors.New("the definitions of ashlar.dev in this cluster know no such request: apply those of this version (deploy/kubernetes/crds)")
	}
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("%s: interrupted; the comparison of its replicas may be asked for already: kubectl ashlar describe %s says what the last one has found", name, name)
	case err != nil:
		return fmt.Errorf("ask for the replicas of %s to be compared: %w", name, err)
	}
	return s.tell(r)
}

// find returns a volume with replicas by a name of it.
func (s *scrubbing) find(ctx context.Context, name string) (*v1alpha1.ReplicatedVolume, error) {
	o, err := s.Overview(ctx)
	if err != nil {
		return nil, err
	}
	seen, err := cli.Find(o, name)
	if err != nil {
		return nil, err
	}
	r := &v1alpha1.ReplicatedVolume{}
	err = s.Get(ctx, client.ObjectKey{Name: keyOf(seen.ID)}, r)
	if apierrors.IsNotFound(err) {
		return nil, fmt.Errorf("%s has no replicas, so there is nothing to compare; to give it one more: kubectl ashlar replicas %s 2", cli.Title(seen), name)
	}
	return r, err
}

// tell prints which node compares the replicas and when, and what the last scrub has found.
func (s *scrubbing) tell(r *v1alpha1.ReplicatedVolume) error {
	what := "nobody uses it now: its replicas are compared when somebody does"
	if c := r.Spec.Claim; c != nil {
		what = fmt.Sprintf("node %s compares its replicas, when all are current, and no other volume is being compared there", c.Node)
	}
	known := "They were not compared yet"
	switch c := r.Status.Scrub; {
	case r.Differ() != "":
		known = r.Differ()
	case c != nil && c.Ended != nil:
		known = "By the scrub that ended at " + c.Ended.UTC().Format(time.RFC3339) + " they are equal"
	}
	if c := r.Status.Scrub; c != nil && c.Progress != nil && c.Progress.Total > 0 {
		known += fmt.Sprintf("; one is under way, at %d %%, which ends first", 100*c.Progress.Done/c.Progress.Total)
	}
	_, err := fmt.Fprintf(s.out, "%s: %s.\n%s.\n", r.ID(), what, known)
	return err
}
