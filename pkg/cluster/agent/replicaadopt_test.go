package agent

import (
	"context"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
)

// noMirrors is a Mirrors without any mirror. Each call of Mirrors sends on the channel.
type noMirrors chan struct{}

func (m noMirrors) Mirrors() (map[blockdev.Ref]int64, error) {
	m <- struct{}{}
	return nil, nil
}

func (noMirrors) Mirror(blockdev.Ref) string { return "" }

func (noMirrors) Generation(blockdev.Ref) (int64, bool, error) { return 0, false, nil }

// TestAdoptWaits: the adoption of a volume does not end, as I/O to its home does not. Meanwhile mirrors are reconciled, the adoption is not begun a second
// time, and the driver can end.
func TestAdoptWaits(t *testing.T) {
	f := newObject(t, 1, "a")
	begun, forever := make(chan struct{}, 10), make(chan struct{})
	f.adopts = func() error {
		begun <- struct{}{}
		<-forever
		return nil
	}
	t.Cleanup(func() { close(forever) })
	ctx, cancel := context.WithCancel(t.Context())
	looks, ended := make(noMirrors), make(chan struct{})
	go func() {
		defer close(ended)
		f.mirrorReconciler.ReconcileMirrors(ctx, looks)
	}()
	late := time.After(tendedPatience)
	for range 5 {
		select {
		case <-looks:
		case <-late:
			t.Fatal("nobody looks for mirrors")
		}
	}
	for waits := true; waits; {
		select {
		case <-looks:
		case <-begun:
			waits = false
		case <-late:
			t.Fatal("nobody adopts it")
		}
	}
	cancel()
	for {
		select {
		case <-looks:
			continue
		case <-ended:
		case <-late:
			t.Error("the driver does not end")
		}
		break
	}
	if len(begun) != 0 {
		t.Errorf("it was begun %d times", 1+len(begun))
	}
}
