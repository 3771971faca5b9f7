package cluster_test

import (
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/volume"
	"github.com/ashlar-csi/ashlar/pkg/volume/storetest"
)

// backup has the API server be what it is now again, when that is called.
func (w *environment) backup(v volume.Volume) (rollback func()) {
	w.Helper()
	answers := func() {
		w.eventually("the API server answers", func() bool {
			return w.Get(w.ctx, client.ObjectKey{Name: v.ID.Key}, &v1alpha1.Volume{}) == nil
		})
	}
	restore := apitest.Get(w).Backup(w)
	answers()
	return func() { restore(); answers() }
}

// TestMoveNewerStray: what node-2 has of a volume, and was about to give to a third node, is newer than what is the volume again on node-1: somebody adopted that when the object was lost, or the
// API server went back to before the volume moved. However often that is claimed then, it does not move to node-2 over what is there.
func TestMoveNewerStray(t *testing.T) {
	for _, how := range []string{"adopted", "rolled back"} {
		t.Run(how, func(t *testing.T) {
			w, a, b, v, _ := atHome(t)
			rollback := w.backup(v)
			w.movesTo("v", b.name)
			w.copied("v")
			w.leftGone(v, a, b)
			check.OK(t, storetest.WriteTo(b.disks[0].Open("default", nil))(w.ctx, v.ID, 128<<10, []byte("since")))
			want := w.content(b, v.ID)
			b.stop()
			check.OK(t, second(b.local.Seal(w.ctx, v.ID, 1)))
			if how == "adopted" {
				check.OK(t, w.Delete(w.ctx, w.object("v")))
				w.comesBack(a)
				w.adoptOn(a.name, "default", v.ID.String())
			} else {
				rollback()
				w.start(a)
			}
			w.eventually("it is the volume", func() bool { o := w.object("v"); return o != nil && o.Spec.NodeName == a.name && o.Status.Created != nil })
			for range 2 {
				w.claimFor(v.ID, a.name)
				w.attaches(a, v.ID)
				w.claimFor(v.ID, "")
			}
			w.start(b)
			w.movesTo("v", b.name)
			w.movesays("v", "which may be newer")
			if have := w.content(b, v.ID); string(have) != string(want) {
				t.Error("what was written since is gone")
			}
		})
	}
}
