// Package lost finds the PersistentVolumes, claims and contents of snapshots that Kubernetes lacks for the driver's objects: somebody deleted them, or they
// were lost with the cluster.
package lost

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
)

// Options are what Find cannot learn from the objects that are there.
type Options struct {
	Driver     string // name of the CSI driver
	Class      string // StorageClass of the volumes
	AccessMode string // of the volumes
	Namespace  string // of VolumeSnapshots and VolumeGroupSnapshots of volumes whose claim is not known
}

// Find returns the objects that Kubernetes lacks for the volumes and snapshots of the cluster. It only reads. The reader has to know the kinds of core, of
// storage.k8s.io and of pkg/api. The objects are
//
//   - a PersistentVolume for each volume whose handle no PersistentVolume has, and the PersistentVolumeClaim that it was made for, if that is not there;
//   - a VolumeSnapshotContent and a VolumeSnapshot for each snapshot, a VolumeGroupSnapshotContent and a VolumeGroupSnapshot for each whole group.
//
// All PersistentVolumes and contents have the policy Retain. PersistentVolumes have the class's options of mounts, if it can be read. A volume that is being provisioned lacks nothing.
//
// Which claim a volume was made for only its own object says, as its node reported it. If several volumes name one claim, or the claim has another
// PersistentVolume by now, nothing is guessed: the PersistentVolume gets no claim, and doubts has a sentence that says so. So it has for an encrypted volume
// whose Secret the class does not tell, which gets no PersistentVolume: no other one could be given the Secret later.
func Find(ctx context.Context, from client.Reader, o Options) (objects []client.Object, doubts []string, _ error) {
	l := &lacking{Reader: from, driver: o.Driver, class: o.Class, mode: o.AccessMode, namespace: o.Namespace}
	err := l.find(ctx)
	return l.out, l.doubts, err
}

// lacking is one run of Find: its options, what it has read, and what it has found.
type lacking struct {
	client.Reader
	driver, class, mode, namespace string
	out                            []client.Object
	doubts                         []string

	names    map[string]int                          // by name: how many PersistentVolumes have it, or may be given it
	claims   map[v1alpha1.ClaimRef][]v1alpha1.Volume // by claim: the volumes that say that they were made for it
	networks map[string]string                       // by node: the network in which it reaches others

	asked   bool                   // the class was asked for
	of      storagev1.StorageClass // the class, when it was asked for
	unknown string                 // why the class is not known; empty: it is
}

// find fills out and doubts.
func (l *lacking) find(ctx context.Context) error {
	var volumes v1alpha1.VolumeList
	if err := l.List(ctx, &volumes); err != nil {
		return err
	}
	var replicated v1alpha1.ReplicatedVolumeList
	if err := l.List(ctx, &replicated); err != nil && !apierrors.IsNotFound(err) { // older definitions know none
		return err
	}
	l.forgotten(volumes.Items, replicated.Items)
	volumes.Items = wholes(volumes.Items, replicated.Items)
	var have corev1.PersistentVolumeList
	if err := l.List(ctx, &have); err != nil {
		return err
	}
	var pools v1alpha1.PoolList
	if err := l.List(ctx, &pools); err != nil {
		return err
	}
	l.networks = map[string]string{}
	for i := range pools.Items {
		if p := &pools.Items[i]; p.Status.Network != nil {
			l.networks[p.Spec.NodeName] = p.Status.Network.Name
		}
	}
	handles := map[string]bool{}
	l.names, l.claims = map[string]int{}, map[v1alpha1.ClaimRef][]v1alpha1.Volume{}
	for i := range have.Items {
		l.names[have.Items[i].Name]++
		if csi := have.Items[i].Spec.CSI; csi != nil && csi.Driver == l.driver {
			handles[csi.VolumeHandle] = true
		}
	}
	made := map[string]*v1alpha1.Volume{}
	for i := range volumes.Items {
		v := &volumes.Items[i]
		made[v.Name] = v.DeepCopy()
		if ref := v.Spec.ClaimRef; ref != nil && !v.Deleting() {
			l.claims[*ref] = append(l.claims[*ref], *v)
		}
	}
	lost := slices.DeleteFunc(volumes.Items, func(v v1alpha1.Volume) bool { return v.Status.Created == nil || v.Deleting() || handles[v.ID()] })
	for i := range lost {
		l.names[lost[i].Spec.Name]++
		if name := lost[i].Spec.PersistentVolume; name != lost[i].Spec.Name {
			l.names[name]++
		}
	}
	for i := range lost {
		if err := l.volume(ctx, &lost[i]); err != nil {
			return err
		}
	}
	return l.snapshots(ctx, made)
}

// wholes returns the volumes without those that are legs, and a volume for each ReplicatedVolume that is made and is not being deleted. The latter is a copy
// of its first leg, or of the first by name if that is gone, with the name, ID and size of the ReplicatedVolume.
func wholes(volumes []v1alpha1.Volume, replicated []v1alpha1.ReplicatedVolume) (all []v1alpha1.Volume) {
	legs := map[string]v1alpha1.Volume{} // by the names of their ReplicatedVolumes
	for _, v := range volumes {
		of := v.Spec.ReplicaOf
		if of == "" {
			all = append(all, v)
		} else if have, there := legs[of]; !there || v.Name == of || v.Name < have.Name && have.Name != of {
			legs[of] = v
		}
	}
	for i := range replicated {
		r := &replicated[i]
		if v, there := legs[r.Name]; there && r.Status.Made != nil && !r.Going() {
			v.Name, v.Spec.Name, v.Spec.IDPool, v.Spec.Size, v.Status.Size = r.Name, r.Spec.Name, r.Spec.Pool, r.Spec.Size, r.Spec.Size
			all = append(all, v)
		}
	}
	return all
}

// forgotten adds a doubt for each volume with replicas whose ReplicatedVolume is gone: nothing else tells which of its legs have all that was written, so it gets
// no PersistentVolume.
func (l *lacking) forgotten(volumes []v1alpha1.Volume, replicated []v1alpha1.ReplicatedVolume) {
	legs := map[string][]string{} // by the names of their ReplicatedVolumes
	for i := range volumes {
		if v := &volumes[i]; v.Spec.ReplicaOf != "" && !v.Deleting() {
			legs[v.Spec.ReplicaOf] = append(legs[v.Spec.ReplicaOf], fmt.Sprintf("%s on node %s", v.Name, v.Spec.NodeName))
		}
	}
	for i := range replicated {
		delete(legs, replicated[i].Name)
	}
	for _, key := range slices.Sorted(maps.Keys(legs)) {
		l.doubts = append(l.doubts, fmt.Sprintf("volume %s gets no PersistentVolume: there is no ReplicatedVolume %s for its replicas, which are %s; restore that from a backup, with its status, or write it anew (docs/operate/strays.md), and ask again",
			key, key, strings.Join(legs[key], ", ")))
	}
}

// nameOf returns the first of names that Kubernetes accepts and that only one object has or may be given, by wanted. The last name is always free: it is
// returned if no other one will do.
func nameOf(wanted map[string]int, names ...string) string {
	return names[slices.IndexFunc(names, func(name string) bool {
		return len(validation.NameIsDNSSubdomain(name, false)) == 0 && (wanted[name] < 2 || name == names[len(names)-1])
	})]
}

// terms returns the node affinity of a volume: its node, and with access any the network of that node. If the node is in no network now, it adds a doubt.
func (l *lacking) terms(v *v1alpha1.Volume) []corev1.NodeSelectorTerm {
	in := func(key, value string) corev1.NodeSelectorTerm {
		return corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: key, Operator: corev1.NodeSelectorOpIn, Values: []string{value}}}}
	}
	terms := []corev1.NodeSelectorTerm{in(v1alpha1.TopologyKey, v.Spec.NodeName)}
	network := l.networks[v.Spec.NodeName]
	switch {
	case v.Spec.Access == "":
	case network == "":
		l.doubts = append(l.doubts, fmt.Sprintf("the PersistentVolume of %s will be for its node %s alone, though it has access %s: that node is in no network now (--remote-address)",
			v.ID(), v.Spec.NodeName, v.Spec.Access))
	default:
		terms = append(terms, in(v1alpha1.NetworkKey, network))
	}
	return terms
}

// volume adds the PersistentVolume of a volume that has none, and the claim that the volume was made for, if that is not there.
func (l *lacking) volume(ctx context.Context, v *v1alpha1.Volume) error {
	var claim *corev1.PersistentVolumeClaim // nil: it is not there, or not known
	if ref := v.Spec.ClaimRef; ref != nil {
		claim = &corev1.PersistentVolumeClaim{}
		err := l.Get(ctx, client.ObjectKey{Namespace: ref.Namespace, Name: ref.Name}, claim)
		if client.IgnoreNotFound(err) != nil {
			return err
		}
		if err != nil {
			claim = nil
		}
	}
	if claim != nil && claim.Spec.VolumeName == "" && strings.HasSuffix(v.Spec.Name, string(claim.UID)) {
		return nil // it is being provisioned for this very claim: the provisioner makes the PersistentVolume, with the policy of the class
	}
	if err := l.readClass(ctx); err != nil {
		return err
	}
	name := nameOf(l.names, v.Spec.PersistentVolume, v.Spec.Name, v.Name)
	var named keys
	if v.Spec.Encryption != "" {
		var why string
		if named, why = l.keysOf(v, cmp.Or(v.Spec.PersistentVolume, name), claim); why != "" {
			l.doubts = append(l.doubts, fmt.Sprintf("%s on node %s gets no PersistentVolume: it is encrypted, and a PersistentVolume has to name the Secret with its passphrase from the beginning: %s", v.ID(), v.Spec.NodeName, why))
			return nil
		}
	}
	pv := l.persistentVolume(v, name, named)
	l.out = append(l.out, pv)
	if v.Spec.ClaimRef != nil {
		l.bind(v, pv, claim)
	}
	return nil
}

// persistentVolume returns a PersistentVolume for a volume, which is for no claim.
func (l *lacking) persistentVolume(v *v1alpha1.Volume, name string, named keys) *corev1.PersistentVolume {
	mode := corev1.PersistentVolumeFilesystem
	if v.Spec.Filesystem == "" {
		mode = corev1.PersistentVolumeBlock
	}
	return &corev1.PersistentVolume{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "PersistentVolume"},
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{"pv.kubernetes.io/provisioned-by": l.driver}},
		Spec: corev1.PersistentVolumeSpec{Capacity: corev1.ResourceList{corev1.ResourceStorage: *resource.NewQuantity(v.Status.Size, resource.BinarySI)},
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.PersistentVolumeAccessMode(l.mode)}, VolumeMode: &mode,
			PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain, StorageClassName: l.class, MountOptions: l.of.MountOptions,
			PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: l.driver, VolumeHandle: v.ID(), FSType: v.Spec.Filesystem,
				NodeStageSecretRef: named.stage, NodeExpandSecretRef: named.expand}},
			NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: l.terms(v)}}}}
}

// bind makes a PersistentVolume one for the claim that its volume was made for, unless that is in doubt, and adds the claim if it is not there (nil).
func (l *lacking) bind(v *v1alpha1.Volume, pv *corev1.PersistentVolume, claim *corev1.PersistentVolumeClaim) {
	ref := v.Spec.ClaimRef
	if claim != nil && claim.Spec.VolumeName != "" && claim.Spec.VolumeName != pv.Name {
		l.doubts = append(l.doubts, fmt.Sprintf("PersistentVolume %s (%s on node %s) is for no claim: %s/%s, for which it was made, has the PersistentVolume %s",
			pv.Name, v.ID(), v.Spec.NodeName, ref.Namespace, ref.Name, claim.Spec.VolumeName))
		return
	}
	if all := l.claims[*ref]; len(all) > 1 {
		var others []string
		for i := range all {
			if all[i].Name != v.Name {
				others = append(others, fmt.Sprintf("%s on node %s", all[i].ID(), all[i].Spec.NodeName))
			}
		}
		l.doubts = append(l.doubts, fmt.Sprintf("PersistentVolume %s (%s on node %s) is for no claim: that it was made for %s/%s is also said of %s; if it is this one, set its spec.claimRef",
			pv.Name, v.ID(), v.Spec.NodeName, ref.Namespace, ref.Name, strings.Join(others, ", ")))
		return
	}
	pv.Spec.ClaimRef = &corev1.ObjectReference{APIVersion: "v1", Kind: "PersistentVolumeClaim", Namespace: ref.Namespace, Name: ref.Name}
	if claim == nil {
		l.out = append(l.out, &corev1.PersistentVolumeClaim{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "PersistentVolumeClaim"},
			ObjectMeta: metav1.ObjectMeta{Namespace: ref.Namespace, Name: ref.Name},
			Spec: corev1.PersistentVolumeClaimSpec{AccessModes: pv.Spec.AccessModes, StorageClassName: &l.class, VolumeMode: pv.Spec.VolumeMode, VolumeName: pv.Name,
				Resources: corev1.VolumeResourceRequirements{Requests: pv.Spec.Capacity}}})
	}
}

// The APIs of external-snapshotter.
var (
	snapshotGroup = schema.GroupVersion{Group: "snapshot.storage.k8s.io", Version: "v1"}
	groupGroup    = schema.GroupVersion{Group: "groupsnapshot.storage.k8s.io", Version: "v1"}
)

// AddToMapper adds the kinds of external-snapshotter to a mapper, so that no discovery is needed. A cluster need not have them.
func AddToMapper(m *meta.DefaultRESTMapper) {
	for kind, api := range map[string]schema.GroupVersion{"VolumeSnapshot": snapshotGroup, "VolumeGroupSnapshot": groupGroup} {
		m.Add(api.WithKind(kind), meta.RESTScopeNamespace)
		m.Add(api.WithKind(kind+"Content"), meta.RESTScopeRoot)
	}
}

// contents returns the handles of all contents of a kind, which they have at any of paths. It is empty if the cluster has no such API.
func (l *lacking) contents(ctx context.Context, api schema.GroupVersion, kind string, paths ...[]string) (map[string]bool, error) {
	list := &unstructured.UnstructuredList{}
	list.SetGroupVersionKind(api.WithKind(kind + "List"))
	if err := l.List(ctx, list); err != nil && !meta.IsNoMatchError(err) && !apierrors.IsNotFound(err) {
		return nil, err
	}
	handles := map[string]bool{}
	for i := range list.Items {
		for _, path := range paths {
			if handle, ok, _ := unstructured.NestedString(list.Items[i].Object, path...); ok {
				handles[handle] = true
			}
		}
	}
	return handles, nil
}

// snapshots adds the contents of snapshots and groups that have none. volumes are all volumes, by the names of their objects.
func (l *lacking) snapshots(ctx context.Context, volumes map[string]*v1alpha1.Volume) error {
	var list v1alpha1.SnapshotList
	if err := l.List(ctx, &list); err != nil {
		return err
	}
	single, err := l.contents(ctx, snapshotGroup, "VolumeSnapshotContent", []string{"status", "snapshotHandle"}, []string{"spec", "source", "snapshotHandle"})
	if err != nil {
		return err
	}
	grouped, err := l.contents(ctx, groupGroup, "VolumeGroupSnapshotContent", []string{"status", "volumeGroupSnapshotHandle"},
		[]string{"spec", "source", "groupSnapshotHandles", "volumeGroupSnapshotHandle"})
	if err != nil {
		return err
	}
	groups := map[string][]v1alpha1.Snapshot{} // the members, by the keys
	for i := range list.Items {
		s := &list.Items[i]
		switch {
		case s.Spec.Group != nil:
			groups[s.Spec.Group.Key] = append(groups[s.Spec.Group.Key], *s)
		case s.Status.Created != nil && !s.Deleting() && !single[s.ID()]:
			l.content(snapshotGroup, "VolumeSnapshot", s.Name, s, volumes, map[string]any{"snapshotHandle": s.ID()})
		}
	}
	for _, key := range slices.Sorted(maps.Keys(groups)) {
		members := slices.DeleteFunc(v1alpha1.OfGroup(groups[key]), func(s v1alpha1.Snapshot) bool { return s.Status.Created == nil || s.Deleting() })
		if len(members) == 0 || len(members) != members[0].Spec.Group.Size || grouped[members[0].Spec.Group.ID()] {
			continue
		}
		var ids []any
		for i := range members {
			ids = append(ids, members[i].ID())
		}
		l.content(groupGroup, "VolumeGroupSnapshot", key, &members[0], volumes, map[string]any{"groupSnapshotHandles": map[string]any{
			"volumeGroupSnapshotHandle": members[0].Spec.Group.ID(), "volumeSnapshotHandles": ids}})
	}
	return nil
}

// content adds a content, and the VolumeSnapshot or VolumeGroupSnapshot that it belongs to. That is in the namespace of the claim of its source, or in
// Options.Namespace if that claim is not known.
func (l *lacking) content(api schema.GroupVersion, kind, key string, s *v1alpha1.Snapshot, volumes map[string]*v1alpha1.Volume, source map[string]any) {
	namespace := l.namespace
	of := volumes[s.Spec.Source]
	if of != nil && !s.Of(of) {
		of = nil // only the snapshot's own node says that it is of this volume
	}
	if v := of; v != nil && v.Spec.ClaimRef != nil {
		namespace = v.Spec.ClaimRef.Namespace
	}
	name, version := nameOf(nil, s.Spec.Name, key), api.String()
	field := map[string]string{"VolumeSnapshot": "volumeSnapshot", "VolumeGroupSnapshot": "volumeGroupSnapshot"}[kind]
	spec := map[string]any{"driver": l.driver, "deletionPolicy": "Retain", "source": source,
		field + "Ref": map[string]any{"apiVersion": version, "kind": kind, "namespace": namespace, "name": name}}
	if v := of; v != nil && kind == "VolumeSnapshot" {
		spec["sourceVolumeMode"] = "Filesystem"
		if v.Spec.Filesystem == "" {
			spec["sourceVolumeMode"] = "Block"
		}
	}
	l.out = append(l.out, &unstructured.Unstructured{Object: map[string]any{"apiVersion": version, "kind": kind + "Content", "metadata": map[string]any{"name": name}, "spec": spec}},
		&unstructured.Unstructured{Object: map[string]any{"apiVersion": version, "kind": kind, "metadata": map[string]any{"namespace": namespace, "name": name},
			"spec": map[string]any{"source": map[string]any{field + "ContentName": name}}}})
}
