package agent

import (
	"errors"
	"slices"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// TestCloseFailsHalfway: the record of one leg cannot be written as the volume is closed, and the call comes again when the mirror is gone. Nothing says that
// all legs were closed, and the leg that was is used alone, until the other one is equal to it.
func TestCloseFailsHalfway(t *testing.T) {
	for _, failing := range []string{"a", "b"} {
		t.Run(failing, func(t *testing.T) {
			f := newObject(t, 2, "a", "b")
			f.legs["a"].number, f.legs["b"].number = 1, 2
			f.changes = func(name string, _ volume.LegState) error {
				if name == failing {
					return errors.New("its record cannot be written")
				}
				return nil
			}
			equal := f.Names(t.Context(), f.ref, []uint64{1, 2})
			f.detached = true
			if err := f.Close(t.Context(), f.ref, equal); err == nil {
				t.Error("it is said to be closed")
			}
			f.changes = func(string, volume.LegState) error { return nil }
			legs := func(r *replica) { r.legs = map[string]volume.ID{"a": {Key: "a"}, "b": {Key: "b"}} }
			f.note(f.v.Name, legs)
			check.OK(t, f.Close(t.Context(), f.ref, nil))
			if s := f.v.Status; s.Closed != 0 {
				t.Errorf("it is said that all legs were closed: %+v", s)
			}
			for name, l := range f.legs {
				if l.state.Closed != (name != failing) {
					t.Errorf("leg %s: %+v", name, l.state)
				}
			}
			f.note(f.v.Name, legs)
			check.OK(t, f.opens(2))
			if now := f.v.Current(); len(now) != 1 || slices.Contains(now, failing) {
				t.Errorf("%v are current", now)
			}
		})
	}
}
