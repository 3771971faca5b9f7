package volume

import "github.com/ashlar-csi/ashlar/pkg/blockdev"

// behindHeader returns from where on a pool is to be asked for ranges of what it keeps, and who is to be told of them, so that yield is told
// of ranges of the volume from an offset on. Whoever asks for ranges reads a volume that was restored, and its bytes are behind the header:
// there a byte of the volume is changed, or was written, if and only if the pool's is, as each block is encrypted by itself.
func behindHeader(s Scheme, from int64, yield func(blockdev.Extent) error) (int64, func(blockdev.Extent) error) {
	header := s.Overhead()
	if header == 0 {
		return from, yield
	}
	return from + header, func(e blockdev.Extent) error {
		start, end := max(e.Offset-header, 0), e.Offset+e.Length-header
		if end <= start {
			return nil // of the header alone
		}
		return yield(blockdev.Extent{Offset: start, Length: end - start})
	}
}
