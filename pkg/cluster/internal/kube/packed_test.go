package kube

import (
	"reflect"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/pack"
)

// transforming is an informer that has a transform and nothing else.
type transforming struct {
	cache.SharedIndexInformer
	transform cache.TransformFunc
}

func (t *transforming) SetTransform(transform cache.TransformFunc) error {
	t.transform = transform
	return nil
}

// TestWordsOfLegs: what the legs of one volume say, and nobody else, is not kept for ever; what those of two volumes say is kept once.
func TestWordsOfLegs(t *testing.T) {
	format, err := pack.New(reflect.TypeFor[v1alpha1.Volume]())
	if err != nil {
		t.Fatal(err)
	}
	informer := &transforming{}
	if err := (&packing{informer, format}).SetTransform(nil); err != nil {
		t.Fatal(err)
	}
	size := func(name, of string) int {
		v := &v1alpha1.Volume{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v1alpha1.VolumeSpec{ReplicaOf: of, PersistentVolume: strings.Repeat("v", 200)}}
		o, err := informer.transform(v)
		if err != nil {
			t.Fatal(err)
		}
		return len(o.(*packed).text)
	}
	first, second, other := size("a", "volume-1"), size("b", "volume-1"), size("c", "volume-2")
	if second != first || other > first-150 {
		t.Errorf("the legs of a volume take %d and %d bytes, that of another one %d", first, second, other)
	}
}
