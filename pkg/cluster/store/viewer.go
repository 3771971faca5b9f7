package store

import (
	"context"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster/view"
)

// lookAgain is how often Changes sends although nothing watched has changed: an agent may have become silent.
const lookAgain = 15 * time.Second

// Viewer makes overviews of the cluster from the cache of the store, and from its own cache of pods, PersistentVolumes and StorageClasses. It asks the API
// server for nothing else.
type Viewer struct {
	store   *Store
	version string
	others  cache.Cache
	// informers are those of others. Until they are synced, which needs rights that the controller may lack, overviews have nothing of Kubernetes.
	informers []cache.Informer
	// objects are the store's informers whose events are changes of the overview. That of the Leases is not among them: they change all the time.
	objects []cache.Informer
}

// NewViewer returns the viewer of a store; version is that of the program. It does nothing until Run.
func NewViewer(config *rest.Config, s *Store, version string) (*Viewer, error) {
	scheme, err := view.Scheme()
	if err != nil {
		return nil, err
	}
	mapper := meta.NewDefaultRESTMapper(nil) // without discovery: the API server may be down
	mapper.Add(corev1.SchemeGroupVersion.WithKind("Pod"), meta.RESTScopeNamespace)
	mapper.Add(corev1.SchemeGroupVersion.WithKind("PersistentVolume"), meta.RESTScopeRoot)
	mapper.Add(storagev1.SchemeGroupVersion.WithKind("StorageClass"), meta.RESTScopeRoot)
	others, err := cache.New(config, cache.Options{Scheme: scheme, Mapper: mapper, DefaultTransform: cache.TransformStripManagedFields(), ByObject: map[client.Object]cache.ByObject{
		&corev1.Pod{}: {Transform: lessOfPod}, &corev1.PersistentVolume{}: {Transform: lessOfPersistentVolume}}})
	if err != nil {
		return nil, err
	}
	v := &Viewer{store: s, version: version, others: others}
	if v.informers, err = informers(others, &corev1.Pod{}, &corev1.PersistentVolume{}, &storagev1.StorageClass{}); err != nil {
		return nil, err
	}
	v.objects, err = informers(s.kube.Cache, &v1alpha1.Volume{}, &v1alpha1.ReplicatedVolume{}, &v1alpha1.Snapshot{}, &v1alpha1.Pool{}, &corev1.Node{})
	return v, err
}

func informers(c cache.Cache, kinds ...client.Object) ([]cache.Informer, error) {
	var all []cache.Informer
	for _, kind := range kinds {
		informer, err := c.GetInformer(context.Background(), kind, cache.BlockUntilSynced(false)) // so it does not wait
		if err != nil {
			return nil, err
		}
		all = append(all, informer)
	}
	return all, nil
}

// lessOfPod drops all of a pod but its name, phase and which claims it uses: there may be very many pods, and each is large.
func lessOfPod(object any) (any, error) {
	pod, ok := object.(*corev1.Pod)
	if !ok {
		return object, nil
	}
	less := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID, ResourceVersion: pod.ResourceVersion}, Status: corev1.PodStatus{Phase: pod.Status.Phase}}
	for _, v := range pod.Spec.Volumes {
		if v.PersistentVolumeClaim != nil || v.Ephemeral != nil {
			less.Spec.Volumes = append(less.Spec.Volumes, corev1.Volume{Name: v.Name, VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: v.PersistentVolumeClaim, Ephemeral: v.Ephemeral}})
		}
	}
	return less, nil
}

// lessOfPersistentVolume drops all of a PersistentVolume but its name, phase, handle and claim.
func lessOfPersistentVolume(object any) (any, error) {
	pv, ok := object.(*corev1.PersistentVolume)
	if !ok {
		return object, nil
	}
	less := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: pv.Name, UID: pv.UID, ResourceVersion: pv.ResourceVersion}}
	less.Spec.ClaimRef, less.Status.Phase = pv.Spec.ClaimRef, pv.Status.Phase
	if csi := pv.Spec.CSI; csi != nil {
		less.Spec.CSI = &corev1.CSIPersistentVolumeSource{Driver: csi.Driver, VolumeHandle: csi.VolumeHandle}
	}
	return less, nil
}

// Run watches until the context ends.
func (v *Viewer) Run(ctx context.Context) error {
	return v.others.Start(ctx)
}

// Overview returns the overview by the caches. ErrUnavailable until those of the store are filled (Store.Ready). While the API server does not answer,
// Overview.Missing says that it may be old.
func (v *Viewer) Overview(ctx context.Context) (*overview.Overview, error) {
	if err := v.store.Ready(ctx); err != nil {
		return nil, err
	}
	synced := v.synced()
	o, err := view.Take(ctx, reader{v.store.kube.Cache, v.others}, view.Options{Version: v.version, Kubernetes: synced, Silent: func(node string) bool {
		left, beats := v.store.nodes.Patience(node)
		return beats && left <= 0
	}})
	if err == nil && !synced {
		o.Missing = append(o.Missing, "pods, PersistentVolumes and StorageClasses: they are not known yet; if that lasts, the controller lacks the right to list and watch them")
	}
	if err == nil && !v.store.nodes.Hears() {
		o.Blind = true
		o.Missing = append(o.Missing, "whatever is new: the API server does not answer, or is too busy, so all of this may be old")
	}
	return o, err
}

func (v *Viewer) synced() bool {
	for _, informer := range v.informers {
		if !informer.HasSynced() {
			return false
		}
	}
	return true
}

// Changes returns a channel that has an element after a change, until the context ends. Several changes may be one element.
func (v *Viewer) Changes(ctx context.Context) <-chan struct{} {
	changes := make(chan struct{}, 1)
	tell := func() {
		select {
		case changes <- struct{}{}:
		default: // an element is there already
		}
	}
	handler := toolscache.ResourceEventHandlerFuncs{AddFunc: func(any) { tell() }, DeleteFunc: func(any) { tell() }, UpdateFunc: func(before, after any) {
		if before.(client.Object).GetResourceVersion() != after.(client.Object).GetResourceVersion() {
			tell()
		}
	}}
	for _, informer := range slices.Concat(v.objects, v.informers) {
		if registration, err := informer.AddEventHandler(handler); err == nil { // else it was stopped
			context.AfterFunc(ctx, func() { _ = informer.RemoveEventHandler(registration) })
		}
	}
	go func() {
		ticker := time.NewTicker(lookAgain)
		defer ticker.Stop()
		for {
			select {
			case <-ticker.C:
				tell()
			case <-ctx.Done():
				return
			}
		}
	}()
	return changes
}

// reader reads each kind from the cache that has it.
type reader struct {
	client.Reader
	others client.Reader
}

func (r reader) List(ctx context.Context, list client.ObjectList, options ...client.ListOption) error {
	switch list.(type) {
	case *corev1.PodList, *corev1.PersistentVolumeList, *storagev1.StorageClassList:
		return r.others.List(ctx, list, options...)
	}
	return r.Reader.List(ctx, list, options...)
}
