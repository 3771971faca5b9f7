package blockdev

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// alive makes sure that the pool's folder is still the one that was opened.
func (p *filePool) alive() error {
	var held, named unix.Stat_t
	err := unix.Fstat(int(p.folders[Volume].Fd()), &held)
	if err == nil {
		err = unix.Stat(p.location.Path+"/"+folderNames[Volume], &named)
	}
	if err != nil || held.Dev != named.Dev || held.Ino != named.Ino {
		if err == nil {
			err = errors.New("another folder is there now")
		}
		return fmt.Errorf("%w: the folder %s of pool %s is gone: %w; mount its filesystem again and restart the driver", ErrUnavailable, p.location.Path, p.name, err)
	}
	return nil
}

func (p *filePool) Health(_ context.Context, ref Ref) ([]Problem, error) {
	_, s, err := p.lookup(ref)
	if errors.Is(err, ErrDataLoss) {
		return []Problem{{DataLoss, "RecordDamaged", err.Error()}}, nil
	}
	if err != nil {
		return nil, err
	}
	if err := p.alive(); err != nil {
		return []Problem{{Inaccessible, "PoolUnavailable", err.Error()}}, nil
	}
	image, err := p.openImage(ref, s, os.O_RDONLY)
	switch {
	case err == nil:
		image.Close()
		return nil, nil
	case errors.Is(err, ErrDataLoss):
		reason := "ImageTruncated"
		if _, statErr := p.root.Stat(imagePath(ref)); errors.Is(statErr, os.ErrNotExist) {
			reason = "ImageMissing"
		}
		return []Problem{{DataLoss, reason, err.Error()}}, nil
	default:
		return []Problem{{Inaccessible, "ImageUnreadable", err.Error()}}, nil
	}
}

func (p *filePool) PoolHealth(context.Context) []Problem {
	if err := p.alive(); err != nil {
		return []Problem{{Inaccessible, "PoolUnavailable", err.Error()}}
	}
	var problems []Problem
	total, free, err := p.statfs()
	switch {
	case err != nil:
		return []Problem{{Inaccessible, "PoolUnavailable", err.Error()}}
	case float64(free) < float64(total)*max(p.location.ReservePercent, 1)/100:
		problems = append(problems, Problem{Degraded, "PoolNearlyFull", fmt.Sprintf(
			"the filesystem of pool %s at %s has %d of %d bytes left; writes to thin volumes will fail when it is full: make room", p.name, p.location.Path, free, total)})
	}
	// An ext4 that stopped writing after an error does not say so in statfs (Linux 6.16), and takes new times (6.1).
	err = unix.Fsetxattr(int(p.lock.Fd()), "user.ashlar.health", []byte("ok"), 0)
	if errors.Is(err, unix.ENOTSUP) {
		err = p.root.Chtimes("lock", time.Now(), time.Now())
	}
	if err != nil && !errors.Is(err, unix.ENOSPC) {
		problems = append(problems, Problem{Inaccessible, "PoolReadOnly", fmt.Sprintf("the filesystem of pool %s at %s takes no changes: %v; look at the kernel's log", p.name, p.location.Path, err)})
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.damaged) > 0 {
		var failures []string
		for _, err := range p.damaged {
			failures = append(failures, err.Error())
		}
		slices.Sort(failures)
		problems = append(problems, Problem{Degraded, "RecordDamaged", fmt.Sprintf("pool %s: %s", p.name, strings.Join(failures, "; "))})
	}
	if len(p.strays) > 0 {
		problems = append(problems, Problem{Degraded, "UnknownImage", fmt.Sprintf(
			"pool %s has images without a record, which nothing uses and nothing removes; bring their records back or remove them by hand: %s", p.name, strings.Join(p.strays, ", "))})
	}
	return problems
}
