package agent

import (
	"errors"
	"testing"
	"time"
)

// TestPace: with a kernel that copies as much as its number allows, the rate reaches the limit, however fast it could copy. When nothing is copied, the
// kernel has its usual number.
func TestPace(t *testing.T) {
	const mib = 1 << 20
	for _, most := range []float64{60 * mib, 900 * mib, 5000 * mib} { // bytes per second without a limit
		percent := 0
		p := &copyThrottle{limit: 50 * mib, tellKernel: func(n int) error { percent = n; return nil }}
		now, done := time.Now(), 0.0
		p.report(t.Context(), throttledCopy{copyOfMove, "a"}, 0, now)
		if percent != firstPercent {
			t.Errorf("it begins with %d %%", percent)
		}
		last := 0.0
		for range 10 {
			now = now.Add(time.Second)
			last = most * float64(percent) / 100
			done += last
			p.report(t.Context(), throttledCopy{copyOfMove, "a"}, int64(done), now)
		}
		if step := most / 100; last > 50*mib+step || last < 50*mib-step {
			t.Errorf("of %.0f MiB a second, %.0f are copied", most/mib, last/mib)
		}
		p.report(t.Context(), throttledCopy{copyOfMove, "b"}, 0, now.Add(time.Second)) // another copy, whose rate is not known yet
		was := percent
		p.report(t.Context(), throttledCopy{copyOfMove, "b"}, 0, now.Add(time.Second+adjustEvery/2))
		if percent != was {
			t.Errorf("after half a look it went from %d %% to %d %%", was, percent)
		}
		p.stop(t.Context(), copyOfMove, "")
		if percent != allPercent {
			t.Errorf("at rest it is %d %%", percent)
		}
		p.report(t.Context(), throttledCopy{copyOfMove, "c"}, 0, now.Add(time.Minute))
		if percent != firstPercent {
			t.Errorf("after a rest it begins with %d %%", percent)
		}
	}
}

// TestPaceWithout: without a limit the kernel's number is not set until a copy is under way. Then it is set to the usual one, as an earlier driver may
// have set another.
func TestPaceWithout(t *testing.T) {
	var told []int
	p := &copyThrottle{tellKernel: func(n int) error { told = append(told, n); return errors.New("no such file") }}
	p.stop(t.Context(), copyOfMove, "")
	if len(told) > 0 {
		t.Errorf("at rest it was told %v", told)
	}
	p.report(t.Context(), throttledCopy{copyOfMove, "a"}, 0, time.Now())
	p.report(t.Context(), throttledCopy{copyOfMove, "a"}, 1<<30, time.Now().Add(time.Second))
	if len(told) != 1 || told[0] != allPercent {
		t.Errorf("it was told %v", told)
	}
}

// TestPaceShared: copies at the same time keep the limit together, and one alone may use all of it when the others have ended.
func TestPaceShared(t *testing.T) {
	const mib = 1 << 20
	percent := 0
	p := &copyThrottle{limit: 50 * mib}
	p.use(func(n int) error { percent = n; return nil })
	now := time.Now()
	done := map[string]float64{}
	second := func(keys ...string) (all float64) {
		for _, key := range keys {
			now = now.Add(time.Second / time.Duration(len(keys)))
			one := 1000 * mib * float64(percent) / 100 / float64(len(keys))
			done[key] += one
			all += one
			p.report(t.Context(), throttledCopy{copyOfJoin, key}, int64(done[key]), now)
		}
		return all
	}
	p.report(t.Context(), throttledCopy{copyOfJoin, "a"}, 0, now)
	p.report(t.Context(), throttledCopy{copyOfJoin, "b"}, 0, now)
	p.report(t.Context(), throttledCopy{copyOfMove, "c"}, 0, now)
	all := 0.0
	for range 20 {
		all = second("a", "b")
	}
	if all > 70*mib || all < 35*mib {
		t.Errorf("two copy %.0f MiB a second", all/mib)
	}
	p.stop(t.Context(), copyOfMove, "")
	p.stop(t.Context(), copyOfJoin, "a")
	if percent == allPercent {
		t.Error("one goes on, and the limit is off")
	}
	for range 20 {
		all = second("b")
	}
	if all > 60*mib || all < 40*mib {
		t.Errorf("one copies %.0f MiB a second", all/mib)
	}
	p.stop(t.Context(), copyOfJoin, "b")
	if percent != allPercent {
		t.Errorf("at rest it is %d %%", percent)
	}
}

// TestPaceBegins: a copy begins slowly, and bytes that are reported as done at its beginning do not count as copied.
func TestPaceBegins(t *testing.T) {
	const mib = 1 << 20
	percent := 0
	p := &copyThrottle{limit: 50 * mib, tellKernel: func(n int) error { percent = n; return nil }}
	now, one := time.Now(), throttledCopy{copyOfJoin, "a"}
	p.start(t.Context(), one, now)
	p.stop(t.Context(), copyOfJoin, "b")
	if percent != firstPercent {
		t.Errorf("it begins with %d %%", percent)
	}
	p.report(t.Context(), one, 900*mib, now.Add(time.Second))
	if percent != firstPercent {
		t.Errorf("after the first look it is %d %%", percent)
	}
	p.report(t.Context(), one, 925*mib, now.Add(2*time.Second))
	if percent != 2*firstPercent {
		t.Errorf("at half the limit it went to %d %%", percent)
	}
	p.report(t.Context(), one, 1025*mib, now.Add(3*time.Second))
	if percent != firstPercent {
		t.Errorf("at twice the limit it went to %d %%", percent)
	}
}

// TestPaceOnAverage: the limit is kept on average even if the kernel's speed changes much from one second to the next, progress comes in units, and
// reports come at any time. The rate may then be well below the limit.
func TestPaceOnAverage(t *testing.T) {
	const mib = 1 << 20
	for _, most := range [][]float64{{100, 100}, {5, 5, 5, 200}, {0, 0, 0, 0, 0, 400}, {10, 100}} { // MiB per second without a limit, in one second after the other
		for _, look := range []time.Duration{100 * time.Millisecond, time.Second, 3 * time.Second} {
			percent := 0
			p := &copyThrottle{limit: 4 * mib, tellKernel: func(n int) error { percent = n; return nil }}
			begin := time.Now()
			const step = 50 * time.Millisecond
			done, seconds := 0.0, 120
			for at := time.Duration(0); at < time.Duration(seconds)*time.Second; at += step {
				if at%look == 0 {
					p.report(t.Context(), throttledCopy{copyOfJoin, "a"}, int64(done)*mib, begin.Add(at))
				}
				done += most[int(at/time.Second)%len(most)] * float64(percent) / 100 * step.Seconds()
			}
			if rate := done / float64(seconds); rate > 4.5 || rate < 0.5 {
				t.Errorf("of %v MiB a second, with looks each %v, %.1f were copied, and not up to 4", most, look, rate)
			}
		}
	}
}

// TestPaceSilent: a copy that is not reported for a while, as it takes long to begin, still counts when another one has ended.
func TestPaceSilent(t *testing.T) {
	const mib = 1 << 20
	percent := 0
	p := &copyThrottle{limit: 4 * mib, tellKernel: func(n int) error { percent = n; return nil }}
	now, a, b := time.Now(), throttledCopy{copyOfJoin, "a"}, throttledCopy{copyOfJoin, "b"}
	p.start(t.Context(), a, now)
	p.start(t.Context(), b, now)
	for i := range int64(10) {
		p.report(t.Context(), a, 4*i*mib, now.Add(time.Duration(i)*time.Second))
	}
	p.stop(t.Context(), copyOfJoin, "a")
	if percent == allPercent {
		t.Error("another one is about to begin, and the limit is off")
	}
}
