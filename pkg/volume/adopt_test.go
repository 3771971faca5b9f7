package volume_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/remotepool/remotetest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/replicapool"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// becoming is a node with a volume of its own that gets replicas while the node uses it.
type becoming struct {
	*testing.T
	pool    blockdev.Pool
	mounts  *mount.Table
	local   *volume.Local
	e       *volume.Everywhere
	mirrors *replicapool.Pool // nil on a machine that cannot mirror
	id      volume.ID
	claimed bool // the volume with replicas is claimed for this node
	asked   int  // how often the consumer of the volume was asked to hold back its writes
}

func newBecoming(t *testing.T) *becoming {
	drivertest.NeedRoot(t)
	b := &becoming{T: t, pool: pooltest.OpenedFiles(t, drivertest.Dir(t))}
	var err error
	b.mounts, err = mount.LoadTable()
	check.OK(t, err)
	b.start()
	v, err := b.local.Create(t.Context(), volume.Spec{Name: "v", Size: volume.Range{Required: 32 << 20}, Access: volume.AccessAny})
	check.OK(t, err)
	b.id = v.ID
	return b
}

// start starts the driver of the node, the first time or again. On a machine that cannot mirror, a pool in memory stands for that of volumes with replicas.
func (b *becoming) start() {
	b.Helper()
	open := func(pool blockdev.Pool) *volume.Local {
		l, err := volume.NewLocal(b.Context(), "home", []blockdev.Pool{pool}, b.mounts, 0)
		check.OK(b, err)
		return l
	}
	b.local = open(b.pool)
	b.local.ServeExports(b.Context(), volume.Exporting{Boot: "1", Open: func() (volume.Exporter, error) { return (&remotetest.Network{}).Target(), nil },
		Key: bytes.Repeat([]byte{7}, 32), Consumers: b, Locks: &keylock.Table{}})
	b.e = volume.NewEverywhere(b.local, open(memory.NewDisk(1<<30).Open("others", nil)), nowhere{})
	var mirrors blockdev.Pool = memory.NewDisk(1<<30).Open(b.pool.Name(), nil)
	if pool, err := replicapool.New("home", unreached{}); err == nil {
		mirrors, b.mirrors = pool, pool
	}
	b.e.Replicate(open(mirrors), b)
}

type nowhere struct{}

func (nowhere) Has(volume.ID) bool                            { return false }
func (nowhere) Find(context.Context, volume.ID) (bool, error) { return false, nil }

func (b *becoming) Has(volume.ID) bool                            { return b.claimed }
func (b *becoming) Find(context.Context, volume.ID) (bool, error) { return b.claimed, nil }

func (b *becoming) Hold(ctx context.Context, id volume.ID, _ volume.Grant) (release func() error, err error) {
	b.asked++
	return b.e.Replicated().Hold(ctx, id)
}

func (b *becoming) Modified(context.Context, volume.ID, volume.Grant, map[string]string) error {
	return nil
}

// becomes does what the controller and the agent do when the volume gets replicas.
func (b *becoming) becomes() {
	b.Helper()
	check.OK(b, b.local.SetReplicaOf(b.Context(), b.id, b.id.Key))
	b.claimed = true
}

func (b *becoming) get() volume.Volume {
	b.Helper()
	v, err := b.local.Get(b.Context(), b.id)
	check.OK(b, err)
	return v
}

// raw hands the volume out as a raw device.
func (b *becoming) raw() blockdev.Device {
	b.Helper()
	d, err := b.e.AttachRaw(b.Context(), b.get(), nil, true)
	check.OK(b, errors.Join(err, d.Close()))
	return d
}

// gone waits until no device of the volume is left.
func (b *becoming) gone() {
	b.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		names, err := dm.Names("ashlar-")
		if dm.HasTarget("linear") != nil {
			names, err = nil, nil
		}
		devices, failure := b.local.Attached(b.Context(), b.id)
		if check.OK(b, errors.Join(err, failure)); len(names)+len(devices) == 0 {
			return
		} else if time.Now().After(end) {
			b.Fatalf("left are %v and %v", names, devices)
		}
	}
}

// unreached are the legs of a volume, none of which answers.
type unreached struct{ replicapool.Legs }

func (unreached) Generation(blockdev.Ref) (int64, bool)                  { return 1, true }
func (unreached) Close(context.Context, blockdev.Ref, []string) error    { return nil }
func (unreached) Names(context.Context, blockdev.Ref, []uint64) []string { return nil }
func (unreached) Open(context.Context, string, blockdev.Ref) (replicapool.Opened, error) {
	return replicapool.Opened{}, errdefs.ErrUnavailable
}
func (unreached) Record(context.Context, string, blockdev.Ref) (blockdev.Record, error) {
	return blockdev.Record{}, errdefs.ErrUnavailable
}

// TestAdoptCutShort: while no leg answers, the devices of a volume in use cannot be laid over its mirror. Until then the volume is found by its devices,
// whether it is claimed or not. Its writes cannot be held back, so no snapshot is made. It can be detached, and nothing is left.
func TestAdoptCutShort(t *testing.T) {
	drivertest.NeedMapper(t)
	b := newBecoming(t)
	d := b.raw()
	b.becomes()
	pooltest.Fails(t, b.e.Adopt(t.Context(), b.id), errdefs.ErrUnavailable, "adopted while no leg answers")
	if adopted, astray, err := b.e.Adopted(t.Context(), b.id); !adopted || !astray || err != nil {
		t.Fatalf("it is adopted %v, astray %v, %v", adopted, astray, err)
	}
	if uses := b.e.Uses(t.Context()); len(uses) != 1 || uses[0].Key != b.id.Key || !slices.Equal(uses[0].Devices, []string{d.Path}) {
		t.Errorf("it is shown as used by %+v, not by %s", uses, d.Path)
	}
	pooltest.Fails(t, pooltest.Second(b.e.Replicated().Hold(t.Context(), b.id)), errdefs.ErrUnavailable, "held back while it is over no mirror")
	pooltest.Fails(t, pooltest.Second(b.local.CreateSnapshot(t.Context(), "s", b.id)), errdefs.ErrUnavailable, "cut while it is over no mirror")
	for _, b.claimed = range []bool{true, false} {
		devices, err := b.e.Attached(t.Context(), b.id)
		if check.OK(t, err); len(devices) != 1 || devices[0].Number != d.Number || !devices[0].Kept {
			t.Errorf("claimed %v, it is attached as %+v, not as %s", b.claimed, devices, d.Path)
		}
	}
	check.OK(t, b.e.Detach(t.Context(), b.id))
	b.gone()
	check.OK(t, b.local.Delete(t.Context(), b.id))
}

// TestMirrorHasTheUsers: while the mirror of a volume is here, all calls are for that, and not for a leg whose device passes for one that is handed out.
func TestMirrorHasTheUsers(t *testing.T) {
	drivertest.NeedMapper(t)
	b := newBecoming(t)
	leg := b.raw()
	b.becomes()
	ref := blockdev.Ref{Kind: blockdev.Volume, Key: b.id.Key}
	name := b.mirrors.Mirror(ref)
	check.OK(t, dm.Make(name, name, dm.Linear(leg.Number, leg.Size)))
	m, err := dm.Find(name)
	check.OK(t, err)
	devices, err := b.e.Attached(t.Context(), b.id)
	if check.OK(t, err); len(devices) != 1 || devices[0].Number != m.Number {
		t.Errorf("it is attached as %+v, not as its mirror", devices)
	}
	check.OK(t, pooltest.Second(dm.Remove(name)))
	check.OK(t, b.local.Detach(t.Context(), b.id))
	b.gone()
	check.OK(t, b.local.Delete(t.Context(), b.id))
}

// TestDetachedWithoutPool: a volume with replicas, whose first one is gone, is detached from a node that has no pool of the name in its ID.
func TestDetachedWithoutPool(t *testing.T) {
	mounts, err := mount.LoadTable()
	check.OK(t, err)
	open := func(pool string) *volume.Local {
		l, err := volume.NewLocal(t.Context(), "user", []blockdev.Pool{memory.NewDisk(1<<30).Open(pool, nil)}, mounts, 0)
		check.OK(t, err)
		return l
	}
	e := volume.NewEverywhere(open("own"), open("others"), nowhere{})
	e.Replicate(open("fast"), &becoming{claimed: true})
	check.OK(t, e.Detach(t.Context(), volume.ID{Kind: blockdev.Volume, Pool: "fast", Key: volume.KeyOf("v")}))
}

// heldOpen returns a volume that is handed out as a raw device, which a process has open (f).
func heldOpen(t *testing.T) (b *becoming, f *os.File) {
	t.Helper()
	b = newBecoming(t)
	f, err := os.OpenFile(b.raw().Path, os.O_RDWR, 0)
	check.OK(t, err)
	return b, f
}

// TestHeldOpenWhileItBecomes: the device of a volume that has got replicas is not detached (ErrInUse) while a process has it open.
func TestHeldOpenWhileItBecomes(t *testing.T) {
	drivertest.NeedMapper(t)
	b, f := heldOpen(t)
	b.becomes()
	for range 3 {
		pooltest.Fails(t, b.e.Detach(t.Context(), b.id), errdefs.ErrInUse, "taken down while it is open")
	}
	check.OK(t, errors.Join(f.Close(), b.e.Detach(t.Context(), b.id)))
	b.gone()
	check.OK(t, b.local.Delete(t.Context(), b.id))
}

// TestHeldOpenIsNoLeg: a device that a process has opened before the volume got replicas is not laid below a mirror, also not after a start of the driver: the
// process would write past the mirror.
func TestHeldOpenIsNoLeg(t *testing.T) {
	drivertest.NeedMapper(t)
	b, f := heldOpen(t)
	pooltest.Fails(t, b.e.Detach(t.Context(), b.id), errdefs.ErrInUse, "taken down while it is open")
	b.becomes()
	for range 2 {
		leg, err := b.e.OpenLeg(t.Context(), b.id)
		pooltest.Fails(t, errors.Join(err, leg.Close()), errdefs.ErrInUse, "a leg while it is open")
		b.start()
	}
	check.OK(t, f.Close())
	leg, err := b.e.OpenLeg(t.Context(), b.id)
	check.OK(t, errors.Join(err, leg.Close(), b.e.CloseLeg(t.Context(), b.id)))
	b.gone()
	check.OK(t, b.local.Delete(t.Context(), b.id))
}

// TestFrozenWhileItBecomes: for a snapshot, a filesystem that was mounted before the volume got replicas is frozen by its own node, so that the next start of
// the driver ends a freeze that was left. The consumer of the mirror is not asked.
func TestFrozenWhileItBecomes(t *testing.T) {
	b := newBecoming(t)
	v := b.get()
	d, err := b.e.Attach(t.Context(), v, nil)
	check.OK(t, err)
	dir := t.TempDir()
	drivertest.Run(t, "mkfs.ext4", "-q", d.Path)
	check.OK(t, errors.Join(unix.Mount(d.Path, dir, "ext4", 0, ""), d.Close()))
	b.mounts.Add(d.Number, dir, true)
	check.OK(t, os.WriteFile(filepath.Join(dir, "file"), []byte("content"), 0o600))
	b.becomes()
	s, err := b.local.CreateSnapshot(t.Context(), "s", b.id)
	check.OK(t, err)
	if b.asked > 0 {
		t.Error("who has its mirror was to freeze it: of that no start knows")
	}
	check.OK(t, b.local.DeleteSnapshot(t.Context(), s.ID))
	drivertest.Unmount(t, dir)
	b.mounts.Remove(d.Number, dir)
	check.OK(t, b.e.Detach(t.Context(), b.id))
	b.gone()
	check.OK(t, b.local.Delete(t.Context(), b.id))
}

// TestExportedLegIsNotUsed: a leg that is exported to another node counts as not used on its own node, although it has a kept device there. So a volume with
// that leg is used here through its mirror only, or not at all.
func TestExportedLegIsNotUsed(t *testing.T) {
	b := newBecoming(t)
	b.becomes()
	check.OK(t, pooltest.Second(b.local.Export(t.Context(), b.id, volume.Grant{Generation: 1, Node: "user"})))
	for _, b.claimed = range []bool{true, false} {
		if v, err := b.e.Get(t.Context(), b.id); err == nil {
			t.Errorf("claimed %v, a leg that is exported is used by itself: %+v", b.claimed, v)
		}
	}
	b.claimed = true
	check.OK(t, b.e.Detach(t.Context(), b.id)) // detaches nothing of the leg
	if to, is, err := b.local.ExportOf(t.Context(), b.id); !is || to.Node != "user" || err != nil {
		t.Errorf("it is exported to %v: %v, %v", to, is, err)
	}
	check.OK(t, b.local.Unexport(t.Context(), b.id, 1))
	check.OK(t, b.local.Delete(t.Context(), b.id))
}
