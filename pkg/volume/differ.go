package volume

import "github.com/ashlar-csi/ashlar/pkg/blockdev"

// behindHeader returns the offset and the yield with which a pool is asked for ranges of an object (blockdev.Differ), so that the given yield gets ranges of
// the volume that it holds, after from. For an encrypted volume the pool's ranges are shifted by the header. As each block is encrypted by itself, a block
// of the volume was written, or differs, if and only if the pool's block does.
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
