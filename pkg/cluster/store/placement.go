package store

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/internal/poolset"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/liveness"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// room is a pool of a node, and what can still be promised of it.
type room struct {
	*v1alpha1.Pool
	volume.Room

	counted bool // see count; else there may be less, and more peers
}

// encrypts reports whether a volume of the pool can have an encryption.
func (r room) encrypts(scheme volume.Scheme) bool {
	return scheme == volume.NotEncrypted || slices.Contains(r.Status.Encryption, string(scheme))
}

// limits reports whether a volume of the pool can have some mutable parameters, as far as its node says.
func (r room) limits(mutable map[string]string) bool {
	return r.Status.Limits == nil || *r.Status.Limits || !volume.Limited(mutable)
}

// findRoom returns the pools of a set (poolset.Set), or with the empty one the default pools, of some nodes, or with
// none of all; ErrInvalid if no node at all has such a pool. They are counted (countAll): that takes the longer the more volumes the nodes have,
// so nobody should ask for nodes that do not matter.
func (s *Store) findRoom(ctx context.Context, set string, nodes []string, of volume.Requester) ([]room, error) {
	found, err := s.rooms(ctx, set, nodes)
	if err != nil {
		return nil, err
	}
	return found, s.countAll(ctx, found, of)
}

// rooms is findRoom, but with what the pools themselves say: they are not counted.
func (s *Store) rooms(ctx context.Context, set string, nodes []string) ([]room, error) {
	if err := s.Ready(ctx); err != nil {
		return nil, err
	}
	pools, known, err := s.poolsOf(ctx, set, nodes)
	if err != nil {
		return nil, err
	}
	if !known {
		if err := s.told(ctx); err != nil {
			return nil, err
		}
		return nil, fmt.Errorf("%w: parameter pool=%q: no node has such a pool", errdefs.ErrInvalid, set)
	}
	var found []room
	for _, p := range pools {
		r := room{Pool: p, Room: volume.Room{Pool: p.Spec.Pool, Capacity: blockdev.Capacity{Total: p.Status.Total, Promised: p.Status.Promised, Used: p.Status.Used,
			Available: p.Status.Available, MaxVolume: p.Status.MaxVolume, MinVolume: p.Status.MinVolume}}}
		if r.Worst = worst(p); !r.Usable() {
			r.Available, r.MaxVolume = 0, 0
		}
		found = append(found, r)
	}
	return found, nil
}

// countAll counts all of some pools.
func (s *Store) countAll(ctx context.Context, rooms []room, of volume.Requester) error {
	for i := range rooms {
		if rooms[i].counted {
			continue
		}
		if err := s.count(ctx, rooms, rooms[i].Spec.NodeName, of); err != nil {
			return err
		}
	}
	return nil
}

// worst is the severity of the worst of what is wrong with a pool; 0: nothing is known.
func worst(p *v1alpha1.Pool) blockdev.Severity { return worstOf(cluster.ToProblems(p.Status.Health)) }

// poolsOf returns the pools of a set of some nodes, or with none of all. known: there are some on any node.
func (s *Store) poolsOf(ctx context.Context, set string, nodes []string) (found []*v1alpha1.Pool, known bool, err error) {
	var pools v1alpha1.PoolList
	options := []client.ListOption{client.UnsafeDisableDeepCopy}
	if one, is := poolset.Set(set).One(); is {
		options = append(options, client.MatchingFields{byPool: one})
	}
	if err := s.kube.Client.List(ctx, &pools, options...); err != nil {
		return nil, false, kube.APIError("list pools", err)
	}
	defaults := map[string]int{} // where in found the default pool of a node is
	for i := range pools.Items {
		p := &pools.Items[i]
		if (set == "" && !p.Spec.Default) || (set != "" && !poolset.Set(set).Has(p.Spec.Pool)) || cluster.DriverOf(p) != s.driver {
			continue
		}
		known = true
		if len(nodes) > 0 && !slices.Contains(nodes, p.Spec.NodeName) {
			continue
		}
		at, twice := defaults[p.Spec.NodeName]
		switch {
		case set != "" || !twice:
			defaults[p.Spec.NodeName] = len(found)
			found = append(found, p)
		case preferredDefault(p, found[at]):
			found[at] = p
		}
	}
	return found, known, nil
}

// preferredDefault reports whether of two default pools of a node the first is the one that counts. A node
// has one; but if it is now started with another, and does not get to say so of the one before, there are
// two objects: the last word is that of the agent that measured last.
func preferredDefault(a, b *v1alpha1.Pool) bool {
	configured := func(p *v1alpha1.Pool) bool {
		healthy := meta.FindStatusCondition(p.Status.Conditions, v1alpha1.Healthy)
		return healthy == nil || healthy.Reason != cluster.ReasonNotConfigured
	}
	if configured(a) != configured(b) {
		return configured(a)
	}
	return b.Status.Measured != nil && (a.Status.Measured == nil || a.Status.Measured.After(b.Status.Measured.Time))
}

// count takes off what those of some pools that are of one node have to offer what was promised of them that their figures do not have yet (what was made or is
// being made since they were measured, and what moves there), and counts the volumes that are peers of one.
func (s *Store) count(ctx context.Context, rooms []room, node string, of volume.Requester) error {
	var volumes v1alpha1.VolumeList
	var snapshots v1alpha1.SnapshotList
	onNode := client.MatchingFields{cluster.ByNode: node}
	if err := s.kube.Client.List(ctx, &volumes, onNode, client.UnsafeDisableDeepCopy); err != nil {
		return kube.APIError("list volumes", err)
	}
	if err := s.kube.Client.List(ctx, &snapshots, onNode, client.UnsafeDisableDeepCopy); err != nil {
		return kube.APIError("list snapshots", err)
	}
	coming, err := s.coming(ctx, node)
	if err != nil {
		return err
	}
	for i := range rooms {
		r := &rooms[i]
		if r.Spec.NodeName != node {
			continue
		}
		later := func(pool string, status *v1alpha1.ObjectStatus) bool {
			return pool == r.Spec.Pool && (status.Created == nil || r.Status.Measured == nil || status.Created.After(r.Status.Measured.Time))
		}
		promised := coming[r.Spec.Pool]
		for i := range volumes.Items {
			v := &volumes.Items[i]
			if v.Spec.Pool != r.Spec.Pool {
				continue
			}
			if later(v.Spec.Pool, v.Common()) {
				promised += cluster.Keeps(v)
			} else {
				promised += max(0, v.Spec.Size-v.Status.Size) // it is growing
			}
			if !v1alpha1.Going(v) && cluster.RequesterOf(v).PeerOf(of) {
				r.Peers++
			}
		}
		for i := range snapshots.Items {
			if s := &snapshots.Items[i]; later(s.Spec.Pool, s.Common()) {
				promised += cluster.SnapshotKeeps(s)
			}
		}
		left := max(0, r.Available-promised)
		r.Promised, r.Available, r.MaxVolume, r.counted = r.Promised+r.Available-left, left, max(0, r.MaxVolume-promised), true
	}
	return nil
}

// coming is how many bytes the pools of a node are to have of what moves there, by their names, as long as its copy has not begun: from then on the pool has it.
func (s *Store) coming(ctx context.Context, node string) (map[string]int64, error) {
	var volumes v1alpha1.VolumeList
	var snapshots v1alpha1.SnapshotList
	for _, list := range []client.ObjectList{&volumes, &snapshots} {
		if err := s.kube.Client.List(ctx, list, client.MatchingFields{cluster.ByMove: node}, client.UnsafeDisableDeepCopy); err != nil {
			return nil, kube.APIError("list what moves to node "+node, err)
		}
	}
	bytes := map[string]int64{}
	for i := range volumes.Items {
		v := &volumes.Items[i]
		if !isToCome(v) {
			continue
		}
		if succeeded, err := s.isSucceeded(ctx, v); err != nil {
			return nil, err
		} else if !succeeded {
			bytes[v.MovePool()] += cluster.Keeps(v)
		}
	}
	for i := range snapshots.Items {
		if s := &snapshots.Items[i]; isToCome(s) {
			bytes[s.Spec.Pool] += cluster.SnapshotKeeps(s)
		}
	}
	return bytes, nil
}

// isToCome reports whether something that moves, or has moved, is still to be copied, and its copy has not begun.
func isToCome(o cluster.Object) bool {
	m, now := o.Moves()
	return m != nil && !m.Left && (now == nil || now.Node != m.Node || now.Pool != m.Pool || now.Progress == nil && now.Copied == nil)
}

// isSucceeded reports whether something that moves is a leg whose bytes stay where they are, as its volume is used: another leg is made where it is to go (package replicator), which has room there as any new volume.
func (s *Store) isSucceeded(ctx context.Context, v *v1alpha1.Volume) (bool, error) {
	if v.Spec.ReplicaOf == "" {
		return false, nil
	}
	r := &v1alpha1.ReplicatedVolume{}
	err := s.kube.Client.Get(ctx, client.ObjectKey{Name: v.Spec.ReplicaOf}, r)
	return r.Spec.Claim != nil, kube.APIError("read replicated volume "+v.Spec.ReplicaOf, client.IgnoreNotFound(err))
}

// schedule chooses the node and pool of a new volume: of the nodes that are allowed the first
// that has room; of any, the one with most; on it, the pool that volume.Room says. Those in refused are not chosen. If none seems to have room, the best one is
// asked all the same: its figures may be old, and the node's answer is not. Where there is a
// choice, nobody has looked yet at whether pods may run on the node: nodes that are cordoned are
// not taken, and those with taints that keep pods off are the last.
func (s *Store) schedule(ctx context.Context, spec volume.Spec, size int64, refused refusals) (best room, err error) {
	found, err := s.rooms(ctx, spec.Pool, spec.Nodes)
	if err == nil && spec.Spread != volume.NoSpread { // then it counts where peers are, and not only which of those that fit is best
		err = s.countAll(ctx, found, spec.For)
	}
	if err != nil {
		return room{}, err
	}
	fit, nodes, unfit, err := s.fitting(ctx, spec, found, refused)
	if err != nil {
		return room{}, err
	}
	if len(fit) == 0 {
		if unfit == nil {
			return room{}, fmt.Errorf("%w: no pool %q on any of the nodes %v", errdefs.ErrNoSpace, spec.Pool, spec.Nodes)
		}
		slices.Sort(unfit)
		unfit = slices.Compact(unfit) // of several pools of a node
		return room{}, fmt.Errorf("%w: no node can make it: %s", errdefs.ErrNoSpace, cluster.Limited(strings.Join(unfit, "; ")))
	}
	better := func(a, b room) int {
		return cmp.Or(volume.TrueFirst(a.Fits(size), b.Fits(size)), volume.TrueFirst(!keepsPodsOff(nodes[a.Spec.NodeName]), !keepsPodsOff(nodes[b.Spec.NodeName])),
			cmp.Compare(slices.Index(spec.Nodes, a.Spec.NodeName), slices.Index(spec.Nodes, b.Spec.NodeName)),
			a.Compare(b.Room, size), cmp.Compare(a.Spec.NodeName, b.Spec.NodeName))
	}
	// To be counted makes no pool better. So one that is the best once it is counted is the best of all, and what all nodes have is not counted each time.
	for {
		best := slices.MinFunc(fit, better)
		if best.counted {
			return best, nil
		}
		if err := s.count(ctx, fit, best.Spec.NodeName, volume.Requester{}); err != nil {
			return room{}, err
		}
	}
}

// fitting returns those of some pools that may have a new volume, whether they have room or not, their nodes, and why others may not.
func (s *Store) fitting(ctx context.Context, spec volume.Spec, found []room, refused refusals) (fit []room, nodes map[string]*corev1.Node, unfit []string, err error) {
	nodes = map[string]*corev1.Node{} // nil: it is not to be taken
	why := func(name, why string) { nodes[name], unfit = nil, append(unfit, why) }
	for _, r := range found {
		name := r.Spec.NodeName
		if _, judged := nodes[name]; !judged {
			if err := s.nodes.Ready(ctx, name); err != nil {
				why(name, err.Error())
			} else if node, err := s.node(ctx, name); err != nil {
				return nil, nil, nil, err
			} else if nodes[name] = node; node.Spec.Unschedulable && len(spec.Nodes) != 1 {
				why(name, fmt.Sprintf("node %s is cordoned", name))
			}
		}
		switch {
		case nodes[name] == nil:
		case refused.has(r.Name):
			unfit = append(unfit, refused[r.Name].Error())
		case !r.encrypts(spec.Encryption.Scheme):
			unfit = append(unfit, fmt.Sprintf("node %s cannot encrypt (parameter encryption=%s): driver doctor there says what is missing", name, spec.Encryption.Scheme))
		case !r.limits(spec.Mutable):
			unfit = append(unfit, fmt.Sprintf("node %s cannot keep limits of I/O: driver doctor there says what is missing", name))
		case spec.Access == volume.AccessAny && r.Status.Network == nil:
			unfit = append(unfit, fmt.Sprintf("node %s %s", name, unreached))
		case !spec.Spread.Allows(r.Peers):
			unfit = append(unfit, fmt.Sprintf("pool %s has a volume of the same StatefulSet (parameter spread=%s)", r.Name, spec.Spread))
		default:
			fit = append(fit, r)
		}
	}
	return fit, nodes, unfit, nil
}

// unreached says of a node that it cannot have a volume that others are to use.
const unreached = "reaches no other node (parameter access=any): its driver has no --remote-address, or its kernel no NVMe over TCP"

// refusals are the names of pools that a volume is not to be in: they have refused it, or it is to be elsewhere; and why.
type refusals map[string]error

func (r refusals) has(pool string) bool { return r[pool] != nil }

// keepsPodsOff reports whether a node has taints that pods have to tolerate to run there.
func keepsPodsOff(node *corev1.Node) bool {
	return slices.ContainsFunc(node.Spec.Taints, func(t corev1.Taint) bool {
		return t.Effect == corev1.TaintEffectNoSchedule || t.Effect == corev1.TaintEffectNoExecute
	})
}

// NodesIn: see volume.Store. In which network a node is, its pools say: its label may be one of before.
func (s *Store) NodesIn(ctx context.Context, segments map[string]string) ([]string, error) {
	networks, err := s.Networks(ctx)
	if err != nil {
		return nil, err
	}
	labels := maps.Clone(segments)
	network, asked := labels[v1alpha1.NetworkKey]
	delete(labels, v1alpha1.NetworkKey)
	var nodes corev1.NodeList
	if err := s.kube.Cache.List(ctx, &nodes, client.MatchingLabels(labels), client.UnsafeDisableDeepCopy); err != nil {
		return nil, kube.APIError("list nodes", err)
	}
	var names []string
	for i := range nodes.Items {
		if name := nodes.Items[i].Name; !asked || network != "" && networks[name] == network {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return nil, fmt.Errorf("%w: no node is in %v", errdefs.ErrNoSpace, segments)
	}
	slices.Sort(names)
	return names, nil
}

// Networks: see volume.Reacher.
func (s *Store) Networks(ctx context.Context) (map[string]string, error) {
	if err := s.Ready(ctx); err != nil {
		return nil, err
	}
	var pools v1alpha1.PoolList
	if err := s.kube.Client.List(ctx, &pools, client.UnsafeDisableDeepCopy); err != nil {
		return nil, kube.APIError("list pools", err)
	}
	if len(pools.Items) == 0 {
		return nil, s.told(ctx)
	}
	networks := map[string]string{}
	for i := range pools.Items {
		if p := &pools.Items[i]; p.Status.Network != nil {
			networks[p.Spec.NodeName] = p.Status.Network.Name
		}
	}
	return networks, nil
}

// Mirrors: see replicator.Maker.
func (s *Store) Mirrors(ctx context.Context) func(node string) bool {
	return func(node string) bool {
		var pools v1alpha1.PoolList
		err := s.kube.Client.List(ctx, &pools, client.MatchingFields{cluster.ByNode: node}, client.UnsafeDisableDeepCopy)
		return err == nil && v1alpha1.Mirrors(pools.Items)(node)
	}
}

// Places: see volume.Reacher.
func (s *Store) Places(ctx context.Context, label string) (map[string]string, error) {
	if err := s.Ready(ctx); err != nil {
		return nil, err
	}
	var nodes corev1.NodeList
	if err := s.kube.Cache.List(ctx, &nodes, client.UnsafeDisableDeepCopy); err != nil {
		return nil, kube.APIError("list nodes", err)
	}
	places := map[string]string{}
	for i := range nodes.Items {
		if at := placeOf(&nodes.Items[i], label); at != "" && !nodes.Items[i].Spec.Unschedulable {
			places[nodes.Items[i].Name] = at
		}
	}
	return places, nil
}

// placeOf is where a node is, beside which no other replica of a volume is to be: its value of a label, or without one the node itself.
func placeOf(node *corev1.Node, label string) string {
	if label == "" {
		return node.Name
	}
	return node.Labels[label]
}

// reached reports whether a volume of a node can be used on one of some nodes, by a network that they are in.
func (s *Store) reached(ctx context.Context, spec volume.Spec, home string) (bool, error) {
	if spec.Access != volume.AccessAny {
		return false, nil
	}
	networks, err := s.Networks(ctx)
	return networks[home] != "" && slices.ContainsFunc(spec.Nodes, func(node string) bool { return networks[node] == networks[home] }), err
}

// node is the object of a node; a liveness.NodeDown if there is none.
func (s *Store) node(ctx context.Context, name string) (*corev1.Node, error) {
	node := &corev1.Node{}
	err := s.kube.Cache.Get(ctx, client.ObjectKey{Name: name}, node)
	if apierrors.IsNotFound(err) {
		return nil, &liveness.NodeDown{Why: "there is no node " + name}
	}
	return node, kube.APIError("look at node "+name, err)
}

// mayBeOn is ErrNoSpace if a volume is not to be on a node. One that other nodes can use may be there if the wanted ones can. Else a copy can be on one node only, whichever the
// scheduler has chosen for the pod that waits for it (WaitForFirstConsumer), and it has no way to know. If the
// claim is such a one, the copy is made where it can be: then the scheduler finds that its choice does not fit the
// PersistentVolume, and chooses again, for a claim that is bound. The class has to allow that node; ErrUnavailable if the class or the node is not there, of a node a liveness.NodeDown.
func (s *Store) mayBeOn(ctx context.Context, spec volume.Spec, node string) error {
	if len(spec.Nodes) == 0 || slices.Contains(spec.Nodes, node) {
		return nil
	}
	if is, err := s.reached(ctx, spec, node); is || err != nil {
		return err
	}
	refused := fmt.Errorf("%w: the volume is to be on one of the nodes %v, not on %s", errdefs.ErrNoSpace, spec.Nodes, node)
	if spec.Source == (volume.ID{}) || spec.For.Name == "" {
		return refused
	}
	pvc := &corev1.PersistentVolumeClaim{}
	err := s.kube.Live.Get(ctx, client.ObjectKey{Namespace: spec.For.Namespace, Name: spec.For.Name}, pvc)
	if apierrors.IsNotFound(err) {
		return refused
	}
	if err != nil {
		return kube.APIError("read claim "+spec.For.Namespace+"/"+spec.For.Name, err)
	}
	if pvc.Annotations[selectedNode] == "" || pvc.Spec.StorageClassName == nil || !strings.HasSuffix(spec.Name, string(pvc.UID)) {
		return refused
	}
	class := &storagev1.StorageClass{}
	err = s.kube.Live.Get(ctx, client.ObjectKey{Name: *pvc.Spec.StorageClassName}, class)
	if apierrors.IsNotFound(err) {
		return fmt.Errorf("%w: there is no StorageClass %s, which would say whether node %s may have the volume: make it again, or delete claim %s/%s", errdefs.ErrUnavailable, *pvc.Spec.StorageClassName, node, pvc.Namespace, pvc.Name)
	}
	if err != nil {
		return kube.APIError("read class "+*pvc.Spec.StorageClassName, err)
	}
	on, err := s.node(ctx, node)
	if err != nil {
		return err
	}
	if !allows(class.AllowedTopologies, on.Labels) {
		return fmt.Errorf("%w; class %s does not allow that node", refused, class.Name)
	}
	return nil
}

// selectedNode is the annotation by which the scheduler tells the provisioner where the pod of a
// claim is to run; claims that are bound at once have none.
const selectedNode = "volume.kubernetes.io/selected-node"

// allows reports whether a node has the labels of any of the terms; without terms every node has.
func allows(terms []corev1.TopologySelectorTerm, labels map[string]string) bool {
	return len(terms) == 0 || slices.ContainsFunc(terms, func(term corev1.TopologySelectorTerm) bool {
		return !slices.ContainsFunc(term.MatchLabelExpressions, func(e corev1.TopologySelectorLabelRequirement) bool {
			have, there := labels[e.Key]
			return !there || !slices.Contains(e.Values, have)
		})
	})
}

// granularity is what sizes in a pool of a node are multiples of; ErrUnavailable for one that no object tells of, as of a node that is gone.
func (s *Store) granularity(ctx context.Context, node, pool string) (int64, error) {
	var p v1alpha1.Pool
	err := s.kube.Client.Get(ctx, client.ObjectKey{Name: overview.PoolName(node, pool)}, &p)
	if apierrors.IsNotFound(err) {
		return 0, fmt.Errorf("%w: node %s does not tell of a pool %s", errdefs.ErrUnavailable, node, pool)
	}
	if err != nil {
		return 0, kube.APIError(fmt.Sprintf("read pool %s of node %s", pool, node), err)
	}
	return max(p.Status.Granularity, blockdev.Granularity), nil
}

// Capacity: see volume.Store. A node that is not ready has none.
func (s *Store) Capacity(ctx context.Context, set string, scheme volume.Scheme, node string) (blockdev.Capacity, error) {
	var nodes []string
	if node != "" {
		nodes = []string{node}
	}
	found, err := s.findRoom(ctx, set, nodes, volume.Requester{})
	if err != nil {
		return blockdev.Capacity{}, err
	}
	var all blockdev.Capacity
	for _, r := range found {
		if r.encrypts(scheme) && s.nodes.Ready(ctx, r.Spec.NodeName) == nil {
			all = all.And(r.Capacity)
		}
	}
	return scheme.Capacity(all), nil
}
