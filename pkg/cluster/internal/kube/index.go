package kube

import (
	"context"
	"fmt"
	"strings"

	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// How a cache calls the index of a field, and what is before each of its values: of all namespaces, as there are none.
const (
	fieldIndex = "field:"
	everywhere = "__all_namespaces/"
)

// Values returns the values that objects of a kind without namespaces have in an index of the cache (Cache.IndexField), each once. It looks at no object.
func Values(ctx context.Context, c cache.Cache, of client.Object, field string) ([]string, error) {
	informer, err := c.GetInformer(ctx, of)
	if err != nil {
		return nil, err
	}
	indexed, ok := informer.(interface{ GetIndexer() toolscache.Indexer })
	if !ok || indexed.GetIndexer().GetIndexers()[fieldIndex+field] == nil {
		return nil, fmt.Errorf("the cache has no index %q of %T", field, of)
	}
	var values []string
	for _, value := range indexed.GetIndexer().ListIndexFuncValues(fieldIndex + field) {
		values = append(values, strings.TrimPrefix(value, everywhere))
	}
	return values, nil
}
