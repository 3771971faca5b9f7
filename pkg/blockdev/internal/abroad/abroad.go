// Package abroad is what pools of volumes have in common that are made, grown and deleted elsewhere, and only used here: remotepool and replicapool.
package abroad

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Pool is the part of a blockdev.Pool that has no volumes of its own, and a blockdev.Stackable.
type Pool struct {
	prefix string
	where  string
}

// New returns the part of a pool of a kind that a node has: devices over its volumes are named after both, as the kernel may be that of another user, too. where says in an error where the bytes
// of a volume are.
func New(kind, node, where string) Pool {
	return Pool{"ashlar-" + kind + "-" + HashOf(node) + "-", where}
}

// HashOf is a name as 16 hexadecimal digits.
func HashOf(name string) string {
	sum := sha256.Sum256([]byte(name))
	return hex.EncodeToString(sum[:8])
}

// Refuse is errdefs.ErrUnsupported for what is done where the bytes are.
func (p Pool) Refuse(what string, ref blockdev.Ref) error {
	return fmt.Errorf("%w: %s %s %s there", errdefs.ErrUnsupported, ref, p.where, what)
}

// Granularity: see blockdev.Pool. Sizes are chosen where volumes are made.
func (p Pool) Granularity() int64 { return blockdev.Granularity }

// Create: see blockdev.Pool. It always fails.
func (p Pool) Create(_ context.Context, spec blockdev.Spec) (blockdev.Record, error) {
	return blockdev.Record{}, p.Refuse("made", spec.Ref)
}

// Delete: see blockdev.Pool. It always fails.
func (p Pool) Delete(_ context.Context, ref blockdev.Ref) error { return p.Refuse("deleted", ref) }

// Erase: see blockdev.Pool. It always fails.
func (p Pool) Erase(_ context.Context, ref blockdev.Ref) error { return p.Refuse("erased", ref) }

// List has nothing: volumes are listed where they are.
func (p Pool) List(context.Context, blockdev.Kind, string, int) ([]blockdev.Record, error) {
	return nil, nil
}

// Capacity is none.
func (p Pool) Capacity(context.Context) (blockdev.Capacity, error) { return blockdev.Capacity{}, nil }

// Close gives nothing up: what is attached is the kernel's.
func (p Pool) Close() error { return nil }

// UUID is what the UUIDs of devices of the device mapper begin with over which lvm2 is not to look for anything.
const UUID = "LVM-NOT-OF-LVM-BUT-OF-THE-DRIVER-ASHLAR-"

// Prefix of the names of devices of the device mapper: none of another pool has it.
func (p Pool) Prefix() string { return p.prefix }

// Top: see blockdev.Stackable.
func (p Pool) Top(ref blockdev.Ref) (name, uuid, before string, err error) {
	name = p.prefix + ref.String()
	return name, UUID + name, UUID + name, nil
}

// ParseTop: see blockdev.Stackable.
func (p Pool) ParseTop(name string) (blockdev.Ref, bool) {
	text, ours := strings.CutPrefix(name, p.prefix)
	ref := blockdev.ParseRef(text)
	return ref, ours && ref.Validate() == nil
}
