package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"strconv"
	"time"

	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/nvme"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/nvmet"
	"github.com/ashlar-csi/ashlar/pkg/csimap"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// remotePort is the port on which volumes are exported if --remote-address has none: that of NVMe over TCP.
const remotePort = 4420

// networkPattern is the form of a network's name, which is the value of a label and of a topology segment.
var networkPattern = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?$`)

// checkRemote checks the flags of volumes that nodes use of each other.
func (o *options) checkRemote() error {
	switch {
	case o.remoteAddress == "" && o.remoteTLS:
		return errors.New("--remote-tls: it is about what nodes give to each other; give --remote-address too")
	case o.remoteAddress == "":
		return nil
	case o.mode != "node":
		return errors.New("--remote-address: nodes of a cluster use each other's volumes (--mode=node)")
	case o.agentEndpoint == "":
		return errors.New("--remote-address: nodes agree on what they use of each other over their agents' ports; give --agent-endpoint too")
	case !networkPattern.MatchString(o.remoteNetwork):
		return fmt.Errorf("--remote-network=%s: use 1 to 63 of a-z, 0-9, dots and dashes, with a letter or digit at either end", o.remoteNetwork)
	case o.scrubEvery < 0:
		return fmt.Errorf("--scrub-every=%s: give 0 or more", o.scrubEvery)
	}
	if _, _, err := parseRemote(o.remoteAddress); err != nil || o.scrubBandwidth == "0" {
		return err
	}
	var err error
	if o.scrubRate, err = csimap.ParseQuantity(o.scrubBandwidth); err != nil {
		return fmt.Errorf("--scrub-bandwidth (bytes per second): %w", err)
	}
	return nil
}

// parseRemote reads --remote-address: an IP address or the name of an interface, with or without a port.
func parseRemote(text string) (host string, port uint16, err error) {
	host, port = text, remotePort
	if name, number, err := net.SplitHostPort(text); err == nil { // fails for an IPv6 address alone, which has no port
		n, err := strconv.ParseUint(number, 10, 16)
		if err != nil || n == 0 {
			return "", 0, fmt.Errorf("--remote-address=%s: %q is no port", text, number)
		}
		host, port = name, uint16(n)
	}
	ip, err := netip.ParseAddr(host)
	switch {
	case err == nil && (ip.IsUnspecified() || ip.Zone() != "" || ip.IsMulticast()):
		return "", 0, fmt.Errorf("--remote-address=%s: %s is not the address of one machine, at which others reach it", text, host)
	case err != nil && (host == "" || len(host) > 15 || regexp.MustCompile(`[\s/:\[\]]`).MatchString(host)):
		return "", 0, fmt.Errorf("--remote-address=%s: give an IP address of this node, or the name of an interface, and if wanted a port, as 10.0.0.7, [fd00::7]:4420 or eth1", text)
	}
	return host, port, nil
}

// network returns the network in which volumes of this node are exported, and the address there; nil without --remote-address. It is also nil while that is not
// possible, as without a kernel that can, or until an interface is there: that is logged, all other volumes can be used, and untilReachable waits for it.
func (o *options) network(ctx context.Context) *v1alpha1.Network {
	if o.remoteAddress == "" {
		return nil
	}
	at, err := o.reachable()
	if err != nil {
		klog.FromContext(ctx).Error(err, "This node gives its volumes to no other and uses none of others (access=any); the driver starts again when it can", "remoteAddress", o.remoteAddress)
		return nil
	}
	if err := o.encrypts(); err != nil {
		klog.FromContext(ctx).Error(err, "Until that is mended no node connects to volumes of this one, nor this one to those of others; what is connected goes on (access=any)", "remoteAddress", o.remoteAddress)
	}
	return &v1alpha1.Network{Name: o.remoteNetwork, Address: at.String()}
}

// reachable returns the address at which this node exports volumes, or why it cannot export, or use those of other nodes. It does not wait for tlshd.
func (o *options) reachable() (netip.AddrPort, error) {
	at, err := o.remoteAt()
	if err == nil {
		err = nvme.Available()
	}
	if err == nil {
		_, err = nvmet.Open(at)
	}
	if err == nil {
		if err = o.encrypts(); errors.Is(err, errdefs.ErrUnavailable) { // others retry to connect, and exports can be ended meanwhile
			err = nil
		}
	}
	return at, err
}

// encrypts returns an error if volumes are to be exported and used over TLS (--remote-tls), and cannot be: errdefs.ErrUnsupported if this kernel cannot,
// errdefs.ErrUnavailable while no tlshd runs.
func (o *options) encrypts() error {
	if !o.remoteTLS {
		return nil
	}
	if err := cmp.Or(nvmet.TLS(), nvme.TLS()); err != nil {
		return fmt.Errorf("--remote-tls: %w", err)
	}
	return nil
}

// reachablePause is how often untilReachable looks.
const reachablePause = 30 * time.Second

// untilReachable fails as soon as reachable succeeds. It is for a node that was not reachable when its driver started: the error ends the driver, which is then
// started again. It returns nil when ctx ends.
func untilReachable(ctx context.Context, pause time.Duration, reachable func() (netip.AddrPort, error)) error {
	ticks := time.NewTicker(pause)
	defer ticks.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticks.C:
			if at, err := reachable(); err == nil {
				return fmt.Errorf("nodes can use each other's volumes at %s now (--remote-address), and could not when the driver started: it has to start again", at)
			}
		}
	}
}

// remoteAt returns the address and port of --remote-address.
func (o *options) remoteAt() (netip.AddrPort, error) {
	host, port, err := parseRemote(o.remoteAddress)
	if err != nil {
		return netip.AddrPort{}, err
	}
	ip, err := netip.ParseAddr(host)
	if err != nil {
		if ip, err = addressOf(host); err != nil {
			return netip.AddrPort{}, fmt.Errorf("--remote-address=%s: %w", o.remoteAddress, err)
		}
	}
	return netip.AddrPortFrom(ip.Unmap(), port), nil
}

// addressOf returns the first address of an interface that is not link-local, of IPv4 if there is one.
func addressOf(name string) (netip.Addr, error) {
	found, err := net.InterfaceByName(name)
	if err != nil {
		return netip.Addr{}, fmt.Errorf("find the interface: %w", err)
	}
	addresses, err := found.Addrs()
	if err != nil {
		return netip.Addr{}, fmt.Errorf("find its addresses: %w", err)
	}
	var best netip.Addr
	for _, one := range addresses {
		prefix, err := netip.ParsePrefix(one.String())
		if ip := prefix.Addr().Unmap(); err == nil && !ip.IsLinkLocalUnicast() && (!best.IsValid() || ip.Is4() && !best.Is4()) {
			best = ip
		}
	}
	if !best.IsValid() {
		return netip.Addr{}, errors.New("the interface has no address that other machines could reach")
	}
	return best, nil
}
