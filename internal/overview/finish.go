package overview

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/ashlar-csi/ashlar/internal/runbook"
)

// Reasons of problems that are found by whoever makes the overview. Others come from the driver (blockdev.Problem, refused changes).
const (
	NodeGone       = "NodeGone"       // it has pools, but no Node object, or one with the taint ashlar.dev/gone
	NodeNotReady   = "NodeNotReady"   // its kubelet reports that, or nothing
	AgentSilent    = "AgentSilent"    // its agent does not renew its Lease
	PoolMissing    = "PoolMissing"    // it has volumes, and is not reported
	PoolFull       = "PoolFull"       // no further volume fits, or it cannot be written
	PoolNearlyFull = "PoolNearlyFull" // nearlyFull percent of what it may promise, or of its filesystem, is taken
	Strays         = "Strays"         // it has volumes or snapshots without an object
	TakesLong      = "TakesLong"      // something is being made for too long
	NotConfigured  = "NotConfigured"  // its agent was started without it, and it has volumes
)

// nearlyFull is how many percent of what a pool may promise have to be taken for a problem.
const nearlyFull = 90

// Kinds of subjects.
const (
	KindNode     = "Node"
	KindPool     = "Pool"
	KindVolume   = "Volume"
	KindSnapshot = "Snapshot"
)

// ranks are the severities in order, the worst first.
var ranks = map[Severity]int{DataLoss: 0, Inaccessible: 1, Degraded: 2, Warning: 3}

// Worse compares severities: negative if a is worse than b.
func Worse(a, b Severity) int { return cmp.Compare(rank(a), rank(b)) }

func rank(s Severity) int {
	if r, ok := ranks[s]; ok {
		return r
	}
	return len(ranks)
}

// Found returns a problem of a subject.
func Found(severity Severity, reason, message string, kind, name string) Problem {
	return Problem{Severity: severity, Reason: reason, Message: message, Subject: Subject{Kind: kind, Name: name}, Runbook: runbook.URL(reason)}
}

// Full returns a problem if hardly any or no room is left in a pool. Its Kind and its other problems have to be set before: if it offers no room because of one
// of these (stops), it is not full.
func (p *Pool) Full() (Problem, bool) {
	if p.Total <= 0 || slices.ContainsFunc(p.Problems, p.stops) {
		return Problem{}, false
	}
	percent := int(100 * (1 - float64(min(max(p.Available, 0), p.Total))/float64(p.Total)))
	name := PoolName(p.Node, p.Name)
	switch {
	case p.MaxVolume <= 0:
		return Found(Degraded, PoolFull, fmt.Sprintf("%d %% of what it may promise is taken, and no further volume fits; delete volumes or snapshots, or grow it", percent), KindPool, name), true
	case percent >= nearlyFull:
		return Found(Warning, PoolNearlyFull, fmt.Sprintf("%d %% of what it may promise is taken; delete volumes or snapshots, or grow it, before new volumes are refused", percent), KindPool, name), true
	}
	return Problem{}, false
}

// stops reports whether a problem is why the pool offers no room, whatever its figures are: the pool cannot be used, a disk of its group is missing, or the
// blocks of its thin pool are taken.
func (p *Pool) stops(because Problem) bool {
	return Worse(because.Severity, Degraded) < 0 || because.Reason == "DeviceMissing" || because.Reason == PoolNearlyFull && p.Kind == "lvmthin"
}

// PoolName returns NODE.POOL: the name of a pool among those of all nodes, of its object, and of the subject of its problems.
func PoolName(node, pool string) string { return node + "." + pool }

// Finish sorts everything, gathers the problems of all nodes, pools, volumes and snapshots, and counts what is in each pool. It is called last when an overview
// is made.
func (o *Overview) Finish() {
	o.Problems = []Problem{}
	o.count()
	slices.SortFunc(o.Nodes, func(a, b Node) int { return cmp.Compare(a.Name, b.Name) })
	for i := range o.Nodes {
		n := &o.Nodes[i]
		n.Problems = o.gather(n.Problems)
		slices.SortFunc(n.Pools, func(a, b Pool) int { return cmp.Compare(a.Name, b.Name) })
		n.Pools = list(n.Pools)
		for j := range n.Pools {
			n.Pools[j].Problems = o.gather(n.Pools[j].Problems)
			n.Pools[j].Strays = list(n.Pools[j].Strays)
		}
	}
	slices.SortFunc(o.Volumes, func(a, b Volume) int {
		return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.Pool, b.Pool), cmp.Compare(a.Name, b.Name), cmp.Compare(a.ID, b.ID))
	})
	for i := range o.Volumes {
		o.Volumes[i].Problems = o.gather(o.Volumes[i].Problems)
	}
	slices.SortFunc(o.Snapshots, func(a, b Snapshot) int {
		return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.Pool, b.Pool), cmp.Compare(a.Name, b.Name), cmp.Compare(a.ID, b.ID))
	})
	for i := range o.Snapshots {
		o.Snapshots[i].Problems = o.gather(o.Snapshots[i].Problems)
	}
	slices.SortStableFunc(o.Problems, func(a, b Problem) int {
		return cmp.Or(Worse(a.Severity, b.Severity), cmp.Compare(a.Subject.Kind, b.Subject.Kind), cmp.Compare(a.Subject.Name, b.Subject.Name), cmp.Compare(a.Reason, b.Reason))
	})
	o.Nodes, o.Volumes, o.Snapshots = list(o.Nodes), list(o.Volumes), list(o.Snapshots)
}

// gather adds problems to o.Problems, and returns them with the worst first.
func (o *Overview) gather(problems []Problem) []Problem {
	sortWorst(problems)
	o.Problems = append(o.Problems, problems...)
	return list(problems)
}

// sortWorst sorts problems, the worst first; equally bad ones keep their order.
func sortWorst(problems []Problem) {
	slices.SortStableFunc(problems, func(a, b Problem) int { return Worse(a.Severity, b.Severity) })
}

// count counts the volumes and snapshots of each pool.
func (o *Overview) count() {
	volumes, snapshots := map[string]int{}, map[string]int{}
	for i := range o.Volumes {
		for _, p := range o.Volumes[i].Places() {
			volumes[PoolName(p.Node, p.Pool)]++
		}
	}
	for i := range o.Snapshots {
		snapshots[PoolName(o.Snapshots[i].Node, o.Snapshots[i].Pool)]++
	}
	for i := range o.Nodes {
		for j := range o.Nodes[i].Pools {
			p := &o.Nodes[i].Pools[j]
			p.Volumes, p.Snapshots = volumes[PoolName(p.Node, p.Name)], snapshots[PoolName(p.Node, p.Name)]
		}
	}
}

// list returns an empty list for nil.
func list[T any](all []T) []T {
	if all == nil {
		return []T{}
	}
	return all
}
