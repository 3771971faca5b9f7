package nvme_test

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/secret"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/mirror"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/nvme"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/nvmet"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// The home is in a network namespace of its own. This process is the consumer: the kernel's host connects again only in the machine's first namespace.
const (
	netns   = "ashlar-home"
	homeIP  = "10.77.0.1"
	address = homeIP + ":4420"
)

const mib = 1 << 20

// order is what a process in the home does with the target there. Each is a process of its own, like a driver that starts again.
type order struct {
	Add      []nvmet.Export `json:"-"`
	Told     []revealed     // Add, with the secrets
	Withdraw string         // before Remove
	Remove   string
	Resized  string
	List     bool          // list what is exported; with Remove, while that is under way
	At       string        // empty: the usual address
	Within   time.Duration // 0: a minute
}

// revealed is an export with its secrets, which the Export itself does not encode.
type revealed struct {
	nvmet.Export
	Secret, PSK string
}

// newSecret returns a new secret, as a home makes it.
func newSecret() secret.Text {
	key := make([]byte, 32)
	_, _ = rand.Read(key) // it never fails
	return nvmet.Secret(key)
}

func TestMain(m *testing.M) {
	if text := os.Getenv("ASHLAR_ORDER"); text != "" {
		began := time.Now()
		var o order
		err := json.Unmarshal([]byte(text), &o)
		if err == nil {
			began, err = o.obey()
		}
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println(time.Since(began))
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func (o order) obey() (began time.Time, err error) {
	if o.Within == 0 {
		o.Within = time.Minute
	}
	ctx, cancel := context.WithTimeout(context.Background(), o.Within)
	defer cancel()
	target, err := nvmet.Open(netip.MustParseAddrPort(cmp.Or(o.At, address)))
	if err != nil {
		return began, err
	}
	for _, e := range o.Told {
		e.Export.Secret, e.Export.PSK = secret.Of(e.Secret), secret.Of(e.PSK)
		o.Add = append(o.Add, e.Export)
	}
	began = time.Now()
	switch {
	case o.List && o.Remove != "":
		go func() { _ = target.Remove(ctx, o.Remove) }()
		time.Sleep(200 * time.Millisecond)
		_, err = target.Exports(ctx)
	case o.List:
		_, err = target.Exports(ctx)
	case o.Remove != "":
		if o.Withdraw != "" {
			err = target.Withdraw(ctx, o.Withdraw)
		}
		err = errors.Join(err, target.Remove(ctx, o.Remove))
	case o.Resized != "":
		err = target.Resized(ctx, o.Resized)
	default:
		err = target.Add(ctx, o.Add...)
	}
	return began, err
}

func (o order) command(t *testing.T) (*exec.Cmd, *bytes.Buffer) {
	t.Helper()
	for _, e := range o.Add {
		o.Told = append(o.Told, revealed{e, e.Secret.Reveal(), e.PSK.Reveal()})
	}
	text, err := json.Marshal(o)
	check.OK(t, err)
	cmd := exec.Command("nsenter", "--net=/run/netns/"+netns, os.Args[0])
	cmd.Env = append(os.Environ(), "ASHLAR_ORDER="+string(text))
	out := &bytes.Buffer{}
	cmd.Stdout, cmd.Stderr = out, out
	return cmd, out
}

// run has the home carry out an order, and returns how long it took.
func (o order) run(t *testing.T) time.Duration {
	t.Helper()
	cmd, out := o.command(t)
	if err := cmd.Run(); err != nil {
		t.Fatalf("the home: %v: %s", err, out)
	}
	took, err := time.ParseDuration(strings.TrimSpace(out.String()))
	check.OK(t, err)
	return took
}

// begin has the home begin to carry out an order, and returns the first line that it says.
func (o order) begin(t *testing.T) (cmd *exec.Cmd, said <-chan string) {
	t.Helper()
	cmd, _ = o.command(t)
	cmd.Stdout, cmd.Stderr = nil, nil
	out, err := cmd.StdoutPipe()
	check.OK(t, errors.Join(err, cmd.Start()))
	line := make(chan string, 1)
	go func() {
		lines := bufio.NewScanner(out)
		lines.Scan()
		line <- lines.Text()
	}()
	return cmd, line
}

// home makes the home's network. At the end of the test it checks that nothing is connected, and removes it.
func home(t *testing.T) {
	t.Helper()
	drivertest.NeedNVMe(t)
	drivertest.Run(t, "ip", "netns", "add", netns)
	drivertest.Run(t, "ip", "link", "add", "ashlar-c", "type", "veth", "peer", "name", "ashlar-h", "netns", netns)
	drivertest.Run(t, "ip", "addr", "add", "10.77.0.2/24", "dev", "ashlar-c")
	drivertest.Run(t, "ip", "link", "set", "ashlar-c", "up")
	drivertest.Run(t, "ip", "-n", netns, "addr", "add", homeIP+"/24", "dev", "ashlar-h")
	drivertest.Run(t, "ip", "-n", netns, "link", "set", "ashlar-h", "up")
	drivertest.Run(t, "ip", "-n", netns, "link", "set", "lo", "up")
	t.Cleanup(func() {
		if left, err := nvme.List("nqn."); err != nil || len(left) > 0 {
			t.Errorf("connected at the end: %+v, %v", left, err)
		}
		drivertest.Run(t, "ip", "link", "del", "ashlar-c") // it would go with the namespace, but a little later
		drivertest.Run(t, "ip", "netns", "del", netns)
		for _, path := range []string{"subsystems", "hosts", "ports"} {
			if left, err := os.ReadDir("/sys/kernel/config/nvmet/" + path); err != nil || len(left) > 0 {
				t.Errorf("%s at the end: %v, %v", path, left, err)
			}
		}
	})
	if drivertest.WithTLS() {
		drivertest.RunTLSHD(t, netns)
		stopTLSHD = drivertest.RunTLSHD(t, "")
	}
}

// stopTLSHD ends the consumer's tlshd.
var stopTLSHD func()

// link cuts the consumer off (down), or ends that (up).
func link(t *testing.T, way string) {
	t.Helper()
	drivertest.Run(t, "ip", "link", "set", "ashlar-c", way)
}

// exported exports a disk of a size, and returns how to connect to it. At the end of the test it is disconnected and not exported any more.
func exported(t *testing.T, n int, disk string) (nvmet.Export, nvme.Connection) {
	t.Helper()
	var psk secret.Text
	if drivertest.WithTLS() {
		psk = newPSK()
	}
	return exportedWith(t, n, disk, psk)
}

// exportedWith is exported with TLS by a PSK; without a PSK it is in plain text.
func exportedWith(t *testing.T, n int, disk string, psk secret.Text) (nvmet.Export, nvme.Connection) {
	t.Helper()
	e := nvmet.Export{
		NQN: fmt.Sprintf("%s%032x:1:%016x", nvmet.Prefix, n, n), Host: fmt.Sprintf("%snode:b:%016x", nvmet.Prefix, n),
		UUID: fmt.Sprintf("%08x-0000-4000-8000-0123456789ab", n), Device: disk, Secret: newSecret(), PSK: psk,
	}
	t.Cleanup(func() {
		check.OK(t, nvme.Disconnect(context.Background(), e.NQN))
		order{Remove: e.NQN}.run(t)
	})
	order{Add: []nvmet.Export{e}}.run(t)
	return e, nvme.Connection{NQN: e.NQN, Host: e.Host, Address: netip.MustParseAddrPort(address), Secret: e.Secret, PSK: e.PSK, UUID: e.UUID, Loss: -1}
}

func connect(t *testing.T, c nvme.Connection) nvme.Device {
	t.Helper()
	began := time.Now()
	device, err := nvme.Connect(t.Context(), c)
	check.OK(t, err)
	t.Logf("connected in %s", time.Since(began).Round(time.Millisecond))
	return device
}

// writers write to a device, past all caches, as fast as they can.
type writers struct {
	acknowledged []atomic.Uint64 // for each, the number of its last acknowledged write
	failed       []error         // for each, the error that ended it
	ended        atomic.Int32    // how many have ended
	all          sync.WaitGroup
	stop         atomic.Bool
}

const block = 128 << 10 // more than fits into a command, so the target has to ask for the data

// write starts writers, each with a block of its own: it has the number of the write at its beginning and its end.
func write(t *testing.T, device string, n int) *writers {
	t.Helper()
	w := &writers{acknowledged: make([]atomic.Uint64, n), failed: make([]error, n)}
	f, err := os.OpenFile(device, os.O_WRONLY|unix.O_DIRECT, 0)
	check.OK(t, err)
	for i := range n {
		w.all.Go(func() {
			defer w.ended.Add(1)
			data, err := unix.Mmap(-1, 0, block, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE) // aligned
			if err != nil {
				w.failed[i] = err
				return
			}
			for number := uint64(1); !w.stop.Load(); number++ {
				binary.LittleEndian.PutUint64(data, number)
				binary.LittleEndian.PutUint64(data[block-8:], number)
				if _, w.failed[i] = f.WriteAt(data, int64(i)*block); w.failed[i] != nil {
					return
				}
				w.acknowledged[i].Store(number)
			}
		})
	}
	go func() { w.all.Wait(); _ = f.Close() }()
	t.Cleanup(func() { w.stop.Store(true) })
	return w
}

// count returns how many writes were acknowledged.
func (w *writers) count() (n uint64) {
	for i := range w.acknowledged {
		n += w.acknowledged[i].Load()
	}
	return n
}

// until waits for some more acknowledged writes.
func (w *writers) until(t *testing.T, more uint64, within time.Duration) {
	t.Helper()
	from, deadline := w.count(), time.Now().Add(within)
	for w.count() < from+more {
		if time.Now().After(deadline) {
			t.Fatalf("%d writes in %s, want %d; they ended with %v", w.count()-from, within, more, w.failed)
		}
		time.Sleep(time.Millisecond)
	}
}

// gone has the errors of I/O to a device that is gone: ENOLINK without multipath, EOPNOTSUPP if the target answers that the namespace is gone, ENOSPC if
// the kernel knows that already and the device has no size any more.
var gone = []error{unix.EIO, unix.ENOLINK, unix.EOPNOTSUPP, unix.ENOSPC}

// ends waits until all writers have ended with an error.
func (w *writers) ends(t *testing.T, within time.Duration) {
	t.Helper()
	ended := make(chan struct{})
	go func() { w.all.Wait(); close(ended) }()
	select {
	case <-ended:
	case <-time.After(within):
		t.Fatalf("writers wait still after %s", within)
	}
	for _, err := range w.failed {
		if !slices.ContainsFunc(gone, func(kind error) bool { return errors.Is(err, kind) }) {
			t.Errorf("a writer ended with %v", err)
		}
	}
}

// on checks that a disk has all acknowledged writes. Of each writer it may have the next one as well, or a part of it: that was not acknowledged.
func (w *writers) on(t *testing.T, data []byte) {
	t.Helper()
	for i := range w.acknowledged {
		acknowledged := w.acknowledged[i].Load()
		for _, at := range []int{i * block, (i+1)*block - 8} {
			if have := binary.LittleEndian.Uint64(data[at:]); have < acknowledged || have > acknowledged+1 {
				t.Errorf("block %d has write %d, and %d was acknowledged", i, have, acknowledged)
			}
		}
	}
}

// content returns what a disk has, past the page cache.
func content(t *testing.T, disk string) []byte {
	t.Helper()
	drivertest.Run(t, "blockdev", "--flushbufs", disk)
	data, err := os.ReadFile(disk)
	check.OK(t, err)
	return data
}

func TestConnect(t *testing.T) {
	home(t)
	disk := drivertest.Disk(t, 8*mib)
	e, c := exported(t, 1, disk)

	for what, change := range map[string]func(c *nvme.Connection){
		"another host":      func(c *nvme.Connection) { c.Host = nvmet.Prefix + "node:c:0" },
		"another secret":    func(c *nvme.Connection) { c.Secret = newSecret() },
		"no secret":         func(c *nvme.Connection) { c.Secret = secret.Text{} },
		"another subsystem": func(c *nvme.Connection) { c.NQN = nvmet.Prefix + "missing" },
		"nobody there":      func(c *nvme.Connection) { c.Address = netip.MustParseAddrPort(homeIP + ":4") },
	} {
		other := c
		change(&other)
		_, err := nvme.Connect(t.Context(), other)
		if !errors.Is(err, errdefs.ErrUnavailable) || strings.Contains(err.Error(), "DHHC-1:00") {
			t.Errorf("%s: %v", what, err)
		}
		t.Logf("%s: %v", what, err)
	}
	other := c
	other.UUID = "ffffffff-0000-4000-8000-000000000000"
	if _, err := nvme.Connect(t.Context(), other); !errors.Is(err, errdefs.ErrPrecondition) {
		t.Errorf("another UUID: %v", err)
	}
	if _, err := nvme.Find(c.NQN); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("after another UUID: %v", err)
	}

	device := connect(t, c)
	if device.UUID != e.UUID || device.Size != 8*mib || !device.Live() || device.Host != c.Host {
		t.Errorf("the device is %+v", device)
	}
	var st unix.Stat_t
	if err := unix.Stat(device.Path, &st); err != nil || st.Rdev != device.Number {
		t.Errorf("%s is the device %x, %v; want %x", device.Path, st.Rdev, err, device.Number)
	}
	if again := connect(t, c); again != device {
		t.Errorf("again, it is %+v, not %+v", again, device)
	}
	if all, err := nvme.List(nvmet.Prefix); err != nil || len(all) != 1 || all[0] != device {
		t.Errorf("the list is %+v, %v", all, err)
	}
	secrets, _ := filepath.Glob("/sys/class/nvme/*/dhchap_secret")
	for _, path := range secrets {
		if _, err := os.ReadFile(path); !errors.Is(err, unix.EACCES) { // unreadable for root as well, which pods are
			t.Errorf("%s can be read: %v", path, err)
		}
	}
	if len(secrets) != 1 {
		t.Errorf("the secrets are at %q", secrets)
	}

	words := bytes.Repeat([]byte("a volume that any node can use. "), 1024)
	f, err := os.OpenFile(device.Path, os.O_RDWR, 0)
	check.OK(t, err)
	_, err = f.WriteAt(words, mib)
	check.OK(t, errors.Join(err, f.Sync(), f.Close()))
	if !bytes.Contains(content(t, disk), words) {
		t.Error("the disk has not what was written")
	}
	began := time.Now()
	check.OK(t, nvme.Disconnect(t.Context(), c.NQN))
	t.Logf("disconnected in %s", time.Since(began).Round(time.Millisecond))
	check.OK(t, nvme.Disconnect(t.Context(), c.NQN))
	if _, err := os.Stat(device.Path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("after the end %s: %v", device.Path, err)
	}
}

// TestSecretShown: a secret that can still be read, as the process that connected was killed, is hidden when the connections are listed, which a start does.
func TestSecretShown(t *testing.T) {
	home(t)
	_, c := exported(t, 1, drivertest.Disk(t, 8*mib))
	connect(t, c)
	secrets, _ := filepath.Glob("/sys/class/nvme/*/dhchap_secret")
	if len(secrets) != 1 {
		t.Fatalf("the secrets are at %q", secrets)
	}
	check.OK(t, os.Chmod(secrets[0], 0o400))
	if _, err := os.ReadFile(secrets[0]); err != nil {
		t.Fatal(err)
	}
	_, err := nvme.List(nvmet.Prefix)
	check.OK(t, err)
	if _, err := os.ReadFile(secrets[0]); !errors.Is(err, unix.EACCES) {
		t.Errorf("%s can be read: %v", secrets[0], err)
	}
}

// TestQueues: a connection has few queues, however many processors the machine has. It tells nothing of a kernel for eight or fewer, as that of hack/vm is.
func TestQueues(t *testing.T) {
	home(t)
	_, c := exported(t, 1, drivertest.Disk(t, 8*mib))
	connect(t, c)
	counts, _ := filepath.Glob("/sys/class/nvme/*/queue_count")
	if len(counts) != 1 {
		t.Fatalf("the connections are %q", counts)
	}
	count, err := os.ReadFile(counts[0])
	check.OK(t, err)
	if want := strconv.Itoa(min(runtime.NumCPU(), 8) + 1); strings.TrimSpace(string(count)) != want { // and one for commands to the controller
		t.Errorf("with %d processors the connection has %s queues; want %s", runtime.NumCPU(), bytes.TrimSpace(count), want)
	}
}

// TestOpensAtOnce: a device can be opened when Connect has returned.
func TestOpensAtOnce(t *testing.T) {
	home(t)
	_, c := exported(t, 1, drivertest.Disk(t, 8*mib))
	for range 100 {
		device, err := nvme.Connect(t.Context(), c)
		check.OK(t, err)
		f, err := os.Open(device.Path)
		check.OK(t, err)
		check.OK(t, errors.Join(f.Close(), nvme.Disconnect(t.Context(), c.NQN)))
	}
}

// TestFence: when Remove has returned, no write lands any more, whatever was in flight. The writers have errors, and all acknowledged writes are on the
// disk.
func TestFence(t *testing.T) {
	home(t)
	disk := drivertest.Disk(t, 16*mib)
	e, c := exported(t, 1, disk)
	device := connect(t, c)
	w := write(t, device.Path, 16)
	w.until(t, 500, time.Minute)
	took := order{Remove: e.NQN}.run(t)
	then := content(t, disk)
	time.Sleep(2 * time.Second)
	w.on(t, then)
	if !bytes.Equal(content(t, disk), then) {
		t.Error("something was written after the fence")
	}
	t.Logf("the fence took %s, after %d writes of %d KiB; 2 s later %d of 16 writers had errors", took.Round(time.Millisecond), w.count(), block>>10, w.ended.Load())
	if w.ended.Load() == 0 {
		t.Error("no writer has an error")
	}
	check.OK(t, nvme.Disconnect(t.Context(), c.NQN)) // before Linux 6.10 the kernel tries to connect again, and some writers wait for that
	w.ends(t, time.Minute)
	if _, err := nvme.Connect(t.Context(), c); !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("connected again after the fence: %v", err)
	}
	// The next generation has another name.
	next, c := exported(t, 2, disk)
	if device = connect(t, c); device.UUID != next.UUID {
		t.Errorf("the device of the next one is %+v", device)
	}
}

// slow is the device that hanging has made.
const slow = "ashlar-slow"

// hanging returns a device over a disk, which hang has not answer any more.
func hanging(t *testing.T, disk string) (path string) {
	t.Helper()
	var st unix.Stat_t
	check.OK(t, unix.Stat(disk, &st))
	check.OK(t, dm.Show(slow, "", st.Rdev, 16*mib, false))
	t.Cleanup(func() { _, err := dm.RemoveNow(context.Background(), slow); check.OK(t, err) })
	return found(t, slow).Path()
}

// hang has the device not answer, until resume is called or the test ends.
func hang(t *testing.T) (resume func()) {
	t.Helper()
	check.OK(t, dm.Suspend(slow))
	resume = sync.OnceFunc(func() { check.OK(t, dm.Resume(slow, dm.NoScan)) })
	t.Cleanup(resume)
	return resume
}

// TestDiskHangs: a disk does not answer while what is exported of it ends. Others are listed, made and ended meanwhile, also the last one at the address;
// even if the driver was killed meanwhile.
func TestDiskHangs(t *testing.T) {
	for _, killed := range []bool{false, true} {
		t.Run(fmt.Sprint("killed ", killed), func(t *testing.T) {
			home(t)
			e, c := exported(t, 1, hanging(t, drivertest.Disk(t, 16*mib)))
			w := write(t, connect(t, c).Path, 16)
			w.until(t, 100, time.Minute)
			resume := hang(t)
			time.Sleep(100 * time.Millisecond)
			other := e
			other.NQN, other.Host, other.UUID = nvmet.Prefix+"other", nvmet.Prefix+"node:b:other", "00000002-0000-4000-8000-0123456789ab"
			other.Device = drivertest.Disk(t, 16*mib)
			ends := order{Remove: e.NQN, Within: 3 * time.Second}
			var running []*exec.Cmd
			says := func(o order, what string, want bool) {
				t.Helper()
				cmd, said := o.begin(t)
				running = append(running, cmd) // it is there as long as the kernel is at work for it
				select {
				case line := <-said:
					if _, err := time.ParseDuration(line); (err == nil) != want {
						t.Errorf("%s, while a disk does not answer: %q", what, line)
					}
				case <-time.After(10 * time.Second):
					t.Errorf("%s, while a disk does not answer: not within 10 s", what)
				}
			}
			if killed {
				says(order{Remove: e.NQN, List: true}, "what is exported is listed", true)
			}
			says(ends, "its export ends", false)
			says(order{List: true}, "what is exported is listed again", true)
			says(order{Add: []nvmet.Export{other}}, "another disk is exported", true)
			says(order{Remove: other.NQN}, "that ends", true)
			says(order{Add: []nvmet.Export{other}}, "and is exported again", true)
			resume()
			for _, cmd := range running {
				_ = cmd.Wait()
			}
			order{Remove: other.NQN}.run(t)
			order{Remove: e.NQN}.run(t)
			check.OK(t, nvme.Disconnect(t.Context(), c.NQN))
			w.ends(t, time.Minute)
		})
	}
}

// TestFenceKilled: a process that ends an export is killed while the kernel waits for the disk. The next process that ends it waits for the disk as well.
func TestFenceKilled(t *testing.T) {
	home(t)
	disk := drivertest.Disk(t, 16*mib)
	e, c := exported(t, 1, hanging(t, disk))
	device := connect(t, c)
	w := write(t, device.Path, 16)
	w.until(t, 100, time.Minute)
	resume := hang(t) // from now on writes stay in flight, until it is resumed
	time.Sleep(100 * time.Millisecond)

	cmd, _ := order{Remove: e.NQN}.command(t)
	check.OK(t, cmd.Start())
	time.Sleep(2 * time.Second)
	check.OK(t, cmd.Process.Signal(syscall.SIGKILL))

	again, said := order{Remove: e.NQN, Within: 2 * time.Second}.command(t)
	check.OK(t, again.Start())
	ended := make(chan error, 1)
	go func() { ended <- again.Wait() }()
	select {
	case err := <-ended:
		if err == nil {
			t.Fatalf("the fence was said to be complete while writes were in flight: %s", said)
		}
	case <-time.After(4 * time.Second): // the kernel keeps it until the disk answers
	}
	resume()
	_ = cmd.Wait()
	order{Remove: e.NQN}.run(t)
	then := content(t, disk)
	w.on(t, then)
	time.Sleep(time.Second)
	if !bytes.Equal(content(t, disk), then) {
		t.Error("something was written after the fence")
	}
	check.OK(t, nvme.Disconnect(t.Context(), c.NQN))
	w.ends(t, time.Minute)
}

// TestCutOff: a consumer that is cut off in the middle of its writes is fenced off, and cannot connect again.
func TestCutOff(t *testing.T) {
	home(t)
	disk := drivertest.Disk(t, 16*mib)
	e, c := exported(t, 1, disk)
	device := connect(t, c)
	w := write(t, device.Path, 16)
	w.until(t, 200, time.Minute)
	link(t, "down")
	time.Sleep(200 * time.Millisecond)
	took := order{Remove: e.NQN}.run(t)
	t.Logf("the fence of a host that is cut off took %s", took.Round(time.Millisecond))
	if took > 20*time.Second {
		t.Error("that is too long")
	}
	then := content(t, disk)
	w.on(t, then)
	link(t, "up")
	time.Sleep(8 * time.Second) // it has tried to connect again by then
	if !bytes.Equal(content(t, disk), then) {
		t.Error("something was written after the fence")
	}
	check.OK(t, nvme.Disconnect(t.Context(), c.NQN))
	w.ends(t, time.Minute)
}

// TestDisconnectCutOff: I/O that waits for a target that is away gets errors when the consumer disconnects.
func TestDisconnectCutOff(t *testing.T) {
	home(t)
	_, c := exported(t, 1, drivertest.Disk(t, 16*mib))
	w := write(t, connect(t, c).Path, 4)
	w.until(t, 100, time.Minute)
	link(t, "down") // the kernel has not noticed yet
	began := time.Now()
	check.OK(t, nvme.Disconnect(t.Context(), c.NQN))
	took := time.Since(began)
	t.Logf("disconnected from a target that is away in %s", took.Round(time.Millisecond))
	if took > 20*time.Second {
		t.Error("that is too long")
	}
	w.ends(t, time.Minute)
	link(t, "up")
}

// TestDisconnectHangs: I/O to a target that answers, and whose disk hangs, gets errors when the consumer disconnects.
func TestDisconnectHangs(t *testing.T) {
	home(t)
	_, c := exported(t, 1, hanging(t, drivertest.Disk(t, 16*mib)))
	w := write(t, connect(t, c).Path, 4)
	w.until(t, 100, time.Minute)
	resume := hang(t)
	time.Sleep(time.Second)
	began := time.Now()
	check.OK(t, nvme.Disconnect(t.Context(), c.NQN))
	took := time.Since(began)
	t.Logf("disconnected from a disk that hangs in %s", took.Round(time.Millisecond))
	if took > 45*time.Second { // the kernel waits for 30 s for each request (nvme_core.io_timeout)
		t.Error("that is too long")
	}
	w.ends(t, time.Minute)
	resume()
}

// TestDisconnectUnopened: the target goes away before the kernel has looked for partitions on its device, so that this cannot be opened. Connect returns when
// its context ends, and Disconnect ends the connection.
func TestDisconnectUnopened(t *testing.T) {
	home(t)
	_, c := exported(t, 1, hanging(t, drivertest.Disk(t, 16*mib)))
	resume := hang(t)
	short, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	if _, err := nvme.Connect(short, c); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("connected to a disk that does not answer: %v", err)
	}
	link(t, "down")
	defer link(t, "up")
	for end := time.Now().Add(time.Minute); ; time.Sleep(100 * time.Millisecond) {
		if d, err := nvme.Find(c.NQN); err == nil && !d.Live() {
			break
		}
		if time.Now().After(end) {
			t.Fatal("the kernel does not notice that the target is away")
		}
	}
	within, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	check.OK(t, nvme.Disconnect(within, c.NQN))
	resume()
}

// TestAway: I/O waits for a target that is away, also for longer than the kernel keeps a connection, and goes on when the target is back.
func TestAway(t *testing.T) {
	home(t)
	disk := drivertest.Disk(t, 16*mib)
	e, c := exported(t, 1, disk)
	device := connect(t, c)
	w := write(t, device.Path, 4)
	w.until(t, 100, time.Minute)
	link(t, "down")
	time.Sleep(15 * time.Second)
	before := w.count()
	time.Sleep(2 * time.Second)
	now, err := nvme.Find(c.NQN)
	if err != nil || now.Live() || now.Path != device.Path || w.count() != before {
		t.Errorf("with the link down: %+v, %v; %d writes", now, err, w.count()-before)
	}
	// The home starts again: its kernel knows nothing any more, and its driver exports from its record.
	order{Remove: e.NQN}.run(t)
	order{Add: []nvmet.Export{e}}.run(t)
	link(t, "up")
	began := time.Now()
	w.until(t, 100, time.Minute)
	t.Logf("it went on %s after the target was back", time.Since(began).Round(time.Millisecond))
	if now, err := nvme.Find(c.NQN); err != nil || now != device {
		t.Errorf("afterwards: %+v, %v; it was %+v", now, err, device)
	}
	// The drivers of both start again.
	order{Add: []nvmet.Export{e}}.run(t)
	if again := connect(t, c); again != device {
		t.Errorf("again, it is %+v, not %+v", again, device)
	}
	w.until(t, 100, time.Minute)
	w.stop.Store(true)
	w.all.Wait()
	w.on(t, content(t, disk))
	if err := errors.Join(w.failed...); err != nil {
		t.Errorf("writers failed: %v", err)
	}
}

// TestReadFrom: which of two devices of another node a mirror is read from is found by the kernel's counts, also where those of the device itself stay at 0
// (with multipath, before Linux 6.2), and where an administrator has switched them off.
func TestReadFrom(t *testing.T) {
	home(t)
	const name = "ashlar-test-read-from"
	var legs []dm.Leg
	for n := range 2 {
		_, c := exported(t, n+1, drivertest.Disk(t, 16*mib))
		var st unix.Stat_t
		check.OK(t, unix.Stat(connect(t, c).Path, &st))
		legs = append(legs, dm.Leg{Device: st.Rdev})
	}
	t.Cleanup(func() { _, err := dm.Remove(name); check.OK(t, err) })
	check.OK(t, dm.Make(name, name, []dm.Line{{Length: 16 * mib, Kind: "mirror",
		Text: fmt.Sprintf("core 2 1024 nosync 2 %s 0 %s 0 1 handle_errors", dm.Number(legs[0].Device), dm.Number(legs[1].Device))}}))
	mirror := found(t, name)
	switches, err := filepath.Glob("/sys/block/nvme*/queue/iostats")
	check.OK(t, err)
	for _, counting := range []string{"1\n", "0\n"} {
		for _, path := range switches {
			check.OK(t, os.WriteFile(path, []byte(counting), 0))
		}
		if from, err := dm.ReadFrom(mirror, 0, legs); err != nil || from != legs[0].Device {
			t.Errorf("counting is %q: it is read from %s, not from %s: %v", counting, dm.Number(from), dm.Number(legs[0].Device), err)
		}
		for _, path := range switches {
			if now, err := os.ReadFile(path); err != nil || string(now) != counting {
				t.Errorf("%s was %q, and is %q, %v", path, counting, now, err)
			}
		}
	}
}

// TestDisconnectAtOnce: both sides end a connection at once, the home a moment after it has taken the namespace away. The kernel's farewell to a home that does
// not answer any more would take a minute.
func TestDisconnectAtOnce(t *testing.T) {
	home(t)
	for round := range 12 {
		e, c := exported(t, 1, drivertest.Disk(t, 16*mib))
		connect(t, c)
		ended := make(chan struct{})
		cmd, out := order{Remove: e.NQN}.command(t)
		go func() {
			defer close(ended)
			if err := cmd.Run(); err != nil {
				t.Errorf("the home: %v: %s", err, out)
			}
		}()
		for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
			if found, _ := filepath.Glob("/sys/class/nvme/*/nvme*n*"); len(found) == 0 {
				break
			}
		}
		time.Sleep(time.Duration(170+10*round) * time.Millisecond)
		began := time.Now()
		check.OK(t, nvme.Disconnect(t.Context(), c.NQN))
		if took := time.Since(began); took > 20*time.Second {
			t.Errorf("round %d: disconnected in %s", round, took.Round(time.Millisecond))
		}
		<-ended
	}
}

// TestEarlierNode: a node of an earlier device stayed, which devtmpfs had not made. A device of that name is used by its own number; a file that is no node
// is left alone.
func TestEarlierNode(t *testing.T) {
	home(t)
	e, c := exported(t, 1, drivertest.Disk(t, 16*mib))
	path := connect(t, c).Path
	check.OK(t, nvme.Disconnect(t.Context(), c.NQN))
	t.Cleanup(func() { _ = os.Remove(path) })
	for what, makes := range map[string]func() error{
		"node": func() error { return unix.Mknod(path, unix.S_IFBLK|0o660, int(unix.Mkdev(259, 1<<19))) },
		"file": func() error { return os.WriteFile(path, nil, 0o600) },
	} {
		check.OK(t, makes())
		device, err := nvme.Connect(t.Context(), c)
		var st unix.Stat_t
		check.OK(t, unix.Stat(path, &st))
		switch {
		case what == "file" && (!errors.Is(err, errdefs.ErrUnavailable) || st.Mode&unix.S_IFMT != unix.S_IFREG):
			t.Errorf("beside a file: %v; its mode is %o", err, st.Mode)
		case what == "node" && (err != nil || device.Path != path || st.Rdev != device.Number):
			t.Errorf("%v; the device %+v has the node %s of %s", err, device, path, dm.Number(st.Rdev))
		}
		check.OK(t, nvme.Disconnect(t.Context(), e.NQN))
		check.OK(t, os.RemoveAll(path))
	}
}

// TestHoldWaits: what waits for an answer of a home is waited for before a mirror is suspended, not while the kernel suspends it, also where that does not
// count the requests of the device itself (with multipath, before Linux 6.2).
func TestHoldWaits(t *testing.T) {
	home(t)
	const name, below = "ashlar-test-hold", "ashlar-test-hold-disk"
	var disk, other, leg unix.Stat_t
	check.OK(t, errors.Join(unix.Stat(drivertest.Disk(t, 16*mib), &disk), unix.Stat(drivertest.Disk(t, 16*mib), &other)))
	check.OK(t, dm.Make(below, below, []dm.Line{{Length: 16 * mib, Kind: "linear", Text: dm.Number(disk.Rdev) + " 0"}}))
	t.Cleanup(func() { _, err := dm.Remove(below); check.OK(t, err) })
	file, err := dm.Open(found(t, below), os.O_RDONLY) // it makes the node
	check.OK(t, err)
	check.OK(t, file.Close())
	_, c := exported(t, 1, file.Name())
	check.OK(t, unix.Stat(connect(t, c).Path, &leg))
	check.OK(t, dm.Make(name, name, []dm.Line{{Length: 16 * mib, Kind: "mirror", Text: fmt.Sprintf("core 2 1024 nosync 2 %s 0 %s 0 1 handle_errors", dm.Number(leg.Rdev), dm.Number(other.Rdev))}}))
	t.Cleanup(func() { _, err := dm.Remove(name); check.OK(t, err) })
	mirror, err := dm.Open(found(t, name), os.O_WRONLY|unix.O_SYNC)
	check.OK(t, err)

	check.OK(t, dm.Suspend(below))
	written, suspended := make(chan error, 1), make(chan error, 1)
	go func() { _, err := mirror.WriteAt(make([]byte, 4096), 0); written <- errors.Join(err, mirror.Close()) }()
	time.Sleep(500 * time.Millisecond) // it is under way
	go func() { suspended <- dm.Hold(name) }()
	time.Sleep(500 * time.Millisecond)
	calls, err := filepath.Glob("/proc/self/task/*/syscall")
	check.OK(t, err)
	for _, path := range calls {
		if text, _ := os.ReadFile(path); strings.Contains(string(text), " 0xc138fd06 ") { // DM_DEV_SUSPEND
			t.Errorf("the kernel is asked to suspend it while a write is under way: %s", text)
		}
	}
	check.OK(t, dm.Resume(below, 0))
	check.OK(t, <-suspended)
	check.OK(t, dm.Resume(name, 0))
	check.OK(t, <-written)
}

// found returns a device of the device mapper by its name.
func found(t *testing.T, name string) *dm.Device {
	t.Helper()
	d, err := dm.Find(name)
	check.OK(t, err)
	return d
}

// TestMoves: a home starts its driver with another address. Users of what it exports do not notice, also when they have to connect again.
func TestMoves(t *testing.T) {
	home(t)
	e, c := exported(t, 1, drivertest.Disk(t, 16*mib))
	device := connect(t, c)
	w := write(t, device.Path, 4)
	w.until(t, 100, time.Minute)
	order{Add: []nvmet.Export{e}, At: homeIP + ":4421"}.run(t)
	w.until(t, 100, time.Minute)
	if now, err := nvme.Find(c.NQN); err != nil || now != device {
		t.Errorf("with the home at another address too: %+v, %v; it was %+v", now, err, device)
	}
	resets, err := filepath.Glob("/sys/class/nvme/*/reset_controller")
	if check.OK(t, err); len(resets) != 1 {
		t.Fatalf("the controllers are %v", resets)
	}
	check.OK(t, os.WriteFile(resets[0], []byte("1"), 0)) // the kernel connects again
	w.until(t, 100, time.Minute)
	w.stop.Store(true)
	w.all.Wait()
	if err := errors.Join(w.failed...); err != nil {
		t.Errorf("writers failed: %v", err)
	}
}

// TestLoss: I/O waits for a target that is away for as long as Connection.Loss says, and then fails. The device works again when the target is back.
func TestLoss(t *testing.T) {
	home(t)
	_, c := exported(t, 1, drivertest.Disk(t, 16*mib))
	c.Loss = 2 * time.Second
	device := connect(t, c)
	w := write(t, device.Path, 4)
	w.until(t, 100, time.Minute)
	link(t, "down")
	began := time.Now()
	w.ends(t, 40*time.Second)
	t.Logf("errors after %s, of a target that may be away for %s", time.Since(began).Round(time.Millisecond), c.Loss)
	if _, err := nvme.Connect(t.Context(), c); !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("connected to a target that is away: %v", err)
	}
	link(t, "up")
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		if now, err := nvme.Find(c.NQN); err == nil && now == device {
			break
		} else if time.Now().After(deadline) {
			t.Fatalf("30 s after the target was back: %+v, %v", now, err)
		}
	}
	write(t, device.Path, 4).until(t, 100, time.Minute)
}

// TestNobodyAnswers: the attempt to connect to a machine that is away ends with its context.
func TestNobodyAnswers(t *testing.T) {
	home(t)
	_, c := exported(t, 1, drivertest.Disk(t, mib))
	link(t, "down")
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	began := time.Now()
	_, err := nvme.Connect(ctx, c)
	if took := time.Since(began); err == nil || took > 30*time.Second {
		t.Errorf("it ended after %s: %v", took, err)
	}
	link(t, "up")
	connect(t, c)
}

// TestNameTaken: the kernel gives the name of a controller that has ended to the next one. Each is taken for what it is.
func TestNameTaken(t *testing.T) {
	home(t)
	names := func() string {
		found, err := filepath.Glob("/sys/class/nvme/*")
		check.OK(t, err)
		return strings.Join(found, " ")
	}
	_, first := exported(t, 1, drivertest.Disk(t, 4*mib))
	_, second := exported(t, 2, drivertest.Disk(t, 4*mib))
	connect(t, first)
	name := names()
	for range 3 {
		check.OK(t, nvme.Disconnect(t.Context(), first.NQN))
		connect(t, second)
		if now := names(); now != name {
			t.Fatalf("it has the name %s, not %s", now, name)
		}
		if _, err := nvme.Find(first.NQN); !errors.Is(err, errdefs.ErrNotFound) {
			t.Errorf("the first one: %v", err)
		}
		if d, err := nvme.Find(second.NQN); err != nil || d.UUID != second.UUID {
			t.Errorf("the second one: %+v, %v", d, err)
		}
		first, second = second, first
	}
}

func TestResized(t *testing.T) {
	home(t)
	disk := drivertest.Disk(t, 8*mib)
	e, c := exported(t, 1, disk)
	device := connect(t, c)
	image, err := os.ReadFile("/sys/block/" + filepath.Base(disk) + "/loop/backing_file")
	check.OK(t, err)
	check.OK(t, os.Truncate(strings.TrimSpace(string(image)), 16*mib))
	drivertest.Run(t, "losetup", "-c", disk)
	order{Resized: e.NQN}.run(t)
	began := time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	check.OK(t, nvme.Resized(ctx, c.NQN, 16*mib))
	t.Logf("the growth was seen after %s", time.Since(began).Round(time.Millisecond))
	f, err := os.OpenFile(device.Path, os.O_WRONLY, 0)
	check.OK(t, err)
	_, err = f.WriteAt([]byte("at the end"), 15*mib)
	check.OK(t, errors.Join(err, f.Sync(), f.Close()))
	if !bytes.Contains(content(t, disk)[8*mib:], []byte("at the end")) {
		t.Error("the disk has not what was written where it has grown")
	}
	short, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := nvme.Resized(short, c.NQN, 17*mib); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a size that it does not have: %v", err)
	}
}

func TestMany(t *testing.T) {
	home(t)
	const n = 20
	var exports []nvmet.Export
	var connections []nvme.Connection
	for i := range n {
		e, c := exported(t, i+1, drivertest.Disk(t, 4*mib))
		exports, connections = append(exports, e), append(connections, c)
	}
	for _, e := range exports {
		order{Remove: e.NQN}.run(t)
	}
	t.Logf("%d exports together took %s", n, order{Add: exports}.run(t).Round(time.Millisecond))
	began := time.Now()
	var all sync.WaitGroup
	devices := make([]nvme.Device, n)
	failures := make([]error, n)
	for i := range n {
		all.Go(func() { devices[i], failures[i] = nvme.Connect(t.Context(), connections[i]) })
	}
	all.Wait()
	check.OK(t, errors.Join(failures...))
	t.Logf("%d connections at once took %s", n, time.Since(began).Round(time.Millisecond))
	for i, device := range devices {
		check.OK(t, os.WriteFile(device.Path, []byte(exports[i].UUID), 0))
		drivertest.Run(t, "blockdev", "--flushbufs", device.Path)
	}
	for _, e := range exports {
		if !bytes.HasPrefix(content(t, e.Device), []byte(e.UUID)) {
			t.Errorf("%s has not what was written to it", e.Device)
		}
	}
	// One that ends is no other's matter.
	w := write(t, devices[1].Path, 4)
	w.until(t, 50, time.Minute)
	order{Remove: exports[0].NQN}.run(t)
	w.until(t, 50, time.Minute)
	began = time.Now()
	w.stop.Store(true)
	w.all.Wait()
	for i := range n {
		all.Go(func() { failures[i] = nvme.Disconnect(t.Context(), connections[i].NQN) })
	}
	all.Wait()
	check.OK(t, errors.Join(failures...))
	t.Logf("disconnecting all took %s", time.Since(began).Round(time.Millisecond))
}

func TestRefused(t *testing.T) {
	c := nvme.Connection{NQN: nvmet.Prefix + "a", Host: nvmet.Prefix + "b", Address: netip.MustParseAddrPort(address), Secret: newSecret()}
	for what, change := range map[string]func(c *nvme.Connection){
		"no name":       func(c *nvme.Connection) { c.NQN = "" },
		"two options":   func(c *nvme.Connection) { c.NQN += ",hostnqn=x" },
		"host":          func(c *nvme.Connection) { c.Host = "b" },
		"no address":    func(c *nvme.Connection) { c.Address = netip.AddrPort{} },
		"secret":        func(c *nvme.Connection) { c.Secret = secret.Of("secret") },
		"PSK":           func(c *nvme.Connection) { c.PSK = c.Secret },
		"PSK's end":     func(c *nvme.Connection) { c.PSK = secret.Of(newPSK().Reveal() + ",nqn=x") },
		"secret's end":  func(c *nvme.Connection) { c.Secret = secret.Of(c.Secret.Reveal() + ",nqn=x") },
		"zone's option": func(c *nvme.Connection) { c.Address = netip.MustParseAddrPort("[fe80::1%a,b]:1") },
		"zone's line":   func(c *nvme.Connection) { c.Address = netip.MustParseAddrPort("[fe80::1%a\nb]:1") },
	} {
		other := c
		change(&other)
		if _, err := nvme.Connect(t.Context(), other); !errors.Is(err, errdefs.ErrInvalid) || strings.Contains(err.Error(), "DHHC-1:00") {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// TestLegEnds: the connections of a leg end, and then its export, while its mirror is written to and flushed, and the other leg is slower. Nothing is
// acknowledged that the leg lacks, also if no driver looks after the mirror, and users have errors once the mirror has ended. If the export ended first, a flush
// would fail alone while a write that the leg has is under way to the other one. dm-mirror forgets such a failure, and writes to the other leg alone from then on
// (docs/decisions/replicas.md).
func TestLegEnds(t *testing.T) {
	home(t)
	const name, below = "ashlar-test-ends", "ashlar-test-ends-slow"
	disk, slower := drivertest.Disk(t, 16*mib), numberOf(t, drivertest.Disk(t, 16*mib))
	check.OK(t, dm.Make(below, below, []dm.Line{{Length: 16 * mib, Kind: "delay", Text: fmt.Sprintf("%[1]s 0 0 %[1]s 0 300 %[1]s 0 0", dm.Number(slower))}})) // writes only
	t.Cleanup(func() { _, err := dm.RemoveNow(context.Background(), below); check.OK(t, err) })
	for round := range 4 {
		e, c := exported(t, round+1, disk)
		legs := []uint64{numberOf(t, connect(t, c).Path), found(t, below).Number}
		if round%2 == 1 {
			slices.Reverse(legs)
		}
		check.OK(t, mirror.Make(t.Context(), name, name, 16*mib, legs...))
		f, err := dm.Open(found(t, name), os.O_RDWR)
		check.OK(t, err)
		w := write(t, f.Name(), 1) // more of them in one region would hide it
		var flushes atomic.Int64
		w.all.Go(func() {
			for unix.Fdatasync(int(f.Fd())) == nil {
				flushes.Add(1)
			}
		})
		w.until(t, 3, time.Minute)
		order{Withdraw: e.NQN, Remove: e.NQN}.run(t)
		then := content(t, disk)
		time.Sleep(time.Second)
		check.OK(t, nvme.Disconnect(t.Context(), c.NQN))
		time.Sleep(time.Second)
		check.OK(t, mirror.End(t.Context(), name))
		w.ends(t, time.Minute)
		w.on(t, then)
		t.Logf("acknowledged are %d writes and %d flushes", w.count(), flushes.Load())
		check.OK(t, f.Close())
		_, err = mirror.Remove(t.Context(), name)
		check.OK(t, err)
		if !bytes.Equal(content(t, disk), then) {
			t.Error("something was written after the fence")
		}
	}
}

func numberOf(t *testing.T, device string) uint64 {
	t.Helper()
	var st unix.Stat_t
	check.OK(t, unix.Stat(device, &st))
	return st.Rdev
}
