package device_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/luks"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/device"
)

// TestHealthOfHungDisk: whoever asks how a volume is does not wait for a disk that does not answer, however often. When it answers again, health has all.
func TestHealthOfHungDisk(t *testing.T) {
	overPair(t, 32*pooltest.MiB, func(p *pair) {
		d := p.attach(p.options)
		answer := p.from.hang(p.T)
		stacks := device.New()
		asked := make(chan error, 1)
		go func() {
			for range 3 {
				if problems, err := stacks.Of(p.from, p.ref).Health(p.Context()); err != nil || len(problems) > 0 {
					asked <- errors.Join(err, errors.New("it tells of what it cannot know"))
					return
				}
			}
			asked <- nil
		}()
		select {
		case err := <-asked:
			check.OK(p, err)
		case <-time.After(15 * time.Second):
			p.Error("health waits for the disk")
		}
		answer()
		if p.options.Encryption != nil {
			check.OK(p, luks.Erase(p.Context(), p.from.device().Path))
			var reason string
			for end := time.Now().Add(time.Minute); reason == "" && time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
				problems, err := stacks.Of(p.from, p.ref).Health(p.Context())
				if check.OK(p, err); len(problems) > 0 {
					reason = problems[0].Reason
				}
			}
			if reason != "HeaderLost" {
				p.Errorf("when it answers again health has %q", reason)
			}
		}
		check.OK(p, errors.Join(d.Close(), p.stack().Detach(p.Context())))
	})
}

// TestInTime: a look that does not end holds up none of those who wait for it, and there is no second one of the same device meanwhile. Once it has ended, its
// error counts, and the next one begins.
func TestInTime(t *testing.T) {
	stacks := device.New()
	var looks atomic.Int32
	failed := errors.New("an error")
	hung := make(chan struct{})
	look := func() error {
		looks.Add(1)
		<-hung
		return failed
	}
	for n := range 3 {
		began := time.Now()
		if known, err := stacks.InTime(t.Context(), "a", look); known || err != nil {
			t.Errorf("a look that hangs: %v, %v", known, err)
		}
		if took := time.Since(began); n > 0 && took > time.Second {
			t.Errorf("after the first, one more waited for %v", took)
		}
	}
	if known, err := stacks.InTime(t.Context(), "b", func() error { return nil }); !known || err != nil {
		t.Errorf("beside it another one: %v, %v", known, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if known, err := stacks.InTime(ctx, "c", look); known || !errors.Is(err, context.Canceled) {
		t.Errorf("without time: %v, %v", known, err)
	}
	if n := looks.Load(); n > 2 {
		t.Errorf("there were %d looks", n)
	}
	close(hung)
	for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		known, err := stacks.InTime(t.Context(), "a", func() error { looks.Add(1); return failed })
		if known && errors.Is(err, failed) && looks.Load() > 2 {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("when it has ended: %v, %v", known, err)
		}
	}
}

// TestMarksOfHungDisk: whoever asks what was written to a leg waits for a disk that hangs while its marks are read only as long as there is time. The next one
// gets what is read for it, as what was read before may lack what was written since.
func TestMarksOfHungDisk(t *testing.T) {
	answers := make(chan struct{})
	t.Cleanup(func() { close(answers) })
	var reads atomic.Int64
	t.Cleanup(device.SetReadMarks(func(context.Context, string, uint32) ([]dm.Range, error) {
		n := reads.Add(1)
		if n == 1 {
			<-answers
		}
		return []dm.Range{{Length: n}}, nil
	}))
	stacks := device.New()
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	asked := make(chan error, 1)
	go func() {
		_, err := stacks.Written(ctx, "leg", 1)
		asked <- err
	}()
	select {
	case err := <-asked:
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Error("it waits for the disk")
	}
	found, err := stacks.Written(t.Context(), "leg", 1)
	check.OK(t, err)
	if found[0].Length != 2 {
		t.Error("it got what was read for another one")
	}
}
