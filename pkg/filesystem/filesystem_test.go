package filesystem_test

import (
	"context"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"

	"golang.org/x/sys/unix"
	mountutils "k8s.io/mount-utils"
	"k8s.io/utils/exec"

	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/mount"
)

const miB = 1 << 20

// disk is a loop device over a preallocated image.
type disk struct {
	dir, image, device, path string
}

func newDisk(t testing.TB, size int64) disk {
	t.Helper()
	drivertest.NeedRoot(t)
	dir := drivertest.Dir(t)
	d := disk{dir: dir, image: filepath.Join(dir, "image"), path: filepath.Join(dir, "mounted")}
	f, err := os.Create(d.image)
	check.OK(t, err)
	check.OK(t, errors.Join(unix.Fallocate(int(f.Fd()), 0, 0, size), f.Close()))
	check.OK(t, os.Mkdir(d.path, 0o700))
	d.device = drivertest.Loop(t, d.image)
	t.Cleanup(func() {
		_ = filesystem.Thaw(d.path)
		if err := mount.Unmount(d.path); err != nil {
			t.Error(err)
			_ = unix.Unmount(d.path, unix.MNT_DETACH)
		}
		drivertest.Run(t, "losetup", "-d", d.device)
	})
	return d
}

func (d disk) resize(t testing.TB, size int64) {
	t.Helper()
	check.OK(t, os.Truncate(d.image, size))
	drivertest.Run(t, "losetup", "-c", d.device)
}

func (d disk) mount(t testing.TB, fs filesystem.Type) {
	t.Helper()
	check.OK(t, mount.Filesystem(d.device, d.path, string(fs), fs.MountOptions(), false))
}

func (d disk) mountWith(t testing.TB, fs filesystem.Type, options ...string) {
	t.Helper()
	check.OK(t, mount.Filesystem(d.device, d.path, string(fs), options, false))
}

// put writes text at an offset of a device or file.
func put(t testing.TB, path string, offset int64, text string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	check.OK(t, err)
	_, err = f.WriteAt([]byte(text), offset)
	check.OK(t, errors.Join(err, f.Sync(), f.Close()))
}

// sparse makes a file of zeros, to be used in the place of a device.
func sparse(t testing.TB, size int64) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file")
	check.OK(t, os.WriteFile(path, nil, 0o600))
	check.OK(t, os.Truncate(path, size))
	return path
}

func TestParseType(t *testing.T) {
	for name, want := range map[string]filesystem.Type{"": filesystem.Ext4, "ext4": filesystem.Ext4, "xfs": filesystem.XFS, "btrfs": filesystem.Btrfs} {
		if have, err := filesystem.ParseType(name); have != want || err != nil {
			t.Errorf("%q is %q: %v", name, have, err)
		}
	}
	for _, name := range []string{"ext3", "XFS", "ext4 ", "ntfs", "../ext4"} {
		if _, err := filesystem.ParseType(name); !errors.Is(err, errdefs.ErrInvalid) {
			t.Errorf("%q: %v", name, err)
		}
	}
}

func TestBlank(t *testing.T) {
	const size = 100 * miB
	for name, offset := range map[string]int64{
		"first byte": 0, "odd": 12345, "last of the first 4 MiB": 4*miB - 1, "second superblock of btrfs": 64*miB + 64, "first of the last 4 MiB": size - 4*miB, "last byte": size - 1,
	} {
		path := sparse(t, size)
		blank, err := filesystem.Blank(t.Context(), path, 0)
		if !blank || err != nil {
			t.Errorf("a file of zeros is not blank: %v", err)
		}
		put(t, path, offset, "\x01")
		if blank, err := filesystem.Blank(t.Context(), path, 0); blank || err != nil {
			t.Errorf("with a byte at the %s: blank %v, %v", name, blank, err)
		}
	}
	for _, size := range []int64{1, 512, 4096, 4 * miB, 4*miB + 1, 8*miB - 1, 8 * miB, 64*miB + 1} {
		path := sparse(t, size)
		if blank, err := filesystem.Blank(t.Context(), path, 0); !blank || err != nil {
			t.Errorf("%d zeros: blank %v, %v", size, blank, err)
		}
		put(t, path, size-1, "\x01")
		if blank, err := filesystem.Blank(t.Context(), path, 0); blank || err != nil {
			t.Errorf("%d bytes, the last one 1: blank %v, %v", size, blank, err)
		}
	}
	// A device that cannot be read is not blank.
	for _, path := range []string{"/nowhere", t.TempDir(), sparse(t, 0)} {
		if blank, err := filesystem.Blank(t.Context(), path, 0); blank || err == nil {
			t.Errorf("%s: blank %v, %v", path, blank, err)
		}
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if blank, err := filesystem.Blank(ended, sparse(t, miB), 0); blank || !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: blank %v, %v", blank, err)
	}
}

func TestProbeAndForeign(t *testing.T) {
	for name, c := range map[string]struct {
		offset  int64
		text    string
		probe   filesystem.Type
		foreign string // to ext4
	}{
		"nothing": {0, "\x00", "", ""},
		"ext4":    {1080, "\x53\xef", filesystem.Ext4, ""},
		"xfs":     {0, "XFSB", filesystem.XFS, "xfs"},
		"btrfs":   {64<<10 + 64, "_BHRfS_M", filesystem.Btrfs, "btrfs"},
		"LUKS":    {0, "LUKS\xba\xbe\x00\x01", "", "LUKS"},
		"LVM":     {512, "LABELONE", "", "LVM"},
		"md 1.1":  {0, "\xfc\x4e\x2b\xa9", "", "RAID"},
		"md 1.2":  {4096, "\xfc\x4e\x2b\xa9", "", "RAID"},
		"swap":    {4086, "SWAPSPACE2", "", "swap"},
		"DOS":     {510, "\x55\xaa", "", "a partition table"},
		"GPT":     {512, "EFI PART", "", "a partition table"},
		"text":    {0, "some text", "", ""},
	} {
		for _, size := range []int64{miB, 70 << 10} {
			path := sparse(t, size)
			put(t, path, c.offset, c.text)
			if have, err := filesystem.Probe(path); have != c.probe || err != nil {
				t.Errorf("%s is taken for %q: %v", name, have, err)
			}
			if have, err := filesystem.Foreign(path, filesystem.Ext4); have != c.foreign || err != nil {
				t.Errorf("%s is foreign to ext4 as %q: %v", name, have, err)
			}
		}
	}
	if have, err := filesystem.Probe(sparse(t, 0)); have != "" || err != nil {
		t.Errorf("an empty file is taken for %q: %v", have, err)
	}
	if _, err := filesystem.Probe("/nowhere"); err == nil {
		t.Error("what is not there can be read")
	}
	if _, err := filesystem.Foreign("/nowhere", filesystem.Ext4); err == nil {
		t.Error("what is not there can be read")
	}
}

// TestMake: a filesystem is made on a device of the smallest size, and again over what a crash has left; then another one over it. Preallocated space stays.
func TestMake(t *testing.T) {
	kubelet := mountutils.NewSafeFormatAndMount(mountutils.New(""), exec.New()) // it would format a device that it takes for blank
	for _, fs := range filesystem.Types {
		t.Run(string(fs), func(t *testing.T) {
			d := newDisk(t, fs.MinSize())
			verify := func() {
				t.Helper()
				if have, err := filesystem.Probe(d.device); have != fs || err != nil {
					t.Fatalf("it carries %q: %v", have, err)
				}
				if have, err := kubelet.GetDiskFormat(d.device); have != string(fs) || err != nil {
					t.Errorf("the kubelet takes it for %q: %v", have, err)
				}
				if have, err := filesystem.Foreign(d.device, fs); have != "" || err != nil {
					t.Errorf("its own filesystem is foreign as %q: %v", have, err)
				}
				if blank, err := filesystem.Blank(t.Context(), d.device, 0); blank || err != nil {
					t.Errorf("it is blank %v: %v", blank, err)
				}
				check.OK(t, filesystem.Check(t.Context(), fs, d.device))
				d.mount(t, fs)
				var st unix.Statfs_t
				check.OK(t, unix.Statfs(d.path, &st))
				if filesystem.TypeOf(st.Type) != fs {
					t.Errorf("mounted, it is %q", filesystem.TypeOf(st.Type))
				}
				check.OK(t, os.WriteFile(d.path+"/file", []byte("text"), 0o600))
				check.OK(t, mount.Unmount(d.path))
				info, err := os.Stat(d.image)
				check.OK(t, err)
				if taken := info.Sys().(*syscall.Stat_t).Blocks * 512; taken < fs.MinSize() {
					t.Errorf("the image has given space back: %d of %d", taken, fs.MinSize())
				}
			}
			check.OK(t, filesystem.Make(t.Context(), fs, d.device, true))
			verify()
			check.OK(t, filesystem.Make(t.Context(), fs, d.device, false)) // as after a crash behind mkfs
			verify()
			put(t, d.device, 0, string(make([]byte, 256<<10))) // as after a crash during mkfs
			put(t, d.device, fs.MinSize()/2, strings.Repeat("left", 1<<18))
			check.OK(t, filesystem.Make(t.Context(), fs, d.device, false))
			verify()
			for _, other := range filesystem.Types { // the retry is for another filesystem
				if other.MinSize() <= fs.MinSize() {
					check.OK(t, filesystem.Make(t.Context(), other, d.device, false))
					if have, err := filesystem.Probe(d.device); have != other || err != nil {
						t.Errorf("%s over %s is %q: %v", other, fs, have, err)
					}
				}
			}
		})
	}
	if err := filesystem.Make(t.Context(), filesystem.Ext4, "/nowhere", true); err == nil {
		t.Error("a filesystem is made nowhere")
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := filesystem.Make(ended, filesystem.Ext4, sparse(t, 16*miB), true); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

// TestCheck: damage that e2fsck -p repairs is repaired; other damage is ErrDataLoss. An e2fsck that did not run is another error.
func TestCheck(t *testing.T) {
	for name, c := range map[string]struct {
		spoil func(device string)
		want  error
	}{
		"clean": {func(string) {}, nil},
		"to repair": {func(device string) {
			drivertest.Run(t, "debugfs", "-w", "-R", "ssv free_blocks_count 7", device)
			drivertest.Run(t, "debugfs", "-w", "-R", "ssv state 2", device)
		}, nil},
		"to look over": {func(device string) { drivertest.Run(t, "debugfs", "-w", "-R", "ssv state 2", device) }, nil},
		"broken": {func(device string) {
			drivertest.Run(t, "debugfs", "-w", "-R", "clri <2>", device)
			drivertest.Run(t, "debugfs", "-w", "-R", "ssv state 2", device)
		}, errdefs.ErrDataLoss},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDisk(t, 16*miB)
			check.OK(t, filesystem.Make(t.Context(), filesystem.Ext4, d.device, true))
			c.spoil(d.device)
			if err := filesystem.Check(t.Context(), filesystem.Ext4, d.device); !errors.Is(err, c.want) || (err == nil) != (c.want == nil) {
				t.Fatalf("got %v, want %v", err, c.want)
			}
			if c.want == nil {
				check.OK(t, filesystem.Check(t.Context(), filesystem.Ext4, d.device))
				d.mount(t, filesystem.Ext4)
			}
		})
	}
	// A check that did not take place is not ErrDataLoss.
	if err := filesystem.Check(t.Context(), filesystem.Ext4, "/nowhere"); err == nil || errors.Is(err, errdefs.ErrDataLoss) {
		t.Errorf("nothing is checked: %v", err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := filesystem.Check(ended, filesystem.Ext4, sparse(t, miB)); !errors.Is(err, context.Canceled) || errors.Is(err, errdefs.ErrDataLoss) {
		t.Errorf("cancelled: %v", err)
	}
	for _, fs := range []filesystem.Type{filesystem.XFS, filesystem.Btrfs} {
		check.OK(t, filesystem.Check(t.Context(), fs, "/nowhere")) // they need no check
	}
}

// TestReplay: after a crash Recover and Check each replay the journal, so that e2fsck has nothing to replay, and what was synced is there.
func TestReplay(t *testing.T) {
	d := newDisk(t, 16*miB)
	check.OK(t, filesystem.Make(t.Context(), filesystem.Ext4, d.device, true))
	d.mount(t, filesystem.Ext4)
	check.OK(t, <-d.writes("file"))
	unix.Sync()
	crashed, err := os.ReadFile(d.device)
	check.OK(t, err)
	check.OK(t, mount.Unmount(d.path))
	for name, replay := range map[string]func() error{
		"recover": func() error { return mount.Recover(d.device, "ext4", nil) },
		"check":   func() error { return filesystem.Check(t.Context(), filesystem.Ext4, d.device) },
	} {
		put(t, d.device, 0, string(crashed))
		needs := func() bool {
			return strings.Contains(drivertest.Run(t, "dumpe2fs", "-h", d.device), "needs_recovery")
		}
		if !needs() {
			t.Fatal("there is nothing to replay")
		}
		check.OK(t, replay())
		if needs() {
			t.Errorf("%s: nothing was replayed", name)
		}
		check.OK(t, filesystem.Check(t.Context(), filesystem.Ext4, d.device))
		d.mount(t, filesystem.Ext4)
		if text, err := os.ReadFile(d.path + "/file"); string(text) != "file" {
			t.Errorf("%s: the file has %q: %v", name, text, err)
		}
		check.OK(t, mount.Unmount(d.path))
	}
	if err := mount.Recover("/nowhere", "ext4", nil); err == nil {
		t.Error("what is not there was opened")
	}
}

// replayed writes to the journal of an ext4 that its first block is to be another one, with an edited superblock.
func replayed(t testing.TB, path string, edit func(super []byte)) {
	t.Helper()
	all, err := os.ReadFile(path)
	check.OK(t, err)
	block := all[:4096]
	super := block[1024:2048]
	edit(super)
	binary.LittleEndian.PutUint32(super[1020:], ^crc32.Checksum(super[:1020], crc32.MakeTable(crc32.Castagnoli)))
	dir := t.TempDir()
	with, commands := filepath.Join(dir, "block"), filepath.Join(dir, "commands")
	check.OK(t, os.WriteFile(with, block, 0o600))
	check.OK(t, os.WriteFile(commands, []byte("jo\njw -b 0 "+with+"\njc\n"), 0o600))
	drivertest.Run(t, "debugfs", "-w", "-f", commands, path)
}

// TestReplayedSuperblock: what a volume must not carry is not mounted either if it comes with the journal, whoever replays that: the kernel, or e2fsck, as the
// kernel cannot (here: no device).
func TestReplayedSuperblock(t *testing.T) {
	for name, edit := range map[string]func(super []byte){
		"multi-mount protection":                        func(super []byte) { super[97] |= 1 },
		"mount options of its own that are not allowed": func(super []byte) { copy(super[512:576], "journal_path=/dev/null") },
		"its journal on another device":                 func(super []byte) { super[228] = 8 },
	} {
		t.Run(name, func(t *testing.T) {
			paths := map[string]string{"kernel": newDisk(t, 16*miB).device}
			if name != "multi-mount protection" { // of which e2fsck has something to say itself
				paths["e2fsck"] = sparse(t, 16*miB)
			}
			for by, path := range paths {
				check.OK(t, filesystem.Make(t.Context(), filesystem.Ext4, path, true))
				replayed(t, path, edit)
				check.OK(t, filesystem.Inspect(filesystem.Ext4, path))
				if err := filesystem.Check(t.Context(), filesystem.Ext4, path); !errors.Is(err, errdefs.ErrPrecondition) || !strings.Contains(err.Error(), name) {
					t.Errorf("%s: got %v", by, err)
				}
				if err := filesystem.Inspect(filesystem.Ext4, path); !errors.Is(err, errdefs.ErrPrecondition) { // what a retry finds
					t.Errorf("%s: nothing was replayed: %v", by, err)
				}
			}
		})
	}
}

func TestGrow(t *testing.T) {
	for _, fs := range filesystem.Types {
		t.Run(string(fs), func(t *testing.T) {
			size := fs.MinSize()
			d := newDisk(t, size)
			check.OK(t, filesystem.Make(t.Context(), fs, d.device, true))
			total := func() int64 {
				t.Helper()
				var st unix.Statfs_t
				check.OK(t, unix.Statfs(d.path, &st))
				usage := filesystem.UsageOf(st)
				if usage.Used < 0 || usage.Available <= 0 || usage.Used+usage.Available > usage.Total || (fs != filesystem.Btrfs) != (usage.Inodes > 0) {
					t.Errorf("usage: %+v", usage)
				}
				return usage.Total
			}
			d.mount(t, fs)
			check.OK(t, os.WriteFile(d.path+"/file", []byte("text"), 0o600))
			before := total()
			check.OK(t, filesystem.Grow(fs, d.device, d.path)) // nothing to do
			if now := total(); now != before {
				t.Errorf("grown from %d to %d with the same device", before, now)
			}
			d.resize(t, size+64*miB)
			err := filesystem.Grow(fs, d.device, d.path)
			if filesystem.GrowsMounted(fs) {
				check.OK(t, err)
				check.OK(t, filesystem.GrowBeforeMount(t.Context(), fs, d.device))
			} else {
				if !errors.Is(err, errdefs.ErrPrecondition) || !strings.Contains(err.Error(), "CAP_SYS_RESOURCE") {
					t.Fatalf("without the capability: %v", err)
				}
				check.OK(t, mount.Unmount(d.path))
				for range 2 {
					check.OK(t, filesystem.GrowBeforeMount(t.Context(), fs, d.device))
				}
				d.mount(t, fs)
			}
			check.OK(t, filesystem.Grow(fs, d.device, d.path))
			if now := total(); now < before+48*miB || now > size+64*miB {
				t.Errorf("a device of %d bytes more: from %d to %d", 64*miB, before, now)
			}
			// 4 KiB more may be too little for a filesystem to grow into: that is no error.
			d.resize(t, size+64*miB+4096)
			if err := filesystem.Grow(fs, d.device, d.path); err != nil && filesystem.GrowsMounted(fs) {
				t.Error(err)
			}
			if text, err := os.ReadFile(d.path + "/file"); string(text) != "text" {
				t.Errorf("the file has %q: %v", text, err)
			}
		})
	}
	if err := filesystem.Grow(filesystem.Ext4, "/nowhere", "/"); err == nil {
		t.Error("a device that is not there has a size")
	}
}

// writes begins to write a file, and returns a channel that gets the result.
func (d disk) writes(name string) <-chan error {
	ended := make(chan error, 1)
	go func() { ended <- os.WriteFile(filepath.Join(d.path, name), []byte(name), 0o600) }()
	return ended
}

// held reports whether a write that writes has begun is held back: it has not ended after 200 ms.
func held(ended <-chan error) bool {
	select {
	case <-ended:
		return false
	case <-time.After(200 * time.Millisecond):
		return true
	}
}

func TestFreeze(t *testing.T) {
	for _, fs := range filesystem.Types {
		t.Run(string(fs), func(t *testing.T) {
			d := newDisk(t, fs.MinSize())
			check.OK(t, filesystem.Make(t.Context(), fs, d.device, true))
			d.mount(t, fs)
			check.OK(t, filesystem.Thaw(d.path)) // it is not frozen
			check.OK(t, <-d.writes("before"))

			thaw, err := filesystem.Freeze(t.Context(), d.path)
			check.OK(t, err)
			t.Cleanup(func() { _ = thaw() })
			first := d.writes("first")
			if !held(first) {
				t.Fatal("a frozen filesystem is written to")
			}
			// A second freeze fails, and does not end the first.
			if _, err := filesystem.Freeze(t.Context(), d.path); !errors.Is(err, errdefs.ErrBusy) {
				t.Fatalf("frozen again: %v", err)
			}
			if !held(first) {
				t.Fatal("who came second ended the freeze")
			}
			for range 2 {
				check.OK(t, thaw())
			}
			check.OK(t, <-first)

			// A freeze that a crash has left is ended by Thaw.
			left, err := filesystem.Freeze(t.Context(), d.path)
			check.OK(t, err)
			second := d.writes("second")
			if !held(second) {
				t.Fatal("a frozen filesystem is written to")
			}
			for range 2 {
				check.OK(t, filesystem.Thaw(d.path))
			}
			check.OK(t, <-second)
			if err := left(); !errors.Is(err, errdefs.ErrUnavailable) { // writes were not held back until now
				t.Fatalf("the end of what somebody else ended: %v", err)
			}

			for _, name := range []string{"before", "first", "second"} {
				if text, err := os.ReadFile(filepath.Join(d.path, name)); string(text) != name {
					t.Errorf("file %s has %q: %v", name, text, err)
				}
			}
			check.OK(t, mount.Unmount(d.path))
			check.OK(t, mount.Filesystem(d.device, d.path, string(fs), nil, true))
			thaw, err = filesystem.Freeze(t.Context(), d.path) // nothing to hold back
			check.OK(t, err)
			check.OK(t, thaw())
		})
	}
	if _, err := filesystem.Freeze(t.Context(), "/nowhere"); err == nil {
		t.Error("nothing is frozen")
	}
	if _, err := filesystem.Freeze(t.Context(), "/proc"); !errors.Is(err, errdefs.ErrUnsupported) {
		t.Errorf("a filesystem that cannot be frozen: %v", err)
	}
	if err := filesystem.Thaw("/nowhere"); err == nil {
		t.Error("nothing is thawed")
	}
}

// TestSeparate: a copy of a mounted filesystem can be mounted beside it after Separate, and a write to the copy is not in the source.
func TestSeparate(t *testing.T) {
	for _, fs := range filesystem.Types {
		t.Run(string(fs), func(t *testing.T) {
			d := newDisk(t, fs.MinSize())
			check.OK(t, filesystem.Make(t.Context(), fs, d.device, true))
			d.mount(t, fs)
			check.OK(t, <-d.writes("file"))
			thaw, err := filesystem.Freeze(t.Context(), d.path)
			check.OK(t, err)
			copied := disk{dir: d.dir, image: d.image + "-copy", path: d.path + "-copy"}
			drivertest.Run(t, "cp", "--sparse=always", d.image, copied.image)
			check.OK(t, thaw())
			for range 2 {
				check.OK(t, filesystem.Separate(t.Context(), copied.image))
			}
			copied.device = drivertest.Loop(t, copied.image)
			check.OK(t, os.Mkdir(copied.path, 0o700))
			err = mount.Filesystem(copied.device, copied.path, string(fs), fs.MountOptions(), false)
			if err == nil {
				err = <-copied.writes("other")
			}
			if text, readErr := os.ReadFile(copied.path + "/file"); string(text) != "file" {
				t.Errorf("the copy has %q: %v", text, readErr)
			}
			if _, statErr := os.Stat(d.path + "/other"); !errors.Is(statErr, os.ErrNotExist) {
				t.Errorf("what is written to the copy is in the source: %v", statErr)
			}
			check.OK(t, errors.Join(err, mount.Unmount(copied.path)))
			drivertest.Run(t, "losetup", "-d", copied.device)
		})
	}
}
