package volume

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/nvmet"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// The kernel has the exports. It loses them when the machine starts, or when another tool clears its target. A pool may open late, or go and come back. So
// the exports are compared with the records at each start, and every exportPause while the driver runs.

// taken returns the names of the exports that this process has made and not begun to end, and that the kernel lacks or has only in part: other tools for
// the target clear all of it. Nil if the kernel cannot be asked, which is logged.
func (l *Local) taken(ctx context.Context) map[ID][]string {
	l.exports.mu.Lock()
	given := map[ID]map[string]string{}
	for id, nqns := range l.exports.given {
		given[id] = maps.Clone(nqns)
	}
	l.exports.mu.Unlock()
	if len(given) == 0 {
		return nil
	}
	exporter, _, err := l.exporter()
	var have []nvmet.Export
	if err == nil {
		have, err = exporter.Exports(ctx)
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "Could not find out whether all volumes that other nodes use are exported")
		return nil
	}
	whole := map[string]bool{}
	for _, e := range have {
		whole[e.NQN] = e.Device != "" && e.Host != ""
	}
	taken := map[ID][]string{}
	for id, nqns := range given {
		for nqn := range nqns {
			if !whole[nqn] {
				taken[id] = append(taken[id], nqn)
			}
		}
	}
	return taken
}

// ServeExports sets how the node exports volumes, and makes the exports of all records again: of the pools that are open now, and of others when they
// open. It has to be called before the node answers any call. Exports of before the machine started end. KeepExports tries again what fails; until then
// the health of the volume says so.
func (l *Local) ServeExports(ctx context.Context, how Exporting) {
	l.exports.mu.Lock()
	l.exports.how = &how
	l.exports.mu.Unlock()
	l.arriving.Lock() // recover looks after it has put a pool there
	arrived := make([]blockdev.Pool, 0, len(l.arrived))
	for _, pool := range l.arrived {
		arrived = append(arrived, pool)
	}
	l.arriving.Unlock()
	if err := l.exportAgain(ctx, arrived...); err != nil {
		klog.FromContext(ctx).Error(err, "Could not look for volumes to export again")
	}
}

// again is an export that is about to be made again.
type again struct {
	Exported
	place
	device blockdev.Device
}

// batch collects the exports that one Exporter.Add makes again. It holds the locks of their volumes until done.
type batch struct {
	all     []again
	unlocks map[string]func() // by the volumes' keys
}

// lock takes the lock of a volume until done. False if somebody else holds it.
func (b *batch) lock(how Exporting, id ID) bool {
	if b.unlocks[id.Key] != nil {
		return true
	}
	unlock, _ := how.Locks.TryLock([]string{keylock.Volume(id.Key)}, nil)
	if unlock == nil {
		return false
	}
	if b.unlocks == nil {
		b.unlocks = map[string]func(){}
	}
	b.unlocks[id.Key] = unlock
	return true
}

func (b *batch) done() {
	for _, unlock := range b.unlocks {
		unlock()
	}
}

// errLater is why a volume whose lock somebody else holds is not exported again now: its record, as it is read now, may name an export that is about to
// end.
var errLater = fmt.Errorf("%w: something else is done to it", errdefs.ErrBusy)

// exportAgain makes the exports of all records of some pools again, in one Exporter.Add. It takes each volume's lock, as calls for a pool that has come
// back may be under way. KeepExports tries again what has failed, which is logged, and volumes whose lock is held.
func (l *Local) exportAgain(ctx context.Context, pools ...blockdev.Pool) (err error) {
	how, is := l.exporting()
	if !is {
		return nil
	}
	l.exports.starting.Lock()
	defer l.exports.starting.Unlock()
	var b batch
	defer b.done()
	for _, pool := range pools {
		err = errors.Join(err, l.attachAgain(ctx, &b, how, pool))
	}
	return errors.Join(err, l.addAgain(ctx, b.all))
}

// attachAgain attaches, for b, the volumes of a pool that are exported by their records. Exports of before the machine started end. It logs failures.
func (l *Local) attachAgain(ctx context.Context, b *batch, how Exporting, pool blockdev.Pool) error {
	records, err := pool.List(ctx, blockdev.Volume, "", 0)
	if err != nil {
		return err
	}
	for _, record := range records {
		if !IsExported(record) && record.Labels[labelRead] == "" {
			continue
		}
		at := place{IDOf(pool.Name(), record), pool.Name()}
		if !b.lock(how, at.id) {
			l.setFailed(at, errLater)
			continue
		}
		record, err := pool.Get(ctx, record.Ref) // as it is now
		if err == nil {
			err = l.recordAgain(ctx, b, how, pool, record)
		}
		if err != nil {
			l.failedAgain(ctx, at, err)
		}
	}
	return nil
}

// recordAgain attaches, for b, the volume that a record says is exported to one consumer. The record of a volume that many read does not name them, so the
// kernel's exports are noted.
func (l *Local) recordAgain(ctx context.Context, b *batch, how Exporting, pool blockdev.Pool, record blockdev.Record) error {
	e, is, err := exportOf(record)
	if err != nil {
		return err
	}
	if !is {
		return l.noteReaders(ctx, pool, record)
	}
	one := again{place: place{IDOf(pool.Name(), record), pool.Name()}}
	if one.Exported, one.device, err = l.attachOrEnd(ctx, how, pool, record, e); one.NQN != "" {
		b.all = append(b.all, one)
	}
	return err
}

// attachOrEnd is attachExport for an export that goes on. An export of before the machine started is ended, and nothing is returned; nor is anything on a
// node that exports nothing.
func (l *Local) attachOrEnd(ctx context.Context, how Exporting, pool blockdev.Pool, record blockdev.Record, e export) (Exported, blockdev.Device, error) {
	if !how.earlier(e.boot) {
		if how.Open == nil { // health says so
			return Exported{}, blockdev.Device{}, nil
		}
		return l.attachExport(ctx, pool, record, e)
	}
	klog.FromContext(ctx).Info("This machine has started anew, and may have lost what was written and not flushed; so who used a volume from elsewhere gets errors, and has to stage it again",
		"pool", pool.Name(), "volume", record.Ref.String(), "consumer", e.Node)
	return Exported{}, blockdev.Device{}, l.endExport(ctx, pool, record, e)
}

// addAgain exports the attached devices in one call, and closes them. An export that is there with TLS instead of without, or the reverse, stays.
func (l *Local) addAgain(ctx context.Context, all []again) (err error) {
	if len(all) == 0 {
		return nil
	}
	defer func() {
		for i := range all {
			err = errors.Join(err, all[i].device.Close())
		}
	}()
	exporter, _, err := l.exporter()
	if err != nil { // it was there a moment ago
		return err
	}
	add := make([]nvmet.Export, len(all))
	for i, one := range all {
		add[i] = one.export(one.device.Path)
	}
	together, failures := exporter.Add(ctx, add...), map[place]error{}
	for i, one := range all {
		var failure error
		if together != nil { // of some of them
			failure = exporter.Add(ctx, add[i])
		}
		if errors.Is(failure, nvmet.ErrOtherwise) {
			failure = nil
		}
		if failure == nil {
			l.setGiven(one.id, one.NQN, one.Host)
		}
		failures[one.place] = errors.Join(failures[one.place], failure)
	}
	for at, failure := range failures {
		l.failedAgain(ctx, at, failure)
	}
	return nil
}

// failedAgain notes and logs the outcome of an export that was made again: the first failure, and the success after it.
func (l *Local) failedAgain(ctx context.Context, at place, err error) {
	switch before := l.setFailed(at, err); {
	case err != nil && !before:
		klog.FromContext(ctx).Error(err, "Could not export a volume again; it is tried again", "volume", at.id.String(), "pool", at.pool)
	case err == nil && before:
		klog.FromContext(ctx).Info("Exported a volume again", "volume", at.id.String(), "pool", at.pool)
	}
}

// exportPause is the time between two passes of KeepExports.
const exportPause = 10 * time.Second

// KeepExports, until ctx ends, makes the exports again that have failed, or that somebody else has removed from the kernel, and ends exports that are in
// no record.
func (l *Local) KeepExports(ctx context.Context) {
	ticks := time.NewTicker(exportPause)
	defer ticks.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticks.C:
			l.retryExports(ctx)
			if err := l.endUnrecorded(ctx); err != nil && ctx.Err() == nil {
				klog.FromContext(ctx).V(2).Info("Could not end what is exported and in no record; trying again", "err", err.Error())
			}
		}
	}
}

// retryExports makes exports again in one Exporter.Add, as at a start: perhaps none could be made then.
func (l *Local) retryExports(ctx context.Context) {
	taken := map[place][]string{}
	for id, nqns := range l.taken(ctx) {
		taken[place{id, l.placeOf(id)}] = nqns
	}
	l.exports.mu.Lock()
	for at := range l.exports.failed {
		if _, is := taken[at]; !is {
			taken[at] = nil
		}
	}
	l.exports.mu.Unlock()
	how, _ := l.exporting()
	var b batch
	defer b.done()
	for at, nqns := range taken {
		if !b.lock(how, at.id) {
			continue // until the next time
		}
		if err := l.retryExport(ctx, &b, how, at, nqns); err != nil {
			l.failedAgain(ctx, at, err)
		}
	}
	if err := l.addAgain(ctx, b.all); err != nil {
		klog.FromContext(ctx).Error(err, "Could not export volumes again; they are tried again")
	}
}

// retryExport attaches, for b, what a record says is exported: an export that has failed, or the ones of these names, which the kernel has lost. It does
// nothing if the export has begun to end meanwhile. The caller holds the lock of the volume.
func (l *Local) retryExport(ctx context.Context, b *batch, how Exporting, at place, taken []string) error {
	given := l.givenOf(at.id)
	maps.DeleteFunc(given, func(nqn, _ string) bool { return !slices.Contains(taken, nqn) })
	if len(given) == 0 && l.failure(at) == nil {
		return nil
	}
	names := slices.Sorted(maps.Keys(given))
	if len(given) > 0 {
		klog.FromContext(ctx).Info("The kernel does not export a volume any more that other nodes use, and this driver has not ended that; exporting it again", "volume", at.id.String(),
			"exports", names)
	}
	pool, record, err := l.recordAt(ctx, at)
	switch {
	case errors.Is(err, errdefs.ErrNotFound), err == nil && !IsExported(record) && record.Labels[labelRead] == "":
		l.ending(at, names...)
		return nil
	case err != nil:
		return nil // until its pool answers
	case len(given) > 0 && !IsExported(record):
		return l.readAgain(ctx, b, pool, record, given)
	}
	return l.recordAgain(ctx, b, how, pool, record)
}
