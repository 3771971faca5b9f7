package events

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
)

// manyVolumes is a client of an API server that has n PersistentVolumes.
type manyVolumes struct {
	client.Client
	n int
}

func (m manyVolumes) at(i int) corev1.PersistentVolume {
	pv := corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("pv-%d", i), UID: types.UID(fmt.Sprintf("uid-%d", i)), Annotations: map[string]string{"of": strings.Repeat("a tenant ", 200)}}}
	pv.Spec.CSI = &corev1.CSIPersistentVolumeSource{Driver: cluster.DefaultDriver, VolumeHandle: fmt.Sprintf("vol.default.%032x", i)}
	return pv
}

func (m manyVolumes) List(_ context.Context, list client.ObjectList, _ ...client.ListOption) error {
	l := list.(*corev1.PersistentVolumeList)
	l.Items = nil
	for i := range m.n {
		l.Items = append(l.Items, m.at(i))
	}
	return nil
}

func (m manyVolumes) Get(_ context.Context, key client.ObjectKey, o client.Object, _ ...client.GetOption) error {
	for i := range m.n {
		if pv := m.at(i); pv.Name == key.Name {
			*o.(*corev1.PersistentVolume) = pv
			return nil
		}
	}
	return apierrors.NewNotFound(schema.GroupResource{Resource: "persistentvolumes"}, key.Name)
}

// TestHandlesInLittle: after a search for a PersistentVolume that was written by hand, which reads all of them, only little of each stays in memory.
func TestHandlesInLittle(t *testing.T) {
	const n = 2000
	h := &handles{live: manyVolumes{n: n}, driver: cluster.DefaultDriver}
	v := cluster.VolumeNamed(fmt.Sprintf("%032x", n-1))
	v.Spec.Pool, v.Status.Created = "default", &metav1.MicroTime{}
	heap := func() int {
		var is runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&is)
		return int(is.HeapAlloc)
	}
	before := heap()
	on, err := h.find(t.Context(), v, onPV)
	check.OK(t, err)
	if on == nil || on.UID != types.UID(fmt.Sprintf("uid-%d", n-1)) {
		t.Errorf("it has the PersistentVolume %v", on)
	}
	if used := (heap() - before) / n; used > 500 {
		t.Errorf("%d bytes are kept of each PersistentVolume", used)
	}
	if on, err := h.find(t.Context(), &v1alpha1.Volume{Status: v.Status}, onPV); on != nil || err != nil {
		t.Errorf("a volume without one has %v, %v", on, err)
	}
	runtime.KeepAlive(h)
}
