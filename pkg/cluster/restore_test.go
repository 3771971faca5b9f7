package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// known waits until a new API server accepts the accounts of controller and agent: for a moment it knows none.
func (w *environment) known() {
	w.Helper()
	server := apitest.Get(w)
	for part, config := range map[string]*rest.Config{"controller": server.Config("controller"), "agent": server.Agent(w, nodeName)} {
		c, err := client.New(config, client.Options{Scheme: w.Scheme()})
		check.OK(w, err)
		w.eventually(part+" is known", func() bool { return c.List(w.ctx, &v1alpha1.VolumeList{}) == nil })
	}
}

// revision returns the resourceVersion that the API server has reached.
func (w *environment) revision() int {
	w.Helper()
	var list v1alpha1.VolumeList
	check.OK(w, w.List(w.ctx, &list))
	var n int
	check.OK(w, second(fmt.Sscan(list.ResourceVersion, &n)))
	return n
}

// busy writes until the API server has reached a revision.
func (w *environment) busy(revision int) {
	w.Helper()
	m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", GenerateName: "busy-"}}
	check.OK(w, w.Create(w.ctx, m))
	for i := 0; w.revision() < revision; i++ {
		m.Data = map[string]string{"i": fmt.Sprint(i)}
		check.OK(w, w.Update(w.ctx, m))
	}
	check.OK(w, w.Delete(w.ctx, m))
}

// again repeats a call until it succeeds, each time with a time limit, as sidecars have.
func (w *environment) again(what string, call func(context.Context) error) {
	w.Helper()
	w.eventually(what, func() bool {
		ctx, cancel := context.WithTimeout(w.ctx, 5*time.Second)
		defer cancel()
		return call(ctx) == nil
	})
}

// TestRolledBackAndBusy: etcd is restored to when there was a volume that the agent has deleted since, and others write until its revision is later than
// before. The agent does not wait for the volume to be gone.
func TestRolledBackAndBusy(t *testing.T) {
	l := &line{}
	wrap(t, func(c *rest.Config) { c.Dial = l.dial })
	w, m, s := newCluster(t)
	v, err := s.Create(w.ctx, spec("v"))
	check.OK(t, err)
	check.OK(t, m.local.SetFormat(w.ctx, v.ID, formatted))
	rollback := apitest.Get(t).Backup(t)
	w.again("it is deleted", func(ctx context.Context) error { return s.Delete(ctx, v.ID) })
	before := w.revision()
	l.set(true)
	rollback()
	w.known()
	w.busy(before + 100)
	l.set(false)
	w.again("the loss is reported", func(ctx context.Context) error {
		problems, err := s.Health(ctx, v.ID)
		if err == nil && (len(problems) != 1 || problems[0].Severity != blockdev.DataLoss) {
			err = fmt.Errorf("%+v", problems)
		}
		return err
	})
	w.again("it is deleted again", func(ctx context.Context) error { return s.Delete(ctx, v.ID) })
	w.again("it is made anew", func(ctx context.Context) error { return second(s.Create(ctx, spec("v"))) })
	w.tally(m)
}

// TestRolledBackUnnoticed: etcd is restored, and no connection is refused. A watch that went on from the last version that it saw would miss changes.
func TestRolledBackUnnoticed(t *testing.T) {
	l := &line{waits: true}
	wrap(t, func(c *rest.Config) { c.Dial = l.dial })
	w, _, s := newCluster(t)
	rollback := apitest.Get(t).Backup(t)
	var late volume.Volume
	w.again("the store is back", func(ctx context.Context) (err error) {
		late, err = s.Create(ctx, spec("late"))
		return err
	})
	w.busy(w.revision() + 500)
	check.OK(t, second(s.Create(w.ctx, spec("last"))))
	l.set(true)
	rollback()
	w.known()
	l.set(false)
	w.strays("default", 2)
	w.again("a volume is made", func(ctx context.Context) error { return second(s.Create(ctx, spec("new"))) })
	w.again("one without an object is not there", func(ctx context.Context) error {
		if err := second(s.Get(ctx, late.ID)); !errors.Is(err, errdefs.ErrNotFound) {
			return errors.Join(errors.New("it is there"), err)
		}
		return nil
	})
}

// TestRestoredWhileItBecomes: a volume is about to have replicas, and its record does not say yet that it is a leg, when its object is deleted and restored
// without its status. The volume is found, and gets its replicas.
func TestRestoredWhileItBecomes(t *testing.T) {
	var refused atomic.Int32
	wrap(t, func(c *rest.Config) {
		c.Wrap(func(next http.RoundTripper) http.RoundTripper {
			return roundTrip(func(q *http.Request) (*http.Response, error) {
				answer, err := next.RoundTrip(q)
				if err == nil && q.Method == http.MethodPost && strings.HasSuffix(q.URL.Path, "/replicatedvolumes") && answer.StatusCode == http.StatusUnprocessableEntity {
					refused.Add(1)
				}
				return answer, err
			})
		})
	})
	w, all, s := legCluster(t, 2)
	v, err := s.Create(w.ctx, anyNode("v", "node-1"))
	check.OK(t, err)
	all["node-1"].stop()
	check.OK(t, w.ask("v", 2))
	w.eventually("it is about to have replicas", func() bool { return w.object("v").Spec.ReplicaOf != "" })
	w.eventually("the store knows that", func() bool { return errors.Is(second(s.Get(w.ctx, v.ID)), errdefs.ErrUnavailable) })
	check.OK(t, second(s.Health(w.ctx, v.ID))) // of all volumes, it does not keep the list of those that are not well from being told
	backup := w.objects()
	check.OK(t, w.Delete(w.ctx, w.object("v")))
	w.gone()
	w.restored(backup)
	if have, err := all["node-1"].local.Get(w.ctx, v.ID); err != nil || have.ReplicaOf != "" {
		t.Fatalf("the record is %+v, %v", have, err)
	}
	time.Sleep(time.Second) // so that the controller can do what is wrong
	if n := refused.Load(); n > 0 {
		t.Errorf("the controller has tried %d times to create what the API server refuses", n)
	}
	w.start(all["node-1"].machine)
	w.eventually("it is found, or refused", func() bool { o := w.object("v"); return o.Status.Created != nil || o.Status.Failure != nil })
	if f := w.object("v").Status.Failure; f != nil {
		t.Fatalf("refused: %+v", f)
	}
	w.eventually("it has replicas", func() bool { return w.became("v", 2) })
	check.OK(t, s.Delete(w.ctx, v.ID))
	for _, m := range all {
		w.tally(m.machine)
	}
}

// TestRestoredFromBeforeReplicas: objects are restored to before a volume got replicas. It is refused, and its objects are made anew from the records, as the
// documentation says.
func TestRestoredFromBeforeReplicas(t *testing.T) {
	w, all, s := legCluster(t, 2)
	v, err := s.Create(w.ctx, anyNode("v", "node-1"))
	check.OK(t, err)
	backup := w.objects()
	check.OK(t, w.ask("v", 2))
	w.eventually("it has replicas", func() bool { return w.became("v", 2) })
	check.OK(t, second(s.Claim(w.ctx, v.ID, on("node-1"))))
	check.OK(t, s.Release(w.ctx, v.ID, "node-1"))
	check.OK(t, w.Delete(w.ctx, w.whole("v")))
	for _, leg := range w.legsOf("v") {
		check.OK(t, w.Delete(w.ctx, leg))
	}
	w.gone()
	w.restored(backup)
	w.eventually("it is refused", func() bool { f := w.object("v").Status.Failure; return f != nil && f.Reason == "Exists" })
	check.OK(t, w.Delete(w.ctx, w.object("v")))
	for _, node := range []string{"node-1", "node-2"} {
		w.eventually("there is a stray", func() bool { return w.pool(node, "default").Status.StrayCount == 1 })
		w.adoptOn(node, "default", "all")
	}
	w.eventually("both are adopted", func() bool { return len(w.legsOf("v")) == 2 })
	r := cluster.ReplicatedNamed(v.ID.Key)
	r.Spec = v1alpha1.ReplicatedVolumeSpec{Name: "v", Pool: v.ID.Pool, Pools: v.ID.Pool, Replicas: 2, ReplaceAfter: 600, Size: v.Size, Numbered: 2, Claims: 1000000}
	var status string
	for i, leg := range w.legsOf("v") {
		r.Spec.Legs = append(r.Spec.Legs, leg.Name)
		status += fmt.Sprintf(`%s{"name":%q,"current":%v}`, strings.Repeat(",", min(i, 1)), leg.Name, leg.Name == v.ID.Key)
	}
	check.OK(t, w.Create(w.ctx, r))
	check.OK(t, w.Status().Patch(w.ctx, r, client.RawPatch(types.MergePatchType, []byte(`{"status":{"made":"2026-01-01T00:00:00.000000Z","legs":[`+status+`]}}`))))
	w.eventually("it can be claimed", func() bool { return second(s.Claim(w.ctx, v.ID, on("node-2"))) == nil })
	check.OK(t, s.Release(w.ctx, v.ID, "node-2"))
	w.again("it is deleted", func(ctx context.Context) error { return s.Delete(ctx, v.ID) })
	for _, m := range all {
		w.tally(m.machine)
	}
}

// TestRestoredLegDiffers: an object is restored without its status, and does not say of its volume what the record does: whether that is a leg, and of which
// volume. It is refused, also if it is of before the volume became a leg, as the other legs may have what this one lacks. The bytes stay.
func TestRestoredLegDiffers(t *testing.T) {
	w := newEnvironment(t)
	m, _ := w.networked(nodeName, "storage")
	s := w.knowing(m)
	for what, c := range map[string]struct {
		record, object string
		asked          int // spec.replicas of the object
		right          bool
	}{
		"record from before it was a leg":       {record: "", object: "v"},
		"leg of another volume":                 {record: "other", object: "v", asked: 2},
		"to be leg of another volume":           {record: "", object: "other", asked: 2},
		"object from before it was a leg":       {record: "v", object: ""},
		"object from before, when it was asked": {record: "v", object: "", asked: 2},
		"leg":                                   {record: "v", object: "v", right: true},
	} {
		v, err := s.Create(w.ctx, anyNode("v", nodeName))
		check.OK(t, err)
		backup := w.objects()
		check.OK(t, w.Delete(w.ctx, w.object("v")))
		w.gone()
		keys := map[string]string{"": "", "v": v.ID.Key, "other": volume.KeyOf("other")}
		check.OK(t, m.local.SetReplicaOf(w.ctx, v.ID, keys[c.record]))
		before, err := m.local.Get(w.ctx, v.ID)
		check.OK(t, err)
		o := backup[0].(*v1alpha1.Volume)
		o.Spec.ReplicaOf, o.Spec.Replicas = keys[c.object], c.asked
		w.restored(backup)
		w.eventually("it is found, or refused", func() bool { o := w.object("v"); return o.Status.Created != nil || o.Status.Failure != nil })
		o = w.object("v")
		if f := o.Status.Failure; c.right && f != nil || !c.right && (f == nil || f.Reason != "Exists") {
			t.Errorf("%s: failure %+v", what, f)
		}
		if have, err := m.local.Get(w.ctx, v.ID); err != nil || have.ReplicaOf != keys[c.record] || !have.Created.Equal(before.Created) {
			t.Errorf("%s: there is %+v, %v", what, have, err)
		}
		check.OK(t, w.Delete(w.ctx, o))
		w.gone()
		check.OK(t, m.local.Delete(w.ctx, v.ID))
	}
	w.tally(m)
}
