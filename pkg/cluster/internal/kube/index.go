package kube

import (
	"context"
	"fmt"
	"strings"

	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// What controller-runtime's cache puts before the name of a field to name its index, and before each value of an index over all namespaces.
const (
	fieldIndex = "field:"
	everywhere = "__all_namespaces/"
)

// Index is an index of the objects of a kind without namespaces, by a field (Cache.IndexField).
type Index struct {
	Of    client.Object
	Field string
}

// Values returns all values that some indexes of a cache have. It does not look at the objects.
func Values(ctx context.Context, c cache.Cache, indexes ...Index) (map[string]bool, error) {
	values := map[string]bool{}
	for _, index := range indexes {
		informer, err := c.GetInformer(ctx, index.Of)
		if err != nil {
			return nil, err
		}
		indexed, ok := informer.(interface{ GetIndexer() toolscache.Indexer })
		if !ok || indexed.GetIndexer().GetIndexers()[fieldIndex+index.Field] == nil {
			return nil, fmt.Errorf("the cache has no index %q of %T", index.Field, index.Of)
		}
		for _, value := range indexed.GetIndexer().ListIndexFuncValues(fieldIndex + index.Field) {
			values[strings.TrimPrefix(value, everywhere)] = true
		}
	}
	return values, nil
}
