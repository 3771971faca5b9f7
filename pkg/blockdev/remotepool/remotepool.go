// Package remotepool is the pool of the volumes that this node uses and other nodes have. A volume's home has its bytes and its record, and exports its
// device; here that is a device of the kernel's NVMe/TCP host.
//
// The home is asked for the record. What is attached is asked of this kernel alone: so what was done here can be undone whoever is away. Volumes are made,
// grown and deleted at home.
package remotepool

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/abroad"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/nvme"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Home knows the homes of volumes, and asks them. pool and ref are a volume's. errdefs.ErrUnavailable if something is not known now, or the home does not
// answer; errdefs.ErrBusy if the home is doing something else with the volume.
type Home interface {
	// Claim returns the claim of a volume for this node, as far as it is known without asking; false if there is none.
	Claim(ref blockdev.Ref) (Claim, bool)
	// Open has the home export a volume to this node.
	Open(ctx context.Context, pool string, ref blockdev.Ref) (Export, error)
	// Record returns the record of a volume, without what only its home needs.
	Record(ctx context.Context, pool string, ref blockdev.Ref) (blockdev.Record, error)
	// SetLabels changes labels of the record from before to after; errdefs.ErrBusy if they are not as in before.
	SetLabels(ctx context.Context, pool string, ref blockdev.Ref, before, after map[string]string) (blockdev.Record, error)
	// Marks and BeginEra: see blockdev.Marker.
	Marks(ctx context.Context, pool string, ref blockdev.Ref, since uint32) ([]blockdev.Extent, error)
	BeginEra(ctx context.Context, pool string, ref blockdev.Ref) (uint32, error)
	// Ended reports whether the claim of a generation has ended, or its home is gone for good, by those who give claims.
	Ended(ctx context.Context, ref blockdev.Ref, generation int64) (bool, error)
	// Close has the home end the export of a generation, if it still has that NQN.
	Close(ctx context.Context, ref blockdev.Ref, generation int64, nqn string) error
}

// Claim is the claim of a volume for this node.
type Claim struct {
	Home       string // the node that has the volume
	Generation int64
}

// Export is a home's answer to Open.
type Export struct {
	nvme.Connection
	Size int64 // of the device, in bytes
	// Otherwise: the home exports the volume for this claim since before it should do so with TLS, or without, and does not change that until Close. A
	// connection that is there goes on, and no other one is made.
	Otherwise bool
	// Again: the home has exported the volume for this claim before, so what this node wrote by an earlier connection may be on its way to the disk still.
	// Close waits for that.
	Again bool
	// Record is the record of the volume, as Home.Record returns it.
	Record blockdev.Record
}

// Kernel is the NVMe/TCP host of this kernel: see package nvme.
type Kernel interface {
	Connect(ctx context.Context, c nvme.Connection) (nvme.Device, error)
	List(prefix string) ([]nvme.Device, error)
	Disconnect(ctx context.Context, nqn string) error
	Resized(ctx context.Context, nqn string, size int64) error
}

// Host returns the NVMe/TCP host of the kernel that runs this. With tls it makes no connection to an export without TLS; connections that are there go on.
// Exports with TLS are always used with TLS.
func Host(tls bool) Kernel { return host{tls} }

type host struct{ tls bool }

func (h host) Connect(ctx context.Context, c nvme.Connection) (nvme.Device, error) {
	c.Encrypted = h.tls
	return nvme.Connect(ctx, c)
}
func (host) List(prefix string) ([]nvme.Device, error)        { return nvme.List(prefix) }
func (host) Disconnect(ctx context.Context, nqn string) error { return nvme.Disconnect(ctx, nqn) }
func (host) Resized(ctx context.Context, nqn string, size int64) error {
	return nvme.Resized(ctx, nqn, size)
}

// The names of subsystems have the key of the volume, and the generation of the claim that it is exported for:
//
//	nqn.2026-11.dev.ashlar:KEY:GENERATION:RANDOM
const nqnPrefix = "nqn.2026-11.dev.ashlar:"

// parseNQN returns the volume and the generation of a subsystem; false if its name is none of ours.
func parseNQN(nqn string) (ref blockdev.Ref, generation int64, ours bool) {
	parts := strings.Split(strings.TrimPrefix(nqn, nqnPrefix), ":")
	if !strings.HasPrefix(nqn, nqnPrefix) || len(parts) != 3 {
		return blockdev.Ref{}, 0, false
	}
	generation, err := strconv.ParseInt(parts[1], 10, 64)
	ref = blockdev.Ref{Kind: blockdev.Volume, Key: parts[0]}
	return ref, generation, err == nil && ref.Validate() == nil
}

// generationOf returns the generation of the claim that a connection is for.
func generationOf(c nvme.Device) int64 {
	_, generation, _ := parseNQN(c.NQN)
	return generation
}

// HostPrefix returns how the NQNs begin by which a node connects. Other nodes may use the same kernel.
func HostPrefix(node string) string { return nqnPrefix + "node:" + abroad.HashOf(node) + ":" }

// Pool is the pool of the volumes of other nodes. It has no name and no volumes: Named returns it as the pool of a name.
type Pool struct {
	*shared
	name string
}

// shared is what the pools of all names share.
type shared struct {
	abroad.Pool
	node   string
	kernel Kernel
	home   Home

	mu      sync.Mutex
	known   map[string]known        // by NQN of the connection
	told    map[blockdev.Ref]string // the last NQN that the home of each volume answered
	earlier map[string]bool         // NQNs of the connections that were there when this process looked first; nil: it has not
}

// tell notes the NQN by which the home exports a volume.
func (p *Pool) tell(ref blockdev.Ref, nqn string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.told[ref] = nqn
}

// replaced reports whether the home exports a volume for the generation of a connection under another NQN: it has begun anew since, and what it exported
// before never comes back. After a start of this process that is not known until the home is asked again.
func (p *Pool) replaced(ref blockdev.Ref, c nvme.Device) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, now, told := parseNQN(p.told[ref])
	return told && now == generationOf(c) && p.told[ref] != c.NQN
}

// known is what is known of a connection beside what the kernel says. It is lost with the process.
type known struct {
	made   bool            // this process made it
	second bool            // it is to the new home of a volume that moves: see Second
	kept   bool            // the device was handed out itself
	home   string          // the node
	record blockdev.Record // the last record that was read; zero: not known
	away   time.Time       // since when it is not live; zero: it is live
}

var (
	_ blockdev.Pool      = (*Pool)(nil)
	_ blockdev.Stackable = (*Pool)(nil)
	_ blockdev.Marker    = (*Pool)(nil)
)

// New returns the pool of the volumes that a node uses and other nodes have.
func New(node string, kernel Kernel, home Home) *Pool {
	return &Pool{&shared{Pool: abroad.New("remote", node, "is on another node, and"), node: node, kernel: kernel, home: home, known: map[string]known{}, told: map[blockdev.Ref]string{}}, ""}
}

// Named returns the pool for the volumes of a pool of that name, on whatever nodes.
func (p *Pool) Named(name string) blockdev.Pool { return &Pool{p.shared, name} }

// Name returns the name of the pool in which the home has the volume.
func (p *Pool) Name() string { return p.name }

// Get: see blockdev.Pool. While the home does not answer, it returns the last record that was read of a connected volume (Stale): only the volume's user
// changes what counts here. errdefs.ErrPrecondition while a device of an earlier claim is in use, which leads nowhere any more.
func (p *Pool) Get(ctx context.Context, ref blockdev.Ref) (blockdev.Record, error) {
	if err := p.check(ref); err != nil {
		return blockdev.Record{}, err
	}
	connected, err := p.of(ref)
	if err != nil {
		return blockdev.Record{}, err
	}
	claim, claimed := p.home.Claim(ref)
	for _, c := range connected {
		if claimed && (generationOf(c) < claim.Generation || p.replaced(ref, c)) && inUse(c) && !p.mirrored(connected) {
			return blockdev.Record{}, p.outlived(c, ref)
		}
	}
	record, err := p.home.Record(ctx, p.name, ref)
	if err == nil {
		p.remember(connected, record)
	} else if errors.Is(err, errdefs.ErrUnavailable) {
		for _, c := range connected {
			if last := p.knownOf(c.NQN).record; last.Ref == ref {
				last.Stale = true
				return last, nil
			}
		}
	}
	return record, err
}

// outlived returns the error for a device of an earlier claim that is in use.
func (p *Pool) outlived(c nvme.Device, ref blockdev.Ref) error {
	return fmt.Errorf("%w: %s is %s by a claim of before, which has ended, and it is still mounted or open on node %s; unpublish and unstage it first", errdefs.ErrPrecondition, c.Path, ref, p.node)
}

// check returns an error for a Ref that no volume of the pool can have.
func (p *Pool) check(ref blockdev.Ref) error {
	err := ref.Validate()
	if err == nil && (ref.Kind != blockdev.Volume || p.name == "") {
		err = fmt.Errorf("%w: no %s of another node is used here", errdefs.ErrNotFound, ref)
	}
	return err
}

// Marks: see blockdev.Marker.
func (p *Pool) Marks(ctx context.Context, ref blockdev.Ref, since uint32) (written []blockdev.Extent, err error) {
	if err := p.check(ref); err != nil {
		return nil, err
	}
	err = patiently(ctx, func() (err error) {
		written, err = p.home.Marks(ctx, p.name, ref, since)
		return err
	})
	return written, err
}

// BeginEra: see blockdev.Marker.
func (p *Pool) BeginEra(ctx context.Context, ref blockdev.Ref) (number uint32, err error) {
	if err := p.check(ref); err != nil {
		return 0, err
	}
	err = patiently(ctx, func() (err error) {
		number, err = p.home.BeginEra(ctx, p.name, ref)
		return err
	})
	return number, err
}

// SetLabels: see blockdev.Pool.
func (p *Pool) SetLabels(ctx context.Context, ref blockdev.Ref, change func(labels map[string]string) error) (blockdev.Record, error) {
	if err := p.check(ref); err != nil {
		return blockdev.Record{}, err
	}
	var record blockdev.Record
	err := patiently(ctx, func() (err error) {
		if record, err = p.home.Record(ctx, p.name, ref); err != nil {
			return err
		}
		labels := maps.Clone(record.Labels)
		if err := change(labels); err != nil {
			return err
		}
		before, after := changes(record.Labels, labels)
		if len(before)+len(after) == 0 {
			return nil
		}
		record, err = p.home.SetLabels(ctx, p.name, ref, before, after)
		return err
	})
	if err != nil {
		return blockdev.Record{}, err
	}
	connected, err := p.of(ref)
	p.remember(connected, record)
	return record, err
}

// changes returns the labels in which two sets differ, with the values of each.
func changes(was, is map[string]string) (before, after map[string]string) {
	differs := func(label, _ string) bool { a, in := was[label]; b, out := is[label]; return a != b || in != out }
	only := func(labels map[string]string) map[string]string {
		some := maps.Clone(labels)
		maps.DeleteFunc(some, func(label, value string) bool { return !differs(label, value) })
		return some
	}
	return only(was), only(is)
}

// How long a home that answers errdefs.ErrBusy is asked again, and the pauses between.
const (
	firstPause = 50 * time.Millisecond
	lastPause  = time.Second
	patience   = 10 * time.Second
)

// patiently calls ask again while it returns errdefs.ErrBusy, for patience at most.
func patiently(ctx context.Context, ask func() error) error {
	pause := firstPause
	for end := time.Now().Add(patience); ; pause = min(2*pause, lastPause) {
		err := ask()
		if !errors.Is(err, errdefs.ErrBusy) || time.Now().After(end) {
			return err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return err
		}
	}
}

// Expand: see blockdev.Pool. The home has grown the volume before; Expand waits until this kernel knows the size.
func (p *Pool) Expand(ctx context.Context, ref blockdev.Ref, size int64) (blockdev.Record, error) {
	record, err := p.Get(ctx, ref)
	if err != nil {
		return blockdev.Record{}, err
	}
	if size > record.Size {
		return blockdev.Record{}, p.Refuse("grown", ref)
	}
	connected, err := p.current(ref)
	for _, c := range connected {
		if err == nil {
			_, err = p.sized(ctx, c, record.Size)
		}
	}
	return record, err
}

// sizeTime is how long this kernel may take to learn the size of a device that has grown at home.
const sizeTime = 15 * time.Second

// sized waits until a device has at least size bytes, and returns it as it is then; errdefs.ErrUnavailable after sizeTime.
func (p *Pool) sized(ctx context.Context, d nvme.Device, size int64) (nvme.Device, error) {
	if d.Size >= size {
		return d, nil
	}
	waiting, cancel := context.WithTimeout(ctx, sizeTime)
	defer cancel()
	if err := p.kernel.Resized(waiting, d.NQN, size); err != nil {
		return d, errdefs.Recast(errdefs.ErrUnavailable, err, "%s has %d bytes and is to have %d, which its home does not tell this kernel", d.Path, d.Size, size)
	}
	now, err := p.kernel.List(d.NQN)
	if err == nil && len(now) != 1 {
		err = fmt.Errorf("%w: %s was disconnected meanwhile", errdefs.ErrUnavailable, d.Path)
	}
	if err != nil {
		return d, err
	}
	return now[0], nil
}

// Has reports whether a volume is connected.
func (p *Pool) Has(ref blockdev.Ref) bool {
	connected, err := p.of(ref)
	return err == nil && len(p.firsts(connected)) > 0
}

// of returns this node's connections of a volume, by whatever claim.
func (p *Pool) of(ref blockdev.Ref) ([]nvme.Device, error) {
	all, err := p.all(nqnPrefix + ref.Key + ":")
	return all[ref], err
}

// current returns this node's connections of a volume by the present claim; by any claim if the present one is not known.
func (p *Pool) current(ref blockdev.Ref) ([]nvme.Device, error) {
	connected, err := p.of(ref)
	claim, claimed := p.home.Claim(ref)
	return slices.DeleteFunc(p.firsts(connected), func(c nvme.Device) bool { return claimed && generationOf(c) != claim.Generation }), err
}

// all returns this node's connections, by volume, to subsystems whose names have a prefix.
func (p *Pool) all(prefix string) (map[blockdev.Ref][]nvme.Device, error) {
	err := p.lookFirst()
	if err != nil {
		return nil, err
	}
	list, err := p.list(prefix)
	if err != nil {
		return nil, err
	}
	found := map[blockdev.Ref][]nvme.Device{}
	for _, c := range list {
		if ref, _, ours := parseNQN(c.NQN); ours && strings.HasPrefix(c.Host, HostPrefix(p.node)) {
			found[ref] = append(found[ref], c)
		}
	}
	return found, nil
}

func (p *Pool) list(prefix string) ([]nvme.Device, error) {
	list, err := p.kernel.List(prefix)
	if err != nil {
		return nil, fmt.Errorf("list connections to volumes of other nodes: %w", err)
	}
	return list, nil
}

// lookFirst notes which connections are there, the first time: see shared.earlier.
func (p *Pool) lookFirst() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.earlier != nil {
		return nil
	}
	list, err := p.list(nqnPrefix)
	if err != nil {
		return err
	}
	p.earlier = map[string]bool{}
	for _, c := range list {
		p.earlier[c.NQN] = true
	}
	return nil
}

// isEarlier reports whether an earlier process made a connection.
func (p *Pool) isEarlier(nqn string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.earlier[nqn]
}

func (p *Pool) knownOf(nqn string) known {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.known[nqn]
}

func (p *Pool) note(nqn string, change func(*known)) known {
	p.mu.Lock()
	defer p.mu.Unlock()
	have := p.known[nqn]
	change(&have)
	p.known[nqn] = have
	return have
}

// remember notes the record of the volume of connections.
func (p *Pool) remember(connected []nvme.Device, record blockdev.Record) {
	for _, c := range connected {
		p.note(c.NQN, func(k *known) { k.record = record })
	}
}

func (p *Pool) forget(nqn string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.known, nqn)
	delete(p.earlier, nqn)
	if ref, _, _ := parseNQN(nqn); p.told[ref] == nqn {
		delete(p.told, ref)
	}
}

// closed tells the home that a volume is not used here any more. A failure is only logged: the release of the claim has the same effect.
func (p *Pool) closed(ctx context.Context, ref blockdev.Ref, c nvme.Device) {
	if err := patiently(ctx, func() error { return p.home.Close(ctx, ref, generationOf(c), c.NQN) }); err != nil {
		klog.FromContext(ctx).Info("The home of a volume was not told that it is not used here any more; the end of its claim will", "volume", ref.String(), "err", err.Error())
	}
}
