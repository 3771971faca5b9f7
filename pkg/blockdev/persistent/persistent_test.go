package persistent_test

import (
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/persistent"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/persistent/persistenttest"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

func numbers(all ...uint64) (values [][]byte) {
	for _, n := range all {
		values = append(values, binary.LittleEndian.AppendUint64(nil, n))
	}
	return values
}

// TestArray: all values of an array are read, and of one that is damaged none is left out without a word.
func TestArray(t *testing.T) {
	disk, err := os.Create(filepath.Join(t.TempDir(), "metadata"))
	check.OK(t, err)
	defer disk.Close()
	const most = (persistent.BlockSize - 24) / 4
	full := make([]byte, 4*most)
	for i := range most {
		binary.LittleEndian.PutUint32(full[4*i:], uint32(i))
	}
	write := func(errs ...error) { t.Helper(); check.OK(t, errors.Join(errs...)) }
	sound := func() {
		t.Helper()
		write(persistenttest.Node(disk, 1, false, []uint64{0, 2}, numbers(2, 3)), persistenttest.Node(disk, 2, true, []uint64{0, 1}, numbers(4, 5)),
			persistenttest.Node(disk, 3, true, []uint64{2}, numbers(6)),
			persistenttest.Array(disk, 4, 4, full...), persistenttest.Array(disk, 5, 4, full...), persistenttest.Array(disk, 6, 4, full[:8]...))
	}
	read := func(count uint64) (seen uint64, err error) {
		err = persistent.File{File: disk}.Array(1, 4, count, func(index uint64, value []byte) error {
			if index != seen || uint64(binary.LittleEndian.Uint32(value)) != index%most {
				t.Fatalf("value %d is %v, after %d others", index, value, seen)
			}
			seen++
			return nil
		})
		return seen, err
	}
	sound()
	if seen, err := read(2*most + 2); err != nil || seen != 2*most+2 {
		t.Errorf("%d values, %v", seen, err)
	}
	for what, damage := range map[string]func(){
		"it is shorter than it should be":       func() { write(persistenttest.Array(disk, 6, 4, full[:4]...)) },
		"it is longer":                          func() { write(persistenttest.Array(disk, 6, 4, full[:12]...)) },
		"a block has too few":                   func() { write(persistenttest.Array(disk, 5, 4, full[:4*most-4]...)) },
		"a block is missing":                    func() { write(persistenttest.Node(disk, 2, true, []uint64{0}, numbers(4))) },
		"blocks are in another order":           func() { write(persistenttest.Node(disk, 2, true, []uint64{1, 0}, numbers(5, 4))) },
		"its values have another size":          func() { write(persistenttest.Array(disk, 5, 8, full...)) },
		"a block is that of another":            func() { write(persistenttest.Node(disk, 2, true, []uint64{0, 1}, numbers(4, 3))) },
		"the tree has values of another size":   func() { write(persistenttest.Node(disk, 3, true, []uint64{2}, [][]byte{make([]byte, 12)})) },
		"the tree is round":                     func() { write(persistenttest.Node(disk, 3, false, []uint64{2}, numbers(1))) },
		"a node that is no leaf has no entries": func() { write(persistenttest.Node(disk, 3, false, nil, nil)) },
		"a bit of a value is another": func() {
			b := make([]byte, 1)
			_, err := disk.ReadAt(b, 5*persistent.BlockSize+100)
			write(err)
			b[0] ^= 1
			_, err = disk.WriteAt(b, 5*persistent.BlockSize+100)
			write(err)
		},
	} {
		sound()
		damage()
		if _, err := read(2*most + 2); !errors.Is(err, errdefs.ErrUnsupported) {
			t.Errorf("%s: %v", what, err)
		}
	}
}
