package drivertest

import (
	"errors"
	"net"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
)

// Wire records all packets of a link of this network namespace, until heard is called, which returns them.
func Wire(t testing.TB, name string) (heard func() []byte) {
	t.Helper()
	const everything = 0x0300 // ETH_P_ALL in network byte order
	socket, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, everything)
	check.OK(t, err)
	link, err := net.InterfaceByName(name)
	check.OK(t, err)
	check.OK(t, unix.Bind(socket, &unix.SockaddrLinklayer{Protocol: everything, Ifindex: link.Index}))
	check.OK(t, unix.SetsockoptInt(socket, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20))
	check.OK(t, unix.SetsockoptTimeval(socket, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 1000}))
	var all []byte
	end, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		packet := make([]byte, 1<<17) // with offloads packets are larger than on a cable
		for {
			n, err := unix.Read(socket, packet)
			if n > 0 {
				all = append(all, packet[:n]...)
				continue
			}
			select {
			case <-end:
				return
			default:
				if !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR) {
					t.Errorf("what goes over the link: %v", err)
					return
				}
			}
		}
	}()
	return func() []byte {
		close(end)
		<-ended
		check.OK(t, unix.Close(socket))
		return all
	}
}
