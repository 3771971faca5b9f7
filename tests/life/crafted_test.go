package life

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
)

// crafted makes a volume whose bytes a tenant wrote as a raw device, and returns it as one to mount.
func (d *driver) crafted(name, kind string, size int64, craft func(device string)) *vol {
	d.t.Helper()
	raw := d.made(co.Request(name, block, size))
	target := raw.running()
	craft(target)
	check.OK(d.t, raw.unpublish(target))
	check.OK(d.t, raw.unstage())
	check.OK(d.t, raw.release())
	v := d.volume(raw.ID, raw.Name, co.Capability(kind, co.MultiWriter))
	check.OK(d.t, v.claim())
	return v
}

// super edits the superblock of an ext4 as one who knows its checksum.
func super(t testing.TB, device string, edit func(s []byte)) {
	t.Helper()
	f, err := os.OpenFile(device, os.O_RDWR, 0)
	check.OK(t, err)
	defer f.Close()
	s := make([]byte, 1024)
	_, err = f.ReadAt(s, 1024)
	check.OK(t, err)
	edit(s)
	binary.LittleEndian.PutUint32(s[1020:], ^crc32.Checksum(s[:1020], crc32.MakeTable(crc32.Castagnoli)))
	_, err = f.WriteAt(s, 1024)
	check.OK(t, err)
	check.OK(t, f.Sync())
}

func errorsOption(t testing.TB, v *vol) string {
	t.Helper()
	options, err := os.ReadFile("/proc/fs/ext4/" + v.device() + "/options")
	check.OK(t, err)
	for line := range strings.Lines(string(options)) {
		if strings.HasPrefix(line, "errors=") {
			return strings.TrimSpace(line)
		}
	}
	return ""
}

// TestErrorsOfTenant: what an ext4 does at an error is not its superblock's to say, and nothing of it takes
// the node down: not its errors, nor those in a journal that is replayed before it is checked.
func TestErrorsOfTenant(t *testing.T) {
	d := start(t, drivertest.Options{})
	for name, craft := range map[string]func(device string){
		"tune2fs": func(device string) { drivertest.Run(t, "tune2fs", "-e", "panic", device) },
		"mount options of its own": func(device string) {
			drivertest.Run(t, "tune2fs", "-e", "panic", device)
			super(t, device, func(s []byte) { copy(s[512:576], "debug") })
		},
		"journal to replay": func(device string) {
			drivertest.Run(t, "tune2fs", "-e", "panic", device)
			super(t, device, func(s []byte) { s[96] |= 4 })
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := d.in(t)
			v := d.crafted(strings.ReplaceAll(name, " ", "-"), "ext4", smallest["ext4"], func(device string) {
				drivertest.Run(t, "mkfs.ext4", "-q", device)
				craft(device)
			})
			for flags, want := range map[string]string{"": "errors=remount-ro", "errors=continue": "errors=continue", "errors=remount-ro": "errors=remount-ro"} {
				v.Capability.GetMount().MountFlags = strings.Fields(flags)
				check.OK(t, v.stage())
				if have := errorsOption(t, v); have != want {
					t.Fatalf("mounted with %q, want %s", have, want)
				}
				check.OK(t, v.unstage())
			}
			for _, deadly := range []string{"errors=panic", "noatime,errors=panic", `errors="panic"`} {
				v.Capability.GetMount().MountFlags = []string{deadly}
				check.Code(t, v.stage(), codes.InvalidArgument, "take the node down")
			}
			// That it is so was seen above: this kernel survives it.
			v.Capability.GetMount().MountFlags = nil
			target := v.running()
			check.OK(t, os.WriteFile("/sys/fs/ext4/"+v.device()+"/trigger_fs_error", []byte("a test"), 0))
			for deadline := time.Now().Add(30 * time.Second); len(v.problems()) == 0 && time.Now().Before(deadline); {
				time.Sleep(10 * time.Millisecond)
			}
			if err := os.WriteFile(filepath.Join(target, "file"), []byte("text"), 0o600); err == nil {
				t.Error("it is written to after an error")
			}
			check.OK(t, v.down(target))
		})
	}
	for _, flags := range []string{"errors=panic", "journal_dev=0x700", "journal_path=/dev/loop0", "logdev=/dev/loop0", "device=/dev/loop0", "bind"} {
		r := co.Request("volume", "ext4", smallest["ext4"])
		r.VolumeCapabilities[0].GetMount().MountFlags = []string{flags}
		_, err := d.create(r)
		check.Code(t, err, codes.InvalidArgument, flags)
	}
	r := co.Request("volume", "btrfs", smallest["btrfs"])
	r.VolumeCapabilities[0].GetMount().MountFlags = []string{"fatal_errors=panic"}
	_, err := d.create(r)
	check.Code(t, err, codes.InvalidArgument)
	d.nothingLeft()
}

// TestMultiMountProtection: no mount waits for as long as an ext4 says (two bytes of seconds), which neither its caller's time
// nor NodeUnstage would end.
func TestMultiMountProtection(t *testing.T) {
	d := start(t, drivertest.Options{})
	v := d.crafted("volume", "ext4", smallest["ext4"], func(device string) { drivertest.Run(t, "mkfs.ext4", "-q", "-O", "mmp", device) })
	check.Code(t, v.stage(), codes.FailedPrecondition, "multi-mount protection", "tune2fs")
	v.Capability.AccessMode.Mode = readerOnly
	check.OK(t, v.release())
	check.OK(t, v.claim())
	check.Code(t, v.stage(), codes.FailedPrecondition, "multi-mount protection")
	check.OK(t, v.down())
	// Here it comes with the journal, which is replayed before the mount.
	v = d.crafted("replayed", "ext4", smallest["ext4"], func(device string) { craftReplayedProtection(t, device) })
	check.Code(t, v.stage(), codes.FailedPrecondition, "multi-mount protection")
	check.Code(t, v.stage(), codes.FailedPrecondition, "multi-mount protection")
	check.OK(t, v.down())
	d.nothingLeft()
}

// craftReplayedProtection makes an ext4 whose superblock has multi-mount protection once the journal is replayed, by which a mount then waits 21 s.
func craftReplayedProtection(t testing.TB, device string) {
	t.Helper()
	drivertest.Run(t, "mkfs.ext4", "-q", "-b", "4096", "-O", "mmp,^metadata_csum", device)
	block := make([]byte, 4096)
	f, err := os.Open(device)
	check.OK(t, err)
	_, err = io.ReadFull(f, block)
	check.OK(t, errors.Join(err, f.Close()))
	with, commands := filepath.Join(t.TempDir(), "block"), filepath.Join(t.TempDir(), "commands")
	check.OK(t, os.WriteFile(with, block, 0o600))
	check.OK(t, os.WriteFile(commands, []byte("feature -mmp\njo\njw -b 0 "+with+"\njc\n"), 0o600))
	drivertest.Run(t, "debugfs", "-w", "-f", commands, device)
	at := int64(binary.LittleEndian.Uint64(block[1024+360:])) * 4096 // struct mmp_struct of fs/ext4/ext4.h
	put(t, device, at, "PMM\x00\x01\x00\x00\x00")
	put(t, device, at+112, "\x0a\x00")
}

// TestFilesystemsOfSeveralDevices: a filesystem that says it has parts elsewhere is not opened, by no
// tool and for no access, whoever has the other part; that stays as it is.
func TestFilesystemsOfSeveralDevices(t *testing.T) {
	d := start(t, drivertest.Options{})
	other := d.made(co.Request("other", block, smallest["xfs"])) // of another tenant
	there := other.running()
	boot := func(device string) { // a copy of the superblock where the driver keeps its own, and a torn one
		f, err := os.Open(device)
		check.OK(t, err)
		b := make([]byte, 2048)
		_, err = io.ReadFull(f, b)
		check.OK(t, errors.Join(err, f.Close()))
		disguise := []byte("ashlar e2fsck   ")
		for i := range 1024 {
			b[i] = b[1024+i] ^ disguise[i%len(disguise)]
		}
		check.OK(t, os.WriteFile(device, b[:1024], 0))
		put(t, device, 1024+224, "\x08\x00\x00\x00\x00\x00\x00\x00")
	}
	external := func(device string) {
		drivertest.Run(t, "mke2fs", "-q", "-F", "-b", "4096", "-O", "journal_dev", there)
		drivertest.Run(t, "mkfs.ext4", "-q", "-F", "-b", "4096", "-J", "device="+there, device)
	}
	for name, c := range map[string]struct {
		kind  string
		craft func(device string)
		code  codes.Code
		words string
	}{
		"ext4 with a journal elsewhere": {"ext4", external, codes.FailedPrecondition, "its journal on another device"},
		"ext4 with a journal elsewhere, to replay": {"ext4", func(device string) {
			external(device)
			super(t, device, func(s []byte) { s[96] |= 4 })
		}, codes.FailedPrecondition, "its journal on another device"},
		"ext4 without checksums": {"ext4", func(device string) {
			drivertest.Run(t, "mke2fs", "-q", "-F", "-b", "4096", "-O", "journal_dev", there)
			drivertest.Run(t, "mkfs.ext4", "-q", "-F", "-b", "4096", "-O", "^metadata_csum", "-J", "device="+there, device)
		}, codes.FailedPrecondition, "its journal on another device"},
		"ext4 that is put back from such a copy": {"ext4", func(device string) {
			external(device)
			boot(device)
		}, codes.Internal, "superblock"},
		"ext4 that names a journal in its options": {"ext4", func(device string) {
			drivertest.Run(t, "mkfs.ext4", "-q", device)
			super(t, device, func(s []byte) { copy(s[512:576], "journal_path="+there) })
		}, codes.FailedPrecondition, "mount options of its own"},
		"ext4 that is larger than its device": {"ext4", func(device string) {
			drivertest.Run(t, "mkfs.ext4", "-q", device)
			super(t, device, func(s []byte) { s[6] = 0x40 })
		}, codes.DataLoss, "says that it has"},
		"ext4 with absurd sizes": {"ext4", func(device string) {
			drivertest.Run(t, "mkfs.ext4", "-q", device)
			super(t, device, func(s []byte) {
				binary.LittleEndian.PutUint32(s[24:], 0xffffffff)
				binary.LittleEndian.PutUint32(s[336:], 0xffffffff)
			})
		}, codes.DataLoss, "says that it has"},
		"xfs with a log elsewhere": {"xfs", func(device string) {
			drivertest.Run(t, "mkfs.xfs", "-q", "-f", "-l", "logdev="+there+",size=64m", device)
		}, codes.FailedPrecondition, "its log on another device"},
		"xfs with a realtime part elsewhere": {"xfs", func(device string) {
			drivertest.Run(t, "mkfs.xfs", "-q", "-f", "-r", "rtdev="+there, device)
		}, codes.FailedPrecondition, "a realtime part on another device"},
		"btrfs on two devices": {"btrfs", func(device string) {
			drivertest.RunBtrfs(t, "mkfs.btrfs", "-q", "-f", "-d", "single", "-m", "single", device, there)
		}, codes.FailedPrecondition, "2 devices"},
		"btrfs on two devices, that says one": {"btrfs", func(device string) {
			drivertest.RunBtrfs(t, "mkfs.btrfs", "-q", "-f", "-d", "single", "-m", "single", device, there)
			one(t, device)
			one(t, there)
		}, codes.FailedPrecondition, ""},
	} {
		t.Run(name, func(t *testing.T) {
			d := d.in(t)
			v := d.crafted(strings.ReplaceAll(name, " ", "-"), c.kind, smallest["xfs"], c.craft)
			before, elsewhere := checksum(t, v.image()), content(t, there)
			for _, mode := range []csi.VolumeCapability_AccessMode_Mode{co.MultiWriter, readerOnly} {
				v.Capability.AccessMode.Mode = mode
				check.OK(t, v.release())
				check.OK(t, v.claim())
				err := v.stage()
				if c.words == "" { // the kernel may find out first
					if err == nil {
						t.Error("it was mounted")
					}
				} else if mode == co.MultiWriter || c.code != codes.Internal {
					check.Code(t, err, c.code, c.words)
				} else if err == nil {
					t.Error("it was mounted")
				}
				if loops := remaining(v.image()); len(loops) > 0 {
					t.Errorf("still attached as %v", loops)
				}
			}
			if checksum(t, v.image()) != before {
				t.Error("the volume was written to")
			}
			if content(t, there) != elsewhere {
				t.Error("the other volume was written to")
			}
			check.OK(t, v.down())
		})
	}
	check.OK(t, other.down(there))
	d.nothingLeft()
}

// content is a checksum of a device.
func content(t testing.TB, device string) string { return drivertest.Run(t, "sha256sum", device) }

// one makes a btrfs say that it has one device, with the right checksum.
func one(t testing.TB, device string) {
	t.Helper()
	f, err := os.OpenFile(device, os.O_RDWR, 0)
	check.OK(t, err)
	defer f.Close()
	s := make([]byte, 4096)
	_, err = f.ReadAt(s, 0x10000)
	check.OK(t, err)
	binary.LittleEndian.PutUint64(s[136:], 1)
	binary.LittleEndian.PutUint32(s, crc32.Checksum(s[32:], crc32.MakeTable(crc32.Castagnoli)))
	_, err = f.WriteAt(s, 0x10000)
	check.OK(t, err)
	check.OK(t, f.Sync())
}

// TestSameIdentity: a filesystem with the UUID of another tenant's that is mounted is its own, or is
// not mounted; it is never the other.
func TestSameIdentity(t *testing.T) {
	d := start(t, drivertest.Options{})
	for _, kind := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			d := d.in(t)
			victim := d.made(co.Request("victim-"+kind, kind, smallest[kind]))
			secret := victim.running()
			write(t, victim.File(secret), 1)
			unix.Sync()
			v := d.crafted("copy-"+kind, kind, smallest[kind], func(device string) { // all that identifies it
				drivertest.Run(t, "dd", "if="+victim.image(), "of="+device, "bs=1M", "status=none", "conv=fsync")
			})
			before := checksum(t, victim.image())
			if err := v.stage(); err != nil {
				check.Code(t, err, codes.FailedPrecondition)
			} else {
				target := v.Target("pod")
				check.OK(t, v.publish(target, false))
				write(t, v.File(target), 2)
				holds(t, victim.File(secret), 1)
				check.OK(t, v.unpublish(target))
				check.OK(t, v.unstage())
			}
			if checksum(t, victim.image()) != before {
				t.Error("the other volume was written to")
			}
			holds(t, victim.File(secret), 1)
			check.OK(t, v.down())
			check.OK(t, victim.down(secret))
		})
	}
	d.nothingLeft()
}

// TestEndlessDirectories: a filesystem in which directories are within themselves is nothing that the driver
// walks through: it is staged, measured, copied and taken down.
func TestEndlessDirectories(t *testing.T) {
	d := start(t, drivertest.Options{})
	v := d.crafted("volume", "ext4", smallest["ext4"], func(device string) {
		drivertest.Run(t, "mkfs.ext4", "-q", device)
		for _, command := range []string{"mkdir a", "mkdir a/b", "link / a/b/root", "link a a/b/a", "link a/b a/b/b"} {
			drivertest.Run(t, "debugfs", "-w", "-R", command, device)
		}
	})
	target := v.running()
	_, _ = command("find", target, "-maxdepth", "50") // it ends, and the kernel may say what is wrong
	if v.usage(target).GetTotal() == 0 {
		t.Error("it has no size")
	}
	// Some kernels say that it stopped writing, others only that it cannot be written out.
	if s, err := v.snapshot("snapshot"); err == nil {
		check.OK(t, d.deleteSnapshot(s.GetSnapshotId()))
	} else {
		check.Code(t, err, codes.FailedPrecondition, "cannot be written out")
	}
	check.OK(t, v.unpublish(target))
	check.OK(t, v.unstage())
	if err := v.stage(); err != nil { // once the kernel has noted an error, all is looked over
		check.Code(t, err, codes.DataLoss, "by hand")
	}
	check.OK(t, v.down())
	d.nothingLeft()
}
