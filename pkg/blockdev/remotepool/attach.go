package remotepool

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/internal/fsync"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/held"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/nvme"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/metrics"
)

// Attach: see blockdev.Pool. The device stays until Detach, also without Keep, as its last user may be gone only because the home is away. A device that
// is not the one which the home told of is disconnected before anything is read from it.
func (p *Pool) Attach(ctx context.Context, ref blockdev.Ref, how blockdev.Attachment) (blockdev.Device, error) {
	err := p.check(ref)
	if err == nil && how.ReadOnly {
		err = p.Refuse("copied", ref)
	}
	if err != nil {
		return blockdev.Device{}, err
	}
	if c, ours, err := p.proven(ref, how); err != nil || ours {
		return p.attached(c, how), err
	}
	export, err := p.open(ctx, ref)
	if err != nil {
		return blockdev.Device{}, err
	}
	p.tell(ref, export.NQN)
	if err := p.leaveOthers(ctx, ref, export.NQN); err != nil {
		return blockdev.Device{}, err
	}
	c, err := p.kernel.Connect(ctx, export.Connection)
	if err == nil {
		c, err = p.proved(ctx, c, export)
	}
	if err != nil {
		return blockdev.Device{}, fmt.Errorf("%s of another node: %w", ref, err)
	}
	claim, _ := p.home.Claim(ref)
	p.note(c.NQN, func(k *known) {
		*k = known{made: true, kept: k.kept || how.Keep, home: claim.Home, record: export.Record}
	})
	return p.attached(c, how), nil
}

// open has the home export a volume for the present claim. An export that was there before (Again, Otherwise) the home does not change, as this node may use
// it: if it is connected, that goes on. If not, as after a start of the machine, or after the home did not answer, it is given back first, and asked for
// again: giving it back waits for what this node wrote before and is on its way to the disk still, which could overwrite what is written from now on.
// errdefs.ErrUnavailable if the export still is Otherwise or Again then.
func (p *Pool) open(ctx context.Context, ref blockdev.Ref) (Export, error) {
	export, err := p.ask(ctx, ref)
	if err != nil || !export.Otherwise && !export.Again {
		return export, err
	}
	connected, err := p.of(ref)
	if err != nil || slices.ContainsFunc(connected, func(c nvme.Device) bool { return c.NQN == export.NQN }) {
		return export, err
	}
	_, generation, _ := parseNQN(export.NQN)
	if err := patiently(ctx, func() error { return p.home.Close(ctx, ref, generation, export.NQN) }); err != nil {
		return Export{}, fmt.Errorf("give %s, which is not connected, back to its home, which is to give it anew: %w", ref, err)
	}
	export, err = p.ask(ctx, ref)
	switch {
	case err != nil:
	case export.Otherwise:
		err = fmt.Errorf("%w: the home of %s was to give it otherwise, with TLS or without, and gives it as before; nothing was connected", errdefs.ErrUnavailable, ref)
	case export.Again: // another home was told, perhaps: this node may not know yet that the volume has moved
		err = fmt.Errorf("%w: the home of %s was to give it anew, and gives it as before; nothing was connected", errdefs.ErrUnavailable, ref)
	}
	return export, err
}

// ask asks the home to export a volume, and checks what it answers.
func (p *Pool) ask(ctx context.Context, ref blockdev.Ref) (export Export, err error) {
	err = patiently(ctx, func() (err error) {
		export, err = p.home.Open(ctx, p.name, ref)
		return err
	})
	if err == nil {
		err = p.checkExport(export, ref)
	}
	return export, err
}

func (p *Pool) attached(c nvme.Device, how blockdev.Attachment) blockdev.Device {
	return blockdev.Device{Path: c.Path, Number: c.Number, Size: c.Size, Kept: how.Keep}
}

// checkExport returns errdefs.ErrPrecondition for an export of another volume, or for another node: a home that answers with the name of another connected
// volume would have its users given that one.
func (p *Pool) checkExport(e Export, ref blockdev.Ref) error {
	if of, _, ours := parseNQN(e.NQN); ours && of == ref && strings.HasPrefix(e.Host, HostPrefix(p.node)) {
		return nil
	}
	return fmt.Errorf("%w: what its home exports of %s, %q to the host %q, is of another volume, or for another node than %s; nothing was connected", errdefs.ErrPrecondition, ref, e.NQN, e.Host, p.node)
}

// proven returns the connection of the present claim, if this process made it and it is live: then its home need not be asked again. ours is false if
// there is none.
func (p *Pool) proven(ref blockdev.Ref, how blockdev.Attachment) (_ nvme.Device, ours bool, err error) {
	claim, claimed := p.home.Claim(ref)
	connected, err := p.of(ref)
	connected = p.firsts(connected)
	if err != nil || !claimed || len(connected) != 1 {
		return nvme.Device{}, false, err
	}
	c := connected[0]
	if generationOf(c) != claim.Generation || !c.Live() || c.Path == "" || !p.knownOf(c.NQN).made {
		return nvme.Device{}, false, nil
	}
	p.note(c.NQN, func(k *known) { k.kept = k.kept || how.Keep })
	return c, true, nil
}

// proved returns a connected device when it has the size that the home exports; errdefs.ErrUnavailable if it does not get that. The kernel's host has
// checked that it is the right one (Connect).
func (p *Pool) proved(ctx context.Context, c nvme.Device, export Export) (nvme.Device, error) {
	c, err := p.sized(ctx, c, export.Size)
	if err == nil && c.Size != export.Size {
		err = fmt.Errorf("%w: %s has %d bytes, and its home exports %d", errdefs.ErrUnavailable, c.Path, c.Size, export.Size)
	}
	if err != nil && !inUse(c) {
		err = errors.Join(err, p.disconnect(ctx, c.NQN))
	}
	return c, err
}

// leaveOthers disconnects all connections of a volume but nqn: they are of earlier claims, and lead nowhere any more. A second leg with something over it
// stays. errdefs.ErrPrecondition while another one is in use.
func (p *Pool) leaveOthers(ctx context.Context, ref blockdev.Ref, nqn string) error {
	connected, err := p.of(ref)
	for _, c := range connected {
		switch {
		case err != nil:
			return err
		case c.NQN == nqn, inUse(c) && p.isSecond(c, connected):
		case staysInUse(ctx, c):
			return p.outlived(c, ref)
		default:
			err = p.disconnect(ctx, c.NQN)
		}
	}
	return err
}

func (p *Pool) disconnect(ctx context.Context, nqn string) error {
	err := p.kernel.Disconnect(ctx, nqn)
	if err == nil {
		p.forget(nqn)
	}
	return err
}

// inUse reports whether a device is mounted, or under another device. It cannot tell whether the device is only open somewhere.
func inUse(c nvme.Device) bool {
	if c.Path == "" {
		return false
	}
	f, err := os.OpenFile(c.Path, os.O_RDONLY|unix.O_EXCL|unix.O_NONBLOCK, 0)
	if err == nil {
		_ = f.Close() // nothing was read or written
	}
	return errors.Is(err, unix.EBUSY)
}

// staysInUse is inUse, but waits a moment: a device over it that goes with its last user loses its name before it lets go of this one.
func staysInUse(ctx context.Context, c nvme.Device) bool {
	for try := 0; inUse(c); try++ {
		if try == held.Tries || ctx.Err() != nil {
			return true
		}
		time.Sleep(held.Pause)
	}
	return false
}

// stacked reports whether there is a device over a connection's device.
func stacked(c nvme.Device) bool {
	return len(holders(c)) > 0
}

// holders returns the names of the devices over a connection's device, as the kernel has them.
func holders(c nvme.Device) (names []string) {
	entries, _ := os.ReadDir(fmt.Sprintf("/sys/dev/block/%d:%d/holders", unix.Major(c.Number), unix.Minor(c.Number))) // a device that is gone has none
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// Attached: see blockdev.Pool. A device is Kept if it was handed out itself, and not a device over it. That is known of connections that came
// in the time of this process, also after who attached them had given up: the kernel goes on. One of an earlier process with nothing over it counts as Kept: it
// was handed out, or nothing uses it, which a start finds out (Orphans).
func (p *Pool) Attached(_ context.Context, ref blockdev.Ref) ([]blockdev.Device, error) {
	if err := ref.Validate(); err != nil {
		return nil, err
	}
	connected, err := p.of(ref)
	return p.devices(p.firsts(connected)), err
}

func (p *Pool) devices(connected []nvme.Device) (devices []blockdev.Device) {
	for _, c := range connected {
		if k := p.knownOf(c.NQN); c.Path != "" {
			devices = append(devices, blockdev.Device{Path: c.Path, Number: c.Number, Size: c.Size, Kept: k.kept || !k.made && p.isEarlier(c.NQN) && !stacked(c)})
		}
	}
	return devices
}

// Detach: see blockdev.Pool. After success, what was written through a raw device is at home. errdefs.ErrUnavailable while the home is away that has to
// get it; once the claim has ended, it cannot get there any more.
func (p *Pool) Detach(ctx context.Context, ref blockdev.Ref) error {
	if err := ref.Validate(); err != nil {
		return err
	}
	connected, err := p.of(ref)
	if err != nil {
		return err
	}
	firsts := p.firsts(connected)
	for _, c := range connected {
		if slices.Contains(firsts, c) {
			err = p.detach(ctx, ref, c)
		} else {
			err = p.Drop(ctx, c.NQN)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (p *Pool) detach(ctx context.Context, ref blockdev.Ref, c nvme.Device) error {
	if staysInUse(ctx, c) {
		return fmt.Errorf("%w: %s is held by a mount, or by a device over it", errdefs.ErrInUse, c.Path)
	}
	ours, err := p.ours(ctx, ref, c)
	switch {
	case c.Path == "":
	case c.Live():
		if err := fsync.AndClose(os.Open(c.Path)); err != nil {
			klog.FromContext(ctx).Error(err, "Could not write out what was written to a device; disconnecting it all the same", "device", c.Path)
		}
	case err != nil:
		return errdefs.Recast(errdefs.ErrUnavailable, err, "%s; and whether its claim has ended is not known", p.away(c, ref))
	case ours:
		return fmt.Errorf("%w: %s", errdefs.ErrUnavailable, p.away(c, ref))
	}
	if err := p.disconnect(ctx, c.NQN); err != nil {
		return err
	}
	if ours || c.Live() { // a live connection is exported by the home, whatever is known of claims
		p.closed(ctx, ref, c)
	}
	return nil
}

// ours reports whether a connection leads to what the home exports, or may do so again. If no claim is known here, as perhaps nobody has told of one yet,
// and the connection is not live, Home.Ended is asked.
func (p *Pool) ours(ctx context.Context, ref blockdev.Ref, c nvme.Device) (bool, error) {
	generation := generationOf(c)
	claim, claimed := p.home.Claim(ref)
	if claimed || c.Live() || p.replaced(ref, c) {
		return claimed && claim.Generation == generation && !p.replaced(ref, c), nil
	}
	ended, err := p.home.Ended(ctx, ref, generation)
	return !ended, err
}

// keepPause is the time between two looks of Keep.
const keepPause = 10 * time.Second

// Keep disconnects, until ctx ends, connections that are not live and whose claim has ended, or whose home is gone for good: they lead nowhere any more, and
// not all kernels find that out. I/O that waits for them fails.
func (p *Pool) Keep(ctx context.Context) {
	ticks := time.NewTicker(keepPause)
	defer ticks.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticks.C:
			if err := p.DropEnded(ctx); err != nil && ctx.Err() == nil {
				klog.FromContext(ctx).Error(err, "Could not find out what connections to volumes of other nodes lead nowhere any more; trying again")
			}
		}
	}
}

// dropTime is how long DropEnded waits for the kernel to end a connection. The kernel goes on with it after that.
const dropTime = 30 * time.Second

// settleTime is how long a connection has not been live before DropEnded ends it. It may be that of a leg: if a flush failed at once, what the leg has taken might
// still be under way to another one. The mirror would forget the failure, and acknowledge the next write without that leg (docs/decisions/replicas.md).
const settleTime = 2 * time.Second

// DropEnded does once what Keep does each time. It ends the connections at once: one of them may take the kernel long.
func (p *Pool) DropEnded(ctx context.Context) error {
	all, err := p.all(nqnPrefix)
	failures, ended := []error{err}, make(chan error)
	ending := 0
	for ref, connected := range all {
		for _, c := range connected {
			is, err := p.hasEnded(ctx, ref, c)
			if failures = append(failures, err); !is {
				continue
			}
			klog.FromContext(ctx).Info("The claim of a volume of another node has ended, or its export has, or that node is gone for good; its connection ends, and all who use it here get errors",
				"volume", ref.String(), "generation", generationOf(c))
			ending++
			go func() {
				select {
				case <-time.After(settleTime - time.Since(p.look(c).away)):
				case <-ctx.Done():
				}
				ctx, cancel := context.WithTimeout(ctx, dropTime)
				defer cancel()
				ended <- p.disconnect(ctx, c.NQN)
			}()
		}
	}
	for range ending {
		failures = append(failures, <-ended)
	}
	return errors.Join(failures...)
}

// hasEnded reports whether a connection leads nowhere any more.
func (p *Pool) hasEnded(ctx context.Context, ref blockdev.Ref, c nvme.Device) (bool, error) {
	if p.look(c); c.Live() {
		return false, nil
	}
	if p.replaced(ref, c) {
		return true, nil
	}
	return p.home.Ended(ctx, ref, generationOf(c))
}

// Orphans: see blockdev.Pool. They are all connections with nothing over them, as a crash may have come before there was. Second legs are left out:
// whoever goes on with the move finds them.
func (p *Pool) Orphans(context.Context) (map[blockdev.Ref][]blockdev.Device, error) {
	all, err := p.all(nqnPrefix)
	found := map[blockdev.Ref][]blockdev.Device{}
	for ref, connected := range all {
		for _, c := range p.firsts(connected) {
			if stacked(c) {
				continue
			}
			if devices := p.devices([]nvme.Device{c}); len(devices) > 0 {
				found[ref] = append(found[ref], devices...)
			} else if found[ref] == nil {
				found[ref] = []blockdev.Device{} // the connection has no device any more
			}
		}
	}
	return found, err
}

// ReasonAway is the reason of the problem for a volume whose home does not answer.
const ReasonAway = "HomeAway"

// away returns, for an error, that the home of a connection is away, and what to do.
func (p *Pool) away(c nvme.Device, ref blockdev.Ref) string {
	home, since := "the node that has it", ""
	if claim, claimed := p.home.Claim(ref); claimed {
		home = "node " + claim.Home
	} else if k := p.knownOf(c.NQN); k.home != "" {
		home = "node " + k.home
	}
	if at := p.look(c).away; !at.IsZero() {
		since = " since " + at.UTC().Format(time.RFC3339)
	}
	return fmt.Sprintf("%s, which has the bytes of %s, does not answer on the network%s (the connection is %s), and what is read from and written to it here waits; "+
		"see that the node is up, and reached from node %s", home, ref, since, c.State, p.node)
}

// look notes since when a connection is not live, and returns what is known of it.
func (p *Pool) look(c nvme.Device) known {
	return p.note(c.NQN, func(k *known) {
		switch {
		case c.Live():
			k.away = time.Time{}
		case k.away.IsZero():
			k.away = time.Now()
		}
	})
}

// Away returns the volumes that are used here and whose homes do not answer, and since when. It asks only the kernel.
func (p *Pool) Away() (map[blockdev.Ref]time.Time, error) {
	all, err := p.all(nqnPrefix)
	away := map[blockdev.Ref]time.Time{}
	for ref, connected := range all {
		connected = p.firsts(connected)
		if slices.ContainsFunc(connected, nvme.Device.Live) {
			continue
		}
		for _, c := range connected {
			if at, is := away[ref]; !is || p.look(c).away.Before(at) {
				away[ref] = p.look(c).away
			}
		}
	}
	return away, err
}

// Samples is a metrics.Source.
func (p *Pool) Samples() []metrics.Sample {
	away, err := p.Away()
	if err != nil {
		return nil // PoolHealth reports the error
	}
	return []metrics.Sample{metrics.RemoteVolumesAway.At(float64(len(away)), p.node)}
}

// Health: see blockdev.Pool. It asks only the kernel.
func (p *Pool) Health(_ context.Context, ref blockdev.Ref) ([]blockdev.Problem, error) {
	if err := p.check(ref); err != nil {
		return nil, err
	}
	connected, err := p.of(ref)
	return p.problems(ref, connected), err
}

func (p *Pool) problems(ref blockdev.Ref, connected []nvme.Device) (problems []blockdev.Problem) {
	for _, c := range p.firsts(connected) {
		if p.look(c); !c.Live() {
			problems = append(problems, blockdev.Problem{Severity: blockdev.Inaccessible, Reason: ReasonAway, Message: p.away(c, ref)})
		}
	}
	return problems
}

// PoolHealth returns what is wrong with all connections.
func (p *Pool) PoolHealth(context.Context) (problems []blockdev.Problem) {
	all, err := p.all(nqnPrefix)
	if err != nil {
		return []blockdev.Problem{{Severity: blockdev.Degraded, Reason: "ConnectionsUnknown", Message: errdefs.Words(err)}}
	}
	for ref, connected := range all {
		problems = append(problems, p.problems(ref, connected)...)
	}
	return problems
}
