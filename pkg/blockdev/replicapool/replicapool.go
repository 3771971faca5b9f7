// Package replicapool is the pool of the volumes with several legs that this node uses (docs/replication.md). The device of such a volume is a mirror over those of its legs (package mirror), which are volumes of their own; its record is
// that of a leg that is current.
//
// What is attached is asked of this kernel alone, so that what was done here can be undone whoever is away. Volumes are made, grown and deleted by those who make their legs.
package replicapool

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/abroad"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/mirror"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Legs knows the legs of volumes, and opens them. pool and ref are a volume's. errdefs.ErrUnavailable: that is not known now, or no leg that is current answers.
type Legs interface {
	// Generation is that of the claim of a volume for this node, as far as that is known without asking; false if it has none.
	Generation(ref blockdev.Ref) (int64, bool)
	// Open opens the legs of a volume for the claim that this node has, and has those that it returns be the ones that are current, before anybody reads or writes. They are equal; the near one comes first. The caller closes them.
	Open(ctx context.Context, pool string, ref blockdev.Ref) (Opened, error)
	// Record of a volume, by a leg that is current.
	Record(ctx context.Context, pool string, ref blockdev.Ref) (blockdev.Record, error)
	// SetLabels changes labels of the record on all legs that are current, or fails; then it is to be called again.
	SetLabels(ctx context.Context, pool string, ref blockdev.Ref, change func(labels map[string]string) error) (blockdev.Record, error)
	// Grow has this kernel know the size that all legs have by now, which it returns, in bytes.
	Grow(ctx context.Context, ref blockdev.Ref) (int64, error)
	// Close gives back all legs that this node has of a volume that has no mirror any more. equal are the devices of those that it was over, if they were all equal, and flushed, when it went.
	Close(ctx context.Context, ref blockdev.Ref, equal []uint64) error
	// Health is what is wrong with the legs of a volume that is used here, as far as that is known here.
	Health(ref blockdev.Ref, s mirror.State) []blockdev.Problem
}

// Opened are the legs of a volume that are open, and current.
type Opened struct {
	Generation int64 // of the claim
	Legs       []blockdev.Device
	Size       int64 // bytes that all of them have
}

// Pool is that of volumes with several legs. It has no name, and no volume: those are in the pools that it is named.
type Pool struct {
	abroad.Pool
	node string
	legs Legs
	name string
}

var (
	_ blockdev.Pool      = (*Pool)(nil)
	_ blockdev.Stackable = (*Pool)(nil)
)

// New returns the pool of the volumes with several legs that a node uses. errdefs.ErrUnsupported without a kernel that can mirror.
func New(node string, legs Legs) (*Pool, error) {
	return &Pool{Pool: abroad.New("replicated", node, "has its bytes in several legs, and is"), node: node, legs: legs}, mirror.Available()
}

// Named is the pool as that of volumes in the pool of a name, which is what their IDs name.
func (p *Pool) Named(name string) blockdev.Pool { return &Pool{p.Pool, p.node, p.legs, name} }

// Name is what the IDs of its volumes name.
func (p *Pool) Name() string { return p.name }

func (p *Pool) check(ref blockdev.Ref) error {
	err := ref.Validate()
	if err == nil && (ref.Kind != blockdev.Volume || p.name == "") {
		err = fmt.Errorf("%w: no %s with several legs is used here", errdefs.ErrNotFound, ref)
	}
	return err
}

// Get: see blockdev.Pool.
func (p *Pool) Get(ctx context.Context, ref blockdev.Ref) (blockdev.Record, error) {
	if err := p.check(ref); err != nil {
		return blockdev.Record{}, err
	}
	return p.legs.Record(ctx, p.name, ref)
}

// SetLabels: see blockdev.Pool.
func (p *Pool) SetLabels(ctx context.Context, ref blockdev.Ref, change func(labels map[string]string) error) (blockdev.Record, error) {
	if err := p.check(ref); err != nil {
		return blockdev.Record{}, err
	}
	return p.legs.SetLabels(ctx, p.name, ref, change)
}

// Expand: see blockdev.Pool. All legs were grown before; the mirror gets what all of them have.
func (p *Pool) Expand(ctx context.Context, ref blockdev.Ref, size int64) (blockdev.Record, error) {
	record, err := p.Get(ctx, ref)
	if err != nil {
		return blockdev.Record{}, err
	}
	if size > record.Size {
		return blockdev.Record{}, p.Refuse("grown", ref)
	}
	if _, err := mirror.Look(p.Mirror(ref)); errors.Is(err, errdefs.ErrNotFound) {
		return record, nil
	}
	have, err := p.legs.Grow(ctx, ref)
	if err == nil && have < size {
		err = fmt.Errorf("%w: a leg of %s has %d bytes, and is to have %d", errdefs.ErrUnavailable, ref, have, size)
	}
	if err == nil {
		err = mirror.Resize(ctx, p.Mirror(ref), record.Size)
	}
	return record, err
}

// Attach: see blockdev.Pool. The device stays until Detach, also without Keep: what its last user has written is to be on all legs before these are given back. errdefs.ErrPrecondition while a mirror of an earlier claim is in use, which leads nowhere any more.
func (p *Pool) Attach(ctx context.Context, ref blockdev.Ref, how blockdev.Attachment) (blockdev.Device, error) {
	err := p.check(ref)
	if err == nil && how.ReadOnly {
		err = p.Refuse("copied", ref)
	}
	if err != nil {
		return blockdev.Device{}, err
	}
	name := p.Mirror(ref)
	d, err := p.earlier(ctx, ref)
	if err != nil {
		return blockdev.Device{}, err
	}
	if d != nil {
		return p.device(d, how)
	}
	opened, err := p.legs.Open(ctx, p.name, ref)
	if err != nil {
		return blockdev.Device{}, err
	}
	numbers := make([]uint64, len(opened.Legs))
	for i, leg := range opened.Legs {
		numbers[i] = leg.Number
	}
	err = mirror.Make(ctx, name, p.uuid(ref, opened.Generation), opened.Size, numbers...)
	for i := range opened.Legs {
		err = errors.Join(err, opened.Legs[i].Close())
	}
	if err != nil {
		return blockdev.Device{}, fmt.Errorf("mirror of %s: %w", ref, err)
	}
	if d, err = dm.Find(name); err == nil && d == nil {
		err = unix.ENODEV
	}
	if err != nil {
		return blockdev.Device{}, err
	}
	return p.device(d, how)
}

// earlier returns the mirror that is there by the claim that there is, or as long as that is not known by any; nil if there is none. One by a claim of before goes, unless it is in use.
func (p *Pool) earlier(ctx context.Context, ref blockdev.Ref) (*dm.Device, error) {
	d, err := dm.Find(p.Mirror(ref))
	if err != nil || d == nil || !d.Live {
		return nil, err
	}
	of, _, err := p.Generation(ref)
	if err != nil {
		return nil, err
	}
	if now, known := p.legs.Generation(ref); !known || now == of {
		return d, nil
	}
	if d.Opens > 0 {
		return nil, fmt.Errorf("%w: %s is %s by a claim of before, which has ended, and it is still mounted or open on node %s; unpublish and unstage it first", errdefs.ErrPrecondition, d.Path(), ref, p.node)
	}
	return nil, p.Detach(ctx, ref)
}

func (p *Pool) device(d *dm.Device, how blockdev.Attachment) (blockdev.Device, error) {
	size, err := mirror.Size(d.Name)
	return blockdev.Device{Path: d.Path(), Number: d.Number, Size: size, Kept: how.Keep}, err
}

// Attached: see blockdev.Pool.
func (p *Pool) Attached(_ context.Context, ref blockdev.Ref) ([]blockdev.Device, error) {
	if err := ref.Validate(); err != nil {
		return nil, err
	}
	d, err := dm.Find(p.Mirror(ref))
	if err != nil || d == nil || !d.Live {
		return nil, err
	}
	one, err := p.device(d, blockdev.Attachment{})
	return []blockdev.Device{one}, err
}

// Detach: see blockdev.Pool. What was written is on all legs when it returns without an error. errdefs.ErrUnavailable while that cannot be: a leg does not answer, and is still current.
func (p *Pool) Detach(ctx context.Context, ref blockdev.Ref) error {
	if err := ref.Validate(); err != nil {
		return err
	}
	name := p.Mirror(ref)
	d, err := dm.Find(name)
	if err != nil {
		return err
	}
	var equal []uint64
	if d != nil && d.Live {
		if equal, err = p.settle(ctx, d); err != nil {
			return err
		}
	}
	if d != nil {
		if err := p.remove(ctx, name); err != nil {
			return err
		}
	}
	return p.legs.Close(ctx, ref, equal)
}

// settle writes out what the page cache has of a mirror, and returns the devices of its legs, if all of them have everything.
func (p *Pool) settle(ctx context.Context, d *dm.Device) (equal []uint64, err error) {
	s, err := mirror.Look(d.Name)
	if err != nil {
		return nil, err
	}
	if len(s.Failed()) == len(s.Legs) || s.Held {
		return nil, nil // nobody has what was not acknowledged
	}
	f, err := dm.Open(d, os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	if err = errors.Join(f.Sync(), f.Close()); err != nil {
		klog.FromContext(ctx).Error(err, "Could not write out what was written to a mirror; taking it down all the same", "mirror", d.Name)
		return nil, nil
	}
	s, err = mirror.Look(d.Name)
	if err != nil || len(s.Failed()) > 0 || s.Held {
		return nil, err
	}
	for _, l := range s.Legs {
		equal = append(equal, l.Device)
	}
	return equal, nil
}

// remove takes a mirror away.
func (p *Pool) remove(ctx context.Context, name string) error {
	inUse, err := mirror.Remove(ctx, name)
	if err == nil && inUse {
		err = fmt.Errorf("%w: %s is held by a mount, or by a device over it", errdefs.ErrInUse, name)
	}
	return err
}

// Health: see blockdev.Pool. It asks the kernel, and what is known here.
func (p *Pool) Health(_ context.Context, ref blockdev.Ref) ([]blockdev.Problem, error) {
	if err := p.check(ref); err != nil {
		return nil, err
	}
	s, err := mirror.Look(p.Mirror(ref))
	if errors.Is(err, errdefs.ErrNotFound) {
		return nil, nil
	}
	return p.legs.Health(ref, s), err
}

// PoolHealth is what is wrong with all mirrors.
func (p *Pool) PoolHealth(context.Context) (problems []blockdev.Problem) {
	refs, err := p.Mirrors()
	if err != nil {
		return []blockdev.Problem{{Severity: blockdev.Degraded, Reason: "MirrorsUnknown", Message: errdefs.Words(err)}}
	}
	for ref := range refs {
		if s, err := mirror.Look(p.Mirror(ref)); err == nil {
			problems = append(problems, p.legs.Health(ref, s)...)
		}
	}
	return problems
}

// Orphans: see blockdev.Pool. They are the mirrors that nothing is over: a crash may have come before there was.
func (p *Pool) Orphans(ctx context.Context) (map[blockdev.Ref][]blockdev.Device, error) {
	refs, err := p.Mirrors()
	found := map[blockdev.Ref][]blockdev.Device{}
	for ref := range refs {
		d, failure := dm.Find(p.Mirror(ref))
		if failure != nil || d == nil || d.Opens > 0 {
			continue
		}
		devices, failure := p.Attached(ctx, ref)
		if failure == nil {
			found[ref] = devices
		}
	}
	return found, err
}

// Mirrors are the volumes that have a mirror here, with the generation of the claim by which it was made.
func (p *Pool) Mirrors() (map[blockdev.Ref]int64, error) {
	names, err := dm.Names(p.Prefix())
	found := map[blockdev.Ref]int64{}
	for _, name := range names {
		text, is := strings.CutSuffix(strings.TrimPrefix(name, p.Prefix()), mirrorSuffix)
		ref := blockdev.ParseRef(text)
		if !is || ref.Validate() != nil {
			continue
		}
		generation, is, failure := p.Generation(ref)
		if err = errors.Join(err, failure); is {
			found[ref] = generation
		}
	}
	return found, err
}

// Generation is that of the claim by which the mirror of a volume was made; false if there is none.
func (p *Pool) Generation(ref blockdev.Ref) (generation int64, is bool, err error) {
	d, err := dm.Find(p.Mirror(ref))
	if err != nil || d == nil || !d.Live {
		return 0, false, err
	}
	text, is := strings.CutPrefix(d.UUID, p.uuidPrefix(ref))
	if !is {
		return 0, false, fmt.Errorf("%w: the device %s is none of this driver: its UUID is %q", errdefs.ErrPrecondition, d.Name, d.UUID)
	}
	generation, err = strconv.ParseInt(text, 10, 64)
	return generation, err == nil, err
}

// Has reports whether a volume has a mirror here.
func (p *Pool) Has(ref blockdev.Ref) bool {
	_, is, err := p.Generation(ref)
	return is && err == nil
}

const mirrorSuffix = "-mirror"

// Mirror is the name of the mirror of a volume.
func (p *Pool) Mirror(ref blockdev.Ref) string { return p.Prefix() + ref.String() + mirrorSuffix }

func (p *Pool) uuidPrefix(ref blockdev.Ref) string { return abroad.UUID + "mirror-" + ref.Key + "-" }

func (p *Pool) uuid(ref blockdev.Ref, generation int64) string {
	return p.uuidPrefix(ref) + strconv.FormatInt(generation, 10)
}
