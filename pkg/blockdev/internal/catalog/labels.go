package catalog

import (
	"encoding/binary"
	"maps"
	"slices"
)

// A map takes some 300 bytes, whatever is in it, and a pool may have very many objects. So an entry has its labels as a text: for each label, in the order
// of the keys, the length and the bytes of its key, then of its value.

func packLabels(labels map[string]string) string {
	var text []byte
	for _, key := range slices.Sorted(maps.Keys(labels)) {
		for _, part := range []string{key, labels[key]} {
			text = append(binary.AppendUvarint(text, uint64(len(part))), part...)
		}
	}
	return string(text)
}

// unpackLabels is the inverse of packLabels; nil for none.
func unpackLabels(text string) map[string]string {
	if text == "" {
		return nil
	}
	labels := map[string]string{}
	next := func() (part string) {
		length, n := binary.Uvarint([]byte(text[:min(len(text), binary.MaxVarintLen64)])) // packLabels wrote it, so it is whole
		part, text = text[n:n+int(length)], text[n+int(length):]
		return part
	}
	for text != "" {
		key := next()
		labels[key] = next()
	}
	return labels
}
