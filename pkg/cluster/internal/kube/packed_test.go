package kube

import (
	"reflect"
	"strings"
	"testing"
	"unsafe"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/pack"
)

// transforming is an informer that has a transform, a store and nothing else.
type transforming struct {
	cache.SharedIndexInformer
	transform cache.TransformFunc
	store     cache.Indexer
}

func (t *transforming) SetTransform(transform cache.TransformFunc) error {
	t.transform = transform
	return nil
}

func (t *transforming) GetIndexer() cache.Indexer { return t.store }

// packer returns what packs a volume as an informer does, and the store of that.
func packer(t *testing.T) (func(*v1alpha1.Volume) *packed, cache.Indexer) {
	t.Helper()
	format, err := pack.New(reflect.TypeFor[v1alpha1.Volume]())
	if err != nil {
		t.Fatal(err)
	}
	informer := &transforming{store: cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{})}
	if err := (&packing{informer, format}).SetTransform(nil); err != nil {
		t.Fatal(err)
	}
	return func(v *v1alpha1.Volume) *packed {
		o, err := informer.transform(v)
		if err != nil {
			t.Fatal(err)
		}
		return o.(*packed)
	}, informer.store
}

// TestWordsOfLegs: what the legs of one volume say, and nobody else, is not kept for ever; what those of two volumes say is kept once.
func TestWordsOfLegs(t *testing.T) {
	pack, _ := packer(t)
	size := func(name, of string) int {
		return len(pack(&v1alpha1.Volume{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v1alpha1.VolumeSpec{ReplicaOf: of, PersistentVolume: strings.Repeat("v", 200)}}).text)
	}
	first, second, other := size("a", "volume-1"), size("b", "volume-1"), size("c", "volume-2")
	if second != first || other > first-150 {
		t.Errorf("the legs of a volume take %d and %d bytes, that of another one %d", first, second, other)
	}
}

// TestOneName: the name of an object is in memory once, however often the object changes.
func TestOneName(t *testing.T) {
	pack, store := packer(t)
	var at *byte
	for i := range 3 {
		o := pack(&v1alpha1.Volume{ObjectMeta: metav1.ObjectMeta{Name: strings.Repeat("a", 32)}, Spec: v1alpha1.VolumeSpec{Size: int64(i)}})
		if err := store.Update(o); err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			at = unsafe.StringData(o.name)
		}
		if unsafe.StringData(o.name) != at || unsafe.StringData(store.ListKeys()[0]) != at {
			t.Errorf("change %d has a name of its own", i)
		}
	}
}
