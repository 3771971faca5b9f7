package anynode

import (
	"encoding/binary"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	block  = 4096
	blocks = 256 // that a writer goes through, again and again
	inRush = 16  // writes without a rest: several writers that never rest leave drivers and API server nothing of the one CPU
)

// writer writes blocks one after the other, each with its number, and knows which were acknowledged. It writes past the page cache, unless it syncs each.
type writer struct {
	tag   uint64 // whose they are
	began atomic.Uint64
	acked atomic.Uint64
	stop  atomic.Bool
	done  chan struct{}
	err   error // that ended it; to be read once done is closed
}

// write starts a writer on a device, or a file.
func write(path string, tag uint64) (*writer, error) {
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_DIRECT|unix.O_SYNC, 0)
	if err != nil {
		return nil, err
	}
	return writeTo(f, tag, 1, func() error { return nil }), nil
}

// writeCached starts a writer that writes into the page cache, and has each block synced before it counts as acknowledged.
func writeCached(path string, tag uint64) (*writer, error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	return writeTo(f, tag, 1, f.Sync), nil
}

// writeFlushed starts a writer on a device that flushes after each few blocks; before that none of them counts as acknowledged.
func writeFlushed(path string, tag uint64) (*writer, error) {
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_DIRECT, 0)
	if err != nil {
		return nil, err
	}
	return writeTo(f, tag, 8, f.Sync), nil
}

// writeTo syncs after so many blocks.
func writeTo(f *os.File, tag, every uint64, sync func() error) *writer {
	w := &writer{tag: tag, done: make(chan struct{})}
	go func() {
		defer close(w.done)
		defer f.Close()
		for data := aligned(); !w.stop.Load(); {
			n := w.began.Add(1)
			binary.LittleEndian.PutUint64(data, w.tag)
			binary.LittleEndian.PutUint64(data[8:], n)
			if _, w.err = f.WriteAt(data, int64(n%blocks)*block); w.err != nil {
				return
			}
			if n%every == 0 {
				if w.err = sync(); w.err != nil {
					return
				}
				w.acked.Store(n)
			}
			if n%inRush == 0 {
				time.Sleep(time.Millisecond)
			}
		}
	}()
	return w
}

// end asks the writer to stop, and waits until it has.
func (w *writer) end() {
	w.stop.Store(true)
	<-w.done
}

// found is what a block has.
type found struct{ tag, n uint64 }

func read(path string) ([]found, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECT, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	all, data := make([]found, blocks), aligned()
	for i := range all {
		if _, err := f.ReadAt(data, int64(i)*block); err != nil {
			return nil, err
		}
		all[i] = found{binary.LittleEndian.Uint64(data), binary.LittleEndian.Uint64(data[8:])}
	}
	return all, nil
}

// lost says what is not there of what was acknowledged. A write that was begun and never acknowledged may be there or not.
func (w *writer) lost(have []found) error {
	return w.lostOf(have, w.acked.Load(), w.began.Load())
}

// lostOf is lost as of when so many were acknowledged, and begun.
func (w *writer) lostOf(have []found, acked, began uint64) error {
	for i, h := range have {
		var last uint64 // acknowledged of this block
		if rest := (acked + blocks - uint64(i)) % blocks; acked >= rest {
			last = acked - rest
		}
		if last == 0 {
			continue
		}
		if h.tag != w.tag || h.n < last || h.n > began || h.n%blocks != uint64(i) {
			return fmt.Errorf("block %d has write %d of %x; acknowledged was %d of %x (of %d, begun %d)", i, h.n, h.tag, last, w.tag, acked, began)
		}
	}
	return nil
}

// aligned is a block that may be written past the page cache.
func aligned() []byte {
	raw := make([]byte, 2*block)
	skip := block - int(uintptr(unsafe.Pointer(&raw[0]))%block)
	return raw[skip : skip+block : skip+block]
}

var tags struct {
	sync.Mutex
	last uint64
}

// newTag is one that no writer had.
func newTag() uint64 {
	tags.Lock()
	defer tags.Unlock()
	tags.last++
	return tags.last
}
