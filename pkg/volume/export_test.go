package volume

import "time"

// SetLongestFreeze is for tests that cannot wait for the usual one.
func (l *Local) SetLongestFreeze(d time.Duration) { l.longestFreeze = d }

// SetPatience sets how long an overview waits for a pool.
func (l *Local) SetPatience(d time.Duration) { l.patience = d }
