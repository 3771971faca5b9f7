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

// room is a pool of a node, and how much of it can still be promised.
type room struct {
	*v1alpha1.Pool
	volume.Room

	counted bool // by count; otherwise there may be less room, and more peers
}

// encrypts reports whether volumes of the pool can be encrypted by a scheme.
func (r room) encrypts(scheme volume.Scheme) bool {
	return scheme == volume.NotEncrypted || slices.Contains(r.Status.Encryption, string(scheme))
}

// limits reports whether the node can enforce the limits in some mutable parameters. It is true for a node that does not say (status.limits).
func (r room) limits(mutable map[string]string) bool {
	return r.Status.Limits == nil || *r.Status.Limits || !volume.Limited(mutable)
}

// lacks reports whether the pool's figures do not have a volume or snapshot of the pool yet. What takes long to be made they have since it was begun. What is
// refused takes no room: the volume of an object that was restored, and whose bytes are lost, is never made.
func (r room) lacks(o cluster.Object) bool {
	status := o.Common()
	switch measured := r.Status.Measured; {
	case status.Created == nil && status.Refused(o.GetGeneration()) != nil:
		return false
	case measured == nil:
		return true
	case status.Created == nil:
		return status.Progress == nil
	default:
		return status.Created.After(measured.Time)
	}
}

// promised returns how many bytes of a volume of the pool its figures do not have yet: all of it, or those by which it grows.
func (r room) promised(v *v1alpha1.Volume) int64 {
	switch {
	case r.lacks(v):
		return v.Keeps()
	case v.Status.Created == nil:
		return 0
	}
	return max(0, v.Spec.Size-v.Status.Size)
}

// findRoom returns the pools of a set (poolset.Set), or of the empty set the default pools, on some nodes, or with no nodes on all. ErrInvalid if no node has
// such a pool. All are counted (countAll), which takes time in proportion to the volumes of these nodes: nodes should name only those that matter.
func (s *Store) findRoom(ctx context.Context, set string, nodes []string, of volume.Requester) ([]room, error) {
	found, err := s.rooms(ctx, set, nodes)
	if err != nil {
		return nil, err
	}
	return found, s.countAll(ctx, found, of)
}

// rooms is findRoom without countAll: the figures are those that the pools have reported.
func (s *Store) rooms(ctx context.Context, set string, nodes []string) ([]room, error) {
	if err := s.Ready(ctx); err != nil {
		return nil, err
	}
	pools, known, err := s.poolsOf(ctx, set, nodes)
	if err != nil {
		return nil, err
	}
	if !known {
		if err := s.reported(ctx); err != nil {
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

// countAll counts all pools that are not counted yet (count).
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

// worst returns the severity of a pool's worst problem; 0: none is reported.
func worst(p *v1alpha1.Pool) blockdev.Severity { return worstOf(cluster.ToProblems(p.Status.Health)) }

// poolsOf returns the pools of a set on some nodes, or with no nodes on all. known reports whether any node has such a pool.
func (s *Store) poolsOf(ctx context.Context, set string, nodes []string) (found []*v1alpha1.Pool, known bool, err error) {
	var pools v1alpha1.PoolList
	options := []client.ListOption{client.UnsafeDisableDeepCopy}
	if one, is := poolset.Set(set).One(); is {
		options = append(options, client.MatchingFields{byPool: one})
	}
	if err := s.kube.Client.List(ctx, &pools, options...); err != nil {
		return nil, false, kube.APIError("list pools", err)
	}
	defaults := map[string]int{} // by node: the index in found of its default pool
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

// preferredDefault reports whether a rather than b is the default pool of a node. A node has one; but if its agent was started with another one and could not
// write that into the object of the first, two objects say so. Then the one counts that is configured, and of two such ones the one measured last.
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

// count corrects the figures of the rooms of one node, and marks them as counted. It takes off what is promised of a pool since it was measured: volumes and
// snapshots that are made or being made, growth, and what moves there. It also counts the volumes that are peers of the requester.
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
		promised := coming[r.Spec.Pool]
		for i := range volumes.Items {
			v := &volumes.Items[i]
			if v.Spec.Pool != r.Spec.Pool {
				continue
			}
			promised += r.promised(v)
			if !v1alpha1.Going(v) && cluster.RequesterOf(v).PeerOf(of) {
				r.Peers++
			}
		}
		for i := range snapshots.Items {
			if s := &snapshots.Items[i]; s.Spec.Pool == r.Spec.Pool && r.lacks(s) {
				promised += s.Keeps()
			}
		}
		left := max(0, r.Available-promised)
		r.Promised, r.Available, r.MaxVolume, r.counted = r.Promised+r.Available-left, left, max(0, r.MaxVolume-promised), true
	}
	return nil
}

// coming returns, by pool of a node, how many bytes are to move there and are not copied yet (v1alpha1.Move.IsToCome).
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
		if !v.Spec.Move.IsToCome(v.Status.Move) {
			continue
		}
		if succeeded, err := s.isSucceeded(ctx, v); err != nil {
			return nil, err
		} else if !succeeded {
			bytes[v.MovePool()] += v.Keeps()
		}
	}
	for i := range snapshots.Items {
		if s := &snapshots.Items[i]; s.Spec.Move.IsToCome(s.Status.Move) {
			bytes[s.Spec.Pool] += s.Keeps()
		}
	}
	return bytes, nil
}

// isSucceeded reports whether a volume that is to move is a leg of a volume in use. Its bytes do not move: a successor is made on the other node (package
// replicator), which is counted like any new volume.
func (s *Store) isSucceeded(ctx context.Context, v *v1alpha1.Volume) (bool, error) {
	if v.Spec.ReplicaOf == "" {
		return false, nil
	}
	r := &v1alpha1.ReplicatedVolume{}
	err := s.kube.Client.Get(ctx, client.ObjectKey{Name: v.Spec.ReplicaOf}, r)
	return r.Spec.Claim != nil, kube.APIError("read replicated volume "+v.Spec.ReplicaOf, client.IgnoreNotFound(err))
}

// schedule chooses the node and pool of a new volume of size bytes. In this order it prefers
//
//   - pools that seem to have room;
//   - nodes without taints that keep pods off;
//   - nodes that come first in spec.Nodes;
//   - pools by volume.Room (Compare).
//
// Pools in refused are not chosen. Nor are nodes that are cordoned, if there is a choice of nodes: then no pod was scheduled yet. If no pool seems to have
// room, the best is returned all the same: its figures may be old, and the node decides. ErrNoSpace if no pool can have the volume.
func (s *Store) schedule(ctx context.Context, spec volume.Spec, size int64, refused refusals) (best room, err error) {
	found, err := s.rooms(ctx, spec.Pool, spec.Nodes)
	if err == nil && spec.Spread != volume.NoSpread { // fitting then needs the peers of all pools
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
		unfit = slices.Compact(unfit) // several pools of a node have the same reason
		return room{}, fmt.Errorf("%w: no node can make it: %s", errdefs.ErrNoSpace, cluster.Limited(strings.Join(unfit, "; ")))
	}
	better := func(a, b room) int {
		return cmp.Or(volume.TrueFirst(a.Fits(size), b.Fits(size)), volume.TrueFirst(!keepsPodsOff(nodes[a.Spec.NodeName]), !keepsPodsOff(nodes[b.Spec.NodeName])),
			cmp.Compare(slices.Index(spec.Nodes, a.Spec.NodeName), slices.Index(spec.Nodes, b.Spec.NodeName)),
			a.Compare(b.Room, size), cmp.Compare(a.Spec.NodeName, b.Spec.NodeName))
	}
	// Counting makes no pool better. So a pool that is counted and still the best is the best of all, and not all nodes have to be counted.
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

// fitting returns the pools that may have a new volume, whether they have room or not, and their nodes. unfit says why the other pools may not.
func (s *Store) fitting(ctx context.Context, spec volume.Spec, found []room, refused refusals) (fit []room, nodes map[string]*corev1.Node, unfit []string, err error) {
	nodes = map[string]*corev1.Node{} // nil: the node was judged, and cannot be taken
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

// unreached is why a node cannot have a volume with access any.
const unreached = "reaches no other node (parameter access=any): its driver has no --remote-address, or its kernel no NVMe over TCP"

// refusals are the pools that a volume must not be in, by the names of their objects, and why: they have refused it, or it has to be elsewhere.
type refusals map[string]error

func (r refusals) has(pool string) bool { return r[pool] != nil }

// keepsPodsOff reports whether a node has taints that pods have to tolerate to run there.
func keepsPodsOff(node *corev1.Node) bool {
	return slices.ContainsFunc(node.Spec.Taints, func(t corev1.Taint) bool {
		return t.Effect == corev1.TaintEffectNoSchedule || t.Effect == corev1.TaintEffectNoExecute
	})
}

// NodesIn: see volume.Store. In which network a node is, its pools say: the label of the node may be out of date.
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
		return nil, s.reported(ctx)
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

// Works: see replicator.Maker.
func (s *Store) Works(ctx context.Context, node string) bool { return s.nodes.Ready(ctx, node) == nil }

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

// placeOf returns the place of a node: its value of a label, or with an empty label its name. No two legs of a volume are in one place.
func placeOf(node *corev1.Node, label string) string {
	if label == "" {
		return node.Name
	}
	return node.Labels[label]
}

// reached reports whether a volume with access any, with its home on a node, can be used on one of spec.Nodes: that is in the network of home.
func (s *Store) reached(ctx context.Context, spec volume.Spec, home string) (bool, error) {
	if spec.Access != volume.AccessAny {
		return false, nil
	}
	networks, err := s.Networks(ctx)
	return networks[home] != "" && slices.ContainsFunc(spec.Nodes, func(node string) bool { return networks[node] == networks[home] }), err
}

// node returns the object of a node from the cache; the error is a liveness.NodeDown if there is none.
func (s *Store) node(ctx context.Context, name string) (*corev1.Node, error) {
	node := &corev1.Node{}
	err := s.kube.Cache.Get(ctx, client.ObjectKey{Name: name}, node)
	if apierrors.IsNotFound(err) {
		return nil, &liveness.NodeDown{Why: "there is no node " + name}
	}
	return node, kube.APIError("look at node "+name, err)
}

// mayBeOn returns ErrNoSpace if a volume may not be on a node. It may be on a node of spec.Nodes; with access any also on a node from which one of these
// reaches it. Besides, a copy whose claim has a selected node (WaitForFirstConsumer) may be on the node of its source, if the class allows that: the
// scheduler did not know where the source is, finds that the PersistentVolume does not fit, and places the pod again. ErrUnavailable if the class is not
// there; a liveness.NodeDown if the node is not.
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

// selectedNode is the annotation of a claim by which the scheduler tells the provisioner where the pod is to run. Claims that are bound at once have none.
const selectedNode = "volume.kubernetes.io/selected-node"

// allows reports whether labels match any of the terms. Without terms all labels do.
func allows(terms []corev1.TopologySelectorTerm, labels map[string]string) bool {
	return len(terms) == 0 || slices.ContainsFunc(terms, func(term corev1.TopologySelectorTerm) bool {
		return !slices.ContainsFunc(term.MatchLabelExpressions, func(e corev1.TopologySelectorLabelRequirement) bool {
			have, there := labels[e.Key]
			return !there || !slices.Contains(e.Values, have)
		})
	})
}

// granularity returns of which number of bytes all sizes in a pool are multiples; ErrUnavailable if the pool has no object, as its node is gone.
func (s *Store) granularity(ctx context.Context, node, pool string) (int64, error) {
	var p v1alpha1.Pool
	err := s.kube.Client.Get(ctx, client.ObjectKey{Name: overview.PoolName(node, pool)}, &p)
	if apierrors.IsNotFound(err) {
		return 0, fmt.Errorf("%w: node %s reports no pool %s", errdefs.ErrUnavailable, node, pool)
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
