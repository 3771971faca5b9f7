package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/ashlar-csi/ashlar/internal/cli"
	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
)

// room is what decides whether a volume or snapshot can move, and where to.
type room struct {
	pools    map[string]*v1alpha1.Pool // by NODE.POOL
	mirrors  func(node string) bool    // reports whether a node can let a volume that it uses become one with replicas
	cordoned map[string]bool           // by the name of a node; nil: the user may not list nodes
	legs     *legs
	silent   map[string]string // the nodes whose agent does not answer, and the problem
	promised map[string]int64  // by NODE.POOL: bytes of what is to come there, and is not in the figures of the pool yet
}

// look reads what room needs. o is an overview taken just before.
func (c *cluster) look(ctx context.Context, o *overview.Overview) (*room, error) {
	r := &room{pools: map[string]*v1alpha1.Pool{}, silent: map[string]string{}, promised: map[string]int64{}, legs: &legs{}}
	var pools v1alpha1.PoolList
	if err := c.List(ctx, &pools); err != nil {
		return nil, fmt.Errorf("list the pools: %w", err)
	}
	r.mirrors = v1alpha1.Mirrors(pools.Items)
	for i := range pools.Items {
		p := &pools.Items[i]
		r.pools[overview.PoolName(p.Spec.NodeName, p.Spec.Pool)] = p
	}
	for _, n := range o.Nodes {
		if !n.Ready && len(n.Problems) > 0 {
			r.silent[n.Name] = n.Problems[0].Reason + ": " + n.Problems[0].Message
		}
	}
	var nodes corev1.NodeList
	if err := c.List(ctx, &nodes); err != nil && !apierrors.IsForbidden(err) {
		return nil, fmt.Errorf("list the nodes: %w", err)
	} else if err == nil {
		r.cordoned = map[string]bool{}
	}
	for _, n := range nodes.Items {
		r.cordoned[n.Name] = n.Spec.Unschedulable
		r.legs.nodes = append(r.legs.nodes, n)
	}
	return r, c.lookForAsked(ctx, r)
}

// lookForAsked reads the legs, and counts the room of all that is to move and is not copied yet.
func (c *cluster) lookForAsked(ctx context.Context, r *room) error {
	var volumes v1alpha1.VolumeList
	if err := c.List(ctx, &volumes); err != nil {
		return fmt.Errorf("list the volumes: %w", err)
	}
	snapshots, err := c.snapshotsOf(ctx, func(s *v1alpha1.Snapshot) bool { return s.Spec.Move != nil })
	if err != nil {
		return err
	}
	if err := c.lookForLegs(ctx, volumes.Items, r.legs); err != nil {
		return err
	}
	for i := range volumes.Items {
		v := &volumes.Items[i]
		// Another leg takes the place of one whose volume is in use: once it is there, the figures of its pool have it.
		if isToCome(v) && v.OtherLeg(v.Spec.Move.Node, r.legs.all) == nil {
			r.promise(v, goal(v))
		}
	}
	for _, s := range snapshots {
		if isToCome(s) {
			r.promise(s, goal(s))
		}
	}
	return nil
}

// isToCome reports whether room is kept for what is to move (v1alpha1.Move.IsToCome).
func isToCome(o mobile) bool {
	m, s := o.Moves()
	return m.IsToCome(s) && !v1alpha1.Going(o)
}

// leaves returns why a volume cannot leave its node, and what to do; nil if it can.
func (r *room) leaves(v *v1alpha1.Volume) error {
	home := v.Spec.NodeName
	switch m := v.Spec.Move; {
	case v1alpha1.Going(v) || v.Spec.Abandoned:
		return errors.New("it is being deleted")
	case v.Spec.Access == "":
		return errors.New("it has access=node, and its PersistentVolume names that node, for good: take a snapshot, and restore it on another node by a class with copies: anywhere")
	case v.Status.Created == nil:
		return errors.New("it is not made yet; try again when it is (kubectl ashlar volumes)")
	case v1alpha1.IsLost(v):
		return errors.New("its bytes are missing; see kubectl ashlar describe " + v.ID())
	case m != nil && m.Left:
		return fmt.Errorf("it has just come from node %s, which has not given its bytes back yet (%s); try again then; if that node never comes back, delete its Node object", m.Node, said(v))
	case v.Spec.ReplicaOf != "" && v.Spec.Claim != nil: // another leg takes its place, and gets the bytes from the node that uses the volume
		return nil
	case r.silent[home] != "":
		return fmt.Errorf("its bytes are on node %s, which does not answer: %s", home, r.silent[home])
	}
	if r.network(home, v.Spec.Pool) == "" {
		return fmt.Errorf("its node %s is in no network, so its bytes cannot leave it; start the driver there with --remote-address", home)
	}
	return nil
}

// said returns what the agents report of the move of a volume.
func said(v *v1alpha1.Volume) string {
	if v.Status.Move == nil {
		return "nothing is heard of that"
	}
	return cmp.Or(v.Status.Move.Message, "nothing is heard of that")
}

// network returns the network by which the volumes of a pool reach other nodes; empty: none.
func (r *room) network(node, pool string) string {
	if p := r.pools[overview.PoolName(node, pool)]; p != nil && p.Status.Network != nil {
		return p.Status.Network.Name
	}
	return ""
}

// takes returns why a place cannot take a volume that can leave its own, and what to do; nil if it can.
func (r *room) takes(v *v1alpha1.Volume, to place) error {
	node, pool := to.node, to.of(v)
	name := overview.PoolName(node, pool)
	p := r.pools[name]
	if node == v.Spec.NodeName {
		return fmt.Errorf("the volume is on that node, in pool %s, and moves between nodes only: to have it in another pool there, move it to another node first", v.Spec.Pool)
	}
	if p == nil {
		return r.lacking(v, to)
	}
	if r.silent[node] != "" {
		return fmt.Errorf("it does not answer: %s", r.silent[node])
	}
	if err := r.legs.notBeside(v, node); err != nil {
		return err
	}
	home, network, need := r.network(v.Spec.NodeName, v.Spec.Pool), r.network(node, pool), v.Keeps()
	available := min(p.Status.Available-r.promised[name], p.Status.MaxVolume)
	switch {
	case network == "":
		return fmt.Errorf("it is in no network; start the driver there with --remote-address, in that of node %s (%s)", v.Spec.NodeName, home)
	case network != home:
		return fmt.Errorf("it is in the network %s, and node %s in %s: a volume stays in its network, which its PersistentVolume names", network, v.Spec.NodeName, home)
	case len(p.Status.Health) > 0:
		return fmt.Errorf("pool %s is not well: %s: %s", name, p.Status.Health[0].Reason, p.Status.Health[0].Message)
	case v.Spec.ReplicaOf != "" && v.Spec.Claim != nil && p.NotInSteps(need) != "": // another leg is to take its place, and has the size of the others
		return fmt.Errorf("%s; choose another node, or have the replica move while nobody uses the volume", p.NotInSteps(need))
	case need > available:
		return fmt.Errorf("pool %s has no room: %s are needed, and a volume of %s could come at most; make room there, or choose another node (kubectl ashlar pools)", name,
			cli.Size(need), cli.Size(max(available, 0)))
	}
	return nil
}

// lacking returns the error for a node that does not have the pool of a place.
func (r *room) lacking(o mobile, to place) error {
	node, pool := to.node, to.of(o)
	var others []string
	for _, p := range r.pools {
		if p.Spec.NodeName == node {
			others = append(others, p.Spec.Pool)
		}
	}
	slices.Sort(others)
	_, known := r.cordoned[node]
	switch {
	case len(others) > 0:
		hint := fmt.Sprintf("without a pool, a volume stays in those of one name; give --to %s to have it in that", place{node, others[0]}.flag())
		if _, is := o.(*v1alpha1.Snapshot); is {
			hint = "a snapshot stays in pools of one name, as its ID has it; start the driver there with a --pool of the name " + pool
		}
		return fmt.Errorf("it has no pool %s (it has %s): %s", pool, strings.Join(others, ", "), hint)
	case known:
		return errors.New("no driver reports a pool there; kubectl ashlar pools lists the nodes that have some")
	}
	return errors.New("there is no such node; kubectl ashlar pools lists the nodes that have pools")
}

// errNowhere is the error if no other node has a pool of the name.
var errNowhere = errors.New("no other node has a pool")

// best returns the place with most room that can take a volume, on a node that is not cordoned. If only names a node, it is there.
func (r *room) best(v *v1alpha1.Volume, only place) (place, error) {
	found, err := r.bestOf(v, only, func(to place) error { return r.takes(v, to) })
	if errors.Is(err, errNowhere) {
		err = fmt.Errorf("%w; to have it in one of another name: --to NODE/POOL", err)
	}
	return found, err
}

// bestOf is best for a volume or snapshot. takes returns why a place cannot take it.
func (r *room) bestOf(o mobile, only place, takes func(place) error) (place, error) {
	var reasons []string
	found, most := place{}, int64(-1)
	for _, p := range r.pools {
		node := p.Spec.NodeName
		if p.Spec.Pool != only.of(o) || node == o.Node() || only.node != "" && node != only.node {
			continue
		}
		err := takes(place{node, only.pool})
		if r.cordoned[node] {
			err = errors.New("it is cordoned")
		}
		available := p.Status.Available - r.promised[p.Name]
		switch {
		case err != nil:
			reasons = append(reasons, fmt.Sprintf("%s: %v", place{node, only.pool}, err))
		case available > most || available == most && node < found.node:
			found, most = place{node, only.pool}, available
		}
	}
	if found.node != "" {
		return found, nil
	}
	if len(reasons) == 0 && only.node != "" {
		return place{}, fmt.Errorf("%s: %w", only, takes(only))
	}
	if len(reasons) == 0 {
		return place{}, fmt.Errorf("%w %s", errNowhere, o.In())
	}
	slices.Sort(reasons)
	if more := len(reasons) - mostReasons; more > 0 {
		reasons = append(reasons[:mostReasons], fmt.Sprintf("and %d nodes more", more))
	}
	return place{}, errors.New(strings.Join(reasons, "; "))
}

// mostReasons is how many reasons an error lists why nodes cannot take a volume.
const mostReasons = 3

// promise counts the room of what is to come to a place.
func (r *room) promise(o mobile, to place) {
	r.promised[overview.PoolName(to.node, to.of(o))] += o.Keeps()
}
