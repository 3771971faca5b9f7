// Package held says how long to wait for a device, or a lock, that somebody holds only for a moment: when a device is closed, udev and others that scan all
// block devices may open it.
package held

import "time"

// How often a caller looks again, and the pause before each time.
const (
	Tries = 50
	Pause = 20 * time.Millisecond
)
