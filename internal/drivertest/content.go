package drivertest

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
)

// Content is random bytes that a test writes to a volume. The same seed gives the same bytes.
type Content struct {
	Seed         string
	Offset, Size int64
}

// Bytes returns the bytes.
func (c Content) Bytes() []byte {
	random := rand.NewChaCha8(sha256.Sum256([]byte(c.Seed)))
	all := make([]byte, c.Size)
	_, _ = random.Read(all)
	return all
}

// Write writes the bytes to a device, or to a file, which it creates if need be, and syncs it.
func (c Content) Write(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(c.Bytes(), c.Offset)
	return errors.Join(err, f.Sync(), f.Close())
}

// In returns an error unless a device or file has the bytes.
func (c Content) In(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	have := make([]byte, c.Size)
	if _, err := f.ReadAt(have, c.Offset); err != nil {
		return err
	}
	if !bytes.Equal(have, c.Bytes()) {
		return fmt.Errorf("%s does not hold what was written and synced (%q)", path, c.Seed)
	}
	return nil
}
