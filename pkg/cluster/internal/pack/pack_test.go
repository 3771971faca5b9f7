package pack_test

import (
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/randfill"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/pack"
)

// TestPack: an object with any values in its fields is equal after it was packed and unpacked, also if others were packed in between.
func TestPack(t *testing.T) {
	for _, example := range []any{v1alpha1.Volume{}, v1alpha1.Snapshot{}, v1alpha1.ReplicatedVolume{}, v1alpha1.Pool{}} {
		of := reflect.TypeOf(example)
		t.Run(of.Name(), func(t *testing.T) {
			f, err := pack.New(of)
			check.OK(t, err)
			fill := randfill.NewWithSeed(1).NilChance(0.3).NumElements(0, 3).MaxDepth(20).Funcs(
				func(s *string, c randfill.Continue) {
					*s = strings.Repeat([]string{"", "a", "node-1", "longer than a word may be", c.String(0), fmt.Sprint(c.Uint32())}[c.Intn(6)], 1+c.Intn(20))
				},
				func(at *time.Time, c randfill.Continue) { *at = time.Unix(int64(c.Int31())-1<<30, int64(c.Intn(1e9))) },
				func(m *[]metav1.ManagedFieldsEntry, _ randfill.Continue) {}, // caches do not have them
			)
			var were []any
			var texts []string
			for i := range 2000 {
				o := reflect.New(of)
				if i > 0 { // the first one is empty
					fill.Fill(o.Interface())
				}
				were, texts = append(were, o.Interface()), append(texts, f.Pack(fmt.Sprint(i), o.Interface()))
			}
			for i, text := range texts {
				if is := f.Unpack(text); !equality.Semantic.DeepEqual(is, were[i]) {
					t.Fatalf("it was\n%+v\nand is\n%+v", were[i], is)
				}
			}
		})
	}
}

// TestPackInMaps: maps whose values are structs and times are equal after they were packed and unpacked.
func TestPackInMaps(t *testing.T) {
	type element struct{ At metav1.Time }
	type all struct {
		Times    map[string]metav1.Time
		Elements map[string]element
	}
	f, err := pack.New(reflect.TypeFor[all]())
	check.OK(t, err)
	now := metav1.Now()
	v := &all{map[string]metav1.Time{"a": now, "b": {}}, map[string]element{"c": {now}}}
	if is := f.Unpack(f.Pack("v", v)); !equality.Semantic.DeepEqual(is, v) {
		t.Errorf("it was %+v and is %+v", v, is)
	}
}

// TestWords: a string that two owners have becomes a word, and one that one owner has several times does not.
func TestWords(t *testing.T) {
	f, err := pack.New(reflect.TypeFor[v1alpha1.Volume]())
	check.OK(t, err)
	size := func(owner, node string) int {
		v := &v1alpha1.Volume{}
		v.UID, v.Spec.NodeName = types.UID(strings.Repeat(owner, 36)), node
		return len(f.Pack(owner, v))
	}
	node := strings.Repeat("n", 60)
	first, again, second, third := size("a", node), size("a", node), size("b", node), size("a", node)
	if first != again || second > first-50 || third != second {
		t.Errorf("%d bytes, then %d, of the second %d, then %d", first, again, second, third)
	}
}

// TestLong: a string that an object has twice is written once if both are near each other. It is not searched for in all of a long text, as that takes
// time.
func TestLong(t *testing.T) {
	f, err := pack.New(reflect.TypeFor[v1alpha1.Volume]())
	check.OK(t, err)
	said := strings.Repeat("again", 40)
	size := func(between int) int {
		v := &v1alpha1.Volume{}
		v.Finalizers = []string{said, strings.Repeat("-", between), said} // a list, as its order stays
		return len(f.Pack("v", v)) - between
	}
	near, far, farther := size(1<<10), size(1<<13), size(1<<14)
	if near > far-len(said)/2 || far != farther {
		t.Errorf("what is said twice takes %d bytes near itself, %d far off, and %d farther", near, far, farther)
	}
}

// TestCannot: a type with values that could not be restored has no format.
func TestCannot(t *testing.T) {
	for _, v := range []any{struct{ V any }{}, struct{ v int }{}, struct{ V []*int }{}, struct{ V map[string]*int }{}, struct{ V float64 }{}} {
		if _, err := pack.New(reflect.TypeOf(v)); err == nil {
			t.Errorf("%T can be packed", v)
		}
	}
}

func BenchmarkPack(b *testing.B) {
	f, err := pack.New(reflect.TypeFor[v1alpha1.Volume]())
	check.OK(b, err)
	now := metav1.Now()
	v := &v1alpha1.Volume{ObjectMeta: metav1.ObjectMeta{Name: strings.Repeat("1", 32), UID: "9f1b2c3d-4e5f-4a6b-8c7d-0e9f8a7b6c5d", ResourceVersion: "123456", CreationTimestamp: now},
		Spec: v1alpha1.VolumeSpec{NodeName: "node-1", Pool: "default", Name: "pvc-9f1b2c3d-4e5f-4a6b-8c7d-0e9f8a7b6c5d", PersistentVolume: "pvc-9f1b2c3d-4e5f-4a6b-8c7d-0e9f8a7b6c5d", Size: 1 << 30, Filesystem: "ext4",
			Claim: &v1alpha1.Claim{Node: "node-1", Mode: "mount/SINGLE_NODE_WRITER", Since: &now}, ClaimRef: &v1alpha1.ClaimRef{Namespace: "the-namespace", Name: "data-database-0"}}}
	v.Status.Conditions = []metav1.Condition{{Type: v1alpha1.Ready, Status: metav1.ConditionTrue, Reason: "Created", Message: "the volume is there to be used", LastTransitionTime: now},
		{Type: v1alpha1.Healthy, Status: metav1.ConditionTrue, Reason: "NoProblems", Message: "nothing is known to be wrong", LastTransitionTime: now}}
	v.Status.Created, v.Status.Size = &metav1.MicroTime{Time: now.Time}, 1<<30
	f.Pack("another", v)
	text := f.Pack("one", v)
	b.Run("pack", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			f.Pack("one", v)
		}
	})
	b.Run("unpack", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			f.Unpack(text)
		}
	})
	b.Run("DeepCopy", func(b *testing.B) { // for comparison: a read from a cache that does not pack
		b.ReportAllocs()
		for b.Loop() {
			v.DeepCopy()
		}
	})
}
