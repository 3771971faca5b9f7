package nvmet_test

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"maps"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/secret"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/nvmet"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

const mib = 1 << 20

// order is what a child process does with a target, and the change before which it is killed.
type order struct {
	Add    *nvmet.Export `json:"-"`
	Told   *revealed     // Add, with the secrets
	Remove string
	Dies   int
	Late   bool // changes are counted after the target is opened
}

// revealed is an export with its secrets, which the Export itself does not encode.
type revealed struct {
	nvmet.Export
	Secret, PSK string
}

// newSecret returns a new secret, as a home makes it.
func newSecret() secret.Text {
	key := make([]byte, 32)
	_, _ = rand.Read(key) // it never fails
	return nvmet.Secret(key)
}

func TestMain(m *testing.M) {
	nvmet.NoGrace()
	if text := os.Getenv("ASHLAR_ORDER"); text != "" {
		var o order
		err := json.Unmarshal([]byte(text), &o)
		if err == nil {
			err = o.obey()
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func (o order) obey() error {
	changes := 0
	dies := func() {
		if changes == o.Dies {
			_ = unix.Kill(os.Getpid(), unix.SIGKILL)
			select {}
		}
		changes++
	}
	if !o.Late {
		nvmet.OnChange(dies)
	}
	target, err := nvmet.Open(netip.MustParseAddrPort(address))
	if err != nil {
		return err
	}
	nvmet.OnChange(dies)
	if o.Told != nil {
		o.Told.Export.Secret, o.Told.Export.PSK = secret.Of(o.Told.Secret), secret.Of(o.Told.PSK)
		return target.Add(context.Background(), o.Told.Export)
	}
	return target.Remove(context.Background(), o.Remove)
}

// run has a child carry out an order, and reports whether it was killed before the end.
func (o order) run(t *testing.T) (killed bool) {
	t.Helper()
	if o.Add != nil {
		o.Told = &revealed{*o.Add, o.Add.Secret.Reveal(), o.Add.PSK.Reveal()}
	}
	text, err := json.Marshal(o)
	check.OK(t, err)
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "ASHLAR_ORDER="+string(text))
	said, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if errors.As(err, &exit) && !exit.Exited() {
		return true
	}
	if err != nil {
		t.Fatalf("%+v: %v: %s", o, err, said)
	}
	return false
}

// state returns all that the kernel's target has: folders, links and attributes, without those that differ each time.
func state(t *testing.T) map[string]string {
	t.Helper()
	found := map[string]string{}
	check.OK(t, filepath.WalkDir(nvmet.Root, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.Name() == "attr_serial":
		case entry.IsDir():
			found[path] = "folder"
		case entry.Type()&fs.ModeSymlink != 0:
			found[path] = "link"
		default:
			value, err := os.ReadFile(path)
			found[path] = strings.TrimSpace(string(value))
			if err != nil && !errors.Is(err, fs.ErrPermission) {
				found[path] = err.Error()
			}
		}
		return nil
	}))
	return found
}

func same(t *testing.T, when string, want map[string]string) {
	t.Helper()
	have := state(t)
	if maps.Equal(have, want) {
		return
	}
	for _, path := range slices.Sorted(maps.Keys(have)) {
		if want[path] != have[path] {
			t.Errorf("%s: %s is %q, want %q", when, path, have[path], want[path])
		}
	}
	for path := range want {
		if _, is := have[path]; !is {
			t.Errorf("%s: there is no %s", when, path)
		}
	}
	t.FailNow()
}

func export(t *testing.T, n int) *nvmet.Export {
	return &nvmet.Export{
		NQN: fmt.Sprintf("%s%032x:1:%016x", nvmet.Prefix, n, n), Host: fmt.Sprintf("%snode:b:%016x", nvmet.Prefix, n),
		UUID: fmt.Sprintf("%08x-0000-4000-8000-000000000000", n), Device: drivertest.Disk(t, mib), Secret: newSecret(),
	}
}

const address = "127.0.0.1:4420"

// needTarget opens the target, which mounts configfs. At the end of the test nothing of it may be left.
func needTarget(t *testing.T) *nvmet.Target {
	t.Helper()
	drivertest.NeedNVMe(t)
	target, err := nvmet.Open(netip.MustParseAddrPort(address))
	check.OK(t, err)
	before := state(t)
	t.Cleanup(func() { same(t, "at the end of the test", before) })
	return target
}

// TestKilled kills processes that add and remove exports before each of their changes. A retry brings about the same as without that.
func TestKilled(t *testing.T) {
	for _, c := range []struct {
		name   string
		beside bool
	}{{"first", false}, {"beside another", true}} {
		t.Run(c.name, func(t *testing.T) {
			target := needTarget(t)
			if c.beside {
				other := export(t, 9)
				check.OK(t, target.Add(t.Context(), *other))
				defer func() { check.OK(t, target.Remove(t.Context(), other.NQN)) }()
			}
			// As a driver does that starts again: it opens the target.
			e := export(t, 1)
			add := func() { check.OK(t, again(t).Add(t.Context(), *e)) }
			remove := func() { check.OK(t, again(t).Remove(t.Context(), e.NQN)) }
			without := state(t)
			add()
			with := state(t)
			remove()
			same(t, "removed", without)

			for point, killed := 0, true; killed; point++ {
				killed = order{Add: e, Dies: point}.run(t)
				add()
				same(t, fmt.Sprintf("killed before change %d of adding, then added", point), with)
				remove()
				if !c.beside {
					order{Add: e, Dies: point}.run(t)
					remove()
				}
				again(t)
				same(t, fmt.Sprintf("killed before change %d of adding, then removed", point), without)
				t.Logf("change %d of adding: killed %t", point, killed)
			}
			for point, killed := 0, true; killed; point++ {
				add()
				killed = order{Remove: e.NQN, Dies: point}.run(t)
				remove()
				same(t, fmt.Sprintf("killed before change %d of removing, then removed", point), without)
				if !c.beside {
					add()
					order{Remove: e.NQN, Dies: point}.run(t)
					add()
					same(t, fmt.Sprintf("killed before change %d of removing, then added", point), with)
					remove()
				}
				t.Logf("change %d of removing: killed %t", point, killed)
			}
		})
	}
}

// TestCutShort ends Add and Remove before each change, as an error does. The next Remove then leaves nothing, without a start of the driver in between.
func TestCutShort(t *testing.T) {
	target := needTarget(t)
	other := export(t, 9)
	check.OK(t, target.Add(t.Context(), *other))
	defer func() { check.OK(t, target.Remove(t.Context(), other.NQN)) }()
	without, e := state(t), export(t, 1)
	for point, cut := 0, true; cut; point++ {
		cut = order{Add: e, Dies: point, Late: true}.run(t)
		check.OK(t, target.Remove(t.Context(), e.NQN))
		same(t, fmt.Sprintf("cut short before change %d of adding, and removed", point), without)
	}
	for point, cut := 0, true; cut; point++ {
		check.OK(t, target.Add(t.Context(), *e))
		cut = order{Remove: e.NQN, Dies: point, Late: true}.run(t)
		check.OK(t, target.Remove(t.Context(), e.NQN))
		same(t, fmt.Sprintf("cut short before change %d of removing, and removed", point), without)
	}
}

// again returns the target of a driver that starts.
func again(t *testing.T) *nvmet.Target {
	t.Helper()
	target, err := nvmet.Open(netip.MustParseAddrPort(address))
	check.OK(t, err)
	return target
}

// TestAgain: a second Add changes nothing.
func TestAgain(t *testing.T) {
	target := needTarget(t)
	e := export(t, 1)
	check.OK(t, target.Add(t.Context(), *e))
	defer func() { check.OK(t, target.Remove(t.Context(), e.NQN)) }()
	changes := 0
	nvmet.OnChange(func() { changes++ })
	defer nvmet.OnChange(func() {})
	check.OK(t, target.Add(t.Context(), *e))
	if changes != 0 {
		t.Errorf("again, it changed %d things", changes)
	}
}

// TestOthers: what is not ours stays. The error for an address that is used, or not of this machine, comes at once.
func TestOthers(t *testing.T) {
	target := needTarget(t)
	const theirs = nvmet.Root + "/subsystems/nqn.2020-01.com.example:theirs"
	check.OK(t, os.Mkdir(theirs, 0o755))
	check.OK(t, os.Mkdir(nvmet.Root+"/hosts/nqn.2020-01.com.example:host", 0o755))
	check.OK(t, os.Mkdir(nvmet.Root+"/ports/1", 0o755))
	defer func() {
		for _, path := range []string{"/ports/1", "/hosts/nqn.2020-01.com.example:host", "/subsystems/nqn.2020-01.com.example:theirs"} {
			check.OK(t, os.Remove(nvmet.Root+path))
		}
	}()
	before := state(t)
	e := export(t, 1)
	check.OK(t, target.Add(t.Context(), *e))
	found, err := target.Exports(t.Context())
	if want := (nvmet.Export{NQN: e.NQN, Host: e.Host, UUID: e.UUID, Device: e.Device}); err != nil || !slices.Equal(found, []nvmet.Export{want}) {
		t.Errorf("the exports are %+v, %v; want %+v", found, err, want)
	}
	given := func(want bool) {
		t.Helper()
		if is, err := nvmet.Given(e.NQN); is != want || err != nil {
			t.Errorf("given: %v, %v", is, err)
		}
	}
	given(true)
	check.OK(t, target.Remove(t.Context(), e.NQN))
	check.OK(t, target.Remove(t.Context(), e.NQN))
	given(false)
	again(t) // Open sweeps
	same(t, "after an export", before)

	if _, err := nvmet.Open(netip.MustParseAddrPort("192.0.2.1:4420")); !errors.Is(err, errdefs.ErrUnavailable) || !strings.Contains(err.Error(), "no address of this node") {
		t.Errorf("at an address of nobody: %v", err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	check.OK(t, err)
	defer listener.Close()
	if _, err := nvmet.Open(netip.MustParseAddrPort(listener.Addr().String())); !errors.Is(err, errdefs.ErrUnavailable) || !strings.Contains(err.Error(), "something else listens") {
		t.Errorf("at an address that is used: %v", err)
	}
}

// TestMoves: the node's address has changed. Exports appear there as well; their users stay connected at the earlier address, until nothing is exported
// there any more.
func TestMoves(t *testing.T) {
	target := needTarget(t)
	one, two := export(t, 1), export(t, 2)
	check.OK(t, target.Add(t.Context(), *one, *two))
	moved, err := nvmet.Open(netip.MustParseAddrPort("[::1]:4421"))
	check.OK(t, err)
	check.OK(t, moved.Add(t.Context(), *one, *two))
	three := export(t, 3)
	check.OK(t, moved.Add(t.Context(), *three))
	listens := func(want ...string) {
		t.Helper()
		if all, err := nvmet.Ports(); err != nil || len(all) != len(want) {
			t.Errorf("the ports are %q, %v; want those of %q", all, err, want)
		}
		for _, address := range want {
			c, err := net.Dial("tcp", address)
			check.OK(t, err)
			c.Close()
		}
	}
	listens(address, "[::1]:4421")
	check.OK(t, moved.Remove(t.Context(), one.NQN))
	listens(address, "[::1]:4421")
	check.OK(t, moved.Remove(t.Context(), two.NQN))
	listens("[::1]:4421")
	check.OK(t, moved.Remove(t.Context(), three.NQN))
	listens()
}

// TestMovesSwitched: an export that appears at an earlier address, with TLS or without, appears nowhere the other way. It does not keep others from
// appearing at the new address.
func TestMovesSwitched(t *testing.T) {
	target := needTarget(t)
	if errors.Is(nvmet.TLS(), errdefs.ErrUnsupported) {
		t.Skip("this kernel has no TLS")
	}
	elsewhere, err := nvmet.Open(netip.MustParseAddrPort("127.0.0.2:4420"))
	check.OK(t, err)
	for _, tls := range []bool{false, true} {
		way := map[bool]secret.Text{tls: {}, !tls: newPSK()}
		used, next := export(t, 1), export(t, 2)
		used.PSK, next.PSK = way[false], way[true]
		check.OK(t, target.Add(t.Context(), *used))
		before, other := state(t), *used
		other.PSK = way[true]
		if err := elsewhere.Add(t.Context(), other); !errors.Is(err, nvmet.ErrOtherwise) {
			t.Errorf("used with TLS %t, and given the other way at another address: %v", used.PSK != (secret.Text{}), err)
		}
		same(t, "given the other way at another address", before)
		check.OK(t, elsewhere.Add(t.Context(), *next))
		check.OK(t, elsewhere.Add(t.Context(), *used)) // it stays at the earlier address
		if at := appears(t, used.NQN); len(at) != 1 || slices.Equal(at, appears(t, next.NQN)) {
			t.Errorf("it appears at %q, and what is new at %q", at, appears(t, next.NQN))
		}
		check.OK(t, errors.Join(elsewhere.Remove(t.Context(), used.NQN), elsewhere.Remove(t.Context(), next.NQN)))
	}
}

// appears returns the ports at which a subsystem appears.
func appears(t *testing.T, nqn string) (at []string) {
	t.Helper()
	all, err := nvmet.Ports()
	check.OK(t, err)
	for _, port := range all {
		if _, err := os.Lstat(filepath.Join(port, "subsystems", nqn)); err == nil {
			at = append(at, port)
		}
	}
	return at
}

// TestDiffers: an export is not changed into another one, one that cannot be made does not hold up the others, and no error has a secret.
func TestDiffers(t *testing.T) {
	target := needTarget(t)
	e, bad := export(t, 1), export(t, 2)
	bad.Device = "/dev/missing"
	err := target.Add(t.Context(), *bad, *e)
	if err == nil || !strings.Contains(err.Error(), bad.Device) || strings.Contains(err.Error(), bad.Secret.Reveal()) {
		t.Errorf("a device that is not there: %v", err)
	}
	if c, err := net.Dial("tcp", address); err != nil {
		t.Error(err)
	} else {
		c.Close()
	}
	if found, err := target.Exports(t.Context()); err != nil || len(found) != 2 || found[0].Device+found[1].Device != e.Device {
		t.Errorf("the exports are %+v, %v", found, err)
	}
	check.OK(t, target.Remove(t.Context(), bad.NQN))
	for what, change := range map[string]func(e *nvmet.Export){
		"UUID":   func(e *nvmet.Export) { e.UUID = "ffffffff-0000-4000-8000-000000000000" },
		"device": func(e *nvmet.Export) { e.Device = bad.Device },
	} {
		other := *e
		change(&other)
		if err := target.Add(t.Context(), other); !errors.Is(err, errdefs.ErrExists) {
			t.Errorf("with another %s: %v", what, err)
		}
	}
	if err := target.Resized(t.Context(), bad.NQN); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("the size of what is not exported: %v", err)
	}
	info, err := os.Stat(nvmet.Root + "/hosts/" + e.Host + "/dhchap_key")
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the secret can be read by %v, %v", info.Mode(), err)
	}
	check.OK(t, target.Remove(t.Context(), e.NQN))
}

func TestRefused(t *testing.T) {
	e := nvmet.Export{NQN: nvmet.Prefix + "a", Host: nvmet.Prefix + "b", UUID: "00000000-0000-4000-8000-000000000000", Device: "/dev/x", Secret: newSecret()}
	for what, change := range map[string]func(e *nvmet.Export){
		"no name":        func(e *nvmet.Export) { e.NQN = "" },
		"another's name": func(e *nvmet.Export) { e.NQN = "nqn.2020-01.com.example:a" },
		"a path":         func(e *nvmet.Export) { e.NQN = nvmet.Prefix + "a/../../x" },
		"a host":         func(e *nvmet.Export) { e.Host = nvmet.Prefix + "a,b" },
		"a UUID":         func(e *nvmet.Export) { e.UUID = strings.ToUpper("abcdefab-0000-4000-8000-000000000000") },
		"a secret":       func(e *nvmet.Export) { e.Secret = secret.Of("secret") },
		"a PSK":          func(e *nvmet.Export) { e.PSK = e.Secret },
	} {
		other := e
		change(&other)
		err := nvmet.Unopened(true).Add(t.Context(), other)
		if !errors.Is(err, errdefs.ErrInvalid) || strings.Contains(err.Error(), "DHHC-1:00") {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := nvmet.Unopened(false).Add(t.Context(), e); !errors.Is(err, errdefs.ErrUnsupported) {
		t.Errorf("a secret that no host is asked for: %v", err)
	}
}

func TestSecret(t *testing.T) {
	one, other := newSecret(), newSecret()
	if one == other {
		t.Error("two secrets are the same")
	}
	parts := regexp.MustCompile(`^DHHC-1:00:([A-Za-z0-9+/=]{48}):$`).FindStringSubmatch(one.Reveal())
	if parts == nil {
		t.Fatalf("a secret is %q", one.Reveal())
	}
	key, err := base64.StdEncoding.DecodeString(parts[1])
	if err != nil || len(key) != 36 || crc32.ChecksumIEEE(key[:32]) != binary.LittleEndian.Uint32(key[32:]) {
		t.Errorf("a secret has %d bytes, %v", len(key), err)
	}
}

// TestTLS: exports with TLS are alone at their address, and their keys go with them. A kernel without TLS is an error that says so. This needs no tlshd,
// as nobody connects.
func TestTLS(t *testing.T) {
	target := needTarget(t)
	plain, other, hidden := export(t, 1), export(t, 2), export(t, 3)
	other.PSK, hidden.PSK = newPSK(), newPSK()
	if errors.Is(nvmet.TLS(), errdefs.ErrUnsupported) {
		before := state(t)
		if err := target.Add(t.Context(), *hidden); !errors.Is(err, errdefs.ErrUnsupported) || strings.Contains(err.Error(), hidden.PSK.Reveal()) {
			t.Errorf("without TLS in the kernel: %v", err)
		}
		same(t, "after an export that cannot be", before)
		return
	}
	check.OK(t, target.Add(t.Context(), *plain))
	if err := target.Add(t.Context(), *hidden); !errors.Is(err, errdefs.ErrUnavailable) || !strings.Contains(err.Error(), "with TLS") {
		t.Errorf("with TLS, where there is something without: %v", err)
	}
	// As a driver does that starts again, and demands TLS now: used exports stay.
	before := state(t)
	now := *plain
	now.PSK = newPSK()
	if err := again(t).Add(t.Context(), now); !errors.Is(err, nvmet.ErrOtherwise) || !strings.Contains(err.Error(), "with TLS") {
		t.Errorf("exported again, and TLS is demanded: %v", err)
	}
	same(t, "exported again, and TLS is demanded", before)
	check.OK(t, target.Remove(t.Context(), plain.NQN))

	check.OK(t, target.Add(t.Context(), *hidden, *other))
	all, err := nvmet.Ports()
	if check.OK(t, err); len(all) != 1 {
		t.Fatalf("the ports are %q", all)
	}
	for attribute, want := range map[string]string{"addr_tsas": "tls1.3", "addr_treq": "required"} {
		if have, err := os.ReadFile(filepath.Join(all[0], attribute)); err != nil || strings.TrimSpace(string(have)) != want {
			t.Errorf("%s is %q, %v; want %s", attribute, have, err, want)
		}
	}
	if err := target.Add(t.Context(), *plain); !errors.Is(err, errdefs.ErrUnavailable) || !strings.Contains(err.Error(), "without TLS") {
		t.Errorf("without TLS, where there is something with: %v", err)
	}
	check.OK(t, target.Remove(t.Context(), plain.NQN))
	keys := func(e *nvmet.Export) []string { return drivertest.Keys(t, "NVMe1R01 "+e.Host+" "+e.NQN) }
	if len(keys(hidden)) != 1 || len(keys(other)) != 1 || len(keys(plain)) != 0 {
		t.Errorf("the keys are %q", drivertest.Keys(t, nvmet.Prefix))
	}
	// A home that has lost its key uses another host and secret: nobody connects by the earlier ones any more.
	of := func() []string { return drivertest.Keys(t, other.NQN) }
	lost := *other
	lost.Host, lost.PSK = nvmet.Prefix+"node:b:lost", newPSK()
	check.OK(t, target.Add(t.Context(), lost))
	if more := drivertest.Gone(func() []string { return of()[1:] }); len(more) > 0 || !strings.Contains(of()[0], lost.Host) {
		t.Errorf("after another host and another secret the keys are %q", of())
	}
	check.OK(t, target.Add(t.Context(), *other))
	if more := drivertest.Gone(func() []string { return of()[1:] }); len(more) > 0 || !strings.Contains(of()[0], other.Host) {
		t.Errorf("after those of before again the keys are %q", of())
	}
	check.OK(t, target.Remove(t.Context(), hidden.NQN))
	if left := drivertest.Gone(func() []string { return keys(hidden) }); len(left) > 0 || len(keys(other)) != 1 {
		t.Errorf("after the end of one the keys are %q", drivertest.Keys(t, nvmet.Prefix))
	}
	// Another tool removes it from the kernel, and does not know of the key. A start of the driver removes that, and so does the end of the export.
	for _, ends := range []func(){func() { again(t) }, func() { check.OK(t, target.Remove(t.Context(), other.NQN)) }} {
		check.OK(t, target.Add(t.Context(), *other))
		cleared(t, other)
		if len(keys(other)) != 1 {
			t.Errorf("after it was cleared the keys are %q", drivertest.Keys(t, nvmet.Prefix))
		}
		ends()
		if left := drivertest.Gone(func() []string { return keys(other) }); len(left) > 0 {
			t.Errorf("of what was cleared the keys are %q", left)
		}
	}
	keyTaken(t, target, other)
	check.OK(t, target.Add(t.Context(), *plain)) // and without TLS again
	check.OK(t, target.Remove(t.Context(), plain.NQN))
}

// keyTaken: somebody removes the key of an export, so that nobody can connect again. Exports does not show the export as whole before it is exported
// again.
func keyTaken(t *testing.T, target *nvmet.Target, e *nvmet.Export) {
	t.Helper()
	whole := func() bool {
		found, err := target.Exports(t.Context())
		return err == nil && len(found) == 1 && found[0].Device == e.Device
	}
	ring := number(t, drivertest.Keys(t, " .nvme:")[0])
	for what, take := range map[string]func(serial int) error{
		"unlinked": func(int) error {
			_, err := unix.KeyctlInt(unix.KEYCTL_CLEAR, ring, 0, 0, 0)
			return err
		},
		"revoked": func(serial int) error { // whoever has its keyring may do that
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			_, err := unix.KeyctlInt(unix.KEYCTL_LINK, ring, unix.KEY_SPEC_THREAD_KEYRING, 0, 0)
			check.OK(t, err)
			_, err = unix.KeyctlInt(unix.KEYCTL_REVOKE, serial, 0, 0, 0)
			_, failure := unix.KeyctlInt(unix.KEYCTL_UNLINK, ring, unix.KEY_SPEC_THREAD_KEYRING, 0, 0)
			return errors.Join(err, failure)
		},
	} {
		check.OK(t, target.Add(t.Context(), *e))
		if !whole() {
			t.Error("with its key it is not whole")
		}
		if more := drivertest.Gone(func() []string { return drivertest.Keys(t, e.NQN)[1:] }); len(more) > 0 { // earlier keys
			t.Fatalf("keys of before are left: %q", more)
		}
		check.OK(t, take(number(t, drivertest.Keys(t, e.NQN)[0])))
		if whole() {
			t.Errorf("with its key %s it is whole", what)
		}
		check.OK(t, target.Add(t.Context(), *e))
		if !whole() {
			t.Errorf("after its key was %s it is exported again, and not whole", what)
		}
		check.OK(t, target.Remove(t.Context(), e.NQN))
	}
}

// number returns the number of a key, as the kernel shows it.
func number(t *testing.T, line string) int {
	t.Helper()
	n, err := strconv.ParseInt(strings.Fields(line)[0], 16, 32)
	check.OK(t, err)
	return int(n)
}

// cleared removes an export from the kernel as nvmetcli does.
func cleared(t *testing.T, e *nvmet.Export) {
	t.Helper()
	all, err := nvmet.Ports()
	check.OK(t, err)
	for _, port := range all {
		check.OK(t, errors.Join(os.Remove(filepath.Join(port, "subsystems", e.NQN)), os.Remove(port)))
	}
	subsystem := filepath.Join(nvmet.Root, "subsystems", e.NQN)
	for _, path := range []string{filepath.Join(subsystem, "allowed_hosts", e.Host), filepath.Join(subsystem, "namespaces/1"), subsystem, filepath.Join(nvmet.Root, "hosts", e.Host)} {
		check.OK(t, os.Remove(path))
	}
}

// TestUnlinked: somebody unlinks a part of an export, so that nobody can connect. Exports shows it without its device or its host, until it is exported
// again.
func TestUnlinked(t *testing.T) {
	target := needTarget(t)
	e := export(t, 1)
	check.OK(t, target.Add(t.Context(), *e))
	before := state(t)
	all, err := nvmet.Ports()
	if check.OK(t, err); len(all) != 1 {
		t.Fatalf("the ports are %q", all)
	}
	subsystem := filepath.Join(nvmet.Root, "subsystems", e.NQN)
	for what, c := range map[string]struct {
		paths []string
		want  nvmet.Export
	}{
		"from its port":     {[]string{filepath.Join(all[0], "subsystems", e.NQN)}, nvmet.Export{NQN: e.NQN, Host: e.Host}},
		"with its port":     {[]string{filepath.Join(all[0], "subsystems", e.NQN), all[0]}, nvmet.Export{NQN: e.NQN, Host: e.Host}},
		"from its host":     {[]string{filepath.Join(subsystem, "allowed_hosts", e.Host)}, nvmet.Export{NQN: e.NQN, UUID: e.UUID, Device: e.Device}},
		"its namespace":     {[]string{filepath.Join(subsystem, "namespaces/1")}, nvmet.Export{NQN: e.NQN, Host: e.Host}},
		"nothing, in truth": {nil, nvmet.Export{NQN: e.NQN, Host: e.Host, UUID: e.UUID, Device: e.Device}},
	} {
		for _, path := range c.paths {
			check.OK(t, os.Remove(path))
		}
		if found, err := target.Exports(t.Context()); err != nil || !slices.Equal(found, []nvmet.Export{c.want}) {
			t.Errorf("unlinked %s, the exports are %+v, %v; want %+v", what, found, err, c.want)
		}
		check.OK(t, target.Add(t.Context(), *e))
		same(t, "unlinked "+what+", and exported again", before)
	}
	check.OK(t, target.Remove(t.Context(), e.NQN))
}

// newPSK returns a new secret of TLS, as a home makes it.
func newPSK() secret.Text {
	key := make([]byte, 32)
	_, _ = rand.Read(key) // it never fails
	return nvmet.PSK(key)
}

// TestGivenWithout: a kernel without a target gives nothing.
func TestGivenWithout(t *testing.T) {
	if _, err := nvmet.Available(); !errors.Is(err, errdefs.ErrUnsupported) {
		t.Skip("this kernel has the target")
	}
	if is, err := nvmet.Given(nvmet.Prefix); is || err != nil {
		t.Errorf("given: %v, %v", is, err)
	}
}
