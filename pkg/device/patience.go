package device

import (
	"context"
	"time"
)

// healthPatience is how long Health waits for a device that has to be read, or whose target may wait for its disk.
const healthPatience = 2 * time.Second

// look is a look at a device that is under way.
type look struct {
	began time.Time
	ended chan struct{} // closed at its end
	err   error         // read it after that
}

// inTime looks at a device of the device mapper by do, and waits for healthPatience at most. known is false if the look has not ended by then, or ctx has
// ended before. It goes on, and no other look at the device begins before its end: so a disk that hangs blocks one goroutine for each of its devices, and
// none of the callers.
func (s *Stacks) inTime(ctx context.Context, name string, do func() error) (known bool, err error) {
	s.mu.Lock()
	now := s.looks[name]
	if now == nil {
		now = &look{began: time.Now(), ended: make(chan struct{})}
		s.looks[name] = now
		go func() {
			now.err = do()
			s.mu.Lock()
			delete(s.looks, name)
			s.mu.Unlock()
			close(now.ended)
		}()
	}
	s.mu.Unlock()
	late := time.NewTimer(time.Until(now.began.Add(healthPatience)))
	defer late.Stop()
	select {
	case <-now.ended:
		return true, now.err
	case <-late.C:
		return false, nil
	case <-ctx.Done():
		return false, ctx.Err()
	}
}
