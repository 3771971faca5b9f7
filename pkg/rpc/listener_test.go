package rpc

import (
	"errors"
	"io"
	"net"
	"testing"
)

// TestLimit: who comes when all connections are taken is hung up on, and one that is closed
// makes room for another.
func TestLimit(t *testing.T) {
	path := socketPath(t)
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	limited := limit(listener, 2, 2)
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
	for range 2 { // once is enough, twice does not count twice
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
