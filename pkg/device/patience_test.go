package device_test

import (
	"errors"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"
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
