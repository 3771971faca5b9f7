package power

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
)

const miB = 1 << 20

// environment is what a pool is made on: a disk with a filesystem, or with a volume group.
type environment struct {
	name string
	size int64 // of the disk, in bytes
	// secret is the passphrase of the volumes; empty: they are not encrypted.
	secret string
	// prepare prepares the disk, once.
	prepare func(t testing.TB, device string)
	// boot brings up what the pool is on, and returns its URL; down is what a shutdown does.
	boot func(t testing.TB, device, dir string) (url string, down func() error)
	// left lists what there is of volumes.
	left func(t testing.TB, dir string) []string
}

var environments = []environment{
	filesystem("ext4", 400*miB, "-F", "-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0"),
	filesystem("xfs", 400*miB, "-f", "-K"),
	filesystem("btrfs", 800*miB, "-f", "-K"), // which gives its space out in large pieces
	volumeGroup("linear", "lvm://"+group),
	volumeGroup("thin", "lvm://"+group+"/"+thinPool),
	encrypted(filesystem("xfs", 800*miB, "-f", "-K")),
}

// encrypted is an environment whose volumes are encrypted.
func encrypted(g environment) environment {
	g.name, g.secret = "encrypted", "a passphrase"
	return g
}

func filesystem(kind string, size int64, options ...string) environment {
	return environment{name: kind, size: size,
		prepare: func(t testing.TB, device string) {
			drivertest.RunBtrfs(t, slices.Concat([]string{"mkfs." + kind, "-q"}, options, []string{device})...)
		},
		boot: func(t testing.TB, device, dir string) (string, func() error) {
			at := filepath.Join(dir, "disk")
			check.OK(t, os.MkdirAll(at, 0o700))
			drivertest.Run(t, "mount", "-t", kind, device, at)
			return "file://" + at + "/pool?reservePercent=0", func() error { drivertest.Unmount(t, at); return nil }
		},
		left: func(t testing.TB, dir string) []string {
			found, err := filepath.Glob(filepath.Join(dir, "disk", "pool", "*", "*"))
			check.OK(t, err)
			return found
		}}
}

// There is never more than one disk with this group.
const (
	group    = "ashlar-power"
	thinPool = "pool"
)

func volumeGroup(name, url string) environment {
	return environment{name: name, size: 400 * miB,
		prepare: func(t testing.TB, device string) {
			drivertest.Run(t, "vgcreate", "-q", "-y", group, device)
			if name == "thin" {
				drivertest.Run(t, "lvcreate", "-q", "-y", "--type", "thin-pool", "-L", "240M", "-n", thinPool, group)
				drivertest.Run(t, "vgchange", "-q", "-an", group)
			}
		},
		// As docs/reliability.md tells operators to do when the power went while lvm2 wrote its
		// metadata: it flushes nothing between that and the header that points to it, so the
		// header may be there, and what it points to not.
		boot: func(t testing.TB, device, _ string) (string, func() error) {
			if exec.Command("vgs", group).Run() != nil {
				repairs++
				repairGroup(t, device)
			}
			return url, func() error {
				if out, err := exec.Command("vgchange", "-q", "-an", group).CombinedOutput(); err != nil {
					return fmt.Errorf("vgchange: %w: %s", err, out)
				}
				return os.RemoveAll("/dev/" + group)
			}
		},
		left: func(t testing.TB, _ string) []string {
			volumes := strings.Fields(drivertest.Run(t, "lvs", "--noheadings", "-o", "lv_name", group))
			return slices.DeleteFunc(volumes, func(volume string) bool { return volume == thinPool })
		}}
}

// repairs is how often a group had to be repaired.
var repairs int

// repairGroup makes the newest metadata that a physical volume has whole that of the group.
func repairGroup(t testing.TB, device string) {
	t.Helper()
	found := drivertest.Run(t, "pvck", "--dump", "metadata_search", device)
	newest, offset := 0, ""
	for line := range strings.Lines(found) { // metadata at 4608 length 704 crc ae08766d vg ashlar-power seqno 1 id ...
		if w := strings.Fields(line); len(w) > 10 && w[0] == "metadata" && w[1] == "at" {
			if n, err := strconv.Atoi(w[10]); err == nil && n > newest {
				newest, offset = n, w[2]
			}
		}
	}
	if newest == 0 {
		t.Fatalf("no metadata is left on %s: %s", device, found)
	}
	text := filepath.Join(t.TempDir(), "metadata")
	drivertest.Run(t, "pvck", "--dump", "metadata_search", "--settings", "metadata_offset="+offset, "-f", text, device)
	drivertest.Run(t, "pvck", "-y", "--repair", "-f", text, device)
}

// image makes a sparse file of a size, and a loop device over it that ends with the test.
func image(t testing.TB, size int64) (file *os.File, device string) {
	t.Helper()
	file, err := os.OpenFile(filepath.Join(drivertest.Dir(t), "image"), os.O_RDWR|os.O_CREATE, 0o600)
	check.OK(t, err)
	t.Cleanup(func() { _ = file.Close() })
	check.OK(t, file.Truncate(size))
	device = drivertest.Loop(t, file.Name())
	t.Cleanup(func() { drivertest.Run(t, "losetup", "-d", device) })
	return file, device
}

// dirty fills a disk with what is not zero, as earlier users leave it.
func dirty(t testing.TB, disk *os.File, size int64) {
	t.Helper()
	dirt := bytes.Repeat([]byte{0xa5}, miB)
	for at := int64(0); at < size; at += miB {
		_, err := disk.WriteAt(dirt, at)
		check.OK(t, err)
	}
}

// mapped makes a device of the device mapper.
func mapped(t testing.TB, name string, size int64, target string, arguments ...string) (device string) {
	t.Helper()
	drivertest.Run(t, "dmsetup", "create", name, "--table", fmt.Sprintf("0 %d %s %s", size/sector, target, strings.Join(arguments, " ")))
	return "/dev/mapper/" + name
}

// logged is a disk whose writes are logged.
type logged struct {
	t     testing.TB
	name  string
	acked int
}

// ack marks in the log that something was promised, and returns its number.
func (l *logged) ack() int {
	l.t.Helper()
	l.acked++
	drivertest.Run(l.t, "dmsetup", "message", l.name, "0", "mark", strconv.Itoa(l.acked))
	return l.acked
}
