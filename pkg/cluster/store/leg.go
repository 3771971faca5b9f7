package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/liveness"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// kept returns the legs beside which a new one is placed: all that are not being deleted, but the one with a name.
func kept(legs []*v1alpha1.Volume, but string) []*v1alpha1.Volume {
	return slices.DeleteFunc(slices.Clone(legs), func(v *v1alpha1.Volume) bool { return v.Name == but || v1alpha1.Going(v) })
}

// unfitFor returns the pools that cannot have one more leg of a volume, and why. With instead the new leg takes the place of that one; leaving are the others
// that are to be replaced. All legs of a volume are in one network.
func (s *Store) unfitFor(ctx context.Context, r *v1alpha1.ReplicatedVolume, name string, leg volume.Spec, instead *v1alpha1.Volume, leaving []string) (refusals, error) {
	legs, err := s.legs(ctx, r)
	if err != nil {
		return nil, err
	}
	networks, err := s.Networks(ctx)
	if err != nil {
		return nil, err
	}
	others, network := kept(legs, name), ""
	for _, v := range others {
		network = cmp.Or(network, networks[v.Spec.NodeName])
	}
	var list corev1.NodeList
	if err := s.kube.Cache.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		return nil, kube.APIError("list nodes", err)
	}
	nodes := map[string]*corev1.Node{}
	for i := range list.Items {
		nodes[list.Items[i].Name] = &list.Items[i]
	}
	labels := func(node string) map[string]string { return cmp.Or(nodes[node], &corev1.Node{}).Labels }
	if instead != nil {
		others = stayFor(instead, kept(others, instead.Name), func(node string) string { return cmp.Or(labels(node)[r.Spec.TopologyKey], node) })
	}
	keeps := r.Spec.Size + leg.Encryption.Scheme.Overhead()
	pools, _, err := s.poolsOf(ctx, leg.Pool, nil)
	unfit := refusals{}
	for _, p := range pools {
		node, why := p.Spec.NodeName, ""
		switch {
		case network != "" && networks[node] != network:
			why = fmt.Sprintf("node %s is not in the network %q of the other replicas", node, network)
		case r.NotBeside(others, leaving, node, labels) != "":
			why = fmt.Sprintf("node %s %s", node, r.NotBeside(others, leaving, node, labels))
		case instead == nil && r.Unfit(node, time.Now()) != "":
			why = fmt.Sprintf("node %s %s", node, r.Unfit(node, time.Now()))
		case nodes[node] != nil && nodes[node].Spec.Unschedulable:
			why = fmt.Sprintf("node %s is cordoned", node)
		case p.NotInSteps(keeps) != "":
			why = p.NotInSteps(keeps)
		default:
			continue
		}
		unfit[p.Name] = errors.New(why)
	}
	return unfit, err
}

// stayFor returns the legs beside which one is placed that takes the place of instead. Others that are asked to move to the same place stay where they are: if each
// waited for the other, none would ever move.
func stayFor(instead *v1alpha1.Volume, others []*v1alpha1.Volume, place func(node string) string) []*v1alpha1.Volume {
	others = slices.Clone(others)
	for i, v := range others {
		if v.Moving() && place(v.Spec.Move.Node) == place(instead.Spec.Move.Node) {
			others[i] = v.DeepCopy()
			others[i].Spec.Move = nil
		}
	}
	return others
}

// nodeNamed returns a Node object from the cache, or one with nothing but its name if there is none.
func (s *Store) nodeNamed(ctx context.Context, name string) (*corev1.Node, error) {
	node := kube.Node(name)
	err := s.kube.Cache.Get(ctx, client.ObjectKey{Name: name}, node)
	return node, kube.APIError("look at node "+name, client.IgnoreNotFound(err))
}

// createLeg makes the leg with a name, if it is not there yet, in the first pool that has room and does not refuse it. like is a leg of the same volume.
func (s *Store) createLeg(ctx context.Context, r *v1alpha1.ReplicatedVolume, name string, like *v1alpha1.Volume) error {
	spec, unfit, err := s.planLeg(ctx, r, name, like, nil, nil)
	if err != nil {
		return err
	}
	for {
		have, err := s.createOne(ctx, spec, unfit)
		if err == nil {
			return isEncrypted(spec, cluster.ToVolume(have))
		}
		if have == nil || have.UID == "" || !volume.PassedOver(err) {
			return s.lacking(ctx, r, name, err)
		}
		unfit[overview.PoolName(have.Spec.NodeName, have.Spec.Pool)] = err
	}
}

// BeginLeg: see replicator.Maker.
func (s *Store) BeginLeg(ctx context.Context, r *v1alpha1.ReplicatedVolume, name string, like, instead *v1alpha1.Volume, leaving []string) error {
	spec, unfit, err := s.planLeg(ctx, r, name, like, instead, leaving)
	if err != nil {
		return err
	}
	now, err := s.liveReplicated(ctx, r.Name)
	if err != nil || now == nil || now.UID != r.UID || now.Going() || !slices.Contains(now.Spec.Legs, name) {
		return err // the leg is not wanted any more
	}
	w := s.hub.Open(cluster.VolumeNamed(name))
	defer w.Close()
	have, err := s.place(ctx, spec, w, name, unfit)
	var down *liveness.NodeDown
	if err == nil && have.Status.Created == nil && errors.As(s.nodes.Ready(ctx, have.Spec.NodeName), &down) {
		err = s.withdraw(ctx, have, down)
	}
	if err != nil {
		return s.lacking(ctx, r, name, err)
	}
	return nil
}

// HasRoom: see replicator.Maker.
func (s *Store) HasRoom(ctx context.Context, r *v1alpha1.ReplicatedVolume, name string, like, instead *v1alpha1.Volume, leaving []string) error {
	spec, unfit, err := s.planLeg(ctx, r, name, like, instead, leaving)
	if err == nil {
		_, err = s.plan(ctx, spec, unfit)
	}
	if err != nil {
		return s.lacking(ctx, r, name, err)
	}
	return nil
}

// planLeg returns the spec of a new leg, and the pools that cannot have it. With instead the leg is for the node and pool that that one is to move to.
func (s *Store) planLeg(ctx context.Context, r *v1alpha1.ReplicatedVolume, name string, like, instead *v1alpha1.Volume, leaving []string) (spec volume.Spec, unfit refusals, err error) {
	spec, ok := cluster.LegSpec(r, name, like)
	if !ok {
		return spec, nil, fmt.Errorf("%w: the object of volume %s names a replica %s that it never numbered", errdefs.ErrPrecondition, cluster.ReplicatedID(r), name)
	}
	if instead != nil {
		spec.Nodes, spec.Pool = []string{instead.Spec.Move.Node}, instead.MovePool()
	}
	unfit, err = s.unfitFor(ctx, r, name, spec, instead, leaving)
	return spec, unfit, err
}

// lacking adds to the error by which a leg could not be made which leg it is; to ErrNoSpace how many legs there are, and what each needs.
func (s *Store) lacking(ctx context.Context, r *v1alpha1.ReplicatedVolume, name string, err error) error {
	legs, failed := s.legs(ctx, r)
	if failed != nil || !errors.Is(err, errdefs.ErrNoSpace) {
		return fmt.Errorf("replica %s of volume %s: %w", name, cluster.ReplicatedID(r), err)
	}
	return fmt.Errorf("%s: %w", roomFor(r.Spec.Replicas, len(kept(legs, name)), r.Spec.TopologyKey), err)
}

// roomFor says in words how many places have room for a leg of a volume. A place is a node or, with key, a value of that label of nodes.
func roomFor(replicas, places int, key string) string {
	one, many, own := "node has", "nodes have", "a node"
	if key != "" {
		label := " of the label " + key + " (parameter replicaTopologyKey)"
		one, many, own = "value"+label+" has", "values"+label+" have", "one"
	}
	if places == 1 {
		many = one
	}
	return fmt.Sprintf("%d %s room for one of %d replicas, and each needs %s of its own", places, many, replicas, own)
}

func withoutLabel(node, key string) string {
	return fmt.Sprintf("node %s has no label %s (parameter replicaTopologyKey)", node, key)
}

// isFurther reports whether a volume is a leg, and not the one that is made first.
func isFurther(spec volume.Spec) bool {
	return spec.ReplicaOf != "" && spec.ReplicaOf != volume.KeyOf(spec.Name)
}

// allFitting is fitting for all pools of a spec, on any node; their room is counted.
func (s *Store) allFitting(ctx context.Context, spec volume.Spec) (fit []room, nodes map[string]*corev1.Node, unfit []string, err error) {
	found, err := s.findRoom(ctx, spec.Pool, nil, spec.For)
	if err != nil {
		return nil, nil, nil, err
	}
	return s.fitting(ctx, spec, found, nil)
}

// roomForAll returns ErrNoSpace if no network has as many places that seem to have room for a leg as a volume is to have legs. The nodes have the last word;
// but so a lack of room is found before anything is made. It returns the pools that the first leg must not be in, as there is no room for the others in
// their network.
func (s *Store) roomForAll(ctx context.Context, spec volume.Spec) (refusals, error) {
	floor, overhead := spec.MinSize(), spec.Encryption.Scheme.Overhead()
	var from source
	var err error
	if spec.Source != (volume.ID{}) {
		if from, err = s.findSource(ctx, spec.Source); err != nil {
			return nil, err
		}
		floor, spec.Pool = max(floor, from.size), cmp.Or(spec.Pool, from.pool)
	}
	size, err := spec.Size.Choose(floor, blockdev.Granularity, overhead)
	if err != nil {
		return nil, err
	}
	spec.Nodes = nil
	fit, nodes, why, err := s.allFitting(ctx, spec)
	if err != nil {
		return nil, err
	}
	key := spec.Replicas.TopologyKey
	apart, most := map[string]map[string]bool{}, 0 // by network: the places that have room
	for _, r := range fit {
		at, network := placeOf(nodes[r.Spec.NodeName], key), r.Status.Network.Name
		switch {
		case at == "":
			why = append(why, withoutLabel(r.Spec.NodeName, key))
		case !r.Fits(size + overhead):
			why = append(why, fmt.Sprintf("pool %s has no room", r.Name))
		default:
			if apart[network] == nil {
				apart[network] = map[string]bool{}
			}
			apart[network][at] = true
			most = max(most, len(apart[network]))
		}
	}
	if most < spec.Replicas.Count {
		slices.Sort(why)
		return nil, fmt.Errorf("%w: %s: %s", errdefs.ErrNoSpace, roomFor(spec.Replicas.Count, most, key), cluster.Limited(strings.Join(slices.Compact(why), "; ")))
	}
	unfit := refusals{}
	judge := func(pool string, node *corev1.Node, network string) {
		if placeOf(node, key) == "" {
			unfit[pool] = errors.New(withoutLabel(node.Name, key))
		} else if n := len(apart[network]); n < spec.Replicas.Count && network != "" {
			unfit[pool] = fmt.Errorf("node %s is in the network %q, where %s", node.Name, network, roomFor(spec.Replicas.Count, n, key))
		}
	}
	for _, r := range fit {
		judge(r.Name, nodes[r.Spec.NodeName], r.Status.Network.Name)
	}
	if from.node == "" {
		return unfit, nil
	}
	// A copy may be in the pool of its source even if no new volume may: on a node that is cordoned, in a pool that is not of the set.
	home, err := s.nodeNamed(ctx, from.node)
	if err != nil {
		return nil, err
	}
	networks, err := s.Networks(ctx)
	judge(overview.PoolName(home.Name, from.pool), home, networks[home.Name])
	return unfit, err
}

// poolsOfLegs returns the set of pools (poolset.Set) that the legs of a volume may be in.
func poolsOfLegs(spec volume.Spec, first *v1alpha1.Volume) string {
	if spec.Pool == "" && spec.Source != (volume.ID{}) { // a copy that names no pool has its first leg in the pool of its source
		return first.Spec.Pool
	}
	return spec.Pool
}

// commonStep returns the smallest number of bytes that is a multiple of the granularity of all pools of a set, so that each of them can have a leg of any
// multiple of it.
func (s *Store) commonStep(ctx context.Context, set string) (int64, error) {
	pools, _, err := s.poolsOf(ctx, set, nil)
	step := int64(blockdev.Granularity)
	for _, p := range pools {
		step = multiple(step, max(p.Status.Granularity, 1))
	}
	return step, err
}

// multiple returns the least common multiple of two positive numbers.
func multiple(a, b int64) int64 {
	x, y := a, b
	for y != 0 {
		x, y = y, x%y
	}
	return a / x * b
}
