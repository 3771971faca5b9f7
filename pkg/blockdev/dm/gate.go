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
	// gatePatience bounds the wait for what is under way to a mirror whose users are held back. It is long for a disk, and short for them.
	gatePatience = 500 * time.Millisecond
)

// gated calls suspend, which suspends a device. If that is a mirror, nothing new reaches it meanwhile, and what was under way to it has ended, or is held, if
// that takes no longer than gatePatience. What is over the mirror goes on as soon as it can: what the mirror holds back has to go on first.
func gated(name string, suspend func() error) error {
	d, err := Find(name)
	if err != nil || d == nil || !isMirror(name) {
		return suspend() // the kernel undoes all of it
	}
	release, ended := make(chan struct{}), make(chan struct{})
	defer close(release)
	gates := 0
	for _, above := range gatesOf(d.Number) {
		free, is := trySuspension(above)
		if !is {
			continue // writes to it are held back already
		}
		gates++
		go func() {
			defer free()
			err := HoldNow(above) // when it returns, nothing is under way to it
			select {
			case ended <- struct{}{}:
			case <-release:
			}
			if err == nil { // else another tool has suspended it, or it is gone
				<-release
				_ = Resume(above, NoScan)
			}
		}()
	}
	below, _ := Below(name)
	patience := time.After(gatePatience)
	for quiet := 0; gates > 0 && quiet < gateLooks; {
		select {
		case <-ended:
			gates--
		case <-patience:
			gates = 0
		case <-time.After(gatePause):
			quiet++
			if !holds(name) || !idle(below...) {
				quiet = 0
			}
		}
	}
	return suspend()
}

// suspensions has the names of the devices that somebody in this process has suspended, or is about to.
var suspensions = struct {
	sync.Mutex
	of map[string]bool
}{of: map[string]bool{}}

// LockSuspension keeps this package from suspending a device for the sake of a mirror below it, until free is called, which may be called again. It waits
// until such a suspension has ended, but not beyond the end of ctx, whose error it then returns. It is for who is to suspend the device, before he looks
// whether another tool has.
func LockSuspension(ctx context.Context, name string) (free func(), err error) {
	for {
		if free, is := trySuspension(name); is {
			return free, nil
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(gatePause):
		}
	}
}

func trySuspension(name string) (free func(), is bool) {
	suspensions.Lock()
	defer suspensions.Unlock()
	if suspensions.of[name] {
		return nil, false
	}
	suspensions.of[name] = true
	return sync.OnceFunc(func() {
		suspensions.Lock()
		defer suspensions.Unlock()
		delete(suspensions.of, name)
	}), true
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
func idle(devices ...uint64) bool {
	for _, d := range devices {
		if now, _ := UnderWay(d); now > 0 {
			return false
		}
	}
	return true
}

// gatesOf returns the names of the devices over a device that can be suspended for it: of a mirror over it, those over that.
func gatesOf(device uint64) (names []string) {
	entries, _ := os.ReadDir(Sysfs(device) + "/holders")
	for _, e := range entries {
		name, err := os.ReadFile("/sys/class/block/" + e.Name() + "/dm/name")
		if err != nil {
			continue // it is of another kind
		}
		above := strings.TrimSuffix(string(name), "\n")
		if !isMirror(above) {
			names = append(names, above)
		} else if d, err := Find(above); err == nil && d != nil {
			names = append(names, gatesOf(d.Number)...)
		}
	}
	return names
}
