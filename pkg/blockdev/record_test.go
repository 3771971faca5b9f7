package blockdev

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"reflect"
	"strings"
	"testing"
	"time"
)

func exampleRecord() Record {
	key := strings.Repeat("0f", 16)
	return Record{Ref: Ref{Volume, key}, Name: "pvc-1", Size: 1 << 30, Thin: true, Origin: Ref{Snapshot, key},
		Created: time.Date(2026, 1, 2, 3, 4, 5, 678, time.UTC), Labels: map[string]string{"a": "b", "ä\"\n": ""}}
}

func TestSlotRoundTrip(t *testing.T) {
	for name, change := range map[string]func(r *Record) (state, int64){
		"full":     func(*Record) (state, int64) { return ready, 0 },
		"plain":    func(r *Record) (state, int64) { r.Origin, r.Labels, r.Thin = Ref{}, nil, false; return ready, 0 },
		"creating": func(*Record) (state, int64) { return creating, 0 },
		"deleting": func(*Record) (state, int64) { return deleting, 0 },
		"growing":  func(r *Record) (state, int64) { return ready, r.Size + Granularity },
		"largest":  func(r *Record) (state, int64) { r.Size = MaxSize; return ready, 0 },
		"snapshot": func(r *Record) (state, int64) { r.Kind, r.Origin.Kind = Snapshot, Volume; return ready, 0 },
	} {
		t.Run(name, func(t *testing.T) {
			record := exampleRecord()
			st, growing := change(&record)
			in := newStored(record, st, growing)
			slot, err := encodeSlot(in, 7)
			if err != nil || len(slot) != slotSize {
				t.Fatalf("%d bytes, %v", len(slot), err)
			}
			out, generation, err := decodeSlot(slot)
			if err != nil || generation != 7 || !reflect.DeepEqual(in, out) {
				t.Errorf("%#v became %#v, generation %d, %v", in, out, generation, err)
			}
		})
	}
}

func TestSlotTooSmall(t *testing.T) {
	record := exampleRecord()
	record.Labels["big"] = strings.Repeat("x", slotSize)
	if _, err := encodeSlot(newStored(record, ready, 0), 1); !errors.Is(err, ErrInvalid) {
		t.Errorf("error %v, want %v", err, ErrInvalid)
	}
}

// FuzzDecodeSlot: whatever is on the disk, it is a record, none, or damaged; and a record
// is read back as what was written.
func FuzzDecodeSlot(f *testing.F) {
	slot, err := encodeSlot(newStored(exampleRecord(), ready, 0), 7)
	if err != nil {
		f.Fatal(err)
	}
	used := bytes.TrimRight(slot, "\x00")
	torn := bytes.Clone(slot)
	clear(torn[64:])
	_, body, _ := bytes.Cut(used, []byte("\n"))
	for _, seed := range [][]byte{nil, body, make([]byte, slotSize), slot, used, torn, used[:len(used)-1], []byte("ashlar-record 2 anything\n"),
		[]byte("ashlar-record 1 gen=1 len=-1 crc32c=00000000\n"), []byte("ashlar-record 1 gen=1 len=0 crc32c=00000000\n"),
		[]byte("ashlar-record 1 gen=18446744073709551616 len=9 crc32c=0\n"), bytes.Replace(slot, []byte("gen=7"), []byte("gen=0"), 1)} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		// As it is, and as the body of a slot with a right checksum.
		check(t, data)
		if record, _, err := decodeSlot(data); err == nil && record != nil {
			return
		}
		check(t, withHeader(data))
	})
}

// withHeader puts a right header before any body.
func withHeader(body []byte) []byte {
	return append(fmt.Appendf(nil, headerFormat, recordVersion, 3, len(body), crc32.Checksum(body, castagnoli)), body...)
}

func check(t *testing.T, slot []byte) {
	s, generation, err := decodeSlot(slot)
	switch {
	case err != nil:
		if !errors.Is(err, ErrDataLoss) || s != nil || generation != 0 {
			t.Fatalf("%q: %v, %d, %v", slot, s, generation, err)
		}
		return
	case s == nil:
		if generation != 0 || len(bytes.Trim(slot, "\x00")) > 0 {
			t.Fatalf("%q is no record and no error", slot)
		}
		return
	}
	if generation == 0 || s.decoded.validate() != nil || s.Size <= 0 || s.Size > MaxSize || s.Size%Granularity != 0 {
		t.Fatalf("%q is a record: %#v", slot, s)
	}
	again, err := encodeSlot(s, generation)
	if err != nil {
		return // it was longer than a slot
	}
	back, g, err := decodeSlot(again)
	if err != nil || g != generation || !s.Created.Equal(back.Created) {
		t.Fatalf("%q is read back as %#v, %d, %v", slot, back, g, err)
	}
	// Zones and empty maps are written in one way.
	back.Created, back.decoded.Created = s.Created, s.decoded.Created
	if len(s.Labels) == 0 && len(back.Labels) == 0 {
		back.Labels, back.decoded.Labels = s.Labels, s.decoded.Labels
	}
	if !reflect.DeepEqual(s, back) {
		t.Fatalf("%q is read back as %#v, was %#v", slot, back, s)
	}
}
