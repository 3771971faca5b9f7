package dm

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// While programs use a mirror, there is always something under way to it, and each suspension waits for that: a moment in which the driver may be killed
// (see answered). So what is over the mirror is suspended first, for as long: a device of another kind undoes all of its suspension. When the mirror is
// suspended then, there is nothing to wait for.

const (
	gatePause = time.Millisecond
	gateLooks = 10 // at which no leg has anything under way, of a mirror that holds back what is over it
	// gatePatience bounds how long users are held back for what may never end: for what is under way to the mirror, while no leg has any of it, or the mirror
	// holds some; and then for the kernel, which may wait for a copy to a slow leg, or for ever (answered). What a leg has would be waited for in any case.
	gatePatience = 2 * time.Second
)

// gated calls change, which suspends a device. If that is a mirror, nothing new reaches it meanwhile, and what was under way to it has ended, or is held, if
// that does not take too long. What is over the mirror goes on as soon as it can: what the mirror holds back has to go on first.
//
// errdefs.ErrUnavailable, without the call, if the mirror is over another one, which may hold what is under way: the kernel would wait for that, and only another
// table of that one ends it.
func gated(name string, change func() error) error {
	d, err := Find(name)
	if err != nil || d == nil || d.Suspended || !isMirror(name) {
		return change() // the kernel undoes all of it, or has nothing to wait for
	}
	g := gate{name: name, release: make(chan struct{}), drained: make(chan chan struct{})}
	open := sync.OnceFunc(func() { close(g.release) })
	defer func() {
		open()
		for _, c := range g.goesOn {
			<-c
		}
	}()
	for _, above := range gatesOf(d.Number) {
		if g.suspend(above) {
			g.waits++
		}
	}
	below, _ := Below(name)
	inner := mirrorsOf(below)
	if g.drain(below, inner); (g.waits > 0 || g.busy) && slices.ContainsFunc(inner, isUsed) {
		return fmt.Errorf("%w: what is under way to device %s does not end, as a leg of %s below it may have failed: that has to leave first", errdefs.ErrUnavailable, name, strings.Join(inner, ", "))
	}
	defer time.AfterFunc(gatePatience, open).Stop()
	return change()
}

// gate is what is over a mirror, while that is being changed.
type gate struct {
	name    string
	release chan struct{}      // closed when all of it is to go on
	drained chan chan struct{} // has, of each device that has been suspended, what is closed once it goes on
	waits   int                // devices that are still being suspended
	busy    bool               // somebody else is just suspending one
	goesOn  []chan struct{}    // what drained had
}

// drain waits until all devices are suspended, or what is under way from them may never end. below is what the mirror is over, and inner the mirrors among that.
func (g *gate) drain(below []uint64, inner []string) {
	began := time.Now()
	for quiet, since := 0, began; g.waits > 0 && quiet < gateLooks && time.Since(since) < gatePatience && time.Since(began) < answerPatience; {
		select {
		case done := <-g.drained:
			g.goesOn = append(g.goesOn, done)
			g.waits--
		case <-time.After(gatePause):
			held, rests := holds(g.name), idle(below)
			if quiet++; !held || !rests {
				quiet = 0
			}
			if !held && !rests {
				since = time.Now()
			}
			if slices.ContainsFunc(inner, keepsWrites) {
				return
			}
		}
	}
}

// suspend begins to suspend a device that is over the mirror. False if nothing is to be waited for: somebody else has suspended it, or is about to, or it is
// gone.
func (g *gate) suspend(above uint64) bool {
	free, is := trySuspension(above)
	if !is {
		g.busy = true
		return false
	}
	if d, err := find(numbered(above)); err != nil || d == nil || d.Suspended { // the kernel takes a second suspension, and one resume ends both
		free()
		return false
	}
	go func() {
		done := make(chan struct{})
		defer close(done)
		defer free()                 // before done: the next change suspends it again
		err := hold(numbered(above)) // by its number: it may be given another name meanwhile
		select {
		case g.drained <- done:
		case <-g.release:
		}
		if err == nil { // else it is gone
			<-g.release
			_ = resume(numbered(above), NoScan)
		}
	}()
	return true
}

// suspensions has the devices that somebody in this process is about to suspend, or has suspended for the sake of a mirror, by their numbers.
var suspensions = struct {
	sync.Mutex
	of map[uint64]bool
}{of: map[uint64]bool{}}

// LockSuspension keeps this package from suspending a device for the sake of a mirror below it, until free is called. It waits
// until such a suspension has ended, but not beyond the end of ctx, whose error it then returns. It is for who is to suspend the device himself: until he has
// looked whether another tool has, and done it.
func LockSuspension(ctx context.Context, device uint64) (free func(), err error) {
	for {
		if free, is := trySuspension(device); is {
			return free, nil
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(gatePause):
		}
	}
}

func trySuspension(device uint64) (free func(), is bool) {
	suspensions.Lock()
	defer suspensions.Unlock()
	if suspensions.of[device] {
		return nil, false
	}
	suspensions.of[device] = true
	return func() {
		suspensions.Lock()
		defer suspensions.Unlock()
		delete(suspensions.of, device)
	}, true
}

// isMirror reports whether a device has a target that is a mirror. It asks for no status, as the device may be of any kind: the target era gives one only while it
// is not suspended, and its next table waits for whoever has asked (pkg/blockdev/era).
func isMirror(name string) bool {
	table, _ := Lines(name)
	return slices.ContainsFunc(table, func(l Line) bool { return l.Kind == "mirror" })
}

// mirrorsOf returns the names of the mirrors among some devices.
func mirrorsOf(devices []uint64) (names []string) {
	for _, number := range devices {
		if d, err := find(numbered(number)); err == nil && d != nil && isMirror(d.Name) {
			names = append(names, d.Name)
		}
	}
	return names
}

// isUsed reports whether a request is under way to a device of the device mapper, or is held by it.
func isUsed(name string) bool {
	d, err := Find(name)
	return err != nil || d != nil && !idle([]uint64{d.Number})
}

// holds reports whether a mirror may hold requests back, as a leg has failed them. Such are under way to the mirror, and to no leg.
func holds(name string) bool {
	return anyMirror(name, func(m Mirror, err error) bool {
		return err != nil || slices.ContainsFunc(m.Legs, func(leg Leg) bool { return leg.Failed })
	})
}

// keepsWrites reports whether a mirror holds requests back, as a leg has failed a write or a flush. It may hold a flush all the same after false, if the kernel
// has forgotten which leg failed it.
func keepsWrites(name string) bool {
	return anyMirror(name, func(m Mirror, _ error) bool {
		return slices.ContainsFunc(m.Legs, func(leg Leg) bool { return leg.Failed && !leg.OnlyReads })
	})
}

// anyMirror reports whether one of the mirrors that a device consists of is such, by its status.
func anyMirror(name string, is func(m Mirror, err error) bool) bool {
	targets, _ := Status(name)
	return slices.ContainsFunc(targets, func(l Line) bool {
		if l.Kind != "mirror" {
			return false
		}
		return is(ParseMirror(l.Text))
	})
}

// idle reports whether no request is under way to any of some devices, as far as the kernel counts them.
func idle(devices []uint64) bool {
	for _, d := range devices {
		if now, _ := UnderWay(d); now > 0 {
			return false
		}
	}
	return true
}

// gatesOf returns the numbers of the devices over a device that can be suspended for it: of a mirror over it, those over that.
func gatesOf(device uint64) (gates []uint64) {
	entries, _ := os.ReadDir(Sysfs(device) + "/holders")
	for _, e := range entries {
		name, err := os.ReadFile("/sys/class/block/" + e.Name() + "/dm/name")
		if err != nil {
			continue // it is of another kind
		}
		above, err := Find(strings.TrimSuffix(string(name), "\n"))
		switch {
		case err != nil || above == nil:
		case isMirror(above.Name):
			gates = append(gates, gatesOf(above.Number)...)
		default:
			gates = append(gates, above.Number)
		}
	}
	return gates
}
