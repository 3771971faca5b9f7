package volume_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/era"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/nvme"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/nvmet"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/remotepool"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/remotepool/remotetest"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// pair is a node that has volumes and a node that uses them, on one kernel: over the kernel's NVMe/TCP if it has that (real), else over remotetest.Network,
// which stands for it.
type pair struct {
	*testing.T
	home, user *volume.Local
	pool       blockdev.Pool // of the home
	remote     *remotepool.Pool
	kernel     remotepool.Kernel
	real       bool
	generation int64 // of the present claim of each volume
}

func newPair(t *testing.T) *pair {
	drivertest.NeedRoot(t)
	p := &pair{T: t, generation: 1, pool: pooltest.OpenedFiles(t, drivertest.Dir(t))}
	at := netip.MustParseAddrPort("127.0.0.1:4420")
	network := &remotetest.Network{}
	open := func() (volume.Exporter, error) { return network.Target(), nil }
	p.kernel = network
	if nvme.Available() == nil {
		p.real, p.kernel = true, remotepool.Host(false)
		open = func() (volume.Exporter, error) {
			return nvmet.Open(at)
		}
	}
	mounts, err := mount.LoadTable()
	check.OK(t, err)
	p.home, err = volume.NewLocal(t.Context(), "home", []blockdev.Pool{p.pool}, mounts, 0)
	check.OK(t, err)
	p.home.ServeExports(t.Context(), volume.Exporting{Boot: "1", Open: open, Key: bytes.Repeat([]byte{7}, 32), Locks: &keylock.Table{}})
	p.start()
	return p
}

// start starts the driver of the node that uses volumes, the first time or again.
func (p *pair) start() {
	p.Helper()
	mounts, err := mount.LoadTable()
	check.OK(p, err)
	p.remote = remotepool.New("user", p.kernel, p)
	p.user, err = volume.NewLocal(p.Context(), "user", []blockdev.Pool{p.remote}, mounts, 0)
	check.OK(p, err)
}

func id(pool string, ref blockdev.Ref) volume.ID {
	return volume.ID{Kind: ref.Kind, Pool: pool, Key: ref.Key}
}

func (p *pair) Claim(blockdev.Ref) (remotepool.Claim, bool) {
	return remotepool.Claim{Home: "home", Generation: p.generation}, true
}

func (p *pair) Open(ctx context.Context, pool string, ref blockdev.Ref) (remotepool.Export, error) {
	out, err := p.home.Export(ctx, id(pool, ref), volume.Grant{Generation: p.generation, Node: "user"})
	return remotepool.Export{Size: out.Size, Record: out.Record, Connection: nvme.Connection{NQN: out.NQN, Host: out.Host, Secret: out.Secret, UUID: out.UUID, Loss: -1,
		Address: netip.MustParseAddrPort("127.0.0.1:4420")}}, err
}

func (p *pair) Record(ctx context.Context, pool string, ref blockdev.Ref) (blockdev.Record, error) {
	return p.home.Record(ctx, id(pool, ref))
}

func (p *pair) SetLabels(ctx context.Context, pool string, ref blockdev.Ref, before, after map[string]string) (blockdev.Record, error) {
	return p.home.SwapLabels(ctx, id(pool, ref), before, after)
}

func (p *pair) Marks(ctx context.Context, pool string, ref blockdev.Ref, since uint32) ([]blockdev.Extent, error) {
	return p.home.Marks(ctx, id(pool, ref), since)
}

func (p *pair) BeginEra(ctx context.Context, pool string, ref blockdev.Ref) (uint32, error) {
	return p.home.BeginEra(ctx, id(pool, ref))
}

func (p *pair) Ended(_ context.Context, _ blockdev.Ref, generation int64) (bool, error) {
	return generation != p.generation, nil
}

func (p *pair) Close(ctx context.Context, ref blockdev.Ref, generation int64, _ string) error {
	return p.home.Unexport(ctx, id(p.pool.Name(), ref), generation)
}

// make makes a volume at home.
func (p *pair) make(name string, e volume.Encryption) volume.ID {
	p.Helper()
	v, err := p.home.Create(p.Context(), volume.Spec{Name: name, Size: volume.Range{Required: 32 << 20}, Filesystem: "ext4", Encryption: e, Access: volume.AccessAny})
	check.OK(p, err)
	return v.ID
}

// get returns a volume as the node that uses it sees it.
func (p *pair) get(id volume.ID) volume.Volume {
	p.Helper()
	v, err := p.user.Get(p.Context(), id)
	check.OK(p, err)
	return v
}

// bytes returns the bytes of a volume that is not used, as its home has them.
func (p *pair) bytes(id volume.ID) []byte {
	p.Helper()
	device := pooltest.Attach(p, p.pool, blockdev.Ref{Kind: id.Kind, Key: id.Key}, blockdev.Attachment{ReadOnly: true})
	all, err := os.ReadFile(device.Path)
	check.OK(p, errors.Join(err, device.Close()))
	return all
}

// unused detaches a volume from its consumer, and checks that then no device is left on either node, and no export.
func (p *pair) unused(id volume.ID) {
	p.Helper()
	check.OK(p, p.user.Detach(p.Context(), id))
	for _, l := range []*volume.Local{p.user, p.home} {
		if devices, err := l.Attached(p.Context(), id); err != nil || len(devices) > 0 {
			p.Errorf("on node %s %s is attached as %v, %v", l.Node(), id, devices, err)
		}
	}
	if _, is, err := p.home.ExportOf(p.Context(), id); err != nil || is {
		p.Errorf("%s is exported: %v", id, err)
	}
}

// gone waits until the consumer of a volume has found that its claim has ended, and is disconnected.
func (p *pair) gone(id volume.ID) {
	p.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(100 * time.Millisecond) {
		check.OK(p, p.remote.DropEnded(p.Context()))
		if connected, err := p.kernel.List("nqn.2026-11.dev.ashlar:" + id.Key); err != nil || len(connected) == 0 {
			check.OK(p, err)
			return
		}
		if time.Now().After(end) {
			p.Fatal("it stays connected")
		}
	}
}

// bare waits until no device is over that of a connection. A device goes a moment after its last user.
func (p *pair) bare(id volume.ID) {
	p.Helper()
	connected, err := p.kernel.List("nqn.2026-11.dev.ashlar:" + id.Key)
	check.OK(p, err)
	for _, c := range connected {
		over := func() (names []string) {
			entries, err := os.ReadDir(fmt.Sprintf("/sys/dev/block/%d:%d/holders", unix.Major(c.Number), unix.Minor(c.Number)))
			check.OK(p, err)
			for _, e := range entries {
				names = append(names, e.Name())
			}
			return names
		}
		if left := drivertest.Gone(over); len(left) > 0 {
			p.Fatalf("%v stays over %s", left, c.Path)
		}
	}
}

func writeSynced(path string, b []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	return errors.Join(err, f.Sync(), f.Close())
}

// TestLegIsLeft: the driver was killed when it had connected to a leg, before there was a mirror, and at its next start the home of the leg did not answer, so
// that the connection stayed. Nobody gets the leg by itself: the other legs would lack what is written to it.
func TestLegIsLeft(t *testing.T) {
	p := newPair(t)
	network, is := p.kernel.(*remotetest.Network)
	if !is {
		t.Skip("the kernel's own network cannot be cut")
	}
	id := p.make("v", volume.Encryption{})
	check.OK(t, p.home.SetReplicaOf(t.Context(), id, id.Key))
	local := func(name string) *volume.Local {
		return start(t, 0, memory.NewDisk(1<<30).Open(name, nil))
	}
	everywhere := func() *volume.Everywhere {
		e := volume.NewEverywhere(local("own"), p.user, usedElsewhere{})
		e.Replicate(local("replicated"), usedElsewhere{}) // it has no such volume
		return e
	}
	leg, err := everywhere().OpenLeg(t.Context(), id)
	check.OK(t, errors.Join(err, leg.Close()))
	p.bare(id)
	network.Cut(true)
	p.start()
	network.Cut(false)
	e := everywhere()
	if v, err := e.Get(t.Context(), id); err == nil {
		device, err := e.AttachRaw(t.Context(), v, nil, true)
		t.Errorf("the leg is used as %+v, as %s: %v, %v", v, device.Path, err, device.Close())
	}
	check.OK(t, e.CloseLeg(t.Context(), id))
	p.unused(id)
}

// TestReachedFormat: a volume is formatted by the node that uses it, once, and the home's record says so, with the mount flags. When that node's driver starts,
// it removes what nothing uses.
func TestReachedFormat(t *testing.T) {
	p := newPair(t)
	id := p.make("v", volume.Encryption{})
	for _, want := range []bool{true, false} {
		v := p.get(id)
		device, err := p.user.Attach(t.Context(), v, nil)
		check.OK(t, err)
		made, err := p.user.Format(t.Context(), &v, device, "ext4", "flags")
		if check.OK(t, errors.Join(err, device.Close())); made != want {
			t.Errorf("formatted: %v, want %v", made, want)
		}
		if want {
			p.bare(id)
			p.start() // nothing has it mounted
			if connected, err := p.kernel.List("nqn.2026-11.dev.ashlar:" + id.Key); err != nil || len(connected) > 0 {
				t.Errorf("after a start connected are %v, %v", connected, err)
			}
		}
	}
	p.unused(id)
	if v, err := p.home.Get(t.Context(), id); err != nil || v.Format != (volume.Format{State: volume.Formatted, Type: "ext4"}) || v.Flags != "flags" {
		t.Errorf("at home it is %+v, %v", v, err)
	}
	if all := p.bytes(id); all[1024+56] != 0x53 || all[1024+57] != 0xef {
		t.Error("at home there is no ext4")
	}
}

// TestReachedRaw: a raw device on another node grows with the volume, and what is written to it is on the home. When the home attaches the volume itself, it
// ends the export, and no later write arrives.
func TestReachedRaw(t *testing.T) {
	p := newPair(t)
	id := p.make("v", volume.Encryption{})
	device, err := p.user.AttachRaw(t.Context(), p.get(id), nil, true)
	check.OK(t, errors.Join(err, device.Close()))
	pooltest.WriteTo(t, device.Path, 12345, []byte("some bytes"))
	check.OK(t, pooltest.Second(p.home.Expand(t.Context(), id, volume.Range{Required: 48 << 20})))
	grown, err := p.user.Grow(t.Context(), id, nil)
	check.OK(t, err)
	devices, err := p.user.Attached(t.Context(), id)
	if err != nil || len(devices) != 1 || devices[0].Size != 48<<20 || devices[0].Number != device.Number || grown.Size != 48<<20 {
		t.Errorf("grown to %d it is %+v, %v", grown.Size, devices, err)
	}
	if !p.real { // remotetest.Network has no fence
		check.OK(t, p.user.Detach(t.Context(), id))
	}
	here, err := p.home.Attach(t.Context(), p.get(id), nil) // that ends the export
	check.OK(t, errors.Join(err, here.Close()))
	p.generation = 2 // the claim has ended with it
	if p.real {
		written := make(chan error, 1)
		go func() { written <- writeSynced(device.Path, []byte("from before")) }()
		p.gone(id)
		if err := <-written; err == nil {
			t.Error("what was written after the end of the export was taken")
		}
	}
	check.OK(t, p.home.Detach(t.Context(), id))
	p.unused(id)
	if all := p.bytes(id); string(all[12345:12355]) != "some bytes" || bytes.Contains(all, []byte("from before")) || len(all) != 48<<20 {
		t.Errorf("at home it has %q of %d bytes", all[12345:12355], len(all))
	}
}

// TestStartBesideHungThaw: a start does not wait for the end of a freeze that a crash left on a volume whose home does not answer. The freeze ends when it does.
func TestStartBesideHungThaw(t *testing.T) {
	drivertest.NeedMapper(t)
	p := newPair(t)
	v := p.make("v", volume.Encryption{})
	attached, err := p.user.Attach(p.Context(), p.get(v), nil)
	check.OK(p, err)
	dir := p.TempDir()
	drivertest.Run(p, "mkfs.ext4", "-q", attached.Path)
	drivertest.Run(p, "mount", attached.Path, dir)
	unmount := sync.OnceFunc(func() { drivertest.Unmount(p, dir) })
	p.Cleanup(unmount)
	check.OK(p, attached.Close())
	thaw, err := filesystem.Freeze(p.Context(), dir)
	check.OK(p, err)
	exported, err := p.home.Attached(p.Context(), v)
	check.OK(p, err)
	name, err := os.ReadFile(dm.Sysfs(exported[0].Number) + "/dm/name")
	check.OK(p, err)
	device := strings.TrimSpace(string(name))
	check.OK(p, dm.Suspend(device))
	answer := sync.OnceFunc(func() { check.OK(p, dm.Resume(device, dm.NoScan)) })
	p.Cleanup(answer)
	started := make(chan struct{})
	go func() { defer close(started); p.start() }()
	select {
	case <-started:
	case <-time.After(30 * time.Second):
		p.Error("the start waits for the home")
	}
	answer()
	<-started
	wrote := make(chan error, 1)
	go func() { wrote <- os.WriteFile(dir+"/file", []byte("written"), 0o600) }()
	select {
	case err := <-wrote:
		check.OK(p, err)
	case <-time.After(30 * time.Second):
		p.Error("when the home answers, the filesystem is still frozen")
		check.OK(p, filesystem.Thaw(dir))
	}
	_ = thaw() // it closes the directory
	unmount()
	p.unused(v)
}

// TestReachedEncrypted: an encrypted volume is opened on the node that uses it. The home has neither the key nor any readable data.
func TestReachedEncrypted(t *testing.T) {
	p := newPair(t)
	if targets, err := dm.Targets(); err != nil || targets["crypt"] == "" {
		_, err := p.home.Create(t.Context(), volume.Spec{Name: "v", Size: volume.Range{Required: 32 << 20}, Encryption: volume.Encryption{Scheme: volume.LUKS2}})
		pooltest.Fails(t, err, errdefs.ErrUnsupported, "encryption without a device mapper")
		return
	}
	id := p.make("v", volume.Encryption{Scheme: volume.LUKS2})
	key := volume.Key("a passphrase")
	v := p.get(id)
	device, err := p.user.AttachRaw(t.Context(), v, key, true)
	check.OK(t, errors.Join(err, device.Close()))
	pooltest.WriteTo(t, device.Path, 0, []byte("nobody else reads this"))
	p.unused(id)
	if all := p.bytes(id); !bytes.HasPrefix(all, []byte("LUKS")) || bytes.Contains(all, []byte("nobody else")) {
		t.Error("at home it is readable")
	}
	if v, err = p.home.Get(t.Context(), id); err != nil || v.Header.State != volume.Formatted {
		t.Errorf("at home it is %+v, %v", v, err)
	}
	_, err = p.user.Attach(t.Context(), p.get(id), volume.Key("another"))
	pooltest.Fails(t, err, volume.ErrKey, "another key")
	p.unused(id)
}

// TestUserLabels: the consumer of a volume changes only userLabels in the record, only from the values that they have, and only to short values.
func TestUserLabels(t *testing.T) {
	l := start(t, 0, memory.NewDisk(1<<30).Open("default", nil))
	v, err := l.Create(t.Context(), volume.Spec{Name: "a", Size: volume.Range{Required: 16 * mib}})
	check.OK(t, err)
	swap := func(label, before, after string) error {
		return second(l.SwapLabels(t.Context(), v.ID, map[string]string{label: before}, map[string]string{label: after}))
	}
	check.OK(t, swap("target", "", "/pods/1"))
	fails(t, swap("target", "", "/pods/2"), errdefs.ErrBusy, "from what it is not")
	for what, err := range map[string]error{
		"its home's":             swap("export", "", "1:0123456789abcdef:0:elsewhere"),
		"of the pod's namespace": swap("pvc.namespace", "", "kube-system"),
		"that is long":           swap("flags", "", strings.Repeat("x", 1024)),
		"that is long quoted":    swap("flags", "", strings.Repeat("\x01", 300)),
	} {
		fails(t, err, errdefs.ErrInvalid, "a label "+what)
	}
	if r, err := l.Record(t.Context(), v.ID); err != nil || r.Labels["target"] != "/pods/1" || r.Labels["flags"] != "" {
		t.Errorf("the record is %+v, %v", r, err)
	}
}

// TestReachedLegMarks: what another node writes to a leg is marked on the leg's home, which tells the marks. The devices of the other node mark nothing.
func TestReachedLegMarks(t *testing.T) {
	p := newPair(t)
	v, err := p.home.Create(t.Context(), volume.Spec{Name: "leg", Size: volume.Range{Required: legSize}, Access: volume.AccessAny, ReplicaOf: "ff"})
	check.OK(t, err)
	g := &leg{TB: t, pool: p.pool, l: p.user, v: v, written: map[uint32]map[int64]bool{0: {}}}
	g.attach()
	marked := dm.HasTarget("linear") == nil && era.Available() == nil
	for range 2 {
		g.put(3)
		if begun := g.begin(); begun != 0 != marked {
			t.Errorf("era %d begins, and there are marks: %v", begun, marked)
		}
		g.put(5, 6)
		g.safe("written")
		if marked {
			for since := range g.written {
				g.exact(since, "written")
			}
			names, err := dm.Names("")
			if marks := slices.DeleteFunc(names, func(name string) bool { return !strings.HasSuffix(name, "-marks") }); err != nil || len(marks) != 1 {
				t.Errorf("marked is by %v, %v", marks, err)
			}
		}
		g.detach()
		g.attach()
	}
	g.safe("attached again")
	g.detach()
	p.unused(v.ID)
	check.OK(t, p.home.Delete(t.Context(), v.ID))
}
