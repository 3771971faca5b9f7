package anynode

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
)

// network is what the nodes are in: each is a network namespace with one link, and this machine's own namespace forwards between them. The
// API server, on this machine's loopback, is reached at each node's own, through a relay.
type network struct {
	testing.TB
	api string // address of the API server

	mu     sync.Mutex
	relays map[string]*relay // by node
	count  int
}

func newNetwork(t testing.TB, api string) *network {
	drivertest.Run(t, "sysctl", "-qw", "net.ipv4.ip_forward=1")
	return &network{TB: t, api: api, relays: map[string]*relay{}}
}

// node makes the namespace of a node, and returns its address. It goes at the end of the test.
func (n *network) node(name string) (address string) {
	n.Helper()
	n.count++
	address, gateway := fmt.Sprintf("10.77.%d.2", n.count), fmt.Sprintf("10.77.%d.1", n.count)
	for _, line := range []string{
		"ip netns add " + name,
		"ip link add to-" + name + " type veth peer name node netns " + name,
		"ip addr add " + gateway + "/24 dev to-" + name, "ip link set to-" + name + " up",
		"ip -n " + name + " addr add " + address + "/24 dev node", "ip -n " + name + " link set node up", "ip -n " + name + " link set lo up",
		"ip -n " + name + " route add default via " + gateway,
	} {
		drivertest.Run(n, strings.Fields(line)...)
	}
	n.Cleanup(func() { drivertest.Run(n, "ip", "netns", "del", name) })
	n.relay(name)
	return address
}

// in is a command in the namespace of a node. It stays the process that it becomes.
func in(node string, argv ...string) []string {
	return slices.Concat([]string{"nsenter", "--net=/run/netns/" + node}, argv)
}

// link cuts a node from the others, or connects it again.
func (n *network) link(node string, up bool) {
	n.Helper()
	drivertest.Run(n, "ip", "link", "set", "to-"+node, map[bool]string{true: "up", false: "down"}[up])
}

// reach cuts a node from the API server, or connects it again.
func (n *network) reach(node string, up bool) {
	n.Helper()
	if up {
		n.relay(node)
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.relays[node].close()
}

// relay carries connections of a node to the API server.
type relay struct {
	net.Listener
	mu     sync.Mutex
	open   map[net.Conn]bool
	closed bool
}

func (n *network) relay(node string) {
	n.Helper()
	listener, err := listenIn(node, n.api)
	check.OK(n, err)
	r := &relay{Listener: listener, open: map[net.Conn]bool{}}
	n.mu.Lock()
	n.relays[node] = r
	n.mu.Unlock()
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.run(n.api)
	}()
	n.Cleanup(func() { r.close(); <-done })
}

func (r *relay) run(to string) {
	var carrying sync.WaitGroup
	defer carrying.Wait()
	for {
		from, err := r.Accept()
		if err != nil {
			return // it was closed
		}
		server, err := net.Dial("tcp", to)
		if err != nil {
			from.Close()
			continue
		}
		r.mu.Lock()
		if r.closed {
			r.mu.Unlock()
			from.Close()
			server.Close()
			continue
		}
		r.open[from], r.open[server] = true, true
		r.mu.Unlock()
		carry := func(to, from net.Conn) {
			_, _ = io.Copy(to, from)
			to.Close()
			from.Close()
			r.mu.Lock()
			defer r.mu.Unlock()
			delete(r.open, from)
		}
		carrying.Go(func() { carry(server, from) })
		carrying.Go(func() { carry(from, server) })
	}
}

func (r *relay) close() {
	r.Close()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
	for conn := range r.open {
		conn.Close()
	}
}

// listenIn listens at an address in the namespace of a node.
func listenIn(node, address string) (listener net.Listener, err error) {
	done := make(chan struct{})
	go func() { // its thread is never used again
		defer close(done)
		runtime.LockOSThread()
		ns, failure := os.Open("/run/netns/" + node)
		if failure != nil {
			err = failure
			return
		}
		defer ns.Close()
		if err = unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err == nil {
			listener, err = net.Listen("tcp", address)
		}
	}()
	<-done
	if err != nil {
		return nil, errors.Join(fmt.Errorf("listen at %s of node %s", address, node), err)
	}
	return listener, nil
}
