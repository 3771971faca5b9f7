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

// limited is a listener that hangs up on whoever comes when all connections are taken. Those
// who are connected go on.
type limited struct {
	net.Listener
	free chan struct{} // has a token for each connection that is left
}

func limit(l net.Listener, n int) net.Listener {
	free := make(chan struct{}, n)
	for range n {
		free <- struct{}{}
	}
	return &limited{l, free}
}

func (l *limited) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		select {
		case <-l.free:
			return &counted{conn, sync.OnceFunc(func() { l.free <- struct{}{} })}, nil
		default:
			_ = conn.Close()
		}
	}
}

// counted is a connection that gives its token back when it is closed.
type counted struct {
	net.Conn
	release func()
}

func (c *counted) Close() error {
	defer c.release()
	return c.Conn.Close()
}
