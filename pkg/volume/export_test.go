package volume

import "time"

// SetLongestFreeze is for tests that cannot wait for the usual one.
func (l *Local) SetLongestFreeze(d time.Duration) { l.longestFreeze = d }
