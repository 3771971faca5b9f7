// Package crowd bounds how many connections an HTTP server has at once.
package crowd

import (
	"net"
	"net/http"
	"sync"

	"golang.org/x/net/netutil"
)

// Limit returns a listener for a server that does not serve yet: of its connections no more than most are open at once, others wait. While that
// many are open, none is kept for a request that may come: the next one is waiting for its place, and who is cut off may come again.
func Limit(server *http.Server, listener net.Listener, most int) net.Listener {
	server.ConnState = (&crowd{most: most, idle: map[net.Conn]bool{}}).changed
	return netutil.LimitListener(listener, most)
}

// crowd are the open connections of a server.
type crowd struct {
	most int
	mu   sync.Mutex
	idle map[net.Conn]bool // false: it is new, or being answered
}

// changed is told of each connection by the server (http.Server.ConnState).
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
			_ = one.Close() // it may be closed already, and the server have yet to see it
		}
	}
}
