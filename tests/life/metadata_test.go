package life

import (
	"bytes"
	"errors"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
)

type metadataResponse interface {
	GetBlockMetadataType() csi.BlockMetadataType
	GetVolumeCapacityBytes() int64
	GetBlockMetadata() []*csi.BlockMetadata
}

// collect reads a stream of metadata to its end, and checks what is true of each.
func collect(t testing.TB, size int64, maxResults int32, receive func() (metadataResponse, error)) ([]*csi.BlockMetadata, error) {
	t.Helper()
	var all []*csi.BlockMetadata
	for messages := 0; ; messages++ {
		message, err := receive()
		if errors.Is(err, io.EOF) {
			if messages == 0 {
				t.Error("a stream without a message says nothing of the size")
			}
			return all, nil
		}
		if err != nil {
			return all, err
		}
		if maxResults > 0 && len(message.GetBlockMetadata()) > int(maxResults) {
			t.Errorf("a message has %d ranges, more than %d", len(message.GetBlockMetadata()), maxResults)
		}
		if message.GetVolumeCapacityBytes() != size || message.GetBlockMetadataType() != csi.BlockMetadataType_VARIABLE_LENGTH {
			t.Errorf("size %d, type %s", message.GetVolumeCapacityBytes(), message.GetBlockMetadataType())
		}
		for _, one := range message.GetBlockMetadata() {
			if n := len(all); one.GetSizeBytes() <= 0 || one.GetByteOffset() < 0 || one.GetByteOffset()+one.GetSizeBytes() > size ||
				(n > 0 && one.GetByteOffset() < all[n-1].GetByteOffset()+all[n-1].GetSizeBytes()) {
				t.Errorf("range %v comes after %v", one, all[max(0, n-1):])
			}
			all = append(all, one)
		}
	}
}

func (d *driver) allocated(r *csi.GetMetadataAllocatedRequest, size int64) ([]*csi.BlockMetadata, error) {
	d.t.Helper()
	stream, err := d.GetMetadataAllocated(d.t.Context(), r)
	check.OK(d.t, err)
	return collect(d.t, size, r.GetMaxResults(), func() (metadataResponse, error) { return stream.Recv() })
}

func (d *driver) delta(r *csi.GetMetadataDeltaRequest, size int64) ([]*csi.BlockMetadata, error) {
	d.t.Helper()
	stream, err := d.GetMetadataDelta(d.t.Context(), r)
	check.OK(d.t, err)
	return collect(d.t, size, r.GetMaxResults(), func() (metadataResponse, error) { return stream.Recv() })
}

// apply copies ranges of one image over another.
func apply(onto, from []byte, ranges []*csi.BlockMetadata) (bytes int64) {
	for _, one := range ranges {
		copy(onto[one.GetByteOffset():], from[one.GetByteOffset():one.GetByteOffset()+one.GetSizeBytes()])
		bytes += one.GetSizeBytes()
	}
	return bytes
}

// TestSnapshotMetadata makes a backup out of what the streams say: a full one of the
// allocated ranges, an incremental one of the delta.
func TestSnapshotMetadata(t *testing.T) {
	type pool struct{ pool, provisioning string }
	var kinds []pool
	for _, kind := range pools {
		for _, provisioning := range provisionings(kind) {
			kinds = append(kinds, pool{kind, provisioning})
		}
	}
	for _, c := range kinds {
		t.Run(c.pool+"/"+c.provisioning, func(t *testing.T) {
			d := startOn(t, c.pool)
			const size = 12 * miB
			r := co.Request("volume", block, size)
			r.Parameters = map[string]string{"provisioning": c.provisioning}
			v := d.made(r)
			target := v.running()
			empty, err := v.snapshot("empty")
			check.OK(t, err)
			put(t, target, 0, strings.Repeat("a", miB))
			put(t, target, 4*miB, strings.Repeat("b", miB))
			put(t, target, size-4096, strings.Repeat("c", 4096))
			first, err := v.snapshot("first")
			check.OK(t, err)
			put(t, target, 4*miB+100, "changed")
			put(t, target, 0, string(make([]byte, 4096))) // zeros are a change too
			put(t, target, 8*miB, strings.Repeat("d", 300<<10))
			second, err := v.snapshot("second")
			check.OK(t, err)
			image := func(s *csi.Snapshot) []byte {
				restored := d.made(co.FromSnapshot(co.Request("restored", block, size), s.GetSnapshotId()))
				target := restored.running()
				bytes, err := os.ReadFile(target)
				check.OK(t, err)
				check.OK(t, restored.down(target))
				return bytes
			}
			was, is := image(first), image(second)

			none, err := d.allocated(&csi.GetMetadataAllocatedRequest{SnapshotId: empty.GetSnapshotId()}, size)
			check.OK(t, err)
			if len(none) != 0 {
				t.Errorf("a volume that nobody wrote to has data at %v", none)
			}
			for _, maxResults := range []int32{0, 1, 2, 1 << 30} {
				full := make([]byte, size)
				ranges, err := d.allocated(&csi.GetMetadataAllocatedRequest{SnapshotId: first.GetSnapshotId(), MaxResults: maxResults}, size)
				check.OK(t, err)
				// What was preallocated and only read may count as data too (lseek(2)).
				if n := apply(full, was, ranges); n > 3*miB && c.provisioning == "thin" {
					t.Errorf("%d bytes are said to hold the 2 MiB that were written", n)
				}
				if !bytes.Equal(full, was) {
					t.Error("the allocated ranges are not all that there is")
				}
				ranges, err = d.delta(&csi.GetMetadataDeltaRequest{BaseSnapshotId: first.GetSnapshotId(), TargetSnapshotId: second.GetSnapshotId(), MaxResults: maxResults}, size)
				check.OK(t, err)
				if n := apply(full, is, ranges); n > miB {
					t.Errorf("%d bytes are said to hold the changes of 300 KiB", n)
				}
				if !bytes.Equal(full, is) {
					t.Error("the delta is not all that changed")
				}
			}

			// From an offset on: what ends after it, and no less.
			for _, offset := range []int64{0, 1, 4*miB + 4096, 5 * miB, size - 1, size} {
				for name, stream := range map[string]func(int64) ([]*csi.BlockMetadata, error){
					"allocated": func(from int64) ([]*csi.BlockMetadata, error) {
						return d.allocated(&csi.GetMetadataAllocatedRequest{SnapshotId: second.GetSnapshotId(), StartingOffset: from}, size)
					},
					"delta": func(from int64) ([]*csi.BlockMetadata, error) {
						return d.delta(&csi.GetMetadataDeltaRequest{BaseSnapshotId: first.GetSnapshotId(), TargetSnapshotId: second.GetSnapshotId(), StartingOffset: from}, size)
					},
				} {
					all, err := stream(0)
					check.OK(t, err)
					rest, err := stream(offset)
					check.OK(t, err)
					whole, part := make([]byte, size), make([]byte, size)
					apply(whole, is, all)
					apply(part, is, rest)
					if !bytes.Equal(whole[offset:], part[offset:]) {
						t.Errorf("%s from %d on: %v, of %v", name, offset, rest, all)
					}
					if len(rest) > 0 && rest[0].GetByteOffset()+rest[0].GetSizeBytes() <= offset {
						t.Errorf("%s from %d on begins with %v", name, offset, rest[0])
					}
				}
			}

			same, err := d.delta(&csi.GetMetadataDeltaRequest{BaseSnapshotId: first.GetSnapshotId(), TargetSnapshotId: first.GetSnapshotId()}, size)
			check.OK(t, err)
			if len(same) != 0 {
				t.Errorf("a snapshot differs from itself at %v", same)
			}
			other := d.made(co.Request("other", block, size))
			ofOther, err := other.snapshot("other")
			check.OK(t, err)
			for name, c := range map[string]struct {
				base, target string
				offset       int64
				maxResults   int32
				code         codes.Code
			}{
				"the newer as the base": {second.GetSnapshotId(), first.GetSnapshotId(), 0, 0, codes.InvalidArgument},
				"of another volume":     {ofOther.GetSnapshotId(), second.GetSnapshotId(), 0, 0, codes.NotFound},
				"no base":               {"", second.GetSnapshotId(), 0, 0, codes.InvalidArgument},
				"no target":             {first.GetSnapshotId(), "", 0, 0, codes.InvalidArgument},
				"a base there is not":   {"snap.default." + strings.Repeat("0", 32), second.GetSnapshotId(), 0, 0, codes.NotFound},
				"a target there is not": {first.GetSnapshotId(), "x", 0, 0, codes.NotFound},
				"a volume":              {v.ID, second.GetSnapshotId(), 0, 0, codes.NotFound},
				"a negative offset":     {first.GetSnapshotId(), second.GetSnapshotId(), -1, 0, codes.OutOfRange},
				"an offset too far":     {first.GetSnapshotId(), second.GetSnapshotId(), size + 1, 0, codes.OutOfRange},
				"a negative count":      {first.GetSnapshotId(), second.GetSnapshotId(), 0, -1, codes.InvalidArgument},
			} {
				_, err := d.delta(&csi.GetMetadataDeltaRequest{BaseSnapshotId: c.base, TargetSnapshotId: c.target, StartingOffset: c.offset, MaxResults: c.maxResults}, size)
				if status.Code(err) != c.code {
					t.Errorf("delta, %s: %v", name, err)
				}
				if c.base != first.GetSnapshotId() {
					continue
				}
				_, err = d.allocated(&csi.GetMetadataAllocatedRequest{SnapshotId: c.target, StartingOffset: c.offset, MaxResults: c.maxResults}, size)
				if status.Code(err) != c.code {
					t.Errorf("allocated, %s: %v", name, err)
				}
			}
			for _, s := range []*csi.Snapshot{empty, first, second, ofOther} {
				check.OK(t, d.deleteSnapshot(s.GetSnapshotId()))
			}
			check.OK(t, other.delete())
			check.OK(t, v.down(target))
			d.nothingLeft()
		})
	}
}
