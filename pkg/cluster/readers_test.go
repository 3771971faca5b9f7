package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/store"
	"github.com/ashlar-csi/ashlar/pkg/controller"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// ExportToRead is not used by these tests: no node opens a volume over the port.
func (g *given) ExportToRead(context.Context, volume.ID, volume.Grant) (volume.Exported, error) {
	return volume.Exported{}, errdefs.ErrUnsupported
}

func (g *given) IsReader(_ context.Context, id volume.ID, to volume.Grant) (bool, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Contains(g.readers[id], to.Generation), nil
}

func (g *given) Readers(_ context.Context, id volume.ID) ([]int64, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Clone(g.readers[id]), nil
}

func (g *given) EndReadingHere(context.Context, volume.ID) error { return nil }

func (g *given) EndReaders(_ context.Context, id volume.ID, keep func(int64) bool) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.stuck == nil {
		g.readers[id] = slices.DeleteFunc(g.readers[id], func(n int64) bool { return !keep(n) })
	}
	return g.stuck
}

// reads exports a volume to a reader, as the agent does when a node opens it.
func (w *environment) reads(g *given, name string, to volume.Grant) {
	w.Helper()
	o := w.object(name)
	g.mu.Lock() // before the status is written, as the agent removes exports from it that do not exist
	if g.readers == nil {
		g.readers = map[volume.ID][]int64{}
	}
	g.readers[cluster.VolumeID(o)] = append(g.readers[cluster.VolumeID(o)], to.Generation)
	g.mu.Unlock()
	before := o.DeepCopy()
	o.Status.Readers = append(o.Status.Readers, v1alpha1.Export{Generation: to.Generation, Node: to.Node})
	check.OK(w, w.Status().Patch(w.ctx, o, client.MergeFrom(before)))
}

func manyOn(node string) volume.Claim {
	return volume.Claim{Node: node, Mode: "mount,MULTI_NODE_READER_ONLY"}
}

// readersOf returns the claims of the readers of a volume, as NODE GENERATION, sorted. It shows that its labels name the same nodes.
func (w *environment) readersOf(name string) (all []string) {
	w.Helper()
	o := w.object(name)
	for _, c := range o.Spec.Readers {
		all = append(all, fmt.Sprint(c.Node, " ", c.Generation))
		if _, labelled := o.Labels[v1alpha1.ReaderLabel(c.Node)]; !labelled {
			w.Errorf("volume %s has no label for its reader %s", name, c.Node)
		}
	}
	if len(o.Labels) != len(all) {
		w.Errorf("volume %s is read by %v, and has the labels %v", name, all, o.Labels)
	}
	slices.Sort(all)
	return all
}

// TestManyReaders: many nodes can read a volume at once, its home too. While they do it cannot be claimed for writing, and while it is, not for reading.
func TestManyReaders(t *testing.T) {
	w := newEnvironment(t)
	a, home := w.networked("node-a", "storage")
	b, _ := w.networked("node-b", "storage")
	c, _ := w.networked("node-c", "storage")
	alone, _ := w.networked("node-d", "")
	s := w.knowing(a, b, c, alone)
	v, err := s.Create(w.ctx, anyNode("v", a.name))
	check.OK(t, err)

	check.OK(t, second(s.Claim(w.ctx, v.ID, on(b.name))))
	for _, node := range []string{a.name, c.name} {
		fails(t, second(s.Claim(w.ctx, v.ID, manyOn(node))), errdefs.ErrInUse)
	}
	fails(t, second(s.Claim(w.ctx, v.ID, manyOn(b.name))), errdefs.ErrExists)
	check.OK(t, s.Release(w.ctx, v.ID, b.name))

	for _, node := range []string{c.name, a.name, b.name} {
		for range 2 {
			check.OK(t, second(s.Claim(w.ctx, v.ID, manyOn(node))))
		}
	}
	if have := w.readersOf("v"); !slices.Equal(have, []string{"node-a 3", "node-b 4", "node-c 2"}) {
		t.Errorf("read by %v", have)
	}
	if err := second(s.Claim(w.ctx, v.ID, manyOn(alone.name))); !errors.Is(err, errdefs.ErrPrecondition) || !strings.Contains(err.Error(), "in no network") {
		t.Errorf("read on a node in no network: %v", err)
	}
	for _, node := range []string{a.name, b.name} {
		fails(t, second(s.Claim(w.ctx, v.ID, on(node))), errdefs.ErrExists)
	}
	fails(t, second(s.Claim(w.ctx, v.ID, volume.Claim{Node: alone.name, Mode: "mount,SINGLE_NODE_READER_ONLY"})), errdefs.ErrInUse)
	fails(t, s.Delete(w.ctx, v.ID), errdefs.ErrInUse)
	listed, err := controller.New(s).ListVolumes(w.ctx, &csi.ListVolumesRequest{})
	check.OK(t, err)
	if nodes := listed.GetEntries()[0].GetStatus().GetPublishedNodeIds(); len(nodes) != 3 {
		t.Errorf("published on %v", nodes)
	}

	// A release waits until the home has ended the export to that reader; the others stay.
	w.reads(home, "v", volume.Grant{Generation: 4, Node: b.name})
	w.reads(home, "v", volume.Grant{Generation: 2, Node: c.name})
	home.fail(fmt.Errorf("%w: the target hangs", errdefs.ErrUnavailable))
	w.waits(func() error { return s.Release(soon(t), v.ID, b.name) }, "to end what it gives to node node-b (claim 4)")
	home.fail(nil)
	check.OK(t, s.Release(w.ctx, v.ID, b.name))
	if left, _ := home.Readers(w.ctx, v.ID); !slices.Equal(left, []int64{2}) {
		t.Errorf("it is given to %v", left)
	}
	if have := w.readersOf("v"); !slices.Equal(have, []string{"node-a 3", "node-c 2"}) {
		t.Errorf("read by %v", have)
	}
	check.OK(t, s.Release(w.ctx, v.ID, ""))
	if o := w.object("v"); o.IsUsed() || len(w.readersOf("v")) > 0 {
		t.Errorf("released, it is %+v, %+v", o.Spec, o.Status.Readers)
	}
	check.OK(t, second(s.Claim(w.ctx, v.ID, on(c.name))))
	if have := w.generation("v"); have != 5 {
		t.Errorf("claimed with generation %d", have)
	}
	check.OK(t, s.Release(w.ctx, v.ID, c.name))
	check.OK(t, s.Delete(w.ctx, v.ID))
}

// TestManyReadersAway: a reader that the home does not answer writes that into its own entry of the status, and takes it off later. It changes nothing
// else of the status.
func TestManyReadersAway(t *testing.T) {
	w := newEnvironment(t)
	a, home := w.networked("node-a", "storage")
	b, _ := w.networked("node-b", "storage")
	c, _ := w.networked("node-c", "storage")
	s := w.knowing(a, b, c)
	v, err := s.Create(w.ctx, anyNode("v", a.name))
	check.OK(t, err)
	for i, m := range []*machine{b, c} {
		check.OK(t, second(s.Claim(w.ctx, v.ID, manyOn(m.name))))
		w.reads(home, "v", volume.Grant{Generation: int64(i + 1), Node: m.name})
	}
	var cut atomic.Bool
	at := time.Now().Add(-time.Hour).Truncate(time.Second)
	ctx, stop := context.WithCancel(w.ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		b.agent.ReportAway(ctx, func() (map[blockdev.Ref]time.Time, error) {
			if !cut.Load() {
				return nil, nil
			}
			return map[blockdev.Ref]time.Time{ref(v): at}, nil
		}, 50*time.Millisecond)
	}()
	t.Cleanup(func() { stop(); <-done })
	says := func(node string) (since *metav1.Time) {
		for _, e := range w.object("v").Status.Readers {
			if e.Node == node {
				since = e.Away
			}
		}
		return since
	}
	for _, is := range []bool{true, false, true} {
		cut.Store(is)
		w.eventually(fmt.Sprint("its reader says that the home is away: ", is), func() bool { return (says(b.name) != nil) == is })
		if since := says(b.name); is && !since.Time.Equal(at) {
			t.Errorf("the home is away since %v, want %v", since, at)
		}
		if since := says(c.name); since != nil {
			t.Errorf("of another reader it says that the home is away since %v", since)
		}
	}
	w.touched("v") // so that its home writes the status, too
	time.Sleep(200 * time.Millisecond)
	if o := w.object("v"); len(o.Status.Readers) != 2 || o.Status.Export != nil || says(b.name) == nil {
		t.Errorf("it is given to %+v, %+v", o.Status.Export, o.Status.Readers)
	}
	check.OK(t, s.Release(w.ctx, v.ID, b.name)) // the home has ended the export, whatever its reader reports
	if o := w.object("v"); len(o.Status.Readers) != 1 || says(c.name) != nil {
		t.Errorf("released, it is given to %+v", o.Status.Readers)
	}
	check.OK(t, s.Release(w.ctx, v.ID, ""))
	check.OK(t, s.Delete(w.ctx, v.ID))
}

// TestManyReadersRace: if a volume is claimed for one writer and for several readers at once, by two controllers, either the writer gets it or all readers
// do.
func TestManyReadersRace(t *testing.T) {
	w := newEnvironment(t)
	a, _ := w.networked("node-a", "storage")
	b, _ := w.networked("node-b", "storage")
	c, _ := w.networked("node-c", "storage")
	stores := []*store.Store{w.knowing(a, b, c), w.knowing(a, b, c)}
	v, err := stores[0].Create(w.ctx, anyNode("v", a.name))
	check.OK(t, err)
	for range 10 {
		claims := []volume.Claim{on(a.name), manyOn(b.name), manyOn(c.name)}
		won := make([]error, len(claims))
		var all sync.WaitGroup
		for i, claim := range claims {
			all.Go(func() { won[i] = second(stores[i%2].Claim(w.ctx, v.ID, claim)) })
		}
		all.Wait()
		if one, many := won[0] == nil, won[1] == nil && won[2] == nil; one == many || one && (won[1] == nil || won[2] == nil) {
			t.Fatalf("%v", won)
		}
		check.OK(t, stores[0].Release(w.ctx, v.ID, ""))
	}
}

// TestManyReadersRefused: encrypted volumes, and volumes of one node, cannot have several readers; and a new volume that is only to be read by many is
// refused.
func TestManyReadersRefused(t *testing.T) {
	w := newEnvironment(t)
	a, _ := w.networked("node-a", "storage")
	b, _ := w.networked("node-b", "storage")
	s := w.knowing(a, b)
	v, err := s.Create(w.ctx, anyNode("v", a.name))
	check.OK(t, err)
	secret := cluster.VolumeNamed(volume.KeyOf("secret")) // only its object: no node here can encrypt
	secret.Spec = w.object("v").Spec
	secret.Spec.Name, secret.Spec.Encryption, secret.Spec.Make = "secret", string(volume.LUKS2), false
	check.OK(t, w.Create(w.ctx, secret))
	before := secret.DeepCopy()
	secret.Status.Created, secret.Status.Encryption = w.object("v").Status.Created, string(volume.LUKS2)
	check.OK(t, w.Status().Patch(w.ctx, secret, client.MergeFrom(before)))
	w.eventually("the store knows it", func() bool { return second(s.Get(w.ctx, cluster.VolumeID(secret))) == nil })
	if err := second(s.Claim(w.ctx, cluster.VolumeID(secret), manyOn(b.name))); !errors.Is(err, errdefs.ErrPrecondition) || !strings.Contains(err.Error(), "encrypted") {
		t.Errorf("many read what is encrypted: %v", err)
	}

	many := []*csi.VolumeCapability{{AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY}}}
	for parameters, why := range map[string]string{"access": "nobody could ever write", "access encryption": "one node at a time"} {
		r := &csi.CreateVolumeRequest{Name: "x", VolumeCapabilities: many, Parameters: map[string]string{"access": "any"}}
		if strings.Contains(parameters, "encryption") {
			r.Parameters["encryption"] = "luks2"
			r.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: v.ID.String()}}}
		}
		if _, err := controller.New(s).CreateVolume(w.ctx, r); !errors.Is(err, errdefs.ErrInvalid) || !strings.Contains(err.Error(), why) {
			t.Errorf("%s: %v", parameters, err)
		}
	}

	// A volume of one node has an ordinary claim.
	own, err := s.Create(w.ctx, volume.Spec{Name: "own", Size: volume.Range{Required: mib}, Nodes: []string{a.name}})
	check.OK(t, err)
	check.OK(t, second(s.Claim(w.ctx, own.ID, manyOn(a.name))))
	if o := w.object("own"); o.Spec.Claim == nil || o.Spec.Readers != nil {
		t.Errorf("claimed as %+v", o.Spec)
	}
}

// TestReadersHeld: the definition of Volumes refuses readers beside a writer, readers of a volume of one node or of one that moves, readers that are not
// counted, and too many of them.
func TestReadersHeld(t *testing.T) {
	w := newEnvironment(t)
	a, _ := w.networked("node-a", "storage")
	b, _ := w.networked("node-b", "storage")
	s := w.knowing(a, b)
	v, err := s.Create(w.ctx, anyNode("v", a.name))
	check.OK(t, err)
	_, err = s.Create(w.ctx, volume.Spec{Name: "own", Size: volume.Range{Required: mib}, Nodes: []string{a.name}})
	check.OK(t, err)
	reader := v1alpha1.Claim{Node: b.name, Mode: manyOn("").Mode, Generation: 1}
	for what, is := range map[string]struct {
		of   string
		edit func(*v1alpha1.VolumeSpec)
	}{
		"beside a claim": {"v", func(s *v1alpha1.VolumeSpec) {
			s.Claims, s.Claim, s.Readers = 2, &v1alpha1.Claim{Node: a.name, Mode: "m", Generation: 2}, []v1alpha1.Claim{reader}
		}},
		"not counted": {"v", func(s *v1alpha1.VolumeSpec) { s.Readers = []v1alpha1.Claim{reader} }},
		"of a later generation": {"v", func(s *v1alpha1.VolumeSpec) {
			s.Claims, s.Readers = 1, []v1alpha1.Claim{{Node: b.name, Mode: "m", Generation: 2}}
		}},
		"of one node": {"own", func(s *v1alpha1.VolumeSpec) { s.Readers = []v1alpha1.Claim{reader} }},
		"of one that moves": {"v", func(s *v1alpha1.VolumeSpec) {
			s.Claims, s.Readers, s.NodeName, s.Move = 1, []v1alpha1.Claim{reader}, b.name, &v1alpha1.Move{Node: a.name, Left: true}
		}},
		"too many": {"v", func(s *v1alpha1.VolumeSpec) {
			s.Claims = 1
			for i := range v1alpha1.MostReaders + 1 {
				s.Readers = append(s.Readers, v1alpha1.Claim{Node: fmt.Sprint("n", i), Mode: "m", Generation: 1})
			}
		}},
	} {
		o := w.object(is.of)
		before := o.DeepCopy()
		is.edit(&o.Spec)
		if err := w.Patch(w.ctx, o, client.MergeFrom(before)); err == nil {
			t.Errorf("readers %s were taken", what)
		}
	}

	// A volume that is read does not move.
	check.OK(t, second(s.Claim(w.ctx, v.ID, manyOn(b.name))))
	o := w.object("v")
	if cluster.MayMove(o) || !o.IsUsed() {
		t.Errorf("it may move while it is read: %+v", o.Spec)
	}
	check.OK(t, s.Release(w.ctx, v.ID, b.name))
	check.OK(t, s.Delete(w.ctx, v.ID))
}

// TestReaderOpens: one of several readers opens a volume by its own claim, and cannot change its record. A volume that was never written to cannot be
// opened to be read, and such a call leaves no export.
func TestReaderOpens(t *testing.T) {
	w, a, b, s, v, _ := reached(t, volume.Spec{Name: "v", Size: volume.Range{Required: mib}})
	check.OK(t, second(s.Claim(w.ctx, v.ID, manyOn(b.name))))
	check.OK(t, second(s.Claim(w.ctx, v.ID, manyOn(a.name))))
	w.eventually("its agent knows of the claim", func() bool { return b.agent.Elsewhere(func(blockdev.Ref) bool { return false }).Has(v.ID) })
	if claim, known := b.agent.Claimed(w.ctx, v.ID, true); !known || claim.Node != b.name || claim.Generation != 1 {
		t.Errorf("claimed as %+v, known %v", claim, known)
	}
	home := w.homeOf(a, b)
	refused := func(why string, call func() error) {
		t.Helper()
		if err := call(); err == nil || !strings.Contains(err.Error(), why) {
			t.Errorf("error %v, want one that says %q", err, why)
		}
	}
	refused("nothing was ever written to it", func() error { return second(home.Open(w.ctx, v.ID, 1)) })
	refused("is not claimed for node", func() error { return second(home.Open(w.ctx, v.ID, 2)) }) // the claim of another node
	check.OK(t, second(home.Record(w.ctx, v.ID, 1)))
	refused("to be read, and so is its record", func() error {
		return second(home.SetLabels(w.ctx, v.ID, 1, nil, map[string]string{"format": ""}))
	})
	check.OK(t, home.Close(w.ctx, v.ID, 1, ""))
	check.OK(t, s.Release(w.ctx, v.ID, b.name))
	if o := w.object("v"); len(o.Status.Readers) != 0 || len(a.network.Exported()) != 0 || o.ClaimOf(a.name) == nil {
		t.Errorf("released, it is %+v, %+v", o.Spec, o.Status.Readers)
	}
	w.eventually("its agent knows that it is released", func() bool { return !b.agent.Elsewhere(func(blockdev.Ref) bool { return false }).Has(v.ID) })
	check.OK(t, s.Release(w.ctx, v.ID, a.name))
	check.OK(t, s.Delete(w.ctx, v.ID))
}
