package volume

import (
	"fmt"
	"strings"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/luks"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
)

// Encryption says how the bytes of a volume are encrypted in its pool. The zero Encryption: they are not.
type Encryption struct {
	Scheme Scheme
	// Discards of the volume's user reach the pool, which can give that space back. Then the disk shows which blocks the volume does not use
	// (--allow-discards in cryptsetup(8)).
	Discards bool
}

// Scheme is a way to encrypt a volume.
type Scheme string

// The schemes. LUKS2 is made by cryptsetup(8) on the pool's device, with its header before the data.
const (
	NotEncrypted Scheme = ""
	LUKS2        Scheme = "luks2"
)

// This compiles only if blockdev.Pool.Erase overwrites all that luks.Format writes: without that no key opens the volume.
var _ [blockdev.HeadSize - luks.Written]struct{}

// Schemes are all schemes, without NotEncrypted.
var Schemes = []Scheme{LUKS2}

// Overhead returns how many bytes more an object of a pool has than the volume or snapshot that it keeps: those of the header. Sizes in this package are
// without it, unless said.
func (s Scheme) Overhead() int64 {
	if s == LUKS2 {
		return luks.HeaderSize
	}
	return 0
}

func (s Scheme) String() string {
	if s == NotEncrypted {
		return "none"
	}
	return string(s)
}

func (e Encryption) String() string {
	if e.Discards {
		return e.Scheme.String() + " with discards"
	}
	return e.Scheme.String()
}

// Header is what the record says about the LUKS2 header of an encrypted volume. A header is made only if State is Blank or Formatting. Format is about what
// is behind the header.
type Header struct {
	State FormatState // Blank, Formatting or Formatted
	UUID  string      // of the header, as it is or is to be; empty if State is Blank
}

func (h Header) label() string {
	if h.UUID == "" {
		return string(h.State)
	}
	return string(h.State) + ":" + h.UUID
}

func parseHeader(label string) Header {
	state, uuid, _ := strings.Cut(label, ":")
	return Header{FormatState(state), uuid}
}

// Key opens an encrypted volume.
type Key = luks.Key

// An encrypted volume was to be opened, or to grow while it is open: ErrNoKey is for a call without a key, ErrKey for one with a wrong key. Errors with them
// also wrap a sentinel of errdefs.
var (
	ErrNoKey = luks.ErrNoKey
	ErrKey   = luks.ErrKey
)

// Contents is what a volume or snapshot holds, as far as its copies have to hold the same.
type Contents struct {
	Filesystem filesystem.Type // empty: raw, or not known
	Scheme     Scheme
}

// CheckSource returns ErrInvalid if a source with some contents cannot have the volume as its copy: if both name a filesystem and these differ, or if the
// encryption differs.
func (s Spec) CheckSource(of Contents) error {
	if s.Filesystem != "" && of.Filesystem != "" && s.Filesystem != of.Filesystem {
		return fmt.Errorf("%w: source %s carries %s, so its copy %q cannot be %s", errdefs.ErrInvalid, s.Source, of.Filesystem, s.Name, s.Filesystem)
	}
	if s.Encryption.Scheme != of.Scheme {
		return fmt.Errorf("%w: source %s has encryption %s, so its copy %q cannot have encryption %s; use a class with the encryption of the source",
			errdefs.ErrInvalid, s.Source, of.Scheme, s.Name, s.Encryption.Scheme)
	}
	return nil
}

// schemeOf returns how the bytes of an object are encrypted.
func schemeOf(r blockdev.Record) Scheme { return Scheme(r.Labels[labelEncryption]) }

// sizeOf returns the size of the volume or snapshot that a record is of, in bytes, without the header.
func sizeOf(r blockdev.Record) int64 { return r.Size - schemeOf(r).Overhead() }

// contentsOf returns what an object holds, or is to hold.
func contentsOf(r blockdev.Record) Contents { return Contents{filesystemOf(r), schemeOf(r)} }
