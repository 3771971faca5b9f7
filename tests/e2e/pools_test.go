package e2e

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
)

func (p *parts) pool(node string) *v1alpha1.Pool {
	p.Helper()
	o := &v1alpha1.Pool{}
	check.OK(p, p.kube.Get(p.Context(), client.ObjectKey{Name: node + ".default"}, o))
	return o
}

// restart starts the agent of a node again; between says what happens meanwhile.
func (p *parts) restart(node string, between func()) {
	p.Helper()
	check.OK(p, p.agents[node].Stop())
	between()
	check.OK(p, p.agents[node].Start())
	p.ready(p.agents[node])
}

// refused: the call does not succeed, and does not say that there is nothing.
func (p *parts) refused(call func(context.Context) error) {
	p.Helper()
	ctx, cancel := context.WithTimeout(p.Context(), 3*time.Second)
	defer cancel()
	if code := status.Code(call(ctx)); code != codes.Unavailable && code != codes.DeadlineExceeded {
		p.Errorf("%s", code)
	}
}

// TestDiskMissing: the disk of a node's pool is not there when its agent starts. The empty directory
// in its place does not become a pool, also if the object of the pool was deleted, and what was on
// the disk is not deleted by saying so. When the disk comes, all goes on without a restart.
func TestDiskMissing(t *testing.T) {
	p := start(t)
	kept := p.made(request("kept", miB, "node-a"))
	p.eventually("the pool is known by its identity", func() bool { return p.pool("node-a").Spec.UUID != "" })
	id := p.pool("node-a").Spec.UUID
	place := p.dir + "/node-a/pool"
	for _, forgotten := range []bool{false, true} {
		deleted := p.made(request(fmt.Sprintf("deleted-%t", forgotten), miB, "node-a"))
		p.restart("node-a", func() {
			check.OK(t, os.Rename(place, place+".away"))
			check.OK(t, os.Mkdir(place, 0o700))
			if forgotten {
				check.OK(t, p.kube.Delete(t.Context(), p.pool("node-a")))
			}
		})
		p.eventually("it is reported", func() bool {
			o := &v1alpha1.Pool{}
			err := p.kube.Get(t.Context(), client.ObjectKey{Name: "node-a.default"}, o)
			c := meta.FindStatusCondition(o.Status.Conditions, v1alpha1.Healthy)
			return err == nil && c != nil && c.Reason == "PoolMissing" && o.Status.Available == 0
		})
		p.refused(remove(p.controller, deleted.GetVolumeId()))
		if entries, err := os.ReadDir(place); err != nil || len(entries) > 0 {
			t.Fatalf("made in the place of the disk: %v, %v", entries, err)
		}
		check.OK(t, os.Remove(place))
		check.OK(t, os.Rename(place+".away", place))
		p.eventually("it is back", func() bool {
			return meta.IsStatusConditionTrue(p.pool("node-a").Status.Conditions, v1alpha1.Healthy)
		})
		if have := p.pool("node-a").Spec.UUID; have != id {
			t.Errorf("it has the identity %s, and had %s", have, id)
		}
		p.called(codes.OK, remove(p.controller, deleted.GetVolumeId())) // which was asked for meanwhile
	}
	p.called(codes.OK, publish(p.controller, kept.GetVolumeId(), "node-a", writer))

	// Another disk, on purpose.
	p.restart("node-a", func() { check.OK(t, os.Rename(place, place+".old")) })
	p.eventually("it is missed", func() bool {
		c := meta.FindStatusCondition(p.pool("node-a").Status.Conditions, v1alpha1.Healthy)
		return c != nil && c.Reason == "PoolMissing" && strings.Contains(c.Message, id)
	})
	o := p.pool("node-a")
	before := o.DeepCopy()
	o.Spec.UUID = v1alpha1.NewPool
	check.OK(t, p.kube.Patch(t.Context(), o, client.MergeFrom(before)))
	p.eventually("the new one is taken", func() bool { o := p.pool("node-a"); return o.Spec.UUID != v1alpha1.NewPool && o.Spec.UUID != id })
	p.eventually("the loss is reported", func() bool {
		var volumes v1alpha1.VolumeList
		check.OK(t, p.kube.List(t.Context(), &volumes))
		return len(volumes.Items) == 1 && volumes.Items[0].Status.Is(v1alpha1.Ready, "False")
	})
}

// TestFirstStartAlone: without an API server nobody knows whether there was a pool, so none is made.
func TestFirstStartAlone(t *testing.T) {
	p := start(t)
	thaw := apitest.Get(t).Freeze(t)
	place := p.dir + "/node-c/pool"
	check.OK(t, os.MkdirAll(place, 0o700))
	agent := p.part("node-c", "--mode=node", "--node-id=node-c", "--pool=default=file://"+place+"?reservePercent=0") // however full the disk is
	if entries, err := os.ReadDir(place); err != nil || len(entries) > 0 {
		t.Fatalf("made without an API server: %v, %v", entries, err)
	}
	thaw()
	p.node("node-c", true)
	p.eventually("the pool is made", func() bool {
		o := &v1alpha1.Pool{}
		return p.kube.Get(t.Context(), client.ObjectKey{Name: "node-c.default"}, o) == nil && o.Spec.UUID != "" && o.Status.Total > 0
	})
	check.OK(t, agent.Stop())
}
