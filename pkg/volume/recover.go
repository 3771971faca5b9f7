package volume

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
)

// recover finishes or undoes what a crash left half-done of a pool's volumes and snapshots, when the pool has opened, before anybody uses it. ErrUnavailable
// as for refuseCopy.
func (l *Local) recover(ctx context.Context, pool blockdev.Pool) error {
	if err := l.refuseCopy(pool); err != nil { // before anything in the pool is changed
		return err
	}
	if err := setMixedAside(ctx, pool); err != nil { // what follows goes by the records
		return err
	}
	if err := l.recoverPlaces(ctx, pool); err != nil { // what follows finds volumes by that
		return err
	}
	if err := l.stacks.Recover(ctx, pool); err != nil { // a look at a filesystem would wait for a suspended device
		return err
	}
	if err := l.endFreezes(ctx, pool); err != nil {
		return err
	}
	if err := l.detachOrphans(ctx, pool); err != nil {
		return err
	}
	if err := l.limitAttached(ctx, pool); err != nil { // after detachOrphans, so that only the devices that stay are left
		return err
	}
	claims, err := l.recoverVolumes(ctx, pool)
	if err != nil {
		return err
	}
	if err := l.recoverGroups(ctx, pool); err != nil {
		return err
	}
	l.mu.Lock()
	l.claims[pool.Name()] = claims
	l.mu.Unlock()
	return l.exportAgain(ctx, pool)
}

// refuseCopy returns ErrUnavailable if a pool is a copy of one that came before, or is coming just now (isCopy): somebody copied its bytes. The members of a
// group snapshot would be there twice, and to delete the group would delete both. This also holds while the first pool is away, as it may come back.
func (l *Local) refuseCopy(pool blockdev.Pool) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for name, first := range l.came {
		if name != pool.Name() && isCopy(pool, first) {
			return fmt.Errorf("%w: pool %s has the volumes of pool %s: one is a copy of the other; start the driver with one of the two (--pool)",
				errdefs.ErrUnavailable, pool.Name(), name)
		}
	}
	l.came[pool.Name()] = pool
	return nil
}

// isCopy reports whether two pools have one identity, or what they keep tells that one is a copy of the other (blockdev.Copied).
func isCopy(pool, of blockdev.Pool) bool {
	is, identified := pool.(blockdev.Identified)
	if first, ok := of.(blockdev.Identified); identified && ok && is.ID() != "" && is.ID() == first.ID() {
		return true
	}
	copied, can := pool.(blockdev.Copied)
	return can && copied.IsCopy(of)
}

// setMixedAside sets aside what a pool has under the name of something else: keys derive from names, so the name in a record tells the key. A record that is
// with the bytes, as the tags of a logical volume are, goes with them when somebody renames them; without this, whoever uses the one would be given the
// bytes of the other.
func setMixedAside(ctx context.Context, pool blockdev.Pool) error {
	shelver, can := blockdev.As[blockdev.Shelver](pool)
	if !can {
		return nil
	}
	for _, kind := range []blockdev.Kind{blockdev.Volume, blockdev.Snapshot, blockdev.Marks} {
		records, err := pool.List(ctx, kind, "", 0)
		if err != nil {
			return err
		}
		for _, r := range records {
			name := r.Name
			if kind == blockdev.Marks {
				name = strings.TrimPrefix(name, marksPrefix)
			}
			if key := KeyOf(name); key != r.Key {
				shelver.SetAside(r.Ref, fmt.Sprintf("says that it is %q, whose key is %s: somebody renamed or mixed up what the pool keeps; give each its own name back, and start the driver anew", r.Name, key))
			}
		}
	}
	return nil
}

// detachOrphans detaches the kept devices of a pool's volumes that nobody has any more. It leaves out exported volumes, those that many nodes read, and
// unfinished copies, which this node may be mirroring to.
func (l *Local) detachOrphans(ctx context.Context, pool blockdev.Pool) error {
	orphans, err := l.stacks.Orphans(ctx, pool)
	if err != nil {
		return err
	}
	records, err := pool.List(ctx, blockdev.Volume, "", 0)
	if err != nil {
		return err
	}
	for _, record := range records {
		if _, is, _ := exportOf(record); is || record.Labels[labelRead] != "" || unfinished(record) {
			delete(orphans, record.Ref)
		}
	}
	for ref, devices := range orphans {
		if l.mounted(devices) {
			continue
		}
		if err := l.detach(ctx, l.stacks.Of(pool, ref)); err != nil {
			klog.FromContext(ctx).Error(err, "could not detach a device that nothing has mounted", "pool", pool.Name(), "object", ref.String())
		}
	}
	return nil
}

// recoverVolumes deletes the ephemeral volumes of pods that are gone, and counts claims.
func (l *Local) recoverVolumes(ctx context.Context, pool blockdev.Pool) (claims int64, err error) {
	records, err := pool.List(ctx, blockdev.Volume, "", 0)
	if err != nil {
		return 0, err
	}
	for _, record := range records {
		v := fromRecord(pool.Name(), l.node, record)
		if v.Claim.Node != "" {
			claims++
		}
		if v.Ephemeral == "" {
			continue
		}
		if podGone(v.Ephemeral) {
			if err := l.remove(ctx, pool, record.Ref); err != nil {
				klog.FromContext(ctx).Error(err, "could not delete an ephemeral volume whose pod is gone", "volume", v.ID.String())
			}
		}
	}
	return claims, nil
}

// podGone reports whether the directory of a pod is gone in which an ephemeral volume was published: the kubelet unpublishes no volume of such a pod. It is
// false if all pods are gone with it, as this kubelet has another directory by now, or this process does not see that.
func podGone(target string) bool {
	_, err := os.Lstat(filepath.Dir(target))
	if !errors.Is(err, os.ErrNotExist) {
		return false
	}
	kubelet, _, is := strings.Cut(target, "/pods/")
	if is {
		_, err = os.Lstat(filepath.Join(kubelet, "pods"))
	}
	return !is || err == nil
}

// recoverGroups removes groups that were never complete. Until all pools are open it only hides them, as their other members may be in a pool that is
// missing. What is left of a group that was complete once stays.
func (l *Local) recoverGroups(ctx context.Context, come blockdev.Pool) error {
	l.arriving.Lock()
	defer l.arriving.Unlock()
	named := maps.Clone(l.arrived)
	named[come.Name()] = come
	groups, err := l.groups(ctx, slices.Collect(maps.Values(named)))
	if err != nil {
		return err
	}
	for key, members := range groups {
		l.setIncomplete(key, !complete(members) && !wasWhole(members))
		if len(named) < len(l.pools) {
			continue
		}
		if err := l.recoverGroup(ctx, named, GroupID{key}, members); err != nil {
			return err
		}
		l.setIncomplete(key, false)
	}
	l.arrived = named
	return nil
}

// recoverGroup removes what is there of a group that was never complete, and keeps any other. All pools are there.
func (l *Local) recoverGroup(ctx context.Context, pools map[string]blockdev.Pool, id GroupID, members []member) error {
	all := complete(members)
	if !all && !wasWhole(members) {
		for _, m := range members {
			if err := l.remove(ctx, pools[m.ID.Pool], m.ID.ref()); err != nil {
				return fmt.Errorf("undo the unfinished %s: %w", id, err)
			}
		}
		return nil
	}
	if !all {
		klog.FromContext(ctx).Info("A part of a group snapshot is missing; keeping the rest", "group", id.String(), "snapshots", len(members), "of", members[0].GroupSize)
	}
	if err := setWhole(ctx, func(name string) (blockdev.Pool, error) { return pools[name], nil }, members, true); err != nil { // older drivers did not record it
		klog.FromContext(ctx).Error(err, "could not note that a group snapshot is complete; the next start tries again", "group", id.String())
	}
	return nil
}

// endFreezes thaws the filesystems that this driver may have left frozen. A freeze of somebody else stays, except on volumes of other nodes: no record tells
// whose those are. What has not ended within thawPatience goes on, and is not waited for.
func (l *Local) endFreezes(ctx context.Context, pool blockdev.Pool) error {
	records, err := pool.List(ctx, blockdev.Volume, "", 0)
	if err != nil {
		return err
	}
	listed := map[blockdev.Ref]bool{}
	var thaws []thawing
	for _, record := range records {
		listed[record.Ref] = true
		if record.Labels[labelFrozen] != "" {
			thaws = append(thaws, l.thaw(ctx, pool, record.Ref))
		}
	}
	// A volume of another node may have been frozen for its home (Hold). No record here says so, and its home may not answer; so all of them are thawed.
	volumes, err := l.stacks.Volumes(ctx, pool)
	if err != nil {
		return err
	}
	for _, ref := range volumes {
		if !listed[ref] {
			thaws = append(thaws, l.thaw(ctx, pool, ref))
		}
	}
	waiting, cancel := context.WithTimeout(ctx, thawPatience)
	defer cancel()
	for _, t := range thaws {
		ended, err := t.wait(waiting)
		if err == nil && !ended {
			klog.FromContext(ctx).Info("A freeze that may have outlived its snapshot has not ended yet, as the disk or the home of the volume does not answer; it ends when that does", "pool", pool.Name(), "object", t.ref.String())
			continue
		}
		if err == nil && listed[t.ref] {
			err = setFrozen(ctx, pool, t.ref, "")
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// thawPatience is how long a start waits for freezes to end: ext4 writes its superblock for that, to a disk, or a home, that may not answer.
const thawPatience = 10 * time.Second

// thawing is the end of a freeze of a volume's filesystem, which is under way.
type thawing struct {
	ref   blockdev.Ref
	ended chan error // gets one error, or nil
}

// thaw begins to end a freeze of a volume's filesystem, if there is one.
func (l *Local) thaw(ctx context.Context, pool blockdev.Pool, ref blockdev.Ref) thawing {
	t := thawing{ref, make(chan error, 1)}
	paths := l.filesystems(ctx, pool, ref)
	go func() {
		for _, path := range paths {
			if err := filesystem.Thaw(path); err != nil {
				t.ended <- err
				return
			}
			klog.FromContext(ctx).Info("Ended a freeze that may have outlived its snapshot", "volume", ID{ref.Kind, pool.Name(), ref.Key}.String(), "path", path)
		}
		t.ended <- nil
	}()
	return t
}

// wait waits for the end, until ctx ends; false if that is first.
func (t thawing) wait(ctx context.Context) (ended bool, err error) {
	select {
	case err := <-t.ended:
		return true, err
	default:
	}
	select {
	case err := <-t.ended:
		return true, err
	case <-ctx.Done():
		return false, nil
	}
}
