package life

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/ioctl"
)

// inPod runs a function on a thread without any capability, as a container without privileges
// has none.
func inPod(t testing.TB, f func()) {
	t.Helper()
	ended := make(chan error)
	go func() {
		defer close(ended)
		runtime.LockOSThread() // for good: the thread ends with this
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var none [2]unix.CapUserData
		if err := unix.Capset(&header, &none[0]); err != nil {
			ended <- err
			return
		}
		f()
	}()
	check.OK(t, <-ended)
}

// loopRequest tells whether a request is one of loop devices (linux/loop.h).
func loopRequest(request uint) bool { return request>>8 == 0x4c }

// deviceRequests are the ioctls of loop devices, of all block devices (linux/fs.h, blkzoned.h, pr.h,
// blktrace_api.h), the device mapper, SCSI, IDE, CD-ROMs, NVMe, MD and of filesystems.
func deviceRequests() (all []uint) {
	for n := range uint(0x14) {
		all = append(all, 0x4c00|n, 0x4c80|n, 0xc138fd00|n)
	}
	for n := uint(93); n <= 140; n++ {
		all = append(all, 0x1200|n)
		// with an argument to be read, written, or both, of the usual sizes
		for _, size := range []uint{4, 8, 16, 72} {
			for direction := uint(1); direction < 4; direction++ {
				all = append(all, direction<<30|size<<16|0x1200|n)
			}
		}
	}
	for n := uint(200); n <= 207; n++ {
		for _, size := range []uint{4, 8, 16, 24} {
			all = append(all, 1<<30|size<<16|'p'<<8|n)
		}
	}
	for _, group := range []uint{0x0300, 0x2200, 0x5300, 0x0900, 0x4e00} {
		for _, n := range []uint{0x00, 0x01, 0x02, 0x09, 0x1f, 0x28, 0x40, 0x41, 0x43, 0x80, 0x85, 0x86} {
			all = append(all, group|n)
		}
	}
	return append(all, 0xc0045877, 0xc0045878, 0xc0185879, 0x40049409, 0x5421, 0x541b)
}

// tampering is what a pod gives to the ioctls of its device.
type tampering struct {
	own    *os.File // a file as large as the device
	buffer []byte
}

// arguments of a request: numbers, one's own file, and pointers to what it may take.
func (x *tampering) arguments(device *os.File, request uint) []func() uintptr {
	at := func(fill func()) func() uintptr {
		return func() uintptr {
			clear(x.buffer)
			fill()
			return uintptr(unsafe.Pointer(&x.buffer[0]))
		}
	}
	value := func(n uintptr) func() uintptr { return func() uintptr { return n } }
	info := func(change func(*unix.LoopInfo64)) func() uintptr {
		return at(func() {
			i := (*unix.LoopInfo64)(unsafe.Pointer(&x.buffer[0]))
			_, _ = ioctl.Value(device, unix.LOOP_GET_STATUS64, uintptr(unsafe.Pointer(i)))
			change(i)
		})
	}
	all := []func() uintptr{value(0), at(func() { // a range of bytes, in the middle; or a yes
		binary.NativeEndian.PutUint64(x.buffer, 8*miB+1)
		binary.NativeEndian.PutUint64(x.buffer[8:], miB)
	}), at(func() { binary.NativeEndian.PutUint64(x.buffer[8:], miB) })}
	if loopRequest(request) {
		all = append(all, value(1), value(512), value(4096), value(x.own.Fd()))
	}
	switch request {
	case unix.LOOP_SET_STATUS64:
		all = append(all,
			info(func(i *unix.LoopInfo64) { i.Flags |= unix.LO_FLAGS_AUTOCLEAR }),
			info(func(i *unix.LoopInfo64) { i.Flags = unix.LO_FLAGS_PARTSCAN }),
			info(func(i *unix.LoopInfo64) { i.Offset, i.Sizelimit = 4096, 8192 }),
			info(func(i *unix.LoopInfo64) { copy(i.File_name[:], "x\x00") }),
			info(func(i *unix.LoopInfo64) { i.Offset, i.Sizelimit, i.Flags = 0, 0, unix.LO_FLAGS_AUTOCLEAR }))
	case unix.LOOP_CONFIGURE:
		all = append(all, at(func() { (*unix.LoopConfig)(unsafe.Pointer(&x.buffer[0])).Fd = uint32(x.own.Fd()) }))
	}
	return all
}

// loopBelow returns the number of the loop device that a target shows, or that is below it.
func loopBelow(t testing.TB, target string) (n int, mapped bool) {
	t.Helper()
	var st unix.Stat_t
	check.OK(t, unix.Stat(target, &st))
	if unix.Major(st.Rdev) == 7 {
		return int(unix.Minor(st.Rdev)), false
	}
	slaves, err := filepath.Glob(fmt.Sprintf("/sys/dev/block/%d:%d/slaves/loop*", unix.Major(st.Rdev), unix.Minor(st.Rdev)))
	check.OK(t, err)
	if len(slaves) != 1 {
		return -1, true // a logical volume
	}
	n, err = strconv.Atoi(strings.TrimPrefix(filepath.Base(slaves[0]), "loop"))
	check.OK(t, err)
	return n, true
}

// TestHostilePod: a pod without capabilities tries all ioctls on its raw device, again and again
// while volumes of others come and go. It sees no byte of theirs, and they lose none; its volume goes
// as any other.
func TestHostilePod(t *testing.T) {
	for _, kind := range pools {
		t.Run(kind, func(t *testing.T) {
			d := startOn(t, kind)
			v := d.made(co.Request("attacker", block, smallest[block]))
			target, reader := v.running(), v.Target("reader")
			check.OK(t, v.publish(reader, true))
			write(t, target, 1)
			own, err := os.Create(filepath.Join(d.Dir, "own"))
			check.OK(t, err)
			defer own.Close()
			check.OK(t, own.Truncate(smallest[block]))

			attacked, others := make(chan struct{}), sync.WaitGroup{}
			others.Go(func() { d.others(t, attacked) })
			n, mapped := loopBelow(t, target)
			inPod(t, func() { attack(t, &tampering{own: own, buffer: make([]byte, 1<<16)}, target, reader, n, mapped) })
			close(attacked)
			others.Wait()

			d = d.restart()
			v = d.volume(v.ID, v.Name, v.Capability)
			check.OK(t, v.publish(target, false))
			write(t, target, 2) // whatever it made of it
			holds(t, reader, 2)
			check.OK(t, v.down(target, reader))
			check.OK(t, own.Close())
			check.OK(t, os.Remove(own.Name()))
			d.nothingLeft()
		})
	}
}

// others has volumes come and go.
func (d *driver) others(t *testing.T, until <-chan struct{}) {
	for n := uint64(2); ; n++ {
		select {
		case <-until:
			return
		default:
		}
		kind := []string{block, "ext4"}[n%2]
		v, err := d.create(co.Request(fmt.Sprint("other", n), kind, smallest[kind]))
		var at string
		if err == nil {
			at, err = v.up()
		}
		if err == nil {
			err = writeAndRead(v.File(at), n)
		}
		if err == nil {
			err = v.down(at)
		}
		if err != nil {
			t.Errorf("another volume, %s: %v", kind, err)
			return
		}
	}
}

func writeAndRead(path string, seed uint64) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.WriteAt(written(seed).Bytes(), 4*miB); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	have := make([]byte, dataSize)
	if _, err := f.ReadAt(have, 4*miB); err != nil {
		return err
	}
	if !bytes.Equal(have, written(seed).Bytes()) {
		return errors.New("it does not hold what was written")
	}
	return nil
}

// attack tries all requests on all ways to open a device, one at a time: the last to close it is a
// pod, too.
func attack(t *testing.T, x *tampering, target, reader string, loop int, mapped bool) {
	if f, err := os.OpenFile(reader, os.O_RDWR, 0); err == nil {
		f.Close()
		t.Error("what is published for reading opens for writing")
	}
	backing := func() string {
		b, _ := os.ReadFile(fmt.Sprintf("/sys/block/loop%d/loop/backing_file", loop))
		return string(b)
	}
	before, page, mine := backing(), make([]byte, 4096), written(1).Bytes()
	for _, open := range []struct {
		path string
		mode int
	}{{target, os.O_RDWR}, {target, os.O_RDONLY}, {reader, os.O_RDONLY}} {
		for _, request := range deviceRequests() {
			device, err := os.OpenFile(open.path, open.mode, 0)
			if err != nil {
				t.Error(err)
				return
			}
			done := false
			for _, argument := range x.arguments(device, request) {
				_, err := ioctl.Value(device, request, argument())
				if mapped && loopRequest(request) && err == nil {
					t.Errorf("request %#x is passed down", request)
				}
				done = done || err == nil
				// Not one more on what may be another's by now.
				if err == nil && loop >= 0 && backing() != before {
					break
				}
			}
			device.Close()
			if !done {
				continue
			}
			if now := backing(); loop >= 0 && now != before {
				t.Errorf("after request %#x loop%d is over %q, was over %q", request, loop, now, before)
				return
			}
			// The pod may write to its own device, and so change or discard what is there.
			if !reads(open.path, page) || (!bytes.Contains(mine, page) && !bytes.Equal(page, zeroPage[:])) {
				t.Errorf("after request %#x the pod reads what it did not write", request)
				return
			}
		}
	}
}

// reads fills a page from where a pod has written, or leaves it zero where its device ends before.
func reads(path string, page []byte) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	clear(page)
	_ = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
	_, err = f.ReadAt(page, 4*miB)
	return err == nil || errors.Is(err, io.EOF)
}
