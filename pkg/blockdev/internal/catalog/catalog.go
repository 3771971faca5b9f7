// Package catalog is what all pools have in memory of their objects, and what they say of them in the same words.
package catalog

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// AbandonedAfter is when an unfinished copy that nobody came back for is given up.
const AbandonedAfter = 15 * time.Minute

// Same checks that an existing object is the one asked for.
func Same(pool string, have blockdev.Record, spec blockdev.Spec) (blockdev.Record, error) {
	if have.Name != spec.Name || have.Origin != spec.Origin {
		return blockdev.Record{}, fmt.Errorf("%w: %s in pool %s is %q made from %s", errdefs.ErrExists, have.Ref, pool, have.Name, have.Origin)
	}
	return Copy(have), nil
}

// Index is what a pool has in memory: its objects, and their keys in order.
type Index[T any] struct {
	Objects map[blockdev.Ref]T
	keys    map[blockdev.Kind][]string
}

// NewIndex returns an empty Index.
func NewIndex[T any]() Index[T] {
	return Index[T]{map[blockdev.Ref]T{}, map[blockdev.Kind][]string{}}
}

// Put adds an object, or replaces it.
func (x Index[T]) Put(ref blockdev.Ref, object T) {
	x.Objects[ref] = object
	if i, found := slices.BinarySearch(x.keys[ref.Kind], ref.Key); !found {
		x.keys[ref.Kind] = slices.Insert(x.keys[ref.Kind], i, ref.Key)
	}
}

// Remove forgets an object.
func (x Index[T]) Remove(ref blockdev.Ref) {
	delete(x.Objects, ref)
	if i, found := slices.BinarySearch(x.keys[ref.Kind], ref.Key); found {
		x.keys[ref.Kind] = slices.Delete(x.keys[ref.Kind], i, i+1)
	}
}

// Page returns up to limit (0: all) ready records of a kind whose keys come after the
// given one; record tells the record of an object.
func (x Index[T]) Page(kind blockdev.Kind, after string, limit int, record func(T) blockdev.Record) []blockdev.Record {
	keys := x.keys[kind]
	i, found := slices.BinarySearch(keys, after)
	if found {
		i++
	}
	var records []blockdev.Record
	for _, key := range keys[i:] {
		if limit > 0 && len(records) == limit {
			break
		}
		if r := record(x.Objects[blockdev.Ref{Kind: kind, Key: key}]); r.Ready {
			records = append(records, Copy(r))
		}
	}
	return records
}

// Copy keeps callers away from the pool's own maps.
func Copy(r blockdev.Record) blockdev.Record {
	r.Labels = maps.Clone(r.Labels)
	return r
}

// ChangeLabels returns a record with its labels changed (Pool.SetLabels).
func ChangeLabels(r blockdev.Record, change func(map[string]string) error) (blockdev.Record, error) {
	labels := map[string]string{}
	maps.Copy(labels, r.Labels)
	if err := change(labels); err != nil {
		return blockdev.Record{}, err
	}
	r.Labels = maps.Clone(labels) // change may have kept the other
	return r, nil
}

// ErrRecord is the cause of every errdefs.ErrDataLoss about a record.
var ErrRecord = fmt.Errorf("%w: damaged record", errdefs.ErrDataLoss)

// State is how far an object has come. One that is not ready is nobody's.
type State string

// The states.
const (
	Creating State = "creating"
	Ready    State = "ready"
	Deleting State = "deleting"
)
