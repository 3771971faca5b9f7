package lvmpool_test

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lvmpool"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/persistent/persistenttest"
)

// forest has trees of a thin pool's metadata in a file. As with snapshots, what trees have in common is one node.
type forest struct {
	t      *testing.T
	file   *os.File
	random *rand.Rand
	nodes  map[string]uint64 // by what they have
}

// node returns the block of a node.
func (f *forest) node(leaf bool, keys, values []uint64) uint64 {
	f.t.Helper()
	as := fmt.Sprint(leaf, keys, values)
	if f.nodes[as] == 0 {
		f.nodes[as] = uint64(len(f.nodes) + 1)
		each := make([][]byte, 0, len(values))
		for _, value := range values {
			each = append(each, binary.LittleEndian.AppendUint64(nil, value))
		}
		check.OK(f.t, persistenttest.Node(f.file, f.nodes[as], leaf, keys, each))
	}
	return f.nodes[as]
}

// parts cuts keys into some parts. Equal keys are cut in equal places, more or less.
func (f *forest) parts(keys []uint64) (parts [][]uint64) {
	for len(keys) > 0 {
		n := min(len(keys), int(2+keys[0]%5))
		if f.random.IntN(20) == 0 {
			n = min(len(keys), 1+f.random.IntN(6))
		}
		parts, keys = append(parts, keys[:n]), keys[n:]
	}
	return parts
}

// tree returns the root of a tree.
func (f *forest) tree(of map[uint64]uint64) uint64 {
	f.t.Helper()
	var keys []uint64
	for key := range of {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	below := of // the nodes of the level below, by their first keys
	for leaf := true; ; leaf = false {
		level, firsts := map[uint64]uint64{}, []uint64(nil)
		for _, part := range f.parts(keys) {
			values := make([]uint64, 0, len(part))
			for _, key := range part {
				values = append(values, below[key])
			}
			level[part[0]], firsts = f.node(leaf, part, values), append(firsts, part[0])
		}
		if len(firsts) == 0 {
			return f.node(true, nil, nil)
		}
		if len(firsts) == 1 {
			return level[firsts[0]]
		}
		keys, below = firsts, level
	}
}

// TestDiffering: of two trees, exactly the keys are found that they do not have alike, within any span, whatever nodes they share and however deep they are.
func TestDiffering(t *testing.T) {
	file, err := os.Create(filepath.Join(t.TempDir(), "metadata"))
	check.OK(t, err)
	defer file.Close()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	f := &forest{t, file, rand.New(rand.NewPCG(seed, 0)), map[string]uint64{}}
	const end = 400
	for range 300 {
		before := map[uint64]uint64{}
		for range f.random.IntN(end) {
			before[f.random.Uint64N(end)] = lvmpool.Mapped(f.random.Uint64N(1000), 1)
		}
		after := map[uint64]uint64{}
		for key, value := range before {
			after[key] = value
		}
		for range f.random.IntN(30) {
			switch key := f.random.Uint64N(end); f.random.IntN(3) {
			case 0:
				delete(after, key)
			case 1:
				after[key] = lvmpool.Mapped(f.random.Uint64N(1000), 2)
			case 2:
				if value, is := after[key]; is {
					after[key] = value + 1 // the same block, at another time
				}
			}
		}
		first, last := f.random.Uint64N(end/2), end/2+f.random.Uint64N(end)
		if f.random.IntN(3) == 0 {
			first, last = 0, end
		}
		var want []uint64
		for key := first; key < min(last, end); key++ {
			old, was := before[key]
			now, is := after[key]
			if was != is || old/lvmpool.Mapped(1, 0) != now/lvmpool.Mapped(1, 0) {
				want = append(want, key)
			}
		}
		have, err := lvmpool.Differing(file, f.tree(before), f.tree(after), first, last)
		check.OK(t, err)
		if !slices.Equal(have, want) {
			t.Fatalf("from %d to %d: %v, want %v", first, last, have, want)
		}
	}
}
