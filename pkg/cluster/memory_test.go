package cluster_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"runtime"
	"runtime/debug"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/store"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// BenchmarkMemory measures by how much the heap of a controller grows with each volume, and with each node with two pools. The objects come from a server
// that answers as an API server does. They are copies of those of a real one: of a volume that was made for a claim and is in use.
func BenchmarkMemory(b *testing.B) {
	like := sample(b)
	for _, volumes := range []int{10000, 100000} {
		b.Run(fmt.Sprintf("volumes=%d", volumes), func(b *testing.B) {
			for b.Loop() {
				none := like.heap(b, 0, 0)
				nodes := like.heap(b, 500, 0)
				all := like.heap(b, 500, volumes)
				b.ReportMetric(float64(all-nodes)/float64(volumes), "B/volume")
				b.ReportMetric(float64(nodes-none)/500, "B/node")
			}
		})
	}
}

// objects has one object of each kind as JSON, as an API server gives it.
type objects struct{ volume, pool, node []byte }

// sampleUID is the UID in the sample that each copy replaces by its own.
const sampleUID = "9f1b2c3d-4e5f-4a6b-8c7d-0e9f8a7b6c5d"

// sample creates a volume in a cluster, claims it, and returns the objects.
func sample(b testing.TB) objects {
	w, m, s := newCluster(b)
	v, err := s.Create(w.ctx, volume.Spec{Name: cluster.ProvisionedPrefix + sampleUID, Size: volume.Range{Required: 64 * mib}, Filesystem: filesystem.Ext4, Nodes: []string{m.name},
		For: volume.Requester{Namespace: "the-namespace", Name: "data-database-0", PersistentVolume: cluster.ProvisionedPrefix + sampleUID}})
	check.OK(b, err)
	check.OK(b, second(s.Claim(w.ctx, v.ID, volume.Claim{Node: m.name, Mode: "mount/SINGLE_NODE_WRITER"})))
	node := &corev1.Node{}
	check.OK(b, w.Get(w.ctx, client.ObjectKey{Name: m.name}, node))
	for i := range 50 { // as many as the kubelet reports by default (nodeStatusMaxImages)
		image := fmt.Sprintf("registry.example.com/organization/image-%d", i)
		node.Status.Images = append(node.Status.Images, corev1.ContainerImage{Names: []string{image + "@sha256:" + strings.Repeat("0", 64), image + ":v1.2.3"}, SizeBytes: 1 << 26})
	}
	check.OK(b, w.Status().Update(w.ctx, node))
	kube, err := kubernetes.NewForConfig(apitest.Get(b).Config(apitest.Admin))
	check.OK(b, err)
	get := func(path string) []byte {
		raw, err := kube.RESTClient().Get().AbsPath(path).DoRaw(w.ctx)
		check.OK(b, err)
		return raw
	}
	w.eventually("the volume is looked at", func() bool {
		var o v1alpha1.Volume
		return w.Get(w.ctx, client.ObjectKey{Name: v.ID.Key}, &o) == nil && o.Status.Used != nil
	})
	var o metav1.PartialObjectMetadata
	raw := get("/apis/ashlar.dev/v1alpha1/volumes/" + v.ID.Key)
	check.OK(b, json.Unmarshal(raw, &o))
	raw = bytes.ReplaceAll(raw, []byte(o.Name), []byte("NAME"))
	raw = bytes.ReplaceAll(raw, []byte(o.UID), []byte("UID"))
	raw = bytes.ReplaceAll(raw, []byte(sampleUID), []byte("CLAIM"))
	b.Logf("a volume: %s", raw)
	return objects{volume: raw, pool: get("/apis/ashlar.dev/v1alpha1/pools/" + overview.PoolName(m.name, "b")), node: get("/api/v1/nodes/" + m.name)}
}

// heap returns the bytes on the heap of a controller of a cluster with some nodes, two pools on each, and some volumes.
func (o objects) heap(b *testing.B, nodes, volumes int) uint64 {
	s, stop := o.controller(b, nodes, volumes)
	defer stop()
	used := settled()
	runtime.KeepAlive(s)
	return used
}

// controller starts a controller of a cluster with some nodes, two pools on each, and some volumes; it runs until stop.
func (o objects) controller(t testing.TB, nodes, volumes int) (s *store.Store, stop func()) {
	server := httptest.NewServer(o.serve(nodes, volumes))
	s, err := store.New(&rest.Config{Host: server.URL}, store.Options{AbandonGrace: time.Second, GoneGrace: time.Hour, Driver: cluster.DefaultDriver})
	check.OK(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	for s.Ready(ctx) != nil {
		time.Sleep(50 * time.Millisecond)
	}
	return s, func() {
		cancel()
		if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		server.Close()
	}
}

// TestAllInLittle: metrics, and lists of volumes in pages, have the controller go through all volumes again and again. That does not need memory for all
// of them, unpacked, at once.
func TestAllInLittle(t *testing.T) {
	const volumes, limit = 10000, 1000
	s, stop := sample(t).controller(t, 10, volumes)
	defer stop()
	settled()
	defer debug.SetGCPercent(debug.SetGCPercent(10)) // so that garbage counts little
	for what, do := range map[string]func(){
		"the metrics": func() {
			if len(s.Samples()) == 0 {
				t.Error("there are no metrics")
			}
		},
		"a page of volumes": func() {
			if list, err := s.List(t.Context(), volume.ID{}, 100); err != nil || len(list) != 100 {
				t.Errorf("%d volumes, %v", len(list), err)
			}
		},
	} {
		if used := most(do); used > volumes*limit {
			t.Errorf("%s: %d bytes for each volume, want no more than %d", what, used/volumes, limit)
		}
	}
}

// most returns by how many bytes the heap grows at most while do runs.
func most(do func()) (used uint64) {
	heap := func() uint64 {
		var is runtime.MemStats
		runtime.ReadMemStats(&is)
		return is.HeapAlloc
	}
	runtime.GC()
	before, done, looked := heap(), make(chan bool), make(chan bool)
	go func() {
		defer close(looked)
		for {
			used = max(used, max(heap(), before)-before)
			select {
			case <-done:
				return
			case <-time.After(time.Millisecond):
			}
		}
	}()
	do()
	close(done)
	<-looked
	return used
}

// settled waits until the heap does not change any more, and returns its bytes.
func settled() uint64 {
	var is runtime.MemStats
	for was := uint64(0); ; was = is.HeapAlloc {
		time.Sleep(time.Second) // so that event handlers run
		runtime.GC()
		runtime.GC() // a sync.Pool keeps its content for one more cycle
		if runtime.ReadMemStats(&is); is.HeapAlloc < was+was/100 && was < is.HeapAlloc+was/100 {
			return is.HeapAlloc
		}
	}
}

// serve stands for the API server: it answers lists and watches. It makes each object when it is sent, so that it needs no memory for them.
func (o objects) serve(nodes, volumes int) http.Handler {
	none := func(int) []byte { return nil }
	kinds := map[string]struct {
		kind, version string
		n             int
		at            func(int) []byte
	}{
		"/apis/ashlar.dev/v1alpha1/volumes": {"Volume", "ashlar.dev/v1alpha1", volumes, func(i int) []byte {
			return replaced(o.volume, "NAME", fmt.Sprintf("%032x", i), "UID", uid(i), "CLAIM", uid(i+1e8), nodeName, fmt.Sprintf("node-%d", i%nodes), "database-0", fmt.Sprintf("database-%d", i))
		}},
		"/apis/ashlar.dev/v1alpha1/pools": {"Pool", "ashlar.dev/v1alpha1", 2 * nodes, func(i int) []byte {
			return replaced(o.pool, `.b"`, fmt.Sprintf(`.%c"`, 'a'+i%2), `"b"`, fmt.Sprintf(`"%c"`, 'a'+i%2), nodeName, fmt.Sprintf("node-%d", i/2))
		}},
		"/api/v1/nodes":                               {"Node", "v1", nodes, func(i int) []byte { return replaced(o.node, nodeName, fmt.Sprintf("node-%d", i)) }},
		"/apis/ashlar.dev/v1alpha1/snapshots":         {"Snapshot", "ashlar.dev/v1alpha1", 0, none},
		"/apis/ashlar.dev/v1alpha1/replicatedvolumes": {"ReplicatedVolume", "ashlar.dev/v1alpha1", 0, none},
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		kind, known := kinds[r.URL.Path]
		w.Header().Set("Content-Type", "application/json")
		say := func(format string, args ...any) { _, _ = fmt.Fprintf(w, format+"\n", args...) } // the client may be gone
		if !known {                                                                             // kinds that are only listed
			say(`{"kind":"List","apiVersion":"v1","metadata":{"resourceVersion":"1"},"items":[]}`)
			return
		}
		if r.URL.Query().Get("sendInitialEvents") == "true" {
			for i := range kind.n {
				say(`{"type":"ADDED","object":%s}`, bytes.TrimSpace(kind.at(i)))
			}
			say(`{"type":"BOOKMARK","object":{"kind":%q,"apiVersion":%q,"metadata":{"resourceVersion":"100","annotations":{%q:"true"}}}}`, kind.kind, kind.version, metav1.InitialEventsAnnotationKey)
			w.(http.Flusher).Flush()
		}
		<-r.Context().Done()
	})
}

func replaced(in []byte, oldnew ...string) []byte {
	return []byte(strings.NewReplacer(oldnew...).Replace(string(in)))
}

func uid(i int) string { return fmt.Sprintf("%08x-4e5f-4a6b-8c7d-0e9f8a7b6c5d", i) }
