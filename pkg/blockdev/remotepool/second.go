package remotepool

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/nvme"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// A volume that moves while this node uses it is connected to two homes (docs/decisions/moving-in-use.md): its first leg is that of the claim that there
// is, or a device of this node's own; the second one has the generation that the claim gets when the volume has moved. Of a second leg no call for the volume
// sees anything before it is the only one that is used.

// Leg is a connection of a volume, as the kernel has it.
type Leg struct {
	blockdev.Device
	NQN        string
	Generation int64 // of the claim that it is for
	Live       bool
	Used       bool // something is over it
}

// Legs are all connections of a volume that are this node's.
func (p *Pool) Legs(ref blockdev.Ref) ([]Leg, error) {
	connected, err := p.of(ref)
	var legs []Leg
	for _, c := range connected {
		legs = append(legs, Leg{blockdev.Device{Path: c.Path, Number: c.Number, Size: c.Size}, c.NQN, generationOf(c), c.Live(), inUse(c)})
	}
	return legs, err
}

// Connected are the volumes that have a connection of this node's.
func (p *Pool) Connected() (refs []blockdev.Ref, err error) {
	all, err := p.all(nqnPrefix)
	for ref := range all {
		refs = append(refs, ref)
	}
	return refs, err
}

// Second connects to what the new home of a volume that moves exports, or finds that it is connected. Second legs of another name end; errdefs.ErrInUse if one is
// still used.
func (p *Pool) Second(ctx context.Context, ref blockdev.Ref, export Export) (blockdev.Device, error) {
	if err := p.checkExport(export, ref); err != nil {
		return blockdev.Device{}, err
	}
	connected, err := p.of(ref)
	if err != nil {
		return blockdev.Device{}, err
	}
	if export.Otherwise && !slices.ContainsFunc(connected, func(c nvme.Device) bool { return c.NQN == export.NQN }) {
		return blockdev.Device{}, fmt.Errorf("%w: the new home of %s exports it since before it was to do so with TLS, or without; nothing was connected", errdefs.ErrUnavailable, ref)
	}
	firsts := p.firsts(connected)
	for _, c := range connected {
		if c.NQN != export.NQN && !slices.Contains(firsts, c) {
			if err := p.Drop(ctx, c.NQN); err != nil {
				return blockdev.Device{}, err
			}
		}
	}
	p.note(export.NQN, func(k *known) { *k = known{second: true, record: export.Record} }) // first: nobody is to take it for the volume
	c, err := p.kernel.Connect(ctx, export.Connection)
	if err == nil {
		c, err = p.proved(ctx, c, export)
	}
	if err != nil {
		return blockdev.Device{}, fmt.Errorf("%s at its new home: %w", ref, err)
	}
	return blockdev.Device{Path: c.Path, Number: c.Number, Size: c.Size}, nil
}

// Take makes a second leg the connection of its volume, which has moved to a node.
func (p *Pool) Take(nqn, home string) {
	p.note(nqn, func(k *known) { *k = known{made: true, home: home, record: k.record} })
}

// Drop disconnects one leg, and tells nobody; that it is not connected is success. errdefs.ErrInUse while something is over it.
func (p *Pool) Drop(ctx context.Context, nqn string) error {
	list, err := p.kernel.List(nqn)
	if err != nil {
		return fmt.Errorf("look for the connection %s: %w", nqn, err)
	}
	for _, c := range list {
		if c.NQN == nqn && staysInUse(ctx, c) {
			return fmt.Errorf("%w: %s is held by a mount, or by a device over it", errdefs.ErrInUse, c.Path)
		}
	}
	return p.disconnect(ctx, nqn)
}

// End disconnects one leg whatever is over it, which gets errors.
func (p *Pool) End(ctx context.Context, nqn string) error { return p.disconnect(ctx, nqn) }

// firsts are connections of one volume without its second legs.
func (p *Pool) firsts(connected []nvme.Device) (firsts []nvme.Device) {
	for _, c := range connected {
		if !p.isSecond(c, connected) {
			firsts = append(firsts, c)
		}
	}
	return firsts
}

// isSecond reports whether one of the connections of a volume is a second leg: this process has made it one; or what is over it is the stack of a pool of this
// node, or also over the connection of an earlier claim. When the volume has moved, and nothing else is below its devices, it is none any more.
func (p *Pool) isSecond(c nvme.Device, connected []nvme.Device) bool {
	return p.knownOf(c.NQN).second || p.stackedElsewhere(c) || slices.ContainsFunc(connected, func(other nvme.Device) bool {
		return generationOf(other) < generationOf(c) && stacked(other)
	})
}

// mirrored reports whether what is over a connection is over another one too.
func (p *Pool) mirrored(connected []nvme.Device) bool {
	n := 0
	for _, c := range connected {
		if stacked(c) {
			n++
		}
	}
	return n > 1
}

// stackedElsewhere reports whether what is over a connection has not a name of this pool.
func (p *Pool) stackedElsewhere(c nvme.Device) bool {
	return slices.ContainsFunc(holders(c), func(holder string) bool {
		name, err := os.ReadFile(filepath.Join("/sys/block", filepath.Base(holder), "dm/name"))
		return err == nil && !strings.HasPrefix(string(name), p.Prefix())
	})
}
