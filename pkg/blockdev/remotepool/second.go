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

// A volume that moves while this node uses it is connected to two homes (docs/decisions/moving-in-use.md). The first leg is the connection of the present
// claim, or a device of this node's own. The second leg has the generation that the claim gets when the volume has moved. Calls for the volume do not see
// a second leg before it is the only one that is used.

// Leg is a connection of a volume, as the kernel has it.
type Leg struct {
	blockdev.Device
	NQN        string
	Generation int64 // of its claim
	Live       bool
	Used       bool // it is mounted, or a device is over it
}

// Legs returns all connections of a volume that are this node's.
func (p *Pool) Legs(ref blockdev.Ref) ([]Leg, error) {
	connected, err := p.of(ref)
	var legs []Leg
	for _, c := range connected {
		legs = append(legs, Leg{blockdev.Device{Path: c.Path, Number: c.Number, Size: c.Size}, c.NQN, generationOf(c), c.Live(), inUse(c)})
	}
	return legs, err
}

// Connected returns the volumes to which this node has a connection.
func (p *Pool) Connected() (refs []blockdev.Ref, err error) {
	all, err := p.all(nqnPrefix)
	for ref := range all {
		refs = append(refs, ref)
	}
	return refs, err
}

// Second connects to the export of the new home of a volume that moves, or returns the connection that is there. Other second legs of the volume are
// disconnected first: errdefs.ErrInUse while one is used. errdefs.ErrUnavailable if the export is Otherwise, and not connected.
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
	p.note(export.NQN, func(k *known) { *k = known{second: true, record: export.Record} }) // before the connection: nobody must take it for the volume
	c, err := p.kernel.Connect(ctx, export.Connection)
	if err == nil {
		c, err = p.proved(ctx, c, export)
	}
	if err != nil {
		return blockdev.Device{}, fmt.Errorf("%s at its new home: %w", ref, err)
	}
	return blockdev.Device{Path: c.Path, Number: c.Number, Size: c.Size}, nil
}

// Take makes a second leg the connection of its volume, which has moved to the node home.
func (p *Pool) Take(nqn, home string) {
	p.note(nqn, func(k *known) { *k = known{made: true, home: home, record: k.record} })
}

// Drop disconnects one leg, and tells no home. If there is no such connection, it does nothing. errdefs.ErrInUse while something is over it.
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

// End disconnects one leg, whatever is over it: that gets errors.
func (p *Pool) End(ctx context.Context, nqn string) error { return p.disconnect(ctx, nqn) }

// firsts returns the connections of one volume without its second legs.
func (p *Pool) firsts(connected []nvme.Device) (firsts []nvme.Device) {
	for _, c := range connected {
		if !p.isSecond(c, connected) {
			firsts = append(firsts, c)
		}
	}
	return firsts
}

// isSecond reports whether c, one of the connections of a volume, is a second leg: this process made it so (Second); a device over it is of the stack of
// another pool; or a connection of an earlier claim still has a device over it. When the volume has moved, and its devices are over nothing else, it is no
// second leg any more.
func (p *Pool) isSecond(c nvme.Device, connected []nvme.Device) bool {
	return p.knownOf(c.NQN).second || p.stackedElsewhere(c) || slices.ContainsFunc(connected, func(other nvme.Device) bool {
		return generationOf(other) < generationOf(c) && stacked(other)
	})
}

// mirrored reports whether more than one of the connections has a device over it.
func (p *Pool) mirrored(connected []nvme.Device) bool {
	n := 0
	for _, c := range connected {
		if stacked(c) {
			n++
		}
	}
	return n > 1
}

// stackedElsewhere reports whether a device over a connection has a name that is none of this pool's.
func (p *Pool) stackedElsewhere(c nvme.Device) bool {
	return slices.ContainsFunc(holders(c), func(holder string) bool {
		name, err := os.ReadFile(filepath.Join("/sys/block", filepath.Base(holder), "dm/name"))
		return err == nil && !strings.HasPrefix(string(name), p.Prefix())
	})
}
