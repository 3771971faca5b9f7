// Package abroad is what remotepool and replicapool have in common: their volumes are made, grown and deleted elsewhere, and only used here.
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

// New returns that part of a pool of a kind, on a node. The names of devices over its volumes begin with both, as other nodes may use the same kernel.
// where says in errors where the bytes of a volume are.
func New(kind, node, where string) Pool {
	return Pool{"ashlar-" + kind + "-" + HashOf(node) + "-", where}
}

// HashOf returns a hash of a name, as 16 hexadecimal digits.
func HashOf(name string) string {
	sum := sha256.Sum256([]byte(name))
	return hex.EncodeToString(sum[:8])
}

// Refuse returns errdefs.ErrUnsupported for what can only be done where the bytes are.
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

// UUID begins the UUIDs of devices of the device mapper that lvm2 must not read.
const UUID = "LVM-NOT-OF-LVM-BUT-OF-THE-DRIVER-ASHLAR-"

// Prefix returns how the names of the pool's devices of the device mapper begin. No other pool's do.
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
