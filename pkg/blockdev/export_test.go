package blockdev

import (
	"context"
	"sync"
	"time"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/loop"
)

// Abandon makes a file pool believe that nobody came back for an unfinished copy for
// as long as it waits.
func Abandon(pool Pool, ref Ref) {
	p := pool.(*filePool)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.objects[ref].touched = time.Now().Add(-abandonedAfter - time.Second)
}

// Age makes an LVM pool believe that its last report is old.
func Age(pool Pool) {
	p := pool.(*lvmPool)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.space.at = p.space.at.Add(-lvmFresh)
}

// Copied returns how many bytes of an unfinished copy of an LVM pool are in place.
func Copied(pool Pool, ref Ref) int64 {
	p := pool.(*lvmPool)
	p.mu.Lock()
	defer p.mu.Unlock()
	if o := p.objects[ref]; o != nil {
		return o.copied
	}
	return 0
}

// Surveys returns how many surveys a file pool has made that looked at an object, and how many
// extents the last one saw of it.
func Surveys(pool Pool, ref Ref) (surveys, extents int) {
	p := pool.(*filePool)
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.objects[ref].use.surveys, p.objects[ref].use.extents
}

// LimitSurveys has the surveys of a file pool look at no more than n extents.
func LimitSurveys(pool Pool, n int) { pool.(*filePool).space.survey.most = n }

// HangSurveys has those that a file pool begins from now on hang where they read the extents of an
// object, as on a disk that does not answer, until they are let go on.
func HangSurveys(pool Pool) (release func()) {
	p := pool.(*filePool)
	p.mu.Lock()
	defer p.mu.Unlock()
	until := make(chan struct{})
	p.space.survey.context = hanging{p.space.survey.context, until}
	return sync.OnceFunc(func() { close(until) })
}

type hanging struct {
	context.Context
	until <-chan struct{}
}

func (h hanging) Err() error {
	<-h.until
	return h.Context.Err()
}

// FirstStep is how much of an image is worked on at once, in bytes.
const FirstStep = firstStep

// ForgetStopped removes a loop device that was told to take no discards.
var ForgetStopped = loop.ForgetStopped

// Frame is a frame as it is on disk, for tests that write what this driver would not.
func Frame(what string, version int, generation uint64, body string) string {
	return string(frame{version, generation, []byte(body)}.encode(what))
}
