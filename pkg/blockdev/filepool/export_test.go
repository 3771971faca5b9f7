package filepool

import (
	"context"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/frame"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/sparse"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/catalog"
)

// Abandon makes a file pool believe that nobody came back for an unfinished copy within catalog.AbandonedAfter.
func Abandon(of blockdev.Pool, ref blockdev.Ref) {
	p := of.(*pool)
	p.Mu.Lock()
	defer p.Mu.Unlock()
	p.Objects[ref].Released = time.Now().Add(-catalog.AbandonedAfter - time.Second)
}

// Remeasure has a file pool look at its images at the next look at its account.
func Remeasure(of blockdev.Pool) {
	p := of.(*pool)
	p.Mu.Lock()
	defer p.Mu.Unlock()
	p.space.measured = time.Time{}
}

// Surveys returns how many surveys of a file pool have looked at an object, and how many extents the last one saw of it.
func Surveys(of blockdev.Pool, ref blockdev.Ref) (surveys, extents int) {
	p := of.(*pool)
	p.Mu.Lock()
	defer p.Mu.Unlock()
	return p.Objects[ref].use.surveys, p.Objects[ref].use.extents
}

// LimitSurveys makes the surveys of a file pool look at no more than n extents.
func LimitSurveys(of blockdev.Pool, n int) { of.(*pool).space.survey.most = n }

// HangSurveys makes later surveys of a file pool hang where they read the extents of an object, as on a disk that does not answer, until they are
// released.
func HangSurveys(of blockdev.Pool) (release func()) {
	p := of.(*pool)
	p.Mu.Lock()
	defer p.Mu.Unlock()
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
const FirstStep = sparse.FirstStep

// Frame returns a frame as it is on disk, for tests that write what this driver would not.
func Frame(what string, version int, generation uint64, body string) string {
	return string(frame.Frame{Version: version, Generation: generation, Body: []byte(body)}.Encode(what))
}

// FailSyncs has a file pool fail to sync a directory of its own, until that is restored.
func FailSyncs(of blockdev.Pool, kind blockdev.Kind) (restore func() error, err error) {
	p := of.(*pool)
	was := p.directories[kind]
	fd, err := unix.Open(was.Name(), unix.O_PATH|unix.O_CLOEXEC, 0) // which tells which directory it is, and takes no fsync(2)
	if err != nil {
		return nil, err
	}
	failing := os.NewFile(uintptr(fd), was.Name())
	p.directories[kind] = failing
	return func() error { p.directories[kind] = was; return failing.Close() }, nil
}

// OneSlot makes a file pool believe that only one slot has the record of an object. No call may change that record meanwhile.
func OneSlot(of blockdev.Pool, ref blockdev.Ref) {
	p := of.(*pool)
	p.Mu.Lock()
	defer p.Mu.Unlock()
	p.Objects[ref].at.Alone = true
}
