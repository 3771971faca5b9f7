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

	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

const (
	// block in place of a filesystem is block access.
	block    = drivertest.Block
	callTime = 20 * time.Second
	step     = 16 * miB
	pageSize = 4096
	// place of the data of a raw volume, in bytes.
	place = miB
)

// family is three volumes, a snapshot and a group, and what has happened to them.
type family struct {
	*soak
	filesystem string
	base       int64
	random     []*rand.Rand // one for each caller
	data       [volumes]sync.Mutex

	mu      sync.Mutex
	writes  int32
	history []operation    // of this round
	states  map[state]bool // that the family may have been in before it
	calls   int
	answers map[string]int
}

func newFamily(s *soak, filesystem string, seed uint64) *family {
	f := &family{soak: s, filesystem: filesystem, base: map[string]int64{"ext4": 16 * miB, "xfs": 300 * miB, block: 8 * miB}[filesystem],
		states: map[state]bool{empty: true}, answers: map[string]int{}}
	for i := range callers {
		f.random = append(f.random, rand.New(rand.NewPCG(seed, uint64(i)+1)))
	}
	for v := range volumes {
		ok(s.t, os.MkdirAll(f.staging(v), 0o700))
		for target := range targets {
			ok(s.t, os.MkdirAll(filepath.Dir(f.target(v, target)), 0o700))
		}
	}
	return f
}

func (f *family) name(v int) string { return fmt.Sprintf("%s-%c", f.filesystem, 'a'+rune(v)) }

func (f *family) id(v int) string {
	return volume.ID{Kind: "vol", Pool: "default", Key: volume.KeyOf(f.name(v))}.String()
}

func (f *family) snapshotID() string {
	return volume.ID{Kind: "snap", Pool: "default", Key: volume.KeyOf(f.filesystem)}.String()
}

func (f *family) groupID() string {
	return volume.GroupID{Key: volume.KeyOf(f.filesystem)}.String()
}

func (f *family) staging(v int) string { return filepath.Join(f.Dir, "work", f.name(v), "staging") }

func (f *family) target(v, target int) string {
	return filepath.Join(f.Dir, "work", f.name(v), fmt.Sprint("pod", target), "target")
}

func (f *family) bytes(size int8) int64 { return f.base + int64(size)*step }

func (f *family) capability() *csi.VolumeCapability {
	return drivertest.Capability(f.filesystem)
}

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
func (f *family) work(caller int) {
	random := f.random[caller]
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
			f.make(ctx, in)
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

func isAborted(err error) bool { return status.Code(err) == codes.Aborted }

// make makes a call and notes what came of it.
func (f *family) make(ctx context.Context, in input) {
	if in.kind == write || in.kind == read {
		f.use(in)
		return
	}
	o := operation{in: in, begin: f.now()}
	number, err := f.call(ctx, in)
	o.end = f.now()
	o.out = output{code: status.Code(err), maybe: unclear(err), number: number}
	if in.kind == validate || in.kind == stats {
		o.out.maybe = false // it changes nothing
		if unclear(err) {
			return
		}
	}
	f.mu.Lock()
	f.calls++
	f.answers[o.out.code.String()]++
	f.mu.Unlock()
	switch o.out.code {
	case codes.Aborted:
		return // another call has the volume: nothing was done
	case codes.OK, codes.NotFound, codes.FailedPrecondition, codes.Unavailable, codes.Canceled, codes.DeadlineExceeded:
		f.note(o)
	default:
		f.t.Errorf("%s of family %s: %v", in, f.filesystem, err)
	}
}

func (f *family) note(o operation) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.history = append(f.history, o)
}

// call makes a call of the driver. number: the size after an expand, in steps.
func (f *family) call(ctx context.Context, in input) (number int32, err error) {
	v, c := in.volume, f.capability()
	id, staging, target := f.id(v), f.staging(v), f.target(v, in.target)
	switch in.kind {
	case create:
		r := &csi.CreateVolumeRequest{Name: f.name(v), VolumeCapabilities: []*csi.VolumeCapability{c}, CapacityRange: &csi.CapacityRange{RequiredBytes: f.bytes(first[v])}}
		if f.filesystem == "xfs" {
			r.Parameters = map[string]string{"provisioning": "thin"}
		}
		switch v {
		case b:
			r.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: f.snapshotID()}}}
		case 2:
			r.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: f.id(a)}}}
		}
		_, err = f.CreateVolume(ctx, r)
	case remove:
		_, err = f.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: id})
	case claim:
		_, err = f.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{VolumeId: id, NodeId: drivertest.Node, VolumeCapability: c})
	case release:
		_, err = f.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: drivertest.Node})
	case stage:
		_, err = f.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging, VolumeCapability: c})
	case unstage:
		_, err = f.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging})
	case publish:
		_, err = f.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{VolumeId: id, StagingTargetPath: staging, TargetPath: target, VolumeCapability: c})
	case unpublish:
		_, err = f.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: target})
	case expand:
		var r *csi.ControllerExpandVolumeResponse
		r, err = f.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{VolumeId: id, CapacityRange: &csi.CapacityRange{RequiredBytes: f.bytes(int8(in.number))}})
		number = int32((r.GetCapacityBytes() - f.base) / step)
	case nodeExpand:
		_, err = f.NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{VolumeId: id, VolumePath: target, StagingTargetPath: staging, VolumeCapability: c})
	case modify:
		_, err = f.ControllerModifyVolume(ctx, &csi.ControllerModifyVolumeRequest{VolumeId: id, MutableParameters: map[string]string{"readAheadKiB": fmt.Sprint(128 << in.target)}})
	case validate:
		_, err = f.ValidateVolumeCapabilities(ctx, &csi.ValidateVolumeCapabilitiesRequest{VolumeId: id, VolumeCapabilities: []*csi.VolumeCapability{c}})
	case stats:
		_, err = f.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: target})
	case snapshot:
		_, err = f.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: f.filesystem, SourceVolumeId: f.id(a)})
	case unsnapshot:
		_, err = f.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: f.snapshotID()})
	case cutGroup:
		_, err = f.CreateVolumeGroupSnapshot(ctx, &csi.CreateVolumeGroupSnapshotRequest{Name: f.filesystem, SourceVolumeIds: []string{f.id(a), f.id(b)}})
	case removeGroup:
		_, err = f.DeleteVolumeGroupSnapshot(ctx, &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: f.groupID()})
	}
	return number, err
}

// use writes or reads the data of a volume where it is published, as a pod does. One page is
// written or not; nobody else uses the volume's data at that time.
func (f *family) use(in input) {
	f.data[in.volume].Lock()
	defer f.data[in.volume].Unlock()
	o := operation{in: in, begin: f.now()}
	if in.kind == write {
		f.mu.Lock()
		f.writes++
		o.in.number = f.writes
		f.mu.Unlock()
	}
	number, err := f.access(f.target(in.volume, in.target), in.kind == write, o.in.number)
	if err != nil {
		f.t.Errorf("%s of family %s: %v", o.in, f.filesystem, err)
		return
	}
	o.end = f.now()
	if number == nothing {
		o.in = input{kind: read, volume: in.volume, target: in.target}
	}
	o.out.number = number
	f.note(o)
}

func (f *family) access(target string, writes bool, number int32) (int32, error) {
	// What is open stays mounted, so that nothing is written to the folder below.
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
	if f.filesystem == block {
		path, offset = fmt.Sprintf("/proc/self/fd/%d", at), place
	}
	if !writes {
		return load(path, offset)
	}
	flags := os.O_WRONLY | os.O_CREATE
	if f.filesystem == block {
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

// quiet waits until the driver works on nothing of the family any more. A call that is not
// valid, and names what it would change, is refused either way.
func (f *family) quiet() {
	for i := range volumes + 2 {
		err := again(func(ctx context.Context) (err error) {
			switch i {
			case volumes:
				_, err = f.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: f.filesystem})
			case volumes + 1:
				_, err = f.CreateVolumeGroupSnapshot(ctx, &csi.CreateVolumeGroupSnapshotRequest{Name: f.filesystem})
			default:
				_, err = f.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: f.id(i)})
			}
			return err
		})
		if status.Code(err) != codes.InvalidArgument {
			f.t.Errorf("a call that is not valid: %v", err)
		}
	}
}

// observe looks at the family while nobody calls.
func (f *family) observe() {
	o := operation{in: input{kind: observe}, begin: f.now()}
	seen := empty
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	defer cancel()
	listed, err := f.ListVolumes(ctx, &csi.ListVolumesRequest{})
	ok(f.t, err)
	for v := range volumes {
		one := &seen.volumes[v]
		for _, entry := range listed.GetEntries() {
			if entry.GetVolume().GetVolumeId() == f.id(v) {
				*one = volumeState{exists: true, claimed: len(entry.GetStatus().GetPublishedNodeIds()) > 0,
					size: int8((entry.GetVolume().GetCapacityBytes() - f.base) / step)}
			}
		}
		staging := f.staging(v)
		if f.filesystem == block {
			staging = filepath.Join(staging, "device")
		}
		one.staged = mounted(staging)
		for target := range targets {
			one.published[target] = mounted(f.target(v, target))
		}
	}
	snapshots, err := f.ListSnapshots(ctx, &csi.ListSnapshotsRequest{SnapshotId: f.snapshotID()})
	ok(f.t, err)
	if len(snapshots.GetEntries()) > 0 {
		seen.snapshot = 0
	}
	switch group, err := f.GetVolumeGroupSnapshot(ctx, &csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: f.groupID()}); {
	case err == nil && len(group.GetGroupSnapshot().GetSnapshots()) == 2:
		seen.groupA, seen.groupB = 0, 0
	case status.Code(err) != codes.NotFound:
		f.t.Errorf("the group of family %s: %v, %v", f.filesystem, group, err)
	}
	o.out.seen, o.end = seen, f.now()
	f.note(o)
}

func mounted(path string) bool {
	info, err := mount.At(path)
	return err == nil && info.Root
}

// judge searches for an order of what has happened in this round.
func (f *family) judge() {
	f.mu.Lock()
	defer f.mu.Unlock()
	end := f.now()
	for i := range f.history {
		o := &f.history[i]
		if o.out.maybe {
			// It may go on without its caller, as long as the driver lives and works on it.
			from := o.end
			o.end = end
			for _, other := range f.history {
				if (other.in.kind == restart || other.in.kind == observe) && other.end > from {
					o.end = min(o.end, max(from, map[kind]time.Duration{restart: other.end, observe: other.begin}[other.in.kind]))
				}
			}
		}
		for _, other := range f.history {
			// A call that has found a file open.
			if o.in.kind == unpublish && (other.in.kind == read || other.in.kind == write) && other.in.volume == o.in.volume && other.begin < o.end && o.begin < other.end {
				o.in.held = true
			}
		}
	}
	states, at, err := search(f.states, f.history)
	if err != nil || len(states) == 0 {
		f.t.Errorf("family %s: no order of these calls explains the answer to\n%s: %s (%v)\n%s\nbefore: %+v", f.filesystem, at.in, at.out, err, story(f.history), f.states)
		return
	}
	f.states, f.history = states, nil
}

// takeDown takes all of the family down and deletes it.
func (f *family) takeDown() {
	must := func(in input) {
		if err := again(func(ctx context.Context) error { _, err := f.call(ctx, in); return err }); err != nil {
			f.t.Errorf("at the end, %s of family %s: %v", in, f.filesystem, err)
		}
	}
	for v := range volumes {
		for target := range targets {
			must(input{kind: unpublish, volume: v, target: target})
		}
		for _, k := range []kind{unstage, release, remove} {
			must(input{kind: k, volume: v})
		}
		ok(f.t, os.Remove(f.staging(v)))
	}
	must(input{kind: removeGroup})
	must(input{kind: unsnapshot})
	for target := range volumes * targets {
		ok(f.t, os.Remove(filepath.Dir(f.target(target/targets, target%targets))))
	}
}
