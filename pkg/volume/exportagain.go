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

// An export is the kernel's, which forgets it with a start of the machine, or as another tool clears it; a pool may come late, or come back. So what the records say
// is looked for at each start, and again and again while the driver runs.

// taken are the names of what the exporter does not have any more, or not whole, though nobody here has begun to end it: other tools for the kernel's target clear all of it.
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

// ServeExports has the node export volumes, and exports again what its records tell of; of pools that come later, when they come. It is to be
// called before anybody is answered. What cannot be exported now, KeepExports tries again, and health says so. What was exported before the machine started ends.
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

// again is an export that is made again.
type again struct {
	Exported
	place
	device blockdev.Device
}

// batch is what is exported again in one call (Exporter.Add). It has the locks of the volumes until it is done.
type batch struct {
	all     []again
	unlocks map[string]func() // by the volumes' keys
}

// lock takes the lock of a volume, unless somebody else has it.
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

// errLater is why a volume is not exported again that somebody works on: by the record that is read meanwhile, what is about to end would be.
var errLater = fmt.Errorf("%w: something else is done to it", errdefs.ErrBusy)

// exportAgain exports what the records of pools say. The pools come with a start, or have gone and come back: there, calls for their volumes may be on their way. What cannot
// be exported, or is being worked on, KeepExports tries again; the former is logged.
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

// attachAgain attaches what the records of a pool say is exported, and ends what was exported before the machine started.
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

// recordAgain attaches what a record says is exported by one name. Of what many read the record does not say to whom: what the kernel has of it is noted.
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

// attachOrEnd is attachExport of an export that goes on. One of before the machine started ends: nothing is returned then, and nothing on a node that exports nothing.
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

// addAgain exports what is attached, in one call, and closes the devices. What is exported already the other way, with TLS or without, goes on.
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

// failedAgain notes how it stands with an export that is made again.
func (l *Local) failedAgain(ctx context.Context, at place, err error) {
	switch before := l.setFailed(at, err); {
	case err != nil && !before:
		klog.FromContext(ctx).Error(err, "Could not export a volume again; it is tried again", "volume", at.id.String(), "pool", at.pool)
	case err == nil && before:
		klog.FromContext(ctx).Info("Exported a volume again", "volume", at.id.String(), "pool", at.pool)
	}
}

// exportPause is after how long an export that failed is tried again.
const exportPause = 10 * time.Second

// KeepExports exports, until ctx ends, what could not be when the node started, and what somebody else has taken out of the kernel since; and ends what is exported and in
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
			if err := l.endUnsaid(ctx); err != nil && ctx.Err() == nil {
				klog.FromContext(ctx).V(2).Info("Could not end what is exported and in no record; trying again", "err", err.Error())
			}
		}
	}
}

// retryExports tries all of them in one call, too: perhaps none could be exported.
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

// retryExport attaches what is to be exported again by a record, the lock of whose volume the caller has: what failed, or was taken by some names; unless its end has begun meanwhile.
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
