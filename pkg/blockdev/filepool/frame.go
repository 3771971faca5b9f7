package filepool

import (
	"bytes"
	"fmt"
	"hash/crc32"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/catalog"
)

// A frame is how pools write text down: a header line, a body of len bytes, and whatever is
// left of the place.
//
//	ashlar-record 2 gen=7 len=312 crc32c=5f3a90c1
//
// The checksum is over the header as far as it stands before it, and the body. Every version
// from 2 on has this header, so that what a newer driver wrote is told from what is damaged.
type frame struct {
	version    int
	generation uint64
	body       []byte
}

const (
	headerFormat = "%s %d gen=%d len=%d "
	sumFormat    = "crc32c=%08x\n"
	// longestHeader is the most bytes that a header has.
	longestHeader = 128
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func (f frame) encode(what string) []byte {
	header := fmt.Appendf(nil, headerFormat, what, f.version, f.generation, len(f.body))
	sum := crc32.Update(crc32.Checksum(header, castagnoli), castagnoli, f.body)
	return append(fmt.Appendf(header, sumFormat, sum), f.body...)
}

// decodeFrame is the strict inverse of encode. If the checksum is wrong, what the header says is
// returned beside the error, as far as it is one.
func decodeFrame(what string, data []byte) (f frame, err error) {
	header, rest, found := bytes.Cut(data, []byte("\n"))
	if !found || len(header) > longestHeader {
		return f, fmt.Errorf("%w: no header", catalog.ErrRecord)
	}
	var length int
	var sum uint32
	if _, err := fmt.Sscanf(string(header)+"\n", what+" %d gen=%d len=%d "+sumFormat, &f.version, &f.generation, &length, &sum); err != nil {
		return f, fmt.Errorf("%w: header %q", catalog.ErrRecord, header)
	}
	if length < 0 || length > len(rest) || f.generation == 0 {
		return f, fmt.Errorf("%w: header %q", catalog.ErrRecord, header)
	}
	f.body = rest[:length]
	// What is read is what would be written: no other way to write a number is right.
	if !bytes.HasPrefix(data, f.encode(what)) {
		return f, fmt.Errorf("%w: wrong checksum", catalog.ErrRecord)
	}
	return f, nil
}
