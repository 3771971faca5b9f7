package lazy_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lazy"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pools"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// TestLazy: calls of a pool that is not there try to open it, not too often. It is used only after OnOpen's function.
func TestLazy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		disk := memory.NewDisk(1 << 30)
		var there bool
		var opened, prepared int
		broken := errors.New("broken")
		fail := broken
		a := lazy.New("late", fmt.Errorf("%w: no disk", errdefs.ErrUnavailable), func(context.Context) (blockdev.Pool, error) {
			if opened++; !there {
				return nil, errors.New("still no disk")
			}
			return disk.Open("late", nil), nil
		})
		a.OnOpen(ctx, func(ctx context.Context, pool blockdev.Pool) error {
			prepared++
			if _, err := pool.Capacity(ctx); err != nil {
				return err
			}
			return fail
		})
		missing := func(why string) {
			t.Helper()
			if _, err := a.Get(ctx, pooltest.Vol("a")); !errors.Is(err, errdefs.ErrUnavailable) || !strings.Contains(err.Error(), why) || !strings.Contains(err.Error(), "late") {
				t.Errorf("Get of a pool that is not there: %v; want %q", err, why)
			}
			if problems := a.PoolHealth(ctx); len(problems) != 1 || problems[0].Severity != blockdev.Inaccessible || !strings.Contains(problems[0].Message, why) ||
				strings.Contains(problems[0].Message, errdefs.ErrUnavailable.Error()) { // the reason says so already
				t.Errorf("health of a pool that is not there: %v; want %q", problems, why)
			}
			if problems, err := a.Health(ctx, pooltest.Vol("a")); err != nil || len(problems) != 1 {
				t.Errorf("health in a pool that is not there: %v, %v", problems, err)
			}
			if _, ok := blockdev.As[blockdev.Differ](a); ok || blockdev.Unwrap(a) != nil {
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
		if _, ok := blockdev.As[blockdev.Differ](a); !ok || blockdev.Unwrap(a) == nil {
			t.Error("it is not there")
		}
		if _, err := a.Get(ctx, pooltest.Vol("a")); !errors.Is(err, errdefs.ErrNotFound) {
			t.Errorf("Get of a pool that came: %v", err)
		}
		check.OK(t, a.Close())
	})
}

// TestHangs: a pool whose storage hangs holds up calls for openPatience, and then none. It is there as soon as the storage answers.
func TestHangs(t *testing.T) {
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
				a := lazy.New("slow", errors.New("no disk"), func(context.Context) (blockdev.Pool, error) {
					opened++
					hang("open")
					return disk.Open("slow", nil), nil
				})
				a.OnOpen(ctx, func(context.Context, blockdev.Pool) error { hang("then"); return nil })
				time.Sleep(time.Minute)
				for i, within := range []time.Duration{11 * time.Second, 0, 0} {
					begun := time.Now()
					_, err := a.Get(ctx, pooltest.Vol("a"))
					if took := time.Since(begun); !errors.Is(err, errdefs.ErrUnavailable) || !strings.Contains(err.Error(), "does not answer") || took > within {
						t.Errorf("call %d: %v, after %s", i, err, took)
					}
					if problems := a.PoolHealth(ctx); len(problems) != 1 || problems[0].Severity != blockdev.Inaccessible {
						t.Errorf("health of a pool that hangs: %v", problems)
					}
				}
				short, cancel := context.WithTimeout(ctx, time.Second)
				defer cancel()
				if _, err := a.Get(short, pooltest.Vol("a")); err == nil {
					t.Error("it is there")
				}
				close(answers)
				synctest.Wait()
				if _, err := a.Get(ctx, pooltest.Vol("a")); !errors.Is(err, errdefs.ErrNotFound) || opened != 1 {
					t.Errorf("Get of a pool that answers: %v, after it was opened %d times", err, opened)
				}
				check.OK(t, a.Close())
			})
		})
	}
}

// TestFails: OnOpen's function fails for a pool that is there. Then the pool is not open.
func TestFails(t *testing.T) {
	dir := t.TempDir()
	pool, err := pools.OpenLazy(t.Context(), "bad", "file://"+dir+"?create=1", nil)
	check.OK(t, err)
	defer func() { check.OK(t, pool.Close()) }()
	if blockdev.Unwrap(pool) == nil {
		t.Fatal("it is not there")
	}
	pool.OnOpen(t.Context(), func(context.Context, blockdev.Pool) error { return errors.New("input/output error") })
	_, err = pool.Get(t.Context(), pooltest.Vol("a"))
	pooltest.Fails(t, err, errdefs.ErrUnavailable, "Get")
	if blockdev.Unwrap(pool) != nil || !strings.Contains(err.Error(), "input/output error") {
		t.Errorf("it is there, or says something else: %v", err)
	}
	// Errors that do not pass by themselves are returned at once.
	pooltest.Fails(t, pooltest.Second(pools.OpenLazy(t.Context(), "bad", "file://"+dir+"?create=2", nil)), errdefs.ErrInvalid, "a wrong URL")
	check.OK(t, os.WriteFile(filepath.Join(dir, "file"), nil, 0o600))
	pooltest.Fails(t, pooltest.Second(pools.OpenLazy(t.Context(), "bad", "file://"+dir+"/file", nil)), errdefs.ErrInvalid, "a file")
	pooltest.OpenedFiles(t, filepath.Join(dir, "other"))
	pooltest.Fails(t, pooltest.Second(pools.OpenLazy(t.Context(), "bad", "file://"+dir+"/other", nil)), errdefs.ErrInUse, "a pool of another process")
}
