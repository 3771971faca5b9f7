package anynode

import (
	"context"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
)

// moves are those of a volume that is written to meanwhile, from its home to newHome: by whom it may be used, and whose driver may be harmed. Below its filesystem
// or its encryption it is the same, but for the names of devices, which are others where a home is the user.
var moves = func() (all []act) {
	who := map[string]string{third: "third", home: "old home", newHome: "new home"}
	for _, a := range []act{{user: third, kind: co.Block}, {user: home, kind: "ext4", encrypted: true}, {user: newHome, kind: co.Block, encrypted: true}} {
		for _, a.harmed = range []string{third, home, newHome} {
			if a.harmed == third && a.user != third {
				continue // it has no part in it
			}
			of := fmt.Sprintf("move, used by %s, harmed %s", who[a.user], who[a.harmed])
			a.used, a.stays, a.check = true, true, (*scene).inOnePlace
			a.name, a.before, a.call, a.back = of, (*scene).written, (*scene).moves, (*scene).movesBack
			all = append(all, a)
			if a.harmed != home || a.user == home { // else it is for others to undo
				a.name, a.before, a.call, a.back = "end of a "+of, (*scene).copied, (*scene).movesBack, nil
				all = append(all, a)
			}
		}
	}
	return all
}()

// otherHome is where a volume was, or may be, that is on a node.
var otherHome = map[string]string{home: newHome, newHome: home}

// moves has the volume move to its new home.
func (s *scene) moves(ctx context.Context) error {
	return s.movesUntil(ctx, func(v *v1alpha1.Volume) bool {
		return v.Spec.NodeName == newHome && v.Spec.Move == nil && v.Status.Move == nil
	},
		func(v *v1alpha1.Volume) bool {
			if v.Spec.NodeName == newHome || v.Spec.Move != nil {
				return false
			}
			v.Spec.Move = &v1alpha1.Move{Node: newHome}
			return true
		})
}

// movesBack takes that back, if it is not too late: then the volume goes on to its new home. It ends when nothing is left on the other node: the object says before that it does not move.
func (s *scene) movesBack(ctx context.Context) error {
	return s.movesUntil(ctx, func(v *v1alpha1.Volume) bool {
		return v.Spec.Move == nil && v.Status.Move == nil && len(s.files(otherHome[v.Spec.NodeName])) == 0
	}, func(v *v1alpha1.Volume) bool {
		if v.Spec.Move == nil || v.Spec.Move.Left {
			return false
		}
		v.Spec.Move = nil
		return true
	})
}

// movesUntil edits the volume's object, until that is as it is to be.
func (s *scene) movesUntil(ctx context.Context, is, edit func(*v1alpha1.Volume) bool) error {
	for ; ; time.Sleep(50 * time.Millisecond) {
		now := &v1alpha1.Volume{}
		if err := s.kube.Get(ctx, client.ObjectKey{Name: s.key()}, now); err != nil {
			return status.Error(codes.Unavailable, err.Error())
		}
		if is(now) {
			return nil
		}
		before := now.DeepCopy()
		if edit(now) {
			if err := s.kube.Patch(ctx, now, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})); err != nil {
				return status.Error(codes.Aborted, err.Error())
			}
		}
		s.letGo()
	}
}

// copied has the volume written to, and all of it on its new home. The controller, which would say that it has moved, stands still.
func (s *scene) copied() {
	s.Helper()
	s.written()
	s.letGo = sync.OnceFunc(frozen(s.controller))
	s.Cleanup(s.letGo)
	s.move(newHome)
	s.moving("all of it is there", func(v *v1alpha1.Volume) bool { return v.Status.Move != nil && v.Status.Move.Copied != nil })
}

// inOnePlace makes sure that one node has the volume, and that its user is connected to no other.
func (s *scene) inOnePlace() {
	s.Helper()
	at := s.object().Spec.NodeName
	s.nothingLeft("on the other node", func() []string { return s.files(otherHome[at]) })
	if files := s.files(at); len(files) != 2 {
		s.Errorf("node %s has %v, not an image and a record", at, files)
	}
	want := 1
	if at == s.user {
		want = 0
	}
	s.eventually("its user is connected to its home alone", func() bool { return len(connections()) == want })
	s.goesOn(s.writer)
}
