package device

import (
	"context"
	"errors"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
)

// CopyBackCut begins to copy back what only the new leg of a seat has, and is cut short after so many steps. It returns how many there are.
func CopyBackCut(seat string, after int) (steps int, err error) {
	d, err := dm.Find(seat)
	if err != nil || d == nil {
		return 0, errors.Join(err, unix.ENXIO)
	}
	m, is, err := mirrorOf(seat)
	if err != nil || !is {
		return 0, errors.Join(err, unix.EINVAL)
	}
	parts, err := m.lacks(d)
	if err != nil || parts == nil {
		return 0, errors.Join(err, unix.EINVAL)
	}
	all := m.stepsBack(d, parts)
	for _, step := range all[:min(after, len(all))] {
		if err := step(); err != nil {
			return 0, err
		}
	}
	return len(all), nil
}

// AttachMarks attaches what marks a volume, as Attach does for a volume that is to have no marks if that was there a moment ago.
func (s Stack) AttachMarks(ctx context.Context) error {
	t, _ := s.top()
	_, err := marked{t}.attach(ctx, blockdev.Device{}, Options{})
	return err
}

// InTime is inTime.
func (s *Stacks) InTime(ctx context.Context, name string, do func() error) (known bool, err error) {
	_, known, err = inTime(ctx, s, name, healthPatience, func() (struct{}, error) { return struct{}{}, do() })
	return known, err
}

// SetReadMarks has do read the marks of devices, until restore is called.
func SetReadMarks(do func(ctx context.Context, name string, since uint32) ([]dm.Range, error)) (restore func()) {
	was := readMarks
	readMarks = do
	return func() { readMarks = was }
}

// Written is written.
func (s *Stacks) Written(ctx context.Context, name string, since uint32) ([]dm.Range, error) {
	return s.written(ctx, name, since)
}

// UnderSeat returns the devices that the seat of a volume is over.
func (s Stack) UnderSeat(ctx context.Context) ([]uint64, error) {
	t, _ := s.top()
	_, below, err := seat{t}.attached(ctx)
	return below, err
}
