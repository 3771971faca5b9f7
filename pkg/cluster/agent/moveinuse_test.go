package agent

import (
	"testing"
	"time"
)

// TestSoon: a copy is looked at again when it should be complete, within bounds.
func TestSoon(t *testing.T) {
	const every = 16 * time.Second
	for _, c := range []struct {
		took         time.Duration
		copied, left int64
		again        time.Duration
	}{
		{time.Second, 100, 500, 5 * time.Second},
		{time.Second, 100, 1 << 50, every},
		{time.Second, 100, 1, time.Second},
		{time.Second, 0, 500, time.Second},         // the copy has just begun
		{time.Second, -5, 500, time.Second},        // it was started over
		{time.Since(time.Time{}), 100, 500, every}, // it was begun by an earlier process
	} {
		if again := untilNextLook(every, c.took, c.copied, c.left); again != c.again {
			t.Errorf("%+v: again after %v", c, again)
		}
	}
}
