package psk

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Handshakes returns an error unless a tlshd does handshakes in this network namespace: errdefs.ErrUnsupported if the kernel has no handshakes,
// errdefs.ErrUnavailable if no tlshd runs now.
func Handshakes() error {
	group, err := group("handshake", "tlshd")
	if errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("%w: the kernel has no handshakes of TLS done (CONFIG_NET_HANDSHAKE, Linux 6.5)", errdefs.ErrUnsupported)
	}
	if err != nil {
		return fmt.Errorf("find out who does handshakes of TLS: %w", errdefs.FromErrno(err))
	}
	listeners, err := os.ReadFile("/proc/thread-self/net/netlink")
	if err != nil {
		return fmt.Errorf("find out who does handshakes of TLS: %w", errdefs.FromErrno(err))
	}
	if listens(string(listeners), group) {
		return nil
	}
	return fmt.Errorf("%w: no tlshd runs in this node's network, which does the handshakes of TLS: install ktls-utils (Debian 13, Ubuntu 24.04, Fedora, RHEL, SLES), and systemctl enable --now tlshd",
		errdefs.ErrUnavailable)
}

// listens reports whether a socket listens to a group of generic netlink. sockets is the text of net/netlink (proc(5)): the protocol is in the second
// column, the first 32 groups are in the fourth. Other groups are not shown, and listens is true for them.
func listens(sockets string, group uint32) bool {
	if group < 1 || group > 32 {
		return true
	}
	for line := range strings.Lines(sockets) {
		words := strings.Fields(line)
		if len(words) < 4 || words[1] != strconv.Itoa(unix.NETLINK_GENERIC) {
			continue
		}
		if groups, err := strconv.ParseUint(words[3], 16, 32); err == nil && groups&(1<<(group-1)) != 0 {
			return true
		}
	}
	return false
}

// group returns the kernel's number of a group of a family of generic netlink; ENOENT if there is none.
func group(family, name string) (uint32, error) {
	socket, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_GENERIC)
	if err != nil {
		return 0, err
	}
	defer unix.Close(socket)
	body := attribute([]byte{unix.CTRL_CMD_GETFAMILY, 1, 0, 0}, unix.CTRL_ATTR_FAMILY_NAME, family+"\x00")
	message := binary.NativeEndian.AppendUint32(nil, uint32(unix.NLMSG_HDRLEN+len(body)))
	message = binary.NativeEndian.AppendUint16(message, unix.GENL_ID_CTRL)
	message = binary.NativeEndian.AppendUint16(message, unix.NLM_F_REQUEST)
	message = append(message, make([]byte, 8)...) // sequence and port
	if err := unix.Sendto(socket, append(message, body...), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return 0, err
	}
	answer := make([]byte, 8192)
	n, _, err := unix.Recvfrom(socket, answer, 0)
	if err != nil {
		return 0, err
	}
	return groupIn(answer[:n], name)
}

// attribute appends an attribute to a message of netlink.
func attribute(to []byte, kind uint16, value string) []byte {
	to = binary.NativeEndian.AppendUint16(to, uint16(unix.NLA_HDRLEN+len(value)))
	to = binary.NativeEndian.AppendUint16(to, kind)
	to = append(to, value...)
	return append(to, make([]byte, -len(value)&3)...)
}

// groupIn returns the number of a group, from the answer about its family; ENOENT if it is not there.
func groupIn(answer []byte, name string) (uint32, error) {
	if len(answer) < unix.NLMSG_HDRLEN+unix.GENL_HDRLEN {
		return 0, unix.EBADMSG
	}
	if binary.NativeEndian.Uint16(answer[4:]) == unix.NLMSG_ERROR {
		return 0, unix.Errno(-int32(binary.NativeEndian.Uint32(answer[unix.NLMSG_HDRLEN:])))
	}
	for _, group := range attributes(attributes(answer[unix.NLMSG_HDRLEN+unix.GENL_HDRLEN:])[unix.CTRL_ATTR_MCAST_GROUPS]) {
		of := attributes(group)
		if id := of[unix.CTRL_ATTR_MCAST_GRP_ID]; len(id) == 4 && string(bytes.TrimRight(of[unix.CTRL_ATTR_MCAST_GRP_NAME], "\x00")) == name {
			return binary.NativeEndian.Uint32(id), nil
		}
	}
	return 0, unix.ENOENT
}

// attributes returns the attributes of a message, by their kinds.
func attributes(message []byte) map[uint16][]byte {
	found := map[uint16][]byte{}
	for len(message) >= unix.NLA_HDRLEN {
		length := int(binary.NativeEndian.Uint16(message))
		if length < unix.NLA_HDRLEN || length > len(message) {
			break
		}
		found[binary.NativeEndian.Uint16(message[2:])&^(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER)] = message[unix.NLA_HDRLEN:length]
		message = message[min((length+3)&^3, len(message)):]
	}
	return found
}
