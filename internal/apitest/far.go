package apitest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/rpc"
	"strings"
	"sync"
)

// farScheme is the beginning of an ASHLAR_APISERVER that names the address of Serve on this machine's host.
const farScheme = "tcp://"

// Serve starts an API server on this machine for each connection, for as long as that lasts. It is for tests in a virtual machine, whose single processor would
// take a minute to start one. It returns when the context ends, and all servers have ended.
func Serve(ctx context.Context, listener net.Listener) error {
	defer context.AfterFunc(ctx, func() { _ = listener.Close() })()
	var all sync.WaitGroup
	defer all.Wait()
	for {
		conn, err := listener.Accept()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		all.Go(func() {
			defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
			host := &Host{}
			defer host.end()
			server := rpc.NewServer()
			if err := server.Register(host); err != nil {
				panic(err) // a method of Host has a wrong signature
			}
			server.ServeConn(conn)
		})
	}
}

// Host is a place for net/rpc, which asks for an exported type.
type Host struct{ server *Server }

// Launch starts the API server, and returns its URL, which is on loopback.
func (h *Host) Launch(flags []string, url *string) (err error) {
	if h.server != nil {
		return errors.New("it has been started")
	}
	if h.server, err = Launch(flags...); err != nil {
		return err
	}
	*url = h.server.url
	return nil
}

func (h *Host) end() {
	if h.server != nil {
		h.server.Stop()
	}
}

// Do calls a method of place by its name.
func (h *Host) Do(what string, _ *bool) error {
	do := map[string]func() error{"freeze": h.server.on.freeze, "thaw": h.server.on.thaw, "kill": h.server.on.kill, "start": h.server.on.start,
		"backup": h.server.on.backup, "restore": h.server.on.restore}[what]
	if do == nil {
		return fmt.Errorf("nobody can %s an API server", what)
	}
	return do()
}

// far is an API server on this machine's host.
type far struct{ *rpc.Client }

func launchFar(address string, flags []string) (*Server, error) {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	client, err := rpc.Dial("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("the host, for an API server: %w", err)
	}
	var url string
	if err := client.Call("Host.Launch", flags, &url); err != nil {
		return nil, errors.Join(fmt.Errorf("the host's API server: %w", err), client.Close())
	}
	return newServer(strings.Replace(url, "127.0.0.1", host, 1), far{client}), nil
}

func (f far) do(what string) error { return f.Call("Host.Do", what, new(bool)) }

func (f far) freeze() error  { return f.do("freeze") }
func (f far) thaw() error    { return f.do("thaw") }
func (f far) kill() error    { return f.do("kill") }
func (f far) start() error   { return f.do("start") }
func (f far) backup() error  { return f.do("backup") }
func (f far) restore() error { return f.do("restore") }

func (f far) stop() { _ = f.Close() } // the host ends it with the connection, which may have ended before
