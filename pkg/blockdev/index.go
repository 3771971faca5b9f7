package blockdev

import (
	"maps"
	"slices"
)

// index is what a pool has in memory: its objects, and their keys in order.
type index[T any] struct {
	objects map[Ref]T
	keys    map[Kind][]string
}

func newIndex[T any]() index[T] {
	return index[T]{map[Ref]T{}, map[Kind][]string{}}
}

func (x index[T]) put(ref Ref, object T) {
	x.objects[ref] = object
	if i, found := slices.BinarySearch(x.keys[ref.Kind], ref.Key); !found {
		x.keys[ref.Kind] = slices.Insert(x.keys[ref.Kind], i, ref.Key)
	}
}

func (x index[T]) remove(ref Ref) {
	delete(x.objects, ref)
	if i, found := slices.BinarySearch(x.keys[ref.Kind], ref.Key); found {
		x.keys[ref.Kind] = slices.Delete(x.keys[ref.Kind], i, i+1)
	}
}

// list returns up to limit (0: all) ready records of a kind whose keys come after the
// given one; record tells the record of an object.
func (x index[T]) list(kind Kind, after string, limit int, record func(T) Record) []Record {
	keys := x.keys[kind]
	i, found := slices.BinarySearch(keys, after)
	if found {
		i++
	}
	var records []Record
	for _, key := range keys[i:] {
		if limit > 0 && len(records) == limit {
			break
		}
		if r := record(x.objects[Ref{kind, key}]); r.Ready {
			records = append(records, copyOf(r))
		}
	}
	return records
}

// copyOf keeps callers away from the pool's own maps.
func copyOf(r Record) Record {
	r.Labels = maps.Clone(r.Labels)
	return r
}

// changeLabels returns a record with its labels changed (Pool.SetLabels).
func changeLabels(r Record, change func(map[string]string) error) (Record, error) {
	labels := map[string]string{}
	maps.Copy(labels, r.Labels)
	if err := change(labels); err != nil {
		return Record{}, err
	}
	r.Labels = maps.Clone(labels) // change may have kept the other
	return r, nil
}
