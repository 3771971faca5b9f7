package demo

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// This file has what the pods of the demo write, and how it is checked.

// writeFiles writes count files of random bytes, of bytes in all, and syncs them. The same seed gives the same content.
func writeFiles(dir string, seed uint64, count int, bytes int64) error {
	random := rand.NewChaCha8([32]byte{byte(seed)})
	for i := range count {
		f, err := os.Create(filepath.Join(dir, "file-"+strconv.Itoa(i)))
		if err != nil {
			return err
		}
		_, err = io.CopyN(f, random, bytes/int64(count))
		if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
			return err
		}
	}
	return nil
}

// checksum returns the SHA-256 of names and contents of the files that writeFiles made in a directory.
func checksum(dir string) (string, error) {
	names, err := filepath.Glob(filepath.Join(dir, "file-*"))
	if err != nil {
		return "", err
	}
	slices.Sort(names)
	sum := sha256.New()
	for _, name := range names {
		f, err := os.Open(name)
		if err != nil {
			return "", err
		}
		_, _ = io.WriteString(sum, filepath.Base(name)+"\n") // writing to a hash never fails
		_, err = io.Copy(sum, f)
		f.Close()
		if err != nil {
			return "", err
		}
	}
	return hex.EncodeToString(sum.Sum(nil)), nil
}

// A journal is a file of records, each with its number and a checksum. Each record is on disk before the next one is written.
const (
	journalName   = "journal"
	journalRecord = 4096
	journalMost   = 2048 // records at most
)

// journalWriter appends to a journal until it is stopped.
type journalWriter struct {
	synced atomic.Int64 // records that are on disk
	wait   atomic.Int64 // the longest time for one record, in ns
	cancel func()       // asks the writer to stop
	ended  chan error
}

func startJournal(dir string) (*journalWriter, error) {
	f, err := os.Create(filepath.Join(dir, journalName))
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	w := &journalWriter{cancel: cancel, ended: make(chan error, 1)}
	go func() {
		defer f.Close()
		w.ended <- w.append(ctx, f)
	}()
	return w, nil
}

func (w *journalWriter) append(ctx context.Context, f *os.File) error {
	for i := int64(0); i < journalMost && ctx.Err() == nil; i++ {
		began := time.Now()
		if _, err := f.Write(record(i)); err != nil {
			return err
		}
		if err := unix.Fdatasync(int(f.Fd())); err != nil {
			return &os.PathError{Op: "fdatasync", Path: f.Name(), Err: err}
		}
		w.synced.Store(i + 1)
		w.wait.Store(max(w.wait.Load(), int64(time.Since(began))))
		time.Sleep(200 * time.Microsecond)
	}
	return nil
}

// longest returns the longest time that a record has taken so far.
func (w *journalWriter) longest() time.Duration { return time.Duration(w.wait.Load()) }

// stop stops the writer and waits for its end, for 10 s at most.
func (w *journalWriter) stop() error {
	w.cancel()
	select {
	case err := <-w.ended:
		return err
	case <-time.After(10 * time.Second):
		return errors.New("a write to the volume does not come back: is its filesystem still frozen?")
	}
}

// wrote waits until n more records are on disk, for 10 s at most.
func (w *journalWriter) wrote(n int64) error {
	goal, deadline := min(w.synced.Load()+n, journalMost), time.Now().Add(10*time.Second)
	for w.synced.Load() < goal {
		if time.Now().After(deadline) {
			return errors.New("the writer in the volume stands still")
		}
		time.Sleep(time.Millisecond)
	}
	return nil
}

func record(number int64) []byte {
	r := make([]byte, journalRecord)
	for i := range r {
		r[i] = byte(number)
	}
	binary.LittleEndian.PutUint64(r, uint64(number))
	binary.LittleEndian.PutUint32(r[journalRecord-4:], crc32.ChecksumIEEE(r[:journalRecord-4]))
	return r
}

// readJournal returns the number of records in a journal. It fails if there is anything but whole records in order.
func readJournal(dir string) (int64, error) {
	text, err := os.ReadFile(filepath.Join(dir, journalName))
	if err != nil {
		return 0, err
	}
	if len(text)%journalRecord != 0 {
		return 0, fmt.Errorf("the journal in %s ends within a record, at byte %d", dir, len(text))
	}
	n := int64(len(text) / journalRecord)
	for i := range n {
		if !bytes.Equal(text[i*journalRecord:][:journalRecord], record(i)) {
			return 0, fmt.Errorf("record %d of the journal in %s is not what was written", i, dir)
		}
	}
	return n, nil
}

// writeDevice writes the pattern of a seed at an offset of a device, with direct I/O.
func writeDevice(device string, offset int64, seed uint64) error {
	f, err := os.OpenFile(device, os.O_RDWR|unix.O_DIRECT, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	block := aligned()
	defer block.free()
	copy(block.bytes, pattern(seed))
	if _, err := f.WriteAt(block.bytes, offset); err != nil {
		return err
	}
	return f.Sync()
}

// checkDevice checks with direct I/O that a device has the pattern of a seed at an offset. Seed 0 stands for zeros.
func checkDevice(device string, offset int64, seed uint64) error {
	f, err := os.OpenFile(device, os.O_RDONLY|unix.O_DIRECT, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	block := aligned()
	defer block.free()
	if _, err := f.ReadAt(block.bytes, offset); err != nil {
		return err
	}
	want := make([]byte, patternSize)
	if seed != 0 {
		want = pattern(seed)
	}
	if !bytes.Equal(block.bytes, want) {
		return fmt.Errorf("%s does not read at byte %d what should be there", device, offset)
	}
	return nil
}

const patternSize = 1 << 20

func pattern(seed uint64) []byte {
	p := make([]byte, patternSize)
	_, _ = rand.NewChaCha8([32]byte{byte(seed)}).Read(p)
	return p
}

// buffer is memory that is aligned for direct I/O.
type buffer struct{ bytes []byte }

func aligned() buffer {
	memory, err := unix.Mmap(-1, 0, patternSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		panic(err) // 1 MiB of memory
	}
	return buffer{memory}
}

func (b buffer) free() { _ = unix.Munmap(b.bytes) }
