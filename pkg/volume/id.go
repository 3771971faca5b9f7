package volume

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// ID names a volume or snapshot: KIND.POOL.KEY, for example
//
//	vol.default.9f86d081884c7d659a2feaa0c55ad015
//
// with a kind of vol or snap, the name of the pool that it was made in, and the key that KeyOf derives from the CSI name. None can be a path.
type ID struct {
	Kind blockdev.Kind
	Pool string
	Key  string
}

// KeyOf derives a key from a CSI name: the first 128 bits of its SHA-256. Names are
// neither shortened nor changed in case, so different names stay different.
func KeyOf(name string) string {
	sum := sha256.Sum256([]byte(name))
	return hex.EncodeToString(sum[:16])
}

// ParseID is the strict inverse of ID.String. Whatever is not an ID of this driver
// is ErrNotFound: there can be no such volume.
func ParseID(text string) (ID, error) {
	parts := strings.Split(text, ".")
	if len(parts) == 3 {
		id := ID{blockdev.Kind(parts[0]), parts[1], parts[2]}
		if (id.Kind == blockdev.Volume || id.Kind == blockdev.Snapshot) && blockdev.ValidPoolName(id.Pool) && blockdev.ValidKey(id.Key) {
			return id, nil
		}
	}
	return ID{}, fmt.Errorf("%w: %q is no volume or snapshot of this driver", errdefs.ErrNotFound, text)
}

func (id ID) String() string {
	if id == (ID{}) {
		return ""
	}
	return string(id.Kind) + "." + id.Pool + "." + id.Key
}

func (id ID) ref() blockdev.Ref { return blockdev.Ref{Kind: id.Kind, Key: id.Key} }

const groupPrefix = "group."

// GroupID names a group snapshot: group.KEY.
type GroupID struct{ Key string }

func (id GroupID) String() string { return groupPrefix + id.Key }

// ParseGroupID is the strict inverse of GroupID.String; ErrNotFound for all else.
func ParseGroupID(text string) (GroupID, error) {
	if key, ok := strings.CutPrefix(text, groupPrefix); ok && blockdev.ValidKey(key) {
		return GroupID{key}, nil
	}
	return GroupID{}, fmt.Errorf("%w: %q is no group snapshot of this driver", errdefs.ErrNotFound, text)
}
