package anynode

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
)

const (
	manyReaders = csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY
	oneWriter   = csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER
)

// everyone reads: the home too.
var everyone = append([]string{home}, consumers...)

// readable makes a volume of a snapshot that was cut while its source was in use, to be read by many, and returns what a file of it has, and what removes all of that.
func (c *nodes) readable(name, filesystem string) (v *volume, content string, remove func()) {
	c.Helper()
	larger := func(r *csi.CreateVolumeRequest) {
		if filesystem == "xfs" {
			r.CapacityRange.RequiredBytes = 320 * mib
		}
	}
	source := c.create(name+"-source", filesystem, larger)
	c.again("claim the source", func(ctx context.Context) error { return source.claim(ctx, home) })
	c.again("stage the source", func(ctx context.Context) error { return source.up(ctx, home) })
	content = "what many read, of " + name
	if filesystem == co.Block {
		f, err := os.OpenFile(source.target(home), os.O_WRONLY|unix.O_SYNC, 0)
		check.OK(c, err)
		_, err = f.WriteAt([]byte(content), 4096)
		check.OK(c, errors.Join(err, f.Close()))
	} else {
		check.OK(c, os.WriteFile(filepath.Join(source.target(home), "file"), []byte(content), 0o644))
	}
	var cut *csi.Snapshot
	c.again("cut it", func(ctx context.Context) (err error) {
		cut, err = source.of.Snapshot(ctx, name)
		return err
	})
	c.again("take the source down", func(ctx context.Context) error { return source.down(ctx, home) })
	c.again("release the source", func(ctx context.Context) error { return source.release(ctx, home) })
	v = c.create(name, filesystem, larger, func(r *csi.CreateVolumeRequest) {
		co.FromSnapshot(r, cut.GetSnapshotId())
		r.CapacityRange.RequiredBytes += 32 * mib // it grows before it is read
		r.VolumeCapabilities = []*csi.VolumeCapability{co.Capability(filesystem, manyReaders)}
	})
	v.of.Capability = co.Capability(filesystem, manyReaders)
	return v, content, func() {
		c.again("delete it", v.of.Delete)
		c.again("remove the snapshot", func(ctx context.Context) error { return c.controller.RemoveSnapshot(ctx, cut.GetSnapshotId()) })
		c.again("delete the source", source.of.Delete)
	}
}

// reads makes sure of what a node reads, from the disk.
func (v *volume) reads(node, content string) {
	v.Helper()
	have, err := v.content(node, len(content))
	check.OK(v, err)
	if have != content {
		v.Errorf("node %s reads %q, want %q", node, have, content)
	}
}

func (v *volume) content(node string, n int) (string, error) {
	path, at := filepath.Join(v.target(node), "file"), int64(0)
	if v.of.Block() {
		path, at = v.target(node), 4096
	}
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECT, 0)
	if err != nil {
		return "", err
	}
	defer f.Close()
	data := aligned()
	if m, err := f.ReadAt(data, at); m < n {
		return "", err
	}
	return string(data[:n]), nil
}

// image is what the home's disk has of the volume.
func (v *volume) image() [sha256.Size]byte {
	v.Helper()
	id := strings.Split(v.of.ID, ".")
	found, err := filepath.Glob(filepath.Join(v.dir, "pool-of-home", "volumes", "*"+id[len(id)-1]+"*"))
	check.OK(v, err)
	if len(found) == 0 {
		v.Fatalf("there is no image of %s", v.of.ID)
	}
	content, err := os.ReadFile(found[0])
	check.OK(v, err)
	return sha256.Sum256(content)
}

// refused makes sure that a call fails with a code.
func (v *volume) refused(what string, code codes.Code, call func(ctx context.Context) error) {
	v.Helper()
	ctx, cancel := context.WithTimeout(v.Context(), 20*time.Second)
	defer cancel()
	if err := call(ctx); status.Code(err) != code {
		v.Errorf("%s: %v, want %v", what, err, code)
	}
}

// as is the volume by another access mode.
func (v *volume) as(mode csi.VolumeCapability_AccessMode_Mode) *volume {
	filesystem := co.Block
	if !v.of.Block() {
		filesystem = v.of.Capability.GetMount().GetFsType()
	}
	other := *v.of
	other.Capability = co.Capability(filesystem, mode)
	return &volume{v.nodes, &other}
}

// passthrough is struct nvme_passthru_cmd of linux/nvme_ioctl.h.
type passthrough struct {
	opcode, flags                            uint8
	_                                        uint16
	nsid, cdw2, cdw3                         uint32
	metadata, addr                           uint64
	metadataLen, dataLen                     uint32
	cdw10, cdw11, cdw12, cdw13, cdw14, cdw15 uint32
	timeout, result                          uint32
}

// command sends an NVMe command by itself: no block layer of the consumer is between.
func command(f *os.File, c passthrough) error {
	c.nsid = 1
	status, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), 0xc0484e43, uintptr(unsafe.Pointer(&c))) // NVME_IOCTL_IO_CMD
	if errno != 0 {
		return errno
	}
	if status != 0 {
		return fmt.Errorf("status %#x", status)
	}
	return nil
}

func onRange(request uintptr) func(f *os.File) error {
	return func(f *os.File) error {
		span := [2]uint64{0, 1 << 20}
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), request, uintptr(unsafe.Pointer(&span))); errno != 0 {
			return errno
		}
		return nil
	}
}

// attacks is what root can do to a block device. Those on commands are of NVMe devices alone.
var (
	attacks = map[string]func(f *os.File) error{
		"write": func(f *os.File) error {
			_, err := f.WriteAt(aligned(), 4096)
			return err
		},
		"discard": onRange(0x1277), "secure discard": onRange(0x127d), "zero": onRange(0x127f),
	}
	commands = map[string]func(f *os.File) error{
		"write command": func(f *os.File) error {
			data := aligned()
			return command(f, passthrough{opcode: 0x01, addr: uint64(uintptr(unsafe.Pointer(&data[0]))), dataLen: 512, cdw10: 8})
		},
		"write zeroes command": func(f *os.File) error { return command(f, passthrough{opcode: 0x08, cdw10: 8, cdw12: 7}) },
		"deallocate command": func(f *os.File) error {
			span := make([]byte, 16) // attributes, length in blocks, first block
			span[4], span[8] = 8, 8
			return command(f, passthrough{opcode: 0x09, addr: uint64(uintptr(unsafe.Pointer(&span[0]))), dataLen: 16, cdw11: 4})
		},
	}
)

// attack does all of that to all devices of all nodes but the disk itself: those of the home, over its disk, too.
func attack(t testing.TB) (devices int) {
	t.Helper()
	paths, err := filepath.Glob("/dev/dm-*")
	check.OK(t, err)
	nvme, err := filepath.Glob("/dev/nvme*n*")
	check.OK(t, err)
	for _, path := range append(paths, nvme...) {
		f, err := os.OpenFile(path, os.O_RDWR|unix.O_DIRECT, 0)
		if errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENODEV) { // what is left of one that is gone
			continue
		}
		check.OK(t, err)
		for what, how := range attacks {
			if how(f) == nil {
				t.Errorf("%s on %s went through", what, path)
			}
		}
		if slices.Contains(nvme, path) {
			for what, how := range commands {
				if how(f) == nil {
					t.Errorf("%s on %s went through", what, path)
				}
			}
		}
		check.OK(t, f.Close())
		devices++
	}
	return devices
}

// TestReaders: a volume of a snapshot is read on all nodes at once, and nobody writes it, whatever its readers do, nor beside them. Each of them is cut off by itself, and
// where the home's driver starts anew, they go on.
func TestReaders(t *testing.T) {
	c := newNodes(t)
	for _, filesystem := range []string{"ext4", "xfs", co.Block} {
		t.Log(filesystem)
		c.readers(filesystem)
	}
}

func (c *nodes) readers(filesystem string) {
	v, content, remove := c.readable("many-"+filesystem, filesystem)
	for _, node := range everyone {
		c.again("claim it for "+node, func(ctx context.Context) error { return v.claim(ctx, node) })
	}
	for _, node := range slices.Backward(everyone) {
		c.again("stage it on "+node, func(ctx context.Context) error { return v.up(ctx, node) })
		v.reads(node, content)
	}
	if filesystem != co.Block {
		var st unix.Statfs_t
		check.OK(c, unix.Statfs(v.target(home), &st))
		if size := int64(st.Blocks) * st.Bsize; size < v.of.Size*3/4 {
			c.Errorf("the filesystem has %d bytes, the volume %d", size, v.of.Size)
		}
	}
	before := v.image()
	o := v.object()
	if len(o.Spec.Readers) != 3 || len(o.Status.Readers) != 2 || o.Spec.Claim != nil || o.Status.Export != nil {
		c.Errorf("its object says %+v, %+v", o.Spec, o.Status.Readers)
	}
	for _, node := range everyone { // no writer beside readers
		v.refused("written on "+node, codes.AlreadyExists, func(ctx context.Context) error { return v.as(oneWriter).claim(ctx, node) })
	}
	if n := attack(c); n < 2 {
		c.Errorf("there were %d devices to attack", n)
	}
	for _, node := range everyone {
		path := v.target(node)
		if filesystem != co.Block {
			path = filepath.Join(path, "file")
		}
		if f, err := os.OpenFile(path, os.O_RDWR, 0); err == nil {
			c.Errorf("on %s it can be opened for writing", node)
			_ = f.Close()
		}
	}

	// It is cut as it is, which holds nobody back.
	var cut *csi.Snapshot
	c.again("cut it while it is read", func(ctx context.Context) (err error) {
		cut, err = v.of.Snapshot(ctx, "cut-of-"+v.of.Name)
		return err
	})
	c.again("remove the cut", func(ctx context.Context) error { return c.controller.RemoveSnapshot(ctx, cut.GetSnapshotId()) })

	c.agents[home].Kill()
	for _, node := range everyone {
		v.reads(node, content)
	}
	check.OK(c, c.agents[home].Start())
	c.again("the home answers", func(ctx context.Context) error { return c.agents[home].Ready(ctx) })
	for _, node := range everyone {
		c.again("stage it again on "+node, func(ctx context.Context) error { return v.up(ctx, node) })
		v.reads(node, content)
	}
	attack(c)

	// One is cut off, as if its node were gone: it reads nothing any more, and the others go on.
	first := consumers[0]
	c.again("cut "+first+" off", func(ctx context.Context) error { return v.release(ctx, first) })
	c.eventually("what "+first+" reads fails", func() bool {
		_, err := v.content(first, len(content))
		return err != nil
	})
	v.reads(home, content)
	v.reads(consumers[1], content)
	c.again("take it down on "+first, func(ctx context.Context) error { return v.down(ctx, first) })
	c.again("claim it again", func(ctx context.Context) error { return v.claim(ctx, first) })
	c.again("stage it once more", func(ctx context.Context) error { return v.up(ctx, first) })
	v.reads(first, content)

	// The home leaves, and the others go on; the last one leaves, and nothing is left.
	for _, node := range everyone {
		c.again("take it down on "+node, func(ctx context.Context) error { return v.down(ctx, node) })
		c.again("release it on "+node, func(ctx context.Context) error { return v.release(ctx, node) })
		if node != consumers[1] {
			v.reads(consumers[1], content)
		}
	}
	if v.image() != before {
		c.Error("the home's disk has other bytes")
	}
	c.eventually("nothing is exported or connected", func() bool { return len(left()) == 0 })
	v.written(content)
	remove()
}

// written has the volume be used by one who writes, beside whom nobody reads, and then be read again.
func (v *volume) written(content string) {
	v.Helper()
	writer, first, second := v.as(oneWriter), consumers[0], consumers[1]
	v.again("claim it to write", func(ctx context.Context) error { return writer.claim(ctx, first) })
	v.refused("read beside who writes", codes.FailedPrecondition, func(ctx context.Context) error { return v.claim(ctx, second) })
	v.again("stage it to write", func(ctx context.Context) error { return writer.up(ctx, first) })
	if v.of.Block() {
		f, err := os.OpenFile(v.target(first), os.O_RDWR|unix.O_DIRECT|unix.O_SYNC, 0)
		check.OK(v, err)
		_, err = f.WriteAt(aligned(), 1<<20)
		check.OK(v, errors.Join(err, f.Close()))
	} else {
		check.OK(v, os.WriteFile(filepath.Join(v.target(first), "other"), []byte(content), 0o600))
	}
	v.again("take it down", func(ctx context.Context) error { return writer.down(ctx, first) })
	v.again("release it", func(ctx context.Context) error { return writer.release(ctx, first) })
	v.again("claim it to read", func(ctx context.Context) error { return v.claim(ctx, second) })
	v.again("stage it to read", func(ctx context.Context) error { return v.up(ctx, second) })
	v.reads(second, content)
	attack(v)
	v.again("take it down on "+second, func(ctx context.Context) error { return v.down(ctx, second) })
	v.again("release it on "+second, func(ctx context.Context) error { return v.release(ctx, second) })
}
