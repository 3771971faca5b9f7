package device

import (
	"errors"

	"golang.org/x/sys/unix"

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
