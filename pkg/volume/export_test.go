package volume

import (
	"context"
	"time"

	"github.com/ashlar-csi/ashlar/pkg/mount"
)

// SetLongestFreeze is for tests that cannot wait for the usual one.
func (l *Local) SetLongestFreeze(d time.Duration) { l.longestFreeze = d }

// SetPatience sets how long an overview waits for a pool.
func (l *Local) SetPatience(d time.Duration) { l.patience = d }

// RetryExports is one round of KeepExports.
func (l *Local) RetryExports(ctx context.Context) { l.retryExports(ctx) }

// EndUnsaid is one, too.
func (l *Local) EndUnsaid(ctx context.Context) error { return l.endUnsaid(ctx) }

// Mounts is the table of mounts, for who mounts by himself.
func (l *Local) Mounts() *mount.Table { return l.mounts }
