package volume_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/internal/secret"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lazy"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/memory"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/nvmet"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pools"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// target is an Exporter that keeps exported devices open, as the kernel does. It outlives the drivers that use it.
type target struct {
	mu      sync.Mutex
	exports map[string]nvmet.Export
	open    map[string]*os.File
	calls   []string
	adds    []int                   // how many exports each call of Add had
	step    func(what string) error // called before and after each call; its error is that of the call
	plain   bool                    // it does not authenticate
	refused string                  // NQN of an export that it refuses
	listed  func()                  // called after each list
	shown   func(*nvmet.Export)     // changes the exports that a list returns
}

func newTarget(t *testing.T) *target {
	k := &target{exports: map[string]nvmet.Export{}, open: map[string]*os.File{}}
	t.Cleanup(k.reboot)
	return k
}

// reboot removes all exports, as a restart of the machine does.
func (k *target) reboot() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, f := range k.open {
		_ = f.Close()
	}
	clear(k.open)
	clear(k.exports)
}

func (k *target) call(what, nqn string, do func() error) error {
	if err := k.reach(what); err != nil {
		return err
	}
	k.mu.Lock()
	k.calls = append(k.calls, what+" "+nqn)
	err := do()
	k.mu.Unlock()
	if err != nil {
		return err
	}
	return k.reach(what + ", done")
}

func (k *target) reach(what string) error {
	if k.step == nil {
		return nil
	}
	return k.step(what)
}

func (k *target) Authenticates() bool { return !k.plain }

func (k *target) Add(_ context.Context, exports ...nvmet.Export) (err error) {
	for _, e := range exports {
		err = errors.Join(err, k.add(e))
	}
	k.adds = append(k.adds, len(exports))
	return err
}

func (k *target) add(e nvmet.Export) error {
	return k.call("add", e.NQN, func() error {
		if e.NQN == k.refused {
			return errBroken
		}
		if have, is := k.exports[e.NQN]; is {
			if (have.PSK == secret.Text{}) != (e.PSK == secret.Text{}) {
				return nvmet.ErrOtherwise
			}
			if have != e {
				return fmt.Errorf("%w: it is exported as %s", errdefs.ErrExists, have.Device)
			}
			return nil
		}
		f, err := os.OpenFile(e.Device, os.O_RDWR, 0)
		if err == nil {
			k.exports[e.NQN], k.open[e.NQN] = e, f
		}
		return err
	})
}

func (k *target) Withdraw(_ context.Context, nqn string) error {
	return k.call("withdraw", nqn, func() error { return nil })
}

func (k *target) Remove(_ context.Context, nqn string) error {
	return k.call("remove", nqn, func() error {
		f := k.open[nqn]
		delete(k.open, nqn)
		delete(k.exports, nqn)
		if f != nil {
			return f.Close()
		}
		return nil
	})
}

func (k *target) Resized(_ context.Context, nqn string) error {
	return k.call("resized", nqn, func() error {
		if _, is := k.exports[nqn]; !is {
			return errdefs.ErrNotFound
		}
		return nil
	})
}

func (k *target) Exports(context.Context) ([]nvmet.Export, error) {
	k.mu.Lock()
	all := slices.Collect(maps.Values(k.exports))
	k.mu.Unlock()
	for i := range all {
		if k.shown != nil {
			k.shown(&all[i])
		}
	}
	if k.listed != nil {
		k.listed()
	}
	return all, nil
}

func (k *target) taken() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	calls := k.calls
	k.calls = nil
	return calls
}

// stepping is a pool that calls step before and after what it does; an error of step is that of the call.
type stepping struct {
	blockdev.Pool
	step func(what string) error
}

func (s *stepping) Unwrap() blockdev.Pool { return s.Pool }

func stepped[T any](s *stepping, what string, do func() (T, error)) (none T, err error) {
	if err := s.step(what); err != nil {
		return none, err
	}
	value, err := do()
	if err == nil {
		err = s.step(what + ", done")
	}
	return value, err
}

func (s *stepping) Create(ctx context.Context, spec blockdev.Spec) (blockdev.Record, error) {
	return stepped(s, "create", func() (blockdev.Record, error) { return s.Pool.Create(ctx, spec) })
}

func (s *stepping) SetLabels(ctx context.Context, ref blockdev.Ref, change func(map[string]string) error) (blockdev.Record, error) {
	return stepped(s, "label", func() (blockdev.Record, error) { return s.Pool.SetLabels(ctx, ref, change) })
}

func (s *stepping) Expand(ctx context.Context, ref blockdev.Ref, size int64) (blockdev.Record, error) {
	return stepped(s, "expand", func() (blockdev.Record, error) { return s.Pool.Expand(ctx, ref, size) })
}

func (s *stepping) Attach(ctx context.Context, ref blockdev.Ref, how blockdev.Attachment) (blockdev.Device, error) {
	var device blockdev.Device
	ended := true
	defer func() {
		if ended { // a process that ends closes what it has open
			_ = device.Close()
		}
	}()
	_, err := stepped(s, "attach", func() (_ blockdev.Device, err error) {
		device, err = s.Pool.Attach(ctx, ref, how)
		return device, err
	})
	ended = err != nil
	return device, err
}

func (s *stepping) Detach(ctx context.Context, ref blockdev.Ref) error {
	return second(stepped(s, "detach", func() (struct{}, error) { return struct{}{}, s.Pool.Detach(ctx, ref) }))
}

// consumer is a node that volumes are exported to.
type consumer struct {
	asked    []string
	failure  error // its answer to each call
	released error // its answer to release
	nothing  bool  // it has no writes to hold back
	mutable  map[string]string
}

func (c *consumer) Hold(_ context.Context, _ volume.ID, to volume.Grant) (func() error, error) {
	c.asked = append(c.asked, "hold "+to.Node)
	if c.failure != nil || c.nothing {
		return nil, c.failure
	}
	return func() error {
		c.asked = append(c.asked, "release "+to.Node)
		return c.released
	}, nil
}

func (c *consumer) Modified(_ context.Context, _ volume.ID, to volume.Grant, mutable map[string]string) error {
	c.asked = append(c.asked, "modified "+to.Node)
	if c.failure == nil {
		c.mutable = mutable
	}
	return c.failure
}

func (c *consumer) taken() []string {
	asked := c.asked
	c.asked = nil
	return asked
}

var nodeKey = []byte("0123456789abcdef0123456789abcdef")

// serve lets a store export volumes by a target.
func serve(t *testing.T, l *volume.Local, k *target, consumers volume.Consumers) *keylock.Table {
	t.Helper()
	locks := &keylock.Table{}
	l.ServeExports(t.Context(), volume.Exporting{Boot: "1", Open: func() (volume.Exporter, error) { return k, nil }, Key: nodeKey, Consumers: consumers, Locks: locks})
	return locks
}

func filesURL(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(drivertest.Dir(t), "pool")
	check.OK(t, os.Mkdir(dir, 0o700))
	return "file://" + dir + "?reservePercent=0&create=1"
}

// home returns the store of a node with a file pool, which exports volumes by a target to a consumer, and the pool's URL.
func home(t *testing.T) (l *volume.Local, k *target, c *consumer, url string) {
	t.Helper()
	url = filesURL(t)
	l, k, c = start(t, 0, open(t, "default", url)), newTarget(t), &consumer{}
	serve(t, l, k, c)
	return l, k, c, url
}

func grant(generation int64, node string) volume.Grant {
	return volume.Grant{Generation: generation, Node: node}
}

func same[T comparable](t testing.TB, what string, have, want []T) {
	t.Helper()
	if !slices.Equal(have, want) {
		t.Errorf("%s: %v, want %v", what, have, want)
	}
}

// exportedTo makes sure that a volume is exported to want, and to nobody else, by its record and by the target; the zero Grant: it is not exported.
func exportedTo(t testing.TB, l *volume.Local, k *target, id volume.ID, want volume.Grant) {
	t.Helper()
	have, is, err := l.ExportOf(t.Context(), id)
	check.OK(t, err)
	if have != want || is != (want != volume.Grant{}) {
		t.Errorf("the record says %v (%v), want %v", have, is, want)
	}
	prefix, n := fmt.Sprintf("%s%s:", nvmet.Prefix, id.Key), 0
	k.mu.Lock()
	defer k.mu.Unlock()
	for nqn := range k.exports {
		if strings.HasPrefix(nqn, prefix) {
			n++
			if !strings.HasPrefix(nqn, fmt.Sprintf("%s%d:", prefix, want.Generation)) {
				t.Errorf("the kernel exports %s, want generation %d", nqn, want.Generation)
			}
		}
	}
	if is && n != 1 || !is && n != 0 {
		t.Errorf("the kernel has %d exports of it: %v", n, k.exports)
	}
	devices, err := l.Attached(t.Context(), id)
	check.OK(t, err)
	for _, d := range devices {
		if is != d.Kept {
			t.Errorf("attached as %+v", d)
		}
	}
}

// TestExportAgain: who is given a volume is told whether it was before, by the same claim: what it wrote then may still be on its way to the disk. After
// Unexport, which waits for that, it is another export.
func TestExportAgain(t *testing.T) {
	l, _, _, _ := home(t)
	v := create(t, l, "a")
	before := ""
	for i, again := range []bool{false, true, true, false} {
		if i == 3 {
			check.OK(t, l.Unexport(t.Context(), v.ID, 1))
		}
		e, err := l.Export(t.Context(), v.ID, grant(1, "b"))
		if check.OK(t, err); e.Again != again || (e.NQN == before) != again {
			t.Errorf("export %d is %+v, after %s", i, e, before)
		}
		before = e.NQN
	}
	if e, err := l.Export(t.Context(), v.ID, grant(2, "b")); err != nil || e.Again {
		t.Errorf("by another claim it is %+v, %v", e, err)
	}
	check.OK(t, l.Unexport(t.Context(), v.ID, 0))
}

// TestLegExportEnds: the connections of a leg end before its namespace does (see TestLegEnds in pkg/blockdev/nvme), whoever ends its export, and also those of
// an export that may be a leg's, and of a volume that its consumer copies to another node. The users of any other volume have errors at once.
func TestLegExportEnds(t *testing.T) {
	l, k, _, _ := home(t)
	plain := create(t, l, "plain")
	leg, err := l.Create(t.Context(), volume.Spec{Name: "leg", Size: volume.Range{Required: mib}, Access: volume.AccessAny, ReplicaOf: "ff"})
	check.OK(t, err)
	moves := create(t, l, "moves")
	for _, v := range []volume.Volume{plain, leg, moves} {
		e, err := l.Export(t.Context(), v.ID, grant(1, "b"))
		check.OK(t, err)
		if v.ID == moves.ID {
			check.OK(t, second(l.Describe(t.Context(), v.ID, 1)))
		}
		k.taken()
		check.OK(t, l.Unexport(t.Context(), v.ID, 1))
		want := []string{"remove " + e.NQN}
		if v.ID != plain.ID {
			want = []string{"withdraw " + e.NQN, "remove " + e.NQN}
		}
		same(t, "its export ends with "+v.Name, k.taken(), want)
	}
	e, err := l.Export(t.Context(), leg.ID, grant(2, "b"))
	check.OK(t, err)
	_, err = l.Export(t.Context(), leg.ID, grant(3, "c"))
	check.OK(t, err)
	if calls := k.taken(); !slices.Contains(calls, "withdraw "+e.NQN) {
		t.Errorf("given to another node: %v", calls)
	}
	check.OK(t, l.Unexport(t.Context(), leg.ID, 0))
}

// TestLegCannotBeFlushed: a leg is taken from its consumer, and cannot be flushed. It counts as one whose machine has lost power: the next user takes another one.
// A disk tells only once what it could not flush. That does not hold for a leg that was closed before: nothing was written to it since it was flushed.
func TestLegCannotBeFlushed(t *testing.T) {
	for _, c := range []struct{ closed, bad, lost bool }{{false, false, false}, {false, true, true}, {true, true, false}} {
		t.Run(fmt.Sprintf("%+v", c), func(t *testing.T) {
			bad := false
			l := start(t, 0, unflushable{open(t, "default", filesURL(t)), &bad})
			serve(t, l, newTarget(t), &consumer{})
			e := volume.NewEverywhere(l, start(t, 0, memory.NewDisk(1<<30).Open("others", nil)), nowhere{})
			leg, err := l.Create(t.Context(), volume.Spec{Name: "leg", Size: volume.Range{Required: mib}, Access: volume.AccessAny, ReplicaOf: "ff"})
			check.OK(t, err)
			is, err := e.Leg(t.Context(), leg.ID)
			check.OK(t, err)
			state := volume.LegState{Sound: 1, Opened: 1, Closed: c.closed, Boot: is.Now, Common: "X", Era: 7, List: 3, Listed: 2}
			check.OK(t, e.ChangeLeg(t.Context(), leg.ID, func(s *volume.LegState, _ map[string]string) error {
				*s = state
				return nil
			}))
			check.OK(t, second(l.Export(t.Context(), leg.ID, grant(1, "b"))))
			bad = c.bad
			check.OK(t, l.Unexport(t.Context(), leg.ID, 1))
			bad = false
			is, err = e.Leg(t.Context(), leg.ID)
			if check.OK(t, err); is.LostPower() != c.lost {
				t.Errorf("it may lack what was not flushed: %v", is.LostPower())
			}
			if is.Boot = state.Boot; is.LegState != state {
				t.Errorf("it is %+v, not %+v", is.LegState, state)
			}
		})
	}
}

// TestExportTLS: the export of each generation has a TLS key of its own, which is in the answer only. A repeated Export returns the same key. An export
// that was made without TLS stays as it is until it ends.
func TestExportTLS(t *testing.T) {
	l, k, _, _ := home(t)
	v := create(t, l, "a")
	plain, err := l.Export(t.Context(), v.ID, grant(1, "b"))
	if check.OK(t, err); plain.PSK != (secret.Text{}) {
		t.Errorf("without TLS there is a key: %v", plain)
	}
	// An export goes on without TLS, or with it, as it was made, until it ends. The answer says so (Otherwise).
	l.ServeExports(t.Context(), volume.Exporting{Boot: "1", Open: func() (volume.Exporter, error) { return k, nil }, Key: nodeKey, TLS: true, Locks: &keylock.Table{}})
	ails(t, l, v.ID)
	exportedTo(t, l, k, v.ID, grant(1, "b"))
	if again, err := l.Export(t.Context(), v.ID, grant(1, "b")); err != nil || !again.Otherwise || again.NQN != plain.NQN || again.PSK != (secret.Text{}) {
		t.Errorf("asked for it again, it is %v with %v, %v", again, again.PSK, err)
	}
	exportedTo(t, l, k, v.ID, grant(1, "b"))
	ails(t, l, v.ID)
	check.OK(t, l.Unexport(t.Context(), v.ID, 1))
	other, err := l.Export(t.Context(), v.ID, grant(1, "b"))
	if check.OK(t, err); other.NQN == plain.NQN || other.PSK == (secret.Text{}) || other.Otherwise {
		t.Errorf("given back, and asked for again, it is %s with %v, after %s", other.NQN, other.PSK, plain.NQN)
	}
	l.ServeExports(t.Context(), volume.Exporting{Boot: "1", Open: func() (volume.Exporter, error) { return k, nil }, Key: nodeKey, Locks: &keylock.Table{}})
	if again, err := l.Export(t.Context(), v.ID, grant(1, "b")); err != nil || !again.Otherwise || again.NQN != other.NQN || again.PSK != other.PSK {
		t.Errorf("to be without again, it is %v with %v, %v; it was %v", again, again.PSK, err, other.PSK)
	}
	l.ServeExports(t.Context(), volume.Exporting{Boot: "1", Open: func() (volume.Exporter, error) { return k, nil }, Key: nodeKey, TLS: true, Locks: &keylock.Table{}})
	first, err := l.Export(t.Context(), v.ID, grant(2, "b"))
	check.OK(t, err)
	if !regexp.MustCompile(`^NVMeTLSkey-1:01:[A-Za-z0-9+/]{48}:$`).MatchString(first.PSK.Reveal()) || first.PSK.Reveal()[16:] == first.Secret.Reveal()[10:] || k.exports[first.NQN].PSK != first.PSK {
		t.Error("the key is not as NVMe has it, or that of the authentication, or the kernel has another one")
	}
	again, err := l.Export(t.Context(), v.ID, grant(2, "b"))
	if check.OK(t, err); again.PSK != first.PSK {
		t.Error("asked again, it is another one")
	}
	text := fmt.Sprintf("%v %+v %#v %v", first, first, first, first.Record.Labels)
	if strings.Contains(text, first.PSK.Reveal()) {
		t.Errorf("the key is in %s", text)
	}
	next, err := l.Export(t.Context(), v.ID, grant(3, "b"))
	if check.OK(t, err); next.PSK == first.PSK {
		t.Error("the next generation has the same key")
	}
	check.OK(t, l.Unexport(t.Context(), v.ID, 0))
	check.OK(t, l.Delete(t.Context(), v.ID))
}

func TestExport(t *testing.T) {
	l, k, _, url := home(t)
	v := create(t, l, "a")
	first, err := l.Export(t.Context(), v.ID, grant(1, "b"))
	check.OK(t, err)
	for _, c := range []struct{ have, want string }{
		{first.NQN, `^nqn\.2026-11\.dev\.ashlar:` + v.ID.Key + `:1:[0-9a-f]{16}$`},
		{first.Host, `^nqn\.2026-11\.dev\.ashlar:node:[0-9a-f]{16}:[0-9a-f]{16}$`},
		{first.UUID, `^[0-9a-f]{8}-[0-9a-f]{4}-8[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`},
		{first.Secret.Reveal(), `^DHHC-1:00:[A-Za-z0-9+/]{48}:$`},
	} {
		if !regexp.MustCompile(c.want).MatchString(c.have) {
			t.Errorf("%q, want %s", c.have, c.want)
		}
	}
	if first.Size != mib || first.Record.Size != mib || first.Record.Name != "a" {
		t.Errorf("%d bytes, record %+v", first.Size, first.Record)
	}
	exportedTo(t, l, k, v.ID, grant(1, "b"))
	if e := k.exports[first.NQN]; e.Host != first.Host || e.Secret != first.Secret || e.UUID != first.UUID {
		t.Errorf("the kernel has another one: %q, %q", e.Host, e.UUID)
	}
	again, err := l.Export(t.Context(), v.ID, grant(1, "b"))
	check.OK(t, err)
	if again.NQN != first.NQN || again.Host != first.Host || again.Secret != first.Secret || again.UUID != first.UUID {
		t.Errorf("asked again: %v, %v", again.NQN, first.NQN)
	}
	// The secret and the host's name are neither printed nor in the record.
	text := fmt.Sprintf("%v %+v %#v", first, first, first)
	for _, value := range first.Record.Labels {
		text += " " + value
	}
	for _, hidden := range []string{first.Secret.Reveal(), first.Host[len(first.Host)-16:]} {
		if strings.Contains(text, hidden) {
			t.Errorf("the secret or the host's name is in %s", text)
		}
	}
	have, err := l.Get(t.Context(), v.ID)
	check.OK(t, err)
	o, err := l.Overview(t.Context(), nil)
	check.OK(t, err)
	if have.Exported != grant(1, "b") || o.Volumes[0].Published != "b" {
		t.Errorf("exported to %v, shown %q", have.Exported, o.Volumes[0].Published)
	}
	problems, err := l.Health(t.Context(), v.ID)
	if len(problems) > 0 || err != nil {
		t.Errorf("%v, %v", problems, err)
	}

	k.taken()
	fails(t, second(l.Export(t.Context(), v.ID, grant(0, "b"))), errdefs.ErrInvalid, "no generation")
	for _, to := range []string{"", "a b", node} {
		fails(t, second(l.Export(t.Context(), v.ID, grant(2, to))), errdefs.ErrInvalid, to)
	}
	fails(t, l.Delete(t.Context(), v.ID), errdefs.ErrInUse, "delete")
	check.OK(t, l.Unexport(t.Context(), v.ID, 2)) // another generation: nothing ends
	exportedTo(t, l, k, v.ID, grant(1, "b"))
	if calls := k.taken(); len(calls) > 0 {
		t.Errorf("calls %v", calls)
	}
	// An export to another node ends the present one first.
	next, err := l.Export(t.Context(), v.ID, grant(2, "c"))
	check.OK(t, err)
	same(t, "calls", k.taken(), []string{"remove " + first.NQN, "add " + next.NQN})
	if next.Host == first.Host || next.Secret == first.Secret || next.UUID == first.UUID {
		t.Error("the next generation has what the one before had")
	}
	fails(t, second(l.Export(t.Context(), v.ID, grant(1, "b"))), errdefs.ErrPrecondition, "an earlier generation")
	exportedTo(t, l, k, v.ID, grant(2, "c"))
	k.plain = true // as a kernel that cannot authenticate
	other, err := l.Export(t.Context(), v.ID, grant(2, "b"))
	check.OK(t, err)
	exportedTo(t, l, k, v.ID, grant(2, "b"))
	if other.Secret != (secret.Text{}) || other.NQN == next.NQN {
		t.Errorf("%v, %s after %s", other.Secret, other.NQN, next.NQN)
	}
	for range 2 {
		check.OK(t, l.Unexport(t.Context(), v.ID, 0))
		exportedTo(t, l, k, v.ID, volume.Grant{})
	}
	check.OK(t, l.Delete(t.Context(), v.ID))
	check.OK(t, l.Unexport(t.Context(), v.ID, 0))
	fails(t, second(l.Export(t.Context(), v.ID, grant(3, "b"))), errdefs.ErrNotFound, "a volume that is gone")
	_ = url
}

// TestExportNotServed: a node that does not serve exports exports nothing. A volume that it exported before cannot be attached on it, nor the export be ended.
func TestExportNotServed(t *testing.T) {
	disk := memory.NewDisk(8 << 30)
	l, k := start(t, 0, disk.Open("default", nil)), newTarget(t)
	v := create(t, l, "a")
	fails(t, second(l.Export(t.Context(), v.ID, grant(1, "b"))), errdefs.ErrUnavailable, "export")
	serve(t, l, k, nil)
	check.OK(t, second(l.Export(t.Context(), v.ID, grant(1, "b"))))
	l = start(t, 0, disk.Open("default", nil))
	exportedTo(t, l, k, v.ID, grant(1, "b"))
	fails(t, second(l.Attach(t.Context(), v, nil)), errdefs.ErrUnavailable, "attach")
	fails(t, l.Unexport(t.Context(), v.ID, 0), errdefs.ErrUnavailable, "unexport")
	ails(t, l, v.ID, "NotExported")
	serve(t, l, k, nil)
	check.OK(t, l.Unexport(t.Context(), v.ID, 0))
}

// ails makes sure that a volume has the problems with the given reasons, and no others.
func ails(t *testing.T, l *volume.Local, id volume.ID, want ...string) {
	t.Helper()
	problems, err := l.Health(t.Context(), id)
	check.OK(t, err)
	reasons := []string{}
	for _, p := range problems {
		reasons = append(reasons, p.Reason)
	}
	same(t, "problems", reasons, want)
}

// TestExportDamaged: a volume whose record does not tell to whom it is exported, as the label cannot be read, is not exported and not copied (ErrDataLoss).
func TestExportDamaged(t *testing.T) {
	disk := memory.NewDisk(8 << 30)
	pool := disk.Open("default", nil)
	l, k := start(t, 0, pool), newTarget(t)
	serve(t, l, k, nil)
	v := create(t, l, "a")
	for _, label := range []string{"x", "0:0123456789abcdef:0:b", "01:0123456789abcdef:0:b", "1:0123456789ABCDEF:0:b", "1:0123456789abcdef:0:", "1:0123456789abcdef:0:b c", "1:0123456789abcdef:0:b\n",
		"9999999999999999999:0123456789abcdef:0:b", "1:0123456789abcde:0:b", " 1:0123456789abcdef:0:b"} {
		check.OK(t, second(pool.SetLabels(t.Context(), blockdev.Ref{Kind: v.ID.Kind, Key: v.ID.Key}, func(labels map[string]string) error {
			labels["export"] = label
			return nil
		})))
		fails(t, second(l.Export(t.Context(), v.ID, grant(1, "b"))), errdefs.ErrDataLoss, label)
		fails(t, second(l.CreateSnapshot(t.Context(), "s", v.ID)), errdefs.ErrDataLoss, label)
		l.ServeExports(t.Context(), volume.Exporting{Boot: "1", Open: func() (volume.Exporter, error) { return k, nil }, Key: nodeKey, Locks: &keylock.Table{}})
	}
	if calls := k.taken(); len(calls) > 0 {
		t.Errorf("calls %v", calls)
	}
}

// TestExportUnread: the exports of a volume whose label cannot be read are ended by what the kernel tells, so that the volume can be released and deleted. One
// of another generation stays.
func TestExportUnread(t *testing.T) {
	disk := memory.NewDisk(8 << 30)
	pool := disk.Open("default", nil)
	l, k := start(t, 0, pool), newTarget(t)
	serve(t, l, k, nil)
	v, other := create(t, l, "a"), create(t, l, "b")
	unread := func() {
		t.Helper()
		check.OK(t, second(pool.SetLabels(t.Context(), blockdev.Ref{Kind: v.ID.Kind, Key: v.ID.Key}, func(labels map[string]string) error {
			labels["export"] = "x"
			return nil
		})))
	}
	for _, generation := range []int64{3, 0} { // 0: of any generation
		exported, err := l.Export(t.Context(), v.ID, grant(3, "b"))
		check.OK(t, err)
		check.OK(t, second(l.Export(t.Context(), other.ID, grant(3, "b"))))
		unread()
		k.taken()
		fails(t, l.Unexport(t.Context(), v.ID, 2), errdefs.ErrDataLoss, "another generation")
		k.step = func(string) error { return errBroken }
		fails(t, l.Unexport(t.Context(), v.ID, generation), errBroken, "the export does not end")
		fails(t, second(l.AttachRaw(t.Context(), v, nil, true)), errBroken, "the export does not end")
		k.step = nil
		k.taken()
		check.OK(t, l.Unexport(t.Context(), v.ID, generation))
		same(t, "calls", k.taken(), []string{"withdraw " + exported.NQN, "remove " + exported.NQN})
		exportedTo(t, l, k, v.ID, volume.Grant{})
		exportedTo(t, l, k, other.ID, grant(3, "b"))
	}
	check.OK(t, second(l.Export(t.Context(), v.ID, grant(3, "b"))))
	unread()
	fails(t, l.Delete(t.Context(), v.ID), errdefs.ErrDataLoss, "delete")
	check.OK(t, l.Unexport(t.Context(), v.ID, 3))
	unread() // now the kernel has no export of it
	check.OK(t, l.Delete(t.Context(), v.ID))
	check.OK(t, l.Unexport(t.Context(), other.ID, 3)) // its device would outlive the test
}

// TestExportInUse: a volume that is in use on its home is not exported. An exported one is attached on its home only after its export has ended.
func TestExportInUse(t *testing.T) {
	l, k, _, _ := home(t)
	v, device := raw(t, l, "default", "a")
	fails(t, second(l.Export(t.Context(), v.ID, grant(1, "b"))), errdefs.ErrInUse, "handed out")
	user, err := os.OpenFile(device.Path, os.O_RDWR, 0) // a pod whose claim is gone
	check.OK(t, err)
	fails(t, l.Detach(t.Context(), v.ID), errdefs.ErrInUse, "detach")
	fails(t, second(l.Export(t.Context(), v.ID, grant(1, "b"))), errdefs.ErrInUse, "held")
	check.OK(t, user.Close())
	check.OK(t, l.Detach(t.Context(), v.ID))
	exportedTo(t, l, k, v.ID, volume.Grant{})
	first, err := l.Export(t.Context(), v.ID, grant(1, "b"))
	check.OK(t, err)

	k.taken()
	k.step = func(string) error { return errBroken }
	fails(t, second(l.AttachRaw(t.Context(), v, nil, true)), errBroken, "the export does not end")
	fails(t, second(l.Attach(t.Context(), v, nil)), errBroken, "the export does not end")
	fails(t, l.Unexport(t.Context(), v.ID, 1), errBroken, "the export does not end")
	k.step = nil
	exportedTo(t, l, k, v.ID, grant(1, "b"))
	again, err := l.AttachRaw(t.Context(), v, nil, true)
	check.OK(t, err)
	check.OK(t, again.Close())
	same(t, "calls", k.taken(), []string{"remove " + first.NQN})
	if _, is, err := l.ExportOf(t.Context(), v.ID); is || err != nil {
		t.Errorf("exported: %v, %v", is, err)
	}
	check.OK(t, l.Detach(t.Context(), v.ID))

	// If a process here has the exported device open, the export ends (the fence), but the device stays until it is closed.
	exported, err := l.Export(t.Context(), v.ID, grant(2, "b"))
	check.OK(t, err)
	user, err = os.Open(k.exports[exported.NQN].Device)
	check.OK(t, err)
	fails(t, l.Unexport(t.Context(), v.ID, 2), errdefs.ErrInUse, "held")
	if len(k.exports) > 0 {
		t.Error("the kernel exports it still")
	}
	fails(t, second(l.Attach(t.Context(), v, nil)), errdefs.ErrInUse, "held")
	check.OK(t, user.Close())
	check.OK(t, l.Unexport(t.Context(), v.ID, 2))
	drop(t, l, v)

	v, err = l.Create(t.Context(), volume.Spec{Name: "m", Size: volume.Range{Required: 16 * mib}, Filesystem: "ext4"})
	check.OK(t, err)
	mounted := mountNew(t, l, v)
	fails(t, second(l.Export(t.Context(), v.ID, grant(1, "b"))), errdefs.ErrInUse, "mounted")
	drivertest.Unmount(t, mounted)
	check.OK(t, l.Detach(t.Context(), v.ID))
	check.OK(t, second(l.Export(t.Context(), v.ID, grant(1, "b"))))
	check.OK(t, l.Unexport(t.Context(), v.ID, 1))
	drop(t, l, v)
}

// mountNew makes an ext4 on a volume, and mounts it.
func mountNew(t *testing.T, l *volume.Local, v volume.Volume) (dir string) {
	t.Helper()
	device, err := l.Attach(t.Context(), v, nil)
	check.OK(t, err)
	dir = t.TempDir()
	drivertest.Run(t, "mkfs.ext4", "-q", device.Path)
	check.OK(t, unix.Mount(device.Path, dir, "ext4", 0, ""))
	t.Cleanup(func() { _ = unix.Unmount(dir, 0) })
	l.Mounts().Add(device.Number, dir, true)
	check.OK(t, device.Close())
	return dir
}

// TestExportRaw: a blank volume stays Blank, not Raw, if AttachRaw fails because its export does not end.
func TestExportRaw(t *testing.T) {
	l, k, _, _ := home(t)
	v := create(t, l, "a")
	check.OK(t, second(l.Export(t.Context(), v.ID, grant(1, "b"))))
	k.step = func(string) error { return errBroken }
	fails(t, second(l.AttachRaw(t.Context(), v, nil, true)), errBroken, "the export does not end")
	k.step = nil
	have, err := l.Get(t.Context(), v.ID)
	check.OK(t, err)
	if have.Format.State != volume.Blank {
		t.Errorf("its record says %v", have.Format)
	}
	check.OK(t, l.Unexport(t.Context(), v.ID, 0))
}

// TestExportStarts: a start of the driver finds the exports as they were. Those that the kernel does not have any more it makes again, also if the pool or the
// exporter is there only later.
func TestExportStarts(t *testing.T) {
	url := filesURL(t)
	k := newTarget(t)
	pool := opened(t, "default", url)
	l := start(t, 0, pool)
	serve(t, l, k, nil)
	v := create(t, l, "a")
	first, err := l.Export(t.Context(), v.ID, grant(7, "b"))
	check.OK(t, err)
	for _, reboot := range []bool{false, true} {
		if reboot {
			k.reboot()
			check.OK(t, l.Detach(t.Context(), v.ID))
		}
		check.OK(t, pool.Close())
		pool = opened(t, "default", url)
		l = start(t, 0, pool)
		devices, err := l.Attached(t.Context(), v.ID)
		if want := !reboot; err != nil || (len(devices) == 1) != want {
			t.Errorf("reboot %v: attached as %v, %v", reboot, devices, err)
		}
		serve(t, l, k, nil)
		exportedTo(t, l, k, v.ID, grant(7, "b"))
		if e := k.exports[first.NQN]; e.Host != first.Host || e.Secret != first.Secret || e.UUID != first.UUID {
			t.Errorf("reboot %v: exported as %q, %q", reboot, e.Host, e.UUID)
		}
	}

	// The pool opens later; then also the exporter does.
	for _, late := range []bool{false, true} {
		k.reboot()
		check.OK(t, l.Detach(t.Context(), v.ID))
		check.OK(t, pool.Close())
		there, ready := false, !late
		lazily := lazy.New("default", errors.New("no disk"), func(ctx context.Context) (blockdev.Pool, error) {
			if !there {
				return nil, errors.New("no disk")
			}
			return pools.Open(ctx, "default", url)
		})
		l = start(t, 0, lazily)
		locks := &keylock.Table{}
		l.ServeExports(t.Context(), volume.Exporting{Boot: "1", Key: nodeKey, Locks: locks, Open: func() (volume.Exporter, error) {
			if !ready {
				return nil, errdefs.ErrUnsupported
			}
			return k, nil
		}})
		there = true
		for end := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
			if _, err = l.Get(t.Context(), v.ID); err == nil || time.Now().After(end) {
				break
			}
		}
		check.OK(t, err)
		if late {
			ails(t, l, v.ID, "NotExported")
			l.RetryExports(t.Context())
			ails(t, l, v.ID, "NotExported")
			ready = true
			unlock := check.Locked(t, locks, keylock.Volume(v.ID.Key))
			l.RetryExports(t.Context()) // a call has the lock of the volume
			ails(t, l, v.ID, "NotExported")
			unlock()
			l.RetryExports(t.Context())
		}
		ails(t, l, v.ID)
		exportedTo(t, l, k, v.ID, grant(7, "b"))
		pool = lazily
	}
	check.OK(t, l.Unexport(t.Context(), v.ID, 7))
	check.OK(t, pool.Close())
}

// TestExportEndsWithMachine: after a restart of the machine its exports are not made again, as the disk may have lost writes that were acknowledged and not
// flushed. A consumer that asks again gets another export.
func TestExportEndsWithMachine(t *testing.T) {
	url, k := filesURL(t), newTarget(t)
	pool := opened(t, "default", url)
	l := start(t, 0, pool)
	serve(t, l, k, nil)
	v := create(t, l, "a")
	before, err := l.Export(t.Context(), v.ID, grant(7, "b"))
	check.OK(t, err)
	k.reboot()
	check.OK(t, errors.Join(l.Detach(t.Context(), v.ID), pool.Close()))
	pool = opened(t, "default", url)
	l = start(t, 0, pool)
	l.ServeExports(t.Context(), volume.Exporting{Boot: "2", Key: nodeKey, Locks: &keylock.Table{}, Open: func() (volume.Exporter, error) { return k, nil }})
	exportedTo(t, l, k, v.ID, volume.Grant{})
	again, err := l.Export(t.Context(), v.ID, grant(7, "b"))
	check.OK(t, err)
	exportedTo(t, l, k, v.ID, grant(7, "b"))
	if again.NQN == before.NQN || again.Secret == before.Secret || again.UUID == before.UUID {
		t.Errorf("exported as before: %s", again.NQN)
	}
	check.OK(t, errors.Join(l.Unexport(t.Context(), v.ID, 7), pool.Close()))
}

// TestExportsTogether: a start makes all exports again in one call. One that fails does not keep the others from being made.
func TestExportsTogether(t *testing.T) {
	disks := []*memory.Disk{memory.NewDisk(8 << 30), memory.NewDisk(8 << 30)}
	again := func() *volume.Local {
		return start(t, 0, disks[0].Open("default", nil), disks[1].Open("other", nil))
	}
	l, k := again(), newTarget(t)
	serve(t, l, k, nil)
	var all []volume.Volume
	var exported []volume.Exported
	for i := range 4 {
		v, err := l.Create(t.Context(), volume.Spec{Name: fmt.Sprint(i), Pool: []string{"default", "other"}[i%2], Size: volume.Range{Required: mib}})
		check.OK(t, err)
		e, err := l.Export(t.Context(), v.ID, grant(1, "b"))
		check.OK(t, err)
		all, exported = append(all, v), append(exported, e)
	}
	k.reboot()
	for _, v := range all {
		check.OK(t, l.Detach(t.Context(), v.ID))
	}
	k.adds, k.refused = nil, exported[1].NQN
	l = again()
	serve(t, l, k, nil)
	if len(k.adds) == 0 || k.adds[0] != len(all) {
		t.Errorf("exported again in calls for %v", k.adds)
	}
	for i, v := range all {
		if i == 1 {
			ails(t, l, v.ID, "NotExported")
			continue
		}
		ails(t, l, v.ID)
		exportedTo(t, l, k, v.ID, grant(1, "b"))
	}
	k.refused = ""
	l.RetryExports(t.Context())
	ails(t, l, all[1].ID)
	for _, v := range all {
		exportedTo(t, l, k, v.ID, grant(1, "b"))
		check.OK(t, l.Unexport(t.Context(), v.ID, 1))
	}
}

// TestExportsRetried: exports that could not be made at a start, as the exporter was not ready, are made later in one call too.
func TestExportsRetried(t *testing.T) {
	disk, k := memory.NewDisk(8<<30), newTarget(t)
	l := start(t, 0, disk.Open("default", nil))
	serve(t, l, k, nil)
	var all []volume.ID
	for i := range 3 {
		v := create(t, l, fmt.Sprint(i))
		check.OK(t, second(l.Export(t.Context(), v.ID, grant(1, "b"))))
		all = append(all, v.ID)
	}
	k.reboot()
	for _, id := range all {
		check.OK(t, l.Detach(t.Context(), id))
	}
	l, k.adds = start(t, 0, disk.Open("default", nil)), nil
	there := false
	l.ServeExports(t.Context(), volume.Exporting{Boot: "1", Key: nodeKey, Locks: &keylock.Table{}, Open: func() (volume.Exporter, error) {
		if !there {
			return nil, errdefs.ErrUnavailable
		}
		return k, nil
	}})
	there = true
	l.RetryExports(t.Context())
	same(t, "exported in calls for", k.adds, []int{len(all)})
	for _, id := range all {
		ails(t, l, id)
		exportedTo(t, l, k, id, grant(1, "b"))
		check.OK(t, l.Unexport(t.Context(), id, 1))
	}
}

// TestExportTaken: exports that another tool has removed from the kernel's target, as nvmetcli clear removes all, are made again as they were. Those whose end
// has begun are not.
func TestExportTaken(t *testing.T) {
	l, k, _, _ := home(t)
	v, ending := create(t, l, "a"), create(t, l, "b")
	out, err := l.Export(t.Context(), v.ID, grant(1, "b"))
	check.OK(t, err)
	check.OK(t, second(l.Export(t.Context(), ending.ID, grant(1, "b"))))
	k.taken()
	l.RetryExports(t.Context())
	same(t, "with nothing taken", k.taken(), nil)

	devices, err := l.Attached(t.Context(), ending.ID)
	check.OK(t, err)
	user, err := os.Open(devices[0].Path)
	check.OK(t, err)
	fails(t, l.Unexport(t.Context(), ending.ID, 1), errdefs.ErrInUse, "the end of an export whose device somebody has open")
	k.reboot()
	k.taken()
	l.RetryExports(t.Context())
	same(t, "with all taken", k.taken(), []string{"add " + out.NQN})
	exportedTo(t, l, k, v.ID, grant(1, "b"))
	check.OK(t, user.Close())
	for _, id := range []volume.ID{v.ID, ending.ID} {
		check.OK(t, l.Unexport(t.Context(), id, 1))
	}
	l.RetryExports(t.Context())
	if len(k.exports) > 0 {
		t.Errorf("exported is %v", k.exports)
	}
}

// TestExportTakenInPart: an export that another tool has taken off the node's address, or from which it has removed the host, is made whole again.
func TestExportTakenInPart(t *testing.T) {
	l, k, _, _ := home(t)
	v := create(t, l, "a")
	out, err := l.Export(t.Context(), v.ID, grant(1, "b"))
	check.OK(t, err)
	k.taken()
	for _, k.shown = range []func(*nvmet.Export){func(e *nvmet.Export) { e.UUID, e.Device = "", "" }, func(e *nvmet.Export) { e.Host = "" }} {
		l.RetryExports(t.Context())
		same(t, "calls", k.taken(), []string{"add " + out.NQN})
	}
	k.shown = nil
	l.RetryExports(t.Context())
	same(t, "calls when it is whole", k.taken(), nil)
	check.OK(t, l.Unexport(t.Context(), v.ID, 1))
}

// TestExportEnding: an export whose end has begun is not made again, although the record still has it: neither if another tool has removed it, also when
// the end begins just as that is noticed, nor if it could not be made at the start.
func TestExportEnding(t *testing.T) {
	disk, k := memory.NewDisk(8<<30), newTarget(t)
	l := start(t, 0, disk.Open("default", nil))
	serve(t, l, k, nil)
	v := create(t, l, "a")
	out, err := l.Export(t.Context(), v.ID, grant(1, "b"))
	check.OK(t, err)
	ends := func() {
		k.step = func(what string) error {
			if what == "remove, done" {
				return errBroken
			}
			return nil
		}
		fails(t, l.Unexport(t.Context(), v.ID, 1), errBroken, "the end of an export, cut short")
		k.step = nil
	}
	k.reboot()
	k.taken()
	k.listed = func() {
		k.listed = nil
		ends()
	}
	l.RetryExports(t.Context())
	same(t, "calls, as the end begins after it was found to be taken", k.taken(), []string{"remove " + out.NQN})

	l = start(t, 0, disk.Open("default", nil))
	k.refused = out.NQN
	serve(t, l, k, nil)
	ails(t, l, v.ID, "NotExported")
	k.refused = ""
	ends()
	k.taken()
	l.RetryExports(t.Context())
	same(t, "calls, as the end has begun of what could not be exported", k.taken(), nil)
	check.OK(t, l.Unexport(t.Context(), v.ID, 1))
}

// TestExportAndLeftover: what another pool has left of a volume may still be exported, to the consumer from before the move. A start makes that export again,
// and that of the volume. If the latter fails, the end of the former does not hide that.
func TestExportAndLeftover(t *testing.T) {
	id, first, late := leaveInSecond(t, "sealed")
	pool, k := late.Open("second", nil), newTarget(t)
	l := start(t, 0, first.Open("first", nil), pool)
	serve(t, l, k, nil)
	out, err := l.Export(t.Context(), id, grant(5, "b"))
	check.OK(t, err)
	check.OK(t, second(pool.SetLabels(t.Context(), blockdev.Ref{Kind: id.Kind, Key: id.Key}, func(labels map[string]string) error {
		labels["export"] = "4:0123456789abcdef:1:b"
		return nil
	})))
	restart := func() {
		k.reboot()
		check.OK(t, l.Detach(t.Context(), id))
		l = start(t, 0, late.Open("second", nil), first.Open("first", nil))
		l.Locate(id, "first")
		serve(t, l, k, nil)
	}
	restart()
	if len(k.exports) != 2 {
		t.Errorf("a start exports %v", k.exports)
	}

	k.refused = out.NQN
	restart()
	ails(t, l, id, "NotExported")
	check.OK(t, l.DropLeft(t.Context(), "second", id, 3))
	ails(t, l, id, "NotExported")
	k.refused = ""
	l.RetryExports(t.Context())
	ails(t, l, id)
	exportedTo(t, l, k, id, grant(5, "b"))
	check.OK(t, l.Unexport(t.Context(), id, 5))
}

// TestExportPoolBack: if a call holds the lock of a volume when its pool opens, the volume is exported again after that call, if the record still says so then.
func TestExportPoolBack(t *testing.T) {
	disk, k := memory.NewDisk(8<<30), newTarget(t)
	l := start(t, 0, disk.Open("default", nil))
	serve(t, l, k, nil)
	v, ending := create(t, l, "a"), create(t, l, "b")
	for _, id := range []volume.ID{v.ID, ending.ID} {
		check.OK(t, second(l.Export(t.Context(), id, grant(1, "b"))))
	}
	k.reboot()
	there := false
	l = start(t, 0, lazy.New("default", errors.New("no disk"), func(context.Context) (blockdev.Pool, error) {
		if !there {
			return nil, errors.New("no disk")
		}
		return disk.Open("default", nil), nil
	}))
	locks := serve(t, l, k, nil)
	unlock := check.Locked(t, locks, keylock.Volume(v.ID.Key), keylock.Volume(ending.ID.Key))
	there = true
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if _, err := l.Get(t.Context(), v.ID); err == nil {
			break
		}
	}
	if len(k.exports) > 0 {
		t.Errorf("while calls work on the volumes, %v is exported", k.exports)
	}
	ails(t, l, v.ID) // to wait for the lock is no problem
	check.OK(t, l.Unexport(t.Context(), ending.ID, 1))
	unlock()
	l.RetryExports(t.Context())
	exportedTo(t, l, k, v.ID, grant(1, "b"))
	exportedTo(t, l, k, ending.ID, volume.Grant{})
	ails(t, l, v.ID)
	check.OK(t, l.Unexport(t.Context(), v.ID, 1))
}

// TestExportEarlier: a node that cannot export any more, as its kernel or its flags do not allow it, ends the exports from before the machine's last start, as
// the kernel cannot have them. It does not end others (ErrUnavailable).
func TestExportEarlier(t *testing.T) {
	disk, k := memory.NewDisk(8<<30), newTarget(t)
	pool := disk.Open("default", nil)
	l := start(t, 0, pool)
	serve(t, l, k, nil)
	v, read := create(t, l, "a"), create(t, l, "b")
	check.OK(t, second(l.Export(t.Context(), v.ID, grant(1, "b"))))
	check.OK(t, second(pool.SetLabels(t.Context(), blockdev.Ref{Kind: read.ID.Kind, Key: read.ID.Key}, func(labels map[string]string) error {
		labels["read"] = "0123456789abcdef:1"
		return nil
	})))
	alone := func(boot string) {
		l = start(t, 0, disk.Open("default", nil))
		l.ServeExports(t.Context(), volume.Exporting{Boot: boot, Locks: &keylock.Table{}})
	}
	alone("1")
	exportedTo(t, l, k, v.ID, grant(1, "b"))
	ails(t, l, v.ID, "NotExported")
	fails(t, l.Unexport(t.Context(), v.ID, 1), errdefs.ErrUnavailable, "the end of what the kernel may have")
	fails(t, second(l.Attach(t.Context(), v, nil)), errdefs.ErrUnavailable, "what the kernel may have")
	fails(t, second(l.Export(t.Context(), v.ID, grant(2, "b"))), errdefs.ErrUnavailable, "another one")
	fails(t, second(l.Readers(t.Context(), read.ID)), errdefs.ErrUnavailable, "who reads")
	fails(t, l.EndReaders(t.Context(), read.ID, nobody), errdefs.ErrUnavailable, "the end of what the kernel may have")
	fails(t, second(l.Attach(t.Context(), read, nil)), errdefs.ErrUnavailable, "what many read")

	k.reboot()
	check.OK(t, l.Detach(t.Context(), v.ID))
	alone("2")
	exportedTo(t, l, k, v.ID, volume.Grant{})
	ails(t, l, v.ID)
	if readers, err := l.Readers(t.Context(), read.ID); err != nil || len(readers) > 0 {
		t.Errorf("read by %v, %v", readers, err)
	}
	check.OK(t, l.EndReaders(t.Context(), read.ID, nobody))
	fails(t, second(l.Export(t.Context(), v.ID, grant(2, "b"))), errdefs.ErrUnavailable, "another one")
	drop(t, l, v)
	drop(t, l, read)
}

// TestExportGrows: the consumer of a volume that grows is told of it; if that fails, by the next call.
func TestExportGrows(t *testing.T) {
	l, k, _, _ := home(t)
	v := create(t, l, "a")
	exported, err := l.Export(t.Context(), v.ID, grant(1, "b"))
	check.OK(t, err)
	k.taken()
	k.step = func(string) error { return errBroken }
	fails(t, second(l.Expand(t.Context(), v.ID, volume.Range{Required: 4 * mib})), errBroken, "the consumer is not told")
	k.step = nil
	grown, err := l.Expand(t.Context(), v.ID, volume.Range{Required: 4 * mib})
	check.OK(t, err)
	same(t, "calls", k.taken(), []string{"resized " + exported.NQN})
	again, err := l.Export(t.Context(), v.ID, grant(1, "b"))
	check.OK(t, err)
	if grown.Size != 4*mib || again.Size != 4*mib {
		t.Errorf("%d bytes, exported are %d", grown.Size, again.Size)
	}
	check.OK(t, l.Unexport(t.Context(), v.ID, 1))
	k.taken()
	check.OK(t, second(l.Expand(t.Context(), v.ID, volume.Range{Required: 8 * mib})))
	if calls := k.taken(); len(calls) > 0 {
		t.Errorf("calls %v", calls)
	}
}

// TestExportCopies: while an exported volume is copied, its consumer holds its writes back. If it does not answer, or does not hold them until the end, no copy
// is made.
func TestExportCopies(t *testing.T) {
	slow := time.Duration(0)
	k, c := newTarget(t), &consumer{}
	l := start(t, 0, &stepping{open(t, "default", filesURL(t)), func(what string) error {
		if what == "create" && slow > 0 {
			time.Sleep(slow)
			return errBroken
		}
		return nil
	}})
	serve(t, l, k, c)
	a, b := create(t, l, "a"), create(t, l, "b")
	for id, to := range map[volume.ID]string{a.ID: "x", b.ID: "y"} {
		check.OK(t, second(l.Export(t.Context(), id, grant(1, to))))
	}
	copies := map[string]func(name string) error{
		"snapshot": func(name string) error { return second(l.CreateSnapshot(t.Context(), name, a.ID)) },
		"clone": func(name string) error {
			return second(l.Create(t.Context(), volume.Spec{Name: name, Source: a.ID, Size: volume.Range{Required: mib}}))
		},
		"group": func(name string) error { return second(l.CreateGroup(t.Context(), name, []volume.ID{a.ID, b.ID})) },
	}
	made := func() int {
		snapshots, err := l.ListSnapshots(t.Context(), volume.ID{}, volume.ID{}, 0)
		check.OK(t, err)
		volumes, err := l.List(t.Context(), volume.ID{}, 0)
		check.OK(t, err)
		return len(snapshots) + len(volumes)
	}
	for _, what := range slices.Sorted(maps.Keys(copies)) {
		before := made()
		*c = consumer{failure: fmt.Errorf("%w: no answer", errdefs.ErrUnavailable)}
		fails(t, copies[what](what), errdefs.ErrUnavailable, what+" while the consumer does not answer")
		*c = consumer{released: fmt.Errorf("%w: it went away", errdefs.ErrUnavailable)}
		fails(t, copies[what](what), errdefs.ErrUnavailable, what+" while the consumer goes away")
		if n := made(); n != before {
			t.Errorf("%s: %d are there after it failed, %d before", what, n, before)
		}
		*c = consumer{}
		check.OK(t, copies[what](what))
		for _, asked := range c.taken() {
			if is := strings.HasSuffix(asked, "x") || strings.HasSuffix(asked, "y") && what == "group"; !is {
				t.Errorf("%s: asked %s", what, asked)
			}
		}
		*c = consumer{nothing: true}
		check.OK(t, copies[what](what+" of nothing that is held back"))
		check.OK(t, copies[what](what+" of nothing that is held back")) // it is there already
	}
	// A group has all consumers hold their writes back before the first snapshot is made.
	*c = consumer{}
	check.OK(t, copies["group"]("g"))
	if asked := c.taken(); len(asked) != 4 || asked[0][:4] != "hold" || asked[1][:4] != "hold" {
		t.Errorf("asked %v", asked)
	}
	// A consumer that holds its writes back for too long is left alone for a while.
	l.SetLongestFreeze(time.Second)
	slow = 1500 * time.Millisecond
	*c = consumer{}
	fails(t, copies["snapshot"]("late"), errdefs.ErrPrecondition, "held for too long")
	slow, *c = 0, consumer{}
	fails(t, copies["snapshot"]("late"), errdefs.ErrPrecondition, "not long after")
	if asked := c.taken(); len(asked) > 0 {
		t.Errorf("asked %v", asked)
	}
	serve(t, l, k, nil)
	l.SetLongestFreeze(time.Microsecond) // that time is over now
	fails(t, copies["snapshot"]("nobody asks"), errdefs.ErrUnavailable, "without a way to the consumer")
	for _, id := range []volume.ID{a.ID, b.ID} {
		check.OK(t, l.Unexport(t.Context(), id, 0))
	}
	check.OK(t, copies["clone"]("of what nobody uses"))
}

// TestExportModified: the consumer of an exported volume sets its mutable parameters. If it cannot be asked, nothing changes.
func TestExportModified(t *testing.T) {
	l, k, c, _ := home(t)
	v := create(t, l, "a")
	check.OK(t, l.Modify(t.Context(), v.ID, map[string]string{"readAheadKiB": "64"}))
	check.OK(t, second(l.Export(t.Context(), v.ID, grant(1, "b"))))
	recorded := func() string {
		have, err := l.Get(t.Context(), v.ID)
		check.OK(t, err)
		return have.Mutable["readAheadKiB"]
	}
	c.failure = errdefs.ErrUnavailable
	fails(t, l.Modify(t.Context(), v.ID, map[string]string{"readAheadKiB": "128"}), errdefs.ErrUnavailable, "the consumer does not answer")
	if have := recorded(); have != "64" {
		t.Errorf("recorded is %s", have)
	}
	c.failure = nil
	check.OK(t, l.Modify(t.Context(), v.ID, map[string]string{"readAheadKiB": "128"}))
	if have := recorded(); have != "128" || c.mutable["readAheadKiB"] != "128" {
		t.Errorf("recorded is %s, the consumer has %v", have, c.mutable)
	}
	serve(t, l, k, nil)
	fails(t, l.Modify(t.Context(), v.ID, map[string]string{"readAheadKiB": "256"}), errdefs.ErrUnavailable, "nobody asks")
	if have := recorded(); have != "128" {
		t.Errorf("recorded is %s", have)
	}
	check.OK(t, l.Unexport(t.Context(), v.ID, 0))

	// Modified, which a consumer calls, sets them on its devices and not in the record.
	device, err := l.AttachRaw(t.Context(), v, nil, true)
	check.OK(t, err)
	check.OK(t, device.Close())
	check.OK(t, l.Modified(t.Context(), v.ID, map[string]string{"readAheadKiB": "512"}))
	set, err := os.ReadFile(filepath.Join("/sys/block", filepath.Base(device.Path), "queue/read_ahead_kb"))
	check.OK(t, err)
	if strings.TrimSpace(string(set)) != "512" || recorded() != "128" {
		t.Errorf("set is %s, recorded %s", set, recorded())
	}
	fails(t, l.Modified(t.Context(), v.ID, map[string]string{"readAheadKiB": "5"}), errdefs.ErrInvalid, "no such value")
	drop(t, l, v)
}

// elsewhere is a pool of volumes of another node: it lists no records, and connected is attached, as if over a connection.
type elsewhere struct {
	blockdev.Pool
	connected blockdev.Ref
}

func (e elsewhere) Orphans(ctx context.Context) (map[blockdev.Ref][]blockdev.Device, error) {
	devices, err := e.Attached(ctx, e.connected)
	return map[blockdev.Ref][]blockdev.Device{e.connected: devices}, err
}

func (elsewhere) List(context.Context, blockdev.Kind, string, int) ([]blockdev.Record, error) {
	return nil, nil
}

// TestHold: a consumer freezes the mounted filesystem for the home until release is called, but no longer than it may. release tells whether the writes were
// held back all the time.
func TestHold(t *testing.T) {
	disk := memory.NewDisk(8 << 30)
	l := start(t, 0, disk.Open("default", nil))
	v, err := l.Create(t.Context(), volume.Spec{Name: "a", Size: volume.Range{Required: 16 * mib}, Filesystem: "ext4"})
	check.OK(t, err)
	dir := mountNew(t, l, v)
	// write begins to write a file, which ends when writes go on.
	write := func() <-chan error {
		done := make(chan error, 1)
		go func() { done <- os.WriteFile(filepath.Join(dir, "file"), []byte("content"), 0o600) }()
		return done
	}
	held := func(done <-chan error) {
		t.Helper()
		select {
		case err := <-done:
			t.Errorf("a write went through: %v", err)
		case <-time.After(50 * time.Millisecond):
		}
	}
	goesOn := func(done <-chan error) {
		t.Helper()
		select {
		case err := <-done:
			check.OK(t, err)
		case <-time.After(20 * time.Second):
			_ = freeze(dir, false)
			t.Fatal("writes do not go on")
		}
	}
	release, err := l.Hold(t.Context(), v.ID)
	check.OK(t, err)
	done := write()
	held(done)
	check.OK(t, release())
	check.OK(t, release())
	goesOn(done)

	// Somebody else ends the freeze, or it lasts for too long.
	release, err = l.Hold(t.Context(), v.ID)
	check.OK(t, err)
	check.OK(t, freeze(dir, false))
	fails(t, release(), errdefs.ErrUnavailable, "thawed by others")
	l.SetLongestFreeze(100 * time.Millisecond)
	release, err = l.Hold(t.Context(), v.ID)
	check.OK(t, err)
	goesOn(write())
	fails(t, release(), errdefs.ErrUnavailable, "held for too long")
	l.SetLongestFreeze(time.Minute)

	// The freeze of somebody else stays.
	check.OK(t, freeze(dir, true))
	release, err = l.Hold(t.Context(), v.ID)
	if release != nil || err != nil {
		t.Errorf("of what somebody else froze: %v", err)
	}
	done = write()
	held(done)
	check.OK(t, freeze(dir, false))
	goesOn(done)

	// A start of the driver ends the freeze.
	release, err = l.Hold(t.Context(), v.ID)
	check.OK(t, err)
	done = write()
	held(done)
	start(t, 0, elsewhere{disk.Open("default", nil), blockdev.Ref{Kind: v.ID.Kind, Key: v.ID.Key}})
	goesOn(done)
	fails(t, release(), errdefs.ErrUnavailable, "thawed by a start")

	drivertest.Unmount(t, dir)
	fresh, err := l.Get(t.Context(), v.ID)
	check.OK(t, err)
	device, err := l.AttachRaw(t.Context(), fresh, nil, true)
	check.OK(t, err)
	check.OK(t, device.Close())
	release, err = l.Hold(t.Context(), v.ID)
	if release != nil || err != nil {
		t.Errorf("of a raw device: %v", err)
	}
	drop(t, l, v)
}

func freeze(dir string, on bool) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	request := uint(0xc0045878) // FITHAW
	if on {
		request = 0xc0045877 // FIFREEZE
	}
	return unix.IoctlSetInt(int(f.Fd()), request, 0)
}

// crash is the panic that stands for the end of a process.
type crash struct{}

// life runs do with the store of a new process over a pool. step is called at each step of the pool and the target. If it panics with crash, the process has
// ended, and life returns errBroken.
func life(t *testing.T, url string, k *target, step func(string) error, do func(*volume.Local) error) (err error) {
	t.Helper()
	pool := opened(t, "default", url)
	defer func() {
		if ended := recover(); ended != nil && ended != (crash{}) {
			panic(ended)
		} else if ended != nil {
			err = errBroken
		}
		k.step = nil
		check.OK(t, pool.Close())
	}()
	l := start(t, 0, &stepping{pool, step})
	k.step = step
	serve(t, l, k, nil)
	return do(l)
}

// whole makes sure that a volume is exported to the node that its record says, and to no other.
func whole(t *testing.T, l *volume.Local, k *target, id volume.ID) {
	t.Helper()
	have, _, err := l.ExportOf(t.Context(), id)
	check.OK(t, err)
	exportedTo(t, l, k, id, have)
}

// cutShort lets the calls for exports fail, or the process end, before and after each of their steps. In each case a repeated call succeeds, and nothing is
// left. each: only every so many steps are taken. ways are what happens: "fails", "ends the process" or "ends the machine".
func cutShort(t *testing.T, url string, each int, ways ...string) {
	k := newTarget(t)
	nothing := func(string) error { return nil }
	var v volume.Volume
	check.OK(t, life(t, url, k, nothing, func(l *volume.Local) (err error) {
		v, err = l.Create(t.Context(), volume.Spec{Name: "a", Size: volume.Range{Required: 4 * mib}})
		return err
	}))
	export := func(to volume.Grant) func(*volume.Local) error {
		return func(l *volume.Local) error { return second(l.Export(t.Context(), v.ID, to)) }
	}
	size := v.Size
	for _, c := range []struct {
		what   string
		before func(*volume.Local) error
		do     func(*volume.Local) error
		want   volume.Grant
	}{
		{"export", nil, export(grant(1, "b")), grant(1, "b")},
		{"export to another", export(grant(1, "b")), export(grant(2, "c")), grant(2, "c")},
		{"end", export(grant(1, "b")), func(l *volume.Local) error { return l.Unexport(t.Context(), v.ID, 1) }, volume.Grant{}},
		{"grow", export(grant(1, "b")), func(l *volume.Local) error {
			return second(l.Expand(t.Context(), v.ID, volume.Range{Required: size + 4*mib}))
		}, grant(1, "b")},
		{"attach at home", export(grant(1, "b")), func(l *volume.Local) error {
			device, err := l.Attach(t.Context(), v, nil)
			return errors.Join(err, device.Close())
		}, volume.Grant{}},
	} {
		steps := 0
		for n := 1; ; n += each {
			at, reached := "", false
			for _, ends := range ways {
				if c.before != nil {
					check.OK(t, life(t, url, k, nothing, c.before))
				}
				left := n
				reached = false
				armed := false
				step := func(what string) error {
					if left--; !armed || left != 0 {
						return nil
					}
					at, reached = what, true
					if ends != "fails" {
						panic(crash{})
					}
					return errBroken
				}
				err := life(t, url, k, step, func(l *volume.Local) error {
					left, armed = n, true // only the call is cut short, not the start
					err := c.do(l)
					armed = false
					if reached && ends == "fails" {
						if err == nil {
							t.Errorf("%s: %q failed, and nobody says so", c.what, at)
						}
						err = c.do(l)
					}
					return err
				})
				if crashed := reached && ends != "fails"; crashed != (err != nil) {
					t.Fatalf("%s, %q %s: %v", c.what, at, ends, err)
				}
				if ends == "ends the machine" {
					k.reboot()
				}
				check.OK(t, life(t, url, k, nothing, func(l *volume.Local) error {
					whole(t, l, k, v.ID)
					if err := c.do(l); err != nil {
						return err
					}
					exportedTo(t, l, k, v.ID, c.want)
					size = must(l.Get(t.Context(), v.ID)).Size
					if e, is := sole(k.exports); is && deviceSize(t, e.Device) != size {
						t.Errorf("the device that is exported has %d bytes, not %d", deviceSize(t, e.Device), size)
					}
					if err := l.Unexport(t.Context(), v.ID, 0); err != nil {
						return err
					}
					// A device that is not kept goes with its last user, as a scanner of the machine.
					if devices := must(l.Attached(t.Context(), v.ID)); slices.ContainsFunc(devices, func(d blockdev.Device) bool { return d.Kept }) {
						t.Errorf("%s, %q %s: attached as %v", c.what, at, ends, devices)
					}
					return nil
				}))
				if len(k.exports) > 0 {
					t.Errorf("%s, %q %s: the kernel has %v", c.what, at, ends, k.exports)
				}
				if t.Failed() {
					t.Fatalf("%s, %q %s", c.what, at, ends)
				}
			}
			if !reached {
				break
			}
			steps++
		}
		if steps < 2 {
			t.Errorf("%s has %d steps", c.what, steps)
		}
	}
	check.OK(t, life(t, url, k, nothing, func(l *volume.Local) error { return l.Delete(t.Context(), v.ID) }))
}

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

func sole(exports map[string]nvmet.Export) (nvmet.Export, bool) {
	for _, e := range exports {
		return e, true
	}
	return nvmet.Export{}, false
}

func deviceSize(t *testing.T, path string) int64 {
	t.Helper()
	f, err := os.Open(path)
	check.OK(t, err)
	defer f.Close()
	size, err := blockdev.DeviceSize(f)
	check.OK(t, err)
	return size
}

func TestExportCutShort(t *testing.T) {
	cutShort(t, filesURL(t), 1, "fails", "ends the process", "ends the machine")
}

func TestLVMExportCutShort(t *testing.T) {
	drivertest.NeedLVM(t)
	cutShort(t, drivertest.NewGroup(t, 256*mib).ThinPool(t, "tp", "-L", "160M", "--poolmetadatasize", "8M")+"?reservePercent=0", 2, "ends the process")
}

// TestLVMExportEncrypted: of an encrypted volume the pool's device is exported, with the header and without a key. For a copy of a volume that the consumer has
// not mounted, that device is suspended.
func TestLVMExportEncrypted(t *testing.T) {
	drivertest.NeedLVM(t)
	k, c := newTarget(t), &consumer{nothing: true}
	l := start(t, 0, open(t, "default", drivertest.NewGroup(t, 256*mib).URL()+"?reservePercent=0"))
	serve(t, l, k, c)
	v, err := l.Create(t.Context(), volume.Spec{Name: "a", Size: volume.Range{Required: 16 * mib}, Encryption: volume.Encryption{Scheme: volume.LUKS2}})
	check.OK(t, err)
	e, err := l.Export(t.Context(), v.ID, grant(1, "b"))
	check.OK(t, err)
	if want := v.Size + volume.LUKS2.Overhead(); e.Size != want || deviceSize(t, k.exports[e.NQN].Device) != want {
		t.Errorf("exported are %d bytes, want %d", e.Size, want)
	}
	devices, err := l.Attached(t.Context(), v.ID)
	check.OK(t, err)
	if len(devices) != 1 || !devices[0].Kept || devices[0].Path != k.exports[e.NQN].Device || devices[0].Below == "" {
		t.Errorf("attached as %+v", devices)
	}
	check.OK(t, second(l.Expand(t.Context(), v.ID, volume.Range{Required: 32 * mib})))
	if size, want := deviceSize(t, k.exports[e.NQN].Device), 32*mib+volume.LUKS2.Overhead(); size < want {
		t.Errorf("it grew to %d bytes, want %d", size, want)
	}
	s, err := l.CreateSnapshot(t.Context(), "s", v.ID)
	check.OK(t, err)
	same(t, "asked", c.taken(), []string{"hold b"})
	if left := suspended(t); len(left) > 0 {
		t.Errorf("suspended: %v", left)
	}
	check.OK(t, l.Unexport(t.Context(), v.ID, 1))
	check.OK(t, l.DeleteSnapshot(t.Context(), s.ID))
	check.OK(t, l.Delete(t.Context(), v.ID))
}

// TestExportKey: the key of a node is made once, at random, in a file of mode 0600. A file of another length is refused (ErrDataLoss).
func TestExportKey(t *testing.T) {
	path := filepath.Join(t.TempDir(), "key")
	check.OK(t, os.WriteFile(path+".new", []byte("cut short"), 0o600))
	first, err := volume.ExportKey(path)
	check.OK(t, err)
	again, err := volume.ExportKey(path)
	check.OK(t, err)
	info, err := os.Stat(path)
	check.OK(t, err)
	if len(first) != 32 || !slices.Equal(first, again) || info.Mode() != 0o600 || slices.Equal(first, make([]byte, 32)) {
		t.Errorf("%d bytes, again %d, mode %v", len(first), len(again), info.Mode())
	}
	check.OK(t, os.WriteFile(path, first[1:], 0o600))
	fails(t, second(volume.ExportKey(path)), errdefs.ErrDataLoss, "a key that is cut short")
	fails(t, second(volume.ExportKey(filepath.Join(path, "key"))), unix.ENOTDIR, "no such folder")
}

// TestExportRecordDamaged: an export of a volume whose record is damaged is ended only by an Unexport of all generations.
func TestExportRecordDamaged(t *testing.T) {
	url, k := filesURL(t), newTarget(t)
	pool := opened(t, "default", url)
	l := start(t, 0, pool)
	serve(t, l, k, nil)
	v := create(t, l, "a")
	check.OK(t, second(l.Export(t.Context(), v.ID, grant(7, "b"))))
	check.OK(t, pool.Close())
	dir, _, _ := strings.Cut(strings.TrimPrefix(url, "file://"), "?")
	record := filepath.Join(dir, "volumes", v.ID.Key+".rec")
	good, err := os.ReadFile(record)
	check.OK(t, err)
	check.OK(t, os.WriteFile(record, make([]byte, len(good)), 0o600))
	pool = opened(t, "default", url)
	l = start(t, 0, pool)
	serve(t, l, k, nil)
	fails(t, l.Unexport(t.Context(), v.ID, 7), errdefs.ErrDataLoss, "the end of one export")
	if len(k.exports) != 1 {
		t.Errorf("exported are %v", k.exports)
	}
	check.OK(t, l.Unexport(t.Context(), v.ID, 0))
	if len(k.exports) != 0 {
		t.Errorf("exported are %v", k.exports)
	}
	devices, err := l.Attached(t.Context(), v.ID)
	check.OK(t, errors.Join(err, pool.Close()))
	if len(devices) != 0 {
		t.Errorf("attached as %v", devices)
	}
}
