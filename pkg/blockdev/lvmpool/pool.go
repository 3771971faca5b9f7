// Package lvmpool keeps volumes and snapshots as logical volumes: of a volume group, or of a thin pool in it.
package lvmpool

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/internal/fsync"
	"github.com/ashlar-csi/ashlar/internal/turns"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/catalog"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/held"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lvm2"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// pool keeps each object as a logical volume of one volume group, with the record in
// its tags (tags.go):
//
//	vol.KEY, snap.KEY    the objects
//	grow.KEY             space that is being zeroed before the volume KEY gets it
//	cut.KIND.KEY         what the copy KIND.KEY is made from: the moment of its cut
//
// A pool is either the linear volumes with our tag of a group, or those of one thin pool
// in it. All else in the group is others' and is never touched. A volume whose tags say
// creating or deleting belongs to nobody, and is removed when the pool is opened; so are
// grow.KEY and cut.KIND.KEY.
//
// What is in memory is a cache of one report, changed only after lvm2 did what it was
// told.
type pool struct {
	name     string
	location Location
	lvm      *lvm2.Shell
	lock     *os.File
	uuid     string // of the group, without dashes
	id       string // see ID
	extent   int64  // bytes
	// Guarded by the turn (lvm2.Shell):
	disks           []string // the physical volumes that are there, by the last report
	pvs             []string // the UUIDs of all physical volumes, by the last report
	messagesPending bool     // lvm2 may have written down messages to the thin pool, delivered or not: see flushPendingMessages
	probes          []string // volumes that flushPendingMessages made, and that may still be there
	thinPoolDown    bool     // lvm2 may have left the thin pool down: see activateThinPool
	mending         bool     // mend runs
	counted         uint64   // the number of the thin pool's last change, on which lvm2 and the thin pool agreed; uncounted: they may not agree (agree)
	takenBack       uint64   // what counted was before a command that failed: lvm2 may have taken back what the thin pool has made
	disagreeing     int      // how many reports, one after the other, found that the two do not agree (noteCount)

	reading chan struct{} // has one element while withMetadata has a snapshot of the thin pool's metadata

	attaching turns.Table[*logical] // one call at a time attaches an object: a snapshot may be the origin of several copies at once

	*catalog.Catalog[*logical]
	// Guarded by Mu of the catalog, or not changed after the pool was opened:
	strays  []string // volumes named like ours, without our tag
	renamed []string // volumes with our tags, and with names that are none of ours
	space   lvmSpace
}

// logical is what is known of one object.
type logical struct {
	catalog.Entry
	tags    []string // ours, as they are on the volume
	inGroup          // by the last report, and what was done since

	spare bool // grow.KEY may be there, left by a growth that was cut short
	// Of an unfinished copy:
	source string    // the cut that it is copied from; empty: the origin itself
	cut    time.Time // when the cut was made
	origin time.Time // Record.Created of the origin
}

// inGroup is what is known of an object's logical volume. Any call may bring it up to date. Guarded by pool.Mu: see pool.known.
type inGroup struct {
	size    int64  // bytes
	made    bool   // lvcreate made it, or may have made it
	missing bool   // it was made, and is not in the last report
	another bool   // another volume has its name, by the last report
	uuid    string // lvm2's, by the first report that had it; empty until then
	health  string // what is wrong with it, in lvm2's words
}

// known returns what is known of the logical volume of an object.
func (p *pool) known(o *logical) inGroup {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	return o.inGroup
}

func (p *pool) Name() string { return p.name }

func (p *pool) Granularity() int64 { return p.extent }

// path returns GROUP/VOLUME, as lvm2 takes it.
func (p *pool) path(volume string) string { return p.location.Group + "/" + volume }

// device returns the name of the device of a logical volume (libdevmapper: dashes double).
func (p *pool) device(volume string) string {
	return strings.ReplaceAll(p.location.Group, "-", "--") + "-" + strings.ReplaceAll(volume, "-", "--")
}

// Open opens the pool in the volume group or thin pool, which an operator has made, and finishes or undoes what a crash left half-done in it.
// errdefs.ErrUnavailable if it is not there.
func (l Location) Open(ctx context.Context, name string, known blockdev.Known) (_ blockdev.Pool, err error) {
	p := &pool{name: name, location: l, Catalog: catalog.New[*logical](name), reading: make(chan struct{}, 1), counted: uncounted, takenBack: uncounted}
	p.messagesPending = p.location.Thin != ""
	p.lvm = lvm2.New("lvm", func(run lvm2.Run) { p.mend(context.WithoutCancel(ctx), run) }, p.flush)
	defer func() {
		if err != nil {
			p.Close()
			err = fmt.Errorf("open pool %s at %s: %w", name, l, err)
		}
	}()
	p.loadTargets()
	rows, err := p.reportNow(ctx)
	if err != nil {
		return nil, err
	}
	p.lvm.FlushNext() // an earlier driver may have died before it flushed
	if err := p.identify(ctx, rows, known); err != nil {
		return nil, err
	}
	if err := p.exclude(); err != nil {
		return nil, err
	}
	if p.location.Thin != "" {
		if err := p.openThin(ctx, rows); err != nil {
			return nil, err
		}
	}
	p.resume(ctx, func(args ...string) ([]lvm2.Row, error) { return p.lvm.Run(ctx, args...) }, func(volume string) bool {
		at := slices.IndexFunc(rows, func(r lvm2.Row) bool { return r["lv_name"] == volume })
		if at < 0 {
			return leftover(volume) // lvm2 never wrote it down, and nobody else uses such names
		}
		_, tagged, ok := p.ours(rows[at])
		return tagged && (ok || leftover(volume))
	})
	// Again: another process may have changed the group until it let go of the lock.
	if rows, err = p.reportNow(ctx); err != nil {
		return nil, err
	}
	leftovers, err := p.load(rows)
	if err != nil {
		return nil, err
	}
	p.releaseMetadata(ctx, rows) // before a call needs it
	p.recoverUnfinished(ctx, leftovers)
	p.flushMissedMessages(ctx)
	p.releaseDevices(ctx)
	if p.location.Thin == "" {
		klog.FromContext(ctx).Info("New volumes are zeroed before they are handed out", "pool", p.name, "byWritingTo", writtenZeros(rows))
	}
	return p, nil
}

// loadTargets has the kernel load the targets of the device mapper that lvm2 needs. lvm2 only looks whether they are loaded, and runs modprobe if not
// (target_present_version in lib/activate/activate.c of 2.03.16), which is not in the driver's image, nor are the node's modules. The kernel knows where these
// are. Of what cannot be loaded, lvm2 complains when it needs it.
func (p *pool) loadTargets() {
	target := "snapshot" // cuts
	if p.location.Thin != "" {
		target = "thin-pool"
	}
	_ = dm.HasTarget(target)
}

// identify returns an error unless the group of a report can be used, and is the one that is known.
func (p *pool) identify(ctx context.Context, rows []lvm2.Row, known blockdev.Known) error {
	first := rows[0]
	p.uuid = strings.ReplaceAll(first["vg_uuid"], "-", "")
	var err error
	if p.extent, err = strconv.ParseInt(first["vg_extent_size"], 10, 64); err != nil || p.extent%blockdev.Granularity != 0 || p.extent == 0 {
		return fmt.Errorf("%w: volume group %s has extents of %q bytes; a multiple of %d is needed", errdefs.ErrUnsupported, p.location.Group, first["vg_extent_size"], blockdev.Granularity)
	}
	if over := p.longestName() - (dm.NameSize - 1); over > 0 {
		return fmt.Errorf("%w: the name of volume group %s is too long by %d bytes (a dash counts twice), as the kernel takes names of devices of %d bytes; vgrename it",
			errdefs.ErrUnsupported, p.location.Group, over, dm.NameSize-1)
	}
	if p.id = poolID(rows, p.location.Thin); p.id == "" {
		return nil
	}
	return blockdev.Expect(ctx, known, p.id)
}

// longestName returns the length of the longest name of a device that the pool, or pkg/device over it, makes.
func (p *pool) longestName() int {
	key := strings.Repeat("0", 32)
	return max(len(p.device("cut.snap."+key)+readOnlySuffix), len(p.device("vol."+key)+topSuffix)+blockdev.LayerRoom)
}

// report returns a row of the group, then one for each of its volumes and each of its physical volumes, and notes which disks are there. The caller has
// the turn.
func (p *pool) report(run lvm2.Run) ([]lvm2.Row, error) {
	rows, err := run("fullreport",
		"--configreport", "vg", "-o", "vg_uuid,vg_extent_size,vg_extent_count,vg_free_count,vg_missing_pv_count,vg_mda_free,vg_mda_size",
		"--configreport", "lv", "-o", "lv_name,lv_uuid,lv_tags,lv_size,lv_layout,pool_lv,lv_health_status,lv_attr",
		"--configreport", "pv", "-o", "pv_name,pv_uuid", "--configreport", "pvseg", "-o", "pvseg_start", "--configreport", "seg", "-o", "lv_full_name,transaction_id", p.location.Group)
	var group, volumes []lvm2.Row
	for _, r := range rows {
		if p.location.Thin != "" && r["lv_full_name"] == p.path(p.location.Thin) {
			p.noteCount(run, r["transaction_id"])
		}
		if r["vg_uuid"] != "" {
			group = append(group, r)
		} else if r["lv_name"] != "" || r["pv_name"] != "" {
			volumes = append(volumes, r)
		}
	}
	if err == nil && len(group) != 1 {
		err = fmt.Errorf("%w: volume group %s is not there", errdefs.ErrUnavailable, p.location.Group)
	}
	if err == nil {
		err = p.isGroup(volumes, group[0])
	}
	if err == nil {
		p.disks = nil
		for _, r := range volumes {
			if strings.HasPrefix(r["pv_name"], "/") && !slices.Contains(p.disks, r["pv_name"]) {
				p.disks = append(p.disks, r["pv_name"])
			}
		}
	}
	return append(group, volumes...), err
}

// isGroup returns errdefs.ErrUnavailable if a report is of another group: one of the same name, as somebody has renamed that of the pool; or one that shares
// no disk with it, as a pod made up that in its raw volume, with a UUID that it can read in sysfs (the UUIDs of disks it cannot). The caller has the turn.
func (p *pool) isGroup(disks []lvm2.Row, group lvm2.Row) error {
	if p.uuid != "" && strings.ReplaceAll(group["vg_uuid"], "-", "") != p.uuid {
		return fmt.Errorf("%w: volume group %s has the UUID %s and is another one than before; rename them back (vgrename), or start the driver anew", errdefs.ErrUnavailable, p.location.Group, group["vg_uuid"])
	}
	var pvs []string
	for _, r := range disks {
		if r["pv_uuid"] != "" {
			pvs = append(pvs, r["pv_uuid"])
		}
	}
	if len(p.pvs) > 0 && !slices.ContainsFunc(pvs, func(id string) bool { return slices.Contains(p.pvs, id) }) {
		return fmt.Errorf("%w: lvm2 takes something for volume group %s that has none of its disks; see which (pvs -o pv_name,pv_uuid,vg_name), and have lvm2 look at its own disks alone (docs/install.md); if all its disks were replaced, start the driver anew",
			errdefs.ErrUnavailable, p.location.Group)
	}
	p.pvs = pvs
	return nil
}

// mayChange returns an error unless the group is still the pool's, and lvm2 and the thin pool agree (agree). The caller has the turn.
func (p *pool) mayChange(run lvm2.Run) error {
	if err := p.stillGroup(run); err != nil {
		return err
	}
	return p.agree(run)
}

// stillGroup is isGroup for a command that puts bytes somewhere. The caller has the turn.
func (p *pool) stillGroup(run lvm2.Run) error {
	rows, err := run("vgs", "-o", "vg_uuid,pv_uuid", p.location.Group)
	if err != nil {
		return err
	}
	if len(rows) == 0 {
		return fmt.Errorf("%w: volume group %s is not there", errdefs.ErrUnavailable, p.location.Group)
	}
	return p.isGroup(rows, rows[0])
}

// poolID returns the UUID that lvm2 gave the thin pool, or without one the group; empty if the thin pool is not there.
func poolID(rows []lvm2.Row, thin string) string {
	if thin == "" {
		return rows[0]["vg_uuid"]
	}
	i := slices.IndexFunc(rows, func(r lvm2.Row) bool { return r["lv_name"] == thin })
	if i < 0 {
		return ""
	}
	return rows[i]["lv_uuid"]
}

// ID: see blockdev.Identified.
func (p *pool) ID() string { return p.id }

// IsCopy: see blockdev.Copied. vgimportclone gives a copy of a group, and its disks, UUIDs of their own, and its logical volumes keep theirs.
func (p *pool) IsCopy(of blockdev.Pool) bool {
	other, is := of.(*pool)
	if !is {
		return false
	}
	theirs := other.volumeUUIDs()
	for uuid := range p.volumeUUIDs() {
		if theirs[uuid] {
			return true
		}
	}
	return false
}

// volumeUUIDs returns the UUIDs that lvm2 gave the logical volumes of all objects.
func (p *pool) volumeUUIDs() map[string]bool {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	all := map[string]bool{}
	for _, o := range p.Objects {
		if o.uuid != "" {
			all[o.uuid] = true
		}
	}
	return all
}

// Foundations: see blockdev.Founded. They are the physical volumes that the group has now; those that are missing are left out.
func (p *pool) Foundations(ctx context.Context) (numbers []uint64, err error) {
	err = p.lvm.Hold(ctx, func(run lvm2.Run) error {
		if _, err := p.report(run); err != nil {
			return err
		}
		for _, disk := range p.disks {
			var st unix.Stat_t
			if err := unix.Stat(disk, &st); err == nil {
				numbers = append(numbers, st.Rdev)
			}
		}
		return nil
	})
	return numbers, err
}

// flush has the disks of the group write out their caches: lvm2 waits for its writes but flushes none, so a power cut would undo its changes. The errors
// do not go through errdefs.FromErrno: a disk without space is not a pool without. The caller has the turn.
func (p *pool) flush() error {
	for _, disk := range p.disks {
		if err := fsync.AndClose(os.Open(disk)); err != nil {
			return fmt.Errorf("flush %s: %w", disk, err)
		}
	}
	return nil
}

// reportNow is report for a caller without the turn.
func (p *pool) reportNow(ctx context.Context) (rows []lvm2.Row, err error) {
	err = p.lvm.Hold(ctx, func(run lvm2.Run) error {
		rows, err = p.report(run)
		return err
	})
	return rows, err
}

// lockDirectory is where pools are locked against other processes of this machine. It is lvm2's own, which containers that use lvm2 have to share anyway.
const lockDirectory = "/run/lock/lvm"

// exclude locks the pool against other processes. errdefs.ErrInUse if another one has it.
func (p *pool) exclude() error {
	if err := os.MkdirAll(lockDirectory, 0o700); err != nil {
		return errdefs.FromErrno(err)
	}
	var err error
	if p.lock, err = os.OpenFile(lockDirectory+"/ashlar."+p.uuid+"."+p.location.Thin, os.O_RDWR|os.O_CREATE, 0o600); err != nil {
		return errdefs.FromErrno(err)
	}
	if err := unix.Flock(int(p.lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		if errors.Is(err, unix.EWOULDBLOCK) {
			return fmt.Errorf("%w: another process uses it as a pool", errdefs.ErrInUse)
		}
		return errdefs.FromErrno(err)
	}
	return nil
}

// checkThin returns an error unless the thin pool is there, is one, and zeroes new blocks.
func (p *pool) checkThin(rows []lvm2.Row) error {
	i := slices.IndexFunc(rows, func(r lvm2.Row) bool { return r["lv_name"] == p.location.Thin })
	if i < 0 {
		return fmt.Errorf("%w: volume group %s has no thin pool %s; make it with lvcreate --type thin-pool", errdefs.ErrUnavailable, p.location.Group, p.location.Thin)
	}
	if !slices.Contains(strings.Split(rows[i]["lv_layout"], ","), "pool") {
		return fmt.Errorf("%w: %s is no thin pool but %s", errdefs.ErrInvalid, p.path(p.location.Thin), rows[i]["lv_layout"])
	}
	if attr := rows[i]["lv_attr"]; len(attr) < 8 || attr[7] != 'z' { // lvs(8)
		return p.notZeroing()
	}
	return nil
}

func (p *pool) notZeroing() error {
	return fmt.Errorf("%w: thin pool %s does not zero new blocks, so one volume would show what another held; lvchange --zero y %s", errdefs.ErrUnsupported, p.path(p.location.Thin), p.path(p.location.Thin))
}

func (p *pool) openThin(ctx context.Context, rows []lvm2.Row) error {
	if err := p.checkThin(rows); err != nil {
		return err
	}
	return p.lvm.Hold(ctx, p.activateThinPool)
}

// ours returns the object that a row of the report is by its name. tagged: it has tags of ours. ok is false for what belongs to others or to another pool.
func (p *pool) ours(r lvm2.Row) (ref blockdev.Ref, tagged, ok bool) {
	tagged = len(ourTags(r)) > 0
	if r["pool_lv"] != p.location.Thin || (p.location.Thin == "" && !strings.Contains(r["lv_layout"], "linear")) {
		return ref, tagged, false
	}
	ref = blockdev.ParseRef(r["lv_name"])
	return ref, tagged, ref.Validate() == nil
}

// leftover reports whether a volume has the name of what a growth or a copy leaves behind.
func leftover(volume string) bool {
	if key, ok := strings.CutPrefix(volume, "grow."); ok {
		return blockdev.ValidKey(key)
	}
	of, ok := strings.CutPrefix(volume, cutPrefix)
	return ok && blockdev.ParseRef(of).Validate() == nil
}

func splitTags(r lvm2.Row) []string { return strings.Split(r["lv_tags"], ",") }

func ourTags(r lvm2.Row) []string {
	tags := slices.DeleteFunc(splitTags(r), func(tag string) bool { return tag != tagOurs && !strings.HasPrefix(tag, tagOurs+".") })
	slices.Sort(tags)
	return tags
}

// load fills the catalog from a report, and returns what growths and cuts have left behind.
func (p *pool) load(rows []lvm2.Row) (leftovers []string, err error) {
	for _, r := range rows {
		ref, tagged, ok := p.ours(r)
		volume := r["lv_name"]
		switch {
		case !ok && p.location.Thin == "" && slices.Contains(splitTags(r), tagOurs) && leftover(volume):
			leftovers = append(leftovers, volume)
		case !ok && r["pool_lv"] == p.location.Thin && hasRecord(r):
			p.setAside(r)
		case !ok:
		case !tagged:
			p.strays = append(p.strays, p.path(volume))
		default:
			record, st, err := parseTags(ref, ourTags(r))
			if err != nil {
				p.Damaged[ref] = err
				continue
			}
			record.Thin = p.location.Thin != ""
			p.Put(&logical{Entry: catalog.Found(record, st), tags: ourTags(r), inGroup: inGroup{made: true}})
			p.space.promised += record.Size
		}
	}
	return leftovers, p.update(rows)
}

// hasRecord reports whether a volume has the tags of a record.
func hasRecord(r lvm2.Row) bool {
	return slices.ContainsFunc(splitTags(r), func(tag string) bool { return strings.HasPrefix(tag, tagName) })
}

// setAside notes a volume that was one of this pool, until somebody converted or renamed it. It is not used, and does not count as gone.
func (p *pool) setAside(r lvm2.Row) {
	volume := r["lv_name"]
	if ref := blockdev.ParseRef(volume); ref.Validate() == nil {
		p.Damaged[ref] = fmt.Errorf("%w: the layout of %s is %s now, which this pool does not use; lvconvert it back", catalog.ErrRecord, p.path(volume), r["lv_layout"])
		return
	}
	p.renamed = append(p.renamed, p.path(volume))
}

// update brings what is known of the space and of the logical volumes up to a report. The caller has the turn, or is alone.
func (p *pool) update(rows []lvm2.Row) error {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	p.space.foreign = 0
	seen := map[blockdev.Ref]bool{}
	for _, r := range rows {
		size, _ := strconv.ParseInt(r["lv_size"], 10, 64)
		ref, tagged, ok := p.ours(r)
		o := p.Objects[ref]
		another := o != nil && o.uuid != "" && o.uuid != r["lv_uuid"]
		if o != nil {
			o.another = another
		}
		if !ok || !tagged || o == nil || another {
			if p.location.Thin != "" && r["pool_lv"] == p.location.Thin {
				p.space.foreign += size
			}
			continue
		}
		seen[ref] = true
		o.size, o.health, o.uuid = size, r["lv_health_status"], r["lv_uuid"]
	}
	for ref, o := range p.Objects {
		o.missing = o.made && !seen[ref]
		o.another = o.another && o.missing
	}
	p.space.disagrees = p.disagreeing > 1 // the first time another lvm2 may have been at work
	return p.space.read(rows, p.location.Thin)
}

// refresh asks for a report, unless the last one is younger than atMost: so one report serves many reads.
func (p *pool) refresh(ctx context.Context, atMost time.Duration) error {
	recent := func() bool {
		p.Mu.Lock()
		defer p.Mu.Unlock()
		return time.Since(p.space.at) < atMost
	}
	if recent() {
		return nil
	}
	return p.lvm.Hold(ctx, func(run lvm2.Run) error {
		if recent() { // the caller before this one has asked
			return nil
		}
		rows, err := p.report(run)
		if err != nil {
			return err
		}
		return p.update(rows)
	})
}

// recoverUnfinished removes what is unfinished, and finishes growths, when the pool is opened. What fails is left for the next start: it costs space, and
// no data.
func (p *pool) recoverUnfinished(ctx context.Context, leftovers []string) {
	report := func(err error, volume string) {
		if err != nil {
			klog.FromContext(ctx).Error(err, "could not finish what was left half-done; the next start tries again", "pool", p.name, "volume", p.path(volume))
		}
	}
	if err := p.complete(ctx); err != nil {
		report(err, "*")
		return
	}
	for _, volume := range leftovers {
		if strings.HasPrefix(volume, cutPrefix) {
			report(p.endCut(ctx, volume, 0), volume)
		} else {
			report(p.drop(ctx, volume, 0), volume)
		}
	}
	p.Sweep(ctx, p.remove)
	p.Mu.Lock()
	grown := map[blockdev.Ref]int64{}
	for ref, o := range p.Objects {
		if o.State == catalog.Ready && o.size > o.Size() && ref.Kind == blockdev.Volume { // a snapshot of such a volume is as large, and does not grow
			grown[ref] = o.size
		}
	}
	p.Mu.Unlock()
	for ref, size := range grown {
		_, err := p.Expand(ctx, ref, size)
		report(err, ref.String())
	}
}

// releaseDevices has all devices of logical volumes, and those for reading, go with their last users. Those that an activation that was cut short has
// left, and that nobody uses, go at once.
func (p *pool) releaseDevices(ctx context.Context) {
	names, err := dm.Names(p.device(""))
	for _, name := range names {
		volume := strings.TrimSuffix(strings.TrimPrefix(name, p.device("")), readOnlySuffix)
		if p.Find(blockdev.ParseRef(volume)) == nil {
			continue
		}
		d, failure := p.own(name)
		if failure == nil && d != nil && !d.Deferred {
			_, failure = dm.Remove(name)
		}
		err = errors.Join(err, failure)
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "could not make sure that no device is left that nobody uses", "pool", p.name)
	}
}

// save writes a new record of o to the disk, and then into the catalog. o is ready from then on. The caller is the object's worker.
func (p *pool) save(ctx context.Context, o *logical, record blockdev.Record) error {
	tags, err := tagsOf(record, catalog.Ready)
	if err != nil {
		return err
	}
	change := changeTags(o.tags, tags)
	if len(change) > 0 {
		if p.known(o).missing { // a volume of its name is another's
			return p.gone(o, fmt.Errorf("write the record of %s in pool %s: %w", record.Ref, p.name, lvm2.ErrNoLV))
		}
		if _, err := p.lvm.Run(ctx, append(append([]string{"lvchange"}, change...), p.path(record.String()))...); err != nil {
			return p.gone(o, fmt.Errorf("write the record of %s in pool %s: %w", record.Ref, p.name, err))
		}
	}
	p.Mu.Lock()
	defer p.Mu.Unlock()
	p.Set(o, record, catalog.Ready)
	o.tags = tags
	return nil
}

// gone turns lvm2.ErrNoLV for an object whose logical volume was there into errdefs.ErrDataLoss. It returns all other errors as they are.
func (p *pool) gone(o *logical, err error) error {
	if errors.Is(err, lvm2.ErrNoLV) {
		p.Mu.Lock()
		o.missing = true
		p.Mu.Unlock()
		err = errdefs.Recast(errdefs.ErrDataLoss, err, "somebody removed it; restore it from a backup, or delete the volume")
	}
	return err
}

func (p *pool) SetLabels(ctx context.Context, ref blockdev.Ref, change func(map[string]string) error) (blockdev.Record, error) {
	o, _, err := p.Lookup(ref)
	if err != nil {
		return blockdev.Record{}, err
	}
	end, err := p.BeginChange(ctx, o)
	if err != nil {
		return blockdev.Record{}, err
	}
	defer end()
	record, err := catalog.ChangeLabels(o.Record(), change)
	if err != nil {
		return blockdev.Record{}, err
	}
	if err := p.save(ctx, o, record); err != nil {
		return blockdev.Record{}, err
	}
	return record, nil
}

func (p *pool) Delete(ctx context.Context, ref blockdev.Ref) error {
	return p.delete(ctx, ref, false)
}

func (p *pool) delete(ctx context.Context, ref blockdev.Ref, erased bool) error {
	o, err := p.BeginDelete(ctx, ref, p.attachedInUse, fmt.Sprintf("look at its tags (lvs -o lv_tags %s), and remove it by hand if nobody needs it", p.path(ref.String())))
	if o == nil || err != nil {
		return err
	}
	return p.removeAs(ctx, o, erased)
}

// remove removes an object that the caller has claimed. The logical volume and its record go in one change of lvm2's metadata. What fails is tried again
// by the next Create or Capacity, if the object was not ready.
func (p *pool) remove(ctx context.Context, o *logical) error {
	return p.removeAs(ctx, o, false)
}

// removeAs is remove. With erased, an object that is ready is erased first; an unfinished copy always is (BeginErase).
func (p *pool) removeAs(ctx context.Context, o *logical, erased bool) error {
	ref := o.Ref()
	erase, end, err := p.BeginErase(ctx, o, erased)
	defer end()
	if err == nil {
		err = p.complete(ctx)
	}
	if err == nil {
		err = p.dropCuts(ctx, ref)
	}
	if err == nil {
		err = p.dropSpare(ctx, o)
	}
	if err == nil {
		err = p.dropCut(ctx, o)
	}
	is := p.known(o)
	if err == nil && erase && is.made && !is.missing {
		err = p.Erased(ctx, ref, p.erase(ctx, o))
	}
	if err == nil && is.made { // otherwise a volume of that name is another's
		err = p.Detach(ctx, ref)
	}
	if err == nil && is.made {
		err = p.drop(ctx, ref.String(), is.size)
	}
	if err != nil {
		p.Mu.Lock()
		p.space.at = time.Time{} // it may have been removed
		p.Mu.Unlock()
		p.Release(o, false)
		return fmt.Errorf("remove %s from pool %s: %w", ref, p.name, err)
	}
	p.Mu.Lock()
	defer p.Mu.Unlock()
	p.Forget(o)
	p.space.promised -= o.Size()
	if !o.made {
		p.space.pending -= o.Size()
	}
	return nil
}

// complete returns errdefs.ErrUnavailable if a physical volume of the group is missing, or the thin pool is down (see checkThinPoolActive) or has failed.
// Without a physical volume lvm2 would still remove volumes, and throw the disk out of the group when it is back. Without a thin pool that takes changes,
// lvm2 would forget volumes that the thin pool has, and its count of changes would run ahead of the thin pool's, which then could not be repaired.
func (p *pool) complete(ctx context.Context) error {
	if err := p.refresh(ctx, lvmFresh); err != nil {
		return err
	}
	if p.location.Thin != "" {
		use, err := p.thinUse(ctx)
		if err != nil {
			return err
		}
		if use.failed() {
			return fmt.Errorf("%w: %s", errdefs.ErrUnavailable, p.full(use))
		}
	}
	p.Mu.Lock()
	defer p.Mu.Unlock()
	return p.space.complete(p.location.Group)
}

// drop removes a logical volume, if it is there; size is what that frees, in bytes. It waits a moment for a thin pool that still holds the volume.
func (p *pool) drop(ctx context.Context, volume string, size int64) error {
	err := p.lvm.Hold(ctx, func(run lvm2.Run) error {
		for began := time.Now(); ; {
			err := p.agree(run)
			if err == nil {
				err = p.changeThin(func() error { return p.removeAlone(run, volume) })
			}
			if err == nil {
				p.countFreed(size)
			}
			if !errors.Is(err, lvm2.ErrHeld) || time.Since(began) > held.Tries*held.Pause {
				return err
			}
			time.Sleep(held.Pause)
		}
	})
	if err != nil && !errors.Is(err, lvm2.ErrNoLV) {
		return fmt.Errorf("remove %s: %w", p.path(volume), err)
	}
	p.removeNodes(volume)
	return nil
}

// removeAlone has lvm2 remove a logical volume, and nothing else: with it, lvm2 would also remove what others made from it (snapshots, thin volumes that read
// from it), and turn away the disks that are missing. errdefs.ErrInUse and errdefs.ErrUnavailable then. The caller has the turn.
func (p *pool) removeAlone(run lvm2.Run, volume string) error {
	if err := p.stillGroup(run); err != nil {
		return err
	}
	rows, err := run("lvs", "-o", "lv_name,lv_uuid,lv_tags,origin,pool_lv,vg_missing_pv_count", p.location.Group)
	if err != nil {
		return err
	}
	var suspended blockdev.Ref // the origin of a cut
	for _, r := range rows {
		if missing, _ := strconv.Atoi(r["vg_missing_pv_count"]); missing > 0 {
			return (&lvmSpace{missing: missing}).complete(p.location.Group)
		}
		ofPool := p.location.Thin != "" && r["pool_lv"] == p.location.Thin // such a snapshot stays without its origin
		ourCut := leftover(r["lv_name"]) && slices.Contains(splitTags(r), tagOurs)
		if r["origin"] == volume && !ofPool && !ourCut {
			return fmt.Errorf("%w: somebody made %s from it, which would be removed with it; remove that first (lvremove %s)", errdefs.ErrInUse, p.path(r["lv_name"]), p.path(r["lv_name"]))
		}
		if r["lv_name"] == volume {
			if err := p.isStill(volume, r["lv_uuid"]); err != nil {
				return errdefs.Recast(errdefs.ErrPrecondition, err, "nothing was deleted")
			}
		}
		if r["lv_name"] == volume && ourCut {
			suspended = blockdev.ParseRef(r["origin"])
		}
	}
	return p.runHolding(run, suspended, "lvremove", "-f", p.path(volume))
}

// isStill returns errdefs.ErrDataLoss if a volume has the name of an object, and is not the one that this pool has seen by that name: somebody renamed both
// (lvrename(8)). uuid is that of the volume, or begins with it, with or without dashes.
func (p *pool) isStill(volume, uuid string) error {
	o := p.Find(blockdev.ParseRef(volume))
	if o == nil {
		return nil
	}
	want, have := strings.ReplaceAll(p.known(o).uuid, "-", ""), strings.ReplaceAll(uuid, "-", "")
	if strings.HasPrefix(have, want) {
		return nil
	}
	return fmt.Errorf("%w: %s is another logical volume than before, with the UUID %s and not %s: somebody renamed them; give each its own name back (lvs -o lv_name,lv_uuid,lv_tags %s; lvrename), or, if it was made anew on purpose, start the driver anew",
		errdefs.ErrDataLoss, p.path(volume), uuid, p.known(o).uuid, p.location.Group)
}

// removeNodes removes the nodes that lvm2 made in /dev, where no udev does, for a device that went away by itself.
func (p *pool) removeNodes(volume string) {
	for _, path := range []string{"/dev/mapper/" + p.device(volume), "/dev/" + p.path(volume)} {
		_ = os.Remove(path) // a node that stays does no harm
	}
}

func (p *pool) Close() error {
	p.lvm.Close()
	if p.lock == nil {
		return nil
	}
	return p.lock.Close()
}
