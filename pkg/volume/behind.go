package volume

import (
	"fmt"
	"os"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/direct"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// behind writes pieces of up to ReadSize bytes to a device that is open for direct I/O, one after the other, while its caller waits for the next one. It is for one
// goroutine.
type behind struct {
	target *os.File
	memory []byte     // two pieces
	half   int        // of the memory, which the next piece is kept in
	under  chan error // has the result of the write that is under way; nil: none is
	failed error      // of the first write that failed; nothing is written after it
}

// writeBehind returns one. end waits for what is under way, and frees its memory.
func writeBehind(target *os.File) (_ *behind, end func(), err error) {
	memory, free, err := direct.Memory(2 * ReadSize)
	if err != nil {
		return nil, nil, err
	}
	b := &behind{target: target, memory: memory}
	return b, func() {
		_ = b.wait() // who wanted to know has waited
		free()
	}, nil
}

// write waits until what was given before is written, whose error it returns, and begins to write a piece. The piece is the caller's again when it returns.
func (b *behind) write(piece []byte, offset int64) error {
	kept := b.memory[b.half*ReadSize:][:copy(b.memory[b.half*ReadSize:][:ReadSize], piece)]
	if err := b.wait(); err != nil {
		return err
	}
	b.half = 1 - b.half
	under := make(chan error, 1)
	b.under = under
	go func() {
		_, err := b.target.WriteAt(kept, offset)
		if err != nil {
			err = fmt.Errorf("write %s at byte %d: %w", b.target.Name(), offset, errdefs.FromErrno(err))
		}
		under <- err
	}()
	return nil
}

// wait waits until all that was given is written. It returns the error of the first write that failed, each time.
func (b *behind) wait() error {
	if b.under != nil {
		b.failed, b.under = <-b.under, nil
	}
	return b.failed
}
