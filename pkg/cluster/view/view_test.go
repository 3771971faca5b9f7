package view

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/luks"
)

// TestOneHandleOfTwo: of two PersistentVolumes of a volume the one that is bound counts, in whatever order they are listed.
func TestOneHandleOfTwo(t *testing.T) {
	v := v1alpha1.Volume{ObjectMeta: metav1.ObjectMeta{Name: "key"}, Spec: v1alpha1.VolumeSpec{Pool: "default"}}
	pv := func(name, claim string, phase corev1.PersistentVolumePhase) corev1.PersistentVolume {
		one := corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: corev1.PersistentVolumeStatus{Phase: phase}, Spec: corev1.PersistentVolumeSpec{
			PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: v1alpha1.DefaultDriver, VolumeHandle: v.ID()}}}}
		if claim != "" {
			one.Spec.ClaimRef = &corev1.ObjectReference{Namespace: "shop", Name: claim}
		}
		return one
	}
	for _, test := range []struct {
		name                string
		one, two            corev1.PersistentVolume
		stands, claim, pods string
	}{
		{"bound and released", pv("b", "now", corev1.VolumeBound), pv("a", "before", corev1.VolumeReleased), "b", "now", "user"},
		{"bound and failed", pv("a", "now", corev1.VolumeBound), pv("z", "before", corev1.VolumeFailed), "a", "now", "user"},
		{"bound and available", pv("b", "now", corev1.VolumeBound), pv("a", "", corev1.VolumeAvailable), "b", "now", "user"},
		{"available and released", pv("b", "", corev1.VolumeAvailable), pv("a", "before", corev1.VolumeReleased), "b", "", ""},
		{"both released", pv("b", "now", corev1.VolumeReleased), pv("a", "before", corev1.VolumeReleased), "a", "before", ""},
	} {
		for _, order := range [][]corev1.PersistentVolume{{test.one, test.two}, {test.two, test.one}} {
			tk := taking{out: &overview.Overview{Driver: v1alpha1.DefaultDriver}, handles: map[string]standing{}, claims: map[string]overview.Ref{}, holders: map[overview.Ref]string{},
				users: map[overview.Ref][]overview.Ref{{Namespace: "shop", Name: "now"}: {{Namespace: "shop", Name: "user"}}}}
			for _, one := range order { // each in a page of its own
				tk.addPersistentVolumes(&corev1.PersistentVolumeList{Items: []corev1.PersistentVolume{one}})
			}
			out, claim, pods := tk.volume(&v), "", ""
			if out.Claim != nil {
				claim = out.Claim.Name
			}
			for _, pod := range out.Pods {
				pods += pod.Name
			}
			if out.PersistentVolume != test.stands || claim != test.claim || pods != test.pods {
				t.Errorf("%s, %s first: %q of claim %q, used by %q", test.name, order[0].Name, out.PersistentVolume, claim, pods)
			}
		}
	}
}

// TestMoveWaitsForANode: where a move waits for a node that is away, that is shown, also if nobody has said anything of the move yet.
func TestMoveWaitsForANode(t *testing.T) {
	ready := machine{ready: true}
	for _, test := range []struct {
		move  *v1alpha1.Move
		says  *v1alpha1.MoveStatus
		other machine
		there bool
		want  string
	}{
		{&v1alpha1.Move{Node: "other"}, nil, ready, true, "to node other"},
		{&v1alpha1.Move{Node: "other"}, nil, machine{}, true, "to node other: it waits for node other, which is not ready"},
		{&v1alpha1.Move{Node: "other"}, &v1alpha1.MoveStatus{Node: "other", Message: "half"}, machine{gone: true}, true, "to node other: half: it waits for node other, which is gone"},
		{&v1alpha1.Move{Node: "other", Pool: "fast"}, nil, machine{}, false, "to pool fast of node other: it waits for node other, which is gone"},
		{&v1alpha1.Move{Node: "silent"}, nil, ready, true, "to node silent: it waits for node silent, whose agent is not heard"},
		{&v1alpha1.Move{Node: "other", Left: true}, &v1alpha1.MoveStatus{Node: "home", Arrived: true, Message: "moved; node other is to give its bytes back"}, machine{}, true,
			"from node other: moved; node other is to give its bytes back: it waits for node other, which is not ready"},
		{&v1alpha1.Move{Node: "other", Left: true}, &v1alpha1.MoveStatus{Node: "home", Arrived: true, Cleared: true, Message: "moved"}, machine{}, true, "from node other: moved"},
	} {
		tk := taking{out: &overview.Overview{}, known: true, listening: true, machines: map[string]machine{"home": ready, "silent": ready}, options: Options{Silent: func(node string) bool { return node == "silent" }}}
		if test.there {
			tk.machines["other"] = test.other
		}
		v := &v1alpha1.Volume{Spec: v1alpha1.VolumeSpec{NodeName: "home", Move: test.move}, Status: v1alpha1.VolumeStatus{Move: test.says}}
		if have := tk.moving(v); have != test.want {
			t.Errorf("%q, want %q", have, test.want)
		}
	}
}

// TestEncryptionHeader: the room of an encrypted class is counted with the header that the driver writes.
func TestEncryptionHeader(t *testing.T) {
	if v1alpha1.EncryptionHeader != luks.HeaderSize {
		t.Errorf("the header is counted with %d bytes, and has %d", v1alpha1.EncryptionHeader, luks.HeaderSize)
	}
}
