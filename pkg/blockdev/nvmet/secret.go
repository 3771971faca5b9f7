package nvmet

import (
	"crypto/rand"
	"encoding/base64"
	"encoding/binary"
	"hash/crc32"
)

// NewSecret returns a new secret, in the form in which target and host take it: "DHHC-1:00:", 32 random bytes with their CRC-32
// in base64, and a colon (NVM Express Base Specification 2.0, 8.13.5.8).
func NewSecret() string {
	key := make([]byte, 32)
	_, _ = rand.Read(key) // it never fails
	return secretOf(key)
}

func secretOf(key []byte) string {
	return "DHHC-1:00:" + base64.StdEncoding.EncodeToString(binary.LittleEndian.AppendUint32(key, crc32.ChecksumIEEE(key))) + ":"
}
