// Package replicapool is the pool of the volumes with several legs that this node uses (docs/replication.md). The device of such a volume is a mirror
// (package mirror) over the devices of its legs, which are volumes of their own. Its record is that of a current leg.
//
// What is attached is asked of this kernel alone, so that what was done here can be undone whoever is away. Volumes are made, grown and deleted by those
// who make their legs.
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

// Legs knows the legs of volumes, and opens them. pool and ref are a volume's. errdefs.ErrUnavailable if something is not known now, or no current leg
// answers.
type Legs interface {
	// Generation returns the generation of the claim of a volume for this node, as far as it is known without asking; false if there is no claim.
	Generation(ref blockdev.Ref) (int64, bool)
	// Open opens the legs of a volume for this node's claim. Those that it returns are equal, the near one first, and are the volume's list before it
	// returns, so before anybody reads or writes. The caller closes their devices.
	Open(ctx context.Context, pool string, ref blockdev.Ref) (Opened, error)
	// Record returns the record of a volume, from a current leg.
	Record(ctx context.Context, pool string, ref blockdev.Ref) (blockdev.Record, error)
	// SetLabels changes labels of the record on all current legs. After an error some may have the change: it has to be called again.
	SetLabels(ctx context.Context, pool string, ref blockdev.Ref, change func(labels map[string]string) error) (blockdev.Record, error)
	// Grow has this kernel take the size that all legs have by now, and returns it, in bytes.
	Grow(ctx context.Context, ref blockdev.Ref) (int64, error)
	// Names returns the names of those legs of a volume whose devices here are among some, as far as that is known. What is over the lowest device of a leg goes
	// with the mirror.
	Names(ctx context.Context, ref blockdev.Ref, devices []uint64) []string
	// Close closes all legs that this node has open of a volume whose mirror is gone. equal has the names of the mirror's legs, if all of them were equal and
	// flushed when it went.
	Close(ctx context.Context, ref blockdev.Ref, equal []string) error
	// Health returns what is wrong with the legs of a volume that is used here, as far as it is known here.
	Health(ref blockdev.Ref, s mirror.State) []blockdev.Problem
}

// Opened has the legs of a volume that are open, and current.
type Opened struct {
	Generation int64 // of the claim
	Legs       []blockdev.Device
	Size       int64 // bytes that all of them have
}

// Pool is the pool of volumes with several legs. It has no name and no volumes: Named returns it as the pool of a name.
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

// New returns the pool of the volumes with several legs that a node uses. errdefs.ErrUnsupported if the kernel cannot mirror.
func New(node string, legs Legs) (*Pool, error) {
	return &Pool{Pool: abroad.New("replicated", node, "has its bytes in several legs, and is"), node: node, legs: legs}, dm.CanMirror()
}

// Named returns the pool for the volumes whose IDs name a pool of that name.
func (p *Pool) Named(name string) blockdev.Pool { return &Pool{p.Pool, p.node, p.legs, name} }

// Name returns the pool that the IDs of its volumes name.
func (p *Pool) Name() string { return p.name }

// check returns an error for a Ref that no volume of the pool can have.
func (p *Pool) check(ref blockdev.Ref) error {
	err := ref.Validate()
	if err == nil && (ref.Kind != blockdev.Volume || p.name == "") {
		err = fmt.Errorf("%w: no %s with several legs is used here", errdefs.ErrNotFound, ref)
	}
	return err
}

// Get: see blockdev.Pool. errdefs.ErrPrecondition while a mirror of an earlier claim is in use, which leads nowhere any more.
func (p *Pool) Get(ctx context.Context, ref blockdev.Ref) (blockdev.Record, error) {
	if err := p.check(ref); err != nil {
		return blockdev.Record{}, err
	}
	d, earlier, err := p.find(ref)
	if err == nil && earlier && d.Opens > 0 {
		err = p.outlived(d, ref)
	}
	if err != nil {
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

// Expand: see blockdev.Pool. All legs were grown before; the mirror gets the size of the record. errdefs.ErrUnavailable if a leg is smaller. A leg that joins
// leaves before, and begins anew: the kernel's log of what was copied to it has the size that the volume had then. errdefs.ErrUnavailable for the moment in
// which it is about to be current.
func (p *Pool) Expand(ctx context.Context, ref blockdev.Ref, size int64) (blockdev.Record, error) {
	record, err := p.Get(ctx, ref)
	if err != nil {
		return blockdev.Record{}, err
	}
	if size > record.Size {
		return blockdev.Record{}, p.Refuse("grown", ref)
	}
	s, err := mirror.Look(p.Mirror(ref))
	if errors.Is(err, errdefs.ErrNotFound) {
		return record, nil
	}
	if err != nil {
		return blockdev.Record{}, err
	}
	have, err := p.legs.Grow(ctx, ref)
	if err == nil && have < size {
		err = fmt.Errorf("%w: a leg of %s has %d bytes, and is to have %d", errdefs.ErrUnavailable, ref, have, size)
	}
	if err == nil && s.Joining != nil && s.Size < record.Size {
		if err = mirror.Yield(ctx, p.Mirror(ref)); err == nil {
			klog.FromContext(ctx).Info("A volume with replicas grows while one of them joins, which begins anew", "volume", ref.String(), "copied", s.Synced, "of", s.Total)
		}
	}
	if err == nil {
		err = mirror.Resize(ctx, p.Mirror(ref), record.Size)
	}
	return record, err
}

// Attach: see blockdev.Pool. The device stays until Detach, also without Keep: what its last user wrote has to be on all legs before these are closed.
// errdefs.ErrPrecondition while a mirror is in use that leads nowhere any more (usable).
func (p *Pool) Attach(ctx context.Context, ref blockdev.Ref, how blockdev.Attachment) (blockdev.Device, error) {
	err := p.check(ref)
	if err == nil && how.ReadOnly {
		err = p.Refuse("copied", ref)
	}
	if err != nil {
		return blockdev.Device{}, err
	}
	name := p.Mirror(ref)
	d, err := p.usable(ctx, ref)
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

// find returns the mirror of a volume, and whether it is of an earlier claim than the present one, as far as that is known; nil if there is none.
func (p *Pool) find(ref blockdev.Ref) (d *dm.Device, earlier bool, err error) {
	d, err = dm.Find(p.Mirror(ref))
	if err != nil || d == nil || !d.Live {
		return nil, false, err
	}
	of, _, err := p.Generation(ref)
	now, known := p.legs.Generation(ref)
	return d, known && now != of, err
}

// usable returns the mirror of the present claim, or of any claim if the present one is not known; nil if there is none. A mirror of an earlier claim is
// removed, and so is one that has ended (mirror.End): from either nobody reads anything any more. errdefs.ErrPrecondition while that is in use.
func (p *Pool) usable(ctx context.Context, ref blockdev.Ref) (*dm.Device, error) {
	d, earlier, err := p.find(ref)
	if err != nil || d == nil {
		return nil, err
	}
	s, err := mirror.Look(d.Name)
	switch ended := len(s.Legs) == 0; {
	case err != nil:
		return nil, errdefs.IgnoreNotFound(err)
	case !earlier && !ended:
		return d, nil
	case earlier && d.Opens > 0:
		return nil, p.outlived(d, ref)
	case d.Opens > 0:
		return nil, fmt.Errorf("%w: %s is %s, all of whose legs had failed, so that its users get errors, and it is still mounted or open on node %s; unpublish and unstage it first", errdefs.ErrPrecondition, d.Path(), ref, p.node)
	}
	return nil, p.Detach(ctx, ref)
}

// outlived returns the error for a mirror of an earlier claim that is in use.
func (p *Pool) outlived(d *dm.Device, ref blockdev.Ref) error {
	return fmt.Errorf("%w: %s is %s by a claim of before, which has ended, and it is still mounted or open on node %s; unpublish and unstage it first", errdefs.ErrPrecondition, d.Path(), ref, p.node)
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

// Detach: see blockdev.Pool. After success, what was written is on all legs. errdefs.ErrUnavailable while it cannot be: a leg does not answer, and is
// still current.
func (p *Pool) Detach(ctx context.Context, ref blockdev.Ref) error {
	if err := ref.Validate(); err != nil {
		return err
	}
	name := p.Mirror(ref)
	d, err := dm.Find(name)
	if err != nil {
		return err
	}
	var equal []string
	if d != nil && d.Live {
		devices, err := p.settle(ctx, d)
		if err != nil {
			return err
		}
		if len(devices) > 0 {
			equal = p.legs.Names(ctx, ref, devices)
		}
	}
	if err := p.remove(ctx, name); err != nil { // also if it went with its last user: something may be left beside it
		return err
	}
	return p.legs.Close(ctx, ref, equal)
}

// settle writes out the page cache of a mirror. It returns the devices of the mirror's legs if all of them have everything, and else none.
func (p *Pool) settle(ctx context.Context, d *dm.Device) (equal []uint64, err error) {
	if err := mirror.Recover(ctx, d.Name); err != nil { // a start comes here before anybody else has; a mirror that was left suspended would be waited for
		return nil, err
	}
	s, err := mirror.Look(d.Name)
	if err != nil {
		return nil, err
	}
	if len(s.Failed()) == len(s.Legs) || s.Held {
		return nil, nil // a sync would fail, or wait for ever; what was not acknowledged is given up
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
	if err != nil || len(s.Failed()) > 0 || s.Held || s.Forgot {
		return nil, err
	}
	for _, l := range s.Legs {
		equal = append(equal, l.Device)
	}
	return equal, nil
}

// remove removes a mirror. errdefs.ErrInUse while somebody has it open.
func (p *Pool) remove(ctx context.Context, name string) error {
	inUse, err := mirror.Remove(ctx, name)
	if err == nil && inUse {
		err = fmt.Errorf("%w: %s is held by a mount, or by a device over it", errdefs.ErrInUse, name)
	}
	return err
}

// Health: see blockdev.Pool. It asks the kernel, and the Legs of what is known here.
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

// PoolHealth returns what is wrong with all mirrors.
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

// Orphans: see blockdev.Pool. They are the mirrors that nobody has open, as a crash may have come before anything was over them.
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

// Mirrors returns the volumes that have a mirror here, with the generation of the claim that each was made for.
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

// Generation returns the generation of the claim that the mirror of a volume was made for; false if there is no mirror. errdefs.ErrPrecondition if a
// device that is none of ours has its name.
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

// Mirror returns the name of the mirror of a volume.
func (p *Pool) Mirror(ref blockdev.Ref) string { return p.Prefix() + ref.String() + mirrorSuffix }

func (p *Pool) uuidPrefix(ref blockdev.Ref) string { return abroad.UUID + "mirror-" + ref.Key + "-" }

func (p *Pool) uuid(ref blockdev.Ref, generation int64) string {
	return p.uuidPrefix(ref) + strconv.FormatInt(generation, 10)
}
