package agent

import (
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
)

// TestJoinSlots: a few legs join at once, those of the volumes with the fewest current legs first. A volume that does not ask any more is not waited for.
func TestJoinSlots(t *testing.T) {
	var all joinSlots
	now := time.Now()
	takes := func(key string, current int, want bool) {
		t.Helper()
		if all.acquire(blockdev.Ref{Key: key}, current, now, 3*time.Second) != want {
			t.Errorf("%s, with %d current: %v", key, current, !want)
		}
	}
	is := func(key string, joins bool) { all.set(blockdev.Ref{Key: key}, joins) }
	is("before", true) // it was begun by an earlier process
	takes("two", 2, true)
	takes("two", 2, true)
	takes("other two", 2, false)
	takes("one", 1, false)
	is("before", false)
	takes("other two", 2, false)
	takes("one", 1, true)
	is("two", false)
	takes("other two", 2, true)
	is("other two", false)
	is("one", false)

	is("x", true)
	takes("y", 2, true)
	takes("one", 1, false)
	is("y", false)
	takes("two", 2, false)
	now = now.Add(4 * time.Second) // "one" has not asked for too long
	takes("two", 2, true)
}
