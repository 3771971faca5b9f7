package lvmpool_test

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lvmpool"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
)

// ranges returns the ranges that a pool reports for target; with the zero Ref as base, those that are allocated.
func ranges(t testing.TB, pool blockdev.Pool, base, target blockdev.Ref, from int64) (have []blockdev.Extent) {
	t.Helper()
	d, ok := blockdev.As[blockdev.Differ](pool)
	if !ok {
		t.Fatal("the pool is no Differ")
	}
	yield := func(e blockdev.Extent) error { have = append(have, e); return nil }
	if base == (blockdev.Ref{}) {
		check.OK(t, d.Allocated(t.Context(), target, from, yield))
	} else {
		check.OK(t, d.Changed(t.Context(), base, target, from, yield))
	}
	return have
}

// heldMetadata reports whether the thin pool has a snapshot of its metadata, and whether the tag says that it is ours.
func (f *lvmFixture) heldMetadata() (held, ours bool) {
	f.Helper()
	name := f.group.Device("tp")
	status := func(device string) string {
		out, _ := exec.Command("dmsetup", "status", device).Output() // only one of the two is there
		return string(out)
	}
	for _, device := range []string{name + "-tpool", name} {
		if fields := strings.Fields(status(device)); len(fields) > 6 && fields[2] == "thin-pool" {
			return fields[6] != "-", strings.Contains(drivertest.Run(f, "lvs", "--noheadings", "-o", "lv_tags", f.group.Name+"/tp"), "ashlar-metadata-snapshot")
		}
	}
	f.Fatal("there is no thin pool")
	return false, false
}

func dmsetup(t testing.TB, argv ...string) string {
	t.Helper()
	return drivertest.Run(t, append([]string{"dmsetup"}, argv...)...)
}

// thinFixture has a thin pool of a size, in bytes.
func thinFixture(t *testing.T, size int64) *lvmFixture {
	f := &lvmFixture{T: t, group: drivertest.NewGroup(t, size+112*pooltest.MiB), thin: true}
	f.url = f.group.ThinPool(t, "tp", "-L", strconv.FormatInt(size, 10)+"b", "--poolmetadatasize", "8M") + "?reservePercent=0"
	f.start()
	return f
}

// TestLVMChanged: between snapshots, a thin volume is written to, discarded and grown. Whatever differs is among the changed ranges, and whatever has data
// among the allocated ones. Ranges that do not fit into memory at once are reported the same.
func TestLVMChanged(t *testing.T) {
	f := thinFixture(t, 400*pooltest.MiB)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	const size, page = 32 * pooltest.MiB, 4096
	v := pooltest.Vol("a")
	f.make(v, size)
	now := int64(size)
	var cuts []blockdev.Ref
	var bytesOf [][]byte
	for round := range 4 {
		f.attached(v, false, func(device string) {
			file, err := os.OpenFile(device, os.O_RDWR|os.O_SYNC, 0)
			check.OK(t, err)
			defer file.Close()
			for range 20 {
				at := random.Int64N(now/page) * page
				n := min(now-at, (1+random.Int64N(100))*page)
				switch random.IntN(4) {
				case 0: // discard whole blocks of the thin pool
					if n = n / (64 << 10) * (64 << 10); n > 0 {
						check.OK(t, unix.Fadvise(int(file.Fd()), 0, 0, unix.FADV_DONTNEED))
						drivertest.Run(t, "blkdiscard", "-o", strconv.FormatInt(at/(64<<10)*(64<<10), 10), "-l", strconv.FormatInt(n, 10), device)
					}
				case 1: // write the same bytes again
					b := make([]byte, n)
					_, err := file.ReadAt(b, at)
					check.OK(t, err)
					_, err = file.WriteAt(b, at)
					check.OK(t, err)
				default:
					b := make([]byte, n)
					for i := range b {
						b[i] = byte(random.Uint32())
					}
					_, err := file.WriteAt(b, at)
					check.OK(t, err)
				}
			}
		})
		if round == 2 {
			_, err := f.pool.Expand(t.Context(), v, size+8*pooltest.MiB)
			check.OK(t, err)
			now = size + 8*pooltest.MiB
		}
		cut := pooltest.Snap(strconv.Itoa(round))
		f.copy(cut, v, now)
		cuts, bytesOf = append(cuts, cut), append(bytesOf, append(f.read(cut, 0, now), make([]byte, size+8*pooltest.MiB-now)...))
		for base := -1; base < round; base++ {
			from, old := blockdev.Ref{}, make([]byte, len(bytesOf[round]))
			if base >= 0 {
				from, old = cuts[base], bytesOf[base]
			}
			have := ranges(t, f.pool, from, cut, 0)
			check.OK(t, inOrder(have, now))
			total := int64(0)
			for _, e := range have {
				total += e.Length
			}
			for at := int64(0); at < now; at += page {
				if !bytes.Equal(old[at:at+page], bytesOf[round][at:at+page]) && !within(have, at) {
					t.Fatalf("from %q to %s: byte %d differs, and is not in %v", from, cut, at, have)
				}
			}
			if total == now && base >= 0 {
				t.Errorf("from %q to %s everything changed", from, cut)
			}
			if base < 0 || base == round-1 {
				few := lvmpool.Few(10)
				again := ranges(t, f.pool, from, cut, 0)
				few()
				if !slices.Equal(again, have) {
					t.Fatalf("from %q to %s in parts: %v, want %v", from, cut, again, have)
				}
			}
			rest := ranges(t, f.pool, from, cut, now/3)
			for _, e := range have {
				if e.Offset >= now/3 && !within(rest, e.Offset) {
					t.Errorf("from %q to %s, from byte %d: %v is not in %v", from, cut, now/3, e, rest)
				}
			}
		}
		if held, ours := f.heldMetadata(); held || ours {
			t.Fatalf("held %v, tagged %v", held, ours)
		}
	}
}

func within(all []blockdev.Extent, at int64) bool {
	return slices.ContainsFunc(all, func(e blockdev.Extent) bool { return e.Offset <= at && at < e.Offset+e.Length })
}

func inOrder(all []blockdev.Extent, size int64) error {
	end := int64(0)
	for _, e := range all {
		if e.Length <= 0 || e.Offset < end || e.Offset+e.Length > size {
			return errors.New("ranges are not in order, or not within the volume")
		}
		end = e.Offset + e.Length
	}
	return nil
}

// TestLVMMetadataLeft: a start releases the snapshot of the metadata that a crash left. One of somebody else stays, and then the volumes are read.
func TestLVMMetadataLeft(t *testing.T) {
	f := thinFixture(t, 400*pooltest.MiB)
	v := pooltest.Vol("a")
	f.make(v, 8*pooltest.MiB)
	f.copy(pooltest.Snap("1"), v, 8*pooltest.MiB)
	f.write(v, 3*pooltest.MiB, marked("new", 4096))
	f.copy(pooltest.Snap("2"), v, 8*pooltest.MiB)
	pool := f.tpool()
	want := ranges(t, f.pool, pooltest.Snap("1"), pooltest.Snap("2"), 0)
	if len(want) != 1 || !within(want, 3*pooltest.MiB) {
		t.Fatalf("%v", want)
	}

	dmsetup(t, "message", pool, "0", "reserve_metadata_snap")
	if have := ranges(t, f.pool, pooltest.Snap("1"), pooltest.Snap("2"), 0); len(have) != 1 || !within(have, 3*pooltest.MiB) {
		t.Errorf("by reading: %v", have)
	}
	if held, ours := f.heldMetadata(); !held || ours {
		t.Errorf("somebody else's: held %v, tagged %v", held, ours)
	}
	f.restart()
	if held, ours := f.heldMetadata(); !held || ours {
		t.Errorf("somebody else's after a start: held %v, tagged %v", held, ours)
	}
	drivertest.Run(t, "lvchange", "-q", "--addtag", "ashlar-metadata-snapshot", f.group.Name+"/tp")
	f.restart()
	if held, ours := f.heldMetadata(); held || ours {
		t.Errorf("ours, after a start: held %v, tagged %v", held, ours)
	}
	drivertest.Run(t, "lvchange", "-q", "--addtag", "ashlar-metadata-snapshot", f.group.Name+"/tp")
	f.restart() // as if the crash had come before the snapshot was made
	if held, ours := f.heldMetadata(); held || ours {
		t.Errorf("only the tag, after a start: held %v, tagged %v", held, ours)
	}
}

// TestLVMChangedWithoutTools: what changed, and what is allocated, does not depend on which thin-provisioning-tools are installed. thin_delta of 1.0.0 to
// 1.0.5 says what the one here says: that of blocks which follow each other all are the same if the first one is.
func TestLVMChangedWithoutTools(t *testing.T) {
	f := thinFixture(t, 400*pooltest.MiB)
	v := pooltest.Vol("a")
	f.make(v, 8*pooltest.MiB)
	f.write(v, 0, marked("old", 8*pooltest.MiB))
	f.copy(pooltest.Snap("1"), v, 8*pooltest.MiB)
	f.write(v, 3*pooltest.MiB, marked("new", 4096))
	f.copy(pooltest.Snap("2"), v, 8*pooltest.MiB)
	const answer = "#!/bin/sh\necho '<superblock uuid=\"\" time=\"2\" transaction=\"3\" data_block_size=\"128\" nr_data_blocks=\"6400\">'\n" +
		"echo '<diff left=\"2\" right=\"3\">'\necho '<same begin=\"0\" length=\"128\"/>'\necho '</diff>'\necho '</superblock>'\n"
	for _, tool := range []string{"thin_delta", "thin_dump"} {
		path := filepath.Join(t.TempDir(), tool)
		check.OK(t, os.WriteFile(path, []byte(answer), 0o755))
		check.OK(t, unix.Mount(path, "/usr/sbin/"+tool, "", unix.MS_BIND, ""))
		t.Cleanup(func() { drivertest.Unmount(t, "/usr/sbin/"+tool) })
	}
	if have := ranges(t, f.pool, pooltest.Snap("1"), pooltest.Snap("2"), 0); len(have) != 1 || !within(have, 3*pooltest.MiB) || have[0].Length > pooltest.MiB {
		t.Errorf("changed: %v", have)
	}
	if have := ranges(t, f.pool, blockdev.Ref{}, pooltest.Snap("2"), 0); !slices.Equal(have, []blockdev.Extent{{Length: 8 * pooltest.MiB}}) {
		t.Errorf("allocated: %v", have)
	}
}

// TestLVMMetadataEnds: a caller that goes, or wants no more ranges, leaves no snapshot of the metadata. Several callers wait for each other.
func TestLVMMetadataEnds(t *testing.T) {
	f := thinFixture(t, 400*pooltest.MiB)
	v := pooltest.Vol("a")
	f.make(v, 8*pooltest.MiB)
	f.write(v, 0, marked("a", pooltest.MiB))
	f.copy(pooltest.Snap("1"), v, 8*pooltest.MiB)
	d, _ := blockdev.As[blockdev.Differ](f.pool)
	enough := errors.New("enough")
	if err := d.Allocated(t.Context(), pooltest.Snap("1"), 0, func(blockdev.Extent) error {
		if held, ours := f.heldMetadata(); held || ours {
			t.Errorf("while the caller takes its time: held %v, tagged %v", held, ours)
		}
		return enough
	}); !errors.Is(err, enough) {
		t.Error(err)
	}
	done := make(chan error)
	for range 4 {
		go func() {
			done <- d.Allocated(t.Context(), pooltest.Snap("1"), 0, func(blockdev.Extent) error { return nil })
		}()
	}
	for range 4 {
		check.OK(t, <-done)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := d.Allocated(ctx, pooltest.Snap("1"), 0, func(blockdev.Extent) error { return nil }); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if held, ours := f.heldMetadata(); held || ours {
		t.Errorf("after the caller went: held %v, tagged %v", held, ours)
	}
}

// BenchmarkLVMChanged: the changes of a thin volume that has 100 GiB, of which 1 % changed, in blocks of 64 KiB. The disk drops its data, as only the
// metadata counts.
func BenchmarkLVMChanged(b *testing.B) {
	const gib, size = int64(1) << 30, int64(100) << 30
	metadata := drivertest.Disk(b, 2*gib)
	sink := drivertest.Disk(b, 16*pooltest.MiB)
	table := func(name, table string) string {
		cmd := exec.Command("dmsetup", "create", name)
		cmd.Stdin, cmd.Env = strings.NewReader(table), append(os.Environ(), "DM_DISABLE_UDEV=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			b.Fatalf("%v: %s", err, out)
		}
		b.Cleanup(func() { drivertest.Run(b, "dmsetup", "remove", "--retry", name) })
		return "/dev/mapper/" + name
	}
	sectors := func(n int64) string { return strconv.FormatInt(n/512, 10) }
	disks := []string{table("ashlar-real", "0 "+sectors(2*gib)+" linear "+metadata+" 0\n"),
		table("ashlar-sink", "0 "+sectors(16*pooltest.MiB)+" linear "+sink+" 0\n"+sectors(16*pooltest.MiB)+" "+sectors(126*gib)+" zero\n")}
	g := drivertest.NewGroupOn(b, disks...)
	drivertest.Run(b, "lvcreate", "-q", "-L", "512M", "-n", "meta", g.Name, disks[0])
	drivertest.Run(b, "lvcreate", "-q", "-L", "125G", "-n", "tp", g.Name, disks[1])
	drivertest.Run(b, "lvconvert", "-q", "-y", "--type", "thin-pool", "--chunksize", "64K", "--poolmetadataspare", "n", "--poolmetadata", g.Name+"/meta", g.Name+"/tp")
	pool := pooltest.OpenURL(b, "lvm://"+g.Name+"/tp?reservePercent=0&overprovision=8")
	v, one, two := pooltest.Vol("a"), pooltest.Snap("1"), pooltest.Snap("2")
	pooltest.Create(b, pool, blockdev.Spec{Ref: v, Size: size})
	write := func(step int64) {
		device, err := pool.Attach(b.Context(), v, blockdev.Attachment{})
		check.OK(b, err)
		defer device.Close()
		file, err := os.OpenFile(device.Path, os.O_WRONLY|unix.O_DIRECT, 0)
		check.OK(b, err)
		defer file.Close()
		memory, err := unix.Mmap(-1, 0, 4<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		check.OK(b, err)
		n := int64(64 << 10)
		if step < 4<<20 {
			n = 4 << 20
		}
		for at := int64(0); at < size; at += max(step, n) {
			_, err := file.WriteAt(memory[:n], at)
			check.OK(b, err)
		}
	}
	write(0)
	pooltest.Create(b, pool, blockdev.Spec{Ref: one, Size: size, Origin: v})
	write(100 * 64 << 10)
	pooltest.Create(b, pool, blockdev.Spec{Ref: two, Size: size, Origin: v})
	b.Cleanup(func() {
		for _, ref := range []blockdev.Ref{two, one, v} {
			check.OK(b, errors.Join(pool.Detach(context.Background(), ref), pool.Delete(context.Background(), ref)))
		}
		check.OK(b, pool.Close())
	})
	for name, base := range map[string]blockdev.Ref{"allocated": {}, "changed": one} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				total := int64(0)
				for _, e := range ranges(b, pool, base, two, 0) {
					total += e.Length
				}
				b.ReportMetric(float64(total)/float64(1<<20), "MiB-listed")
			}
		})
	}
}
