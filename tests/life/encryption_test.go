package life

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/luks"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// needEncryption skips a test where the kernel cannot encrypt (hack/lvm/test.sh driver).
func needEncryption(t *testing.T) {
	t.Helper()
	drivertest.NeedRoot(t)
	if err := luks.Available(); err != nil {
		t.Skip(err)
	}
}

// TestEncryptedLife is TestLife of encrypted volumes, on some kinds of pool.
func TestEncryptedLife(t *testing.T) {
	needEncryption(t)
	for _, c := range []struct{ pool, kind, provisioning string }{
		{"plain", block, "thick"}, {"xfs", "ext4", "thin"}, {"xfs", block, "thick"},
		{linear, "xfs", "thick"}, {linear, block, "thick"}, {thin, "btrfs", "thin"}, {thin, block, "thin"},
	} {
		t.Run(strings.Join([]string{c.pool + " pool", c.kind, c.provisioning}, "/"), func(t *testing.T) {
			d := startOn(t, c.pool)
			life(t, d, c.pool, c.kind, map[string]string{"provisioning": c.provisioning, "encryption": "luks2"})
			d.nothingLeft()
		})
	}
}

// encrypted is a request for an encrypted volume.
func encrypted(name, kind string) *csi.CreateVolumeRequest {
	r := co.Request(name, kind, smallest[kind])
	r.Parameters = map[string]string{"encryption": "luks2"}
	return r
}

// TestKeys: a missing and a wrong passphrase are errors that say so, and change nothing.
func TestKeys(t *testing.T) {
	needEncryption(t)
	for _, kind := range []string{"ext4", block} {
		t.Run(kind, func(t *testing.T) {
			d := start(t, drivertest.Options{})
			v := d.made(encrypted("v", kind))
			check.OK(t, v.claim())
			refused := func(before string) {
				t.Helper()
				record, err := os.ReadFile(v.record())
				check.OK(t, err)
				right := v.Secrets
				for _, c := range []struct {
					secrets map[string]string
					code    codes.Code
				}{{nil, codes.InvalidArgument}, {map[string]string{"key": passphrase}, codes.InvalidArgument}, {map[string]string{"passphrase": ""}, codes.InvalidArgument},
					{map[string]string{"passphrase": strings.TrimSpace(passphrase) + "\n"}, codes.FailedPrecondition}} {
					if before == "it was formatted" && c.code == codes.FailedPrecondition {
						continue // any passphrase is right
					}
					v.Secrets = c.secrets
					err := v.stage()
					check.Code(t, err, c.code, `"passphrase"`, "csi.storage.k8s.io/node-stage-secret-name")
					if strings.Contains(err.Error(), "two lines") {
						t.Errorf("the error tells the passphrase: %v", err)
					}
				}
				v.Secrets = right
				now, err := os.ReadFile(v.record())
				check.OK(t, err)
				if !bytes.Equal(now, record) {
					t.Errorf("before %s a refused stage changed the record: %s", before, now)
				}
			}
			refused("it was formatted")
			check.OK(t, v.stage())
			target := v.Target("pod")
			check.OK(t, v.publish(target, false))
			write(t, v.File(target), 1)
			check.OK(t, v.unpublish(target))
			check.OK(t, v.unstage())
			refused("it was used")
			check.OK(t, v.stage())
			check.OK(t, v.publish(target, false))
			holds(t, v.File(target), 1)
			check.OK(t, v.down(target))
			d.nothingLeft()
		})
	}
}

// TestKeySlots: a key is added, and another one removed, while the volume is in use; each stage takes any that is there.
func TestKeySlots(t *testing.T) {
	needEncryption(t)
	d := start(t, drivertest.Options{})
	v := d.made(encrypted("v", "ext4"))
	target := v.running()
	write(t, v.File(target), 1)
	dir := t.TempDir()
	for key, text := range map[string]string{"old": passphrase, "new": "another one"} {
		check.OK(t, os.WriteFile(filepath.Join(dir, key), []byte(text), 0o600))
	}
	device := drivertest.HeaderDevice(t, v.key())
	keys := func(args ...string) {
		t.Helper()
		if out, err := exec.Command("cryptsetup", append([]string{"--batch-mode"}, args...)...).CombinedOutput(); err != nil {
			t.Fatalf("cryptsetup %v: %v: %s", args, err, out)
		}
	}
	again := func(text string) error {
		check.OK(t, v.unpublish(target))
		check.OK(t, v.unstage())
		v.Secrets = map[string]string{"passphrase": text}
		if err := v.stage(); err != nil {
			return err
		}
		return v.publish(target, false)
	}
	keys("luksAddKey", "--pbkdf-memory", "65536", "--pbkdf-parallel", "4", "--pbkdf-force-iterations", "4", "--key-file", filepath.Join(dir, "old"), device, filepath.Join(dir, "new"))
	holds(t, v.File(target), 1)
	for _, text := range []string{"another one", passphrase, "another one"} {
		check.OK(t, again(text))
		holds(t, v.File(target), 1)
	}
	keys("luksRemoveKey", "--key-file", filepath.Join(dir, "old"), device)
	holds(t, v.File(target), 1)
	check.Code(t, again(passphrase), codes.FailedPrecondition)
	v.Secrets = map[string]string{"passphrase": "another one"}
	check.OK(t, v.stage())
	check.OK(t, v.publish(target, false))
	holds(t, v.File(target), 1)
	check.OK(t, v.down(target))
	d.nothingLeft()
}

// shown is the size of what a pod sees, in bytes.
func (v *vol) shown(target string) int64 {
	if !v.Block() {
		return v.usage(target).GetTotal()
	}
	f, err := os.Open(target)
	check.OK(v.t, err)
	defer f.Close()
	size, err := f.Seek(0, io.SeekEnd)
	check.OK(v.t, err)
	return size
}

// TestGrowsWithKey: a volume in use grows with its passphrase, and without it when it is staged next.
func TestGrowsWithKey(t *testing.T) {
	needEncryption(t)
	for _, kind := range []string{"ext4", block} {
		t.Run(kind, func(t *testing.T) {
			d := start(t, drivertest.Options{})
			v := d.made(encrypted("v", kind))
			target := v.running()
			write(t, v.File(target), 1)
			before, size := v.shown(target), smallest[kind]+64*miB
			check.OK(t, v.expand(size))
			right := v.Secrets
			v.Secrets = nil
			if kind == block { // publishing brings no secret, and another pod may start before the node has grown it
				check.OK(t, v.unpublish(target))
				check.OK(t, v.publish(target, false))
			}
			check.Code(t, v.nodeExpand(target), codes.FailedPrecondition, `"passphrase"`, "csi.storage.k8s.io/node-expand-secret-name")
			v.Secrets = map[string]string{"passphrase": "wrong"}
			check.Code(t, v.nodeExpand(target), codes.FailedPrecondition)
			if now := v.shown(target); now != before {
				t.Errorf("it grew from %d to %d bytes without its key", before, now)
			}
			v.Secrets = right
			check.OK(t, v.nodeExpand(target))
			grown := v.shown(target)
			if grown < before+48*miB {
				t.Errorf("it grew from %d to %d bytes", before, grown)
			}
			check.OK(t, v.expand(size+64*miB))
			check.OK(t, v.unpublish(target))
			check.OK(t, v.unstage())
			check.OK(t, v.stage())
			check.OK(t, v.publish(target, false))
			if now := v.shown(target); now < grown+48*miB {
				t.Errorf("staged again it has %d bytes, %d before", now, grown)
			}
			holds(t, v.File(target), 1)
			check.OK(t, v.down(target))
			d.nothingLeft()
		})
	}
}

// TestCryptoErase: once a volume, a snapshot or an ephemeral volume is deleted, the disk has nothing of what was in front of its data, so no key opens the rest.
func TestCryptoErase(t *testing.T) {
	needEncryption(t)
	dir := newDir(t)
	disk := drivertest.MountNew(t, "ext4", filepath.Join(dir, "pool"), 1<<30) // it leaves on the disk what a deleted file had
	d := start(t, drivertest.Options{Dir: dir})
	// The blocks of an image that are not zero: those of its header, and those after.
	blocks := func(name string) (header, data map[block4k]bool) {
		t.Helper()
		header, data = map[block4k]bool{}, map[block4k]bool{}
		eachBlock(t, filepath.Join(dir, "pool", name), func(at int64, b block4k) {
			if at < luks.HeaderSize {
				header[b] = true
			} else {
				data[b] = true
			}
		})
		return header, data
	}
	// How many blocks of the disk are among some.
	onDisk := func(some map[block4k]bool) (n int) {
		t.Helper()
		check.OK(t, exec.Command("sync", "-f", filepath.Join(dir, "pool")).Run())
		eachBlock(t, disk, func(_ int64, b block4k) {
			if some[b] {
				n++
			}
		})
		return n
	}
	erased := func(header, data map[block4k]bool) {
		t.Helper()
		if n := onDisk(header); n > 0 {
			t.Errorf("the disk has %d blocks of a header once what it was of is deleted", n)
		}
		if onDisk(data) == 0 {
			t.Error("the disk has nothing of the data either, so this shows nothing")
		}
	}
	v := d.made(encrypted("v", "ext4"))
	target := v.running()
	snapshot, err := v.snapshot("s")
	check.OK(t, err)
	header, data := blocks("volumes/" + volume.KeyOf("v") + ".img")
	ofSnapshot, _ := blocks("snapshots/" + volume.KeyOf("s") + ".img")
	maps.Copy(header, ofSnapshot)
	if n := onDisk(header); n < 2*len(ofSnapshot) {
		t.Fatalf("the disk has %d blocks of two headers of %d", n, len(ofSnapshot))
	}
	check.OK(t, v.down(target))
	check.OK(t, d.deleteSnapshot(snapshot.GetSnapshotId()))
	erased(header, data)

	inline, target, r := d.inline("csi-0123", map[string]string{"size": "64Mi", "encryption": "luks2"})
	check.Code(t, d.nodePublish(r), codes.InvalidArgument, `"passphrase"`, "nodePublishSecretRef")
	r.Secrets = map[string]string{"passphrase": passphrase}
	check.OK(t, d.nodePublish(r))
	write(t, inline.File(target), 1)
	header, data = blocks("volumes/" + volume.KeyOf("csi-0123") + ".img")
	if n := onDisk(header); n == 0 {
		t.Fatal("the disk has no block of a header")
	}
	check.OK(t, inline.unpublish(target))
	erased(header, data)
	d.nothingLeft()
}

type block4k [4096]byte

// eachBlock calls a function with each block of a file that is not zero.
func eachBlock(t *testing.T, path string, do func(at int64, b block4k)) {
	t.Helper()
	f, err := os.Open(path)
	check.OK(t, err)
	defer f.Close()
	r := bufio.NewReaderSize(f, 1<<20)
	var b block4k
	for at := int64(0); ; at += int64(len(b)) {
		if _, err := io.ReadFull(r, b[:]); err == io.EOF {
			return
		} else if err != nil {
			t.Fatal(err)
		}
		if b != (block4k{}) {
			do(at, b)
		}
	}
}

// TestHeaderIsKept: what is where a header is to be, or in its place, is never overwritten, and a header that is gone is told.
func TestHeaderIsKept(t *testing.T) {
	needEncryption(t)
	d := start(t, drivertest.Options{})
	poke := func(v *vol, at int64, data string) {
		t.Helper()
		f, err := os.OpenFile(v.image(), os.O_WRONLY, 0)
		check.OK(t, err)
		_, err = f.WriteAt([]byte(data), at)
		check.OK(t, errors.Join(err, f.Sync(), f.Close()))
	}
	fresh := d.made(encrypted("fresh", "ext4"))
	check.OK(t, fresh.claim())
	poke(fresh, luks.HeaderSize+20*miB, "somebody's")
	check.Code(t, fresh.stage(), codes.FailedPrecondition, "never encrypted", "not blank")
	check.OK(t, fresh.release())
	check.OK(t, fresh.delete())

	raw := d.made(encrypted("raw", block))
	target := raw.running()
	write(t, raw.File(target), 1)
	check.OK(t, luks.Erase(t.Context(), raw.image()))
	check.OK(t, raw.unpublish(target))
	check.OK(t, raw.publish(target, false)) // for a pod that copies what is left
	holds(t, raw.File(target), 1)
	if problems := raw.problems(); len(problems) != 1 || !strings.HasSuffix(problems[0], " HeaderLost") {
		t.Errorf("in use, and without its header, its health is %v", problems)
	}
	check.OK(t, raw.unpublish(target))
	check.OK(t, raw.unstage())
	check.Code(t, raw.stage(), codes.DataLoss, "no LUKS2 header")
	check.OK(t, raw.release())
	check.OK(t, raw.delete())

	used := d.made(encrypted("used", "ext4"))
	target = used.running()
	check.OK(t, used.unpublish(target))
	check.OK(t, used.unstage())
	check.OK(t, luks.SetUUID(t.Context(), used.image(), "00112233-4455-6677-8899-aabbccddeeff"))
	check.Code(t, used.stage(), codes.FailedPrecondition, "00112233-4455-6677-8899-aabbccddeeff")
	check.OK(t, luks.Erase(t.Context(), used.image()))
	check.Code(t, used.stage(), codes.DataLoss, "no LUKS2 header", "luksHeaderRestore")
	check.OK(t, used.release())
	check.OK(t, used.delete())
	d.nothingLeft()
}

// TestEncryptionOfCopies: copies of what is encrypted are encrypted, and no others.
func TestEncryptionOfCopies(t *testing.T) {
	needEncryption(t)
	d := start(t, drivertest.Options{})
	for _, name := range []string{"encrypted", "plain"} {
		r := co.Request(name, "ext4", smallest["ext4"])
		other := map[string]string{"encryption": "luks2"}
		if name == "encrypted" {
			r.Parameters, other = other, nil
		}
		v := d.made(r)
		snapshot, err := v.snapshot("of " + name)
		check.OK(t, err)
		for _, copied := range []*csi.CreateVolumeRequest{co.FromVolume(co.Request("c", "ext4", smallest["ext4"]), v.ID), co.FromSnapshot(co.Request("c", "ext4", smallest["ext4"]), snapshot.GetSnapshotId())} {
			copied.Parameters = other
			_, err := d.create(copied)
			check.Code(t, err, codes.InvalidArgument, "encryption")
		}
		check.OK(t, d.deleteSnapshot(snapshot.GetSnapshotId()))
		check.OK(t, v.delete())
	}
	d.nothingLeft()
}

// TestEncryptedElsewhere: what is copied to another pool is as encrypted there, opens with the same passphrase, and beside its source.
func TestEncryptedElsewhere(t *testing.T) {
	needEncryption(t)
	dir := newDir(t)
	d := start(t, drivertest.Options{Dir: dir, Pools: []string{
		"default=file://" + dir + "/pool?reservePercent=0", "other=file://" + dir + "/other?reservePercent=0"}})
	v := d.made(encrypted("v", "ext4"))
	target := v.running()
	write(t, v.File(target), 1)
	snapshot, err := v.snapshot("s")
	check.OK(t, err)
	write(t, v.File(target), 2)
	restore, clone := co.FromSnapshot(encrypted("restore", "ext4"), snapshot.GetSnapshotId()), co.FromVolume(encrypted("clone", "ext4"), v.ID)
	restore.Parameters["pool"], clone.Parameters["pool"] = "other", "other"
	restored, cloned := d.made(restore), d.made(clone)
	for copied, seed := range map[*vol]uint64{restored: 1, cloned: 2} {
		at := copied.running()
		holds(t, copied.File(at), seed)
		write(t, copied.File(at), 3)
		holds(t, v.File(target), 2)
		check.OK(t, copied.down(at))
	}
	check.OK(t, d.deleteSnapshot(snapshot.GetSnapshotId()))
	check.OK(t, v.down(target))
	d.nothingLeft()
}
