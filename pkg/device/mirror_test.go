package device_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/luks"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/device"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// disk is a pool whose one volume is a device of the device mapper over a loop device, so that it can fail. Reads and writes of the image are those of the
// disk, as the loop device goes through the page cache of the file.
type disk struct {
	blockdev.Pool
	name  string
	label string // in the names of what is over it
	size  int64
	image string
}

// newDisk makes a disk; options are those of losetup(8).
func newDisk(t *testing.T, name string, size int64, options ...string) *disk {
	d := &disk{name: "test-" + name, size: size, image: filepath.Join(drivertest.Dir(t), "image")}
	check.OK(t, errors.Join(os.WriteFile(d.image, nil, 0o600), os.Truncate(d.image, size)))
	loop := drivertest.Loop(t, d.image, options...)
	t.Cleanup(func() { drivertest.Run(t, "losetup", "-d", loop) })
	d.mend(t, loop)
	t.Cleanup(func() { drivertest.Run(t, "dmsetup", "remove", "--retry", d.name) })
	return d
}

// hang has all that is read from and written to the disk wait, until answer.
func (d *disk) hang(t *testing.T) (answer func()) {
	check.OK(t, dm.Suspend(d.name))
	answer = sync.OnceFunc(func() { check.OK(t, dm.Resume(d.name, dm.NoScan)) })
	t.Cleanup(answer)
	return answer
}

func (d *disk) mend(t *testing.T, loop string) {
	var st unix.Stat_t
	check.OK(t, unix.Stat(loop, &st))
	check.OK(t, dm.Make(d.name, "", dm.Linear(st.Rdev, d.size)))
}

// fail has all that is read from and written to the disk fail.
func (d *disk) fail(t *testing.T) {
	check.OK(t, dm.Replace(d.name, []dm.Line{{Length: d.size, Kind: "error"}}))
}

// at reads the disk itself.
func (d *disk) at(t *testing.T, offset int64, size int) []byte {
	t.Helper()
	b := make([]byte, size)
	check.OK(t, pooltest.Second(readAt(d.image, b, offset)))
	return b
}

func (d *disk) device() blockdev.Device {
	found, err := dm.Find(d.name)
	if err != nil || found == nil {
		panic(fmt.Sprint("disk ", d.name, ": ", err))
	}
	return blockdev.Device{Path: found.Path(), Number: found.Number, Size: d.size}
}

func (d *disk) Name() string { return d.name }

func (d *disk) Top(ref blockdev.Ref) (name, uuid, before string, err error) {
	name = "ashlar-" + d.name + d.label + "-" + ref.String()
	return name, "LVM-NOT-OF-LVM-BUT-OF-A-TEST-" + d.name + ref.String(), "", nil
}

func (d *disk) ParseTop(name string) (blockdev.Ref, bool) {
	text, ours := strings.CutPrefix(name, "ashlar-"+d.name+d.label+"-")
	ref := blockdev.ParseRef(text)
	return ref, ours && ref.Validate() == nil
}

func (d *disk) Attach(context.Context, blockdev.Ref, blockdev.Attachment) (blockdev.Device, error) {
	f, err := os.Open(d.device().Path)
	return d.device().Held(f.Close), err
}

func (d *disk) Attached(context.Context, blockdev.Ref) ([]blockdev.Device, error) {
	return []blockdev.Device{d.device()}, nil
}

func (d *disk) Detach(context.Context, blockdev.Ref) error { return nil }

func (d *disk) Health(context.Context, blockdev.Ref) ([]blockdev.Problem, error) { return nil, nil }

func (d *disk) Orphans(context.Context) (map[blockdev.Ref][]blockdev.Device, error) { return nil, nil }

// pair is a volume on one disk, that moves to another.
type pair struct {
	*fixture
	from, to *disk
	options  device.Options
}

// overPair runs a test over disks of a size, of a volume that is plain, and of one that is encrypted.
func overPair(t *testing.T, size int64, test func(p *pair)) {
	drivertest.NeedRoot(t)
	drivertest.NeedMapper(t)
	check.OK(t, dm.HasTarget("mirror"))
	for name, encrypted := range map[string]bool{"plain": false, "encrypted": true} {
		t.Run(name, func(t *testing.T) {
			p := &pair{from: newDisk(t, "old", size), to: newDisk(t, "new", size), options: device.Options{Keep: true, Seat: true}}
			p.fixture = &fixture{t, p.from, pooltest.Vol("a"), device.New()}
			if encrypted {
				p.options.Encryption = opening.Encryption
				check.OK(t, luks.Format(t.Context(), p.from.device().Path, uuid, opening.Encryption.Key))
			}
			t.Cleanup(func() {
				check.OK(t, errors.Join(p.stack().Detach(context.Background()), p.moved().Detach(context.Background())))
			})
			test(p)
		})
	}
}

// moved is the stack under the names that it gets.
func (p *pair) moved() device.Stack { return device.New().Of(p.to, p.ref) }

func (p *pair) mirror(data ...blockdev.Extent) {
	p.Helper()
	check.OK(p, p.stack().Mirror(p.Context(), p.to.device(), func(context.Context) ([]blockdev.Extent, error) { return data, nil }))
}

// all is the whole volume.
func (p *pair) all() blockdev.Extent { return blockdev.Extent{Length: p.from.size} }

// mirrored makes sure that there is a mirror, and returns what the kernel tells of it.
func (p *pair) mirrored() device.Mirrored {
	p.Helper()
	m, is, err := p.stack().Mirrored(p.Context())
	check.OK(p, err)
	old := p.from.device().Number
	if p.options.Marking != nil {
		name, _ := p.names()
		marks, err := dm.Find(name + "-marks")
		check.OK(p, err)
		old = marks.Number
	}
	if !is || m.Old != old || m.New != p.to.device().Number || m.Total != p.from.size || m.Synced > m.Total {
		p.Fatalf("mirrored %v: %+v", is, m)
	}
	return m
}

// becomes waits until something is true of the mirror.
func (p *pair) becomes(what string, is func(m device.Mirrored) bool) {
	p.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		if m := p.mirrored(); is(m) {
			return
		} else if time.Now().After(end) {
			p.Fatalf("the mirror is not %s: %+v", what, m)
		}
	}
}

func (p *pair) copied() {
	p.Helper()
	p.becomes("copied", func(m device.Mirrored) bool { return m.Synced == m.Total })
	if m := p.mirrored(); m.Forgot || m.OldFailed || m.NewFailed || m.Back {
		p.Errorf("nothing has failed, and the mirror is %+v", m)
	}
}

// write writes to a volume, through to the disk.
func (p *pair) write(path string, at int64, b []byte) {
	p.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY|unix.O_DSYNC, 0)
	check.OK(p, err)
	check.OK(p, errors.Join(pooltest.Second(f.WriteAt(b, at)), f.Close()))
}

// pattern is a block that is not like others.
func pattern(n int) []byte { return bytes.Repeat(fmt.Appendf(nil, "%015d\n", n), 256) }

// writer writes numbered blocks to a volume, each through before the next, until halt is called, which returns how many were acknowledged; and
// what became of the last one.
type writer struct {
	stop chan struct{}
	done chan error
	n    chan int // the number that was acknowledged last, as often as it is asked for
}

const (
	writtenAt     = 2 * pooltest.MiB
	writtenBlocks = 256
)

func (p *pair) writer(path string) *writer {
	w := &writer{stop: make(chan struct{}), done: make(chan error, 1), n: make(chan int)}
	f, err := os.OpenFile(path, os.O_WRONLY|unix.O_DSYNC, 0)
	check.OK(p, err)
	acknowledged := make(chan int)
	go func() {
		defer close(acknowledged)
		defer f.Close()
		for n := 1; ; n++ {
			select {
			case <-w.stop:
				w.done <- nil
				return
			case <-time.After(time.Millisecond):
			}
			if _, err := f.WriteAt(pattern(n), writtenAt+int64(n%writtenBlocks)*4096); err != nil {
				w.done <- err
				return
			}
			acknowledged <- n
		}
	}()
	go func() {
		defer close(w.n)
		last := 0
		for {
			select {
			case n, more := <-acknowledged:
				if !more {
					w.n <- last // for halt
					return
				}
				last = n
			case w.n <- last:
			}
		}
	}()
	return w
}

// goesOn waits until more was acknowledged.
func (w *writer) goesOn(t *testing.T) {
	t.Helper()
	was := <-w.n
	for end := time.Now().Add(30 * time.Second); <-w.n < was+3; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("the writer hangs at %d", was)
		}
	}
}

// held makes sure that nothing is acknowledged.
func (w *writer) held(t *testing.T) {
	t.Helper()
	time.Sleep(200 * time.Millisecond) // what was acknowledged before is counted by then
	was := <-w.n
	time.Sleep(200 * time.Millisecond)
	if now := <-w.n; now > was {
		t.Errorf("%d writes were acknowledged meanwhile", now-was)
	}
}

// halt ends the writer, and returns how many were acknowledged.
func (w *writer) halt() (n int, err error) {
	close(w.stop)
	err = <-w.done
	for last := range w.n {
		n = last
	}
	return n, err
}

// has makes sure that a device has all that was acknowledged.
func (p *pair) has(path string, n int) {
	p.Helper()
	missing := 0
	for i := max(1, n-writtenBlocks+2); i <= n; i++ {
		b := make([]byte, 4096)
		check.OK(p, pooltest.Second(readAt(path, b, writtenAt+int64(i%writtenBlocks)*4096)))
		if !bytes.Equal(b, pattern(i)) && !bytes.Equal(b, pattern(i+writtenBlocks)) {
			missing++
		}
	}
	if missing > 0 || n == 0 {
		p.Errorf("%d of %d blocks that were acknowledged are missing", missing, n)
	}
}

// TestMirror: what holds data is copied, and nothing else; what is written before, while writes are held, and after is on both; and the volume is one device all along.
func TestMirror(t *testing.T) {
	const at = 18 * pooltest.MiB // behind a header
	overPair(t, 64*pooltest.MiB, func(p *pair) {
		d := p.attach(p.options)
		p.write(d.Path, 0, pattern(1))
		p.write(p.from.device().Path, 50*pooltest.MiB, pattern(2)) // of which is said that it is zeros
		if _, is, err := p.stack().Mirrored(p.Context()); is || err != nil {
			p.Errorf("mirrored before: %v, %v", is, err)
		}
		held := make(chan struct{})
		check.OK(p, p.stack().Mirror(p.Context(), p.to.device(), func(context.Context) ([]blockdev.Extent, error) {
			go func() {
				defer close(held)
				p.write(d.Path, pooltest.MiB, pattern(3))
			}()
			select {
			case <-held:
				p.Error("writes are not held back")
			case <-time.After(100 * time.Millisecond):
			}
			return []blockdev.Extent{{Length: at}, {Offset: 30 * pooltest.MiB, Length: 4096}}, nil
		}))
		<-held
		p.copied()
		p.write(d.Path, 2*pooltest.MiB, pattern(4))
		if devices := p.attached(); devices[0].Number != d.Number || !devices[0].Kept || devices[0].Below == "" {
			p.Errorf("attached as %+v", devices)
		}
		table, err := dm.Status(p.seat())
		check.OK(p, err)
		if len(table) != 4 {
			p.Errorf("its table is %+v", table)
		}
		if !bytes.Equal(p.from.at(p.T, 0, at), p.to.at(p.T, 0, at)) {
			p.Error("the new leg has not what was written")
		}
		if b := p.to.at(p.T, 50*pooltest.MiB, 4096); !bytes.Equal(b, make([]byte, 4096)) {
			p.Error("the new leg has what is in no range that holds data")
		}
		refs, err := device.New().Mirrors(p.Context(), p.from)
		if check.OK(p, err); !slices.Equal(refs, []blockdev.Ref{p.ref}) {
			p.Errorf("mirrors %v", refs)
		}
		p.mirror() // it stays
		p.copied()
		p.refuses()
		check.OK(p, errors.Join(p.stack().Unmirror(p.Context()), p.stack().Unmirror(p.Context())))
		if _, is, err := p.stack().Mirrored(p.Context()); is || err != nil {
			p.Errorf("mirrored after: %v, %v", is, err)
		}
		p.write(d.Path, 3*pooltest.MiB, pattern(5))
		if bytes.Equal(p.from.at(p.T, 0, at+4*pooltest.MiB), p.to.at(p.T, 0, at+4*pooltest.MiB)) {
			p.Error("the new leg has what was written after the mirror")
		}
		p.mirror(p.all())
		check.OK(p, errors.Join(d.Close(), p.stack().Detach(p.Context())))
		for _, suffix := range []string{"", "-seat", "-crypt"} {
			name, _ := p.names()
			if d, err := dm.Find(name + suffix); err != nil || d != nil {
				p.Errorf("%+v is left: %v", d, err)
			}
		}
	})
}

// refuses makes sure of what cannot be mirrored.
func (p *pair) refuses() {
	p.Helper()
	third := newDisk(p.T, "third", p.from.size)
	err := p.stack().Mirror(p.Context(), third.device(), nil)
	pooltest.Fails(p, err, errdefs.ErrPrecondition, "mirrored to another device")
	p.from.size += pooltest.MiB
	err = p.stack().Grow(p.Context(), nil)
	p.from.size -= pooltest.MiB
	pooltest.Fails(p, err, errdefs.ErrUnavailable, "grown while it is mirrored")
	p.copied()
	p.recover()
	p.copied() // not touched
}

// seat is the name of the seat.
func (f *fixture) seat() string {
	name, _ := f.names()
	return name + "-seat"
}

// TestMirroredHeader: a key that somebody adds to the device with the header, as docs/use/encryption.md says, is in the header of both legs, also in the part that
// was copied before.
func TestMirroredHeader(t *testing.T) {
	overPair(t, 32*pooltest.MiB, func(p *pair) {
		if p.options.Encryption == nil {
			return
		}
		d := p.attach(p.options)
		p.mirror(p.all())
		p.copied()
		dir := p.TempDir()
		added := luks.Key("another one")
		check.OK(p, os.WriteFile(dir+"/old", p.options.Encryption.Key, 0o600))
		check.OK(p, os.WriteFile(dir+"/new", added, 0o600))
		drivertest.Run(p, "cryptsetup", "-q", "luksAddKey", "--pbkdf-memory", "65536", "--pbkdf-parallel", "4", "--pbkdf-force-iterations", "4", "--key-file", dir+"/old",
			drivertest.HeaderDevice(p, p.ref.Key), dir+"/new")
		check.OK(p, errors.Join(d.Close(), p.stack().Detach(p.Context())))
		for _, leg := range []*disk{p.from, p.to} {
			if opens, err := luks.Opens(p.Context(), leg.device().Path, added); !opens || err != nil {
				p.Errorf("the new key opens the %s leg: %v, %v", leg.name, opens, err)
			}
		}
	})
}

// TestMirrorRefused: what cannot be a leg is refused, and a failure leaves all as it was.
func TestMirrorRefused(t *testing.T) {
	overPair(t, 32*pooltest.MiB, func(p *pair) {
		pooltest.Fails(p, p.stack().Mirror(p.Context(), p.to.device(), nil), errdefs.ErrUnsupported, "mirrored while it is not attached")
		_, _, err := p.stack().Mirrored(p.Context())
		pooltest.Fails(p, err, errdefs.ErrUnsupported, "asked while it is not attached")
		bare := p.attach(device.Options{Keep: true, Encryption: p.options.Encryption})
		again := p.attach(p.options) // stays as it is
		pooltest.Fails(p, p.stack().Mirror(p.Context(), p.to.device(), nil), errdefs.ErrUnsupported, "mirrored without a seat")
		check.OK(p, errors.Join(again.Close(), bare.Close(), p.stack().Detach(p.Context())))

		d := p.attach(p.options)
		small := newDisk(p.T, "small", p.from.size-pooltest.MiB)
		err = p.stack().Mirror(p.Context(), small.device(), nil)
		pooltest.Fails(p, err, errdefs.ErrPrecondition, "mirrored to a smaller device")
		if errors.Is(err, device.ErrUnfit) { // the volume may just have grown
			p.Errorf("mirrored to a smaller device: %v", err)
		}
		coarse := newDisk(p.T, "coarse", p.from.size, "--sector-size=4096")
		err = p.stack().Mirror(p.Context(), coarse.device(), nil)
		pooltest.Fails(p, err, errdefs.ErrPrecondition, "mirrored to larger sectors")
		pooltest.Fails(p, err, device.ErrUnfit, "mirrored to larger sectors")
		pooltest.Fails(p, p.stack().Mirror(p.Context(), p.from.device(), nil), errdefs.ErrPrecondition, "mirrored to itself")
		pooltest.Fails(p, p.stack().Switch(p.Context(), p.moved()), errdefs.ErrPrecondition, "switched without a mirror")
		for _, bad := range []error{errdefs.ErrUnavailable, context.DeadlineExceeded} {
			err := p.stack().Mirror(p.Context(), p.to.device(), func(context.Context) ([]blockdev.Extent, error) { return nil, bad })
			if !errors.Is(err, bad) || !strings.Contains(err.Error(), p.ref.String()) {
				p.Errorf("the home does not answer: %v", err)
			}
			if _, is, err := p.stack().Mirrored(p.Context()); is || err != nil {
				p.Errorf("mirrored: %v, %v", is, err)
			}
			p.writes(d.Path)
		}
	})
}

// TestMirrorRanges: whatever ranges hold data, of volumes of whatever size, all of them are copied.
func TestMirrorRanges(t *testing.T) {
	seed := time.Now().UnixNano()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(uint64(seed), 0))
	for _, size := range []int64{4096, 12 << 10, 300 << 10 &^ 4095, 5<<20 + 4096, 64<<20 + 36864, 400 << 20} {
		drivertest.NeedRoot(t)
		drivertest.NeedMapper(t)
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			p := &pair{from: newDisk(t, "old", size), to: newDisk(t, "new", size)}
			p.fixture = &fixture{t, p.from, pooltest.Vol("a"), device.New()}
			var data []blockdev.Extent
			f, err := os.OpenFile(p.from.image, os.O_WRONLY, 0)
			check.OK(t, err)
			for at := random.Int64N(2) * 4096; at < size; at += 4096 + random.Int64N(10<<20)&^4095 {
				length := min(4096*(1+random.Int64N(300)), size-at)
				for offset := int64(0); offset < length; offset += 4096 {
					check.OK(t, pooltest.Second(f.WriteAt(pattern(int(at+offset)), at+offset)))
				}
				data = append(data, blockdev.Extent{Offset: at, Length: length})
				at += length
			}
			check.OK(t, f.Close())
			d := p.attach(device.Options{Keep: true, Seat: true})
			check.OK(t, d.Close())
			p.mirror(data...)
			p.copied()
			table, err := dm.Status(p.seat())
			if check.OK(t, err); len(table) > 2*32+1 {
				t.Errorf("%d targets", len(table))
			}
			check.OK(t, p.stack().Detach(context.Background()))
			if !bytes.Equal(p.from.at(t, 0, int(size)), p.to.at(t, 0, int(size))) {
				t.Errorf("not all was copied of %v", data)
			}
		})
	}
}

// TestThrottle: the kernel takes the number.
func TestThrottle(t *testing.T) {
	drivertest.NeedMapper(t)
	check.OK(t, dm.HasTarget("mirror"))
	for _, percent := range []int{1, 100} {
		check.OK(t, device.Throttle(percent))
		is, err := os.ReadFile("/sys/module/dm_mirror/parameters/raid1_resync_throttle")
		check.OK(t, err)
		if strings.TrimSpace(string(is)) != fmt.Sprint(percent) {
			t.Errorf("told %d, it is %s", percent, is)
		}
	}
}
