package lvmpool

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lvm2"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// lvmSpace is the account of an LVM pool; guarded by pool.Mu. For linear volumes it is
//
//	available = free extents of the group - what is being taken - the reserve
//
// and for thin ones
//
//	available = (size of the thin pool - the reserve) * overprovision - promised
//
// or nothing, above the watermarks. Looking and promising is one step.
type lvmSpace struct {
	promised int64 // sum of the sizes of all objects
	pending  int64 // what is taken and no logical volume has yet; part of promised, or for a cut
	foreign  int64 // sum of the sizes of others' volumes in the thin pool
	at       time.Time

	total     int64 // of the group, or of the thin pool
	free      int64 // of the group, by the last report and our changes since
	missing   int   // physical volumes
	disagrees bool  // lvm2 and the thin pool have counted different changes: lvm2.ErrDisagree
	metaFree  int64 // of the group's metadata areas
	metaSize  int64
}

// lvmFresh is how old a report may be that answers for space or health.
const lvmFresh = 5 * time.Second

func (s *lvmSpace) read(rows []lvm2.Row, thin string) error {
	var failures []error
	number := func(r lvm2.Row, column string) int64 {
		n, err := strconv.ParseInt(r[column], 10, 64)
		if err != nil {
			failures = append(failures, fmt.Errorf("%w: lvm2 reports %s=%q", errdefs.ErrUnavailable, column, r[column]))
		}
		return n
	}
	for i, r := range rows {
		if i == 0 {
			extent := number(r, "vg_extent_size")
			s.total, s.free = number(r, "vg_extent_count")*extent, number(r, "vg_free_count")*extent
			s.missing = int(number(r, "vg_missing_pv_count"))
			s.metaFree, s.metaSize = number(r, "vg_mda_free"), number(r, "vg_mda_size")
		}
		if thin != "" && r["lv_name"] == thin {
			s.total = number(r, "lv_size")
		}
	}
	s.at = time.Now()
	return errors.Join(failures...)
}

// complete returns errdefs.ErrUnavailable if a physical volume of the group is missing.
func (s *lvmSpace) complete(group string) error {
	if s.missing == 0 {
		return nil
	}
	return fmt.Errorf("%w: %d physical volumes of group %s are missing, and nothing is changed in it until they are back or given up (vgreduce --removemissing)", errdefs.ErrUnavailable, s.missing, group)
}

// thinUse is the state of a thin pool, by the kernel (Documentation/admin-guide/device-mapper/thin-provisioning.rst, Status).
type thinUse struct {
	data, metadata float64 // percent in use
	mode           string  // rw, ro or out_of_data_space
	fault          string  // why it has failed; empty: it has not
	transaction    uint64  // the number of the last of lvm2's changes that the thin pool has noted
	device         string  // the name of its device
	held           bool    // somebody has a snapshot of its metadata
	unzeroed       bool    // it does not zero new blocks: volumes show what others held
}

// failed reports whether the thin pool takes no change of any kind. One that is only full has not failed.
func (u thinUse) failed() bool {
	return u.fault != "" || (u.mode != "rw" && u.mode != "out_of_data_space")
}

// thinUse returns the state of the thin pool. While lvm2 gives the thin pool its first volume, or takes away its last, its device has another name, or is
// not there: so if it is not found, it is looked for again when no command runs. If lvm2 left it down for us (thinPoolDown), it is activated.
// errdefs.ErrUnavailable if it is down. The caller does not have the turn.
func (p *pool) thinUse(ctx context.Context) (thinUse, error) {
	use, there, err := p.thinNow()
	if err != nil || there {
		return use, err
	}
	if err := p.lvm.Hold(ctx, func(run lvm2.Run) error {
		use, there, err = p.thinNow()
		if err == nil && !there && p.thinPoolDown {
			if err = p.activateThinPool(run); err == nil {
				use, there, err = p.thinNow()
			}
		}
		return err
	}); err != nil {
		return thinUse{}, err
	}
	if !there {
		return thinUse{}, fmt.Errorf("%w: thin pool %s is not active, as somebody took it down; if it needs no repair (any more), lvchange -ay -K %s", errdefs.ErrUnavailable, p.path(p.location.Thin), p.path(p.location.Thin))
	}
	return use, nil
}

// thinNow is thinUse without the turn; there is false if no such device is found.
func (p *pool) thinNow() (use thinUse, there bool, err error) {
	for _, name := range []string{p.device(p.location.Thin) + "-tpool", p.device(p.location.Thin)} { // the second name while it has no volume
		kind, status, err := dm.Target(name)
		var table string
		if err == nil && kind == "thin-pool" {
			_, table, err = dm.Table(name)
		}
		if errors.Is(err, unix.ENXIO) || (err == nil && kind != "thin-pool") {
			continue
		}
		if err == nil {
			use, err = parseThinUse(status)
		}
		if err != nil {
			return thinUse{}, false, fmt.Errorf("%w: thin pool %s: %w; see what dmsetup status %s and the kernel's log (dmesg) say", errdefs.ErrUnavailable, p.path(p.location.Thin), err, name)
		}
		use.unzeroed = slices.Contains(strings.Fields(table), "skip_block_zeroing")
		use.device = name
		return use, true, nil
	}
	return thinUse{}, false, nil
}

// parseThinUse reads "TRANSACTION USED/TOTAL USED/TOTAL HELD-ROOT MODE ... QUEUEING NEEDS-CHECK ...", metadata first.
func parseThinUse(status string) (thinUse, error) {
	fields := strings.Fields(status)
	switch {
	case len(fields) == 1: // Fail, Error
		return thinUse{mode: "ro", fault: fields[0]}, nil
	case len(fields) < 5:
		return thinUse{}, fmt.Errorf("the kernel says %q of it, which this driver does not understand", status)
	}
	percent := func(field string) float64 {
		used, total, _ := strings.Cut(field, "/")
		u, _ := strconv.ParseFloat(used, 64)
		t, err := strconv.ParseFloat(total, 64)
		if err != nil || t == 0 {
			return 100 // what is not known is not promised
		}
		return u * 100 / t
	}
	use := thinUse{metadata: percent(fields[1]), data: percent(fields[2]), held: fields[3] != "-", mode: fields[4]}
	var err error
	if use.transaction, err = strconv.ParseUint(fields[0], 10, 64); err != nil {
		return thinUse{}, fmt.Errorf("the kernel says %q of it, which this driver does not understand", status)
	}
	for _, field := range fields[5:] {
		if field == "needs_check" {
			use.fault = field
		}
	}
	return use, nil
}

// full returns why a thin pool takes no more, and what to do; empty if it takes more.
func (p *pool) full(use thinUse) string {
	switch {
	case use.mode == "ro" && use.fault == "" && use.metadata >= 100: // the kernel shows its mode for want of metadata as ro (pool_status in drivers/md/dm-thin.c)
		return fmt.Sprintf("thin pool %s is in mode ro, as its metadata is full; extend that (lvextend --poolmetadatasize +1G %s), and it takes changes again at once; if it does not, repair it (docs/operate/thin-pool-failed.md)", p.path(p.location.Thin), p.path(p.location.Thin))
	case use.failed():
		return fmt.Sprintf("thin pool %s is in mode %s %s; look at the kernel's log, unstage its volumes, repair it (lvconvert --repair; docs/operate/thin-pool-failed.md), and activate it with needs_check cleared (thin_check_options)", p.path(p.location.Thin), use.mode, use.fault)
	case use.mode != "rw":
		return fmt.Sprintf("thin pool %s is in mode %s; delete volumes or snapshots, or extend it (lvextend)", p.path(p.location.Thin), use.mode)
	case use.data >= p.location.DataWatermark:
		return fmt.Sprintf("%.1f%% of the data of thin pool %s is in use, the watermark is %g%%; delete volumes or snapshots, or extend it (lvextend)", use.data, p.path(p.location.Thin), p.location.DataWatermark)
	case use.metadata >= p.location.MetadataWatermark:
		return fmt.Sprintf("%.1f%% of the metadata of thin pool %s is in use, the watermark is %g%%; extend it (lvextend --poolmetadatasize)", use.metadata, p.path(p.location.Thin), p.location.MetadataWatermark)
	}
	return ""
}

// account returns the capacity; use is for thin pools. The caller holds Mu.
func (p *pool) account(use thinUse) blockdev.Capacity {
	s := p.space
	reserve := int64(float64(s.total) * p.location.ReservePercent / 100)
	c := blockdev.Capacity{Promised: s.promised, Used: s.promised, MinVolume: p.extent}
	if p.location.Thin != "" {
		c.Promised += s.foreign
		c.Used = int64(float64(s.total) * use.data / 100) // with others' thin volumes, as Promised has them
		c.Total = int64(float64(s.total-reserve) * p.location.Overprovision)
		c.Available = max(0, c.Total-c.Promised)
		if p.full(use) != "" || s.disagrees || use.unzeroed {
			c.Available = 0
		}
	} else {
		c.Available = max(0, s.free-s.pending-reserve)
		c.Total = c.Promised + c.Available
	}
	if s.missing > 0 {
		c.Available = 0
	}
	c.Available -= c.Available % p.extent
	c.MaxVolume = min(c.Available, blockdev.MaxSize-blockdev.MaxSize%p.extent)
	return c
}

func (p *pool) capacity(ctx context.Context) (blockdev.Capacity, thinUse, error) {
	var use thinUse
	if p.location.Thin != "" {
		var err error
		if use, err = p.thinUse(ctx); err != nil {
			return blockdev.Capacity{}, use, err
		}
	}
	p.Mu.Lock()
	defer p.Mu.Unlock()
	return p.account(use), use, nil
}

// ThinUse: see blockdev.ThinPool.
func (p *pool) ThinUse(ctx context.Context) (_ blockdev.ThinUse, thin bool, _ error) {
	if p.location.Thin == "" {
		return blockdev.ThinUse{}, false, nil
	}
	use, err := p.thinUse(ctx)
	return blockdev.ThinUse{Data: use.data / 100, Metadata: use.metadata / 100}, true, err
}

func (p *pool) Capacity(ctx context.Context) (blockdev.Capacity, error) {
	if err := p.refresh(ctx, lvmFresh); err != nil {
		return blockdev.Capacity{}, fmt.Errorf("capacity of pool %s: %w", p.name, err)
	}
	p.Sweep(ctx, p.remove)
	c, _, err := p.capacity(ctx)
	return c, err
}

// reserve takes size bytes as pending, before any logical volume has them. promise is called with Mu held, to promise them as well, which a cut does not.
// lvm2 is asked anew before anything is refused. errdefs.ErrNoSpace if there are not as many; errdefs.ErrUnavailable if a physical volume is missing,
// or the thin pool has failed or disagrees with lvm2; errdefs.ErrUnsupported if it does not zero new blocks any more. The caller does not have the turn.
func (p *pool) reserve(ctx context.Context, size int64, promise func()) error {
	for fresh := false; ; fresh = true {
		var use thinUse
		if p.location.Thin != "" {
			var err error
			if use, err = p.thinUse(ctx); err != nil {
				return err
			}
		}
		p.Mu.Lock()
		c := p.account(use)
		if size <= c.Available {
			p.space.pending += size
			promise()
			p.Mu.Unlock()
			return nil
		}
		refusal := p.noRoom(use, size, c.Available)
		p.Mu.Unlock()
		if fresh {
			return refusal
		}
		if err := p.refresh(ctx, 0); err != nil { // others may have freed space
			return err
		}
	}
}

// noRoom returns why size bytes cannot be taken, of which so many are available: see reserve. The caller holds Mu.
func (p *pool) noRoom(use thinUse, size, available int64) error {
	if err := p.space.complete(p.location.Group); err != nil {
		return err
	}
	reason := fmt.Sprintf("pool %s can promise %d more bytes, %d are needed; delete volumes or snapshots, or give it more room", p.name, available, size)
	if p.location.Thin != "" {
		full := p.full(use)
		switch {
		case use.unzeroed:
			return p.notZeroing()
		case p.space.disagrees:
			return fmt.Errorf("%w, thin pool %s", lvm2.ErrDisagree, p.path(p.location.Thin))
		case use.failed():
			return fmt.Errorf("%w: %s", errdefs.ErrUnavailable, full)
		case full != "":
			reason = full
		}
	}
	return fmt.Errorf("%w: %s", errdefs.ErrNoSpace, reason)
}

// unreserve takes back what is pending if nobody knows whether a logical volume has it: the next look at the account asks lvm2.
func (p *pool) unreserve(size int64) {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	p.space.pending -= size
	p.space.at = time.Time{}
}

// countAllocated notes that a logical volume has now what was pending. The caller has the turn.
func (p *pool) countAllocated(size int64) {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	p.space.pending -= size
	if p.location.Thin == "" {
		p.space.free -= size
	}
}

// countFreed notes that a logical volume was removed. The caller has the turn.
func (p *pool) countFreed(size int64) {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	if p.location.Thin == "" {
		p.space.free += size
	}
}

// Used: see blockdev.Measurer. Of an active thin volume it is what dm-thin has mapped, of a linear one its size. errdefs.ErrUnavailable for a thin volume
// that is not active.
func (p *pool) Used(_ context.Context, ref blockdev.Ref) (int64, error) {
	_, record, err := p.Lookup(ref)
	if err != nil || !record.Thin {
		return record.Size, err
	}
	used, err := mappedBy(p.device(ref.String()))
	if err != nil {
		return 0, fmt.Errorf("%w: measure %s of pool %s: %w; see what dmsetup status %s and the kernel's log (dmesg) say", errdefs.ErrUnavailable, ref, p.name, err, p.device(ref.String()))
	}
	return min(used, record.Size), nil
}

// mappedBy returns how many bytes of an active thin volume, by the name of its device, dm-thin has mapped.
func mappedBy(device string) (int64, error) {
	kind, status, err := dm.Target(device)
	if err == nil && kind != "thin" {
		err = fmt.Errorf("it is %q, no thin volume", kind)
	}
	var sectors int64 // "MAPPED HIGHEST"; "Fail" if the thin pool has failed
	if err == nil {
		_, err = fmt.Sscan(status, &sectors)
	}
	return sectors * 512, err
}
