package volume

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/ashlar-csi/ashlar/internal/poolset"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Spread says how the volumes of one StatefulSet are laid over the pools that they may be in.
type Spread string

// The ways to spread volumes. With preferred a volume is in a pool that has none of its peers (Requester.PeerOf) and has room, if there is one, else in
// one that has the fewest. With required it is in a pool that has none, or ErrNoSpace.
const (
	NoSpread        Spread = ""
	SpreadPreferred Spread = "preferred"
	SpreadRequired  Spread = "required"
)

// PeerOf reports whether two claims are of one template of one StatefulSet: in one namespace, with names that differ in the ordinal alone
// (TEMPLATE-STATEFULSET-ORDINAL, as Kubernetes makes them).
func (r Requester) PeerOf(other Requester) bool {
	family, ordinal := cutOrdinal(r.Name)
	theirs, another := cutOrdinal(other.Name)
	return family != "" && family == theirs && ordinal != another && r.Namespace == other.Namespace
}

// cutOrdinal cuts the name of a StatefulSet's claim before its ordinal; both are empty for another name. One without a hyphen in what is left
// (backup-1) has no template's name.
func cutOrdinal(name string) (family, ordinal string) {
	at := strings.LastIndexByte(name, '-')
	if at <= 0 || at == len(name)-1 || strings.Trim(name[at+1:], "0123456789") != "" || strings.IndexByte(name[:at], '-') <= 0 {
		return "", ""
	}
	return name[:at], name[at+1:]
}

// Room is a pool that a new volume may be made in, as far as is known. The pool says whether it really has room when it makes the volume.
type Room struct {
	Pool string
	blockdev.Capacity
	Worst blockdev.Severity // of what is wrong with it; 0: nothing is known
	Peers int               // volumes of the same StatefulSet that are in it; 0 where that does not matter
}

// Usable: it takes volumes at all.
func (r Room) Usable() bool { return r.Worst < blockdev.Inaccessible }

// Fits: it seems to have room for a volume of some bytes.
func (r Room) Fits(size int64) bool { return r.Usable() && r.MaxVolume >= size }

// Compare orders the pools for a new volume of some bytes; negative if r is the better one. Better is, in this order: a pool with room; one with less
// wrong with it; one with fewer peers; one with more room. Room matters because what a volume grows by, and its snapshots, come from its own pool.
func (r Room) Compare(other Room, size int64) int {
	return cmp.Or(TrueFirst(r.Fits(size), other.Fits(size)), cmp.Compare(r.Worst, other.Worst), cmp.Compare(r.Peers, other.Peers),
		cmp.Compare(other.Available, r.Available), cmp.Compare(r.Pool, other.Pool))
}

// TrueFirst compares two conditions, as cmp.Compare does; the one that is true comes first.
func TrueFirst(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return -1
	}
	return 1
}

// Allows reports whether a volume may be in a pool that has some of its peers.
func (s Spread) Allows(peers int) bool { return s != SpreadRequired || peers == 0 }

// PassedOver reports whether after a pool's error another pool may make the volume: the pool has no room, or not the provisioning.
func PassedOver(err error) bool {
	return errors.Is(err, errdefs.ErrNoSpace) || errors.Is(err, errdefs.ErrUnsupported)
}

// Copies says where copies of volumes and snapshots may be.
type Copies string

// The places for copies. With local, or nothing, a copy is on the node of its source, which takes the least time. With anywhere it may be on any node; to
// another one all bytes are copied over the network.
const (
	CopiesLocal    Copies = "local"
	CopiesAnywhere Copies = "anywhere"
)

// Elsewhere reports whether the volume is a copy of what is in a pool that the volume itself may not be in. source is that pool.
func (s Spec) Elsewhere(source string) bool {
	return s.Source != (ID{}) && s.Pool != "" && !poolset.Set(s.Pool).Has(source)
}

// placement is where a volume is being made.
type placement struct {
	pool string
	For  Requester
}

// createPlaced makes a volume of at least floor bytes by create, in the best of some pools. If that has no room after all, it tries the next one. As long
// as it is not known whether an earlier call made the volume, a retry takes the pool of that call.
func (l *Local) createPlaced(ctx context.Context, spec Spec, pools []blockdev.Pool, floor int64,
	create func(ctx context.Context, spec Spec, in blockdev.Pool) (Volume, error),
) (Volume, error) {
	overhead := spec.Encryption.Scheme.Overhead()
	size, err := spec.Size.Choose(max(floor, spec.MinSize()), blockdev.Granularity, overhead)
	if err != nil {
		return Volume{}, err
	}
	size += overhead
	rooms := l.rooms(ctx, pools)
	if slices.ContainsFunc(rooms, Room.Usable) {
		rooms = slices.DeleteFunc(rooms, func(r Room) bool { return !r.Usable() })
	}
	var refused []error
	for {
		name, err := l.choose(ctx, spec, rooms, size)
		if err != nil {
			return Volume{}, err
		}
		if name == "" {
			return Volume{}, l.noRoom(spec, refused)
		}
		pool, err := l.pool(name)
		if err != nil {
			return Volume{}, err
		}
		v, err := create(ctx, spec, pool)
		l.placedAs(spec, err)
		if !PassedOver(err) {
			return v, err
		}
		refused = append(refused, err)
		rooms = slices.DeleteFunc(rooms, func(r Room) bool { return r.Pool == name })
	}
}

// noRoom returns the error for a volume that no pool takes. refused are the errors of the pools that were asked.
func (l *Local) noRoom(spec Spec, refused []error) error {
	switch {
	case len(refused) == 0:
		return fmt.Errorf("%w: parameter spread=%s: every pool of pool=%q on node %s that can be used has a volume of the StatefulSet of claim %s/%s", errdefs.ErrNoSpace, spec.Spread, spec.Pool, l.node, spec.For.Namespace, spec.For.Name)
	case len(refused) == 1:
		return refused[0]
	}
	kind := errdefs.ErrUnsupported
	if slices.ContainsFunc(refused, func(err error) bool { return errors.Is(err, errdefs.ErrNoSpace) }) {
		kind = errdefs.ErrNoSpace
	}
	return errdefs.Recast(kind, errors.Join(refused...), "parameter pool=%q: no pool of node %s takes it", spec.Pool, l.node)
}

// choose returns the best of some pools for a volume, and remembers it until placedAs; what it remembers it returns again. Empty if the volume may be in
// none of them.
func (l *Local) choose(ctx context.Context, spec Spec, rooms []Room, size int64) (name string, err error) {
	l.placing.Lock()
	defer l.placing.Unlock()
	key := KeyOf(spec.Name)
	if at, begun := l.placed[key]; begun && slices.ContainsFunc(rooms, func(r Room) bool { return r.Pool == at.pool && r.Usable() }) {
		return at.pool, nil
	}
	if spec.Spread != NoSpread {
		if rooms, err = l.countPeers(ctx, spec, rooms); err != nil {
			return "", err
		}
	}
	if len(rooms) == 0 {
		return "", nil
	}
	best := slices.MinFunc(rooms, func(a, b Room) int { return a.Compare(b, size) })
	l.placed[key] = placement{best.Pool, spec.For}
	return best.Pool, nil
}

// countPeers counts the peers of a volume in some pools, and returns those that it may be in. The caller holds placing.
func (l *Local) countPeers(ctx context.Context, spec Spec, rooms []Room) (allowed []Room, err error) {
	for _, r := range rooms {
		peers := map[string]bool{}
		for key, at := range l.placed {
			peers[key] = at.pool == r.Pool && at.For.PeerOf(spec.For)
		}
		pool, err := l.pool(r.Pool)
		if err != nil {
			return nil, err
		}
		records, err := pool.List(ctx, blockdev.Volume, "", 0)
		if err != nil {
			return nil, err
		}
		for _, record := range records {
			peers[record.Key] = fromRecord(r.Pool, l.node, record).For.PeerOf(spec.For)
		}
		for _, is := range peers {
			if is {
				r.Peers++
			}
		}
		if spec.Spread.Allows(r.Peers) {
			allowed = append(allowed, r)
		}
	}
	return allowed, nil
}

// placedAs forgets the pool that choose chose for a volume, unless the call ended with an error after which that pool may go on with it.
func (l *Local) placedAs(spec Spec, err error) {
	if mayGoOn(err) {
		return
	}
	l.placing.Lock()
	defer l.placing.Unlock()
	delete(l.placed, KeyOf(spec.Name))
}

// roomPatience is how long rooms waits for a pool. A pool whose disk hangs is waited for once, and then passed over until it has answered.
const roomPatience = 10 * time.Second

// inquiry is a question to a pool what room it has. Several callers may wait for one.
type inquiry struct {
	begun time.Time
	ended chan struct{} // closed once room is there
	room  Room
}

// rooms asks some pools at once what room they have. A pool that is not open, or does not answer in time, is not usable.
func (l *Local) rooms(ctx context.Context, pools []blockdev.Pool) []Room {
	inquiries := make([]*inquiry, len(pools))
	for i, pool := range pools {
		inquiries[i] = l.inquire(ctx, pool)
	}
	rooms := make([]Room, len(pools))
	for i, asked := range inquiries {
		rooms[i] = asked.wait(ctx, pools[i].Name())
	}
	return rooms
}

// wait returns the answer to an inquiry. A pool that does not answer in time is not usable.
func (i *inquiry) wait(ctx context.Context, pool string) Room {
	select {
	case <-i.ended:
	case <-time.After(time.Until(i.begun.Add(roomPatience))):
	case <-ctx.Done():
	}
	select {
	case <-i.ended: // also if it was long ago, and another one was waited for meanwhile
		return i.room
	default:
		return Room{Pool: pool, Worst: blockdev.Inaccessible}
	}
}

// inquire asks a pool what room it has, or returns the inquiry that is under way: a pool has one at a time.
func (l *Local) inquire(ctx context.Context, pool blockdev.Pool) *inquiry {
	l.placing.Lock()
	defer l.placing.Unlock()
	if asked := l.inquiries[pool.Name()]; asked != nil {
		return asked
	}
	asked := &inquiry{begun: time.Now(), ended: make(chan struct{})}
	l.inquiries[pool.Name()] = asked
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), roomPatience) // others may wait for it too
	go func() {
		defer cancel()
		asked.room = roomOf(ctx, pool)
		l.placing.Lock()
		defer l.placing.Unlock()
		delete(l.inquiries, pool.Name())
		close(asked.ended)
	}()
	return asked
}

// roomOf returns what room a pool has. It does not wait for a pool that is not open.
func roomOf(ctx context.Context, pool blockdev.Pool) Room {
	r := Room{Pool: pool.Name(), Worst: blockdev.Inaccessible}
	if blockdev.Unwrap(pool) == nil {
		return r
	}
	c, err := pool.Capacity(ctx)
	if err != nil {
		return r
	}
	r.Capacity, r.Worst = c, 0
	for _, p := range pool.PoolHealth(ctx) {
		r.Worst = max(r.Worst, p.Severity)
	}
	return r
}
