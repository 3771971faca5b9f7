package device

import (
	"context"
	"fmt"
	"time"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/era"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

const (
	// healthPatience is how long Health waits for a device that has to be read, or whose target may wait for its disk.
	healthPatience = 2 * time.Second
	// marksPatience is how long all else waits for the state of marks: the kernel tells it between two commits of their metadata, which take their time on a
	// disk with much to do.
	marksPatience = 10 * time.Second
)

// look is a look at a device that is under way.
type look struct {
	began time.Time
	ended chan struct{} // closed at its end
	found any           // read these two after that
	err   error
}

// inTime looks at a device of the device mapper by do, and waits until patience after the beginning at most. known is false if the look has not ended by
// then, or ctx has ended before. It goes on, and no other look at the device begins before its end: so a disk that hangs blocks one goroutine for each of
// its devices, and none of the callers. All looks at a device find the same.
func inTime[T any](ctx context.Context, s *Stacks, name string, patience time.Duration, do func() (T, error)) (found T, known bool, err error) {
	s.mu.Lock()
	now := s.looks[name]
	if now == nil {
		now = &look{began: time.Now(), ended: make(chan struct{})}
		s.looks[name] = now
		go func() {
			now.found, now.err = do()
			s.mu.Lock()
			delete(s.looks, name)
			s.mu.Unlock()
			close(now.ended)
		}()
	}
	s.mu.Unlock()
	late := time.NewTimer(time.Until(now.began.Add(patience)))
	defer late.Stop()
	select {
	case <-now.ended:
		return now.found.(T), true, now.err
	case <-late.C:
		return found, false, nil
	case <-ctx.Done():
		return found, false, ctx.Err()
	}
}

// stateOf is era.StateOf of a device that marks. errdefs.ErrUnavailable if the kernel does not tell it within marksPatience, as its disk does not answer.
func (s *Stacks) stateOf(ctx context.Context, name string) (era.State, error) {
	return marksInTime(ctx, s, name, name, func() (era.State, error) { return era.StateOf(name) })
}

// beginEra is era.Begin of a device that marks. errdefs.ErrUnavailable if that has not ended within marksPatience. Who asks while it is under way gets its
// era: the writes after that call are in it, too.
func (s *Stacks) beginEra(ctx context.Context, name string) (uint32, error) {
	return marksInTime(ctx, s, name+" era", name, func() (uint32, error) { return era.Begin(name) })
}

func marksInTime[T any](ctx context.Context, s *Stacks, key, name string, do func() (T, error)) (T, error) {
	found, known, err := inTime(ctx, s, key, marksPatience, do)
	if !known && err == nil {
		err = fmt.Errorf("%w: device %s, which marks what is written, has not answered for %v: its disk does not", errdefs.ErrUnavailable, name, marksPatience)
	}
	return found, err
}

// readMarks reads the marks of a device. Tests replace it.
var readMarks = era.Since

// written is era.Since of a device that marks, and waits for its disk until ctx ends. The read goes on then. Nobody else gets what it finds, as of looks: that
// may lack what was written since.
func (s *Stacks) written(ctx context.Context, name string, number uint32) (found []dm.Range, err error) {
	type answer struct {
		found []dm.Range
		err   error
	}
	done := make(chan answer, 1)
	go func() {
		found, err := readMarks(ctx, name, number)
		done <- answer{found, err}
	}()
	select {
	case a := <-done:
		return a.found, a.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}
