package anynode

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
)

// becoming are those of a volume that is written to meanwhile, and becomes one with two replicas.
var becoming = func() (all []act) {
	who := map[string]string{third: "another node", home: "its home"}
	for _, a := range []act{{user: third, kind: co.Block}, {user: third, kind: "ext4", encrypted: true}, {user: home, kind: "ext4"}, {user: home, kind: co.Block, encrypted: true}} {
		for _, a.harmed = range []string{third, home} {
			if a.harmed == third && a.user != third {
				continue // it has no part in it
			}
			a.name = fmt.Sprintf("becomes replicated, %s, encrypted %v, used by %s, harmed %s", a.kind, a.encrypted, who[a.user], who[a.harmed])
			a.used, a.stays, a.before, a.call = true, true, (*scene).written, (*scene).becomes
			all = append(all, a)
		}
	}
	return all
}()

// becomes has the volume get two replicas, and waits until both are current.
func (s *scene) becomes(ctx context.Context) error {
	for ; ; time.Sleep(50 * time.Millisecond) {
		v, r, key := &v1alpha1.Volume{}, &v1alpha1.ReplicatedVolume{}, client.ObjectKey{Name: s.key()}
		if err := s.kube.Get(ctx, key, v); err != nil {
			return status.Error(codes.Unavailable, err.Error())
		}
		if err := s.kube.Get(ctx, key, r); client.IgnoreNotFound(err) != nil {
			return status.Error(codes.Unavailable, err.Error())
		} else if err == nil && len(r.Current()) == 2 {
			return nil
		}
		if v.Spec.ReplicaOf != "" || v.Spec.Replicas == 2 {
			continue
		}
		v.Spec.Replicas = 2
		if err := s.kube.Update(ctx, v); err != nil {
			return status.Error(codes.Aborted, err.Error())
		}
	}
}
