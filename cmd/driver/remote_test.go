package main

import (
	"context"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

func TestParseRemote(t *testing.T) {
	for text, want := range map[string]struct {
		host string
		port uint16
	}{
		"10.0.0.7": {"10.0.0.7", 4420}, "10.0.0.7:5000": {"10.0.0.7", 5000}, "fd00::7": {"fd00::7", 4420}, "[fd00::7]:5000": {"fd00::7", 5000},
		"eth1": {"eth1", 4420}, "enp3s0f0.100:65535": {"enp3s0f0.100", 65535},
	} {
		if host, port, err := parseRemote(text); host != want.host || port != want.port || err != nil {
			t.Errorf("%s: %s, %d, %v", text, host, port, err)
		}
	}
	for _, text := range []string{"", ":4420", "0.0.0.0", "::", "[::]:4420", "224.0.0.1", "fe80::1%eth0", "10.0.0.7:0", "10.0.0.7:65536", "10.0.0.7:x", "10.0.0.0/16", "a b", "an-interface-with-a-long-name"} {
		if host, port, err := parseRemote(text); err == nil || !strings.Contains(err.Error(), "--remote-address="+text) {
			t.Errorf("%q: %s, %d, %v", text, host, port, err)
		}
	}
}

func TestRemoteAddress(t *testing.T) {
	for text, want := range map[string]string{"10.0.0.7": "10.0.0.7:4420", "[::ffff:10.0.0.7]:1": "10.0.0.7:1", "lo": "127.0.0.1:4420", "lo:5000": "127.0.0.1:5000"} {
		o := options{remoteAddress: text}
		at, err := o.remoteAt()
		check.OK(t, err)
		if at != netip.MustParseAddrPort(want) {
			t.Errorf("%s is at %s, want %s", text, at, want)
		}
	}
	o := options{remoteAddress: "no-such-if"}
	if at, err := o.remoteAt(); err == nil || !strings.Contains(err.Error(), "--remote-address=no-such-if: find the interface") {
		t.Errorf("%s, %v", at, err)
	}
	if in := o.network(t.Context()); in != nil { // all other volumes can be used then
		t.Errorf("without an interface, the network is %v", in)
	}
}

// TestUntilReachable: a driver that started before its node had the address ends when it has it, and not before.
func TestUntilReachable(t *testing.T) {
	asked := 0
	err := untilReachable(t.Context(), time.Millisecond, func() (netip.AddrPort, error) {
		if asked++; asked < 3 {
			return netip.AddrPort{}, errdefs.ErrUnavailable
		}
		return netip.MustParseAddrPort("10.0.0.7:4420"), nil
	})
	if asked != 3 || err == nil || !strings.Contains(err.Error(), "10.0.0.7:4420") {
		t.Errorf("asked %d times: %v", asked, err)
	}
	ended, end := context.WithCancel(t.Context())
	check.OK(t, untilReachable(ended, time.Millisecond, func() (netip.AddrPort, error) { end(); return netip.AddrPort{}, errdefs.ErrUnavailable }))
	run := func(ctx context.Context) error { return ctx.Err() }
	check.OK(t, (&options{}).keepingNothing(run)(t.Context()))
}

func TestRemoteFlags(t *testing.T) {
	for says, o := range map[string]options{
		"(--mode=node)":          {mode: "controller", remoteAddress: "10.0.0.7"},
		"give --remote-address":  {mode: "node", remoteTLS: true},
		"give --agent-endpoint":  {mode: "node", remoteAddress: "10.0.0.7"},
		"--remote-network=A b":   {mode: "node", remoteAddress: "10.0.0.7", agentEndpoint: "10.0.0.7:1", remoteNetwork: "A b"},
		"--remote-address=a b/1": {mode: "node", remoteAddress: "a b/1", agentEndpoint: "10.0.0.7:1", remoteNetwork: "default"},
		"--scrub-every=-1s":      {mode: "node", remoteAddress: "eth1", agentEndpoint: "10.0.0.7:1", remoteNetwork: "default", scrubEvery: -time.Second},
		"--scrub-bandwidth":      {mode: "node", remoteAddress: "eth1", agentEndpoint: "10.0.0.7:1", remoteNetwork: "default", scrubBandwidth: "fast"},
	} {
		if err := o.checkRemote(); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%v, want an error that says %s", err, says)
		}
	}
	for _, o := range []options{{mode: "all"}, {mode: "node", remoteAddress: "eth1", agentEndpoint: "10.0.0.7:1", remoteNetwork: "storage.a", scrubBandwidth: "0"}} {
		check.OK(t, o.checkRemote())
	}
}
