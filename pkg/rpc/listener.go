package rpc

import (
	"net"
	"slices"
	"sync"
	"time"
)

// connections is how many there may be at once: far more than a kubelet and its sidecars have,
// and few enough that callers who only connect cost the driver neither its memory nor its
// descriptors.
const connections = 512

// handshakeTime is how long a connection may take until it speaks HTTP/2.
const handshakeTime = 10 * time.Second

// strangerTime is how long a stranger may take to be known, while there is no room for another one: that of a handshake, and of a question to the API server.
const strangerTime = 2 * handshakeTime

// limited is a listener that hangs up on whoever comes when all connections are taken, or all that one address may have. Those who are
// connected go on, but for strangers: the one that came first gives its place to who comes, who may be known. So who only connects keeps nobody out for long, and nobody at all who has
// his address. To one of another address it gives way only when it has had its time: many who are known may come at once.
type limited struct {
	net.Listener
	most, each int
	strangers  bool // there are some: who comes is one until vouch is called

	mu   sync.Mutex
	open []*counted // as they came
}

// limit bounds the connections of a listener to most, and to each from one address.
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

// take counts a connection; nil if there are too many.
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

// room reports whether there is room for one connection more of some, of which there may be so many; a stranger who has been there for some time
// may give way to it.
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
	_ = l.open[first].Conn.Close() // who serves it finds that out
	l.open = slices.Delete(l.open, first, first+1)
	return true
}

// vouch says that who calls from an address and port is no stranger: his connection gives way to nobody.
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
