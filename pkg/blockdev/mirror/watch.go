package mirror

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/direct"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// forgets is how long a failure has to be one that the kernel would forget, before that is believed: of a write that failed, it says a moment later which region it was.
const forgets = 20 * time.Millisecond

// Watch waits until something has happened to a mirror since a look at it (State.Event), and returns how it is then: a leg has failed, or the one that joins is equal, or has been taken out as it failed. errdefs.ErrNotFound once
// there is no mirror. Whoever uses a mirror watches it: of a flush that fails alone the kernel forgets soon which leg it was, and then acknowledges what is on one leg only. Watch does not let it. It has the mirror held,
// with the legs that may lack something as failed, which is so until Leave, also for a driver that starts later. Where the kernel has forgotten already, those are all but the one that is read from, as that has everything.
func Watch(ctx context.Context, name string, seen uint32) (s State, err error) {
	err = of(name, "watch it", func() error {
		d, err := dm.Changed(ctx, name, seen)
		if err != nil {
			return err
		}
		if d == nil {
			return fmt.Errorf("%w: there is no such device any more", errdefs.ErrNotFound)
		}
		if s, err = state(name); err != nil || s.Held {
			return err
		}
		if s.Joining != nil {
			return s.let(ctx, name)
		}
		if len(s.Legs) == 1 || s.Synced < s.Total {
			return nil // it remembers, and holds
		}
		time.Sleep(forgets)
		if s, err = state(name); err != nil || s.Held || s.Joining != nil || s.Synced < s.Total {
			return err
		}
		has, err := s.everything(name)
		if err == nil && has != 0 {
			err = dm.Load(name, flat(s.Size, []uint64{has}))
		}
		if err != nil || has == 0 {
			return err
		}
		if err := dm.Hold(name); err != nil {
			return err
		}
		s, err = state(name)
		return err
	})
	return s, err
}

// let has a leg that was joining, and has failed, leave: it is nobody's.
func (s *State) let(ctx context.Context, name string) error {
	if !s.Joining.Failed {
		return nil
	}
	if err := settle(ctx, name, s.Size, s.devices()); err != nil {
		return err
	}
	now, err := state(name)
	*s = now
	return err
}

// everything returns the one leg that is sure to have all that was acknowledged, after an event that left all regions in sync: the first that is whole, if the kernel still says which is not. 0: all have.
func (s *State) everything(name string) (uint64, error) {
	if len(s.Failed()) > 0 {
		for _, l := range s.Legs {
			if !l.Failed {
				return l.Device, nil
			}
		}
		return 0, nil // all have failed: it acknowledges nothing
	}
	return s.readFrom(name)
}

// probes is how often a mirror is read, to see which leg that is.
const probes = 16

// readFrom returns the leg that the kernel reads from, which is the one that it writes alone: by the counts of reads of the legs. They have more than ours at most.
func (s *State) readFrom(name string) (uint64, error) {
	before, err := s.reads()
	if err != nil {
		return 0, err
	}
	d, err := dm.Find(name)
	if err != nil || d == nil {
		return 0, err
	}
	f, err := dm.Open(d, os.O_RDONLY|unix.O_DIRECT)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	page, free, err := direct.Memory(4096)
	if err != nil {
		return 0, err
	}
	defer free()
	for range probes {
		if _, err := f.ReadAt(page, 0); err != nil {
			return 0, errdefs.FromErrno(err)
		}
	}
	after, err := s.reads()
	if err != nil {
		return 0, err
	}
	most := 0
	for i := range after {
		if after[i]-before[i] > after[most]-before[most] {
			most = i
		}
	}
	if after[most]-before[most] < probes {
		return 0, fmt.Errorf("%w: none of its legs was read", errdefs.ErrUnavailable)
	}
	return s.Legs[most].Device, nil
}

// reads are the counts of reads of the legs.
func (s *State) reads() (counts []int64, err error) {
	for _, l := range s.Legs {
		text, err := os.ReadFile("/sys/dev/block/" + dm.Number(l.Device) + "/stat")
		if err != nil {
			return nil, errdefs.FromErrno(err)
		}
		var count int64
		if _, err := fmt.Sscan(strings.TrimSpace(string(text)), &count); err != nil {
			return nil, fmt.Errorf("reads of leg %s: %w", dm.Number(l.Device), err)
		}
		counts = append(counts, count)
	}
	return counts, nil
}
