package volume_test

import (
	"crypto/rand"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
	"github.com/ashlar-csi/ashlar/pkg/volume/storetest"
)

// TestEncryptedRanges: the ranges of a snapshot of an encrypted volume that were written or changed are those of the volume, without the header.
func TestEncryptedRanges(t *testing.T) {
	const header, piece = 16 * mib, 64 << 10
	disk := memory.NewDisk(storetest.Size)
	pool := disk.Open("default", nil)
	l := start(t, 0, pool)
	_, err := pool.Create(t.Context(), blockdev.Spec{Ref: blockdev.Ref{Kind: blockdev.Volume, Key: volume.KeyOf("v")}, Name: "v", Size: header + 4*mib,
		Labels: map[string]string{"encryption": "luks2", "header": "formatted:" + volume.KeyOf("v")}}) // as a machine that can encrypt would make it
	check.OK(t, err)
	v, err := l.Get(t.Context(), volume.ID{Kind: blockdev.Volume, Pool: "default", Key: volume.KeyOf("v")})
	check.OK(t, err)
	if v.Size != 4*mib || v.Encryption.Scheme != volume.LUKS2 {
		t.Fatalf("it is %+v", v)
	}
	// write writes to the pool's object, which has the header and then the ciphertext.
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
	write(header-piece, 2*piece) // across the end of the header
	write(header+v.Size-piece, piece)
	one := cut("one")
	write(4096, 4096) // in the header, as for another key
	two := cut("two")
	write(header+mib, piece)
	three := cut("three")

	allocated := func(from int64, yield func(blockdev.Extent) error) error {
		return l.Allocated(t.Context(), one.ID, from, yield)
	}
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

// TestGroupStaysWhileListed: a group is not deleted (ErrBusy) while the ranges of one of its members are being listed.
func TestGroupStaysWhileListed(t *testing.T) {
	disk := memory.NewDisk(storetest.Size)
	l := start(t, 0, disk.Open("default", nil))
	v, err := l.Create(t.Context(), volume.Spec{Name: "v", Size: volume.Range{Required: 4 * mib}})
	check.OK(t, err)
	cut := func(name string) (volume.GroupID, volume.ID) {
		t.Helper()
		check.OK(t, storetest.WriteTo(disk.Open("default", nil))(t.Context(), v.ID, 0, []byte(name)))
		group, err := l.CreateGroup(t.Context(), name, []volume.ID{v.ID})
		check.OK(t, err)
		return group.ID, group.Snapshots[0].ID
	}
	base, from := cut("base")
	target, to := cut("target")
	for what, list := range map[string]func(yield func(blockdev.Extent) error) error{
		"allocated": func(yield func(blockdev.Extent) error) error { return l.Allocated(t.Context(), to, 0, yield) },
		"changed":   func(yield func(blockdev.Extent) error) error { return l.Changed(t.Context(), from, to, 0, yield) },
	} {
		listed := false
		check.OK(t, list(func(blockdev.Extent) error {
			listed = true
			fails(t, l.DeleteGroup(t.Context(), target), errdefs.ErrBusy, what+": deletion of its group")
			if what == "changed" {
				fails(t, l.DeleteGroup(t.Context(), base), errdefs.ErrBusy, what+": deletion of the group of its base")
			}
			return nil
		}))
		if !listed {
			t.Errorf("%s: nothing is listed", what)
		}
	}
	check.OK(t, l.DeleteGroup(t.Context(), base))
	check.OK(t, l.DeleteGroup(t.Context(), target))
}

// TestCopyOfEncrypted: an encrypted volume, or a snapshot of it, cannot be copied to a volume that is to be unencrypted.
func TestCopyOfEncrypted(t *testing.T) {
	pool := memory.NewDisk(storetest.Size).Open("default", nil)
	l := start(t, 0, pool)
	_, err := pool.Create(t.Context(), blockdev.Spec{Ref: blockdev.Ref{Kind: blockdev.Volume, Key: volume.KeyOf("v")}, Name: "v", Size: 20 * mib,
		Labels: map[string]string{"encryption": "luks2"}})
	check.OK(t, err)
	v := volume.ID{Kind: blockdev.Volume, Pool: "default", Key: volume.KeyOf("v")}
	s, err := l.CreateSnapshot(t.Context(), "s", v)
	check.OK(t, err)
	for _, source := range []volume.ID{v, s.ID} {
		fails(t, second(l.Create(t.Context(), volume.Spec{Name: "copy of " + source.String(), Source: source})), errdefs.ErrInvalid, "a copy that is not encrypted")
	}
}

// TestWrongBase: Changed refuses a base that was cut after the target, and says why.
func TestWrongBase(t *testing.T) {
	l := start(t, 0, memory.NewDisk(1<<30).Open("pool", nil))
	v := made(t)(l.Create(t.Context(), volume.Spec{Name: "v", Size: volume.Range{Required: 1 << 20}}))
	first, err := l.CreateSnapshot(t.Context(), "first", v.ID)
	check.OK(t, err)
	then, err := l.CreateSnapshot(t.Context(), "then", v.ID)
	check.OK(t, err)
	err = l.Changed(t.Context(), then.ID, first.ID, 0, func(blockdev.Extent) error { return nil })
	fails(t, err, errdefs.ErrInvalid, "Changed since a later snapshot")
	if says := "the target " + first.ID.String() + " before that, at " + first.Created.Format(time.RFC3339Nano); err == nil || !strings.Contains(err.Error(), says) {
		t.Errorf("%v does not say %q", err, says)
	}
}
