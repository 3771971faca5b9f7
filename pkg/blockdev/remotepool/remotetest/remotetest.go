// Package remotetest stands for NVMe/TCP in tests on kernels without it: a target and a host in one, which makes loop devices over what is exported, and
// refuses what they refuse. It cannot show the fence: whoever has a device of an export open can go on to write.
package remotetest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/loop"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/nvme"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/nvmet"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Network is a kernel that is the target and the host of all nodes. Its zero value has no exports and no connections.
type Network struct {
	mu          sync.Mutex
	exports     map[string]nvmet.Export
	connections map[string]*connection
	cut         bool
}

// connection is one of a host, over whatever the network does.
type connection struct {
	nvme.Connection
	uuid   string // of the namespace
	device loop.Backing
	known  int64 // the size that the host knows, in bytes
}

// Add exports devices.
func (n *Network) Add(_ context.Context, exports ...nvmet.Export) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.exports == nil {
		n.exports, n.connections = map[string]nvmet.Export{}, map[string]*connection{}
	}
	for _, e := range exports {
		n.exports[e.NQN] = e
	}
	return nil
}

// Remove ends an export. Connections to it stay, and lead nowhere.
func (n *Network) Remove(_ context.Context, nqn string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.exports, nqn)
	return nil
}

// Withdraw does nothing: a device of an export can be used until it is disconnected anyway.
func (n *Network) Withdraw(context.Context, string) error { return nil }

// Exported returns the NQNs of all exports.
func (n *Network) Exported() (names []string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for nqn := range n.exports {
		names = append(names, nqn)
	}
	slices.Sort(names)
	return names
}

// Exports: see nvmet.Target.
func (n *Network) Exports(context.Context) (all []nvmet.Export, _ error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Collect(maps.Values(n.exports)), nil
}

// Cut cuts all connections, or ends that.
func (n *Network) Cut(cut bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.cut = cut
}

// Connect: see nvme.Connect.
func (n *Network) Connect(ctx context.Context, c nvme.Connection) (nvme.Device, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if have := n.connections[c.NQN]; have != nil {
		if have.Host != c.Host {
			return nvme.Device{}, fmt.Errorf("%w: %s is connected by another host", errdefs.ErrInUse, c.NQN)
		}
		return n.show(have), nil
	}
	e, there := n.exports[c.NQN]
	switch {
	case n.cut:
		return nvme.Device{}, fmt.Errorf("%w: connect to %s: %w", errdefs.ErrUnavailable, c.Address, unix.ETIMEDOUT)
	case there && e.UUID != c.UUID:
		return nvme.Device{}, fmt.Errorf("%w: its namespace has the UUID %s, not %s: it is another volume", errdefs.ErrPrecondition, e.UUID, c.UUID)
	case !there, e.Host != c.Host, e.Secret != c.Secret, e.PSK != c.PSK:
		return nvme.Device{}, fmt.Errorf("%w: connect to %s: %w", errdefs.ErrUnavailable, c.NQN, unix.EIO)
	}
	backing, err := os.OpenFile(e.Device, os.O_RDWR, 0)
	if err != nil {
		return nvme.Device{}, err
	}
	defer backing.Close()
	f, number, err := loop.Attach(ctx, backing, loop.Config{Label: "remotetest"})
	if err != nil {
		return nvme.Device{}, err
	}
	device, err := loop.Status(f, number)
	if err = errors.Join(err, f.Close()); err != nil {
		return nvme.Device{}, err
	}
	made := &connection{Connection: c, uuid: e.UUID, device: device}
	made.known, err = size(number)
	n.connections[c.NQN] = made
	return n.show(made), err
}

func size(number int) (int64, error) {
	f, err := os.Open(loop.Path(number))
	if err != nil {
		return 0, err
	}
	defer f.Close()
	return f.Seek(0, 2)
}

// show returns a connection as the kernel shows it. The caller holds mu.
func (n *Network) show(c *connection) nvme.Device {
	state := "live"
	if _, there := n.exports[c.NQN]; n.cut || !there {
		state = "connecting"
	}
	return nvme.Device{NQN: c.NQN, Host: c.Host, State: state, Path: loop.Path(c.device.Number), Number: unix.Mkdev(loop.Major, uint32(c.device.Number)), UUID: c.uuid, Size: c.known}
}

// List: see nvme.List.
func (n *Network) List(prefix string) (all []nvme.Device, _ error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for nqn, c := range n.connections {
		if strings.HasPrefix(nqn, prefix) {
			all = append(all, n.show(c))
		}
	}
	return all, nil
}

// Disconnect: see nvme.Disconnect.
func (n *Network) Disconnect(ctx context.Context, nqn string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	c := n.connections[nqn]
	if c == nil {
		return nil
	}
	f, err := loop.Open(c.device.Number, os.O_RDWR)
	if err == nil {
		err = loop.Detach(ctx, f, c.device)
	}
	if err == nil {
		delete(n.connections, nqn)
	}
	return err
}

// Resized: see nvme.Resized.
func (n *Network) Resized(ctx context.Context, nqn string, least int64) error {
	for {
		if now, err := n.rescan(nqn); err != nil || now >= least {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func (n *Network) rescan(nqn string) (int64, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	c := n.connections[nqn]
	if _, there := n.exports[nqn]; c == nil || n.cut || !there {
		return 0, fmt.Errorf("%w: rescan %s: %w", errdefs.ErrUnavailable, nqn, unix.EIO)
	}
	f, err := loop.Open(c.device.Number, os.O_RDWR)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	if err := unix.IoctlSetInt(int(f.Fd()), unix.LOOP_SET_CAPACITY, 0); err != nil {
		return 0, err
	}
	c.known, err = size(c.device.Number)
	return c.known, err
}

// Target is the network as the target of a node (volume.Exporter).
func (n *Network) Target() *Target { return &Target{n} }

// Target is that of a node.
type Target struct{ *Network }

// Authenticates is true.
func (t *Target) Authenticates() bool { return true }

// Resized does nothing: hosts look for themselves.
func (t *Target) Resized(context.Context, string) error { return nil }
