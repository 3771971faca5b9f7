package life

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"unsafe"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/ioctl"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/mount"
)

// TestReaderSeesWriter: a target for reading shows what was written and synced at another target
// of the volume, at once, also to who has had it open all the time; and it cannot be written to.
func TestReaderSeesWriter(t *testing.T) {
	for _, kind := range pools {
		t.Run(kind, func(t *testing.T) {
			d := startOn(t, kind)
			v := d.made(co.Request("raw", block, smallest[block]))
			target, reader := v.running(), v.Target("reader")
			for range 2 {
				check.OK(t, v.publish(reader, true))
			}
			check.Code(t, v.publish(reader, false), codes.AlreadyExists, "read-only true")
			check.Code(t, v.publish(target, true), codes.AlreadyExists, "read-only false")
			f, err := os.Open(reader)
			check.OK(t, err)
			defer f.Close()
			have := make([]byte, dataSize)
			for n := uint64(1); n < 5; n++ {
				write(t, target, n)
				holds(t, reader, n)
				if _, err := f.ReadAt(have, 4*miB); err != nil || string(have) != string(written(n).Bytes()) {
					t.Fatalf("after write %d, who has it open for reading does not see it: %v", n, err)
				}
			}
			refusesWrites(t, reader)
			if f, err := os.OpenFile(fmt.Sprint("/proc/self/fd/", f.Fd()), os.O_RDWR, 0); !errors.Is(err, unix.EACCES) {
				t.Errorf("opened again for writing: %v, %v", f, err)
			}
			for _, change := range []error{os.Chmod(reader, 0o666), os.Chown(reader, 1, 1)} {
				if change == nil {
					t.Error("the mode or owner of the target for reading can be changed")
				}
			}
			check.OK(t, f.Close())
			boundAsByTheKubelet(t, reader, 4)
			if err := os.Remove(reader + ".node"); err == nil { // before Linux 6.3, as older drivers did
				check.OK(t, v.publish(reader, true))
				boundAsByTheKubelet(t, reader, 4)
			}

			// The kubelet has a loop device of its own over it meanwhile.
			loop := drivertest.PlainLoop(t, reader)
			d = d.restart()
			v = d.volume(v.ID, v.Name, v.Capability)
			check.OK(t, v.publish(reader, true))
			check.OK(t, v.publish(target, false))
			write(t, target, 9)
			holds(t, reader, 9)
			drivertest.Run(t, "blockdev", "--setrw", loop) // the mode would stay with the number, which is anybody's then
			drivertest.Run(t, "losetup", "-d", loop)
			check.OK(t, v.down(reader, target))
			absent(t, reader)
			absent(t, reader+".node")
			d.nothingLeft()
		})
	}
}

// boundAsByTheKubelet: what is published can be bound to another path, and read there, and not be written.
func boundAsByTheKubelet(t *testing.T, published string, seed uint64) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "pod")
	check.OK(t, os.WriteFile(path, nil, 0o600))
	check.OK(t, mount.Bind(published, path, false))
	defer func() { check.OK(t, mount.Unmount(path)) }()
	holds(t, path, seed)
	refusesWrites(t, path)
}

// TestNotSynced: what was written to a raw volume, and not synced, is there when it is staged again.
func TestNotSynced(t *testing.T) {
	for _, pool := range pools {
		t.Run(pool, func(t *testing.T) {
			d := startOn(t, pool)
			v := d.made(co.Request("volume", block, smallest[block]))
			target := v.running()
			f, err := os.OpenFile(target, os.O_WRONLY, 0)
			check.OK(t, err)
			want, have := written(1).Bytes(), make([]byte, dataSize)
			_, err = f.Write(want)
			check.OK(t, errors.Join(err, f.Close()))
			check.OK(t, v.unpublish(target))
			check.OK(t, v.unstage())
			check.OK(t, v.stage())
			check.OK(t, v.publish(target, false))
			f, err = os.Open(target)
			check.OK(t, err)
			_, err = io.ReadFull(f, have)
			check.OK(t, errors.Join(err, f.Close()))
			if !bytes.Equal(have, want) {
				t.Error("it is lost")
			}
			check.OK(t, v.down(target))
			d.nothingLeft()
		})
	}
}

// TestReadOnlyThenWritten: a volume that is staged for reading, and then published for writing, is
// its user's from then on, and is not formatted any more.
func TestReadOnlyThenWritten(t *testing.T) {
	for _, kind := range pools {
		t.Run(kind, func(t *testing.T) {
			d := startOn(t, kind)
			v := d.made(co.Request("raw", block, smallest["ext4"]))
			check.OK(t, v.claim())
			read := d.volume(v.ID, v.Name, co.Capability(block, readerOnly))
			check.OK(t, read.stage())
			reader, target := v.Target("reader"), v.Target("pod")
			check.OK(t, read.publish(reader, true))
			refusesWrites(t, reader)
			refusesWritesInAContainer(t, reader)
			// Until now nobody could write to it.
			check.OK(t, v.unpublish(reader))
			check.OK(t, v.unstage())
			mounted := d.volume(v.ID, v.Name, co.Capability("ext4", co.MultiWriter))

			check.OK(t, read.stage())
			check.OK(t, v.publish(target, false))
			write(t, target, 1)
			check.OK(t, v.unpublish(target))
			check.OK(t, v.unstage())
			check.Code(t, mounted.stage(), codes.FailedPrecondition, "raw block device")
			check.OK(t, v.stage())
			check.OK(t, v.publish(target, false))
			holds(t, target, 1)
			check.OK(t, v.down(target))
			d.nothingLeft()
		})
	}
}

// refusesWritesInAContainer: nobody writes to what is published for reading by a node of the container's own either, as the runtime makes it. The kubelet
// has the runtime allow writes (mrw), unless the pod says readOnly, for a claim that is ReadOnlyMany too. Without a device mapper nothing keeps them back.
func refusesWritesInAContainer(t *testing.T, published string) {
	t.Helper()
	if _, err := dm.Targets(); err != nil {
		return
	}
	var st unix.Stat_t
	check.OK(t, unix.Stat(published, &st))
	node := filepath.Join(t.TempDir(), "node")
	check.OK(t, unix.Mknod(node, unix.S_IFBLK|0o600, int(st.Rdev)))
	refusesWrites(t, node)
	check.OK(t, os.Remove(node))
}

// TestDeviceChanged: whatever a pod makes of its loop device, the next pod of the volume has it as
// it should be, health says so until then, and the volume goes as any other. Over a device mapper a pod can
// change nothing.
func TestDeviceChanged(t *testing.T) {
	for name, change := range map[string]func(f *os.File, info *unix.LoopInfo64) error{
		"cleared":   func(f *os.File, _ *unix.LoopInfo64) error { return second(ioctl.Value(f, unix.LOOP_CLR_FD, 0)) },
		"to stay":   setStatus(func(info *unix.LoopInfo64) { info.Flags &^= unix.LO_FLAGS_AUTOCLEAR }),
		"renamed":   setStatus(func(info *unix.LoopInfo64) { copy(info.File_name[:], "another\x00") }),
		"moved":     setStatus(func(info *unix.LoopInfo64) { info.Offset = 4096 }),
		"cut short": setStatus(func(info *unix.LoopInfo64) { info.Sizelimit = miB }),
		"other sector": func(f *os.File, _ *unix.LoopInfo64) error {
			return second(ioctl.Value(f, unix.LOOP_SET_BLOCK_SIZE, 4096))
		},
		"cached": func(f *os.File, _ *unix.LoopInfo64) error { return second(ioctl.Value(f, unix.LOOP_SET_DIRECT_IO, 0)) },
	} {
		t.Run(name, func(t *testing.T) {
			d := start(t, drivertest.Options{})
			v := d.made(co.Request("raw", block, smallest[block]))
			target := v.running()
			write(t, target, 1)
			n, mapped := loopBelow(t, target)
			before := settings(t, n)
			tamper := func() {
				t.Helper()
				var failed error
				inPod(t, func() {
					f, err := os.OpenFile(target, os.O_RDWR, 0)
					if err != nil {
						failed = err
						return
					}
					var info unix.LoopInfo64
					if err = ioctl.Pointer(f, unix.LOOP_GET_STATUS64, unsafe.Pointer(&info)); err == nil || mapped {
						err = change(f, &info)
					}
					failed = errors.Join(err, f.Close())
				})
				if (failed != nil) != mapped {
					t.Fatalf("the pod's ioctl: %v; over a device mapper %v", failed, mapped)
				}
			}
			right := func(when string) {
				t.Helper()
				if now, _ := loopBelow(t, target); now != n {
					t.Fatalf("%s: it is loop%d, was loop%d", when, now, n)
				}
				if have := settings(t, n); have != before {
					t.Errorf("%s: %q, was %q", when, have, before)
				}
				expect(t, v.problems())
				holds(t, target, 1)
			}

			tamper()
			if want := map[string]bool{"moved": true, "cut short": true, "other sector": true}[name] && !mapped; want {
				expect(t, v.problems(), "DEGRADED DeviceChanged")
			}
			second := v.Target("second")
			check.OK(t, v.publish(second, false))
			right("published again")
			tamper()
			d = d.restart()
			v = d.volume(v.ID, v.Name, v.Capability)
			right("after a restart")
			tamper()
			check.OK(t, v.expand(2*smallest[block]))
			if size := drivertest.Run(t, "blockdev", "--getsize64", target); strings.TrimSpace(size) != strconv.Itoa(int(2*smallest[block])) {
				t.Errorf("after growth it has %s bytes", size)
			}
			tamper()
			check.OK(t, v.down(target, second))
			d.nothingLeft()
		})
	}
}

func setStatus(change func(*unix.LoopInfo64)) func(*os.File, *unix.LoopInfo64) error {
	return func(f *os.File, info *unix.LoopInfo64) error {
		change(info)
		return ioctl.Pointer(f, unix.LOOP_SET_STATUS64, unsafe.Pointer(info))
	}
}

// settings of a loop device, as sysfs has them.
func settings(t testing.TB, n int) (all string) {
	t.Helper()
	for _, name := range []string{"loop/backing_file", "loop/offset", "loop/sizelimit", "loop/autoclear", "loop/dio", "queue/logical_block_size", "ro"} {
		b, err := os.ReadFile(filepath.Join("/sys/block", fmt.Sprint("loop", n), name))
		check.OK(t, err)
		all += filepath.Base(name) + "=" + strings.TrimSpace(string(b)) + " "
	}
	return all
}

// TestSector: a volume has the sectors that it was made with, on each attach and in each copy,
// also when its blocks are shared.
func TestSector(t *testing.T) {
	for _, kind := range pools {
		t.Run(kind, func(t *testing.T) {
			d := startOn(t, kind)
			sector := func(v *vol) string {
				t.Helper()
				return strings.TrimSpace(drivertest.Run(t, "blockdev", "--getss", v.running()))
			}
			v := d.made(co.Request("raw", block, smallest[block]))
			want := sector(v)
			write(t, v.Target("pod"), 1)
			s, err := v.snapshot("cut")
			check.OK(t, err)
			check.OK(t, v.unpublish(v.Target("pod")))
			check.OK(t, v.unstage())
			copies := []*vol{v, d.made(co.FromSnapshot(co.Request("restored", block, smallest[block]), s.GetSnapshotId())), d.made(co.FromVolume(co.Request("clone", block, smallest[block]), v.ID))}
			d = d.restart()
			for _, c := range copies {
				c = d.volume(c.ID, c.Name, c.Capability)
				if have := sector(c); have != want {
					t.Errorf("%s has sectors of %s bytes, its first one %s", c.Name, have, want)
				}
				holds(t, c.Target("pod"), 1)
				write(t, c.Target("pod"), 2)
				holds(t, c.Target("pod"), 2)
				check.OK(t, c.down(c.Target("pod")))
			}
			check.OK(t, d.deleteSnapshot(s.GetSnapshotId()))
			d.nothingLeft()
		})
	}
}

// TestRawUsage: of a raw volume it is told how much of it has space.
func TestRawUsage(t *testing.T) {
	for _, kind := range pools {
		for _, provisioning := range provisionings(kind) {
			t.Run(kind+" "+provisioning, func(t *testing.T) {
				d := startOn(t, kind)
				r := co.Request("raw", block, smallest[block])
				r.Parameters = map[string]string{"provisioning": provisioning}
				v := d.made(r)
				target := v.running()
				least, most := v.usage(target).GetTotal(), v.usage(target).GetTotal()
				if provisioning == "thin" {
					least, most = 0, 0
				}
				for _, written := range []int64{0, dataSize} {
					if written > 0 {
						write(t, target, 1)
					}
					if provisioning == "thin" {
						least, most = written, written+miB
					}
					u := v.usage(target)
					if u.GetUsed() < least || u.GetUsed() > most || u.GetAvailable() != u.GetTotal()-u.GetUsed() || u.GetTotal() < smallest[block] {
						t.Errorf("after %d bytes were written: %v", written, u)
					}
				}
				check.OK(t, v.down(target))
				d.nothingLeft()
			})
		}
	}
}

// TestStagedRaw: a raw volume is where it is staged, too, whether or not the caller says that it is raw.
func TestStagedRaw(t *testing.T) {
	d := startOn(t, pools[0])
	v := d.made(co.Request("volume", block, smallest[block]))
	check.OK(t, v.claim())
	check.OK(t, v.stage())
	if size := v.usage(v.Staging).GetTotal(); size != smallest[block] {
		t.Errorf("it has %d bytes", size)
	}
	check.OK(t, v.expand(2*smallest[block]))
	response, err := v.NodeExpandVolume(t.Context(), &csi.NodeExpandVolumeRequest{VolumeId: v.ID, VolumePath: v.Staging})
	check.OK(t, err)
	if size := response.GetCapacityBytes(); size != 2*smallest[block] {
		t.Errorf("it has %d bytes", size)
	}
	check.OK(t, v.unstage())
	_, err = v.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: v.ID, VolumePath: v.Staging})
	check.Code(t, err, codes.NotFound, v.Staging)
	check.OK(t, v.release())
	check.OK(t, v.delete())
	d.nothingLeft()
}
