package drivertest

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
)

// Content is what the user of a volume writes to it: bytes that nobody else writes.
type Content struct {
	Seed         string
	Offset, Size int64
}

// Bytes are the bytes themselves.
func (c Content) Bytes() []byte {
	random := rand.NewChaCha8(sha256.Sum256([]byte(c.Seed)))
	all := make([]byte, c.Size)
	_, _ = random.Read(all)
	return all
}

// Write writes it to a device, or to a file, which is made, durably.
func (c Content) Write(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(c.Bytes(), c.Offset)
	return errors.Join(err, f.Sync(), f.Close())
}

// In makes sure that a device or file holds it.
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
