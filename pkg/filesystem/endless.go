package filesystem

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/ashlar-csi/ashlar/internal/command"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// ErrEndless is the error of a tool that has not come to an end with a filesystem, after more time of processors than it can need.
var ErrEndless = errors.New("the tool does not come to an end with this filesystem")

// processorTime is how much time of processors each tool gets for a filesystem on a device of some bytes: many times what it needs if all of it is in small files.
func processorTime(size int64) time.Duration {
	return 10*time.Minute + time.Duration(size>>30)*10*time.Second
}

// inTime does work with tools on the filesystem of a device, which somebody may have made up so that they never come to an end: ErrDataLoss and ErrEndless if
// one of them takes more than processorTime.
func inTime(ctx context.Context, device string, work func(context.Context) error) error {
	f, err := os.Open(device)
	if err != nil {
		return fmt.Errorf("size of %s: %w", device, err)
	}
	size, err := f.Seek(0, io.SeekEnd)
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("size of %s: %w", device, err)
	}
	err = work(command.WithProcessorTime(ctx, processorTime(size)))
	if errors.Is(err, command.ErrProcessorTime) {
		return fmt.Errorf("%w: %w: it may have been made up; look at it by hand (e2fsck): %w", errdefs.ErrDataLoss, ErrEndless, err)
	}
	return err
}

// endlessTime is how long a filesystem is left alone after ErrEndless.
const endlessTime = 24 * time.Hour

// Endless remembers with which filesystems the tools do not come to an end. Callers try again and again: so whoever made one up would have a processor all the
// time. The zero value is ready to use.
type Endless struct {
	mu  sync.Mutex
	all map[string]endless // by the keys of Do
}

type endless struct {
	err  error
	then time.Time
}

// Do does work for the filesystem of a key. After ErrEndless it returns that error for endlessTime, and does nothing.
func (e *Endless) Do(key string, work func() error) error {
	e.mu.Lock()
	last, is := e.all[key]
	if is = is && time.Now().Before(last.then); !is {
		delete(e.all, key)
	}
	e.mu.Unlock()
	if is {
		return last.err
	}
	err := work()
	if errors.Is(err, ErrEndless) {
		err = fmt.Errorf("%w; it is not tried again for %s, or until the driver on this node is started anew", err, endlessTime)
		e.mu.Lock()
		defer e.mu.Unlock()
		if e.all == nil {
			e.all = map[string]endless{}
		}
		e.all[key] = endless{err, time.Now().Add(endlessTime)}
	}
	return err
}
