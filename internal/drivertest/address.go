package drivertest

import (
	"fmt"
	"math/rand/v2"
	"net"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
)

// FreeAddresses returns n different addresses of this machine, as 127.0.0.1:PORT, on which nothing listens now. The ports are below those that the kernel
// usually chooses from (ip_local_port_range, ip(7)), so that tests of other programs at the same time do not get them by chance.
func FreeAddresses(t testing.TB, n int) (addresses []string) {
	t.Helper()
	var held []net.Listener // kept open until all are found
	for len(held) < n {
		const from, to = 12000, 32000
		listener, err := net.Listen("tcp", fmt.Sprint("127.0.0.1:", from+rand.IntN(to-from)))
		if err != nil {
			continue // the port is taken
		}
		held = append(held, listener)
		addresses = append(addresses, listener.Addr().String())
	}
	for _, listener := range held {
		check.OK(t, listener.Close())
	}
	return addresses
}
