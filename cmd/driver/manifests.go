package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"slices"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/csimap"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// lacking is what the command looks for, and how it is to be.
type lacking struct {
	client.Client
	driver, class, mode, namespace string
	out                            []any
}

func manifestsCommand() *cobra.Command {
	var o options
	var l lacking
	cmd := &cobra.Command{
		Use:   "manifests",
		Short: "Print the PersistentVolumes and snapshot contents that a cluster has lost",
		Long: `driver manifests prints what a cluster lacks for the volumes and snapshots that the driver has
objects of: PersistentVolumes that no other one has the handle of, the PersistentVolumeClaims that
they were made for, and VolumeSnapshotContents and VolumeGroupSnapshotContents with a VolumeSnapshot
or VolumeGroupSnapshot each. All of them are to be kept (Retain). It changes nothing: look at them,
then "kubectl apply -f -".`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error { return manifests(cmd.Context(), o, l, cmd.OutOrStdout()) },
	}
	addFlags(cmd, "The cluster", func(flags *pflag.FlagSet) {
		flags.StringVar(&o.kubeconfig, "kubeconfig", os.Getenv("KUBECONFIG"), "file that says how to reach the Kubernetes API; without it, as a pod does")
		flags.StringVar(&o.driverName, "driver-name", cluster.DefaultDriver, "name of the CSI driver")
	})
	addFlags(cmd, "What nothing else tells of the lost objects", func(flags *pflag.FlagSet) {
		flags.StringVar(&l.class, "storage-class", "ashlar", "StorageClass of the volumes")
		flags.StringVar(&l.mode, "access-mode", string(corev1.ReadWriteOnce), "access mode of the volumes")
		flags.StringVar(&l.namespace, "namespace", "default", "namespace of VolumeSnapshots of volumes that nobody knows the claim of")
	})
	return cmd
}

// manifests prints the objects of Kubernetes that volumes and snapshots have lost.
func manifests(ctx context.Context, o options, l lacking, to io.Writer) error {
	o.mode, l.driver = "manifests", o.driverName
	config, err := o.kubernetes()
	if err != nil {
		return err
	}
	scheme := runtime.NewScheme()
	if err := cmp.Or(corev1.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)); err != nil {
		return err
	}
	if l.Client, err = client.New(config, client.Options{Scheme: scheme}); err != nil {
		return err
	}
	if err := l.find(ctx); err != nil {
		return err
	}
	return l.print(to)
}

func (l *lacking) print(to io.Writer) error {
	for _, one := range l.out {
		text, err := yaml.Marshal(one)
		if err != nil {
			return err
		}
		if _, err := fmt.Fprintf(to, "---\n%s", text); err != nil {
			return err
		}
	}
	return nil
}

// find looks for what is lacking, and keeps it for print.
func (l *lacking) find(ctx context.Context) error {
	var volumes v1alpha1.VolumeList
	if err := l.List(ctx, &volumes); err != nil {
		return err
	}
	var have corev1.PersistentVolumeList
	if err := l.List(ctx, &have); err != nil {
		return err
	}
	handles := map[string]bool{}
	for i := range have.Items {
		if csi := have.Items[i].Spec.CSI; csi != nil && csi.Driver == l.driver {
			handles[csi.VolumeHandle] = true
		}
	}
	made := map[string]*v1alpha1.Volume{}
	for i := range volumes.Items {
		v := &volumes.Items[i]
		made[v.Name] = v
		id := volume.ID{Kind: blockdev.Volume, Pool: v.Spec.Pool, Key: v.Name}.String()
		if v.Status.Created == nil || v.Deleting() || handles[id] {
			continue
		}
		if err := l.volume(ctx, v, id); err != nil {
			return err
		}
	}
	return l.snapshots(ctx, made)
}

// nameOf is a name for an object that Kubernetes takes: the first of some that will do.
func nameOf(names ...string) string {
	return names[slices.IndexFunc(names, func(name string) bool { return len(validation.NameIsDNSSubdomain(name, false)) == 0 })]
}

func (l *lacking) volume(ctx context.Context, v *v1alpha1.Volume, id string) error {
	mode := corev1.PersistentVolumeFilesystem
	if v.Spec.Filesystem == "" {
		mode = corev1.PersistentVolumeBlock
	}
	size := *resource.NewQuantity(v.Status.Size, resource.BinarySI)
	modes := []corev1.PersistentVolumeAccessMode{corev1.PersistentVolumeAccessMode(l.mode)}
	pv := &corev1.PersistentVolume{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "PersistentVolume"},
		ObjectMeta: metav1.ObjectMeta{Name: nameOf(v.Spec.PersistentVolume, v.Spec.Name, v.Name), Annotations: map[string]string{"pv.kubernetes.io/provisioned-by": l.driver}},
		Spec: corev1.PersistentVolumeSpec{Capacity: corev1.ResourceList{corev1.ResourceStorage: size}, AccessModes: modes, VolumeMode: &mode,
			PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain, StorageClassName: l.class,
			PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: l.driver, VolumeHandle: id, FSType: v.Spec.Filesystem}},
			NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchExpressions: []corev1.NodeSelectorRequirement{{Key: csimap.TopologyKey, Operator: corev1.NodeSelectorOpIn, Values: []string{v.Spec.NodeName}}}}}}}}}
	l.out = append(l.out, pv)
	ref := v.Spec.ClaimRef
	if ref == nil {
		return nil
	}
	pv.Spec.ClaimRef = &corev1.ObjectReference{APIVersion: "v1", Kind: "PersistentVolumeClaim", Namespace: ref.Namespace, Name: ref.Name}
	err := l.Get(ctx, client.ObjectKey{Namespace: ref.Namespace, Name: ref.Name}, &corev1.PersistentVolumeClaim{})
	if apierrors.IsNotFound(err) {
		l.out = append(l.out, &corev1.PersistentVolumeClaim{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "PersistentVolumeClaim"},
			ObjectMeta: metav1.ObjectMeta{Namespace: ref.Namespace, Name: ref.Name},
			Spec: corev1.PersistentVolumeClaimSpec{AccessModes: modes, StorageClassName: &l.class, VolumeMode: &mode, VolumeName: pv.Name,
				Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: size}}}})
		return nil
	}
	return err
}

// The APIs of external-snapshotter.
var (
	snapshotGroup = schema.GroupVersion{Group: "snapshot.storage.k8s.io", Version: "v1"}
	groupGroup    = schema.GroupVersion{Group: "groupsnapshot.storage.k8s.io", Version: "v1"}
)

// contents returns the handles that the contents of a kind have; none if the cluster has no such API.
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
	members := map[string][]any{} // of groups, by their IDs
	for i := range list.Items {
		s := &list.Items[i]
		if s.Status.Created == nil || s.Deleting() {
			continue
		}
		id := volume.ID{Kind: blockdev.Snapshot, Pool: s.Spec.Pool, Key: s.Name}.String()
		if g := s.Spec.Group; g != nil {
			group := volume.GroupID{Key: g.Key}.String()
			if members[group] = append(members[group], id); len(members[group]) == g.Size && !grouped[group] {
				l.content(groupGroup, "VolumeGroupSnapshot", g.Key, s, volumes, map[string]any{"groupSnapshotHandles": map[string]any{
					"volumeGroupSnapshotHandle": group, "volumeSnapshotHandles": members[group]}})
			}
		} else if !single[id] {
			l.content(snapshotGroup, "VolumeSnapshot", s.Name, s, volumes, map[string]any{"snapshotHandle": id})
		}
	}
	return nil
}

// content prints a content, and the snapshot or group snapshot that it belongs to: in the namespace of
// the claim of its source, if somebody knows that.
func (l *lacking) content(api schema.GroupVersion, kind, key string, s *v1alpha1.Snapshot, volumes map[string]*v1alpha1.Volume, source map[string]any) {
	namespace := l.namespace
	if v := volumes[s.Spec.Source]; v != nil && v.Spec.ClaimRef != nil {
		namespace = v.Spec.ClaimRef.Namespace
	}
	name, version := nameOf(s.Spec.Name, key), api.String()
	field := map[string]string{"VolumeSnapshot": "volumeSnapshot", "VolumeGroupSnapshot": "volumeGroupSnapshot"}[kind]
	spec := map[string]any{"driver": l.driver, "deletionPolicy": "Retain", "source": source,
		field + "Ref": map[string]any{"apiVersion": version, "kind": kind, "namespace": namespace, "name": name}}
	if v := volumes[s.Spec.Source]; v != nil && kind == "VolumeSnapshot" {
		spec["sourceVolumeMode"] = "Filesystem"
		if v.Spec.Filesystem == "" {
			spec["sourceVolumeMode"] = "Block"
		}
	}
	l.out = append(l.out, map[string]any{"apiVersion": version, "kind": kind + "Content", "metadata": map[string]any{"name": name}, "spec": spec},
		map[string]any{"apiVersion": version, "kind": kind, "metadata": map[string]any{"namespace": namespace, "name": name},
			"spec": map[string]any{"source": map[string]any{field + "ContentName": name}}})
}
