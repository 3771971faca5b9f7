package kube

import (
	"context"
	"fmt"

	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Each calls visit with each object of a kind that a cache has, as they were at one moment. Unlike a list, it has only one of them unpacked in memory at a
// time. visit must not change them.
func Each[T client.Object](ctx context.Context, c cache.Cache, of T, visit func(T)) error {
	informer, err := c.GetInformer(ctx, of)
	if err != nil {
		return err
	}
	stored, ok := informer.(interface{ GetStore() toolscache.Store })
	if !ok {
		return fmt.Errorf("the cache of %T cannot be looked at: %T", of, informer)
	}
	store := stored.GetStore()
	if packed, is := store.(indexer); is {
		store = packed.Indexer
	}
	for _, v := range store.List() {
		o, is := unpacked(v).(T)
		if !is {
			return fmt.Errorf("the cache of %T has a %T", of, v)
		}
		visit(o)
	}
	return nil
}

// CaughtUp waits until the cache has all objects of a kind that the client wrote before, as a list of the client does. ErrUnavailable if ctx ends first.
func (c Connection) CaughtUp(ctx context.Context, of client.Object) error {
	f, ok := c.Client.(*fresh)
	if !ok {
		return fmt.Errorf("it is not known what a %T wrote", c.Client)
	}
	gvk, err := f.GroupVersionKindFor(of)
	if err != nil {
		return err
	}
	return f.caughtUp(ctx, gvk, "")
}
