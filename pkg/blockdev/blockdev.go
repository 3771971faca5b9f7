// Package blockdev cuts block devices out of what a machine already has: files
// on a filesystem (loop devices) or logical volumes. It is a leaf: it knows bytes,
// records and devices, and nothing of CSI, gRPC, Kubernetes, filesystems or mounts.
package blockdev

import (
	"context"
	"fmt"
	"os"
	"regexp"
	"strings"
	"time"

	"github.com/ashlar-csi/ashlar/internal/ioctl"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/queue"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Granularity divides every size, in bytes. A pool's own may be coarser (Pool.Granularity).
const Granularity = 4096

// MaxSize is the largest volume that any pool makes, in bytes (16 TiB less one
// block: the largest file of ext4, ext4(5)).
const MaxSize = 16<<40 - Granularity

// HeadSize is how much of an object Erase overwrites, in bytes. It covers what Format of package luks writes: without that nobody can open an encrypted
// volume.
const HeadSize = 4 << 20

// Kind tells volumes from snapshots.
type Kind string

// The kinds of object a pool keeps.
const (
	Volume   Kind = "vol"
	Snapshot Kind = "snap"
	// Marks is the object beside a volume that is a leg, of the same key: it has the marks, of what was written to it (docs/decisions/replicas.md). It is no
	// part of the volume: it is not listed, copied or grown with it, and is deleted by itself.
	Marks Kind = "marks"
)

// Ref names one object of a pool. Key is 32 lower-case hexadecimal digits (ValidKey): a pool refuses any other with errdefs.ErrInvalid, so that no key can
// be a path.
type Ref struct {
	Kind Kind
	Key  string
}

func (r Ref) String() string { return string(r.Kind) + "." + r.Key }

// ParseRef is the inverse of Ref.String. For a text that no Ref has, it returns an invalid one.
func ParseRef(text string) Ref {
	kind, key, _ := strings.Cut(text, ".")
	return Ref{Kind(kind), key}
}

var keyPattern = regexp.MustCompile(`^[0-9a-f]{32}$`)

// ValidKey reports whether key fits the grammar of keys.
func ValidKey(key string) bool { return keyPattern.MatchString(key) }

// Validate returns errdefs.ErrInvalid unless it names an object that a pool may have.
func (r Ref) Validate() error {
	if (r.Kind != Volume && r.Kind != Snapshot && r.Kind != Marks) || !ValidKey(r.Key) {
		return fmt.Errorf("%w: %q is not a volume or snapshot of a pool", errdefs.ErrInvalid, r.String())
	}
	return nil
}

// Provisioning says when an object takes its space.
type Provisioning string

// Thick objects take their space when they are made, thin ones as they are written.
const (
	AnyProvisioning Provisioning = "" // the pool's own way
	Thick           Provisioning = "thick"
	Thin            Provisioning = "thin"
)

// ProvisioningOf returns the Provisioning for a Record.Thin.
func ProvisioningOf(thin bool) Provisioning {
	if thin {
		return Thin
	}
	return Thick
}

// Record is all that a pool keeps of one object beside its bytes. It is on disk, durably, before the object takes any space, and is removed after the
// space is back.
type Record struct {
	Ref
	// Name is what the caller calls the object; the key is derived from it.
	Name string
	// Size in bytes, a multiple of Granularity.
	Size int64
	// Thin: space is taken when written, not when made.
	Thin bool
	// Sector is the logical sector of its devices, in bytes, the same on each attach and in each copy; 0: that of the pool's disks, or 512 over files.
	Sector int64
	// Origin is what the bytes were copied from; the zero Ref if they began as zeros.
	Origin Ref
	// Created is when the object was made; of a snapshot, the moment of the cut.
	Created time.Time
	// Ready: the object is complete. Get, List and Create hand out nothing else.
	Ready bool
	// Stale: the record is as it was when it was last read, as the node that has the object does not answer now.
	Stale bool
	// Labels belong to the layer above; the pool keeps them and does not interpret them.
	Labels map[string]string
}

// Spec says what to create.
type Spec struct {
	Ref
	Name string
	Size int64 // bytes, a multiple of the pool's granularity; at least the origin's
	// Provisioning that the pool does not have is refused with errdefs.ErrUnsupported.
	Provisioning Provisioning
	Origin       Ref // the object to copy; the zero Ref: zeros. The caller has flushed all devices over the pool's own
	// Quiesced: the caller holds back all writes to the origin until Cut is called, or Create returns (a frozen filesystem, a suspended device). Without it,
	// a pool that has to copy an attached origin byte by byte proves afterwards that the origin did not change meanwhile.
	Quiesced bool
	// Cut, if set, is called when the bytes of the origin are fixed, if that is before Create returns: from then on the caller need not hold back writes. An
	// error from it ends the call, and all is undone.
	Cut    func(ctx context.Context) error
	Labels map[string]string
	// Sector is the logical sector that the devices are to have, in bytes, if the pool has a choice; 0: the pool's own. A copy has its origin's. A pool without
	// a choice refuses one that is smaller than its own (errdefs.ErrUnsupported), if it takes long to find that out later.
	Sector int64
	// Prepare, if set, is called with the path of the finished bytes (a file or a
	// device) before the object becomes ready. It must be repeatable.
	Prepare func(ctx context.Context, path string) error
}

// Attachment says how to attach. Not both of its fields are set.
type Attachment struct {
	// ReadOnly: a device for reading, beside the one for writing. It goes with its last user.
	ReadOnly bool
	// Keep: the device stays until Detach, whoever has it open, and whatever is done to it: so it can be handed out to somebody who is not trusted. Without
	// Keep, Device.Close ends the caller's hold, and the pool may remove the device when nothing has it open or mounted any more: so a crash leaves nothing
	// behind. A Stackable pool may refuse Keep with errdefs.ErrUnsupported if it needs a device mapper: then the device over its own stays.
	Keep bool
}

// Device is an attached object.
type Device struct {
	Path     string // /dev/...
	Number   uint64 // device number, as in st_rdev (makedev(3))
	Size     int64  // bytes
	ReadOnly bool
	Kept     bool   // attached with Keep
	Below    string // path of the device whose queue has the I/O scheduler; empty: the device itself
	hold     func() error
}

// SetQueue writes settings of the device's block queue, as queue.Set does.
func (d *Device) SetQueue(settings map[string]string) (undo func() error, err error) {
	var values []queue.Setting
	for name, value := range settings {
		device := d.Path
		if name == "scheduler" && d.Below != "" {
			device = d.Below
		}
		values = append(values, queue.Setting{Device: device, Name: name, Value: value})
	}
	return queue.Set(values...)
}

// Close ends the caller's hold on the device. A device that is mounted, open elsewhere, or attached with Keep stays attached. Calling it again does
// nothing.
func (d *Device) Close() error {
	if d.hold == nil {
		return nil
	}
	err := d.hold()
	d.hold = nil
	return err
}

// Held returns the device with a hold on it: Close calls hold. It is for implementations of Pool.
func (d Device) Held(hold func() error) Device {
	d.hold = hold
	return d
}

// Numbers returns the numbers of devices.
func Numbers(devices []Device) (numbers []uint64) {
	for _, d := range devices {
		numbers = append(numbers, d.Number)
	}
	return numbers
}

// DeviceSize returns the size of an open block device, in bytes. It is for implementations of Pool.
func DeviceSize(f *os.File) (int64, error) {
	size, err := ioctl.DeviceSize(f)
	if err != nil {
		return 0, fmt.Errorf("size of %s: %w", f.Name(), errdefs.FromErrno(err))
	}
	return size, nil
}

// Capacity of a pool, in bytes.
type Capacity struct {
	Total     int64 // what the pool may promise in all
	Promised  int64 // the sizes of all volumes and snapshots
	Used      int64 // what they take of the storage; blocks that they share count once, as far as that is known
	Available int64 // what may still be promised, now; never negative
	MaxVolume int64 // the largest volume that could be made now
	MinVolume int64
}

// And returns the capacity of two pools together, each with storage of its own. MaxVolume is the larger one, as a volume is in one pool.
func (c Capacity) And(other Capacity) Capacity {
	all := Capacity{Total: c.Total + other.Total, Promised: c.Promised + other.Promised, Used: c.Used + other.Used, Available: c.Available + other.Available,
		MaxVolume: max(c.MaxVolume, other.MaxVolume), MinVolume: min(c.MinVolume, other.MinVolume)}
	if all.MinVolume == 0 { // one of them is of no pool
		all.MinVolume = max(c.MinVolume, other.MinVolume)
	}
	return all
}

// Severity of a Problem; the words are those of the CSI specification (VolumeHealth).
type Severity int

// The severities, from bad to worst.
const (
	Degraded Severity = iota + 1
	Inaccessible
	DataLoss
)

func (s Severity) String() string {
	switch s {
	case Degraded:
		return "Degraded"
	case Inaccessible:
		return "Inaccessible"
	case DataLoss:
		return "DataLoss"
	}
	return ""
}

// Problem is something wrong that an operator should know. Reason is one CamelCase word for machines; Message says what is wrong and what to do.
type Problem struct {
	Severity Severity
	Reason   string
	Message  string
}

// Pool keeps volumes and snapshots on one piece of storage of this machine.
//
// Every call is idempotent: what is done already is done again at no cost, and to remove what is not there is success. The caller serialises calls that
// name the same Ref, as subject or as origin; only Get and SetLabels may come beside any other call. Calls for different Refs may come at once.
// After an error, a retry or the next start of the pool finishes or undoes whatever the call changed. Errors wrap one of the sentinels of pkg/errdefs.
// Get, SetLabels, Expand, Attach and Health of an object that is not there, or not ready, return errdefs.ErrNotFound.
// Calls honour their context, and leave no process or goroutine behind.
type Pool interface {
	// Name of the pool, as the operator gave it.
	Name() string
	// Granularity divides every size in this pool, in bytes: it is Granularity of this package, or a multiple.
	Granularity() int64
	// Create makes an object, or returns the one that is there: same name, origin and kind, else errdefs.ErrExists (sizes and labels are the caller's to
	// compare). New bytes read as zeros. errdefs.ErrNoSpace if the pool cannot back the size; errdefs.ErrNotFound if the origin is gone;
	// errdefs.ErrOutOfRange for a size that it can never have. A copy that ran out of time goes on where it stopped, if it can.
	Create(ctx context.Context, spec Spec) (Record, error)
	// Delete gives the space back, then removes the record. errdefs.ErrInUse while a device of the object is attached.
	Delete(ctx context.Context, ref Ref) error
	// Erase deletes an object whose bytes must not be readable on the storage any more. Before the space of a ready object is given back, its first HeadSize
	// bytes are overwritten there, durably. Bytes that it shares with other objects stay for these, until the last of them is erased. An object whose bytes
	// can never be overwritten is deleted all the same, and that is logged. An unfinished copy is always erased when it is removed, as nobody comes back who
	// knows what its origin had.
	Erase(ctx context.Context, ref Ref) error
	// Get returns the record of a ready object. errdefs.ErrDataLoss for a damaged record.
	Get(ctx context.Context, ref Ref) (Record, error)
	// List returns up to limit (0: all) ready records of a kind whose keys come after
	// the given one, in the order of their keys.
	List(ctx context.Context, kind Kind, after string, limit int) ([]Record, error)
	// SetLabels changes the labels durably; change gets a copy to edit. If it returns
	// an error, that error is returned and nothing changed.
	SetLabels(ctx context.Context, ref Ref, change func(labels map[string]string) error) (Record, error)
	// Expand grows a volume and the pool's devices of it to size, in bytes; smaller or equal sizes change nothing. errdefs.ErrNoSpace if the pool cannot back
	// the size; errdefs.ErrOutOfRange for one that it can never have; errdefs.ErrInvalid for a snapshot.
	Expand(ctx context.Context, ref Ref, size int64) (Record, error)

	// Attach makes the object a device of this machine, or returns the one that is there with the same mode (read-only or not). errdefs.ErrDataLoss if the
	// bytes are gone, or fewer than the record says.
	Attach(ctx context.Context, ref Ref, how Attachment) (Device, error)
	// Attached returns the pool's devices of the object, by the kernel; it needs no record.
	Attached(ctx context.Context, ref Ref) ([]Device, error)
	// Detach removes all of the pool's devices of the object; it needs no record. errdefs.ErrInUse if something still holds one; that goes with its last
	// holder.
	Detach(ctx context.Context, ref Ref) error

	// Capacity returns how much of the pool is promised, used and free. It is cheap: it may be called for every volume.
	Capacity(ctx context.Context) (Capacity, error)
	// Health returns what is wrong with one object, by its bytes and record; nothing if no problem is known.
	Health(ctx context.Context, ref Ref) ([]Problem, error)
	// PoolHealth returns what is wrong with the pool as a whole.
	PoolHealth(ctx context.Context) []Problem
	// Orphans returns the devices of this pool that are attached with Keep. The caller knows which of them are still wanted.
	Orphans(ctx context.Context) (map[Ref][]Device, error)
	// Close releases the pool; attached devices stay.
	Close() error
}

// Identified is a Pool with an identity, which it has from the day on which it was made, whatever its name is, and wherever its storage is. No other pool
// has the same ID. It is empty if a pool of an older driver could not be given one yet.
type Identified interface{ ID() string }

// Copied is a Pool that can tell whether it has bytes of another one (IsCopy), although it has an identity of its own: the storage below was copied, and the
// copy given another identity.
type Copied interface{ IsCopy(of Pool) bool }

// Leaver is a Pool that can tell that it has to be closed and opened anew (Gone): it keeps its disk from being unmounted and repaired, or what it has open
// is not what is at its place any more.
type Leaver interface{ Gone() bool }

// Shelver is a Pool whose caller may find that an object does not have its own record, before anything uses the pool. From then on the object is one with a
// damaged record (errdefs.ErrDataLoss), until the pool is opened anew. why goes on with a sentence that begins with the record.
type Shelver interface{ SetAside(ref Ref, why string) }

// Unwrap returns the pool itself behind one that stands for another (by a method Unwrap); nil if that is not open.
func Unwrap(p Pool) Pool {
	for p != nil {
		before, ok := p.(interface{ Unwrap() Pool })
		if !ok {
			return p
		}
		p = before.Unwrap()
	}
	return nil
}

// As returns a pool as one with an optional power (Identified, Copied, Leaver, Shelver, Prover, Measurer, ThinPool, Comparer, Cutter, Stackable, Differ, Founded, Marker); false if
// it does not have that, or is not open.
func As[T any](p Pool) (more T, ok bool) {
	more, ok = Unwrap(p).(T)
	return more, ok
}

// Marker is a Pool of volumes of other nodes, which keep the marks of those volumes that are legs.
type Marker interface {
	// Marks returns what was written to a volume since an era, as its home tells. errdefs.ErrUnsupported from homes that know of no marks.
	Marks(ctx context.Context, ref Ref, since uint32) ([]Extent, error)
	// BeginEra begins an era, and returns its number. errdefs.ErrUnsupported if no marks are kept.
	BeginEra(ctx context.Context, ref Ref) (uint32, error)
}

// Extent is a range of bytes of a volume or snapshot.
type Extent struct{ Offset, Length int64 }

// Prover is a Pool that knows whether anything but zeros was ever written to an object, anywhere in it.
type Prover interface {
	Untouched(ctx context.Context, ref Ref) (bool, error)
}

// Measurer is a Pool that knows how many bytes of an object take space, of its own or shared with copies; of one that is not thin, that is its size.
type Measurer interface {
	Used(ctx context.Context, ref Ref) (int64, error)
}

// ThinUse is how much of a thin pool is in use, from 0 to 1.
type ThinUse struct{ Data, Metadata float64 }

// ThinPool is a Pool that may keep its objects in a thin pool, whose data or metadata may be full. thin is false if it does not.
type ThinPool interface {
	ThinUse(ctx context.Context) (use ThinUse, thin bool, err error)
}

// Comparer is a Pool that can tell whether an origin that others may write to, as it is attached and was not Quiesced when it was copied, has changed since.
type Comparer interface {
	// Unchanged is for a copy whose Create has called Cut, and has not returned yet, or has returned. errdefs.ErrInUse if the origin differs from it; then the copy is
	// of no use any more.
	Unchanged(ctx context.Context, copied, origin Ref) error
}

// Cutter is a Pool that may fix the bytes of an attached origin in an instant, however large it is. If CutsAtOnce, writers can be held back for a copy
// (Spec.Quiesced) also if they have a raw device.
type Cutter interface{ CutsAtOnce(origin Ref) bool }

// Founded is a Pool, or the location of one, that knows which block devices of this machine its storage is on: Foundations returns their numbers, as in
// st_rdev (makedev(3)). There are none if it is on none, as files in memory are.
type Founded interface {
	Foundations(ctx context.Context) ([]uint64, error)
}

// Stackable is a Pool over whose devices pkg/device lays a device of the device mapper, the top, for everybody above to use. The pool says what the top is
// called: so it is known by its name as long as it is there, and by other versions of the driver.
type Stackable interface {
	// Top returns the name of the device over an object's own, which no other object on this kernel has, and its UUID, or how that begins if nothing of the
	// object is attached. lvm2 must not read devices with that UUID: it would wait for a suspended one, and all who wait for lvm2 with it. before is the UUID
	// that older drivers gave it; the same, if it did not change. The kernel takes the name with LayerRoom more bytes.
	Top(ref Ref) (name, uuid, before string, err error)
	// ParseTop returns the object of such a name; false if it is of no object of this pool.
	ParseTop(name string) (Ref, bool)
}

// LayerRoom is how many bytes pkg/device adds to the name of a top, at most, for what is below it.
const LayerRoom = len("-crypt")

// Differ is a Pool that can tell which ranges of its objects hold data (Allocated), and in which two of them differ (Changed). Ranges come in order, do
// not overlap, and end after from.
type Differ interface {
	Allocated(ctx context.Context, ref Ref, from int64, yield func(Extent) error) error
	// Changed compares two objects; target is as large as base, or larger.
	Changed(ctx context.Context, base, target Ref, from int64, yield func(Extent) error) error
}
