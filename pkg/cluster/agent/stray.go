package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/cluster/move"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// mostStrays is how many strays of a pool are listed.
const mostStrays = 100

// stray is a volume or snapshot in a pool of this node that has no object.
type stray struct {
	v1alpha1.Stray
	object cluster.Object // to create when it is adopted
	taken  string         // where the object of its name says that it is; empty: there is no such object
	sealed bool           // it was about to move to another node, or has moved: another node may have all that was written since
	kept   bool           // it is sealed because it came to this node while it was used, and may have what was written last (volume.KeepLeftover)
	left   string         // it is sealed because it has moved to this node (volume.Left)
}

// lookup is when the API server was asked for the object of a stray, and what it answered. It is asked again after checkAgain, and not whenever something
// changes.
type lookup struct {
	at    time.Time
	taken string // as in stray
}

// straySearch is one search for the strays of a pool.
type straySearch struct {
	lookups map[volume.ID]lookup // of the strays that were found
	silent  map[string]bool      // nodes that were asked, and did not answer
}

// strays returns the strays of a pool. Ephemeral volumes are none. It also removes what is certainly not needed any more: leftovers of copies
// (dropLeftover), and what is left of volumes and snapshots that are elsewhere (strayOf).
func (a *Agent) strays(ctx context.Context, pool blockdev.Pool) ([]stray, error) {
	var strays []stray
	look := straySearch{map[volume.ID]lookup{}, map[string]bool{}}
	defer func() { a.lookups[pool.Name()] = look.lookups }()
	for _, kind := range []blockdev.Kind{blockdev.Volume, blockdev.Snapshot} {
		records, err := pool.List(ctx, kind, "", 0)
		if err != nil {
			return nil, err
		}
		for _, r := range records {
			if left, is := volume.LeftoverOf(pool.Name(), r); is {
				a.dropLeftover(ctx, left)
				continue
			}
			one, err := a.strayOf(ctx, pool.Name(), volume.IDOf(pool.Name(), r), look)
			if err != nil {
				return nil, err
			}
			if one != nil {
				strays = append(strays, *one)
			}
		}
	}
	return strays, nil
}

// strayOf returns the stray of a volume or snapshot in a pool; nil if it has an object, is ephemeral, or was removed because it is elsewhere (dropLeft,
// madeElsewhere, dropStray). It adds the answer of the API server to look.
func (a *Agent) strayOf(ctx context.Context, pool string, id volume.ID, look straySearch) (*stray, error) {
	var o cluster.Object = &v1alpha1.Volume{}
	describe := a.strayVolume
	if id.Kind == blockdev.Snapshot {
		o, describe = &v1alpha1.Snapshot{}, a.straySnapshot
	}
	err := a.kube.Cache.Get(ctx, client.ObjectKey{Name: id.Key}, o)
	if err == nil && o.In() == pool {
		return nil, nil
	}
	if client.IgnoreNotFound(err) != nil {
		return nil, err
	}
	cached := err == nil
	one, err := describe(ctx, pool, id)
	if err != nil || one == nil {
		return nil, errdefs.IgnoreNotFound(err) // it was deleted since the list, or is ephemeral
	}
	if one.sealed && o.Node() == a.local.Node() {
		err := a.dropLeft(ctx, pool, id)
		if errdefs.IgnoreNotFound(err) == nil {
			return nil, nil
		}
		klog.FromContext(ctx).V(2).Info("What is left of a volume in another pool than its own stays for now", "id", id.String(), "pool", pool, "why", err.Error())
	}
	last, known := a.lookups[pool][id]
	if cached || !known || time.Since(last.at) >= checkAgain {
		var left bool
		last, left, err = a.lookUp(ctx, pool, id, o, cached)
		if err == nil && left && last.taken != "" {
			a.endStrayExport(ctx, id)
			left = !a.dropStray(ctx, pool, id, one.sealed, look)
		}
		if err != nil || !left {
			return nil, err
		}
	}
	if !cached {
		look.lookups[id] = last
	}
	one.taken = last.taken
	return one, nil
}

// lookUp finds out where the object says to be that has the name of something in a pool. o is that object if cached; otherwise it is read at the API server
// into o. left is false if there is no stray: the object is of what the pool has after all, the bytes are about to be given back, or they were removed
// (madeElsewhere).
func (a *Agent) lookUp(ctx context.Context, pool string, id volume.ID, o cluster.Object, cached bool) (_ lookup, left bool, err error) {
	now := lookup{at: time.Now()}
	if !cached {
		err := a.kube.Live.Get(ctx, client.ObjectKey{Name: id.Key}, o)
		if err != nil {
			return now, true, client.IgnoreNotFound(err)
		}
	}
	if o.Node() == a.local.Node() && o.In() == pool {
		return now, false, nil // the cache is behind
	}
	if m, _ := o.Moves(); m != nil && m.Left && m.Node == a.local.Node() {
		return now, false, nil // it has moved from here: giveBack deletes the bytes
	}
	now.taken = fmt.Sprintf("its object says pool %s of node %s", o.In(), o.Node())
	removed, err := a.madeElsewhere(ctx, pool, id, o)
	return now, !removed, err
}

// madeElsewhere removes a blank volume of a pool if its object says that it is on another node, or in another pool: it was made here, and then elsewhere, as
// this node was down before it could report it. A volume that the object was reported for stays: its disk was brought here from another node.
func (a *Agent) madeElsewhere(ctx context.Context, pool string, id volume.ID, o cluster.Object) (removed bool, _ error) {
	if id.Kind != blockdev.Volume {
		return false, nil
	}
	err := a.withLocks([]string{keylock.Volume(id.Key)}, func() error {
		have, err := a.local.Get(ctx, id)
		if err != nil || have.Pool != pool || (o.Common().Created != nil && sameBytes(o, have.Created, have.Object)) {
			return errdefs.IgnoreNotFound(err)
		}
		if err := a.removeBlank(ctx, id); err != nil {
			return err
		}
		_, err = a.local.Get(ctx, id)
		removed = errors.Is(err, errdefs.ErrNotFound)
		return nil
	})
	if errors.Is(err, errdefs.ErrBusy) {
		return false, nil // it is tried again at the next search
	}
	return removed, err
}

// dropLeft removes what a pool has of a volume that has left this node, and has come back to another pool of it while this one was closed (volume.DropLeft).
// ErrPrecondition and ErrExists if it may be more than that.
func (a *Agent) dropLeft(ctx context.Context, pool string, id volume.ID) error {
	return a.withLocks([]string{keylock.Volume(id.Key)}, func() error {
		v := &v1alpha1.Volume{}
		if err := client.IgnoreNotFound(a.kube.Live.Get(ctx, client.ObjectKey{Name: id.Key}, v)); err != nil {
			return kube.APIError("read volume "+id.Key, err)
		}
		if v.Spec.NodeName != a.local.Node() || v.Spec.Pool == pool || v.Spec.Move != nil || v.Status.Created == nil || v1alpha1.Going(v) || cluster.VolumeID(v) != id {
			return fmt.Errorf("%w: the object of volume %s does not say that it is in another pool of this node than %s for good", errdefs.ErrPrecondition, id, pool)
		}
		err := a.local.DropLeft(ctx, pool, id, v.Spec.Claims)
		if err == nil {
			klog.FromContext(ctx).Info("Removed what was left of a volume in another pool than its own", "id", id.String(), "pool", pool, "volume", v.Spec.Pool)
		}
		return err
	})
}

// endStrayExport ends the export of a stray whose object is on another node, if the object has another node's claim, or has counted the claim of the export
// (spec.claims): then what its consumer writes is no part of the volume. If the object does not know of that claim, the consumer goes on, as with
// wantsExport: the object may have been adopted or restored by mistake, and then the stray has what was written last.
func (a *Agent) endStrayExport(ctx context.Context, id volume.ID) {
	to, is, err := a.currentExport(ctx, id)
	if err == nil && is {
		err = a.withLocks([]string{keylock.Volume(id.Key)}, func() error {
			v := &v1alpha1.Volume{}
			if err := a.kube.Live.Get(ctx, client.ObjectKey{Name: id.Key}, v); err != nil {
				return kube.APIError("read volume "+id.Key, err)
			}
			c := v.Spec.Claim
			if v.Spec.NodeName == a.local.Node() || cluster.VolumeID(v) != id || v.Spec.Claims < to.Generation && (c == nil || c.Node == to.Node) {
				return nil
			}
			klog.FromContext(ctx).Info("Taking back a stray that its user has still, while its volume is another node's", "id", id.String(), "node", to.Node, "generation", to.Generation, "volume", v.Spec.NodeName)
			return a.ignoreWithoutNetwork(a.options.Exporter.Unexport(ctx, id, to.Generation))
		})
	}
	if errdefs.IgnoreNotFound(err) != nil {
		klog.FromContext(ctx).V(2).Info("A stray stays exported for now", "id", id.String(), "why", err.Error())
	}
}

// dropStray removes what is left here of a snapshot or a sealed volume that has moved to another node while this one counted as gone, so that it did not
// give the bytes back. It needs proof that they are not the only ones: the API server says that the volume or snapshot is on the other node, and that node
// says that it has all of it, and that it is, or came from, what is here. removed is false, and nothing is removed, without that.
func (a *Agent) dropStray(ctx context.Context, pool string, id volume.ID, sealed bool, look straySearch) (removed bool) {
	var o cluster.Object
	var err error
	switch {
	case id.Kind == blockdev.Snapshot: // it is known by the time at which it was taken
		s := &v1alpha1.Snapshot{}
		o, err = s, a.dropMoved(ctx, id, s, keylock.Snapshot(id.Key), look, func() error {
			if err := a.isThere(ctx, s); err != nil {
				return err
			}
			return a.local.DepartSnapshot(ctx, id, s.Status.Created.Time)
		})
	case sealed:
		v := &v1alpha1.Volume{}
		o, err = v, a.dropMoved(ctx, id, v, keylock.Volume(id.Key), look, func() error {
			return a.local.DropMoved(ctx, pool, id, func(sealed time.Time) error { return a.checkMovedTo(ctx, id, v.Spec.NodeName, sealed) })
		})
	default:
		return false
	}
	log := klog.FromContext(ctx).WithValues("id", id.String(), "pool", pool, "node", o.Node())
	if err != nil {
		look.silent[o.Node()] = look.silent[o.Node()] || errors.Is(err, errdefs.ErrUnavailable)
		log.V(2).Info("What is left of what may have moved to another node stays for now", "why", err.Error())
		return false
	}
	log.Info("Removed what was left of what moved to another node while this one was taken for gone")
	return true
}

// dropMoved calls drop under a lock, if the object says that what has this ID is whole on another node, which may answer. It reads the object into o.
// Otherwise ErrPrecondition.
func (a *Agent) dropMoved(ctx context.Context, id volume.ID, o cluster.Object, lock string, look straySearch, drop func() error) error {
	return a.withLocks([]string{lock}, func() error {
		if err := a.kube.Live.Get(ctx, client.ObjectKey{Name: id.Key}, o); err != nil {
			return kube.APIError("read the object of "+id.String(), err)
		}
		if o.Named() != id.Pool || !a.wholeElsewhere(o, look) {
			return fmt.Errorf("%w: it is not known to be whole on node %s", errdefs.ErrPrecondition, o.Node())
		}
		return drop()
	})
}

// wholeElsewhere reports whether an object is settled on another node (settledOn), and that node is not known to be silent.
func (a *Agent) wholeElsewhere(o cluster.Object, look straySearch) bool {
	return o.Node() != a.local.Node() && settledOn(o, o.Node()) && !look.silent[o.Node()]
}

// checkMovedTo asks a node whether it has the whole volume, and that came from what was sealed here (move.Home). ErrPrecondition if not.
func (a *Agent) checkMovedTo(ctx context.Context, id volume.ID, home string, sealed time.Time) error {
	ctx, cancel := context.WithTimeout(ctx, homeTime)
	defer cancel()
	return a.atNode(ctx, home, func(c grpc.ClientConnInterface) error {
		has, err := move.HomeAt(c).Has(ctx, id, sealed)
		if err == nil && !has {
			err = fmt.Errorf("%w: node %s does not say that its volume came from what is here", errdefs.ErrPrecondition, home)
		}
		return err
	})
}

// strayVolume returns the stray of a volume by its record, with the object to create; nil for an ephemeral volume.
func (a *Agent) strayVolume(ctx context.Context, pool string, id volume.ID) (*stray, error) {
	v, err := a.local.GetIn(ctx, pool, id)
	if err != nil || v.Ephemeral != "" {
		return nil, err
	}
	o := cluster.VolumeNamed(id.Key)
	o.Spec = v1alpha1.VolumeSpec{NodeName: a.local.Node(), Pool: pool, Name: v.Name, Size: v.Size, Filesystem: string(v.Filesystem),
		Encryption: string(v.Encryption.Scheme), EncryptionDiscard: v.Encryption.Discards, Access: string(v.Access), HomeTimeout: int64(v.HomeTimeout / time.Second), ReplicaOf: v.ReplicaOf,
		Mutable: v.Mutable, PersistentVolume: v.For.PersistentVolume}
	if id.Pool != pool {
		o.Spec.IDPool = id.Pool
	}
	if v.Source != (volume.ID{}) {
		o.Spec.Source = cluster.FromSource(v.Source, id.Pool)
	}
	if v.For.Name != "" {
		o.Spec.ClaimRef = &v1alpha1.ClaimRef{Namespace: v.For.Namespace, Name: v.For.Name}
	}
	return &stray{Stray: v1alpha1.Stray{ID: id.String(), Name: v.Name, Size: v.Size, Filesystem: o.Spec.Filesystem, ClaimRef: o.Spec.ClaimRef,
		PersistentVolume: o.Spec.PersistentVolume}, object: o, sealed: v.Sealed, kept: v.Kept, left: v.Left}, nil
}

// straySnapshot is strayVolume for a snapshot. A member of a group has the group's name and ID.
func (a *Agent) straySnapshot(ctx context.Context, pool string, id volume.ID) (*stray, error) {
	s, err := a.local.GetSnapshot(ctx, id)
	if err != nil {
		return nil, err
	}
	o := cluster.SnapshotNamed(id.Key)
	o.Spec = v1alpha1.SnapshotSpec{NodeName: a.local.Node(), Pool: pool, Name: s.Name, Source: s.Source.Key, Encryption: string(s.Scheme)}
	if s.Source.Pool != pool {
		o.Spec.SourcePool = s.Source.Pool
	}
	one := &stray{Stray: v1alpha1.Stray{ID: id.String(), Name: s.Name, Size: s.Size}, object: o}
	if s.Group.Key != "" {
		o.Spec.Name, _, _ = strings.Cut(s.Name, "\x00")
		o.Spec.Group = &v1alpha1.Group{Key: s.Group.Key, Size: s.GroupSize}
		one.Name, one.Group = o.Spec.Name, s.Group.String()
	}
	return one, nil
}

// adopt creates the objects of the strays that v1alpha1.AdoptAnnotation of the pool's object names, and returns the other strays. If the API server refuses
// some, the rest is adopted all the same; the annotation stays until none fails, and if it asks for more meanwhile. What it names and the pool does not keep,
// the condition Adopted tells.
func (a *Agent) adopt(ctx context.Context, pool *v1alpha1.Pool, strays []stray) ([]stray, error) {
	if pool.Annotations[v1alpha1.AdoptAnnotation] == "" {
		return strays, nil
	}
	wanted := pool.Adopting()
	all := slices.Contains(wanted, v1alpha1.AdoptAll)
	var left []stray
	var failures []error
	for _, one := range strays {
		if (!all || one.sealed) && !slices.Contains(wanted, one.ID) && (one.Group == "" || !slices.Contains(wanted, one.Group)) {
			left = append(left, one)
			continue
		}
		err := a.readopt(ctx, one)
		if err == nil {
			err = a.kube.Client.Create(ctx, one.object)
		}
		switch {
		case apierrors.IsAlreadyExists(err): // the object is on another node or in another pool, or the cache is behind
			left = append(left, one)
		case err != nil:
			left = append(left, one)
			failures = append(failures, fmt.Errorf("adopt %s: %w", one.ID, err))
		default:
			klog.FromContext(ctx).Info("Made an object for what the pool has", "id", one.ID)
		}
	}
	if len(failures) > 0 {
		return left, errors.Join(failures...)
	}
	before := pool.DeepCopy()
	delete(pool.Annotations, v1alpha1.AdoptAnnotation)
	if err := a.kube.Client.Patch(ctx, pool, kube.LockingPatch(before)); err != nil { // somebody may have asked for more meanwhile
		pool.Annotations = before.Annotations
		return left, fmt.Errorf("take %s off pool %s: %w", v1alpha1.AdoptAnnotation, pool.Name, err)
	}
	return left, a.reportAdopted(ctx, pool, wanted)
}

// reportAdopted writes into the status of a pool's object whether the pool keeps all that was to be adopted (the condition Adopted): somebody may have misspelt
// an ID, or named another pool.
func (a *Agent) reportAdopted(ctx context.Context, pool *v1alpha1.Pool, wanted []string) error {
	var unknown []string
	for _, text := range wanted {
		has, err := a.keeps(ctx, pool.Spec.Pool, text)
		if err != nil {
			return err
		}
		if text != v1alpha1.AdoptAll && !has {
			unknown = append(unknown, text)
		}
	}
	c := &pool.Status.Conditions
	if len(unknown) == 0 {
		if meta.FindStatusCondition(*c, v1alpha1.Adopted) != nil {
			setCondition(c, pool, v1alpha1.Adopted, metav1.ConditionTrue, "AllKnown", "the pool keeps all that was to be adopted")
		}
		return nil
	}
	meta.RemoveStatusCondition(c, v1alpha1.Adopted) // each time is another one
	setCondition(c, pool, v1alpha1.Adopted, metav1.ConditionFalse, cluster.ReasonNoSuchStray, fmt.Sprintf("the annotation %s named what the pool does not keep: %s; name IDs of its strays (status.strays), or %q", v1alpha1.AdoptAnnotation, strings.Join(unknown, ", "), v1alpha1.AdoptAll))
	return nil
}

// keeps reports whether a pool has the volume, the snapshot or members of the group with an ID.
func (a *Agent) keeps(ctx context.Context, pool, text string) (bool, error) {
	if group, err := volume.ParseGroupID(text); err == nil {
		all, err := a.local.ListSnapshots(ctx, volume.ID{}, volume.ID{}, 0)
		return slices.ContainsFunc(all, func(s volume.Snapshot) bool { return s.Group == group }), err
	}
	id, err := volume.ParseID(text)
	if err != nil {
		return false, nil
	}
	for _, one := range a.options.Pools {
		if one.Name() == pool {
			record, err := one.Get(ctx, blockdev.Ref{Kind: id.Kind, Key: id.Key})
			return err == nil && volume.IDOf(pool, record) == id, errdefs.IgnoreNotFound(err)
		}
	}
	return false, nil
}

// readopt makes what is here of a volume that has moved to another node, or may have, usable again, because somebody adopts it by its ID (volume.Readopt).
func (a *Agent) readopt(ctx context.Context, one stray) error {
	v, is := one.object.(*v1alpha1.Volume)
	if !is || !one.sealed || one.taken != "" {
		return nil
	}
	return a.withLocks([]string{keylock.Volume(v.Name)}, func() error { return a.local.Readopt(ctx, v.In(), cluster.VolumeID(v)) })
}

// reportStrays writes the strays of a pool into its status: at most mostStrays of them, and the condition Accounted.
func reportStrays(pool *v1alpha1.Pool, strays []stray) {
	s := &pool.Status
	s.StrayCount, s.Strays = len(strays), nil
	if len(strays) == 0 {
		setWell(&s.Conditions, pool, v1alpha1.Accounted, "AllKnown", "nothing in the pool is without an object")
	} else {
		var ids []string
		for _, one := range strays {
			if one.taken != "" {
				one.ID += " (" + one.taken + ": if that is wrong, delete that object first)"
			}
			switch {
			case one.kept:
				one.ID += " (it has come here while it was used, and may have what was written last: find out which node its user is connected to, or was; to adopt it name its ID)"
			case one.left != "":
				one.ID += " (it has moved to node " + one.left + ", which has what was written since: adopt that one, or if it is gone for good this one by its ID)"
			case one.sealed:
				one.ID += " (it was about to move to another node, and may have: if no other node has it, name its ID to adopt it)"
			}
			ids = append(ids, one.ID)
		}
		setCondition(&s.Conditions, pool, v1alpha1.Accounted, metav1.ConditionFalse, cluster.ReasonStrays,
			"no object says what these are for; nothing removes them (to have objects for them: the annotation "+v1alpha1.AdoptAnnotation+"): "+strings.Join(ids, ", "))
	}
	for _, one := range strays[:min(len(strays), mostStrays)] {
		s.Strays = append(s.Strays, listed(one.Stray))
	}
}

// listed returns a stray as an object can hold it, without names that are too long for Kubernetes: records may have such.
func listed(s v1alpha1.Stray) v1alpha1.Stray {
	const most = 253 // bytes
	s.Name = cluster.Limited(s.Name)
	if len(s.PersistentVolume) > most {
		s.PersistentVolume = ""
	}
	if ref := s.ClaimRef; ref != nil && (len(ref.Namespace) > most || len(ref.Name) > most) {
		s.ClaimRef = nil
	}
	return s
}
