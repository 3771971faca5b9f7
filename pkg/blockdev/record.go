package blockdev

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// A record file has two slots of slotSize bytes. Each holds a header line and the
// record as one line of JSON, so that it can be read with cat; the rest is zeros.
//
//	ashlar-record 1 gen=7 len=312 crc32c=5f3a90c1
//	{"kind":"vol", ...}
//
// The slot with the higher generation and a right checksum is the record. A change
// is written over the other slot and synced: the blocks are there already, so it is
// one write and one flush of the disk (a new file, its rename and the folder's sync
// cost twenty times that), and a torn write leaves the old record whole.
const (
	slotSize      = 8192
	recordVersion = 1
	headerFormat  = "ashlar-record %d gen=%d len=%d crc32c=%08x\n"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// errRecord is the cause of every ErrDataLoss about a record.
var (
	errRecord  = fmt.Errorf("%w: damaged record", ErrDataLoss)
	errVersion = fmt.Errorf("%w: record of another version", errRecord)
	errEmpty   = fmt.Errorf("%w: empty record", errRecord)
)

// stored is a Record as the file has it.
type stored struct {
	Kind    Kind              `json:"kind"`
	Key     string            `json:"key"`
	Name    string            `json:"name"`
	Size    int64             `json:"size"`
	Growing int64             `json:"growing,omitempty"` // the size being grown to
	Thin    bool              `json:"thin,omitempty"`
	Origin  string            `json:"origin,omitempty"`
	Created time.Time         `json:"created"`
	State   state             `json:"state"`
	Labels  map[string]string `json:"labels,omitempty"`
	decoded Record
}

type state string

const (
	creating state = "creating"
	ready    state = "ready"
	deleting state = "deleting"
)

func newStored(r Record, st state, growing int64) *stored {
	s := &stored{Kind: r.Kind, Key: r.Key, Name: r.Name, Size: r.Size, Growing: growing, Thin: r.Thin,
		Created: r.Created, State: st, Labels: r.Labels, decoded: r}
	if r.Origin != (Ref{}) {
		s.Origin = r.Origin.String()
	}
	s.decoded.Ready = st == ready
	return s
}

// encodeSlot returns the slotSize bytes of one slot.
func encodeSlot(s *stored, generation uint64) ([]byte, error) {
	body, err := json.Marshal(s)
	if err != nil {
		return nil, fmt.Errorf("encode record of %s.%s: %w", s.Kind, s.Key, err)
	}
	body = append(body, '\n')
	slot := make([]byte, slotSize)
	n := copy(slot, fmt.Sprintf(headerFormat, recordVersion, generation, len(body), crc32.Checksum(body, castagnoli)))
	if n+len(body) > slotSize {
		return nil, fmt.Errorf("%w: the record of %s.%s needs %d bytes, %d is the most", ErrInvalid, s.Kind, s.Key, n+len(body), slotSize)
	}
	copy(slot[n:], body)
	return slot, nil
}

// decodeSlot is the strict inverse of encodeSlot. A slot of zeros is no record and
// no error: generation 0.
func decodeSlot(slot []byte) (*stored, uint64, error) {
	if len(bytes.Trim(slot, "\x00")) == 0 {
		return nil, 0, nil
	}
	header, rest, found := bytes.Cut(slot, []byte("\n"))
	if !found || len(header) > 128 {
		return nil, 0, fmt.Errorf("%w: no header", errRecord)
	}
	var version, length int
	var generation uint64
	var sum uint32
	// The version first: what comes after it, only that version knows.
	if _, err := fmt.Sscanf(string(header), "ashlar-record %d ", &version); err == nil && version != recordVersion {
		return nil, 0, fmt.Errorf("%w: version %d, this driver knows %d", errVersion, version, recordVersion)
	}
	if _, err := fmt.Sscanf(string(header)+"\n", headerFormat, &version, &generation, &length, &sum); err != nil {
		return nil, 0, fmt.Errorf("%w: header %q", errRecord, header)
	}
	if length < 0 || length > len(rest) || crc32.Checksum(rest[:length], castagnoli) != sum || generation == 0 {
		return nil, 0, fmt.Errorf("%w: wrong checksum", errRecord)
	}
	var s stored
	decoder := json.NewDecoder(bytes.NewReader(rest[:length]))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&s); err != nil {
		return nil, 0, fmt.Errorf("%w: %w", errRecord, err)
	}
	if err := s.validate(); err != nil {
		return nil, 0, err
	}
	return &s, generation, nil
}

func (s *stored) validate() error {
	ref := Ref{s.Kind, s.Key}
	if ref.validate() != nil {
		return fmt.Errorf("%w: reference %q", errRecord, ref)
	}
	if s.Size <= 0 || s.Size > MaxSize || s.Size%Granularity != 0 {
		return fmt.Errorf("%w: size %d", errRecord, s.Size)
	}
	if s.Growing != 0 && (s.Growing < s.Size || s.Growing > MaxSize || s.Growing%Granularity != 0) {
		return fmt.Errorf("%w: growing to %d", errRecord, s.Growing)
	}
	if s.State != creating && s.State != ready && s.State != deleting {
		return fmt.Errorf("%w: state %q", errRecord, s.State)
	}
	var origin Ref
	if s.Origin != "" {
		origin = parseRef(s.Origin)
		if origin.validate() != nil {
			return fmt.Errorf("%w: origin %q", errRecord, s.Origin)
		}
	}
	s.decoded = Record{Ref: ref, Name: s.Name, Size: s.Size, Thin: s.Thin, Origin: origin,
		Created: s.Created, Ready: s.State == ready, Labels: s.Labels}
	return nil
}

// createRecord makes a record file durably; the caller syncs the folder.
func createRecord(root *os.Root, path string, s *stored) (generation uint64, err error) {
	slot, err := encodeSlot(s, 1)
	if err != nil {
		return 0, err
	}
	f, err := root.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return 0, systemError(err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if _, err := f.Write(append(slot, make([]byte, slotSize)...)); err != nil {
		return 0, systemError(err)
	}
	return 1, systemError(f.Sync())
}

// updateRecord writes s over the older slot, durably, and returns the new generation.
func updateRecord(root *os.Root, path string, s *stored, generation uint64) (_ uint64, err error) {
	generation++
	slot, err := encodeSlot(s, generation)
	if err != nil {
		return generation - 1, err
	}
	f, err := root.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return generation - 1, systemError(err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if _, err := f.WriteAt(slot, int64((generation-1)%2)*slotSize); err != nil {
		return generation - 1, systemError(err)
	}
	if err := unix.Fdatasync(int(f.Fd())); err != nil {
		return generation - 1, systemError(fmt.Errorf("sync %s: %w", path, err))
	}
	return generation, nil
}

// readRecord returns the newest whole record of a file. One damaged slot beside a
// whole one is what a crash in the middle of an update leaves, and is no error.
func readRecord(root *os.Root, path string) (*stored, uint64, error) {
	f, err := root.Open(path)
	if err != nil {
		return nil, 0, systemError(err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, 2*slotSize+1))
	if err != nil {
		return nil, 0, systemError(err)
	}
	if len(data) > 2*slotSize {
		return nil, 0, fmt.Errorf("%w: %s is longer than %d bytes", errRecord, path, 2*slotSize)
	}
	var best *stored
	var generation uint64
	var problem error
	for start := 0; start < len(data); start += slotSize {
		s, g, err := decodeSlot(data[start:min(start+slotSize, len(data))])
		if errors.Is(err, errVersion) {
			return nil, 0, fmt.Errorf("%s: %w", path, err) // newer than the other slot, whatever that says
		}
		if err != nil {
			problem = err
		} else if g > generation {
			best, generation = s, g
		}
	}
	if best == nil {
		if problem == nil {
			problem = errEmpty
		}
		return nil, 0, fmt.Errorf("%s: %w", path, problem)
	}
	return best, generation, nil
}

// systemError gives a system call's error its place in the list of errors.go.
func systemError(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return fmt.Errorf("%w: %w", ErrNoSpace, err)
	case errors.Is(err, unix.EFBIG):
		return fmt.Errorf("%w: %w", ErrOutOfRange, err)
	case errors.Is(err, unix.EROFS), errors.Is(err, unix.ENODEV), errors.Is(err, unix.ESTALE),
		errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE), errors.Is(err, unix.ENOMEM):
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	return err
}
