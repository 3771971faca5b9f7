package cluster_test

import (
	"context"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/store"
)

// viewer starts a viewer with the rights of a user. The function that it returns gives the overview, and the volume of an ID in it, or nil.
func (w *environment) viewer(s *store.Store, user string) (_ *store.Viewer, of func(id string) (*overview.Overview, *overview.Volume)) {
	w.Helper()
	v, err := store.NewViewer(apitest.Get(w).Config(user), s, "v1")
	check.OK(w, err)
	w.run(v.Run)
	return v, func(id string) (*overview.Overview, *overview.Volume) {
		o, err := v.Overview(w.ctx)
		check.OK(w, err)
		for i := range o.Volumes {
			if o.Volumes[i].ID == id {
				return o, &o.Volumes[i]
			}
		}
		return o, nil
	}
}

// TestViewer: a viewer shows what the store knows, with the claims and pods of Kubernetes, and tells when that changes.
func TestViewer(t *testing.T) {
	w, m, s := newCluster(t)
	viewer, of := w.viewer(s, apitest.Admin)
	w.eventually("all is read", func() bool { o, _ := of(""); return len(o.Missing) == 0 })
	ctx, cancel := context.WithCancel(w.ctx)
	defer cancel()
	changes := viewer.Changes(ctx)
	changed := func(what string) {
		t.Helper()
		select {
		case <-changes:
		case <-time.After(14 * time.Second): // without an event it looks after 15
			t.Fatalf("nobody was told that %s", what)
		}
	}
	quiet := func() { // takes earlier changes off the channel
		for {
			select {
			case <-changes:
			case <-time.After(time.Second):
				return
			}
		}
	}
	quiet()
	v, err := s.Create(w.ctx, spec("seen"))
	check.OK(t, err)
	changed("there is a volume")
	id := v.ID.String()
	w.eventually("it is shown", func() bool { _, shown := of(id); return shown != nil && shown.State == overview.Ready })
	if o, shown := of(id); !o.Cluster || o.Version != "v1" || o.Driver != cluster.DefaultDriver || len(o.Nodes) != 1 || !o.Nodes[0].Ready || len(o.Nodes[0].Pools) != 2 || shown.Node != m.name || shown.Claim != nil {
		t.Errorf("got %+v\n%+v", o, shown)
	}

	quiet()
	pv := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "seen"}, Spec: corev1.PersistentVolumeSpec{AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
		Capacity: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Mi")}, ClaimRef: &corev1.ObjectReference{Kind: "PersistentVolumeClaim", Namespace: "default", Name: "data"},
		PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: cluster.DefaultDriver, VolumeHandle: id}}}}
	check.OK(t, w.Create(w.ctx, pv))
	changed("there is a PersistentVolume")
	off := false
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "nobody"}}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "user"}, Spec: corev1.PodSpec{ServiceAccountName: "nobody", AutomountServiceAccountToken: &off, Containers: []corev1.Container{{Name: "c", Image: "i"}},
		Volumes: []corev1.Volume{{Name: "data", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "data"}}}}}}
	check.OK(t, w.Create(w.ctx, account))
	defer func() { check.OK(t, w.Delete(w.ctx, account)) }()
	quiet()
	check.OK(t, w.Create(w.ctx, pod))
	defer func() { check.OK(t, w.Delete(w.ctx, pod)) }()
	changed("there is a pod")
	w.eventually("claim and pod are shown", func() bool {
		_, shown := of(id)
		return shown.Claim != nil && *shown.Claim == overview.Ref{Namespace: "default", Name: "data"} && len(shown.Pods) == 1 && shown.Pods[0].Name == "user" && shown.PersistentVolume == "seen"
	})

	pv.Status.Phase = corev1.VolumeReleased // its claim was deleted, and made anew
	check.OK(t, w.Status().Update(w.ctx, pv))
	w.eventually("a pod of another claim of that name does not use it", func() bool {
		_, shown := of(id)
		return shown.Claim != nil && len(shown.Pods) == 0
	})

	cancel()
	quiet()
	check.OK(t, s.Delete(w.ctx, v.ID))
	w.eventually("it is gone", func() bool { _, shown := of(id); return shown == nil })
	select {
	case <-changes:
		t.Error("somebody who looks no more was told of a change")
	default:
	}
}

// TestViewerWithoutRights: without the right to see pods the rest is shown all the same, and the overview says what is left out.
func TestViewerWithoutRights(t *testing.T) {
	w, _, s := newCluster(t)
	_, of := w.viewer(s, "controller")
	v, err := s.Create(w.ctx, spec("seen"))
	check.OK(t, err)
	w.eventually("the volume is shown", func() bool { _, shown := of(v.ID.String()); return shown != nil })
	w.eventually("what is left out is said", func() bool {
		o, _ := of("")
		return len(o.Missing) == 1 && strings.Contains(o.Missing[0], "the right to list and watch")
	})
}

// TestViewerOfReplicas: a volume with replicas is shown as one volume, and a change of its current replicas is told at once.
func TestViewerOfReplicas(t *testing.T) {
	w, _, s := legCluster(t, 2)
	viewer, of := w.viewer(s, apitest.Admin)
	made, err := s.Create(w.ctx, replicas("v", 2, "node-1"))
	check.OK(t, err)
	id := made.ID.String()
	w.eventually("all is read", func() bool {
		o, shown := of(id)
		return len(o.Missing) == 0 && shown != nil && shown.Replicas != nil && shown.Replicas.String() == "2/2"
	})
	if o, shown := of(id); len(o.Volumes) != 1 || strings.Join(shown.On(), ",") != "node-1,node-2" || len(shown.Problems) > 0 {
		t.Errorf("shown are %+v", o.Volumes)
	}
	changes := viewer.Changes(w.ctx)
	for quiet := false; !quiet; { // takes earlier changes off the channel
		select {
		case <-changes:
		case <-time.After(time.Second):
			quiet = true
		}
	}
	w.becomes("v", w.whole("v").Name)
	select {
	case <-changes:
	case <-time.After(14 * time.Second): // without an event it looks after 15
		t.Fatal("nobody was told")
	}
	w.eventually("it is shown", func() bool { _, shown := of(id); return shown.Replicas.String() == "1/2" && len(shown.Problems) == 1 })
}
