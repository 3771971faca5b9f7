package elsewhere

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// slow is a bandwidth with which a copy of what slowTwo makes takes some 12 s.
const slow = "--copy-bandwidth=2Mi"

// slowTwo is a cluster in which copies take their time, and a snapshot.
func slowTwo(t *testing.T) (w *two, v volume.Volume, snapshot volume.Snapshot) {
	t.Helper()
	w = newTwo(t, slow)
	before := contents
	t.Cleanup(func() { contents = before })
	contents = append(contents, drivertest.Content{Seed: "more", Offset: 30 * mib, Size: 20 * mib})
	v, err := w.store.Create(w.ctx, volume.Spec{Name: "source", Provisioning: blockdev.Thin, Nodes: []string{w.source.name}, Size: volume.Range{Required: size}})
	check.OK(t, err)
	for _, c := range contents {
		check.OK(t, c.Write(w.source.image("volumes", v.ID.Key)))
	}
	snapshot, err = w.store.CreateSnapshot(w.ctx, "snapshot", v.ID)
	check.OK(t, err)
	return w, v, snapshot
}

// ask asks for a copy, as a CO does.
func (w *two) ask(name string, source volume.ID) (volume.Volume, error) {
	ctx, cancel := context.WithTimeout(w.ctx, 10*time.Second)
	defer cancel()
	return w.store.Create(ctx, volume.Spec{Name: name, Provisioning: blockdev.Thin, Source: source, Copies: volume.CopiesAnywhere, Nodes: []string{w.target.name}, Size: volume.Range{Required: size}})
}

// begin asks for a copy, and returns when it is in the middle; answer is what was answered.
func (w *two) begin(name string, source volume.ID) (answer <-chan error) {
	w.Helper()
	asked := make(chan error, 1)
	go func() {
		_, err := w.ask(name, source)
		asked <- err
	}()
	w.eventually("it is in the middle", func() bool {
		v := w.object(name)
		return v != nil && v.Status.Progress != nil && v.Status.Progress.Done > 8*mib
	})
	return asked
}

// object is that of a volume; nil if there is none.
func (w *two) object(name string) *v1alpha1.Volume {
	w.Helper()
	v := &v1alpha1.Volume{}
	err := w.api.Get(w.ctx, client.ObjectKey{Name: volume.KeyOf(name)}, v)
	if client.IgnoreNotFound(err) != nil {
		w.Fatal(err)
	}
	if err != nil {
		return nil
	}
	return v
}

// finish sees a copy through, and removes it.
func (w *two) finish(name string, source volume.ID) {
	w.Helper()
	var copied volume.Volume
	w.eventually("the copy is made", func() bool {
		var err error
		copied, err = w.ask(name, source)
		return err == nil
	})
	w.whole(copied.ID.Key)
	check.OK(w, w.store.Delete(w.ctx, copied.ID))
}

// TestElsewhereFrozen: an agent stops in the middle of a copy (SIGSTOP) for longer than the other one waits. That one says that it waits if it is the one
// that makes the copy, goes on with all else, holds nothing of the source if it is the other, and when the agent goes on so does the copy.
func TestElsewhereFrozen(t *testing.T) {
	w, v, snapshot := slowTwo(t)
	which := []*node{w.source, w.target}
	if os.Getenv("POINTS") != "all" {
		which = which[rand.IntN(2):][:1]
	}
	for _, frozen := range which {
		t.Run(frozen.name, func(t *testing.T) {
			name := "frozen " + frozen.name
			answer := w.begin(name, snapshot.ID)
			check.OK(t, unix.Kill(frozen.Pid(), unix.SIGSTOP))
			defer func() { _ = unix.Kill(frozen.Pid(), unix.SIGCONT) }()
			stopped := time.Now()
			if err := <-answer; !errors.Is(err, errdefs.ErrUnavailable) {
				t.Errorf("while the agent of %s is stopped: %v", frozen.name, err)
			}
			if frozen == w.source {
				w.eventually("the copy says that it waits", func() bool {
					c := meta.FindStatusCondition(w.object(name).Status.Conditions, v1alpha1.Copied)
					return c != nil && c.Reason == v1alpha1.ReasonCopyWaits
				})
				other, err := w.store.Create(w.ctx, volume.Spec{Name: "other", Nodes: []string{w.target.name}, Size: volume.Range{Required: mib}})
				check.OK(t, err)
				check.OK(t, w.store.Delete(w.ctx, other.ID))
			} else {
				time.Sleep(time.Until(stopped.Add(35 * time.Second))) // the connection's own limit is 30
				other, err := w.store.CreateSnapshot(w.ctx, "other", v.ID)
				check.OK(t, err)
				check.OK(t, w.store.DeleteSnapshot(w.ctx, other.ID))
			}
			check.OK(t, unix.Kill(frozen.Pid(), unix.SIGCONT))
			w.finish(name, snapshot.ID)
		})
	}
	check.OK(t, errors.Join(w.store.DeleteSnapshot(w.ctx, snapshot.ID), w.store.Delete(w.ctx, v.ID)))
	w.eventually("nothing is left", func() bool { return len(w.source.left())+len(w.target.left()) == 0 })
}

// TestElsewhereFull: others take the room of a thin copy while it is made. That is refused, for another node to be chosen, and leaves nothing; with room again, it
// is made.
func TestElsewhereFull(t *testing.T) {
	w, v, snapshot := slowTwo(t)
	answer := w.begin("full", snapshot.ID)
	filler := filepath.Join(filepath.Dir(w.target.pool), "filler")
	fill(t, filler)
	if err := <-answer; !errors.Is(err, errdefs.ErrNoSpace) && !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("a copy for which there is no room any more: %v", err)
	}
	w.eventually("it is refused", func() bool {
		_, err := w.ask("full", snapshot.ID)
		return errors.Is(err, errdefs.ErrNoSpace) && strings.Contains(err.Error(), "pool default")
	})
	if w.object("full") != nil || len(w.target.left()) != 0 {
		t.Errorf("left are %v and %v", w.object("full"), w.target.left())
	}
	check.OK(t, os.Remove(filler))
	w.finish("full", snapshot.ID)
	check.OK(t, errors.Join(w.store.DeleteSnapshot(w.ctx, snapshot.ID), w.store.Delete(w.ctx, v.ID)))
}

// fill takes all blocks that a filesystem has left, also those that are kept for root.
func fill(t *testing.T, path string) {
	t.Helper()
	f, err := os.Create(path)
	check.OK(t, err)
	defer f.Close()
	for at, step := int64(0), int64(256*mib); step >= 4096; {
		switch err := unix.Fallocate(int(f.Fd()), 0, at, step); {
		case err == nil:
			at += step
		case errors.Is(err, unix.ENOSPC):
			step /= 2
		default:
			t.Fatal(fmt.Errorf("fill %s: %w", path, err))
		}
	}
}
