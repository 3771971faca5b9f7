package filepool_test

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pools"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// idOf returns the identity of a pool.
func idOf(t testing.TB, pool blockdev.Pool) string {
	t.Helper()
	is, ok := blockdev.As[blockdev.Identified](pool)
	if !ok || is.ID() == "" {
		t.Fatalf("the pool has no identity (%v)", ok)
	}
	return is.ID()
}

// contents returns the names in a directory.
func contents(t testing.TB, dir string) string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	check.OK(t, err)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return strings.Join(names, " ")
}

// refuses checks that no pool can be opened at a place, that the error says why, and that nothing is made there.
func refuses(t *testing.T, dir, url, why string) {
	t.Helper()
	before := ""
	_, err := os.Stat(dir)
	if there := err == nil; there {
		before = contents(t, dir)
	}
	pool, err := pools.Open(t.Context(), "test", url)
	if err == nil {
		check.OK(t, pool.Close())
	}
	pooltest.Fails(t, err, errdefs.ErrUnavailable, "Open of "+url)
	if !strings.Contains(err.Error(), why) {
		t.Errorf("Open of %s: %v; want %q", url, err, why)
	}
	if _, err := os.Stat(dir); err != nil {
		if !errors.Is(err, os.ErrNotExist) || before != "" {
			t.Error(err)
		}
	} else if after := contents(t, dir); after != before {
		t.Errorf("%s held %q, and holds %q", dir, before, after)
	}
}

// begins checks that a place becomes a pool, and is the same pool when it is opened again.
func begins(t *testing.T, dir, options string) {
	t.Helper()
	url := "file://" + dir + "?reservePercent=0" + options
	pool, err := pools.Open(t.Context(), "test", url)
	check.OK(t, err)
	id := idOf(t, pool)
	if !regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`).MatchString(id) {
		t.Errorf("identity %q is no UUID", id)
	}
	check.OK(t, pool.Close())
	for _, options := range []string{"", "&create=0", "&create=1"} {
		pool, err := pools.Open(t.Context(), "other", "file://"+dir+"?reservePercent=0"+options)
		check.OK(t, err)
		if again := idOf(t, pool); again != id {
			t.Errorf("identity %s became %s", id, again)
		}
		check.OK(t, pool.Close())
	}
}

// TestPlaceOfPool: what becomes a pool by default, and what may be the place of a missing disk.
func TestPlaceOfPool(t *testing.T) {
	drivertest.NeedRoot(t)
	for name, c := range map[string]struct {
		make func(t *testing.T, base string) (dir string)
		why  string // why it does not become a pool; empty: it does
	}{
		"not there": {func(_ *testing.T, base string) string { return filepath.Join(base, "pool") }, ""},
		"begun": {func(t *testing.T, base string) string {
			check.OK(t, os.MkdirAll(filepath.Join(base, ".pool.new-pool", "volumes"), 0o700))
			return filepath.Join(base, "pool")
		}, ""},
		"empty": {func(t *testing.T, base string) string {
			check.OK(t, os.Mkdir(filepath.Join(base, "pool"), 0o700))
			return filepath.Join(base, "pool")
		}, "a disk that is not mounted"},
		"in an empty one": {func(t *testing.T, base string) string {
			check.OK(t, os.Mkdir(filepath.Join(base, "disk"), 0o700))
			return filepath.Join(base, "disk", "pool")
		}, "a disk that is not mounted"},
		"in none": {func(_ *testing.T, base string) string { return filepath.Join(base, "disk", "pool") }, "no such file"},
		"of others": {func(t *testing.T, base string) string {
			check.OK(t, os.MkdirAll(filepath.Join(base, "pool", "photos"), 0o700))
			return filepath.Join(base, "pool")
		}, "something else"},
		"link to nothing": {func(t *testing.T, base string) string {
			check.OK(t, os.Symlink(filepath.Join(base, "disk", "pool"), filepath.Join(base, "pool")))
			return filepath.Join(base, "pool")
		}, "link"},
		"new ext4":  {func(t *testing.T, _ string) string { return mountNew(t, "ext4") }, ""},
		"new xfs":   {func(t *testing.T, _ string) string { return mountNew(t, "xfs") }, ""},
		"new btrfs": {func(t *testing.T, _ string) string { return mountNew(t, "btrfs") }, ""},
		"in a new xfs": {func(t *testing.T, _ string) string {
			return filepath.Join(mountNew(t, "xfs"), "pool")
		}, ""},
		"new btrfs subvolume": {func(t *testing.T, base string) string {
			mnt := mountNew(t, "btrfs")
			run(t, "btrfs", "-q", "subvolume", "create", mnt+"/sub")
			return bound(t, mnt+"/sub", base)
		}, ""},
		"link to a new xfs": {func(t *testing.T, base string) string {
			check.OK(t, os.Symlink(mountNew(t, "xfs"), filepath.Join(base, "pool")))
			return filepath.Join(base, "pool")
		}, ""},
		// A directory as a container sees one of its machine.
		"bound, empty": {func(t *testing.T, base string) string {
			check.OK(t, os.Mkdir(filepath.Join(base, "empty"), 0o700))
			return bound(t, filepath.Join(base, "empty"), base)
		}, "a disk that is not mounted"},
		"bound, new xfs": {func(t *testing.T, base string) string { return bound(t, mountNew(t, "xfs"), base) }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			dir := c.make(t, drivertest.Dir(t))
			refuses(t, dir, "file://"+dir+"?create=0", "create=0")
			if c.why == "" {
				begins(t, dir, "")
				return
			}
			refuses(t, dir, "file://"+dir, c.why)
			if name != "in none" && name != "link to nothing" {
				begins(t, dir, "&create=1")
			}
		})
	}
}

// bound bind-mounts a directory at another one for the time of a test.
func bound(t *testing.T, dir, base string) string {
	t.Helper()
	at := filepath.Join(base, "bound")
	check.OK(t, os.Mkdir(at, 0o700))
	check.OK(t, unix.Mount(dir, at, "", unix.MS_BIND, ""))
	t.Cleanup(func() { drivertest.Unmount(t, at) })
	return at
}

// TestMountedOver: a mount at a directory of a pool hides what the pool has there. No object counts as gone, and none is made anew.
func TestMountedOver(t *testing.T) {
	drivertest.NeedRoot(t)
	for _, hidden := range []string{"volumes", "snapshots"} {
		for _, start := range []bool{false, true} {
			t.Run(fmt.Sprint(hidden, start), func(t *testing.T) {
				dir := filepath.Join(drivertest.Dir(t), "pool")
				url := "file://" + dir + "?reservePercent=0"
				pool, err := pools.OpenLazy(t.Context(), "test", url, nil)
				check.OK(t, err)
				t.Cleanup(func() { check.OK(t, pool.Close()) })
				volume, copied := pooltest.Vol("a"), pooltest.Snap("b")
				pooltest.Create(t, pool, blockdev.Spec{Ref: volume, Name: "a", Size: pooltest.MiB})
				pooltest.Create(t, pool, blockdev.Spec{Ref: copied, Name: "b", Size: pooltest.MiB, Origin: volume})
				has := func() string { return contents(t, dir+"/volumes") + ", " + contents(t, dir+"/snapshots") }
				before := has()
				if start {
					check.OK(t, pool.Close())
				}
				over := filepath.Join(dir, hidden)
				check.OK(t, unix.Mount("tmpfs", over, "tmpfs", 0, ""))
				t.Cleanup(func() { _ = unix.Unmount(over, unix.MNT_DETACH) })
				if said := failures(t, dir); len(said) != 1 || !strings.Contains(said[0], "tmpfs (tmpfs) is mounted at "+over) || !strings.Contains(said[0], "umount "+over) {
					t.Errorf("doctor: %q", said)
				}
				if start {
					pool, err = pools.OpenLazy(t.Context(), "test", url, nil)
					check.OK(t, err)
				}
				ref := volume
				if hidden == "snapshots" {
					ref = copied
				}
				for range 2 {
					pooltest.Fails(t, pooltest.Second(pool.Capacity(t.Context())), errdefs.ErrUnavailable, "Capacity")
					pooltest.Fails(t, pooltest.Second(pool.Create(t.Context(), blockdev.Spec{Ref: ref, Name: ref.Key[:1], Size: pooltest.MiB})), errdefs.ErrUnavailable, "Create of what is there")
					pooltest.Fails(t, pooltest.Second(pool.Create(t.Context(), blockdev.Spec{Ref: pooltest.Vol("c"), Name: "c", Size: pooltest.MiB})), errdefs.ErrUnavailable, "Create")
					pooltest.Fails(t, pooltest.Second(pool.SetLabels(t.Context(), ref, func(l map[string]string) error { l["key"] = "value"; return nil })), errdefs.ErrUnavailable, "SetLabels")
					pooltest.Fails(t, pool.Delete(t.Context(), ref), errdefs.ErrUnavailable, "Delete")
				}
				if problems := pool.PoolHealth(t.Context()); len(problems) != 1 || problems[0].Severity != blockdev.Inaccessible || !strings.Contains(problems[0].Message, hidden) {
					t.Errorf("the pool's health: %v", problems)
				}
				drivertest.Unmount(t, over)
				for end := time.Now().Add(time.Minute); pooltest.Second(pool.Capacity(t.Context())) != nil && time.Now().Before(end); {
					time.Sleep(10 * time.Millisecond)
				}
				if after := has(); after != before {
					t.Errorf("the pool has %s; it had %s", after, before)
				}
				check.OK(t, errors.Join(pool.Delete(t.Context(), copied), pool.Delete(t.Context(), volume)))
			})
		}
	}
}

// TestMountedOverItself: a directory of a pool that is a mount of itself, as systemd's ReadWritePaths= makes it, hides nothing: the pool is used.
func TestMountedOverItself(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := filepath.Join(drivertest.Dir(t), "pool")
	pool := pooltest.OpenFiles(t, dir)
	kept := pooltest.Vol("a")
	pooltest.Create(t, pool, blockdev.Spec{Ref: kept, Name: "a", Size: pooltest.MiB})
	check.OK(t, pool.Close())
	for _, part := range []string{"volumes", "snapshots"} {
		at := filepath.Join(dir, part)
		check.OK(t, unix.Mount(at, at, "", unix.MS_BIND, ""))
		t.Cleanup(func() { drivertest.Unmount(t, at) })
	}
	if said := failures(t, dir); len(said) > 0 {
		t.Errorf("doctor: %q", said)
	}
	pool, err := pools.Open(t.Context(), "test", "file://"+dir+"?reservePercent=0")
	check.OK(t, err)
	t.Cleanup(func() { check.OK(t, pool.Close()) })
	check.OK(t, pooltest.Second(pool.Create(t.Context(), blockdev.Spec{Ref: pooltest.Snap("b"), Name: "b", Size: pooltest.MiB, Origin: kept})))
	check.OK(t, errors.Join(pool.Delete(t.Context(), pooltest.Snap("b")), pool.Delete(t.Context(), kept)))
}

// failures are those that doctor finds with a pool.
func failures(t *testing.T, dir string) (said []string) {
	t.Helper()
	location, err := filepool.Parse(&url.URL{Scheme: "file", Path: dir})
	check.OK(t, err)
	location.Examine(t.Context(), func(verdict blockdev.Verdict, message string) {
		if verdict == blockdev.Failure {
			said = append(said, message)
		}
	})
	return said
}

// TestKnownPool: a caller that remembers a pool decides whether one is made, and does not get another one.
func TestKnownPool(t *testing.T) {
	drivertest.NeedRoot(t)
	base := drivertest.Dir(t)
	knows := func(id string, err error) blockdev.Known {
		return func(context.Context) (string, error) { return id, err }
	}
	none, away := knows("", nil), knows("", errors.New("no API server"))
	try := func(dir, options string, known blockdev.Known) (id string, why string) {
		t.Helper()
		pool, err := pools.OpenLazy(t.Context(), "test", "file://"+dir+"?reservePercent=0"+options, known)
		check.OK(t, err)
		defer func() { check.OK(t, pool.Close()) }()
		if blockdev.Unwrap(pool) == nil {
			_, err := pool.Capacity(t.Context())
			pooltest.Fails(t, err, errdefs.ErrUnavailable, "Capacity")
			return "", err.Error()
		}
		return idOf(t, pool), ""
	}
	missing := func(dir, options string, known blockdev.Known, want string) {
		t.Helper()
		before := contents(t, dir)
		if id, why := try(dir, options, known); id != "" || !strings.Contains(why, want) {
			t.Errorf("pool %q, %s; want %q", id, why, want)
		}
		if after := contents(t, dir); after != before {
			t.Errorf("%s held %q, and holds %q", dir, before, after)
		}
	}
	// The kubelet makes the directory.
	dir, other := filepath.Join(base, "pool"), filepath.Join(base, "other")
	check.OK(t, os.Mkdir(dir, 0o700))
	check.OK(t, os.Mkdir(other, 0o700))
	for _, options := range []string{"", "&create=1", "&create=0"} {
		missing(dir, options, away, "no ")
		missing(dir, options, knows("remembered", nil), "no pool")
	}
	missing(dir, "&create=0", none, "create=0")
	id, why := try(dir, "", none)
	if id == "" {
		t.Fatal(why)
	}
	for _, known := range []blockdev.Known{none, away, knows(id, nil), nil} {
		if again, why := try(dir, "", known); again != id {
			t.Errorf("the pool %s is %q now: %s", id, again, why)
		}
	}
	second, why := try(other, "", none)
	if second == "" || second == id {
		t.Fatalf("pools %s and %q: %s", id, second, why)
	}
	missing(dir, "", knows(second, nil), "another pool is here")

	// Somebody removed the file with its identity.
	check.OK(t, os.Remove(filepath.Join(dir, "pool")))
	missing(dir, "", knows(id, nil), "what is here does not say which pool it is: its file named pool is missing; the pool that is to be here has the identity "+id)
	if again, why := try(dir, "", none); again == "" || again == id {
		t.Errorf("a pool that may have another identity has %q: %s", again, why)
	}
}

// TestIdentityFile: a pool of an older driver gets an identity, which stays. One copy in the file is enough. A pool without either, or of a newer version,
// is not changed.
func TestIdentityFile(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := filepath.Join(drivertest.Dir(t), "pool")
	file := filepath.Join(dir, "pool")
	pool := pooltest.OpenFiles(t, dir)
	id := idOf(t, pool)
	check.OK(t, pool.Close())
	whole, err := os.ReadFile(file)
	check.OK(t, err)
	used := len(strings.TrimRight(string(whole), "\x00")) - 4096
	for at := range whole {
		if at%4096 > used {
			continue
		}
		bad := strings.Clone(string(whole[:at])) + string(whole[at]^4) + string(whole[at+1:])
		check.OK(t, os.WriteFile(file, []byte(bad), 0o600))
		pool := pooltest.OpenFiles(t, dir)
		if now := idOf(t, pool); now != id {
			t.Fatalf("byte %d: identity %s became %s", at, id, now)
		}
		check.OK(t, pool.Close())
		if now, err := os.ReadFile(file); err != nil || string(now) != string(whole) && at%4096 < used {
			t.Fatalf("byte %d: it was not mended (%v)", at, err)
		}
	}
	refuses := func(content, why string) {
		t.Helper()
		check.OK(t, os.WriteFile(file, []byte(content), 0o600))
		before := contents(t, dir)
		pool, err := pools.Open(t.Context(), "test", "file://"+dir)
		if err == nil {
			check.OK(t, pool.Close())
		}
		if err == nil || !strings.Contains(err.Error(), why) {
			t.Fatalf("%q: %v; want %q", content, err, why)
		}
		if now, err := os.ReadFile(file); err != nil || string(now) != content || contents(t, dir) != before {
			t.Errorf("something was changed: %v", err)
		}
	}
	refuses("", "no header")
	refuses(strings.Repeat("\xff", len(whole)), "no header")
	newer := filepool.Frame("ashlar-pool", 3, 1, `{"id":"`+id+`","shape":"round"}`+"\n")
	refuses(newer, "version 3")
	refuses(newer+string(whole[len(newer):]), "version 3") // the other copy is older

	check.OK(t, os.Remove(file))
	check.OK(t, os.Remove(filepath.Join(dir, "lock")))
	pool = pooltest.OpenFiles(t, dir)
	if idOf(t, pool) == id {
		t.Error("an identity came back")
	}
	check.OK(t, pool.Close())
}
