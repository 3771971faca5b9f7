package agent

import (
	"context"
	"errors"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/mirror"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/metrics"
)

// The node that uses a volume with several legs scrubs it from time to time: it compares the legs, to find bit rot and misplaced writes before they are read.
// It is slow, takes one volume at a time, and resumes where it was: progress, end and findings are in the object. What differs is reported, and left as it
// is: nobody can tell which leg is right.

const (
	// scrubLooks is how often, in looks (Options.LookEvery), it is checked whether a scrub is due, or can go on.
	scrubLooks = 10
	// scrubTries is how often an unreadable part is read, while no leg has failed, before it counts as differing.
	scrubTries = 3
	// scrubWrites is how often a write of the status is tried, as others write the same object.
	scrubWrites = 5
)

// runScrubs scrubs a mirror whenever that is due, until ctx ends.
func (m *mirrorReconciler) runScrubs(ctx context.Context) {
	s := &scrub{mirrorReconciler: m}
	for pause(ctx, scrubLooks*m.options.LookEvery) == nil {
		v, is := m.replicated(m.ref.Key)
		if !is || !s.isClaimed(v) || !scrubDue(v, m.options.ScrubEvery, time.Now()) || !m.comparable(ctx, v) {
			continue
		}
		select {
		case m.scrubbing <- struct{}{}:
		case <-ctx.Done():
			return
		}
		err := s.run(ctx)
		<-m.scrubbing
		if err != nil && ctx.Err() == nil && !errors.Is(err, errdefs.ErrUnavailable) && !errors.Is(err, errdefs.ErrBusy) && !errors.Is(err, errdefs.ErrNotFound) {
			klog.FromContext(ctx).Error(err, "Could not compare the legs of a replicated volume; going on with that later")
		}
	}
}

// runAlongside runs part in a goroutine until end is called, or ctx ends. end waits for it.
func (m *mirrorReconciler) runAlongside(ctx context.Context, part func(context.Context)) (end func()) {
	running, stop := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		part(running)
	}()
	return func() {
		stop()
		waitForEnd(ctx, done)
	}
}

// scrubDue reports whether a volume is to be scrubbed: a scrub was begun, a person asks for one, or the last one ended long ago.
func scrubDue(v *v1alpha1.ReplicatedVolume, every time.Duration, now time.Time) bool {
	s := v.Status.Scrub
	if s == nil {
		s = &v1alpha1.Scrub{}
	}
	if s.Progress != nil || s.Asked < v.Spec.Scrubs {
		return true
	}
	last := v.CreationTimestamp.Time
	if s.Ended != nil {
		last = s.Ended.Time
	}
	return every > 0 && now.Sub(last).Abs() >= every // a clock that was far ahead does not put it off for as long
}

// scrub scrubs one mirror.
type scrub struct {
	*mirrorReconciler
	failedAt int64 // the part that could not be read last
	failed   int   // how often
}

// isClaimed reports whether a volume still has the claim that the mirror was made for.
func (s *scrub) isClaimed(v *v1alpha1.ReplicatedVolume) bool {
	return v.Spec.Claim != nil && v.Spec.Claim.Generation == s.generation && v.Status.Opened == s.generation && !v.Going()
}

// run compares all that is not compared yet. ErrUnavailable while there is only one leg, one has failed or joins, or writes are held.
func (s *scrub) run(ctx context.Context) error {
	state, err := mirror.Look(s.name)
	if err != nil {
		return err
	}
	if len(state.Legs) < 2 || state.Joining != nil || len(state.Failed()) > 0 || state.Held {
		return fmt.Errorf("%w: not all legs are there to be compared", errdefs.ErrUnavailable)
	}
	var at int64
	var before *v1alpha1.Differences
	if err := s.update(ctx, func(c *v1alpha1.Scrub, v *v1alpha1.ReplicatedVolume) {
		if c.Progress == nil || c.Progress.Total != state.Size {
			beginScrub(c, state.Size, v.Spec.Scrubs)
		}
		at, before = c.Progress.Done, c.Found.DeepCopy()
	}); err != nil {
		return err
	}
	klog.FromContext(ctx).Info("The legs of a replicated volume are compared", "from", at, "size", state.Size)
	told, known := at, differingBytes(before)
	differ, err := mirror.Compare(ctx, s.name, at, func(ctx context.Context, now int64, differ []dm.Range) error {
		found := addDifferences(before, differ, "")
		news := differingBytes(found) > known
		if known = differingBytes(found); news {
			klog.FromContext(ctx).Error(nil, "The legs of a replicated volume differ", "bytes", found.Bytes)
		}
		if at = now; news || now-told >= max(mirror.Chunk, state.Size/progressOf) {
			told = now
			if err := s.reportProgress(ctx, now, found); err != nil {
				return err
			}
		}
		return s.limitRate(ctx)
	})
	found := addDifferences(before, differ, "")
	if err != nil {
		return s.reportInterrupted(ctx, at, state.Size, found, err)
	}
	return s.reportEnd(ctx, found)
}

// limitRate waits after a chunk, so that no more than Options.ScrubBandwidth is read.
func (s *scrub) limitRate(ctx context.Context) error {
	if s.options.ScrubBandwidth == 0 {
		return nil
	}
	return pause(ctx, time.Duration(float64(mirror.Chunk)/float64(s.options.ScrubBandwidth)*float64(time.Second)))
}

// reportInterrupted writes how far a scrub was when err ended it, and returns err. A part that could not be read scrubTries times, while no leg has
// failed, counts as differing, and is skipped.
func (s *scrub) reportInterrupted(ctx context.Context, at, size int64, found *v1alpha1.Differences, err error) error {
	if ctx.Err() != nil || errors.Is(err, errdefs.ErrNotFound) {
		return err
	}
	next := at
	if !errors.Is(err, errdefs.ErrUnavailable) && !errors.Is(err, errdefs.ErrBusy) {
		if s.failedAt != at {
			s.failedAt, s.failed = at, 0
		}
		if s.failed++; s.failed >= scrubTries {
			s.failed, next = 0, at+mirror.Chunk
			found = addDifferences(found, []dm.Range{chunkAt(at, size)}, errdefs.Words(err))
		}
	}
	return errors.Join(err, s.reportProgress(ctx, next, found))
}

// chunkAt returns what is compared at once from an offset on, of a volume of some size.
func chunkAt(at, size int64) dm.Range {
	return dm.Range{Offset: at, Length: min(mirror.Chunk, size-at)}
}

// reportProgress writes how far a scrub is, and what it has found.
func (s *scrub) reportProgress(ctx context.Context, at int64, found *v1alpha1.Differences) error {
	return s.update(ctx, func(c *v1alpha1.Scrub, _ *v1alpha1.ReplicatedVolume) {
		if c.Progress != nil {
			c.Progress.Done, c.Found = min(at, c.Progress.Total), found
		}
	})
}

// reportEnd writes that a scrub has ended, and what it has found.
func (s *scrub) reportEnd(ctx context.Context, found *v1alpha1.Differences) error {
	err := s.update(ctx, func(c *v1alpha1.Scrub, _ *v1alpha1.ReplicatedVolume) {
		c.Progress, c.Found, c.Last, c.Ended = nil, nil, found, new(metav1.NewTime(time.Now()).Rfc3339Copy())
	})
	if err != nil {
		return err
	}
	result := metrics.ScrubEqual
	if found != nil {
		result = metrics.ScrubDiffers
	}
	metrics.Scrubs.Inc(result)
	klog.FromContext(ctx).Info("The legs of a replicated volume were compared", "result", result)
	return nil
}

// update edits the status of the scrub in the object; ErrUnavailable if the volume is not used here by the claim of the mirror any more.
func (s *scrub) update(ctx context.Context, edit func(*v1alpha1.Scrub, *v1alpha1.ReplicatedVolume)) error {
	for try := 1; ; try++ {
		v, err := s.replicatedNow(ctx, s.ref.Key)
		if err != nil {
			return err
		}
		if !s.isClaimed(v) {
			return fmt.Errorf("%w: replicated volume %s is not used here by claim %d any more", errdefs.ErrUnavailable, s.ref.Key, s.generation)
		}
		err = s.writeReplicas(ctx, v, func(status *v1alpha1.ReplicatedVolumeStatus) {
			if status.Scrub == nil {
				status.Scrub = &v1alpha1.Scrub{}
			}
			editAndNoteTurn(status.Scrub, func() { edit(status.Scrub, v) })
		})
		if !errors.Is(err, errdefs.ErrBusy) || try == scrubWrites || pause(ctx, busyRetry) != nil {
			return err
		}
	}
}

// beginScrub resets c for a new scrub. What an unfinished one has found (the volume has grown meanwhile) counts until the new one has ended.
func beginScrub(c *v1alpha1.Scrub, size, asked int64) {
	if c.Found != nil {
		c.Last = c.Found
	}
	c.Progress, c.Found, c.Asked = &v1alpha1.Progress{Total: size}, nil, asked
}

// editAndNoteTurn edits c, and notes the time if that changes whether the legs differ.
func editAndNoteTurn(c *v1alpha1.Scrub, edit func()) {
	differed := c.Differs()
	if edit(); c.Differs() != differed {
		c.Turned = new(metav1.Now().Rfc3339Copy())
	}
}

// differingBytes returns how many bytes differ.
func differingBytes(d *v1alpha1.Differences) int64 {
	if d == nil {
		return 0
	}
	return d.Bytes
}

// addDifferences returns before with further ranges that differ; nil if there are none at all.
func addDifferences(before *v1alpha1.Differences, differ []dm.Range, message string) *v1alpha1.Differences {
	if len(differ) == 0 {
		return before
	}
	all := &v1alpha1.Differences{}
	if before != nil {
		all = before.DeepCopy()
	}
	for _, r := range differ {
		all.Bytes += r.Length
		if len(all.Ranges) < v1alpha1.MostRanges {
			all.Ranges = append(all.Ranges, v1alpha1.ByteRange{Offset: r.Offset, Length: r.Length})
		}
	}
	if message != "" {
		all.Message = cluster.Limited(message)
	}
	return all
}
