package unbroken_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/unbroken"
)

func TestDo(t *testing.T) {
	var table unbroken.Table
	failure := errors.New("failed")
	if err := table.Do(t.Context(), "a", func() error { return failure }); !errors.Is(err, failure) {
		t.Errorf("what it did returned %v", err)
	}

	// A caller returns when its context ends; what it began goes on.
	ctx, cancel := context.WithCancel(t.Context())
	goOn, began := make(chan struct{}), make(chan struct{})
	gone := make(chan error)
	ended := false
	go func() {
		gone <- table.Do(ctx, "a", func() error { close(began); <-goOn; ended = true; return nil })
	}()
	<-began
	cancel()
	if err := <-gone; !errors.Is(err, context.Canceled) {
		t.Errorf("it returned %v when its context ended", err)
	}

	// A call of another name does not wait. One of the same name does, and may give up.
	if err := table.Do(t.Context(), "b", func() error { return nil }); err != nil {
		t.Error(err)
	}
	short, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := table.Do(short, "a", func() error { t.Error("it ran beside the first"); return nil }); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("it returned %v", err)
	}
	next := make(chan error)
	go func() {
		next <- table.Do(t.Context(), "a", func() error {
			if !ended {
				t.Error("it did not wait for the first")
			}
			return nil
		})
	}()
	close(goOn)
	if err := <-next; err != nil {
		t.Error(err)
	}
	if err := table.Do(ctx, "a", func() error { t.Error("it began after its context had ended"); return nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("it returned %v", err)
	}
}
