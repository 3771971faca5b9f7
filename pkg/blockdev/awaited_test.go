package blockdev_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// TestAwaited: a pool that is not there is looked for by its calls, not too often; it is
// used only after what has to be done first was done.
func TestAwaited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		disk := memory.NewDisk(1 << 30)
		var there bool
		var opened, prepared int
		broken := errors.New("broken")
		fail := broken
		a := blockdev.NewAwaited("late", errors.New("no disk"), func(context.Context) (blockdev.Pool, error) {
			if opened++; !there {
				return nil, errors.New("still no disk")
			}
			return disk.Open("late", nil), nil
		})
		a.Then(ctx, func(ctx context.Context, pool blockdev.Pool) error {
			prepared++
			if _, err := pool.Capacity(ctx); err != nil {
				return err
			}
			return fail
		})
		missing := func(why string) {
			t.Helper()
			if _, err := a.Get(ctx, vol("a")); !errors.Is(err, errdefs.ErrUnavailable) || !strings.Contains(err.Error(), why) || !strings.Contains(err.Error(), "late") {
				t.Errorf("Get of a pool that is not there: %v; want %q", err, why)
			}
			if problems := a.PoolHealth(ctx); len(problems) != 1 || problems[0].Severity != blockdev.Inaccessible || !strings.Contains(problems[0].Message, why) {
				t.Errorf("health of a pool that is not there: %v; want %q", problems, why)
			}
			if problems, err := a.Health(ctx, vol("a")); err != nil || len(problems) != 1 {
				t.Errorf("health in a pool that is not there: %v, %v", problems, err)
			}
			if _, ok := blockdev.As[blockdev.Differ](a); ok || blockdev.There(a) != nil {
				t.Error("it is there")
			}
		}
		missing("no disk")
		if opened != 0 {
			t.Errorf("looked %d times at once", opened)
		}
		time.Sleep(time.Minute)
		missing("still no disk")
		missing("still no disk")
		if opened != 1 {
			t.Errorf("looked %d times in one moment, not once", opened)
		}
		there = true
		time.Sleep(time.Minute)
		missing("broken")
		if opened != 2 || prepared != 1 {
			t.Errorf("opened %d times, prepared %d times", opened, prepared)
		}
		time.Sleep(time.Minute)
		cancelled, cancel := context.WithCancel(ctx)
		cancel()
		if _, err := a.Capacity(cancelled); err == nil {
			t.Error("a call that was cancelled opened the pool")
		}
		fail = nil
		if c, err := a.Capacity(ctx); err != nil || c.Total == 0 {
			t.Errorf("capacity of a pool that came: %+v, %v", c, err)
		}
		if _, ok := blockdev.As[blockdev.Differ](a); !ok || blockdev.There(a) == nil {
			t.Error("it is not there")
		}
		if _, err := a.Get(ctx, vol("a")); !errors.Is(err, errdefs.ErrNotFound) {
			t.Errorf("Get of a pool that came: %v", err)
		}
		must(t, a.Close())
	})
}

// TestAwaitedHangs: a pool whose storage hangs holds up who asks for it for a while, and then nobody; it
// is there as soon as the storage answers.
func TestAwaitedHangs(t *testing.T) {
	for _, hanging := range []string{"open", "then"} {
		t.Run(hanging, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx := t.Context()
				answers := make(chan struct{})
				hang := func(where string) {
					if where == hanging {
						<-answers
					}
				}
				var opened int
				disk := memory.NewDisk(1 << 30)
				a := blockdev.NewAwaited("slow", errors.New("no disk"), func(context.Context) (blockdev.Pool, error) {
					opened++
					hang("open")
					return disk.Open("slow", nil), nil
				})
				a.Then(ctx, func(context.Context, blockdev.Pool) error { hang("then"); return nil })
				time.Sleep(time.Minute)
				for i, within := range []time.Duration{11 * time.Second, 0, 0} {
					begun := time.Now()
					_, err := a.Get(ctx, vol("a"))
					if took := time.Since(begun); !errors.Is(err, errdefs.ErrUnavailable) || !strings.Contains(err.Error(), "does not answer") || took > within {
						t.Errorf("call %d: %v, after %s", i, err, took)
					}
					if problems := a.PoolHealth(ctx); len(problems) != 1 || problems[0].Severity != blockdev.Inaccessible {
						t.Errorf("health of a pool that hangs: %v", problems)
					}
				}
				short, cancel := context.WithTimeout(ctx, time.Second)
				defer cancel()
				if _, err := a.Get(short, vol("a")); err == nil {
					t.Error("it is there")
				}
				close(answers)
				synctest.Wait()
				if _, err := a.Get(ctx, vol("a")); !errors.Is(err, errdefs.ErrNotFound) || opened != 1 {
					t.Errorf("Get of a pool that answers: %v, after it was opened %d times", err, opened)
				}
				must(t, a.Close())
			})
		})
	}
}

// TestAwaitedFails: what has to be done first over a pool that is there may fail, and then it is not there.
func TestAwaitedFails(t *testing.T) {
	dir := t.TempDir()
	pool, err := blockdev.OpenOrAwait(t.Context(), "bad", "file://"+dir+"?create=1", nil)
	must(t, err)
	a := pool.(*blockdev.Awaited)
	defer func() { must(t, a.Close()) }()
	if blockdev.There(pool) == nil {
		t.Fatal("it is not there")
	}
	a.Then(t.Context(), func(context.Context, blockdev.Pool) error { return errors.New("input/output error") })
	_, err = pool.Get(t.Context(), vol("a"))
	fails(t, err, errdefs.ErrUnavailable, "Get")
	if blockdev.There(pool) != nil || !strings.Contains(err.Error(), "input/output error") {
		t.Errorf("it is there, or says something else: %v", err)
	}
	// What does not pass is said at once.
	fails(t, second(blockdev.OpenOrAwait(t.Context(), "bad", "file://"+dir+"?create=2", nil)), errdefs.ErrInvalid, "a wrong URL")
	must(t, os.WriteFile(filepath.Join(dir, "file"), nil, 0o600))
	fails(t, second(blockdev.OpenOrAwait(t.Context(), "bad", "file://"+dir+"/file", nil)), errdefs.ErrInvalid, "a file")
	opened(t, filepath.Join(dir, "other"))
	fails(t, second(blockdev.OpenOrAwait(t.Context(), "bad", "file://"+dir+"/other", nil)), errdefs.ErrInUse, "a pool of another process")
}

// TestLVMComesLater: a group, and a thin pool, whose disk comes later than the driver; what is on
// other disks is served meanwhile.
func TestLVMComesLater(t *testing.T) {
	group := drivertest.NewGroup(t, 64*mib, 64*mib)
	drivertest.Run(t, "lvcreate", "-q", "--type", "thin-pool", "-L", "48M", "--poolmetadatasize", "4M", "--poolmetadataspare", "n", "-n", "tp", group.Name, group.Devices[1])
	other := drivertest.NewGroup(t, 64*mib)
	urls := map[string]string{"linear": group.URL() + "?reservePercent=0", "thin": group.URL() + "/tp?reservePercent=0", "other": other.URL() + "?reservePercent=0"}
	refs := map[string]blockdev.Ref{"linear": vol("a"), "thin": vol("b"), "other": vol("c")}
	bytes := marked("a", 8*mib)
	for name, url := range urls {
		f := &lvmFixture{T: t, url: url, pool: openURL(t, url)}
		f.make(refs[name], 16*mib)
		f.write(refs[name], 0, bytes)
		must(t, f.pool.Close())
	}

	drivertest.Run(t, "vgchange", "-q", "-an", group.Name, other.Name)
	disks := map[string]string{}
	for _, disk := range []string{group.Devices[1], other.Devices[0]} {
		disks[disk] = drivertest.Run(t, "losetup", "-n", "-O", "BACK-FILE", disk)
		drivertest.Run(t, "losetup", "-d", disk)
	}
	pools := map[string]*lvmFixture{}
	for name, url := range urls {
		pool, err := blockdev.OpenOrAwait(t.Context(), name, url, nil)
		must(t, err)
		f := &lvmFixture{T: t, group: group, url: url, pool: pool}
		if name == "other" {
			f.group = other
		}
		t.Cleanup(func() { f.clear() })
		pools[name] = f
	}
	pools["linear"].holds(refs["linear"], 0, bytes)
	for _, name := range []string{"thin", "other"} {
		says(t, second(pools[name].pool.Get(t.Context(), refs[name])), errdefs.ErrUnavailable, name)
		pools[name].poolIll("PoolMissing")
	}
	for disk, image := range disks {
		drivertest.Run(t, "losetup", disk, image)
	}
	for name, f := range pools {
		// What was seen is good for some seconds.
		for deadline := time.Now().Add(time.Minute); len(f.pool.PoolHealth(t.Context())) > 0 && time.Now().Before(deadline); {
			time.Sleep(100 * time.Millisecond)
		}
		f.holds(refs[name], 0, bytes)
		f.poolIll()
		must(t, f.pool.Delete(t.Context(), refs[name]))
	}
}
