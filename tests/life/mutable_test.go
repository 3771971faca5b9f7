package life

import (
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
)

// queue reads the settings of the device of a volume.
func (v *vol) queue() map[string]string {
	v.t.Helper()
	loops := drivertest.LoopsOver(v.image())
	if len(loops) != 1 {
		v.t.Fatalf("the devices are %v", loops)
	}
	read := func(device, name string) string {
		text, err := os.ReadFile(filepath.Join("/sys/block", device, "queue", name))
		check.OK(v.t, err)
		return strings.TrimSpace(string(text))
	}
	_, scheduler, _ := strings.Cut(read(loops[0], "scheduler"), "[")
	scheduler, _, _ = strings.Cut(scheduler, "]")
	// What reads ahead is what is read.
	return map[string]string{"readAheadKiB": read(v.device(), "read_ahead_kb"), "ioScheduler": scheduler}
}

// device is the kernel's name of the device that the volume is used as: over the loop device of its image, if there is a device mapper.
func (v *vol) device() string {
	v.t.Helper()
	loops := drivertest.LoopsOver(v.image())
	if len(loops) != 1 {
		v.t.Fatalf("the devices are %v", loops)
	}
	if mapped, _ := filepath.Glob("/sys/block/" + loops[0] + "/holders/dm-*"); len(mapped) > 0 {
		return filepath.Base(mapped[0])
	}
	return loops[0]
}

func (v *vol) modify(parameters map[string]string) error {
	_, err := v.ControllerModifyVolume(v.t.Context(), &csi.ControllerModifyVolumeRequest{VolumeId: v.ID, MutableParameters: parameters})
	return err
}

func TestMutableParameters(t *testing.T) {
	for _, kind := range []string{"ext4", block} {
		t.Run(kind, func(t *testing.T) {
			d := start(t, drivertest.Options{})
			want := map[string]string{"readAheadKiB": "256", "ioScheduler": "mq-deadline"}
			expect := func(v *vol) {
				t.Helper()
				if have := v.queue(); !maps.Equal(have, want) {
					t.Fatalf("the device has %v, want %v", have, want)
				}
			}
			r := co.Request("volume", kind, smallest[kind])
			r.MutableParameters = maps.Clone(want)
			v := d.made(r)
			target := v.running()
			expect(v)

			// Live, one at a time; the other stays.
			want["readAheadKiB"] = "4096"
			check.OK(t, v.modify(map[string]string{"readAheadKiB": "4096"}))
			expect(v)
			want["ioScheduler"] = "none"
			for range 2 {
				check.OK(t, v.modify(map[string]string{"ioScheduler": "none"}))
			}
			expect(v)

			// Refused, with nothing changed.
			for _, bad := range []map[string]string{
				{"readAheadKiB": "many"}, {"readAheadKiB": "-4"}, {"readAheadKiB": "3"}, {"readAheadKiB": "65540"}, {"readAheadKiB": "0256"}, {"readAheadKiB": ""},
				{"ioScheduler": "cfq"}, {"ioScheduler": "NONE"}, {"ioScheduler": "none\n"}, {"queueDepth": "4"}, {"../../../ro": "1"},
				{"readAheadKiB": "128", "ioScheduler": "cfq"}, {"readAheadKiB": "128", "unknown": "1"},
			} {
				check.Code(t, v.modify(bad), codes.InvalidArgument)
				expect(v)
			}
			check.OK(t, v.modify(nil))

			// Again at the next attach, also after a change while nothing is attached.
			check.OK(t, v.unpublish(target))
			check.OK(t, v.unstage())
			check.OK(t, v.stage())
			expect(v)
			check.OK(t, v.unstage())
			want["readAheadKiB"] = "0"
			check.OK(t, v.modify(map[string]string{"readAheadKiB": "0"}))
			d = d.restart()
			v = d.volume(v.ID, v.Name, v.Capability)
			check.OK(t, v.stage())
			expect(v)
			check.OK(t, v.down(target))
			d.nothingLeft()
		})
	}
}

func TestParameters(t *testing.T) {
	d := start(t, drivertest.Options{})
	for name, c := range map[string]struct {
		parameters, mutable map[string]string
		code                codes.Code
	}{
		"none":                 {nil, nil, codes.OK},
		"all":                  {map[string]string{"pool": "default", "provisioning": "thin"}, map[string]string{"readAheadKiB": "0", "ioScheduler": "none"}, codes.OK},
		"of the CO":            {map[string]string{"csi.storage.k8s.io/pvc/name": "claim", "csi.storage.k8s.io/fstype": "ext4"}, nil, codes.OK},
		"filesystem":           {map[string]string{"fstype": "ext4"}, nil, codes.OK},
		"filesystem, old":      {map[string]string{"fsType": "ext4"}, nil, codes.OK},
		"another filesystem":   {map[string]string{"fstype": "xfs"}, nil, codes.InvalidArgument},
		"another, of the CO":   {map[string]string{"csi.storage.k8s.io/fstype": "xfs"}, nil, codes.InvalidArgument},
		"filesystem twice":     {map[string]string{"fstype": "ext4", "csi.storage.k8s.io/fstype": "ext4"}, nil, codes.InvalidArgument},
		"unknown":              {map[string]string{"type": "fast"}, nil, codes.InvalidArgument},
		"of another prefix":    {map[string]string{"storage.k8s.io/name": "claim"}, nil, codes.InvalidArgument},
		"in another case":      {map[string]string{"Pool": "default"}, nil, codes.InvalidArgument},
		"no such pool":         {map[string]string{"pool": "nowhere"}, nil, codes.InvalidArgument},
		"a pool of a path":     {map[string]string{"pool": "../pool"}, nil, codes.InvalidArgument},
		"no such provisioning": {map[string]string{"provisioning": "Thin"}, nil, codes.InvalidArgument},
		"unknown mutable":      {nil, map[string]string{"pool": "default"}, codes.InvalidArgument},
		"bad mutable":          {nil, map[string]string{"readAheadKiB": "1"}, codes.InvalidArgument},
	} {
		t.Run(name, func(t *testing.T) {
			d := d.in(t)
			r := co.Request("volume", "ext4", smallest["ext4"])
			r.Parameters, r.MutableParameters = c.parameters, c.mutable
			v, err := d.create(r)
			check.Code(t, err, c.code)
			if err == nil {
				check.OK(t, v.delete())
			}
			d.nothingLeft()
		})
	}
	v := d.made(co.Request("volume", "ext4", smallest["ext4"]))
	_, err := d.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "snapshot", SourceVolumeId: v.ID, Parameters: map[string]string{"x": "y"}})
	check.Code(t, err, codes.InvalidArgument)
	check.OK(t, v.delete())
}

// TestNames: what differs in a name differs as a volume.
func TestNames(t *testing.T) {
	d := start(t, drivertest.Options{})
	long := strings.Repeat("n", 127)
	ids := map[string]bool{}
	var volumes []*vol
	names := []string{"volume", "Volume", "volume ", "../volume", "volume/..", long + "a", long + "b", "Bänd", "a\tb"}
	for _, name := range names {
		v := d.made(co.Request(name, block, 4096))
		ids[v.ID], volumes = true, append(volumes, v)
	}
	if len(ids) != len(names) {
		t.Errorf("%d names made %d volumes", len(names), len(ids))
	}
	for _, name := range []string{"", strings.Repeat("n", 257), "a\x00b", "a\x1bb", "a\u0085b"} {
		_, err := d.create(co.Request(name, block, 4096))
		check.Code(t, err, codes.InvalidArgument)
	}
	for _, v := range volumes {
		check.OK(t, v.delete())
	}
	d.nothingLeft()
}
