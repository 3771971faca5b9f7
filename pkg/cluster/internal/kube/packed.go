package kube

import (
	"reflect"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/cache"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/pack"
)

// newInformer is cache.NewSharedIndexInformer, except that its store has Volumes and Snapshots packed (package pack), as there may be very many of them.
// Readers, event handlers and indexes get them unpacked, as new objects.
func newInformer(from cache.ListerWatcher, example runtime.Object, resync time.Duration, indexers cache.Indexers) cache.SharedIndexInformer {
	switch example.(type) {
	case *v1alpha1.Volume, *v1alpha1.Snapshot:
		format, err := pack.New(reflect.TypeOf(example).Elem())
		if err != nil {
			panic(err) // impossible: TestPack packs both kinds
		}
		delete(indexers, cache.NamespaceIndex) // they have no namespace
		return &packing{SharedIndexInformer: cache.NewSharedIndexInformer(from, example, resync, indexers), format: format}
	}
	return cache.NewSharedIndexInformer(from, example, resync, indexers)
}

// packed is an object in a store.
type packed struct {
	format *pack.Format
	name   string // the store's key, which it keeps when the object changes: it must not be a part of text, which would stay in memory with it
	text   string
}

// GetObjectMeta makes it a metav1.ObjectMetaAccessor, as client-go needs one.
func (p *packed) GetObjectMeta() metav1.Object { return p.unpack() }

func (p *packed) unpack() metav1.Object {
	o := p.format.Unpack(p.text).(metav1.Object)
	o.SetName(p.name)
	return o
}

// unpacked returns v unpacked, if it is packed, or has a packed object.
func unpacked(v any) any {
	switch v := v.(type) {
	case *packed:
		return v.unpack()
	case cache.DeletedFinalStateUnknown:
		v.Obj = unpacked(v.Obj)
		return v
	}
	return v
}

func allUnpacked(vs []any) []any {
	for i := range vs {
		vs[i] = unpacked(vs[i])
	}
	return vs
}

// packing is an informer whose store has packed objects.
type packing struct {
	cache.SharedIndexInformer
	format  *pack.Format
	indexed indexed
}

// SetTransform has objects packed after they were transformed.
func (p *packing) SetTransform(transform cache.TransformFunc) error {
	return p.SharedIndexInformer.SetTransform(func(v any) (any, error) {
		if transform != nil {
			var err error
			if v, err = transform(v); err != nil {
				return nil, err
			}
		}
		o, ok := v.(metav1.Object)
		if !ok {
			return v, nil // it is packed, or cache.DeletedFinalStateUnknown
		}
		name, owner := p.known(o.GetName()), ownerOf(o)
		o.SetName("")
		return &packed{p.format, name, p.format.Pack(owner, o)}, nil
	})
}

// known returns a name as the store has it, so that the store's key and all states of an object share one string.
func (p *packing) known(name string) string {
	if v, is, err := p.SharedIndexInformer.GetIndexer().GetByKey(name); err == nil && is {
		if o, is := v.(*packed); is {
			return o.name
		}
	}
	return name
}

// ownerOf returns the owner of an object, as Format.Pack needs it: for a leg its volume, else the object itself. Otherwise what the legs of one volume
// have in common, as its claim, would become a word, and the number of words is limited.
func ownerOf(o metav1.Object) string {
	if v, is := o.(*v1alpha1.Volume); is && v.Spec.ReplicaOf != "" {
		return v.Spec.ReplicaOf
	}
	return o.GetName()
}

// AddEventHandler adds a handler that gets objects unpacked.
func (p *packing) AddEventHandler(h cache.ResourceEventHandler) (cache.ResourceEventHandlerRegistration, error) {
	return p.SharedIndexInformer.AddEventHandler(unpacking{h})
}

// AddEventHandlerWithResyncPeriod is AddEventHandler.
func (p *packing) AddEventHandlerWithResyncPeriod(h cache.ResourceEventHandler, period time.Duration) (cache.ResourceEventHandlerRegistration, error) {
	return p.SharedIndexInformer.AddEventHandlerWithResyncPeriod(unpacking{h}, period)
}

// AddEventHandlerWithOptions is AddEventHandler.
func (p *packing) AddEventHandlerWithOptions(h cache.ResourceEventHandler, o cache.HandlerOptions) (cache.ResourceEventHandlerRegistration, error) {
	return p.SharedIndexInformer.AddEventHandlerWithOptions(unpacking{h}, o)
}

// AddIndexers adds indexes that get objects unpacked. They must not change them.
func (p *packing) AddIndexers(indexers cache.Indexers) error {
	wrapped := cache.Indexers{}
	for name, index := range indexers {
		wrapped[name] = func(v any) ([]string, error) { return index(p.indexed.unpacked(v)) }
	}
	return p.SharedIndexInformer.AddIndexers(wrapped)
}

// indexed keeps the two objects that were last unpacked for an index. A store that changes an object asks each index for the old and the new one, while it
// holds its lock.
type indexed struct {
	mu   sync.Mutex
	last [2]struct {
		packed *packed
		object any
	}
}

// unpacked is the function unpacked, but returns the same object for the same packed one again: it must not be changed.
func (i *indexed) unpacked(v any) any {
	p, is := v.(*packed)
	if !is {
		return unpacked(v)
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	for _, one := range i.last {
		if one.packed == p {
			return one.object
		}
	}
	i.last[1] = i.last[0]
	i.last[0].packed, i.last[0].object = p, p.unpack()
	return i.last[0].object
}

// GetStore returns the store, for readers.
func (p *packing) GetStore() cache.Store { return p.GetIndexer() }

// GetIndexer returns the store, for readers.
func (p *packing) GetIndexer() cache.Indexer { return indexer{p.SharedIndexInformer.GetIndexer()} }

// unpacking is an event handler that gets objects unpacked.
type unpacking struct{ cache.ResourceEventHandler }

func (u unpacking) OnAdd(v any, initial bool) { u.ResourceEventHandler.OnAdd(unpacked(v), initial) }

func (u unpacking) OnUpdate(before, after any) {
	u.ResourceEventHandler.OnUpdate(unpacked(before), unpacked(after))
}

func (u unpacking) OnDelete(v any) { u.ResourceEventHandler.OnDelete(unpacked(v)) }

// indexer is a store whose readers get objects unpacked. The other methods are those of the store itself.
type indexer struct{ cache.Indexer }

func (i indexer) Get(v any) (any, bool, error) {
	have, is, err := i.Indexer.Get(v)
	return unpacked(have), is, err
}

func (i indexer) GetByKey(key string) (any, bool, error) {
	have, is, err := i.Indexer.GetByKey(key)
	return unpacked(have), is, err
}

func (i indexer) List() []any { return allUnpacked(i.Indexer.List()) }

func (i indexer) Index(name string, v any) ([]any, error) {
	all, err := i.Indexer.Index(name, v)
	return allUnpacked(all), err
}

func (i indexer) ByIndex(name, value string) ([]any, error) {
	all, err := i.Indexer.ByIndex(name, value)
	return allUnpacked(all), err
}
