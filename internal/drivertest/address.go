package drivertest

import (
	"fmt"
	"math/rand/v2"
	"net"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
)

// FreeAddresses returns addresses of this machine, as 127.0.0.1:PORT, that nothing listens on now, all of them different. They are below those that the kernel
// gives to whoever asks for any (ip_local_port_range): tests of other programs, which run at the same time, get none of them so.
func FreeAddresses(t testing.TB, n int) (addresses []string) {
	t.Helper()
	var held []net.Listener // until all are known
	for len(held) < n {
		const from, to = 12000, 32000
		listener, err := net.Listen("tcp", fmt.Sprint("127.0.0.1:", from+rand.IntN(to-from)))
		if err != nil {
			continue // somebody has it
		}
		held = append(held, listener)
		addresses = append(addresses, listener.Addr().String())
	}
	for _, listener := range held {
		check.OK(t, listener.Close())
	}
	return addresses
}
