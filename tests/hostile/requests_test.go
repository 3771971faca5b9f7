// Package hostile has callers do what no orchestrator does: requests with anything in their
// fields, messages that are too large, connections that nobody uses.
package hostile

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

const (
	miB      = 1 << 20
	callTime = 2 * time.Minute
	// tidyAfter so many calls all that they have made goes.
	tidyAfter = 200
)

// method is a call of CSI.
type method struct {
	name     string
	request  protoreflect.MessageType
	response protoreflect.MessageType
	stream   bool
}

// methods are all that there are, by the name of their request.
var methods = func() (all []method) {
	for _, service := range []string{"Identity", "Controller", "GroupController", "SnapshotMetadata", "Node"} {
		found, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName("csi.v1." + service))
		if err != nil {
			panic(err)
		}
		list := found.(protoreflect.ServiceDescriptor).Methods()
		for i := range list.Len() {
			one := list.Get(i)
			request, err := protoregistry.GlobalTypes.FindMessageByName(one.Input().FullName())
			if err != nil {
				panic(err)
			}
			response, err := protoregistry.GlobalTypes.FindMessageByName(one.Output().FullName())
			if err != nil {
				panic(err)
			}
			all = append(all, method{fmt.Sprintf("/csi.v1.%s/%s", service, one.Name()), request, response, one.IsStreamingServer()})
		}
	}
	return all
}()

// victim is a driver that anything is sent to. In its directory are
//
//	pods, root     where targets and staging paths are
//	outside        what no call may touch; pods/link and staging-link lead there
type victim struct {
	*drivertest.Driver
	conn    *grpc.ClientConn
	outside string // what there was in it
	calls   int
}

func newVictim(t testing.TB) *victim {
	drivertest.NeedRoot(t)
	dir := drivertest.Dir(t)
	// Bounded, whatever size is asked for.
	drivertest.MountNew(t, "xfs", filepath.Join(dir, "pool"), 1<<30)
	for _, path := range []string{"pods", "root/etc", "outside/dir", "staging"} {
		check.OK(t, os.MkdirAll(filepath.Join(dir, path), 0o700))
	}
	for _, file := range []string{"outside/file", "outside/dir/file"} {
		check.OK(t, os.WriteFile(filepath.Join(dir, file), []byte("untouched"), 0o600))
	}
	check.OK(t, os.WriteFile(filepath.Join(dir, "outside/empty"), nil, 0o600))
	for _, link := range []string{"pods/link", "staging-link"} {
		check.OK(t, os.Symlink(filepath.Join(dir, "outside/dir"), filepath.Join(dir, link)))
	}
	check.OK(t, os.Symlink(filepath.Join(dir, "outside/empty"), filepath.Join(dir, "pods/empty-link")))
	v := &victim{Driver: drivertest.Start(t, drivertest.Options{Dir: dir, Quiet: true})}
	var err error
	v.conn, err = co.Dial(v.Socket)
	check.OK(t, err)
	t.Cleanup(func() {
		v.tidy()
		_ = v.conn.Close()
	})
	v.outside = v.surroundings()
	v.prepare()
	return v
}

// prepare makes a volume that is staged and published, and one of each other kind: most
// requests are about something that is there.
func (v *victim) prepare() {
	for _, request := range seeds() {
		switch r := request.(type) {
		case *csi.CreateVolumeRequest, *csi.CreateSnapshotRequest, *csi.ControllerPublishVolumeRequest:
		case *csi.NodeStageVolumeRequest:
			if r.GetStagingTargetPath() != "@/staging" || r.GetVolumeCapability().GetMount() == nil {
				continue
			}
		case *csi.NodePublishVolumeRequest:
			if r.GetTargetPath() != "@/pods/target" || r.GetVolumeCapability().GetMount() == nil {
				continue
			}
		default:
			continue
		}
		v.confine(request.ProtoReflect())
		for _, m := range methods {
			if m.request.Descriptor() == request.ProtoReflect().Descriptor() {
				_ = v.conn.Invoke(context.Background(), m.name, request, m.response.New().Interface())
			}
		}
	}
}

// surroundings describes what must not change.
func (v *victim) surroundings() string {
	var all strings.Builder
	_ = filepath.WalkDir(filepath.Join(v.Dir, "outside"), func(path string, _ fs.DirEntry, err error) error {
		var st unix.Stat_t
		if err == nil {
			err = unix.Lstat(path, &st)
		}
		fmt.Fprintln(&all, path, st.Dev, st.Ino, st.Mode, st.Uid, st.Gid, st.Size, st.Mtim, err)
		return nil
	})
	return all.String()
}

// tidy takes everything away that calls have made, without the driver's help where it needs
// to know what it was.
func (v *victim) tidy() {
	ctx := context.Background()
	for _, line := range drivertest.Leftovers(v.Dir) {
		if path, found := strings.CutPrefix(line, "mount "); found && path != filepath.Join(v.Dir, "pool") {
			_ = unix.Unmount(path, unix.MNT_DETACH)
		}
	}
	groups, _ := v.ListSnapshots(ctx, &csi.ListSnapshotsRequest{})
	for _, entry := range groups.GetEntries() {
		if id := entry.GetSnapshot().GetGroupSnapshotId(); id != "" {
			_, _ = v.DeleteVolumeGroupSnapshot(ctx, &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: id})
		}
	}
	for _, kind := range []blockdev.Kind{blockdev.Snapshot, blockdev.Volume} {
		records, _ := filepath.Glob(filepath.Join(v.Dir, "pool", map[blockdev.Kind]string{blockdev.Volume: "volumes", blockdev.Snapshot: "snapshots"}[kind], "*.rec"))
		for _, record := range records {
			id := volume.ID{Kind: kind, Pool: "default", Key: strings.TrimSuffix(filepath.Base(record), ".rec")}
			if kind == blockdev.Snapshot {
				_, _ = v.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: id.String()})
				continue
			}
			// A mount that was detached goes when the kernel is done with it.
			for deadline := time.Now().Add(callTime); ; time.Sleep(10 * time.Millisecond) {
				err := errors.Join(v.Store.Detach(ctx, id), v.Store.Release(ctx, id, drivertest.Node), v.Store.Delete(ctx, id))
				if err == nil {
					break
				}
				if time.Now().After(deadline) {
					panic(err) // a fuzz target has no other way to say so here
				}
			}
		}
	}
	for _, pattern := range []string{"pods/*", "root/*", "root/etc/*", "staging/*"} {
		found, _ := filepath.Glob(filepath.Join(v.Dir, pattern))
		for _, path := range found {
			if info, err := os.Lstat(path); err == nil && info.Mode()&os.ModeSymlink == 0 {
				_ = os.Remove(path) // empty, or not ours
			}
		}
	}
	_ = os.Mkdir(filepath.Join(v.Dir, "root/etc"), 0o700)
}

// paths are the fields that have a path.
var paths = map[protoreflect.Name]bool{"target_path": true, "staging_target_path": true, "volume_path": true}

// confine keeps a request within the directory of the test, so that it is the driver that is
// tested and not the machine. It reports whether that can be.
func (v *victim) confine(m protoreflect.Message) bool {
	can := true
	m.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		switch {
		case paths[field.Name()]:
			path := value.String()
			if rest, found := strings.CutPrefix(path, "@"); found {
				path = v.Dir + rest
			} else if strings.HasPrefix(path, "/") {
				path = v.Dir + "/root" + path
			}
			m.Set(field, protoreflect.ValueOfString(path))
			// Links on the way are followed: a kubelet's directory may be behind one.
			for _, link := range []string{"/pods/link/", "/staging-link/", "/pods/empty-link/"} {
				can = can && !strings.Contains(path, link)
			}
			can = can && !strings.HasPrefix(filepath.Clean(path), v.Dir+"/pool") && !strings.HasPrefix(filepath.Clean(path), v.Dir+"/outside")
		case field.Name() == "mount_flags":
			for i := range value.List().Len() {
				// Of some options the kernel makes more than a mount of this device.
				option := value.List().Get(i).String()
				can = can && !strings.Contains(option, "panic") && !strings.Contains(option, "journal") && !strings.Contains(option, "dev")
			}
		case field.Kind() == protoreflect.MessageKind && !field.IsMap() && !field.IsList():
			can = v.confine(value.Message()) && can
		case field.Kind() == protoreflect.MessageKind && field.IsList():
			for i := range value.List().Len() {
				can = v.confine(value.List().Get(i).Message()) && can
			}
		}
		return true
	})
	return can
}

// send makes a call, and makes sure that it is answered, and that it touched nothing that is not its own.
func (v *victim) send(t *testing.T, m method, request proto.Message) error {
	ctx, cancel := context.WithTimeout(t.Context(), callTime)
	defer cancel()
	var err error
	if m.stream {
		var stream grpc.ClientStream
		if stream, err = v.conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, m.name); err == nil {
			err = errors.Join(stream.SendMsg(request), stream.CloseSend())
			for n := 0; err == nil && n < 1000; n++ {
				err = stream.RecvMsg(m.response.New().Interface())
			}
			if errors.Is(err, io.EOF) {
				err = nil
			}
		}
	} else {
		err = v.conn.Invoke(ctx, m.name, request, m.response.New().Interface())
	}
	if code := status.Code(err); code == codes.Unknown || code == codes.DeadlineExceeded || strings.Contains(fmt.Sprint(err), "panic") {
		t.Errorf("%s with %v is answered with %v", m.name, request, err)
	}
	if now := v.surroundings(); now != v.outside {
		t.Errorf("%s with %v has touched what is outside:\n%s\nbefore:\n%s", m.name, request, now, v.outside)
	}
	if v.calls++; v.calls%tidyAfter == 0 {
		v.tidy()
		v.prepare()
	}
	return err
}

// FuzzRequests sends requests of every call of every service, with anything in every field.
func FuzzRequests(f *testing.F) {
	v := newVictim(f)
	for _, request := range seeds() {
		for i, m := range methods {
			if m.request.Descriptor().FullName() == request.ProtoReflect().Descriptor().FullName() {
				body, err := proto.Marshal(request)
				check.OK(f, err)
				f.Add(uint8(i), body)
			}
		}
	}
	f.Fuzz(func(t *testing.T, which uint8, body []byte) {
		m := methods[int(which)%len(methods)]
		request := m.request.New().Interface()
		if proto.Unmarshal(body, request) != nil || !v.confine(request.ProtoReflect()) {
			t.Skip()
		}
		_ = v.send(t, m, request)
	})
}

// seeds are the calls of a life, and some that go wrong, in an order that makes sense.
func seeds() []proto.Message {
	mount, raw := co.Capability("ext4", co.MultiWriter), co.Capability(co.Block, co.MultiWriter)
	mount.GetMount().MountFlags = []string{"noatime"}
	id := drivertest.VolumeID
	snapshot := drivertest.SnapshotID("cut")
	group := drivertest.GroupID("group")
	size := &csi.CapacityRange{RequiredBytes: 16 * miB, LimitBytes: 64 * miB}
	all := []proto.Message{
		&csi.GetPluginInfoRequest{}, &csi.GetPluginCapabilitiesRequest{}, &csi.ProbeRequest{}, &csi.ControllerGetCapabilitiesRequest{},
		&csi.GroupControllerGetCapabilitiesRequest{}, &csi.NodeGetCapabilitiesRequest{}, &csi.NodeGetInfoRequest{}, &csi.NodeGetStorageHealthRequest{},
		&csi.GetCapacityRequest{VolumeCapabilities: []*csi.VolumeCapability{mount}, Parameters: map[string]string{"pool": "default"}},
	}
	for _, name := range []string{"mount", "raw"} {
		c := map[string]*csi.VolumeCapability{"mount": mount, "raw": raw}[name]
		all = append(all,
			&csi.CreateVolumeRequest{Name: name, CapacityRange: size, VolumeCapabilities: []*csi.VolumeCapability{c}, Parameters: map[string]string{"provisioning": "thin"},
				Secrets: map[string]string{"key": "secret"}, MutableParameters: map[string]string{"readAheadKiB": "256"}},
			&csi.ValidateVolumeCapabilitiesRequest{VolumeId: id(name), VolumeCapabilities: []*csi.VolumeCapability{c}},
			&csi.ControllerPublishVolumeRequest{VolumeId: id(name), NodeId: drivertest.Node, VolumeCapability: c},
			&csi.NodeStageVolumeRequest{VolumeId: id(name), StagingTargetPath: "@/staging-link", VolumeCapability: c},
			&csi.NodeStageVolumeRequest{VolumeId: id(name), StagingTargetPath: "@/staging", VolumeCapability: c, PublishContext: map[string]string{"readOnly": "false"}})
		for _, target := range []string{"@/pods/target", "@/pods/link", "@/pods/empty-link", "@/pods/../outside/file", "/etc/passwd", "relative", "@/pods"} {
			all = append(all,
				&csi.NodePublishVolumeRequest{VolumeId: id(name), StagingTargetPath: "@/staging", TargetPath: target, VolumeCapability: c, Readonly: target == "/etc/passwd"},
				&csi.NodeGetVolumeStatsRequest{VolumeId: id(name), VolumePath: target, StagingTargetPath: "@/staging"},
				&csi.NodeExpandVolumeRequest{VolumeId: id(name), VolumePath: target, StagingTargetPath: "@/staging", VolumeCapability: c, CapacityRange: size},
				&csi.NodeUnpublishVolumeRequest{VolumeId: id(name), TargetPath: target})
		}
		all = append(all,
			&csi.CreateSnapshotRequest{Name: "cut", SourceVolumeId: id(name)},
			&csi.GetSnapshotRequest{SnapshotId: snapshot},
			&csi.ListSnapshotsRequest{SnapshotId: snapshot, MaxEntries: 1}, &csi.ListSnapshotsRequest{SourceVolumeId: id(name), StartingToken: "x"},
			&csi.GetMetadataAllocatedRequest{SnapshotId: snapshot, StartingOffset: 4096, MaxResults: 3},
			&csi.GetMetadataDeltaRequest{BaseSnapshotId: snapshot, TargetSnapshotId: snapshot},
			co.FromSnapshot(&csi.CreateVolumeRequest{Name: "restored", CapacityRange: size, VolumeCapabilities: []*csi.VolumeCapability{c}}, snapshot),
			co.FromVolume(&csi.CreateVolumeRequest{Name: "clone", CapacityRange: size, VolumeCapabilities: []*csi.VolumeCapability{c}}, id(name)),
			&csi.CreateVolumeGroupSnapshotRequest{Name: "group", SourceVolumeIds: []string{id(name), id("clone")}},
			&csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: group}, &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: group, SnapshotIds: []string{snapshot}},
			&csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: group},
			&csi.ControllerExpandVolumeRequest{VolumeId: id(name), CapacityRange: &csi.CapacityRange{RequiredBytes: 32 * miB}, VolumeCapability: c},
			&csi.ControllerModifyVolumeRequest{VolumeId: id(name), MutableParameters: map[string]string{"readAheadKiB": "512"}},
			&csi.ListVolumesRequest{MaxEntries: 1}, &csi.ControllerGetVolumeRequest{VolumeId: id(name)},
			&csi.ControllerListVolumeHealthRequest{MaxEntries: 1}, &csi.ControllerGetVolumeHealthRequest{VolumeId: id(name)}, &csi.NodeGetVolumeHealthRequest{VolumeId: id(name)},
			&csi.NodeUnstageVolumeRequest{VolumeId: id(name), StagingTargetPath: "@/staging-link"},
			&csi.NodeUnstageVolumeRequest{VolumeId: id(name), StagingTargetPath: "@/staging"},
			&csi.ControllerUnpublishVolumeRequest{VolumeId: id(name), NodeId: drivertest.Node},
			&csi.DeleteSnapshotRequest{SnapshotId: snapshot}, &csi.DeleteVolumeRequest{VolumeId: id(name)}, &csi.DeleteVolumeRequest{VolumeId: "vol.default.../../etc/passwd"})
	}
	inline := map[string]string{"csi.storage.k8s.io/ephemeral": "true", "size": "16Mi", "csi.storage.k8s.io/serviceAccount.tokens": "token"}
	return append(all,
		&csi.NodePublishVolumeRequest{VolumeId: "csi-inline", TargetPath: "@/pods/inline", VolumeCapability: mount, VolumeContext: inline},
		&csi.NodeUnpublishVolumeRequest{VolumeId: "csi-inline", TargetPath: "@/pods/inline"},
		&csi.NodePublishVolumeRequest{VolumeId: "../../etc", TargetPath: "@/pods/link", VolumeCapability: mount, VolumeContext: inline},
		&csi.NodeUnpublishVolumeRequest{VolumeId: "../../etc", TargetPath: "@/pods/link"})
}
