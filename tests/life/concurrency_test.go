package life

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
)

// atOnce runs n calls at the same moment and returns what they ended with.
func atOnce(n int, call func(i int) error) []error {
	errs := make([]error, n)
	begin := make(chan struct{})
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() {
			<-begin
			errs[i] = call(i)
		})
	}
	close(begin)
	all.Wait()
	return errs
}

// served makes sure that of calls at once at least one succeeded, and that the others
// did too or were told to try again.
func served(t testing.TB, errs []error) {
	t.Helper()
	succeeded := 0
	for _, err := range errs {
		switch status.Code(err) {
		case codes.OK:
			succeeded++
		case codes.Aborted:
		default:
			t.Errorf("one of the calls at once: %v", err)
		}
	}
	if succeeded == 0 {
		t.Errorf("none of %d calls at once succeeded: %v", len(errs), errs[0])
	}
}

// TestCallsAtOnce makes each call of a life 16 times at once (32 for create).
func TestCallsAtOnce(t *testing.T) {
	for _, kind := range []string{"ext4", "xfs", block} {
		t.Run(kind, func(t *testing.T) {
			d := start(t, drivertest.Options{})
			v := d.volume(drivertest.VolumeID("volume"), "volume", co.Capability(kind, co.MultiWriter))
			check.OK(t, os.MkdirAll(v.Staging, 0o700))
			target := v.Target("pod")
			served(t, atOnce(32, func(int) error {
				made, err := d.create(co.Request("volume", kind, smallest[kind]))
				if err == nil && made.ID != v.ID {
					err = fmt.Errorf("made %s, not %s", made.ID, v.ID)
				}
				return err
			}))
			if files := d.inPool(); len(files) != 2 {
				t.Errorf("32 calls with one name made %v", files)
			}
			many := func(call func() error) {
				t.Helper()
				served(t, atOnce(16, func(int) error { return call() }))
			}
			claim := func() error { // v.claim keeps the context, which is empty
				_, err := d.ControllerPublishVolume(t.Context(), &csi.ControllerPublishVolumeRequest{VolumeId: v.ID, NodeId: drivertest.Node, VolumeCapability: v.Capability})
				return err
			}
			many(claim)
			many(v.stage)
			if loops := drivertest.LoopsOver(v.image()); len(loops) != 1 {
				t.Errorf("16 stages at once made the devices %v", loops)
			}
			staged := v.Staging
			if kind == block {
				staged += "/device"
			}
			many(func() error { return v.publish(target, false) })
			for _, path := range []string{staged, target} {
				if n := mountsAt(t, path); n != 1 {
					t.Errorf("%d mounts at %s", n, path)
				}
			}
			write(t, v.File(target), 1)
			var id string
			many(func() error { _, err := v.snapshot("snapshot"); return err })
			snapshot, err := v.snapshot("snapshot")
			check.OK(t, err)
			id = snapshot.GetSnapshotId()
			many(func() error { return v.expand(smallest[kind] + 64*miB) })
			many(func() error {
				_, err := d.create(co.FromSnapshot(co.Request("restore", kind, smallest[kind]), id))
				return err
			})
			many(func() error {
				_, err := d.create(co.FromVolume(co.Request("clone", kind, smallest[kind]+64*miB), v.ID))
				return err
			})
			if files := d.inPool(); len(files) != 8 {
				t.Errorf("a volume, a snapshot, a restore and a clone are %v", files)
			}
			holds(t, v.File(target), 1)
			many(func() error { return d.deleteSnapshot(id) })
			many(func() error { return v.unpublish(target) })
			many(v.unstage)
			many(v.release)
			many(v.delete)
			for _, name := range []string{"restore", "clone"} {
				many(d.volume(drivertest.VolumeID(name), name, v.Capability).delete)
			}
			d.nothingLeft()
		})
	}
}

// TestOppositeCallsAtOnce: whatever wins, a retry of the last word ends well.
func TestOppositeCallsAtOnce(t *testing.T) {
	d := start(t, drivertest.Options{})
	v := d.made(co.Request("volume", "ext4", smallest["ext4"]))
	check.OK(t, v.claim())
	check.OK(t, os.MkdirAll(v.Staging, 0o700))
	target := v.Target("pod")
	for range 5 {
		errs := atOnce(16, func(i int) error {
			steps := []func() error{v.stage, v.unstage, func() error { return v.publish(target, false) }, func() error { return v.unpublish(target) }}
			return steps[i%len(steps)]()
		})
		for _, err := range errs {
			if code := status.Code(err); code != codes.OK && code != codes.Aborted && code != codes.FailedPrecondition {
				t.Error(err)
			}
		}
	}
	for _, step := range []func() error{v.stage, func() error { return v.publish(target, false) }} {
		check.OK(t, co.Again(t.Context(), step))
	}
	write(t, v.File(target), 1)
	holds(t, v.File(target), 1)
	check.OK(t, v.down(target))
	d.nothingLeft()
}

// besideUnpublish takes a target away and publishes it again, while many look, without an error.
func (v *vol) besideUnpublish(target string, times, many int, look func() error) {
	v.t.Helper()
	ctx, stop := context.WithCancel(v.t.Context())
	var looking sync.WaitGroup
	for range many {
		looking.Go(func() {
			for ctx.Err() == nil {
				if err := look(); err != nil {
					v.t.Error(err)
					return
				}
			}
		})
	}
	for range times {
		check.OK(v.t, v.unpublish(target))
		check.OK(v.t, v.publish(target, false))
	}
	stop()
	looking.Wait()
}

// TestStatsBesideUnpublish: what is measured is the volume, or it is not there: not the filesystem that its
// target is on.
func TestStatsBesideUnpublish(t *testing.T) {
	d := start(t, drivertest.Options{})
	v, err := d.create(co.Request("volume", "ext4", smallest["ext4"]))
	check.OK(t, err)
	target := v.running()
	v.besideUnpublish(target, 100, 2, func() error {
		r, err := d.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: v.ID, VolumePath: target})
		if status.Code(err) == codes.NotFound {
			return nil
		}
		if err == nil && r.GetUsage()[0].GetTotal() > smallest["ext4"] {
			err = fmt.Errorf("measured %v", r)
		}
		return err
	})
	check.OK(t, v.down(target))
	d.nothingLeft()
}

// TestHealthBesideUnpublish: a filesystem whose target is taken away while it is looked at is not reported as one that
// does not answer.
func TestHealthBesideUnpublish(t *testing.T) {
	d := start(t, drivertest.Options{})
	v, err := d.create(co.Request("volume", "ext4", smallest["ext4"]))
	check.OK(t, err)
	target := v.running()
	v.besideUnpublish(target, 300, 8, func() error {
		r, err := d.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: v.ID})
		if said := reasons(r.GetVolumeHealth()); err == nil && len(said) > 0 {
			err = fmt.Errorf("said %v", said)
		}
		return err
	})
	check.OK(t, v.down(target))
	d.nothingLeft()
}

// TestManyLives: 16 volumes at once, from create to delete, with a snapshot and a restore
// each.
func TestManyLives(t *testing.T) {
	for _, pool := range pools[:2] {
		t.Run(pool, func(t *testing.T) {
			d := startOn(t, pool)
			for i, err := range atOnce(16, func(i int) error {
				return d.oneOfMany(fmt.Sprintf("volume-%d", i), []string{"ext4", block}[i%2])
			}) {
				if err != nil {
					t.Errorf("volume %d: %v", i, err)
				}
			}
			d.nothingLeft()
		})
	}
}

func (d *driver) oneOfMany(name, kind string) error {
	v, err := d.create(co.Request(name, kind, smallest[kind]))
	if err != nil {
		return err
	}
	target, err := v.up()
	if err != nil {
		return err
	}
	text := drivertest.Content{Seed: name, Size: 128 << 10}
	if err := text.Write(v.File(target)); err != nil {
		return err
	}
	snapshot, err := v.snapshot("snapshot-of-" + name)
	if err != nil {
		return err
	}
	restore, err := d.create(co.FromSnapshot(co.Request("restore-of-"+name, kind, smallest[kind]), snapshot.GetSnapshotId()))
	if err != nil {
		return err
	}
	restored, err := restore.up()
	if err != nil {
		return err
	}
	if err := text.In(restore.File(restored)); err != nil {
		return err
	}
	return errors.Join(restore.down(restored), d.deleteSnapshot(snapshot.GetSnapshotId()), v.down(target))
}

// TestCapacityIsPromisedOnce: callers at once get, together, no more than there is, and
// are told the code that lets a scheduler look elsewhere.
func TestCapacityIsPromisedOnce(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := newDir(t)
	drivertest.MountNew(t, "ext4", filepath.Join(dir, "pool"), 256*miB)
	d := start(t, drivertest.Options{Dir: dir})
	capacity, err := d.GetCapacity(t.Context(), &csi.GetCapacityRequest{})
	check.OK(t, err)
	const size = 20 * miB
	for _, provisioning := range []string{"thick", "thin"} {
		t.Run(provisioning, func(t *testing.T) {
			d := d.in(t)
			volumes := make([]*vol, 32)
			made := int64(0)
			for _, err := range atOnce(len(volumes), func(i int) (err error) {
				r := co.Request(fmt.Sprintf("%s-%d", provisioning, i), "ext4", size)
				r.Parameters = map[string]string{"provisioning": provisioning}
				volumes[i], err = d.create(r)
				return err
			}) {
				if err == nil {
					made++
				} else if status.Code(err) != codes.ResourceExhausted {
					t.Error(err)
				}
			}
			// Each thick file costs a little more than its size, for its extents and its record.
			if most := capacity.GetAvailableCapacity() / size; made > most || made < most-1 {
				t.Errorf("%d volumes of %d bytes were made of %d bytes", made, int64(size), capacity.GetAvailableCapacity())
			}
			for _, v := range volumes {
				if v == nil {
					continue
				}
				if _, err := os.Stat(filepath.Join(d.Dir, "pool/volumes", v.key()+".rec")); err != nil {
					t.Error(err)
				}
				check.OK(t, v.delete())
			}
			d.nothingLeft()
			again, err := d.GetCapacity(t.Context(), &csi.GetCapacityRequest{})
			check.OK(t, err)
			if lost := capacity.GetAvailableCapacity() - again.GetAvailableCapacity(); lost > miB {
				t.Errorf("%d bytes of %d did not come back", lost, capacity.GetAvailableCapacity())
			}
		})
	}
	_, err = d.create(co.Request("huge", "ext4", capacity.GetMaximumVolumeSize().GetValue()+64*miB))
	check.Code(t, err, codes.ResourceExhausted)
	_, err = d.create(co.Request("impossible", "ext4", 1<<62))
	check.Code(t, err, codes.OutOfRange)
	d.nothingLeft()
}
