package direct

import (
	"fmt"
	"os"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Behind writes pieces to a file that is open past the page cache, one after the other, while its caller reads the next one. It is for one goroutine.
type Behind struct {
	target *os.File
	size   int
	memory []byte     // two pieces
	half   int        // of the memory, which the next piece is kept in
	under  chan error // has the result of the write that is under way; nil: none is
	failed error      // of the first write that failed; nothing is written after it
}

// WriteBehind returns one for pieces of up to size bytes. end waits for what is under way, and frees its memory.
func WriteBehind(target *os.File, size int) (_ *Behind, end func(), err error) {
	memory, free, err := Memory(2 * size)
	if err != nil {
		return nil, nil, err
	}
	b := &Behind{target: target, size: size, memory: memory}
	return b, func() {
		_ = b.Wait() // who wanted to know has waited
		free()
	}, nil
}

// Next is the memory for the next piece: its caller's until it is given to Write.
func (b *Behind) Next() []byte { return b.memory[b.half*b.size:][:b.size] }

// Write waits until what was given before is written, whose error it returns, and begins to write the first n bytes of Next to an offset.
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

// Wait waits until all that was given is written. It returns the error of the first write that failed, each time.
func (b *Behind) Wait() error {
	if b.under != nil {
		b.failed, b.under = <-b.under, nil
	}
	return b.failed
}
