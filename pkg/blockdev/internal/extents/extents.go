// Package extents joins ranges of bytes, for implementations of blockdev.Differ.
package extents

import "github.com/ashlar-csi/ashlar/pkg/blockdev"

// Writer joins adjacent ranges before it passes them on to Yield.
type Writer struct {
	Yield   func(blockdev.Extent) error
	pending blockdev.Extent
}

// Add adds a range, which has to come after all earlier ones.
func (w *Writer) Add(e blockdev.Extent) error {
	if w.pending.Length > 0 && w.pending.Offset+w.pending.Length == e.Offset {
		w.pending.Length += e.Length
		return nil
	}
	err := w.Flush()
	w.pending = e
	return err
}

// Flush passes on the last range. Without it that is lost.
func (w *Writer) Flush() error {
	if w.pending.Length == 0 {
		return nil
	}
	err := w.Yield(w.pending)
	w.pending = blockdev.Extent{}
	return err
}
