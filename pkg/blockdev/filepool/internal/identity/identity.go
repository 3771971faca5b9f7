// Package identity reads and writes the identity of a file pool. It is in the file "pool", twice: so a pool that lost one copy is still known.
//
//	ashlar-pool 2 gen=1 len=48 crc32c=17b1c0de
//	{"id":"..."}
//
// Its version is that of the whole pool: a driver that does not know it changes nothing there. Pools of version 1 had no such file; they get one.
package identity

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/frame"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/layout"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/catalog"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// File is the name of the file.
const File = "pool"

const (
	apart   = 4096 // bytes from one copy to the other
	version = 2
	header  = "ashlar-pool"
)

// identity is what is in the file.
type identity struct {
	ID string `json:"id"` // a UUID
}

// ErrNoPool is for a directory without a pool.
var ErrNoPool = fmt.Errorf("%w: there is no pool", errdefs.ErrUnavailable)

// ErrNameless is for a pool of version 1, which has no identity.
var ErrNameless = errors.New("a pool without an identity")

// New returns a random UUID (RFC 9562, version 4).
func New() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // it never fails
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// Read returns the identity of the pool in a directory; whole is false if one of its copies is damaged. ErrNoPool or ErrNameless if there is none;
// errdefs.ErrUnsupported if the pool is of a newer version.
func Read(root *os.Root) (id string, whole bool, err error) {
	f, err := layout.Open(root, File)
	if errors.Is(err, fs.ErrNotExist) {
		for _, kind := range []blockdev.Kind{blockdev.Volume, blockdev.Snapshot} { // the directories of version 1
			if _, err := root.Stat(layout.Directories[kind]); errors.Is(err, fs.ErrNotExist) {
				return "", false, ErrNoPool
			} else if err != nil {
				return "", false, errdefs.FromErrno(err)
			}
		}
		return "", false, ErrNameless
	}
	if err != nil {
		return "", false, errdefs.FromErrno(err)
	}
	defer f.Close()
	whole = true
	for _, start := range []int64{0, apart} {
		var one string
		data, oneErr := frame.ReadPart(f, start, apart)
		if oneErr == nil {
			one, oneErr = decode(data)
		}
		switch {
		case errors.Is(oneErr, errdefs.ErrUnsupported), oneErr == nil && id != "" && one != id:
			return "", false, fmt.Errorf("%s: %w", File, errors.Join(oneErr, differ(id, one)))
		case oneErr != nil:
			whole, err = false, oneErr
		default:
			id = one
		}
	}
	if id == "" {
		return "", false, fmt.Errorf("%s: %w; nothing is changed: bring the file back from a backup", File, errdefs.FromErrno(err))
	}
	return id, whole, nil
}

// differ returns the error for two copies with different identities.
func differ(a, b string) error {
	if a == "" || b == "" {
		return nil
	}
	return fmt.Errorf("%w: two identities, %s and %s", catalog.ErrRecord, a, b)
}

func decode(data []byte) (string, error) {
	f, err := frame.Decode(header, data)
	if err != nil {
		return "", err
	}
	if f.Version != version {
		return "", fmt.Errorf("%w: the pool is of version %d, and this driver knows 1 and %d; use a newer driver", errdefs.ErrUnsupported, f.Version, version)
	}
	var is identity
	if err := json.Unmarshal(f.Body, &is); err != nil || is.ID == "" {
		return "", fmt.Errorf("%w: no identity", catalog.ErrRecord)
	}
	return is.ID, nil
}

// Write writes the identity of a pool, durably and in one step.
func Write(root *os.Root, id string) (err error) {
	body, err := json.Marshal(identity{id})
	if err != nil {
		return err
	}
	one := frame.Frame{Version: version, Generation: 1, Body: append(body, '\n')}.Encode(header)
	data := make([]byte, 2*apart)
	copy(data, one)
	copy(data[apart:], one)
	f, err := root.OpenFile(File+".new", os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return errdefs.FromErrno(err)
	}
	_, err = f.Write(data)
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("write the identity of the pool: %w", errdefs.FromErrno(err))
	}
	if err := root.Rename(File+".new", File); err != nil {
		return errdefs.FromErrno(err)
	}
	return layout.Sync(root)
}
