package volume

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// TestBehind: what is written behind arrives where it belongs, also if its caller uses the memory again.
func TestBehind(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "target"))
	check.OK(t, err)
	defer f.Close()
	b, end, err := writeBehind(f)
	check.OK(t, err)
	defer end()
	var want []byte
	piece := make([]byte, ReadSize)
	for n, size := range []int{ReadSize, 4096, ReadSize, ReadSize - 4096, 8192} {
		for i := range size {
			piece[i] = byte(n + 1)
		}
		at := len(want)
		want = append(want, piece[:size]...)
		check.OK(t, b.write(piece[:size], int64(at)))
	}
	check.OK(t, b.wait())
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
	b, end, err := writeBehind(f)
	check.OK(t, err)
	defer end()
	check.OK(t, b.write(make([]byte, 4096), 0))
	first := b.write(make([]byte, 4096), 4096)
	again := b.wait()
	if first == nil || !errors.Is(again, first) || b.write(make([]byte, 4096), 8192) == nil || b.under != nil {
		t.Errorf("%v, and then %v", first, again)
	}
	if errors.Is(first, errdefs.ErrUnavailable) {
		t.Errorf("it is to be tried again: %v", first)
	}
}
