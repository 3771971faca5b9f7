package volume

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/internal/quantity"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/loop"
	"github.com/ashlar-csi/ashlar/pkg/cgroup"
	"github.com/ashlar-csi/ashlar/pkg/device"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
)

// Limits are those of a volume: of all pods that use it together. Its device has them from the first publication until it is unstaged. What the driver
// does to the device before that (mkfs, a check) is not limited, although the driver may run in a pod.

// noLimit is the value that takes a limit away. A parameter that is not given leaves the limit as it is.
const noLimit = "max"

// leastBandwidth is the lowest limit of bytes in a second: one block.
const leastBandwidth = blockdev.Granularity

// limitParameter returns the mutable parameter of a limit of so many (what) in a second.
func limitParameter(name, what string, least, most int64, limit func(*cgroup.Limits) *uint64) mutableParameter {
	return mutableParameter{
		limit:  limit,
		values: fmt.Sprintf("a whole number from %d on, also as a quantity (`50Mi`), or %#q", least, noLimit),
		means:  fmt.Sprintf("%s in a second, for all pods of the volume together; %#q is no limit ([more](../use/limits.md))", what, noLimit),
		check: func(v string) error {
			if n := quantity.Parse(v); v != noLimit && (n < least || n > most || strings.HasPrefix(v, "+")) {
				return fmt.Errorf("%w: %s=%q; give a number of %s from %d to %d, or a quantity (k, M, G, T, Ki, Mi, Gi, Ti), or %s for no limit",
					errdefs.ErrInvalid, name, v, what, least, most, noLimit)
			}
			return nil
		},
		supported: func(v string) error {
			if v == noLimit {
				return nil
			}
			if err := cgroup.Supported(); err != nil {
				return errdefs.Recast(errdefs.ErrInvalid, err, "%s=%q cannot be kept", name, v)
			}
			return nil
		},
	}
}

// limitsOf returns the limits in mutable parameters, which were checked.
func limitsOf(mutable map[string]string) (l cgroup.Limits) {
	for key, value := range mutable {
		if limit := mutableParameters[key].limit; limit != nil {
			*limit(&l) = uint64(quantity.Parse(value)) // noLimit gives 0
		}
	}
	return l
}

// Limited reports whether there is a limit in mutable parameters, which were checked.
func Limited(mutable map[string]string) bool { return limitsOf(mutable) != cgroup.Limits{} }

// LimitsHere reports whether limits can be kept on this machine, as it is now.
func LimitsHere() bool { return cgroup.Supported() == nil }

// Limit sets the limits of a volume, as its parameters say, for one of its devices; no limits if they say nothing. ErrPrecondition if the node cannot
// enforce them, ErrInvalid if they cannot be enforced for the filesystem that is mounted.
func (l *Local) Limit(v Volume, device blockdev.Device) error {
	if _, err := limitDevice(device, limitsOf(v.Mutable)); err != nil {
		return fmt.Errorf("limits of volume %s: %w", v.ID, err)
	}
	return nil
}

// limitDevice sets the limits of a device. undo sets the former ones again. ErrInvalid for a limit of writes to an ext4 whose journal writes the bytes of
// files: the kernel makes those writes, and no limit of pods holds for them.
func limitDevice(device blockdev.Device, limits cgroup.Limits) (undo func() error, err error) {
	if limits.WriteBandwidth+limits.WriteIOPS > 0 && filesystem.JournalWrites(device.Path) {
		return nil, fmt.Errorf("%w: limits of writes cannot be kept for the filesystem on %s, which is mounted with data=journal or nodelalloc (the class's mountOptions); do without those, or the limits", errdefs.ErrInvalid, device.Path)
	}
	return cgroup.Limit(device.Number, limits)
}

// Unlimit takes away the limits of devices that no pod uses. They would slow down the writeback of what pods left, and the driver; and the next device of
// that number would get them. undo sets them again. Failures are logged: no call fails because a limit stays, and health tells of one that is missing.
func (l *Local) Unlimit(ctx context.Context, devices ...uint64) (undo func()) {
	var undos []func() error
	for _, device := range devices {
		if one, err := cgroup.Limit(device, cgroup.Limits{}); err != nil {
			klog.FromContext(ctx).Error(err, "Could not take the limits of a device away")
		} else {
			undos = append(undos, one)
		}
	}
	return func() {
		for _, one := range undos {
			if err := one(); err != nil {
				klog.FromContext(ctx).Error(err, "Could not set the limits of a device again")
			}
		}
	}
}

// unlimitGone takes away the limits of loop devices that have no file any more. Somebody else may have unmounted the filesystem, and so removed the device
// without its limits. Failures are logged.
func (l *Local) unlimitGone(ctx context.Context) {
	devices, err := cgroup.Limited()
	if err != nil {
		klog.FromContext(ctx).Error(err, "Could not look for limits of devices that are gone")
	}
	for _, device := range devices {
		if unix.Major(device) != loop.Major {
			continue
		}
		name, err := os.ReadFile(fmt.Sprintf("/sys/dev/block/%d:%d/loop/backing_file", unix.Major(device), unix.Minor(device)))
		// It is empty while the kernel takes the file away (__loop_clr_fd in drivers/block/loop.c), when the device is no longer attached.
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) || err == nil && len(name) == 0 {
			_ = l.Unlimit(ctx, device)
		}
	}
}

// lift takes away the limits of an origin while its filesystem is being frozen. The kernel first writes out what pods have written. At their limits that
// could take longer than writers may be held back.
func (l *Local) lift(ctx context.Context, o origin) (undo func()) {
	if limitsOf(fromRecord(o.pool.Name(), l.node, o.record).Mutable) == (cgroup.Limits{}) {
		return func() {}
	}
	devices, err := l.stacks.Of(o.pool, o.record.Ref).Attached(ctx)
	if err != nil {
		return func() {} // the freeze will find the error, too
	}
	return l.liftDevices(ctx, o.id(), devices)
}

// liftDevices is lift for the devices of a volume.
func (l *Local) liftDevices(ctx context.Context, id ID, devices []blockdev.Device) (undo func()) {
	l.setLifted(id, true)
	relimit := l.Unlimit(ctx, blockdev.Numbers(devices)...)
	return func() {
		relimit()
		l.setLifted(id, false)
	}
}

func (l *Local) setLifted(id ID, lifted bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if lifted {
		l.lifted[id] = true
	} else {
		delete(l.lifted, id)
	}
}

func (l *Local) isLifted(id ID) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.lifted[id]
}

// limitAttached sets the limits of all attached volumes of a pool again, and takes away those of devices that are gone. A crash may have cut short a
// change of limits, or come while they were lifted. Failures are logged, and told by health.
func (l *Local) limitAttached(ctx context.Context, pool blockdev.Pool) error {
	records, err := pool.List(ctx, blockdev.Volume, "", 0)
	if err != nil {
		return err
	}
	l.unlimitGone(ctx)
	for _, record := range records {
		if v := fromRecord(pool.Name(), l.node, record); v.Exported.Node == "" {
			logLimits(ctx, v.ID, limitStack(ctx, l.stacks.Of(pool, record.Ref), limitsOf(v.Mutable)))
		}
	}
	return nil
}

// LimitAgain is limitAttached for one volume of another node. mutable are all of its mutable parameters, as its object has them; its home is not asked.
// The caller has the lock of the volume.
func (l *Local) LimitAgain(ctx context.Context, id ID, mutable map[string]string) {
	stack, err := l.stack(id)
	if err == nil {
		err = CheckMutable(mutable)
	}
	if err == nil {
		err = limitStack(ctx, stack, limitsOf(mutable))
	}
	logLimits(ctx, id, err)
}

// limitStack sets limits, if there are any, for all devices of a volume.
func limitStack(ctx context.Context, stack device.Stack, limits cgroup.Limits) error {
	if limits == (cgroup.Limits{}) {
		return nil
	}
	devices, err := stack.Attached(ctx)
	for _, device := range devices {
		if err == nil {
			_, err = cgroup.Limit(device.Number, limits)
		}
	}
	return err
}

func logLimits(ctx context.Context, id ID, err error) {
	if err != nil {
		klog.FromContext(ctx).Error(err, "Could not set the limits of a volume", "volume", id.String())
	}
}

// limitsHealth returns a problem if a published volume's devices do not have its limits. It may be called without the lock of the volume.
func (l *Local) limitsHealth(v Volume, devices []blockdev.Device) ([]blockdev.Problem, error) {
	limits := limitsOf(v.Mutable)
	if limits == (cgroup.Limits{}) {
		return nil, nil
	}
	for _, device := range devices {
		if len(l.mounts.Paths(device.Number)) < 2 || l.isLifted(v.ID) {
			continue // not published, or about to be frozen
		}
		kept, err := cgroup.Kept(device.Number, limits)
		if err != nil {
			return nil, err
		}
		if !kept && !l.isLifted(v.ID) {
			return []blockdev.Problem{{Severity: blockdev.Degraded, Reason: "LimitsNotKept",
				Message: "the limits of its I/O are not those of " + device.Path + " in the pods' control group: somebody changed them there; start the driver on its node anew, and it sets them again"}}, nil
		}
	}
	return nil, nil
}
