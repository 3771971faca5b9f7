package life

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/node"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// inline is an inline ephemeral volume of a pod, as the kubelet asks for it.
func (d *driver) inline(name string, attributes map[string]string) (*vol, string, *csi.NodePublishVolumeRequest) {
	v := &vol{d, d.Inline(name, co.Capability("ext4", co.Writer), attributes)}
	v.Attributes["csi.storage.k8s.io/pod.name"], v.Attributes["csi.storage.k8s.io/serviceAccount.tokens"] = "pod", "secret"
	target := v.Target("pod-of-" + name)
	return v, target, v.PublishRequest(target, false)
}

func (d *driver) nodePublish(r *csi.NodePublishVolumeRequest) error {
	_, err := d.NodePublishVolume(d.t.Context(), r)
	return err
}

func TestEphemeral(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := newDir(t)
	d := start(t, drivertest.Options{Dir: dir, Pools: []string{
		"default=file://" + dir + "/pool?reservePercent=0", "other=file://" + dir + "/other?reservePercent=0"}})
	for _, kind := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			d := d.in(t)
			v, target, r := d.inline("csi-0123", map[string]string{"size": "320Mi", "provisioning": "thin"})
			r.VolumeCapability = co.Capability(kind, co.Writer)
			for range 2 {
				check.OK(t, d.nodePublish(r))
			}
			if n := mountsAt(t, target); n != 1 {
				t.Errorf("%d mounts at the target", n)
			}
			write(t, v.File(target), 1)
			used := v.usage(target)
			if used.GetTotal() > 320*miB || used.GetTotal() < 200*miB {
				t.Errorf("a volume of 320 MiB shows %d bytes", used.GetTotal())
			}
			r.Readonly = true
			check.Code(t, d.nodePublish(r), codes.AlreadyExists)
			r.Readonly = false
			holds(t, v.File(target), 1)
			check.Code(t, v.delete(), codes.OK) // it has no such ID
			check.Code(t, d.volume(drivertest.VolumeID("csi-0123"), "", v.Capability).delete(), codes.FailedPrecondition)
			for range 2 {
				check.OK(t, v.unpublish(target))
			}
			absent(t, target)
			d.nothingLeft()
		})
	}
	for name, c := range map[string]struct {
		attributes map[string]string
		code       codes.Code
	}{
		"no size":              {nil, codes.OK},
		"another pool":         {map[string]string{"pool": "other", "size": "16M"}, codes.OK},
		"a pool there is not":  {map[string]string{"pool": "nowhere"}, codes.InvalidArgument},
		"a size of nothing":    {map[string]string{"size": "0"}, codes.InvalidArgument},
		"a size of words":      {map[string]string{"size": "large"}, codes.InvalidArgument},
		"a size of fractions":  {map[string]string{"size": "1.5Gi"}, codes.InvalidArgument},
		"a size of much":       {map[string]string{"size": "9223372036854775807Ti"}, codes.InvalidArgument},
		"more than there is":   {map[string]string{"size": "15Ti"}, codes.ResourceExhausted},
		"its filesystem":       {map[string]string{"fstype": "ext4"}, codes.OK},
		"another filesystem":   {map[string]string{"fstype": "xfs"}, codes.InvalidArgument},
		"an unknown attribute": {map[string]string{"flavour": "sweet"}, codes.InvalidArgument},
	} {
		t.Run(name, func(t *testing.T) {
			d := d.in(t)
			v, target, r := d.inline("csi-4567", c.attributes)
			check.Code(t, d.nodePublish(r), c.code)
			if c.code == codes.OK {
				directory := "pool"
				if c.attributes["pool"] != "" {
					directory = c.attributes["pool"]
				}
				if _, err := os.Stat(filepath.Join(dir, directory, "volumes", volume.KeyOf("csi-4567")+".img")); err != nil {
					t.Error(err)
				}
				check.OK(t, v.unpublish(target))
			}
			absent(t, target)
			d.nothingLeft()
			if left, err := os.ReadDir(filepath.Join(dir, "other/volumes")); err != nil || len(left) > 0 {
				t.Errorf("left in the other pool: %v %v", left, err)
			}
		})
	}
	t.Run("block access", func(t *testing.T) {
		_, target, r := d.inline("csi-89ab", nil)
		r.VolumeCapability = co.Capability(block, co.Writer)
		check.Code(t, d.in(t).nodePublish(r), codes.InvalidArgument)
		absent(t, target)
	})
	t.Run("read-only", func(t *testing.T) {
		d := d.in(t)
		v, target, r := d.inline("csi-cdef", map[string]string{"size": "32Mi"})
		r.Readonly = true
		for range 2 {
			check.OK(t, d.nodePublish(r))
		}
		if err := os.Mkdir(filepath.Join(target, "directory"), 0o700); !errors.Is(err, unix.EROFS) {
			t.Errorf("a write ends with %v", err)
		}
		check.OK(t, v.unpublish(target))
	})
	t.Run("the ID of a volume", func(t *testing.T) {
		d := d.in(t)
		v := d.made(co.Request("volume", "ext4", smallest["ext4"]))
		_, _, r := d.inline("volume", nil)
		r.VolumeId = v.ID
		check.Code(t, d.nodePublish(r), codes.InvalidArgument)
		// Its name is no ephemeral volume's ID either.
		_, _, r = d.inline("volume", nil)
		check.Code(t, d.nodePublish(r), codes.AlreadyExists)
		check.OK(t, v.unpublish(r.GetTargetPath()))
		if files := d.inPool(); len(files) != 2 {
			t.Errorf("the volume is %v now", files)
		}
		check.OK(t, v.delete())
	})
	d.nothingLeft()
}

// TestEphemeralAllowed: the operator says whether there are inline ephemeral volumes, where, and how large.
func TestEphemeralAllowed(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := newDir(t)
	o := drivertest.Options{Dir: dir, Pools: []string{"default=file://" + dir + "/pool?reservePercent=0", "scratch=file://" + dir + "/scratch?reservePercent=0"},
		Ephemeral: &node.Ephemeral{Pools: []string{"scratch"}, MaxSize: 64 * miB}}
	d := start(t, o)
	for name, c := range map[string]struct {
		attributes map[string]string
		code       codes.Code
		size       int64
	}{
		"of no pool and size":  {nil, codes.OK, 64 * miB},
		"of its pool":          {map[string]string{"pool": "scratch", "size": "16Mi"}, codes.OK, 16 * miB},
		"as large as can be":   {map[string]string{"size": "64Mi"}, codes.OK, 64 * miB},
		"larger":               {map[string]string{"size": "67108865"}, codes.OutOfRange, 0},
		"much larger and thin": {map[string]string{"size": "1Ti", "provisioning": "thin"}, codes.OutOfRange, 0},
		"of another pool":      {map[string]string{"pool": "default", "size": "16Mi"}, codes.InvalidArgument, 0},
		"of no pool":           {map[string]string{"pool": "nowhere"}, codes.InvalidArgument, 0},
		"of an empty name":     {map[string]string{"pool": ""}, codes.InvalidArgument, 0},
	} {
		t.Run(name, func(t *testing.T) {
			d := d.in(t)
			v, target, r := d.inline("csi-0123", c.attributes)
			for range 2 {
				check.Code(t, d.nodePublish(r), c.code)
			}
			if c.code == codes.OK {
				if info, err := os.Stat(filepath.Join(dir, "scratch/volumes", volume.KeyOf("csi-0123")+".img")); err != nil || info.Size() != c.size {
					t.Errorf("its image has not %d bytes: %v, %v", c.size, info, err)
				}
			}
			check.OK(t, v.unpublish(target))
			absent(t, target)
			d.nothingLeft()
		})
	}
	// A filesystem that does not fit is told so.
	_, target, r := d.inline("csi-xfs", nil)
	r.VolumeCapability = co.Capability("xfs", co.Writer)
	check.Code(t, d.nodePublish(r), codes.OutOfRange)
	absent(t, target)

	// What is there stays its pod's when the operator allows less, or nothing; also over a reboot.
	for name, less := range map[string]*node.Ephemeral{"less": {Pools: []string{"default"}, MaxSize: 16 * miB}, "nothing": {}} {
		t.Run(name, func(t *testing.T) {
			o.Ephemeral = &node.Ephemeral{Pools: []string{"scratch", "default"}}
			d.Stop()
			d := start(t, o)
			v, target, r := d.inline("csi-4567", map[string]string{"size": "32Mi"})
			check.OK(t, d.nodePublish(r))
			write(t, v.File(target), 1)
			drivertest.Unmount(t, target)
			d.Stop()
			o.Ephemeral = less
			d = start(t, o)
			v, _, r = d.inline("csi-4567", map[string]string{"size": "32Mi"})
			for range 2 {
				check.OK(t, d.nodePublish(r))
			}
			holds(t, v.File(target), 1)
			_, other, r := d.inline("csi-89ab", map[string]string{"size": "32Mi"})
			if err := d.nodePublish(r); err == nil {
				t.Error("another one is made")
			} else if len(less.Pools) == 0 {
				check.Code(t, err, codes.FailedPrecondition)
			}
			absent(t, other)
			check.OK(t, v.unpublish(target))
			d.nothingLeft()
		})
	}
	if left, err := os.ReadDir(filepath.Join(dir, "scratch/volumes")); err != nil || len(left) > 0 {
		t.Errorf("left in the other pool: %v %v", left, err)
	}
}

// TestEphemeralFailure: a publish that fails leaves nothing, except for the data of a
// volume that was published before.
func TestEphemeralFailure(t *testing.T) {
	d := start(t, drivertest.Options{})
	v, target, r := d.inline("csi-0123", map[string]string{"size": "32Mi"})
	r.VolumeCapability.GetMount().MountFlags = []string{"no-such-option"}
	check.Code(t, d.nodePublish(r), codes.InvalidArgument)
	absent(t, target)
	d.nothingLeft()

	r.VolumeCapability.GetMount().MountFlags = nil
	check.OK(t, d.nodePublish(r))
	write(t, v.File(target), 1)
	drivertest.Unmount(t, target) // as a reboot does
	image := filepath.Join(d.Dir, "pool/volumes", volume.KeyOf("csi-0123")+".img")
	put(t, image, 0, string(make([]byte, 4096)))
	check.Code(t, d.nodePublish(r), codes.DataLoss)
	if _, err := os.Stat(image); err != nil {
		t.Errorf("what is left of the data is gone: %v", err)
	}
	check.OK(t, v.unpublish(target))
	d.nothingLeft()
}

// TestEphemeralRestart: the driver may end at any point of a publication.
func TestEphemeralRestart(t *testing.T) {
	attributes := map[string]string{"size": "32Mi"}
	// What has happened when the driver ends, after a whole publication.
	for name, undo := range map[string]func(t *testing.T, d *driver, v *vol, target string){
		"published": func(*testing.T, *driver, *vol, string) {},
		"formatted, not mounted": func(t *testing.T, _ *driver, _ *vol, target string) {
			drivertest.Unmount(t, target)
		},
		"made, not formatted": func(t *testing.T, d *driver, _ *vol, target string) {
			drivertest.Unmount(t, target)
			id := volume.ID{Kind: "vol", Pool: "default", Key: volume.KeyOf("csi-0123")}
			check.OK(t, d.Store.SetFormat(t.Context(), id, volume.Format{State: volume.Formatting, Type: "ext4"}))
		},
		"no target": func(t *testing.T, _ *driver, _ *vol, target string) {
			drivertest.Unmount(t, target)
			check.OK(t, os.Remove(target))
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := start(t, drivertest.Options{})
			_, target, r := d.inline("csi-0123", attributes)
			check.OK(t, d.nodePublish(r))
			undo(t, d, nil, target)
			d = d.restart()
			v, _, r := d.inline("csi-0123", attributes)
			check.OK(t, d.nodePublish(r))
			write(t, v.File(target), 1)
			if name == "published" {
				d = d.restart()
				v, _, r = d.inline("csi-0123", attributes)
				check.OK(t, d.nodePublish(r))
				holds(t, v.File(target), 1)
			}
			undo(t, d, v, target)
			d = d.restart()
			v, _, _ = d.inline("csi-0123", attributes)
			check.OK(t, v.unpublish(target))
			absent(t, target)
			d.nothingLeft()
		})
	}
	t.Run("the pod is gone", func(t *testing.T) {
		d := start(t, drivertest.Options{})
		var targets []string
		for _, name := range []string{"csi-gone", "csi-there"} {
			_, target, r := d.inline(name, attributes)
			check.OK(t, d.nodePublish(r))
			targets = append(targets, target)
		}
		drivertest.Unmount(t, targets[0])
		check.OK(t, os.Remove(targets[0]))
		check.OK(t, os.Remove(filepath.Dir(targets[0])))
		d = d.restart()
		var keys []string
		for _, suffix := range []string{".img", ".rec"} {
			keys = append(keys, "volumes/"+volume.KeyOf("csi-there")+suffix)
		}
		if files := d.inPool(); !slices.Equal(files, keys) {
			t.Errorf("in the pool are %v, want %v", files, keys)
		}
		check.OK(t, d.volume("csi-gone", "csi-gone", nil).unpublish(targets[0]))
		check.OK(t, d.volume("csi-there", "csi-there", nil).unpublish(targets[1]))
		if _, err := os.Lstat(filepath.Dir(targets[0])); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the directory of the pod is back: %v", err)
		}
		d.nothingLeft()
	})
}

// TestEphemeralDamagedRecord: the pod of an inline ephemeral volume whose record cannot be read ends all the same: an error would not pass, and the kubelet would
// keep the pod, and its node, for ever. Nothing of the volume is removed, and the pool says that the record is damaged. Once the record can be read again, a
// start deletes the volume.
func TestEphemeralDamagedRecord(t *testing.T) {
	drivertest.NeedRoot(t)
	d := start(t, drivertest.Options{})
	v, target, r := d.inline("csi-0123", map[string]string{"size": "32Mi"})
	check.OK(t, d.nodePublish(r))
	write(t, v.File(target), 1)
	path := filepath.Join(d.Dir, "pool/volumes", volume.KeyOf("csi-0123")+".rec")
	rec, err := os.ReadFile(path)
	check.OK(t, err)
	check.OK(t, os.WriteFile(path, make([]byte, len(rec)), 0o600))
	d = d.restart()
	v, _, r = d.inline("csi-0123", nil)
	holds(t, v.File(target), 1)
	check.Code(t, d.nodePublish(r), codes.DataLoss, "record")
	holds(t, v.File(target), 1)
	for range 2 {
		check.OK(t, v.unpublish(target))
		absent(t, target)
	}
	if files := d.inPool(); len(files) != 2 {
		t.Errorf("in the pool are %v, want image and record", files)
	}
	check.OK(t, os.Remove(filepath.Dir(target))) // as the kubelet does once the pod has ended
	check.OK(t, os.WriteFile(path, rec, 0o600))  // as from a backup, or by a newer driver
	d = d.restart()
	d.nothingLeft()
}
