package nvmet

import (
	"encoding/base64"
	"encoding/binary"
	"hash/crc32"

	"github.com/ashlar-csi/ashlar/internal/secret"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/psk"
)

// Secret returns 32 random bytes as the secret that target and host take: "DHHC-1:00:", the bytes with their CRC-32 in base64, and a colon (NVM Express
// Base Specification 2.0, 8.13.5.8).
func Secret(key []byte) secret.Text {
	return secret.Of("DHHC-1:00:" + base64.StdEncoding.EncodeToString(binary.LittleEndian.AppendUint32(key[:len(key):len(key)], crc32.ChecksumIEEE(key))) + ":")
}

// PSK returns 32 random bytes as the secret of TLS that target and host take: "NVMeTLSkey-1:01:...".
func PSK(key []byte) secret.Text { return psk.Secret(key) }
