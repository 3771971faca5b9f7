package volume

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// A volume may be used by another node than the one that has it. This file is how that node reads and changes the record.

// userLabels are the labels that the consumer of a volume may change, on whichever node it is: what the volume carries, and how it is used.
var userLabels = []string{labelFormat, labelHeader, labelSeparate, labelTarget, labelFlags, labelLeg}

// mostUserLabel is the most bytes of one of them, quoted. So a pool's record has room left for the labels of the home.
const mostUserLabel = 1024

// Record returns the record of a volume, as other nodes may see it. ErrNotFound for an unfinished copy.
func (l *Local) Record(ctx context.Context, id ID) (blockdev.Record, error) {
	pool, ref, err := l.object(id, blockdev.Volume)
	if err != nil {
		return blockdev.Record{}, err
	}
	record, err := pool.Get(ctx, ref)
	if err == nil && unfinished(record) {
		err = fmt.Errorf("%w: volume %s is being copied", errdefs.ErrNotFound, id)
	}
	return l.forOthers(record), err
}

// forOthers returns a record as other nodes may see it: that of a leg has the boot ID of this machine.
func (l *Local) forOthers(r blockdev.Record) blockdev.Record {
	r = shown(r)
	if how, _ := l.exporting(); r.Labels[labelReplicaOf] != "" {
		r.Labels[labelBoot] = how.Boot
	}
	return r
}

// shown returns a record without the labels that are only for the home.
func shown(r blockdev.Record) blockdev.Record {
	r.Labels = maps.Clone(r.Labels)
	delete(r.Labels, labelExport)
	delete(r.Labels, labelSealed)
	delete(r.Labels, labelRead)
	delete(r.Labels, labelMarks)
	delete(r.Labels, labelPool)
	return r
}

// SwapLabels changes userLabels of a volume for its consumer: from the values in before to those in after. A label that is in neither stays; one that is
// only in before is deleted. ErrBusy, and nothing changes, if a label has not the value of before. ErrInvalid for other labels, and for values that are
// too long.
func (l *Local) SwapLabels(ctx context.Context, id ID, before, after map[string]string) (blockdev.Record, error) {
	for _, labels := range []map[string]string{before, after} {
		for label, value := range labels {
			if !slices.Contains(userLabels, label) {
				return blockdev.Record{}, fmt.Errorf("%w: the label %q of volume %s is not for its user to change", errdefs.ErrInvalid, label, id)
			}
			if n := len(strconv.Quote(value)); n > mostUserLabel {
				return blockdev.Record{}, fmt.Errorf("%w: the label %q of volume %s would have %d bytes, %d are the most", errdefs.ErrInvalid, label, id, n, mostUserLabel)
			}
		}
	}
	pool, ref, err := l.object(id, blockdev.Volume)
	if err != nil {
		return blockdev.Record{}, err
	}
	record, err := l.changeLabels(ctx, pool, ref, func(labels map[string]string) error {
		for _, label := range userLabels {
			was, named := before[label]
			is, set := after[label]
			if !named && !set {
				continue
			}
			if labels[label] != was {
				return fmt.Errorf("%w: the label %q of volume %s was changed meanwhile", errdefs.ErrBusy, label, id)
			}
			setLabel(labels, label, is)
		}
		return nil
	})
	return l.forOthers(record), err
}
