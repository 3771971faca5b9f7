package filepool

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/directory"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/identity"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/layout"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/recordfile"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/loop"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// alive returns errdefs.ErrUnavailable unless the pool's directories are still those that were opened.
func (p *pool) alive() error {
	for _, kind := range slices.Sorted(maps.Keys(p.directories)) {
		var held, named unix.Stat_t
		path := p.location.Path + "/" + layout.Directories[kind]
		err := unix.Fstat(int(p.directories[kind].Fd()), &held)
		if err == nil {
			err = unix.Stat(path, &named)
		}
		if err == nil && (held.Dev != named.Dev || held.Ino != named.Ino) {
			err = errors.New("another directory is there now")
		}
		if err != nil {
			return fmt.Errorf("%w: the directory %s of pool %s is gone: %w; mount its filesystem again, and nothing over its directories, or, if somebody replaced that one, start the driver anew",
				errdefs.ErrUnavailable, path, p.name, err)
		}
	}
	return nil
}

// replaced reports whether another directory with the same pool is at the pool's place. It does not count if only a part of the pool is hidden by a mount,
// as what is there is not on the pool's disk.
func (p *pool) replaced() bool {
	root, err := os.OpenRoot(p.location.Path)
	if err != nil {
		return false
	}
	defer root.Close()
	id, _, err := identity.Read(root)
	if err != nil || id != p.id {
		return false
	}
	held, err := p.root.Stat(".")
	named, failure := root.Stat(".")
	return err != nil || failure == nil && !os.SameFile(held, named)
}

// Gone: see blockdev.Leaver. It is true if another directory with the same pool is at its place, as after its disk came back; or if its filesystem has
// stopped for good, and no device is over an image.
func (p *pool) Gone() bool {
	if p.alive() != nil && p.replaced() {
		return true
	}
	p.Mu.Lock()
	loops, tried := maps.Clone(p.loops), p.trial != nil
	p.Mu.Unlock()
	if tried { // who syncs may have to wait as that does
		return false
	}
	for ref, known := range loops {
		for _, l := range known {
			if name, _, err := loop.BackingName(l.number); err == nil && strings.HasSuffix(name, layout.Image(ref)) {
				return false
			}
		}
	}
	err := p.lock.Sync()
	return errors.Is(err, unix.EIO) || errors.Is(err, unix.EROFS) // XFS shuts down, ext4 and btrfs turn read-only
}

// version identifies the state of an object's record: two are equal if nobody changed the record in between.
type version struct {
	o       *object
	at      recordfile.Position
	growing int64
}

func (p *pool) version(ref blockdev.Ref) version {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	o := p.Objects[ref]
	if o == nil {
		return version{}
	}
	return version{o, o.at, o.growing}
}

func (p *pool) Health(ctx context.Context, ref blockdev.Ref) ([]blockdev.Problem, error) {
	found := p.version(ref)
	o, record, err := p.Lookup(ref)
	if errors.Is(err, errdefs.ErrDataLoss) {
		return []blockdev.Problem{{Severity: blockdev.DataLoss, Reason: "RecordDamaged", Message: errdefs.Words(err)}}, nil
	}
	if err != nil {
		return nil, err
	}
	if found.o != o {
		return p.Health(ctx, ref) // the object was made meanwhile
	}
	if err := p.alive(); err != nil {
		return []blockdev.Problem{{Severity: blockdev.Inaccessible, Reason: "PoolUnavailable", Message: errdefs.Words(err)}}, nil
	}
	image, err := p.openImage(record, os.O_RDONLY)
	switch {
	case err == nil:
		defer image.Close()
		problems, err := p.deviceHealth(ref)
		if longer := p.checkLength(record, found.growing, image); longer != nil && p.version(ref) == found { // otherwise it grows just now
			problems = append(problems, blockdev.Problem{Severity: blockdev.Degraded, Reason: "ImageLonger", Message: longer.Error()})
		}
		return problems, err
	case errors.Is(err, errdefs.ErrDataLoss):
		if p.version(ref) != found {
			return p.Health(ctx, ref) // it was deleted meanwhile, or made anew
		}
		reason := "ImageTruncated"
		if errors.Is(err, errNotOwn) {
			reason = "ImageOfAnother"
		} else if errors.Is(err, errReplaced) {
			reason = "ImageReplaced"
		} else if _, statErr := p.root.Lstat(layout.Image(ref)); errors.Is(statErr, os.ErrNotExist) {
			reason = "ImageMissing"
		}
		return []blockdev.Problem{{Severity: blockdev.DataLoss, Reason: reason, Message: errdefs.Words(err)}}, nil
	default:
		return []blockdev.Problem{{Severity: blockdev.Inaccessible, Reason: "ImageUnreadable", Message: errdefs.Words(err)}}, nil
	}
}

// nearlyFull is the part of a filesystem, in percent, below which free space is reported; a smaller reserve counts in its place. At that value the kubelet
// begins to evict pods, if it is its own filesystem.
const nearlyFull = 10

// deviceHealth reports the settings that users of an object's raw device changed (DeviceChanged).
func (p *pool) deviceHealth(ref blockdev.Ref) ([]blockdev.Problem, error) {
	loops, err := p.openLoops(ref)
	if err != nil {
		return nil, err
	}
	defer closeLoops(loops)
	var problems []blockdev.Problem
	for _, l := range loops {
		if what := l.changed(); len(what) > 0 {
			problems = append(problems, blockdev.Problem{Severity: blockdev.Degraded, Reason: "DeviceChanged", Message: fmt.Sprintf("the user of %s of pool %s changed its device %s: %s; stage it anew",
				ref, p.name, loop.Path(l.Number), strings.Join(what, ", "))})
		}
	}
	return problems, nil
}

func (p *pool) PoolHealth(ctx context.Context) []blockdev.Problem {
	if err := p.alive(); err != nil {
		return []blockdev.Problem{{Severity: blockdev.Inaccessible, Reason: "PoolUnavailable", Message: errdefs.Words(err)}}
	}
	var problems []blockdev.Problem
	total, free, err := p.statfs()
	switch {
	case err != nil:
		return []blockdev.Problem{{Severity: blockdev.Inaccessible, Reason: "PoolUnavailable", Message: errdefs.Words(err)}}
	case float64(free) < float64(total)*min(max(p.location.ReservePercent, 1), nearlyFull)/100:
		problems = append(problems, blockdev.Problem{Severity: blockdev.Degraded, Reason: "PoolNearlyFull", Message: fmt.Sprintf(
			"the filesystem of pool %s at %s has %.1f %% of its space left; writes to thin volumes will fail when it is full: make room", p.name, p.location.Path, float64(free)/float64(total)*100)})
	default:
		if err := p.checkInodes(); err != nil {
			problems = append(problems, blockdev.Problem{Severity: blockdev.Degraded, Reason: "PoolNearlyFull", Message: errdefs.Words(err)})
		}
	}
	if err := p.takesChanges(ctx); err != nil && ctx.Err() == nil {
		problems = append(problems, blockdev.Problem{Severity: blockdev.Inaccessible, Reason: "PoolReadOnly", Message: errdefs.Words(err)})
	}
	p.Mu.Lock()
	defer p.Mu.Unlock()
	problems = append(problems, p.spaceHealth()...)
	problems = append(problems, p.Damage(recordfile.ErrNoRecord)...) // ErrNoRecord is for the strays, which are reported below
	if p.alone > 0 {
		problems = append(problems, blockdev.Problem{Severity: blockdev.Degraded, Reason: "RecordsNotSafe", Message: fmt.Sprintf(
			"pool %s: %d records could be written to one of their two places only; it is tried again when they are used next: make room, or look at the kernel's log", p.name, p.alone)})
	}
	if len(p.strays) > 0 {
		problems = append(problems, blockdev.Problem{Severity: blockdev.Degraded, Reason: "UnknownImage", Message: fmt.Sprintf(
			"pool %s has images without a record, which nothing uses and nothing removes; bring their records back or remove them by hand: %s", p.name, strings.Join(p.strays, ", "))})
	}
	return problems
}

// trial is a change of the pool's filesystem that is tried, to see whether it takes any. Several callers may wait for it.
type trial struct {
	begun time.Time
	ended chan struct{} // closed once err is there
	err   error
}

// trialPatience is how long a trial may take before the filesystem counts as one that takes no changes.
const trialPatience = 10 * time.Second

// takesChanges makes sure that the pool's filesystem can be written to. The kernel may not answer for long, as of one that somebody froze (fsfreeze(8)):
// it is waited for until the context ends, which is the error then, or for trialPatience since it was asked.
func (p *pool) takesChanges(ctx context.Context) error {
	t := p.try()
	late := time.NewTimer(time.Until(t.begun.Add(trialPatience)))
	defer late.Stop()
	select {
	case <-t.ended:
		return t.err
	case <-late.C:
		return fmt.Errorf("%w: the filesystem of pool %s at %s has not taken a change since %s; if somebody froze it, end that (fsfreeze -u %s), else its disk does not answer: look at the kernel's log",
			errdefs.ErrUnavailable, p.name, p.location.Path, t.begun.Format(time.RFC3339), p.location.Path)
	case <-ctx.Done():
		return fmt.Errorf("find out whether the filesystem of pool %s at %s takes changes: %w", p.name, p.location.Path, ctx.Err())
	}
}

// try begins a trial, or returns the one that is under way: there is never a second one.
func (p *pool) try() *trial {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	if p.trial == nil {
		t := &trial{begun: time.Now(), ended: make(chan struct{})}
		p.trial = t
		go func() {
			t.err = p.change()
			p.Mu.Lock()
			defer p.Mu.Unlock()
			p.trial = nil
			close(t.ended)
		}()
	}
	return p.trial
}

// change changes something of the pool's filesystem that nobody needs.
func (p *pool) change() error {
	// An ext4 that stopped writing after an error does not say so in statfs (Linux 6.16), and takes new times (6.1).
	var err error
	lock, failure := p.lock.SyscallConn() // by which the file stays open until the kernel has answered, also if the pool is closed
	if failure == nil {
		failure = lock.Control(func(fd uintptr) { err = unix.Fsetxattr(int(fd), "user.ashlar.health", []byte("ok"), 0) })
	}
	if err = errors.Join(err, failure); errors.Is(err, unix.ENOTSUP) {
		err = p.root.Chtimes(directory.LockFile, time.Now(), time.Now())
	}
	if err = errdefs.FromErrno(err); err == nil || errors.Is(err, errdefs.ErrNoSpace) { // a full quota as well
		return nil
	}
	return fmt.Errorf("the filesystem of pool %s at %s takes no changes: %w; look at the kernel's log", p.name, p.location.Path, p.refused(directory.LockFile, err))
}

// spaceHealth reports what keeps the account from being exact. The caller holds Mu.
func (p *pool) spaceHealth() []blockdev.Problem {
	var problems []blockdev.Problem
	say := func(reason, format string, args ...any) {
		problems = append(problems, blockdev.Problem{Severity: blockdev.Degraded, Reason: reason, Message: fmt.Sprintf("pool %s: ", p.name) + fmt.Sprintf(format, args...)})
	}
	if p.copying > 0 {
		say("ImagesCopiedOnWrite", "btrfs writes %d images, which an older driver made, to new places, so they may take more space than was promised; copy what is in them to new volumes", p.copying)
	}
	if p.space.survey.left > 0 {
		say("ImagesFragmented", "%d volumes and snapshots are in so many pieces (%d in all are looked at) that what they share is not known in full; less may be promised than there is: copy what is in them to new volumes, or delete snapshots", p.space.survey.left, p.space.survey.most)
	}
	if err := p.space.survey.failure; err != nil && !errors.Is(err, context.Canceled) {
		say("SpaceUnknown", "it is not known which blocks volumes and snapshots share, and so less may be promised than there is: %v", err)
	}
	return problems
}
