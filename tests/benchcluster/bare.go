package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/tests/figures"
)

// bare makes the writes of a volume's life alone, as the controller and the agent do, one after the other: nobody watches, decides or waits for another. It is the floor
// of a driver that keeps its volumes in objects.
type bare struct {
	client client.Client
	like   v1alpha1.Volume // one that the driver made
	keys   []client.ObjectKey
}

func (w *environment) bare(ctx context.Context, n int) (*bare, error) {
	config := w.server.Config(apitest.Admin)
	config.UserAgent, config.QPS = "bench", -1
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return nil, err
	}
	c, err := client.New(config, client.Options{Scheme: scheme})
	if err != nil {
		return nil, err
	}
	var some v1alpha1.VolumeList
	if err := c.List(ctx, &some, client.Limit(1)); err != nil {
		return nil, err
	}
	if len(some.Items) == 0 {
		return nil, errors.New("the driver has left no volume")
	}
	return &bare{c, some.Items[0], make([]client.ObjectKey, n)}, nil
}

// locking is how both parts write.
func locking(before client.Object) client.Patch {
	return client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})
}

func (b *bare) create(ctx context.Context, i int) error {
	v := &v1alpha1.Volume{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%032x", i), Labels: b.like.Labels}, Spec: *b.like.Spec.DeepCopy()}
	v.Spec.Name, v.Spec.Claim, v.Spec.Make = fmt.Sprintf("bare-%032d", i), nil, true
	if err := b.client.Create(ctx, v); err != nil {
		return err
	}
	before := v.DeepCopy()
	v.Spec.Make = false
	if err := b.client.Patch(ctx, v, locking(before)); err != nil {
		return err
	}
	before = v.DeepCopy()
	v.Status = *b.like.Status.DeepCopy()
	b.keys[i] = client.ObjectKeyFromObject(v)
	return b.client.Status().Patch(ctx, v, locking(before))
}

func (b *bare) delete(ctx context.Context, i int) error {
	v := &v1alpha1.Volume{}
	if err := b.client.Get(ctx, b.keys[i], v); err != nil { // the controller has it from its watch
		return err
	}
	before := v.DeepCopy()
	v.Spec.Delete = v.UID
	if err := b.client.Patch(ctx, v, locking(before)); err != nil {
		return err
	}
	return b.client.Delete(ctx, v)
}

// measureBare measures the writes alone. The driver and the agents have ended.
func (w *environment) measureBare(ctx context.Context, n int) error {
	b, err := w.bare(ctx, n)
	if err != nil {
		return err
	}
	var rows [][]string
	for _, s := range []step{{"CreateVolume: 3 writes", n, b.create}, {"DeleteVolume: 2 writes, and a read", n, b.delete}} {
		began := time.Now()
		if err := each(ctx, s.times, 32, s.do); err != nil {
			return fmt.Errorf("%s: %w", s.what, err)
		}
		rows = append(rows, []string{s.what, fmt.Sprintf("%.0f", float64(n)/time.Since(began).Seconds())})
	}
	fmt.Print("\nThe same writes alone, 32 at a time, by one client, and nobody watches:\n")
	figures.Table([]string{"of", "per second"}, rows)
	return nil
}
