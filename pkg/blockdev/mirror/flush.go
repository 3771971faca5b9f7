package mirror

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// FlushAll makes durable what the current legs of a mirror have acknowledged. It waits for each leg for as long as that does not answer.
//
// A disk tells only once what it could not flush, and that may have been acknowledged: the next flush, of a user, would find nothing wrong. So after an error
// the mirror is Held, with the legs that could not be flushed as failed, unless these are all that are whole.
func FlushAll(ctx context.Context, name string) error {
	s, err := Look(name)
	if err != nil {
		return err
	}
	var lost []uint64
	for _, leg := range s.devices() {
		if failure := flush(leg); failure != nil {
			lost, err = append(lost, leg), errors.Join(err, failure)
		}
	}
	if err == nil {
		return nil
	}
	return errors.Join(err, change(name, "hold it, as "+numbers(lost)+" could not be flushed", func() error {
		s, err := state(name)
		if err != nil {
			return err
		}
		isLost := func(l uint64) bool { return slices.Contains(lost, l) }
		stay := slices.DeleteFunc(s.devices(), func(l uint64) bool { return isLost(l) || slices.Contains(s.Failed(), l) })
		if len(stay) == 0 || !slices.ContainsFunc(s.devices(), isLost) {
			return nil
		}
		return s.hold(context.WithoutCancel(ctx), name, stay)
	}))
}

// flush makes durable what a leg has acknowledged.
func flush(leg uint64) error {
	f, err := openNumber(leg)
	if err == nil {
		err = errdefs.FromErrno(errors.Join(f.Sync(), f.Close()))
	}
	if err != nil {
		return fmt.Errorf("flush leg %s: %w", dm.Number(leg), err)
	}
	return nil
}
