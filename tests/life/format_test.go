package life

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// put writes bytes at an offset of an existing file.
func put(t testing.TB, path string, offset int64, text string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	check.OK(t, err)
	_, err = f.WriteAt([]byte(text), offset)
	check.OK(t, errors.Join(err, f.Sync(), f.Close()))
}

// TestForeignIsNeverFormatted: what anybody else wrote on a volume that the record
// calls blank stays as it is.
func TestForeignIsNeverFormatted(t *testing.T) {
	const size = 96 * miB
	at := func(offset int64, text string) func(testing.TB, string) {
		return func(t testing.TB, image string) { put(t, image, offset, text) }
	}
	mkfs := func(argv ...string) func(testing.TB, string) {
		return func(t testing.TB, image string) { drivertest.Run(t, append(argv, image)...) }
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
				r := co.Request(provisioning, "ext4", size)
				r.Parameters = map[string]string{"provisioning": provisioning}
				v := d.made(r)
				spoil(t, v.image())
				want := checksum(t, v.image())
				check.OK(t, v.claim())
				for range 2 {
					check.Code(t, v.stage(), codes.FailedPrecondition, "not blank", "nothing was formatted")
				}
				if checksum(t, v.image()) != want {
					t.Error("the image was written to")
				}
				if loops := remaining(v.image()); len(loops) > 0 {
					t.Errorf("still attached as %v", loops)
				}
				check.OK(t, v.down())
			}
		})
	}
	// XFS and btrfs need more room, and are looked for when they are asked for too.
	for _, kind := range []string{"xfs", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			d := d.in(t)
			v := d.made(co.Request(kind, kind, smallest[kind]))
			drivertest.RunBtrfs(t, "mkfs."+kind, "-q", "-f", v.image())
			want := checksum(t, v.image())
			check.OK(t, v.claim())
			check.Code(t, v.stage(), codes.FailedPrecondition, "nothing was formatted")
			if checksum(t, v.image()) != want {
				t.Error("the image was written to")
			}
			check.OK(t, v.down())
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
			v := d.made(co.Request(kind, kind, smallest[kind]))
			write(t, v.File(v.running()), 1)
			check.OK(t, v.unpublish(v.Target("pod")))
			check.OK(t, v.unstage())
			put(t, v.image(), 0, string(make([]byte, 128<<10)))
			want := checksum(t, v.image())
			for range 2 {
				check.Code(t, v.stage(), codes.DataLoss, "nothing was formatted")
			}
			if checksum(t, v.image()) != want {
				t.Error("the image was written to")
			}
			check.OK(t, v.down())
		})
	}
	d.nothingLeft()
}

// TestOtherFilesystem: what carries one filesystem is not mounted, and not formatted, as
// another.
func TestOtherFilesystem(t *testing.T) {
	d := start(t, drivertest.Options{})
	v := d.made(co.Request("volume", "ext4", smallest["xfs"]))
	target := v.running()
	write(t, v.File(target), 1)
	check.Code(t, d.volume(v.ID, v.Name, co.Capability("xfs", co.MultiWriter)).stage(), codes.AlreadyExists)
	check.OK(t, v.unpublish(target))
	check.OK(t, v.unstage())
	want := checksum(t, v.image())
	for _, kind := range []string{"xfs", "btrfs"} {
		check.Code(t, d.volume(v.ID, v.Name, co.Capability(kind, co.MultiWriter)).stage(), codes.FailedPrecondition, "carries ext4, not "+kind)
	}
	if checksum(t, v.image()) != want {
		t.Error("the image was written to")
	}
	check.OK(t, v.stage())
	check.OK(t, v.publish(target, false))
	holds(t, v.File(target), 1)
	check.OK(t, v.down(target))
}

// TestRawThenMount: what was a raw block device belongs to whoever wrote to it. It is
// mounted if that was a filesystem, and never formatted.
func TestRawThenMount(t *testing.T) {
	d := start(t, drivertest.Options{})
	for _, kind := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			d := d.in(t)
			raw := d.made(co.Request("raw-"+kind, block, smallest[kind]))
			mounted := d.volume(raw.ID, raw.Name, co.Capability(kind, co.MultiWriter))
			target := raw.running()
			// As a mount it would be a second device over the same bytes.
			check.Code(t, mounted.stage(), codes.FailedPrecondition)
			check.OK(t, raw.unpublish(target))
			check.OK(t, raw.unstage())
			check.Code(t, mounted.stage(), codes.FailedPrecondition, "raw block device")

			check.OK(t, raw.stage())
			check.OK(t, raw.publish(target, false))
			drivertest.RunBtrfs(t, "mkfs."+kind, "-q", target)
			check.OK(t, raw.unpublish(target))
			check.OK(t, raw.unstage())

			for range 2 {
				check.OK(t, mounted.stage())
				check.OK(t, mounted.publish(target, false))
			}
			write(t, mounted.File(target), 1)
			if problems := mounted.problems(); len(problems) > 0 {
				t.Errorf("health: %v", problems)
			}
			before := mounted.usage(target).GetTotal()
			response, err := mounted.ControllerExpandVolume(t.Context(), expansion(mounted, smallest[kind]+64*miB))
			check.OK(t, err)
			if !response.GetNodeExpansionRequired() {
				t.Error("the node does not have to grow a filesystem that is mounted")
			}
			if err := mounted.nodeExpand(target); filesystem.GrowsMounted(filesystem.Type(kind)) {
				check.OK(t, err)
			} else {
				check.Code(t, err, codes.FailedPrecondition, "CAP_SYS_RESOURCE")
				check.OK(t, mounted.unpublish(target))
				check.OK(t, mounted.unstage())
				check.OK(t, mounted.stage())
				check.OK(t, mounted.publish(target, false))
			}
			if after := mounted.usage(target).GetTotal(); after < before+48*miB {
				t.Errorf("grown by 64 MiB, it shows %d bytes, %d before", after, before)
			}
			holds(t, mounted.File(target), 1)
			check.OK(t, mounted.down(target))
		})
	}
	d.nothingLeft()
}

// TestStageGrown: a volume that has grown is staged, whether its filesystem can grow with
// it now, later, or not by the last few blocks.
func TestStageGrown(t *testing.T) {
	d := start(t, drivertest.Options{})
	v := d.made(co.Request("volume", "ext4", smallest["ext4"]))
	target := v.running()
	write(t, v.File(target), 1)
	for _, size := range []int64{64 * miB, 128*miB + 4096} { // ext4 has groups of 128 MiB
		check.OK(t, v.expand(size))
		check.OK(t, v.stage()) // as the kubelet does for another pod
		check.OK(t, v.publish(target, false))
		check.OK(t, v.unpublish(target))
		check.OK(t, v.unstage())
		check.OK(t, v.stage())
		check.OK(t, v.stage())
		check.OK(t, v.publish(target, false))
		if total := v.usage(target).GetTotal(); total < size-16*miB || total > size {
			t.Errorf("grown to %d bytes, it shows %d", size, total)
		}
		holds(t, v.File(target), 1)
	}
	check.OK(t, v.down(target))
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
				v := d.made(co.Request(kind+"-"+name, kind, smallest[kind]))
				whole := filepath.Join(d.Dir, "whole")
				check.OK(t, os.WriteFile(whole, nil, 0o600))
				check.OK(t, os.Truncate(whole, smallest[kind]))
				drivertest.RunBtrfs(t, "mkfs."+kind, "-q", whole)
				drivertest.Run(t, "dd", "if="+whole, "of="+v.image(), "bs=64K", fmt.Sprintf("count=%d", left/(64<<10)), "conv=notrunc,sparse", "status=none")
				id, err := volume.ParseID(v.ID)
				check.OK(t, err)
				check.OK(t, d.Store.SetFormat(t.Context(), id, volume.Format{State: volume.Formatting, Type: filesystem.Type(kind)}))
				target := v.running()
				write(t, v.File(target), 1)
				check.OK(t, v.unpublish(target))
				check.OK(t, v.unstage())
				check.OK(t, v.stage())
				check.OK(t, v.publish(target, false))
				holds(t, v.File(target), 1)
				check.OK(t, v.down(target))
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
			v := d.made(co.Request("spoiled", "ext4", smallest["ext4"]))
			id, err := volume.ParseID(v.ID)
			check.OK(t, err)
			check.OK(t, d.Store.SetFormat(t.Context(), id, volume.Format{State: volume.Formatting, Type: filesystem.Ext4}))
			spoil(v)
			want := checksum(t, v.image())
			check.OK(t, v.claim())
			check.Code(t, v.stage(), codes.FailedPrecondition, "nothing was formatted")
			if checksum(t, v.image()) != want {
				t.Error("the image was written to")
			}
			check.OK(t, v.down())
		})
	}
	d.nothingLeft()
}

// TestMissingImage: bytes that are gone are not made again, by no call.
func TestMissingImage(t *testing.T) {
	d := start(t, drivertest.Options{})
	v := d.made(co.Request("volume", "ext4", smallest["ext4"]))
	check.OK(t, v.claim())
	check.OK(t, os.Remove(v.image()))
	calls := map[string]func() error{
		"stage":    v.stage,
		"snapshot": func() error { _, err := v.snapshot("snapshot"); return err },
		"clone": func() error {
			_, err := d.create(co.FromVolume(co.Request("clone", "ext4", smallest["ext4"]), v.ID))
			return err
		},
		"expand": func() error { return v.expand(64 * miB) },
	}
	for name, call := range calls {
		t.Run(name, func(t *testing.T) { check.Code(t, call(), codes.DataLoss, "missing") })
	}
	_, err := d.create(co.Request("volume", "ext4", smallest["ext4"]))
	check.OK(t, err) // it is there, says its record
	if _, err := os.Stat(v.image()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the image is back, or not to be looked at: %v", err)
	}
	check.OK(t, v.down())
	d.nothingLeft()
}
