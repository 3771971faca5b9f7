// Package psk has the keys of TLS for NVMe over TCP: it derives what both ends of a connection make of one secret, and puts it where the kernel and tlshd
// find it. The kernel does not do the handshake of TLS itself. tlshd does, a daemon in user space, one for each network namespace (net/handshake in Linux
// 6.5).
package psk

import (
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"regexp"

	"github.com/ashlar-csi/ashlar/internal/secret"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// size is the size of all keys here, in bytes: that of SHA-256.
const size = sha256.Size

// Secret returns 32 random bytes as the secret that NVMe has: "NVMeTLSkey-1:01:", the bytes with their CRC-32 in base64, and a colon (NVM Express TCP
// Transport Specification, PSK interchange format).
func Secret(key []byte) secret.Text {
	return secret.Of("NVMeTLSkey-1:01:" + base64.StdEncoding.EncodeToString(binary.LittleEndian.AppendUint32(key[:len(key):len(key)], crc32.ChecksumIEEE(key))) + ":")
}

var secrets = regexp.MustCompile(`^NVMeTLSkey-1:01:([A-Za-z0-9+/]{48}):$`)

// Check returns errdefs.ErrInvalid unless a secret has the form that Secret returns. The secret is not in the error.
func Check(psk secret.Text) error {
	_, err := parse(psk)
	return err
}

func parse(psk secret.Text) (key []byte, err error) {
	if parts := secrets.FindStringSubmatch(psk.Reveal()); parts != nil {
		key, err = base64.StdEncoding.DecodeString(parts[1])
		if err == nil && crc32.ChecksumIEEE(key[:size]) == binary.LittleEndian.Uint32(key[size:]) {
			return key[:size], nil
		}
	}
	return nil, fmt.Errorf("%w: the secret of TLS is not of the form NVMeTLSkey-1:01:KEY: as NVMe has it", errdefs.ErrInvalid)
}

// derive returns what a host and a subsystem make of a secret: the key, and the identity by which the host tells the subsystem which key it means (the
// same specification, 3.6.1.3 and 3.6.1.4, with SHA-256, version 1).
func derive(psk secret.Text, host, subsystem string) (identity string, key []byte, err error) {
	configured, err := parse(psk)
	if err != nil {
		return "", nil, err
	}
	retained := expand(configured, "HostNQN", host)
	mac := hmac.New(sha256.New, retained)
	mac.Write([]byte(host + " " + subsystem + " NVMe-over-Fabrics"))
	digest := base64.StdEncoding.EncodeToString(mac.Sum(nil))
	return fmt.Sprintf("NVMe1R01 %s %s %s", host, subsystem, digest), expand(retained, "nvme-tls-psk", "01 "+digest), nil
}

// expand is HKDF-Expand-Label of RFC 8446, 7.1, after HKDF-Extract without a salt.
func expand(key []byte, label, context string) []byte {
	label = "tls13 " + label
	info := string([]byte{0, size, byte(len(label))}) + label + string([]byte{byte(len(context))}) + context
	extracted, _ := hkdf.Extract(sha256.New, key, nil) // fails for short keys and other hashes
	expanded, _ := hkdf.Expand(sha256.New, extracted, info, size)
	return expanded
}
