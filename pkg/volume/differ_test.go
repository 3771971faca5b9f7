package volume_test

import (
	"crypto/rand"
	"fmt"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/volume"
	"github.com/ashlar-csi/ashlar/pkg/volume/storetest"
)

// TestEncryptedRanges: whoever asks which bytes of a snapshot were written, or changed, is told of those that the volume has behind its header.
func TestEncryptedRanges(t *testing.T) {
	const header, piece = 16 * mib, 64 << 10
	disk := memory.NewDisk(storetest.Size)
	l := start(t, 0, disk.Open("default", nil))
	v, err := l.Create(t.Context(), volume.Spec{Name: "v", Size: volume.Range{Required: 4 * mib}, Encryption: volume.Encryption{Scheme: volume.LUKS2}})
	check.OK(t, err)
	// As the pool keeps it: the header, and ciphertext behind it.
	write := func(at, length int64) {
		t.Helper()
		data := make([]byte, length)
		_, _ = rand.Read(data)
		check.OK(t, storetest.WriteTo(disk.Open("default", nil))(t.Context(), v.ID, at, data))
	}
	cut := func(name string) volume.Snapshot {
		t.Helper()
		s, err := l.CreateSnapshot(t.Context(), name, v.ID)
		check.OK(t, err)
		if s.Size != v.Size {
			t.Fatalf("snapshot %s has %d bytes, its volume %d", name, s.Size, v.Size)
		}
		return s
	}
	listed := func(list func(from int64, yield func(blockdev.Extent) error) error, from int64) (all []blockdev.Extent) {
		t.Helper()
		check.OK(t, list(from, func(e blockdev.Extent) error { all = append(all, e); return nil }))
		return all
	}
	write(0, piece)
	write(header-piece, 2*piece) // of the header the end, and what is behind it
	write(header+v.Size-piece, piece)
	one := cut("one")
	write(4096, 4096) // another key
	two := cut("two")
	write(header+mib, piece)
	three := cut("three")

	allocated := func(from int64, yield func(blockdev.Extent) error) error { return l.Allocated(t.Context(), one.ID, from, yield) }
	changed := func(target volume.Snapshot) func(int64, func(blockdev.Extent) error) error {
		return func(from int64, yield func(blockdev.Extent) error) error {
			return l.Changed(t.Context(), one.ID, target.ID, from, yield)
		}
	}
	first, last := blockdev.Extent{Length: piece}, blockdev.Extent{Offset: v.Size - piece, Length: piece}
	for _, c := range []struct {
		what string
		list func(int64, func(blockdev.Extent) error) error
		from int64
		want []blockdev.Extent
	}{
		{"allocated", allocated, 0, []blockdev.Extent{first, last}},
		{"allocated", allocated, piece, []blockdev.Extent{last}},
		{"allocated", allocated, v.Size, nil},
		{"changed by another key", changed(two), 0, nil},
		{"changed", changed(three), 0, []blockdev.Extent{{Offset: mib, Length: piece}}},
		{"changed", changed(three), mib + piece, nil},
	} {
		if have := listed(c.list, c.from); fmt.Sprint(have) != fmt.Sprint(c.want) {
			t.Errorf("%s, from byte %d: %v, want %v", c.what, c.from, have, c.want)
		}
	}
}
