package dm

import (
	"context"
	"os"
	"slices"
	"strings"
	"sync"
	"time"
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
func gated(name string, change func() error) error {
	d, err := Find(name)
	if err != nil || d == nil || d.Suspended || !isMirror(name) {
		return change() // the kernel undoes all of it, or has nothing to wait for
	}
	release, drained := make(chan struct{}), make(chan chan struct{})
	open := sync.OnceFunc(func() { close(release) })
	var goesOn []chan struct{} // each is closed when a device that was suspended goes on
	defer func() {
		open()
		for _, c := range goesOn {
			<-c
		}
	}()
	gates := 0
	for _, above := range gatesOf(d.Number) {
		if closeGate(above, drained, release) {
			gates++
		}
	}
	below, _ := Below(name)
	began := time.Now()
	for quiet, since := 0, began; gates > 0 && quiet < gateLooks && time.Since(since) < gatePatience && time.Since(began) < answerPatience; {
		select {
		case done := <-drained:
			goesOn = append(goesOn, done)
			gates--
		case <-time.After(gatePause):
			held, rests := holds(name), idle(below)
			if quiet++; !held || !rests {
				quiet = 0
			}
			if !held && !rests {
				since = time.Now()
			}
		}
	}
	defer time.AfterFunc(gatePatience, open).Stop()
	return change()
}

// closeGate begins to suspend a device that is over a mirror, until release is closed. When nothing is under way from it any more, drained gets a channel that
// is closed once the device goes on. False if nothing is to be waited for: somebody else has suspended it, or is about to, or it is gone.
func closeGate(above uint64, drained chan<- chan struct{}, release <-chan struct{}) bool {
	free, is := trySuspension(above)
	if !is {
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
		case drained <- done:
		case <-release:
		}
		if err == nil { // else it is gone
			<-release
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

func isMirror(name string) bool {
	kind, _, err := Target(name)
	return err == nil && kind == "mirror"
}

// holds reports whether a mirror may hold requests back, as a leg has failed them. Such are under way to the mirror, and to no leg.
func holds(name string) bool {
	targets, err := Status(name)
	return err != nil || slices.ContainsFunc(targets, func(l Line) bool {
		m, err := ParseMirror(l.Text)
		return l.Kind == "mirror" && (err != nil || slices.ContainsFunc(m.Legs, func(leg Leg) bool { return leg.Failed }))
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
