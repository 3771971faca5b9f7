package v1alpha1_test

import (
	"context"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
)

func TestMain(m *testing.M) { apitest.Main(m) }

// TestGenerated: what is committed is what the types give.
func TestGenerated(t *testing.T) {
	dir := t.TempDir()
	if out, err := exec.Command("../../../hack/generate.sh", dir).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, directory := range []string{"pkg/api/v1alpha1", "deploy/kubernetes/crds"} {
		files, err := filepath.Glob(filepath.Join(dir, directory, "*"))
		check.OK(t, err)
		if len(files) == 0 {
			t.Errorf("nothing was generated in %s", directory)
		}
		for _, file := range files {
			want, err := os.ReadFile(file)
			check.OK(t, err)
			have, err := os.ReadFile(filepath.Join("../../..", directory, filepath.Base(file)))
			check.OK(t, err)
			if string(have) != string(want) {
				t.Errorf("%s/%s is not what the types give: make generate", directory, filepath.Base(file))
			}
		}
	}
}

const key = "0123456789abcdef0123456789abcdef"

func full() *v1alpha1.Volume {
	return &v1alpha1.Volume{ObjectMeta: metav1.ObjectMeta{Name: key},
		Spec: v1alpha1.VolumeSpec{NodeName: "n", Pool: "default", Name: "pvc-1", Size: 1 << 20, Provisioning: "thin",
			Source: &v1alpha1.Source{Kind: "snap", Key: strings.Repeat("f", 32)}, Filesystem: "xfs",
			Mutable: map[string]string{"readAheadKiB": "128"}, ClaimRef: &v1alpha1.ClaimRef{Namespace: "a", Name: "b"}}}
}

// TestRules: what the API server lets through, and what it does not.
func TestRules(t *testing.T) {
	scheme := runtime.NewScheme()
	check.OK(t, v1alpha1.AddToScheme(scheme))
	c, err := client.New(apitest.Get(t).Config(apitest.Admin), client.Options{Scheme: scheme})
	check.OK(t, err)
	c = client.WithFieldValidation(c, metav1.FieldValidationStrict)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()

	for what, change := range map[string]func(*v1alpha1.Volume){
		"a name that is no key":   func(v *v1alpha1.Volume) { v.Name = "pvc-1" },
		"a size of no blocks":     func(v *v1alpha1.Volume) { v.Spec.Size++ },
		"no node":                 func(v *v1alpha1.Volume) { v.Spec.NodeName = "" },
		"a pool that is a path":   func(v *v1alpha1.Volume) { v.Spec.Pool = "../a" },
		"an unknown filesystem":   func(v *v1alpha1.Volume) { v.Spec.Filesystem = "ntfs" },
		"a source that is a path": func(v *v1alpha1.Volume) { v.Spec.Source.Key = "/" },
	} {
		v := full()
		change(v)
		if err := c.Create(ctx, v); !apierrors.IsInvalid(err) {
			t.Errorf("%s: %v", what, err)
		}
	}

	v := full()
	check.OK(t, c.Create(ctx, v))
	defer func() { check.OK(t, c.Delete(ctx, v)) }()
	if want := full(); v.Spec.Size != want.Spec.Size || *v.Spec.Source != *want.Spec.Source || !maps.Equal(v.Spec.Mutable, want.Spec.Mutable) || *v.Spec.ClaimRef != *want.Spec.ClaimRef {
		t.Errorf("created %+v", v.Spec)
	}
	for what, change := range map[string]func(*v1alpha1.Volume){
		"another node":   func(v *v1alpha1.Volume) { v.Spec.NodeName = "m" },
		"another pool":   func(v *v1alpha1.Volume) { v.Spec.Pool = "m" },
		"another name":   func(v *v1alpha1.Volume) { v.Spec.Name = "m" },
		"thick":          func(v *v1alpha1.Volume) { v.Spec.Provisioning = "thick" },
		"no source":      func(v *v1alpha1.Volume) { v.Spec.Source = nil },
		"another source": func(v *v1alpha1.Volume) { v.Spec.Source.Kind = "vol" },
		"smaller":        func(v *v1alpha1.Volume) { v.Spec.Size = 4096 },
		"another type":   func(v *v1alpha1.Volume) { v.Spec.Filesystem = "ext4" },
	} {
		other := v.DeepCopy()
		change(other)
		if err := c.Update(ctx, other); !apierrors.IsInvalid(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
	now := metav1.NowMicro()
	v.Status.Created, v.Status.Size = &now, v.Spec.Size
	v.Status.Health = []v1alpha1.Problem{{Severity: "DataLoss", Reason: "ImageMissing", Message: "gone"}}
	v.Status.Failure = &v1alpha1.Failure{Reason: "NoSpace", Message: "full"}
	check.OK(t, c.Status().Update(ctx, v))
	if v.Status.Created == nil || !v.Status.Created.Time.Equal(now.Truncate(time.Microsecond)) || len(v.Status.Health) != 1 || v.Status.Failure.Reason != "NoSpace" {
		t.Errorf("status %+v", v.Status)
	}
	again := v.DeepCopy()
	again.Status.Created = nil
	if err := c.Status().Update(ctx, again); !apierrors.IsInvalid(err) {
		t.Errorf("made unmade: %v", err)
	}
	v.Spec.Size *= 4
	check.OK(t, c.Update(ctx, v))
	v.Spec.Size /= 4 // to what it has
	check.OK(t, c.Update(ctx, v))
	v.Spec.Size /= 2
	if err := c.Update(ctx, v.DeepCopy()); !apierrors.IsInvalid(err) {
		t.Errorf("smaller than it is: %v", err)
	}
	v.Spec.Size *= 2

	var list v1alpha1.VolumeList
	check.OK(t, c.List(ctx, &list, client.MatchingFields{"spec.nodeName": "n"}))
	if len(list.Items) != 1 {
		t.Errorf("%d volumes of the node", len(list.Items))
	}
	check.OK(t, c.List(ctx, &list, client.MatchingFields{"spec.nodeName": "m"}))
	if len(list.Items) != 0 {
		t.Errorf("%d volumes of another node", len(list.Items))
	}

	s := &v1alpha1.Snapshot{ObjectMeta: metav1.ObjectMeta{Name: key}, Spec: v1alpha1.SnapshotSpec{NodeName: "n", Pool: "default",
		Name: "snapshot-1", Source: key, Group: &v1alpha1.Group{Key: key, Size: 2}}}
	check.OK(t, c.Create(ctx, s))
	defer func() { check.OK(t, c.Delete(ctx, s)) }()
	other := s.DeepCopy()
	other.Spec.Group.Size = 1
	if err := c.Update(ctx, other); !apierrors.IsInvalid(err) {
		t.Errorf("another group: %v", err)
	}

	p := &v1alpha1.Pool{ObjectMeta: metav1.ObjectMeta{Name: "n.default"}, Spec: v1alpha1.PoolSpec{NodeName: "n", Pool: "default", Default: true}}
	check.OK(t, c.Create(ctx, p))
	defer func() { check.OK(t, c.Delete(ctx, p)) }()
	p.Status.Available, p.Status.Kind = 5, "file"
	check.OK(t, c.Status().Update(ctx, p))
}

// TestAccessRules: what the definitions say of volumes that other nodes can use: access does not change, and claims are counted up.
func TestAccessRules(t *testing.T) {
	scheme := runtime.NewScheme()
	check.OK(t, v1alpha1.AddToScheme(scheme))
	c, err := client.New(apitest.Get(t).Config(apitest.Admin), client.Options{Scheme: scheme})
	check.OK(t, err)
	c = client.WithFieldValidation(c, metav1.FieldValidationStrict)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	claim := func(node string, generation int64) *v1alpha1.Claim {
		return &v1alpha1.Claim{Node: node, Mode: "m", Generation: generation}
	}
	begin := func(edit func(*v1alpha1.VolumeSpec)) *v1alpha1.Volume {
		v := full()
		edit(&v.Spec)
		check.OK(t, c.Create(ctx, v))
		return v
	}
	refused := func(v *v1alpha1.Volume, message string, edit func(*v1alpha1.VolumeSpec)) {
		t.Helper()
		other := v.DeepCopy()
		edit(&other.Spec)
		if err := c.Update(ctx, other); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), message) {
			t.Errorf("%v, want a refusal that says: %s", err, message)
		}
	}

	v := begin(func(s *v1alpha1.VolumeSpec) { s.Access, s.HomeTimeout = "any", 90 })
	for _, edit := range []func(*v1alpha1.VolumeSpec){func(s *v1alpha1.VolumeSpec) { s.HomeTimeout = 91 }, func(s *v1alpha1.VolumeSpec) { s.HomeTimeout = 0 },
		func(s *v1alpha1.VolumeSpec) { s.Access, s.HomeTimeout = "", 0 }} {
		refused(v, "the access to a volume does not change", edit)
	}
	const counted, another = "the generation of a claim is the count of claims", "another claim has another generation"
	refused(v, counted, func(s *v1alpha1.VolumeSpec) { s.Claim = claim("m", 0) })
	refused(v, counted, func(s *v1alpha1.VolumeSpec) { s.Claim, s.Claims = claim("m", 1), 2 })
	v.Spec.Claim, v.Spec.Claims = claim("m", 4), 4
	check.OK(t, c.Update(ctx, v))
	refused(v, another, func(s *v1alpha1.VolumeSpec) { s.Claim = claim("o", 4) })
	refused(v, "claims are counted up", func(s *v1alpha1.VolumeSpec) { s.Claim, s.Claims = claim("m", 3), 3 })
	var list v1alpha1.VolumeList
	for node, want := range map[string]int{"m": 1, "n": 0} {
		check.OK(t, c.List(ctx, &list, client.MatchingFields{"spec.claim.node": node}))
		if len(list.Items) != want {
			t.Errorf("%d volumes are claimed for node %s, want %d", len(list.Items), node, want)
		}
	}
	v.Spec.Claim = nil
	check.OK(t, c.Update(ctx, v))
	refused(v, "claims are counted up", func(s *v1alpha1.VolumeSpec) { s.Claims = 0 })
	refused(v, another, func(s *v1alpha1.VolumeSpec) { s.Claim = claim("m", 4) })
	v.Spec.Claim, v.Spec.Claims = claim("m", 9), 9
	check.OK(t, c.Update(ctx, v))
	check.OK(t, c.Delete(ctx, v))

	v = begin(func(s *v1alpha1.VolumeSpec) { s.Access, s.ReplicaOf = "any", strings.Repeat("a", 32) })
	refused(v, "a leg is of one volume, for good", func(s *v1alpha1.VolumeSpec) { s.ReplicaOf = "" })
	refused(v, "a leg is of one volume, for good", func(s *v1alpha1.VolumeSpec) { s.ReplicaOf = strings.Repeat("b", 32) })
	refused(v, "nobody but the user of its volume reads it", func(s *v1alpha1.VolumeSpec) { s.Claims, s.Readers = 1, []v1alpha1.Claim{*claim("m", 1)} })
	check.OK(t, c.Delete(ctx, v))

	v = begin(func(*v1alpha1.VolumeSpec) {})
	refused(v, "the access to a volume does not change", func(s *v1alpha1.VolumeSpec) { s.Access = "any" })
	for _, edit := range []func(*v1alpha1.VolumeSpec){func(s *v1alpha1.VolumeSpec) { s.Claims = 1 }, func(s *v1alpha1.VolumeSpec) { s.Claim = claim("n", 1) }} {
		refused(v, "are for volumes with access any", edit)
	}
	v.Spec.Claim = claim("n", 0)
	check.OK(t, c.Update(ctx, v))
	check.OK(t, c.Delete(ctx, v))
}
