package volume

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/ashlar-csi/ashlar/internal/fsync"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// keySize is the length of Exporting.Key, in bytes.
const keySize = 32

// ExportKey returns the key for Exporting from a file. If there is no file it makes one of mode 0600, durably: with another key the consumers that are
// connected could not connect again. ErrDataLoss for a file of another length.
func ExportKey(path string) ([]byte, error) {
	key, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		key = make([]byte, keySize)
		_, _ = rand.Read(key) // it never fails
		err = writeKey(path, key)
	}
	if err == nil && len(key) != keySize {
		err = fmt.Errorf("%w: it has %d bytes, not %d; remove it, and a new one is made: what other nodes use of this one has to be staged again then", errdefs.ErrDataLoss, len(key), keySize)
	}
	if err != nil {
		return nil, fmt.Errorf("key for exports %s: %w", path, err)
	}
	return key, nil
}

// writeKey makes the file with all of the key, or not at all.
func writeKey(path string, key []byte) (err error) {
	temporary := path + ".new"
	f, err := os.OpenFile(temporary, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(key)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(temporary, path); err != nil {
		return err
	}
	return fsync.AndClose(os.Open(filepath.Dir(path)))
}
