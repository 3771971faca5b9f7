package kube

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// fresh is a client whose reads of the cache wait until that has all that the client wrote before; ErrUnavailable if ctx ends first. It looks at the state
// of the cache for that, not at events, as controller-runtime does (EnableReadYourWritesConsistency): an object that was written, and is gone before a
// broken watch is restored, causes no event, and a wait for one would never end.
//
// It is for objects without a namespace. Only writes by the methods here are waited for, and only those of objects that the cache has: for others the
// version of the cache's watch advances once a minute only.
type fresh struct {
	client.Client
	cache cache.Cache
	live  client.Reader                               // the API server itself
	only  map[schema.GroupVersionKind]fields.Selector // which objects of a kind the cache has; nil: all

	mu    sync.Mutex
	kinds map[schema.GroupVersionKind]*written
}

// written has the writes of objects of a kind that may not be in the cache yet.
type written struct {
	store toolscache.Store

	mu     sync.Mutex
	writes map[*write]bool // that the cache may not have yet
	latest uint64          // the resourceVersion of the cache when it was last looked at
}

// write is one write of an object. done is closed when the API server has answered; the fields below it are valid from then on.
type write struct {
	name string
	done chan struct{}

	version uint64    // the resourceVersion that the cache has to reach; 0 if nothing was written
	gone    types.UID // of the deleted object, which the cache must not have any more; empty if it was no deletion
}

// firstLook and lastLook are the first and the longest pause between two looks at the cache. askEvery is the pause between two questions to the API server
// whether the cache can catch up at all (undone).
const (
	firstLook = time.Millisecond
	lastLook  = 50 * time.Millisecond
	askEvery  = 5 * time.Second
)

func (f *fresh) kind(ctx context.Context, gvk schema.GroupVersionKind) (*written, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if have := f.kinds[gvk]; have != nil {
		return have, nil
	}
	informer, err := f.cache.GetInformerForKind(ctx, gvk, cache.BlockUntilSynced(false))
	if err != nil {
		return nil, err
	}
	stored, ok := informer.(interface{ GetStore() toolscache.Store })
	if !ok {
		return nil, fmt.Errorf("the cache of %s cannot be looked at: %T", gvk.Kind, informer)
	}
	have := &written{store: stored.GetStore(), writes: map[*write]bool{}}
	f.kinds[gvk] = have
	return have, nil
}

// has reports whether the cache has a write; the write has to be done.
func (k *written) has(w *write) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.hasLocked(w)
}

// hasLocked is has. The caller holds the lock.
func (k *written) hasLocked(w *write) bool {
	version, err := strconv.ParseUint(k.store.LastStoreSyncResourceVersion(), 10, 64)
	if err != nil { // the cache is not filled yet
		return false
	}
	if version < k.latest {
		k.forget() // etcd was restored from a backup: later writes are lost
	}
	k.latest = version
	if !k.writes[w] {
		return true
	}
	if version < w.version {
		return false
	}
	if w.gone == "" {
		return true
	}
	have, there, err := k.store.GetByKey(w.name)
	if err != nil || !there {
		return err == nil
	}
	o, ok := have.(client.Object)
	return ok && (o.GetUID() != w.gone || o.GetDeletionTimestamp() != nil)
}

// forget removes the writes that are done. The caller holds the lock.
func (k *written) forget() {
	for w := range k.writes {
		select {
		case <-w.done:
			delete(k.writes, w)
		default:
		}
	}
}

// forgetAll removes the writes that are done.
func (k *written) forgetAll() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.forget()
}

// begin adds a write of an object that begins now, and removes those that the cache has.
func (k *written) begin(name string) *write {
	k.mu.Lock()
	defer k.mu.Unlock()
	for w := range k.writes {
		select {
		case <-w.done:
			if k.hasLocked(w) {
				delete(k.writes, w)
			}
		default:
		}
	}
	w := &write{name: name, done: make(chan struct{})}
	k.writes[w] = true
	return w
}

// of returns the writes of an object, or with an empty name all writes.
func (k *written) of(name string) []*write {
	k.mu.Lock()
	defer k.mu.Unlock()
	var found []*write
	for w := range k.writes {
		if name == "" || w.name == name {
			found = append(found, w)
		}
	}
	return found
}

// caughtUp waits until the cache has all writes of an object, or with an empty name of all objects of a kind, that had begun before it was called.
func (f *fresh) caughtUp(ctx context.Context, gvk schema.GroupVersionKind, name string) error {
	k, err := f.kind(ctx, gvk)
	if err != nil {
		return err
	}
	for _, w := range k.of(name) {
		if err := f.waitFor(ctx, gvk, k, w); err != nil {
			return err
		}
	}
	return nil
}

// waitFor waits until the cache has one write.
func (f *fresh) waitFor(ctx context.Context, gvk schema.GroupVersionKind, k *written, w *write) error {
	select {
	case <-w.done:
	case <-ctx.Done():
		return fmt.Errorf("%w: %s %s is being written: %w", errdefs.ErrUnavailable, gvk.Kind, w.name, ctx.Err())
	}
	asked := time.Now()
	for pause := firstLook; !k.has(w); pause = min(2*pause, lastLook) {
		if time.Since(asked) >= askEvery {
			if f.undone(ctx, gvk, w) {
				k.forgetAll()
			}
			asked = time.Now()
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return fmt.Errorf("%w: what was written to %s %s has not come back from the API server yet: %w", errdefs.ErrUnavailable, gvk.Kind, w.name, ctx.Err())
		}
	}
	return nil
}

// undone asks the API server whether a write that is done is lost, because etcd was restored from a backup: the API server is at an earlier version, or
// still has the object that was deleted. hasLocked alone does not notice each restore: there may have been later writes since, and etcd may be restored
// with a later version.
func (f *fresh) undone(ctx context.Context, gvk schema.GroupVersionKind, w *write) bool {
	var list metav1.PartialObjectMetadataList
	list.SetGroupVersionKind(gvk.GroupVersion().WithKind(gvk.Kind + "List"))
	if err := f.live.List(ctx, &list, client.MatchingFields{"metadata.name": w.name}); err != nil {
		return false // unknown; it is asked again
	}
	version, err := strconv.ParseUint(list.ResourceVersion, 10, 64)
	return err == nil && version < w.version || slices.ContainsFunc(list.Items, func(o metav1.PartialObjectMetadata) bool {
		return w.gone != "" && o.UID == w.gone && o.DeletionTimestamp == nil
	})
}

// Get reads an object from the cache, when that has all writes of it.
func (f *fresh) Get(ctx context.Context, key client.ObjectKey, o client.Object, options ...client.GetOption) error {
	gvk, err := f.GroupVersionKindFor(o)
	if err == nil {
		err = f.caughtUp(ctx, gvk, key.Name)
	}
	if err != nil {
		return err
	}
	return f.Client.Get(ctx, key, o, options...)
}

// List reads objects from the cache, when that has all writes of their kind.
func (f *fresh) List(ctx context.Context, list client.ObjectList, options ...client.ListOption) error {
	gvk, err := f.GroupVersionKindFor(list)
	if err == nil {
		gvk.Kind = strings.TrimSuffix(gvk.Kind, "List")
		err = f.caughtUp(ctx, gvk, "")
	}
	if err != nil {
		return err
	}
	return f.Client.List(ctx, list, options...)
}

// write calls do, which writes an object, and keeps track of the write. gone is the UID of the object if it is deleted, else empty.
func (f *fresh) write(ctx context.Context, o client.Object, gone types.UID, do func() error) error {
	gvk, err := f.GroupVersionKindFor(o)
	if err != nil {
		return err
	}
	k, err := f.kind(ctx, gvk)
	if err != nil {
		return err
	}
	w := k.begin(o.GetName())
	defer close(w.done)
	if err := do(); err != nil {
		return err
	}
	if is, err := f.selects(gvk, o); err != nil || !is {
		return err
	}
	w.gone = gone
	w.version, err = strconv.ParseUint(o.GetResourceVersion(), 10, 64)
	return err
}

// selects reports whether the cache selects an object, as it is after a write. No write of the driver takes an object out of the selection.
func (f *fresh) selects(gvk schema.GroupVersionKind, o client.Object) (bool, error) {
	selector := f.only[gvk]
	if selector == nil {
		return true, nil
	}
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(o)
	if err != nil {
		return false, err
	}
	values := fields.Set{}
	for _, r := range selector.Requirements() {
		value, _, err := unstructured.NestedString(content, strings.Split(r.Field, ".")...)
		if err != nil {
			return false, err
		}
		values[r.Field] = value
	}
	return selector.Matches(values), nil
}

// Create creates an object.
func (f *fresh) Create(ctx context.Context, o client.Object, options ...client.CreateOption) error {
	return f.write(ctx, o, "", func() error { return f.Client.Create(ctx, o, options...) })
}

// Patch changes an object.
func (f *fresh) Patch(ctx context.Context, o client.Object, patch client.Patch, options ...client.PatchOption) error {
	return f.write(ctx, o, "", func() error { return f.Client.Patch(ctx, o, patch, options...) })
}

// Delete deletes an object that was read, or written.
func (f *fresh) Delete(ctx context.Context, o client.Object, options ...client.DeleteOption) error {
	return f.write(ctx, o, o.GetUID(), func() error { return f.Client.Delete(ctx, o, options...) })
}

// Status changes the status of an object.
func (f *fresh) Status() client.SubResourceWriter { return freshStatus{f.Client.Status(), f} }

type freshStatus struct {
	client.SubResourceWriter
	of *fresh
}

// Patch changes the status of an object.
func (s freshStatus) Patch(ctx context.Context, o client.Object, patch client.Patch, options ...client.SubResourcePatchOption) error {
	return s.of.write(ctx, o, "", func() error { return s.SubResourceWriter.Patch(ctx, o, patch, options...) })
}
