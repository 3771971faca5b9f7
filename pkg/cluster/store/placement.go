package store

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// room is a pool, and what can still be promised of it.
type room struct {
	*v1alpha1.Pool
	available, maxVolume int64
}

// findRoom returns the pools of a name, or with none the default pools, of some nodes, or with
// none of all; ErrInvalid if no node at all has such a pool. What was made or is being made
// since a pool was measured is taken off: that takes the longer the more volumes the node has,
// so nobody should ask for nodes that do not matter.
func (s *Store) findRoom(ctx context.Context, pool string, nodes []string) (map[string]room, error) {
	if err := s.Ready(ctx); err != nil {
		return nil, err
	}
	var pools v1alpha1.PoolList
	options := []client.ListOption{client.UnsafeDisableDeepCopy}
	if pool != "" {
		options = append(options, client.MatchingFields{byPool: pool})
	}
	if err := s.kube.Client.List(ctx, &pools, options...); err != nil {
		return nil, kube.APIError("list pools", err)
	}
	found := map[string]room{}
	known := false
	for i := range pools.Items {
		p := &pools.Items[i]
		if (pool == "" && !p.Spec.Default) || cluster.DriverOf(p) != s.driver {
			continue
		}
		known = true
		if len(nodes) > 0 && !slices.Contains(nodes, p.Spec.NodeName) {
			continue
		}
		if have, twice := found[p.Spec.NodeName]; !twice || preferredDefault(p, have.Pool) {
			found[p.Spec.NodeName] = room{Pool: p}
		}
	}
	for name, r := range found {
		promised, err := s.unmeasured(ctx, r.Pool)
		if err != nil {
			return nil, err
		}
		r.available, r.maxVolume = max(0, r.Status.Available-promised), max(0, r.Status.MaxVolume-promised)
		found[name] = r
	}
	if !known {
		return nil, fmt.Errorf("%w: parameter pool=%q: no node has such a pool", errdefs.ErrInvalid, pool)
	}
	return found, nil
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

// unmeasured is how much was promised of a pool that its figures do not have yet.
func (s *Store) unmeasured(ctx context.Context, p *v1alpha1.Pool) (int64, error) {
	later := func(pool string, status *v1alpha1.ObjectStatus) bool {
		return pool == p.Spec.Pool && (status.Created == nil || p.Status.Measured == nil || status.Created.After(p.Status.Measured.Time))
	}
	var volumes v1alpha1.VolumeList
	var snapshots v1alpha1.SnapshotList
	onNode := client.MatchingFields{byNode: p.Spec.NodeName}
	if err := s.kube.Client.List(ctx, &volumes, onNode, client.UnsafeDisableDeepCopy); err != nil {
		return 0, kube.APIError("list volumes", err)
	}
	if err := s.kube.Client.List(ctx, &snapshots, onNode, client.UnsafeDisableDeepCopy); err != nil {
		return 0, kube.APIError("list snapshots", err)
	}
	var promised int64
	for i := range volumes.Items {
		if v := &volumes.Items[i]; later(v.Spec.Pool, v.Common()) {
			promised += v.Spec.Size
		} else if v.Spec.Pool == p.Spec.Pool {
			promised += max(0, v.Spec.Size-v.Status.Size) // it is growing
		}
	}
	for i := range snapshots.Items {
		if s := &snapshots.Items[i]; later(s.Spec.Pool, s.Common()) {
			promised += s.Status.Size
		}
	}
	return promised, nil
}

// schedule chooses the node and pool of a new volume: of the nodes that are allowed the first
// that has room; of any, the one with most. If none seems to have room, the best one is
// asked all the same: its figures may be old, and the node's answer is not. Where there is a
// choice, nobody has looked yet at whether pods may run on the node: nodes that are cordoned are
// not taken, and those with taints that keep pods off are the last.
func (s *Store) schedule(ctx context.Context, pool string, nodes []string, size int64) (node, in string, err error) {
	found, err := s.findRoom(ctx, pool, nodes)
	if err != nil {
		return "", "", err
	}
	type candidate struct {
		room
		full, tainted bool
	}
	var fit []candidate
	var unfit []string
	for name, r := range found {
		var node corev1.Node
		if err := s.nodes.Ready(ctx, name); err != nil {
			unfit = append(unfit, err.Error())
			continue
		} else if err := s.kube.Cache.Get(ctx, client.ObjectKey{Name: name}, &node); err != nil {
			return "", "", kube.APIError("look at node "+name, err)
		}
		if node.Spec.Unschedulable && len(nodes) != 1 {
			unfit = append(unfit, fmt.Sprintf("node %s is cordoned", name))
			continue
		}
		fit = append(fit, candidate{r, r.maxVolume < size, keepsPodsOff(&node)})
	}
	if len(fit) == 0 {
		if unfit == nil {
			return "", "", fmt.Errorf("%w: no pool %q on any of the nodes %v", errdefs.ErrNoSpace, pool, nodes)
		}
		slices.Sort(unfit)
		return "", "", fmt.Errorf("%w: no node can make it: %s", errdefs.ErrNoSpace, cluster.Limited(strings.Join(unfit, "; ")))
	}
	best := slices.MinFunc(fit, func(a, b candidate) int {
		return cmp.Or(falseFirst(a.full, b.full), falseFirst(a.tainted, b.tainted),
			cmp.Compare(slices.Index(nodes, a.Spec.NodeName), slices.Index(nodes, b.Spec.NodeName)),
			cmp.Compare(b.available, a.available), cmp.Compare(a.Spec.NodeName, b.Spec.NodeName))
	})
	return best.Spec.NodeName, best.Spec.Pool, nil
}

func falseFirst(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	}
	return 1
}

// keepsPodsOff reports whether a node has taints that pods have to tolerate to run there.
func keepsPodsOff(node *corev1.Node) bool {
	return slices.ContainsFunc(node.Spec.Taints, func(t corev1.Taint) bool {
		return t.Effect == corev1.TaintEffectNoSchedule || t.Effect == corev1.TaintEffectNoExecute
	})
}

// NodesIn: see volume.Store.
func (s *Store) NodesIn(ctx context.Context, segments map[string]string) ([]string, error) {
	if err := s.Ready(ctx); err != nil {
		return nil, err
	}
	var nodes corev1.NodeList
	if err := s.kube.Cache.List(ctx, &nodes, client.MatchingLabels(segments), client.UnsafeDisableDeepCopy); err != nil {
		return nil, kube.APIError("list nodes", err)
	}
	if len(nodes.Items) == 0 {
		return nil, fmt.Errorf("%w: no node is in %v", errdefs.ErrNoSpace, segments)
	}
	var names []string
	for i := range nodes.Items {
		names = append(names, nodes.Items[i].Name)
	}
	slices.Sort(names)
	return names, nil
}

// mayBeOn is ErrNoSpace if a volume is not to be on a node. A copy can be on one node only, whichever the
// scheduler has chosen for the pod that waits for it (WaitForFirstConsumer), and it has no way to know. If the
// claim is such a one, the copy is made where it can be: then the scheduler finds that its choice does not fit the
// PersistentVolume, and chooses again, for a claim that is bound. The class has to allow that node.
func (s *Store) mayBeOn(ctx context.Context, spec volume.Spec, node string) error {
	if len(spec.Nodes) == 0 || slices.Contains(spec.Nodes, node) {
		return nil
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
	if err := s.kube.Live.Get(ctx, client.ObjectKey{Name: *pvc.Spec.StorageClassName}, class); err != nil {
		return kube.APIError("read class "+*pvc.Spec.StorageClassName, err)
	}
	var on corev1.Node
	if err := s.kube.Cache.Get(ctx, client.ObjectKey{Name: node}, &on); err != nil {
		return kube.APIError("look at node "+node, err)
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

// granularity is what sizes in a pool of a node are multiples of.
func (s *Store) granularity(ctx context.Context, node, pool string) (int64, error) {
	var p v1alpha1.Pool
	if err := s.kube.Client.Get(ctx, client.ObjectKey{Name: cluster.PoolName(node, pool)}, &p); err != nil {
		return 0, kube.APIError(fmt.Sprintf("read pool %s of node %s", pool, node), err)
	}
	return max(p.Status.Granularity, blockdev.Granularity), nil
}

// Capacity: see volume.Store. With no node it is that of all nodes together; a node that is
// not ready has none.
func (s *Store) Capacity(ctx context.Context, pool, node string) (blockdev.Capacity, error) {
	var nodes []string
	if node != "" {
		nodes = []string{node}
	}
	found, err := s.findRoom(ctx, pool, nodes)
	if err != nil {
		return blockdev.Capacity{}, err
	}
	var c blockdev.Capacity
	for name, r := range found {
		if s.nodes.Ready(ctx, name) != nil {
			continue
		}
		c.Total += r.Status.Total
		c.Promised += r.Status.Promised + (r.Status.Available - r.available)
		c.Available += r.available
		c.MaxVolume = max(c.MaxVolume, r.maxVolume)
		if c.MinVolume == 0 || r.Status.MinVolume < c.MinVolume {
			c.MinVolume = r.Status.MinVolume
		}
	}
	return c, nil
}
