package kube

import (
	"errors"
	"net/http"
	"sync"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
)

// Connection is a connection to the API server.
type Connection struct {
	// Cache has the objects that are watched. It may be behind the API server. It has to be started.
	Cache cache.Cache
	// Client reads from the cache, but waits first until that has seen all that this client wrote (fresh).
	Client client.Client
	// Live reads from the API server itself.
	Live client.Client
}

var setLogger = sync.OnceFunc(func() { log.SetLogger(klog.Background()) })

// Connect prepares a connection. It asks the API server nothing, which may be down. For the kinds in only, the cache has just the objects that are
// selected there.
func Connect(config *rest.Config, only map[client.Object]cache.ByObject) (Connection, error) {
	setLogger()
	scheme := runtime.NewScheme()
	if err := errors.Join(corev1.AddToScheme(scheme), storagev1.AddToScheme(scheme), coordinationv1.AddToScheme(scheme), eventsv1.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)); err != nil {
		return Connection{}, err
	}
	mapper := meta.NewDefaultRESTMapper(nil)
	v1alpha1.AddToMapper(mapper)
	mapper.Add(corev1.SchemeGroupVersion.WithKind("Node"), meta.RESTScopeRoot)
	mapper.Add(corev1.SchemeGroupVersion.WithKind("PersistentVolume"), meta.RESTScopeRoot)
	mapper.Add(corev1.SchemeGroupVersion.WithKind("PersistentVolumeClaim"), meta.RESTScopeNamespace)
	mapper.Add(eventsv1.SchemeGroupVersion.WithKind("Event"), meta.RESTScopeNamespace)
	mapper.Add(coordinationv1.SchemeGroupVersion.WithKind("Lease"), meta.RESTScopeNamespace)
	mapper.Add(storagev1.SchemeGroupVersion.WithKind("StorageClass"), meta.RESTScopeRoot)
	mapper.Add(storagev1.SchemeGroupVersion.WithKind("VolumeAttachment"), meta.RESTScopeRoot)
	mapper.Add(storagev1.SchemeGroupVersion.WithKind("CSINode"), meta.RESTScopeRoot)
	config = rest.CopyConfig(config)
	config.QPS = -1 // no limit here: the API server has its own (priority and fairness)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return relisting{answering{next}} })
	web, err := rest.HTTPClientFor(config)
	if err != nil {
		return Connection{}, err
	}
	var c Connection
	if c.Cache, err = cache.New(config, cache.Options{HTTPClient: web, Scheme: scheme, Mapper: mapper, ByObject: only,
		DefaultTransform: less, NewInformer: newInformer}); err != nil {
		return c, err
	}
	options := client.Options{HTTPClient: web, Scheme: scheme, Mapper: mapper}
	if c.Live, err = client.New(config, options); err != nil {
		return c, err
	}
	options.Cache = &client.CacheOptions{Reader: c.Cache}
	cached, err := client.New(config, options)
	if err != nil {
		return c, err
	}
	selected := map[schema.GroupVersionKind]fields.Selector{}
	for o, by := range only {
		gvk, err := cached.GroupVersionKindFor(o)
		if err != nil {
			return c, err
		}
		selected[gvk] = by.Field
	}
	c.Client = &fresh{Client: cached, cache: c.Cache, live: c.Live, only: selected, kinds: map[schema.GroupVersionKind]*written{}}
	return c, nil
}

// less removes from an object, before it is cached, what no part of the driver reads. That is safe for writes, as they are patches of what was changed.
func less(v any) (any, error) {
	if o, ok := v.(metav1.Object); ok { // otherwise it is cache.DeletedFinalStateUnknown, or packed already
		o.SetManagedFields(nil)
	}
	if node, ok := v.(*corev1.Node); ok { // its status may list fifty images, or more
		node.Annotations, node.Status = nil, corev1.NodeStatus{Conditions: node.Status.Conditions}
	}
	return v, nil
}

// Node returns a Node that has nothing but its name.
func Node(name string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
}
