package recordfile

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/frame"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/catalog"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

func exampleRecord() blockdev.Record {
	key := strings.Repeat("0f", 16)
	return blockdev.Record{Ref: blockdev.Ref{Kind: blockdev.Volume, Key: key}, Name: "pvc-1", Size: 1 << 30, Thin: true, Origin: blockdev.Ref{Kind: blockdev.Snapshot, Key: key},
		Created: time.Date(2026, 1, 2, 3, 4, 5, 678, time.UTC), Labels: map[string]string{"a": "b", "ä\"\n": ""}}
}

func TestSlotRoundTrip(t *testing.T) {
	for name, change := range map[string]func(r *blockdev.Record) (catalog.State, int64){
		"full": func(*blockdev.Record) (catalog.State, int64) { return catalog.Ready, 0 },
		"plain": func(r *blockdev.Record) (catalog.State, int64) {
			r.Origin, r.Labels, r.Thin = blockdev.Ref{}, nil, false
			return catalog.Ready, 0
		},
		"creating": func(*blockdev.Record) (catalog.State, int64) { return catalog.Creating, 0 },
		"deleting": func(*blockdev.Record) (catalog.State, int64) { return catalog.Deleting, 0 },
		"growing":  func(r *blockdev.Record) (catalog.State, int64) { return catalog.Ready, r.Size + blockdev.Granularity },
		"largest":  func(r *blockdev.Record) (catalog.State, int64) { r.Size = blockdev.MaxSize; return catalog.Ready, 0 },
		"snapshot": func(r *blockdev.Record) (catalog.State, int64) {
			r.Kind, r.Origin.Kind = blockdev.Snapshot, blockdev.Volume
			return catalog.Ready, 0
		},
	} {
		t.Run(name, func(t *testing.T) {
			record := exampleRecord()
			st, growing := change(&record)
			in := New(record, st, growing)
			slot, err := encodeSlot(in, 7)
			if err != nil || len(slot) != slotSize {
				t.Fatalf("%d bytes, %v", len(slot), err)
			}
			out, err := decodeSlot(slot)
			if err != nil || out.generation != 7 || out.version != recordVersion || !reflect.DeepEqual(in, out.stored) {
				t.Errorf("%#v became %#v, %v", in, out, err)
			}
		})
	}
}

func TestSlotTooSmall(t *testing.T) {
	record := exampleRecord()
	record.Labels["big"] = strings.Repeat("x", slotSize)
	if _, err := encodeSlot(New(record, catalog.Ready, 0), 1); !errors.Is(err, errdefs.ErrInvalid) {
		t.Errorf("error %v, want %v", err, errdefs.ErrInvalid)
	}
}

// FuzzDecodeSlot: whatever is on the disk, it is a record, none, or damaged; and a record
// is read back as what was written.
func FuzzDecodeSlot(f *testing.F) {
	slot, err := encodeSlot(New(exampleRecord(), catalog.Ready, 0), 7)
	if err != nil {
		f.Fatal(err)
	}
	used := bytes.TrimRight(slot, "\x00")
	torn := bytes.Clone(slot)
	clear(torn[64:])
	_, body, _ := bytes.Cut(used, []byte("\n"))
	for _, seed := range [][]byte{nil, body, make([]byte, slotSize), slot, used, torn, used[:len(used)-1], []byte("ashlar-record 2 anything\n"),
		[]byte("ashlar-record 2 gen=1 len=-1 crc32c=00000000\n"), withHeader(recordVersion+1, body),
		[]byte("ashlar-record 1 gen=1 len=-1 crc32c=00000000\n"), []byte("ashlar-record 1 gen=1 len=0 crc32c=00000000\n"),
		[]byte("ashlar-record 1 gen=18446744073709551616 len=9 crc32c=0\n"), bytes.Replace(slot, []byte("gen=7"), []byte("gen=0"), 1)} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		// As it is, and as the body of a slot with a right checksum.
		check(t, data)
		if one, err := decodeSlot(data); err == nil && one.stored != nil {
			return
		}
		check(t, withHeader(recordVersion, data))
		check(t, withHeader(firstVersion, data))
	})
}

// withHeader puts a right header before any body.
func withHeader(version int, body []byte) []byte {
	if version == firstVersion {
		return append(fmt.Appendf(nil, firstHeader, version, 3, len(body), crc32.Checksum(body, frame.Castagnoli)), body...)
	}
	return frame.Frame{Version: version, Generation: 3, Body: body}.Encode(recordName)
}

func check(t *testing.T, data []byte) {
	one, err := decodeSlot(data)
	s := one.stored
	switch {
	case err != nil:
		if !errors.Is(err, errdefs.ErrDataLoss) || s != nil || one.generation != 0 {
			t.Fatalf("%q: %v, %v", data, one, err)
		}
		return
	case s == nil:
		if one.generation != 0 || one.blank != (len(bytes.Trim(data, "\x00")) == 0) {
			t.Fatalf("%q is %v", data, one)
		}
		return
	}
	if one.generation == 0 || s.Decoded.Validate() != nil || s.Size <= 0 || s.Size > blockdev.MaxSize || s.Size%blockdev.Granularity != 0 {
		t.Fatalf("%q is a record: %#v", data, s)
	}
	again, err := encodeSlot(s, one.generation)
	if err != nil {
		return // it was longer than a slot
	}
	read, err := decodeSlot(again)
	back := read.stored
	if err != nil || read.generation != one.generation || !s.Created.Equal(back.Created) {
		t.Fatalf("%q is read back as %#v, %v", data, back, err)
	}
	// Zones and empty maps are written in one way.
	back.Created, back.Decoded.Created = s.Created, s.Decoded.Created
	if len(s.Labels) == 0 && len(back.Labels) == 0 {
		back.Labels, back.Decoded.Labels = s.Labels, s.Decoded.Labels
	}
	if !reflect.DeepEqual(s, back) {
		t.Fatalf("%q is read back as %#v, was %#v", data, back, s)
	}
}

// written is a record file after a number of changes, the last of which left out some of its writes.
func written(t *testing.T, records ...*Record) (*os.Root, string) {
	t.Helper()
	root, err := os.OpenRoot(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = root.Close() })
	at, err := Create(root, "rec", records[0])
	for _, s := range records[1:] {
		if err == nil {
			at, err = Update(root, "rec", s, at)
		}
	}
	if err != nil || at.Alone || at.generation != uint64(len(records)) {
		t.Fatalf("%+v, %v", at, err)
	}
	return root, root.Name() + "/rec"
}

// lives is a record in the order of its changes.
func lives() (ref blockdev.Ref, records []*Record) {
	r := exampleRecord()
	for i, st := range []catalog.State{catalog.Creating, catalog.Ready, catalog.Ready, catalog.Ready} {
		r.Labels = map[string]string{"step": fmt.Sprint(i)}
		records = append(records, New(r, st, 0))
	}
	return r.Ref, records
}

// TestEachBit: no flipped bit in either slot takes a record back, or is taken for another
// record; one in each of both is noticed.
func TestEachBit(t *testing.T) {
	ref, records := lives()
	root, path := written(t, records...)
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	newest := records[len(records)-1]
	used := len(bytes.TrimRight(whole[:slotSize], "\x00"))
	for slot := range 2 {
		for bit := range used * 8 {
			rotten := bytes.Clone(whole)
			rotten[slot*slotSize+bit/8] ^= 1 << (bit % 8)
			put(t, path, rotten)
			s, at, err := Read(root, "rec", ref)
			if err != nil || !s.equal(newest) || !at.Alone || at.newest == slot {
				t.Fatalf("bit %d of slot %d: %+v at %+v, %v", bit, slot, s, at, err)
			}
			if bit%97 == 0 {
				if at, err = Update(root, "rec", s, at); err != nil || at.Alone {
					t.Fatalf("bit %d of slot %d cannot be mended: %+v, %v", bit, slot, at, err)
				}
				if s, at, err := Read(root, "rec", ref); err != nil || !s.equal(newest) || at.Alone {
					t.Fatalf("bit %d of slot %d is not mended: %+v at %+v, %v", bit, slot, s, at, err)
				}
			}
			rotten[(1-slot)*slotSize+(bit*7/8)%used] ^= 8
			put(t, path, rotten)
			if s, _, err := Read(root, "rec", ref); !errors.Is(err, errdefs.ErrDataLoss) {
				t.Fatalf("bit %d of slot %d, and one of the other: %+v, %v", bit, slot, s, err)
			}
		}
	}
}

func put(t *testing.T, path string, data []byte) {
	t.Helper()
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestCutShort: whatever a change wrote of itself when it was cut short, the record is the old or the new
// one, and it is the new one once the change was answered.
func TestCutShort(t *testing.T) {
	ref, records := lives()
	for n := 1; n < len(records); n++ {
		_, path := written(t, records[:n]...)
		before, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		root, path := written(t, records[:n+1]...)
		after, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		const first = 1 // the slot that is written first
		for cut := 0; cut <= slotSize; cut += 16 {
			for second := range 2 {
				data, slot := bytes.Clone(before), first
				if second == 1 {
					copy(data[first*slotSize:(first+1)*slotSize], after[first*slotSize:])
					slot = 1 - first
				}
				copy(data[slot*slotSize:slot*slotSize+cut], after[slot*slotSize:])
				put(t, path, data)
				s, _, err := Read(root, "rec", ref)
				if err != nil || (!s.equal(records[n]) && (second == 1 || !s.equal(records[n-1]))) {
					t.Fatalf("change %d cut short after %d bytes of write %d: %+v, %v", n, cut, second, s, err)
				}
			}
		}
	}
}

// TestUnwritable: a disk without space for either slot of a record is told of once.
func TestUnwritable(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("it mounts a filesystem")
	}
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=32k"); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	}()
	put(t, dir+"/rec", nil) // without blocks
	put(t, dir+"/others", make([]byte, 28<<10))
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	_, err = Update(root, "rec", New(exampleRecord(), catalog.Deleting, 0), Position{generation: 1})
	if !Unwritable(err) || strings.Count(err.Error(), "no space left on device") != 1 {
		t.Errorf("%v", err)
	}
}

// TestNotUnderstood: a slot with a right checksum that is not understood is never taken for one that is
// torn, whichever it is.
func TestNotUnderstood(t *testing.T) {
	ref, records := lives()
	root, path := written(t, records...)
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	f, err := frame.Decode(recordName, whole[:slotSize])
	if err != nil {
		t.Fatal(err)
	}
	field := bytes.Replace(f.Body, []byte("{"), []byte(`{"sides":6,`), 1)
	others := bytes.Replace(f.Body, []byte(ref.Key), []byte(strings.Repeat("a", 32)), 1)
	nonsense := bytes.Replace(f.Body, []byte(`"size":`), []byte(`"size":-`), 1)
	for name, one := range map[string]frame.Frame{
		"newer version":              {Version: recordVersion + 1, Generation: 1, Body: f.Body},
		"newer version and field":    {Version: recordVersion + 1, Generation: 99, Body: field},
		"unknown field":              {Version: recordVersion, Generation: 99, Body: field},
		"unknown field, older":       {Version: recordVersion, Generation: 1, Body: field},
		"of another volume":          {Version: recordVersion, Generation: 99, Body: others},
		"of another volume, older":   {Version: recordVersion, Generation: 1, Body: others},
		"of no size":                 {Version: recordVersion, Generation: 99, Body: nonsense},
		"same generation, different": {Version: recordVersion, Generation: f.Generation, Body: bytes.Replace(f.Body, []byte("pvc-1"), []byte("pvc-2"), 1)},
	} {
		for slot := range 2 {
			data := bytes.Clone(whole)
			clear(data[slot*slotSize : (slot+1)*slotSize])
			copy(data[slot*slotSize:], one.Encode(recordName))
			put(t, path, data)
			if s, _, err := Read(root, "rec", ref); !errors.Is(err, errdefs.ErrDataLoss) {
				t.Errorf("%s in slot %d: %+v, %v", name, slot, s, err)
			}
		}
	}
}

// TestFirstVersion: records of version 1 are read if both of their slots are whole, or there never was
// more than one.
func TestFirstVersion(t *testing.T) {
	ref, records := lives()
	one := func(generation int, s *Record) []byte {
		body, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		data := make([]byte, slotSize)
		copy(data, fmt.Appendf(nil, firstHeader, firstVersion, generation, len(body), crc32.Checksum(body, frame.Castagnoli)))
		copy(data[bytes.IndexByte(data, '\n')+1:], body)
		return data
	}
	rotten := func(data []byte) []byte {
		data = bytes.Clone(data)
		data[100] ^= 1
		return data
	}
	torn := one(4, records[3])
	second, err := encodeSlot(records[2], 4)
	if err != nil {
		t.Fatal(err)
	}
	none := make([]byte, slotSize)
	for name, c := range map[string]struct {
		slots [2][]byte
		want  *Record // nil: damaged
	}{
		"created":                {[2][]byte{one(1, records[0]), none}, records[0]},
		"ready":                  {[2][]byte{one(1, records[0]), one(2, records[1])}, records[1]},
		"changed":                {[2][]byte{one(3, records[2]), one(2, records[1])}, records[2]},
		"newest rotten":          {[2][]byte{one(3, records[2]), rotten(torn)}, nil},
		"newest lost":            {[2][]byte{one(3, records[2]), none}, nil},
		"older rotten":           {[2][]byte{rotten(one(3, records[2])), torn}, nil},
		"ready rotten":           {[2][]byte{one(1, records[0]), rotten(one(2, records[1]))}, nil},
		"generation rotten":      {[2][]byte{one(3, records[0]), one(2, records[1])}, nil},
		"generation of ready":    {[2][]byte{one(1, records[0]), one(6, records[1])}, nil},
		"version rotten":         {[2][]byte{one(3, records[2]), bytes.Replace(torn, []byte("record 1"), []byte("record 9"), 1)}, nil},
		"written anew, half":     {[2][]byte{one(3, records[2]), second}, records[2]},
		"written anew, torn":     {[2][]byte{one(3, records[2]), rotten(second)}, records[2]},
		"written anew, both":     {[2][]byte{second, second}, records[2]},
		"written anew, one lost": {[2][]byte{second, none}, records[2]},
	} {
		root, path := written(t, records...)
		put(t, path, append(bytes.Clone(c.slots[0]), c.slots[1]...))
		s, at, err := Read(root, "rec", ref)
		switch {
		case c.want == nil && !errors.Is(err, errdefs.ErrDataLoss), c.want != nil && (err != nil || !s.equal(c.want)):
			t.Errorf("%s: %+v, %v", name, s, err)
		case c.want != nil:
			if at, err = Update(root, "rec", s, at); err != nil || at.Alone {
				t.Errorf("%s: written anew: %+v, %v", name, at, err)
			}
			if s, at, err := Read(root, "rec", ref); err != nil || !s.equal(c.want) || at.Alone {
				t.Errorf("%s: written anew: %+v at %+v, %v", name, s, at, err)
			}
		}
	}
}
