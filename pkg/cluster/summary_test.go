package cluster_test

import (
	"crypto/rand"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/internal/progress"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/agent"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// TestBytes: sizes are rounded to three digits, with a binary unit.
func TestBytes(t *testing.T) {
	for n, want := range map[int64]string{0: "0", 512: "512", 1023: "1023", 1024: "1Ki", 4096: "4Ki", 10 << 30: "10Gi", 3 << 29: "1.5Gi", 1<<30 - 1: "1Gi",
		1023 << 20: "1023Mi", 53579716198: "49.9Gi", 1234567: "1.18Mi", 123456789: "118Mi", 16<<40 - 4096: "16Ti", 1<<63 - 1: "8Ei", 100 << 30: "100Gi"} {
		if have := cluster.Bytes(n); have != want {
			t.Errorf("%d bytes are %s, want %s", n, have, want)
		}
	}
}

// table returns what kubectl get prints of objects: rows of cells by the names of their columns; with wide also those of -o wide.
func (w *environment) table(resource string, wide bool) []map[string]string {
	w.Helper()
	config := apitest.Get(w).Config(apitest.Admin)
	scheme := runtime.NewScheme()
	metav1.AddToGroupVersion(scheme, v1alpha1.GroupVersion)
	check.OK(w, metav1.AddMetaToScheme(scheme))
	config.GroupVersion, config.APIPath = &schema.GroupVersion{Group: "ashlar.dev", Version: "v1alpha1"}, "/apis"
	config.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	c, err := rest.RESTClientFor(config)
	check.OK(w, err)
	var table metav1.Table
	check.OK(w, c.Get().Resource(resource).SetHeader("Accept", "application/json;as=Table;v=v1;g=meta.k8s.io").Do(w.ctx).Into(&table))
	var rows []map[string]string
	for _, row := range table.Rows {
		cells := map[string]string{}
		for i, column := range table.ColumnDefinitions {
			if cell := row.Cells[i]; cell != nil && (wide || column.Priority == 0) {
				cells[column.Name] = fmt.Sprint(cell)
			}
		}
		rows = append(rows, cells)
	}
	return rows
}

// row waits until the table of a resource has a row with these cells.
func (w *environment) row(resource string, want map[string]string) {
	w.Helper()
	var rows []map[string]string
	defer func() { w.Log(resource, rows) }()
	w.eventually(fmt.Sprint(resource, " show ", want), func() bool {
		rows = w.table(resource, true)
		return slices.ContainsFunc(rows, func(cells map[string]string) bool {
			for column, cell := range want {
				if cells[column] != cell {
					return false
				}
			}
			return true
		})
	})
}

// TestColumns: what kubectl get shows of objects, by the API server's own table, from when a volume is made until its snapshot is lost.
func TestColumns(t *testing.T) {
	w := newEnvironment(t)
	m := w.machine(nodeName)
	s, _ := w.store()
	w.pooled(s, m)
	one := spec("v")
	one.Size, one.For = volume.Range{Required: 3 * mib / 2}, volume.Requester{Namespace: "shop", Name: "data", PersistentVolume: "v"}
	v, err := s.Create(w.ctx, one)
	check.OK(t, err)
	second, err := s.CreateSnapshot(w.ctx, "s", v.ID)
	check.OK(t, err)
	for _, resource := range []string{"volumes", "snapshots", "pools"} {
		for _, cells := range w.table(resource, false) {
			for column, cell := range cells {
				if len(cell) > 20 && column != "Name" || cell == "<unknown>" {
					t.Errorf("%s: column %s is %q", resource, column, cell)
				}
			}
		}
	}
	well := map[string]string{"Node": nodeName, "Pool": "default", "Claim": "shop/data", "Size": "1.5Mi", "State": "Ready", "Health": "Healthy"}
	w.row("volumes", well)
	w.row("volumes", map[string]string{"Used": "0", "Volume": "v", "Problem": "NoProblems"})
	w.row("snapshots", well)
	w.row("pools", map[string]string{"Node": nodeName, "Pool": "default", "Kind": "memory", "Total": cluster.Bytes(m.capacity(t).Total), "Promised": "3Mi",
		"Available": cluster.Bytes(m.capacity(t).Available), "Used": "0", "Health": "Healthy", "Default": "true", "Accounted": "True"})

	_, err = s.Claim(w.ctx, v.ID, volume.Claim{Node: nodeName, Mode: "m"})
	check.OK(t, err)
	w.row("volumes", map[string]string{"Published": nodeName})
	m.disks[0].Ail(blockdev.Ref{Kind: blockdev.Volume, Key: v.ID.Key}, blockdev.Problem{Severity: blockdev.Degraded, Reason: "FilesystemErrors", Message: "errors"},
		blockdev.Problem{Severity: blockdev.Inaccessible, Reason: "FilesystemReadOnly", Message: "read-only"})
	w.touch(w.object("v"))
	w.row("volumes", map[string]string{"State": "Ready", "Health": "Inaccessible", "Problem": "FilesystemReadOnly"})
	check.OK(t, m.disks[0].Open("default", nil).Delete(w.ctx, blockdev.Ref{Kind: blockdev.Snapshot, Key: second.ID.Key}))
	w.touch(&v1alpha1.Snapshot{ObjectMeta: metav1.ObjectMeta{Name: second.ID.Key}})
	w.row("snapshots", map[string]string{"State": "Lost", "Health": "DataLoss", "Problem": "SnapshotMissing"})
}

func (m *machine) capacity(t testing.TB) blockdev.Capacity {
	t.Helper()
	c, err := m.disks[0].Open("default", nil).Capacity(t.Context())
	check.OK(t, err)
	return c
}

// touch makes the agent look at an object.
func (w *environment) touch(o client.Object) {
	w.Helper()
	check.OK(w, w.Get(w.ctx, client.ObjectKeyFromObject(o), o))
	before := o.DeepCopyObject().(client.Object)
	o.SetAnnotations(map[string]string{"touched": rand.Text()})
	check.OK(w, w.Patch(w.ctx, o, client.MergeFrom(before)))
}

// TestUsed: the object of a volume says how much it takes of its pool. Small changes of that are not written.
func TestUsed(t *testing.T) {
	w, m, s := newCluster(t)
	one := spec("v")
	one.Size = volume.Range{Required: 32 * mib}
	v, err := s.Create(w.ctx, one)
	check.OK(t, err)
	if used := w.object("v").Status.Used; used == nil || *used != 0 {
		t.Fatalf("a new volume uses %v", used)
	}
	device, err := m.disks[0].Open("default", nil).Attach(w.ctx, blockdev.Ref{Kind: blockdev.Volume, Key: v.ID.Key}, blockdev.Attachment{})
	check.OK(t, err)
	defer func() { check.OK(t, device.Close()) }()
	fill := func(from, to int64) {
		f, err := os.OpenFile(device.Path, os.O_WRONLY, 0)
		check.OK(t, err)
		_, err = f.WriteAt([]byte(strings.Repeat("x", int(to-from))), from)
		check.OK(t, err)
		check.OK(t, f.Sync())
		check.OK(t, f.Close())
	}
	fill(0, 20*mib)
	w.touch(w.object("v"))
	w.eventually("it is written", func() bool { return *w.object("v").Status.Used == 20*mib })
	fill(20*mib, 24*mib)
	var count counter
	m.stop()
	wrap(t, func(c *rest.Config) { c.Wrap(count.wrap) })
	w.start(m)
	w.touch(w.object("v"))
	time.Sleep(time.Second)
	if writes, _, _ := count.take(); writes > 0 || *w.object("v").Status.Used != 20*mib {
		t.Errorf("%d writes for a few blocks, %d used", writes, *w.object("v").Status.Used)
	}
	check.OK(t, second(s.Expand(w.ctx, v.ID, volume.Range{Required: 36 * mib}))) // the status is written anyhow
	if used := *w.object("v").Status.Used; used != 24*mib {
		t.Errorf("%d used after a growth", used)
	}
}

// TestPoolUsed: how much of a pool is used is written together with other changes, and alone only from time to time, as a cluster may have thousands of
// pools.
func TestPoolUsed(t *testing.T) {
	w, m, s := newCluster(t)
	one := spec("v")
	one.Size = volume.Range{Required: 64 * mib}
	v, err := s.Create(w.ctx, one)
	check.OK(t, err)
	pool := func() *v1alpha1.Pool {
		o := &v1alpha1.Pool{}
		check.OK(t, w.Get(w.ctx, client.ObjectKey{Name: overview.PoolName(nodeName, "default")}, o))
		return o
	}
	w.eventually("its size is promised", func() bool { return pool().Status.Promised == 64*mib })
	device, err := m.disks[0].Open("default", nil).Attach(w.ctx, blockdev.Ref{Kind: blockdev.Volume, Key: v.ID.Key}, blockdev.Attachment{})
	check.OK(t, err)
	defer func() { check.OK(t, device.Close()) }()
	check.OK(t, drivertest.Content{Seed: "used", Size: 48 * mib}.Write(device.Path))
	looked := func() { // restarts the agent, which looks at its pools at once
		m.stop()
		w.start(m)
		time.Sleep(time.Second)
	}
	looked()
	if used := pool().Status.Used; used != 0 {
		t.Errorf("%d is written just after the report before", used)
	}
	o := pool()
	before := o.DeepCopy()
	o.Status.Measured = new(metav1.NewMicroTime(time.Now().Add(-time.Hour)))
	check.OK(t, w.Status().Patch(w.ctx, o, client.MergeFrom(before)))
	looked()
	w.eventually("it is written an hour later", func() bool { return pool().Status.Used == 48*mib })
	check.OK(t, drivertest.Content{Seed: "more", Size: 56 * mib}.Write(device.Path))
	looked()
	if used := pool().Status.Used; used != 48*mib {
		t.Errorf("%d is written just after that", used)
	}
	check.OK(t, second(s.Create(w.ctx, spec("other"))))
	w.eventually("the newest is written with what is promised", func() bool { return pool().Status.Used == 56*mib })
}

// TestProgress: the progress of a long copy is written into its object, and a short one costs no write for that. The copy does not wait for these writes.
func TestProgress(t *testing.T) {
	const look = time.Second              // how often progress is written: a copy that is let go takes less
	var holding atomic.Pointer[chan bool] // copies wait for it
	w := newEnvironment(t)
	var count counter
	wrap(t, func(c *rest.Config) { c.Wrap(count.wrap) })
	m := w.begin(&machine{name: nodeName, with: func(o *agent.Options) { o.ProgressEvery = look }, hook: func(operation string, _ blockdev.Ref) error {
		if hold := holding.Load(); operation == "Create" && hold != nil {
			held(t, *hold)
		}
		return nil
	}})
	s, _ := w.store()
	w.pooled(s, m)
	v, err := s.Create(w.ctx, spec("v"))
	check.OK(t, err)
	type making struct {
		make   func() error
		object cluster.Object
		kind   blockdev.Kind
	}
	// one makes a volume or snapshot, and returns how many writes that took.
	one := func(what string, made making) int {
		hold := make(chan bool)
		holding.Store(&hold)
		working, end := m.local.Progress().Track(w.ctx, "default", blockdev.Ref{Kind: made.kind, Key: made.object.GetName()}.String())
		progress.Begin(working, 100, 1000)
		count.take()
		failed := make(chan error, 1)
		go func() { failed <- made.make() }()
		sum := func() v1alpha1.Summary {
			check.OK(t, client.IgnoreNotFound(w.Get(w.ctx, client.ObjectKeyFromObject(made.object), made.object)))
			return made.object.Common().Summary
		}
		w.eventually(what+" is at 10 %", func() bool { return sum().Progress == "10%" && sum().State == v1alpha1.StateMaking })
		progress.Skip(working, 5) // too little for a write
		time.Sleep(look + look/4)
		progress.Skip(working, 315)
		w.eventually(what+" is at 42 %", func() bool { return sum().Progress == "42%" })
		end()
		holding.Store(nil)
		close(hold)
		check.OK(t, <-failed)
		if have := sum(); have.Progress != "" || made.object.Common().Progress != nil || have.State != v1alpha1.StateReady {
			t.Errorf("%s is there, and is %+v", what, have)
		}
		time.Sleep(100 * time.Millisecond)
		writes, _, _ := count.take()
		return writes
	}
	for what, made := range map[string]func(name string) making{
		"clone": func(name string) making {
			clone := spec(name)
			clone.Source = v.ID
			return making{func() error { return second(s.Create(w.ctx, clone)) }, cluster.VolumeNamed(volume.KeyOf(name)), blockdev.Volume}
		},
		"snapshot": func(name string) making {
			return making{func() error { return second(s.CreateSnapshot(w.ctx, name, v.ID)) }, cluster.SnapshotNamed(volume.KeyOf(name)), blockdev.Snapshot}
		},
		"member": func(name string) making {
			return making{func() error { return second(s.CreateGroup(w.ctx, name, []volume.ID{v.ID})) },
				cluster.SnapshotNamed(volume.KeyOf(cluster.MemberName(name, v.ID))), blockdev.Snapshot}
		},
	} {
		// There may be one more if a busy machine takes longer than look for a copy that was let go; but not each time.
		var writes []int
		for len(writes) == 0 || writes[len(writes)-1] != 3+2 && len(writes) < 10 {
			name := fmt.Sprint(what, len(writes))
			writes = append(writes, one(name, made(name)))
		}
		if writes[len(writes)-1] != 3+2 {
			t.Errorf("%s: %d writes, want 3 and 2 of its progress", what, writes)
		}
	}
}
