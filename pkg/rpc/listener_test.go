package rpc

import (
	"errors"
	"io"
	"net"
	"testing"
	"testing/synctest"
	"time"
)

// TestLimit: connections beyond the limit are closed; when one is closed, there is room for another.
func TestLimit(t *testing.T) {
	path := socketPath(t)
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	limited := limit(listener, 2, 2, false)
	defer limited.Close()
	accepted := make(chan net.Conn, 10)
	go func() {
		for {
			c, err := limited.Accept()
			if err != nil {
				return
			}
			accepted <- c
		}
	}()
	dial := func() net.Conn {
		c, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	dial()
	dial()
	first, second := <-accepted, <-accepted
	for range 3 {
		if _, err := dial().Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
			t.Errorf("one too many ends with %v", err)
		}
	}
	for range 2 { // a second Close is not counted
		_ = first.Close()
	}
	dial()
	third := <-accepted
	if _, err := dial().Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("one too many ends with %v", err)
	}
	if err := errors.Join(second.Close(), third.Close()); err != nil {
		t.Error(err)
	}
}

// named is a connection from an address.
type named struct {
	net.Conn
	from   string
	closed bool
}

func (n *named) RemoteAddr() net.Addr { a, _ := net.ResolveTCPAddr("tcp", n.from); return a }

func (n *named) Close() error { n.closed = true; return nil }

// TestStrangers: a stranger gives way to a connection of its address, and after strangerTime to any other. A known caller gives way to none.
func TestStrangers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := limit(nil, 3, 2, true)
		come := func(from string, want bool) *named {
			t.Helper()
			c := &named{from: from}
			if taken := l.take(c) != nil; taken != want {
				t.Errorf("there is room for %s: %t", from, taken)
			}
			return c
		}
		gone, first, second := come("10.0.0.1:1", true), come("10.0.0.1:2", true), come("10.0.0.1:3", true)
		if !gone.closed || first.closed {
			t.Error("not the first of three of one address has gone")
		}
		l.vouch("10.0.0.1:2")
		third := come("10.0.0.1:4", true)
		if first.closed || !second.closed {
			t.Error("who is known has gone, or a stranger has not")
		}
		l.vouch("10.0.0.1:4")
		come("10.0.0.1:5", false)
		stranger := come("10.0.0.2:1", true)
		come("10.0.0.3:1", false)
		time.Sleep(strangerTime)
		come("10.0.0.3:1", true)
		if first.closed || third.closed || !stranger.closed {
			t.Error("who is known has gone, or a stranger who has had his time has not")
		}
	})
}
