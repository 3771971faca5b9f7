package remotepool_test

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/secret"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/nvme"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/nvmet"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/remotepool"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/remotepool/remotetest"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

const size = 8 << 20

// home is the home of volume 1, and claims it for the node "consumer".
type home struct {
	*remotetest.Network
	image      string
	generation int64 // of the claim; 0: no claim
	record     blockdev.Record
	closed     []int64
	unknown    bool   // it is not known whether the volume is claimed
	word       string // random word of the export
	otherwise  bool   // Export.Otherwise, until it is closed
	stays      bool   // Otherwise also after that
	again      bool   // Export.Again, until it is closed
	notEnded   error  // of Close
	astray     bool   // Close tells another home than the volume's

	name string // NQN that it answers; empty: that of the export
	host string // likewise
	uuid string // likewise
	size int64  // size that it answers; 0: that of the record
	err  error  // of all calls
	busy int    // how many calls are refused with errdefs.ErrBusy

	connects func() // called when the kernel has a connection, before Connect returns; nil: nothing
}

var ref = pooltest.Vol("1")

// start returns a home, and the pool of its consumer.
func start(t *testing.T) (*home, *remotepool.Pool) {
	drivertest.NeedRoot(t)
	h := &home{Network: &remotetest.Network{}, image: filepath.Join(drivertest.Dir(t), "image"), generation: 1}
	h.record = blockdev.Record{Ref: ref, Name: "v", Size: size, Ready: true, Labels: map[string]string{"kept": "1"}}
	check.OK(t, os.WriteFile(h.image, make([]byte, size), 0o600))
	pool := remotepool.New("consumer", h, h)
	t.Cleanup(func() {
		all, err := h.List("")
		check.OK(t, err)
		for _, c := range all {
			check.OK(t, h.Disconnect(context.Background(), c.NQN))
		}
	})
	return h, pool
}

func (h *home) answer() error {
	if h.busy > 0 {
		h.busy--
		return errdefs.ErrBusy
	}
	return h.err
}

func (h *home) nqn(generation int64) string {
	return fmt.Sprintf("nqn.2026-11.dev.ashlar:%s:%d:%s", ref.Key, generation, cmp.Or(h.word, "0123456789abcdef"))
}

func (h *home) Connect(ctx context.Context, c nvme.Connection) (nvme.Device, error) {
	device, err := h.Network.Connect(ctx, c)
	if h.connects != nil {
		h.connects()
	}
	if err == nil {
		err = ctx.Err() // the kernel goes on
	}
	return device, err
}

func (h *home) Claim(blockdev.Ref) (remotepool.Claim, bool) {
	return remotepool.Claim{Home: "home", Generation: h.generation}, h.generation > 0 && !h.unknown
}

func (h *home) Open(ctx context.Context, _ string, _ blockdev.Ref) (remotepool.Export, error) {
	if err := h.answer(); err != nil {
		return remotepool.Export{}, err
	}
	host := remotepool.HostPrefix("consumer") + "1"
	const uuid = "00000000-0000-8000-8000-000000000001"
	err := h.Add(ctx, nvmet.Export{NQN: h.nqn(h.generation), Host: host, UUID: uuid, Device: h.image, Secret: secret.Of("secret")})
	out := remotepool.Export{Size: h.record.Size, Otherwise: h.otherwise, Again: h.again, Record: h.record, Connection: nvme.Connection{NQN: h.nqn(h.generation), Host: host,
		Address: netip.MustParseAddrPort("10.0.0.1:4420"), Secret: secret.Of("secret"), UUID: uuid, Loss: -1}}
	out.NQN, out.Host, out.UUID = cmp.Or(h.name, out.NQN), cmp.Or(h.host, out.Host), cmp.Or(h.uuid, out.UUID)
	if h.size > 0 {
		out.Size = h.size
	}
	return out, err
}

func (h *home) Record(context.Context, string, blockdev.Ref) (blockdev.Record, error) {
	if err := h.answer(); err != nil {
		return blockdev.Record{}, err
	}
	record := h.record
	record.Labels = maps.Clone(record.Labels)
	return record, nil
}

func (h *home) SetLabels(ctx context.Context, pool string, ref blockdev.Ref, before, after map[string]string) (blockdev.Record, error) {
	if err := h.answer(); err != nil {
		return blockdev.Record{}, err
	}
	for _, labels := range []map[string]string{before, after} {
		for label := range labels {
			if h.record.Labels[label] != before[label] {
				return blockdev.Record{}, errdefs.ErrBusy
			}
		}
	}
	maps.DeleteFunc(h.record.Labels, func(label, _ string) bool { _, is := before[label]; return is })
	maps.Copy(h.record.Labels, after)
	return h.Record(ctx, pool, ref)
}

func (h *home) Marks(context.Context, string, blockdev.Ref, uint32) ([]blockdev.Extent, error) {
	return nil, fmt.Errorf("%w: no marks", errdefs.ErrUnsupported)
}

func (h *home) BeginEra(context.Context, string, blockdev.Ref) (uint32, error) {
	return 0, fmt.Errorf("%w: no marks", errdefs.ErrUnsupported)
}

func (h *home) Ended(_ context.Context, _ blockdev.Ref, generation int64) (bool, error) {
	return h.generation != generation, h.err
}

func (h *home) Close(_ context.Context, _ blockdev.Ref, generation int64, nqn string) error {
	if !strings.Contains(nqn, fmt.Sprintf(":%d:", generation)) {
		return fmt.Errorf("%w: export %q of generation %d", errdefs.ErrInvalid, nqn, generation)
	}
	if h.astray {
		return nil
	}
	h.closed = append(h.closed, generation)
	if h.notEnded != nil {
		return h.notEnded
	}
	if (h.otherwise && !h.stays || h.again) && h.err == nil && generation == h.generation {
		h.otherwise, h.again, h.word = false, false, "fedcba9876543210"
		return h.Remove(context.Background(), h.nqn(generation))
	}
	return h.err
}

// restarted returns the pool of a consumer whose driver was started again.
func (h *home) restarted() *remotepool.Pool { return remotepool.New("consumer", h, h) }

func (h *home) connected(t *testing.T) (n int) {
	t.Helper()
	all, err := h.List("")
	check.OK(t, err)
	return len(all)
}

// TestLife: when Detach has returned, all that was written through the device is at home, and the home was told.
func TestLife(t *testing.T) {
	h, all := start(t)
	pool := all.Named("fast")
	if all.Has(ref) {
		t.Error("it is connected before it was attached")
	}
	device := pooltest.Attach(t, pool, ref, blockdev.Attachment{})
	again := pooltest.Attach(t, pool, ref, blockdev.Attachment{})
	if device.Number != again.Number || device.Size != size || h.connected(t) != 1 || !all.Has(ref) {
		t.Fatalf("attached as %+v and %+v, with %d connections", device, again, h.connected(t))
	}
	content := []byte("some bytes")
	f, err := os.OpenFile(device.Path, os.O_WRONLY, 0)
	check.OK(t, err)
	_, err = f.WriteAt(content, 4096)
	check.OK(t, errors.Join(err, f.Close())) // without a sync
	for range 2 {
		check.OK(t, all.Named("fast").Detach(t.Context(), ref))
	}
	have, err := os.ReadFile(h.image)
	check.OK(t, err)
	if !bytes.Equal(have[4096:4096+len(content)], content) || h.connected(t) != 0 || len(h.closed) != 1 || h.closed[0] != 1 {
		t.Errorf("after Detach the image has %q, there are %d connections, and the home was told %v", have[4096:4096+len(content)], h.connected(t), h.closed)
	}
	pooltest.Fails(t, pooltest.Second(pool.Attach(t.Context(), ref, blockdev.Attachment{ReadOnly: true})), errdefs.ErrUnsupported, "a device for copies")
	pooltest.Fails(t, pooltest.Second(all.Attach(t.Context(), ref, blockdev.Attachment{})), errdefs.ErrNotFound, "a volume of no pool")
	pooltest.Fails(t, pooltest.Second(pool.Get(t.Context(), pooltest.Snap("1"))), errdefs.ErrNotFound, "a snapshot")
	pooltest.Fails(t, pooltest.Second(pool.Create(t.Context(), blockdev.Spec{Ref: ref, Size: size})), errdefs.ErrUnsupported, "Create")
	pooltest.Fails(t, pool.Delete(t.Context(), ref), errdefs.ErrUnsupported, "Delete")
}

// TestOtherwise: the home exports a volume since before it should do so with TLS. A node that is not connected, as after a start of its machine, gives it
// back, and connects to the new export. A node that is connected goes on, also after a start of the driver.
func TestOtherwise(t *testing.T) {
	h, all := start(t)
	used := pooltest.Attach(t, all.Named("fast"), ref, blockdev.Attachment{})
	h.otherwise = true
	for what, pool := range map[string]blockdev.Pool{"the driver that connected it": all.Named("fast"), "another": h.restarted().Named("fast")} {
		if device := pooltest.Attach(t, pool, ref, blockdev.Attachment{}); device.Number != used.Number || h.connected(t) != 1 || len(h.closed) != 0 {
			t.Errorf("%s has %+v, not %+v; there are %d connections, and the home was told %v", what, device, used, h.connected(t), h.closed)
		}
	}
	check.OK(t, h.Disconnect(t.Context(), h.nqn(1)))
	h.stays = true
	again := h.restarted().Named("fast")
	pooltest.Fails(t, pooltest.Second(again.Attach(t.Context(), ref, blockdev.Attachment{})), errdefs.ErrUnavailable, "Attach of what is given as before all the same")
	if h.connected(t) != 0 || len(h.closed) != 1 {
		t.Errorf("there are %d connections, and the home was told %v", h.connected(t), h.closed)
	}
	h.stays = false
	device := pooltest.Attach(t, again, ref, blockdev.Attachment{})
	list, err := h.List("")
	if check.OK(t, err); len(h.closed) != 2 || h.closed[1] != 1 || len(list) != 1 || list[0].Number != device.Number || list[0].NQN != h.nqn(1) || h.word == "" {
		t.Errorf("the home was told %v, and %+v is connected", h.closed, list)
	}
}

// TestGivenAgain: a node lost its connection to a volume, as its home did not answer for too long, or as its own machine was started anew. What it wrote by
// that connection may still be on its way to the home's disk. So it has the export ended, and connects to another one; it connects to none while that
// cannot end, or another home than the volume's was told. A node that is connected goes on.
func TestGivenAgain(t *testing.T) {
	h, all := start(t)
	used := pooltest.Attach(t, all.Named("fast"), ref, blockdev.Attachment{})
	h.again = true
	if device := pooltest.Attach(t, h.restarted().Named("fast"), ref, blockdev.Attachment{}); device.Number != used.Number || len(h.closed) != 0 {
		t.Errorf("a driver that was started anew has %+v, not %+v; the home was told %v", device, used, h.closed)
	}
	check.OK(t, all.End(t.Context(), h.nqn(1)))
	before := h.nqn(1)
	h.notEnded = fmt.Errorf("%w: its disk does not answer", errdefs.ErrUnavailable)
	pooltest.Fails(t, pooltest.Second(all.Named("fast").Attach(t.Context(), ref, blockdev.Attachment{})), errdefs.ErrUnavailable, "Attach of what is written to still")
	if n := h.connected(t); n != 0 {
		t.Errorf("there are %d connections", n)
	}
	h.notEnded, h.astray = nil, true
	pooltest.Fails(t, pooltest.Second(all.Named("fast").Attach(t.Context(), ref, blockdev.Attachment{})), errdefs.ErrUnavailable, "Attach of what its home was not told to end")
	if n := h.connected(t); n != 0 {
		t.Errorf("there are %d connections", n)
	}
	h.astray = false
	device := pooltest.Attach(t, all.Named("fast"), ref, blockdev.Attachment{})
	list, err := h.List("")
	if check.OK(t, err); len(list) != 1 || list[0].Number != device.Number || list[0].NQN != h.nqn(1) || list[0].NQN == before || len(h.closed) != 2 {
		t.Errorf("%+v is connected, and was %s before; the home was told %v", list, before, h.closed)
	}
}

// TestAnother: a device that is not what the home told of is disconnected unread.
func TestAnother(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*home)
		want   error
	}{
		"of another UUID": {func(h *home) { h.uuid = "00000000-0000-8000-8000-000000000002" }, errdefs.ErrPrecondition},
		"that is larger":  {func(h *home) { h.size = size - 4096 }, errdefs.ErrUnavailable},
		"of another volume": {func(h *home) {
			h.name = strings.Replace(h.nqn(1), ref.Key, pooltest.Vol("2").Key, 1)
			check.OK(t, h.Add(t.Context(), nvmet.Export{NQN: h.name, Host: remotepool.HostPrefix("consumer") + "1", UUID: "00000000-0000-8000-8000-000000000001", Device: h.image, Secret: secret.Of("secret")}))
		}, errdefs.ErrPrecondition},
		"for another node": {func(h *home) { h.host = remotepool.HostPrefix("another") + "1" }, errdefs.ErrPrecondition},
		"of no export":     {func(h *home) { h.err = fmt.Errorf("%w: not claimed", errdefs.ErrPrecondition) }, errdefs.ErrPrecondition},
		"not reached":      {func(h *home) { h.Cut(true) }, errdefs.ErrUnavailable},
	} {
		t.Run(name, func(t *testing.T) {
			h, all := start(t)
			c.change(h)
			pooltest.Fails(t, pooltest.Second(all.Named("fast").Attach(t.Context(), ref, blockdev.Attachment{})), c.want, "Attach")
			if h.connected(t) != 0 {
				t.Error("it is connected")
			}
		})
	}
}

// TestEarlierClaim: a connection of an earlier claim is disconnected. While it is in use, the volume cannot be used by the present claim.
func TestEarlierClaim(t *testing.T) {
	h, all := start(t)
	pool := all.Named("fast")
	old := pooltest.Attach(t, pool, ref, blockdev.Attachment{})
	user, err := os.OpenFile(old.Path, os.O_RDONLY|unix.O_EXCL, 0) // as a mount does
	check.OK(t, err)
	check.OK(t, h.Remove(t.Context(), h.nqn(1)))
	h.generation = 2
	pooltest.Fails(t, pooltest.Second(pool.Get(t.Context(), ref)), errdefs.ErrPrecondition, "Get")
	pooltest.Fails(t, pooltest.Second(pool.Attach(t.Context(), ref, blockdev.Attachment{})), errdefs.ErrPrecondition, "Attach")
	pooltest.Fails(t, pool.Detach(t.Context(), ref), errdefs.ErrInUse, "Detach")
	check.OK(t, user.Close())
	check.OK(t, pooltest.Second(pool.Get(t.Context(), ref)))
	pooltest.Attach(t, pool, ref, blockdev.Attachment{})
	if all, err := h.List(""); err != nil || len(all) != 1 || all[0].NQN != h.nqn(2) {
		t.Errorf("connected is %v, %v", all, err)
	}
	check.OK(t, pool.Detach(t.Context(), ref))
	if len(h.closed) != 1 || h.closed[0] != 2 {
		t.Errorf("the home was told %v", h.closed)
	}
}

// TestHeldForAMoment: the kernel lets go of a device a moment after the device over it has lost its name. Detach waits for that.
func TestHeldForAMoment(t *testing.T) {
	_, all := start(t)
	pool := all.Named("fast")
	device := pooltest.Attach(t, pool, ref, blockdev.Attachment{})
	user, err := os.OpenFile(device.Path, os.O_RDONLY|unix.O_EXCL, 0)
	check.OK(t, err)
	closed := make(chan error, 1)
	time.AfterFunc(100*time.Millisecond, func() { closed <- user.Close() })
	check.OK(t, errors.Join(pool.Detach(t.Context(), ref), <-closed))
}

// TestEnded: a connection whose claim has ended, and that leads nowhere, is disconnected, whoever uses it. No other connection is.
func TestEnded(t *testing.T) {
	h, all := start(t)
	pooltest.Attach(t, all.Named("fast"), ref, blockdev.Attachment{})
	drop := func(connected int) {
		t.Helper()
		check.OK(t, all.DropEnded(t.Context()))
		if n := h.connected(t); n != connected {
			t.Fatalf("%d are connected, want %d", n, connected)
		}
	}
	drop(1)
	h.generation = 2
	drop(1) // a live connection is for its home to end
	h.generation = 1
	h.Cut(true)
	drop(1)
	h.generation, h.err = 2, errdefs.ErrUnavailable
	pooltest.Fails(t, all.DropEnded(t.Context()), errdefs.ErrUnavailable, "nobody knows")
	h.err = nil
	drop(0)
}

// TestEndedAfterAMoment: a connection whose claim has ended, and that is not live any more, stays for a moment: what its leg has taken may be under way to
// another one.
func TestEndedAfterAMoment(t *testing.T) {
	h, all := start(t)
	pooltest.Attach(t, all.Named("fast"), ref, blockdev.Attachment{})
	h.generation = 2
	h.Cut(true)
	dropped := make(chan error, 1)
	go func() { dropped <- all.DropEnded(t.Context()) }()
	select {
	case err := <-dropped:
		t.Errorf("it is dropped at once: %v", err)
	case <-time.After(time.Second):
		if n := h.connected(t); n != 1 {
			t.Errorf("%d are connected", n)
		}
		check.OK(t, <-dropped)
	}
	if n := h.connected(t); n != 0 {
		t.Errorf("%d are connected in the end", n)
	}
}

// stuck is a kernel that does not end some connections.
type stuck struct {
	*home
	is func(nqn string) bool
}

func (s stuck) Disconnect(ctx context.Context, nqn string) error {
	if s.is(nqn) {
		<-ctx.Done()
		return ctx.Err()
	}
	return s.home.Disconnect(ctx, nqn)
}

// TestEndedAtOnce: connections that the kernel does not end do not hold up the end of others.
func TestEndedAtOnce(t *testing.T) {
	h, _ := start(t)
	hanging := map[string]bool{}
	for i := range 8 {
		key := pooltest.Vol(fmt.Sprint(i)).Key
		nqn, host := strings.Replace(h.nqn(1), ref.Key, key, 1), remotepool.HostPrefix("consumer")+fmt.Sprint(i)
		uuid := fmt.Sprintf("00000000-0000-8000-8000-%012d", i)
		check.OK(t, h.Add(t.Context(), nvmet.Export{NQN: nqn, Host: host, UUID: uuid, Device: h.image}))
		_, err := h.Connect(t.Context(), nvme.Connection{NQN: nqn, Host: host, UUID: uuid})
		check.OK(t, err)
		hanging[nqn] = i%2 == 0
	}
	h.generation = 2
	h.Cut(true)
	ctx, end := context.WithCancel(t.Context())
	dropped := make(chan error, 1)
	go func() {
		dropped <- remotepool.New("consumer", stuck{h, func(nqn string) bool { return hanging[nqn] }}, h).DropEnded(ctx)
	}()
	for deadline := time.Now().Add(10 * time.Second); h.connected(t) > 4 && time.Now().Before(deadline); {
		time.Sleep(10 * time.Millisecond)
	}
	if n := h.connected(t); n != 4 {
		t.Errorf("%d are connected, and 4 cannot be disconnected", n)
	}
	end()
	if err := <-dropped; !errors.Is(err, context.Canceled) {
		t.Errorf("of those it says %v", err)
	}
}

// TestOtherNodes: connections of other nodes on the same kernel are left alone.
func TestOtherNodes(t *testing.T) {
	h, all := start(t)
	pooltest.Attach(t, all.Named("fast"), ref, blockdev.Attachment{Keep: true})
	other := remotepool.New("another", h, h)
	devices, err := other.Named("fast").Attached(t.Context(), ref)
	orphans, failure := other.Orphans(t.Context())
	check.OK(t, errors.Join(err, failure, other.Named("fast").Detach(t.Context(), ref)))
	if len(devices) > 0 || len(orphans) > 0 || other.Has(ref) || len(other.PoolHealth(t.Context())) > 0 || h.connected(t) != 1 {
		t.Errorf("another node has %v, %v; %d are connected", devices, orphans, h.connected(t))
	}
	mine, _, _, err := all.Top(ref)
	theirs, uuid, _, failure := other.Top(ref)
	check.OK(t, errors.Join(err, failure))
	if have, ours := all.ParseTop(mine); !ours || have != ref {
		t.Errorf("%s is %v, %v", mine, have, ours)
	}
	if _, ours := all.ParseTop(theirs); ours || len(strings.TrimPrefix(uuid, "LVM-")) <= 64 || len(uuid) > 127 {
		t.Errorf("the top of another node, %s of UUID %s, is ours: %v", theirs, uuid, ours)
	}
}

// TestLabels: labels are changed at home, also if others change some meanwhile. Without a change nothing is sent.
func TestLabels(t *testing.T) {
	h, all := start(t)
	pool := all.Named("fast")
	h.busy = 2
	raced := false
	record, err := pool.SetLabels(t.Context(), ref, func(labels map[string]string) error {
		labels["format"] += "x"
		if !raced {
			raced, h.record.Labels["format"] = true, "y" // after the record was read
			h.record.Labels["kept"] = "2"
		}
		return nil
	})
	check.OK(t, err)
	if want := map[string]string{"format": "yx", "kept": "2"}; !maps.Equal(record.Labels, want) || !maps.Equal(h.record.Labels, want) {
		t.Errorf("labels are %v, and at home %v", record.Labels, h.record.Labels)
	}
	bad := errors.New("no")
	if _, err := pool.SetLabels(t.Context(), ref, func(map[string]string) error { return bad }); !errors.Is(err, bad) {
		t.Errorf("a change that fails: %v", err)
	}
	check.OK(t, pooltest.Second(pool.SetLabels(t.Context(), ref, func(labels map[string]string) error { delete(labels, "format"); return nil })))
	if want := map[string]string{"kept": "2"}; !maps.Equal(h.record.Labels, want) {
		t.Errorf("labels at home are %v", h.record.Labels)
	}
}

// TestHomeAway: a home that does not answer keeps nobody from what is connected. Health reports it. Detach does not give up what was written as long as it
// can still get to the home.
func TestHomeAway(t *testing.T) {
	h, all := start(t)
	pool := all.Named("fast")
	pooltest.Attach(t, pool, ref, blockdev.Attachment{})
	h.err = fmt.Errorf("%w: no answer", errdefs.ErrUnavailable)
	h.record.Size = 2 * size // a size that cannot be known
	if record, err := pool.Get(t.Context(), ref); err != nil || record.Size != size || record.Labels["kept"] != "1" || !record.Stale {
		t.Errorf("the record is %+v, %v", record, err)
	}
	pooltest.Fails(t, pooltest.Second(pool.SetLabels(t.Context(), ref, func(map[string]string) error { return nil })), errdefs.ErrUnavailable, "SetLabels")
	pooltest.Attach(t, pool, ref, blockdev.Attachment{}) // the connection is there
	if problems, err := pool.Health(t.Context(), ref); err != nil || len(problems) > 0 {
		t.Errorf("health is %v, %v", problems, err)
	}
	h.Cut(true)
	for _, problems := range [][]blockdev.Problem{first(pool.Health(t.Context(), ref)), all.PoolHealth(t.Context())} {
		if len(problems) != 1 || problems[0].Severity != blockdev.Inaccessible || problems[0].Reason != remotepool.ReasonAway || !strings.HasPrefix(problems[0].Message, "node home, which has") ||
			!strings.Contains(problems[0].Message, "does not answer on the network since 20") {
			t.Errorf("health is %v", problems)
		}
	}
	for name, c := range map[string]struct {
		pool *remotepool.Pool
		want float64
	}{"its user": {all, 1}, "another node": {remotepool.New("another", h, h), 0}} {
		away, err := c.pool.Away()
		check.OK(t, err)
		samples := c.pool.Samples()
		var m dto.Metric
		if len(samples) != 1 || samples[0].Write(&m) != nil || m.GetGauge().GetValue() != c.want || float64(len(away)) != c.want || c.want == 1 && time.Since(away[ref]) > time.Minute {
			t.Errorf("%s: away are %v, and metrics say %v", name, away, samples)
		}
	}
	pooltest.Fails(t, pool.Detach(t.Context(), ref), errdefs.ErrUnavailable, "Detach")
	h.generation, h.err = 0, nil // the claim was taken away
	check.OK(t, pool.Detach(t.Context(), ref))
	if h.connected(t) != 0 || len(h.closed) != 0 {
		t.Errorf("%d are connected, and the home was told %v", h.connected(t), h.closed)
	}
	h.Cut(false)
	h.generation, h.err = 1, fmt.Errorf("%w: no answer", errdefs.ErrUnavailable)
	pooltest.Fails(t, pooltest.Second(pool.Get(t.Context(), ref)), errdefs.ErrUnavailable, "Get of what is not connected")
}

func first(problems []blockdev.Problem, _ error) []blockdev.Problem { return problems }

// TestGrown: Expand waits until this kernel knows the size that the home has grown the volume to. It grows nothing itself.
func TestGrown(t *testing.T) {
	h, all := start(t)
	pool := all.Named("fast")
	pooltest.Attach(t, pool, ref, blockdev.Attachment{})
	pooltest.Fails(t, pooltest.Second(pool.Expand(t.Context(), ref, 2*size)), errdefs.ErrUnsupported, "Expand beyond the record")
	h.record.Size = 2 * size
	soon, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	pooltest.Fails(t, pooltest.Second(pool.Expand(soon, ref, 2*size)), errdefs.ErrUnavailable, "Expand before the device has grown")
	check.OK(t, os.Truncate(h.image, 2*size))
	record, err := pool.Expand(t.Context(), ref, size)
	check.OK(t, err)
	if devices, err := pool.Attached(t.Context(), ref); err != nil || len(devices) != 1 || devices[0].Size != 2*size || record.Size != 2*size {
		t.Errorf("grown, it is %+v, %v; the record has %d bytes", devices, err, record.Size)
	}
}

// TestRestart: a start finds what is connected. All of it counts as Kept, as nobody knows any more what was handed out.
func TestRestart(t *testing.T) {
	h, all := start(t)
	kept := func(pool *remotepool.Pool, want bool) {
		t.Helper()
		devices, err := pool.Named("fast").Attached(t.Context(), ref)
		if err != nil || len(devices) != 1 || devices[0].Kept != want {
			t.Errorf("attached as %+v, %v; want kept %v", devices, err, want)
		}
		if orphans, err := pool.Orphans(t.Context()); err != nil || len(orphans[ref]) != 1 {
			t.Errorf("orphans are %v, %v", orphans, err)
		}
	}
	pooltest.Attach(t, all.Named("fast"), ref, blockdev.Attachment{})
	kept(all, false)
	kept(h.restarted(), true)
	pooltest.Attach(t, all.Named("fast"), ref, blockdev.Attachment{Keep: true})
	kept(all, true)
	kept(h.restarted(), true)
	h.generation = 0 // nobody knows of the claim yet
	check.OK(t, h.restarted().Detach(t.Context(), ref))
	if h.connected(t) != 0 {
		t.Error("it is connected")
	}
}

// TestMaking: a device that is being connected, to have another device over it, is not taken for one that was handed out.
func TestMaking(t *testing.T) {
	h, all := start(t)
	pool := all.Named("fast")
	asked := 0
	h.connects = func() {
		devices, err := pool.Attached(t.Context(), ref)
		if asked++; err != nil || len(devices) != 1 || devices[0].Kept {
			t.Errorf("while it is connected, attached are %+v, %v", devices, err)
		}
	}
	pooltest.Attach(t, pool, ref, blockdev.Attachment{})
	if asked != 1 {
		t.Errorf("it was connected %d times", asked)
	}
}

// TestConnectedLate: nor is one that the kernel has only after who attached it has given up, or after a process that began it was killed, also if it is used
// later.
func TestConnectedLate(t *testing.T) {
	h, all := start(t)
	pool, next := all.Named("fast"), h.restarted()
	if devices, err := next.Attached(t.Context(), ref); err != nil || len(devices) > 0 {
		t.Fatalf("attached are %+v, %v", devices, err)
	}
	ctx, giveUp := context.WithCancel(t.Context())
	h.connects = giveUp
	if _, err := pool.Attach(ctx, ref, blockdev.Attachment{}); !errors.Is(err, context.Canceled) {
		t.Fatalf("it is attached: %v", err)
	}
	for range 2 {
		for _, p := range []blockdev.Pool{pool, next} {
			if devices, err := p.Attached(t.Context(), ref); err != nil || len(devices) != 1 || devices[0].Kept {
				t.Errorf("attached are %+v, %v", devices, err)
			}
		}
		h.connects = nil
		pooltest.Attach(t, pool, ref, blockdev.Attachment{})
	}
}

// TestClaimUnknown: claims are not known yet, as after a start without an API server. A connection that is not live is kept, unless its claim has ended.
// The home is told of what is detached.
func TestClaimUnknown(t *testing.T) {
	h, all := start(t)
	pooltest.Attach(t, all.Named("fast"), ref, blockdev.Attachment{Keep: true})
	h.unknown = true
	h.Cut(true)
	pooltest.Fails(t, h.restarted().Detach(t.Context(), ref), errdefs.ErrUnavailable, "Detach of what is claimed")
	h.err = fmt.Errorf("%w: no API server", errdefs.ErrUnavailable)
	pooltest.Fails(t, h.restarted().Detach(t.Context(), ref), errdefs.ErrUnavailable, "Detach of what nobody knows of")
	if h.connected(t) != 1 {
		t.Fatal("it is not connected any more")
	}
	h.err = nil
	h.Cut(false)
	check.OK(t, h.restarted().Detach(t.Context(), ref))
	if h.connected(t) != 0 || len(h.closed) != 1 || h.closed[0] != 1 {
		t.Errorf("%d are connected, and the home was told %v", h.connected(t), h.closed)
	}
}

// TestReplaced: a home that has begun anew exports a volume for the same claim under another name. The connection by the earlier name leads nowhere,
// whoever uses it.
func TestReplaced(t *testing.T) {
	h, all := start(t)
	pool := all.Named("fast")
	old := pooltest.Attach(t, pool, ref, blockdev.Attachment{})
	user, err := os.OpenFile(old.Path, os.O_RDONLY|unix.O_EXCL, 0) // as a mount does
	check.OK(t, err)
	check.OK(t, h.Remove(t.Context(), h.nqn(1)))
	h.word = "fedcba9876543210"
	pooltest.Fails(t, pooltest.Second(pool.Attach(t.Context(), ref, blockdev.Attachment{})), errdefs.ErrPrecondition, "Attach while it is used")
	pooltest.Fails(t, pooltest.Second(pool.Get(t.Context(), ref)), errdefs.ErrPrecondition, "Get while it is used")
	check.OK(t, user.Close()) // remotetest does not disconnect a device that is open
	check.OK(t, all.DropEnded(t.Context()))
	if n := h.connected(t); n != 0 {
		t.Errorf("%d are connected", n)
	}
	pooltest.Attach(t, pool, ref, blockdev.Attachment{})
	check.OK(t, all.DropEnded(t.Context()))
	if list, err := h.List(""); err != nil || len(list) != 1 || list[0].NQN != h.nqn(1) || len(all.PoolHealth(t.Context())) > 0 {
		t.Errorf("connected is %v, %v; health is %v", list, err, all.PoolHealth(t.Context()))
	}
	check.OK(t, pool.Detach(t.Context(), ref))
}

// TestSecond: calls for the volume do not see a second leg before Take. It is disconnected with the volume.
func TestSecond(t *testing.T) {
	h, pool := start(t)
	p := pool.Named("default").(*remotepool.Pool)
	first, err := p.Attach(t.Context(), ref, blockdev.Attachment{})
	check.OK(t, err)
	h.generation = 2 // the new home exports it for that
	to, err := h.Open(t.Context(), "default", ref)
	check.OK(t, err)
	h.generation = 1
	before := to
	before.Otherwise = true
	pooltest.Fails(t, failure(p.Second(t.Context(), ref, before)), errdefs.ErrUnavailable, "Second of what is given as before")
	second, err := p.Second(t.Context(), ref, to)
	check.OK(t, err)
	again, err := p.Second(t.Context(), ref, before)
	if check.OK(t, err); again.Number != second.Number {
		t.Errorf("given as before, it is %s, not %s", again.Path, second.Path)
	}
	if second.Number == first.Number {
		t.Fatalf("both are %s", first.Path)
	}
	seen := func(want uint64) {
		t.Helper()
		found, err := p.Attached(t.Context(), ref)
		check.OK(t, err)
		if len(found) != 1 || found[0].Number != want || !p.Has(ref) {
			t.Errorf("attached are %+v, not %d alone", found, want)
		}
	}
	seen(first.Number)
	legs, err := p.Legs(ref)
	check.OK(t, err)
	if len(legs) != 2 {
		t.Errorf("its legs are %+v", legs)
	}
	h.generation = 2 // the volume has moved
	p.Take(to.NQN, "new")
	check.OK(t, p.Drop(t.Context(), h.nqn(1)))
	seen(second.Number)
	again, err = p.Attach(t.Context(), ref, blockdev.Attachment{})
	check.OK(t, err)
	if again.Number != second.Number {
		t.Errorf("it is attached as %s anew", again.Path)
	}
	h.generation = 3
	to, err = h.Open(t.Context(), "default", ref)
	check.OK(t, err)
	h.generation = 2
	check.OK(t, failure(p.Second(t.Context(), ref, to)))
	check.OK(t, p.Detach(t.Context(), ref))
	if n := h.connected(t); n != 0 {
		t.Errorf("%d connections are left", n)
	}
}

// failure returns the error of a call that returns a device too.
func failure(_ blockdev.Device, err error) error { return err }
