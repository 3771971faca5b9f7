package device_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/luks"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/device"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

const (
	header = luks.HeaderSize
	behind = 8 * pooltest.MiB // the size of an encrypted volume
	uuid   = "00112233-4455-6677-8899-aabbccddeeff"
)

var opening = device.Options{Encryption: &device.Encryption{Key: luks.Key("the key")}}

// overEncrypted is overEach, of a volume with a header.
func overEncrypted(t *testing.T, test func(f *fixture)) {
	overEach(t, func(f *fixture) {
		check.OK(f, luks.Available())
		check.OK(f, pooltest.Second(f.pool.Expand(f.Context(), f.ref, header+behind)))
		bare, err := f.pool.Attach(f.Context(), f.ref, blockdev.Attachment{})
		check.OK(f, err)
		check.OK(f, luks.Format(f.Context(), bare.Path, uuid, opening.Encryption.Key))
		check.OK(f, bare.Close())
		f.gone()
		test(f)
	})
}

// crypt returns the name of the device that is open, and the device; nil if there is none.
func (f *fixture) crypt() (string, *dm.Device) {
	f.Helper()
	top, _ := f.names()
	d, err := dm.Find(top + "-crypt")
	check.OK(f, err)
	return top + "-crypt", d
}

// closed makes sure that nothing is left of the volume's devices, nor a node of one.
func (f *fixture) closed() {
	f.Helper()
	f.gone()
	name, d := f.crypt()
	if _, err := os.Lstat(filepath.Join("/dev/mapper", name)); d != nil || !errors.Is(err, os.ErrNotExist) {
		f.Errorf("%+v is left, its node %v", d, err)
	}
}

// TestEncrypted: what is attached is one device, of what is behind the header, and all below it goes with it.
func TestEncrypted(t *testing.T) {
	for _, keep := range []bool{false, true} {
		overEncrypted(t, func(f *fixture) {
			d := f.attach(device.Options{Keep: keep, Encryption: opening.Encryption})
			below, err := f.pool.Attached(f.Context(), f.ref)
			check.OK(f, err)
			_, open := f.crypt()
			if open == nil || !open.Deferred || d.Size != behind || d.Kept != keep || len(below) != 1 || d.Below != below[0].Path {
				f.Fatalf("attached as %+v over %+v over %+v", d, open, below)
			}
			f.is(d, behind, "attached")
			if devices := f.attached(); devices[0].Below != below[0].Path {
				f.Errorf("found as over %s, not %s", devices[0].Below, below[0].Path)
			}
			data := bytes.Repeat([]byte("plain text "), 4096)[:4096]
			file, err := os.OpenFile(d.Path, os.O_RDWR|os.O_SYNC, 0)
			check.OK(f, err)
			check.OK(f, errors.Join(pooltest.Second(file.WriteAt(data, behind-4096)), file.Close()))
			kept := make([]byte, 4096)
			bare, err := os.Open(below[0].Path)
			check.OK(f, err)
			check.OK(f, errors.Join(pooltest.Second(bare.ReadAt(kept, header+behind-4096)), bare.Close()))
			if bytes.Contains(kept, []byte("plain")) {
				f.Error("the pool has the plain text")
			}
			// Who has it finds it without a key, and whoever has another one.
			again := f.attach(device.Options{Keep: keep, Encryption: &device.Encryption{Key: luks.Key("another")}})
			if again.Number != d.Number {
				f.Errorf("attached again as %s, not %s", again.Path, d.Path)
			}
			if problems, err := f.stack().Health(f.Context()); len(problems) > 0 || err != nil {
				f.Errorf("health %v, %v", problems, err)
			}
			check.OK(f, errors.Join(again.Close(), d.Close()))
			if keep {
				orphans, err := device.New().Orphans(f.Context(), f.pool)
				if check.OK(f, err); len(orphans[f.ref]) != 1 || orphans[f.ref][0].Number != d.Number {
					f.Errorf("orphans %+v", orphans)
				}
				check.OK(f, f.stack().Detach(f.Context()))
			}
			f.closed()
			back := f.attach(opening)
			check.OK(f, pooltest.Second(readAt(back.Path, kept, behind-4096)))
			if !bytes.Equal(kept, data) {
				f.Error("it reads as something else when it is opened again")
			}
			check.OK(f, back.Close())
			f.closed()
		})
	}
}

func readAt(path string, into []byte, at int64) (int, error) {
	file, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer file.Close()
	return file.ReadAt(into, at)
}

// TestEncryptedRefused: a missing key, a wrong one and a header that is gone are errors, and leave nothing.
func TestEncryptedRefused(t *testing.T) {
	overEncrypted(t, func(f *fixture) {
		for _, c := range []struct {
			key        luks.Key
			want, kind error
		}{{nil, luks.ErrNoKey, errdefs.ErrInvalid}, {luks.Key("wrong"), luks.ErrKey, errdefs.ErrPrecondition}} {
			_, err := f.stack().Attach(f.Context(), device.Options{Encryption: &device.Encryption{Key: c.key}})
			if !errors.Is(err, c.want) || !slices.Equal(errdefs.Kinds(err), []error{c.kind}) {
				f.Errorf("with %v: %v, kinds %v", c.key, err, errdefs.Kinds(err))
			}
			f.closed()
		}
		d := f.attach(opening)
		below, err := f.pool.Attached(f.Context(), f.ref)
		check.OK(f, err)
		check.OK(f, luks.Erase(f.Context(), below[0].Path))
		problems, err := f.stack().Health(f.Context())
		if err != nil || len(problems) != 1 || problems[0].Reason != "HeaderLost" {
			f.Errorf("health %v, %v", problems, err)
		}
		f.writes(d.Path)
		check.OK(f, d.Close())
		f.closed()
		if _, err := f.stack().Attach(f.Context(), opening); err == nil || errors.Is(err, luks.ErrKey) {
			f.Errorf("without a header: %v", err)
		}
		f.closed()
	})
}

// craft changes what the copies of a header on a device say, as somebody does who can write to the disk: their sums are right.
func (f *fixture) craft(path string, copies []int, change func(binary []byte, text map[string]any)) {
	f.Helper()
	const size, sum, begin = 16 << 10, 448, 4096
	device, err := os.OpenFile(path, os.O_RDWR, 0)
	check.OK(f, err)
	for _, n := range copies {
		data := make([]byte, size)
		check.OK(f, pooltest.Second(device.ReadAt(data, int64(n*size))))
		var text map[string]any
		check.OK(f, json.Unmarshal(bytes.TrimRight(data[begin:], "\x00"), &text))
		change(data, text)
		made, err := json.Marshal(text)
		check.OK(f, err)
		clear(data[begin:])
		copy(data[begin:], made)
		clear(data[sum : sum+64])
		is := sha256.Sum256(data)
		copy(data[sum:], is[:])
		check.OK(f, pooltest.Second(device.WriteAt(data, int64(n*size))))
	}
	check.OK(f, errors.Join(device.Sync(), device.Close()))
}

// TestEncryptedCrafted: a header that somebody has changed on the disk, so that nothing would be encrypted any more, or elsewhere, or the machine would be
// without memory, is refused at once. Nothing is written but by cryptsetup, and nothing left.
func TestEncryptedCrafted(t *testing.T) {
	in := func(text map[string]any, path ...string) map[string]any {
		for _, key := range path {
			text = text[key].(map[string]any)
		}
		return text
	}
	both := []int{0, 1}
	cases := map[string]struct {
		copies []int
		change func(binary []byte, text map[string]any)
		says   string
	}{
		"no cipher":     {both, func(_ []byte, text map[string]any) { in(text, "segments", "0")["encryption"] = "cipher_null-ecb" }, "cipher_null"},
		"another place": {both, func(_ []byte, text map[string]any) { in(text, "segments", "0")["offset"] = "4194304" }, "from sector 8192"},
		"much memory":   {both, func(_ []byte, text map[string]any) { in(text, "keyslots", "0", "kdf")["memory"] = 4 << 20 }, "4194304 KiB"},
		"no cipher of the key": {both, func(_ []byte, text map[string]any) {
			in(text, "keyslots", "0", "area")["encryption"] = "cipher_null-ecb"
		}, "nothing was tried"},
		"much time": {both, func(_ []byte, text map[string]any) { in(text, "keyslots", "0", "kdf")["time"] = 1 << 31 }, "passes"},
		"much memory in the newer copy": {[]int{1}, func(binary []byte, text map[string]any) {
			binary[23]++ // its number
			in(text, "keyslots", "0", "kdf")["memory"] = 4 << 20
		}, "4194304 KiB"},
	}
	overEncrypted(t, func(f *fixture) {
		good := make([]byte, 32<<10)
		for what, c := range cases {
			bare, err := f.pool.Attach(f.Context(), f.ref, blockdev.Attachment{})
			check.OK(f, err)
			check.OK(f, pooltest.Second(readAt(bare.Path, good, 0)))
			f.craft(bare.Path, c.copies, c.change)
			within, end := context.WithTimeout(f.Context(), 30*time.Second)
			_, err = f.stack().Attach(within, opening)
			end()
			if !errors.Is(err, errdefs.ErrPrecondition) || !strings.Contains(err.Error(), c.says) {
				f.Errorf("%s: attached: %v", what, err)
			}
			check.OK(f, os.WriteFile(bare.Path, good, 0))
			check.OK(f, bare.Close())
			f.closed()
		}
	})
}

// TestEncryptedCraftedWhileOpen: what somebody changes in the header while the volume is open is not tried when it grows. It goes on as it is.
func TestEncryptedCraftedWhileOpen(t *testing.T) {
	overEncrypted(t, func(f *fixture) {
		d := f.attach(opening)
		check.OK(f, pooltest.Second(f.pool.Expand(f.Context(), f.ref, header+behind+4*pooltest.MiB)))
		good := make([]byte, 32<<10)
		check.OK(f, pooltest.Second(readAt(d.Below, good, 0)))
		f.craft(d.Below, []int{0, 1}, func(_ []byte, text map[string]any) {
			text["keyslots"].(map[string]any)["0"].(map[string]any)["kdf"].(map[string]any)["memory"] = 4 << 20
		})
		within, end := context.WithTimeout(f.Context(), 30*time.Second)
		err := f.stack().Grow(within, opening.Encryption.Key)
		end()
		if !errors.Is(err, errdefs.ErrPrecondition) || !strings.Contains(err.Error(), "nothing was tried") {
			f.Errorf("it grew by a changed header: %v", err)
		}
		f.is(d, behind, "not grown")
		f.writes(d.Path)
		check.OK(f, os.WriteFile(d.Below, good, 0))
		check.OK(f, f.stack().Grow(f.Context(), opening.Encryption.Key))
		f.is(d, behind+4*pooltest.MiB, "grown")
		check.OK(f, d.Close())
		f.closed()
	})
}

// TestEncryptedGrows: while it is open it grows with a key, and without one stays as it is, until it is opened again.
func TestEncryptedGrows(t *testing.T) {
	overEncrypted(t, func(f *fixture) {
		d := f.attach(opening)
		check.OK(f, pooltest.Second(f.pool.Expand(f.Context(), f.ref, header+behind+4*pooltest.MiB)))
		if err := f.stack().Grow(f.Context(), nil); !errors.Is(err, luks.ErrNoKey) || !slices.Equal(errdefs.Kinds(err), []error{errdefs.ErrPrecondition}) {
			f.Errorf("without a key: %v", err)
		}
		if err := f.stack().Grow(f.Context(), luks.Key("wrong")); !errors.Is(err, luks.ErrKey) {
			f.Errorf("with a wrong key: %v", err)
		}
		f.is(d, behind, "not grown")
		f.writes(d.Path)
		check.OK(f, f.stack().Grow(f.Context(), opening.Encryption.Key))
		f.is(d, behind+4*pooltest.MiB, "grown")
		check.OK(f, f.stack().Grow(f.Context(), nil)) // there is nothing to do
		check.OK(f, pooltest.Second(f.pool.Expand(f.Context(), f.ref, header+behind+8*pooltest.MiB)))
		again := f.attach(opening) // by who has a key in any case
		f.is(d, behind+8*pooltest.MiB, "attached again")
		check.OK(f, pooltest.Second(f.pool.Expand(f.Context(), f.ref, header+behind+12*pooltest.MiB)))
		check.OK(f, errors.Join(again.Close(), d.Close()))
		f.closed()
		d = f.attach(opening)
		f.is(d, behind+12*pooltest.MiB, "opened again")
		check.OK(f, d.Close())
		f.closed()
	})
}

// TestEncryptedCut: what a crash leaves of an open device is put right by the next Attach, and by a start.
func TestEncryptedCut(t *testing.T) {
	overEncrypted(t, func(f *fixture) {
		name, _ := f.crypt()
		bare := func() blockdev.Device {
			d, err := f.pool.Attach(f.Context(), f.ref, blockdev.Attachment{})
			check.OK(f, err)
			f.Cleanup(func() { _ = d.Close() })
			return d
		}
		for what, leave := range map[string]func(){
			"open, and of nobody": func() {
				d := bare()
				check.OK(f, errors.Join(luks.Open(f.Context(), d.Path, name, opening.Encryption.Key, false), d.Close()))
			},
			"suspended": func() {
				d := bare()
				check.OK(f, errors.Join(luks.Open(f.Context(), d.Path, name, opening.Encryption.Key, false), d.Close(), dm.Suspend(name)))
			},
			"a node": func() {
				check.OK(f, unix.Mknod(filepath.Join("/dev/mapper", name), unix.S_IFBLK|0o600, int(unix.Mkdev(254, 1000))))
			},
		} {
			leave()
			f.recover()
			f.closed()
			leave()
			if what == "suspended" {
				f.recover()
			}
			d := f.attach(opening)
			f.writes(d.Path)
			f.recover()
			f.is(d, behind, "after a start, "+what)
			f.writes(d.Path)
			check.OK(f, d.Close())
			f.closed()
		}
		// A cryptsetup that is killed: sooner or later.
		for after := 50 * time.Millisecond; after < 5*time.Second; after += after {
			ctx, cancel := context.WithTimeout(f.Context(), after)
			d, err := f.stack().Attach(ctx, opening)
			cancel()
			if err == nil {
				check.OK(f, d.Close())
			} else if !errors.Is(err, context.DeadlineExceeded) {
				f.Errorf("after %v: %v", after, err)
			}
			f.closed()
		}
	})
}

// TestEncryptedBesideHung: disks that do not answer are in the way of no other's keys.
func TestEncryptedBesideHung(t *testing.T) {
	overEncrypted(t, func(f *fixture) {
		const name = "ashlar-test-hung"
		bare, err := f.pool.Attach(f.Context(), f.ref, blockdev.Attachment{})
		check.OK(f, err)
		check.OK(f, dm.Show(name, name, bare.Number, bare.Size, false))
		hung, err := dm.Find(name)
		check.OK(f, err)
		check.OK(f, dm.Suspend(name))
		ctx, cancel := context.WithCancel(f.Context())
		var waiting sync.WaitGroup
		for range 4 {
			waiting.Go(func() {
				if err := luks.Format(ctx, hung.Path(), uuid, opening.Encryption.Key); !errors.Is(err, context.Canceled) {
					f.Errorf("on a disk that does not answer: %v", err)
				}
			})
		}
		time.Sleep(2 * time.Second)
		image := filepath.Join(f.TempDir(), "other")
		check.OK(f, os.WriteFile(image, nil, 0o600))
		check.OK(f, os.Truncate(image, header+behind))
		within, end := context.WithTimeout(f.Context(), 40*time.Second)
		if err := luks.Format(within, image, uuid, opening.Encryption.Key); err != nil {
			f.Errorf("beside a disk that does not answer: %v", err)
		}
		end()
		cancel()
		check.OK(f, dm.Resume(name, 0))
		waiting.Wait()
		check.OK(f, errors.Join(pooltest.Second(dm.Remove(name)), bare.Close()))
	})
}

// TestEncryptedDiscards: they are passed on only if that is asked for.
func TestEncryptedDiscards(t *testing.T) {
	for _, want := range []bool{false, true} {
		overEncrypted(t, func(f *fixture) {
			d := f.attach(device.Options{Encryption: &device.Encryption{Key: opening.Encryption.Key, Discards: want}})
			text, err := os.ReadFile("/sys/block/" + filepath.Base(d.Path) + "/queue/discard_max_bytes")
			check.OK(f, err)
			below, err := os.ReadFile("/sys/block/" + filepath.Base(d.Below) + "/queue/discard_max_bytes")
			check.OK(f, err)
			can := strings.TrimSpace(string(below)) != "0"
			if passes := strings.TrimSpace(string(text)) != "0"; passes != (want && can) {
				f.Errorf("with discards %v its device takes %s, the one below %s", want, text, below)
			}
			check.OK(f, d.Close())
			f.closed()
		})
	}
}
