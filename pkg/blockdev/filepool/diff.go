package filepool

import (
	"context"
	"os"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/sparse"
)

func (p *pool) Allocated(ctx context.Context, ref blockdev.Ref, from int64, yield func(blockdev.Extent) error) error {
	_, record, err := p.Lookup(ref)
	if err != nil {
		return err
	}
	f, err := p.openImage(record, os.O_RDONLY)
	if err != nil {
		return err
	}
	defer f.Close()
	return sparse.Allocated(ctx, f, record.Size, from, yield)
}

func (p *pool) Changed(ctx context.Context, base, target blockdev.Ref, from int64, yield func(blockdev.Extent) error) error {
	_, oldRecord, err := p.Lookup(base)
	if err != nil {
		return err
	}
	_, newRecord, err := p.Lookup(target)
	if err != nil {
		return err
	}
	before, err := p.openImage(oldRecord, os.O_RDONLY)
	if err != nil {
		return err
	}
	defer before.Close()
	after, err := p.openImage(newRecord, os.O_RDONLY)
	if err != nil {
		return err
	}
	defer after.Close()
	return sparse.Changed(ctx, before, after, oldRecord.Size, newRecord.Size, from, yield)
}
