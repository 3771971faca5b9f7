package filesystem

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

const miB = 1 << 20

// run runs a program and returns what it prints.
func run(t testing.TB, argv ...string) string {
	t.Helper()
	out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%q: %v: %s", argv, err, out)
	}
	return string(out)
}

// ext4Image is an ext4 in a file.
type ext4Image struct {
	path  string
	files map[string][]byte // in the filesystem, by name
}

func newExt4(t testing.TB, size int64) ext4Image {
	t.Helper()
	i := ext4Image{filepath.Join(t.TempDir(), "image"), map[string][]byte{}}
	from := t.TempDir()
	for _, name := range []string{"a", "b", "c"} {
		i.files[name] = make([]byte, 2*miB)
		_, _ = rand.Read(i.files[name])
		check.OK(t, os.WriteFile(filepath.Join(from, name), i.files[name], 0o600))
	}
	check.OK(t, os.WriteFile(i.path, nil, 0o600))
	check.OK(t, os.Truncate(i.path, size))
	run(t, "mkfs.ext4", "-q", "-b", "4096", "-m", "0", "-E", "nodiscard", "-d", from, i.path)
	return i
}

func (i ext4Image) read(t testing.TB) (boot []byte, super ext4Super) {
	t.Helper()
	boot, super, err := readExt4(i.path)
	check.OK(t, err)
	return boot, super
}

func (i ext4Image) write(t testing.TB, block []byte, at int64) {
	t.Helper()
	check.OK(t, writeExt4(i.path, block, at))
}

func (i ext4Image) bytes(t testing.TB) []byte {
	t.Helper()
	all, err := os.ReadFile(i.path)
	check.OK(t, err)
	return all
}

// whole makes sure that the filesystem has nothing to repair, all of its files, and a blank boot block.
func (i ext4Image) whole(t testing.TB) {
	t.Helper()
	run(t, "e2fsck", "-f", "-n", i.path)
	for name, want := range i.files {
		if have := run(t, "debugfs", "-R", "cat /"+name, i.path); !strings.HasSuffix(have, string(want)) {
			t.Errorf("file %s is not what it was", name)
		}
	}
	if boot, super := i.read(t); !bytes.Equal(boot, zeroBlock[:len(boot)]) || !super.clean() {
		t.Errorf("the boot block is %q..., the state %d", boot[:32], super.short(ext4State))
	}
}

var errKilled = errors.New("made up: killed")

// tears returns the torn superblocks that a tool may leave if it dies while it replaces one superblock by another.
func tears(before, after ext4Super) (all []ext4Super) {
	s := bytes.Clone(before)
	for at := 0; at < ext4Checksum; at += 2 {
		if before.short(at) != after.short(at) {
			copy(s[at:at+2], after[at:])
			all = append(all, bytes.Clone(s))
		}
	}
	return all
}

// TestTornSuperblock: a torn superblock is put back from the copy in the boot block. If that is no copy, or not this filesystem's, Check fails and writes
// nothing.
func TestTornSuperblock(t *testing.T) {
	image := newExt4(t, 16*miB)
	_, before := image.read(t)
	larger := ext4Image{filepath.Join(t.TempDir(), "larger"), image.files}
	check.OK(t, os.WriteFile(larger.path, image.bytes(t), 0o600))
	check.OK(t, os.Truncate(larger.path, 300*miB))
	check.OK(t, growExt4Unmounted(t.Context(), larger.path, 300*miB))
	larger.whole(t)
	_, after := larger.read(t)
	all := tears(before, after)
	if len(all) < 5 {
		t.Fatalf("growing changes only %d words", len(all))
	}
	for _, as := range []string{ext4Checks, ext4Grows} {
		for n, torn := range all {
			if !torn.torn() {
				t.Fatalf("%d words are not torn", n+1)
			}
			var killed error
			if n%2 == 0 { // otherwise the tool reports success, though it has not written all
				killed = errKilled
			}
			if err := guarded(image.path, as, func() error {
				image.write(t, torn, ext4SuperSize)
				return killed
			}); err == nil || !errors.Is(err, killed) && killed != nil {
				t.Fatal(err)
			}
			check.OK(t, Check(t.Context(), Ext4, image.path))
			image.whole(t)
		}
	}

	torn := all[len(all)/2]
	for name, boot := range map[string][]byte{
		"no copy":          zeroBlock[:ext4SuperSize],
		"a boot loader":    append([]byte("\xeb\x63\x90 a tenant's boot loader"), zeroBlock[:ext4SuperSize-26]...),
		"of another":       changed(before, ext4UUID).keep(ext4Checks),
		"mounted since":    changed(before, ext4MountTime).keep(ext4Checks),
		"a copy torn":      append(bytes.Clone(before.keep(ext4Grows)[:512]), zeroBlock[:512]...),
		"another disguise": before.keep("somebody's words"),
		"no disguise":      changed(before, ext4State),
	} {
		boot = boot[:ext4SuperSize]
		image.write(t, boot, 0)
		image.write(t, torn, ext4SuperSize)
		want := image.bytes(t)
		if err := Check(t.Context(), Ext4, image.path); err == nil || !strings.Contains(err.Error(), "checksum does not match") {
			t.Errorf("%s: %v", name, err)
		}
		if !bytes.Equal(image.bytes(t), want) {
			t.Errorf("%s: something was written", name)
		}
	}

	// A boot block with something else stays as it is, whatever is done.
	foreign := append([]byte("a tenant's"), zeroBlock[:ext4SuperSize-10]...)
	image.write(t, foreign, 0)
	image.write(t, before, ext4SuperSize)
	check.OK(t, guarded(image.path, ext4Checks, func() error { return nil }))
	check.OK(t, Check(t.Context(), Ext4, image.path))
	check.OK(t, os.Truncate(image.path, 300*miB))
	check.OK(t, growExt4Unmounted(t.Context(), image.path, 300*miB))
	if boot, super := image.read(t); !bytes.Equal(boot, foreign) || super.size() != 300*miB {
		t.Errorf("the boot block is %q..., the size %d", boot[:32], super.size())
	}
}

// changed returns a superblock with one bit changed, and the right checksum.
func changed(s ext4Super, at int) ext4Super {
	s = bytes.Clone(s)
	s[at] ^= 1
	binary.LittleEndian.PutUint32(s[ext4Checksum:], s.sum())
	return s
}

// TestCopyOfSuperblock: while a tool runs, the boot block has a copy of the superblock, which nothing takes for a filesystem or another signature. After the
// tool, and after a Check of a filesystem whose superblock is good, it is gone. Otherwise Check only reads a clean filesystem.
func TestCopyOfSuperblock(t *testing.T) {
	image := newExt4(t, 16*miB)
	want := image.bytes(t)
	for _, as := range []string{ext4Checks, ext4Grows} {
		check.OK(t, guarded(image.path, as, func() error {
			boot, super := image.read(t)
			if s, have := kept(boot); s == nil || !s.copies(super) || have != as || s.clean() {
				t.Errorf("the boot block is %q...", boot[:32])
			}
			if have, err := Probe(image.path); have != Ext4 || err != nil {
				t.Errorf("it is taken for %q: %v", have, err)
			}
			if have, err := Foreign(image.path, Ext4); have != "" || err != nil {
				t.Errorf("it is foreign as %q: %v", have, err)
			}
			if have := strings.TrimSpace(run(t, "blkid", "-p", "-o", "value", "-s", "TYPE", image.path)); have != string(Ext4) {
				t.Errorf("blkid takes it for %q", have)
			}
			if have := strings.Fields(run(t, "wipefs", "--noheadings", "--output", "TYPE", image.path)); len(have) != 1 {
				t.Errorf("wipefs takes it for %q", have)
			}
			return nil
		}))
		if !bytes.Equal(image.bytes(t), want) {
			t.Error("the copy has left something behind")
		}
		// The driver died before or after the tool wrote: the superblock is good.
		_ = guarded(image.path, as, func() error { return errKilled })
		check.OK(t, Check(t.Context(), Ext4, image.path))
		if !bytes.Equal(image.bytes(t), want) {
			t.Error("a copy that nobody needs is still there")
		}
	}
	before, err := os.Stat(image.path)
	check.OK(t, err)
	check.OK(t, Check(t.Context(), Ext4, image.path))
	if after, err := os.Stat(image.path); err != nil || !after.ModTime().Equal(before.ModTime()) {
		t.Errorf("a clean filesystem was written to: %v", err)
	}
	// Without checksums nobody could tell that a superblock is torn, so there is no copy.
	run(t, "tune2fs", "-O", "^metadata_csum", image.path)
	check.OK(t, guarded(image.path, ext4Checks, func() error {
		if boot, _ := image.read(t); !bytes.Equal(boot, zeroBlock[:len(boot)]) {
			t.Errorf("the boot block is %q...", boot[:32])
		}
		return nil
	}))
	check.OK(t, Check(t.Context(), Ext4, image.path))
}

// TestGrowthCutShort: a resize2fs that is cut short leaves a filesystem that e2fsck -p refuses, as the inode that reserves room for descriptors points beyond
// the end. Check repairs it, and it can grow again. With other damage, or without the sign of resize2fs, it is ErrDataLoss.
func TestGrowthCutShort(t *testing.T) {
	image := newExt4(t, 16*miB)
	_, before := image.read(t)
	check.OK(t, os.Truncate(image.path, 300*miB))
	check.OK(t, growExt4Unmounted(t.Context(), image.path, 300*miB))
	halfway := bytes.Clone(before)
	halfway[ext4State] |= 2 // EXT2_ERROR_FS, which resize2fs sets from its first write to its last
	halfway[ext4Checksum] = 0
	binary.LittleEndian.PutUint32(halfway[ext4Checksum:], ext4Super(halfway).sum())
	image.write(t, before.keep(ext4Grows), 0)
	image.write(t, halfway, ext4SuperSize)
	check.OK(t, Check(t.Context(), Ext4, image.path))
	image.whole(t)
	check.OK(t, growExt4Unmounted(t.Context(), image.path, 300*miB))
	image.whole(t)
	if _, super := image.read(t); super.size() != 300*miB {
		t.Errorf("it has %d bytes", super.size())
	}
	// With damage that is not of resize2fs, or without the sign of resize2fs, somebody has to repair it by hand.
	image.write(t, before.keep(ext4Grows), 0)
	image.write(t, halfway, ext4SuperSize)
	run(t, "debugfs", "-w", "-R", "clri b", image.path)
	want := image.bytes(t)
	if err := Check(t.Context(), Ext4, image.path); !errors.Is(err, errdefs.ErrDataLoss) || !strings.Contains(err.Error(), "more damage") {
		t.Errorf("damage that no growth leaves: %v", err)
	}
	if !bytes.Equal(image.bytes(t), want) {
		t.Error("it was written to")
	}
	image.write(t, make([]byte, ext4SuperSize), 0)
	if err := Check(t.Context(), Ext4, image.path); !errors.Is(err, errdefs.ErrDataLoss) {
		t.Errorf("damage of unknown origin: %v", err)
	}
}

// TestGrowthReach: an ext4 grows to 1024 times its first size without moving blocks, and no further.
func TestGrowthReach(t *testing.T) {
	image := newExt4(t, 16*miB)
	const reach = 1024 * 16 * miB
	check.OK(t, os.Truncate(image.path, 3*reach))
	for range 2 {
		check.OK(t, growExt4Unmounted(t.Context(), image.path, 3*reach))
		if _, super := image.read(t); super.size() != reach || super.reach() != reach {
			t.Fatalf("it has %d bytes, and reaches %d", super.size(), super.reach())
		}
		image.whole(t)
	}
}

// TestGrowthCutShortUnseen: e2fsck -n says much before it tells of damage to a file, or does not get that far. Then nothing is written.
func TestGrowthCutShortUnseen(t *testing.T) {
	const groups = 2048
	path := filepath.Join(t.TempDir(), "image")
	check.OK(t, os.WriteFile(path, nil, 0o600))
	check.OK(t, os.Truncate(path, groups*8*miB))
	run(t, "mkfs.ext4", "-q", "-b", "1024", "-I", "128", "-i", "1048576", "-O", "^resize_inode,^64bit,^flex_bg", "-J", "size=1", "-E", "nodiscard", path)
	from := filepath.Join(t.TempDir(), "a")
	check.OK(t, os.WriteFile(from, make([]byte, 100), 0o600))
	for _, do := range []string{"write " + from + " a", "clri a"} {
		run(t, "debugfs", "-w", "-R", do, path)
	}
	image := ext4Image{path: path}
	descriptors := make([]byte, groups*32) // from block 2 on (ext4's group descriptor, Documentation/filesystems/ext4/group_descr.rst)
	file, err := os.OpenFile(path, os.O_RDWR, 0)
	check.OK(t, err)
	defer file.Close()
	_, err = file.ReadAt(descriptors, 2048)
	check.OK(t, err)
	for at := 0x1e; at < len(descriptors); at += 32 {
		descriptors[at]++ // the checksum
	}
	_, err = file.WriteAt(descriptors, 2048)
	check.OK(t, err)
	unchanged := func(what string, err error, want error) {
		t.Helper()
		if !errors.Is(err, want) {
			t.Errorf("%s: %v", what, err)
		}
		if boot, _ := image.read(t); bytes.ContainsFunc(boot, func(r rune) bool { return r != 0 }) {
			t.Errorf("%s: it was written to", what)
		}
		have := make([]byte, len(descriptors))
		if _, err := file.ReadAt(have, 2048); err != nil || !bytes.Equal(have, descriptors) {
			t.Errorf("%s: it was repaired", what)
		}
	}
	unchanged("damage to a file, late", endGrowth(t.Context(), path), errdefs.ErrDataLoss)
	ended, end := context.WithCancel(t.Context())
	end()
	unchanged("no time", endGrowth(ended, path), context.Canceled)
}
