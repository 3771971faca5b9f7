package cluster

import (
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// provisionedPrefix is what the provisioner's names of volumes begin with; the rest is the
// UID of the claim.
const provisionedPrefix = "pvc-"

// To look for what nodes that are gone have left takes the longer the more objects there are,
// and something is new all the time: between two looks there is a rest, short beside the grace
// period.
const (
	leastRest = 100 * time.Millisecond
	mostRest  = 5 * time.Second
	// mostGathering is how long what is due waits for more, so that one look at all PersistentVolumes is for all of it.
	mostGathering = time.Minute
)

// orphan is what nobody may know of, to be looked after when it is old enough.
type orphan struct {
	kind string // aVolume, aGroup, or aClaim
	key  string
}

// aClaim is the claim of a volume, because of which something was refused.
const aClaim = "claim of volume"

func (o orphan) String() string {
	if o.kind == aGroup {
		return volume.GroupID{Key: o.key}.String()
	}
	return o.kind + " " + o.key
}

// volumeChanged sees to it that every volume is looked after when it is old enough.
func (s *Store) volumeChanged(o client.Object, gone bool) {
	s.objectChanged(o, gone)
	v, ok := o.(*v1alpha1.Volume)
	if !ok || v.Spec.ClaimRef == nil || !strings.HasPrefix(v.Spec.Name, provisionedPrefix) {
		return
	}
	if gone {
		s.known.Delete(v.UID)
	} else if _, known := s.known.Load(v.UID); !known {
		s.doomed.AddAfter(orphan{aVolume, v.Name}, time.Until(v.CreationTimestamp.Add(s.options.AbandonGrace)))
	}
}

// snapshotChanged sees to it that a group which is not cut is looked after when it is old enough.
func (s *Store) snapshotChanged(o client.Object, gone bool) {
	s.objectChanged(o, gone)
	if m, ok := o.(*v1alpha1.Snapshot); ok && !gone && m.Spec.Group != nil && m.Status.Created == nil {
		s.doomed.AddAfter(orphan{aGroup, m.Spec.Group.Key}, time.Until(m.CreationTimestamp.Add(s.options.AbandonGrace)))
	}
}

// objectChanged: of a node that is gone, there may be something to give up.
func (s *Store) objectChanged(o client.Object, gone bool) {
	if !gone && going(o.(object)) {
		s.newsOfNodes()
	}
}

func (s *Store) poolChanged(client.Object, bool) { s.newsOfNodes() }

func (s *Store) nodeChanged(client.Object, bool) { s.newsOfNodes() }

func (s *Store) newsOfNodes() {
	select {
	case s.departed <- struct{}{}:
	default: // there is
	}
}

// tidy clears up after what is gone until the context ends. Every replica does it: each
// step is harmless when it is done twice.
func (s *Store) tidy(ctx context.Context) {
	var done sync.WaitGroup
	defer done.Wait()
	done.Go(func() {
		for {
			one, shutdown := s.doomed.Get()
			if shutdown {
				return
			}
			s.lookAfterAll(ctx, one)
		}
	})
	defer s.doomed.ShutDown()
	since := map[string]time.Time{} // when this process first saw a node to be gone
	var timer <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.departed:
		case <-timer:
		}
		timer = nil
		next, err := s.giveUp(ctx, since)
		if err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "Could not clear up after a node that is gone; trying again")
			next = time.Minute
		}
		if next > 0 {
			timer = time.After(next)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(min(max(s.options.GoneGrace/10, leastRest), mostRest)):
		}
	}
}

// isGone: nobody will see the node again. Either it has no object, or an operator said so.
func isGone(node *corev1.Node, err error) bool {
	if err != nil {
		return apierrors.IsNotFound(err)
	}
	for _, taint := range node.Spec.Taints {
		if taint.Key == v1alpha1.GoneTaint {
			return true
		}
	}
	return false
}

// giveUp lets go of what was deleted on nodes that have been gone for long enough, and of
// their pools. It returns when to look again, 0 for when there is news.
func (s *Store) giveUp(ctx context.Context, since map[string]time.Time) (next time.Duration, err error) {
	var volumes v1alpha1.VolumeList
	var snapshots v1alpha1.SnapshotList
	var pools v1alpha1.PoolList
	for _, list := range []client.ObjectList{&volumes, &snapshots, &pools} {
		if err := s.cache.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
			return 0, err
		}
	}
	left := map[string][]client.Object{}
	for i := range volumes.Items {
		v := &volumes.Items[i]
		left[v.Spec.NodeName] = append(left[v.Spec.NodeName], v)
	}
	for i := range snapshots.Items {
		o := &snapshots.Items[i]
		left[o.Spec.NodeName] = append(left[o.Spec.NodeName], o)
	}
	for i := range pools.Items {
		p := &pools.Items[i]
		left[p.Spec.NodeName] = append(left[p.Spec.NodeName], p)
	}
	for name := range since {
		if len(left[name]) == 0 {
			delete(since, name)
		}
	}
	for name, objects := range left {
		var node corev1.Node
		if !isGone(&node, s.cache.Get(ctx, client.ObjectKey{Name: name}, &node)) {
			delete(since, name)
			continue
		}
		if _, known := since[name]; !known {
			since[name] = time.Now()
			klog.FromContext(ctx).Info("A node is gone; what is deleted of it is given up after the grace period", "node", name, "grace", s.options.GoneGrace)
		}
		if wait := s.options.GoneGrace - time.Since(since[name]); wait > 0 {
			if next == 0 || wait < next {
				next = wait
			}
			continue
		}
		node = corev1.Node{}
		if !isGone(&node, s.live.Get(ctx, client.ObjectKey{Name: name}, &node)) {
			continue // the cache will hear of it
		}
		silent, beats := s.patience(name)
		lives := beats && silent > 0 // its agent would make its Pools anew, and again
		if lives && (next == 0 || silent < next) {
			next = silent
		}
		for _, o := range objects {
			if _, pool := o.(*v1alpha1.Pool); pool && lives {
				continue
			}
			if err := s.forget(ctx, name, o); err != nil {
				return 0, err
			}
		}
	}
	return next, nil
}

// forget gives up an object of a node that is gone, if it is a pool or was deleted.
func (s *Store) forget(ctx context.Context, node string, o client.Object) error {
	log := klog.FromContext(ctx).WithValues("node", node, "object", o.GetName())
	if _, pool := o.(*v1alpha1.Pool); pool {
		log.Info("Forgetting a pool of a node that is gone")
		uid := o.GetUID()
		return client.IgnoreNotFound(s.live.Delete(ctx, o, client.Preconditions{UID: &uid}))
	}
	one := o.DeepCopyObject().(object)
	if !going(one) {
		return nil
	}
	log.Info("Giving up what was deleted on a node that is gone: its bytes are still there, if the node is")
	err := finish(ctx, s.live, one)
	if apierrors.IsConflict(err) {
		s.newsOfNodes()
		return nil
	}
	return client.IgnoreNotFound(err)
}

// lookAfterAll looks after what is due, with one look at what Kubernetes has.
func (s *Store) lookAfterAll(ctx context.Context, due ...orphan) {
	select {
	case <-ctx.Done():
	case <-time.After(min(max(s.options.AbandonGrace/20, leastRest), mostGathering)):
	}
	for s.doomed.Len() > 0 {
		one, shutdown := s.doomed.Get()
		if shutdown {
			return
		}
		due = append(due, one)
	}
	known := &census{live: s.live, driver: s.options.Driver}
	for _, one := range due {
		var err error
		switch one.kind {
		case aGroup:
			err = s.lookAfterGroup(ctx, one.key)
		case aClaim:
			err = s.lookAfterClaim(ctx, known, one.key)
		default:
			err = s.lookAfter(ctx, known, one.key)
		}
		if err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "Could not find out whether something is abandoned; trying again", "what", one.String())
			s.doomed.AddAfter(one, time.Minute)
		}
		s.doomed.Done(one)
	}
}

// lookAfter asks the node of a volume to delete it, if neither the claim that it was made
// for nor a PersistentVolume of it exists, whatever its name. The node does so only if it is blank.
func (s *Store) lookAfter(ctx context.Context, known *census, key string) error {
	v := &v1alpha1.Volume{}
	if err := s.client.Get(ctx, client.ObjectKey{Name: key}, v); err != nil {
		return client.IgnoreNotFound(err)
	}
	switch {
	case going(v), v.Status.Is(v1alpha1.Abandoned, "True"):
		return nil // its node is at it
	case v.Status.Is(v1alpha1.Abandoned, "False"):
		if !v.Spec.Abandoned {
			return nil // it was asked before
		}
		before := v.DeepCopy()
		v.Spec.Abandoned = false
		return ignoreConflict(s.client.Patch(ctx, v, lockingPatch(before)))
	case v.Spec.Abandoned:
		return nil // the node is thinking
	case v.Spec.Claim != nil:
		return nil
	}
	if age := time.Since(v.CreationTimestamp.Time); age < s.options.AbandonGrace {
		s.doomed.AddAfter(orphan{aVolume, key}, s.options.AbandonGrace-age)
		return nil
	}
	volumes, err := known.volumes(ctx)
	if err != nil {
		return err
	}
	if len(volumes[volumeID(v).String()]) > 0 {
		s.known.Store(v.UID, true) // whoever deletes that deletes this
		return nil
	}
	pvc := &corev1.PersistentVolumeClaim{}
	err = s.live.Get(ctx, client.ObjectKey{Namespace: v.Spec.ClaimRef.Namespace, Name: v.Spec.ClaimRef.Name}, pvc)
	if err == nil && provisionedPrefix+string(pvc.UID) == v.Spec.Name {
		s.doomed.AddAfter(orphan{aVolume, key}, s.options.AbandonGrace) // it is being provisioned
		return nil
	}
	if client.IgnoreNotFound(err) != nil {
		return err
	}
	klog.FromContext(ctx).Info("Nobody knows of a volume: its node deletes it if it is blank", "volume", volumeID(v).String(), "claim", v.Spec.ClaimRef.Namespace+"/"+v.Spec.ClaimRef.Name)
	before := v.DeepCopy()
	v.Spec.Abandoned = true
	return ignoreConflict(s.client.Patch(ctx, v, lockingPatch(before)))
}

// neverUsed reports whether nobody can have used a volume that is asked for: the claim that it is for is
// there, is bound to nothing, and no PersistentVolume has its handle. So it is one that a controller of an
// older version has begun, which did not write down that it may be made, and nothing is lost with it.
func (s *Store) neverUsed(ctx context.Context, spec volume.Spec, v *v1alpha1.Volume) (bool, error) {
	if spec.For.Name == "" {
		return false, nil
	}
	pvc := &corev1.PersistentVolumeClaim{}
	err := s.live.Get(ctx, client.ObjectKey{Namespace: spec.For.Namespace, Name: spec.For.Name}, pvc)
	if err != nil || provisionedPrefix+string(pvc.UID) != v.Spec.Name || pvc.Spec.VolumeName != "" {
		return false, apiError("read claim "+spec.For.Namespace+"/"+spec.For.Name, client.IgnoreNotFound(err))
	}
	volumes, err := (&census{live: s.live, driver: s.options.Driver}).volumes(ctx)
	return err == nil && len(volumes[volumeID(v).String()]) == 0, apiError("look for PersistentVolumes", err)
}

// lookAfterClaim takes a claim back that no VolumeAttachment is for: somebody took the finalizer
// off that one, so nobody will ever ask for it. Devices that are still there are the node's to see.
func (s *Store) lookAfterClaim(ctx context.Context, known *census, key string) error {
	v := &v1alpha1.Volume{}
	if err := s.client.Get(ctx, client.ObjectKey{Name: key}, v); err != nil {
		return client.IgnoreNotFound(err)
	}
	if v.Spec.Claim == nil {
		return nil
	}
	attached, err := known.attached(ctx, v)
	if err != nil || attached {
		return err
	}
	// Whoever asked for the claim until now has a VolumeAttachment; whoever asks from now on takes this off.
	before := v.DeepCopy()
	metav1.SetMetaDataAnnotation(&v.ObjectMeta, v1alpha1.DoubtAnnotation, "true")
	if err := s.client.Patch(ctx, v, lockingPatch(before)); err != nil {
		return ignoreConflict(err)
	}
	attached, err = (&census{live: s.live, driver: s.options.Driver}).attached(ctx, v)
	if err != nil || attached {
		return err
	}
	klog.FromContext(ctx).Info("Taking back a claim that no VolumeAttachment is for", "volume", volumeID(v).String(), "node", v.Spec.Claim.Node)
	before = v.DeepCopy()
	v.Spec.Claim = nil
	delete(v.Annotations, v1alpha1.DoubtAnnotation)
	return ignoreConflict(s.client.Patch(ctx, v, lockingPatch(before)))
}

// lookAfterGroup deletes the members of a group that was never written down in full, so that its
// node waits for the rest: nothing was cut, and whoever wanted it has long stopped asking. If that
// is not so, the next try makes all of it anew.
func (s *Store) lookAfterGroup(ctx context.Context, key string) error {
	members, err := s.members(ctx, key)
	if err != nil || !s.unfinished(members) {
		return err
	}
	members, err = s.liveMembers(ctx, key) // what the cache has not heard of counts too
	if err != nil || !s.unfinished(members) {
		return err
	}
	for i := range members {
		m := &members[i]
		if going(m) {
			continue
		}
		klog.FromContext(ctx).Info("Nobody asks any more for a group of which a part was written down; deleting that", "group", volume.GroupID{Key: key}.String(), "snapshot", snapshotID(m).String())
		if err := ignoreConflict(intend(ctx, s.client, m, true)); err != nil {
			return err
		}
	}
	return nil
}

// unfinished reports whether a group lacks members, and none was cut, may have been (an object that
// was restored), or is young enough for the rest to be on its way.
func (s *Store) unfinished(members []v1alpha1.Snapshot) bool {
	return !slices.ContainsFunc(members, func(m v1alpha1.Snapshot) bool {
		return len(members) >= m.Spec.Group.Size || m.Status.Created != nil || !m.Spec.Make || time.Since(m.CreationTimestamp.Time) < s.options.AbandonGrace
	})
}

// ignoreConflict: whoever changed the object has made news of it.
func ignoreConflict(err error) error {
	if apierrors.IsConflict(err) {
		return nil
	}
	return client.IgnoreNotFound(err)
}
