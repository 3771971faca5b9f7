package anynode

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
)

// TestMoveInUse: a volume moves while its pod writes to it, which goes on: from a third node, from its old home itself, and from the new one. Nothing that
// was acknowledged is missing, there and wherever it is used next, and the device of the pod stays the same. A sample (SAMPLE=1) has one kind of volume a day.
func TestMoveInUse(t *testing.T) {
	c := newNodes(t)
	today := int(time.Now().Unix() / 86400)
	for user, who := range map[string]string{third: "third", home: "old", newHome: "new"} {
		for i, filesystem := range []string{"ext4", co.Block} {
			for j, encrypted := range []bool{false, true} {
				if os.Getenv("SAMPLE") == "1" && 2*i+j != today%4 {
					continue
				}
				t.Run(fmt.Sprintf("%s/%s/encrypted=%v", who, filesystem, encrypted), func(t *testing.T) {
					in := *c
					in.TB = t
					u := in.writtenTo(fmt.Sprintf("of-%s-%s-%v", who, filesystem, encrypted), user, filesystem, encrypted)
					u.move(newHome)
					u.moved(home, newHome)
					u.goesOn()
					if exports := left(); user == newHome && len(exports) > 0 {
						t.Errorf("at its new home it is used over the network: %v", exports)
					}
					u.ends()
				})
			}
		}
	}
}

// goingOn is a volume that a node uses: somebody writes to it all the time.
type goingOn struct {
	*volume
	user    string
	path    func(node string) string // that is written to
	content drivertest.Content       // beside it
	beside  func(node string) string // where
	writer  *writer
}

// writtenTo makes a volume, and has a node use it.
func (c *nodes) writtenTo(name, user, filesystem string, encrypted bool, edit ...func(*csi.CreateVolumeRequest)) *goingOn {
	c.Helper()
	u := &goingOn{user: user, content: drivertest.Content{Seed: name, Size: 4 * mib}}
	u.volume = c.encrypted(encrypted).create(name, filesystem, edit...)
	in := func(name string) func(string) string {
		return func(node string) string { return filepath.Join(u.target(node), name) }
	}
	if u.path, u.beside = in("blocks"), in("beside"); filesystem == co.Block {
		u.path, u.beside, u.content.Offset = u.target, u.target, 8*mib
	}
	u.again("claim it for "+user, func(ctx context.Context) error { return u.claim(ctx, user) })
	u.again("stage it on "+user, func(ctx context.Context) error { return u.up(ctx, user) })
	if filesystem != co.Block {
		check.OK(c, os.WriteFile(u.path(user), make([]byte, blocks*block), 0o600))
	}
	check.OK(c, u.content.Write(u.beside(user)))
	u.writes()
	return u
}

// writes starts the writer, and waits until each of its blocks was written.
func (u *goingOn) writes() {
	u.Helper()
	var err error
	u.writer, err = write(u.path(u.user), newTag())
	check.OK(u, err)
	u.goesOn()
}

// goesOn makes sure that the volume is written to.
func (u *goingOn) goesOn() {
	u.Helper()
	u.volume.goesOn(u.writer)
}

// goesOn makes sure that a writer writes.
func (v *volume) goesOn(w *writer) {
	v.Helper()
	at := w.acked.Load()
	v.eventually("it is written to", func() bool {
		select {
		case <-w.done:
			v.Fatalf("the writer has ended: %v\n%s", w.err, v.logs())
		default:
		}
		return w.acked.Load() > at+2*blocks
	})
}

// whole makes sure that nothing is missing of what was written, as a node sees it.
func (u *goingOn) whole(node string) {
	u.Helper()
	now, err := read(u.path(node))
	check.OK(u, err)
	check.OK(u, u.writer.lost(now))
	check.OK(u, u.content.In(u.beside(node)))
}

// ends ends the use of a volume, looks for what was written from another node, and deletes it.
func (u *goingOn) ends() {
	u.Helper()
	u.writer.end()
	check.OK(u, u.writer.err)
	u.whole(u.user)
	u.leave(u.user)
	for _, node := range []string{newHome, third} {
		u.use(node, func(string) { u.whole(node) })
	}
	u.again("delete it", u.of.Delete)
	u.gone()
}
