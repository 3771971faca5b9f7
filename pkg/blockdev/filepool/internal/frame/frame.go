// Package frame is how file pools write text: a header line, a body of len bytes, and then anything up to the end of the place.
//
//	ashlar-record 2 gen=7 len=312 crc32c=5f3a90c1
//
// The checksum is over the header up to it, and the body. Every version from 2 on has this header: so what a newer driver wrote can be told from what is
// damaged.
package frame

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/catalog"
)

// Frame is a version, a generation (from 1 on), and text.
type Frame struct {
	Version    int
	Generation uint64
	Body       []byte
}

const (
	headerFormat = "%s %d gen=%d len=%d "
	sumFormat    = "crc32c=%08x\n"
	// LongestHeader is the length of the longest header, in bytes.
	LongestHeader = 128
)

// Castagnoli is the polynomial of the checksums.
var Castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Encode returns the header and the body; what is the first word of the header.
func (f Frame) Encode(what string) []byte {
	header := fmt.Appendf(nil, headerFormat, what, f.Version, f.Generation, len(f.Body))
	sum := crc32.Update(crc32.Checksum(header, Castagnoli), Castagnoli, f.Body)
	return append(fmt.Appendf(header, sumFormat, sum), f.Body...)
}

// Decode is the strict inverse of Encode. If the checksum is wrong, it returns the fields of the header beside the error, as far as it could read them.
func Decode(what string, data []byte) (f Frame, err error) {
	header, rest, found := bytes.Cut(data, []byte("\n"))
	if !found || len(header) > LongestHeader {
		return f, fmt.Errorf("%w: no header", catalog.ErrRecord)
	}
	var length int
	var sum uint32
	if _, err := fmt.Sscanf(string(header)+"\n", what+" %d gen=%d len=%d "+sumFormat, &f.Version, &f.Generation, &length, &sum); err != nil {
		return f, fmt.Errorf("%w: header %q", catalog.ErrRecord, header)
	}
	if length < 0 || length > len(rest) || f.Generation == 0 {
		return f, fmt.Errorf("%w: header %q", catalog.ErrRecord, header)
	}
	f.Body = rest[:length]
	// Only what Encode writes is right: no other spelling of a number is.
	if !bytes.HasPrefix(data, f.Encode(what)) {
		return f, fmt.Errorf("%w: wrong checksum", catalog.ErrRecord)
	}
	return f, nil
}

// ReadPart reads up to length bytes at an offset of a file; fewer if the file ends there.
func ReadPart(f *os.File, offset int64, length int) ([]byte, error) {
	data := make([]byte, length)
	n, err := f.ReadAt(data, offset)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return data[:n], err
}
