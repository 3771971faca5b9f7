package volume

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/queue"
	"github.com/ashlar-csi/ashlar/pkg/cgroup"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// mutableParameter is a parameter that can be changed while a volume is in use (ControllerModifyVolume). mutableParameters has all of them.
type mutableParameter struct {
	check func(value string) error // returns ErrInvalid for a value that no node can set
	// supported returns ErrInvalid for a value that this node cannot set now; nil: it can set all.
	supported func(value string) error
	// The parameter is a setting of the block queue of the volume's device, by its name (queue.Setting), or a limit of it. With neither, only the cluster
	// uses it.
	setting string
	limit   func(*cgroup.Limits) *uint64

	values, means string // for people: which values there are, and what the parameter is
}

var mutableParameters = map[string]mutableParameter{
	"readAheadKiB": {setting: "read_ahead_kb", values: "0 to 65536, a multiple of 4", means: "what the kernel reads ahead of a reader", check: func(v string) error {
		n, err := strconv.ParseUint(v, 10, 32)
		if err != nil || n > 65536 || v != strconv.FormatUint(n, 10) || n%4 != 0 {
			return fmt.Errorf("%w: readAheadKiB=%q is not a multiple of 4 from 0 to 65536", errdefs.ErrInvalid, v)
		}
		return nil
	}},
	"ioScheduler": {setting: "scheduler", values: "none, mq-deadline, kyber, bfq", means: "the I/O scheduler of the volume's device, as far as the kernel has it", check: func(v string) error {
		if !slices.Contains([]string{"none", "mq-deadline", "kyber", "bfq"}, v) {
			return fmt.Errorf("%w: ioScheduler=%q; none, mq-deadline, kyber and bfq are known", errdefs.ErrInvalid, v)
		}
		return nil
	}, supported: func(v string) error {
		if !queue.HasScheduler(v) {
			return fmt.Errorf("%w: ioScheduler=%q: the kernel of the volume's node has not loaded it (modprobe %s)", errdefs.ErrInvalid, v, v)
		}
		return nil
	}},
	ParameterPlacement: placementParameter,
	"readIOPS":         limitParameter("readIOPS", "requests to read", 1, cgroup.MostIOPS, func(l *cgroup.Limits) *uint64 { return &l.ReadIOPS }),
	"writeIOPS":        limitParameter("writeIOPS", "requests to write", 1, cgroup.MostIOPS, func(l *cgroup.Limits) *uint64 { return &l.WriteIOPS }),
	"readBandwidth":    limitParameter("readBandwidth", "bytes to read", leastBandwidth, math.MaxInt64, func(l *cgroup.Limits) *uint64 { return &l.ReadBandwidth }),
	"writeBandwidth":   limitParameter("writeBandwidth", "bytes to write", leastBandwidth, math.MaxInt64, func(l *cgroup.Limits) *uint64 { return &l.WriteBandwidth }),
}

// MutableParameter describes a mutable parameter to people.
type MutableParameter struct{ Name, Values, Means string }

// MutableParameters returns all mutable parameters in the order of their names, for docs/reference/parameters.md.
func MutableParameters() (all []MutableParameter) {
	for _, name := range slices.Sorted(maps.Keys(mutableParameters)) {
		all = append(all, MutableParameter{name, mutableParameters[name].values, mutableParameters[name].means})
	}
	return all
}

// CheckMutable returns ErrInvalid if a mutable parameter is not known, or has a value that no node can set.
func CheckMutable(mutable map[string]string) error {
	for key, value := range mutable {
		parameter, known := mutableParameters[key]
		if !known {
			return fmt.Errorf("%w: unknown mutable parameter %q; known are %s", errdefs.ErrInvalid, key,
				strings.Join(slices.Sorted(maps.Keys(mutableParameters)), ", "))
		}
		if err := parameter.check(value); err != nil {
			return err
		}
	}
	return nil
}

// supportsMutable returns ErrInvalid if this node cannot set one of some mutable parameters, which were checked (CheckMutable).
func supportsMutable(mutable map[string]string) error {
	for key, value := range mutable {
		if supported := mutableParameters[key].supported; supported != nil {
			if err := supported(value); err != nil {
				return err
			}
		}
	}
	return nil
}

// queueSettings returns those mutable parameters that are settings of the block queue, by the settings' names.
func queueSettings(mutable map[string]string) map[string]string {
	settings := map[string]string{}
	for key, value := range mutable {
		if setting := mutableParameters[key].setting; setting != "" {
			settings[setting] = value
		}
	}
	return settings
}

// Modify: see Store. The record is changed first, then the attached devices, here or on the consumer's node. If a device cannot be changed, all is changed
// back. ErrUnavailable if the consumer cannot be asked.
func (l *Local) Modify(ctx context.Context, id ID, mutable map[string]string) error {
	v, err := l.Get(ctx, id)
	if err != nil {
		return err
	}
	if err := CheckMutable(mutable); err != nil {
		return err
	}
	if err := CheckPlacement(v.Access, v.Replicas, mutable); err != nil {
		return fmt.Errorf("modify volume %s: %w", id, err)
	}
	change := func(all map[string]string) error { return l.setMutable(ctx, id, mutable, all) }
	if v.Exported.Node == "" {
		err = supportsMutable(mutable)
	} else {
		change, err = l.modifiedBy(ctx, v)
	}
	if err != nil {
		return err
	}
	write := func(mutable map[string]string) error {
		return l.setLabels(ctx, id, func(labels map[string]string) error {
			for key := range mutableParameters {
				setLabel(labels, labelMutable+key, mutable[key])
			}
			return nil
		})
	}
	all := merged(v.Mutable, mutable)
	if err := write(all); err != nil {
		return err
	}
	if err := change(all); err != nil {
		return fmt.Errorf("modify volume %s: %w", id, errors.Join(err, write(v.Mutable)))
	}
	return nil
}

// modifiedBy returns a function that has the consumer of an exported volume set all mutable parameters of the volume (Consumers.Modified). ErrUnavailable if
// this node cannot ask consumers.
func (l *Local) modifiedBy(ctx context.Context, v Volume) (change func(all map[string]string) error, err error) {
	consumers := l.consumers()
	if consumers == nil {
		return nil, fmt.Errorf("%w: volume %s is exported to %s, which cannot be asked to modify it", errdefs.ErrUnavailable, v.ID, v.Exported)
	}
	return func(all map[string]string) error { return consumers.Modified(ctx, v.ID, v.Exported, all) }, nil
}

// Modified sets all mutable parameters of a volume on the devices that this node has of it. It does not change the record: the home of the
// volume, or of its legs, has them there already. With an error nothing has changed; ErrInvalid if this node cannot set one.
func (l *Local) Modified(ctx context.Context, id ID, mutable map[string]string) error {
	if err := CheckMutable(mutable); err != nil {
		return err
	}
	if err := supportsMutable(mutable); err != nil {
		return fmt.Errorf("node %s: %w", l.node, err)
	}
	return l.setMutable(ctx, id, mutable, mutable)
}

// setMutable sets mutable parameters on the attached devices of a volume. Limits are set together, so all has to have all parameters of the volume; of the
// settings of the block queue only those in mutable are set. With an error nothing has changed.
func (l *Local) setMutable(ctx context.Context, id ID, mutable, all map[string]string) error {
	stack, err := l.stack(id)
	if err != nil {
		return err
	}
	var undo []func() error
	devices, err := stack.Attached(ctx)
	for _, device := range devices {
		for _, set := range []func() (func() error, error){
			func() (func() error, error) { return device.SetQueue(queueSettings(mutable)) },
			func() (func() error, error) { return limitDevice(device, limitsOf(all)) },
		} {
			var one func() error
			if err == nil {
				one, err = set()
			}
			if err == nil {
				undo = append(undo, one)
			}
		}
	}
	if err != nil {
		for _, one := range slices.Backward(undo) {
			err = errors.Join(err, one())
		}
	}
	return err
}

// merged returns mutable parameters with some of them changed.
func merged(mutable, changes map[string]string) map[string]string {
	all := maps.Clone(mutable)
	maps.Copy(all, changes)
	return all
}
