// Package nvme is the host's side of NVMe over TCP, by /dev/nvme-fabrics and sysfs: it connects this machine to a device that another one
// exports (package nvmet). See drivers/nvme/host/fabrics.c.
//
// A connection is the kernel's: it stays when the process that made it ends, waits for a target that is away, and connects again when
// it is back. The kernel does that in the machine's first network namespace (its workers have no other), so who connects has to be in that.
//
// What only the target knows, it does not say: before Linux 6.10 a host whose subsystem is gone connects again and again, and what
// waits for it waits, until somebody calls Disconnect.
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
	keepAlive      = 2 // a target that does not answer for that long is away; what is on its way ends after up to three times that (nvme_stop_keep_alive waits for what it has asked)
	reconnectDelay = 2 // between two attempts to connect again
)

// pause is how long to wait for what the kernel does after it has answered, each time.
const pause = 10 * time.Millisecond

// patience is how long Connect waits for the device of a target that answers.
const patience = 15 * time.Second

// underWay has the connections that are made and ended, by the names of their subsystems.
var underWay unbroken.Table

// Connection says what to connect to, and how.
type Connection struct {
	NQN     string // of the subsystem
	Host    string // NQN of this host, which no other connection has
	Address netip.AddrPort
	Secret  secret.Text // "DHHC-1:...", or empty
	PSK     secret.Text // of TLS, "NVMeTLSkey-1:..."; empty: all goes in plain text
	// Encrypted has nothing be connected without a PSK; what is connected is found in any case.
	Encrypted bool
	UUID      string // of the namespace that is expected, lower case
	// Loss is how long I/O waits for a target that is away, whole seconds, before it ends with errors, counted from when the kernel has
	// noticed, which takes up to six; negative: for ever. The device stays in any case, and works again when the target is back.
	Loss time.Duration
}

// none is no secret.
var none secret.Text

// Multipath reports whether the kernel looks for other ways to a device when one ends (nvme_core.multipath). It then ends a flush that was under way as if that had
// been done (nvme_failover_req in drivers/nvme/host/multipath.c of Linux 6.1: the request of a flush has no bio that could be sent again): a sync is answered with
// success, and should the target have lost its power, what it was for is gone.
func Multipath() bool {
	text, err := os.ReadFile("/sys/module/nvme_core/parameters/multipath")
	return err == nil && strings.TrimSpace(string(text)) == "Y"
}

// Device is a connected subsystem and the device of its namespace.
type Device struct {
	NQN     string
	Host    string
	Address string // "traddr=...,trsvcid=...", as the kernel says it
	State   string // of the connection: live; connecting, resetting: the target is away; deleting
	TLS     bool   // what goes over it is encrypted; before Linux 6.12 also, though it may not be, while it is not live
	Path    string // of the block device; empty: there is no namespace (any more)
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

// Authenticates reports whether the kernel can prove to a target who it is (CONFIG_NVME_AUTH, CONFIG_NVME_HOST_AUTH since 6.7).
func Authenticates() (bool, error) {
	options, err := os.ReadFile(fabrics) // which it knows
	if err != nil {
		return false, fmt.Errorf("options of NVMe over fabrics: %w", errdefs.FromErrno(err))
	}
	return strings.Contains(string(options), "dhchap_secret="), nil
}

// TLS returns an error unless connections of this kernel can be encrypted now: errdefs.ErrUnsupported if it never can, errdefs.ErrUnavailable if nobody does the
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
)

// check: all of it becomes part of a list with commas.
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
	if !c.Address.IsValid() || strings.Contains(c.Address.String(), ",") {
		return fmt.Errorf("%w: %q is no address", errdefs.ErrInvalid, c.Address)
	}
	return nil
}

// hostID is the identifier that goes with the NQN of a host: newer kernels refuse two with one (Linux 6.6).
func hostID(host string) string {
	h := sha256.Sum256([]byte(host))
	h[6], h[8] = h[6]&0x0f|0x80, h[8]&0x3f|0x80 // version 8
	return fmt.Sprintf("%x-%x-%x-%x-%x", h[:4], h[4:6], h[6:8], h[8:10], h[10:16])
}

// options are what the kernel takes. It has a secret.
func (c Connection) options() string {
	address := c.Address.Addr().Unmap()
	options := fmt.Sprintf("transport=tcp,traddr=%s,trsvcid=%d,nqn=%s,hostnqn=%s,hostid=%s,keep_alive_tmo=%d,reconnect_delay=%d,ctrl_loss_tmo=-1",
		address, c.Address.Port(), c.NQN, c.Host, hostID(c.Host), keepAlive, reconnectDelay)
	if c.Loss >= 0 {
		options += ",fast_io_fail_tmo=" + strconv.Itoa(int(c.Loss/time.Second))
	}
	if c.Secret != none {
		options += ",dhchap_secret=" + c.Secret.Reveal()
	}
	return options
}

// Connect connects to a subsystem, or finds that it is connected, and returns its device, whose node is there. errdefs.ErrUnavailable if the
// target does not answer, or refuses; errdefs.ErrPrecondition if its namespace has another UUID than is expected: it is
// disconnected then; or if it is not connected, and would be in plain text though it is to be encrypted. The kernel itself gives up an attempt after 3 s without an answer from the machine, and after 60 s from its target;
// when ctx ends before, an attempt goes on until then, and the next call for this subsystem waits for it.
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
	err := underWay.Do(ctx, c.NQN, func() error {
		device, err := connect(ctx, c)
		connected <- device
		return err
	})
	if err != nil {
		return Device{}, fmt.Errorf("connect to %s at %s: %w", c.NQN, c.Address, err)
	}
	return <-connected, nil
}

func connect(ctx context.Context, c Connection) (Device, error) {
	have, err := Find(c.NQN)
	switch {
	case errors.Is(err, errdefs.ErrNotFound):
		if err := c.begin(); err != nil {
			return Device{}, err
		}
	case err != nil:
		return Device{}, err
	case c.plain(have):
		return Device{}, errPlain
	}
	hide(c.NQN)
	device, err := appears(ctx, c)
	if errors.Is(err, errdefs.ErrPrecondition) {
		return Device{}, errors.Join(err, disconnect(ctx, c.NQN))
	}
	return device, err
}

// errPlain is of what is connected in plain text, and is to be connected with TLS.
var errPlain = fmt.Errorf("%w: it is connected without TLS since before that was demanded; end the pods that use it on this node", errdefs.ErrInUse)

// errUnencrypted is of what its home gives in plain text to a node that connects to nothing such.
var errUnencrypted = fmt.Errorf("%w: its home gives it without TLS, and this node uses nothing without (--remote-tls); nothing was connected: start the driver of its home with --remote-tls too",
	errdefs.ErrPrecondition)

// plain reports whether what is connected lacks the TLS that it is to have.
func (c Connection) plain(have Device) bool { return c.PSK != none && !have.TLS }

// begin has the kernel connect. What it is told has secrets.
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

// refused is the error of an attempt to connect.
func refused(err error) error {
	switch {
	case errors.Is(err, unix.ECONNREFUSED), errors.Is(err, unix.ETIMEDOUT), errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EAGAIN):
		return fmt.Errorf("%w: nobody answers: %w", errdefs.ErrUnavailable, err)
	case errors.Is(err, unix.EINVAL):
		return fmt.Errorf("%w: %w: the kernel does not take one of the options, which its log says, or has no NVMe over TCP; then load its module on this node: modprobe nvme-tcp", errdefs.ErrUnsupported, err)
	}
	return fmt.Errorf("%w: the target refuses: %w; there is no such subsystem any more, or it is for another host, or the secret is another; the kernel's log says which", errdefs.ErrUnavailable, err)
}

// appears waits for the device of a connection, and makes sure that it is the one that is expected.
func appears(ctx context.Context, c Connection) (Device, error) {
	for deadline := time.Now().Add(patience); ; {
		device, err := Find(c.NQN)
		switch {
		case errors.Is(err, errdefs.ErrNotFound):
			return Device{}, fmt.Errorf("%w: the connection has ended", errdefs.ErrUnavailable)
		case err != nil:
			return Device{}, err
		case device.Path != "" && c.UUID != device.UUID:
			return Device{}, fmt.Errorf("%w: its namespace has the UUID %s, not %s: it is another volume", errdefs.ErrPrecondition, device.UUID, c.UUID)
		case device.Live() && c.plain(device): // which was not known before it was live
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

// opens makes sure that a device can be opened: the kernel tells of it, and makes its node, a moment before (ENXIO; device_add_disk).
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

// node makes the node of a device where /dev is not kept by devtmpfs, and where it is another device's.
func node(d Device) error {
	var st unix.Stat_t
	err := unix.Stat(d.Path, &st)
	if err == nil && st.Mode&unix.S_IFMT == unix.S_IFBLK && st.Rdev == d.Number {
		return nil
	}
	if err == nil {
		return fmt.Errorf("%w: %s is not the device %d:%d", errdefs.ErrUnavailable, d.Path, unix.Major(d.Number), unix.Minor(d.Number))
	}
	if err := unix.Mknod(d.Path, unix.S_IFBLK|0o660, int(d.Number)); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("mknod %s: %w", d.Path, errdefs.FromErrno(err))
	}
	return nil
}

// Disconnect ends the connection to a subsystem: all I/O that waits for it ends with errors, and its device is gone. If there is
// none, it does nothing.
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

// Resized waits until the device of a subsystem has at least a size in bytes, which its target has already.
func Resized(ctx context.Context, nqn string, size int64) error {
	for asked := (time.Time{}); ; {
		device, err := Find(nqn)
		if err == nil && device.Size >= size {
			return nil
		}
		if err == nil && time.Since(asked) > time.Second { // what the target told may have been lost
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
