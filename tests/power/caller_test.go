package power

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// caller is the CO and the users of the volumes of one driver.
type caller struct {
	*drivertest.Driver
	known *model // what was promised so far
}

// callTime is how long one call may take with all its retries.
const callTime = time.Minute

// again makes a call as a sidecar does: as long as the answer says that the work may still be
// going on.
func again(call func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	defer cancel()
	for {
		err := call(ctx)
		switch status.Code(err) {
		case codes.Unavailable, codes.Aborted:
			if ctx.Err() == nil {
				time.Sleep(5 * time.Millisecond)
				continue
			}
		}
		return err
	}
}

func volumeID(name string) string {
	return volume.ID{Kind: blockdev.Volume, Pool: pool, Key: volume.KeyOf(name)}.String()
}

func snapshotID(name string) string {
	return volume.ID{Kind: blockdev.Snapshot, Pool: pool, Key: volume.KeyOf(name)}.String()
}

func groupID(name string) string { return volume.GroupID{Key: volume.KeyOf(name)}.String() }

func (v *vol) id() string { return volumeID(v.name) }

func capability(kind string) *csi.VolumeCapability {
	c := drivertest.Capability(kind)
	c.AccessMode.Mode = csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER
	return c
}

// do does a step, and takes down what is promised when it returns nil.
func (c *caller) do(s step) error {
	err := again(func(ctx context.Context) error { return c.try(ctx, s) })
	if err != nil {
		return fmt.Errorf("%s: %w", s, err)
	}
	c.known.apply(s)
	return nil
}

func (c *caller) try(ctx context.Context, s step) error {
	v := c.known.volumes[s.name]
	switch s.verb {
	case create:
		r := &csi.CreateVolumeRequest{Name: s.name, CapacityRange: &csi.CapacityRange{RequiredBytes: s.size}, VolumeCapabilities: []*csi.VolumeCapability{capability(s.kind)}}
		if source := c.known.volumes[s.of]; source != nil {
			r.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: source.id()}}}
		} else if source := c.known.snapshots[s.of]; source != nil {
			id, err := c.find(ctx, source, s.of)
			if err != nil {
				return err
			}
			r.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: id}}}
		}
		response, err := c.CreateVolume(ctx, r)
		if err == nil && (response.GetVolume().GetCapacityBytes() != s.size || response.GetVolume().GetVolumeId() != volumeID(s.name)) {
			err = fmt.Errorf("created %s, not of %d bytes", response, s.size)
		}
		return err
	case up:
		return c.up(ctx, v)
	case fill:
		return c.fill(v, s)
	case expand:
		if _, err := c.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{VolumeId: v.id(), CapacityRange: &csi.CapacityRange{RequiredBytes: s.size}}); err != nil || !v.up {
			return err
		}
		_, err := c.NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{VolumeId: v.id(), VolumePath: c.target(v), StagingTargetPath: c.staging(v), VolumeCapability: capability(v.kind)})
		return err
	case down:
		return c.down(ctx, v)
	case remove:
		_, err := c.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: v.id()})
		return err
	case snapshot:
		response, err := c.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: s.name, SourceVolumeId: c.known.volumes[s.of].id()})
		if err == nil && !response.GetSnapshot().GetReadyToUse() {
			err = fmt.Errorf("%s is not ready", response)
		}
		return err
	case forget:
		_, err := c.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: snapshotID(s.name)})
		return err
	case together:
		var sources []string
		for _, member := range s.members {
			sources = append(sources, c.known.volumes[member].id())
		}
		response, err := c.CreateVolumeGroupSnapshot(ctx, &csi.CreateVolumeGroupSnapshotRequest{Name: s.name, SourceVolumeIds: sources})
		if err == nil && (!response.GetGroupSnapshot().GetReadyToUse() || len(response.GetGroupSnapshot().GetSnapshots()) != len(sources)) {
			err = fmt.Errorf("%s is not ready, or not whole", response)
		}
		return err
	case disband:
		_, err := c.DeleteVolumeGroupSnapshot(ctx, &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: groupID(s.name)})
		return err
	}
	return fmt.Errorf("unknown step %s", s)
}

// find returns the ID of a snapshot: of a member of a group only the driver knows it.
func (c *caller) find(ctx context.Context, s *snap, name string) (string, error) {
	if s.group == "" {
		return snapshotID(name), nil
	}
	listed, err := c.ListSnapshots(ctx, &csi.ListSnapshotsRequest{SourceVolumeId: volumeID(s.of)})
	for _, entry := range listed.GetEntries() {
		if entry.GetSnapshot().GetGroupSnapshotId() == groupID(s.group) {
			return entry.GetSnapshot().GetSnapshotId(), nil
		}
	}
	return "", errors.Join(fmt.Errorf("the group snapshot %s has no member of %s", s.group, s.of), err)
}

func (c *caller) staging(v *vol) string { return filepath.Join(c.Dir, "staging", v.name) }
func (c *caller) target(v *vol) string  { return filepath.Join(c.Dir, "pods", v.name) }

// file is where the user of a volume that is up reads and writes.
func (c *caller) file(v *vol) string {
	if v.kind == block {
		return c.target(v)
	}
	return filepath.Join(c.target(v), "data")
}

func (c *caller) up(ctx context.Context, v *vol) error {
	if err := errors.Join(os.MkdirAll(c.staging(v), 0o700), os.MkdirAll(filepath.Dir(c.target(v)), 0o700)); err != nil {
		return err
	}
	published, err := c.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{VolumeId: v.id(), NodeId: drivertest.Node, VolumeCapability: capability(v.kind)})
	if err != nil {
		return err
	}
	if _, err := c.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: v.id(), StagingTargetPath: c.staging(v), VolumeCapability: capability(v.kind), PublishContext: published.GetPublishContext()}); err != nil {
		return err
	}
	_, err = c.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{VolumeId: v.id(), StagingTargetPath: c.staging(v), TargetPath: c.target(v), VolumeCapability: capability(v.kind), PublishContext: published.GetPublishContext()})
	return err
}

func (c *caller) down(ctx context.Context, v *vol) error {
	if _, err := c.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: v.id(), TargetPath: c.target(v)}); err != nil {
		return err
	}
	if _, err := c.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: v.id(), StagingTargetPath: c.staging(v)}); err != nil {
		return err
	}
	_, err := c.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: v.id(), NodeId: drivertest.Node})
	return err
}

// identity is that of the filesystem of a volume that is up: ext4 derives it from its UUID.
func (c *caller) identity(v *vol) (any, error) {
	if v.kind == block {
		return nil, nil
	}
	var st unix.Statfs_t
	if err := unix.Statfs(c.target(v), &st); err != nil {
		return nil, fmt.Errorf("statfs of %s: %w", v.name, err)
	}
	return st.Fsid, nil
}

var zeros = make([]byte, blockSize)

// bytesOf is what a block holds.
func bytesOf(s stamp, number int64) []byte {
	if s == (stamp{}) {
		return zeros
	}
	random := rand.NewChaCha8(sha256.Sum256(fmt.Appendf(nil, "%s %d %d", s.volume, s.seed, number)))
	data := make([]byte, blockSize)
	_, _ = random.Read(data)
	return data
}

// fill writes blocks, durably.
func (c *caller) fill(v *vol, s step) error {
	f, err := os.OpenFile(c.file(v), os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	for _, b := range s.blocks {
		if _, err := f.WriteAt(bytesOf(stamp{s.name, s.seed}, b), b*blockSize); err != nil {
			return err
		}
	}
	if err := f.Sync(); err != nil || v.kind == block {
		return err
	}
	folder, err := os.Open(filepath.Dir(f.Name()))
	if err != nil {
		return err
	}
	defer folder.Close()
	return folder.Sync()
}

// holds makes sure that a volume that is up has every byte that was written to it and synced,
// and zeros wherever nothing was written.
func (c *caller) holds(v *vol) error {
	f, err := os.Open(c.file(v))
	if errors.Is(err, os.ErrNotExist) && v.kind != block && len(v.data) == 0 {
		return nil
	}
	if err != nil {
		return fmt.Errorf("volume %s: %w", v.name, err)
	}
	defer f.Close()
	have, err := io.ReadAll(f)
	if err != nil {
		return fmt.Errorf("read volume %s: %w", v.name, err)
	}
	if v.kind == block && int64(len(have)) != v.size {
		return fmt.Errorf("volume %s has %d bytes, not %d", v.name, len(have), v.size)
	}
	for b := range v.data {
		if (b+1)*blockSize > int64(len(have)) {
			return fmt.Errorf("volume %s ends before block %d, which was written and synced", v.name, b)
		}
	}
	for at := int64(0); at < int64(len(have)); at += blockSize {
		b := at / blockSize
		got := have[at:min(at+blockSize, int64(len(have)))]
		allowed := [][]byte{bytesOf(v.data[b], b)}
		if bytes.Equal(got, allowed[0][:len(got)]) {
			continue
		}
		if s, ok := v.maybe[b]; ok {
			allowed = append(allowed, bytesOf(s, b))
		}
		for i := 0; i < len(got); i += sector {
			end := min(i+sector, len(got))
			if !slices.ContainsFunc(allowed, func(want []byte) bool { return bytes.Equal(want[i:end], got[i:end]) }) {
				return fmt.Errorf("volume %s: block %d has the wrong bytes from %d on: %x ..., written was %v", v.name, b, i, got[i:i+8], v.data[b])
			}
		}
	}
	return nil
}
