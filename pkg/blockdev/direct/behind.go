package direct

import (
	"fmt"
	"os"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Behind writes pieces to a file that is open past the page cache, one after the other, while its caller prepares the next one. Only one goroutine may use
// it.
type Behind struct {
	target *os.File
	size   int
	memory []byte     // two pieces
	half   int        // which half of the memory has the next piece
	under  chan error // gets the result of the write that is under way; nil: none is
	failed error      // the error of the first write that failed; nothing is written after it
}

// WriteBehind returns a Behind for pieces of up to size bytes. end waits for the write that is under way, and frees the memory.
func WriteBehind(target *os.File, size int) (_ *Behind, end func(), err error) {
	memory, free, err := Memory(2 * size)
	if err != nil {
		return nil, nil, err
	}
	b := &Behind{target: target, size: size, memory: memory}
	return b, func() {
		_ = b.Wait() // a caller that needs the error has called Wait
		free()
	}, nil
}

// Next returns the memory for the next piece. It belongs to the caller until Write.
func (b *Behind) Next() []byte { return b.memory[b.half*b.size:][:b.size] }

// Write waits for the write before it, and returns its error. Then it begins to write the first n bytes of Next at an offset.
func (b *Behind) Write(n int, offset int64) error {
	piece := b.Next()[:n]
	if err := b.Wait(); err != nil {
		return err
	}
	b.half = 1 - b.half
	under := make(chan error, 1)
	b.under = under
	go func() {
		_, err := b.target.WriteAt(piece, offset)
		if err != nil {
			err = fmt.Errorf("write %s at byte %d: %w", b.target.Name(), offset, errdefs.FromErrno(err))
		}
		under <- err
	}()
	return nil
}

// Wait waits until all pieces are written. From the first write that failed on, it returns that error each time.
func (b *Behind) Wait() error {
	if b.under != nil {
		b.failed, b.under = <-b.under, nil
	}
	return b.failed
}
