package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lazy"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/agent"
	"github.com/ashlar-csi/ashlar/pkg/cluster/events"
	"github.com/ashlar-csi/ashlar/pkg/cluster/store"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/volume"
	"github.com/ashlar-csi/ashlar/pkg/volume/storetest"
)

// Tests with Kubernetes as the adversary: whatever is done to the objects, the bytes stay unless the driver was asked to delete them. docs/reliability.md
// has the table.

var formatted = volume.Format{State: volume.Formatted, Type: "ext4"}

// samples has volumes, a snapshot and a group that stand for all that a user can have, with bytes in them.
type samples struct {
	plain, claimed, attached volume.Volume
	snapshot                 volume.Snapshot
	group                    volume.Group
	detach                   func() error
}

func (w *environment) samples(m *machine, s *store.Store) samples {
	w.Helper()
	var f samples
	for name, v := range map[string]*volume.Volume{"plain": &f.plain, "claimed": &f.claimed, "attached": &f.attached} {
		var err error
		one := spec(name)
		one.For = volume.Requester{Namespace: "default", Name: name, PersistentVolume: "pv-" + name}
		*v, err = s.Create(w.ctx, one)
		check.OK(w, err)
		check.OK(w, m.local.SetFormat(w.ctx, v.ID, formatted))
	}
	for _, v := range []volume.Volume{f.claimed, f.attached} {
		check.OK(w, second(s.Claim(w.ctx, v.ID, volume.Claim{Node: nodeName, Mode: "m"})))
	}
	device, err := m.local.Attach(w.ctx, f.attached, nil)
	check.OK(w, err)
	f.detach = device.Close
	w.Cleanup(func() { check.OK(w, f.detach()) })
	f.snapshot, err = s.CreateSnapshot(w.ctx, "snapshot", f.plain.ID)
	check.OK(w, err)
	f.group, err = s.CreateGroup(w.ctx, "group", []volume.ID{f.plain.ID, f.claimed.ID})
	check.OK(w, err)
	return f
}

func (f samples) volumes() []volume.Volume { return []volume.Volume{f.plain, f.claimed, f.attached} }

// unharmed shows that all bytes are on the machine, as they were.
func (f samples) unharmed(w *environment, m *machine) {
	w.Helper()
	for _, v := range f.volumes() {
		if have, err := m.local.Get(w.ctx, v.ID); err != nil || have.Format != formatted || !have.Created.Equal(v.Created.Truncate(time.Nanosecond)) && have.Created.Sub(v.Created).Abs() > time.Microsecond {
			w.Fatalf("volume %s: %+v, %v", v.Name, have, err)
		}
	}
	for _, s := range append(slices.Clone(f.group.Snapshots), f.snapshot) {
		check.OK(w, second(m.local.GetSnapshot(w.ctx, s.ID)))
	}
	if devices, err := m.local.Attached(w.ctx, f.attached.ID); err != nil || len(devices) != 1 {
		w.Fatalf("devices %v, %v", devices, err)
	}
}

// served shows that the driver serves all of them as before.
func (f samples) served(w *environment, s *store.Store) {
	w.Helper()
	w.eventually("all are there", func() bool {
		volumes, err := s.List(w.ctx, volume.ID{}, 0)
		snapshots, err2 := s.ListSnapshots(w.ctx, volume.ID{}, volume.ID{}, 0)
		return errors.Join(err, err2) == nil && len(volumes) == 3 && len(snapshots) == 3
	})
	for _, v := range f.volumes() {
		have, err := s.Get(w.ctx, v.ID)
		if err != nil || have.Size != v.Size || have.Created.Sub(v.Created).Abs() > time.Microsecond || have.For != v.For {
			w.Fatalf("%+v, %v; want %+v", have, err, v)
		}
		w.eventually(v.Name+" is healthy", func() bool { // the agent may not have looked at it again yet
			problems, err := s.Health(w.ctx, v.ID)
			return err == nil && len(problems) == 0
		})
	}
	again, err := s.GetGroup(w.ctx, f.group.ID)
	check.OK(w, err)
	if len(again.Snapshots) != 2 {
		w.Fatalf("%+v", again)
	}
}

// deleted deletes all of them as the CO does, and shows that nothing is left.
func (f samples) deleted(w *environment, m *machine, s *store.Store) {
	w.Helper()
	for _, v := range f.volumes() {
		check.OK(w, s.Release(w.ctx, v.ID, nodeName))
	}
	check.OK(w, f.detach())
	w.eventually("the group is deleted", func() bool { return s.DeleteGroup(w.ctx, f.group.ID) == nil }) // for the store, some of it may still be strays
	check.OK(w, s.DeleteSnapshot(w.ctx, f.snapshot.ID))
	for _, v := range f.volumes() {
		w.eventually(v.Name+" is deleted", func() bool { return s.Delete(w.ctx, v.ID) == nil }) // another process may have the device open for a moment
	}
	w.tally(m)
	if left, err := m.local.List(w.ctx, volume.ID{}, 0); err != nil || len(left) > 0 {
		w.Fatalf("left are %v, %v", left, err)
	}
}

// objects returns all Volumes and Snapshots.
func (w *environment) objects() []client.Object {
	w.Helper()
	var volumes v1alpha1.VolumeList
	var snapshots v1alpha1.SnapshotList
	check.OK(w, errors.Join(w.List(w.ctx, &volumes), w.List(w.ctx, &snapshots)))
	var all []client.Object
	for i := range volumes.Items {
		all = append(all, &volumes.Items[i])
	}
	for i := range snapshots.Items {
		all = append(all, &snapshots.Items[i])
	}
	return all
}

// gone waits until there are no Volumes and Snapshots any more.
func (w *environment) gone() {
	w.Helper()
	w.eventually("the objects are gone", func() bool { return len(w.objects()) == 0 })
}

// strays waits until a pool reports n strays.
func (w *environment) strays(pool string, n int) []v1alpha1.Stray {
	w.Helper()
	var p *v1alpha1.Pool
	w.eventually(fmt.Sprintf("%d strays are reported", n), func() bool {
		p = w.pool(nodeName, pool)
		return p.Status.StrayCount == n && len(p.Status.Strays) == n && meta.IsStatusConditionTrue(p.Status.Conditions, v1alpha1.Accounted) == (n == 0)
	})
	return p.Status.Strays
}

// adopt asks for objects of strays.
func (w *environment) adopt(pool, which string) {
	w.Helper()
	w.adoptOn(nodeName, pool, which)
}

// adoptOn is adopt for a pool of another node.
func (w *environment) adoptOn(node, pool, which string) {
	w.Helper()
	p := w.pool(node, pool)
	before := p.DeepCopy()
	p.Annotations = map[string]string{v1alpha1.AdoptAnnotation: which}
	check.OK(w, w.Patch(w.ctx, p, client.MergeFrom(before)))
	w.eventually("it was done", func() bool {
		check.OK(w, w.Get(w.ctx, client.ObjectKeyFromObject(p), p))
		return p.Annotations[v1alpha1.AdoptAnnotation] == ""
	})
}

// older gives objects the finalizer of older versions.
func (w *environment) older(objects ...client.Object) {
	w.Helper()
	for _, o := range objects {
		before := o.DeepCopyObject().(client.Object)
		o.SetFinalizers([]string{v1alpha1.Finalizer})
		check.OK(w, w.Patch(w.ctx, o, client.MergeFrom(before)))
	}
}

// TestObjectsDeleted: all objects are deleted. The bytes stay, and are reported as strays; no call answers that they are gone; and they can be adopted.
func TestObjectsDeleted(t *testing.T) {
	for _, older := range []bool{false, true} {
		t.Run(fmt.Sprint("older ", older), func(t *testing.T) {
			w, m, s := newCluster(t)
			f := w.samples(m, s)
			if older {
				m.stop() // otherwise the agent takes the finalizers off
				w.older(w.objects()...)
			}
			for _, o := range w.objects() {
				check.OK(t, w.Delete(w.ctx, o))
			}
			if older {
				w.start(m)
			}
			w.gone()
			strays := w.strays("default", 6)
			f.unharmed(w, m)
			for _, one := range strays {
				if one.Size != mib || one.Name == "" || (strings.HasPrefix(one.ID, "vol") && (one.ClaimRef == nil || one.ClaimRef.Name != one.Name || one.PersistentVolume != "pv-"+one.Name)) {
					t.Errorf("reported is %+v", one)
				}
			}
			w.eventually("the store has heard of them", func() bool {
				for _, err := range []error{s.Delete(w.ctx, f.plain.ID), s.DeleteSnapshot(w.ctx, f.snapshot.ID), s.DeleteGroup(w.ctx, f.group.ID)} {
					if !errors.Is(err, errdefs.ErrUnavailable) {
						return false
					}
				}
				return true
			})
			check.OK(t, s.Release(w.ctx, f.claimed.ID, nodeName))
			f.unharmed(w, m)

			w.adopt("default", f.plain.ID.String()+","+f.group.ID.String())
			w.strays("default", 3)
			w.adopt("default", "all")
			w.strays("default", 0)
			f.served(w, s)
			check.OK(t, second(s.Claim(w.ctx, f.claimed.ID, volume.Claim{Node: nodeName, Mode: "m"})))
			f.unharmed(w, m)
			f.deleted(w, m, s)
		})
	}
}

// TestObjectDeletedAskedAgain: the object of a volume is deleted, and then the volume is created again under the same name: it is the same one, with its
// bytes.
func TestObjectDeletedAskedAgain(t *testing.T) {
	w, m, s := newCluster(t)
	f := w.samples(m, s)
	check.OK(t, w.Delete(w.ctx, w.object("plain")))
	w.eventually("it is gone", func() bool { return w.object("plain") == nil })
	one := spec("plain")
	one.For = f.plain.For
	v, err := s.Create(w.ctx, one)
	check.OK(t, err)
	if v.Created.Sub(f.plain.Created).Abs() > time.Microsecond {
		t.Errorf("made anew: %+v", v)
	}
	f.unharmed(w, m)
	f.served(w, s)
	f.deleted(w, m, s)
}

// TestAskedAgainDiffers: volumes whose objects were deleted are created again under the same name, but with other properties, or the new object is
// deleted. Their bytes stay.
func TestAskedAgainDiffers(t *testing.T) {
	w, m, s := newCluster(t)
	f := w.samples(m, s)
	check.OK(t, second(s.Expand(w.ctx, f.plain.ID, volume.Range{Required: 2 * mib}))) // the size of the later request is the old one
	other, err := s.Create(w.ctx, spec("other"))
	check.OK(t, err)
	for _, o := range w.objects() {
		if o.GetName() != other.ID.Key {
			check.OK(t, w.Delete(w.ctx, o))
		}
	}
	w.eventually("they are gone", func() bool { return len(w.objects()) == 1 })
	again := func() {
		t.Helper()
		fails(t, second(s.Create(w.ctx, spec("plain"))), errdefs.ErrExists)
		fails(t, second(s.CreateSnapshot(w.ctx, "snapshot", other.ID)), errdefs.ErrExists)
		f.unharmed(w, m)
	}
	again()
	m.stop()
	w.asked("it is asked for", func(ctx context.Context) error { return second(s.Create(ctx, spec("claimed"))) }, func() bool { return w.object("claimed") != nil })
	o := w.object("claimed")
	o.Spec.Delete = o.UID
	check.OK(t, w.Update(w.ctx, o))
	w.start(m)
	w.eventually("it is given up", func() bool { return w.object("claimed") == nil })
	again()
	w.strays("default", 6)
	w.adopt("default", "all")
	w.strays("default", 0)
	if v, err := s.Create(w.ctx, spec("plain")); err != nil || v.Size != 2*mib {
		t.Errorf("%+v, %v", v, err)
	}
	check.OK(t, s.Delete(w.ctx, other.ID))
	f.deleted(w, m, s)
}

// restored creates objects again as backup tools do: without status, and with another UID.
func (w *environment) restored(objects []client.Object) {
	w.Helper()
	for _, o := range objects {
		o.SetUID("")
		o.SetResourceVersion("")
		o.SetManagedFields(nil)
		switch o := o.(type) {
		case *v1alpha1.Volume:
			o.Status = v1alpha1.VolumeStatus{}
		case *v1alpha1.Snapshot:
			o.Status = v1alpha1.SnapshotStatus{}
		}
		check.OK(w, w.Create(w.ctx, o))
	}
}

// TestObjectsRestored: objects that are restored without their status find their bytes.
func TestObjectsRestored(t *testing.T) {
	for _, older := range []bool{false, true} {
		t.Run(fmt.Sprint("older ", older), func(t *testing.T) {
			w, m, s := newCluster(t)
			f := w.samples(m, s)
			backup := w.objects()
			if older {
				for _, o := range backup {
					o.SetFinalizers([]string{v1alpha1.Finalizer})
				}
			}
			for _, o := range w.objects() {
				check.OK(t, w.Delete(w.ctx, o))
			}
			w.gone()
			w.restored(backup)
			f.served(w, s)
			f.unharmed(w, m)
			w.strays("default", 0)
			w.eventually("none has finalizers", func() bool {
				return !slices.ContainsFunc(w.objects(), func(o client.Object) bool { return len(o.GetFinalizers()) > 0 })
			})
			f.deleted(w, m, s)
		})
	}
}

// TestRestoredWithIntent: spec.delete has the UID of one object, and so does not allow the deletion of bytes for a restored copy of that.
func TestRestoredWithIntent(t *testing.T) {
	w, m, s := newCluster(t)
	f := w.samples(m, s)
	backup := w.objects()
	for _, o := range backup {
		switch o := o.(type) {
		case *v1alpha1.Volume:
			o.Spec.Delete, o.Spec.Claim = o.UID, nil
		case *v1alpha1.Snapshot:
			o.Spec.Delete = o.UID
		}
	}
	for _, o := range w.objects() {
		check.OK(t, w.Delete(w.ctx, o))
	}
	w.gone()
	w.restored(backup)
	f.served(w, s)
	f.unharmed(w, m)
	w.eventually("it is taken back", func() bool { return w.object("plain").Spec.Delete == "" })
	check.OK(t, second(s.Claim(w.ctx, f.claimed.ID, volume.Claim{Node: nodeName, Mode: "m"})))
	f.deleted(w, m, s)
}

// TestRestoredWithStatus: objects are restored with their status, while their generations count from 1 again. A failure that was for an earlier spec is
// not taken for one of the present spec.
func TestRestoredWithStatus(t *testing.T) {
	w, m, s := newCluster(t)
	f := w.samples(m, s)
	backup := w.objects()
	for _, o := range backup {
		check.OK(t, w.Delete(w.ctx, o))
	}
	w.gone()
	var statuses []client.Object
	for _, o := range backup {
		if v, ok := o.(*v1alpha1.Volume); ok {
			v.Status.Failure, v.Status.ObservedGeneration = &v1alpha1.Failure{Reason: "NoSpace", Message: "there was no room"}, 1000
		}
		statuses = append(statuses, o.DeepCopyObject().(client.Object))
	}
	m.stop() // so that it does not write the statuses
	w.restored(backup)
	for i, o := range statuses {
		o.SetUID(backup[i].GetUID())
		o.SetResourceVersion(backup[i].GetResourceVersion())
		check.OK(t, w.Status().Update(w.ctx, o))
	}
	w.start(m)
	f.served(w, s)
	f.unharmed(w, m)
	if v, err := s.Expand(w.ctx, f.plain.ID, volume.Range{Required: 2 * mib}); err != nil || v.Size != 2*mib {
		t.Errorf("%+v, %v", v, err)
	}
	f.deleted(w, m, s)
}

// TestRestoredOntoNewDisk: objects are restored whose bytes are gone. They are reported as lost, and nothing is made in their place, also if the volume is
// created again.
func TestRestoredOntoNewDisk(t *testing.T) {
	w, m, s := newCluster(t)
	v, err := s.Create(w.ctx, spec("v"))
	check.OK(t, err)
	snapshot, err := s.CreateSnapshot(w.ctx, "s", v.ID)
	check.OK(t, err)
	group, err := s.CreateGroup(w.ctx, "g", []volume.ID{v.ID})
	check.OK(t, err)
	backup := w.objects()
	m.stop()
	for _, o := range w.objects() {
		check.OK(t, w.Delete(w.ctx, o))
	}
	w.gone()
	m.disks[0] = memory.NewDisk(storetest.Size)
	w.identity("default", v1alpha1.NewPool)
	w.start(m)
	w.restored(backup)
	w.eventually("the loss is reported", func() bool {
		o := w.object("v")
		c := meta.FindStatusCondition(o.Status.Conditions, v1alpha1.Ready)
		return c != nil && c.Status == metav1.ConditionFalse && c.Reason == "DataLoss" && o.Status.Created == nil
	})
	w.eventually("the store has heard of it", func() bool { return errors.Is(second(s.Get(w.ctx, v.ID)), errdefs.ErrDataLoss) })
	w.eventually("and of the snapshot", func() bool { return errors.Is(second(s.GetSnapshot(w.ctx, snapshot.ID)), errdefs.ErrDataLoss) })
	fails(t, second(s.Create(w.ctx, spec("v"))), errdefs.ErrDataLoss)
	fails(t, second(s.Claim(w.ctx, v.ID, volume.Claim{Node: nodeName, Mode: "m"})), errdefs.ErrDataLoss)
	fails(t, second(s.CreateSnapshot(w.ctx, "s", v.ID)), errdefs.ErrDataLoss)
	w.eventually("and of the group", func() bool {
		return errors.Is(second(s.CreateGroup(w.ctx, "g", []volume.ID{v.ID})), errdefs.ErrDataLoss)
	})
	fails(t, second(m.local.Get(w.ctx, v.ID)), errdefs.ErrNotFound)
	if left, err := m.local.ListSnapshots(w.ctx, volume.ID{}, volume.ID{}, 0); err != nil || len(left) > 0 {
		t.Errorf("cut anew: %v, %v", left, err)
	}
	check.OK(t, errors.Join(s.DeleteGroup(w.ctx, group.ID), s.DeleteSnapshot(w.ctx, snapshot.ID), s.Delete(w.ctx, v.ID)))
	check.OK(t, second(s.Create(w.ctx, spec("v"))))
	w.tally(m)
}

// TestRestoredFromBeforeGrowth: an object is restored that has a smaller size than the volume. The volume keeps its size.
func TestRestoredFromBeforeGrowth(t *testing.T) {
	w, m, s := newCluster(t)
	v, err := s.Create(w.ctx, spec("v"))
	check.OK(t, err)
	backup := w.objects()
	check.OK(t, second(s.Expand(w.ctx, v.ID, volume.Range{Required: 2 * mib})))
	check.OK(t, second(s.Claim(w.ctx, v.ID, volume.Claim{Node: nodeName, Mode: "m"})))
	check.OK(t, w.Delete(w.ctx, w.object("v")))
	w.gone()
	w.restored(backup)
	w.eventually("it is found", func() bool {
		have, err := s.Get(w.ctx, v.ID)
		return err == nil && have.Size == 2*mib
	})
	if grown, err := s.Expand(w.ctx, v.ID, volume.Range{Required: 3 * mib}); err != nil || grown.Size != 3*mib {
		t.Errorf("%+v, %v", grown, err)
	}
	check.OK(t, s.Delete(w.ctx, v.ID))
	w.tally(m)
}

// identity writes the identity of a pool into its object.
func (w *environment) identity(pool, id string) {
	w.Helper()
	p := &v1alpha1.Pool{}
	check.OK(w, w.Get(w.ctx, client.ObjectKey{Name: overview.PoolName(nodeName, pool)}, p))
	before := p.DeepCopy()
	p.Spec.UUID = id
	check.OK(w, w.Patch(w.ctx, p, client.MergeFrom(before)))
}

// TestEdited: whatever field of an object a person edits, the bytes stay; edits that the definitions forbid are refused.
func TestEdited(t *testing.T) {
	w, m, s := newCluster(t)
	f := w.samples(m, s)
	for what, edit := range map[string]func(*v1alpha1.Volume){
		"size":              func(v *v1alpha1.Volume) { v.Spec.Size += mib },
		"mutable":           func(v *v1alpha1.Volume) { v.Spec.Mutable = map[string]string{"readAheadKiB": "64"} },
		"claim":             func(v *v1alpha1.Volume) { v.Spec.Claim = nil },
		"another claim":     func(v *v1alpha1.Volume) { v.Spec.Claim = &v1alpha1.Claim{Node: "elsewhere", Mode: "x"} },
		"claimRef":          func(v *v1alpha1.Volume) { v.Spec.ClaimRef = &v1alpha1.ClaimRef{Namespace: "x", Name: "y"} },
		"no claimRef":       func(v *v1alpha1.Volume) { v.Spec.ClaimRef = nil },
		"persistent volume": func(v *v1alpha1.Volume) { v.Spec.PersistentVolume = "x" },
		"abandoned":         func(v *v1alpha1.Volume) { v.Spec.Abandoned, v.Spec.Claim = true, nil },
		"not abandoned":     func(v *v1alpha1.Volume) { v.Spec.Abandoned = false },
		"delete":            func(v *v1alpha1.Volume) { v.Spec.Delete, v.Spec.Claim = "rubbish", nil },
		"finalizers":        func(v *v1alpha1.Volume) { v.Finalizers = []string{v1alpha1.Finalizer, "example.com/other"} },
		"no finalizers":     func(v *v1alpha1.Volume) { v.Finalizers = nil },
		"labels":            func(v *v1alpha1.Volume) { v.Labels = map[string]string{"velero.io/restore-name": "x"} },
		"annotations":       func(v *v1alpha1.Volume) { v.Annotations = map[string]string{v1alpha1.AdoptAnnotation: "all"} },
	} {
		for _, name := range []string{"plain", "claimed", "attached"} {
			w.eventually("the edit is through: "+what, func() bool {
				o := w.object(name)
				edit(o)
				err := w.Update(w.ctx, o)
				if apierrors.IsInvalid(err) && o.Spec.Delete == "rubbish" {
					return false // until the agent has taken back an earlier edit that it conflicts with
				}
				if client.IgnoreNotFound(err) != nil && !apierrors.IsConflict(err) {
					t.Fatalf("%s: %v", what, err)
				}
				return err == nil
			})
		}
		f.unharmed(w, m)
	}
	for what, edit := range map[string]func(*v1alpha1.Volume){
		"made again": func(v *v1alpha1.Volume) { v.Spec.Make = true },
		"deleted and claimed": func(v *v1alpha1.Volume) {
			v.Spec.Delete, v.Spec.Claim = v.UID, &v1alpha1.Claim{Node: nodeName, Mode: "m"}
		},
	} {
		var err error
		w.eventually("it is answered: "+what, func() bool { // the agent may be writing
			o := w.object("plain")
			edit(o)
			err = w.Update(w.ctx, o)
			return !apierrors.IsConflict(err)
		})
		if !apierrors.IsInvalid(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
	for what, edit := range map[string]func(*v1alpha1.Volume){
		"size": func(v *v1alpha1.Volume) { v.Status.Size = 0 },
		"failure": func(v *v1alpha1.Volume) {
			v.Status.Failure, v.Status.ObservedGeneration = &v1alpha1.Failure{Reason: "DataLoss"}, 1000
		},
		"conditions": func(v *v1alpha1.Volume) { v.Status.Conditions = nil },
		"ready": func(v *v1alpha1.Volume) {
			meta.SetStatusCondition(&v.Status.Conditions, metav1.Condition{Type: v1alpha1.Ready, Status: metav1.ConditionFalse, Reason: "X"})
		},
		"abandoned": func(v *v1alpha1.Volume) {
			meta.SetStatusCondition(&v.Status.Conditions, metav1.Condition{Type: v1alpha1.Abandoned, Status: metav1.ConditionTrue, Reason: "X"})
		},
		"health": func(v *v1alpha1.Volume) {
			v.Status.Health = []v1alpha1.Problem{{Severity: "DataLoss", Reason: "x", Message: "y"}}
		},
		"thin": func(v *v1alpha1.Volume) { v.Status.Thin = !v.Status.Thin },
	} {
		for tries := 0; ; tries++ {
			o := w.object("plain")
			edit(o)
			err := w.Status().Update(w.ctx, o)
			if apierrors.IsConflict(err) && tries < 50 {
				continue
			}
			if err != nil {
				t.Fatalf("status: %s: %v", what, err)
			}
			break
		}
		if what == "abandoned" { // before the next edit: one of them removes all conditions
			w.eventually("the verdict is taken back", func() bool {
				return meta.IsStatusConditionFalse(w.object("plain").Status.Conditions, v1alpha1.Abandoned)
			})
		}
		f.unharmed(w, m)
	}
	m.stop()
	for _, o := range w.objects() { // the agent corrects these statuses, which shows that it has looked at each object
		switch o := o.(type) {
		case *v1alpha1.Volume:
			meta.SetStatusCondition(&o.Status.Conditions, metav1.Condition{Type: v1alpha1.Abandoned, Status: metav1.ConditionTrue, Reason: "X"})
			o.Status.Health = []v1alpha1.Problem{{Severity: "DataLoss", Reason: "x", Message: "y"}}
		case *v1alpha1.Snapshot:
			meta.SetStatusCondition(&o.Status.Conditions, metav1.Condition{Type: v1alpha1.Ready, Status: metav1.ConditionFalse, Reason: "X"})
		}
		check.OK(t, w.Status().Update(w.ctx, o))
	}
	w.start(m)
	w.eventually("all of them were looked at", func() bool {
		return !slices.ContainsFunc(w.objects(), func(o client.Object) bool {
			switch o := o.(type) {
			case *v1alpha1.Volume:
				healthy := len(o.Status.Health) == 0 || o.Spec.Abandoned // the health of an abandoned volume is not looked at
				return !healthy || !meta.IsStatusConditionFalse(o.Status.Conditions, v1alpha1.Abandoned)
			case *v1alpha1.Snapshot:
				return !meta.IsStatusConditionTrue(o.Status.Conditions, v1alpha1.Ready)
			}
			return false
		})
	})
	f.unharmed(w, m)
	for _, o := range w.objects() {
		before := o.DeepCopyObject().(client.Object)
		o.SetFinalizers(nil)
		check.OK(t, w.Patch(w.ctx, o, client.MergeFrom(before)))
	}
}

// TestDeletedByHand: a person sets spec.delete, and the bytes are deleted. While the volume is in use, that can be taken back.
func TestDeletedByHand(t *testing.T) {
	w, m, s := newCluster(t)
	f := w.samples(m, s)
	m.stop()
	for _, name := range []string{"plain", "attached"} {
		o := w.object(name)
		o.Spec.Delete, o.Spec.Claim = o.UID, nil
		check.OK(t, w.Update(w.ctx, o))
	}
	o := w.object("attached")
	fails(t, second(s.Claim(w.ctx, f.attached.ID, volume.Claim{Node: nodeName, Mode: "m"})), errdefs.ErrPrecondition)
	w.start(m)
	w.eventually("the one is gone", func() bool { return w.object("plain") == nil })
	fails(t, second(m.local.Get(w.ctx, f.plain.ID)), errdefs.ErrNotFound)
	w.eventually("the other is in use", func() bool {
		o = w.object("attached")
		return o.Status.Failure != nil && o.Status.Failure.Reason == "InUse"
	})
	o.Spec.Delete = ""
	check.OK(t, w.Update(w.ctx, o))
	check.OK(t, second(m.local.Get(w.ctx, f.attached.ID)))
}

// TestMadeAfter: a volume of the same name that was made later than the object says is not the object's: it stays when the object is deleted.
func TestMadeAfter(t *testing.T) {
	w, m, s := newCluster(t)
	v, err := s.Create(w.ctx, spec("v"))
	check.OK(t, err)
	m.stop()
	check.OK(t, m.local.Delete(w.ctx, v.ID))
	check.OK(t, second(m.local.Create(w.ctx, spec("v"))))
	w.start(m)
	check.OK(t, s.Delete(w.ctx, v.ID))
	w.strays("default", 1)
	check.OK(t, second(m.local.Get(w.ctx, v.ID)))
}

// TestMadeBefore: a snapshot that was made for no object, or for an earlier one, a moment before that of its name was created, is not the object's: it stays
// when the object is deleted before its node has reported anything.
func TestMadeBefore(t *testing.T) {
	w, m, s := newCluster(t)
	v, err := s.Create(w.ctx, spec("v"))
	check.OK(t, err)
	m.stop()
	var stray volume.Snapshot
	var o *v1alpha1.Snapshot
	for name := "a"; ; name += "a" { // the creation time of an object has whole seconds
		stray, err = m.local.CutLeg(w.ctx, name, v.ID, v.ID, "an earlier one")
		check.OK(t, err)
		o = cluster.SnapshotNamed(stray.ID.Key)
		o.Spec = v1alpha1.SnapshotSpec{Intent: v1alpha1.Intent{Make: true}, NodeName: m.name, Pool: stray.ID.Pool, Name: name, Source: v.ID.Key}
		check.OK(t, w.Create(w.ctx, o))
		if !stray.Created.Before(o.CreationTimestamp.Time) {
			break
		}
		check.OK(t, w.Delete(w.ctx, o))
	}
	o.Spec.Delete = o.UID
	check.OK(t, w.Update(w.ctx, o))
	w.start(m)
	w.eventually("its object is gone", func() bool {
		return apierrors.IsNotFound(w.Get(w.ctx, client.ObjectKeyFromObject(o), &v1alpha1.Snapshot{}))
	})
	check.OK(t, second(m.local.GetSnapshot(w.ctx, stray.ID)))
}

// TestMixedVersions: objects that older controllers and agents have written.
func TestMixedVersions(t *testing.T) {
	w, m, s := newCluster(t)
	f := w.samples(m, s)
	// An older controller's object does not say that it may be made.
	o := w.object("plain")
	old := &v1alpha1.Volume{ObjectMeta: metav1.ObjectMeta{Name: volume.KeyOf("old"), Finalizers: []string{v1alpha1.Finalizer}}, Spec: o.Spec}
	old.Spec.Name = "old"
	check.OK(t, w.Create(w.ctx, old))
	w.eventually("it is refused", func() bool {
		o := w.object("old")
		return o.Status.Failure != nil && o.Status.Failure.Reason == "DataLoss"
	})
	fails(t, second(m.local.Get(w.ctx, volume.ID{Kind: blockdev.Volume, Pool: "default", Key: old.Name})), errdefs.ErrNotFound)
	check.OK(t, w.Delete(w.ctx, w.object("old"))) // the older controller does so
	w.eventually("it is gone", func() bool { return w.object("old") == nil })
	// The deletion of an object alone does not delete bytes.
	m.stop()
	w.older(w.object("plain"))
	check.OK(t, w.Delete(w.ctx, w.object("plain")))
	w.start(m)
	w.eventually("it is gone", func() bool { return w.object("plain") == nil })
	f.unharmed(w, m)
	w.strays("default", 1)
	w.adopt("default", "all")
	w.strays("default", 0)
	// An older agent makes the volume, and does not take spec.make off.
	m.stop()
	done := make(chan error)
	go func() { done <- second(s.Create(w.ctx, spec("by an older agent"))) }()
	w.eventually("it is asked for", func() bool { return w.object("by an older agent") != nil })
	made, err := m.local.Create(w.ctx, spec("by an older agent"))
	check.OK(t, err)
	byOlder := w.object("by an older agent")
	now := metav1.NewMicroTime(made.Created)
	byOlder.Status.Created, byOlder.Status.Size = &now, mib
	check.OK(t, w.Status().Update(w.ctx, byOlder))
	check.OK(t, <-done)
	if w.object("by an older agent").Spec.Make {
		t.Error("it may be made again")
	}
	w.start(m)
	check.OK(t, s.Delete(w.ctx, made.ID))
	f.served(w, s)
	f.deleted(w, m, s)
}

// TestBegunByOlder: an older controller has created an object without spec.make, and no volume was made for it. When it is asked for again, the volume is
// made only if the claim that it is for shows that it was never used.
func TestBegunByOlder(t *testing.T) {
	w, m, s := newCluster(t)
	begun := func(claim, bound string) volume.Spec {
		pvc := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: claim}, Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, VolumeName: bound,
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: *resource.NewQuantity(mib, resource.BinarySI)}}}}
		check.OK(t, w.Create(w.ctx, pvc))
		t.Cleanup(func() {
			before := pvc.DeepCopy()
			pvc.Finalizers = nil
			check.OK(t, errors.Join(w.Patch(w.ctx, pvc, client.MergeFrom(before)), w.Delete(w.ctx, pvc)))
		})
		one := spec("pvc-" + string(pvc.UID))
		one.For = volume.Requester{Namespace: "default", Name: claim}
		o := &v1alpha1.Volume{ObjectMeta: metav1.ObjectMeta{Name: volume.KeyOf(one.Name), Finalizers: []string{v1alpha1.Finalizer}},
			Spec: v1alpha1.VolumeSpec{NodeName: nodeName, Pool: "default", Name: one.Name, Size: mib, ClaimRef: &v1alpha1.ClaimRef{Namespace: "default", Name: claim}}}
		check.OK(t, w.Create(w.ctx, o))
		w.eventually("it is refused", func() bool { return w.object(one.Name).Status.Failure != nil })
		return one
	}
	v, err := s.Create(w.ctx, begun("pending", ""))
	check.OK(t, err)
	if o := w.object(v.Name); o.Status.Created == nil || len(o.Finalizers) > 0 {
		t.Errorf("it is %+v", o)
	}
	check.OK(t, second(m.local.Get(w.ctx, v.ID)))
	bound := begun("bound", "some-volume")
	fails(t, second(s.Create(w.ctx, bound)), errdefs.ErrDataLoss)
	known := begun("known", "")
	w.persistentVolume("rebound", cluster.DefaultDriver, volume.ID{Kind: blockdev.Volume, Pool: "default", Key: volume.KeyOf(known.Name)})
	fails(t, second(s.Create(w.ctx, known)), errdefs.ErrDataLoss)
	known.For = volume.Requester{}
	fails(t, second(s.Create(w.ctx, known)), errdefs.ErrDataLoss)
}

// TestOldDefinitions: with definitions that have neither spec.make nor spec.delete, nothing is made or deleted. As soon as they are the present ones
// again, both work, although the API server serves the agent's watch by the old ones for a while.
func TestOldDefinitions(t *testing.T) {
	w, m, s := newCluster(t)
	f := w.samples(m, s)
	server := apitest.Get(t)
	t.Cleanup(func() { check.OK(t, server.Define(context.Background())) })
	check.OK(t, server.Redefine(w.ctx, "volumes.ashlar.dev", func(crd *unstructured.Unstructured) {
		versions, _, _ := unstructured.NestedSlice(crd.Object, "spec", "versions")
		path := []string{"schema", "openAPIV3Schema", "properties", "spec"}
		spec, _, _ := unstructured.NestedMap(versions[0].(map[string]any), path...)
		delete(spec, "x-kubernetes-validations")
		delete(spec["properties"].(map[string]any), "make")
		delete(spec["properties"].(map[string]any), "delete")
		check.OK(t, unstructured.SetNestedMap(versions[0].(map[string]any), spec, path...))
		check.OK(t, unstructured.SetNestedSlice(crd.Object, versions, "spec", "versions"))
	}))
	w.eventually("they are in force", func() bool {
		var o *v1alpha1.Volume
		check.OK(t, w.written(func() error {
			o = w.object("plain")
			o.Spec.Delete = "x"
			return w.Update(w.ctx, o, client.DryRunAll)
		}))
		return o.Spec.Delete == ""
	})
	fails(t, s.Delete(w.ctx, f.plain.ID), errdefs.ErrUnavailable)
	fails(t, second(s.Create(w.ctx, spec("new"))), errdefs.ErrUnavailable)
	f.unharmed(w, m)
	fails(t, second(m.local.Get(w.ctx, volume.ID{Kind: blockdev.Volume, Pool: "default", Key: volume.KeyOf("new")})), errdefs.ErrNotFound)
	if o := w.object("new"); o != nil {
		t.Errorf("left is %+v", o)
	}
	time.Sleep(3 * time.Second) // one second after the change all watches end, and then begin again by these definitions
	w.hold(server, 5*time.Second)
	check.OK(t, server.Define(w.ctx))
	w.eventually("they are in force again", func() bool {
		var o *v1alpha1.Volume
		check.OK(t, w.written(func() error {
			o = w.object("plain")
			o.Spec.Delete = "x"
			return w.Update(w.ctx, o, client.DryRunAll)
		}))
		return o.Spec.Delete == "x"
	})
	check.OK(t, s.Delete(w.ctx, f.plain.ID))
	check.OK(t, second(s.Create(w.ctx, spec("new"))))
}

// hold begins a request about Volumes that ends after some time. Until then the API server serves the present watches by the present definitions, even if
// these change.
func (w *environment) hold(server *apitest.Server, d time.Duration) {
	w.Helper()
	config := server.Config(apitest.Admin)
	web, err := rest.HTTPClientFor(config)
	check.OK(w, err)
	body, end := io.Pipe()
	r, err := http.NewRequestWithContext(w.ctx, http.MethodPost, config.Host+"/apis/ashlar.dev/v1alpha1/volumes", body)
	check.OK(w, err)
	r.Header.Set("Content-Type", "application/json")
	ended := make(chan error)
	go func() {
		answer, err := web.Do(r)
		if err == nil {
			err = answer.Body.Close()
		}
		ended <- err
	}()
	_, err = io.WriteString(end, "{")
	check.OK(w, err)
	time.AfterFunc(d, func() { _ = end.Close() })
	w.Cleanup(func() { check.OK(w, <-ended) })
}

// undefined deletes the definitions of some kinds, and with them all objects, until the test defines them again or ends.
func (w *environment) undefined(kinds ...string) *apitest.Server {
	w.Helper()
	server := apitest.Get(w)
	w.Cleanup(func() { check.OK(w, server.Define(context.Background())) })
	ctx, cancel := context.WithTimeout(w.ctx, time.Minute)
	defer cancel()
	check.OK(w, server.Undefine(ctx, kinds...))
	return server
}

// TestDefinitionsDeleted: the definitions are deleted, and with them all objects. When they are back, all that the pools have is reported, and can be
// adopted.
func TestDefinitionsDeleted(t *testing.T) {
	w, m, s := newCluster(t)
	f := w.samples(m, s)
	server := w.undefined("volumes.ashlar.dev", "snapshots.ashlar.dev", "pools.ashlar.dev")
	f.unharmed(w, m)
	m.stop()
	check.OK(t, server.Define(w.ctx))
	w.start(m)
	w.strays("default", 6)
	f.unharmed(w, m)
	w.adopt("default", "all")
	w.strays("default", 0)
	s, _ = w.store() // as if the controller were installed again
	f.served(w, s)
	f.unharmed(w, m)
	f.deleted(w, m, s)
}

// TestDefinitionsAway: while there are no definitions, no call answers that anything is gone, or never existed: it may be in use, and its object may be
// restored from a backup.
func TestDefinitionsAway(t *testing.T) {
	w, m, s := newCluster(t)
	f := w.samples(m, s)
	w.undefined("volumes.ashlar.dev", "snapshots.ashlar.dev", "pools.ashlar.dev", "replicatedvolumes.ashlar.dev")
	w.eventually("the store has heard of it", func() bool {
		volumes, err := s.List(w.ctx, volume.ID{}, 0)
		snapshots, err2 := s.ListSnapshots(w.ctx, volume.ID{}, volume.ID{}, 0)
		_, none := s.Capacity(w.ctx, "", volume.NotEncrypted, nodeName)
		return (err != nil || len(volumes) == 0) && (err2 != nil || len(snapshots) == 0) && none != nil
	})
	needDefinitions(t, map[string]func() error{
		"create":             func() error { return second(s.Create(w.ctx, spec("new"))) },
		"create the same":    func() error { return second(s.Create(w.ctx, spec("plain"))) },
		"list":               func() error { return second(s.List(w.ctx, volume.ID{}, 0)) },
		"list snapshots":     func() error { return second(s.ListSnapshots(w.ctx, volume.ID{}, volume.ID{}, 0)) },
		"list those of one":  func() error { return second(s.ListSnapshots(w.ctx, f.plain.ID, volume.ID{}, 0)) },
		"capacity":           func() error { return second(s.Capacity(w.ctx, "", volume.NotEncrypted, nodeName)) },
		"networks":           func() error { return second(s.Networks(w.ctx)) },
		"create a group":     func() error { return second(s.CreateGroup(w.ctx, "another", []volume.ID{f.plain.ID})) },
		"health":             func() error { return second(s.Health(w.ctx, f.plain.ID)) },
		"modify":             func() error { return s.Modify(w.ctx, f.plain.ID, map[string]string{"readAheadKiB": "4"}) },
		"delete":             func() error { return s.Delete(w.ctx, f.plain.ID) },
		"delete a snapshot":  func() error { return s.DeleteSnapshot(w.ctx, f.snapshot.ID) },
		"delete a group":     func() error { return s.DeleteGroup(w.ctx, f.group.ID) },
		"claim":              func() error { return second(s.Claim(w.ctx, f.plain.ID, volume.Claim{Node: nodeName, Mode: "m"})) },
		"release":            func() error { return s.Release(w.ctx, f.claimed.ID, nodeName) },
		"get":                func() error { return second(s.Get(w.ctx, f.plain.ID)) },
		"get a snapshot":     func() error { return second(s.GetSnapshot(w.ctx, f.snapshot.ID)) },
		"get a group":        func() error { return second(s.GetGroup(w.ctx, f.group.ID)) },
		"expand":             func() error { return second(s.Expand(w.ctx, f.plain.ID, volume.Range{Required: 2 * mib})) },
		"snapshot":           func() error { return second(s.CreateSnapshot(w.ctx, "another", f.plain.ID)) },
		"snapshot of before": func() error { return second(s.CreateSnapshot(w.ctx, "snapshot", f.plain.ID)) },
	})
	f.unharmed(w, m)
	m.stop()
}

// needDefinitions shows that calls fail, and say that there are no definitions, and what to do.
func needDefinitions(t *testing.T, calls map[string]func() error) {
	t.Helper()
	for what, call := range calls {
		if err := call(); !errors.Is(err, errdefs.ErrUnavailable) || !strings.Contains(err.Error(), "apply the definitions") {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// TestPoolDefinitionAway: without the definition of pools no node can report what it has. Then no call answers that there is no such pool or node, or that
// nothing is left of a volume; nor when the definition is back, and no node has reported its pools yet.
func TestPoolDefinitionAway(t *testing.T) {
	w, m, s := newCluster(t)
	v, err := s.Create(w.ctx, spec("v"))
	check.OK(t, err)
	server := w.undefined("pools.ashlar.dev")
	calls := map[string]func() error{
		"create": func() error { return second(s.Create(w.ctx, spec("new"))) },
		"create in a pool": func() error {
			return second(s.Create(w.ctx, volume.Spec{Name: "new", Pool: "b", Size: volume.Range{Required: mib}}))
		},
		"capacity": func() error { return second(s.Capacity(w.ctx, "", volume.NotEncrypted, nodeName)) },
		"claim":    func() error { return second(s.Claim(w.ctx, v.ID, on(nodeName))) },
		"networks": func() error { return second(s.Networks(w.ctx)) },
		"delete what is a stray": func() error {
			return s.Delete(w.ctx, volume.ID{Kind: v.ID.Kind, Pool: v.ID.Pool, Key: volume.KeyOf("stray")})
		},
	}
	w.eventually("the store has heard of it", func() bool {
		return second(s.Capacity(w.ctx, "", volume.NotEncrypted, nodeName)) != nil
	})
	needDefinitions(t, calls)
	m.stop()
	check.OK(t, server.Define(w.ctx))
	for _, what := range []string{"create", "create in a pool", "capacity", "claim", "networks"} {
		if err := calls[what](); !errors.Is(err, errdefs.ErrUnavailable) || !strings.Contains(err.Error(), "no node reports a pool") {
			t.Errorf("%s, before any node has said what it has: %v", what, err)
		}
	}
}

// TestTwoDrivers: while the pools belong to a driver, one of another name does not start, whichever came first.
func TestTwoDrivers(t *testing.T) {
	for _, first := range []string{cluster.DefaultDriver, "other.example.com"} {
		t.Run(first, func(t *testing.T) {
			w := newEnvironment(t)
			m := w.machine(nodeName)
			m.stop()
			if first != cluster.DefaultDriver {
				w.takeOver(first)
			}
			server := apitest.Get(t)
			check.OK(t, server.Guard(w.ctx, first))
			t.Cleanup(func() { check.OK(t, server.Guard(context.Background(), cluster.DefaultDriver)) })
			for _, driver := range []string{cluster.DefaultDriver, "other.example.com"} {
				s, err := store.New(server.Config("controller"), store.Options{GoneGrace: grace, AbandonGrace: time.Hour, Driver: driver})
				check.OK(t, err)
				if driver == first {
					w.works(m, s, driver)
					continue
				}
				ctx, cancel := context.WithTimeout(w.ctx, 2*time.Minute)
				a, err := agent.New(server.Agent(t, nodeName), m.local, agent.Options{Driver: driver, Locks: m.locks})
				check.OK(t, err)
				for part, err := range map[string]error{"controller": s.Run(ctx), "agent": a.Run(ctx)} {
					if !errors.Is(err, errdefs.ErrPrecondition) {
						t.Errorf("%s of %s after %s: %v", part, driver, first, err)
					}
				}
				cancel()
			}
		})
	}
}

// works runs a store and the agent of a machine, of a driver, and shows that both work.
func (w *environment) works(m *machine, s *store.Store, driver string) {
	w.Helper()
	stop := w.run(s.Run)
	defer stop()
	m.driver = driver
	w.start(m)
	defer m.stop()
	w.pooled(s, m)
	check.OK(w, second(s.Create(w.ctx, spec("v")))) // the agent makes it
	left := &v1alpha1.Pool{ObjectMeta: metav1.ObjectMeta{Name: overview.PoolName("nowhere", "left")}, Spec: v1alpha1.PoolSpec{NodeName: "nowhere", Pool: "left", Driver: driver}}
	check.OK(w, w.Create(w.ctx, left))
	w.eventually("the store forgets the pool of a node that is gone", func() bool {
		return apierrors.IsNotFound(w.Get(w.ctx, client.ObjectKeyFromObject(left), left))
	})
}

// takeOver gives the pools to another driver.
func (w *environment) takeOver(driver string) {
	w.Helper()
	var pools v1alpha1.PoolList
	check.OK(w, w.List(w.ctx, &pools))
	for i := range pools.Items {
		pools.Items[i].Spec.Driver = driver
		check.OK(w, w.Update(w.ctx, &pools.Items[i]))
	}
}

// TestPoolReplaced: a pool that is not the one which was there before is not used, unless a person allows that in its object.
func TestPoolReplaced(t *testing.T) {
	w, m, s := newCluster(t)
	v, err := s.Create(w.ctx, spec("v"))
	check.OK(t, err)
	memory1, err := agent.NewMemory(apitest.Get(t).Agent(t, nodeName), nodeName)
	check.OK(t, err)
	known := memory1.Of("default")
	told := func(known blockdev.Known) (id string, err error) { // waits for a slow API server
		w.eventually("the API server answers", func() bool {
			id, err = known(w.ctx)
			return !errors.Is(err, errdefs.ErrUnavailable)
		})
		return id, err
	}
	if id, err := told(known); err != nil || id != m.disks[0].ID() {
		t.Fatalf("known is %q, %v", id, err)
	}
	m.stop()
	old := m.disks[0]
	m.disks[0] = memory.NewDisk(storetest.Size)
	a := w.agent(m)
	ctx, cancel := context.WithTimeout(w.ctx, 2*time.Minute)
	defer cancel()
	fails(t, a.Run(ctx), errdefs.ErrPrecondition)
	// Without the object of the pool, or the identity in it, the objects of the volumes show that there was a pool.
	for _, forget := range []func(){func() { w.identity("default", "") }, func() { check.OK(t, w.DeleteAllOf(w.ctx, &v1alpha1.Pool{})) }} {
		forget()
		if id, err := told(known); id != "" || !errors.Is(err, errdefs.ErrPrecondition) || !strings.Contains(err.Error(), volume.KeyOf("v")) {
			t.Errorf("known is %q, %v", id, err)
		}
		if id, err := told(memory1.Of("b")); id != "" || (err != nil) {
			t.Logf("known of the other pool: %q, %v", id, err)
		}
	}
	w.start(m)
	w.eventually("the pool that is there is written down", func() bool { id, err := known(w.ctx); return err == nil && id == m.disks[0].ID() })
	m.stop()
	w.identity("default", v1alpha1.NewPool)
	if id, err := told(known); id != "" || err != nil {
		t.Errorf("known is %q, %v", id, err)
	}
	m.disks[0] = old
	w.start(m)
	w.eventually("the old one is back", func() bool { id, err := known(w.ctx); return err == nil && id == old.ID() })
	check.OK(t, second(s.Get(w.ctx, v.ID)))
	thaw := apitest.Get(t).Freeze(t)
	if _, err := known(w.ctx); !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("without an API server: %v", err)
	}
	thaw()
}

// TestPoolReplacedBehind: a new pool is used if its object allows that, also by an agent whose watch has not seen that yet.
func TestPoolReplacedBehind(t *testing.T) {
	w, m, _ := newCluster(t)
	m.stop()
	var lag lagging
	wrap(t, func(c *rest.Config) { c.Wrap(lag.wrap) })
	var there atomic.Bool
	other := memory.NewDisk(storetest.Size)
	deferred := lazy.New("default", errors.New("not mounted"), func(context.Context) (blockdev.Pool, error) {
		if !there.Load() {
			return nil, fmt.Errorf("%w: not mounted", errdefs.ErrUnavailable)
		}
		return other.Open("default", m.hook), nil
	})
	mounts, err := mount.LoadTable()
	check.OK(t, err)
	m.local, err = volume.NewLocal(w.ctx, m.name, []blockdev.Pool{deferred}, mounts, 0)
	check.OK(t, err)
	m.agent, err = agent.New(wrapped(apitest.Get(w).Agent(w, m.name)), m.local, agent.Options{Driver: cluster.DefaultDriver,
		Pools: []agent.Pool{{Pool: deferred, Kind: "memory"}}, Locks: m.locks, MaxVolumes: storetest.Limit})
	check.OK(t, err)
	m.stop = w.run(m.agent.Run)
	p := &v1alpha1.Pool{}
	read := func() { check.OK(t, w.Get(w.ctx, client.ObjectKey{Name: overview.PoolName(nodeName, "default")}, p)) }
	// The agent waits until its cache has what it wrote, so that has to be there before the watch is stopped.
	w.eventually("the pool is missed", func() bool {
		read()
		return meta.IsStatusConditionFalse(p.Status.Conditions, v1alpha1.Healthy) && lag.saw(p.ResourceVersion)
	})
	lag.Lock()
	defer lag.Unlock()
	w.identity("default", v1alpha1.NewPool)
	there.Store(true)
	w.eventually("the new one is taken", func() bool { read(); return t.Failed() || p.Spec.UUID == other.ID() })
}

// TestGroupPartLost: a group has snapshots on two disks, of which one is replaced. The snapshot on the other one stays, and can be restored.
func TestGroupPartLost(t *testing.T) {
	w, m, s := newCluster(t)
	one, err := s.Create(w.ctx, spec("one"))
	check.OK(t, err)
	two := spec("two")
	two.Pool = "b"
	other, err := s.Create(w.ctx, two)
	check.OK(t, err)
	group, err := s.CreateGroup(w.ctx, "group", []volume.ID{one.ID, other.ID})
	check.OK(t, err)
	m.stop()
	m.disks[1] = memory.NewDisk(storetest.Size)
	w.identity("b", v1alpha1.NewPool)
	w.start(m)
	for _, member := range group.Snapshots {
		if member.Source == one.ID {
			restored := spec("restored")
			restored.Source = member.ID
			check.OK(t, second(s.Create(w.ctx, restored)))
		}
	}
	check.OK(t, s.DeleteGroup(w.ctx, group.ID))
	if left, err := m.local.ListSnapshots(w.ctx, volume.ID{}, volume.ID{}, 0); err != nil || len(left) > 0 {
		t.Errorf("left are %v, %v", left, err)
	}
}

// accounted waits until the condition Accounted of a pool is False, and its message has all of some words.
func (w *environment) accounted(node, pool string, words ...string) {
	w.Helper()
	w.eventually(fmt.Sprintf("pool %s of %s says %q", pool, node, words), func() bool {
		p := &v1alpha1.Pool{}
		check.OK(w, client.IgnoreNotFound(w.Get(w.ctx, client.ObjectKey{Name: overview.PoolName(node, pool)}, p)))
		c := meta.FindStatusCondition(p.Status.Conditions, v1alpha1.Accounted)
		return c != nil && c.Status == metav1.ConditionFalse && !slices.ContainsFunc(words, func(word string) bool { return !strings.Contains(c.Message, word) })
	})
}

// TestDisksSwapped: the disks of two pools are swapped while their objects, with the identities, are gone. What is in the wrong pool is reported there.
func TestDisksSwapped(t *testing.T) {
	w, m, s := newCluster(t)
	f := w.samples(m, s)
	check.OK(t, f.detach())
	m.stop()
	check.OK(t, w.DeleteAllOf(w.ctx, &v1alpha1.Pool{}))
	m.disks[0], m.disks[1] = m.disks[1], m.disks[0]
	w.start(m)
	w.strays("b", 6)
	w.accounted(nodeName, "b", "vol.b."+f.plain.ID.Key, "its object says pool default of node "+nodeName)
	m.stop()
	check.OK(t, w.DeleteAllOf(w.ctx, &v1alpha1.Pool{}))
	m.disks[0], m.disks[1] = m.disks[1], m.disks[0]
	w.start(m)
	f.served(w, s)
	f.deleted(w, m, s)
}

// TestDiskMoved: a disk is put into another node, and back. What is on it is reported there, and stays, even if it was never used.
func TestDiskMoved(t *testing.T) {
	w, m, s := newCluster(t)
	v, err := s.Create(w.ctx, spec("v"))
	check.OK(t, err)
	snapshot, err := s.CreateSnapshot(w.ctx, "s", v.ID)
	check.OK(t, err)
	m.stop()
	w.node("node-2", true)
	other := &machine{name: "node-2", disks: []*memory.Disk{m.disks[0], memory.NewDisk(storetest.Size)}, locks: m.locks}
	w.start(other)
	w.accounted("node-2", "default", v.ID.String(), snapshot.ID.String(), "its object says pool default of node "+nodeName)
	check.OK(t, second(other.local.Get(w.ctx, v.ID)))
	other.stop()
	w.start(m)
	check.OK(t, errors.Join(s.DeleteSnapshot(w.ctx, snapshot.ID), s.Delete(w.ctx, v.ID)))
	w.tally(m)
}

// TestAdoptionRefused: a stray whose object the API server refuses does not keep others from being adopted.
func TestAdoptionRefused(t *testing.T) {
	w, m, s := newCluster(t)
	for _, name := range []string{"a", "b"} {
		check.OK(t, second(s.Create(w.ctx, spec(name))))
		check.OK(t, w.Delete(w.ctx, w.object(name)))
	}
	w.gone()
	long := spec(strings.Repeat("x", 3000))
	long.For = volume.Requester{Namespace: "default", Name: long.Name, PersistentVolume: long.Name}
	check.OK(t, second(m.local.Create(w.ctx, long)))
	m.agent.Changed()
	w.strays("default", 3)
	p := &v1alpha1.Pool{}
	check.OK(t, w.Get(w.ctx, client.ObjectKey{Name: overview.PoolName(nodeName, "default")}, p))
	before := p.DeepCopy()
	p.Annotations = map[string]string{v1alpha1.AdoptAnnotation: "all"}
	check.OK(t, w.Patch(w.ctx, p, client.MergeFrom(before)))
	w.strays("default", 1)
	w.eventually("the others are back", func() bool { return w.object("a") != nil && w.object("b") != nil })
}

// TestAdoptionMisspelt: of what is to be adopted one is there, and another is not, as its ID is misspelt. The first is adopted, and an event tells of the other.
func TestAdoptionMisspelt(t *testing.T) {
	w, m, s := newCluster(t)
	v, err := s.Create(w.ctx, spec("v"))
	check.OK(t, err)
	check.OK(t, w.Delete(w.ctx, w.object("v")))
	m.agent.Changed()
	w.strays("default", 1)
	pool := w.pool(nodeName, "default")
	for _, misspelt := range []string{"All", "vol.other." + v.ID.Key, "group." + v.ID.Key} {
		w.adopt("default", v.ID.String()+","+misspelt)
		w.eventually("the other is told of", func() bool {
			c := meta.FindStatusCondition(w.pool(nodeName, "default").Status.Conditions, v1alpha1.Adopted)
			return c != nil && c.Status == metav1.ConditionFalse && strings.Contains(c.Message, "does not keep: "+misspelt+"; ")
		})
	}
	w.eventually("there is an event", func() bool { return len(w.eventsOn(pool, events.NoSuchStray)) > 0 })
	w.strays("default", 0)
	w.adopt("default", "all")
	w.eventually("all is known", func() bool {
		return meta.IsStatusConditionTrue(w.pool(nodeName, "default").Status.Conditions, v1alpha1.Adopted)
	})
	w.tally(m)
}

// TestAdoptedMeanwhile: what somebody asks to be adopted while the agent makes the objects of other strays is adopted as well, and is not forgotten.
func TestAdoptedMeanwhile(t *testing.T) {
	var armed atomic.Bool
	ask := func() {}
	wrap(t, func(c *rest.Config) {
		c.Wrap(func(next http.RoundTripper) http.RoundTripper {
			return roundTrip(func(q *http.Request) (*http.Response, error) {
				if q.Method == http.MethodPost && strings.HasSuffix(q.URL.Path, "/volumes") && armed.CompareAndSwap(true, false) {
					ask()
				}
				return next.RoundTrip(q)
			})
		})
	})
	w, m, s := newCluster(t)
	ids := map[string]string{}
	for _, name := range []string{"a", "b"} {
		v, err := s.Create(w.ctx, spec(name))
		check.OK(t, err)
		ids[name] = v.ID.String()
		check.OK(t, w.Delete(w.ctx, w.object(name)))
	}
	w.gone()
	m.agent.Changed()
	w.strays("default", 2)
	p := w.pool(nodeName, "default")
	adopt := func(which string) {
		before := p.DeepCopy()
		p.Annotations = map[string]string{v1alpha1.AdoptAnnotation: which}
		check.OK(t, w.Patch(w.ctx, p, client.MergeFrom(before)))
	}
	ask = func() { adopt(ids["a"] + "," + ids["b"]) }
	armed.Store(true)
	adopt(ids["a"])
	w.eventually("both are back", func() bool { return w.object("a") != nil && w.object("b") != nil })
	w.strays("default", 0)
	w.eventually("nothing is asked for any more", func() bool { return w.pool(nodeName, "default").Annotations[v1alpha1.AdoptAnnotation] == "" })
}

// TestRebound: a volume that was never used does not count as abandoned if there is a PersistentVolume for it, whatever its name.
func TestRebound(t *testing.T) {
	w, m, s := newCluster(t)
	ids := map[string]volume.ID{}
	for _, name := range []string{"pvc-rebound", "pvc-other-driver", "pvc-nobody"} {
		one := spec(name)
		one.For = volume.Requester{Namespace: "default", Name: "claim"}
		v, err := s.Create(w.ctx, one)
		check.OK(t, err)
		ids[name] = v.ID
	}
	w.persistentVolume("any-name", cluster.DefaultDriver, ids["pvc-rebound"])
	w.persistentVolume("pvc-other-driver", "other.example.com", ids["pvc-other-driver"])
	w.sweeping()
	w.eventually("those of nobody are gone", func() bool { return w.object("pvc-nobody") == nil && w.object("pvc-other-driver") == nil })
	check.OK(t, second(m.local.Get(w.ctx, ids["pvc-rebound"])))
	if o := w.object("pvc-rebound"); o == nil || o.Spec.Abandoned {
		t.Errorf("%+v", o)
	}
	w.tally(m)
}

func (w *environment) persistentVolume(name, driver string, id volume.ID) {
	w.Helper()
	check.OK(w, w.Create(w.ctx, &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PersistentVolumeSpec{
		Capacity:               corev1.ResourceList{corev1.ResourceStorage: *resource.NewQuantity(mib, resource.BinarySI)},
		AccessModes:            []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
		PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: driver, VolumeHandle: id.String()}}}}))
}

// TestStaleClaim: a claim whose VolumeAttachment was removed by hand is released after some time.
func TestStaleClaim(t *testing.T) {
	w, m, s := newCluster(t)
	ids := map[string]volume.ID{}
	for _, name := range []string{"stale", "attached"} {
		v, err := s.Create(w.ctx, spec(name))
		check.OK(t, err)
		ids[name] = v.ID
		check.OK(t, second(s.Claim(w.ctx, v.ID, volume.Claim{Node: nodeName, Mode: "m"})))
		w.persistentVolume("pv-"+name, cluster.DefaultDriver, v.ID)
	}
	pv := "pv-attached"
	va := &storagev1.VolumeAttachment{ObjectMeta: metav1.ObjectMeta{Name: "va"}, Spec: storagev1.VolumeAttachmentSpec{Attacher: cluster.DefaultDriver, NodeName: nodeName,
		Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: &pv}}}
	check.OK(t, w.Create(w.ctx, va))
	t.Cleanup(func() { check.OK(t, w.Delete(context.Background(), va)) })
	s, _ = w.sweeping()
	began := time.Now()
	for name, id := range ids {
		if err := s.Delete(w.ctx, id); !errors.Is(err, errdefs.ErrInUse) {
			t.Errorf("%s: %v", name, err)
		}
	}
	w.eventually("the stale one is taken back", func() bool { return s.Delete(w.ctx, ids["stale"]) == nil })
	if age := time.Since(began); age < abandonGrace {
		t.Errorf("taken back after %s", age)
	}
	fails(t, s.Delete(w.ctx, ids["attached"]), errdefs.ErrInUse)
	check.OK(t, s.Release(w.ctx, ids["attached"], nodeName))
	check.OK(t, s.Delete(w.ctx, ids["attached"]))
	w.tally(m)
}

// TestStaleClaimAnew: a claim without a VolumeAttachment is being released when it is asked for again. It stays, also if the controller that releases it
// dies.
func TestStaleClaimAnew(t *testing.T) {
	for i, after := range []struct {
		what string
		n    int // after so many lists of VolumeAttachments and writes it is asked for again
		dies bool
	}{{"first look", 1, false}, {"first write", 2, false}, {"second look", 3, false}, {"first look, and it dies", 1, true}} {
		t.Run(after.what, func(t *testing.T) {
			w, _, s := newCluster(t)
			v, err := s.Create(w.ctx, spec("v"))
			check.OK(t, err)
			claim := volume.Claim{Node: nodeName, Mode: "m"}
			check.OK(t, second(s.Claim(w.ctx, v.ID, claim)))
			pv := fmt.Sprint("pv-anew-", i) // the PersistentVolumes of earlier runs may still be there
			w.persistentVolume(pv, cluster.DefaultDriver, v.ID)
			va := &storagev1.VolumeAttachment{ObjectMeta: metav1.ObjectMeta{Name: "va"}, Spec: storagev1.VolumeAttachmentSpec{Attacher: cluster.DefaultDriver, NodeName: nodeName,
				Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: &pv}}}
			t.Cleanup(func() { check.OK(t, client.IgnoreNotFound(w.Delete(context.Background(), va))) })
			asked := make(chan struct{})
			var mu sync.Mutex
			n, dead := 0, false
			wrap(t, func(c *rest.Config) {
				c.Wrap(func(next http.RoundTripper) http.RoundTripper {
					return roundTrip(func(q *http.Request) (*http.Response, error) {
						look, write := strings.HasSuffix(q.URL.Path, "/volumeattachments"), q.Method == http.MethodPatch
						if !look && !write {
							return next.RoundTrip(q)
						}
						mu.Lock()
						defer mu.Unlock()
						if dead {
							return nil, errors.New("dead")
						}
						answer, err := next.RoundTrip(q)
						if n++; n == after.n {
							if err := errors.Join(w.Create(w.ctx, va), second(s.Claim(w.ctx, v.ID, claim))); err != nil {
								t.Error(err)
							}
							close(asked)
						}
						dead = after.dies && write
						return answer, err
					})
				})
			})
			sweeping, _ := w.sweeping()
			fails(t, sweeping.Delete(w.ctx, v.ID), errdefs.ErrInUse)
			w.comes(asked, "it is claimed")
			time.Sleep(time.Second) // so that the controller can do what is wrong
			have, err := s.Get(w.ctx, v.ID)
			if err != nil || have.Claim != claim {
				t.Errorf("claimed %+v, %v", have.Claim, err)
			}
			fails(t, s.Delete(w.ctx, v.ID), errdefs.ErrInUse)
		})
	}
}

// TestRolledBack: etcd is restored from a backup. What was made since has no object, and is reported as a stray. What was deleted since is lost, and not
// made anew.
func TestRolledBack(t *testing.T) {
	w, m, s := newCluster(t)
	create := func(name string) volume.Volume {
		v, err := s.Create(w.ctx, spec(name))
		check.OK(t, err)
		check.OK(t, m.local.SetFormat(w.ctx, v.ID, formatted))
		return v
	}
	kept, gone, replaced := create("kept"), create("gone"), create("replaced")
	rollback := apitest.Get(t).Backup(t)
	w.eventually("the store is back", func() bool { return s.Delete(soon(t), gone.ID) == nil })
	w.eventually("and deletes another", func() bool { return s.Delete(soon(t), replaced.ID) == nil })
	w.eventually("which is made anew", func() bool { return second(s.Create(soon(t), spec("replaced"))) == nil })
	again, err := s.Get(w.ctx, replaced.ID)
	check.OK(t, err)
	check.OK(t, m.local.SetFormat(w.ctx, again.ID, formatted))
	late := create("late")
	check.OK(t, second(s.Expand(w.ctx, kept.ID, volume.Range{Required: 2 * mib})))
	m.stop()
	rollback()
	w.start(m) // agent and controller are restarted after the restore
	s, _ = w.store()
	w.strays("default", 1)
	for _, v := range []volume.Volume{kept, again, late} {
		if have, err := m.local.Get(w.ctx, v.ID); err != nil || have.Format != formatted {
			t.Errorf("%+v, %v", have, err)
		}
	}
	w.eventually("the loss is reported", func() bool {
		problems, err := s.Health(w.ctx, gone.ID)
		return err == nil && len(problems) == 1 && problems[0].Severity == blockdev.DataLoss
	})
	w.eventually("what has grown is seen", func() bool { v, err := s.Get(w.ctx, kept.ID); return err == nil && v.Size == 2*mib })
	fails(t, second(m.local.Get(w.ctx, gone.ID)), errdefs.ErrNotFound)
	w.adopt("default", "all")
	w.strays("default", 0)
	check.OK(t, errors.Join(s.Delete(w.ctx, kept.ID), s.Delete(w.ctx, gone.ID), s.Delete(w.ctx, late.ID)))
	// A volume that was made later under the same name is not the one of the object.
	check.OK(t, s.Delete(w.ctx, replaced.ID))
	check.OK(t, second(m.local.Get(w.ctx, again.ID)))
}

// TestRolledBackUnderClients: etcd is restored from a backup while a controller and an agent run. They do not wait for what they wrote since, which is
// lost, and do not take objects to exist that are gone.
func TestRolledBackUnderClients(t *testing.T) {
	l := &line{}
	wrap(t, func(c *rest.Config) { c.Dial = l.dial })
	w, m, s := newCluster(t)
	rollback := apitest.Get(t).Backup(t)
	var v volume.Volume
	w.eventually("the store is back", func() (made bool) { var err error; v, err = s.Create(soon(t), spec("v")); return err == nil })
	check.OK(t, s.Delete(w.ctx, v.ID))
	late, err := s.Create(w.ctx, spec("late"))
	check.OK(t, err)
	l.set(true)
	rollback()
	w.known() // while connections are refused, so that the clients list anew
	l.set(false)
	w.strays("default", 1) // shows that the agent works
	w.again("volumes are made", func(ctx context.Context) error { return second(s.Create(ctx, spec("v"))) })
	w.again("the one of before is found", func(ctx context.Context) error { return second(s.Create(ctx, spec("late"))) })
	check.OK(t, errors.Join(s.Delete(w.ctx, v.ID), s.Delete(w.ctx, late.ID)))
	w.tally(m)
}
