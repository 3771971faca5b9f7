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

	"github.com/ashlar-csi/ashlar/internal/drivertest"
)

// storage is what NodeGetStorageHealth says.
func (d *driver) storage() []string {
	d.t.Helper()
	response, err := d.NodeGetStorageHealth(d.t.Context(), &csi.NodeGetStorageHealthRequest{})
	ok(d.t, err)
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
		ok(d.t, err)
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
	healthy := d.made(request("healthy", "ext4", smallest["ext4"]))
	target := healthy.running()
	expect(t, healthy.problems())
	missing := d.made(request("missing", "ext4", smallest["ext4"]))
	truncated := d.made(request("truncated", block, smallest[block]))
	damaged := d.made(request("damaged", "ext4", smallest["ext4"]))
	if all := d.sick(0); len(all) > 0 {
		t.Errorf("sick on the first day: %v", all)
	}
	ok(t, os.Remove(missing.image()))
	ok(t, os.Truncate(truncated.image(), smallest[block]-4096))
	expect(t, missing.problems(), "DATA_LOSS ImageMissing")
	expect(t, truncated.problems(), "DATA_LOSS ImageTruncated")
	ok(t, truncated.claim())
	wants(t, truncated.stage(), codes.DataLoss)
	ok(t, truncated.release())
	for _, pageSize := range []int32{0, 1, 2, 3} {
		all := d.sick(pageSize)
		if len(all) != 2 || !slices.Equal(all[missing.id], []string{"DATA_LOSS ImageMissing"}) || !slices.Equal(all[truncated.id], []string{"DATA_LOSS ImageTruncated"}) {
			t.Errorf("listed in pages of %d: %v", pageSize, all)
		}
	}
	_, err := d.ControllerListVolumeHealth(t.Context(), &csi.ControllerListVolumeHealthRequest{MaxEntries: -1})
	wants(t, err, codes.InvalidArgument)
	_, err = d.ControllerListVolumeHealth(t.Context(), &csi.ControllerListVolumeHealthRequest{StartingToken: "x"})
	wants(t, err, codes.Aborted)
	ok(t, missing.delete())
	ok(t, truncated.delete())

	// A damaged record is seen when the driver reads it, at its start. It harms nobody else.
	rec, err := os.ReadFile(damaged.record())
	ok(t, err)
	put(t, damaged.record(), 0, strings.Repeat("\xff", len(rec)))
	d = d.restart()
	healthy, damaged = d.volume(healthy.id, healthy.name, healthy.capability), d.volume(damaged.id, damaged.name, damaged.capability)
	expect(t, damaged.problems(), "DATA_LOSS RecordDamaged")
	expect(t, d.storage(), "STORAGE_DEGRADED RecordDamaged")
	ok(t, d.probe())
	wants(t, damaged.stage(), codes.DataLoss)
	wants(t, damaged.delete(), codes.FailedPrecondition, "record cannot be read")
	_, err = d.create(request("damaged", "ext4", smallest["ext4"]))
	wants(t, err, codes.DataLoss)
	expect(t, healthy.problems())
	write(t, healthy.file(target), 1)
	ok(t, healthy.down(target))
	ok(t, os.WriteFile(damaged.record(), rec, 0o600))
	d = d.restart()
	ok(t, d.volume(damaged.id, damaged.name, damaged.capability).delete())
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
			v := d.made(request("volume", "ext4", smallest["ext4"]))
			v.capability.GetMount().MountFlags = c.flags
			target := v.running()
			write(t, v.file(target), 1)
			expect(t, v.problems())
			loop := attached(t, v.image())[0]
			ok(t, os.WriteFile("/sys/fs/ext4/"+loop+"/trigger_fs_error", []byte("a test"), 0))
			// The kernel writes the account of its errors a moment later.
			for deadline := time.Now().Add(time.Minute); !slices.Equal(v.problems(), c.want) && time.Now().Before(deadline); {
				time.Sleep(10 * time.Millisecond)
			}
			expect(t, v.problems(), c.want...)
			if all := d.sick(1); !slices.Equal(all[v.id], c.want) {
				t.Errorf("listed: %v", all)
			}
			ok(t, v.publish(target, false)) // as it was published
			holds(t, v.file(target), 1)
			// Mounting it anew checks it.
			ok(t, v.unpublish(target))
			ok(t, v.unstage())
			ok(t, v.stage())
			ok(t, v.publish(target, false))
			expect(t, v.problems())
			write(t, v.file(target), 2)
			ok(t, v.down(target))
			d.nothingLeft()
		})
	}
}

// TestLostPool: a pool whose folder went away answers for nothing, and makes nothing in
// its place.
func TestLostPool(t *testing.T) {
	d := start(t, drivertest.Options{})
	v := d.made(request("volume", "ext4", smallest["ext4"]))
	ok(t, d.probe())
	expect(t, d.storage())
	folder, away := filepath.Join(d.Dir, "pool"), filepath.Join(d.Dir, "away")
	for name, replace := range map[string]func(){
		"nothing in its place": func() {},
		"another in its place": func() { ok(t, os.MkdirAll(folder+"/volumes", 0o700)) },
	} {
		t.Run(name, func(t *testing.T) {
			d, v := d.in(t), *v
			v.driver = d
			ok(t, os.Rename(folder, away))
			replace()
			ok(t, d.probe()) // a restart would mend nothing
			expect(t, d.storage(), "STORAGE_UNREACHABLE PoolUnavailable")
			expect(t, v.problems(), "INACCESSIBLE PoolUnavailable")
			_, err := d.create(request("another", "ext4", smallest["ext4"]))
			wants(t, err, codes.Unavailable)
			_, err = d.GetCapacity(t.Context(), &csi.GetCapacityRequest{})
			wants(t, err, codes.Unavailable)
			ok(t, os.RemoveAll(folder))
			ok(t, os.Rename(away, folder))
			ok(t, d.probe())
			expect(t, v.problems())
		})
	}
	ok(t, v.delete())
	d.nothingLeft()
}

// TestFullPool: a pool says in time that it is filling up.
func TestFullPool(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := newDir(t)
	poolFolder(t, dir, "ext4", 128*miB)
	d := start(t, drivertest.Options{Dir: dir, Pools: []string{"default=file://" + dir + "/pool?reservePercent=10"}})
	expect(t, d.storage())
	filler := filepath.Join(dir, "pool/filler")
	run(t, "fallocate", "-l", "110M", filler)
	expect(t, d.storage(), "STORAGE_DEGRADED PoolNearlyFull")
	ok(t, d.probe())
	_, err := d.create(request("volume", "ext4", 16*miB))
	wants(t, err, codes.ResourceExhausted)
	ok(t, os.Remove(filler))
	expect(t, d.storage())
	v := d.made(request("volume", "ext4", 16*miB))
	ok(t, v.delete())
	d.nothingLeft()
}

// TestReadOnlyByOption: a volume is read-only that is so by one of several mount options in a word, and that is how it
// shall be.
func TestReadOnlyByOption(t *testing.T) {
	d := start(t, drivertest.Options{})
	v := d.made(request("volume", "xfs", smallest["xfs"]))
	target := v.running()
	write(t, v.file(target), 1)
	ok(t, v.unpublish(target))
	ok(t, v.unstage())
	ok(t, v.expand(2*smallest["xfs"]))
	v.capability.GetMount().MountFlags = []string{"noatime,ro"}
	ok(t, v.stage()) // and does not grow
	for range 2 {
		ok(t, v.publish(target, false))
		holds(t, v.file(target), 1)
		if said := v.problems(); len(said) > 0 {
			t.Errorf("said %v", said)
		}
		d = d.restart()
		v.driver = d
	}
	ok(t, v.down(target))
	d.nothingLeft()
}
