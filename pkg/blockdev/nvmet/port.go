package nvmet

import (
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/psk"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// The numbers of our ports. A port has no other name, and its number means nothing to others.
const (
	firstPort = 42000
	lastPort  = 42999
)

func portFolder(n int) string {
	return filepath.Join(root, "ports", strconv.Itoa(n))
}

// ports returns the folders of our ports.
func ports() ([]string, error) {
	names, err := list(filepath.Join(root, "ports"))
	if err != nil {
		return nil, err
	}
	var found []string
	for _, name := range names {
		if n, err := strconv.Atoi(name); err == nil && n >= firstPort && n <= lastPort {
			found = append(found, portFolder(n))
		}
	}
	return found, nil
}

// security is the attribute of a port for TLS: none, tls1.3. Linux has it since 6.7.
const security = "addr_tsas"

// encrypted is the value of security with TLS.
const encrypted = "tls1.3"

// where returns the attributes of a port that say where it listens, with their values.
func (t *Target) where() [][2]string {
	family := "ipv4"
	if t.address.Addr().Is6() {
		family = "ipv6"
	}
	return [][2]string{
		{"addr_trtype", "tcp"}, {"addr_adrfam", family},
		{"addr_traddr", t.address.Addr().String()}, {"addr_trsvcid", strconv.Itoa(int(t.address.Port()))},
	}
}

// attributes returns the attributes that a port at the target's address has to have: where, and with or without TLS.
func (t *Target) attributes(port string, tls bool) [][2]string {
	switch {
	case tls:
		return append(t.where(), [2]string{security, encrypted}, [2]string{"addr_treq", "required"})
	case there(filepath.Join(port, security)):
		return append(t.where(), [2]string{security, "none"})
	}
	return t.where()
}

// port returns the folder of our port at the target's address, with or without TLS. If there is none, it takes a port of ours without exports, which a
// process that was cut short has left, or makes one. errdefs.ErrLimit if all are used. The caller holds the lock.
func (t *Target) port(tls bool) (string, error) {
	have, err := ports()
	if err != nil {
		return "", err
	}
	idle := ""
	for _, port := range have {
		if is, err := has(port, t.attributes(port, tls)); err != nil || is {
			return port, err
		}
		if exports, err := list(filepath.Join(port, "subsystems")); err != nil {
			return "", err
		} else if len(exports) == 0 {
			idle = port
		}
	}
	for n := firstPort; idle == ""; n++ {
		if n > lastPort {
			return "", fmt.Errorf("%w: the ports %d to %d of the NVMe target are used", errdefs.ErrLimit, firstPort, lastPort)
		}
		if !slices.Contains(have, portFolder(n)) {
			idle = portFolder(n)
		}
	}
	if err := makeFolder(idle); err != nil {
		return "", err
	}
	for _, attribute := range t.attributes(idle, tls) {
		if err := set(filepath.Join(idle, attribute[0]), attribute[1]); err != nil {
			return "", err
		}
	}
	return idle, nil
}

// has reports whether the attributes of a port have these values.
func has(port string, attributes [][2]string) (bool, error) {
	for _, attribute := range attributes {
		if have, err := get(filepath.Join(port, attribute[0])); err != nil || have != attribute[1] {
			return false, err
		}
	}
	return true, nil
}

// listening returns the folder of our port that listens at the target's address; empty if none does. A port listens while something is exported there.
func (t *Target) listening() (string, error) {
	have, err := ports()
	if err != nil {
		return "", err
	}
	for _, port := range have {
		exports, err := list(filepath.Join(port, "subsystems"))
		if err != nil {
			return "", err
		}
		if is, err := has(port, t.where()); err != nil || (is && len(exports) > 0) {
			return port, err
		}
	}
	return "", nil
}

// listens returns an error unless the kernel listens at the target's address, or can.
func (t *Target) listens() error {
	if port, err := t.listening(); err != nil || port != "" {
		return err
	}
	listener, err := net.Listen("tcp", t.address.String())
	if err != nil {
		return cannotListen(err)
	}
	return listener.Close()
}

// cannotListen returns the error for a failure to listen: errdefs.ErrUnavailable if the address is another node's or is used, errdefs.ErrUnsupported if
// the kernel lacks the module.
func cannotListen(err error) error {
	switch {
	case errors.Is(err, unix.EADDRNOTAVAIL):
		return fmt.Errorf("%w: this is no address of this node: %w", errdefs.ErrUnavailable, err)
	case errors.Is(err, unix.EADDRINUSE):
		return fmt.Errorf("%w: something else listens there: %w", errdefs.ErrUnavailable, err)
	case errors.Is(err, unix.EINVAL): // nvmet_enable_port
		return fmt.Errorf("%w: the kernel has no NVMe target over TCP: %w; load its module on this node: modprobe nvmet-tcp", errdefs.ErrUnsupported, err)
	}
	return errdefs.FromErrno(err)
}

// publish has subsystems appear at the target's address, with or without TLS, except for those that are removed meanwhile. Those that appear at an earlier
// address stay there as well, as their users are connected there. Errors are those of Add: ErrOtherwise, errdefs.ErrUnavailable.
func (t *Target) publish(tls bool, nqns []string) error {
	if len(nqns) == 0 {
		return nil
	}
	unlock, err := lock()
	if err != nil {
		return err
	}
	defer unlock()
	appear, err := appearing()
	if err != nil {
		return err
	}
	way := map[bool]string{true: "with", false: "without"}[tls]
	var failures []error
	left := slices.DeleteFunc(slices.Clone(nqns), func(nqn string) bool { return appear[!tls][nqn] })
	if len(left) < len(nqns) {
		failures = append(failures, fmt.Errorf("listen at %s %s TLS: %w", t.address, way, ErrOtherwise))
	}
	listening, err := t.listening()
	if err == nil && listening != "" {
		var same bool
		if same, err = has(listening, t.attributes(listening, tls)); err == nil && !same {
			if slices.ContainsFunc(left, func(nqn string) bool { return !appear[tls][nqn] }) {
				failures = append(failures, fmt.Errorf("%w: listen at %s %s TLS: what was exported there before that was wanted is used still; end the pods on other nodes that use volumes of this one",
					errdefs.ErrUnavailable, t.address, way))
			}
			left = nil
		}
	}
	if err == nil {
		err = t.link(tls, left)
	}
	return errors.Join(append(failures, err)...)
}

// link has subsystems appear at the target's address. There has to be no port at that address that listens the other way, with or without TLS. The caller
// holds the lock.
func (t *Target) link(tls bool, nqns []string) error {
	if len(nqns) == 0 {
		return nil
	}
	port, err := t.port(tls)
	if err != nil {
		return err
	}
	var failures []error
	for _, nqn := range nqns {
		if err := link(subsystemFolder(nqn), filepath.Join(port, "subsystems", nqn)); err != nil && there(subsystemFolder(nqn)) {
			failures = append(failures, fmt.Errorf("listen at %s: %w", t.address, cannotListen(err)))
		}
	}
	return errors.Join(failures...)
}

// ErrOtherwise is for an export that is there with TLS and was asked for without, or the other way round. It stays as it is, as its user is connected.
var ErrOtherwise = fmt.Errorf("%w: it is exported since before that was wanted", errdefs.ErrExists)

// appearing returns the subsystems that appear at our ports: under true those at a port with TLS, under false those at one without.
func appearing() (map[bool]map[string]bool, error) {
	all, err := ports()
	if err != nil {
		return nil, err
	}
	appear := map[bool]map[string]bool{true: {}, false: {}}
	for _, port := range all {
		nqns, err := list(filepath.Join(port, "subsystems"))
		if err != nil {
			return nil, err
		}
		way, _ := get(filepath.Join(port, security)) // before Linux 6.7 there is no such attribute
		for _, nqn := range nqns {
			appear[way == encrypted][nqn] = true
		}
	}
	return appear, nil
}

// published returns the subsystems that appear at our ports and can be connected to: at a port with TLS only those with a key.
func published() (map[string]bool, error) {
	appear, err := appearing()
	if err != nil || len(appear[true]) == 0 {
		return appear[false], err
	}
	served, err := psk.Served(Prefix)
	for _, nqn := range served {
		if appear[true][nqn] {
			appear[false][nqn] = true
		}
	}
	return appear[false], err
}

// withdraw removes a subsystem from all our ports, which ends its connections.
func withdraw(nqn string) error {
	unlock, err := lock()
	if err != nil {
		return err
	}
	defer unlock()
	all, err := ports()
	if err != nil {
		return err
	}
	for _, port := range all {
		if err := remove(filepath.Join(port, "subsystems", nqn)); err != nil {
			return err
		}
	}
	return nil
}

// sweepPorts removes our ports without exports. The kernel returns from that when all connections by any port that are to end have ended
// (nvmet_port_release), and nobody can look at the ports meanwhile. So they stay while an export is about to end, whose disk may not answer: its end removes
// them. The caller holds the lock.
func sweepPorts() error {
	all, err := ports()
	if err != nil {
		return err
	}
	var idle []string
	for _, port := range all {
		if exports, err := list(filepath.Join(port, "subsystems")); err != nil {
			return err
		} else if len(exports) == 0 {
			idle = append(idle, port)
		}
	}
	if len(idle) == 0 {
		return nil
	}
	if some, err := withdrawn(); some || err != nil {
		return err
	}
	for _, port := range idle {
		if err := remove(port); err != nil {
			return err
		}
	}
	return nil
}

// withdrawn reports whether one of our subsystems appears at no port: it is about to end, or to appear.
func withdrawn() (bool, error) {
	subsystems, err := list(filepath.Join(root, "subsystems"))
	if err != nil {
		return false, err
	}
	appear, err := appearing()
	return slices.ContainsFunc(subsystems, func(nqn string) bool {
		return strings.HasPrefix(nqn, Prefix) && !appear[true][nqn] && !appear[false][nqn]
	}), err
}
