package volume_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lazy"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pools"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// mixed returns the URLs of a pool of files on XFS, which copies at once, and of one of linear logical volumes. lvm2 looks at all devices of the machine, as it
// does by default.
func mixed(t *testing.T) (files, group string) {
	t.Helper()
	drivertest.NeedLVM(t)
	dir := drivertest.Dir(t)
	drivertest.MountNew(t, "xfs", filepath.Join(dir, "xfs"), 512*mib)
	group = drivertest.NewGroup(t, 512*mib).URL() + "?reservePercent=0"
	drivertest.SetUpLVM(t, `"a|.*|"`)
	check.OK(t, os.Mkdir(filepath.Join(dir, "xfs", "pool"), 0o700))
	return "file://" + filepath.Join(dir, "xfs", "pool") + "?reservePercent=0&create=1", group
}

func open(t *testing.T, name, url string) blockdev.Pool {
	t.Helper()
	pool, err := pools.OpenLazy(t.Context(), name, url, nil)
	check.OK(t, err)
	t.Cleanup(func() { check.OK(t, pool.Close()) })
	return pool
}

// raw makes a volume and attaches it as a raw device.
func raw(t *testing.T, l *volume.Local, pool, name string) (volume.Volume, blockdev.Device) {
	t.Helper()
	v, err := l.Create(t.Context(), volume.Spec{Name: name, Pool: pool, Size: volume.Range{Required: 16 * mib}})
	check.OK(t, err)
	device, err := l.AttachRaw(t.Context(), v, nil, true)
	check.OK(t, err)
	check.OK(t, device.Close())
	return v, device
}

// nameOf returns the name of a device of the device mapper.
func nameOf(t *testing.T, device blockdev.Device) string {
	t.Helper()
	name, err := os.ReadFile(filepath.Join("/sys/block", filepath.Base(device.Path), "dm/name"))
	check.OK(t, err)
	return strings.TrimSpace(string(name))
}

// within fails the test if a call does not end within limit. Then it resumes all suspended devices again and again, until the call ends.
func within(t *testing.T, limit time.Duration, what string, call func()) {
	t.Helper()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		call()
	}()
	select {
	case <-ended:
		return
	case <-time.After(limit):
		t.Errorf("%s has not ended after %s:\n%s", what, limit, drivertest.Run(t, "dmsetup", "info", "-c", "-o", "name,suspended,open"))
	}
	for {
		for _, name := range strings.Fields(drivertest.Run(t, "dmsetup", "info", "-c", "--noheadings", "-o", "name", "-S", "suspended=1")) {
			drivertest.Run(t, "dmsetup", "resume", name)
		}
		select {
		case <-ended:
			return
		case <-time.After(time.Second):
		}
	}
}

// TestLVMGroupBesideFiles: lvm2 makes a snapshot for a member of a group while another member, a raw volume of a file pool, is suspended.
func TestLVMGroupBesideFiles(t *testing.T) {
	files, group := mixed(t)
	l := start(t, 0, open(t, "files", files), open(t, "a-group", group)) // the member in a-group is cut first
	a, _ := raw(t, l, "files", "a")
	b, _ := raw(t, l, "a-group", "b")
	within(t, 30*time.Second, "a group", func() {
		made, err := l.CreateGroup(t.Context(), "g", []volume.ID{a.ID, b.ID})
		if err == nil {
			err = l.DeleteGroup(t.Context(), made.ID)
		}
		if err != nil {
			t.Error(err)
		}
	})
	for _, v := range []volume.Volume{a, b} {
		check.OK(t, l.Detach(t.Context(), v.ID))
		check.OK(t, l.Delete(t.Context(), v.ID))
	}
}

// TestLVMStartBesideSuspended: a start of the driver resumes a device of a file pool that a crash has left suspended, also if lvm2 looks at that device.
func TestLVMStartBesideSuspended(t *testing.T) {
	files, group := mixed(t)
	first := opened(t, "files", files)
	l := start(t, 0, first)
	v, device := raw(t, l, "files", "a")
	check.OK(t, first.Close())
	drivertest.Run(t, "dmsetup", "suspend", nameOf(t, device))
	within(t, 30*time.Second, "a start", func() {
		l = start(t, 0, open(t, "lvm", group), open(t, "files", files))
		b, err := l.Create(t.Context(), volume.Spec{Name: "b", Pool: "lvm", Size: volume.Range{Required: 16 * mib}})
		if err == nil {
			err = l.Delete(t.Context(), b.ID)
		}
		if err != nil {
			t.Error(err)
		}
	})
	check.OK(t, l.Detach(t.Context(), v.ID))
	check.OK(t, l.Delete(t.Context(), v.ID))
}

func opened(t *testing.T, name, url string) blockdev.Pool {
	t.Helper()
	pool, err := pools.Open(t.Context(), name, url)
	check.OK(t, err)
	return pool
}

// kinds starts a store over a pool of each kind, which has the name of the kind.
func kinds(t *testing.T) (*volume.Local, *mount.Table) {
	t.Helper()
	mounts, err := mount.LoadTable()
	check.OK(t, err)
	var all []blockdev.Pool
	urls := kindURLs(t)
	for _, kind := range []string{"xfs", "linear", "thin", "plain"} {
		all = append(all, open(t, kind, urls[kind]))
	}
	l, err := volume.NewLocal(t.Context(), node, all, mounts, 0)
	check.OK(t, err)
	return l, mounts
}

// kindURLs returns the URLs of new pools, one of each kind.
func kindURLs(t *testing.T) map[string]string {
	t.Helper()
	xfs, linear := mixed(t)
	group := drivertest.NewGroup(t, 512*mib)
	thin := group.ThinPool(t, "tp", "-L", "400M", "--poolmetadatasize", "16M") + "?reservePercent=0"
	drivertest.SetUpLVM(t, `"a|.*|"`)
	plain := filepath.Join(drivertest.Dir(t), "plain")
	check.OK(t, os.Mkdir(plain, 0o700))
	return map[string]string{"xfs": xfs, "linear": linear, "thin": thin, "plain": "file://" + plain + "?reservePercent=0&create=1"}
}

func suspended(t *testing.T) []string {
	t.Helper()
	return strings.Fields(drivertest.Run(t, "dmsetup", "info", "-c", "--noheadings", "-o", "name", "-S", "suspended=1"))
}

func drop(t *testing.T, l *volume.Local, v volume.Volume) {
	t.Helper()
	check.OK(t, l.Detach(t.Context(), v.ID))
	check.OK(t, l.Delete(t.Context(), v.ID))
}

// restored makes a copy of a snapshot, and opens its raw device.
func restored(t *testing.T, l *volume.Local, s volume.Snapshot) (volume.Volume, *os.File) {
	t.Helper()
	v, err := l.Create(t.Context(), volume.Spec{Name: "copy of " + s.Name, Source: s.ID, Size: volume.Range{Required: s.Size}})
	check.OK(t, err)
	device, err := l.AttachRaw(t.Context(), v, nil, true)
	check.OK(t, err)
	check.OK(t, device.Close())
	f, err := os.Open(device.Path)
	check.OK(t, err)
	return v, f
}

// TestLVMRawSnapshots: a snapshot of a raw volume has what was in the page cache of its device, and is of one point in time although the device is being
// written to.
func TestLVMRawSnapshots(t *testing.T) {
	l, _ := kinds(t)
	for _, pool := range []string{"xfs", "linear", "thin", "plain"} {
		v, device := raw(t, l, pool, "r-"+pool)
		f, err := os.OpenFile(device.Path, os.O_RDWR, 0)
		check.OK(t, err)
		text := []byte(strings.Repeat("not synced ", 100000))
		check.OK(t, second(f.WriteAt(text, mib)))
		s, err := l.CreateSnapshot(t.Context(), "idle-"+pool, v.ID)
		check.OK(t, err)
		c, copied := restored(t, l, s)
		have := make([]byte, len(text))
		_, err = copied.ReadAt(have, mib)
		if err != nil || string(have) != string(text) {
			t.Errorf("%s: what was not synced is not in the copy: %v", pool, err)
		}
		check.OK(t, copied.Close())
		drop(t, l, c)
		check.OK(t, l.DeleteSnapshot(t.Context(), s.ID))

		ctx, end := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			for n := uint64(1); ctx.Err() == nil; n++ {
				block := make([]byte, 4096)
				binary.LittleEndian.PutUint64(block, n)
				for _, at := range []int64{0, 12 * mib} {
					if err := errors.Join(second(f.WriteAt(block, at)), f.Sync()); err != nil {
						t.Error(err)
					}
				}
			}
		}()
		for i := range 4 {
			s, err := l.CreateSnapshot(t.Context(), fmt.Sprint("busy-", pool, i), v.ID)
			if pool == "plain" && errors.Is(err, errdefs.ErrInUse) { // it copies byte by byte, and the volume changes meanwhile
				continue
			}
			check.OK(t, err)
			c, copied := restored(t, l, s)
			var n [2]uint64
			for k, at := range []int64{0, 12 * mib} {
				block := make([]byte, 8)
				_, _ = copied.ReadAt(block, at)
				n[k] = binary.LittleEndian.Uint64(block)
			}
			if n[0] != n[1] && n[0] != n[1]+1 {
				t.Errorf("%s: of the two places that are written in turn, the copy has %v", pool, n)
			}
			check.OK(t, copied.Close())
			drop(t, l, c)
			check.OK(t, l.DeleteSnapshot(t.Context(), s.ID))
		}
		end()
		<-ended
		check.OK(t, f.Close())
		drop(t, l, v)
	}
	if left := suspended(t); len(left) > 0 {
		t.Errorf("suspended: %v", left)
	}
}

// TestLVMGroupEnds: whenever the context of a CreateGroup ends, no device stays suspended.
func TestLVMGroupEnds(t *testing.T) {
	l, _ := kinds(t)
	var volumes []volume.Volume
	var ids []volume.ID
	for _, pool := range []string{"xfs", "linear", "thin"} {
		v, _ := raw(t, l, pool, "g-"+pool)
		volumes, ids = append(volumes, v), append(ids, v.ID)
	}
	for i := range 15 {
		ctx, end := context.WithTimeout(t.Context(), time.Duration(rand.IntN(1500))*time.Millisecond)
		var err error
		var group volume.Group
		within(t, 40*time.Second, "a group that is cut short", func() { group, err = l.CreateGroup(ctx, fmt.Sprint("g", i), ids) })
		end()
		if left := suspended(t); len(left) > 0 {
			t.Fatalf("suspended after %v: %v", err, left)
		}
		if err == nil {
			check.OK(t, l.DeleteGroup(t.Context(), group.ID))
		}
	}
	group, err := l.CreateGroup(t.Context(), "last", ids)
	check.OK(t, err)
	check.OK(t, l.DeleteGroup(t.Context(), group.ID))
	for _, v := range volumes {
		drop(t, l, v)
	}
}

// TestLVMFrozenByOthers: a snapshot is made of a volume whose filesystem somebody else has frozen. The freeze stays.
func TestLVMFrozenByOthers(t *testing.T) {
	l, mounts := kinds(t)
	for _, pool := range []string{"xfs", "linear", "thin", "plain"} {
		v, err := l.Create(t.Context(), volume.Spec{Name: "f-" + pool, Pool: pool, Size: volume.Range{Required: 16 * mib}, Filesystem: "ext4"})
		check.OK(t, err)
		device, err := l.Attach(t.Context(), v, nil)
		check.OK(t, err)
		dir := t.TempDir()
		drivertest.Run(t, "mkfs.ext4", "-q", device.Path)
		check.OK(t, unix.Mount(device.Path, dir, "ext4", 0, ""))
		mounts.Add(device.Number, dir, true)
		check.OK(t, device.Close())
		check.OK(t, os.WriteFile(filepath.Join(dir, "file"), []byte("content"), 0o600))
		drivertest.Run(t, "fsfreeze", "-f", dir)
		var s volume.Snapshot
		within(t, 40*time.Second, "a snapshot", func() { s, err = l.CreateSnapshot(t.Context(), "f-"+pool, v.ID) })
		if left := suspended(t); len(left) > 0 {
			t.Errorf("suspended: %v", left)
		}
		drivertest.Run(t, "fsfreeze", "-u", dir)
		check.OK(t, err)
		check.OK(t, l.DeleteSnapshot(t.Context(), s.ID))
		drivertest.Unmount(t, dir)
		drop(t, l, v)
	}
}

// TestLVMDeleteLookedAt: a process that has the device of a logical volume open only for a moment, as udev does, does not keep the volume from being deleted.
func TestLVMDeleteLookedAt(t *testing.T) {
	l, _ := kinds(t)
	v, device := raw(t, l, "linear", "a")
	top := nameOf(t, device)
	below, err := dm.Find(strings.TrimSuffix(top, "-writable"))
	check.OK(t, err)
	look, err := os.Open(below.Path())
	check.OK(t, err)
	drivertest.Run(t, "dmsetup", "remove", top)
	time.AfterFunc(300*time.Millisecond, func() { _ = look.Close() })
	if err := l.Delete(t.Context(), v.ID); err != nil {
		t.Error(err)
		_ = look.Close()
		check.OK(t, l.Delete(t.Context(), v.ID))
	}
}

// TestLVMAttachedOpensPool: a call of Attached that causes its pool to be opened returns the same devices as any later one.
func TestLVMAttachedOpensPool(t *testing.T) {
	files, _ := mixed(t)
	first := opened(t, "files", files)
	v, device := raw(t, start(t, 0, first), "files", "a")
	check.OK(t, first.Close())
	target := filepath.Join(drivertest.Dir(t), "target") // mounted there, so that a start does not detach the device
	check.OK(t, os.WriteFile(target, nil, 0o600))
	check.OK(t, unix.Mount(device.Path, target, "", unix.MS_BIND, ""))
	there := false
	late := lazy.New("files", errors.New("no disk"), func(ctx context.Context) (blockdev.Pool, error) {
		if !there {
			return nil, errors.New("no disk")
		}
		return pools.Open(ctx, "files", files)
	})
	l := start(t, 0, late)
	there = true
	var devices []blockdev.Device
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		var err error
		if devices, err = l.Attached(t.Context(), v.ID); err == nil {
			break
		}
		if time.Now().After(end) {
			t.Fatal(err)
		}
	}
	if len(devices) != 1 || devices[0].Number != device.Number {
		t.Errorf("attached as %+v, handed out is %s", devices, device.Path)
	}
	drivertest.Unmount(t, target)
	drop(t, l, v)
	check.OK(t, late.Close())
}

// usedElsewhere is an Elsewhere by which this node uses all volumes of other nodes.
type usedElsewhere struct{}

func (usedElsewhere) Has(volume.ID) bool                            { return true }
func (usedElsewhere) Find(context.Context, volume.ID) (bool, error) { return true, nil }

// TestLVMSeatOfClosedPool: a volume that has moved to another node while this node used it still has a device by the names of its old pool. While that pool is
// not open, after a start of the driver, the volume is not attached a second time as another node's.
func TestLVMSeatOfClosedPool(t *testing.T) {
	files, _ := mixed(t)
	first := opened(t, "files", files)
	l := start(t, 0, first)
	v, err := l.Create(t.Context(), volume.Spec{Name: "a", Pool: "files", Size: volume.Range{Required: 16 * mib}, Access: volume.AccessAny})
	check.OK(t, err)
	device, err := l.AttachRaw(t.Context(), v, nil, true)
	check.OK(t, err)
	check.OK(t, device.Close())
	check.OK(t, first.Close())
	target := filepath.Join(drivertest.Dir(t), "target") // mounted there, so that a start does not detach the device
	check.OK(t, os.WriteFile(target, nil, 0o600))
	check.OK(t, unix.Mount(device.Path, target, "", unix.MS_BIND, ""))

	there := false
	late := lazy.New("files", errors.New("no disk"), func(ctx context.Context) (blockdev.Pool, error) {
		if !there {
			return nil, errors.New("no disk")
		}
		return pools.Open(ctx, "files", files)
	})
	disk := memory.NewDisk(1 << 30)
	others := disk.Open("files", nil) // the pool from which it would be attached
	check.OK(t, second(others.Create(t.Context(), blockdev.Spec{Ref: blockdev.Ref{Kind: v.ID.Kind, Key: v.ID.Key}, Size: 16 * mib})))
	e := volume.NewEverywhere(start(t, 0, late), start(t, 0, others), usedElsewhere{})
	fails(t, second(e.AttachRaw(t.Context(), v, nil, true)), errdefs.ErrUnavailable, "the pool is not open")
	there = true
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		devices, err := e.Attached(t.Context(), v.ID)
		if err == nil && len(devices) == 1 && devices[0].Number == device.Number {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("attached as %+v, handed out is %s: %v", devices, device.Path, err)
		}
	}
	drivertest.Unmount(t, target)
	drop(t, e.Local, v)
	check.OK(t, late.Close())
}

// TestLVMHeldThenMounted: a volume whose raw device a process still has open is not attached to be mounted.
func TestLVMHeldThenMounted(t *testing.T) {
	l, _ := kinds(t)
	for _, pool := range []string{"plain", "linear"} {
		v, device := raw(t, l, pool, "h-"+pool)
		user, err := os.OpenFile(device.Path, os.O_RDWR, 0)
		check.OK(t, err)
		fails(t, l.Detach(t.Context(), v.ID), errdefs.ErrInUse, "detach")
		again, err := l.Attach(t.Context(), v, nil)
		if err == nil {
			t.Errorf("%s: attached to be mounted as %s, which the user of the raw device %s still has", pool, again.Path, device.Path)
			check.OK(t, again.Close())
		}
		check.OK(t, user.Close())
		time.Sleep(100 * time.Millisecond)
		drop(t, l, v)
	}
}
