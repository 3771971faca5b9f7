package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/cli"
	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
)

// legs is what decides where a leg of a volume may be, as in the driver's controller.
type legs struct {
	all   []*v1alpha1.Volume
	whole map[string]*v1alpha1.ReplicatedVolume // the volumes of the legs, by name
	nodes []corev1.Node                         // empty: the user may not list them
}

// lookForLegs fills found with the legs among all volumes, and with the volumes that they are of.
func (c *cluster) lookForLegs(ctx context.Context, volumes []v1alpha1.Volume, found *legs) error {
	for i := range volumes {
		if v := &volumes[i]; v.Spec.ReplicaOf != "" {
			found.all = append(found.all, v)
		}
	}
	if len(found.all) == 0 {
		return nil
	}
	var list v1alpha1.ReplicatedVolumeList
	if err := c.List(ctx, &list); err != nil {
		return fmt.Errorf("list the volumes with replicas: %w", err)
	}
	found.whole = map[string]*v1alpha1.ReplicatedVolume{}
	for i := range list.Items {
		found.whole[list.Items[i].Name] = &list.Items[i]
	}
	return nil
}

// labels returns the labels of a node; nil if they are not known.
func (l *legs) labels(node string) map[string]string {
	if i := slices.IndexFunc(l.nodes, func(n corev1.Node) bool { return n.Name == node }); i >= 0 {
		return l.nodes[i].Labels
	}
	return nil
}

// notBeside returns why a leg cannot be on a node; nil if it can, or v is no leg. The controller places legs by the same rule.
func (l *legs) notBeside(v *v1alpha1.Volume, node string) error {
	if v.Spec.ReplicaOf == "" {
		return nil
	}
	whole := l.whole[v.Spec.ReplicaOf]
	if whole == nil {
		return fmt.Errorf("there is no volume %s that it is a replica of", v.Spec.ReplicaOf)
	}
	if key := whole.Spec.TopologyKey; key != "" && len(l.nodes) == 0 {
		return fmt.Errorf("you may not list nodes, whose labels %s say where it may come to (parameter replicaTopologyKey)", key)
	}
	others := slices.DeleteFunc(slices.Clone(l.all), func(other *v1alpha1.Volume) bool {
		return other.Spec.ReplicaOf != v.Spec.ReplicaOf || other.Name == v.Name || v1alpha1.Going(other)
	})
	if why := whole.NotBeside(others, nil, node, l.labels); why != "" {
		return errors.New("it " + why)
	}
	return nil
}

// isReplaced reports whether the move is done by another leg, which takes the place of this one: it is a leg of a volume in use, or is being deleted.
func (f *followed) isReplaced() bool {
	v := f.v
	return v.Spec.ReplicaOf != "" && (v1alpha1.Going(v) || v.Moving() && v.Spec.Claim != nil)
}

// goesOn reports whether a volume with several legs is there, and is not being deleted with all its legs.
func (c *cluster) goesOn(ctx context.Context, name string) (bool, error) {
	whole := &v1alpha1.ReplicatedVolume{}
	err := c.patiently(ctx, func() error { return c.Get(ctx, client.ObjectKey{Name: name}, whole) })
	return err == nil && !whole.Going(), client.IgnoreNotFound(err)
}

// lookAtLegs sets f.legs to how far the other leg is, in words.
func (c *cluster) lookAtLegs(ctx context.Context, f *followed) {
	if f.legs = ""; !f.isReplaced() {
		return
	}
	whole := &v1alpha1.ReplicatedVolume{}
	if c.Get(ctx, client.ObjectKey{Name: f.v.Spec.ReplicaOf}, whole) != nil {
		return // the text before is still true
	}
	if !slices.Contains(whole.Spec.Legs, f.v.Name) {
		f.legs = "another replica has everything; this one is being deleted"
		return
	}
	for _, name := range whole.Spec.Legs {
		next := &v1alpha1.Volume{}
		if name == f.v.Name || c.Get(ctx, client.ObjectKey{Name: name}, next) != nil || next.Spec.NodeName != f.to.node {
			continue
		}
		f.legs = fmt.Sprintf("another replica is made on node %s", f.to.node)
		switch l := whole.Leg(name); {
		case l != nil && l.Current && len(whole.Spec.Legs) <= whole.Spec.Replicas: // it has taken the place of another one, which was to move there as well
			f.legs = fmt.Sprintf("node %s has another replica of its volume by now, so it stays: take this move back, and have it move to another node", f.to.node)
		case l != nil && l.Message != "":
			f.legs = fmt.Sprintf("another replica on node %s: %s", f.to.node, l.Message)
		}
	}
}

// stageOfLegs is stageOf for a leg that is replaced.
func (f *followed) stageOfLegs() (kind, text string, done bool, err error) {
	if f.replaced {
		return "", "another replica has taken its place", true, nil
	}
	text = cmp.Or(f.legs, fmt.Sprintf("used on %s; the volume is to get another replica on node %s, and does without this one when that has everything", f.user(), f.to.node))
	kind, _, _ = strings.Cut(text, ": ")
	return kind, text, false, nil
}

// shown returns a volume as the overview has it; for a leg, the volume that it is of.
func shown(o *overview.Overview, v *v1alpha1.Volume) *overview.Volume {
	for i := range o.Volumes {
		if seen := &o.Volumes[i]; seen.ID == v.ID() || v.Spec.ReplicaOf != "" && keyOf(seen.ID) == v.Spec.ReplicaOf {
			return seen
		}
	}
	return &overview.Volume{ID: v.ID(), Name: cmp.Or(v.Spec.ReplicaOf, v.Spec.Name)} // made after the overview was taken
}

// findMoved returns the volume that a name is for. Of a volume with several legs it is the leg on node from. Each leg but the first also has a key and an ID of
// its own; those of the first are those of the volume.
func (c *cluster) findMoved(ctx context.Context, o *overview.Overview, name, from string) (*overview.Volume, *v1alpha1.Volume, error) {
	v := &v1alpha1.Volume{}
	if err := c.Get(ctx, client.ObjectKey{Name: keyOf(name)}, v); err == nil && v.Spec.ReplicaOf != "" && v.Spec.ReplicaOf != v.Name && (name == v.Name || name == v.ID()) {
		return shown(o, v), v, comesFrom(v, from)
	}
	seen, err := cli.Find(o, name)
	if err != nil {
		return nil, nil, err
	}
	var all v1alpha1.VolumeList
	v = &v1alpha1.Volume{}
	if err = c.Get(ctx, client.ObjectKey{Name: keyOf(seen.ID)}, v); err == nil && v.Spec.ReplicaOf == "" {
		return seen, v, comesFrom(v, from)
	}
	if client.IgnoreNotFound(err) == nil {
		err = errors.Join(err, c.List(ctx, &all))
	}
	var on []string
	for i := range all.Items {
		leg := &all.Items[i]
		if leg.Spec.ReplicaOf != keyOf(seen.ID) {
			continue
		}
		if from != "" && comesFrom(leg, from) == nil {
			return seen, leg, nil
		}
		on = append(on, leg.Spec.NodeName)
	}
	slices.Sort(on)
	switch {
	case len(on) == 0:
		return nil, nil, fmt.Errorf("read volume %s: %w", seen.ID, err)
	case from != "":
		return nil, nil, fmt.Errorf("%s has no replica on node %s; it has some on %s", cli.Title(seen), from, strings.Join(on, ", "))
	}
	return nil, nil, fmt.Errorf("%s has replicas; say which one is to move, with --from NODE: there is one on %s", cli.Title(seen), strings.Join(on, ", "))
}

// comesFrom returns an error unless o is on a node, or has just moved from there, or no node is given.
func comesFrom(o mobile, node string) error {
	if m, _ := o.Moves(); node == "" || node == o.Node() || m != nil && m.Left && m.Node == node {
		return nil
	}
	return fmt.Errorf("--from %s: it is on node %s", node, o.Node())
}

// called returns the arguments of move that select a volume or a leg. The first leg has the ID of its volume, so it needs --from.
func called(v *v1alpha1.Volume) string {
	if v.Spec.ReplicaOf == v.Name {
		return v.ID() + " --from " + v.Spec.NodeName
	}
	return v.ID()
}
