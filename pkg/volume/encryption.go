package volume

import (
	"fmt"
	"strings"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/luks"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
)

// Encryption says how the bytes of a volume are kept in its pool; zero: as they are.
type Encryption struct {
	Scheme Scheme
	// Discards are passed on to the pool, which so learns what the volume does not use.
	Discards bool
}

// Scheme is a way to encrypt.
type Scheme string

// The schemes: LUKS2 is what cryptsetup(8) makes, with a header before the bytes, on the pool's device.
const (
	NotEncrypted Scheme = ""
	LUKS2        Scheme = "luks2"
)

// All that opens a volume is in what its pool erases.
var _ [blockdev.HeadSize - luks.Written]struct{}

// Schemes are all that there are.
var Schemes = []Scheme{LUKS2}

// Overhead is how many bytes what a pool keeps of a volume, and of its snapshots and copies, is larger than the volume by: the header is
// before its bytes. Everybody above a pool has the volume's size.
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

// Header is what the record says about the header of an encrypted volume, as Format does of what is behind it. Only the header of a
// volume that is Blank, or whose header is being Formatting, is ever written anew.
type Header struct {
	State FormatState // Blank, Formatting or Formatted
	UUID  string      // that the header has, or is to have; of Formatting and Formatted
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

// Key is what opens an encrypted volume.
type Key = luks.Key

// ErrNoKey and ErrKey: an encrypted volume was to be opened, or to grow while it is open, without a key, or with a wrong one.
var (
	ErrNoKey = luks.ErrNoKey
	ErrKey   = luks.ErrKey
)

// Contents is what an object of a pool holds, as far as its copies have to hold the same.
type Contents struct {
	Filesystem filesystem.Type // empty: raw, or not known
	Scheme     Scheme
}

// CheckSource returns ErrInvalid if the volume cannot be a copy of what holds some contents: a copy holds what its source does.
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

// schemeOf is how the bytes of an object are kept.
func schemeOf(r blockdev.Record) Scheme { return Scheme(r.Labels[labelEncryption]) }

// sizeOf is the size of the volume, or of the snapshot, that an object of a pool is.
func sizeOf(r blockdev.Record) int64 { return r.Size - schemeOf(r).Overhead() }

// contentsOf is what an object carries, or is to carry.
func contentsOf(r blockdev.Record) Contents { return Contents{filesystemOf(r), schemeOf(r)} }
