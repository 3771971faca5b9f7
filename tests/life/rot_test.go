package life

import (
	"bytes"
	"embed"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
)

// Lies at rest: what the driver reads of its own is not what it wrote. Whatever it is: nothing is formatted,
// nothing is shown to another volume, and the other volumes go on.

const slotSize = 8192 // bytes of one of a record's two slots

// used makes a volume that has data, and takes it down again, but for its bytes.
func (d *driver) used(name, kind string) *vol {
	d.t.Helper()
	v := d.made(co.Request(name, kind, smallest[kind]))
	target := v.running()
	write(d.t, v.File(target), 1)
	v.rest(target)
	return v
}

// rest takes a volume down, but does not delete it.
func (v *vol) rest(target string) {
	v.t.Helper()
	check.OK(v.t, v.unpublish(target))
	check.OK(v.t, v.unstage())
	check.OK(v.t, v.release())
}

// at is a volume of before, for the driver of now.
func (v *vol) at(d *driver) *vol { return d.volume(v.ID, v.Name, v.Capability) }

// intact makes sure that a volume has its data, whatever the record says; or that it is refused, and
// nothing of its bytes was changed. It returns the error.
func (v *vol) intact(sum [32]byte) error {
	v.t.Helper()
	target, err := v.up()
	if err == nil {
		holds(v.t, v.File(target), 1)
		v.rest(target)
		return nil
	}
	if now := checksum(v.t, v.image()); now != sum {
		v.t.Fatalf("the volume is refused (%v), and its bytes are others", err)
	}
	if err := v.release(); err != nil {
		v.t.Logf("release: %v", err)
	}
	return err
}

// rewritten is a record with its JSON changed, in both slots, with right checksums.
func rewritten(t *testing.T, record []byte, change func(map[string]any)) []byte {
	t.Helper()
	header, rest, _ := bytes.Cut(record, []byte("\n"))
	var version, generation, length int
	if _, err := fmt.Sscanf(string(header), "ashlar-record %d gen=%d len=%d", &version, &generation, &length); err != nil {
		t.Fatal(err)
	}
	var fields map[string]any
	decoder := json.NewDecoder(bytes.NewReader(rest[:length]))
	decoder.UseNumber()
	check.OK(t, decoder.Decode(&fields))
	change(fields)
	body, err := json.Marshal(fields)
	check.OK(t, err)
	text := fmt.Sprintf("ashlar-record %d gen=%d len=%d ", version, generation, len(body))
	sum := crc32.Checksum(append([]byte(text), body...), crc32.MakeTable(crc32.Castagnoli))
	slot := make([]byte, slotSize)
	copy(slot, fmt.Sprintf("%scrc32c=%08x\n%s", text, sum, body))
	return append(slot, slot...)
}

// labelled is a record with labels set, or removed if empty.
func labelled(t *testing.T, record []byte, labels map[string]string) []byte {
	return rewritten(t, record, func(fields map[string]any) {
		all, _ := fields["labels"].(map[string]any)
		all = maps.Clone(all)
		if all == nil {
			all = map[string]any{}
		}
		for key, value := range labels {
			if all[key] = value; value == "" {
				delete(all, key)
			}
		}
		fields["labels"] = all
	})
}

// TestRotInSlots: a bit that flips anywhere in a record takes nothing back, wherever it is. (All of them
// are tried over the records alone, in pkg/blockdev.)
func TestRotInSlots(t *testing.T) {
	for _, kind := range []string{"ext4", "xfs", "btrfs", block} {
		t.Run(kind, func(t *testing.T) {
			seed := uint64(time.Now().UnixNano())
			t.Log("seed", seed)
			random := rand.New(rand.NewPCG(seed, 0))
			d := start(t, drivertest.Options{})
			v, other := d.used("volume", kind), d.used("other", kind)
			sum := checksum(t, v.image())
			for i := range 12 {
				d.Stop()
				record, err := os.ReadFile(v.record())
				check.OK(t, err)
				used := len(bytes.TrimRight(record[:slotSize], "\x00"))
				slot := i % 2
				at := random.IntN(used * 8)
				record[slot*slotSize+at/8] ^= 1 << (at % 8)
				check.OK(t, os.WriteFile(v.record(), record, 0o600))
				d = start(t, d.options)
				if err := v.at(d).intact(sum); err != nil {
					t.Fatalf("bit %d of slot %d: %v", at, slot, err)
				}
				sum = checksum(t, v.image()) // the journal was replayed
				expect(t, d.storage())
			}
			d.Stop()
			record, err := os.ReadFile(v.record())
			check.OK(t, err)
			record[50] ^= 1
			record[slotSize+90] ^= 1
			check.OK(t, os.WriteFile(v.record(), record, 0o600))
			d = start(t, d.options)
			check.Code(t, v.at(d).intact(sum), codes.DataLoss)
			check.Code(t, v.at(d).delete(), codes.FailedPrecondition)
			check.OK(t, other.at(d).intact([32]byte{}))
			check.OK(t, other.at(d).delete())
		})
	}
}

// TestOldRecord: a record of an earlier time, as a backup or a disk that lost its writes has it, formats
// nothing that was used since.
func TestOldRecord(t *testing.T) {
	for _, kind := range []string{"ext4", "xfs", "btrfs", block} {
		t.Run(kind, func(t *testing.T) {
			d := start(t, drivertest.Options{})
			v := d.made(co.Request("volume", kind, smallest[kind]))
			blank, err := os.ReadFile(v.record())
			check.OK(t, err)
			target := v.running()
			write(t, v.File(target), 1)
			v.rest(target)
			now, err := os.ReadFile(v.record())
			check.OK(t, err)
			sum := checksum(t, v.image())
			as := kind
			if kind == block {
				as = "ext4"
			}
			old := map[string][]byte{"created": blank, "blank": labelled(t, now, map[string]string{"format": ""})}
			if kind != block { // what a raw volume's user wrote is no different from what mkfs leaves when it is cut short
				old["formatting"] = labelled(t, now, map[string]string{"format": "formatting:" + as})
			}
			for name, record := range old {
				d.Stop()
				check.OK(t, os.WriteFile(v.record(), record, 0o600))
				d = start(t, d.options)
				w := v.at(d)
				w.Capability = co.Capability(as, co.MultiWriter)
				switch err := w.intact(sum); {
				case name == "formatting": // a crash right after the first mount leaves the same: it is kept
					check.OK(t, err)
				case err == nil:
					t.Errorf("%s: it was staged by a record that says it is blank", name)
				}
				sum = checksum(t, v.image()) // the journal was replayed
				d.Stop()
				check.OK(t, os.WriteFile(v.record(), now, 0o600))
				d = start(t, d.options)
				check.OK(t, v.at(d).intact(sum))
				sum = checksum(t, v.image())
			}
			check.OK(t, v.at(d).delete())
			d.nothingLeft()
		})
	}
}

// TestRecordOfAnother: the record of another volume, or one slot of it that was written to the wrong place,
// shows nothing of a volume to who has the other.
func TestRecordOfAnother(t *testing.T) {
	d := start(t, drivertest.Options{})
	a, b, other := d.used("a", "ext4"), d.used("b", block), d.used("other", "ext4")
	sums := map[*vol][32]byte{a: checksum(t, a.image()), b: checksum(t, b.image())}
	recordA, err := os.ReadFile(a.record())
	check.OK(t, err)
	recordB, err := os.ReadFile(b.record())
	check.OK(t, err)
	for name, put := range map[string]func() (of *vol, record []byte){
		"all of it":       func() (*vol, []byte) { return a, recordB },
		"the first slot":  func() (*vol, []byte) { return a, append(bytes.Clone(recordB[:slotSize]), recordA[slotSize:]...) },
		"the second slot": func() (*vol, []byte) { return b, append(bytes.Clone(recordB[:slotSize]), recordA[slotSize:]...) },
	} {
		d.Stop()
		v, record := put()
		check.OK(t, os.WriteFile(v.record(), record, 0o600))
		d = start(t, d.options)
		if err := v.at(d).intact(sums[v]); err == nil {
			t.Errorf("%s: it is used with the record of another", name)
		} else {
			check.Code(t, err, codes.DataLoss)
		}
		check.OK(t, other.at(d).intact([32]byte{}))
		d.Stop()
		check.OK(t, os.WriteFile(a.record(), recordA, 0o600))
		check.OK(t, os.WriteFile(b.record(), recordB, 0o600))
		d = start(t, d.options)
	}
	for _, v := range []*vol{a, b, other} {
		check.OK(t, v.at(d).intact([32]byte{}))
		check.OK(t, v.at(d).delete())
	}
	d.nothingLeft()
}

// TestImageWithoutRecord: a volume that lost its record is not made again over its bytes, nor removed by
// a create that fails, nor by a delete.
func TestImageWithoutRecord(t *testing.T) {
	d := start(t, drivertest.Options{})
	v := d.used("volume", block)
	sum := checksum(t, v.image())
	record, err := os.ReadFile(v.record())
	check.OK(t, err)
	d.Stop()
	check.OK(t, os.Remove(v.record()))
	d = start(t, d.options)
	expect(t, d.storage(), "STORAGE_DEGRADED UnknownImage")
	thin := co.Request("volume", block, smallest[block])
	thin.Parameters = map[string]string{"provisioning": "thin"}
	copied, err := other(d).snapshot("cut")
	check.OK(t, err)
	for range 2 {
		for name, r := range map[string]error{
			"create":        second(d.create(co.Request("volume", block, smallest[block]))),
			"larger":        second(d.create(co.Request("volume", block, 4*smallest[block]))),
			"thin":          second(d.create(thin)),
			"from snapshot": second(d.create(co.FromSnapshot(co.Request("volume", block, smallest[block]), copied.GetSnapshotId()))),
			"stage":         v.at(d).stage(),
		} {
			check.Code(t, r, codes.DataLoss)
			if now := checksum(t, v.image()); now != sum {
				t.Fatalf("%s: the bytes are others", name)
			}
		}
		check.Code(t, v.at(d).delete(), codes.FailedPrecondition, "record")
		check.OK(t, v.at(d).unstage())
		d = d.restart()
	}
	if now := checksum(t, v.image()); now != sum {
		t.Fatal("the bytes are others")
	}
	// Lost while the driver runs.
	w := d.used("lost", block)
	sum = checksum(t, w.image())
	d.Stop()
	lost, err := os.ReadFile(w.record())
	check.OK(t, err)
	image, err := os.ReadFile(w.image())
	check.OK(t, err)
	d = start(t, d.options)
	check.OK(t, w.at(d).delete())
	check.OK(t, os.WriteFile(w.image(), image, 0o600)) // an operator brings back the one half
	check.Code(t, second(d.create(co.Request("lost", block, smallest[block]))), codes.DataLoss)
	if now := checksum(t, w.image()); now != sum {
		t.Fatal("the bytes are others")
	}
	// As from a backup.
	d.Stop()
	check.OK(t, os.WriteFile(v.record(), record, 0o600))
	check.OK(t, os.WriteFile(w.record(), lost, 0o600))
	d = start(t, d.options)
	expect(t, d.storage())
	for _, x := range []*vol{v, w} {
		check.OK(t, x.at(d).intact([32]byte{}))
		check.OK(t, x.at(d).delete())
	}
}

// other is a volume beside those of a test.
func other(d *driver) *vol { return d.made(co.Request("other", block, smallest[block])) }

// firstVersion is a pool without its images.
//
//go:embed testdata/pool-1
var firstVersion embed.FS

// TestPoolOfFirstVersion: a pool as the driver before wrote it is read, whole, and is the same pool from
// then on; the driver before would refuse each of its records, in either slot.
func TestPoolOfFirstVersion(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := newDir(t)
	written, err := fs.Sub(firstVersion, "testdata/pool-1")
	check.OK(t, err)
	check.OK(t, os.CopyFS(filepath.Join(dir, "pool"), written))
	records, err := filepath.Glob(filepath.Join(dir, "pool/*/*.rec"))
	check.OK(t, err)
	if len(records) != 5 {
		t.Fatalf("records %v", records)
	}
	for _, record := range records { // the images were not recorded
		image := strings.TrimSuffix(record, ".rec") + ".img"
		check.OK(t, os.WriteFile(image, nil, 0o600))
		check.OK(t, os.Truncate(image, smallest["ext4"]))
	}
	pools := []string{"default=file://" + dir + "/pool?reservePercent=0&create=0"}
	for range 2 {
		d := start(t, drivertest.Options{Dir: dir, Pools: pools})
		expect(t, d.storage())
		for name, want := range map[string]struct {
			kind string
			code codes.Code
		}{
			"blank": {"ext4", codes.OK}, "claimed": {"ext4", codes.OK}, // of no bytes, so it can be formatted
			"formatted": {"ext4", codes.DataLoss}, // its bytes were not recorded
			"raw":       {block, codes.OK},
		} {
			v := d.made(co.Request(name, want.kind, smallest["ext4"]))
			check.OK(t, v.claim())
			check.Code(t, v.stage(), want.code)
			check.OK(t, v.unstage())
			check.OK(t, v.release())
		}
		for _, record := range records {
			b, err := os.ReadFile(record)
			check.OK(t, err)
			for slot := range 2 {
				// What the driver before looks at first of all.
				if !bytes.HasPrefix(b[slot*slotSize:], []byte("ashlar-record 2 ")) {
					t.Errorf("%s, slot %d: %.40q", record, slot, b[slot*slotSize:])
				}
			}
		}
		d.Stop()
	}
	if _, err := os.Stat(filepath.Join(dir, "pool/pool")); err != nil {
		t.Error(err)
	}
}

func second[T any](_ T, err error) error { return err }

// TestRotInGroup: a group snapshot that loses one of its members (its record is unreadable, or somebody removed
// it) does not lose the others.
func TestRotInGroup(t *testing.T) {
	for name, lose := range map[string]func(t *testing.T, record, image string){
		"record": func(t *testing.T, record, _ string) { check.OK(t, os.WriteFile(record, []byte("noise"), 0o600)) },
		"both": func(t *testing.T, record, image string) {
			check.OK(t, os.Remove(record))
			check.OK(t, os.Remove(image))
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := start(t, drivertest.Options{})
			a, b := d.used("a", block), d.used("b", block)
			request := &csi.CreateVolumeGroupSnapshotRequest{Name: "group", SourceVolumeIds: []string{a.ID, b.ID}}
			made, err := d.CreateVolumeGroupSnapshot(t.Context(), request)
			check.OK(t, err)
			lost, kept := made.GetGroupSnapshot().GetSnapshots()[0], made.GetGroupSnapshot().GetSnapshots()[1]
			path := filepath.Join(d.Dir, "pool/snapshots", lost.GetSnapshotId()[strings.LastIndexByte(lost.GetSnapshotId(), '.')+1:])
			lose(t, path+".rec", path+".img")
			d = d.restart()
			for range 2 {
				v, err := d.create(co.FromSnapshot(requestFor("restored", kept), kept.GetSnapshotId()))
				check.OK(t, err)
				target := v.running()
				holds(t, v.File(target), 1)
				check.OK(t, v.down(target))
				d = d.restart()
			}
			_, err = d.CreateVolumeGroupSnapshot(t.Context(), request)
			check.Code(t, err, codes.DataLoss, "1 of its 2 snapshots")
			_, err = d.DeleteVolumeGroupSnapshot(t.Context(), &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: made.GetGroupSnapshot().GetGroupSnapshotId(), SnapshotIds: []string{lost.GetSnapshotId(), kept.GetSnapshotId()}})
			check.OK(t, err) // what cannot be read stays, and health tells of it
			list, err := d.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{})
			check.OK(t, err)
			for _, entry := range list.GetEntries() {
				t.Errorf("left: %v", entry)
			}
		})
	}
}

// requestFor is for a raw volume of a snapshot's size.
func requestFor(name string, s *csi.Snapshot) *csi.CreateVolumeRequest {
	return co.Request(name, block, s.GetSizeBytes())
}
