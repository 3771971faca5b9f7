package drivertest

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Refuses returns a function that makes sure that a call refuses a request, which is a right one with a change: with an
// error of one kind (of pkg/errdefs), which says what an operator needs to know.
func Refuses[R, A any](t *testing.T, call func(context.Context, R) (A, error), right func() R) func(what string, change func(R), kind error, says string) {
	return func(what string, change func(R), kind error, says string) {
		t.Helper()
		t.Run(what, func(t *testing.T) {
			t.Helper()
			r := right()
			change(r)
			_, err := call(t.Context(), r)
			if !errors.Is(err, kind) || len(errdefs.Kinds(err)) != 1 || !strings.Contains(err.Error(), says) {
				t.Errorf("error %v; want one that is %q, and says %q", err, kind, says)
			}
		})
	}
}
