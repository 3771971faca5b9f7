package v1alpha1

import (
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// GroupVersion of the types.
var GroupVersion = schema.GroupVersion{Group: "ashlar.dev", Version: "v1alpha1"}

// AddToScheme makes the types known.
func AddToScheme(s *runtime.Scheme) error {
	s.AddKnownTypes(GroupVersion, &Volume{}, &VolumeList{}, &Snapshot{}, &SnapshotList{}, &Pool{}, &PoolList{}, &ReplicatedVolume{}, &ReplicatedVolumeList{})
	metav1.AddToGroupVersion(s, GroupVersion)
	return nil
}

// AddToMapper says what the API server calls the kinds, so that nobody has to ask it.
func AddToMapper(m *meta.DefaultRESTMapper) {
	for _, kind := range []string{"Volume", "Snapshot", "Pool", "ReplicatedVolume"} {
		m.Add(GroupVersion.WithKind(kind), meta.RESTScopeRoot)
	}
}
