package drivertest

import (
	"net"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
)

// FreeAddresses returns addresses of this machine, as 127.0.0.1:PORT, that nothing listens on now, all of them different.
func FreeAddresses(t testing.TB, n int) (addresses []string) {
	t.Helper()
	var held []net.Listener // until all are known
	for range n {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		check.OK(t, err)
		held = append(held, listener)
		addresses = append(addresses, listener.Addr().String())
	}
	for _, listener := range held {
		check.OK(t, listener.Close())
	}
	return addresses
}
