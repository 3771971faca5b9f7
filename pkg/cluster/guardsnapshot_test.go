package cluster_test

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
)

// cutsOnTheMove returns snapshots that move to node-1 and from there, and that have moved to node-1 and from there, of which the last has arrived.
func cutsOnTheMove(t *testing.T) (w *guarded, coming, leaving, came, went *v1alpha1.Snapshot) {
	t.Helper()
	w = newGuarded(t)
	made := func(node, name, to string) *v1alpha1.Snapshot {
		s := snapshotOn(node, name)
		s.Spec.Move = &v1alpha1.Move{Node: to}
		check.OK(t, w.Create(w.ctx, s))
		s.Status.Size = mib
		check.OK(t, w.Status().Update(w.ctx, s))
		return s
	}
	coming, leaving = made("node-2", "cut that comes", nodeName), made(nodeName, "cut that leaves", "node-2")
	came, went = made("node-2", "cut that came", nodeName), made(nodeName, "cut that went", "node-2")
	for _, s := range []*v1alpha1.Snapshot{came, went} {
		s.Status.Move = &v1alpha1.MoveStatus{Node: s.Spec.Move.Node, Copied: &v1alpha1.MoveCopied{Generation: 1, Size: mib, Sealed: metav1.NowMicro()}}
		check.OK(t, w.Status().Update(w.ctx, s))
		cluster.FlipSnapshot(s)
		check.OK(t, w.Update(w.ctx, s))
	}
	went.Status.Move.Arrived = true
	check.OK(t, w.Status().Update(w.ctx, went))
	return w, coming, leaving, came, went
}

// TestGuardSnapshotMoves: which writes about moves of snapshots an agent may make.
func TestGuardSnapshotMoves(t *testing.T) {
	w, coming, leaving, came, went := cutsOnTheMove(t)
	type s = *v1alpha1.Snapshot
	w.try(t, nodeName, []attempt{
		reported(w, "how far it comes here", coming, `{"move":{"node":"node-1","message":"m","copied":{"generation":1,"sealed":"2026-11-24T00:00:00.000000Z","size":1048576}}}`, ""),
		reported(w, "how far it comes here, and its size", coming, `{"move":{"node":"node-1"},"size":2097152}`, ofAnother),
		reported(w, "how far it comes here, without its size", coming, `{"move":{"node":"node-1"},"size":null}`, ofAnother),
		reported(w, "that it has arrived where it is not", coming, `{"move":{"node":"node-1","arrived":true}}`, ofAnother),
		reported(w, "that it was given back, which comes here", coming, `{"move":{"node":"node-1","cleared":true}}`, clearedByOld),
		reported(w, "how far what does not come moves", w.snapshotOfOthers, `{"move":{"node":"node-1"}}`, ofAnother),
		changed(w, "come here by itself", coming, func(o s) { cluster.FlipSnapshot(o) }, ofAnother),
		changed(w, "left by itself", leaving, func(o s) { cluster.FlipSnapshot(o) }, ofAnother),
		changed(w, "kept", leaving, func(o s) { o.Spec.Move = nil }, specKept),
		changed(w, "not let come here", coming, func(o s) { o.Spec.Move = nil }, ofAnother),
		changed(w, "sent away", w.snapshot, func(o s) { o.Spec.Move = &v1alpha1.Move{Node: "node-2"} }, specKept),
		created(w, "with a move", edited(snapshotOn(nodeName, "new cut"), func(o s) { o.Spec.Move = &v1alpha1.Move{Node: "node-2"} }), bytesThere),
		changed(w, "taken for one of a group", w.snapshot, func(o s) { o.Labels = map[string]string{v1alpha1.GroupLabel: o.Name} }, metadataKept),
		reported(w, "that what came here has arrived", came, `{"move":{"arrived":true}}`, ""),
		reported(w, "that what came here was given back", came, `{"move":{"cleared":true}}`, clearedByOld),
		reported(w, "that what has left was given back", went, `{"move":{"cleared":true,"waits":null,"message":"moved"}}`, ""),
		reported(w, "why what has left is not given back yet", went, `{"move":{"waits":true,"message":"m"}}`, ""),
		reported(w, "that what has left has not arrived", went, `{"move":{"arrived":null}}`, ofAnother),
		reported(w, "that what has left is other bytes", went, `{"move":{"copied":{"sealed":"2020-01-01T00:00:00.000000Z"}}}`, ofAnother),
		reported(w, "that what has left does not move", went, `{"move":null}`, ofAnother),
		removed(w, "what has left", went, ofAnother),
	})
}

// TestSnapshotMoveRules: which writes about moves the definition of Snapshots allows, to anybody.
func TestSnapshotMoveRules(t *testing.T) {
	w, _, leaving, came, went := cutsOnTheMove(t)
	type s = *v1alpha1.Snapshot
	const movesOnly = "a snapshot moves only to the node of spec.move"
	w.tryAs(t, apitest.Get(t).Config(apitest.Admin), []attempt{
		changed(w, "asked for", w.snapshot, func(o s) { o.Spec.Move = &v1alpha1.Move{Node: "node-2"} }, ""),
		changed(w, "to another node instead", leaving, func(o s) { o.Spec.Move.Node = "node-3" }, ""),
		changed(w, "undone", leaving, func(o s) { o.Spec.Move = nil }, ""),
		changed(w, "moved", leaving, func(o s) { cluster.FlipSnapshot(o) }, ""),
		changed(w, "undone too late", came, func(o s) { o.Spec.Move = nil }, "it is too late to undo that"),
		changed(w, "ended", went, func(o s) { o.Spec.Move = nil }, ""),

		changed(w, "to where it is", w.snapshot, func(o s) { o.Spec.Move = &v1alpha1.Move{Node: nodeName} }, "the snapshot is on that node"),
		changed(w, "deleted meanwhile", leaving, func(o s) { o.Spec.Delete = o.UID }, "a snapshot that is to be deleted does not move"),
		changed(w, "moved unasked", w.snapshot, func(o s) { o.Spec.NodeName, o.Spec.Move = "node-2", &v1alpha1.Move{Node: nodeName, Left: true} }, movesOnly),
		changed(w, "moved without a word of its old node", leaving, func(o s) { o.Spec.NodeName, o.Spec.Move = "node-2", nil }, movesOnly),
		changed(w, "moved elsewhere", leaving, func(o s) { o.Spec.NodeName, o.Spec.Move = "node-3", &v1alpha1.Move{Node: nodeName, Left: true} }, movesOnly),
		changed(w, "to another pool", leaving, func(o s) { cluster.FlipSnapshot(o); o.Spec.Pool = "b" }, "a snapshot does not change"),
		changed(w, "left without having moved", leaving, func(o s) { o.Spec.Move.Left = true }, "spec.move.left is for a snapshot that has moved"),
		changed(w, "moved on too early", came, func(o s) { o.Spec.Move = &v1alpha1.Move{Node: "node-3"} }, "it moves on when those are given back"),
		changed(w, "moved back too early", came, func(o s) { o.Spec.NodeName, o.Spec.Move = "node-2", &v1alpha1.Move{Node: nodeName, Left: true} }, movesOnly),
	})
}
