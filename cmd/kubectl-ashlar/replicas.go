package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/cli"
	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/internal/poolset"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
)

// replicating is the command replicas: it changes how many legs a volume has.
type replicating struct {
	*cluster
	out  io.Writer
	many int
	wait bool

	key   string
	title string
	pods  string // that use the volume
	// mirrors reports whether a node can let a volume that it uses become one with several legs. It is as of the start of the command.
	mirrors func(node string) bool
}

func replicasCommand(flags *genericclioptions.ConfigFlags) *cobra.Command {
	var s replicating
	cmd := &cobra.Command{
		Use:   "replicas VOLUME NUMBER",
		Short: "Set how many replicas a volume with access=any has",
		Long: `kubectl ashlar replicas sets how many replicas a volume has: 1 to 3, each on a node of its own. The
volume keeps its ID.

A further replica is made on the node with most room in the network of the volume. It gets the bytes
over the network, while the volume is used. If there are too many, one goes that lacks something, else
one on a node that does not use the volume. It goes once enough others have all that was written.

A volume on one node gets replicas in the same way, used or not. If the node that uses it cannot do
that meanwhile (an older driver), end its pods, and start them again when it has its replicas. Until
then NUMBER 1 takes the request back.

The command refuses what cannot be done, shows how far it is, and waits until it is done. It goes on
without the command: the same command waits for it again.

` + cli.VolumeHelp,
		Args: func(_ *cobra.Command, args []string) (err error) {
			if len(args) != 2 {
				return errors.New("give one volume (" + cli.VolumeNames + "), and how many replicas it is to have")
			}
			if s.many, err = strconv.Atoi(args[1]); err != nil || s.many < 1 || s.many > v1alpha1.MostReplicas {
				return fmt.Errorf("%q replicas: give 1 to %d", args[1], v1alpha1.MostReplicas)
			}
			return nil
		},
		ValidArgsFunction: completeOf(flags, volumesOf),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			if s.cluster, err = connect(flags); err != nil {
				return err
			}
			s.out = cli.Plain(cmd.OutOrStdout()) // which writes whole lines
			return s.run(cmd.Context(), args[0])
		},
	}
	cmd.Flags().BoolVar(&s.wait, "wait", true, "wait until the volume has so many replicas")
	return cmd
}

func (s *replicating) run(ctx context.Context, name string) error {
	o, err := s.Overview(ctx)
	if err != nil {
		return err
	}
	seen, err := cli.Find(o, name)
	if err != nil {
		return err
	}
	s.key, s.title = keyOf(seen.ID), cli.Title(seen)
	var pods []string
	for _, pod := range seen.Pods {
		pods = append(pods, pod.Namespace+"/"+pod.Name)
	}
	s.pods = strings.Join(pods, ", ")
	r, err := s.look(ctx, o)
	if err != nil {
		return err
	}
	s.mirrors = r.mirrors
	if seen.Replicas != nil {
		err = s.change(ctx, r, seen)
	} else {
		err = s.begin(ctx, r)
	}
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("%s: interrupted; it may be asked to have %s already: the same command waits for it", s.title, counted(s.many))
	case errors.Is(err, errSilent):
		return fmt.Errorf("%s: it is not known whether it is asked to have %s: %w; if it is, that goes on: the same command waits for it", s.title, counted(s.many), err)
	case err != nil:
		return fmt.Errorf("give %s %s: %w", s.title, counted(s.many), err)
	}
	return s.follow(ctx)
}

func counted(replicas int) string {
	if replicas == 1 {
		return "1 replica"
	}
	return fmt.Sprintf("%d replicas", replicas)
}

// change sets the number of legs of a volume that has several.
func (s *replicating) change(ctx context.Context, r *room, seen *overview.Volume) error {
	whole := &v1alpha1.ReplicatedVolume{}
	if err := s.patiently(ctx, func() error { return s.Get(ctx, client.ObjectKey{Name: s.key}, whole) }); err != nil {
		return fmt.Errorf("read replicated volume %s: %w", s.key, err)
	}
	was := whole.Spec.Replicas
	err := s.revise(ctx, whole, func() (bool, error) {
		switch {
		case whole.Going():
			return false, errors.New("it is being deleted")
		case whole.Status.Made == nil:
			return false, errors.New("it is not made yet; try again when it is (kubectl ashlar volumes)")
		case whole.Spec.Replicas == s.many:
			return false, nil
		}
		if more := s.many - whole.Spec.Replicas; more > 0 {
			size := whole.Spec.Size
			if seen.Encryption != "" {
				size += v1alpha1.EncryptionHeader
			}
			if err := r.takesReplicas(whole, cmp.Or(whole.Spec.Pools, seen.Pool), seen, size, more); err != nil {
				return false, err
			}
		}
		whole.Spec.Replicas = s.many
		return true, nil
	}, nil)
	if err != nil || was == s.many {
		return err
	}
	return s.explain(was, whole)
}

// explain prints what happens now to a volume that had was legs.
func (s *replicating) explain(was int, r *v1alpha1.ReplicatedVolume) error {
	text := ""
	switch {
	case s.many < was && !r.Settled():
		text = "those that are too many go when it is used again, as the node that used it last has not closed it, and only the next one finds out which of them have all that was written"
	case s.many < was:
		text = "those that are too many go, one that lacks something first, and never the last one that has all that was written"
	case r.Spec.Claim == nil:
		text = "each further node makes room for it now, and gets its bytes when it is used"
	default:
		text = fmt.Sprintf("each further node makes room for it now, and gets its bytes from node %s over the network", r.Spec.Claim.Node)
	}
	_, err := fmt.Fprintf(s.out, "%s: it has had %s, and is to have %d: %s.\n", s.title, counted(was), s.many, text)
	return err
}

// begin asks for a volume on one node to have several legs, or takes that back.
func (s *replicating) begin(ctx context.Context, r *room) error {
	v := &v1alpha1.Volume{}
	if err := s.patiently(ctx, func() error { return s.Get(ctx, client.ObjectKey{Name: s.key}, v) }); err != nil {
		return fmt.Errorf("read volume %s: %w", s.key, err)
	}
	changed := false
	err := s.revise(ctx, v, func() (bool, error) {
		want := s.many
		if want == 1 {
			want = 0 // which asks for nothing
		}
		changed = v.Spec.Replicas != want
		if !changed || want == 0 {
			v.Spec.Replicas = want
			return changed, nil
		}
		if why, waits := v.WhyNotReplicated(r.mirrors); why != "" && !waits {
			return false, errors.New(why)
		}
		if r.network(v.Spec.NodeName, v.Spec.Pool) == "" {
			return false, fmt.Errorf("its node %s is in no network, so its bytes cannot leave it; start the driver there with --remote-address", v.Spec.NodeName)
		}
		seen := &overview.Volume{Node: v.Spec.NodeName, Pool: v.Spec.Pool, Encryption: v.Spec.Encryption}
		if err := r.takesReplicas(&v1alpha1.ReplicatedVolume{}, v.Spec.Pool, seen, v.Keeps(), want-1); err != nil {
			return false, err
		}
		v.Spec.Replicas = want
		return true, nil
	}, nil)
	switch {
	case err != nil || !changed:
		return err
	case s.many == 1:
		_, err := fmt.Fprintf(s.out, "%s: the request for replicas was taken back.\n", s.title)
		return err
	case v.Spec.Replicas != s.many:
		return errors.New("the definitions of ashlar.dev in this cluster know no replicas of volumes that are there: apply those of this version (deploy/kubernetes/crds)")
	}
	text := "it becomes a volume with replicas, of which that is the first; each further node makes room for it, and gets its bytes when it is used"
	if why, _ := v.WhyNotReplicated(r.mirrors); why != "" {
		text = "when this is over, " + text + ": " + why
	}
	_, err = fmt.Fprintf(s.out, "%s: it is on node %s, and is to have %s: %s.\n", s.title, v.Spec.NodeName, counted(s.many), text)
	return err
}

// takesReplicas returns why fewer than many places can have a further leg of a volume, of so many bytes, in the pools of a set, and what to do; nil if enough
// can. A place is a node, or a value of the label by which the legs are apart. whole is what the legs are of; empty for a volume on one node.
func (r *room) takesReplicas(whole *v1alpha1.ReplicatedVolume, pools string, v *overview.Volume, bytes int64, many int) error {
	reasons, fit, key := []string{}, map[string]bool{}, whole.Spec.TopologyKey
	if len(r.legs.nodes) == 0 {
		key = "" // the user may not list nodes: the controller alone knows their labels
	}
	for _, p := range r.pools {
		node := p.Spec.NodeName
		if slices.Contains(v.On(), node) || !poolset.Set(pools).Has(p.Spec.Pool) && (pools != "" || !p.Spec.Default) {
			continue
		}
		why := r.refusesReplica(p, v, bytes)
		if why == "" {
			why = r.unfitFor(whole, key, node)
		}
		switch {
		case why != "":
			reasons = append(reasons, why)
		case key != "":
			fit[r.legs.labels(node)[key]] = true
		default:
			fit[node] = true
		}
	}
	if len(fit) >= many {
		return nil
	}
	slices.Sort(reasons)
	if len(reasons) == 0 {
		reasons = []string{fmt.Sprintf("no other one has a pool %s", cmp.Or(pools, v.Pool))}
	}
	if more := len(reasons) - mostReasons; more > 0 {
		reasons = append(reasons[:mostReasons], fmt.Sprintf("and %d more", more))
	}
	place, places := "a node", "nodes"
	if key != "" {
		place, places = fmt.Sprintf("a value of the label %s (parameter replicaTopologyKey)", key), "values"
	}
	return fmt.Errorf("each replica needs %s of its own, and of %d further %s that are needed there are %d: %s", place, many, places, len(fit), strings.Join(reasons, "; "))
}

// refusesReplica returns why a pool on another node cannot have a further leg of a volume, of so many bytes; empty if it can.
func (r *room) refusesReplica(p *v1alpha1.Pool, v *overview.Volume, bytes int64) string {
	name, node, network := overview.PoolName(p.Spec.NodeName, p.Spec.Pool), p.Spec.NodeName, r.network(v.Node, v.Pool)
	its := r.network(node, p.Spec.Pool)
	bad := slices.IndexFunc(p.Status.Health, func(one v1alpha1.Problem) bool { return one.Severity != string(overview.Degraded) })
	switch {
	case r.silent[node] != "":
		return fmt.Sprintf("node %s does not answer: %s", node, r.silent[node])
	case r.cordoned[node]:
		return fmt.Sprintf("node %s is cordoned", node)
	case its != network || its == "":
		return fmt.Sprintf("node %s is not in the network %s", node, network)
	case v.Encryption != "" && !slices.Contains(p.Status.Encryption, v.Encryption):
		return fmt.Sprintf("node %s cannot encrypt (%s): driver doctor there says what is missing", node, v.Encryption)
	case bad >= 0:
		return fmt.Sprintf("pool %s is not well: %s: %s", name, p.Status.Health[bad].Reason, p.Status.Health[bad].Message)
	case min(p.Status.Available-r.promised[name], p.Status.MaxVolume) < bytes:
		return fmt.Sprintf("pool %s has no room for %s", name, cli.Size(bytes))
	}
	return p.NotInSteps(bytes)
}

// unfitFor returns why a node cannot have one more leg of a volume beside those that there are, by the controller's rules; empty if it can. key is the label
// by which the legs are apart; empty: by nodes alone.
func (r *room) unfitFor(whole *v1alpha1.ReplicatedVolume, key, node string) string {
	if why := whole.Unfit(node, time.Now()); why != "" {
		return fmt.Sprintf("node %s %s", node, why)
	}
	others := slices.DeleteFunc(slices.Clone(r.legs.all), func(leg *v1alpha1.Volume) bool { return leg.Spec.ReplicaOf != whole.Name || v1alpha1.Going(leg) })
	apart := &v1alpha1.ReplicatedVolume{Spec: v1alpha1.ReplicatedVolumeSpec{TopologyKey: key}}
	if why := apart.NotBeside(others, nil, node, r.legs.labels); why != "" {
		return fmt.Sprintf("node %s %s", node, why)
	}
	return ""
}

// standing is the state of a volume that is to have another number of legs.
type standing struct {
	whole *v1alpha1.ReplicatedVolume // nil: it is still a volume on one node
	legs  []v1alpha1.Volume          // its legs, or that volume; without those that are deleted
}

func (s *replicating) read(ctx context.Context) (now standing, err error) {
	err = s.patiently(ctx, func() error {
		whole := &v1alpha1.ReplicatedVolume{}
		err := s.Get(ctx, client.ObjectKey{Name: s.key}, whole)
		if now = (standing{}); err == nil {
			now.whole = whole
		}
		if client.IgnoreNotFound(err) != nil {
			return err
		}
		names := []string{s.key}
		if now.whole != nil {
			names = whole.Spec.Legs
		}
		for _, name := range names {
			v := v1alpha1.Volume{}
			if err := s.Get(ctx, client.ObjectKey{Name: name}, &v); err == nil {
				now.legs = append(now.legs, v)
			} else if !apierrors.IsNotFound(err) {
				return err
			}
		}
		return nil
	})
	return now, err
}

// stage returns how far the change is, in words, and whether it is done; an error if it will not be. kind stays the same while only figures change.
func (s *replicating) stage(now standing) (kind, text string, done bool, err error) {
	switch alone := now.whole == nil || now.whole.Status.Made == nil; {
	case alone && len(now.legs) == 0: // the controller takes back a ReplicatedVolume that is not made
		return "", "", false, errDeleted
	case alone:
		return s.stageAlone(&now.legs[0])
	}
	return s.stageOf(now.whole, now.legs)
}

// stageAlone is stage for a volume that is still to become one with several legs.
func (s *replicating) stageAlone(v *v1alpha1.Volume) (kind, text string, done bool, err error) {
	why, waits := v.WhyNotReplicated(s.mirrors)
	switch {
	case v.Spec.Replicas == 0 && v.Spec.ReplicaOf == "" && s.many == 1:
		return "", "it is on node " + v.Spec.NodeName + " alone", true, nil
	case v.Spec.Replicas == 0 && v.Spec.ReplicaOf == "":
		return "", "", false, fmt.Errorf("the request for replicas was taken back: it stays on node %s alone", v.Spec.NodeName)
	case v.Spec.ReplicaOf != "" || why == "":
		text = "it becomes a volume with replicas"
	case !waits:
		return "", "", false, errors.New(why)
	case len(v.Claimants()) > 0:
		text = why
		if s.pods != "" {
			text += "; its pods are " + s.pods
		}
		text += ": end what uses it (a Deployment or StatefulSet: scale it to 0), and it gets its replicas when it is released"
	default:
		text = "it waits: " + why
	}
	return text, text, false, nil
}

// stageOf is stage for a volume with several legs. If no node uses it, the change is done when all legs are made: they get their bytes when it is used.
func (s *replicating) stageOf(r *v1alpha1.ReplicatedVolume, legs []v1alpha1.Volume) (kind, text string, done bool, err error) {
	current, made := len(r.Current()), 0
	for i := range legs {
		if legs[i].Status.Created != nil {
			made++
		}
	}
	switch {
	case r.Going():
		return "", "", false, errors.New("it is being deleted")
	case r.Spec.Replicas != s.many:
		return "", "", false, fmt.Errorf("somebody else has asked for %s", counted(r.Spec.Replicas))
	case len(r.Spec.Legs) == s.many && current == s.many:
		return "", fmt.Sprintf("it has %s, and each has all that was written", counted(s.many)), true, nil
	case r.Spec.Claim == nil && len(r.Spec.Legs) == s.many && made == s.many && current > 0:
		return "", fmt.Sprintf("it has %s, and what %d of them lack is copied when the volume is used", counted(s.many), s.many-current), true, nil
	case r.Status.Lacks != "":
		text = "it waits: " + r.Status.Lacks
	case len(r.Spec.Legs) > s.many:
		text = fmt.Sprintf("%d of its %d replicas have all that was written, and %d are to go", current, len(r.Spec.Legs), len(r.Spec.Legs)-s.many)
	case made < s.many:
		text = fmt.Sprintf("%d of %d replicas are there; further nodes make room for it", made, s.many)
	default:
		text = fmt.Sprintf("%d of %d replicas have all that was written", current, s.many)
	}
	kind = text
	for i := range r.Status.Legs {
		l := &r.Status.Legs[i]
		on := slices.IndexFunc(legs, func(v v1alpha1.Volume) bool { return v.Name == l.Name })
		switch p := l.Progress; {
		case l.Current || on < 0:
		case l.State == v1alpha1.LegJoining && p != nil && p.Total > 0:
			text += fmt.Sprintf("; node %s: %d %%", legs[on].Spec.NodeName, 100*p.Done/p.Total)
			kind += fmt.Sprintf("; %s: %d", l.Name, 10*p.Done/p.Total)
		case l.Message != "":
			text += fmt.Sprintf("; node %s: %s", legs[on].Spec.NodeName, l.Message)
			kind += "; " + l.Message
		}
	}
	return kind, text, false, nil
}

// follow prints how far the change is. With s.wait it waits until it is done.
func (s *replicating) follow(ctx context.Context) error {
	return follow(ctx, s.out, s.title, s.wait, fmt.Sprintf("it is to have %s, and that goes on: the same command waits for it again", counted(s.many)), func() (kind, text string, done bool, err error) {
		now, err := s.read(ctx)
		if err != nil {
			return "", "", false, fmt.Errorf("it is not known how far it is with its %s, which goes on: %w; the same command waits for it again", counted(s.many), err)
		}
		return s.stage(now)
	})
}
