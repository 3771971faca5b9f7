// Package held says how long to wait for a device that something looked at when it was closed (udev does, and whoever scans
// all block devices): it is held for a moment.
package held

import "time"

// How often, and how long each time, it is waited for.
const (
	Tries = 50
	Pause = 20 * time.Millisecond
)
