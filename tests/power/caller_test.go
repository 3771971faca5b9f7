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

	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
)

// caller is the CO and the users of the volumes of one driver.
type caller struct {
	*drivertest.Driver
	known *model // what was promised so far
	// secret is the passphrase of all volumes; empty: they are not encrypted.
	secret string
}

// callTime is how long one call may take with all its retries.
const callTime = time.Minute

// volume is one of them as its CO knows it.
func (c *caller) volume(v *vol) *co.Volume {
	volume := c.Volume(v.id(), v.name, co.Capability(v.kind, co.Writer))
	if c.secret != "" {
		volume.Secrets = map[string]string{"passphrase": c.secret}
	}
	return volume
}

func (v *vol) id() string { return drivertest.VolumeID(v.name) }

// do does a step, and takes down what is promised when it returns nil.
func (c *caller) do(s step) error {
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	defer cancel()
	if err := co.Again(ctx, func() error { return c.try(ctx, s) }); err != nil {
		return fmt.Errorf("%s: %w", s, err)
	}
	c.known.apply(s)
	return nil
}

func (c *caller) try(ctx context.Context, s step) error {
	known := c.known.volumes[s.name]
	var v *co.Volume
	if known != nil {
		v = c.volume(known)
	}
	switch s.verb {
	case create:
		return c.create(ctx, s)
	case up:
		_, err := v.Up(ctx)
		return err
	case fill:
		return c.fill(known, s)
	case expand:
		if err := v.Expand(ctx, s.size); err != nil || !known.up {
			return err
		}
		return v.NodeExpand(ctx, c.target(known))
	case down:
		return v.Down(ctx, c.target(known))
	case remove:
		return v.Delete(ctx)
	case snapshot:
		_, err := c.volume(c.known.volumes[s.of]).Snapshot(ctx, s.name)
		return err
	case forget:
		return c.RemoveSnapshot(ctx, drivertest.SnapshotID(s.name))
	case together:
		var sources []string
		for _, member := range s.members {
			sources = append(sources, c.known.volumes[member].id())
		}
		_, err := c.Group(ctx, s.name, sources...)
		return err
	case disband:
		return c.RemoveGroup(ctx, drivertest.GroupID(s.name))
	}
	return fmt.Errorf("unknown step %s", s)
}

func (c *caller) create(ctx context.Context, s step) error {
	r := co.Request(s.name, s.kind, s.size)
	r.VolumeCapabilities[0].AccessMode.Mode = co.Writer
	if c.secret != "" {
		r.Parameters = map[string]string{"encryption": "luks2"}
	}
	if source := c.known.volumes[s.of]; source != nil {
		co.FromVolume(r, source.id())
	} else if source := c.known.snapshots[s.of]; source != nil {
		id, err := c.find(ctx, source, s.of)
		if err != nil {
			return err
		}
		co.FromSnapshot(r, id)
	}
	made, err := c.Create(ctx, r)
	if err == nil && (made.Size != s.size || made.ID != drivertest.VolumeID(s.name)) {
		err = fmt.Errorf("created %s of %d bytes, not of %d", made.ID, made.Size, s.size)
	}
	return err
}

// find returns the ID of a snapshot: of a member of a group only the driver knows it.
func (c *caller) find(ctx context.Context, s *snap, name string) (string, error) {
	if s.group == "" {
		return drivertest.SnapshotID(name), nil
	}
	listed, err := c.ListSnapshots(ctx, &csi.ListSnapshotsRequest{SourceVolumeId: drivertest.VolumeID(s.of)})
	for _, entry := range listed.GetEntries() {
		if entry.GetSnapshot().GetGroupSnapshotId() == drivertest.GroupID(s.group) {
			return entry.GetSnapshot().GetSnapshotId(), nil
		}
	}
	return "", errors.Join(fmt.Errorf("the group snapshot %s has no member of %s", s.group, s.of), err)
}

func (c *caller) target(v *vol) string { return c.volume(v).Target("pod") }

// file is where the user of a volume that is up reads and writes.
func (c *caller) file(v *vol) string { return c.volume(v).File(c.target(v)) }

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
	dir, err := os.Open(filepath.Dir(f.Name()))
	if err != nil {
		return err
	}
	defer dir.Close()
	return dir.Sync()
}

// holds makes sure that a volume that is up has every byte that was written to it and synced,
// and zeros wherever nothing was written; of an encrypted raw volume, anything.
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
		if c.secret != "" && v.kind == block && v.data[b] == (stamp{}) {
			continue
		}
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
