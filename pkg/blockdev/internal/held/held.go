// Package held has the time to wait for a device, or a lock, that somebody only looks at: when a device was closed, udev and others that scan all block
// devices may open it for a moment.
package held

import "time"

// How often a caller looks again, and the pause before each time.
const (
	Tries = 50
	Pause = 20 * time.Millisecond
)
