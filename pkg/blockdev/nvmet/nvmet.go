// Package nvmet is the kernel's NVMe/TCP target, by configfs: it gives a block device to one host on another machine. See drivers/nvme/target/configfs.c.
//
// An export is a subsystem with one namespace and one host that may connect. It is the kernel's: it stays when the process that made it ends, and goes
// with the machine. The listener is in the network namespace of the process that makes the first export of an address. Several processes may have targets
// of different addresses in one kernel. Ours are the subsystems and hosts whose names begin with Prefix, and the ports from firstPort to lastPort; the
// rest of the target is left alone.
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
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/secret"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/named"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/psk"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/unbroken"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Prefix begins the names of all subsystems and hosts that this package makes.
const Prefix = named.NQN

// patience is how long the end of an export waits for requests in flight before it ends the connections. A disk that works answers sooner; requests of a
// host that is cut off do not end by themselves.
const patience = time.Second

// grace is the time between the removal of the namespace and the end of the connections: by then the host has seen it, and all its I/O fails. Before Linux
// 6.10 a host that has not seen it waits for the subsystem to come back.
var grace = 250 * time.Millisecond

// Target is the target at one address. Calls for the same export wait for each other.
type Target struct {
	address       netip.AddrPort
	authenticates bool
	underWay      unbroken.Table
	ending        sync.Map // NQNs of the exports whose namespace is being removed
}

// Export is a device that one host may use.
type Export struct {
	NQN    string      // NQN of the subsystem
	Host   string      // NQN of the one host that may connect
	UUID   string      // of the namespace, in lower case; its NGUID has the same bytes
	Device string      // path of the block device
	Secret secret.Text // as Secret returns it; empty: the host need not prove who it is
	PSK    secret.Text // as PSK returns it: only connections with TLS are taken; empty: all goes in plain text
}

// none is no secret.
var none secret.Text

// Open returns the target at an address of this machine. It removes the hosts and keys that a process left unfinished when it died; a port that was left
// so is used by a later export. errdefs.ErrUnsupported if the kernel has no such target, with what to load; errdefs.ErrUnavailable if nobody can listen at
// this address now.
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

// Available returns an error unless this kernel has the target: errdefs.ErrUnsupported, with what to load. authenticated is as Authenticates returns it.
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

// Given reports whether this kernel has a subsystem whose name begins with a prefix, whoever made it and at whatever address. It needs no target: a kernel
// without one gives nothing.
func Given(prefix string) (bool, error) {
	err := present()
	if errors.Is(err, errdefs.ErrUnsupported) {
		return false, nil
	}
	var names []string
	if err == nil {
		names, err = list(filepath.Join(root, "subsystems"))
	}
	return slices.ContainsFunc(names, func(nqn string) bool { return strings.HasPrefix(nqn, prefix) }), err
}

// TLS returns an error unless the target can encrypt new exports now: errdefs.ErrUnsupported if this kernel never can, errdefs.ErrUnavailable if no tlshd
// does the handshakes.
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

// Authenticates reports whether the kernel can ask hosts for a secret (CONFIG_NVME_TARGET_AUTH, Linux 6.0). If not, Add returns errdefs.ErrUnsupported for
// an Export with a secret.
func (t *Target) Authenticates() bool { return t.authenticates }

var (
	names   = regexp.MustCompile(`^` + regexp.QuoteMeta(Prefix) + `[a-z0-9][a-z0-9:.-]{0,190}$`)
	uuids   = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)
	secrets = regexp.MustCompile(`^DHHC-1:0[0-3]:[A-Za-z0-9+/]+={0,2}:$`)
)

// checkName returns errdefs.ErrInvalid for a name that must not become part of a path.
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

// Add exports devices, or continues an Add that was cut short; what is exported already does not change. It exports what it can: an error for one export
// does not hold up the others. errdefs.ErrExists for a subsystem that is there with another device or UUID.
//
// A subsystem appears at the address only when all else is ready: a host that is waiting to connect again, and finds it without its namespace, would take
// the device away from its users. For the same reason all exports of a machine that has started belong into one call: the kernel listens from the first
// on, and since Linux 6.10 a host that finds no subsystem of its name gives up.
//
// An address has either TLS or plain text at a time. A subsystem that appears the other way already, at this address or an earlier one, stays as it is:
// ErrOtherwise. While one does at this address, errdefs.ErrUnavailable for all others that should appear there.
func (t *Target) Add(ctx context.Context, exports ...Export) error {
	ready := map[bool][]string{} // by whether it has TLS
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

// prepare makes all of an export; publish then has it appear.
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

// serve gives the kernel the key of TLS of the export, if there is one. The caller holds the lock.
func (e Export) serve() error {
	if e.PSK == none {
		return nil
	}
	change()
	return psk.Serve(e.PSK, e.Host, e.NQN)
}

// allow makes the subsystem, with the host as the only one that may connect. Its key of TLS is there first; the lock is held over both, as sweep removes
// keys without a subsystem.
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
		if err := os.Chmod(key, 0o600); err != nil { // by default everybody can read it
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

// enable makes the namespace, and has the kernel open its device. errdefs.ErrExists if it is there with another device or UUID.
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

// matches returns errdefs.ErrExists unless a namespace that is enabled is that of the export.
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

// sameDevice reports whether two paths are of the same block device.
func sameDevice(a, b string) bool {
	var one, other unix.Stat_t
	return unix.Stat(a, &one) == nil && unix.Stat(b, &other) == nil && one.Mode&other.Mode&unix.S_IFMT == unix.S_IFBLK && one.Rdev == other.Rdev
}

// Withdraw ends the connections of an export, and has nobody connect any more. What the host has not been answered waits there until it disconnects (before
// Linux 6.10; later ones find within seconds that they may not connect again), as if the network was cut. Requests may still be in flight here, until Remove.
// Without such an export it does nothing.
func (t *Target) Withdraw(ctx context.Context, nqn string) error {
	if err := checkName("the subsystem", nqn); err != nil {
		return err
	}
	if err := t.underWay.Do(ctx, nqn, func() error { return withdraw(nqn) }); err != nil {
		return fmt.Errorf("end the connections of export %s: %w", nqn, err)
	}
	return nil
}

// Remove ends an export. When it has returned without an error, no request of the host is in flight, and none comes any more; its connections end, and the
// host sees errors, unless Withdraw was called before. If there is no such export, it removes what an Add or Remove that failed has left of it. It waits only
// a moment for a host that is cut off, but for a disk that does not answer it waits: that may still write what it was told. If ctx ends first, the removal
// goes on.
func (t *Target) Remove(ctx context.Context, nqn string) error {
	if err := checkName("the subsystem", nqn); err != nil {
		return err
	}
	err := t.underWay.Do(ctx, nqn, func() error {
		appear, err := appearing()
		if err != nil {
			return err
		}
		was, err := t.fence(nqn)
		if err != nil {
			return err
		}
		if was && (appear[true][nqn] || appear[false][nqn]) { // else Withdraw was called, and its connections have ended
			time.Sleep(grace)
		}
		return dismantle(nqn)
	})
	if err != nil {
		return fmt.Errorf("end the export %s: %w", nqn, err)
	}
	return nil
}

// fence removes the namespace, and reports whether there was one. The kernel returns from that when no request is in flight (nvmet_ns_disable), also to a
// second caller if the first was killed meanwhile, as it holds the folder above. (With 0 written to "enable" a second caller returns at once, and meanwhile
// nobody can connect or disconnect at this target.) A request is also in flight while its data is on the way from the host: so after patience the
// connections are ended.
func (t *Target) fence(nqn string) (was bool, err error) {
	t.ending.Store(nqn, nil)
	defer t.ending.Delete(nqn)
	removed := make(chan error, 1)
	go func() {
		on, _ := get(filepath.Join(namespaceFolder(nqn), "enable")) // waits for an earlier caller
		was = on == "1"
		removed <- remove(namespaceFolder(nqn))
	}()
	select {
	case err := <-removed:
		return was, err
	case <-time.After(patience):
	}
	failure := withdraw(nqn)
	err = <-removed // before was is read
	return was, errors.Join(err, failure)
}

// dismantle removes all that is left of an export that has no namespace, also after an Add or Remove that was cut short. The host is found as one that no
// subsystem allows any more, as nothing else tells which it was.
func dismantle(nqn string) error {
	if err := withdraw(nqn); err != nil {
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
	return errors.Join(sweepHosts(), sweepPorts())
}

// Resized has the kernel read the size of an export's device again, and tell the host. errdefs.ErrNotFound if there is no such export.
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

// Exports returns our exports, whoever made them and at whatever address, without the secrets. One that was cut short, or that others have changed, lacks
// fields. Without Host, nobody may connect. Without Device, nobody can: it appears at no port, has no namespace, lacks its key of TLS, or is about to end.
// An export whose disk does not answer while it ends is not waited for.
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
		if _, ends := t.ending.Load(nqn); appear[nqn] && !ends { // nobody can look into a folder that is being removed
			e.namespace()
		}
		found = append(found, e)
	}
	return found, nil
}

// namespace reads UUID and Device from the export's namespace, if that is enabled.
func (e *Export) namespace() {
	if on, err := get(filepath.Join(namespaceFolder(e.NQN), "enable")); err == nil && on == "1" {
		e.UUID, _ = get(filepath.Join(namespaceFolder(e.NQN), "device_uuid"))
		e.Device, _ = get(filepath.Join(namespaceFolder(e.NQN), "device_path"))
	}
}
