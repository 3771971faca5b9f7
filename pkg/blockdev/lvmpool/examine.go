package lvmpool

import (
	"context"
	"errors"
	"maps"
	"os/exec"
	"regexp"
	"slices"
	"strconv"

	"github.com/ashlar-csi/ashlar/internal/command"
	"github.com/ashlar-csi/ashlar/internal/machine"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lvm2"
)

// versionPattern matches the version in what lvm2 prints.
var versionPattern = regexp.MustCompile(`\bv?(\d+\.\d+(\.\d+)?)\b`)

// Examine: see blockdev.Examiner. An LVM pool needs lvm2, targets of the device mapper, and the volume group.
func (l Location) Examine(ctx context.Context, report blockdev.Report) {
	if l.examinePrograms(ctx, report) && l.examineTargets(ctx, report) {
		l.examineScan(ctx, report)
		l.examineGroup(ctx, report)
	}
}

// examineScan reports whether lvm2 can be kept from the devices of volumes (lvm2.Filters): a pod that has a raw volume can write a physical volume into it, and lvm2 takes that for one
// of whatever group it names.
func (l Location) examineScan(ctx context.Context, report blockdev.Report) {
	filters, err := lvm2.FindFilters(ctx)
	switch {
	case err != nil:
		report.Warning("%v", err)
	case filters.Free == "":
		report.Warning("lvm.conf uses both devices/global_filter and devices/filter, so the driver can add none of its own; make sure that they leave out the devices of volumes (of loop, dm-crypt and NVMe over TCP), "+
			"or take one of them out: a pod could make up a volume group in a raw volume, also one of the name of %s", l.Group)
	default:
		report.OK("lvm2 leaves out the devices of volumes when the driver runs it; see that the node's own lvm2 looks at its own disks alone (docs/install.md)")
	}
}

// examinePrograms reports on lvm2 and its tools; false if lvm2 is not there.
func (l Location) examinePrograms(ctx context.Context, report blockdev.Report) bool {
	stdout, _, err := command.Run(ctx, "lvm", "version")
	if errors.Is(err, exec.ErrNotFound) {
		report.Failure("lvm2 is not there; apt-get install lvm2")
		return false
	}
	version := versionPattern.FindString(stdout)
	report.OK("lvm2 %s", version)
	if l.Thin != "" {
		if _, _, err := command.Run(ctx, "thin_check", "-V"); errors.Is(err, exec.ErrNotFound) {
			report.Failure("thin_check is not there, and lvm2 activates no thin pool without it; apt-get install thin-provisioning-tools")
		} else {
			report.OK("thin-provisioning-tools")
		}
	}
	return true
}

// examineTargets reports on targets of the device mapper; false if there is no device mapper.
func (l Location) examineTargets(ctx context.Context, report blockdev.Report) bool {
	if _, err := dm.Targets(); err != nil {
		report.Failure("device mapper: %v", err)
		return false
	}
	needed := map[string]string{"linear": "dm-mod", "snapshot-origin": "dm-snapshot"}
	if l.Thin != "" {
		needed = map[string]string{"linear": "dm-mod", "thin-pool": "dm-thin-pool"}
	}
	for _, target := range slices.Sorted(maps.Keys(needed)) {
		if err := dm.HasTarget(target); err != nil { // this has the kernel load its module
			report.Failure("device mapper target %s: %v; modprobe %s, or install its module", target, err, needed[target])
		} else if targets, err := dm.Targets(); err != nil {
			report.Failure("device mapper: %v", err)
		} else {
			report.OK("device mapper target %s %s", target, targets[target])
		}
	}
	return true
}

func (l Location) examineGroup(ctx context.Context, report blockdev.Report) {
	survey, err := l.survey(ctx)
	switch {
	case err != nil:
		report.Failure("%s: %v", l, err)
		return
	case survey.problem != "":
		report.Failure("%s", survey.problem)
	case survey.missing > 0:
		report.Warning("%d physical volumes are missing; lvm2 changes nothing in the group until they are back", survey.missing)
	}
	if l.Thin != "" {
		report.OK("thin pool of %s in a group of %s; %s are promised to %d volumes and snapshots of this driver (overprovision=%g, dataWatermark=%g, metadataWatermark=%g)",
			machine.Size(survey.thinSize), machine.Size(survey.size), machine.Size(survey.promised), survey.volumes, l.Overprovision, l.DataWatermark, l.MetadataWatermark)
		return
	}
	report.OK("%s of %s are free, in extents of %s; %s are promised to %d volumes and snapshots of this driver (reservePercent=%g)",
		machine.Size(survey.free), machine.Size(survey.size), machine.Size(survey.extent), machine.Size(survey.promised), survey.volumes, l.ReservePercent)
	for _, device := range survey.written {
		report.OK("zeros are written to %s, block by block, before a volume on it is handed out: it has no command that guarantees them", device)
	}
}

// Foundations: see blockdev.Founded.
func (l Location) Foundations(ctx context.Context) ([]uint64, error) {
	p := &pool{location: l}
	p.lvm = lvm2.New("lvm", func(lvm2.Run) {}, nil) // it changes nothing, so there is nothing to flush
	defer p.lvm.Close()
	return p.Foundations(ctx)
}

// groupSurvey is what an LVM pool would find, without opening it. All sizes are in bytes.
type groupSurvey struct {
	size, free int64 // of the volume group
	extent     int64
	missing    int   // physical volumes
	volumes    int   // with the driver's tag
	promised   int64 // the sum of their sizes
	thinSize   int64
	// written are the physical volumes to which the kernel writes zeros block by block; the others have a command that guarantees them (write zeroes, or
	// discards that do).
	written []string
	problem string // why the pool would not open; empty if it would
}

// survey looks at the place of an LVM pool. It changes nothing.
func (l Location) survey(ctx context.Context) (groupSurvey, error) {
	p := &pool{location: l}
	p.lvm = lvm2.New("lvm", func(lvm2.Run) {}, nil) // it changes nothing, so there is nothing to flush
	defer p.lvm.Close()
	rows, err := p.reportNow(ctx)
	if err != nil {
		return groupSurvey{}, err
	}
	if err := p.space.read(rows, ""); err != nil {
		return groupSurvey{}, err
	}
	s := groupSurvey{size: p.space.total, free: p.space.free, missing: p.space.missing}
	if p.location.Thin != "" {
		if err := p.checkThin(rows); err != nil {
			s.problem = err.Error()
		}
	}
	s.extent, _ = strconv.ParseInt(rows[0]["vg_extent_size"], 10, 64)
	s.written = writtenZeros(rows)
	for _, r := range rows[1:] {
		size, _ := strconv.ParseInt(r["lv_size"], 10, 64)
		if _, tagged, ok := p.ours(r); tagged && ok {
			s.volumes, s.promised = s.volumes+1, s.promised+size
		}
		if r["lv_name"] == p.location.Thin {
			s.thinSize = size
		}
	}
	return s, nil
}
