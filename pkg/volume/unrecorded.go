package volume

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/nvmet"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// A volume is exported if its record says so. An export that the kernel has and no record has is left over: its volume is gone, for instance, or the record
// was restored from a backup. No claim knows of it, so none would end it, and it keeps its device in use.

// endUnrecorded ends the exports of this node that are in no record. An export stays if it may be in a record that cannot be read, or in a pool that is not
// open; so does, until the next call, one whose volume is locked.
func (l *Local) endUnrecorded(ctx context.Context) error {
	exporter, how, err := l.exporter()
	if err != nil {
		return err
	}
	all, err := exporter.Exports(ctx)
	for _, e := range all {
		key, made := madeBy(how.Key, e)
		if !made || l.recorded(ctx, how, key, e.NQN) {
			continue
		}
		unlock, _ := how.Locks.TryLock([]string{keylock.Volume(key)}, nil)
		if unlock == nil {
			continue // until the next time
		}
		if !l.recorded(ctx, how, key, e.NQN) { // whoever had the lock may have begun, or ended, it
			err = errors.Join(err, l.removeUnrecorded(ctx, exporter, key, e.NQN))
		}
		unlock()
	}
	return err
}

// madeBy reports whether an export is this node's, whose key is given, and of which volume. Other nodes may export from the same kernel.
func madeBy(node []byte, e nvmet.Export) (key string, is bool) {
	key, _, _ = strings.Cut(strings.TrimPrefix(e.NQN, nvmet.Prefix), ":")
	return key, strings.HasSuffix(e.Host, hostProof(node, e.NQN))
}

// recorded reports whether an export of a volume, by its name nqn, is in a record, or may be: a record of the volume cannot be read, or a pool is not open.
func (l *Local) recorded(ctx context.Context, how Exporting, key, nqn string) bool {
	open := l.openPools()
	for _, pool := range open {
		record, err := pool.Get(ctx, blockdev.Ref{Kind: blockdev.Volume, Key: key})
		if errors.Is(err, errdefs.ErrNotFound) {
			continue
		}
		e, exported, unread := exportOf(record)
		r, read, unreadable := readingOf(record, how.Boot)
		_, reader := r.reader(key, nqn)
		if errors.Join(err, unread, unreadable) != nil || exported && e.nqn(key) == nqn || read && reader {
			return true
		}
	}
	return len(open) < len(l.pools)
}

// removeUnrecorded ends an export that is in no record, and detaches its volume, unless that is in use.
func (l *Local) removeUnrecorded(ctx context.Context, exporter Exporter, key, nqn string) error {
	klog.FromContext(ctx).Info("Ending an export that is in the record of no volume", "volume", key, "export", nqn)
	if err := withdrawAndRemove(ctx, exporter, nqn); err != nil { // it may be of a leg
		return err
	}
	for _, pool := range l.openPools() {
		record, err := pool.Get(ctx, blockdev.Ref{Kind: blockdev.Volume, Key: key})
		if err != nil || IsExported(record) || record.Labels[labelRead] != "" || unfinished(record) {
			continue
		}
		stack := l.stacks.Of(pool, record.Ref)
		devices, err := stack.Attached(ctx)
		if err == nil && !l.mounted(devices) {
			err = l.detach(ctx, stack)
		}
		if err != nil && !errors.Is(err, errdefs.ErrInUse) {
			return fmt.Errorf("detach volume %s, which is exported to nobody: %w", IDOf(pool.Name(), record), err)
		}
	}
	return nil
}
