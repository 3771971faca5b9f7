package cluster_test

import (
	"strings"
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// Parts of the messages by which guard.yaml refuses writes of agents, and the definitions any writes.
const (
	poolOfMove   = "a volume moves only to the pool of spec.move"
	movesNot     = "a volume moves only to the node of spec.move"
	madeOnce     = "what was made is not made again"
	ofAnother    = "an agent writes only what is of its own node: this is of node-2, and the agent is that of node-1"
	nameless     = "does not say of which node it is"
	bytesThere   = "only for bytes that are there"
	specKept     = "the spec is the controller's"
	deleteKept   = "does not ask for a deletion"
	finalizers   = "adds no finalizer, and takes none off but"
	metadataKept = "the labels, annotations and owners of a volume"
	notAsked     = "deletes an object only if the controller asked for it"
	poolNamed    = "the object of a pool is named NODE.POOL"
	poolDriver   = "gives a pool to no driver but block.csi.ashlar.dev"
	poolReplaced = "does not say that a pool was replaced"
	annotations  = "changes no annotation, but takes ashlar.dev/adopt off"
	poolMetadata = "the labels, owners and finalizers of a pool"
	ownLease     = "writes no Lease but its own: node.node-1"
	leaseHolder  = "is held by its node: node-1"
	leaseOwner   = "belongs to its node alone"
	clearedByOld = "(status.move.cleared), the node says that it has left"
)

// attempt is a write of an agent.
type attempt struct {
	name    string
	write   func(c client.Client) error
	refused string // part of the message; empty: the write succeeds
}

// guarded has the objects that agents try to write, of node-1 and of node-2.
type guarded struct {
	*environment
	mine, others, shared, asked, stale, abandoned, finalized, deleted *v1alpha1.Volume
	coming, leaving                                                   *v1alpha1.Volume // they move to node-1, and from there
	used, read                                                        *v1alpha1.Volume // of node-2: used by node-1; read by node-1 and node-3
	carried, gone                                                     *v1alpha1.Volume // used by node-1: moves from node-2 to node-3; has moved
	still                                                             *v1alpha1.Volume // of node-2, used by node-1, and does not move
	came, went                                                        *v1alpha1.Volume // they have moved to node-1, and from there
	snapshot, snapshotOfOthers                                        *v1alpha1.Snapshot
	pool, poolOfOthers                                                *v1alpha1.Pool
}

func volumeOn(node, name string) *v1alpha1.Volume {
	v := cluster.VolumeNamed(volume.KeyOf(name))
	v.Spec = v1alpha1.VolumeSpec{NodeName: node, Pool: "default", Name: name, Size: mib, ClaimRef: &v1alpha1.ClaimRef{Namespace: "a", Name: "b"}}
	return v
}

func poolOn(node, name string) *v1alpha1.Pool {
	return &v1alpha1.Pool{ObjectMeta: metav1.ObjectMeta{Name: overview.PoolName(node, name)}, Spec: v1alpha1.PoolSpec{NodeName: node, Pool: name, Driver: cluster.DefaultDriver}}
}

func snapshotOn(node, name string) *v1alpha1.Snapshot {
	s := cluster.SnapshotNamed(volume.KeyOf(name))
	s.Spec = v1alpha1.SnapshotSpec{NodeName: node, Pool: "default", Name: name, Source: volume.KeyOf("mine")}
	return s
}

func newGuarded(t *testing.T) *guarded {
	w := &guarded{environment: newEnvironment(t)}
	made := func(v *v1alpha1.Volume, edit func(*v1alpha1.Volume)) *v1alpha1.Volume {
		if edit != nil {
			edit(v)
		}
		check.OK(t, w.Create(w.ctx, v))
		return v
	}
	w.mine = made(volumeOn(nodeName, "mine"), func(v *v1alpha1.Volume) { v.Spec.Make = true })
	w.others = made(volumeOn("node-2", "others"), func(v *v1alpha1.Volume) { v.Finalizers = []string{v1alpha1.Finalizer} })
	w.shared = made(volumeOn(nodeName, "shared"), func(v *v1alpha1.Volume) { v.Spec.Access = "any" })
	moving := func(to string) func(*v1alpha1.Volume) {
		return func(v *v1alpha1.Volume) { v.Spec.Access, v.Spec.Move = "any", &v1alpha1.Move{Node: to} }
	}
	w.coming, w.leaving = made(volumeOn("node-2", "coming"), moving(nodeName)), made(volumeOn(nodeName, "leaving"), moving("node-2"))
	w.coming.Status.Size = mib
	check.OK(t, w.Status().Update(w.ctx, w.coming))
	w.used = made(volumeOn("node-2", "used"), func(v *v1alpha1.Volume) { v.Spec.Access = "any" })
	w.used.Status.Size, w.used.Status.Export = mib, &v1alpha1.Export{Generation: 1, Node: nodeName}
	check.OK(t, w.Status().Update(w.ctx, w.used))
	w.read = made(volumeOn("node-2", "read"), func(v *v1alpha1.Volume) { v.Spec.Access = "any" })
	w.read.Status.Size, w.read.Status.Readers = mib, []v1alpha1.Export{{Generation: 1, Node: nodeName}, {Generation: 2, Node: "node-3"}}
	check.OK(t, w.Status().Update(w.ctx, w.read))
	carried := func(v *v1alpha1.Volume) {
		moving("node-3")(v)
		v.Spec.Claims, v.Spec.Claim = 4, &v1alpha1.Claim{Node: nodeName, Mode: "mount", Generation: 4}
	}
	w.carried, w.gone = made(volumeOn("node-2", "carried"), carried), made(volumeOn("node-2", "gone"), carried)
	for _, v := range []*v1alpha1.Volume{w.carried, w.gone} {
		v.Status.Size = mib
		v.Status.Move = &v1alpha1.MoveStatus{Node: "node-3", Claim: 4, Copied: &v1alpha1.MoveCopied{Generation: 1, Claim: 4, Size: mib, Sealed: metav1.NowMicro()}}
		check.OK(t, w.Status().Update(w.ctx, v))
	}
	cluster.Flip(w.gone)
	check.OK(t, w.Update(w.ctx, w.gone))
	w.still = made(volumeOn("node-2", "still"), func(v *v1alpha1.Volume) {
		carried(v)
		v.Spec.Move = nil
	})
	w.came, w.went = made(volumeOn("node-2", "came"), moving(nodeName)), made(volumeOn(nodeName, "went"), moving("node-2"))
	for _, v := range []*v1alpha1.Volume{w.came, w.went} {
		v.Status.Size = mib
		v.Status.Move = &v1alpha1.MoveStatus{Node: v.Spec.Move.Node, Copied: &v1alpha1.MoveCopied{Generation: 1, Size: mib, Sealed: metav1.NowMicro()}}
		check.OK(t, w.Status().Update(w.ctx, v))
		cluster.Flip(v)
		check.OK(t, w.Update(w.ctx, v))
	}
	w.went.Status.Move.Arrived = true
	check.OK(t, w.Status().Update(w.ctx, w.went))
	w.asked = made(volumeOn(nodeName, "asked"), nil)
	w.asked.Spec.Delete = w.asked.UID
	check.OK(t, w.Update(w.ctx, w.asked))
	w.stale = made(volumeOn(nodeName, "stale"), func(v *v1alpha1.Volume) { v.Spec.Delete = "another" })
	w.abandoned = made(volumeOn(nodeName, "abandoned"), func(v *v1alpha1.Volume) { v.Spec.Abandoned = true })
	w.finalized = made(volumeOn(nodeName, "finalized"), func(v *v1alpha1.Volume) { v.Finalizers = []string{"example.com/theirs", v1alpha1.Finalizer} })
	w.deleted = made(volumeOn(nodeName, "deleted"), func(v *v1alpha1.Volume) { v.Finalizers = []string{"example.com/theirs", v1alpha1.Finalizer} })
	check.OK(t, w.Delete(w.ctx, w.deleted))
	w.snapshot, w.snapshotOfOthers = snapshotOn(nodeName, "cut"), snapshotOn("node-2", "cut of others")
	w.snapshot.Spec.Make = true
	w.pool, w.poolOfOthers = poolOn(nodeName, "default"), poolOn("node-2", "default")
	w.pool.Annotations = map[string]string{v1alpha1.AdoptAnnotation: "all", "example.com/theirs": "x"}
	for _, o := range []client.Object{w.snapshot, w.snapshotOfOthers, w.pool, w.poolOfOthers} {
		check.OK(t, w.Create(w.ctx, o))
	}
	return w
}

// try makes each attempt as the agent of a node, as a dry run; with an empty node as one whose token names no node.
func (w *guarded) try(t *testing.T, node string, attempts []attempt) {
	w.tryAs(t, apitest.Get(t).Agent(t, node), attempts)
}

func (w *guarded) tryAs(t *testing.T, config *rest.Config, attempts []attempt) {
	c, err := client.New(config, client.Options{Scheme: w.Scheme()})
	check.OK(t, err)
	for _, a := range attempts {
		t.Run(a.name, func(t *testing.T) {
			err := a.write(client.NewDryRunClient(c))
			switch {
			case a.refused == "" && err != nil:
				t.Errorf("refused: %v", err)
			case a.refused != "" && (!apierrors.IsInvalid(err) || !strings.Contains(err.Error(), a.refused)):
				t.Errorf("%v, want a refusal that says: %s", err, a.refused)
			}
		})
	}
}

// changed returns the attempt to change an object.
func changed[T client.Object](w *guarded, name string, of T, edit func(T), refused string) attempt {
	return attempt{name, func(c client.Client) error {
		o := of.DeepCopyObject().(T)
		if err := w.Get(w.ctx, client.ObjectKeyFromObject(of), o); err != nil {
			return err
		}
		before := o.DeepCopyObject().(client.Object)
		edit(o)
		return c.Patch(w.ctx, o, client.MergeFrom(before))
	}, refused}
}

// reported returns the attempt to change the status of an object.
func reported(w *guarded, name string, of client.Object, status, refused string) attempt {
	return attempt{name, func(c client.Client) error {
		return c.Status().Patch(w.ctx, of.DeepCopyObject().(client.Object), client.RawPatch(types.MergePatchType, []byte(`{"status":`+status+`}`)))
	}, refused}
}

func created(w *guarded, name string, o client.Object, refused string) attempt {
	return attempt{name, func(c client.Client) error { return c.Create(w.ctx, o.DeepCopyObject().(client.Object)) }, refused}
}

func removed(w *guarded, name string, o client.Object, refused string) attempt {
	return attempt{name, func(c client.Client) error { return c.Delete(w.ctx, o.DeepCopyObject().(client.Object)) }, refused}
}

func edited[T any](o T, edit func(T)) T { edit(o); return o }

// TestGuardVolumes: an agent may make these writes of Volumes and Snapshots, and no others. The other tests of this package, whose agents have such
// accounts, show that these are enough for all that agents do.
func TestGuardVolumes(t *testing.T) {
	w := newGuarded(t)
	type v = *v1alpha1.Volume
	w.try(t, nodeName, []attempt{
		changed(w, "made", w.mine, func(o v) { o.Spec.Make = false }, ""),
		changed(w, "stale deletion taken off", w.stale, func(o v) { o.Spec.Delete = "" }, ""),
		changed(w, "old finalizer taken off", w.finalized, func(o v) { o.Finalizers = o.Finalizers[:1] }, ""),
		changed(w, "old finalizer of a deleted one taken off", w.deleted, func(o v) { o.Finalizers = o.Finalizers[:1] }, ""),
		reported(w, "reported", w.mine, `{"size":1048576}`, ""),
		removed(w, "deleted as asked", w.asked, ""),
		removed(w, "deleted as abandoned", w.abandoned, ""),
		created(w, "adopted", volumeOn(nodeName, "new"), ""),
		created(w, "snapshot adopted", snapshotOn(nodeName, "new"), ""),
		changed(w, "snapshot cut", w.snapshot, func(o *v1alpha1.Snapshot) { o.Spec.Make = false }, ""),
		reported(w, "snapshot reported", w.snapshot, `{"size":1048576}`, ""),

		changed(w, "of another node", w.others, func(o v) { o.Finalizers = nil }, ofAnother),
		reported(w, "reported, of another node", w.others, `{"size":1048576}`, ofAnother),
		removed(w, "deleted, of another node", w.others, ofAnother),
		created(w, "adopted for another node", volumeOn("node-2", "new"), ofAnother),
		changed(w, "moved here", w.others, func(o v) { o.Spec.NodeName = nodeName }, movesNot),
		changed(w, "moved away", w.mine, func(o v) { o.Spec.NodeName = "node-2" }, movesNot),
		created(w, "snapshot adopted for another node", snapshotOn("node-2", "new"), ofAnother),
		reported(w, "snapshot reported, of another node", w.snapshotOfOthers, `{"size":1048576}`, ofAnother),
		changed(w, "snapshot of another node", w.snapshotOfOthers, func(o *v1alpha1.Snapshot) { o.Spec.Delete = o.UID }, ofAnother),
		removed(w, "snapshot of another node deleted", w.snapshotOfOthers, ofAnother),

		created(w, "to be made", edited(volumeOn(nodeName, "new"), func(o v) { o.Spec.Make = true }), bytesThere),
		created(w, "to be deleted", edited(volumeOn(nodeName, "new"), func(o v) { o.Spec.Delete = "x" }), bytesThere),
		created(w, "claimed", edited(volumeOn(nodeName, "new"), func(o v) { o.Spec.Claim = &v1alpha1.Claim{Node: nodeName, Mode: "mount"} }), bytesThere),
		created(w, "with claims counted", edited(volumeOn(nodeName, "new"), func(o v) { o.Spec.Access, o.Spec.Claims = "any", 7 }), bytesThere),
		created(w, "adopted for other nodes to use", edited(volumeOn(nodeName, "new"), func(o v) { o.Spec.Access, o.Spec.HomeTimeout = "any", 90 }), ""),
		created(w, "read", edited(volumeOn(nodeName, "new"), func(o v) {
			o.Spec.Access, o.Spec.Claims, o.Spec.Readers = "any", 1, []v1alpha1.Claim{{Node: nodeName, Mode: "m", Generation: 1}}
		}), bytesThere),
		created(w, "abandoned", edited(volumeOn(nodeName, "new"), func(o v) { o.Spec.Abandoned = true }), bytesThere),
		created(w, "with a finalizer", edited(volumeOn(nodeName, "new"), func(o v) { o.Finalizers = []string{v1alpha1.Finalizer} }), finalizers),
		created(w, "with a label", edited(volumeOn(nodeName, "new"), func(o v) { o.Labels = map[string]string{"a": "b"} }), metadataKept),

		changed(w, "grown", w.mine, func(o v) { o.Spec.Size *= 2 }, specKept),
		changed(w, "claimed for itself", w.mine, func(o v) { o.Spec.Claim = &v1alpha1.Claim{Node: nodeName, Mode: "mount"} }, specKept),
		changed(w, "claims counted", w.shared, func(o v) { o.Spec.Claims = 7 }, specKept),
		changed(w, "given to other nodes to use", w.mine, func(o v) { o.Spec.Access = "any" }, "the access to a volume does not change"),
		reported(w, "given to another node", w.shared, `{"export":{"generation":1,"node":"node-2"}}`, ""),
		reported(w, "given to another node, of another node", w.others, `{"export":{"generation":1,"node":"node-1"}}`, ofAnother),
		reported(w, "how far it comes here", w.coming, `{"move":{"node":"node-1","message":"m","copied":{"generation":1,"sealed":"2026-11-24T00:00:00.000000Z","size":1048576}}}`, ""),
		reported(w, "how far it comes here, and its size", w.coming, `{"move":{"node":"node-1"},"size":2097152}`, ofAnother),
		reported(w, "how far it comes here, without its size", w.coming, `{"move":{"node":"node-1"},"size":null}`, ofAnother),
		reported(w, "that it has arrived where it is not", w.coming, `{"move":{"node":"node-1","arrived":true}}`, ofAnother),
		reported(w, "how far it comes here, and more", w.coming, `{"move":{"node":"node-1"},"thin":true}`, ofAnother),
		reported(w, "how far what does not come moves", w.others, `{"move":{"node":"node-1"}}`, ofAnother),
		reported(w, "how far what it uses moves", w.carried, `{"move":{"node":"node-3","message":"m","undone":1,"copied":{"generation":1,"claim":4,"sealed":"2026-11-24T00:00:00.000000Z","size":1048576}}}`, ""),
		reported(w, "that what it uses does not move by now", w.carried, `{"move":{"copied":null,"undone":1}}`, ""),
		reported(w, "that what it uses is copied by another claim", w.carried, `{"move":{"copied":{"generation":1,"claim":5,"sealed":"2026-11-24T00:00:00.000000Z","size":1048576}}}`, ofAnother),
		reported(w, "that what it uses has arrived", w.carried, `{"move":{"arrived":true}}`, ofAnother),
		reported(w, "that what it uses was given back", w.carried, `{"move":{"cleared":true}}`, clearedByOld),
		reported(w, "that what it uses is copied, by no claim", w.carried, `{"move":{"copied":{"generation":2,"claim":null}}}`, ofAnother),
		reported(w, "that what it uses moves, which does not", w.still, `{"move":{"node":"node-3","copied":{"generation":2,"claim":4,"sealed":"2026-11-24T00:00:00.000000Z","size":1048576}}}`, ofAnother),
		reported(w, "that what comes here is copied by a claim", w.coming, `{"move":{"node":"node-1","copied":{"generation":1,"claim":4,"sealed":"2026-11-24T00:00:00.000000Z","size":1048576}}}`, ofAnother),
		reported(w, "that what comes here was given back", w.coming, `{"move":{"node":"node-1","cleared":true}}`, clearedByOld),
		reported(w, "that what came here has arrived", w.came, `{"move":{"arrived":true}}`, ""),
		reported(w, "that what came here was given back", w.came, `{"move":{"cleared":true}}`, clearedByOld),
		reported(w, "that what has left was given back", w.went, `{"move":{"cleared":true,"waits":null,"message":"moved"}}`, ""),
		reported(w, "why what has left is not given back yet", w.went, `{"move":{"waits":true,"message":"m"}}`, ""),
		reported(w, "that what has left has not arrived", w.went, `{"move":{"arrived":null}}`, ofAnother),
		reported(w, "that what has left was never copied", w.went, `{"move":{"copied":null}}`, ofAnother),
		reported(w, "that what has left is other bytes", w.went, `{"move":{"copied":{"sealed":"2020-01-01T00:00:00.000000Z"}}}`, ofAnother),
		reported(w, "that what has left is on another node", w.went, `{"move":{"node":"node-7"}}`, ofAnother),
		reported(w, "that what has left is in another pool", w.went, `{"move":{"pool":"b"}}`, ofAnother),
		reported(w, "that what has left does not move", w.went, `{"move":null}`, ofAnother),
		reported(w, "how far what it uses moves, and its size", w.carried, `{"move":{"message":"m"},"size":2097152}`, ofAnother),
		reported(w, "how far what it uses has moved", w.gone, `{"move":{"message":"m"}}`, "an agent writes only what is of its own node"),
		reported(w, "that its node is away", w.used, `{"export":{"away":"2026-11-24T00:00:00Z"}}`, ""),
		reported(w, "that its node is away, and its size", w.used, `{"export":{"away":"2026-11-24T00:00:00Z"},"size":2097152}`, ofAnother),
		reported(w, "that its node is away, without its size", w.used, `{"export":{"away":"2026-11-24T00:00:00Z"},"size":null}`, ofAnother),
		reported(w, "that its node is away, and another claim", w.used, `{"export":{"away":"2026-11-24T00:00:00Z","generation":2}}`, ofAnother),
		reported(w, "given to another", w.used, `{"export":{"node":"node-3"}}`, ofAnother),
		reported(w, "not given", w.used, `{"export":null}`, ofAnother),
		reported(w, "that the node of what is not used is away", w.others, `{"export":{"generation":1,"node":"node-1","away":"2026-11-24T00:00:00Z"}}`, ofAnother),
		reported(w, "nothing of what is not used", w.others, `{}`, ofAnother),
		reported(w, "who reads what it writes", w.used, `{"export":{"away":"2026-11-24T00:00:00Z"},"readers":[{"generation":2,"node":"node-1"}]}`, ofAnother),
		reported(w, "that nobody reads what it writes", w.used, `{"readers":[]}`, ofAnother),
		reported(w, "that the node of what it reads is away", w.read, `{"readers":[{"generation":1,"node":"node-1","away":"2026-11-24T00:00:00Z"},{"generation":2,"node":"node-3"}]}`, ""),
		reported(w, "that the node of what it reads is away, and its size", w.read, `{"size":2097152,"readers":[{"generation":1,"node":"node-1","away":"2026-11-24T00:00:00Z"},{"generation":2,"node":"node-3"}]}`, ofAnother),
		reported(w, "that the node of what it reads is away, without its size", w.read, `{"size":null,"readers":[{"generation":1,"node":"node-1","away":"2026-11-24T00:00:00Z"},{"generation":2,"node":"node-3"}]}`, ofAnother),
		reported(w, "that the node of what it reads is away, for another reader", w.read, `{"readers":[{"generation":1,"node":"node-1"},{"generation":2,"node":"node-3","away":"2026-11-24T00:00:00Z"}]}`, ofAnother),
		reported(w, "that the node of what it reads is away, by another claim", w.read, `{"readers":[{"generation":3,"node":"node-1","away":"2026-11-24T00:00:00Z"},{"generation":2,"node":"node-3"}]}`, ofAnother),
		reported(w, "since when it reads", w.read, `{"readers":[{"generation":1,"node":"node-1","since":"2026-11-24T00:00:00Z"},{"generation":2,"node":"node-3"}]}`, ofAnother),
		reported(w, "that it reads alone", w.read, `{"readers":[{"generation":1,"node":"node-1","away":"2026-11-24T00:00:00Z"}]}`, ofAnother),
		reported(w, "that another reads too", w.read, `{"readers":[{"generation":1,"node":"node-1"},{"generation":2,"node":"node-3"},{"generation":3,"node":"node-4"}]}`, ofAnother),
		reported(w, "that it reads twice", w.read, `{"readers":[{"generation":1,"node":"node-1"},{"generation":2,"node":"node-3"},{"generation":3,"node":"node-1"}]}`, ofAnother),
		reported(w, "that it reads for another", w.read, `{"readers":[{"generation":1,"node":"node-1"},{"generation":2,"node":"node-1"}]}`, ofAnother),
		reported(w, "that it does not read", w.read, `{"readers":[{"generation":2,"node":"node-3"}]}`, ofAnother),
		reported(w, "that nobody reads", w.read, `{"readers":null}`, ofAnother),
		reported(w, "that it writes what it reads", w.read, `{"export":{"generation":1,"node":"node-1"}}`, ofAnother),
		changed(w, "that the node of what it reads is away, not in the status", w.read, func(o v) { o.Annotations = map[string]string{"a": "b"} }, ofAnother),
		changed(w, "come here by itself", w.coming, func(o v) { o.Spec.NodeName, o.Spec.Move = nodeName, &v1alpha1.Move{Node: "node-2", Left: true} }, ofAnother),
		changed(w, "left by itself", w.leaving, func(o v) { o.Spec.NodeName, o.Spec.Move = "node-2", &v1alpha1.Move{Node: nodeName, Left: true} }, ofAnother),
		changed(w, "kept", w.leaving, func(o v) { o.Spec.Move = nil }, specKept),
		changed(w, "not let come here", w.coming, func(o v) { o.Spec.Move = nil }, ofAnother),
		created(w, "with a move", edited(volumeOn(nodeName, "new"), func(o v) { o.Spec.Access, o.Spec.Move = "any", &v1alpha1.Move{Node: "node-2"} }), bytesThere),
		created(w, "with replicas", edited(volumeOn(nodeName, "new"), func(o v) { o.Spec.Access, o.Spec.Replicas = "any", 2 }), bytesThere),
		changed(w, "asked to have replicas", w.leaving, func(o v) { o.Spec.Replicas = 2 }, specKept),
		changed(w, "given up", w.abandoned, func(o v) { o.Spec.Abandoned = false }, specKept),
		changed(w, "modified", w.mine, func(o v) { o.Spec.Mutable = map[string]string{"readAheadKiB": "4"} }, specKept),
		changed(w, "taken from its claim", w.mine, func(o v) { o.Spec.ClaimRef = nil }, specKept),
		changed(w, "given to another claim", w.mine, func(o v) { o.Spec.ClaimRef.Name = "c" }, specKept),
		changed(w, "made again", w.asked, func(o v) { o.Spec.Make = true }, madeOnce),
		changed(w, "deletion asked for", w.mine, func(o v) { o.Spec.Delete = o.UID }, deleteKept),
		changed(w, "deletion undone", w.asked, func(o v) { o.Spec.Delete = "" }, deleteKept),
		changed(w, "stale deletion made true", w.stale, func(o v) { o.Spec.Delete = o.UID }, deleteKept),
		changed(w, "others' finalizer taken off", w.finalized, func(o v) { o.Finalizers = o.Finalizers[1:] }, finalizers),
		changed(w, "others' finalizer of a deleted one taken off", w.deleted, func(o v) { o.Finalizers = nil }, finalizers),
		changed(w, "finalizer added", w.mine, func(o v) { o.Finalizers = []string{"example.com/theirs"} }, finalizers),
		changed(w, "annotated", w.mine, func(o v) { o.Annotations = map[string]string{"a": "b"} }, metadataKept),
		changed(w, "labelled", w.mine, func(o v) { o.Labels = map[string]string{"a": "b"} }, metadataKept),
		changed(w, "owned", w.mine, func(o v) {
			o.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: nodeName, UID: "x"}}
		}, metadataKept),
		removed(w, "deleted unasked", w.mine, notAsked),
		removed(w, "deleted as a copy was asked for", w.stale, notAsked),
		removed(w, "snapshot deleted unasked", w.snapshot, notAsked),
	})
	w.try(t, "", []attempt{
		changed(w, "without a node, made", w.mine, func(o v) { o.Spec.Make = false }, nameless),
		reported(w, "without a node, reported", w.mine, `{"size":1048576}`, nameless),
		removed(w, "without a node, deleted", w.asked, nameless),
		created(w, "without a node, adopted", volumeOn(nodeName, "new"), nameless),
	})
}

// TestGuardPools: what an agent may write to Pools and Leases.
func TestGuardPools(t *testing.T) {
	w := newGuarded(t)
	w.identity("default", "")
	type p = *v1alpha1.Pool
	lease := func(name, holder string) *coordinationv1.Lease {
		return &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: leases, Name: name}, Spec: coordinationv1.LeaseSpec{HolderIdentity: &holder}}
	}
	for _, o := range []client.Object{lease("node."+nodeName, nodeName), lease("node.node-2", "node-2"), lease("external-attacher-leader-block-csi-ashlar-dev", "its pod")} {
		check.OK(t, w.Create(w.ctx, o))
	}
	other := "node-2"
	mine := lease("node."+nodeName, nodeName)
	update := func(name string, o *coordinationv1.Lease, refused string) attempt {
		return attempt{name, func(c client.Client) error {
			o := o.DeepCopy()
			have := o.DeepCopy()
			if err := w.Get(w.ctx, client.ObjectKeyFromObject(o), have); err != nil {
				return err
			}
			o.ResourceVersion = have.ResourceVersion
			return c.Update(w.ctx, o)
		}, refused}
	}
	w.try(t, nodeName, []attempt{
		created(w, "created", poolOn(nodeName, "new"), ""),
		changed(w, "no longer the default", w.pool, func(o p) { o.Spec.Default, o.Spec.MaxVolumes = true, 7 }, ""),
		changed(w, "identified", w.pool, func(o p) { o.Spec.UUID = "one" }, ""),
		changed(w, "adopted", w.pool, func(o p) { delete(o.Annotations, v1alpha1.AdoptAnnotation) }, ""),
		reported(w, "reported", w.pool, `{"total":1}`, ""),
		update("renewed", mine, ""),

		created(w, "created for another node", poolOn("node-2", "new"), ofAnother),
		changed(w, "of another node", w.poolOfOthers, func(o p) { o.Spec.Default = true }, ofAnother),
		reported(w, "reported, of another node", w.poolOfOthers, `{"total":1}`, ofAnother),
		created(w, "named as one of another node", edited(poolOn(nodeName, "new"), func(o p) { o.Name = "node-2.new" }), poolNamed),
		created(w, "of another driver", edited(poolOn(nodeName, "new"), func(o p) { o.Spec.Driver = "other.example.com" }), poolDriver),
		changed(w, "given to another driver", w.pool, func(o p) { o.Spec.Driver = "other.example.com" }, poolDriver),
		changed(w, "annotated", w.pool, func(o p) { o.Annotations["a"] = "b" }, annotations),
		changed(w, "others' annotation taken off", w.pool, func(o p) { delete(o.Annotations, "example.com/theirs") }, annotations),
		changed(w, "labelled", w.pool, func(o p) { o.Labels = map[string]string{"a": "b"} }, poolMetadata),
		changed(w, "finalizer added", w.pool, func(o p) { o.Finalizers = []string{"example.com/theirs"} }, poolMetadata),

		update("another's Lease", lease("node.node-2", other), ownLease),
		update("a sidecar's Lease", lease("external-attacher-leader-block-csi-ashlar-dev", nodeName), ownLease),
		created(w, "a new Lease", lease("external-resizer-block-csi-ashlar-dev", nodeName), ownLease),
		update("its Lease, for another", lease("node."+nodeName, other), leaseHolder),
		update("its Lease, with a finalizer", edited(mine.DeepCopy(), func(o *coordinationv1.Lease) { o.Finalizers = []string{"example.com/theirs"} }), leaseOwner),
	})
	w.identity("default", "one")
	w.try(t, nodeName, []attempt{
		changed(w, "replaced", w.pool, func(o p) { o.Spec.UUID = "two" }, poolReplaced),
		changed(w, "to be replaced", w.pool, func(o p) { o.Spec.UUID = v1alpha1.NewPool }, poolReplaced),
	})
	w.identity("default", v1alpha1.NewPool)
	w.try(t, nodeName, []attempt{changed(w, "replaced on purpose", w.pool, func(o p) { o.Spec.UUID = "two" }, "")})
	// More rights than those of rbac-node.yaml do not allow deletions.
	config := apitest.Get(t).Config(apitest.Admin)
	config.Impersonate = rest.ImpersonationConfig{UserName: "system:serviceaccount:" + apitest.Namespace + ":ashlar-node", Groups: []string{"system:masters"},
		Extra: map[string][]string{"authentication.kubernetes.io/node-name": {nodeName}}}
	w.tryAs(t, config, []attempt{removed(w, "deleted", w.pool, "an agent deletes no pool"), removed(w, "its Lease deleted", mine, "an agent deletes no Lease")})
	w.try(t, "", []attempt{
		changed(w, "without a node", w.pool, func(o p) { o.Spec.Default = true }, nameless),
		update("without a node, renewed", mine, nameless),
	})
}

// TestMoveRules: which writes about moves the definition of Volumes allows, to anybody.
func TestMoveRules(t *testing.T) {
	w := newGuarded(t)
	type v = *v1alpha1.Volume
	away := func(o v) { o.Spec.NodeName, o.Spec.Move = "node-2", &v1alpha1.Move{Node: nodeName, Left: true} }
	claimed := volumeOn(nodeName, "claimed")
	claimed.Spec.Access, claimed.Spec.Move, claimed.Spec.Claims = "any", &v1alpha1.Move{Node: "node-2"}, 1
	claimed.Spec.Claim = &v1alpha1.Claim{Node: nodeName, Mode: "mount", Generation: 1}
	check.OK(t, w.Create(w.ctx, claimed))
	other := volumeOn(nodeName, "other")
	other.Spec.Access, other.Spec.Move = "any", &v1alpha1.Move{Node: "node-2", Pool: "b"}
	check.OK(t, w.Create(w.ctx, other))
	moved := func(name string) v {
		o := volumeOn(nodeName, name)
		o.Spec.Access, o.Spec.Move = "any", &v1alpha1.Move{Node: "node-2"}
		check.OK(t, w.Create(w.ctx, o))
		away(o)
		check.OK(t, w.Update(w.ctx, o))
		return o
	}
	left, over := moved("left"), moved("over")
	over.Status.Move = &v1alpha1.MoveStatus{Node: "node-2", Arrived: true}
	check.OK(t, w.Status().Update(w.ctx, over))
	next := func(o v) { cluster.Flip(o) }
	notCopied := "only if the node that uses it has copied all of it"
	w.tryAs(t, apitest.Get(t).Config(apitest.Admin), []attempt{
		changed(w, "moved in use, and copied", w.carried, next, ""),
		changed(w, "moved in use, and not copied", claimed, func(o v) { cluster.Flip(o) }, notCopied),
		changed(w, "moved in use, by the same claim", w.carried, func(o v) { next(o); o.Spec.Claims--; o.Spec.Claim.Generation-- }, movesNot),
		changed(w, "moved in use, by a later claim", w.carried, func(o v) { next(o); o.Spec.Claims++; o.Spec.Claim.Generation++ }, movesNot),
		changed(w, "moved in use, by another node", w.carried, func(o v) { next(o); o.Spec.Claim.Node = "node-4" }, movesNot),
		changed(w, "moved in use, in another way", w.carried, func(o v) { next(o); o.Spec.Claim.Mode = "block" }, movesNot),
		changed(w, "moved in use, to be read", w.carried, func(o v) { next(o); o.Spec.Claim.ReadOnly = true }, movesNot),
		changed(w, "moved in use, and released", w.carried, func(o v) { next(o); o.Spec.Claim = nil }, movesNot),
		changed(w, "moved, and claimed", w.leaving, func(o v) {
			away(o)
			o.Spec.Claims, o.Spec.Claim = 1, &v1alpha1.Claim{Node: nodeName, Mode: "mount", Generation: 1}
		}, movesNot),
		changed(w, "released after that", w.gone, func(o v) { o.Spec.Claim = nil }, ""),
		reported(w, "what was copied, after that", w.gone, `{"move":{"copied":{"claim":7}}}`, "what its new node had then does not change"),
		reported(w, "that nothing was copied, after that", w.gone, `{"move":{"copied":null}}`, "what its new node had then does not change"),
		reported(w, "that it has arrived, after that", w.gone, `{"move":{"arrived":true}}`, ""),

		changed(w, "asked for", w.shared, func(o v) { o.Spec.Move = &v1alpha1.Move{Node: "node-2"} }, ""),
		changed(w, "to another node instead", w.leaving, func(o v) { o.Spec.Move.Node = "node-3" }, ""),
		changed(w, "undone", w.leaving, func(o v) { o.Spec.Move = nil }, ""),
		changed(w, "moved", w.leaving, away, ""),
		changed(w, "undone too late", left, func(o v) { o.Spec.Move = nil }, "it is too late to undo that"),
		changed(w, "ended", over, func(o v) { o.Spec.Move = nil }, ""),

		changed(w, "of one node", w.mine, func(o v) { o.Spec.Move = &v1alpha1.Move{Node: "node-2"} }, "make a snapshot, and restore it on another node"),
		changed(w, "to where it is", w.shared, func(o v) { o.Spec.Move = &v1alpha1.Move{Node: nodeName} }, "the volume is on that node"),
		changed(w, "deleted meanwhile", w.leaving, func(o v) { o.Spec.Delete = o.UID }, "a volume that is to be deleted does not move"),
		changed(w, "moved unasked", w.shared, away, movesNot),
		changed(w, "moved in use", claimed, away, movesNot),
		changed(w, "moved and released", claimed, func(o v) { away(o); o.Spec.Claim = nil }, movesNot),
		changed(w, "moved without a word of its old node", w.leaving, func(o v) { o.Spec.NodeName, o.Spec.Move = "node-2", nil }, movesNot),
		changed(w, "moved elsewhere", w.leaving, func(o v) { o.Spec.NodeName, o.Spec.Move = "node-3", &v1alpha1.Move{Node: nodeName, Left: true} }, movesNot),
		changed(w, "to another pool, unasked", w.leaving, func(o v) { away(o); o.Spec.Pool, o.Spec.IDPool, o.Spec.Move.Pool = "b", "default", "default" }, poolOfMove),
		changed(w, "to another pool, as another volume", w.leaving, func(o v) { away(o); o.Spec.Pool, o.Spec.Move.Pool = "b", "default" }, "the pool that the ID of a volume names does not change"),
		changed(w, "to another pool, by an older controller", other, away, poolOfMove),
		changed(w, "to another pool, without a word of its old one", other, func(o v) { cluster.Flip(o); o.Spec.Move.Pool = "" }, poolOfMove),
		changed(w, "to another pool than asked for", other, func(o v) { cluster.Flip(o); o.Spec.Pool = "c" }, poolOfMove),
		changed(w, "to another pool", other, next, ""),
		changed(w, "to another pool of its node", w.shared, func(o v) { o.Spec.Pool, o.Spec.IDPool = "b", "default" }, poolOfMove),
		changed(w, "to a third pool instead", other, func(o v) { o.Spec.Move.Pool = "c" }, "take the move back, and ask for another one"),
		changed(w, "to its own pool instead", other, func(o v) { o.Spec.Move.Pool = "" }, "take the move back, and ask for another one"),
		changed(w, "of another ID", w.shared, func(o v) { o.Spec.IDPool = "b" }, "the pool that the ID of a volume names does not change"),
		changed(w, "left without having moved", w.leaving, func(o v) { o.Spec.Move.Left = true }, "spec.move.left is for a volume that has moved"),
		changed(w, "moved on too early", left, func(o v) { o.Spec.Move = &v1alpha1.Move{Node: "node-3"} }, "it moves on when those are given back"),
		changed(w, "moved back too early", left, func(o v) { o.Spec.NodeName, o.Spec.Move = nodeName, &v1alpha1.Move{Node: "node-2", Left: true} }, movesNot),
	})
}
