package lvmpool

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/catalog"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lvm2"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// What an lvm2 that was cut short may have left, and how it is put right: devices that are suspended
// or have no table, and a thin pool that is down, or does not know of the last change, or knows of
// it and lvm2 does not.

// mend puts right what a command that was cut short may have left. The caller has the turn.
func (p *pool) mend(ctx context.Context, run lvm2.Run) {
	if p.lock == nil { // it is not ours yet
		return
	}
	p.messagesPending = p.location.Thin != ""
	changing := p.lvm.Dirty() // else a thin pool that is down was taken down by others
	p.resumeOwn(ctx, run)
	if p.location.Thin == "" || p.mending {
		return
	}
	p.mending = true // the commands of this may be cut short, too
	defer func() { p.mending = false }()
	var err error
	if changing { // also if it works: lvm2 takes it for down if its second device is missing, and has it down in the end
		err = p.activateThinPool(run)
	}
	use, there, failure := p.thinNow()
	err = errors.Join(err, failure)
	if err == nil && there && !use.failed() {
		err = p.flushPendingMessages(run)
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "could not make sure that the thin pool and lvm2 agree; the next change tries again", "pool", p.name, "thinPool", p.path(p.location.Thin))
	}
}

// resumeOwn is resume for the objects that are known.
func (p *pool) resumeOwn(ctx context.Context, run lvm2.Run) {
	p.resume(ctx, run, func(volume string) bool {
		return leftover(volume) || p.Find(blockdev.ParseRef(volume)) != nil // nobody else makes such leftovers
	})
}

// resume ends the suspension of devices of this pool: an lvm2 that was killed may have
// left some. A table that was loaded for them may show extents that the metadata gives to
// nobody, as nobody knows whether that was written; so each goes on as it was, and then
// lvm2 brings it to what its metadata says. Devices below them that nobody uses then are
// removed: no logical volume has them; and so are devices without a table, which have the names
// that lvm2 needs. Devices of others may be suspended because their lvm2 is at work.
func (p *pool) resume(ctx context.Context, run lvm2.Run, ours func(volume string) bool) {
	report := func(err error) {
		if err != nil {
			klog.FromContext(ctx).Error(err, "could not make sure that no device is left suspended", "pool", p.name)
		}
	}
	names, err := dm.Names(p.device(""))
	report(err)
	resumed := map[string]bool{}
	var below []string
	for _, name := range names {
		// A volume may have several: -real and -cow, of a thin pool -tpool, _tdata and _tmeta.
		volume, part, _ := strings.Cut(strings.TrimPrefix(name, p.device("")), "-")
		if p.ofThin(name) {
			volume = p.location.Thin
		} else if !ours(volume) {
			continue
		}
		d, err := p.own(name)
		reader := "-"+part == readOnlySuffix // it may just be being made
		switch {
		case err != nil || d == nil || "-"+part == topSuffix: // those of pkg/device are none of lvm2's
		case !d.Live && !reader: // it was made, and got no table
			err = p.discard(name)
		case d.Suspended:
			klog.FromContext(ctx).Info("Resuming a device that was left suspended", "pool", p.name, "device", name)
			resumed[volume] = true
			err = errors.Join(dm.Clear(name), dm.Resume(name, 0))
		case d.Loaded && !reader:
			err = dm.Clear(name) // it has a device below in it
		}
		report(err)
		if part == "real" || part == "cow" {
			below = append(below, name)
		}
	}
	for _, name := range below {
		d, err := p.own(name)
		if err == nil && d != nil && d.Opens == 0 {
			err = p.discard(name)
		}
		report(err)
	}
	for volume := range resumed {
		_, err := run("lvchange", "--refresh", p.path(volume))
		report(err)
	}
}

// ofThin reports whether a device is one of those of the thin pool.
func (p *pool) ofThin(name string) bool {
	part, ok := strings.CutPrefix(name, p.device(p.location.Thin))
	// No volume has a name with _tdata or _tmeta in it (lvm(8)).
	return ok && p.location.Thin != "" && (part == "" || part == "-tpool" || strings.HasPrefix(part, "_tdata") || strings.HasPrefix(part, "_tmeta"))
}

// discard removes a device of lvm2 that nobody uses.
func (p *pool) discard(name string) error {
	_, err := dm.Remove(name)
	_ = os.Remove("/dev/mapper/" + name) // where no udev does; of no harm if it stays
	return err
}

// activateThinPool brings the thin pool up. lvm2 takes it down and up again to give it its first volume, or
// when it takes its last: if it is cut short there, it may leave parts of it up, over which it
// would not bring it up. The caller has the turn.
func (p *pool) activateThinPool(run lvm2.Run) error {
	err := p.runSending(run, "lvchange", "-ay", p.path(p.location.Thin))
	if errors.Is(err, lvm2.ErrParts) {
		if err = p.clearParts(); err == nil {
			err = p.runSending(run, "lvchange", "-ay", p.path(p.location.Thin))
		}
	}
	p.thinPoolDown = err != nil
	return err
}

// checkThinPoolActive makes sure that the thin pool is up: with a volume, or to tell it of a removal, lvm2 would bring it
// up. But one that is down was taken down by somebody, perhaps to repair it, and is his to bring up again, unless
// it was lvm2 for us (see activateThinPool). A start does it, as after a boot, where lvm2 has no mark that it is not to be
// activated (lvchange --setactivationskip).
func (p *pool) checkThinPoolActive(ctx context.Context) error {
	if p.location.Thin == "" {
		return nil
	}
	_, err := p.thinUse(ctx)
	return err
}

// clearParts removes the devices of the thin pool that nobody uses, from the top.
func (p *pool) clearParts() error {
	names, err := dm.Names(p.device(p.location.Thin))
	if err != nil {
		return err
	}
	for again := true; again; {
		again = false
		for _, name := range names {
			if !p.ofThin(name) {
				continue
			}
			d, err := p.own(name)
			if err == nil && d != nil && d.Opens == 0 {
				err, again = p.discard(name), true
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// runSending runs a command that has lvm2 tell the thin pool what it wrote down for it before. Of a
// snapshot lvm2 does not see that the thin pool has made it, if it was cut short before it had
// noted that, and would refuse every change from then on.
func (p *pool) runSending(run lvm2.Run, args ...string) error {
	_, err := run(args...)
	if errors.Is(err, lvm2.ErrSnapshotMade) {
		if failure := p.confirmMessage(run, err.Error()); failure != nil {
			return fmt.Errorf("%w; to note that it is made: %w", err, failure)
		}
		_, err = run(args...)
	}
	return err
}

var madeDevice = regexp.MustCompile(`already contain thin device with device_id (\d+)`)

// confirmMessage notes in the thin pool that it was told what lvm2 wrote down last (set_transaction_id of
// Documentation/admin-guide/device-mapper/thin-provisioning.rst): to make the snapshot that lvm2
// complains of, if that is ours and nobody has had it.
func (p *pool) confirmMessage(run lvm2.Run, complaint string) error {
	rows, err := run("lvs", "-o", "lv_name,lv_tags,lv_layout,pool_lv,thin_id,transaction_id", p.location.Group)
	if err != nil {
		return err
	}
	use, there, err := p.thinNow()
	if err != nil || !there {
		return cmp.Or(err, fmt.Errorf("%w: the thin pool is not active", errdefs.ErrUnavailable))
	}
	if !p.behind(rows, use) {
		return nil // it was noted meanwhile; if not, lvm2 says so
	}
	device := madeDevice.FindStringSubmatch(complaint)
	if !slices.ContainsFunc(rows, func(r lvm2.Row) bool {
		_, tagged, ok := p.ours(r)
		return tagged && ok && len(device) > 1 && r["thin_id"] == device[1] && slices.Contains(splitTags(r), tagCreating)
	}) {
		return fmt.Errorf("%w: it is none that this pool was making", errdefs.ErrPrecondition)
	}
	return dm.Message(use.device, fmt.Sprintf("set_transaction_id %d %d", use.transaction, use.transaction+1))
}

// flushPendingMessages has lvm2 forget messages to the thin pool that it wrote down and delivered, if it
// was cut short before it had noted that. lvremove adds its own to such, and takes all for
// delivered: the thin pool would keep a volume of which lvm2 knows no more, and show its bytes
// in a new one that gets the same number. lvcreate does not; so a volume is made and removed.
// If it stays, the next one, or a start (creating), removes it. The caller has the turn.
func (p *pool) flushPendingMessages(run lvm2.Run) error {
	if !p.messagesPending {
		return nil
	}
	key := make([]byte, 16)
	_, _ = rand.Read(key) // it never fails
	r := blockdev.Record{Ref: blockdev.Ref{Kind: blockdev.Volume, Key: hex.EncodeToString(key)}, Name: "deliver", Size: p.extent, Created: time.Now().UTC()}
	tags, err := tagsOf(r, catalog.Creating)
	if err != nil {
		return err
	}
	args := append([]string{"lvcreate", "-n", r.String(), "-an", "-ky"}, addTags(tags)...)
	err = p.runSending(run, append(args, "-V", strconv.FormatInt(r.Size, 10)+"b", "--thinpool", p.location.Thin, p.location.Group)...)
	if errors.Is(err, errdefs.ErrNoSpace) {
		return nil // a removal is what helps
	}
	p.probes = append(p.probes, r.String()) // also with an error
	p.messagesPending = err != nil
	for err == nil && len(p.probes) > 0 { // one that was cut short may have left its own
		if _, err = run("lvremove", "-f", p.path(p.probes[0])); err == nil || errors.Is(err, lvm2.ErrNoLV) {
			p.probes, err = p.probes[1:], nil
		}
	}
	if err != nil {
		return fmt.Errorf("make sure that the thin pool was told of all removals: %w", err)
	}
	return nil
}

// flushMissedMessages has the thin pool told what lvm2 wrote down and did not tell it: to remove what lvm2 knows
// of no more. A failure is left for the next removal.
func (p *pool) flushMissedMessages(ctx context.Context) {
	if p.location.Thin == "" {
		return
	}
	err := p.lvm.Hold(ctx, func(run lvm2.Run) error {
		use, there, err := p.thinNow()
		if err != nil || !there || use.failed() {
			return err
		}
		if rows, err := run("lvs", "-o", "lv_name,transaction_id", p.location.Group); err != nil || !p.behind(rows, use) {
			return err
		}
		return p.flushPendingMessages(run)
	})
	if err != nil {
		klog.FromContext(ctx).Error(err, "could not make sure that the thin pool has no volume that nobody knows of; the next removal tries again", "pool", p.name, "thinPool", p.path(p.location.Thin))
	}
}

// behind reports whether lvm2 has written down a change that the thin pool has not noted.
func (p *pool) behind(rows []lvm2.Row, use thinUse) bool {
	next := strconv.FormatUint(use.transaction+1, 10)
	return slices.ContainsFunc(rows, func(r lvm2.Row) bool { return r["lv_name"] == p.location.Thin && r["transaction_id"] == next })
}
