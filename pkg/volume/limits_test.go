package volume_test

import (
	"errors"
	"fmt"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// TestReachedLimits: when the driver of a node starts, LimitAgain sets the limits of a volume of another node to those that it is given. It sets nothing
// if there are none, if a value is not understood, or if the volume is not attached.
func TestReachedLimits(t *testing.T) {
	kubepods := drivertest.Pods(t, true)
	p := newPair(t)
	id := p.make("v", volume.Encryption{})
	v := p.get(id)
	device, err := p.user.Attach(t.Context(), v, nil)
	check.OK(t, err)
	check.OK(t, second(p.user.Format(t.Context(), &v, device, "ext4", "")))
	dir := drivertest.Dir(t)
	check.OK(t, unix.Mount(device.Path, dir, "ext4", 0, ""))
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	check.OK(t, device.Close())
	number := fmt.Sprintf("%d:%d", unix.Major(device.Number), unix.Minor(device.Number))
	again := func(want string, mutable map[string]string) {
		t.Helper()
		p.start()
		p.user.LimitAgain(t.Context(), id, mutable)
		if have := kubepods.Limits(number); have != want {
			t.Errorf("with %v the device has %q, want %q", mutable, have, want)
		}
	}
	const limited = "rbps=max wbps=max riops=max wiops=100"
	v.Mutable = map[string]string{"writeIOPS": "100"}
	check.OK(t, p.user.Limit(v, device))
	kubepods.SetLimits(number + " wiops=5")
	again(limited, v.Mutable)
	kubepods.SetLimits(number + " wiops=max") // as if the driver had ended while they were lifted
	again("", nil)
	again("", map[string]string{"writeIOPS": "max", "readAheadKiB": "64"})
	again("", map[string]string{"writeIOPS": "less"})
	again(limited, v.Mutable)

	check.OK(t, errors.Join(p.user.Limit(volume.Volume{ID: id}, device), unix.Unmount(dir, 0)))
	p.unused(id)
	again("", v.Mutable)
	check.OK(t, p.home.Delete(t.Context(), id))
}
