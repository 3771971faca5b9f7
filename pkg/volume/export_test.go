package volume

import (
	"context"
	"fmt"
	"time"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/era"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/mount"
)

// SetLongestFreeze sets how long a copy may hold back the writers of its source.
func (l *Local) SetLongestFreeze(d time.Duration) { l.longestFreeze = d }

// SetPatience sets how long an overview waits for a pool.
func (l *Local) SetPatience(d time.Duration) { l.patience = d }

// RetryExports is one round of KeepExports.
func (l *Local) RetryExports(ctx context.Context) { l.retryExports(ctx) }

// EndUnrecorded is one pass of endUnrecorded.
func (l *Local) EndUnrecorded(ctx context.Context) error { return l.endUnrecorded(ctx) }

// WithoutMarks makes this machine one that cannot mark writes, until with is called.
func WithoutMarks() (with func()) {
	marksAvailable = func() error { return fmt.Errorf("%w: there is no era", errdefs.ErrUnsupported) }
	return func() { marksAvailable = era.Available }
}

// Mounts returns the table of mounts, for tests that mount by themselves.
func (l *Local) Mounts() *mount.Table { return l.mounts }

// SetCommonEra writes an era into the record of a leg, as that of its last common moment with the others.
func (l *Local) SetCommonEra(ctx context.Context, id ID, era uint32) error {
	return l.setLabels(ctx, id, func(labels map[string]string) error {
		labels[labelLeg] = LegState{Sound: 1, Opened: 1, Closed: true, Common: "X", Era: era}.label()
		return nil
	})
}
