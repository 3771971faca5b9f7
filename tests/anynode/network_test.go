package anynode

import (
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

// network is what the nodes are in. The home and the second consumer are network namespaces. The first consumer is in the machine's own, as the
// kernel connects again from there, wherever it connected from before. Each two have a link of their own, which so
// can be cut, and each has a relay to the API server.
type network struct {
	testing.TB
	api string // address of the API server

	tlshd map[string]func() // ends that of a node

	mu     sync.Mutex
	relays map[string]*relay // by node
}

// The addresses of the nodes. The home has one on each link; what it exports is at the first.
var addresses = map[string]string{home: "10.77.1.2", consumers[0]: "10.77.1.1", consumers[1]: "10.77.2.2"}

// newNetwork makes the namespaces and links; they go at the end of the test.
func newNetwork(t testing.TB, api string) *network {
	t.Helper()
	n := &network{TB: t, api: api, relays: map[string]*relay{}, tlshd: map[string]func(){}}
	for _, node := range []string{home, consumers[1]} {
		drivertest.Run(t, "ip", "netns", "add", node)
		n.Cleanup(func() { drivertest.Run(n, "ip", "netns", "del", node) })
	}
	for _, line := range []string{
		"ip link add to-home type veth peer name to-first netns home",
		"ip addr add 10.77.1.1/24 dev to-home", "ip link set to-home up",
		"ip -n home addr add 10.77.1.2/24 dev to-first", "ip -n home link set to-first up",
		"ip -n home link add to-second type veth peer name to-home netns second",
		"ip -n home addr add 10.77.2.1/24 dev to-second", "ip -n home link set to-second up",
		"ip -n second addr add 10.77.2.2/24 dev to-home", "ip -n second link set to-home up",
		"ip -n second route add 10.77.1.2/32 via 10.77.2.1",
		"ip -n home link set lo up", "ip -n second link set lo up",
		"ip link add to-second type veth peer name to-first netns second",
		"ip addr add 10.77.3.1/24 dev to-second", "ip link set to-second up",
		"ip -n second addr add 10.77.3.2/24 dev to-first", "ip -n second link set to-first up",
		"ip route add 10.77.2.2/32 via 10.77.3.2", "ip -n second route add 10.77.1.1/32 via 10.77.3.1",
	} {
		drivertest.Run(t, strings.Fields(line)...)
	}
	if drivertest.WithTLS() {
		for node, netns := range map[string]string{home: home, consumers[0]: "", consumers[1]: consumers[1]} {
			n.tlshd[node] = drivertest.RunTLSHD(t, netns)
		}
	}
	for _, link := range []string{"to-home", "to-second"} {
		n.Cleanup(func() { drivertest.Run(n, "ip", "link", "del", link) }) // with the namespace it goes a little later
	}
	return n
}

// in is a command on a node. It stays the process that it becomes.
func in(node string, argv ...string) []string {
	if node == consumers[0] {
		return argv
	}
	return slices.Concat([]string{"nsenter", "--net=/run/netns/" + node}, argv)
}

// link cuts a consumer from the home, or connects it again; the other one has to itself.
func (n *network) link(consumer string, up bool) {
	n.Helper()
	drivertest.Run(n, "ip", "-n", home, "link", "set", "to-"+consumer, map[bool]string{true: "up", false: "down"}[up])
	if consumer == consumers[1] && up { // the route went with the link
		drivertest.Run(n, "ip", "-n", consumer, "route", "replace", "10.77.1.2/32", "via", "10.77.2.1")
	}
}

// links cuts a node from all others, or connects it again.
func (n *network) links(node string, up bool) {
	n.Helper()
	for _, consumer := range consumers {
		if node == home || node == consumer {
			n.link(consumer, up)
		}
	}
	if node == home {
		return
	}
	drivertest.Run(n, "ip", "link", "set", "to-second", map[bool]string{true: "up", false: "down"}[up])
	if up { // the route went with the link
		drivertest.Run(n, "ip", "route", "replace", "10.77.2.2/32", "via", "10.77.3.2")
	}
}

// relay lets a node reach the API server, at an address that it returns.
func (n *network) relay(node string) (address string) {
	n.Helper()
	listener, err := listenOn(node, "127.0.0.1:0")
	check.OK(n, err)
	n.carry(node, listener)
	return listener.Addr().String()
}

func (n *network) carry(node string, listener net.Listener) {
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

// reach cuts a node from the API server, or connects it again.
func (n *network) reach(node string, up bool) {
	n.Helper()
	n.mu.Lock()
	r := n.relays[node]
	n.mu.Unlock()
	if !up {
		r.close()
		return
	}
	listener, err := listenOn(node, r.Addr().String())
	check.OK(n, err)
	n.carry(node, listener)
}

// relay carries connections of a node to the API server.
type relay struct {
	net.Listener
	mu     sync.Mutex
	open   map[net.Conn]bool
	closed bool
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

// listenOn listens at an address of a node.
func listenOn(node, address string) (listener net.Listener, err error) {
	if node == consumers[0] {
		return net.Listen("tcp", address)
	}
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
	return listener, err
}
