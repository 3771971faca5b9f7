// Package co acts as a container orchestrator (CO): it calls a driver, and takes volumes through their lives. It is for tests and the demo.
package co

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
)

// Client calls all services of a driver.
type Client struct {
	csi.IdentityClient
	csi.ControllerClient
	csi.GroupControllerClient
	csi.SnapshotMetadataClient
	csi.NodeClient

	Node string // the node that volumes are claimed for
	Dir  string // an existing directory for staging paths and targets

	conn grpc.ClientConnInterface
}

// Dial connects to a driver, which may start later, and end and start again. The caller closes the connection.
func Dial(socket string) (*grpc.ClientConn, error) {
	return grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{MinConnectTimeout: 20 * time.Second, // a busy machine may take long
			Backoff: backoff.Config{BaseDelay: 2 * time.Millisecond, Multiplier: 1.5, MaxDelay: 20 * time.Millisecond}}))
}

// New returns a client over a connection.
func New(conn grpc.ClientConnInterface, node, dir string) *Client {
	return &Client{IdentityClient: csi.NewIdentityClient(conn), ControllerClient: csi.NewControllerClient(conn), GroupControllerClient: csi.NewGroupControllerClient(conn),
		SnapshotMetadataClient: csi.NewSnapshotMetadataClient(conn), NodeClient: csi.NewNodeClient(conn), Node: node, Dir: dir, conn: conn}
}

// Patient returns a client that repeats each call as Again does, but for streams.
func (c *Client) Patient() *Client { return New(patient{c.conn}, c.Node, c.Dir) }

type patient struct{ grpc.ClientConnInterface }

func (p patient) Invoke(ctx context.Context, method string, request, response any, options ...grpc.CallOption) error {
	return Again(ctx, func() error { return p.ClientConnInterface.Invoke(ctx, method, request, response, options...) })
}

// Again repeats a call as a sidecar or the kubelet does: while the answer says that the work may still be going on, or that another operation on the object is.
// It stops when the context ends.
func Again(ctx context.Context, call func() error) error {
	for {
		err := call()
		switch status.Code(err) {
		case codes.Unavailable, codes.Aborted, codes.Canceled, codes.DeadlineExceeded:
		default:
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// InTurn calls functions one after the other, until one fails.
func InTurn(calls ...func() error) error {
	for _, call := range calls {
		if err := call(); err != nil {
			return err
		}
	}
	return nil
}

// Access modes of most volumes here.
const (
	Writer      = csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER
	MultiWriter = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
)

// Block stands for block access, in place of the name of a filesystem.
const Block = "block"

// Capability returns the capability of a volume with a filesystem, or of Block.
func Capability(filesystem string, mode csi.VolumeCapability_AccessMode_Mode) *csi.VolumeCapability {
	c := &csi.VolumeCapability{AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode}}
	if filesystem == Block {
		c.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
	} else {
		c.AccessType = &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: filesystem}}
	}
	return c
}

// Request returns a request for a volume of size bytes, with a filesystem or of Block, that several pods of a node may write.
func Request(name, filesystem string, size int64) *csi.CreateVolumeRequest {
	return &csi.CreateVolumeRequest{Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: size},
		VolumeCapabilities: []*csi.VolumeCapability{Capability(filesystem, MultiWriter)}}
}

// FromSnapshot makes a request ask for a volume with the content of a snapshot.
func FromSnapshot(r *csi.CreateVolumeRequest, id string) *csi.CreateVolumeRequest {
	r.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
		Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: id}}}
	return r
}

// FromVolume makes a request ask for a clone of a volume.
func FromVolume(r *csi.CreateVolumeRequest, id string) *csi.CreateVolumeRequest {
	r.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
		Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: id}}}
	return r
}

// Create makes a volume.
func (c *Client) Create(ctx context.Context, r *csi.CreateVolumeRequest) (*Volume, error) {
	response, err := c.CreateVolume(ctx, r)
	if err != nil {
		return nil, err
	}
	v := c.Volume(response.GetVolume().GetVolumeId(), r.GetName(), r.GetVolumeCapabilities()[0])
	v.Size = response.GetVolume().GetCapacityBytes()
	return v, nil
}

// Volume returns a volume that exists, or will. Its paths are named by name.
func (c *Client) Volume(id, name string, capability *csi.VolumeCapability) *Volume {
	return &Volume{Client: c, ID: id, Name: name, Capability: capability, Staging: filepath.Join(c.Dir, "stage", name)}
}

// Inline returns an inline ephemeral volume, as a pod asks for it with attributes.
func (c *Client) Inline(id string, capability *csi.VolumeCapability, attributes map[string]string) *Volume {
	v := &Volume{Client: c, ID: id, Name: id, Capability: capability, Attributes: map[string]string{"csi.storage.k8s.io/ephemeral": "true"}}
	for key, value := range attributes {
		v.Attributes[key] = value
	}
	return v
}

// RemoveSnapshot deletes a snapshot.
func (c *Client) RemoveSnapshot(ctx context.Context, id string) error {
	_, err := c.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: id})
	return err
}

// Group makes snapshots of volumes at one point in time. It fails unless they are ready, one for each volume.
func (c *Client) Group(ctx context.Context, name string, volumes ...string) (*csi.VolumeGroupSnapshot, error) {
	response, err := c.CreateVolumeGroupSnapshot(ctx, &csi.CreateVolumeGroupSnapshotRequest{Name: name, SourceVolumeIds: volumes})
	group := response.GetGroupSnapshot()
	if err == nil && (!group.GetReadyToUse() || len(group.GetSnapshots()) != len(volumes)) {
		err = fmt.Errorf("group snapshot %s of %d volumes is not ready, or not whole: %v", name, len(volumes), group)
	}
	return group, err
}

// RemoveGroup deletes a group snapshot. members are its snapshots, if the caller knows them.
func (c *Client) RemoveGroup(ctx context.Context, id string, members ...*csi.Snapshot) error {
	r := &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: id}
	for _, member := range members {
		r.SnapshotIds = append(r.SnapshotIds, member.GetSnapshotId())
	}
	_, err := c.DeleteVolumeGroupSnapshot(ctx, r)
	return err
}
