// Package recordfile reads and writes the file of an object's record. The file has two slots of slotSize bytes. Each slot has the record as a frame
// (package frame) whose body is one line of JSON, so that it can be read with cat; the rest is zeros.
//
//	ashlar-record 2 gen=7 len=312 crc32c=5f3a90c1
//	{"kind":"vol", ...}
//
// A change is written over one slot and synced, then over the other and synced, and only then answered or acted on. So each slot alone has all that was
// ever answered. If the other was torn as it was written, or rots later, nothing is taken back. (The blocks are there already, so a change is two writes
// and two flushes of the disk; a new file, its rename and the directory's sync cost ten times that.)
//
// A slot with a right checksum that is not understood was never torn: it is of a newer driver, or of another volume, and the record is damaged, whatever
// the other slot has.
//
// A new field of Record takes a new recordVersion, as drivers refuse records with fields that they do not know. A record without the field has to mean
// what it meant before there was one.
//
// Version 1 had a checksum over the body only, and each change in one slot only. Of these records both slots have to be whole, as one alone may be too
// old: a volume that is "never formatted" by it may have been formatted. They are written anew when their pool is opened.
package recordfile

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/frame"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/layout"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/catalog"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

const (
	slotSize      = 8192
	recordVersion = 2
	recordName    = "ashlar-record"
	firstVersion  = 1
	firstHeader   = recordName + " %d gen=%d len=%d crc32c=%08x\n"
)

// ErrNoRecord is for an image without a record.
var ErrNoRecord = fmt.Errorf("%w: its image is there, and it has none", catalog.ErrRecord)

// ErrEmpty is for a record file with nothing in it.
var ErrEmpty = fmt.Errorf("%w: empty record", catalog.ErrRecord)

var errVersion = fmt.Errorf("%w: record of another version", catalog.ErrRecord)

// Record is a blockdev.Record in the form of the file.
type Record struct {
	Kind    blockdev.Kind     `json:"kind"`
	Key     string            `json:"key"`
	Name    string            `json:"name"`
	Size    int64             `json:"size"`
	Growing int64             `json:"growing,omitempty"` // the size that it grows to; 0: it does not grow
	Thin    bool              `json:"thin,omitempty"`
	Sector  int64             `json:"sector,omitempty"` // 0: 512
	Origin  string            `json:"origin,omitempty"`
	Created time.Time         `json:"created"`
	State   catalog.State     `json:"state"`
	Labels  map[string]string `json:"labels,omitempty"`
	Decoded blockdev.Record   `json:"-"`
}

// New returns a record in the form of the file; growing is the size that it grows to, or 0.
func New(r blockdev.Record, st catalog.State, growing int64) *Record {
	s := &Record{Kind: r.Kind, Key: r.Key, Name: r.Name, Size: r.Size, Growing: growing, Thin: r.Thin, Sector: r.Sector,
		Created: r.Created, State: st, Labels: r.Labels, Decoded: r}
	if r.Origin != (blockdev.Ref{}) {
		s.Origin = r.Origin.String()
	}
	s.Decoded.Ready = st == catalog.Ready
	return s
}

// encodeSlot returns the slotSize bytes of one slot. errdefs.ErrInvalid if they are too few. A ready record has to leave room for its later changes:
// growth to whatever size, and deletion.
func encodeSlot(s *Record, generation uint64) ([]byte, error) {
	used, err := encode(s, generation)
	needs := len(used)
	if err == nil && s.State == catalog.Ready {
		later := *s
		later.State, later.Size, later.Growing = catalog.Deleting, blockdev.MaxSize, blockdev.MaxSize
		var longest []byte
		longest, err = encode(&later, math.MaxUint64)
		needs = len(longest)
	}
	if err != nil {
		return nil, fmt.Errorf("encode record of %s.%s: %w", s.Kind, s.Key, err)
	}
	if needs > slotSize {
		return nil, fmt.Errorf("%w: the record of %s.%s needs %d bytes, %d is the most", errdefs.ErrInvalid, s.Kind, s.Key, needs, slotSize)
	}
	slot := make([]byte, slotSize)
	copy(slot, used)
	return slot, nil
}

func encode(s *Record, generation uint64) ([]byte, error) {
	body, err := json.Marshal(s)
	if err != nil {
		return nil, err
	}
	return frame.Frame{Version: recordVersion, Generation: generation, Body: append(body, '\n')}.Encode(recordName), nil
}

// slot is what one slot has.
type slot struct {
	stored     *Record // nil if its checksum is wrong
	version    int     // 0 if it cannot be read
	generation uint64
	blank      bool // nothing but zeros
}

// decodeSlot is the strict inverse of encodeSlot. A slot with a wrong checksum is no error: its stored is nil. A slot with a right one that is not
// understood is.
func decodeSlot(data []byte) (slot, error) {
	if len(bytes.Trim(data, "\x00")) == 0 {
		return slot{blank: true}, nil
	}
	f, err := frame.Decode(recordName, data)
	if err != nil {
		if f, err = decodeFirst(data, f.Version); err != nil {
			return slot{version: f.Version}, nil
		}
	}
	if f.Version > recordVersion {
		return slot{}, fmt.Errorf("%w: version %d, this driver knows %d; use a newer driver", errVersion, f.Version, recordVersion)
	}
	var s Record
	decoder := json.NewDecoder(bytes.NewReader(f.Body))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&s); err != nil {
		return slot{}, fmt.Errorf("%w: %w", catalog.ErrRecord, err)
	}
	if err := s.validate(); err != nil {
		return slot{}, err
	}
	return slot{stored: &s, version: f.Version, generation: f.Generation}, nil
}

// decodeFirst is frame.Decode for a slot of version 1; version is the one that its header has.
func decodeFirst(data []byte, version int) (f frame.Frame, err error) {
	f.Version = version
	header, rest, _ := bytes.Cut(data, []byte("\n"))
	var length int
	var sum uint32
	if version != firstVersion || len(header) > frame.LongestHeader {
		return f, fmt.Errorf("%w: wrong checksum", catalog.ErrRecord)
	}
	if _, err := fmt.Sscanf(string(header)+"\n", firstHeader, &f.Version, &f.Generation, &length, &sum); err != nil {
		return f, fmt.Errorf("%w: header %q", catalog.ErrRecord, header)
	}
	if length < 0 || length > len(rest) || crc32.Checksum(rest[:length], frame.Castagnoli) != sum || f.Generation == 0 {
		return f, fmt.Errorf("%w: wrong checksum", catalog.ErrRecord)
	}
	f.Body = rest[:length]
	return f, nil
}

func (s *Record) validate() error {
	ref := blockdev.Ref{Kind: s.Kind, Key: s.Key}
	if ref.Validate() != nil {
		return fmt.Errorf("%w: reference %q", catalog.ErrRecord, ref)
	}
	if s.Size <= 0 || s.Size > blockdev.MaxSize || s.Size%blockdev.Granularity != 0 {
		return fmt.Errorf("%w: size %d", catalog.ErrRecord, s.Size)
	}
	if s.Growing != 0 && (s.Growing < s.Size || s.Growing > blockdev.MaxSize || s.Growing%blockdev.Granularity != 0) {
		return fmt.Errorf("%w: growing to %d", catalog.ErrRecord, s.Growing)
	}
	if s.State != catalog.Creating && s.State != catalog.Ready && s.State != catalog.Deleting {
		return fmt.Errorf("%w: state %q", catalog.ErrRecord, s.State)
	}
	if s.Sector != 0 && !ValidSector(s.Sector) {
		return fmt.Errorf("%w: sector %d", catalog.ErrRecord, s.Sector)
	}
	var origin blockdev.Ref
	if s.Origin != "" {
		origin = blockdev.ParseRef(s.Origin)
		if origin.Validate() != nil {
			return fmt.Errorf("%w: origin %q", catalog.ErrRecord, s.Origin)
		}
	}
	s.Decoded = blockdev.Record{Ref: ref, Name: s.Name, Size: s.Size, Thin: s.Thin, Sector: s.Sector, Origin: origin,
		Created: s.Created, Ready: s.State == catalog.Ready, Labels: s.Labels}
	return nil
}

// Position is where a record is in its file.
type Position struct {
	generation uint64 // the highest generation that may be on the disk
	newest     int    // the slot with that generation, which the next update writes last: 0 or 1
	Alone      bool   // the other slot does not have the record
}

// Create makes a record file, durably. The caller syncs the directory.
func Create(root *os.Root, path string, s *Record) (at Position, err error) {
	slot, err := encodeSlot(s, 1)
	if err != nil {
		return at, err
	}
	f, err := root.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return at, errdefs.FromErrno(err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if _, err := f.Write(append(slot, slot...)); err != nil {
		return at, errdefs.FromErrno(err)
	}
	return Position{generation: 1}, errdefs.FromErrno(f.Sync())
}

// Update writes s over both slots, durably, and returns the new position. That is right also with an error. A record that says that its object is deleted
// is the last one that is written: if the disk takes only one slot of it (Unwritable), that is enough, and the record is alone.
func Update(root *os.Root, path string, s *Record, at Position) (_ Position, err error) {
	data, err := encodeSlot(s, at.generation+1)
	if err != nil {
		return at, err
	}
	f, err := root.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return at, errdefs.FromErrno(err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	at.generation++
	at.Alone = true
	var unwritten error
	for _, slot := range [2]int{1 - at.newest, at.newest} {
		err := writeSlot(f, slot, data)
		switch {
		case err == nil:
			at.newest = slot
		case s.State == catalog.Deleting && unwritten == nil && Unwritable(err):
			unwritten = err
		case unwritten != nil && unwritten.Error() == err.Error():
			return at, err
		default:
			return at, errors.Join(unwritten, err)
		}
	}
	at.Alone = unwritten != nil
	return at, nil
}

// Unwritable reports whether an error means that this file cannot be written to, while others may: the disk failed at one of its blocks, or has no space
// for it (as a thin disk may not).
func Unwritable(err error) bool {
	return errdefs.OfDisk(err) || errors.Is(err, errdefs.ErrNoSpace)
}

func writeSlot(f *os.File, slot int, data []byte) error {
	if _, err := f.WriteAt(data, int64(slot)*slotSize); err != nil {
		return errdefs.FromErrno(err)
	}
	if err := unix.Fdatasync(int(f.Fd())); err != nil {
		return errdefs.FromErrno(fmt.Errorf("sync %s: %w", f.Name(), err))
	}
	return nil
}

// Read returns the record of a file, and its position. A slot with a wrong checksum, or that the disk cannot read, is no error if the other one is whole:
// a crash in the middle of an update leaves that, or a bit that flipped. The position then says that the record is alone. catalog.ErrRecord if the record
// is damaged; ErrEmpty if there is nothing in the file.
func Read(root *os.Root, path string, ref blockdev.Ref) (*Record, Position, error) {
	fail := func(err error) (*Record, Position, error) {
		return nil, Position{}, fmt.Errorf("%s: %w", path, err)
	}
	f, err := layout.Open(root, path)
	if err != nil {
		return fail(errdefs.FromErrno(err))
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return fail(errdefs.FromErrno(err))
	}
	if !info.Mode().IsRegular() || info.Size() > 2*slotSize {
		return fail(fmt.Errorf("%w: it is no file of at most %d bytes", catalog.ErrRecord, 2*slotSize))
	}
	var slots [2]slot
	var before []byte // the bytes of the first slot
	var unread error
	for i := range slots {
		data, err := frame.ReadPart(f, int64(i)*slotSize, slotSize)
		if errdefs.OfDisk(err) { // the other slot may have the record
			unread = errors.Join(unread, err)
			continue
		}
		if err != nil {
			return fail(errdefs.FromErrno(err))
		}
		if before != nil && bytes.Equal(data, before) { // the usual case
			slots[i] = slots[0]
			continue
		}
		before = data
		if slots[i], err = decodeSlot(data); err != nil {
			return fail(err)
		}
		if s := slots[i].stored; s != nil && s.Decoded.Ref != ref {
			return fail(fmt.Errorf("%w: it says it is of %s", catalog.ErrRecord, s.Decoded.Ref))
		}
	}
	s, at, err := choose(slots)
	if err != nil && unread != nil {
		return fail(fmt.Errorf("%w: the disk cannot read it: %w", catalog.ErrRecord, unread))
	}
	if err != nil {
		return fail(err)
	}
	return s, at, nil
}

// choose returns the record of two slots, and its position.
func choose(slots [2]slot) (*Record, Position, error) {
	newest := 0
	if slots[1].generation > slots[0].generation {
		newest = 1
	}
	best, other := slots[newest], slots[1-newest]
	at := Position{generation: best.generation, newest: newest, Alone: best.generation != other.generation || best.version != recordVersion}
	switch {
	case best.blank && other.blank:
		return nil, at, ErrEmpty
	case best.stored == nil:
		return nil, at, fmt.Errorf("%w: wrong checksum", catalog.ErrRecord)
	case best.version == firstVersion && !firstWhole(best, newest, other):
		return nil, at, fmt.Errorf("%w: one of its two slots cannot be read, and the other one may be too old", catalog.ErrRecord)
	case best.generation == other.generation && (best.version != other.version || !best.stored.equal(other.stored)):
		return nil, at, fmt.Errorf("%w: its two slots differ", catalog.ErrRecord)
	}
	return best.stored, at, nil
}

// firstWhole reports whether the newest slot of version 1 is surely the last one that was written. It is if the other slot has the generation before it,
// if it is the very first one, or if the other slot was being written anew.
func firstWhole(best slot, newest int, other slot) bool {
	begun := best.generation == 1 && other.blank
	if best.stored.State == catalog.Creating {
		return begun
	}
	before := other.stored != nil && best.generation == other.generation+1 && int(best.generation-1)%2 == newest
	return before || begun || (other.stored == nil && other.version == recordVersion)
}

func (s *Record) equal(other *Record) bool {
	if s == other {
		return true
	}
	a, errA := json.Marshal(s)
	b, errB := json.Marshal(other)
	return errA == nil && errB == nil && bytes.Equal(a, b)
}
