package life

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
)

// storage is what NodeGetStorageHealth says.
func (d *driver) storage() []string {
	d.t.Helper()
	response, err := d.NodeGetStorageHealth(d.t.Context(), &csi.NodeGetStorageHealthRequest{})
	check.OK(d.t, err)
	var all []string
	for _, one := range response.GetBackendHealth() {
		if one.GetMessage() == "" {
			d.t.Errorf("%s says nothing to a human", one.GetReason())
		}
		all = append(all, one.GetStatus().String()+" "+one.GetReason())
	}
	return all
}

func (d *driver) probe() error {
	_, err := d.Probe(d.t.Context(), &csi.ProbeRequest{})
	return err
}

// sick lists the volumes with problems, in pages of a size.
func (d *driver) sick(pageSize int32) map[string][]string {
	d.t.Helper()
	found := map[string][]string{}
	for token := ""; ; {
		response, err := d.ControllerListVolumeHealth(d.t.Context(), &csi.ControllerListVolumeHealthRequest{MaxEntries: pageSize, StartingToken: token})
		check.OK(d.t, err)
		if pageSize > 0 && len(response.GetEntries()) > int(pageSize) {
			d.t.Errorf("a page of %d has %d entries", pageSize, len(response.GetEntries()))
		}
		for _, one := range response.GetEntries() {
			if _, twice := found[one.GetVolumeId()]; twice {
				d.t.Errorf("%s is listed twice", one.GetVolumeId())
			}
			found[one.GetVolumeId()] = reasons(one)
		}
		if token = response.GetNextToken(); token == "" {
			return found
		}
	}
}

func expect(t testing.TB, have []string, want ...string) {
	t.Helper()
	if !slices.Equal(have, want) {
		t.Errorf("got %q, want %q", have, want)
	}
}

func TestVolumeHealth(t *testing.T) {
	d := start(t, drivertest.Options{})
	healthy := d.made(co.Request("healthy", "ext4", smallest["ext4"]))
	target := healthy.running()
	expect(t, healthy.problems())
	missing := d.made(co.Request("missing", "ext4", smallest["ext4"]))
	truncated := d.made(co.Request("truncated", block, smallest[block]))
	damaged := d.made(co.Request("damaged", "ext4", smallest["ext4"]))
	if all := d.sick(0); len(all) > 0 {
		t.Errorf("sick on the first day: %v", all)
	}
	check.OK(t, os.Remove(missing.image()))
	check.OK(t, os.Truncate(truncated.image(), smallest[block]-4096))
	expect(t, missing.problems(), "DATA_LOSS ImageMissing")
	expect(t, truncated.problems(), "DATA_LOSS ImageTruncated")
	check.OK(t, truncated.claim())
	check.Code(t, truncated.stage(), codes.DataLoss)
	check.OK(t, truncated.release())
	for _, pageSize := range []int32{0, 1, 2, 3} {
		all := d.sick(pageSize)
		if len(all) != 2 || !slices.Equal(all[missing.ID], []string{"DATA_LOSS ImageMissing"}) || !slices.Equal(all[truncated.ID], []string{"DATA_LOSS ImageTruncated"}) {
			t.Errorf("listed in pages of %d: %v", pageSize, all)
		}
	}
	_, err := d.ControllerListVolumeHealth(t.Context(), &csi.ControllerListVolumeHealthRequest{MaxEntries: -1})
	check.Code(t, err, codes.InvalidArgument)
	_, err = d.ControllerListVolumeHealth(t.Context(), &csi.ControllerListVolumeHealthRequest{StartingToken: "x"})
	check.Code(t, err, codes.Aborted)
	check.OK(t, missing.delete())
	check.OK(t, truncated.delete())

	// A damaged record is seen when the driver reads it, at its start. It harms nobody else.
	rec, err := os.ReadFile(damaged.record())
	check.OK(t, err)
	put(t, damaged.record(), 0, strings.Repeat("\xff", len(rec)))
	d = d.restart()
	healthy, damaged = d.volume(healthy.ID, healthy.Name, healthy.Capability), d.volume(damaged.ID, damaged.Name, damaged.Capability)
	expect(t, damaged.problems(), "DATA_LOSS RecordDamaged")
	expect(t, d.storage(), "STORAGE_DEGRADED RecordDamaged")
	check.OK(t, d.probe())
	check.Code(t, damaged.stage(), codes.DataLoss)
	check.Code(t, damaged.delete(), codes.FailedPrecondition, "record cannot be read")
	_, err = d.create(co.Request("damaged", "ext4", smallest["ext4"]))
	check.Code(t, err, codes.DataLoss)
	expect(t, healthy.problems())
	write(t, healthy.File(target), 1)
	check.OK(t, healthy.down(target))
	check.OK(t, os.WriteFile(damaged.record(), rec, 0o600))
	d = d.restart()
	check.OK(t, d.volume(damaged.ID, damaged.Name, damaged.Capability).delete())
	d.nothingLeft()
}

// TestFilesystemHealth: what the kernel found on an ext4.
func TestFilesystemHealth(t *testing.T) {
	for name, c := range map[string]struct {
		flags []string
		want  []string
	}{
		"goes on":         {[]string{"errors=continue"}, []string{"DEGRADED FilesystemErrors"}},
		"turns read-only": {nil, []string{"INACCESSIBLE FilesystemReadOnly", "DEGRADED FilesystemErrors"}},
	} {
		t.Run(name, func(t *testing.T) {
			d := start(t, drivertest.Options{})
			v := d.made(co.Request("volume", "ext4", smallest["ext4"]))
			v.Capability.GetMount().MountFlags = c.flags
			target := v.running()
			write(t, v.File(target), 1)
			expect(t, v.problems())
			check.OK(t, os.WriteFile("/sys/fs/ext4/"+v.device()+"/trigger_fs_error", []byte("a test"), 0))
			// The kernel writes the account of its errors a moment later.
			for deadline := time.Now().Add(time.Minute); !slices.Equal(v.problems(), c.want) && time.Now().Before(deadline); {
				time.Sleep(10 * time.Millisecond)
			}
			expect(t, v.problems(), c.want...)
			if all := d.sick(1); !slices.Equal(all[v.ID], c.want) {
				t.Errorf("listed: %v", all)
			}
			check.OK(t, v.publish(target, false)) // as it was published
			holds(t, v.File(target), 1)
			// A pod that comes now would not know.
			if another := v.Target("another"); c.flags == nil {
				check.Code(t, v.publish(another, false), codes.FailedPrecondition, "read-only", "stage it anew")
				check.OK(t, v.publish(another, true))
				holds(t, v.File(another), 1)
				check.OK(t, v.unpublish(another))
			}
			// Mounting it anew checks it.
			check.OK(t, v.unpublish(target))
			check.OK(t, v.unstage())
			check.OK(t, v.stage())
			check.OK(t, v.publish(target, false))
			expect(t, v.problems())
			write(t, v.File(target), 2)
			check.OK(t, v.down(target))
			d.nothingLeft()
		})
	}
}

// TestLostPool: a pool whose directory went away answers for nothing, and makes nothing in
// its place.
func TestLostPool(t *testing.T) {
	d := start(t, drivertest.Options{})
	v := d.made(co.Request("volume", "ext4", smallest["ext4"]))
	check.OK(t, d.probe())
	expect(t, d.storage())
	directory, away := filepath.Join(d.Dir, "pool"), filepath.Join(d.Dir, "away")
	for name, replace := range map[string]func(){
		"nothing in its place": func() {},
		"another in its place": func() { check.OK(t, os.MkdirAll(directory+"/volumes", 0o700)) },
	} {
		t.Run(name, func(t *testing.T) {
			d, v := d.in(t), *v
			v.driver, v.Client = d, d.Client
			check.OK(t, os.Rename(directory, away))
			replace()
			check.OK(t, d.probe()) // a restart would mend nothing
			expect(t, d.storage(), "STORAGE_UNREACHABLE PoolUnavailable")
			expect(t, v.problems(), "INACCESSIBLE PoolUnavailable")
			_, err := d.create(co.Request("another", "ext4", smallest["ext4"]))
			check.Code(t, err, codes.Unavailable)
			_, err = d.GetCapacity(t.Context(), &csi.GetCapacityRequest{})
			check.Code(t, err, codes.Unavailable)
			check.OK(t, os.RemoveAll(directory))
			check.OK(t, os.Rename(away, directory))
			check.OK(t, d.probe())
			expect(t, v.problems())
		})
	}
	check.OK(t, v.delete())
	d.nothingLeft()
}

// TestFullPool: a pool says in time that it is filling up.
func TestFullPool(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := newDir(t)
	drivertest.MountNew(t, "ext4", filepath.Join(dir, "pool"), 128*miB)
	d := start(t, drivertest.Options{Dir: dir, Pools: []string{"default=file://" + dir + "/pool?reservePercent=10"}})
	expect(t, d.storage())
	filler := filepath.Join(dir, "pool/filler")
	drivertest.Run(t, "fallocate", "-l", "110M", filler)
	expect(t, d.storage(), "STORAGE_DEGRADED PoolNearlyFull")
	check.OK(t, d.probe())
	_, err := d.create(co.Request("volume", "ext4", 16*miB))
	check.Code(t, err, codes.ResourceExhausted)
	check.OK(t, os.Remove(filler))
	expect(t, d.storage())
	v := d.made(co.Request("volume", "ext4", 16*miB))
	check.OK(t, v.delete())
	d.nothingLeft()
}

// TestReadOnlyByOption: a volume is read-only that is so by one of several mount options in a word, and that is how it
// shall be.
func TestReadOnlyByOption(t *testing.T) {
	d := start(t, drivertest.Options{})
	v := d.made(co.Request("volume", "xfs", smallest["xfs"]))
	target := v.running()
	write(t, v.File(target), 1)
	check.OK(t, v.unpublish(target))
	check.OK(t, v.unstage())
	check.OK(t, v.expand(2*smallest["xfs"]))
	v.Capability.GetMount().MountFlags = []string{"noatime,ro"}
	check.OK(t, v.stage()) // and does not grow
	for range 2 {
		check.OK(t, v.publish(target, false))
		holds(t, v.File(target), 1)
		if said := v.problems(); len(said) > 0 {
			t.Errorf("said %v", said)
		}
		d = d.restart()
		v.driver, v.Client = d, d.Client
	}
	check.OK(t, v.down(target))
	d.nothingLeft()
}
