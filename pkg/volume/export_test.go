package volume

import (
	"context"
	"fmt"
	"time"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/era"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
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

// WithoutMarks has this machine be one that marks nothing, until with is called.
func WithoutMarks() (with func()) {
	marksAvailable = func() error { return fmt.Errorf("%w: there is no era", errdefs.ErrUnsupported) }
	return func() { marksAvailable = era.Available }
}

// Mounts is the table of mounts, for who mounts by himself.
func (l *Local) Mounts() *mount.Table { return l.mounts }
