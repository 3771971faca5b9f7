package rpc

import (
	"net"
	"sync"
	"time"
)

// connections is how many there may be at once: far more than a kubelet and its sidecars have,
// and few enough that callers who only connect cost the driver neither its memory nor its
// descriptors.
const connections = 512

// handshakeTime is how long a connection may take until it speaks HTTP/2.
const handshakeTime = 10 * time.Second

// limited is a listener that hangs up on whoever comes when all connections are taken, or all that one address may have. Those who are
// connected go on.
type limited struct {
	net.Listener
	most, each int

	mu    sync.Mutex
	taken int
	from  map[string]int // by address
}

// limit bounds the connections of a listener to most, and to each from one address.
func limit(l net.Listener, most, each int) net.Listener {
	return &limited{Listener: l, most: most, each: each, from: map[string]int{}}
}

func (l *limited) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if release := l.take(conn.RemoteAddr()); release != nil {
			return &counted{conn, release}, nil
		}
		_ = conn.Close()
	}
}

// take counts a connection from an address, and returns what takes it off again; nil if there are too many.
func (l *limited) take(remote net.Addr) (release func()) {
	address := remote.String()
	if host, _, err := net.SplitHostPort(address); err == nil {
		address = host
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.taken == l.most || l.from[address] == l.each {
		return nil
	}
	l.taken++
	l.from[address]++
	return sync.OnceFunc(func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.taken--
		if l.from[address]--; l.from[address] == 0 {
			delete(l.from, address)
		}
	})
}

// counted is a connection that is taken off the count when it is closed.
type counted struct {
	net.Conn
	release func()
}

func (c *counted) Close() error {
	defer c.release()
	return c.Conn.Close()
}
