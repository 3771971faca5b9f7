// Package catalog is what a pool has in memory of its objects, and what all pools do with that in the same way.
//
// It keeps these rules:
//
//   - Memory follows the disk. The catalog is a cache of the records, filled when the pool is opened. A change is on the disk before it is here (Set,
//     Forget). Only an object that is begun is here first (Put), so that nobody else begins it.
//   - One lock. Mu guards the catalog, and what else the pool remembers: its account, the devices that it has seen. It is held to look and to change, and
//     never while something is waited for: no record is written, no image opened and no command run with it. (File pools read the free space of their
//     filesystem with it, as that and what is promised are one sum.) It is the innermost lock: no other one is taken while it is held.
//   - One worker. A ready object is worked on by the call that names it, as callers serialise those (blockdev.Pool). Only SetLabels may come beside it: so
//     whoever saves a record does that between BeginChange and its end. An object that is being made or removed is worked on by the call that has claimed
//     it: by Begun, Begin, BeginDelete, ClaimCopies or Sweep, until Release or Forget. For other calls it is errdefs.ErrBusy, and Sweep passes it by.
//   - Only the worker changes the entry of an object, with Mu held where others look (Set), and only the worker reads it without Mu. All others get copies
//     (Lookup, Get, List), or look with Mu held.
//
// What only looks alike stays with each pool: how a record is saved (two slots of a file, or the difference of tags), what is left of a Create that failed
// (a file pool goes on with what it allocated and with copies of snapshots, an LVM pool with whatever ran out of time), and the account.
package catalog

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/internal/turns"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// State is how far an object has come. Only a ready one belongs to anybody.
type State string

// The states.
const (
	Creating State = "creating"
	Ready    State = "ready"
	Deleting State = "deleting"
)

// ErrRecord is in every errdefs.ErrDataLoss about a record.
var ErrRecord = fmt.Errorf("%w: damaged record", errdefs.ErrDataLoss)

// AbandonedAfter is how long an unfinished object is kept for a retry. After that it is removed.
const AbandonedAfter = 15 * time.Minute

// Entry is what every pool knows of an object; a pool's own type of objects embeds it.
type Entry struct {
	record blockdev.Record // without its labels
	labels string          // the labels, packed (packLabels)

	State  State
	Copied int64 // bytes of an unfinished object that are in place
	// Released is when an unfinished object was left for a retry; zero for an object that only waits for its removal.
	Released time.Time
	claimed  bool // a call is making or removing it
}

// Found returns the entry of an object that is on the disk.
func Found(record blockdev.Record, state State) Entry {
	var e Entry
	e.set(record, state)
	return e
}

// Begun returns the entry of a new object, claimed for the caller.
func Begun(record blockdev.Record) Entry {
	e := Found(record, Creating)
	e.claimed = true
	return e
}

func (e *Entry) set(record blockdev.Record, state State) {
	e.labels, e.State = packLabels(record.Labels), state
	record.Ready, record.Labels = state == Ready, nil
	e.record = record
}

// Record returns the record. The caller may change its labels.
func (e *Entry) Record() blockdev.Record {
	record := e.record
	record.Labels = unpackLabels(e.labels)
	return record
}

// Ref returns the Ref of the record.
func (e *Entry) Ref() blockdev.Ref { return e.record.Ref }

// Size returns the size of the record.
func (e *Entry) Size() int64 { return e.record.Size }

// Origin returns the origin of the record.
func (e *Entry) Origin() blockdev.Ref { return e.record.Origin }

func (e *Entry) entry() *Entry { return e }

// Object is a pointer to a struct that embeds Entry.
type Object interface {
	comparable
	entry() *Entry
}

// Catalog has the objects of one pool: see the package for the rules.
type Catalog[T Object] struct {
	Mu      sync.Mutex
	Objects map[blockdev.Ref]T     // changed by Put and Forget only
	Damaged map[blockdev.Ref]error // why a record cannot be used; not changed after the pool was opened, but by SetAside

	pool       string
	erasing    chan struct{}              // has one element while an object is erased
	changing   turns.Table[T]             // one call at a time changes a record: BeginChange
	keys       map[blockdev.Kind][]string // the keys of Objects, in order
	unfinished map[blockdev.Ref]bool      // the Objects that are not ready
}

// New returns the empty catalog of a pool.
func New[T Object](pool string) *Catalog[T] {
	return &Catalog[T]{pool: pool, erasing: make(chan struct{}, 1), Objects: map[blockdev.Ref]T{}, Damaged: map[blockdev.Ref]error{},
		keys: map[blockdev.Kind][]string{}, unfinished: map[blockdev.Ref]bool{}}
}

// BeginChange waits until nobody else changes the record of a ready object, and keeps others from it until end. It is called before the record is read to
// be changed, and end after it is saved, as SetLabels may come beside another call. Callers come in their order. With an error there is no end: it is that
// of ctx; errdefs.ErrBusy if the object is being deleted by now, errdefs.ErrNotFound if it is not ready any more.
func (c *Catalog[T]) BeginChange(ctx context.Context, o T) (end func(), err error) {
	end, err = c.beginTurn(ctx, o)
	if err != nil {
		return nil, err
	}
	c.Mu.Lock()
	defer c.Mu.Unlock()
	switch e := o.entry(); {
	case e.State != Ready:
		err = fmt.Errorf("%w: no %s in pool %s any more", errdefs.ErrNotFound, e.Ref(), c.pool)
	case e.claimed:
		err = fmt.Errorf("%w: change the record of %s in pool %s: it is being deleted", errdefs.ErrBusy, e.Ref(), c.pool)
	default:
		return end, nil
	}
	end()
	return nil, err
}

// beginTurn waits until nobody changes the record of an object.
func (c *Catalog[T]) beginTurn(ctx context.Context, o T) (end func(), err error) {
	end, err = c.changing.Begin(ctx, o)
	if err != nil {
		return nil, fmt.Errorf("wait for another change of the record of %s in pool %s: %w", o.entry().Ref(), c.pool, err)
	}
	return end, nil
}

// Put adds an object. The caller holds Mu.
func (c *Catalog[T]) Put(o T) {
	ref := o.entry().record.Ref
	c.Objects[ref] = o
	if i, found := slices.BinarySearch(c.keys[ref.Kind], ref.Key); !found {
		c.keys[ref.Kind] = slices.Insert(c.keys[ref.Kind], i, ref.Key)
	}
	c.noteState(o)
}

// Set gives an object the record and state that are on the disk. The caller holds Mu.
func (c *Catalog[T]) Set(o T, record blockdev.Record, state State) {
	o.entry().set(record, state)
	c.noteState(o)
}

func (c *Catalog[T]) noteState(o T) {
	if e := o.entry(); e.State == Ready {
		delete(c.unfinished, e.record.Ref)
	} else {
		c.unfinished[e.record.Ref] = true
	}
}

// Forget removes an object that is gone from the disk, and ends its claim. The caller holds Mu.
func (c *Catalog[T]) Forget(o T) {
	ref := o.entry().record.Ref
	delete(c.Objects, ref)
	delete(c.unfinished, ref)
	if i, found := slices.BinarySearch(c.keys[ref.Kind], ref.Key); found {
		c.keys[ref.Kind] = slices.Delete(c.keys[ref.Kind], i, i+1)
	}
}

// Find returns an object in whatever state; the zero T if there is none.
func (c *Catalog[T]) Find(ref blockdev.Ref) T {
	c.Mu.Lock()
	defer c.Mu.Unlock()
	return c.Objects[ref]
}

// Lookup returns a ready object and its record. errdefs.ErrNotFound if there is none,
// errdefs.ErrDataLoss if its record is damaged.
func (c *Catalog[T]) Lookup(ref blockdev.Ref) (o T, record blockdev.Record, err error) {
	var none T
	if err := ref.Validate(); err != nil {
		return none, blockdev.Record{}, err
	}
	c.Mu.Lock()
	defer c.Mu.Unlock()
	if err := c.Damaged[ref]; err != nil {
		return none, blockdev.Record{}, fmt.Errorf("pool %s: %w", c.pool, err)
	}
	if o = c.Objects[ref]; o == none || o.entry().State != Ready {
		return none, blockdev.Record{}, fmt.Errorf("%w: no %s in pool %s", errdefs.ErrNotFound, ref, c.pool)
	}
	return o, o.entry().Record(), nil
}

// SetAside: see blockdev.Shelver. The object keeps its space, and counts for it.
func (c *Catalog[T]) SetAside(ref blockdev.Ref, why string) {
	c.Mu.Lock()
	defer c.Mu.Unlock()
	c.Damaged[ref] = fmt.Errorf("%w: %s %s", ErrRecord, ref, why)
}

// Get: see blockdev.Pool.
func (c *Catalog[T]) Get(_ context.Context, ref blockdev.Ref) (blockdev.Record, error) {
	_, record, err := c.Lookup(ref)
	return record, err
}

// List: see blockdev.Pool.
func (c *Catalog[T]) List(_ context.Context, kind blockdev.Kind, after string, limit int) ([]blockdev.Record, error) {
	c.Mu.Lock()
	defer c.Mu.Unlock()
	keys := c.keys[kind]
	i, found := slices.BinarySearch(keys, after)
	if found {
		i++
	}
	var records []blockdev.Record
	for _, key := range keys[i:] {
		if limit > 0 && len(records) == limit {
			break
		}
		ref := blockdev.Ref{Kind: kind, Key: key}
		if e := c.Objects[ref].entry(); e.State == Ready && c.Damaged[ref] == nil {
			records = append(records, e.Record())
		}
	}
	return records, nil
}

// Begin is the beginning of Create. It returns the object of a spec. ready: it is there, and is what the spec asks for. Otherwise it is an unfinished
// object, claimed for the caller, that can be gone on with; or the zero T, and the caller makes it. An unfinished object that is of no use to the spec is
// removed first. errdefs.ErrExists if a ready object is not what the spec asks for; errdefs.ErrBusy if another call has claimed it.
func (c *Catalog[T]) Begin(ctx context.Context, spec blockdev.Spec, remove func(context.Context, T) error) (o T, ready bool, err error) {
	var none T
	c.Mu.Lock()
	o, err = c.Objects[spec.Ref], c.Damaged[spec.Ref]
	if o != none && err == nil {
		if ready = o.entry().State == Ready && !o.entry().claimed; !ready {
			err = c.claim(o)
		}
	}
	c.Mu.Unlock()
	switch {
	case err != nil:
		return none, false, fmt.Errorf("create %q in pool %s: %w", spec.Name, c.pool, err)
	case ready:
		return o, true, c.same(o.entry().Record(), spec)
	case o == none || o.entry().resumable(spec):
		return o, false, nil
	}
	return none, false, remove(ctx, o)
}

// same returns errdefs.ErrExists unless an object has the name and the origin of a spec.
func (c *Catalog[T]) same(have blockdev.Record, spec blockdev.Spec) error {
	if have.Name != spec.Name || have.Origin != spec.Origin {
		return fmt.Errorf("%w: %s in pool %s is %q made from %s", errdefs.ErrExists, have.Ref, c.pool, have.Name, have.Origin)
	}
	return nil
}

// resumable reports whether a spec can go on with an unfinished object.
func (e *Entry) resumable(spec blockdev.Spec) bool {
	r := e.Record()
	return e.State == Creating && e.Copied > 0 && r.Name == spec.Name && r.Size == spec.Size && r.Origin == spec.Origin && maps.Equal(r.Labels, spec.Labels) &&
		(spec.Provisioning == blockdev.AnyProvisioning || spec.Provisioning == blockdev.ProvisioningOf(r.Thin))
}

// BeginDelete is the beginning of Delete. It returns the object, claimed for its removal, whose record nobody changes any more; the zero T if there is nothing
// to do. errdefs.ErrInUse if it is
// attached, errdefs.ErrBusy if another call has claimed it. errdefs.ErrPrecondition if its record is damaged, with advice on what to do.
func (c *Catalog[T]) BeginDelete(ctx context.Context, ref blockdev.Ref, attached func(context.Context, blockdev.Ref) ([]blockdev.Device, error), advice string) (o T, err error) {
	var none T
	if err := ref.Validate(); err != nil {
		return none, err
	}
	c.Mu.Lock()
	o = c.Objects[ref]
	damaged := c.Damaged[ref]
	if o != none && damaged == nil {
		err = c.claim(o)
	}
	c.Mu.Unlock()
	switch {
	case damaged != nil:
		return none, errdefs.Recast(errdefs.ErrPrecondition, damaged, "%s in pool %s is not deleted, because its record cannot be read; %s", ref, c.pool, advice)
	case err != nil:
		return none, fmt.Errorf("delete %s in pool %s: %w", ref, c.pool, err)
	case o == none:
		return none, nil
	}
	var devices []blockdev.Device
	end, err := c.beginTurn(ctx, o) // a change that began before the claim, and would be written over the removal
	if err == nil {
		end()
		devices, err = attached(ctx, ref)
	}
	if err == nil && len(devices) > 0 && o.entry().State == Ready { // the devices of an unfinished object are the pool's own
		err = fmt.Errorf("%w: %s in pool %s is attached as %s", errdefs.ErrInUse, ref, c.pool, devices[0].Path)
	}
	if err != nil {
		c.Release(o, false)
		return none, err
	}
	return o, nil
}

// BeginErase reports whether an object that is being removed has to be erased first: a ready one if asked, and each unfinished copy, which no retry goes
// on with from then on. One that is being deleted already was erased if it had to be. One object at a time is erased and removed, until end is called, as
// the second of two that share a block has to find that it has that alone. end is never nil. errdefs.ErrBusy while the object is being copied.
func (c *Catalog[T]) BeginErase(ctx context.Context, o T, asked bool) (erase bool, end func(), err error) {
	e := o.entry()
	if erase = e.State == Ready && asked || e.State == Creating && e.record.Origin != (blockdev.Ref{}); !erase {
		return false, func() {}, nil
	}
	e.Copied = 0
	if c.copied(e.record.Ref) {
		return true, func() {}, fmt.Errorf("%w: erase %s in pool %s: it is being copied", errdefs.ErrBusy, e.record.Ref, c.pool)
	}
	select {
	case c.erasing <- struct{}{}:
		return true, func() { <-c.erasing }, nil
	case <-ctx.Done():
		return true, func() {}, fmt.Errorf("erase %s in pool %s, after others: %w", e.record.Ref, c.pool, ctx.Err())
	}
}

// copied reports whether a call is making a copy of an object.
func (c *Catalog[T]) copied(ref blockdev.Ref) bool {
	c.Mu.Lock()
	defer c.Mu.Unlock()
	for copy := range c.unfinished {
		if e := c.Objects[copy].entry(); e.claimed && e.State == Creating && e.record.Origin == ref {
			return true
		}
	}
	return false
}

// OriginStays returns errdefs.ErrBusy if the origin of an object is being removed. The caller has claimed the object, and calls it before it looks at the
// origin: from then on the origin is not erased (BeginErase) before the copy is done.
func (c *Catalog[T]) OriginStays(o T) error {
	c.Mu.Lock()
	defer c.Mu.Unlock()
	var none T
	origin := o.entry().record.Origin
	if of := c.Objects[origin]; of != none && of.entry().claimed {
		return fmt.Errorf("%w: %s, which it is to be a copy of, is being removed", errdefs.ErrBusy, origin)
	}
	return nil
}

// Erased returns the error of an erasure if it may pass: then the object has to stay. Any other error is logged, and the object is removed all the same,
// as a disk that cannot be written to would keep it forever.
func (c *Catalog[T]) Erased(ctx context.Context, ref blockdev.Ref, err error) error {
	if err == nil {
		return nil
	}
	err = fmt.Errorf("erase %s in pool %s: %w", ref, c.pool, err)
	for _, passes := range []error{context.Canceled, context.DeadlineExceeded, errdefs.ErrUnavailable, errdefs.ErrBusy, errdefs.ErrInUse} {
		if errors.Is(err, passes) {
			return err
		}
	}
	klog.FromContext(ctx).Error(err, "Could not overwrite the beginning of what is being removed; removing it all the same: if it was encrypted, who has its disk and its key can read what is left there")
	return nil
}

// claim claims an object for the caller, who holds Mu; errdefs.ErrBusy if another call has it.
func (c *Catalog[T]) claim(o T) error {
	if o.entry().claimed {
		return errdefs.ErrBusy
	}
	o.entry().claimed = true
	return nil
}

// ClaimCopies claims the unfinished copies of an object, so that nobody goes on with one or removes it. errdefs.ErrBusy, with none claimed, if another
// call has claimed one. release ends the claims; it does not change when the copies are swept.
func (c *Catalog[T]) ClaimCopies(origin blockdev.Ref) (copies []T, release func(), err error) {
	c.Mu.Lock()
	defer c.Mu.Unlock()
	for ref := range c.unfinished {
		if o := c.Objects[ref]; o.entry().record.Origin == origin {
			if o.entry().claimed {
				return nil, nil, fmt.Errorf("%w: %s, a copy of %s that was not finished, is being removed", errdefs.ErrBusy, ref, origin)
			}
			copies = append(copies, o)
		}
	}
	claim := func(claimed bool) {
		for _, o := range copies {
			o.entry().claimed = claimed
		}
	}
	claim(true)
	return copies, func() {
		c.Mu.Lock()
		defer c.Mu.Unlock()
		claim(false)
	}, nil
}

// Release ends the claim of an object. One that is not ready is removed by the next Sweep; with retry only after AbandonedAfter, so that a retry can go on
// with it.
func (c *Catalog[T]) Release(o T, retry bool) {
	c.Mu.Lock()
	defer c.Mu.Unlock()
	e := o.entry()
	e.claimed, e.Released = false, time.Time{}
	if retry {
		e.Released = time.Now()
	}
}

// Sweep removes unfinished objects that nobody has claimed: what a crash left, removals that failed, and copies that nobody came back for. A failure is
// left for the next sweep: it costs space, and no data.
func (c *Catalog[T]) Sweep(ctx context.Context, remove func(context.Context, T) error) {
	c.Mu.Lock()
	abandoned := map[blockdev.Ref]T{}
	for ref := range c.unfinished {
		if o := c.Objects[ref]; time.Since(o.entry().Released) > AbandonedAfter && c.claim(o) == nil {
			abandoned[ref] = o
		}
	}
	c.Mu.Unlock()
	for ref, o := range abandoned {
		if err := remove(ctx, o); err != nil {
			klog.FromContext(ctx).Error(err, "could not remove what is left of an object; the next call tries again", "pool", c.pool, "object", ref.String())
		}
	}
}

// Damage returns the problems of damaged records for PoolHealth, without those whose error is elsewhere, as they are reported in another way (nil: all of
// them). The caller holds Mu.
func (c *Catalog[T]) Damage(elsewhere error) []blockdev.Problem {
	var failures []string
	for _, err := range c.Damaged {
		if !errors.Is(err, elsewhere) {
			failures = append(failures, err.Error())
		}
	}
	if len(failures) == 0 {
		return nil
	}
	slices.Sort(failures)
	return []blockdev.Problem{{Severity: blockdev.Degraded, Reason: "RecordDamaged", Message: fmt.Sprintf("pool %s: %s", c.pool, strings.Join(failures, "; "))}}
}

// ChangeLabels returns a record with its labels changed: see Pool.SetLabels.
func ChangeLabels(r blockdev.Record, change func(map[string]string) error) (blockdev.Record, error) {
	labels := map[string]string{}
	maps.Copy(labels, r.Labels)
	if err := change(labels); err != nil {
		return blockdev.Record{}, err
	}
	r.Labels = labels
	return r, nil
}
