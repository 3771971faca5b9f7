package anynode

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
)

// newSmall is newNodes, whose pools have filesystems of their own, of 256 MiB.
func newSmall(t *testing.T) *nodes {
	t.Helper()
	drivertest.NeedNVMe(t)
	c, program, api := newCluster(t)
	all := append([]string{home}, consumers...)
	for _, name := range all {
		drivertest.MountNew(t, "ext4", c.poolOf(name), 256*mib)
	}
	c.network = newNetwork(t, api)
	for _, name := range all {
		c.agents[name] = c.agent(program, name)
	}
	c.control(program, all...)
	return c
}

func (c *nodes) poolOf(node string) string { return filepath.Join(c.dir, "pool-of-"+node) }

// fill fills the disk of a node's pool, until room is called.
func (c *nodes) fill(node string) (room func()) {
	c.Helper()
	path := filepath.Join(c.poolOf(node), "others")
	f, err := os.Create(path)
	check.OK(c, err)
	defer f.Close()
	var st unix.Statfs_t
	check.OK(c, unix.Fstatfs(int(f.Fd()), &st))
	free := int64(st.Bfree) * st.Bsize
	check.OK(c, unix.Fallocate(int(f.Fd()), 0, 0, free-8*mib)) // the filesystem needs some itself
	for block := make([]byte, 4096); err == nil; free += int64(len(block)) {
		_, err = f.WriteAt(block, free)
	}
	if !errors.Is(err, unix.ENOSPC) {
		c.Error(err)
	}
	return func() { check.OK(c, os.Remove(path)) }
}

// tryPut writes to a block of the volume at a node, past the page cache.
func (v *volume) tryPut(node string, at int64) error {
	f, err := os.OpenFile(v.target(node), os.O_RDWR|unix.O_DIRECT, 0)
	if err != nil {
		return err
	}
	data := aligned()
	data[0], data[1] = 1, byte(at)
	_, err = f.WriteAt(data, at*mib)
	return errors.Join(err, f.Close())
}

// puts is tryPut in the background. done reports whether that has ended.
func (v *volume) puts(node string, at int64) (done func() bool) {
	ended := make(chan error, 1)
	go func() { ended <- v.tryPut(node, at) }()
	return func() bool {
		select {
		case err := <-ended:
			check.OK(v, err)
			return true
		default:
			return false
		}
	}
}

// TestReplicaFull: the disk of a leg, of which the bytes take room only as they are written, is full: while the volume is written, grown, and while the leg joins; and those of all legs are. What was acknowledged
// stays, and once there is room all legs are current by themselves, and equal.
func TestReplicaFull(t *testing.T) {
	c := newSmall(t)
	user, near, far := consumers[0], home, consumers[1]
	m := c.mirrorWith(64*mib, map[string]string{"provisioning": "thin"}, "replica full", co.Block, near, far)
	m.claims(user)
	m.again("stage it on "+user, func(ctx context.Context) error { return m.up(ctx, user) })
	put := func(from, to int64) {
		t.Helper()
		for at := from; at < to; at++ {
			c.within(time.Minute, fmt.Sprintf("block %d is written", at), m.puts(user, at))
		}
	}
	expand := func(ctx context.Context) error {
		_, err := m.controller.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{VolumeId: m.of.ID, CapacityRange: &csi.CapacityRange{RequiredBytes: 96 * mib}, VolumeCapability: m.of.Capability})
		return err
	}
	anew := func(between func()) {
		t.Helper()
		m.leave(user)
		between()
		m.claims(user)
		m.again("stage it again", func(ctx context.Context) error { return m.up(ctx, user) })
	}
	put(0, 10)
	m.current(m.legs...) // on a slow machine it may have been opened without one

	// One leg, while it is written to, and while it joins.
	room := c.fill(near)
	put(10, 30)
	m.current(m.leg(far))
	put(30, 40)
	c.eventually("the leg cannot join", func() bool {
		leg := m.object().Leg(m.leg(near))
		return leg != nil && strings.Contains(leg.Message, "while it was made equal")
	})
	room()
	m.current(m.legs...)

	// One leg, as the volume is to grow.
	room = c.fill(near)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	if err := expand(ctx); err == nil {
		t.Error("it has grown on a full disk")
	}
	cancel()
	put(5, 10)
	m.current(m.legs...) // what has its room is written
	room()
	m.again("it grows", expand)
	there := m.at(user)
	m.again("it grows there", func(ctx context.Context) error { return there.NodeExpand(ctx, there.Target("pod")) })
	put(60, 90)
	m.current(m.legs...)

	// All legs: who writes gets errors until it is staged again.
	roomNear, roomFar := c.fill(near), c.fill(far)
	if err := m.tryPut(user, 40); err == nil {
		t.Error("written where all disks are full")
	}
	roomNear()
	roomFar()
	anew(func() {})
	put(40, 60)
	m.current(m.legs...)

	// One leg, as it is opened.
	anew(func() { room = c.fill(far) })
	put(0, 90) // with all legs, or the other one alone
	room()
	m.current(m.legs...)
	f, err := os.OpenFile(m.target(user), os.O_RDONLY|unix.O_DIRECT, 0)
	check.OK(t, err)
	for at := range int64(90) {
		data := aligned()
		if _, err := f.ReadAt(data, at*mib); err != nil || data[0] != 1 || data[1] != byte(at) {
			t.Errorf("block %d: %v, %v", at, data[:2], err)
		}
	}
	check.OK(t, f.Close())
	m.leave(user)
	m.same()
	m.deleteBeside()
}
