package kube

import (
	"reflect"
	"strconv"
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

func (t *transforming) AddIndexers(indexers cache.Indexers) error {
	return t.store.AddIndexers(indexers)
}

// packer returns a function that packs a volume as an informer does, and the informer's store.
func packer(t testing.TB, indexers ...cache.Indexers) (func(*v1alpha1.Volume) *packed, cache.Indexer) {
	t.Helper()
	format, err := pack.New(reflect.TypeFor[v1alpha1.Volume]())
	if err != nil {
		t.Fatal(err)
	}
	informer := &transforming{store: cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{})}
	p := &packing{SharedIndexInformer: informer, format: format}
	if err := p.SetTransform(nil); err != nil {
		t.Fatal(err)
	}
	for _, one := range indexers {
		if err := p.AddIndexers(one); err != nil {
			t.Fatal(err)
		}
	}
	return func(v *v1alpha1.Volume) *packed {
		o, err := informer.transform(v)
		if err != nil {
			t.Fatal(err)
		}
		return o.(*packed)
	}, informer.store
}

// TestWordsOfLegs: a text that only the legs of one volume have does not become a word; one that legs of two volumes have does.
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

// someIndexes returns as many indexes as a store has, each to be added by itself. They call seen with each object that they get.
func someIndexes(seen func(*v1alpha1.Volume)) (all []cache.Indexers) {
	for i := range 6 {
		all = append(all, cache.Indexers{strconv.Itoa(i): func(v any) ([]string, error) {
			seen(v.(*v1alpha1.Volume))
			return []string{v.(*v1alpha1.Volume).Spec.NodeName}, nil
		}})
	}
	return all
}

// TestIndexedOnce: when an object in a store changes, the new one is unpacked once for all indexes, and the old one not again.
func TestIndexedOnce(t *testing.T) {
	seen := map[*v1alpha1.Volume]int{}
	pack, store := packer(t, someIndexes(func(v *v1alpha1.Volume) { seen[v]++ })...)
	on := func(node string) *packed {
		return pack(&v1alpha1.Volume{ObjectMeta: metav1.ObjectMeta{Name: "a"}, Spec: v1alpha1.VolumeSpec{NodeName: node}})
	}
	for i, change := range []func() error{func() error { return store.Add(on("n1")) }, func() error { return store.Update(on("n2")) }, func() error { return store.Replace([]any{on("n3")}, "") }} {
		if err := change(); err != nil || len(seen) != i+1 {
			t.Errorf("after change %d indexes were asked for %d objects, %v", i+1, len(seen), err)
		}
	}
	for i := range 6 {
		if all, err := store.IndexKeys(strconv.Itoa(i), "n3"); err != nil || len(all) != 1 {
			t.Errorf("index %d has %v, %v", i, all, err)
		}
	}
}

// BenchmarkRelist measures how long a store takes to replace 100,000 volumes after a new list. It holds its lock for most of that.
func BenchmarkRelist(b *testing.B) {
	pack, store := packer(b, someIndexes(func(*v1alpha1.Volume) {})...)
	all := make([]any, 100_000)
	for i := range all {
		all[i] = pack(&v1alpha1.Volume{ObjectMeta: metav1.ObjectMeta{Name: strconv.Itoa(i)}, Spec: v1alpha1.VolumeSpec{NodeName: "node-" + strconv.Itoa(i%100), Pool: "default", Name: "pvc-" + strconv.Itoa(i)}})
	}
	for b.Loop() {
		if err := store.Replace(all, ""); err != nil {
			b.Fatal(err)
		}
	}
}
