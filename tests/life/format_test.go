package life

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// put writes bytes at an offset of an existing file.
func put(t testing.TB, path string, offset int64, text string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	ok(t, err)
	_, err = f.WriteAt([]byte(text), offset)
	ok(t, errors.Join(err, f.Sync(), f.Close()))
}

// TestForeignIsNeverFormatted: what anybody else wrote on a volume that the record
// calls blank stays as it is.
func TestForeignIsNeverFormatted(t *testing.T) {
	const size = 96 * miB
	at := func(offset int64, text string) func(testing.TB, string) {
		return func(t testing.TB, image string) { put(t, image, offset, text) }
	}
	mkfs := func(argv ...string) func(testing.TB, string) {
		return func(t testing.TB, image string) { run(t, append(argv, image)...) }
	}
	cases := map[string]func(t testing.TB, image string){
		"LUKS 2":                  at(0, "LUKS\xba\xbe\x00\x02"),
		"LUKS 2, second header":   at(16<<10, "SKUL\xba\xbe\x00\x02"),
		"LVM":                     at(512, "LABELONE\x01"),
		"md 0.90, at the end":     at(size-64<<10, "\xfc\x4e\x2b\xa9"),
		"md 1.0, at the end":      at(size-8<<10, "\xfc\x4e\x2b\xa9"),
		"md 1.2":                  at(4096, "\xfc\x4e\x2b\xa9"),
		"bcache":                  at(4096+24, "\xc6\x85\x73\xf6"),
		"swap":                    at(4086, "SWAPSPACE2"),
		"GPT":                     at(512, "EFI PART"),
		"GPT, backup at the end":  at(size-512, "EFI PART"),
		"DOS":                     at(510, "\x55\xaa"),
		"ext4":                    mkfs("mkfs.ext4", "-q", "-F"),
		"ext4, magic alone":       at(1080, "\x53\xef"),
		"xfs, magic alone":        at(0, "XFSB"),
		"btrfs, magic alone":      at(64<<10+64, "_BHRfS_M"),
		"btrfs, second copy":      at(64<<20+64, "_BHRfS_M"),
		"the first byte":          at(0, "\x01"),
		"an odd byte":             at(3<<20+12345, "\x01"),
		"the last of the start":   at(4<<20-1, "\x01"),
		"the first of the end":    at(size-4<<20, "\x01"),
		"an odd byte at the end":  at(size-1<<20+321, "\x01"),
		"the last byte":           at(size-1, "\x01"),
		"swap as mkswap makes it": mkfs("mkswap"),
	}
	d := start(t, drivertest.Options{})
	for name, spoil := range cases {
		t.Run(name, func(t *testing.T) {
			d := d.in(t)
			for _, provisioning := range []string{"thick", "thin"} {
				r := request(provisioning, "ext4", size)
				r.Parameters = map[string]string{"provisioning": provisioning}
				v := d.made(r)
				spoil(t, v.image())
				want := checksum(t, v.image())
				ok(t, v.claim())
				for range 2 {
					wants(t, v.stage(), codes.FailedPrecondition, "not blank", "nothing was formatted")
				}
				if checksum(t, v.image()) != want {
					t.Error("the image was written to")
				}
				if loops := stillAttached(t, v.image()); len(loops) > 0 {
					t.Errorf("still attached as %v", loops)
				}
				ok(t, v.down())
			}
		})
	}
	// XFS and btrfs need more room, and are looked for when they are asked for too.
	for _, kind := range []string{"xfs", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			d := d.in(t)
			v := d.made(request(kind, kind, smallest[kind]))
			drivertest.RunBtrfs(t, "mkfs."+kind, "-q", "-f", v.image())
			want := checksum(t, v.image())
			ok(t, v.claim())
			wants(t, v.stage(), codes.FailedPrecondition, "nothing was formatted")
			if checksum(t, v.image()) != want {
				t.Error("the image was written to")
			}
			ok(t, v.down())
		})
	}
	d.nothingLeft()
}

// TestLostFilesystem: a volume that was formatted and carries nothing now has lost its
// data, and a new filesystem would only hide that.
func TestLostFilesystem(t *testing.T) {
	d := start(t, drivertest.Options{})
	for _, kind := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			d := d.in(t)
			v := d.made(request(kind, kind, smallest[kind]))
			write(t, v.file(v.running()), 1)
			ok(t, v.unpublish(v.target("pod")))
			ok(t, v.unstage())
			put(t, v.image(), 0, string(make([]byte, 128<<10)))
			want := checksum(t, v.image())
			for range 2 {
				wants(t, v.stage(), codes.DataLoss, "nothing was formatted")
			}
			if checksum(t, v.image()) != want {
				t.Error("the image was written to")
			}
			ok(t, v.down())
		})
	}
	d.nothingLeft()
}

// TestOtherFilesystem: what carries one filesystem is not mounted, and not formatted, as
// another.
func TestOtherFilesystem(t *testing.T) {
	d := start(t, drivertest.Options{})
	v := d.made(request("volume", "ext4", smallest["xfs"]))
	target := v.running()
	write(t, v.file(target), 1)
	wants(t, d.volume(v.id, v.name, capability("xfs", multiWriter)).stage(), codes.AlreadyExists)
	ok(t, v.unpublish(target))
	ok(t, v.unstage())
	want := checksum(t, v.image())
	for _, kind := range []string{"xfs", "btrfs"} {
		wants(t, d.volume(v.id, v.name, capability(kind, multiWriter)).stage(), codes.FailedPrecondition, "carries ext4, not "+kind)
	}
	if checksum(t, v.image()) != want {
		t.Error("the image was written to")
	}
	ok(t, v.stage())
	ok(t, v.publish(target, false))
	holds(t, v.file(target), 1)
	ok(t, v.down(target))
}

// TestRawThenMount: what was a raw block device belongs to whoever wrote to it. It is
// mounted if that was a filesystem, and never formatted.
func TestRawThenMount(t *testing.T) {
	d := start(t, drivertest.Options{})
	for _, kind := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			d := d.in(t)
			raw := d.made(request("raw-"+kind, block, smallest[kind]))
			mounted := d.volume(raw.id, raw.name, capability(kind, multiWriter))
			target := raw.running()
			// As a mount it would be a second device over the same bytes.
			wants(t, mounted.stage(), codes.FailedPrecondition)
			ok(t, raw.unpublish(target))
			ok(t, raw.unstage())
			wants(t, mounted.stage(), codes.FailedPrecondition, "raw block device")

			ok(t, raw.stage())
			ok(t, raw.publish(target, false))
			drivertest.RunBtrfs(t, "mkfs."+kind, "-q", target)
			ok(t, raw.unpublish(target))
			ok(t, raw.unstage())

			for range 2 {
				ok(t, mounted.stage())
				ok(t, mounted.publish(target, false))
			}
			write(t, mounted.file(target), 1)
			if problems := mounted.problems(); len(problems) > 0 {
				t.Errorf("health: %v", problems)
			}
			before := mounted.usage(target).GetTotal()
			response, err := mounted.ControllerExpandVolume(t.Context(), expansion(mounted, smallest[kind]+64*miB))
			ok(t, err)
			if !response.GetNodeExpansionRequired() {
				t.Error("the node does not have to grow a filesystem that is mounted")
			}
			if err := mounted.nodeExpand(target); filesystem.GrowsMounted(filesystem.Type(kind)) {
				ok(t, err)
			} else {
				wants(t, err, codes.FailedPrecondition, "CAP_SYS_RESOURCE")
				ok(t, mounted.unpublish(target))
				ok(t, mounted.unstage())
				ok(t, mounted.stage())
				ok(t, mounted.publish(target, false))
			}
			if after := mounted.usage(target).GetTotal(); after < before+48*miB {
				t.Errorf("grown by 64 MiB, it shows %d bytes, %d before", after, before)
			}
			holds(t, mounted.file(target), 1)
			ok(t, mounted.down(target))
		})
	}
	d.nothingLeft()
}

// TestStageGrown: a volume that has grown is staged, whether its filesystem can grow with
// it now, later, or not by the last few blocks.
func TestStageGrown(t *testing.T) {
	d := start(t, drivertest.Options{})
	v := d.made(request("volume", "ext4", smallest["ext4"]))
	target := v.running()
	write(t, v.file(target), 1)
	for _, size := range []int64{64 * miB, 128*miB + 4096} { // ext4 has groups of 128 MiB
		ok(t, v.expand(size))
		ok(t, v.stage()) // as the kubelet does for another pod
		ok(t, v.publish(target, false))
		ok(t, v.unpublish(target))
		ok(t, v.unstage())
		ok(t, v.stage())
		ok(t, v.stage())
		ok(t, v.publish(target, false))
		if total := v.usage(target).GetTotal(); total < size-16*miB || total > size {
			t.Errorf("grown to %d bytes, it shows %d", size, total)
		}
		holds(t, v.file(target), 1)
	}
	ok(t, v.down(target))
	d.nothingLeft()
}

// TestUnfinishedFormat: mkfs that a crash cut short is done again; but not over
// something that mkfs does not write.
func TestUnfinishedFormat(t *testing.T) {
	d := start(t, drivertest.Options{})
	for _, kind := range []string{"ext4", "xfs", "btrfs"} {
		for name, left := range map[string]int64{"nothing": 0, "a part": 256 << 10, "all": smallest[kind]} {
			t.Run(kind+"/"+name, func(t *testing.T) {
				d := d.in(t)
				v := d.made(request(kind+"-"+name, kind, smallest[kind]))
				whole := filepath.Join(d.Dir, "whole")
				ok(t, os.WriteFile(whole, nil, 0o600))
				ok(t, os.Truncate(whole, smallest[kind]))
				drivertest.RunBtrfs(t, "mkfs."+kind, "-q", whole)
				run(t, "dd", "if="+whole, "of="+v.image(), "bs=64K", fmt.Sprintf("count=%d", left/(64<<10)), "conv=notrunc,sparse", "status=none")
				id, err := volume.ParseID(v.id)
				ok(t, err)
				ok(t, d.Store.SetFormat(t.Context(), id, volume.Format{State: volume.Formatting, Type: filesystem.Type(kind)}))
				target := v.running()
				write(t, v.file(target), 1)
				ok(t, v.unpublish(target))
				ok(t, v.unstage())
				ok(t, v.stage())
				ok(t, v.publish(target, false))
				holds(t, v.file(target), 1)
				ok(t, v.down(target))
			})
		}
	}
	for name, spoil := range map[string]func(*vol){
		"LUKS":    func(v *vol) { put(t, v.image(), 0, "LUKS\xba\xbe\x00\x02") },
		"LVM":     func(v *vol) { put(t, v.image(), 512, "LABELONE") },
		"xfs":     func(v *vol) { put(t, v.image(), 0, "XFSB") },
		"GPT":     func(v *vol) { put(t, v.image(), 512, "EFI PART") },
		"md 1.2":  func(v *vol) { put(t, v.image(), 4096, "\xfc\x4e\x2b\xa9") },
		"a swap":  func(v *vol) { put(t, v.image(), 4086, "SWAPSPACE2") },
		"a table": func(v *vol) { put(t, v.image(), 510, "\x55\xaa") },
	} {
		t.Run(name, func(t *testing.T) {
			d := d.in(t)
			v := d.made(request("spoiled", "ext4", smallest["ext4"]))
			id, err := volume.ParseID(v.id)
			ok(t, err)
			ok(t, d.Store.SetFormat(t.Context(), id, volume.Format{State: volume.Formatting, Type: filesystem.Ext4}))
			spoil(v)
			want := checksum(t, v.image())
			ok(t, v.claim())
			wants(t, v.stage(), codes.FailedPrecondition, "nothing was formatted")
			if checksum(t, v.image()) != want {
				t.Error("the image was written to")
			}
			ok(t, v.down())
		})
	}
	d.nothingLeft()
}

// TestMissingImage: bytes that are gone are not made again, by no call.
func TestMissingImage(t *testing.T) {
	d := start(t, drivertest.Options{})
	v := d.made(request("volume", "ext4", smallest["ext4"]))
	ok(t, v.claim())
	ok(t, os.Remove(v.image()))
	calls := map[string]func() error{
		"stage":    v.stage,
		"snapshot": func() error { _, err := v.snapshot("snapshot"); return err },
		"clone": func() error {
			_, err := d.create(fromVolume(request("clone", "ext4", smallest["ext4"]), v.id))
			return err
		},
		"expand": func() error { return v.expand(64 * miB) },
	}
	for name, call := range calls {
		t.Run(name, func(t *testing.T) { wants(t, call(), codes.DataLoss, "missing") })
	}
	_, err := d.create(request("volume", "ext4", smallest["ext4"]))
	ok(t, err) // it is there, says its record
	if _, err := os.Stat(v.image()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the image is back, or not to be looked at: %v", err)
	}
	ok(t, v.down())
	d.nothingLeft()
}
