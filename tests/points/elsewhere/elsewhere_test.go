// Package elsewhere kills the agents of two nodes while a copy is made from one to the other: each at each of its state-changing system
// calls, and both at once. All are processes, on one API server.
package elsewhere

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/process"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/store"
	"github.com/ashlar-csi/ashlar/pkg/volume"
	"github.com/ashlar-csi/ashlar/tests/points/trace"
)

func TestMain(m *testing.M) { apitest.Main(m) }

const (
	mib     = 1 << 20
	size    = 64 * mib
	sampled = 2 // points of each agent for each kind of copy, unless POINTS=all
	patient = 2 * time.Minute
)

// contents are what the source holds: more than one piece, with holes between them.
var contents = []drivertest.Content{{Seed: "first", Size: 5 * mib}, {Seed: "odd", Offset: 20*mib + 4096, Size: 2*mib + 4096}, {Seed: "last", Offset: size - mib, Size: mib}}

// node is one whose agent is a process.
type node struct {
	*process.Driver
	name, pool string
}

// cluster of two nodes, and a controller.
type two struct {
	testing.TB
	ctx    context.Context
	api    client.Client
	store  *store.Store
	source *node
	target *node
}

func (w *two) eventually(what string, is func() bool) {
	w.Helper()
	for end := time.Now().Add(patient); !is(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			w.Fatalf("never: %s\n--- %s\n--- %s", what, w.source.Log(), w.target.Log())
		}
	}
}

// newTwo is such a cluster; options are more flags of its agents.
func newTwo(t testing.TB, options ...string) *two {
	t.Helper()
	drivertest.NeedRoot(t)
	var st unix.Statfs_t
	if unix.Statfs("/dev/shm", &st) == nil && int64(st.Bavail)*st.Bsize > 2<<30 {
		t.Setenv("TMPDIR", "/dev/shm") // what a crash of a process leaves does not depend on disks
	}
	dir := drivertest.Dir(t)
	program, err := process.Build(dir)
	check.OK(t, err)
	server, scheme := apitest.Get(t), runtime.NewScheme()
	check.OK(t, errors.Join(v1alpha1.AddToScheme(scheme), corev1.AddToScheme(scheme)))
	w := &two{TB: t, ctx: klog.NewContext(t.Context(), klog.Background())}
	w.api, err = client.New(server.Config(apitest.Admin), client.Options{Scheme: scheme})
	check.OK(t, err)
	t.Cleanup(func() { check.OK(t, w.api.DeleteAllOf(context.Background(), &v1alpha1.Pool{})) }) // the next ones are of new disks
	w.source, w.target = w.node(dir, program, "a", "xfs", options), w.node(dir, program, "b", "ext4", options)
	w.store, err = store.New(server.Config(apitest.Admin), store.Options{GoneGrace: time.Hour, AbandonGrace: time.Hour, Driver: cluster.DefaultDriver})
	check.OK(t, err)
	running, stop := context.WithCancel(w.ctx)
	ended := make(chan error, 1)
	go func() { ended <- w.store.Run(running) }()
	t.Cleanup(func() { stop(); check.OK(t, <-ended) })
	w.eventually("the controller knows both nodes", func() bool {
		for _, n := range []*node{w.source, w.target} {
			if c, err := w.store.Capacity(w.ctx, "", volume.NotEncrypted, n.name); err != nil || c.Total == 0 {
				return false
			}
		}
		return true
	})
	return w
}

// node makes a node with a pool on a filesystem of its own, and starts its agent.
func (w *two) node(dir, program, name, fs string, options []string) *node {
	w.Helper()
	n := &corev1.Node{}
	n.Name = name
	check.OK(w, client.IgnoreAlreadyExists(w.api.Create(w.ctx, n)))
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	check.OK(w, w.api.Status().Update(w.ctx, n))
	mounted := filepath.Join(dir, name)
	drivertest.MountNew(w, fs, mounted, 3<<30)
	made := &node{name: name, pool: filepath.Join(mounted, "pool")}
	kubeconfig := filepath.Join(dir, name+".kubeconfig")
	check.OK(w, apitest.Get(w).KubeconfigIn(apitest.Get(w).Agent(w, name), apitest.Namespace, kubeconfig))
	var err error
	made.Driver, err = process.New(filepath.Join(dir, "of-"+name), name, append([]string{program, "serve", "--mode=node", "--kubeconfig=" + kubeconfig,
		"--agent-endpoint=127.0.0.1:0", "--pool=default=file://" + made.pool + "?create=1&reservePercent=0", "-v=4"}, options...)...)
	check.OK(w, err)
	w.Cleanup(made.Close)
	check.OK(w, made.Start())
	return made
}

func (n *node) image(kind string, key string) string {
	return filepath.Join(n.pool, kind, key+".img")
}

// left are the files of the volumes and snapshots that a pool has.
func (n *node) left() (all []string) {
	for _, kind := range []string{"volumes", "snapshots", "marks"} {
		entries, _ := os.ReadDir(filepath.Join(n.pool, kind)) // there may be none yet
		for _, e := range entries {
			all = append(all, filepath.Join(n.name, kind, e.Name()))
		}
	}
	return all
}

// kill is who dies, and when.
type kill struct {
	of   blockdev.Kind // the source
	who  *node
	both bool // the other agent dies at that moment too
	at   int  // its state-changing system call, from 1 on
}

func (k kill) String() string {
	text := fmt.Sprintf("%s, agent of %s at %d", k.of, k.who.name, k.at)
	if k.both {
		text += ", and the other"
	}
	return text
}

// whole makes sure of a copy that says it is there: it has all bytes, and nothing else.
func (w *two) whole(key string) {
	w.Helper()
	have, err := os.ReadFile(w.target.image("volumes", key))
	check.OK(w, err)
	want := make([]byte, size)
	for _, c := range contents {
		copy(want[c.Offset:], c.Bytes())
	}
	if len(have) != size || !bytes.Equal(have, want) {
		w.Errorf("the copy has other bytes, %d of %d", len(have), size)
	}
}

// happen makes a copy, in the middle of which somebody dies, and sees it through. It returns how many points there were until then.
func (w *two) happen(k kill, source volume.ID) (points int, reached bool) {
	w.Helper()
	spec := volume.Spec{Name: k.String(), Source: source, Copies: volume.CopiesAnywhere, Nodes: []string{w.target.name}, Size: volume.Range{Required: size}}
	key := volume.KeyOf(spec.Name)
	tracer, err := trace.Attach(k.who.Pid(), func(n int, _ trace.Call) trace.Verdict { return trace.Verdict{Kill: n == k.at, All: true} })
	check.OK(w, err)
	made := make(chan error, 1)
	ctx, cancel := context.WithCancel(w.ctx)
	go func() {
		_, err := w.store.Create(ctx, spec)
		made <- err
	}()
	select {
	case <-tracer.Dead():
	case err = <-made:
		check.OK(w, err)
		made <- nil
	}
	result, err := tracer.Detach()
	check.OK(w, err)
	other := w.source
	if k.who == w.source {
		other = w.target
	}
	if result.Killed {
		if k.both {
			other.Kill()
		}
		w.Logf("killed before %s", result.Calls[len(result.Calls)-1])
		v := &v1alpha1.Volume{}
		if err := w.api.Get(w.ctx, client.ObjectKey{Name: key}, v); err == nil && v.Status.Created != nil {
			w.whole(key) // it is there for everybody
		}
		check.OK(w, k.who.Start())
		if k.both {
			check.OK(w, other.Start())
		}
	}
	cancel()
	<-made
	var copied volume.Volume
	w.eventually("the copy is made", func() bool {
		ctx, cancel := context.WithTimeout(w.ctx, 10*time.Second)
		defer cancel()
		copied, err = w.store.Create(ctx, spec)
		return err == nil
	})
	w.whole(key)
	w.eventually("the copy is gone", func() bool { return w.store.Delete(w.ctx, copied.ID) == nil })
	return len(result.Calls), result.Killed
}

// TestElsewhere: whichever agent dies at whichever point, the copy is made in the end, is nobody's before it is whole, and leaves nothing.
func TestElsewhere(t *testing.T) {
	w := newTwo(t)
	v, err := w.store.Create(w.ctx, volume.Spec{Name: "source", Provisioning: blockdev.Thin, Nodes: []string{w.source.name}, Size: volume.Range{Required: size}})
	check.OK(t, err)
	for _, c := range contents {
		check.OK(t, c.Write(w.source.image("volumes", v.ID.Key)))
	}
	snapshot, err := w.store.CreateSnapshot(w.ctx, "snapshot", v.ID)
	check.OK(t, err)
	full := os.Getenv("POINTS") == "all"
	for _, source := range []volume.ID{snapshot.ID, v.ID} {
		for _, who := range []*node{w.source, w.target} {
			begin, kills := time.Now(), 0
			points, _ := w.happen(kill{of: source.Kind, who: who}, source) // nobody
			try := func(at int) (reached bool) {
				k := kill{source.Kind, who, at%3 == 0, at}
				t.Run(k.String(), func(t *testing.T) {
					in := *w
					in.TB = t
					_, reached = in.happen(k, source)
				})
				if reached {
					kills++
				}
				return reached && !t.Failed()
			}
			if full {
				at := 1
				for try(at) {
					at++
				}
			} else {
				for range sampled {
					try(1 + rand.IntN(points))
				}
			}
			fmt.Printf("points: copy of a %s on another node, agent of %s: %3d points, %3d crashes, %5.1f s\n", source.Kind, map[bool]string{true: "its source", false: "the copy"}[who == w.source], points, kills, time.Since(begin).Seconds())
		}
	}
	w.eventually("the source is gone", func() bool { // whom the agents that died gave it to may have it for a moment
		return errors.Join(w.store.DeleteSnapshot(w.ctx, snapshot.ID), w.store.Delete(w.ctx, v.ID)) == nil
	})
	w.eventually("nothing is left", func() bool { return len(w.source.left())+len(w.target.left()) == 0 })
	check.OK(t, errors.Join(w.source.Stop(), w.target.Stop()))
}
