package direct_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/direct"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

const size = 1 << 20 // bytes of a piece

// TestBehind: what is written behind arrives where it belongs, also while its caller fills the memory for the next one.
func TestBehind(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "target"))
	check.OK(t, err)
	defer f.Close()
	b, end, err := direct.WriteBehind(f, size)
	check.OK(t, err)
	defer end()
	var want []byte
	for n, length := range []int{size, 4096, size, size - 4096, 8192} {
		piece := b.Next()[:length]
		for i := range piece {
			piece[i] = byte(n + 1)
		}
		at := len(want)
		want = append(want, piece...)
		check.OK(t, b.Write(length, int64(at)))
	}
	check.OK(t, b.Wait())
	have, err := os.ReadFile(f.Name())
	check.OK(t, err)
	if !bytes.Equal(have, want) {
		t.Error("other bytes arrived")
	}
}

// TestBehindFails: the error of a write is not lost, however often it is asked for, and nothing is written after it.
func TestBehindFails(t *testing.T) {
	f, err := os.Open("/dev/full") // not for writing
	check.OK(t, err)
	defer f.Close()
	b, end, err := direct.WriteBehind(f, size)
	check.OK(t, err)
	defer end()
	check.OK(t, b.Write(4096, 0))
	first := b.Write(4096, 4096)
	again := b.Wait()
	if first == nil || !errors.Is(again, first) || b.Write(4096, 8192) == nil || !errors.Is(b.Wait(), first) {
		t.Errorf("%v, and then %v", first, again)
	}
	if errors.Is(first, errdefs.ErrUnavailable) {
		t.Errorf("it is to be tried again: %v", first)
	}
}
