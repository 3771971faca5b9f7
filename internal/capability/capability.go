// Package capability tells what this process may do (capabilities(7)).
package capability

import "golang.org/x/sys/unix"

// Has reports whether this process has a capability (unix.CAP_...) in effect.
func Has(bit uint) bool {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	return unix.Capget(&header, &data[0]) == nil && data[bit/32].Effective&(1<<(bit%32)) != 0
}
