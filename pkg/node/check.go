package node

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// checkTime bounds how long a filesystem is checked, and grown, before it is mounted.
const checkTime = 24 * time.Hour

// checks run what is done to filesystems before they are mounted. A check may take longer than any caller waits, so it ends with the driver, not with its
// caller. The call goes on meanwhile with its locks, so all others of the volume get ABORTED. A retry after that finds the filesystem checked, or gets the
// error of the check.
type checks struct {
	driver  context.Context // ends with the driver
	endless filesystem.Endless

	mu      sync.Mutex
	running map[string]check // by the volume's key
	failed  map[string]error // errors of checks whose caller was gone, by the volume's key; kept for the next run
}

// check is a check that runs.
type check struct {
	caller context.Context    // of the call that began it
	stop   context.CancelFunc // ends the check
}

// run does the work of a check for the volume of a key, and waits for it. If an earlier check failed after its caller was gone, it returns that error, once,
// and does not check again; so it does each time after filesystem.ErrEndless. ErrDataLoss if the check takes longer than checkTime; the error of ctx if the caller has gone meanwhile.
func (c *checks) run(ctx context.Context, key string, work func(context.Context) error) error {
	if err := c.forget(key); err != nil {
		return err
	}
	working, stop := context.WithTimeout(klog.NewContext(c.driver, klog.FromContext(ctx)), checkTime)
	defer stop()
	c.begin(key, check{ctx, stop})
	err := c.endless.Do(key, func() error { return work(working) })
	if errors.Is(working.Err(), context.DeadlineExceeded) && err != nil {
		err = fmt.Errorf("%w: its filesystem was not checked within %s; check it by hand: %s", errdefs.ErrDataLoss, checkTime, err.Error())
	}
	return c.end(ctx, key, err, errors.Is(working.Err(), context.Canceled))
}

func (c *checks) begin(key string, one check) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.running == nil {
		c.running, c.failed = map[string]check{}, map[string]error{}
	}
	c.running[key] = one
}

// end returns the error for the caller. If the caller is gone, it keeps the error of the check for the next run, unless the check was stopped.
func (c *checks) end(ctx context.Context, key string, err error, stopped bool) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.running, key)
	if ctx.Err() == nil {
		return err
	}
	if err != nil && !stopped {
		c.failed[key] = err
	}
	if err != nil {
		return fmt.Errorf("its filesystem was checked for longer than the caller waited (%w): %s", ctx.Err(), err.Error())
	}
	return fmt.Errorf("its filesystem was checked for longer than the caller waited (%w)", ctx.Err())
}

// forget returns the error that was kept for a volume, and keeps it no longer.
func (c *checks) forget(key string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	err := c.failed[key]
	delete(c.failed, key)
	return err
}

// Interrupt is called with a request whose volume is busy. If the request says that the volume is not wanted any more, it ends a check whose caller is
// gone.
func (s *Server) Interrupt(request any) {
	var text string
	switch r := request.(type) {
	case *csi.NodeUnstageVolumeRequest:
		text = r.GetVolumeId()
	case *csi.NodeUnpublishVolumeRequest: // of an ephemeral volume
		text = r.GetVolumeId()
	default:
		return
	}
	key := volume.KeyOf(text)
	if id, err := volume.ParseID(text); err == nil {
		key = id.Key
	}
	s.checks.mu.Lock()
	defer s.checks.mu.Unlock()
	if one, runs := s.checks.running[key]; runs && one.caller.Err() != nil {
		one.stop()
	}
}
