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

// What an lvm2 that was cut short may leave, and how it is repaired: devices that are suspended or have no table; a thin pool that is down; and a change
// that either lvm2 or the thin pool has noted, and the other has not.

// mend repairs what a command that was cut short may have left. The caller has the turn.
func (p *pool) mend(ctx context.Context, run lvm2.Run) {
	if p.lock == nil { // the pool is not locked yet, and may be another's
		return
	}
	p.messagesPending = p.location.Thin != ""
	changing := p.lvm.Dirty() // if lvm2 changed nothing, others took the thin pool down
	p.resumeOwn(ctx, run)
	if p.location.Thin == "" || p.mending {
		return
	}
	p.mending = true // its own commands may be cut short, too
	defer func() { p.mending = false }()
	var err error
	// Also if it works: if its second device is missing, lvm2 takes it for down, and takes it down in the end.
	if changing {
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

// resumeOwn is resume for the objects in the catalog.
func (p *pool) resumeOwn(ctx context.Context, run lvm2.Run) {
	p.resume(ctx, run, func(volume string) bool {
		return leftover(volume) || p.Find(blockdev.ParseRef(volume)) != nil // nobody else uses the names of leftovers
	})
}

// resume resumes the devices of this pool that an lvm2 that was killed has left suspended; ours tells by the name of a volume whether it is this pool's. A
// table that is loaded for one of them may show extents that the metadata gives to nobody, as nobody knows whether that was written: so it is dropped, the
// device goes on as it was, and then lvm2 brings it to its metadata. Removed are devices below that nobody uses then, as no logical volume has them, and
// devices without a table, as lvm2 needs their names. Devices of others are left alone. The caller has the turn, or is alone.
//
// An lvm2 has the lock of the group while it has a device suspended. So all of this is done with that lock: what is suspended then is nobody's any more, not
// even that of an administrator's lvm2, who may be moving a volume of this pool (pvmove(8)).
func (p *pool) resume(ctx context.Context, run lvm2.Run, ours func(volume string) bool) {
	report := func(err error) {
		if err != nil {
			klog.FromContext(ctx).Error(err, "could not make sure that no device is left suspended", "pool", p.name)
		}
	}
	waiting, cancel := context.WithTimeout(ctx, longestLocked)
	defer cancel()
	release, err := p.lockGroup(waiting)
	if err != nil {
		report(err)
		return
	}
	resumed := p.resumeLocked(ctx, ours, report)
	release()
	for volume := range resumed {
		_, err := run("lvchange", "--refresh", p.path(volume))
		report(err)
	}
}

// longestLocked is how long resume waits for another lvm2, which has the group locked for moments only.
const longestLocked = time.Minute

// resumeLocked does the part of resume that needs the lock of the group, and returns the volumes with devices that were resumed.
func (p *pool) resumeLocked(ctx context.Context, ours func(volume string) bool, report func(error)) (resumed map[string]bool) {
	names, err := dm.Names(p.device(""))
	report(err)
	resumed = map[string]bool{}
	var below []string
	for _, name := range names {
		// A volume may have several devices: -real and -cow, of a thin pool -tpool, _tdata and _tmeta.
		volume, part, _ := strings.Cut(strings.TrimPrefix(name, p.device("")), "-")
		if p.ofThin(name) {
			volume = p.location.Thin
		} else if !ours(volume) {
			continue
		}
		d, err := p.own(name)
		reader := "-"+part == readOnlySuffix // the one for reading may be being made just now
		switch {
		case err != nil || d == nil || "-"+part == topSuffix: // tops are not lvm2's, but those of pkg/device
		case !d.Live && !reader: // a crash came before it had a table
			err = p.discard(name)
		case d.Suspended:
			klog.FromContext(ctx).Info("Resuming a device that was left suspended", "pool", p.name, "device", name)
			resumed[volume] = true
			err = errors.Join(dm.Clear(name), dm.Resume(name, 0))
		case d.Loaded && !reader:
			err = dm.Clear(name) // that table may hold a device below
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
	return resumed
}

// ofThin reports whether a device, by its name, is one of the thin pool's own.
func (p *pool) ofThin(name string) bool {
	part, ok := strings.CutPrefix(name, p.device(p.location.Thin))
	// No volume has a name with _tdata or _tmeta in it (lvm(8)).
	return ok && p.location.Thin != "" && (part == "" || part == "-tpool" || strings.HasPrefix(part, "_tdata") || strings.HasPrefix(part, "_tmeta"))
}

// discard removes a device of lvm2 that nobody uses.
func (p *pool) discard(name string) error {
	_, err := dm.Remove(name)
	_ = os.Remove("/dev/mapper/" + name) // where no udev does; a node that stays does no harm
	return err
}

// activateThinPool has lvm2 activate the thin pool. lvm2 takes a thin pool down and up again to give it its first volume, or to take away its last. If it
// is cut short there, parts of the thin pool may be up, with which lvm2 would not bring it up: these are removed first (clearParts). The caller has the
// turn.
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

// checkThinPoolActive returns errdefs.ErrUnavailable if there is a thin pool and it is down. lvm2 would bring it up, to activate a volume, or to send it a
// removal. But somebody took it down, perhaps to repair it, and it is for him to bring it up again, unless lvm2 left it down for us (see
// activateThinPool). A start of the driver activates it, as a boot does, unless it is marked not to be (lvchange --setactivationskip).
func (p *pool) checkThinPoolActive(ctx context.Context) error {
	if p.location.Thin == "" {
		return nil
	}
	_, err := p.thinUse(ctx)
	return err
}

// clearParts removes the devices of the thin pool that nobody uses, from the top down.
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

// runSending runs a command that has lvm2 send the thin pool the messages that it wrote down before. If lvm2 was cut short after the thin pool had made a
// snapshot, and before lvm2 had noted that, it would refuse every change from then on: then confirmMessage notes it, and the command runs again. The
// caller has the turn.
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

// confirmMessage notes in the thin pool that the last change that lvm2 wrote down is done (set_transaction_id of
// Documentation/admin-guide/device-mapper/thin-provisioning.rst). That change is the snapshot in lvm2's complaint: errdefs.ErrPrecondition unless it is
// ours and unfinished, so that nobody has had it. The caller has the turn.
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
		return nil // it is noted already; if it is not, lvm2 complains again
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

// flushPendingMessages has lvm2 send, or drop, the messages to the thin pool that an lvm2 that was cut short wrote down (messagesPending): they may be
// delivered or not. lvremove adds its own message to those, and takes all for delivered: then the thin pool would keep a volume that lvm2 does not know
// any more, and show its bytes in a new one that gets the same number. lvcreate does not do that: so a small volume is made, and removed again (probes).
// If that stays, the next call removes it, or a start, as it is creating. The caller has the turn.
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
		return nil // only a removal helps then
	}
	p.probes = append(p.probes, r.String()) // it may be there also after an error
	p.messagesPending = err != nil
	for err == nil && len(p.probes) > 0 { // those of earlier calls, too
		if _, err = run("lvremove", "-f", p.path(p.probes[0])); err == nil || errors.Is(err, lvm2.ErrNoLV) {
			p.probes, err = p.probes[1:], nil
		}
	}
	if err != nil {
		return fmt.Errorf("make sure that the thin pool was told of all removals: %w", err)
	}
	return nil
}

// flushMissedMessages has lvm2 send the thin pool what it wrote down and did not send: removals of volumes that lvm2 does not know any more. It is called
// when the pool is opened. A failure is left for the next removal.
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

// uncounted is no number of a change.
const uncounted = ^uint64(0)

// changeThin calls do, which makes or removes a volume, and notes up to which change of the thin pool the two agree then. The caller has the turn, and has called
// agree.
func (p *pool) changeThin(do func() error) error {
	if p.location.Thin == "" {
		return do()
	}
	before := p.counted
	err := do()
	if lvm2.Refused(err) {
		return err
	}
	p.counted, p.takenBack = uncounted, uncounted
	if err != nil {
		p.takenBack = before
	} else if use, there, failure := p.thinNow(); failure == nil && there {
		p.counted = use.transaction
	}
	return err
}

// agree makes sure, before a change of a thin pool, that lvm2 and the thin pool have counted the same changes. If lvm2 has counted one more, a message may be pending:
// flushPendingMessages sends it. If the thin pool has, lvm2 takes the next removal for made, and sends no message (_thin_pool_node_send_messages in
// device_mapper/libdm-deptree.c of 2.03.16). That is so after lvm2 took back a snapshot that the thin pool has made (lib/metadata/lv_manip.c): if the last command
// failed, the thin pool's count is set back, and the probe of flushPendingMessages removes that snapshot. lvm2.ErrDisagree in all other cases. The caller has
// the turn.
func (p *pool) agree(run lvm2.Run) error {
	if p.location.Thin == "" {
		return nil
	}
	use, there, err := p.thinNow()
	if err != nil || !there || (!p.messagesPending && use.transaction == p.counted) {
		return err
	}
	counted, err := p.transaction(run)
	switch {
	case err != nil:
		return err
	case counted == use.transaction+1:
		p.messagesPending = true
	case counted == p.takenBack && use.transaction == counted+1:
		if err := dm.Message(use.device, fmt.Sprintf("set_transaction_id %d %d", use.transaction, counted)); err != nil {
			return err
		}
		p.messagesPending = true
	case counted != use.transaction:
		return fmt.Errorf("%w: lvm2 has counted %d changes of thin pool %s, the thin pool %d", lvm2.ErrDisagree, counted, p.path(p.location.Thin), use.transaction)
	}
	if err := p.flushPendingMessages(run); err != nil {
		return err
	}
	if use, there, err = p.thinNow(); err == nil && there && !p.messagesPending {
		p.counted = use.transaction
	}
	return err
}

// transaction returns how many changes of the thin pool lvm2 has counted.
func (p *pool) transaction(run lvm2.Run) (uint64, error) {
	rows, err := run("lvs", "-o", "transaction_id", p.path(p.location.Thin))
	if err != nil {
		return 0, err
	}
	if len(rows) != 1 {
		return 0, fmt.Errorf("%w: lvm2 reports %d lines of thin pool %s", errdefs.ErrUnavailable, len(rows), p.path(p.location.Thin))
	}
	counted, err := strconv.ParseUint(rows[0]["transaction_id"], 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%w: lvm2 reports transaction_id=%q of thin pool %s", errdefs.ErrUnavailable, rows[0]["transaction_id"], p.path(p.location.Thin))
	}
	return counted, nil
}

// noteCount notes whether lvm2, which has counted so many changes by a report, agrees with the thin pool. If they do not a second time, when no other lvm2 can be
// at work any more, it tries to make them agree. A thin pool that is full keeps messages pending. The caller has the turn.
func (p *pool) noteCount(run lvm2.Run, counted string) {
	if p.lock == nil || p.mending {
		return
	}
	use, there, err := p.thinNow()
	switch {
	case err != nil || !there || p.full(use) != "":
	case counted == strconv.FormatUint(use.transaction, 10):
		p.disagreeing = 0
	default:
		if p.disagreeing++; p.disagreeing > 1 && p.agree(run) == nil {
			p.disagreeing = 0
		}
	}
}

// behind reports whether lvm2 has written down a change that the thin pool has not noted.
func (p *pool) behind(rows []lvm2.Row, use thinUse) bool {
	next := strconv.FormatUint(use.transaction+1, 10)
	return slices.ContainsFunc(rows, func(r lvm2.Row) bool { return r["lv_name"] == p.location.Thin && r["transaction_id"] == next })
}
