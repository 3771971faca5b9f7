package soak

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/linear"
	"github.com/ashlar-csi/ashlar/pkg/mount"
)

const (
	// block in place of a filesystem is block access.
	block    = co.Block
	callTime = 20 * time.Second
	step     = 16 * miB
	pageSize = 4096
	// place of the data of a raw volume, in bytes.
	place = miB
)

// environment is three volumes, a snapshot and a group, and what has happened to them.
type environment struct {
	*soak
	*co.Client // with its volumes in the directory of them all
	filesystem string
	base       int64
	random     []*rand.Rand // one for each caller
	data       [volumes]sync.Mutex

	mu      sync.Mutex
	writes  int32
	history []operation    // of this round
	states  map[state]bool // that the environment may have been in before it
	calls   int
	answers map[string]int
}

func newEnvironment(s *soak, filesystem string, seed uint64) *environment {
	e := &environment{soak: s, Client: co.New(s.Conn, s.Node, s.work()), filesystem: filesystem, base: map[string]int64{"ext4": 16 * miB, "xfs": 300 * miB, block: 8 * miB}[filesystem],
		states: map[state]bool{empty: true}, answers: map[string]int{}}
	for i := range callers {
		e.random = append(e.random, rand.New(rand.NewPCG(seed, uint64(i)+1)))
	}
	return e
}

func (e *environment) name(v int) string { return fmt.Sprintf("%s-%c", e.filesystem, 'a'+rune(v)) }

// volume is one of them as the CO knows it, whether or not it is there.
func (e *environment) volume(v int) *co.Volume {
	return e.Volume(drivertest.VolumeID(e.name(v)), e.name(v), co.Capability(e.filesystem, co.MultiWriter))
}

func (e *environment) snapshotID() string { return drivertest.SnapshotID(e.filesystem) }

func (e *environment) groupID() string { return drivertest.GroupID(e.filesystem) }

func (e *environment) target(v, target int) string {
	return e.volume(v).Target(fmt.Sprint("pod", target))
}

func (e *environment) bytes(size int8) int64 { return e.base + int64(size)*step }

// likely has each call as often as it is to be made.
var likely = func() (all []kind) {
	for k, n := range map[kind]int{create: 6, remove: 3, claim: 8, release: 2, stage: 8, unstage: 4, publish: 9, unpublish: 5, expand: 3, nodeExpand: 2,
		modify: 1, validate: 1, stats: 1, snapshot: 3, unsnapshot: 2, cutGroup: 2, removeGroup: 2, write: 12, read: 9} {
		for range n {
			all = append(all, k)
		}
	}
	slices.Sort(all) // the order of a map is another one each time
	return all
}()

// work makes the calls of one caller in a round.
func (e *environment) work(caller int) {
	random := e.random[caller]
	for range callsEach {
		in := input{kind: likely[random.IntN(len(likely))], volume: random.IntN(volumes), target: random.IntN(targets)}
		switch in.kind {
		case snapshot, unsnapshot, cutGroup, removeGroup:
			in.volume = a
		case expand:
			in.number = int32(first[in.volume]) + 1 + random.Int32N(int32(last[in.volume]-first[in.volume]))
		}
		patience := callTime
		if random.IntN(6) == 0 {
			patience = time.Duration(random.ExpFloat64() * float64(8*time.Millisecond))
		}
		cancelled := random.IntN(2) == 0
		twice := random.IntN(8) == 0 && in.kind != write
		call := func() {
			var ctx context.Context
			var cancel func()
			if cancelled {
				ctx, cancel = context.WithCancel(context.Background())
				defer time.AfterFunc(patience, cancel).Stop()
			} else {
				ctx, cancel = context.WithTimeout(context.Background(), patience)
			}
			defer cancel()
			e.make(ctx, in)
		}
		var both sync.WaitGroup
		if twice {
			both.Go(call)
		}
		call()
		both.Wait()
	}
}

func unclear(err error) bool {
	switch status.Code(err) {
	case codes.Unavailable, codes.Canceled, codes.DeadlineExceeded:
		return true
	}
	return false
}

// make makes a call and notes what came of it.
func (e *environment) make(ctx context.Context, in input) {
	if in.kind == write || in.kind == read {
		e.access(in)
		return
	}
	o := operation{in: in, begin: e.now()}
	number, err := e.call(ctx, in)
	o.end = e.now()
	o.out = output{code: status.Code(err), maybe: unclear(err), number: number}
	if in.kind == validate || in.kind == stats {
		o.out.maybe = false // it changes nothing
		if unclear(err) {
			return
		}
	}
	e.mu.Lock()
	e.calls++
	e.answers[o.out.code.String()]++
	e.mu.Unlock()
	switch o.out.code {
	case codes.Aborted:
		return // another call has the volume: nothing was done
	case codes.OK, codes.NotFound, codes.FailedPrecondition, codes.Unavailable, codes.Canceled, codes.DeadlineExceeded:
		e.note(o)
	default:
		e.t.Errorf("%s of environment %s: %v", in, e.filesystem, err)
	}
}

func (e *environment) note(o operation) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.history = append(e.history, o)
}

// call makes a call of the driver. number: the size after an expand, in steps.
func (e *environment) call(ctx context.Context, in input) (number int32, err error) {
	v, target := e.volume(in.volume), e.target(in.volume, in.target)
	switch in.kind {
	case create:
		r := co.Request(v.Name, e.filesystem, e.bytes(first[in.volume]))
		if e.filesystem == "xfs" {
			r.Parameters = map[string]string{"provisioning": "thin"}
		}
		switch in.volume {
		case b:
			co.FromSnapshot(r, e.snapshotID())
		case c:
			co.FromVolume(r, e.volume(a).ID)
		}
		_, err = e.Create(ctx, r)
	case remove:
		err = v.Delete(ctx)
	case claim:
		err = v.Claim(ctx)
	case release:
		err = v.Release(ctx)
	case stage:
		err = v.Stage(ctx)
	case unstage:
		err = v.Unstage(ctx)
	case publish:
		err = v.Publish(ctx, target, false)
	case unpublish:
		err = v.Unpublish(ctx, target)
	case expand: // to more, if another one was quicker
		var r *csi.ControllerExpandVolumeResponse
		r, err = e.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{VolumeId: v.ID, CapacityRange: &csi.CapacityRange{RequiredBytes: e.bytes(int8(in.number))}})
		number = int32((r.GetCapacityBytes() - e.base) / step)
	case nodeExpand:
		err = v.NodeExpand(ctx, target)
	case modify:
		_, err = e.ControllerModifyVolume(ctx, &csi.ControllerModifyVolumeRequest{VolumeId: v.ID, MutableParameters: map[string]string{"readAheadKiB": fmt.Sprint(128 << in.target)}})
	case validate:
		_, err = e.ValidateVolumeCapabilities(ctx, &csi.ValidateVolumeCapabilitiesRequest{VolumeId: v.ID, VolumeCapabilities: []*csi.VolumeCapability{v.Capability}})
	case stats:
		_, err = e.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: v.ID, VolumePath: target})
	case snapshot:
		_, err = v.Snapshot(ctx, e.filesystem)
	case unsnapshot:
		err = e.RemoveSnapshot(ctx, e.snapshotID())
	case cutGroup:
		_, err = e.Group(ctx, e.filesystem, e.volume(a).ID, e.volume(b).ID)
	case removeGroup:
		err = e.RemoveGroup(ctx, e.groupID())
	}
	return number, err
}

// access writes or reads the data of a volume where it is published, as a pod does. One page is
// written or not; nobody else uses the volume's data at that time.
func (e *environment) access(in input) {
	e.data[in.volume].Lock()
	defer e.data[in.volume].Unlock()
	o := operation{in: in, begin: e.now()}
	if in.kind == write {
		e.mu.Lock()
		e.writes++
		o.in.number = e.writes
		e.mu.Unlock()
	}
	number, err := e.transfer(e.target(in.volume, in.target), in.kind == write, o.in.number)
	if err != nil {
		e.t.Errorf("%s of environment %s: %v", o.in, e.filesystem, err)
		return
	}
	o.end = e.now()
	if number == nothing {
		o.in = input{kind: read, volume: in.volume, target: in.target}
	}
	o.out.number = number
	e.note(o)
}

func (e *environment) transfer(target string, writes bool, number int32) (int32, error) {
	// What is open stays mounted, so that nothing is written to the directory below.
	at, err := unix.Open(target, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		return nothing, nil
	}
	if err != nil {
		return 0, err
	}
	defer unix.Close(at)
	var st unix.Statx_t
	if err := unix.Statx(at, "", unix.AT_EMPTY_PATH, unix.STATX_TYPE, &st); err != nil {
		return 0, err
	}
	if st.Attributes&unix.STATX_ATTR_MOUNT_ROOT == 0 {
		return nothing, nil
	}
	path, offset := fmt.Sprintf("/proc/self/fd/%d/data", at), int64(0)
	if e.filesystem == block {
		path, offset = fmt.Sprintf("/proc/self/fd/%d", at), place
	}
	if !writes {
		return load(path, offset)
	}
	flags := os.O_WRONLY | os.O_CREATE
	if e.filesystem == block {
		flags = os.O_WRONLY
	}
	file, err := os.OpenFile(path, flags, 0o600)
	if err != nil {
		return 0, err
	}
	_, err = file.WriteAt(page(number), offset)
	return number, errors.Join(err, file.Sync(), file.Close())
}

func page(number int32) []byte {
	return bytes.Repeat(binary.LittleEndian.AppendUint32(nil, uint32(number)), pageSize/4)
}

func load(path string, offset int64) (int32, error) {
	file, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	defer file.Close()
	have := make([]byte, pageSize)
	n, err := file.ReadAt(have, offset)
	if n == 0 && errors.Is(err, io.EOF) {
		return 0, nil // a file that was made, and never written
	}
	if err != nil {
		return 0, err
	}
	number := int32(binary.LittleEndian.Uint32(have))
	if !bytes.Equal(have, page(number)) {
		return 0, fmt.Errorf("%s holds %x..., which nobody has written", path, have[:32])
	}
	return number, nil
}

// quiet waits until the driver works on nothing of the environment any more. A call that is not
// valid, and names what it would change, is refused either way.
func (e *environment) quiet() {
	for i := range volumes + 2 {
		err := again(func(ctx context.Context) (err error) {
			switch i {
			case volumes:
				_, err = e.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: e.filesystem})
			case volumes + 1:
				_, err = e.CreateVolumeGroupSnapshot(ctx, &csi.CreateVolumeGroupSnapshotRequest{Name: e.filesystem})
			default:
				_, err = e.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: e.volume(i).ID})
			}
			return err
		})
		if status.Code(err) != codes.InvalidArgument {
			e.t.Errorf("a call that is not valid: %v", err)
		}
	}
}

// observe looks at the environment while nobody calls.
func (e *environment) observe() {
	o := operation{in: input{kind: observe}, begin: e.now()}
	seen := empty
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	defer cancel()
	listed, err := e.ListVolumes(ctx, &csi.ListVolumesRequest{})
	check.OK(e.t, err)
	for v := range volumes {
		one := &seen.volumes[v]
		for _, entry := range listed.GetEntries() {
			if entry.GetVolume().GetVolumeId() == e.volume(v).ID {
				*one = volumeState{exists: true, claimed: len(entry.GetStatus().GetPublishedNodeIds()) > 0,
					size: int8((entry.GetVolume().GetCapacityBytes() - e.base) / step)}
			}
		}
		staging := e.volume(v).Staging
		if e.filesystem == block {
			staging = filepath.Join(staging, "device")
		}
		one.staged = mounted(staging)
		for target := range targets {
			one.published[target] = mounted(e.target(v, target))
		}
	}
	snapshots, err := e.ListSnapshots(ctx, &csi.ListSnapshotsRequest{SnapshotId: e.snapshotID()})
	check.OK(e.t, err)
	if len(snapshots.GetEntries()) > 0 {
		seen.snapshot = 0
	}
	switch group, err := e.GetVolumeGroupSnapshot(ctx, &csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: e.groupID()}); {
	case err == nil && len(group.GetGroupSnapshot().GetSnapshots()) == 2:
		seen.groupA, seen.groupB = 0, 0
	case status.Code(err) != codes.NotFound:
		e.t.Errorf("the group of environment %s: %v, %v", e.filesystem, group, err)
	}
	o.out.seen, o.end = seen, e.now()
	e.note(o)
}

func mounted(path string) bool {
	info, err := mount.At(path)
	return err == nil && info.Root
}

// disturbs reports whether an access may be why a call was refused that it ran beside: an unpublish finds an open file; a group of raw devices is refused if a
// member is written to until all are cut.
func (e *environment) disturbs(access, call operation) bool {
	if access.begin >= call.end || call.begin >= access.end {
		return false
	}
	switch call.in.kind {
	case unpublish:
		return (access.in.kind == read || access.in.kind == write) && access.in.volume == call.in.volume
	case cutGroup:
		return e.filesystem == block && access.in.kind == write && access.in.volume != c
	}
	return false
}

// judge searches for an order of what has happened in this round.
func (e *environment) judge() {
	e.mu.Lock()
	defer e.mu.Unlock()
	end := e.now()
	for i := range e.history {
		o := &e.history[i]
		if o.out.maybe {
			// It may go on without its caller, as long as the driver lives and works on it.
			from := o.end
			o.end = end
			for _, other := range e.history {
				if (other.in.kind == restart || other.in.kind == observe) && other.end > from {
					o.end = min(o.end, max(from, map[kind]time.Duration{restart: other.end, observe: other.begin}[other.in.kind]))
				}
			}
		}
		o.in.held = slices.ContainsFunc(e.history, func(other operation) bool { return e.disturbs(other, *o) })
	}
	states, at, err := linear.Search(e.states, e.history)
	if err != nil || len(states) == 0 {
		o := e.history[at]
		e.t.Errorf("environment %s: no order of these calls explains the answer to\n%s: %s (%v)\n%s\nbefore: %+v", e.filesystem, o.in, o.out, err, story(e.history), e.states)
		return
	}
	e.states, e.history = states, nil
}

// takeDown takes everything down and deletes it.
func (e *environment) takeDown() {
	ctx, cancel := context.WithTimeout(context.Background(), retryTime)
	defer cancel()
	patient := e.Patient()
	for i := range volumes {
		v := e.volume(i)
		v.Client = patient
		if err := errors.Join(v.Down(ctx, e.target(i, 0), e.target(i, 1)), v.Delete(ctx)); err != nil {
			e.t.Errorf("at the end, volume %s: %v", v.Name, err)
		}
	}
	check.OK(e.t, errors.Join(patient.RemoveGroup(ctx, e.groupID()), patient.RemoveSnapshot(ctx, e.snapshotID())))
}
