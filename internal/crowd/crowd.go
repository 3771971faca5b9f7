// Package crowd bounds how many connections an HTTP server has at once.
package crowd

import (
	"net"
	"net/http"
	"sync"

	"golang.org/x/net/netutil"
)

// Limit returns a listener for a server that does not serve yet, with at most most connections at once; further ones wait. While there are most, connections
// without a request are closed, as others wait for their places: their clients may connect again.
func Limit(server *http.Server, listener net.Listener, most int) net.Listener {
	server.ConnState = (&crowd{most: most, idle: map[net.Conn]bool{}}).changed
	return netutil.LimitListener(listener, most)
}

// crowd tracks the open connections of a server.
type crowd struct {
	most int
	mu   sync.Mutex
	idle map[net.Conn]bool // false: new, or with a request
}

// changed is called by the server at each change of a connection (http.Server.ConnState).
func (c *crowd) changed(conn net.Conn, to http.ConnState) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if to == http.StateClosed || to == http.StateHijacked {
		delete(c.idle, conn)
		return
	}
	c.idle[conn] = to == http.StateIdle
	if len(c.idle) < c.most {
		return
	}
	for one, idle := range c.idle {
		if idle {
			_ = one.Close() // it may be closed already, before the server has seen that
		}
	}
}
