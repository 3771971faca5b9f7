package controller_test

import (
	"context"
	"reflect"
	"strings"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"

	"github.com/container-storage-interface/spec/lib/go/csi"
	csirpc "github.com/kubernetes-csi/csi-lib-utils/rpc"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/controller"
	"github.com/ashlar-csi/ashlar/pkg/csimap"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

const (
	node = "node-1"
	mib  = pooltest.MiB

	// nothing and nothingCut are IDs of this driver without an object; foreign is no ID of this driver.
	nothing    = "vol.fast.00000000000000000000000000000000"
	nothingCut = "snap.fast.00000000000000000000000000000000"
	foreign    = "csi-of-another-driver"
)

// block stands for a volume without a filesystem.
const block = co.Block

// capability returns the capability of a volume with a filesystem, or of block, that several pods of a node may write.
func capability(filesystem string) *csi.VolumeCapability {
	return co.Capability(filesystem, co.MultiWriter)
}

// fixture is a controller of one node with the pools fast, of 8 GiB, and slow, of 1 GiB.
type fixture struct {
	*controller.Server
	t *testing.T
}

// start starts a controller of a node that can have limit volumes (0: any number).
func start(t *testing.T, limit int64) fixture {
	t.Helper()
	mounts, err := mount.LoadTable()
	check.OK(t, err)
	fast, slow := memory.NewDisk(8<<30), memory.NewDisk(1<<30)
	store, err := volume.NewLocal(t.Context(), node, []blockdev.Pool{fast.Open("fast", nil), slow.Open("slow", nil)}, mounts, limit)
	check.OK(t, err)
	return fixture{controller.New(store), t}
}

// wanted returns a valid request for a volume of 16 MiB with ext4.
func wanted(name string) *csi.CreateVolumeRequest {
	return &csi.CreateVolumeRequest{Name: name, VolumeCapabilities: []*csi.VolumeCapability{capability("ext4")},
		CapacityRange: &csi.CapacityRange{RequiredBytes: 16 * mib}, Parameters: map[string]string{}}
}

// create makes the volume of a request and returns its ID.
func (f fixture) create(r *csi.CreateVolumeRequest) string {
	f.t.Helper()
	return done(f.t, f.CreateVolume, r).GetVolume().GetVolumeId()
}

// cut makes a snapshot of a volume and returns its ID.
func (f fixture) cut(name, source string) string {
	f.t.Helper()
	return done(f.t, f.CreateSnapshot, &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: source}).GetSnapshot().GetSnapshotId()
}

// done makes a call that has to succeed.
func done[R, A any](t *testing.T, call func(context.Context, R) (A, error), r R) A {
	t.Helper()
	a, err := call(t.Context(), r)
	check.OK(t, err)
	return a
}

// onNode returns the topology of a node.
func onNode(name string) *csi.Topology { return csimap.Topology(name) }

// fromVolume and fromSnapshot return the content source of a copy.
func fromVolume(id string) *csi.VolumeContentSource {
	return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: id}}}
}

func fromSnapshot(id string) *csi.VolumeContentSource {
	return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: id}}}
}

// connect serves the controller on a socket, and connects to it.
func connect(t *testing.T, s *controller.Server) *grpc.ClientConn {
	t.Helper()
	return drivertest.Connect(t, func(server *grpc.Server) {
		csi.RegisterControllerServer(server, s)
		csi.RegisterGroupControllerServer(server, s)
		csi.RegisterSnapshotMetadataServer(server, s)
	})
}

// TestCapabilities: sidecars see all capabilities that CSI has.
func TestCapabilities(t *testing.T) {
	conn := connect(t, start(t, 0).Server)
	announced, err := csirpc.GetControllerCapabilities(t.Context(), conn)
	check.OK(t, err)
	for number, name := range csi.ControllerServiceCapability_RPC_Type_name {
		if announced[csi.ControllerServiceCapability_RPC_Type(number)] != (number != 0) {
			t.Errorf("%s is announced: %v", name, number == 0)
		}
	}
	groups, err := csirpc.GetGroupControllerCapabilities(t.Context(), conn)
	check.OK(t, err)
	for number, name := range csi.GroupControllerServiceCapability_RPC_Type_name {
		if groups[csi.GroupControllerServiceCapability_RPC_Type(number)] != (number != 0) {
			t.Errorf("%s is announced: %v", name, number == 0)
		}
	}
}

// TestEveryMethodWorks: each method of the services is there: it answers an empty request, or says what is missing.
func TestEveryMethodWorks(t *testing.T) {
	server := reflect.ValueOf(start(t, 0).Server)
	for _, service := range []reflect.Type{reflect.TypeFor[csi.ControllerServer](), reflect.TypeFor[csi.GroupControllerServer](), reflect.TypeFor[csi.SnapshotMetadataServer]()} {
		for i := range service.NumMethod() {
			name := service.Method(i).Name
			method := server.MethodByName(name)
			if strings.HasPrefix(name, "mustEmbed") {
				continue
			}
			var out []reflect.Value
			if in := method.Type().In(0); in == reflect.TypeFor[context.Context]() {
				out = method.Call([]reflect.Value{reflect.ValueOf(t.Context()), reflect.New(method.Type().In(1).Elem())})
			} else {
				arguments := []reflect.Value{reflect.New(in.Elem()), reflect.ValueOf(&stream[csi.GetMetadataAllocatedResponse]{ctx: t.Context()})}
				if name == "GetMetadataDelta" {
					arguments[1] = reflect.ValueOf(&stream[csi.GetMetadataDeltaResponse]{ctx: t.Context()})
				}
				out = method.Call(arguments)
			}
			if err, failed := out[len(out)-1].Interface().(error); failed && status.Code(err) == codes.Unimplemented {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}

// stream collects what a streaming call sends.
type stream[A any] struct {
	grpc.ServerStream
	ctx  context.Context
	sent []*A
}

func (s *stream[A]) Context() context.Context { return s.ctx }

func (s *stream[A]) Send(a *A) error {
	s.sent = append(s.sent, a)
	return nil
}
