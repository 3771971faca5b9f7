// Package nvmet is the kernel's NVMe/TCP target, by configfs: it gives a block device to one host on another machine. See
// drivers/nvme/target/configfs.c.
//
// An export is a subsystem with one namespace and one host that may connect. It is the kernel's: it stays when the process that made
// it ends, and goes with the machine. The listener is in the network namespace of the process that makes the first export of an address.
// Several processes may have targets of different addresses in one kernel. What others made of the target is left alone: ours are
// the subsystems and hosts whose names begin with Prefix, and the ports from firstPort on.
package nvmet

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/secret"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/psk"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/unbroken"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Prefix begins the names of all subsystems and hosts that this package makes.
const Prefix = "nqn.2026-11.dev.ashlar:"

// patience is how long the end of an export waits for what is in flight before it ends the connections. What is on its way to the disk
// takes less; what is on its way from a host that is cut off comes no more.
const patience = time.Second

// grace is how long a host has to see that the namespace is gone, before its connections end: it has errors then for all that it writes.
// Before Linux 6.10 a host that has not seen it waits for the subsystem to come back.
var grace = 250 * time.Millisecond

// Target is the target at one address. Calls for one export wait for each other, also of those of other processes.
type Target struct {
	address       netip.AddrPort
	authenticates bool
	underWay      unbroken.Table
}

// Export is a device that one host may use.
type Export struct {
	NQN    string      // of the subsystem
	Host   string      // NQN of the one host that may connect
	UUID   string      // of the namespace, lower case; its NGUID has the same bytes
	Device string      // path of the block device
	Secret secret.Text // as Secret makes them; empty: the host need not prove who it is
	PSK    secret.Text // as PSK makes them: all goes over TLS, and nobody connects without; empty: all goes in plain text
}

// none is no secret.
var none secret.Text

// Open returns the target at an address of this machine. errdefs.ErrUnsupported if the kernel has no such target, with what to load;
// errdefs.ErrUnavailable if nobody can listen at this address now. What a process that died left half made and half removed of
// hosts, keys and ports goes.
func Open(address netip.AddrPort) (*Target, error) {
	t := &Target{address: netip.AddrPortFrom(address.Addr().Unmap(), address.Port())}
	if err := present(); err != nil {
		return nil, err
	}
	unlock, err := lock()
	if err != nil {
		return nil, fmt.Errorf("NVMe target: %w", err)
	}
	defer unlock()
	if err := sweep(); err != nil {
		return nil, fmt.Errorf("NVMe target: %w", err)
	}
	if t.authenticates, err = authenticates(); err != nil {
		return nil, fmt.Errorf("NVMe target: %w", err)
	}
	if err := t.listens(); err != nil {
		return nil, fmt.Errorf("NVMe target at %s: %w", t.address, err)
	}
	return t, nil
}

// Available returns an error unless this kernel has the target: errdefs.ErrUnsupported, with what to load; and whether it
// authenticates, as Authenticates does.
func Available() (authenticated bool, err error) {
	if err := present(); err != nil {
		return false, err
	}
	unlock, err := lock()
	if err != nil {
		return false, err
	}
	defer unlock()
	return authenticates()
}

// TLS returns an error unless the target can encrypt what it exports now: errdefs.ErrUnsupported if this kernel never can, errdefs.ErrUnavailable if nobody does the
// handshakes.
func TLS() error {
	if err := present(); err != nil {
		return err
	}
	unlock, err := lock()
	if err != nil {
		return err
	}
	can, err := encrypts()
	unlock()
	if err != nil {
		return fmt.Errorf("NVMe target: %w", err)
	}
	if !can {
		return fmt.Errorf("%w: this kernel's NVMe target encrypts nothing (CONFIG_NVME_TARGET_TCP_TLS, Linux 6.7)", errdefs.ErrUnsupported)
	}
	return psk.Handshakes()
}

// Authenticates reports whether the kernel can ask hosts for a secret (CONFIG_NVME_TARGET_AUTH, Linux 6.0). If it cannot, an Export
// with a secret is errdefs.ErrUnsupported.
func (t *Target) Authenticates() bool { return t.authenticates }

var (
	names   = regexp.MustCompile(`^` + regexp.QuoteMeta(Prefix) + `[a-z0-9][a-z0-9:.-]{0,190}$`)
	uuids   = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)
	secrets = regexp.MustCompile(`^DHHC-1:0[0-3]:[A-Za-z0-9+/]+={0,2}:$`)
)

// checkName: names become parts of paths.
func checkName(what, name string) error {
	if !names.MatchString(name) {
		return fmt.Errorf("%w: %s %q does not begin with %s, or has other characters than a-z, 0-9, colon, dot and hyphen", errdefs.ErrInvalid, what, name, Prefix)
	}
	return nil
}

func (e Export) check() error {
	if err := errors.Join(checkName("the subsystem", e.NQN), checkName("the host", e.Host)); err != nil {
		return err
	}
	if !uuids.MatchString(e.UUID) {
		return fmt.Errorf("%w: %q is no UUID in lower case", errdefs.ErrInvalid, e.UUID)
	}
	if e.Secret != none && !secrets.MatchString(e.Secret.Reveal()) {
		return fmt.Errorf("%w: the secret is not of the form DHHC-1:HASH:KEY: as NVMe has it", errdefs.ErrInvalid)
	}
	if e.PSK != none {
		return psk.Check(e.PSK)
	}
	return nil
}

// Add exports devices, or goes on where that was cut short; again, it changes nothing. errdefs.ErrExists if a subsystem is there with
// another device or UUID. A subsystem appears at the address last of all, when all else is right: a host that is waiting to connect
// again and finds it without its namespace would take the device away from under its users. For the same reason those of a machine
// that has started belong into one call: the kernel listens from the first on, and a host that finds no subsystem of its name gives
// up (since Linux 6.10). What can be exported is, also if others cannot. With TLS and without go to one address one after the other only: what appears there, or at
// an address of before, stays as it is, which is ErrOtherwise; and as long as it does, errdefs.ErrUnavailable is for all else that was to appear the other way at that address.
func (t *Target) Add(ctx context.Context, exports ...Export) error {
	ready := map[bool][]string{} // with TLS, and without
	var failures []error
	for _, e := range exports {
		if err := t.prepare(ctx, e); err != nil {
			failures = append(failures, fmt.Errorf("export %s as %s: %w", e.Device, e.NQN, err))
		} else {
			ready[e.PSK != none] = append(ready[e.PSK != none], e.NQN)
		}
	}
	for tls, nqns := range ready {
		if err := t.publish(tls, nqns); err != nil {
			failures = append(failures, fmt.Errorf("export %s: %w", strings.Join(nqns, ", "), err))
		}
	}
	return errors.Join(failures...)
}

// prepare does all for an export but have it appear.
func (t *Target) prepare(ctx context.Context, e Export) error {
	if err := e.check(); err != nil {
		return err
	}
	if e.Secret != none && !t.authenticates {
		return fmt.Errorf("%w: this kernel's NVMe target asks no host for a secret (CONFIG_NVME_TARGET_AUTH, Linux 6.0)", errdefs.ErrUnsupported)
	}
	return t.underWay.Do(ctx, e.NQN, func() error {
		if err := e.allow(); err != nil {
			return err
		}
		return e.enable()
	})
}

// serve has the kernel know the key of TLS, if there is one.
func (e Export) serve() error {
	if e.PSK == none {
		return nil
	}
	change()
	return psk.Serve(e.PSK, e.Host, e.NQN)
}

// allow makes the subsystem, and the host the only one that may connect. Its key is there before, and goes with the lock (sweep).
func (e Export) allow() error {
	unlock, err := lock()
	if err != nil {
		return err
	}
	defer unlock()
	if err := e.serve(); err != nil {
		return err
	}
	host, subsystem := hostFolder(e.Host), subsystemFolder(e.NQN)
	if err := makeFolder(host); err != nil {
		return err
	}
	if e.Secret != none {
		key := filepath.Join(host, "dhchap_key")
		if err := os.Chmod(key, 0o600); err != nil { // everybody could read it
			return errdefs.FromErrno(err)
		}
		if err := set(key, e.Secret.Reveal()); err != nil {
			return err
		}
	}
	if err := makeFolder(subsystem); err != nil {
		return err
	}
	if err := set(filepath.Join(subsystem, "attr_allow_any_host"), "0"); err != nil {
		return err
	}
	allowed := filepath.Join(subsystem, "allowed_hosts")
	others, err := list(allowed)
	if err != nil {
		return err
	}
	for _, other := range others {
		if other == e.Host {
			continue
		}
		if err := remove(filepath.Join(allowed, other)); err != nil {
			return err
		}
	}
	return link(host, filepath.Join(allowed, e.Host))
}

// enable makes the namespace, and has its device opened by the kernel.
func (e Export) enable() error {
	namespace := namespaceFolder(e.NQN)
	if err := makeFolder(namespace); err != nil {
		return err
	}
	if on, err := get(filepath.Join(namespace, "enable")); err != nil {
		return err
	} else if on == "1" {
		return e.matches(namespace)
	}
	for _, attribute := range [][2]string{{"device_path", e.Device}, {"device_uuid", e.UUID}, {"device_nguid", e.UUID}, {"enable", "1"}} {
		if err := set(filepath.Join(namespace, attribute[0]), attribute[1]); err != nil {
			return err
		}
	}
	return nil
}

// matches returns an error unless a namespace that is enabled is that of the export.
func (e Export) matches(namespace string) error {
	for _, attribute := range [][2]string{{"device_uuid", e.UUID}, {"device_nguid", e.UUID}, {"device_path", e.Device}} {
		have, err := get(filepath.Join(namespace, attribute[0]))
		if err != nil {
			return err
		}
		if have != attribute[1] && !(attribute[0] == "device_path" && sameDevice(have, e.Device)) {
			return fmt.Errorf("%w: it is exported with %s %s", errdefs.ErrExists, attribute[0], have)
		}
	}
	return nil
}

// sameDevice reports whether two paths are of one block device.
func sameDevice(a, b string) bool {
	var one, other unix.Stat_t
	return unix.Stat(a, &one) == nil && unix.Stat(b, &other) == nil && one.Mode&other.Mode&unix.S_IFMT == unix.S_IFBLK && one.Rdev == other.Rdev
}

// Remove ends an export: when it has returned without an error, nothing of its host is in flight, and nothing comes any more. The
// host sees errors; its connections end. Again, or if there is none, it does nothing; what is left of an Add or a Remove that failed goes.
// A host that is cut off is waited for only for a moment; a disk that does not answer is waited for, as what it was told may still come.
func (t *Target) Remove(ctx context.Context, nqn string) error {
	if err := checkName("the subsystem", nqn); err != nil {
		return err
	}
	err := t.underWay.Do(ctx, nqn, func() error {
		on, _ := get(filepath.Join(namespaceFolder(nqn), "enable"))
		if err := fence(nqn); err != nil {
			return err
		}
		if on == "1" {
			time.Sleep(grace)
		}
		return dismantle(nqn)
	})
	if err != nil {
		return fmt.Errorf("end the export %s: %w", nqn, err)
	}
	return nil
}

// fence removes the namespace. The kernel returns from that when no request is in flight (nvmet_ns_disable), also if somebody was
// killed in the middle of it: it holds the folder above meanwhile. (From writing 0 to "enable" a second one returns at once, and
// nobody can connect or disconnect at this target meanwhile.) Requests are also in flight while their data are on the way from the
// host, so if it takes long, the connections are ended.
func fence(nqn string) error {
	removed := make(chan error, 1)
	go func() { removed <- remove(namespaceFolder(nqn)) }()
	select {
	case err := <-removed:
		return err
	case <-time.After(patience):
	}
	unpublished := unpublish(nqn)
	return errors.Join(<-removed, unpublished)
}

// dismantle takes away all that is left of an export that has no namespace, also if adding or removing it was cut short. Its host is then one that no subsystem
// allows: nothing else tells which it is.
func dismantle(nqn string) error {
	if err := unpublish(nqn); err != nil {
		return err
	}
	if err := psk.End(nqn); err != nil {
		return err
	}
	unlock, err := lock()
	if err != nil {
		return err
	}
	defer unlock()
	subsystem := subsystemFolder(nqn)
	hosts, err := list(filepath.Join(subsystem, "allowed_hosts"))
	if err != nil {
		return err
	}
	for _, host := range hosts {
		if err := remove(filepath.Join(subsystem, "allowed_hosts", host)); err != nil {
			return err
		}
	}
	if err := remove(subsystem); err != nil {
		return err
	}
	return sweepHosts()
}

// Resized has the kernel look at the size of an export's device again, and tell the host. errdefs.ErrNotFound if there is none.
func (t *Target) Resized(ctx context.Context, nqn string) error {
	if err := checkName("the subsystem", nqn); err != nil {
		return err
	}
	err := t.underWay.Do(ctx, nqn, func() error {
		err := write(filepath.Join(namespaceFolder(nqn), "revalidate_size"), "1")
		if errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("%w: there is no such export", errdefs.ErrNotFound)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("tell the host of export %s of the size of its device: %w", nqn, err)
	}
	return nil
}

// Exports returns what the kernel has of ours, whoever made it and at whatever address, without the secrets. What was cut short, or others have changed,
// lacks some of its fields: without a host nobody may connect, and without a device nobody can, as it appears nowhere, has no namespace, or is to be connected to with
// TLS and has no key.
func (t *Target) Exports(ctx context.Context) ([]Export, error) {
	subsystems, err := list(filepath.Join(root, "subsystems"))
	if err != nil {
		return nil, fmt.Errorf("list exports: %w", err)
	}
	appear, err := published()
	if err != nil {
		return nil, fmt.Errorf("list exports: %w", err)
	}
	var found []Export
	for _, nqn := range subsystems {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if !strings.HasPrefix(nqn, Prefix) {
			continue
		}
		e := Export{NQN: nqn}
		if hosts, err := list(filepath.Join(subsystemFolder(nqn), "allowed_hosts")); err == nil && len(hosts) == 1 {
			e.Host = hosts[0]
		}
		if on, err := get(filepath.Join(namespaceFolder(nqn), "enable")); err == nil && on == "1" && appear[nqn] {
			e.UUID, _ = get(filepath.Join(namespaceFolder(nqn), "device_uuid"))
			e.Device, _ = get(filepath.Join(namespaceFolder(nqn), "device_path"))
		}
		found = append(found, e)
	}
	return found, nil
}
