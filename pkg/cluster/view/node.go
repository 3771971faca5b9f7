package view

import (
	"fmt"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"

	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
)

// nodes adds the nodes and their pools: those of the Pool objects, and those that volumes or snapshots name and that have no Pool object.
func (t *taking) nodes() {
	t.out.Driver = t.driver()
	counts := map[string]int{} // objects of each node's pools
	nodes := map[string]*overview.Node{}
	at := func(name string) *overview.Node {
		if nodes[name] == nil {
			nodes[name] = &overview.Node{Name: name}
		}
		return nodes[name]
	}
	for i := range t.objects {
		counts[overview.PoolName(t.objects[i].Spec.NodeName, t.objects[i].Spec.Pool)]++
	}
	for i := range t.copies {
		counts[overview.PoolName(t.copies[i].Spec.NodeName, t.copies[i].Spec.Pool)]++
	}
	reported := map[string]bool{}
	for i := range t.pools {
		p := &t.pools[i]
		name := overview.PoolName(p.Spec.NodeName, p.Spec.Pool)
		reported[name] = true
		n := at(p.Spec.NodeName)
		n.Pools = append(n.Pools, pool(p, counts[name]))
	}
	unreported := func(node, pool string) {
		name := overview.PoolName(node, pool)
		if reported[name] {
			return
		}
		reported[name] = true
		n := at(node)
		n.Pools = append(n.Pools, overview.Pool{Node: node, Name: pool, Problems: []overview.Problem{overview.Found(overview.Inaccessible, overview.PoolMissing,
			fmt.Sprintf("nobody reports it, and %s in it; start the node's agent with this pool (--pool), or say that the node is gone", objects(counts[name])), overview.KindPool, name)}})
	}
	for i := range t.objects {
		unreported(t.objects[i].Spec.NodeName, t.objects[i].Spec.Pool)
	}
	for i := range t.copies {
		unreported(t.copies[i].Spec.NodeName, t.copies[i].Spec.Pool)
	}
	for name, n := range nodes {
		held := 0
		for i := range n.Pools {
			held += counts[overview.PoolName(name, n.Pools[i].Name)]
		}
		t.judge(n, held)
		t.out.Nodes = append(t.out.Nodes, *n)
	}
}

// objects says how many volumes and snapshots are on a node or in a pool, with the verb.
func objects(n int) string {
	switch n {
	case 0:
		return "nothing is"
	case 1:
		return "a volume or snapshot is"
	}
	return fmt.Sprintf("%d volumes and snapshots are", n)
}

// judge finds out whether a node, which has held volumes and snapshots, is there, and adds the problem if it is not, or if its agent is silent.
func (t *taking) judge(n *overview.Node, held int) {
	n.Ready = true
	say := func(severity overview.Severity, reason, message string) {
		n.Ready = false
		n.Problems = append(n.Problems, overview.Found(severity, reason, message, overview.KindNode, n.Name))
	}
	m, there := t.machines[n.Name]
	switch {
	case !t.known:
	case !there:
		say(overview.Inaccessible, overview.NodeGone, fmt.Sprintf("Kubernetes has no such node, and %s on it; bring it back under this name, or delete the claims of what has no replicas on other nodes: then that is given up", objects(held)))
		return
	case m.gone:
		say(overview.Inaccessible, overview.NodeGone, fmt.Sprintf("it has the taint %s, and %s on it; delete the claims of what has no replicas on other nodes, and then the node", v1alpha1.GoneTaint, objects(held)))
		return
	case !m.ready:
		say(overview.Inaccessible, overview.NodeNotReady, fmt.Sprintf("it is not ready, and %s on it; see what its kubelet says: kubectl describe node %s", objects(held), n.Name))
		return
	}
	if t.listening && t.silent(n.Name) {
		say(overview.Degraded, overview.AgentSilent, fmt.Sprintf("its agent is not heard: pods that run go on, and nothing of it is made, deleted or reported, so what is shown of it may be old; see its pod: kubectl get pods -A -o wide --field-selector=spec.nodeName=%s", n.Name))
	}
}

// away says in words why a node cannot do anything now: it is gone, not ready, or its agent is silent. Empty: nothing of that is known.
func (t *taking) away(node string) string {
	m, there := t.machines[node]
	switch {
	case t.known && (!there || m.gone):
		return "which is gone"
	case t.known && !m.ready:
		return "which is not ready"
	case t.listening && t.silent(node):
		return "whose agent is not heard"
	}
	return ""
}

// silent reports whether a node's agent counts as silent. One that never had a Lease is of an older version, and does not.
func (t *taking) silent(node string) bool {
	if t.options.Silent != nil {
		return t.options.Silent(node)
	}
	lease, there := t.leases[node]
	return there && t.options.Now.Sub(renewed(&lease)) > v1alpha1.SilentAfter
}

// renewed returns when a Lease was last written, by the clock of the API server: that is in metadata.managedFields (KEP 555, server-side apply).
// spec.renewTime is by the node's clock, which may be wrong: it is used only if there are no managedFields.
func renewed(lease *coordinationv1.Lease) (at time.Time) {
	for _, field := range lease.ManagedFields {
		if field.Time != nil && field.Time.After(at) {
			at = field.Time.Time
		}
	}
	if at.IsZero() {
		return lease.Spec.RenewTime.Time
	}
	return at
}

// pool returns a pool as an overview has it, from its object. held is how many volumes and snapshots are in it.
func pool(p *v1alpha1.Pool, held int) overview.Pool {
	s := &p.Status
	out := overview.Pool{Node: p.Spec.NodeName, Name: p.Spec.Pool, Kind: s.Kind, Default: p.Spec.Default, UUID: p.Spec.UUID,
		Total: s.Total, Promised: s.Promised, Available: s.Available, Used: s.Used, MaxVolume: s.MaxVolume, StrayCount: max(s.StrayCount, len(s.Strays))}
	name := overview.PoolName(out.Node, out.Name)
	say := func(severity overview.Severity, reason, message string) {
		for _, have := range out.Problems {
			if have.Reason == reason {
				return
			}
		}
		out.Problems = append(out.Problems, overview.Found(severity, reason, message, overview.KindPool, name))
	}
	for _, found := range problems(s.Health, overview.KindPool, name) {
		found.Message = strings.ReplaceAll(found.Message, "pool "+out.Name+": ", "") // the name of the pool is shown beside the message
		if found.Reason == overview.NotConfigured {
			if held == 0 {
				continue // nobody misses it
			}
			found.Message = fmt.Sprintf("%s; %s in it", found.Message, objects(held))
		}
		out.Problems = append(out.Problems, found)
	}
	if full, is := out.Full(); is {
		say(full.Severity, full.Reason, full.Message)
	}
	for _, one := range s.Strays {
		stray := overview.Stray{ID: one.ID, Name: one.Name, Size: one.Size, PersistentVolume: one.PersistentVolume}
		if ref := one.ClaimRef; ref != nil {
			stray.Claim = &overview.Ref{Namespace: ref.Namespace, Name: ref.Name}
		}
		out.Strays = append(out.Strays, stray)
	}
	if out.StrayCount > 0 {
		say(overview.Warning, overview.Strays, fmt.Sprintf("it keeps what no object is for: %d; to have it back as objects: kubectl ashlar adopt %s", out.StrayCount, name))
	}
	return out
}
