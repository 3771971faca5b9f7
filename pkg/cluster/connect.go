// Package cluster keeps volumes on the nodes of a Kubernetes cluster. The objects of
// pkg/api are all that its two halves share: Store, for the controller, writes down what
// is to be; on each node an Agent carries it out, on the volumes of that node, and writes
// down what is. Whoever waits, watches; nobody polls.
//
// docs/cluster.md says which requests each call costs, and who deletes what.
package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// connection is what both halves have of the API server.
type connection struct {
	cache cache.Cache
	// client reads from the cache, which has seen all that the client wrote.
	client client.Client
	// live reads from the API server.
	live client.Client
}

var setLogger = sync.OnceFunc(func() { log.SetLogger(klog.Background()) })

// connect asks the API server nothing: it may be down.
func connect(config *rest.Config, only map[client.Object]cache.ByObject) (connection, error) {
	setLogger()
	scheme := runtime.NewScheme()
	if err := errors.Join(corev1.AddToScheme(scheme), storagev1.AddToScheme(scheme), coordinationv1.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)); err != nil {
		return connection{}, err
	}
	mapper := meta.NewDefaultRESTMapper(nil)
	v1alpha1.AddToMapper(mapper)
	mapper.Add(corev1.SchemeGroupVersion.WithKind("Node"), meta.RESTScopeRoot)
	mapper.Add(corev1.SchemeGroupVersion.WithKind("PersistentVolume"), meta.RESTScopeRoot)
	mapper.Add(corev1.SchemeGroupVersion.WithKind("PersistentVolumeClaim"), meta.RESTScopeNamespace)
	mapper.Add(coordinationv1.SchemeGroupVersion.WithKind("Lease"), meta.RESTScopeNamespace)
	mapper.Add(storagev1.SchemeGroupVersion.WithKind("StorageClass"), meta.RESTScopeRoot)
	mapper.Add(storagev1.SchemeGroupVersion.WithKind("VolumeAttachment"), meta.RESTScopeRoot)
	config = rest.CopyConfig(config)
	config.QPS = -1 // the API server shares itself out (priority and fairness)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return relisting{next} })
	web, err := rest.HTTPClientFor(config)
	if err != nil {
		return connection{}, err
	}
	var c connection
	if c.cache, err = cache.New(config, cache.Options{HTTPClient: web, Scheme: scheme, Mapper: mapper, ByObject: only,
		DefaultTransform: cache.TransformStripManagedFields()}); err != nil {
		return c, err
	}
	options := client.Options{HTTPClient: web, Scheme: scheme, Mapper: mapper}
	if c.live, err = client.New(config, options); err != nil {
		return c, err
	}
	options.Cache = &client.CacheOptions{Reader: c.cache}
	cached, err := client.New(config, options)
	c.client = &fresh{Client: cached, cache: c.cache, live: c.live, kinds: map[schema.GroupVersionKind]*written{}}
	return c, err
}

// relisting has the cache list anew where the API server refused a connection for a watch, or has not come
// as far as the watch is to begin. client-go would watch on from the last version that it saw, so if etcd was
// restored meanwhile, it would not see what that changed before etcd has come as far again; with any other error
// of a watch it lists anew by itself, but for "too many requests", after which it comes here again.
type relisting struct{ http.RoundTripper }

func (r relisting) RoundTrip(q *http.Request) (*http.Response, error) {
	if !q.URL.Query().Has("watch") {
		return r.RoundTripper.RoundTrip(q)
	}
	answer, err := r.reached(q)
	if answer == nil && err == nil {
		answer, err = r.RoundTripper.RoundTrip(q)
	}
	if utilnet.IsConnectionRefused(err) {
		err = errors.New(err.Error()) // client-go knows it by the errno inside
	}
	return answer, err
}

// lookTimeout is how long the API server may take to say how far it has come.
const lookTimeout = 30 * time.Second

// reached fails if the API server has not come as far as the version from which a watch goes on. An answer is one
// that does not say how far that is; it is for the watch too, so that a server that is busy is not asked for all
// that there is. A watch that begins with that needs no such look.
func (r relisting) reached(watch *http.Request) (*http.Response, error) {
	from, err := strconv.ParseUint(watch.URL.Query().Get("resourceVersion"), 10, 64)
	if err != nil || watch.URL.Query().Has("sendInitialEvents") {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(watch.Context(), lookTimeout)
	defer cancel()
	q := watch.Clone(ctx)
	q.URL.RawQuery = "limit=1"
	q.Header.Set("Accept", "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1")
	answer, err := r.RoundTripper.RoundTrip(q)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	said, err := io.ReadAll(answer.Body)
	if err != nil {
		return nil, fmt.Errorf("look how far %s has come: %w", watch.URL.Path, err)
	}
	if answer.StatusCode != http.StatusOK {
		answer.Body = io.NopCloser(bytes.NewReader(said))
		return answer, nil
	}
	var list metav1.PartialObjectMetadataList
	if err := json.Unmarshal(said, &list); err != nil {
		return nil, fmt.Errorf("look how far %s has come: %w", watch.URL.Path, err)
	}
	if now, err := strconv.ParseUint(list.ResourceVersion, 10, 64); err != nil || now < from {
		return nil, fmt.Errorf("%s is at version %q, and the watch at %d: etcd was restored", watch.URL.Path, list.ResourceVersion, from)
	}
	return nil, nil
}

// apiError gives an error of the API server its sentinel. Whatever does not say for sure
// that nothing happened is ErrUnavailable: the work may be going on.
func apiError(doing string, err error) error {
	sentinel := errdefs.ErrUnavailable
	switch {
	case err == nil:
		return nil
	case apierrors.IsNotFound(err):
		sentinel = errdefs.ErrNotFound
	case apierrors.IsInvalid(err), apierrors.IsBadRequest(err):
		sentinel = errdefs.ErrInvalid
	}
	return fmt.Errorf("%w: %s: %w", sentinel, doing, err)
}

// lockingPatch is a patch that fails with a conflict if anybody else changed the object.
func lockingPatch(before client.Object) client.Patch {
	return client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})
}
