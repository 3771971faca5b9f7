package events

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
)

// ReplicatedChanged has the events of a volume with several legs written.
func (a *Announcer) ReplicatedChanged(o client.Object, _ bool) { a.wholes.Add(o.GetName()) }

// lookAtWholes looks at each volume with several legs that has changed (updateReplicated), until the queue is shut down.
func (a *Announcer) lookAtWholes(ctx context.Context) {
	for {
		key, shutdown := a.wholes.Get()
		if shutdown {
			return
		}
		if err := a.updateReplicated(ctx, key); err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "Could not look at a replicated volume for events; trying again", "volume", key)
			a.wholes.AddRateLimited(key)
		} else {
			a.wholes.Forget(key)
		}
		a.wholes.Done(key)
	}
}

// updateReplicated is update for a volume with several legs. It takes the lock.
func (a *Announcer) updateReplicated(ctx context.Context, key string) error {
	a.mu.Lock() // before the cache is read, so that a later update never has older objects
	defer a.mu.Unlock()
	r := cluster.ReplicatedNamed(key)
	err := a.kube.Cache.Get(ctx, client.ObjectKey{Name: key}, r)
	if client.IgnoreNotFound(err) != nil {
		return err
	}
	gone := apierrors.IsNotFound(err)
	var list v1alpha1.VolumeList
	if err := a.kube.Cache.List(ctx, &list, client.MatchingFields{cluster.ByReplicaOf: key}); err != nil {
		return err
	}
	if gone {
		r, all := ofDeleted(key, list.Items)
		a.update(r, len(all) == 0, all)
		return nil
	}
	legs := map[string]*v1alpha1.Volume{}
	for i := range list.Items {
		legs[list.Items[i].Name] = &list.Items[i]
	}
	a.update(r, false, ofReplicated(r, legs, a.nodes))
	return nil
}

// ofDeleted returns the events of a volume with several legs whose object somebody has deleted, and what of that is known by its legs.
func ofDeleted(key string, legs []v1alpha1.Volume) (r *v1alpha1.ReplicatedVolume, all []saying) {
	r = cluster.ReplicatedNamed(key)
	for i := range legs {
		v := &legs[i]
		why := v.WithoutWhole()
		if why == "" {
			continue
		}
		if v.Name == key || r.Spec.Name == "" {
			r.Spec.Name, r.Spec.Pool, r.Status.Made = cmp.Or(v.Spec.PersistentVolume, v.Spec.Name), v.Named(), v.Status.Created
		}
		one := saying{of: r, reason: cluster.ReasonNoCurrentReplica, level: warning, lasting: true, state: "deleted", note: "volume " + key + ": " + why}
		all = one.each(replicated)
	}
	return r, all
}

// ofLeg keeps those events of a leg that are on its Volume: on PersistentVolume and claim are those of the ReplicatedVolume. Only the events of a copy
// from another node stay there too, as the ReplicatedVolume has none.
func ofLeg(all []saying) []saying {
	copies := []string{Copying, Copied, CopyWaits, CopyRefused}
	return slices.DeleteFunc(all, func(s saying) bool { return s.on != onVolume && !slices.Contains(copies, s.reason) })
}

// ofReplicated returns all events of a volume with several legs: which legs are lost, not current, joining, new or removed, and that none can be used.
// legs has those whose Volumes exist, by name; nodes has the states of nodes that are not well.
func ofReplicated(r *v1alpha1.ReplicatedVolume, legs map[string]*v1alpha1.Volume, nodes map[string]nodeState) (all []saying) {
	if r.Status.Made == nil && !r.StatusLost() || r.Going() {
		return nil
	}
	subject := "volume " + cluster.ReplicatedID(r).String() + ": "
	if r.StatusLost() {
		one := saying{of: r, reason: cluster.ReasonNoCurrentReplica, level: warning, lasting: true, state: "status", note: subject + r.WhyStatusLost()}
		return one.each(replicated)
	}
	if r.Status.Lacks != "" {
		one := saying{of: r, reason: cluster.ReasonReplicaMissing, level: warning, lasting: true, state: fmt.Sprint(r.Spec.Replicas), note: fmt.Sprintf("%s%s, and no further one is made: %s", subject, lacking(r), r.Status.Lacks)}
		all = append(all, one.each(replicated)...)
	}
	for _, name := range r.Spec.Legs {
		all = append(all, ofLegOf(r, legs[name], name, subject)...)
	}
	for _, l := range r.Spec.Removed {
		one := saying{of: r, reason: ReplicaRemoved, level: normal, state: l.Name, since: l.Time.Time, note: fmt.Sprintf("%sit does without its replica%s, which is deleted", subject, onNodeNamed(l.NodeName))}
		if l.Unfit != "" {
			one.note += ": it could not be made equal to the others: " + l.Unfit
		}
		all = append(all, one.each(replicated)...)
	}
	all = append(all, ofCompare(r, subject)...)
	return append(all, ofNoCurrent(r, legs, nodes, subject)...)
}

// lacking returns why a volume is to get another leg: it has too few current ones, or one of them is to be replaced.
func lacking(r *v1alpha1.ReplicatedVolume) string {
	if len(r.Current()) >= r.Spec.Replicas {
		return "another replica is to take the place of one that moves, or is lost"
	}
	return fmt.Sprintf("it has fewer than %d replicas", r.Spec.Replicas)
}

func onNodeNamed(node string) string {
	if node == "" {
		return ""
	}
	return " on node " + node
}

// ofCompare returns the events of a scrub: that the legs differ, or that they are equal again after that.
func ofCompare(r *v1alpha1.ReplicatedVolume, subject string) []saying {
	scrub := r.Status.Scrub
	if scrub == nil {
		return nil
	}
	one := saying{of: r, reason: ReplicasEqual, level: normal, note: subject + "its replicas were compared anew, and are equal"}
	if differ := r.Differ(); differ != "" {
		one = saying{of: r, reason: v1alpha1.ReasonReplicasDiffer, level: warning, lasting: true, note: subject + differ}
	} else if scrub.Turned == nil {
		return nil
	}
	if scrub.Turned != nil {
		one.since, one.state = scrub.Turned.Time, scrub.Turned.UTC().Format(time.RFC3339)
	}
	return one.each(replicated)
}

// ofLegOf returns the events of a volume that are about one of its legs; v is nil if that does not exist.
func ofLegOf(r *v1alpha1.ReplicatedVolume, v *v1alpha1.Volume, name, subject string) (all []saying) {
	l := r.Leg(name)
	if v == nil {
		if l != nil {
			one := saying{of: r, reason: ReplicaLost, level: warning, lasting: true, state: name, note: subject + "the object of a replica (" + name + ") was deleted; another one takes its place"}
			all = one.each(replicated)
		}
		return all
	}
	node := v.Spec.NodeName
	say := func(one saying) { one.of = r; all = append(all, one.each(replicated)...) }
	if made := v.CreationTimestamp.Time; v.Status.Created != nil && made.After(r.Status.Made.Time) {
		say(saying{by: node, reason: ReplicaAdded, level: normal, state: name, since: made, note: fmt.Sprintf("%sanother replica was made, on node %s", subject, node)})
	}
	if f := v.Common().Refused(v.Generation); f != nil && v.Status.Created != nil && v.Spec.Size > v.Status.Size {
		say(saying{by: node, reason: GrowthRefused, cause: f.Reason, level: warning, state: fmt.Sprint(name, v.Spec.Size), note: fmt.Sprintf("%sits replica on node %s cannot grow: %s", subject, node, f.Message)})
	}
	switch {
	case v1alpha1.IsLost(v):
		why := "its bytes are missing"
		if len(v.Status.Health) > 0 {
			why = v.Status.Health[0].Message
		}
		say(saying{by: node, reason: ReplicaLost, level: warning, lasting: true, state: name, note: fmt.Sprintf("%sits replica on node %s is lost, and another one takes its place: %s", subject, node, why)})
	case l != nil && !l.Current:
		state := name
		if l.Since != nil {
			state += " " + l.Since.UTC().Format(time.RFC3339)
		}
		one := saying{reason: cluster.ReasonReplicaNotCurrent, level: warning, lasting: true, state: state,
			note: fmt.Sprintf("%sits replica on node %s does not have all that was written, and is waited for: %s", subject, node, cmp.Or(l.Message, "what it lacks is copied to it while the volume is used"))}
		if l.Since != nil {
			one.since = l.Since.Time
		}
		say(one)
		if l.State == v1alpha1.LegJoining {
			say(saying{reason: ReplicaJoining, level: normal, state: state, note: fmt.Sprintf("%swhat its replica on node %s lacks is being copied to it", subject, node)})
		}
	}
	return all
}

// ofNoCurrent returns the events that tell that no current leg can be used: the node that has the claim says so (status.waits), or each is lost, or its
// node is not ready or gone.
func ofNoCurrent(r *v1alpha1.ReplicatedVolume, legs map[string]*v1alpha1.Volume, nodes map[string]nodeState, subject string) []saying {
	if waits := r.Waiting(); waits != "" {
		one := saying{of: r, reason: cluster.ReasonNoCurrentReplica, level: warning, lasting: true, state: fmt.Sprint("claim ", r.Spec.Claim.Generation), note: subject + waits}
		return one.each(replicated)
	}
	var why, state []string
	by := ""
	for _, name := range r.Current() {
		v := legs[name]
		if v != nil {
			by = cmp.Or(by, v.Spec.NodeName)
		}
		switch {
		case v == nil:
			why, state = append(why, "the object of "+name+" was deleted"), append(state, name)
		case v1alpha1.IsLost(v):
			why, state = append(why, "its replica on node "+v.Spec.NodeName+" is lost"), append(state, name)
		case nodes[v.Spec.NodeName].reason == NodeGone || nodes[v.Spec.NodeName].reason == NodeNotReady:
			why, state = append(why, "node "+v.Spec.NodeName+": "+nodes[v.Spec.NodeName].why), append(state, name+nodes[v.Spec.NodeName].id())
		default:
			return nil
		}
	}
	one := saying{of: r, by: by, reason: cluster.ReasonNoCurrentReplica, level: warning, lasting: true, state: strings.Join(state, " "),
		note: subject + "none of its replicas that have all that was written can be used: " + strings.Join(why, "; ")}
	return one.each(replicated)
}

// currentAgain returns the event that tells that a leg is current again; false if the saying is not about a leg that was not current, or the leg is not
// current now, or is gone.
func (s saying) currentAgain(r *v1alpha1.ReplicatedVolume) (saying, bool) {
	name, _, _ := strings.Cut(s.state, " ")
	if l := r.Leg(name); s.reason != cluster.ReasonReplicaNotCurrent || l == nil || !l.Current {
		return saying{}, false
	}
	s.lasting, s.level, s.since, s.reason = false, normal, time.Now(), ReplicaCurrent
	before, _, _ := strings.Cut(s.note, " does not have all that was written")
	s.note = before + " has all that was written again"
	return s, true
}
