package agent

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/direct"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/mirror"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/remotepool"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

const tendedSize = 16 << 20

// tended is a volume with several legs that is used here. The mirror is the kernel's, and the legs are devices of this machine, of which the first counts
// as the near one. The object is in memory.
type tended struct {
	*mirrorReconciler
	t       *testing.T
	mu      sync.Mutex
	v       *v1alpha1.ReplicatedVolume
	watched *v1alpha1.ReplicatedVolume // what the watch has of it; nil: the same
	// looks is called before the object is read; begins when an era of a leg is begun; marks when the marks of a leg are asked for.
	looks         func()
	openings      func() // called before a leg is opened; may be nil
	begins, marks func(name string) error
	patches       func() error                               // called before the object is written
	answers       func() error                               // called after the object was written; may be nil
	changes       func(name string, s volume.LegState) error // called before the record of a leg is written, with its new state
	adopts        func() error                               // called when the volume is to be adopted; may be nil
	legless       bool                                       // somebody has deleted the object of the near leg
	listed        []string                                   // legs that the object does not name
	foreign       []string                                   // volumes that are no legs of this one
	deleted       error                                      // of reading the object; nil: it is there
	poolless      string                                     // the leg whose pool is not there; empty: none
	detached      bool                                       // the mirror is gone, and what was attached of the legs with it
	madeFor       int64                                      // the generation of the claim that the mirror is of
	legs          map[string]*tendedLeg
}

type tendedLeg struct {
	name   string // of its device
	disk   uint64
	number uint64
	live   bool
	away   bool          // its node answers with ErrUnavailable
	silent bool          // its node answers nothing, so that a call lasts until its context ends
	asked  int           // how often its record was read
	news   int           // how often its node still answers that it does not know of the claim
	slow   time.Duration // how long its node takes to open it
	hangs  chan struct{} // its disk answers when this is closed; nil: at once
	ended  bool
	flaky  bool // once its connection has ended it fails flushes too; a device over nothing takes them
	closes func()
	state  volume.LegState
	labels map[string]string
	boot   string // the boot ID of its machine
}

// newTended returns a volume with some legs, of which the first ones (current) are current and in the mirror.
func newTended(t *testing.T, current int, names ...string) *tended {
	drivertest.NeedRoot(t)
	drivertest.NeedMapper(t)
	check.OK(t, dm.CanMirror())
	f := newObject(t, current, names...)
	var numbers []uint64
	for i, name := range names {
		f.device(name)
		if i < current {
			numbers = append(numbers, f.legs[name].number)
		}
	}
	check.OK(t, mirror.Make(context.Background(), f.mirrorReconciler.name, "LVM-NOT-OF-LVM-TEST-TENDED", tendedSize, numbers...))
	t.Cleanup(func() {
		for _, l := range f.legs {
			f.fails(l)
		}
		_ = dm.Replace(f.mirrorReconciler.name, []dm.Line{{Length: tendedSize, Kind: "zero"}})
		_, err := mirror.Remove(context.Background(), f.mirrorReconciler.name)
		check.OK(t, err)
	})
	return f
}

// newObject is newTended without mirror and devices.
func newObject(t *testing.T, current int, names ...string) *tended {
	f := &tended{t: t, legs: map[string]*tendedLeg{}, looks: func() {}, madeFor: 1}
	f.begins = func(string) error { return nil }
	f.marks, f.patches = f.begins, func() error { return nil }
	f.changes = func(string, volume.LegState) error { return nil }
	f.v = &v1alpha1.ReplicatedVolume{}
	f.v.Name, f.v.ResourceVersion = "tended", "1"
	f.v.Spec.Size, f.v.Spec.Legs, f.v.Spec.Replicas, f.v.Spec.Claims = tendedSize, names, len(names), 1
	f.v.Spec.Claim, f.v.Status.Opened, f.v.Status.Made = &v1alpha1.Claim{Generation: 1}, 1, new(metav1.NowMicro())
	a := &Agent{local: &volume.Local{}, options: Options{LookEvery: 50 * time.Millisecond, Locks: &keylock.Table{}}}
	objects := kube.Connection{Cache: tendedCache{nil, f}, Client: tendedClient{nil, f}, Live: tendedClient{nil, f}}
	a.kube, a.replicas.kube, a.replicas.known = objects, objects, map[string]*replica{}
	a.others.kube, a.others.many = objects, objects
	a.replicas.read.Store(true)
	for i, name := range names {
		l := &tendedLeg{name: "test-" + name, live: true, labels: map[string]string{}, boot: "1"}
		f.legs[name] = l
		if i < current {
			l.state = volume.LegState{Sound: 1, Opened: 1, Boot: "1"}
			f.v.Status.Legs = append(f.v.Status.Legs, v1alpha1.Leg{Name: name, Current: true, Sound: 1, State: v1alpha1.LegCurrent})
			f.v.Status.Reads = names[0]
		}
		a.note(f.v.Name, func(r *replica) {
			r.legs[name] = volume.ID{Kind: blockdev.Volume, Pool: "pool", Key: name}
		})
	}
	f.mirrorReconciler = &mirrorReconciler{ReplicaLegs: a.ReplicaLegs(tendedVolumes{f}, tendedConnections{f}), made: tendedMirrors{f}, ref: blockdev.Ref{Kind: blockdev.Volume, Key: f.v.Name}, name: "ashlar-test-tended", generation: 1, legStates: map[string]*legState{}}
	return f
}

// tendedPatience is how long the tests wait for anything that has to end.
const tendedPatience = time.Minute

// loop makes a disk, a loop device, and returns its number.
func (f *tended) loop(name string, size int64) uint64 {
	image := filepath.Join(drivertest.Dir(f.t), name)
	check.OK(f.t, errors.Join(os.WriteFile(image, nil, 0o600), os.Truncate(image, size)))
	loop := drivertest.Loop(f.t, image)
	f.t.Cleanup(func() { drivertest.Run(f.t, "losetup", "-d", loop) })
	var st unix.Stat_t
	check.OK(f.t, unix.Stat(loop, &st))
	return st.Rdev
}

func (f *tended) device(name string) {
	l := f.legs[name]
	l.disk = f.loop(name, tendedSize)
	check.OK(f.t, dm.Make(l.name, "", dm.Linear(l.disk, tendedSize)))
	f.t.Cleanup(func() { drivertest.Run(f.t, "dmsetup", "remove", "--retry", l.name) })
	d, err := dm.Find(l.name)
	check.OK(f.t, err)
	l.number = d.Number
}

// silent makes a leg not answer any I/O; its connection counts as not live only later.
func (f *tended) silent(name string, later time.Duration) {
	check.OK(f.t, dm.Suspend(f.legs[name].name))
	time.AfterFunc(later, func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.legs[name].live = false
	})
}

// fails makes all I/O of a leg end with errors, including what is under way.
func (f *tended) fails(l *tendedLeg) {
	check.OK(f.t, dm.Replace(l.name, []dm.Line{{Length: tendedSize, Kind: "error"}}))
}

// flaky makes a leg fail writes and flushes.
func (f *tended) flaky(name string) {
	l := f.legs[name]
	check.OK(f.t, dm.Replace(l.name, []dm.Line{{Length: tendedSize, Kind: "flakey", Text: dm.Number(l.disk) + " 0 0 1 1 error_writes"}}))
}

func (f *tended) mends(name string) {
	check.OK(f.t, dm.Replace(f.legs[name].name, dm.Linear(f.legs[name].disk, tendedSize)))
}

func (f *tended) file() *os.File {
	d, err := dm.Find(f.mirrorReconciler.name)
	check.OK(f.t, err)
	file, err := dm.Open(d, os.O_RDWR|unix.O_DIRECT)
	check.OK(f.t, err)
	f.t.Cleanup(func() { _ = file.Close() })
	return file
}

// read reads a page.
func (f *tended) read(at int64) error {
	page, free, err := direct.Memory(4096)
	check.OK(f.t, err)
	defer free()
	_, err = f.file().ReadAt(page, at)
	return err
}

// write begins to write a page. done receives when the write has ended.
func (f *tended) write(at int64) (done chan error) {
	file := f.file()
	page, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	check.OK(f.t, err)
	page[0] = 1
	done = make(chan error, 1)
	go func() {
		_, err := file.WriteAt(page, at)
		done <- err
	}()
	return done
}

func (f *tended) ends(done chan error, what string) {
	f.t.Helper()
	select {
	case err := <-done:
		check.OK(f.t, err)
	case <-time.After(tendedPatience):
		f.t.Error(what, "still waits")
	}
}

// starts runs the reconciler of the mirror until the test ends.
func (f *tended) starts() {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		f.run(ctx)
		close(done)
	}()
	f.t.Cleanup(func() {
		cancel()
		for _, l := range f.legs {
			f.fails(l)
		}
		<-done
	})
}

func (f *tended) now() *mirrorView {
	f.t.Helper()
	s, err := mirror.Look(f.mirrorReconciler.name)
	check.OK(f.t, err)
	f.mu.Lock()
	v := f.v.DeepCopy()
	f.mu.Unlock()
	now, err := f.observe(context.Background(), v, s)
	check.OK(f.t, err)
	return now
}

func (f *tended) current(names ...string) {
	f.t.Helper()
	for end := time.Now().Add(tendedPatience); ; time.Sleep(20 * time.Millisecond) {
		now := f.now()
		if slices.Equal(now.v.Current(), names) && slices.Equal(now.names(), names) {
			return
		}
		if time.Now().After(end) {
			f.t.Fatalf("%v are current, and %v in the mirror, not %v", now.v.Current(), now.names(), names)
		}
	}
}

// noticed waits until the kernel has noticed that a leg fails, or the mirror does not have that leg any more.
func (f *tended) noticed(name string) {
	f.t.Helper()
	for end := time.Now().Add(tendedPatience); ; time.Sleep(5 * time.Millisecond) {
		s, err := mirror.Look(f.mirrorReconciler.name)
		check.OK(f.t, err)
		at := slices.IndexFunc(s.Legs, func(l mirror.Leg) bool { return l.Device == f.legs[name].number })
		if at < 0 || s.Legs[at].Failed {
			return
		}
		if time.Now().After(end) {
			f.t.Fatalf("nobody has noticed that %s fails: %+v", name, s)
		}
	}
}

// delays waits until a write is under way to a leg that delays I/O (dm-delay).
func (f *tended) delays(name string) {
	f.t.Helper()
	for end := time.Now().Add(tendedPatience); ; time.Sleep(time.Millisecond) {
		status, err := dm.Status(f.legs[name].name)
		check.OK(f.t, err)
		if words := strings.Fields(status[0].Text); words[1] != "0" { // delayed reads, writes, flushes
			return
		}
		if time.Now().After(end) {
			f.t.Fatalf("nothing is written to %s: %+v", name, status)
		}
	}
}

type tendedCache struct {
	cache.Cache
	*tended
}

func (c tendedCache) Get(_ context.Context, key client.ObjectKey, o client.Object, _ ...client.GetOption) error {
	c.looks()
	if v, is := o.(*v1alpha1.ReplicatedVolume); is && c.watched != nil {
		c.watched.DeepCopyInto(v)
		return nil
	}
	return c.get(key, o)
}

func (c tendedCache) List(_ context.Context, l client.ObjectList, _ ...client.ListOption) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch l := l.(type) {
	case *v1alpha1.ReplicatedVolumeList:
		l.Items = []v1alpha1.ReplicatedVolume{*c.v.DeepCopy()}
	case *v1alpha1.VolumeList:
		other := v1alpha1.Volume{}
		other.Name = "another volume"
		l.Items = []v1alpha1.Volume{other}
		for _, name := range append(slices.Clone(c.v.Spec.Legs), c.listed...) {
			leg := v1alpha1.Volume{}
			leg.Name, leg.Spec.ReplicaOf = name, c.v.Name
			l.Items = append(l.Items, leg)
		}
	}
	return nil
}

func (f *tended) get(key client.ObjectKey, o client.Object) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch o := o.(type) {
	case *v1alpha1.ReplicatedVolume:
		if f.deleted != nil {
			return f.deleted
		}
		f.v.DeepCopyInto(o)
		return nil
	case *corev1.Node:
	case *v1alpha1.Volume:
		if key.Name == f.v.Spec.Legs[0] && !f.legless || slices.Contains(f.foreign, key.Name) {
			return nil
		}
	}
	return apierrors.NewNotFound(schema.GroupResource{}, key.Name)
}

type tendedClient struct {
	client.Client
	*tended
}

func (c tendedClient) Get(_ context.Context, key client.ObjectKey, o client.Object, _ ...client.GetOption) error {
	return c.get(key, o)
}

func (c tendedClient) Status() client.SubResourceWriter { return tendedStatus{nil, c.tended} }

type tendedStatus struct {
	client.SubResourceWriter
	*tended
}

func (s tendedStatus) Patch(_ context.Context, o client.Object, _ client.Patch, _ ...client.SubResourcePatchOption) error {
	if err := s.patches(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if o.GetResourceVersion() != s.v.ResourceVersion {
		return apierrors.NewConflict(schema.GroupResource{}, o.GetName(), errors.New("it was changed"))
	}
	o.SetResourceVersion(o.GetResourceVersion() + "1")
	s.v = o.(*v1alpha1.ReplicatedVolume).DeepCopy()
	if s.answers != nil {
		return s.answers()
	}
	return nil
}

type tendedMirrors struct{ *tended }

func (f tendedMirrors) Mirrors() (map[blockdev.Ref]int64, error) {
	return map[blockdev.Ref]int64{f.ref: f.madeFor}, nil
}

func (f tendedMirrors) Mirror(blockdev.Ref) string { return f.mirrorReconciler.name }

func (f tendedMirrors) Generation(blockdev.Ref) (int64, bool, error) { return f.madeFor, true, nil }

type tendedVolumes struct{ *tended }

func (f tendedVolumes) of(id volume.ID) blockdev.Device {
	return blockdev.Device{Number: f.legs[id.Key].number, Size: tendedSize}
}

func (f tendedVolumes) Leg(ctx context.Context, id volume.ID) (volume.Leg, error) {
	if f.legs[id.Key].silent {
		<-ctx.Done()
		return volume.Leg{}, fmt.Errorf("%w: %s: %w", errdefs.ErrUnavailable, id.Key, ctx.Err())
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	l := f.legs[id.Key]
	l.asked++
	if l.news--; l.news >= 0 {
		return volume.Leg{}, fmt.Errorf("%w: no volume %s", errdefs.ErrNotFound, id.Key)
	}
	if l.away {
		return volume.Leg{}, fmt.Errorf("%w: %s", errdefs.ErrUnavailable, id.Key)
	}
	return volume.Leg{LegState: l.state, Of: f.v.Name, Now: l.boot, Data: blockdev.Record{Labels: maps.Clone(l.labels)}}, nil
}

func (f tendedVolumes) OpenLeg(ctx context.Context, id volume.ID) (blockdev.Device, error) {
	if f.openings != nil {
		f.openings()
	}
	if f.legs[id.Key].silent {
		<-ctx.Done()
	}
	if hangs := f.legs[id.Key].hangs; hangs != nil {
		<-hangs
	}
	var late error
	if slow := f.legs[id.Key].slow; slow > 0 {
		late = pause(ctx, slow)
	}
	if late != nil || f.legs[id.Key].away {
		return blockdev.Device{}, fmt.Errorf("%w: %s", errdefs.ErrUnavailable, id.Key)
	}
	return f.of(id), nil
}

func (f tendedVolumes) LegDevices(_ context.Context, id volume.ID) ([]blockdev.Device, error) {
	if id.Key == f.poolless {
		return nil, fmt.Errorf("%w: its pool is not there", errdefs.ErrUnavailable)
	}
	if f.detached {
		return nil, nil
	}
	return []blockdev.Device{f.of(id)}, nil
}

func (f tendedVolumes) CloseLeg(_ context.Context, id volume.ID) error {
	if closes := f.legs[id.Key].closes; closes != nil {
		closes()
	}
	return nil
}
func (f tendedVolumes) GrowLeg(context.Context, volume.ID) error { return nil }

func (f tendedVolumes) Adopt(context.Context, volume.ID) error {
	if f.adopts == nil {
		return nil
	}
	return f.adopts()
}

func (f tendedVolumes) Adopted(context.Context, volume.ID) (adopted, astray bool, err error) {
	return false, false, nil
}

func (f tendedVolumes) ChangeLeg(_ context.Context, id volume.ID, change func(*volume.LegState, map[string]string) error) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	l := f.legs[id.Key]
	state := l.state
	err := change(&state, l.labels)
	if err == nil {
		err = f.changes(id.Key, state)
	}
	if err == nil {
		l.state = state
	}
	return err
}

func (f tendedVolumes) BeginEra(_ context.Context, id volume.ID) (uint32, error) {
	return 1<<20 + 7, f.begins(id.Key)
}

func (f tendedVolumes) Marks(_ context.Context, id volume.ID, _ uint32) ([]blockdev.Extent, error) {
	return nil, f.tended.marks(id.Key)
}

type tendedConnections struct{ *tended }

func (f tendedConnections) Legs(ref blockdev.Ref) ([]remotepool.Leg, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	l := f.legs[ref.Key]
	if l == nil || l.ended {
		return nil, nil
	}
	return []remotepool.Leg{{NQN: ref.Key, Live: l.live, Used: true}}, nil
}

func (f tendedConnections) End(_ context.Context, nqn string) error {
	f.mu.Lock()
	f.legs[nqn].ended = true
	f.mu.Unlock()
	switch {
	case f.legs[nqn].flaky:
		f.tended.flaky(nqn)
	case f.legs[nqn].disk != 0:
		f.fails(f.legs[nqn])
	}
	return nil
}

// goesOnWithout makes a leg not answer any I/O, and shows that writes go on with the first leg alone.
func (f *tended) goesOnWithout(name string) {
	f.t.Helper()
	f.silent(name, 0)
	write := f.write(0)
	f.starts()
	f.ends(write, "what was written to the leg that is there")
	f.current("a")
}

// TestMadeAnew: a mirror is removed, and made anew for a later claim, before the reconciler of the first one has noticed either. That one ends, and the new
// mirror goes on.
func TestMadeAnew(t *testing.T) {
	f := newTended(t, 1, "a")
	f.madeFor, f.v.Spec.Claims, f.v.Spec.Claim.Generation, f.v.Status.Opened = 2, 2, 2, 2
	ended := make(chan error, 1)
	go func() {
		f.run(t.Context())
		ended <- f.endUnclaimed(t.Context(), mirror.State{}) // it may have begun that before
	}()
	f.ends(ended, "the reconciler of the first mirror")
	if s := f.now().s; len(s.Legs) != 1 {
		t.Errorf("the mirror of the later claim has ended: %+v", s)
	}
	f.ends(f.write(0), "what is written to it")
}

// slow has each write to a leg take some time, in which the kernel counts it as under way to a disk (dm.UnderWay).
func (f *tended) slow(name string, latency time.Duration) {
	const below = "ashlar-test-slow"
	l := f.legs[name]
	delay := fmt.Sprintf("%[1]s 0 0 %[1]s 0 %[2]d %[1]s 0 0", dm.Number(l.disk), latency.Milliseconds()) // for writes only
	check.OK(f.t, dm.Make(below, below, []dm.Line{{Length: tendedSize, Kind: "delay", Text: delay}}))
	f.t.Cleanup(func() { drivertest.Run(f.t, "dmsetup", "remove", "--retry", below) })
	d, err := dm.Find(below)
	check.OK(f.t, err)
	loop := drivertest.Loop(f.t, d.Path(), "--direct-io=on")
	f.t.Cleanup(func() {
		f.fails(l)
		drivertest.Run(f.t, "losetup", "-d", loop)
	})
	var st unix.Stat_t
	check.OK(f.t, errors.Join(unix.Stat(loop, &st), dm.Replace(l.name, dm.Linear(st.Rdev, tendedSize))))
}

// isTaken ends the claim of the volume.
func (f *tended) isTaken() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.v.Spec.Claim = nil
}

// TestTakenWhileFlushed: the claim has ended, and the connections to a leg end while a flush to it is under way, and to the other leg, which is slower, writes
// that it has taken. Nothing is acknowledged that it lacks.
func TestTakenWhileFlushed(t *testing.T) {
	const latency = 4 * time.Second
	f := newTended(t, 2, "a", "b")
	f.options.LookEvery, f.legs["b"].flaky = latency, true
	f.slow("a", latency)
	file := f.file()
	var acknowledged [2]atomic.Uint64
	var all sync.WaitGroup
	for i := range acknowledged {
		page, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		check.OK(t, err)
		all.Go(func() {
			time.Sleep(time.Duration(i) * latency / 2)
			for n := uint64(1); ; n++ {
				binary.LittleEndian.PutUint64(page, n)
				if _, err := file.WriteAt(page, int64(i)<<20); err != nil {
					return
				}
				acknowledged[i].Store(n)
			}
		})
	}
	for acknowledged[1].Load() < 1 {
		time.Sleep(time.Millisecond)
	}
	time.Sleep(latency / 20) // b has the next one by then
	f.silent("b", 0)
	flushed := make(chan error, 1)
	go func() { flushed <- unix.Fdatasync(int(file.Fd())) }()
	time.Sleep(latency / 20)
	f.isTaken()
	s, err := mirror.Look(f.mirrorReconciler.name)
	check.OK(t, errors.Join(err, f.step(t.Context(), s)))
	if all.Wait(); <-flushed == nil {
		t.Error("a flush is acknowledged that a leg did not take")
	}
	disk, err := os.Open(fmt.Sprintf("/dev/loop%d", unix.Minor(f.legs["b"].disk)))
	check.OK(t, err)
	for i := range acknowledged {
		has := make([]byte, 8)
		check.OK(t, second(disk.ReadAt(has, int64(i)<<20)))
		if have, want := binary.LittleEndian.Uint64(has), acknowledged[i].Load(); have < want {
			t.Errorf("of %d writes that are acknowledged the leg has %d", want, have)
		}
	}
	check.OK(t, disk.Close())
}

// TestTakenWhileItChanges: a change of the mirror waits for a leg that does not answer any more, and the claim ends meanwhile. The change ends, so that the mirror
// can.
func TestTakenWhileItChanges(t *testing.T) {
	f := newTended(t, 3, "a", "b", "c")
	f.silent("b", 0)
	write := f.write(0)
	f.isTaken()
	changed := make(chan error, 1)
	go func() {
		err := f.changeMirror(t.Context(), func() error { return mirror.Leave(t.Context(), f.mirrorReconciler.name, f.legs["c"].number) })
		if errors.Is(err, errdefs.ErrUnavailable) { // it has failed by then
			err = nil
		}
		changed <- err
	}()
	f.ends(changed, "the change")
	s, err := mirror.Look(f.mirrorReconciler.name)
	check.OK(t, errors.Join(err, f.step(t.Context(), s)))
	select {
	case err := <-write:
		if err == nil {
			t.Error("a write is acknowledged that a leg lacks")
		}
	case <-time.After(tendedPatience):
		t.Error("what is written still waits")
	}
}

// joins makes a leg join the mirror, of which it lacks nothing.
func (f *tended) joins(name string) {
	f.t.Helper()
	check.OK(f.t, mirror.Join(context.Background(), f.mirrorReconciler.name, f.legs[name].number, func(context.Context) ([]dm.Range, error) { return nil, nil }))
}

// TestLegsFallSilent: two legs do not answer any more, and one is noticed later than the other. When the first one leaves the mirror, that waits for I/O
// that is under way to the second.
func TestLegsFallSilent(t *testing.T) {
	f := newTended(t, 3, "a", "b", "c")
	f.silent("c", time.Second)
	f.goesOnWithout("b")
}

// TestSignalsWhileLegsFallSilent: the same while this process gets signals all the time, as from Go's runtime and from children that end. No write fails
// because of them.
func TestSignalsWhileLegsFallSilent(t *testing.T) {
	f := newTended(t, 3, "a", "b", "c")
	signals(t)
	f.silent("c", time.Second)
	f.goesOnWithout("b")
}

// signals sends all threads of this process harmless signals (SIGURG), until the test ends.
func signals(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	var done sync.WaitGroup
	done.Go(func() {
		for ctx.Err() == nil {
			threads, err := os.ReadDir("/proc/self/task")
			if err != nil {
				t.Error(err)
				return
			}
			for _, thread := range threads {
				if id, err := strconv.Atoi(thread.Name()); err == nil {
					_ = unix.Tgkill(os.Getpid(), id, unix.SIGURG) // the thread may have ended
				}
			}
			time.Sleep(time.Millisecond)
		}
	})
	t.Cleanup(func() { cancel(); done.Wait() })
}

// TestSilentOnceEqual: a leg that joins does not answer any more when all is copied to it, and before it is a leg of the mirror like the others.
func TestSilentOnceEqual(t *testing.T) {
	f := newTended(t, 1, "a", "b")
	f.joins("b")
	f.goesOnWithout("b")
}

// TestSilentWhileFlushed: a leg does not answer any more when it is a leg of the mirror like the others, and is flushed before it is put on the list.
func TestSilentWhileFlushed(t *testing.T) {
	f := newTended(t, 1, "a", "b")
	f.joins("b")
	check.OK(t, mirror.Finish(context.Background(), f.mirrorReconciler.name, 0))
	f.goesOnWithout("b")
}

// TestHangs: requests to legs are under way, and none has ended for a while. A leg on another node whose disk hangs leaves, and the connection to it ends, if
// that node answers, and another current leg ends its requests.
func TestHangs(t *testing.T) {
	const long, short = hangTime + time.Second, hangTime - time.Second
	for what, one := range map[string]struct {
		near, far, joins time.Duration // for how long they hang; 0: they do not
		ends, away, only bool          // a request to far has ended; its node does not answer; it alone is current
		want             []string
	}{
		"far":                            {far: long, want: []string{"far"}},
		"far, not for long":              {far: short},
		"far, which has ended a request": {far: long, ends: true},
		"far, which is away":             {far: long, away: true},
		"far, the only current one":      {far: long, only: true},
		"near":                           {near: long},
		"both":                           {near: long, far: long},
		"both, near not for long":        {near: short, far: long},
		"the one that joins":             {joins: long, want: []string{"joins"}},
		"all but near":                   {far: long, joins: long, want: []string{"far", "joins"}},
	} {
		t.Run(what, func(t *testing.T) {
			f := newObject(t, 2, "near", "far", "joins")
			f.legs["far"].live = !one.away
			f.v.Status.Legs[0].Current = !one.only
			f.v.Status.Legs = append(f.v.Status.Legs, v1alpha1.Leg{Name: "joins", State: v1alpha1.LegJoining})
			view := func(ended int64) *mirrorView {
				now := &mirrorView{v: f.v.DeepCopy(), device: map[string]uint64{}, leg: map[uint64]string{}, failing: map[string]string{}, io: map[uint64]ioCounts{}, near: 1}
				for i, name := range f.v.Spec.Legs {
					d := uint64(i + 1)
					now.device[name], now.leg[d] = d, name
					now.io[d] = ioCounts{min(1, int64(map[string]time.Duration{"near": one.near, "far": one.far, "joins": one.joins}[name])), 5 + ended}
				}
				now.s.Legs, now.s.Joining = []mirror.Leg{{Device: 1}, {Device: 2}}, &mirror.Leg{Device: 3}
				if one.only {
					now.s.Legs = now.s.Legs[1:]
				}
				return now
			}
			f.findFailed(view(0))
			for name, hangs := range map[string]time.Duration{"near": one.near, "far": one.far, "joins": one.joins} {
				k := f.stateOf(name)
				k.goesOnAt = k.goesOnAt.Add(-hangs)
			}
			ended := int64(0)
			if one.ends {
				ended = 1
			}
			now := view(ended)
			if f.findFailed(now); one.only {
				delete(now.failing, "near") // it is not in the mirror
			}
			if failing := slices.Sorted(maps.Keys(now.failing)); !slices.Equal(failing, one.want) {
				t.Fatalf("%v are to leave, and were to be %v", now.failing, one.want)
			}
			if len(one.want) == 0 {
				return
			}
			devices, err := f.delist(t.Context(), now)
			check.OK(t, err)
			for _, name := range one.want {
				if leg := f.v.Leg(name); !slices.Contains(devices, now.device[name]) || !f.legs[name].ended || leg == nil || leg.Current || !strings.Contains(leg.Message, "its disk hangs") {
					t.Errorf("%s: connection ended %v, of %v; it is %+v", name, f.legs[name].ended, devices, leg)
				}
			}
		})
	}
}

// TestObjectDeleted: somebody deletes the object of a volume that is used. It is said, and its users go on, until a leg fails or its node does not answer: they
// get errors then, as no list without that leg can be written. If nothing is known of the object, nothing ends.
func TestObjectDeleted(t *testing.T) {
	whole := []mirror.Leg{{Device: 1}, {Device: 2}}
	failed := []mirror.Leg{{Device: 1}, {Device: 2, Failed: true}}
	kind := schema.GroupResource{Group: "ashlar.dev", Resource: "replicatedvolumes"}
	for what, one := range map[string]struct {
		err    error
		legs   []mirror.Leg
		silent bool
		anew   bool // the driver has started anew since
		ends   bool // its users get errors
		says   bool // the error says that it was deleted
	}{
		"all legs are whole":           {apierrors.NewNotFound(kind, "tended"), whole, false, false, false, true},
		"all are whole, after a start": {apierrors.NewNotFound(kind, "tended"), whole, false, true, false, true},
		"one has failed":               {apierrors.NewNotFound(kind, "tended"), failed, false, false, true, false},
		"one does not answer":          {apierrors.NewNotFound(kind, "tended"), whole, true, false, true, false},
		"one does not, after a start":  {apierrors.NewNotFound(kind, "tended"), whole, true, true, true, false},
		"it is alone":                  {apierrors.NewNotFound(kind, "tended"), failed[1:], false, false, false, true},
		"the API server is away":       {apierrors.NewServiceUnavailable("away"), failed, false, false, false, false},
		"there are no definitions":     {apierrors.NewGenericServerResponse(404, "get", kind, "tended", "", 0, true), failed, false, false, false, false},
		"it is there with its claim":   {nil, failed, false, false, false, false},
	} {
		t.Run(what, func(t *testing.T) {
			f := newObject(t, 2, "a", "b")
			f.legs["a"].number, f.legs["b"].number = 1, 2
			f.legs["b"].live = !one.silent
			f.others.kube, f.others.many = f.kube, f.kube
			if f.deleted = one.err; !one.anew {
				f.seen = f.v
			}
			f.stateOf("b").silentSince = time.Now().Add(-time.Minute)
			_, why, err := f.whyEnds(t.Context(), mirror.State{Legs: one.legs})
			if ends := why != ""; ends != one.ends || (err != nil) != one.says || one.says && !strings.Contains(err.Error(), "was deleted while it is used here") {
				t.Errorf("it ends as %q; error %v", why, err)
			}
		})
	}
}

// TestObjectDeletedAndHangs: the object of a volume that is used is deleted, or restored to before the claim, and then the disk of a leg hangs on a node that
// answers. The users get errors, as no list without that leg can be written, and the connection to it ends, so that the end of the mirror does not wait for it. If
// the disk is the one of this node, or that of the other node hangs too, they wait, as they do with the object.
func TestObjectDeletedAndHangs(t *testing.T) {
	for what, one := range map[string]struct {
		hangs          []string
		restored, anew bool // the object was restored, not deleted; the driver has started anew since
		ends           bool
	}{
		"far":                        {hangs: []string{"far"}, ends: true},
		"far, after a start":         {hangs: []string{"far"}, anew: true, ends: true},
		"far, of a restored object":  {hangs: []string{"far"}, restored: true, ends: true},
		"far, restored, and a start": {hangs: []string{"far"}, restored: true, anew: true, ends: true},
		"near":                       {hangs: []string{"near"}},
		"both":                       {hangs: []string{"near", "far"}},
		"none":                       {},
		"none, of a restored object": {restored: true},
		"near, of a restored object": {hangs: []string{"near"}, restored: true},
		"both, after a start":        {hangs: []string{"near", "far"}, anew: true},
	} {
		t.Run(what, func(t *testing.T) {
			f := newObject(t, 2, "near", "far")
			f.legs["near"].number, f.legs["far"].number, f.legs["near"].ended = 1, 2, true // no connection leads to it
			names, looks := map[uint64]string{1: "near", 2: "far"}, int64(0)
			was := countIO
			t.Cleanup(func() { countIO = was })
			countIO = func(device uint64) ioCounts {
				if slices.Contains(one.hangs, names[device]) {
					return ioCounts{1, 7}
				}
				return ioCounts{1, 7 + looks}
			}
			if !one.anew {
				f.seen = f.v.DeepCopy()
			}
			if one.restored {
				f.v.Spec.Claim, f.v.Spec.Claims = nil, 0
			} else {
				f.deleted = apierrors.NewNotFound(schema.GroupResource{Group: "ashlar.dev", Resource: "replicatedvolumes"}, "tended")
			}
			s := mirror.State{Legs: []mirror.Leg{{Device: 1}, {Device: 2}}}
			if _, why, _ := f.whyEnds(t.Context(), s); why != "" {
				t.Fatalf("nothing hangs yet, and it ends as %q", why)
			}
			looks++
			for _, name := range one.hangs {
				f.stateOf(name).goesOnAt = time.Now().Add(-hangTime - time.Second)
			}
			v, why, err := f.whyEnds(t.Context(), s)
			if (why != "") != one.ends || (err != nil) != (!one.ends && !one.restored) {
				t.Errorf("it ends as %q; error %v", why, err)
			}
			if one.ends {
				f.disconnectEnding(t.Context(), v, s)
			}
			if f.legs["far"].ended != one.ends {
				t.Errorf("its connection has ended: %v", f.legs["far"].ended)
			}
		})
	}
}

// TestRestoredToBeforeALeg: the object is restored to before the claim, and to before a leg that is used was added, and this leg falls silent. The users get
// errors: otherwise what they write would be held for ever.
func TestRestoredToBeforeALeg(t *testing.T) {
	for _, anew := range []bool{false, true} {
		f := newObject(t, 2, "a", "b")
		f.legs["a"].number, f.legs["b"].number = 1, 2
		f.others.kube, f.others.many, f.seen = f.kube, f.kube, f.v.DeepCopy()
		if anew { // the driver has started since: the Volumes of the legs tell
			f.seen = nil
		}
		f.listed = []string{"b"}
		f.v.Spec.Legs, f.v.Spec.Claim, f.v.Spec.Claims, f.v.Status.Legs = f.v.Spec.Legs[:1], nil, 0, f.v.Status.Legs[:1]
		s := mirror.State{Legs: []mirror.Leg{{Device: 1}, {Device: 2}}}
		if _, why, err := f.whyEnds(t.Context(), s); why != "" || err != nil {
			t.Errorf("all legs are whole, and it ends as %q; error %v", why, err)
		}
		f.legs["b"].live = false
		f.stateOf("b").silentSince = time.Now().Add(-time.Minute)
		if v, why, err := f.whyEnds(t.Context(), s); why == "" || err != nil || !slices.Contains(v.Spec.Legs, "b") {
			t.Errorf("a leg is silent, and it ends as %q, with the legs %v; error %v", why, v.Spec.Legs, err)
		}
	}
}

// TestNearLegDeleted: somebody deletes the object of the leg that is on this node and in use, and the driver may start anew. There never was a connection to
// it, so none has ended.
func TestNearLegDeleted(t *testing.T) {
	const near = "0123456789abcdef0123456789abcdef"
	pool := memory.NewDisk(2*tendedSize).Open("pool", nil)
	check.OK(t, second(pool.Create(t.Context(), blockdev.Spec{Ref: blockdev.Ref{Kind: blockdev.Volume, Key: near}, Size: tendedSize})))
	for what, one := range map[string]struct{ deleted, anew bool }{"it is there": {}, "deleted": {true, false}, "deleted, and the driver starts": {true, true}} {
		t.Run(what, func(t *testing.T) {
			f := newObject(t, 1, near, "far")
			f.options.Pools = []Pool{{Pool: pool}}
			f.legs[near].number, f.legs["far"].number, f.legs[near].ended, f.legless = 1, 2, true, one.deleted
			if one.anew {
				f.note(f.v.Name, func(r *replica) { delete(r.legs, near) })
			}
			now, err := f.observe(t.Context(), f.v.DeepCopy(), mirror.State{Legs: []mirror.Leg{{Device: 1}}, Joining: &mirror.Leg{Device: 2}, Total: 1})
			check.OK(t, err)
			if f.findFailed(now); len(now.failing) > 0 || now.near != 1 || f.isSevered(now) || len(now.unknown()) > 0 {
				t.Errorf("%v fail, unknown %v, severed %v", now.failing, now.unknown(), f.isSevered(now))
			}
		})
	}
}

// TestFarLegDeleted: the only current leg is on another node, and another one joins, when somebody deletes the object of the first and the driver starts anew.
// Its users go on: they get errors only if the kernel has the leg's device no more.
func TestFarLegDeleted(t *testing.T) {
	disks, err := os.ReadDir("/sys/dev/block")
	check.OK(t, err)
	if len(disks) == 0 {
		t.Skip("this machine has no block device")
	}
	var major, minor uint32
	check.OK(t, second(fmt.Sscanf(disks[0].Name(), "%d:%d", &major, &minor)))
	for device, severed := range map[uint64]bool{unix.Mkdev(major, minor): false, 1: true} {
		f := newObject(t, 1, "far", "near")
		f.v.Spec.Legs = []string{"near", "far"}
		f.note(f.v.Name, func(r *replica) { delete(r.legs, "far") })
		f.legs["near"].number, f.legs["far"].number = 2, device
		now, err := f.observe(t.Context(), f.v.DeepCopy(), mirror.State{Legs: []mirror.Leg{{Device: device}}, Joining: &mirror.Leg{Device: 2}, Total: 1})
		check.OK(t, err)
		if f.findFailed(now); now.near != 2 || f.isSevered(now) != severed {
			t.Errorf("near is %d; severed %v, and was to be %v", now.near, f.isSevered(now), severed)
		}
	}
}

// TestUseIsReported: the object says how the volume is used, whatever it said before. It may have been restored, a late write may say that the volume was closed
// before it was opened anew, and an older driver, which has opened it, does not say which leg is read.
func TestUseIsReported(t *testing.T) {
	f := newObject(t, 2, "a", "b")
	f.legs["a"].number, f.legs["b"].number = 1, 2
	f.v.Status.Closed, f.v.Status.Reads = 1, ""
	_ = f.step(t.Context(), mirror.State{Legs: []mirror.Leg{{Device: 1}, {Device: 2}}}) // what it does next needs the kernel
	if f.v.Status.Closed != 0 || f.v.Status.Reads != "a" {
		t.Errorf("the object says %+v", f.v.Status)
	}
	if f.background != nil {
		<-f.background
	}
}

// TestUseIsReportedOnce: the definitions are older than the driver, and drop what it says of the use. It is not said again and again.
func TestUseIsReportedOnce(t *testing.T) {
	f := newObject(t, 1, "a")
	f.v.Status.Reads = ""
	writes := 0
	f.patches = func() error { writes++; return nil }
	for range 3 {
		now := &mirrorView{v: f.v.DeepCopy(), s: mirror.State{Legs: []mirror.Leg{{Device: 1}}}, device: map[string]uint64{"a": 1}, leg: map[uint64]string{1: "a"}, failing: map[string]string{}}
		check.OK(t, f.reportUse(t.Context(), now))
		f.v.Status.Reads = ""
	}
	if writes != 1 {
		t.Errorf("it was written %d times", writes)
	}
}

// TestHangIsTold: the disk of the user's own node hangs, or those of all other nodes do, so that what is written waits. The object says so, and what to do, until
// a request has ended.
func TestHangIsTold(t *testing.T) {
	for what, one := range map[string]struct {
		near  uint64
		hangs []string
		want  string
	}{
		"near": {1, []string{"a"}, "power that node off"},
		"both": {1, []string{"a", "b"}, "power that node off"},
		"far":  {1, []string{"b"}, ""}, // it leaves
		"all":  {0, []string{"a", "b"}, "its disk hangs"},
		"none": {1, nil, ""},
	} {
		t.Run(what, func(t *testing.T) {
			f := newObject(t, 2, "a", "b")
			ended := map[string]int64{"a": 7, "b": 7}
			view := func() *mirrorView {
				return &mirrorView{v: f.v.DeepCopy(), s: mirror.State{Legs: []mirror.Leg{{Device: 1}, {Device: 2}}}, device: map[string]uint64{"a": 1, "b": 2}, leg: map[uint64]string{1: "a", 2: "b"},
					near: one.near, failing: map[string]string{}, io: map[uint64]ioCounts{1: {1, ended["a"]}, 2: {1, ended["b"]}}}
			}
			now := view()
			f.findFailed(now)
			for name := range ended {
				if slices.Contains(one.hangs, name) {
					f.stateOf(name).goesOnAt = time.Now().Add(-hangTime - time.Second)
				} else {
					ended[name]++
				}
			}
			now = view()
			f.findFailed(now)
			check.OK(t, f.reportUse(t.Context(), now))
			waits := f.v.Waiting()
			if (waits != "") != (one.want != "") || !strings.Contains(waits, one.want) {
				t.Errorf("it says %q", waits)
			}
			bad := slices.ContainsFunc(f.Health(f.ref, now.s), func(p blockdev.Problem) bool { return p.Severity == blockdev.Inaccessible && p.Message == waits })
			if bad != (waits != "") {
				t.Errorf("its health is %+v", f.Health(f.ref, now.s))
			}
			now = view()
			now.io = map[uint64]ioCounts{1: {1, 9}, 2: {1, 9}}
			f.findFailed(now)
			check.OK(t, f.reportUse(t.Context(), now))
			if waits = f.v.Waiting(); waits != "" {
				t.Errorf("requests have ended, and it says %q", waits)
			}
		})
	}
}

// TestHangsAndOthersFail: the disk of the user's own node hangs, and the other node does not answer any more. The leg there stays on the list, as it has all that
// was acknowledged: when the first node is powered off, it is used. When the disk answers again, writes go on without the other leg.
func TestHangsAndOthersFail(t *testing.T) {
	f := newObject(t, 2, "near", "far")
	f.legs["far"].live = false
	f.stateOf("far").silentSince = time.Now().Add(-time.Minute)
	view := func(ended int64) *mirrorView {
		now := &mirrorView{v: f.v.DeepCopy(), s: mirror.State{Legs: []mirror.Leg{{Device: 1}, {Device: 2}}}, device: map[string]uint64{"near": 1, "far": 2}, leg: map[uint64]string{1: "near", 2: "far"},
			near: 1, failing: map[string]string{}, io: map[uint64]ioCounts{1: {1, ended}, 2: {1, 7}}}
		f.findFailed(now)
		return now
	}
	f.findFailed(view(7))
	f.stateOf("near").goesOnAt = time.Now().Add(-legSilence * f.options.LookEvery)
	now := view(7)
	if _, err := f.delist(t.Context(), now); !errors.Is(err, errdefs.ErrUnavailable) || len(f.v.Current()) != 2 || now.failing["far"] == "" {
		t.Errorf("%v fail, and %v are current; error %v", now.failing, f.v.Current(), err)
	}
	devices, err := f.delist(t.Context(), view(8))
	if check.OK(t, err); !slices.Equal(devices, []uint64{2}) || !slices.Equal(f.v.Current(), []string{"near"}) {
		t.Errorf("the disk answers, devices %v leave, and %v are current", devices, f.v.Current())
	}
}

// TestHangsAtStart: as TestHangsAndOthersFail, and the driver has just started: it cannot know yet that the disk hangs. It takes no leg off the list until it has
// seen another one end a request, or have none under way.
func TestHangsAtStart(t *testing.T) {
	for what, second := range map[string]ioCounts{"a request ends": {1, 8}, "none is under way": {0, 7}} {
		t.Run(what, func(t *testing.T) {
			f := newObject(t, 2, "near", "far")
			view := func(near ioCounts) *mirrorView {
				now := &mirrorView{v: f.v.DeepCopy(), s: mirror.State{Legs: []mirror.Leg{{Device: 1}, {Device: 2, Failed: true}}}, device: map[string]uint64{"near": 1, "far": 2},
					leg: map[uint64]string{1: "near", 2: "far"}, near: 1, failing: map[string]string{}, io: map[uint64]ioCounts{1: near, 2: {0, 7}}}
				f.findFailed(now)
				return now
			}
			if _, err := f.delist(t.Context(), view(ioCounts{1, 7})); !errors.Is(err, errdefs.ErrUnavailable) || len(f.v.Current()) != 2 {
				t.Errorf("nothing is known of the other disk, and %v are current; error %v", f.v.Current(), err)
			}
			devices, err := f.delist(t.Context(), view(second))
			if check.OK(t, err); !slices.Equal(devices, []uint64{2}) || !slices.Equal(f.v.Current(), []string{"near"}) {
				t.Errorf("the other disk answers, devices %v leave, and %v are current", devices, f.v.Current())
			}
		})
	}
}

// TestHangsAndIsRestored: as TestHangsAndOthersFail, and the object is restored to an older list meanwhile. The last list is written anew with the leg that fails, as
// it has all that was acknowledged.
func TestHangsAndIsRestored(t *testing.T) {
	for _, stuck := range []bool{true, false} {
		f := newObject(t, 3, "near", "far", "left")
		before := f.v.DeepCopy()
		f.leaves("left")
		check.OK(t, f.tellAll(t.Context(), f.v))
		before.ResourceVersion = f.v.ResourceVersion + "0"
		f.v = before
		ended, want := int64(7), []string{"near", "far"}
		view := func() *mirrorView {
			now := &mirrorView{v: f.v.DeepCopy(), s: mirror.State{Legs: []mirror.Leg{{Device: 1}, {Device: 2, Failed: true}}}, device: map[string]uint64{"near": 1, "far": 2},
				leg: map[uint64]string{1: "near", 2: "far"}, near: 1, failing: map[string]string{}, io: map[uint64]ioCounts{1: {1, ended}, 2: {0, 7}}}
			f.findFailed(now)
			return now
		}
		view()
		if stuck {
			f.stateOf("near").goesOnAt = time.Now().Add(-legSilence * f.options.LookEvery)
		} else {
			ended, want = 8, want[:1]
		}
		if check.OK(t, f.restoreList(t.Context(), view())); !slices.Equal(f.v.Current(), want) {
			t.Errorf("stuck %v: %v are current, and were to be %v", stuck, f.v.Current(), want)
		}
	}
}

// TestBusyForLong: somebody has the lock of a leg on its node for long, as the disk there hangs, for example. Each try to have it join waits for that, and has the
// lock of the volume meanwhile. Calls of the volume get that lock in between, and not only for a moment.
func TestBusyForLong(t *testing.T) {
	f := newObject(t, 1, "a", "b")
	const took = time.Minute
	check.OK(t, f.endJoin(t.Context(), &mirrorView{v: f.v.DeepCopy()}, "b", took, fmt.Errorf("%w: leg b", errdefs.ErrBusy)))
	if pause := time.Until(f.stateOf("b").retryAt); pause < took-time.Second {
		t.Errorf("a try that took %s is repeated after %s", took, pause)
	}
	check.OK(t, f.endJoin(t.Context(), &mirrorView{v: f.v.DeepCopy()}, "b", 0, errMirrorChanged))
	if pause := time.Until(f.stateOf("b").retryAt); pause > f.options.LookEvery {
		t.Errorf("a try that took no time is repeated after %s", pause)
	}
}

// TestDiskHangs: the disk of a leg hangs while its node answers. Writes go on without it.
func TestDiskHangs(t *testing.T) {
	f := newTended(t, 2, "a", "b")
	l := f.legs["b"]
	leg, disk := l.name, l.name+"-disk" // a device below: of dm-delay itself the kernel does not count what is delayed
	check.OK(t, dm.Make(disk, "", []dm.Line{{Length: tendedSize, Kind: "delay", Text: fmt.Sprint(dm.Number(l.disk), " 0 ", time.Hour.Milliseconds())}}))
	d, err := dm.Find(disk)
	check.OK(t, errors.Join(err, dm.Replace(leg, dm.Linear(d.Number, tendedSize))))
	l.name = disk
	t.Cleanup(func() {
		l.name = leg
		f.fails(l)
		drivertest.Run(t, "dmsetup", "remove", "--retry", disk)
	})
	write := f.write(0)
	f.delays("b")
	f.starts()
	f.ends(write, "what was written to the leg whose disk does not hang")
	f.current("a")
}

// has returns the first byte of a leg, from its disk.
func (f *tended) has(name string) byte {
	f.t.Helper()
	disk, err := direct.Open(fmt.Sprint("/dev/loop", unix.Minor(f.legs[name].disk)), os.O_RDONLY)
	check.OK(f.t, err)
	defer disk.Close()
	page, free, err := direct.Memory(4096)
	check.OK(f.t, err)
	defer free()
	_, err = disk.ReadAt(page, 0)
	check.OK(f.t, err)
	return page[0]
}

// eventually waits until is returns true.
func (f *tended) eventually(what string, is func(*mirrorView) bool) {
	f.t.Helper()
	for end := time.Now().Add(tendedPatience); ; time.Sleep(20 * time.Millisecond) {
		now := f.now()
		if is(now) {
			return
		}
		if time.Now().After(end) {
			f.t.Fatalf("not %s: %+v, %+v", what, now.s, now.v.Status.Legs)
		}
	}
}

// TestLastFailsFlushBeforeListed: all was copied to a second leg, which is not on the list yet, when the only current leg fails a flush, and then takes
// writes again. The next node that uses the volume has the current leg alone, so no write is acknowledged that this leg lacks.
func TestLastFailsFlushBeforeListed(t *testing.T) {
	f := newTended(t, 1, "a", "b")
	f.patches = func() error {
		return apierrors.NewServiceUnavailable("the API server is away")
	}
	f.joins("b")
	f.starts()
	time.Sleep(10 * f.options.LookEvery)
	f.flaky("a")
	file := f.file()
	flush := make(chan error, 1)
	go func() { flush <- file.Sync() }()
	f.noticed("a")
	f.mends("a")
	acknowledged := byte(0)
	for fill := byte(1); fill < 6; fill++ {
		done := make(chan error, 1)
		page, _, err := direct.Memory(4096)
		check.OK(t, err)
		page[0] = fill
		go func() {
			_, err := file.WriteAt(page, 0)
			done <- err
		}()
		select {
		case err := <-done:
			if err == nil {
				acknowledged = fill
			}
		case <-time.After(300 * time.Millisecond):
		}
	}
	if has := f.has("a"); has < acknowledged {
		t.Errorf("%d was acknowledged, and the only leg on the list, which is %v, has %d", acknowledged, f.now().v.Current(), has)
	}
	f.lost(flush)
}

// TestListedAndNotFinished: a driver has put a leg that joined on the list, and ended before it made that a leg of the mirror like the others. The next
// one finishes that, also if one of the two legs fails.
func TestListedAndNotFinished(t *testing.T) {
	for _, then := range []string{"", "cannot be flushed", "the other one is away"} {
		t.Run(then, func(t *testing.T) {
			f := newTended(t, 1, "a", "b")
			f.v.Status.Legs = append(f.v.Status.Legs, v1alpha1.Leg{Name: "b", Current: true, Sound: 1})
			f.legs["b"].state = volume.LegState{Sound: 1, Opened: 1, Boot: "1"}
			f.joins("b")
			f.eventually("equal", func(now *mirrorView) bool { return now.s.Equal() })
			wanted := []string{"a", "b"}
			switch then {
			case "cannot be flushed":
				f.noFlush("b")
				wanted = wanted[:1]
			case "the other one is away":
				f.v.Spec.Legs = []string{"b", "a"} // the near one is b
				f.silent("a", 0)
				wanted = wanted[1:]
			}
			f.starts()
			f.current(wanted...)
			f.eventually("finished", func(now *mirrorView) bool { return now.s.Joining == nil })
			f.ends(f.write(0), "a write")
		})
	}
}

// noFlush makes a leg fail flushes, and nothing else.
func (f *tended) noFlush(name string) {
	l := f.legs[name]
	check.OK(f.t, dm.Replace(l.name, []dm.Line{{Length: tendedSize, Kind: "linear", Text: dm.Number(l.disk) + " 0"}, {Start: tendedSize, Length: 4096, Kind: "flakey", Text: dm.Number(l.disk) + " 0 0 1"}}))
}

// TestCannotBeFlushed: a leg that joins cannot be flushed, while nobody writes. It leaves the mirror, is tried again after longer and longer pauses, and
// the object says why. Once it can be flushed it becomes current.
func TestCannotBeFlushed(t *testing.T) {
	for _, names := range [][]string{{"a", "b"}, {"a", "c", "b"}} {
		t.Run(fmt.Sprint(len(names)-1), func(t *testing.T) {
			f := newTended(t, len(names)-1, names...)
			f.noFlush("b")
			var tries atomic.Int32
			f.marks = func(name string) error {
				if name == "b" {
					tries.Add(1)
				}
				return nil
			}
			f.legs["b"].state.Common, f.legs["a"].state.Common, f.legs["b"].state.Opened = "X", "X", 1
			f.joins("b")
			f.starts()
			f.eventually("out of the mirror", func(now *mirrorView) bool {
				leg := now.v.Leg("b")
				return now.s.Joining == nil && len(now.s.Legs) == len(names)-1 && leg != nil && !leg.Current && leg.State == v1alpha1.LegWaiting && strings.Contains(leg.Message, "could not be made durable")
			})
			f.ends(f.write(0), "a write")
			tries.Store(0)
			began, most := time.Now(), int32(4)
			time.Sleep(20 * f.options.LookEvery)
			n, took := tries.Load(), time.Since(began)
			for more := 20 * f.options.LookEvery; more < took; more *= 2 {
				most++
			}
			if n > 2*most { // each try asks for the marks twice
				t.Errorf("it was tried %d times in %s", n/2, took)
			}
			f.mends("b")
			f.eventually("current", func(now *mirrorView) bool {
				return len(now.v.Current()) == len(names) && now.s.Joining == nil && len(now.s.Legs) == len(names)
			})
		})
	}
}

// TestCurrentCannotBeFlushed: the driver flushes the current legs, as it records a common moment, and one of them fails that. A disk tells only once what it
// could not flush, and the next flush may be a user's. So the leg is taken off the list, also if its disk takes flushes again.
func TestCurrentCannotBeFlushed(t *testing.T) {
	f := newTended(t, 2, "a", "b")
	f.noFlush("b")
	f.changes = func(name string, s volume.LegState) error {
		if name == "b" && s.Common != "" {
			t.Error("a moment was recorded in which it was not flushed")
		}
		return nil
	}
	f.ends(f.write(0), "a write")
	f.starts()
	f.current("a")
	f.mends("b")
	f.changes = func(string, volume.LegState) error { return nil }
	f.current("a", "b")
}

// TestSingleIsNotFlushed: the driver does not flush the only leg of a volume: it would be told of what the disk has lost, and its users would not.
func TestSingleIsNotFlushed(t *testing.T) {
	f := newTended(t, 1, "a")
	var eras atomic.Int32
	f.begins = func(string) error {
		eras.Add(1)
		return nil
	}
	f.ends(f.write(0), "a write")
	f.starts()
	time.Sleep(20 * f.options.LookEvery)
	if n := eras.Load(); n > 0 {
		t.Errorf("%d common moments of a single leg were begun", n)
	}
}

// TestForgottenMeanwhile: a leg fails a flush, which the kernel would forget, while the reconciler of the mirror is busy: the API server does not answer it, for
// example. Nothing is acknowledged any more that the leg lacks, and the leg is taken off the list later.
func TestForgottenMeanwhile(t *testing.T) {
	f := newTended(t, 2, "a", "b")
	busy, begun := make(chan struct{}), make(chan struct{}, 1)
	f.looks = func() {
		select {
		case begun <- struct{}{}:
		default:
		}
		<-busy
	}
	f.starts()
	<-begun
	f.flaky("b")
	file := f.file()
	flush := make(chan error, 1)
	go func() { flush <- file.Sync() }()
	f.noticed("b")
	f.mends("b")
	f.eventually("held", func(now *mirrorView) bool { return now.s.Held })
	write := f.write(0)
	select {
	case err := <-write:
		t.Errorf("a write ended while a leg that failed was on the list: %v", err)
	case <-time.After(300 * time.Millisecond):
	}
	close(busy)
	f.current("a")
	f.ends(flush, "the flush")
	f.ends(write, "what was held")
}

// TestMarksOfWhatLeft: a leg joins by the marks of another one, which leaves the mirror or fails before. Then the first does not join.
func TestMarksOfWhatLeft(t *testing.T) {
	for how, want := range map[string]error{"leaves": errMirrorChanged, "fails a flush": errdefs.ErrUnavailable} {
		t.Run(how, func(t *testing.T) {
			f := newTended(t, 2, "b", "a", "c") // a is asked for its marks
			f.legs["c"].state = f.legs["b"].state
			f.v.Status.Legs = append(f.v.Status.Legs, v1alpha1.Leg{Name: "c", Sound: 1})
			now := f.now()
			f.begins = func(string) error {
				if how == "leaves" {
					check.OK(t, mirror.Leave(context.Background(), f.mirrorReconciler.name, f.legs["a"].number))
				} else {
					f.flaky("a")
					flush := make(chan error, 1)
					file := f.file()
					go func() { flush <- file.Sync() }()
					f.noticed("a")
					f.mends("a")
				}
				for range 5 {
					f.ends(f.write(0), "a write")
				}
				return nil
			}
			if err := f.joinLeg(context.Background(), now, "c", 0); !errors.Is(err, want) {
				t.Error("it joined by the marks of what is not in the mirror any more:", err)
			}
			s, err := mirror.Look(f.mirrorReconciler.name)
			check.OK(t, err)
			if s.Joining != nil {
				t.Errorf("it joins: %+v", s)
			}
		})
	}
}

// TestGrownMeanwhile: a leg is to be copied whole, and the volume grows before the copy begins. The leg does not join, as it would count as equal in the
// part that is new.
func TestGrownMeanwhile(t *testing.T) {
	f := newTended(t, 1, "a", "b")
	check.OK(t, mirror.Resize(t.Context(), f.mirrorReconciler.name, tendedSize/2))
	now := f.now()
	check.OK(t, mirror.Resize(t.Context(), f.mirrorReconciler.name, tendedSize))
	if err := f.joinLeg(t.Context(), now, "b", 0); !errors.Is(err, errMirrorChanged) {
		t.Error("it joined a mirror that has grown:", err)
	}
	if s := f.now().s; s.Joining != nil {
		t.Errorf("it joins: %+v", s)
	}
}

// takenOut shows that a leg that is to be one no more leaves the mirror, and is forgotten by the object only then. Its node ends what it exports of it, and
// writes go on.
func (f *tended) takenOut(name string) {
	f.t.Helper()
	f.starts()
	f.current("a", "b")
	f.eventually("without the leg", func(now *mirrorView) bool { return len(now.s.Legs) == 2 && now.v.Leg(name) == nil })
	f.fails(f.legs[name])
	f.ends(f.write(0), "what was written once the leg has left")
}

// TestTakenOutAndDelisted: a leg is to be one no more, and is taken off the list by a look beside a step, which does not take it out of the mirror. The
// object names it until it has left.
func TestTakenOutAndDelisted(t *testing.T) {
	f := newTended(t, 3, "a", "b", "c")
	f.v.Spec.Legs = []string{"a", "b"}
	f.dropSilent(t.Context())
	if now := f.now(); !slices.Equal(now.v.Current(), []string{"a", "b"}) || len(now.unknown()) > 0 {
		t.Errorf("%v are current, and the mirror has devices of no leg: %v", now.v.Current(), now.unknown())
	}
	closed := make(chan struct{}, 1)
	f.legs["c"].closes = func() {
		select {
		case closed <- struct{}{}:
		default:
		}
	}
	f.takenOut("c")
	select {
	case <-closed:
	case <-time.After(tendedPatience):
		t.Error("it is not given back to its node")
	}
}

// TestTakenOutAndUntold: the same, and the legs that stay cannot be told of the new list at first.
func TestTakenOutAndUntold(t *testing.T) {
	f := newTended(t, 3, "a", "b", "c")
	f.v.Spec.Legs = []string{"a", "b"}
	var told atomic.Int32
	f.changes = func(_ string, s volume.LegState) error {
		if s.List > 0 && s.Due == 0 && told.Add(1) == 1 {
			return fmt.Errorf("%w: not now", errdefs.ErrUnavailable)
		}
		return nil
	}
	f.takenOut("c")
	if told.Load() < 2 {
		t.Error("nobody was told of the list")
	}
}

// TestTakenOutAndOthersFail: a leg that is to be one no more takes what is written when the only other one fails. When that is back, and has everything, the
// first one leaves.
func TestTakenOutAndOthersFail(t *testing.T) {
	f := newTended(t, 2, "a", "b")
	f.v.Spec.Legs = []string{"a"}
	f.flaky("a")
	write := f.write(0)
	f.eventually("failed", func(now *mirrorView) bool { return len(now.s.Failed()) > 0 }) // else the leg that is to leave may have left before
	f.starts()
	f.ends(write, "what was written to the leg that is there")
	f.current("b")
	f.mends("a")
	f.current("a")
}

// TestPoolIsNotThere: the driver starts anew, and cannot open the pool that has the leg of this node, as the disk is dead. That leg leaves the mirror.
func TestPoolIsNotThere(t *testing.T) {
	f := newTended(t, 2, "a", "b")
	f.poolless = "a"
	f.fails(f.legs["a"])
	write := f.write(0)
	f.starts()
	f.ends(write, "what was written to the leg that is there")
	f.current("b")
}

// TestMirrorHasUnknown: the mirror has a device of no leg that the object names, as that was restored, or the driver before this one forgot it. It leaves.
func TestMirrorHasUnknown(t *testing.T) {
	f := newTended(t, 3, "a", "b", "c")
	f.v.Spec.Legs, f.v.Status.Legs = []string{"a", "b"}, f.v.Status.Legs[:2]
	f.takenOut("c")
}

// TestUnknownToWatch: the watch is behind the object, which names one more leg, that is current. That one does not leave.
func TestUnknownToWatch(t *testing.T) {
	f := newTended(t, 2, "a", "b")
	f.watched = f.v.DeepCopy()
	f.v.ResourceVersion += "1"
	f.watched.Spec.Legs, f.watched.Status.Legs = []string{"a"}, f.watched.Status.Legs[:1]
	cluster.SummarizeLegs(f.watched) // nothing is to be written, which would fail
	s, err := mirror.Look(f.mirrorReconciler.name)
	check.OK(t, err)
	if err := f.step(t.Context(), s); !errors.Is(err, errdefs.ErrBusy) {
		t.Error("it is not noticed:", err)
	}
	if s := f.now().s; len(s.Legs) != 2 {
		t.Errorf("it has left: %+v", s)
	}
}

// TestUnlistedByWatch: the watch is behind the object, in which a leg is current that it says waits, for the very reason for which the leg fails again. The
// leg does not leave before it is off the list, though there is nothing to write by the watch.
func TestUnlistedByWatch(t *testing.T) {
	f := newObject(t, 2, "a", "b")
	const why = "what was written to it, or read from it, failed"
	watched := f.v.DeepCopy()
	watched.Status.Legs[1] = v1alpha1.Leg{Name: "b", Sound: 1, State: v1alpha1.LegWaiting, Message: why, Since: new(metav1.Now().Rfc3339Copy())}
	cluster.SummarizeLegs(watched)
	now := &mirrorView{v: watched, s: mirror.State{Legs: []mirror.Leg{{Device: 1}, {Device: 2, Failed: true}}},
		device: map[string]uint64{"a": 1, "b": 2}, leg: map[uint64]string{1: "a", 2: "b"}, failing: map[string]string{"b": why}}
	f.v.ResourceVersion += "1"
	if devices, err := f.delist(t.Context(), now); !errors.Is(err, errdefs.ErrBusy) {
		t.Errorf("devices %v leave, %v", devices, err)
	}
	f.v.Status.Legs[1] = watched.Status.Legs[1] // now it is off the list
	watched.ResourceVersion = f.v.ResourceVersion
	if devices, err := f.delist(t.Context(), now); err != nil || !slices.Equal(devices, []uint64{2}) {
		t.Errorf("once the watch has caught up devices %v leave, %v", devices, err)
	}
}

// TestVolumeOfLegIsGone: a leg was to be one no more, and its Volume is deleted, when the driver starts anew. The object still names the leg in its status:
// one that has left the mirror, or one that is still there. The others are looked after all the same.
func TestVolumeOfLegIsGone(t *testing.T) {
	for _, mirrored := range []int{2, 3} {
		t.Run(fmt.Sprint(mirrored, " in the mirror"), func(t *testing.T) {
			f := newTended(t, mirrored, "a", "b", "c")
			f.v.Spec.Legs, f.v.Status.Legs = []string{"a", "b"}, append(f.v.Status.Legs[:2], v1alpha1.Leg{Name: "c", Sound: 1, State: v1alpha1.LegWaiting})
			f.note(f.v.Name, func(r *replica) { delete(r.legs, "c") })
			f.starts()
			f.fails(f.legs["c"])
			f.flaky("b")
			f.ends(f.write(0), "a write")
			f.mu.Lock()
			defer f.mu.Unlock()
			if now := f.v.Current(); !slices.Equal(now, []string{"a"}) {
				t.Errorf("%v are current", now)
			}
		})
	}
}

// TestNamesAnotherVolume: somebody has written the name of another volume, of this node or of another one, among those of the legs. It is no leg; the others are
// looked after all the same, and the volume can be closed.
func TestNamesAnotherVolume(t *testing.T) {
	f := newTended(t, 2, "a", "b")
	f.foreign = []string{"another volume"}
	f.v.Spec.Legs = append(f.v.Spec.Legs, "another volume")
	f.starts()
	f.fails(f.legs["b"])
	f.ends(f.write(0), "a write")
	f.current("a")
	check.OK(t, f.Close(t.Context(), f.ref, nil))
}

// TestJoinsAndIsUnknown: the leg that joins is none that the object names, as that was restored. It leaves, and the object gets no leg without a name.
func TestJoinsAndIsUnknown(t *testing.T) {
	f := newTended(t, 1, "a", "b")
	f.v.Spec.Legs = []string{"a"}
	f.joins("b")
	f.starts()
	for end := time.Now().Add(tendedPatience); ; time.Sleep(20 * time.Millisecond) {
		s, err := mirror.Look(f.mirrorReconciler.name)
		check.OK(t, err)
		if s.Joining == nil {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("it joins still: %+v", s)
		}
	}
	time.Sleep(10 * f.options.LookEvery)
	f.mu.Lock()
	defer f.mu.Unlock()
	if legs := f.v.Status.Legs; len(legs) != 1 || legs[0].Name != "a" {
		t.Errorf("its legs are %+v", legs)
	}
}

// TestNoEra: if the marks of a leg are not kept at a common moment, all of that leg counts as written since, even if marks are kept later.
func TestNoEra(t *testing.T) {
	f := newTended(t, 2, "a", "b")
	f.begins = func(name string) error {
		if name == "b" {
			return fmt.Errorf("%w: not here", errdefs.ErrUnsupported)
		}
		return nil
	}
	check.OK(t, f.recordCommon(context.Background(), f.now()))
	a, b := f.legs["a"].state, f.legs["b"].state
	if a.Common == "" || a.Common != b.Common || a.Era != 1<<20+7 || b.Era != volume.NoEra {
		t.Errorf("%+v, %+v", a, b)
	}
}

// TestHoldsDataWhenAsked: writes that were under way to a leg when its era began have ended before the leg is asked what holds data.
func TestHoldsDataWhenAsked(t *testing.T) {
	f := newTended(t, 1, "a", "b")
	l := f.legs["a"]
	check.OK(t, dm.Replace(l.name, []dm.Line{{Length: tendedSize, Kind: "delay", Text: dm.Number(l.disk) + " 0 2000"}}))
	write := f.write(0)
	f.delays("a")
	f.marks = func(name string) error {
		select {
		case err := <-write:
			write <- err
		case <-time.After(3 * time.Second / 2): // the writer may learn of the end later than the mirror; without that wait, the leg would be asked 1.9 s earlier
			if name == "a" {
				t.Error("it is asked while a write is under way")
			}
		}
		return nil
	}
	check.OK(t, f.joinLeg(context.Background(), f.now(), "b", 0))
	f.ends(write, "the write")
}

// opens opens the legs for a claim.
func (f *tended) opens(generation int64) error {
	f.mu.Lock()
	f.v.Spec.Claim.Generation = generation
	f.mu.Unlock()
	_, err := f.Open(context.Background(), "", f.mirrorReconciler.ref)
	return err
}

// TestPowerIsLost: a leg whose machine lost power while the volume was used is not chosen if another leg's did not; also if an earlier try to open the
// legs was cut short after it wrote the leg's record.
func TestPowerIsLost(t *testing.T) {
	f := newObject(t, 2, "a", "b")
	f.legs["a"].boot = "2"
	f.patches = func() error {
		return apierrors.NewConflict(schema.GroupResource{}, "tended", errors.New("it was changed"))
	}
	if err := f.opens(2); !errors.Is(err, errdefs.ErrBusy) {
		t.Fatal(err)
	}
	f.patches = func() error { return nil }
	check.OK(t, f.opens(2))
	if now := f.v.Current(); !slices.Equal(now, []string{"b"}) {
		t.Errorf("%v are current, not the one that kept its power", now)
	}

	f.v.Status.Legs = []v1alpha1.Leg{{Name: "a", Current: true}, {Name: "b"}} // a person names it alone as current
	check.OK(t, f.opens(3))
	if a := f.legs["a"].state; a.Boot != "2" || !slices.Equal(f.v.Current(), []string{"a"}) {
		t.Errorf("it is used, and is %+v", a)
	}
}

// TestReadsAreKept: the user of a volume has died. The leg that it read from is chosen: it has what was read, though it may not have been acknowledged.
func TestReadsAreKept(t *testing.T) {
	for reads, want := range map[string]string{"": "a", "a": "a", "b": "b", "not current": "a"} {
		f := newObject(t, 2, "a", "b", "not current")
		f.v.Status.Reads = reads
		check.OK(t, f.opens(2))
		if now := f.v.Current(); !slices.Equal(now, []string{want}) || f.v.Status.Reads != want {
			t.Errorf("leg %q was read: %v are current, and %q is read", reads, now, f.v.Status.Reads)
		}
	}
}

// TestOlderCopyOfWhenItWasUsed: a volume was closed, and then the disk of the leg that was read is put back to a moment in which the volume was used by the same
// claim. The leg that is still closed is taken, which has what was written since.
func TestOlderCopyOfWhenItWasUsed(t *testing.T) {
	f := newObject(t, 2, "a", "b")
	f.legs["b"].state.Closed = true
	check.OK(t, f.opens(2))
	if now := f.v.Current(); !slices.Equal(now, []string{"b"}) {
		t.Errorf("%v are current", now)
	}
}

// TestReadsAnotherLeg: the leg that is read fails, and then the volume is read from another one.
func TestReadsAnotherLeg(t *testing.T) {
	f := newObject(t, 3, "a", "b", "c")
	f.v.Status.Reads = "a"
	for _, step := range []struct{ fails, reads string }{{"c", "a"}, {"a", "b"}} {
		now := &mirrorView{v: f.v, device: map[string]uint64{}, leg: map[uint64]string{}, failing: map[string]string{step.fails: "it has failed"}}
		for i, name := range f.v.Spec.Legs {
			now.device[name], now.leg[uint64(i+1)] = uint64(i+1), name
			now.s.Legs = append(now.s.Legs, mirror.Leg{Device: uint64(i + 1)})
		}
		if _, err := f.delist(t.Context(), now); err != nil || f.v.Status.Reads != step.reads {
			t.Errorf("%s has failed, and %q is read, not %s: %v", step.fails, f.v.Status.Reads, step.reads, err)
		}
	}
}

// TestSilentLeg: a leg whose node is gone, and so answers nothing at all, is waited for during legPatience if another leg is open, and longer if none is.
func TestSilentLeg(t *testing.T) {
	f := newObject(t, 2, "a", "b")
	f.legs["b"].away, f.legs["b"].silent = true, true
	began := time.Now()
	check.OK(t, f.opens(2))
	if took, least := time.Since(began), legPatience*f.options.LookEvery; took < least || took > 20*least {
		t.Errorf("it took %v, not somewhat more than %v", took, least)
	}
	if now := f.v.Current(); !slices.Equal(now, []string{"a"}) {
		t.Errorf("%v are current, not the one that answers", now)
	}

	f.legs["a"].away, f.legs["a"].silent = true, true
	ctx, cancel := context.WithTimeout(context.Background(), 3*legPatience*f.options.LookEvery)
	defer cancel()
	f.v.Spec.Claim.Generation = 3
	if _, err := f.Open(ctx, "", f.mirrorReconciler.ref); err == nil || ctx.Err() == nil {
		t.Errorf("the only one is not waited for: %v", err)
	}
}

// TestOwnDiskHangs: the disk of the next user's own node does not answer while the volume is opened there. The object says which one, and what to do, until the
// volume was opened.
func TestOwnDiskHangs(t *testing.T) {
	f := newObject(t, 2, "near", "far")
	f.legs["near"].hangs = make(chan struct{})
	opened := make(chan error, 1)
	go func() { opened <- f.opens(2) }()
	waits := func() string {
		f.mu.Lock()
		defer f.mu.Unlock()
		return f.v.Waiting()
	}
	for end := time.Now().Add(tendedPatience); waits() == ""; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Error("nobody is told that the disk hangs")
			break
		}
	}
	if text := waits(); !strings.Contains(text, "replica near") || !strings.Contains(text, "power that node off") {
		t.Errorf("it says %q", text)
	}
	close(f.legs["near"].hangs)
	if err := <-opened; err != nil && !errors.Is(err, errdefs.ErrBusy) { // the object was changed meanwhile
		t.Error(err)
	}
	check.OK(t, f.opens(2))
	time.Sleep(2 * openSilence * f.options.LookEvery)
	if text := waits(); text != "" || len(f.v.Current()) == 0 {
		t.Errorf("the disk answers, %v are current, and it says %q", f.v.Current(), text)
	}
}

// TestOwnDiskHangsAsItJoins: as TestOwnDiskHangs, while the volume is used by means of another leg, and the one of this node is to join.
func TestOwnDiskHangsAsItJoins(t *testing.T) {
	f := newObject(t, 1, "far", "near")
	f.v.Spec.Legs = []string{"near", "far"}
	f.legs["near"].hangs = make(chan struct{})
	now := &mirrorView{v: f.v.DeepCopy(), s: mirror.State{Legs: []mirror.Leg{{Device: 1}}}, leg: map[uint64]string{1: "far"}, device: map[string]uint64{"far": 1}}
	ended := make(chan struct{})
	go func() { _ = f.joinLeg(t.Context(), now, "near", 0); close(ended) }() // without the kernel's mirror it fails in the end
	why := func() string {
		f.mu.Lock()
		defer f.mu.Unlock()
		if leg := f.v.Leg("near"); leg != nil {
			return leg.Message
		}
		return ""
	}
	for end := time.Now().Add(tendedPatience); why() == "" && time.Now().Before(end); {
		time.Sleep(10 * time.Millisecond)
	}
	f.mu.Lock()
	if text := f.v.Waiting(); text != "" {
		t.Errorf("its users go on, and it says %q", text)
	}
	f.mu.Unlock()
	if text := why(); !strings.Contains(text, "its disk has not answered") {
		t.Errorf("it says %q", text)
	}
	close(f.legs["near"].hangs)
	<-ended
}

// TestOpenAsTimeEnds: the caller's time ends as the last leg opens, or no leg is current. The volume is not open then, and the error says why.
func TestOpenAsTimeEnds(t *testing.T) {
	f := newObject(t, 2, "a", "b")
	ctx, cancel := context.WithCancel(t.Context())
	f.openings = cancel
	if _, err := f.Open(ctx, "", f.mirrorReconciler.ref); !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("as its time ends: %v", err)
	}
	f.v.Status.Legs = nil
	if _, err := f.Open(t.Context(), "", f.mirrorReconciler.ref); !errors.Is(err, errdefs.ErrDataLoss) {
		t.Errorf("without a list: %v", err)
	}
}

// TestRecordWhereOneIsSilent: the record of a volume is known as soon as one current leg answers, even if the first one on the list answers nothing at
// all.
func TestRecordWhereOneIsSilent(t *testing.T) {
	f := newObject(t, 3, "a", "b", "c", "near")
	f.v.Spec.Legs = []string{"near", "a", "b", "c"}
	f.legs["a"].silent, f.legs["b"].news, f.legs["c"].news = true, 1, 1
	f.legs["b"].labels["format"], f.legs["c"].labels["format"] = "formatted:ext4", "formatted:ext4"
	began := time.Now()
	record, err := f.Record(context.Background(), "", f.mirrorReconciler.ref)
	check.OK(t, err)
	if took := time.Since(began); took >= homeTime || record.Labels["format"] != "formatted:ext4" {
		t.Errorf("after %v it is %+v", took, record)
	}
	f.legs["b"].silent, f.legs["c"].silent = true, true
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	if _, err := f.currentLeg(ctx, f.v); !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("none answers: %v", err)
	}
}

// TestOlderList: a restored object lists a leg that was away during the last claim. It is not chosen.
func TestOlderList(t *testing.T) {
	f := newObject(t, 2, "a", "b")
	f.legs["a"].state = volume.LegState{Sound: 1, Opened: 1, Closed: true}
	f.legs["b"].state = volume.LegState{Sound: 2, Opened: 2, Closed: true}
	check.OK(t, f.opens(3))
	if now := f.v.Current(); !slices.Equal(now, []string{"b"}) {
		t.Errorf("%v are current, not the one of the last claim", now)
	}
}

// TestLabelsWhileOneJoins: the labels of a volume change after a leg has begun to join, and before it is current. It gets the new ones.
func TestLabelsWhileOneJoins(t *testing.T) {
	f := newTended(t, 1, "a", "b")
	_, err := f.SetLabels(context.Background(), "", f.mirrorReconciler.ref, func(labels map[string]string) error {
		labels["format"] = "formatting"
		return nil
	})
	check.OK(t, err)
	check.OK(t, f.joinLeg(context.Background(), f.now(), "b", 0))
	_, err = f.SetLabels(context.Background(), "", f.mirrorReconciler.ref, func(labels map[string]string) error {
		labels["format"] = "formatted:ext4"
		return nil
	})
	check.OK(t, err)
	f.starts()
	f.current("a", "b")
	f.mu.Lock()
	defer f.mu.Unlock()
	if have := f.legs["b"].labels["format"]; have != "formatted:ext4" {
		t.Errorf("the leg that joined says of what it carries %q", have)
	}
}

// TestLastEndsWhileOneJoins: the connection to the only current leg ends while another one joins. Writers get an error, as without the other leg, and the
// mirror can be removed.
func TestLastEndsWhileOneJoins(t *testing.T) {
	f := newTended(t, 1, "far", "near")
	f.v.Spec.Legs = []string{"near", "far"}
	f.slowly("near", tendedSize)
	f.starts()
	f.mu.Lock()
	f.legs["far"].ended = true
	f.mu.Unlock()
	f.fails(f.legs["far"])
	f.lost(f.write(0))
}

// slowly makes a leg join the mirror, which takes seconds: length bytes from the beginning on are copied.
func (f *tended) slowly(name string, length int64) {
	f.t.Helper()
	l := f.legs[name]
	check.OK(f.t, dm.Replace(l.name, []dm.Line{{Length: tendedSize, Kind: "delay", Text: dm.Number(l.disk) + " 0 500"}}))
	check.OK(f.t, mirror.Join(context.Background(), f.mirrorReconciler.name, l.number, func(context.Context) ([]dm.Range, error) { return []dm.Range{{Length: length}}, nil }))
}

// TestLastFailsWhileOneJoins: all current legs fail writes while another one joins. Writers get an error, and the other leg does not become current.
func TestLastFailsWhileOneJoins(t *testing.T) {
	for _, names := range [][]string{{"near", "far"}, {"near", "far", "joins"}} {
		t.Run(fmt.Sprint(len(names)-1), func(t *testing.T) {
			f := newTended(t, len(names)-1, names...)
			f.slowly(names[len(names)-1], tendedSize/2)
			for _, name := range names[:len(names)-1] {
				f.flaky(name)
			}
			f.starts()
			f.lost(f.write(tendedSize - 4096))
		})
	}
}

// TestLastCannotBeRead: a part of the only current leg cannot be read while another one joins. Writes go on, and the other leg leaves.
func TestLastCannotBeRead(t *testing.T) {
	f := newTended(t, 1, "near", "far")
	l := f.legs["near"]
	const bad = 1 << 20
	check.OK(t, dm.Replace(l.name, []dm.Line{{Length: bad, Kind: "error"}, {Start: bad, Length: tendedSize - bad, Kind: "linear", Text: fmt.Sprint(dm.Number(l.disk), " ", bad/512)}}))
	f.slowly("far", tendedSize)
	f.marks = func(string) error { return fmt.Errorf("%w: what was written is not known", errdefs.ErrDataLoss) } // so all is copied when it tries again
	f.starts()
	for end := time.Now().Add(tendedPatience); ; time.Sleep(20 * time.Millisecond) {
		now := f.now()
		if leg := now.v.Leg("far"); now.s.Joining == nil && leg != nil && strings.Contains(leg.Message, "cannot be read") {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("it still joins: %+v, %+v", now.s, now.v.Leg("far"))
		}
	}
	f.ends(f.write(tendedSize-4096), "what is written")
	f.current("near")
}

// unreadable makes a part of a leg fail reads, and nothing else.
func (f *tended) unreadable(name string, at, length int64) {
	l := f.legs[name]
	bad := l.name + "-bad"
	check.OK(f.t, dm.Make(bad, "", []dm.Line{{Length: tendedSize, Kind: "error"}}))
	f.t.Cleanup(func() { drivertest.Run(f.t, "dmsetup", "remove", "--retry", bad) })
	f.t.Cleanup(func() { f.mends(name) })
	d, err := dm.Find(bad)
	check.OK(f.t, err)
	linear := func(from, to int64) dm.Line {
		return dm.Line{Start: from, Length: to - from, Kind: "linear", Text: fmt.Sprint(dm.Number(l.disk), " ", from/512)}
	}
	table := []dm.Line{linear(0, at), {Start: at, Length: length, Kind: "delay", Text: fmt.Sprintf("%s %d 0 %s %[2]d 0", dm.Number(d.Number), at/512, dm.Number(l.disk))}, linear(at+length, tendedSize)}
	check.OK(f.t, dm.Replace(l.name, table))
}

// TestEachCannotBeReadSomewhere: each leg has a part that cannot be read, and both were found before the driver looked: the kernel reads neither of them any
// more. One leg stays, and all else of it can be read.
func TestEachCannotBeReadSomewhere(t *testing.T) {
	const one, other = 4 << 20, 8 << 20
	f := newTended(t, 2, "near", "far")
	f.unreadable("near", one, 4096)
	f.unreadable("far", other, 4096)
	check.OK(t, f.read(one)) // the far leg has it
	_ = f.read(other)
	if s := f.now().s; len(s.Failed()) != 2 {
		t.Fatalf("not both have failed: %+v", s)
	}
	if err := f.read(0); err == nil {
		t.Fatal("this kernel reads them all the same")
	}
	f.marks = func(string) error { return fmt.Errorf("%w: what was written is not known", errdefs.ErrUnavailable) } // so it does not join at once
	f.starts()
	f.current("near")
	check.OK(t, f.read(0))
	f.ends(f.write(one), "a write")
}

// TestOneCannotBeReadOneWritten: a leg has failed reads of one part, and the other one a write, before the driver looked. The first has everything that was
// acknowledged, and stays.
func TestOneCannotBeReadOneWritten(t *testing.T) {
	const one, other = 4 << 20, 8 << 20
	f := newTended(t, 2, "near", "far")
	f.unreadable("near", one, 4096)
	check.OK(t, f.read(one)) // the far leg has it
	f.fails(f.legs["far"])
	_ = f.write(other) // it ends with an error, as no leg is whole
	f.eventually("both have failed", func(now *mirrorView) bool { return len(now.s.Failed()) == 2 })
	f.starts()
	f.current("near")
	check.OK(t, f.read(0))
	f.ends(f.write(other), "another write")
}

// TestAllEnd: a leg has failed a write, which is held, and then the connections to all legs end. The writer gets an error.
func TestAllEnd(t *testing.T) {
	f := newTended(t, 2, "far", "away", "near")
	f.v.Spec.Legs = []string{"near", "far", "away"}
	f.fails(f.legs["far"])
	write := f.write(0)
	f.noticed("far")
	f.mu.Lock()
	f.legs["far"].ended, f.legs["away"].ended = true, true
	f.mu.Unlock()
	f.fails(f.legs["away"])
	f.starts()
	f.lost(write)
}

// lost shows that a write or flush ends with an error, and that the list of current legs does not change.
func (f *tended) lost(done chan error) {
	f.t.Helper()
	before := f.now().v.Current()
	select {
	case err := <-done:
		if !errors.Is(err, unix.EIO) {
			f.t.Errorf("what was written ended with %v", err)
		}
	case <-time.After(tendedPatience):
		f.t.Error("what was written still waits")
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if current := f.v.Current(); len(before) == 0 || !slices.Equal(current, before) {
		f.t.Errorf("%v are current, and were %v", current, before)
	}
}
