package catalog

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

type object struct{ Entry }

func refOf(digit string) blockdev.Ref {
	return blockdev.Ref{Kind: blockdev.Volume, Key: strings.Repeat(digit, 32)}
}

func recordOf(digit string) blockdev.Record {
	return blockdev.Record{Ref: refOf(digit), Name: digit, Size: 1 << 20}
}

func specOf(digit string) blockdev.Spec {
	return blockdev.Spec{Ref: refOf(digit), Name: digit, Size: 1 << 20}
}

// remover forgets objects, like a pool that removes them, and counts them. With an error it releases them.
type remover struct {
	c       *Catalog[*object]
	err     error
	removed int
}

func (r *remover) remove(_ context.Context, o *object) error {
	if r.err != nil {
		r.c.Release(o, false)
		return r.err
	}
	r.c.Mu.Lock()
	defer r.c.Mu.Unlock()
	r.c.Forget(o)
	r.removed++
	return nil
}

func attachedNowhere(context.Context, blockdev.Ref) ([]blockdev.Device, error) { return nil, nil }

func put(c *Catalog[*object], e Entry) *object {
	c.Mu.Lock()
	defer c.Mu.Unlock()
	o := &object{e}
	c.Put(o)
	return o
}

// TestBusy: one call works on an object that is not ready, and no other call sees it.
func TestBusy(t *testing.T) {
	c := New[*object]("test")
	r := &remover{c: c}
	o := put(c, Begun(recordOf("a")))
	if _, _, err := c.Begin(t.Context(), specOf("a"), r.remove); !errors.Is(err, errdefs.ErrBusy) {
		t.Errorf("Begin of what is being made: %v", err)
	}
	if _, err := c.BeginDelete(t.Context(), refOf("a"), attachedNowhere, ""); !errors.Is(err, errdefs.ErrBusy) {
		t.Errorf("BeginDelete of what is being made: %v", err)
	}
	if c.Sweep(t.Context(), r.remove); r.removed > 0 {
		t.Error("Sweep removes what is being made")
	}
	if _, _, err := c.Lookup(refOf("a")); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("Lookup of what is being made: %v", err)
	}
	if records, err := c.List(t.Context(), blockdev.Volume, "", 0); len(records) > 0 || err != nil {
		t.Errorf("List of what is being made: %v, %v", records, err)
	}
	c.Mu.Lock()
	c.Set(o, o.Record(), Ready)
	c.Mu.Unlock()
	c.Release(o, false)
	for range 2 { // a caller that finds it ready does not claim it
		if found, ready, err := c.Begin(t.Context(), specOf("a"), r.remove); found != o || !ready || err != nil {
			t.Errorf("Begin of what is ready: %v, %v, %v", found, ready, err)
		}
	}
	other := specOf("a")
	other.Name = "another"
	if _, _, err := c.Begin(t.Context(), other, r.remove); !errors.Is(err, errdefs.ErrExists) {
		t.Errorf("Begin of another of that name: %v", err)
	}
	if record, err := c.Get(t.Context(), refOf("a")); !record.Ready || err != nil {
		t.Errorf("Get: %+v, %v", record, err)
	}
}

// TestRetry: a retry of the same call goes on with a copy that was cut short; any other call begins anew.
func TestRetry(t *testing.T) {
	for what, c := range map[string]struct {
		copied int64
		change func(*blockdev.Spec)
		found  bool
	}{
		"the same":         {1, func(*blockdev.Spec) {}, true},
		"the same, thick":  {1, func(s *blockdev.Spec) { s.Provisioning = blockdev.Thick }, true},
		"nothing in place": {0, func(*blockdev.Spec) {}, false},
		"another size":     {1, func(s *blockdev.Spec) { s.Size *= 2 }, false},
		"another origin":   {1, func(s *blockdev.Spec) { s.Origin = refOf("b") }, false},
		"other labels":     {1, func(s *blockdev.Spec) { s.Labels = map[string]string{"a": "b"} }, false},
		"thin":             {1, func(s *blockdev.Spec) { s.Provisioning = blockdev.Thin }, false},
	} {
		t.Run(what, func(t *testing.T) {
			all := New[*object]("test")
			r := &remover{c: all}
			o := put(all, Begun(recordOf("a")))
			o.Copied = c.copied
			all.Release(o, true)
			if all.Sweep(t.Context(), r.remove); r.removed > 0 {
				t.Fatal("Sweep does not wait for a retry")
			}
			spec := specOf("a")
			c.change(&spec)
			found, ready, err := all.Begin(t.Context(), spec, r.remove)
			if (found == o) != c.found || (r.removed == 0) != c.found || ready || err != nil {
				t.Errorf("Begin: %v, %v, %v; %d removed", found, ready, err, r.removed)
			}
		})
	}
}

// TestSweep: what nobody came back for is removed, and what could not be removed is tried again.
func TestSweep(t *testing.T) {
	c := New[*object]("test")
	r := &remover{c: c, err: errors.New("broken")}
	put(c, Found(recordOf("a"), Deleting))
	put(c, Found(recordOf("b"), Ready))
	late := put(c, Begun(recordOf("c")))
	c.Release(late, true)
	late.Released = late.Released.Add(-AbandonedAfter - time.Second)
	c.Sweep(t.Context(), r.remove)
	r.err = nil
	if c.Sweep(t.Context(), r.remove); r.removed != 2 || c.Find(refOf("b")) == nil || len(c.unfinished) > 0 {
		t.Errorf("%d are removed, %v are left, of which %v are not finished", r.removed, c.Objects, c.unfinished)
	}
}

// TestDelete: an attached object stays, and can be claimed again. A missing one counts as deleted. A damaged one is not touched.
func TestDelete(t *testing.T) {
	c := New[*object]("test")
	c.Damaged[refOf("d")] = fmt.Errorf("%w: noise", ErrRecord)
	o := put(c, Found(recordOf("a"), Ready))
	attached := func(context.Context, blockdev.Ref) ([]blockdev.Device, error) {
		return []blockdev.Device{{Path: "/dev/loop0"}}, nil
	}
	if _, err := c.BeginDelete(t.Context(), refOf("a"), attached, ""); !errors.Is(err, errdefs.ErrInUse) {
		t.Errorf("attached: %v", err)
	}
	if found, err := c.BeginDelete(t.Context(), refOf("a"), attachedNowhere, ""); found != o || err != nil {
		t.Errorf("not attached any more: %v, %v", found, err)
	}
	if found, err := c.BeginDelete(t.Context(), refOf("b"), attachedNowhere, ""); found != nil || err != nil {
		t.Errorf("not there: %v, %v", found, err)
	}
	_, err := c.BeginDelete(t.Context(), refOf("d"), attachedNowhere, "look at it")
	if !errors.Is(err, errdefs.ErrPrecondition) || len(errdefs.Kinds(err)) != 1 || !strings.Contains(err.Error(), "look at it") {
		t.Errorf("damaged: %v", err)
	}
	if _, _, err := c.Begin(t.Context(), specOf("d"), nil); !errors.Is(err, errdefs.ErrDataLoss) {
		t.Errorf("Begin of what is damaged: %v", err)
	}
	if problems := c.Damage(nil); len(problems) != 1 || problems[0].Reason != "RecordDamaged" {
		t.Errorf("Damage: %v", problems)
	}
}

// TestClaimCopies: the unfinished copies of an object are claimed together or not at all. Afterwards they are swept as before.
func TestClaimCopies(t *testing.T) {
	c := New[*object]("test")
	r := &remover{c: c}
	unfinished := func(digit string, released time.Time) *object {
		record := recordOf(digit)
		record.Origin = refOf("a")
		e := Found(record, Creating)
		e.Released = released
		return put(c, e)
	}
	put(c, Found(recordOf("a"), Ready))
	put(c, Found(recordOf("d"), Creating)) // a copy of nothing
	abandoned, waiting := unfinished("b", time.Time{}), unfinished("c", time.Now())
	copies, release, err := c.ClaimCopies(refOf("a"))
	if err != nil || len(copies) != 2 {
		t.Fatalf("claimed %v, %v", copies, err)
	}
	if _, _, err := c.ClaimCopies(refOf("a")); !errors.Is(err, errdefs.ErrBusy) {
		t.Errorf("claimed twice: %v", err)
	}
	if c.Sweep(t.Context(), r.remove); r.removed != 1 {
		t.Errorf("Sweep beside the claims removed %d, want the one that is a copy of nothing", r.removed)
	}
	release()
	if c.Sweep(t.Context(), r.remove); r.removed != 2 || c.Find(abandoned.Ref()) != nil || c.Find(waiting.Ref()) == nil {
		t.Errorf("Sweep afterwards removed %d in all", r.removed)
	}
}

// TestErase: objects that are erased are removed one at a time, and no retry goes on with one.
func TestErase(t *testing.T) {
	c := New[*object]("test")
	copied := recordOf("a")
	copied.Origin = refOf("b")
	unfinished := put(c, Found(copied, Creating))
	unfinished.Copied = 1
	ready := put(c, Found(recordOf("c"), Ready))
	for _, o := range []*object{put(c, Found(recordOf("d"), Creating)), put(c, Found(copied, Deleting))} {
		if erase, end, err := c.BeginErase(t.Context(), o, true); erase || err != nil {
			t.Errorf("%s in state %s: %v, %v", o.Record().Ref, o.State, erase, err)
		} else {
			end()
		}
	}
	erase, end, err := c.BeginErase(t.Context(), unfinished, false)
	if !erase || err != nil || unfinished.Copied != 0 {
		t.Errorf("a copy that is not finished: %v, %v, with %d bytes to go on with", erase, err, unfinished.Copied)
	}
	if erase, end, err := c.BeginErase(t.Context(), ready, false); erase || err != nil {
		t.Errorf("what is ready, and not to be erased: %v, %v", erase, err)
	} else {
		end()
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, end, err := c.BeginErase(ended, ready, true); !errors.Is(err, context.Canceled) {
		t.Errorf("two at once: %v", err)
	} else {
		end()
	}
	end()
	if erase, end, err := c.BeginErase(t.Context(), ready, true); !erase || err != nil {
		t.Errorf("what is ready: %v, %v", erase, err)
	} else {
		end()
	}
	for _, passes := range []error{errdefs.ErrUnavailable, errdefs.ErrInUse, errdefs.ErrBusy, context.DeadlineExceeded} {
		if err := c.Erased(t.Context(), refOf("a"), passes); !errors.Is(err, passes) {
			t.Errorf("%v: %v", passes, err)
		}
	}
	for _, stays := range []error{nil, errdefs.ErrNoSpace, errdefs.ErrDataLoss, errors.New("broken")} {
		if err := c.Erased(t.Context(), refOf("a"), stays); err != nil {
			t.Errorf("%v: %v, and it is never deleted", stays, err)
		}
	}
}

// TestEraseOrCopy: if one call erases an object, and another copies it, the later one is errdefs.ErrBusy.
func TestEraseOrCopy(t *testing.T) {
	c := New[*object]("test")
	origin := put(c, Found(recordOf("a"), Ready))
	record := recordOf("b")
	record.Origin = refOf("a")
	copied := put(c, Begun(record))
	if err := c.OriginStays(copied); err != nil {
		t.Errorf("of what nobody removes: %v", err)
	}
	if err := c.OriginStays(origin); err != nil {
		t.Errorf("of nothing: %v", err)
	}
	if _, err := c.BeginDelete(t.Context(), refOf("a"), attachedNowhere, ""); err != nil {
		t.Fatal(err)
	}
	if _, end, err := c.BeginErase(t.Context(), origin, true); !errors.Is(err, errdefs.ErrBusy) {
		t.Errorf("erase what is copied: %v", err)
	} else {
		end()
	}
	if err := c.OriginStays(copied); !errors.Is(err, errdefs.ErrBusy) {
		t.Errorf("copy what is being removed: %v", err)
	}
	c.Release(copied, false) // an unfinished copy holds up nobody
	if erase, end, err := c.BeginErase(t.Context(), origin, true); !erase || err != nil {
		t.Errorf("erase: %v, %v", erase, err)
	} else {
		end()
	}
}

// TestLabels: labels come back as they were, whatever is in them, and callers that have them cannot change them.
func TestLabels(t *testing.T) {
	c := New[*object]("test")
	record := recordOf("a")
	record.Labels = map[string]string{"": "", "a": "b", "zero\x00": "\x00", "long": strings.Repeat("x", 300), "ä": "\xff"}
	want := maps.Clone(record.Labels)
	put(c, Found(record, Ready))
	for range 2 {
		_, is, err := c.Lookup(refOf("a"))
		if err != nil || !maps.Equal(is.Labels, want) {
			t.Fatalf("%q, %v, want %q", is.Labels, err, want)
		}
		is.Labels["a"], record.Labels["a"] = "c", "c"
	}
}

// TestChange: one call at a time changes the record of an object. A caller that waits gives up when its context ends, and holds up no other one. Other
// objects are not waited for.
func TestChange(t *testing.T) {
	c := New[*object]("default")
	a, b := &object{Found(blockdev.Record{}, Ready)}, &object{Found(blockdev.Record{}, Ready)}
	end, err := c.BeginChange(t.Context(), a)
	check.OK(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := c.BeginChange(ctx, a); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("beside another change: %v", err)
	}
	other, err := c.BeginChange(t.Context(), b)
	check.OK(t, err)
	other()
	var changing, changed atomic.Int32
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			end, err := c.BeginChange(t.Context(), a)
			if err != nil || changing.Add(1) > 1 {
				t.Errorf("another change is under way, %v", err)
			}
			time.Sleep(time.Millisecond)
			changed.Add(1)
			changing.Add(-1)
			end()
		})
	}
	time.Sleep(10 * time.Millisecond)
	if n := changed.Load(); n > 0 {
		t.Errorf("%d changed it before the first one had ended", n)
	}
	end()
	all.Wait()
	if c.changing.Len() > 0 {
		t.Error("it is remembered who changed what")
	}
}

// TestChangeBesideDelete: a deletion waits for a change that is under way, and after it nobody changes the record.
func TestChangeBesideDelete(t *testing.T) {
	c := New[*object]("default")
	o := put(c, Found(recordOf("a"), Ready))
	end, err := c.BeginChange(t.Context(), o)
	check.OK(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := c.BeginDelete(ctx, refOf("a"), attachedNowhere, ""); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("beside a change: %v", err)
	}
	end()
	if found, err := c.BeginDelete(t.Context(), refOf("a"), attachedNowhere, ""); found != o || err != nil {
		t.Errorf("after it: %v, %v", found, err)
	}
	if _, err := c.BeginChange(t.Context(), o); !errors.Is(err, errdefs.ErrBusy) {
		t.Errorf("a change beside the deletion: %v", err)
	}
	c.Mu.Lock()
	c.Set(o, o.Record(), Deleting)
	c.Mu.Unlock()
	c.Release(o, false)
	if _, err := c.BeginChange(t.Context(), o); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("a change of what is to be removed: %v", err)
	}
}

// TestChangesInOrder: a caller that changes a record again and again does not keep others from it.
func TestChangesInOrder(t *testing.T) {
	c := New[*object]("default")
	o := &object{Found(blockdev.Record{}, Ready)}
	var stop atomic.Bool
	var all sync.WaitGroup
	all.Go(func() {
		for !stop.Load() {
			end, err := c.BeginChange(t.Context(), o)
			check.OK(t, err)
			time.Sleep(time.Millisecond)
			end()
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	for range 20 {
		end, err := c.BeginChange(ctx, o)
		if err != nil {
			t.Error(err)
			break
		}
		end()
	}
	stop.Store(true)
	all.Wait()
}
