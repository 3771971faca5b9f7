package agent

import (
	"errors"
	"testing"
	"time"
)

// TestPace: a kernel that copies as much as the number says comes to the limit, whatever it could copy, and is left alone when nothing is copied.
func TestPace(t *testing.T) {
	const mib = 1 << 20
	for _, most := range []float64{60 * mib, 900 * mib, 5000 * mib} { // bytes per second without a limit
		percent := 0
		p := &pace{limit: 50 * mib, throttle: func(n int) error { percent = n; return nil }}
		now, done := time.Now(), 0.0
		p.copied(t.Context(), "a", 0, now)
		if percent != firstPercent {
			t.Errorf("it begins with %d %%", percent)
		}
		last := 0.0
		for range 10 {
			now = now.Add(time.Second)
			last = most * float64(percent) / 100
			done += last
			p.copied(t.Context(), "a", int64(done), now)
		}
		if step := most / 100; last > 50*mib+step || last < 50*mib-step {
			t.Errorf("of %.0f MiB a second, %.0f are copied", most/mib, last/mib)
		}
		p.copied(t.Context(), "b", 0, now.Add(time.Second)) // another one: nothing is known of its rate
		was := percent
		p.copied(t.Context(), "b", 0, now.Add(time.Second+leastLook/2))
		if percent != was {
			t.Errorf("after half a look it went from %d %% to %d %%", was, percent)
		}
		p.rests(t.Context())
		if percent != allPercent {
			t.Errorf("at rest it is %d %%", percent)
		}
		p.copied(t.Context(), "c", 0, now.Add(time.Minute))
		if percent != firstPercent {
			t.Errorf("after a rest it begins with %d %%", percent)
		}
	}
}

// TestPaceWithout: without a limit nothing is touched until a copy is under way, which is not held back by the number of a driver of before.
func TestPaceWithout(t *testing.T) {
	var told []int
	p := &pace{throttle: func(n int) error { told = append(told, n); return errors.New("no such file") }}
	p.rests(t.Context())
	if len(told) > 0 {
		t.Errorf("at rest it was told %v", told)
	}
	p.copied(t.Context(), "a", 0, time.Now())
	p.copied(t.Context(), "a", 1<<30, time.Now().Add(time.Second))
	if len(told) != 1 || told[0] != allPercent {
		t.Errorf("it was told %v", told)
	}
}
