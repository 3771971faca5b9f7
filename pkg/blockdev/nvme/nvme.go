// Package nvme is the host's side of NVMe over TCP, by /dev/nvme-fabrics and sysfs: it connects this machine to a device that another one exports (package
// nvmet). See drivers/nvme/host/fabrics.c.
//
// A connection is the kernel's: it stays when the process that made it ends. While the target is away the kernel tries to connect again, and I/O waits
// (Connection.Loss). The kernel connects in the machine's first network namespace, as its workers have no other: so callers have to be in that one.
//
// Before Linux 6.10 a host does not notice that its subsystem is gone: it connects again and again, and I/O waits, until somebody calls Disconnect.
package nvme

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/secret"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/psk"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/unbroken"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

const fabrics = "/dev/nvme-fabrics"

// How the kernel keeps a connection, in seconds.
const (
	// A target that does not answer for that long is away. What was under way ends after up to three times that: nvme_stop_keep_alive waits for its own
	// request.
	keepAlive      = 2
	reconnectDelay = 2 // the time between two attempts to connect again
)

// queues is how many queues a connection has for reads and writes, unless the machine has fewer processors. Without a number the kernel takes one for each
// processor: each is a TCP connection with an authentication, and a handshake of TLS, of its own, one after the other, also whenever the target is back; and
// 128 requests here and 256 commands there, with their memory (docs/decisions/any-node.md).
const queues = 8

// pause is the time between two looks at what the kernel finishes only after it has answered.
const pause = 10 * time.Millisecond

// nodeTime is how long devtmpfs has to make a node; the kernel shows a device in sysfs a moment before (device_add).
const nodeTime = 100 * time.Millisecond

// patience is how long Connect waits for the device of a target that answers.
const patience = 15 * time.Second

// The connections that are being made or ended, and those whose device is waited for, by NQN of the subsystem. They are apart: while the target is away
// its device may not be opened, perhaps for ever, and to disconnect ends that.
var underWay, appearing unbroken.Table

// Connection says what to connect to, and how.
type Connection struct {
	NQN     string // of the subsystem
	Host    string // NQN of this host; no other connection has the same
	Address netip.AddrPort
	Secret  secret.Text // "DHHC-1:...", or empty
	PSK     secret.Text // of TLS, "NVMeTLSkey-1:..."; empty: all goes in plain text
	// Encrypted makes a new connection without a PSK fail; one that is there already is found.
	Encrypted bool
	UUID      string // of the expected namespace, in lower case
	// Loss is how long I/O waits for a target that is away before it fails, in whole seconds; negative: for ever. The time begins when the kernel notices,
	// which takes up to six seconds. The device stays in any case, and works again when the target is back.
	Loss time.Duration
}

// none is no secret.
var none secret.Text

// Multipath reports whether the kernel looks for other paths to a device when one fails (nvme_core.multipath). Such a kernel ends a flush that was under
// way as if it had been done (nvme_failover_req in drivers/nvme/host/multipath.c of Linux 6.1: the request of a flush has no bio that could be sent
// again). A sync then succeeds, and what it was for is lost if the target loses its power.
func Multipath() bool {
	text, err := os.ReadFile("/sys/module/nvme_core/parameters/multipath")
	return err == nil && strings.TrimSpace(string(text)) == "Y"
}

// Device is a connected subsystem, with the block device of its namespace.
type Device struct {
	NQN     string
	Host    string
	Address string // "traddr=...,trsvcid=...", as the kernel says it
	State   string // of the connection: live; connecting, resetting: the target is away; deleting
	TLS     bool   // the connection is encrypted; before Linux 6.12 true as well while it is not live
	Path    string // of the block device; empty: there is no namespace, or none any more
	Number  uint64 // of the block device
	UUID    string
	Size    int64 // bytes
}

// Live reports whether the target answers.
func (d Device) Live() bool { return d.State == live }

const live = "live"

// Available returns an error unless this kernel can connect: errdefs.ErrUnsupported, with what to load.
func Available() error {
	if _, err := os.Stat(fabrics); err != nil {
		return fmt.Errorf("%w: the kernel has no NVMe over TCP; load its module on this node: modprobe nvme-tcp", errdefs.ErrUnsupported)
	}
	return nil
}

// Authenticates reports whether the kernel can prove to a target which host it is (CONFIG_NVME_AUTH, CONFIG_NVME_HOST_AUTH since 6.7).
func Authenticates() (bool, error) {
	options, err := os.ReadFile(fabrics) // the options that the kernel knows
	if err != nil {
		return false, fmt.Errorf("options of NVMe over fabrics: %w", errdefs.FromErrno(err))
	}
	return strings.Contains(string(options), "dhchap_secret="), nil
}

// TLS returns an error unless this kernel can encrypt connections now: errdefs.ErrUnsupported if it never can, errdefs.ErrUnavailable if no tlshd does the
// handshakes.
func TLS() error {
	options, err := os.ReadFile(fabrics)
	if err != nil {
		return fmt.Errorf("options of NVMe over fabrics: %w", errdefs.FromErrno(err))
	}
	if !strings.Contains(string(options), "tls_key=") {
		return fmt.Errorf("%w: this kernel encrypts no connections over NVMe/TCP (CONFIG_NVME_TCP_TLS, Linux 6.7)", errdefs.ErrUnsupported)
	}
	return psk.Handshakes()
}

var (
	names   = regexp.MustCompile(`^nqn\.[a-z0-9][a-z0-9:.-]{0,218}$`)
	secrets = regexp.MustCompile(`^(DHHC-1:0[0-3]:[A-Za-z0-9+/]+={0,2}:)?$`)
	zones   = regexp.MustCompile(`^[A-Za-z0-9._-]{0,15}$`) // names of interfaces
)

// check returns errdefs.ErrInvalid unless all that goes into the kernel's options, a list with commas or line breaks, has the form that it should have.
func (c Connection) check() error {
	if !names.MatchString(c.NQN) || !names.MatchString(c.Host) {
		return fmt.Errorf("%w: %q or %q is no NQN in lower case", errdefs.ErrInvalid, c.NQN, c.Host)
	}
	if !secrets.MatchString(c.Secret.Reveal()) {
		return fmt.Errorf("%w: the secret is not of the form DHHC-1:HASH:KEY: as NVMe has it", errdefs.ErrInvalid)
	}
	if c.PSK != none {
		if err := psk.Check(c.PSK); err != nil {
			return err
		}
	}
	if !c.Address.IsValid() || !zones.MatchString(c.Address.Addr().Zone()) {
		return fmt.Errorf("%w: %q is no address", errdefs.ErrInvalid, c.Address)
	}
	return nil
}

// hostID returns the host ID that goes with the NQN of a host. Linux 6.6 and later refuse two NQNs with the same one.
func hostID(host string) string {
	h := sha256.Sum256([]byte(host))
	h[6], h[8] = h[6]&0x0f|0x80, h[8]&0x3f|0x80 // version 8
	return fmt.Sprintf("%x-%x-%x-%x-%x", h[:4], h[4:6], h[6:8], h[8:10], h[10:16])
}

// options returns the options of the connection as the kernel takes them, without those of TLS. They have the secret.
func (c Connection) options() string {
	address := c.Address.Addr().Unmap()
	options := fmt.Sprintf("transport=tcp,traddr=%s,trsvcid=%d,nqn=%s,hostnqn=%s,hostid=%s,keep_alive_tmo=%d,reconnect_delay=%d,ctrl_loss_tmo=-1,nr_io_queues=%d",
		address, c.Address.Port(), c.NQN, c.Host, hostID(c.Host), keepAlive, reconnectDelay, queues)
	if c.Loss >= 0 {
		options += ",fast_io_fail_tmo=" + strconv.Itoa(int(c.Loss/time.Second))
	}
	if c.Secret != none {
		options += ",dhchap_secret=" + c.Secret.Reveal()
	}
	return options
}

// Connect connects to a subsystem, or finds that it is connected, and returns its device, whose node is there. The kernel gives up an attempt after 3 s
// without an answer from the machine, and after 60 s without one from the target. If ctx ends before that, the attempt goes on, and the next call for this
// subsystem waits for it. A device of a target that goes away meanwhile is waited for until that is back, or Disconnect is called.
//
// errdefs.ErrUnavailable if the target does not answer, or refuses. errdefs.ErrPrecondition if its namespace has another UUID than is expected, and then
// it is disconnected; or if nothing is connected and Encrypted lacks a PSK. errdefs.ErrInUse if it is connected without TLS and there is a PSK.
func Connect(ctx context.Context, c Connection) (Device, error) {
	if err := c.check(); err != nil {
		return Device{}, err
	}
	if err := Available(); err != nil {
		return Device{}, err
	}
	if c.Secret != none {
		if can, err := Authenticates(); err != nil || !can {
			return Device{}, errors.Join(err, fmt.Errorf("%w: this kernel cannot prove to a target who it is (CONFIG_NVME_HOST_AUTH)", errdefs.ErrUnsupported))
		}
	}
	connected := make(chan Device, 1)
	err := underWay.Do(ctx, c.NQN, c.connect)
	if err == nil {
		err = appearing.Do(ctx, c.NQN, func() error {
			device, err := appears(ctx, c)
			if connected <- device; errors.Is(err, errAnother) {
				err = errors.Join(err, Disconnect(ctx, c.NQN))
			}
			return err
		})
	}
	if err != nil {
		return Device{}, fmt.Errorf("connect to %s at %s: %w", c.NQN, c.Address, err)
	}
	return <-connected, nil
}

// connect has the kernel connect, unless it is connected.
func (c Connection) connect() error {
	have, err := Find(c.NQN)
	switch {
	case errors.Is(err, errdefs.ErrNotFound):
		err = c.begin()
	case err == nil && c.plain(have):
		err = errPlain
	}
	if err == nil {
		hide(c.NQN)
	}
	return err
}

// errAnother is the error for a connection to another volume than the expected one.
var errAnother = fmt.Errorf("%w: it is another volume", errdefs.ErrPrecondition)

// errPlain is the error for a connection that is there without TLS, and should have it.
var errPlain = fmt.Errorf("%w: it is connected without TLS since before that was demanded; end the pods that use it on this node", errdefs.ErrInUse)

// errUnencrypted is the error for a connection that would have no TLS, on a node that makes none without.
var errUnencrypted = fmt.Errorf("%w: its home gives it without TLS, and this node uses nothing without (--remote-tls); nothing was connected: start the driver of its home with --remote-tls too",
	errdefs.ErrPrecondition)

// plain reports whether a connection that is there lacks the TLS that it should have.
func (c Connection) plain(have Device) bool { return c.PSK != none && !have.TLS }

// begin has the kernel connect. The kernel is given secrets, which are in no error.
func (c Connection) begin() error {
	begin := func(more string) error {
		made := hiding(c.NQN)
		defer made()
		if err := write(fabrics, c.options()+more); err != nil && !errors.Is(err, unix.EALREADY) {
			return refused(err)
		}
		return nil
	}
	switch {
	case c.PSK == none && c.Encrypted:
		return errUnencrypted
	case c.PSK == none:
		return begin("")
	}
	if err := TLS(); err != nil {
		return fmt.Errorf("its home demands TLS: %w", err)
	}
	err := psk.Use(c.PSK, c.Host, c.NQN, func(key int) error { return begin(fmt.Sprintf(",tls,tls_key=%d", key)) })
	if errors.Is(err, errdefs.ErrUnavailable) {
		return fmt.Errorf("%w; or the handshake of TLS has failed: see what tlshd says on both nodes (journalctl -u tlshd), and restart it where it was started before nvme-tcp was loaded", err)
	}
	return err
}

// refused returns the error of a failed attempt to connect, with what to do.
func refused(err error) error {
	switch {
	case errors.Is(err, unix.ECONNREFUSED), errors.Is(err, unix.ETIMEDOUT), errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EAGAIN):
		return fmt.Errorf("%w: nobody answers: %w", errdefs.ErrUnavailable, err)
	case errors.Is(err, unix.EINVAL):
		return fmt.Errorf("%w: %w: the kernel does not take one of the options, which its log says, or has no NVMe over TCP; then load its module on this node: modprobe nvme-tcp", errdefs.ErrUnsupported, err)
	}
	return fmt.Errorf("%w: the target refuses: %w; there is no such subsystem any more, or it is for another host, or the secret is another; the kernel's log says which", errdefs.ErrUnavailable, err)
}

// appears waits until the device of a connection is live and can be opened, and checks that it is the expected one: errAnother if it is another volume's.
// Other errors are those of Connect.
func appears(ctx context.Context, c Connection) (Device, error) {
	for deadline := time.Now().Add(patience); ; {
		device, err := Find(c.NQN)
		switch {
		case errors.Is(err, errdefs.ErrNotFound):
			return Device{}, fmt.Errorf("%w: the connection has ended", errdefs.ErrUnavailable)
		case err != nil:
			return Device{}, err
		case device.Path != "" && c.UUID != device.UUID:
			return Device{}, fmt.Errorf("%w: its namespace has the UUID %s, not %s", errAnother, device.UUID, c.UUID)
		case device.Live() && c.plain(device): // it is known only once the connection is live
			return Device{}, errPlain
		case device.Path != "" && device.Live():
			err := node(device)
			if err == nil {
				err = opens(device.Path)
			}
			if err == nil {
				return device, nil
			}
			if !errors.Is(err, unix.ENXIO) || time.Now().After(deadline) {
				return Device{}, err
			}
		case time.Now().After(deadline) && device.Live():
			return Device{}, fmt.Errorf("%w: it has no namespace", errdefs.ErrUnavailable)
		case time.Now().After(deadline):
			return Device{}, fmt.Errorf("%w: the connection is %s: the target is away", errdefs.ErrUnavailable, device.State)
		}
		if err := wait(ctx); err != nil {
			return Device{}, err
		}
	}
}

// opens returns an error unless a device can be opened. The kernel shows it, and makes its node, a moment before that (ENXIO; device_add_disk).
func opens(path string) error {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("open the device of the connection: %w", errdefs.FromErrno(err))
	}
	return f.Close()
}

func wait(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(pause):
		return nil
	}
}

// node makes the node of a device where no devtmpfs keeps /dev. devtmpfs gets a moment for it, as it never removes a node that it did not make. Such a node,
// of an earlier device of the name, is replaced. errdefs.ErrUnavailable if something that is no block device is there.
func node(d Device) error {
	var st unix.Stat_t
	err := unix.Stat(d.Path, &st)
	for end := time.Now().Add(nodeTime); errors.Is(err, unix.ENOENT) && time.Now().Before(end); err = unix.Stat(d.Path, &st) {
		time.Sleep(pause)
	}
	switch {
	case err == nil && st.Mode&unix.S_IFMT != unix.S_IFBLK:
		return fmt.Errorf("%w: %s is not the device %d:%d; remove or rename it", errdefs.ErrUnavailable, d.Path, unix.Major(d.Number), unix.Minor(d.Number))
	case err == nil && st.Rdev == d.Number:
		return nil
	case err == nil:
		if err := unix.Unlink(d.Path); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("remove the node %s of an earlier device: %w", d.Path, errdefs.FromErrno(err))
		}
	}
	if err := unix.Mknod(d.Path, unix.S_IFBLK|0o660, int(d.Number)); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("mknod %s: %w", d.Path, errdefs.FromErrno(err))
	}
	return nil
}

// Disconnect ends the connection to a subsystem: all I/O that waits for it fails, and when Disconnect returns the device is gone. If there is no
// connection, it does nothing.
func Disconnect(ctx context.Context, nqn string) error {
	if err := underWay.Do(ctx, nqn, func() error { return disconnect(ctx, nqn) }); err != nil {
		return fmt.Errorf("disconnect from %s: %w", nqn, err)
	}
	return nil
}

func disconnect(ctx context.Context, nqn string) error {
	for {
		controllers, err := controllersOf(nqn)
		if err != nil || len(controllers) == 0 {
			return err
		}
		for _, controller := range controllers {
			if err := controller.end(ctx); err != nil {
				return err
			}
		}
		if err := wait(ctx); err != nil {
			return err
		}
	}
}

// Resized waits until the device of a subsystem has at least size bytes, which its target has to have already. errdefs.ErrNotFound if the subsystem is not
// connected.
func Resized(ctx context.Context, nqn string, size int64) error {
	for asked := (time.Time{}); ; {
		device, err := Find(nqn)
		if err == nil && device.Size >= size {
			return nil
		}
		if err == nil && time.Since(asked) > time.Second { // the target's notice may have been lost
			asked, err = time.Now(), rescan(nqn)
		}
		if err == nil {
			err = wait(ctx)
		}
		if err != nil {
			return fmt.Errorf("wait for %s to have %d bytes: %w", nqn, size, err)
		}
	}
}
