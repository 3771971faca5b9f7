package lvmpool

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

func (p *pool) Health(ctx context.Context, ref blockdev.Ref) ([]blockdev.Problem, error) {
	_, record, err := p.Lookup(ref)
	if errors.Is(err, errdefs.ErrDataLoss) {
		return []blockdev.Problem{{Severity: blockdev.DataLoss, Reason: "RecordDamaged", Message: errdefs.Words(err)}}, nil
	}
	if err != nil {
		return nil, err
	}
	if err := p.refresh(ctx, lvmFresh); err != nil {
		if ctx.Err() != nil {
			return nil, err
		}
		return []blockdev.Problem{{Severity: blockdev.Inaccessible, Reason: "PoolUnavailable", Message: fmt.Sprintf("pool %s: %v", p.name, err)}}, nil
	}
	found := p.Find(ref)
	if found == nil {
		return nil, fmt.Errorf("%w: no %s in pool %s", errdefs.ErrNotFound, ref, p.name)
	}
	where, o := p.path(ref.String()), p.known(found)
	switch {
	case o.another:
		return []blockdev.Problem{{Severity: blockdev.DataLoss, Reason: "VolumeMissing", Message: fmt.Sprintf("another logical volume has the name %s now: somebody renamed them; give each its own name back (lvs -o lv_name,lv_uuid,lv_tags %s; lvrename), or, if it was made anew on purpose, start the driver anew", where, p.location.Group)}}, nil
	case o.missing:
		return []blockdev.Problem{{Severity: blockdev.DataLoss, Reason: "VolumeMissing", Message: fmt.Sprintf("the logical volume %s is gone; restore it from a backup, or delete the volume", where)}}, nil
	case o.size < record.Size:
		return []blockdev.Problem{{Severity: blockdev.DataLoss, Reason: "VolumeTruncated", Message: fmt.Sprintf("the logical volume %s has %d bytes, its record says %d; copy what is left, make it as long again (lvextend -L %db %s), zero that (blkdiscard -z -o %d /dev/%s) and check its filesystem, or restore it from a backup", where, o.size, record.Size, record.Size, where, o.size, where)}}, nil
	case strings.Contains(o.health, "partial"):
		return []blockdev.Problem{{Severity: blockdev.Inaccessible, Reason: "DeviceMissing", Message: fmt.Sprintf("a physical volume under %s is missing; bring the disk back, or restore the volume from a backup", where)}}, nil
	case o.health != "":
		return []blockdev.Problem{{Severity: blockdev.Inaccessible, Reason: "VolumeFailed", Message: fmt.Sprintf("lvm2 says of %s: %s; see lvs -a -o +lv_health_status,devices %s and the kernel's log (dmesg), mend its disks, and have lvm2 look again (lvchange --refresh %s)", where, o.health, p.location.Group, where)}}, nil
	}
	if p.location.Thin != "" {
		use, err := p.thinUse(ctx)
		if err != nil {
			return []blockdev.Problem{{Severity: blockdev.Inaccessible, Reason: "PoolUnavailable", Message: errdefs.Words(err)}}, nil
		}
		if use.failed() {
			return []blockdev.Problem{{Severity: blockdev.Inaccessible, Reason: "PoolFailed", Message: p.full(use)}}, nil
		}
		if use.mode != "rw" {
			return []blockdev.Problem{{Severity: blockdev.Inaccessible, Reason: "PoolFull", Message: p.full(use)}}, nil
		}
	}
	return nil, nil
}

// metadataLow is the part of a group's metadata areas below which their free space is reported. Each volume takes about 1 KiB of them.
const metadataLow = 0.05

func (p *pool) PoolHealth(ctx context.Context) []blockdev.Problem {
	if err := p.refresh(ctx, lvmFresh); err != nil {
		return []blockdev.Problem{{Severity: blockdev.Inaccessible, Reason: "PoolUnavailable", Message: fmt.Sprintf("pool %s: %v", p.name, err)}}
	}
	c, use, err := p.capacity(ctx)
	if err != nil {
		return []blockdev.Problem{{Severity: blockdev.Inaccessible, Reason: "PoolUnavailable", Message: fmt.Sprintf("pool %s: %v", p.name, err)}}
	}
	var problems []blockdev.Problem
	say := func(severity blockdev.Severity, reason, format string, args ...any) {
		problems = append(problems, blockdev.Problem{Severity: severity, Reason: reason, Message: fmt.Sprintf("pool %s: ", p.name) + fmt.Sprintf(format, args...)})
	}
	p.Mu.Lock()
	defer p.Mu.Unlock()
	if p.location.Thin != "" {
		switch full := p.full(use); {
		case use.failed():
			say(blockdev.Inaccessible, "PoolFailed", "%s", full)
		case use.mode != "rw":
			say(blockdev.Inaccessible, "PoolFull", "%s", full)
		case full != "":
			say(blockdev.Degraded, "PoolNearlyFull", "%s", full)
		}
		if use.unzeroed {
			say(blockdev.Degraded, "ThinPoolUnfit", "%s", errdefs.Words(p.notZeroing()))
		}
		if p.space.disagrees {
			say(blockdev.Degraded, "ThinPoolDisagrees", "lvm2 and thin pool %s have counted different changes, so that lvm2 makes and removes nothing; compare lvs -o transaction_id %s with dmsetup status %s, and see the runbook", p.path(p.location.Thin), p.path(p.location.Thin), use.device)
		}
		if c.Promised > c.Total {
			say(blockdev.Degraded, "PoolOvercommitted", "%d bytes are promised, and %d may be: thin pool %s has shrunk, or others have volumes in it; extend it (lvextend)", c.Promised, c.Total, p.path(p.location.Thin))
		}
	}
	if p.space.missing > 0 {
		say(blockdev.Degraded, "DeviceMissing", "%d physical volumes of group %s are missing; lvm2 changes nothing in it until they are back or given up (vgreduce --removemissing)", p.space.missing, p.location.Group)
	}
	if float64(p.space.metaFree) < float64(p.space.metaSize)*metadataLow {
		say(blockdev.Degraded, "GroupMetadataNearlyFull", "the metadata areas of group %s have %d of %d bytes left; add a physical volume with a larger one (pvcreate --metadatasize)", p.location.Group, p.space.metaFree, p.space.metaSize)
	}
	problems = append(problems, p.Damage(nil)...)
	if len(p.strays) > 0 {
		say(blockdev.Degraded, "UnknownVolume", "these are named like volumes of this driver and are not tagged as such; nothing uses them and nothing removes them: %s", strings.Join(p.strays, ", "))
	}
	if len(p.renamed) > 0 {
		say(blockdev.Degraded, "VolumeRenamed", "these have the tags of volumes of this driver under other names, so nothing uses them and nothing removes them; lvrename them back, or take the tags away: %s", strings.Join(p.renamed, ", "))
	}
	return problems
}
