package device_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pools"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/device"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

const size = 16 * pooltest.MiB

// fixture is a volume of a pool, and its stack.
type fixture struct {
	*testing.T
	pool   blockdev.Pool
	ref    blockdev.Ref
	stacks *device.Stacks
}

// overEach runs a test over a volume of each kind of pool that can be laid something over, where there is a device mapper.
func overEach(t *testing.T, test func(f *fixture)) {
	drivertest.NeedRoot(t)
	drivertest.NeedMapper(t)
	t.Run("files", func(t *testing.T) { test(over(t, pooltest.OpenedFiles(t, drivertest.Dir(t)))) })
	t.Run("LVM", func(t *testing.T) {
		drivertest.NeedLVM(t)
		pool, err := pools.Open(t.Context(), "test", drivertest.NewGroup(t, 128*pooltest.MiB).URL()+"?reservePercent=0")
		check.OK(t, err)
		t.Cleanup(func() { check.OK(t, pool.Close()) })
		test(over(t, pool))
	})
}

func over(t *testing.T, pool blockdev.Pool) *fixture {
	f := &fixture{t, pool, pooltest.Vol("a"), device.New()}
	pooltest.Create(t, pool, blockdev.Spec{Ref: f.ref, Size: size})
	t.Cleanup(func() { check.OK(t, f.stacks.Of(pool, f.ref).Detach(context.Background())) })
	return f
}

// stack is the volume's, as a driver that was just started has it.
func (f *fixture) stack() device.Stack { return device.New().Of(f.pool, f.ref) }

func (f *fixture) attach(o device.Options) blockdev.Device {
	f.Helper()
	d, err := f.stack().Attach(f.Context(), o)
	check.OK(f, err)
	f.Cleanup(func() { _ = d.Close() })
	return d
}

func (f *fixture) attached() []blockdev.Device {
	f.Helper()
	devices, err := f.stack().Attached(f.Context())
	check.OK(f, err)
	return devices
}

// recover is what a start does.
func (f *fixture) recover() {
	f.Helper()
	check.OK(f, device.New().Recover(f.Context(), f.pool))
}

// names returns the name and UUID of the top.
func (f *fixture) names() (name, uuid string) {
	f.Helper()
	names, ok := blockdev.As[blockdev.Stackable](f.pool)
	if !ok {
		f.Fatal("the pool is not Stackable")
	}
	name, uuid, _, err := names.Top(f.ref)
	check.OK(f, err)
	if ref, ours := names.ParseTop(name); !ours || ref != f.ref {
		f.Errorf("the name %s is parsed as that of %s, %v", name, ref, ours)
	}
	return name, uuid
}

// is makes sure that the volume is attached as one device only, of a size.
func (f *fixture) is(want blockdev.Device, size int64, when string) {
	f.Helper()
	devices := f.attached()
	if len(devices) != 1 || devices[0].Number != want.Number || devices[0].Size != size {
		f.Errorf("%s it is attached as %+v; want %s of %d bytes", when, devices, want.Path, size)
	}
}

// gone waits until nothing of the volume is attached.
func (f *fixture) gone() {
	f.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		below, err := f.pool.Attached(f.Context(), f.ref)
		check.OK(f, err)
		if devices := f.attached(); len(devices)+len(below) == 0 {
			return
		} else if time.Now().After(deadline) {
			f.Fatalf("%v and %v are left", devices, below)
		}
	}
}

// writes makes sure that a device takes writes, within a time.
func (f *fixture) writes(path string) {
	f.Helper()
	ended := make(chan error, 1)
	go func() {
		file, err := os.OpenFile(path, os.O_WRONLY|unix.O_SYNC, 0)
		if err == nil {
			_, err = file.WriteAt(make([]byte, blockdev.Granularity), 0)
			err = errors.Join(err, file.Close())
		}
		ended <- err
	}()
	select {
	case err := <-ended:
		check.OK(f, err)
	case <-time.After(30 * time.Second):
		f.Fatalf("%s takes no writes", path)
	}
}

// TestTop: what is attached is one device, over that of the pool, which goes with it.
func TestTop(t *testing.T) {
	for _, keep := range []bool{false, true} {
		overEach(t, func(f *fixture) {
			d := f.attach(device.Options{Keep: keep})
			below, err := f.pool.Attached(f.Context(), f.ref)
			check.OK(f, err)
			if len(below) != 1 || below[0].Number == d.Number || d.Below != below[0].Path || below[0].Kept || d.Kept != keep {
				f.Fatalf("attached as %+v over %+v", d, below)
			}
			f.is(d, size, "attached")
			f.writes(d.Path)
			again := f.attach(device.Options{Keep: keep})
			if again.Number != d.Number {
				f.Errorf("attached again, it is %s and not %s", again.Path, d.Path)
			}
			_, err = f.stack().Attach(f.Context(), device.Options{Keep: !keep})
			pooltest.Fails(f, err, errdefs.ErrInUse, "attached in another way")
			pooltest.Fails(f, f.pool.Delete(f.Context(), f.ref), errdefs.ErrInUse, "deleted while it is attached")
			check.OK(f, errors.Join(d.Close(), again.Close()))
			if keep {
				f.is(d, size, "closed")
				check.OK(f, f.stack().Detach(f.Context()))
			}
			f.gone()
		})
	}
}

// TestTopKeepsIoctls: who has the device cannot take away what is below it.
func TestTopKeepsIoctls(t *testing.T) {
	overEach(t, func(f *fixture) {
		d := f.attach(device.Options{Keep: true})
		user, err := os.OpenFile(d.Path, os.O_RDWR, 0)
		check.OK(f, err)
		defer user.Close()
		for name, request := range map[string]uintptr{"LOOP_CLR_FD": unix.LOOP_CLR_FD, "LOOP_GET_STATUS64": unix.LOOP_GET_STATUS64} {
			var status unix.LoopInfo64
			var argument uintptr
			if request == unix.LOOP_GET_STATUS64 {
				_, err = unix.IoctlLoopGetStatus64(int(user.Fd()))
			} else if _, _, errno := unix.Syscall(unix.SYS_IOCTL, user.Fd(), request, argument); errno != 0 {
				err = errno
			}
			if err == nil {
				f.Errorf("%s went through %s: %v", name, d.Path, status)
			}
		}
		f.is(d, size, "after that")
		f.writes(d.Path)
	})
}

// TestTopCutShort: a crash at any point leaves what the next attach goes on from, and what a start takes away.
func TestTopCutShort(t *testing.T) {
	overEach(t, func(f *fixture) {
		name, _ := f.names()
		for _, loaded := range []bool{false, true} {
			for _, next := range []string{"attach", "start", "detach"} {
				below, err := f.pool.Attach(f.Context(), f.ref, blockdev.Attachment{}) // its UUID is known then
				check.OK(f, err)
				_, uuid := f.names()
				drivertest.Run(f, "dmsetup", "create", name, "--notable", "--uuid", uuid)
				if loaded {
					drivertest.Run(f, "dmsetup", "load", name, "--table", fmt.Sprintf("0 %d linear %s 0", size/512, below.Path))
				}
				check.OK(f, below.Close())
				if devices := f.attached(); slicesContainNumber(devices, name) {
					f.Errorf("%s without a table counts as attached: %+v", name, devices)
				}
				switch next {
				case "attach":
					d := f.attach(device.Options{})
					f.writes(d.Path)
					f.is(d, size, "attached")
					check.OK(f, d.Close())
				case "start":
					f.recover()
				case "detach":
					check.OK(f, f.stack().Detach(f.Context()))
				}
				f.gone()
				if d, err := dm.Find(name); err != nil || d != nil {
					f.Fatalf("after %s (loaded: %v), %s is there: %+v, %v", next, loaded, name, d, err)
				}
			}
		}
	})
}

func slicesContainNumber(devices []blockdev.Device, name string) bool {
	d, err := dm.Find(name)
	for _, one := range devices {
		if err == nil && d != nil && one.Number == d.Number {
			return true
		}
	}
	return false
}

// TestTopGrows: with Grow, and where a crash came between the pool's growth and that, with the next attach or start.
func TestTopGrows(t *testing.T) {
	overEach(t, func(f *fixture) {
		d := f.attach(device.Options{Keep: true})
		want := int64(size)
		for step, grow := range []func(){
			func() { check.OK(f, f.stack().Grow(f.Context(), nil)) },
			func() { f.attach(device.Options{Keep: true}) },
			f.recover,
		} {
			want += 4 * pooltest.MiB
			check.OK(f, pooltest.Second(f.pool.Expand(f.Context(), f.ref, want)))
			f.is(d, want-4*pooltest.MiB, "before that")
			grow()
			f.is(d, want, fmt.Sprint("grown in way ", step))
		}
		if again := f.attach(device.Options{Keep: true}); again.Size != want {
			f.Errorf("attached with %d bytes, not %d", again.Size, want)
		}
	})
}

// TestTopSuspended: what is suspended holds writes back; a start ends what a crash left so; and what somebody else suspended is
// told by health.
func TestTopSuspended(t *testing.T) {
	overEach(t, func(f *fixture) {
		d := f.attach(device.Options{Keep: true})
		name, _ := f.names()
		stack := f.stacks.Of(f.pool, f.ref)
		sound := func(want string) {
			f.Helper()
			problems, err := stack.Health(f.Context())
			check.OK(f, err)
			if fmt.Sprint(reasons(problems)) != want {
				f.Errorf("health says %v, want %s", problems, want)
			}
		}
		resume, err := stack.Suspend(f.Context())
		check.OK(f, err)
		sound("[]")
		if second, err := stack.Suspend(f.Context()); err != nil || second != nil {
			f.Errorf("suspended twice: %v, %v", second != nil, err)
		}
		check.OK(f, errors.Join(resume(), resume()))
		f.writes(d.Path)

		drivertest.Run(f, "dmsetup", "suspend", name)
		resumed := make(chan string, 1)
		time.AfterFunc(300*time.Millisecond, func() { resumed <- drivertest.Run(f, "dmsetup", "resume", name) })
		sound("[]") // for a moment, as when a table is replaced
		<-resumed
		drivertest.Run(f, "dmsetup", "suspend", name)
		sound("[DeviceSuspended]")
		drivertest.Run(f, "dmsetup", "load", name, "--table", fmt.Sprintf("0 %d error", size/512)) // of something that was not finished
		f.recover()
		sound("[]")
		f.writes(d.Path)
		if table := drivertest.Run(f, "dmsetup", "table", name); strings.Contains(table, "error") {
			f.Errorf("its table is %s", table)
		}
	})
}

func reasons(problems []blockdev.Problem) (all []string) {
	for _, p := range problems {
		all = append(all, p.Reason)
	}
	return all
}

// TestTopBeneathMount: a device that an older driver mounted with nothing over it is used as it is, until it is unmounted.
func TestTopBeneathMount(t *testing.T) {
	overEach(t, func(f *fixture) {
		d, err := f.pool.Attach(f.Context(), f.ref, blockdev.Attachment{})
		check.OK(f, err)
		drivertest.Run(f, "mkfs.ext4", "-q", d.Path)
		dir := f.TempDir()
		drivertest.Run(f, "mount", d.Path, dir)
		check.OK(f, d.Close())
		f.is(d, size, "mounted")
		again := f.attach(device.Options{Mounted: func(one blockdev.Device) bool { return one.Number == d.Number }})
		if again.Number != d.Number {
			f.Errorf("attached again as %s, mounted is %s", again.Path, d.Path)
		}
		f.recover()
		f.is(d, size, "after a start")
		check.OK(f, again.Close())
		_, err = f.stack().Attach(f.Context(), device.Options{Keep: true})
		if err == nil || len(f.attached()) != 1 {
			f.Errorf("a second device over what is mounted: %v, %v", f.attached(), err)
		}
		drivertest.Unmount(f, dir)
		f.gone()
		if now := f.attach(device.Options{}); now.Below == "" {
			f.Errorf("attached anew, it is the pool's own device: %+v", now)
		}
	})
}

// TestTopBesideClaim: a layer is never left out because somebody has the pool's device for himself, as an array of the host may that is made of what a pod
// wrote. Who has it for a moment is waited for.
func TestTopBesideClaim(t *testing.T) {
	overEach(t, func(f *fixture) {
		claim := func() (end func()) {
			d, err := f.pool.Attach(f.Context(), f.ref, blockdev.Attachment{})
			check.OK(f, err)
			user, err := os.OpenFile(d.Path, os.O_RDONLY|unix.O_EXCL, 0)
			check.OK(f, errors.Join(err, d.Close()))
			return func() { _ = user.Close() }
		}
		pooltest.Create(f, f.pool, blockdev.Spec{Ref: f.beside(), Size: 8 * pooltest.MiB})
		marked := &markedFixture{fixture: f}
		for _, o := range []device.Options{{}, {Keep: true}, {Seat: true}, {Marking: marked.marking(true)}} {
			end := claim()
			d, err := f.stack().Attach(f.Context(), o)
			pooltest.Fails(f, err, errdefs.ErrInUse, "attached below somebody's claim")
			if errors.Is(err, device.ErrMarks) {
				f.Errorf("the marks are said to be what fails: %v", err)
			}
			_ = d.Close()
			end()
			f.gone()
			end = claim()
			time.AfterFunc(300*time.Millisecond, end)
			if d = f.attach(o); d.Below == "" {
				f.Errorf("attached after a claim, it is the pool's own device: %+v", d)
			}
			check.OK(f, errors.Join(d.Close(), f.stack().Detach(f.Context())))
			f.gone()
		}
	})
}

// TestTopBesideKept: a device that was handed out when there was no device mapper stays what it is until it is detached.
func TestTopBesideKept(t *testing.T) {
	overEach(t, func(f *fixture) {
		d, err := f.pool.Attach(f.Context(), f.ref, blockdev.Attachment{Keep: true})
		if errors.Is(err, errdefs.ErrUnsupported) { // such a pool needs a device mapper
			return
		}
		check.OK(f, err)
		check.OK(f, d.Close())
		f.recover()
		again := f.attach(device.Options{Keep: true})
		check.OK(f, again.Close())
		if again.Number != d.Number {
			f.Errorf("attached again as %s, handed out is %s", again.Path, d.Path)
		}
		orphans, err := f.stacks.Orphans(f.Context(), f.pool)
		check.OK(f, err)
		if len(orphans) != 1 || len(orphans[f.ref]) != 1 || orphans[f.ref][0].Number != d.Number {
			f.Errorf("orphans are %+v, want %s", orphans, d.Path)
		}
		check.OK(f, f.stack().Detach(f.Context()))
		f.gone()
	})
}

// TestTopOfAnother: a device that has the name of a top and is another's keeps its table, and is not taken for ours.
func TestTopOfAnother(t *testing.T) {
	overEach(t, func(f *fixture) {
		name, _ := f.names()
		drivertest.Run(f, "dmsetup", "create", name, "--uuid", "somebody's", "--table", "0 8 error")
		f.Cleanup(func() { drivertest.Run(f, "dmsetup", "remove", "--retry", name) })
		_, err := f.stack().Attach(f.Context(), device.Options{Keep: true})
		pooltest.Fails(f, err, errdefs.ErrPrecondition, "attached below another's device")
		if devices := f.attached(); slicesContainNumber(devices, name) {
			f.Errorf("another's device is said to be attached: %+v", devices)
		}
		check.OK(f, f.stack().Detach(f.Context()))
		f.recover()
		if table := drivertest.Run(f, "dmsetup", "table", name); !strings.Contains(table, "error") {
			f.Errorf("its table is %s", table)
		}
	})
}

// TestTopHeld: a detach of what somebody holds says so; all of it goes with its last user.
func TestTopHeld(t *testing.T) {
	overEach(t, func(f *fixture) {
		d := f.attach(device.Options{Keep: true})
		user, err := os.Open(d.Path)
		check.OK(f, err)
		check.OK(f, d.Close())
		pooltest.Fails(f, f.stack().Detach(f.Context()), errdefs.ErrInUse, "detached while it is held")
		_, err = f.stack().Attach(f.Context(), device.Options{Keep: true})
		pooltest.Fails(f, err, errdefs.ErrInUse, "attached while it goes")
		check.OK(f, user.Close())
		f.gone()
	})
}

// TestNoTop: over a pool that does not name tops, the stack is the pool's device.
func TestNoTop(t *testing.T) {
	drivertest.NeedRoot(t)
	f := over(t, memory.NewDisk(64*pooltest.MiB).Open("test", nil))
	for _, keep := range []bool{false, true} {
		d := f.attach(device.Options{Keep: keep})
		below, err := f.pool.Attached(f.Context(), f.ref)
		check.OK(t, err)
		if len(below) != 1 || below[0].Number != d.Number || below[0].Kept != keep {
			t.Errorf("attached as %+v, the pool's are %+v", d, below)
		}
		if resume, err := f.stack().Suspend(f.Context()); err != nil || resume != nil {
			t.Errorf("it says that it holds writes back: %v, %v", resume != nil, err)
		}
		check.OK(t, errors.Join(d.Close(), f.stack().Grow(f.Context(), nil), f.stack().Detach(f.Context())))
		f.gone()
	}
}

// TestHeldAfterStart: what was handed out, was detached, and is still held by a process, is not given to anybody to mount, also by a driver that has started since. What is mounted is found again.
func TestHeldAfterStart(t *testing.T) {
	overEach(t, func(f *fixture) {
		start := func() device.Stack {
			stacks := device.New()
			check.OK(f, stacks.Recover(f.Context(), f.pool))
			return stacks.Of(f.pool, f.ref)
		}
		handed := f.attach(device.Options{Keep: true})
		user, err := os.OpenFile(handed.Path, os.O_RDWR, 0)
		check.OK(f, errors.Join(err, handed.Close()))
		if err := f.stack().Detach(f.Context()); !errors.Is(err, errdefs.ErrInUse) {
			f.Errorf("it is held, and detached: %v", err)
		}
		if d, err := start().Attach(f.Context(), device.Options{}); !errors.Is(err, errdefs.ErrInUse) {
			f.Errorf("it is attached to be mounted, and who had it before has it still: %v", err)
			_ = d.Close()
		}
		check.OK(f, user.Close())
		f.gone()
		d := f.attach(device.Options{})
		mounted, err := os.OpenFile(d.Path, os.O_RDWR|unix.O_EXCL, 0) // as who mounts it
		check.OK(f, errors.Join(err, d.Close()))
		again, err := start().Attach(f.Context(), device.Options{})
		check.OK(f, err)
		check.OK(f, errors.Join(again.Close(), mounted.Close()))
	})
}

// TestDiskWithCacheLater: lvm2 brings a volume that is used to a disk which has a cache that could be lost, from one that has none. From the next start on the volume is flushed.
func TestDiskWithCacheLater(t *testing.T) {
	drivertest.NeedRoot(t)
	group := drivertest.NewGroup(t, 128*pooltest.MiB, 128*pooltest.MiB)
	disk := blockdev.Device{Path: group.Devices[0]}
	check.OK(t, pooltest.Second(disk.SetQueue(map[string]string{"write_cache": "write through"})))
	pool, err := pools.Open(t.Context(), "test", group.URL()+"?reservePercent=0")
	check.OK(t, err)
	t.Cleanup(func() { check.OK(t, pool.Close()) })
	f := over(t, pool)
	d := f.attach(device.Options{Keep: true, Seat: true})
	if dm.Flushed(d.Number) {
		t.Fatal("it is flushed, though its disk has no cache")
	}
	drivertest.Run(t, "pvmove", "-q", group.Devices[0], group.Devices[1])
	below, err := pool.Attached(t.Context(), f.ref)
	if check.OK(t, err); len(below) != 1 || !dm.Flushed(below[0].Number) {
		t.Fatalf("below is %+v, and not flushed", below)
	}
	f.recover()
	if !dm.Flushed(d.Number) {
		t.Error("what is written to it stays in the cache of the disk that it is on now")
	}
	check.OK(t, d.Close())
}
