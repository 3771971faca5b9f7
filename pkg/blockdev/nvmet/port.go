package nvmet

import (
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// The ports that are ours: a port has no name but its number, which means nothing to anybody else.
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

// attributes are those of a port that say where it listens.
func (t *Target) attributes() [][2]string {
	family := "ipv4"
	if t.address.Addr().Is6() {
		family = "ipv6"
	}
	return [][2]string{
		{"addr_trtype", "tcp"}, {"addr_adrfam", family},
		{"addr_traddr", t.address.Addr().String()}, {"addr_trsvcid", strconv.Itoa(int(t.address.Port()))},
	}
}

// port returns the folder of our port of the target's address. If there is none, one at which nothing is exported becomes it, whose
// maker or remover was cut short. Who calls has the lock.
func (t *Target) port() (string, error) {
	have, err := ports()
	if err != nil {
		return "", err
	}
	idle := ""
	for _, port := range have {
		if is, err := t.isAt(port); err != nil || is {
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
	for _, attribute := range t.attributes() {
		if err := set(filepath.Join(idle, attribute[0]), attribute[1]); err != nil {
			return "", err
		}
	}
	return idle, nil
}

func (t *Target) isAt(port string) (bool, error) {
	for _, attribute := range t.attributes() {
		if have, err := get(filepath.Join(port, attribute[0])); err != nil || have != attribute[1] {
			return false, err
		}
	}
	return true, nil
}

// listens makes sure that the kernel listens at the target's address, or can: it does so as long as something is exported.
func (t *Target) listens() error {
	have, err := ports()
	if err != nil {
		return err
	}
	for _, port := range have {
		exports, err := list(filepath.Join(port, "subsystems"))
		if err != nil {
			return err
		}
		if is, err := t.isAt(port); err != nil || (is && len(exports) > 0) {
			return err
		}
	}
	listener, err := net.Listen("tcp", t.address.String())
	if err != nil {
		return listening(err)
	}
	return listener.Close()
}

// listening is the error of who cannot listen.
func listening(err error) error {
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

// publish has subsystems appear at the target's address, but for those that are removed meanwhile. At an address of before, at which they appear as well, they stay: who
// uses them is connected there.
func (t *Target) publish(nqns []string) error {
	if len(nqns) == 0 {
		return nil
	}
	unlock, err := lock()
	if err != nil {
		return err
	}
	defer unlock()
	port, err := t.port()
	if err != nil {
		return err
	}
	var failures []error
	for _, nqn := range nqns {
		if err := link(subsystemFolder(nqn), filepath.Join(port, "subsystems", nqn)); err != nil && there(subsystemFolder(nqn)) {
			failures = append(failures, fmt.Errorf("listen at %s: %w", t.address, listening(err)))
		}
	}
	return errors.Join(failures...)
}

// unpublish has a subsystem appear nowhere any more, and ends its connections. A port at which nothing is exported any more goes.
func unpublish(nqn string) error {
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
		if left, err := list(filepath.Join(port, "subsystems")); err != nil {
			return err
		} else if len(left) > 0 {
			continue
		}
		if err := remove(port); err != nil {
			return err
		}
	}
	return nil
}
