package rpc

import (
	"net"
	"slices"
	"sync"
	"time"
)

// connections is how many a socket of this machine may have at once: far more than a kubelet and the sidecars need, but few enough that callers that only
// connect do not use up the driver's memory or file descriptors.
const connections = 512

// handshakeTime is how long a new connection may take until its HTTP/2 handshake is done.
const handshakeTime = 10 * time.Second

// strangerTime is how long a stranger keeps its connection for certain when all connections are taken: long enough for a handshake, and for a request to the
// API server that checks its token.
const strangerTime = 2 * handshakeTime

// limited is a listener that bounds its connections, in all and from each address (without the port). A new connection that would be too many is closed, unless
// a stranger gives way to it: then the stranger's connection is closed. A connection is a stranger's until vouch. The oldest stranger of the same address gives
// way; of other addresses only one that has been there for strangerTime, because many known callers may connect at the same moment. So callers that only
// connect never keep out a known caller of the same address, and those of other addresses for a short time only.
type limited struct {
	net.Listener
	most, each int
	strangers  bool // new connections are strangers until vouch; if false, there are no strangers

	mu   sync.Mutex
	open []*counted // oldest first
}

// limit returns a listener with at most most connections of l at once, and each of one address.
func limit(l net.Listener, most, each int, strangers bool) *limited {
	return &limited{Listener: l, most: most, each: each, strangers: strangers}
}

func (l *limited) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if c := l.take(conn); c != nil {
			return c, nil
		}
		_ = conn.Close()
	}
}

// take adds a connection to the count, and returns it; nil if there are too many. The caller closes it then.
func (l *limited) take(conn net.Conn) net.Conn {
	c := &counted{Conn: conn, of: l, from: conn.RemoteAddr().String(), stranger: l.strangers, since: time.Now()}
	c.address = c.from
	if host, _, err := net.SplitHostPort(c.from); err == nil {
		c.address = host
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	of := func(one *counted) bool { return one.address == c.address }
	anyone := func(*counted) bool { return true }
	if !l.room(of, l.each, 0) || !l.room(anyone, l.most, strangerTime) {
		return nil
	}
	l.open = append(l.open, c)
	return c
}

// room reports whether one more connection may join those for which of is true; there may be most of these. If need be, it closes the oldest stranger of these
// that has been there for after. The caller holds l.mu.
func (l *limited) room(of func(*counted) bool, most int, after time.Duration) bool {
	n, first := 0, -1
	for i, one := range l.open {
		if !of(one) {
			continue
		}
		n++
		if one.stranger && first < 0 && time.Since(one.since) >= after {
			first = i
		}
	}
	if n < most || first < 0 {
		return n < most
	}
	_ = l.open[first].Conn.Close() // its server gets an error, and ends
	l.open = slices.Delete(l.open, first, first+1)
	return true
}

// vouch has the connection from an address and port, which a known caller has, count as no stranger's: it does not give way any more.
func (l *limited) vouch(from string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, one := range l.open {
		if one.from == from {
			one.stranger = false
		}
	}
}

// counted is a connection that is taken off the count when it is closed.
type counted struct {
	net.Conn
	of            *limited
	from, address string // with the port, and without
	stranger      bool
	since         time.Time
}

func (c *counted) Close() error {
	c.of.mu.Lock()
	c.of.open = slices.DeleteFunc(c.of.open, func(one *counted) bool { return one == c })
	c.of.mu.Unlock()
	return c.Conn.Close()
}
