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

// A volume may be used by another node than that which has it. All that this node needs of its record it then reads, and changes, here.

// userLabels are those that who uses a volume may change, on whatever node that is: what the volume carries, and how it is used.
var userLabels = []string{labelFormat, labelHeader, labelSeparate, labelTarget, labelFlags, labelLeg}

// mostUserLabel is how long each of them may be, in bytes, quoted: of what a pool keeps of a record they leave a part for the home's own.
const mostUserLabel = 1024

// Record is that of a volume, as other nodes may see it.
func (l *Local) Record(ctx context.Context, id ID) (blockdev.Record, error) {
	pool, ref, err := l.object(id, blockdev.Volume)
	if err != nil {
		return blockdev.Record{}, err
	}
	record, err := pool.Get(ctx, ref)
	if err == nil && unfinished(record) {
		err = fmt.Errorf("%w: volume %s is being copied", errdefs.ErrNotFound, id)
	}
	return l.told(record), err
}

// told is shown, and of a leg also in which start of this machine it is.
func (l *Local) told(r blockdev.Record) blockdev.Record {
	r = shown(r)
	if how, _ := l.exporting(); r.Labels[labelReplicaOf] != "" {
		r.Labels[labelBoot] = how.Boot
	}
	return r
}

// shown is a record without what no other node has to know.
func shown(r blockdev.Record) blockdev.Record {
	r.Labels = maps.Clone(r.Labels)
	delete(r.Labels, labelExport)
	delete(r.Labels, labelSealed)
	delete(r.Labels, labelRead)
	delete(r.Labels, labelMarks)
	delete(r.Labels, labelPool)
	return r
}

// SwapLabels changes labels of a volume's record for the node that uses it: from what is in before to what is in after; a label that is in
// neither stays, and one that is in before alone is taken away. ErrBusy, and nothing changes, if one of them is not as in before; ErrInvalid for
// those that are not its user's to change.
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
	return l.told(record), err
}
