package cluster_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/luks"
	"github.com/ashlar-csi/ashlar/pkg/cluster/agent"
	"github.com/ashlar-csi/ashlar/pkg/cluster/store"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

var luks2 = volume.Encryption{Scheme: volume.LUKS2, Discards: true}

func encrypted(name string) volume.Spec {
	s := spec(name)
	s.Encryption = luks2
	return s
}

// keeps waits until a store knows that a machine can encrypt volumes.
func (w *environment) keeps(s *store.Store, m *machine) {
	w.Helper()
	w.eventually("the store knows what "+m.name+" can", func() bool {
		c, err := s.Capacity(w.ctx, "b", volume.LUKS2, m.name)
		return err == nil && c.Total > 0
	})
}

// TestEncryptedPlaced: an encrypted volume is made only on a node that reports that it can encrypt.
func TestEncryptedPlaced(t *testing.T) {
	w := newEnvironment(t)
	a, b := w.machine("node-a"), w.begin(&machine{name: "node-b", schemes: []volume.Scheme{volume.LUKS2}})
	s, _ := w.store()
	w.pooled(s, a)
	w.keeps(s, b)
	plain, err := s.Capacity(w.ctx, "", volume.NotEncrypted, b.name)
	check.OK(t, err)
	if c, err := s.Capacity(w.ctx, "", volume.LUKS2, ""); err != nil || c.Available != plain.Available || c.MaxVolume != plain.MaxVolume-16*mib {
		t.Errorf("for what is encrypted there are %+v, %v; for all else, on the node that can, %+v", c, err, plain)
	}
	if c, err := s.Capacity(w.ctx, "", volume.LUKS2, a.name); err != nil || c.Available != 0 {
		t.Errorf("on the node that cannot there are %+v, %v", c, err)
	}
	on := encrypted("there")
	on.Nodes = []string{a.name}
	_, err = s.Create(w.ctx, on)
	fails(t, err, errdefs.ErrNoSpace)
	if !strings.Contains(err.Error(), "node node-a cannot encrypt (parameter encryption=luks2)") {
		t.Error(err)
	}
	for _, nodes := range [][]string{nil, {a.name, b.name}, {b.name}} {
		on := encrypted("v" + strings.Join(nodes, ""))
		on.Nodes = nodes
		v, err := s.Create(w.ctx, on)
		if len(volume.SchemesHere()) == 0 { // this machine cannot encrypt, so its node refuses
			if fails(t, err, errdefs.ErrUnsupported); !strings.Contains(err.Error(), b.name) {
				t.Error(err)
			}
			continue
		}
		if err != nil || v.Node != b.name || v.Encryption != luks2 || v.Size != mib {
			t.Errorf("of %v: %+v, %v", nodes, v, err)
		}
		o := w.object(on.Name)
		if o.Spec.Encryption != "luks2" || !o.Spec.EncryptionDiscard || o.Status.Encryption != "luks2" || o.Status.Size != mib {
			t.Errorf("its object is %+v", o)
		}
	}
	w.tally(a)
	w.tally(b)
}

// keptFor puts an encrypted volume into a pool of a machine, as a driver makes it that can encrypt, has it adopted, and returns it.
func (w *environment) keptFor(m *machine, s *store.Store, name string) volume.Volume {
	w.Helper()
	ref := blockdev.Ref{Kind: blockdev.Volume, Key: volume.KeyOf(name)}
	_, err := m.disks[0].Open("default", nil).Create(w.ctx, blockdev.Spec{Ref: ref, Name: name, Size: 80 * mib,
		Labels: map[string]string{"encryption": "luks2", "encryption.discard": "true"}})
	check.OK(w, err)
	m.agent.Changed()
	w.strays("default", 1)
	w.adopt("default", "all")
	id := volume.ID{Kind: blockdev.Volume, Pool: "default", Key: ref.Key}
	var v volume.Volume
	w.eventually("it has an object", func() bool {
		v, err = s.Get(w.ctx, id)
		return err == nil
	})
	return v
}

// TestEncryptedAdopted: an adopted volume has the encryption that its record in the pool has, and its snapshots have the same. It cannot be changed, and
// copies cannot be without it.
func TestEncryptedAdopted(t *testing.T) {
	w, m, s := newCluster(t)
	v := w.keptFor(m, s, "kept")
	if v.Encryption != luks2 || v.Size != 64*mib {
		t.Errorf("adopted as %+v", v)
	}
	snapshot, err := s.CreateSnapshot(w.ctx, "s", v.ID)
	check.OK(t, err)
	if snapshot.Scheme != volume.LUKS2 || snapshot.Size != v.Size {
		t.Errorf("its snapshot is %+v", snapshot)
	}
	for _, source := range []volume.ID{v.ID, snapshot.ID} {
		copied := volume.Spec{Name: "copy of " + source.String(), Source: source, Size: volume.Range{Required: 1}}
		fails(t, second(s.Create(w.ctx, copied)), errdefs.ErrInvalid)
	}
	check.OK(t, s.Delete(w.ctx, v.ID))
	fails(t, second(s.Create(w.ctx, volume.Spec{Name: "restored", Source: snapshot.ID, Size: volume.Range{Required: 1}})), errdefs.ErrInvalid)

	again := w.keptFor(m, s, "kept again")
	for what, edit := range map[string]func(o *v1alpha1.Volume){
		"without":          func(o *v1alpha1.Volume) { o.Spec.Encryption = "" },
		"without discards": func(o *v1alpha1.Volume) { o.Spec.EncryptionDiscard = false },
	} {
		if err := w.written(func() error {
			o := w.object(again.Name)
			edit(o)
			return w.Update(w.ctx, o)
		}); err == nil || !strings.Contains(err.Error(), "encryption of a volume does not change") {
			t.Errorf("%s: %v", what, err)
		}
	}
	check.OK(t, errors.Join(s.Delete(w.ctx, again.ID), s.DeleteSnapshot(w.ctx, snapshot.ID)))
	w.tally(m)
}

// TestMadeUnencrypted: the agent of an older driver, which does not know encryption, makes a volume that was to be encrypted. Create does not return it.
func TestMadeUnencrypted(t *testing.T) {
	w := newEnvironment(t)
	m := w.begin(&machine{name: nodeName, schemes: []volume.Scheme{volume.LUKS2}})
	s, _ := w.store()
	w.keeps(s, m)
	m.stop() // the test takes the part of the older agent
	answer := make(chan error, 1)
	go func() { answer <- second(s.Create(w.ctx, encrypted("v"))) }()
	w.eventually("it is asked for", func() bool { return w.object("v") != nil })
	o := w.object("v")
	before := o.DeepCopy()
	o.Spec.Make = false
	check.OK(t, w.Patch(w.ctx, o, client.MergeFrom(before)))
	before = o.DeepCopy()
	now := metav1.NowMicro()
	o.Status.Created, o.Status.Size, o.Status.ObservedGeneration = &now, o.Spec.Size, o.Generation
	check.OK(t, w.Status().Patch(w.ctx, o, client.MergeFrom(before)))
	err := <-answer
	fails(t, err, errdefs.ErrPrecondition)
	if !strings.Contains(err.Error(), "made it with encryption none") {
		t.Error(err)
	}
	fails(t, second(s.Create(w.ctx, encrypted("v"))), errdefs.ErrExists)
}

// TestOlderDefinitions: with definitions that have neither the field encryption nor access, volumes that need them are not made.
func TestOlderDefinitions(t *testing.T) {
	w := newEnvironment(t)
	m := w.begin(&machine{name: nodeName, schemes: []volume.Scheme{volume.LUKS2}, with: func(o *agent.Options) { o.Network = &v1alpha1.Network{Name: "storage"} }})
	s, _ := w.store()
	w.keeps(s, m)
	server := apitest.Get(t)
	t.Cleanup(func() { check.OK(t, server.Define(context.Background())) })
	check.OK(t, server.Redefine(w.ctx, "volumes.ashlar.dev", func(crd *unstructured.Unstructured) {
		versions, _, _ := unstructured.NestedSlice(crd.Object, "spec", "versions")
		path := []string{"schema", "openAPIV3Schema", "properties", "spec"}
		spec, _, _ := unstructured.NestedMap(versions[0].(map[string]any), path...)
		delete(spec, "x-kubernetes-validations")
		delete(spec["properties"].(map[string]any), "encryption")
		delete(spec["properties"].(map[string]any), "access")
		check.OK(t, unstructured.SetNestedMap(versions[0].(map[string]any), spec, path...))
		check.OK(t, unstructured.SetNestedSlice(crd.Object, versions, "spec", "versions"))
	}))
	w.eventually("they are in force", func() bool {
		o := volumeOn(nodeName, "probe")
		o.Spec.Encryption = "luks2"
		check.OK(t, w.Create(w.ctx, o, client.DryRunAll))
		return o.Spec.Encryption == ""
	})
	for _, unknown := range []volume.Spec{encrypted("v"), anyNode("v")} {
		fails(t, second(s.Create(w.ctx, unknown)), errdefs.ErrUnavailable)
		if o := w.object("v"); o != nil {
			t.Errorf("left is %+v", o)
		}
	}
	w.tally(m)
}

// TestEncryptedElsewhereLVM: copies of encrypted volumes and snapshots on another node have the bytes of their source, and are opened by its key. (The
// test needs no LVM, but a kernel that can encrypt.)
func TestEncryptedElsewhereLVM(t *testing.T) {
	drivertest.NeedLVM(t)
	w := newEnvironment(t)
	both := []volume.Scheme{volume.LUKS2}
	a, b := w.begin(&machine{name: "node-1", ported: true, schemes: both}), w.begin(&machine{name: "node-2", ported: true, schemes: both})
	s := w.calling(a)
	w.keeps(s, a)
	w.keeps(s, b)
	v, err := s.Create(w.ctx, volume.Spec{Name: "v", Size: volume.Range{Required: 32 * mib}, Encryption: luks2, Nodes: []string{a.name}})
	check.OK(t, err)
	some, uuid := drivertest.Content{Seed: "some", Size: 5 * mib}, "6f1c6b4e-0000-4000-8000-000000000001"
	w.device(a, v.ID, func(path string) { // as NodeStageVolume does
		check.OK(t, luks.Format(w.ctx, path, uuid, volume.Key("key")))
		w.opened(path, "key", func(path string) { check.OK(t, some.Write(path)) })
	})
	check.OK(t, second(a.disks[0].Open("default", nil).SetLabels(w.ctx, blockdev.Ref{Kind: v.ID.Kind, Key: v.ID.Key}, func(labels map[string]string) error {
		labels["header"] = "formatted:" + uuid
		return nil
	})))
	snapshot, err := s.CreateSnapshot(w.ctx, "s", v.ID)
	check.OK(t, err)
	for name, source := range map[string]volume.ID{"restored": snapshot.ID, "cloned": v.ID} {
		fails(t, second(s.Create(w.ctx, elsewhere("plain "+name, source, b))), errdefs.ErrInvalid)
		one := elsewhere(name, source, b)
		one.Encryption = volume.Encryption{Scheme: volume.LUKS2}
		copied, err := s.Create(w.ctx, one)
		check.OK(t, err)
		if copied.Node != b.name || copied.Size != 80*mib || copied.Encryption != one.Encryption {
			t.Errorf("%s is %+v", name, copied)
		}
		w.device(b, copied.ID, func(path string) {
			fails(t, luks.Open(w.ctx, path, opened, volume.Key("another"), false), volume.ErrKey)
			w.opened(path, "key", func(path string) { check.OK(t, some.In(path)) })
			have, err := luks.UUID(path)
			check.OK(t, err)
			if made, err := b.local.Get(w.ctx, copied.ID); err != nil || have == uuid || made.Header != (volume.Header{State: volume.Formatted, UUID: have}) {
				t.Errorf("%s has the header %s, and its record says %+v, %v", name, have, made.Header, err)
			}
		})
		check.OK(t, s.Delete(w.ctx, copied.ID))
	}
	check.OK(t, errors.Join(s.DeleteSnapshot(w.ctx, snapshot.ID), s.Delete(w.ctx, v.ID)))
	w.tally(a)
	w.tally(b)
}

// device attaches a volume of a machine's default pool while use runs.
func (w *environment) device(m *machine, id volume.ID, use func(path string)) {
	w.Helper()
	pool, ref := m.disks[0].Open("default", nil), blockdev.Ref{Kind: id.Kind, Key: id.Key}
	device, err := pool.Attach(w.ctx, ref, blockdev.Attachment{})
	check.OK(w, err)
	use(device.Path)
	check.OK(w, errors.Join(device.Close(), pool.Detach(w.ctx, ref)))
}

// opened is the name of the device over an opened LUKS header.
const opened = "ashlar-cluster-test"

// opened opens a LUKS header while use runs.
func (w *environment) opened(path, key string, use func(path string)) {
	w.Helper()
	check.OK(w, luks.Open(w.ctx, path, opened, volume.Key(key), false))
	d, err := dm.Find(opened)
	check.OK(w, err)
	use(d.Path())
	if inUse, err := dm.RemoveNow(w.ctx, opened); inUse || err != nil {
		w.Fatalf("close it: in use %v, %v", inUse, err)
	}
}
